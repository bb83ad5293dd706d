r"""The kernels of the coefficients in `hyper_connections`, from n streams of C channels.

With u, all streams in one row of K = n·C, and the columns of mix in parts of n, n and n²:

    raw = u·phi,   rstd = 1 / sqrt(mean(u²) + rms_eps),   mix = raw·rstd
    z = alpha·mix + b, with an alpha for each part
    h_pre = σ(z) + pre_eps,   h_post = post_mult·σ(z),   h_res = Sinkhorn(z as n×n)

    draw = alpha·dz·rstd,   du = draw·phiᵀ - u·rstd²/K·Σ alpha·dz·mix,   dphi = uᵀ·draw

The products raw, du and dphi are in `coefficient_products`. Sinkhorn: y = softmax of each row + ε;
then the columns are divided by (their sum + ε); then tmax - 1 times the rows and the columns. With
s, the divisor of y, a division is undone by

    dy ← (dy - Σ dy·y) / s, summed as s was;   y ← y·s

So backward needs the sums of each division, not the matrices. They are computed again when it
begins. Everything is in fp32.

In the kernels, m is a row, o an output stream and i an input stream."""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import custom_op
from liger_kernel.core.reduce import sum_rows
from liger_kernel.core.tile import INF, cdiv, exp, load_fp32, next_power_of_2, sigmoid, tl, triton
from liger_kernel.ops.residual.coefficient_products import (
    input_gradient,
    multiply_by_phi,
    phi_gradient,
)


@triton.jit
def _load_rstd(square_ptr, m, M, K, eps):
    return tl.where(m < M, 1.0 / tl.sqrt(load_fp32(square_ptr, m, m < M) / K + eps), 0.0)


@triton.jit
def _load_z(raw_ptr, rstd, b_ptr, alpha_ptr, m, P, column, row_mask, column_mask):
    """Return mix and z = alpha·mix + b of these columns."""
    mix = load_fp32(raw_ptr, m * P + column, row_mask & column_mask) * rstd
    b = load_fp32(b_ptr, column, column_mask)
    return mix, tl.load(alpha_ptr).to(tl.float32) * mix + b


@triton.jit
def _softmax(z, mask):
    e = exp(tl.where(mask, z - tl.max(tl.where(mask, z, -INF), axis=2, keep_dims=True), -INF))
    return e / tl.sum(e, axis=2, keep_dims=True)


@triton.jit
def _normalize(y, eps, sums_ptr, sums_index, inside, store_mask, axis: tl.constexpr):
    """Divide y by its sums + eps, which are stored; by 1 where there is no stream."""
    s = tl.where(inside, tl.sum(y, axis=axis, keep_dims=True) + eps, 1.0)
    if sums_ptr is not None:
        tl.store(sums_ptr + sums_index, s, mask=store_mask)
    return y / s


@triton.jit
def _undo_normalize(y, dy, sums_ptr, sums_index, mask, axis: tl.constexpr):
    """Return y before its division, and the gradient of that."""
    s = tl.load(sums_ptr + sums_index, mask=mask, other=1.0)
    return y * s, (dy - tl.sum(dy * y, axis=axis, keep_dims=True)) / s


@kernel
def _coefficients_fwd(
    raw_ptr,
    square_ptr,
    b_ptr,
    alpha_pre_ptr,
    alpha_post_ptr,
    alpha_res_ptr,
    pre_ptr,
    post_ptr,
    res_ptr,
    sums_ptr,
    M,
    n,
    K,
    tmax,
    rms_eps,
    pre_eps,
    sinkhorn_eps,
    post_mult,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute BLOCK_M rows of h_res, and either of h_pre and h_post or of the divisions' sums."""
    P = n * n + 2 * n
    steps = 2 * tmax - 1
    # (rows, streams)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    i = tl.arange(0, BLOCK_N)[None, :]
    if pre_ptr is not None:
        rstd = _load_rstd(square_ptr, m, M, K, rms_eps)
        _, z_pre = _load_z(raw_ptr, rstd, b_ptr, alpha_pre_ptr, m, P, i, m < M, i < n)
        pre, _ = sigmoid(z_pre)
        _, z_post = _load_z(raw_ptr, rstd, b_ptr, alpha_post_ptr, m, P, n + i, m < M, i < n)
        post, _ = sigmoid(z_post)
        tl.store(pre_ptr + m * n + i, pre + pre_eps, mask=(m < M) & (i < n))
        tl.store(post_ptr + m * n + i, post_mult * post, mask=(m < M) & (i < n))
    # (rows, output streams, input streams)
    m = m[:, :, None]
    o = i[:, :, None]
    i = i[:, None, :]
    cell = o * n + i
    inside = (o < n) & (i < n)
    rstd = _load_rstd(square_ptr, m, M, K, rms_eps)
    _, z = _load_z(raw_ptr, rstd, b_ptr, alpha_res_ptr, m, P, 2 * n + cell, m < M, inside)
    y = tl.where(inside, _softmax(z, i < n) + sinkhorn_eps, 0.0)
    column_mask = (m < M) & (i < n)
    row_mask = (m < M) & (o < n)
    y = _normalize(y, sinkhorn_eps, sums_ptr, m * steps * n + i, i < n, column_mask, 1)
    for step in range(1, steps, 2):
        row_sums = (m * steps + step) * n + o
        column_sums = (m * steps + step + 1) * n + i
        y = _normalize(y, sinkhorn_eps, sums_ptr, row_sums, o < n, row_mask, 2)
        y = _normalize(y, sinkhorn_eps, sums_ptr, column_sums, i < n, column_mask, 1)
    tl.store(res_ptr + m * n * n + cell, y, mask=(m < M) & inside)


@triton.jit
def _store_draw(dz, mix, rstd, alpha_ptr, draw_ptr, index, mask):
    """Store draw. Return alpha·dz·mix."""
    dmix = tl.load(alpha_ptr).to(tl.float32) * dz
    tl.store(draw_ptr + index, dmix * rstd, mask=mask)
    return dmix * mix


@kernel
def _coefficients_bwd(
    dpre_ptr,
    dpost_ptr,
    dres_ptr,
    raw_ptr,
    square_ptr,
    b_ptr,
    alpha_pre_ptr,
    alpha_post_ptr,
    alpha_res_ptr,
    res_ptr,
    sums_ptr,
    draw_ptr,
    along_ptr,
    partial_ptr,
    M,
    n,
    K,
    tmax,
    rms_eps,
    post_mult,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute every num_programs-th block of BLOCK_M rows, and one row of partial Σ dz, Σ dz·mix.

    along is the factor of u in du: rstd²/K·Σ alpha·dz·mix.
    """
    P = n * n + 2 * n
    steps = 2 * tmax - 1
    j = tl.arange(0, BLOCK_N)
    # sums over the rows of dz and dz·mix, for each part
    dpre = tl.zeros((BLOCK_N,), dtype=tl.float32)
    dpost = dpre
    dpre_mix = dpre
    dpost_mix = dpre
    dres = tl.zeros((BLOCK_N, BLOCK_N), dtype=tl.float32)
    dres_mix = dres
    for block in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        # (rows, streams)
        m = row[:, None]
        i = j[None, :]
        mask = (m < M) & (i < n)
        rstd = _load_rstd(square_ptr, m, M, K, rms_eps)
        mix, z = _load_z(raw_ptr, rstd, b_ptr, alpha_pre_ptr, m, P, i, m < M, i < n)
        _, slope = sigmoid(z)
        dz = load_fp32(dpre_ptr, m * n + i, mask) * slope
        dpre += tl.sum(dz, axis=0)
        dpre_mix += tl.sum(dz * mix, axis=0)
        pre_along = _store_draw(dz, mix, rstd, alpha_pre_ptr, draw_ptr, m * P + i, mask)
        along = tl.sum(pre_along, axis=1)
        mix, z = _load_z(raw_ptr, rstd, b_ptr, alpha_post_ptr, m, P, n + i, m < M, i < n)
        _, slope = sigmoid(z)
        dz = load_fp32(dpost_ptr, m * n + i, mask) * (post_mult * slope)
        dpost += tl.sum(dz, axis=0)
        dpost_mix += tl.sum(dz * mix, axis=0)
        post_along = _store_draw(dz, mix, rstd, alpha_post_ptr, draw_ptr, m * P + n + i, mask)
        along += tl.sum(post_along, axis=1)
        # (rows, output streams, input streams)
        m = row[:, None, None]
        o = j[None, :, None]
        i = j[None, None, :]
        cell = o * n + i
        inside = (o < n) & (i < n)
        rstd = _load_rstd(square_ptr, m, M, K, rms_eps)
        mask = (m < M) & inside
        y = load_fp32(res_ptr, m * n * n + cell, mask)
        dy = load_fp32(dres_ptr, m * n * n + cell, mask)
        column_mask = (m < M) & (i < n)
        row_mask = (m < M) & (o < n)
        for back in range(1, steps, 2):
            column_sums = (m * steps + steps - back) * n + i
            row_sums = (m * steps + steps - back - 1) * n + o
            y, dy = _undo_normalize(y, dy, sums_ptr, column_sums, column_mask, 1)
            y, dy = _undo_normalize(y, dy, sums_ptr, row_sums, row_mask, 2)
        y, dy = _undo_normalize(y, dy, sums_ptr, m * steps * n + i, column_mask, 1)
        res_column = 2 * n + cell
        mix, z = _load_z(raw_ptr, rstd, b_ptr, alpha_res_ptr, m, P, res_column, m < M, inside)
        p = _softmax(z, i < n)
        dz = tl.where(mask, p * (dy - tl.sum(dy * p, axis=2, keep_dims=True)), 0.0)
        dres += tl.sum(dz, axis=0)
        dres_mix += tl.sum(dz * mix, axis=0)
        res_along = _store_draw(dz, mix, rstd, alpha_res_ptr, draw_ptr, m * P + res_column, mask)
        along += tl.sum(tl.sum(res_along, axis=2), axis=1)
        rstd = _load_rstd(square_ptr, row, M, K, rms_eps)
        tl.store(along_ptr + row, along * rstd * rstd / K, mask=row < M)
    partial = partial_ptr + tl.program_id(0) * 2 * P
    o = j[:, None]
    i = j[None, :]
    res_column = 2 * n + o * n + i
    inside = (o < n) & (i < n)
    tl.store(partial + j, dpre, mask=j < n)
    tl.store(partial + n + j, dpost, mask=j < n)
    tl.store(partial + res_column, dres, mask=inside)
    tl.store(partial + P + j, dpre_mix, mask=j < n)
    tl.store(partial + P + n + j, dpost_mix, mask=j < n)
    tl.store(partial + P + res_column, dres_mix, mask=inside)


def _coefficients_launch(n, u):
    """Return (rows, streams, warps) of a coefficient kernel's program.

    Matrices are in registers, four entries of them in each thread.
    """
    streams = next_power_of_2(n)
    rows = max(512 // streams**2, 1)
    warps = min(max(rows * streams**2 // 128, 1), 16)
    return rows, streams, devices.limit_warps(warps, u)


def _empty_outputs(u, phi, b, alpha_pre, alpha_post, alpha_res, n, *_):
    M = u.shape[0]
    P = phi.shape[1]
    shapes = (M, n), (M, n), (M, n, n), (M, P), (M,)
    return tuple(u.new_empty(shape, dtype=torch.float32) for shape in shapes)


@custom_op("mhc_coeffs", _empty_outputs)
def mhc_coeffs_fwd(
    u: torch.Tensor,
    phi: torch.Tensor,
    b: torch.Tensor,
    alpha_pre: torch.Tensor,
    alpha_post: torch.Tensor,
    alpha_res: torch.Tensor,
    n: int,
    tmax: int,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the coefficients of u (M, K), which has unit stride in K, and of a contiguous phi.

    Returns h_pre, h_post (M, n), h_res (M, n, n), raw (M, P) and Σ u² (M,), in fp32.
    """
    pre, post, res, raw, square = _empty_outputs(u, phi, b, alpha_pre, alpha_post, alpha_res, n)
    M, K = u.shape
    if M:
        multiply_by_phi(u, phi, raw, square)
        rows, streams, warps = _coefficients_launch(n, u)
        _coefficients_fwd[(cdiv(M, rows),)](
            raw,
            square,
            b,
            alpha_pre,
            alpha_post,
            alpha_res,
            pre,
            post,
            res,
            None,
            M,
            n,
            K,
            tmax,
            rms_eps,
            pre_eps,
            sinkhorn_eps,
            post_mult,
            BLOCK_M=rows,
            BLOCK_N=streams,
            num_warps=warps,
        )
    return pre, post, res, raw, square


def _empty_gradients(u, phi, need_du, need_dphi):
    du = u.new_empty(u.shape) if need_du else None
    dphi = phi.new_empty(phi.shape) if need_dphi else None
    return du, dphi


def _empty_backward_outputs(
    dpre,
    dpost,
    dres,
    u,
    phi,
    b,
    alpha_pre,
    alpha_post,
    alpha_res,
    raw,
    square,
    tmax,
    rms_eps,
    sinkhorn_eps,
    post_mult,
    need_du,
    need_dphi,
):
    sums = u.new_empty((2, phi.shape[1]), dtype=torch.float32)
    return *_empty_gradients(u, phi, need_du, need_dphi), sums


@custom_op("mhc_coeffs_backward", _empty_backward_outputs)
def mhc_coeffs_bwd(
    dpre: torch.Tensor,
    dpost: torch.Tensor,
    dres: torch.Tensor,
    u: torch.Tensor,
    phi: torch.Tensor,
    b: torch.Tensor,
    alpha_pre: torch.Tensor,
    alpha_post: torch.Tensor,
    alpha_res: torch.Tensor,
    raw: torch.Tensor,
    square: torch.Tensor,
    tmax: int,
    rms_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    need_du: bool,
    need_dphi: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return du, dphi (None if not needed), and each column's Σ dz and Σ dz·mix, (2, P) in fp32."""
    du, dphi = _empty_gradients(u, phi, need_du, need_dphi)
    M, K = u.shape
    P = phi.shape[1]
    n = dpre.shape[1]
    multiprocessors = devices.multiprocessors(u)
    rows, streams, warps = _coefficients_launch(n, u)
    row_blocks = cdiv(M, rows)
    res = torch.empty_like(dres)
    division_sums = raw.new_empty((M, 2 * tmax - 1, n))
    if M:
        _coefficients_fwd[(row_blocks,)](
            raw,
            square,
            b,
            alpha_pre,
            alpha_post,
            alpha_res,
            None,
            None,
            res,
            division_sums,
            M,
            n,
            K,
            tmax,
            rms_eps,
            0.0,
            sinkhorn_eps,
            post_mult,
            BLOCK_M=rows,
            BLOCK_N=streams,
            num_warps=warps,
        )
    programs = max(1, min(row_blocks, 4 * multiprocessors))
    draw = torch.empty_like(raw)
    along = torch.empty_like(square)
    partial_sums = raw.new_empty((programs, 2 * P))
    _coefficients_bwd[(programs,)](
        dpre,
        dpost,
        dres,
        raw,
        square,
        b,
        alpha_pre,
        alpha_post,
        alpha_res,
        res,
        division_sums,
        draw,
        along,
        partial_sums,
        M,
        n,
        K,
        tmax,
        rms_eps,
        post_mult,
        BLOCK_M=rows,
        BLOCK_N=streams,
        num_warps=warps,
    )
    sums = raw.new_empty((2, P))
    sum_rows(partial_sums, sums)
    if need_du and M:
        input_gradient(draw, phi, along, u, du)
    if need_dphi and K:
        phi_gradient(u, draw, dphi)
    return du, dphi, sums
