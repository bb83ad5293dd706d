"""The hub's layers for the function that rotates queries and keys, and for the rotary embedding."""

import copy
import functools

import pytest
import tiny
import torch
import transformers
from hardware import DEVICE
from hub_layers import assert_same, bind, function_module, runs_fused
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from liger_kernel.ops import functional

pytestmark = pytest.mark.thorough
# where `kernels` is installed, transformers has made a module of the function
LLAMA_ROPE = getattr(modeling_llama.apply_rotary_pos_emb, "forward", None)
LLAMA_ROPE = LLAMA_ROPE or modeling_llama.apply_rotary_pos_emb
HALF_ROPE = getattr(modeling_gpt_oss.apply_rotary_pos_emb, "forward", None)
HALF_ROPE = HALF_ROPE or modeling_gpt_oss.apply_rotary_pos_emb


@pytest.fixture
def rotations(monkeypatch):
    """A list that has one entry for each call of the operator."""
    calls = []
    operator = functional.liger_rope

    def counted(*args, **kwargs):
        calls.append(len(args))
        return operator(*args, **kwargs)

    monkeypatch.setattr(functional, "liger_rope", counted)
    return calls


@pytest.fixture
def function():
    return bind(function_module(LLAMA_ROPE), "RotaryPosEmb")


class Rotation(nn.Module):
    """A rotation by cos and sin, as a module of q and k."""

    def __init__(self, rotation, cos, sin):
        super().__init__()
        self.__dict__.update(rotation=rotation, cos=cos, sin=sin)

    def forward(self, q, k):
        return self.rotation(q, k, self.cos, self.sin)


def embedding():
    return LlamaRotaryEmbedding(tiny.config("llama")).to(DEVICE)


def heads():
    return [torch.randn(2, number, 5, 8, device=DEVICE) for number in (4, 2)]


def tables(module, like):
    return module(like, torch.arange(5, device=DEVICE)[None])


def test_tables_of_a_proved_embedding(function, rotations):
    q, k = heads()
    reference = function_module(LLAMA_ROPE)
    proved = bind(embedding(), "RotaryEmbedding")
    cos, sin = tables(proved, q)
    for table, expected in zip((cos, sin), tables(embedding(), q), strict=True):
        assert torch.equal(table, expected)
    run = functools.partial(Rotation, cos=cos, sin=sin)
    assert_same(run(function), run(reference), q, k)
    assert_same(run(function), run(reference), q, k, second=True)
    assert len(rotations) == 2 and runs_fused(proved)
    options = dict(q=q.transpose(1, 2), k=k.transpose(1, 2), sin=sin, unsqueeze_dim=2)
    torch.testing.assert_close(function(cos=cos, **options), reference(cos=cos, **options))
    assert len(rotations) == 3


@pytest.mark.parametrize("change", ["not proved", "written to", "copied", "one of another"])
def test_other_tables(function, rotations, change):
    """Their second half may be another one, which the function reads and the operator does not."""
    q, k = heads()
    proved = bind(embedding(), "RotaryEmbedding")
    cos, sin = tables(embedding() if change == "not proved" else proved, q)
    if change == "written to":
        cos[..., 4:] *= 2
    elif change == "copied":
        cos, sin = copy.deepcopy((cos, sin))
        cos[..., 4:] *= 2
    elif change == "one of another":
        cos = torch.rand_like(cos)
    expected = LLAMA_ROPE(q, k, cos, sin)
    for output, reference in zip(function(q, k, cos, sin), expected, strict=True):
        assert torch.equal(output, reference)
    assert not rotations


class Uneven(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        cos, sin = super().forward(x, position_ids)
        return cos * torch.linspace(1, 2, cos.shape[-1], device=cos.device), sin


@pytest.mark.parametrize("cls", [Uneven, CohereRotaryEmbedding])
def test_an_embedding_that_is_not_proved(function, rotations, cls):
    """Cohere's has the angle of a pair in neighbouring columns."""
    q, k = heads()
    embedding = bind(cls(tiny.config("llama")).to(DEVICE), "RotaryEmbedding")
    cos, sin = tables(embedding, q)
    output = function(q, k, cos, sin)
    assert torch.equal(output[0], LLAMA_ROPE(q, k, cos, sin)[0])
    assert not rotations and not runs_fused(embedding)


def test_a_function_that_reads_no_second_half(rotations):
    """GPT-OSS's tables have one column for each pair."""
    config = transformers.GptOssConfig(head_dim=8)
    cos, sin = tables(modeling_gpt_oss.GptOssRotaryEmbedding(config).to(DEVICE), heads()[0])
    assert cos.shape[-1] == 4
    module = function_module(HALF_ROPE)
    run = functools.partial(Rotation, cos=cos, sin=sin)
    function = bind(copy.deepcopy(module), "RotaryPosEmb")
    assert_same(run(function), run(module), *heads())
    assert len(rotations) == 1


def test_in_a_graph(function, rotations):
    q, k = heads()
    proved = bind(embedding(), "RotaryEmbedding")

    class Attention(nn.Module):
        def forward(self, q, k):
            return function(q, k, *tables(proved, q))

    attention = Attention()
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k), attention(q, k))
    assert len(rotations) == 1, "the graph has the function itself"


def test_in_inference_mode(function, rotations):
    """Its tensors have no version, so nobody can say whether they were written to."""
    q, k = heads()
    proved = bind(embedding(), "RotaryEmbedding")
    with torch.inference_mode():
        cos, sin = tables(proved, q)
        output = function(q, k, cos, sin)
    assert torch.equal(output[0], LLAMA_ROPE(q, k, cos, sin)[0]) and not rotations


def test_another_function(rotations):
    def without_sin(q, k, cos, sin, unsqueeze_dim=1):
        return q * cos.unsqueeze(unsqueeze_dim), k * cos.unsqueeze(unsqueeze_dim)

    module = bind(function_module(without_sin), "RotaryPosEmb")
    q, k = heads()
    cos, sin = tables(bind(embedding(), "RotaryEmbedding"), q)
    output = module(q, k, cos, sin)
    assert torch.equal(output[0], q * cos.unsqueeze(1)) and not rotations
