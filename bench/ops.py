"""Time every operator's `Case` at its real shapes, in bf16, against PyTorch, torch.compile and the published package.

    PYTHONPATH=src python -m bench.ops [--peer DIR] [--only NAME,...] [--quick]

Forward and backward are timed apart, and together ("both"). A backward runs on a graph of its own without
retain_graph, on inputs that only the graph holds: operators that reuse memory do. ``--peer`` is a directory with the
published liger-kernel (``pip install --no-deps --target DIR liger-kernel==0.8.5``); it runs in a process of its own,
turn and turn about with ours, each beside the ceiling measured in its own process.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import select
import subprocess
import sys
import time

from . import machine, report
from .calls import LIGER

ROOT = pathlib.Path(__file__).resolve().parent.parent
HERE = ("ours", "eager", "compile")


class Worker:
    """A `bench.worker` process. It is started when first asked, and again after it died or ran out of time."""

    def __init__(self, side: str, path: pathlib.Path):
        self.side, self.path, self.process = side, path, None

    def ask(self, request: dict, limit: float) -> dict:
        if limit <= 0:
            return {"error": "no time left"}
        if self.process is None:
            others = [
                p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and pathlib.Path(p) != ROOT / "src"
            ]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.worker", self.side], cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(self.path), *others])},
            )  # fmt: skip
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return self.stop("it died")
        if not select.select([self.process.stdout], [], [], limit)[0]:
            return self.stop(f"no answer within {limit:.0f} s")
        reply = self.process.stdout.readline()
        return json.loads(reply) if reply else self.stop("it died")

    def stop(self, why: str = "") -> dict:
        """End the process; ``why`` becomes the reply."""
        if self.process is not None:
            self.process.kill()
            why += f" (exit code {self.process.wait()})"
            self.process = None
        return {"error": f"process {self.side}: {why}"}


def plan(only: list[str], quick: bool) -> list[dict]:
    """What to measure: a request for each case and shape. The matrix units bound a case that counts operations."""
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


def measure(request: dict, contestants: list[str], workers: dict[str, Worker], rounds: int, limit) -> dict:
    """One row: every contestant's figures, one entry a round."""
    row = {**request, "contestants": {}}
    for turn in range(rounds):
        for side, worker in workers.items():
            mine = [
                c for c in contestants if (c == "peer") == (side == "peer") and (turn == 0 or c in ("ours", "peer"))
            ]
            if not mine or (side == "peer" and request["case"] not in LIGER):
                continue
            if side == "peer" and "inputs" not in row:
                row["contestants"]["peer"] = {"error": "no inputs from ours"}
                continue
            reply = worker.ask(request | {"contestants": mine, "inputs": row.get("inputs")}, limit())
            row |= {k: reply[k] for k in ("inputs", "traffic", "flops") if k in reply}
            for name in mine:
                figures = reply["figures"][name] if "figures" in reply else {"error": reply["error"]}
                add_round(row["contestants"].setdefault(name, {}), figures, reply.get("ceiling"))
    row.pop("inputs", None)
    return row


def add_round(entry: dict, figures: dict, ceiling: float | None) -> None:
    if "error" in figures:
        entry.setdefault("error", figures["error"])
        return
    entry |= {name: figures[name] for name in ("kept_bytes", "peak_bytes") if name in figures}
    entry.setdefault("ceiling", []).append(ceiling)
    for kind, ms in figures["ms"].items():
        entry.setdefault("ms", {}).setdefault(kind, []).append(ms)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--peer", type=pathlib.Path, help="directory that holds the published liger-kernel")
    p.add_argument("--only", default="", help="names of cases, separated by commas")
    p.add_argument("--contestants", default="", help=f"some of {','.join(HERE)},peer (all)")
    p.add_argument("--quick", action="store_true", help="each case's first shape, one round")
    p.add_argument("--rounds", type=int, default=2, help="how often ours and the peer take turns (2)")
    p.add_argument("--seconds", type=float, default=0.6, help="of samples for a case, a shape and a round (0.6)")
    p.add_argument("--limit", type=float, default=480, help="seconds for everything; what is left is skipped (480)")
    p.add_argument("--case-limit", type=float, default=120, help="seconds for one case, shape and process (120)")
    p.add_argument("--out", help="JSON file (bench/results/ops.json)")
    args = p.parse_args(argv)
    names = [n for n in args.contestants.split(",") if n] or [*HERE, *(["peer"] if args.peer else [])]
    if set(names) - {*HERE, "peer"} or ("peer" in names and args.peer is None):
        raise SystemExit(
            f"bench.ops: --contestants {args.contestants}: some of {','.join(HERE)}, and peer with --peer DIR"
        )
    requests = plan([n for n in args.only.split(",") if n], args.quick)
    machine.require_gpu()

    end = time.monotonic() + args.limit
    left = lambda: min(args.case_limit, end - time.monotonic())  # noqa: E731
    workers = {"ours": Worker("ours", ROOT / "src")} | (
        {"peer": Worker("peer", args.peer.resolve())} if args.peer else {}
    )
    data = {"machine": workers["ours"].ask({"describe": True}, left()), "dtype": "bfloat16", "rows": []}
    if args.peer:
        data["peer"] = workers["peer"].ask({"describe": True}, left()).get("liger_kernel")
    try:
        for request in requests:
            request["seconds"] = args.seconds
            data["rows"].append(measure(request, names, workers, 1 if args.quick else args.rounds, left))
            machine.save("ops", data, args.out)
            print(report.line(data["rows"][-1]), flush=True)
    finally:
        for worker in workers.values():
            worker.stop()
    print("\n" + report.ops(data))
    if args.peer:
        print("\nSlower than liger-kernel: " + ("; ".join(report.behind(data["rows"])) or "nowhere"))


if __name__ == "__main__":
    main()
