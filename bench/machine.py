"""The machine: what it is, how fast a kernel could run on it at best, and how to time one there.

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
    """Hardware, versions, date."""
    described = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
        "gpu": None,
    }
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        described |= {
            "gpu": p.name,
            "memory": p.total_memory,
            "multiprocessors": p.multi_processor_count,
        }
        described["toolkit"] = (
            f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        )
    return described


def save(name: str, figures: dict, out: str | None = None) -> pathlib.Path:
    """Write ``figures`` as JSON, whole or not at all, to ``out`` or to
    ``bench/results/<name>.json``."""
    path = pathlib.Path(out) if out else RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"kind": name, **figures}, indent=1) + "\n")
    return partial.replace(path)


def resumed(name: str, settings: dict, out: str | None = None) -> dict | None:
    """What an earlier call saved there, if it was of these ``settings``, among them the machine and
    its software."""
    path = pathlib.Path(out) if out else RESULTS / f"{name}.json"
    if not path.exists():
        return None
    data = json.loads(path.read_text())

    def comparable(values):
        found = {key: values.get(key) for key in settings}
        return found | {
            "machine": {k: v for k, v in (found.get("machine") or {}).items() if k != "date"}
        }

    other = comparable(data) != comparable(settings) or data.get("kind") != name
    if other:
        print(f"{path}: made with other settings or on another machine; begins anew", flush=True)
    return None if other else data


class Stopwatch:
    """``stopwatch(work, prepare)``: milliseconds of GPU time of ``work(prepare())``."""

    FLUSH = 256 * 2**20  # bytes
    MOST = 8_000_000  # cycles of spinning, about 4 ms

    def __init__(self):
        self.scratch = torch.empty(self.FLUSH, dtype=torch.int8, device="cuda")
        self.cycles = self.MOST // 4  # doubled where Python turns out to be slower than that

    def __call__(self, work: Callable, prepare: Callable = lambda: None) -> float:
        while True:
            given = [
                prepare()
            ]  # handed over in a list: a tensor that nobody else holds may be overwritten
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.scratch.zero_()
            torch.cuda._sleep(self.cycles)
            start.record()
            work(given)
            end.record()
            ahead = not start.query()
            end.synchronize()
            if ahead or self.cycles >= self.MOST:  # work that waits for the GPU is never ahead
                break
            self.cycles *= 2
        return start.elapsed_time(end)


def interleave(
    contestants: dict[str, Callable[[], float]], seconds: float, least=5, most=60
) -> dict[str, list[float]]:
    """Samples of each contestant, taken in turns for about ``seconds`` in all.

    Each turn has an order of its own: a hot card is slower after work that was hard on it.
    """
    samples = {name: [] for name in contestants}
    order, shuffle = list(contestants.items()), random.Random(0).shuffle
    end = time.monotonic() + seconds
    for turn in range(most):
        if turn >= least and time.monotonic() > end:
            break
        shuffle(order)
        for name, sample in order:
            samples[name].append(sample())
    return samples


def median(samples: list[float]) -> float:
    return statistics.median(samples)


class Ceilings:
    """The two rates that no kernel exceeds, as contestants: milliseconds of a fixed amount of
    work."""

    COPY = 2 * 2**30  # bytes read and written
    N = 8192  # of a bf16 N×N×N matrix product

    def __init__(self, stopwatch: Stopwatch):
        self.stopwatch = stopwatch
        self.src, self.dst = (
            torch.empty(self.COPY // 2, dtype=torch.int8, device="cuda") for _ in range(2)
        )
        self.src.random_()
        self.a, self.b = (
            torch.randn(self.N, self.N, dtype=torch.bfloat16, device="cuda") for _ in range(2)
        )
        self.c = torch.empty_like(self.a)

    def copy(self) -> float:
        return self.stopwatch(lambda _: self.dst.copy_(self.src))

    def matmul(self) -> float:
        """The mean of as many products as take about as long as a linear cross entropy."""
        return (
            self.stopwatch(lambda _: [torch.mm(self.a, self.b, out=self.c) for _ in range(20)]) / 20
        )

    def rates(self, samples: dict[str, list[float]]) -> dict[str, float]:
        """Bytes per second and operations per second, from the samples of `copy` and `matmul`."""
        work = {"copy": self.COPY, "matmul": 2 * self.N**3}
        return {
            name: work[name] / (median(samples[name]) * 1e-3) for name in work if name in samples
        }


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory in use at once while ``run`` runs, beyond what was in use before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kept_bytes(run: Callable[[], object]) -> int:
    """Memory in use after ``run``, while what it returns is held, beyond what was in use before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    returned = run()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    del returned
    return kept
