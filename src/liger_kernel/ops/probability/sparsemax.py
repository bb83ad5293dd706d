r"""Sparsemax: the distribution that is nearest to x. Unlike softmax's, most of its entries are 0.

    y = max(x - τ, 0)   with the τ for which Σ y = 1

    dx = 1[y > 0]·(dy - mean of dy over the support),   support = {y > 0}

τ = (Σ_S x - 1)/|S| for the support S = {x > τ}. Sorting the row would give S. Here S is found
without a sort, from above (Michelot, 1986). Only the entries above max x - 1 can be in S; from them
τ follows, and with it a smaller S. τ never falls and S never grows. When S stays the same, the two
are exact.

Arithmetic is in fp32 and y is rounded once. An entry of -inf gives 0. As in softmax, a row without
a finite maximum and a row with a NaN are all NaN.

Source: Martins and Astudillo, From Softmax to Sparsemax, arXiv:1602.02068.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, F, Function, custom_op, flatten_rows
from liger_kernel.core.tile import INF, cdiv, next_power_of_2, tl


def sparsemax_reference(input, dim=-1):
    z = (input if input.dtype == torch.float64 else input.float()).transpose(dim, -1)
    if not z.shape[-1]:
        return input.clone()
    z = z - z.detach().amax(-1, keepdim=True)  # the same projection
    s = z.sort(-1, descending=True).values
    above = s.cumsum(-1) - 1
    count = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    k = (s * count > above).sum(-1, keepdim=True).clamp(min=1)
    return F.relu(z - above.gather(-1, k - 1) / k).transpose(dim, -1).to(input.dtype)


@kernel
def _fwd(x_ptr, y_ptr, stride_x, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute BLOCK_M rows: one program. A row is one block, and read once."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    mask = (m < M) & (n < N)
    x = tl.load(x_ptr + m * stride_x + n, mask=mask, other=-INF).to(tl.float32)
    z = x - tl.max(x, axis=1, keep_dims=True)
    tau = tl.full((BLOCK_M, 1), -1.0, dtype=tl.float32)
    count = tl.full((BLOCK_M, 1), BLOCK_N + 1, dtype=tl.int32)
    changed = 1
    while changed > 0:  # a row that is finished stays as it is
        before = count
        count = tl.sum((z > tau).to(tl.int32), axis=1, keep_dims=True)
        total = tl.sum(tl.where(z <= tau, 0.0, z), axis=1, keep_dims=True)  # a NaN is not left out
        tau = tl.div_rn(total - 1.0, count.to(tl.float32))
        changed = tl.max((count < before).to(tl.int32))
    y = tl.where(z <= tau, 0.0, z - tau)
    tl.store(y_ptr + m * N + n, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _fwd_wide(x_ptr, y_ptr, stride_x, N, BLOCK: tl.constexpr):
    """Read one row in blocks, and again for each smaller support."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride_x
    y_row = y_ptr + row * N
    n = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), -INF, dtype=tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_row + start + n, mask=start + n < N, other=-INF).to(tl.float32)
        tops = tl.maximum(tops, x)
    top = tl.max(tops)
    tau = -1.0
    count = N + 1
    before = count + 1
    while count < before:
        before = count
        counts = tl.zeros((BLOCK,), dtype=tl.int32)
        totals = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, N, BLOCK):
            z = tl.load(x_row + start + n, mask=start + n < N, other=-INF).to(tl.float32) - top
            counts += (z > tau).to(tl.int32)
            totals += tl.where(z <= tau, 0.0, z)
        count = tl.sum(counts)
        tau = tl.div_rn(tl.sum(totals) - 1.0, count.to(tl.float32))
    for start in range(0, N, BLOCK):
        z = tl.load(x_row + start + n, mask=start + n < N, other=-INF).to(tl.float32) - top
        y = tl.where(z <= tau, 0.0, z - tau)
        tl.store(y_row + start + n, y.to(y_ptr.dtype.element_ty), mask=start + n < N)


@kernel
def _bwd(
    y_ptr, dy_ptr, dx_ptr, stride_y, stride_dy, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Compute BLOCK_M rows: one program. A row is one block, and read once."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    mask = (m < M) & (n < N)
    support = tl.load(y_ptr + m * stride_y + n, mask=mask, other=0.0).to(tl.float32) > 0
    dy = tl.load(dy_ptr + m * stride_dy + n, mask=mask, other=0.0).to(tl.float32)
    count = tl.sum(support.to(tl.float32), axis=1, keep_dims=True)
    mean = tl.sum(tl.where(support, dy, 0.0), axis=1, keep_dims=True) / tl.maximum(count, 1.0)
    tl.store(
        dx_ptr + m * N + n, tl.where(support, dy - mean, 0.0).to(dx_ptr.dtype.element_ty), mask=mask
    )


@kernel
def _bwd_wide(y_ptr, dy_ptr, dx_ptr, stride_y, stride_dy, N, BLOCK: tl.constexpr):
    """Read one row twice."""
    row = tl.program_id(0).to(tl.int64)
    y_row = y_ptr + row * stride_y
    dy_row = dy_ptr + row * stride_dy
    dx_row = dx_ptr + row * N
    n = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), dtype=tl.float32)
    totals = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        support = tl.load(y_row + start + n, mask=start + n < N, other=0.0).to(tl.float32) > 0
        counts += support.to(tl.float32)
        dy = tl.load(dy_row + start + n, mask=start + n < N, other=0.0).to(tl.float32)
        totals += tl.where(support, dy, 0.0)
    mean = tl.sum(totals) / tl.maximum(tl.sum(counts), 1.0)
    for start in range(0, N, BLOCK):
        support = tl.load(y_row + start + n, mask=start + n < N, other=0.0).to(tl.float32) > 0
        dy = tl.load(dy_row + start + n, mask=start + n < N, other=0.0).to(tl.float32)
        dx = tl.where(support, dy - mean, 0.0)
        tl.store(dx_row + start + n, dx.to(dx_ptr.dtype.element_ty), mask=start + n < N)


MAX_COLUMNS = 16384  # a wider row is read in blocks


def _launch(N):
    """Choose (rows, columns, warps) of a program whose rows are one block.

    A thread has 16 columns, or 32 of the widest rows.
    """
    columns = next_power_of_2(N)
    rows = max(1, 2048 // columns)
    return rows, columns, min(max(rows * columns // 512, 1), 16)


def _launch_wide():
    """Choose (columns of a block, warps) where a row is read in blocks.

    The programs are large, so that few rows are read at a time: they stay in a cache.
    """
    return 8192, 16


def _empty_output(x):
    return x.new_empty(x.shape)


def _empty_gradient(y, dy):
    return y.new_empty(y.shape)


@custom_op("sparsemax", _empty_output)
def sparsemax_fwd(x: torch.Tensor) -> torch.Tensor:
    """Compute y (M, N) in x's dtype from x (M, N) with unit stride in N."""
    y = _empty_output(x)
    M, N = x.shape
    if not y.numel():
        return y
    if N <= MAX_COLUMNS:
        rows, columns, warps = _launch(N)
        _fwd[(cdiv(M, rows),)](
            x,
            y,
            x.stride(0),
            M,
            N,
            BLOCK_M=rows,
            BLOCK_N=columns,
            num_warps=devices.limit_warps(warps, x),
        )
    else:
        columns, warps = _launch_wide()
        _fwd_wide[(M,)](
            x, y, x.stride(0), N, BLOCK=columns, num_warps=devices.limit_warps(warps, x)
        )
    return y


@custom_op("sparsemax_backward", _empty_gradient)
def sparsemax_bwd(y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Compute dx (M, N), contiguous, from y and dy (M, N) with unit stride in N."""
    dx = _empty_gradient(y, dy)
    strides = y.stride(0), dy.stride(0)
    M, N = y.shape
    if not dx.numel():
        return dx
    if N <= MAX_COLUMNS:
        rows, columns, warps = _launch(N)
        _bwd[(cdiv(M, rows),)](
            y,
            dy,
            dx,
            *strides,
            M,
            N,
            BLOCK_M=rows,
            BLOCK_N=columns,
            num_warps=devices.limit_warps(warps, y),
        )
    else:
        columns, warps = _launch_wide()
        _bwd_wide[(M,)](
            y, dy, dx, *strides, N, BLOCK=columns, num_warps=devices.limit_warps(warps, y)
        )
    return dx


def _unflatten_rows(y, shape, dim):
    """Return rows y (M, N) as a tensor of this shape whose rows are along ``dim``.

    For autograd it is no view of y.
    """
    if dim in (-1, len(shape) - 1):
        return torch.ops.aten._unsafe_view(y, shape)
    order = list(shape)
    order[dim], order[-1] = order[-1], order[dim]
    return y.view(order).transpose(dim, -1).clone(memory_format=torch.contiguous_format)


class LigerSparsemaxFunction(Function):
    """Autograd Function of `liger_sparsemax`: ``apply(x, dim)``."""

    @staticmethod
    def reference(x, dim):
        return sparsemax_reference(x, dim)

    @staticmethod
    def forward(ctx, x, dim):
        devices.require_kernels("LigerSparsemaxFunction", x)
        y = _unflatten_rows(sparsemax_fwd(flatten_rows(x.transpose(dim, -1))), x.shape, dim)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    def differentiable_backward(ctx, dy):
        (y,) = ctx.saved_tensors
        support = y.float().sign()
        count = support.sum(ctx.dim, keepdim=True).clamp(min=1)
        d = dy.float()
        mean = (support * d).sum(ctx.dim, keepdim=True) / count
        return (support * (d - mean)).to(dy.dtype), None

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        # no generator: Dynamo restarts backward where a stride is read, and torch 2.14 cannot
        # leave a generator that way
        rows = [flatten_rows(t.transpose(ctx.dim, -1)) for t in (y, dy)]
        return _unflatten_rows(sparsemax_bwd(*rows), dy.shape, ctx.dim), None


def liger_sparsemax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Compute sparsemax along a dimension: the Euclidean projection onto the probability simplex.

    Args:
        input: any shape with a dimension or more, fp32, bf16 or fp16.
        dim: the dimension whose entries add up to 1. Rows along another than the last one are
            copied.

    Returns:
        A tensor of input's shape and dtype, computed in fp32 and rounded once.

    Raises:
        ValueError: input has no dimension, or not this one.
        TypeError: input is not of a floating dtype, or dim is no int.

    Source: arXiv:1602.02068.
    """
    name = "liger_sparsemax"
    check.floats(name, dict(input=input))
    dim = check.integer(name, "dim", dim)
    if not -input.dim() <= dim < input.dim():
        raise ValueError(
            f"{name}: dim is {dim!r}, give one of an input of shape {tuple(input.shape)}"
        )
    if not devices.has_kernels(input):
        return sparsemax_reference(input, dim)
    return LigerSparsemaxFunction.apply(input, dim)


class LigerSparsemax(torch.nn.Module):
    """`liger_sparsemax` as a module."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = check.integer(type(self).__name__, "dim", dim)

    def forward(self, x: torch.Tensor):
        return liger_sparsemax(x, self.dim)

    def extra_repr(self):
        return f"dim={self.dim}"


CASES.append(
    Case(
        "sparsemax",
        fn=liger_sparsemax,
        reference=sparsemax_reference,
        inputs=lambda *shape: dict(input=torch.randn(shape).requires_grad_()),
        shapes=((1, 8), (5, 123), (2, 7, 512), (2, 17001)),
        options=(dict(), dict(dim=0)),
        bench=((8192, 8192), (65536, 1024), (4096, 32768)),
        traffic=lambda t: tuple(n * t["input"].numel() * t["input"].element_size() for n in (2, 3)),
    )
)
