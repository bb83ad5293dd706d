"""Tensors that wait in the host's memory, copied there and back on a stream of their own.

    current stream   layer 1 ......... | layer 2 ......... | layer 3 ...
    copy stream        x_1 to the host     x_2 to the host     x_3 ...
                                       └ x_1 is released       └ x_2 is released

The device memory of x_i is released when the next tensor is offloaded, and by then computation
waits for its copy. So the allocator has its memory again at once, however far the host runs ahead,
and of all offloaded tensors two at most are on the device. The last one stays until it is asked
for. On the way back a tensor is fetched when it is asked for. The one before it is fetched at the
same time if half of the device's memory is free: a program that fills it computes for so long that
a copy does not count.

Host memory is pinned, in pieces of one size: whatever the sizes of the tensors, a piece that one
gives back fits another. Pieces are taken and given back in the order of the copies, which all run
on the device's one copy stream.

A tensor that can be recomputed may be offloaded, too, as a spare one: its pieces are taken away
when another tensor finds none.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import NamedTuple

import torch

from liger_kernel.core import devices

PIECE_BYTES = 2**26
MIN_BYTES = 2**20  # a smaller tensor stays on the device
PREFETCH_FREE_SHARE = 0.5  # of the device's memory stays free when a tensor is fetched early
ENV_VARIABLE = "LIGER_KERNEL_HOST_MEMORY"


def host_memory_limit() -> int:
    """Return the bytes of host memory that this process may take.

    They are the environment's number, or half of what its machine has for it.
    """
    setting = os.environ.get(ENV_VARIABLE)
    if setting is None:
        processes = max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
        return _memory_of_machine() // 2 // processes
    try:
        limit = int(float(setting))
    except (ValueError, OverflowError):
        limit = -1
    if limit < 0:
        raise ValueError(f"{ENV_VARIABLE} is {setting!r}, give a number of bytes")
    return limit


def _memory_of_machine() -> int:
    """Return the bytes of memory of the machine, or those that a container may have of it."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                limits.append(int(file.read()))
        except (OSError, ValueError):  # there is no such file, or it says "max"
            pass
    return min(limits)


class _PinnedPieces:
    """The pinned memory for one device's tensors. It is kept, since pinning takes long."""

    pinned_bytes = 0  # for all devices of this process, in use or free
    lock = threading.Lock()

    def __init__(self):
        self.free = []
        self.spare = weakref.WeakSet()  # OffloadedTensors whose pieces may be taken away

    def take(self, nbytes: int, spare: bool) -> list[torch.Tensor] | None:
        """Return pieces for so many bytes; None beyond the limit, or if the host has no more."""
        needed = -(-nbytes // PIECE_BYTES)
        with self.lock:
            while len(self.free) < needed:
                if not (
                    self._pin(needed - len(self.free)) or not spare and self._take_from_spare()
                ):
                    return None
            pieces = self.free[:needed]
            del self.free[:needed]
        return pieces

    def _pin(self, count: int) -> bool:
        if _PinnedPieces.pinned_bytes + count * PIECE_BYTES > host_memory_limit():
            return False
        for _ in range(count):
            try:
                self.free.append(_pinned_piece())
            except RuntimeError:  # the host gives no more
                return False
            _PinnedPieces.pinned_bytes += PIECE_BYTES
        return True

    def _take_from_spare(self) -> bool:
        """Free the pieces of one spare tensor. Returns False if there is none."""
        for offloaded in list(self.spare):
            self.spare.discard(offloaded)
            if not offloaded.in_use:
                self.free += offloaded.pieces
                offloaded.pieces = None
                return True
        return False

    def give_back(self, pieces):
        # no lock: the garbage collector may call this while the lock is held
        self.free += pieces


def _pinned_piece():
    return torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())


class _CopyStream:
    """The stream of one device for copies, and the host memory for its tensors."""

    def __init__(self, device):
        self.module = getattr(torch, device.type)  # torch.cuda, torch.xpu, torch.cpu
        self.has_streams = device.type != "cpu"
        self.stream = self.module.Stream(device) if self.has_streams else self.module.Stream()
        self.pieces = _PinnedPieces()

    def copy(self, x, pieces, to_host):
        """Copy once all that is queued on the current stream is done. Returns the event of the
        copy's end."""
        self.stream.wait_stream(self.module.current_stream(x.device))
        flat = x.detach().view(-1).view(torch.uint8)
        with self.module.stream(self.stream):
            for piece, chunk in zip(pieces, flat.split(PIECE_BYTES), strict=True):
                piece = piece[: chunk.numel()]
                if to_host:
                    piece.copy_(chunk, non_blocking=True)
                else:
                    chunk.copy_(piece, non_blocking=True)
            return self.stream.record_event()

    def wait_on_owner(self, device_copy):
        """Make the stream that the tensor's memory belongs to wait for the copy."""
        device_copy.stream.wait_event(device_copy.copied)

    def wait_on_current(self, device_copy):
        """Make the current stream wait for the copy, too, if it is another one.

        The tensor's memory is then kept until that stream has read it.
        """
        current_stream = self.module.current_stream(device_copy.x.device)
        if self.has_streams and current_stream != device_copy.stream:
            current_stream.wait_event(device_copy.copied)
            device_copy.x.record_stream(current_stream)


_copy_streams: dict[torch.device, _CopyStream] = {}
_thread = threading.local()  # .last: device -> weak reference to what this thread offloaded last


def _copy_stream(device) -> _CopyStream:
    # setdefault: one for a device, whichever thread comes first
    return _copy_streams.get(device) or _copy_streams.setdefault(device, _CopyStream(device))


class _DeviceCopy(NamedTuple):
    """An offloaded tensor as it is on the device, before it is released or after it is fetched."""

    x: torch.Tensor
    version: int  # of x when the copy began
    copied: object  # the event of the end of its copy, to the host or back
    stream: object  # the current stream when the copy began
    is_original: bool  # x is the tensor that was offloaded


class OffloadedTensor:
    """A tensor that was copied to the host. ``get()`` returns it, as often as it is called.

    For a ``spare`` one whose pieces were taken away, or that was written to, it returns None.
    """

    def __init__(self, x, pieces, previous, spare=False):
        self.copy_stream = _copy_stream(x.device)
        self.pieces = pieces
        self.previous = previous  # weak reference to what was offloaded before: backward's next
        self.spare = spare
        self.in_use = False  # its pieces are not taken away
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.device_copy = self._start_copy(x, pieces, to_host=True)
        self.modified = False
        if spare:
            self.copy_stream.pieces.spare.add(self)

    @property
    def x(self) -> torch.Tensor | None:
        device_copy = self.device_copy
        return device_copy and device_copy.x

    def _start_copy(self, x, pieces, to_host) -> _DeviceCopy:
        stream = self.copy_stream.module.current_stream(x.device)
        copied = self.copy_stream.copy(x, pieces, to_host)
        return _DeviceCopy(x, x._version, copied, stream, to_host)

    def release_device_copy(self):
        """Release the device's memory to whatever is queued from now on."""
        device_copy, self.device_copy = self.device_copy, None
        if device_copy is not None:
            self._wait(device_copy)

    def _wait(self, device_copy):
        self.modified |= device_copy.x._version != device_copy.version
        self.copy_stream.wait_on_owner(device_copy)

    def start_fetch(self) -> _DeviceCopy | None:
        """Begin the copy to the device; several threads may call this at a time."""
        with _PinnedPieces.lock:
            self.in_use = True
        if self.pieces is None:
            return None
        x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        device_copy = self.device_copy = self._start_copy(x, self.pieces, to_host=False)
        return device_copy

    def get(self) -> torch.Tensor | None:
        device_copy = self.device_copy
        if self.spare and device_copy is not None and device_copy.is_original:
            # its reader may write to it: it does not get the tensor that others have
            self.release_device_copy()
            device_copy = None
        device_copy = device_copy or self.start_fetch()
        self.device_copy = None
        if device_copy is None:
            return None
        self._wait(device_copy)
        self.copy_stream.wait_on_current(device_copy)
        if self.modified and self.spare:
            return None
        if self.modified:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.shape)} was written to while it was copied to the "
                "host, and backward needs what it was; let the layer write to a copy of its input, "
                "or keep its checkpoint on the device"
            )
        if not self.spare:
            self._prefetch_previous(device_copy.x)
        return device_copy.x

    def _prefetch_previous(self, x):
        """Begin to fetch what backward needs after x, if the device has enough free memory."""
        previous = None if self.previous is None else self.previous()
        if previous is None or previous.device_copy is not None or previous.modified:
            return
        free_bytes = devices.free_memory(x) - x.nbytes
        if free_bytes >= PREFETCH_FREE_SHARE * devices.process_memory_limit(x):
            previous.start_fetch()

    def __del__(self):
        if "device_copy" in self.__dict__:  # otherwise __init__ raised before a copy began
            self.release_device_copy()
        if self.pieces is not None:
            self.copy_stream.pieces.give_back(self.pieces)


def offload_to_host(x: torch.Tensor, spare: bool = False) -> OffloadedTensor | None:
    """Begin to copy x to the host.

    Returns None if it stays on the device: it is small, not contiguous, of a subclass, shares its
    storage with the last one, or finds no host memory within the limit.
    """
    if not devices.is_off_host(x) or x.nbytes < MIN_BYTES:
        return None
    if not x.is_contiguous() or type(x) is not torch.Tensor:
        return None
    last_of_device = _thread.__dict__.setdefault("last", {})
    last = last_of_device[x.device]() if x.device in last_of_device else None
    if last is not None and _shares_storage(last.x, x):
        return None  # several layers read it: it would be on the device in any case
    pieces = _copy_stream(x.device).pieces.take(x.nbytes, spare)
    if pieces is None:
        return None
    previous = None
    if last is not None:
        last.release_device_copy()
        previous = last.previous if last.spare else weakref.ref(last)
    offloaded = OffloadedTensor(x, pieces, previous, spare)
    last_of_device[x.device] = weakref.ref(offloaded)
    return offloaded


def _shares_storage(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    return a is not None and a.untyped_storage()._cdata == b.untyped_storage()._cdata
