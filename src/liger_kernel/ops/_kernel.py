"""``@kernel``: ``triton.jit`` for what the host launches, with a launch that costs the host less.

Triton binds and specialises every argument anew each time (26 µs where a launch itself takes 14: H200's host,
2026-11-20, Triton 3.6). Here a launch is found by what its arguments are to Triton: a tensor's dtype and whether its
memory is aligned, an integer's class (1, divisible by 16, 64 bits wide), a constant's value. Whatever is not found, or
is watched by a profiler's hook, goes through Triton.
"""

from __future__ import annotations

from ._device import AMD
from ._tile import TRITON, triton


def _kind(a):
    """What Triton specialises a kernel by, of one argument."""
    kind = a.__class__
    if kind is int:
        return 1 if a == 1 else (a % 16 == 0, a.bit_length() > 31)
    return kind if kind is float or a is None else (a.dtype, a.data_ptr() % 16 == 0)


def _launcher():
    """The class of kernels, or ``triton.jit`` itself: in the interpreter, on AMD, whose kernels are specialised by a
    tensor's size, too, and with a Triton that launches otherwise."""
    knobs = getattr(triton, "knobs", None)
    if not TRITON or AMD or knobs is None or knobs.runtime.interpret:
        return triton.jit
    driver = triton.runtime.driver

    def watched():
        hook = knobs.runtime.launch_enter_hook
        return getattr(hook, "calls", hook)

    class Kernel(triton.runtime.jit.JITFunction):
        def __init__(self, fn):
            super().__init__(fn)
            self.found = {}

        def run(self, *args, grid, warmup, **constants):
            active = driver.active
            device = active.get_current_device()
            key = (device, *map(_kind, args), *constants.items())
            found = self.found.get(key)
            if found is None or warmup or watched():
                compiled = super().run(*args, grid=grid, warmup=warmup, **constants)
                if not warmup:
                    rest = tuple(constants[name] for name in self.arg_names[len(args) :])
                    self.found[key] = compiled.run, compiled.function, compiled.packed_metadata, rest, compiled
                return compiled
            launch, function, metadata, rest, _ = found
            x, y, z = (*grid, 1, 1)[:3]
            stream = active.get_current_stream(device)
            launch(x, y, z, stream, function, metadata, None, None, None, *args, *rest)

    return Kernel


kernel = _launcher()
