"""`Request`: the loss that one call of a patched model asks of its head and its loss function.

`Request.run_head` runs in place of the head's forward, `Request.loss_function` in place of the
family's loss function. `LossSpec` says which loss: the one that the call asks for (`ModelCall`) is
computed in the head; it is taken if the loss function asks for just that."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from liger_kernel.core.devices import in_user_mode
from liger_kernel.patch.loss.active_request import LogitsNeeded
from liger_kernel.patch.loss.causal_lm import (
    HF_LOSS_KWARGS,
    LOSS_CHANGING_OPTIONS,
    METRICS,
    is_causal_lm_loss,
    liger_causal_lm_loss,
    next_token_labels,
    unpack_cross_entropy_result,
)
from liger_kernel.patch.loss.head import (
    head_modules,
    is_plain_head,
    logits_dtype,
    loss_from_weight,
    loss_in_chunks,
    reason_full_logits,
)
from liger_kernel.patch.loss.parallel_head import (
    ReplicatedLogits,
    shard_inputs,
    sharding_plan,
)
from liger_kernel.patch.loss.placeholder import (
    HeadCall,
    LogitsPlaceholder,
    alive,
    autograd_context,
)
from liger_kernel.patch.loss.traced_logits import TracedLogits, count_writes
from liger_kernel.patch.loss.transform import Transform, declared_transform
from liger_kernel.patch.proof.conditions import are_plain_tensors

IN_USER_MODE = "a TorchFunctionMode or TorchDispatchMode is active, which may look at them"


# ---- which loss ----


class LossSpec(NamedTuple):
    """A causal-LM loss: of which labels, with which options, of which function of the logits."""

    labels: Any
    shift_labels: Any
    num_items_in_batch: Any
    ignore_index: int
    transform: Transform
    options: dict = {}  # of our loss, as a call of the model gives them

    def same_as(self, other: LossSpec) -> bool:
        """Return True for the same loss. Tensors are compared by identity: nothing is read."""
        return (
            self.labels is other.labels
            and self.shift_labels is other.shift_labels
            and _is_same_value(self.num_items_in_batch, other.num_items_in_batch)
            and self.ignore_index == other.ignore_index
            and self.transform.same_as(other.transform)
            and self.options.keys() == other.options.keys()
            and all(
                _is_same_value(value, other.options[name]) for name, value in self.options.items()
            )
        )

    def label_versions(self) -> list:
        """Return the versions of its tensors, by which later writes to them are seen."""
        tensors = (self.labels, self.shift_labels, self.num_items_in_batch)
        return [
            x._version if isinstance(x, torch.Tensor) and not x.is_inference() else None
            for x in tensors
        ]


def _is_same_value(a, b) -> bool:
    return a is b or isinstance(a, (int, float)) and isinstance(b, (int, float)) and a == b


def targets_of(spec: LossSpec, shape, logits_to_keep):
    """Return shifted labels of ``shape``: for the positions that the family has kept.

    Returns None if the labels do not fit these positions.
    """
    labels = spec.labels if spec.shift_labels is None else spec.shift_labels
    if not isinstance(labels, torch.Tensor) or labels.dim() == 0 or labels.is_floating_point():
        return None
    targets = labels
    if spec.shift_labels is None:
        targets = next_token_labels(labels, spec.ignore_index)
    if targets.shape == shape:
        return targets
    if targets.numel() == math.prod(shape):  # Hugging Face's loss lays both out flat
        return targets.reshape(shape)
    if targets.dim() != len(shape):
        return None
    if isinstance(logits_to_keep, int):
        targets = targets[:, -logits_to_keep:]
    elif not isinstance(logits_to_keep, torch.Tensor):
        return None
    else:
        positions = logits_to_keep.to(targets.device)
        if positions.dim() == 1:
            targets = targets[:, positions]
        elif positions.dtype == torch.bool:
            targets = targets[positions]
        else:
            targets = targets.gather(1, positions)
    return targets if targets.shape == shape else None


@dataclass(frozen=True)
class ModelCall:
    """The part of a model's call that concerns its loss."""

    # the loss, if the family's forward changes nothing of it
    spec: LossSpec
    # which positions get logits, as Hugging Face's forwards take it
    logits_to_keep: Any
    # arguments of Hugging Face's loss that the family's forward does not take
    hf_loss_kwargs: dict
    # further arguments, which a loss that is put in the place of ours may want
    extra_kwargs: dict
    # options that count only if the forward, somebody else's, hands them on to the loss function
    forwarded_options: frozenset
    # arguments of Hugging Face's loss that ours does not know
    unsupported_kwargs: set
    # True: the forward is transformers' own
    is_transformers: bool


class NextStep(NamedTuple):
    """Expectations of a model's next step, as long as its config declares the same transform."""

    declared: Transform  # by the config
    transform: Transform  # what the forward has done
    defer_loss: bool  # True: the head computes no loss before the loss function asks for it


def unsupported_loss_kwargs() -> set[str]:
    """Return the arguments of Hugging Face's loss, in the installed release, that ours lacks."""
    from transformers.loss import loss_utils

    supported = {"logits", "labels", "vocab_size", "source", "target", "kwargs", *HF_LOSS_KWARGS}
    parameters = set()
    for function in (loss_utils.ForCausalLMLoss, loss_utils.fixed_cross_entropy):
        parameters.update(inspect.signature(function).parameters)
    return parameters - supported


# ---- errors ----


class LabelMismatch(ValueError):
    """The labels are not one a token."""


# What our code may raise by mistake. A checkpoint ends its recomputation, and a signal or a hook
# ends a step, by others.
_OWN_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    NotImplementedError,
    ArithmeticError,
)


def _may_be_own(error) -> bool:
    """Return True for an error that our code may have raised by mistake."""
    cls = type(error)
    if cls is RuntimeError or isinstance(error, _OWN_ERRORS):
        return True
    return cls.__module__.startswith("torch._dynamo.")


# ---- the request ----


class Request:
    """The loss that one call of a model asks of its head and of its loss function.

    It belongs to that call and its thread. Without ``in_head`` the head makes logits.
    """

    def __init__(self, model, call: ModelCall, in_head: bool):
        self.model = model
        self.call = call
        self.head = model.get_output_embeddings() if in_head else None
        self.head_modules = head_modules(self.head)
        self.result = None  # the loss, or `CrossEntropyOutput`, that the family got
        # in eager mode
        self.autograd_context = None if is_compiling() else autograd_context()
        self.num_head_calls = 0
        self.defer_loss = False  # True: the head computes no loss before it is asked for
        self.spec_to_compute = None  # while the head is called again for another loss
        self.placeholders = []  # weak references
        self.closed = False  # True once the step is over
        self.made_logits = False  # True once there were real logits
        self.head_called = False
        self.reason_logits = None  # why the head has made logits
        # why the call has to start again, whatever becomes of the exception that says so
        self.reason_restart = None
        # in a graph of torch.compile
        self.traced_logits = None  # the tensor that the loss function has to be given
        self.traced_transform = Transform()
        self.traced_head_call = None  # (head, its forward, hidden states)
        self.traced_pairs = []  # all `TracedLogits`, each with the tensor that it is
        self.num_writes = 0  # to the traced logits, when they were traced
        self.write_marker = None  # tells one graph from another
        self.grad_enabled = torch.is_grad_enabled()  # False in the forward of an autograd Function

    def needs_logits(self, reason) -> LogitsNeeded:
        """Return what to raise where the call has to start again with real logits.

        TorchScript, threads and the forward's own handlers may keep the exception to themselves:
        the reason is kept here.
        """
        self.reason_restart = reason
        return LogitsNeeded(reason)

    def failure(self, error) -> BaseException:
        """Return what to raise where the placeholder's own code has raised ``error``.

        The family's result does not depend on our mistakes: the call starts again.
        """
        if self.closed or isinstance(error, LabelMismatch) or not _may_be_own(error):
            return error
        return self.needs_logits(
            f"what stands for its logits failed ({type(error).__name__}: {error})"
        )

    # -- in the head's call --

    def run_head(self, head, forward, args, kwargs):
        """Run in place of a head's ``forward``.

        Returns a placeholder for the logits, or logits where the loss cannot be computed here.
        """
        if not any(head is module for module in self.head_modules):
            return forward(head, *args, **kwargs)
        self.head_called = True
        if len(args) + len(kwargs) != 1:
            self.reason_logits = "its head is called with more than hidden states"
            return forward(head, *args, **kwargs)
        (hidden_states,) = (*args, *kwargs.values())
        if in_user_mode():
            self.reason_logits = IN_USER_MODE
            return forward(head, hidden_states)
        if is_compiling():
            return self._trace_head(head, forward, hidden_states)
        plan = sharding_plan(head)
        if not self._can_compute_loss(hidden_states, plan):
            return forward(head, hidden_states)
        try:
            placeholder = self._make_placeholder(head, forward, hidden_states, plan)
        except Exception as error:
            raise self.failure(error) from error
        return forward(head, hidden_states) if placeholder is None else placeholder

    def _can_compute_loss(self, hidden_states, plan) -> bool:
        """Return True if a loss can be computed from these hidden states, here and now."""
        if plan is None and not are_plain_tensors(hidden_states):
            self.reason_logits = f"its head is given a {type(hidden_states).__name__}"
            return False
        if not isinstance(hidden_states, torch.Tensor) or hidden_states.numel() == 0:
            return False
        if self.autograd_context != autograd_context():
            # under no_grad, or in a checkpoint of its own, which runs again without this request
            if torch.is_grad_enabled():
                self.reason_logits = (
                    "its head is called within hooks on saved tensors (a checkpoint, save_on_cpu)"
                )
            return False
        return True

    def _make_placeholder(self, head, forward, hidden_states, plan):
        """Return the placeholder for the logits of this call of the head.

        Returns None where the loss cannot be computed in the head, but only from logits.
        """
        options = self.call.spec.options
        if plan is None:
            inputs = hidden_states
            dtype = logits_dtype(head, forward, hidden_states, options)
        else:
            inputs, dtype = shard_inputs(head, plan, hidden_states)
        if dtype is None:
            reason = reason_full_logits(head, plan, options)
            self.reason_logits = f"its head makes logits ({reason})"
            return None
        self.num_head_calls += 1
        repeatable = plan is not None or is_plain_head(head, forward)
        head_call = HeadCall(self, self.head, hidden_states, dtype, repeatable)
        loss = self._loss_of_call(head_call, head, forward, inputs)
        if loss is None:
            loss = _zero_loss(head, hidden_states)
        shape = (*hidden_states.shape[:-1], head.out_features)
        placeholder = LogitsPlaceholder.of_loss(head_call, loss, shape)
        if plan is None or plan.output_placements is None:
            return placeholder
        return ReplicatedLogits(placeholder, plan.output_placements)

    def _loss_of_call(self, head_call, head, forward, inputs):
        """Compute the loss of a call of the head, and note it there.

        Returns None if it is deferred, or if its labels do not fit: the family cuts them, or they
        are wrong. The loss function will see.
        """
        spec = self.spec_to_compute
        if spec is None and self.num_head_calls == 1 and not self.defer_loss:
            spec = self.call.spec
        if spec is None:
            return None
        shape = head_call.hidden_states.shape[:-1]
        targets = targets_of(spec, shape, self.call.logits_to_keep)
        if targets is None:
            return None
        try:
            head_call.result = self._compute_loss(head, forward, inputs, targets, spec)
            head_call.label_versions = spec.label_versions()
            head_call.spec = spec
        except (TypeError, ValueError):
            if self.spec_to_compute is not None:
                raise
            return None  # labels that the loss function may not get as they are
        return unpack_cross_entropy_result(head_call.result)[0]

    def _compute_loss(self, head, forward, hidden_states, targets, spec):
        """Compute a loss in the head: from its weight, or by calling it in chunks."""
        options = self.call.extra_kwargs | spec.options
        if not are_plain_tensors(hidden_states):
            # the ranks have the same rows, even if their labels differ, which makes it NaN
            options = {"drop_ignored": False} | options
            return loss_from_weight(head, hidden_states, targets, spec, options)
        if is_plain_head(head, forward):
            return loss_from_weight(head, hidden_states, targets, spec, options)
        return loss_in_chunks(head, forward, hidden_states, targets, spec, spec.options)

    # -- in the head's call, in a graph of torch.compile --

    def _trace_head(self, head, forward, hidden_states):
        if not are_plain_tensors(hidden_states) or hidden_states.numel() == 0:
            return forward(head, hidden_states)
        logits = forward(head, hidden_states)
        if self.traced_head_call is not None or not is_plain_head(head, forward):
            self.traced_logits = None
            return logits
        self.traced_head_call = head, forward, hidden_states
        # its count of writes begins anew in another graph
        self.write_marker = hidden_states.new_zeros(0).zero_()
        return self.trace(logits, Transform())

    def trace(self, logits, transform):
        """Let the loss be computed in place of these logits, if the loss function gets just them.

        A forward of somebody else's is handed an ordinary tensor. What it does to that is not
        followed, unless the config declares a transform.
        """
        self.traced_logits = logits
        self.traced_transform = transform
        if self.call.is_transformers or self.call.spec.transform != Transform():
            self.traced_logits = logits.as_subclass(TracedLogits)
            self.traced_pairs.append((self.traced_logits, logits))
        self.num_writes = count_writes(logits)
        return self.traced_logits

    def without_logits(self, out):
        """Return a tuple that a forward has returned in a graph without its logits.

        They are None if the loss was computed of them.
        """
        if type(out) is not tuple or self.result is None or self.traced_logits is None:
            return out
        return tuple(None if x is self.traced_logits else x for x in out)

    # -- in the family's code, in place of its loss function --

    def loss_function(self, *args, **kwargs):
        """Return the loss that the family asks for.

        That is the one of the head, if its arguments are what it was computed with. If they are
        not, the head is called for this one. With real logits it is the loss of these.
        """
        spec = self.call.spec
        positional = dict(zip(("logits", "labels", "vocab_size"), args, strict=False))
        inputs = self.call.hf_loss_kwargs | positional | kwargs
        logits, labels = inputs.get("logits"), inputs.get("labels")
        if labels is not None and labels is spec.labels is spec.shift_labels:
            inputs.setdefault("shift_labels", labels)  # the model was given these alone
        loss = None
        if is_compiling():
            if self._is_as_traced(logits):
                loss = self._loss_of_traced(inputs)
        elif type(logits) is LogitsPlaceholder:
            try:
                loss = self._loss_of_placeholder(logits, inputs)
            except Exception as error:
                raise self.failure(error) from error
        else:
            self._check_is_no_placeholder(logits)
        return self._loss_of_logits(inputs) if loss is None else loss

    def _spec_of(self, inputs, transform) -> LossSpec | None:
        """Return the loss that arguments of a loss function ask for, None if it is not ours."""
        labels, shift_labels = inputs.get("labels"), inputs.get("shift_labels")
        if labels is None and shift_labels is None:
            return None
        if any(inputs.get(name) is not None for name in self.call.unsupported_kwargs):
            return None
        return LossSpec(
            labels,
            shift_labels,
            inputs.get("num_items_in_batch"),
            inputs.get("ignore_index", -100),
            transform,
            self._options_of(inputs),
        )

    def _options_of(self, inputs) -> dict:
        """Return the options of our loss that have come as far as the loss function."""
        options, forwarded = self.call.spec.options, self.call.forwarded_options
        if not forwarded:
            return options
        return {
            name: inputs.get(name, options[name])
            for name in options
            if name in inputs or name not in forwarded
        }

    def _is_as_traced(self, logits) -> bool:
        """Return True for the traced logits, in the same graph, to which nothing was written."""
        if self.traced_logits is None or logits is not self.traced_logits or in_user_mode():
            return False
        return count_writes(self.write_marker) == 1 and count_writes(logits) == self.num_writes

    def _loss_of_traced(self, inputs):
        """Return the loss of the head's inputs in a graph, None for the loss of the logits."""
        spec = self._spec_of(inputs, self.traced_transform)
        head, forward, hidden_states = self.traced_head_call
        targets = None
        if spec is not None:
            targets = targets_of(spec, hidden_states.shape[:-1], self.call.logits_to_keep)
        if targets is None or inputs.get("vocab_size", head.out_features) != head.out_features:
            return None
        self.result = self._compute_loss(head, forward, hidden_states, targets, spec)
        return unpack_cross_entropy_result(self.result)[0]

    def _loss_of_placeholder(self, placeholder, inputs):
        """Return the loss that a placeholder carries, None for the loss of real logits.

        If it carries another one, the head is called for the one that is asked for.
        """
        if placeholder._head_call.request is not self or in_user_mode():
            return None  # another model's, or seen by a mode
        spec = self._spec_of(inputs, placeholder._transform)
        if spec is None or placeholder._logits is not None:
            return None
        if inputs.get("vocab_size", placeholder.shape[-1]) != placeholder.shape[-1]:
            return None
        if autograd_context() != self.autograd_context and torch.is_grad_enabled():
            # in a checkpoint, which runs again without this request
            raise self.needs_logits("a checkpoint takes its logits")
        if not _carries(placeholder._head_call, spec):
            placeholder = self._call_head_again(placeholder, spec)
            if type(placeholder) is not LogitsPlaceholder:
                return None
        placeholder._head_call.loss_taken = True
        self._remember(spec)
        self.result = placeholder._head_call.result
        return placeholder.take_loss(unpack_cross_entropy_result(self.result)[0])

    def _remember(self, spec):
        """Note for the model's next step which loss was asked for."""
        model, call_spec = self.model, self.call.spec
        other_arguments = not spec.same_as(call_spec._replace(transform=spec.transform))
        # what changes from step to step is not guessed
        is_known = model._liger_next_step is not None
        other_transform = is_known and not spec.transform.same_as(call_spec.transform)
        model._liger_next_step = NextStep(
            declared_transform(model.config), spec.transform, other_arguments or other_transform
        )

    def _call_head_again(self, placeholder, spec):
        """Call the head for the loss that is asked for. Returns its placeholder.

        Returns None for labels on which the family's loss is left to decide.
        """
        head_call = placeholder._head_call
        shape = head_call.hidden_states.shape[:-1]
        if targets_of(spec, shape, self.call.logits_to_keep) is None:
            labels = spec.labels if spec.shift_labels is None else spec.shift_labels
            if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
                return None
            if labels.dim() != placeholder.dim() - 1:
                return None
            raise LabelMismatch(
                f"forward: labels of shape {tuple(labels.shape)} do not fit the "
                f"{tuple(placeholder.shape[:-1])} positions that reach the head; give one label a "
                "token, and logits_to_keep as for the logits"
            )
        self.spec_to_compute = spec
        try:
            with torch.set_grad_enabled(placeholder.requires_grad):
                return head_call.call_again()
        finally:
            self.spec_to_compute = None

    def _check_is_no_placeholder(self, logits):
        """Start again if a tensor is a placeholder's memory by another name.

        Torch functions do not show what an autograd Function returns.
        """
        with torch._C.DisableTorchFunctionSubclass():
            memories = [x.untyped_storage().data_ptr() for x in alive(self.placeholders)]
            if not memories or not isinstance(logits, torch.Tensor):
                return
            if logits.untyped_storage().data_ptr() in memories:
                raise self.needs_logits("an autograd Function passes its logits on")

    def _loss_of_logits(self, inputs):
        """Return the family's loss of real logits; ours where an option asks for what it lacks."""
        family_loss = self.model._liger_family_loss()
        options = self._options_of(inputs)
        if not is_causal_lm_loss(family_loss):
            return family_loss(**(inputs | options))
        if not _any_set(options, LOSS_CHANGING_OPTIONS + METRICS):
            return family_loss(**inputs)
        self.result = liger_causal_lm_loss(**(inputs | options))
        return unpack_cross_entropy_result(self.result)[0]

    def close(self):
        """End the step: logits that somebody has kept become real."""
        for placeholder in alive(self.placeholders):
            placeholder.materialize()
        self.closed = True


def _zero_loss(head, hidden_states):
    """Return the loss of a placeholder whose loss is not computed yet."""
    learns = hidden_states.requires_grad or any(p.requires_grad for p in head.parameters())
    return torch.zeros(
        (), device=hidden_states.device, requires_grad=learns and torch.is_grad_enabled()
    )


def _carries(head_call, spec) -> bool:
    """Return True if a call of the head has computed this loss, and nobody has taken it."""
    if head_call.loss_taken or head_call.spec is None or not head_call.spec.same_as(spec):
        return False
    return head_call.label_versions == spec.label_versions()


def _any_set(options, names) -> bool:
    values = [options[name] for name in names if options.get(name) is not None]
    return any(isinstance(value, torch.Tensor) or value for value in values)
