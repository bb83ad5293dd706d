r"""PolyNorm: the normalised powers of x, added up.

    r_k = 1 / sqrt(mean(x^(2k)) + eps),   ν_k = x^k·r_k,   y = w₀·ν₃ + w₁·ν₂ + w₂·ν₁ + b

    d_k = mean(dy·ν_k),   dx = Σ_k w_(3-k)·r_k·k·x^(k-1)·(dy - ν_k·d_k)
    dw_(3-k) = Σ_rows N·d_k,   db = Σ dy

The means go over a row of N columns. Everything is computed in fp32, the powers as well, and
rounded once.

Source: Zhuo et al., Polynomial Composition Activations, arXiv:2411.03884.
"""

from __future__ import annotations

import functools

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, Function, custom_op, flatten_rows
from liger_kernel.core.reduce import new_partial_sums, sum_rows
from liger_kernel.core.tile import cdiv, load_fp32, next_power_of_2, tl, triton
from liger_kernel.ops.norm.norm_kernels import reshape_output


def poly_norm_reference(x, w, b, eps=1e-6):
    """Compute `liger_poly_norm` in plain PyTorch, for tensors of any dtype."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    powers = [x.to(dtype) ** k for k in (3, 2, 1)]
    y = sum(
        weight * (power * torch.rsqrt(power.pow(2).mean(-1, keepdim=True) + eps))
        for weight, power in zip(w.to(dtype), powers, strict=True)
    )
    return (y + b.to(dtype).view(())).to(x.dtype)


@triton.jit
def _rstd(squares, N, eps):
    return 1.0 / tl.sqrt(tl.sum(squares, axis=1, keep_dims=True) / N + eps)


@triton.jit
def _load_weights(w_ptr):
    """Return the weights of the cube, of the square and of x, in fp32."""
    return (
        tl.load(w_ptr).to(tl.float32),
        tl.load(w_ptr + 1).to(tl.float32),
        tl.load(w_ptr + 2).to(tl.float32),
    )


@kernel
def _fwd(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    rstd_ptr,
    stride_x,
    M,
    N,
    eps,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute y of BLOCK_M rows.

    ONE_BLOCK: a row fits into one block and is read once; otherwise it is read twice."""
    # m (BLOCK_M, 1), n (1, BLOCK_N); x, y (BLOCK_M, BLOCK_N); r1, r2, r3 (BLOCK_M, 1)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    x = load_fp32(x_ptr, m * stride_x + n, (m < M) & (n < N))
    xx = x * x
    s1, s2, s3 = xx, xx * xx, xx * x * (xx * x)
    if not ONE_BLOCK:
        for start in range(BLOCK_N, N, BLOCK_N):
            x = load_fp32(x_ptr, m * stride_x + start + n, (m < M) & (start + n < N))
            xx = x * x
            s1 += xx
            s2 += xx * xx
            s3 += xx * x * (xx * x)
    r1 = _rstd(s1, N, eps)
    r2 = _rstd(s2, N, eps)
    r3 = _rstd(s3, N, eps)
    tl.store(rstd_ptr + m, r1, mask=m < M)
    tl.store(rstd_ptr + M + m, r2, mask=m < M)
    tl.store(rstd_ptr + 2 * M + m, r3, mask=m < M)
    w3, w2, w1 = _load_weights(w_ptr)
    a1, a2, a3 = w1 * r1, w2 * r2, w3 * r3
    b = tl.load(b_ptr).to(tl.float32)
    for start in range(0, BLOCK_N if ONE_BLOCK else N, BLOCK_N):
        mask = (m < M) & (start + n < N)
        if not ONE_BLOCK:
            x = load_fp32(x_ptr, m * stride_x + start + n, mask)
        y = x * (a1 + x * (a2 + x * a3)) + b
        y = tl.where(tl.abs(x) < 6.98e12, y, float("nan"))  # x³ is infinite, and r₃ is 0
        tl.store(y_ptr + m * N + start + n, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _bwd(
    dy_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    stride_dy,
    stride_x,
    M,
    N,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Compute dx of every num_programs-th block of BLOCK_M rows, and one row of partial dw and db.

    ONE_BLOCK: a row fits into one block and is read once; otherwise it is read twice.
    """
    pid = tl.program_id(0)
    n = tl.arange(0, BLOCK_N)[None, :]
    w3, w2, w1 = _load_weights(w_ptr)
    dw1 = tl.zeros((BLOCK_M, 1), dtype=tl.float32)
    dw2, dw3, db = dw1, dw1, dw1
    for block in tl.range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=NUM_STAGES):
        m = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        r1 = load_fp32(rstd_ptr, m, m < M)
        r2 = load_fp32(rstd_ptr, M + m, m < M)
        r3 = load_fp32(rstd_ptr, 2 * M + m, m < M)
        mask = (m < M) & (n < N)
        x = load_fp32(x_ptr, m * stride_x + n, mask)
        dy = load_fp32(dy_ptr, m * stride_dy + n, mask)
        dot1 = dy * x
        dot2 = dy * x * x
        dot3 = dy * (x * x * x * r3)  # a cube alone may overflow
        total = dy
        if not ONE_BLOCK:
            for start in range(BLOCK_N, N, BLOCK_N):
                mask = (m < M) & (start + n < N)
                x = load_fp32(x_ptr, m * stride_x + start + n, mask)
                dy = load_fp32(dy_ptr, m * stride_dy + start + n, mask)
                dot1 += dy * x
                dot2 += dy * x * x
                dot3 += dy * (x * x * x * r3)
                total += dy
        dot1 = tl.sum(dot1, axis=1, keep_dims=True) * r1
        dot2 = tl.sum(dot2, axis=1, keep_dims=True) * r2
        dot3 = tl.sum(dot3, axis=1, keep_dims=True)
        dw1 += dot1
        dw2 += dot2
        dw3 += dot3
        db += tl.sum(total, axis=1, keep_dims=True)
        if dx_ptr is not None:
            a1, a2, a3 = w1 * r1, 2.0 * w2 * r2, 3.0 * w3 * r3
            c1, c2, c3 = a1 * r1 * (dot1 / N), a2 * r2 * (dot2 / N), a3 * r3 * (dot3 / N)
            for start in range(0, BLOCK_N if ONE_BLOCK else N, BLOCK_N):
                mask = (m < M) & (start + n < N)
                if not ONE_BLOCK:
                    x = load_fp32(x_ptr, m * stride_x + start + n, mask)
                    dy = load_fp32(dy_ptr, m * stride_dy + start + n, mask)
                xx = x * x
                dx = dy * (a1 + x * (a2 + x * a3)) - x * (c1 + xx * (c2 + xx * c3))
                tl.store(dx_ptr + m * N + start + n, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dw_ptr is not None:
        tl.store(dw_ptr + 3 * pid, tl.sum(dw3).to(dw_ptr.dtype.element_ty))
        tl.store(dw_ptr + 3 * pid + 1, tl.sum(dw2).to(dw_ptr.dtype.element_ty))
        tl.store(dw_ptr + 3 * pid + 2, tl.sum(dw1).to(dw_ptr.dtype.element_ty))
    if db_ptr is not None:
        tl.store(db_ptr + pid, tl.sum(db).to(db_ptr.dtype.element_ty))


MAX_BLOCK_N = 16384  # a wider row does not fit into registers


@functools.cache
def _choose_launch(N, block_elements, warp_elements):
    """Return (BLOCK_M, BLOCK_N, num_warps) of a block of at least ``block_elements``.

    A warp has about ``warp_elements`` of them.

    16384x4096, bf16, with 4, 8, 16 warps: forward 3.74, 3.76, 2.86 TB/s (H200, 2026-11-23).
    Backward, in blocks of 4,096 and 8,192 elements with 4 and 8 warps: 2.72, 3.19 (2026-11-24); of
    twice as many elements a thread registers spill on sm_100."""
    block_n = min(next_power_of_2(N), MAX_BLOCK_N)
    block_m = max(1, block_elements // block_n)
    return block_m, block_n, min(max(block_m * block_n // warp_elements, 1), 16)


def _empty_outputs(x, w, b, eps):
    return x.new_empty(x.shape), x.new_empty((3, x.shape[0]), dtype=torch.float32)


def _empty_gradients(dy, x, w, b, rstd, need_dx, need_dw, need_db):
    needs = (x, need_dx), (w, need_dw), (b, need_db)
    return tuple(t.new_empty(t.shape) if need else None for t, need in needs)


@custom_op("poly_norm", _empty_outputs)
def poly_norm_fwd(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y (M, N), and r_1, r_2, r_3 as (3, M) in fp32.

    x is (M, N) with unit stride in N, w (3,) contiguous."""
    y, rstd = _empty_outputs(x, w, b, eps)
    M, N = x.shape
    block_m, block_n, num_warps = _choose_launch(N, 1024, 512)
    if M and N:
        _fwd[(cdiv(M, block_m),)](
            x,
            w,
            b,
            y,
            rstd,
            x.stride(0),
            M,
            N,
            eps,
            ONE_BLOCK=block_n >= N,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=devices.limit_warps(num_warps, x),
        )
    return y, rstd


@custom_op("poly_norm_backward", _empty_gradients)
def poly_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor,
    rstd: torch.Tensor,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx (M, N), dw like w, db like b; None for a gradient that is not needed.

    dy and x are (M, N) with unit stride in N."""
    dx, dw, db = _empty_gradients(dy, x, w, b, rstd, need_dx, need_dw, need_db)
    M, N = x.shape
    if not N:
        for grad in (dw, db):
            if grad is not None:
                grad.zero_()
        return dx, dw, db
    block_m, block_n, num_warps = _choose_launch(N, 16384 // x.element_size(), 1024)
    num_programs = max(1, min(cdiv(M, block_m), devices.multiprocessors(x)))
    partial_dw = new_partial_sums(dw, num_programs)
    partial_db = new_partial_sums(db, num_programs)
    _bwd[(num_programs,)](
        dy,
        x,
        w,
        rstd,
        dx,
        partial_dw,
        partial_db,
        dy.stride(0),
        x.stride(0),
        M,
        N,
        ONE_BLOCK=block_n >= N,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        NUM_STAGES=devices.choose_num_stages(2 * block_m * block_n * x.element_size(), x),
        num_warps=devices.limit_warps(num_warps, x),
    )
    sum_rows(partial_dw, dw)
    sum_rows(partial_db, db)
    return dx, dw, db


class LigerPolyNormFunction(Function):
    """Autograd Function of `liger_poly_norm`, with the same arguments. Returns Y like X.

    ``in_place`` has no effect: dX does not overwrite dY, which may be used elsewhere."""

    @staticmethod
    def reference(X, W, B, eps=1e-6, in_place=True):
        return poly_norm_reference(X, W, B, eps)

    @staticmethod
    def forward(ctx, X, W, B, eps=1e-6, in_place=True):
        devices.require_kernels("LigerPolyNormFunction", X)
        if (
            X.dim() == 0
            or not check.matches(X, (3,), W)
            or B is None
            or not check.matches(X, (), B)
        ):
            _check_arguments("LigerPolyNormFunction", X, W, B)
        y, rstd = poly_norm_fwd(flatten_rows(X), W.contiguous(), B, eps)
        ctx.save_for_backward(X, W, B, rstd)
        ctx.eps = eps
        return reshape_output(y, X.shape)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:3], ctx.eps

    @staticmethod
    def backward(ctx, dY):
        X, W, B, rstd = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dx, dw, db = poly_norm_bwd(
            flatten_rows(dY),
            flatten_rows(X),
            W.contiguous(),
            B,
            rstd,
            need_dx,
            need_dw,
            need_db,
        )
        dx = reshape_output(dx, X.shape) if need_dx else None
        return dx, dw if need_dw else None, db if need_db else None, None, None


def _check_arguments(name, X, W, B):
    check.floats(name, dict(X=X, W=W, B=B))
    if X.dim() == 0:
        raise ValueError(f"{name}: X has no dimension, give a tensor of shape (..., hidden size)")
    if W.shape != (3,):
        raise check.InvalidArgument(f"{name}: W has shape {tuple(W.shape)}, give (3,)")
    if B.numel() != 1:
        raise check.InvalidArgument(f"{name}: B has shape {tuple(B.shape)}, give one element")


def liger_poly_norm(
    X: torch.Tensor,
    W: torch.Tensor,
    B: torch.Tensor,
    eps: float = 1e-6,
    in_place: bool = True,
) -> torch.Tensor:
    """Compute ``W[0]·ν(X³) + W[1]·ν(X²) + W[2]·ν(X) + B`` over the last dimension.

    ``ν(u) = u / sqrt(mean(u²) + eps)``.

    Args:
        X: (..., H), fp32, bf16 or fp16.
        W: (3,), any floating dtype: the weights of the cube, of the square and of X itself.
        B: one element, any floating dtype.
        eps: added to the mean squares.
        in_place: no effect.

    Returns:
        (..., H) in X's dtype, computed in fp32 and rounded once.

    Raises:
        ValueError: X has no dimension; W or B has another size or device; eps is negative.
        TypeError: X, W or B is not a floating point tensor, eps not a number.

    Source: arXiv:2411.03884.
    """
    name = "liger_poly_norm"
    _check_arguments(name, X, W, B)
    eps = check.non_negative(name, "eps", eps)
    if not devices.has_kernels(X):
        return poly_norm_reference(X, W, B, eps)
    return LigerPolyNormFunction.call(X, W, B, eps, in_place)


class LigerPolyNorm(torch.nn.Module):
    """`liger_poly_norm` as a module.

    It has four parameters, whatever the hidden size: weights of 1/3, a bias of 1."""

    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__()
        check.non_negative("LigerPolyNorm", "eps", eps)
        self.weight = torch.nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = torch.nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon = eps
        self.in_place = in_place

    def forward(self, hidden_states: torch.Tensor):
        return liger_poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self):
        return f"eps={self.variance_epsilon}"


CASES.append(
    Case(
        "poly_norm",
        fn=lambda x, w, b: liger_poly_norm(x, w, b),
        reference=poly_norm_reference,
        inputs=lambda *shape: dict(
            x=torch.randn(shape).requires_grad_(),
            w=torch.randn(3).requires_grad_(),
            b=torch.randn(()).requires_grad_(),
        ),
        shapes=((1, 8), (5, 123), (2, 7, 512), (3, 9001)),
        bench=((16384, 4096), (8192, 14336)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (2, 3)),
        fp32_roundings=2,  # db is the sum of all entries, which cancel
    )
)
