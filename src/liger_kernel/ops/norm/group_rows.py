"""The kernels of GroupNorm, and how they are launched. `group_norm` has the mathematics.

A group of up to 16,384 elements is held in the registers of one program (forward; half as many in
backward). A larger one is divided among several programs and read twice: some take its sums, and
others wait for these and finish it. It is read again while it is still in the GPU's cache: see
`_next`."""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import custom_op
from liger_kernel.core.reduce import sum_both
from liger_kernel.core.tile import cdiv, next_power_of_2, tl, triton

MOST = 256  # strips of a group


@triton.jit
def _merge(count, mean, square, total):
    """Chan's formula: mean and Σ(x - mean)² of all elements, from those of parts with ``count``
    elements each."""
    middle = tl.sum(count * mean) / total
    middle += tl.sum(count * (mean - middle)) / total  # what the first sum rounded off
    off = mean - middle
    return middle, tl.sum(square + count * off * off)


@triton.jit
def _moments(x_ptr, N, LANES: tl.constexpr, EACH: tl.constexpr, ALIGNED: tl.constexpr):
    """Mean and Σ(x - mean)² of N elements. Each lane keeps those of its own, twice EACH of them in
    an iteration.

    If ALIGNED, EACH of a lane's elements are contiguous, and one load reads them. Otherwise those
    of neighbouring lanes are. Two loads have no third axis: versions of Triton disagree about how
    to spread one over the threads."""
    HALF: tl.constexpr = LANES * EACH
    AXIS: tl.constexpr = 1 if ALIGNED else 0
    lanes, each = tl.arange(0, LANES), tl.arange(0, EACH)
    i = lanes[:, None] * EACH + each if ALIGNED else each[:, None] * LANES + lanes
    mean = tl.zeros((LANES,), dtype=tl.float32)
    square = mean
    whole = N // (2 * HALF) * (2 * HALF)
    for start in range(0, whole, 2 * HALF):
        x = tl.load(x_ptr + start + i, eviction_policy="evict_last").to(tl.float32)
        z = tl.load(x_ptr + start + HALF + i, eviction_policy="evict_last").to(tl.float32)
        its = (tl.sum(x, axis=AXIS) + tl.sum(z, axis=AXIS)) / (2 * EACH)
        x, z = x - tl.expand_dims(its, AXIS), z - tl.expand_dims(its, AXIS)
        delta = its - mean
        share = 2 * HALF / (start + 2 * HALF)
        square += tl.sum(x * x + z * z, axis=AXIS) + delta * delta * (start // LANES * share)
        mean += delta * share
    count = tl.zeros((LANES,), dtype=tl.float32) + whole // LANES
    if whole < N:
        rest = N - whole
        here, there = i < rest, HALF + i < rest
        x = tl.load(x_ptr + whole + i, mask=here, other=0.0, eviction_policy="evict_last").to(
            tl.float32
        )
        z = tl.load(
            x_ptr + whole + HALF + i, mask=there, other=0.0, eviction_policy="evict_last"
        ).to(tl.float32)
        if ALIGNED:
            more = rest // HALF * EACH + tl.minimum(tl.maximum(rest % HALF - lanes * EACH, 0), EACH)
        else:
            more = (rest - lanes + LANES - 1) // LANES
        more = more.to(tl.float32)
        its = (tl.sum(x, axis=AXIS) + tl.sum(z, axis=AXIS)) / tl.maximum(more, 1.0)
        x = tl.where(here, x - tl.expand_dims(its, AXIS), 0.0)
        z = tl.where(there, z - tl.expand_dims(its, AXIS), 0.0)
        delta = its - mean
        share = more / tl.maximum(count + more, 1.0)
        square += tl.sum(x * x + z * z, axis=AXIS) + delta * delta * count * share
        mean += delta * share
        count += more
    return _merge(count, mean, square, N)


@triton.jit
def _block(block, across, K, S, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr):
    """A block of a group: its channels, the offsets of its elements, and a mask of those that
    exist."""
    k = block // across * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    s = block % across * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
    return k, k.to(tl.int64) * S + s, (k < K) & (s < S)


@triton.jit
def _next(queue_ptr, strips, LAG):
    """What this program has to do, by its turn: -> the group, which strip of it, whether to take
    the sums there.

    A group's sums are taken LAG groups before it is finished: so late that nobody waits for long,
    so early that it is still in the cache. Turns are drawn, not numbered by the grid: what a
    program waits for has been begun, whatever the order in which a GPU starts its programs."""
    turn = tl.atomic_add(queue_ptr, 1, sem="relaxed")
    step = turn // strips
    return step // 2 - step % 2 * LAG, turn % strips, step % 2 == 0


@triton.jit
def _publish(queue_ptr, part_ptr, group, strip, strips, a, b):
    """Hand a strip's two sums to those that finish the group."""
    part = part_ptr + 2 * (group.to(tl.int64) * strips + strip)
    tl.store(part, a)
    tl.store(part + 1, b)
    tl.debug_barrier()
    tl.atomic_add(queue_ptr + 1 + group, 1, sem="release")


@triton.jit
def _published(queue_ptr, part_ptr, group, strips, STRIPS: tl.constexpr):
    """-> the sums of all strips, when they are there; the strips' numbers, and which of STRIPS
    exist."""
    while tl.atomic_add(queue_ptr + 1 + group, 0, sem="acquire") < strips:
        pass
    p = tl.arange(0, STRIPS)
    part, known = part_ptr + 2 * (group.to(tl.int64) * strips + p), p < strips
    a = tl.load(
        part, mask=known, other=0.0, cache_modifier=".cg"
    )  # not from the multiprocessor's own cache
    return a, tl.load(part + 1, mask=known, other=0.0, cache_modifier=".cg"), p, known


@kernel
def _fwd(
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
    """One program: one group, read once."""
    group = tl.program_id(0)
    n, g = (group // G).to(tl.int64), (group % G).to(tl.int64)
    k, s = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_S)[None, :]
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
def _fwd_wide(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    part_ptr,
    queue_ptr,
    stride_x,
    groups,
    G,
    K,
    S,
    E,
    strips,
    STRIP,
    LAG,
    eps,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program: the moments of a strip of a group's E elements, or y of some blocks of a
    group."""
    group, strip, first = _next(queue_ptr, strips, LAG)
    if (group >= 0) & (group < groups):
        n, g = (group // G).to(tl.int64), (group % G).to(tl.int64)
        x_group = x_ptr + n * stride_x + g * E
        if first:
            begin = strip.to(tl.int64) * STRIP
            mean, square = _moments(
                x_group + begin, tl.minimum(STRIP, E - begin), LANES, EACH, ALIGNED
            )
            _publish(queue_ptr, part_ptr, group, strip, strips, mean, square)
        else:
            means, squares, p, known = _published(queue_ptr, part_ptr, group, strips, STRIPS)
            count = tl.where(known, tl.minimum(STRIP, E - p.to(tl.int64) * STRIP), 0).to(tl.float32)
            mean, square = _merge(count, means, squares, E)
            rstd = 1.0 / tl.sqrt(square / E + eps)
            tl.store(mean_ptr + group, mean)
            tl.store(rstd_ptr + group, rstd)
            y_group = y_ptr + (n * G + g) * E
            across = tl.cdiv(S, BLOCK_S)
            for block in range(strip, tl.cdiv(K, BLOCK_K) * across, strips):
                k, i, mask = _block(block, across, K, S, BLOCK_K, BLOCK_S)
                x = tl.load(x_group + i, mask=mask, other=0.0, eviction_policy="evict_first").to(
                    tl.float32
                )
                w = tl.load(w_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
                b = tl.load(b_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
                y = ((x - mean) * (rstd * w) + b).to(y_ptr.dtype.element_ty)
                tl.store(y_group + i, y, mask=mask, eviction_policy="evict_first")


@kernel
def _bwd(
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
    STAGES: tl.constexpr,
):
    """A program processes one group in every n-th sample, and writes its part of one row of the
    partial dw and db."""
    row, g = tl.program_id(0) // G, (tl.program_id(0) % G).to(tl.int64)
    k, s = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_S)[None, :]
    mask = (k < K) & (s < S)
    i = g * K * S + k * S + s
    w = tl.load(w_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_K, 1), dtype=tl.float32)
    db = dw
    for sample in tl.range(row, N, tl.num_programs(0) // G, num_stages=STAGES):
        n = tl.cast(sample, tl.int64)
        dy = tl.load(dy_ptr + n * stride_dy + i, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + n * stride_x + i, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + n * G + g)
        xhat = (x - tl.load(mean_ptr + n * G + g)) * rstd
        dyxhat, dy1 = tl.sum(dy * xhat, axis=1, keep_dims=True), tl.sum(dy, axis=1, keep_dims=True)
        dw += dyxhat
        db += dy1
        if dx_ptr is not None:
            m1, mxhat = tl.sum(w * dy1) / (K * S), tl.sum(w * dyxhat) / (K * S)
            dx = rstd * (dy * w - m1 - xhat * mxhat)
            tl.store(dx_ptr + n * G * K * S + i, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    at = (row * G + g) * K + k
    if dw_ptr is not None:
        tl.store(dw_ptr + at, dw, mask=k < K)
    if db_ptr is not None:
        tl.store(db_ptr + at, db, mask=k < K)


@triton.jit
def _sums(
    dy_ptr,
    x_ptr,
    w_ptr,
    dw_ptr,
    db_ptr,
    at,
    mean,
    rstd,
    S,
    first,
    end,
    begin,
    stop,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Σ m and Σ m·x̂ over the channels from ``first`` to ``end`` and their elements from ``begin``
    to ``stop``.

    The sums of channel k for dw and db are written at ``at + k``. A lane reads EACH elements in an
    iteration, as in `_moments`. What is contiguous comes last: Triton 3.6 mixes the rows of a sum
    over the last axis of another order."""
    OF_LANE: tl.constexpr = 2 if ALIGNED else 1
    lane, each = tl.arange(0, LANES), tl.arange(0, EACH)
    i = (lane[:, None] * EACH + each if ALIGNED else each[:, None] * LANES + lane)[None, :, :]
    m1 = tl.zeros((BLOCK_K,), dtype=tl.float32)
    mxhat = m1
    for k0 in range(first, end, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        row = k[:, None, None]
        dyx = tl.zeros((BLOCK_K, LANES), dtype=tl.float32)
        dys = dyx
        for s0 in range(begin, stop, LANES * EACH):
            mask = (row < end) & (s0 + i < stop)
            at_s = row.to(tl.int64) * S + s0 + i
            dy = tl.load(dy_ptr + at_s, mask=mask, other=0.0, eviction_policy="evict_last").to(
                tl.float32
            )
            x = tl.load(x_ptr + at_s, mask=mask, other=0.0, eviction_policy="evict_last").to(
                tl.float32
            )
            dys += tl.sum(dy, axis=OF_LANE)
            dyx += tl.sum(dy * (x - mean), axis=OF_LANE)
        dyxhat, dy1 = tl.sum(dyx, axis=1) * rstd, tl.sum(dys, axis=1)
        if dw_ptr is not None:
            tl.store(dw_ptr + at + k, dyxhat, mask=k < end)
        if db_ptr is not None:
            tl.store(db_ptr + at + k, dy1, mask=k < end)
        w = tl.load(w_ptr + k, mask=k < end, other=0.0).to(tl.float32)
        m1 += w * dy1
        mxhat += w * dyxhat
    return tl.sum(m1), tl.sum(mxhat)


@kernel
def _bwd_wide(
    dy_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    part_ptr,
    queue_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    stride_dy,
    stride_x,
    groups,
    G,
    K,
    S,
    E,
    strips,
    across,
    STRIP_K,
    STRIP_S,
    LAG,
    STRIPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: the sums over a strip of a group, STRIP_S elements of STRIP_K channels, or dx of
    such a strip.

    Nothing goes beyond S, since S + STRIP_S may not fit 32 bits.
    """
    group, strip, first = _next(queue_ptr, strips, LAG)
    if (group >= 0) & (group < groups):
        n, g = (group // G).to(tl.int64), (group % G).to(tl.int64)
        dy_group, x_group = dy_ptr + n * stride_dy + g * E, x_ptr + n * stride_x + g * E
        mean, rstd = tl.load(mean_ptr + group), tl.load(rstd_ptr + group)
        k0, s0 = strip // across * STRIP_K, strip % across * STRIP_S
        k1, s1 = tl.minimum(k0 + STRIP_K, K), s0 + tl.minimum(STRIP_S, S - s0)
        if first:
            m1, mxhat = _sums(
                dy_group,
                x_group,
                w_ptr + g * K,
                dw_ptr,
                db_ptr,
                ((n * across + strip % across) * G + g) * K,
                mean,
                rstd,
                S,
                k0,
                k1,
                s0,
                s1,
                BLOCK_K,
                LANES,
                EACH,
                ALIGNED,
            )
            if dx_ptr is not None:
                _publish(queue_ptr, part_ptr, group, strip, strips, m1, mxhat)
        elif dx_ptr is not None:
            m1s, mxhats, _, _ = _published(queue_ptr, part_ptr, group, strips, STRIPS)
            even, along = rstd * tl.sum(m1s) / E, rstd * rstd * tl.sum(mxhats) / E
            dx_group = dx_ptr + (n * G + g) * E
            for first_k in range(k0, k1, BLOCK_K):
                k = first_k + tl.arange(0, BLOCK_K)[:, None]
                w = tl.load(w_ptr + g * K + k, mask=k < k1, other=0.0).to(tl.float32)
                for first_s in range(s0, s1, LANES * EACH):
                    s = first_s + tl.arange(0, LANES * EACH)[None, :]
                    i, mask = k.to(tl.int64) * S + s, (k < k1) & (s < s1)
                    dy = tl.load(
                        dy_group + i, mask=mask, other=0.0, eviction_policy="evict_first"
                    ).to(tl.float32)
                    x = tl.load(
                        x_group + i, mask=mask, other=0.0, eviction_policy="evict_first"
                    ).to(tl.float32)
                    dx = (dy * (rstd * w) - even - (x - mean) * along).to(dx_ptr.dtype.element_ty)
                    tl.store(dx_group + i, dx, mask=mask, eviction_policy="evict_first")


def _launch(K, S, most):
    """(channels, elements of each, warps) of a program that holds a group; None if that needs more
    than ``most`` warps.

    A thread's registers hold 32 elements. If rows are not aligned they hold 16, since each element
    needs an address."""
    channels, elements, each = next_power_of_2(K), next_power_of_2(S), 32 if S % 16 == 0 else 16
    block = channels * elements
    if block > 32 * each * most:
        return None
    return channels, elements, 16 if block > 256 * each else min(max(block // 512, 1), 8)


def _launch_wide(backward, aligned=True):
    """For a group that is read twice: (loads of a thread at once, of each tensor; warps; bytes of a
    strip, of each tensor; bytes of the groups between a strip's sums and its end).

    bf16, in µs (H200, 2026-11-24): 16x512x64x64 forward 50.4, with 8 MB between 53.5; in two
    launches, the second of which reads all from memory, 47.6. 8x320x96x96 40.9, 43.8; 45.5.
    Backward 72.5, with 4 loads 79.1, with 8 warps and 2 loads 78.9, in two launches 88.1; 58.1,
    61.9, 70.0; 72.8. Where rows are not aligned, 8 loads spill."""
    return (8 if aligned else 4, 4, 16384, 16 << 20) if backward else (4, 8, 32768, 16 << 20)


def _tile(K, S, block):
    """(channels, elements of each) of a block of at most so many elements. A block takes time for
    itself, too."""
    least = min(1024, next_power_of_2(S), block)
    sizes = [size for size in (block, block // 2, block // 4) if size >= least]
    tiles = [
        (size // e, e)
        for size in sizes
        for e in (size >> n for n in range(size.bit_length()))
        if e >= least
    ]
    return min(tiles, key=lambda t: cdiv(K, t[0]) * cdiv(S, t[1]) * (2 * t[0] * t[1] + block))


def _queue(x, groups, strips, size, ahead):
    """-> where strips' sums are handed over, the queue, LAG, how many programs. A group has
    ``size`` bytes."""
    lag = min(groups, cdiv(ahead, size))
    part = x.new_empty((groups, strips, 2), dtype=torch.float32)
    return part, x.new_zeros(1 + groups, dtype=torch.int32), lag, 2 * strips * (groups + lag)


def _outputs(x, w, b, groups, eps):
    moments = x.shape[0], groups
    return (
        x.new_empty(x.shape),
        x.new_empty(moments, dtype=torch.float32),
        x.new_empty(moments, dtype=torch.float32),
    )


def _gradients(dy, x, w, b, mean, rstd, need_dx, need_dw, need_db):
    return (
        x.new_empty(x.shape if need_dx else 0), w.new_empty(w.shape if need_dw else 0),
        b.new_empty(b.shape if need_db else 0),
    )  # fmt: skip


@custom_op("group_norm", _outputs)
def group_norm_fwd(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (N, C·S) with unit stride in C·S, w and b (C,) -> y (N, C·S) in x's dtype, mean and rstd
    (N, groups) fp32."""
    y, mean, rstd = _outputs(x, w, b, groups, eps)
    if x.numel() == 0:
        return y, mean, rstd
    N, E = x.shape[0], x.shape[1] // groups
    K = w.numel() // groups
    S = E // K
    whole = _launch(K, S, 16)
    if whole:
        channels, elements, warps = whole
        _fwd[(N * groups,)](
            x,
            w,
            b,
            y,
            mean,
            rstd,
            x.stride(0),
            groups,
            K,
            S,
            eps,
            BLOCK_K=channels,
            BLOCK_S=elements,
            num_warps=devices.warps(warps, x),
        )
        return y, mean, rstd
    loads, warps, size, ahead = _launch_wide(False)
    each, lanes = 16 // x.element_size(), 32 * warps
    channels, elements = _tile(K, S, loads * lanes * each)
    strips, blocks = (
        min(cdiv(E * x.element_size(), size), MOST),
        cdiv(K, channels) * cdiv(S, elements),
    )
    strips = cdiv(blocks, cdiv(blocks, strips))  # equal numbers of blocks, or nearly
    strip = 16 * cdiv(E, 16 * strips)
    strips = cdiv(E, strip)
    part, queue, lag, programs = _queue(x, N * groups, strips, E * x.element_size(), ahead)
    _fwd_wide[(programs,)](
        x,
        w,
        b,
        y,
        mean,
        rstd,
        part,
        queue,
        x.stride(0),
        N * groups,
        groups,
        K,
        S,
        E,
        strips,
        strip,
        lag,
        eps,
        LANES=lanes,
        EACH=each,
        ALIGNED=E % 16 == x.stride(0) % 16 == 0,
        STRIPS=next_power_of_2(strips),
        BLOCK_K=channels,
        BLOCK_S=elements,
        num_warps=devices.warps(warps, x),
    )
    return y, mean, rstd


@custom_op("group_norm_backward", _gradients)
def group_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dx (N, C·S), dw and db (C,). What is not needed is an empty tensor."""
    dx, dw, db = _gradients(dy, x, w, b, mean, rstd, need_dx, need_dw, need_db)
    if x.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    (N, G), C, m = mean.shape, w.numel(), devices.multiprocessors(x)
    K, E = C // G, x.shape[1] // G
    S = E // K

    def partials(rows):
        sums = x.new_empty((2, rows, C), dtype=torch.float32) if need_dw or need_db else None
        return sums[0] if need_dw else None, sums[1] if need_db else None

    whole = _launch(K, S, 8)
    if whole:
        channels, elements, warps = whole
        rows = min(N, cdiv(m * max(16 // warps, 1), G))
        dws, dbs = partials(rows)
        _bwd[(rows * G,)](
            dy,
            x,
            w,
            mean,
            rstd,
            dx if need_dx else None,
            dws,
            dbs,
            dy.stride(0),
            x.stride(0),
            N,
            G,
            K,
            S,
            BLOCK_K=channels,
            BLOCK_S=elements,
            STAGES=devices.stages(2 * channels * elements * x.element_size(), x),
            num_warps=devices.warps(warps, x),
        )
    else:
        aligned = S % 16 == x.stride(0) % 16 == dy.stride(0) % 16 == 0
        loads, warps, size, ahead = _launch_wide(True, aligned)
        each = 16 // x.element_size()
        channels, elements = _tile(K, S, loads * 32 * warps * each)
        if elements < each:  # a lane reads beyond them, and masks it
            channels, elements = max(channels * elements // each, 1), each
        strips = min(cdiv(E * x.element_size(), size), MOST)
        strip_s = elements * cdiv(cdiv(S, elements), strips)
        across = cdiv(S, strip_s)
        strip_k = channels * cdiv(cdiv(K, channels), cdiv(strips, across))
        strips = cdiv(K, strip_k) * across
        dws, dbs = partials(N * across)
        part, queue, lag, programs = _queue(x, N * G, strips, 2 * E * x.element_size(), ahead)
        _bwd_wide[(programs,)](
            dy,
            x,
            w,
            mean,
            rstd,
            part,
            queue,
            dx if need_dx else None,
            dws,
            dbs,
            dy.stride(0),
            x.stride(0),
            N * G,
            G,
            K,
            S,
            E,
            strips,
            across,
            strip_k,
            strip_s,
            lag,
            STRIPS=next_power_of_2(strips),
            BLOCK_K=channels,
            LANES=elements // each,
            EACH=each,
            ALIGNED=aligned,
            num_warps=devices.warps(warps, x),
        )
    sum_both(dws, dbs, dw, db)
    return dx, dw, db
