"""Code of a user's own that does something beside arithmetic is left alone before it is run."""

import contextvars
import functools
import os
import random
import types

import pytest
import tiny
import torch
import torch.nn.functional as F
from own_code import PlainRMSNorm, mlp_with_activation, patched_pair, replace_mlps, replace_norms
from patched import assert_same_step, step
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import liger_kernel.transformers as liger

pytestmark = pytest.mark.usefixtures("reference_only")
GAIN = 1.0
SWITCH = True
LOGGED = []
NUMBERS = {"gain": 1.0}
SCHEDULE = types.SimpleNamespace(gain=1.0)
CONTEXT = contextvars.ContextVar("gain", default=1.0)
ELSEWHERE = types.ModuleType("elsewhere")
exec("GAIN = 1.0\ndef scaled(x):\n    return x * GAIN\n", vars(ELSEWHERE))
scaled = ELSEWHERE.scaled


@pytest.fixture(autouse=True)
def as_before():
    """Reset to 1 what the forwards read, and clear what they note."""
    yield
    read_from_now_on(1.0)
    os.environ.pop("LIGER_TEST_GAIN", None)
    LOGGED.clear()


def counted(x):
    LOGGED.append(x.mean())
    return x


# ---- what is left alone ----


class GlobalNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) * GAIN


def of_a_closure():
    gain = 1.0

    class ClosureNorm(PlainRMSNorm):
        def forward(self, x):
            return self.normed(x) * gain

    def to(value):
        nonlocal gain
        gain = value

    return ClosureNorm, to


ClosureNorm, closure_gain = of_a_closure()


class ContextNorm(PlainRMSNorm):
    def forward(self, x):
        return self.normed(x) * CONTEXT.get()


class ClassNorm(PlainRMSNorm):
    gain = 1.0

    def forward(self, x):
        return self.normed(x) * type(self).gain


class ObjectNorm(PlainRMSNorm):
    def forward(self, x):
        return self.normed(x) * SCHEDULE.gain


class ItsObjectNorm(PlainRMSNorm):
    schedule = SCHEDULE

    def forward(self, x):
        return self.normed(x) * self.schedule.gain


class EnvironmentNorm(PlainRMSNorm):
    def forward(self, x):
        return self.normed(x) * float(os.environ.get("LIGER_TEST_GAIN", "1"))


class DefaultNorm(PlainRMSNorm):
    gains = [1.0]

    def forward(self, x, gains=gains):
        return self.normed(x) * gains[0]


class DictNorm(PlainRMSNorm):
    def forward(self, x):
        return self.normed(x) * NUMBERS["gain"]


class ListNorm(PlainRMSNorm):
    def __init__(self, width):
        super().__init__(width)
        self.gains = [1.0]

    def forward(self, x):
        return self.normed(x) * self.gains[0]


class PropertyNorm(PlainRMSNorm):
    @property
    def gain(self):
        return GAIN

    def forward(self, x):
        return self.normed(x) * self.gain


class ElsewhereNorm(PlainRMSNorm):
    def forward(self, x):
        return scaled(self.normed(x))


class AuxiliaryNorm(PlainRMSNorm):
    def forward(self, x):
        y = self.normed(x)
        LOGGED.append(y.square().mean())
        return y


class HelperNorm(PlainRMSNorm):
    def forward(self, x):
        return counted(self.normed(x))


class Logger(torch.nn.Module):
    def log(self, x):
        LOGGED.append(x.abs().mean())
        return x


class LoggingNorm(PlainRMSNorm):
    def __init__(self, width):
        super().__init__(width)
        object.__setattr__(self, "logger", Logger())

    def forward(self, x):
        self.logger.log(x)
        return self.normed(x)


class DepthMLP(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * (
            random.random() < 0.5
        )


class SizedNorm(PlainRMSNorm):
    def forward(self, x):
        return self.normed(x) * (1 + x.shape[1] // 100)


class InPlaceNorm(PlainRMSNorm):
    def forward(self, x):
        x += 0.1
        return self.normed(x)


class HookingNorm(PlainRMSNorm):
    def forward(self, x):
        y = self.normed(x)
        y.register_hook(lambda g: g * GAIN)
        return y


class BranchingNorm(PlainRMSNorm):
    def forward(self, x):
        return self.normed(x) if SWITCH else x


class LoggingMLP(LlamaMLP):
    def forward(self, x):
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        LOGGED.append(h.abs().mean())
        return self.down_proj(h)


class LoggingAct(torch.nn.Module):
    def forward(self, x):
        LOGGED.append(x.abs().mean())
        return F.silu(x)


def logging_act(x):
    LOGGED.append(x.abs().mean())
    return F.silu(x)


def scaled_act(gain, x):
    return F.silu(x) * gain()


def of_the_dict():
    return NUMBERS["gain"]


def hooked_act():
    act = torch.nn.SiLU()
    act.register_forward_hook(lambda module, args, out: LOGGED.append(out.mean()))
    return act


def read_from_now_on(gain):
    globals().update(GAIN=gain, SWITCH=gain == 1.0)
    ELSEWHERE.GAIN = NUMBERS["gain"] = SCHEDULE.gain = ClassNorm.gain = DefaultNorm.gains[0] = gain
    CONTEXT.set(gain)
    closure_gain(gain)
    os.environ["LIGER_TEST_GAIN"] = str(gain)


NORMS = {
    GlobalNorm: "forward calls super()",
    ClosureNorm: "reads gain of the function around it",
    ContextNorm: "reads CONTEXT",
    ClassNorm: "reads type",
    ObjectNorm: "reads SCHEDULE",
    ItsObjectNorm: "reads .schedule",
    EnvironmentNorm: "reads os",
    DefaultNorm: "has a default argument that can change",
    DictNorm: "reads NUMBERS",
    ListNorm: "reads .gains",
    PropertyNorm: "reads .gain",
    ElsewhereNorm: "reads scaled",
    AuxiliaryNorm: "reads LOGGED",
    HelperNorm: "counted reads LOGGED",
    LoggingNorm: "reads .logger",
    SizedNorm: "reads .shape",
    InPlaceNorm: "stores something elsewhere",
    HookingNorm: "reads .register_hook",
    BranchingNorm: "branches",
}
MLPS = {
    "stochastic depth": (DepthMLP, "reads random"),
    "a list of losses": (LoggingMLP, "reads LOGGED"),
    "an activation's list": (mlp_with_activation(LoggingAct), "LoggingAct.forward reads LOGGED"),
    "an activation within others": (
        mlp_with_activation(lambda: torch.nn.Sequential(torch.nn.Sequential(LoggingAct()))),
        "LoggingAct.forward reads LOGGED",
    ),
    "a function": (mlp_with_activation(lambda: logging_act), "logging_act reads LOGGED"),
    "a partial": (
        mlp_with_activation(lambda: functools.partial(scaled_act, of_the_dict)),
        "partial is neither",
    ),
    "a hook on the activation": (mlp_with_activation(hooked_act), "there are hooks on its act_fn"),
}


def own_step(model, tokens):
    """A step whose loss counts what the model has noted."""
    LOGGED.clear()
    random.seed(1)
    model.zero_grad()
    out = model(**tiny.batch(tokens=tokens))
    loss = out.loss + 0.1 * sum(LOGGED)
    loss.backward()
    return dict(loss=loss.detach()), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def assert_same_two_steps(reference, patched_model, tokens=13):
    """Before and after what is read has changed, which counts for something."""
    losses = []
    for _ in range(2):
        expected = own_step(reference, tokens)
        noted = len(LOGGED)
        assert_same_step(own_step(patched_model, tokens), expected)
        assert len(LOGGED) == noted
        losses.append(expected[0]["loss"])
        read_from_now_on(0.25)
        for model in (reference, patched_model):
            for layer in model.model.layers:
                if hasattr(layer.input_layernorm, "gains"):
                    layer.input_layernorm.gains[0] = 0.25
    return losses


CONSTANT = (
    AuxiliaryNorm,
    HelperNorm,
    LoggingNorm,
    SizedNorm,
    InPlaceNorm,
    HookingNorm,
)  # the loss, at least


@pytest.mark.parametrize("cls", NORMS, ids=lambda cls: cls.__name__)
def test_a_norm_that_does_something_beside(cls):
    reference, patched_model, report = patched_pair(replace_norms(cls))
    assert not LOGGED and report.of(cls.__name__) == 0
    ((_, reason),) = (key for key in report.left_alone if key[0] == cls.__name__)
    assert NORMS[cls] in reason
    before, after = assert_same_two_steps(
        reference, patched_model, tokens=128 if cls is SizedNorm else 13
    )
    assert torch.equal(before, after) == (cls in CONSTANT)


@pytest.mark.parametrize("case", MLPS)
def test_an_mlp_that_does_something_beside(case):
    make, expected_reason = MLPS[case]
    reference, patched_model, report = patched_pair(replace_mlps(make))
    assert not LOGGED
    ((name, reason),) = report.left_alone
    assert expected_reason in reason and name == type(reference.model.layers[0].mlp).__name__
    before, after = assert_same_two_steps(reference, patched_model)
    assert torch.equal(before, after) == (case != "a partial")


def test_experts_with_a_function_of_ones_own(monkeypatch):
    """Registered before the patch: the trial does not run it."""
    from transformers.integrations import moe

    def user_experts(self, *args):
        LOGGED.append(1.0)
        return moe.batched_mm_experts_forward(self, *args)

    monkeypatch.setitem(moe.ExpertsInterface._global_mapping, "own", user_experts)
    model = tiny.model("mixtral", experts_implementation="own")
    report = liger.apply_liger_kernel(model)
    assert not LOGGED and report.of("MixtralExperts") == 0
    assert any(name == "MixtralExperts" and "own" in why for name, why in report.left_alone)


def test_a_mask_does_not_rest_on_layers():
    """They take no part in the trial of a model's masks."""

    def change(model):
        model.model.norm.__class__ = AuxiliaryNorm

    reference, patched_model, report = patched_pair(change, attn_implementation="sdpa")
    assert report.of("LlamaModel's causal mask") == 1 and not LOGGED
    assert_same_step(own_step(patched_model, 13), own_step(reference, 13))


# ---- what was exchanged, now or later ----


def act(x):
    LOGGED.append(1.0)
    return 0.5 * F.silu(x)


def halved(function):
    def call(*args, **kwargs):
        LOGGED.append(1.0)
        output = function(*args, **kwargs)
        return (
            tuple(t if t is None else 0.5 * t for t in output)
            if type(output) is tuple
            else 0.5 * output
        )

    return call


def attention(patch):
    patch.setitem(
        modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping,
        "sdpa",
        halved(modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]),
    )


def attentions(patch):
    table = types.SimpleNamespace(
        get_interface=lambda *args: halved(modeling_llama.eager_attention_forward)
    )
    patch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", table)


def causal_mask(patch):
    def masked(*args, **kwargs):
        LOGGED.append(1.0)
        x = kwargs.get("inputs_embeds", kwargs.get("input_embeds"))
        return x.new_zeros(1, 1, x.shape[1], x.shape[1])  # of no future

    patch.setattr(modeling_llama, "create_causal_mask", masked)


def function(name):
    return lambda patch: patch.setattr(modeling_llama, name, halved(getattr(modeling_llama, name)))


EXCHANGED = {
    "a registered attention": attention,
    "the table of attentions": attentions,
    "rotate_half": function("rotate_half"),
    "apply_rotary_pos_emb": function("apply_rotary_pos_emb"),
    "create_causal_mask": causal_mask,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("exchanged", EXCHANGED)
def test_an_object_of_the_modeling_file_is_exchanged(exchanged, when, monkeypatch):
    reference, patched_model = (tiny.model("llama", attn_implementation="sdpa") for _ in range(2))
    reference_loss = step(reference)[0].loss
    if when == "before":
        EXCHANGED[exchanged](monkeypatch)
    liger.apply_liger_kernel(patched_model)
    assert not LOGGED
    if when == "after":
        assert_same_step(step(patched_model), step(reference))
        EXCHANGED[exchanged](monkeypatch)
    expected = step(reference)
    called = len(LOGGED)
    LOGGED.clear()
    assert_same_step(step(patched_model), expected)
    assert len(LOGGED) == called > 0 and not torch.isclose(
        expected[0].loss, reference_loss, rtol=1e-4
    )


def test_an_activation_of_the_table_is_exchanged(monkeypatch):
    """ACT2FN is read when a model is built: of those that are there none changes."""
    reference = tiny.model("llama")
    patched_model = tiny.model("llama")
    liger.apply_liger_kernel(patched_model)
    monkeypatch.setitem(ACT2FN, "silu", (LoggingAct, {}))
    assert_same_step(step(patched_model), step(reference))
    reference, patched_model, report = patched_pair(lambda model: None)
    assert report.of("LlamaMLP") == 0 and not LOGGED
    assert_same_step(step(patched_model), step(reference))
    assert len(LOGGED) == 4
