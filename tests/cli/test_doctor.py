"""`liger-kernel doctor`: its report, problems and remedies."""

import dataclasses
import importlib.metadata
import json
import re

import pytest
import torch
from programs import ROOT

from liger_kernel.cli import _child, doctor
from liger_kernel.cli._child import Crash


@pytest.fixture(scope="module")
def examined():
    """The doctor's report on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return doctor.examine()


@pytest.mark.xdist_group("doctor")
@pytest.mark.thorough
def test_doctor(answer, monkeypatch, examined):
    monkeypatch.setattr(doctor, "examine", lambda: examined)
    code, out, err = answer("doctor", "--json")
    report = json.loads(out)
    torch_version = importlib.metadata.version("torch")  # torch.__version__ has a local part, too
    assert report["versions"]["torch"] == torch_version and "transformers" in report["versions"]
    assert {
        "versions",
        "frameworks",
        "liger_kernel",
        "devices",
        "triton",
        "kernels",
        "problems",
    } <= set(report)
    assert code == (1 if report["problems"] else 0)
    assert bool(report["devices"]) == torch.cuda.is_available()
    if report["devices"]:
        assert report["triton"]["works"] and {kernel["name"] for kernel in report["kernels"]} >= {
            "rms_norm"
        }
    code, out, _ = answer("doctor")
    assert f"torch {torch_version}" in out and (
        "PyTorch reference" in out or "Triton: compiles" in out
    )


def test_doctor_names_problems_and_remedies(monkeypatch):
    report = dict(
        versions={"python": "3.12", "torch": "2.11", "triton": "3.6", "transformers": "4.57.1"},
        devices=[{}],
        build={},
        liger_kernel=dict(provided_by=["liger-kernel 0.8.6", "liger-kernel-nightly 0.8"]),
        triton=dict(works=True),
        kernels=[dict(name="rope", works=False, problem="wrong")],
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    conflict, old, interpreted, kernel = doctor._problems(report)
    assert (
        "liger-kernel 0.8.6 and liger-kernel-nightly 0.8" in conflict
        and "uninstall both" in conflict
    )
    assert (
        "transformers 5.0.0 or newer, here is 4.57.1" in old
        and "pip install -U transformers" in old
    )
    assert "unset it" in interpreted and "The kernel rope does not work here (wrong)" in kernel
    monkeypatch.delenv("TRITON_INTERPRET")
    fine = dict(
        versions={"torch": "2"}, devices=[{}], build={}, liger_kernel=dict(provided_by=["one 1"])
    )
    assert doctor._problems(fine | dict(triton=dict(works=True), kernels=[])) == []
    (broken,) = doctor._problems(fine | dict(triton=dict(works=False, problem="no"), kernels=[]))
    assert "Triton does not work here (no): pip install triton" in broken


@pytest.mark.xdist_group("doctor")
@pytest.mark.thorough
def test_doctor_says_what_it_was_tested_with(answer, monkeypatch, examined):
    from liger_kernel._version import TESTED

    monkeypatch.setattr(doctor, "examine", lambda: examined)
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = answer("doctor")
    assert all(f"{name} {versions}" in " ".join(out.split()) for name, versions in TESTED.items())
    long = [line for line in out.splitlines() if len(line) > 40]
    assert all(len(line.split()) == 1 for line in long), "only a word can be too long"
    makefile = (ROOT / "Makefile").read_text()
    (oldest,) = re.findall(r"^OLDEST \?= (\d+\.\d+)", makefile, re.M)
    (trl,) = re.findall(r"^TRL \?= (.*)", makefile, re.M)
    assert TESTED["transformers"].startswith(oldest)
    assert TESTED["trl"] == " and ".join(re.findall(r"(\d+\.\d+)\.\d+", trl))


def test_doctor_marks_versions_that_were_not_tested(answer, monkeypatch):
    """Newer, older and between; a build's own suffix and a patch release make no other version. It
    is no problem."""
    from liger_kernel._version import TESTED

    tested = {name: doctor.tested_minors(name) for name in TESTED}
    fine = {name: f"{minors[-1]}.1.post2+cpu" for name, minors in tested.items()}
    assert doctor.untested(fine | {"accelerate": "0.1"}) == []
    assert doctor.untested({name: minors[0] for name, minors in tested.items()}) == []
    others = {
        "torch": "2.99.0.dev20261101+cu130",
        "triton": "3.60.0",
        "transformers": "5.0.1",
        "trl": "0.1",
    }
    assert doctor.untested(fine | others) == list(others)
    monkeypatch.setattr(doctor, "_try_imports", lambda report: None)
    monkeypatch.setattr(doctor, "_try_out", lambda report: None)
    monkeypatch.setattr(doctor, "_problems", lambda report: [])
    for changes, marked in ((others, list(others)), ({}, [])):
        versions = fine | changes
        monkeypatch.setattr(
            doctor, "installed", lambda *names, v=versions: {n: v[n] for n in names if n in v}
        )
        monkeypatch.setattr("platform.python_version", lambda v=versions: v["python"])
        code, out, _ = answer("doctor")
        assert code == 0 and "Nothing to fix." in out
        for name in TESTED:
            assert (f"{name} {versions[name]}, not tested" in out) == (name in marked), name
        advice = "install a version that was tested"
        assert ("Not tested with" in out) == (advice in " ".join(out.split())) == bool(marked)
        assert json.loads(answer("doctor", "--json")[1])["untested"] == marked


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_doctor_tells_broken_from_absent(tmp_path, monkeypatch, name):
    """A package that is installed and fails to load, one that ends the process, and one that is not
    there."""
    from liger_kernel.cli import imports

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    versions = {"torch": "2.13.0", "triton": "3.9.0"}
    monkeypatch.setattr(
        doctor, "installed", lambda *names: {n: v for n, v in versions.items() if n in names}
    )
    monkeypatch.setattr(doctor, "_try_out", lambda report: None)
    for other in versions:
        (tmp_path / f"{other}.py").write_text("")  # quickly imported
    (tmp_path / f"{name}.py").write_text("raise ImportError('libcuda.so: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (problem,) = doctor.examine()["problems"]
    assert problem == (
        f"{name} {versions[name]} is installed, but cannot be imported "
        "(ImportError: libcuda.so: no such file): install it anew."
    )
    (tmp_path / f"{name}.py").write_text("import os; os.abort()")
    report = doctor.examine()
    assert list(report["broken"]) == [name] and "killed by SIGABRT" in report["problems"][0]
    versions.pop(name)
    problems = doctor.examine()["problems"]
    assert problems == (["PyTorch is missing: pip install torch."] if name == "torch" else [])
    events = []
    imports.imports(
        dict(names=["json", "nonsense"]),
        lambda event, **values: events.append((event, *values.values())),
    )
    assert (
        events[:2] == [("trying", "json"), ("trying", "nonsense")]
        and "ModuleNotFoundError" in events[2][1]
    )


def test_doctor_survives_a_kernel_that_takes_the_process_down(monkeypatch):
    def crashing(module, spec, on_event, title):
        if module == "liger_kernel.cli.imports":
            return {}
        on_event(
            dict(event="devices", devices=[dict(name="a GPU", architecture="sm_90", memory=1)])
        )
        on_event(dict(event="triton", works=True, problem=None))
        on_event(dict(event="trying", name="rope"))
        raise Crash("the check was killed by SIGSEGV")

    monkeypatch.setattr(_child, "run", crashing)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    problems = doctor.examine()["problems"]
    assert any(
        "Trying rope brought the process down. the check was killed by SIGSEGV" in p
        for p in problems
    )


def test_the_doctors_check_tells_right_from_wrong():
    from hardware import DEVICE

    import liger_kernel.ops  # noqa: F401  (fills CASES)
    from liger_kernel.cli import checkup
    from liger_kernel.core.op import CASES

    case = next(case for case in CASES if case.name == "rms_norm")
    assert checkup._run_check(checkup._agrees, case, DEVICE) == dict(works=True, problem=None)
    wrong = dataclasses.replace(case, fn=lambda **inputs: 1.01 * case.fn(**inputs))
    report = checkup._run_check(checkup._agrees, wrong, DEVICE)
    assert not report["works"] and "result 0 is wrong by" in report["problem"]
    checkup._triton_works(DEVICE)
