"""The rewrites of a causal model's loss: in its head, without logits, or on logits.

`LossInHead` gives the model the forward of `loss_in_head`, where one step is described. With
`LossOnLogits` the model makes logits, and `liger_cross_entropy` computes their loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from liger_kernel.patch.layers import balancing
from liger_kernel.patch.loss import causal_lm, head, loss_in_head, trl_head
from liger_kernel.patch.loss.active_request import current_request
from liger_kernel.patch.loss.parallel_head import ShardingPlan, sharding_plan
from liger_kernel.patch.proof.functions import uses_name
from liger_kernel.patch.proof.private import (
    convert_module,
    has_instance_forward,
    original_class,
    set_class,
)
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite, replacement_of

COLUMN = "loss"
# where a model keeps the loss that `LossOnLogits` has replaced; None: that of its class
LOSS_BEFORE = "_liger_loss_before"


@dataclass(frozen=True)
class CausalLM(Replacement):
    """A model with a head and a loss function, whose forward is `loss_in_head.fused_forward`."""

    # True: its load-balancing loss is ours, too
    balanced: bool = False
    flag, column = "fused_linear_cross_entropy", COLUMN
    guarded = False  # the forward looks for itself at every step

    @property
    def flags(self):
        return (self.flag, balancing.FLAG) if self.balanced else (self.flag,)

    def class_members(self, cls):
        def loss_function(self):
            request = current_request()
            if request is not None and request.model is self:
                return request.loss_function
            return self._liger_family_loss()

        changes = [balancing.with_liger_load_balancing] if self.balanced else []
        return {
            "forward": loss_in_head.fused_forward(cls, *changes),
            "loss_function": property(loss_function, cls.loss_function.fset),
            "_liger_family_loss": loss_in_head.family_loss(cls),
            "_liger_state": {
                # what to expect of the next step, a `request.NextStep`
                "_liger_next_step": None,
                # the ids of its head's hooks when it has turned out to need real logits
                "_liger_logits_needed": None,
                # why there were logits in training, as it was said
                "_liger_logits_warnings": None,
            },
        }


class _LossRewrite(Rewrite):
    """Replaces the loss of the outermost models with a head."""

    applies_to = object

    def could_apply(self, module):
        return _has_head(module)

    def name(self, model):
        return f"{type(model).__name__}'s loss"

    def apply(self, walk, model):
        if not any(model is outermost for outermost in walk.causal_lms):
            return
        if self.is_applied(model):
            walk.flags_done.add(self.flags[0])
            return
        reason = self.obstacle(model)
        if reason is not None:
            self.leave_alone(walk, model, reason)
        else:
            walk.report.add(self.name(model), self.replace(model), COLUMN)
            walk.flags_done.add(self.flags[0])

    def is_applied(self, model) -> bool:
        """Return True if the loss of a model is replaced already."""
        raise NotImplementedError

    def replace(self, model) -> str:
        """Replace the loss. Returns what runs instead, in the words of a report."""
        raise NotImplementedError

    def obstacle(self, model) -> str | None:
        """Return why the loss of a model is left alone, or None."""
        if not isinstance(getattr(type(model), "loss_function", None), property):
            return "it has no loss_function"
        loss = model.loss_function
        if not causal_lm.is_causal_lm_loss(loss):
            return f"it is {getattr(loss, '__name__', loss)}, not ForCausalLMLoss"
        forwards = [loss_in_head.family_forward(type(model))]
        forwards += [cls.__dict__.get("forward") for cls in type(model).__mro__]
        if not any(uses_name(forward, "loss_function") for forward in forwards):
            return "the model's forward does not call self.loss_function"
        return None


class LossInHead(_LossRewrite):
    """Computes the loss in the head: see `loss_in_head`."""

    flags = ("fused_linear_cross_entropy",)

    def is_applied(self, model):
        return isinstance(replacement_of(model), CausalLM)

    def replace(self, model):
        balanced = isinstance(replacement_of(model), balancing.LoadBalancingLoss)
        if balanced:
            set_class(model, original_class(type(model)))
            balanced = balancing.reason_left_alone(type(model)) is None
        convert_module(model, CausalLM(balanced))
        lm_head = model.get_output_embeddings()
        head.install_forward(lm_head)
        return _description(lm_head)

    def obstacle(self, model):
        reason = super().obstacle(model)
        if reason is not None:
            return reason
        if trl_head.has_trl_head(model):
            return "TRL has given the model a head of its own"
        if has_instance_forward(model):
            return "the model's forward was replaced on the instance"
        if replacement_of(model) is not None and "_liger" not in vars(type(model)):
            return "it was given another class after it was patched"
        return head.reason_left_alone(model.get_output_embeddings())


def _description(lm_head) -> str:
    """Say how the loss of a head is computed, in the words of a report."""
    modules = head.head_modules(lm_head)
    if all(type(m).forward is torch.nn.Linear.forward for m in modules):
        if not any(map(head.is_quantised, modules)):
            text = "liger_fused_linear_cross_entropy, no logits"
            sharded = any(isinstance(sharding_plan(m), ShardingPlan) for m in modules)
            return text + ", over the shards of its classes" if sharded else text
    library = type(lm_head).__module__.partition(".")[0]
    rows = "once" if head.mixes_rows(lm_head) else f"{head.CHUNK_ROWS} rows at a time"
    return f"liger_cross_entropy, {library}'s {type(lm_head).__name__} called {rows}"


class LossOnLogits(_LossRewrite):
    """Gives the model `liger_causal_lm_loss` as its loss function."""

    flags = ("cross_entropy",)

    def is_applied(self, model):
        return model.__dict__.get("_loss_function") is causal_lm.liger_causal_lm_loss

    def replace(self, model):
        model.__dict__[LOSS_BEFORE] = model.__dict__.get("_loss_function")
        model.loss_function = causal_lm.liger_causal_lm_loss
        return "liger_cross_entropy, on logits"


class TRLHeads(_LossRewrite):
    """Puts our head in the place of TRL's, for models that TRL trains or may train."""

    flags = ("trl_head",)

    def could_apply(self, module):
        return trl_head.is_loaded() and super().could_apply(module)

    def name(self, model):
        return trl_head.NAME

    def is_applied(self, model):
        return trl_head.is_installed(model)

    def apply(self, walk, model):
        if not any(model is outermost for outermost in walk.causal_lms):
            return
        if self.is_applied(model):
            walk.flags_done.add(self.flags[0])
            return
        for seam, reason in trl_head.install(model).items():
            if reason is None:
                walk.report.add(seam.name, seam.kernel, COLUMN)
                walk.flags_done.add(self.flags[0])
            elif seam is trl_head.HEAD and trl_head.has_trl_head(model):
                self.leave_alone(walk, model, reason)
            elif seam is not trl_head.HEAD and seam.is_loaded():
                walk.leave_alone(self.flags, seam.name, reason)


def has_loss_on_logits(module) -> bool:
    """Return True if `LossOnLogits` has replaced the module's loss."""
    return LOSS_BEFORE in module.__dict__


def revert_loss_on_logits(module) -> None:
    """Give the module the loss back that `LossOnLogits` has replaced, if it has."""
    if not has_loss_on_logits(module):
        return
    # transformers' property ``loss_function`` keeps its value in ``_loss_function``
    del module.__dict__["_loss_function"]
    loss_before = module.__dict__.pop(LOSS_BEFORE)
    if loss_before is not None:
        module.loss_function = loss_before


def _has_head(module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None


def causal_lms(model) -> list:
    """Return the outermost Hugging Face models with a head in ``model``.

    Wrappers are looked through: PEFT, DDP, FSDP1, torch.compile.
    """
    if _has_head(model):
        return [model]
    models = []
    for child in model.children():
        models += causal_lms(child)
    return models
