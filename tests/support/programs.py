"""Programs in a process of their own.

A process either interprets Triton's kernels or compiles them, and an import is not taken back.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]  # the repository's


def environment(**variables):
    """Return an environment with this process's imports, and without a setting of Triton's."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    return inherited | dict(PYTHONPATH=os.pathsep.join(filter(None, sys.path))) | variables


def run_command(command, **variables):
    """Run Python with these arguments, and return what it printed."""
    process = subprocess.run(
        [sys.executable, *command], env=environment(**variables), capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def run_program(program, *, without=()):
    """Run a program, in whose process the modules ``without`` cannot be imported."""
    block = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(without)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
"""
    return run_command(["-c", block + program])


def guide_file(page, name):
    """Return the text of the file ``name`` that a page of docs/guides prints."""
    text = (ROOT / "docs" / "guides" / page).read_text()
    block = re.search(rf"<!-- file: {re.escape(name)} -->\n```\w+\n(.*?)```", text, re.S)
    assert block, f"docs/guides/{page} has no file {name}"
    return block[1]
