"""Forwards that do more than the family's, with and without the patch."""

import copy

import tiny
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger

V = tiny.VOCABULARY


def adding(to_loss):
    """A forward that adds something of its output to its loss."""

    def forward(self, *args, labels=None, **kwargs):
        out = LlamaForCausalLM.forward(self, *args, labels=labels, **kwargs)
        if labels is not None:
            out.loss = out.loss + to_loss(self, out, labels)
        return out

    return forward


def between(change, **of_loss):
    """A forward that changes the logits before the loss."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = change(self, self.lm_head(self.model(input_ids=input_ids).last_hidden_state))
        given = {name: value(self, labels) for name, value in of_loss.items()}
        kwargs = {"logits": logits, "labels": labels, "vocab_size": V, **kwargs, **given}
        return CausalLMOutputWithPast(loss=self.loss_function(**kwargs), logits=logits)

    return forward


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return -g


def kept(self, *args, **kwargs):
    out = LlamaForCausalLM.forward(self, *args, **kwargs)
    self.kept = out.logits
    return out


def pair(forward, prepare=None):
    """(a model with this forward, the same patched)."""
    theirs = tiny.model("llama")
    theirs.__class__ = type(
        "Theirs", (LlamaForCausalLM,), {"forward": forward, "__module__": __name__}
    )
    if prepare is not None:
        prepare(theirs)
    mine = copy.deepcopy(theirs)
    report = liger.apply_liger_kernel(mine)
    assert report.of("Theirs's loss") == 1
    return theirs, mine


def assert_same(mine, theirs):
    """fp32 sums of up to a hundred terms in another order, two layers deep."""
    (out, grads), (want, want_grads) = mine, theirs
    torch.testing.assert_close(out.loss, want.loss, rtol=1e-5, atol=1e-6)
    assert grads.keys() == want_grads.keys()
    for name, g in want_grads.items():
        assert (grads[name] - g).abs().max() <= 2e-5 * g.abs().max() + 1e-8, name
