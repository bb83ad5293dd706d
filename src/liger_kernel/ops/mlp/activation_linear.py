r"""An activation, gated or not, and the linear layer after it: the second half of an MLP.

    y = act(gm·a)·b, or y = act(a) in an MLP without a gate;   out = y·Wᵀ + bias

    dy = dout·W,   dW = doutᵀ·y,   dbias = Σ_rows dout;   da and db from dy as in `pointwise`

a, b and W are saved, but not y, which dW needs. In backward, the kernel that computes da and db
from dy also computes y and writes it over dy. y is rounded once, where Hugging Face rounds act(a),
and then the product. Where a checkpoint with early stop keeps nothing behind out, it does not
compute out again.

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

import torch
from torch.nn.modules import module as nn_module

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, Function, flatten_to_2d, linear_output
from liger_kernel.core.overwrite import may_overwrite
from liger_kernel.core.saved import save_early, saving_node
from liger_kernel.ops.mlp.activation import ACTIVATIONS, LigerActivationFunction
from liger_kernel.ops.mlp.glu import (
    check_pair,
    geglu_reference,
    glu_inputs,
    liger_geglu,
    liger_swiglu,
    swiglu_reference,
)
from liger_kernel.ops.mlp.pointwise import glu_bwd, glu_bwd_and_product, glu_bwd_over, glu_fwd

GATED_ACTIVATIONS = "silu", "tanh", "none"  # two GELUs by torch's names
# classes of tensors that a kernel can read: no subclass such as DTensor
PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
LINEAR_FORWARD, LINEAR = torch.nn.Linear.forward, torch._C._nn.linear
MODULE_CALL = torch.nn.Module.__call__


def glu_linear_reference(a, b, weight, bias=None, act="silu", gate_multiplier=1.0):
    return F.linear(_activation_reference(a, b, act, gate_multiplier), weight, bias)


def activation_linear_reference(x, weight, bias=None, act="silu"):
    return F.linear(ACTIVATIONS[act](x), weight, bias)


def _activation_reference(a, b, act, gm):
    if b is None:
        return ACTIVATIONS[act](a)
    return swiglu_reference(a, b, gm) if act == "silu" else geglu_reference(a, b, act)


class LigerGLULinearFunction(Function):
    """``apply(a, b, weight, bias=None, act="silu", gate_multiplier=1.0) -> (act(a)·b)·weightᵀ +
    bias``.

    Without a gate b is None. All tensors have one dtype, and autocast is off: `liger_glu_linear`
    and `liger_activation_linear` handle the other cases. Only SiLU has a multiplier.
    """

    reference = staticmethod(glu_linear_reference)

    @staticmethod
    def forward(ctx, a, b, weight, bias=None, act="silu", gate_multiplier=1.0):
        devices.require_kernels("LigerGLULinearFunction", a)
        if b is not None:
            check_pair("LigerGLULinearFunction", a, b)
        if any(ctx.needs_input_grad[:3]):
            save_early(ctx, a, b, weight, bias)
        else:  # the gradient of the bias needs no tensor
            save_early(ctx, None, None, None, None)
        ctx.options = act, float(gate_multiplier)
        return linear_output(glu_fwd(a, b, *ctx.options), weight, bias)

    @staticmethod
    def arguments(ctx):
        return *saving_node(ctx).saved_tensors, *ctx.options

    @classmethod
    def differentiable_backward(cls, ctx, dout):
        if any(ctx.needs_input_grad[:3]):
            return super().differentiable_backward(ctx, dout)
        # only the bias needs a gradient: nothing is saved
        return None, None, None, flatten_to_2d(dout).sum(0), None, None

    @staticmethod
    def backward(ctx, dout):
        node = saving_node(ctx)
        a, b, weight, _ = node.saved_tensors
        need_da, need_db, need_dw, need_dbias = ctx.needs_input_grad[:4]
        over_a = need_da and a.is_contiguous() and may_overwrite(node, a)
        over_b = need_db and b.is_contiguous() and may_overwrite(node, b)
        dout = flatten_to_2d(dout)
        da = db = y = None
        if need_da or need_db:
            dy = torch.mm(dout, weight)
            if torch.compiler.is_compiling() and need_dw:
                da, db, y = glu_bwd_and_product(dy, a, b, need_da, need_db, *ctx.options)
                y = flatten_to_2d(y)
            elif torch.compiler.is_compiling():
                da, db = glu_bwd(dy, a, b, need_da, need_db, *ctx.options)
            else:
                y = dy if need_dw else None
                da, db = glu_bwd_over(dy, a, b, need_da, need_db, over_a, over_b, *ctx.options, y=y)
        if need_dw and y is None:
            y = flatten_to_2d(glu_fwd(a, b, *ctx.options))
        dw = torch.mm(dout.t(), y) if need_dw else None
        dbias = dout.sum(0) if need_dbias else None
        return da if need_da else None, db if need_db else None, dw, dbias, None, None


def activation(a, b, act, gate_multiplier=1.0):
    """Compute act(gate_multiplier·a)·b.

    It is computed in plain PyTorch if a tensor is of a subclass (such as DTensor) or the dtypes
    differ.
    """
    if type(a) not in PLAIN_TENSORS or (
        b is not None and (type(b) not in PLAIN_TENSORS or a.dtype != b.dtype)
    ):
        return _activation_reference(a, b, act, gate_multiplier)
    if b is None:
        if devices.has_kernels(a):
            return LigerActivationFunction.apply(a, act)
        return ACTIVATIONS[act](a)
    return liger_swiglu(a, b, gate_multiplier) if act == "silu" else liger_geglu(a, b, act)


def can_fuse_tensors(a, b, weight, bias):
    """Return True if `LigerGLULinearFunction` can be used for these tensors, and saves memory.

    It saves memory for backward if the two operators would keep y: if the weight needs a gradient.
    If neither a nor b needs one, they are not saved, and y is no larger.
    """
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and (a.requires_grad or (b is not None and b.requires_grad))
        and type(a) in PLAIN_TENSORS
        and (b is None or (type(b) in PLAIN_TENSORS and b.dtype == a.dtype))
        and type(weight) in PLAIN_TENSORS
        and (
            bias is None
            or (type(bias) in PLAIN_TENSORS and bias.dtype == a.dtype and bias.device == a.device)
        )
        and a.dtype == weight.dtype
        and a.device == weight.device
        and devices.has_kernels(a)
        and not devices.in_autocast(a)
    )


def _check_activation(name, act, activations):
    if act not in activations:
        raise ValueError(f"{name}: act is {act!r}, give one of {', '.join(activations)}")


def check_layer(name, a, b, weight, bias):
    """Check the tensors. Without a gate b is None, and a is called x in messages."""
    inputs = dict(x=a) if b is None else dict(a=a, b=b)
    check.floats(name, inputs | dict(weight=weight), bias=bias)
    if weight.dim() != 2 or a.dim() == 0 or weight.shape[1] != a.shape[-1]:
        argument = "x" if b is None else "a"
        raise ValueError(
            f"{name}: weight has shape {tuple(weight.shape)}, {argument} {tuple(a.shape)}, "
            "give (H, F) and (..., F)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}, give ({weight.shape[0]},)")


def _activation_linear(a, b, weight, bias, act, gate_multiplier=1.0):
    if not can_fuse_tensors(a, b, weight, bias):
        return F.linear(activation(a, b, act, gate_multiplier), weight, bias)
    return LigerGLULinearFunction.call(a, b, weight, bias, act, gate_multiplier)


def liger_glu_linear(
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: str = "silu",
    gate_multiplier: float = 1.0,
) -> torch.Tensor:
    """Compute ``linear(act(a)·b, weight, bias)`` without saving the input of the linear layer.

    a, b and weight are saved for backward.

    Args:
        a, b: (..., F) gate and up projection, of one shape and dtype: fp32, bf16 or fp16, any
            strides.
        weight, bias: (H, F) and (H,) of the linear layer.
        act: "silu", "tanh" (GELU) or "none" (exact GELU).
        gate_multiplier: the factor of a, only with "silu", as in Falcon-H1.

    Returns:
        (..., H), in their dtype. The two operators run one after the other if memory cannot be
        saved (under autocast, without a GPU, with mixed dtypes) or none would be (the weight is
        frozen).

    Raises:
        ValueError: an unknown activation; a multiplier with another activation than SiLU; shapes do
            not fit.
        TypeError, RuntimeError: as the two operators.

    Source: arXiv:2002.05202.
    """
    name = "liger_glu_linear"
    _check_activation(name, act, GATED_ACTIVATIONS)
    check_layer(name, a, b, weight, bias)
    gate_multiplier = check.finite(name, "gate_multiplier", gate_multiplier)
    if act != "silu" and gate_multiplier != 1:
        raise ValueError(
            f"{name}: gate_multiplier is {gate_multiplier} with act {act!r}, "
            "give it with 'silu' alone"
        )
    check_pair(name, a, b)
    return _activation_linear(a, b, weight, bias, act, gate_multiplier)


def liger_activation_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, act: str = "silu"
) -> torch.Tensor:
    """Compute ``linear(act(x), weight, bias)`` without saving the input of the linear layer.

    x and weight are saved for backward.

    Args:
        x: (..., F), fp32, bf16 or fp16, any strides.
        weight, bias: (H, F) and (H,) of the linear layer.
        act: "silu", "tanh" (GELU), "none" (exact GELU), "quick" (GELU as x·σ(1.702·x)), "relu" or
            "relu_squared".

    Returns:
        (..., H), in x's dtype. Activation and linear layer run one after the other if memory cannot
        be saved (under autocast, without a GPU, with mixed dtypes) or none would be (the weight is
        frozen).

    Raises:
        ValueError: an unknown activation; shapes do not fit.
        TypeError: not of a floating dtype.
        RuntimeError: as `torch.nn.functional.linear`.
    """
    name = "liger_activation_linear"
    _check_activation(name, act, ACTIVATIONS)
    check_layer(name, x, None, weight, bias)
    return _activation_linear(x, None, weight, bias, act)


def is_plain_linear(linear):
    """Return True if calling this module is the same as `F.linear` with its weight and bias."""
    function = torch.nn.functional.linear  # as the layer looks it up
    module = getattr(function, "__module__", None)
    if function is not LINEAR and module != "deepspeed.runtime.zero.linear":
        return False
    cls = type(linear)
    return (
        (
            cls is torch.nn.Linear
            or (issubclass(cls, torch.nn.Linear) and not hasattr(cls, "weight"))
        )
        and cls.forward is LINEAR_FORWARD
        and cls.__call__ is MODULE_CALL
        and "forward" not in linear.__dict__
        and linear._compiled_call_impl is None
        and not (
            linear._forward_hooks
            or linear._forward_pre_hooks
            or linear._backward_hooks
            or linear._backward_pre_hooks
            or nn_module._has_any_global_hook()
        )
    )


def can_fuse(a, b, linear):
    """Return True if a Function can replace the call of ``linear``, and saves memory.

    Without a gate b is None. FSDP, ZeRO-3, TP, PEFT, accelerate and quantisation change a layer's
    class, its forward, or the class or shape of its weight, or add hooks. Such a layer is called as
    it is.
    """
    if not is_plain_linear(linear):
        return False
    weight = linear.weight
    if weight.shape != (linear.out_features, a.shape[-1]):
        return False  # ZeRO-3 and TP leave a shard, or an empty tensor
    return (b is None or a.shape == b.shape) and can_fuse_tensors(a, b, weight, linear.bias)


def gated_linear(a, b, act, linear, gate_multiplier=1.0):
    """Compute ``linear(act(a)·b)``, by `LigerGLULinearFunction` if `can_fuse`.

    Without a gate b is None. ``act`` is one of `GATED_ACTIVATIONS`, or of `ACTIVATIONS` without b.
    """
    if not can_fuse(a, b, linear):
        return linear(activation(a, b, act, gate_multiplier))
    return LigerGLULinearFunction.call(a, b, linear.weight, linear.bias, act, gate_multiplier)


def _glu_inputs(M, F, H):
    weight = (torch.randn(H, F) / max(F, 1) ** 0.5).requires_grad_()
    bias = torch.randn(H).requires_grad_()
    return glu_inputs(M, F) | dict(weight=weight, bias=bias)


def _activation_inputs(M, F, H):
    inputs = _glu_inputs(M, F, H)
    return dict(x=inputs["a"], weight=inputs["weight"], bias=inputs["bias"])


CASES.append(
    Case(
        "glu_linear",
        fn=liger_glu_linear,
        reference=glu_linear_reference,
        inputs=_glu_inputs,
        shapes=((1, 8, 8), (5, 123, 9), (2, 520, 24), (3, 1025, 4)),
        options=(dict(), dict(act="tanh"), dict(act="none"), dict(bias=None)),
        bench=((8192, 14336, 4096), (32768, 8192, 2048)),
        flops=lambda inputs: 6 * inputs["a"].numel() * inputs["weight"].shape[0],
    )
)
CASES.append(
    Case(
        "activation_linear",
        fn=liger_activation_linear,
        reference=activation_linear_reference,
        inputs=_activation_inputs,
        shapes=((5, 123, 9), (2, 520, 24)),
        options=(
            dict(act="relu_squared"),
            dict(act="tanh", bias=None),
            dict(act="quick"),
            dict(act="relu"),
        ),
        bench=((8192, 14336, 4096),),
        flops=lambda inputs: 6 * inputs["x"].numel() * inputs["weight"].shape[0],
    )
)
