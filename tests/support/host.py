"""Offloading to host memory in tests without a GPU."""

import threading
import weakref

from liger_kernel.core import devices, host_memory


def offload_every_tensor(monkeypatch) -> list:
    """Let CPU tensors of any size be offloaded as a GPU's are.

    Returns a list to which each `OffloadedTensor` is added, as a weak reference.
    """
    offloaded = []
    init = host_memory.OffloadedTensor.__init__

    def recording_init(self, *args):
        init(self, *args)
        offloaded.append(weakref.ref(self))

    monkeypatch.setattr(host_memory.OffloadedTensor, "__init__", recording_init)
    monkeypatch.setattr(devices, "is_off_host", lambda x: True)
    monkeypatch.setattr(host_memory, "MIN_BYTES", 1)
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 100)  # no divisor of a tensor's bytes
    monkeypatch.setattr(host_memory, "_copy_streams", {})
    monkeypatch.setattr(host_memory._PinnedPieces, "pinned_bytes", 0)
    monkeypatch.setattr(host_memory, "_thread", threading.local())
    return offloaded
