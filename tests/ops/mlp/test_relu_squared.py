"""ReLU²: values that are no ordinary numbers, strides, the module."""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.mlp.activation import (
    LigerReLUSquared,
    liger_relu_squared,
    relu_squared_reference,
)

INF, NAN = float("inf"), float("nan")


def value_and_gradient(fn, x):
    x = x.detach().requires_grad_()
    y = fn(x)
    return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_extreme_values(dtype):
    x = torch.tensor(
        [0.0, -0.0, 1e-40, -1e-40, 3.0, -3.0, 250.0, 1e4, -1e4, INF, -INF, NAN], device=DEVICE
    ).to(dtype)
    actual, expected = (
        value_and_gradient(fn, x) for fn in (liger_relu_squared, relu_squared_reference)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_strides():
    """Rows that are read in place, and others that are copied; x stays as it is."""
    both = torch.randn(4, 5, 24, device=DEVICE)
    before = both.clone()
    for x in (both[..., :12], both.transpose(0, 2), both[0, 0, 0]):
        y, dx = value_and_gradient(liger_relu_squared, x)
        torch.testing.assert_close((y, dx), value_and_gradient(relu_squared_reference, x))
        assert y.is_contiguous() and y.shape == dx.shape == x.shape
    assert torch.equal(both, before)


def test_only_x_is_kept():
    x = torch.randn(3, 16, device=DEVICE, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        LigerReLUSquared()(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]
