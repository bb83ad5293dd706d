"""``@kernel``: ``triton.jit`` for kernels that the host launches. It launches on the right device,
and faster.

Triton launches on the current device, wherever the tensors are. A model may be spread over several
devices. So each launch makes the device of its first tensor the current one.

Triton binds and specialises all arguments at every launch: 26 µs, of which the launch itself takes
14 (H200's host, 2026-11-20, Triton 3.6). Here a compiled kernel is looked up by what Triton
specialises on: a tensor's dtype and whether its memory is aligned, an integer's class (1, divisible
by 16, 64 bits wide), a constant's value. The first launch of its kind goes through Triton, and so
does any launch that a profiler's hook observes."""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.tile import TRITON, TensorDescriptor, triton

CHECKED = (
    ("3", "6"),
    ("3", "7"),
    ("3", "8"),
    ("3", "9"),
)  # versions of Triton for which `launch` was checked


def _kinds(args):
    """What Triton specialises a kernel on: one key for each argument."""
    return [
        (a if a < 2 else (a % 16 == 0, a > 2147483647))
        if a.__class__ is int
        else a.__class__
        if a is None or a.__class__ is float
        else (a.base.dtype, *a.block_shape)
        if a.__class__ is TensorDescriptor
        else (a.dtype, a.data_ptr() % 16)
        for a in args
    ]


def descriptor(tensor, block):
    """What a kernel loads tiles of (block) of a 16-bit tensor by, where there is an engine for it,
    or None.

    What is beyond the tensor is 0. The engine wants rows that begin at multiples of 16 bytes.
    """
    if tensor.element_size() != 2 or not tensor.numel() or not devices.copies_tiles(tensor):
        return None
    *strides, last = tensor.stride()
    if last != 1 or tensor.data_ptr() % 16 or any(stride < 8 or stride % 8 for stride in strides):
        return None
    return TensorDescriptor.from_tensor(tensor, list(block))


def _first_tensor(args):
    for a in args:
        if isinstance(a, torch.Tensor):
            return a


def _launcher():
    """The class of kernels. In the interpreter, which has no devices, it is ``triton.jit`` itself.

    Compiled kernels are looked up only where this was checked: with these versions of Triton, on
    NVIDIA. On AMD, kernels are also specialised on a tensor's size. Intel's driver takes other
    arguments."""
    if not TRITON or devices.INTERPRETED:
        return triton.jit

    class Guarded(triton.runtime.jit.JITFunction):
        def run(self, *args, **kwargs):
            with devices.guard(_first_tensor(args)):
                return super().run(*args, **kwargs)

    if tuple(triton.__version__.split(".")[:2]) not in CHECKED:
        return Guarded
    knobs, driver, active, checked = triton.knobs, triton.runtime.driver, None, False

    class Kernel(Guarded):
        def __init__(self, fn):
            super().__init__(fn)
            self.found = {}

        def __getitem__(self, grid):
            def launch(*args, **constants):
                nonlocal active, checked
                if active is None:
                    active = driver.active
                    checked = active.get_current_target().backend == "cuda"
                if not checked:
                    return self.run(*args, grid=grid, warmup=False, **constants)
                device, first = active.get_current_device(), _first_tensor(args)
                if first.get_device() not in (device, -1):  # -1: in no GPU's memory
                    with devices.guard(first):
                        return launch(*args, **constants)
                key = (device, *_kinds(args), *constants, *constants.values())
                found = self.found.get(key)
                hook = knobs.runtime.launch_enter_hook
                if found is None or getattr(hook, "calls", hook):
                    return self.find(self.found, key, grid, args, constants)
                x, y, z = (*grid, 1, 1)[:3]
                run, function, metadata, rest = found
                run(
                    x,
                    y,
                    z,
                    active.get_current_stream(device),
                    function,
                    metadata,
                    None,
                    None,
                    None,
                    *args,
                    *rest,
                )

            return launch

        def find(self, known, key, grid, args, constants):
            compiled = self.run(*args, grid=grid, warmup=False, **constants)
            rest = tuple(constants[name] for name in self.arg_names[len(args) :])
            known[key] = compiled.run, compiled.function, compiled.packed_metadata, rest
            return compiled

        def prepared(self, grid, numbers, constants):
            known, (x, y, z) = {}, (*grid, 1, 1)[:3]

            def launch(*tensors):
                if active is None or not checked:  # the first launch of all finds out
                    return self[grid](*tensors, *numbers, **constants)
                device = active.get_current_device()
                if tensors[0].get_device() not in (device, -1):
                    return self[grid](*tensors, *numbers, **constants)
                key = device, *[t if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors]
                found = known.get(key)
                hook = knobs.runtime.launch_enter_hook
                if found is None or getattr(hook, "calls", hook):
                    return self.find(known, key, grid, (*tensors, *numbers), constants)
                run, function, metadata, rest = found
                stream = active.get_current_stream(device)
                run(
                    x, y, z, stream, function, metadata, None, None, None, *tensors, *numbers, *rest
                )

            return launch

    return Kernel


kernel = _launcher()


def prepared(kernel, grid, *numbers, **constants):
    """-> the launches with this grid, these numbers and constants, as a function of the tensors
    (None for none), the first of which is one.

    Tensors come first among the kernel's arguments. Where shapes and strides come again, as in
    every layer and step, a caller keeps it by these: what Triton specialises on is then asked of
    the tensors' pointers alone."""
    if hasattr(kernel, "prepared"):
        return kernel.prepared(grid, numbers, constants)
    return lambda *tensors: kernel[grid](*tensors, *numbers, **constants)


class LaunchCache(dict):
    """What was made once of shapes, strides, dtypes and devices, by these; forgotten where it
    becomes too much."""

    MOST = 1024
    every = []  # of them

    def __init__(self):
        super().__init__()
        self.every.append(self)

    def add(self, key, plan):
        if len(self) >= self.MOST:
            self.clear()
        self[key] = plan
        return plan

    @classmethod
    def forget(cls):
        """What is planned next asks again for everything, such as an operator's `_launch`."""
        for plans in cls.every:
            plans.clear()
