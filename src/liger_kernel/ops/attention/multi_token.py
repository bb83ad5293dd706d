r"""Multi-token attention: a convolution over queries, keys and heads mixes attention probabilities.

    x = scores, with -1e9 above the diagonal;   p = softmax(x) of each row, or sparsemax(x)
    y = conv2d(p, weight, bias), with 0 above the diagonal

    dp, dweight, dbias = the convolution's gradients, from dy with 0 above the diagonal
    dscores = p·(dp - Σ dp·p), with 0 above the diagonal

The convolution is torch's, in the dtype of the scores. It is not causal: with a padding, a result
depends on scores of later queries and keys. The softmax is computed in fp32 and rounded once;
nothing above the diagonal is read.

Source: Golovneva et al., Multi-Token Attention, arXiv:2504.00927; sparsemax: Martins and Astudillo,
arXiv:1602.02068."""

from __future__ import annotations

import math

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import (
    CASES,
    Case,
    F,
    Function,
    cast_if_needed,
    custom_op,
    flatten_rows,
    is_compiling,
)
from liger_kernel.core.tile import (
    INF,
    cdiv,
    exp,
    finite_or_zero,
    load_fp32,
    next_power_of_2,
    online_max,
    tl,
    triton,
)
from liger_kernel.ops.probability.softmax import softmax_bwd, softmax_reference
from liger_kernel.ops.probability.sparsemax import sparsemax_bwd, sparsemax_fwd, sparsemax_reference

MASKED_SCORE = tl.constexpr(-1e9)
MEMORY_FORMATS = torch.contiguous_format, torch.channels_last


def _height_and_width(value):
    return value if isinstance(value, tuple | list) else (value, value)


def _mask_scores(scores):
    """Return the scores in fp32 or fp64, with -1e9 above the diagonal."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return wide.masked_fill(above, -1e9)


def _convolve(p, weight, bias, stride, padding, dilation, groups):
    """Convolve in p's dtype, also under autocast."""
    with devices.without_autocast(p):
        weight = cast_if_needed(weight, p.dtype)
        bias = None if bias is None else cast_if_needed(bias, p.dtype)
        return F.conv2d(p, weight, bias, stride, padding, dilation, groups)


def multi_token_attention_reference(
    scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False
):
    normalize = sparsemax_reference if sparse else softmax_reference
    p = normalize(_mask_scores(scores)).to(scores.dtype)
    return _convolve(p, weight, bias, stride, padding, dilation, groups).tril()


@kernel
def _fwd(x_ptr, p_ptr, stride_x, M, L, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute the softmax of BLOCK_M rows, in which entries beyond the diagonal are MASKED_SCORE.

    It reads the rows up to the diagonal, twice.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    i = m % L  # the row's query, and its last key
    num_masked = L - 1 - i
    # maximum and sum of the softmax; the masked entries are in both from the start
    top = tl.where(num_masked > 0, MASKED_SCORE, -INF)
    total = num_masked.to(tl.float32)
    for start in range(0, tl.max(i) + 1, BLOCK_N):
        mask = (m < M) & (start + n <= i)
        x = tl.where(mask, load_fp32(x_ptr, m * stride_x + start + n, mask), -INF)
        new_top, shift = online_max(top, tl.max(x, axis=1, keep_dims=True))
        total = total * exp(top - shift) + tl.sum(exp(x - shift), axis=1, keep_dims=True)
        top = new_top
    top = finite_or_zero(top)
    total = tl.where(m < M, total, 1.0)
    for start in range(0, L, BLOCK_N):
        mask = (m < M) & (start + n <= i)
        x = tl.where(mask, load_fp32(x_ptr, m * stride_x + start + n, mask), MASKED_SCORE)
        p = exp(x - top) / total
        store_mask = (m < M) & (start + n < L)
        tl.store(p_ptr + m * L + start + n, p.to(p_ptr.dtype.element_ty), mask=store_mask)


def _launch(L):
    """Return (rows, columns, warps) of a program."""
    columns = min(next_power_of_2(L), 4096)
    rows = max(1, 1024 // columns)
    return rows, columns, min(max(rows * columns // 512, 1), 8)


@triton.jit
def _index(b, c, m, n, C, ROWS, COLUMNS, CHANNELS_LAST: tl.constexpr):
    if CHANNELS_LAST:
        return ((b * ROWS + m) * COLUMNS + n) * C + c
    return ((b * C + c) * ROWS + m) * COLUMNS + n


@kernel
def _lower_triangle(
    x_ptr,
    y_ptr,
    C,
    ROWS,
    COLUMNS,
    X_CHANNELS_LAST: tl.constexpr,
    Y_CHANNELS_LAST: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write a block of y, a copy of x with 0 above the diagonal; or, without x, only the zeros.

    The block is BLOCK_N columns of a row in BLOCK_C channels. KEEP_ALL: nothing becomes 0.
    """
    column_blocks = tl.cdiv(COLUMNS, BLOCK_N)
    channel_blocks = tl.cdiv(C, BLOCK_C)
    row = tl.program_id(0) // (column_blocks * channel_blocks)
    b = (row // ROWS).to(tl.int64)
    m = row % ROWS
    # (channels, columns)
    channel_block = tl.program_id(0) // column_blocks % channel_blocks
    c = channel_block * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    n = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (c < C) & (n < COLUMNS)
    y_ptrs = y_ptr + _index(b, c, m, n, C, ROWS, COLUMNS, Y_CHANNELS_LAST)
    if x_ptr is None:
        zeros = tl.zeros((BLOCK_C, BLOCK_N), dtype=y_ptr.dtype.element_ty)
        tl.store(y_ptrs, zeros, mask=mask & (n > m))
    else:
        x_ptrs = x_ptr + _index(b, c, m, n, C, ROWS, COLUMNS, X_CHANNELS_LAST)
        x = tl.load(x_ptrs, mask=mask if KEEP_ALL else mask & (n <= m), other=0.0)
        tl.store(y_ptrs, x, mask=mask)


def _is_channels_last(x):
    """Return True if x (B, C, H, W) has its channels last in memory, and not otherwise."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _empty_lower_triangles(x, channels_last, keep_all):
    return torch.empty_like(x, memory_format=MEMORY_FORMATS[channels_last])


@custom_op("lower_triangles", _empty_lower_triangles)
def lower_triangles(x: torch.Tensor, channels_last: bool, keep_all: bool) -> torch.Tensor:
    """Copy x (B, C, H, W) with 0 above the diagonals; with ``keep_all`` copy all of it.

    All is needed for probabilities, since a row without a key has some above the diagonal. The
    copy is contiguous, or has its channels last in memory.
    """
    y = torch.empty_like(x, memory_format=MEMORY_FORMATS[channels_last])
    _launch_lower_triangle(x if _is_channels_last(x) else x.contiguous(), y, keep_all)
    return y


def _launch_lower_triangle(x, y, keep_all=False):
    B, C, rows, columns = y.shape
    if not y.numel():
        return
    x_channels_last = x is not None and _is_channels_last(x)
    y_channels_last = _is_channels_last(y)
    if x_channels_last or y_channels_last:
        channels = min(next_power_of_2(C), 32)
        block = min(next_power_of_2(columns), 128)
    else:
        channels = 1
        block = min(next_power_of_2(columns), 1024)
    _lower_triangle[(B * rows * cdiv(C, channels) * cdiv(columns, block),)](
        x,
        y,
        C,
        rows,
        columns,
        X_CHANNELS_LAST=x_channels_last,
        Y_CHANNELS_LAST=y_channels_last,
        KEEP_ALL=keep_all,
        BLOCK_C=channels,
        BLOCK_N=block,
        num_warps=devices.limit_warps(4, y),
    )


def _clear_upper_triangle(x):
    """Return x with 0 above the diagonals, in its own memory if that is possible.

    Nobody else may refer to x. torch's own ``tril_`` reads and writes all of it.
    """
    if _is_channels_last(x):
        return lower_triangles(x, False, False)
    if is_compiling() or not x.is_contiguous():
        return x.tril()  # torch 2.11's Dynamo loses the gradient of ``tril_``
    _launch_lower_triangle(None, x)
    return x


def _use_channels_last(p, weight, groups):
    """Return True if cuDNN should convolve with the channels last.

    By itself it does so at more cost, or not at all. bf16 4x16x2048x2048, 32 output channels, 3x3:
    forward 3.84 ms, backward 3.45; with the channels as they are 5.77, 7.69 (H200, 2026-11-23).
    """
    return (
        not devices.AMD
        and p.element_size() == 2
        and groups == 1
        and not any(n % 8 for n in weight.shape[:2])
    )


@custom_op("causal_softmax", lambda x, L: x.new_empty(x.shape))
def causal_softmax_fwd(x: torch.Tensor, L: int) -> torch.Tensor:
    """Return the causal softmax (M, L) of x's rows, in x's dtype.

    x (M, L) has unit stride in L. Every L rows are a matrix of queries by keys.
    """
    p = x.new_empty(x.shape)
    M = x.shape[0]
    rows, columns, warps = _launch(L)
    if x.numel():
        _fwd[(cdiv(M, rows),)](
            x,
            p,
            x.stride(0),
            M,
            L,
            BLOCK_M=rows,
            BLOCK_N=columns,
            num_warps=devices.limit_warps(warps, x),
        )
    return p


def _probabilities(scores, sparse):
    if sparse:
        p = sparsemax_fwd(flatten_rows(_mask_scores(scores))).to(scores.dtype)
    else:
        p = causal_softmax_fwd(flatten_rows(scores), scores.shape[-1])
    return p.view(scores.shape)


class LigerMultiTokenAttentionFunction(Function):
    """``apply(scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False)
    -> out``.

    It saves the scores for backward, which computes their probabilities again.
    """

    @staticmethod
    def reference(
        scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False
    ):
        return multi_token_attention_reference(
            scores, weight, bias, stride, padding, dilation, groups, sparse
        )

    @staticmethod
    def forward(
        ctx, scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False
    ):
        name = "LigerMultiTokenAttentionFunction"
        devices.require_kernels(name, scores)
        _check_scores(name, scores, sparse)  # the convolution checks the others
        ctx.save_for_backward(scores, weight, bias)
        ctx.options = stride, padding, dilation, groups, sparse
        p = _probabilities(scores, sparse)
        if _use_channels_last(p, weight, groups):
            p = lower_triangles(p, True, True)
        return _clear_upper_triangle(_convolve(p, weight, bias, *ctx.options[:4]))

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors, *ctx.options

    @staticmethod
    def backward(ctx, dout):
        scores, weight, bias = ctx.saved_tensors
        stride, padding, dilation, groups, sparse = ctx.options
        need_dscores, need_dweight, need_dbias = needs = ctx.needs_input_grad[:3]
        p = _probabilities(scores, sparse)
        channels_last = _use_channels_last(p, weight, groups)
        dp, dweight, dbias = torch.ops.aten.convolution_backward(
            lower_triangles(dout, channels_last, False),
            lower_triangles(p, True, True) if channels_last else p,
            cast_if_needed(weight, p.dtype),
            None if bias is None else list(bias.shape),
            _height_and_width(stride),
            _height_and_width(padding),
            _height_and_width(dilation),
            False,
            [0, 0],
            groups,
            needs,
        )
        dscores = None
        if need_dscores:
            if channels_last:
                dp = lower_triangles(dp, False, False)
            normalize_bwd = sparsemax_bwd if sparse else softmax_bwd
            dx = normalize_bwd(flatten_rows(p), flatten_rows(dp))
            dscores = _clear_upper_triangle(dx.view(p.shape))
        dweight = cast_if_needed(dweight, weight.dtype) if need_dweight else None
        dbias = cast_if_needed(dbias, bias.dtype) if need_dbias else None
        return dscores, dweight, dbias, *[None] * 5


def _check_convolution(name, channels, groups, **steps):
    """Check the options: ``steps`` are ints from 1 on, padding from 0, or pairs of them.

    A pair is for height and width. ``groups`` divides the numbers of ``channels``.
    """
    for argument, value in steps.items():
        minimum = 0 if argument == "padding" else 1
        for number in _height_and_width(value):
            if check.integer(name, argument, number) < minimum:
                raise ValueError(f"{name}: {argument} is {value!r}, give an int from {minimum} on")
    if check.integer(name, "groups", groups) < 1 or any(n % groups for n in channels):
        raise ValueError(
            f"{name}: groups is {groups}, give a divisor of both numbers of channels, {channels}"
        )


def _check_scores(name, scores, sparse):
    if scores.dim() != 4 or scores.shape[-1] != scores.shape[-2]:
        raise ValueError(f"{name}: scores has shape {tuple(scores.shape)}, give (B, C, L, L)")
    if sparse and scores.dtype in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"{name}: scores is {scores.dtype}, give torch.float32 with sparse=True")


def liger_multi_token_attention(
    scores: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    sparse: bool = False,
) -> torch.Tensor:
    """Mix causal attention probabilities: ``conv2d(softmax(masked scores), weight, bias)``.

    Args:
        scores: (B, C, L, L), of queries by keys; fp32, bf16 or fp16, and only fp32 if ``sparse``.
        weight: (C_out, C / groups, K, K), any floating dtype. It is rounded to the dtype of the
        scores.
        bias: (C_out,) likewise, or None.
        stride, padding, dilation, groups: of `torch.nn.functional.conv2d`. The result has the size
            of the scores with a stride of 1 and a padding of (K - 1) / 2.
        sparse: use sparsemax instead of softmax.

    Returns:
        (B, C_out, L', L') in the dtype of the scores, with 0 above the diagonal.

    Raises:
        ValueError: a shape or device does not fit; a number is out of its range.
        TypeError: something is not a floating point tensor, or a number not an int.
        RuntimeError: ``sparse`` with scores that are not fp32.

    Source: arXiv:2504.00927.
    """
    name = "liger_multi_token_attention"
    check.floats(name, dict(scores=scores, weight=weight), bias=bias)
    _check_scores(name, scores, sparse)
    C, L = scores.shape[1], scores.shape[-1]
    _check_convolution(
        name, (C, *weight.shape[:1]), groups, stride=stride, padding=padding, dilation=dilation
    )
    if weight.dim() != 4 or weight.shape[1] * groups != C:
        raise ValueError(
            f"{name}: weight has shape {tuple(weight.shape)}, give (C_out, {C // groups}, K, K)"
        )
    check.shape(name, "bias", bias, tuple(weight.shape[:1]))
    dilations = _height_and_width(dilation)
    paddings = _height_and_width(padding)
    for K, step, edge in zip(weight.shape[2:], dilations, paddings, strict=True):
        if not 1 <= step * (K - 1) + 1 <= L + 2 * edge:
            raise ValueError(
                f"{name}: weight has shape {tuple(weight.shape)}, "
                f"more than scores of {L} with padding"
            )
    if not devices.has_kernels(scores):
        return multi_token_attention_reference(
            scores, weight, bias, stride, padding, dilation, groups, sparse
        )
    return LigerMultiTokenAttentionFunction.call(
        scores, weight, bias, stride, padding, dilation, groups, sparse
    )


class LigerMultiTokenAttention(torch.nn.Module):
    """`liger_multi_token_attention` as a module, with the parameters of its convolution.

    The bias is initialised with zeros.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check.size(name, "in_channels", in_channels)
        check.size(name, "out_channels", out_channels)
        steps = dict(kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
        _check_convolution(name, (in_channels, out_channels), groups, **steps)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        self.groups = groups
        self.sparse = sparse
        shape = out_channels, in_channels // groups, *_height_and_width(kernel_size)
        self.weight = torch.nn.Parameter(torch.empty(shape))
        self.bias = torch.nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, scores: torch.Tensor):
        return liger_multi_token_attention(
            scores,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.sparse,
        )

    def extra_repr(self):
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"sparse={self.sparse}"
        )


def _inputs(B, C, L):
    weight = torch.randn(2 * C, C, 3, 3) / (9 * C) ** 0.5
    bias = torch.randn(2 * C)
    return dict(
        scores=torch.randn(B, C, L, L).requires_grad_(),
        weight=weight.requires_grad_(),
        bias=bias.requires_grad_(),
    )


def _traffic(inputs):
    size = inputs["scores"].numel() * inputs["scores"].element_size()
    return 3 * size, 4 * size  # there are 2·C output channels


CASES.append(
    Case(
        "multi_token_attention",
        fn=liger_multi_token_attention,
        reference=multi_token_attention_reference,
        inputs=_inputs,
        shapes=((1, 1, 4), (2, 2, 7), (1, 1, 34), (2, 8, 11)),
        options=(dict(padding=1), dict(padding=1, bias=None)),
        bench=((4, 16, 2048),),
        traffic=_traffic,
        fp32_roundings=2,
    )
)
