r"""Modulated RMSNorm: the norm of a diffusion transformer's block, scaled and shifted for each
sample (AdaLN).

    y = RMSNorm(x)·(1 + scale) + shift

A row of scale and shift belongs to T rows of x: with x (B, T, H) and scale (B, H), to those of a
sample. `gated_rows` has the kernels, and the gradients.

What is rounded: 1 + scale, to scale's dtype; with the casting mode "llama" and a weight, x̂ and
then only y; with "gemma", and without a weight, the norm, its product with 1 + scale, and y. Where
dtypes differ, PyTorch promotes, and the product is not rounded.

Source: Peebles and Xie, Scalable Diffusion Models with Transformers, arXiv:2212.09748; the norm:
`rms_norm`."""

from __future__ import annotations

import math

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, Function, matrix_rows
from liger_kernel.ops.norm.gated_rows import gated_norm_bwd, gated_norm_fwd
from liger_kernel.ops.norm.rms_norm import (
    CASTINGS,
    LigerRMSNorm,
    check_function,
    checked,
    rms_norm_reference,
)
from liger_kernel.ops.norm.rows import shaped


def modulated_rms_norm_reference(x, w, scale, shift=None, eps=1e-6, offset=0.0, casting="llama"):
    if casting == "llama" and w is not None:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        y = rms_norm_reference(x, None, eps).to(wide) * (w.to(wide) + offset)
    else:
        y = rms_norm_reference(x, w, eps, offset, casting)
    samples = math.prod(scale.shape[:-1])
    row = samples, 1, x.shape[-1]
    y = y.reshape(samples, math.prod(x.shape[:-1]) // max(samples, 1), x.shape[-1]) * (
        1 + scale
    ).reshape(row)
    return (y if shift is None else y + shift.reshape(row)).to(x.dtype).view(x.shape)


class LigerModulatedRMSNormFunction(Function):
    """``apply(X, W, scale, shift, eps, offset=0.0, casting_mode="llama", in_place=True) -> Y`` like
    X.

    The arguments of `liger_modulated_rms_norm`. ``in_place`` (whether dX may overwrite dY) has no
    effect: dY may be used elsewhere."""

    @staticmethod
    def reference(X, W, scale, shift, eps, offset=0.0, casting_mode="llama", in_place=True):
        return modulated_rms_norm_reference(X, W, scale, shift, eps, offset, casting_mode)

    @staticmethod
    def forward(ctx, X, W, scale, shift, eps, offset=0.0, casting_mode="llama", in_place=True):
        name = "LigerModulatedRMSNormFunction"
        devices.require_kernels(name, X)
        check_function(name, X, casting_mode, weight=W)
        if not _modulates(X, scale, shift):
            _check_modulation(name, X, scale, shift)
        rounds = casting_mode == "gemma" or casting_mode == "llama" and W is None
        ctx.how = None, False, CASTINGS.index(casting_mode), rounds, 1
        y, rstd = gated_norm_fwd(*_matrices(X, W, scale, shift), eps, offset, *ctx.how)
        ctx.save_for_backward(X, W, scale, shift, rstd)
        ctx.options = eps, offset, casting_mode
        return shaped(y, X.shape)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:4], *ctx.options

    @staticmethod
    def backward(ctx, dY):
        *inputs, rstd = ctx.saved_tensors
        need_dx, need_dw, need_dscale, need_dshift = ctx.needs_input_grad[:4]
        dx, dscale, dw, dshift = gated_norm_bwd(
            matrix_rows(dY),
            *_matrices(*inputs),
            rstd,
            ctx.options[1],
            *ctx.how,
            need_dx,
            need_dscale,
            need_dw,
            need_dshift,
        )
        found = zip((dx, dw, dscale, dshift), inputs, ctx.needs_input_grad, strict=False)
        return (
            *(shaped(d, t.shape) if need else None for d, t, need in found),
            None,
            None,
            None,
            None,
        )


def _matrices(X, W, scale, shift):
    """What the kernels take: x, g, w, b."""
    x, scale, shift = (None if t is None else matrix_rows(t) for t in (X, scale, shift))
    return x, scale, None if W is None else W.contiguous(), shift


def _modulates(X, *modulation):
    """The usual case of what `_check_modulation` lets through, in less time."""
    n, H = modulation[0].numel(), X.shape[-1]
    return n and X.numel() % n == 0 and all(
        t is None or t.numel() == n and check.fits(X, (*t.shape[:-1], H), t) for t in modulation
    )  # fmt: skip


def _check_modulation(name, X, scale, shift):
    check.floats(name, dict(X=X, scale=scale), shift=shift)
    rows, samples = math.prod(X.shape[:-1]), math.prod(scale.shape[:-1])
    if scale.shape[-1:] != X.shape[-1:] or (rows % samples if samples else rows):
        given = f"scale has shape {tuple(scale.shape)}, X {tuple(X.shape)}"
        raise check.Misfit(
            f"{name}: {given}, give ({X.shape[-1]},) or (G, {X.shape[-1]}) where G divides {rows}"
        )
    if shift is not None and (
        shift.shape[-1:] != X.shape[-1:] or math.prod(shift.shape[:-1]) != samples
    ):
        given = f"shift has shape {tuple(shift.shape)}, scale {tuple(scale.shape)}"
        raise check.Misfit(f"{name}: {given}, give equal ones")


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
    """``RMSNorm(X)·(1 + scale) + shift``, in which each row of scale and shift belongs to as many
    rows of X.

    Args:
        X: (..., H), fp32, bf16 or fp16, of M rows.
        W: (H,), any floating dtype, or None for no weight (``offset`` is unused then).
        scale: (..., H), any floating dtype, of G rows, where G divides M: row i of X has row i //
        (M / G). So for X
            (B, T, H) it may be (H,), (B, H), (B, 1, H) or (B, T, H). It is not broadcast otherwise.
        shift: (..., H) of as many rows, or None.
        eps, offset, casting_mode: as in `liger_rms_norm`.
        in_place: no effect.

    Returns:
        (..., H) in X's dtype.

    Raises:
        ValueError, TypeError: as `liger_rms_norm`; or scale or shift is not a floating point tensor
        of X's device, has
            another last dimension, or a number of rows that does not fit.

    Source: arXiv:2212.09748.
    """
    name = "liger_modulated_rms_norm"
    eps, offset = checked(name, X, W, eps, offset, casting_mode)
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
    """Scale and shift for all rows, or for each sample."""
    modulation = (shape[0], 1, shape[2]) if len(shape) == 3 else shape[-1:]
    scale, shift = (torch.randn(modulation).requires_grad_() for _ in range(2))
    x, w = torch.randn(shape).requires_grad_(), torch.randn(shape[-1]).requires_grad_()
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
        shapes=((1, 8), (5, 123), (2, 7, 512), (2, 1, 8200)),
        options=(dict(), dict(casting="gemma", offset=1.0), dict(w=None, shift=None)),
        bench=((16, 4096, 1152), (8, 4096, 3072)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (2, 3)),
    )
)
