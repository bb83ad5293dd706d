"""The second step of a weight gradient: add up the partial sums of the programs."""

import torch

from liger_kernel.core.kernel import LaunchCache, kernel, prepared
from liger_kernel.core.tile import cdiv, next_power_of_2, tl, triton


@triton.jit
def _sum(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)[:, None]
        total += tl.load(x_ptr + m.to(tl.int64) * N + n, mask=(m < M) & (n < N), other=0.0)
    y = tl.sum(total, axis=0, keep_dims=True)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@kernel
def _sum_rows(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    _sum(x_ptr, y_ptr, M, N, BLOCK_M, BLOCK_N)


@kernel
def _sum_both(dws_ptr, dbs_ptr, dw_ptr, db_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    if tl.program_id(1) == 0:
        _sum(dws_ptr, dw_ptr, M, N, BLOCK_M, BLOCK_N)
    else:
        _sum(dbs_ptr, db_ptr, M, N, BLOCK_M, BLOCK_N)


def partial(out, programs):
    """Where each program writes a row of partial sums, for `sum_rows`: ``out`` itself for one
    program, or for None."""
    return (
        out
        if out is None or programs == 1
        else out.new_empty((programs, out.numel()), dtype=torch.float32)
    )


def sum_rows(partial, out):
    """``out[n] = Σ_m partial[m, n]``: (M, N) fp32, contiguous. The sum is in fp32 and rounded once,
    to out's dtype."""
    if partial is out:
        return
    sizes = tuple(partial.shape)
    (_sums.get(sizes) or _sums.add(sizes, _prepared(*sizes)))(partial, out)


_sums = LaunchCache()


def _prepared(M, N):
    columns, launch = _launch(M, N)
    return prepared(_sum_rows, (cdiv(N, columns),), M, N, BLOCK_N=columns, **launch)


def _launch(M, N):
    """Columns of a program, and the rest. Few columns are read at once: a loop waits for memory in
    every iteration.

    RMSNorm's backward of 65536x128 takes 23.5 µs so, 24.7 with the loop (H200, 2026-11-24).
    """
    if N <= 1024 and M <= 512:
        return 8, dict(BLOCK_M=next_power_of_2(M), num_warps=8 if M > 256 else 4)
    return 32, dict(BLOCK_M=64, num_warps=4)


def sum_both(dws, dbs, dw, db):
    """`sum_rows` of the partial sums of dw and of db, in one launch. None has none."""
    if dws is None or dbs is None:
        if dws is not None:
            sum_rows(dws, dw)
        if dbs is not None:
            sum_rows(dbs, db)
        return
    M, N = dws.shape
    columns, launch = _launch(M, N)
    _sum_both[(cdiv(N, columns), 2)](dws, dbs, dw, db, M, N, BLOCK_N=columns, **launch)
