"""Patched models by pickle and deepcopy: in this process and in another, where code may have
changed meanwhile."""

import copy
import io
import pickle
import subprocess
import sys
import textwrap

import pytest
import tiny
import torch
import zoo
import zoo_vision
from patched import assert_same_step, step
from transformers import AutoConfig, AutoModelForCausalLM

import liger_kernel.transformers as liger

pytestmark = pytest.mark.usefixtures("reference_only")

BUILTIN = {  # activations that are no Python functions
    "phi": dict(hidden_act="gelu"),
    "starcoder2": dict(hidden_act="gelu"),
    "gpt_neox": dict(hidden_act="gelu"),
    "falcon": dict(activation="gelu"),
    "llama": dict(hidden_act="gelu"),
}


def make_model(family, **overrides):
    torch.manual_seed(0)
    sizes = {name: value for name, value in tiny.SIZES.items() if name != "head_dim"}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**sizes, "use_cache": False, **overrides})
    )


def by_torch(model, **options):
    file = io.BytesIO()
    torch.save(model, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "torch.save": by_torch,
    "torch.save, as before PyTorch 1.6": lambda model: by_torch(
        model, _use_new_zipfile_serialization=False
    ),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "protocol 2": lambda model: pickle.loads(pickle.dumps(model, 2)),
    "pickle in Python": lambda model: pickle._loads(pickle._dumps(model)),
    "deepcopy": copy.deepcopy,
}


def assert_is_copy(other, patched_model, reference):
    assert [type(m) for m in other.modules()] == [type(m) for m in patched_model.modules()]
    assert_same_step(step(other), step(reference))
    liger.revert(other)
    assert [type(m) for m in other.modules()] == [type(m) for m in reference.modules()]


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", BUILTIN)
def test_builtin_activations(family, way):
    reference = make_model(family, **BUILTIN[family]).train()
    patched_model = copy.deepcopy(reference)
    report = liger.apply_liger_kernel(patched_model)
    assert "MLPs" in {column for column, replaced in report.columns().items() if replaced}
    assert_is_copy(WAYS[way](patched_model), patched_model, reference)


FEW = "falcon", "gpt_neox", "lfm2_moe", "xlm"
FAMILIES = [
    pytest.param(
        home, name, id=f"{home.__name__}-{name}", marks=() if few else pytest.mark.thorough
    )
    for home in (zoo, zoo_vision)
    for name in home.FAMILIES
    for few in [home is zoo and name in FEW]
]


@pytest.mark.parametrize("home,family", FAMILIES)
def test_every_family(home, family):
    reference = home.build(family)
    try:
        pickle.dumps(reference)
    except Exception as error:
        pytest.skip(f"it cannot be pickled unpatched: {error}")
    patched_model = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched_model)
    for other in (by_torch(patched_model), copy.deepcopy(patched_model)):
        assert [type(m) for m in other.modules()] == [type(m) for m in patched_model.modules()]
    if home is zoo:
        given = home.batch(patched_model)
        assert not list(zoo.differences(zoo.step(other, given), zoo.step(patched_model, given)))


# ---- what was changed meanwhile ----


def test_a_copy_is_of_the_code_that_was_proved(monkeypatch):
    """A forward that was replaced after the patch runs in copies, too."""
    reference = tiny.model("llama")
    patched_model = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched_model)
    norm = type(reference.model.norm)
    forward = norm.forward
    with monkeypatch.context() as changed:
        changed.setattr(
            norm, "forward", lambda self, hidden_states: 2 * forward(self, hidden_states)
        )
        for other in (patched_model, copy.deepcopy(patched_model)):
            assert_same_step(step(other), step(reference))
    for other in (patched_model, copy.deepcopy(patched_model)):
        assert_same_step(step(other), step(reference))


OWN = """
import torch

{globals}

class Norm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def scaled(self, x):
        return {scaled}

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * {normed}


class Model(torch.nn.Sequential):
    pass
"""
SAME = dict(globals="GAIN = 1.0", scaled="x", normed="self.scaled(y.to(x.dtype)) * GAIN")
PROPERTY = """y

    @property
    def forward(self):
        return lambda x: 3 * torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
"""
CHANGED = {
    "nothing": {},
    "its forward": dict(normed="self.scaled(y.to(x.dtype)) * 3"),
    "a method that it calls": dict(scaled="x * 3"),
    "a value that it reads": dict(globals="GAIN = 3.0"),
    "no forward that could be replaced": dict(normed=PROPERTY),
}
LOAD = """
import sys, torch, own
import liger_kernel.transformers
model = torch.load(sys.argv[1], weights_only=False)
print(hasattr(type(model[1]), "_liger"), model(torch.ones(2, 8)).sum().item())
"""


def run(program, *args, path):
    environment = {
        "PYTHONPATH": f"{path}:{':'.join(p for p in sys.path if p)}",
        "PATH": "",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, args)],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A function that writes a user's module, of which a model is patched and saved."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # it would not see a change within a second

    def write(**changed):
        (tmp_path / "own.py").write_text(OWN.format(**SAME | changed))

    write()
    import own

    torch.manual_seed(0)
    model = own.Model(torch.nn.Linear(8, 8), own.Norm(8), torch.nn.Linear(8, 4))
    report = liger.apply_liger_kernel(model)
    assert report.of("Norm"), report
    torch.save(model, tmp_path / "model.pt")
    yield write, model, tmp_path
    del sys.modules["own"]


@pytest.mark.thorough
@pytest.mark.parametrize("changed", CHANGED)
def test_code_that_is_another_one_when_it_is_loaded(changed, own):
    """Then the family's own runs, unpatched."""
    write, model, path = own
    write(**CHANGED[changed])
    done = run(LOAD, path / "model.pt", path=path)
    assert not done.returncode, done.stderr
    patched, total = done.stdout.split()
    assert (patched == "True") == (changed == "nothing")
    scale = 1 if changed == "nothing" else 3
    with torch.no_grad():
        expected = model[2](scale * model[1](model[0](torch.ones(2, 8)))).sum().item()
    assert float(total) == pytest.approx(expected, rel=1e-4)
    assert ("loaded unpatched" in done.stderr) == (changed != "nothing")


@pytest.mark.thorough
def test_in_a_fresh_process_and_without_this_package(tmp_path):
    """A patched model needs the package; one that was reverted, or its weights, do not."""
    reference = make_model("gpt_neox", hidden_act="gelu").train()
    patched_model = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched_model)
    torch.save(patched_model, tmp_path / "patched.pt")
    torch.save(patched_model.state_dict(), tmp_path / "weights.pt")
    expected, _ = step(patched_model)
    liger.revert(patched_model)
    torch.save(patched_model, tmp_path / "reverted.pt")
    torch.save(tiny.batch(), tmp_path / "batch.pt")
    program = """
        import sys, torch
        if sys.argv[2] == "without":
            sys.modules["liger_kernel"] = None
        batch = torch.load(sys.argv[3])
        model = torch.load(sys.argv[1], weights_only=False)
        print(hasattr(type(model.gpt_neox.layers[0].mlp), "_liger"), model(**batch).loss.item())
    """
    for name, how, patched in (("patched", "with", "True"), ("reverted", "without", "False")):
        done = run(program, tmp_path / f"{name}.pt", how, tmp_path / "batch.pt", path=tmp_path)
        assert not done.returncode, done.stderr
        is_patched, loss = done.stdout.split()
        assert is_patched == patched and float(loss) == pytest.approx(
            expected["loss"].item(), rel=1e-5
        )
    done = run(program, tmp_path / "patched.pt", "without", tmp_path / "batch.pt", path=tmp_path)
    assert (
        done.returncode
        and "ModuleNotFoundError: " in done.stderr
        and "liger_kernel" in done.stderr.splitlines()[-1]
    )
    weights = torch.load(tmp_path / "weights.pt")
    assert all(
        torch.equal(weight, weights[name]) for name, weight in reference.state_dict().items()
    )
