"""Contestants that train real models, each in a process of its own: what `bench.train` and
`bench.breakdown` share."""

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

from . import machine, models, report
from .contest import summary

ROOT = pathlib.Path(__file__).resolve().parent.parent
GROUPS = {
    "required": models.REQUIRED,
    "more": models.MORE,
    "large": models.REQUIRED + models.MORE,
    "small": models.SMALL,
}


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


def by_graphs(model):
    compiled = torch.compile(model, dynamic=False, mode="reduce-overhead")

    def called(**batch):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(**batch)

    return called, None


def ours_compiled(model):
    _, report = ours(model)
    return compiled(model)[0], report


def ours_by_graphs(model):
    _, report = ours(model)
    return by_graphs(model)[0], report


CONTESTANTS = {
    "eager": eager,
    "compile": compiled,
    "graphs": by_graphs,
    "captured": eager,
    "peer": peer,
    "ours": ours,
    "ours-compile": ours_compiled,
    "ours-graphs": ours_by_graphs,
    "ours-captured": ours,
}
USUAL = "eager", "compile", "peer", "ours"  # of `train` and `breakdown`


def described() -> dict:
    """The machine, and the published package where that is what this process has."""
    return machine.describe() | {"liger_kernel": machine.version("liger-kernel")}


def parsed(runs: str, kind: str = "train") -> list[tuple[str, int, int]]:
    """ "small,Llama-3-8B@4096x2" as (model, sequence, batch)."""
    found = []
    for item in runs.split(","):
        if item in GROUPS:
            found += GROUPS[item]
            continue
        name, _, size = item.partition("@")
        sequence, _, batch = size.partition("x")
        if name not in models.SIZES or not sequence.isdigit() or not batch.isdigit():
            known = ", ".join(models.SIZES)
            raise SystemExit(
                f"bench.{kind}: --runs {item}: give {', '.join(GROUPS)} or MODEL@SEQUENCExBATCH of {known}"
            )
        found.append((name, int(sequence), int(batch)))
    return found


def import_path(peer: pathlib.Path | None) -> str:
    """PYTHONPATH with the published package first, or ours."""
    given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    others = [p for p in given if pathlib.Path(p).resolve() != ROOT / "src"]
    return os.pathsep.join([str(peer.resolve() if peer else ROOT / "src"), *others])


def run_apart(kind: str, contestant: str, run: tuple[str, int, int], args) -> dict:
    """One contestant in a process of its own, on the import path where its package lies."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "figures.json"
        request = [
            contestant,
            *map(str, run),
            str(args.warmup),
            str(args.steps),
            args.device,
            str(out),
        ]
        try:
            ended = subprocess.run(
                [sys.executable, "-m", f"bench.{kind}", "--worker", *request], cwd=ROOT, timeout=args.run_limit,
                env=os.environ | {"PYTHONPATH": import_path(args.peer if contestant == "peer" else None)},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {args.run_limit:.0f} s"}
        return (
            json.loads(out.read_text())
            if out.exists()
            else {"error": f"it died (exit code {ended.returncode})"}
        )


def worker(work: Callable[..., dict], request: list[str]) -> None:
    contestant, name, *numbers, device, out = request
    try:
        result = work(contestant, name, *map(int, numbers), device)
    except Exception as e:  # it stands in the table
        result = {"error": summary(e)}
    pathlib.Path(out).write_text(json.dumps(result))


def main(
    kind: str,
    work,
    doc: str,
    argv,
    usual: Iterable[str],
    steps: int,
    shown: Iterable[str],
    known: Iterable[str] = USUAL,
) -> None:
    """``python -m bench.<kind>``: what ``work`` finds of each contestant in each run, saved, told,
    made a table of.

    ``work(contestant, model, sequence, batch, warmup, steps, device)`` returns {"machine": ...,
    "figures": ...}. The ``usual`` contestants take part unless others are named; while it runs, the
    figures ``shown`` are printed."""
    usual = list(usual)
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--peer", type=pathlib.Path, help="directory that holds the published liger-kernel"
    )
    p.add_argument(
        "--runs", default="required", help="what to train (required: the two headline runs)"
    )
    p.add_argument(
        "--contestants", default="", help=f"some of {','.join(known)} ({','.join(usual)})"
    )
    p.add_argument("--warmup", type=int, default=3, help="steps before the timed ones (3)")
    p.add_argument("--steps", type=int, default=steps, help=f"timed steps ({steps})")
    p.add_argument(
        "--run-limit", type=float, default=180, help="seconds for one contestant of one run (180)"
    )
    p.add_argument(
        "--limit",
        type=float,
        default=570,
        help="seconds after which no further process is started (570)",
    )
    p.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu tries the program out, no more",
    )
    p.add_argument("--out", help=f"JSON file (bench/results/{kind}.json)")
    p.add_argument("--worker", nargs=8, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.worker:
        return worker(work, args.worker)
    names = [n for n in args.contestants.split(",") if n] or [
        n for n in usual if n != "peer" or args.peer
    ]
    if set(names) - set(known) or ("peer" in names and args.peer is None):
        raise SystemExit(
            f"bench.{kind}: --contestants {args.contestants}: some of {','.join(known)}, and peer with --peer DIR"
        )
    runs = parsed(args.runs, kind)
    if args.device == "cuda":
        machine.require_gpu()

    end = time.monotonic() + args.limit
    data = {"machine": {"error": "nothing was measured"}, "rows": []}
    for run in runs:
        row = dict(zip(("model", "sequence", "batch"), run, strict=True), contestants={})
        data["rows"].append(row)
        for name in names:
            result = (
                run_apart(kind, name, run, args)
                if time.monotonic() < end
                else {"error": "no time left"}
            )
            if "machine" in result:
                version = result["machine"].pop("liger_kernel")
                data |= {"machine": result["machine"]} | (
                    {"peer": version} if name == "peer" else {}
                )
            row["contestants"][name] = result.get("figures", result)
            machine.save(kind, data, args.out)
            told = {k: v for k, v in row["contestants"][name].items() if k in (*shown, "error")}
            print(f"{report.train_label(row)}, {name}: {told}", flush=True)
    print("\n" + report.KINDS[kind](data))
