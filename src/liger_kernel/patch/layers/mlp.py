"""Gated MLPs, ``down(act(gate)·up)``, by `liger_swiglu`, `liger_geglu` and
`liger_clamped_swiglu`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from liger_kernel.ops import functional
from liger_kernel.ops.mlp import activation_linear, swiglu_mlp
from liger_kernel.ops.mlp.glu import clamped_swiglu_reference
from liger_kernel.patch.layers.fan_out import FanOut, may_fan_out
from liger_kernel.patch.proof.conditions import is_the_compilers, large, plain
from liger_kernel.patch.proof.hooks import hooked
from liger_kernel.patch.proof.parts import Reads
from liger_kernel.patch.proof.probe import (
    INNER,
    SIZE,
    Stub,
    call,
    close,
    equal,
    first_line,
    held_in,
    in_both_modes,
    isolated,
    modes,
    noise,
    same_gradients,
    shell,
    takes_one_tensor,
)
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

PROJECTIONS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "gate_up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("input_linear", "input_linear", "output_linear"),
)
# by the names that `liger_kernel.ops.mlp.pointwise` gives them
ACTIVATIONS: tuple[tuple[str, Callable], ...] = (
    ("silu", F.silu),
    ("tanh", lambda x: F.gelu(x, approximate="tanh")),
    ("none", F.gelu),
)


class Clamped(NamedTuple):
    """SwiGLU with limits, in the place of an activation's name; see `liger_clamped_swiglu`."""

    limit: float
    alpha: float = 1.0
    shift: float = 0.0

    def __call__(self, a, b):
        if not plain(a, b) or a.dtype != b.dtype:
            return clamped_swiglu_reference(a, b, *self)
        return functional.liger_clamped_swiglu(a, b, *self)


@dataclass(frozen=True)
class Gated(Replacement):
    """``act(gate)·up``."""

    act: str | Clamped
    column = "MLPs"

    @property
    def flag(self):
        return "geglu" if self.act in ("tanh", "none") else "swiglu"

    @property
    def kernel(self):
        if isinstance(self.act, Clamped):
            return "liger_clamped_swiglu"
        return {
            "silu": "liger_swiglu",
            "tanh": "liger_geglu (tanh)",
            "none": "liger_geglu (exact)",
        }[self.act]


@dataclass(frozen=True)
class GLU(Gated):
    """``down(act(gate)·up)``; gate and up are one projection where ``gate`` and ``up`` name the
    same module."""

    gate: str
    up: str
    down: str
    fusible = True

    def members(self, cls):
        what = self
        projections = what.gate, what.up, what.down

        # The projections are called unless all they do is multiply: they may be quantised, sharded,
        # or carry a LoRA.
        def forward(self, x):
            if is_the_compilers(x):
                return cls.forward(self, x)
            modules = self._modules
            for name, module in modules.items():
                if (
                    name not in projections and module is not None and hooked(module, called=False)
                ):  # the activation
                    return cls.forward(self, x)
            gate, up, down = (modules.get(name) or getattr(self, name) for name in projections)
            if what.gate == what.up:
                a, b = gate(x).chunk(2, dim=-1)
            else:
                if not isinstance(what.act, Clamped) and not large(
                    x
                ):  # one node: what it saves is the host's time
                    out = swiglu_mlp.by_layers(x, gate, up, down, what.act)
                    if out is not None:
                        return out
                if may_fan_out(x, (gate, up)):
                    fan = FanOut(x)
                    a, b = (fan.linear(layer.weight, layer.bias) for layer in (gate, up))
                else:
                    a, b = gate(x), up(x)
            if isinstance(what.act, Clamped):
                return down(what.act(a, b))
            return activation_linear.gated_linear(a, b, what.act, down)

        return {"forward": forward}


def parted(gate_up, interleaved=False):
    return (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)


def gates(module) -> list[tuple[str | Clamped, Callable]]:
    """What may be between the layers: for each the activation, and the function of gate and up."""

    def gate(function):
        return lambda a, b: function(a) * b

    found = [(act, gate(function)) for act, function in ACTIVATIONS]
    limit, alpha = (_number(module, name, f"swiglu_{name}") for name in ("limit", "alpha"))
    if limit:
        clamps = [Clamped(limit), *([Clamped(limit, alpha, 1.0)] if alpha else [])]
        found += [(it, lambda a, b, it=it: clamped_swiglu_reference(a, b, *it)) for it in clamps]
    return found


def _number(module, *names) -> float | None:
    """The first of its attributes by these names that is a positive number."""
    values = (module.__dict__.get(name) for name in names)
    return next(
        (float(x) for x in values if type(x) in (int, float) and 0 < x < float("inf")), None
    )


def projections_of(module, known) -> tuple[str, ...] | None:
    """Those of the ``known`` names that are its layers."""
    children = held_in(module._modules)
    return next((names for names in known if set(names) <= children), None)


def has_more(module, projections) -> str | None:
    """What it holds beside its projections and an activation."""
    if held_in(module._parameters) or held_in(module._buffers):
        return "it holds parameters beside its projections"
    others = sorted(held_in(module._modules) - set(projections))
    layers = [name for name in others if next(module._modules[name].parameters(), None) is not None]
    return f"it has further layers: {', '.join(layers)}" if layers else None


def with_layers(module, sizes):
    """``run(x)`` of the module with layers of ours, of (out, in) ``sizes``, and ``linear(name, x)``
    of these."""
    weights = {
        name: (noise(*size, seed=i), noise(size[0], seed=i + 10))
        for i, (name, size) in enumerate(sizes.items())
    }
    others = {
        name: child
        for name, child in module._modules.items()
        if child is not None and name not in sizes
    }

    def linear(name, h):
        return F.linear(h, *(t.to(h.dtype) for t in weights[name]))

    def run(x, make=shell):
        stubs = {name: Stub(name, functools.partial(linear, name)) for name in weights}
        return in_both_modes(
            lambda **mode: call(make(module, {}, {**modes(others, **mode), **stubs}, **mode), x)
        )

    return run, linear


@isolated()
def prove(module: torch.nn.Module, reads: Reads | None = None) -> GLU | str:
    reads = reads or Reads()
    projections = projections_of(module, PROJECTIONS)
    if projections is None or not takes_one_tensor(type(module).forward):
        return "it is not made of gate, up and down projections"
    more = has_more(module, projections)
    if more is not None:
        return more
    gate, up, down = projections
    fused = gate == up
    inner = (2 if fused else 1) * INNER
    run, linear = with_layers(module, {gate: (inner, SIZE), up: (inner, SIZE), down: (SIZE, INNER)})

    def formula(act, x):
        a, b = parted(linear(gate, x)) if fused else (linear(gate, x), linear(up, x))
        return linear(down, act(a, b))

    known = [
        (GLU(act, *projections), functools.partial(formula, function))
        for act, function in gates(module)
    ]
    return first_equal(
        run, known, noise(8, SIZE, seed=20), "down(act(gate)·up)", "SiLU or GELU", reads
    )


def first_equal(run, known, x, name, activations, reads):
    """The first of the ``known`` kinds whose formula ``run(x)`` is, with its gradient, and rounded
    as it; or why none is. ``name`` and ``activations``: what the formulas are, in words."""
    why = f"it does not compute {name} with {activations}"
    x = x * 10.0 ** torch.arange(-2, len(x) - 2)[:, None]  # some clamp what is large
    lows = x.bfloat16(), x[:4].half()
    try:
        reads.check(functools.partial(run, x), functools.partial(run, lows[0]))
        got = run(x)
        for kind, formula in known:
            if close(got, formula(x)):
                if not same_gradients(run, formula, [x]):
                    return f"it has another gradient than {name}"
                if all(equal(run(low), formula(low)) for low in lows):
                    return kind
                why = f"it rounds elsewhere than {name}"
    except Exception as error:
        return f"it could not be tried: {first_line(error)}"
    return why


class GatedMLPs(Rewrite):
    flags = "swiglu", "geglu"
    prove = staticmethod(prove)

    def may_be(self, module):
        name, children = type(module).__name__.lower(), set(module._modules)
        return (
            "mlp" in name
            or "experts" in name
            or any(set(names) <= children for names in PROJECTIONS)
        )
