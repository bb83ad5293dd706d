"""Try launches offline: what an operator's `_launch` could return, timed on a case's real shapes.

    PYTHONPATH=src python -m bench.sweep rms_norm --grid "1,2,4 = 4,8,16" [--shape 8192x2048 ...]

A grid has one word for each number that the function returns: the values to try, or ``=`` for what
it returns now. All combinations take turns; the best of each shape are printed beside what the
operator does today."""

from __future__ import annotations

import argparse
import importlib
import itertools
import subprocess
import sys

import torch

from . import calls, machine, worker
from .contest import Contestant, summary, untimed


def candidates(grid: str) -> list[tuple[int | None, ...]]:
    """ "1,2 =" → [(1, None), (2, None)]; None keeps what is there."""
    words = [[None if v == "=" else int(v) for v in word.split(",")] for word in grid.split()]
    return list(itertools.product(*words))


def replaced(launch, candidate):
    """``launch`` with the numbers of ``candidate`` in place of its own."""

    def call(*args, **kwargs):
        now = launch(*args, **kwargs)
        if not isinstance(now, tuple):
            return now if candidate[0] is None else candidate[0]
        return tuple(a if b is None else b for a, b in zip(now, candidate, strict=True))

    return call


def sweep(contestant: Contestant, use, tries: list, kinds: list[str], stopwatch, seconds: float):
    """{kind: {candidate: ms}} of those that run, and {candidate: why not} of those that don't.
    ``use`` installs one."""

    def sample(candidate, kind, stopwatch=stopwatch):
        use(candidate)
        return contestant.sample(kind, stopwatch)

    failed = {}
    for candidate in tries:
        try:
            for kind in kinds * 2:
                sample(candidate, kind, untimed)
        except Exception as e:  # out of registers or shared memory, say
            failed[candidate] = summary(e)
    running = [c for c in tries if c not in failed]
    figures = {}
    for kind in kinds:
        turns = {c: lambda c=c, kind=kind: sample(c, kind) for c in running}
        figures[kind] = {
            c: machine.median(s) for c, s in machine.interleave(turns, seconds).items()
        }
    return figures, failed


def show(candidate) -> str:
    return (
        "as now" if candidate is None else " ".join("=" if v is None else str(v) for v in candidate)
    )


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("case", help="name of the Case")
    p.add_argument("--grid", required=True, help="values to try, one word a number")
    p.add_argument("--module", help="module with the function (the operator's)")
    p.add_argument("--function", default="_launch")
    p.add_argument(
        "--shape", action="append", help="8192x2048; may be repeated (the case's bench shapes)"
    )
    p.add_argument("--kinds", default="forward,backward", help="of forward, backward, both")
    p.add_argument("--seconds", type=float, default=2.0, help="of samples for a shape and kind (2)")
    p.add_argument("--best", type=int, default=5, help="how many to print (5)")
    p.add_argument(
        "--jobs",
        type=int,
        default=0,
        help="processes that compile ahead, each with inputs of its own (0)",
    )
    p.add_argument("--slice", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    machine.require_gpu()

    from liger_kernel.core.kernel import LaunchCache

    ours = worker.Ours()
    if args.case not in ours.cases:
        raise SystemExit(f"bench.sweep: no case {args.case}; there are {', '.join(ours.cases)}")
    case = ours.cases[args.case]
    module = importlib.import_module(args.module or case.fn.__module__)
    launch = getattr(module, args.function)
    tries = [None, *candidates(args.grid)]
    if args.slice:
        at, of = map(int, args.slice.split("/"))
        tries = tries[at::of]
    command = [sys.executable, "-m", "bench.sweep", *(argv or sys.argv[1:])]
    ahead = [
        subprocess.Popen([*command, "--jobs", "0", "--slice", f"{i}/{args.jobs}"])
        for i in range(args.jobs)
    ]
    for process in ahead:
        process.wait()

    def use(candidate):
        LaunchCache.forget()
        setattr(module, args.function, launch if candidate is None else replaced(launch, candidate))

    stopwatch = machine.Stopwatch()
    kinds = args.kinds.split(",")
    for shape in [list(map(int, s.split("x"))) for s in args.shape or []] or case.bench:
        request = {"case": args.case, "shape": list(shape)}
        inputs = ours.inputs(request)
        contestant = Contestant(calls.ours(case), inputs)
        figures, failed = sweep(
            contestant, use, tries, kinds, stopwatch, 0 if args.slice else args.seconds
        )
        use(None)
        if args.slice:
            continue
        moved = (
            dict(zip(("forward", "backward"), case.traffic(inputs), strict=True))
            if case.traffic
            else {}
        )
        for kind, ms in figures.items():
            print(f"{args.case} {'×'.join(map(str, shape))} {kind}:")
            for c in [None, *sorted(ms.keys() - {None}, key=ms.get)[: args.best]]:
                if c in ms:
                    speed = f", {moved[kind] / ms[c] / 1e9:.2f} TB/s" if kind in moved else ""
                    print(f"  {show(c):24} {ms[c]:.4f} ms{speed}")
        for c, why in failed.items():
            print(f"  {show(c):24} {why}")
        del contestant, inputs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
