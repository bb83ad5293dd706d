"""The kernel of the rotary operators. `rope` has the mathematics and the launch."""

from __future__ import annotations

from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import tl, triton


@triton.jit
def _load_pairs(
    x_row, mask, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr
):
    """Load both entries of every pair, each (tokens, heads, BLOCK_PAIRS), in fp32."""
    if INTERLEAVED:
        n = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        x = tl.load(x_row + n, mask=mask & (n < ROTARY_DIM), other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_PAIRS, 2)))
    else:
        n = tl.arange(0, BLOCK_PAIRS)[None, None, :]
        half_mask = mask & (n < ROTARY_DIM // 2)
        x1 = tl.load(x_row + n, mask=half_mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_row + ROTARY_DIM // 2 + n, mask=half_mask, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def _store_rotated(
    y_row,
    x_row,
    mask,
    x1,
    x2,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED_OUTPUT: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    """Rotate the pairs x1, x2 and store them. Copy the entries that are not rotated."""
    dtype: tl.constexpr = y_row.dtype.element_ty
    y1 = (x1 * cos - x2 * sin).to(dtype)
    y2 = (x2 * cos + x1 * sin).to(dtype)
    if INTERLEAVED_OUTPUT:
        n = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        y = tl.reshape(tl.join(y1, y2), (y1.shape[0], y1.shape[1], 2 * BLOCK_PAIRS))
        tl.store(y_row + n, y, mask=mask & (n < ROTARY_DIM))
    else:
        n = tl.arange(0, BLOCK_PAIRS)[None, None, :]
        tl.store(y_row + n, y1, mask=mask & (n < ROTARY_DIM // 2))
        tl.store(y_row + ROTARY_DIM // 2 + n, y2, mask=mask & (n < ROTARY_DIM // 2))
    if ROTARY_DIM < HEAD_DIM:
        n = ROTARY_DIM + tl.arange(0, BLOCK_PASS)[None, None, :]
        pass_mask = mask & (n < HEAD_DIM)
        tl.store(y_row + n, tl.load(x_row + n, mask=pass_mask), mask=pass_mask)


@kernel
def rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    yq_ptr,
    yk_ptr,
    stride_q_batch,
    stride_q_head,
    stride_q_token,
    stride_k_batch,
    stride_k_head,
    stride_k_token,
    stride_cos_batch,
    stride_cos_token,
    stride_cos_column,
    stride_sin_batch,
    stride_sin_token,
    stride_sin_column,
    stride_cos_axis,
    stride_sin_axis,
    stride_yq_batch,
    stride_yq_head,
    stride_yq_token,
    stride_yk_batch,
    stride_yk_head,
    stride_yk_token,
    T,
    sign,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INTERLEAVED_OUTPUT: tl.constexpr,
    SECOND_AXIS: tl.constexpr,
    THIRD_AXIS: tl.constexpr,
    HEAD_GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    """Rotate BLOCK_T tokens in one group of their heads: BLOCK_Q_HEADS of q, BLOCK_K_HEADS of k.

    q and k are loaded before the angles, so that the latencies overlap. If cos and sin are of three
    axes (M-RoPE), pairs before SECOND_AXIS have the angles of axis 0, those before THIRD_AXIS of
    axis 1, the others of axis 2.
    """
    group = tl.program_id(0) % HEAD_GROUPS
    block = tl.program_id(0) // HEAD_GROUPS
    b = tl.cast(block // tl.cdiv(T, BLOCK_T), tl.int64)
    first_token = tl.cast(block % tl.cdiv(T, BLOCK_T), tl.int64) * BLOCK_T
    # blocks are (tokens, heads, pairs)
    t = first_token + tl.arange(0, BLOCK_T)[:, None, None]
    n = tl.arange(0, BLOCK_PAIRS)[None, None, :]
    q_head = tl.cast(group * BLOCK_Q_HEADS, tl.int64) + tl.arange(0, BLOCK_Q_HEADS)[None, :, None]
    k_head = tl.cast(group * BLOCK_K_HEADS, tl.int64) + tl.arange(0, BLOCK_K_HEADS)[None, :, None]
    q_mask = (t < T) & (q_head < Q_HEADS)
    k_mask = (t < T) & (k_head < K_HEADS)
    mask = (t < T) & (n < ROTARY_DIM // 2)
    q_row = q_ptr + b * stride_q_batch + q_head * stride_q_head + t * stride_q_token
    k_row = k_ptr + b * stride_k_batch + k_head * stride_k_head + t * stride_k_token
    q1, q2 = _load_pairs(q_row, q_mask, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
    k1, k2 = _load_pairs(k_row, k_mask, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
    # (tokens, 1, pairs)
    if stride_cos_axis is not None:
        axis = tl.where(n < SECOND_AXIS, 0, tl.where(n < THIRD_AXIS, 1, 2)).to(tl.int64)
        cos_ptr += axis * stride_cos_axis
        sin_ptr += axis * stride_sin_axis
    # each pointer just before its load: both before both loads take more registers
    cos_block = cos_ptr + b * stride_cos_batch + t * stride_cos_token + n * stride_cos_column
    cos = tl.load(cos_block, mask=mask, other=0.0).to(tl.float32)
    sin_block = sin_ptr + b * stride_sin_batch + t * stride_sin_token + n * stride_sin_column
    sin = tl.load(sin_block, mask=mask, other=0.0).to(tl.float32) * sign
    yq_row = yq_ptr + b * stride_yq_batch + q_head * stride_yq_head + t * stride_yq_token
    yk_row = yk_ptr + b * stride_yk_batch + k_head * stride_yk_head + t * stride_yk_token
    _store_rotated(
        yq_row,
        q_row,
        q_mask,
        q1,
        q2,
        cos,
        sin,
        HEAD_DIM,
        ROTARY_DIM,
        INTERLEAVED_OUTPUT,
        BLOCK_PAIRS,
        BLOCK_PASS,
    )
    _store_rotated(
        yk_row,
        k_row,
        k_mask,
        k1,
        k2,
        cos,
        sin,
        HEAD_DIM,
        ROTARY_DIM,
        INTERLEAVED_OUTPUT,
        BLOCK_PAIRS,
        BLOCK_PASS,
    )
