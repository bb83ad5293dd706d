r"""Residual addition and RMSNorm in one kernel.

    s = x + r, rounded to x's dtype;   y = RMSNorm(s), as in `rms_norm`

    dx = dr = (RMSNorm's gradient for dy) + ds

It returns y and the new residual s. Without r, s is x: this is a model's first norm, whose backward
also adds the gradient of the skip connection.

Source: the decoder layers of Hugging Face transformers, ``residual + x`` followed by
arXiv:1910.07467."""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, Function, differentiable_gradients
from liger_kernel.ops.norm.norm_kernels import as_rows, norm_bwd, norm_fwd, reshape_output
from liger_kernel.ops.norm.rms_norm import (
    CASTINGS,
    LigerRMSNorm,
    check_arguments,
    check_function,
    rms_norm_reference,
)


def fused_add_rms_norm_reference(x, r, w=None, eps=1e-6, offset=0.0, casting="llama"):
    """Compute `liger_fused_add_rms_norm` in plain PyTorch, for tensors of any dtype."""
    s = x if r is None else (r + x).to(x.dtype)
    return rms_norm_reference(s, w, eps, offset, casting), s


class LigerFusedAddRMSNormFunction(Function):
    """Autograd Function of `liger_fused_add_rms_norm`, with the same arguments.

    Returns Y and S like X. ``in_place`` has no effect: dX does not overwrite an incoming gradient,
    which may be used elsewhere."""

    @staticmethod
    def reference(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        return fused_add_rms_norm_reference(X, R, W, eps, offset, casting_mode)

    @staticmethod
    def forward(ctx, X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        devices.require_kernels("LigerFusedAddRMSNormFunction", X)
        check_function("LigerFusedAddRMSNormFunction", X, casting_mode, weight=W)
        _check_residual("LigerFusedAddRMSNormFunction", X, R)
        r = None if R is None else as_rows(R)
        w = None if W is None else W.contiguous()
        casting = CASTINGS.index(casting_mode)
        y, s, stats = norm_fwd(as_rows(X), r, w, None, eps, offset, casting, False)
        S = X if R is None else reshape_output(s, X.shape)
        # the S that is returned is saved: if it is changed in place, backward raises
        ctx.save_for_backward(S, W, stats)
        ctx.options = eps, offset, casting_mode
        ctx.r_dtype = None if R is None else R.dtype
        ctx.set_materialize_grads(False)
        return reshape_output(y, X.shape), S

    @staticmethod
    def differentiable_backward(ctx, dY, dS):
        """Compute the gradients of X and R from that of S: both are used only in S."""
        S, W, _ = ctx.saved_tensors
        need_dx, need_dr, need_dw = ctx.needs_input_grad[:3]
        needs = need_dx or need_dr, need_dw, False, False, False
        ds, dw, *_ = differentiable_gradients(
            rms_norm_reference, (S, W, *ctx.options), needs, (dY,)
        )
        if ds is None or dS is None:
            dx = dS if ds is None else ds
        else:
            dx = ds + dS
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
            ds = None if dS is None else as_rows(dS)
            w = None if W is None else W.contiguous()
            _, offset, casting_mode = ctx.options
            dx, dw, _ = norm_bwd(
                as_rows(dY),
                ds,
                as_rows(S),
                w,
                None,
                stats,
                offset,
                CASTINGS.index(casting_mode),
                False,
                need_dx or need_dr,
                need_dw,
                False,
            )
            dx = reshape_output(dx, dY.shape) if need_dx or need_dr else None
        dr = dx.to(ctx.r_dtype) if need_dr and dx is not None else None
        return dx if need_dx else None, dr, dw if need_dw else None, None, None, None, None


def _check_residual(name, X, R):
    if not check.matches(X, X.shape, R):
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
    """Compute ``S = X + R`` and its RMSNorm over the last dimension, in one kernel.

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
        are (..., H), in X's dtype.

    Raises:
        ValueError, TypeError: as `liger_rms_norm`; or R has another shape or device than X, or is
            not floating point.

    Source: arXiv:1910.07467.
    """
    name = "liger_fused_add_rms_norm"
    eps, offset = check_arguments(name, X, W, eps, offset, casting_mode)
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
        x=torch.randn(shape).requires_grad_(),
        r=torch.randn(shape).requires_grad_(),
        w=torch.randn(shape[-1]).requires_grad_(),
    )


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
