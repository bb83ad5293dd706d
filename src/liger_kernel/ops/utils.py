"""Helpers for Triton kernels that training frameworks define and launch themselves."""

from __future__ import annotations

import contextlib
import functools
import importlib

import torch
from torch.torch_version import TorchVersion

from liger_kernel.core import devices
from liger_kernel.core.tile import next_power_of_2, tl

MAX_BLOCK = 65536
torch_to_triton_dtype = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def is_hip() -> bool:
    """Return True if this torch is built for AMD."""
    return devices.AMD


def device_context(device: torch.device | str | int | torch.Tensor):
    """Return a context in which this device, or a tensor's, is the current one.

    Triton launches on the current device.
    """
    if not isinstance(device, torch.Tensor):
        device = torch.device(device)
        if device.type not in ("cuda", "xpu"):
            return contextlib.nullcontext()
        return getattr(torch, device.type).device(device)
    return devices.device_guard(device)


def calculate_settings(n: int) -> tuple[int, int]:
    """Return (BLOCK_SIZE, num_warps) of a program that holds a row of ``n`` elements.

    BLOCK_SIZE is the next power of two.

    Raises:
        RuntimeError: more than 65,536 elements.
    """
    block = next_power_of_2(n)
    if block > MAX_BLOCK:
        raise RuntimeError(
            f"calculate_settings: a row of {n} elements is more than one block holds, {MAX_BLOCK}"
        )
    return block, min(max(block // 512, 4), 16 if is_hip() else 32)


def compare_version(package: str, operator, target: str) -> bool:
    """Return ``operator(version of package, target)``, by the order of versions.

    It is False if the package can't be imported.
    """
    try:
        version = importlib.import_module(package).__version__
    except ImportError:
        return False
    return operator(TorchVersion(version), target)


def ensure_contiguous(fn):
    """Make the tensors among the arguments of ``fn`` contiguous.

    ``fn`` is the ``forward`` or ``backward`` of an autograd Function.
    """

    def contiguous(x):
        return x.contiguous() if isinstance(x, torch.Tensor) else x

    @functools.wraps(fn)
    def call(ctx, *args, **kwargs):
        args = [contiguous(x) for x in args]
        kwargs = {name: contiguous(x) for name, x in kwargs.items()}
        return fn(ctx, *args, **kwargs)

    return call
