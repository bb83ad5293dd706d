"""Attention residuals beyond their `Case`: lists of blocks, many of them, dtypes, errors."""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.residual.attention_residuals import attn_res_reference, liger_attn_res

D = 20


def make_inputs(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    V, w_query, w_norm = torch.randn(*shape, D), torch.randn(D) / 2, torch.randn(D)
    return [
        t.to(DEVICE, kind).requires_grad_()
        for t, kind in ((V, dtype), (w_query, None), (w_norm, None))
    ]


def output_and_gradients(fn, V, *weights):
    """Return the mixture, and the gradients of the blocks, the query and the norm's weight."""
    out = fn(V, *weights)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, out.dtype)
    blocks = V if isinstance(V, list) else [V]
    *dV, dq, dw = torch.autograd.grad(out, [*blocks, *weights], dout)
    return out, dV, dq, dw


def test_gradients_of_a_list():
    """Each block is a tensor of its own, and some of them may need no gradient."""
    V, *weights = make_inputs(4, 2, 3)
    blocks = [v.detach().clone().requires_grad_() for v in V]
    expected, (dV,), *dweights = output_and_gradients(liger_attn_res, V, *weights)
    actual, dblocks, *dothers = output_and_gradients(liger_attn_res, blocks, *weights)
    for a, b in zip((actual, *dblocks, *dothers), (expected, *dV, *dweights), strict=True):
        assert torch.equal(a, b)
    blocks[0].requires_grad_(False)
    liger_attn_res(tuple(blocks), *weights).sum().backward()
    assert blocks[0].grad is None and all(block.grad is not None for block in blocks[1:])


@pytest.mark.parametrize("shape", [(33, 2), (3,), (1, 2, 2), (2, 1, 1, 2)], ids=str)
def test_any_number_of_blocks_and_dimensions(shape):
    inputs = make_inputs(*shape)
    for actual, expected in zip(
        output_and_gradients(liger_attn_res, *inputs),
        output_and_gradients(attn_res_reference, *inputs),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_weights_of_another_dtype():
    inputs = make_inputs(3, 2, dtype=torch.bfloat16)
    out, (dV,), dq, dw = output_and_gradients(liger_attn_res, *inputs)
    expected, _, dq_want, dw_want = output_and_gradients(attn_res_reference, *inputs)
    assert out.dtype == dV.dtype == torch.bfloat16 and dq.dtype == dw.dtype == torch.float32
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(dq, dq_want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(dw, dw_want, rtol=1e-3, atol=1e-3)


def test_errors():
    V, w_query, w_norm = make_inputs(2, 3)
    for changed, error, words in (
        (dict(V=[]), ValueError, "V is empty, give at least one block"),
        (
            dict(V=[V[0], V[1, :2]]),
            ValueError,
            r"V\[1\] is torch.float32 of shape \(2, 20\), V\[0\]",
        ),
        (dict(V=[V[0], V[1].bfloat16()]), ValueError, r"V\[1\] is torch.bfloat16"),
        (dict(V=[V[0], None]), TypeError, r"V\[1\] is None"),
        (dict(V=V[:0]), ValueError, r"V has shape \(0, 3, 20\), give \(N, ..., D\)"),
        (dict(V=V[0, 0]), ValueError, r"V has shape \(20,\)"),
        (dict(w_query=w_query[:3]), ValueError, r"w_query has shape \(3,\), give \(20,\)"),
        (dict(w_norm=w_norm[None]), ValueError, r"w_norm has shape \(1, 20\)"),
        (dict(eps=-1.0), ValueError, "eps is -1.0"),
    ):
        with pytest.raises(error, match=f"^liger_attn_res: {words}"):
            liger_attn_res(**dict(V=V, w_query=w_query, w_norm=w_norm) | changed)
