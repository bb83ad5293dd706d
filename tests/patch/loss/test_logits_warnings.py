"""If logits are in memory all the same, the log says why and what to do, once. If not, it says
nothing."""

import copy
import logging

import pytest
import tiny
import torch
import torch.nn.functional as F
from forwards import (
    V,
    assert_steps_close,
    forward_adding_to_loss,
    forward_changing_logits,
    pair_with_forward,
)
from patched import add_lora, step
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


z_loss = forward_adding_to_loss(
    lambda self, out, labels: 1e-3 * out.logits.logsumexp(-1).square().mean()
)


def hook_that_reads(head, args, out):
    out.norm()


def hook_that_looks_at_the_shape(head, args, out):
    assert out.shape


def head_with(hook):
    """Return a function that registers a forward hook on a model's head."""
    return lambda model: model.lm_head.register_forward_hook(hook)


def head_backward_hook(model):
    return model.lm_head.register_full_backward_hook(backward_hook)


def head_pre_hook(model):
    return model.lm_head.register_forward_pre_hook(pre_hook)


def backward_hook_of_all(model):
    return modules.register_module_full_backward_hook(backward_hook)


def pre_hook_of_all(model):
    return modules.register_module_forward_pre_hook(pre_hook)


def parametrized_head(model):
    parametrizations.weight_norm(model.lm_head)


def other_loss(model):
    model.loss_function = squares


def lora_on_the_head(model):
    add_lora(model, target_modules=["lm_head"])


SLOW = {  # forward; what is done to the patched model; why there are logits
    "a backward hook of the head": (
        llama,
        head_backward_hook,
        "its head has a backward hook: remove it, or register it on the model",
    ),
    "a forward pre-hook of the head": (
        llama,
        head_pre_hook,
        "its head has a forward pre-hook: remove it, or register it on the model",
    ),
    "a forward hook that reads": (
        llama,
        head_with(hook_that_reads),
        "a hook of its head reads its logits",
    ),
    "a backward hook of every module": (
        llama,
        backward_hook_of_all,
        "there is a backward hook for every module: remove it",
    ),
    "a forward pre-hook of every module": (
        llama,
        pre_hook_of_all,
        "there is a forward pre-hook for every module: remove it",
    ),
    "what the head saves goes to the host": (
        saved_on_cpu,
        nothing,
        "its head is called within hooks on saved tensors",
    ),
    "a checkpoint": (checkpointed, nothing, "its head is called within hooks on saved tensors"),
    "a parametrization": (llama, parametrized_head, "its weight has a parametrization"),
    "the head's weight alone": (
        by_the_weight,
        nothing,
        "its forward makes them without its head",
    ),
    "the head's forward": (llama, replaced_forward, "or the forward of the head was replaced"),
    "a loss of its own": (own_loss, nothing, "its forward does something to its logits"),
    "a further loss": (z_loss, nothing, "its forward reads its logits"),
    "a temperature": (
        forward_changing_logits(lambda self, x: x * torch.ones(1)),
        nothing,
        "does something to its logits",
    ),
    "another loss function": (llama, other_loss, "its loss function is not Hugging Face's"),
    "evaluation mode": (
        llama,
        in_evaluation_mode,
        "call model.train(), or pass skip_logits=True",
    ),
}


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.WARNING, logger="liger_kernel")
    return caplog


@pytest.fixture
def handles():
    yield (opened := [])
    for handle in opened:
        handle.remove()


@pytest.mark.parametrize("case", SLOW)
def test_a_slow_path_is_told_once(case, log, handles):
    forward, change, reason = SLOW[case]
    reference, patched = pair_with_forward(forward)
    for model in (reference, patched):
        handle = change(model)
        handles += [handle] if hasattr(handle, "remove") else []
    for i in range(3):
        assert_steps_close(step(patched), step(reference))
        assert [reason in record.getMessage() for record in log.records] == [True], i
    (message,) = log.messages
    assert message.startswith("Theirs: logits are in memory") and "docs/patching.md" in message
    step(copy.deepcopy(patched))
    assert len(log.records) == 1


def test_each_reason_is_told(log):
    _, patched = pair_with_forward(llama)
    handle = patched.lm_head.register_full_backward_hook(backward_hook)
    step(patched), step(patched)
    handle.remove()
    step(patched)
    assert len(log.records) == 1
    patched.lm_head.register_forward_pre_hook(pre_hook)
    step(patched), step(patched)
    assert len(log.records) == 2 and "pre-hook" in log.messages[1]


def test_of_two_models_each_is_told(log):
    for _ in range(2):
        _, patched = pair_with_forward(own_loss)
        step(patched)
    assert len(log.records) == 2


GOOD = {  # forward; what is done to the patched model; further arguments
    "plain": (llama, nothing, {}),
    "logits that are asked for": (own_loss, nothing, dict(skip_logits=False)),
    "asked for, with a hook": (llama, head_backward_hook, dict(skip_logits=False)),
    "evaluation mode without logits": (llama, in_evaluation_mode, dict(skip_logits=True)),
    "evaluation mode with logits": (llama, in_evaluation_mode, dict(skip_logits=False)),
    "a hook that looks at shapes": (llama, head_with(hook_that_looks_at_the_shape), {}),
    "other labels": (
        forward_changing_logits(lambda self, x: x, labels=lambda self, labels: labels.clone()),
        nothing,
        {},
    ),
    "a number": (forward_changing_logits(lambda self, x: x / 2.0), nothing, {}),
    "a head that is called": (llama, lora_on_the_head, {}),
    "labels of another shape": (llama, nothing, dict(labels=tiny.batch()["labels"].flatten())),
}


@pytest.mark.parametrize("case", GOOD)
def test_a_good_path_is_not(case, log, handles):
    forward, change, kwargs = GOOD[case]
    _, patched = pair_with_forward(forward)
    handle = change(patched)
    handles += [handle] if hasattr(handle, "remove") else []
    for _ in range(2):
        step(patched, **kwargs)
    with torch.no_grad():
        patched(**tiny.batch() | kwargs)
    if forward is llama:
        patched(input_ids=tiny.batch()["input_ids"])
    assert not log.records


def test_evaluation_is_not_training(log):
    """Nothing is said until gradients are computed, even if they are enabled."""
    _, patched = pair_with_forward(llama)
    patched.eval()
    patched(**tiny.batch())
    with torch.no_grad():
        patched(**tiny.batch())
    assert patched(**tiny.batch(), return_dict=False)[0].requires_grad and not log.records
    patched(**tiny.batch(), return_dict=False)[0].backward()
    assert len(log.records) == 1


def test_evaluation_with_a_hook_is_not_training(log, handles):
    _, patched = pair_with_forward(llama)
    patched.lm_head.register_forward_pre_hook(pre_hook)
    patched.eval()
    with torch.no_grad():
        patched(**tiny.batch(), skip_logits=True)
    assert not log.records


# ---- a loss in the head that nobody takes ----


@pytest.fixture
def losses(monkeypatch):
    """The losses that were computed in a head, by their arguments."""
    calls, loss_from_weight = [], request.loss_from_weight

    def counted(*args):
        calls.append(args)
        return loss_from_weight(*args)

    monkeypatch.setattr(request, "loss_from_weight", counted)
    return calls


@pytest.mark.parametrize(
    "forward", [own_loss, forward_changing_logits(lambda self, x: x * torch.ones(1))]
)
def test_a_loss_that_nobody_takes_is_computed_once(forward, losses):
    reference, patched = pair_with_forward(forward)
    for _ in range(3):
        assert_steps_close(step(patched), step(reference))
    assert len(losses) == 1


def test_a_loss_that_is_taken_again():
    """By a forward that changes its mind."""

    def forward(self, input_ids=None, labels=None, use_own_loss=False, **kwargs):
        return (own_loss if use_own_loss else HF)(self, input_ids=input_ids, labels=labels)

    reference, patched = pair_with_forward(forward)
    for use_own_loss in (False, True, True, False, False, True):
        output = step(patched, use_own_loss=use_own_loss)
        assert_steps_close(output, step(reference, use_own_loss=use_own_loss))
        assert output[0].logits is None


def test_a_loss_that_is_taken_again_is_computed_at_once(losses):
    def forward(self, input_ids=None, labels=None, use_own_loss=False, **kwargs):
        return (own_loss if use_own_loss else HF)(self, input_ids=input_ids, labels=labels)

    _, patched = pair_with_forward(forward)
    for use_own_loss, computed in (
        (True, 1),
        (True, 0),
        (False, 1),
        (False, 1),
        (True, 1),
        (True, 0),
    ):
        losses.clear()
        step(patched, use_own_loss=use_own_loss)
        assert len(losses) == computed
    patched(**tiny.batch())
    assert patched(**tiny.batch()).logits is None


def test_a_bound_forward_is_told_once(log):
    from liger_kernel.transformers.model.llama import lce_forward

    patched = tiny.model("llama")
    patched.__class__ = type("Mine", (LlamaForCausalLM,), {"forward": lce_forward})
    patched.loss_function = squares
    for _ in range(3):
        step(patched)
    assert len(log.records) == 1 and "logits are in memory" in log.text
    liger.revert(patched)
