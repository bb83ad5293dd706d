r"""The kernels that mix K streams of C channels into N others, for `hyper_connections`.

    out_o = Σ_i h[o, i]·x_i + p[o]·f

    dx_i = Σ_o h[o, i]·dout_o,   df = Σ_o p[o]·dout_o
    dh[o, i] = <dout_o, x_i>,   dp[o] = <dout_o, f>

Everything is computed in fp32 and rounded once. In the kernels, m is a row (a token), o an output
stream, i an input stream and c a channel.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import custom_op
from liger_kernel.core.tile import cdiv, load_fp32, next_power_of_2, tl, triton


@kernel
def _fwd(
    x_ptr,
    f_ptr,
    p_ptr,
    h_ptr,
    out_ptr,
    stride_x_m,
    stride_x_i,
    stride_f_m,
    N,
    K,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute BLOCK_C channels of all output streams of a row."""
    m = tl.program_id(0).to(tl.int64)
    # (output streams, channels)
    o = tl.arange(0, BLOCK_N)[:, None]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    out = tl.zeros((BLOCK_N, BLOCK_C), dtype=tl.float32)
    for i in range(K):
        h = load_fp32(h_ptr, (m * N + o) * K + i, o < N)
        x_index = m * stride_x_m + tl.cast(i, tl.int64) * stride_x_i + c
        out += h * load_fp32(x_ptr, x_index, c < C)
    if f_ptr is not None:
        p = load_fp32(p_ptr, m * N + o, o < N)
        out += p * load_fp32(f_ptr, m * stride_f_m + c, c < C)
    out_ptrs = out_ptr + (m * N + o) * C + c
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(o < N) & (c < C))


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
    stride_dout_m,
    stride_dout_o,
    stride_x_m,
    stride_x_i,
    stride_f_m,
    N,
    K,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute all gradients of a row, in one pass over the channels."""
    m = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK_N)[:, None]
    i = tl.arange(0, BLOCK_K).to(tl.int64)[:, None]
    dp = tl.zeros((BLOCK_N, 1), dtype=tl.float32)
    dh = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        # (input streams, channels)
        c = start + tl.arange(0, BLOCK_C)[None, :]
        mask = (i < K) & (c < C)
        x = load_fp32(x_ptr, m * stride_x_m + i * stride_x_i + c, mask)
        dx = tl.zeros((BLOCK_K, BLOCK_C), dtype=tl.float32)
        if f_ptr is not None:
            f = load_fp32(f_ptr, m * stride_f_m + c, c < C)
            df = tl.zeros((1, BLOCK_C), dtype=tl.float32)
        for k in range(N):  # an output stream
            dout_index = m * stride_dout_m + tl.cast(k, tl.int64) * stride_dout_o + c
            dout = load_fp32(dout_ptr, dout_index, c < C)
            if dx_ptr is not None:
                dx += load_fp32(h_ptr, (m * N + k) * K + i, i < K) * dout
            if dh_ptr is not None:
                dh += tl.where(o == k, tl.sum(x * dout, axis=1)[None, :], 0.0)
            if f_ptr is not None:
                df += tl.load(p_ptr + m * N + k).to(tl.float32) * dout
                dp += tl.where(o == k, tl.sum(f * dout, axis=1, keep_dims=True), 0.0)
        if dx_ptr is not None:
            tl.store(dx_ptr + (m * K + i) * C + c, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if df_ptr is not None:
            tl.store(df_ptr + m * C + c, df.to(df_ptr.dtype.element_ty), mask=c < C)
    if dh_ptr is not None:
        j = tl.arange(0, BLOCK_K)[None, :]
        dh_ptrs = dh_ptr + (m * N + o) * K + j
        tl.store(dh_ptrs, dh.to(dh_ptr.dtype.element_ty), mask=(o < N) & (j < K))
    if dp_ptr is not None:
        tl.store(dp_ptr + m * N + o, dp.to(dp_ptr.dtype.element_ty), mask=o < N)


@triton.jit
def _sum_of_lanes(x, LANES: tl.constexpr, CHANNELS_PER_LANE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the sums (output streams, input streams, LANES) of each lane's channels.

    x has the channels as its last axis. If ALIGNED, those of a lane are contiguous.
    """
    if ALIGNED:
        x = tl.reshape(x, (x.shape[0], x.shape[1], LANES, CHANNELS_PER_LANE))
        return tl.sum(x, axis=3)
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], CHANNELS_PER_LANE, LANES)), axis=2)


@kernel
def _bwd_few_streams(
    dout_ptr,
    x_ptr,
    f_ptr,
    p_ptr,
    h_ptr,
    dx_ptr,
    df_ptr,
    dp_ptr,
    dh_ptr,
    stride_dout_m,
    stride_dout_o,
    stride_x_m,
    stride_x_i,
    stride_f_m,
    N,
    K,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    CHANNELS_PER_LANE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute the same as `_bwd`, for few streams.

    Each lane keeps its own sums for dh and dp until the end of the row.
    """
    m = tl.program_id(0).to(tl.int64)
    BLOCK_C: tl.constexpr = LANES * CHANNELS_PER_LANE
    # (output streams, input streams, channels)
    o = tl.arange(0, BLOCK_N)[:, None, None]
    i = tl.arange(0, BLOCK_K)[None, :, None]
    offset = tl.arange(0, BLOCK_C)[None, None, :]
    h = load_fp32(h_ptr, (m * N + o) * K + i, (o < N) & (i < K))
    dh = tl.zeros((BLOCK_N, BLOCK_K, LANES), dtype=tl.float32)
    dp = tl.zeros((BLOCK_N, 1, LANES), dtype=tl.float32)
    if f_ptr is not None:
        p = load_fp32(p_ptr, m * N + o, o < N)
    for start in range(0, C, BLOCK_C):
        c = start + offset
        dout_index = m * stride_dout_m + o.to(tl.int64) * stride_dout_o + c
        dout = load_fp32(dout_ptr, dout_index, (o < N) & (c < C))
        mask = (i < K) & (c < C)
        if dh_ptr is not None:
            x = load_fp32(x_ptr, m * stride_x_m + i.to(tl.int64) * stride_x_i + c, mask)
            dh += _sum_of_lanes(x * dout, LANES, CHANNELS_PER_LANE, ALIGNED)
        if dx_ptr is not None:
            dx = tl.sum(h * dout, axis=0, keep_dims=True)
            tl.store(dx_ptr + (m * K + i) * C + c, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dp_ptr is not None:
            f = load_fp32(f_ptr, m * stride_f_m + c, c < C)
            dp += _sum_of_lanes(f * dout, LANES, CHANNELS_PER_LANE, ALIGNED)
        if df_ptr is not None:
            df = tl.sum(p * dout, axis=0, keep_dims=True)
            tl.store(df_ptr + m * C + c, df.to(df_ptr.dtype.element_ty), mask=c < C)
    # (output streams, input streams)
    o = tl.arange(0, BLOCK_N)[:, None]
    i = tl.arange(0, BLOCK_K)[None, :]
    if dh_ptr is not None:
        dh = tl.sum(dh, axis=2).to(dh_ptr.dtype.element_ty)
        tl.store(dh_ptr + (m * N + o) * K + i, dh, mask=(o < N) & (i < K))
    if dp_ptr is not None:
        tl.store(dp_ptr + m * N + o, tl.sum(dp, axis=2).to(dp_ptr.dtype.element_ty), mask=o < N)


# The launch of `_bwd_few_streams`. post_res backward of 8192x4x4096, bf16, with 1, 2, 4 warps:
# 2.99, 2.97, 2.87 TB/s (H200, 2026-11-23).
MAX_FEW_STREAMS = 16  # output streams times input streams
FEW_STREAMS_WARPS = 1
BYTES_PER_LANE = 16  # what a lane loads of a stream in an iteration


def _few_streams_launch(C, element_size):
    """Return (channels of a lane in an iteration, warps) of `_bwd_few_streams`."""
    channels_per_lane = BYTES_PER_LANE // element_size
    max_warps = max(next_power_of_2(C) // (32 * channels_per_lane), 1)
    return channels_per_lane, min(FEW_STREAMS_WARPS, max_warps)


def _channels_launch(streams, C, entries, entries_per_warp=512):
    """Return (channels, warps) of a block of ``entries`` of that many streams.

    8192x4x4096, bf16, forward with 512 and 1,024 entries of a warp: post_res, which returns four
    streams, 3.37, 3.59 TB/s; pre, which returns one, 3.95, 3.58 (H200, 2026-11-24).
    """
    channels = min(max(entries // streams, 16), next_power_of_2(C))
    return channels, min(max(streams * channels // entries_per_warp, 1), 8)


def _empty_output(x, f, p, h):
    return x.new_empty((x.shape[0], h.shape[1], x.shape[2]))


def _empty_gradients(dout, x, f, p, h, need_dx, need_df, need_dp, need_dh):
    pairs = (x, need_dx), (f, need_df), (p, need_dp), (h, need_dh)
    return tuple(t.new_empty(t.shape) if need else None for t, need in pairs)


@custom_op("mix_streams", _empty_output)
def mix_streams(
    x: torch.Tensor, f: torch.Tensor | None, p: torch.Tensor | None, h: torch.Tensor
) -> torch.Tensor:
    """Mix the streams. Returns (M, N, C) in x's dtype.

    x (M, K, C) and f (M, C) have unit stride in C. p is (M, N) and h (M, N, K).
    """
    out = _empty_output(x, f, p, h)
    M, N, C = out.shape
    streams = next_power_of_2(N)
    channels, warps = _channels_launch(streams, C, 4096, 512 if streams == 1 else 1024)
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
            num_warps=devices.limit_warps(warps, x),
        )
    return out


def _rows_are_aligned(C, *tensors):
    """Return True if every stream of every tensor begins at a multiple of 16 elements."""
    for t in tensors:
        if t is not None and any(n % 16 for n in (C, *t.stride()[:-1])):
            return False
    return True


@custom_op("mix_streams_backward", _empty_gradients)
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
    """Return dx, df, dp, dh from dout (M, N, C) with unit stride in C. None: it is not needed."""
    dx, df, dp, dh = _empty_gradients(dout, x, f, p, h, need_dx, need_df, need_dp, need_dh)
    M, N, C = dout.shape
    if not M:
        return dx, df, dp, dh
    tensors = dout, x, f, p, h, dx, df, dp, dh
    f_stride = 0 if f is None else f.stride(0)
    scalars = *dout.stride()[:2], *x.stride()[:2], f_stride, N, x.shape[1], C
    block_n = next_power_of_2(N)
    block_k = next_power_of_2(x.shape[1])
    if block_n * block_k <= MAX_FEW_STREAMS:
        channels_per_lane, warps = _few_streams_launch(C, x.element_size())
        _bwd_few_streams[(M,)](
            *tensors,
            *scalars,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            LANES=32 * warps,
            CHANNELS_PER_LANE=channels_per_lane,
            ALIGNED=_rows_are_aligned(C, dout, x, f),
            num_warps=devices.limit_warps(warps, x),
        )
    else:
        channels, warps = _channels_launch(block_k, C, 2048)
        _bwd[(M,)](
            *tensors,
            *scalars,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            BLOCK_C=channels,
            num_warps=devices.limit_warps(warps, x),
        )
    return dx, df, dp, dh
