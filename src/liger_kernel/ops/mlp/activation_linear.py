r"""An activation, gated or not, and the linear layer behind it: the second half of an MLP.

    y = act(gm·a)·b, or y = act(a) in an MLP without a gate;   out = y·Wᵀ + bias

    dy = dout·W,   dW = doutᵀ·y,   dbias = Σ_rows dout;   da and db from dy as in `pointwise`

a, b and W are saved, but not y, which dW needs. In backward, the kernel that computes da and db
from dy also computes y and writes it over dy. y is rounded once, where Hugging Face rounds act(a),
and then the product.

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

import torch
from torch.nn.modules import module as _modules

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, Function, matrix, may_overwrite
from liger_kernel.ops.mlp.activation import ACTIVATIONS, LigerActivationFunction
from liger_kernel.ops.mlp.glu import (
    check_pair,
    geglu_reference,
    liger_geglu,
    liger_swiglu,
    pair,
    swiglu_reference,
)
from liger_kernel.ops.mlp.pointwise import glu_bwd, glu_bwd_and_product, glu_bwd_over, glu_fwd

GATES = "silu", "tanh", "none"  # two GELUs by torch's names
PLAIN = frozenset(
    (torch.Tensor, torch.nn.Parameter)
)  # what a kernel can read: no subclass such as DTensor
LINEAR_FORWARD, MODULE_CALL = torch.nn.Linear.forward, torch.nn.Module.__call__


def glu_linear_reference(a, b, weight, bias=None, act="silu", gate_multiplier=1.0):
    return F.linear(_in_pytorch(a, b, act, gate_multiplier), weight, bias)


def activation_linear_reference(x, weight, bias=None, act="silu"):
    return F.linear(ACTIVATIONS[act](x), weight, bias)


def _in_pytorch(a, b, act, gm):
    if b is None:
        return ACTIVATIONS[act](a)
    return swiglu_reference(a, b, gm) if act == "silu" else geglu_reference(a, b, act)


class LigerGLULinearFunction(Function):
    """``apply(a, b, weight, bias=None, act="silu", gate_multiplier=1.0) -> (act(a)·b)·weightᵀ +
    bias``.

    Without a gate b is None. All tensors have one dtype, and autocast is off: `liger_glu_linear`
    and `liger_activation_linear` handle the other cases. The multiplier is SiLU's alone."""

    reference = staticmethod(glu_linear_reference)

    @staticmethod
    def forward(ctx, a, b, weight, bias=None, act="silu", gate_multiplier=1.0):
        devices.require_kernels("LigerGLULinearFunction", a)
        if b is not None:
            check_pair("LigerGLULinearFunction", a, b)
        need_dy, need_dw = (
            ctx.needs_input_grad[0] or ctx.needs_input_grad[1],
            ctx.needs_input_grad[2],
        )
        ctx.save_for_backward(*((a, b, weight, bias) if need_dy or need_dw else (None,) * 4))
        ctx.options = act, float(gate_multiplier)
        return product(glu_fwd(a, b, *ctx.options), weight, bias)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors, *ctx.options

    @classmethod
    def again(cls, ctx, dout):
        if any(ctx.needs_input_grad[:3]):
            return super().again(ctx, dout)
        return (
            None,
            None,
            None,
            matrix(dout).sum(0),
            None,
            None,
        )  # only the bias needs a gradient: nothing is saved

    @staticmethod
    def backward(ctx, dout):
        a, b, weight, _ = ctx.saved_tensors
        need_da, need_db, need_dw, need_dbias = ctx.needs_input_grad[:4]
        over_a = need_da and a.is_contiguous() and may_overwrite(ctx, a)
        over_b = need_db and b.is_contiguous() and may_overwrite(ctx, b)
        dout = matrix(dout)
        da = db = y = None
        if need_da or need_db:
            dy = torch.mm(dout, weight)
            if torch.compiler.is_compiling() and need_dw:
                da, db, y = glu_bwd_and_product(dy, a, b, need_da, need_db, *ctx.options)
                y = matrix(y)
            elif torch.compiler.is_compiling():
                da, db = glu_bwd(dy, a, b, need_da, need_db, *ctx.options)
            else:
                y = dy if need_dw else None
                da, db = glu_bwd_over(dy, a, b, need_da, need_db, over_a, over_b, *ctx.options, y=y)
        if need_dw and y is None:
            y = matrix(glu_fwd(a, b, *ctx.options))
        dw = torch.mm(dout.t(), y) if need_dw else None
        dbias = dout.sum(0) if need_dbias else None
        return da if need_da else None, db if need_db else None, dw, dbias, None, None


def product(y, weight, bias):
    """The linear layer, within a Function's forward."""
    if bias is None or y.dim() == 2:
        return F.linear(y, weight, bias)
    out = F.linear(
        matrix(y), weight, bias
    )  # for more dimensions it returns a view, and autograd does not let
    return torch.ops.aten._unsafe_view(
        out, (*y.shape[:-1], out.shape[-1])
    )  # the caller write to one


def _activated(a, b, act, gm):
    """act(gm·a)·b, in plain PyTorch if a tensor is of a subclass (such as DTensor) or the dtypes
    differ."""
    if type(a) not in PLAIN or (b is not None and (type(b) not in PLAIN or a.dtype != b.dtype)):
        return _in_pytorch(a, b, act, gm)
    if b is None:
        return (
            LigerActivationFunction.apply(a, act) if devices.has_kernels(a) else ACTIVATIONS[act](a)
        )
    return liger_swiglu(a, b, gm) if act == "silu" else liger_geglu(a, b, act)


def fuses(a, b, weight, bias):
    """Whether `LigerGLULinearFunction` can be used, and saves less memory for backward than the two
    operators."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad  # else y is not saved anyway
        and (
            a.requires_grad or (b is not None and b.requires_grad)
        )  # else they are not saved, and y is no larger
        and type(a) in PLAIN
        and (b is None or (type(b) in PLAIN and b.dtype == a.dtype))
        and type(weight) in PLAIN
        and (
            bias is None
            or (type(bias) in PLAIN and bias.dtype == a.dtype and bias.device == a.device)
        )
        and a.dtype == weight.dtype
        and a.device == weight.device
        and devices.has_kernels(a)
        and not torch.is_autocast_enabled(a.device.type)
    )


def _checked(name, a, b, weight, bias, act, acts):
    if act not in acts:
        raise ValueError(f"{name}: act is {act!r}, give one of {', '.join(acts)}")
    check_layer(name, a, b, weight, bias)


def check_layer(name, a, b, weight, bias):
    first = dict(x=a) if b is None else dict(a=a, b=b)
    check.floats(name, first | dict(weight=weight), bias=bias)
    if weight.dim() != 2 or a.dim() == 0 or weight.shape[1] != a.shape[-1]:
        given = f"weight has shape {tuple(weight.shape)}, {next(iter(first))} {tuple(a.shape)}"
        raise ValueError(f"{name}: {given}, give (H, F) and (..., F)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}, give ({weight.shape[0]},)")


def _linear(a, b, weight, bias, act, gm=1.0):
    if not fuses(a, b, weight, bias):
        return F.linear(_activated(a, b, act, gm), weight, bias)
    return LigerGLULinearFunction.call(a, b, weight, bias, act, gm)


def liger_glu_linear(
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: str = "silu",
    gate_multiplier: float = 1.0,
) -> torch.Tensor:
    """``linear(act(a)·b, weight, bias)``. It saves a, b and weight for backward, but not the input
    of the linear.

    Args:
        a, b: (..., F) gate and up projection, of one shape and dtype: fp32, bf16 or fp16, any
        strides.
        weight, bias: (H, F) and (H,) of the linear layer.
        act: "silu", "tanh" (GELU) or "none" (exact GELU).
        gate_multiplier: of a, with "silu" alone, as in Falcon-H1.

    Returns:
        (..., H), in their dtype. The two operators run one after the other if memory cannot be
        saved
        (under autocast, without a GPU, with mixed dtypes) or none would be (the weight is frozen).

    Raises:
        ValueError: an unknown activation; a multiplier with another than SiLU; shapes that do not
        fit. TypeError,
            RuntimeError: as the two operators.

    Source: arXiv:2002.05202.
    """
    name = "liger_glu_linear"
    _checked(name, a, b, weight, bias, act, GATES)
    gate_multiplier = check.finite(name, "gate_multiplier", gate_multiplier)
    if act != "silu" and gate_multiplier != 1:
        raise ValueError(
            f"{name}: gate_multiplier is {gate_multiplier} with act {act!r}, give it with 'silu' alone"
        )
    check_pair(name, a, b)
    return _linear(a, b, weight, bias, act, gate_multiplier)


def liger_activation_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, act: str = "silu"
) -> torch.Tensor:
    """``linear(act(x), weight, bias)``. It saves x and weight for backward, but not the input of
    the linear.

    Args:
        x: (..., F), fp32, bf16 or fp16, any strides.
        weight, bias: (H, F) and (H,) of the linear layer.
        act: "silu", "tanh" (GELU), "none" (exact GELU), "quick" (GELU as x·σ(1.702·x)), "relu" or
        "relu_squared".

    Returns:
        (..., H), in x's dtype. Activation and linear run one after the other if memory cannot be
        saved (under autocast,
        without a GPU, with mixed dtypes) or none would be (the weight is frozen).

    Raises:
        ValueError: an unknown activation; shapes that do not fit. TypeError: not of a floating
        dtype. RuntimeError: as
            `torch.nn.functional.linear`.
    """
    _checked("liger_activation_linear", x, None, weight, bias, act, ACTIVATIONS)
    return _linear(x, None, weight, bias, act)


def only_multiplies(linear):
    """Whether calling this module is the same as `F.linear` with its weight and bias."""
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
            or _modules._has_any_global_hook()
        )
    )


def fusible(a, b, linear):
    """Whether a Function can multiply in the place of ``linear``, and saves less memory; b is None
    without a gate.

    FSDP, ZeRO-3, TP, PEFT, accelerate and quantisation change a layer's class, its forward, or the
    class or shape of its weight, or add hooks. Such a layer is called as it is."""
    if not only_multiplies(linear):
        return False
    weight = linear.weight
    whole = weight.shape == (
        linear.out_features,
        a.shape[-1],
    )  # ZeRO-3 and TP leave a shard, or an empty tensor
    return whole and (b is None or a.shape == b.shape) and fuses(a, b, weight, linear.bias)


def gated_linear(a, b, act, linear, gate_multiplier=1.0):
    """``linear(act(a)·b)``, by `LigerGLULinearFunction` if `fusible`; b is None without a gate.

    ``act`` is one of `GATES`, or of `ACTIVATIONS` without b.
    """
    if not fusible(a, b, linear):
        return linear(_activated(a, b, act, gate_multiplier))
    return LigerGLULinearFunction.call(a, b, linear.weight, linear.bias, act, gate_multiplier)


def _inputs_linear(M, F, H):
    weight, bias = torch.randn(H, F) / max(F, 1) ** 0.5, torch.randn(H)
    return pair(M, F) | dict(weight=weight.requires_grad_(), bias=bias.requires_grad_())


def _inputs_activation(M, F, H):
    inputs = _inputs_linear(M, F, H)
    del inputs["b"]
    return dict(x=inputs.pop("a")) | inputs


CASES.append(
    Case(
        "glu_linear",
        fn=liger_glu_linear,
        reference=glu_linear_reference,
        inputs=_inputs_linear,
        shapes=((1, 8, 8), (5, 123, 9), (2, 520, 24), (3, 1025, 4)),
        options=(dict(), dict(act="tanh"), dict(act="none"), dict(bias=None)),
        bench=((8192, 14336, 4096), (32768, 8192, 2048)),
        flops=lambda t: 6 * t["a"].numel() * t["weight"].shape[0],
    )
)
CASES.append(
    Case(
        "activation_linear",
        fn=liger_activation_linear,
        reference=activation_linear_reference,
        inputs=_inputs_activation,
        shapes=((5, 123, 9), (2, 520, 24)),
        options=(
            dict(act="relu_squared"),
            dict(act="tanh", bias=None),
            dict(act="quick"),
            dict(act="relu"),
        ),
        bench=((8192, 14336, 4096),),
        flops=lambda t: 6 * t["x"].numel() * t["weight"].shape[0],
    )
)
