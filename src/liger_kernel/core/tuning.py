"""Launches for the GPU at hand: what is known of it, and a table of the launches that were fastest
there.

A function that chooses a launch is `tuned`. It returns numbers made from sizes and from what is
known of the device (`Traits`): the default. Beside it stands which other numbers are right for
these sizes. `scripts/tune` times them and writes the faster ones into a file, which is read here,
once for each kind of device. Whatever is in that file, only numbers that are right are taken from
it. So a table changes the speed and the order of sums, and nothing else."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from liger_kernel._version import __version__
from liger_kernel.core import devices
from liger_kernel.core.kernel import LaunchCache
from liger_kernel.core.tile import TRITON, next_power_of_2, triton

VARIABLE = "LIGER_KERNEL_TUNING"
FORMAT = 1  # of the file; another one is not read
OFF = "0", "off", "none"

# Published memory rates in TB/s: of a device by what its name contains, in this order; of an
# architecture's usual one.
RATES = {
    "B300": 8.0, "B200": 8.0, "H200": 4.8, "H100 PCIe": 2.0, "H100 NVL": 3.9, "H100": 3.35, "A100-SXM4-80GB": 2.04,
    "A100 80GB PCIe": 1.94, "A100": 1.56, "L40S": 0.864, "L40": 0.864, "L4": 0.3, "RTX 4090": 1.01, "RTX 5090": 1.79,
    "MI355X": 8.0, "MI350X": 8.0, "MI325X": 6.0, "MI300X": 5.3, "MI250": 1.6,
    "sm_80": 2.04, "sm_86": 0.94, "sm_89": 1.01, "sm_90": 4.8, "sm_100": 8.0, "sm_103": 8.0, "sm_120": 1.79,
    "gfx90a": 1.6, "gfx942": 5.3, "gfx950": 8.0, "gfx1100": 0.96,
}  # fmt: skip
LATENCY = 1e-6  # seconds until a load of a busy memory arrives, about
HOPPER = (
    227 * 1024
)  # bytes of shared memory that a program may have where the defaults were measured


class Traits(NamedTuple):
    """What launches are made from."""

    name: str  # the device's, as its driver has it
    arch: str
    processors: int
    warp: int  # threads
    shared: int  # bytes of shared memory that a program may have
    prefetches: bool  # whether asynchronous copies fill it
    rate: float  # bytes per second of its memory; 0: not known

    @property
    def in_flight(self) -> float:
        """Bytes that a processor must have on their way for the memory to be busy (Little's law);
        0: not known."""
        return self.rate * LATENCY / self.processors

    def warps(self, of_32: int) -> int:
        """As many threads as so many warps of 32: a thread's loads are 16 bytes wide on every
        device."""
        return max(of_32 * 32 // self.warp, 1)

    def rows(self, most: int, bytes_of_one: int) -> int:
        """Rows of an iteration, ``most`` or fewer: three iterations fit into shared memory, as they
        do on Hopper.

        On an H200 half the rows cost 6 %, and not to load ahead another 10 %: `ops.norm.rows` has
        the figures."""
        while (
            most > 1 and self.prefetches and self.shared < 3 * most * bytes_of_one + 2048 <= HOPPER
        ):
            most //= 2
        return most

    def stages_of_products(self, bytes_of_one: int) -> int:
        """Without asynchronous copies: AMD's guide to Triton has 2, one tile comes while another
        one is multiplied."""
        return 2 if self.arch.startswith("gfx") and bytes_of_one <= self.shared else 1

    def programs(self, bytes_of_one: int, stages: int) -> int:
        """Of a processor, so that enough is in flight: all stages but one, or half an iteration
        without prefetching."""
        return 2 if self.in_flight > max(stages - 1, 0.5) * bytes_of_one else 1


def traits(tensor: torch.Tensor) -> Traits:
    return _traits(*devices.place(tensor))


@functools.cache
def _traits(kind: str, index: int) -> Traits:
    arch, processors, warps, copied = devices._properties(kind, index)
    name, rate = devices.model(kind, index)
    shared = copied or (160 if arch == "gfx950" else 64) * 1024 * arch.startswith("gfx")
    published = next((tb for part, tb in RATES.items() if part in name), 0)
    rate = 1e12 * published or rate or 1e12 * RATES.get(arch, 0)
    if "MIG" in name:  # a slice of the processors, and of the memory another one
        rate = 0.0
    return Traits(name or arch, arch, processors, 1024 // warps, shared, copied > 0, rate)


class Launch(NamedTuple):
    """A choice that can be tuned."""

    name: str
    default: Callable  # (tensor, *what) -> numbers; what: sizes, flags and words
    others: Callable  # (tensor, numbers, *what) -> what else is right

    def key(self, tensor, what) -> str:
        """Sizes are rounded up to powers of two: what is measured for one shape serves its
        neighbours."""
        sizes = (next_power_of_2(w) if w.__class__ is int else w for w in what)
        return " ".join(map(str, (self.name, f"{8 * tensor.element_size()}-bit", *sizes)))


LAUNCHES: dict[str, Launch] = {}


def tuned(name: str, others: Callable):
    """Decorate a function ``(tensor, *what)`` that chooses a launch. ``others(tensor, numbers,
    *what)``: see `Launch`.

    Without a table a call costs what the function costs. With one, `LaunchCache` remember what was found.
    """

    def wrap(default):
        launch = LAUNCHES[name] = Launch(name, default, others)

        @functools.wraps(default)
        def choose(tensor, *what):
            usual = default(tensor, *what)
            return usual if _tables.idle else _tables.find(launch, tensor, what, usual)

        return choose

    return wrap


def around(
    numbers, places: dict[int, tuple], fits: Callable = lambda *numbers: True
) -> list[tuple]:
    """What comes of ``numbers`` when those at some places take other values; those that fit."""
    options = [places.get(i, (n,)) for i, n in enumerate(numbers)]
    return [other for other in itertools.product(*options) if other != numbers and fits(*other)]


def near(number: int, least: int, most: int) -> tuple[int, ...]:
    """A power of two from a quarter to four times the number, within bounds."""
    return tuple(
        n for n in (number // 4, number // 2, number, 2 * number, 4 * number) if least <= n <= most
    )


class _Tables:
    """The files that were read, and the numbers that someone tries out."""

    def __init__(self):
        self.idle = False  # whether there is no table for anyone: then nobody is asked
        self.tried: dict[str, tuple] = {}  # key -> numbers in place of all others
        self.seen: Callable | None = None  # is told of each choice
        self.known: dict[str, dict[str, tuple]] = {}  # device -> key -> numbers

    def find(self, launch, tensor, what, usual):
        if self.seen is not None:
            self.seen(launch, launch.key(tensor, what), tensor, what, usual)
        elif not self.tried and not self._possible():
            self.idle = True
        if (
            self.idle or tensor.device.type == "meta"
        ):  # where nothing is computed, there is no device
            return usual
        at = launch.name, tensor.device, tensor.element_size(), usual, what
        if at in _found:
            return _found[at]
        key = launch.key(tensor, what)
        numbers = self.tried.get(key) or self._of(traits(tensor)).get(key)
        if numbers is None or numbers == usual:
            return _found.add(at, usual)
        if numbers not in launch.others(tensor, usual, *what):
            _warn(
                f"{key} is {list(numbers)}, which is no launch for {what}; the default {list(usual)} is taken"
            )
            numbers = usual
        return _found.add(at, numbers)

    def _possible(self):
        where = given()
        if where is not None:
            return where.lower() not in OFF
        try:
            return any(name.startswith("tuning-") for name in os.listdir(folder()))
        except OSError:  # there is no such folder, or it is nobody's business
            return False

    def _of(self, device):
        if device.name not in self.known:
            self.known[device.name] = read(device)
        return self.known[device.name]


_tables, _found = _Tables(), LaunchCache()


def forget() -> None:
    """Tables are read anew, and launches planned anew."""
    global _tables
    _tables = _Tables()
    LaunchCache.forget()


@contextlib.contextmanager
def trying(numbers: dict[str, tuple], seen: Callable | None = None):
    """Within, launches are these numbers, by key, and ``seen`` is told of every choice: (launch,
    key, tensor, what, default). Files are not read."""
    forget()
    _tables.tried, _tables.seen, _tables._of = numbers, seen, lambda device: {}
    _tables._possible = lambda: True
    try:
        yield
    finally:
        forget()


def given() -> str | None:
    """What the environment says: a file, a folder, or that there is to be no table."""
    return os.environ.get(VARIABLE) or None


def folder() -> Path:
    """Where tables are if the environment says nothing."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (
        Path(cache or os.path.expanduser("~/.cache")) / "liger_kernel"
    )  # a user without a home has none there


def file(name: str) -> Path | None:
    """The table of the device with this name; None: there is to be none."""
    where = given()
    if where is not None and where.lower() in OFF:
        return None
    path = Path(os.path.expanduser(where)) if where else folder()
    is_folder = where is None or os.path.isdir(path)
    return path / f"tuning-{re.sub('[^A-Za-z0-9]+', '-', name)}.json" if is_folder else path


def stamp(device: Traits) -> dict:
    """What a table must have been made for."""
    return dict(
        format=FORMAT,
        liger_kernel=__version__,
        triton=triton.__version__ if TRITON else None,
        device=device.name,
    )


def read(device: Traits) -> dict[str, tuple]:
    """{key: numbers} of this device's table; empty, with a warning, if it is of no use."""
    path = file(device.name)
    if path is None or (given() is None and not os.path.exists(path)):
        return {}
    try:
        table = json.loads(path.read_text())
        differs = [
            f"{k} {table.get(k)}, here is {v}"
            for k, v in stamp(device).items()
            if table.get(k) != v
        ]
        if differs:
            raise ValueError(f"it was made for {'; '.join(differs)}")
        numbers = {key: entry["launch"] for key, entry in table["launches"].items()}
        for key, launch in numbers.items():
            if not launch or not all(n.__class__ is int for n in launch):
                raise ValueError(f"{key} is {launch}, not a list of integers")
    except Exception as e:  # whatever is wrong with a file, the defaults are right
        why = f"it has no {e}" if isinstance(e, KeyError) else str(e) or type(e).__name__
        _warn(f"{path} is not used: {why}. Make it anew with scripts/tune, or set {VARIABLE}=off")
        return {}
    return {key: tuple(launch) for key, launch in numbers.items()}


def _warn(what):
    warnings.warn(f"liger_kernel, table of launches: {what}", stacklevel=2)
