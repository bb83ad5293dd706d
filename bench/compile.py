"""Time training steps under torch.compile and in CUDA graphs: Hugging Face's models, and ours.

    PYTHONPATH=src python -m bench.compile [--runs large|small|MODEL@SEQUENCExBATCH,...]

As `bench.train`: the same models, text, seeds and optimizer, each contestant in a process of its
own. Those that say "graphs" are compiled with ``mode="reduce-overhead"``; "captured" is a whole
step in CUDA graphs: one of forward and backward of a micro-batch, one of the optimizer. Of these
another step, of 4 accumulated micro-batches, shows what gradients hold, and the profiler says how
long the GPU had work in a replay."""

from __future__ import annotations

import torch

from . import breakdown, runs, train
from .runs import CONTESTANTS

WARMUP = 3


def captured(model, forward, data: torch.Tensor):
    """Capture a training step after some warm-up steps. Returns ``step(*batches)``, which replays
    it on copies of the batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    ids = data[0].clone()

    def accumulate():
        loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def update():
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # the gradients stay where the graphs know them

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            accumulate()
            update()
    torch.cuda.current_stream().wait_stream(stream)
    forward_backward_graph = torch.cuda.CUDAGraph()
    update_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward_backward_graph):
        loss = accumulate()
    with torch.cuda.graph(update_graph, pool=forward_backward_graph.pool()):
        update()

    def replay(*batches):
        for batch in batches:
            ids.copy_(batch)
            forward_backward_graph.replay()
        update_graph.replay()
        return loss.clone()

    def figures():
        breakdown.profiled(replay, data[:1])  # the profiler's own start
        events = breakdown.profiled(replay, data[:WARMUP])
        return {"busy_ms": breakdown.busy(events) / 1e3 / WARMUP}

    replay.figures = figures
    return replay


def work(
    contestant: str, name: str, sequence: int, batch: int, warmup: int, timed: int, device: str
) -> dict:
    """Measure one contestant, in this process."""
    is_captured = contestant.endswith("captured")
    return train.work(
        contestant,
        name,
        sequence,
        batch,
        warmup,
        timed,
        device,
        make_step=captured if is_captured else None,
        accumulates=is_captured,
    )


def main(argv: list[str] | None = None) -> None:
    shown = ("step_ms", "peak_bytes", "busy_ms", "accumulated_peak_bytes", "losses")
    usual = [name for name in CONTESTANTS if name != "peer"]
    runs.main("compile", work, __doc__, argv, usual=usual, steps=8, shown=shown, known=CONTESTANTS)


if __name__ == "__main__":
    main()
