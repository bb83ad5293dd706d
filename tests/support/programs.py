"""Programs in a process of their own: Triton interprets or compiles, once for all; an import is not
taken back."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]  # of this repository


def environment(**variables):
    """For a process that can import what this one can, and has no setting of Triton's."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    return mine | dict(PYTHONPATH=os.pathsep.join(filter(None, sys.path))) | variables


def ran(command, **variables):
    """What it printed."""
    done = subprocess.run(
        [sys.executable, *command], env=environment(**variables), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(program, *, without=()):
    """Run a program in a process of its own, in which the modules ``without`` cannot be
    imported."""
    block = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(without)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
"""
    return ran(["-c", block + program])
