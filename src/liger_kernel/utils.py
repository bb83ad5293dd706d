"""What is installed, and on what machine: helpers that training frameworks import."""

from __future__ import annotations

import importlib.util

import torch

COMM_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}


def is_peft_available() -> bool:
    """Whether PEFT is installed. It isn't imported."""
    return importlib.util.find_spec("peft") is not None


PEFT_AVAILABLE = is_peft_available()


def infer_device() -> str:
    """The kind of accelerator that torch has here: "cuda" (ROCm's, too), "xpu", "npu", or "cpu" without one."""
    for kind in COMM_BACKENDS:
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    return "cpu"


def infer_comm_backend() -> str:
    """The backend of torch.distributed for `infer_device`: "nccl", "xccl", "hccl", or "gloo"."""
    return COMM_BACKENDS.get(infer_device(), "gloo")


def is_npu_available() -> bool:
    """Whether `infer_device` is Ascend's, which torch has once torch_npu is imported."""
    return infer_device() == "npu"


def get_total_gpu_memory() -> int:
    """The accelerator's memory in GB (2³⁰ bytes), rounded down."""
    kind = infer_device()
    if kind == "cpu":
        raise RuntimeError("get_total_gpu_memory: torch has no accelerator here")
    return getattr(torch, kind).get_device_properties(0).total_memory // 2**30
