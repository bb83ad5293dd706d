r"""The coefficients of hyper-connections, from n streams of C channels: the kernels of
`hyper_connections`.

With u, all streams in one row of K = n·C, and the columns of mix in parts of n, n and n²:

    raw = u·phi,   rstd = 1 / sqrt(mean(u²) + rms_eps),   mix = raw·rstd,   z = alpha·mix + b, an alpha for each part
    h_pre = σ(z) + pre_eps,   h_post = post_mult·σ(z),   h_res = Sinkhorn(z as n×n)

    draw = alpha·dz·rstd,   du = draw·phiᵀ - u·rstd²/K·Σ alpha·dz·mix,   dphi = uᵀ·draw

The three products share a kernel. Sinkhorn: y = softmax of each row + ε; then the columns are
divided by (their sum + ε); then tmax - 1 times the rows and the columns. With s, what y was divided
by, a division is undone by

    dy ← (dy - Σ dy·y) / s, summed as s was;   y ← y·s

So backward needs the sums of each division, not the matrices; they are computed again when it
begins. Everything is in fp32."""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import custom_op
from liger_kernel.core.reduce import sum_rows
from liger_kernel.core.tile import INF, cdiv, exp, next_power_of_2, read, sigmoid, tl, triton

DEEP = tl.constexpr(1024)  # a multiple of every block's depth


@kernel
def _product(
    a_ptr,
    b_ptr,
    c_ptr,
    square_ptr,
    u_ptr,
    along_ptr,
    a_m,
    a_k,
    b_k,
    b_n,
    u_m,
    M,
    N,
    K,
    STRIP,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """c = a·b - along·u, and Σ_k a². The third axis of the grid goes over strips of K, of which
    each has its own c.

    Matrix units cut sums off where they should round them. So the products of DEEP entries are
    summed by themselves."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    begin = tl.program_id(2) * STRIP
    end = tl.minimum(begin + STRIP, K)
    i = tl.arange(0, BLOCK_K)
    c = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    square = tl.zeros((BLOCK_M, 1), dtype=tl.float32)
    for piece in range(begin, end, DEEP):
        part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in tl.range(piece, tl.minimum(piece + DEEP, end), BLOCK_K, num_stages=STAGES):
            k = (start + i).to(tl.int64)
            a = read(a_ptr, m * a_m + k[None, :] * a_k, (m < M) & (k[None, :] < end))
            b = read(b_ptr, k[:, None] * b_k + n * b_n, (k[:, None] < end) & (n < N))
            part = tl.dot(a, b, part, input_precision=PRECISION)
            if square_ptr is not None:
                square += tl.sum(a * a, axis=1, keep_dims=True)
        c += part
    if square_ptr is not None:
        tl.store(square_ptr + m, square, mask=m < M)  # every program of these rows has the same
    inside = (m < M) & (n < N)
    if u_ptr is not None:
        c -= read(along_ptr, m, m < M) * read(u_ptr, m * u_m + n, inside)
    tl.store(c_ptr + (tl.program_id(2) * M + m) * N + n, c.to(c_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rstd(square_ptr, m, M, K, eps):
    return tl.where(m < M, 1.0 / tl.sqrt(read(square_ptr, m, m < M) / K + eps), 0.0)


@triton.jit
def _z(raw_ptr, rstd, b_ptr, alpha_ptr, m, P, at, rows, columns):
    """mix and alpha·mix + b of the columns ``at``."""
    mix = read(raw_ptr, m * P + at, rows & columns) * rstd
    return mix, tl.load(alpha_ptr).to(tl.float32) * mix + read(b_ptr, at, columns)


@triton.jit
def _softmax(z, known):
    e = exp(tl.where(known, z - tl.max(tl.where(known, z, -INF), axis=2, keep_dims=True), -INF))
    return e / tl.sum(e, axis=2, keep_dims=True)


@triton.jit
def _divide(y, eps, s_ptr, s_at, known, kept, axis: tl.constexpr):
    """y over its sums + eps, which are kept; over 1 where nothing is known."""
    s = tl.where(known, tl.sum(y, axis=axis, keep_dims=True) + eps, 1.0)
    if s_ptr is not None:
        tl.store(s_ptr + s_at, s, mask=kept)
    return y / s


@triton.jit
def _undo(y, dy, s_ptr, s_at, kept, axis: tl.constexpr):
    """What was divided, and its gradient."""
    s = tl.load(s_ptr + s_at, mask=kept, other=1.0)
    return y * s, (dy - tl.sum(dy * y, axis=axis, keep_dims=True)) / s


@kernel
def _coeffs(
    raw_ptr,
    square_ptr,
    b_ptr,
    alpha_pre_ptr,
    alpha_post_ptr,
    alpha_res_ptr,
    pre_ptr,
    post_ptr,
    res_ptr,
    s_ptr,
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
    """One program: BLOCK_M rows. It writes h_res, and either h_pre and h_post or the sums."""
    P, steps = n * n + 2 * n, 2 * tmax - 1
    m, i = (
        tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None],
        tl.arange(0, BLOCK_N)[None, :],
    )
    if pre_ptr is not None:
        rstd = _rstd(square_ptr, m, M, K, rms_eps)
        pre, _ = sigmoid(_z(raw_ptr, rstd, b_ptr, alpha_pre_ptr, m, P, i, m < M, i < n)[1])
        post, _ = sigmoid(_z(raw_ptr, rstd, b_ptr, alpha_post_ptr, m, P, n + i, m < M, i < n)[1])
        tl.store(pre_ptr + m * n + i, pre + pre_eps, mask=(m < M) & (i < n))
        tl.store(post_ptr + m * n + i, post_mult * post, mask=(m < M) & (i < n))
    m, o, i = m[:, :, None], i[:, :, None], i[:, None, :]
    at, inside = o * n + i, (o < n) & (i < n)
    rstd = _rstd(square_ptr, m, M, K, rms_eps)
    _, z = _z(raw_ptr, rstd, b_ptr, alpha_res_ptr, m, P, 2 * n + at, m < M, inside)
    y = tl.where(inside, _softmax(z, i < n) + sinkhorn_eps, 0.0)
    columns, rows = (m < M) & (i < n), (m < M) & (o < n)
    y = _divide(y, sinkhorn_eps, s_ptr, m * steps * n + i, i < n, columns, 1)
    for step in range(1, steps, 2):
        y = _divide(y, sinkhorn_eps, s_ptr, (m * steps + step) * n + o, o < n, rows, 2)
        y = _divide(y, sinkhorn_eps, s_ptr, (m * steps + step + 1) * n + i, i < n, columns, 1)
    tl.store(res_ptr + m * n * n + at, y, mask=(m < M) & inside)


@triton.jit
def _spread(dz, mix, rstd, alpha_ptr, draw_ptr, at, mask):
    """Write draw -> alpha·dz·mix."""
    dmix = tl.load(alpha_ptr).to(tl.float32) * dz
    tl.store(draw_ptr + at, dmix * rstd, mask=mask)
    return dmix * mix


@kernel
def _coeffs_bwd(
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
    s_ptr,
    draw_ptr,
    along_ptr,
    part_ptr,
    M,
    n,
    K,
    tmax,
    rms_eps,
    post_mult,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program takes every num_programs-th block of BLOCK_M rows, and writes one row of partial Σ
    dz and Σ dz·mix."""
    P, steps, j = n * n + 2 * n, 2 * tmax - 1, tl.arange(0, BLOCK_N)
    dpre = tl.zeros((BLOCK_N,), dtype=tl.float32)
    dpost, dpre_mix, dpost_mix = dpre, dpre, dpre
    dres = tl.zeros((BLOCK_N, BLOCK_N), dtype=tl.float32)
    dres_mix = dres
    for block in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        first = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        m, i = first[:, None], j[None, :]
        known, rstd = (m < M) & (i < n), _rstd(square_ptr, m, M, K, rms_eps)
        mix, z = _z(raw_ptr, rstd, b_ptr, alpha_pre_ptr, m, P, i, m < M, i < n)
        _, slope = sigmoid(z)
        dz = read(dpre_ptr, m * n + i, known) * slope
        dpre, dpre_mix = dpre + tl.sum(dz, axis=0), dpre_mix + tl.sum(dz * mix, axis=0)
        along = tl.sum(_spread(dz, mix, rstd, alpha_pre_ptr, draw_ptr, m * P + i, known), axis=1)
        mix, z = _z(raw_ptr, rstd, b_ptr, alpha_post_ptr, m, P, n + i, m < M, i < n)
        _, slope = sigmoid(z)
        dz = read(dpost_ptr, m * n + i, known) * (post_mult * slope)
        dpost, dpost_mix = dpost + tl.sum(dz, axis=0), dpost_mix + tl.sum(dz * mix, axis=0)
        along += tl.sum(
            _spread(dz, mix, rstd, alpha_post_ptr, draw_ptr, m * P + n + i, known), axis=1
        )
        m, o, i = first[:, None, None], j[None, :, None], j[None, None, :]
        at, inside, rstd = o * n + i, (o < n) & (i < n), _rstd(square_ptr, m, M, K, rms_eps)
        known = (m < M) & inside
        y, dy = read(res_ptr, m * n * n + at, known), read(dres_ptr, m * n * n + at, known)
        columns, rows = (m < M) & (i < n), (m < M) & (o < n)
        for back in range(1, steps, 2):
            y, dy = _undo(y, dy, s_ptr, (m * steps + steps - back) * n + i, columns, 1)
            y, dy = _undo(y, dy, s_ptr, (m * steps + steps - back - 1) * n + o, rows, 2)
        y, dy = _undo(y, dy, s_ptr, m * steps * n + i, columns, 1)
        mix, z = _z(raw_ptr, rstd, b_ptr, alpha_res_ptr, m, P, 2 * n + at, m < M, inside)
        p = _softmax(z, i < n)
        dz = tl.where(known, p * (dy - tl.sum(dy * p, axis=2, keep_dims=True)), 0.0)
        dres, dres_mix = dres + tl.sum(dz, axis=0), dres_mix + tl.sum(dz * mix, axis=0)
        dres_along = _spread(dz, mix, rstd, alpha_res_ptr, draw_ptr, m * P + 2 * n + at, known)
        along += tl.sum(tl.sum(dres_along, axis=2), axis=1)
        rstd = _rstd(square_ptr, first, M, K, rms_eps)
        tl.store(along_ptr + first, along * rstd * rstd / K, mask=first < M)
    part = part_ptr + tl.program_id(0) * 2 * P
    o, i = j[:, None], j[None, :]
    at, inside = 2 * n + o * n + i, (o < n) & (i < n)
    tl.store(part + j, dpre, mask=j < n)
    tl.store(part + n + j, dpost, mask=j < n)
    tl.store(part + at, dres, mask=inside)
    tl.store(part + P + j, dpre_mix, mask=j < n)
    tl.store(part + P + n + j, dpost_mix, mask=j < n)
    tl.store(part + P + at, dres_mix, mask=inside)


def _multiply(a, b, c, blocks, exact, splits=1, square=None, u=None, along=None):
    """c (splits, M, N) = a (M, K)·b (K, N) - along·u, each split of a strip of K.

    If not ``exact``, it may be computed in tf32: its 11 bits are all that 16-bit operands or
    results have."""
    (M, K), N, (rows, columns, depth) = a.shape, b.shape[1], blocks
    strip = depth * max(cdiv(cdiv(K, depth), splits), 1)
    _product[(cdiv(M, rows), cdiv(N, columns), splits)](
        a,
        b,
        c,
        square,
        u,
        along,
        *a.stride(),
        *b.stride(),
        0 if u is None else u.stride(0),
        M,
        N,
        K,
        strip,
        BLOCK_M=rows,
        BLOCK_N=columns,
        BLOCK_K=depth,
        PRECISION="ieee" if exact else None,
        STAGES=devices.stages((rows + columns) * depth * a.element_size(), a),
        num_warps=devices.warps(4, a),
    )


def _launch_coeffs(n):
    """(rows, streams, warps) of a program: matrices in registers, four entries of them in each
    thread."""
    streams = next_power_of_2(n)
    rows = max(512 // streams**2, 1)
    return rows, streams, min(max(rows * streams**2 // 128, 1), 16)


def _columns(P):
    """Of phi in a block."""
    return min(max(next_power_of_2(P), 16), 64)


def _depth(u):
    """Of u in a block of forward: much where it is loaded ahead, little where it goes straight into
    registers.

    128 is Hopper's, of 16 bits (H200, 2026-11-22). sm_80 and sm_89, or fp32, have too few registers
    for it."""
    if devices.stages(32 * 1024, u) == 1:
        return 32
    return 64 if u.dtype == torch.float32 or devices.arch(u).startswith("sm_8") else 128


def _coefficients(
    u, phi, b, alpha_pre, alpha_post, alpha_res, n, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
):
    M, P = u.shape[0], phi.shape[1]
    return tuple(
        u.new_empty(shape, dtype=torch.float32)
        for shape in ((M, n), (M, n), (M, n, n), (M, P), (M,))
    )


@custom_op("mhc_coeffs", _coefficients)
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
    """u (M, K) with unit stride in K -> h_pre, h_post (M, n), h_res (M, n, n), raw (M, P) and Σ u²
    (M,), in fp32."""
    numbers = n, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
    pre, post, res, raw, square = _coefficients(
        u, phi, b, alpha_pre, alpha_post, alpha_res, *numbers
    )
    M, K = u.shape
    if M:
        exact = torch.float32 in (u.dtype, phi.dtype)
        _multiply(u, phi, raw, (32, _columns(phi.shape[1]), _depth(u)), exact, square=square)
        rows, streams, warps = _launch_coeffs(n)
        _coeffs[(cdiv(M, rows),)](
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
            *numbers[1:],
            BLOCK_M=rows,
            BLOCK_N=streams,
            num_warps=devices.warps(warps, u),
        )
    return pre, post, res, raw, square


def _coefficient_gradients(
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
    du, dphi = (
        u.new_empty(u.shape) if need_du else None,
        phi.new_empty(phi.shape) if need_dphi else None,
    )
    return du, dphi, u.new_empty((2, phi.shape[1]), dtype=torch.float32)


@custom_op("mhc_coeffs_backward", _coefficient_gradients)
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
    """-> du, dphi (None if not needed), and Σ dz and Σ dz·mix of each column, (2, P) in fp32."""
    du, dphi = (
        u.new_empty(u.shape) if need_du else None,
        phi.new_empty(phi.shape) if need_dphi else None,
    )
    (M, K), P, n, m = u.shape, phi.shape[1], dpre.shape[1], devices.multiprocessors(u)
    rows, streams, warps = _launch_coeffs(n)
    block = dict(BLOCK_M=rows, BLOCK_N=streams, num_warps=devices.warps(warps, u))
    given = raw, square, b, alpha_pre, alpha_post, alpha_res
    res, s = torch.empty_like(dres), raw.new_empty((M, 2 * tmax - 1, n))
    if M:
        _coeffs[(cdiv(M, rows),)](
            *given,
            None,
            None,
            res,
            s,
            M,
            n,
            K,
            tmax,
            rms_eps,
            0.0,
            sinkhorn_eps,
            post_mult,
            **block,
        )
    programs = max(1, min(cdiv(M, rows), 4 * m))
    draw, along, part = (
        torch.empty_like(raw),
        torch.empty_like(square),
        raw.new_empty((programs, 2 * P)),
    )
    _coeffs_bwd[(programs,)](
        dpre,
        dpost,
        dres,
        *given,
        res,
        s,
        draw,
        along,
        part,
        M,
        n,
        K,
        tmax,
        rms_eps,
        post_mult,
        **block,
    )
    sums = raw.new_empty((2, P))
    sum_rows(part, sums)
    if need_du and M:
        _multiply(draw, phi.t(), du, (32, 64, 32), u.dtype == torch.float32, u=u, along=along)
    if need_dphi and K:
        blocks = 64, _columns(P), 32
        splits = max(1, min(2 * m // (cdiv(K, blocks[0]) * cdiv(P, blocks[1])), M // 256))
        dphis = dphi if splits == 1 else raw.new_empty((splits, K * P))
        _multiply(u.t(), draw, dphis, blocks, phi.dtype == torch.float32, splits)
        if splits > 1:
            sum_rows(dphis, dphi)
    return du, dphi, sums
