"""Time whole training steps of real models: Hugging Face, compiled, published liger-kernel, ours.

    PYTHONPATH=src python -m bench.train [--peer DIR]
        [--runs required|more|small|MODEL@SEQUENCExBATCH,...]

Random weights in bf16, the attention that Hugging Face chooses (sdpa where a family has it), fused
AdamW, the same seeds and the same text (bytes of the standard library). Each contestant runs in a
process of its own. The step time is the median of what the GPU took from the end of one step to the
end of the next; peak memory is that of any step, the first with its new optimizer state included.
Another step, of 4 accumulated micro-batches, shows what gradients hold."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from . import machine, models, runs, text
from .runs import CONTESTANTS

ACCUMULATED = 4  # micro-batches of the last step
LEARNING_RATE = 2e-5  # at 1e-4 an 8B with random weights diverges, and losses say nothing


class Marks:
    """Points in the GPU's time, without waiting for it; in the host's where there is no GPU."""

    def __init__(self, device: str):
        self.gpu = device == "cuda"
        self.points = []

    def add(self) -> None:
        if self.gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.points.append(event)
        else:
            self.points.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Return the milliseconds from each point to the next."""
        pairs = zip(self.points, self.points[1:], strict=False)
        if not self.gpu:
            return [1e3 * (end - start) for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


def stepping(model, forward, lr: float = LEARNING_RATE):
    """Return a function that trains ``model`` by one step, calling ``forward`` on each batch, and
    returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def step(*batches: torch.Tensor) -> torch.Tensor:
        for batch in batches:
            loss = forward(input_ids=batch, labels=batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()  # the next step may be written over a CUDA graph's

    return step


def clocked(step, data: torch.Tensor) -> tuple[list[float], list[float]]:
    """Do a step on each batch of ``data``. Returns losses, and milliseconds of each step."""
    marks = Marks(data.device.type)
    losses = []
    marks.add()
    for batch in data:
        losses.append(step(batch))
        marks.add()
    gaps = marks.gaps()
    return torch.stack(losses).tolist(), gaps


def steps(
    model, forward, data: torch.Tensor, lr: float = LEARNING_RATE
) -> tuple[list[float], list[float]]:
    """Train ``model`` from the start. Returns losses, and milliseconds of each step."""
    return clocked(stepping(model, forward, lr), data)


def speed(sequence: int, batch: int, timed_ms: list[float]) -> dict:
    """Return tokens per second and the step time, by the median of the timed steps."""
    median = machine.median(timed_ms)
    return {
        "tokens_per_s": sequence * batch / median * 1e3,
        "step_ms": median,
        "steps_ms": timed_ms,
    }


def work(
    contestant: str,
    name: str,
    sequence: int,
    batch: int,
    warmup: int,
    timed: int,
    device: str,
    make_step: Callable | None = None,
    accumulates: bool = True,
) -> dict:
    """Measure one contestant, in this process.

    ``make_step(model, forward, data)`` gives another step than `stepping`."""
    described = runs.described()
    model = models.build(name, device, torch.bfloat16)
    forward, report = CONTESTANTS[contestant](model)
    data = text.batches(sequence, batch, warmup + timed).to(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = make_step(model, forward, data) if make_step else stepping(model, forward)
    losses, ms = clocked(step, data)
    figures = speed(sequence, batch, ms[warmup:])
    figures["losses"] = losses
    figures["peak_bytes"] = peak_bytes(device)
    figures["accumulated_peak_bytes"] = None
    if accumulates:
        figures["accumulated_peak_bytes"] = peak_of_accumulating(step, data, device)
    figures["patched"] = report
    figures["attention"] = model.config._attn_implementation
    if hasattr(step, "figures"):
        figures |= step.figures()
    del model, forward, step
    if device == "cuda":
        figures["ceilings"] = hot_ceilings()
    return {"machine": described, "figures": figures}


def peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def peak_of_accumulating(step, data: torch.Tensor, device: str) -> int:
    """Return the peak of one more step with the gradients of several batches: those of the first
    stay while the others are made."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    step(*(data[i % len(data)] for i in range(ACCUMULATED)))
    return peak_bytes(device)


def hot_ceilings() -> dict:
    """Measure the ceilings of the card as the training steps left it."""
    torch.cuda.empty_cache()
    ceilings = machine.Ceilings(machine.Stopwatch())
    samples = machine.interleave({"matmul": ceilings.matmul, "copy": ceilings.copy}, 0.3)
    return ceilings.rates(samples)


def main(argv: list[str] | None = None) -> None:
    shown = ("tokens_per_s", "step_ms", "peak_bytes")
    runs.main("train", work, __doc__, argv, usual=runs.USUAL, steps=8, shown=shown)


if __name__ == "__main__":
    main()
