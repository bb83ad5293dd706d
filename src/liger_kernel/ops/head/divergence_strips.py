"""Reading two heads' logits in strips of classes, for `divergence_kernels`.

A program reads a strip of classes of a few tokens. In an iteration each of its lanes reads PER_LANE
classes of one token. Each lane keeps its own maximum and sum of exponentials until the end.
"""

from __future__ import annotations

from liger_kernel.core.tile import INF, cdiv, exp, finite_or_zero, log, online_max, tl, triton
from liger_kernel.ops.head.divergence_terms import exp_or_exp2

STRIP_SIZE = 1024  # classes of a program
# classes of a teacher's row that are read side by side begin at a multiple of it
STRIP_ALIGNMENT = tl.constexpr(64)


@triton.jit
def program_strip(x_ptr, more_ptr, split, W, strip_size):
    """Find this program's classes.

    As `program_block`, but if x is in two parts, the second is cut where strips are aligned.

    Returns:
        The part of x that has the classes, its first class, and where the classes begin and end.
        They may begin before the first class of the second part.
    """
    k = tl.program_id(1)
    begin = k * strip_size
    first = 0
    end = W
    if more_ptr is not None:
        strips_of_first = tl.cdiv(split, strip_size)
        in_second = k >= strips_of_first
        aligned = split // STRIP_ALIGNMENT * STRIP_ALIGNMENT
        begin = tl.where(in_second, aligned + (k - strips_of_first) * strip_size, begin)
        first = tl.where(in_second, split, 0)
        end = tl.where(in_second, W, split)
        x_ptr = tl.where(in_second, more_ptr, x_ptr)
    return x_ptr, first, begin, tl.minimum(begin + strip_size, end)


def num_strips(split, W):
    alignment = STRIP_ALIGNMENT.value
    return cdiv(split, STRIP_SIZE) + cdiv(W - split // alignment * alignment, STRIP_SIZE)


@triton.jit
def lane_block(BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, PER_LANE: tl.constexpr):
    """Return the classes of an iteration, from 0 on (PER_LANE, lanes), and the lanes' tokens.

    Neighbouring lanes have neighbouring tokens. There are two axes, since versions of Triton differ
    in which of three they give to a thread.
    """
    lane = tl.arange(0, BLOCK_V * BLOCK_T)
    i = tl.arange(0, PER_LANE)[:, None] * BLOCK_V + lane[None, :] // BLOCK_T
    return i, tl.program_id(0) * BLOCK_T + lane % BLOCK_T


@triton.jit
def sum_lanes(x, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr):
    """Sum x over the lanes of each token."""
    return tl.sum(tl.reshape(x, (BLOCK_V, BLOCK_T)), axis=0)


@triton.jit
def load_teacher(
    y_ptr,
    stride_v,
    stride_t,
    first,
    begin,
    start,
    end,
    T,
    W,
    fill,
    CONTIGUOUS_Y: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PER_LANE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Load y (PER_LANE, lanes) of the classes from begin + start on.

    Others get ``fill``, or anything if it is None. With FULL, beside CONTIGUOUS_Y, none are.

    If the classes of a token are contiguous (CONTIGUOUS_Y), a warp reads along these, and what is
    beyond ``end`` is loaded all the same: W may be known to be a multiple of 16, and then a load is
    16 bytes wide.
    """
    y = y_ptr + (begin.to(tl.int64) + start) * stride_v
    y += tl.program_id(0).to(tl.int64) * BLOCK_T * stride_t
    if CONTIGUOUS_Y:
        i = tl.arange(0, PER_LANE * BLOCK_V)[:, None]
        j = tl.arange(0, BLOCK_T)[None, :]
        c = begin + start + i
        t = tl.program_id(0) * BLOCK_T + j
        y = tl.load(y + (i * stride_v + j * stride_t), mask=None if FULL else (c < W) & (t < T))
        y = tl.reshape(y, (PER_LANE, BLOCK_V * BLOCK_T)).to(tl.float32)
        if fill is not None and not FULL:
            i, t = lane_block(BLOCK_T, BLOCK_V, PER_LANE)
            c = begin + start + i
            y = tl.where((c >= first) & (c < end) & (t[None, :] < T), y, fill)
    else:
        i, t = lane_block(BLOCK_T, BLOCK_V, PER_LANE)
        c = begin + start + i
        j = tl.arange(0, BLOCK_V * BLOCK_T) % BLOCK_T
        inside = (c >= first) & (c < end) & (t[None, :] < T)
        y = tl.load(y + (i * stride_v + j[None, :] * stride_t), mask=inside, other=fill)
        y = y.to(tl.float32)
    return y


@triton.jit
def update_log_sum(top, total, z, scale, EXACT: tl.constexpr):
    """Add z (PER_LANE, lanes) to each lane's maximum and Σ exp_or_exp2((z - max)·scale)."""
    new_top, shift = online_max(top, tl.max(z, axis=0))
    new_total = tl.sum(exp_or_exp2((z - shift[None, :]) * scale, EXACT), axis=0)
    return new_top, total * exp_or_exp2((top - shift) * scale, EXACT) + new_total


@triton.jit
def store_log_sum(
    partial,
    slot,
    top,
    total,
    scale,
    mask,
    EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the maximum and the sum of each token, combined from those of its lanes."""
    top = tl.reshape(top, (BLOCK_V, BLOCK_T))
    total = tl.reshape(total, (BLOCK_V, BLOCK_T))
    highest = tl.max(top, axis=0)
    total *= exp_or_exp2((top - finite_or_zero(highest)[None, :]) * scale, EXACT)
    tl.store(partial, highest, mask=mask)
    tl.store(partial + slot, tl.sum(total, axis=0), mask=mask)


@triton.jit
def load_log_sum(partial, slot, scale, mask):
    """Load the maxima and sums of all strips, and return those of all classes."""
    tops = tl.load(partial, mask=mask, other=-INF)
    top = tl.max(tops, axis=0)
    factor = exp((tops - finite_or_zero(top)[None, :]) * scale)
    return top, tl.sum(factor * tl.load(partial + slot, mask=mask, other=0.0), axis=0)


@triton.jit
def store_pair(stats, T, top, total, valid, in_range):
    tl.store(stats, tl.where(valid, top, 0.0), mask=in_range)
    tl.store(stats + T, tl.where(valid, log(total), 0.0), mask=in_range)


@triton.jit
def load_pair(stats, T, in_range):
    return tl.load(stats, mask=in_range, other=0.0), tl.load(stats + T, mask=in_range, other=0.0)
