"""Train a model as Hugging Face ships it and patched, and compare losses, speed and memory.

Each run is a process of its own with the same seeds, the same text and the Hugging Face Trainer;
the patched one sets use_liger_kernel=True and nothing else. Exit code 1 means that the losses
differ.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

from liger_kernel._version import __version__
from liger_kernel.cli import chart, options
from liger_kernel.cli.options import add_arguments
from liger_kernel.cli.train import Training, in_process
from liger_kernel.cli.verdict import table, verdict

__all__ = ["add_arguments", "compare", "run"]


def run(args: argparse.Namespace) -> int:
    result = compare(options.training(args), args.tolerance)
    print(table(result))
    if args.json:
        Path(args.json).write_text(json.dumps(_finite(result), indent=2, allow_nan=False) + "\n")
    if args.chart:
        chart.draw(result, args.chart)
        print(f"Chart: {args.chart}")
    return 0 if result["verdict"]["parity"] else 1


def compare(training: Training, tolerance: float | str | None = None) -> dict:
    """Return both runs, and a third that measures the noise if the tolerance needs it."""
    runs = {
        "huggingface": _run(training, "Hugging Face"),
        "patched": _run(replace(training, patched=True), "patched"),
    }
    if tolerance == "noise" or tolerance is None and runs["huggingface"]["dtype"] != "float32":
        runs["nudged"] = _run(replace(training, nudged=True), "Hugging Face, other last bits")
    return {
        "liger_kernel": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "training": asdict(training),
        "runs": runs,
        "verdict": verdict(runs, tolerance),
    }


def _run(training: Training, title: str) -> dict:
    with _Progress(title, training.steps) as progress:
        return in_process(training, progress, title)


class _Progress:
    """A bar on a terminal, elsewhere a line every few steps, on stderr."""

    def __init__(self, title: str, steps: int):
        self.title = title
        self.steps = steps
        self.print_every = max(1, steps // 5)
        self.bar = None

    def __enter__(self):
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=self.steps, desc=self.title, unit="step", file=sys.stderr)
        return self

    def __exit__(self, *error):
        if self.bar is not None:
            self.bar.leave = error[0] is None
            self.bar.close()

    def __call__(self, event: dict) -> None:
        step = event["step"]
        loss = f"{event['loss']:.4f}"
        if self.bar is not None:
            if step == 1:
                self.bar.unpause()  # the rate is that of the steps, without loading
            self.bar.set_postfix(loss=loss, refresh=False)
            self.bar.update()
        elif step in (1, self.steps) or step % self.print_every == 0:
            print(f"{self.title}: step {step} of {self.steps}, loss {loss}", file=sys.stderr)


def _finite(value):
    """Return the value with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
