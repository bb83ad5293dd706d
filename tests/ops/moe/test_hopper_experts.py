"""Outer products of experts on Hopper. Elsewhere PyTorch stands in for Gluon."""

import types

import pytest
import torch
from hardware import DEVICE

from liger_kernel.core import devices
from liger_kernel.ops.moe import hopper, outer_products
from liger_kernel.ops.moe.experts import experts_reference, liger_experts
from liger_kernel.ops.moe.routing import routing

B16 = torch.bfloat16
ARCH = devices.arch(torch.empty(0, device=DEVICE))
ON_HOPPER = pytest.mark.skipif(
    ARCH != "sm_90" or hopper.kernels() is None,
    reason="the kernel runs on Hopper, with a version of Triton that was tried",
)
# tokens, M, N, experts, experts of a token: whole tiles, parts of one, short rows, many tiles
SHAPES = (600, 256, 512, 4, 2), (333, 80, 272, 5, 3), (100, 16, 16, 3, 1), (2000, 2320, 784, 2, 2)
ROUTINGS = {
    "random": lambda index, E: index,
    "empty experts": lambda index, E: index % 2 * (E - 1),
    "one expert": lambda index, E: index * 0 + 1,
    "skewed": lambda index, E: index.where(torch.rand(index.shape, device=index.device) < 0.1, 0),
    "dropped": lambda index, E: index.where(index != 1, E),
    "none": lambda index, E: index * 0 - 1,
}


def outer_products_reference(a, x, c, top_k, order, offsets):
    """Write what `hopper_kernels.outer_products` does, in PyTorch."""
    bounds = offsets.tolist()
    for e, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        rows = slice(begin, end)
        c[e] = (a[rows].double().t() @ x[order[rows] // top_k].double()).to(c.dtype)


def make_problem(T, M, N, E, K, route):
    torch.manual_seed(0)
    index = ROUTINGS[route](torch.randint(E, (T, K), device=DEVICE), E)
    order, offsets, _ = routing(index, E, 128)
    a = torch.randn(T * K, M, device=DEVICE).to(B16)
    x = torch.randn(T, N, device=DEVICE).to(B16)
    return a, x, K, order, offsets


def empty_gradient(E, M, N, transposed, dtype=B16):
    c = torch.full((E, N, M) if transposed else (E, M, N), torch.nan, dtype=dtype, device=DEVICE)
    return c.mT if transposed else c


@ON_HOPPER
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("route", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_as_promised(shape, route, transposed):
    """A sum in fp32 of n products is off by n roundings of Σ|a·x|, and bf16 rounds once."""
    T, M, N, E, K = shape
    a, x, *rest = make_problem(*shape, route)
    c = empty_gradient(E, M, N, transposed)
    hopper.kernels().outer_products(a, x, c, *rest)
    exact = empty_gradient(E, M, N, False, torch.float64)
    outer_products_reference(a, x, exact, *rest)
    magnitude = torch.empty_like(exact)
    outer_products_reference(a.abs(), x.abs(), magnitude, *rest)
    bound = 2**-8 * exact.abs() + T * K * 2**-24 * magnitude
    assert ((c.double() - exact).abs() <= bound).all()  # and no NaN is left


@ON_HOPPER
@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=str)
def test_what_is_not_finite_stays_with_its_expert(value):
    """Rows of the next expert, rows of none, and tokens of others: of the first one, too, which is
    what a row beyond an expert's end might read."""
    E, M, N = 5, 80, 272
    torch.manual_seed(0)
    index = torch.randint(E, (333, 1), device=DEVICE)
    index[0] = 2
    index[1::7] = E
    order, offsets, _ = routing(index, E, 128)
    begin, end, last = offsets[2].item(), offsets[3].item(), offsets[E].item()
    assert begin % 64 and last % 64
    a = torch.randn(333, M, device=DEVICE).to(B16)
    x = torch.randn(333, N, device=DEVICE).to(B16)
    expected = empty_gradient(E, M, N, False)
    hopper.kernels().outer_products(a, x, expected, 1, order, offsets)
    a[begin:end] = value
    a[last:] = value
    x[index[:, 0] == 2] = value
    x[index[:, 0] == E] = value
    c = empty_gradient(E, M, N, False)
    hopper.kernels().outer_products(a, x, c, 1, order, offsets)
    others = [0, 1, 3, 4]
    assert torch.equal(c[others], expected[others]) and not c[2].isfinite().any()


@ON_HOPPER
def test_columns_of_wider_tensors():
    """Nothing is written beside the gradient."""
    a, x, *rest = make_problem(333, 96, 272, 5, 3, "random")
    wide = torch.full((7, 96, 272), torch.nan, dtype=B16, device=DEVICE)
    expected = empty_gradient(5, 80, 256, False)
    hopper.kernels().outer_products(
        a[:, 16:].contiguous(), x[:, :256].contiguous(), expected, *rest
    )
    hopper.kernels().outer_products(a[:, 16:], x[:, :256], wide[1:6, 16:, :256], *rest)
    assert torch.equal(wide[1:6, 16:, :256], expected)
    assert wide.isnan().sum() == wide.numel() - expected.numel()


@ON_HOPPER
def test_the_same_bits_again():
    shape = 5000, 512, 1024, 16, 4
    a, x, *rest = make_problem(*shape, "random")
    runs = [empty_gradient(16, 512, 1024, False) for _ in range(50)]
    for c in runs:
        hopper.kernels().outer_products(a, x, c, *rest)
    assert all(torch.equal(c, runs[0]) for c in runs)


@ON_HOPPER
@pytest.mark.thorough
def test_more_than_2_to_the_31_elements():
    M, N, S = 4096, 256, 2**19 + 1000
    a = torch.zeros(S, M, dtype=B16, device=DEVICE)
    x = torch.randn(S, N, device=DEVICE).to(B16)
    a[-100:] = torch.randn(100, M, device=DEVICE).to(B16)
    order = torch.arange(S, dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, S - 90, S], dtype=torch.int32, device=DEVICE)
    c = empty_gradient(2, M, N, False)
    hopper.kernels().outer_products(a, x, c, 1, order, offsets)
    for e, rows in enumerate((slice(S - 100, S - 90), slice(S - 90, S))):
        exact = a[rows].double().t() @ x[rows].double()
        assert (c[e].double() - exact).norm() <= 2**-8 * exact.norm()


# ---- when it is taken ----


def test_steps_aside(monkeypatch):
    pretended = types.SimpleNamespace(arch=lambda tensor: "sm_90")
    monkeypatch.setattr(hopper, "devices", pretended)
    monkeypatch.setattr(hopper, "kernels", object)
    S = hopper.MIN_ROWS * 2

    def empty(*shape, dtype=B16):
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    a, x, c = empty(S, 64), empty(9, 32), empty(2, 64, 32)
    assert hopper.applies(a, x, c) and hopper.applies(a, x, empty(2, 32, 64).mT)
    assert hopper.applies(empty(S, 128)[:, 64:], empty(9, 64)[:, :32], c)
    assert not hopper.applies(a[1:], x, c), "few rows"
    assert not hopper.applies(a.half(), x.half(), c.half())
    assert not hopper.applies(a.float(), x.float(), c.float())
    assert not hopper.applies(empty(S, 56), x, empty(2, 56, 32)), "columns of a"
    assert not hopper.applies(a, empty(9, 24), empty(2, 64, 24)), "columns of x"
    assert not hopper.applies(empty(S, 72)[:, :64], x, c), "the stride of a"
    assert not hopper.applies(a, empty(9, 40)[:, :32], c), "the stride of x"
    assert not hopper.applies(a, empty(32, 16).t(), empty(2, 64, 32)), "rows of x"
    assert not hopper.applies(a, empty(9, 64)[:, 4:36], c), "x begins amid 16 bytes"
    assert not hopper.applies(empty(S, 128)[:, 4:68], x, c), "a begins amid 16 bytes"
    assert not hopper.applies(a, x, empty(2, 64, 64)[:, :, ::2]), "the gradient's layout"
    monkeypatch.setattr(hopper, "kernels", lambda: None)
    assert not hopper.applies(a, x, c), "no Gluon"
    monkeypatch.setattr(hopper, "kernels", object)
    pretended.arch = lambda tensor: "sm_100"
    assert not hopper.applies(a, x, c)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_experts_take_it(transposed, monkeypatch):
    """Both outer products, in either layout of the weights."""
    calls = []

    def counted(a, x, c, *rest):
        assert c.is_contiguous() or c.mT.is_contiguous()
        calls.append(tuple(c.shape))
        real(a, x, c, *rest)

    real = outer_products_reference
    if ARCH == "sm_90" and hopper.kernels() is not None:
        real = hopper.kernels().outer_products
    plain = types.SimpleNamespace(outer_products=counted)
    monkeypatch.setattr(hopper, "kernels", lambda: plain)
    monkeypatch.setattr(hopper, "MIN_ROWS", 1)
    monkeypatch.setattr(hopper, "devices", types.SimpleNamespace(arch=lambda tensor: "sm_90"))
    monkeypatch.setattr(outer_products, "ROWS_IN_PLACE", (ARCH,))
    torch.manual_seed(0)
    H, I, E = 48, 32, 3  # noqa: E741, N806
    shapes = dict(x=(20, H), gate_up_proj=(E, 2 * I, H), down_proj=(E, H, I), top_k_weights=(20, 2))
    inputs = {name: torch.randn(shape, device=DEVICE).to(B16) for name, shape in shapes.items()}
    if transposed:
        for name in ("gate_up_proj", "down_proj"):
            inputs[name] = inputs[name].mT.contiguous()
    index = torch.randint(E, (20, 2), device=DEVICE)

    def gradients(fn, dtype):
        leaves = {name: t.to(dtype).requires_grad_() for name, t in inputs.items()}
        out = fn(**leaves, top_k_index=index, transposed=transposed)
        return dict(zip(leaves, torch.autograd.grad(out.sum(), leaves.values()), strict=True))

    actual = gradients(liger_experts, B16)
    expected = gradients(experts_reference, torch.float64)
    assert sorted(calls) == [(E, I, H), (E, 2 * I, H)]
    for name, e in expected.items():
        assert (actual[name].double() - e).abs().max() <= 8 * 2**-8 * e.abs().max(), name
