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
from collections.abc import Callable

import torch

from . import calls, machine, worker
from .contest import Contestant, summary, untimed


def candidates(grid: str) -> list[tuple[int | None, ...]]:
    """Parse "1,2 =" as [(1, None), (2, None)]; None keeps the number that is there."""
    columns = []
    for word in grid.split():
        columns.append([None if value == "=" else int(value) for value in word.split(",")])
    return list(itertools.product(*columns))


def replaced(launch: Callable, candidate: tuple) -> Callable:
    """Return ``launch`` with the numbers of ``candidate`` in place of its own."""

    def call(*args, **kwargs):
        current = launch(*args, **kwargs)
        if not isinstance(current, tuple):
            return current if candidate[0] is None else candidate[0]
        pairs = zip(current, candidate, strict=True)
        return tuple(number if new is None else new for number, new in pairs)

    return call


def sweep(
    contestant: Contestant,
    install: Callable,
    tries: list,
    kinds: list[str],
    stopwatch,
    seconds: float,
) -> tuple[dict, dict]:
    """Time all candidates. ``install(candidate)`` makes the operator use one.

    Returns {kind: {candidate: ms}} of those that run, and {candidate: error} of those that do not.
    """

    def sample(candidate, kind, stopwatch=stopwatch):
        install(candidate)
        return contestant.sample(kind, stopwatch)

    errors = {}
    for candidate in tries:
        try:
            for kind in kinds * 2:
                sample(candidate, kind, untimed)
        except Exception as error:  # out of registers or shared memory, say
            errors[candidate] = summary(error)
    running = [candidate for candidate in tries if candidate not in errors]
    figures = {}
    for kind in kinds:
        turns = {
            candidate: lambda candidate=candidate, kind=kind: sample(candidate, kind)
            for candidate in running
        }
        samples = machine.interleave(turns, seconds)
        figures[kind] = {candidate: machine.median(ms) for candidate, ms in samples.items()}
    return figures, errors


def show(candidate: tuple | None) -> str:
    if candidate is None:
        return "as now"
    return " ".join("=" if number is None else str(number) for number in candidate)


def print_best(case, shape, kind: str, ms: dict, num_best: int, num_bytes: int | None) -> None:
    """Print the fastest candidates of a shape, and today's launch first."""
    print(f"{case.name} {'×'.join(map(str, shape))} {kind}:")
    fastest = sorted(ms.keys() - {None}, key=ms.get)[:num_best]
    for candidate in [None, *fastest]:
        if candidate in ms:
            bandwidth = ""
            if num_bytes is not None:
                bandwidth = f", {num_bytes / ms[candidate] / 1e9:.2f} TB/s"
            print(f"  {show(candidate):24} {ms[candidate]:.4f} ms{bandwidth}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", help="name of the Case")
    parser.add_argument("--grid", required=True, help="values to try, one word a number")
    parser.add_argument("--module", help="module with the function (the operator's)")
    parser.add_argument("--function", default="_launch")
    parser.add_argument(
        "--shape", action="append", help="8192x2048; may be repeated (the case's bench shapes)"
    )
    parser.add_argument("--kinds", default="forward,backward", help="of forward, backward, both")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of samples for a shape and kind (2)"
    )
    parser.add_argument("--best", type=int, default=5, help="how many to print (5)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        help="processes that compile ahead, each with inputs of its own (0)",
    )
    parser.add_argument("--slice", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def compile_ahead(argv: list[str], jobs: int) -> None:
    """Let ``jobs`` processes compile a part of the candidates each."""
    command = [sys.executable, "-m", "bench.sweep", *argv, "--jobs", "0"]
    processes = [
        subprocess.Popen([*command, "--slice", f"{index}/{jobs}"]) for index in range(jobs)
    ]
    for process in processes:
        process.wait()


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    machine.require_gpu()

    from liger_kernel.core.kernel import LaunchCache

    our_side = worker.Ours()
    if args.case not in our_side.cases:
        raise SystemExit(f"bench.sweep: no case {args.case}; there are {', '.join(our_side.cases)}")
    case = our_side.cases[args.case]
    module = importlib.import_module(args.module or case.fn.__module__)
    launch = getattr(module, args.function)
    tries = [None, *candidates(args.grid)]
    if args.slice:
        index, num_slices = map(int, args.slice.split("/"))
        tries = tries[index::num_slices]
    compile_ahead(argv or sys.argv[1:], args.jobs)

    def install(candidate):
        LaunchCache.clear_all()
        setattr(module, args.function, launch if candidate is None else replaced(launch, candidate))

    stopwatch = machine.Stopwatch()
    kinds = args.kinds.split(",")
    shapes = [list(map(int, shape.split("x"))) for shape in args.shape or []] or case.bench
    seconds = 0 if args.slice else args.seconds
    for shape in shapes:
        inputs = our_side.inputs({"case": args.case, "shape": list(shape)})
        contestant = Contestant(calls.our_line(case), inputs)
        figures, errors = sweep(contestant, install, tries, kinds, stopwatch, seconds)
        install(None)
        if args.slice:
            continue
        traffic = {}
        if case.traffic:
            traffic = dict(zip(("forward", "backward"), case.traffic(inputs), strict=True))
        for kind, ms in figures.items():
            print_best(case, shape, kind, ms, args.best, traffic.get(kind))
        for candidate, message in errors.items():
            print(f"  {show(candidate):24} {message}")
        del contestant, inputs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
