r"""Cross entropy of rows of logits: the arithmetic that the operator on logits and the linear head share.

For a row x with target y, class weights w (1 if not given), smoothing ε and λ = lse_square_scale:

    z   = softcap·tanh(logit_scale·x / softcap)        (logit_scale·x without a softcap)
    lse = log Σ_v exp z_v
    CE  = (1-ε)·w_y·(lse - z_y) + ε/V·Σ_v w_v·(lse - z_v)
    Z   = λ·lse²
    loss = (CE/n₀ + Z/n₁)·t

    dz_v = a·(p_v - 1[v=y]) + b·p_v - c·w_v,   p = exp(z - lse)
    a = (1-ε)·w_y·g·t/n₀,   b = ε·W/V·g·t/n₀ + 2λ·lse·g·t/n₁,   c = ε/V·g·t/n₀
    dx   = dz·(1 - (z/softcap)²)·logit_scale

with W = Σ_v w_v and the normalisers n₀ = Σ_valid w_y, n₁ = n of "mean" (1 for "sum" and "none", and where all rows are
ignored). t = p_y, without a gradient of its own, with token scaling (DFT); 1 otherwise. A row is read once for the
loss. lse is kept as its two parts, max z and log Σ exp(z - max z): z - lse is formed as (z - max z) - log Σ, so that a
confident row keeps its digits.

An ignored row gives 0 everywhere. A target out of range gives NaN and reads nothing outside the row.
"""

from __future__ import annotations

import torch

from . import _device
from ._tile import tanh, tanh_slope, tl, triton

INF = tl.constexpr(float("inf"))


@triton.jit
def _normalise(
    target_ptr, weight_ptr, norm_ptr, M, V, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """norm = (n₀, n₁, W, n); one program."""
    i = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), dtype=tl.int64)
    valid_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, M, BLOCK):
        y = tl.load(target_ptr + start + i, mask=start + i < M, other=ignore_index)
        count += (y != ignore_index).to(tl.int64)
        if weight_ptr is not None:
            inside = (y != ignore_index) & (y >= 0) & (y < V)
            valid_weight += tl.load(weight_ptr + y, mask=inside, other=0.0).to(tl.float32)
    n = tl.sum(count).to(tl.float32)
    total = V.to(tl.float32)
    n0 = n
    if weight_ptr is not None:
        n0 = tl.sum(valid_weight)
        all_weight = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            all_weight += tl.load(weight_ptr + start + i, mask=start + i < V, other=0.0).to(tl.float32)
        total = tl.sum(all_weight)
    if MEAN:
        tl.store(norm_ptr, tl.where(n0 == 0.0, 1.0, n0))
        tl.store(norm_ptr + 1, tl.maximum(n, 1.0))
    else:
        tl.store(norm_ptr, 1.0)
        tl.store(norm_ptr + 1, 1.0)
    tl.store(norm_ptr + 2, total)
    tl.store(norm_ptr + 3, n)


@triton.jit
def _logits(x, softcap, logit_scale, SOFTCAP: tl.constexpr):
    z = x.to(tl.float32) * logit_scale
    if SOFTCAP:
        z = softcap * tanh(z / softcap)
    return z


@triton.jit
def _row_gradient(
    x, v, y, w, top, log_sum, a, b, c, softcap, logit_scale, SOFTCAP: tl.constexpr
):  # fmt: skip
    """dx of a block, from the row's coefficients."""
    z = _logits(x, softcap, logit_scale, SOFTCAP)
    p = tl.exp((z - top) - log_sum)
    d = a * (p - (v == y).to(tl.float32)) + (b * p - c * w)
    if SOFTCAP:
        d *= tanh_slope(x.to(tl.float32) * logit_scale / softcap)
    return d * logit_scale


@triton.jit
def _coefficients(g, wy, lse, norm_ptr, V, smoothing, lse_square_scale):
    g0, g1 = g / tl.load(norm_ptr), g / tl.load(norm_ptr + 1)
    b = smoothing * tl.load(norm_ptr + 2) / V * g0 + 2.0 * lse_square_scale * lse * g1
    return (1.0 - smoothing) * wy * g0, b, smoothing / V * g0


@triton.jit
def _loss(
    x_ptr, target_ptr, weight_ptr, norm_ptr, loss_ptr, z_ptr, stats_ptr, token_ptr, best_ptr,
    stride_x, V, ignore_index, smoothing, lse_square_scale, softcap, logit_scale,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, TOKEN_SCALING: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program reads one row, once. With GRADIENT it reads it again and writes dx over it."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride_x
    v = tl.arange(0, BLOCK)
    y = tl.load(target_ptr + row)
    if y == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(stats_ptr + 2 * row, 0.0)
        tl.store(stats_ptr + 2 * row + 1, 0.0)
        if z_ptr is not None:
            tl.store(z_ptr + row, 0.0)
        if token_ptr is not None:
            tl.store(token_ptr + row, 0.0)
        if best_ptr is not None:
            tl.store(best_ptr + row, -1)
        if GRADIENT:
            for start in range(0, V, BLOCK):
                tl.store(x_row + start + v, tl.zeros((BLOCK,), dtype=x_ptr.dtype.element_ty), mask=start + v < V)
        return

    inside = (y >= 0) & (y < V)
    zy = _logits(tl.load(x_row + y, mask=inside, other=float("nan")), softcap, logit_scale, SOFTCAP)
    top = -INF
    total = 0.0
    weighted = 0.0
    best = tl.zeros((), dtype=tl.int64)
    for start in range(0, V, BLOCK):
        mask = start + v < V
        z = _logits(tl.load(x_row + start + v, mask=mask, other=0.0), softcap, logit_scale, SOFTCAP)
        z = tl.where(mask, z, -INF)
        if best_ptr is not None:
            block_top, at = tl.max(z, axis=0, return_indices=True)
            best = tl.where(block_top > top, tl.cast(start + at, tl.int64), best)
        else:
            block_top = tl.max(z, axis=0)
        new = tl.maximum(top, block_top)
        shift = tl.where(new == -INF, 0.0, new)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift))
        top = new
        if SMOOTH:
            w = 1.0
            if weight_ptr is not None:
                w = tl.load(weight_ptr + start + v, mask=mask, other=0.0).to(tl.float32)
            weighted += tl.sum(tl.where(mask, w * z, 0.0))

    log_sum = tl.log(total)
    nll = log_sum + (top - zy)
    lse = log_sum + top
    wy = 1.0
    if weight_ptr is not None:
        wy = tl.load(weight_ptr + y, mask=inside, other=0.0).to(tl.float32)
    ce = wy * nll
    if SMOOTH:
        ce = (1.0 - smoothing) * ce + smoothing / V * (tl.load(norm_ptr + 2) * lse - weighted)
    token = 1.0
    if TOKEN_SCALING:
        token = tl.exp(-nll)
    z_loss = lse_square_scale * lse * lse / tl.load(norm_ptr + 1) * token
    tl.store(loss_ptr + row, ce / tl.load(norm_ptr) * token + z_loss)
    tl.store(stats_ptr + 2 * row, top)
    tl.store(stats_ptr + 2 * row + 1, log_sum)
    if z_ptr is not None:
        tl.store(z_ptr + row, z_loss)
    if token_ptr is not None:
        tl.store(token_ptr + row, token)
    if best_ptr is not None:
        tl.store(best_ptr + row, best)
    if GRADIENT:
        a, b, c = _coefficients(token, wy, lse, norm_ptr, V, smoothing, lse_square_scale)
        for start in range(0, V, BLOCK):
            mask = start + v < V
            x = tl.load(x_row + start + v, mask=mask, other=0.0)
            w = 1.0
            if SMOOTH and weight_ptr is not None:
                w = tl.load(weight_ptr + start + v, mask=mask, other=0.0).to(tl.float32)
            d = _row_gradient(x, start + v, y, w, top, log_sum, a, b, c, softcap, logit_scale, SOFTCAP)
            tl.store(x_row + start + v, d.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gradient(
    g_ptr, x_ptr, target_ptr, weight_ptr, norm_ptr, stats_ptr, dx_ptr, stride_g, stride_x, stride_dx, V, ignore_index,
    smoothing, lse_square_scale, softcap, logit_scale, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one block of one row. dx may be x."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = v < V
    y = tl.load(target_ptr + row)
    if y == ignore_index:
        tl.store(dx_ptr + row * stride_dx + v, tl.zeros((BLOCK,), dtype=dx_ptr.dtype.element_ty), mask=mask)
        return
    x = tl.load(x_ptr + row * stride_x + v, mask=mask, other=0.0)
    top, log_sum = tl.load(stats_ptr + 2 * row), tl.load(stats_ptr + 2 * row + 1)
    wy, w = 1.0, 1.0
    if weight_ptr is not None:
        wy = tl.load(weight_ptr + y, mask=(y >= 0) & (y < V), other=0.0).to(tl.float32)
        if SMOOTH:
            w = tl.load(weight_ptr + v, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row * stride_g).to(tl.float32)
    a, b, c = _coefficients(g, wy, top + log_sum, norm_ptr, V, smoothing, lse_square_scale)
    d = _row_gradient(x, v, y, w, top, log_sum, a, b, c, softcap, logit_scale, SOFTCAP)
    tl.store(dx_ptr + row * stride_dx + v, d.to(dx_ptr.dtype.element_ty), mask=mask)


def _launch(V):
    """(columns, warps) of a program that reads a row.

    H200, 2026-11-20, bf16 loss, TB/s read: 8192x128256 3.71, 8192x256000 3.82, 16384x32000 3.60; blocks of 8192 (8
    warps) 3.57, 3.64, 3.38. Having loads run ahead through shared memory costs 4 %.
    """
    columns = min(triton.next_power_of_2(V), 4096)
    return columns, max(columns // 1024, 1)


def _launch_gradient(V):
    """(columns, warps) of a program that turns one block. The same day, read + written: 3.85, 3.92, 3.84 TB/s."""
    columns = min(triton.next_power_of_2(V), 2048)
    return columns, max(columns // 512, 1)


def normalisers(target, weight, V, ignore_index, mean):
    """-> fp32 (n₀, n₁, W, n) on the device, without asking the host."""
    norm = torch.empty(4, dtype=torch.float32, device=target.device)
    _normalise[(1,)](target, weight, norm, target.numel(), V, ignore_index, MEAN=mean, BLOCK=1024, num_warps=8)
    return norm


def token_loss(
    x, target, weight, norm, ignore_index, smoothing, lse_square_scale, softcap, logit_scale,
    loss, stats, z_loss=None, token=None, best=None, token_scaling=False, gradient=False,
):  # fmt: skip
    """Fill loss (M,), stats (M, 2), and z_loss, token, best where given, for x (M, V); with ``gradient`` dx over x."""
    V = x.shape[1]
    columns, warps = _launch(V)
    _loss[(x.shape[0],)](
        x, target, weight, norm, loss, z_loss, stats, token, best,
        x.stride(0), V, ignore_index, smoothing, lse_square_scale, softcap or 1.0, logit_scale,
        SMOOTH=smoothing != 0, SOFTCAP=softcap is not None, TOKEN_SCALING=token_scaling, GRADIENT=gradient,
        BLOCK=columns, num_warps=_device.warps(warps, x),
    )  # fmt: skip


def token_gradient(
    g, x, target, weight, norm, stats, dx, ignore_index, smoothing, lse_square_scale, softcap, logit_scale
):  # fmt: skip
    """dx (M, V) of loss·g, for g 0-d or (M,) of any stride; dx may be x."""
    M, V = x.shape
    columns, warps = _launch_gradient(V)
    _gradient[(M, triton.cdiv(V, columns))](
        g, x, target, weight, norm, stats, dx, g.stride(0) if g.dim() else 0, x.stride(0), dx.stride(0), V,
        ignore_index, smoothing, lse_square_scale, softcap or 1.0, logit_scale,
        SMOOTH=smoothing != 0, SOFTCAP=softcap is not None, BLOCK=columns, num_warps=_device.warps(warps, x),
    )  # fmt: skip
