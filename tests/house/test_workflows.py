"""The workflows' permissions, and who may start them. They run elsewhere."""

import re

import yaml
from programs import ROOT

FOLDER = ROOT / ".github" / "workflows"
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.yml"))}
FLOWS = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
JOBS = {(name, job): steps for name, flow in FLOWS.items() for job, steps in flow["jobs"].items()}
STEPS = [(*at, step) for at, job in JOBS.items() for step in job.get("steps", ())]
# Permissions beyond reading the repository.
PERMISSIONS = {
    ("nightly", "publish"): {"id-token": "write"},
    ("release", "attest"): {"id-token": "write", "attestations": "write"},
    ("release", "publish"): {"id-token": "write"},
    ("release", "page"): {"contents": "write"},
}


def test_permissions_are_least():
    assert all(flow["permissions"] == {"contents": "read"} for flow in FLOWS.values())
    permissions = {key: job["permissions"] for key, job in JOBS.items() if "permissions" in job}
    assert permissions == PERMISSIONS
    for name, job, step in STEPS:
        if "id-token" in PERMISSIONS.get((name, job), {}):  # no code of the repository with these
            assert "run" not in step and not step["uses"].startswith("actions/checkout")
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False, (name, job)
    assert not any("secrets." in text for text in TEXTS.values())


def test_our_machines_run_no_strangers_code():
    """A pull request's code runs there only after the label, which is for the code of that time."""
    self_hosted = [key for key, job in JOBS.items() if "self-hosted" in job.get("runs-on", ())]
    assert self_hosted == [("gpu", "gpu")] == [key for key in JOBS if key[0] == "gpu"]
    condition = " ".join(JOBS["gpu", "gpu"]["if"].split())
    assert condition.startswith(
        "(github.event_name == 'pull_request' && github.event.label.name == 'run-gpu-tests') || "
    )
    assert JOBS["gpu", "gpu"]["environment"] == "gpu"
    for text in TEXTS.values():
        assert "pull_request_target" not in text and "workflow_run" not in text


def test_no_script_contains_a_strangers_text():
    """A shell would run a title or a branch's name within its script."""
    allowed = r"\$\{\{ matrix\.\w+ \}\}"
    for name, job, step in STEPS:
        assert "${{" not in re.sub(allowed, "", step.get("run", "")), (name, job, step)


def test_actions_are_pinned():
    """They are pinned by commit, with the version in a comment, which Dependabot updates."""
    uses = re.findall(r"uses: (\S+)(.*)", "\n".join(TEXTS.values()))
    for action, comment in uses:
        if action.startswith("./"):
            assert (ROOT / action).is_file()
        elif not action.startswith("actions/attest-build-provenance@v"):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action
            assert re.fullmatch(r" # v[\d.]+", comment), action
    watched = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert {entry["package-ecosystem"] for entry in watched} == {"github-actions", "pip"}


def test_workflows_open_nothing():
    """No issue, no pull request: the nightly run fails, and whoever looks at it sees that."""
    for name, text in TEXTS.items():
        assert not re.search(r"\bgh (issue|pr|api)\b|create-(pull-request|an-issue)", text), name
    steps = [step.get("run", "") for step in JOBS["nightly", "upstream"]["steps"]]
    assert any("--pre" in step and "torch triton" in step for step in steps)


def test_the_wheel_is_tried_beside_the_newest_of_everything():
    steps = [step.get("run", "") for step in JOBS["build", "newest"]["steps"]]
    (install,) = [step for step in steps if "pip install" in step]
    assert "dist/*.whl" in install and "==" not in install
    assert all(name in install for name in ("transformers", "trl", "peft", "bitsandbytes"))
    assert steps.index(install) < steps.index("python3 scripts/try_wheel.py")
    assert any("apply_liger_kernel_to_trl" in step for step in steps[steps.index(install) :])


def test_every_job_ends():
    assert all(1 <= job["timeout-minutes"] <= 120 for job in JOBS.values() if "uses" not in job)
