"""The installed versions, for a bug report; ``liger-kernel doctor`` says more."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from liger_kernel._version import __version__


def print_env_report() -> None:
    """Print the system, and the versions of Python, of this package and of its dependencies."""
    xpu = getattr(torch, "xpu", None)
    has_xpu = xpu is not None and xpu.is_available()
    versions = {
        "Operating system": platform.platform(),
        "Python": platform.python_version(),
        "liger-kernel": __version__,
        "PyTorch": torch.__version__,
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "XPU": getattr(torch.version, "xpu", None) if has_xpu else None,
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "Triton": _version("triton"),
        "transformers": _version("transformers"),
    }
    print("\n".join(f"{name}: {version or 'not found'}" for name, version in versions.items()))


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
