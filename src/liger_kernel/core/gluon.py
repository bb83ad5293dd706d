"""Gluon's functions by one name each: Triton 3.9 has other names than 3.6.

Gluon is Triton's language for one architecture. Only modules of such kernels import this one: a
build of Triton may lack Gluon, and the import fails there.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
# gives a tile in shared memory another shape and dtype
_tile = gl.shared_memory_descriptor
reinterpret = getattr(_tile, "reinterpret", None) or _tile._reinterpret


def tma_descriptor(x, block_shape):
    """Return a kernel's argument for tiles of a bf16 tensor that TMA can read.

    `core.kernel.tma_descriptor` makes that of a kernel in Triton, and asks whether TMA can.
    """
    layout = gl.NVMMASharedLayout.get_default_for(block_shape, gl.bfloat16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block_shape, layout)
