"""Tensors that wait in the host's memory, copied there and back on a stream of their own.

    here        layer 1 ......... | layer 2 ......... | layer 3 ...
    beside        x_1 to the host     x_2 to the host     x_3 ...
                                  └ x_1 is let go of      └ x_2 is let go of

x_i is let go of when the next tensor is sent, and by then computation waits for its copy: so the allocator has its
memory again at once, however far the host runs ahead, and of all that was sent two tensors at most are on the device.
The last one stays until it is asked for. On the way back a tensor is fetched when it is asked for, and the one before
it already then if half of the memory is free: whoever fills it computes for so long that a copy does not count.

Host memory is pinned, in pieces of one size: whatever the sizes of the tensors, what one gives back another can take.
Pieces are taken and given back in the order of the copies, which all run on the device's one stream.
"""

from __future__ import annotations

import os
import threading
import weakref

import torch

from liger_kernel.core import devices

PIECE = 2**26  # bytes
LEAST = 2**20  # bytes; what is smaller stays on the device
ROOM = 0.5  # of the device's memory stays free when a tensor is fetched before it is needed
VARIABLE = "LIGER_KERNEL_HOST_MEMORY"


def bound() -> int:
    """Bytes that a process takes of the host: the environment's number, or half of what its machine has for it."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return _there() // 2 // max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
    try:
        wanted = int(float(given))
    except (ValueError, OverflowError):
        wanted = -1
    if wanted < 0:
        raise ValueError(f"{VARIABLE} is {given!r}, give a number of bytes")
    return wanted


def _there() -> int:
    """Bytes of memory: the machine's, or those that a container may have of it."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                found.append(int(file.read()))
        except (OSError, ValueError):  # there is none, or it is "max"
            pass
    return min(found)


class _Pieces:
    """Of one device. ``taken``: bytes of all devices of this process, in use or not: pinning takes long."""

    taken, lock = 0, threading.Lock()

    def __init__(self):
        self.free = []

    def take(self, n: int) -> list[torch.Tensor] | None:
        """Pieces for n bytes; None if that would be more than the bound, or than there is."""
        needed = -(-n // PIECE)
        with self.lock:
            new = needed - len(self.free)
            if new > 0:
                if _Pieces.taken + new * PIECE > bound():
                    return None
                for _ in range(new):
                    try:
                        self.free.append(_pinned())
                    except RuntimeError:  # the host gives no more
                        return None
                    _Pieces.taken += PIECE
            found = self.free[:needed]
            del self.free[:needed]
        return found

    def give(self, pieces):
        self.free += pieces  # no lock: it may be the garbage collector that gives them, while one is held


def _pinned():
    return torch.empty(PIECE, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())


class _Beside:
    """The stream of a device, and its pieces of the host's memory."""

    def __init__(self, device):
        self.module = getattr(torch, device.type)
        self.stream = self.module.Stream(device) if device.type != "cpu" else self.module.Stream()
        self.pieces = _Pieces()

    def copy(self, x, pieces, to_host):
        """-> an event: it is done. Before, whatever is queued here now."""
        self.stream.wait_stream(self.module.current_stream(x.device))
        flat = x.detach().view(-1).view(torch.uint8)
        with self.module.stream(self.stream):
            for piece, part in zip(pieces, flat.split(PIECE), strict=True):
                piece = piece[: part.numel()]
                (piece if to_host else part).copy_(part if to_host else piece, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event, device):
        self.module.current_stream(device).wait_event(event)


_beside: dict[torch.device, _Beside] = {}
_thread = threading.local()  # .last: device -> what this thread has sent last


def _beside_of(device) -> _Beside:
    return _beside.get(device) or _beside.setdefault(device, _Beside(device))  # one, whatever thread comes first


class Waiting:
    """A tensor that was sent to the host. ``fetched()`` gives it back, as often as it is asked for."""

    def __init__(self, x, pieces, before):
        self.beside, self.pieces = _beside_of(x.device), pieces
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.before = before  # a weak reference to what was sent before it, which backward wants next
        self.x, self.version, self.changed = x, x._version, False
        self.event = self.beside.copy(x, pieces, to_host=True)

    def let_go(self):
        """Of the device's memory, which belongs to whatever is queued here from now on."""
        x, self.x = self.x, None
        if x is not None:
            self.changed |= x._version != self.version
            self.beside.wait(self.event, self.device)

    def fetch(self):
        self.x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.event = self.beside.copy(self.x, self.pieces, to_host=False)
        self.version = self.x._version

    def fetched(self) -> torch.Tensor:
        if self.x is None:
            self.fetch()
        x = self.x
        self.let_go()
        if self.changed:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.shape)} was written to while it was copied to the host, and backward "
                "needs what it was; let the layer write to a copy of its input, or keep its checkpoint on the device"
            )
        before = None if self.before is None else self.before()
        if before is not None and before.x is None and not before.changed:
            if devices.free_bytes(x) - x.numel() * x.element_size() >= ROOM * devices.own_bytes(x):
                before.fetch()
        return x

    def __del__(self):
        if "event" in self.__dict__:  # else it did not come to a copy
            self.let_go()
        self.beside.pieces.give(self.pieces)


def send(x: torch.Tensor) -> Waiting | None:
    """x, on its way to the host; None if it stays where it is: small, in pieces of its own, or beyond the bound."""
    size = x.numel() * x.element_size()
    if not devices.is_off_host(x) or size < LEAST or not x.is_contiguous() or type(x) is not torch.Tensor:
        return None
    last = _thread.__dict__.setdefault("last", {})
    before = last[x.device]() if x.device in last else None
    if before is not None and before.x is not None and before.x.untyped_storage()._cdata == x.untyped_storage()._cdata:
        return None  # several layers read it: it would be there in any case
    pieces = _beside_of(x.device).pieces.take(size)
    if pieces is None:
        return None
    if before is not None:
        before.let_go()
    waiting = Waiting(x, pieces, None if before is None else weakref.ref(before))
    last[x.device] = weakref.ref(waiting)
    return waiting
