r"""Modulated RMSNorm: an RMSNorm that is scaled and shifted for each sample (AdaLN).

    y = RMSNorm(x)·(1 + scale) + shift

It is the norm of a diffusion transformer's block. A row of scale and shift belongs to T rows of x:
with x (B, T, H) and scale (B, H), to those of a sample. `gated_norm_kernels` has the kernels, and
the formulas of the gradients.

What is rounded: 1 + scale, to scale's dtype; with the casting mode "llama" and a weight, x̂ and
then only y; with "gemma", and without a weight, the norm, its product with 1 + scale, and y. Where
dtypes differ, PyTorch promotes, and the product is not rounded.

Source: Peebles and Xie, Scalable Diffusion Models with Transformers, arXiv:2212.09748; the norm:
`rms_norm`."""

from __future__ import annotations

import math

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, Function, flatten_rows
from liger_kernel.ops.norm.gated_norm_launch import gated_norm_bwd, gated_norm_fwd
from liger_kernel.ops.norm.norm_kernels import reshape_output
from liger_kernel.ops.norm.rms_norm import (
    CASTINGS,
    LigerRMSNorm,
    check_arguments,
    check_function,
    rms_norm_reference,
)


def modulated_rms_norm_reference(x, w, scale, shift=None, eps=1e-6, offset=0.0, casting="llama"):
    """Compute `liger_modulated_rms_norm` in plain PyTorch, for tensors of any dtype."""
    if casting == "llama" and w is not None:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        y = rms_norm_reference(x, None, eps).to(dtype) * (w.to(dtype) + offset)
    else:
        y = rms_norm_reference(x, w, eps, offset, casting)
    H = x.shape[-1]
    samples = math.prod(scale.shape[:-1])
    rows_per_sample = math.prod(x.shape[:-1]) // max(samples, 1)
    y = y.reshape(samples, rows_per_sample, H) * (1 + scale).reshape(samples, 1, H)
    if shift is not None:
        y = y + shift.reshape(samples, 1, H)
    return y.to(x.dtype).view(x.shape)


class LigerModulatedRMSNormFunction(Function):
    """Autograd Function of `liger_modulated_rms_norm`, with the same arguments. Returns Y like X.

    ``in_place`` has no effect: dX does not overwrite dY, which may be used elsewhere."""

    @staticmethod
    def reference(X, W, scale, shift, eps, offset=0.0, casting_mode="llama", in_place=True):
        return modulated_rms_norm_reference(X, W, scale, shift, eps, offset, casting_mode)

    @staticmethod
    def forward(ctx, X, W, scale, shift, eps, offset=0.0, casting_mode="llama", in_place=True):
        name = "LigerModulatedRMSNormFunction"
        devices.require_kernels(name, X)
        check_function(name, X, casting_mode, weight=W)
        if not _is_usual_modulation(X, scale, shift):
            _check_modulation(name, X, scale, shift)
        rounds = casting_mode == "gemma" or casting_mode == "llama" and W is None
        ctx.kernel_options = None, False, CASTINGS.index(casting_mode), rounds, 1
        y, rstd = gated_norm_fwd(
            *_kernel_inputs(X, W, scale, shift), eps, offset, *ctx.kernel_options
        )
        ctx.save_for_backward(X, W, scale, shift, rstd)
        ctx.options = eps, offset, casting_mode
        return reshape_output(y, X.shape)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:4], *ctx.options

    @staticmethod
    def backward(ctx, dY):
        X, W, scale, shift, rstd = ctx.saved_tensors
        need_dx, need_dw, need_dscale, need_dshift = ctx.needs_input_grad[:4]
        dx, dscale, dw, dshift = gated_norm_bwd(
            flatten_rows(dY),
            *_kernel_inputs(X, W, scale, shift),
            rstd,
            ctx.options[1],
            *ctx.kernel_options,
            need_dx,
            need_dscale,
            need_dw,
            need_dshift,
        )
        return (
            reshape_output(dx, X.shape) if need_dx else None,
            dw if need_dw else None,
            reshape_output(dscale, scale.shape) if need_dscale else None,
            reshape_output(dshift, shift.shape) if need_dshift else None,
            None,
            None,
            None,
            None,
        )


def _kernel_inputs(X, W, scale, shift):
    """Return x, g, w and b of `gated_norm_fwd`."""
    x = flatten_rows(X)
    g = flatten_rows(scale)
    w = None if W is None else W.contiguous()
    b = None if shift is None else flatten_rows(shift)
    return x, g, w, b


def _is_usual_modulation(X, *modulation):
    """Return True for the usual shapes that `_check_modulation` accepts, in less time."""
    n = modulation[0].numel()
    H = X.shape[-1]
    if not n or X.numel() % n:
        return False
    for t in modulation:
        if t is not None and not (t.numel() == n and check.matches(X, (*t.shape[:-1], H), t)):
            return False
    return True


def _check_modulation(name, X, scale, shift):
    """Raise unless the rows of scale and shift are equally many, and divide the rows of X."""
    check.floats(name, dict(X=X, scale=scale), shift=shift)
    rows = math.prod(X.shape[:-1])
    samples = math.prod(scale.shape[:-1])
    if scale.shape[-1:] != X.shape[-1:] or (rows % samples if samples else rows):
        shapes = f"scale has shape {tuple(scale.shape)}, X {tuple(X.shape)}"
        raise check.InvalidArgument(
            f"{name}: {shapes}, give ({X.shape[-1]},) or (G, {X.shape[-1]}) where G divides {rows}"
        )
    if shift is not None and (
        shift.shape[-1:] != X.shape[-1:] or math.prod(shift.shape[:-1]) != samples
    ):
        shapes = f"shift has shape {tuple(shift.shape)}, scale {tuple(scale.shape)}"
        raise check.InvalidArgument(f"{name}: {shapes}, give equal ones")


def liger_modulated_rms_norm(
    X: torch.Tensor,
    W: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> torch.Tensor:
    """Compute ``RMSNorm(X)·(1 + scale) + shift``; scale and shift may have fewer rows than X.

    Args:
        X: (..., H), fp32, bf16 or fp16, of M rows.
        W: (H,), any floating dtype, or None for no weight (``offset`` is unused then).
        scale: (..., H), any floating dtype, of G rows, where G divides M: row i of X has row
            i // (M / G). So for X (B, T, H) it may be (H,), (B, H), (B, 1, H) or (B, T, H). It is
            not broadcast otherwise.
        shift: (..., H) of as many rows, or None.
        eps, offset, casting_mode: as in `liger_rms_norm`.
        in_place: no effect.

    Returns:
        (..., H) in X's dtype.

    Raises:
        ValueError, TypeError: as `liger_rms_norm`; or scale or shift is not a floating point tensor
            of X's device, has another last dimension, or a number of rows that does not fit.

    Source: arXiv:2212.09748.
    """
    name = "liger_modulated_rms_norm"
    eps, offset = check_arguments(name, X, W, eps, offset, casting_mode)
    _check_modulation(name, X, scale, shift)
    if not devices.has_kernels(X):
        return modulated_rms_norm_reference(X, W, scale, shift, eps, offset, casting_mode)
    return LigerModulatedRMSNormFunction.call(
        X, W, scale, shift, eps, offset, casting_mode, in_place
    )


class LigerModulatedRMSNorm(LigerRMSNorm):
    """`liger_modulated_rms_norm` as a module: ``forward(hidden_states, scale, shift=None)``."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__(
            hidden_size,
            eps,
            offset,
            casting_mode,
            init_fn,
            in_place,
            elementwise_affine=elementwise_affine,
        )

    def forward(
        self, hidden_states: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
    ):
        return liger_modulated_rms_norm(
            hidden_states,
            self.weight,
            scale,
            shift,
            self.variance_epsilon,
            self.offset,
            self.casting_mode,
        )


def _inputs(*shape):
    """Draw inputs, with scale and shift for each sample if there are samples, else for all rows."""
    modulation = (shape[0], 1, shape[2]) if len(shape) == 3 else shape[-1:]
    scale, shift = (torch.randn(modulation).requires_grad_() for _ in range(2))
    x = torch.randn(shape).requires_grad_()
    w = torch.randn(shape[-1]).requires_grad_()
    return dict(x=x, w=w, scale=scale, shift=shift)


CASES.append(
    Case(
        "modulated_rms_norm",
        fn=lambda x, w, scale, shift, offset=0.0, casting="llama": liger_modulated_rms_norm(
            x, w, scale, shift, 1e-6, offset, casting
        ),
        reference=lambda x, w, scale, shift, offset=0.0, casting="llama": (
            modulated_rms_norm_reference(x, w, scale, shift, 1e-6, offset, casting)
        ),
        inputs=_inputs,
        shapes=((1, 8), (5, 123), (2, 7, 512), (2, 1, 8200), (2, 17, 40)),
        options=(dict(), dict(casting="gemma", offset=1.0), dict(w=None, shift=None)),
        bench=((16, 4096, 1152), (8, 4096, 3072)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (2, 3)),
    )
)
