"""Time the first step of a fresh process, which compiles kernels or finds them in Triton's cache.

    PYTHONPATH=src python -m bench.first_step [--peer DIR] [--runs MODEL@SEQUENCExBATCH,...]

Steps as in `bench.train`. Each contestant trains in four processes, one after the other: the first
finds Triton's and Inductor's caches empty, the others as the first has left them, and medians of
these are shown. What is timed: imports, the model and its patch, from the start of the process on;
the first step; later ones.

Python's garbage is collected before the first step. Python makes a full collection whenever there
are a quarter more objects than at the last one. It takes a part of a second, and would be in the
first step of one contestant and not of another."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch

from . import machine, models, runs, text, train

PROCESSES = {"empty": 1, "filled": 3}  # that find the caches so
VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def train_once(
    contestant: str, name: str, sequence: int, batch: int, num_steps: int, device: str, began: float
) -> dict:
    """Train in this process, which began at the time ``began``. Returns seconds."""
    model = models.build(name, device, torch.bfloat16)
    forward, _ = runs.CONTESTANTS[contestant](model)
    step = train.stepping(model, forward)
    data = text.batches(sequence, batch, num_steps).to(device)
    gc.collect()
    wait(device)
    times = [time.time()]
    for one_batch in data:
        step(one_batch)
        wait(device)
        times.append(time.time())
    first, *later = (end - start for start, end in zip(times, times[1:], strict=False))
    return {"start_s": times[0] - began, "first_s": first, "later_s": machine.median(later)}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def work(
    contestant: str, name: str, sequence: int, batch: int, warmup: int, timed: int, device: str
) -> dict:
    """Measure one contestant in two processes, with ``warmup`` + ``timed`` steps each."""
    described = runs.described()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {variable: os.path.join(folder, variable) for variable in VARIABLES}
        out = pathlib.Path(folder) / "seconds.json"
        for cache, count in PROCESSES.items():
            seconds = []
            for _ in range(count):
                began = time.time()
                request = [contestant, name, sequence, batch, warmup + timed, device, began, out]
                command = [sys.executable, "-m", "bench.first_step", "--once", *map(str, request)]
                subprocess.run(command, cwd=runs.ROOT, env=os.environ | caches, check=True)
                seconds.append(json.loads(out.read_text()))
            figures[cache] = {
                key: machine.median([one[key] for one in seconds]) for key in seconds[0]
            }
    return {"machine": described, "figures": figures}


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--once"]:
        contestant, name, *numbers, device, began, out = arguments[1:]
        seconds = train_once(contestant, name, *map(int, numbers), device, float(began))
        pathlib.Path(out).write_text(json.dumps(seconds))
        return
    argv = ["--runs", "Llama-3.2-1B@4096x2", "--warmup", "1", *arguments]
    runs.main("first_step", work, __doc__, argv, usual=runs.USUAL, steps=4, shown=tuple(PROCESSES))


if __name__ == "__main__":
    main()
