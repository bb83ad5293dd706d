"""A proof holds for the modules, the values, the names and the dtypes that it was made for."""

import copy
import pickle

import pytest
import tiny
import torch
import torch.nn.functional as F
from hardware import DEVICE
from proofs import (
    assert_same_output,
    is_patched,
    make_mlp,
    mlp_of_class,
    model_of,
    random_rows,
    record_calls,
    set_attribute,
)
from transformers.activations import GELUTanh
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from liger_kernel.patch.layers import mlp as gated
from liger_kernel.patch.layers import norm as norms
from liger_kernel.patch.proof.parts import ReadRecorder, unchanged
from liger_kernel.transformers import apply_liger_kernel, apply_liger_kernel_to_llama, revert


@pytest.fixture
def ran(monkeypatch):
    return record_calls(monkeypatch)


class Scaled(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * self._k


class ByLayer(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * (1.0 if self.layer_idx == 0 else 1.5)


class ByConfig(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * self.config.factor


class Hidden(LlamaMLP):
    """It finds what it reads by a name that no inspection sees."""

    def forward(self, x):
        return super().forward(x) * getattr(self, "_" + "k"[::-1], 1.0)


class Computed(LlamaMLP):
    @property
    def factor(self):
        return self._k

    def forward(self, x):
        return super().forward(x) * self.factor


class Act(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return F.silu(x) * self.scale


def with_config(factor):
    made = mlp_of_class(ByConfig)
    made.config = tiny.config("llama", factor=factor)
    return made


def scaled(k):
    return lambda x: F.silu(x) * k


PAIRS = {
    "a private attribute": lambda: (mlp_of_class(Scaled, _k=1.0), mlp_of_class(Scaled, _k=1.5)),
    "the layer's index": lambda: (
        mlp_of_class(ByLayer, layer_idx=0),
        mlp_of_class(ByLayer, layer_idx=1),
    ),
    "a child's state": lambda: (make_mlp(act_fn=Act(1.0)), make_mlp(act_fn=Act(1.5))),
    "another config": lambda: (with_config(1.0), with_config(1.5)),
    "by another name": lambda: (mlp_of_class(Hidden), mlp_of_class(Hidden, _k=1.5)),
    "a property": lambda: (mlp_of_class(Computed, _k=1.0), mlp_of_class(Computed, _k=1.5)),
    "a function": lambda: tuple(make_mlp(act_fn=lambda x, k=k: F.silu(x) * k) for k in (1.0, 1.5)),
    "a closure": lambda: (make_mlp(act_fn=scaled(1.0)), make_mlp(act_fn=scaled(1.5))),
    "modules in a list": lambda: tuple(
        make_mlp(act_fn=torch.nn.Sequential(Act(k))) for k in (1.0, 1.5)
    ),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_proof_is_for_modules_that_read_the_same(pair, first):
    """The first of the two is what we know; the other, of the same class, is not."""
    modules = PAIRS[pair]()
    patched_model, reference, _ = model_of(*modules[:: 1 - 2 * first])
    for a, b in zip(patched_model, reference, strict=True):
        assert_same_output(a, b)
    assert not is_patched(patched_model[1 - first])


class ScaledNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * self._k


def test_norms_that_read_something_else():
    norms = [ScaledNorm(32) for _ in range(2)]
    norms[0]._k = 1.0
    norms[1]._k = 1.5
    patched_model, reference, _ = model_of(*norms)
    assert is_patched(patched_model[0]) and not is_patched(patched_model[1])
    for a, b in zip(patched_model, reference, strict=True):
        assert_same_output(a, b)


def test_modules_that_read_the_same_share_a_proof(monkeypatch):
    """Whatever else they hold: layer_idx is in every attention, and an MLP may have it, too."""
    attempts = []
    counting = staticmethod(lambda *args: attempts.append(1) or gated.prove(*args))
    monkeypatch.setattr(gated.GatedMLPs, "prove", counting)
    patched_model, reference, _ = model_of(
        *(make_mlp(layer_idx=i, _note=object()) for i in range(3))
    )
    assert (
        len(attempts) == 1
        and all(map(is_patched, patched_model))
        and len({type(m) for m in patched_model}) == 1
    )
    assert_same_output(patched_model[2], reference[2])


class Counting(LlamaMLP):
    def forward(self, x):
        self.seen = x.shape
        return super().forward(x)


class Curious(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * getattr(self.gate_proj, "factor", 1.0)


class Stored(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * self._scale


class All(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * vars(self).get("_k", 1.0)


@pytest.mark.parametrize(
    "cls, attributes, reason",
    [
        (Counting, {}, "its forward sets seen"),
        (Curious, {}, "its forward looks at gate_proj.factor"),
        (Stored, dict(_scale=torch.ones(())), "what it computes rests on _scale, a Tensor"),
        (All, {}, "its forward looks at all that it holds"),
    ],
)
def test_what_no_proof_can_rest_on(cls, attributes, reason):
    assert reason in gated.prove(mlp_of_class(cls, **attributes))


def test_a_dropout_that_is_off_while_patched():
    class Dropping(LlamaMLP):
        def __init__(self):
            super().__init__(tiny.config("llama"))
            self.dropout = torch.nn.Dropout(0.5)

        def forward(self, x):
            return self.dropout(super().forward(x))

    made = Dropping().eval()
    assert "in training than in evaluation" in gated.prove(made)
    made.dropout.p = 0.0
    assert gated.prove(made) == gated.prove(make_mlp())


# ---- for how long ----


def another_act(m):
    m.act_fn = torch.nn.GELU()


def another_function(m):
    set_attribute(m, "act_fn", F.relu)


def another_forward_of_act(m):
    m.act_fn.forward = lambda x: F.silu(x) * 1.5


def another_attribute_of_act(m):
    m.act_fn.scale = 1.5


def another_class_of_act(m):
    m.act_fn.__class__ = torch.nn.Tanh


def a_hook_on_act(m):
    m.act_fn.register_forward_hook(lambda module, args, out: out * 1.5)


def another_forward(m):
    m.forward = lambda x: x * 1.5


CHANGES = [
    another_act,
    another_function,
    another_forward_of_act,
    another_attribute_of_act,
    another_class_of_act,
    a_hook_on_act,
    another_forward,
]
COPIES = {
    "itself": lambda m: m,
    "deepcopy": copy.deepcopy,
    "pickled": lambda m: pickle.loads(pickle.dumps(m)),
    "copy": copy.copy,
    "replica": lambda m: _replica(m),
}


def _replica(module):
    """Replicate a module as DataParallel does, on one device."""
    made = module._replicate_for_data_parallel()
    for name, p in module._parameters.items():
        setattr(made, name, p)
    made._modules = {name: child and _replica(child) for name, child in module._modules.items()}
    return made


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_part_that_is_changed_afterwards(change, how, ran):
    patched_model, reference, _ = model_of(make_mlp(act_fn=Act(1.0)))
    patched_model = COPIES[how](patched_model[0])
    reference = reference[0]
    assert_same_output(patched_model, reference)
    assert ran == ["glu"]  # a copy has what was proved
    before = reference(random_rows(2, 5, 32, seed=9))
    change(patched_model), change(reference)
    assert not torch.allclose(reference(random_rows(2, 5, 32, seed=9)), before)
    assert_same_output(patched_model, reference)
    assert ran == ["glu"]


@pytest.mark.parametrize("change", [another_act, another_forward_of_act, another_attribute_of_act])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_part_that_is_changed_under_compile(change, ran):
    torch._dynamo.reset()
    patched_model, reference, _ = model_of(make_mlp(act_fn=Act(1.0)))
    compiled = torch.compile(patched_model[0], fullgraph=True, backend="eager")
    assert_same_output(compiled, reference[0])
    assert ran == ["glu"]
    change(patched_model[0]), change(reference[0])
    assert_same_output(compiled, reference[0])
    assert ran == ["glu"]


def test_a_config_that_is_changed_afterwards(ran):
    """The values that were read of it count, and nothing else."""
    patched_model, reference, _ = model_of(with_config(1.0))
    for name, value, known in (("use_cache", True, 1), ("factor", 1.5, 1)):
        for m in (patched_model[0], reference[0]):
            setattr(m.config, name, value)
        assert_same_output(patched_model[0], reference[0])
        assert len(ran) == known


def test_a_change_and_back(ran):
    patched_model, _, _ = model_of(make_mlp(act_fn=Act(1.0)))
    for scale, known in ((1.0, 1), (1.5, 1), (1.0, 2)):
        patched_model[0].act_fn.scale = scale
        patched_model[0](random_rows(2, 32))
        assert len(ran) == known


def test_a_family_patch_and_a_class_that_changes_its_act():
    class Mine(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.act_fn = GELUTanh()

    class Model(modeling_llama.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp.act_fn = GELUTanh()

    apply_liger_kernel_to_llama()
    try:
        patched_model = Model(tiny.config("llama")).model.layers[0].mlp
    finally:
        revert("llama")
    assert type(patched_model) is not LlamaMLP
    reference = Mine(tiny.config("llama"))
    reference.load_state_dict(patched_model.state_dict())
    assert_same_output(patched_model, reference, random_rows(2, 5, 32).cpu())


def test_projections_may_be_replaced(ran):
    """They are called. Where both are one module they still are two."""
    patched_model, reference, _ = model_of(make_mlp())
    for m in (patched_model[0], reference[0]):
        torch.manual_seed(0)
        m.up_proj = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Tanh()).to(DEVICE)
    assert_same_output(patched_model[0], reference[0])
    patched_model[0].up_proj = patched_model[0].gate_proj
    reference[0].up_proj = reference[0].gate_proj
    assert_same_output(patched_model[0], reference[0])
    assert ran == ["glu", "glu"]


def no_weight(norm):
    norm.weight = None


def one_weight(norm):
    norm.weight = torch.nn.Parameter(norm.weight[:1].detach())


def another_eps(norm):
    norm.variance_epsilon = 0.5


def a_tensor_as_eps(norm):
    norm.variance_epsilon = torch.tensor(0.5, device=DEVICE)


@pytest.mark.parametrize("change, known", [(one_weight, 0), (another_eps, 1), (a_tensor_as_eps, 0)])
def test_a_norm_that_is_changed_afterwards(change, known, ran):
    patched_model, reference, _ = model_of(LlamaRMSNorm(32))
    change(patched_model[0]), change(reference[0])
    assert_same_output(patched_model[0], reference[0])
    assert len(ran) == known


def test_a_norm_whose_weight_is_gone():
    patched_model, reference, _ = model_of(LlamaRMSNorm(32))
    for norm in (patched_model[0], reference[0]):
        no_weight(norm)
        with pytest.raises(TypeError):
            norm(random_rows(2, 32))


def test_a_bias_that_comes_later():
    patched_model, reference, _ = model_of(torch.nn.LayerNorm(32, bias=False))
    for norm in (patched_model[0], reference[0]):
        norm.bias = torch.nn.Parameter(random_rows(32, seed=5))
    assert_same_output(patched_model[0], reference[0])


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half", "eager_attention_forward"])
def test_a_function_of_the_modeling_module_that_is_replaced(name, monkeypatch, ran):
    patched_model, reference = (
        tiny.model("llama", num_hidden_layers=1).to(DEVICE) for _ in range(2)
    )
    apply_liger_kernel(patched_model)
    given = {name: t.to(DEVICE) for name, t in tiny.batch().items()}
    patched_model(**given)
    assert "liger_rope" in ran
    ran.clear()
    before = reference(**given).loss
    function = getattr(modeling_llama, name)

    def halved(*args, **kwargs):
        results = function(*args, **kwargs)
        return (
            tuple(t if t is None else t * 0.5 for t in results)
            if type(results) is tuple
            else results * 0.5
        )

    monkeypatch.setattr(modeling_llama, name, halved)
    assert not torch.isclose(reference(**given).loss, before, rtol=1e-3)
    torch.testing.assert_close(
        patched_model(**given).loss, reference(**given).loss, rtol=1e-5, atol=0
    )
    assert ("liger_rope" in ran) == (
        name == "eager_attention_forward"
    )  # which has no part in the rotation


def test_a_forward_of_the_class_that_is_replaced(monkeypatch):
    patched_model, reference, _ = model_of(LlamaRMSNorm(32), make_mlp())
    for cls in (LlamaRMSNorm, LlamaMLP):
        monkeypatch.setattr(cls, "forward", lambda self, x: x * 1.5)
    for a, b in zip(patched_model, reference, strict=True):
        assert_same_output(a, b)


class Layer(LlamaDecoderLayer):
    """Without attention."""

    def __init__(self):
        super().__init__(tiny.config("llama"), 0)
        self.self_attn = torch.nn.Linear(32, 32)

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.self_attn(self.input_layernorm(hidden_states))
        hidden_states = residual + hidden_states
        residual = hidden_states
        return residual + self.mlp(self.post_attention_layernorm(hidden_states))


class Strict(torch.nn.Module):
    """As kernels are that are bound to Python without Python's types."""

    def forward(self, x):
        assert type(x) is torch.Tensor
        return x * 0.5


def strict(layer):
    layer.post_attention_layernorm = Strict()


def strict_forward(layer):
    layer.post_attention_layernorm.forward = Strict().forward


@pytest.mark.parametrize("change", [strict, strict_forward])
def test_a_norm_of_a_layer_that_is_replaced(change, ran):
    patched_model, reference, _ = model_of(Layer())
    assert_same_output(patched_model[0], reference[0])
    assert ran == ["liger_rms_norm", "liger_rms_norm", "glu"]
    change(patched_model[0]), change(reference[0])
    assert_same_output(patched_model[0], reference[0])
    assert ran == ["liger_rms_norm", "liger_rms_norm", "glu", "liger_rms_norm", "glu"]


def test_a_norm_outside_of_the_graph():
    class Outside(Layer):
        def forward(self, hidden_states):
            residual = hidden_states
            with torch.no_grad():
                hidden_states = self.input_layernorm(hidden_states)
            return residual + self.mlp(
                self.post_attention_layernorm(residual + self.self_attn(hidden_states))
            )

    patched_model, reference, _ = model_of(Outside())
    results = []
    for layer in (patched_model[0], reference[0]):
        x = random_rows(2, 5, 32).requires_grad_()
        (layer(x * 1.0) * random_rows(2, 5, 32, seed=3)).sum().backward()
        results.append([x.grad, *(p.grad for p in layer.parameters())])
    for output, expected in zip(*results, strict=True):
        assert (output is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(
                output, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item()
            )


def test_the_parts():
    """Exactly what is read is recorded."""
    made = make_mlp(act_fn=Act(1.0))
    reads = ReadRecorder()
    gated.prove(made, reads)
    parts = reads.parts()
    assert {(*path, name) for path, name, *_ in parts} == {
        ("act_fn",),
        ("act_fn", "forward"),
        ("act_fn", "scale"),
    }
    assert unchanged(made, parts) and hash(parts) is not None
    made.act_fn.scale = 1
    assert not unchanged(made, parts)
    norms.prove(LlamaRMSNorm(8), reads := ReadRecorder())
    assert reads.parts() == ()  # weight and eps are read when it is called
