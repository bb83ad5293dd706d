"""``@kernel``: ``triton.jit`` for what the host launches, with a launch that costs the host less.

Triton binds and specialises every argument anew each time (26 µs where a launch itself takes 14: H200's host,
2026-11-20, Triton 3.6). Here a launch is found by what its arguments are to Triton: a tensor's dtype and whether its
memory is aligned, an integer's class (1, divisible by 16, 64 bits wide), a constant's value. Whatever is not found, or
is watched by a profiler's hook, goes through Triton.
"""

from __future__ import annotations

from ._device import AMD
from ._tile import TRITON, triton


def _kinds(args):
    """What Triton specialises a kernel by, of each argument."""
    return [
        (a if a < 2 else (a % 16 == 0, a > 2147483647))
        if a.__class__ is int
        else a.__class__
        if a is None or a.__class__ is float
        else (a.dtype, a.data_ptr() % 16)
        for a in args
    ]


def _launcher():
    """The class of kernels, or ``triton.jit`` itself: in the interpreter, on AMD, whose kernels are specialised by a
    tensor's size, too, and with a Triton that launches otherwise."""
    knobs = getattr(triton, "knobs", None)
    if not TRITON or AMD or knobs is None or knobs.runtime.interpret:
        return triton.jit
    driver, active = triton.runtime.driver, None

    class Kernel(triton.runtime.jit.JITFunction):
        def __init__(self, fn):
            super().__init__(fn)
            self.found = {}

        def __getitem__(self, grid):
            def launch(*args, **constants):
                nonlocal active
                active = active or driver.active
                device = active.get_current_device()
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
