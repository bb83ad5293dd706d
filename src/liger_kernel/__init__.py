"""Triton kernels that make training of large language models faster and much smaller in memory."""

from liger_kernel import _public
from liger_kernel._version import __version__

__all__ = ["__version__"]

_public.install()
