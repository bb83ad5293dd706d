"""Routers: which experts a token goes to, and with which weights, by `liger_router`.

A router gives (logits, weights, index). Its logits are made as the family makes them; the rest is
the operator's. The proof is in `router_trial`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from liger_kernel.core.op import transformed
from liger_kernel.ops import functional
from liger_kernel.patch.layers.norm import FLOATS
from liger_kernel.patch.layers.router_trial import Projection, Unknown, tried
from liger_kernel.patch.proof.conditions import plain, seen
from liger_kernel.patch.proof.hooks import hooked
from liger_kernel.patch.proof.parts import Reads
from liger_kernel.patch.proof.probe import first_line, isolated
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite


@dataclass(frozen=True)
class Router(Replacement):
    """Its logits, its options of `liger_router`, and for which tensors it is that.

    ``correction``: the attribute, or with ``given`` the second argument, that is added to the
    scores to choose by. ``hidden``: its attributes with the width of x. ``experts``: how many it
    has to have, None: any number. ``dtypes``: (of autocast or None, of x, of the weight) -> of the
    weights that it gives."""

    projection: Projection
    correction: str | None
    given: bool
    hidden: tuple[str, ...]
    ranks: tuple[int, ...]
    dtypes: tuple
    top_k: int
    experts: int | None
    options: tuple
    flag, column, fusible = "router", "MLPs", True

    @property
    def one_argument(self):
        return not self.given

    @property
    def kernel(self):
        how = dict(self.options)
        words = (
            how["score"],
            self.correction and "bias",
            how["groups"] and "groups",
            how["normalize"] and "normalised",
        )
        return f"liger_router ({', '.join(filter(None, words))})"

    def members(self, cls):
        what, options, dtypes = self, dict(self.options), dict(self.dtypes)
        names = (*inspect.signature(cls.forward).parameters,)[1:]

        def computed(self, x, correction=None):
            """None where the operator would not do what the module does with these."""
            own = what.projection.bias and not what.projection.child
            weight, bias = what.projection.weight(self), self.bias if own else None
            if what.correction and not what.given:
                correction = getattr(self, what.correction, None)
            needed = x, weight, *([bias] if own else []), *([correction] if what.correction else [])
            if (
                any(t is None or not plain(t) or t.device != x.device for t in needed)
                or transformed()
            ):
                return None
            others = (
                m
                for name, m in self._modules.items()
                if m is not None and name != what.projection.child
            )
            if seen(*(part for child in others for part in child.modules()), called=False):
                return None
            child = what.projection.child
            if child and hooked(self._modules[child]):  # it may give other dtypes
                return None
            if x.dim() not in what.ranks or weight.dim() != 2:
                return None
            E, *widths = *weight.shape, *(getattr(self, name, None) for name in what.hidden)
            if any(width != x.shape[-1] for width in widths):
                return None
            if (
                what.experts not in (None, E)
                or what.top_k > E
                or (bias is not None and bias.dtype != weight.dtype)
            ):
                return None
            if what.correction and (correction.shape != (E,) or correction.dtype not in FLOATS):
                return None
            kind = x.device.type
            lower = (
                torch.get_autocast_dtype(kind)
                if not x.is_meta and torch.is_autocast_enabled(kind)
                else None
            )
            dtype = dtypes.get((lower, x.dtype, weight.dtype))
            if dtype is None:
                return None
            logits = what.projection.logits(self, x, weight, bias)
            weights, index = functional.liger_router(
                logits, what.top_k, bias=correction, dtype=dtype, **options
            )
            return logits, weights, index

        def of_one(self, x):
            out = computed(self, x)
            return cls.forward(self, x) if out is None else out

        def of_two(self, *args, **kwargs):
            given = dict(zip(names, args, strict=False), **kwargs)
            whole = len(args) + len(kwargs) == 2 and given.keys() == set(names)
            out = computed(self, *(given[name] for name in names)) if whole else None
            return cls.forward(self, *args, **kwargs) if out is None else out

        return {"forward": of_two if what.given else of_one}


@isolated()
def prove(module: torch.nn.Module, reads: Reads | None = None) -> Router | str:
    try:
        return Router(**tried(module, reads or Reads()))
    except Unknown as why:
        return str(why)
    except Exception as error:
        return f"it could not be tried: {first_line(error)}"


class Routers(Rewrite):
    flags = ("router",)
    prove = staticmethod(prove)

    def may_be(self, module):
        """It, or what it is derived from, is called a router, or a gate that knows how many experts
        a token has."""
        names = [cls.__name__.lower() for cls in type(module).__mro__]
        gate = "top_k" in vars(module) and any("rout" in name or "gat" in name for name in names)
        return gate or any(name.endswith("router") for name in names)
