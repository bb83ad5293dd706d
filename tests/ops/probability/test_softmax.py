"""Softmax beyond its `Case`.

Infinities and NaN, wide rows, dimensions, errors, a result that was written to.
"""

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel.ops.probability.softmax import LigerSoftmaxFunction, liger_softmax
from liger_kernel.transformers import LigerSoftmax

INF = float("inf")
# read as one block, and in blocks; of each odd widths, and multiples of 16
WIDTHS = (3, 130, 4096, 16384, 16385, 24576, 66000)


def outputs_and_gradients(x, seed=1):
    """Return (y, dx) of liger_softmax and of PyTorch's, for the same incoming gradient."""
    torch.manual_seed(seed)
    dy = torch.randn(x.shape, device=DEVICE).to(x.dtype)
    results = []
    for fn in (liger_softmax, lambda x: F.softmax(x, -1)):
        leaf = x.detach().clone().requires_grad_()
        y = fn(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
    return results


def assert_same_as_pytorch(x):
    (y, dx), (expected, expected_dx) = outputs_and_gradients(x)
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=1e-7, equal_nan=True)
    torch.testing.assert_close(dx, expected_dx, rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("width", WIDTHS)
def test_equals_pytorch(width):
    torch.manual_seed(0)
    assert_same_as_pytorch(torch.randn(2, width, device=DEVICE) * 10)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_one_rounding(dtype):
    torch.manual_seed(0)
    for width in (1000, 20000):
        x = (3 * torch.randn(3, width, device=DEVICE)).to(dtype)
        y = liger_softmax(x)
        exact = F.softmax(x.double(), -1)
        bound = (0.5 + 1e-3) * torch.finfo(dtype).eps * exact
        if dtype == torch.float16:
            bound += 2.0**-25
        assert y.dtype == dtype and ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("width", (100, 20001, 24576))
def test_masked_entries(width):
    """-inf gives 0 and gets no gradient: at a row's beginning, its end, all but one entry."""
    torch.manual_seed(0)
    x = torch.randn(4, width, device=DEVICE)
    x[0, : width // 2] = -INF
    x[1, width // 3 :] = -INF
    x[2, :-1] = -INF
    x[3, ::2] = -INF
    assert_same_as_pytorch(x)
    y = liger_softmax(x)
    assert not y[x == -INF].any() and y[2, -1] == 1


@pytest.mark.parametrize("width", (100, 20001, 24576))
@pytest.mark.parametrize("value", (-INF, INF, float("nan")))
def test_a_row_that_is_nan(value, width):
    """A row with all -inf, one +inf or one NaN is NaN, as in PyTorch. The next row isn't."""
    torch.manual_seed(0)
    x = torch.randn(3, width, device=DEVICE)
    if value == -INF:
        x[1] = value
    else:
        x[1, width - 2] = value
    assert_same_as_pytorch(x)
    y = liger_softmax(x)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


@pytest.mark.parametrize("width", (100, 20000))
def test_large_and_shifted_values(width):
    torch.manual_seed(0)
    x = torch.randn(2, width, device=DEVICE)
    assert_same_as_pytorch(x * 1e4)
    assert_same_as_pytorch(x.round() + 2.0**20)  # exact there
    x[0] = 3e38
    x[1] = -3e38
    rounding = 0 if DEVICE == "cpu" else 1.2e-7  # a GPU's division is not always the nearest float
    torch.testing.assert_close(
        liger_softmax(x), torch.full_like(x, 1 / width), rtol=rounding, atol=0
    )


@pytest.mark.parametrize("shape", ((7,), (1,), (2, 3, 4, 5), (3, 0), (0, 3), (2, 0, 4)))
def test_any_shape(shape):
    assert_same_as_pytorch(torch.randn(shape, device=DEVICE))


def test_strides():
    """A view of every second row is not copied; one along the columns gives the same.

    On a GPU another layout sums in another order. In 20,000 simulated rows of up to 40 entries that
    moved y by up to 4.3e-7 of itself.
    """
    torch.manual_seed(0)
    bound = 0 if DEVICE == "cpu" else 5e-7
    wide = torch.randn(6, 40, device=DEVICE)
    for x in (
        wide[::2],
        wide[:, 3:20],
        wide[:, ::2],
        wide.t(),
        wide[:1].expand(4, 40),
        wide[:, :1].expand(6, 5),
    ):
        torch.testing.assert_close(
            liger_softmax(x), liger_softmax(x.contiguous()), rtol=bound, atol=0
        )


def test_result_that_was_written_to():
    """Backward needs it, so it raises, as PyTorch's does."""
    x = torch.randn(3, 5, device=DEVICE, requires_grad=True)
    y = liger_softmax(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_module_and_function():
    x = torch.randn(3, 5, device=DEVICE)
    module = LigerSoftmax()
    assert torch.equal(module(x), liger_softmax(x))
    assert torch.equal(LigerSoftmaxFunction.apply(x), liger_softmax(x))
    assert repr(module) == "LigerSoftmax()" and not module.state_dict()


def test_errors():
    with pytest.raises(ValueError, match="liger_softmax: x has no dimension, give"):
        liger_softmax(torch.tensor(1.0, device=DEVICE))
    with pytest.raises(TypeError, match="liger_softmax: x is torch.int64, give"):
        liger_softmax(torch.ones(3, dtype=torch.int64, device=DEVICE))


def test_float64_and_reference(request):
    x = torch.randn(3, 50, dtype=torch.float64, device=DEVICE)
    assert torch.equal(liger_softmax(x), F.softmax(x, -1))
    if DEVICE == "cpu":
        request.getfixturevalue("reference_only")
    x = x.bfloat16()
    assert torch.equal(liger_softmax(x.cpu()), F.softmax(x.cpu(), -1))
