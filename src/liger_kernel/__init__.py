"""Triton kernels that make training of large language models faster and much smaller in memory."""

from importlib import import_module
from typing import TYPE_CHECKING

from liger_kernel import _public
from liger_kernel._version import __version__

__all__ = ["__version__"]

_public.install()


if not TYPE_CHECKING:  # or any name would do

    def __getattr__(name):
        if name not in ("chunked_loss", "ops", "transformers"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"{__name__}.{name}")
