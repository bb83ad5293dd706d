"""Tensors that wait in the host's memory, copied there and back on a stream of their own.

    here        layer 1 ......... | layer 2 ......... | layer 3 ...
    beside        x_1 to the host     x_2 to the host     x_3 ...
                                  └ x_1 is let go of      └ x_2 is let go of

x_i is let go of when the next tensor is sent, and by then computation waits for its copy: so the
allocator has its memory again at once, however far the host runs ahead, and of all that was sent
two tensors at most are on the device. The last one stays until it is asked for. On the way back a
tensor is fetched when it is asked for, and the one before it already then if half of the memory is
free: whoever fills it computes for so long that a copy does not count.

Host memory is pinned, in pieces of one size: whatever the sizes of the tensors, what one gives back
another can take. Pieces are taken and given back in the order of the copies, which all run on the
device's one stream.

A tensor that can be computed again may be sent, too, as a spare one: it is given up when another
finds no place."""

from __future__ import annotations

import os
import threading
import weakref
from typing import NamedTuple

import torch

from liger_kernel.core import devices

PIECE = 2**26  # bytes
LEAST = 2**20  # bytes; what is smaller stays on the device
ROOM = 0.5  # of the device's memory stays free when a tensor is fetched before it is needed
VARIABLE = "LIGER_KERNEL_HOST_MEMORY"


def bound() -> int:
    """Bytes that a process takes of the host: the environment's number, or half of what its machine
    has for it."""
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
    """Of one device. ``taken``: bytes of all devices of this process, in use or not: pinning takes
    long."""

    taken, lock = 0, threading.Lock()

    def __init__(self):
        self.free, self.spare = [], weakref.WeakSet()

    def take(self, n: int, spare: bool) -> list[torch.Tensor] | None:
        """Pieces for n bytes; None if that would be more than the bound, or than there is."""
        needed = -(-n // PIECE)
        with self.lock:
            while len(self.free) < needed:
                if not (self._pin(needed - len(self.free)) or not spare and self._give_up()):
                    return None
            found = self.free[:needed]
            del self.free[:needed]
        return found

    def _pin(self, n: int) -> bool:
        if _Pieces.taken + n * PIECE > bound():
            return False
        for _ in range(n):
            try:
                self.free.append(_pinned())
            except RuntimeError:  # the host gives no more
                return False
            _Pieces.taken += PIECE
        return True

    def _give_up(self) -> bool:
        """One of those that are spare."""
        for waiting in list(self.spare):
            self.spare.discard(waiting)
            if not waiting.held:
                self.free += waiting.pieces
                waiting.pieces = None
                return True
        return False

    def give(self, pieces):
        self.free += (
            pieces  # no lock: it may be the garbage collector that gives them, while one is held
        )


def _pinned():
    return torch.empty(PIECE, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())


class _Beside:
    """The stream of a device, and its pieces of the host's memory."""

    def __init__(self, device):
        self.module, self.has_streams = getattr(torch, device.type), device.type != "cpu"
        self.stream = self.module.Stream(device) if self.has_streams else self.module.Stream()
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

    def waits(self, there):
        """The stream that its memory belongs to, for its copy."""
        there.stream.wait_event(there.copied)

    def is_here(self, there):
        """The current stream, if that is another one, waits, too, and the memory is kept until it
        has read it."""
        now = self.module.current_stream(there.x.device)
        if self.has_streams and now != there.stream:
            now.wait_event(there.copied)
            there.x.record_stream(now)


_beside: dict[torch.device, _Beside] = {}
_thread = threading.local()  # .last: device -> what this thread has sent last


def _beside_of(device) -> _Beside:
    return _beside.get(device) or _beside.setdefault(
        device, _Beside(device)
    )  # one, whatever thread comes first


class _There(NamedTuple):
    """A tensor on the device, what it was, the event from which on its copy, there or back, is
    done, and the stream that was the current one; ``sent``: it is what was sent."""

    x: torch.Tensor
    version: int
    copied: object
    stream: object
    sent: bool


class Waiting:
    """A tensor that was sent to the host. ``fetched()`` gives it back, as often as it is asked for.

    In the place of a ``spare`` one that was given up, or written to, it gives None.
    """

    def __init__(self, x, pieces, before, spare=False):
        self.beside, self.pieces, self.spare, self.held = _beside_of(x.device), pieces, spare, False
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.before = (
            before  # a weak reference to what was sent before it, which backward wants next
        )
        self.there, self.changed = self._copied(x, pieces, to_host=True), False
        if spare:
            self.beside.pieces.spare.add(self)

    @property
    def x(self) -> torch.Tensor | None:
        there = self.there
        return there and there.x

    def _copied(self, x, pieces, to_host) -> _There:
        stream = self.beside.module.current_stream(x.device)
        copied = self.beside.copy(x, pieces, to_host)
        return _There(x, x._version, copied, stream, to_host)

    def let_go(self):
        """Of the device's memory, which belongs to whatever is queued here from now on."""
        there, self.there = self.there, None
        if there is not None:
            self._wait(there)

    def _wait(self, there):
        self.changed |= there.x._version != there.version
        self.beside.waits(there)

    def fetch(self) -> _There | None:
        """Begin to; threads may do so at a time."""
        with _Pieces.lock:
            self.held = True  # from now on it is not given up
        if self.pieces is None:
            return None
        x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        there = self.there = self._copied(x, self.pieces, to_host=False)
        return there

    def fetched(self) -> torch.Tensor | None:
        there = self.there
        if (
            self.spare and there is not None and there.sent
        ):  # its reader may write to it: it is not that reader's again
            self.let_go()
            there = None
        there, self.there = there or self.fetch(), None
        if there is None:
            return None
        self._wait(there)
        self.beside.is_here(there)
        if self.changed and self.spare:
            return None
        if self.changed:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.shape)} was written to while it was copied to the host, and backward "
                "needs what it was; let the layer write to a copy of its input, or keep its checkpoint on the device"
            )
        before = None if self.spare or self.before is None else self.before()
        if before is not None and before.there is None and not before.changed:
            if devices.free_bytes(there.x) - there.x.nbytes >= ROOM * devices.own_bytes(there.x):
                before.fetch()
        return there.x

    def __del__(self):
        if "there" in self.__dict__:  # else it did not come to a copy
            self.let_go()
        if self.pieces is not None:
            self.beside.pieces.give(self.pieces)


def send(x: torch.Tensor, spare: bool = False) -> Waiting | None:
    """x, on its way to the host; None if it stays where it is: small, in pieces of its own, or
    beyond the bound."""
    if (
        not devices.is_off_host(x)
        or x.nbytes < LEAST
        or not x.is_contiguous()
        or type(x) is not torch.Tensor
    ):
        return None
    sent = _thread.__dict__.setdefault("last", {})
    last = sent[x.device]() if x.device in sent else None
    if (
        last is not None
        and last.x is not None
        and last.x.untyped_storage()._cdata == x.untyped_storage()._cdata
    ):
        return None  # several layers read it: it would be there in any case
    pieces = _beside_of(x.device).pieces.take(x.nbytes, spare)
    if pieces is None:
        return None
    if last is not None:
        last.let_go()
    before = last.before if last is not None and last.spare else last and weakref.ref(last)
    waiting = Waiting(x, pieces, before, spare)
    sent[x.device] = weakref.ref(waiting)
    return waiting
