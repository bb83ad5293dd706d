"""Time one operator at one shape: the implementations that this process has, and the ceilings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
    """Calls ``fn`` on ``inputs``. Every sample has a graph of its own, freed by its backward, as in
    a training step.

    So an operator that reuses memory in backward may do so here: the inputs are `Produced` anew,
    and neither they nor the graph is kept for a second time. What is called weight or bias is a
    parameter, which stays."""

    def __init__(self, fn: Callable, inputs: dict):
        self.fn = fn
        self.inputs = inputs
        self.leaves = [value for value in inputs.values() if needs_grad(value)]
        self.dys = [
            torch.ones_like(output) if output.dim() == 0 else torch.randn_like(output)
            for output in self.outputs()
        ]

    def produced(self) -> dict:
        """Return the inputs, those that are no parameters as `Produced` anew."""
        result = {}
        for name, value in self.inputs.items():
            is_parameter = name == "w" or name.endswith(("weight", "bias"))
            fresh = needs_grad(value) and not is_parameter
            result[name] = Produced.apply(value) if fresh else value
        return result

    def outputs(self) -> list[torch.Tensor]:
        """Call ``fn``, and return its outputs that have a gradient."""
        return differentiable(self.fn(**self.produced()))

    def gradients(self, outs, dys) -> None:
        torch.autograd.grad(outs, self.leaves, dys)

    def sample(self, kind: str, stopwatch: Stopwatch) -> float:
        """Return the milliseconds of "forward", "backward" or "both"."""
        if kind == "forward":
            return stopwatch(lambda inputs: self.fn(**inputs.pop()), self.produced)
        dys = [dy.clone() for dy in self.dys]  # a backward may overwrite its incoming gradient
        if kind == "backward":
            return stopwatch(lambda outputs: self.gradients(outputs.pop(), dys), self.outputs)
        return stopwatch(lambda inputs: self.forward_backward(inputs, dys), self.produced)

    def forward_backward(self, inputs: list[dict], dys: list[torch.Tensor]) -> None:
        """Take the inputs from a list, so that nobody else holds them."""
        self.gradients(differentiable(self.fn(**inputs.pop())), dys)

    def kept(self) -> int:
        """Return the bytes that stay between forward and backward: saved tensors and outputs."""
        return kept_bytes(lambda: self.fn(**self.produced()))

    def peak(self) -> int:
        """Return the peak bytes beyond inputs and incoming gradients, forward and backward
        together."""
        inputs = [self.produced()]
        dys = [dy.clone() for dy in self.dys]
        return peak_bytes(lambda: self.forward_backward(inputs, dys))


def untimed(work: Callable, prepare: Callable) -> None:
    """Do the work without timing it, to compile and warm up; takes a stopwatch's place."""
    work([prepare()])


def needs_grad(value) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def differentiable(result) -> list[torch.Tensor]:
    """Return the outputs of an operator that have a gradient."""
    outputs = result if isinstance(result, tuple) else (result,)
    return [output for output in outputs if needs_grad(output)]


def contest(
    fns: dict[str, Callable], inputs: dict, kinds, ceilings: Ceilings, against: str, seconds: float
) -> dict:
    """Return the figures of each of ``fns``, or the error that stopped it, and the rate of the
    ceiling ``against`` in between."""
    figures = {}
    contestants = {}
    for name, fn in fns.items():
        try:
            contestant = Contestant(fn, inputs)
            for kind in kinds * 2:
                contestant.sample(kind, untimed)
            figures[name] = {
                "peak_bytes": contestant.peak(),
                "kept_bytes": contestant.kept(),
                "ms": {},
            }
            contestants[name] = contestant
        except Exception as error:  # it stands in the contestant's place in the table
            figures[name] = {"error": summary(error)}
        torch.cuda.empty_cache()
    ceiling_samples = []
    for kind in kinds:
        turns = {
            name: partial(contestant.sample, kind, ceilings.stopwatch)
            for name, contestant in contestants.items()
        }
        turns["ceiling"] = getattr(ceilings, against)
        samples = interleave(turns, seconds / len(kinds))
        ceiling_samples += samples.pop("ceiling")
        for name, ms in samples.items():
            figures[name]["ms"][kind] = median(ms)
    return {"figures": figures, "ceiling": ceilings.rates({against: ceiling_samples})[against]}


def summary(error: BaseException) -> str:
    """Return an exception as one line of a table."""
    lines = str(error).strip().splitlines()
    first_line = lines[0][:200] if lines else ""
    return f"{type(error).__name__}: {first_line}"


def described(inputs: dict) -> dict:
    """Describe the inputs without their values, so that another process can draw its own."""
    return {
        name: describe_tensor(value) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


def describe_tensor(tensor: torch.Tensor) -> dict:
    """Return layout, dtype and the distribution of the values."""
    description = {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    if tensor.is_floating_point() or tensor.is_complex():
        # the root of the mean square, which a tensor of one number has, too
        description["std"] = float(tensor.detach().abs().square().mean().sqrt())
    else:
        description["range"] = [int(tensor.min()), int(tensor.max()) + 1]
    description["requires_grad"] = tensor.requires_grad
    return description


def drawn(description: dict, device: str = "cuda") -> dict:
    """Draw inputs of that description: normal floats, uniform integers."""
    return {
        name: draw_tensor(value, device) if isinstance(value, dict) else value
        for name, value in description.items()
    }


def draw_tensor(description: dict, device: str) -> torch.Tensor:
    shape = description["shape"]
    stride = description["stride"]
    # a dimension with stride 0 is expanded from one element
    stored_shape = [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]
    dtype = getattr(torch, description["dtype"])
    tensor = torch.empty_strided(stored_shape, stride, dtype=dtype, device=device)
    if "range" in description:
        tensor.random_(*description["range"])
    else:
        tensor.normal_(std=description["std"])
    return tensor.expand(shape).requires_grad_(description["requires_grad"])
