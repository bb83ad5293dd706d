"""The two worked examples of docs/contributing.md, imported and tested as the package's own."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from cases import (
    assert_as_exact_as_pytorch,
    cast,
    exact_products_on_cpu,
    make_inputs,
    measure_errors,
    run,
    run_reference,
)

from liger_kernel.core.op import CASES
from liger_kernel.patch import engine

PAGE = (Path(__file__).parent.parent.parent / "docs" / "contributing.md").read_text()


def example(kind):
    (code,) = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S)
    return code


def as_file(name, code, folder):
    """Import code as a module of that name, from a file: Triton and inspect read its lines."""
    path = folder / f"{name.rpartition('.')[2]}.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def operator(tmp_path_factory):
    before = list(CASES)
    module = as_file(
        "liger_kernel.ops.mlp.soft_cap", example("operator"), tmp_path_factory.mktemp("operator")
    )
    (case,) = [case for case in CASES if case not in before]
    yield module, case
    CASES[:] = before
    del sys.modules[module.__name__]


@pytest.fixture
def rewrite(operator, tmp_path):
    module = as_file("liger_kernel.patch.soft_cap", example("rewrite"), tmp_path)
    yield module
    del sys.modules[module.__name__]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_operator_is_as_exact_as_pytorch(operator, dtype):
    _, case = operator
    for shape in case.shapes:
        draws = []
        for seed in range(4):
            tensors = make_inputs(case, shape, {}, dtype, seed)
            with exact_products_on_cpu():
                results, first_grads, second_grads = run(case.fn, tensors)
            references = run_reference(case.reference, tensors, dtype, products=False)
            exact, *_ = run(case.reference, cast(tensors, torch.float64))
            tensors = {k: t for k, t in tensors.items() if isinstance(t, torch.Tensor)}
            draws.append(measure_errors(results, references, exact, tensors, case.fp32_roundings))
            assert all(map(torch.equal, first_grads, second_grads))
        assert_as_exact_as_pytorch(draws)


def test_the_operator_has_a_graph_of_its_gradients(operator):
    module, case = operator
    tensors = make_inputs(case, case.shapes[1], {})
    (dx,) = torch.autograd.grad(case.fn(**tensors).sum(), tensors["x"], create_graph=True)
    (second,) = torch.autograd.grad(dx.sum(), tensors["x"])
    (dx,) = torch.autograd.grad(case.reference(**tensors).sum(), tensors["x"], create_graph=True)
    (expected,) = torch.autograd.grad(dx.sum(), tensors["x"])
    torch.testing.assert_close(second, expected, rtol=1e-5, atol=1e-6)


def test_the_operator_names_what_is_wrong(operator):
    module, _ = operator
    with pytest.raises(ValueError, match="liger_soft_cap: cap is -1.0, give a positive number"):
        module.liger_soft_cap(torch.ones(3), -1.0)
    with pytest.raises(TypeError, match="liger_soft_cap: x is torch.int64"):
        module.liger_soft_cap(torch.ones(3, dtype=torch.int64), 1.0)


class Capped(torch.nn.Module):
    def __init__(self, cap=30.0):
        super().__init__()
        self.cap = cap

    def forward(self, x):
        return (self.cap * torch.tanh(x.float() / self.cap)).to(x.dtype)


class Clamped(Capped):
    def forward(self, x):
        return x.clamp(-self.cap, self.cap)


class RoundedTwice(Capped):
    def forward(self, x):
        return self.cap * torch.tanh(x / self.cap)


def test_the_rewrite(rewrite, operator, monkeypatch):
    """It is proved, reported and replaced, and gone as soon as the module changes."""
    monkeypatch.setattr(engine, "STAGES", ((rewrite.SoftCaps(),),))
    monkeypatch.setattr(engine, "FLAGS", ("soft_cap",))
    calls = []

    def recording_soft_cap(x, cap):
        calls.append(cap)
        return operator[0].liger_soft_cap(x, cap)

    monkeypatch.setattr(rewrite, "liger_soft_cap", recording_soft_cap)
    model = torch.nn.ModuleDict(
        dict(a=Capped(), b=Capped(1.0), clamped=Clamped(), twice=RoundedTwice())
    )
    x = torch.randn(3, 8)
    expected = {name: module(x) for name, module in model.items()}
    report = engine.patch(model, {"soft_cap": True})
    assert report.replaced == {("Capped", "liger_soft_cap"): 2}
    assert dict(report.left_alone.keys()) == {
        "Clamped": "it does not compute cap·tanh(x / cap)",
        "RoundedTwice": "it rounds elsewhere than cap·tanh(x / cap)",
    }
    for name, module in model.items():
        torch.testing.assert_close(module(x), expected[name], rtol=1e-6, atol=1e-6)
    assert calls == [30.0, 1.0]
    model["a"].cap = 2.0
    torch.testing.assert_close(model["a"](x), Capped(2.0)(x), rtol=1e-6, atol=1e-6)
    assert calls == [30.0, 1.0, 2.0]
    monkeypatch.setattr(Capped, "forward", lambda self, x: x + 1)
    assert torch.equal(model["a"](x), x + 1) and len(calls) == 3
    engine.revert_model(model)
    assert type(model["a"]) is Capped
