r"""GroupNorm: normalise each group of channels of a sample, then scale and shift each channel.

A group has K channels of S elements, K·S in all.

    rstd = 1 / sqrt(mean((x - mean x)²) + eps),   x̂ = (x - mean x)·rstd,   y = x̂·w + b

    with m = dy·w:   dx = rstd·(m - mean(m) - x̂·mean(m·x̂)),   dw = Σ dy·x̂,   db = Σ dy

The sums Σ dy·x̂ and Σ dy of a channel in one sample are used twice. Weighted with w and summed over
the group, they are the means in dx. Summed over the samples, they are dw and db.

The variance is the biased one, from the squares of differences to a mean. If a group fits into a
program, that is the group's mean. Otherwise it is the mean of a part, and Chan's formula merges the
parts. The kernels are in `group_norm_kernels`.

Source: Wu and He, Group Normalization, arXiv:1803.08494; Chan, Golub and LeVeque, Algorithms for
Computing the Sample Variance, 1983."""

from __future__ import annotations

import math

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, Function, flatten_rows
from liger_kernel.ops.norm.group_norm_launch import group_norm_bwd, group_norm_fwd
from liger_kernel.ops.norm.norm_kernels import reshape_output
from liger_kernel.ops.norm.rms_norm import check_module


def group_norm_reference(x, w, b, groups, eps=1e-6):
    """Compute `liger_group_norm` in plain PyTorch, for tensors of any dtype."""
    dtype = torch.promote_types(x.dtype, torch.promote_types(w.dtype, b.dtype))
    return torch.group_norm(x.to(dtype), groups, w.to(dtype), b.to(dtype), eps).to(x.dtype)


def _flatten_samples(t):
    """Return t (N, C, *) as (N, C·S) with contiguous samples: a view if possible, else a copy."""
    return flatten_rows(t.flatten(1))


class LigerGroupNormFunction(Function):
    """Autograd Function of `liger_group_norm`, with the same arguments. Returns Y like X."""

    @staticmethod
    def reference(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
        return group_norm_reference(X, affine_scaling_weight, affine_shifting_bias, num_groups, eps)

    @staticmethod
    def forward(ctx, X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
        devices.require_kernels("LigerGroupNormFunction", X)
        w, b = affine_scaling_weight, affine_shifting_bias
        if (
            not check.matches(X, X.shape[1:2], w, b)
            or X.dim() < 3
            or X.shape[1] != num_channels
            or num_groups < 1
            or num_channels % num_groups
        ):
            _check_arguments("LigerGroupNormFunction", X, w, b, num_channels, num_groups)
        y, mean, rstd = group_norm_fwd(
            _flatten_samples(X), w.contiguous(), b.contiguous(), num_groups, eps
        )
        ctx.save_for_backward(X, affine_scaling_weight, affine_shifting_bias, mean, rstd)
        ctx.options = num_channels, num_groups, eps
        return reshape_output(y, X.shape)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:3], *ctx.options

    @staticmethod
    def backward(ctx, dY):
        X, w, b, mean, rstd = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dx, dw, db = group_norm_bwd(
            _flatten_samples(dY),
            _flatten_samples(X),
            w.contiguous(),
            b.contiguous(),
            mean,
            rstd,
            need_dx,
            need_dw,
            need_db,
        )
        dx = dx.view(dY.shape) if need_dx else None
        return dx, dw if need_dw else None, db if need_db else None, None, None, None


def _check_groups(name, num_channels, num_groups):
    check.size(name, "num_channels", num_channels)
    if check.integer(name, "num_groups", num_groups) < 1 or num_channels % num_groups:
        raise check.InvalidArgument(
            f"{name}: num_groups is {num_groups}, give a divisor of num_channels, {num_channels}"
        )


def _check_arguments(
    name, X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups
):
    parameters = dict(
        affine_scaling_weight=affine_scaling_weight, affine_shifting_bias=affine_shifting_bias
    )
    check.floats(name, dict(X=X, **parameters))
    if X.dim() < 3:
        raise check.InvalidArgument(
            f"{name}: X has shape {tuple(X.shape)}, give (N, C, *) with at least three dimensions"
        )
    if X.shape[1] != check.size(name, "num_channels", num_channels):
        raise check.InvalidArgument(
            f"{name}: num_channels is {num_channels}, X has {X.shape[1]}; "
            "it comes before num_groups"
        )
    _check_groups(name, num_channels, num_groups)
    for argument, t in parameters.items():
        check.shape(name, argument, t, (num_channels,))


def liger_group_norm(
    X: torch.Tensor,
    affine_scaling_weight: torch.Tensor,
    affine_shifting_bias: torch.Tensor,
    num_channels: int,
    num_groups: int,
    eps: float,
) -> torch.Tensor:
    """Group normalisation, as `torch.nn.functional.group_norm`.

    Note that num_channels comes before num_groups.

    Args:
        X: (N, C, *) with at least three dimensions, fp32, bf16 or fp16.
        affine_scaling_weight, affine_shifting_bias: (C,), any floating dtype.
        num_channels: C.
        num_groups: a divisor of C.
        eps: added to the variance.

    Returns:
        A tensor like X, computed in fp32 and rounded once.

    Raises:
        ValueError: X has fewer than three dimensions; C is not num_channels, or not a multiple of
            num_groups; weight or bias has another shape or device.
        TypeError: X, weight or bias is not a floating point tensor; num_channels, num_groups or eps
            is not a number.

    Source: arXiv:1803.08494.
    """
    name = "liger_group_norm"
    w, b = affine_scaling_weight, affine_shifting_bias
    _check_arguments(name, X, w, b, num_channels, num_groups)
    eps = check.non_negative(name, "eps", eps)
    if not devices.has_kernels(X):
        return group_norm_reference(X, w, b, num_groups, eps)
    return LigerGroupNormFunction.call(X, w, b, num_channels, num_groups, eps)


class LigerGroupNorm(torch.nn.Module):
    """`liger_group_norm` as a module.

    There is always a bias: drawn from N(0, 1) with ``bias=True``, else zeros."""

    def __init__(
        self,
        num_channels: int,
        num_groups: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
    ) -> None:
        super().__init__()
        _check_groups("LigerGroupNorm", num_channels, num_groups)
        check_module("LigerGroupNorm", num_channels, eps, init_fn)
        self.num_channels = num_channels
        self.num_groups = num_groups
        self.eps = eps
        self.variance_epsilon = eps
        self.weight = torch.nn.Parameter(getattr(torch, init_fn)(num_channels))
        self.bias = torch.nn.Parameter((torch.randn if bias else torch.zeros)(num_channels))

    def forward(self, hidden_states: torch.Tensor):
        return liger_group_norm(
            hidden_states,
            self.weight,
            self.bias,
            self.num_channels,
            self.num_groups,
            self.variance_epsilon,
        )

    def extra_repr(self):
        return f"{self.num_channels}, {self.num_groups}, eps={self.variance_epsilon}"


def _inputs(*shape):
    C = shape[1]
    w, b = (torch.randn(C).requires_grad_() for _ in range(2))
    return dict(x=torch.randn(shape).requires_grad_(), w=w, b=b)


def _num_groups(x):
    """Return 32 as in most models, or for small shapes a divisor of it."""
    return math.gcd(x.shape[1], 32)


CASES.append(
    Case(
        "group_norm",
        fn=lambda x, w, b: liger_group_norm(x, w, b, x.shape[1], _num_groups(x), 1e-6),
        reference=lambda x, w, b: group_norm_reference(x, w, b, _num_groups(x), 1e-6),
        inputs=_inputs,
        shapes=((1, 3, 5), (5, 6, 7), (3, 40, 4, 9), (2, 9, 592), (3, 12, 50, 120), (1, 6, 17000)),
        bench=((16, 512, 64, 64), (8, 320, 96, 96)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (2, 3)),
        # x - mean is one more than PyTorch's x·scale + shift, which cancels if x has a large mean
        fp32_roundings=2,
    )
)
