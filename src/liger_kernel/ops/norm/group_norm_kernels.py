"""The kernels of GroupNorm. `group_norm` has the mathematics, `group_norm_launch` the launches.

A tensor has N samples of G groups. A group has K channels of S elements, E = K·S in all.

A group of up to 16,384 elements is held in the registers of one program (forward; half as many in
backward). A larger one is divided into strips for several programs and read twice: some programs
compute the sums of a strip, and others wait for these and compute the output. The group is read
again while it is still in the GPU's cache: see `_next_task`."""

from __future__ import annotations

from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import tl, triton


@triton.jit
def _merge_moments(count, mean, sum_sq, total_count):
    """Merge the moments of parts with ``count`` elements each, by Chan's formula.

    Returns the mean and Σ(x - mean)² of all elements."""
    total_mean = tl.sum(count * mean) / total_count
    total_mean += tl.sum(count * (mean - total_mean)) / total_count  # what the sum rounded off
    delta = mean - total_mean
    return total_mean, tl.sum(sum_sq + count * delta * delta)


@triton.jit
def _strip_moments(x_ptr, N, LANES: tl.constexpr, VEC: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the mean and Σ(x - mean)² of N elements.

    A lane reads 2·VEC elements in an iteration, and keeps the moments of its own elements. If
    ALIGNED, VEC elements of a lane are contiguous, and one load reads them. Otherwise the elements
    of neighbouring lanes are contiguous. There are two loads and no third axis: versions of Triton
    disagree about how to spread one over the threads."""
    LOAD: tl.constexpr = LANES * VEC  # elements
    VEC_AXIS: tl.constexpr = 1 if ALIGNED else 0
    lanes = tl.arange(0, LANES)
    vec = tl.arange(0, VEC)
    i = lanes[:, None] * VEC + vec if ALIGNED else vec[:, None] * LANES + lanes
    mean = tl.zeros((LANES,), dtype=tl.float32)
    sum_sq = mean
    full = N // (2 * LOAD) * (2 * LOAD)
    for start in range(0, full, 2 * LOAD):
        x0 = tl.load(x_ptr + start + i, eviction_policy="evict_last").to(tl.float32)
        x1 = tl.load(x_ptr + start + LOAD + i, eviction_policy="evict_last").to(tl.float32)
        new_mean = (tl.sum(x0, axis=VEC_AXIS) + tl.sum(x1, axis=VEC_AXIS)) / (2 * VEC)
        x0 = x0 - tl.expand_dims(new_mean, VEC_AXIS)
        x1 = x1 - tl.expand_dims(new_mean, VEC_AXIS)
        delta = new_mean - mean
        share = 2 * LOAD / (start + 2 * LOAD)
        sum_sq += tl.sum(x0 * x0 + x1 * x1, axis=VEC_AXIS) + delta * delta * (
            start // LANES * share
        )
        mean += delta * share
    count = tl.zeros((LANES,), dtype=tl.float32) + full // LANES
    if full < N:
        tail = N - full
        mask0, mask1 = i < tail, LOAD + i < tail
        x0 = tl.load(x_ptr + full + i, mask=mask0, other=0.0, eviction_policy="evict_last").to(
            tl.float32
        )
        x1 = tl.load(
            x_ptr + full + LOAD + i, mask=mask1, other=0.0, eviction_policy="evict_last"
        ).to(tl.float32)
        if ALIGNED:
            new = tail // LOAD * VEC + tl.minimum(tl.maximum(tail % LOAD - lanes * VEC, 0), VEC)
        else:
            new = (tail - lanes + LANES - 1) // LANES
        new_count = new.to(tl.float32)
        new_mean = tl.sum(x0, axis=VEC_AXIS) + tl.sum(x1, axis=VEC_AXIS)
        new_mean = new_mean / tl.maximum(new_count, 1.0)
        x0 = tl.where(mask0, x0 - tl.expand_dims(new_mean, VEC_AXIS), 0.0)
        x1 = tl.where(mask1, x1 - tl.expand_dims(new_mean, VEC_AXIS), 0.0)
        delta = new_mean - mean
        share = new_count / tl.maximum(count + new_count, 1.0)
        sum_sq += tl.sum(x0 * x0 + x1 * x1, axis=VEC_AXIS) + delta * delta * count * share
        mean += delta * share
        count += new_count
    return _merge_moments(count, mean, sum_sq, N)


@triton.jit
def _block_offsets(block, blocks_s, K, S, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return a block's channels, the offsets of its elements in the group, and their mask."""
    k = block // blocks_s * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    s = block % blocks_s * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
    return k, k.to(tl.int64) * S + s, (k < K) & (s < S)


@triton.jit
def _next_task(queue_ptr, num_strips, LAG):
    """Draw this program's task: (group, strip of the group, whether to compute the strip's sums).

    A group's sums are computed LAG groups before its output: so early that no program waits for
    long, so late that the group is still in the cache. The turns are drawn, not numbered by the
    grid: what a program waits for has been begun, whatever the order in which a GPU starts its
    programs."""
    turn = tl.atomic_add(queue_ptr, 1, sem="relaxed")
    step = turn // num_strips
    return step // 2 - step % 2 * LAG, turn % num_strips, step % 2 == 0


@triton.jit
def _publish_sums(queue_ptr, sums_ptr, group, strip, num_strips, a, b):
    """Hand a strip's two sums to the programs that compute the group's output."""
    strip_ptr = sums_ptr + 2 * (group.to(tl.int64) * num_strips + strip)
    tl.store(strip_ptr, a)
    tl.store(strip_ptr + 1, b)
    tl.debug_barrier()
    tl.atomic_add(queue_ptr + 1 + group, 1, sem="release")


@triton.jit
def _wait_for_sums(queue_ptr, sums_ptr, group, num_strips, BLOCK_STRIPS: tl.constexpr):
    """Wait until all strips of a group have published their sums.

    Returns the first and the second sums, the numbers of the strips, and which of the BLOCK_STRIPS
    strips exist."""
    while tl.atomic_add(queue_ptr + 1 + group, 0, sem="acquire") < num_strips:
        pass
    strip = tl.arange(0, BLOCK_STRIPS)
    strip_ptr = sums_ptr + 2 * (group.to(tl.int64) * num_strips + strip)
    mask = strip < num_strips
    # .cg: not from the multiprocessor's own cache
    a = tl.load(strip_ptr, mask=mask, other=0.0, cache_modifier=".cg")
    b = tl.load(strip_ptr + 1, mask=mask, other=0.0, cache_modifier=".cg")
    return a, b, strip, mask


@kernel
def group_norm_fwd_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    stride_x,
    G,
    K,
    S,
    eps,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Normalise one group, which is read once."""
    group = tl.program_id(0)
    n = (group // G).to(tl.int64)
    g = (group % G).to(tl.int64)
    # k (BLOCK_K, 1), s (1, BLOCK_S); x, y (BLOCK_K, BLOCK_S)
    k = tl.arange(0, BLOCK_K)[:, None]
    s = tl.arange(0, BLOCK_S)[None, :]
    mask = (k < K) & (s < S)
    i = g * K * S + k * S + s
    x = tl.load(x_ptr + n * stride_x + i, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
    mean = tl.sum(x) / (K * S)
    mean += tl.sum(tl.where(mask, x - mean, 0.0)) / (K * S)  # what the first sum rounded off
    x = tl.where(mask, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x) / (K * S) + eps)
    tl.store(mean_ptr + group, mean)
    tl.store(rstd_ptr + group, rstd)
    y = x * (rstd * w) + b
    tl.store(y_ptr + n * G * K * S + i, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def group_norm_fwd_strips_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    queue_ptr,
    stride_x,
    num_groups,
    G,
    K,
    S,
    E,
    num_strips,
    STRIP,
    LAG,
    eps,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_STRIPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Compute the moments of a strip of STRIP elements, or y of some blocks of a group."""
    group, strip, is_sum = _next_task(queue_ptr, num_strips, LAG)
    if (group >= 0) & (group < num_groups):
        n = (group // G).to(tl.int64)
        g = (group % G).to(tl.int64)
        x_group = x_ptr + n * stride_x + g * E
        if is_sum:
            begin = strip.to(tl.int64) * STRIP
            mean, sum_sq = _strip_moments(
                x_group + begin, tl.minimum(STRIP, E - begin), LANES, VEC, ALIGNED
            )
            _publish_sums(queue_ptr, sums_ptr, group, strip, num_strips, mean, sum_sq)
        else:
            means, sums_sq, p, exists = _wait_for_sums(
                queue_ptr, sums_ptr, group, num_strips, BLOCK_STRIPS
            )
            count = tl.where(exists, tl.minimum(STRIP, E - p.to(tl.int64) * STRIP), 0)
            mean, sum_sq = _merge_moments(count.to(tl.float32), means, sums_sq, E)
            rstd = 1.0 / tl.sqrt(sum_sq / E + eps)
            tl.store(mean_ptr + group, mean)
            tl.store(rstd_ptr + group, rstd)
            y_group = y_ptr + (n * G + g) * E
            blocks_s = tl.cdiv(S, BLOCK_S)
            for block in range(strip, tl.cdiv(K, BLOCK_K) * blocks_s, num_strips):
                k, i, mask = _block_offsets(block, blocks_s, K, S, BLOCK_K, BLOCK_S)
                x = tl.load(x_group + i, mask=mask, other=0.0, eviction_policy="evict_first").to(
                    tl.float32
                )
                w = tl.load(w_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
                b = tl.load(b_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
                y = ((x - mean) * (rstd * w) + b).to(y_ptr.dtype.element_ty)
                tl.store(y_group + i, y, mask=mask, eviction_policy="evict_first")


@kernel
def group_norm_bwd_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    stride_dy,
    stride_x,
    N,
    G,
    K,
    S,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Compute dx of one group in every n-th sample, and the group's part of a row of partial dw and
    db."""
    row = tl.program_id(0) // G
    g = (tl.program_id(0) % G).to(tl.int64)
    # k (BLOCK_K, 1), s (1, BLOCK_S); dy, x, dx (BLOCK_K, BLOCK_S)
    k = tl.arange(0, BLOCK_K)[:, None]
    s = tl.arange(0, BLOCK_S)[None, :]
    mask = (k < K) & (s < S)
    i = g * K * S + k * S + s
    w = tl.load(w_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_K, 1), dtype=tl.float32)
    db = dw
    for sample in tl.range(row, N, tl.num_programs(0) // G, num_stages=NUM_STAGES):
        n = tl.cast(sample, tl.int64)
        dy = tl.load(dy_ptr + n * stride_dy + i, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + n * stride_x + i, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + n * G + g)
        xhat = (x - tl.load(mean_ptr + n * G + g)) * rstd
        sum_dy_xhat = tl.sum(dy * xhat, axis=1, keep_dims=True)
        sum_dy = tl.sum(dy, axis=1, keep_dims=True)
        dw += sum_dy_xhat
        db += sum_dy
        if dx_ptr is not None:
            mean_m = tl.sum(w * sum_dy) / (K * S)
            mean_m_xhat = tl.sum(w * sum_dy_xhat) / (K * S)
            dx = rstd * (dy * w - mean_m - xhat * mean_m_xhat)
            tl.store(dx_ptr + n * G * K * S + i, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    offsets = (row * G + g) * K + k
    if dw_ptr is not None:
        tl.store(dw_ptr + offsets, dw, mask=k < K)
    if db_ptr is not None:
        tl.store(db_ptr + offsets, db, mask=k < K)


@triton.jit
def _strip_sums(
    dy_ptr,
    x_ptr,
    w_ptr,
    dw_ptr,
    db_ptr,
    dw_offset,
    mean,
    rstd,
    S,
    k_begin,
    k_end,
    s_begin,
    s_end,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return Σ m and Σ m·x̂ over the channels k_begin to k_end and their elements s_begin to s_end.

    The sums of channel k for dw and db are stored at ``dw_offset + k``. A lane reads VEC elements
    in an iteration, as in `_strip_moments`. The contiguous axis comes last: Triton 3.6 mixes the
    rows of a sum over the last axis of another order."""
    VEC_AXIS: tl.constexpr = 2 if ALIGNED else 1
    lanes = tl.arange(0, LANES)
    vec = tl.arange(0, VEC)
    i = (lanes[:, None] * VEC + vec if ALIGNED else vec[:, None] * LANES + lanes)[None, :, :]
    sum_m = tl.zeros((BLOCK_K,), dtype=tl.float32)
    sum_m_xhat = sum_m
    for k0 in range(k_begin, k_end, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        row = k[:, None, None]
        lane_dy_x = tl.zeros((BLOCK_K, LANES), dtype=tl.float32)
        lane_dy = lane_dy_x
        for s0 in range(s_begin, s_end, LANES * VEC):
            mask = (row < k_end) & (s0 + i < s_end)
            offsets = row.to(tl.int64) * S + s0 + i
            dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_last").to(
                tl.float32
            )
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_last").to(
                tl.float32
            )
            lane_dy += tl.sum(dy, axis=VEC_AXIS)
            lane_dy_x += tl.sum(dy * (x - mean), axis=VEC_AXIS)
        sum_dy_xhat = tl.sum(lane_dy_x, axis=1) * rstd
        sum_dy = tl.sum(lane_dy, axis=1)
        if dw_ptr is not None:
            tl.store(dw_ptr + dw_offset + k, sum_dy_xhat, mask=k < k_end)
        if db_ptr is not None:
            tl.store(db_ptr + dw_offset + k, sum_dy, mask=k < k_end)
        w = tl.load(w_ptr + k, mask=k < k_end, other=0.0).to(tl.float32)
        sum_m += w * sum_dy
        sum_m_xhat += w * sum_dy_xhat
    return tl.sum(sum_m), tl.sum(sum_m_xhat)


@kernel
def group_norm_bwd_strips_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    queue_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    stride_dy,
    stride_x,
    num_groups,
    G,
    K,
    S,
    E,
    num_strips,
    strips_s,
    STRIP_K,
    STRIP_S,
    LAG,
    BLOCK_STRIPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute the sums over a strip of a group, STRIP_S elements of STRIP_K channels, or its dx.

    No index goes beyond S, since S + STRIP_S may not fit into 32 bits.
    """
    group, strip, is_sum = _next_task(queue_ptr, num_strips, LAG)
    if (group >= 0) & (group < num_groups):
        n = (group // G).to(tl.int64)
        g = (group % G).to(tl.int64)
        dy_group, x_group = dy_ptr + n * stride_dy + g * E, x_ptr + n * stride_x + g * E
        mean = tl.load(mean_ptr + group)
        rstd = tl.load(rstd_ptr + group)
        k_begin, s_begin = strip // strips_s * STRIP_K, strip % strips_s * STRIP_S
        k_end = tl.minimum(k_begin + STRIP_K, K)
        s_end = s_begin + tl.minimum(STRIP_S, S - s_begin)
        if is_sum:
            sum_m, sum_m_xhat = _strip_sums(
                dy_group,
                x_group,
                w_ptr + g * K,
                dw_ptr,
                db_ptr,
                ((n * strips_s + strip % strips_s) * G + g) * K,
                mean,
                rstd,
                S,
                k_begin,
                k_end,
                s_begin,
                s_end,
                BLOCK_K,
                LANES,
                VEC,
                ALIGNED,
            )
            if dx_ptr is not None:
                _publish_sums(queue_ptr, sums_ptr, group, strip, num_strips, sum_m, sum_m_xhat)
        elif dx_ptr is not None:
            sums_m, sums_m_xhat, _, _ = _wait_for_sums(
                queue_ptr, sums_ptr, group, num_strips, BLOCK_STRIPS
            )
            mean_m = rstd * tl.sum(sums_m) / E
            mean_m_xhat = rstd * rstd * tl.sum(sums_m_xhat) / E
            dx_group = dx_ptr + (n * G + g) * E
            for k0 in range(k_begin, k_end, BLOCK_K):
                k = k0 + tl.arange(0, BLOCK_K)[:, None]
                w = tl.load(w_ptr + g * K + k, mask=k < k_end, other=0.0).to(tl.float32)
                for s0 in range(s_begin, s_end, LANES * VEC):
                    s = s0 + tl.arange(0, LANES * VEC)[None, :]
                    i = k.to(tl.int64) * S + s
                    mask = (k < k_end) & (s < s_end)
                    dy = tl.load(
                        dy_group + i, mask=mask, other=0.0, eviction_policy="evict_first"
                    ).to(tl.float32)
                    x = tl.load(
                        x_group + i, mask=mask, other=0.0, eviction_policy="evict_first"
                    ).to(tl.float32)
                    dx = dy * (rstd * w) - mean_m - (x - mean) * mean_m_xhat
                    tl.store(
                        dx_group + i,
                        dx.to(dx_ptr.dtype.element_ty),
                        mask=mask,
                        eviction_policy="evict_first",
                    )
