"""Embedding: the gradient's order, padding, indices that mean nothing, and the module."""

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel.ops import LigerEmbeddingFunction
from liger_kernel.ops.embedding.embedding import liger_embedding
from liger_kernel.transformers.experimental import LigerEmbedding

V, N = 9, 40


def random_inputs(M=100, dtype=torch.float32):
    """Row 3 is asked for again and again, row 5 never."""
    torch.manual_seed(0)
    weight = torch.randn(V, N)
    indices = torch.randint(V, (M,))
    indices[::2] = 3
    indices[indices == 5] = 4
    return weight.to(DEVICE, dtype).requires_grad_(), indices.to(DEVICE)


def gradient(weight, indices, dy, **options):
    return torch.autograd.grad(liger_embedding(weight, indices, **options), weight, dy)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_sum_in_one_order(dtype):
    """A row's gradient is of its tokens alone and the same in every run: bit for bit whatever the
    others are."""
    weight, indices = random_inputs(dtype=dtype)
    dy = torch.randn(len(indices), N).to(DEVICE, dtype)
    dw = gradient(weight, indices, dy)
    assert torch.equal(dw, gradient(weight, indices, dy)) and not dw[5].any()
    for v in (0, 3):
        only = indices == v
        assert torch.equal(dw[v], gradient(weight, indices[only], dy[only])[v])
    exact = torch.zeros(V, N, dtype=torch.float64, device=DEVICE).index_add(0, indices, dy.double())
    torch.testing.assert_close(dw, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_indices_of_any_shape(shape, integers, with_and_without_kernels):
    weight, _ = random_inputs()
    indices = torch.randint(V, shape, device=DEVICE)
    for view in (indices, indices.mT) if len(shape) > 1 else (indices,):
        actual = liger_embedding(weight, view.to(integers))
        expected = F.embedding(view, weight)
        assert torch.equal(actual, expected)
        dy = torch.randn_like(expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(y, weight, dy)[0] for y in (actual, expected))
        )


def test_a_weight_of_any_strides():
    weight, indices = random_inputs()
    for with_strides in (lambda w: w.t().contiguous().t(), lambda w: F.pad(w, (0, 3))[:, :N]):
        assert torch.equal(
            liger_embedding(with_strides(weight), indices), F.embedding(indices, weight)
        )


def test_the_weight_may_change_before_backward():
    """Nothing of it is kept."""
    weight, indices = random_inputs()
    y = LigerEmbeddingFunction.apply(weight, indices)
    with torch.no_grad():
        weight.mul_(2)
    y.sum().backward()
    torch.testing.assert_close(weight.grad[:, 0], torch.bincount(indices, minlength=V).float())


@pytest.mark.parametrize("padding", [3, -6])
def test_padding(padding, with_and_without_kernels):
    """Its result is 0 even if its row is not, and its row has no gradient."""
    weight, indices = random_inputs()
    y = liger_embedding(weight, indices, padding)
    dy = torch.randn(100, N, device=DEVICE)
    assert not y[indices == 3].any() and torch.equal(
        y[indices != 3], F.embedding(indices[indices != 3], weight)
    )
    expected = torch.autograd.grad(F.embedding(indices, weight, 3), weight, dy)[0]
    assert not expected[3].any()
    torch.testing.assert_close(torch.autograd.grad(y, weight, dy)[0], expected)


@pytest.mark.parametrize("index", [V, -1, 10**9])
def test_an_index_out_of_range(index):
    """It reads nothing else, and has no gradient; where looking at it costs nothing, it is
    named."""
    weight, indices = random_inputs()
    indices[7] = index
    y = LigerEmbeddingFunction.apply(weight, indices)
    good = indices != index
    assert y[7].isnan().all() and torch.equal(y[good], F.embedding(indices[good], weight))
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(F.embedding(indices[good], weight), weight, dy[good])[0]
    torch.testing.assert_close(torch.autograd.grad(y, weight, dy)[0], expected)
    if DEVICE == "cpu":
        with pytest.raises(
            IndexError, match="liger_embedding: an index is out of range, give those from 0 to 8"
        ):
            liger_embedding(weight, indices)


def test_what_does_not_fit():
    weight, indices = random_inputs()
    for error, message, args in (
        (ValueError, r"weight has shape \(40,\), give \(V, N\)", (weight[0], indices)),
        (TypeError, "indices is torch.float32, give integers", (weight, indices.float())),
        (TypeError, "weight is torch.int64, give a floating point tensor", (indices, indices)),
        (ValueError, "padding_idx is 9, give one of 9 rows", (weight, indices, 9)),
        (TypeError, "padding_idx is 1.0, give an int", (weight, indices, 1.0)),
    ):
        with pytest.raises(error, match=f"liger_embedding: {message}"):
            liger_embedding(*args)
    with pytest.raises(ValueError, match="LigerEmbedding: padding_idx is -5, give one of 4 rows"):
        LigerEmbedding(4, 2, -5)


def test_the_module():
    module = LigerEmbedding(1000, 8, padding_idx=-1).to(DEVICE)
    assert module.padding_idx == 999 and not module.weight[999].any()
    assert abs(module.weight[:999].std() - 1) < 0.05 and "padding_idx=999" in repr(module)
    reference = torch.nn.Embedding(1000, 8, padding_idx=-1).to(DEVICE)
    reference.load_state_dict(module.state_dict())
    indices = torch.tensor([[1, 999, 1], [7, 2, 999]], device=DEVICE)
    for m in (module, reference):
        m(indices).square().sum().backward()
    assert torch.equal(module(indices), reference(indices))
    torch.testing.assert_close(module.weight.grad, reference.weight.grad)


def test_transforms():
    """torch.func reads no value of an index."""
    weight, indices = random_inputs(8)
    actual = torch.func.vmap(lambda i: liger_embedding(weight, i))(indices.view(2, 4))
    assert torch.equal(actual, F.embedding(indices.view(2, 4), weight))
