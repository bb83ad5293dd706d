"""The Makefile's targets: what `make test-frameworks` and CI run is what the pages say, and is
prepared."""

import os
import re
import shutil
import subprocess

import pytest
from programs import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CI = re.findall(r"^make (test[\w-]*)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)
FRAMEWORKS = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
TARGET = re.compile(r"`(?:make )?(test-[\w-]+)`")
WEEKLY = set(
    re.findall(r"make (test-[\w-]+)", (ROOT / ".github" / "workflows" / "weekly.yml").read_text())
)
(LEFT_OUT,) = re.findall(r"\.ci/run` runs all but (.*?), which take", " ".join(FRAMEWORKS.split()))
LEFT_OUT = set(TARGET.findall(LEFT_OUT))


def targets_of_the_table():
    rows = re.findall(r"^\|.*\|$", FRAMEWORKS, re.M)
    header, _, *rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    assert header[-1] == "target" and all(len(row) == len(header) for row in rows)
    assert all(re.match("`test", row[-1]) for row in rows)
    return {target for row in rows for target in TARGET.findall(row[-1])}


def prerequisites(target):
    (found,) = re.findall(rf"^{target}:((?:.*\\\n)*.*)$", MAKEFILE, re.M)
    return set(found.replace("\\\n", " ").split())


def test_frameworks_are_those_of_the_table():
    assert targets_of_the_table() == prerequisites("test-frameworks")


def test_ci_runs_what_the_page_says():
    assert targets_of_the_table() - set(CI) == LEFT_OUT
    assert LEFT_OUT == WEEKLY - set(CI)


def test_every_target_is_in_a_table():
    targets = set(re.findall(r"^(test-[a-z-]+):", MAKEFILE, re.M))
    assert {"test-rest", "test-cluster", *prerequisites("test-frameworks")} <= targets
    tables = "\n".join(re.findall(r"^\|.*\|$", FRAMEWORKS + CONTRIBUTING, re.M))
    assert targets == set(TARGET.findall(tables))


def made(*targets):
    """The environments that make would make, were there none."""
    command = ["make", "--dry-run", "--always-make", "VENV=none", *targets]
    env = {
        k: v for k, v in os.environ.items() if k != "PYTHON" and not k.startswith("MAKE")
    }  # a make's around this
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"^touch (\S+)$", done.stdout, re.M))


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make here")
def test_what_ci_runs_is_prepared():
    """`make environments`, which .ci/run calls beside the docs, makes those of its targets and no
    other."""
    wanted = made(*CI)
    assert len(wanted) > 10 and made("environments") == wanted
