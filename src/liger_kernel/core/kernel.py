"""``@kernel``: ``triton.jit`` for kernels that are launched from Python, on the device of their
tensors and with less overhead. Functions that kernels call stay ``@triton.jit``.

Triton launches on the current device, wherever the tensors are. A model may be spread over several
devices. So each launch makes the device of its first tensor the current one.

Triton binds and specialises all arguments at every launch: a launch takes 26 µs of the CPU's time,
of which the launch itself is 14 (CPU of a machine with an H200, 2026-11-20, Triton 3.6). Here a
compiled kernel is looked up by what Triton specialises on: a tensor's dtype and the alignment of
its pointer to 16 bytes; whether an integer is 1, divisible by 16, or needs 64 bits; a constant's
value. The first launch with such a key goes through Triton, and so does every launch while a hook
is registered that Triton calls before launches, such as a profiler's.

A launch ``kernel[grid](tensors and numbers, NAME=constant, num_warps=...)`` is that of
``triton.jit`` with these rules: the grid is a tuple; parameters that are ``tl.constexpr`` come
last, and every one is given, by keyword; booleans are among these; one argument at least is a
tensor.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.tile import TRITON, TensorDescriptor, triton

# Triton versions for which the arguments of `CompiledKernel.run`, called below, were verified
CHECKED_TRITON_VERSIONS = (("3", "6"), ("3", "7"), ("3", "8"), ("3", "9"))
INT32_MAX = 2**31 - 1


def prepare_launch(kernel_fn, grid, *scalars, **constants):
    """Return ``launch(*tensors)``: the kernel with this grid, these scalars and constants.

    The kernel's parameters are in the order tensors, scalars, constants. The first tensor must not
    be None; others may be. A TMA descriptor is no tensor here. The same shapes and strides recur in
    every layer and step, so callers keep the launch in a `LaunchCache`. Each call then checks the
    tensors' dtypes and pointers only.
    """
    if hasattr(kernel_fn, "prepare"):
        return kernel_fn.prepare(grid, scalars, constants)
    # plain triton.jit, or a Triton that was not checked
    return lambda *tensors: kernel_fn[grid](*tensors, *scalars, **constants)


class LaunchCache(dict):
    """A dict of prepared launches, or of arguments that were chosen for them.

    The caller chooses the key: all that grid, scalars and constants depend on, such as shapes,
    strides, dtypes and device. Emptied before a store when it holds `MAX_ENTRIES`.
    """

    MAX_ENTRIES = 1024
    instances = []  # every cache of the process, for `clear_all`

    def __init__(self):
        super().__init__()
        self.instances.append(self)

    def store(self, key, launch):
        """Store a launch, and return it."""
        if len(self) >= self.MAX_ENTRIES:
            self.clear()
        self[key] = launch
        return launch

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
        elif a.__class__ is TensorDescriptor:  # its pointer is aligned
            keys.append((a.base.dtype, *a.block_shape))
        else:  # a tensor
            keys.append((a.dtype, a.data_ptr() % 16))
    return keys


def _first_tensor(args):
    for a in args:
        if isinstance(a, torch.Tensor):
            return a


def _kernel_decorator():
    """Return the decorator `kernel`: the fastest one that is known to work here.

    Without Triton (`tile` has a stand-in) and in its interpreter it is ``triton.jit``. Compiled
    kernels are looked up with the Triton versions of `CHECKED_TRITON_VERSIONS` and on NVIDIA alone:
    on AMD Triton also specialises on a tensor's size, and Intel's launcher takes other arguments.
    In these other cases a kernel launches as Triton does, on its tensors' device.
    """
    if not TRITON or devices.INTERPRETED:
        return triton.jit

    class KernelOnItsDevice(triton.runtime.jit.JITFunction):
        """A kernel that launches on the device of its first tensor."""

        def run(self, *args, **kwargs):  # by which Triton does what ``kernel[grid](...)`` says
            with devices.device_guard(_first_tensor(args)):
                return super().run(*args, **kwargs)

    if tuple(triton.__version__.split(".")[:2]) not in CHECKED_TRITON_VERSIONS:
        return KernelOnItsDevice
    knobs = triton.knobs
    driver = triton.runtime.driver
    # Both are set by the first launch in `__getitem__`: to ask at import would initialise the GPU.
    active_driver = None
    is_cuda = False

    class CachedKernel(KernelOnItsDevice):
        """The same, without Triton's binding where a launch with equal keys was made before."""

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
                # -1: a CPU tensor. A kernel can read pinned ones; for others Triton raises.
                if first_tensor.get_device() not in (device, -1):
                    with devices.device_guard(first_tensor):
                        return launch(*args, **constants)
                key = (device, *_specialisation_keys(args), *constants, *constants.values())
                compiled = self.compiled_by_key.get(key)
                # the hook is None, a function, or a chain of functions that may be empty
                hook = knobs.runtime.launch_enter_hook
                if compiled is None or getattr(hook, "calls", hook):
                    return self.launch_by_triton(self.compiled_by_key, key, grid, args, constants)
                x, y, z = (*grid, 1, 1)[:3]
                run, function_handle, metadata, constants_in_order = compiled
                stream = active_driver.get_current_stream(device)
                # the three None: launch metadata, enter hook, exit hook. The values of constants
                # must be passed, though the launcher ignores them.
                launch_args = x, y, z, stream, function_handle, metadata, None, None, None
                run(*launch_args, *args, *constants_in_order)

            return launch

        def launch_by_triton(self, compiled_by_key, key, grid, args, constants):
            """Launch as Triton does, and store what further launches with this key need."""
            compiled = self.run(*args, grid=grid, warmup=False, **constants)
            names = self.arg_names[len(args) :]  # of the parameters that are constants
            compiled_by_key[key] = (
                compiled.run,
                compiled.function,
                compiled.packed_metadata,
                tuple(constants[name] for name in names),
            )
            return compiled

        def prepare(self, grid, scalars, constants):
            """Return the function of `prepare_launch`: as ``launch`` in `__getitem__`, with a key
            of the tensors alone, since all else is fixed."""
            compiled_by_key = {}  # of this grid, these scalars and constants
            x, y, z = (*grid, 1, 1)[:3]

            def launch(*tensors):
                if not is_cuda:  # or not known yet: this launch finds it out
                    return self[grid](*tensors, *scalars, **constants)
                device = active_driver.get_current_device()
                if tensors[0].get_device() not in (device, -1):
                    return self[grid](*tensors, *scalars, **constants)
                # as `_specialisation_keys`, for tensors alone
                key = device, *[t if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors]
                compiled = compiled_by_key.get(key)
                hook = knobs.runtime.launch_enter_hook
                if compiled is None or getattr(hook, "calls", hook):
                    args = (*tensors, *scalars)
                    return self.launch_by_triton(compiled_by_key, key, grid, args, constants)
                run, function_handle, metadata, constants_in_order = compiled
                stream = active_driver.get_current_stream(device)
                launch_args = x, y, z, stream, function_handle, metadata, None, None, None
                run(*launch_args, *tensors, *scalars, *constants_in_order)

            return launch

    return CachedKernel


kernel = _kernel_decorator()


def tma_descriptor(tensor, block_shape):
    """Return a descriptor by which TMA (Hopper's engine that copies tiles) loads tiles of a tensor.

    Elements of a tile beyond the tensor load as 0. Returns None where the device has no TMA, for
    dtypes of other than 16 bits, empty tensors, and layouts that TMA cannot read: rows must begin
    at multiples of 16 bytes.
    """
    if tensor.element_size() != 2 or not tensor.numel() or not devices.has_tma(tensor):
        return None
    *strides, last_stride = tensor.stride()
    if last_stride != 1 or tensor.data_ptr() % 16:
        return None
    # 8 elements are 16 bytes; a stride of 0, of an expanded tensor, is none for TMA
    if any(stride < 8 or stride % 8 for stride in strides):
        return None
    return TensorDescriptor.from_tensor(tensor, list(block_shape))
