r"""Neighbourhood attention over a sequence: a query sees the keys in a window around it.

    j ∈ window(i):  |i - j| ≤ (kernel_size // 2)·dilation,   i - j a multiple of dilation,   0 ≤ j < S

    s_ij = scale·<q_i, k_j>,   p_i = softmax of s_i over the window,   out_i = Σ_j p_ij·v_j

    dp_ij = <dout_i, v_j>,   δ_i = Σ_j p_ij·dp_ij,   ds_ij = p_ij·(dp_ij - δ_i)
    dq_i = scale·Σ_j ds_ij·k_j,   dk_j = scale·Σ_i ds_ij·q_i,   dv_j = Σ_i p_ij·dout_i

At the ends of the sequence the window is cut off, not moved. The window is symmetric, so the sums
over i have the positions of those over j: a program that has a block of rows visits their
neighbours, one distance after the other. It never has a score outside of a window. Everything is
computed in fp32 and rounded once; backward computes p again, from the maximum and the sum of each
softmax.

Source: Hassani et al., Neighborhood Attention Transformer, arXiv:2204.07143, where the window is
moved at the ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, Function, custom_op, unit_stride
from liger_kernel.core.tile import INF, cdiv, exp, next_power_of_2, online_max, read, tl, triton
from liger_kernel.ops.norm.layer_norm import LigerLayerNorm


def _reach(S, kernel_size, dilation):
    """How many neighbours a query has on either side, as far as the sequence goes."""
    return min(kernel_size // 2, max(S - 1, 0) // dilation)


def fused_neighborhood_attention_reference(
    query, key, value, kernel_size=7, dilation=1, scale=None
):
    q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (query, key, value))
    S, R = q.shape[2], _reach(q.shape[2], kernel_size, dilation)
    at = torch.arange(S, device=q.device)[:, None] + dilation * torch.arange(
        -R, R + 1, device=q.device
    )
    outside = (at < 0) | (at >= S)
    k, v = (x[:, :, at.clamp(0, max(S - 1, 0))].masked_fill(outside[..., None], 0) for x in (k, v))
    scores = (q.unsqueeze(3) * k).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = scores.masked_fill(outside, -float("inf")).softmax(-1)
    return (p.unsqueeze(-1) * v).sum(3).to(query.dtype)


@triton.jit
def _place(H, S, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program's block: its head among all and in its batch entry, that entry, its rows, and the
    columns."""
    blocks = tl.cdiv(S, BLOCK_S)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    s = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)[:, None]
    return head, head % H, head // H, s, tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _load(x_ptr, s, stride, d, S, D):
    """Rows s of a head; 0 where there is none."""
    return read(x_ptr, s * stride + d, (s >= 0) & (s < S) & (d < D))


@triton.jit
def _scores(q, k, scale, at, S):
    """Of the rows with their neighbours at ``at``."""
    return tl.where((at >= 0) & (at < S), tl.sum(q * k, axis=1, keep_dims=True) * scale, -INF)


@triton.jit
def _softmax_of(top_ptr, sum_ptr, head, at, S):
    """Maximum and sum of the softmax of these rows."""
    known = (at >= 0) & (at < S)
    return read(top_ptr, head * S + at, known), tl.load(
        sum_ptr + head * S + at, mask=known, other=1.0
    )


@triton.jit
def _p_and_dp(q, k, dout, v, top, total, scale, at, S):
    """Of pairs of a row with its neighbour, in whichever order."""
    return exp(_scores(q, k, scale, at, S) - top) / total, tl.sum(dout * v, axis=1, keep_dims=True)


@triton.jit
def _store(x_ptr, x, b, h, s, d, H, S, D):
    """Into memory in the order (B, S, H, D)."""
    at = ((b * S + s) * H + h) * D + d
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=(s < S) & (d < D))


@kernel
def _fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    top_ptr,
    sum_ptr,
    q_b,
    q_h,
    q_s,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    H,
    S,
    D,
    R,
    dilation,
    scale,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: BLOCK_S queries of a head. x_b, x_h, x_s are the strides of x."""
    head, h, b, s, d = _place(H, S, BLOCK_S, BLOCK_D)
    q = _load(q_ptr + b * q_b + h * q_h, s, q_s, d, S, D)
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    top = tl.full((BLOCK_S, 1), -INF, dtype=tl.float32)
    total = tl.zeros((BLOCK_S, 1), dtype=tl.float32)
    out = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
    for tap in range(2 * R + 1):
        at = s + (tap - R) * dilation
        scores = _scores(q, _load(k_ptr, at, k_s, d, S, D), scale, at, S)
        new, shift = online_max(top, scores)
        before, p = exp(top - shift), exp(scores - shift)
        total = total * before + p
        out = out * before + p * _load(v_ptr, at, v_s, d, S, D)
        top = new
    total = tl.where(s < S, total, 1.0)
    _store(out_ptr, out / total, b, h, s, d, H, S, D)
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
    do_b,
    do_h,
    do_s,
    q_b,
    q_h,
    q_s,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    H,
    S,
    D,
    R,
    dilation,
    scale,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: δ of BLOCK_S queries, and dq if it is needed."""
    head, h, b, s, d = _place(H, S, BLOCK_S, BLOCK_D)
    dout = _load(dout_ptr + b * do_b + h * do_h, s, do_s, d, S, D)
    q = _load(q_ptr + b * q_b + h * q_h, s, q_s, d, S, D)
    top, total = _softmax_of(top_ptr, sum_ptr, head, s, S)
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    delta = tl.zeros((BLOCK_S, 1), dtype=tl.float32)
    for tap in range(2 * R + 1):
        at = s + (tap - R) * dilation
        k, v = _load(k_ptr, at, k_s, d, S, D), _load(v_ptr, at, v_s, d, S, D)
        p, dp = _p_and_dp(q, k, dout, v, top, total, scale, at, S)
        delta += p * dp
    tl.store(delta_ptr + head * S + s, delta, mask=s < S)
    if dq_ptr is not None:
        dq = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
        for tap in range(2 * R + 1):
            at = s + (tap - R) * dilation
            k, v = _load(k_ptr, at, k_s, d, S, D), _load(v_ptr, at, v_s, d, S, D)
            p, dp = _p_and_dp(q, k, dout, v, top, total, scale, at, S)
            dq += p * (dp - delta) * k
        _store(dq_ptr, dq * scale, b, h, s, d, H, S, D)


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
    do_b,
    do_h,
    do_s,
    q_b,
    q_h,
    q_s,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    H,
    S,
    D,
    R,
    dilation,
    scale,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: dk and dv of BLOCK_S keys."""
    head, h, b, s, d = _place(H, S, BLOCK_S, BLOCK_D)
    k = _load(k_ptr + b * k_b + h * k_h, s, k_s, d, S, D)
    v = _load(v_ptr + b * v_b + h * v_h, s, v_s, d, S, D)
    dout_ptr += b * do_b + h * do_h
    q_ptr += b * q_b + h * q_h
    dk = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
    dv = dk
    for tap in range(2 * R + 1):
        at = s + (tap - R) * dilation
        q, dout = _load(q_ptr, at, q_s, d, S, D), _load(dout_ptr, at, do_s, d, S, D)
        top, total = _softmax_of(top_ptr, sum_ptr, head, at, S)
        delta = read(delta_ptr, head * S + at, (at >= 0) & (at < S))
        p, dp = _p_and_dp(q, k, dout, v, top, total, scale, at, S)
        dk += p * (dp - delta) * q
        dv += p * dout
    if dk_ptr is not None:
        _store(dk_ptr, dk * scale, b, h, s, d, H, S, D)
    if dv_ptr is not None:
        _store(dv_ptr, dv, b, h, s, d, H, S, D)


def _launch(S, D):
    """(rows, columns, warps) of a program, which has whole rows: 16 entries of each tensor in a
    thread's registers."""
    columns = max(next_power_of_2(D), 16)
    rows = min(max(2048 // columns, 1), next_power_of_2(S))
    return rows, columns, min(max(rows * columns // 512, 1), 16)


def _empty(x):
    """Like x (B, H, S, D), with the heads of a position side by side, as a projection has them."""
    B, H, S, D = x.shape
    return torch.empty_strided(x.shape, (S * H * D, D, H * D, 1), dtype=x.dtype, device=x.device)


def _outputs(q, k, v, kernel_size, dilation, scale):
    return _empty(q), *(q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))


def _gradients(dout, q, k, v, top, total, kernel_size, dilation, scale, need_dq, need_dk, need_dv):
    pairs = (q, need_dq), (k, need_dk), (v, need_dv)
    return tuple(_empty(x) if need else None for x, need in pairs)


@custom_op("neighborhood_attention", _outputs)
def neighborhood_attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel_size: int, dilation: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v (B, H, S, D) with unit stride in D -> out in q's dtype, and the softmax's maximum and
    sum (B, H, S)."""
    out, top, total = _outputs(q, k, v, kernel_size, dilation, scale)
    (B, H, S, D), R = q.shape, _reach(q.shape[2], kernel_size, dilation)
    if q.numel():
        rows, columns, warps = _launch(S, D)
        _fwd[(B * H * cdiv(S, rows),)](
            q,
            k,
            v,
            out,
            top,
            total,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            H,
            S,
            D,
            R,
            dilation,
            scale,
            BLOCK_S=rows,
            BLOCK_D=columns,
            num_warps=devices.warps(warps, q),
        )
    return out, top, total


@custom_op("neighborhood_attention_backward", _gradients)
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
    """dout, q, k, v (B, H, S, D) with unit stride in D -> dq, dk, dv like them. What is not needed
    is None."""
    options = kernel_size, dilation, scale, need_dq, need_dk, need_dv
    dq, dk, dv = _gradients(dout, q, k, v, top, total, *options)
    (B, H, S, D), R = q.shape, _reach(q.shape[2], kernel_size, dilation)
    if q.numel():
        rows, columns, warps = _launch(S, D)
        grid, delta = (B * H * cdiv(S, rows),), torch.empty_like(top)
        sizes = [n for x in (dout, q, k, v) for n in x.stride()[:3]] + [H, S, D, R, dilation, scale]
        block = dict(BLOCK_S=rows, BLOCK_D=columns, num_warps=devices.warps(warps, q))
        _bwd_query[grid](dout, q, k, v, top, total, dq, delta, *sizes, **block)
        if need_dk or need_dv:
            _bwd_key[grid](dout, q, k, v, top, total, delta, dk, dv, *sizes, **block)
    return dq, dk, dv


class LigerFusedNeighborhoodAttentionFunction(Function):
    """``apply(query, key, value, kernel_size=7, dilation=1, scale=None) -> out`` like query."""

    @staticmethod
    def reference(query, key, value, kernel_size=7, dilation=1, scale=None):
        return fused_neighborhood_attention_reference(
            query, key, value, kernel_size, dilation, scale
        )

    @staticmethod
    def forward(ctx, query, key, value, kernel_size=7, dilation=1, scale=None):
        name = "LigerFusedNeighborhoodAttentionFunction"
        devices.require_kernels(name, query)
        if (
            query.dim() != 4
            or key is None
            or value is None
            or not check.fits(query, query.shape, key, value)
        ):
            _check_rows(name, query, key, value)
        kernel_size, dilation, scale = _check_window(name, kernel_size, dilation, scale)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        ctx.options = kernel_size, dilation, scale
        out, top, total = neighborhood_attention_fwd(
            *map(unit_stride, (query, key, value)), *ctx.options
        )
        ctx.save_for_backward(query, key, value, top, total)
        return out

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:3], *ctx.options

    @staticmethod
    def backward(ctx, dout):
        *qkv, top, total = ctx.saved_tensors
        need = ctx.needs_input_grad[:3]
        found = neighborhood_attention_bwd(
            *map(unit_stride, (dout, *qkv)), top, total, *ctx.options, *need
        )
        return (
            *(d if needed else None for d, needed in zip(found, need, strict=True)),
            None,
            None,
            None,
        )


def _check_rows(name, query, key, value):
    check.floats(name, dict(query=query, key=key, value=value))
    if query.dim() != 4:
        raise ValueError(f"{name}: query has shape {tuple(query.shape)}, give (B, H, S, D)")
    for argument, x in dict(key=key, value=value).items():
        check.shape(name, argument, x, tuple(query.shape))


def _check_window(name, kernel_size, dilation, scale):
    """-> the numbers, as Python's"""
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
    """Attention of each query to the keys in a window around it, which is cut off at the ends of
    the sequence.

    Args:
        query, key, value: (B, H, S, D) of one shape, fp32, bf16 or fp16, any strides.
        kernel_size: how many keys a window has; of an even number, one more.
        dilation: the distance from a key of the window to the next one.
        scale: of the scores; None for D**-0.5.

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
    _check_rows(name, query, key, value)
    window = _check_window(name, kernel_size, dilation, scale)
    if not devices.has_kernels(query):
        return fused_neighborhood_attention_reference(query, key, value, *window)
    return LigerFusedNeighborhoodAttentionFunction.call(query, key, value, *window)


class LigerFusedNeighborhoodAttention(torch.nn.Module):
    """Projections around `liger_fused_neighborhood_attention`. ``dropout`` is of its result. There
    are no masks."""

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
        self.hidden_size, self.num_heads, self.head_dim = (
            hidden_size,
            num_heads,
            hidden_size // num_heads,
        )
        self.kernel_size, self.dilation = kernel_size, dilation
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
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (
            projection(hidden_states).view(heads).transpose(1, 2) for projection in projections
        )
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
        return hidden_states + self.dropout(
            self.attention(self.layer_norm(hidden_states), attention_mask)
        )


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


CASES.append(
    Case(
        "neighborhood_attention",
        fn=liger_fused_neighborhood_attention,
        reference=fused_neighborhood_attention_reference,
        inputs=lambda *shape: {
            x: torch.randn(shape).requires_grad_() for x in ("query", "key", "value")
        },
        shapes=((1, 1, 1, 8), (2, 1, 9, 12), (1, 1, 35, 66), (1, 1, 6, 33)),
        options=(dict(kernel_size=5, dilation=2), dict(kernel_size=5, dilation=2, scale=0.3)),
        bench=((4, 16, 4096, 64), (2, 32, 8192, 128)),
        traffic=lambda t: tuple(n * t["query"].numel() * t["query"].element_size() for n in (4, 8)),
        fp32_roundings=2,
    )
)
