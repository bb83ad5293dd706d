"""Measure the linear head: its speed for the memory it may take, other ways to call it, dW's error.

    PYTHONPATH=src python -m bench.head [--peer DIR] [--peer-cute DIR] [--peer-torch DIR]
        [--shape M,H,V ...]

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

from . import calls, contest, head_tables, machine, ops, ops_tables, peers

CASE = "fused_linear_cross_entropy"
SHAPES = (
    (8192, 4096, 128256),
    (16384, 3584, 152064),
    (8192, 2304, 256000),
    (4096, 2048, 128256),
    (2048, 4096, 128256),
    (32768, 2048, 128256),
    (512, 4096, 128256),
)
BUDGETS = (1.05, 1.15, 1.3, 1.5, 2.0, 3.0)  # peak memory, in units of dX and dW
RAISED = 6  # the target's logit, in the third kind of targets
TARGETS = ("uniform", "Zipf", f"Zipf, h + {RAISED}·W[target]")
CHECKED = ("eager", "ours", "ours fp32", "ours 1.15", "ours 1.5")  # dW is compared with fp64


# ---- inputs ----


def gradient_bytes(M: int, H: int, V: int) -> int:
    """Return the bytes of dX and dW, which any head returns."""
    return 2 * H * (M + V)


def draw_inputs(
    M: int, H: int, V: int, targets: str = "uniform", ignored: int = 0, device: str = "cuda"
) -> dict:
    """Draw h ~ N(0, 1), W ~ N(0, 1/H) and targets, of which ``ignored`` are -100.

    A Zipf-like target is below n with probability log(n + 1) / log(V + 1)."""
    torch.manual_seed(0)
    h = torch.randn(M, H, device=device)
    w = torch.randn(V, H, device=device) / H**0.5
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
    """Draw inputs that need no gradient. ``tag``, a zero, gives the loss a graph whose backward is
    nothing: a `Contestant` has one."""
    inputs = {name: tensor.detach() for name, tensor in draw_inputs(*shape, device=device).items()}
    return inputs | {"tag": torch.zeros((), device=device, requires_grad=True)}


def with_ignored(M: int, H: int, V: int, device: str = "cuda") -> dict:
    """Draw inputs with ``half``: the target, but every second row, on average, is ignored."""
    inputs = draw_inputs(M, H, V, device=device)
    ignored = torch.rand(M, device=device) >= 0.5
    return inputs | {"half": inputs["target"].where(~ignored, -100)}


# ---- contestants ----


def pytorch(fn: Callable) -> dict[str, Callable]:
    return {"eager": fn, "compile": torch.compile(fn, dynamic=False)}


def training(*shape: int) -> dict[str, Callable]:
    """Return the heads in training. A budget is the memory that ours may take beyond the gradients
    that it returns."""
    our_head = functional.liger_fused_linear_cross_entropy
    fns = pytorch(calls.PLAIN[CASE]) | {"ours": our_head}
    for budget in BUDGETS:
        memory = int((budget - 1) * gradient_bytes(*shape))
        fns[f"ours {budget:g}"] = partial(our_head, memory=memory)
    fns["ours fp32"] = partial(our_head, memory="auto", accum_dtype=torch.float32)
    return fns


def no_grad(fn: Callable) -> Callable:
    """Return a function that computes the loss without gradients, and adds ``tag`` to it."""

    def call(tag, **inputs):
        with torch.no_grad():
            loss = fn(**inputs)
        return loss + tag

    return call


def loss_alone(*shape: int) -> dict[str, Callable]:
    fns = pytorch(calls.PLAIN[CASE]) | {"ours": functional.liger_fused_linear_cross_entropy}
    return {name: no_grad(fn) for name, fn in fns.items()}


def log_probabilities(*shape: int) -> dict[str, Callable]:
    M, _, V = shape

    def reference(input, weight, target):
        return -F.cross_entropy(F.linear(input, weight).float(), target, reduction="none")

    def our_log_probs(input, weight, target):
        return functional.token_log_probs(input, weight, target)

    def with_kept_logits(input, weight, target):
        return functional.token_log_probs(input, weight, target, memory=2 * V * (M + 64))

    return {**pytorch(reference), "ours": our_log_probs, "ours kept": with_kept_logits}


def ignoring(*shape: int) -> dict[str, Callable]:
    our_head = functional.liger_fused_linear_cross_entropy

    def none_ignored(input, weight, target, half):
        return our_head(input, weight, target)

    def half_ignored(input, weight, target, half):
        return our_head(input, weight, half, drop_ignored=False)

    def half_dropped(input, weight, target, half):
        return our_head(input, weight, half, drop_ignored=True)

    return {
        "none ignored": none_ignored,
        "half ignored": half_ignored,
        "half dropped": half_dropped,
    }


class Way(NamedTuple):
    """One way to call an operator."""

    fns: Callable[..., dict[str, Callable]]  # contestants at a shape
    kinds: tuple[str, ...]  # what is timed: forward, backward, both
    operations: int  # of the first kind, in units of M·H·V
    inputs: Callable[..., dict] = draw_inputs
    case: str | None = None  # the name that peers have for it


WAYS = {
    "training": Way(training, ("both",), 6, case=CASE),
    "loss alone": Way(loss_alone, ("forward",), 2, without_gradients),
    # the logits are made twice, but those that are kept
    "log-probabilities": Way(
        log_probabilities, ("both", "forward", "backward"), 8, case="token_log_probs"
    ),
    "ignoring": Way(ignoring, ("both",), 6, with_ignored),
}


# ---- measurements ----


class LocalWorker:
    """Answers requests as an `ops.Worker` does, in this process."""

    def __init__(self, ceilings: machine.Ceilings, device: str = "cuda", ways: dict | None = None):
        self.ceilings = ceilings
        self.device = device
        self.ways = WAYS if ways is None else ways

    def ask(self, request: dict, limit: float) -> dict:
        if limit <= 0:
            return {"error": "no time left"}
        torch._dynamo.reset()
        way = self.ways[request["way"]]
        shape = request["shape"]
        try:
            inputs = way.inputs(*shape, device=self.device)
            fns = way.fns(*shape)
            reply = contest.contest(
                {name: fns[name] for name in request["contestants"]},
                inputs,
                request["kinds"],
                self.ceilings,
                request["against"],
                request["seconds"],
            )
            if request["case"] in peers.CASES:
                reply["inputs"] = contest.described(inputs)
            return reply
        except Exception as error:  # it stands in the table
            return {"error": contest.summary(error)}
        finally:
            torch.cuda.empty_cache()  # the peer is next


def plan(shapes: list[tuple[int, int, int]], peer_names: list[str], seconds: float) -> list[dict]:
    """Return a request for every shape in training, and for the first in every other way."""
    requests = [make_request("training", shape, peer_names, seconds) for shape in shapes]
    for way in WAYS:
        if way != "training":
            requests.append(make_request(way, shapes[0], peer_names, seconds))
    return requests


def make_request(
    name: str, shape: tuple[int, int, int], peer_names: list[str], seconds: float
) -> dict:
    way = WAYS[name]
    M, H, V = shape
    peers_of_way = [peer for peer in peer_names if way.case in peers.LINES[peer]]
    return {
        "case": way.case or name,
        "way": name,
        "shape": list(shape),
        "kinds": list(way.kinds),
        "against": "matmul",
        "seconds": seconds,
        "contestants": [*way.fns(*shape), *peers_of_way],
        "traffic": None,
        "flops": way.operations * M * H * V,
        "gradient_bytes": gradient_bytes(*shape),
    }


def run_requests(
    kind: str,
    requests: list[dict],
    ways: dict[str, Way],
    args: argparse.Namespace,
    line: Callable[[dict], str],
    versions: dict[str, str] | None = None,
) -> dict:
    """Measure a row for each request, here and by the peers. Every row is saved, and printed by
    ``line``, when it is there. ``versions``: of `tables.VERSIONS`, beside the peers'. Returns the
    data of the results file."""
    end = time.monotonic() + args.limit

    def time_left() -> float:
        return end - time.monotonic()

    data = {"machine": machine.describe(), "dtype": "bfloat16", "rows": []} | (versions or {})
    peer_workers, peer_versions = ops.start_peers(args, time_left)
    data |= peer_versions
    ceilings = machine.Ceilings(machine.Stopwatch())
    workers = {"ours": LocalWorker(ceilings, ways=ways)} | peer_workers
    try:
        for request in requests:
            names = request.pop("contestants")
            row = ops.measure(request, names, workers, 1, time_left)
            data["rows"].append(row)
            machine.save(kind, data, args.out)
            print(line(row), flush=True)
    finally:
        for worker in peer_workers.values():
            worker.stop()
    return data


# ---- the error of dW ----


def exact(
    input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, rows: int = 1024
) -> tuple[float, torch.Tensor]:
    """Return the mean loss and dW in fp64, computed ``rows`` rows at a time."""
    h = input.detach().double()
    w = weight.detach().double().requires_grad_()
    num_targets = (target >= 0).sum()
    loss = 0.0
    for h_chunk, target_chunk in zip(h.split(rows), target.split(rows), strict=True):
        logits = F.linear(h_chunk, w)
        term = F.cross_entropy(logits, target_chunk, reduction="sum") / num_targets
        term.backward()
        loss += term.item()
    return loss, w.grad


def errors(M: int, H: int, V: int, device: str = "cuda") -> dict:
    """Return dW's error against fp64, |dW - exact| / |exact|, for each kind of targets.

    Some rows are ignored, so that the mean is over no power of two."""
    ignored = 3 * M // 128
    fns = training(M, H, V)
    figures = {}
    for targets in TARGETS:
        inputs = draw_inputs(M, H, V, targets, ignored, device)
        loss, exact_dw = exact(**inputs)
        norm = exact_dw.norm()
        error_of = {}
        for name in CHECKED:
            (dw,) = torch.autograd.grad(fns[name](**inputs), inputs["weight"])
            error_of[name] = ((dw.double() - exact_dw).norm() / norm).item()
        figures[targets] = {"loss": loss, "errors": error_of}
    return {"shape": [M, H, V], "ignored": ignored, "targets": figures}


# ---- the command line ----


def shape(text: str) -> tuple[int, int, int]:
    """Parse "8192,4096,128256"."""
    M, H, V = map(int, text.split(","))
    return M, H, V


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.add_options(parser)
    parser.add_argument(
        "--shape",
        type=shape,
        nargs="+",
        metavar="M,H,V",
        default=SHAPES,
        help="tokens, channels, classes",
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of samples for a shape or a way of calling (3)"
    )
    parser.add_argument(
        "--limit", type=float, default=540, help="seconds after which nothing more is timed (540)"
    )
    parser.add_argument("--out", help="JSON file (bench/results/head.json)")
    args = parser.parse_args(argv)
    machine.require_gpu()

    requests = plan(args.shape, peers.contestants(args), args.seconds)
    data = run_requests("head", requests, WAYS, args, head_tables.head_line)
    data["errors"] = errors(*args.shape[0])
    machine.save("head", data, args.out)
    slower = ops_tables.behind(head_tables.training_rows(data))
    print("\n" + head_tables.head(data) + "\n\n" + slower)


if __name__ == "__main__":
    main()
