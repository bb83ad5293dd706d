r"""Cross entropy and total variation distance of a student's and a teacher's logits, for each row.

    p = softmax(x) of the student,   q = softmax(z) of the teacher
    ce = log Σ exp x - x_y,   tvd = ½·Σ|p - q|,   both 0 in a row that is ignored

    dx = g_ce·(p - 1[v=y]) + g_tvd·½·p·(s - Σ p·s),   s = sign(p - q), 0 for a tie

Forward reads both rows for their log-sum-exps and once more for the distance; it saves these and Σ
p·s, five numbers a row. Neither softmax is in memory. A log-sum-exp is kept as its two parts, max x
and log Σ exp(x - max x), so that a confident row keeps its digits. Arithmetic is in fp32.

Source: TVD as a loss of distillation, arXiv:2307.15190.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, F, custom_op, matrix_rows
from liger_kernel.core.tile import (
    INF,
    cdiv,
    exp,
    exp_for,
    finite,
    log,
    next_power_of_2,
    online_max,
    tl,
    triton,
)
from liger_kernel.ops.head.cross_entropy import check_targets, labels
from liger_kernel.ops.head.divergences import tvd
from liger_kernel.ops.probability.rows import RowsFunction, applied, wide


def fused_ce_tvd_reference(student_logits, teacher_logits, target, ignore_index=-100):
    x, z = (wide(t, target, ignore_index) for t in (student_logits, teacher_logits.detach()))
    ce = F.cross_entropy(x, target, ignore_index=ignore_index, reduction="none")
    distance = tvd(z.log_softmax(-1), x.log_softmax(-1))
    return ce, distance.where(target != ignore_index, 0)


@triton.jit
def _log_sum(
    row, N, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr, ALIGNED: tl.constexpr
):
    """max x and log Σ exp(x - max x). Each lane keeps its own maximum and sum until the end.

    In an iteration it reads ROWS times EACH entries; if ALIGNED, those of a load are contiguous.
    """
    EXACT: tl.constexpr = row.dtype.element_ty == tl.float32
    of_row, lane, each = (
        tl.arange(0, ROWS)[:, None, None],
        tl.arange(0, LANES)[None, :, None],
        tl.arange(0, EACH),
    )
    i = (of_row * LANES + lane) * EACH + each if ALIGNED else (of_row * EACH + each) * LANES + lane
    top = tl.full((LANES,), -INF, dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, N, ROWS * LANES * EACH):
        x = tl.load(
            row + start + i, mask=start + i < N, other=-INF, eviction_policy="evict_last"
        ).to(tl.float32)
        new, shift = online_max(top, tl.max(tl.max(x, axis=2), axis=0))
        more = tl.sum(tl.sum(exp_for(x - shift[None, :, None], EXACT), axis=2), axis=0)
        total = total * exp_for(top - shift, EXACT) + more
        top = new
    highest = tl.max(top)
    return highest, log(tl.sum(total * exp(top - finite(highest))))


@triton.jit
def _pair(x_row, z_row, i, N, top_x, sum_x, top_z, sum_z):
    """A block of p, and of ½·(p - q); 0 beyond the row."""
    EXACT: tl.constexpr = (
        x_row.dtype.element_ty == tl.float32 or z_row.dtype.element_ty == tl.float32
    )
    x = tl.load(x_row + i, mask=i < N, other=-INF).to(tl.float32)
    z = tl.load(z_row + i, mask=i < N, other=-INF).to(tl.float32)
    p = exp_for((x - top_x) - sum_x, EXACT)
    return p, 0.5 * (p - exp_for((z - top_z) - sum_z, EXACT))


@triton.jit
def _half_sign(d):
    return tl.where(d > 0, 0.5, tl.where(d < 0, -0.5, 0.0))


@kernel
def _fwd(
    x_ptr,
    z_ptr,
    target_ptr,
    ce_ptr,
    tvd_ptr,
    stats_ptr,
    stride_x,
    stride_z,
    M,
    N,
    ignore_index,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One row, read twice. Statistics (5, M): max x, log Σ, max z, log Σ, ½·Σ p·s."""
    m = tl.program_id(0).to(tl.int64)
    y = tl.load(target_ptr + m)
    if y == ignore_index:
        tl.store(ce_ptr + m, 0.0)
        tl.store(tvd_ptr + m, 0.0)
        for k in tl.static_range(5):
            tl.store(stats_ptr + k * M + m, 0.0)
        return
    x_row, z_row = x_ptr + m * stride_x, z_ptr + m * stride_z
    top_x, sum_x = _log_sum(x_row, N, ROWS, LANES, EACH, ALIGNED)
    top_z, sum_z = _log_sum(z_row, N, ROWS, LANES, EACH, ALIGNED)
    BLOCK: tl.constexpr = LANES * EACH * (2 if ROWS > 1 else 1)
    i = tl.arange(0, BLOCK)
    distance = tl.zeros((BLOCK,), dtype=tl.float32)
    signs = distance
    last = (tl.cdiv(N, BLOCK) - 1) * BLOCK
    for back in range(
        0, N, BLOCK
    ):  # from the end of the rows, which was read last and is in a cache
        p, d = _pair(x_row, z_row, last - back + i, N, top_x, sum_x, top_z, sum_z)
        distance += tl.abs(d)
        signs += p * _half_sign(d)
    of_target = tl.load(x_row + y, mask=(y >= 0) & (y < N), other=float("nan")).to(tl.float32)
    tl.store(ce_ptr + m, sum_x + (top_x - of_target))
    tl.store(tvd_ptr + m, tl.sum(distance))
    tl.store(stats_ptr + m, top_x)
    tl.store(stats_ptr + M + m, sum_x)
    tl.store(stats_ptr + 2 * M + m, top_z)
    tl.store(stats_ptr + 3 * M + m, sum_z)
    tl.store(stats_ptr + 4 * M + m, tl.sum(signs))


@kernel
def _bwd(
    g_ce_ptr,
    g_tvd_ptr,
    x_ptr,
    z_ptr,
    target_ptr,
    stats_ptr,
    dx_ptr,
    stride_x,
    stride_z,
    M,
    N,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK columns of one row."""
    blocks = tl.cdiv(N, BLOCK)
    m = tl.cast(tl.program_id(0) // blocks, tl.int64)
    i = tl.cast(tl.program_id(0) % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dx = dx_ptr + m * N + i
    y = tl.load(target_ptr + m)
    if y == ignore_index:
        tl.store(dx, tl.zeros((BLOCK,), dtype=dx_ptr.dtype.element_ty), mask=i < N)
        return
    stats = stats_ptr + m
    top_x, sum_x, top_z, sum_z = (
        tl.load(stats),
        tl.load(stats + M),
        tl.load(stats + 2 * M),
        tl.load(stats + 3 * M),
    )
    p, d = _pair(x_ptr + m * stride_x, z_ptr + m * stride_z, i, N, top_x, sum_x, top_z, sum_z)
    of_tvd = tl.load(g_tvd_ptr + m) * p * (_half_sign(d) - tl.load(stats + 4 * M))
    of_ce = tl.load(g_ce_ptr + m) * (p - (i == y).to(tl.float32))
    tl.store(dx, (of_ce + of_tvd).to(dx_ptr.dtype.element_ty), mask=i < N)


def _launch(size):
    """(loads of a thread at once, warps) of a program that reads two rows of ``size`` bytes, and
    reads them again.

    8192x128256, bf16: with 8, 16, 32 warps 1.87, 1.79, 1.67 TB/s; with 4 loads of each thread at
    once instead of 2
    1.86, 1.78, - (H200, 2026-11-23).
    """
    return 2, min(8, max(next_power_of_2(size // 4096), 1))


def _launch_bwd(N):
    """(columns, warps) of a program: 16 columns a thread."""
    columns = min(next_power_of_2(N), 4096)
    return columns, max(columns // 512, 1)


def _outputs(x, z, target, ignore_index):
    return tuple(
        x.new_empty(shape, dtype=torch.float32)
        for shape in (x.shape[:1], x.shape[:1], (5, x.shape[0]))
    )


def _gradient(g_ce, g_tvd, x, z, target, stats, ignore_index):
    return x.new_empty(x.shape)


@custom_op("fused_ce_tvd", _outputs)
def ce_tvd_fwd(
    x: torch.Tensor, z: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, z (M, N) with unit stride in N, target (M,) -> ce (M,), tvd (M,), statistics (5, M)."""
    ce, distance, stats = _outputs(x, z, target, ignore_index)
    M, N = x.shape
    each, (loads, warps) = 16 // x.element_size(), _launch(N * x.element_size())
    aligned = N % 16 == x.stride(0) % 16 == z.stride(0) % 16 == 0
    if M:
        _fwd[(M,)](
            x,
            z,
            target,
            ce,
            distance,
            stats,
            x.stride(0),
            z.stride(0),
            M,
            N,
            ignore_index,
            ROWS=loads,
            LANES=32 * warps,
            EACH=each,
            ALIGNED=aligned,
            num_warps=devices.warps(warps, x),
        )
    return ce, distance, stats


@custom_op("fused_ce_tvd_backward", _gradient)
def ce_tvd_bwd(
    g_ce: torch.Tensor,
    g_tvd: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    """Incoming gradients (M,), contiguous -> dx (M, N)."""
    dx = x.new_empty(x.shape)
    M, N = x.shape
    columns, warps = _launch_bwd(N)
    if x.numel():
        _bwd[(M * cdiv(N, columns),)](
            g_ce,
            g_tvd,
            x,
            z,
            target,
            stats,
            dx,
            x.stride(0),
            z.stride(0),
            M,
            N,
            ignore_index,
            BLOCK=columns,
            num_warps=devices.warps(warps, x),
        )
    return dx


def _check(name, student_logits, teacher_logits, target, ignore_index=-100):
    """-> the arguments, with targets of int64."""
    check.floats(name, dict(student_logits=student_logits, teacher_logits=teacher_logits))
    check.integers(name, dict(target=target))
    ignore_index = check.integer(name, "ignore_index", ignore_index)
    if student_logits.dim() != 2 or student_logits.shape != teacher_logits.shape:
        shapes = f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        raise ValueError(
            f"{name}: student_logits and teacher_logits have shapes {shapes}, give (rows, classes) for both"
        )
    check.shape(name, "target", target, tuple(student_logits.shape[:1]))
    if target.device != student_logits.device:
        given = f"student_logits on {student_logits.device}, target on {target.device}"
        raise ValueError(f"{name}: {given}, give one device")
    check_targets(name, target, student_logits.shape[1], ignore_index)
    return student_logits, teacher_logits, target.long(), ignore_index


class LigerFusedCETVDFunction(RowsFunction):
    """``apply(student_logits, teacher_logits, target, ignore_index=-100) -> (ce, tvd)``, each
    (M,)."""

    @classmethod
    def checked(cls, *args):
        return _check(cls.__name__, *args)

    reference = staticmethod(fused_ce_tvd_reference)

    @staticmethod
    def forward(ctx, student_logits, teacher_logits, target, ignore_index=-100):
        devices.require_kernels("LigerFusedCETVDFunction", student_logits)
        rows = matrix_rows(student_logits), matrix_rows(teacher_logits), target.contiguous()
        ce, distance, stats = ce_tvd_fwd(*rows, ignore_index)
        ctx.save_for_backward(student_logits, teacher_logits, target, stats)
        ctx.ignore_index = ignore_index
        return ce, distance

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:3], ctx.ignore_index

    @staticmethod
    def backward(ctx, g_ce, g_tvd):
        x, z, target, stats = ctx.saved_tensors
        rows = matrix_rows(x), matrix_rows(z), target.contiguous()
        return (
            ce_tvd_bwd(g_ce.contiguous(), g_tvd.contiguous(), *rows, stats, ctx.ignore_index),
            None,
            None,
            None,
        )


def liger_fused_ce_tvd(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of a student's logits, and the total variation distance of its distribution
    from a teacher's.

    Args:
        student_logits: (M, V), fp32, bf16 or fp16.
        teacher_logits: (M, V). They get no gradient.
        target: (M,) class indices.
        ignore_index: target of rows that are 0 in both results.

    Returns:
        (ce, tvd), (M,) each in fp32.

    Raises:
        ValueError: shapes that are not two equal (M, V) and (M,); tensors of several devices; a
        target out of range, on
            the CPU and in debug mode (LIGER_KERNEL_DEBUG=1). On a GPU the ce of such a row is
            otherwise NaN.
        TypeError: dtypes, or an ignore_index that is no int.
    """
    args = _check("liger_fused_ce_tvd", student_logits, teacher_logits, target, ignore_index)
    return applied(LigerFusedCETVDFunction, *args)


class LigerFusedCETVDLoss(torch.nn.Module):
    """`liger_fused_ce_tvd` as a module."""

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = check.integer(type(self).__name__, "ignore_index", ignore_index)

    def forward(
        self, student_logits: torch.Tensor, teacher_logits: torch.Tensor, target: torch.Tensor
    ):
        return liger_fused_ce_tvd(student_logits, teacher_logits, target, self.ignore_index)


CASES.append(
    Case(
        "fused_ce_tvd",
        fn=liger_fused_ce_tvd,
        reference=fused_ce_tvd_reference,
        inputs=lambda M, V: dict(
            student_logits=torch.randn(M, V).requires_grad_(),
            teacher_logits=torch.randn(M, V),
            target=labels(M, V),
        ),
        shapes=((1, 8), (5, 123), (9, 513), (3, 17000)),
        bench=((8192, 32000), (8192, 128256)),
        traffic=lambda t: tuple(
            n * t["student_logits"].numel() * t["student_logits"].element_size() for n in (2, 3)
        ),
        fp32_roundings=2,
    )
)
