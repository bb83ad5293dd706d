"""A TorchFunctionMode or TorchDispatchMode of a user's sees the head's logits and their loss, as
without the patch."""

import functools

import pytest
import tiny
import torch
from forwards import V, assert_steps_close, forward_changing_logits, pair_with_forward
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

from liger_kernel.core.devices import in_user_mode

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
        self.shapes = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.nn.functional.linear:
            self.shapes.append(tuple(out.shape))
        return out


MODES = {"function": Scales, "dispatch": Steepens}


@pytest.mark.parametrize("mode", MODES)
def test_around_the_call(mode):
    reference, patched = pair_with_forward(LlamaForCausalLM.forward)
    plain = step(reference)[0].loss
    for _ in range(2):
        with MODES[mode]():
            output, expected = step(patched), step(reference)
        assert_steps_close(output, expected)
        assert (expected[0].loss - plain).abs() > 0.1
    assert_steps_close(step(patched), step(reference))
    out = patched(**tiny.batch())
    assert out.logits is None and patched._liger_logits_needed is None


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

    reference, patched = pair_with_forward(forward)
    for _ in range(2):
        assert_steps_close(step(patched), step(reference))


def test_a_mode_sees_the_head():
    reference, patched = pair_with_forward(LlamaForCausalLM.forward)
    shapes = []
    for model in (reference, patched):
        with Shapes() as mode:
            model(**tiny.batch())
        shapes.append([shape for shape in mode.shapes if shape[-1] == V])
    assert shapes[0] == shapes[1] != []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.thorough
def test_compiled(mode):
    torch._dynamo.reset()
    reference, patched = pair_with_forward(LlamaForCausalLM.forward)
    compiled = torch.compile(patched, backend="aot_eager")
    for _ in range(2):
        with MODES[mode]():
            assert_steps_close(step(patched, compiled), step(reference))
    assert_steps_close(step(patched, compiled), step(reference))


def test_a_flop_counter_counts_what_the_family_computes():
    counts = []
    for model in pair_with_forward(LlamaForCausalLM.forward):
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
    in_mode = []
    selective(
        lambda x: (in_mode.append(in_user_mode()), x.sin().sin())[1],
        torch.ones(2, requires_grad=True),
    ).sum().backward()
    assert in_mode == [False, False]


def test_a_device_keeps_the_loss_in_the_head():
    reference, patched = pair_with_forward(forward_changing_logits(lambda self, x: x * 2.0))
    with torch.device("cpu"):
        assert not in_user_mode()
        out, grads = step(patched)
        assert out.logits is None and patched._liger_logits_warnings is None
        assert_steps_close((out, grads), step(reference))


def test_a_default_device_is_no_mode_of_a_users():
    torch.set_default_device("cpu")
    try:
        assert torch._C._len_torch_function_stack() and not in_user_mode()
    finally:
        torch.set_default_device(None)
