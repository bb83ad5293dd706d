r"""LayerNorm.

    μ = mean(x),   rstd = 1 / sqrt(mean((x - μ)²) + eps),   x̂ = (x - μ)·rstd,   y = x̂·w + b

    with m = dy·w:   dx = rstd·(m - mean(m) - x̂·mean(m·x̂)),   dw = Σ_rows dy·x̂,   db = Σ_rows dy

The kernels compute in fp32 and round once.

Source: Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, Function
from liger_kernel.implementations import resolve_impl
from liger_kernel.ops.norm.norm_kernels import as_rows, norm_bwd, norm_fwd, reshape_output
from liger_kernel.ops.norm.rms_norm import CASTINGS, check_function, check_module, check_norm

GEMMA = CASTINGS.index("gemma")


def layer_norm_reference(x, w=None, b=None, eps=1e-6):
    """Compute `liger_layer_norm` in plain PyTorch, for tensors of any dtype."""
    f = x if x.dtype == torch.float64 else x.float()
    w = None if w is None else w.to(f.dtype)
    b = None if b is None else b.to(f.dtype)
    return F.layer_norm(f, x.shape[-1:], w, b, eps).to(x.dtype)


class LigerLayerNormFunction(Function):
    """Autograd Function of `liger_layer_norm`: ``apply(X, W, B, eps)`` returns Y like X."""

    reference = staticmethod(layer_norm_reference)

    @staticmethod
    def forward(ctx, X, W, B, eps):
        devices.require_kernels("LigerLayerNormFunction", X)
        check_function("LigerLayerNormFunction", X, weight=W, bias=B)
        w = None if W is None else W.contiguous()
        b = None if B is None else B.contiguous()
        y, _, stats = norm_fwd(as_rows(X), None, w, b, eps, 0.0, GEMMA, True)
        ctx.save_for_backward(X, W, B, stats)
        ctx.eps = eps
        return reshape_output(y, X.shape)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:3], ctx.eps

    @staticmethod
    def backward(ctx, dY):
        X, W, B, stats = ctx.saved_tensors
        w = None if W is None else W.contiguous()
        b = None if B is None else B.contiguous()
        needs = ctx.needs_input_grad[:3]
        dx, dw, db = norm_bwd(as_rows(dY), None, as_rows(X), w, b, stats, 0.0, GEMMA, True, *needs)
        dx = reshape_output(dx, dY.shape) if needs[0] else None
        return dx, dw if needs[1] else None, db if needs[2] else None, None


def liger_layer_norm(
    X: torch.Tensor,
    W: torch.Tensor | None,
    B: torch.Tensor | None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Layer normalisation over the last dimension: ``(x - mean) / sqrt(var + eps) * W + B``.

    Args:
        X: (..., H), fp32, bf16 or fp16.
        W, B: (H,), any floating dtype. None: a weight of 1, a bias of 0.
        eps: added to the variance.

    Returns:
        (..., H) in X's dtype.

    Raises:
        ValueError: X has no dimension; W or B has another shape or device; eps is negative.
        TypeError: X, W or B is not a floating point tensor, eps not a number.

    Source: arXiv:1607.06450.
    """
    check_norm("liger_layer_norm", X, weight=W, bias=B)
    eps = check.non_negative("liger_layer_norm", "eps", eps)
    if not devices.has_kernels(X):
        return layer_norm_reference(X, W, B, eps)
    return LigerLayerNormFunction.call(X, W, B, eps)


class LigerLayerNorm(torch.nn.Module):
    """`liger_layer_norm` as a module. The state dict is `torch.nn.LayerNorm`'s.

    There is always a trainable bias: zeros, or with ``bias=True`` numbers from N(0, 1). ``impl``
    names an implementation (`liger_kernel.available_impls`). ``backend`` is another name for
    ``impl``. ``mode`` has no effect.

    Raises:
        ValueError, TypeError: a size, eps or init_fn that does not fit; in ``forward``, an unknown
            implementation, or as `liger_layer_norm`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_module(type(self).__name__, hidden_size, eps, init_fn)
        self.hidden_size = hidden_size
        self.eps = eps
        self.variance_epsilon = eps
        self.weight = torch.nn.Parameter(getattr(torch, init_fn)(hidden_size))
        self.bias = torch.nn.Parameter(
            torch.randn(hidden_size) if bias else torch.zeros(hidden_size)
        )
        self.impl = impl if backend is None else backend
        self.mode = mode

    @property
    def backend(self):
        return self.impl

    @backend.setter
    def backend(self, name):
        self.impl = name

    def forward(self, hidden_states: torch.Tensor):
        resolve_impl("LigerLayerNorm", self.impl)
        return liger_layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self):
        return f"{self.hidden_size}, eps={self.eps}"


CASES.append(
    Case(
        "layer_norm",
        fn=lambda x, w=None, b=None: liger_layer_norm(x, w, b, 1e-6),
        reference=lambda x, w=None, b=None: layer_norm_reference(x, w, b, 1e-6),
        inputs=lambda *shape: dict(
            x=torch.randn(shape).requires_grad_(),
            w=torch.randn(shape[-1]).requires_grad_(),
            b=torch.randn(shape[-1]).requires_grad_(),
        ),
        shapes=((1, 8), (5, 123), (2, 7, 512), (3, 17000)),
        options=(dict(), dict(w=None, b=None), dict(b=None)),
        bench=((8192, 2048), (8192, 4096), (16384, 4096), (16384, 8192)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (2, 3)),
    )
)
