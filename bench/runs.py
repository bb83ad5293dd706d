"""Contestants that train real models, each in a process of its own.

`bench.train`, `bench.first_step`, `bench.compile`, `bench.breakdown`, `bench.float8` and
`bench.medusa` share this."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

import torch

from . import machine, models, report, training_tables
from .contest import summary

ROOT = pathlib.Path(__file__).resolve().parent.parent
GROUPS = {
    "required": models.REQUIRED,
    "more": models.MORE,
    "large": models.REQUIRED + models.MORE,
    "small": models.SMALL,
}


# ---- contestants: model -> (the function to call on a batch, the report of our patch) ----


def eager(model):
    return model, None


def compiled(model):
    return torch.compile(model, dynamic=False), None


def ours(model):
    from liger_kernel.transformers import apply_liger_kernel

    return model, str(apply_liger_kernel(model))


def peer(model):
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)  # what the Trainer calls, in either package
    return model, None


def cuda_graphs(model):
    compiled_model = torch.compile(model, dynamic=False, mode="reduce-overhead")

    def forward(**batch):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled_model(**batch)

    return forward, None


def ours_compiled(model):
    _, patch_report = ours(model)
    return compiled(model)[0], patch_report


def ours_cuda_graphs(model):
    _, patch_report = ours(model)
    return cuda_graphs(model)[0], patch_report


CONTESTANTS = {
    "eager": eager,
    "compile": compiled,
    "graphs": cuda_graphs,
    "captured": eager,
    "peer": peer,
    "ours": ours,
    "ours-compile": ours_compiled,
    "ours-graphs": ours_cuda_graphs,
    "ours-captured": ours,
}
USUAL = "eager", "compile", "peer", "ours"  # contestants of `train` and `breakdown`


# ---- a process for each measurement ----


def described() -> dict:
    """Describe the machine, and the published package where that is what this process has."""
    return machine.describe() | {"liger_kernel": machine.version("liger-kernel")}


def import_path(peer_directory: pathlib.Path | None) -> str:
    """Return PYTHONPATH with the published package first, or ours."""
    source = ROOT / "src"
    first = peer_directory.resolve() if peer_directory else source
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in entries if pathlib.Path(entry).resolve() != source]
    return os.pathsep.join([str(first), *others])


def run_apart(kind: str, contestant: str, run: tuple, args: argparse.Namespace) -> dict:
    """Measure one contestant in a process of its own, on the import path where its package lies.

    ``run`` is (model, sequence, batch), or more numbers if ``bench.<kind>`` takes more."""
    peer_directory = args.peer if contestant == "peer" else None
    environment = os.environ | {"PYTHONPATH": import_path(peer_directory)}
    numbers = [*map(str, run), str(args.warmup), str(args.steps)]
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "figures.json"
        request = [contestant, *numbers, args.device, str(out)]
        command = [sys.executable, "-m", f"bench.{kind}", "--worker", *request]
        try:
            process = subprocess.run(command, cwd=ROOT, timeout=args.run_limit, env=environment)
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {args.run_limit:.0f} s"}
        if not out.exists():
            return {"error": f"it died (exit code {process.returncode})"}
        return json.loads(out.read_text())


def worker(work: Callable[..., dict], request: list[str]) -> None:
    """Measure in the process that `run_apart` has started, and write the result for it."""
    contestant, name, *numbers, device, out = request
    try:
        result = work(contestant, name, *map(int, numbers), device)
    except Exception as error:  # it stands in the table
        result = {"error": summary(error)}
    pathlib.Path(out).write_text(json.dumps(result))


# ---- the command line ----


def parsed(runs: str, kind: str = "train") -> list[tuple[str, int, int]]:
    """Parse "small,Llama-3-8B@4096x2" as (model, sequence, batch)."""
    result = []
    for item in runs.split(","):
        if item in GROUPS:
            result += GROUPS[item]
            continue
        name, _, size = item.partition("@")
        sequence, _, batch = size.partition("x")
        if name not in models.SIZES or not sequence.isdigit() or not batch.isdigit():
            raise SystemExit(
                f"bench.{kind}: --runs {item}: give {', '.join(GROUPS)} or MODEL@SEQUENCExBATCH "
                f"of {', '.join(models.SIZES)}"
            )
        result.append((name, int(sequence), int(batch)))
    return result


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu tries the program out, no more",
    )


def add_options(parser: argparse.ArgumentParser, kind: str, steps: int) -> None:
    """Add the options of a benchmark that trains each contestant in a process of its own."""
    parser.add_argument(
        "--peer", type=pathlib.Path, help="directory that holds the published liger-kernel"
    )
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones (3)")
    parser.add_argument("--steps", type=int, default=steps, help=f"timed steps ({steps})")
    parser.add_argument(
        "--run-limit", type=float, default=180, help="seconds for one contestant of one run (180)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=570,
        help="seconds after which no further process is started (570)",
    )
    add_device_option(parser)
    parser.add_argument("--out", help=f"JSON file (bench/results/{kind}.json)")


def chosen_contestants(
    kind: str, args: argparse.Namespace, usual: Iterable[str], known: Iterable[str]
) -> list[str]:
    """Return the contestants that ``--contestants`` names, or the usual ones; the peer only with
    ``--peer``."""
    names = [name for name in args.contestants.split(",") if name]
    if not names:
        names = [name for name in usual if name != "peer" or args.peer]
    if set(names) - set(known) or ("peer" in names and args.peer is None):
        raise SystemExit(
            f"bench.{kind}: --contestants {args.contestants}: some of {','.join(known)}, "
            "and peer with --peer DIR"
        )
    return names


def measure(
    kind: str, data: dict, row: dict, name: str, run: tuple, args: argparse.Namespace, end: float
) -> None:
    """Put one contestant's figures into its row, and save. After ``end`` nothing is started."""
    if time.monotonic() < end:
        result = run_apart(kind, name, run, args)
    else:
        result = {"error": "no time left"}
    if "machine" in result:
        version = result["machine"].pop("liger_kernel")
        data["machine"] = result["machine"]
        if name == "peer":
            data["peer"] = version
    row["contestants"][name] = result.get("figures", result)
    machine.save(kind, data, args.out)


def row_of(rows: list[dict], run: tuple[str, int, int]) -> dict:
    """Return the row of (model, sequence, batch), added if it is not there."""
    for row in rows:
        if (row["model"], row["sequence"], row["batch"]) == run:
            return row
    row = dict(zip(("model", "sequence", "batch"), run, strict=True), contestants={})
    rows.append(row)
    return row


def main(
    kind: str,
    work: Callable[..., dict],
    doc: str,
    argv: list[str] | None,
    usual: Iterable[str],
    steps: int,
    shown: Iterable[str],
    known: Iterable[str] = USUAL,
) -> None:
    """Run ``python -m bench.<kind>``: measure each contestant in each run, save, print the table.

    ``work(contestant, model, sequence, batch, warmup, steps, device)`` returns {"machine": ...,
    "figures": ...}. The ``usual`` contestants take part unless others are named; while it runs, the
    figures ``shown`` are printed."""
    usual = list(usual)
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", default="required", help="what to train (required: the two headline runs)"
    )
    parser.add_argument(
        "--contestants", default="", help=f"some of {','.join(known)} ({','.join(usual)})"
    )
    add_options(parser, kind, steps)
    parser.add_argument(
        "--resume", action="store_true", help="keep what the JSON file has of this machine"
    )
    parser.add_argument("--worker", nargs=8, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return worker(work, args.worker)
    names = chosen_contestants(kind, args, usual, known)
    runs = parsed(args.runs, kind)
    if args.device == "cuda":
        machine.require_gpu()

    end = time.monotonic() + args.limit
    data = {"machine": {"error": "nothing was measured"}, "rows": []}
    if args.resume:
        data = machine.resumed(kind, {"machine": machine.describe()}, args.out) or data
    for run in runs:
        row = row_of(data["rows"], run)
        for name in names:
            earlier = row["contestants"].get(name)
            if earlier is not None and "error" not in earlier:
                continue
            measure(kind, data, row, name, run, args, end)
            figures = row["contestants"][name]
            summary_figures = {
                key: value for key, value in figures.items() if key in (*shown, "error")
            }
            label = training_tables.train_label(row)
            print(f"{label}, {name}: {summary_figures}", flush=True)
    print("\n" + report.KINDS[kind](data))
