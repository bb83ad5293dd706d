"""Time our operators with two versions of Triton, in bf16, turn and turn about.

    PYTHONPATH=src python -m bench.tritons --triton DIR [--only NAME,...] [--quick] [--resume]

DIR holds the other one (``pip install --no-deps --target DIR triton==3.9.0``). Each version has a
process of its own, in which a `Case` is timed as `bench.ops` does it, with the same inputs. Results
are saved after each row, in a file for each version of the other one, such as tritons_3_9.json;
``--resume`` goes on with what the file lacks."""

from __future__ import annotations

import argparse
import pathlib
import time

from . import machine, ops, triton_tables

PATH = ops.ROOT / "src"


def start(args: argparse.Namespace, limit: float) -> tuple[dict[str, ops.Worker], dict]:
    """Return a worker for each version, the installed one first, and the machine."""
    workers = {}
    machines = []
    for imports in ((), (args.triton.resolve(),)):
        worker = ops.Worker("ours", PATH, imports)
        described = worker.ask({"describe": True}, limit)
        if "error" in described or described["triton"] in workers:
            worker.stop()
            for other in workers.values():
                other.stop()
            reason = described.get("error", f"its Triton is {described.get('triton')}, too")
            raise SystemExit(f"bench.tritons: --triton {args.triton}: {reason}")
        workers[described["triton"]] = worker
        machines.append(described)
    return workers, machines[0]


def measure(request: dict, workers: dict[str, ops.Worker], rounds: int, limit) -> dict:
    """Return one row: the figures of each version, one entry a round."""
    row = {**request, "contestants": {}}
    for _ in range(rounds):
        for version, worker in workers.items():
            reply = worker.ask(request | {"contestants": ["ours"]}, limit())
            figures = reply["figures"]["ours"] if "figures" in reply else reply
            entry = row["contestants"].setdefault(version, {})
            ops.add_round(entry, figures, reply.get("ceiling"))
    return row


def is_complete(row: dict) -> bool:
    return all("ms" in entry for entry in row["contestants"].values())


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--triton", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    parser.add_argument("--quick", action="store_true", help="each case's first shape")
    parser.add_argument("--rounds", type=int, default=2, help="how often they take turns (2)")
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="of samples for a row, version and round (0.3)"
    )
    parser.add_argument(
        "--limit", type=float, default=480, help="seconds for everything; the rest is left out"
    )
    parser.add_argument("--case-limit", type=float, default=60, help="seconds for one answer (60)")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are complete")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file, or a directory for it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    requests = ops.plan([name for name in args.only.split(",") if name], args.quick)
    machine.require_gpu()
    end = time.monotonic() + args.limit

    def time_left() -> float:
        return min(args.case_limit, end - time.monotonic())

    workers, described = start(args, time_left())
    _, other = workers
    kind = "tritons_" + "_".join(other.split(".")[:2])
    if args.out is not None and args.out.is_dir():
        args.out /= f"{kind}.json"
    settings = {"machine": described, "versions": [*workers], "dtype": "bfloat16"}
    earlier = machine.resumed(kind, settings, args.out) if args.resume else None
    data = settings | {"rows": []}
    if earlier is not None:
        data = earlier
        data["machine"]["date"] += f", {described['date']}"
    data["rows"] = [row for row in data["rows"] if is_complete(row)]
    done = [(row["case"], row["shape"]) for row in data["rows"]]
    try:
        for request in requests:
            if (request["case"], request["shape"]) in done:
                continue
            if time_left() <= 0:
                print("bench.tritons: no time left", flush=True)
                break
            row = measure(request | {"seconds": args.seconds}, workers, args.rounds, time_left)
            data["rows"].append(row)
            machine.save(kind, data, args.out)
            print(triton_tables.line(row), flush=True)
    finally:
        for worker in workers.values():
            worker.stop()
    print("\n" + triton_tables.tritons(data))


if __name__ == "__main__":
    main()
