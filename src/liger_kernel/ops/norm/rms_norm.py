r"""RMSNorm.

    rstd = 1 / sqrt(mean(x²) + eps),   x̂ = x·rstd,   y = x̂·(w + offset)

    with m = dy·(w + offset):   dx = rstd·(m - x̂·mean(m·x̂)),   dw = Σ_rows dy·x̂

``casting`` says where Hugging Face rounds to the input's dtype: "llama" rounds x̂, and dw sums the
rounded x̂; "gemma" rounds only y. "none" does not ask for fp32: it is published as arithmetic in
the input's dtype, in which the squares of fp16 are infinite from 256 on. Here it is computed in
fp32 and rounded once, as "gemma" is, by kernels and reference.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; rounding as in
the Llama and Gemma models of Hugging Face transformers."""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, Function
from liger_kernel.ops.norm.norm_kernels import as_rows, norm_bwd, norm_fwd, reshape_output
from liger_kernel.ops.utils import calculate_settings

CASTINGS = ("none", "llama", "gemma")


def rms_norm_reference(x, w=None, eps=1e-6, offset=0.0, casting="llama"):
    """Compute `liger_rms_norm` in plain PyTorch, for tensors of any dtype."""
    f = x if x.dtype == torch.float64 else x.float()
    n = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "llama":
        n = n.to(x.dtype)
    if w is None:
        return n.to(x.dtype)
    if casting != "llama":
        w = w.to(n.dtype)
    return (n * (w + offset)).to(x.dtype)


class LigerRMSNormFunction(Function):
    """Autograd Function of `liger_rms_norm`: ``apply(X, W, eps, ...)`` returns Y like X.

    ``in_place`` and ``row_mode`` have no effect. dX does not overwrite dY, which may be used
    elsewhere, and the launch follows from the shape."""

    @staticmethod
    def reference(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        return rms_norm_reference(X, W, eps, offset, casting_mode)

    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        devices.require_kernels("LigerRMSNormFunction", X)
        check_function("LigerRMSNormFunction", X, casting_mode, weight=W)
        w = None if W is None else W.contiguous()
        casting = CASTINGS.index(casting_mode)
        y, _, stats = norm_fwd(as_rows(X), None, w, None, eps, offset, casting, False)
        ctx.save_for_backward(X, W, stats)
        ctx.options = eps, offset, casting_mode
        return reshape_output(y, X.shape)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:2], *ctx.options

    @staticmethod
    def backward(ctx, dY):
        X, W, stats = ctx.saved_tensors
        w = None if W is None else W.contiguous()
        _, offset, casting_mode = ctx.options
        need_dx, need_dw = ctx.needs_input_grad[:2]
        dx, dw, _ = norm_bwd(
            as_rows(dY),
            None,
            as_rows(X),
            w,
            None,
            stats,
            offset,
            CASTINGS.index(casting_mode),
            False,
            need_dx,
            need_dw,
            False,
        )
        dx = reshape_output(dx, dY.shape) if need_dx else None
        return dx, dw if need_dw else None, None, None, None, None, None


# casting modes as rms_norm_forward returns them: "none" is -1
CASTING_CODES = {name: code for code, name in enumerate(CASTINGS, -1)}


def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode):
    """Run the forward kernel without autograd, for frameworks with a Function of their own.

    Args:
        X (..., H), W (H,) or None, eps, offset, casting_mode: as in `liger_rms_norm`.
        row_mode: no effect.

    Returns:
        (Y, X, RSTD, BLOCK_SIZE, num_warps, casting_mode): Y like X; X as (M, H); RSTD (M,), fp32;
        and three ints. `rms_norm_backward` takes all but Y. BLOCK_SIZE and num_warps have no effect
        there.

    Raises:
        ValueError, TypeError: as `liger_rms_norm`.
        RuntimeError: there are no kernels for X, or H is too large for `calculate_settings`.
    """
    name = "rms_norm_forward"
    eps, offset = check_arguments(name, X, W, eps, offset, casting_mode)
    devices.require_kernels(name, X)
    settings = calculate_settings(X.shape[-1])
    x = as_rows(X)
    w = None if W is None else W.contiguous()
    y, _, rstd = norm_fwd(x, None, w, None, eps, offset, CASTINGS.index(casting_mode), False)
    y = reshape_output(y, X.shape)
    return y, x.view(-1, X.shape[-1]), rstd, *settings, CASTING_CODES[casting_mode]


def rms_norm_backward(
    dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode
):
    """Return dX like dY, and dW like W (None without W), from what `rms_norm_forward` returned.

    ``casting_mode`` may also be a name. ``BLOCK_SIZE``, ``num_warps``, ``row_mode`` and
    ``in_place`` (whether dX may overwrite dY) have no effect.

    Raises:
        ValueError, TypeError: tensors that are not from one forward, or an unknown casting mode.
        RuntimeError: there are no kernels for X.
    """
    name = "rms_norm_backward"
    casting_mode = CASTING_CODES.get(casting_mode, casting_mode)
    if casting_mode not in CASTING_CODES.values():
        raise ValueError(
            f"{name}: casting_mode is {casting_mode!r}, give what rms_norm_forward returned"
        )
    check_norm(name, X, W=W)
    check.floats(name, dict(dY=dY, X=X, RSTD=RSTD))
    same_shape = dY.numel() == X.numel() and dY.shape[-1:] == X.shape[-1:]
    if not same_shape or RSTD.numel() * X.shape[-1] != X.numel():
        shapes = f"{tuple(dY.shape)}, {tuple(X.shape)} and {tuple(RSTD.shape)}"
        raise ValueError(f"{name}: dY, X and RSTD have shapes {shapes}, give those of one forward")
    devices.require_kernels(name, X)
    w = None if W is None else W.contiguous()
    dx, dw, _ = norm_bwd(
        as_rows(dY),
        None,
        as_rows(X),
        w,
        None,
        RSTD,
        offset,
        casting_mode + 1,
        False,
        True,
        W is not None,
        False,
    )
    return reshape_output(dx, dY.shape), dw


def check_casting(name, casting_mode):
    """Raise unless the casting mode is one of `CASTINGS`."""
    if casting_mode not in CASTINGS:
        raise check.InvalidArgument(
            f"{name}: casting_mode is {casting_mode!r}, give one of {', '.join(CASTINGS)}"
        )


def check_norm(name, X, **parameters):
    """Raise unless X is (..., H), and each parameter (H,) on X's device, or None.

    All must have floating point dtypes."""
    check.floats(name, dict(X=X), **parameters)
    if X.dim() == 0:
        raise ValueError(f"{name}: X has no dimension, give a tensor of shape (..., hidden size)")
    for argument, p in parameters.items():
        if p is not None and p.shape != X.shape[-1:]:
            raise check.InvalidArgument(
                f"{name}: {argument} has shape {tuple(p.shape)}, hidden size is {X.shape[-1]}"
            )


def check_function(name, X, casting_mode=None, **parameters):
    """Check the arguments of a norm's Function again, for code that applies it by itself."""
    if X.dim() == 0 or not check.matches(X, X.shape[-1:], *parameters.values()):
        check_norm(name, X, **parameters)
    if casting_mode is not None:
        check_casting(name, casting_mode)


def check_arguments(name, X, W, eps, offset, casting_mode):
    """Check the arguments of `liger_rms_norm`. Returns eps and offset as Python numbers."""
    check_norm(name, X, weight=W)
    check_casting(name, casting_mode)
    return check.non_negative(name, "eps", eps), check.finite(name, "offset", offset)


def liger_rms_norm(
    X: torch.Tensor,
    W: torch.Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
    row_mode: bool | None = None,
) -> torch.Tensor:
    """RMSNorm over the last dimension: ``X / sqrt(mean(X²) + eps) * (offset + W)``.

    Args:
        X: (..., H), fp32, bf16 or fp16.
        W: (H,), any floating dtype, or None for no weight (``offset`` is unused then).
        eps: added to the mean square.
        offset: added to the weight: 0 for Llama, 1 for Gemma.
        casting_mode: where Hugging Face rounds: "llama" or "gemma". "none" is computed as "gemma".
        in_place, row_mode: no effect.

    Returns:
        (..., H) in X's dtype.

    Raises:
        ValueError: an unknown casting mode; X has no dimension; W has another shape or device; eps
            is negative.
        TypeError: X or W is not a floating point tensor, eps or offset not a number.

    Source: arXiv:1910.07467.
    """
    eps, offset = check_arguments("liger_rms_norm", X, W, eps, offset, casting_mode)
    if not devices.has_kernels(X):
        return rms_norm_reference(X, W, eps, offset, casting_mode)
    return LigerRMSNormFunction.call(X, W, eps, offset, casting_mode, in_place, row_mode)


def check_module(name, hidden_size, eps, init_fn):
    """Check the arguments of a norm's module. ``hidden_size`` may be a shape of one dimension."""
    if isinstance(hidden_size, tuple | list) and len(hidden_size) == 1:
        hidden_size = hidden_size[0]
    check.size(name, "hidden_size", hidden_size)
    check.non_negative(name, "eps", eps)
    if init_fn not in ("ones", "zeros"):
        raise check.InvalidArgument(f"{name}: init_fn is {init_fn!r}, give 'ones' or 'zeros'")


class LigerRMSNorm(torch.nn.Module):
    """`liger_rms_norm` as a module. The state dict is Hugging Face's.

    With ``elementwise_affine=False`` there is no weight."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
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
        return liger_rms_norm(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )

    def extra_repr(self):
        shape = "no weight" if self.weight is None else tuple(self.weight.shape)
        options = f"offset={self.offset}, casting_mode={self.casting_mode!r}"
        return f"{shape}, eps={self.variance_epsilon}, {options}"


class LigerRMSNormForGemma(LigerRMSNorm):
    """`LigerRMSNorm` with the defaults of Gemma."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNorm):
    """`LigerRMSNorm` with the defaults of Gemma 2."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma2):
    """`LigerRMSNorm` with the defaults of Qwen3-Next."""


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma2):
    """`LigerRMSNorm` with the defaults of Muse Glimmer's centred text norm."""


class LigerRMSNormForGemma3(LigerRMSNorm):
    """`LigerRMSNorm` with the defaults of Gemma 3."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """`LigerRMSNorm` with the defaults of Gemma 4. ``with_scale=False``: no weight."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        super().__init__(
            dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale
        )
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """`LigerRMSNorm` with the defaults of Muse Glimmer. ``dim`` is optional without a weight."""

    def __init__(
        self,
        dim: int | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, with_scale)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """`LigerRMSNorm` with the defaults of OLMo 2."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    """`LigerRMSNorm` with the defaults of GLM-4."""


CASES.append(
    Case(
        "rms_norm",
        fn=lambda x, w=None, offset=0.0, casting="llama": liger_rms_norm(
            x, w, 1e-6, offset, casting
        ),
        reference=lambda x, w=None, offset=0.0, casting="llama": rms_norm_reference(
            x, w, 1e-6, offset, casting
        ),
        inputs=lambda *shape: dict(
            x=torch.randn(shape).requires_grad_(), w=torch.randn(shape[-1]).requires_grad_()
        ),
        shapes=((1, 8), (5, 123), (2, 7, 512), (3, 17000)),
        options=(dict(), dict(casting="gemma", offset=1.0), dict(casting="none"), dict(w=None)),
        bench=(
            (8192, 2048),
            (8192, 4096),
            (16384, 4096),
            (16384, 8192),
            (65536, 128),
            (1048576, 128),
        ),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (2, 3)),
    )
)
