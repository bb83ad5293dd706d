"""Attention residuals beyond their `Case`: a list of blocks, many of them, other dtypes and
dimensions, errors."""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.residual.attention_residuals import attn_res_reference, liger_attn_res

D = 20


def drawn(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    V, w_query, w_norm = torch.randn(*shape, D), torch.randn(D) / 2, torch.randn(D)
    return [
        t.to(DEVICE, kind).requires_grad_()
        for t, kind in ((V, dtype), (w_query, None), (w_norm, None))
    ]


def outcome(fn, V, *weights):
    """The mixture, and the gradients of the blocks, of the query and of the norm's weight."""
    out = fn(V, *weights)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, out.dtype)
    blocks = V if isinstance(V, list) else [V]
    *dV, dq, dw = torch.autograd.grad(out, [*blocks, *weights], dout)
    return out, dV, dq, dw


def test_gradients_of_a_list():
    """Each block is a tensor of its own, and some of them may need no gradient."""
    V, *weights = drawn(4, 2, 3)
    blocks = [v.detach().clone().requires_grad_() for v in V]
    want, (dV,), *dweights = outcome(liger_attn_res, V, *weights)
    got, dblocks, *dothers = outcome(liger_attn_res, blocks, *weights)
    for a, b in zip((got, *dblocks, *dothers), (want, *dV, *dweights), strict=True):
        assert torch.equal(a, b)
    blocks[0].requires_grad_(False)
    liger_attn_res(tuple(blocks), *weights).sum().backward()
    assert blocks[0].grad is None and all(block.grad is not None for block in blocks[1:])


@pytest.mark.parametrize("shape", [(33, 2), (3,), (1, 2, 2), (2, 1, 1, 2)], ids=str)
def test_any_number_of_blocks_and_dimensions(shape):
    given = drawn(*shape)
    for got, want in zip(
        outcome(liger_attn_res, *given), outcome(attn_res_reference, *given), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_weights_of_another_dtype():
    given = drawn(3, 2, dtype=torch.bfloat16)
    out, (dV,), dq, dw = outcome(liger_attn_res, *given)
    want, _, dq_want, dw_want = outcome(attn_res_reference, *given)
    assert out.dtype == dV.dtype == torch.bfloat16 and dq.dtype == dw.dtype == torch.float32
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(dq, dq_want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(dw, dw_want, rtol=1e-3, atol=1e-3)


def test_errors():
    V, w_query, w_norm = drawn(2, 3)
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
