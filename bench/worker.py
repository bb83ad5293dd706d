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

    def inputs(self, request):
        case = self.cases[request["case"]]
        torch.manual_seed(0)
        with torch.device("cuda"):
            given = case.inputs(*request["shape"])
        if case.name in calls.LIGER:  # which may leave an option out, as a head's bias
            given = {
                name: given[name] for name in inspect.signature(calls.LIGER[case.name]).parameters
            }
        return {
            name: as_in_training(t) if isinstance(t, torch.Tensor) else t
            for name, t in given.items()
        }

    def fns(self, request):
        case = self.cases[request["case"]]
        plain = calls.PLAIN.get(case.name, case.reference)
        torch._dynamo.reset()
        ways = {
            "ours": calls.ours(case),
            "eager": plain,
            "compile": torch.compile(plain, dynamic=False),
        }
        return {name: ways[name] for name in request["contestants"]}

    def work(self, request, inputs):
        case = self.cases[request["case"]]
        return {
            "inputs": contest.described(inputs),
            "traffic": list(case.traffic(inputs)) if case.traffic else None,
            "flops": case.flops(inputs) if case.flops else None,
        }


class Peer:
    """Another side, on inputs like those that ours had."""

    def inputs(self, request):
        return contest.drawn(request["inputs"])

    def fns(self, request):
        return {name: peers.LINES[name][request["case"]] for name in request["contestants"]}

    def work(self, request, inputs):
        return {}


def as_in_training(t):
    """In bf16; and no label is ignored, because a row that is skipped moves no bytes."""
    if t.is_complex():
        return t
    if not t.is_floating_point():
        return t.clamp(min=0)
    return t.detach().bfloat16().requires_grad_(t.requires_grad)


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


def broken() -> bool:
    """Whether the GPU's context is: some errors of a kernel stay for good. If not, memory is given
    back."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


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
                reply = (
                    machine.describe()
                    if side == "ours"
                    else {"version": peers.SIDES[side].version()}
                )
            else:
                reply = answer(implementations, request, ceilings)
        except Exception as e:  # told to whoever asked
            reply = {"error": contest.summary(e)}
        if broken():
            reply["broken"] = True
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
