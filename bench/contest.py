"""One operator at one shape: the implementations that this process has, timed against each other
and the ceilings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .machine import Ceilings, Stopwatch, interleave, kept_bytes, median, peak_bytes

KINDS = ("forward", "backward", "both")


class Produced(torch.autograd.Function):
    """A copy that only the graph holds, like a layer's output in training. Its backward costs
    nothing."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy


class Contestant:
    """``fn`` on ``inputs``. Every sample has a graph of its own, freed by its backward, as in a
    training step.

    So an operator that reuses memory in backward may do so here: the inputs are `Produced` anew,
    and neither they nor the graph is kept for a second time. What is called weight or bias is a
    parameter, which stays."""

    def __init__(self, fn: Callable, inputs: dict):
        self.fn, self.inputs = fn, inputs
        self.leaves = [
            t for t in inputs.values() if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        self.dys = [
            torch.ones_like(o) if o.dim() == 0 else torch.randn_like(o) for o in self.outputs()
        ]

    def produced(self) -> dict:
        def one(name, t):
            parameter = name == "w" or name.endswith(("weight", "bias"))
            return (
                Produced.apply(t)
                if isinstance(t, torch.Tensor) and t.requires_grad and not parameter
                else t
            )

        return {name: one(name, t) for name, t in self.inputs.items()}

    def outputs(self) -> list[torch.Tensor]:
        return differentiable(self.fn(**self.produced()))

    def gradients(self, outs, dys) -> None:
        torch.autograd.grad(outs, self.leaves, dys)

    def sample(self, kind: str, stopwatch: Stopwatch) -> float:
        if kind == "forward":
            return stopwatch(lambda given: self.fn(**given.pop()), self.produced)
        dys = [dy.clone() for dy in self.dys]  # one that may be overwritten, too
        if kind == "backward":
            return stopwatch(lambda given: self.gradients(given.pop(), dys), self.outputs)
        return stopwatch(
            lambda given: self.gradients(differentiable(self.fn(**given.pop())), dys), self.produced
        )

    def kept(self) -> int:
        """Bytes that stay between forward and backward: what is saved, and what comes out."""
        return kept_bytes(lambda: self.fn(**self.produced()))

    def peak(self) -> int:
        """Bytes beyond inputs and incoming gradients, forward and backward together."""
        given, dys = [self.produced()], [dy.clone() for dy in self.dys]
        return peak_bytes(lambda: self.gradients(differentiable(self.fn(**given.pop())), dys))


def untimed(work: Callable, prepare: Callable) -> None:
    """In a stopwatch's place, to compile and warm up."""
    work([prepare()])


def differentiable(out) -> list[torch.Tensor]:
    return [
        o
        for o in (out if isinstance(out, tuple) else (out,))
        if isinstance(o, torch.Tensor) and o.requires_grad
    ]


def contest(
    fns: dict[str, Callable], inputs: dict, kinds, ceilings: Ceilings, against: str, seconds: float
) -> dict:
    """Figures of each of ``fns``, or what stopped it, and the rate of the ceiling ``against`` in
    between."""
    figures, entrants = {}, {}
    for name, fn in fns.items():
        try:
            entrant = Contestant(fn, inputs)
            for kind in kinds * 2:
                entrant.sample(kind, untimed)
            figures[name] = {"peak_bytes": entrant.peak(), "kept_bytes": entrant.kept(), "ms": {}}
            entrants[name] = entrant
        except Exception as e:  # whatever stops one contestant stands in its place in the table
            figures[name] = {"error": summary(e)}
        torch.cuda.empty_cache()
    ceiling = []
    for kind in kinds:
        turns = {
            n: lambda e=e, kind=kind: e.sample(kind, ceilings.stopwatch)
            for n, e in entrants.items()
        }
        samples = interleave(turns | {"ceiling": getattr(ceilings, against)}, seconds / len(kinds))
        ceiling += samples.pop("ceiling")
        for name, taken in samples.items():
            figures[name]["ms"][kind] = median(taken)
    return {"figures": figures, "ceiling": ceilings.rates({against: ceiling})[against]}


def summary(e: BaseException) -> str:
    """An exception as one line of a table."""
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0][:200] if lines else ''}"


def described(inputs: dict) -> dict:
    """The inputs without their values, so that another process can draw its own."""

    def one(t):
        if not isinstance(t, torch.Tensor):
            return t
        d = {
            "shape": list(t.shape),
            "stride": list(t.stride()),
            "dtype": str(t.dtype).removeprefix("torch."),
        }
        if t.is_floating_point() or t.is_complex():
            d["std"] = float(t.detach().abs().square().mean().sqrt())  # of one number, too
        else:
            d["range"] = [int(t.min()), int(t.max()) + 1]
        return d | {"requires_grad": t.requires_grad}

    return {name: one(t) for name, t in inputs.items()}


def drawn(description: dict, device: str = "cuda") -> dict:
    """Inputs with that layout, at random: normal floats, uniform integers."""

    def one(d):
        if not isinstance(d, dict):
            return d
        dtype = getattr(torch, d["dtype"])
        shape = [
            1 if stride == 0 else size for size, stride in zip(d["shape"], d["stride"], strict=True)
        ]
        t = torch.empty_strided(shape, d["stride"], dtype=dtype, device=device)
        t = t.random_(*d["range"]) if "range" in d else t.normal_(std=d["std"])
        return t.expand(d["shape"]).requires_grad_(d["requires_grad"])

    return {name: one(d) for name, d in description.items()}
