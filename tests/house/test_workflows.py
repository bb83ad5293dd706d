"""The workflows: what they may do, and who may start them. They run elsewhere."""

import re

import yaml
from programs import ROOT

FOLDER = ROOT / ".github" / "workflows"
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.yml"))}
FLOWS = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
JOBS = {(name, job): steps for name, flow in FLOWS.items() for job, steps in flow["jobs"].items()}
STEPS = [(*at, step) for at, job in JOBS.items() for step in job.get("steps", ())]
MAY = {  # beyond reading the repository
    ("nightly", "publish"): {"id-token": "write"},
    ("release", "attest"): {"id-token": "write", "attestations": "write"},
    ("release", "publish"): {"id-token": "write"},
    ("release", "page"): {"contents": "write"},
}


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
    """By commit, with the version beside it, which Dependabot keeps up to date."""
    uses = re.findall(r"uses: (\S+)(.*)", "\n".join(TEXTS.values()))
    for action, comment in uses:
        if action.startswith("./"):
            assert (ROOT / action).is_file()
        elif not action.startswith("actions/attest-build-provenance@v"):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action
            assert re.fullmatch(r" # v[\d.]+", comment), action
    watched = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert {entry["package-ecosystem"] for entry in watched} == {"github-actions", "pip"}


def test_every_job_ends():
    assert all(1 <= job["timeout-minutes"] <= 120 for job in JOBS.values() if "uses" not in job)
