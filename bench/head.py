"""Measure the linear head: its speed for the memory it may take, other ways of calling it, the
error of dW.

    PYTHONPATH=src python -m bench.head [--peer DIR] [--peer-cute DIR] [--peer-torch DIR] [--shape
    M,H,V ...]

M tokens, H channels, V classes, in bf16, forward and backward together. PyTorch, the same compiled,
and ours with its defaults and with budgets of memory take turns in this process, beside the
ceiling. The ``--peer`` options name directories; what lies there runs right after them in a process
of its own, beside the ceiling there (see `bench.ops`). At the first shape also: the loss without
gradients, token log-probabilities, ignored rows, and dW against fp64."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from liger_kernel.ops import functional

from . import calls, contest, machine, ops, peers, report

CASE = "fused_linear_cross_entropy"
SHAPES = (
    (8192, 4096, 128256), (16384, 3584, 152064), (8192, 2304, 256000), (4096, 2048, 128256), (2048, 4096, 128256),
    (32768, 2048, 128256), (512, 4096, 128256),
)  # fmt: skip
BUDGETS = (1.05, 1.15, 1.3, 1.5, 2.0, 3.0)  # peak memory, in units of dX and dW
RAISED = 6  # the target's logit, in the third kind of data
TARGETS = ("uniform", "Zipf", f"Zipf, h + {RAISED}·W[target]")
CHECKED = ("eager", "ours", "ours fp32", "ours 1.15", "ours 1.5")  # whose dW is held against fp64


def gradient_bytes(M: int, H: int, V: int) -> int:
    """Of dX and dW, which any head returns."""
    return 2 * H * (M + V)


def drawn(
    M: int, H: int, V: int, targets: str = "uniform", ignored: int = 0, device: str = "cuda"
) -> dict:
    """h ~ N(0, 1), W ~ N(0, 1/H); a Zipf-like target is below n with probability log(n + 1) / log(V
    + 1)."""
    torch.manual_seed(0)
    h, w = torch.randn(M, H, device=device), torch.randn(V, H, device=device) / H**0.5
    if targets == "uniform":
        target = torch.randint(V, (M,), device=device)
    else:
        target = (V + 1) ** torch.rand(M, dtype=torch.float64, device=device)
        target = target.long().clamp(max=V) - 1
    if targets == TARGETS[2]:
        h += RAISED * w[target]
    target[torch.randperm(M, device=device)[:ignored]] = -100
    return {
        "input": h.bfloat16().requires_grad_(),
        "weight": w.bfloat16().requires_grad_(),
        "target": target,
    }


def without_gradients(*shape: int, device: str = "cuda") -> dict:
    """``tag``, a zero, gives the loss a graph whose backward is nothing: a `Contestant` has one."""
    inputs = {name: t.detach() for name, t in drawn(*shape, device=device).items()}
    return inputs | {"tag": torch.zeros((), device=device, requires_grad=True)}


def with_ignored(M: int, H: int, V: int, device: str = "cuda") -> dict:
    """``half``: the target, but every second row, on average, is ignored."""
    inputs = drawn(M, H, V, device=device)
    return inputs | {"half": inputs["target"].where(torch.rand(M, device=device) < 0.5, -100)}


def plain(fn: Callable) -> dict[str, Callable]:
    return {"eager": fn, "compile": torch.compile(fn, dynamic=False)}


def training(*shape: int) -> dict[str, Callable]:
    """The head in training, with every budget: what it may take beyond the gradients that it
    returns."""
    ours = functional.liger_fused_linear_cross_entropy
    return {
        **plain(calls.PLAIN[CASE]),
        "ours": ours,
        **{
            f"ours {b:g}": partial(ours, memory=int((b - 1) * gradient_bytes(*shape)))
            for b in BUDGETS
        },
        "ours fp32": partial(ours, memory="auto", accum_dtype=torch.float32),
    }


def loss_alone(*shape: int) -> dict[str, Callable]:
    def no_grad(fn):
        def call(tag, **inputs):
            with torch.no_grad():
                loss = fn(**inputs)
            return loss + tag

        return call

    fns = plain(calls.PLAIN[CASE]) | {"ours": functional.liger_fused_linear_cross_entropy}
    return {name: no_grad(fn) for name, fn in fns.items()}


def log_probabilities(*shape: int) -> dict[str, Callable]:
    def reference(input, weight, target):
        return -F.cross_entropy(F.linear(input, weight).float(), target, reduction="none")

    M, _, V = shape
    ours = functional.token_log_probs
    return {
        **plain(reference),
        "ours": lambda input, weight, target: ours(input, weight, target),
        "ours kept": lambda input, weight, target: ours(
            input, weight, target, memory=2 * V * (M + 64)
        ),
    }


def ignoring(*shape: int) -> dict[str, Callable]:
    ours = functional.liger_fused_linear_cross_entropy
    return {
        "none ignored": lambda input, weight, target, half: ours(input, weight, target),
        "half ignored": lambda input, weight, target, half: ours(
            input, weight, half, drop_ignored=False
        ),
        "half dropped": lambda input, weight, target, half: ours(
            input, weight, half, drop_ignored=True
        ),
    }


class Way(NamedTuple):
    """To call the head: contestants at a shape, what is timed, how many times M·H·V operations the
    first of that takes, inputs, the name that peers have for it."""

    fns: Callable[..., dict[str, Callable]]
    kinds: tuple[str, ...]
    operations: int
    inputs: Callable[..., dict] = drawn
    case: str | None = None


WAYS = {
    "training": Way(training, ("both",), 6, case=CASE),
    "loss alone": Way(loss_alone, ("forward",), 2, without_gradients),
    # the logits are made twice, but those that are kept
    "log-probabilities": Way(
        log_probabilities, ("both", "forward", "backward"), 8, case="token_log_probs"
    ),
    "ignoring": Way(ignoring, ("both",), 6, with_ignored),
}


class Here:
    """Asked as an `ops.Worker` is; what answers is this process."""

    def __init__(self, ceilings: machine.Ceilings, device: str = "cuda", ways: dict | None = None):
        self.ceilings, self.device, self.ways = ceilings, device, WAYS if ways is None else ways

    def ask(self, request: dict, limit: float) -> dict:
        if limit <= 0:
            return {"error": "no time left"}
        torch._dynamo.reset()
        way, shape = self.ways[request["way"]], request["shape"]
        try:
            inputs, fns = way.inputs(*shape, device=self.device), way.fns(*shape)
            reply = contest.contest(
                {name: fns[name] for name in request["contestants"]},
                inputs,
                request["kinds"],
                self.ceilings,
                request["against"],
                request["seconds"],
            )
            return reply | (
                {"inputs": contest.described(inputs)} if request["case"] in peers.CASES else {}
            )
        except Exception as e:  # it stands in the table
            return {"error": contest.summary(e)}
        finally:
            torch.cuda.empty_cache()  # the peer is next


def plan(shapes: list[tuple[int, int, int]], others: list[str], seconds: float) -> list[dict]:
    """A request for every shape in training, and for the first in every other way."""
    asked = [("training", shape) for shape in shapes] + [
        (way, shapes[0]) for way in WAYS if way != "training"
    ]
    return [
        {
            "case": WAYS[way].case or way,
            "way": way,
            "shape": list(shape),
            "kinds": list(WAYS[way].kinds),
            "against": "matmul",
            "seconds": seconds,
            "contestants": [
                *WAYS[way].fns(*shape),
                *(n for n in others if WAYS[way].case in peers.LINES[n]),
            ],
            "traffic": None,
            "flops": WAYS[way].operations * shape[0] * shape[1] * shape[2],
            "gradient_bytes": gradient_bytes(*shape),
        }
        for way, shape in asked
    ]


def exact(
    input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, rows=1024
) -> tuple[float, torch.Tensor]:
    """The mean loss and dW in fp64, ``rows`` rows at a time."""
    h, w, loss = input.detach().double(), weight.detach().double().requires_grad_(), 0.0
    for part, y in zip(h.split(rows), target.split(rows), strict=True):
        term = F.cross_entropy(F.linear(part, w), y, reduction="sum") / (target >= 0).sum()
        term.backward()
        loss += term.item()
    return loss, w.grad


def errors(M: int, H: int, V: int, device: str = "cuda") -> dict:
    """Of dW, |dW - exact| / |exact|. Some rows are ignored, so that the mean is over no power of two."""
    ignored, fns = 3 * M // 128, training(M, H, V)
    found = {"shape": [M, H, V], "ignored": ignored, "targets": {}}
    for kind in TARGETS:
        inputs = drawn(M, H, V, kind, ignored, device)
        loss, want = exact(**inputs)
        norm = want.norm()
        found["targets"][kind] = of = {"loss": loss, "errors": {}}
        for name in CHECKED:
            (dw,) = torch.autograd.grad(fns[name](**inputs), inputs["weight"])
            of["errors"][name] = ((dw.double() - want).norm() / norm).item()
    return found


def shape(text: str) -> tuple[int, int, int]:
    """ "8192,4096,128256" as numbers."""
    M, H, V = map(int, text.split(","))
    return M, H, V


def measured(kind: str, requests: list[dict], ways: dict, args, line: Callable) -> dict:
    """A row for each request, asked here and of the peers; every row is saved and printed when it
    is there."""
    end = time.monotonic() + args.limit
    left = lambda: end - time.monotonic()  # noqa: E731
    data = {"machine": machine.describe(), "dtype": "bfloat16", "rows": []}
    others, versions = ops.started(args, left)
    workers, data = (
        {"ours": Here(machine.Ceilings(machine.Stopwatch()), ways=ways)} | others,
        data | versions,
    )
    try:
        for request in requests:
            names = request.pop("contestants")
            data["rows"].append(ops.measure(request, names, workers, 1, left))
            machine.save(kind, data, args.out)
            print(line(data["rows"][-1]), flush=True)
    finally:
        for worker in others.values():
            worker.stop()
    return data


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.add_options(p)
    p.add_argument(
        "--shape",
        type=shape,
        nargs="+",
        metavar="M,H,V",
        default=SHAPES,
        help="tokens, channels, classes",
    )
    p.add_argument(
        "--seconds", type=float, default=3.0, help="of samples for a shape or a way of calling (3)"
    )
    p.add_argument(
        "--limit", type=float, default=540, help="seconds after which nothing more is timed (540)"
    )
    p.add_argument("--out", help="JSON file (bench/results/head.json)")
    args = p.parse_args(argv)
    machine.require_gpu()

    data = measured(
        "head",
        plan(args.shape, peers.contestants(args), args.seconds),
        WAYS,
        args,
        report.head_line,
    )
    data["errors"] = errors(*args.shape[0])
    machine.save("head", data, args.out)
    print("\n" + report.head(data) + "\n\n" + report.behind(report.in_training(data)))


if __name__ == "__main__":
    main()
