"""What a proof rests on: it holds for the modules, the values, the names and the dtypes that it was
made for."""

import copy
import pickle

import pytest
import tiny
import torch
import torch.nn.functional as F
from hardware import DEVICE
from proofs import counted, holding, mlp, patched, put, rows, same, with_
from transformers.activations import GELUTanh
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from liger_kernel.patch.layers import mlp as gated
from liger_kernel.patch.layers import norm as norms
from liger_kernel.patch.proof.parts import Reads, unchanged
from liger_kernel.transformers import apply_liger_kernel, apply_liger_kernel_to_llama, revert


@pytest.fixture
def ran(monkeypatch):
    return counted(monkeypatch)


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
    made = with_(ByConfig)
    made.config = tiny.config("llama", factor=factor)
    return made


def scaled(k):
    return lambda x: F.silu(x) * k


PAIRS = {
    "a private attribute": lambda: (with_(Scaled, _k=1.0), with_(Scaled, _k=1.5)),
    "the layer's index": lambda: (with_(ByLayer, layer_idx=0), with_(ByLayer, layer_idx=1)),
    "a child's state": lambda: (mlp(act_fn=Act(1.0)), mlp(act_fn=Act(1.5))),
    "another config": lambda: (with_config(1.0), with_config(1.5)),
    "by another name": lambda: (with_(Hidden), with_(Hidden, _k=1.5)),
    "a property": lambda: (with_(Computed, _k=1.0), with_(Computed, _k=1.5)),
    "a function": lambda: tuple(mlp(act_fn=lambda x, k=k: F.silu(x) * k) for k in (1.0, 1.5)),
    "a closure": lambda: (mlp(act_fn=scaled(1.0)), mlp(act_fn=scaled(1.5))),
    "modules in a list": lambda: tuple(mlp(act_fn=torch.nn.Sequential(Act(k))) for k in (1.0, 1.5)),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_proof_is_for_modules_that_read_the_same(pair, first):
    """The first of the two is what we know; the other, of the same class, is not."""
    modules = PAIRS[pair]()
    mine, theirs, _ = holding(*modules[:: 1 - 2 * first])
    for a, b in zip(mine, theirs, strict=True):
        same(a, b)
    assert not patched(mine[1 - first])


class ScaledNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * self._k


def test_norms_that_read_something_else():
    norms = [ScaledNorm(32) for _ in range(2)]
    norms[0]._k, norms[1]._k = 1.0, 1.5
    mine, theirs, _ = holding(*norms)
    assert patched(mine[0]) and not patched(mine[1])
    for a, b in zip(mine, theirs, strict=True):
        same(a, b)


def test_modules_that_read_the_same_share_a_proof(monkeypatch):
    """Whatever else they hold: layer_idx is in every attention, and an MLP may have it, too."""
    tried = []
    counting = staticmethod(lambda *given: tried.append(1) or gated.prove(*given))
    monkeypatch.setattr(gated.GatedMLPs, "prove", counting)
    mine, theirs, _ = holding(*(mlp(layer_idx=i, _note=object()) for i in range(3)))
    assert len(tried) == 1 and all(map(patched, mine)) and len({type(m) for m in mine}) == 1
    same(mine[2], theirs[2])


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
    "cls, attributes, why",
    [
        (Counting, {}, "its forward sets seen"),
        (Curious, {}, "its forward looks at gate_proj.factor"),
        (Stored, dict(_scale=torch.ones(())), "what it computes rests on _scale, a Tensor"),
        (All, {}, "its forward looks at all that it holds"),
    ],
)
def test_what_no_proof_can_rest_on(cls, attributes, why):
    assert why in gated.prove(with_(cls, **attributes))


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
    assert gated.prove(made) == gated.prove(mlp())


# ---- for how long ----


def another_act(m):
    m.act_fn = torch.nn.GELU()


def another_function(m):
    put(m, "act_fn", F.relu)


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
    another_act, another_function, another_forward_of_act, another_attribute_of_act, another_class_of_act,
    a_hook_on_act, another_forward,
]  # fmt: skip
COPIES = {
    "itself": lambda m: m,
    "deepcopy": copy.deepcopy,
    "pickled": lambda m: pickle.loads(pickle.dumps(m)),
    "copy": copy.copy,
    "replica": lambda m: _replica(m),
}


def _replica(module):
    """What DataParallel does, on one device."""
    made = module._replicate_for_data_parallel()
    for name, p in module._parameters.items():
        setattr(made, name, p)
    made._modules = {name: child and _replica(child) for name, child in module._modules.items()}
    return made


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_part_that_is_changed_afterwards(change, how, ran):
    mine, theirs, _ = holding(mlp(act_fn=Act(1.0)))
    mine, theirs = COPIES[how](mine[0]), theirs[0]
    same(mine, theirs)
    assert ran == ["glu"]  # a copy has what was proved
    before = theirs(rows(2, 5, 32, seed=9))
    change(mine), change(theirs)
    assert not torch.allclose(theirs(rows(2, 5, 32, seed=9)), before)
    same(mine, theirs)
    assert ran == ["glu"]


@pytest.mark.parametrize("change", [another_act, another_forward_of_act, another_attribute_of_act])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_part_that_is_changed_under_compile(change, ran):
    torch._dynamo.reset()
    mine, theirs, _ = holding(mlp(act_fn=Act(1.0)))
    compiled = torch.compile(mine[0], fullgraph=True, backend="eager")
    same(compiled, theirs[0])
    assert ran == ["glu"]
    change(mine[0]), change(theirs[0])
    same(compiled, theirs[0])
    assert ran == ["glu"]


def test_a_config_that_is_changed_afterwards(ran):
    """What was read of it counts, and nothing else."""
    mine, theirs, _ = holding(with_config(1.0))
    for name, value, known in (("use_cache", True, 1), ("factor", 1.5, 1)):
        for m in (mine[0], theirs[0]):
            setattr(m.config, name, value)
        same(mine[0], theirs[0])
        assert len(ran) == known


def test_a_change_and_back(ran):
    mine, _, _ = holding(mlp(act_fn=Act(1.0)))
    for scale, known in ((1.0, 1), (1.5, 1), (1.0, 2)):
        mine[0].act_fn.scale = scale
        mine[0](rows(2, 32))
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
        mine = Model(tiny.config("llama")).model.layers[0].mlp
    finally:
        revert("llama")
    assert type(mine) is not LlamaMLP
    theirs = Mine(tiny.config("llama"))
    theirs.load_state_dict(mine.state_dict())
    same(mine, theirs, rows(2, 5, 32).cpu())


def test_projections_may_be_replaced(ran):
    """They are called. Where both are one module they still are two."""
    mine, theirs, _ = holding(mlp())
    for m in (mine[0], theirs[0]):
        torch.manual_seed(0)
        m.up_proj = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Tanh()).to(DEVICE)
    same(mine[0], theirs[0])
    mine[0].up_proj, theirs[0].up_proj = mine[0].gate_proj, theirs[0].gate_proj
    same(mine[0], theirs[0])
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
    mine, theirs, _ = holding(LlamaRMSNorm(32))
    change(mine[0]), change(theirs[0])
    same(mine[0], theirs[0])
    assert len(ran) == known


def test_a_norm_whose_weight_is_gone():
    mine, theirs, _ = holding(LlamaRMSNorm(32))
    for norm in (mine[0], theirs[0]):
        no_weight(norm)
        with pytest.raises(TypeError):
            norm(rows(2, 32))


def test_a_bias_that_comes_later():
    mine, theirs, _ = holding(torch.nn.LayerNorm(32, bias=False))
    for norm in (mine[0], theirs[0]):
        norm.bias = torch.nn.Parameter(rows(32, seed=5))
    same(mine[0], theirs[0])


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half", "eager_attention_forward"])
def test_a_function_of_the_modeling_module_that_is_replaced(name, monkeypatch, ran):
    mine, theirs = (tiny.model("llama", num_hidden_layers=1).to(DEVICE) for _ in range(2))
    apply_liger_kernel(mine)
    given = {name: t.to(DEVICE) for name, t in tiny.batch().items()}
    mine(**given)
    assert "liger_rope" in ran
    ran.clear()
    before = theirs(**given).loss
    function = getattr(modeling_llama, name)

    def halved(*args, **kwargs):
        found = function(*args, **kwargs)
        return (
            tuple(t if t is None else t * 0.5 for t in found)
            if type(found) is tuple
            else found * 0.5
        )

    monkeypatch.setattr(modeling_llama, name, halved)
    assert not torch.isclose(theirs(**given).loss, before, rtol=1e-3)
    torch.testing.assert_close(mine(**given).loss, theirs(**given).loss, rtol=1e-5, atol=0)
    assert ("liger_rope" in ran) == (
        name == "eager_attention_forward"
    )  # which has no part in the rotation


def test_a_forward_of_the_class_that_is_replaced(monkeypatch):
    mine, theirs, _ = holding(LlamaRMSNorm(32), mlp())
    for cls in (LlamaRMSNorm, LlamaMLP):
        monkeypatch.setattr(cls, "forward", lambda self, x: x * 1.5)
    for a, b in zip(mine, theirs, strict=True):
        same(a, b)


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
    mine, theirs, _ = holding(Layer())
    same(mine[0], theirs[0])
    assert ran == ["liger_rms_norm", "liger_rms_norm", "glu"]
    change(mine[0]), change(theirs[0])
    same(mine[0], theirs[0])
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

    mine, theirs, _ = holding(Outside())
    found = []
    for layer in (mine[0], theirs[0]):
        x = rows(2, 5, 32).requires_grad_()
        (layer(x * 1.0) * rows(2, 5, 32, seed=3)).sum().backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    for got, want in zip(*found, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


def test_the_parts():
    """What is written down is what is read."""
    made = mlp(act_fn=Act(1.0))
    reads = Reads()
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
    norms.prove(LlamaRMSNorm(8), reads := Reads())
    assert reads.parts() == ()  # weight and eps are read when it is called
