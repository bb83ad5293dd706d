"""The load-balancing loss of a mixture of experts, by `liger_load_balancing_loss`.

Recognised are models whose forward calls the function ``load_balancing_loss_func`` of their
modeling file, if that computes, of router logits (T, E) of each layer,

    E·Σ_e (share of the tokens with e among their top k experts)·(mean probability of e)

The function is tried by itself, with masks and without, in fp32 and bf16, with its gradients. Then
the forward runs with the operator under the function's name, in this model only. A model whose
loss is computed in its head (`loss.rewrites`) keeps that replacement, which does both.

The loss is left alone if the function takes other arguments or computes something else, or if the
model's forward was replaced on the instance or by another rewrite."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch

from liger_kernel.core.devices import in_func_transform
from liger_kernel.ops import functional
from liger_kernel.ops.moe.load_balancing import load_balancing_loss_reference
from liger_kernel.patch.layers.dtypes import KERNEL_DTYPES
from liger_kernel.patch.proof import purity
from liger_kernel.patch.proof.conditions import are_plain_tensors, left_to_compiler
from liger_kernel.patch.proof.functions import (
    copy_metadata,
    globals_unchanged,
    globals_used,
    rebind_global,
    resolve_global,
)
from liger_kernel.patch.proof.private import (
    convert_module,
    has_instance_forward,
    original_class,
    set_class,
)
from liger_kernel.patch.proof.probe import close, error_summary, isolated, noise
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite, replacement_of

FUNCTION = "load_balancing_loss_func"
ARGUMENTS = "gate_logits", "num_experts", "top_k", "attention_mask"
FLAG = "router"
KERNEL = "liger_load_balancing_loss"
TRIED_ROWS = 2
TRIED_TOKENS = 6
TRIED_EXPERTS = 5


@dataclass(frozen=True)
class LoadBalancingLoss(Replacement):
    """A model of which nothing else is replaced. With a loss in its head, it is a `CausalLM` that
    is ``with_liger_load_balancing``."""

    flag = FLAG
    column = "loss"
    kernel = KERNEL
    takes_one_argument = False

    def globals_read(self, cls, parts):
        return globals_used(cls.forward, FUNCTION)

    def class_members(self, cls):
        return {"forward": _rebind_loss(cls.forward)}


def with_liger_load_balancing(forward: Callable) -> Callable:
    """Return a family's forward with the operator in it, as long as the functions that it uses are
    what they are now."""
    rebound = _rebind_loss(forward)
    unchanged = globals_unchanged(globals_used(forward, FUNCTION))

    def run(*args, **kwargs):
        return (rebound if unchanged() else forward)(*args, **kwargs)

    return copy_metadata(forward, run)


def _rebind_loss(forward: Callable) -> Callable:
    return rebind_global(forward, FUNCTION, _operator_or(resolve_global(forward, FUNCTION)))


def _operator_or(family_function):
    """Return a function that calls the operator, or the family's function where it does not fit."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(family_function).parameters.items()
        if parameter.default is not parameter.empty
    }

    def loss(*args, **kwargs):
        arguments = defaults | dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        if (
            len(args) <= len(ARGUMENTS)
            and arguments.keys() == {*ARGUMENTS}
            and _can_run(**arguments)
        ):
            return functional.liger_load_balancing_loss(**arguments)
        return family_function(*args, **kwargs)

    return loss


def _can_run(gate_logits, num_experts, top_k, attention_mask) -> bool:
    """Return True if the operator computes what the family's function does with these."""
    if type(gate_logits) is not tuple or not gate_logits or in_func_transform():
        return False
    first = gate_logits[0]
    for logits in gate_logits:
        if not isinstance(logits, torch.Tensor) or not are_plain_tensors(logits):
            return False
        if logits.dtype not in KERNEL_DTYPES:
            return False
    if any(logits.dim() != 2 or logits.shape != first.shape for logits in gate_logits):
        return False
    if left_to_compiler(first):
        return False
    T, E = first.shape
    if T == 0 or type(num_experts) is not int or num_experts != E:
        return False
    if type(top_k) is not int or not 0 < top_k <= E:
        return False
    if attention_mask is None:
        return True
    return (
        isinstance(attention_mask, torch.Tensor)
        and are_plain_tensors(attention_mask)
        and not attention_mask.requires_grad
        and attention_mask.dim() == 2
        and attention_mask.numel() == T
    )


class LoadBalancing(Rewrite):
    """Models whose forward calls the function; after those with a loss in the head."""

    flags = (FLAG,)
    applies_to = object

    def could_apply(self, module):
        function = resolve_global(original_class(type(module)).forward, FUNCTION)
        return hasattr(module, "config") and isinstance(function, types.FunctionType)

    def name(self, module):
        return FUNCTION

    def apply(self, walk, module):
        before = replacement_of(module)
        if isinstance(before, LoadBalancingLoss) or getattr(before, "balanced", False):
            walk.flags_done.add(FLAG)
            return
        reason = self._reason_left_alone(walk, module, before)
        if reason is not None:
            self.leave_alone(walk, module, reason)
            return
        if before is None:
            replacement = LoadBalancingLoss()
        else:
            replacement = dataclasses.replace(before, balanced=True)
            set_class(module, original_class(type(module)))
        convert_module(module, replacement)
        walk.report.add(self.name(module), KERNEL, LoadBalancingLoss.column)
        walk.flags_done.add(FLAG)

    def _reason_left_alone(self, walk, module, before: Replacement | None) -> str | None:
        if before is not None and "_liger" not in vars(type(module)):
            return "it was given another class after it was patched"
        if has_instance_forward(module):
            return f"the forward of {type(module).__name__} was replaced on the instance"
        if before is not None and not hasattr(before, "balanced"):
            return f"the forward of {type(module).__name__} was replaced before"

        def prove_once(function):
            return walk.call_once(prove, function)

        return reason_left_alone(original_class(type(module)), prove_once)


# ---- the trial ----


@isolated()
def prove(function: Callable) -> str | None:
    """Return None if the function computes the load-balancing loss, or the reason why it is left
    alone."""
    if tuple(inspect.signature(function).parameters) != ARGUMENTS:
        return f"it takes ({', '.join(inspect.signature(function).parameters)})"
    layers = [
        noise(TRIED_ROWS * TRIED_TOKENS, TRIED_EXPERTS, seed=i) * size
        for i, size in enumerate((1, 4, 0.5), 40)
    ]
    padding = (torch.arange(TRIED_TOKENS) < torch.tensor([[TRIED_TOKENS], [2]])).long()
    weighted = padding * torch.linspace(0.5, 2, TRIED_TOKENS)
    masks = None, padding, padding.bool(), padding.float(), weighted
    try:
        for num_layers, mask, top_k in itertools.product((1, 3), masks, (1, 2, 4)):
            logits = layers[:num_layers]
            output = _loss_and_gradients(function, logits, mask, top_k)
            expected = _loss_and_gradients(load_balancing_loss_reference, logits, mask, top_k)
            if not all(map(close, output, expected)):
                return "it computes something else"
            if not _agrees_in_bfloat16(function, logits, mask, top_k):
                return "it computes something else in 16 bits"
    except Exception as error:
        return f"it could not be tried: {error_summary(error)}"
    return None


def _agrees_in_bfloat16(function, logits, mask, top_k) -> bool:
    logits = [layer.bfloat16() for layer in logits]
    exact_logits = [layer.float() for layer in logits]
    loss, *gradients = _loss_and_gradients(function, logits, mask, top_k)
    exact_loss, *exact_gradients = _loss_and_gradients(
        load_balancing_loss_reference, exact_logits, mask, top_k
    )
    # of a probability and of its gradient, which is E·f/n
    rounding = 2**-7 * TRIED_EXPERTS / (len(logits) * len(logits[0]))
    for gradient, exact in zip(gradients, exact_gradients, strict=True):
        is_close = (gradient - exact).abs().max() <= rounding
        if gradient.dtype != torch.bfloat16 or not is_close:
            return False
    return loss.dtype == exact_loss.dtype and bool((loss - exact_loss).abs() <= 2**-8 * exact_loss)


def _loss_and_gradients(function, logits, mask, top_k) -> list:
    with torch.enable_grad():
        gate_logits = tuple(layer.detach().requires_grad_() for layer in logits)
        loss = function(gate_logits, TRIED_EXPERTS, top_k, mask)
        return [loss.detach(), *torch.autograd.grad(loss, gate_logits)]


def reason_left_alone(family: type, prove_function: Callable = prove) -> str | None:
    """Return None if the loss in this class's forward can be replaced, or the reason why not."""
    function = resolve_global(family.forward, FUNCTION)
    return purity.reason_function_unprovable(function) or prove_function(function)
