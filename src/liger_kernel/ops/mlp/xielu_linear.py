r"""xIELU and the linear layer behind it: the second half of Apertus's MLP.

    y = xIELU(x),   out = y·Wᵀ + bias

    dy = dout·W,   dW = doutᵀ·y,   dbias = Σ_rows dout;   dx, dalpha_p and dalpha_n from dy as in `xielu`

x and W are saved, but not y, which dW needs. In backward, the kernel that computes dx from dy also
computes y and writes it over dy. y is rounded once.

Source: Huang and Schlag, Deriving Activation Functions Using Integration, arXiv:2411.13010.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.op import CASES, Case, F, Function, matrix, may_overwrite
from liger_kernel.ops.mlp.activation_linear import check_layer, fuses, fusible, product
from liger_kernel.ops.mlp.xielu import (
    LigerXIELUFunction,
    apart,
    checked,
    liger_xielu,
    together,
    xielu_bwd,
    xielu_bwd_and_product,
    xielu_bwd_over,
    xielu_fwd,
    xielu_reference,
)


def xielu_linear_reference(x, alpha_p, alpha_n, weight, bias=None, beta=0.5, eps=-1e-6):
    return F.linear(xielu_reference(x, alpha_p, alpha_n, beta, eps), weight, bias)


class LigerXIELULinearFunction(Function):
    """``apply(x, alpha_p, alpha_n, weight, bias=None, beta=0.5, eps=-1e-6) -> xIELU(x)·weightᵀ +
    bias``.

    x, weight and bias have one dtype, alpha_p, alpha_n and what is a tensor of beta and eps one
    element, and autocast is off: `liger_xielu_linear` handles the other cases."""

    reference = staticmethod(xielu_linear_reference)

    @staticmethod
    def forward(ctx, x, alpha_p, alpha_n, weight, bias=None, beta=0.5, eps=-1e-6):
        devices.require_kernels("LigerXIELULinearFunction", x)
        beta, eps, *held = apart(beta, eps)
        ctx.save_for_backward(x, alpha_p, alpha_n, weight, bias, *held)
        ctx.numbers = beta, eps
        return product(xielu_fwd(x.contiguous(), alpha_p, alpha_n, beta, eps, *held), weight, bias)

    @staticmethod
    def arguments(ctx):
        *tensors, beta_in, eps_in = ctx.saved_tensors
        return *tensors, *together(*ctx.numbers, beta_in, eps_in)

    @staticmethod
    def backward(ctx, dout):
        x, alpha_p, alpha_n, weight, _, *held = ctx.saved_tensors
        *needs, need_dw, need_dbias = ctx.needs_input_grad[:5]
        over = needs[0] and x.is_contiguous() and may_overwrite(ctx, x)
        dout, x = matrix(dout), x.contiguous()
        numbers = alpha_p, alpha_n, *ctx.numbers, *held
        dx = dp = dn = y = None
        if any(needs):
            dy = torch.mm(dout, weight).view(x.shape)
            if torch.compiler.is_compiling() and need_dw:
                dx, dp, dn, y = xielu_bwd_and_product(x, dy, *numbers, *needs)
            elif torch.compiler.is_compiling():
                dx, dp, dn = xielu_bwd(x, dy, *numbers, *needs)
            else:
                y = dy if need_dw else None
                dx, dp, dn = xielu_bwd_over(x, dy, *numbers, *needs, over_x=over, y=y)
        if need_dw and y is None:
            y = xielu_fwd(x, *numbers)
        dw = torch.mm(dout.t(), matrix(y)) if need_dw else None
        dbias = dout.sum(0) if need_dbias else None
        found = (d if need else None for d, need in zip((dx, dp, dn), needs, strict=True))
        return *found, dw, dbias, None, None


def liger_xielu_linear(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    beta: float | torch.Tensor = 0.5,
    eps: float | torch.Tensor = -1e-6,
) -> torch.Tensor:
    """``linear(xIELU(x), weight, bias)``. It saves x and weight for backward, but not the input of
    the linear.

    Args:
        x: (..., F), fp32, bf16 or fp16, any strides.
        weight, bias: (H, F) and (H,) of the linear layer.
        alpha_p, alpha_n, beta, eps: as in `liger_xielu`.

    Returns:
        (..., H), in x's dtype. xIELU and linear run one after the other if memory cannot be saved
        (under autocast,
        without a GPU, with mixed dtypes) or none would be (the weight is frozen).

    Raises:
        ValueError, TypeError: as `liger_xielu`; shapes that do not fit. RuntimeError: as
        `torch.nn.functional.linear`.

    Source: arXiv:2411.13010.
    """
    name = "liger_xielu_linear"
    beta, eps = checked(name, x, alpha_p, alpha_n, beta, eps)
    check_layer(name, x, None, weight, bias)
    if not fuses(x, None, weight, bias):
        return F.linear(liger_xielu(x, alpha_p, alpha_n, beta, eps), weight, bias)
    return LigerXIELULinearFunction.call(x, alpha_p, alpha_n, weight, bias, beta, eps)


def xielu_before(linear, x, alpha_p, alpha_n, beta, eps):
    """``linear(xIELU(x))`` of a module where there are kernels; in one node if `fusible`."""
    if not fusible(x, None, linear):
        return linear(LigerXIELUFunction.call(x, alpha_p, alpha_n, beta, eps))
    return LigerXIELULinearFunction.call(x, alpha_p, alpha_n, linear.weight, linear.bias, beta, eps)


def _inputs(M, N, H):
    """beta and eps are in memory, as a model's are."""
    alpha_p, alpha_n = (torch.randn(1).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(H, N) / N**0.5).requires_grad_(), torch.randn(H).requires_grad_()
    given = dict(
        x=(2 * torch.randn(M, N)).requires_grad_(),
        alpha_p=alpha_p,
        alpha_n=alpha_n,
        weight=weight,
        bias=bias,
    )
    return given | dict(beta=torch.tensor(0.5), eps=torch.tensor(-1e-6))


CASES.append(
    Case(
        "xielu_linear",
        fn=liger_xielu_linear,
        reference=xielu_linear_reference,
        inputs=_inputs,
        shapes=((5, 123, 9), (2, 520, 24)),
        options=(dict(), dict(bias=None, beta=0.3, eps=-1e-3)),
        bench=((8192, 14336, 4096),),
        flops=lambda t: 6 * t["x"].numel() * t["weight"].shape[0],
        fp32_roundings=2,
    )
)
