"""The residual stream of a decoder layer: additions that wait for the norm which reads them."""

import copy
import re

import pytest
import tiny
import torch
from conftest import DEVICE
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction, fused_add_rms_norm_reference
from liger_kernel.transformers import apply_liger_kernel, functional, probe, revert
from liger_kernel.transformers.deferred import Stream, tensor_of


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
        self.scale = torch.nn.Parameter(torch.ones(1))


class Holder(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **kwargs):
        return self.layer(x, **kwargs)


class Config:
    hidden_size = 8


@pytest.mark.parametrize("cls", [Layer, Tuple])
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
    assert found == probe.Block("hidden_states", 2)
