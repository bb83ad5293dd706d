"""Outputs and gradients of keys on Hopper: when its own kernels (`hopper_kernels`) are taken."""

from __future__ import annotations

import torch

from liger_kernel.ops.head import hopper

HEAD_DIM = 128  # entries of a key and of a value
# chunks times key heads, each of which is a program: half of those that were measured. With fewer
# the host, which makes up to eight descriptors, may be what takes the time. Of packed sequences,
# whose chunks the host does not know, their most are counted
MIN_PROGRAMS = 1024


@hopper.gluon_kernels
def kernels():
    from liger_kernel.ops.recurrent import hopper_kernels

    return hopper_kernels


def _is_readable_by_tma(x):
    """Return True if all tokens of x (B, T, heads, entries) are rows of one matrix, which begin at
    multiples of 16 bytes."""
    B, T, heads, entries = x.shape
    return (
        x.stride(3) == 1
        and (heads == 1 or x.stride(2) == entries)
        and x.stride(1) >= heads * entries
        and x.stride(1) % 8 == 0
        and (B == 1 or x.stride(0) == T * x.stride(1))
        and x.data_ptr() % 16 == 0
    )


def applies(problem, q, k) -> bool:
    """Return True if the functions of `hopper_kernels` take this problem.

    What their kernels read besides q and k, and what they write, `outputs` and `states` have
    allocated: contiguous, from multiples of 16 bytes on.
    """
    p = problem
    return (
        p.arch == "sm_90"
        and p.dtype == torch.bfloat16  # of q and k as well
        and p.K == p.V == HEAD_DIM
        and p.chunks * p.H >= MIN_PROGRAMS
        and _is_readable_by_tma(q)
        and _is_readable_by_tma(k)
        and kernels() is not None
    )
