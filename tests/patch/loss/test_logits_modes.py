"""A TorchFunctionMode or TorchDispatchMode of a user's sees the head's logits and their loss, as
without the patch."""

import functools

import pytest
import tiny
import torch
from forwards import V, assert_same, between, pair
from patched import step
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from liger_kernel.core.devices import within_a_mode

pytestmark = pytest.mark.usefixtures("reference_only")


class Scales(TorchFunctionMode):
    """Changes what a loss is."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 3 if function is torch.nn.functional.cross_entropy else out


class Steepens(TorchDispatchMode):
    """Changes what a softmax is."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 2 if function is torch.ops.aten._log_softmax.default else out


class Shapes(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.nn.functional.linear:
            self.seen.append(tuple(out.shape))
        return out


MODES = {"function": Scales, "dispatch": Steepens}


@pytest.mark.parametrize("mode", MODES)
def test_around_the_call(mode):
    theirs, mine = pair(LlamaForCausalLM.forward)
    plain = step(theirs)[0].loss
    for _ in range(2):
        with MODES[mode]():
            got, want = step(mine), step(theirs)
        assert_same(got, want)
        assert (want[0].loss - plain).abs() > 0.1
    assert_same(step(mine), step(theirs))
    out = mine(**tiny.batch())
    assert out.logits is None and mine._liger_logits_needed is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("around", ["the loss", "the head"])
def test_within_the_forward(mode, around):
    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden_states = self.model(input_ids=input_ids).last_hidden_state
        if around == "the head":
            with MODES[mode]():
                logits = self.lm_head(hidden_states)
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        else:
            logits = self.lm_head(hidden_states)
            with MODES[mode]():
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    theirs, mine = pair(forward)
    for _ in range(2):
        assert_same(step(mine), step(theirs))


def test_a_mode_sees_the_head():
    theirs, mine = pair(LlamaForCausalLM.forward)
    seen = []
    for model in (theirs, mine):
        with Shapes() as mode:
            model(**tiny.batch())
        seen.append([shape for shape in mode.seen if shape[-1] == V])
    assert seen[0] == seen[1] != []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.thorough
def test_compiled(mode):
    torch._dynamo.reset()
    theirs, mine = pair(LlamaForCausalLM.forward)
    compiled = torch.compile(mine, backend="aot_eager")
    for _ in range(2):
        with MODES[mode]():
            assert_same(step(mine, compiled), step(theirs))
    assert_same(step(mine, compiled), step(theirs))


def test_a_flop_counter_counts_what_the_family_computes():
    counts = []
    for model in pair(LlamaForCausalLM.forward):
        with FlopCounterMode(display=False) as counter:
            step(model)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def of_products(ctx, op, *args, **kwargs):
    return (
        CheckpointPolicy.MUST_SAVE
        if op is torch.ops.aten.mm.default
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def selective(function, x):
    contexts = functools.partial(create_selective_checkpoint_contexts, of_products)
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


def test_selective_checkpoints_keep_the_kernels():
    seen = []
    selective(
        lambda x: (seen.append(within_a_mode()), x.sin().sin())[1],
        torch.ones(2, requires_grad=True),
    ).sum().backward()
    assert seen == [False, False]


def test_a_device_keeps_the_loss_in_the_head():
    theirs, mine = pair(between(lambda self, x: x * 2.0))
    with torch.device("cpu"):
        assert not within_a_mode()
        out, grads = step(mine)
        assert out.logits is None and mine._liger_told is None
        assert_same((out, grads), step(theirs))


def test_a_default_device_is_no_mode_of_a_users():
    torch.set_default_device("cpu")
    try:
        assert torch._C._len_torch_function_stack() and not within_a_mode()
    finally:
        torch.set_default_device(None)
