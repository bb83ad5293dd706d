"""`liger_kernel.cli.versions` has what the package was tested with. Pages and workflows agree."""

import re

import pytest
import yaml
from portability_targets import FAMILIES, TARGETS
from programs import ROOT

from liger_kernel.cli.versions import COMPILED_FOR, GPUS, RAN_ON_GPUS, TESTED, join_words, minor

INDEX = (ROOT / "docs" / "index.md").read_text()
README = " ".join((ROOT / "README.md").read_text().split())
MAKEFILE = (ROOT / "Makefile").read_text()
JOBS = {
    name: yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())["jobs"]
    for name in ("tests", "portability")
}
TITLES = {
    "python": "Python",
    "torch": "torch",
    "triton": "Triton",
    "transformers": "transformers",
    "trl": "TRL",
    "peft": "PEFT",
    "bitsandbytes": "bitsandbytes",
}


def table_rows(title):
    """Return the rows of docs/index.md's tables that begin with ``title``, without it."""
    rows = re.findall(rf"^\| {re.escape(title)}\b(.*) \|$", INDEX, re.M)
    return [[cell.strip() for cell in row.split(" |")] for row in rows]


def combinations(workflow, job):
    return JOBS[workflow][job]["strategy"]["matrix"]["include"]


def triton_of(combination):
    return combination.get("newer") or combination["triton"]


@pytest.mark.parametrize("name", TESTED)
def test_the_pages_name_the_tested_versions(name):
    tested_cell = table_rows(TITLES[name])[0][1]
    assert tested_cell == ", ".join(TESTED[name])
    if name in ("python", "torch", "triton", "transformers"):
        assert f"{TITLES[name]} {join_words(TESTED[name])}" in README


def test_the_makefile_installs_tested_versions():
    def variable(name):
        (value,) = re.findall(rf"^{name} \?= (.*)$", MAKEFILE, re.M)
        return re.findall(r"\b(\d+\.\d+)\.\d+", value)

    assert variable("TORCH")[0] in TESTED["torch"]
    assert variable("OLDEST") == [TESTED["transformers"][0]]
    assert variable("TRL") == list(TESTED["trl"])
    # the newest TRL runs in test-newest
    named = re.findall(r"\btest-trl-(\d+\.\d+)", (ROOT / ".ci" / "run").read_text())
    assert named == list(TESTED["trl"][:-1])
    assert variable("BITSANDBYTES") == list(TESTED["bitsandbytes"])


def test_the_workflows_test_these_versions():
    """A workflow may be ahead of what was tested: then the page says so."""
    rows = combinations("tests", "versions")
    for name in ("torch", "transformers"):
        in_workflow = {row[name] for row in rows}
        assert in_workflow >= set(TESTED[name])
        for version in in_workflow - set(TESTED[name]):
            assert f"| {version}, " in INDEX and "not run yet" in INDEX
    assert {triton_of(row) for row in rows} == set(TESTED["triton"])
    assert {row["python"] for row in rows} >= set(TESTED["python"])
    newest = [row["trl"] for row in rows if row["torch"] >= TESTED["torch"][-1]]
    assert newest and {minor(version) for version in newest} == {TESTED["trl"][-1]}
    oldest = {name: minors[0] for name, minors in TESTED.items()}
    assert (rows[0]["torch"], rows[0]["triton"], rows[0]["transformers"]) == (
        oldest["torch"],
        oldest["triton"],
        oldest["transformers"],
    )
    tritons = [triton_of(row) for row in combinations("portability", "nvidia-and-amd")]
    assert tritons == list(TESTED["triton"])


def test_the_page_names_every_pair_of_the_workflow():
    for row in combinations("tests", "versions"):
        (cells,) = [cells for cells in table_rows(f"{row['torch']}, {triton_of(row)}")]
        ran = row["torch"] in RAN_ON_GPUS["torch"] and triton_of(row) in RAN_ON_GPUS["triton"]
        assert cells[-1] == (join_words(GPUS["sm_90"]) if ran else "never")


def test_what_ran_on_gpus_was_tested():
    assert all(set(versions) <= set(TESTED[name]) for name, versions in RAN_ON_GPUS.items())
    assert set(GPUS) <= set(COMPILED_FOR)


def test_the_tests_compile_for_what_the_table_says():
    assert set(COMPILED_FOR) == set(TARGETS)
    assert sorted(name for family in FAMILIES for name in family) == sorted(TARGETS)


@pytest.mark.parametrize("architecture", COMPILED_FOR)
def test_the_pages_say_which_gpus_were_compiled_for_and_which_ran(architecture):
    gpus = INDEX.partition("\n## GPUs\n")[2]
    (row,) = [line for line in gpus.splitlines() if re.search(rf"^\|.*\b{architecture}\b", line)]
    if architecture in GPUS:
        assert all(gpu in row for gpu in GPUS[architecture]) and "never" not in row
    else:
        assert row.endswith("| never |")
    assert architecture in README
