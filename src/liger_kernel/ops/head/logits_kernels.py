"""Triton kernels of the cross entropy of logits. See `logits` for the formulas and the launches.

`partials_kernel` reduces strips of classes, and `merge_kernel` combines them into each token's
outputs. `gradient_kernel` writes the gradient of the logits.
"""

from __future__ import annotations

from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import (
    INF,
    exp,
    finite_or_zero,
    load_fp32,
    log,
    online_max,
    program_block,
    scaled_exp,
    tanh,
    tl,
    triton,
)

# Partial results of a token over some classes, in the order in which the kernels store them: max z,
# Σp, Σp·(z - max z), Σw·z, Σz, index of the max, Σp², z of the target, with p = exp(z - max z)
NUM_PARTIALS = 8


@kernel
def normalisers_kernel(
    target_ptr,
    weight_ptr,
    items_ptr,
    norm_ptr,
    M,
    V,
    ignore_index,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the normalisers (n₀, n₁, W, n). One program."""
    i = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), dtype=tl.int64)
    valid_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, M, BLOCK):
        y = tl.load(target_ptr + start + i, mask=start + i < M, other=ignore_index)
        count += (y != ignore_index).to(tl.int64)
        if weight_ptr is not None:
            inside = (y != ignore_index) & (y >= 0) & (y < V)
            valid_weight += tl.load(weight_ptr + y, mask=inside, other=0.0).to(tl.float32)
    n = tl.sum(count).to(tl.float32)
    total = V * 1.0
    n0 = n
    if weight_ptr is not None:
        n0 = tl.sum(valid_weight)
        all_weight = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            w = tl.load(weight_ptr + start + i, mask=start + i < V, other=0.0)
            all_weight += w.to(tl.float32)
        total = tl.sum(all_weight)
    if items_ptr is not None:
        items = tl.load(items_ptr).to(tl.float32)
        tl.store(norm_ptr, items)
        tl.store(norm_ptr + 1, items)
    elif MEAN:
        tl.store(norm_ptr, tl.where(n0 == 0.0, 1.0, n0))
        tl.store(norm_ptr + 1, tl.maximum(n, 1.0))
    else:
        tl.store(norm_ptr, 1.0)
        tl.store(norm_ptr + 1, 1.0)
    tl.store(norm_ptr + 2, total)
    tl.store(norm_ptr + 3, n)


@triton.jit
def add_bias(x, bias_ptr, v, mask):
    """Return x in fp32, plus the bias of class v if there is one."""
    x = x.to(tl.float32)
    if bias_ptr is not None:
        x += load_fp32(bias_ptr, v, mask)
    return x


@triton.jit
def transform_logits(x, softcap, logit_scale, SCALED: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return z: the scaled and softcapped logits."""
    z = x
    if SCALED:
        z *= logit_scale
    if SOFTCAP:
        z, _ = tanh(z / softcap)
        z *= softcap
    return z


@triton.jit
def times(p, x):
    """Return p·x, but 0 where p is 0, whatever x is."""
    return tl.where(p == 0.0, 0.0, p * x)


@kernel
def partials_kernel(
    x_ptr,
    more_ptr,
    split,
    bias_ptr,
    target_ptr,
    weight_ptr,
    partials_ptr,
    stride_t,
    stride_v,
    T,
    V,
    STRIP,
    first,
    ignore_index,
    softcap,
    logit_scale,
    ENTROPY: tl.constexpr,
    SMOOTH: tl.constexpr,
    MEAN: tl.constexpr,
    BEST: tl.constexpr,
    SQUARES: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LANES: tl.constexpr,
    PER_LANE: tl.constexpr,
    CONTIGUOUS_CLASSES: tl.constexpr,
):
    """Reduce STRIP classes of BLOCK_T tokens to partial results, reading them once.

    In each iteration a lane takes PER_LANE classes of a token. With CONTIGUOUS_CLASSES the classes
    of a token are contiguous, and a lane's are neighbours. Otherwise the tokens are contiguous, and
    neighbouring lanes have neighbouring tokens.
    """
    t0 = tl.program_id(0) * BLOCK_T
    x_ptr, row, begin, left = program_block(x_ptr, more_ptr, split, V, STRIP)
    tokens = t0 + tl.arange(0, BLOCK_T)
    y = tl.load(target_ptr + tokens, mask=tokens < T, other=ignore_index)
    if tl.sum((y != ignore_index).to(tl.int32)) == 0:
        return
    # a loop that may be none ends in sums of zeros, on which Triton 3.9's compiler crashes
    tl.assume(left > 0)
    lane = tl.arange(0, LANES)[None, :]
    element = tl.arange(0, PER_LANE)[:, None]
    if CONTIGUOUS_CLASSES:
        i = lane * PER_LANE + element
        t = lane * 0
    else:
        i = element * (LANES // BLOCK_T) + lane // BLOCK_T
        t = lane % BLOCK_T
    x = x_ptr + t0.to(tl.int64) * stride_t + row * stride_v + (i * stride_v + t * stride_t)
    in_range = t0 + t < T
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    top = tl.full((LANES,), -INF, dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    sum_pz = total
    sum_wz = total
    sum_z = total
    sum_squares = total
    best = tl.zeros((LANES,), dtype=tl.int32)
    for start in range(0, left, PER_LANE * LANES // BLOCK_T):
        mask = (start + i < left) & in_range
        z = tl.load(x, mask=mask, other=-INF).to(tl.float32)
        if bias_ptr is not None:
            # the bias of a class is read once for all tokens
            if CONTIGUOUS_CLASSES:
                k = i
            else:
                k = element * (LANES // BLOCK_T) + tl.arange(0, LANES // BLOCK_T)[None, :]
            b = load_fp32(bias_ptr + begin + start, k, start + k < left)
            b = tl.broadcast_to(b[:, :, None], (PER_LANE, LANES // BLOCK_T, BLOCK_T))
            z += tl.reshape(b, (PER_LANE, LANES))
        z = transform_logits(z, softcap, logit_scale, SCALED, SOFTCAP)
        x += PER_LANE * LANES // BLOCK_T * stride_v
        if SCALED or SOFTCAP:
            z = tl.where(mask, z, -INF)
        higher = tl.max(z, axis=0)
        if BEST:
            index = tl.min(tl.where(z == higher[None, :], begin + start + i, 2147483647), axis=0)
            best = tl.where(higher > top, index, best)
        new, shift = online_max(top, higher)
        keep = scaled_exp(top - shift, EXACT, 1.0)
        z -= shift[None, :]
        p = scaled_exp(z, EXACT, 1.0)
        if ENTROPY:
            rescaled = times(keep, sum_pz + (finite_or_zero(top) - shift) * total)
            sum_pz = rescaled + tl.sum(times(p, z), axis=0)
        if SQUARES:
            sum_squares = sum_squares * keep * keep + tl.sum(p * p, axis=0)
        total = total * keep + tl.sum(p, axis=0)
        top = new
        if SMOOTH or MEAN:
            z = tl.where(mask, z + shift[None, :], 0.0)
            if MEAN:
                sum_z += tl.sum(z, axis=0)
            if SMOOTH:
                if weight_ptr is not None:
                    w = tl.load(weight_ptr + first + begin + start + i, mask=mask, other=0.0)
                    z *= w.to(tl.float32)
                sum_wz += tl.sum(z, axis=0)

    top = tl.reshape(top, (LANES // BLOCK_T, BLOCK_T))
    total = tl.reshape(total, (LANES // BLOCK_T, BLOCK_T))
    highest = tl.max(top, axis=0)
    shift = finite_or_zero(highest)
    keep = exp(top - shift[None, :])
    slot = tl.num_programs(1) * T
    partials = partials_ptr + tl.program_id(1) * T + tokens
    mask = tokens < T
    tl.store(partials, highest, mask=mask)
    tl.store(partials + slot, tl.sum(total * keep, axis=0), mask=mask)
    if ENTROPY:
        sum_pz = tl.reshape(sum_pz, (LANES // BLOCK_T, BLOCK_T))
        sum_pz = times(keep, sum_pz + (finite_or_zero(top) - shift[None, :]) * total)
        tl.store(partials + 2 * slot, tl.sum(sum_pz, axis=0), mask=mask)
    if SMOOTH:
        sum_wz = tl.reshape(sum_wz, (LANES // BLOCK_T, BLOCK_T))
        tl.store(partials + 3 * slot, tl.sum(sum_wz, axis=0), mask=mask)
    if MEAN:
        sum_z = tl.reshape(sum_z, (LANES // BLOCK_T, BLOCK_T))
        tl.store(partials + 4 * slot, tl.sum(sum_z, axis=0), mask=mask)
    if BEST:
        best = tl.reshape(best, (LANES // BLOCK_T, BLOCK_T))
        index = tl.min(tl.where(top == highest[None, :], best, 2147483647), axis=0)
        tl.store(partials + 5 * slot, (first + index).to(tl.float32, bitcast=True), mask=mask)
    if SQUARES:
        sum_squares = tl.reshape(sum_squares, (LANES // BLOCK_T, BLOCK_T)) * keep * keep
        tl.store(partials + 6 * slot, tl.sum(sum_squares, axis=0), mask=mask)


@triton.jit
def target_logit(x_ptr, more_ptr, split, token_offset, y, stride_v, mask, other):
    """Load the logit of class y, which may be in the second part: see `program_block`."""
    in_first = mask
    if more_ptr is not None:
        in_first = mask & (y < split)
    x = tl.load(x_ptr + token_offset + y * stride_v, mask=in_first, other=other)
    if more_ptr is not None:
        second = tl.load(
            more_ptr + token_offset + (y - split) * stride_v, mask=mask & (y >= split), other=other
        )
        x = tl.where(y < split, x, second)
    return x


@kernel
def merge_kernel(
    partials_ptr,
    x_ptr,
    more_ptr,
    split,
    bias_ptr,
    target_ptr,
    weight_ptr,
    norm_ptr,
    merged_ptr,
    loss_ptr,
    stats_ptr,
    z_loss_ptr,
    target_prob_ptr,
    entropy_ptr,
    mean_logit_ptr,
    predicted_ptr,
    log_sum_sq_probs_ptr,
    stride_n,
    stride_slot,
    stride_t,
    stride_v,
    N,
    T,
    V,
    first,
    shard,
    ignore_index,
    smoothing,
    lse_square_scale,
    softcap,
    logit_scale,
    ENTROPY: tl.constexpr,
    SMOOTH: tl.constexpr,
    MEAN: tl.constexpr,
    BEST: tl.constexpr,
    SQUARES: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TOKEN_SCALING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Combine the partial results of N strips into one, in ``merged``, or into the tokens' outputs.

    The target's logit is read from x, which has the classes from ``first`` to ``first + shard``.
    Without x it is among the partial results. There are so many arguments because one launch writes
    all outputs. A pointer that is None costs nothing.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_range = t < T
    n = tl.arange(0, BLOCK_N)[:, None]
    partials = partials_ptr + n * stride_n + t[None, :]
    mask = (n < N) & in_range[None, :]
    tops = tl.load(partials, mask=mask, other=-INF)
    top = tl.max(tops, axis=0)
    shift = finite_or_zero(top)
    keep = exp(tops - shift[None, :])
    totals = tl.load(partials + stride_slot, mask=mask, other=0.0)
    total = tl.sum(totals * keep, axis=0)
    sum_pz = total
    sum_wz = total
    sum_z = total
    sum_squares = total
    best = tl.zeros((BLOCK_T,), dtype=tl.int32)
    if ENTROPY:
        sums_pz = tl.load(partials + 2 * stride_slot, mask=mask, other=0.0)
        sums_pz = times(keep, sums_pz + (finite_or_zero(tops) - shift[None, :]) * totals)
        sum_pz = tl.sum(sums_pz, axis=0)
    if SMOOTH:
        sum_wz = tl.sum(tl.load(partials + 3 * stride_slot, mask=mask, other=0.0), axis=0)
    if MEAN:
        sum_z = tl.sum(tl.load(partials + 4 * stride_slot, mask=mask, other=0.0), axis=0)
    if BEST:
        index = tl.load(partials + 5 * stride_slot, mask=mask, other=0.0).to(tl.int32, bitcast=True)
        best = tl.min(tl.where((tops == top[None, :]) & mask, index, 2147483647), axis=0)
    if SQUARES:
        squares = tl.load(partials + 6 * stride_slot, mask=mask, other=0.0)
        sum_squares = tl.sum(squares * keep * keep, axis=0)

    y = tl.load(target_ptr + t, mask=in_range, other=ignore_index)
    valid = y != ignore_index
    inside = (y >= 0) & (y < V)
    if x_ptr is not None:
        in_shard = valid & (y >= first) & (y < first + shard)
        x = target_logit(
            x_ptr, more_ptr, split, t.to(tl.int64) * stride_t, y - first, stride_v, in_shard, 0.0
        )
        x = add_bias(x, bias_ptr, y - first, in_shard)
        zy = transform_logits(x, softcap, logit_scale, SCALED, SOFTCAP)
        zy = tl.where(in_shard, zy, tl.where(inside, 0.0, float("nan")))
    else:
        zy = tl.sum(tl.load(partials + 7 * stride_slot, mask=mask, other=0.0), axis=0)
    if merged_ptr is not None:
        tl.store(merged_ptr + t, top, mask=in_range)
        tl.store(merged_ptr + T + t, total, mask=in_range)
        tl.store(merged_ptr + 2 * T + t, sum_pz, mask=in_range)
        tl.store(merged_ptr + 3 * T + t, sum_wz, mask=in_range)
        tl.store(merged_ptr + 4 * T + t, sum_z, mask=in_range)
        tl.store(merged_ptr + 5 * T + t, best.to(tl.float32, bitcast=True), mask=in_range)
        tl.store(merged_ptr + 6 * T + t, sum_squares, mask=in_range)
        tl.store(merged_ptr + 7 * T + t, zy, mask=in_range)
        return

    log_sum = log(total)
    nll = log_sum + (top - zy)
    lse = log_sum + top
    target_weight = 1.0
    if weight_ptr is not None:
        target_weight = tl.load(weight_ptr + y, mask=valid & inside, other=0.0).to(tl.float32)
    cross_entropy = target_weight * nll
    if SMOOTH:
        smooth_loss = tl.load(norm_ptr + 2) * lse - sum_wz
        cross_entropy = (1.0 - smoothing) * cross_entropy + smoothing / V * smooth_loss
    target_prob = tl.full((BLOCK_T,), 1.0, dtype=tl.float32)
    if TOKEN_SCALING:
        target_prob = exp(-nll)
    z_loss = lse_square_scale * lse * lse / tl.load(norm_ptr + 1) * target_prob
    loss = cross_entropy / tl.load(norm_ptr) * target_prob + z_loss
    tl.store(loss_ptr + t, tl.where(valid, loss, 0.0), mask=in_range)
    tl.store(stats_ptr + 2 * t, tl.where(valid, top, 0.0), mask=in_range)
    tl.store(stats_ptr + 2 * t + 1, tl.where(valid, log_sum, 0.0), mask=in_range)
    if z_loss_ptr is not None:
        tl.store(z_loss_ptr + t, tl.where(valid, z_loss, 0.0), mask=in_range)
    if target_prob_ptr is not None:
        tl.store(target_prob_ptr + t, tl.where(valid, target_prob, 0.0), mask=in_range)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + t, tl.where(valid, log_sum - sum_pz / total, 0.0), mask=in_range)
    if mean_logit_ptr is not None:
        tl.store(mean_logit_ptr + t, tl.where(valid, sum_z / V, 0.0), mask=in_range)
    if predicted_ptr is not None:
        tl.store(predicted_ptr + t, tl.where(valid, best, -1).to(tl.int64), mask=in_range)
    if log_sum_sq_probs_ptr is not None:
        log_squares = log(sum_squares) - 2.0 * log_sum
        tl.store(log_sum_sq_probs_ptr + t, tl.where(valid, log_squares, 0.0), mask=in_range)


@kernel
def gradient_kernel(
    g_ptr,
    g_entropy_ptr,
    g_lse_ptr,
    x_ptr,
    more_ptr,
    split,
    bias_ptr,
    target_ptr,
    weight_ptr,
    norm_ptr,
    stats_ptr,
    entropy_ptr,
    dx_ptr,
    stride_g,
    stride_t,
    stride_v,
    stride_dt,
    stride_dv,
    STRIP,
    T,
    V,
    first,
    shard,
    ignore_index,
    smoothing,
    lse_square_scale,
    softcap,
    logit_scale,
    SMOOTH: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradient of STRIP classes of BLOCK_T tokens, BLOCK_V classes at a time.

    g is 1 where it is None. dx may be x, and is x if the logits are in two parts.
    """
    t0 = tl.program_id(0) * BLOCK_T
    x_ptr, row, v0, left = program_block(x_ptr, more_ptr, split, shard, STRIP)
    if more_ptr is not None:
        dx_ptr = x_ptr
    i = tl.arange(0, BLOCK_V)[:, None]
    j = tl.arange(0, BLOCK_T)[None, :]
    t = t0 + tl.arange(0, BLOCK_T)
    in_range = t < T
    dx = dx_ptr + t0.to(tl.int64) * stride_dt + row * stride_dv + (i * stride_dv + j * stride_dt)
    y = tl.load(target_ptr + t, mask=in_range, other=ignore_index)
    valid = y != ignore_index
    if tl.sum(valid.to(tl.int32)) == 0:
        zeros = tl.zeros((BLOCK_V, BLOCK_T), dtype=dx_ptr.dtype.element_ty)
        for start in range(0, left, BLOCK_V):
            tl.store(dx, zeros, mask=(start + i < left) & (t0 + j < T))
            dx += BLOCK_V * stride_dv
        return
    x = x_ptr + t0.to(tl.int64) * stride_t + row * stride_v + (i * stride_v + j * stride_t)
    top = tl.load(stats_ptr + 2 * t, mask=in_range, other=0.0)
    log_sum = tl.load(stats_ptr + 2 * t + 1, mask=in_range, other=0.0)
    g = tl.full((BLOCK_T,), 1.0, dtype=tl.float32)
    if g_ptr is not None:
        g = tl.load(g_ptr + t.to(tl.int64) * stride_g, mask=in_range, other=0.0).to(tl.float32)
    g0 = g * logit_scale / tl.load(norm_ptr)
    g1 = g * logit_scale / tl.load(norm_ptr + 1)
    a = (1.0 - smoothing) * g0
    if weight_ptr is not None:
        a *= tl.load(weight_ptr + y, mask=valid & (y >= 0) & (y < V), other=0.0).to(tl.float32)
    b = smoothing * tl.load(norm_ptr + 2) / V * g0 + 2.0 * lse_square_scale * (top + log_sum) * g1
    if g_lse_ptr is not None:
        b += tl.load(g_lse_ptr + t, mask=in_range, other=0.0) * logit_scale
    in_strip = (y >= first + v0) & (y < first + v0 + left)
    target_index = tl.where(in_strip, y - first - v0, -1).to(tl.int32)
    tl.assume(left > 0)
    for start in tl.range(0, left, BLOCK_V, num_stages=STAGES):
        mask = (start + i < left) & (t0 + j < T)
        logits = add_bias(
            tl.load(x, mask=mask, other=0.0), bias_ptr, v0 + start + i, start + i < left
        )
        z = transform_logits(logits, softcap, logit_scale, SCALED, SOFTCAP)
        log_p = (z - top[None, :]) - log_sum[None, :]
        p = scaled_exp(log_p, x_ptr.dtype.element_ty == tl.float32, 1.0)
        # a·(p - 1[target]) + b·p
        subtracted = tl.where(start + i == target_index[None, :], a[None, :], 0.0)
        d = tl.fma(a[None, :], p, -subtracted) + b[None, :] * p
        if SMOOTH:
            c = smoothing / V * g0
            if weight_ptr is not None:
                w = load_fp32(weight_ptr + first + v0, start + i, start + i < left)
                d -= c[None, :] * w
            else:
                d -= c[None, :]
        if g_entropy_ptr is not None:
            e = tl.load(g_entropy_ptr + t, mask=in_range, other=0.0) * logit_scale
            entropy = tl.load(entropy_ptr + t, mask=in_range, other=0.0)
            d -= e[None, :] * times(p, log_p + entropy[None, :])
        if SOFTCAP:
            _, slope = tanh(logits * logit_scale / softcap)
            d *= slope
        d = tl.where(valid[None, :], d, 0.0)
        tl.store(dx, d.to(dx_ptr.dtype.element_ty), mask=mask)
        x += BLOCK_V * stride_v
        dx += BLOCK_V * stride_dv
