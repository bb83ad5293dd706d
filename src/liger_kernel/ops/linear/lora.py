r"""A linear layer with a low-rank adapter (LoRA).

    y = x·Wᵀ + bias + scaling·(dropout(x)·Aᵀ)·Bᵀ + scaling·lora_bias

`frozen_layers` has the formulas of the gradients. Saved are x for dA, x·Aᵀ, which is as narrow as
the rank, and the weights themselves.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv:2106.09685.
"""

from __future__ import annotations

import functools

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, cast_if_needed
from liger_kernel.ops.linear.fan_out import FanOut
from liger_kernel.ops.linear.frozen_layers import (
    Adapter,
    FrozenLayer,
    add_adapters_to,
    dense_weight,
    frozen_layers,
    linear_reference,
)


def lora_linear_reference(x, weight, a, b, scaling=1.0, bias=None, lora_bias=None, dropout=0.0):
    y = F.linear(x, weight, bias)
    return y + F.linear(F.linear(F.dropout(x, dropout), a), b, lora_bias) * scaling


def liger_lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float = 1.0,
    bias: torch.Tensor | None = None,
    lora_bias: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute a linear layer and a low-rank adapter: ``x·weightᵀ + bias + scaling·(D(x)·aᵀ·bᵀ +
    lora_bias)``, where D is dropout.

    Everything is computed in x's dtype, or autocast's where it is on. Gradients of a, b and
    lora_bias are in their own dtype; on NVIDIA fp32 ones are not rounded to 16 bits before.

    Args:
        x: (..., K), fp32, bf16 or fp16.
        weight, bias: (N, K) and (N,), frozen or not, of x's dtype; under autocast of any.
        a, b: (r, K) and (N, r), of any floating dtype.
        scaling: a number, in PEFT alpha / r.
        lora_bias: (N,).
        dropout: the probability with which an entry of x is dropped, from 0 to 1. For evaluation
            give 0.

    Returns:
        (..., N), in x's dtype or autocast's.

    Raises:
        ValueError: shapes do not fit; dropout is not from 0 to 1.
        TypeError: not floating point; the weight has another dtype than x.

    Source: arXiv:2106.09685.
    """
    name = "liger_lora_linear"
    check.floats(name, dict(x=x, weight=weight, a=a, b=b), bias=bias, lora_bias=lora_bias)
    if weight.dim() != 2 or x.dim() == 0 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{name}: weight has shape {tuple(weight.shape)}, x {tuple(x.shape)}, "
            "give (N, K) and (..., K)"
        )
    out_features, in_features = weight.shape
    rank = a.shape[0] if a.dim() else 0
    check.shape(name, "a", a, (rank, in_features))
    check.shape(name, "b", b, (out_features, rank))
    check.shape(name, "bias", bias, (out_features,))
    check.shape(name, "lora_bias", lora_bias, (out_features,))
    scaling = check.finite(name, "scaling", scaling)
    dropout = check.fraction(name, "dropout", dropout)
    dtype = devices.autocast_dtype(x) or x.dtype
    if x.dtype == torch.float64:  # which autocast leaves as it is
        dtype = x.dtype
    if weight.dtype != dtype and (x.dtype == torch.float64 or not devices.in_autocast(x)):
        raise TypeError(f"{name}: x is {x.dtype}, weight {weight.dtype}, cast one of them")
    with devices.without_autocast(x):
        x, weight = cast_if_needed(x, dtype), cast_if_needed(weight, dtype)
        bias = None if bias is None else cast_if_needed(bias, dtype)
        lora_bias = None if lora_bias is None else lora_bias * scaling
        drop = functools.partial(F.dropout, p=dropout) if dropout else None
        adapter = Adapter(a, b, scaling, lora_bias, drop)
        return linear_with_adapters(x, weight, bias, (adapter,))


def linear_with_adapters(x, weight, bias=None, adapters=(), dequantize=None):
    """Compute a linear layer with adapters, whether it trains or not. Autocast is off; backward may
    run within it. Arguments as in `FrozenLayer`."""
    if torch.compiler.is_compiling():
        return linear_reference(x, dense_weight(weight, dequantize), bias, adapters)
    if weight.requires_grad or bias is not None and bias.requires_grad:
        fan_out = FanOut(x)
        return add_adapters_to(fan_out.linear(weight, bias), fan_out.x, adapters)
    (y,) = frozen_layers(x, [FrozenLayer(weight, bias, adapters, dequantize)])
    return y


def _inputs(M, N, K, r):
    shapes = dict(x=(M, K), weight=(N, K), a=(r, K), b=(N, r), bias=(N,), lora_bias=(N,))
    inputs = {}
    for name, shape in shapes.items():
        inputs[name] = (torch.randn(shape) / shape[-1] ** 0.5).requires_grad_(name != "weight")
    return inputs | dict(x=torch.randn(M, K).requires_grad_())


CASES.append(
    Case(
        "lora_linear",
        fn=liger_lora_linear,
        reference=lora_linear_reference,
        inputs=_inputs,
        shapes=((1, 8, 8, 4), (5, 24, 123, 3), (70, 33, 40, 16)),
        options=(dict(), dict(scaling=2.5, bias=None, lora_bias=None)),
        bench=((8192, 4096, 4096, 16), (8192, 14336, 4096, 16)),
        flops=lambda t: 4 * t["x"].numel() * t["weight"].shape[0],
    )
)
