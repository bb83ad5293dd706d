"""``@kernel``: ``triton.jit`` for kernels that the host launches. It launches on the right device, and faster.

Triton launches on the current device, wherever the tensors are. A model may be spread over several devices. So each
launch makes the device of its first tensor the current one.

Triton binds and specialises all arguments at every launch: 26 µs, of which the launch itself takes 14 (H200's host,
2026-11-20, Triton 3.6). Here a compiled kernel is looked up by what Triton specialises on: a tensor's dtype and whether
its memory is aligned, an integer's class (1, divisible by 16, 64 bits wide), a constant's value. The first launch of
its kind goes through Triton, and so does any launch that a profiler's hook observes.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.tile import TRITON, triton

CHECKED = ("3", "6"), ("3", "7"), ("3", "8"), ("3", "9")  # versions of Triton for which `launch` was checked


def _kinds(args):
    """What Triton specialises a kernel on: one key for each argument."""
    return [
        (a if a < 2 else (a % 16 == 0, a > 2147483647))
        if a.__class__ is int
        else a.__class__
        if a is None or a.__class__ is float
        else (a.dtype, a.data_ptr() % 16)
        for a in args
    ]


def _first_tensor(args):
    for a in args:
        if isinstance(a, torch.Tensor):
            return a


def _launcher():
    """The class of kernels. In the interpreter, which has no devices, it is ``triton.jit`` itself.

    Compiled kernels are looked up only where this was checked: with these versions of Triton, on NVIDIA. On AMD,
    kernels are also specialised on a tensor's size. Intel's driver takes other arguments.
    """
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
                    return self.find(key, grid, args, constants)
                x, y, z = (*grid, 1, 1)[:3]
                run, function, metadata, rest = found
                run(x, y, z, active.get_current_stream(device), function, metadata, None, None, None, *args, *rest)

            return launch

        def find(self, key, grid, args, constants):
            compiled = self.run(*args, grid=grid, warmup=False, **constants)
            rest = tuple(constants[name] for name in self.arg_names[len(args) :])
            self.found[key] = compiled.run, compiled.function, compiled.packed_metadata, rest
            return compiled

    return Kernel


kernel = _launcher()
