"""Several linear layers of one input, whose gradient the products add up."""

import host
import pytest
import tiny
import torch
import torch.nn.functional as F
from hardware import DEVICE
from patched import assert_same_step, step
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from liger_kernel.ops.mlp.swiglu_mlp import GatedMLP
from liger_kernel.patch.layers.fan_out import FanOut, SharedInput
from liger_kernel.patch.proof import conditions
from liger_kernel.transformers import apply_liger_kernel

WIDTHS = 4, 6, 3


def drawn(dtype, frozen=()):
    generator = torch.Generator().manual_seed(0)
    shapes = dict(x=(2, 5, 8), b=(4,)) | {f"w{i}": (n, 8) for i, n in enumerate(WIDTHS)}
    drawn = {
        k: torch.randn(s, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        for k, s in shapes.items()
    }
    return {k: t.requires_grad_(k not in frozen) for k, t in drawn.items()}


def outputs(t, fan, also_x=False):
    x = t["x"] * 1
    if fan:
        fan = FanOut(x)
        ys = [fan.linear(t[f"w{i}"], t["b"] if i == 0 else None) for i in range(len(WIDTHS))]
        x = fan.x
    else:
        ys = [F.linear(x, t[f"w{i}"], t["b"] if i == 0 else None) for i in range(len(WIDTHS))]
    return [*ys, x] if also_x else ys


def loss(ys):
    return sum(y.sin().sum() for y in ys)


@pytest.mark.parametrize("frozen", [(), ("x",), ("w0", "b"), ("w0", "w1", "w2", "b")], ids=str)
@pytest.mark.parametrize("also_x", [False, True])
def test_gradients(also_x, frozen):
    t = drawn(torch.float64, frozen)
    wanted = [v for k, v in t.items() if k not in frozen]
    output, expected = (
        torch.autograd.grad(loss(outputs(t, fan, also_x)), wanted) for fan in (True, False)
    )
    for a, b in zip(output, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("used", [(0,), (2, 1), ()])
def test_some_layers_alone(used):
    t = drawn(torch.float64)
    output, expected = (
        torch.autograd.grad(
            loss([outputs(t, fan, True)[i] for i in (*used, 3)]),
            list(t.values()),
            allow_unused=True,
        )
        for fan in (True, False)
    )
    for a, b in zip(output, expected, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b))


def test_runs_of_one_graph_do_not_mix():
    """A run that does not reach the input leaves nothing behind; a second one gives what the first
    one gave."""
    t = drawn(torch.float64)
    total = loss(outputs(t, True, True))
    everything = list(t.values())
    first = torch.autograd.grad(total, everything, retain_graph=True)
    torch.autograd.grad(total, [t["w0"], t["w2"]], retain_graph=True)
    (dx,) = torch.autograd.grad(total, [t["x"]], retain_graph=True)
    second = torch.autograd.grad(total, everything)
    assert torch.equal(dx, first[0]) and all(map(torch.equal, first, second))


def test_runs_of_one_graph_may_overlap():
    """As in threads, or where a hook differentiates within a backward."""
    t = drawn(torch.float64)
    ys = outputs(t, True)
    extra = []

    def differentiate(dy):
        extra.append(
            torch.autograd.grad(ys[0], t["x"], torch.ones_like(ys[0]), retain_graph=True)[0]
        )

    ys[1].register_hook(differentiate)
    (dx,) = torch.autograd.grad(loss(ys), t["x"])
    expected = outputs(t, False)
    (expected_extra,) = torch.autograd.grad(expected[0].sum(), t["x"], retain_graph=True)
    torch.testing.assert_close(extra[0], expected_extra)
    torch.testing.assert_close(dx, torch.autograd.grad(loss(expected), t["x"])[0])


@pytest.mark.parametrize("frozen", [(), ("x",), ("w0", "b")], ids=str)
def test_gradients_of_gradients(frozen):
    """The graph of the gradients is whole: what the layers give the input meets in it, and not in a
    box."""
    t = drawn(torch.float64, frozen)
    wanted = [v for k, v in t.items() if k not in frozen]
    output, expected = [], []
    for results, fan in (output, True), (expected, False):
        once = torch.autograd.grad(loss(outputs(t, fan, True)), wanted, create_graph=True)
        results += [*once, *torch.autograd.grad(sum(d.square().sum() for d in once), wanted)]
    for a, b in zip(output, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_under_transforms():
    t = {k: v.detach() for k, v in drawn(torch.float64).items()}
    output, expected = (
        torch.func.grad(lambda t, fan=fan: loss(outputs(t, fan, True)))(t) for fan in (True, False)
    )
    for k in t:
        torch.testing.assert_close(output[k], expected[k])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_further_off_than_autograd(dtype):
    exact = drawn(torch.float64)
    expected = torch.autograd.grad(loss(outputs(exact, False)), exact["x"])[0]
    inputs = drawn(dtype)
    patched_model, reference = (
        (torch.autograd.grad(loss(outputs(inputs, fan)), inputs["x"])[0].double() - expected)
        .abs()
        .max()
        for fan in (True, False)
    )
    assert patched_model <= reference + expected.abs().max() * torch.finfo(dtype).eps


# ---- in a model ----


@pytest.fixture
def small_ones_too(monkeypatch):
    """Calls of `FanOut.linear`, for inputs of any size."""
    calls = []
    linear = FanOut.linear
    monkeypatch.setattr(conditions, "LARGE_NUMEL", 0)
    monkeypatch.setattr(
        FanOut, "linear", lambda self, *args: (calls.append(1), linear(self, *args))[1]
    )
    return calls


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.thorough
def test_families_train_as_before(family, small_ones_too):
    reference, patched_model = tiny.model(family).to(DEVICE), tiny.model(family).to(DEVICE)
    apply_liger_kernel(patched_model)
    batch = {k: v.to(DEVICE) for k, v in tiny.batch().items()}
    for model in (reference, patched_model):
        for _ in range(2):
            model(**batch).loss.backward()
    assert len(small_ones_too) == 2 * {"mixtral": 0, "phi3": 0}.get(family, 4)  # of MLPs
    for (name, a), b in zip(patched_model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=name)


class OwnAttention(LlamaAttention):
    def forward(self, hidden_states, *args, **kwargs):
        assert type(hidden_states) is torch.Tensor
        return super().forward(hidden_states, *args, **kwargs)


class RemoteAttention(LlamaAttention):
    """A copy of transformers', with its function of RoPE, in a file of one's own."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        assert type(hidden_states) is torch.Tensor
        shape = *hidden_states.shape[:-1], -1, self.head_dim
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (
            projection(hidden_states).view(shape).transpose(1, 2) for projection in projections
        )
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out, weights = eager_attention_forward(self, q, k, v, attention_mask, scaling=self.scaling)
        return self.o_proj(out.flatten(2)), weights


@pytest.mark.parametrize("attention", [LlamaAttention, OwnAttention, RemoteAttention])
@pytest.mark.parametrize("long_context", [False, True])
def test_the_input_of_an_attention(long_context, attention, small_ones_too, monkeypatch):
    """It is shared within a checkpoint whose norms are made again, and by code of transformers
    alone."""
    host.offload_every_tensor(monkeypatch)
    reference, patched_model = tiny.model("llama").to(DEVICE), tiny.model("llama").to(DEVICE)
    for model in (reference, patched_model):
        for layer in model.model.layers:
            layer.self_attn.__class__ = attention
    report = apply_liger_kernel(patched_model, offloaded_checkpoints=long_context)
    assert report.of("apply_rotary_pos_emb") == (0 if attention is OwnAttention else 2)
    assert_same_step(step(patched_model), step(reference))
    shared = long_context and attention is LlamaAttention
    assert (
        len(small_ones_too) == 4 * (1 + long_context) + 2 * 3 * 2 * shared
    )  # when called, and when called again


def test_what_else_is_done_to_a_shared_input():
    """It is done to its tensor."""
    x = drawn(torch.float64)["x"]
    y = SharedInput(FanOut(x * 1))
    tensor = y.fan_out.x
    assert y.shape == x.shape and y.dtype == x.dtype and len(y) == 2
    for output, expected in (
        (y + x, tensor + x),
        (x + y, x + tensor),
        (y * 2, tensor * 2),
        (2 - y, 2 - tensor),
        (y[0], tensor[0]),
        (-y, -tensor),
        (y.float(), tensor.float()),
        (torch.cat([y, x]), torch.cat([tensor, x])),
        (y @ x.mT, x @ x.mT),
    ):
        assert type(output) is torch.Tensor and torch.equal(output, expected)


@pytest.mark.parametrize("long_context", [False, True])
@pytest.mark.parametrize("case", ["small", "no gradient", "autocast", "hooked", "another class"])
def test_only_where_it_pays_and_is_known(case, long_context, small_ones_too, monkeypatch):
    class Other(torch.nn.Linear):
        pass

    host.offload_every_tensor(monkeypatch)
    patched_model = tiny.model("llama").to(DEVICE)
    apply_liger_kernel(patched_model, offloaded_checkpoints=long_context)
    batch = {k: v.to(DEVICE) for k, v in tiny.batch().items()}
    layers = patched_model.model.layers
    if case == "small":
        monkeypatch.setattr(conditions, "LARGE_NUMEL", 2**23)
    for layer in layers:
        if case == "hooked":
            for linear in (layer.self_attn.k_proj, layer.mlp.up_proj):
                linear.register_forward_hook(lambda module, args, out: None)
        if case == "another class":
            layer.self_attn.k_proj.__class__ = layer.mlp.up_proj.__class__ = Other
    autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=case == "autocast")
    with torch.set_grad_enabled(case != "no gradient"), autocast:
        patched_model(**batch)
    assert not small_ones_too


@pytest.mark.parametrize("case", ["small", "large", "hooked", "frozen"])
def test_a_small_mlp_is_one_node(case, monkeypatch):
    """That saves the host's time; a large one takes what saves memory, a layer that does more is
    called."""
    calls, apply = [], GatedMLP.apply
    monkeypatch.setattr(GatedMLP, "apply", lambda *args: calls.append(1) or apply(*args))
    monkeypatch.setattr(conditions, "LARGE_NUMEL", 0 if case == "large" else 2**23)
    reference, patched_model = tiny.model("llama").to(DEVICE), tiny.model("llama").to(DEVICE)
    apply_liger_kernel(patched_model)
    for model in (reference, patched_model):
        first = model.model.layers[0].mlp
        if case == "hooked":
            first.up_proj.register_forward_hook(lambda module, args, out: 2 * out)
        if case == "frozen":
            first.gate_proj.requires_grad_(False)
        model(**{k: v.to(DEVICE) for k, v in tiny.batch().items()}).loss.backward()
    assert len(calls) == {"small": 2, "large": 0}.get(case, 1)
    for (name, a), b in zip(patched_model.named_parameters(), reference.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=name)
