r"""Softmax over the last dimension.

    y = exp(x - max x) / Σ exp(x - max x)

    dx = y·(dy - Σ dy·y)

Arithmetic is in fp32 and y is rounded once, as in PyTorch. An entry of -inf gives 0. A row
without a finite maximum (all -inf, or one +inf) and a row with a NaN are all NaN; other rows are
not affected."""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, Function, custom_op, flatten_rows
from liger_kernel.core.tile import (
    INF,
    cdiv,
    exp,
    finite_or_zero,
    next_power_of_2,
    online_max,
    scaled_exp,
    tl,
)


def softmax_reference(x):
    return torch.softmax(x, -1).to(x.dtype)


@kernel
def _fwd(
    x_ptr, y_ptr, stride_x, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr
):
    """Take every num_programs-th block of BLOCK_M rows. A row is one block, and read once."""
    n = tl.arange(0, BLOCK_N)[None, :]
    for block in tl.range(
        tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES
    ):
        m = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        mask = (m < M) & (n < N)
        x = tl.load(x_ptr + m * stride_x + n, mask=mask, other=-INF).to(tl.float32)
        p = scaled_exp(x - tl.max(x, axis=1, keep_dims=True), x_ptr.dtype.element_ty == tl.float32)
        y = p * (1.0 / tl.sum(p, axis=1, keep_dims=True))
        tl.store(y_ptr + m * N + n, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _fwd_wide(
    x_ptr, y_ptr, stride_x, N, LANES: tl.constexpr, PER_LANE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Read one row twice.

    Each lane keeps the maximum and the sum of its own columns, PER_LANE of them in an iteration. If
    ALIGNED, a lane's columns are contiguous, and one load reads them. Otherwise those of
    neighbouring lanes are contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride_x
    y_row = y_ptr + row * N
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    BLOCK: tl.constexpr = LANES * PER_LANE
    lane = tl.arange(0, LANES)[None, :]
    column = tl.arange(0, PER_LANE)[:, None]
    i = lane * PER_LANE + column if ALIGNED else column * LANES + lane
    top = tl.full((LANES,), -INF, dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_row + start + i, mask=start + i < N, other=-INF).to(tl.float32)
        new_top, shift = online_max(top, tl.max(x, axis=0))
        new_total = tl.sum(scaled_exp(x - shift[None, :], EXACT), axis=0)
        total = total * scaled_exp(top - shift, EXACT) + new_total
        top = new_top
    highest = finite_or_zero(tl.max(top))
    scale = 1.0 / tl.sum(total * exp(top - highest))
    n = tl.arange(0, BLOCK)
    last = (tl.cdiv(N, BLOCK) - 1) * BLOCK
    # from the end of the row, which was read last and is in a cache
    for back in range(0, N, BLOCK):
        columns = last - back + n
        x = tl.load(x_row + columns, mask=columns < N, other=-INF).to(tl.float32)
        y = scaled_exp(x - highest, EXACT) * scale
        tl.store(y_row + columns, y.to(y_ptr.dtype.element_ty), mask=columns < N)


@kernel
def _bwd(y_ptr, dy_ptr, dx_ptr, stride_dy, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute BLOCK_M rows: one program. A row is one block, and read once."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    mask = (m < M) & (n < N)
    y = tl.load(y_ptr + m * N + n, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + m * stride_dy + n, mask=mask, other=0.0).to(tl.float32)
    dot = tl.sum(y * dy, axis=1, keep_dims=True)
    if BLOCK_M * BLOCK_N > 16384:  # the registers hold only y; dy is read again, from a cache
        dy = tl.load(
            dy_ptr + m * stride_dy + n, mask=mask, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
    dx = y * (dy - dot)
    tl.store(dx_ptr + m * N + n, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@kernel
def _bwd_wide(y_ptr, dy_ptr, dx_ptr, stride_dy, N, BLOCK: tl.constexpr):
    """Read one row twice."""
    row = tl.program_id(0).to(tl.int64)
    y_row = y_ptr + row * N
    dy_row = dy_ptr + row * stride_dy
    n = tl.arange(0, BLOCK)
    dots = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        y = tl.load(y_row + start + n, mask=start + n < N, other=0.0).to(tl.float32)
        dots += y * tl.load(dy_row + start + n, mask=start + n < N, other=0.0).to(tl.float32)
    dot = tl.sum(dots)
    last = (tl.cdiv(N, BLOCK) - 1) * BLOCK
    for back in range(0, N, BLOCK):
        columns = last - back + n
        y = tl.load(y_row + columns, mask=columns < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_row + columns, mask=columns < N, other=0.0).to(tl.float32)
        dx = (y * (dy - dot)).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + row * N + columns, dx, mask=columns < N)


# bytes; a wider row doesn't fit into a program's registers and is read in blocks
MAX_ROW_BYTES = 65536


def _launch(N):
    """Choose (rows, columns, warps) of a program whose rows are one block, forward or backward.

    A thread has 16 to 32 columns.
    """
    columns = next_power_of_2(N)
    rows = max(1, 2048 // columns)
    warps = columns // 1024 if columns > 8192 else min(rows * columns // 512, 8)
    return rows, columns, warps


def _launch_stages(x, M, columns):
    """Choose (programs, stages) of forward.

    If one row fills a multiprocessor, the next rows are loaded in the meantime.
    """
    stages = devices.choose_num_stages(columns * x.element_size(), x)
    if columns > 16384 and stages > 1:
        return min(M, devices.multiprocessors(x)), stages
    return M, 1


def _launch_wide(x):
    """Choose (lanes, columns of a lane in an iteration, warps) where a row is read in blocks.

    A lane reads 16 bytes. The programs are large, so that few rows are read at a time: they stay in
    the cache until they are read again.
    """
    return 1024, 16 // x.element_size(), 16


def _empty_output(x):
    return x.new_empty(x.shape)


def _empty_gradient(y, dy):
    return y.new_empty(y.shape)


@custom_op("softmax", _empty_output)
def softmax_fwd(x: torch.Tensor) -> torch.Tensor:
    """Compute y (M, N) in x's dtype from x (M, N) with unit stride in N."""
    y = _empty_output(x)
    M, N = x.shape
    if N * x.element_size() <= MAX_ROW_BYTES:
        rows, columns, warps = _launch(N)
        programs, stages = _launch_stages(x, cdiv(M, rows), columns)
        _fwd[(programs,)](
            x,
            y,
            x.stride(0),
            M,
            N,
            BLOCK_M=rows,
            BLOCK_N=columns,
            STAGES=stages,
            num_warps=devices.limit_warps(warps, x),
        )
    else:
        lanes, per_lane, warps = _launch_wide(x)
        _fwd_wide[(M,)](
            x,
            y,
            x.stride(0),
            N,
            LANES=lanes,
            PER_LANE=per_lane,
            ALIGNED=N % 16 == x.stride(0) % 16 == 0,
            num_warps=devices.limit_warps(warps, x),
        )
    return y


@custom_op("softmax_backward", _empty_gradient)
def softmax_bwd(y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Compute dx (M, N) from y (M, N), contiguous, and dy (M, N) with unit stride in N."""
    dx = _empty_gradient(y, dy)
    M, N = y.shape
    if N * y.element_size() <= MAX_ROW_BYTES:
        rows, columns, warps = _launch(N)
        _bwd[(cdiv(M, rows),)](
            y,
            dy,
            dx,
            dy.stride(0),
            M,
            N,
            BLOCK_M=rows,
            BLOCK_N=columns,
            num_warps=devices.limit_warps(warps, y),
        )
    else:
        lanes, per_lane, warps = _launch_wide(y)
        _bwd_wide[(M,)](
            y,
            dy,
            dx,
            dy.stride(0),
            N,
            BLOCK=lanes * per_lane,
            num_warps=devices.limit_warps(warps, y),
        )
    return dx


class LigerSoftmaxFunction(Function):
    """Autograd Function of `liger_softmax`."""

    @staticmethod
    def reference(input_):
        return softmax_reference(input_)

    @staticmethod
    def forward(ctx, input_):
        devices.require_kernels("LigerSoftmaxFunction", input_)
        # for autograd it is no view, so that the caller may write to it; backward then raises
        Y = torch.ops.aten._unsafe_view(softmax_fwd(flatten_rows(input_)), input_.shape)
        ctx.save_for_backward(Y)
        return Y

    @staticmethod
    def differentiable_backward(ctx, dY):
        (Y,) = ctx.saved_tensors
        y, dy = Y.float(), dY.float()
        return (y * (dy - (y * dy).sum(-1, keepdim=True))).to(Y.dtype)

    @staticmethod
    def backward(ctx, dY):
        (Y,) = ctx.saved_tensors
        return softmax_bwd(flatten_rows(Y), flatten_rows(dY)).view(dY.shape)


def liger_softmax(x: torch.Tensor) -> torch.Tensor:
    """Compute softmax over the last dimension.

    Args:
        x: (..., N), fp32, bf16 or fp16; any N.

    Returns:
        (..., N) in x's dtype, computed in fp32 and rounded once. A row that is all -inf is NaN, as
        in PyTorch.

    Raises:
        ValueError: x has no dimension.
        TypeError: x is not of a floating dtype.
    """
    check.floats("liger_softmax", dict(x=x))
    if x.dim() == 0:
        raise ValueError("liger_softmax: x has no dimension, give a tensor of shape (..., N)")
    if not devices.has_kernels(x):
        return softmax_reference(x)
    return LigerSoftmaxFunction.apply(x)


class LigerSoftmax(torch.nn.Module):
    """`liger_softmax` as a module."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor):
        return liger_softmax(x)


CASES.append(
    Case(
        "softmax",
        fn=liger_softmax,
        reference=softmax_reference,
        inputs=lambda *shape: dict(x=torch.randn(shape).requires_grad_()),
        shapes=((1, 8), (5, 123), (2, 7, 512), (2, 17001), (3, 5, 1)),
        bench=((8192, 8192), (65536, 1024), (4096, 32768)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (2, 3)),
        fp32_roundings=2,
    )
)
