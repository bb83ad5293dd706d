"""Triton's cache of compiled kernels, for frameworks that choose its manager."""

from liger_kernel.triton.monkey_patch import apply_liger_triton_cache_manager

__all__ = ["apply_liger_triton_cache_manager"]
