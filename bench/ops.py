"""Time every operator's `Case` at its real shapes, in bf16, against PyTorch and other packages.

    PYTHONPATH=src python -m bench.ops [--peer DIR] [--peer-cute DIR] [--peer-torch DIR]
        [--only NAME,...] [--quick]

PyTorch is measured eager and by torch.compile. Forward and backward are timed apart, and together
("both"). A backward runs on a graph of its own without retain_graph, on inputs that only the graph
holds: operators that reuse memory do. The ``--peer`` options name directories (``pip install
--no-deps --target DIR liger-kernel==0.8.5``, and see `bench.peers`); what lies there runs in a
process of its own, turn and turn about with ours, each beside the ceiling measured in its own
process."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import select
import subprocess
import sys
import time
from collections.abc import Callable

from . import machine, ops_tables, peers

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUR_SIDE = ("ours", "eager", "compile")  # contestants that our process has


class Worker:
    """A `bench.worker` process. It is started when first asked, and again after it died or ran out
    of time.

    Args:
        path: of the package that is measured.
        imports: directories of others that come before the installed ones.
    """

    def __init__(self, side: str, path: pathlib.Path, imports: tuple[pathlib.Path, ...] = ()):
        self.side = side
        self.path = path
        self.imports = imports
        self.process = None

    def start(self) -> None:
        entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        others = [entry for entry in entries if entry and pathlib.Path(entry) != ROOT / "src"]
        entries = map(str, (self.path, *self.imports, *others))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(entries)}
        if self.side in peers.SIDES:
            environment |= peers.SIDES[self.side].environment
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker", self.side, str(self.path)],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def ask(self, request: dict, limit: float) -> dict:
        """Return the reply, or {"error": ...} if there is none within ``limit`` seconds."""
        if limit <= 0:
            return {"error": "no time left"}
        if self.process is None:
            self.start()
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return self.stop("it died")
        if not select.select([self.process.stdout], [], [], limit)[0]:
            return self.stop(f"no answer within {limit:.0f} s")
        reply = json.loads(self.process.stdout.readline() or "{}")
        if reply.pop("broken", False):
            self.stop()
        return reply or self.stop("it died")

    def stop(self, reason: str = "") -> dict:
        """End the process; ``reason`` becomes the reply."""
        if self.process is not None:
            self.process.kill()
            reason += f" (exit code {self.process.wait()})"
            self.process = None
        return {"error": f"process {self.side}: {reason}"}


def plan(only: list[str], quick: bool) -> list[dict]:
    """Return a request for each case and shape. A case that counts operations is bound by the
    matrix units."""
    import liger_kernel.ops  # noqa: F401  (fills CASES)
    from liger_kernel.core.op import CASES

    names = [case.name for case in CASES]
    if unknown := set(only) - set(names):
        raise SystemExit(
            f"bench.ops: no case {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        )
    requests = []
    for case in CASES:
        if only and case.name not in only:
            continue
        for shape in case.bench[: 1 if quick else None]:
            requests.append(
                {
                    "case": case.name,
                    "shape": list(shape),
                    "kinds": ["both"] if case.flops else ["forward", "backward", "both"],
                    "against": "matmul" if case.flops else "copy",
                }
            )
    return requests


def asked_together(request: dict, contestants: list[str], side: str, turn: int) -> list[list[str]]:
    """Return the contestants of one side, in lists of those that are asked for at once.

    PyTorch takes part in the first round alone. Ours and PyTorch take turns in one request; each
    contestant of another side is asked for by itself."""
    names = [
        name
        for name in contestants
        if peers.SIDE_OF.get(name, "ours") == side and peers.takes_part(name, request["case"])
    ]
    if turn > 0:
        names = [name for name in names if name not in ("eager", "compile")]
    if side != "ours":
        return [[name] for name in names]
    return [names] if names else []


def measure(
    request: dict,
    contestants: list[str],
    workers: dict[str, Worker],
    rounds: int,
    limit: Callable[[], float],
) -> dict:
    """Return one row: every contestant's figures, one entry a round."""
    row = {**request, "contestants": {}}
    for turn in range(rounds):
        for side, worker in workers.items():
            for names in asked_together(request, contestants, side, turn):
                if side == "ours" or "inputs" in row:
                    extended = request | {"contestants": names, "inputs": row.get("inputs")}
                    reply = worker.ask(extended, limit())
                else:
                    reply = {"error": "no inputs from ours"}
                for key in ("inputs", "traffic", "flops"):
                    if key in reply:
                        row[key] = reply[key]
                for name in names:
                    figures = reply["figures"][name] if "figures" in reply else reply
                    entry = row["contestants"].setdefault(name, {})
                    add_round(entry, figures, reply.get("ceiling"))
    row.pop("inputs", None)
    return row


def add_round(entry: dict, figures: dict, ceiling: float | None) -> None:
    """Add the figures of one round to a contestant's entry, or its first error."""
    if "error" in figures:
        entry.setdefault("error", figures["error"])
        return
    for name in ("kept_bytes", "peak_bytes"):
        if name in figures:
            entry[name] = figures[name]
    entry.setdefault("ceiling", []).append(ceiling)
    for kind, ms in figures["ms"].items():
        entry.setdefault("ms", {}).setdefault(kind, []).append(ms)


def start_peers(
    args: argparse.Namespace, limit: Callable[[], float]
) -> tuple[dict[str, Worker], dict[str, str]]:
    """Return a worker for every other side that takes part, and the version that each has."""
    workers = {side: Worker(side, path) for side, path in peers.directories(args).items()}
    versions = {
        side: worker.ask({"describe": True}, limit()).get("version")
        for side, worker in workers.items()
    }
    return workers, versions


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.add_options(parser)
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    parser.add_argument(
        "--contestants", default="", help=f"some of {','.join([*OUR_SIDE, *peers.LINES])} (all)"
    )
    parser.add_argument("--quick", action="store_true", help="each case's first shape, one round")
    parser.add_argument(
        "--rounds", type=int, default=2, help="how often ours and the peers take turns (2)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.6,
        help="of samples for a case, a shape and a round (0.6)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=480,
        help="seconds for everything; what is left is skipped (480)",
    )
    parser.add_argument(
        "--case-limit",
        type=float,
        default=120,
        help="seconds for one case, shape and process (120)",
    )
    parser.add_argument("--out", help="JSON file (bench/results/ops.json)")
    return parser.parse_args(argv)


def chosen_contestants(args: argparse.Namespace) -> list[str]:
    """Return the contestants that ``--contestants`` names, or all whose directory is given."""
    available = [*OUR_SIDE, *peers.contestants(args)]
    names = [name for name in args.contestants.split(",") if name] or available
    missing = [name for name in names if name not in available]
    if missing:
        options = [
            f"{name} with {peers.SIDES[peers.SIDE_OF[name]].option} DIR"
            for name in peers.LINES
            if name not in available
        ]
        raise SystemExit(
            f"bench.ops: --contestants {','.join(missing)}: some of {','.join(available)}, "
            f"and {', '.join(options)}"
        )
    return names


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    names = chosen_contestants(args)
    requests = plan([name for name in args.only.split(",") if name], args.quick)
    machine.require_gpu()

    end = time.monotonic() + args.limit

    def time_left() -> float:
        return min(args.case_limit, end - time.monotonic())

    workers = {"ours": Worker("ours", ROOT / "src")}
    data = {
        "machine": workers["ours"].ask({"describe": True}, time_left()),
        "dtype": "bfloat16",
        "rows": [],
    }
    peer_workers, versions = start_peers(args, time_left)
    workers |= peer_workers
    data |= versions
    rounds = 1 if args.quick else args.rounds
    try:
        for request in requests:
            request["seconds"] = args.seconds
            row = measure(request, names, workers, rounds, time_left)
            data["rows"].append(row)
            machine.save("ops", data, args.out)
            print(ops_tables.ops_line(row), flush=True)
    finally:
        for worker in workers.values():
            worker.stop()
    print("\n" + ops_tables.ops(data) + "\n\n" + ops_tables.behind(data["rows"]))


if __name__ == "__main__":
    main()
