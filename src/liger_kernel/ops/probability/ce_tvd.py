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
from liger_kernel.core.op import CASES, Case, F, custom_op, flatten_rows
from liger_kernel.core.tile import (
    INF,
    cdiv,
    exp,
    finite_or_zero,
    log,
    next_power_of_2,
    online_max,
    scaled_exp,
    tl,
    triton,
)
from liger_kernel.ops.head.cross_entropy import check_targets, random_labels
from liger_kernel.ops.head.divergences import tvd
from liger_kernel.ops.probability.rows import RowsFunction, apply_function, upcast_rows


def fused_ce_tvd_reference(student_logits, teacher_logits, target, ignore_index=-100):
    x = upcast_rows(student_logits, target, ignore_index)
    z = upcast_rows(teacher_logits.detach(), target, ignore_index)
    ce = F.cross_entropy(x, target, ignore_index=ignore_index, reduction="none")
    distance = tvd(z.log_softmax(-1), x.log_softmax(-1))
    return ce, distance.where(target != ignore_index, 0)


@triton.jit
def _log_sum(
    row,
    N,
    LOADS: tl.constexpr,
    LANES: tl.constexpr,
    PER_LOAD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute max x and log Σ exp(x - max x).

    Each lane keeps its own maximum and sum until the end. In an iteration it reads PER_LOAD entries
    LOADS times. If ALIGNED, the entries of a load are contiguous.
    """
    EXACT: tl.constexpr = row.dtype.element_ty == tl.float32
    load = tl.arange(0, LOADS)[:, None, None]
    lane = tl.arange(0, LANES)[None, :, None]
    entry = tl.arange(0, PER_LOAD)
    if ALIGNED:
        i = (load * LANES + lane) * PER_LOAD + entry
    else:
        i = (load * PER_LOAD + entry) * LANES + lane
    top = tl.full((LANES,), -INF, dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, N, LOADS * LANES * PER_LOAD):
        inside = start + i < N
        x = tl.load(row + start + i, mask=inside, other=-INF, eviction_policy="evict_last")
        x = x.to(tl.float32)
        new_top, shift = online_max(top, tl.max(tl.max(x, axis=2), axis=0))
        new_total = tl.sum(tl.sum(scaled_exp(x - shift[None, :, None], EXACT), axis=2), axis=0)
        total = total * scaled_exp(top - shift, EXACT) + new_total
        top = new_top
    highest = tl.max(top)
    return highest, log(tl.sum(total * exp(top - finite_or_zero(highest))))


@triton.jit
def _probability_and_difference(x_row, z_row, i, N, top_x, sum_x, top_z, sum_z):
    """Return a block of p and of ½·(p - q). Both are 0 beyond the row."""
    EXACT: tl.constexpr = (
        x_row.dtype.element_ty == tl.float32 or z_row.dtype.element_ty == tl.float32
    )
    x = tl.load(x_row + i, mask=i < N, other=-INF).to(tl.float32)
    z = tl.load(z_row + i, mask=i < N, other=-INF).to(tl.float32)
    p = scaled_exp((x - top_x) - sum_x, EXACT)
    return p, 0.5 * (p - scaled_exp((z - top_z) - sum_z, EXACT))


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
    LOADS: tl.constexpr,
    LANES: tl.constexpr,
    PER_LOAD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Read one row twice. Statistics (5, M): max x, log Σ, max z, log Σ, ½·Σ p·s."""
    m = tl.program_id(0).to(tl.int64)
    y = tl.load(target_ptr + m)
    if y == ignore_index:
        tl.store(ce_ptr + m, 0.0)
        tl.store(tvd_ptr + m, 0.0)
        for k in tl.static_range(5):
            tl.store(stats_ptr + k * M + m, 0.0)
        return
    x_row = x_ptr + m * stride_x
    z_row = z_ptr + m * stride_z
    top_x, sum_x = _log_sum(x_row, N, LOADS, LANES, PER_LOAD, ALIGNED)
    top_z, sum_z = _log_sum(z_row, N, LOADS, LANES, PER_LOAD, ALIGNED)
    BLOCK: tl.constexpr = LANES * PER_LOAD * (2 if LOADS > 1 else 1)
    i = tl.arange(0, BLOCK)
    distance = tl.zeros((BLOCK,), dtype=tl.float32)
    signs = distance
    last = (tl.cdiv(N, BLOCK) - 1) * BLOCK
    # from the end of the rows, which was read last and is in a cache
    for back in range(0, N, BLOCK):
        p, d = _probability_and_difference(
            x_row, z_row, last - back + i, N, top_x, sum_x, top_z, sum_z
        )
        distance += tl.abs(d)
        signs += p * _half_sign(d)
    target_logit = tl.load(x_row + y, mask=(y >= 0) & (y < N), other=float("nan")).to(tl.float32)
    tl.store(ce_ptr + m, sum_x + (top_x - target_logit))
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
    """Compute dx of BLOCK columns of one row: one program."""
    blocks = tl.cdiv(N, BLOCK)
    m = tl.cast(tl.program_id(0) // blocks, tl.int64)
    i = tl.cast(tl.program_id(0) % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dx = dx_ptr + m * N + i
    y = tl.load(target_ptr + m)
    if y == ignore_index:
        tl.store(dx, tl.zeros((BLOCK,), dtype=dx_ptr.dtype.element_ty), mask=i < N)
        return
    stats = stats_ptr + m
    top_x = tl.load(stats)
    sum_x = tl.load(stats + M)
    top_z = tl.load(stats + 2 * M)
    sum_z = tl.load(stats + 3 * M)
    sign_mean = tl.load(stats + 4 * M)
    p, d = _probability_and_difference(
        x_ptr + m * stride_x, z_ptr + m * stride_z, i, N, top_x, sum_x, top_z, sum_z
    )
    dx_tvd = tl.load(g_tvd_ptr + m) * p * (_half_sign(d) - sign_mean)
    dx_ce = tl.load(g_ce_ptr + m) * (p - (i == y).to(tl.float32))
    tl.store(dx, (dx_ce + dx_tvd).to(dx_ptr.dtype.element_ty), mask=i < N)


def _launch(size):
    """Choose (loads of a thread at once, warps) of a program.

    It reads two rows of ``size`` bytes, and reads them again.

    8192x128256, bf16: with 8, 16, 32 warps 1.87, 1.79, 1.67 TB/s; with 4 loads of each thread at
    once instead of 2 1.86, 1.78, - (H200, 2026-11-23).
    """
    return 2, min(8, max(next_power_of_2(size // 4096), 1))


def _launch_bwd(N):
    """Choose (columns, warps) of a program: 16 columns a thread."""
    columns = min(next_power_of_2(N), 4096)
    return columns, max(columns // 512, 1)


def _empty_outputs(x, z, target, ignore_index):
    M = x.shape[0]
    ce = x.new_empty((M,), dtype=torch.float32)
    distance = x.new_empty((M,), dtype=torch.float32)
    stats = x.new_empty((5, M), dtype=torch.float32)
    return ce, distance, stats


def _empty_gradient(g_ce, g_tvd, x, z, target, stats, ignore_index):
    return x.new_empty(x.shape)


@custom_op("fused_ce_tvd", _empty_outputs)
def ce_tvd_fwd(
    x: torch.Tensor, z: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ce (M,), tvd (M,) and statistics (5, M) of x, z (M, N) with unit stride in N."""
    ce, distance, stats = _empty_outputs(x, z, target, ignore_index)
    M, N = x.shape
    loads, warps = _launch(N * x.element_size())
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
            LOADS=loads,
            LANES=32 * warps,
            PER_LOAD=16 // x.element_size(),
            ALIGNED=aligned,
            num_warps=devices.limit_warps(warps, x),
        )
    return ce, distance, stats


@custom_op("fused_ce_tvd_backward", _empty_gradient)
def ce_tvd_bwd(
    g_ce: torch.Tensor,
    g_tvd: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    """Compute dx (M, N) from the incoming gradients (M,), which are contiguous."""
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
            num_warps=devices.limit_warps(warps, x),
        )
    return dx


def _check(name, student_logits, teacher_logits, target, ignore_index=-100):
    """Check the arguments, and return them with targets of int64."""
    check.floats(name, dict(student_logits=student_logits, teacher_logits=teacher_logits))
    check.integers(name, dict(target=target))
    ignore_index = check.integer(name, "ignore_index", ignore_index)
    if student_logits.dim() != 2 or student_logits.shape != teacher_logits.shape:
        shapes = f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        raise ValueError(
            f"{name}: student_logits and teacher_logits have shapes {shapes}, "
            "give (rows, classes) for both"
        )
    check.shape(name, "target", target, tuple(student_logits.shape[:1]))
    if target.device != student_logits.device:
        raise ValueError(
            f"{name}: student_logits on {student_logits.device}, target on {target.device}, "
            "give one device"
        )
    check_targets(name, target, student_logits.shape[1], ignore_index)
    return student_logits, teacher_logits, target.long(), ignore_index


class LigerFusedCETVDFunction(RowsFunction):
    """Autograd Function of `liger_fused_ce_tvd`. Its outputs are (ce, tvd), each (M,)."""

    @classmethod
    def checked(cls, *args):
        return _check(cls.__name__, *args)

    reference = staticmethod(fused_ce_tvd_reference)

    @staticmethod
    def forward(ctx, student_logits, teacher_logits, target, ignore_index=-100):
        devices.require_kernels("LigerFusedCETVDFunction", student_logits)
        rows = flatten_rows(student_logits), flatten_rows(teacher_logits), target.contiguous()
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
        rows = flatten_rows(x), flatten_rows(z), target.contiguous()
        dx = ce_tvd_bwd(g_ce.contiguous(), g_tvd.contiguous(), *rows, stats, ctx.ignore_index)
        return dx, None, None, None


def liger_fused_ce_tvd(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the cross entropy of a student's logits, and their TVD from a teacher's.

    TVD is the total variation distance of the two distributions.

    Args:
        student_logits: (M, V), fp32, bf16 or fp16.
        teacher_logits: (M, V). They get no gradient.
        target: (M,) class indices.
        ignore_index: target of rows that are 0 in both results.

    Returns:
        (ce, tvd), (M,) each in fp32.

    Raises:
        ValueError: shapes that are not two equal (M, V) and (M,); tensors of several devices; a
            target out of range, on the CPU and in debug mode (LIGER_KERNEL_DEBUG=1). On a GPU the
            ce of such a row is otherwise NaN.
        TypeError: dtypes, or an ignore_index that is no int.
    """
    args = _check("liger_fused_ce_tvd", student_logits, teacher_logits, target, ignore_index)
    return apply_function(LigerFusedCETVDFunction, *args)


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
            target=random_labels(M, V),
        ),
        shapes=((1, 8), (5, 123), (9, 513), (3, 17000)),
        bench=((8192, 32000), (8192, 128256)),
        traffic=lambda t: tuple(
            n * t["student_logits"].numel() * t["student_logits"].element_size() for n in (2, 3)
        ),
        fp32_roundings=2,
    )
)
