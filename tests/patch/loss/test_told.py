"""Where logits are in memory all the same, the log says why and what to do, once; where they are
not, nothing."""

import copy
import logging

import pytest
import tiny
import torch
import torch.nn.functional as F
from forwards import V, adding, assert_same, between, pair
from patched import lora, step
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger
from liger_kernel.patch.loss import request

pytestmark = pytest.mark.usefixtures("reference_only")
HF = LlamaForCausalLM.forward


def llama(self, **kwargs):
    return HF(self, **kwargs)


def hidden(self, ids):
    return self.model(input_ids=ids).last_hidden_state


def saved_on_cpu(self, input_ids=None, labels=None, **kwargs):
    with torch.autograd.graph.save_on_cpu():
        return HF(self, input_ids=input_ids, labels=labels, **kwargs)


def checkpointed(self, input_ids=None, labels=None, **kwargs):
    def loss(h):
        return self.loss_function(logits=self.lm_head(h), labels=labels, vocab_size=V)

    return CausalLMOutputWithPast(
        loss=checkpoint(loss, hidden(self, input_ids), use_reentrant=False)
    )


def by_the_weight(self, input_ids=None, labels=None, **kwargs):
    logits = F.linear(hidden(self, input_ids), self.lm_head.weight)
    return CausalLMOutputWithPast(
        loss=self.loss_function(logits=logits, labels=labels, vocab_size=V), logits=logits
    )


def own_loss(self, input_ids=None, labels=None, **kwargs):
    logits = self.lm_head(hidden(self, input_ids))
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def squares(logits, labels, **kwargs):
    return logits.square().mean()


def backward_hook(head, dx, dy):
    return None


def pre_hook(head, args):
    return None


def replaced_forward(model):
    model.lm_head.forward = lambda x, head=model.lm_head: F.linear(x, head.weight)


def in_evaluation_mode(model):
    model.eval()


def nothing(model):
    return None


z_loss = adding(lambda self, out, labels: 1e-3 * out.logits.logsumexp(-1).square().mean())
SLOW = {  # forward; what is done to the patched model; why there are logits
    "a backward hook of the head": (
        llama, lambda model: model.lm_head.register_full_backward_hook(backward_hook),
        "its head has a backward hook: remove it, or register it on the model",
    ),
    "a forward pre-hook of the head": (
        llama, lambda model: model.lm_head.register_forward_pre_hook(pre_hook),
        "its head has a forward pre-hook: remove it, or register it on the model",
    ),
    "a forward hook that reads": (
        llama, lambda model: model.lm_head.register_forward_hook(lambda head, args, out: (out.norm(), None)[1]),
        "a hook of its head reads its logits",
    ),
    "a backward hook of every module": (
        llama, lambda model: modules.register_module_full_backward_hook(backward_hook),
        "there is a backward hook for every module: remove it",
    ),
    "a forward pre-hook of every module": (
        llama, lambda model: modules.register_module_forward_pre_hook(pre_hook),
        "there is a forward pre-hook for every module: remove it",
    ),
    "what the head saves goes to the host": (saved_on_cpu, nothing, "its head is called within hooks on saved tensors"),
    "a checkpoint": (checkpointed, nothing, "its head is called within hooks on saved tensors"),
    "a parametrization": (
        llama, lambda model: parametrizations.weight_norm(model.lm_head) and None, "its weight has a parametrization",
    ),
    "the head's weight alone": (by_the_weight, nothing, "its forward makes them without its head"),
    "the head's forward": (llama, replaced_forward, "or the forward of the head was replaced"),
    "a loss of its own": (own_loss, nothing, "its forward does something to its logits"),
    "a further loss": (z_loss, nothing, "its forward reads its logits"),
    "a temperature": (between(lambda self, x: x * torch.ones(1)), nothing, "does something to its logits"),
    "another loss function": (
        llama, lambda model: setattr(model, "loss_function", squares), "its loss function is not Hugging Face's",
    ),
    "evaluation mode": (llama, in_evaluation_mode, "call model.train(), or pass skip_logits=True"),
}  # fmt: skip


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.WARNING, logger="liger_kernel")
    return caplog


@pytest.fixture
def handles():
    yield (opened := [])
    for handle in opened:
        handle.remove()


@pytest.mark.parametrize("case", SLOW)
def test_a_slow_path_is_told_once(case, told, handles):
    forward, change, why = SLOW[case]
    theirs, mine = pair(forward)
    for model in (theirs, mine):
        handle = change(model)
        handles += [handle] if hasattr(handle, "remove") else []
    for i in range(3):
        assert_same(step(mine), step(theirs))
        assert [why in record.getMessage() for record in told.records] == [True], i
    (message,) = told.messages
    assert message.startswith("Theirs: logits are in memory") and "docs/patching.md" in message
    step(copy.deepcopy(mine))
    assert len(told.records) == 1


def test_each_reason_is_told(told):
    _, mine = pair(llama)
    handle = mine.lm_head.register_full_backward_hook(backward_hook)
    step(mine), step(mine)
    handle.remove()
    step(mine)
    assert len(told.records) == 1
    mine.lm_head.register_forward_pre_hook(pre_hook)
    step(mine), step(mine)
    assert len(told.records) == 2 and "pre-hook" in told.messages[1]


def test_of_two_models_each_is_told(told):
    for _ in range(2):
        _, mine = pair(own_loss)
        step(mine)
    assert len(told.records) == 2


GOOD = {
    "plain": (llama, nothing, {}),
    "logits that are asked for": (own_loss, nothing, dict(skip_logits=False)),
    "asked for, with a hook": (
        llama, lambda model: model.lm_head.register_full_backward_hook(backward_hook), dict(skip_logits=False),
    ),
    "evaluation mode without logits": (llama, in_evaluation_mode, dict(skip_logits=True)),
    "evaluation mode with logits": (llama, in_evaluation_mode, dict(skip_logits=False)),
    "a hook that looks at shapes": (
        llama, lambda model: model.lm_head.register_forward_hook(lambda head, args, out: (out.shape, None)[1]), {},
    ),
    "other labels": (between(lambda self, x: x, labels=lambda self, y: y.clone()), nothing, {}),
    "a number": (between(lambda self, x: x / 2.0), nothing, {}),
    "a head that is called": (llama, lambda model: lora(model, target_modules=["lm_head"]) and None, {}),
    "labels of another shape": (llama, nothing, dict(labels=tiny.batch()["labels"].flatten())),
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD)
def test_a_good_path_is_not(case, told, handles):
    forward, change, given = GOOD[case]
    _, mine = pair(forward)
    handle = change(mine)
    handles += [handle] if hasattr(handle, "remove") else []
    for _ in range(2):
        step(mine, **given)
    with torch.no_grad():
        mine(**tiny.batch() | given)
    if forward is llama:
        mine(input_ids=tiny.batch()["input_ids"])
    assert not told.records


def test_evaluation_is_not_training(told):
    """Whether gradients are enabled or not, until they are computed."""
    _, mine = pair(llama)
    mine.eval()
    mine(**tiny.batch())
    with torch.no_grad():
        mine(**tiny.batch())
    assert mine(**tiny.batch(), return_dict=False)[0].requires_grad and not told.records
    mine(**tiny.batch(), return_dict=False)[0].backward()
    assert len(told.records) == 1


def test_evaluation_with_a_hook_is_not_training(told, handles):
    _, mine = pair(llama)
    mine.lm_head.register_forward_pre_hook(pre_hook)
    mine.eval()
    with torch.no_grad():
        mine(**tiny.batch(), skip_logits=True)
    assert not told.records


# ---- a loss in the head that nobody takes ----


@pytest.fixture
def losses(monkeypatch):
    """How often a loss is computed in a head."""
    seen, own = [], request.loss_by_weight

    def counted(*args):
        seen.append(args)
        return own(*args)

    monkeypatch.setattr(request, "loss_by_weight", counted)
    return seen


@pytest.mark.parametrize("forward", [own_loss, between(lambda self, x: x * torch.ones(1))])
def test_a_loss_that_nobody_takes_is_computed_once(forward, losses):
    theirs, mine = pair(forward)
    for _ in range(3):
        assert_same(step(mine), step(theirs))
    assert len(losses) == 1


def test_a_loss_that_is_taken_again():
    """By a forward that changes its mind."""

    def forward(self, input_ids=None, labels=None, own=False, **kwargs):
        return (own_loss if own else HF)(self, input_ids=input_ids, labels=labels)

    theirs, mine = pair(forward)
    for own in (False, True, True, False, False, True):
        got = step(mine, own=own)
        assert_same(got, step(theirs, own=own))
        assert got[0].logits is None


def test_a_loss_that_is_taken_again_is_computed_at_once(losses):
    def forward(self, input_ids=None, labels=None, own=False, **kwargs):
        return (own_loss if own else HF)(self, input_ids=input_ids, labels=labels)

    _, mine = pair(forward)
    for own, computed in ((True, 1), (True, 0), (False, 1), (False, 1), (True, 1), (True, 0)):
        losses.clear()
        step(mine, own=own)
        assert len(losses) == computed
    mine(**tiny.batch())
    assert mine(**tiny.batch()).logits is None


def test_a_bound_forward_is_told_once(told):
    from liger_kernel.transformers.model.llama import lce_forward

    mine = tiny.model("llama")
    mine.__class__ = type("Mine", (LlamaForCausalLM,), {"forward": lce_forward})
    mine.loss_function = squares
    for _ in range(3):
        step(mine)
    assert len(told.records) == 1 and "logits are in memory" in told.text
    liger.revert(mine)
