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

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, Function
from liger_kernel.ops.norm.rows import norm_bwd, norm_fwd, rows, shaped
from liger_kernel.ops.utils import calculate_settings

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
        devices.require_kernels("LigerRMSNormFunction", X)
        x, w, cast = rows(X), None if W is None else W.contiguous(), CASTINGS.index(casting_mode)
        y, _, stats = norm_fwd(x, None, w, None, eps, offset, cast, False)
        ctx.save_for_backward(X, W, stats)
        ctx.options = eps, offset, casting_mode
        return shaped(y, X.shape)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:2], *ctx.options

    @staticmethod
    def backward(ctx, dY):
        X, W, stats = ctx.saved_tensors
        w, (_, offset, casting_mode) = None if W is None else W.contiguous(), ctx.options
        cast, (need_dx, need_dw) = CASTINGS.index(casting_mode), ctx.needs_input_grad[:2]
        dx, dw, _ = norm_bwd(rows(dY), None, rows(X), w, None, stats, offset, cast, False, need_dx, need_dw, False)
        return shaped(dx, dY.shape) if need_dx else None, dw if need_dw else None, None, None, None, None, None


CODES = {name: code for code, name in enumerate(CASTINGS, -1)}  # what frameworks keep for backward


def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode):
    """The kernels without autograd, for frameworks with a Function of their own.

    Args:
        X (..., H), W (H,) or None, eps, offset, casting_mode: as in `liger_rms_norm`.
        row_mode: chooses nothing.

    Returns:
        (Y, X, RSTD, BLOCK_SIZE, num_warps, casting_mode): Y like X; X as rows (M, H) and RSTD (M,), fp32, which
        `rms_norm_backward` takes; and three ints that it is given back: how it launches doesn't hang on the first two.

    Raises:
        ValueError, TypeError: as `liger_rms_norm`. RuntimeError: no kernels for X, or as of `calculate_settings`.
    """
    name = "rms_norm_forward"
    eps, offset = checked(name, X, W, eps, offset, casting_mode)
    devices.require_kernels(name, X)
    settings = calculate_settings(X.shape[-1])
    x, w = rows(X), None if W is None else W.contiguous()
    y, _, rstd = norm_fwd(x, None, w, None, eps, offset, CASTINGS.index(casting_mode), False)
    return shaped(y, X.shape), x.view(-1, X.shape[-1]), rstd, *settings, CODES[casting_mode]


def rms_norm_backward(dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode):
    """-> dX like dY, dW like W (None without one), for what `rms_norm_forward` returned.

    ``casting_mode`` may also be given by its name; ``BLOCK_SIZE``, ``num_warps``, ``in_place`` (dY may be written to:
    it isn't) and ``row_mode`` choose nothing.
    """
    name = "rms_norm_backward"
    casting_mode = CODES.get(casting_mode, casting_mode)
    if casting_mode not in CODES.values():
        raise ValueError(f"{name}: casting_mode is {casting_mode!r}, give what rms_norm_forward returned")
    check_norm(name, X, W=W)
    check.floats(name, dict(dY=dY, X=X, RSTD=RSTD))
    if dY.numel() != X.numel() or dY.shape[-1:] != X.shape[-1:] or RSTD.numel() * X.shape[-1] != X.numel():
        given = f"{tuple(dY.shape)}, {tuple(X.shape)} and {tuple(RSTD.shape)}"
        raise ValueError(f"{name}: dY, X and RSTD have shapes {given}, give those of one forward")
    devices.require_kernels(name, X)
    w = None if W is None else W.contiguous()
    dx, dw, _ = norm_bwd(
        rows(dY), None, rows(X), w, None, RSTD, offset, casting_mode + 1, False, True, W is not None, False
    )
    return shaped(dx, dY.shape), dw


def check_casting(name, casting_mode):
    if casting_mode not in CASTINGS:
        raise ValueError(f"{name}: casting_mode is {casting_mode!r}, give one of {', '.join(CASTINGS)}")


def check_norm(name, X, **parameters):
    """X (..., H), parameters (H,) or None."""
    check.floats(name, dict(X=X), **parameters)
    if X.dim() == 0:
        raise ValueError(f"{name}: X has no dimension, give a tensor of shape (..., hidden size)")
    for argument, p in parameters.items():
        if p is not None and p.shape != X.shape[-1:]:
            raise ValueError(f"{name}: {argument} has shape {tuple(p.shape)}, hidden size is {X.shape[-1]}")


def checked(name, X, W, eps, offset, casting_mode):
    """-> eps, offset as Python numbers, or what `liger_rms_norm` and its kin owe their callers."""
    check_norm(name, X, weight=W)
    check_casting(name, casting_mode)
    return check.not_negative(name, "eps", eps), check.finite(name, "offset", offset)


def liger_rms_norm(
    X: torch.Tensor, W: torch.Tensor | None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = True, row_mode: bool | None = None,
) -> torch.Tensor:  # fmt: skip
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
        ValueError: unknown casting mode; X has no dimension; W is not of shape (H,), or elsewhere; a negative eps.
        TypeError: X or W is no floating point tensor, eps or offset no number.

    Source: arXiv:1910.07467.
    """
    eps, offset = checked("liger_rms_norm", X, W, eps, offset, casting_mode)
    if not devices.has_kernels(X):
        return rms_norm_reference(X, W, eps, offset, casting_mode)
    return LigerRMSNormFunction.apply(X, W, eps, offset, casting_mode, in_place, row_mode)


def check_module(name, hidden_size, eps, init_fn):
    """What the norms' modules are made with. ``hidden_size`` may be a shape of one dimension, as `torch.nn`'s are."""
    size = hidden_size[0] if isinstance(hidden_size, tuple | list) and len(hidden_size) == 1 else hidden_size
    check.size(name, "hidden_size", size)
    check.not_negative(name, "eps", eps)
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f"{name}: init_fn is {init_fn!r}, give 'ones' or 'zeros'")


class LigerRMSNorm(torch.nn.Module):
    """`liger_rms_norm` with its weight; ``elementwise_affine=False`` has none. The state dict is Hugging Face's."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, row_mode: bool | None = None, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        check_module(name, hidden_size if elementwise_affine else 0, eps, init_fn)
        check_casting(name, casting_mode)
        check.finite(name, "offset", offset)
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = torch.nn.Parameter(getattr(torch, init_fn)(hidden_size))
        else:
            self.register_parameter("weight", None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode = in_place, row_mode

    def forward(self, hidden_states: torch.Tensor):
        return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    def extra_repr(self):
        shape = "no weight" if self.weight is None else tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerRMSNormForGemma(LigerRMSNorm):
    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma",
        init_fn: str = "zeros", in_place: bool = True, row_mode: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNorm):
    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma",
        init_fn: str = "zeros", in_place: bool = False, row_mode: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma2):
    pass


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma2):
    pass


class LigerRMSNormForGemma3(LigerRMSNorm):
    def __init__(
        self, dim: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma", init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """``with_scale=False`` has no weight."""

    def __init__(
        self, dim: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "gemma", init_fn: str = "ones",
        in_place: bool = False, with_scale: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """``dim`` may stay out where there is no weight."""

    def __init__(
        self, dim: int | None = None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "gemma",
        init_fn: str = "ones", in_place: bool = False, with_scale: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, with_scale)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = False, row_mode: bool | None = None,
    ) -> None:  # fmt: skip
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
