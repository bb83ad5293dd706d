"""The activations that an MLP of tokens or of experts may have, by the names that our operators
give them: "silu", "tanh" (GELU by tanh), "none" (exact GELU), "relu_squared" and "quick".

A trial compares an MLP with each of them. In 16 bits the functions round as those of PyTorch or of
transformers do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from liger_kernel.ops import functional
from liger_kernel.ops.mlp.activation import quick_gelu_reference, relu_squared_reference
from liger_kernel.ops.mlp.glu import clamped_swiglu_reference
from liger_kernel.patch.proof.conditions import are_plain_tensors
from liger_kernel.patch.proof.functions import resolve_global

SQRT_2_OVER_PI = (2 / math.pi) ** 0.5
ACTIVATION_LABELS = {
    "silu": "SiLU",
    "tanh": "tanh GELU",
    "none": "exact GELU",
    "quick": "quick GELU",
    "relu_squared": "ReLU²",
}


def _tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


# transformers' GELUs that are computed in several steps, and round after each


def _tanh_gelu_in_steps(x):
    return 0.5 * x * (1.0 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3)))


def _fast_gelu_in_steps(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _exact_gelu_in_steps(x):
    return x * 0.5 * (1.0 + torch.erf(x / 2**0.5))


GATE_ACTIVATIONS: tuple[tuple[str, Callable], ...] = (
    ("silu", F.silu),
    ("tanh", _tanh_gelu),
    ("none", F.gelu),
)
# Those in several steps round more often than the kernel. ReLU is not among them: of PyTorch's, the
# output alone is kept, which is what the layer behind it keeps, too.
UNGATED_ACTIVATIONS = (
    *GATE_ACTIVATIONS,
    ("relu_squared", relu_squared_reference),
    ("quick", quick_gelu_reference),
    ("tanh", _tanh_gelu_in_steps),
    ("tanh", _fast_gelu_in_steps),
    ("none", _exact_gelu_in_steps),
)


class ClampedSwiGLU(NamedTuple):
    """SwiGLU with limits, in the place of an activation's name; see `liger_clamped_swiglu`."""

    limit: float
    alpha: float = 1.0
    shift: float = 0.0

    def __call__(self, gate, up):
        if not are_plain_tensors(gate, up) or gate.dtype != up.dtype:
            return clamped_swiglu_reference(gate, up, *self)
        return functional.liger_clamped_swiglu(gate, up, *self)


def split_gate_up(gate_up, interleaved=False):
    """Split the output of a fused projection into gate and up: halves, or every other column."""
    if interleaved:
        return gate_up[..., ::2], gate_up[..., 1::2]
    return gate_up.chunk(2, dim=-1)


def glu_candidates(module) -> list[tuple[str | ClampedSwiGLU, Callable]]:
    """List the GLUs that a gated MLP may compute: each activation, and its function of (gate, up).

    SwiGLU with limits is among them if the module has a limit.
    """

    def glu_of(activation):
        return lambda gate, up: activation(gate) * up

    def clamped_glu_of(clamped):
        return lambda gate, up: clamped_swiglu_reference(gate, up, *clamped)

    candidates = [(name, glu_of(activation)) for name, activation in GATE_ACTIVATIONS]
    limit = _positive_number(module, "limit", "swiglu_limit")
    alpha = _positive_number(module, "alpha", "swiglu_alpha")
    if limit:
        clamped = ClampedSwiGLU(limit)
        candidates.append((clamped, clamped_glu_of(clamped)))
        if alpha:
            clamped = ClampedSwiGLU(limit, alpha, shift=1.0)
            candidates.append((clamped, clamped_glu_of(clamped)))
    return candidates


def _positive_number(module, *names) -> float | None:
    """Return the first of the module's attributes by these names that is a positive number."""
    for name in names:
        value = module.__dict__.get(name)
        if type(value) in (int, float) and 0 < value < float("inf"):
            return float(value)
    return None


# ---- a table that a user may change ----


class ActivationTable(NamedTuple):
    """transformers' dict ``ACT2FN``, in which some forwards look up an activation at every call.

    Attributes:
        table: the dict, or an empty one where the forward has none.
        at_proof: what it had then for the names that the forward may look up.
    """

    table: dict
    at_proof: dict

    @classmethod
    def of(cls, function, names) -> ActivationTable:
        """Return the table that a forward, or a function, reads, with what it has for ``names``."""
        table = resolve_global(function, "ACT2FN")
        if not isinstance(table, dict):
            return cls({}, {})
        return cls(table, {name: table.get(name) for name in names})

    def is_unchanged(self, *names) -> bool:
        """Return True if the table has for these names, or for all, what it had at the proof."""
        names = names or self.at_proof
        return all(self.table.get(name) is self.at_proof.get(name) for name in names)
