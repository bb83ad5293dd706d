"""What is installed here, for a bug report; ``liger-kernel doctor`` says more."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from liger_kernel._version import __version__


def print_env_report() -> None:
    """Print the system, and the versions of Python, of this package and of what it stands on."""
    xpu = getattr(torch, "xpu", None)
    found = {
        "Operating system": platform.platform(),
        "Python": platform.python_version(),
        "liger-kernel": __version__,
        "PyTorch": torch.__version__,
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "XPU": getattr(torch.version, "xpu", None)
        if xpu is not None and xpu.is_available()
        else None,
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "Triton": _version("triton"),
        "transformers": _version("transformers"),
    }
    print("\n".join(f"{name}: {version or 'not found'}" for name, version in found.items()))


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
