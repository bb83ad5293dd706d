"""Work that waits within a layer: additions for the norm that reads them, norms of queries and keys for RoPE."""

import copy
import re

import pytest
import tiny
import torch
from hardware import DEVICE
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_kernel.ops import functional
from liger_kernel.ops.norm.fused_add_rms_norm import LigerFusedAddRMSNormFunction, fused_add_rms_norm_reference
from liger_kernel.patch import deferred, residual
from liger_kernel.patch.deferred import Normed, Stream, rope, tensor_of, worth_fusing
from liger_kernel.transformers import apply_liger_kernel, revert


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """A GPU's small layers have streams here, too."""
    monkeypatch.setattr(deferred, "worth_fusing", lambda x: True)


def test_small_tensors_are_the_compilers(monkeypatch):
    """In a graph, and on a GPU: there each operator of ours costs the host more than it saves."""
    monkeypatch.setattr(deferred, "IN_GRAPH", 2**23)
    small, large = torch.empty(2**23 - 1, device="meta"), torch.empty(2**23, device="meta")
    assert not deferred.is_the_compilers(small)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert deferred.is_the_compilers(small) and not deferred.is_the_compilers(large)
    assert not deferred.is_the_compilers(torch.empty(1))


@pytest.mark.parametrize(
    "compiling, graphs",
    [
        ({}, False),
        (dict(mode="reduce-overhead"), True),
        (dict(mode="max-autotune"), True),
        (dict(mode="max-autotune-no-cudagraphs"), False),
        (dict(options={"triton.cudagraphs": True}), True),
        (dict(backend="eager"), False),
    ],
    ids=str,
)
def test_what_becomes_a_cuda_graph(compiling, graphs, monkeypatch):
    """There small tensors are ours. Every backend has its own answer, for one function."""
    found = []

    def note():
        found.append(deferred.becomes_a_cuda_graph())
        return True

    note._dynamo_marked_constant = True

    def function(x):
        return x + 1 if note() else x

    x = torch.ones(3)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **options: graph.forward)
    torch._dynamo.reset()
    torch.compile(function, backend="eager")(x)
    torch.compile(function, **compiling)(x)
    assert found[0] is False and found[-1] is graphs
    assert not deferred.becomes_a_cuda_graph()


def test_a_whole_graph_asks_what_it_becomes(monkeypatch):
    """The question is a constant to Dynamo, and no break; Inductor's own setting counts, too."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **options: graph.forward)

    def function(x):
        return x + 1 if deferred.becomes_a_cuda_graph() else x - 1

    x = torch.ones(3)
    torch._dynamo.reset()
    assert torch.compile(function, fullgraph=True, mode="reduce-overhead")(x).sum() == 6
    assert torch.compile(function, fullgraph=True)(x).sum() == 0
    torch._dynamo.reset()
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert torch.compile(function, fullgraph=True)(x).sum() == 6


def test_small_tensors_of_a_cuda_graph(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(deferred, "IN_GRAPH", 2**23)
    monkeypatch.setattr(deferred, "becomes_a_cuda_graph", lambda: True)
    assert not deferred.is_the_compilers(torch.empty(5, device="meta"))


def test_what_pays():
    small, large = (torch.empty(n, 2**10, device="meta") for n in (1, 2**13))
    assert not worth_fusing(small) and worth_fusing(large) and worth_fusing(torch.empty(1))


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# ---- the object ----


def test_it_adds_what_it_was_given():
    x, more = rows(2, 3, 8), rows(2, 3, 8, seed=1)
    for sum in (Stream(x) + more, more + Stream(x), torch.add(Stream(x), more), Stream(x).__radd__(more)):
        assert type(sum) is Stream and sum.more is more and torch.equal(sum.tensor(), x + more)
    twice = Stream(x) + more + more
    assert type(twice) is Stream and torch.equal(twice.value, x + more) and torch.equal(twice.tensor(), x + more + more)


@pytest.mark.parametrize(
    "other", [1.0, rows(8), rows(2, 3, 8).double(), Stream(rows(2, 3, 8))], ids=["number", "row", "dtype", "stream"]
)
def test_what_no_kernel_adds_is_added_at_once(other):
    x = rows(2, 3, 8)
    got, want = Stream(x) + other, x + tensor_of(other)
    assert torch.equal(tensor_of(got), want) and tensor_of(got).dtype == want.dtype
    assert type(got) is torch.Tensor or type(other) is Stream


def test_everything_else_is_done_to_its_tensor():
    x, more = rows(2, 3, 8), rows(2, 3, 8, seed=1)
    here = x + more

    def stream():
        return Stream(x) + more

    assert stream().shape == here.shape and stream().dtype == here.dtype and len(stream()) == 2
    for got, want in (
        (stream().to(torch.float64), here.double()), (stream() * 2, here * 2), (2 * stream(), 2 * here),
        (stream() - x, here - x), (x - stream(), x - here), (stream()[0], here[0]), (-stream(), -here),
        (torch.clamp(stream(), -1, 1), here.clamp(-1, 1)), (torch.cat([stream(), x]), torch.cat([here, x])),
        (torch.where(stream() > 0, stream(), x), torch.where(here > 0, here, x)), (stream() / 2, here / 2),
    ):  # fmt: skip
        assert type(got) is torch.Tensor and torch.equal(got, want)


def test_who_holds_the_stream_sees_the_sum():
    stream = Stream(rows(4, 8)) + rows(4, 8, seed=1)
    held, want = stream, stream.value + stream.more
    normed = stream.normed(None, 1e-6, 0.0, "llama")
    assert torch.equal(held.tensor(), want) and held.more is None
    assert torch.equal(normed, functional.liger_rms_norm(want, None, 1e-6))


def test_copies_of_it():
    stream = copy.copy(Stream(rows(2, 8), rows(2, 8, seed=1)))
    assert torch.equal(stream.tensor(), rows(2, 8) + rows(2, 8, seed=1))


# ---- the node ----


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("used", ["normed", "residual", "both"])
@pytest.mark.parametrize("added", [True, False])
def test_gradients(added, used, weighted):
    """Whichever of its outputs are used, with and without something to add."""

    def run(function, dtype):
        x, r, w = (rows(*s, seed=i).to(dtype).requires_grad_() for i, s in enumerate(((5, 24), (5, 24), (24,))))
        given = x * 1, (r * 1 if added else None), (w if weighted else None)
        y, s = function(*given)
        a, b = rows(5, 24, seed=7).to(dtype), rows(5, 24, seed=8).to(dtype)
        loss = {"normed": (y * a).sum(), "residual": (s * b).sum(), "both": (y * a).sum() + (s * b).sum()}[used]
        leaves = [x, *([r] if added else []), *([w] if weighted else [])]
        return [y, s, *torch.autograd.grad(loss, leaves, allow_unused=True)]

    got = run(lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6), torch.float32)
    want = run(lambda x, r, w: fused_add_rms_norm_reference(x, r, w, 1e-6), torch.float64)
    for a, b in zip(got, want, strict=True):
        if a is None or b is None:  # the weight, where the norm is not used
            assert not any(t.any() for t in (a, b) if t is not None)
        else:
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def test_a_wider_residual():
    """The result has X's dtype, each gradient its input's."""
    x, r = rows(4, 8).bfloat16().requires_grad_(), rows(4, 8, seed=1).requires_grad_()
    y, s = functional.liger_fused_add_rms_norm(x, r, None, 1e-6)
    assert y.dtype == s.dtype == torch.bfloat16
    (y + s).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and r.grad.dtype == torch.float32


def test_errors():
    x = rows(4, 8)
    with pytest.raises(ValueError, match="R has shape"):
        functional.liger_fused_add_rms_norm(x, x[:2], None)
    with pytest.raises(ValueError, match="liger_fused_add_rms_norm: weight"):
        functional.liger_fused_add_rms_norm(x, x, torch.ones(7, device=DEVICE))
    with pytest.raises(ValueError, match="casting_mode"):
        functional.liger_fused_add_rms_norm(x, x, None, casting_mode="olmo")


# ---- layers ----


class Layer(GradientCheckpointingLayer):
    """A decoder layer without attention."""

    def __init__(self, config):
        super().__init__()
        norm = tiny.model_class("llama").__module__
        self.norm = __import__(norm, fromlist=["LlamaRMSNorm"]).LlamaRMSNorm(config.hidden_size)
        self.mlp = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = torch.nn.Dropout(0.0)

    def forward(self, hidden_states, scale=1.0):
        hidden_states = hidden_states + self.mlp(hidden_states)
        return hidden_states + self.mlp(self.norm(hidden_states))


class InPlace(Layer):
    def forward(self, hidden_states, scale=1.0):
        residual = hidden_states
        hidden_states += self.mlp(hidden_states)
        return residual + self.norm(hidden_states)


class Asks(Layer):
    def forward(self, hidden_states, scale=1.0):
        if isinstance(hidden_states, torch.Tensor):
            hidden_states = hidden_states * 2
        return hidden_states + self.mlp(self.norm(hidden_states))


class Post(Layer):
    def forward(self, hidden_states, scale=1.0):
        return hidden_states + self.norm(self.mlp(hidden_states))


class Tuple(Layer):
    def forward(self, hidden_states, scale=1.0):
        hidden_states, _ = hidden_states + self.mlp(hidden_states), None
        return hidden_states + self.mlp(self.norm(hidden_states)), None


class Owner(Layer):
    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(config.hidden_size))


class Scaled(Layer):
    """As Gemma 4's: a number of its own, in place at the end."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("number", torch.full((1,), 0.3))

    def forward(self, hidden_states, scale=1.0):
        hidden_states = super().forward(hidden_states)
        hidden_states *= self.number
        return hidden_states


class Holder(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **kwargs):
        return self.layer(x, **kwargs)


class Config:
    hidden_size = 8


@pytest.mark.parametrize("cls", [Layer, Tuple, Scaled])
def test_a_layer_that_adds_and_normalises(cls):
    torch.manual_seed(0)
    theirs = Holder(cls(Config()))
    mine = copy.deepcopy(theirs)
    report = apply_liger_kernel(mine)
    assert report.of(f"{cls.__name__}'s residual stream") == 1
    for x in (rows(2, 5, 8).cpu(), rows(3, 8).cpu()):
        for kwargs in ({}, {"scale": 2.0}):
            got, want = mine(x, **kwargs), theirs(x, **kwargs)
            assert type(got) is type(want)
            first = (got[0], want[0]) if cls is Tuple else (got, want)
            torch.testing.assert_close(*first)
    got = mine.layer(hidden_states=x)
    torch.testing.assert_close(got, theirs.layer(hidden_states=x))
    revert(mine)
    assert type(mine.layer) is cls


@pytest.mark.parametrize(
    "cls,why",
    [
        (InPlace, "used otherwise"), (Asks, "no norm of ours|used otherwise"), (Post, "no norm of ours"),
        (Owner, "parameters"),
    ],
)  # fmt: skip
def test_a_layer_that_does_something_else_is_left_alone(cls, why):
    torch.manual_seed(0)
    theirs = Holder(cls(Config()))
    mine = copy.deepcopy(theirs)
    report = apply_liger_kernel(mine)
    left = {what: reason for what, reason in report.left_alone}
    assert re.search(why, left[f"{cls.__name__}'s residual stream"])
    x = rows(2, 5, 8).cpu()
    torch.testing.assert_close(mine(x.clone()), theirs(x.clone()))


def test_hooks_see_tensors():
    """ZeRO's, the user's: a hook that is registered after the patch, too."""
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    apply_liger_kernel(mine)
    seen = []
    handle = mine.model.layers[0].post_attention_layernorm.register_forward_pre_hook(
        lambda module, args: seen.append(type(args[0]))
    )
    batch = tiny.batch()
    want = theirs(**batch).loss
    torch.testing.assert_close(mine(**batch).loss, want, rtol=1e-5, atol=0)
    assert seen == [torch.Tensor]
    handle.remove()
    torch.testing.assert_close(mine(**batch).loss, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_gradient_checkpointing(reentrant):
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    apply_liger_kernel(mine)
    for model in (theirs, mine):
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(**tiny.batch()).loss.backward()
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_block_is_known_by_what_it_does():
    mine = tiny.model("llama")
    apply_liger_kernel(mine)
    found = type(mine.model.layers[0])._liger[1]
    assert found == residual.Block("hidden_states", 2)


# ---- norms of queries and keys ----

LLAMA = (1e-6, 0.0, "llama")


def heads(h, seed=0):
    return rows(2, 5, h, 8, seed=seed)


def test_a_norm_waits_for_rope(monkeypatch):
    """From tokens and heads to heads and tokens, and no further."""
    w = torch.ones(8, device=DEVICE)
    x = heads(3)
    want = functional.liger_rms_norm(x, w, *LLAMA)
    first = Normed(x, (w, *LLAMA))
    turned = first.transpose(1, 2)
    assert type(turned) is Normed and turned.value is None and torch.equal(turned.tensor(), want.transpose(1, 2))
    for other in (turned.transpose(1, 2), first.transpose(0, 1), first.transpose(-1, -2), first.view(2, 5, 24)):
        assert type(other) is torch.Tensor
    assert torch.equal(Normed(x, (w, *LLAMA)).transpose(2, 1).transpose(1, 2), want)
    heads_first = Normed(x.transpose(1, 2), (w, *LLAMA))  # turned already: what comes next is attention's own
    assert type(heads_first.transpose(1, 2)) is torch.Tensor


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("case", ["both wait", "one waits", "one was looked at", "norms differ"])
def test_rope_of_norms(case, turned, monkeypatch):
    calls = []
    for name in ("norm_rope", "rope"):
        function = getattr(functional, f"liger_{name}")
        monkeypatch.setattr(
            functional, f"liger_{name}", lambda *a, name=name, f=function, **k: (calls.append(name), f(*a, **k))[1]
        )
    q_weight, k_weight = rows(8, seed=5), rows(8, seed=6)
    q, k = Normed(heads(3), (q_weight, *LLAMA)), Normed(heads(1, seed=1), (k_weight, *LLAMA))
    if case == "norms differ":
        k = Normed(k.x, (k_weight, 1e-5, 0.0, "llama"))
    want = [functional.liger_rms_norm(n.x, *n.norm) for n in (q, k)]
    if turned:
        q, k, *want = (t.transpose(1, 2) for t in (q, k, *want))
    if case == "one waits":
        q = tensor_of(q)
    if case == "one was looked at":
        assert q.tensor() is not None
    angles = rows(2, 5, 8, seed=9)
    dim = 1 if turned else 2
    got = rope(q, k, angles.cos(), angles.sin(), dim, False)
    assert calls == ["norm_rope" if case == "both wait" else "rope"]
    for a, b in zip(got, functional.liger_rope(*want, angles.cos(), angles.sin(), unsqueeze_dim=dim), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_layers_without_rope(attention):
    """Some of Exaone 4's layers normalise queries and keys and do not turn them."""
    sizes = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64,
        intermediate_size=48, layer_types=["sliding_attention", "full_attention"], sliding_window=8,
        max_position_embeddings=64, attn_implementation=attention,
    )  # fmt: skip

    def model():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("exaone4", **sizes)).to(DEVICE).train()

    theirs, mine = model(), model()
    report = apply_liger_kernel(mine)
    assert report.of("Exaone4Attention's q_norm and k_norm") == 2
    ids = torch.arange(24, device=DEVICE).view(2, 12)
    for m in (theirs, mine):
        m(input_ids=ids, labels=ids).loss.backward()
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=name)
    theirs.eval(), mine.eval()
    assert torch.equal(*(m.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (theirs, mine)))


def test_a_hook_on_a_head_norm_sees_tensors():
    mine = tiny.model("qwen3")
    apply_liger_kernel(mine)
    seen = []
    norm = mine.model.layers[0].self_attn.q_norm
    norm.register_forward_hook(lambda module, args, out: seen.append((type(args[0]), type(out))))
    mine(**tiny.batch()).loss.backward()
    assert seen == [(torch.Tensor, torch.Tensor)]
    other, x = mine.model.layers[1].self_attn, torch.ones(1, 2, 2, norm.weight.numel())
    assert type(other.q_norm(x)) is torch.Tensor  # not by its attention
    deferred.rotating(other)
    try:
        assert type(other.q_norm(x)) is Normed
    finally:
        deferred.rotating(None)


def test_a_norm_over_all_heads_does_not_wait():
    """Olmo 2's, which is as wide as all heads together."""
    config = AutoConfig.for_model(
        "olmo2", hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, vocab_size=64,
        eos_token_id=1,
    )  # fmt: skip
    report = apply_liger_kernel(AutoModelForCausalLM.from_config(config))
    assert report.of("Olmo2RMSNorm") == 5 and not any("liger_norm_rope" in by for _, by in report.replaced)
