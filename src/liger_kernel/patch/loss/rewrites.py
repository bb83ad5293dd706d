"""The loss of a causal model: in its head, without logits, or on logits, by `liger_cross_entropy`.

`causal_lm` has the losses, `loss_in_head` the forward that computes one in the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from liger_kernel.patch.layers import balancing
from liger_kernel.patch.loss import causal_lm, head, loss_in_head
from liger_kernel.patch.loss.placeholder import current
from liger_kernel.patch.proof.functions import mentions
from liger_kernel.patch.proof.private import become, own_forward, swap
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite, known_as

COLUMN = "loss"


@dataclass(frozen=True)
class CausalLM(Replacement):
    """A model with a head and a loss function, whose forward is `loss_in_head.fused_forward`.

    ``balanced``: its load-balancing loss is ours, too.
    """

    balanced: bool = False
    flag, column = "fused_linear_cross_entropy", COLUMN
    guarded = False  # at every step it looks for itself

    @property
    def flags(self):
        return (self.flag, balancing.FLAG) if self.balanced else (self.flag,)

    def members(self, cls):
        def loss_function(self):
            request = current()
            asked = request is not None and request.model is self
            return request.loss_function if asked else self._liger_family_loss()

        return {
            "forward": loss_in_head.fused_forward(
                cls, *([balancing.balanced] if self.balanced else [])
            ),
            "loss_function": property(loss_function, cls.loss_function.fset),
            "_liger_family_loss": loss_in_head.family_loss(cls),
            "_liger_state": {
                "_liger_learned": None,  # what to expect of the next step: `loss_in_head`
                "_liger_logits_needed": None,  # the hooks with which it gets real logits
                "_liger_told": None,  # why there are logits in training
            },
        }


class _Loss(Rewrite):
    """Of the models with a head in what is patched."""

    known = object

    def may_be(self, module):
        return _has_head(module)

    def name(self, model):
        return f"{type(model).__name__}'s loss"

    def apply(self, walk, model):
        if not any(model is outermost for outermost in walk.models):
            return
        if self.is_there(model):
            walk.done.add(self.flags[0])
            return
        why = self.obstacle(model)
        if why is not None:
            self.leave(walk, model, why)
        else:
            walk.report.add(self.name(model), self.replace(model), COLUMN)
            walk.done.add(self.flags[0])

    def is_there(self, model) -> bool:
        raise NotImplementedError

    def replace(self, model) -> str:
        """-> what runs instead, in the words of a report"""
        raise NotImplementedError

    def obstacle(self, model) -> str | None:
        if not isinstance(getattr(type(model), "loss_function", None), property):
            return "it has no loss_function"
        loss = model.loss_function
        if not causal_lm.is_causal(loss):
            return f"it is {getattr(loss, '__name__', loss)}, not ForCausalLMLoss"
        forwards = (
            loss_in_head.family_forward(type(model)),
            *(c.__dict__.get("forward") for c in type(model).__mro__),
        )
        if not any(mentions(forward, "loss_function") for forward in forwards):
            return "the model's forward does not call self.loss_function"
        return None


class LossInHead(_Loss):
    flags = ("fused_linear_cross_entropy",)

    def is_there(self, model):
        return isinstance(known_as(model), CausalLM)

    def replace(self, model):
        balanced = isinstance(known_as(model), balancing.Balanced)
        if balanced:
            swap(model, type(model)._liger[0])
            balanced = balancing.why_not(type(model)) is None
        become(model, CausalLM(balanced))
        lm_head = model.get_output_embeddings()
        head.prepare(lm_head)
        leaves = head.leaves(lm_head)
        if all(
            type(leaf).forward is torch.nn.Linear.forward and not head.is_quantised(leaf)
            for leaf in leaves
        ):
            sharded = any(isinstance(head.plan_of(leaf), head.Plan) for leaf in leaves)
            return "liger_fused_linear_cross_entropy, no logits" + (
                ", over the shards of its classes" * sharded
            )
        library = type(lm_head).__module__.partition(".")[0]
        how = "once" if head.mixes_rows(lm_head) else f"{head.CHUNK} rows at a time"
        return f"liger_cross_entropy, {library}'s {type(lm_head).__name__} called {how}"

    def obstacle(self, model):
        why = super().obstacle(model)
        if why is not None:
            return why
        if own_forward(model):
            return "the model's forward was replaced on the instance"
        if known_as(model) is not None and "_liger" not in vars(type(model)):
            return "it was given another class after it was patched"
        return head.why_not(model.get_output_embeddings())


class LossOnLogits(_Loss):
    flags = ("cross_entropy",)

    def is_there(self, model):
        return model.__dict__.get("_loss_function") is causal_lm.liger_causal_lm_loss

    def replace(self, model):
        model.__dict__["_liger_loss_before"] = model.__dict__.get("_loss_function")
        model.loss_function = causal_lm.liger_causal_lm_loss
        return "liger_cross_entropy, on logits"


def _has_head(module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None


def causal_lms(model) -> list:
    """The outermost Hugging Face models with a head in ``model``, through PEFT, DDP, FSDP1 and
    torch.compile."""
    if _has_head(model):
        return [model]
    return [found for child in model.children() for found in causal_lms(child)]
