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
from liger_kernel.patch.proof.rewrite import known_as

pytestmark = pytest.mark.usefixtures("reference_only")


def family_module(name):
    return importlib.import_module(f"liger_kernel.transformers.model.{name}")


def steps(model, **more):
    """Loss and gradients of three steps, each with tokens of its own."""
    found = []
    for seed in range(3):
        model.zero_grad()
        out = model(**tiny.batch(seed=seed), **more)
        out.loss.backward()
        found.append([out.loss.detach(), *(p.grad.clone() for p in model.parameters())])
    return found, out


@pytest.fixture
def mine():
    """A class of one's own, to which the forward is bound, and a model of it."""

    class Mine(LlamaForCausalLM):
        pass

    Mine.forward = family_module("llama").lce_forward
    return Mine


def pair(cls):
    theirs = tiny.model("llama").train()
    ours = cls(theirs.config).train()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def test_of_a_class_of_ones_own(mine):
    """As Hugging Face's, without logits in training, with them in evaluation."""
    theirs, ours = pair(mine)
    (want, _), (got, out) = steps(theirs), steps(ours)
    torch.testing.assert_close(got, want)
    assert out.logits is None and isinstance(ours, mine) and type(ours).__name__ == "Mine"
    batch = tiny.batch()
    torch.testing.assert_close(ours.eval()(**batch).logits, theirs.eval()(**batch).logits)
    assert ours(**batch, skip_logits=True).logits is None
    assert list(inspect.signature(ours.forward).parameters)[:2] == ["input_ids", "attention_mask"]
    mine.forward = LlamaForCausalLM.forward  # taken back: the class's own runs again
    assert ours.train()(**batch).logits is not None


def test_of_hugging_faces_class(monkeypatch):
    theirs, ours = pair(LlamaForCausalLM)
    want, _ = steps(theirs)
    monkeypatch.setattr(LlamaForCausalLM, "forward", family_module("llama").lce_forward)
    got, out = steps(ours)
    torch.testing.assert_close(got, want)
    assert out.logits is None


def test_where_nothing_is_known_of_the_loss(mine, caplog):
    theirs, ours = pair(mine)
    for model in (theirs, ours):
        model.loss_function = lambda logits, labels, **kwargs: logits.float().pow(2).mean()
    (want, _), (got, out) = steps(theirs), steps(ours)
    torch.testing.assert_close(got, want)
    assert out.logits is not None and "logits are in memory" in caplog.text


def test_of_another_family(mine):
    class Stranger(type(tiny.model("qwen3"))):
        forward = mine.forward

    with pytest.raises(TypeError, match="not derived from LlamaForCausalLM"):
        Stranger(tiny.model("qwen3").config).train()(**tiny.batch())


@pytest.mark.thorough
def test_compiled(mine):
    """Compiled before its first call, too; then in one graph."""
    theirs, ours = pair(mine)
    compiled = torch.compile(ours, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(**tiny.batch()).loss, theirs(**tiny.batch()).loss)
    assert isinstance(known_as(ours), CausalLM)
    whole = torch.compile(ours, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(**tiny.batch()).loss, theirs(**tiny.batch()).loss)


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
    theirs, ours = pair(LlamaForCausalLM)
    ours.forward = types.MethodType(family_module("llama").lce_forward, ours)
    (want, _), (got, out) = steps(theirs), steps(ours)
    torch.testing.assert_close(got, want)
    assert out.logits is None and not caplog.records and "forward" not in vars(ours)


def test_logits_that_cannot_be_skipped(mine):
    _, ours = pair(mine)
    ours.loss_function = lambda logits, labels, **kwargs: logits.float().pow(2).mean()
    with pytest.raises(ValueError, match="lce_forward: skip_logits is True, but"):
        ours(**tiny.batch(), skip_logits=True)
