"""Norms: RMSNorm and LayerNorm of a row, by `liger_rms_norm` and `liger_layer_norm`."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from liger_kernel.core import devices
from liger_kernel.core.again import note
from liger_kernel.core.parallel import by_rows
from liger_kernel.ops import functional
from liger_kernel.ops.norm.layer_norm import layer_norm_reference
from liger_kernel.ops.norm.rms_norm import rms_norm_reference
from liger_kernel.patch.proof.conditions import plain
from liger_kernel.patch.proof.functions import mentions
from liger_kernel.patch.proof.parts import Reads, frozen
from liger_kernel.patch.proof.probe import (
    SIZE,
    by,
    call,
    close_in_rows,
    equal,
    first_line,
    held_in,
    in_both_modes,
    isolated,
    nearly_equal,
    noise,
    rows,
    same_gradients,
    shell,
    takes_one_tensor,
)
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

NAMES = "weight", "bias"
EPSILONS = (
    1e-5,
    1e-6,
    1e-8,
    1e-12,
    torch.finfo(torch.float32).eps,
)  # of norms that have theirs in their code
FLOATS = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Norm(Replacement):
    """RMSNorm: what is added to the weight, where it rounds (`liger_rms_norm`), its eps or the
    attribute with it.

    ``mixed``: it is also that with a weight of another dtype, which is multiplied last and promotes
    in "llama"."""

    offset: float
    casting: str
    eps: str | float
    weight: bool
    mixed: bool = True
    flag, column, fusible = "rms_norm", "norms", True

    @property
    def kernel(self):
        return f"liger_rms_norm ({self.casting}, offset {self.offset:g}{'' if self.weight else ', no weight'})"

    def members(self, cls):
        return {"forward": _rms_forward(cls, self)}


@dataclass(frozen=True)
class LayerNorm(Replacement):
    """LayerNorm: which attribute holds its eps, or what it is; which parameters it has."""

    eps: str | float
    weight: bool
    bias: bool
    flag, column, kernel, fusible = "layer_norm", "norms", "liger_layer_norm", True

    def members(self, cls):
        what, names = self, [name for name in NAMES if getattr(self, name)]

        def layer_norm(x, eps, *held):
            given = dict(zip(names, held, strict=True))
            return functional.liger_layer_norm(x, given.get("weight"), given.get("bias"), eps)

        def forward(self, hidden_states):
            weight, bias, eps = (
                self.weight if what.weight else None,
                self.bias if what.bias else None,
                _eps(self, what),
            )
            held = [p for p, wanted in ((weight, what.weight), (bias, what.bias)) if wanted]
            if not _fits(hidden_states, eps, held):
                y = _of_shards(layer_norm, hidden_states, eps, held)
                return cls.forward(self, hidden_states) if y is None else y
            y = functional.liger_layer_norm(hidden_states, weight, bias, eps)
            return note(y, functional.liger_layer_norm, hidden_states, weight, bias, options=(eps,))

        return {"forward": forward}


@isolated()
def prove(module: torch.nn.Module, reads: Reads | None = None) -> Norm | LayerNorm | str:
    normalises = isinstance(module, (torch.nn.RMSNorm, torch.nn.LayerNorm))
    if type(module).__module__.startswith("torch.nn.") and not normalises:
        return f"it is PyTorch's {type(module).__name__}"
    if not takes_one_tensor(type(module).forward):
        return "its forward takes more than one tensor"
    if (
        held_in(module._modules)
        or held_in(module._buffers)
        or held_in(module._parameters) - {*NAMES}
    ):
        return "it holds more than a weight and a bias"
    shape = module.__dict__.get("normalized_shape", (SIZE,))
    if not isinstance(shape, int) and len(shape) != 1:
        return "it normalises more than one dimension"
    held, reads = held_in(module._parameters), reads or Reads()
    epsilons = [name for name, value in module.__dict__.items() if isinstance(value, float)]
    own = dict(normalized_shape=(SIZE,)) if "normalized_shape" in module.__dict__ else {}
    if own:
        reads.found[(), "normalized_shape"] = type(shape), frozen(shape)

    def run(x, *given, make=shell, **attributes):
        given = dict(zip(NAMES, given, strict=True))
        parameters = {name: given[name] if name in held else None for name in module._parameters}
        return in_both_modes(
            lambda **mode: call(make(module, parameters, **own, **attributes, **mode), x)
        )

    def rms(offset, casting, eps, x, weight, bias):
        return rms_norm_reference(x, weight if "weight" in held else None, eps, offset, casting)

    def promoted(offset, eps, x, weight, bias):  # "llama" with a weight of another dtype
        return (weight + offset if offset else weight) * rms_norm_reference(x, None, eps)

    def centred(eps, x, *given):
        given = zip(NAMES, given, strict=True)
        return layer_norm_reference(x, *(p if name in held else None for name, p in given), eps)

    inputs = x, *parameters = rows(4, 32, SIZE), noise(SIZE, seed=1), noise(SIZE, seed=2)
    large = x, *(1e6 * p for p in parameters)
    few = x[(x.abs() < 6e4).all(-1)]  # what fp16 can hold
    halves = [
        [t.to(dtype) for t in (few, *parameters)] for dtype in (torch.bfloat16, torch.float16)
    ]
    halves[0][0] = x.bfloat16()
    pairs = itertools.permutations((torch.float32, torch.bfloat16, torch.float16), 2)
    mixtures = [[few.to(dtype), *(p.to(other) for p in parameters)] for dtype, other in pairs]

    def recognised(eps, values):
        """Its eps is the attribute ``eps``, which takes the values; or it is ``eps``, the only
        value."""
        runs = [
            functools.partial(run, **({eps: value} if isinstance(eps, str) else {}))
            for value in values
        ]

        def agree(formula, equal, tried):
            pairs = [
                (one, functools.partial(formula, value))
                for one, value in zip(runs, values, strict=True)
            ]
            return all(equal(one, known, given) for one, known in pairs for given in tried)

        def same(formula):
            return agree(formula, same_gradients, [inputs]) and agree(
                formula, by(close_in_rows), [large]
            )

        if same(centred):
            if agree(centred, by(nearly_equal), halves):
                return LayerNorm(eps, "weight" in held, "bias" in held)
            return "it rounds elsewhere than PyTorch's LayerNorm"
        if "bias" in held:
            return None
        for offset in (0.0, 1.0) if "weight" in held else (0.0,):
            if same(functools.partial(rms, offset, "gemma")):
                for casting in ("llama", "gemma"):
                    formula = functools.partial(rms, offset, casting)
                    if agree(formula, by(equal), halves):
                        if casting == "llama" and "weight" in held:
                            formula = functools.partial(promoted, offset)
                        mixed = not mentions(
                            type(module).forward, "rms_norm"
                        )  # PyTorch's has an autocast of its own
                        mixed = mixed and agree(formula, by(equal), mixtures)
                        return Norm(offset, casting, eps, "weight" in held, mixed)
                return "it rounds elsewhere than the RMSNorms that are known"
        return None

    try:
        reads.check(functools.partial(run, *inputs), functools.partial(run, *halves[0]))
        found = [recognised(name, (1e-3, 0.5)) for name in epsilons]
        found += [recognised(eps, (eps,)) for eps in EPSILONS] if not any(found) else []
    except Exception as error:
        return f"it could not be tried: {first_line(error)}"
    what = next(filter(None, found), "it does not compute an RMSNorm or a LayerNorm")
    if not isinstance(what, str):
        reads.found.pop(((), what.eps), None)  # read when it is called
    return what


def _eps(module, what):
    return getattr(module, what.eps) if isinstance(what.eps, str) else what.eps


def _fits(x, eps, parameters, mixed=False) -> bool:
    """Whether the operator does with these what the family's norm does; ``mixed``: of any dtypes,
    and in autocast."""
    if (
        not plain(x)
        or x.dtype not in FLOATS
        or x.dim() == 0
        or (not mixed and devices.in_autocast(x))
    ):
        return False
    for p in parameters:
        if (
            p is None
            or not plain(p)
            or p.shape != x.shape[-1:]
            or p.dtype not in (FLOATS if mixed else (x.dtype,))
        ):
            return False
    return isinstance(eps, (int, float)) and eps >= 0


def _of_shards(norm, x, eps, parameters):
    """``norm(x, eps, *parameters)`` of DTensors whose rows are whole, as in sequence parallelism;
    None for others."""
    if (
        torch.compiler.is_compiling()
        or not isinstance(x, torch.Tensor)
        or not hasattr(x, "device_mesh")
    ):
        return None
    return by_rows(
        lambda x, *held: norm(x, eps, *held) if _fits(x, eps, held) else None, x, *parameters
    )


def _rms_forward(cls, what):
    def rms_norm(x, eps, weight=None):
        return functional.liger_rms_norm(x, weight, eps, what.offset, what.casting)

    def forward(self, hidden_states):
        x, eps = hidden_states, _eps(self, what)
        weight = self.weight if what.weight else None
        held = [weight] if what.weight else []
        if not _fits(x, eps, held, what.mixed):
            y = _of_shards(rms_norm, x, eps, held)
            return cls.forward(self, x) if y is None else y
        # in some families rounding to x's dtype comes before the weight, whose dtype then counts
        apart = weight is not None and weight.dtype != x.dtype and what.casting == "llama"
        how = None if apart else weight, eps, what.offset, what.casting
        y = functional.liger_rms_norm(x, *how)
        y = note(y, functional.liger_rms_norm, x, how[0], options=how[1:])
        return (weight + what.offset if what.offset else weight) * y if apart else y

    return forward


class Norms(Rewrite):
    flags = "rms_norm", "layer_norm"
    prove = staticmethod(prove)

    def may_be(self, module):
        weight_alone = not module._modules and set(module._parameters) <= {"weight", "bias"}
        numbers = any(isinstance(value, float) for value in module.__dict__.values())
        return (
            not module._modules
            and "norm" in type(module).__name__.lower()
            or weight_alone
            and numbers
        )

    def leave(self, walk, module, why):
        if "norm" in type(module).__name__.lower():
            super().leave(walk, module, why)
