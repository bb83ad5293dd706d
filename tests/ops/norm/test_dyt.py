"""DyT beyond its `Case`: many rows, dtypes, the two functions without autograd, the module,
errors."""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.norm.dyt import dyt_reference, liger_dyt, liger_dyt_bwd, liger_dyt_fwd
from liger_kernel.transformers import LigerDyT


def random_inputs(*shape, dtypes=(torch.float32,) * 4):
    torch.manual_seed(0)
    tensors = torch.randn(shape), torch.rand(1), torch.randn(shape[-1]), torch.randn(shape[-1])
    return [t.to(DEVICE, dtype).requires_grad_() for t, dtype in zip(tensors, dtypes, strict=True)]


def test_many_rows():
    """Several programs, and several for the columns of a row: alpha's gradient is a sum over all of
    them."""
    tensors = random_inputs(9, 1030)
    outs = liger_dyt(*tensors), dyt_reference(*tensors)
    for actual, expected in zip(
        *(torch.autograd.grad(o.sin().sum(), tensors) for o in outs), strict=True
    ):
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item()
        )


def test_dtypes_may_differ():
    dtypes = torch.bfloat16, torch.float32, torch.float16, torch.float32
    tensors = random_inputs(3, 20, dtypes=dtypes)
    y = liger_dyt(*tensors)
    grads = torch.autograd.grad(y.float().sum(), tensors)
    assert y.dtype == torch.bfloat16 and tuple(g.dtype for g in grads) == dtypes
    assert [g.shape for g in grads] == [t.shape for t in tensors]


@pytest.mark.parametrize("with_beta", [True, False])
def test_without_autograd(with_beta):
    x, alpha, gamma, beta = tensors = random_inputs(2, 3, 8)
    if not with_beta:
        tensors[3] = None
    y = liger_dyt(*tensors)
    dy = torch.randn_like(y)
    leaves = [t for t in tensors if t is not None]
    with torch.no_grad():
        assert torch.equal(liger_dyt_fwd(*tensors), y)
        grads = liger_dyt_bwd(dy, *tensors)
    assert (grads[3] is None) != with_beta
    for actual, expected in zip(grads, torch.autograd.grad(y, leaves, dy), strict=False):
        assert torch.equal(actual, expected)


def test_without_autograd_needs_kernels(request):
    if DEVICE == "cpu":
        request.getfixturevalue("reference_only")
    x, alpha, gamma, beta = (t.detach().cpu() for t in random_inputs(2, 8))
    for call in (
        lambda: liger_dyt_fwd(x, alpha, gamma, beta),
        lambda: liger_dyt_bwd(x, x, alpha, gamma, beta),
    ):
        with pytest.raises(RuntimeError, match="no Triton kernels for a tensor on cpu"):
            call()


def test_module():
    module = LigerDyT(8).to(DEVICE)
    assert {k: tuple(v.shape) for k, v in module.state_dict().items()} == dict(
        alpha=(1,), gamma=(8,), beta=(8,)
    )
    assert module.alpha.eq(0.5).all() and module.gamma.eq(1).all() and not module.beta.any()
    x = random_inputs(2, 3, 8)[0]
    torch.testing.assert_close(module(x), torch.tanh(0.5 * x))
    module(x).sum().backward()
    assert module.alpha.grad.shape == (1,)
    without = LigerDyT(8, beta=False, init_alpha=2.0).to(DEVICE)
    assert (
        without.beta is None
        and list(without.state_dict()) == ["alpha", "gamma"]
        and without.alpha.eq(2).all()
    )
    assert repr(without) == "LigerDyT(8, init_alpha=2.0, beta=False)"


def test_errors():
    x, alpha, gamma, beta = random_inputs(2, 8)
    for args, error, message in (
        ((x, gamma, gamma, beta), ValueError, r"alpha has shape \(8,\), give \(1,\) or \(\)"),
        ((x, alpha, gamma[:4], beta), ValueError, r"gamma has shape \(4,\), give \(8,\)"),
        ((x, alpha, gamma, beta[None]), ValueError, r"beta has shape \(1, 8\), give \(8,\)"),
        ((x, alpha, None, beta), TypeError, "gamma is None, give a tensor"),
        ((x, 0.5, gamma, beta), TypeError, "alpha is a float, give a tensor"),
        ((x.sum(), alpha, gamma, beta), ValueError, "x has no dimension"),
        ((x.long(), alpha, gamma, beta), TypeError, "x is torch.int64"),
    ):
        with pytest.raises(error, match=f"liger_dyt: {message}"):
            liger_dyt(*args)
    with pytest.raises(TypeError, match="LigerDyT: init_alpha is '0.5'"):
        LigerDyT(8, init_alpha="0.5")
    with pytest.raises(ValueError, match="LigerDyT: hidden_size is -1"):
        LigerDyT(-1)
