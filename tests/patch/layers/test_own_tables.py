"""Cos and sin that are changed on their way from the rotary embedding to the rotation, which reads
half of them."""

import copy

import pytest
import tiny
import torch
from patched import assert_same_step, step
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import liger_kernel.transformers as liger
from liger_kernel.patch.layers.rope import TABLE_NAMES
from liger_kernel.patch.proof.functions import only_forwards

pytestmark = pytest.mark.usefixtures("reference_only")


def halved(cos, sin):
    """Other angles in the second half of the columns alone."""
    cos, sin = cos.clone(), sin.clone()
    cos[..., 6:], sin[..., 6:] = 1, 0
    return cos, sin


def hooked(model):
    model.model.rotary_emb.register_forward_hook(lambda module, args, output: halved(*output))


def replaced(model):
    embedding = model.model.rotary_emb
    forward = type(embedding).forward
    embedding.forward = lambda *args, **kwargs: halved(*forward(embedding, *args, **kwargs))


class Scaled(LlamaDecoderLayer):
    """A scale that learns: under ``no_grad`` the tables have no gradient."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.scale = torch.nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        cos, sin = position_embeddings
        return super().forward(hidden_states, position_embeddings=(cos * self.scale, sin), **kwargs)


def scaled(model):
    torch.manual_seed(0)
    model.model.layers[0] = Scaled(model.config, 0)


@pytest.mark.parametrize("change", [hooked, replaced, scaled])
def test_tables_that_are_changed_on_their_way(change):
    reference = tiny.model("llama")
    change(reference)
    patched_model = reference if change is replaced else copy.deepcopy(reference)
    expected = step(reference)
    with torch.no_grad():
        evaluated = reference.eval()(**tiny.batch()).loss
    reference.train().zero_grad()
    report = liger.apply_liger_kernel(patched_model)
    assert report.of("apply_rotary_pos_emb") == (1 if change is scaled else 0)
    assert any(name == "LlamaAttention" for name, _ in report.left_alone)
    assert_same_step(step(patched_model), expected)
    with torch.no_grad():
        torch.testing.assert_close(patched_model.eval()(**tiny.batch()).loss, evaluated)


def test_a_trusted_layer():
    model = tiny.model("llama")
    scaled(model)
    assert liger.apply_liger_kernel(model, trust=(Scaled,)).of("apply_rotary_pos_emb") == 2


# ---- what an attention of one's own does with them ----


def passes(q, k, position_embeddings):
    cos, sin = position_embeddings
    q, k = rotate(q, k, cos, sin)
    return q, k


def takes_both(q, k, cos, sin, **kwargs):
    return rotate(q, k, cos, sin, unsqueeze_dim=2)


def under_other_names(q, k, position_embeddings):
    c, s = position_embeddings
    return rotate(q, k, c, s)


def scales(q, k, position_embeddings):
    c, s = position_embeddings
    c = c * 2
    return rotate(q, k, c, s)


def scales_within(q, k, cos, sin):
    return rotate(q, k, cos * 2, sin)


def writes(q, k, cos, sin):
    cos[..., 3:] = 1
    return rotate(q, k, cos, sin)


def others(q, k, position_embeddings):
    c, s = table(q)
    return rotate(q, k, c, s)


def asks_somebody(q, k, cos, sin):
    cos = table(cos)
    return rotate(q, k, cos, sin)


def shows_them(q, k, cos, sin):
    table(cos)
    return rotate(q, k, cos, sin)


def in_a_closure(q, k, cos, sin):
    return (lambda: rotate(q, k, cos, sin))()


def by_attribute(q, k, position_embeddings):
    return rotate(q, k, position_embeddings.cos, position_embeddings.sin)


@pytest.mark.parametrize("function", [passes, takes_both, under_other_names])
def test_tables_that_are_handed_on(function):
    assert only_forwards(function, TABLE_NAMES, "rotate")


@pytest.mark.parametrize(
    "function",
    [scales, scales_within, writes, others, asks_somebody, shows_them, in_a_closure, by_attribute],
)
def test_tables_in_other_hands(function):
    assert not only_forwards(function, TABLE_NAMES, "rotate")


def rotate(q, k, cos, sin, unsqueeze_dim=1):
    return q, k


def table(x):
    return x, x
