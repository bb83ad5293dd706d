"""Gated MLPs, by `liger_swiglu`, `liger_geglu` and `liger_clamped_swiglu`.

Recognised are modules with gate, up and down projections by the names in `PROJECTIONS` that compute

    down(act(gate(x))·up(x))       act: SiLU, GELU by tanh, exact GELU, or SwiGLU with limits

where gate and up may be one projection. The projections themselves are called, for they may be
quantised, sharded or carry a LoRA; those that do nothing but multiply are computed together with
the activation. In a graph of torch.compile, small inputs are left to the compiler.

An MLP is left alone if it holds other weights, does something else in training than in evaluation
(dropout), or has another formula, gradient or rounding. Hooks on its activation bring the family's
forward back."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from liger_kernel.ops.mlp import activation_linear, swiglu_mlp
from liger_kernel.patch.layers import adapters
from liger_kernel.patch.layers.activations import ClampedSwiGLU, glu_candidates, split_gate_up
from liger_kernel.patch.layers.fan_out import FanOut, can_fan_out
from liger_kernel.patch.layers.mlp_trial import (
    find_matching_formula,
    find_projections,
    probe_with_projections,
    reason_has_more,
)
from liger_kernel.patch.proof.conditions import is_large, left_to_compiler
from liger_kernel.patch.proof.hooks import has_hooks_within
from liger_kernel.patch.proof.parts import ReadRecorder
from liger_kernel.patch.proof.probe import (
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    isolated,
    noise,
    takes_one_tensor,
)
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

PROJECTIONS = (  # what families call (gate, up, down)
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "gate_up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("input_linear", "input_linear", "output_linear"),
)


@dataclass(frozen=True)
class GatedActivation(Replacement):
    """``act(gate)·up``."""

    act: str | ClampedSwiGLU
    column = "MLPs"

    @property
    def flag(self):
        return "geglu" if self.act in ("tanh", "none") else "swiglu"

    @property
    def kernel(self):
        if isinstance(self.act, ClampedSwiGLU):
            return "liger_clamped_swiglu"
        return {
            "silu": "liger_swiglu",
            "tanh": "liger_geglu (tanh)",
            "none": "liger_geglu (exact)",
        }[self.act]


@dataclass(frozen=True)
class GatedMLP(GatedActivation):
    """``down(act(gate)·up)``, with the names of the projections. ``gate`` and ``up`` are the same
    name where they are one projection."""

    gate: str
    up: str
    down: str
    fusible = True
    adopts_adapters = True

    def class_members(self, cls):
        mlp = self
        projections = mlp.gate, mlp.up, mlp.down

        def forward(self, x):
            if left_to_compiler(x):
                return cls.forward(self, x)
            adapters.adopt(self)
            modules = self._modules
            for name, module in modules.items():
                is_activation = name not in projections and module is not None
                if is_activation and has_hooks_within(module):
                    return cls.forward(self, x)
            gate, up, down = (modules.get(name) or getattr(self, name) for name in projections)
            if mlp.gate == mlp.up:
                a, b = gate(x).chunk(2, dim=-1)
            else:
                if not isinstance(mlp.act, ClampedSwiGLU):
                    output = adapters.gated_mlp_with_adapters(x, gate, up, down, mlp.act)
                    if output is not None:
                        return output
                if not isinstance(mlp.act, ClampedSwiGLU) and not is_large(x):
                    # one autograd node for the whole MLP: what it saves is the host's time
                    output = swiglu_mlp.gated_mlp_of_layers(x, gate, up, down, mlp.act)
                    if output is not None:
                        return output
                if can_fan_out(x, (gate, up)):
                    fan_out = FanOut(x)
                    a = fan_out.linear(gate.weight, gate.bias)
                    b = fan_out.linear(up.weight, up.bias)
                else:
                    a, b = gate(x), up(x)
            if isinstance(mlp.act, ClampedSwiGLU):
                y = mlp.act(a, b)
            elif activation_linear.can_fuse(a, b, down):
                fused = activation_linear.LigerGLULinearFunction
                return fused.call(a, b, down.weight, down.bias, mlp.act)
            else:
                y = activation_linear.activation(a, b, mlp.act)
            del a, b  # without gradients these are the last references: free them before down runs
            return down(y)

        return {"forward": forward}


@isolated()
def prove(module: torch.nn.Module, reads: ReadRecorder | None = None) -> GatedMLP | str:
    """Return the gated MLP that the module computes, or the reason why it is left alone."""
    projections = find_projections(module, PROJECTIONS)
    if projections is None or not takes_one_tensor(type(module).forward):
        return "it is not made of gate, up and down projections"
    reason = reason_has_more(module, projections)
    if reason is not None:
        return reason
    gate, up, down = projections
    is_fused = gate == up
    gate_out_features = (2 if is_fused else 1) * INTERMEDIATE_SIZE
    shapes = {
        gate: (gate_out_features, HIDDEN_SIZE),
        up: (gate_out_features, HIDDEN_SIZE),
        down: (HIDDEN_SIZE, INTERMEDIATE_SIZE),
    }
    run, linear = probe_with_projections(module, shapes)

    def formula(glu, x):
        if is_fused:
            a, b = split_gate_up(linear(gate, x))
        else:
            a, b = linear(gate, x), linear(up, x)
        return linear(down, glu(a, b))

    candidates = [
        (GatedMLP(act, *projections), functools.partial(formula, glu))
        for act, glu in glu_candidates(module)
    ]
    x = noise(8, HIDDEN_SIZE, seed=20)
    return find_matching_formula(
        run, candidates, x, "down(act(gate)·up)", "SiLU or GELU", reads or ReadRecorder()
    )


class GatedMLPs(Rewrite):
    """Modules with "mlp" or "experts" in their name, or with projections by known names."""

    flags = "swiglu", "geglu"
    prove = staticmethod(prove)

    def could_apply(self, module):
        name, children = type(module).__name__.lower(), set(module._modules)
        return (
            "mlp" in name
            or "experts" in name
            or any(set(names) <= children for names in PROJECTIONS)
        )
