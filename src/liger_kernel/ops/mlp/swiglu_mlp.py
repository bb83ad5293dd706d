r"""A whole SwiGLU MLP, on its weights.

    a = x·Wgᵀ,   b = x·Wuᵀ,   out = dm·((silu(gm·a)·b)·Wdᵀ)

It is made of the linear layers and of `liger_glu_linear`: x, a and b are saved, silu(gm·a)·b is not. a and b are
rounded to x's dtype, as in Hugging Face, and silu(gm·a)·b once.

Source: arXiv:2002.05202; the multipliers are those of Falcon-H1, arXiv:2507.22448.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F
from liger_kernel.ops.mlp.activation_linear import liger_glu_linear
from liger_kernel.ops.mlp.glu import swiglu_reference
from liger_kernel.ops.mlp.modules import LigerSwiGLUMLP


def swiglu_mlp_reference(input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0):
    out = swiglu_reference(input @ gate_weight.t(), input @ up_weight.t(), gate_multiplier) @ down_weight.t()
    return out if down_multiplier == 1 else out * down_multiplier


class LigerMLPFunction:
    """``apply(input (..., D), gate_weight (F, D), up_weight (F, D), down_weight (D, F), ...)``: `liger_swiglu_mlp`."""

    @staticmethod
    def apply(input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0):
        name = "LigerMLPFunction"
        return _mlp(name, input, gate_weight, up_weight, down_weight, gate_multiplier, down_multiplier)


def liger_swiglu_mlp(
    input: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor,
    gate_multiplier: float = 1.0, down_multiplier: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """``down_multiplier·((silu(gate_multiplier·x·Wgᵀ)·(x·Wuᵀ))·Wdᵀ)`` for x = input.

    Args:
        input: (..., D), fp32, bf16 or fp16.
        gate_weight, up_weight: (F, D), of the same dtype.
        down_weight: (D, F), of the same dtype.
        gate_multiplier, down_multiplier: numbers, as in Falcon-H1.

    Returns:
        (..., D), in that dtype.

    Raises:
        TypeError: the dtypes differ or are not floating, a multiplier is not a number. ValueError: shapes that do not
            fit; tensors on several devices.
    """
    name = "liger_swiglu_mlp"
    return _mlp(name, input, gate_weight, up_weight, down_weight, gate_multiplier, down_multiplier)


def _mlp(name, input, gate_weight, up_weight, down_weight, gate_multiplier, down_multiplier):
    weights = dict(gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    check.floats(name, dict(input=input, **weights))
    if input.dim() == 0:
        raise ValueError(f"{name}: input has no dimension, give (..., D)")
    for argument, weight in weights.items():
        if weight.dtype != input.dtype and not devices.in_autocast(input):
            raise TypeError(f"{name}: input is {input.dtype}, {argument} {weight.dtype}, cast one of them")
    inner = gate_weight.shape[0] if gate_weight.dim() else 0
    check.shape(name, "gate_weight", gate_weight, (inner, input.shape[-1]))
    check.shape(name, "up_weight", up_weight, (inner, input.shape[-1]))
    if down_weight.dim() != 2 or down_weight.shape[1] != inner:
        raise ValueError(f"{name}: down_weight has shape {tuple(down_weight.shape)}, give (D, {inner})")
    gate_multiplier = check.finite(name, "gate_multiplier", gate_multiplier)
    down_multiplier = check.finite(name, "down_multiplier", down_multiplier)
    a, b = F.linear(input, gate_weight), F.linear(input, up_weight)
    out = liger_glu_linear(a, b, down_weight, gate_multiplier=gate_multiplier)
    return out if down_multiplier == 1 else out * down_multiplier


class LigerMLP(LigerSwiGLUMLP):
    """`liger_swiglu_mlp` as a module. It reads the weights of its layers and does not call these: hooks and adapters on
    them have no effect, which `LigerSwiGLUMLP` heeds.
    """

    gate_multiplier = down_multiplier = 1.0

    def __init__(self, config: object) -> None:
        if getattr(config, "mlp_bias", False):
            name = type(self).__name__
            raise ValueError(f"{name}: the config's mlp_bias is {config.mlp_bias!r}, give False: it has no biases")
        super().__init__(config)

    def forward(self, x: torch.Tensor):
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        return LigerMLPFunction.apply(x, *weights, self.gate_multiplier, self.down_multiplier)


class LigerFalconH1MLP(LigerMLP):
    """`LigerMLP` with the two ``mlp_multipliers`` of the config."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers


def _inputs(M, D, F):
    weights = dict(gate_weight=(F, D), up_weight=(F, D), down_weight=(D, F))
    drawn = {name: (torch.randn(shape) / shape[1] ** 0.5).requires_grad_() for name, shape in weights.items()}
    return dict(input=torch.randn(M, D).requires_grad_()) | drawn


CASES.append(
    Case(
        "swiglu_mlp",
        fn=liger_swiglu_mlp,
        reference=swiglu_mlp_reference,
        inputs=_inputs,
        shapes=((1, 8, 16), (5, 24, 123)),
        options=(dict(), dict(gate_multiplier=0.7, down_multiplier=1.3)),
        bench=((8192, 4096, 14336),),
        flops=lambda t: 18 * t["input"].numel() * t["gate_weight"].shape[0],
    )
)
