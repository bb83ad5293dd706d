r"""xIELU and the linear layer behind it: the second half of Apertus's MLP.

    y = xIELU(x),   out = y·Wᵀ + bias

    dy = dout·W,   dW = doutᵀ·y,   dbias = Σ_rows dout;   dx, dalpha_p and dalpha_n from dy as in `xielu`

x and W are saved, but not y, which dW needs. In backward, the kernel that computes dx from dy also computes y and
writes it over dy. y is rounded once.

Source: Huang and Schlag, Deriving Activation Functions Using Integration, arXiv:2411.13010.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.op import CASES, Case, F, Function, matrix, may_overwrite
from liger_kernel.ops.mlp.activation_linear import fusible, product
from liger_kernel.ops.mlp.xielu import (
    LigerXIELUFunction,
    apart,
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
    """``apply(x, alpha_p, alpha_n, weight, bias=None, beta=0.5, eps=-1e-6) -> xIELU(x)·weightᵀ + bias``.

    x, weight and bias have one dtype, alpha_p, alpha_n and what is a tensor of beta and eps one element, and autocast
    is off: `xielu_before` handles the other cases.
    """

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


def xielu_linear(x, alpha_p, alpha_n, weight, bias=None, beta=0.5, eps=-1e-6):
    run = LigerXIELULinearFunction.apply if devices.has_kernels(x) else xielu_linear_reference
    return run(x, alpha_p, alpha_n, weight, bias, beta, eps)


def xielu_before(linear, x, alpha_p, alpha_n, beta, eps):
    """``linear(xIELU(x))`` where there are kernels, by `LigerXIELULinearFunction` if `fusible`."""
    if not fusible(x, None, linear):
        return linear(LigerXIELUFunction.apply(x, alpha_p, alpha_n, beta, eps))
    return LigerXIELULinearFunction.apply(x, alpha_p, alpha_n, linear.weight, linear.bias, beta, eps)


def _inputs(M, N, H):
    """beta and eps are in memory, as a model's are."""
    alpha_p, alpha_n = (torch.randn(1).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(H, N) / N**0.5).requires_grad_(), torch.randn(H).requires_grad_()
    given = dict(x=(2 * torch.randn(M, N)).requires_grad_(), alpha_p=alpha_p, alpha_n=alpha_n, weight=weight, bias=bias)
    return given | dict(beta=torch.tensor(0.5), eps=torch.tensor(-1e-6))


CASES.append(
    Case(
        "xielu_linear",
        fn=xielu_linear,
        reference=xielu_linear_reference,
        inputs=_inputs,
        shapes=((5, 123, 9), (2, 520, 24)),
        options=(dict(), dict(bias=None, beta=0.3, eps=-1e-3)),
        bench=((8192, 14336, 4096),),
        flops=lambda t: 6 * t["x"].numel() * t["weight"].shape[0],
    )
)
