"""Gated norms, ``RMSNorm(x)·act(gate)`` and ``RMSNorm(x·act(gate))`` of rows or groups, by
`liger_gated_rms_norm`."""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass, replace

import torch

from liger_kernel.ops import functional
from liger_kernel.ops.norm.gated_rms_norm import ACTIVATIONS, gated_rms_norm_reference
from liger_kernel.patch.layers.norm import EPSILONS, FLOATS
from liger_kernel.patch.proof.conditions import plain
from liger_kernel.patch.proof.parts import Reads
from liger_kernel.patch.proof.probe import (
    by,
    call,
    equal,
    first_line,
    held_in,
    in_both_modes,
    isolated,
    noise,
    rows,
    same_gradients,
    shell,
)
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

WIDTH = 48  # of the rows that are tried
TRIED = ((1e-3, 24), (0.5, 12))  # eps, and the size of a group


@dataclass(frozen=True)
class GatedNorm(Replacement):
    """The names of its two arguments; its eps or the attribute with it; what holds its groups; how
    it is computed.

    ``groups``: the attribute with the groups' size, or with their number if they are ``counted``;
    None without groups."""

    names: tuple[str, str]
    eps: str | float
    groups: str | None
    counted: bool
    activation: str
    norm_before_gate: bool
    casting: str = "gemma"
    flag, column = "rms_norm", "norms"
    one_argument, fusible = False, True

    @property
    def kernel(self):
        order = f"norm, {self.activation}" if self.norm_before_gate else f"{self.activation}, norm"
        return (
            f"liger_gated_rms_norm ({order}{' of groups' if self.groups else ''}, {self.casting})"
        )

    def attributes(self, eps, group_size, width):
        """Of a module with this eps and groups of this size."""
        found = {self.eps: eps} if isinstance(self.eps, str) else {}
        return found | (
            {self.groups: width // group_size if self.counted else group_size}
            if self.groups
            else {}
        )

    def group_size(self, module, width):
        """None if a row is one group, 0 if it has no such groups."""
        number = getattr(module, self.groups) if self.groups else 1
        if type(number) is not int or number < 1 or width % number:
            return 0
        size = width // number if self.counted or not self.groups else number
        return None if size == width else size

    def norm(self, function, x, gate, weight, eps, group_size):
        """The operator or its reference; a weight of another dtype comes last and promotes, if x̂
        is rounded before."""
        apart = weight.dtype != x.dtype and self.casting == "llama" and not self.norm_before_gate
        how = eps, self.casting, self.norm_before_gate, group_size, self.activation
        y = function(x, gate, None if apart else weight, *how)
        return y * weight if apart else y

    def members(self, cls):
        what = self

        def forward(self, *args, **kwargs):
            given = dict(zip(what.names, args, strict=False), **kwargs)
            x, gate = (given.get(name) for name in what.names)
            if len(args) + len(kwargs) == 2 and _fit(x, gate, self.weight):
                eps = getattr(self, what.eps) if isinstance(what.eps, str) else what.eps
                size = what.group_size(self, x.shape[-1])
                if size != 0 and isinstance(eps, (int, float)) and eps >= 0:
                    return what.norm(
                        functional.liger_gated_rms_norm, x, gate, self.weight, eps, size
                    )
            return cls.forward(self, *args, **kwargs)

        return {"forward": forward}


def _fit(x, gate, weight) -> bool:
    """Whether the operator does with these what the family's norm does."""
    if any(not plain(t) or t is None or t.dtype not in FLOATS for t in (x, gate, weight)):
        return False
    return x.dim() in (2, 3) and x.shape == gate.shape and weight.shape == x.shape[-1:]


def _arguments(module) -> tuple[str, ...]:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return tuple(
        p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD or p.default is p.empty
    )


@isolated()
def prove(module: torch.nn.Module, reads: Reads | None = None) -> GatedNorm | str:
    if (
        held_in(module._modules)
        or held_in(module._buffers)
        or held_in(module._parameters) != {"weight"}
    ):
        return "it holds more than a weight"
    reads = reads or Reads()
    epsilons, numbers = (
        [k for k, v in vars(module).items() if type(v) is kind] for kind in (float, int)
    )

    def run(x, gate, weight, make=shell, **attributes):
        return in_both_modes(
            lambda **mode: call(make(module, {"weight": weight}, **attributes, **mode), x, gate)
        )

    def agrees(what, test, tried):
        for eps, size in TRIED:
            one = functools.partial(run, **what.attributes(eps, size, WIDTH))
            eps, size = (
                eps if isinstance(what.eps, str) else what.eps,
                size if what.groups else None,
            )
            known = functools.partial(what.norm, gated_rms_norm_reference, eps=eps, group_size=size)
            if not all(test(one, known, given) for given in tried):
                return False
        return True

    x, weight = rows(4, 32, WIDTH), noise(WIDTH, seed=1)
    gate = noise(4, 32, WIDTH, seed=2) * torch.tensor((1.0, 10.0, 0.1, 300.0))[:, None, None]
    few = (x.abs() < 6e4).all(-1)  # what fp16 can hold
    wide = [t.bfloat16() for t in (x, gate, weight)]
    mixtures = [
        [t.to(dtype) for t, dtype in zip((x[few], gate[few], weight), dtypes, strict=True)]
        for dtypes in itertools.product(FLOATS, repeat=3)
    ]
    groups = (
        *itertools.product(numbers, (False, True)),
        (None, False),
    )  # last: a row may happen to be one group
    orders = itertools.product(ACTIVATIONS, (True, False))
    error, found = None, None
    for (name, counted), eps, order in itertools.product(groups, (*epsilons, *EPSILONS), orders):
        what = GatedNorm(_arguments(module), eps, name, counted, *order)
        try:
            found = what if agrees(what, same_gradients, [(x, gate, weight)]) else None
        except Exception as e:  # of groups that are none, say
            error = e
        if found:
            break
    else:
        return (
            f"it could not be tried: {first_line(error)}"
            if error
            else "it does not compute a gated RMSNorm"
        )
    for casting in ("llama", "gemma"):
        what = replace(found, casting=casting)
        if agrees(what, by(equal), [wide, *mixtures]):
            tried = what.attributes(*TRIED[0], WIDTH)
            try:
                reads.check(
                    *(
                        functools.partial(run, *given, **tried)
                        for given in ((x, gate, weight), wide)
                    )
                )
            except Exception as e:
                return f"it could not be tried: {first_line(e)}"
            return what
    return "it rounds elsewhere than the gated RMSNorms that are known"


class GatedNorms(Rewrite):
    flags = ("rms_norm",)
    prove = staticmethod(prove)

    def may_be(self, module):
        """It has a weight alone, and two arguments."""
        return (
            held_in(module._parameters) == {"weight"}
            and not module._modules
            and len(_arguments(module)) == 2
        )

    def leave(self, walk, module, why):
        if "norm" in type(module).__name__.lower():
            super().leave(walk, module, why)
