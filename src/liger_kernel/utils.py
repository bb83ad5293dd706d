"""What is installed, and on what machine: helpers that training frameworks import."""

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
    """Whether PEFT is installed. It isn't imported."""
    return importlib.util.find_spec("peft") is not None


PEFT_AVAILABLE = is_peft_available()


def infer_device() -> str:
    """The kind of accelerator that torch has here: "cuda" (ROCm's, too), "xpu", "npu", or "cpu"
    without one."""
    for kind in COMM_BACKENDS:
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    return "cpu"


def infer_comm_backend() -> str:
    """The backend of torch.distributed for `infer_device`: "nccl", "xccl", "hccl", or "gloo"."""
    return COMM_BACKENDS.get(infer_device(), "gloo")


@functools.cache
def infer_device_arch(device_id: int = 0) -> str:
    """The architecture of that accelerator, as its maker names it, such as "sm_90", "gfx942" or
    "xpu"; else "cpu"."""
    kind = infer_device()
    return (
        kind
        if kind in ("cpu", "npu")
        else devices.arch(torch.empty(0, device=torch.device(kind, device_id)))
    )


def is_npu_available() -> bool:
    """Whether `infer_device` is Ascend's, which torch has once torch_npu is imported."""
    return infer_device() == "npu"


def get_total_gpu_memory() -> int:
    """The accelerator's memory in GB (2³⁰ bytes), rounded down."""
    kind = infer_device()
    if kind == "cpu":
        raise RuntimeError("get_total_gpu_memory: torch has no accelerator here")
    return getattr(torch, kind).get_device_properties(0).total_memory // 2**30


def transformers_version_dispatch(
    required_version: str,
    before_fn: Callable,
    after_fn: Callable,
    before_args: tuple = (),
    after_args: tuple = (),
    before_kwargs: dict | None = None,
    after_kwargs: dict | None = None,
):
    """Call ``before_fn`` if the installed transformers is older than ``required_version``, else
    ``after_fn``.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        older = TorchVersion(importlib.metadata.version("transformers")) < required_version
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError("transformers_version_dispatch: transformers is not installed") from error
    if older:
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))
