"""Measure whole steps of TRL's trainers: TRL alone, and the same with ``use_liger_kernel=True``.

    PYTHONPATH=src[:DIRECTORY OF TRL] python -m bench.trl_steps [--parts steps longest entropy]
        [--rows "SFT 1B" ...] [--resume]

1. ``steps``: time and peak memory of a step of SFT, DPO and GRPO: a 1B as TRL trains by default,
   its weights in fp32 under bf16 autocast, with AdamW; an 8B in bf16 with SGD, which keeps no
   states. Completions are not generated.
2. ``longest``: the longest rows of a Gemma 3 1B that fit into 79 GiB, or into what the GPU has,
   beside those that TRL's documentation gives for its head. All of its layers attend to all
   tokens: a mask of the sliding layers would be as large as the square of the row.
3. ``entropy``: the entropy of a policy over 50 steps of GRPO on text. Both heads in bf16 autocast
   are held against TRL's in fp32.

Each side has a process of its own (`bench.trl_worker`), and they take turns. Results are saved
after each row and each try; ``--resume`` goes on with what the file lacks. TRL is 1.15 or 1.16."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from . import finetune, longest, machine, ops, processes, runs, train
from .finetune_table import OUT_OF_MEMORY
from .trl_steps_table import DOCUMENTED, SIDES, steps_line, trl_steps

# a row: the fields of `trl_worker.Spec` that are not its defaults
ON_1B = dict(model="Llama-3.2-1B", untimed=2, timed=4)
ON_8B = dict(
    model="Llama-3-8B", dtype="bfloat16", autocast=False, optimizer="sgd", untimed=1, timed=3
)
STEPS = {
    "SFT 1B": dict(trainer="SFT", sequence=4096, rows=4, **ON_1B),
    "DPO 1B": dict(trainer="DPO", sequence=2048, rows=4, **ON_1B),
    "GRPO 1B": dict(trainer="GRPO", sequence=1024, rows=8, **ON_1B),
    "SFT 8B": dict(trainer="SFT", sequence=4096, rows=2, **ON_8B),
    "DPO 8B": dict(trainer="DPO", sequence=2048, rows=2, **ON_8B),
    "GRPO 8B": dict(trainer="GRPO", sequence=1024, rows=4, **ON_8B),
}
# each row's sequence is that of TRL's documentation, around which the longest is searched
LONGEST = {
    name: dict(trainer=trainer, sequence=DOCUMENTED[name], rows=rows)
    for name, trainer, rows in (
        ("SFT", "SFT", 1),
        ("DPO", "DPO", 2),
        ("KTO", "KTO", 2),
        ("GRPO, scoring", "scoring", 1),
        ("RLOO", "RLOO", 1),
    )
}
GEMMA = dict(model="Gemma-3-1B", untimed=0, timed=1)
MEMORY = 79 * 2**30
CONTEXT = 2**30  # bytes of a GPU that are not the allocator's
SHARE = 16  # the longest row is found to one part in so many of the documented one
ENTROPY = dict(
    trainer="GRPO",
    model="Llama-100M",
    sequence=512,
    rows=8,
    untimed=0,
    timed=50,
    lr=1e-4,
    random_tokens=False,
)
PARTS = "steps", "longest", "entropy"


class Worker(ops.Worker):
    """A `bench.trl_worker` process."""

    def __init__(self, side: str, device: str):
        super().__init__(side, runs.ROOT / "src")
        self.device = device

    def start(self) -> None:
        environment = os.environ | {"PYTHONPATH": runs.import_path(None)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.trl_worker", self.side],
            cwd=runs.ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | processes.visible_devices(1, self.device),
        )


class Measurements:
    """The file of results, which grows by an answer at a time."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.end = time.monotonic() + args.limit
        described = processes.describe_machine()
        begin = dict(machine=described, trl=machine.version("trl"), dtype="products in bf16")
        earlier = machine.resumed("trl_steps", begin, args.out) if args.resume else None
        self.data = earlier or begin | {part: [] for part in PARTS}
        self.workers = {side: Worker(side, args.device) for side in SIDES}

    def save(self) -> None:
        machine.save("trl_steps", self.data, self.args.out)

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.stop()

    def entry(self, part: str, name: str, spec: dict) -> dict:
        """Return the entry of a row, added if there is none."""
        for entry in self.data[part]:
            if entry["name"] == name and entry["spec"] == spec:
                return entry
        self.data[part].append(dict(name=name, spec=spec, contestants={}))
        return self.data[part][-1]

    def ask(self, side: str, spec: dict) -> dict:
        if time.monotonic() > self.end:
            raise processes.NoTime
        return self.workers[side].ask(spec, self.args.run_limit)

    # ---- the parts ----

    def steps(self, name: str, spec: dict) -> None:
        """Time the steps of both sides."""
        entry = self.entry("steps", name, spec)
        for side in SIDES:
            if "steps_ms" in entry["contestants"].get(side, {}):
                continue
            figures = self.ask(side, spec)
            if "error" not in figures:
                figures |= train.speed(spec["sequence"], spec["rows"], figures["steps_ms"])
            entry["contestants"][side] = figures
            self.save()
        print(steps_line(entry), flush=True)

    def longest(self, name: str, spec: dict) -> None:
        """Find the longest rows of both sides. Only one of them has memory at a time."""
        entry = self.entry("longest", name, spec)
        documented, memory = spec["sequence"], spec.get("memory")
        for side in SIDES:
            tried = entry["contestants"].setdefault(side, {})
            tried.pop("error", None)
            while (sequence := next_sequence(tried, documented, memory)) is not None:
                for other in self.workers:
                    if other != side:
                        self.workers[other].stop()
                figures = self.ask(side, spec | dict(sequence=sequence))
                tried[str(sequence)] = figures
                print(f"longest, {name}, {side}, {sequence:,} tokens: {shown(figures)}", flush=True)
                self.save()
                if figures.get("error", OUT_OF_MEMORY) != OUT_OF_MEMORY:
                    del tried[str(sequence)]
                    tried["error"] = figures["error"]
                    break

    def entropy(self, name: str, spec: dict) -> None:
        """Train by both heads in bf16 autocast, and by TRL's in fp32."""
        entry = self.entry("entropy", name, spec)
        for contestant, side, autocast in (
            ("fp32", "TRL", False),
            ("TRL", "TRL", True),
            ("ours", "ours", True),
        ):
            if "entropies" in entry["contestants"].get(contestant, {}):
                continue
            figures = self.ask(side, spec | dict(autocast=autocast))
            entry["contestants"][contestant] = figures
            print(f"entropy, {contestant}: {shown(figures)}", flush=True)
            self.save()


def shown(figures: dict) -> str:
    """Return the figures of one training as they are printed."""
    if "error" in figures:
        return figures["error"]
    last = f", entropy {figures['entropies'][-1]:.4f}" if figures["entropies"] else ""
    seconds = figures["steps_ms"][-1] / 1e3
    return f"{seconds:.2f} s, {figures['peak_bytes'] / 1e9:.2f} GB{last}"


def next_sequence(tried: dict[str, dict], documented: int, memory: float | None) -> int | None:
    """Return the sequence to try next, or None if the longest that fits is found: to a sixteenth of
    the ``documented`` one, and at most twice that. ``memory``: GB of the process."""
    part = max(1, documented // SHARE)
    peaks = {str(int(n) // part): figures.get("peak_bytes") for n, figures in tried.items()}
    parts = finetune.next_batch(peaks, 2 * SHARE, memory and memory * 1e9)
    return parts and parts * part


# ---- the command line ----


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(all)")
    parser.add_argument(
        "--rows", nargs="+", help=f"some of {', '.join((*STEPS, *LONGEST))} (all of them)"
    )
    parser.add_argument(
        "--model", type=processes.model_name, help="in place of each row's, to try this program"
    )
    parser.add_argument("--sequence", type=int, help="in place of each row's")
    parser.add_argument("--steps", type=int, help="timed, in place of each row's")
    processes.add_options(parser, "trl_steps", run_limit=180, limit=450)
    return parser.parse_args(argv)


def change(spec: dict, args: argparse.Namespace) -> dict:
    """Return a row's spec with what the options change."""
    changes = dict(model=args.model, sequence=args.sequence, timed=args.steps)
    changes = {name: value for name, value in changes.items() if value is not None}
    return spec | changes | dict(device=args.device)


def measure(args: argparse.Namespace) -> dict:
    """Measure all rows that are asked for, as far as the time goes. Returns the results."""
    measurements = Measurements(args)
    try:
        for part, rows, common in (
            ("steps", STEPS, {}),
            ("entropy", {"GRPO": ENTROPY}, {}),
            ("longest", LONGEST, GEMMA),
        ):
            for name, spec in rows.items():
                if part not in args.parts or args.rows and name not in args.rows:
                    continue
                spec = change(common | spec, args)
                if part == "longest" and args.device == "cuda":
                    total = measurements.data["machine"]["memory"]
                    spec["memory"] = min(MEMORY, total - CONTEXT) / 1e9
                getattr(measurements, part)(name, spec)
    except processes.NoTime:
        print("bench.trl_steps: no time left; --resume goes on from here", flush=True)
    finally:
        measurements.stop()
        measurements.save()
    return measurements.data


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.device == "cuda":
        machine.require_gpu()
    longest.environment(None)
    print("\n" + trl_steps(measure(args)))


if __name__ == "__main__":
    main()
