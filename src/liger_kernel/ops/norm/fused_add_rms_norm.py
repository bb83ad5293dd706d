r"""Residual addition and RMSNorm in one kernel.

    s = x + r, rounded to x's dtype;   y = RMSNorm(s), as in `rms_norm`

    dx = dr = (RMSNorm's gradient for dy) + ds

It returns y and the new residual s. Without r, s is x: that is a model's first norm, whose backward
also adds the gradient of the skip connection.

Source: the decoder layers of Hugging Face transformers, ``residual + x`` followed by
arXiv:1910.07467."""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, Function, gradients
from liger_kernel.ops.norm.rms_norm import (
    CASTINGS,
    LigerRMSNorm,
    check_function,
    checked,
    rms_norm_reference,
)
from liger_kernel.ops.norm.rows import norm_bwd, norm_fwd, rows, shaped


def fused_add_rms_norm_reference(x, r, w=None, eps=1e-6, offset=0.0, casting="llama"):
    s = x if r is None else (r + x).to(x.dtype)
    return rms_norm_reference(s, w, eps, offset, casting), s


class LigerFusedAddRMSNormFunction(Function):
    """``apply(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False) -> (Y, S)``, both
    like X.

    The arguments of `liger_fused_add_rms_norm`. ``in_place`` (whether dX may overwrite an incoming
    gradient) has no effect: that gradient may be used elsewhere."""

    @staticmethod
    def reference(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        return fused_add_rms_norm_reference(X, R, W, eps, offset, casting_mode)

    @staticmethod
    def forward(ctx, X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        devices.require_kernels("LigerFusedAddRMSNormFunction", X)
        check_function("LigerFusedAddRMSNormFunction", X, casting_mode, weight=W)
        _check_residual("LigerFusedAddRMSNormFunction", X, R)
        x, w, cast = rows(X), None if W is None else W.contiguous(), CASTINGS.index(casting_mode)
        y, s, stats = norm_fwd(x, None if R is None else rows(R), w, None, eps, offset, cast, False)
        S = X if R is None else shaped(s, X.shape)
        ctx.save_for_backward(
            S, W, stats
        )  # the S that is returned: if it is changed in place, backward raises
        ctx.options = eps, offset, casting_mode
        ctx.r_dtype = None if R is None else R.dtype
        ctx.set_materialize_grads(False)
        return shaped(y, X.shape), S

    @staticmethod
    def again(ctx, dY, dS):
        """The gradients of X and R from that of S: both are used only in S."""
        S, W, _ = ctx.saved_tensors
        need_dx, need_dr, need_dw = ctx.needs_input_grad[:3]
        needs = need_dx or need_dr, need_dw, False, False, False
        ds, dw, *_ = gradients(rms_norm_reference, (S, W, *ctx.options), needs, (dY,))
        dx = dS if ds is None else ds if dS is None else ds + dS
        dr = dx.to(ctx.r_dtype) if need_dr and dx is not None else None
        return dx if need_dx else None, dr, dw, None, None, None, None

    @staticmethod
    def backward(ctx, dY, dS):
        S, W, stats = ctx.saved_tensors
        need_dx, need_dr, need_dw = ctx.needs_input_grad[:3]
        dw = None
        if dY is None:
            dx = dS
        else:
            w, ds, (_, offset, casting) = W, None if dS is None else rows(dS), ctx.options
            w = None if W is None else W.contiguous()
            options = offset, CASTINGS.index(casting), False
            dx, dw, _ = norm_bwd(
                rows(dY), ds, rows(S), w, None, stats, *options, need_dx or need_dr, need_dw, False
            )
            dx = shaped(dx, dY.shape) if need_dx or need_dr else None
        dr = dx.to(ctx.r_dtype) if need_dr and dx is not None else None
        return dx if need_dx else None, dr, dw if need_dw else None, None, None, None, None


def _check_residual(name, X, R):
    if not check.fits(X, X.shape, R):
        check.floats(name, dict(X=X), R=R)
        raise ValueError(
            f"{name}: R has shape {tuple(R.shape)}, X {tuple(X.shape)}, give equal ones"
        )


def liger_fused_add_rms_norm(
    X: torch.Tensor,
    R: torch.Tensor,
    W: torch.Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``S = X + R`` and its RMSNorm over the last dimension, in one kernel.

    Args:
        X: (..., H), fp32, bf16 or fp16.
        R: the residual, (..., H), any floating dtype; or None, for which S is X.
        W: (H,), any floating dtype, or None for no weight (``offset`` is unused then).
        eps: added to the mean square.
        offset: added to the weight: 0 for Llama, 1 for Gemma.
        casting_mode: where Hugging Face rounds: "llama" or "gemma". "none" is computed as "gemma".
        in_place: no effect.

    Returns:
        (Y, S): the normalised S, and the new residual S. S is rounded before it is normalised. Both
        are (..., H), in
        X's dtype.

    Raises:
        ValueError, TypeError: as `liger_rms_norm`; or R has another shape or device than X, or is
        not floating point.

    Source: arXiv:1910.07467.
    """
    name = "liger_fused_add_rms_norm"
    eps, offset = checked(name, X, W, eps, offset, casting_mode)
    _check_residual(name, X, R)
    if not devices.has_kernels(X):
        return fused_add_rms_norm_reference(X, R, W, eps, offset, casting_mode)
    return LigerFusedAddRMSNormFunction.call(X, R, W, eps, offset, casting_mode, in_place)


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """`liger_fused_add_rms_norm` as a module: ``forward(hidden_states, residual) -> (Y, S)``."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor):
        return liger_fused_add_rms_norm(
            hidden_states,
            residual,
            self.weight,
            self.variance_epsilon,
            self.offset,
            self.casting_mode,
        )


def _inputs(*shape):
    return dict(
        x=torch.randn(shape).requires_grad_(), r=torch.randn(shape).requires_grad_(),
        w=torch.randn(shape[-1]).requires_grad_(),
    )  # fmt: skip


CASES.append(
    Case(
        "fused_add_rms_norm",
        fn=lambda x, r, w=None, offset=0.0, casting="llama": liger_fused_add_rms_norm(
            x, r, w, 1e-6, offset, casting
        ),
        reference=lambda x, r, w=None, offset=0.0, casting="llama": fused_add_rms_norm_reference(
            x, r, w, 1e-6, offset, casting
        ),
        inputs=_inputs,
        shapes=((1, 8), (5, 123), (2, 7, 512), (3, 17000)),
        options=(dict(), dict(casting="gemma", offset=1.0), dict(w=None)),
        bench=((8192, 2048), (8192, 4096), (16384, 4096), (16384, 8192)),
        traffic=lambda t: tuple(4 * t["x"].numel() * t["x"].element_size() for _ in range(2)),
    )
)
