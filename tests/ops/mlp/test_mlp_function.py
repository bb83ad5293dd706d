"""Other forms of SwiGLU: a whole MLP as a function of its weights, gate beside up, with limits."""

import types

import pytest
import torch
from hardware import DEVICE
from memory import AddressRecorder, collect_garbage, reuses_memory

import liger_kernel.ops.mlp
from liger_kernel.core import overwrite
from liger_kernel.ops.mlp.glu import (
    LigerFusedGateUpSiLUMulFunction,
    clamped_swiglu_reference,
    liger_clamped_swiglu,
    swiglu_reference,
)
from liger_kernel.ops.mlp.modules import LigerFalconH1SwiGLUMLP, LigerSwiGLUMLP
from liger_kernel.ops.mlp.swiglu_mlp import (
    LigerFalconH1MLP,
    LigerMLP,
    LigerMLPFunction,
    liger_swiglu_mlp,
)

FUSED = LigerFusedGateUpSiLUMulFunction.apply


def config(**changes):
    fields = dict(
        hidden_size=12,
        intermediate_size=20,
        hidden_act="silu",
        mlp_bias=False,
        mlp_multipliers=(0.7, 1.3),
    )
    return types.SimpleNamespace(**fields | changes)


# ---- a whole MLP ----


@pytest.mark.parametrize(
    "liger_class, reference_class",
    ((LigerMLP, LigerSwiGLUMLP), (LigerFalconH1MLP, LigerFalconH1SwiGLUMLP)),
)
def test_modules(liger_class, reference_class):
    """Outputs and gradients of the module that calls its layers; the second backward as the
    first."""
    torch.manual_seed(0)
    mlp, reference = liger_class(config()).to(DEVICE), reference_class(config()).to(DEVICE)
    reference.load_state_dict(mlp.state_dict())
    x = torch.randn(2, 3, 12, device=DEVICE, requires_grad=True)
    loss = mlp(x).square().sum()
    once, twice = (
        torch.autograd.grad(loss, (x, *mlp.parameters()), retain_graph=keep)
        for keep in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    expected = reference(x)
    torch.testing.assert_close(mlp(x), expected)
    torch.testing.assert_close(
        once, torch.autograd.grad(expected.square().sum(), (x, *reference.parameters()))
    )


def test_product_is_not_kept():
    x, *weights = (
        torch.randn(s, device=DEVICE, requires_grad=True)
        for s in ((6, 12), (20, 12), (20, 12), (12, 20))
    )
    memory = {}

    def pack(t):
        memory[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = liger_swiglu_mlp(x, *weights)
    of_weights = {w.untyped_storage().data_ptr() for w in weights}
    assert sum(n for at, n in memory.items() if at not in of_weights) == 4 * (
        x.numel() + 2 * 6 * 20
    )
    assert out.shape == x.shape and liger_kernel.ops.mlp.LigerMLPFunction is LigerMLPFunction


def test_a_bias_and_another_activation():
    for mlp in (LigerMLP, LigerFalconH1MLP):
        with pytest.raises(ValueError, match=f"{mlp.__name__}: the config's mlp_bias is True"):
            mlp(config(mlp_bias=True))
        with pytest.raises(ValueError, match=f"{mlp.__name__}: .*'gelu'"):
            mlp(config(hidden_act="gelu"))
    x, w = torch.randn(3, 12, device=DEVICE), torch.randn(20, 12, device=DEVICE)
    with pytest.raises(
        TypeError, match="LigerMLPFunction: input is torch.float32, up_weight torch.bfloat16"
    ):
        LigerMLPFunction.apply(x, w, w.bfloat16(), w.t())


# ---- gate beside up ----


def halves(y):
    return swiglu_reference(*y.chunk(2, -1))


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("lead", ((4,), (2, 3), (), (0,), (2, 1, 3)), ids=str)
def test_gate_beside_up(lead, in_place):
    x = torch.randn(*lead, 18, device=DEVICE, requires_grad=True)
    source_memory = {}
    z = FUSED(AddressRecorder.apply(x, source_memory), in_place)
    (actual,) = torch.autograd.grad(collect_garbage(z.square().sum()), x)
    expected = halves(2 * x)
    torch.testing.assert_close(z, expected)
    torch.testing.assert_close(actual, torch.autograd.grad(expected.square().sum(), x)[0])
    assert reuses_memory(source_memory)


def test_held_is_overwritten_where_it_was_asked_for():
    x = torch.randn(4, 18, device=DEVICE, requires_grad=True)
    expected = torch.autograd.grad(halves(2 * x).sum(), x)[0]
    for in_place in (False, True):
        y = 2 * x
        z = FUSED(y, in_place)
        (actual,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
        torch.testing.assert_close(actual, expected)
        assert torch.equal(y, 2 * x) is not in_place
        if in_place:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(z.sum(), x)
        else:
            assert torch.equal(torch.autograd.grad(z.sum(), x)[0], actual)


def test_held_stays_where_the_environment_says_so(monkeypatch):
    """`LIGER_KERNEL_OVERWRITE=0` is obeyed, also where overwriting was asked for."""
    monkeypatch.setattr(overwrite, "ENABLED", False)
    x = torch.randn(4, 18, device=DEVICE, requires_grad=True)
    y = 2 * x
    z = FUSED(y, True)
    (first,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
    assert torch.equal(y, 2 * x)
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], first)


def test_other_strides_of_gate_beside_up():
    base = torch.randn(18, 3, 4, device=DEVICE, requires_grad=True)
    for y in (base.permute(1, 2, 0), base[:, :, 0].t()[:, :6]):
        (actual,) = torch.autograd.grad(FUSED(y, True).square().sum(), base, retain_graph=True)
        torch.testing.assert_close(actual, torch.autograd.grad(halves(y).square().sum(), base)[0])


def test_an_odd_width():
    for kernels in (torch.randn(3, 7, device=DEVICE), torch.randn(3, 7, dtype=torch.float64)):
        with pytest.raises(
            ValueError, match=r"LigerFusedGateUpSiLUMulFunction: y has shape \(3, 7\)"
        ):
            FUSED(kernels)


# ---- with limits ----


@pytest.mark.parametrize(
    "options", (dict(limit=7.0, alpha=1.702, shift=1.0), dict(limit=0.5), dict(limit=1e30)), ids=str
)
def test_limits(options):
    """At the limits, beyond them and far beyond: PyTorch's values, and a gradient where it has
    one."""
    edge = min(options["limit"], 50.0)
    values = [
        0.0,
        edge,
        -edge,
        edge + 0.01,
        -edge - 0.01,
        60.0,
        -60.0,
        0.3,
        float("inf"),
        -float("inf"),
        float("nan"),
    ]
    a = torch.tensor(values, device=DEVICE).repeat_interleave(len(values)).requires_grad_()
    b = torch.tensor(values, device=DEVICE).repeat(len(values)).requires_grad_()
    actual, expected = (
        (y.detach(), *torch.autograd.grad(y, (a, b), torch.ones_like(y)))
        for y in (liger_clamped_swiglu(a, b, **options), clamped_swiglu_reference(a, b, **options))
    )
    exp = (
        60 / 0.7 * torch.finfo(torch.float32).eps
    )  # x/log 2 is rounded, and then the power of 2 is taken
    torch.testing.assert_close(actual, expected, rtol=exp, atol=1e-5, equal_nan=True)


def test_autocast_with_an_input_of_its_dtype():
    """As of the layer before it, beside weights in fp32."""
    torch.manual_seed(0)
    module, x = LigerMLP(config()).to(DEVICE), torch.randn(3, 12, device=DEVICE).bfloat16()
    with torch.autocast(DEVICE, torch.bfloat16):
        actual = module(x)
        expected = LigerSwiGLUMLP.forward(module, x)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected)
