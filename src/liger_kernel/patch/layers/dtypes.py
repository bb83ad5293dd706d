"""The dtypes that the kernels of layers take, and how inputs of a trial get into each of them."""

from __future__ import annotations

import torch

KERNEL_DTYPES = torch.float32, torch.bfloat16, torch.float16
LOW_PRECISION_DTYPES = torch.bfloat16, torch.float16
MAX_TRIED_IN_FLOAT16 = 6e4  # float16 ends at 65,504


def rows_within_float16(x: torch.Tensor) -> torch.Tensor:
    """Return a mask of the rows whose entries float16 can hold."""
    return (x.abs() < MAX_TRIED_IN_FLOAT16).all(-1)
