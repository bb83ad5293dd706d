"""Count the bytes that a call takes at once: on a GPU by its allocator, elsewhere at real shapes of
tensors without memory.

Then kernels do not run, and what is counted is what an allocator would be asked for. Not counted is
what a library, such as cuBLAS, asks for by itself."""

import contextlib
import gc
import weakref

import torch
from hardware import DEVICE
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_kernel.core import devices


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensors that operators return, as long as they live.

    ``peak``: the most at one time. ``inputs``: tensors that are not counted, nor are their views.
    """

    liger_transparent = True

    def __init__(self, inputs):
        super().__init__()
        self.live = 0
        self.peak = 0
        self.known = {x.untyped_storage()._cdata for x in inputs}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if kwargs and "out" in kwargs:  # of a product that a CPU may not have, such as out_dtype's
            return kwargs["out"]
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                self.add(x.untyped_storage())
        return out

    def add(self, storage):
        key = storage._cdata
        if key in self.known:
            return
        size = storage.nbytes()
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed():
            self.known.discard(key)
            self.live -= size

        weakref.finalize(storage, freed).atexit = False


@contextlib.contextmanager
def counted_tensors(monkeypatch):
    """Make tensors whose bytes `peak_bytes` counts: without memory where there is no GPU."""
    if DEVICE != "cpu":
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **kwargs: None)
    # as on a GPU
    monkeypatch.setattr(devices, "supports_fp32_output", lambda tensor: True)
    monkeypatch.setattr(devices, "multiprocessors", lambda tensor: 132)
    with FakeTensorMode():
        yield


def peak_bytes(call, *inputs):
    """Return the bytes that ``call()`` takes at once beyond the inputs."""
    gc.collect()
    if DEVICE == "cpu":
        with LiveBytes(inputs) as counted:
            call()
        return counted.peak
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before
