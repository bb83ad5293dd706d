"""What one call of a patched model asks of its head and of its loss function."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from liger_kernel.patch.causal_lm import (
    METRICS,
    NOT_HUGGING_FACES,
    is_causal,
    liger_causal_lm_loss,
    shifted,
    unpack_cross_entropy_result,
)
from liger_kernel.patch.deferred import plain
from liger_kernel.patch.head import dtype_of_logits, leaves, loss_by_calling, loss_by_weight, reads_its_weight
from liger_kernel.patch.logits import Logits, LogitsNeeded, Source, TracedLogits, Transform, living, place
from liger_kernel.patch.parallel_head import Replicated, for_shards, plan_of

OF_THE_LOSS = "num_items_in_batch", "ignore_index", "shift_labels"  # Hugging Face's own, of a model's call


class Asked(NamedTuple):
    """A loss: of what, and what was done to the logits before."""

    labels: Any
    shift_labels: Any
    num_items_in_batch: Any
    ignore_index: int
    transform: Transform

    def same(self, other) -> bool:
        return (
            self.labels is other.labels
            and self.shift_labels is other.shift_labels
            and _same_number(self.num_items_in_batch, other.num_items_in_batch)
            and self.ignore_index == other.ignore_index
            and self.transform.same(other.transform)
        )


def _same_number(a, b) -> bool:
    return a is b or isinstance(a, (int, float)) and isinstance(b, (int, float)) and a == b


def declared_transform(config) -> Transform:
    """What a config says of it; whether a family means it so is seen when its loss function is called."""
    config = getattr(config, "text_config", config)
    scale = getattr(config, "logit_scale", None)
    scale = 1.0 if scale is None else scale
    if "granite" in config.model_type:  # others multiply by it, or divide the hidden states
        scale /= getattr(config, "logits_scaling", None) or 1.0
    softcaps = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"
    caps = (getattr(config, name, None) for name in softcaps)
    return Transform(scale, next((cap for cap in caps if cap is not None), None))


def target_of(asked, shape, keep):
    """Shifted labels for exactly the positions that the family has kept, None if they do not fit."""
    given = asked.labels if asked.shift_labels is None else asked.shift_labels
    if not isinstance(given, torch.Tensor) or given.dim() != len(shape) or given.is_floating_point():
        return None
    target = given if asked.shift_labels is not None else shifted(given, asked.ignore_index)
    if target.shape == shape:
        return target
    if isinstance(keep, int):
        target = target[:, -keep:]
    elif not isinstance(keep, torch.Tensor):
        return None
    elif keep.dim() == 1:
        target = target[:, keep.to(target.device)]
    elif keep.dtype == torch.bool:
        target = target[keep.to(target.device)]
    else:
        target = target.gather(1, keep.to(target.device))
    return target if target.shape == shape else None


@dataclass(frozen=True)
class Call:
    """What a model was called with, as far as its loss is concerned."""

    asked: Asked  # the loss, if the family's forward changes nothing of it
    keep: Any  # which positions get logits
    theirs: dict  # arguments of Hugging Face's loss that the family's forward does not take
    rest: dict  # further arguments, which a loss that is put in the place of ours may want
    options: dict  # of our loss
    unknown: set  # arguments of Hugging Face's loss that ours does not know


class Request:
    """What one call of a model asks of its head and of its loss function. Without ``in_head`` there are logits."""

    def __init__(self, model, call: Call, in_head: bool):
        self.model, self.call = model, call
        self.head = model.get_output_embeddings() if in_head else None
        self.leaves = leaves(self.head)
        self.result = None  # of the loss that the family got
        # in eager mode
        self.place = None if is_compiling() else place()
        self.calls = 0  # of the head
        self.waits = False  # whether the head does not compute a loss before it is asked for
        self.wanted = None  # in a call of ours
        self.stands, self.closed = [], False  # what stands for logits: weak references
        self.made = False  # whether there were real ones
        self.whole = None  # why a sharded head has made them whole
        self.needed = None  # why the call has to start again, whatever becomes of the exception that says so
        # in a graph
        self.traced, self.transform, self.read = None, Transform(), None
        self.learning = torch.is_grad_enabled()  # not so in the forward of an autograd Function

    def needs(self, why) -> LogitsNeeded:
        """To be raised. TorchScript, threads and the forward's own handlers may keep it to themselves."""
        self.needed = why
        return LogitsNeeded(why)

    # -- in the head --

    def of_head(self, head, own, args, kwargs):
        """The head's forward: a `Logits`, or logits where the loss cannot be computed here."""
        if len(args) + len(kwargs) != 1 or not any(head is leaf for leaf in self.leaves):
            return own(head, *args, **kwargs)
        (hidden_states,) = (*args, *kwargs.values())
        if is_compiling():
            if not plain(hidden_states) or hidden_states.numel() == 0:
                return own(head, hidden_states)
            return self._in_graph(head, own, hidden_states)
        plan = plan_of(head)
        if plan is None and not plain(hidden_states):
            return own(head, hidden_states)
        if not isinstance(hidden_states, torch.Tensor) or hidden_states.numel() == 0:
            return own(head, hidden_states)
        if self.place != place():  # under no_grad, or a checkpoint of its own, which runs again without this request
            return own(head, hidden_states)
        if plan is None:
            x, dtype = hidden_states, dtype_of_logits(head, own, hidden_states, self.call.options)
        else:
            x, dtype = for_shards(head, plan, hidden_states)
        if dtype is None:
            self.whole = plan if isinstance(plan, str | None) else "it has others than its plan's hooks or weight"
            return own(head, hidden_states)
        self.calls += 1
        asked = self.wanted
        if asked is None and self.calls == 1 and not self.waits:
            asked = self.call.asked
        again = plan is not None or reads_its_weight(head, own)
        source = Source(self, self.head, hidden_states, dtype, again)
        target = None if asked is None else target_of(asked, hidden_states.shape[:-1], self.call.keep)
        if target is not None:  # or the family cuts its labels, or they are wrong: the loss function will see
            try:
                source.result = self._loss(head, own, x, target, asked)
                source.asked, source.versions = asked, _versions(asked)
            except (TypeError, ValueError):
                if self.wanted is not None:
                    raise
                target = None  # labels that the loss function may not get as they are
        if target is None:
            learns = hidden_states.requires_grad or any(p.requires_grad for p in head.parameters())
            loss = torch.zeros((), device=hidden_states.device, requires_grad=learns and torch.is_grad_enabled())
        else:
            loss = unpack_cross_entropy_result(source.result)[0]
        logits = Logits.standing_for(source, loss, (*hidden_states.shape[:-1], head.out_features))
        return logits if plan is None or plan.outputs is None else Replicated(logits, plan.outputs)

    def _loss(self, head, own, hidden_states, target, asked):
        options = self.call.rest | self.call.options
        if not plain(hidden_states):  # the ranks have the same rows, even if their labels differ, which makes it NaN
            return loss_by_weight(head, hidden_states, target, asked, {"drop_ignored": False} | options)
        if reads_its_weight(head, own):
            return loss_by_weight(head, hidden_states, target, asked, options)
        return loss_by_calling(head, own, hidden_states, target, asked, self.call.options)

    def _in_graph(self, head, own, hidden_states):
        logits = own(head, hidden_states)
        if self.read is not None or not reads_its_weight(head, own):
            self.traced = None
            return logits
        self.read, self.traced = (head, own, hidden_states), logits.as_subclass(TracedLogits)
        return self.traced

    # -- in the family's code, in place of its loss function --

    def loss_function(self, *args, **kwargs):
        called = self.call.asked
        given = self.call.theirs | dict(zip(("logits", "labels", "vocab_size"), args, strict=False)) | kwargs
        if called.labels is called.shift_labels is given.get("labels") is not None:  # there were no labels
            given.setdefault("shift_labels", called.shift_labels)
        logits = given.get("logits")
        if is_compiling():
            loss = None if self.traced is None or logits is not self.traced else self._of_traced(given)
        elif type(logits) is Logits:
            loss = self._of_stand(logits, given)
        else:
            loss = self._of_what_escaped(logits)
        return self._of_logits(given) if loss is None else loss

    def _asked(self, given, transform) -> Asked | None:
        labels, shift_labels = given.get("labels"), given.get("shift_labels")
        if labels is shift_labels is None or any(given.get(name) is not None for name in self.call.unknown):
            return None
        ignore_index = given.get("ignore_index", -100)
        return Asked(labels, shift_labels, given.get("num_items_in_batch"), ignore_index, transform)

    def _of_traced(self, given):
        asked, (head, own, hidden_states) = self._asked(given, self.transform), self.read
        target = None if asked is None else target_of(asked, hidden_states.shape[:-1], self.call.keep)
        if target is None or given.get("vocab_size", head.out_features) != head.out_features:
            return None
        self.result = self._loss(head, own, hidden_states, target, asked)
        return unpack_cross_entropy_result(self.result)[0]

    def _of_stand(self, logits, given):
        if logits._source.request is not self:  # another model's
            return None
        asked = self._asked(given, logits._transform)
        if asked is None or logits._made is not None or given.get("vocab_size", logits.shape[-1]) != logits.shape[-1]:
            return None
        if place() != self.place and torch.is_grad_enabled():  # in a checkpoint, which runs again without this request
            raise self.needs("a checkpoint takes its logits")
        source = logits._source
        if source.taken or source.asked is None or not source.asked.same(asked) or source.versions != _versions(asked):
            logits = self._again(logits, asked)
            if type(logits) is not Logits:
                return None
        logits._source.taken = True
        as_called = asked.same(self.call.asked._replace(transform=asked.transform))
        known, same = self.model._liger_learned is not None, asked.transform.same(self.call.asked.transform)
        # what changes from step to step is not guessed
        self.model._liger_learned = (
            declared_transform(self.model.config),
            asked.transform,
            not as_called or known and not same,
        )
        self.result = logits._source.result
        return logits.loss(unpack_cross_entropy_result(self.result)[0])

    def _again(self, logits, asked):
        """Call the head for the loss that is asked for."""
        source = logits._source
        if target_of(asked, source.hidden_states.shape[:-1], self.call.keep) is None:
            given = asked.labels if asked.shift_labels is None else asked.shift_labels
            if not isinstance(given, torch.Tensor) or given.dim() != logits.dim() - 1 or given.is_floating_point():
                return None  # the family's loss knows, or says what it is
            raise ValueError(
                f"forward: labels of shape {tuple(given.shape)} do not fit the {tuple(logits.shape[:-1])} positions "
                "that reach the head; give one label a token, and logits_to_keep as for the logits"
            )
        self.wanted = asked
        try:
            with torch.set_grad_enabled(logits.requires_grad):
                return source.call_again()
        finally:
            self.wanted = None

    def _of_what_escaped(self, logits):
        """Of the stand-in's own memory by another name, which torch functions did not show."""
        with torch._C.DisableTorchFunctionSubclass():
            memories = [stand.untyped_storage().data_ptr() for stand in living(self.stands)]
            if memories and isinstance(logits, torch.Tensor) and logits.untyped_storage().data_ptr() in memories:
                raise self.needs("an autograd Function passes its logits on")

    def _of_logits(self, given):
        family_loss = self.model._liger_family_loss()
        if not is_causal(family_loss):
            return family_loss(**(given | self.call.options))
        if not _any(self.call.options, NOT_HUGGING_FACES + METRICS):
            return family_loss(**given)
        self.result = liger_causal_lm_loss(**(given | self.call.options))
        return unpack_cross_entropy_result(self.result)[0]

    def close(self):
        """The step is over: what somebody has kept of the logits becomes real."""
        for stand in living(self.stands):
            stand.real()
        self.closed = True


def unknown_to_ours() -> set[str]:
    """Arguments of Hugging Face's loss, in the installed release, that ours does not know."""
    from transformers.loss import loss_utils

    known = {"logits", "labels", "vocab_size", "source", "target", "kwargs", *OF_THE_LOSS}
    functions = loss_utils.ForCausalLMLoss, loss_utils.fixed_cross_entropy
    return {name for function in functions for name in inspect.signature(function).parameters} - known


def _versions(asked):
    """Of the tensors that a loss is given: what is written to them later is seen."""
    given = (asked.labels, asked.shift_labels, asked.num_items_in_batch)
    return [x._version if isinstance(x, torch.Tensor) and not x.is_inference() else None for x in given]


def _any(options, names) -> bool:
    given = [options[name] for name in names if options.get(name) is not None]
    return any(isinstance(value, torch.Tensor) or value for value in given)
