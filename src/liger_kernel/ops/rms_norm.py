r"""RMSNorm.

    rstd = 1 / sqrt(mean(x²) + eps),   x̂ = x·rstd,   y = x̂·(w + offset)

    with m = dy·(w + offset):   dx = rstd·(m - x̂·mean(m·x̂)),   dw = Σ_rows dy·x̂

``casting`` says where Hugging Face rounds to the input's dtype: "llama" rounds x̂ (and dw sums the rounded x̂),
"gemma" rounds y alone, "none" computes everything in the input's dtype. A kernel computes in fp32 throughout, which
for "none" is the same formula with less error.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; rounding as in the Llama and Gemma
models of Hugging Face transformers.
"""

from __future__ import annotations

import torch

from . import _device
from ._norm import norm_bwd, norm_fwd, rows, shaped
from ._op import CASES, Case, Function

CASTINGS = ("none", "llama", "gemma")


def rms_norm_reference(x, w=None, eps=1e-6, offset=0.0, casting="llama"):
    f = x if casting == "none" or x.dtype == torch.float64 else x.float()
    n = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "llama":
        n = n.to(x.dtype)
    if w is None:
        return n.to(x.dtype)
    if casting == "gemma":
        w = w.to(n.dtype)
    return (n * (w + offset)).to(x.dtype)


class LigerRMSNormFunction(Function):
    """``apply(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None) -> Y`` like X.

    ``in_place`` (permission to write dX over dY) and ``row_mode`` are accepted and not needed: dY may have other
    readers, and the launch is chosen from the shape.
    """

    @staticmethod
    def reference(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        return rms_norm_reference(X, W, eps, offset, casting_mode)

    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        _device.require_kernels("LigerRMSNormFunction", X)
        x, w, cast = rows(X), None if W is None else W.contiguous(), CASTINGS.index(casting_mode)
        y, _, stats = norm_fwd(x, None, w, None, eps, offset, cast, False)
        ctx.save_for_backward(x, w, stats)
        ctx.offset, ctx.cast = offset, cast
        return shaped(y, X.shape)

    @staticmethod
    def backward(ctx, dY):
        x, w, stats = ctx.saved_tensors
        need_dx, need_dw = ctx.needs_input_grad[:2]
        dx, dw, _ = norm_bwd(rows(dY), None, x, w, None, stats, ctx.offset, ctx.cast, False, need_dx, need_dw, False)
        return shaped(dx, dY.shape) if need_dx else None, dw if need_dw else None, None, None, None, None, None


def checked(name, X, W, casting_mode):
    """Raise what `liger_rms_norm` and its kin owe their callers."""
    if casting_mode not in CASTINGS:
        raise ValueError(f"{name}: casting_mode is {casting_mode!r}, give one of {', '.join(CASTINGS)}")
    if W is not None and W.shape != X.shape[-1:]:
        raise ValueError(f"{name}: weight has shape {tuple(W.shape)}, hidden size is {X.shape[-1]}")


def liger_rms_norm(X, W, eps=1e-6, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
    """Root mean square normalisation over the last dimension: ``x / sqrt(mean(x²) + eps) * (offset + W)``.

    Args:
        X: (..., H), fp32, bf16 or fp16.
        W: (H,), any floating dtype, or None for no weight (``offset`` is unused then).
        eps: added to the mean square.
        offset: added to the weight: 0 for Llama, 1 for Gemma.
        casting_mode: where Hugging Face rounds: "llama", "gemma" or "none".
        in_place, row_mode: accepted, no effect on the result.

    Returns:
        (..., H) in X's dtype.

    Raises:
        ValueError: unknown casting mode; W is not of shape (H,).

    Source: arXiv:1910.07467.
    """
    checked("liger_rms_norm", X, W, casting_mode)
    if not _device.has_kernels(X):
        return rms_norm_reference(X, W, eps, offset, casting_mode)
    return LigerRMSNormFunction.apply(X, W, eps, offset, casting_mode, in_place, row_mode)


class LigerRMSNorm(torch.nn.Module):
    """`liger_rms_norm` with its weight; ``elementwise_affine=False`` has none. The state dict is Hugging Face's."""

    def __init__(
        self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=True, row_mode=None,
        elementwise_affine=True,
    ):  # fmt: skip
        super().__init__()
        if init_fn not in ("ones", "zeros"):
            raise ValueError(f"{type(self).__name__}: init_fn is {init_fn!r}, give 'ones' or 'zeros'")
        if casting_mode not in CASTINGS:
            raise ValueError(f"{type(self).__name__}: casting_mode is {casting_mode!r}, give one of {CASTINGS}")
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = torch.nn.Parameter(getattr(torch, init_fn)(hidden_size))
        else:
            self.register_parameter("weight", None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode = in_place, row_mode

    def forward(self, hidden_states):
        return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    def extra_repr(self):
        shape = "no weight" if self.weight is None else tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerRMSNormForGemma(LigerRMSNorm):
    def __init__(
        self, hidden_size, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=True, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNorm):
    def __init__(
        self, hidden_size, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma2):
    pass


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma2):
    pass


class LigerRMSNormForGemma3(LigerRMSNorm):
    def __init__(self, dim, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """``with_scale=False`` has no weight."""

    def __init__(
        self, dim, eps=1e-6, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True
    ):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """``dim`` may stay out where there is no weight."""

    def __init__(
        self, dim=None, eps=1e-6, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True
    ):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, with_scale)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    def __init__(
        self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    pass


CASES.append(
    Case(
        "rms_norm",
        fn=lambda x, w=None, offset=0.0, casting="llama": liger_rms_norm(x, w, 1e-6, offset, casting),
        reference=lambda x, w=None, offset=0.0, casting="llama": rms_norm_reference(x, w, 1e-6, offset, casting),
        inputs=lambda *shape: dict(x=torch.randn(shape).requires_grad_(), w=torch.randn(shape[-1]).requires_grad_()),
        shapes=((1, 8), (5, 123), (2, 7, 512), (3, 17000)),
        options=(dict(), dict(casting="gemma", offset=1.0), dict(casting="none"), dict(w=None)),
        bench=((8192, 2048), (8192, 4096), (16384, 4096), (16384, 8192), (65536, 128), (1048576, 128)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (2, 3)),
    )
)
