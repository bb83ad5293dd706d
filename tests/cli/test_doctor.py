"""`liger-kernel doctor`: its report, problems and remedies."""

import dataclasses
import importlib.metadata
import json

import pytest
import torch

from liger_kernel.cli import _child, doctor
from liger_kernel.cli._child import Crash
from liger_kernel.cli.versions import TESTED, join_words


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
    monkeypatch.setattr(doctor, "examine", lambda: examined)
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = answer("doctor")
    text = " ".join(out.split())
    for name, minors in TESTED.items():
        assert f"{name} {join_words(minors)}" in text
    ran = "with torch 2.11, triton 3.6, 3.7 and 3.9, transformers 5.17, not in every pair"
    assert f"run on H100 and H200 {ran}" in text
    long = [line for line in out.splitlines() if len(line) > 40]
    assert all(len(line.split()) == 1 for line in long), "only a word can be too long"


# versions as they are installed: the newest and the oldest that are tested
NEWEST = {name: f"{minors[-1]}.1.post2+cpu" for name, minors in TESTED.items()}
OLDEST = {name: f"{minors[0]}.0" for name, minors in TESTED.items()}


@pytest.fixture
def doctor_with(answer, monkeypatch):
    """Return a function of versions and, with a GPU, what its check reports: (out, report)."""
    monkeypatch.setattr(doctor, "_try_imports", lambda report: None)
    monkeypatch.setattr(doctor, "_problems", lambda report: [])

    def call(versions, **gpu_report):
        monkeypatch.setattr(
            doctor, "installed", lambda *names: {n: versions[n] for n in names if n in versions}
        )
        monkeypatch.setattr("platform.python_version", lambda: versions["python"])
        monkeypatch.setattr(doctor, "_try_out", lambda report: report.update(gpu_report))
        code, out, _ = answer("doctor")
        assert code == 0 and "Nothing to fix." in out
        return out, json.loads(answer("doctor", "--json")[1])

    return call


def on_gpu(name="NVIDIA H200", architecture="sm_90", works=True, hopper=None):
    return dict(
        devices=[dict(name=name, architecture=architecture, memory=1e9)],
        triton=dict(works=True, problem=None),
        kernels=[dict(name="rope", works=works, problem=None)],
        hopper=hopper,
    )


@pytest.mark.parametrize("versions", [NEWEST, OLDEST, OLDEST | {"accelerate": "0.1"}])
def test_doctor_has_nothing_to_say_of_tested_versions(doctor_with, versions):
    """A build's own suffix and a patch release make no other version."""
    out, report = doctor_with(versions)
    assert report["untested"] == report["notes"] == [] and "not tested" not in out


@pytest.mark.parametrize(
    "name, version, instead",
    [
        ("torch", "2.99.0.dev20261101+cu130", "2.15"),
        ("torch", "2.9.0", "2.11"),
        ("torch", "2.12.1", "2.15"),
        ("triton", "3.60.0", "3.9"),
        ("transformers", "5.0.1", "5.17"),
        ("trl", "0.1", "1.12"),
        ("bitsandbytes", "0.60.0", "0.50"),
    ],
)
def test_doctor_says_what_to_do_with_other_versions(doctor_with, name, version, instead):
    """Newer, older and between. It is no problem."""
    out, report = doctor_with(NEWEST | {name: version})
    assert report["untested"] == [name]
    (note,) = report["notes"]
    assert note.startswith(f"{name} {version} was not tested ({join_words(TESTED[name])} w")
    assert note.endswith(f"install {name} {instead}.") and note in out
    assert f"{name} {version}, not tested" in out


def test_doctor_tells_what_ran_on_gpus_from_what_did_not(doctor_with):
    def notes(versions=OLDEST, **gpu):
        return doctor_with(versions, **on_gpu(**gpu))[1]["notes"]

    assert notes() == notes(name="NVIDIA H100 80GB HBM3") == []
    assert notes(OLDEST | {"triton": "3.9.0"}) == []
    (note,) = notes(OLDEST | {"triton": "3.8.0"})
    assert note == (
        "The tests pass with triton 3.8.0 on CPUs; on GPUs they ran with torch 2.11, triton 3.6, "
        "3.7 and 3.9 and transformers 5.17. Here each kernel above gave what PyTorch gives: "
        "nothing to do."
    )
    (note,) = notes(OLDEST | {"triton": "3.8.0", "torch": "2.13.0+cu130"}, works=False)
    assert "with torch 2.13.0+cu130 and triton 3.8.0 on CPUs" in note
    assert note.endswith("See above for what does not work here.")
    # an unknown version is said to be that, and not to be tested on CPUs
    (note,) = notes(OLDEST | {"triton": "3.99.0"})
    assert note.startswith("triton 3.99.0 was not tested")


@pytest.mark.parametrize(
    "name, architecture, compiled",
    [
        ("NVIDIA GeForce RTX 4090", "sm_89", True),
        ("AMD Instinct MI300X", "gfx942", True),
        ("NVIDIA GH200 480GB", "sm_90", True),
        ("Tesla T4", "sm_75", False),
    ],
)
def test_doctor_says_that_a_gpu_is_another(doctor_with, name, architecture, compiled):
    _, report = doctor_with(OLDEST, **on_gpu(name, architecture))
    (note,) = report["notes"]
    compiles = "compile every kernel" if compiled else "compile no kernel"
    assert note == (
        f"The tests {compiles} for {name} ({architecture}) and have not run on it: they ran on "
        "H100 and H200. Here each kernel above gave what PyTorch gives: nothing to do."
    )


def test_doctor_says_whether_hoppers_own_kernels_are_on(doctor_with):
    _, report = doctor_with(OLDEST, **on_gpu(hopper=dict(on=True, triton=["3.6"])))
    assert report["notes"] == []
    _, report = doctor_with(OLDEST, **on_gpu(hopper=dict(on=False, triton=["3.6"])))
    assert report["notes"] == [
        "The kernels for Hopper alone, of the linear head, experts and the gated delta rule, stay "
        "off: they are for triton 3.6. Those for any GPU compute the same: nothing to do."
    ]


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("packages", [(), ("causal-conv1d",), doctor.LINEAR_ATTENTION])
def test_doctor_says_where_linear_attention_would_be_slow(doctor_with, works, packages):
    gpu = on_gpu()
    gpu["kernels"].append(dict(name="gated_delta_rule", works=works, problem=None))
    _, report = doctor_with(OLDEST | dict.fromkeys(packages, "1.0"), **gpu)
    if works or packages == doctor.LINEAR_ATTENTION:
        assert report["notes"] == []
        return
    (note,) = report["notes"]
    assert note.startswith(
        "Without the kernel gated_delta_rule, the linear attention of Qwen3-Next"
    )
    missing = [name for name in doctor.LINEAR_ATTENTION if name not in packages]
    assert note.endswith(f"pip install {' '.join(missing)}.")


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
