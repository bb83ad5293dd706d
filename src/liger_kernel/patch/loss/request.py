"""What one call of a patched model asks of its head and of its loss function."""

from __future__ import annotations

import inspect
import math
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from liger_kernel.core.devices import within_a_mode
from liger_kernel.core.op import run_eagerly
from liger_kernel.patch.loss.causal_lm import (
    METRICS,
    NOT_HUGGING_FACES,
    is_causal,
    liger_causal_lm_loss,
    shifted,
    unpack_cross_entropy_result,
)
from liger_kernel.patch.loss.head import (
    dtype_of_logits,
    leaves,
    loss_by_calling,
    loss_by_weight,
    reads_its_weight,
    why_whole,
)
from liger_kernel.patch.loss.parallel_head import Replicated, for_shards, plan_of
from liger_kernel.patch.loss.placeholder import (
    Logits,
    LogitsNeeded,
    Source,
    TracedLogits,
    Transform,
    living,
    place,
    writes,
)
from liger_kernel.patch.proof.conditions import plain

WITHIN_A_MODE = "a TorchFunctionMode or TorchDispatchMode is active, which may look at them"
OF_THE_LOSS = (
    "num_items_in_batch",
    "ignore_index",
    "shift_labels",
)  # Hugging Face's own, of a model's call


class Asked(NamedTuple):
    """A loss: of what, with which options, and what was done to the logits before."""

    labels: Any
    shift_labels: Any
    num_items_in_batch: Any
    ignore_index: int
    transform: Transform
    options: dict = {}  # of our loss

    def same(self, other) -> bool:
        return (
            self.labels is other.labels
            and self.shift_labels is other.shift_labels
            and _same_number(self.num_items_in_batch, other.num_items_in_batch)
            and self.ignore_index == other.ignore_index
            and self.transform.same(other.transform)
            and self.options.keys() == other.options.keys()
            and all(
                _same_number(value, other.options[name]) for name, value in self.options.items()
            )
        )


def _same_number(a, b) -> bool:
    return a is b or isinstance(a, (int, float)) and isinstance(b, (int, float)) and a == b


def declared_transform(config) -> Transform:
    """What a config says of it; whether a family means it so is seen when its loss function is
    called."""
    config = getattr(config, "text_config", config)
    scale = getattr(config, "logit_scale", None)
    scale = 1.0 if scale is None else scale
    if "granite" in config.model_type:  # others multiply by it, or divide the hidden states
        scale /= getattr(config, "logits_scaling", None) or 1.0
    softcaps = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"
    caps = (getattr(config, name, None) for name in softcaps)
    return Transform(scale, next((cap for cap in caps if cap is not None), None))


def target_of(asked, shape, keep):
    """Shifted labels for exactly the positions that the family has kept, None if they do not
    fit."""
    given = asked.labels if asked.shift_labels is None else asked.shift_labels
    if not isinstance(given, torch.Tensor) or given.dim() == 0 or given.is_floating_point():
        return None
    target = given if asked.shift_labels is not None else shifted(given, asked.ignore_index)
    if target.shape == shape:
        return target
    if target.numel() == math.prod(shape):  # Hugging Face's loss lays both out flat
        return target.reshape(shape)
    if target.dim() != len(shape):
        return None
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
    handed: (
        frozenset  # options that count where a forward of somebody else's hands them on to the loss
    )
    unknown: set  # arguments of Hugging Face's loss that ours does not know
    released: bool  # whether it is transformers' own forward that runs


class Misfit(ValueError):
    """Labels that are not one a token."""


# What code of ours may raise by mistake. A checkpoint ends its recomputation, a signal or a hook
# ends a step by others.
OWN = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    NotImplementedError,
    ArithmeticError,
)


def _may_be_own(error) -> bool:
    kind = type(error)
    return (
        kind is RuntimeError
        or isinstance(error, OWN)
        or kind.__module__.startswith("torch._dynamo.")
    )


class RandomState:
    """The state of the generators of torch and of Python, to be put back. Reading it waits for no
    device."""

    def __init__(self):
        self.host = torch.get_rng_state()
        self.python = random.getstate()
        accelerator = torch.accelerator.current_accelerator()
        module = None if accelerator is None else torch.get_device_module(accelerator)
        readable = hasattr(module, "get_rng_state_all") and module.is_initialized()
        if readable and module.is_current_stream_capturing():  # a CUDA graph's own counter goes on
            readable = False
        self.module = module if readable else None
        self.devices = self.module.get_rng_state_all() if self.module else []

    def restore(self):
        torch.set_rng_state(self.host)
        random.setstate(self.python)
        if self.module:
            self.module.set_rng_state_all(self.devices)


run_eagerly(RandomState.__init__)  # a graph that was broken before it would begin again here
run_eagerly(RandomState.restore)


class Request:
    """What one call of a model asks of its head and of its loss function. Without ``in_head`` there
    are logits."""

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
        self.reached = False  # whether its head was called
        self.slow = None  # why its head has made logits
        self.needed = (
            None  # why the call has to start again, whatever becomes of the exception that says so
        )
        # in a graph
        self.traced, self.transform, self.read = None, Transform(), None
        self.written, self.mark = 0, None
        self.pairs = []  # all that were traced, with the tensors that they are
        self.learning = torch.is_grad_enabled()  # not so in the forward of an autograd Function

    def needs(self, why) -> LogitsNeeded:
        """To be raised. TorchScript, threads and the forward's own handlers may keep it to
        themselves."""
        self.needed = why
        return LogitsNeeded(why)

    def failure(self, error) -> BaseException:
        """To be raised where code of the stand-in's own has failed: the family's result does not
        depend on it."""
        if self.closed or isinstance(error, Misfit) or not _may_be_own(error):
            return error
        return self.needs(f"what stands for its logits failed ({type(error).__name__}: {error})")

    # -- in the head --

    def of_head(self, head, own, args, kwargs):
        """The head's forward: a `Logits`, or logits where the loss cannot be computed here."""
        if not any(head is leaf for leaf in self.leaves):
            return own(head, *args, **kwargs)
        self.reached = True
        if len(args) + len(kwargs) != 1:
            self.slow = "its head is called with more than hidden states"
            return own(head, *args, **kwargs)
        (hidden_states,) = (*args, *kwargs.values())
        if within_a_mode():
            self.slow = WITHIN_A_MODE
            return own(head, hidden_states)
        if is_compiling():
            if not plain(hidden_states) or hidden_states.numel() == 0:
                return own(head, hidden_states)
            return self._in_graph(head, own, hidden_states)
        plan = plan_of(head)
        if plan is None and not plain(hidden_states):
            self.slow = f"its head is given a {type(hidden_states).__name__}"
            return own(head, hidden_states)
        if not isinstance(hidden_states, torch.Tensor) or hidden_states.numel() == 0:
            return own(head, hidden_states)
        if (
            self.place != place()
        ):  # under no_grad, or a checkpoint of its own, which runs again without this request
            if torch.is_grad_enabled():
                self.slow = (
                    "its head is called within hooks on saved tensors (a checkpoint, save_on_cpu)"
                )
            return own(head, hidden_states)
        try:
            logits = self._stand_in(head, own, hidden_states, plan)
        except Exception as error:
            raise self.failure(error) from error
        return own(head, hidden_states) if logits is None else logits

    def _stand_in(self, head, own, hidden_states, plan):
        """What stands for the logits of this call of the head; None where the loss cannot be
        computed in it."""
        if plan is None:
            x, dtype = (
                hidden_states,
                dtype_of_logits(head, own, hidden_states, self.call.asked.options),
            )
        else:
            x, dtype = for_shards(head, plan, hidden_states)
        if dtype is None:
            self.slow = f"its head makes logits ({why_whole(head, plan, self.call.asked.options)})"
            return None
        self.calls += 1
        asked = self.wanted
        if asked is None and self.calls == 1 and not self.waits:
            asked = self.call.asked
        again = plan is not None or reads_its_weight(head, own)
        source = Source(self, self.head, hidden_states, dtype, again)
        target = (
            None if asked is None else target_of(asked, hidden_states.shape[:-1], self.call.keep)
        )
        if (
            target is not None
        ):  # or the family cuts its labels, or they are wrong: the loss function will see
            try:
                source.result = self._loss(head, own, x, target, asked)
                source.asked, source.versions = asked, _versions(asked)
            except (TypeError, ValueError):
                if self.wanted is not None:
                    raise
                target = None  # labels that the loss function may not get as they are
        if target is None:
            learns = hidden_states.requires_grad or any(p.requires_grad for p in head.parameters())
            loss = torch.zeros(
                (), device=hidden_states.device, requires_grad=learns and torch.is_grad_enabled()
            )
        else:
            loss = unpack_cross_entropy_result(source.result)[0]
        logits = Logits.standing_for(source, loss, (*hidden_states.shape[:-1], head.out_features))
        return logits if plan is None or plan.outputs is None else Replicated(logits, plan.outputs)

    def _loss(self, head, own, hidden_states, target, asked):
        options = self.call.rest | asked.options
        if not plain(
            hidden_states
        ):  # the ranks have the same rows, even if their labels differ, which makes it NaN
            return loss_by_weight(
                head, hidden_states, target, asked, {"drop_ignored": False} | options
            )
        if reads_its_weight(head, own):
            return loss_by_weight(head, hidden_states, target, asked, options)
        return loss_by_calling(head, own, hidden_states, target, asked, asked.options)

    def _in_graph(self, head, own, hidden_states):
        logits = own(head, hidden_states)
        if self.read is not None or not reads_its_weight(head, own):
            self.traced = None
            return logits
        self.read = head, own, hidden_states
        self.mark = hidden_states.new_zeros(0).zero_()  # whose count begins anew in another graph
        return self.trace(logits, Transform())

    def trace(self, logits, transform):
        """Let the loss be computed in place of these logits, should the loss function get just
        them.

        A forward of somebody else's is handed a tensor as everybody knows it, and what it does to
        that is not followed, unless the config names something."""
        self.traced, self.transform = logits, transform
        if self.call.released or self.call.asked.transform != Transform():
            self.traced = logits.as_subclass(TracedLogits)
            self.pairs.append((self.traced, logits))
        self.written = writes(logits)
        return self.traced

    def without_logits(self, out):
        """A tuple that a forward has returned in a graph, with None for the logits of which the
        loss was computed."""
        if type(out) is not tuple or self.result is None or self.traced is None:
            return out
        return tuple(None if x is self.traced else x for x in out)

    # -- in the family's code, in place of its loss function --

    def loss_function(self, *args, **kwargs):
        called = self.call.asked
        given = (
            self.call.theirs
            | dict(zip(("logits", "labels", "vocab_size"), args, strict=False))
            | kwargs
        )
        if (
            called.labels is called.shift_labels is given.get("labels") is not None
        ):  # there were no labels
            given.setdefault("shift_labels", called.shift_labels)
        logits = given.get("logits")
        if is_compiling():
            loss = self._of_traced(given) if self._is_as_traced(logits) else None
        elif type(logits) is Logits:
            try:
                loss = self._of_stand(logits, given)
            except Exception as error:
                raise self.failure(error) from error
        else:
            loss = self._of_what_escaped(logits)
        return self._of_logits(given) if loss is None else loss

    def _asked(self, given, transform) -> Asked | None:
        labels, shift_labels = given.get("labels"), given.get("shift_labels")
        if labels is shift_labels is None or any(
            given.get(name) is not None for name in self.call.unknown
        ):
            return None
        ignore_index = given.get("ignore_index", -100)
        items = given.get("num_items_in_batch")
        return Asked(labels, shift_labels, items, ignore_index, transform, self._options(given))

    def _options(self, given) -> dict:
        """Those of our loss that have come as far as the loss function."""
        called, handed = self.call.asked.options, self.call.handed
        if not handed:
            return called
        return {
            name: given.get(name, called[name])
            for name in called
            if name in given or name not in handed
        }

    def _is_as_traced(self, logits) -> bool:
        """Whether these are the logits that were traced, in the same graph, and nothing was written
        to them."""
        if self.traced is None or logits is not self.traced or within_a_mode():
            return False
        return writes(self.mark) == 1 and writes(logits) == self.written

    def _of_traced(self, given):
        asked, (head, own, hidden_states) = self._asked(given, self.transform), self.read
        target = (
            None if asked is None else target_of(asked, hidden_states.shape[:-1], self.call.keep)
        )
        if target is None or given.get("vocab_size", head.out_features) != head.out_features:
            return None
        self.result = self._loss(head, own, hidden_states, target, asked)
        return unpack_cross_entropy_result(self.result)[0]

    def _of_stand(self, logits, given):
        if (
            logits._source.request is not self or within_a_mode()
        ):  # another model's, or seen by a mode
            return None
        asked = self._asked(given, logits._transform)
        if (
            asked is None
            or logits._made is not None
            or given.get("vocab_size", logits.shape[-1]) != logits.shape[-1]
        ):
            return None
        if (
            place() != self.place and torch.is_grad_enabled()
        ):  # in a checkpoint, which runs again without this request
            raise self.needs("a checkpoint takes its logits")
        source = logits._source
        if (
            source.taken
            or source.asked is None
            or not source.asked.same(asked)
            or source.versions != _versions(asked)
        ):
            logits = self._again(logits, asked)
            if type(logits) is not Logits:
                return None
        logits._source.taken = True
        as_called = asked.same(self.call.asked._replace(transform=asked.transform))
        known, same = (
            self.model._liger_learned is not None,
            asked.transform.same(self.call.asked.transform),
        )
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
            if (
                not isinstance(given, torch.Tensor)
                or given.dim() != logits.dim() - 1
                or given.is_floating_point()
            ):
                return None  # the family's loss knows, or says what it is
            raise Misfit(
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
            if (
                memories
                and isinstance(logits, torch.Tensor)
                and logits.untyped_storage().data_ptr() in memories
            ):
                raise self.needs("an autograd Function passes its logits on")

    def _of_logits(self, given):
        family_loss, options = self.model._liger_family_loss(), self._options(given)
        if not is_causal(family_loss):
            return family_loss(**(given | options))
        if not _any(options, NOT_HUGGING_FACES + METRICS):
            return family_loss(**given)
        self.result = liger_causal_lm_loss(**(given | options))
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
    return {
        name for function in functions for name in inspect.signature(function).parameters
    } - known


def _versions(asked):
    """Of the tensors that a loss is given: what is written to them later is seen."""
    given = (asked.labels, asked.shift_labels, asked.num_items_in_batch)
    return [
        x._version if isinstance(x, torch.Tensor) and not x.is_inference() else None for x in given
    ]


def _any(options, names) -> bool:
    given = [options[name] for name in names if options.get(name) is not None]
    return any(isinstance(value, torch.Tensor) or value for value in given)
