r"""A whole gated MLP, as a function of its weights.

    a = x·Wgᵀ,   b = x·Wuᵀ,   y = act(gm·a)·b,   out = dm·(y·Wdᵀ)

    dy = dout·Wd,   da and db from dy as in `pointwise`,   dx = db·Wu + da·Wg
    dWg = daᵀ·x,   dWu = dbᵀ·x,   dWd = doutᵀ·y

It is one autograd node. The host does not create the nodes of three linear layers and of their
transposed weights. The products of dx are added into one sum, rounded after each as autograd's is.
x, a and b are saved, y is not: see `activation_linear`. a and b are rounded to x's dtype, as in
Hugging Face, and y once. If a tensor needs no gradient, or under autocast or torch.compile, the MLP
is composed of the linear layers and of `liger_glu_linear`.

Source: arXiv:2002.05202; the multipliers are those of Falcon-H1, arXiv:2507.22448.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, Function, flatten_to_2d
from liger_kernel.core.overwrite import may_overwrite
from liger_kernel.core.saved import save_early, saving_node
from liger_kernel.ops.mlp.activation_linear import (
    PLAIN_TENSORS,
    glu_linear_reference,
    is_plain_linear,
    liger_glu_linear,
)
from liger_kernel.ops.mlp.glu import swiglu_reference
from liger_kernel.ops.mlp.modules import LigerSwiGLUMLP
from liger_kernel.ops.mlp.pointwise import glu_bwd_over, glu_fwd


def swiglu_mlp_reference(
    input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0
):
    y = swiglu_reference(input @ gate_weight.t(), input @ up_weight.t(), gate_multiplier)
    out = y @ down_weight.t()
    return out if down_multiplier == 1 else out * down_multiplier


class GatedMLP(Function):
    """``apply(x, gate_weight, up_weight, down_weight, act="silu", gate_multiplier=1.0) -> out``

    For tensors for which `can_use_gated_mlp` returns True.
    """

    @staticmethod
    def reference(x, gate, up, down, act="silu", gate_multiplier=1.0):
        a = F.linear(x, gate)
        b = F.linear(x, up)
        return glu_linear_reference(a, b, down, None, act, gate_multiplier)

    @staticmethod
    def forward(ctx, x, gate, up, down, act="silu", gate_multiplier=1.0):
        a = F.linear(x, gate)
        b = F.linear(x, up)
        save_early(ctx, x, gate, up, down, a, b)
        ctx.options = act, gate_multiplier
        return F.linear(glu_fwd(a, b, act, gate_multiplier), down)

    @staticmethod
    def arguments(ctx):
        return *saving_node(ctx).saved_tensors[:4], *ctx.options

    @staticmethod
    def backward(ctx, dout):
        node = saving_node(ctx)
        x, gate, up, down, a, b = node.saved_tensors
        over_a = may_overwrite(node, a, made_in_forward=True)
        over_b = may_overwrite(node, b, made_in_forward=True)
        shape = x.shape
        x = flatten_to_2d(x)
        dout = flatten_to_2d(dout)
        with devices.without_autocast(dout):  # backward may run within one that forward did not
            y = torch.mm(dout, down)  # dy, over which y is written
            da, db = glu_bwd_over(y, a, b, True, True, over_a, over_b, *ctx.options, y=y)
            d_down = torch.mm(dout.t(), y)
            del y
            da = flatten_to_2d(da)
            db = flatten_to_2d(db)
            d_up = torch.mm(db.t(), x)
            d_gate = torch.mm(da.t(), x)
            dx = torch.mm(db, up).addmm_(da, gate).view(shape)
            return dx, d_gate, d_up, d_down, None, None


def can_use_gated_mlp(x, gate, up, down) -> bool:
    """Return True if `GatedMLP` computes the same as the three linear layers.

    The tensors must be plain, of one dtype and of shapes that fit, and each must need a gradient.
    Autograd must be eager, and autocast off.
    """
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or type(x) not in PLAIN_TENSORS
        or x.dim() == 0
    ):
        return False
    dtype = x.dtype
    device = x.device
    for weight in (gate, up, down):
        if type(weight) not in PLAIN_TENSORS or weight.dtype != dtype or weight.device != device:
            return False
        if not weight.requires_grad or weight.dim() != 2:
            return False
    intermediate_size, hidden_size = gate.shape
    return (
        up.shape == (intermediate_size, hidden_size)
        and x.shape[-1] == hidden_size
        and down.shape[1] == intermediate_size
        and x.requires_grad
        and devices.has_kernels(x)
        and not devices.in_autocast(x)
    )


def gated_mlp_of_layers(x, gate, up, down, act) -> torch.Tensor | None:
    """Compute the MLP of these three linear layers by `GatedMLP`.

    Returns None if a layer may do more than multiply or has a bias, or if `can_use_gated_mlp`
    returns False.
    """
    weights = []
    for layer in (gate, up, down):
        parameters = layer._parameters  # an attribute in layer.__dict__ would hide one in here
        if (
            not is_plain_linear(layer)
            or parameters.get("bias", layer) is not None
            or "weight" in layer.__dict__
        ):
            return None
        weight = parameters.get("weight")
        # ZeRO-3 and TP leave a shard
        if weight is None or weight.shape != (layer.out_features, layer.in_features):
            return None
        weights.append(weight)
    return GatedMLP.apply(x, *weights, act, 1.0) if can_use_gated_mlp(x, *weights) else None


class LigerMLPFunction:
    """``apply(input, gate_weight, up_weight, down_weight, gate_multiplier=1.0,
    down_multiplier=1.0) -> out``

    The arguments of `liger_swiglu_mlp`.
    """

    @staticmethod
    def apply(input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0):
        weights = gate_weight, up_weight, down_weight
        return _swiglu_mlp("LigerMLPFunction", input, *weights, gate_multiplier, down_multiplier)


def liger_swiglu_mlp(
    input: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> torch.Tensor:
    """Compute ``down_multiplier·((silu(gate_multiplier·x·Wgᵀ)·(x·Wuᵀ))·Wdᵀ)`` for x = input.

    Args:
        input: (..., D), fp32, bf16 or fp16.
        gate_weight, up_weight: (F, D), of the same dtype.
        down_weight: (D, F), of the same dtype.
        gate_multiplier, down_multiplier: numbers, as in Falcon-H1.

    Returns:
        (..., D), in that dtype.

    Raises:
        TypeError: the dtypes differ or are not floating, a multiplier is not a number.
        ValueError: shapes do not fit; tensors are on several devices.
    """
    weights = gate_weight, up_weight, down_weight
    return _swiglu_mlp("liger_swiglu_mlp", input, *weights, gate_multiplier, down_multiplier)


def _swiglu_mlp(name, input, gate_weight, up_weight, down_weight, gate_multiplier, down_multiplier):
    weights = dict(gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    check.floats(name, dict(input=input, **weights))
    if input.dim() == 0:
        raise ValueError(f"{name}: input has no dimension, give (..., D)")
    for argument, weight in weights.items():
        if weight.dtype != input.dtype and not devices.in_autocast(input):
            raise TypeError(
                f"{name}: input is {input.dtype}, {argument} {weight.dtype}, cast one of them"
            )
    intermediate_size = gate_weight.shape[0] if gate_weight.dim() else 0
    check.shape(name, "gate_weight", gate_weight, (intermediate_size, input.shape[-1]))
    check.shape(name, "up_weight", up_weight, (intermediate_size, input.shape[-1]))
    if down_weight.dim() != 2 or down_weight.shape[1] != intermediate_size:
        raise ValueError(
            f"{name}: down_weight has shape {tuple(down_weight.shape)}, "
            f"give (D, {intermediate_size})"
        )
    gate_multiplier = check.finite(name, "gate_multiplier", gate_multiplier)
    down_multiplier = check.finite(name, "down_multiplier", down_multiplier)
    if can_use_gated_mlp(input, gate_weight, up_weight, down_weight):
        out = GatedMLP.apply(input, gate_weight, up_weight, down_weight, "silu", gate_multiplier)
    else:
        a = F.linear(input, gate_weight)
        b = F.linear(input, up_weight)
        out = liger_glu_linear(a, b, down_weight, gate_multiplier=gate_multiplier)
    return out if down_multiplier == 1 else out * down_multiplier


class LigerMLP(LigerSwiGLUMLP):
    """`liger_swiglu_mlp` as a module.

    It reads the weights of its layers and does not call the layers, so hooks and adapters on them
    have no effect. `LigerSwiGLUMLP` calls its layers if they have any.
    """

    gate_multiplier = down_multiplier = 1.0

    def __init__(self, config: object) -> None:
        if getattr(config, "mlp_bias", False):
            name = type(self).__name__
            raise ValueError(
                f"{name}: the config's mlp_bias is {config.mlp_bias!r}, give False: "
                "it has no biases"
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
    shapes = dict(gate_weight=(F, D), up_weight=(F, D), down_weight=(D, F))
    weights = {}
    for name, shape in shapes.items():
        weights[name] = (torch.randn(shape) / shape[1] ** 0.5).requires_grad_()
    return dict(input=torch.randn(M, D).requires_grad_()) | weights


CASES.append(
    Case(
        "swiglu_mlp",
        fn=liger_swiglu_mlp,
        reference=swiglu_mlp_reference,
        inputs=_inputs,
        shapes=((1, 8, 16), (5, 24, 123)),
        options=(dict(), dict(gate_multiplier=0.7, down_multiplier=1.3)),
        bench=((8192, 4096, 14336),),
        flops=lambda inputs: 18 * inputs["input"].numel() * inputs["gate_weight"].shape[0],
    )
)
