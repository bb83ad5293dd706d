r"""Kernels that compute a divergence of a student's and a teacher's logits, and its gradient.

The formulas are in `divergences`. Both models' logits are read three times:

1. `statistics_kernel` computes the log-sum-exps, or cosine's sums, of each strip of classes.
   `merge_statistics_kernel` combines the strips.
2. `compare_kernel` computes ΣD and ΣG of each token.
3. `compare_kernel` again writes the gradient over the student's logits.

kl_div does without the second: ΣG = -Σp is one of the statistics, and so is Σ p·log p; the rest of
ΣD comes with the gradient. As in `logits` the student's tokens are contiguous, each lane keeps its
own maximum and sums, and a log-sum-exp is kept as its two parts, so that a confident row keeps its
digits. The teacher's logits and p have any strides.

Names: x and s are the student's logits, y and z the teacher's (or its probabilities for kl_div). V
and W are the numbers of the student's and the teacher's classes.
"""

from __future__ import annotations

from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import INF, exp, log, tl
from liger_kernel.ops.head import divergences
from liger_kernel.ops.head.divergence_strips import (
    lane_block,
    load_log_sum,
    load_pair,
    load_teacher,
    program_strip,
    store_log_sum,
    store_pair,
    sum_lanes,
    update_log_sum,
)
from liger_kernel.ops.head.divergence_terms import (
    LOG2_E,
    exp_or_exp2,
    log_or_log2,
)
from liger_kernel.ops.head.logits_kernels import target_logit, times

NUM_STATISTICS = 6  # numbers of a token, in `statistics_kernel` and `merge_statistics_kernel`
MIN_NORM = tl.constexpr(divergences.MIN_NORM)


@kernel
def statistics_kernel(
    x_ptr,
    more_ptr,
    split,
    y_ptr,
    target_ptr,
    partial_ptr,
    stride_x,
    stride_y,
    stride_t,
    T,
    V,
    W,
    strip_size,
    ignore_index,
    scale,
    beta,
    COSINE: tl.constexpr,
    KL_DIV: tl.constexpr,
    HARD_STATS: tl.constexpr,
    CONTIGUOUS_Y: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PER_LANE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Compute the statistics of strip_size classes of BLOCK_T tokens: one program.

    Slots: max z_s and Σ exp((z_s - max)/T), likewise of z_t (or Σ z_s², Σ z_t², Σ z_s·z_t for
    COSINE, or Σ p and Σ p·log max(p, beta) in place of z_t's for KL_DIV); with HARD_STATS also
    max z_s and Σ exp(z_s - max). FULL: every iteration has as many classes and tokens as it can
    have, so nothing is masked.
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    x_ptr, first, begin, end = program_strip(x_ptr, more_ptr, split, W, strip_size)
    target = tl.load(target_ptr + tokens, mask=tokens < T, other=ignore_index)
    if tl.sum((target != ignore_index).to(tl.int32)) == 0:
        return
    i, t = lane_block(BLOCK_T, BLOCK_V, PER_LANE)
    row = begin.to(tl.int64) - first
    x = x_ptr + (i * stride_x + t[None, :])
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    EMPTY: tl.constexpr = 0.0 if COSINE else -INF
    LOG_UNIT: tl.constexpr = 1.0 if EXACT else LOG2_E
    scale *= LOG_UNIT
    top_q = tl.full((BLOCK_V * BLOCK_T,), -INF, dtype=tl.float32)
    sum_q = tl.zeros((BLOCK_V * BLOCK_T,), dtype=tl.float32)
    top_p, sum_p = top_q, sum_q
    top_hard, sum_hard = top_q, sum_q
    ss, tt, st = sum_q, sum_q, sum_q
    total_p = tl.zeros((PER_LANE, BLOCK_V * BLOCK_T), dtype=tl.float32)
    total_d = total_p
    for start in range(0, end - begin, PER_LANE * BLOCK_V):
        c = begin + start + i
        inside = (c < end) & (t < T)[None, :]
        if more_ptr is not None:
            inside &= c >= first
        in_vocab = inside & (c < V)
        if FULL:
            inside = tl.full((PER_LANE, BLOCK_V * BLOCK_T), True, tl.int1)
            in_vocab = inside
        s = tl.load(x + (row + start) * stride_x, mask=in_vocab, other=EMPTY).to(tl.float32)
        z = load_teacher(
            y_ptr,
            stride_y,
            stride_t,
            first,
            begin,
            start,
            end,
            T,
            W,
            0.0 if KL_DIV else EMPTY,
            CONTIGUOUS_Y,
            BLOCK_T,
            BLOCK_V,
            PER_LANE,
            FULL,
        )
        if COSINE:
            ss += tl.sum(s * s, axis=0)
            tt += tl.sum(z * z, axis=0)
            st += tl.sum(s * z, axis=0)
            s = tl.where(in_vocab, s, -INF)
        else:
            top_q, sum_q = update_log_sum(top_q, sum_q, s, scale, EXACT)
            if KL_DIV:
                total_p += z
                log_p = log_or_log2(tl.maximum(z, beta), not EXACT)
                total_d += z * log_p
            else:
                top_p, sum_p = update_log_sum(top_p, sum_p, z, scale, EXACT)
        if HARD_STATS:
            top_hard, sum_hard = update_log_sum(top_hard, sum_hard, s, LOG_UNIT, EXACT)

    mask = tokens < T
    slot = tl.num_programs(1) * T
    partial = partial_ptr + tl.program_id(1) * T + tokens
    partial_p = partial + 2 * slot
    partial_hard = partial + 4 * slot
    if COSINE:
        tl.store(partial, sum_lanes(ss, BLOCK_T, BLOCK_V), mask=mask)
        tl.store(partial + slot, sum_lanes(tt, BLOCK_T, BLOCK_V), mask=mask)
        tl.store(partial + 2 * slot, sum_lanes(st, BLOCK_T, BLOCK_V), mask=mask)
    else:
        store_log_sum(partial, slot, top_q, sum_q, scale, mask, EXACT, BLOCK_T, BLOCK_V)
        if KL_DIV:
            tl.store(partial_p, sum_lanes(tl.sum(total_p, axis=0), BLOCK_T, BLOCK_V), mask=mask)
            sum_d = sum_lanes(tl.sum(total_d, axis=0), BLOCK_T, BLOCK_V) / LOG_UNIT
            tl.store(partial_p + slot, sum_d, mask=mask)
        else:
            store_log_sum(partial_p, slot, top_p, sum_p, scale, mask, EXACT, BLOCK_T, BLOCK_V)
    if HARD_STATS:
        store_log_sum(
            partial_hard, slot, top_hard, sum_hard, LOG_UNIT, mask, EXACT, BLOCK_T, BLOCK_V
        )


@kernel
def merge_statistics_kernel(
    partial_ptr,
    x_ptr,
    more_ptr,
    split,
    target_ptr,
    stats_ptr,
    soft_ptr,
    hard_ptr,
    stride_x,
    N,
    T,
    V,
    W,
    ignore_index,
    scale,
    beta,
    COSINE: tl.constexpr,
    KL_DIV: tl.constexpr,
    HARD_STATS: tl.constexpr,
    HARD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Combine the statistics of N strips.

    As in `logits`, one launch writes all outputs: hence the many arguments.

    The statistics (NUM_STATISTICS, T) become the maxima of `statistics_kernel` and the logarithms
    of its sums. For COSINE they are the factors of z_t and z_s in the gradient. For KL_DIV, Σp and
    Σp/Σ exp((z_s - max)/T) are in place of z_t's. CE goes to ``hard``. The loss of cosine goes to
    ``soft``, and so does Σ p·log p + Σp·log Σ exp((z_s - max)/T) of kl_div.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_range = t < T
    n = tl.arange(0, BLOCK_N)[:, None]
    slot = N * T
    partial = partial_ptr + n * T + t[None, :]
    mask = (n < N) & in_range[None, :]
    target = tl.load(target_ptr + t, mask=in_range, other=ignore_index)
    valid = target != ignore_index
    mask = mask & valid[None, :]
    stats = stats_ptr + t
    if COSINE:
        norm_s = tl.sqrt(tl.sum(tl.load(partial, mask=mask, other=0.0), axis=0))
        norm_z = tl.sqrt(tl.sum(tl.load(partial + slot, mask=mask, other=0.0), axis=0))
        dot = tl.sum(tl.load(partial + 2 * slot, mask=mask, other=0.0), axis=0)
        clamped = norm_s <= MIN_NORM
        # unlike maximum, where keeps NaN
        norm_s = tl.where(clamped, MIN_NORM, norm_s)
        norm_z = tl.where(norm_z <= MIN_NORM, MIN_NORM, norm_z)
        cosine = dot / norm_s / norm_z
        tl.store(stats, -beta / norm_s / norm_z, mask=in_range)
        factor_s = beta * cosine / norm_s / norm_s
        tl.store(stats + T, tl.where(clamped, 0.0, factor_s), mask=in_range)
        tl.store(soft_ptr + t, tl.where(valid, beta * (1.0 - cosine), 0.0), mask=in_range)
    else:
        top, total = load_log_sum(partial, slot, scale, mask)
        if W > V:  # zeros for the classes that only the teacher has
            new_top = tl.maximum(top, 0.0)
            total = total * exp((top - new_top) * scale) + (W - V) * exp(-new_top * scale)
            top = new_top
        store_pair(stats, T, top, total, valid, in_range)
        if KL_DIV:
            sum_p = tl.sum(tl.load(partial + 2 * slot, mask=mask, other=0.0), axis=0)
            tl.store(stats + 2 * T, tl.where(valid, sum_p, 0.0), mask=in_range)
            tl.store(stats + 3 * T, tl.where(valid, sum_p / total, 0.0), mask=in_range)
            d = tl.sum(tl.load(partial + 3 * slot, mask=mask, other=0.0), axis=0)
            d += log(total) * sum_p
            tl.store(soft_ptr + t, tl.where(valid, d, 0.0), mask=in_range)
        else:
            top, total = load_log_sum(partial + 2 * slot, slot, scale, mask)
            store_pair(stats + 2 * T, T, top, total, valid, in_range)
    if HARD:
        if HARD_STATS:
            partial += 4 * slot
        top, total = load_log_sum(partial, slot, 1.0, mask)
        store_pair(stats + 4 * T, T, top, total, valid, in_range)
        in_vocab = valid & (target >= 0) & (target < V)
        zy = target_logit(x_ptr, more_ptr, split, t, target, stride_x, in_vocab, float("nan"))
        ce = log(total) + (top - zy.to(tl.float32))
        tl.store(hard_ptr + t, tl.where(valid, ce, 0.0), mask=in_range)


@kernel
def compare_kernel(
    x_ptr,
    more_ptr,
    split,
    y_ptr,
    target_ptr,
    stats_ptr,
    sum_ptr,
    norm_ptr,
    stride_x,
    stride_y,
    stride_t,
    T,
    V,
    W,
    strip_size,
    ignore_index,
    scale,
    beta,
    weight_hard,
    weight_soft,
    TERMS: tl.constexpr,
    GRADIENT: tl.constexpr,
    COSINE: tl.constexpr,
    KL_DIV: tl.constexpr,
    HARD: tl.constexpr,
    ENTROPY: tl.constexpr,
    Q_IS_SOFTMAX: tl.constexpr,
    CONTIGUOUS_Y: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PER_LANE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Sum D, G and q over strip_size classes of BLOCK_T tokens: one program.

    With ENTROPY also q·log q, in a fourth sum. With GRADIENT it overwrites the student's logits
    with their gradient instead. With KL_DIV, ΣG is known before, and it does both: the sum is
    Σ p·(max - z_s)/T. Q_IS_SOFTMAX: softmax(z_s), which the gradient of CE needs, is q. FULL: as
    in `statistics_kernel`.
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_range = tokens < T
    x_ptr, first, begin, end = program_strip(x_ptr, more_ptr, split, W, strip_size)
    i, t = lane_block(BLOCK_T, BLOCK_V, PER_LANE)
    row = begin.to(tl.int64) - first
    x = x_ptr + (i * stride_x + t[None, :])
    target = tl.load(target_ptr + tokens, mask=in_range, other=ignore_index)
    valid = target != ignore_index
    slot = tl.num_programs(1) * T
    offset = tl.program_id(1) * T + tokens
    if tl.sum(valid.to(tl.int32)) == 0:
        if GRADIENT:
            zeros = tl.zeros((PER_LANE, BLOCK_V * BLOCK_T), dtype=x_ptr.dtype.element_ty)
            for start in range(0, end - begin, PER_LANE * BLOCK_V):
                c = begin + start + i
                inside = (c >= first) & (c < end) & (t < T)[None, :]
                tl.store(x + (row + start) * stride_x, zeros, mask=inside)
        if KL_DIV or not GRADIENT:
            zero_sums = tl.zeros((BLOCK_T,), dtype=tl.float32)
            for k in range(1 if KL_DIV else 4 if ENTROPY else 3):
                tl.store(sum_ptr + offset + k * slot, zero_sums, mask=in_range)
        return

    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    LOG_UNIT: tl.constexpr = 1.0 if EXACT else LOG2_E
    lane_in_range = t < T
    target = tl.load(target_ptr + t, mask=lane_in_range, other=ignore_index)
    valid_lane = (target != ignore_index)[None, :]
    in_strip = (target >= begin) & (target < end)
    target = tl.where(in_strip, target - begin, -1).to(tl.int32)[None, :]
    stats = stats_ptr + t
    top_q, log_sum_q = load_pair(stats, T, lane_in_range)
    top_p, log_sum_p = top_q, log_sum_q
    mean_g = top_q
    if not COSINE:
        # with KL_DIV these two are Σp and Σp/Σ exp((z_s - max)/T)
        top_p, log_sum_p = load_pair(stats + 2 * T, T, lane_in_range)
    if not COSINE and not KL_DIV:
        log_sum_p *= LOG_UNIT
        log_sum_q *= LOG_UNIT
    top, log_sum = top_q, log_sum_q
    soft = 0.0
    hard = 0.0
    if GRADIENT:
        n = tl.load(norm_ptr)
        soft = weight_soft / n
        hard = weight_hard / n
        if not COSINE:
            soft *= scale
            if KL_DIV:
                log_sum_p *= soft
            else:
                soft /= LOG_UNIT
                mean_g = tl.load(sum_ptr + t, mask=lane_in_range, other=0.0)
        if HARD and not Q_IS_SOFTMAX:
            top, log_sum = load_pair(stats + 4 * T, T, lane_in_range)
            log_sum *= LOG_UNIT
    scale *= LOG_UNIT
    # as in `logits_kernels.partials_kernel`
    tl.assume(end - begin > 0)
    total_d = tl.zeros((BLOCK_V * BLOCK_T,), dtype=tl.float32)
    total_g = total_d
    total_q = total_d
    total_e = total_d
    total_kl = tl.zeros((PER_LANE, BLOCK_V * BLOCK_T), dtype=tl.float32)
    for start in range(0, end - begin, PER_LANE * BLOCK_V):
        c = begin + start + i
        inside = (c < end) & (t < T)[None, :]
        if more_ptr is not None:
            inside &= c >= first
        in_vocab = inside & (c < V)
        if FULL:
            inside = tl.full((PER_LANE, BLOCK_V * BLOCK_T), True, tl.int1)
            in_vocab = inside
        x_block = x + (row + start) * stride_x
        # before s, so that Triton brings z to the layout of s and does not compute in both
        z = load_teacher(
            y_ptr,
            stride_y,
            stride_t,
            first,
            begin,
            start,
            end,
            T,
            W,
            None if GRADIENT else -INF,
            CONTIGUOUS_Y,
            BLOCK_T,
            BLOCK_V,
            PER_LANE,
            FULL,
        )
        if GRADIENT:  # V is W, and what is outside is not stored
            s = tl.load(x_block, mask=inside).to(tl.float32)
        else:
            s = tl.load(x_block, mask=in_vocab, other=-INF).to(tl.float32)
        if not GRADIENT:
            if W > V:
                s = tl.where(inside & (c >= V), 0.0, s)
        q = s
        if COSINE:
            dz = soft * (top_q[None, :] * z + log_sum_q[None, :] * s)
        elif KL_DIV:
            log_q = (s - top_q[None, :]) * scale
            dz = exp_or_exp2(log_q, EXACT) * log_sum_p[None, :] - soft * z
            total_kl -= tl.where(inside & (z != 0.0), z * log_q, 0.0)
        else:
            log_p = (z - top_p[None, :]) * scale - log_sum_p[None, :]
            log_q = (s - top_q[None, :]) * scale - log_sum_q[None, :]
            p = exp_or_exp2(log_p, EXACT)
            q = exp_or_exp2(log_q, EXACT)
            d, g = TERMS(p, q, log_p, log_q, beta, EXACT, not EXACT)
            dz = soft * (g - q * mean_g[None, :])
            if not GRADIENT:  # outside of the block, p = q = 0
                total_d += tl.sum(d, axis=0)
                total_g += tl.sum(g, axis=0)
                total_q += tl.sum(q, axis=0)
                if ENTROPY:
                    total_e += tl.sum(times(q, log_q), axis=0)
        if GRADIENT:
            if HARD:
                if not Q_IS_SOFTMAX:
                    q = exp_or_exp2((s - top[None, :]) * LOG_UNIT - log_sum[None, :], EXACT)
                dz += hard * (q - (start + i == target).to(tl.float32))
            dz = tl.where(valid_lane, dz, 0.0).to(x_ptr.dtype.element_ty)
            tl.store(x_block, dz, mask=inside)
    if KL_DIV:
        total_d = tl.sum(total_kl, axis=0)
    if KL_DIV or not GRADIENT:
        sum_d = sum_lanes(total_d, BLOCK_T, BLOCK_V) / LOG_UNIT
        tl.store(sum_ptr + offset, tl.where(valid, sum_d, 0.0), mask=in_range)
    if not KL_DIV and not GRADIENT:
        sum_g = sum_lanes(total_g, BLOCK_T, BLOCK_V)
        tl.store(sum_ptr + offset + slot, tl.where(valid, sum_g, 0.0), mask=in_range)
        sum_q = sum_lanes(total_q, BLOCK_T, BLOCK_V)
        tl.store(sum_ptr + offset + 2 * slot, tl.where(valid, sum_q, 0.0), mask=in_range)
        if ENTROPY:
            sum_e = sum_lanes(total_e, BLOCK_T, BLOCK_V) / LOG_UNIT
            tl.store(sum_ptr + offset + 3 * slot, tl.where(valid, sum_e, 0.0), mask=in_range)
