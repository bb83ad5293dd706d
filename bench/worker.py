"""A process that times operators on request: one JSON line in, one JSON line out.

``ours`` holds this package, its references in plain PyTorch and those compiled; another side
(`peers.SIDES`) what lies in its directory, the published liger-kernel for one, which has the same
import name. All stay alive, so that their turns are seconds apart."""

from __future__ import annotations

import inspect
import json
import os
import site
import sys

import torch

from . import calls, contest, machine, peers


class Ours:
    """The cases of this package, and the ways to compute each."""

    def __init__(self):
        import liger_kernel.ops  # noqa: F401  (fills CASES)
        from liger_kernel.core.op import CASES

        self.cases = {case.name: case for case in CASES}

    def inputs(self, request: dict) -> dict:
        case = self.cases[request["case"]]
        torch.manual_seed(0)
        with torch.device("cuda"):
            inputs = case.inputs(*request["shape"])
        if case.name in calls.LIGER:  # which may leave an option out, as a head's bias
            parameters = inspect.signature(calls.LIGER[case.name]).parameters
            inputs = {name: inputs[name] for name in parameters}
        return {
            name: as_in_training(value) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }

    def fns(self, request: dict) -> dict:
        case = self.cases[request["case"]]
        plain = calls.PLAIN.get(case.name, case.reference)
        torch._dynamo.reset()
        contestants = {
            "ours": calls.our_line(case),
            "eager": plain,
            "compile": torch.compile(plain, dynamic=False),
        }
        return {name: contestants[name] for name in request["contestants"]}

    def work(self, request: dict, inputs: dict) -> dict:
        """Return bytes and operations of the case, and a description of the inputs for the other
        sides."""
        case = self.cases[request["case"]]
        return {
            "inputs": contest.described(inputs),
            "traffic": list(case.traffic(inputs)) if case.traffic else None,
            "flops": case.flops(inputs) if case.flops else None,
        }


class Peer:
    """Another side, on inputs like those that ours had."""

    def inputs(self, request: dict) -> dict:
        return contest.drawn(request["inputs"])

    def fns(self, request: dict) -> dict:
        return {name: peers.LINES[name][request["case"]] for name in request["contestants"]}

    def work(self, request: dict, inputs: dict) -> dict:
        return {}


def as_in_training(tensor):
    """Return a tensor in bf16. No label is ignored, because a skipped row moves no bytes."""
    if tensor.is_complex():
        return tensor
    if not tensor.is_floating_point():
        return tensor.clamp(min=0)
    return tensor.detach().bfloat16().requires_grad_(tensor.requires_grad)


def answer(implementations, request: dict, ceilings: machine.Ceilings) -> dict:
    inputs = implementations.inputs(request)
    return implementations.work(request, inputs) | contest.contest(
        implementations.fns(request),
        inputs,
        request["kinds"],
        ceilings,
        request["against"],
        request["seconds"],
    )


def context_is_broken() -> bool:
    """Return True if the GPU's context is unusable: some errors of a kernel stay for good.
    Otherwise memory is given back."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


def describe(side: str) -> dict:
    if side == "ours":
        return machine.describe()
    return {"version": peers.SIDES[side].version()}


def main(side: str, directory: str) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    site.addsitedir(directory)  # for the .pth files there
    machine.require_gpu()
    ceilings = machine.Ceilings(machine.Stopwatch())
    implementations = Ours() if side == "ours" else Peer()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request.get("describe"):
                reply = describe(side)
            else:
                reply = answer(implementations, request, ceilings)
        except Exception as error:  # the process that asked prints it
            reply = {"error": contest.summary(error)}
        if context_is_broken():
            reply["broken"] = True
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
