"""The launches of gated and modulated RMSNorm's kernels (`gated_norm_kernels`), as custom ops."""

from __future__ import annotations

import functools

import torch

from liger_kernel.core import devices
from liger_kernel.core.op import custom_op
from liger_kernel.core.reduce import new_partial_sums, sum_rows
from liger_kernel.core.tile import (
    cdiv,
    next_power_of_2,
    num_balanced_programs,
    sigmoid,
    silu_for,
)
from liger_kernel.ops.norm.gated_norm_kernels import (
    gated_norm_bwd_kernel,
    gated_norm_fwd_kernel,
    gated_norm_shared_fwd_kernel,
    mean_dots_kernel,
)


def _gate_function(act, x, g):
    """Return the device function that computes f and f' of an activation, or None."""
    if act == "silu":
        return silu_for(x, g)
    return sigmoid if act == "sigmoid" else None


MAX_BLOCK_N = 8192  # a wider group does not fit into registers and is processed in blocks


@functools.cache
def _choose_fwd_launch(N):
    """Return (BLOCK_M, BLOCK_N, num_warps) of the forward kernel.

    bf16, share of the copy rate (H200, 2026-11-24): gated 1048576x128 1.01, with 2 to 4 warps as
    well; 32768x4096 with 2, 4, 8 warps 0.92, 1.00, 1.01; 8192x8192 with 4, 8, 16 0.86, 0.94, 0.86.
    In TB/s (2026-11-23): modulated 65536x1152 with 2, 4 2.50, 2.31; 32768x3072 with 4, 8 3.07,
    2.90."""
    block_n = min(next_power_of_2(N), MAX_BLOCK_N)
    return max(1, 1024 // block_n), block_n, max(block_n // 1024, 1)


MAX_SHARED_BLOCK_N = 4096  # the factor and b stay in registers
MIN_SHARED_ROWS = 16  # of fewer rows that share a factor, its loads are no matter
MAX_SHARED_FACTORS = 65535  # programs along a grid's second axis


def _choose_shared_launch(N):
    """Return (BLOCK_M, BLOCK_N, num_warps, programs of a multiprocessor) of forward, where rows
    share a factor.

    The multiprocessor has 16 warps, all of them at once, with 32 elements in a thread.
    """
    block_n = next_power_of_2(N)
    block_m = max(1, 2048 // block_n)
    num_warps = block_m * block_n // 1024
    return block_m, block_n, num_warps, 16 // num_warps


@functools.cache
def _choose_bwd_launch(N, max_block_n):
    """Return (BLOCK_M, BLOCK_N, num_warps) of the backward kernel.

    Its sums dw, dg and db stay in registers. A group of more than ``max_block_n`` columns does not
    fit there. It is read twice, once by `mean_dots_kernel`.

    bf16, share of the copy rate with 3 and with 4 stages of loads (H200, 2026-11-24): 1048576x128
    0.86, 0.92; 32768x4096 with 8 warps 0.85, 0.92, with 16 0.86, 0.95; 8192x8192 with 3 0.88, read
    twice 0.55 (0.62, 0.55 with the gate before the norm)."""
    block_n = next_power_of_2(N) if N <= max_block_n else 2048
    return max(1, 4096 // block_n), block_n, 16 if block_n >= 4096 else 8


def _choose_shared_bwd_launch(N, x):
    """Return (BLOCK_M, BLOCK_N, num_warps, programs of a multiprocessor) of the backward kernel,
    where rows share a factor.

    bf16, the launch of `_choose_bwd_launch` and Hopper's (H200, 2026-11-28, Triton 3.6): 65536x1152
    212, 192 µs; 32768x3072 229, 187 µs, though it spills 48 bytes of a thread."""
    block_m, block_n, num_warps = _choose_bwd_launch(N, 4096)
    if block_n >= N and x.element_size() == 2 and devices.arch(x) == "sm_90":
        if block_n == 2048:
            return 1, block_n, 4, 2
        if block_n == 4096:
            return 2, block_n, 16, 1
    return block_m, block_n, num_warps, 1


@functools.lru_cache(1024)
def _split_programs(G, num_blocks, max_programs):
    """Return (SPLIT, number of programs), the fastest split of the rows of each row of g.

    ``num_blocks`` blocks of rows belong to each of G rows of g. If G is 16 and there are 132
    programs, 8 share each. With 9, 14 rows of g would be processed first, and then 2. A row of
    partial sums takes about as long as two blocks."""

    def time(split):
        return cdiv(G, max_programs // split) * (cdiv(num_blocks, split) + 2)

    split = min(range(1, max(1, min(num_blocks, max_programs)) + 1), key=time)
    return split, split * max(1, min(G, max_programs // split))


def _empty_outputs(x, *options):
    """Return y and rstd. The last of the options is groups, the others don't count."""
    *_, groups = options
    return x.new_empty(x.shape), x.new_empty(x.shape[0] * groups, dtype=torch.float32)


def _empty_gradients(dy, x, g, w, b, *options):
    """Return dx, dg, dw and db. The last four options are their needs, the others don't count."""
    needs = zip((x, g, w, b), options[-4:], strict=True)
    return tuple(t.new_empty(t.shape) if need else None for t, need in needs)


@custom_op("gated_norm", _empty_outputs)
def gated_norm_fwd(
    x: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    eps: float,
    offset: float,
    act: str | None,
    gate_first: bool,
    casting: int,
    rounds: bool,
    groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y (M, H) and rstd (M·groups,) in fp32.

    x is (M, H), g and b (M // T, H) with unit stride in H, w (H,) contiguous. act is "silu",
    "sigmoid" or None, for a factor of 1 + g. For gate_first, casting and rounds see the formulas:
    GATE_FIRST, the index in `rms_norm.CASTINGS`, ROUND."""
    y, rstd = _empty_outputs(x, groups)
    M = x.shape[0]
    N = x.shape[1] // groups
    if not M or not N:
        return y, rstd
    G = g.shape[0]
    stride_b = 0 if b is None else b.stride(0)
    arguments = x, g, w, b, y, rstd, x.stride(0), g.stride(0), stride_b
    constants = dict(
        CASTING=casting,
        ROUND=rounds,
        # fused with the sum with b, a product of 16 bits would not be rounded
        enable_fp_fusion=not rounds or b is None,
    )
    shares_factor = act is None and MIN_SHARED_ROWS * G <= M
    if shares_factor and N <= MAX_SHARED_BLOCK_N and G <= MAX_SHARED_FACTORS:
        block_m, block_n, num_warps, programs_per_sm = _choose_shared_launch(N)
        max_programs = max(programs_per_sm * devices.multiprocessors(x) // G, 1)
        num_programs = num_balanced_programs(cdiv(M // G, block_m), max_programs)
        gated_norm_shared_fwd_kernel[(num_programs, G)](
            *arguments,
            M // G,
            N,
            eps,
            offset or None,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            NUM_STAGES=devices.choose_num_stages(block_m * block_n * x.element_size(), x),
            num_warps=devices.limit_warps(num_warps, x),
            **constants,
        )
        return y, rstd
    block_m, block_n, num_warps = _choose_fwd_launch(N)
    gated_norm_fwd_kernel[(cdiv(M, block_m), groups)](
        *arguments,
        M,
        M // G,
        N,
        eps,
        offset or None,
        ACT=_gate_function(act, x, g),
        GATE_FIRST=gate_first,
        ONE_BLOCK=block_n >= N,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=devices.limit_warps(num_warps, x),
        **constants,
    )
    return y, rstd


@custom_op("gated_norm_backward", _empty_gradients)
def gated_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    act: str | None,
    gate_first: bool,
    casting: int,
    rounds: bool,
    groups: int,
    need_dx: bool,
    need_dg: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx, dg, dw and db, contiguous; None for a gradient that is not needed.

    dy is like x, the other arguments are those of `gated_norm_fwd`."""
    grads = _empty_gradients(dy, x, g, w, b, need_dx, need_dg, need_dw, need_db)
    dx, dg, dw, db = grads
    M, H = x.shape
    N = H // groups
    if not N:
        return grads
    shared_gate = g.shape[0] != M
    G, T = (g.shape[0], M // g.shape[0]) if shared_gate else (1, M)
    if shared_gate:
        block_m, block_n, num_warps, programs_per_sm = _choose_shared_bwd_launch(N, x)
    else:
        block_m, block_n, num_warps = _choose_bwd_launch(N, 16384 // x.element_size())
        programs_per_sm = 1
    strides = dy.stride(0), x.stride(0), g.stride(0)
    dot = None
    if block_n < N and (need_dx or gate_first and need_dg):
        dot = torch.empty_like(rstd)
        if M:
            mean_dots_kernel[(M, groups)](
                dy,
                x,
                g,
                w,
                rstd,
                dot,
                *strides,
                T if shared_gate else 1,
                N,
                offset or None,
                ACT=_gate_function(act, x, g),
                GATE_FIRST=gate_first,
                BLOCK_N=4096,
                num_warps=devices.limit_warps(8, x),
            )
    max_programs = max(1, programs_per_sm * devices.multiprocessors(x) // groups)
    split, num_programs = _split_programs(G, cdiv(T, block_m), max_programs)

    element_bytes = 2 * x.element_size() + (0 if shared_gate else g.element_size())
    loaded_bytes = block_m * block_n * element_bytes  # in an iteration
    partial_dg = new_partial_sums(dg, split if shared_gate else 1)
    partial_db = new_partial_sums(db, split if shared_gate else 1)
    partial_dw = new_partial_sums(dw, num_programs)
    gated_norm_bwd_kernel[(num_programs, groups, cdiv(N, block_n))](
        dy,
        x,
        g,
        w,
        rstd,
        dot,
        dx,
        partial_dg,
        partial_dw,
        partial_db,
        *strides,
        G,
        T,
        N,
        split,
        offset or None,
        ACT=_gate_function(act, x, g),
        GATE_FIRST=gate_first,
        SHARED_GATE=shared_gate,
        FACTORED=shared_gate and not gate_first and not rounds,
        CASTING=casting,
        ROUND=rounds,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        NUM_STAGES=devices.choose_num_stages(loaded_bytes, x, 3 if shared_gate else 4),
        num_warps=devices.limit_warps(num_warps, x),
    )
    sum_rows(partial_dg, dg)
    sum_rows(partial_dw, dw)
    sum_rows(partial_db, db)
    return grads
