"""User code changes a model, its classes and its logits in unusual ways and late: all is as without
the patch."""

import copy

import pytest
import tiny
import torch
from forwards import (
    V,
    assert_steps_close,
    forward_adding_to_loss,
    forward_changing_logits,
    pair_with_forward,
)
from patched import step
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.loss import loss_utils
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger

pytestmark = pytest.mark.usefixtures("reference_only")


def patched(family="llama", prepare=lambda model: None):
    reference = tiny.model(family)
    prepare(reference)
    patched_model = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched_model)
    return reference, patched_model


# ---- classes and functions ----


def doubled(self, *args, **kwargs):
    out = LLAMA(self, *args, **kwargs)
    out.loss = out.loss * 2
    return out


LLAMA = LlamaForCausalLM.forward


def smoothed(source, target, num_items_in_batch=None, ignore_index=-100, **kwargs):
    return torch.nn.functional.cross_entropy(
        source, target, ignore_index=ignore_index, label_smoothing=0.3
    )


CHANGES = {
    "the forward of the class": (LlamaForCausalLM, "forward", doubled),
    "the loss of the class": (
        LlamaForCausalLM,
        "loss_function",
        property(lambda self: lambda logits, labels, **kw: logits.square().mean()),
    ),
    "the cross entropy of Hugging Face": (loss_utils, "fixed_cross_entropy", smoothed),
    "the forward of linear layers": (
        torch.nn.Linear,
        "forward",
        lambda self, x: torch.nn.functional.linear(x * 1.1, self.weight, self.bias),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_replaced_after_the_patch(change, monkeypatch):
    reference, patched_model = patched()
    assert_steps_close(step(patched_model), step(reference))
    monkeypatch.setattr(*CHANGES[change], raising=False)
    for _ in range(2):
        assert_steps_close(step(patched_model), step(reference))


def test_an_attention_whose_forward_is_replaced():
    """It gets tensors of its norms: autograd sees no object."""

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert type(x) is torch.Tensor
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    reference, patched_model = patched("qwen3")
    for model in (reference, patched_model):
        attention = model.model.layers[0].self_attn

        def forward(hidden_states, *args, self=attention, **kwargs):
            q = self.q_norm(
                self.q_proj(hidden_states).view(*hidden_states.shape[:-1], -1, self.head_dim)
            )
            return self.o_proj(Seen.apply(q).flatten(2)), None

        attention.forward = forward
    assert_steps_close(step(patched_model), step(reference))


# ---- logits, late ----


def halved(self, out, labels):
    out.logits.register_hook(lambda g: g / 2)
    return 0.1 * out.logits.logsumexp(-1).mean()


def retained(self, out, labels):
    out.logits.retain_grad()
    self.kept = out.logits
    return 0


def twice(self, input_ids=None, labels=None, **kwargs):
    logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
    losses = [self.loss_function(logits=logits, labels=labels, vocab_size=V) for _ in range(2)]
    return CausalLMOutputWithPast(loss=losses[0] + 3 * losses[1])


def labels_in_place(self, x):
    self.labels[:, ::2] = -100
    return x


def of_labels_in_place(self, input_ids=None, labels=None, **kwargs):
    self.labels = labels
    return forward_changing_logits(labels_in_place)(self, input_ids, labels)


def own_options(self, input_ids=None, labels=None, label_smoothing=0.0, memory=None, **kwargs):
    out = LLAMA(self, input_ids=input_ids, labels=labels, **kwargs)
    out.loss = out.loss + label_smoothing * (1 if memory is None else 5)
    return out


def classifies(self, input_ids=None, labels=None, **kwargs):
    """Its labels are one number a sequence."""
    logits = LLAMA(self, input_ids=input_ids, **kwargs).logits
    return CausalLMOutputWithPast(
        loss=torch.nn.functional.cross_entropy(logits[:, -1], labels[:, 0] % V)
    )


def checkpointed(self, x):
    return checkpoint(lambda x: x.sin(), x, use_reentrant=False)


FORWARDS = {
    "a hook after the loss": forward_adding_to_loss(halved),
    "a gradient that is kept": forward_adding_to_loss(retained),
    "a loss twice": twice,
    "labels in place": of_labels_in_place,
    "options of its own": own_options,
    "one label a sequence": classifies,
    "a checkpoint of the logits": forward_changing_logits(checkpointed),
}


@pytest.mark.parametrize("forward", FORWARDS)
def test_unusual_forwards(forward):
    reference, patched_model = pair_with_forward(FORWARDS[forward])
    given = dict(label_smoothing=0.5, memory=3) if forward == "options of its own" else {}
    for _ in range(3):
        labels = [tiny.batch()["labels"] for _ in range(2)]
        if forward == "one label a sequence":
            labels = [x[:, :1].abs() for x in labels]
        assert_steps_close(
            step(patched_model, labels=labels[0], **given),
            step(reference, labels=labels[1], **given),
        )
        if forward == "a gradient that is kept":
            torch.testing.assert_close(
                patched_model.kept.grad, reference.kept.grad, rtol=1e-4, atol=1e-7
            )


def test_labels_that_the_loss_never_sees():
    """Numbers beyond the vocabulary, which the forward changes before its loss."""
    reference, patched_model = pair_with_forward(
        forward_changing_logits(lambda self, x: x, labels=lambda self, y: y % V)
    )
    for _ in range(2):
        labels = tiny.batch()["labels"].abs() + 3 * V
        assert_steps_close(step(patched_model, labels=labels), step(reference, labels=labels))


# ---- heads that are called ----


class Centred(torch.nn.Linear):
    """Its rows are not by themselves."""

    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))


def centred(model):
    model.lm_head.__class__ = Centred


def spectral(model):
    torch.manual_seed(0)
    torch.nn.utils.parametrizations.spectral_norm(model.lm_head)


@pytest.mark.parametrize("prepare", [centred, spectral])
def test_heads_of_their_own(prepare):
    reference, patched_model = patched(prepare=prepare)
    for _ in range(3):
        assert_steps_close(step(patched_model), step(reference))
