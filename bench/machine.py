"""Describe the machine, time kernels on it, and measure the rates that no kernel exceeds.

A sample is GPU time between two events, with a cold cache and a full queue: before the first event
the GPU overwrites a buffer larger than its L2 cache and spins for as long as Python takes to
enqueue what is timed. Contestants take turns, and the ceilings are contestants: the card throttles
as it warms, so only what ran side by side compares."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import pathlib
import platform
import random
import statistics
import time
from collections.abc import Callable

import torch

RESULTS = pathlib.Path(__file__).parent / "results"


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench: no CUDA or ROCm device here, and speed without one means nothing")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe() -> dict:
    """Return hardware, versions and date."""
    described = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        described |= {
            "gpu": properties.name,
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
        if torch.version.hip:
            described["toolkit"] = f"HIP {torch.version.hip}"
        else:
            described["toolkit"] = f"CUDA {torch.version.cuda}"
    return described


def results_path(name: str, out: str | None) -> pathlib.Path:
    return pathlib.Path(out) if out else RESULTS / f"{name}.json"


def save(name: str, figures: dict, out: str | None = None) -> pathlib.Path:
    """Write ``figures`` as JSON, whole or not at all, to ``out`` or to
    ``bench/results/<name>.json``."""
    path = results_path(name, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"kind": name, **figures}, indent=1) + "\n")
    return partial.replace(path)


def resumed(name: str, settings: dict, out: str | None = None) -> dict | None:
    """Return what an earlier call saved, or None if it had other ``settings``. Among these are the
    machine and its software."""
    path = results_path(name, out)
    if not path.exists():
        return None
    data = json.loads(path.read_text())

    def comparable(values):
        result = {key: values.get(key) for key in settings}
        machine = dict(result.get("machine") or {})
        machine.pop("date", None)
        return result | {"machine": machine}

    if comparable(data) != comparable(settings) or data.get("kind") != name:
        print(f"{path}: made with other settings or on another machine; begins anew", flush=True)
        return None
    return data


class Stopwatch:
    """``stopwatch(work, prepare)`` returns milliseconds of GPU time of ``work([prepare()])``.

    The result of ``prepare`` comes in a list, from which ``work`` may take it: a tensor that nobody
    else holds may be overwritten."""

    FLUSH_BYTES = 256 * 2**20
    MAX_SPIN_CYCLES = 8_000_000  # about 4 ms

    def __init__(self):
        self.scratch = torch.empty(self.FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self.cycles = (
            self.MAX_SPIN_CYCLES // 4
        )  # doubled where Python turns out to be slower than that

    def __call__(self, work: Callable, prepare: Callable = lambda: None) -> float:
        while True:
            inputs = [prepare()]
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            self.scratch.zero_()
            torch.cuda._sleep(self.cycles)
            start.record()
            work(inputs)
            end.record()
            enqueued_in_time = not start.query()
            end.synchronize()
            # work that waits for the GPU is never enqueued in time
            if enqueued_in_time or self.cycles >= self.MAX_SPIN_CYCLES:
                break
            self.cycles *= 2
        return start.elapsed_time(end)


def interleave(
    contestants: dict[str, Callable[[], float]],
    seconds: float,
    min_turns: int = 5,
    max_turns: int = 60,
) -> dict[str, list[float]]:
    """Return samples of each contestant, taken in turns for about ``seconds`` in all.

    Each turn has an order of its own: a hot card is slower after work that was hard on it.
    """
    samples = {name: [] for name in contestants}
    order = list(contestants.items())
    shuffle = random.Random(0).shuffle
    end = time.monotonic() + seconds
    for turn in range(max_turns):
        if turn >= min_turns and time.monotonic() > end:
            break
        shuffle(order)
        for name, sample in order:
            samples[name].append(sample())
    return samples


def median(samples: list[float]) -> float:
    return statistics.median(samples)


class Ceilings:
    """Measure the two rates that no kernel exceeds, as contestants do: milliseconds of a fixed
    amount of work."""

    COPY_BYTES = 2 * 2**30  # read and written
    N = 8192  # of a bf16 N×N×N matrix product
    PRODUCTS = 20  # in a sample

    def __init__(self, stopwatch: Stopwatch):
        self.stopwatch = stopwatch
        self.src = torch.empty(self.COPY_BYTES // 2, dtype=torch.int8, device="cuda")
        self.dst = torch.empty_like(self.src)
        self.src.random_()
        self.a = torch.randn(self.N, self.N, dtype=torch.bfloat16, device="cuda")
        self.b = torch.randn(self.N, self.N, dtype=torch.bfloat16, device="cuda")
        self.c = torch.empty_like(self.a)

    def copy(self) -> float:
        return self.stopwatch(lambda _: self.dst.copy_(self.src))

    def matmul(self) -> float:
        """Return the mean of as many products as take about as long as a linear cross entropy."""

        def products(_):
            for _ in range(self.PRODUCTS):
                torch.mm(self.a, self.b, out=self.c)

        return self.stopwatch(products) / self.PRODUCTS

    def rates(self, samples: dict[str, list[float]]) -> dict[str, float]:
        """Return bytes per second and operations per second, from the samples of `copy` and
        `matmul`."""
        work = {"copy": self.COPY_BYTES, "matmul": 2 * self.N**3}
        return {
            name: work[name] / (median(samples[name]) * 1e-3) for name in work if name in samples
        }


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most memory in use at once while ``run`` runs, beyond that in use before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kept_bytes(run: Callable[[], object]) -> int:
    """Return the memory in use after ``run``, with its result held, beyond that in use before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    kept_memory = torch.cuda.memory_allocated() - before
    del result
    return kept_memory
