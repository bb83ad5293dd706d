"""Code of a user's own that is arithmetic is replaced, as long as what it reads stays; or that the
user trusts."""

import random
import types

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from own_code import (
    ActivationWithin,
    PlainRMSNorm,
    mlp_with_activation,
    patched_pair,
    replace_mlps,
    replace_norms,
)
from patched import assert_same_step, step
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

import liger_kernel.transformers as liger
from liger_kernel.ops import functional

pytestmark = pytest.mark.usefixtures("reference_only")
GAIN = 1.0


def once(x):
    return x


def identity(x):
    return x


def times(x, *, factor=1.0):
    return x * factor


# ---- arithmetic ----


class RemoteNorm(torch.nn.Module):
    """As modeling files on the hub write it, after LLaMA's own."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(width))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class RemoteNormInSteps(torch.nn.Module):
    """And after Hugging Face's."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class RemoteNormOfOne(RemoteNorm):
    """Gemma's."""

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class RemoteTorchNorm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.normalized_shape = (width,)
        self.eps = 1e-6
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class NumberNorm(PlainRMSNorm):
    def forward(self, x):
        return self.normed(x) * GAIN


class FunctionsNorm(PlainRMSNorm):
    def forward(self, x):
        return identity(self.normed(once(x)))


class KeywordNorm(PlainRMSNorm):
    def forward(self, x):
        return times(self.normed(x))


class ItsNumberNorm(PlainRMSNorm):
    def __init__(self, width):
        super().__init__(width)
        self.gain = 1.0

    def forward(self, x):
        return self.normed(x) * self.gain


class PlainNorm(PlainRMSNorm):
    def forward(self, x):
        return self.normed(x)


class RemoteMLP(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        wide = config.hidden_size
        inner = config.intermediate_size
        self.w1, self.w3 = (torch.nn.Linear(wide, inner, bias=False) for _ in range(2))
        self.w2 = torch.nn.Linear(inner, wide, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class RemoteMLPInSteps(RemoteMLP):
    def __init__(self, config):
        super().__init__(config)
        self.act = torch.nn.SiLU()

    def forward(self, x):
        gate = self.act(self.w1(x))
        up = self.w3(x)
        return self.w2(gate * up)


class OwnAct(torch.nn.Module):
    def forward(self, x):
        return GAIN * F.silu(x)


ARITHMETIC = (
    RemoteNorm,
    RemoteNormInSteps,
    RemoteTorchNorm,
    PlainNorm,
    NumberNorm,
    FunctionsNorm,
    ItsNumberNorm,
)


@pytest.mark.parametrize("cls", ARITHMETIC)
def test_a_norm_in_arithmetic_is_replaced(cls):
    reference, patched_model, report = patched_pair(replace_norms(cls))
    assert report.of(cls.__name__) == 2 and cls.__name__ not in {
        name for name, _ in report.left_alone
    }
    assert all("trusted" not in by for _, by in report.replaced)
    assert_same_step(step(patched_model), step(reference))


def test_gemmas_norm_is_replaced():
    patched_model = torch.nn.ModuleList([RemoteNormOfOne(8)])
    assert liger.apply_liger_kernel(patched_model).replaced == {
        ("RemoteNormOfOne", "liger_rms_norm (gemma, offset 1)"): 1
    }


@pytest.mark.parametrize("cls", [RemoteMLP, RemoteMLPInSteps])
def test_an_mlp_in_arithmetic_is_replaced(cls):
    def change(model):
        for layer in model.model.layers:
            mlp = cls(model.config)
            old = layer.mlp
            for own, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
                setattr(mlp, own, getattr(old, name))
            layer.mlp = mlp

    reference, patched_model, report = patched_pair(change)
    assert report.replaced[cls.__name__, "liger_swiglu"] == 2
    assert_same_step(step(patched_model), step(reference))


def rotate_half(x):
    """Rotates half the hidden dims of the input."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


class RemoteAttention(LlamaAttention):
    """With functions of this file."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        shape = *hidden_states.shape[:-1], -1, self.head_dim
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (
            projection(hidden_states).view(shape).transpose(1, 2) for projection in projections
        )
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out, weights = modeling_llama.eager_attention_forward(
            self, q, k, v, attention_mask, scaling=self.scaling
        )
        return self.o_proj(out.flatten(2)), weights


def with_attentions(model):
    for layer in model.model.layers:
        layer.self_attn.__class__ = RemoteAttention


def test_a_rope_in_arithmetic_is_replaced(monkeypatch):
    """As long as it, and what it calls, is what it was."""
    reference, patched_model, report = patched_pair(with_attentions)
    assert report.of("apply_rotary_pos_emb") == 2
    assert_same_step(step(patched_model), step(reference))
    turned = rotate_half
    monkeypatch.setitem(globals(), "rotate_half", lambda x: 0.5 * turned(x))
    assert_same_step(step(patched_model), step(reference))


def test_a_rope_of_another_file_reads_a_number_of_that_file(monkeypatch):
    source = "GAIN = 1.0\ndef apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):\n"
    source += "    q, k = turned(q, k, cos, sin, unsqueeze_dim)\n    return q * GAIN, k * GAIN\n"
    other = types.ModuleType("other")
    turned = types.FunctionType(apply_rotary_pos_emb.__code__, vars(other), "turned", (1,))
    vars(other).update(torch=torch, turned=turned)
    vars(other)["rotate_half"] = types.FunctionType(
        rotate_half.__code__, vars(other), "rotate_half"
    )
    exec(source, vars(other))
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", other.apply_rotary_pos_emb)
    reference, patched_model, report = patched_pair(with_attentions)
    assert report.of("apply_rotary_pos_emb") == 2
    assert_same_step(step(patched_model), step(reference))
    other.GAIN = 0.25
    assert_same_step(step(patched_model), step(reference))


def halve(monkeypatch, models):
    monkeypatch.setitem(globals(), "GAIN", 0.5)


def exchange(monkeypatch, models):
    monkeypatch.setitem(globals(), "identity", lambda x: 0.5 * x)


def exchange_defaults(monkeypatch, models):
    monkeypatch.setattr(times, "__kwdefaults__", {"factor": 0.5})


def write_defaults(monkeypatch, models):
    monkeypatch.setitem(times.__kwdefaults__, "factor", 0.5)


def halve_their_own(monkeypatch, models):
    for model in models:
        for layer in model.model.layers:
            layer.input_layernorm.gain = 0.5


@pytest.mark.parametrize(
    "cls, change",
    [
        (NumberNorm, halve),
        (FunctionsNorm, exchange),
        (ItsNumberNorm, halve_their_own),
        (KeywordNorm, exchange_defaults),
        (KeywordNorm, write_defaults),
    ],
)
def test_what_arithmetic_reads_changes_later(cls, change, monkeypatch):
    """Until then the kernel runs, thereafter the class's own code."""
    reference, patched_model, report = patched_pair(replace_norms(cls), num_hidden_layers=1)
    assert report.of(cls.__name__) == 1
    ran = []
    liger_rms_norm = functional.liger_rms_norm
    monkeypatch.setattr(
        functional, "liger_rms_norm", lambda *args: ran.append(1) or liger_rms_norm(*args)
    )
    before = step(reference)
    assert_same_step(step(patched_model), before)
    assert len(ran) == 3
    change(monkeypatch, (reference, patched_model))
    after = step(reference)
    assert_same_step(step(patched_model), after)
    assert len(ran) == 5
    assert not torch.isclose(before[0].loss, after[0].loss, rtol=1e-4)


def test_a_number_changes_under_compile(monkeypatch):
    torch._dynamo.reset()
    reference, patched_model, _ = patched_pair(replace_norms(NumberNorm), num_hidden_layers=1)
    run = torch.compile(patched_model, backend="eager", fullgraph=True)
    assert_same_step(step(patched_model, run), step(reference))
    monkeypatch.setitem(globals(), "GAIN", 0.5)
    assert_same_step(step(patched_model, run), step(reference))


def test_an_activation_that_reads_a_number(monkeypatch):
    reference, patched_model, report = patched_pair(replace_mlps(mlp_with_activation(OwnAct)))
    assert report.of("LlamaMLP") == 2
    assert_same_step(step(patched_model), step(reference))
    monkeypatch.setitem(globals(), "GAIN", 0.5)
    assert_same_step(step(patched_model), step(reference))


def doubled(module, inputs, output):
    return 2 * output


def test_a_hook_below_the_activation():
    """It is put on later, on what is no child of the MLP."""
    reference, patched_model, report = patched_pair(
        replace_mlps(mlp_with_activation(ActivationWithin))
    )
    assert report.of("LlamaMLP") == 2
    before = step(reference)
    assert_same_step(step(patched_model), before)
    for model in (reference, patched_model):
        model.model.layers[0].mlp.act_fn.inner.register_forward_hook(doubled)
    after = step(reference)
    assert_same_step(step(patched_model), after)
    assert not torch.isclose(before[0].loss, after[0].loss, rtol=1e-4)


def test_a_function_that_reads_a_number(monkeypatch):
    reference, patched_model, report = patched_pair(
        replace_mlps(mlp_with_activation(lambda: gained))
    )
    assert report.of("LlamaMLP") == 2
    assert_same_step(step(patched_model), step(reference))
    monkeypatch.setitem(globals(), "GAIN", 0.5)
    assert_same_step(step(patched_model), step(reference))


def gained(x):
    return F.silu(x) * GAIN


# ---- classes that are trusted ----


class GlobalNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) * GAIN


class Drawing(LlamaMLP):
    """It draws numbers of all kinds, and uses none."""

    def forward(self, x):
        random.random(), np.random.rand(), torch.rand(1)
        return super().forward(x)


def test_a_trial_leaves_random_numbers_alone():
    model = tiny.model("llama")
    replace_mlps(Drawing)(model)
    for trust, replaced in (((), 0), ((Drawing,), 2)):
        states = random.getstate(), np.random.get_state()[1:3], torch.get_rng_state()
        assert liger.apply_liger_kernel(model, trust=trust).of("Drawing") == replaced
        python, (numbers, place), torchs = states
        assert python == random.getstate() and torch.equal(torchs, torch.get_rng_state())
        assert place == np.random.get_state()[2] and (numbers == np.random.get_state()[1]).all()


def test_trust():
    """It is still tried, and the report says that nobody looked at it."""
    reference, patched_model, report = patched_pair(replace_norms(GlobalNorm))
    assert report.of("GlobalNorm") == 0
    report = liger.apply_liger_kernel(patched_model, trust=[GlobalNorm])
    assert report.replaced == {("GlobalNorm", "liger_rms_norm (llama, offset 0), trusted"): 2}
    assert "trusted" in str(report)
    assert_same_step(step(patched_model), step(reference))


class NoNorm(LlamaRMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def test_trusted_or_not_it_has_to_be_equal():
    _, patched_model, _ = patched_pair(replace_norms(NoNorm))
    report = liger.apply_liger_kernel(patched_model, trust=NoNorm)
    assert report.left_alone["NoNorm", "it does not compute an RMSNorm or a LayerNorm"] == 2


@pytest.mark.parametrize(
    "trust",
    ["NoNorm", [NoNorm(8)], dict, lambda: NoNorm, [NoNorm, None]],
    ids=["a name", "a module", "dict", "a function", "and None"],
)
def test_only_classes_of_modules_are_trusted(trust):
    with pytest.raises(
        TypeError, match=r"^apply_liger_kernel: trust has .*, give classes of modules: trust="
    ):
        liger.apply_liger_kernel(tiny.model("llama"), trust=trust)


class Reloaded(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


def twice(self, x):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return 2 * self.weight * h.to(x.dtype)


def test_code_that_is_put_into_a_function(monkeypatch):
    """As editors do that reload a file: the function stays the same object."""
    patched_model, reference = (
        torch.nn.Sequential(torch.nn.Identity(), Reloaded(8)) for _ in range(2)
    )
    assert liger.apply_liger_kernel(patched_model).of("Reloaded") == 1
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    before = patched_model(x)
    monkeypatch.setattr(Reloaded.forward, "__code__", twice.__code__)
    torch.testing.assert_close(patched_model(x), reference(x))
    torch.testing.assert_close(patched_model(x), 2 * before)
