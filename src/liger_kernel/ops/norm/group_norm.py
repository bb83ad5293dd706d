r"""GroupNorm: each group of K channels of a sample, K·S elements, is normalised; each channel is scaled and shifted.

    rstd = 1 / sqrt(mean((x - mean x)²) + eps),   x̂ = (x - mean x)·rstd,   y = x̂·w + b

    with m = dy·w:   dx = rstd·(m - mean(m) - x̂·mean(m·x̂)),   dw = Σ dy·x̂,   db = Σ dy

The sums Σ dy·x̂ and Σ dy of a channel in one sample are used twice. Weighted with w and summed over the group, they are
the means in dx. Summed over the samples, they are dw and db.

The variance is the biased one, from the squares of differences to a mean. If a group fits into a program, that is the
group's mean. Otherwise it is the mean of a part, and Chan's formula merges the parts. A group that does not fit is read
twice, the second time from its end, which is still in a cache. If there are few such groups, several programs share
one.

Source: Wu and He, Group Normalization, arXiv:1803.08494; Chan, Golub and LeVeque, Algorithms for Computing the Sample
Variance, 1983.
"""

from __future__ import annotations

import math

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, Function, custom_op, matrix_rows
from liger_kernel.core.reduce import sum_rows
from liger_kernel.core.tile import cdiv, next_power_of_2, tl, triton
from liger_kernel.ops.norm.rms_norm import check_module


def group_norm_reference(x, w, b, groups, eps=1e-6):
    dtype = torch.promote_types(x.dtype, torch.promote_types(w.dtype, b.dtype))
    return torch.group_norm(x.to(dtype), groups, w.to(dtype), b.to(dtype), eps).to(x.dtype)


@triton.jit
def _merge(count, mean, square, total):
    """Chan's formula: mean and Σ(x - mean)² of all elements, from those of parts with ``count`` elements each."""
    middle = tl.sum(count * mean) / total
    middle += tl.sum(count * (mean - middle)) / total  # what the first sum rounded off
    off = mean - middle
    return middle, tl.sum(square + count * off * off)


@triton.jit
def _moments(x_ptr, N, LANES: tl.constexpr, EACH: tl.constexpr, ALIGNED: tl.constexpr):
    """Mean and Σ(x - mean)² of N elements. Each lane keeps those of its own elements, EACH of them in an iteration.

    If ALIGNED, a lane's elements are contiguous, and one load reads them. Otherwise those of neighbouring lanes are.
    """
    lane, each = tl.arange(0, LANES)[None, :], tl.arange(0, EACH)[:, None]
    i = lane * EACH + each if ALIGNED else each * LANES + lane
    count = tl.zeros((LANES,), dtype=tl.float32)
    mean, square = count, count
    for start in range(0, N, LANES * EACH):
        mask = start + i < N
        x = tl.load(x_ptr + start + i, mask=mask, other=0.0).to(tl.float32)
        more = tl.sum(mask.to(tl.float32), axis=0)
        its = tl.sum(x, axis=0) / tl.maximum(more, 1.0)
        off = tl.where(mask, x - its[None, :], 0.0)
        delta = its - mean
        share = more / tl.maximum(count + more, 1.0)
        square += tl.sum(off * off, axis=0) + delta * delta * count * share
        mean += delta * share
        count += more
    return _merge(count, mean, square, N)


@triton.jit
def _block(block, across, K, S, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr):
    """A block of a group: its channels, the offsets of its elements, and a mask of those that exist."""
    k = block // across * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    s = block % across * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
    return k, k.to(tl.int64) * S + s, (k < K) & (s < S)


@kernel
def _fwd(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, stride_x, G, K, S, eps,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program: one group, read once."""
    group = tl.program_id(0)
    n, g = (group // G).to(tl.int64), (group % G).to(tl.int64)
    k, s = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_S)[None, :]
    mask = (k < K) & (s < S)
    i = g * K * S + k * S + s
    x = tl.load(x_ptr + n * stride_x + i, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
    mean = tl.sum(x) / (K * S)
    mean += tl.sum(tl.where(mask, x - mean, 0.0)) / (K * S)  # what the first sum rounded off
    x = tl.where(mask, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x) / (K * S) + eps)
    tl.store(mean_ptr + group, mean)
    tl.store(rstd_ptr + group, rstd)
    y = x * (rstd * w) + b
    tl.store(y_ptr + n * G * K * S + i, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _measure(
    x_ptr, part_ptr, stride_x, G, E, STRIP, LANES: tl.constexpr, EACH: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """One program: mean and Σ(x - mean)² of a strip of a group's E elements."""
    group, strip = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x = x_ptr + (group // G).to(tl.int64) * stride_x + (group % G).to(tl.int64) * E + strip * STRIP
    mean, square = _moments(x, tl.minimum(STRIP, E - strip * STRIP), LANES, EACH, ALIGNED)
    part = part_ptr + 2 * (group * tl.num_programs(1) + strip)
    tl.store(part, mean)
    tl.store(part + 1, square)


@kernel
def _fwd_wide(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, part_ptr, stride_x, G, K, S, E, STRIP, eps,
    LANES: tl.constexpr, EACH: tl.constexpr, ALIGNED: tl.constexpr, STRIPS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program: a group, read twice; or some blocks of one, whose moments `_measure` has written to ``part``."""
    group = tl.program_id(0)
    n, g = (group // G).to(tl.int64), (group % G).to(tl.int64)
    x_group, y_group = x_ptr + n * stride_x + g * E, y_ptr + (n * G + g) * E
    if part_ptr is None:
        mean, square = _moments(x_group, E, LANES, EACH, ALIGNED)
    else:
        p = tl.arange(0, STRIPS).to(tl.int64)
        part = part_ptr + 2 * (group * tl.num_programs(1) + p)
        known = p < tl.num_programs(1)
        count = tl.where(known, tl.minimum(STRIP, E - p * STRIP), 0).to(tl.float32)
        means = tl.load(part, mask=known, other=0.0)
        mean, square = _merge(count, means, tl.load(part + 1, mask=known, other=0.0), E)
    rstd = 1.0 / tl.sqrt(square / E + eps)
    tl.store(mean_ptr + group, mean)
    tl.store(rstd_ptr + group, rstd)
    across = tl.cdiv(S, BLOCK_S)
    blocks = tl.cdiv(K, BLOCK_K) * across
    for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
        k, i, mask = _block(blocks - 1 - block, across, K, S, BLOCK_K, BLOCK_S)
        x = tl.load(x_group + i, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(y_group + i, ((x - mean) * (rstd * w) + b).to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _bwd(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, stride_dy, stride_x, N, G, K, S,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program processes one group in every n-th sample, and writes its part of one row of the partial dw and db."""
    row, g = tl.program_id(0) // G, (tl.program_id(0) % G).to(tl.int64)
    k, s = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_S)[None, :]
    mask = (k < K) & (s < S)
    i = g * K * S + k * S + s
    w = tl.load(w_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_K, 1), dtype=tl.float32)
    db = dw
    for sample in tl.range(row, N, tl.num_programs(0) // G, num_stages=STAGES):
        n = tl.cast(sample, tl.int64)
        dy = tl.load(dy_ptr + n * stride_dy + i, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + n * stride_x + i, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + n * G + g)
        xhat = (x - tl.load(mean_ptr + n * G + g)) * rstd
        dyxhat, dy1 = tl.sum(dy * xhat, axis=1, keep_dims=True), tl.sum(dy, axis=1, keep_dims=True)
        dw += dyxhat
        db += dy1
        if dx_ptr is not None:
            m1, mxhat = tl.sum(w * dy1) / (K * S), tl.sum(w * dyxhat) / (K * S)
            dx = rstd * (dy * w - m1 - xhat * mxhat)
            tl.store(dx_ptr + n * G * K * S + i, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    at = (row * G + g) * K + k
    if dw_ptr is not None:
        tl.store(dw_ptr + at, dw, mask=k < K)
    if db_ptr is not None:
        tl.store(db_ptr + at, db, mask=k < K)


@triton.jit
def _sums(
    dy_ptr, x_ptr, w_ptr, dw_ptr, db_ptr, at, mean, rstd, S, first, end, begin, stop,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Σ m and Σ m·x̂ over the channels from ``first`` to ``end`` and their elements from ``begin`` to ``stop``.

    The sums of channel k for dw and db are written at ``at + k``.
    """
    m1 = tl.zeros((BLOCK_K, 1), dtype=tl.float32)
    mxhat = m1
    for k0 in range(first, end, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)[:, None]
        dyx = tl.zeros((BLOCK_K, BLOCK_S), dtype=tl.float32)
        dys = dyx
        for s0 in range(begin, stop, BLOCK_S):
            s = s0 + tl.arange(0, BLOCK_S)[None, :]
            mask = (k < end) & (s < stop)
            i = k.to(tl.int64) * S + s
            dy = tl.load(dy_ptr + i, mask=mask, other=0.0).to(tl.float32)
            dys += dy
            dyx += dy * (tl.load(x_ptr + i, mask=mask, other=0.0).to(tl.float32) - mean)
        dyxhat, dy1 = tl.sum(dyx, axis=1, keep_dims=True) * rstd, tl.sum(dys, axis=1, keep_dims=True)
        if dw_ptr is not None:
            tl.store(dw_ptr + at + k, dyxhat, mask=k < end)
        if db_ptr is not None:
            tl.store(db_ptr + at + k, dy1, mask=k < end)
        w = tl.load(w_ptr + k, mask=k < end, other=0.0).to(tl.float32)
        m1 += w * dy1
        mxhat += w * dyxhat
    return tl.sum(m1), tl.sum(mxhat)


@kernel
def _bwd_sums(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, part_ptr, dw_ptr, db_ptr, stride_dy, stride_x, G, K, S, E,
    STRIP_K, STRIP_S, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program: the sums over a strip of a group, STRIP_S elements of STRIP_K channels."""
    group, strip = tl.program_id(0), tl.program_id(1)
    n, g = (group // G).to(tl.int64), (group % G).to(tl.int64)
    across = tl.cdiv(S, STRIP_S)
    first, begin = strip // across * STRIP_K, strip % across * STRIP_S
    m1, mxhat = _sums(
        dy_ptr + n * stride_dy + g * E, x_ptr + n * stride_x + g * E, w_ptr + g * K, dw_ptr, db_ptr,
        ((n * across + strip % across) * G + g) * K, tl.load(mean_ptr + group), tl.load(rstd_ptr + group), S,
        first, tl.minimum(first + STRIP_K, K), begin, tl.minimum(begin + STRIP_S, S), BLOCK_K, BLOCK_S,
    )  # fmt: skip
    if part_ptr is not None:
        part = part_ptr + 2 * (group * tl.num_programs(1) + strip)
        tl.store(part, m1)
        tl.store(part + 1, mxhat)


@kernel
def _bwd_wide(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, part_ptr, dx_ptr, dw_ptr, db_ptr, stride_dy, stride_x, G, K, S, E,
    STRIPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program: dx of a group, which is read twice; or of some blocks of one, whose sums are in ``part``."""
    group = tl.program_id(0)
    n, g = (group // G).to(tl.int64), (group % G).to(tl.int64)
    dy_group, x_group = dy_ptr + n * stride_dy + g * E, x_ptr + n * stride_x + g * E
    dx_group = dx_ptr + (n * G + g) * E
    mean, rstd = tl.load(mean_ptr + group), tl.load(rstd_ptr + group)
    if part_ptr is None:
        m1, mxhat = _sums(
            dy_group, x_group, w_ptr + g * K, dw_ptr, db_ptr, (n * G + g) * K, mean, rstd, S, 0, K, 0, S,
            BLOCK_K, BLOCK_S,
        )  # fmt: skip
    else:
        p = tl.arange(0, STRIPS)
        part = part_ptr + 2 * (group * tl.num_programs(1) + p)
        m1 = tl.sum(tl.load(part, mask=p < tl.num_programs(1), other=0.0))
        mxhat = tl.sum(tl.load(part + 1, mask=p < tl.num_programs(1), other=0.0))
    m1, mxhat = m1 / E, mxhat / E
    across = tl.cdiv(S, BLOCK_S)
    blocks = tl.cdiv(K, BLOCK_K) * across
    for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
        k, i, mask = _block(blocks - 1 - block, across, K, S, BLOCK_K, BLOCK_S)
        w = tl.load(w_ptr + g * K + k, mask=k < K, other=0.0).to(tl.float32)
        m = tl.load(dy_group + i, mask=mask, other=0.0).to(tl.float32) * w
        xhat = (tl.load(x_group + i, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        tl.store(dx_group + i, (rstd * (m - m1 - xhat * mxhat)).to(dx_ptr.dtype.element_ty), mask=mask)


def _launch(K, S, most):
    """(channels, elements of each, warps) of a program that holds a group; None if that needs more than ``most`` warps.

    A thread's registers hold 32 elements. If rows are not aligned they hold 16, since each element needs an address.
    """
    channels, elements, each = next_power_of_2(K), next_power_of_2(S), 32 if S % 16 == 0 else 16
    block = channels * elements
    if block > 32 * each * most:
        return None
    return channels, elements, 16 if block > 256 * each else min(max(block // 512, 1), 8)


def _launch_wide(K, S, block):
    """(channels, elements of each) of a block, if a program of 8 warps reads a group block by block."""
    elements = min(next_power_of_2(S), 1024)
    return min(next_power_of_2(K), block // elements), elements


def _sharing(groups, x):
    """How many programs share a large group: if there are few groups, so many that a multiprocessor has four."""
    m = devices.multiprocessors(x)
    return 1 if groups >= m else cdiv(4 * m, max(groups, 1))


def _outputs(x, w, b, groups, eps):
    moments = x.shape[0], groups
    return x.new_empty(x.shape), x.new_empty(moments, dtype=torch.float32), x.new_empty(moments, dtype=torch.float32)


def _gradients(dy, x, w, b, mean, rstd, need_dx, need_dw, need_db):
    return (
        x.new_empty(x.shape if need_dx else 0), w.new_empty(w.shape if need_dw else 0),
        b.new_empty(b.shape if need_db else 0),
    )  # fmt: skip


@custom_op("group_norm", _outputs)
def group_norm_fwd(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (N, C·S) with unit stride in C·S, w and b (C,) -> y (N, C·S) in x's dtype, mean and rstd (N, groups) fp32."""
    y, mean, rstd = _outputs(x, w, b, groups, eps)
    if x.numel() == 0:
        return y, mean, rstd
    N, E = x.shape[0], x.shape[1] // groups
    K = w.numel() // groups
    S = E // K
    whole = _launch(K, S, 16)
    if whole:
        channels, elements, warps = whole
        _fwd[(N * groups,)](
            x, w, b, y, mean, rstd, x.stride(0), groups, K, S, eps,
            BLOCK_K=channels, BLOCK_S=elements, num_warps=devices.warps(warps, x),
        )  # fmt: skip
        return y, mean, rstd
    lanes, each, warps = 1024, 16 // x.element_size(), devices.warps(8, x)
    channels, elements = _launch_wide(K, S, lanes * each)
    aligned = E % 16 == x.stride(0) % 16 == 0
    strip = 16 * cdiv(E, 16 * min(_sharing(N * groups, x), cdiv(E, lanes * each)))
    strips = cdiv(E, strip)
    part = x.new_empty((N * groups, strips, 2), dtype=torch.float32) if strips > 1 else None
    if strips > 1:
        _measure[(N * groups, strips)](
            x, part, x.stride(0), groups, E, strip, LANES=lanes, EACH=each, ALIGNED=aligned, num_warps=warps
        )
    _fwd_wide[(N * groups, strips)](
        x, w, b, y, mean, rstd, part, x.stride(0), groups, K, S, E, strip, eps,
        LANES=lanes, EACH=each, ALIGNED=aligned, STRIPS=next_power_of_2(strips), BLOCK_K=channels, BLOCK_S=elements,
        num_warps=warps,
    )  # fmt: skip
    return y, mean, rstd


@custom_op("group_norm_backward", _gradients)
def group_norm_bwd(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> dx (N, C·S), dw and db (C,). What is not needed is an empty tensor."""
    dx, dw, db = _gradients(dy, x, w, b, mean, rstd, need_dx, need_dw, need_db)
    if x.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    (N, G), C, m = mean.shape, w.numel(), devices.multiprocessors(x)
    K, E = C // G, x.shape[1] // G
    S = E // K

    def partial(rows, needed):
        return x.new_empty((rows, C), dtype=torch.float32) if needed else None

    whole = _launch(K, S, 8)
    if whole:
        channels, elements, warps = whole
        rows = min(N, cdiv(m * max(16 // warps, 1), G))
        dws, dbs = partial(rows, need_dw), partial(rows, need_db)
        _bwd[(rows * G,)](
            dy, x, w, mean, rstd, dx if need_dx else None, dws, dbs, dy.stride(0), x.stride(0), N, G, K, S,
            BLOCK_K=channels, BLOCK_S=elements, STAGES=devices.stages(2 * channels * elements * x.element_size(), x),
            num_warps=devices.warps(warps, x),
        )  # fmt: skip
    else:
        channels, elements = _launch_wide(K, S, 4096)
        share, warps = _sharing(N * G, x), devices.warps(8, x)
        strip_s = elements * cdiv(cdiv(S, elements), share)
        across = cdiv(S, strip_s)
        strip_k = channels * cdiv(cdiv(K, channels), cdiv(share, across))
        strips = cdiv(K, strip_k) * across
        dws, dbs = partial(N * across, need_dw), partial(N * across, need_db)
        part = x.new_empty((N * G, strips, 2), dtype=torch.float32) if need_dx and strips > 1 else None
        if strips > 1 or not need_dx:
            _bwd_sums[(N * G, strips)](
                dy, x, w, mean, rstd, part, dws, dbs, dy.stride(0), x.stride(0), G, K, S, E, strip_k, strip_s,
                BLOCK_K=channels, BLOCK_S=elements, num_warps=warps,
            )  # fmt: skip
        if need_dx:
            _bwd_wide[(N * G, strips)](
                dy, x, w, mean, rstd, part, dx, dws, dbs, dy.stride(0), x.stride(0), G, K, S, E,
                STRIPS=next_power_of_2(strips), BLOCK_K=channels, BLOCK_S=elements, num_warps=warps,
            )  # fmt: skip
    if need_dw:
        sum_rows(dws, dw)
    if need_db:
        sum_rows(dbs, db)
    return dx, dw, db


def _samples(t):
    """(N, C, *) as (N, C·S) in which a sample is contiguous: a view if there is one, else a copy."""
    return matrix_rows(t.flatten(1))


class LigerGroupNormFunction(Function):
    """``apply(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps) -> Y`` like X."""

    @staticmethod
    def reference(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
        return group_norm_reference(X, affine_scaling_weight, affine_shifting_bias, num_groups, eps)

    @staticmethod
    def forward(ctx, X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
        devices.require_kernels("LigerGroupNormFunction", X)
        x, w, b = _samples(X), affine_scaling_weight.contiguous(), affine_shifting_bias.contiguous()
        y, mean, rstd = group_norm_fwd(x, w, b, num_groups, eps)
        ctx.save_for_backward(X, affine_scaling_weight, affine_shifting_bias, mean, rstd)
        ctx.options = num_channels, num_groups, eps
        return torch.ops.aten._unsafe_view(y, X.shape)  # to autograd no view: the caller may write to it

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:3], *ctx.options

    @staticmethod
    def backward(ctx, dY):
        X, w, b, mean, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad[:3]
        dx, dw, db = group_norm_bwd(_samples(dY), _samples(X), w.contiguous(), b.contiguous(), mean, rstd, *need)
        dx = dx.view(dY.shape) if need[0] else None
        return dx, dw if need[1] else None, db if need[2] else None, None, None, None


def _check_groups(name, num_channels, num_groups):
    check.size(name, "num_channels", num_channels)
    if check.integer(name, "num_groups", num_groups) < 1 or num_channels % num_groups:
        raise ValueError(f"{name}: num_groups is {num_groups}, give a divisor of num_channels, {num_channels}")


def liger_group_norm(
    X: torch.Tensor, affine_scaling_weight: torch.Tensor, affine_shifting_bias: torch.Tensor, num_channels: int,
    num_groups: int, eps: float,
) -> torch.Tensor:  # fmt: skip
    """Group normalisation, as `torch.nn.functional.group_norm`. Note that num_channels comes before num_groups.

    Args:
        X: (N, C, *) with at least three dimensions, fp32, bf16 or fp16.
        affine_scaling_weight, affine_shifting_bias: (C,), any floating dtype.
        num_channels: C.
        num_groups: a divisor of C.
        eps: added to the variance.

    Returns:
        A tensor like X, computed in fp32 and rounded once.

    Raises:
        ValueError: X has fewer than three dimensions; C is not num_channels, or not a multiple of num_groups; weight or
            bias has another shape or device.
        TypeError: X, weight or bias is not a floating point tensor; num_channels, num_groups or eps is not a number.

    Source: arXiv:1803.08494.
    """
    name = "liger_group_norm"
    parameters = dict(affine_scaling_weight=affine_scaling_weight, affine_shifting_bias=affine_shifting_bias)
    check.floats(name, dict(X=X, **parameters))
    if X.dim() < 3:
        raise ValueError(f"{name}: X has shape {tuple(X.shape)}, give (N, C, *) with at least three dimensions")
    if X.shape[1] != check.size(name, "num_channels", num_channels):
        raise ValueError(f"{name}: num_channels is {num_channels}, X has {X.shape[1]}; it comes before num_groups")
    _check_groups(name, num_channels, num_groups)
    for what, t in parameters.items():
        check.shape(name, what, t, (num_channels,))
    eps = check.not_negative(name, "eps", eps)
    if not devices.has_kernels(X):
        return group_norm_reference(X, affine_scaling_weight, affine_shifting_bias, num_groups, eps)
    return LigerGroupNormFunction.apply(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps)


class LigerGroupNorm(torch.nn.Module):
    """`liger_group_norm` as a module. There is always a bias: from N(0, 1) with ``bias=True``, else zeros."""

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones",
    ) -> None:  # fmt: skip
        super().__init__()
        _check_groups("LigerGroupNorm", num_channels, num_groups)
        check_module("LigerGroupNorm", num_channels, eps, init_fn)
        self.num_channels, self.num_groups, self.eps = num_channels, num_groups, eps
        self.weight = torch.nn.Parameter(getattr(torch, init_fn)(num_channels))
        self.bias = torch.nn.Parameter((torch.randn if bias else torch.zeros)(num_channels))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor):
        return liger_group_norm(
            hidden_states, self.weight, self.bias, self.num_channels, self.num_groups, self.variance_epsilon
        )

    def extra_repr(self):
        return f"{self.num_channels}, {self.num_groups}, eps={self.variance_epsilon}"


def _inputs(*shape):
    C = shape[1]
    w, b = (torch.randn(C).requires_grad_() for _ in range(2))
    return dict(x=torch.randn(shape).requires_grad_(), w=w, b=b)


def _groups(x):
    """32 as in most models, or for small shapes a divisor of it."""
    return math.gcd(x.shape[1], 32)


CASES.append(
    Case(
        "group_norm",
        fn=lambda x, w, b: liger_group_norm(x, w, b, x.shape[1], _groups(x), 1e-6),
        reference=lambda x, w, b: group_norm_reference(x, w, b, _groups(x), 1e-6),
        inputs=_inputs,
        shapes=((1, 3, 5), (5, 6, 7), (3, 40, 4, 9), (2, 9, 592), (3, 12, 50, 120), (1, 6, 17000)),
        bench=((16, 512, 64, 64), (8, 320, 96, 96)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (2, 3)),
        fp32_roundings=2,  # x - mean is one more than PyTorch's x·scale + shift, which cancels if x has a large mean
    )
)
