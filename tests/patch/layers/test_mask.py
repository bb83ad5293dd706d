"""Without a mask, a cache or packing to honour a patched model attends causally by a flag, compiled
or not."""

import copy

import pytest
import tiny
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import masking_utils
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from liger_kernel.patch.layers import mask
from liger_kernel.transformers import apply_liger_kernel, revert

ATTENTION = torch.nn.functional.scaled_dot_product_attention


def pair(family="llama", **config):
    reference = tiny.model(family, **{"attn_implementation": "sdpa", **config})
    patched = copy.deepcopy(reference)
    apply_liger_kernel(patched)
    return reference, patched


def attended(model, **batch):
    """(the model's output, the graphs of one compiled call, how each attention in them is
    called)"""
    torch._dynamo.reset()
    graphs, calls = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        for node in graph.graph.nodes:
            if node.target is ATTENTION:
                masked = (
                    node.kwargs.get("attn_mask") is not None
                    or len(node.args) > 3
                    and node.args[3] is not None
                )
                calls.append(
                    (masked, node.kwargs.get("is_causal"), node.kwargs.get("enable_gqa", False))
                )
        return graph

    return torch.compile(model, backend=backend)(**batch), graphs, calls


def batch(tokens=13, **more):
    ids = torch.randint(5, 90, (2, tokens), generator=torch.Generator().manual_seed(1))
    return dict(input_ids=ids, labels=ids) | more


@pytest.mark.thorough
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_compiled_model_has_no_mask(use_cache, reference_only):
    reference, patched = pair(num_attention_heads=4, num_key_value_heads=2, use_cache=use_cache)
    out, graphs, calls = attended(patched, **batch())
    assert len(graphs) == 1 and calls == [(False, True, True)] * patched.config.num_hidden_layers
    torch.testing.assert_close(out.loss, reference(**batch()).loss, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_gradients_of_a_compiled_model(reference_only):
    reference, patched = pair()
    attended(patched, **batch())[0].loss.backward()
    reference(**batch()).loss.backward()
    for a, b in zip(patched.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


PADDED = {
    "none": [[1] * 13, [1] * 13],
    "left": [[0] * 4 + [1] * 9, [1] * 13],
    "right": [[1] * 13, [1] * 9 + [0] * 4],
}


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("compiled", [False, True])
def test_padding(padding, compiled, reference_only):
    """Its values cannot be read in a graph: there it is a mask whatever they are."""
    reference, patched = pair()
    inputs = batch(attention_mask=torch.tensor(PADDED[padding]))
    expected = reference.eval()(**inputs).logits
    output, calls = patched.eval()(**inputs), []
    if compiled:
        output, graphs, calls = attended(patched, **inputs)
        assert len(graphs) == 1 and all(masked for masked, *_ in calls)
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_sequences(compiled, reference_only):
    reference, patched = pair()
    positions = torch.cat((torch.arange(5), torch.arange(8))).expand(2, -1)
    inputs = batch(position_ids=positions)
    expected = reference.eval()(**inputs).logits
    output = attended(patched.eval(), **inputs)[0] if compiled else patched.eval()(**inputs)
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, reference(**batch()).logits, atol=1e-3), (
        "packing makes no difference"
    )


@pytest.mark.parametrize("tokens, masked", [(7, False), (8, True), (13, True)])
@pytest.mark.thorough
def test_sliding_windows(tokens, masked, reference_only):
    """A mask from as many tokens on as transformers gives one."""
    reference, patched = pair(
        "gemma3_text", sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )
    expected = reference.eval()(**batch(tokens)).logits
    output, _, calls = attended(patched.eval(), **batch(tokens))
    assert sorted(m for m, *_ in calls) == ([False, True] if masked else [False, False])
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)
    patched.config.sliding_window = reference.config.sliding_window = 5  # it is read at every call
    for model in (patched, reference):
        for layer in model.model.layers:
            if layer.self_attn.sliding_window is not None:  # nothing that SDPA reads
                layer.self_attn.sliding_window = 5
    output, _, calls = attended(patched, **batch(7))
    assert sorted(m for m, *_ in calls) == [False, True]
    torch.testing.assert_close(output.logits, reference(**batch(7)).logits, rtol=1e-4, atol=1e-5)


def test_a_cache(reference_only):
    reference, patched = pair()
    ids = batch()["input_ids"]
    first, expected = (
        patched.eval()(ids[:, :9], use_cache=True),
        reference.eval()(ids).logits[:, 9:],
    )
    output = patched(ids[:, 9:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    for compiled in (torch.compile(patched, backend="eager"), patched):
        past = reference(ids[:, :9], use_cache=True).past_key_values
        output = compiled(ids[:, 9:], past_key_values=past).logits
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_the_positions_are_not_looked_at(monkeypatch, reference_only):
    """On a GPU transformers waits for the device to see whether its own positions are packed."""
    _, patched = pair()
    looks = []
    find = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(
        masking_utils,
        "find_packed_sequence_indices",
        lambda *a, **k: looks.append(1) or find(*a, **k),
    )
    patched(**batch())
    assert not looks
    patched(**batch(position_ids=torch.arange(13)[None]))
    assert looks


@pytest.mark.thorough
def test_another_attention_has_its_own_mask(reference_only):
    reference, patched = pair()
    for model in (reference, patched):
        model.set_attn_implementation("eager")
    expected = reference.eval()(**batch()).logits
    torch.testing.assert_close(patched.eval()(**batch()).logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        attended(patched, **batch())[0].logits, expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.thorough
def test_a_mask_function_of_the_users(compiled, monkeypatch, reference_only):
    """Whoever replaces the function in the modeling module gets what it makes."""
    reference, patched = pair()
    make = modeling_llama.create_causal_mask

    def two_at_a_time(**kwargs):
        return make(**kwargs, or_mask_function=lambda batch, head, q, k: q // 2 == k // 2)

    before = reference.eval()(**batch()).logits
    monkeypatch.setattr(modeling_llama, "create_causal_mask", two_at_a_time)
    expected = reference(**batch()).logits
    assert not torch.allclose(before, expected, atol=1e-3)
    output = attended(patched.eval(), **batch())[0] if compiled else patched.eval()(**batch())
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.thorough
def test_a_registered_mask_function(compiled, monkeypatch, reference_only):
    """transformers' way to bring a mask of one's own."""
    reference, patched = pair()
    registered = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    make = registered["sdpa"]

    def all_see_all(*args, **kwargs):
        return torch.ones_like(make(*args, **(kwargs | dict(allow_is_causal_skip=False))))

    before = reference.eval()(**batch()).logits
    monkeypatch.setitem(registered._local_mapping, "sdpa", all_see_all)
    expected = reference(**batch()).logits
    assert not torch.allclose(before, expected, atol=1e-3)
    output = attended(patched.eval(), **batch())[0] if compiled else patched.eval()(**batch())
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)


def test_a_window_that_goes_away(reference_only):
    reference, patched = pair(
        "gemma3_text", sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )
    for model in (reference, patched):
        model.config.sliding_window = None
        with pytest.raises(ValueError, match="sliding_window"):
            model(**batch())


class Blocks(modeling_llama.LlamaModel):
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs
    ):
        x = self.embed_tokens(input_ids)
        return create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            block_sequence_ids=torch.zeros_like(input_ids),
        )


class Packed(Blocks):
    """Whose positions depend on what it reads."""

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs
    ):
        x = self.embed_tokens(input_ids)
        return create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=torch.where(input_ids > 3, input_ids, 0),
        )


create_causal_mask = modeling_llama.create_causal_mask


@pytest.mark.parametrize(
    "cls, reason", [(Blocks, "more than a causal mask"), (Packed, "a mask where none is needed")]
)
def test_what_is_not_proved(cls, reason):
    model = tiny.model("llama").model
    model.__class__ = cls
    assert reason in mask.prove(model)
    assert mask.prove(tiny.model("llama").model) == mask.CausalMask((mask.CAUSAL_MASK,))
    assert mask.prove(tiny.model("gemma2").model) == mask.CausalMask(
        (mask.CAUSAL_MASK, mask.SLIDING_WINDOW_MASK)
    )


def test_reported_and_reverted():
    model = tiny.model("gemma2")
    cls = type(model.model)
    report = apply_liger_kernel(model)
    assert report.replaced["Gemma2Model's causal mask", mask.CausalMask.kernel] == 1
    assert apply_liger_kernel(model).replaced == {}
    revert(model)
    assert type(model.model) is cls is modeling_gemma2.Gemma2Model


@pytest.mark.thorough
def test_five_lengths_one_recompilation(reference_only):
    """A dynamic length stays one."""
    _, patched = pair()
    torch._dynamo.reset()
    compilations = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(patched, backend=compilations)
    with sdpa_kernel(SDPBackend.MATH):
        for tokens in (9, 11, 14, 17, 23):
            compiled(**batch(tokens))
    assert compilations.frame_count <= 2
