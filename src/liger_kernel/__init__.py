"""Triton kernels that make training of large language models faster and much smaller in memory."""

from importlib import import_module
from typing import TYPE_CHECKING

from liger_kernel import _public
from liger_kernel._version import __version__
from liger_kernel.implementations import (
    available_backends,
    available_impls,
    get_backend,
    get_impl,
    set_backend,
    set_impl,
)

__all__ = [
    "__version__",
    "available_backends",
    "available_impls",
    "get_backend",
    "get_impl",
    "set_backend",
    "set_impl",
]

_public.install()


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name):
        if name not in ("chunked_loss", "functional", "ops", "transformers"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"{__name__}.{name}")
