"""The workflows: what starts them, what they may do, and that what they name is there. They run
elsewhere."""

import os
import re
import subprocess

import pytest
import yaml
from programs import ROOT

from liger_kernel._version import OLDEST_TRANSFORMERS, TESTED, __version__

FOLDER = ROOT / ".github" / "workflows"
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.yml"))}
FLOWS = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
JOBS = {(name, job): steps for name, flow in FLOWS.items() for job, steps in flow["jobs"].items()}
STEPS = [(*at, step) for at, job in JOBS.items() for step in job.get("steps", ())]
TRIGGERS = {
    "tests": {"push", "pull_request", "workflow_dispatch"},
    "lint": {"push", "pull_request"},
    "docs": {"push", "pull_request"},
    "portability": {"push", "pull_request", "workflow_dispatch"},
    "build": {"push", "pull_request", "workflow_call"},
    "gpu": {"pull_request", "schedule", "workflow_dispatch"},
    "weekly": {"schedule", "workflow_dispatch"},
    "nightly": {"schedule", "workflow_dispatch"},
    "release": {"push"},
}
MAY = {  # beyond reading the repository
    ("nightly", "publish"): {"id-token": "write"},
    ("release", "attest"): {"id-token": "write", "attestations": "write"},
    ("release", "publish"): {"id-token": "write"},
    ("release", "page"): {"contents": "write"},
}
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def on(flow):
    return flow[True]  # YAML 1.1 reads the key `on` as a truth


def listed(versions):
    return set(re.split(", | and ", versions))


def test_triggers():
    assert {name: set(on(flow)) for name, flow in FLOWS.items()} == TRIGGERS
    assert on(FLOWS["release"])["push"] == {"tags": ["v*.*.*"]}
    for name in ("tests", "lint", "docs", "portability", "build"):
        assert on(FLOWS[name])["push"] == {"branches": ["main"]}
    assert on(FLOWS["gpu"])["pull_request"] == {"types": ["labeled"]}


def test_permissions_are_least():
    assert all(flow["permissions"] == {"contents": "read"} for flow in FLOWS.values())
    assert {at: job["permissions"] for at, job in JOBS.items() if "permissions" in job} == MAY
    for name, job, step in STEPS:
        if (name, job) in MAY and "id-token" in MAY[
            name, job
        ]:  # no code of the repository with these
            assert "run" not in step and not step["uses"].startswith("actions/checkout")
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False, (name, job)
    assert not any("secrets." in text for text in TEXTS.values())


def test_a_machine_of_ours_runs_no_stranger():
    """What a pull request brings runs there only after the label, and that is each time for what
    was there then."""
    ours = [at for at, job in JOBS.items() if "self-hosted" in job.get("runs-on", ())]
    assert ours == [("gpu", "gpu")] == [at for at in JOBS if at[0] == "gpu"]
    condition = " ".join(JOBS["gpu", "gpu"]["if"].split())
    assert condition.startswith(
        "(github.event_name == 'pull_request' && github.event.label.name == 'run-gpu-tests') || "
    )
    assert JOBS["gpu", "gpu"]["environment"] == "gpu"
    assert not any(
        trigger in TEXTS[name]
        for name in TEXTS
        for trigger in ("pull_request_target", "workflow_run")
    )


def test_what_others_wrote_is_in_no_program():
    """A title or a branch's name within a program of the shell would be run by it."""
    allowed = r"\$\{\{ matrix\.\w+ \}\}"
    for name, job, step in STEPS:
        assert "${{" not in re.sub(allowed, "", step.get("run", "")), (name, job, step)


def test_actions_are_pinned():
    used = {step["uses"] for *_, step in STEPS if "uses" in step} | {
        job["uses"] for job in JOBS.values() if "uses" in job
    }
    for action in used:
        if action.startswith("./"):
            assert (ROOT / action).is_file()
        else:
            assert re.fullmatch(r"(actions|pypa)/[\w-]+@(v\d+|release/v1)", action), action
    watched = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert {entry["package-ecosystem"] for entry in watched} == {"github-actions", "pip"}
    assert all(entry["directory"] == "/" for entry in watched)


def test_every_job_ends():
    assert all(1 <= job["timeout-minutes"] <= 120 for job in JOBS.values() if "uses" not in job)


def test_what_they_call_is_there():
    makefile = (ROOT / "Makefile").read_text()
    called = "\n".join(step.get("run", "") for *_, step in STEPS)
    targets = set(re.findall(r"\bmake ([a-z][\w-]*)", called))
    assert {"test", "test-rest", "test-transformers-oldest", "test-xpu", "lint", "docs"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    assert "make .venv/.ready" in called and re.search(r"^\$\(VENV\)/\.ready:", makefile, re.M)
    files = set(re.findall(r"\b(?:scripts|tests)/[\w./-]+", called))
    assert {"scripts/gpu-tests", "scripts/release.py", "scripts/try_wheel.py"} <= files
    assert all((ROOT / file).is_file() for file in files)
    assert os.access(ROOT / "scripts" / "gpu-tests", os.X_OK)
    for name, job, step in STEPS:  # a variable that a program reads is given to it
        given = {
            **FLOWS[name].get("env", {}),
            **JOBS[name, job].get("env", {}),
            **step.get("env", {}),
        }
        for variable in re.findall(r"\$\{?([A-Z][A-Z_]+)", step.get("run", "")):
            assert variable in given or variable.startswith("GITHUB_"), (name, job, variable)


def test_needed_jobs_are_there():
    for (name, job), does in JOBS.items():
        needs = does.get("needs", [])
        needs = {needs} if isinstance(needs, str) else set(needs)
        read = set(re.findall(r"needs\.(\w+)\.", str(does)))
        assert needs <= set(FLOWS[name]["jobs"]) and read <= needs, (name, job)


def test_each_make_test_of_ci_is_a_job():
    """By the program of the job that lists them."""
    (program,) = [
        step["run"]
        for name, job, step in STEPS
        if (name, job) == ("tests", "list") and "run" in step
    ]
    script = re.search(r"sed -n '(.*?)' \.ci/run", program)[1]
    listed = subprocess.run(
        ["sed", "-n", script, ROOT / ".ci" / "run"], capture_output=True, text=True, check=True
    )
    targets = listed.stdout.split()
    assert "test-rest" in targets and "test-isa" in targets
    called = {target for target in re.findall(r"^make (\S+)", CI, re.M)}
    assert called == {*targets, "test", "lint", "docs"}


# torch's wheels with CUDA ask for exactly one Triton: 2.11.0 for 3.6.0, 2.12.0 for 3.7.0, 2.12.1
# and 2.13.0 for 3.7.1. Those without CUDA ask for none.
ASKED_FOR = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8"}


def tritons(matrix):
    return {entry.get("newer", entry["triton"]) for entry in matrix}


def minor(version):
    return tuple(int(part) for part in version.split(".")[:2])


def test_matrix_is_what_is_claimed():
    matrix = JOBS["tests", "versions"]["strategy"]["matrix"]["include"]
    in_matrix = {key: {entry[key] for entry in matrix} for key in matrix[0]}
    assert in_matrix["python"] == set(re.findall(r"Python :: (3\.\d+)", PYPROJECT))
    oldest = re.search(r'requires-python = ">=(3\.\d+)"', PYPROJECT)[1]
    assert min(in_matrix["python"], key=minor) == oldest
    assert tritons(matrix) == listed(TESTED["triton"]) and in_matrix["transformers"] == listed(
        TESTED["transformers"]
    )
    first, *_, last = sorted(listed(TESTED["torch"]), key=minor)
    between = range(minor(first)[1], minor(last)[1] + 1)
    assert in_matrix["torch"] == {f"{minor(first)[0]}.{each}" for each in between}
    older = JOBS["tests", "older-transformers"]
    assert (
        OLDEST_TRANSFORMERS in older["strategy"]["matrix"]["transformers"]
        and older["continue-on-error"]
    )
    compiled = JOBS["portability", "nvidia-and-amd"]["strategy"]["matrix"]["include"]
    assert tritons(compiled) == listed(TESTED["triton"])
    assert {entry["torch"] for entry in compiled} == listed(TESTED["torch"])
    tried = JOBS["build", "wheel"]["strategy"]["matrix"]["python"]
    assert tried == [oldest, max(in_matrix["python"], key=minor)]


@pytest.mark.parametrize(
    "job", [("tests", "versions"), ("portability", "nvidia-and-amd")], ids="/".join
)
def test_pip_can_install_what_the_matrix_names(job):
    """torch together with the Triton that it asks for, and another one afterwards, which asks
    nobody."""
    job = JOBS[job]
    matrix = job["strategy"]["matrix"]["include"]
    for entry in matrix:
        assert entry["triton"] == ASKED_FOR[entry["torch"]], entry
    assert any("newer" in entry for entry in matrix) and "newer" not in job["env"]["VERSIONS"]
    first, newer, tests = (step for step in job["steps"] if "run" in step)
    assert first["run"] == 'make .venv/.ready TORCH="$VERSIONS"'
    assert newer["if"] == "matrix.newer" and "TORCH" not in tests["run"]
    assert newer["run"].endswith('pip install --no-deps "triton==${{ matrix.newer }}.*"')


def test_the_page_of_versions_says_the_same():
    page_of_versions = (ROOT / "docs" / "index.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| ([\d., ]+) \|", page_of_versions, re.M))
    names = {
        "torch": "torch",
        "Triton": "triton",
        "transformers": "transformers",
        "Python": "python",
    }
    for page, key in (names | {"TRL": "trl"}).items():
        assert set(rows[page].split(", ")) == listed(TESTED[key]), page
    pairs = set(re.findall(r"^\| (\d\.\d+), (\d\.\d+) \|", page_of_versions, re.M))
    matrix = JOBS["tests", "versions"]["strategy"]["matrix"]["include"]
    assert pairs == {(entry["torch"], triton) for entry in matrix for triton in tritons([entry])}
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert all(f"{name} {TESTED[key]}" in readme for name, key in names.items())


def test_a_release_is_built_tried_and_attested_before_it_is_published():
    jobs, nightly = FLOWS["release"]["jobs"], FLOWS["nightly"]["jobs"]
    assert jobs["build"] == {"needs": "check", "uses": "./.github/workflows/build.yml"}
    assert jobs["attest"]["needs"] == "build" and jobs["publish"]["needs"] == "attest"
    assert nightly["build"]["uses"] == jobs["build"]["uses"] and nightly["build"]["with"] == {
        "nightly": True
    }
    assert nightly["publish"]["needs"] == "build" and nightly["build"]["needs"] == "changed"
    assert FLOWS["build"]["jobs"]["wheel"]["needs"] == "build"
    for flow, variable in ((jobs, "RELEASE_URL"), (nightly, "NIGHTLY_URL")):
        assert flow["publish"]["if"] == f"vars.{variable} != ''" and flow["publish"]["environment"]
        *_, upload = flow["publish"]["steps"]
        assert (
            upload["with"]["repository-url"] == f"${{{{ vars.{variable} }}}}"
            and "password" not in upload["with"]
        )


FORMS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
}


@pytest.mark.parametrize("name", sorted(set(FORMS) - {"config", "idea"}))
def test_forms_ask_for_the_doctor(name):
    form = FORMS[name]
    assert form["name"] and form["description"]
    asked = {entry["id"]: entry for entry in form["body"]}
    doctor = asked["doctor"]
    assert (
        "liger-kernel doctor" in doctor["attributes"]["label"]
        and doctor["attributes"]["render"] == "text"
    )
    assert doctor["validations"]["required"] and len(asked) == len(form["body"])


def test_nothing_is_reported_past_the_forms():
    assert FORMS["config"] == {"blank_issues_enabled": False} and {"bug", "idea"} <= set(FORMS)


def test_what_stands_beside_the_readme():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (
        cited["version"] == __version__
        and cited["license"] in PYPROJECT
        and cited["title"] == "liger-kernel"
    )
    for name in (
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CODE_OF_CONDUCT.md",
        "CHANGELOG.md",
        ".github/pull_request_template.md",
    ):
        text = (ROOT / name).read_text(encoding="utf-8")
        links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
        assert all((ROOT / link).exists() for link in links), name
        for target in re.findall(r"`make ([\w-]+)`", text):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), (name, target)
