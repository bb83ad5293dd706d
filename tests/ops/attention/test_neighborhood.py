"""Neighbourhood attention beyond its `Case`: windows, memory layouts, modules, errors."""

import numpy
import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.attention import neighborhood
from liger_kernel.ops.attention.neighborhood import (
    LigerFusedNeighborhoodAttention,
    LigerFusedNeighborhoodAttentionConfig,
    LigerFusedNeighborhoodAttentionLayer,
    fused_neighborhood_attention_reference,
    liger_fused_neighborhood_attention,
)


def make_inputs(*shape):
    torch.manual_seed(0)
    return [torch.randn(shape, device=DEVICE).requires_grad_() for _ in range(3)]


def dense(q, k, v, kernel_size, dilation):
    """Compute the same with a score for each pair, and a mask."""
    i = torch.arange(q.shape[2], device=q.device)
    distance = (i[:, None] - i).abs()
    visible = (distance <= kernel_size // 2 * dilation) & (distance % dilation == 0)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~visible, -float("inf")).softmax(-1) @ v


WINDOWS = [(5, 7, 1), (9, 3, 4), (10, 4, 3), (1, 5, 2)]  # length, kernel_size, dilation


@pytest.mark.parametrize("plain", [False, True], ids=["kernels", "reference"])
@pytest.mark.parametrize("S,kernel_size,dilation", WINDOWS)
def test_the_window_is_cut_at_the_ends(S, kernel_size, dilation, plain):
    q, k, v = make_inputs(2, 1, S, 5)
    fn = fused_neighborhood_attention_reference if plain else liger_fused_neighborhood_attention
    dout = torch.randn(q.shape, device=DEVICE)
    actual, expected = (f(q, k, v, kernel_size, dilation) for f in (fn, dense))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(
        *(torch.autograd.grad(y, (q, k, v), dout) for y in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_window_wider_than_any_sequence():
    q, k, v = make_inputs(1, 1, 4, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(liger_fused_neighborhood_attention(q, k, v, 2**40 + 1), expected)


def test_keys_outside_have_no_part():
    """Whatever is there."""
    q, k, v = (x.detach() for x in make_inputs(1, 1, 6, 4))
    k[:, :, 1], v[:, :, 1] = float("nan"), float("inf")
    out = liger_fused_neighborhood_attention(q, k, v, kernel_size=3, dilation=2)
    assert out[:, :, ::2].isfinite().all() and not out[:, :, [1, 3]].isfinite().any()


def test_layouts():
    """A projection's output is read without a copy, and so is the result by the next projection."""
    q, k, v = (x.detach().transpose(1, 2) for x in make_inputs(2, 5, 3, 4))
    out = liger_fused_neighborhood_attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(
        out, liger_fused_neighborhood_attention(*(x.contiguous() for x in (q, k, v)))
    )


def test_modules():
    torch.manual_seed(0)
    layer = (
        LigerFusedNeighborhoodAttentionLayer(12, 3, kernel_size=3, dilation=2, dropout=0.5)
        .to(DEVICE)
        .eval()
    )
    attention, x = layer.attention, torch.randn(2, 7, 12, device=DEVICE)
    heads = (
        p(x).view(2, 7, 3, 4).transpose(1, 2)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    expected = attention.out_proj(dense(*heads, 3, 2).transpose(1, 2).reshape(2, 7, 12))
    torch.testing.assert_close(attention(x), expected)
    torch.testing.assert_close(layer(x), x + attention(layer.layer_norm(x)))
    names = {f"{p}_proj.{w}" for p in ("q", "k", "v", "out") for w in ("weight", "bias")}
    assert attention.state_dict().keys() == names
    assert layer.train()(x).ne(layer(x)).any(), "no dropout"
    config = LigerFusedNeighborhoodAttentionConfig(hidden_size=12, num_heads=3)
    assert (
        LigerFusedNeighborhoodAttentionLayer(**vars(config)).layer_norm.eps
        == config.layer_norm_eps
        == 1e-5
    )


def test_errors():
    q, k, v = make_inputs(1, 2, 5, 4)
    name = "liger_fused_neighborhood_attention"
    for changed, error, words in (
        (dict(query=q[0]), ValueError, r"query has shape \(2, 5, 4\), give \(B, H, S, D\)"),
        (dict(key=k[:, :1]), ValueError, r"key has shape \(1, 1, 5, 4\), give \(1, 2, 5, 4\)"),
        (dict(kernel_size=0), ValueError, "kernel_size is 0, give an int from 1 on"),
        (dict(kernel_size=3.0), TypeError, "kernel_size is 3.0"),
        (dict(dilation=0), ValueError, "dilation is 0"),
        (dict(scale="1"), TypeError, "scale is '1'"),
    ):
        with pytest.raises(error, match=f"^{name}: {words}"):
            liger_fused_neighborhood_attention(**dict(query=q, key=k, value=v) | changed)
    for changed, words in (
        (dict(num_heads=5), "num_heads is 5, give a divisor of hidden_size, 12"),
        (dict(num_heads=0), "num_heads is 0"),
        (dict(kernel_size=4), "kernel_size is 4, give an odd number"),
        (dict(kernel_size=-1), "kernel_size is -1"),
        (dict(dilation=0), "dilation is 0"),
    ):
        with pytest.raises(ValueError, match=f"^LigerFusedNeighborhoodAttention: {words}"):
            LigerFusedNeighborhoodAttention(**dict(hidden_size=12, num_heads=3) | changed)
    with pytest.raises(NotImplementedError, match="attention_mask is given"):
        LigerFusedNeighborhoodAttentionLayer(12, 3)(torch.randn(1, 3, 12), torch.ones(1, 3))


def test_numbers_of_numpy(monkeypatch):
    """The kernels get Python's."""
    q, k, v = make_inputs(1, 1, 9, 12)
    recorded = []
    apply = neighborhood.LigerFusedNeighborhoodAttentionFunction.apply
    record = staticmethod(lambda *args: recorded.append(args[3:]) or apply(*args))
    monkeypatch.setattr(neighborhood.LigerFusedNeighborhoodAttentionFunction, "apply", record)
    liger_fused_neighborhood_attention(q, k, v, numpy.int64(3), numpy.int32(2), numpy.float64(0.3))
    layer = LigerFusedNeighborhoodAttention(
        12, 1, kernel_size=numpy.int64(3), scale=1 / numpy.sqrt(12)
    )
    layer.to(DEVICE)(q[0].detach())
    assert [[type(x) for x in args] for args in recorded] == [[int, int, float]] * 2
