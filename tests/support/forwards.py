"""Models whose forward does more than their family's, with and without the patch."""

import copy

import tiny
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger

V = tiny.VOCABULARY


def forward_adding_to_loss(to_loss):
    """Return a forward that adds ``to_loss(model, output, labels)`` to its loss."""

    def forward(self, *args, labels=None, **kwargs):
        out = LlamaForCausalLM.forward(self, *args, labels=labels, **kwargs)
        if labels is not None:
            out.loss = out.loss + to_loss(self, out, labels)
        return out

    return forward


def forward_changing_logits(change, **loss_kwargs):
    """Return a forward that computes the loss of ``change(model, logits)``.

    ``loss_kwargs`` are functions of (model, labels) that make further arguments of the loss.
    """

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = change(self, self.lm_head(self.model(input_ids=input_ids).last_hidden_state))
        kwargs = {"logits": logits, "labels": labels, "vocab_size": V, **kwargs}
        kwargs |= {name: value(self, labels) for name, value in loss_kwargs.items()}
        return CausalLMOutputWithPast(loss=self.loss_function(**kwargs), logits=logits)

    return forward


class ReversedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return -dy


def forward_keeping_logits(self, *args, **kwargs):
    out = LlamaForCausalLM.forward(self, *args, **kwargs)
    self.kept = out.logits
    return out


def pair_with_forward(forward, prepare=None):
    """Return a model with this forward, and a patched copy of it."""
    reference = tiny.model("llama")
    reference.__class__ = type(
        "Theirs", (LlamaForCausalLM,), {"forward": forward, "__module__": __name__}
    )
    if prepare is not None:
        prepare(reference)
    patched = copy.deepcopy(reference)
    report = liger.apply_liger_kernel(patched)
    assert report.of("Theirs's loss") == 1
    return reference, patched


def assert_steps_close(patched_step, reference_step):
    """Compare two results of `patched.step`.

    The bounds are those of fp32 sums of up to a hundred terms in another order, two layers deep.
    """
    out, grads = patched_step
    expected, expected_grads = reference_step
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        error = (grads[name] - grad).abs().max()
        assert error <= 2e-5 * grad.abs().max() + 1e-8, name
