r"""Neighbourhood attention over a sequence: a query attends to the keys in a window around it.

    j ∈ window(i):  |i - j| ≤ (kernel_size // 2)·dilation,  i - j a multiple of dilation,  0 ≤ j < S

    s_ij = scale·<q_i, k_j>,   p_i = softmax of s_i over the window,   out_i = Σ_j p_ij·v_j

    dp_ij = <dout_i, v_j>,   δ_i = Σ_j p_ij·dp_ij,   ds_ij = p_ij·(dp_ij - δ_i)
    dq_i = scale·Σ_j ds_ij·k_j,   dk_j = scale·Σ_i ds_ij·q_i,   dv_j = Σ_i p_ij·dout_i

At the ends of the sequence the window is cut off, not moved. The window is symmetric, so the sums
over i have the positions of those over j: a program that has a block of rows visits their
neighbours, one distance after the other. It never computes a score outside of a window. Everything
is computed in fp32 and rounded once. Backward computes p again, from the maximum and the sum of
each softmax.

Source: Hassani et al., Neighborhood Attention Transformer, arXiv:2204.07143, where the window is
moved at the ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, Function, custom_op, with_unit_stride
from liger_kernel.core.tile import (
    INF,
    cdiv,
    exp,
    load_fp32,
    next_power_of_2,
    online_max,
    tl,
    triton,
)
from liger_kernel.ops.norm.layer_norm import LigerLayerNorm


def _radius(S, kernel_size, dilation):
    """Return the number of neighbours on either side of a query that a sequence of S can have."""
    return min(kernel_size // 2, max(S - 1, 0) // dilation)


def fused_neighborhood_attention_reference(
    query, key, value, kernel_size=7, dilation=1, scale=None
):
    q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (query, key, value))
    S = q.shape[2]
    radius = _radius(S, kernel_size, dilation)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    # (queries, window)
    distances = dilation * torch.arange(-radius, radius + 1, device=q.device)
    positions = torch.arange(S, device=q.device)[:, None] + distances
    outside = (positions < 0) | (positions >= S)
    inside_positions = positions.clamp(0, max(S - 1, 0))
    # (B, H, queries, window, D)
    k = k[:, :, inside_positions].masked_fill(outside[..., None], 0)
    v = v[:, :, inside_positions].masked_fill(outside[..., None], 0)
    scores = (q.unsqueeze(3) * k).sum(-1) * scale
    p = scores.masked_fill(outside, -float("inf")).softmax(-1)
    return (p.unsqueeze(-1) * v).sum(3).to(query.dtype)


@triton.jit
def _program_block(H, S, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the program's head among all, its head in the batch entry, that entry, rows, columns.

    Rows are positions of the sequence, (rows,); columns are entries of a head, (1, columns).
    """
    blocks = tl.cdiv(S, BLOCK_S)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    s = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    return head, head % H, head // H, s, tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _load_rows(x_ptr, s, stride, d, S, D):
    """Load rows s of a head, in fp32; 0 for a row outside of the sequence."""
    s = s[:, None]
    return load_fp32(x_ptr, s * stride + d, (s >= 0) & (s < S) & (d < D))


@triton.jit
def _scores(q, k, scale, neighbor, S):
    """Return the scores of rows with their neighbours, (rows,); -inf outside of the sequence."""
    inside = (neighbor >= 0) & (neighbor < S)
    return tl.where(inside, tl.sum(q * k, axis=1) * scale, -INF)


@triton.jit
def _load_softmax_stats(top_ptr, sum_ptr, head, s, S):
    """Load maximum and sum of the softmax of these rows."""
    mask = (s >= 0) & (s < S)
    top = load_fp32(top_ptr, head * S + s, mask)
    return top, tl.load(sum_ptr + head * S + s, mask=mask, other=1.0)


@triton.jit
def _p_and_dp(q, k, dout, v, top, total, scale, neighbor, S):
    """Return p and dp of rows with their neighbours. Either may be the queries."""
    p = exp(_scores(q, k, scale, neighbor, S) - top) / total
    return p, tl.sum(dout * v, axis=1)


@triton.jit
def _store_rows(x_ptr, x, b, h, s, d, H, S, D):
    """Store rows in memory of the order (B, S, H, D)."""
    s = s[:, None]
    index = ((b * S + s) * H + h) * D + d
    tl.store(x_ptr + index, x.to(x_ptr.dtype.element_ty), mask=(s < S) & (d < D))


@kernel
def _fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    top_ptr,
    sum_ptr,
    stride_q_batch,
    stride_q_head,
    stride_q_token,
    stride_k_batch,
    stride_k_head,
    stride_k_token,
    stride_v_batch,
    stride_v_head,
    stride_v_token,
    H,
    S,
    D,
    radius,
    dilation,
    scale,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute BLOCK_S queries of a head."""
    head, h, b, s, d = _program_block(H, S, BLOCK_S, BLOCK_D)
    q = _load_rows(q_ptr + b * stride_q_batch + h * stride_q_head, s, stride_q_token, d, S, D)
    k_ptr += b * stride_k_batch + h * stride_k_head
    v_ptr += b * stride_v_batch + h * stride_v_head
    # maximum and sum of the online softmax
    top = tl.full((BLOCK_S,), -INF, dtype=tl.float32)
    total = tl.zeros((BLOCK_S,), dtype=tl.float32)
    out = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
    for tap in range(2 * radius + 1):
        neighbor = s + (tap - radius) * dilation
        k = _load_rows(k_ptr, neighbor, stride_k_token, d, S, D)
        scores = _scores(q, k, scale, neighbor, S)
        new_top, shift = online_max(top, scores)
        rescale = exp(top - shift)
        p = exp(scores - shift)
        total = total * rescale + p
        v = _load_rows(v_ptr, neighbor, stride_v_token, d, S, D)
        out = out * rescale[:, None] + p[:, None] * v
        top = new_top
    total = tl.where(s < S, total, 1.0)
    _store_rows(out_ptr, out / total[:, None], b, h, s, d, H, S, D)
    tl.store(top_ptr + head * S + s, top, mask=s < S)
    tl.store(sum_ptr + head * S + s, total, mask=s < S)


@kernel
def _bwd_query(
    dout_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    top_ptr,
    sum_ptr,
    dq_ptr,
    delta_ptr,
    stride_dout_batch,
    stride_dout_head,
    stride_dout_token,
    stride_q_batch,
    stride_q_head,
    stride_q_token,
    stride_k_batch,
    stride_k_head,
    stride_k_token,
    stride_v_batch,
    stride_v_head,
    stride_v_token,
    H,
    S,
    D,
    radius,
    dilation,
    scale,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute δ of BLOCK_S queries, and dq if it is needed."""
    head, h, b, s, d = _program_block(H, S, BLOCK_S, BLOCK_D)
    dout_ptr += b * stride_dout_batch + h * stride_dout_head
    q_ptr += b * stride_q_batch + h * stride_q_head
    k_ptr += b * stride_k_batch + h * stride_k_head
    v_ptr += b * stride_v_batch + h * stride_v_head
    dout = _load_rows(dout_ptr, s, stride_dout_token, d, S, D)
    q = _load_rows(q_ptr, s, stride_q_token, d, S, D)
    top, total = _load_softmax_stats(top_ptr, sum_ptr, head, s, S)
    delta = tl.zeros((BLOCK_S,), dtype=tl.float32)
    for tap in range(2 * radius + 1):
        neighbor = s + (tap - radius) * dilation
        k = _load_rows(k_ptr, neighbor, stride_k_token, d, S, D)
        v = _load_rows(v_ptr, neighbor, stride_v_token, d, S, D)
        p, dp = _p_and_dp(q, k, dout, v, top, total, scale, neighbor, S)
        delta += p * dp
    tl.store(delta_ptr + head * S + s, delta, mask=s < S)
    if dq_ptr is not None:
        dq = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
        for tap in range(2 * radius + 1):
            neighbor = s + (tap - radius) * dilation
            k = _load_rows(k_ptr, neighbor, stride_k_token, d, S, D)
            v = _load_rows(v_ptr, neighbor, stride_v_token, d, S, D)
            p, dp = _p_and_dp(q, k, dout, v, top, total, scale, neighbor, S)
            dq += (p * (dp - delta))[:, None] * k
        _store_rows(dq_ptr, dq * scale, b, h, s, d, H, S, D)


@kernel
def _bwd_key(
    dout_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    top_ptr,
    sum_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    stride_dout_batch,
    stride_dout_head,
    stride_dout_token,
    stride_q_batch,
    stride_q_head,
    stride_q_token,
    stride_k_batch,
    stride_k_head,
    stride_k_token,
    stride_v_batch,
    stride_v_head,
    stride_v_token,
    H,
    S,
    D,
    radius,
    dilation,
    scale,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute dk and dv of BLOCK_S keys."""
    head, h, b, s, d = _program_block(H, S, BLOCK_S, BLOCK_D)
    k = _load_rows(k_ptr + b * stride_k_batch + h * stride_k_head, s, stride_k_token, d, S, D)
    v = _load_rows(v_ptr + b * stride_v_batch + h * stride_v_head, s, stride_v_token, d, S, D)
    dout_ptr += b * stride_dout_batch + h * stride_dout_head
    q_ptr += b * stride_q_batch + h * stride_q_head
    dk = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
    dv = dk
    for tap in range(2 * radius + 1):
        neighbor = s + (tap - radius) * dilation
        q = _load_rows(q_ptr, neighbor, stride_q_token, d, S, D)
        dout = _load_rows(dout_ptr, neighbor, stride_dout_token, d, S, D)
        top, total = _load_softmax_stats(top_ptr, sum_ptr, head, neighbor, S)
        delta = load_fp32(delta_ptr, head * S + neighbor, (neighbor >= 0) & (neighbor < S))
        p, dp = _p_and_dp(q, k, dout, v, top, total, scale, neighbor, S)
        dk += (p * (dp - delta))[:, None] * q
        dv += p[:, None] * dout
    if dk_ptr is not None:
        _store_rows(dk_ptr, dk * scale, b, h, s, d, H, S, D)
    if dv_ptr is not None:
        _store_rows(dv_ptr, dv, b, h, s, d, H, S, D)


def _launch(S, D):
    """Return (rows, columns, warps) of a program, which has whole rows.

    A thread has 16 entries of each tensor in its registers.
    """
    columns = max(next_power_of_2(D), 16)
    rows = min(max(2048 // columns, 1), next_power_of_2(S))
    return rows, columns, min(max(rows * columns // 512, 1), 16)


def _empty_tokens_first(x):
    """Return an empty tensor like x (B, H, S, D), in memory (B, S, H, D), as a projection's is."""
    B, H, S, D = x.shape
    return torch.empty_strided(x.shape, (S * H * D, D, H * D, 1), dtype=x.dtype, device=x.device)


def _empty_outputs(q, k, v, kernel_size, dilation, scale):
    top, total = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    return _empty_tokens_first(q), top, total


def _empty_gradients(
    dout, q, k, v, top, total, kernel_size, dilation, scale, need_dq, need_dk, need_dv
):
    pairs = (q, need_dq), (k, need_dk), (v, need_dv)
    return tuple(_empty_tokens_first(x) if need else None for x, need in pairs)


def _batch_head_token_strides(*tensors):
    strides = []
    for x in tensors:
        strides += x.stride()[:3]
    return strides


@custom_op("neighborhood_attention", _empty_outputs)
def neighborhood_attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel_size: int, dilation: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out in q's dtype, and maximum and sum of each softmax, (B, H, S).

    q, k, v are (B, H, S, D) with unit stride in D.
    """
    out, top, total = _empty_outputs(q, k, v, kernel_size, dilation, scale)
    B, H, S, D = q.shape
    if q.numel():
        rows, columns, warps = _launch(S, D)
        _fwd[(B * H * cdiv(S, rows),)](
            q,
            k,
            v,
            out,
            top,
            total,
            *_batch_head_token_strides(q, k, v),
            H,
            S,
            D,
            _radius(S, kernel_size, dilation),
            dilation,
            scale,
            BLOCK_S=rows,
            BLOCK_D=columns,
            num_warps=devices.limit_warps(warps, q),
        )
    return out, top, total


@custom_op("neighborhood_attention_backward", _empty_gradients)
def neighborhood_attention_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    kernel_size: int,
    dilation: int,
    scale: float,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk, dv like q, k, v; None for one that is not needed.

    dout, q, k, v are (B, H, S, D) with unit stride in D.
    """
    options = kernel_size, dilation, scale, need_dq, need_dk, need_dv
    dq, dk, dv = _empty_gradients(dout, q, k, v, top, total, *options)
    B, H, S, D = q.shape
    if not q.numel():
        return dq, dk, dv
    rows, columns, warps = _launch(S, D)
    grid = (B * H * cdiv(S, rows),)
    delta = torch.empty_like(top)
    radius = _radius(S, kernel_size, dilation)
    scalars = *_batch_head_token_strides(dout, q, k, v), H, S, D, radius, dilation, scale
    block = dict(BLOCK_S=rows, BLOCK_D=columns, num_warps=devices.limit_warps(warps, q))
    _bwd_query[grid](dout, q, k, v, top, total, dq, delta, *scalars, **block)
    if need_dk or need_dv:
        _bwd_key[grid](dout, q, k, v, top, total, delta, dk, dv, *scalars, **block)
    return dq, dk, dv


class LigerFusedNeighborhoodAttentionFunction(Function):
    """``apply(query, key, value, kernel_size=7, dilation=1, scale=None) -> out`` like query."""

    reference = staticmethod(fused_neighborhood_attention_reference)

    @staticmethod
    def forward(ctx, query, key, value, kernel_size=7, dilation=1, scale=None):
        name = "LigerFusedNeighborhoodAttentionFunction"
        devices.require_kernels(name, query)
        if (
            query.dim() != 4
            or key is None
            or value is None
            or not check.matches(query, query.shape, key, value)
        ):
            _check_qkv(name, query, key, value)
        kernel_size, dilation, scale = _check_window(name, kernel_size, dilation, scale)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        ctx.options = kernel_size, dilation, scale
        out, top, total = neighborhood_attention_fwd(
            *map(with_unit_stride, (query, key, value)), *ctx.options
        )
        ctx.save_for_backward(query, key, value, top, total)
        return out

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:3], *ctx.options

    @staticmethod
    def backward(ctx, dout):
        *qkv, top, total = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        dout, q, k, v = map(with_unit_stride, (dout, *qkv))
        grads = neighborhood_attention_bwd(dout, q, k, v, top, total, *ctx.options, *needs)
        grads = (d if need else None for d, need in zip(grads, needs, strict=True))
        return *grads, None, None, None


def _check_qkv(name, query, key, value):
    check.floats(name, dict(query=query, key=key, value=value))
    if query.dim() != 4:
        raise ValueError(f"{name}: query has shape {tuple(query.shape)}, give (B, H, S, D)")
    for argument, x in dict(key=key, value=value).items():
        check.shape(name, argument, x, tuple(query.shape))


def _check_window(name, kernel_size, dilation, scale):
    """Check the options. Returns them as Python numbers; scale may be None."""
    numbers = []
    for argument, value in dict(kernel_size=kernel_size, dilation=dilation).items():
        numbers.append(check.integer(name, argument, value))
        if numbers[-1] < 1:
            raise ValueError(f"{name}: {argument} is {value}, give an int from 1 on")
    return *numbers, None if scale is None else check.finite(name, "scale", scale)


def liger_fused_neighborhood_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend from each query to the keys in a window around it.

    The window is cut off at the ends of the sequence.

    Args:
        query, key, value: (B, H, S, D) of one shape, fp32, bf16 or fp16, any strides.
        kernel_size: how many keys a window has; an even number counts as one more.
        dilation: the distance from a key of the window to the next one.
        scale: the factor of the scores; None for D**-0.5.

    Returns:
        (B, H, S, D) in query's dtype.

    Raises:
        ValueError: query, key and value differ in shape or device; kernel_size or dilation is less
            than 1.
        TypeError: something is not a floating point tensor; kernel_size or dilation is not an int,
            scale not a number.

    Source: arXiv:2204.07143.
    """
    name = "liger_fused_neighborhood_attention"
    _check_qkv(name, query, key, value)
    window = _check_window(name, kernel_size, dilation, scale)
    if not devices.has_kernels(query):
        return fused_neighborhood_attention_reference(query, key, value, *window)
    return LigerFusedNeighborhoodAttentionFunction.call(query, key, value, *window)


class LigerFusedNeighborhoodAttention(torch.nn.Module):
    """Projections around `liger_fused_neighborhood_attention`, with ``dropout`` after it.

    There are no masks.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        kernel_size, dilation, scale = _check_window(name, kernel_size, dilation, scale)
        if kernel_size % 2 == 0:
            raise ValueError(f"{name}: kernel_size is {kernel_size}, give an odd number")
        check.size(name, "hidden_size", hidden_size)
        if check.integer(name, "num_heads", num_heads) < 1 or hidden_size % num_heads:
            raise ValueError(
                f"{name}: num_heads is {num_heads}, give a divisor of hidden_size, {hidden_size}"
            )
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.kernel_size = kernel_size
        self.dilation = dilation
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            torch.nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(4)
        )
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None):
        if attention_mask is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: attention_mask is given, only None can be honoured"
            )
        heads = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        q = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        k = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        v = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        out = liger_fused_neighborhood_attention(
            q, k, v, self.kernel_size, self.dilation, self.scale
        )
        return self.out_proj(self.dropout(out.transpose(1, 2).reshape(hidden_states.shape)))

    def extra_repr(self):
        return (
            f"num_heads={self.num_heads}, kernel_size={self.kernel_size}, dilation={self.dilation}"
        )


class LigerFusedNeighborhoodAttentionLayer(torch.nn.Module):
    """``x + dropout(attention(layer_norm(x)))``."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.layer_norm = LigerLayerNorm(hidden_size, eps=layer_norm_eps)
        self.attention = LigerFusedNeighborhoodAttention(
            hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale
        )
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None):
        attention_output = self.attention(self.layer_norm(hidden_states), attention_mask)
        return hidden_states + self.dropout(attention_output)


@dataclass
class LigerFusedNeighborhoodAttentionConfig:
    """The arguments of `LigerFusedNeighborhoodAttentionLayer`."""

    hidden_size: int = 768
    num_heads: int = 12
    kernel_size: int = 7
    dilation: int = 1
    bias: bool = True
    dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    scale: float | None = None


def _inputs(*shape):
    return {name: torch.randn(shape).requires_grad_() for name in ("query", "key", "value")}


def _traffic(inputs):
    size = inputs["query"].numel() * inputs["query"].element_size()
    return 4 * size, 8 * size


CASES.append(
    Case(
        "neighborhood_attention",
        fn=liger_fused_neighborhood_attention,
        reference=fused_neighborhood_attention_reference,
        inputs=_inputs,
        shapes=((1, 1, 1, 8), (2, 1, 9, 12), (1, 1, 35, 66), (1, 1, 6, 33)),
        options=(dict(kernel_size=5, dilation=2), dict(kernel_size=5, dilation=2, scale=0.3)),
        bench=((4, 16, 4096, 64), (2, 32, 8192, 128)),
        traffic=_traffic,
        fp32_roundings=2,
    )
)
