"""Time whole training steps of real models: Hugging Face as shipped, compiled, with the published
liger-kernel, ours.

    PYTHONPATH=src python -m bench.train [--peer DIR] [--runs required|more|small|MODEL@SEQUENCExBATCH,...]

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


class Marks:
    """Points in the GPU's time, without waiting for it; in the host's where there is no GPU."""

    def __init__(self, device: str):
        self.gpu, self.points = device == "cuda", []

    def add(self) -> None:
        if self.gpu:
            self.points.append(torch.cuda.Event(enable_timing=True))
            self.points[-1].record()
        else:
            self.points.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Milliseconds from each point to the next."""
        pairs = zip(self.points, self.points[1:], strict=False)
        if not self.gpu:
            return [1e3 * (b - a) for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairs]


def stepping(model, called, lr: float = 1e-4):
    """A function that trains ``model`` by one step, calling ``called`` on each batch, and returns
    the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def step(*batches: torch.Tensor) -> torch.Tensor:
        for batch in batches:
            loss = called(input_ids=batch, labels=batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()  # the next step may be written over a CUDA graph's

    return step


def clocked(step, data: torch.Tensor) -> tuple[list[float], list[float]]:
    """A step on each batch of ``data``: losses, and milliseconds of each step."""
    marks, losses = Marks(data.device.type), []
    marks.add()
    for batch in data:
        losses.append(step(batch))
        marks.add()
    gaps = marks.gaps()
    return torch.stack(losses).tolist(), gaps


def steps(model, called, data: torch.Tensor, lr: float = 1e-4) -> tuple[list[float], list[float]]:
    """Train ``model`` from the start."""
    return clocked(stepping(model, called, lr), data)


def work(
    contestant: str,
    name: str,
    sequence: int,
    batch: int,
    warmup: int,
    timed: int,
    device: str,
    make: Callable | None = None,
    accumulates: bool = True,
) -> dict:
    """One contestant, in this process. ``make(model, called, data)`` gives another step than
    `stepping`."""
    described = runs.described()
    model = models.build(name, device, torch.bfloat16)
    called, patched = CONTESTANTS[contestant](model)
    data = text.batches(sequence, batch, warmup + timed).to(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = stepping(model, called) if make is None else make(model, called, data)
    losses, ms = clocked(step, data)
    peak = peak_bytes(device)
    accumulated = peak_of_accumulating(step, data, device) if accumulates else None
    median = machine.median(ms[warmup:])
    figures = {
        "tokens_per_s": sequence * batch / median * 1e3,
        "step_ms": median,
        "steps_ms": ms[warmup:],
        "losses": losses,
    }
    figures |= {"peak_bytes": peak, "accumulated_peak_bytes": accumulated, "patched": patched}
    figures["attention"] = model.config._attn_implementation
    figures |= step.figures() if make and hasattr(step, "figures") else {}
    del model, called, step
    if device == "cuda":
        figures["ceilings"] = hot_ceilings()
    return {"machine": described, "figures": figures}


def peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def peak_of_accumulating(step, data: torch.Tensor, device: str) -> int:
    """Of one more step with the gradients of several batches: those of the first stay while the
    others are made."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    step(*(data[i % len(data)] for i in range(ACCUMULATED)))
    return peak_bytes(device)


def hot_ceilings() -> dict:
    """The ceilings of the card as the training steps left it."""
    torch.cuda.empty_cache()
    ceilings = machine.Ceilings(machine.Stopwatch())
    samples = machine.interleave({"matmul": ceilings.matmul, "copy": ceilings.copy}, 0.3)
    return ceilings.rates(samples)


def main(argv: list[str] | None = None) -> None:
    shown = ("tokens_per_s", "step_ms", "peak_bytes")
    runs.main("train", work, __doc__, argv, usual=runs.USUAL, steps=8, shown=shown)


if __name__ == "__main__":
    main()
