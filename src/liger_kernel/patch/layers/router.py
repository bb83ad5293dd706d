"""Routers of a mixture of experts, by `liger_router`: which experts a token goes to, with which
weights.

Recognised are modules that are called a router, or a gate with a ``top_k``, and give (logits,
weights, index): the logits of a linear layer, the indices of the ``top_k`` largest scores of each
row, and the weights made of these scores. The score is softmax or sigmoid. A correction may be
added to the scores to choose by, experts may be chosen within groups, and the weights may be
normalised and scaled (see `liger_router`).

The logits are computed as the family does it (`router_logits.Projection`); the rest is the
operator's. A trial (the file router_trial) finds the options, and for which dtypes, with autocast
and without, the operator gives what the router does.

A router is left alone if it gives something else, holds more than a linear layer and a correction,
or chooses, weighs or rounds otherwise. For tensors of other shapes or dtypes than were tried the
family's forward runs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from liger_kernel.core import devices
from liger_kernel.core.devices import in_func_transform
from liger_kernel.ops import functional
from liger_kernel.patch.layers.dtypes import KERNEL_DTYPES
from liger_kernel.patch.layers.router_logits import Projection
from liger_kernel.patch.layers.router_probe import NotARouter
from liger_kernel.patch.layers.router_trial import try_router
from liger_kernel.patch.proof.conditions import are_plain_tensors, is_observed
from liger_kernel.patch.proof.hooks import has_hooks
from liger_kernel.patch.proof.parts import ReadRecorder
from liger_kernel.patch.proof.probe import error_summary, isolated
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite


@dataclass(frozen=True)
class Router(Replacement):
    """A router by `liger_router`.

    Attributes:
        projection: how its logits are computed.
        correction: the name of the attribute or argument that is added to the scores to choose by,
            or None.
        correction_is_argument: True if that is the second argument of forward.
        width_attributes: its attributes with the width of x.
        ranks: numbers of dimensions that x may have.
        dtypes: ((autocast's dtype or None, x's, the weight's), dtype of the weights it gives), ...
        top_k: how many experts a token has.
        num_experts: how many experts it has to have. None: any number.
        options: further options of `liger_router`, as pairs.
    """

    projection: Projection
    correction: str | None
    correction_is_argument: bool
    width_attributes: tuple[str, ...]
    ranks: tuple[int, ...]
    dtypes: tuple
    top_k: int
    num_experts: int | None
    options: tuple
    flag = "router"
    column = "MLPs"
    fusible = True

    @property
    def takes_one_argument(self):
        return not self.correction_is_argument

    @property
    def kernel(self):
        options = dict(self.options)
        words = [options["score"]]
        if self.correction:
            words.append("bias")
        if options["groups"]:
            words.append("groups")
        if options["normalize"]:
            words.append("normalised")
        return f"liger_router ({', '.join(words)})"

    def class_members(self, cls):
        router = self
        projection = router.projection
        options = dict(self.options)
        weights_dtypes = dict(self.dtypes)
        argument_names = (*inspect.signature(cls.forward).parameters,)[1:]
        has_own_bias = projection.has_bias and not projection.child

        def route_or_none(self, x, correction=None):
            """Return (logits, weights, index), or None where the operator would do something else
            with these than the module."""
            weight = projection.weight(self)
            bias = self.bias if has_own_bias else None
            if router.correction and not router.correction_is_argument:
                correction = getattr(self, router.correction, None)
            tensors = [x, weight]
            if has_own_bias:
                tensors.append(bias)
            if router.correction:
                tensors.append(correction)
            if any(t is None or not are_plain_tensors(t) or t.device != x.device for t in tensors):
                return None
            if in_func_transform():
                return None
            other_children = (
                child
                for name, child in self._modules.items()
                if child is not None and name != projection.child
            )
            inner_modules = (
                descendant for child in other_children for descendant in child.modules()
            )
            if is_observed(*inner_modules, still_called=False):
                return None
            if projection.child and has_hooks(self._modules[projection.child]):
                return None  # the hooks may give other dtypes
            if x.dim() not in router.ranks or weight.dim() != 2:
                return None
            E, width = weight.shape
            if width != x.shape[-1]:
                return None
            if any(getattr(self, name, None) != width for name in router.width_attributes):
                return None
            if router.num_experts not in (None, E) or router.top_k > E:
                return None
            if bias is not None and bias.dtype != weight.dtype:
                return None
            if router.correction:
                if correction.shape != (E,) or correction.dtype not in KERNEL_DTYPES:
                    return None
            dtype = weights_dtypes.get((devices.autocast_dtype(x), x.dtype, weight.dtype))
            if dtype is None:
                return None
            logits = projection.logits(self, x, weight, bias)
            weights, index = functional.liger_router(
                logits, router.top_k, bias=correction, dtype=dtype, **options
            )
            return logits, weights, index

        def forward(self, x):
            output = route_or_none(self, x)
            return cls.forward(self, x) if output is None else output

        def forward_with_correction(self, *args, **kwargs):
            arguments = dict(zip(argument_names, args, strict=False), **kwargs)
            output = None
            if len(args) + len(kwargs) == 2 and arguments.keys() == set(argument_names):
                output = route_or_none(self, *(arguments[name] for name in argument_names))
            return cls.forward(self, *args, **kwargs) if output is None else output

        return {"forward": forward_with_correction if router.correction_is_argument else forward}


@isolated()
def prove(module: torch.nn.Module, reads: ReadRecorder | None = None) -> Router | str:
    """Return the router that the module computes, or the reason why it is left alone."""
    try:
        return Router(**try_router(module, reads or ReadRecorder()))
    except NotARouter as reason:
        return str(reason)
    except Exception as error:
        return f"it could not be tried: {error_summary(error)}"


class Routers(Rewrite):
    """Modules whose class, or one it is derived from, is called a router, or a gate that knows how
    many experts a token has."""

    flags = ("router",)
    prove = staticmethod(prove)

    def could_apply(self, module):
        names = [cls.__name__.lower() for cls in type(module).__mro__]
        if any(name.endswith("router") for name in names):
            return True
        return "top_k" in vars(module) and any("rout" in n or "gat" in n for n in names)
