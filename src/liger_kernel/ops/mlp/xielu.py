r"""xIELU: a square above zero, an exponential below, with two learned weights (Apertus).

    αp = softplus(alpha_p),   αn = beta + softplus(alpha_n)
    x > 0:   y = αp·x² + beta·x,                   dy/dx = 2·αp·x + beta
    else:    y = αn·(exp(m) - 1 - x) + beta·x,     dy/dx = αn·(exp(x)·[x < eps] - 1) + beta,   m = min(x, eps)

    dalpha_p = σ(alpha_p)·Σ_{x>0} dy·x²,   dalpha_n = σ(alpha_n)·Σ_{x≤0} dy·(exp(m) - 1 - x)

beta and eps are numbers, or tensors that hold one, which the kernels read; eps is a little below
zero. Everything is computed in fp32 and rounded once.

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
    z = x.to(wide)
    alpha_p, alpha_n = (F.softplus(alpha.to(wide).reshape(())) for alpha in (alpha_p, alpha_n))
    beta, eps = (
        n.to(wide).reshape(()) if isinstance(n, torch.Tensor) else z.new_tensor(n)
        for n in (beta, eps)
    )
    below = torch.expm1(torch.min(z, eps)) - z
    return torch.where(z > 0, alpha_p * z * z, (beta + alpha_n) * below).add(beta * z).to(x.dtype)


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
def _numbers(alpha_p_ptr, alpha_n_ptr, beta_ptr, eps_ptr, beta, eps):
    """αp, αn, and the slopes of both; beta and eps, from memory if they are there."""
    if beta_ptr is not None:
        beta = tl.load(beta_ptr).to(tl.float32)
    if eps_ptr is not None:
        eps = tl.load(eps_ptr).to(tl.float32)
    p, p_slope = _softplus(tl.load(alpha_p_ptr).to(tl.float32))
    n, n_slope = _softplus(tl.load(alpha_n_ptr).to(tl.float32))
    return p, beta + n, p_slope, n_slope, beta, eps


@kernel
def _fwd(
    x_ptr, alpha_p_ptr, alpha_n_ptr, beta_ptr, eps_ptr, y_ptr, N, beta, eps, BLOCK: tl.constexpr
):
    p, q, _, _, beta, eps = _numbers(alpha_p_ptr, alpha_n_ptr, beta_ptr, eps_ptr, beta, eps)
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n, mask=n < N).to(tl.float32)
    below, _ = _below(x, eps, x_ptr.dtype.element_ty == tl.float32)
    y = tl.where(x > 0, p * x * x, q * below) + beta * x
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@kernel
def _bwd(
    x_ptr,
    dy_ptr,
    alpha_p_ptr,
    alpha_n_ptr,
    beta_ptr,
    eps_ptr,
    dx_ptr,
    dp_ptr,
    dn_ptr,
    y_ptr,
    N,
    beta,
    eps,
    BLOCK: tl.constexpr,
):
    """A program processes every num_programs-th block, and writes its part of dalpha_p and
    dalpha_n.

    dx and y (as in `_fwd`) may share the memory of x and dy: an element is read before it is
    written."""
    pid = tl.program_id(0)
    p, q, p_slope, n_slope, beta, eps = _numbers(
        alpha_p_ptr, alpha_n_ptr, beta_ptr, eps_ptr, beta, eps
    )
    dp = tl.zeros((BLOCK,), dtype=tl.float32)
    dn = dp
    for block in range(pid, tl.cdiv(N, BLOCK), tl.num_programs(0)):
        n = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        below, e = _below(x, eps, x_ptr.dtype.element_ty == tl.float32)
        if dx_ptr is not None:
            moves = tl.where(
                x < eps, 1.0, tl.where(x == eps, 0.5, 0.0)
            )  # of a tie half, as in PyTorch
            dx = dy * (tl.where(x > 0, 2.0 * p * x, q * (e * moves - 1.0)) + beta)
            tl.store(dx_ptr + n, dx.to(dx_ptr.dtype.element_ty), mask=n < N)
        if y_ptr is not None:
            y = tl.where(x > 0, p * x * x, q * below) + beta * x
            tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)
        dp += tl.where(x > 0, dy * x * x, 0.0)
        dn += tl.where(x > 0, 0.0, dy * below)
    if dp_ptr is not None:
        tl.store(dp_ptr + pid, (tl.sum(dp) * p_slope).to(dp_ptr.dtype.element_ty))
    if dn_ptr is not None:
        tl.store(dn_ptr + pid, (tl.sum(dn) * n_slope).to(dn_ptr.dtype.element_ty))


def _launch(backward):
    """(columns, warps) of a program.

    8192x14336, bf16, 2048 columns with 2, 4, 8 warps: forward 3.43, 3.06 TB/s, -; backward -, 2.56,
    2.93 (H200, 2026-11-23)."""
    return 2048, 8 if backward else 2


def apart(beta, eps):
    """As the operators take them: the numbers, and in the place of a number that a tensor holds
    this tensor, too."""
    held = [n if isinstance(n, torch.Tensor) else None for n in (beta, eps)]
    return *(n if t is None else 0.0 for n, t in zip((beta, eps), held, strict=True)), *held


def together(beta, eps, beta_in, eps_in):
    """What `apart` was given."""
    return beta if beta_in is None else beta_in, eps if eps_in is None else eps_in


def _gradients(x, dy, alpha_p, alpha_n, beta, eps, beta_in, eps_in, need_dx, need_dp, need_dn):
    needs = (x, need_dx), (alpha_p, need_dp), (alpha_n, need_dn)
    return tuple(t.new_empty(t.shape) if need else None for t, need in needs)


def _gradients_and_product(x, *others):
    return *_gradients(x, *others), x.new_empty(x.shape)


@custom_op("xielu", lambda x, *_: x.new_empty(x.shape))
def xielu_fwd(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: float,
    eps: float,
    beta_in: torch.Tensor | None,
    eps_in: torch.Tensor | None,
) -> torch.Tensor:
    """x contiguous, beta and eps `apart` -> y"""
    y, (columns, warps) = x.new_empty(x.shape), _launch(False)
    if x.numel():
        _fwd[(cdiv(x.numel(), columns),)](
            x,
            alpha_p,
            alpha_n,
            beta_in,
            eps_in,
            y,
            x.numel(),
            beta,
            eps,
            BLOCK=columns,
            num_warps=devices.warps(warps, x),
        )
    return y


def _launch_bwd(x, dy, alpha_p, alpha_n, beta, eps, beta_in, eps_in, dx, dp, dn, y):
    """Fills those of dx, dp, dn and y that are given."""
    columns, warps = _launch(True)
    blocks = cdiv(x.numel(), columns)
    few = dp is not None or dn is not None  # programs, for few parts of the sums
    programs = max(1, min(blocks, 16 * devices.multiprocessors(x)) if few else blocks)
    parts = partial(dp, programs), partial(dn, programs)
    _bwd[(programs,)](
        x,
        dy,
        alpha_p,
        alpha_n,
        beta_in,
        eps_in,
        dx,
        *parts,
        y,
        x.numel(),
        beta,
        eps,
        BLOCK=columns,
        num_warps=devices.warps(warps, x),
    )
    for part, gradient in zip(parts, (dp, dn), strict=True):
        sum_rows(part, gradient)


@custom_op("xielu_backward", _gradients)
def xielu_bwd(
    x: torch.Tensor,
    dy: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: float,
    eps: float,
    beta_in: torch.Tensor | None,
    eps_in: torch.Tensor | None,
    need_dx: bool,
    need_dp: bool,
    need_dn: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, dy contiguous -> dx, dalpha_p, dalpha_n, each like its tensor. What is not needed is
    None."""
    numbers = beta, eps, beta_in, eps_in
    found = _gradients(x, dy, alpha_p, alpha_n, *numbers, need_dx, need_dp, need_dn)
    _launch_bwd(x, dy, alpha_p, alpha_n, *numbers, *found, None)
    return found


@custom_op("xielu_backward_and_product", _gradients_and_product)
def xielu_bwd_and_product(
    x: torch.Tensor,
    dy: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: float,
    eps: float,
    beta_in: torch.Tensor | None,
    eps_in: torch.Tensor | None,
    need_dx: bool,
    need_dp: bool,
    need_dn: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> the gradients, and y once more; one operator, as `pointwise.glu_bwd_and_product`."""
    numbers = beta, eps, beta_in, eps_in
    found = _gradients_and_product(x, dy, alpha_p, alpha_n, *numbers, need_dx, need_dp, need_dn)
    _launch_bwd(x, dy, alpha_p, alpha_n, *numbers, *found)
    return found


def xielu_bwd_over(x, dy, alpha_p, alpha_n, *numbers_and_needs, over_x, y):
    """-> the gradients, dx in the memory of x if ``over_x``. If y is given, it is computed; it may
    be dy."""
    *numbers, need_dx, need_dp, need_dn = numbers_and_needs
    dx, dp, dn = _gradients(
        x, dy, alpha_p, alpha_n, *numbers, need_dx and not over_x, need_dp, need_dn
    )
    dx = x.detach() if over_x else dx
    _launch_bwd(x, dy, alpha_p, alpha_n, *numbers, dx, dp, dn, y)
    torch.autograd.graph.increment_version([x] if over_x else [])
    return dx, dp, dn


class LigerXIELUFunction(Function):
    """``apply(x, alpha_p, alpha_n, beta=0.5, eps=-1e-6) -> y`` like x, contiguous. As
    `liger_xielu`."""

    reference = staticmethod(xielu_reference)

    @staticmethod
    def forward(ctx, x, alpha_p, alpha_n, beta=0.5, eps=-1e-6):
        devices.require_kernels("LigerXIELUFunction", x)
        beta, eps, *held = apart(beta, eps)
        known = check.fits(x, (1,), alpha_p, alpha_n) and check.fits(x, (), *held)
        if not known or any(ctx.needs_input_grad[3:]):
            _check("LigerXIELUFunction", x, alpha_p, alpha_n, *held)
        ctx.save_for_backward(x, alpha_p, alpha_n, *held)
        ctx.numbers = beta, eps
        return xielu_fwd(x.contiguous(), alpha_p, alpha_n, beta, eps, *held)

    @staticmethod
    def arguments(ctx):
        x, alpha_p, alpha_n, *held = ctx.saved_tensors
        return x, alpha_p, alpha_n, *together(*ctx.numbers, *held)

    @staticmethod
    def backward(ctx, dy):
        x, alpha_p, alpha_n, *held = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        found = xielu_bwd(
            x.contiguous(), dy.contiguous(), alpha_p, alpha_n, *ctx.numbers, *held, *needs
        )
        return *(d if need else None for d, need in zip(found, needs, strict=True)), None, None


def _check(name, x, alpha_p, alpha_n, beta, eps):
    """All that are tensors; beta and eps are None if they are not."""
    check.floats(name, dict(x=x, alpha_p=alpha_p, alpha_n=alpha_n), beta=beta, eps=eps)
    for argument, t in dict(alpha_p=alpha_p, alpha_n=alpha_n, beta=beta, eps=eps).items():
        check.shape(name, argument, t, (1,), ())
    for argument, t in dict(beta=beta, eps=eps).items():
        if t is not None and t.requires_grad:
            raise TypeError(
                f"{name}: {argument} requires a gradient, which it does not get; give {argument}.detach()"
            )


def liger_xielu(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: float | torch.Tensor = 0.5,
    eps: float | torch.Tensor = -1e-6,
) -> torch.Tensor:
    """``αp·x² + beta·x`` above zero, ``αn·(exp(min(x, eps)) - 1 - x) + beta·x`` below.

    Args:
        x: any shape and strides, fp32, bf16 or fp16.
        alpha_p, alpha_n: (1,), any floating dtype: αp is softplus(alpha_p), αn is beta +
        softplus(alpha_n).
        beta: the slope at zero: a number, or a tensor of one element, which gets no gradient.
        eps: a number below zero and close to it, from which on the exponential no longer moves; or
        a tensor of one
            element, whose value is not checked.

    Returns:
        A contiguous tensor of x's shape and dtype, computed in fp32 and rounded once.

    Raises:
        ValueError: a tensor has another shape or device; beta or eps is not finite, or eps not
        below zero.
        TypeError: something is not a floating point tensor, or not a number; beta or eps requires a
        gradient.

    Source: arXiv:2411.13010.
    """
    name = "liger_xielu"
    beta, eps = checked(name, x, alpha_p, alpha_n, beta, eps)
    run = LigerXIELUFunction.call if devices.has_kernels(x) else xielu_reference
    return run(x, alpha_p, alpha_n, beta, eps)


def checked(name, x, alpha_p, alpha_n, beta, eps):
    """-> beta and eps."""
    _check(name, x, alpha_p, alpha_n, *apart(beta, eps)[2:])
    return _options(name, beta, eps)


def _options(name, beta, eps):
    """Those that are numbers are looked at."""
    if not isinstance(eps, torch.Tensor):
        eps = check.finite(name, "eps", eps)
        if eps >= 0:
            raise check.Misfit(f"{name}: eps is {eps!r}, give a number below zero")
    return beta if isinstance(beta, torch.Tensor) else check.finite(name, "beta", beta), eps


class LigerXIELU(torch.nn.Module):
    """`liger_xielu` as a module; its parameters are named as Hugging Face's, and begin with these
    αp and αn."""

    def __init__(
        self,
        alpha_p_init: float = 0.8,
        alpha_n_init: float = 0.8,
        beta: float = 0.5,
        eps: float = -1e-6,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check.positive(name, "alpha_p_init", alpha_p_init)
        check.positive(
            name, "alpha_n_init - beta", check.finite(name, "alpha_n_init", alpha_n_init) - beta
        )
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
