r"""A row of K streams of C channels, mixed into N others: the kernels of `hyper_connections`.

    out_o = Σ_i h[o, i]·x_i + p[o]·f

    dx_i = Σ_o h[o, i]·dout_o,   df = Σ_o p[o]·dout_o,   dh[o, i] = <dout_o, x_i>,   dp[o] = <dout_o, f>

Everything is computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import custom_op
from liger_kernel.core.tile import cdiv, next_power_of_2, read, tl


@kernel
def _fwd(
    x_ptr,
    f_ptr,
    p_ptr,
    h_ptr,
    out_ptr,
    x_m,
    x_i,
    f_m,
    N,
    K,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program: BLOCK_C channels of all output streams of a row, ``Σ_i h[o, i]·x_i +
    p[o]·f``."""
    m = tl.program_id(0).to(tl.int64)
    o, c = (
        tl.arange(0, BLOCK_N)[:, None],
        tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :],
    )
    out = tl.zeros((BLOCK_N, BLOCK_C), dtype=tl.float32)
    for i in range(K):
        out += read(h_ptr, (m * N + o) * K + i, o < N) * read(
            x_ptr, m * x_m + tl.cast(i, tl.int64) * x_i + c, c < C
        )
    if f_ptr is not None:
        out += read(p_ptr, m * N + o, o < N) * read(f_ptr, m * f_m + c, c < C)
    tl.store(
        out_ptr + (m * N + o) * C + c, out.to(out_ptr.dtype.element_ty), mask=(o < N) & (c < C)
    )


@kernel
def _bwd(
    dout_ptr,
    x_ptr,
    f_ptr,
    p_ptr,
    h_ptr,
    dx_ptr,
    df_ptr,
    dp_ptr,
    dh_ptr,
    dout_m,
    dout_o,
    x_m,
    x_i,
    f_m,
    N,
    K,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program: all gradients of a row, in one pass over the channels."""
    m = tl.program_id(0).to(tl.int64)
    o, i = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_K).to(tl.int64)[:, None]
    dp = tl.zeros((BLOCK_N, 1), dtype=tl.float32)
    dh = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)[None, :]
        x = read(x_ptr, m * x_m + i * x_i + c, (i < K) & (c < C))
        dx = tl.zeros((BLOCK_K, BLOCK_C), dtype=tl.float32)
        if f_ptr is not None:
            f = read(f_ptr, m * f_m + c, c < C)
            df = tl.zeros((1, BLOCK_C), dtype=tl.float32)
        for k in range(N):
            dout = read(dout_ptr, m * dout_m + tl.cast(k, tl.int64) * dout_o + c, c < C)
            if dx_ptr is not None:
                dx += read(h_ptr, (m * N + k) * K + i, i < K) * dout
            if dh_ptr is not None:
                dh += tl.where(o == k, tl.sum(x * dout, axis=1)[None, :], 0.0)
            if f_ptr is not None:
                df += tl.load(p_ptr + m * N + k).to(tl.float32) * dout
                dp += tl.where(o == k, tl.sum(f * dout, axis=1, keep_dims=True), 0.0)
        if dx_ptr is not None:
            tl.store(
                dx_ptr + (m * K + i) * C + c, dx.to(dx_ptr.dtype.element_ty), mask=(i < K) & (c < C)
            )
        if df_ptr is not None:
            tl.store(df_ptr + m * C + c, df.to(df_ptr.dtype.element_ty), mask=c < C)
    if dh_ptr is not None:
        j = tl.arange(0, BLOCK_K)[None, :]
        tl.store(
            dh_ptr + (m * N + o) * K + j, dh.to(dh_ptr.dtype.element_ty), mask=(o < N) & (j < K)
        )
    if dp_ptr is not None:
        tl.store(dp_ptr + m * N + o, dp.to(dp_ptr.dtype.element_ty), mask=o < N)


@kernel
def _bwd_few(
    dout_ptr,
    x_ptr,
    f_ptr,
    p_ptr,
    h_ptr,
    dx_ptr,
    df_ptr,
    dp_ptr,
    dh_ptr,
    dout_m,
    dout_o,
    x_m,
    x_i,
    f_m,
    N,
    K,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """As `_bwd`, for few streams: each lane keeps its own sums for dh and dp until the end of the
    row."""
    m = tl.program_id(0).to(tl.int64)
    o, i = tl.arange(0, BLOCK_N)[:, None, None, None], tl.arange(0, BLOCK_K)[None, :, None, None]
    lane, each = tl.arange(0, LANES)[None, None, :, None], tl.arange(0, EACH)[None, None, None, :]
    at = lane * EACH + each if ALIGNED else each * LANES + lane
    h = read(h_ptr, (m * N + o) * K + i, (o < N) & (i < K))
    dh = tl.zeros((BLOCK_N, BLOCK_K, LANES), dtype=tl.float32)
    dp = tl.zeros((BLOCK_N, 1, LANES), dtype=tl.float32)
    if f_ptr is not None:
        p = read(p_ptr, m * N + o, o < N)
    for start in range(0, C, LANES * EACH):
        c = start + at
        dout = read(dout_ptr, m * dout_m + o.to(tl.int64) * dout_o + c, (o < N) & (c < C))
        if dh_ptr is not None:
            x = read(x_ptr, m * x_m + i.to(tl.int64) * x_i + c, (i < K) & (c < C))
            dh += tl.sum(x * dout, axis=3)
        if dx_ptr is not None:
            dx = tl.sum(h * dout, axis=0, keep_dims=True)
            tl.store(
                dx_ptr + (m * K + i) * C + c, dx.to(dx_ptr.dtype.element_ty), mask=(i < K) & (c < C)
            )
        if dp_ptr is not None:
            dp += tl.sum(read(f_ptr, m * f_m + c, c < C) * dout, axis=3)
        if df_ptr is not None:
            df = tl.sum(p * dout, axis=0, keep_dims=True)
            tl.store(df_ptr + m * C + c, df.to(df_ptr.dtype.element_ty), mask=c < C)
    o, i = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_K)[None, :]
    if dh_ptr is not None:
        dh = tl.sum(dh, axis=2).to(dh_ptr.dtype.element_ty)
        tl.store(dh_ptr + (m * N + o) * K + i, dh, mask=(o < N) & (i < K))
    if dp_ptr is not None:
        tl.store(dp_ptr + m * N + o, tl.sum(dp, axis=2).to(dp_ptr.dtype.element_ty), mask=o < N)


def _launch_few():
    """(channels that a lane reads in an iteration, in loads of 16 bytes; warps).

    post_res backward of 8192x4x4096, bf16, with 1, 2, 4 warps: 2.99, 2.97, 2.87 TB/s (H200,
    2026-11-23)."""
    return 1, 1


def _channels(streams, C, entries, of_warp=512):
    """(channels, warps) of a block of ``entries`` of that many streams, of which a warp has
    ``of_warp``.

    8192x4x4096, bf16, forward with 512 and 1,024 of a warp: post_res, which gives four streams,
    3.37, 3.59 TB/s; pre, which gives one, 3.95, 3.58 (H200, 2026-11-24)."""
    channels = min(max(entries // streams, 16), next_power_of_2(C))
    return channels, min(max(streams * channels // of_warp, 1), 8)


def _output(x, f, p, h):
    return x.new_empty((x.shape[0], h.shape[1], x.shape[2]))


def _gradients(dout, x, f, p, h, need_dx, need_df, need_dp, need_dh):
    pairs = (x, need_dx), (f, need_df), (p, need_dp), (h, need_dh)
    return tuple(t.new_empty(t.shape) if need else None for t, need in pairs)


@custom_op("mix_streams", _output)
def mix_streams(
    x: torch.Tensor, f: torch.Tensor | None, p: torch.Tensor | None, h: torch.Tensor
) -> torch.Tensor:
    """x (M, K, C) and f (M, C) with unit stride in C, p (M, N), h (M, N, K) -> (M, N, C) in x's
    dtype."""
    out = _output(x, f, p, h)
    M, N, C = out.shape
    streams = next_power_of_2(N)
    channels, warps = _channels(streams, C, 4096, 512 if streams == 1 else 1024)
    if out.numel():
        _fwd[(M, cdiv(C, channels))](
            x,
            f,
            p,
            h,
            out,
            *x.stride()[:2],
            0 if f is None else f.stride(0),
            N,
            x.shape[1],
            C,
            BLOCK_N=streams,
            BLOCK_C=channels,
            num_warps=devices.warps(warps, x),
        )
    return out


@custom_op("mix_streams_backward", _gradients)
def mix_streams_bwd(
    dout: torch.Tensor,
    x: torch.Tensor,
    f: torch.Tensor | None,
    p: torch.Tensor | None,
    h: torch.Tensor,
    need_dx: bool,
    need_df: bool,
    need_dp: bool,
    need_dh: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dout (M, N, C) with unit stride in C -> dx, df, dp, dh. What is not needed is None."""
    dx, df, dp, dh = _gradients(dout, x, f, p, h, need_dx, need_df, need_dp, need_dh)
    M, N, C = dout.shape
    outputs, inputs = next_power_of_2(N), next_power_of_2(x.shape[1])
    if M and outputs * inputs <= 16:
        (loads, warps), size = _launch_few(), x.element_size()
        each = 16 // size * loads
        warps = min(warps, max(next_power_of_2(C) // (32 * each), 1))
        aligned = all(
            n % 16 == 0
            for t in (dout, x, *(() if f is None else (f,)))
            for n in (C, *t.stride()[:-1])
        )
        _bwd_few[(M,)](
            dout,
            x,
            f,
            p,
            h,
            dx,
            df,
            dp,
            dh,
            *dout.stride()[:2],
            *x.stride()[:2],
            0 if f is None else f.stride(0),
            N,
            x.shape[1],
            C,
            BLOCK_N=outputs,
            BLOCK_K=inputs,
            LANES=32 * warps,
            EACH=each,
            ALIGNED=aligned,
            num_warps=devices.warps(warps, x),
        )
        return dx, df, dp, dh
    channels, warps = _channels(inputs, C, 2048)
    if M:
        _bwd[(M,)](
            dout,
            x,
            f,
            p,
            h,
            dx,
            df,
            dp,
            dh,
            *dout.stride()[:2],
            *x.stride()[:2],
            0 if f is None else f.stride(0),
            N,
            x.shape[1],
            C,
            BLOCK_N=outputs,
            BLOCK_K=inputs,
            BLOCK_C=channels,
            num_warps=devices.warps(warps, x),
        )
    return dx, df, dp, dh
