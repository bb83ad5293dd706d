"""The load-balancing loss of a mixture, by `liger_load_balancing_loss`.

A model's forward calls its modeling file's ``load_balancing_loss_func`` by that name. The function
is tried; then the forward runs with the operator under the name, in this model only."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch

from liger_kernel.core.op import transformed
from liger_kernel.ops import functional
from liger_kernel.ops.moe.load_balancing import loss_reference
from liger_kernel.patch.layers.norm import FLOATS
from liger_kernel.patch.proof import purity
from liger_kernel.patch.proof.conditions import is_the_compilers, plain
from liger_kernel.patch.proof.functions import global_of, named_as, rebind, same_globals, used_by
from liger_kernel.patch.proof.private import become, own_forward, swap
from liger_kernel.patch.proof.probe import close, first_line, isolated, noise
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite, known_as

FUNCTION = "load_balancing_loss_func"
ARGUMENTS = "gate_logits", "num_experts", "top_k", "attention_mask"
FLAG, KERNEL = "router", "liger_load_balancing_loss"
ROWS, TOKENS, EXPERTS = 2, 6, 5  # of the trial


@dataclass(frozen=True)
class Balanced(Replacement):
    """A model of which nothing else is ours: with a loss in its head, it is a `CausalLM` that is
    ``balanced``."""

    flag, column, kernel = FLAG, "loss", KERNEL
    one_argument = False

    def globals_read(self, cls, parts):
        return used_by(cls.forward, FUNCTION)

    def members(self, cls):
        return {
            "forward": rebind(cls.forward, FUNCTION, _balanced(global_of(cls.forward, FUNCTION)))
        }


def balanced(forward: Callable) -> Callable:
    """A family's forward with the operator in it, as long as the functions that it uses are what
    they are now."""
    ours = rebind(forward, FUNCTION, _balanced(global_of(forward, FUNCTION)))
    same = same_globals(used_by(forward, FUNCTION))
    return named_as(forward, lambda *args, **kwargs: (ours if same() else forward)(*args, **kwargs))


def _balanced(family):
    defaults = {
        name: p.default
        for name, p in inspect.signature(family).parameters.items()
        if p.default is not p.empty
    }

    def loss(*args, **kwargs):
        given = defaults | dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        if len(args) <= len(ARGUMENTS) and given.keys() == {*ARGUMENTS} and _fit(**given):
            return functional.liger_load_balancing_loss(**given)
        return family(*args, **kwargs)

    return loss


def _fit(gate_logits, num_experts, top_k, attention_mask) -> bool:
    """Whether the operator does with these what the family does."""
    if type(gate_logits) is not tuple or not gate_logits or transformed():
        return False
    first = gate_logits[0]
    if any(
        not isinstance(t, torch.Tensor) or not plain(t) or t.dtype not in FLOATS
        for t in gate_logits
    ):
        return False
    if any(t.dim() != 2 or t.shape != first.shape for t in gate_logits) or is_the_compilers(first):
        return False
    T, E = first.shape
    if (
        T == 0
        or type(num_experts) is not int
        or num_experts != E
        or type(top_k) is not int
        or not 0 < top_k <= E
    ):
        return False
    if attention_mask is None:
        return True
    known = (
        isinstance(attention_mask, torch.Tensor)
        and plain(attention_mask)
        and not attention_mask.requires_grad
    )
    return known and attention_mask.dim() == 2 and attention_mask.numel() == T


# ---- the proof ----


def _with_gradients(function, logits, mask, top_k):
    with torch.enable_grad():
        given = tuple(t.detach().requires_grad_() for t in logits)
        loss = function(given, EXPERTS, top_k, mask)
        return [loss.detach(), *torch.autograd.grad(loss, given)]


@isolated()
def prove(function: Callable) -> str | None:
    """None, or why it is left alone."""
    if tuple(inspect.signature(function).parameters) != ARGUMENTS:
        return f"it takes ({', '.join(inspect.signature(function).parameters)})"
    layers = [
        noise(ROWS * TOKENS, EXPERTS, seed=i) * size for i, size in enumerate((1, 4, 0.5), 40)
    ]
    padding = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [2]])).long()
    masks = None, padding, padding.bool(), padding.float(), padding * torch.linspace(0.5, 2, TOKENS)
    try:
        for n, mask, top_k in itertools.product((1, 3), masks, (1, 2, 4)):
            got, want = (
                _with_gradients(f, layers[:n], mask, top_k) for f in (function, loss_reference)
            )
            if not all(map(close, got, want)):
                return "it computes something else"
            lower = [t.bfloat16() for t in layers[:n]]
            loss, *gradients = _with_gradients(function, lower, mask, top_k)
            exact, *wanted = _with_gradients(
                loss_reference, [t.float() for t in lower], mask, top_k
            )
            rounding = (
                2**-7 * EXPERTS / (n * len(layers[0]))
            )  # of a probability and of its gradient, which is E·f/n
            alike = all(g.dtype == torch.bfloat16 for g in gradients)
            alike = alike and all(
                (g - w).abs().max() <= rounding for g, w in zip(gradients, wanted, strict=True)
            )
            if loss.dtype != exact.dtype or (loss - exact).abs() > 2**-8 * exact or not alike:
                return "it computes something else in 16 bits"
    except Exception as error:
        return f"it could not be tried: {first_line(error)}"
    return None


def why_not(family: type, proved: Callable = prove) -> str | None:
    """Why the loss in the forward of this class is left alone."""
    function = global_of(family.forward, FUNCTION)
    return purity.why_not_function(function) or proved(function)


class LoadBalancing(Rewrite):
    """Of models whose forward computes that loss; after those that have theirs in the head."""

    flags = (FLAG,)
    known = object

    def may_be(self, module):
        family = _family(module).forward
        return hasattr(module, "config") and isinstance(
            global_of(family, FUNCTION), types.FunctionType
        )

    def name(self, module):
        return FUNCTION

    def apply(self, walk, module):
        before = known_as(module)
        if isinstance(before, Balanced) or getattr(before, "balanced", False):
            return walk.done.add(FLAG)
        why = why_not(_family(module), lambda function: walk.once(prove, function))
        if before is not None and "_liger" not in vars(type(module)):
            why = "it was given another class after it was patched"
        elif own_forward(module):
            why = f"the forward of {type(module).__name__} was replaced on the instance"
        elif not (before is None or hasattr(before, "balanced")):
            why = f"the forward of {type(module).__name__} was replaced before"
        if why is not None:
            return self.leave(walk, module, why)
        if before is not None:
            swap(module, _family(module))
        become(module, Balanced() if before is None else dataclasses.replace(before, balanced=True))
        walk.report.add(self.name(module), KERNEL, Balanced.column)
        walk.done.add(FLAG)


def _family(module):
    """Its class without ours."""
    return type(module)._liger[0] if "_liger" in vars(type(module)) else type(module)
