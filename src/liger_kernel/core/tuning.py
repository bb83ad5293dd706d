"""Launches for the GPU at hand: its properties, and a table of the launches that are fastest there.

A function that chooses a launch is `tunable`. It returns a config: numbers, chosen by sizes and by
the properties of the device (`DeviceTraits`). That is the default. Beside it stands a function of
the other valid configs for these sizes. `scripts/tune` times them and writes the faster ones into a
file, which is read here, once for each kind of device. Whatever is in that file, only valid configs
are taken from it. So a table changes the speed and the order of sums, and nothing else.
"""

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

ENV_VARIABLE = "LIGER_KERNEL_TUNING"
TABLE_FORMAT = 1  # of the file; another one is not read
OFF = "0", "off", "none"

# Published memory bandwidths in TB/s: of a device whose name contains the key, in this order; of an
# architecture's usual device.
BANDWIDTHS = {
    "B300": 8.0, "B200": 8.0, "H200": 4.8, "H100 PCIe": 2.0, "H100 NVL": 3.9, "H100": 3.35,
    "A100-SXM4-80GB": 2.04, "A100 80GB PCIe": 1.94, "A100": 1.56, "L40S": 0.864, "L40": 0.864,
    "L4": 0.3, "RTX 4090": 1.01, "RTX 5090": 1.79,
    "MI355X": 8.0, "MI350X": 8.0, "MI325X": 6.0, "MI300X": 5.3, "MI250": 1.6,
    "sm_80": 2.04, "sm_86": 0.94, "sm_89": 1.01, "sm_90": 4.8, "sm_100": 8.0, "sm_103": 8.0,
    "sm_120": 1.79, "gfx90a": 1.6, "gfx942": 5.3, "gfx950": 8.0, "gfx1100": 0.96,
}  # fmt: skip
MEMORY_LATENCY = 1e-6  # seconds until a load of a busy memory arrives, about
# bytes of shared memory that a program may have where the defaults were measured
HOPPER_SHARED_MEMORY = 227 * 1024


# ---- properties of a device ----


class DeviceTraits(NamedTuple):
    """The properties of a device that launches are chosen by."""

    name: str  # as its driver has it
    arch: str
    num_processors: int
    warp_size: int  # threads
    shared_memory: int  # bytes that a program may have
    prefetches: bool  # asynchronous copies fill the shared memory
    bandwidth: float  # bytes per second of its memory; 0: not known

    @property
    def bytes_in_flight(self) -> float:
        """Bytes that a processor must have on their way for the memory to be busy (Little's law);
        0: not known."""
        return self.bandwidth * MEMORY_LATENCY / self.num_processors

    def num_warps(self, warps_of_32: int) -> int:
        """Return the warps that have as many threads as so many warps of 32.

        A thread's loads are 16 bytes wide on every device.
        """
        return max(warps_of_32 * 32 // self.warp_size, 1)

    def block_rows(self, max_rows: int, row_bytes: int) -> int:
        """Return the rows of an iteration: so many that three iterations fit into shared memory, as
        they do on Hopper.

        On an H200 half the rows cost 6 %, and not to load ahead another 10 %:
        `ops.norm.norm_kernels` has the figures.
        """
        rows = max_rows
        while (
            rows > 1
            and self.prefetches
            and self.shared_memory < 3 * rows * row_bytes + 2048 <= HOPPER_SHARED_MEMORY
        ):
            rows //= 2
        return rows

    def matmul_num_stages(self, stage_bytes: int) -> int:
        """Return num_stages of a matmul without asynchronous copies.

        AMD's guide to Triton has 2: one tile is loaded while another one is multiplied.
        """
        return 2 if self.arch.startswith("gfx") and stage_bytes <= self.shared_memory else 1

    def programs_per_processor(self, block_bytes: int, num_stages: int) -> int:
        """Return how many programs a processor needs to keep enough bytes in flight.

        A program has all stages but one in flight, or half an iteration without prefetching.
        """
        return 2 if self.bytes_in_flight > max(num_stages - 1, 0.5) * block_bytes else 1


def device_traits(tensor: torch.Tensor) -> DeviceTraits:
    return _device_traits(*devices.type_and_index(tensor))


@functools.cache
def _device_traits(device_type: str, index: int) -> DeviceTraits:
    arch, num_processors, max_warps, async_shared = devices._properties(device_type, index)
    name, measured_bandwidth = devices.name_and_bandwidth(device_type, index)
    amd_shared = 0
    if arch.startswith("gfx"):
        amd_shared = (160 if arch == "gfx950" else 64) * 1024
    published = next((tb for key, tb in BANDWIDTHS.items() if key in name), 0)
    bandwidth = 1e12 * published or measured_bandwidth or 1e12 * BANDWIDTHS.get(arch, 0)
    if "MIG" in name:  # a slice of the processors, and of the memory another one
        bandwidth = 0.0
    return DeviceTraits(
        name=name or arch,
        arch=arch,
        num_processors=num_processors,
        warp_size=1024 // max_warps,
        shared_memory=async_shared or amd_shared,
        prefetches=async_shared > 0,
        bandwidth=bandwidth,
    )


# ---- launches that can be tuned ----


class Launch(NamedTuple):
    """The choice of a launch that can be tuned.

    ``problem`` is what a config depends on beside the device: sizes, flags and words.
    """

    name: str
    default: Callable  # default(tensor, *problem) returns a config
    alternatives: Callable  # alternatives(tensor, config, *problem) returns other valid configs

    def key(self, tensor, problem) -> str:
        """Return the key of a table's entry.

        Sizes are rounded up to powers of two: what is measured for one shape serves its neighbours.
        """
        sizes = (next_power_of_2(p) if p.__class__ is int else p for p in problem)
        return " ".join(map(str, (self.name, f"{8 * tensor.element_size()}-bit", *sizes)))


LAUNCHES: dict[str, Launch] = {}


def tunable(name: str, alternatives: Callable):
    """Decorate a function ``(tensor, *problem)`` that chooses a config.

    ``alternatives(tensor, config, *problem)`` returns the other valid ones. Without a table a call
    costs what the function costs. With one, a `LaunchCache` keeps the config.
    """

    def wrap(default):
        launch = LAUNCHES[name] = Launch(name, default, alternatives)

        @functools.wraps(default)
        def choose(tensor, *problem):
            config = default(tensor, *problem)
            if _tables.none_exist:
                return config
            return _tables.find(launch, tensor, problem, config)

        return choose

    return wrap


def neighbors(
    config, values: dict[int, tuple], is_valid: Callable = lambda *config: True
) -> list[tuple]:
    """Return the valid configs that differ from ``config``.

    ``values`` has, for some positions of a config, the values that it may have there.
    """
    options = [values.get(i, (n,)) for i, n in enumerate(config)]
    return [
        candidate
        for candidate in itertools.product(*options)
        if candidate != config and is_valid(*candidate)
    ]


def powers_of_2_near(number: int, smallest: int, largest: int) -> tuple[int, ...]:
    """Return the powers of two from a quarter to four times the number, within bounds.

    ``number`` is a power of two.
    """
    candidates = (number // 4, number // 2, number, 2 * number, 4 * number)
    return tuple(n for n in candidates if smallest <= n <= largest)


# ---- the choice between the default and a table's entry ----


class _Tables:
    """The tables that were read, and configs that override them."""

    def __init__(self):
        self.none_exist = False  # there is no table for any device: `find` is not called
        self.overrides: dict[str, tuple] = {}  # key -> config, before any table
        self.observer: Callable | None = None  # is called with each choice
        self.by_device: dict[str, dict[str, tuple]] = {}  # device name -> key -> config

    def find(self, launch, tensor, problem, default):
        """Return the config for this launch: the overriding one, the table's, or the default."""
        if self.observer is not None:
            self.observer(launch, launch.key(tensor, problem), tensor, problem, default)
        elif not self.overrides and not self._may_exist():
            self.none_exist = True
        if self.none_exist or tensor.device.type == "meta":  # where nothing runs, no table applies
            return default
        cache_key = launch.name, tensor.device, tensor.element_size(), default, problem
        if cache_key in _configs:
            return _configs[cache_key]
        key = launch.key(tensor, problem)
        config = self.overrides.get(key) or self._table_of(device_traits(tensor)).get(key)
        if config is None or config == default:
            return _configs.store(cache_key, default)
        if config not in launch.alternatives(tensor, default, *problem):
            _warn(
                f"{key} is {list(config)}, which is no launch for {problem}; "
                f"the default {list(default)} is taken"
            )
            config = default
        return _configs.store(cache_key, config)

    def _may_exist(self):
        setting = env_setting()
        if setting is not None:
            return setting.lower() not in OFF
        try:
            return any(name.startswith("tuning-") for name in os.listdir(default_folder()))
        except OSError:  # there is no such folder, or it may not be read
            return False

    def _table_of(self, device):
        if device.name not in self.by_device:
            self.by_device[device.name] = read_table(device)
        return self.by_device[device.name]


_tables = _Tables()
_configs = LaunchCache()


def reset_tables() -> None:
    """Read the tables again, and choose all launches anew."""
    global _tables
    _tables = _Tables()
    LaunchCache.clear_all()


@contextlib.contextmanager
def override_launches(configs: dict[str, tuple], observer: Callable | None = None):
    """A context in which launches have these configs, by key. No table is read.

    ``observer(launch, key, tensor, problem, default)`` is called with every choice.
    """
    reset_tables()
    _tables.overrides = configs
    _tables.observer = observer
    _tables._table_of = lambda device: {}
    _tables._may_exist = lambda: True
    try:
        yield
    finally:
        reset_tables()


# ---- the files ----


def env_setting() -> str | None:
    """Return the setting of the environment: a file, a folder, or one of `OFF`."""
    return os.environ.get(ENV_VARIABLE) or None


def default_folder() -> Path:
    """Return the folder of tables if the environment does not name one."""
    cache = os.environ.get("XDG_CACHE_HOME")
    # a user without a home has none there
    return Path(cache or os.path.expanduser("~/.cache")) / "liger_kernel"


def table_path(device_name: str) -> Path | None:
    """Return the path of the table for a device; None if tables are off."""
    setting = env_setting()
    if setting is not None and setting.lower() in OFF:
        return None
    path = default_folder() if setting is None else Path(os.path.expanduser(setting))
    if setting is None or os.path.isdir(path):
        return path / f"tuning-{re.sub('[^A-Za-z0-9]+', '-', device_name)}.json"
    return path


def table_header(device: DeviceTraits) -> dict:
    """Return the format, versions and device that a table must have been made for."""
    return dict(
        format=TABLE_FORMAT,
        liger_kernel=__version__,
        triton=triton.__version__ if TRITON else None,
        device=device.name,
    )


def read_table(device: DeviceTraits) -> dict[str, tuple]:
    """Return {key: config} of this device's table.

    It is empty if there is none, and, with a warning, if it cannot be used.
    """
    path = table_path(device.name)
    if path is None or (env_setting() is None and not os.path.exists(path)):
        return {}
    try:
        return _parse_table(json.loads(path.read_text()), device)
    except Exception as e:  # whatever is wrong with a file, the defaults are right
        reason = str(e) or type(e).__name__
        if isinstance(e, KeyError):
            reason = f"it has no {e}"
        _warn(
            f"{path} is not used: {reason}. "
            f"Make it anew with scripts/tune, or set {ENV_VARIABLE}=off"
        )
        return {}


def _parse_table(table, device) -> dict[str, tuple]:
    differences = [
        f"{field} {table.get(field)}, here is {expected}"
        for field, expected in table_header(device).items()
        if table.get(field) != expected
    ]
    if differences:
        raise ValueError(f"it was made for {'; '.join(differences)}")
    configs = {key: entry["launch"] for key, entry in table["launches"].items()}
    for key, config in configs.items():
        if not config or not all(n.__class__ is int for n in config):
            raise ValueError(f"{key} is {config}, not a list of integers")
    return {key: tuple(config) for key, config in configs.items()}


def _warn(message):
    warnings.warn(f"liger_kernel, table of launches: {message}", stacklevel=2)
