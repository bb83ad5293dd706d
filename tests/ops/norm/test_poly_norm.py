"""PolyNorm beyond its `Case`: the order of its weights, powers that 16 bits do not hold, the
module, errors."""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.norm.poly_norm import liger_poly_norm, poly_norm_reference
from liger_kernel.transformers import LigerPolyNorm


def random_tensor(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(shape).to(DEVICE, dtype)


def test_weights_go_from_the_cube_to_x_itself():
    x = random_tensor(3, 20)
    none = torch.zeros(1, device=DEVICE)
    for i, power in enumerate((3, 2, 1)):
        w = torch.eye(3, device=DEVICE)[i]
        u = x**power
        torch.testing.assert_close(
            liger_poly_norm(x, w, none), u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        )


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_powers_that_fp16_does_not_hold(scale):
    x = (scale * random_tensor(4, 50)).half().requires_grad_()
    w = random_tensor(3).half().requires_grad_()
    b = random_tensor(1).half().requires_grad_()
    y = liger_poly_norm(x, w, b)
    exact = poly_norm_reference(x.double(), w.double(), b.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-3)
    for actual, expected in zip(
        *(torch.autograd.grad(o.sin().sum(), (x, w, b)) for o in (y, exact)), strict=True
    ):
        assert actual.isfinite().all() and actual.dtype == expected.dtype
        torch.testing.assert_close(
            actual, expected, rtol=0.01, atol=0.02 * expected.abs().max().item()
        )


def test_many_rows():
    """More than programs: the gradients of the four numbers are sums of sums."""
    tensors = [
        t.requires_grad_() for t in (random_tensor(70, 200), random_tensor(3), random_tensor(1))
    ]
    outs = liger_poly_norm(*tensors), poly_norm_reference(*tensors)
    for actual, expected in zip(
        *(torch.autograd.grad(o.sin().sum(), tensors) for o in outs), strict=True
    ):
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item()
        )


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_bias_of_one_element(shape):
    x, w, b = (
        random_tensor(3, 8),
        random_tensor(3),
        torch.full(shape, 0.5, device=DEVICE, requires_grad=True),
    )
    liger_poly_norm(x, w, b).sum().backward()
    assert b.grad.shape == shape and b.grad.item() == 24


def test_module():
    module = LigerPolyNorm().to(DEVICE)
    assert {k: tuple(v.shape) for k, v in module.state_dict().items()} == dict(weight=(3,), bias=())
    assert module.weight.eq(1 / 3).all() and module.bias == 1
    assert (module.variance_epsilon, module.in_place) == (1e-6, True) and repr(
        module
    ) == "LigerPolyNorm(eps=1e-06)"
    x = random_tensor(2, 3, 8)
    assert torch.equal(module(x), liger_poly_norm(x, module.weight, module.bias))
    assert module(x.bfloat16()).dtype == torch.bfloat16


def test_errors():
    x = random_tensor(2, 8)
    w = random_tensor(3)
    b = random_tensor(1)
    for args, error, message in (
        ((x, w[:2], b), ValueError, r"W has shape \(2,\), give \(3,\)"),
        ((x, w[None], b), ValueError, r"W has shape \(1, 3\), give \(3,\)"),
        ((x, w, w), ValueError, r"B has shape \(3,\), give one element"),
        ((x, w, None), TypeError, "B is None, give a tensor"),
        ((x.sum(), w, b), ValueError, "X has no dimension"),
        ((x.long(), w, b), TypeError, "X is torch.int64"),
        ((x, w, b, -1.0), ValueError, "eps is -1.0"),
    ):
        with pytest.raises(error, match=f"liger_poly_norm: {message}"):
            liger_poly_norm(*args)
    with pytest.raises(TypeError, match="LigerPolyNorm: eps is '1e-6'"):
        LigerPolyNorm("1e-6")


def test_no_columns():
    """Then nothing adds to a gradient, whatever the memory of the powers' roots holds."""
    w, b = (
        torch.ones(3, device=DEVICE, requires_grad=True),
        torch.ones((), device=DEVICE, requires_grad=True),
    )
    torch.full((5000,), float("nan"), device=DEVICE)  # memory that may be used again
    y = liger_poly_norm(random_tensor(5, 0), w, b)
    dw, db = torch.autograd.grad(y.sum(), (w, b))
    assert not dw.any() and not db.any()
