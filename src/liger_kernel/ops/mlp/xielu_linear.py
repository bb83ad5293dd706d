r"""xIELU and the linear layer after it: the second half of Apertus's MLP.

    y = xIELU(x),   out = y·Wᵀ + bias

    dy = dout·W,   dW = doutᵀ·y,   dbias = Σ_rows dout
    dx, dalpha_p and dalpha_n from dy as in `xielu`

x and W are saved, but not y, which dW needs. In backward, the kernel that computes dx from dy also
computes y and writes it over dy. y is rounded once.

Source: Huang and Schlag, Deriving Activation Functions Using Integration, arXiv:2411.13010.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.op import CASES, Case, F, Function, flatten_to_2d, linear_output
from liger_kernel.core.overwrite import may_overwrite
from liger_kernel.core.saved import save_early, saving_node
from liger_kernel.ops.mlp.activation_linear import can_fuse, can_fuse_tensors, check_layer
from liger_kernel.ops.mlp.xielu import (
    LigerXIELUFunction,
    check_arguments,
    join_constants,
    liger_xielu,
    split_constants,
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

    x, weight and bias have one dtype, alpha_p and alpha_n one element, and autocast is off. beta
    and eps are numbers or tensors of one element. `liger_xielu_linear` handles the other cases.
    """

    reference = staticmethod(xielu_linear_reference)

    @staticmethod
    def forward(ctx, x, alpha_p, alpha_n, weight, bias=None, beta=0.5, eps=-1e-6):
        devices.require_kernels("LigerXIELULinearFunction", x)
        beta, eps, *tensors = split_constants(beta, eps)
        save_early(ctx, x, alpha_p, alpha_n, weight, bias, *tensors)
        ctx.numbers = beta, eps
        y = xielu_fwd(x.contiguous(), alpha_p, alpha_n, beta, eps, *tensors)
        return linear_output(y, weight, bias)

    @staticmethod
    def arguments(ctx):
        *inputs, beta_tensor, eps_tensor = saving_node(ctx).saved_tensors
        return *inputs, *join_constants(*ctx.numbers, beta_tensor, eps_tensor)

    @staticmethod
    def backward(ctx, dout):
        node = saving_node(ctx)
        x, alpha_p, alpha_n, weight, _, *tensors = node.saved_tensors
        *needs, need_dw, need_dbias = ctx.needs_input_grad[:5]
        over_x = needs[0] and x.is_contiguous() and may_overwrite(node, x)
        dout = flatten_to_2d(dout)
        x = x.contiguous()
        parameters = alpha_p, alpha_n, *ctx.numbers, *tensors
        dx = dp = dn = y = None
        if any(needs):
            dy = torch.mm(dout, weight).view(x.shape)
            if torch.compiler.is_compiling() and need_dw:
                dx, dp, dn, y = xielu_bwd_and_product(x, dy, *parameters, *needs)
            elif torch.compiler.is_compiling():
                dx, dp, dn = xielu_bwd(x, dy, *parameters, *needs)
            else:
                y = dy if need_dw else None
                dx, dp, dn = xielu_bwd_over(x, dy, *parameters, *needs, over_x=over_x, y=y)
        if need_dw and y is None:
            y = xielu_fwd(x, *parameters)
        dw = torch.mm(dout.t(), flatten_to_2d(y)) if need_dw else None
        dbias = dout.sum(0) if need_dbias else None
        grads = (d if need else None for d, need in zip((dx, dp, dn), needs, strict=True))
        return *grads, dw, dbias, None, None


def liger_xielu_linear(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    beta: float | torch.Tensor = 0.5,
    eps: float | torch.Tensor = -1e-6,
) -> torch.Tensor:
    """Compute ``linear(xIELU(x), weight, bias)`` without saving the input of the linear layer.

    x and weight are saved for backward.

    Args:
        x: (..., F), fp32, bf16 or fp16, any strides.
        weight, bias: (H, F) and (H,) of the linear layer.
        alpha_p, alpha_n, beta, eps: as in `liger_xielu`.

    Returns:
        (..., H), in x's dtype. xIELU and linear layer run one after the other if memory cannot be
        saved (under autocast, without a GPU, with mixed dtypes) or none would be (the weight is
        frozen).

    Raises:
        ValueError, TypeError: as `liger_xielu`; shapes do not fit.
        RuntimeError: as `torch.nn.functional.linear`.

    Source: arXiv:2411.13010.
    """
    name = "liger_xielu_linear"
    beta, eps = check_arguments(name, x, alpha_p, alpha_n, beta, eps)
    check_layer(name, x, None, weight, bias)
    if not can_fuse_tensors(x, None, weight, bias):
        return F.linear(liger_xielu(x, alpha_p, alpha_n, beta, eps), weight, bias)
    return LigerXIELULinearFunction.call(x, alpha_p, alpha_n, weight, bias, beta, eps)


def xielu_linear_module(linear, x, alpha_p, alpha_n, beta, eps):
    """Compute ``linear(xIELU(x))`` for an x that has kernels; in one node if `can_fuse`."""
    if not can_fuse(x, None, linear):
        return linear(LigerXIELUFunction.call(x, alpha_p, alpha_n, beta, eps))
    return LigerXIELULinearFunction.call(x, alpha_p, alpha_n, linear.weight, linear.bias, beta, eps)


def _inputs(M, N, H):
    """Return the inputs of a case. beta and eps are tensors, as a model's are."""
    alpha_p, alpha_n = (torch.randn(1).requires_grad_() for _ in range(2))
    weight = (torch.randn(H, N) / N**0.5).requires_grad_()
    bias = torch.randn(H).requires_grad_()
    return dict(
        x=(2 * torch.randn(M, N)).requires_grad_(),
        alpha_p=alpha_p,
        alpha_n=alpha_n,
        weight=weight,
        bias=bias,
        beta=torch.tensor(0.5),
        eps=torch.tensor(-1e-6),
    )


CASES.append(
    Case(
        "xielu_linear",
        fn=liger_xielu_linear,
        reference=xielu_linear_reference,
        inputs=_inputs,
        shapes=((5, 123, 9), (2, 520, 24)),
        options=(dict(), dict(bias=None, beta=0.3, eps=-1e-3)),
        bench=((8192, 14336, 4096),),
        flops=lambda inputs: 6 * inputs["x"].numel() * inputs["weight"].shape[0],
        fp32_roundings=2,
    )
)
