r"""Activations without a gate, ReLU² among them: y = act(x), dx = dy·act'(x).

    relu_squared:   y = max(x, 0)²,   dx = 2·max(x, 0)·dy

The formulas of the others and the kernels are in `pointwise`. They compute in fp32 and round once.
Only x is saved.

Source: ReLU² is So et al., Primer, arXiv:2109.08668.
"""

from __future__ import annotations

import functools

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, Function
from liger_kernel.ops.mlp.pointwise import glu_bwd, glu_fwd


def relu_squared_reference(x):
    return F.relu(x).square()


def quick_gelu_reference(x):
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {  # two GELUs by torch's names
    "silu": F.silu,
    "tanh": functools.partial(F.gelu, approximate="tanh"),
    "none": F.gelu,
    "quick": quick_gelu_reference,
    "relu": F.relu,
    "relu_squared": relu_squared_reference,
}


class LigerActivationFunction(Function):
    """``apply(x, act) -> act(x)``, contiguous; ``act`` is one of `ACTIVATIONS`."""

    @staticmethod
    def reference(x, act):
        return ACTIVATIONS[act](x)

    @staticmethod
    def forward(ctx, x, act):
        devices.require_kernels("LigerActivationFunction", x)
        ctx.save_for_backward(x)
        ctx.act = act
        return glu_fwd(x, None, act)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors, ctx.act

    @staticmethod
    def backward(ctx, dy):
        dx, _ = glu_bwd(dy, *ctx.saved_tensors, None, True, False, ctx.act)
        return dx, *[None] * (len(ctx.needs_input_grad) - 1)


class LigerReLUSquaredFunction(LigerActivationFunction):
    """``apply(X) -> max(X, 0)²``, contiguous."""

    @staticmethod
    def reference(X):
        return relu_squared_reference(X)

    @staticmethod
    def forward(ctx, X):
        devices.require_kernels("LigerReLUSquaredFunction", X)
        return LigerActivationFunction.forward(ctx, X, "relu_squared")

    @staticmethod
    def arguments(ctx):
        return ctx.saved_tensors


def liger_relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Compute ``max(x, 0)²``.

    Args:
        x: any shape and strides, fp32, bf16 or fp16.

    Returns:
        A contiguous tensor of x's shape and dtype, computed in fp32 and rounded once.

    Raises:
        TypeError: x is not of a floating dtype.

    Source: arXiv:2109.08668.
    """
    check.floats("liger_relu_squared", dict(x=x))
    if devices.has_kernels(x):
        return LigerReLUSquaredFunction.apply(x)
    return relu_squared_reference(x)


class LigerReLUSquared(torch.nn.Module):
    """`liger_relu_squared` as a module."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor):
        return liger_relu_squared(x)


def _traffic(inputs):
    size = inputs["x"].numel() * inputs["x"].element_size()
    return 2 * size, 3 * size


CASES.append(
    Case(
        "relu_squared",
        fn=liger_relu_squared,
        reference=relu_squared_reference,
        inputs=lambda *shape: dict(x=torch.randn(shape).requires_grad_()),
        shapes=((1, 8), (5, 123), (3, 1025)),
        bench=((8192, 14336),),
        traffic=_traffic,
    )
)
