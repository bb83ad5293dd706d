"""What goes wrong in the stand-in for logits ends in the family's own result, and a second start
draws no new numbers.

Whoever swallows exceptions in a forward, or in code around it, gets what he gets without the patch.
"""

import contextlib
import random
import sys

import pytest
import tiny
import torch
from forwards import Reversed, V, assert_same, between, kept, pair
from patched import step
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger
from liger_kernel.patch.loss import placeholder as logits
from liger_kernel.patch.loss import request
from liger_kernel.patch.loss.placeholder import Logits, Source

pytestmark = pytest.mark.usefixtures("reference_only")


class Broken(TypeError):
    """A mistake that any code might make."""


def broken(*args, **kwargs):
    raise Broken


def in_an_autograd_function(x):
    return 0.1 * Reversed.apply(x).mean()


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
    "recorded": (logits, "recorded"),
    "the destination": (Logits, "_moved"),
    "real logits": (Logits, "real"),
    "steps": (Logits, "_make"),
    "the head again": (Source, "call_again"),
    "its source": (Source, "real"),
    "what stands for a step": (Logits, "_then"),
    "the look-up of a call": (logits, "_is_being_called"),
    "the look-up of an autograd Function": (logits, "_in_autograd_function"),
    "the look-up of a mode": (Logits, "_is_hidden_from_graphs"),
    "the torch function": (Logits, "_of_stand_in"),
    "the loss taken": (Logits, "loss"),
    "the first stand-in": (Logits, "standing_for"),
    "which loss is asked for": (request.Request, "_asked"),
    "the loss in the head": (request.Request, "_loss"),
    "the versions": (request, "_versions"),
}
SWALLOW = Exception, BaseException


def swallowing(use, swallowed):
    """A forward that goes on whatever its look at the logits, and its loss, raise."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        loss, more, logits = torch.zeros(()), 0.0, None
        hidden_states = self.model(input_ids=input_ids).last_hidden_state
        try:
            logits = self.lm_head(hidden_states)
            more = use(logits)
        except swallowed:
            pass
        try:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        except swallowed:
            loss = hidden_states.mean()
        return CausalLMOutputWithPast(loss=loss + more, logits=logits)

    return forward


@pytest.mark.parametrize("swallowed", SWALLOW, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("use", USES)
def test_an_error_of_the_stand_ins_own(use, part, swallowed, monkeypatch):
    theirs, mine = pair(swallowing(USES[use], swallowed))
    monkeypatch.setattr(*PARTS[part], broken)
    for _ in range(2):
        assert_same(step(mine), step(theirs))


@pytest.mark.parametrize(
    ("part", "use"),
    [
        ("real logits", "a z-loss"),
        ("the first stand-in", "a z-loss"),
        ("the loss taken", "the shape"),
    ],
)
def test_such_an_error_is_told(part, use, monkeypatch, caplog):
    _, mine = pair(swallowing(USES[use], Exception))
    monkeypatch.setattr(*PARTS[part], broken)
    step(mine)
    assert "what stands for its logits failed (Broken" in caplog.text


def test_memory_that_is_used_up_is_no_reason_to_make_logits(monkeypatch):
    """A loop that catches it and goes on with a smaller batch keeps its loss in the head."""

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    _, mine = pair(LlamaForCausalLM.forward)
    with monkeypatch.context() as patched:
        patched.setattr(request.Request, "_loss", full)
        with pytest.raises(torch.OutOfMemoryError):
            step(mine)
    assert mine._liger_logits_needed is None
    out, _ = step(mine)
    assert out.logits is None and mine._liger_told is None


class Detaches(torch.autograd.Function):
    """What DeepSpeed puts behind a module's outputs."""

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
    theirs, mine = pair(between(lambda self, x: Detaches.apply(x)))
    with around():
        assert_same(step(mine), step(theirs))
    assert mine._liger_told is None


class Noisy(torch.nn.Linear):
    """A head whose logits are others each time it is called."""

    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.2, self.training)


Noisy.__module__ = "peft.tuners.made_up"  # a library's: it may be called for the loss


def test_what_is_kept_of_a_head_that_cannot_be_called_again():
    """It is asked for when the step ends: the call starts again."""

    def prepare(model):
        model.lm_head.__class__ = Noisy

    theirs, mine = pair(kept, prepare)
    torch.manual_seed(0)
    want = step(theirs)
    torch.manual_seed(0)
    assert_same(step(mine), want)
    torch.testing.assert_close(mine.kept, theirs.kept)


@pytest.mark.parametrize("first", [True, False], ids=["before the loss", "after"])
def test_logits_read_in_inference_mode_can_be_learned_from_later(first):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        loss = None if first else self.loss_function(logits=logits, labels=labels, vocab_size=V)
        with torch.inference_mode():
            self.accuracy = (logits[:, :-1].argmax(-1) == labels[:, 1:]).float().mean()
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=V) if first else loss
        return CausalLMOutputWithPast(loss=loss + USES["a z-loss"](logits), logits=logits)

    theirs, mine = pair(forward)
    for _ in range(2):
        assert_same(step(mine), step(theirs))
        assert mine.accuracy == theirs.accuracy and mine._liger_logits_needed is None


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
    models, found = pair(noisy), []
    for model in models:
        torch.manual_seed(3), random.seed(3)
        steps = [step(model) for _ in range(3)]
        found.append((steps, torch.rand(4), random.random()))
    (want, *want_after), (got, *got_after) = found
    for i in range(3):
        assert_same(got[i], want[i])
    assert torch.equal(got_after[0], want_after[0]) and got_after[1] == want_after[1]


def test_the_random_state_of_a_call_that_does_not_start_again_is_left_alone():
    _, mine = pair(LlamaForCausalLM.forward)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    torch.rand(3)
    moved = torch.get_rng_state()
    step(mine)
    assert torch.equal(torch.get_rng_state(), moved) and not torch.equal(moved, before)
    liger.revert(mine)


# ---- what is nobody's failure ----


def plain_pair():
    """A Llama, and the same patched."""
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    liger.apply_liger_kernel(mine)
    return theirs, mine


def checkpointed(model, batch):
    return checkpoint(lambda: model(**batch).loss, use_reentrant=False)


def test_a_checkpoint_around_the_whole_model(caplog):
    """It ends its recomputation by an exception, where the last tensor that it needs is saved: in
    the head."""
    theirs, mine = plain_pair()
    for _ in range(3):
        losses = [checkpointed(model, tiny.batch()) for model in (theirs, mine)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    assert not caplog.records


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_exception_of_somebody_elses(error):
    """Of a signal's handler, say: it comes out, and the next step has its loss in the head."""
    _, mine = plain_pair()
    raised = []

    def pack(x):
        if not raised and _is_of_the_head(x):
            raised.append(1)
            raise error("not the head's")
        return x

    with pytest.raises(error), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        mine(**tiny.batch())
    assert raised and mine._liger_logits_needed is None
    assert mine(**tiny.batch()).logits is None


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
    _, mine = plain_pair()
    batch = tiny.batch()
    wrong = batch | dict(labels=batch["labels"].clone().fill_(tiny.VOCABULARY + 5))
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        mine(**wrong)
    assert mine._liger_logits_needed is None
    assert mine(**batch).logits is None
