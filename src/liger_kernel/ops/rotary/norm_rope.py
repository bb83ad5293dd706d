r"""RMSNorm over each head of queries and keys, then the rotary position embedding.

    x̂ = x·rstd,   rstd = 1 / sqrt(mean(x²) + eps),   n = x̂·(w + offset)
    y1 = n1·cos - n2·sin,   y2 = n2·cos + n1·sin

for each pair (n1, n2) of a head's entries; those beyond the angles' width pass: cos = 1, sin = 0. Backward:

    g1 = dy1·cos + dy2·sin,   g2 = dy2·cos - dy1·sin
    with m = g·(w + offset):   dx = rstd·(m - x̂·mean(m·x̂)),   dw = Σ_tokens,heads g·x̂

Rounding is that of the two operators one after the other: ``casting_mode`` says whether x̂ is rounded to the input's
dtype (see rms_norm.py), n is, and so is the result (see rope.py, also for ``interleaved``). Backward rounds g nowhere.
rstd is computed again in backward, which reads all of x anyway: nothing but the inputs is saved.

Source: query and key norms as in Qwen3 (Yang et al., arXiv:2505.09388) and Gemma 3 (arXiv:2503.19786), whose attention
has them before RoPE; Henry et al., Query-Key Normalization for Transformers, arXiv:2010.04245.
"""

from __future__ import annotations

import functools

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, Function, custom_op, gradients, unit_stride
from liger_kernel.core.reduce import sum_rows
from liger_kernel.core.tile import cdiv, next_power_of_2, tl, triton
from liger_kernel.ops.norm.rms_norm import CASTINGS, check_casting, rms_norm_reference
from liger_kernel.ops.norm.rows import LLAMA
from liger_kernel.ops.rotary.rope import angle_strides, result_like, rope_arguments, rope_reference, swapped, token_rows

NAME = "liger_norm_rope"


def norm_rope_reference(
    q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama", unsqueeze_dim=1, interleaved=False
):  # fmt: skip
    q, k, cos, sin, heads_dim, rotary_dim = rope_arguments(q, k, cos, sin, None, unsqueeze_dim, None, interleaved, NAME)
    q, k = (rms_norm_reference(x, w, eps, offset, casting_mode) for x, w in ((q, q_weight), (k, k_weight)))
    q, k = rope_reference(q, k, cos, sin, rotary_dim=rotary_dim, interleaved=bool(interleaved))
    return swapped(q, heads_dim), swapped(k, heads_dim)


@triton.jit
def _columns(n, D: tl.constexpr, R: tl.constexpr):
    """Where the entries of pair n are, unless pairs are side by side. What isn't rotated counts as pairs, too."""
    if R < D:
        return tl.where(n < R // 2, n, n + R // 2), tl.where(n < R // 2, n + R // 2, n + (D + 1) // 2)
    return n, n + D // 2


@triton.jit
def _load(row, mask, D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Both entries of every pair of (tokens, heads) rows: two blocks (tokens, heads, BLOCK_N), in fp32."""
    if PAIRS:
        n = tl.arange(0, 2 * BLOCK_N)[None, None, :]
        x = tl.load(row + n, mask=mask & (n < D), other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_N, 2)))
    else:
        n = tl.arange(0, BLOCK_N)[None, None, :]
        n1, n2 = _columns(n, D, R)
        x1 = tl.load(row + n1, mask=mask & (n < (D + 1) // 2), other=0.0).to(tl.float32)
        x2 = tl.load(row + n2, mask=mask & (n2 < D), other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def _store(row, mask, x1, x2, D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr):
    dtype: tl.constexpr = row.dtype.element_ty
    if PAIRS:
        n = tl.arange(0, 2 * BLOCK_N)[None, None, :]
        x = tl.reshape(tl.join(x1.to(dtype), x2.to(dtype)), (x1.shape[0], x1.shape[1], 2 * BLOCK_N))
        tl.store(row + n, x, mask=mask & (n < D))
    else:
        n = tl.arange(0, BLOCK_N)[None, None, :]
        n1, n2 = _columns(n, D, R)
        tl.store(row + n1, x1.to(dtype), mask=mask & (n < (D + 1) // 2))
        tl.store(row + n2, x2.to(dtype), mask=mask & (n2 < D))


@triton.jit
def _weight(w_ptr, D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr):
    one = tl.full((1, 1, 1), 1, dtype=tl.int32)
    return _load(w_ptr + (one - 1), one > 0, D, R, PAIRS, BLOCK_N)


@triton.jit
def _angles(
    cos_ptr, sin_ptr, b, t, T, cos_b, cos_t, cos_n, sin_b, sin_t, sin_n,
    R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """cos and sin of a token's pairs; 1 and 0 for those that aren't rotated.

    Several tokens' angles are asked for once a head, from the cache: Triton gives a block (tokens, 1, columns) a layout
    of its own, and then takes q through shared memory to meet it.
    """
    n = tl.arange(0, BLOCK_N)[None, None, :]
    if BLOCK_T > 1:
        n += tl.zeros((1, BLOCK_H, 1), dtype=tl.int32)
    mask = (t < T) & (n < R // 2)
    cos = tl.load(cos_ptr + b * cos_b + t * cos_t + n * cos_n, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + b * sin_b + t * sin_t + n * sin_n, mask=mask, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def _rstd(x1, x2, eps, D: tl.constexpr):
    return 1.0 / tl.sqrt(tl.sum(x1 * x1 + x2 * x2, axis=2, keep_dims=True) / D + eps)


@triton.jit
def _xhat(x, rstd, dtype: tl.constexpr, CAST: tl.constexpr):
    xhat = x * rstd
    if CAST == LLAMA:
        xhat = xhat.to(dtype).to(tl.float32)
    return xhat


@triton.jit
def _forward(
    x_ptr, w_ptr, cos_ptr, sin_ptr, y_ptr, x_b, x_h, x_t, cos_b, cos_t, cos_n, sin_b, sin_t, sin_n,
    b, token, group, T, eps, offset,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, CAST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_T tokens from ``token`` on, in one group of BLOCK_H heads of q or of k."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    t = token + tl.arange(0, BLOCK_T)[:, None, None]
    head = tl.cast(group * BLOCK_H, tl.int64) + tl.arange(0, BLOCK_H)[None, :, None]
    mask = (t < T) & (head < H)
    x1, x2 = _load(x_ptr + b * x_b + head * x_h + t * x_t, mask, D, R, PAIRS, BLOCK_N)
    cos, sin = _angles(
        cos_ptr, sin_ptr, b, t, T, cos_b, cos_t, cos_n, sin_b, sin_t, sin_n, R, BLOCK_T, BLOCK_H, BLOCK_N
    )
    if w_ptr is not None:
        w1, w2 = _weight(w_ptr, D, R, PAIRS, BLOCK_N)
    rstd = _rstd(x1, x2, eps, D)
    n1, n2 = _xhat(x1, rstd, dtype, CAST), _xhat(x2, rstd, dtype, CAST)
    if w_ptr is not None:
        n1, n2 = n1 * (w1 + offset), n2 * (w2 + offset)
    n1, n2 = n1.to(dtype).to(tl.float32), n2.to(dtype).to(tl.float32)
    y1, y2 = n1 * cos - n2 * sin, n2 * cos + n1 * sin
    if R < D:  # 0 times an infinity is none of its partner's business
        rotates = tl.arange(0, BLOCK_N)[None, None, :] < R // 2
        y1, y2 = tl.where(rotates, y1, n1), tl.where(rotates, y2, n2)
    y_row = y_ptr + ((b * T + t) * H + head if ROWS else (b * H + head) * T + t) * D
    _store(y_row, mask, y1, y2, D, R, PAIRS, BLOCK_N)


@kernel
def _fwd(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, yq_ptr, yk_ptr, q_b, q_h, q_t, k_b, k_h, k_t,
    cos_b, cos_t, cos_n, sin_b, sin_t, sin_n, T, eps, offset,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr, PAIRS: tl.constexpr, CAST: tl.constexpr,
    UNIT: tl.constexpr, Q_PARTS: tl.constexpr, K_PARTS: tl.constexpr, Q_GROUPS: tl.constexpr, K_GROUPS: tl.constexpr,
    BLOCK_TQ: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_TK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """UNIT tokens fall into Q_PARTS blocks of q and K_PARTS of k, of about the same size. A program has one of them.

    A stride is named after its tensor and dimension; ROWS: a result's memory is (B, T, h, D), else (B, h, T, D).
    """
    part = tl.program_id(0) % (Q_PARTS + K_PARTS)
    unit = tl.program_id(0) // (Q_PARTS + K_PARTS)
    b = tl.cast(unit // tl.cdiv(T, UNIT), tl.int64)
    token = tl.cast(unit % tl.cdiv(T, UNIT), tl.int64) * UNIT
    if part < Q_PARTS:
        _forward(
            q_ptr, q_weight_ptr, cos_ptr, sin_ptr, yq_ptr, q_b, q_h, q_t, cos_b, cos_t, cos_n, sin_b, sin_t, sin_n,
            b, token + part // Q_GROUPS * BLOCK_TQ, part % Q_GROUPS, T, eps, offset,
            HQ, D, R, Q_ROWS, PAIRS, CAST, BLOCK_TQ, BLOCK_Q, BLOCK_N,
        )  # fmt: skip
    else:
        part -= Q_PARTS
        _forward(
            k_ptr, k_weight_ptr, cos_ptr, sin_ptr, yk_ptr, k_b, k_h, k_t, cos_b, cos_t, cos_n, sin_b, sin_t, sin_n,
            b, token + part // K_GROUPS * BLOCK_TK, part % K_GROUPS, T, eps, offset,
            HK, D, R, K_ROWS, PAIRS, CAST, BLOCK_TK, BLOCK_K, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, cos_ptr, sin_ptr, dx_ptr, dw_ptr, dy_b, dy_h, dy_t, x_b, x_h, x_t,
    cos_b, cos_t, cos_n, sin_b, sin_t, sin_n, first, step, UNITS, part, PARTS: tl.constexpr, GROUPS: tl.constexpr,
    T, eps, offset,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, CAST: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of q or of k in every ``step``-th unit of tokens, and one row of its partial dw."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    head = tl.cast(part % GROUPS * BLOCK_H, tl.int64) + tl.arange(0, BLOCK_H)[None, :, None]
    if w_ptr is not None:
        w1, w2 = _weight(w_ptr, D, R, PAIRS, BLOCK_N)
        w1, w2 = w1 + offset, w2 + offset
    dw1 = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_N), dtype=tl.float32)
    dw2 = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_N), dtype=tl.float32)
    for unit in tl.range(first, UNITS, step, num_stages=STAGES):
        b = tl.cast(unit // tl.cdiv(T, UNIT), tl.int64)
        token = tl.cast(unit % tl.cdiv(T, UNIT), tl.int64) * UNIT + part // GROUPS * BLOCK_T
        t = token + tl.arange(0, BLOCK_T)[:, None, None]
        mask = (t < T) & (head < H)
        x1, x2 = _load(x_ptr + b * x_b + head * x_h + t * x_t, mask, D, R, PAIRS, BLOCK_N)
        dy1, dy2 = _load(dy_ptr + b * dy_b + head * dy_h + t * dy_t, mask, D, R, PAIRS, BLOCK_N)
        cos, sin = _angles(
            cos_ptr, sin_ptr, b, t, T, cos_b, cos_t, cos_n, sin_b, sin_t, sin_n, R, BLOCK_T, BLOCK_H, BLOCK_N
        )
        rstd = tl.where(mask, _rstd(x1, x2, eps, D), 0.0)  # without a row there is eps alone, and that may be 0
        g1, g2 = dy1 * cos + dy2 * sin, dy2 * cos - dy1 * sin
        if dw_ptr is not None:
            dw1 += g1 * _xhat(x1, rstd, dtype, CAST)
            dw2 += g2 * _xhat(x2, rstd, dtype, CAST)
        if dx_ptr is not None:
            if w_ptr is not None:
                g1, g2 = g1 * w1, g2 * w2
            along = rstd * rstd / D * tl.sum(g1 * x1 + g2 * x2, axis=2, keep_dims=True)
            dx_row = dx_ptr + ((b * T + t) * H + head if ROWS else (b * H + head) * T + t) * D
            _store(dx_row, mask, rstd * (g1 - x1 * along), rstd * (g2 - x2 * along), D, R, PAIRS, BLOCK_N)
    if dw_ptr is not None:
        dw1 = tl.sum(tl.sum(dw1, axis=0, keep_dims=True), axis=1, keep_dims=True)
        dw2 = tl.sum(tl.sum(dw2, axis=0, keep_dims=True), axis=1, keep_dims=True)
        one = tl.full((1, 1, 1), 1, dtype=tl.int32)
        _store(dw_ptr + (first * PARTS + part) * D + (one - 1), one > 0, dw1, dw2, D, R, PAIRS, BLOCK_N)


@kernel
def _bwd(
    dyq_ptr, dyk_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    dq_ptr, dk_ptr, dq_weight_ptr, dk_weight_ptr, dyq_b, dyq_h, dyq_t, dyk_b, dyk_h, dyk_t,
    q_b, q_h, q_t, k_b, k_h, k_t, cos_b, cos_t, cos_n, sin_b, sin_t, sin_n, T, UNITS, eps, offset,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr, PAIRS: tl.constexpr, CAST: tl.constexpr,
    UNIT: tl.constexpr, Q_PARTS: tl.constexpr, K_PARTS: tl.constexpr, Q_GROUPS: tl.constexpr, K_GROUPS: tl.constexpr,
    BLOCK_TQ: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_TK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `_fwd`, and a program takes its block of every num_programs/(Q_PARTS + K_PARTS)-th unit."""
    part = tl.program_id(0) % (Q_PARTS + K_PARTS)
    first = tl.program_id(0) // (Q_PARTS + K_PARTS)
    step = tl.num_programs(0) // (Q_PARTS + K_PARTS)
    if part < Q_PARTS:
        _backward(
            dyq_ptr, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, dq_ptr, dq_weight_ptr, dyq_b, dyq_h, dyq_t, q_b, q_h, q_t,
            cos_b, cos_t, cos_n, sin_b, sin_t, sin_n, first, step, UNITS, part, Q_PARTS, Q_GROUPS, T, eps, offset,
            HQ, D, R, Q_ROWS, PAIRS, CAST, UNIT, BLOCK_TQ, BLOCK_Q, BLOCK_N, STAGES,
        )  # fmt: skip
    else:
        _backward(
            dyk_ptr, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, dk_ptr, dk_weight_ptr, dyk_b, dyk_h, dyk_t, k_b, k_h, k_t,
            cos_b, cos_t, cos_n, sin_b, sin_t, sin_n, first, step, UNITS, part - Q_PARTS, K_PARTS, K_GROUPS, T, eps,
            offset, HK, D, R, K_ROWS, PAIRS, CAST, UNIT, BLOCK_TK, BLOCK_K, BLOCK_N, STAGES,
        )  # fmt: skip


@functools.cache
def _launch(HQ, HK, D, entries):
    """-> the kernels' constants but for the blocks of q and of k in a unit of tokens, and those.

    A block has so many entries, at best all heads of its tokens, so that an angle is read once. q and k have blocks of
    their own, all of one size: no program has more to do than another, however few heads k has.
    """
    pairs = next_power_of_2(cdiv(D, 2))

    def block(H):
        heads = min(H & -H, 32)  # that need no mask: the largest power of two that divides their number
        if heads < 8:
            heads = min(next_power_of_2(H), 32)
        heads = min(heads, max(1, entries // (2 * pairs)))
        return max(1, entries // (2 * pairs * heads)), heads, cdiv(H, heads)

    (tokens_q, heads_q, groups_q), (tokens_k, heads_k, groups_k) = block(HQ), block(HK)
    unit = max(tokens_q, tokens_k)
    constants = dict(
        UNIT=unit, Q_GROUPS=groups_q, K_GROUPS=groups_k, BLOCK_TQ=tokens_q, BLOCK_Q=heads_q,
        BLOCK_TK=tokens_k, BLOCK_K=heads_k, BLOCK_N=pairs,
    )  # fmt: skip
    return constants, unit // tokens_q * groups_q, unit // tokens_k * groups_k


def _outputs(q, k, q_weight, k_weight, cos, sin, heads_dim, rotary_dim, pairs, eps, offset, cast, q_rows, k_rows):
    return result_like(q, q_rows, heads_dim), result_like(k, k_rows, heads_dim)


def _gradients(
    dyq, dyk, q, k, q_weight, k_weight, cos, sin, heads_dim, rotary_dim, pairs, eps, offset, cast, q_rows, k_rows,
    need_dq, need_dk, need_dwq, need_dwk,
):  # fmt: skip
    return (
        result_like(q, q_rows, heads_dim) if need_dq else None,
        result_like(k, k_rows, heads_dim) if need_dk else None,
        q_weight.new_empty(q_weight.shape) if need_dwq else None,
        k_weight.new_empty(k_weight.shape) if need_dwk else None,
    )


@custom_op("norm_rope", _outputs)
def norm_rope_fwd(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None,
    cos: torch.Tensor, sin: torch.Tensor, heads_dim: int, rotary_dim: int, pairs: bool,
    eps: float, offset: float, cast: int, q_rows: bool, k_rows: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """q and k with unit stride in D and their heads in ``heads_dim``; cos, sin (1 or B, T, rotary_dim/2), any strides.

    ``rows``: a result's memory is (B, T, h, D), else (B, h, T, D).
    """
    yq, yk = _outputs(
        q, k, q_weight, k_weight, cos, sin, heads_dim, rotary_dim, pairs, eps, offset, cast, q_rows, k_rows
    )
    q, k = swapped(q, heads_dim), swapped(k, heads_dim)
    (B, HQ, T, D), HK = q.shape, k.shape[1]
    constants, q_parts, k_parts = _launch(HQ, HK, D, 4096)
    _fwd[(B * cdiv(T, constants["UNIT"]) * (q_parts + k_parts),)](
        q, k, q_weight, k_weight, cos, sin, yq, yk, *q.stride()[:3], *k.stride()[:3],
        *angle_strides(cos), *angle_strides(sin), T, eps, offset,
        HQ=HQ, HK=HK, D=D, R=rotary_dim, Q_ROWS=q_rows, K_ROWS=k_rows, PAIRS=pairs, CAST=cast,
        Q_PARTS=q_parts, K_PARTS=k_parts, **constants, num_warps=devices.warps(4, q),
    )  # fmt: skip
    return yq, yk


@custom_op("norm_rope_backward", _gradients)
def norm_rope_bwd(
    dyq: torch.Tensor, dyk: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor,
    heads_dim: int, rotary_dim: int, pairs: bool, eps: float, offset: float, cast: int, q_rows: bool, k_rows: bool,
    need_dq: bool, need_dk: bool, need_dwq: bool, need_dwk: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> dq, dk, dq_weight, dk_weight, those that are needed."""
    dq, dk, dwq, dwk = _gradients(
        dyq, dyk, q, k, q_weight, k_weight, cos, sin, heads_dim, rotary_dim, pairs, eps, offset, cast, q_rows, k_rows,
        need_dq, need_dk, need_dwq, need_dwk,
    )  # fmt: skip
    dyq, dyk, q, k = (swapped(x, heads_dim) for x in (dyq, dyk, q, k))
    (B, HQ, T, D), HK = q.shape, k.shape[1]
    entries = 2048 if pairs else 4096  # to split and join pairs takes registers
    constants, q_parts, k_parts = _launch(HQ, HK, D, entries)
    q_parts, k_parts = q_parts if need_dq or need_dwq else 0, k_parts if need_dk or need_dwk else 0
    parts = q_parts + k_parts
    units = B * cdiv(T, constants["UNIT"])
    programs = min(units, max(1, 2 * devices.multiprocessors(q) // parts))  # of each part
    partial_q = q.new_empty((programs * q_parts, D), dtype=torch.float32) if need_dwq else None
    partial_k = k.new_empty((programs * k_parts, D), dtype=torch.float32) if need_dwk else None
    _bwd[(programs * parts,)](
        dyq, dyk, q, k, q_weight, k_weight, cos, sin, dq, dk, partial_q, partial_k,
        *dyq.stride()[:3], *dyk.stride()[:3], *q.stride()[:3], *k.stride()[:3],
        *angle_strides(cos), *angle_strides(sin), T, units, eps, offset,
        HQ=HQ, HK=HK, D=D, R=rotary_dim, Q_ROWS=q_rows, K_ROWS=k_rows, PAIRS=pairs, CAST=cast,
        Q_PARTS=q_parts, K_PARTS=k_parts, **constants,
        STAGES=devices.stages(3 * entries * q.element_size(), q), num_warps=devices.warps(8, q),
    )  # fmt: skip
    if need_dwq:
        sum_rows(partial_q, dwq)
    if need_dwk:
        sum_rows(partial_k, dwk)
    return dq, dk, dwq, dwk


class LigerNormRopeFunction(Function):
    """``apply(q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama", unsqueeze_dim=1,
    interleaved=False) -> (q, k)``

    The arguments of `liger_norm_rope`. Results and gradients have the memory layout of q and k; neither those nor the
    incoming gradients are written to or copied, whatever their strides.
    """

    reference = staticmethod(norm_rope_reference)

    @staticmethod
    def forward(
        ctx, q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama", unsqueeze_dim=1,
        interleaved=False,
    ):  # fmt: skip
        devices.require_kernels("LigerNormRopeFunction", q)
        swapped_q, swapped_k, cos, sin, heads_dim, rotary_dim = rope_arguments(
            q, k, cos, sin, None, unsqueeze_dim, None, interleaved, NAME
        )
        options = (
            heads_dim, rotary_dim, bool(interleaved), eps, offset, CASTINGS.index(casting_mode),
            token_rows(swapped_q), token_rows(swapped_k),
        )  # fmt: skip
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.options = options
        return norm_rope_fwd(*_readable(q, k, q_weight, k_weight), cos, sin, *options)

    @staticmethod
    def again(ctx, dyq, dyk):
        *given, cos, sin = ctx.saved_tensors
        heads_dim, rotary_dim, pairs, eps, offset, cast, *_ = ctx.options

        def rotated(q, k, q_weight, k_weight):
            q, k = (rms_norm_reference(x, w, eps, offset, CASTINGS[cast]) for x, w in ((q, q_weight), (k, k_weight)))
            return rope_reference(q, k, cos, sin, None, heads_dim, rotary_dim, pairs)

        return *gradients(rotated, given, ctx.needs_input_grad[:4], (dyq, dyk)), *(None,) * 7

    @staticmethod
    def backward(ctx, dyq, dyk):
        needed, (*given, cos, sin) = ctx.needs_input_grad[:4], ctx.saved_tensors
        dys = unit_stride(dyq), unit_stride(dyk)
        found = norm_rope_bwd(*dys, *_readable(*given), cos, sin, *ctx.options, *needed)
        return *(g if need else None for g, need in zip(found, needed, strict=True)), *(None,) * 7


def _readable(q, k, q_weight, k_weight):
    weights = (None if w is None else w.contiguous() for w in (q_weight, k_weight))
    return unit_stride(q), unit_stride(k), *weights


def liger_norm_rope(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, cos: torch.Tensor,
    sin: torch.Tensor, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama", unsqueeze_dim: int = 1,
    interleaved: bool | str = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """RMSNorm of each head of queries and keys, then their rotary position embedding, as in Qwen3 and Gemma 3.

    The same as ``liger_rotary_pos_emb(liger_rms_norm(q, q_weight, ...), liger_rms_norm(k, k_weight, ...), cos, sin)``,
    with q and k read and written once.

    Args:
        q, k: (B, h, T, D) and (B, h_k, T, D), of any strides; with ``unsqueeze_dim=2`` (B, T, h, D) and (B, T, h_k, D).
        q_weight, k_weight: (D,), any floating dtype, or None for no weight (``offset`` is unused then).
        cos, sin: (T, w), (1, T, w) or (B, T, w), or one of these with a 1 where q has its heads. They get no gradient.
            The first w entries of a head are rotated, the others are only normalised.
        eps: added to the mean square.
        offset: added to the weights: 0 for Qwen3, 1 for Gemma 3.
        casting_mode: where the norm rounds: "llama" (Qwen3), "gemma" or "none".
        unsqueeze_dim: the dimension of q and k that holds the heads.
        interleaved: which entries form a pair: False, True or "repeated", see `liger_rotary_pos_emb`.

    Returns:
        q and k normalised and rotated, new tensors with the dtype and memory layout of q and k.

    Raises:
        ValueError, TypeError: as `liger_rotary_pos_emb` and `liger_rms_norm`.

    Source: arXiv:2010.04245 (norm), arXiv:2104.09864 (RoPE).
    """
    check_casting(NAME, casting_mode)
    eps, offset = check.not_negative(NAME, "eps", eps), check.finite(NAME, "offset", offset)
    check.floats(NAME, dict(q=q, k=k), q_weight=q_weight, k_weight=k_weight)
    for name, w, x in (("q_weight", q_weight, q), ("k_weight", k_weight, k)):
        if w is not None and w.shape != x.shape[-1:]:
            raise ValueError(f"{NAME}: {name} has shape {tuple(w.shape)}, head size is {x.shape[-1]}")
    run = LigerNormRopeFunction.apply if devices.has_kernels(q) else norm_rope_reference
    return run(q, k, q_weight, k_weight, cos, sin, eps, offset, casting_mode, unsqueeze_dim, interleaved)


def _inputs(B, T, HQ, HK, D):
    """In Hugging Face's layout: heads within tokens, transposed. Each batch row has positions of its own."""
    angles = torch.randint(0, 1000, (B, T, 1)) * 10000 ** (-torch.arange(0, D, 2) / D)
    angles = torch.cat((angles, angles), -1)
    q, k = (torch.randn(B, T, H, D).transpose(1, 2).requires_grad_() for H in (HQ, HK))
    q_weight, k_weight = (torch.randn(D).requires_grad_() for _ in "qk")
    return dict(q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=angles.cos(), sin=angles.sin())


def _variant(norm_rope):
    """The case's options are for every shape: ``partial`` cuts cos and sin to half a head."""

    def call(
        q, k, q_weight, k_weight, cos, sin, partial=False, interleaved=False, casting="llama", offset=0.0,
        unsqueeze_dim=1,
    ):  # fmt: skip
        width = max(2, q.shape[-1] // 4 * 2) if partial else q.shape[-1]
        cos, sin = cos[..., :width], sin[..., :width]
        if interleaved == "repeated":
            cos, sin = (x[..., : width // 2].repeat_interleave(2, -1) for x in (cos, sin))
        q, k = swapped(q, unsqueeze_dim), swapped(k, unsqueeze_dim)
        return norm_rope(q, k, q_weight, k_weight, cos, sin, 1e-6, offset, casting, unsqueeze_dim, interleaved)

    return call


def _traffic(t):
    """q and k, the half of cos and sin that is used, and the incoming gradients."""
    q, k, cos, sin = (t[x].numel() * t[x].element_size() for x in ("q", "k", "cos", "sin"))
    return tuple(n * (q + k) + (cos + sin) // 2 for n in (2, 3))


CASES.append(
    Case(
        "norm_rope",
        fn=_variant(liger_norm_rope),
        reference=_variant(norm_rope_reference),
        inputs=_inputs,
        shapes=((1, 1, 1, 1, 16), (2, 5, 3, 1, 12), (9, 2, 6, 2, 8), (2, 3, 40, 8, 24)),
        options=(
            dict(),
            dict(casting="gemma", offset=1.0),
            dict(casting="none", unsqueeze_dim=2),
            dict(q_weight=None, k_weight=None),
            dict(partial=True),
            dict(interleaved=True),
            dict(interleaved="repeated", partial=True),
        ),
        bench=((1, 32768, 32, 8, 128), (4, 2048, 32, 8, 128)),
        traffic=_traffic,
        fp32_roundings=2,  # one of each of the two operators
    )
)
