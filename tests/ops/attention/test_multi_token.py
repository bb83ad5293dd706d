"""Multi-token attention beyond its `Case`: sparse, masks, wide rows, groups, dtypes, errors."""

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel.ops.attention import multi_token
from liger_kernel.ops.attention.multi_token import (
    LigerMultiTokenAttention,
    liger_multi_token_attention,
    multi_token_attention_reference,
)


def make_inputs(B=1, C=2, L=6, out=4, K=3, groups=1):
    torch.manual_seed(0)
    shapes = (B, C, L, L), (out, C // groups, K, K), (out,)
    return [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]


def output_and_gradients(fn, tensors, **options):
    y = fn(*tensors, **options)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, y.dtype)
    return y, *torch.autograd.grad(y, tensors, dy)


def assert_as_reference(tensors, **options):
    results = (
        output_and_gradients(fn, tensors, **options)
        for fn in (liger_multi_token_attention, multi_token_attention_reference)
    )
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_formula():
    scores, weight, bias = make_inputs()
    above = torch.ones(6, 6, device=DEVICE).triu(1) > 0
    expected = F.conv2d(
        scores.masked_fill(above, -1e9).softmax(-1), weight, bias, padding=1
    ).masked_fill(above, 0)
    torch.testing.assert_close(
        liger_multi_token_attention(scores, weight, bias, padding=1), expected
    )


def test_sparse():
    tensors = make_inputs(L=9)
    assert_as_reference(tensors, padding=1, sparse=True)
    with torch.no_grad():  # a kernel of one entry leaves the probabilities as they are
        p = liger_multi_token_attention(
            tensors[0], torch.ones(2, 1, 1, 1, device=DEVICE), groups=2, sparse=True
        )
    torch.testing.assert_close(p.sum(-1), torch.ones(1, 2, 9, device=DEVICE))
    assert (p == 0).sum() > 9 * 8
    with pytest.raises(
        RuntimeError, match="scores is torch.bfloat16, give torch.float32 with sparse=True"
    ):
        liger_multi_token_attention(tensors[0].bfloat16(), *tensors[1:], sparse=True)


@pytest.mark.parametrize("value", [-1e9, -3e38, -float("inf")])
def test_rows_without_a_key(value):
    """If a mask leaves no key, those above the diagonal are as likely."""
    scores, *parameters = make_inputs(L=5)
    scores.data[:, :, 2] = value
    assert_as_reference([scores, *parameters])
    tensors = [
        t.detach().bfloat16().requires_grad_() for t in make_inputs(C=8, out=8, L=6)
    ]  # convolved with channels last
    tensors[0].data[..., :3] = max(value, torch.finfo(torch.bfloat16).min)  # padding on the left
    results = (
        output_and_gradients(fn, tensors, padding=1)
        for fn in (liger_multi_token_attention, multi_token_attention_reference)
    )
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=0.02 * float(expected.abs().max())
        )


def test_rows_wider_than_a_block(monkeypatch):
    monkeypatch.setattr(multi_token, "_launch", lambda L: (2, 4, 1))
    assert_as_reference(make_inputs(L=11))


def test_groups_and_sizes_in_pairs():
    assert_as_reference(make_inputs(groups=2), groups=2)
    scores, weight, bias = make_inputs(L=8)
    narrow = weight.detach()[..., :1].requires_grad_()
    assert_as_reference([scores, narrow, bias], stride=(1, 2), padding=(1, 0), dilation=(2, 1))


@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_of_another_dtype(autocast):
    """The dtype of the scores is that of the computation."""
    scores, weight, bias = make_inputs()
    scores = scores.detach().bfloat16().requires_grad_()
    with torch.autocast(
        DEVICE, torch.float16 if DEVICE == "cuda" else torch.bfloat16, enabled=autocast
    ):
        y = liger_multi_token_attention(scores, weight, bias, padding=1)
        expected = multi_token_attention_reference(scores, weight, bias, padding=1)
    gradients = torch.autograd.grad(y.float().square().sum(), (scores, weight, bias))
    assert [t.dtype for t in (y, *gradients)] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    torch.testing.assert_close(y, expected)


def test_module():
    torch.manual_seed(0)
    module = LigerMultiTokenAttention(4, 8, 5, padding=2, groups=2).to(DEVICE)
    assert module.weight.shape == (8, 2, 5, 5) and not module.bias.any()
    assert 0.9 < module.weight.abs().max() * (2 * 25) ** 0.5 <= 1  # Kaiming's bound for a = √5
    scores = torch.randn(2, 4, 7, 7, device=DEVICE)
    expected = liger_multi_token_attention(scores, module.weight, module.bias, padding=2, groups=2)
    assert (
        torch.equal(module(scores), expected)
        and expected.shape == (2, 8, 7, 7)
        and not expected.triu(1).any()
    )
    alone = LigerMultiTokenAttention(4, 4, 3, bias=False).to(DEVICE)
    assert alone.state_dict().keys() == {"weight"} and alone(scores).shape == (2, 4, 5, 5)
    with pytest.raises(
        ValueError, match="LigerMultiTokenAttention: groups is 3, give a divisor of both"
    ):
        LigerMultiTokenAttention(4, 6, 3, groups=3)


def test_errors():
    scores, weight, bias = make_inputs()
    for changed, error, words in (
        (
            dict(scores=scores[..., :3]),
            ValueError,
            r"scores has shape \(1, 2, 6, 3\), give \(B, C, L, L\)",
        ),
        (
            dict(weight=weight[:, :1]),
            ValueError,
            r"weight has shape \(4, 1, 3, 3\), give \(C_out, 2, K, K\)",
        ),
        (dict(weight=weight[0]), ValueError, r"weight has shape \(2, 3, 3\)"),
        (dict(bias=bias[:2]), ValueError, r"bias has shape \(2,\), give \(4,\)"),
        (dict(groups=3), ValueError, "groups is 3, give a divisor"),
        (dict(stride=0), ValueError, "stride is 0, give an int from 1 on"),
        (dict(padding=-1), ValueError, "padding is -1, give an int from 0 on"),
        (dict(dilation=1.0), TypeError, "dilation is 1.0, give an int"),
        (dict(dilation=3), ValueError, r"weight has shape \(4, 2, 3, 3\), more than scores of 6"),
    ):
        with pytest.raises(error, match=f"^liger_multi_token_attention: {words}"):
            liger_multi_token_attention(**dict(scores=scores, weight=weight, bias=bias) | changed)
