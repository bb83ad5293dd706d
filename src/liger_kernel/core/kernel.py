"""``@kernel``: ``triton.jit`` for kernels that are launched from Python, on the device of their
tensors and with less overhead. Functions that kernels call stay ``@triton.jit``.

Triton launches on the current device, wherever the tensors are. A model may be spread over several
devices. So each launch makes the device of its first tensor the current one.

Triton binds and specialises all arguments at every launch. That is 12 of the 26 µs of host time
that a launch takes; the launch itself is 14 (host of an H200, 2026-11-20, Triton 3.6). Here a
compiled kernel is looked up by what Triton specialises on: a tensor's dtype and the alignment of
its pointer to 16 bytes; whether an integer is 1, divisible by 16, or needs 64 bits; a constant's
value. The first launch with such a key goes through Triton, and so does every launch while
``triton.knobs.runtime.launch_enter_hook`` is set, as by a profiler. Other launches skip Triton's
``pre_run_hooks``, and its check that the globals of a kernel have not changed.

A launch ``kernel[grid](tensors and numbers, NAME=constant, num_warps=...)`` is that of
``triton.jit`` with these rules: the grid is a tuple; parameters that are ``tl.constexpr`` come
last, and every one is given, by keyword; a boolean must be one of them; one argument at least is a
tensor. The result is not to be used: it is None where the compiled kernel was looked up.

``enable_fp_fusion`` is True unless given, whatever Triton's version and environment say: the
compiler may fuse a product and a sum into one instruction, which rounds once. It does so where it
likes, and elsewhere in a kernel with other options. Kernels whose results must have equal bits in
all their launches are launched with False, and call ``tl.fma`` where they gain by it.

`tma_descriptor` makes a kernel argument through which TMA loads tiles.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.tile import TRITON, TensorDescriptor, triton

# Triton versions for which these were verified: what it specialises on, the arguments of
# `CompiledKernel.run`, and the two forms of `launch_enter_hook`
CHECKED_TRITON_VERSIONS = (("3", "6"), ("3", "7"), ("3", "8"), ("3", "9"))
INT32_MAX = 2**31 - 1


def prepare_launch(kernel_fn, grid, *scalars, **constants):
    """Return ``launch(*tensors)``: the kernel with this grid, these scalars, and these
    constants and launch options (``num_warps`` and the like).

    The kernel's parameters are in the order tensors, scalars, constants. The first tensor must not
    be None; others may be. A kernel that takes a TMA descriptor cannot be prepared. The same shapes
    and strides recur in every layer and step, so callers keep the launch in a `LaunchCache`. Each
    call then checks the tensors' dtypes and pointers only.
    """
    if hasattr(kernel_fn, "prepare"):
        return kernel_fn.prepare(grid, scalars, constants)
    # plain triton.jit, or a Triton that was not checked
    return lambda *tensors: kernel_fn[grid](*tensors, *scalars, **constants)


class LaunchCache(dict):
    """A dict of prepared launches, or of other choices that depend on shapes, such as tuned block
    sizes.

    The caller chooses the key: all that grid, scalars and constants depend on, such as shapes,
    strides, dtypes and device. Emptied before a store when it holds `MAX_ENTRIES`.
    """

    MAX_ENTRIES = 1024
    instances = []  # every cache of the process, for `clear_all`

    def __init__(self):
        super().__init__()
        self.instances.append(self)

    def store(self, key, value):
        """Store a value, and return it."""
        if len(self) >= self.MAX_ENTRIES:
            self.clear()
        self[key] = value
        return value

    @classmethod
    def clear_all(cls):
        """Clear every cache, after a setting has changed that chooses kernels or block sizes.

        Compiled kernels stay."""
        for cache in cls.instances:
            cache.clear()


def _specialisation_keys(args):
    """Return a key for each argument: with equal keys Triton uses the same compiled kernel."""
    keys = []
    for a in args:
        if a.__class__ is int:
            # 1 is a constant to Triton; 0 and negative numbers are rare, and keyed by value
            keys.append(a if a < 2 else (a % 16 == 0, a > INT32_MAX))
        elif a is None or a.__class__ is float:  # a float's value is no matter
            keys.append(a.__class__)
        elif a.__class__ is TensorDescriptor:  # its pointer is always aligned
            keys.append((a.base.dtype, *a.block_shape))
        else:  # a tensor
            keys.append((a.dtype, a.data_ptr() % 16))
    return keys


def _first_tensor(args):
    """Return the first tensor, of which there must be one. A TMA descriptor is none."""
    for a in args:
        if isinstance(a, torch.Tensor):
            return a


def _kernel_decorator():
    """Return the decorator `kernel`: the fastest one that is known to work here.

    Without Triton (`tile` has a stand-in) and in its interpreter it is ``triton.jit``. With the
    versions of `CHECKED_TRITON_VERSIONS` it is `CachedKernel`, which looks compiled kernels up on
    NVIDIA alone: on AMD Triton also specialises on a tensor's size, and Intel's launcher takes
    other arguments. With other Triton versions, and on AMD and Intel, a kernel launches as Triton
    does, on the device of its first tensor.
    """
    if not TRITON or devices.INTERPRETED:
        return triton.jit

    class KernelOnItsDevice(triton.runtime.jit.JITFunction):
        """A kernel that launches on the device of its first tensor, with products fused into sums
        unless the launch says otherwise."""

        def run(self, *args, **kwargs):  # Triton's kernel[grid](...) calls this
            # Triton's own default is True up to 3.9, which warns, and False from 3.10 on
            kwargs.setdefault("enable_fp_fusion", True)
            with devices.device_guard(_first_tensor(args)):
                return super().run(*args, **kwargs)

    if tuple(triton.__version__.split(".")[:2]) not in CHECKED_TRITON_VERSIONS:
        return KernelOnItsDevice
    knobs = triton.knobs
    driver = triton.runtime.driver
    # Set by the first launch in `__getitem__`: to ask for them at import would initialise the GPU.
    active_driver = None
    is_cuda = False  # or not known yet

    class CachedKernel(KernelOnItsDevice):
        """A `KernelOnItsDevice` that keeps compiled kernels by `_specialisation_keys`.

        A launch whose key is known skips Triton's binding."""

        def __init__(self, fn):
            super().__init__(fn)
            self.compiled_by_key = {}

        def __getitem__(self, grid):
            def launch(*args, **constants):
                nonlocal active_driver, is_cuda
                if active_driver is None:
                    active_driver = driver.active
                    is_cuda = active_driver.get_current_target().backend == "cuda"
                if not is_cuda:
                    return self.run(*args, grid=grid, warmup=False, **constants)
                device = active_driver.get_current_device()
                first_tensor = _first_tensor(args)
                # -1 is a CPU tensor's, with which the kernel launches on the current device. It can
                # read pinned memory; for other CPU tensors Triton's launcher raises.
                if first_tensor.get_device() not in (device, -1):
                    # once more, with the tensor's device as the current one
                    with devices.device_guard(first_tensor):
                        return launch(*args, **constants)
                key = (device, *_specialisation_keys(args), *constants, *constants.values())
                compiled = self.compiled_by_key.get(key)
                # the hook is None, a function, or a chain of functions that may be empty
                hook = knobs.runtime.launch_enter_hook
                if compiled is None or getattr(hook, "calls", hook):
                    return self.launch_by_triton(self.compiled_by_key, key, grid, args, constants)
                x, y, z = (*grid, 1, 1)[:3]
                run, function_handle, packed_metadata, constants_in_order = compiled
                stream = active_driver.get_current_stream(device)
                # None: no launch metadata, no enter hook, no exit hook
                launch_args = x, y, z, stream, function_handle, packed_metadata, None, None, None
                # the launcher counts parameters, so constants are passed, which it then drops
                run(*launch_args, *args, *constants_in_order)

            return launch

        def launch_by_triton(self, cache, key, grid, args, constants):
            """Launch as Triton does, and store in ``cache`` what further launches with this key
            need. ``cache`` is the kernel's own, or that of a prepared launch."""
            compiled = self.run(*args, grid=grid, warmup=False, **constants)
            # of the tl.constexpr parameters; launch options are no parameters of the kernel
            names = self.arg_names[len(args) :]
            cache[key] = (
                compiled.run,
                compiled.function,
                compiled.packed_metadata,
                tuple(constants[name] for name in names),
            )
            return compiled

        def prepare(self, grid, scalars, constants):
            """Return the function of `prepare_launch`: as ``launch`` in `__getitem__`, with a key
            of the tensors alone, since all else is fixed."""
            compiled_by_tensors = {}
            x, y, z = (*grid, 1, 1)[:3]

            def launch(*tensors):
                if not is_cuda:  # or not known yet: this launch finds it out
                    return self[grid](*tensors, *scalars, **constants)
                device = active_driver.get_current_device()
                if tensors[0].get_device() not in (device, -1):
                    return self[grid](*tensors, *scalars, **constants)
                # as `_specialisation_keys`, for tensors alone
                key = device, *[t if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors]
                compiled = compiled_by_tensors.get(key)
                hook = knobs.runtime.launch_enter_hook
                if compiled is None or getattr(hook, "calls", hook):
                    args = (*tensors, *scalars)
                    return self.launch_by_triton(compiled_by_tensors, key, grid, args, constants)
                run, function_handle, packed_metadata, constants_in_order = compiled
                stream = active_driver.get_current_stream(device)
                launch_args = x, y, z, stream, function_handle, packed_metadata, None, None, None
                run(*launch_args, *tensors, *scalars, *constants_in_order)

            return launch

    return CachedKernel


kernel = _kernel_decorator()


def tma_descriptor(tensor, block_shape):
    """Return a descriptor by which TMA (Hopper's engine that copies tiles) loads tiles of a tensor.

    Elements of a tile beyond the tensor load as 0. Returns None where the device has no TMA, for
    dtypes of other than 16 bits, which no caller needs, empty tensors, and layouts that TMA cannot
    read: rows must begin at multiples of 16 bytes.
    """
    if tensor.element_size() != 2 or not tensor.numel() or not devices.has_tma(tensor):
        return None
    *strides, last_stride = tensor.stride()
    if last_stride != 1 or tensor.data_ptr() % 16:
        return None
    # 8 elements are 16 bytes; an expanded tensor has strides of 0
    if any(stride < 8 or stride % 8 for stride in strides):
        return None
    return TensorDescriptor.from_tensor(tensor, list(block_shape))
