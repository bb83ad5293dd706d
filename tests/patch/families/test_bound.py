"""``MyModel.forward = lce_forward``, as the published package's users write it."""

import importlib
import inspect
import types

import pytest
import tiny
import torch
from transformers import LlamaForCausalLM

from liger_kernel._public import FORWARDS
from liger_kernel.patch.loss.rewrites import CausalLM
from liger_kernel.patch.proof.rewrite import replacement_of

pytestmark = pytest.mark.usefixtures("reference_only")


def family_module(name):
    return importlib.import_module(f"liger_kernel.transformers.model.{name}")


def steps(model, **options):
    """Loss and gradients of three steps, each with tokens of its own."""
    results = []
    for seed in range(3):
        model.zero_grad()
        out = model(**tiny.batch(seed=seed), **options)
        out.loss.backward()
        results.append([out.loss.detach(), *(p.grad.clone() for p in model.parameters())])
    return results, out


@pytest.fixture
def patched():
    """A class of one's own, to which the forward is bound, and a model of it."""

    class Mine(LlamaForCausalLM):
        pass

    Mine.forward = family_module("llama").lce_forward
    return Mine


def pair(cls):
    reference = tiny.model("llama").train()
    bound_model = cls(reference.config).train()
    bound_model.load_state_dict(reference.state_dict())
    return reference, bound_model


def test_of_a_class_of_ones_own(patched):
    """As Hugging Face's, without logits in training, with them in evaluation."""
    reference, bound_model = pair(patched)
    (expected, _), (output, out) = steps(reference), steps(bound_model)
    torch.testing.assert_close(output, expected)
    assert (
        out.logits is None
        and isinstance(bound_model, patched)
        and type(bound_model).__name__ == "Mine"
    )
    batch = tiny.batch()
    torch.testing.assert_close(bound_model.eval()(**batch).logits, reference.eval()(**batch).logits)
    assert bound_model(**batch, skip_logits=True).logits is None
    assert list(inspect.signature(bound_model.forward).parameters)[:2] == [
        "input_ids",
        "attention_mask",
    ]
    patched.forward = LlamaForCausalLM.forward  # taken back: the class's own runs again
    assert bound_model.train()(**batch).logits is not None


def test_of_hugging_faces_class(monkeypatch):
    reference, bound_model = pair(LlamaForCausalLM)
    expected, _ = steps(reference)
    monkeypatch.setattr(LlamaForCausalLM, "forward", family_module("llama").lce_forward)
    output, out = steps(bound_model)
    torch.testing.assert_close(output, expected)
    assert out.logits is None


def test_where_nothing_is_known_of_the_loss(patched, caplog):
    reference, bound_model = pair(patched)
    for model in (reference, bound_model):
        model.loss_function = lambda logits, labels, **kwargs: logits.float().pow(2).mean()
    (expected, _), (output, out) = steps(reference), steps(bound_model)
    torch.testing.assert_close(output, expected)
    assert out.logits is not None and "logits are in memory" in caplog.text


def test_of_another_family(patched):
    class Stranger(type(tiny.model("qwen3"))):
        forward = patched.forward

    with pytest.raises(TypeError, match="not derived from LlamaForCausalLM"):
        Stranger(tiny.model("qwen3").config).train()(**tiny.batch())


@pytest.mark.thorough
def test_compiled(patched):
    """Compiled before its first call, too; then in one graph."""
    reference, bound_model = pair(patched)
    compiled = torch.compile(bound_model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(**tiny.batch()).loss, reference(**tiny.batch()).loss)
    assert isinstance(replacement_of(bound_model), CausalLM)
    whole = torch.compile(bound_model, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(**tiny.batch()).loss, reference(**tiny.batch()).loss)


@pytest.mark.parametrize("bias", [False, True])
def test_loss_of_hidden_states(bias):
    model = tiny.model("llama").train()
    if bias:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(model.config.vocab_size))
    batch = tiny.batch()
    hidden = model.model(batch["input_ids"]).last_hidden_state
    for items in (None, 7):
        loss = family_module("llama").lce_maybe_trainable_lm_head(
            model, hidden, model.config.hidden_size, batch["labels"], None, num_items_in_batch=items
        )
        torch.testing.assert_close(loss, model(**batch, num_items_in_batch=items).loss)


@pytest.mark.parametrize("family", FORWARDS)
@pytest.mark.thorough
def test_every_family_has_its_forwards(family):
    try:
        module = family_module(family)
    except ImportError as error:
        pytest.skip(str(error))  # this transformers does not have it
    for name in FORWARDS[family]:
        assert "skip_logits" in inspect.signature(getattr(module, name)).parameters


def test_of_an_object(caplog):
    """The published way to patch a model that is there: ``model.forward = MethodType(lce_forward,
    model)``."""
    reference, bound_model = pair(LlamaForCausalLM)
    bound_model.forward = types.MethodType(family_module("llama").lce_forward, bound_model)
    (expected, _), (output, out) = steps(reference), steps(bound_model)
    torch.testing.assert_close(output, expected)
    assert out.logits is None and not caplog.records and "forward" not in vars(bound_model)


def test_logits_that_cannot_be_skipped(patched):
    _, bound_model = pair(patched)
    bound_model.loss_function = lambda logits, labels, **kwargs: logits.float().pow(2).mean()
    with pytest.raises(ValueError, match="lce_forward: skip_logits is True, but"):
        bound_model(**tiny.batch(), skip_logits=True)
