r"""The kernels of `causal_conv`: z, silu and their gradients in one pass each.

x (B, T, D) is read as it lies in memory. Where a token's channels are contiguous, as a projection
gives them, a program walks through a run of tokens, with a row of channels of each in registers. It
keeps the W - 1 tokens before, so x is read once and z computed once. In backward so is dz, and dx
follows W - 1 tokens later. Where a channel's tokens are contiguous (``_by_channel``), a program has
a block of tokens of one channel. It reads x and dy once more for each shift, from the cache.

Backward computes z from x again, and does not round it. dw and db are partial sums in fp32, one of
each run, that `reduce.sum_rows` adds in a fixed order. A token's y and dx have the same bits in
whatever run, packing and layout it stands: what is to be one fused multiply-add is a ``tl.fma``,
and the compiler may fuse nothing else (`causal_conv.ROUNDING`).

Of packed sequences, ``seq_idx`` has each token's number. Two tokens are of one sequence if they and
all between them have one number.
"""

from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import load_fp32, tl, triton


@triton.jit
def _round(x, w_ptr):
    """Round to the weight's dtype."""
    return x.to(w_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _row(ptr, t, stride):
    return ptr + tl.cast(t, tl.int64) * stride


@triton.jit
def _load_weights(w_ptr, d, mask, W: tl.constexpr):
    """Load the W weights of the channels d, as a tuple."""
    weights = ()
    for j in tl.static_range(W):
        weights = weights + (load_fp32(w_ptr, d * W + j, mask),)
    return weights


@triton.jit
def _load_bias(b_ptr, d, mask, w_ptr):
    """Load the bias, or 0 without one."""
    bias = 0.0
    if b_ptr is not None:
        bias = _round(load_fp32(b_ptr, d, mask), w_ptr)
    return bias


@triton.jit
def _activate(z, y_ptr, w_ptr, ACT: tl.constexpr):
    """Return act(z) in y's dtype, rounded where Hugging Face's function rounds."""
    z = _round(z, w_ptr)
    if ACT is not None:
        z, _ = ACT(z)
        z = _round(z, w_ptr)
    return z.to(y_ptr.dtype.element_ty)


@triton.jit
def _gradient_of_z(dy, z, ACT: tl.constexpr):
    if ACT is not None:
        _, slope = ACT(z)
        dy *= slope
    return dy


# ---- a token's channels are contiguous ----


@triton.jit
def _sequence_bounds(seq_ptr, first, at, T, SCAN: tl.constexpr):
    """Return the first token of the sequence that has the token ``at``, and that after its last.

    It looks at SCAN tokens from ``first`` on. Bounds that are not among them are 0 and T."""
    begin = 0
    end = T
    if seq_ptr is not None:
        t = first + tl.arange(0, SCAN)
        inside = (t > 0) & (t < T)
        number = tl.load(seq_ptr + t, mask=inside, other=0)
        number_before = tl.load(seq_ptr + t - 1, mask=inside, other=0)
        starts = number != number_before
        begin = tl.max(tl.where(starts & (t <= at), t, 0))
        end = tl.min(tl.where(starts & (t > at), t, T))
    return begin, end


@triton.jit
def _load_tokens(x_ptr, w_ptr, first, end, stride, d, mask, COUNT: tl.constexpr):
    """Load the rows of COUNT tokens from ``first`` on as a tuple; those from ``end`` on are 0.

    They are rounded to the weight's dtype, unless w_ptr is None."""
    rows = ()
    for i in tl.static_range(COUNT):
        x = load_fp32(_row(x_ptr, first + i, stride), d, mask & (first + i < end))
        if w_ptr is not None:
            x = _round(x, w_ptr)
        rows = rows + (x,)
    return rows


@triton.jit
def _load_history(x_ptr, w_ptr, at, begin, stride, d, mask, COUNT: tl.constexpr):
    """Load the rows of the COUNT tokens before ``at`` as a tuple; those before ``begin`` are 0."""
    rows = ()
    for i in tl.static_range(COUNT):
        t = at - COUNT + i
        x = load_fp32(_row(x_ptr, t, stride), d, mask & (t >= begin))
        rows = rows + (_round(x, w_ptr),)
    return rows


@triton.jit
def _convolve(xs, weights, z, AT: tl.constexpr, W: tl.constexpr):
    """Add the products of W tokens of a window, from AT on, to z."""
    for j in tl.static_range(W):
        z = tl.fma(weights[j], xs[AT + j], z)
    return z


@triton.jit
def _transposed(dzs, weights, dx, AT: tl.constexpr, W: tl.constexpr):
    """Add the products of W gradients dz of a window, from AT on, to dx of the token AT."""
    for k in tl.static_range(W):
        dx = tl.fma(weights[W - 1 - k], dzs[AT + k], dx)
    return dx


@triton.jit
def _add_products(dw, dz, xs, AT: tl.constexpr, W: tl.constexpr):
    """Add dz of the token AT + W - 1 of a window, times the W tokens from AT on, to the sums dw."""
    sums = ()
    for j in tl.static_range(W):
        sums = sums + (tl.fma(dz, xs[AT + j], dw[j]),)
    return sums


@kernel
def conv_fwd(
    x_ptr,
    w_ptr,
    b_ptr,
    seq_ptr,
    y_ptr,
    stride_xb,
    stride_xt,
    T,
    D,
    RUN,
    W: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Compute y of RUN tokens and BLOCK_D channels, UNROLL tokens in an iteration.

    SCAN is at least RUN + 2·W."""
    blocks = tl.cdiv(D, BLOCK_D)
    runs = tl.cdiv(T, RUN)
    run = tl.program_id(0) // blocks
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    first = run % runs * RUN
    end = tl.minimum(first + RUN, T)
    b = tl.cast(run // runs, tl.int64)
    x_ptr += b * stride_xb
    y_ptr += b * T * D
    if seq_ptr is not None:
        seq_ptr += b * T
    weights = _load_weights(w_ptr, d, mask, W)
    bias = tl.zeros((BLOCK_D,), dtype=tl.float32) + _load_bias(b_ptr, d, mask, w_ptr)
    # the tokens of one sequence after the other; all, if none are packed
    at = first
    while at < end:
        sequence_begin, sequence_end = _sequence_bounds(seq_ptr, first - W, at, T, SCAN)
        stop = tl.minimum(end, sequence_end)
        # a window of W - 1 + UNROLL tokens, of which there are the first W - 1
        xs = _load_history(x_ptr, w_ptr, at, sequence_begin, stride_xt, d, mask, W - 1)
        for start in tl.range(at, stop, UNROLL, num_stages=NUM_STAGES):
            xs = xs + _load_tokens(x_ptr, w_ptr, start, stop, stride_xt, d, mask, UNROLL)
            for i in tl.static_range(UNROLL):
                y = _activate(_convolve(xs, weights, bias, i, W), y_ptr, w_ptr, ACT)
                tl.store(_row(y_ptr, start + i, D) + d, y, mask=mask & (start + i < stop))
            xs = xs[UNROLL:]
        at = stop


@kernel
def conv_bwd(
    dy_ptr,
    x_ptr,
    w_ptr,
    b_ptr,
    seq_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    stride_dyb,
    stride_dyt,
    stride_xb,
    stride_xt,
    T,
    D,
    RUN,
    W: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Compute dx of RUN tokens and BLOCK_D channels, and a row of the partial dw and db.

    SCAN is at least RUN + 2·W, and RUN a multiple of UNROLL."""
    blocks = tl.cdiv(D, BLOCK_D)
    runs = tl.cdiv(T, RUN)
    run = tl.program_id(0) // blocks
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    first = run % runs * RUN
    end = tl.minimum(first + RUN, T)
    b = tl.cast(run // runs, tl.int64)
    dy_ptr += b * stride_dyb
    x_ptr += b * stride_xb
    if dx_ptr is not None:
        dx_ptr += b * T * D
    if seq_ptr is not None:
        seq_ptr += b * T
    weights = _load_weights(w_ptr, d, mask, W)
    zero = tl.zeros((BLOCK_D,), dtype=tl.float32)
    bias = zero + _load_bias(b_ptr, d, mask, w_ptr)
    zeros = ()
    for _ in tl.static_range(W - 1):
        zeros = zeros + (zero,)
    dw = zeros + (zero,)
    db = zero
    # the tokens of one sequence after the other; all, if none are packed
    at = first
    while at < end:
        sequence_begin, sequence_end = _sequence_bounds(seq_ptr, first - W, at, T, SCAN)
        stop = tl.minimum(end, sequence_end)
        # windows of W - 1 + UNROLL tokens, of which there are the first W - 1; no dx has their dz
        xs = _load_history(x_ptr, w_ptr, at, sequence_begin, stride_xt, d, mask, W - 1)
        dzs = zeros
        for start in tl.range(at, stop, UNROLL, num_stages=NUM_STAGES):
            xs = xs + _load_tokens(x_ptr, w_ptr, start, sequence_end, stride_xt, d, mask, UNROLL)
            dys = _load_tokens(dy_ptr, None, start, sequence_end, stride_dyt, d, mask, UNROLL)
            for i in tl.static_range(UNROLL):
                dz = _gradient_of_z(dys[i], _convolve(xs, weights, bias, i, W), ACT)
                dzs = dzs + (dz,)
                if seq_ptr is not None:  # an iteration may go beyond the run, where another counts
                    dz = tl.where(start + i < stop, dz, 0.0)
                if dw_ptr is not None:
                    dw = _add_products(dw, dz, xs, i, W)
                if db_ptr is not None:
                    db += dz
                if dx_ptr is not None:
                    dx = _transposed(dzs, weights, zero, i, W).to(dx_ptr.dtype.element_ty)
                    t = start + i - (W - 1)
                    tl.store(_row(dx_ptr, t, D) + d, dx, mask=mask & (t >= at) & (t < stop))
            xs = xs[UNROLL:]
            dzs = dzs[UNROLL:]
        if dx_ptr is not None:
            # dx of the last W - 1 tokens has dz of as many after them
            start = at + tl.cdiv(stop - at, UNROLL) * UNROLL
            xs = xs + _load_tokens(x_ptr, w_ptr, start, sequence_end, stride_xt, d, mask, W - 1)
            dys = _load_tokens(dy_ptr, None, start, sequence_end, stride_dyt, d, mask, W - 1)
            for i in tl.static_range(W - 1):
                dzs = dzs + (_gradient_of_z(dys[i], _convolve(xs, weights, bias, i, W), ACT),)
                dx = _transposed(dzs, weights, zero, i, W).to(dx_ptr.dtype.element_ty)
                t = start + i - (W - 1)
                tl.store(_row(dx_ptr, t, D) + d, dx, mask=mask & (t >= at) & (t < stop))
        at = stop
    if dw_ptr is not None:
        for j in tl.static_range(W):
            row = _row(dw_ptr, run, D * W)
            tl.store(row + d * W + j, dw[j].to(dw_ptr.dtype.element_ty), mask=mask)
    if db_ptr is not None:
        tl.store(_row(db_ptr, run, D) + d, db.to(db_ptr.dtype.element_ty), mask=mask)


# ---- a channel's tokens are contiguous ----


@triton.jit
def _in_sequence(seq_ptr, t, T, BACK: tl.constexpr):
    """Return True where the tokens t - BACK to t exist and are of one sequence."""
    inside = (t >= BACK) & (t < T)
    if seq_ptr is not None:
        number = tl.load(seq_ptr + t, mask=inside, other=0)
        for i in tl.static_range(1, BACK + 1):
            inside = inside & (tl.load(seq_ptr + t - i, mask=inside, other=0) == number)
    return inside


@triton.jit
def _convolve_channel(x_ptr, w_ptr, seq_ptr, weights, z, t, T, W: tl.constexpr):
    """Add the products of each token t and the W - 1 before it to z."""
    for j in tl.static_range(W):
        x = load_fp32(x_ptr, t - (W - 1 - j), _in_sequence(seq_ptr, t, T, W - 1 - j))
        z = tl.fma(weights[j], _round(x, w_ptr), z)
    return z


@kernel
def conv_fwd_by_channel(
    x_ptr,
    w_ptr,
    b_ptr,
    seq_ptr,
    y_ptr,
    stride_xb,
    stride_xd,
    T,
    D,
    W: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Compute y of BLOCK_T tokens of one channel."""
    blocks = tl.cdiv(T, BLOCK_T)
    channel = tl.program_id(0) // blocks
    t = tl.program_id(0) % blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    b = channel // D
    d = channel % D
    x_ptr = _row(_row(x_ptr, b, stride_xb), d, stride_xd)
    y_ptr = _row(y_ptr, channel, T)
    if seq_ptr is not None:
        seq_ptr = _row(seq_ptr, b, T)
    weights = _load_weights(w_ptr, d, d < D, W)
    bias = tl.zeros((BLOCK_T,), dtype=tl.float32) + _load_bias(b_ptr, d, d < D, w_ptr)
    z = _convolve_channel(x_ptr, w_ptr, seq_ptr, weights, bias, t, T, W)
    tl.store(y_ptr + t, _activate(z, y_ptr, w_ptr, ACT), mask=t < T)


@kernel
def conv_bwd_by_channel(
    dy_ptr,
    x_ptr,
    w_ptr,
    b_ptr,
    seq_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    stride_dyb,
    stride_dyd,
    stride_xb,
    stride_xd,
    T,
    D,
    RUN,
    W: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Compute dx of RUN tokens of one channel, and the channel's entries of a row of the partial dw
    and db."""
    runs = tl.cdiv(T, RUN)
    run = tl.program_id(0) % runs
    channel = tl.program_id(0) // runs
    b = channel // D
    d = channel % D
    dy_ptr = _row(_row(dy_ptr, b, stride_dyb), d, stride_dyd)
    x_ptr = _row(_row(x_ptr, b, stride_xb), d, stride_xd)
    if dx_ptr is not None:
        dx_ptr = _row(dx_ptr, channel, T)
    if seq_ptr is not None:
        seq_ptr = _row(seq_ptr, b, T)
    weights = _load_weights(w_ptr, d, d < D, W)
    zero = tl.zeros((BLOCK_T,), dtype=tl.float32)
    bias = zero + _load_bias(b_ptr, d, d < D, w_ptr)
    dw = ()
    for _ in tl.static_range(W):
        dw = dw + (zero,)
    db = zero
    end = tl.minimum(run * RUN + RUN, T)
    for start in tl.range(run * RUN, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        dx = zero
        for k in tl.static_range(W):
            # dz of the k-th token after t, where that is of t's sequence
            inside = (t < end) & _in_sequence(seq_ptr, t + k, T, k)
            z = _convolve_channel(x_ptr, w_ptr, seq_ptr, weights, bias, t + k, T, W)
            dz = _gradient_of_z(load_fp32(dy_ptr, t + k, inside), z, ACT)
            dz = tl.where(inside, dz, 0.0)
            dx = tl.fma(weights[W - 1 - k], dz, dx)
            if k == 0:
                sums = ()
                for j in tl.static_range(W):
                    x = load_fp32(x_ptr, t - (W - 1 - j), _in_sequence(seq_ptr, t, T, W - 1 - j))
                    sums = sums + (tl.fma(dz, _round(x, w_ptr), dw[j]),)
                dw = sums
                db += dz
        if dx_ptr is not None:
            tl.store(dx_ptr + t, dx.to(dx_ptr.dtype.element_ty), mask=t < end)
    at = b * runs + run
    if dw_ptr is not None:
        for j in tl.static_range(W):
            total = tl.sum(dw[j])
            tl.store(_row(dw_ptr, at, D * W) + d * W + j, total.to(dw_ptr.dtype.element_ty))
    if db_ptr is not None:
        tl.store(_row(db_ptr, at, D) + d, tl.sum(db).to(db_ptr.dtype.element_ty))
