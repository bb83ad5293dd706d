"""Products of experts' rows of which an expert's last tile may have half the rows."""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.core import devices
from liger_kernel.ops.moe import experts, grouped_matmul
from liger_kernel.ops.moe.experts import experts_reference, liger_experts

ARCH = devices.arch(torch.empty(0, device=DEVICE))
T, H, I, E, K = 140, 72, 80, 4, 2  # noqa: E741
TILE_ROWS = 64
ROUTINGS = {
    "random": lambda index: index,
    "empty experts": lambda index: index % 2 * (E - 1),
    "one expert": lambda index: index * 0 + 1,
    "dropped": lambda index: index.where(index != 1, E).where(index != 2, -1),
    "none": lambda index: index * 0 - 1,
}


def random_inputs(dtype, transposed=False):
    generator = torch.Generator().manual_seed(0)
    shapes = dict(x=(T, H), gate_up_proj=(E, 2 * I, H), down_proj=(E, H, I), top_k_weights=(T, K))
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    inputs["gate_up_proj"] /= H**0.5
    if transposed:
        for name in ("gate_up_proj", "down_proj"):
            inputs[name] = inputs[name].mT.contiguous()
    inputs = {name: t.to(DEVICE, dtype).requires_grad_() for name, t in inputs.items()}
    index = torch.randint(E, (T, K), generator=generator).to(DEVICE)
    return inputs | dict(top_k_index=index)


def output_and_grads(fn, inputs, **options):
    leaves = {name: t for name, t in inputs.items() if t.requires_grad}
    out = fn(**inputs, **options)
    dout = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def in_fp64(inputs):
    return {
        name: t.detach().double().requires_grad_() if t.is_floating_point() else t
        for name, t in inputs.items()
    }


@pytest.fixture
def halved_tiles(monkeypatch):
    """Tiles of 64 rows and 32 columns, an expert's last one of 32 rows where that is enough."""
    launch = grouped_matmul.choose_launch

    def choose_launch(*args):
        return 32, launch(*args)[1] | dict(BLOCK_K=16)

    monkeypatch.setattr(grouped_matmul, "choose_launch", choose_launch)
    monkeypatch.setattr(experts, "choose_tile_rows", lambda *args: TILE_ROWS)
    monkeypatch.setattr(grouped_matmul, "MIN_HALVED_TILE", TILE_ROWS)
    monkeypatch.setattr(grouped_matmul, "HALF_TILES", (ARCH,))


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_against_fp64(dtype, act, transposed, halved_tiles):
    inputs = random_inputs(dtype, transposed)
    assert_exact(inputs, act=act, transposed=transposed)


@pytest.mark.parametrize("route", ROUTINGS)
def test_routings(route, halved_tiles):
    inputs = random_inputs(torch.bfloat16)
    assert_exact(inputs | dict(top_k_index=ROUTINGS[route](inputs["top_k_index"])))


def assert_exact(inputs, **options):
    """Off by no more than the reference in this dtype, and a few roundings of the largest entry."""
    actual = output_and_grads(liger_experts, inputs, **options)
    reference = output_and_grads(experts_reference, inputs, **options)
    exact = output_and_grads(experts_reference, in_fp64(inputs), **options)
    eps = torch.finfo(inputs["x"].dtype).eps
    for name, e in exact.items():
        bound = (reference[name].double() - e).abs().max() + 6 * eps * e.abs().max()
        assert (actual[name].double() - e).abs().max() <= bound, name


@pytest.mark.parametrize("route", ROUTINGS)
def test_the_same_bits_as_whole_tiles(route, halved_tiles, monkeypatch):
    inputs = random_inputs(torch.bfloat16)
    inputs["top_k_index"] = ROUTINGS[route](inputs["top_k_index"])
    halved = output_and_grads(liger_experts, inputs)
    monkeypatch.setattr(grouped_matmul, "HALF_TILES", ())
    whole = output_and_grads(liger_experts, inputs)
    for name, x in whole.items():
        torch.testing.assert_close(halved[name], x, rtol=0, atol=0, msg=name)
