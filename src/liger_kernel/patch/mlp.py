"""Gated MLPs, ``down(act(gate)·up)``, and stacked experts, by `liger_swiglu` and `liger_geglu`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from liger_kernel.ops import functional
from liger_kernel.ops.mlp import glu
from liger_kernel.patch.deferred import hooked, is_the_compilers, plain, shared
from liger_kernel.patch.functions import mentions
from liger_kernel.patch.parts import Reads
from liger_kernel.patch.probe import (
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
from liger_kernel.patch.rewrite import Kind, Rewrite

GATE = "_apply_gate"  # the method of stacked experts
PROJECTIONS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "gate_up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("input_linear", "input_linear", "output_linear"),
)
# by the names that `liger_kernel.ops.mlp.glu` gives them
ACTIVATIONS: dict[str, Callable] = {
    "silu": F.silu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "none": F.gelu,
}


@dataclass(frozen=True)
class Gated(Kind):
    """``act(gate)·up``."""

    act: str
    column = "MLPs"

    @property
    def flag(self):
        return "swiglu" if self.act == "silu" else "geglu"

    @property
    def kernel(self):
        return {"silu": "liger_swiglu", "tanh": "liger_geglu (tanh)", "none": "liger_geglu (exact)"}[self.act]


@dataclass(frozen=True)
class GLU(Gated):
    """``down(act(gate)·up)``; gate and up are one projection where ``gate`` and ``up`` name the same module."""

    gate: str
    up: str
    down: str

    def members(self, cls):
        what = self
        projections = what.gate, what.up, what.down

        # The projections are called, all three: they may be quantised, sharded, or carry a LoRA.
        def forward(self, x):
            others = (m for name, m in self._modules.items() if name not in projections)  # the activation is called
            if is_the_compilers(x) or hooked(*others):
                return cls.forward(self, x)
            gate, up = getattr(self, what.gate), getattr(self, what.up)
            if what.gate == what.up:
                a, b = gate(x).chunk(2, dim=-1)
            else:
                x = shared(x, (gate, up))
                a, b = gate(x), up(x)
            return glu.gated_linear(a, b, what.act, getattr(self, what.down))

        return {"forward": forward}


@dataclass(frozen=True)
class Experts(Gated):
    """Stacked weights with ``act(gate)·up`` in a method of its own, `GATE`, whose argument is gate beside up."""

    method = GATE

    @property
    def kernel(self):
        return f"{super().kernel} of stacked experts"

    def members(self, cls):
        what = self

        def _apply_gate(self, gate_up):
            if not plain(gate_up) or is_the_compilers(gate_up):
                return cls._apply_gate(self, gate_up)
            a, b = gate_up.chunk(2, dim=-1)
            return functional.liger_swiglu(a, b) if what.act == "silu" else functional.liger_geglu(a, b, what.act)

        return {GATE: _apply_gate}


@isolated()
def _glu(module, reads) -> GLU | str:
    children = held_in(module._modules)
    projections = next((names for names in PROJECTIONS if set(names) <= children), None)
    if projections is None or not takes_one_tensor(type(module).forward):
        return "it is not made of gate, up and down projections"
    if held_in(module._parameters) or held_in(module._buffers):
        return "it holds parameters beside its projections"
    others = {name: module._modules[name] for name in children - set(projections)}
    if any(next(other.parameters(), None) is not None for other in others.values()):
        return f"it has further layers: {', '.join(sorted(others))}"
    gate, up, down = projections
    fused = gate == up
    weights = {gate: (2 if fused else 1) * INNER, up: (2 if fused else 1) * INNER, down: SIZE}
    weights = {
        name: (noise(out, SIZE if out != SIZE else INNER, seed=i), noise(out, seed=i + 10))
        for i, (name, out) in enumerate(weights.items())
    }

    def linear(name, h):
        return F.linear(h, *(t.to(h.dtype) for t in weights[name]))

    def run(x, make=shell):
        stubs = {name: Stub(name, functools.partial(linear, name)) for name in weights}
        return in_both_modes(lambda **mode: call(make(module, {}, {**modes(others, **mode), **stubs}, **mode), x))

    def formula(act, x):
        a, b = linear(gate, x).chunk(2, -1) if fused else (linear(gate, x), linear(up, x))
        return linear(down, act(a) * b)

    x = noise(8, SIZE, seed=20)
    return _gated(run, formula, x, "down(act(gate)·up)", lambda act: GLU(act, *projections), reads)


@isolated()
def _experts(module, reads) -> Experts | str:
    gate = getattr(type(module), GATE, None)
    if gate is None or not takes_one_tensor(gate):
        return "its experts' weights are stacked, and its forward computes act(gate)·up itself"
    has_gate = getattr(module, "has_gate", True)
    reads.found[(), "has_gate"] = ("absent", None) if "has_gate" not in vars(module) else (type(has_gate), has_gate)
    if not has_gate:
        return "its experts have no gate"
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    forward = type(module).forward
    used = inspect.getclosurevars(forward)
    implementations = used.nonlocals.get("experts_interface") or used.globals.get("ALL_EXPERTS_FUNCTIONS", {})
    if not mentions(implementations.get(implementation, forward), GATE):
        return f"with experts_implementation={implementation!r} it computes act(gate)·up elsewhere than in {GATE}"

    def run(x, make=shell):
        return in_both_modes(lambda **mode: gate(make(module, {}, modes(module._modules, **mode), **mode), x))

    def formula(act, x):
        a, b = x.chunk(2, -1)
        return act(a) * b

    return _gated(run, formula, noise(8, 2 * INNER, seed=20), "act(gate)·up", Experts, reads)


def _gated(run, formula, x, name, kind, reads):
    """``kind(act)`` if ``run(x)`` is ``formula(act, x)``, with its gradient, and rounded as it; or why not."""
    x = x * 10.0 ** torch.arange(-2, len(x) - 2)[:, None]  # some clamp what is large
    lows = x.bfloat16(), x[:4].half()
    try:
        reads.check(functools.partial(run, x), functools.partial(run, lows[0]))
        got = run(x)
        for act, function in ACTIVATIONS.items():
            known = functools.partial(formula, function)
            if close(got, known(x)):
                if not same_gradients(run, known, [x]):
                    return f"it has another gradient than {name}"
                if not all(equal(run(low), known(low)) for low in lows):
                    return f"it rounds elsewhere than {name}"
                return kind(act)
    except Exception as error:
        return f"it could not be tried: {first_line(error)}"
    return f"it does not compute {name} with SiLU or GELU"


def prove(module: torch.nn.Module, reads: Reads | None = None) -> Gated | str:
    stacked = any(p is not None and name.endswith("_proj") for name, p in module._parameters.items())
    return (_experts if stacked else _glu)(module, reads or Reads())


class GatedMLPs(Rewrite):
    flags = "swiglu", "geglu"
    prove = staticmethod(prove)

    def may_be(self, module):
        name, children = type(module).__name__.lower(), set(module._modules)
        return "mlp" in name or "experts" in name or any(set(names) <= children for names in PROJECTIONS)
