"""The launches of GroupNorm's kernels (`group_norm_kernels`), as custom ops.

A tensor has N samples of G groups. A group has K channels of S elements, E = K·S in all."""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.op import custom_op
from liger_kernel.core.reduce import sum_rows_pair
from liger_kernel.core.tile import cdiv, next_power_of_2
from liger_kernel.ops.norm.group_norm_kernels import (
    group_norm_bwd_kernel,
    group_norm_bwd_strips_kernel,
    group_norm_fwd_kernel,
    group_norm_fwd_strips_kernel,
)

MAX_STRIPS = 256  # of a group


def _choose_launch(K, S, max_warps):
    """Return (BLOCK_K, BLOCK_S, num_warps) of a program that holds a whole group.

    None if that needs more than ``max_warps`` warps. A thread's registers hold 32 elements. If rows
    are not aligned they hold 16, since each element needs an address."""
    block_k = next_power_of_2(K)
    block_s = next_power_of_2(S)
    thread_elements = 32 if S % 16 == 0 else 16
    block = block_k * block_s
    if block > 32 * thread_elements * max_warps:
        return None
    num_warps = 16 if block > 256 * thread_elements else min(max(block // 512, 1), 8)
    return block_k, block_s, num_warps


def _choose_strip_launch(backward, aligned=True):
    """Return (loads, num_warps, strip_bytes, lag_bytes) for groups that are read twice.

    loads: of a thread at once, of each tensor; strip_bytes: of a strip, of each tensor; lag_bytes:
    of the groups between the sums of a strip and its output.

    bf16, in µs (H200, 2026-11-24): 16x512x64x64 forward 50.4, with 8 MB between 53.5; in two
    launches, the second of which reads all from memory, 47.6. 8x320x96x96 40.9, 43.8; 45.5.
    Backward 72.5, with 4 loads 79.1, with 8 warps and 2 loads 78.9, in two launches 88.1; 58.1,
    61.9, 70.0; 72.8. Where rows are not aligned, 8 loads spill."""
    if not backward:
        return 4, 8, 32768, 16 << 20
    return 8 if aligned else 4, 4, 16384, 16 << 20


def _choose_block(K, S, max_elements):
    """Return (BLOCK_K, BLOCK_S) of a block of at most so many elements.

    It minimises the elements of all blocks, where a block costs ``max_elements / 2`` more than it
    has: it takes time for itself, too."""
    min_elements = min(1024, next_power_of_2(S), max_elements)
    blocks = []
    for size in (max_elements, max_elements // 2, max_elements // 4):
        if size < min_elements:
            continue
        for shift in range(size.bit_length()):
            block_s = size >> shift
            if block_s >= min_elements:
                blocks.append((size // block_s, block_s))

    def cost(block):
        block_k, block_s = block
        return cdiv(K, block_k) * cdiv(S, block_s) * (2 * block_k * block_s + max_elements)

    return min(blocks, key=cost)


def _make_queue(x, num_groups, num_strips, group_bytes, lag_bytes):
    """Return (memory for the strips' sums, queue of tasks, LAG in groups, number of programs)."""
    lag = min(num_groups, cdiv(lag_bytes, group_bytes))
    sums = x.new_empty((num_groups, num_strips, 2), dtype=torch.float32)
    queue = x.new_zeros(1 + num_groups, dtype=torch.int32)
    return sums, queue, lag, 2 * num_strips * (num_groups + lag)


def _empty_outputs(x, w, b, groups, eps):
    moments = x.shape[0], groups
    return (
        x.new_empty(x.shape),
        x.new_empty(moments, dtype=torch.float32),
        x.new_empty(moments, dtype=torch.float32),
    )


def _empty_gradients(dy, x, w, b, mean, rstd, need_dx, need_dw, need_db):
    return (
        x.new_empty(x.shape if need_dx else 0),
        w.new_empty(w.shape if need_dw else 0),
        b.new_empty(b.shape if need_db else 0),
    )


@custom_op("group_norm", _empty_outputs)
def group_norm_fwd(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise x (N, C·S) with unit stride in C·S; w and b are (C,).

    Returns y (N, C·S) in x's dtype, mean and rstd (N, groups) in fp32."""
    y, mean, rstd = _empty_outputs(x, w, b, groups, eps)
    if x.numel() == 0:
        return y, mean, rstd
    N, E = x.shape[0], x.shape[1] // groups
    K = w.numel() // groups
    S = E // K
    one_block = _choose_launch(K, S, 16)
    if one_block:
        block_k, block_s, num_warps = one_block
        group_norm_fwd_kernel[(N * groups,)](
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
            BLOCK_K=block_k,
            BLOCK_S=block_s,
            num_warps=devices.limit_warps(num_warps, x),
        )
    else:
        _fwd_in_strips(x, w, b, y, mean, rstd, N, groups, K, S, eps)
    return y, mean, rstd


def _fwd_in_strips(x, w, b, y, mean, rstd, N, G, K, S, eps):
    E = K * S
    loads, num_warps, strip_bytes, lag_bytes = _choose_strip_launch(False)
    vec = 16 // x.element_size()
    lanes = 32 * num_warps
    block_k, block_s = _choose_block(K, S, loads * lanes * vec)
    group_bytes = E * x.element_size()
    num_blocks = cdiv(K, block_k) * cdiv(S, block_s)
    num_strips = min(cdiv(group_bytes, strip_bytes), MAX_STRIPS)
    # equal numbers of blocks, or nearly
    num_strips = cdiv(num_blocks, cdiv(num_blocks, num_strips))
    strip = 16 * cdiv(E, 16 * num_strips)
    num_strips = cdiv(E, strip)
    sums, queue, lag, num_programs = _make_queue(x, N * G, num_strips, group_bytes, lag_bytes)
    group_norm_fwd_strips_kernel[(num_programs,)](
        x,
        w,
        b,
        y,
        mean,
        rstd,
        sums,
        queue,
        x.stride(0),
        N * G,
        G,
        K,
        S,
        E,
        num_strips,
        strip,
        lag,
        eps,
        LANES=lanes,
        VEC=vec,
        ALIGNED=E % 16 == x.stride(0) % 16 == 0,
        BLOCK_STRIPS=next_power_of_2(num_strips),
        BLOCK_K=block_k,
        BLOCK_S=block_s,
        num_warps=devices.limit_warps(num_warps, x),
    )


@custom_op("group_norm_backward", _empty_gradients)
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
    """Return dx (N, C·S), dw and db (C,). A gradient that is not needed is an empty tensor."""
    dx, dw, db = _empty_gradients(dy, x, w, b, mean, rstd, need_dx, need_dw, need_db)
    if x.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    N, G = mean.shape
    K = w.numel() // G
    S = x.shape[1] // w.numel()
    dx_or_none = dx if need_dx else None
    one_block = _choose_launch(K, S, 8)
    if one_block:
        block_k, block_s, num_warps = one_block
        programs_per_sm = max(16 // num_warps, 1)
        rows = min(N, cdiv(devices.multiprocessors(x) * programs_per_sm, G))
        partial_dw, partial_db = _partial_sums(x, rows, w.numel(), need_dw, need_db)
        loaded_bytes = 2 * block_k * block_s * x.element_size()
        group_norm_bwd_kernel[(rows * G,)](
            dy,
            x,
            w,
            mean,
            rstd,
            dx_or_none,
            partial_dw,
            partial_db,
            dy.stride(0),
            x.stride(0),
            N,
            G,
            K,
            S,
            BLOCK_K=block_k,
            BLOCK_S=block_s,
            NUM_STAGES=devices.choose_num_stages(loaded_bytes, x),
            num_warps=devices.limit_warps(num_warps, x),
        )
    else:
        partial_dw, partial_db = _bwd_in_strips(
            dy, x, w, mean, rstd, dx_or_none, N, G, K, S, need_dw, need_db
        )
    sum_rows_pair(partial_dw, partial_db, dw, db)
    return dx, dw, db


def _partial_sums(x, rows, C, need_dw, need_db):
    """Return memory for the partial sums (rows, C) of dw and of db; None if not needed."""
    if not (need_dw or need_db):
        return None, None
    sums = x.new_empty((2, rows, C), dtype=torch.float32)
    return sums[0] if need_dw else None, sums[1] if need_db else None


def _bwd_in_strips(dy, x, w, mean, rstd, dx, N, G, K, S, need_dw, need_db):
    """Write dx, and return the partial sums of dw and of db."""
    E = K * S
    aligned = S % 16 == x.stride(0) % 16 == dy.stride(0) % 16 == 0
    loads, num_warps, strip_bytes, lag_bytes = _choose_strip_launch(True, aligned)
    vec = 16 // x.element_size()
    block_k, block_s = _choose_block(K, S, loads * 32 * num_warps * vec)
    if block_s < vec:  # a lane reads beyond the elements of a channel, and masks what it reads
        block_k = max(block_k * block_s // vec, 1)
        block_s = vec
    group_bytes = E * x.element_size()
    num_strips = min(cdiv(group_bytes, strip_bytes), MAX_STRIPS)
    strip_s = block_s * cdiv(cdiv(S, block_s), num_strips)
    strips_s = cdiv(S, strip_s)
    strip_k = block_k * cdiv(cdiv(K, block_k), cdiv(num_strips, strips_s))
    num_strips = cdiv(K, strip_k) * strips_s
    partial_dw, partial_db = _partial_sums(x, N * strips_s, w.numel(), need_dw, need_db)
    sums, queue, lag, num_programs = _make_queue(x, N * G, num_strips, 2 * group_bytes, lag_bytes)
    group_norm_bwd_strips_kernel[(num_programs,)](
        dy,
        x,
        w,
        mean,
        rstd,
        sums,
        queue,
        dx,
        partial_dw,
        partial_db,
        dy.stride(0),
        x.stride(0),
        N * G,
        G,
        K,
        S,
        E,
        num_strips,
        strips_s,
        strip_k,
        strip_s,
        lag,
        BLOCK_STRIPS=next_power_of_2(num_strips),
        BLOCK_K=block_k,
        LANES=block_s // vec,
        VEC=vec,
        ALIGNED=aligned,
        num_warps=devices.limit_warps(num_warps, x),
    )
    return partial_dw, partial_db
