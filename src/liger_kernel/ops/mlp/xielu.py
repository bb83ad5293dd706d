r"""xIELU: a square above zero, an exponential below, with two learned weights (Apertus).

    αp = softplus(alpha_p),   αn = beta + softplus(alpha_n)
    x > 0:   y = αp·x² + beta·x,                   dy/dx = 2·αp·x + beta
    else:    y = αn·(exp(m) - 1 - x) + beta·x,     dy/dx = αn·(exp(x)·[x < eps] - 1) + beta
             m = min(x, eps)

    dalpha_p = σ(alpha_p)·Σ_{x>0} dy·x²,   dalpha_n = σ(alpha_n)·Σ_{x≤0} dy·(exp(m) - 1 - x)

beta and eps are numbers, or tensors of one element, which the kernels read. eps is a little below
zero. Everything is computed in fp32 and rounded once.

Source: Huang and Schlag, Deriving Activation Functions Using Integration, arXiv:2411.13010.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, F, Function, custom_op
from liger_kernel.core.reduce import new_partial_sums, sum_rows_pair
from liger_kernel.core.tile import cdiv, exp, log, scaled_exp, sigmoid, tl, triton


def xielu_reference(x, alpha_p, alpha_n, beta=0.5, eps=-1e-6):
    wide_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = x.to(wide_dtype)
    alpha_p = F.softplus(alpha_p.to(wide_dtype).reshape(()))
    alpha_n = F.softplus(alpha_n.to(wide_dtype).reshape(()))
    beta, eps = (
        n.to(wide_dtype).reshape(()) if isinstance(n, torch.Tensor) else z.new_tensor(n)
        for n in (beta, eps)
    )
    below = torch.expm1(torch.min(z, eps)) - z
    return torch.where(z > 0, alpha_p * z * z, (beta + alpha_n) * below).add(beta * z).to(x.dtype)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), and its slope."""
    e = exp(-tl.abs(x))
    small = e * (1.0 - e * (0.5 - e * (0.3333333333 - e * 0.25)))
    slope, _ = sigmoid(x)
    return tl.where(x > 0, x, 0.0) + tl.where(e < 0.01, small, log(1.0 + e)), slope


@triton.jit
def _below(x, eps, EXACT: tl.constexpr):
    """Return exp(m) - 1 - x and exp(m), for x ≤ 0; by a series where that would cancel.

    If not EXACT, for results of 16 bits, it takes half of the instructions, which would otherwise
    take longer than the memory. The first is then relatively within 4e-5, but for x from -0.004 to
    0, where it is within half an ulp of x, as PyTorch's own in fp32.
    """
    m = tl.where(x > eps, eps, x)
    e = scaled_exp(m, EXACT, 1.0)  # without a scale it takes four instructions more
    if not EXACT:
        near = tl.fma(m * m, 0.5 + m * (0.16666667 + m * 4.1666668e-2), m)
        return tl.where(m > -0.125, near, e - 1.0) - x, e
    s = 1.3888889e-3 + m * (1.9841270e-4 + m * 2.4801587e-5)
    near = m * m * (0.5 + m * (0.16666667 + m * (4.1666668e-2 + m * (8.3333338e-3 + m * s))))
    return tl.where(m > -0.5, near, (e - 1.0) - m) + (m - x), e


@triton.jit
def _load_parameters(alpha_p_ptr, alpha_n_ptr, beta_ptr, eps_ptr, beta, eps):
    """Return αp, αn, the slopes of both, beta and eps. The last two may be in memory."""
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
    """Compute BLOCK entries of y."""
    alpha_p, alpha_n, _, _, beta, eps = _load_parameters(
        alpha_p_ptr, alpha_n_ptr, beta_ptr, eps_ptr, beta, eps
    )
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n, mask=n < N).to(tl.float32)
    below, _ = _below(x, eps, x_ptr.dtype.element_ty == tl.float32)
    y = tl.where(x > 0, alpha_p * x * x, alpha_n * below) + beta * x
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
    dalpha_p_ptr,
    dalpha_n_ptr,
    y_ptr,
    N,
    beta,
    eps,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute every num_programs-th block, and this program's part of dalpha_p and dalpha_n.

    dx and y (as in `_fwd`) may share the memory of x and dy: an element is read before it is
    written.
    """
    pid = tl.program_id(0)
    alpha_p, alpha_n, p_slope, n_slope, beta, eps = _load_parameters(
        alpha_p_ptr, alpha_n_ptr, beta_ptr, eps_ptr, beta, eps
    )
    dp = tl.zeros((BLOCK,), dtype=tl.float32)
    dn = dp
    for block in tl.range(pid, tl.cdiv(N, BLOCK), tl.num_programs(0), num_stages=STAGES):
        n = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        below, e = _below(x, eps, x_ptr.dtype.element_ty == tl.float32)
        # before the stores: later, x, dy and `below` would be kept in registers across them, 90 a
        # thread with Triton 3.9 (sm_90), and three programs need at most 80
        dp += tl.where(x > 0, dy * x * x, 0.0)
        dn += tl.where(x > 0, 0.0, dy * below)
        if dx_ptr is not None:
            # αn times the slope of min(x, eps): half at a tie, as in PyTorch
            slope_n = tl.where(x < eps, alpha_n, tl.where(x == eps, 0.5 * alpha_n, 0.0))
            slope = tl.where(x > 0, 2.0 * alpha_p * x + beta, e * slope_n + (beta - alpha_n))
            tl.store(dx_ptr + n, (dy * slope).to(dx_ptr.dtype.element_ty), mask=n < N)
        if y_ptr is not None:
            y = tl.where(x > 0, alpha_p * x * x, alpha_n * below) + beta * x
            tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)
    if dalpha_p_ptr is not None:
        dalpha_p = tl.sum(dp) * p_slope
        tl.store(dalpha_p_ptr + pid, dalpha_p.to(dalpha_p_ptr.dtype.element_ty))
    if dalpha_n_ptr is not None:
        dalpha_n = tl.sum(dn) * n_slope
        tl.store(dalpha_n_ptr + pid, dalpha_n.to(dalpha_n_ptr.dtype.element_ty))


def _launch():
    """Return (columns, warps) of a program of forward.

    8192x14336, bf16, 2048 columns with 2, 4 warps: 3.43, 3.06 TB/s (H200, 2026-11-23).
    """
    return 2048, 2


def _launch_backward(x):
    """Return (columns, warps, stages, programs of a multiprocessor) of backward.

    The programs are all resident, and few enough for their partial sums to be read at once.
    8192x14336, bf16, 197 µs; 213 with 1 stage, 225 with 4096 columns and 16 warps, 255 with 4
    programs (H200, 2026-11-28, Triton 3.6).
    """
    columns = 2048
    return columns, 8, devices.choose_num_stages(2 * columns * x.element_size(), x), 3


def split_constants(beta, eps):
    """Return beta, eps, beta_tensor, eps_tensor, as the operators take them.

    A constant that is a number has no tensor; one that is a tensor has 0 as its number.
    """
    numbers = []
    tensors = []
    for constant in (beta, eps):
        is_tensor = isinstance(constant, torch.Tensor)
        numbers.append(0.0 if is_tensor else constant)
        tensors.append(constant if is_tensor else None)
    return *numbers, *tensors


def join_constants(beta, eps, beta_tensor, eps_tensor):
    """Undo `split_constants`."""
    return beta if beta_tensor is None else beta_tensor, eps if eps_tensor is None else eps_tensor


def _empty_gradients(
    x, dy, alpha_p, alpha_n, beta, eps, beta_tensor, eps_tensor, need_dx, need_dp, need_dn
):
    needs = (x, need_dx), (alpha_p, need_dp), (alpha_n, need_dn)
    return tuple(t.new_empty(t.shape) if need else None for t, need in needs)


def _empty_gradients_and_output(x, *arguments):
    return *_empty_gradients(x, *arguments), x.new_empty(x.shape)


@custom_op("xielu", lambda x, *_: x.new_empty(x.shape))
def xielu_fwd(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: float,
    eps: float,
    beta_tensor: torch.Tensor | None,
    eps_tensor: torch.Tensor | None,
) -> torch.Tensor:
    """Return y. x is contiguous; the constants are those of `split_constants`."""
    y = x.new_empty(x.shape)
    columns, warps = _launch()
    if x.numel():
        _fwd[(cdiv(x.numel(), columns),)](
            x,
            alpha_p,
            alpha_n,
            beta_tensor,
            eps_tensor,
            y,
            x.numel(),
            beta,
            eps,
            BLOCK=columns,
            num_warps=devices.limit_warps(warps, x),
        )
    return y


def _launch_bwd(
    x, dy, alpha_p, alpha_n, beta, eps, beta_tensor, eps_tensor, dx, dalpha_p, dalpha_n, y
):
    """Fill those of dx, dalpha_p, dalpha_n and y that are not None."""
    columns, warps, stages, programs_per_sm = _launch_backward(x)
    programs = cdiv(x.numel(), columns)
    if dalpha_p is not None or dalpha_n is not None:  # few programs, for few partial sums
        programs = min(programs, programs_per_sm * devices.multiprocessors(x))
    programs = max(1, programs)
    partial_p = new_partial_sums(dalpha_p, programs)
    partial_n = new_partial_sums(dalpha_n, programs)
    _bwd[(programs,)](
        x,
        dy,
        alpha_p,
        alpha_n,
        beta_tensor,
        eps_tensor,
        dx,
        partial_p,
        partial_n,
        y,
        x.numel(),
        beta,
        eps,
        BLOCK=columns,
        STAGES=stages,
        num_warps=devices.limit_warps(warps, x),
    )
    if programs > 1:
        sum_rows_pair(partial_p, partial_n, dalpha_p, dalpha_n)


@custom_op("xielu_backward", _empty_gradients)
def xielu_bwd(
    x: torch.Tensor,
    dy: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: float,
    eps: float,
    beta_tensor: torch.Tensor | None,
    eps_tensor: torch.Tensor | None,
    need_dx: bool,
    need_dp: bool,
    need_dn: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx, dalpha_p, dalpha_n, None for one that is not needed. x and dy are contiguous."""
    constants = beta, eps, beta_tensor, eps_tensor
    grads = _empty_gradients(x, dy, alpha_p, alpha_n, *constants, need_dx, need_dp, need_dn)
    _launch_bwd(x, dy, alpha_p, alpha_n, *constants, *grads, None)
    return grads


@custom_op("xielu_backward_and_product", _empty_gradients_and_output)
def xielu_bwd_and_product(
    x: torch.Tensor,
    dy: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: float,
    eps: float,
    beta_tensor: torch.Tensor | None,
    eps_tensor: torch.Tensor | None,
    need_dx: bool,
    need_dp: bool,
    need_dn: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients and y, by one operator, see `pointwise.glu_bwd_and_product`."""
    constants = beta, eps, beta_tensor, eps_tensor
    outputs = _empty_gradients_and_output(
        x, dy, alpha_p, alpha_n, *constants, need_dx, need_dp, need_dn
    )
    _launch_bwd(x, dy, alpha_p, alpha_n, *constants, *outputs)
    return outputs


def xielu_bwd_over(x, dy, alpha_p, alpha_n, *constants_and_needs, over_x, y):
    """Return the gradients, dx in the memory of x if ``over_x``.

    If y is given, it is filled; it may be dy.
    """
    *constants, need_dx, need_dp, need_dn = constants_and_needs
    allocate_dx = need_dx and not over_x
    dx, dp, dn = _empty_gradients(
        x, dy, alpha_p, alpha_n, *constants, allocate_dx, need_dp, need_dn
    )
    dx = x.detach() if over_x else dx
    _launch_bwd(x, dy, alpha_p, alpha_n, *constants, dx, dp, dn, y)
    torch.autograd.graph.increment_version([x] if over_x else [])
    return dx, dp, dn


class LigerXIELUFunction(Function):
    """``apply(x, alpha_p, alpha_n, beta=0.5, eps=-1e-6) -> y``

    The arguments of `liger_xielu`. y is like x, contiguous.
    """

    reference = staticmethod(xielu_reference)

    @staticmethod
    def forward(ctx, x, alpha_p, alpha_n, beta=0.5, eps=-1e-6):
        devices.require_kernels("LigerXIELUFunction", x)
        beta, eps, *tensors = split_constants(beta, eps)
        matches = check.matches(x, (1,), alpha_p, alpha_n) and check.matches(x, (), *tensors)
        if not matches or any(ctx.needs_input_grad[3:]):
            _check_tensors("LigerXIELUFunction", x, alpha_p, alpha_n, *tensors)
        ctx.save_for_backward(x, alpha_p, alpha_n, *tensors)
        ctx.numbers = beta, eps
        return xielu_fwd(x.contiguous(), alpha_p, alpha_n, beta, eps, *tensors)

    @staticmethod
    def arguments(ctx):
        x, alpha_p, alpha_n, *tensors = ctx.saved_tensors
        return x, alpha_p, alpha_n, *join_constants(*ctx.numbers, *tensors)

    @staticmethod
    def backward(ctx, dy):
        x, alpha_p, alpha_n, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        grads = xielu_bwd(
            x.contiguous(), dy.contiguous(), alpha_p, alpha_n, *ctx.numbers, *tensors, *needs
        )
        return *(d if need else None for d, need in zip(grads, needs, strict=True)), None, None


def _check_tensors(name, x, alpha_p, alpha_n, beta, eps):
    """Check the tensors. beta and eps are None if they are numbers."""
    check.floats(name, dict(x=x, alpha_p=alpha_p, alpha_n=alpha_n), beta=beta, eps=eps)
    for argument, t in dict(alpha_p=alpha_p, alpha_n=alpha_n, beta=beta, eps=eps).items():
        check.shape(name, argument, t, (1,), ())
    for argument, t in dict(beta=beta, eps=eps).items():
        if t is not None and t.requires_grad:
            raise TypeError(
                f"{name}: {argument} requires a gradient, which it does not get; "
                f"give {argument}.detach()"
            )


def liger_xielu(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: float | torch.Tensor = 0.5,
    eps: float | torch.Tensor = -1e-6,
) -> torch.Tensor:
    """Compute xIELU: ``αp·x² + beta·x`` if x > 0, else ``αn·(exp(min(x, eps)) - 1 - x) + beta·x``.

    Args:
        x: any shape and strides, fp32, bf16 or fp16.
        alpha_p, alpha_n: (1,), any floating dtype: αp is softplus(alpha_p), αn is beta +
            softplus(alpha_n).
        beta: the slope at zero: a number, or a tensor of one element, which gets no gradient.
        eps: a number below zero and close to it, above which the exponential is constant; or a
            tensor of one element, whose value is not checked.

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
    beta, eps = check_arguments(name, x, alpha_p, alpha_n, beta, eps)
    run = LigerXIELUFunction.call if devices.has_kernels(x) else xielu_reference
    return run(x, alpha_p, alpha_n, beta, eps)


def check_arguments(name, x, alpha_p, alpha_n, beta, eps):
    """Check the arguments of `liger_xielu`. Returns beta and eps; numbers become Python floats."""
    *_, beta_tensor, eps_tensor = split_constants(beta, eps)
    _check_tensors(name, x, alpha_p, alpha_n, beta_tensor, eps_tensor)
    return _check_numbers(name, beta, eps)


def _check_numbers(name, beta, eps):
    """Check those of beta and eps that are numbers."""
    if not isinstance(eps, torch.Tensor):
        eps = check.finite(name, "eps", eps)
        if eps >= 0:
            raise check.InvalidArgument(f"{name}: eps is {eps!r}, give a number below zero")
    if not isinstance(beta, torch.Tensor):
        beta = check.finite(name, "beta", beta)
    return beta, eps


class LigerXIELU(torch.nn.Module):
    """`liger_xielu` as a module. Its parameters are named as Hugging Face's.

    They are initialised so that αp is ``alpha_p_init`` and αn is ``alpha_n_init``.
    """

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
        check.finite(name, "alpha_n_init", alpha_n_init)
        check.positive(name, "alpha_n_init - beta", alpha_n_init - beta)
        for argument, value in dict(alpha_p=alpha_p_init, alpha_n=alpha_n_init - beta).items():
            raw = torch.tensor([value], dtype=torch.float64).expm1().log()
            setattr(self, argument, torch.nn.Parameter(raw.to(dtype or torch.get_default_dtype())))
        self.beta, self.eps = _check_numbers(name, beta, eps)

    def forward(self, x: torch.Tensor):
        return liger_xielu(x, self.alpha_p, self.alpha_n, self.beta, self.eps)

    def extra_repr(self):
        return f"beta={self.beta}, eps={self.eps}"


def _inputs(*shape):
    alpha_p, alpha_n = (torch.randn(1).requires_grad_() for _ in range(2))
    return dict(x=(2 * torch.randn(shape)).requires_grad_(), alpha_p=alpha_p, alpha_n=alpha_n)


def _traffic(inputs):
    size = inputs["x"].numel() * inputs["x"].element_size()
    return 2 * size, 3 * size


CASES.append(
    Case(
        "xielu",
        fn=liger_xielu,
        reference=xielu_reference,
        inputs=_inputs,
        shapes=((1, 8), (5, 123), (3, 1025)),
        options=(dict(), dict(beta=0.3, eps=-1e-3)),
        bench=((8192, 14336),),
        traffic=_traffic,
        fp32_roundings=2,
    )
)
