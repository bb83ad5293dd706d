"""MLPs without a gate: trained with and without the patch, and what is left alone or called as it
is."""

import copy

import pytest
import tiny
import torch
import torch.nn.functional as F
from hardware import DEVICE
from own_code import ActivationWithin
from patched import assert_same_step, step
from proofs import apply_with_trust, assert_same_output, is_patched, model_of
from transformers.activations import ACT2FN

from liger_kernel.transformers import apply_liger_kernel, revert

FAMILIES = {
    "arcee": ("ArceeMLP", "ReLU²"),
    "nemotron": ("NemotronMLP", "ReLU²"),
    "gpt_neox": ("GPTNeoXMLP", "exact GELU"),
    "starcoder2": ("Starcoder2MLP", "tanh GELU"),
}
NO_DROPOUT = dict(residual_dropout=0.0, hidden_dropout=0.0)


def model(family, **overrides):
    return tiny.model(family, **NO_DROPOUT | overrides).to(DEVICE)


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps(family, fused):
    """Loss and every gradient of the model that is not patched, and its weights thereafter."""
    patched_model, reference = model(family), model(family)
    name, act = FAMILIES[family]
    report = apply_liger_kernel(patched_model)
    assert report.replaced[name, f"liger_activation_linear ({act})"] == 2
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (patched_model, reference)]
    for _ in range(3):
        assert_same_step(step(patched_model), step(reference), rtol=3e-5)
        for optimizer in optimizers:
            optimizer.step()
    assert len(fused) == 6
    revert(patched_model)
    assert not any(map(is_patched, patched_model.modules()))


class Plain(torch.nn.Module):
    def __init__(self, act=None, names=("fc1", "fc2"), bias=True):
        super().__init__()
        self.up, self.down = names
        setattr(self, self.up, torch.nn.Linear(32, 48, bias=bias))
        setattr(self, self.down, torch.nn.Linear(48, 32, bias=bias))
        self.act = act or torch.nn.GELU()

    def forward(self, x):
        return getattr(self, self.down)(self.act(getattr(self, self.up)(x)))


class ByHand(Plain):
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x) * 1.01))


class Dropping(Plain):
    p = 0.1

    def forward(self, x):
        return F.dropout(super().forward(x), self.p, self.training)


class InHalf(Plain):
    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x).float()).to(x.dtype) * 1)


class Gated(Plain):
    def forward(self, x):
        h = self.fc1(x)
        return self.fc2(self.act(h) * h)


class Relu2(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) ** 2


class InSteps(torch.nn.Module):
    """SiLU that rounds twice: nobody's."""

    def forward(self, x):
        return x * torch.sigmoid(x)


def scaled():
    mlp = Plain()
    mlp.scale = torch.nn.Parameter(torch.ones(32))
    return mlp


def frozen_dropout():
    mlp = Dropping()
    mlp.p = 0.0
    return mlp


KNOWN = {
    "GELU": Plain,
    "tanh GELU": lambda: Plain(torch.nn.GELU("tanh"), ("c_fc", "c_proj"), False),
    "SiLU": lambda: Plain(torch.nn.SiLU(), ("up_proj", "down_proj")),
    "ReLU²": lambda: Plain(Relu2(), ("linear_1", "linear_2")),
    **{
        name: lambda name=name: Plain(ACT2FN[name])
        for name in ("gelu_new", "gelu_fast", "gelu_python", "quick_gelu")
    },
    "in fp32 between, with the same bits": InHalf,
    "a dropout of nothing": frozen_dropout,
}
UNKNOWN = {
    "another forward": (ByHand, "it does not compute down(act(up))"),
    "a gate": (Gated, "it does not compute down(act(up))"),
    "ReLU": (
        lambda: Plain(torch.nn.ReLU()),
        "it does not compute down(act(up)) with SiLU, GELU or ReLU²",
    ),
    "rounded at each step": (lambda: Plain(InSteps()), "it rounds elsewhere than down(act(up))"),
    "dropout": (Dropping, "it does something else in training than in evaluation"),
}


@pytest.mark.parametrize("which", KNOWN)
def test_what_is_replaced(which, fused):
    patched_model, reference, report = model_of(KNOWN[which]())
    assert is_patched(patched_model[0]) and not report.left_alone
    assert_same_output(patched_model[0], reference[0])
    assert len(fused) == 1


@pytest.mark.parametrize("which", UNKNOWN)
def test_what_is_left_alone(which, fused):
    make, expected_reason = UNKNOWN[which]
    patched_model, reference, report = model_of(make())
    ((name, reason),) = report.left_alone
    assert (
        not is_patched(patched_model[0])
        and expected_reason in reason
        and name == type(reference[0]).__name__
    )
    assert_same_output(patched_model[0].eval(), reference[0].eval())
    assert not fused


def test_what_is_not_looked_at():
    """Another parameter, or a third layer: no MLP of two layers, unless it is called so."""

    class ThreeMLP(Plain):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Linear(48, 48)

    patched_model, _, report = model_of(scaled(), ThreeMLP())
    assert not any(map(is_patched, patched_model)) and report.left_alone == {
        ("ThreeMLP", "it has further layers: gate"): 1
    }


def test_an_activation_that_is_replaced_later(fused):
    patched_model, reference = model("arcee"), model("arcee")
    apply_liger_kernel(patched_model)
    for m in (patched_model, reference):
        m.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    assert_same_step(step(patched_model), step(reference))
    assert fused == ["relu_squared"]


def test_a_subclass_with_its_own_forward(fused):
    reference = model("nemotron")
    mlp = reference.model.layers[0].mlp
    cls = type(mlp)

    class NemotronMLP(cls):
        def forward(self, x):
            return super().forward(x) + x

    mlp.__class__ = NemotronMLP
    patched_model = copy.deepcopy(reference)
    report = apply_liger_kernel(patched_model)
    assert report.of("NemotronMLP") == 1 and type(patched_model.model.layers[0].mlp) is NemotronMLP
    assert_same_step(step(patched_model), step(reference))
    assert fused == ["relu_squared"]


def test_switches():
    """Each activation has its own: SiLU swiglu, GELU geglu, ReLU² relu_squared."""
    acts = {"swiglu": torch.nn.SiLU(), "geglu": torch.nn.GELU(), "relu_squared": Relu2()}
    for off in acts:
        patched_model = torch.nn.ModuleList(Plain(act) for act in acts.values())
        report = apply_with_trust(patched_model, **{off: False})
        assert [is_patched(m) for m in patched_model] == [flag != off for flag in acts]
        assert report.left_alone == {("Plain", f"it computes what is {off}'s"): 1}


def test_layers_are_called_where_they_do_more(fused):
    """With a hook, under LoRA, as another class: the patched module gives what the other gives."""
    peft = pytest.importorskip("peft")
    calls = []

    def hooked(mlp):
        mlp.fc2.register_forward_hook(lambda module, inputs, out: calls.append(1) or 2 * out)
        return mlp

    def lora(mlp):
        torch.manual_seed(0)
        return peft.inject_adapter_in_model(
            peft.LoraConfig(r=2, target_modules=["fc2"], init_lora_weights=False), mlp
        )

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def doubled(mlp):
        mlp.fc2.__class__ = Doubled
        return mlp

    for change in (hooked, lora, doubled):
        patched_model, reference, _ = model_of(change(Plain()))
        assert is_patched(patched_model[0])
        assert_same_output(patched_model[0], reference[0])
    assert len(calls) == 2 and not fused


@pytest.mark.parametrize("below", [False, True])
def test_hooks_on_the_activation_run(fused, below):
    mlp = Plain()
    if below:
        mlp.act = ActivationWithin()
    patched_model, reference, _ = model_of(mlp)
    calls = []
    for one in (patched_model[0], reference[0]):
        hooked = one.act.inner if below else one.act
        hooked.register_forward_hook(lambda *args: calls.append(1))
    assert_same_output(patched_model[0], reference[0])
    assert len(calls) == 2 and not fused
