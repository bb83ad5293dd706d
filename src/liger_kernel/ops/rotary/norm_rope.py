r"""RMSNorm over each head of queries and keys, then the rotary position embedding.

    x̂ = x·rstd,   rstd = 1 / sqrt(mean(x²) + eps),   n = x̂·(w + offset)
    y1 = n1·cos - n2·sin,   y2 = n2·cos + n1·sin

for each pair (n1, n2) of a head's entries. Entries beyond the angles' width have cos = 1, sin = 0.
Backward:

    g1 = dy1·cos + dy2·sin,   g2 = dy2·cos - dy1·sin
    with m = g·(w + offset):   dx = rstd·(m - x̂·mean(m·x̂)),   dw = Σ_tokens,heads g·x̂

Forward rounds like the two operators one after the other: n and y are rounded to the input's dtype,
and ``casting_mode`` says whether x̂ is (see rms_norm.py). Backward does not round g. Only the
inputs are saved: backward reads all of x anyway, and computes rstd again. For ``interleaved`` see
rope.py.

Source: Henry et al., Query-Key Normalization for Transformers, arXiv:2010.04245. Qwen3
(arXiv:2505.09388) and Gemma 3 (arXiv:2503.19786) have these norms before RoPE."""

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
from liger_kernel.ops.rotary.rope import (
    angle_strides,
    heads_in_a_block,
    kernel_arguments,
    result_like,
    rope_angles,
    rope_arguments,
    rope_bytes,
    rope_inputs,
    rope_reference,
    row_strides,
    swapped,
)

NAME = "liger_norm_rope"


def norm_rope_reference(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    eps=1e-6,
    offset=0.0,
    casting_mode="llama",
    unsqueeze_dim=1,
    interleaved=False,
):
    q, k, cos, sin, heads_dim, rotary_dim = rope_arguments(
        q, k, cos, sin, None, unsqueeze_dim, None, interleaved, NAME
    )
    q, k = (
        rms_norm_reference(x, w, eps, offset, casting_mode)
        for x, w in ((q, q_weight), (k, k_weight))
    )
    q, k = rope_reference(q, k, cos, sin, rotary_dim=rotary_dim, interleaved=bool(interleaved))
    return swapped(q, heads_dim), swapped(k, heads_dim)


@triton.jit
def _columns(n, D: tl.constexpr, R: tl.constexpr):
    """The columns of both entries of pair n, if they are not neighbours. What is not rotated forms
    pairs, too."""
    if R < D:
        return tl.where(n < R // 2, n, n + R // 2), tl.where(
            n < R // 2, n + R // 2, n + (D + 1) // 2
        )
    return n, n + D // 2


@triton.jit
def _load(row, mask, D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Both entries of every pair, each (tokens, heads, BLOCK_N), in fp32. ``row``: (tokens, heads,
    1) pointers."""
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
def _store(
    row, mask, x1, x2, D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr
):
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
def _rows(x, b, head, t):
    """Pointers to the heads of tokens. x: a pointer and the strides of batch, heads and tokens."""
    return x[0] + b * x[1] + head * x[2] + t * x[3]


@triton.jit
def _angles(
    cos,
    sin,
    b,
    t,
    T,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """cos and sin of a token's pairs; 1 and 0 for those that are not rotated.

    ``cos``, ``sin``: a pointer and the strides of batch, tokens and columns. The angles of several
    tokens are loaded for each head, from the cache. With a block (tokens, 1, columns), Triton would
    move q through shared memory to match that block's layout."""
    n = tl.arange(0, BLOCK_N)[None, None, :]
    if BLOCK_T > 1:
        n += tl.zeros((1, BLOCK_H, 1), dtype=tl.int32)
    mask = (t < T) & (n < R // 2)
    c = tl.load(cos[0] + b * cos[1] + t * cos[2] + n * cos[3], mask=mask, other=1.0).to(tl.float32)
    s = tl.load(sin[0] + b * sin[1] + t * sin[2] + n * sin[3], mask=mask, other=0.0).to(tl.float32)
    return c, s


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
    x,
    w_ptr,
    cos,
    sin,
    y_ptr,
    b,
    token,
    part,
    T,
    eps,
    offset,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Block ``part`` of q or of k in the unit of tokens that begins at ``token``: BLOCK_T tokens,
    BLOCK_H heads."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    GROUPS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    token += part // GROUPS * BLOCK_T
    group = part % GROUPS
    t = token + tl.arange(0, BLOCK_T)[:, None, None]
    head = tl.cast(group * BLOCK_H, tl.int64) + tl.arange(0, BLOCK_H)[None, :, None]
    mask = (t < T) & (head < H)
    x1, x2 = _load(_rows(x, b, head, t), mask, D, R, PAIRS, BLOCK_N)
    cos, sin = _angles(cos, sin, b, t, T, R, BLOCK_T, BLOCK_H, BLOCK_N)
    if w_ptr is not None:
        w1, w2 = _weight(w_ptr, D, R, PAIRS, BLOCK_N)
    rstd = _rstd(x1, x2, eps, D)
    n1, n2 = _xhat(x1, rstd, dtype, CAST), _xhat(x2, rstd, dtype, CAST)
    if w_ptr is not None:
        n1, n2 = n1 * (w1 + offset), n2 * (w2 + offset)
    n1, n2 = n1.to(dtype).to(tl.float32), n2.to(dtype).to(tl.float32)
    y1, y2 = n1 * cos - n2 * sin, n2 * cos + n1 * sin
    if R < D:  # with cos = 1 and sin = 0, an inf would make the other entry of its pair NaN (0·inf)
        rotates = tl.arange(0, BLOCK_N)[None, None, :] < R // 2
        y1, y2 = tl.where(rotates, y1, n1), tl.where(rotates, y2, n2)
    y_row = y_ptr + ((b * T + t) * H + head if ROWS else (b * H + head) * T + t) * D
    _store(y_row, mask, y1, y2, D, R, PAIRS, BLOCK_N)


@kernel
def _fwd(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    yq_ptr,
    yk_ptr,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    cos_b,
    cos_t,
    cos_n,
    sin_b,
    sin_t,
    sin_n,
    T,
    eps,
    offset,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    Q_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    CAST: tl.constexpr,
    Q_PARTS: tl.constexpr,
    K_PARTS: tl.constexpr,
    BLOCK_TQ: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_TK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """UNIT tokens are Q_PARTS blocks of q and K_PARTS blocks of k, all of about the same size. A
    program processes one.

    A stride is named after its tensor and dimension. ROWS: a result's memory is (B, T, h, D), else
    (B, h, T, D)."""
    UNIT: tl.constexpr = BLOCK_TQ if BLOCK_TQ > BLOCK_TK else BLOCK_TK
    cos, sin = (cos_ptr, cos_b, cos_t, cos_n), (sin_ptr, sin_b, sin_t, sin_n)
    part = tl.program_id(0) % (Q_PARTS + K_PARTS)
    unit = tl.program_id(0) // (Q_PARTS + K_PARTS)
    b = tl.cast(unit // tl.cdiv(T, UNIT), tl.int64)
    token = tl.cast(unit % tl.cdiv(T, UNIT), tl.int64) * UNIT
    if part < Q_PARTS:
        _forward(
            (q_ptr, q_b, q_h, q_t),
            q_weight_ptr,
            cos,
            sin,
            yq_ptr,
            b,
            token,
            part,
            T,
            eps,
            offset,
            HQ,
            D,
            R,
            Q_ROWS,
            PAIRS,
            CAST,
            BLOCK_TQ,
            BLOCK_Q,
            BLOCK_N,
        )
    else:
        _forward(
            (k_ptr, k_b, k_h, k_t),
            k_weight_ptr,
            cos,
            sin,
            yk_ptr,
            b,
            token,
            part - Q_PARTS,
            T,
            eps,
            offset,
            HK,
            D,
            R,
            K_ROWS,
            PAIRS,
            CAST,
            BLOCK_TK,
            BLOCK_K,
            BLOCK_N,
        )


@triton.jit
def _backward(
    dy,
    x,
    w_ptr,
    cos,
    sin,
    dx_ptr,
    dw_ptr,
    first,
    step,
    UNITS,
    part,
    T,
    eps,
    offset,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    CAST: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Block ``part`` of q or of k in every ``step``-th unit of tokens, and one row of its partial
    dw."""
    dtype: tl.constexpr = x[0].dtype.element_ty
    GROUPS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
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
        x1, x2 = _load(_rows(x, b, head, t), mask, D, R, PAIRS, BLOCK_N)
        dy1, dy2 = _load(_rows(dy, b, head, t), mask, D, R, PAIRS, BLOCK_N)
        c, s = _angles(cos, sin, b, t, T, R, BLOCK_T, BLOCK_H, BLOCK_N)
        rstd = tl.where(
            mask, _rstd(x1, x2, eps, D), 0.0
        )  # of a row that does not exist, rstd is 1/0 if eps is 0
        g1, g2 = dy1 * c + dy2 * s, dy2 * c - dy1 * s
        if dw_ptr is not None:
            dw1 += g1 * _xhat(x1, rstd, dtype, CAST)
            dw2 += g2 * _xhat(x2, rstd, dtype, CAST)
        if dx_ptr is not None:
            if w_ptr is not None:
                g1, g2 = g1 * w1, g2 * w2
            along = rstd * rstd / D * tl.sum(g1 * x1 + g2 * x2, axis=2, keep_dims=True)
            dx_row = dx_ptr + ((b * T + t) * H + head if ROWS else (b * H + head) * T + t) * D
            _store(
                dx_row,
                mask,
                rstd * (g1 - x1 * along),
                rstd * (g2 - x2 * along),
                D,
                R,
                PAIRS,
                BLOCK_N,
            )
    if dw_ptr is not None:
        dw1 = tl.sum(tl.sum(dw1, axis=0, keep_dims=True), axis=1, keep_dims=True)
        dw2 = tl.sum(tl.sum(dw2, axis=0, keep_dims=True), axis=1, keep_dims=True)
        one = tl.full((1, 1, 1), 1, dtype=tl.int32)
        _store(
            dw_ptr + (first * PARTS + part) * D + (one - 1), one > 0, dw1, dw2, D, R, PAIRS, BLOCK_N
        )


@kernel
def _bwd(
    dyq_ptr,
    dyk_ptr,
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    dq_ptr,
    dk_ptr,
    dq_weight_ptr,
    dk_weight_ptr,
    dyq_b,
    dyq_h,
    dyq_t,
    dyk_b,
    dyk_h,
    dyk_t,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    cos_b,
    cos_t,
    cos_n,
    sin_b,
    sin_t,
    sin_n,
    T,
    UNITS,
    eps,
    offset,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    Q_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    CAST: tl.constexpr,
    Q_PARTS: tl.constexpr,
    K_PARTS: tl.constexpr,
    BLOCK_TQ: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_TK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `_fwd`, but a program processes its block of every n-th unit. Without gradients of q,
    Q_PARTS is 0."""
    UNIT: tl.constexpr = BLOCK_TQ if BLOCK_TQ > BLOCK_TK else BLOCK_TK
    cos, sin = (cos_ptr, cos_b, cos_t, cos_n), (sin_ptr, sin_b, sin_t, sin_n)
    part = tl.program_id(0) % (Q_PARTS + K_PARTS)
    first = tl.program_id(0) // (Q_PARTS + K_PARTS)
    step = tl.num_programs(0) // (Q_PARTS + K_PARTS)
    if part < Q_PARTS:
        _backward(
            (dyq_ptr, dyq_b, dyq_h, dyq_t),
            (q_ptr, q_b, q_h, q_t),
            q_weight_ptr,
            cos,
            sin,
            dq_ptr,
            dq_weight_ptr,
            first,
            step,
            UNITS,
            part,
            T,
            eps,
            offset,
            HQ,
            D,
            R,
            Q_ROWS,
            PAIRS,
            CAST,
            UNIT,
            Q_PARTS,
            BLOCK_TQ,
            BLOCK_Q,
            BLOCK_N,
            STAGES,
        )
    else:
        _backward(
            (dyk_ptr, dyk_b, dyk_h, dyk_t),
            (k_ptr, k_b, k_h, k_t),
            k_weight_ptr,
            cos,
            sin,
            dk_ptr,
            dk_weight_ptr,
            first,
            step,
            UNITS,
            part - Q_PARTS,
            T,
            eps,
            offset,
            HK,
            D,
            R,
            K_ROWS,
            PAIRS,
            CAST,
            UNIT,
            K_PARTS,
            BLOCK_TK,
            BLOCK_K,
            BLOCK_N,
            STAGES,
        )


@functools.cache
def _launch(HQ, HK, D, entries):
    """-> the block sizes, the length of a unit of tokens, and how many blocks of q and of k are in
    a unit.

    A block has ``entries`` entries, with all heads of its tokens if they fit, so that an angle is
    read once. q and k have separate blocks of the same size: all programs have equal work, even if
    k has few heads."""
    pairs = next_power_of_2(cdiv(D, 2))

    def block(H):
        heads = min(heads_in_a_block(H), max(1, entries // (2 * pairs)))
        return max(1, entries // (2 * pairs * heads)), heads, cdiv(H, heads)

    (tokens_q, heads_q, groups_q), (tokens_k, heads_k, groups_k) = block(HQ), block(HK)
    unit = max(tokens_q, tokens_k)
    blocks = dict(
        BLOCK_TQ=tokens_q, BLOCK_Q=heads_q, BLOCK_TK=tokens_k, BLOCK_K=heads_k, BLOCK_N=pairs
    )
    return blocks, unit, unit // tokens_q * groups_q, unit // tokens_k * groups_k


def _outputs(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    heads_dim,
    rotary_dim,
    pairs,
    q_rows,
    k_rows,
    eps,
    offset,
    cast,
):
    return result_like(q, q_rows, heads_dim), result_like(k, k_rows, heads_dim)


def _gradients(
    dyq,
    dyk,
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    heads_dim,
    rotary_dim,
    pairs,
    q_rows,
    k_rows,
    eps,
    offset,
    cast,
    need_dq,
    need_dk,
    need_dwq,
    need_dwk,
):
    return (
        result_like(q, q_rows, heads_dim) if need_dq else None,
        result_like(k, k_rows, heads_dim) if need_dk else None,
        q_weight.new_empty(q_weight.shape) if need_dwq else None,
        k_weight.new_empty(k_weight.shape) if need_dwk else None,
    )


@custom_op("norm_rope", _outputs)
def norm_rope_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads_dim: int,
    rotary_dim: int,
    pairs: bool,
    q_rows: bool,
    k_rows: bool,
    eps: float,
    offset: float,
    cast: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> q and k normalised and rotated; cos, sin are (1 or B, T, rotary_dim/2). The weights are
    contiguous.

    Strides are asked for in here, as in `rope_rotate`. For heads_dim to k_rows see `Layout` in
    rope.py."""
    yq, yk = result_like(q, q_rows, heads_dim), result_like(k, k_rows, heads_dim)
    q, k = (swapped(unit_stride(x), heads_dim) for x in (q, k))
    (B, HQ, T, D), HK = q.shape, k.shape[1]
    blocks, unit, q_parts, k_parts = _launch(HQ, HK, D, 4096)
    _fwd[(B * cdiv(T, unit) * (q_parts + k_parts),)](
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        yq,
        yk,
        *row_strides(q, k),
        *angle_strides(cos, sin),
        T,
        eps,
        offset,
        HQ=HQ,
        HK=HK,
        D=D,
        R=rotary_dim,
        Q_ROWS=q_rows,
        K_ROWS=k_rows,
        PAIRS=pairs,
        CAST=cast,
        Q_PARTS=q_parts,
        K_PARTS=k_parts,
        **blocks,
        num_warps=devices.warps(4, q),
    )
    return yq, yk


@custom_op("norm_rope_backward", _gradients)
def norm_rope_bwd(
    dyq: torch.Tensor,
    dyk: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads_dim: int,
    rotary_dim: int,
    pairs: bool,
    q_rows: bool,
    k_rows: bool,
    eps: float,
    offset: float,
    cast: int,
    need_dq: bool,
    need_dk: bool,
    need_dwq: bool,
    need_dwk: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dq, dk, dq_weight, dk_weight. What is not needed is None."""
    dq, dk, dwq, dwk = _gradients(
        dyq,
        dyk,
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        heads_dim,
        rotary_dim,
        pairs,
        q_rows,
        k_rows,
        eps,
        offset,
        cast,
        need_dq,
        need_dk,
        need_dwq,
        need_dwk,
    )
    dyq, dyk, q, k = (swapped(unit_stride(x), heads_dim) for x in (dyq, dyk, q, k))
    (B, HQ, T, D), HK = q.shape, k.shape[1]
    entries = 2048 if pairs else 4096  # splitting and joining pairs takes registers
    blocks, unit, q_parts, k_parts = _launch(HQ, HK, D, entries)
    q_parts, k_parts = q_parts if need_dq or need_dwq else 0, k_parts if need_dk or need_dwk else 0
    parts, units = q_parts + k_parts, B * cdiv(T, unit)
    programs = min(units, max(1, 2 * devices.multiprocessors(q) // parts))  # for each part
    partial_q = q.new_empty((programs * q_parts, D), dtype=torch.float32) if need_dwq else None
    partial_k = k.new_empty((programs * k_parts, D), dtype=torch.float32) if need_dwk else None
    _bwd[(programs * parts,)](
        dyq,
        dyk,
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        dq,
        dk,
        partial_q,
        partial_k,
        *row_strides(dyq, dyk, q, k),
        *angle_strides(cos, sin),
        T,
        units,
        eps,
        offset,
        HQ=HQ,
        HK=HK,
        D=D,
        R=rotary_dim,
        Q_ROWS=q_rows,
        K_ROWS=k_rows,
        PAIRS=pairs,
        CAST=cast,
        Q_PARTS=q_parts,
        K_PARTS=k_parts,
        **blocks,
        STAGES=devices.stages(3 * entries * q.element_size(), q),
        num_warps=devices.warps(8, q),
    )
    if need_dwq:
        sum_rows(partial_q, dwq)
    if need_dwk:
        sum_rows(partial_k, dwk)
    return dq, dk, dwq, dwk


class LigerNormRopeFunction(Function):
    """``apply(q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama",
    unsqueeze_dim=1, interleaved=False) -> (q, k)``

    The arguments of `liger_norm_rope`. Results and gradients have the memory layout of q and k. q,
    k and the incoming gradients are not written to, and are copied only if the entries of a head
    are not contiguous."""

    reference = staticmethod(norm_rope_reference)

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        eps=1e-6,
        offset=0.0,
        casting_mode="llama",
        unsqueeze_dim=1,
        interleaved=False,
    ):
        devices.require_kernels("LigerNormRopeFunction", q)
        cos, sin, layout = kernel_arguments(
            q, k, cos, sin, None, unsqueeze_dim, None, interleaved, NAME
        )
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.layout, ctx.options = layout, (eps, offset, CASTINGS.index(casting_mode))
        return norm_rope_fwd(
            q, k, *_contiguous(q_weight, k_weight), cos, sin, *layout, *ctx.options
        )

    @staticmethod
    def again(ctx, dyq, dyk):
        *given, cos, sin = ctx.saved_tensors
        layout, (eps, offset, cast) = ctx.layout, ctx.options

        def rotated(q, k, q_weight, k_weight):
            q, k = (
                rms_norm_reference(x, w, eps, offset, CASTINGS[cast])
                for x, w in ((q, q_weight), (k, k_weight))
            )
            return rope_reference(
                q, k, cos, sin, None, layout.heads_dim, layout.rotary_dim, layout.pairs
            )

        return *gradients(rotated, given, ctx.needs_input_grad[:4], (dyq, dyk)), *(None,) * 7

    @staticmethod
    def backward(ctx, dyq, dyk):
        needed, (q, k, *weights, cos, sin) = ctx.needs_input_grad[:4], ctx.saved_tensors
        found = norm_rope_bwd(
            dyq, dyk, q, k, *_contiguous(*weights), cos, sin, *ctx.layout, *ctx.options, *needed
        )
        return *(g if need else None for g, need in zip(found, needed, strict=True)), *(None,) * 7


def _contiguous(*weights):
    return (None if w is None else w.contiguous() for w in weights)


def liger_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    unsqueeze_dim: int = 1,
    interleaved: bool | str = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of each head of queries and keys, then rotary position embedding, as in Qwen3 and
    Gemma 3.

    The same as ``liger_rotary_pos_emb(liger_rms_norm(q, q_weight, ...), liger_rms_norm(k, k_weight,
    ...), cos, sin)``, but q and k are read and written once.

    Args:
        q, k: (B, h, T, D) and (B, h_k, T, D), fp32, bf16 or fp16, of any strides. With
        ``unsqueeze_dim=2``:
            (B, T, h, D) and (B, T, h_k, D).
        q_weight, k_weight: (D,), any floating dtype, or None for no weight (``offset`` is not used
        then).
        cos, sin: (T, w), (1, T, w) or (B, T, w); or one of these with a dimension of size 1 where q
        has its heads. They
            get no gradient. The first w entries of a head are rotated, the others are only
            normalised.
        eps: added to the mean square.
        offset: added to the weights: 0 for Qwen3, 1 for Gemma 3.
        casting_mode: where the norm rounds: "llama" (Qwen3), "gemma" or "none".
        unsqueeze_dim: the dimension of q and k that holds the heads.
        interleaved: which entries form a pair: False, True or "repeated", see
        `liger_rotary_pos_emb`.

    Returns:
        q and k normalised and rotated, in new tensors with the dtype and memory layout of q and k.

    Raises:
        ValueError, TypeError: as `liger_rotary_pos_emb` and `liger_rms_norm`.

    Source: arXiv:2010.04245 (norm), arXiv:2104.09864 (RoPE).
    """
    check_casting(NAME, casting_mode)
    eps, offset = check.not_negative(NAME, "eps", eps), check.finite(NAME, "offset", offset)
    check.floats(NAME, dict(q=q, k=k), q_weight=q_weight, k_weight=k_weight)
    for name, w, x in (("q_weight", q_weight, q), ("k_weight", k_weight, k)):
        if w is not None and w.shape != x.shape[-1:]:
            raise ValueError(
                f"{NAME}: {name} has shape {tuple(w.shape)}, head size is {x.shape[-1]}"
            )
    run = LigerNormRopeFunction.call if devices.has_kernels(q) else norm_rope_reference
    return run(
        q, k, q_weight, k_weight, cos, sin, eps, offset, casting_mode, unsqueeze_dim, interleaved
    )


def _inputs(*shape):
    rope, weights = rope_inputs(*shape), (torch.randn(shape[-1]).requires_grad_() for _ in "qk")
    q_weight, k_weight = weights
    return dict(
        q=rope["q"],
        k=rope["k"],
        q_weight=q_weight,
        k_weight=k_weight,
        cos=rope["cos"],
        sin=rope["sin"],
    )


def _variant(norm_rope):
    """A function of the case's options, which hold for every shape."""

    def call(
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        partial=False,
        interleaved=False,
        casting="llama",
        offset=0.0,
        unsqueeze_dim=1,
    ):
        cos, sin = rope_angles(cos, sin, partial, interleaved)
        q, k = swapped(q, unsqueeze_dim), swapped(k, unsqueeze_dim)
        return norm_rope(
            q, k, q_weight, k_weight, cos, sin, 1e-6, offset, casting, unsqueeze_dim, interleaved
        )

    return call


def _traffic(t):
    rows, angles = rope_bytes(t)
    return 2 * rows + angles, 3 * rows + angles  # backward also reads the incoming gradients


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
