"""An error of the placeholder's own ends in the family's result, and a second start draws the same
random numbers.

Whoever swallows exceptions in a forward, or in code around it, gets what he gets without the patch.
"""

import contextlib
import random
import sys

import pytest
import tiny
import torch
from forwards import (
    ReversedGradient,
    V,
    assert_steps_close,
    forward_changing_logits,
    forward_keeping_logits,
    pair_with_forward,
)
from patched import step
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger
from liger_kernel.patch.loss import placeholder, request
from liger_kernel.patch.loss.placeholder import HeadCall, LogitsPlaceholder

pytestmark = pytest.mark.usefixtures("reference_only")


class Broken(TypeError):
    """A mistake that any code might make."""


def broken(*args, **kwargs):
    raise Broken


def in_an_autograd_function(x):
    return 0.1 * ReversedGradient.apply(x).mean()


USES = {  # what a forward does with its logits, by which every part of the stand-in runs
    "a z-loss": lambda x: 1e-2 * x.logsumexp(-1).square().mean(),
    "a scale": lambda x: 0.1 * (2.0 * x).mean(),
    "a cast": lambda x: 0.1 * x.to(torch.float64).mean().float(),
    "detach": lambda x: 0.1 * x.detach().mean(),
    "in a list": lambda x: 0.1 * torch.cat([x, x]).mean(),
    "an autograd Function": in_an_autograd_function,
    "the shape": lambda x: 0.1 * float(x.size(-1)),
    "a gradient": lambda x: torch.autograd.grad(x.mean(), x, retain_graph=True)[0].sum(),
}
PARTS = {
    "recorded": (placeholder, "transform_after"),
    "the destination": (LogitsPlaceholder, "_move"),
    "real logits": (LogitsPlaceholder, "materialize"),
    "steps": (LogitsPlaceholder, "_set_logits"),
    "the head again": (HeadCall, "call_again"),
    "its source": (HeadCall, "make_logits"),
    "what stands for a step": (LogitsPlaceholder, "_derive"),
    "the look-up of a call": (placeholder, "_is_being_called"),
    "the look-up of an autograd Function": (placeholder, "_in_autograd_function"),
    "the look-up of a mode": (LogitsPlaceholder, "_is_hidden_from_graph"),
    "the torch function": (LogitsPlaceholder, "_answer"),
    "the loss taken": (LogitsPlaceholder, "take_loss"),
    "the first stand-in": (LogitsPlaceholder, "of_loss"),
    "which loss is asked for": (request.Request, "_spec_of"),
    "the loss in the head": (request.Request, "_compute_loss"),
    "the versions": (request.LossSpec, "label_versions"),
}
SWALLOW = Exception, BaseException


def swallowing(use, swallowed):
    """A forward that goes on whatever its look at the logits, and its loss, raise."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        loss, extra_loss, logits = torch.zeros(()), 0.0, None
        hidden_states = self.model(input_ids=input_ids).last_hidden_state
        try:
            logits = self.lm_head(hidden_states)
            extra_loss = use(logits)
        except swallowed:
            pass
        try:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        except swallowed:
            loss = hidden_states.mean()
        return CausalLMOutputWithPast(loss=loss + extra_loss, logits=logits)

    return forward


@pytest.mark.parametrize("swallowed", SWALLOW, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("use", USES)
def test_an_error_of_the_stand_ins_own(use, part, swallowed, monkeypatch):
    reference, patched = pair_with_forward(swallowing(USES[use], swallowed))
    monkeypatch.setattr(*PARTS[part], broken)
    for _ in range(2):
        assert_steps_close(step(patched), step(reference))


@pytest.mark.parametrize(
    ("part", "use"),
    [
        ("real logits", "a z-loss"),
        ("the first stand-in", "a z-loss"),
        ("the loss taken", "the shape"),
    ],
)
def test_such_an_error_is_told(part, use, monkeypatch, caplog):
    _, patched = pair_with_forward(swallowing(USES[use], Exception))
    monkeypatch.setattr(*PARTS[part], broken)
    step(patched)
    assert "what stands for its logits failed (Broken" in caplog.text


def test_memory_that_is_used_up_is_no_reason_to_make_logits(monkeypatch):
    """A loop that catches it and goes on with a smaller batch keeps its loss in the head."""

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    _, patched = pair_with_forward(LlamaForCausalLM.forward)
    with monkeypatch.context() as patches:
        patches.setattr(request.Request, "_compute_loss", full)
        with pytest.raises(torch.OutOfMemoryError):
            step(patched)
    assert patched._liger_logits_needed is None
    out, _ = step(patched)
    assert out.logits is None and patched._liger_logits_warnings is None


class Detaches(torch.autograd.Function):
    """Detaches, as the Function that DeepSpeed puts behind a module's outputs."""

    __module__ = "deepspeed.runtime.zero.parameter_offload"

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, g):
        return g


@pytest.mark.parametrize(
    "around", [contextlib.nullcontext, lambda: torch.device("cpu")], ids=["alone", "a device"]
)
def test_a_librarys_function_keeps_the_loss_in_the_head(around):
    """Also with a function mode between it and the logits."""
    reference, patched = pair_with_forward(
        forward_changing_logits(lambda self, x: Detaches.apply(x))
    )
    with around():
        assert_steps_close(step(patched), step(reference))
    assert patched._liger_logits_warnings is None


class Noisy(torch.nn.Linear):
    """A head whose logits are others each time it is called."""

    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.2, self.training)


Noisy.__module__ = "peft.tuners.made_up"  # a library's: it may be called for the loss


def test_what_is_kept_of_a_head_that_cannot_be_called_again():
    """It is asked for when the step ends: the call starts again."""

    def prepare(model):
        model.lm_head.__class__ = Noisy

    reference, patched = pair_with_forward(forward_keeping_logits, prepare)
    torch.manual_seed(0)
    expected = step(reference)
    torch.manual_seed(0)
    assert_steps_close(step(patched), expected)
    torch.testing.assert_close(patched.kept, reference.kept)


@pytest.mark.parametrize("first", [True, False], ids=["before the loss", "after"])
def test_logits_read_in_inference_mode_can_be_learned_from_later(first):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        loss = None if first else self.loss_function(logits=logits, labels=labels, vocab_size=V)
        with torch.inference_mode():
            self.accuracy = (logits[:, :-1].argmax(-1) == labels[:, 1:]).float().mean()
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=V) if first else loss
        return CausalLMOutputWithPast(loss=loss + USES["a z-loss"](logits), logits=logits)

    reference, patched = pair_with_forward(forward)
    for _ in range(2):
        assert_steps_close(step(patched), step(reference))
        assert patched.accuracy == reference.accuracy and patched._liger_logits_needed is None


# ---- a second start ----


def noisy(self, input_ids=None, labels=None, **kwargs):
    """Dropout, layers that are left out, and at last something that wants real logits too late."""
    hidden_states = self.model(input_ids=input_ids).last_hidden_state
    hidden_states = torch.nn.functional.dropout(hidden_states, 0.3, self.training)
    if random.random() < 0.5:
        hidden_states = hidden_states * 1.5
    logits = self.lm_head(hidden_states)
    loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
    return CausalLMOutputWithPast(loss=loss + in_an_autograd_function(logits), logits=logits)


def test_a_second_start_draws_the_same_random_numbers():
    models, runs = pair_with_forward(noisy), []
    for model in models:
        torch.manual_seed(3), random.seed(3)
        steps = [step(model) for _ in range(3)]
        runs.append((steps, torch.rand(4), random.random()))
    (expected, *expected_after), (output, *output_after) = runs
    for i in range(3):
        assert_steps_close(output[i], expected[i])
    assert torch.equal(output_after[0], expected_after[0]) and output_after[1] == expected_after[1]


def test_the_random_state_of_a_call_that_does_not_start_again_is_left_alone():
    _, patched = pair_with_forward(LlamaForCausalLM.forward)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    torch.rand(3)
    moved = torch.get_rng_state()
    step(patched)
    assert torch.equal(torch.get_rng_state(), moved) and not torch.equal(moved, before)
    liger.revert(patched)


# ---- what is nobody's failure ----


def plain_pair():
    """Return a Llama, and the same patched."""
    reference = tiny.model("llama")
    patched = tiny.model("llama")
    liger.apply_liger_kernel(patched)
    return reference, patched


def checkpointed(model, batch):
    return checkpoint(lambda: model(**batch).loss, use_reentrant=False)


def test_a_checkpoint_around_the_whole_model(caplog):
    """It ends its recomputation by an exception, where the last tensor that it needs is saved: in
    the head."""
    reference, patched = plain_pair()
    for _ in range(3):
        losses = [checkpointed(model, tiny.batch()) for model in (reference, patched)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        for p, q in zip(patched.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    assert not caplog.records


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_exception_of_somebody_elses(error):
    """One of a signal's handler, say, comes out. The next step has its loss in the head."""
    _, patched = plain_pair()
    raised = []

    def pack(x):
        if not raised and _is_of_the_head(x):
            raised.append(1)
            raise error("not the head's")
        return x

    with pytest.raises(error), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        patched(**tiny.batch())
    assert raised and patched._liger_logits_needed is None
    assert patched(**tiny.batch()).logits is None


def _is_of_the_head(x) -> bool:
    return x.shape[-1] == 32 and "liger_fused_linear_cross_entropy" in {
        f.f_code.co_name for f in frames()
    }


def frames():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def test_labels_that_are_wrong_once():
    """The family's error comes out, and nothing is learned of it."""
    _, patched = plain_pair()
    batch = tiny.batch()
    wrong = batch | dict(labels=batch["labels"].clone().fill_(tiny.VOCABULARY + 5))
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        patched(**wrong)
    assert patched._liger_logits_needed is None
    assert patched(**batch).logits is None
