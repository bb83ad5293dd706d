r"""A whole gated MLP, on its weights.

    a = x·Wgᵀ,   b = x·Wuᵀ,   y = act(gm·a)·b,   out = dm·(y·Wdᵀ)

    dy = dout·Wd,   da and db from dy as in `pointwise`,   dx = db·Wu + da·Wg
    dWg = daᵀ·x,   dWu = dbᵀ·x,   dWd = doutᵀ·y

It is one node of autograd: the host is spared the nodes of three linear layers and of their
transposed weights, and the products of dx add to one sum, rounded after each as autograd's is. x, a
and b are saved, y is not: see `activation_linear`. a and b are rounded to x's dtype, as in Hugging
Face, and y once. If not everything has a gradient, or under autocast or torch.compile, it is made
of the linear layers and of `liger_glu_linear`.

Source: arXiv:2002.05202; the multipliers are those of Falcon-H1, arXiv:2507.22448.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, Function, matrix, may_overwrite
from liger_kernel.ops.mlp.activation_linear import (
    PLAIN,
    glu_linear_reference,
    liger_glu_linear,
    only_multiplies,
)
from liger_kernel.ops.mlp.glu import swiglu_reference
from liger_kernel.ops.mlp.modules import LigerSwiGLUMLP
from liger_kernel.ops.mlp.pointwise import glu_bwd_over, glu_fwd


def swiglu_mlp_reference(
    input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0
):
    out = (
        swiglu_reference(input @ gate_weight.t(), input @ up_weight.t(), gate_multiplier)
        @ down_weight.t()
    )
    return out if down_multiplier == 1 else out * down_multiplier


class GatedMLP(Function):
    """``apply(x, gate_weight, up_weight, down_weight, act="silu", gate_multiplier=1.0)`` where
    `is_one_node`."""

    @staticmethod
    def reference(x, gate, up, down, act="silu", gate_multiplier=1.0):
        return glu_linear_reference(
            F.linear(x, gate), F.linear(x, up), down, None, act, gate_multiplier
        )

    @staticmethod
    def forward(ctx, x, gate, up, down, act="silu", gate_multiplier=1.0):
        a, b = F.linear(x, gate), F.linear(x, up)
        ctx.save_for_backward(x, gate, up, down, a, b)
        ctx.options = act, gate_multiplier
        return F.linear(glu_fwd(a, b, act, gate_multiplier), down)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:4], *ctx.options

    @staticmethod
    def backward(ctx, dout):
        x, gate, up, down, a, b = ctx.saved_tensors
        over = may_overwrite(ctx, a, inner=True), may_overwrite(ctx, b, inner=True)
        shape, x, dout = x.shape, matrix(x), matrix(dout)
        with devices.without_autocast(dout):  # backward may run within one that forward did not
            y = torch.mm(dout, down)  # dy, over which y is written
            da, db = glu_bwd_over(y, a, b, True, True, *over, *ctx.options, y=y)
            d_down = torch.mm(dout.t(), y)
            del y
            da, db = matrix(da), matrix(db)
            d_up, d_gate = torch.mm(db.t(), x), torch.mm(da.t(), x)
            return torch.mm(db, up).addmm_(da, gate).view(shape), d_gate, d_up, d_down, None, None


def is_one_node(x, gate, up, down) -> bool:
    """Whether `GatedMLP` is these layers: plain tensors of one dtype that fit each other, each of
    which has a gradient, where eager autograd notes it and no autocast casts."""
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or type(x) not in PLAIN
        or x.dim() == 0
    ):
        return False
    dtype, device = x.dtype, x.device
    for weight in (gate, up, down):
        if type(weight) not in PLAIN or weight.dtype != dtype or weight.device != device:
            return False
        if not weight.requires_grad or weight.dim() != 2:
            return False
    inner, D = gate.shape
    fit = up.shape == (inner, D) and x.shape[-1] == D and down.shape[1] == inner
    return (
        fit
        and x.requires_grad
        and devices.has_kernels(x)
        and not torch.is_autocast_enabled(device.type)
    )


def by_layers(x, gate, up, down, act) -> torch.Tensor | None:
    """The MLP of these three linear layers by `GatedMLP`; None if one of them may do more than
    multiply, or has a bias, and where it is no `is_one_node`."""
    weights = []
    for layer in (gate, up, down):
        held = layer._parameters  # what a layer's attributes are found in last
        if (
            not only_multiplies(layer)
            or held.get("bias", layer) is not None
            or "weight" in layer.__dict__
        ):
            return None
        weight = held.get("weight")
        if weight is None or weight.shape != (
            layer.out_features,
            layer.in_features,
        ):  # ZeRO-3 and TP leave a shard
            return None
        weights.append(weight)
    return GatedMLP.apply(x, *weights, act, 1.0) if is_one_node(x, *weights) else None


class LigerMLPFunction:
    """``apply(input (..., D), gate_weight (F, D), up_weight (F, D), down_weight (D, F), ...)``:
    `liger_swiglu_mlp`."""

    @staticmethod
    def apply(input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0):
        name = "LigerMLPFunction"
        return _mlp(
            name, input, gate_weight, up_weight, down_weight, gate_multiplier, down_multiplier
        )


def liger_swiglu_mlp(
    input: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> torch.Tensor:
    """``down_multiplier·((silu(gate_multiplier·x·Wgᵀ)·(x·Wuᵀ))·Wdᵀ)`` for x = input.

    Args:
        input: (..., D), fp32, bf16 or fp16.
        gate_weight, up_weight: (F, D), of the same dtype.
        down_weight: (D, F), of the same dtype.
        gate_multiplier, down_multiplier: numbers, as in Falcon-H1.

    Returns:
        (..., D), in that dtype.

    Raises:
        TypeError: the dtypes differ or are not floating, a multiplier is not a number. ValueError:
        shapes that do not
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
            raise TypeError(
                f"{name}: input is {input.dtype}, {argument} {weight.dtype}, cast one of them"
            )
    inner = gate_weight.shape[0] if gate_weight.dim() else 0
    check.shape(name, "gate_weight", gate_weight, (inner, input.shape[-1]))
    check.shape(name, "up_weight", up_weight, (inner, input.shape[-1]))
    if down_weight.dim() != 2 or down_weight.shape[1] != inner:
        raise ValueError(
            f"{name}: down_weight has shape {tuple(down_weight.shape)}, give (D, {inner})"
        )
    gate_multiplier = check.finite(name, "gate_multiplier", gate_multiplier)
    down_multiplier = check.finite(name, "down_multiplier", down_multiplier)
    if is_one_node(input, gate_weight, up_weight, down_weight):
        out = GatedMLP.apply(input, gate_weight, up_weight, down_weight, "silu", gate_multiplier)
    else:
        a, b = F.linear(input, gate_weight), F.linear(input, up_weight)
        out = liger_glu_linear(a, b, down_weight, gate_multiplier=gate_multiplier)
    return out if down_multiplier == 1 else out * down_multiplier


class LigerMLP(LigerSwiGLUMLP):
    """`liger_swiglu_mlp` as a module. It reads the weights of its layers and does not call these:
    hooks and adapters on them have no effect, which `LigerSwiGLUMLP` heeds."""

    gate_multiplier = down_multiplier = 1.0

    def __init__(self, config: object) -> None:
        if getattr(config, "mlp_bias", False):
            name = type(self).__name__
            raise ValueError(
                f"{name}: the config's mlp_bias is {config.mlp_bias!r}, give False: it has no biases"
            )
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
    drawn = {
        name: (torch.randn(shape) / shape[1] ** 0.5).requires_grad_()
        for name, shape in weights.items()
    }
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
