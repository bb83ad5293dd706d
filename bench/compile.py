"""Time training steps under torch.compile and in CUDA graphs, beside eager ones: Hugging Face's models, and ours.

    PYTHONPATH=src python -m bench.compile [--runs large|small|MODEL@SEQUENCExBATCH,...]

As `bench.train`: the same models, text, seeds and optimizer, each contestant in a process of its own. Those that say
"graphs" are compiled with ``mode="reduce-overhead"``; "captured" is a whole step, optimizer and all, in one CUDA graph.
"""

from __future__ import annotations

import torch

from . import runs, train
from .runs import CONTESTANTS

WARMUP = 3


def captured(model, called, data: torch.Tensor):
    """``step(batch)``: a replay of the captured step of a model that has done some, on a copy of the batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    ids = data[0].clone()

    def step():
        loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay(batch):
        ids.copy_(batch)
        graph.replay()
        return loss.clone()

    return replay


def work(contestant: str, name: str, sequence: int, batch: int, warmup: int, timed: int, device: str) -> dict:
    make = captured if contestant.endswith("captured") else None
    return train.work(contestant, name, sequence, batch, warmup, timed, device, make=make, accumulates=False)


def main(argv: list[str] | None = None) -> None:
    shown = ("step_ms", "peak_bytes", "losses")
    usual = [name for name in CONTESTANTS if name != "peer"]
    runs.main("compile", work, __doc__, argv, usual=usual, steps=8, shown=shown, known=CONTESTANTS)


if __name__ == "__main__":
    main()
