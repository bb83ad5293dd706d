"""The scripts in examples/ run as a user would run them, and learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import ROOT

import liger_kernel

# Where a model must learn something first, only a little.
SCRIPTS = {
    "distillation": ["--teacher-steps=3"],
    "dpo": [],
    "grpo": [],
    "medusa": ["--backbone-steps=3"],
    "orpo": [],
}


def test_every_script_is_tested():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*SCRIPTS, "common"}


def run_script(name, *options):
    """Run a script for three steps, and return the line of each."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= dict(
        PYTHONPATH=str(Path(liger_kernel.__file__).parents[1]),
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    options = ["--steps=3", "--batch-size=4", "--curve=", *SCRIPTS[name], *options]
    script = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options]
    process = subprocess.run(script, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    steps = [line for line in process.stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == 3
    return steps


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCRIPTS)
def test_loss_falls(name):
    steps = run_script(name)
    if name == "grpo":  # each step has a prompt of its own; its loss falls from update to update
        for line in steps:
            first, last = map(float, re.search(r"loss ([-\d.]+) -> ([-\d.]+)", line).groups())
            assert last < first - 0.01, line
    else:
        losses = [float(re.search(r"loss ([-\d.]+)", line)[1]) for line in steps]
        assert losses[-1] < losses[0], steps


@pytest.mark.thorough
@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_medusas_backbone_learns_with_the_heads(backbone, tmp_path):
    """The loss of the model and of each head falls.

    Their sum grows, as the heads get more weight from step to step.
    """
    steps = run_script("medusa", f"--backbone={backbone}", f"--out={tmp_path}/heads.pt")
    first, *_, last = [
        [float(loss) for loss in re.findall(r"([-\d.]+) \(\d+%\)", line)] for line in steps
    ]
    assert len(first) == len(last) == 1 + 3  # NaN is no number here
    assert last[0] < first[0] and all(
        b < a - 0.2 for a, b in zip(first[1:], last[1:], strict=True)
    ), steps
    assert {name.split(".")[0] for name in torch.load(tmp_path / "heads.pt")} == {
        "blocks",
        "projections",
    }
