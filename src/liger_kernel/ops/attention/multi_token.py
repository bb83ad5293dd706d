r"""Multi-token attention: a convolution over queries, keys and heads mixes the attention
probabilities.

    x = scores, with -1e9 above the diagonal;   p = softmax(x) of each row, or sparsemax(x)
    y = conv2d(p, weight, bias), with 0 above the diagonal

    dp, dweight, dbias = those of the convolution, of dy with 0 above the diagonal
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
    custom_op,
    is_compiling,
    matrix_rows,
    rounded,
)
from liger_kernel.core.tile import (
    INF,
    cdiv,
    exp,
    finite,
    next_power_of_2,
    online_max,
    read,
    tl,
    triton,
)
from liger_kernel.ops.probability.softmax import softmax_bwd, softmax_reference
from liger_kernel.ops.probability.sparsemax import sparsemax_bwd, sparsemax_fwd, sparsemax_reference

MASKED = tl.constexpr(-1e9)


def _pair(value):
    """Of height and width."""
    return value if isinstance(value, tuple | list) else (value, value)


def _masked(scores):
    """In fp32 or fp64, with -1e9 above the diagonal."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return wide.masked_fill(above, -1e9)


def _convolved(p, weight, bias, *options):
    """The convolution in p's dtype, also under autocast."""
    with devices.without_autocast(p):
        weight, bias = rounded(weight, p.dtype), None if bias is None else rounded(bias, p.dtype)
        return F.conv2d(p, weight, bias, *options)


def multi_token_attention_reference(
    scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False
):
    p = (sparsemax_reference if sparse else softmax_reference)(_masked(scores)).to(scores.dtype)
    return _convolved(p, weight, bias, stride, padding, dilation, groups).tril()


@kernel
def _fwd(x_ptr, p_ptr, stride_x, M, L, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program: BLOCK_M rows. It reads them up to the diagonal, twice. All that is beyond is
    MASKED."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n, i = tl.arange(0, BLOCK_N)[None, :], m % L
    beyond = L - 1 - i
    top, total = tl.where(beyond > 0, MASKED, -INF), beyond.to(tl.float32)
    for start in range(0, tl.max(i) + 1, BLOCK_N):
        known = (m < M) & (start + n <= i)
        x = tl.where(known, read(x_ptr, m * stride_x + start + n, known), -INF)
        new, shift = online_max(top, tl.max(x, axis=1, keep_dims=True))
        total = total * exp(top - shift) + tl.sum(exp(x - shift), axis=1, keep_dims=True)
        top = new
    top, total = finite(top), tl.where(m < M, total, 1.0)
    for start in range(0, L, BLOCK_N):
        known = (m < M) & (start + n <= i)
        p = exp(tl.where(known, read(x_ptr, m * stride_x + start + n, known), MASKED) - top) / total
        tl.store(
            p_ptr + m * L + start + n, p.to(p_ptr.dtype.element_ty), mask=(m < M) & (start + n < L)
        )


def _launch(L):
    """(rows, columns, warps) of a program."""
    columns = min(next_power_of_2(L), 4096)
    rows = max(1, 1024 // columns)
    return rows, columns, min(max(rows * columns // 512, 1), 8)


@triton.jit
def _at(b, c, m, n, C, ROWS, COLUMNS, LAST: tl.constexpr):
    return (
        ((b * ROWS + m) * COLUMNS + n) * C + c if LAST else ((b * C + c) * ROWS + m) * COLUMNS + n
    )


@kernel
def _lower(
    x_ptr,
    y_ptr,
    C,
    ROWS,
    COLUMNS,
    X_LAST: tl.constexpr,
    Y_LAST: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: a part of some channels' row of y, a copy of x with 0 above the diagonal; or,
    without x, the zeros.

    X_LAST, Y_LAST: whether the channels are last in memory. WHOLE: nothing becomes 0.
    """
    across, deep = tl.cdiv(COLUMNS, BLOCK_N), tl.cdiv(C, BLOCK_C)
    row = tl.program_id(0) // (across * deep)
    b, m = (row // ROWS).to(tl.int64), row % ROWS
    c = tl.program_id(0) // across % deep * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    n = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (c < C) & (n < COLUMNS)
    at = _at(b, c, m, n, C, ROWS, COLUMNS, Y_LAST)
    if x_ptr is None:
        tl.store(
            y_ptr + at,
            tl.zeros((BLOCK_C, BLOCK_N), dtype=y_ptr.dtype.element_ty),
            mask=mask & (n > m),
        )
    else:
        kept = mask if WHOLE else mask & (n <= m)
        x = tl.load(x_ptr + _at(b, c, m, n, C, ROWS, COLUMNS, X_LAST), mask=kept, other=0.0)
        tl.store(y_ptr + at, x, mask=mask)


def _last(x):
    """Whether x (B, C, H, W) has its channels last in memory, and not otherwise."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


@custom_op(
    "lower_triangles", lambda x, last, whole: torch.empty_like(x, memory_format=FORMATS[last])
)
def lower_triangles(x: torch.Tensor, last: bool, whole: bool) -> torch.Tensor:
    """x (B, C, H, W) -> a copy with 0 above the diagonals, contiguous, or with the channels
    ``last`` in memory.

    ``whole``: with what x has there. A row of probabilities that has no key is above the diagonal.
    """
    y = torch.empty_like(x, memory_format=FORMATS[last])
    _launch_lower(x if _last(x) else x.contiguous(), y, whole)
    return y


FORMATS = torch.contiguous_format, torch.channels_last


def _launch_lower(x, y, whole=False):
    B, C, rows, columns = y.shape
    if y.numel():
        x_last, y_last = x is not None and _last(x), _last(y)
        channels, most = (min(next_power_of_2(C), 32), 128) if x_last or y_last else (1, 1024)
        block = min(next_power_of_2(columns), most)
        _lower[(B * rows * cdiv(C, channels) * cdiv(columns, block),)](
            x,
            y,
            C,
            rows,
            columns,
            X_LAST=x_last,
            Y_LAST=y_last,
            WHOLE=whole,
            BLOCK_C=channels,
            BLOCK_N=block,
            num_warps=devices.warps(4, y),
        )


def _cleared(x):
    """x, which is nobody else's, with 0 above the diagonals. torch's own ``tril_`` reads and writes
    all of it."""
    if _last(x):
        return lower_triangles(x, False, False)
    if is_compiling() or not x.is_contiguous():
        return x.tril()  # torch 2.11's Dynamo loses the gradient of ``tril_``
    _launch_lower(None, x)
    return x


def _channels_last(p, weight, groups):
    """Whether cuDNN should convolve with the channels last, which it does by itself at more cost,
    or not at all.

    bf16 4x16x2048x2048, 32 results, 3x3: forward 3.84 ms, backward 3.45; as they are 5.77, 7.69
    (H200, 2026-11-23)."""
    return (
        not devices.AMD
        and p.element_size() == 2
        and groups == 1
        and not any(n % 8 for n in weight.shape[:2])
    )


@custom_op("causal_softmax", lambda x, L: x.new_empty(x.shape))
def causal_softmax_fwd(x: torch.Tensor, L: int) -> torch.Tensor:
    """x (M, L) with unit stride in L, of which every L rows are a matrix -> its softmax (M, L), in
    x's dtype."""
    p, M = x.new_empty(x.shape), x.shape[0]
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
            num_warps=devices.warps(warps, x),
        )
    return p


def _probabilities(scores, sparse):
    rows = matrix_rows(_masked(scores) if sparse else scores)
    p = (
        sparsemax_fwd(rows).to(scores.dtype)
        if sparse
        else causal_softmax_fwd(rows, scores.shape[-1])
    )
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
        devices.require_kernels("LigerMultiTokenAttentionFunction", scores)
        _check_scores(
            "LigerMultiTokenAttentionFunction", scores, sparse
        )  # the convolution checks the others
        ctx.save_for_backward(scores, weight, bias)
        ctx.options = stride, padding, dilation, groups, sparse
        p = _probabilities(scores, sparse)
        if _channels_last(p, weight, groups):
            p = lower_triangles(p, True, True)
        return _cleared(_convolved(p, weight, bias, *ctx.options[:4]))

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors, *ctx.options

    @staticmethod
    def backward(ctx, dout):
        scores, weight, bias = ctx.saved_tensors
        *steps, groups, sparse = ctx.options
        need = ctx.needs_input_grad[:3]
        p = _probabilities(scores, sparse)
        last = _channels_last(p, weight, groups)
        dp, dweight, dbias = torch.ops.aten.convolution_backward(
            lower_triangles(dout, last, False),
            lower_triangles(p, True, True) if last else p,
            rounded(weight, p.dtype),
            None if bias is None else list(bias.shape),
            *map(_pair, steps),
            False,
            [0, 0],
            groups,
            need,
        )
        dscores = None
        if need[0]:
            through = sparsemax_bwd if sparse else softmax_bwd
            dp = lower_triangles(dp, False, False) if last else dp
            dscores = _cleared(through(matrix_rows(p), matrix_rows(dp)).view(p.shape))
        dweight = rounded(dweight, weight.dtype) if need[1] else None
        return dscores, dweight, rounded(dbias, bias.dtype) if need[2] else None, *[None] * 5


def _check_convolution(name, channels, groups, **steps):
    """``channels`` and the others are numbers from 1 on, padding from 0; numbers of height and
    width may be given."""
    for argument, value in steps.items():
        least = 0 if argument == "padding" else 1
        for number in _pair(value):
            if check.integer(name, argument, number) < least:
                raise ValueError(f"{name}: {argument} is {value!r}, give an int from {least} on")
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
    """Causal attention probabilities, mixed by a convolution: ``conv2d(softmax(masked scores),
    weight, bias)``.

    Args:
        scores: (B, C, L, L), of queries by keys; fp32, bf16 or fp16, and only fp32 if ``sparse``.
        weight: (C_out, C / groups, K, K), any floating dtype. It is rounded to the dtype of the
        scores.
        bias: (C_out,) likewise, or None.
        stride, padding, dilation, groups: of `torch.nn.functional.conv2d`. The result has the size
        of the scores with
            a stride of 1 and a padding of (K - 1) / 2.
        sparse: sparsemax in place of softmax.

    Returns:
        (B, C_out, L', L') in the dtype of the scores, with 0 above the diagonal.

    Raises:
        ValueError: a shape or device that does not fit; a number that is out of its range.
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
    for K, step, edge in zip(weight.shape[2:], _pair(dilation), _pair(padding), strict=True):
        if not 1 <= step * (K - 1) + 1 <= L + 2 * edge:
            raise ValueError(
                f"{name}: weight has shape {tuple(weight.shape)}, more than scores of {L} with padding"
            )
    if not devices.has_kernels(scores):
        return multi_token_attention_reference(
            scores, weight, bias, stride, padding, dilation, groups, sparse
        )
    return LigerMultiTokenAttentionFunction.call(
        scores, weight, bias, stride, padding, dilation, groups, sparse
    )


class LigerMultiTokenAttention(torch.nn.Module):
    """`liger_multi_token_attention` as a module, with the parameters of its convolution. The bias
    begins with zeros."""

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
        name, channels = type(self).__name__, (in_channels, out_channels)
        steps = dict(kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
        for argument, value in dict(in_channels=in_channels, out_channels=out_channels).items():
            check.size(name, argument, value)
        _check_convolution(name, channels, groups, **steps)
        self.in_channels, self.out_channels, self.kernel_size = (
            in_channels,
            out_channels,
            kernel_size,
        )
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.sparse = sparse
        self.weight = torch.nn.Parameter(
            torch.empty(out_channels, in_channels // groups, *_pair(kernel_size))
        )
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
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, sparse={self.sparse}"


def _inputs(B, C, L):
    weight, bias = torch.randn(2 * C, C, 3, 3) / (9 * C) ** 0.5, torch.randn(2 * C)
    return dict(
        scores=torch.randn(B, C, L, L).requires_grad_(),
        weight=weight.requires_grad_(),
        bias=bias.requires_grad_(),
    )


CASES.append(
    Case(
        "multi_token_attention",
        fn=liger_multi_token_attention,
        reference=multi_token_attention_reference,
        inputs=_inputs,
        shapes=((1, 1, 4), (2, 2, 7), (1, 1, 34), (2, 8, 11)),
        options=(dict(padding=1), dict(padding=1, bias=None)),
        bench=((4, 16, 2048),),
        traffic=lambda t: tuple(
            n * t["scores"].numel() * t["scores"].element_size() for n in (3, 4)
        ),  # 2 C results
        fp32_roundings=2,
    )
)
