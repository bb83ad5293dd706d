"""Time every operator's `Case` at its real shapes, in bf16, against PyTorch, torch.compile and
other packages.

    PYTHONPATH=src python -m bench.ops [--peer DIR] [--peer-cute DIR] [--peer-torch DIR] [--only
    NAME,...] [--quick]

Forward and backward are timed apart, and together ("both"). A backward runs on a graph of its own
without retain_graph, on inputs that only the graph holds: operators that reuse memory do. The
``--peer`` options name directories (``pip install --no-deps --target DIR liger-kernel==0.8.5``, and
see `bench.peers`); what lies there runs in a process of its own, turn and turn about with ours,
each beside the ceiling measured in its own process."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import select
import subprocess
import sys
import time

from . import machine, peers, report

ROOT = pathlib.Path(__file__).resolve().parent.parent
HERE = ("ours", "eager", "compile")


class Worker:
    """A `bench.worker` process. It is started when first asked, and again after it died or ran out
    of time."""

    def __init__(self, side: str, path: pathlib.Path):
        self.side, self.path, self.process = side, path, None

    def ask(self, request: dict, limit: float) -> dict:
        if limit <= 0:
            return {"error": "no time left"}
        if self.process is None:
            environment = peers.SIDES[self.side].environment if self.side in peers.SIDES else {}
            others = [
                p
                for p in os.environ.get("PYTHONPATH", "").split(os.pathsep)
                if p and pathlib.Path(p) != ROOT / "src"
            ]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.worker", self.side, str(self.path)], cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(self.path), *others])} | environment,
            )  # fmt: skip
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

    def stop(self, why: str = "") -> dict:
        """End the process; ``why`` becomes the reply."""
        if self.process is not None:
            self.process.kill()
            why += f" (exit code {self.process.wait()})"
            self.process = None
        return {"error": f"process {self.side}: {why}"}


def plan(only: list[str], quick: bool) -> list[dict]:
    """What to measure: a request for each case and shape. The matrix units bound a case that counts
    operations."""
    import liger_kernel.ops  # noqa: F401  (fills CASES)
    from liger_kernel.core.op import CASES

    unknown = set(only) - {case.name for case in CASES}
    if unknown:
        raise SystemExit(
            f"bench.ops: no case {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CASES)}"
        )
    return [
        {
            "case": case.name,
            "shape": list(shape),
            "kinds": ["both"] if case.flops else ["forward", "backward", "both"],
            "against": "matmul" if case.flops else "copy",
        }
        for case in CASES
        if not only or case.name in only
        for shape in case.bench[: 1 if quick else None]
    ]


def measure(
    request: dict, contestants: list[str], workers: dict[str, Worker], rounds: int, limit
) -> dict:
    """One row: every contestant's figures, one entry a round. Of another side each is asked for by
    itself."""
    row = {**request, "contestants": {}}
    for turn in range(rounds):
        for side, worker in workers.items():
            mine = [
                name
                for name in contestants
                if peers.SIDE_OF.get(name, "ours") == side
                and peers.takes_part(name, request["case"])
                and (turn == 0 or name not in HERE or name == "ours")
            ]
            for names in [mine] if side == "ours" and mine else [[name] for name in mine]:
                if side == "ours" or "inputs" in row:
                    reply = worker.ask(
                        request | {"contestants": names, "inputs": row.get("inputs")}, limit()
                    )
                else:
                    reply = {"error": "no inputs from ours"}
                row |= {k: reply[k] for k in ("inputs", "traffic", "flops") if k in reply}
                for name in names:
                    figures = (
                        reply["figures"][name] if "figures" in reply else {"error": reply["error"]}
                    )
                    add_round(
                        row["contestants"].setdefault(name, {}), figures, reply.get("ceiling")
                    )
    row.pop("inputs", None)
    return row


def started(args, limit) -> tuple[dict[str, Worker], dict[str, str]]:
    """A worker for every other side that takes part, and what it has."""
    workers = {side: Worker(side, path) for side, path in peers.directories(args).items()}
    versions = {
        side: worker.ask({"describe": True}, limit()).get("version")
        for side, worker in workers.items()
    }
    return workers, versions


def add_round(entry: dict, figures: dict, ceiling: float | None) -> None:
    if "error" in figures:
        entry.setdefault("error", figures["error"])
        return
    entry |= {name: figures[name] for name in ("kept_bytes", "peak_bytes") if name in figures}
    entry.setdefault("ceiling", []).append(ceiling)
    for kind, ms in figures["ms"].items():
        entry.setdefault("ms", {}).setdefault(kind, []).append(ms)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.add_options(p)
    p.add_argument("--only", default="", help="names of cases, separated by commas")
    p.add_argument(
        "--contestants", default="", help=f"some of {','.join([*HERE, *peers.LINES])} (all)"
    )
    p.add_argument("--quick", action="store_true", help="each case's first shape, one round")
    p.add_argument(
        "--rounds", type=int, default=2, help="how often ours and the peers take turns (2)"
    )
    p.add_argument(
        "--seconds",
        type=float,
        default=0.6,
        help="of samples for a case, a shape and a round (0.6)",
    )
    p.add_argument(
        "--limit",
        type=float,
        default=480,
        help="seconds for everything; what is left is skipped (480)",
    )
    p.add_argument(
        "--case-limit",
        type=float,
        default=120,
        help="seconds for one case, shape and process (120)",
    )
    p.add_argument("--out", help="JSON file (bench/results/ops.json)")
    args = p.parse_args(argv)
    known = [*HERE, *peers.contestants(args)]
    names = [n for n in args.contestants.split(",") if n] or known
    if missing := [n for n in names if n not in known]:
        needed = [
            f"{n} with {peers.SIDES[peers.SIDE_OF[n]].option} DIR"
            for n in peers.LINES
            if n not in known
        ]
        raise SystemExit(
            f"bench.ops: --contestants {','.join(missing)}: some of {','.join(known)}, and {', '.join(needed)}"
        )
    requests = plan([n for n in args.only.split(",") if n], args.quick)
    machine.require_gpu()

    end = time.monotonic() + args.limit
    left = lambda: min(args.case_limit, end - time.monotonic())  # noqa: E731
    workers = {"ours": Worker("ours", ROOT / "src")}
    data = {
        "machine": workers["ours"].ask({"describe": True}, left()),
        "dtype": "bfloat16",
        "rows": [],
    }
    others, versions = started(args, left)
    workers, data = workers | others, data | versions
    try:
        for request in requests:
            request["seconds"] = args.seconds
            data["rows"].append(
                measure(request, names, workers, 1 if args.quick else args.rounds, left)
            )
            machine.save("ops", data, args.out)
            print(report.line(data["rows"][-1]), flush=True)
    finally:
        for worker in workers.values():
            worker.stop()
    print("\n" + report.ops(data) + "\n\n" + report.behind(data["rows"]))


if __name__ == "__main__":
    main()
