r"""RMSNorm with a gate, as in Mamba-2 and in linear attention.

    norm before gate:   rstd = 1 / sqrt(mean(x²) + eps),   x̂ = x·rstd,   y = x̂·w·act(g)
    gate before norm:   u = x·act(g),   rstd = 1 / sqrt(mean(u²) + eps),   y = u·rstd·w

The mean goes over a row, or over each group of ``group_size`` columns. `gated_norm_kernels` has the
kernels, and the formulas of the gradients.

``casting`` says where Hugging Face rounds to x's dtype: "llama" rounds x̂ (or u·rstd), and then its
product with w (Qwen3-Next, Mamba-2, Bamba); "gemma" rounds only y (Kimi Linear, Falcon-H1). The
gate is always computed in fp32.

Source: Dao and Gu, Transformers are SSMs, arXiv:2405.21060; Yang et al., Gated Delta Networks,
arXiv:2412.06464; rounding as in Hugging Face transformers."""

from __future__ import annotations

import math

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, Function, flatten_rows
from liger_kernel.ops.norm.gated_norm_launch import gated_norm_bwd, gated_norm_fwd
from liger_kernel.ops.norm.norm_kernels import reshape_output
from liger_kernel.ops.norm.rms_norm import (
    CASTINGS,
    check_function,
    check_module,
    check_norm,
    rms_norm_reference,
)

ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}


def gated_rms_norm_reference(
    x,
    gate,
    w=None,
    eps=1e-6,
    casting="llama",
    norm_before_gate=True,
    group_size=None,
    activation="silu",
):
    """Compute `liger_gated_rms_norm` in plain PyTorch, for tensors of any dtype."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    factor = ACTIVATIONS[activation](gate.to(dtype))
    u = x.to(dtype) if norm_before_gate else x.to(dtype) * factor
    groups = u if group_size is None else u.unflatten(-1, (-1, group_size))
    y = rms_norm_reference(groups, None, eps).view(u.shape)
    if casting == "llama":
        y = y.to(x.dtype)
    if w is not None:
        y = y * (w if casting == "llama" else w.to(dtype))
    if norm_before_gate:
        y = y * factor
    return y.to(x.dtype)


class LigerGatedRMSNormFunction(Function):
    """Autograd Function of `liger_gated_rms_norm`, with the same arguments. Returns y like x."""

    reference = staticmethod(gated_rms_norm_reference)

    @staticmethod
    def forward(
        ctx,
        x,
        gate,
        weight=None,
        eps=1e-6,
        casting_mode="llama",
        norm_before_gate=True,
        group_size=None,
        activation="silu",
    ):
        name = "LigerGatedRMSNormFunction"
        devices.require_kernels(name, x)
        check_function(name, x, weight=weight)
        if not check.matches(x, x.shape, gate):
            _check_gate(name, x, gate)
        _check_options(name, casting_mode, norm_before_gate, group_size, activation, x.shape[-1])
        same_dtype = weight is not None and weight.dtype == x.dtype
        rounds = casting_mode == "llama" and norm_before_gate and same_dtype
        groups = 1 if group_size is None else x.shape[-1] // group_size
        kernel_options = (
            activation,
            not norm_before_gate,
            CASTINGS.index(casting_mode),
            rounds,
            groups,
        )
        w = None if weight is None else weight.contiguous()
        y, rstd = gated_norm_fwd(
            flatten_rows(x), flatten_rows(gate), w, None, eps, 0.0, *kernel_options
        )
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.options = eps, casting_mode, norm_before_gate, group_size, activation
        ctx.kernel_options = kernel_options
        return reshape_output(y, x.shape)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:3], *ctx.options

    @staticmethod
    def backward(ctx, dy):
        x, gate, weight, rstd = ctx.saved_tensors
        need_dx, need_dg, need_dw = ctx.needs_input_grad[:3]
        w = None if weight is None else weight.contiguous()
        dx, dg, dw, _ = gated_norm_bwd(
            flatten_rows(dy),
            flatten_rows(x),
            flatten_rows(gate),
            w,
            None,
            rstd,
            0.0,
            *ctx.kernel_options,
            need_dx,
            need_dg,
            need_dw,
            False,
        )
        dx = reshape_output(dx, x.shape) if need_dx else None
        dg = reshape_output(dg, x.shape) if need_dg else None
        return dx, dg, dw if need_dw else None, None, None, None, None, None


def _check_gate(name, x, gate):
    check.floats(name, dict(x=x, gate=gate))
    check.shape(name, "gate", gate, tuple(x.shape))


def _check_options(name, casting_mode, norm_before_gate, group_size, activation, hidden_size):
    """Check the options of a gated RMSNorm. Returns them, with group_size as an int."""
    if casting_mode not in ("llama", "gemma"):
        raise ValueError(f"{name}: casting_mode is {casting_mode!r}, give 'llama' or 'gemma'")
    if not isinstance(norm_before_gate, bool):
        raise TypeError(f"{name}: norm_before_gate is {norm_before_gate!r}, give True or False")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation is {activation!r}, give 'silu' or 'sigmoid'")
    group_size = None if group_size is None else check.integer(name, "group_size", group_size)
    if group_size is not None and (group_size < 1 or hidden_size % group_size):
        raise ValueError(
            f"{name}: group_size is {group_size}, give a divisor of the hidden size, {hidden_size}"
        )
    return casting_mode, norm_before_gate, group_size, activation


def liger_gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    casting_mode: str = "llama",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """Gated RMSNorm over the last dimension: ``RMSNorm(x)·act(gate)`` or ``RMSNorm(x·act(gate))``.

    Args:
        x: (..., H), fp32, bf16 or fp16, any strides.
        gate: (..., H), any floating dtype, any strides.
        weight: (H,), any floating dtype, or None for no weight.
        eps: added to the mean square.
        casting_mode: where Hugging Face rounds: "llama" (Qwen3-Next, Mamba-2) or "gemma" (Kimi
            Linear, Falcon-H1).
        norm_before_gate: True as in Qwen3-Next, False as in Mamba-2.
        group_size: of groups of columns that are normalised by themselves; None: a row is one
            group.
        activation: of the gate, "silu" or "sigmoid".

    Returns:
        (..., H) in x's dtype.

    Raises:
        ValueError: an unknown casting mode or activation; x has no dimension; gate or weight has
            another shape or device; group_size does not divide H; eps is negative.
        TypeError: x, gate or weight is not a floating point tensor, eps or group_size not a number,
            norm_before_gate not a bool.

    Source: arXiv:2405.21060, arXiv:2412.06464.
    """
    name = "liger_gated_rms_norm"
    check_norm(name, x, weight=weight)
    _check_gate(name, x, gate)
    eps = check.non_negative(name, "eps", eps)
    options = _check_options(
        name, casting_mode, norm_before_gate, group_size, activation, x.shape[-1]
    )
    if not devices.has_kernels(x):
        return gated_rms_norm_reference(x, gate, weight, eps, *options)
    return LigerGatedRMSNormFunction.call(x, gate, weight, eps, *options)


class LigerGatedRMSNorm(torch.nn.Module):
    """`liger_gated_rms_norm` as a module: ``forward(hidden_states, gate)``.

    The state dict is Hugging Face's."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        casting_mode: str = "llama",
        norm_before_gate: bool = True,
        group_size: int | None = None,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        check_module("LigerGatedRMSNorm", hidden_size, eps, "ones")
        _check_options(
            "LigerGatedRMSNorm", casting_mode, norm_before_gate, group_size, activation, hidden_size
        )
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps
        self.casting_mode = casting_mode
        self.norm_before_gate = norm_before_gate
        self.group_size = group_size
        self.activation = activation

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor):
        return liger_gated_rms_norm(
            hidden_states,
            gate,
            self.weight,
            self.variance_epsilon,
            self.casting_mode,
            self.norm_before_gate,
            self.group_size,
            self.activation,
        )

    def extra_repr(self):
        order = "norm before gate" if self.norm_before_gate else "gate before norm"
        groups = "" if self.group_size is None else f", groups of {self.group_size}"
        shape = tuple(self.weight.shape)
        options = f"{order}, {self.activation}{groups}, {self.casting_mode!r}"
        return f"{shape}, eps={self.variance_epsilon}, {options}"


def _inputs(*shape):
    x = torch.randn(shape).requires_grad_()
    gate = (2 * torch.randn(shape)).requires_grad_()
    return dict(x=x, gate=gate, w=torch.randn(shape[-1]).requires_grad_())


def _group_size(x, grouped):
    return x.shape[-1] // math.gcd(x.shape[-1], 6) if grouped else None


CASES.append(
    Case(
        "gated_rms_norm",
        fn=lambda x, gate, w=None, casting="llama", before=True, grouped=False, act="silu": (
            liger_gated_rms_norm(x, gate, w, 1e-6, casting, before, _group_size(x, grouped), act)
        ),
        reference=lambda x, gate, w=None, casting="llama", before=True, grouped=False, act="silu": (
            gated_rms_norm_reference(
                x, gate, w, 1e-6, casting, before, _group_size(x, grouped), act
            )
        ),
        inputs=_inputs,
        shapes=((1, 8), (5, 123), (2, 7, 512), (2, 16390)),
        options=(
            dict(),
            dict(before=False, grouped=True),
            dict(act="sigmoid", casting="gemma"),
            dict(w=None, before=False, casting="gemma"),
        ),
        bench=((1048576, 128), (32768, 4096), (8192, 8192), (8192, 4096)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (3, 5)),
        fp32_roundings=2,
    )
)
