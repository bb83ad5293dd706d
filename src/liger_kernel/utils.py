"""Helpers that training frameworks import: the installed packages and the machine."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch
from torch.torch_version import TorchVersion

from liger_kernel.core import devices

COMM_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}


def is_peft_available() -> bool:
    """Return True if PEFT is installed. It isn't imported."""
    return importlib.util.find_spec("peft") is not None


PEFT_AVAILABLE = is_peft_available()


def infer_device() -> str:
    """Return the type of torch's accelerator here: "cuda" (ROCm's, too), "xpu", "npu", or "cpu"."""
    for device_type in COMM_BACKENDS:
        module = getattr(torch, device_type, None)
        if module is not None and module.is_available():
            return device_type
    return "cpu"


def infer_comm_backend() -> str:
    """Return torch.distributed's backend for `infer_device`: "nccl", "xccl", "hccl" or "gloo"."""
    return COMM_BACKENDS.get(infer_device(), "gloo")


@functools.cache
def infer_device_arch(device_id: int = 0) -> str:
    """Return the accelerator's architecture, such as "sm_90", "gfx942" or "xpu"; or "cpu"."""
    device_type = infer_device()
    if device_type in ("cpu", "npu"):
        return device_type
    return devices.arch(torch.empty(0, device=torch.device(device_type, device_id)))


def is_npu_available() -> bool:
    """Return True if `infer_device` is Ascend's, which torch has once torch_npu is imported."""
    return infer_device() == "npu"


def get_total_gpu_memory() -> int:
    """Return the accelerator's memory in GB (2³⁰ bytes), rounded down."""
    device_type = infer_device()
    if device_type == "cpu":
        raise RuntimeError("get_total_gpu_memory: torch has no accelerator here")
    return getattr(torch, device_type).get_device_properties(0).total_memory // 2**30


def transformers_version_dispatch(
    required_version: str,
    before_fn: Callable,
    after_fn: Callable,
    before_args: tuple = (),
    after_args: tuple = (),
    before_kwargs: dict | None = None,
    after_kwargs: dict | None = None,
):
    """Call ``before_fn`` for a transformers older than ``required_version``, else ``after_fn``.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        is_older = TorchVersion(importlib.metadata.version("transformers")) < required_version
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError("transformers_version_dispatch: transformers is not installed") from error
    if is_older:
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))
