"""What a module can be proved to be (`probe`): by which kernel it is replaced, and which switch that belongs to.

``kernel`` is what a report says. The activations go by the names that `liger_kernel.ops.mlp.glu` gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable] = {
    "silu": F.silu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "none": F.gelu,
}


@dataclass(frozen=True)
class Norm:
    """RMSNorm: what is added to the weight, where it rounds (`liger_rms_norm`), its eps or the attribute with it.

    ``mixed``: it is also that with a weight of another dtype, which is multiplied last and promotes in "llama".
    """

    offset: float
    casting: str
    eps: str | float
    weight: bool
    mixed: bool = True
    flag = "rms_norm"

    @property
    def kernel(self):
        return f"liger_rms_norm ({self.casting}, offset {self.offset:g}{'' if self.weight else ', no weight'})"


@dataclass(frozen=True)
class LayerNorm:
    """LayerNorm: which attribute holds its eps, or what it is; which parameters it has."""

    eps: str | float
    weight: bool
    bias: bool
    flag, kernel = "layer_norm", "liger_layer_norm"


@dataclass(frozen=True)
class Gated:
    """``act(gate)·up``."""

    act: str

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


@dataclass(frozen=True)
class Experts(Gated):
    """Stacked weights with ``act(gate)·up`` in a method of its own, `probe.GATE`, whose argument is gate beside up."""

    @property
    def kernel(self):
        return f"{super().kernel} of stacked experts"


@dataclass(frozen=True)
class Rope:
    """An ``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)``, with the layout of `liger_rotary_pos_emb`.

    Or "half": as False, with tables that are half as wide, one column a pair. ``one``: it is given one tensor, as
    (x, cos, sin, unsqueeze_dim=1).
    """

    interleaved: bool | str
    one: bool = False
    flag = "rope"

    @property
    def kernel(self):
        layout = "half as wide tables" if self.interleaved == "half" else f"interleaved={self.interleaved}"
        return "liger_rotary_pos_emb" + (f" ({layout})" if self.interleaved else "")


@dataclass(frozen=True)
class HeadNorm:
    """A norm of queries or keys, which waits for RoPE."""

    norm: Norm
    flag, kernel = "rms_norm", "liger_norm_rope"


@dataclass(frozen=True)
class Block:
    """A layer that goes on when it is given a `Stream` as its argument ``stream``, which its norms read."""

    stream: str
    norms: int
    flag = "rms_norm"

    @property
    def kernel(self):
        return f"liger_fused_add_rms_norm ({self.norms} a layer)"


@dataclass(frozen=True)
class CausalLM:
    """A model with a head and a loss function: `loss_in_head.fused_forward`."""

    flag = "fused_linear_cross_entropy"
