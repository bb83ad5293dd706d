"""Layers of a user's own are handed tensors, whatever optional arguments they are given."""

import copy

import pytest
import tiny
import torch
from patched import assert_same_step, step
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import liger_kernel.transformers as liger

pytestmark = pytest.mark.usefixtures("everything_on")


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        assert type(x) is torch.Tensor
        return x * 3

    @staticmethod
    def backward(ctx, dy):
        return dy * 3


def added_in_place(residual, hidden_states, extra):
    """To the residual stream, too."""
    hidden_states += extra
    return residual, hidden_states


def if_a_tensor(residual, hidden_states, extra):
    return residual, hidden_states + extra if isinstance(
        hidden_states, torch.Tensor
    ) else hidden_states


def by_a_function(residual, hidden_states, extra):
    return Tripled.apply(residual), hidden_states


def for_some_tokens(residual, hidden_states, extra):
    hidden_states[:, :3] += extra[:, :3]
    return residual, hidden_states


class SteeredLayer(LlamaDecoderLayer):
    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_embeddings=None,
        extra=None,
        steer=None,
        **kwargs,
    ):
        residual = hidden_states
        hidden_states, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        if extra is not None:
            residual, hidden_states = steer(residual, hidden_states, extra)
        return residual + self.mlp(self.post_attention_layernorm(hidden_states))


@pytest.mark.parametrize("steer", [added_in_place, if_a_tensor, by_a_function, for_some_tokens])
def test_an_optional_argument(steer):
    reference = tiny.model("llama")
    for layer in reference.model.layers:
        layer.__class__ = SteeredLayer
    patched_model = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched_model)
    plain = step(reference)
    assert_same_step(step(patched_model), plain)
    extra = torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(9))
    expected = step(reference, extra=extra, steer=steer)
    assert_same_step(step(patched_model, extra=extra, steer=steer), expected)
    assert not torch.isclose(expected[0].loss, plain[0].loss, rtol=1e-4)
