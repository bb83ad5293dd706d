"""The kernels of `norm_rope`, which has the mathematics and the launches.

Blocks are (tokens, heads, pairs). A pair's entries are x1 and x2. Entries that are not rotated form
pairs, too.
"""

from __future__ import annotations

from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import tl, triton
from liger_kernel.ops.norm.norm_kernels import LLAMA


@triton.jit
def _pair_columns(n, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """Return the columns of both entries of pair n, where they are not neighbours."""
    if ROTARY_DIM < HEAD_DIM:
        rotated = n < ROTARY_DIM // 2
        first = tl.where(rotated, n, n + ROTARY_DIM // 2)
        return first, tl.where(rotated, n + ROTARY_DIM // 2, n + (HEAD_DIM + 1) // 2)
    return n, n + HEAD_DIM // 2


@triton.jit
def _load_pairs(
    row,
    mask,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Load both entries of every pair, each (tokens, heads, BLOCK_PAIRS), in fp32.

    ``row``: (tokens, heads, 1) pointers.
    """
    if INTERLEAVED:
        n = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        x = tl.load(row + n, mask=mask & (n < HEAD_DIM), other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_PAIRS, 2)))
    else:
        n = tl.arange(0, BLOCK_PAIRS)[None, None, :]
        n1, n2 = _pair_columns(n, HEAD_DIM, ROTARY_DIM)
        first_mask = mask & (n < (HEAD_DIM + 1) // 2)
        x1 = tl.load(row + n1, mask=first_mask, other=0.0).to(tl.float32)
        x2 = tl.load(row + n2, mask=mask & (n2 < HEAD_DIM), other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def _store_pairs(
    row,
    mask,
    x1,
    x2,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    dtype: tl.constexpr = row.dtype.element_ty
    if INTERLEAVED:
        n = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        x = tl.join(x1.to(dtype), x2.to(dtype))
        x = tl.reshape(x, (x1.shape[0], x1.shape[1], 2 * BLOCK_PAIRS))
        tl.store(row + n, x, mask=mask & (n < HEAD_DIM))
    else:
        n = tl.arange(0, BLOCK_PAIRS)[None, None, :]
        n1, n2 = _pair_columns(n, HEAD_DIM, ROTARY_DIM)
        tl.store(row + n1, x1.to(dtype), mask=mask & (n < (HEAD_DIM + 1) // 2))
        tl.store(row + n2, x2.to(dtype), mask=mask & (n2 < HEAD_DIM))


@triton.jit
def _load_weight(
    weight_ptr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Load the weight of the norm in pairs, each (1, 1, BLOCK_PAIRS)."""
    one = tl.full((1, 1, 1), 1, dtype=tl.int32)
    row = weight_ptr + (one - 1)
    return _load_pairs(row, one > 0, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)


@triton.jit
def _row_pointers(x, b, head, t):
    """Return pointers to the heads of tokens. x: a pointer, strides of batch, heads and tokens."""
    return x[0] + b * x[1] + head * x[2] + t * x[3]


@triton.jit
def _contiguous_row(b, head, t, T, HEADS: tl.constexpr, TOKENS_FIRST: tl.constexpr):
    """Return the index of a row in memory (B, T, h, D) if TOKENS_FIRST, else (B, h, T, D)."""
    return (b * T + t) * HEADS + head if TOKENS_FIRST else (b * HEADS + head) * T + t


@triton.jit
def _load_angles(
    cos,
    sin,
    b,
    t,
    T,
    ROTARY_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Load cos and sin of a token's pairs; 1 and 0 for those that are not rotated.

    ``cos``, ``sin``: a pointer and the strides of batch, tokens and columns. The angles of several
    tokens are loaded for each head, from the cache. With a block (tokens, 1, columns), Triton would
    move q through shared memory to match that block's layout.
    """
    n = tl.arange(0, BLOCK_PAIRS)[None, None, :]
    if BLOCK_T > 1:
        n += tl.zeros((1, BLOCK_HEADS, 1), dtype=tl.int32)
    mask = (t < T) & (n < ROTARY_DIM // 2)
    cos_ptrs = cos[0] + b * cos[1] + t * cos[2] + n * cos[3]
    sin_ptrs = sin[0] + b * sin[1] + t * sin[2] + n * sin[3]
    c = tl.load(cos_ptrs, mask=mask, other=1.0).to(tl.float32)
    s = tl.load(sin_ptrs, mask=mask, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def _rstd(x1, x2, eps, HEAD_DIM: tl.constexpr):
    return 1.0 / tl.sqrt(tl.sum(x1 * x1 + x2 * x2, axis=2, keep_dims=True) / HEAD_DIM + eps)


@triton.jit
def _xhat(x, rstd, dtype: tl.constexpr, CAST: tl.constexpr):
    xhat = x * rstd
    if CAST == LLAMA:
        xhat = xhat.to(dtype).to(tl.float32)
    return xhat


@triton.jit
def _forward_block(
    x,
    weight_ptr,
    cos,
    sin,
    y_ptr,
    b,
    first_token,
    block,
    T,
    eps,
    offset,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Compute one block of q or of k, in the unit of tokens that begins at ``first_token``.

    A block is BLOCK_T tokens of BLOCK_HEADS heads.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    HEAD_GROUPS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    first_token += block // HEAD_GROUPS * BLOCK_T
    group = block % HEAD_GROUPS
    t = first_token + tl.arange(0, BLOCK_T)[:, None, None]
    head = tl.cast(group * BLOCK_HEADS, tl.int64) + tl.arange(0, BLOCK_HEADS)[None, :, None]
    mask = (t < T) & (head < HEADS)
    x_row = _row_pointers(x, b, head, t)
    x1, x2 = _load_pairs(x_row, mask, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
    cos, sin = _load_angles(cos, sin, b, t, T, ROTARY_DIM, BLOCK_T, BLOCK_HEADS, BLOCK_PAIRS)
    if weight_ptr is not None:
        w1, w2 = _load_weight(weight_ptr, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
    # the norm: n1 and n2 are rounded as the norm's result is
    rstd = _rstd(x1, x2, eps, HEAD_DIM)
    n1 = _xhat(x1, rstd, dtype, CAST)
    n2 = _xhat(x2, rstd, dtype, CAST)
    if weight_ptr is not None:
        n1 = n1 * (w1 + offset)
        n2 = n2 * (w2 + offset)
    n1 = n1.to(dtype).to(tl.float32)
    n2 = n2.to(dtype).to(tl.float32)
    # the rotation
    y1 = n1 * cos - n2 * sin
    y2 = n2 * cos + n1 * sin
    if ROTARY_DIM < HEAD_DIM:
        # with cos = 1 and sin = 0, an inf would make the other entry of its pair NaN (0·inf)
        rotates = tl.arange(0, BLOCK_PAIRS)[None, None, :] < ROTARY_DIM // 2
        y1 = tl.where(rotates, y1, n1)
        y2 = tl.where(rotates, y2, n2)
    y_row = y_ptr + _contiguous_row(b, head, t, T, HEADS, TOKENS_FIRST) * HEAD_DIM
    _store_pairs(y_row, mask, y1, y2, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)


@kernel
def norm_rope_forward_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
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
    T,
    eps,
    offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    Q_TOKENS_FIRST: tl.constexpr,
    K_TOKENS_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CAST: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    K_BLOCKS: tl.constexpr,
    BLOCK_Q_TOKENS: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_TOKENS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Compute one of the Q_BLOCKS blocks of q and K_BLOCKS blocks of k of a unit of tokens.

    All blocks are of about the same size. TOKENS_FIRST: a result's memory is (B, T, h, D), else
    (B, h, T, D).
    """
    UNIT: tl.constexpr = BLOCK_Q_TOKENS if BLOCK_Q_TOKENS > BLOCK_K_TOKENS else BLOCK_K_TOKENS
    cos = (cos_ptr, stride_cos_batch, stride_cos_token, stride_cos_column)
    sin = (sin_ptr, stride_sin_batch, stride_sin_token, stride_sin_column)
    block = tl.program_id(0) % (Q_BLOCKS + K_BLOCKS)
    unit = tl.program_id(0) // (Q_BLOCKS + K_BLOCKS)
    b = tl.cast(unit // tl.cdiv(T, UNIT), tl.int64)
    first_token = tl.cast(unit % tl.cdiv(T, UNIT), tl.int64) * UNIT
    if block < Q_BLOCKS:
        _forward_block(
            (q_ptr, stride_q_batch, stride_q_head, stride_q_token),
            q_weight_ptr,
            cos,
            sin,
            yq_ptr,
            b,
            first_token,
            block,
            T,
            eps,
            offset,
            Q_HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            Q_TOKENS_FIRST,
            INTERLEAVED,
            CAST,
            BLOCK_Q_TOKENS,
            BLOCK_Q_HEADS,
            BLOCK_PAIRS,
        )
    else:
        _forward_block(
            (k_ptr, stride_k_batch, stride_k_head, stride_k_token),
            k_weight_ptr,
            cos,
            sin,
            yk_ptr,
            b,
            first_token,
            block - Q_BLOCKS,
            T,
            eps,
            offset,
            K_HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            K_TOKENS_FIRST,
            INTERLEAVED,
            CAST,
            BLOCK_K_TOKENS,
            BLOCK_K_HEADS,
            BLOCK_PAIRS,
        )


@triton.jit
def _backward_blocks(
    dy,
    x,
    weight_ptr,
    cos,
    sin,
    dx_ptr,
    dweight_ptr,
    first_unit,
    unit_step,
    NUM_UNITS,
    block,
    T,
    eps,
    offset,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CAST: tl.constexpr,
    UNIT: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute one block of q or of k in every ``unit_step``-th unit of tokens.

    Write one row of its partial dweight.
    """
    dtype: tl.constexpr = x[0].dtype.element_ty
    HEAD_GROUPS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    first_head = tl.cast(block % HEAD_GROUPS * BLOCK_HEADS, tl.int64)
    head = first_head + tl.arange(0, BLOCK_HEADS)[None, :, None]
    if weight_ptr is not None:
        w1, w2 = _load_weight(weight_ptr, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        w1 += offset
        w2 += offset
    dw1 = tl.zeros((BLOCK_T, BLOCK_HEADS, BLOCK_PAIRS), dtype=tl.float32)
    dw2 = tl.zeros((BLOCK_T, BLOCK_HEADS, BLOCK_PAIRS), dtype=tl.float32)
    for unit in tl.range(first_unit, NUM_UNITS, unit_step, num_stages=STAGES):
        b = tl.cast(unit // tl.cdiv(T, UNIT), tl.int64)
        unit_token = tl.cast(unit % tl.cdiv(T, UNIT), tl.int64) * UNIT
        first_token = unit_token + block // HEAD_GROUPS * BLOCK_T
        t = first_token + tl.arange(0, BLOCK_T)[:, None, None]
        mask = (t < T) & (head < HEADS)
        x_row = _row_pointers(x, b, head, t)
        dy_row = _row_pointers(dy, b, head, t)
        x1, x2 = _load_pairs(x_row, mask, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        dy1, dy2 = _load_pairs(dy_row, mask, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        c, s = _load_angles(cos, sin, b, t, T, ROTARY_DIM, BLOCK_T, BLOCK_HEADS, BLOCK_PAIRS)
        # a row outside of the tensor is 0, so its rstd would be 1/0 if eps is 0
        rstd = tl.where(mask, _rstd(x1, x2, eps, HEAD_DIM), 0.0)
        # g: the gradient of the norm's result
        g1 = dy1 * c + dy2 * s
        g2 = dy2 * c - dy1 * s
        if dweight_ptr is not None:
            dw1 += g1 * _xhat(x1, rstd, dtype, CAST)
            dw2 += g2 * _xhat(x2, rstd, dtype, CAST)
        if dx_ptr is not None:
            if weight_ptr is not None:
                g1 = g1 * w1
                g2 = g2 * w2
            along = rstd * rstd / HEAD_DIM * tl.sum(g1 * x1 + g2 * x2, axis=2, keep_dims=True)
            dx1 = rstd * (g1 - x1 * along)
            dx2 = rstd * (g2 - x2 * along)
            dx_row = dx_ptr + _contiguous_row(b, head, t, T, HEADS, TOKENS_FIRST) * HEAD_DIM
            _store_pairs(dx_row, mask, dx1, dx2, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
    if dweight_ptr is not None:
        dw1 = tl.sum(tl.sum(dw1, axis=0, keep_dims=True), axis=1, keep_dims=True)
        dw2 = tl.sum(tl.sum(dw2, axis=0, keep_dims=True), axis=1, keep_dims=True)
        one = tl.full((1, 1, 1), 1, dtype=tl.int32)
        dw_row = dweight_ptr + (first_unit * NUM_BLOCKS + block) * HEAD_DIM + (one - 1)
        _store_pairs(dw_row, one > 0, dw1, dw2, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)


@kernel
def norm_rope_backward_kernel(
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
    stride_dyq_batch,
    stride_dyq_head,
    stride_dyq_token,
    stride_dyk_batch,
    stride_dyk_head,
    stride_dyk_token,
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
    T,
    NUM_UNITS,
    eps,
    offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    Q_TOKENS_FIRST: tl.constexpr,
    K_TOKENS_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CAST: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    K_BLOCKS: tl.constexpr,
    BLOCK_Q_TOKENS: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_TOKENS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute a block of q or k in every n-th unit of tokens, see `norm_rope_forward_kernel`.

    Without gradients of q, Q_BLOCKS is 0; without those of k, K_BLOCKS is.
    """
    UNIT: tl.constexpr = BLOCK_Q_TOKENS if BLOCK_Q_TOKENS > BLOCK_K_TOKENS else BLOCK_K_TOKENS
    cos = (cos_ptr, stride_cos_batch, stride_cos_token, stride_cos_column)
    sin = (sin_ptr, stride_sin_batch, stride_sin_token, stride_sin_column)
    block = tl.program_id(0) % (Q_BLOCKS + K_BLOCKS)
    first_unit = tl.program_id(0) // (Q_BLOCKS + K_BLOCKS)
    unit_step = tl.num_programs(0) // (Q_BLOCKS + K_BLOCKS)
    if block < Q_BLOCKS:
        _backward_blocks(
            (dyq_ptr, stride_dyq_batch, stride_dyq_head, stride_dyq_token),
            (q_ptr, stride_q_batch, stride_q_head, stride_q_token),
            q_weight_ptr,
            cos,
            sin,
            dq_ptr,
            dq_weight_ptr,
            first_unit,
            unit_step,
            NUM_UNITS,
            block,
            T,
            eps,
            offset,
            Q_HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            Q_TOKENS_FIRST,
            INTERLEAVED,
            CAST,
            UNIT,
            Q_BLOCKS,
            BLOCK_Q_TOKENS,
            BLOCK_Q_HEADS,
            BLOCK_PAIRS,
            STAGES,
        )
    else:
        _backward_blocks(
            (dyk_ptr, stride_dyk_batch, stride_dyk_head, stride_dyk_token),
            (k_ptr, stride_k_batch, stride_k_head, stride_k_token),
            k_weight_ptr,
            cos,
            sin,
            dk_ptr,
            dk_weight_ptr,
            first_unit,
            unit_step,
            NUM_UNITS,
            block - Q_BLOCKS,
            T,
            eps,
            offset,
            K_HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            K_TOKENS_FIRST,
            INTERLEAVED,
            CAST,
            UNIT,
            K_BLOCKS,
            BLOCK_K_TOKENS,
            BLOCK_K_HEADS,
            BLOCK_PAIRS,
            STAGES,
        )
