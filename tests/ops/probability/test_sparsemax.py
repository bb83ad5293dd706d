"""Sparsemax beyond its `Case`.

The exact support, hard rows, infinities and NaN, wide rows, dimensions, errors.
"""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.probability.sparsemax import (
    LigerSparsemaxFunction,
    liger_sparsemax,
    sparsemax_reference,
)
from liger_kernel.transformers import LigerSparsemax

INF = float("inf")
WIDTHS = (3, 130, 16384, 16385, 70000)  # read as one block, and in blocks
ONE_BLOCK_AND_MORE = (100, 17000)


def randn(*shape, scale=1.0):
    torch.manual_seed(0)
    return (scale * torch.randn(shape)).to(DEVICE)


def assert_projection(x):
    """Check that y is the projection of x, and return the threshold τ.

    There is one support S with S = {x > τ} for its own τ = (Σ_S x - 1)/|S|. y must have this
    support, and be x - τ there.
    """
    leaf = x.detach().requires_grad_()
    dy = randn(*x.shape).to(x.dtype)
    y = liger_sparsemax(leaf)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    support = (y > 0).double()
    exact = x.double()
    eps = torch.finfo(x.dtype).eps
    tau = ((support * exact).sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True)
    assert torch.equal(support.bool(), exact > tau)
    torch.testing.assert_close(y.double(), (exact - tau).clamp(min=0), rtol=eps, atol=2e-7)
    mean = (support * dy).sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
    torch.testing.assert_close(dx.double(), support * (dy - mean), rtol=eps, atol=1e-6)
    return tau


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_exact_projection(width, scale):
    """With nearly all entries in the support, with few, with one."""
    assert_projection(randn(1 if width > 16384 else 2, width, scale=scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_entries_at_the_threshold(dtype):
    """Multiples of 1/8 often equal τ. They are not in the support, even in fp32 arithmetic."""
    x = (randn(200, 24) * 8).round() / 8
    tau = assert_projection(x.to(dtype))
    assert (x.double() == tau).any(-1).sum() > 5


@pytest.mark.parametrize("width", ONE_BLOCK_AND_MORE)
def test_rows_that_take_many_steps(width):
    """Entries at distances that grow by a factor: each step of the iteration drops only a few."""
    steps = torch.arange(width, device=DEVICE, dtype=torch.float32)
    assert_projection(
        torch.stack((-(1.01**-steps), -steps / width, -(steps.clamp(max=20) ** 2) / 64))
    )


def test_known_rows():
    x = torch.tensor(
        [[5.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, -3.0], [1e30, 0.0, -1e30]], device=DEVICE
    )
    expected = torch.tensor(
        [[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.75, 0.25, 0.0], [1.0, 0.0, 0.0]], device=DEVICE
    )
    torch.testing.assert_close(liger_sparsemax(x), expected)


@pytest.mark.parametrize("width", ONE_BLOCK_AND_MORE)
def test_infinities_and_nan(width):
    """-inf is 0; a row that is all -inf, has an inf or a NaN is NaN, and the next one is not."""
    x = randn(5, width)
    x[0, ::2] = -INF
    x[1] = -INF
    x[2, 3] = INF
    x[3, width - 2] = float("nan")
    y = liger_sparsemax(x)
    assert y[1:4].isnan().all() and not y[[0, 4]].isnan().any() and not y[0, ::2].any()
    torch.testing.assert_close(y, sparsemax_reference(x), rtol=0, atol=2e-7, equal_nan=True)


@pytest.mark.parametrize(
    "shape,dim",
    [((7,), 0), ((2, 3, 4), 1), ((2, 3, 4), -3), ((3, 0), 1), ((0, 3), -1), ((4, 1), 0)],
)
def test_dimensions(shape, dim):
    results = []
    for fn in (liger_sparsemax, sparsemax_reference):
        x = randn(*shape).requires_grad_()
        y = fn(x, dim)
        results.append((y, *torch.autograd.grad(y, x, randn(*shape))))
    for output, expected in zip(*results, strict=True):
        assert output.is_contiguous()
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1])
def test_result_that_was_written_to(dim):
    """Backward needs it, so it raises."""
    x = randn(3, 5).requires_grad_()
    y = liger_sparsemax(x, dim)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_module_and_function():
    x = randn(3, 5)
    for module, dim in ((LigerSparsemax(), -1), (LigerSparsemax(0), 0)):
        assert torch.equal(module(x), liger_sparsemax(x, dim))
        assert torch.equal(LigerSparsemaxFunction.apply(x, dim), liger_sparsemax(x, dim))
    assert repr(LigerSparsemax(dim=0)) == "LigerSparsemax(dim=0)" and not module.state_dict()


def test_errors():
    for x, dim in ((torch.tensor(1.0), -1), (torch.ones(2, 3), 2), (torch.ones(2, 3), -3)):
        with pytest.raises(ValueError, match=f"liger_sparsemax: dim is {dim}, give"):
            liger_sparsemax(x.to(DEVICE), dim)
    with pytest.raises(TypeError, match="liger_sparsemax: input is torch.int64, give"):
        liger_sparsemax(torch.ones(3, dtype=torch.int64, device=DEVICE))
    with pytest.raises(TypeError, match="dim is 'last', give an int"):
        LigerSparsemax("last")
