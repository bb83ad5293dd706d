"""A host that takes tensors from a CPU as from a GPU, however small they are."""

import threading
import weakref

from liger_kernel.core import devices, host_memory


def takes_everything(monkeypatch) -> list:
    """-> what is sent, as weak references."""
    found, send = [], host_memory.Waiting.__init__

    def init(self, *args):
        send(self, *args)
        found.append(weakref.ref(self))

    monkeypatch.setattr(host_memory.Waiting, "__init__", init)
    monkeypatch.setattr(devices, "is_off_host", lambda x: True)
    monkeypatch.setattr(host_memory, "LEAST", 1)
    monkeypatch.setattr(host_memory, "PIECE", 100)  # no divisor of a tensor's bytes
    monkeypatch.setattr(host_memory, "_beside", {})
    monkeypatch.setattr(host_memory._Pieces, "taken", 0)
    monkeypatch.setattr(host_memory, "_thread", threading.local())
    return found
