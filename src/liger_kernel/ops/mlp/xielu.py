r"""xIELU: a square above zero, an exponential below, with two learned weights (Apertus).

    αp = softplus(alpha_p),   αn = beta + softplus(alpha_n)
    x > 0:   y = αp·x² + beta·x,                   dy/dx = 2·αp·x + beta
    else:    y = αn·(exp(m) - 1 - x) + beta·x,     dy/dx = αn·(exp(x)·[x < eps] - 1) + beta,   m = min(x, eps)

    dalpha_p = σ(alpha_p)·Σ_{x>0} dy·x²,   dalpha_n = σ(alpha_n)·Σ_{x≤0} dy·(exp(m) - 1 - x)

beta and eps are numbers; eps is a little below zero. Everything is computed in fp32 and rounded once.

Source: Huang and Schlag, Deriving Activation Functions Using Integration, arXiv:2411.13010.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, F, Function, custom_op
from liger_kernel.core.reduce import partial, sum_rows
from liger_kernel.core.tile import cdiv, exp, exp_for, log, sigmoid, tl, triton


def xielu_reference(x, alpha_p, alpha_n, beta=0.5, eps=-1e-6):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    z, alpha_p, alpha_n = x.to(wide), F.softplus(alpha_p.to(wide)), beta + F.softplus(alpha_n.to(wide))
    below = torch.expm1(torch.min(z, z.new_tensor(eps))) - z
    return torch.where(z > 0, alpha_p * z * z, alpha_n * below).add(beta * z).to(x.dtype)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), and its slope."""
    e = exp(-tl.abs(x))
    small = e * (1.0 - e * (0.5 - e * (0.3333333333 - e * 0.25)))
    slope, _ = sigmoid(x)
    return tl.where(x > 0, x, 0.0) + tl.where(e < 0.01, small, log(1.0 + e)), slope


@triton.jit
def _below(x, eps, EXACT: tl.constexpr):
    """exp(m) - 1 - x and exp(m), for x ≤ 0; by a series where the difference would cancel."""
    m = tl.where(x > eps, eps, x)
    e = exp_for(m, EXACT)
    s = 1.3888889e-3 + m * (1.9841270e-4 + m * 2.4801587e-5)
    near = m * m * (0.5 + m * (0.16666667 + m * (4.1666668e-2 + m * (8.3333338e-3 + m * s))))
    return tl.where(m > -0.5, near, (e - 1.0) - m) + (m - x), e


@triton.jit
def _numbers(alpha_p_ptr, alpha_n_ptr, beta):
    """αp, αn, and the slopes of both."""
    p, p_slope = _softplus(tl.load(alpha_p_ptr).to(tl.float32))
    n, n_slope = _softplus(tl.load(alpha_n_ptr).to(tl.float32))
    return p, beta + n, p_slope, n_slope


@kernel
def _fwd(x_ptr, alpha_p_ptr, alpha_n_ptr, y_ptr, N, beta, eps, BLOCK: tl.constexpr):
    p, q, _, _ = _numbers(alpha_p_ptr, alpha_n_ptr, beta)
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n, mask=n < N).to(tl.float32)
    below, _ = _below(x, eps, x_ptr.dtype.element_ty == tl.float32)
    y = tl.where(x > 0, p * x * x, q * below) + beta * x
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@kernel
def _bwd(
    x_ptr, dy_ptr, alpha_p_ptr, alpha_n_ptr, dx_ptr, dp_ptr, dn_ptr, N, beta, eps, BLOCK: tl.constexpr
):  # fmt: skip
    """A program processes every num_programs-th block, and writes its part of dalpha_p and dalpha_n."""
    pid = tl.program_id(0)
    p, q, p_slope, n_slope = _numbers(alpha_p_ptr, alpha_n_ptr, beta)
    dp = tl.zeros((BLOCK,), dtype=tl.float32)
    dn = dp
    for block in range(pid, tl.cdiv(N, BLOCK), tl.num_programs(0)):
        n = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        below, e = _below(x, eps, x_ptr.dtype.element_ty == tl.float32)
        if dx_ptr is not None:
            moves = tl.where(x < eps, 1.0, tl.where(x == eps, 0.5, 0.0))  # of a tie half, as in PyTorch
            dx = dy * (tl.where(x > 0, 2.0 * p * x, q * (e * moves - 1.0)) + beta)
            tl.store(dx_ptr + n, dx.to(dx_ptr.dtype.element_ty), mask=n < N)
        dp += tl.where(x > 0, dy * x * x, 0.0)
        dn += tl.where(x > 0, 0.0, dy * below)
    if dp_ptr is not None:
        tl.store(dp_ptr + pid, (tl.sum(dp) * p_slope).to(dp_ptr.dtype.element_ty))
    if dn_ptr is not None:
        tl.store(dn_ptr + pid, (tl.sum(dn) * n_slope).to(dn_ptr.dtype.element_ty))


def _launch():
    """(columns, warps) of a program: 16 columns a thread."""
    return 2048, 4


def _gradients(x, dy, alpha_p, alpha_n, beta, eps, need_dx, need_dp, need_dn):
    needs = (x, need_dx), (alpha_p, need_dp), (alpha_n, need_dn)
    return tuple(t.new_empty(t.shape) if need else None for t, need in needs)


@custom_op("xielu", lambda x, alpha_p, alpha_n, beta, eps: x.new_empty(x.shape))
def xielu_fwd(x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: float, eps: float) -> torch.Tensor:
    """x contiguous -> y"""
    y, (columns, warps) = x.new_empty(x.shape), _launch()
    if x.numel():
        _fwd[(cdiv(x.numel(), columns),)](
            x, alpha_p, alpha_n, y, x.numel(), beta, eps, BLOCK=columns, num_warps=devices.warps(warps, x)
        )
    return y


@custom_op("xielu_backward", _gradients)
def xielu_bwd(
    x: torch.Tensor, dy: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: float, eps: float,
    need_dx: bool, need_dp: bool, need_dn: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """x, dy contiguous -> dx, dalpha_p, dalpha_n, each like its tensor. What is not needed is None."""
    dx, dp, dn = _gradients(x, dy, alpha_p, alpha_n, beta, eps, need_dx, need_dp, need_dn)
    columns, warps = _launch()
    blocks = cdiv(x.numel(), columns)
    few = need_dp or need_dn  # programs, for few parts of the sums
    programs = max(1, min(blocks, 16 * devices.multiprocessors(x)) if few else blocks)
    parts = partial(dp, programs), partial(dn, programs)
    _bwd[(programs,)](
        x, dy, alpha_p, alpha_n, dx, *parts, x.numel(), beta, eps, BLOCK=columns, num_warps=devices.warps(warps, x)
    )
    for part, gradient in zip(parts, (dp, dn), strict=True):
        sum_rows(part, gradient)
    return dx, dp, dn


class LigerXIELUFunction(Function):
    """``apply(x, alpha_p, alpha_n, beta=0.5, eps=-1e-6) -> y`` like x, contiguous. As `liger_xielu`."""

    reference = staticmethod(xielu_reference)

    @staticmethod
    def forward(ctx, x, alpha_p, alpha_n, beta=0.5, eps=-1e-6):
        devices.require_kernels("LigerXIELUFunction", x)
        if not check.fits(x, (1,), alpha_p, alpha_n):
            _check("LigerXIELUFunction", x, alpha_p, alpha_n)
        ctx.save_for_backward(x, alpha_p, alpha_n)
        ctx.options = beta, eps
        return xielu_fwd(x.contiguous(), alpha_p, alpha_n, *ctx.options)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors, *ctx.options

    @staticmethod
    def backward(ctx, dy):
        x, *alphas = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        found = xielu_bwd(x.contiguous(), dy.contiguous(), *alphas, *ctx.options, *needs)
        return *(d if need else None for d, need in zip(found, needs, strict=True)), None, None


def _check(name, x, alpha_p, alpha_n):
    check.floats(name, dict(x=x, alpha_p=alpha_p, alpha_n=alpha_n))
    for argument, t in dict(alpha_p=alpha_p, alpha_n=alpha_n).items():
        check.shape(name, argument, t, (1,), ())


def liger_xielu(
    x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: float = 0.5, eps: float = -1e-6
) -> torch.Tensor:
    """``αp·x² + beta·x`` above zero, ``αn·(exp(min(x, eps)) - 1 - x) + beta·x`` below.

    Args:
        x: any shape and strides, fp32, bf16 or fp16.
        alpha_p, alpha_n: (1,), any floating dtype: αp is softplus(alpha_p), αn is beta + softplus(alpha_n).
        beta: the slope at zero.
        eps: a number below zero and close to it, from which on the exponential no longer moves.

    Returns:
        A contiguous tensor of x's shape and dtype, computed in fp32 and rounded once.

    Raises:
        ValueError: alpha_p or alpha_n has another shape or device; beta or eps is not finite, or eps not below zero.
        TypeError: something is not a floating point tensor, or not a number.

    Source: arXiv:2411.13010.
    """
    name = "liger_xielu"
    _check(name, x, alpha_p, alpha_n)
    beta, eps = _options(name, beta, eps)
    run = LigerXIELUFunction.apply if devices.has_kernels(x) else xielu_reference
    return run(x, alpha_p, alpha_n, beta, eps)


def _options(name, beta, eps):
    eps = check.finite(name, "eps", eps)
    if eps >= 0:
        raise check.Misfit(f"{name}: eps is {eps!r}, give a number below zero")
    return check.finite(name, "beta", beta), eps


class LigerXIELU(torch.nn.Module):
    """`liger_xielu` as a module; its parameters are named as Hugging Face's, and begin with these αp and αn."""

    def __init__(
        self, alpha_p_init: float = 0.8, alpha_n_init: float = 0.8, beta: float = 0.5, eps: float = -1e-6,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        check.positive(name, "alpha_p_init", alpha_p_init)
        check.positive(name, "alpha_n_init - beta", check.finite(name, "alpha_n_init", alpha_n_init) - beta)
        for argument, value in dict(alpha_p=alpha_p_init, alpha_n=alpha_n_init - beta).items():
            raw = torch.tensor([value], dtype=torch.float64).expm1().log()
            setattr(self, argument, torch.nn.Parameter(raw.to(dtype or torch.get_default_dtype())))
        self.beta, self.eps = _options(name, beta, eps)

    def forward(self, x: torch.Tensor):
        return liger_xielu(x, self.alpha_p, self.alpha_n, self.beta, self.eps)

    def extra_repr(self):
        return f"beta={self.beta}, eps={self.eps}"


def _inputs(*shape):
    alpha_p, alpha_n = (torch.randn(1).requires_grad_() for _ in range(2))
    return dict(x=(2 * torch.randn(shape)).requires_grad_(), alpha_p=alpha_p, alpha_n=alpha_n)


CASES.append(
    Case(
        "xielu",
        fn=liger_xielu,
        reference=xielu_reference,
        inputs=_inputs,
        shapes=((1, 8), (5, 123), (3, 1025)),
        options=(dict(), dict(beta=0.3, eps=-1e-3)),
        bench=((8192, 14336),),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (2, 3)),
        fp32_roundings=2,
    )
)
