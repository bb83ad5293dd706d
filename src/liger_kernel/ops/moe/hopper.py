"""Outer products of an expert's rows on Hopper: when its own kernel (`hopper_kernels`) is taken."""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import tma_descriptor
from liger_kernel.ops.head import hopper

# of an expert on average: tiles are large, and those of short sums wait for their stores. Backward
# of Qwen3-30B-A3B's layer at 4,096 tokens, which are 256 rows, takes 1.62 ms, by Triton 1.90 (H200,
# 2026-11-28). Fewer were not tried. Rows of experts that other ranks own are counted, too
MIN_ROWS = 256


@hopper.gluon_kernels
def kernels():
    from liger_kernel.ops.moe import hopper_kernels

    return hopper_kernels


def applies(a, x, c) -> bool:
    """Return True if `hopper_kernels.outer_products` takes a (S, M), x (T, N) and c (E, M, N).

    Triton knows of a number whether 16 divides it, and copies 16 bytes at a time where that is so
    of a row's length and stride."""
    S, M = a.shape
    E, _, N = c.shape
    return (
        devices.arch(a) == "sm_90"
        and a.dtype == torch.bfloat16
        and S >= MIN_ROWS * E
        and all(number % 16 == 0 for number in (M, N, a.stride(0), x.stride(0)))
        and x.stride(1) == 1
        and x.data_ptr() % 16 == 0
        and tma_descriptor(a, (64, 64)) is not None
        and (tma_descriptor(c, (1, 64, 128)) or tma_descriptor(c.mT, (1, 128, 64))) is not None
        and kernels() is not None
    )
