r"""DyT, dynamic tanh: an elementwise replacement of a norm.

    z = tanh(α·x),   y = γ·z + β

    t = dy·(1 - z²):   dx = t·γ·α,   dα = Σ t·x·γ,   dγ = Σ_rows dy·z,   dβ = Σ_rows dy

α is one number, γ and β have one for each column. Everything is computed in fp32 and rounded once.

Source: Zhu et al., Transformers without Normalization, arXiv:2503.10622.
"""

from __future__ import annotations

import functools

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, Function, custom_op, flatten_rows
from liger_kernel.core.reduce import new_partial_sums, sum_rows, sum_rows_pair
from liger_kernel.core.tile import cdiv, load_fp32, next_power_of_2, tanh, tl
from liger_kernel.ops.norm.norm_kernels import reshape_output


def dyt_reference(x, alpha, gamma, beta=None):
    """Compute `liger_dyt` in plain PyTorch, for tensors of any dtype."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = gamma.to(dtype) * torch.tanh(alpha.to(dtype) * x.to(dtype))
    if beta is not None:
        y = y + beta.to(dtype)
    return y.to(x.dtype)


@kernel
def _fwd(
    x_ptr,
    alpha_ptr,
    gamma_ptr,
    beta_ptr,
    y_ptr,
    stride_x,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute BLOCK_M x BLOCK_N entries of y."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (m < M) & (n < N)
    x = load_fp32(x_ptr, m * stride_x + n, mask)
    gamma = load_fp32(gamma_ptr, n, n < N)
    z, _ = tanh(tl.load(alpha_ptr).to(tl.float32) * x)
    y = gamma * z
    if beta_ptr is not None:
        y += load_fp32(beta_ptr, n, n < N)
    tl.store(y_ptr + m * N + n, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _bwd(
    dy_ptr,
    x_ptr,
    alpha_ptr,
    gamma_ptr,
    dx_ptr,
    dalpha_ptr,
    dgamma_ptr,
    dbeta_ptr,
    stride_dy,
    stride_x,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Compute dx of every num_programs-th block of rows, and a row of each of the partial sums."""
    pid = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    alpha = tl.load(alpha_ptr).to(tl.float32)
    gamma = load_fp32(gamma_ptr, n, n < N)
    # not in the loop, where Triton would compute all twice: in gamma's layout and in x's
    scale = gamma * alpha
    dalpha = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    dgamma, dbeta = dalpha, dalpha
    for block in tl.range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=NUM_STAGES):
        m = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        mask = (m < M) & (n < N)
        dy = load_fp32(dy_ptr, m * stride_dy + n, mask)
        x = load_fp32(x_ptr, m * stride_x + n, mask)
        z, slope = tanh(alpha * x)
        t = dy * slope
        dalpha += t * x
        dgamma += dy * z
        dbeta += dy
        if dx_ptr is not None:
            tl.store(dx_ptr + m * N + n, (t * scale).to(dx_ptr.dtype.element_ty), mask=mask)
    if dalpha_ptr is not None:
        part = pid * tl.num_programs(1) + tl.program_id(1)
        tl.store(dalpha_ptr + part, tl.sum(dalpha * gamma).to(dalpha_ptr.dtype.element_ty))
    if dgamma_ptr is not None:
        dgamma = tl.sum(dgamma, axis=0, keep_dims=True)
        tl.store(dgamma_ptr + pid * N + n, dgamma.to(dgamma_ptr.dtype.element_ty), mask=n < N)
    if dbeta_ptr is not None:
        dbeta = tl.sum(dbeta, axis=0, keep_dims=True)
        tl.store(dbeta_ptr + pid * N + n, dbeta.to(dbeta_ptr.dtype.element_ty), mask=n < N)


@functools.cache
def _choose_launch(N, max_block_n, block_elements):
    """Return (BLOCK_M, BLOCK_N, num_warps) of a block of so many elements, in limited columns.

    65536x768, bf16, in blocks of 1024 columns and of 256, which end where a row does: forward 2.50,
    2.88 TB/s (H200, 2026-11-22), backward 2.50, 2.94 (2026-11-24). With 2,048 elements and 4,096 of
    1024 columns, 65536x1024 and 16384x4096: forward 3.47, 3.81 and 3.41, 3.69; with 2,048 in 1024
    columns and in 2048, 16384x4096: backward 3.33, 3.49 (2026-11-24).
    """
    block_n = min(next_power_of_2(N), max_block_n)
    while block_n > 256 and N % block_n:
        block_n //= 2
    return block_elements // block_n, block_n, 4


def _empty_gradients(dy, x, alpha, gamma, beta, need_dx, need_dalpha, need_dgamma, need_dbeta):
    needs = (x, need_dx), (alpha, need_dalpha), (gamma, need_dgamma), (beta, need_dbeta)
    return tuple(t.new_empty(t.shape) if need else None for t, need in needs)


@custom_op("dyt", lambda x, alpha, gamma, beta: x.new_empty(x.shape))
def dyt_fwd(
    x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None
) -> torch.Tensor:
    """Return y (M, N) of x (M, N) with unit stride in N; gamma and beta are (N,), contiguous."""
    y = x.new_empty(x.shape)
    M, N = x.shape
    block_m, block_n, num_warps = _choose_launch(N, 1024, 4096)
    if M and N:
        _fwd[(cdiv(M, block_m), cdiv(N, block_n))](
            x,
            alpha,
            gamma,
            beta,
            y,
            x.stride(0),
            M,
            N,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=devices.limit_warps(num_warps, x),
        )
    return y


@custom_op("dyt_backward", _empty_gradients)
def dyt_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    alpha: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    need_dx: bool,
    need_dalpha: bool,
    need_dgamma: bool,
    need_dbeta: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx (M, N) and gradients like alpha, gamma and beta; None for one that is not needed.

    dy and x are (M, N) with unit stride in N."""
    needs = need_dx, need_dalpha, need_dgamma, need_dbeta
    grads = _empty_gradients(dy, x, alpha, gamma, beta, *needs)
    dx, dalpha, dgamma, dbeta = grads
    M, N = x.shape
    block_m, block_n, num_warps = _choose_launch(N, 2048, 2048)
    blocks_n = cdiv(N, block_n)
    max_rows = cdiv(4 * devices.multiprocessors(x), max(blocks_n, 1))
    rows = max(1, min(cdiv(M, block_m), max_rows))  # of partial sums
    partial_dalpha = new_partial_sums(dalpha, rows * blocks_n)
    partial_dgamma = new_partial_sums(dgamma, rows)
    partial_dbeta = new_partial_sums(dbeta, rows)
    if N:
        _bwd[(rows, blocks_n)](
            dy,
            x,
            alpha,
            gamma,
            dx,
            partial_dalpha,
            partial_dgamma,
            partial_dbeta,
            dy.stride(0),
            x.stride(0),
            M,
            N,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            NUM_STAGES=devices.choose_num_stages(2 * block_m * block_n * x.element_size(), x),
            num_warps=devices.limit_warps(num_warps, x),
        )
    sum_rows(partial_dalpha, dalpha)
    if rows > 1:
        sum_rows_pair(partial_dgamma, partial_dbeta, dgamma, dbeta)
    return grads


class LigerDyTFunction(Function):
    """Autograd Function of `liger_dyt`: ``apply(x, alpha, gamma, beta)`` returns y like x."""

    reference = staticmethod(dyt_reference)

    @staticmethod
    def forward(ctx, x, alpha, gamma, beta):
        devices.require_kernels("LigerDyTFunction", x)
        if (
            x.dim() == 0
            or not check.matches(x, x.shape[-1:], gamma, beta)
            or not check.matches(x, (1,), alpha)
        ):
            _check_arguments("LigerDyTFunction", x, alpha, gamma, beta)
        ctx.save_for_backward(x, alpha, gamma, beta)
        return _forward(x, alpha, gamma, beta)

    @staticmethod
    def arguments(ctx):
        return ctx.saved_tensors

    @staticmethod
    def backward(ctx, dy):
        needs = ctx.needs_input_grad[:4]
        grads = _backward(dy, *ctx.saved_tensors, *needs)
        return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))


def liger_dyt_fwd(
    x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None
) -> torch.Tensor:
    """Compute `liger_dyt` without autograd, for frameworks with a Function of their own.

    Raises RuntimeError where there are no kernels for x."""
    _check_arguments("liger_dyt_fwd", x, alpha, gamma, beta)
    devices.require_kernels("liger_dyt_fwd", x)
    return _forward(x, alpha, gamma, beta)


def _forward(x, alpha, gamma, beta):
    gamma = gamma.contiguous()
    beta = None if beta is None else beta.contiguous()
    return reshape_output(dyt_fwd(flatten_rows(x), alpha, gamma, beta), x.shape)


def liger_dyt_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    alpha: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of x, alpha, gamma and beta (None without beta), each like its tensor.

    Raises RuntimeError where there are no kernels for x."""
    _check_arguments("liger_dyt_bwd", x, alpha, gamma, beta)
    if not check.matches(x, x.shape, dy):
        check.floats("liger_dyt_bwd", dict(x=x, dy=dy))
        check.shape("liger_dyt_bwd", "dy", dy, tuple(x.shape))
    devices.require_kernels("liger_dyt_bwd", x)
    return _backward(dy, x, alpha, gamma, beta, True, True, True, beta is not None)


def _backward(dy, x, alpha, gamma, beta, *needs):
    gamma = gamma.contiguous()
    beta = None if beta is None else beta.contiguous()
    dx, *sums = dyt_bwd(flatten_rows(dy), flatten_rows(x), alpha, gamma, beta, *needs)
    return reshape_output(dx, x.shape) if needs[0] else None, *sums


def _check_arguments(name, x, alpha, gamma, beta):
    check.floats(name, dict(x=x, alpha=alpha, gamma=gamma), beta=beta)
    check.shape(name, "alpha", alpha, (1,), ())
    if x.dim() == 0:
        raise ValueError(f"{name}: x has no dimension, give a tensor of shape (..., hidden size)")
    check.shape(name, "gamma", gamma, tuple(x.shape[-1:]))
    check.shape(name, "beta", beta, tuple(x.shape[-1:]))


def liger_dyt(
    x: torch.Tensor,
    alpha: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dynamic tanh: ``gamma·tanh(alpha·x) + beta``.

    Args:
        x: (..., H), fp32, bf16 or fp16.
        alpha: (1,), any floating dtype.
        gamma: (H,), any floating dtype.
        beta: (H,), any floating dtype, or None.

    Returns:
        (..., H) in x's dtype, computed in fp32 and rounded once.

    Raises:
        ValueError: x has no dimension; alpha, gamma or beta has another shape or device.
        TypeError: one of them is not a floating point tensor.

    Source: arXiv:2503.10622.
    """
    _check_arguments("liger_dyt", x, alpha, gamma, beta)
    if not devices.has_kernels(x):
        return dyt_reference(x, alpha, gamma, beta)
    return LigerDyTFunction.call(x, alpha, gamma, beta)


class LigerDyT(torch.nn.Module):
    """`liger_dyt` as a module. ``beta=False``: without a shift."""

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        check.size("LigerDyT", "hidden_size", hidden_size)
        self.hidden_size = hidden_size
        self.init_alpha = check.finite("LigerDyT", "init_alpha", init_alpha)
        self.alpha = torch.nn.Parameter(torch.full((1,), self.init_alpha))
        self.gamma = torch.nn.Parameter(torch.ones(hidden_size))
        self.register_parameter(
            "beta", torch.nn.Parameter(torch.zeros(hidden_size)) if beta else None
        )

    def forward(self, x: torch.Tensor):
        return liger_dyt(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self):
        return f"{self.hidden_size}, init_alpha={self.init_alpha}, beta={self.beta is not None}"


def _inputs(*shape):
    gamma, beta = (torch.randn(shape[-1]).requires_grad_() for _ in range(2))
    return dict(
        x=torch.randn(shape).requires_grad_(),
        alpha=torch.rand(1).requires_grad_(),
        gamma=gamma,
        beta=beta,
    )


CASES.append(
    Case(
        "dyt",
        fn=liger_dyt,
        reference=dyt_reference,
        inputs=_inputs,
        shapes=((1, 8), (5, 123), (2, 7, 512), (2, 1100)),
        options=(dict(), dict(beta=None)),
        bench=((16384, 4096), (65536, 1024), (65536, 768)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (2, 3)),
        fp32_roundings=2,
    )
)
