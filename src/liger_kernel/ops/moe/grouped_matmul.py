"""Grouped matrix products: rows that are sorted by expert, each times its own expert's matrix.

Where the device has TMA, a product reads the matrices by descriptors, and also rows that lie in the
experts' order. Rows of tokens are read where they lie, which costs nothing here."""

from __future__ import annotations

import torch

from liger_kernel.core import devices, tuning
from liger_kernel.core.kernel import kernel, tma_descriptor
from liger_kernel.core.tile import cdiv, load_fp32, next_power_of_2, tl, triton
from liger_kernel.ops.mlp.pointwise import activation_function

# the interpreter's products of bf16 are wrong, those of fp32 are not
UPCAST = tl.constexpr(devices.INTERPRETED)
RANK_MULTIPLE = 16  # of low-rank terms: a matrix unit sums at least so many products
# architectures where an expert's last tile has half of the rows, if that is enough. All kernels of
# a layer of Qwen3-30B-A3B: 16,384 tokens 6.88 instead of 6.97 ms, 4,096 tokens 2.29 instead of 2.34
# (H200, 2026-11-28, Triton 3.6)
HALF_TILES = ("sm_90",)
MIN_HALVED_TILE = 128  # rows of a tile from which on that may be
# tiles of rows whose programs are neighbours: they share the weights in the cache
GROUP_M = tl.constexpr(8)


@triton.jit
def _find_tile(tile_ptr, offset_ptr, num_tiles, blocks_n):
    """Return this program's expert (-1: none), first row, end of the expert, block of columns."""
    pid = tl.program_id(0)
    first_tile = pid // (GROUP_M * blocks_n) * GROUP_M
    group_size = tl.minimum(num_tiles - first_tile, GROUP_M)
    pid_in_group = pid % (GROUP_M * blocks_n)
    tile = first_tile + pid_in_group % group_size
    e = tl.load(tile_ptr + 2 * tile)
    row = tl.load(tile_ptr + 2 * tile + 1)
    end = tl.load(offset_ptr + tl.maximum(e, 0) + 1, mask=e >= 0, other=0)
    return e.to(tl.int64), row, end, pid_in_group // group_size


@triton.jit
def dot(a, b, c, PRECISION: tl.constexpr):
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def gate(g, u, limit, alpha, shift, ACT: tl.constexpr):
    """Return act(g), act'(g), and u clamped to the limit and shifted. An alpha of None is 1."""
    if limit is not None:
        g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.clamp(u, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + shift
    if alpha is None:
        act, slope = ACT(g)
    else:
        act, slope = ACT(g * alpha)
        act = act * (1.0 / alpha)
    return act, slope, u


@triton.jit
def _multiply_tile(
    a_ptr,
    b_ptr,
    bias_ptr,
    c_ptr,
    z_ptr,
    t_ptr,
    v_ptr,
    order_ptr,
    e,
    row,
    end,
    block,
    stride_a,
    stride_be,
    stride_bk,
    stride_bn,
    TOP_K,
    K,
    N,
    limit,
    alpha,
    shift,
    GATHER: tl.constexpr,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    USE_TMA: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Compute a tile of `_grouped_matmul`: BLOCK_M rows of expert e, of which those before ``end``
    are stored."""
    # a (BLOCK_M, BLOCK_K), b (BLOCK_K, BLOCK_N), c (BLOCK_M, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    i = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    HALVES: tl.constexpr = ACT is not None and not INTERLEAVED
    HALF: tl.constexpr = BLOCK_N // 2
    first = block * BLOCK_N
    n = first + j
    col_mask = n < N
    if HALVES:
        first = block * HALF
        n = first + j % HALF + j // HALF * (N // 2)
        col_mask = first + j % HALF < N // 2
    row_mask = row + i < end
    s = tl.load(order_ptr + row + i, mask=row_mask, other=0)
    a_row = row + i
    if GATHER:
        a_row = (s // TOP_K).to(tl.int64)
    if GATHER or not USE_TMA:
        a_ptrs = a_ptr + a_row[:, None] * stride_a + k[None, :]
    if not USE_TMA:
        b_ptrs = (
            b_ptr
            + e * stride_be
            + k.to(tl.int64)[:, None] * stride_bk
            + n.to(tl.int64)[None, :] * stride_bn
        )
    c = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if bias_ptr is not None:  # added at the end, it would need more registers
        c += load_fp32(bias_ptr, e * N + n, col_mask)[None, :]
    if t_ptr is not None:
        # t (BLOCK_M, BLOCK_R), v (BLOCK_R, BLOCK_N)
        rank = tl.arange(0, BLOCK_R)
        t_ptrs = t_ptr + row * RANK + i[:, None] * RANK + rank[None, :]
        v_ptrs = v_ptr + e * RANK * N + rank.to(tl.int64)[:, None] * N + n[None, :]
        for _ in tl.range(0, RANK, BLOCK_R, num_stages=1):
            t = tl.load(t_ptrs, mask=row_mask[:, None], other=0.0)
            v = tl.load(v_ptrs, mask=col_mask[None, :], other=0.0)
            c = dot(t, v, c, PRECISION)
            t_ptrs += BLOCK_R
            v_ptrs += BLOCK_R * N
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        if USE_TMA and not GATHER:
            a = a_ptr.load([row.to(tl.int32), start])
        else:
            a_mask = row_mask[:, None]
            if not EVEN_K:
                a_mask = a_mask & (start + k[None, :] < K)
            a = tl.load(a_ptrs, mask=a_mask, other=0.0)
            a_ptrs += BLOCK_K
        if not USE_TMA:
            b_mask = col_mask[None, :]
            if not EVEN_K:
                b_mask = b_mask & (start + k[:, None] < K)
            b = tl.load(b_ptrs, mask=b_mask, other=0.0)
            b_ptrs += BLOCK_K * stride_bk
        elif HALVES:
            b = b_ptr.load([e.to(tl.int32), 0, first, start]).reshape(BLOCK_N, BLOCK_K).T
        elif K_CONTIGUOUS:
            b = b_ptr.load([e.to(tl.int32), first, start]).reshape(BLOCK_N, BLOCK_K).T
        else:
            b = b_ptr.load([e.to(tl.int32), start, first]).reshape(BLOCK_K, BLOCK_N)
        c = dot(a, b, c, PRECISION)
    if ACT is None:
        c_row = row + i
        if not GATHER:
            c_row = s.to(tl.int64)
        c_ptrs = c_ptr + c_row[:, None] * N + n[None, :]
        tl.store(c_ptrs, c.to(c_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])
    else:
        if c_ptr is not None:
            c_ptrs = c_ptr + row * N + i[:, None] * N + n[None, :]
            tl.store(
                c_ptrs, c.to(c_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :]
            )
        # g, u, z (BLOCK_M, HALF)
        if INTERLEAVED:
            g, u = tl.split(tl.reshape(c, (BLOCK_M, HALF, 2)))
        else:
            g, u = tl.split(tl.permute(tl.reshape(c, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        act, _, u = gate(g, u, limit, alpha, shift, ACT)
        f = block * HALF + tl.arange(0, HALF)
        z_ptrs = z_ptr + row * (N // 2) + i[:, None] * (N // 2) + f[None, :]
        z_mask = row_mask[:, None] & (f < N // 2)[None, :]
        tl.store(z_ptrs, (act * u).to(z_ptr.dtype.element_ty), mask=z_mask)


@kernel
def _grouped_matmul(
    a_ptr,
    half_ptr,
    b_ptr,
    bias_ptr,
    c_ptr,
    z_ptr,
    t_ptr,
    v_ptr,
    order_ptr,
    offset_ptr,
    tile_ptr,
    stride_a,
    stride_be,
    stride_bk,
    stride_bn,
    TOP_K,
    K,
    N,
    num_tiles,
    limit,
    alpha,
    shift,
    GATHER: tl.constexpr,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    USE_TMA: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Compute BLOCK_N of the N columns of c = a·b_e + bias_e, for a tile of BLOCK_M rows.

    GATHER: a has a row for each token, and c one for each row r. Otherwise a has a row for each r,
    and c one for each assignment.

    With an activation ACT, the columns are half of g and half of u, and z = act(g)·u is written as
    well; c only where there is a c_ptr.

    With t_ptr, t·v_e is added to c. t (S, RANK) has a row for each r, v is (E, RANK, N), and both
    are contiguous. RANK is a multiple of BLOCK_R.

    USE_TMA: b_ptr is a descriptor, and so is a_ptr unless its rows are gathered. K_CONTIGUOUS: b
    lies in memory as (E, N, K). EVEN_K: K is a multiple of BLOCK_K.

    half_ptr: a_ptr for tiles of half as many rows, or None. An expert's last tile is one of those
    where that is enough."""
    e, row, end, block = _find_tile(tile_ptr, offset_ptr, num_tiles, tl.cdiv(N, BLOCK_N))
    if e < 0:
        return
    row = row.to(tl.int64)
    is_half = False if half_ptr is None else row + BLOCK_M // 2 >= end
    # the whole and the half tile: both are compiled, one runs
    for HALF in tl.static_range(1 if half_ptr is None else 2):
        if is_half == HALF:
            _multiply_tile(
                half_ptr if HALF else a_ptr,
                b_ptr,
                bias_ptr,
                c_ptr,
                z_ptr,
                t_ptr,
                v_ptr,
                order_ptr,
                e,
                row,
                end,
                block,
                stride_a,
                stride_be,
                stride_bk,
                stride_bn,
                TOP_K,
                K,
                N,
                limit,
                alpha,
                shift,
                GATHER,
                ACT,
                INTERLEAVED,
                USE_TMA,
                K_CONTIGUOUS,
                BLOCK_M >> HALF,
                BLOCK_N,
                BLOCK_K,
                EVEN_K,
                RANK,
                BLOCK_R,
                PRECISION,
                NUM_STAGES,
            )


def choose_tile_rows(S, E, x):
    """Return the rows of a tile, for S assignments: an expert's last tile is partly empty.

    Of 16, 32, 64 and 128 it is the fastest or within 2 % of it, forward and backward, for 1 to
    8,192 tokens through the experts of Mixtral-8x7B and of Qwen3-30B-A3B (H200, 2026-11-23)."""
    if S <= 8 * E:
        return 16
    if S <= 32 * E or x.dtype == torch.float32:
        return 64
    return 128


def choose_launch(block_m, N, K, x, num_tiles, max_block_n=256):
    """Return BLOCK_N, and the other constants of a launch as a dict.

    The product has tiles of block_m rows, N columns, and sums of K terms. ``max_block_n`` counts
    where the device has TMA."""
    block_n, block_k, num_stages, num_warps = _choose_tile(x, block_m, N, K, num_tiles, max_block_n)
    exact = devices.AMD or torch.get_float32_matmul_precision() == "highest"
    return block_n, dict(
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        PRECISION="ieee" if exact else "tf32",
        NUM_STAGES=num_stages,
        num_warps=devices.limit_warps(num_warps, x),
    )


def _tile_candidates(x, numbers, block_m, N, K, num_tiles, max_block_n):
    device = tuning.device_traits(x)
    widest = max(next_power_of_2(N), 16)
    deepest = max(next_power_of_2(K), 16)
    places = {
        0: (32, 64, 128, 256),
        1: (16, 32, 64),
        2: (2, 3, 4) if device.prefetches else (1, 2),
        3: (4, 8),
    }

    def fits(block_n, block_k, num_stages, num_warps):
        if block_n > widest or block_k > deepest or block_m * block_n > 4096 * num_warps:
            return False
        stage_bytes = (block_m + block_n) * block_k * x.element_size()
        return max(num_stages, 2) * stage_bytes + 2048 <= device.shared_memory

    return tuning.neighbors(numbers, places, fits)


@tuning.tunable("experts", _tile_candidates)
def _choose_tile(x, block_m, N, K, num_tiles, max_block_n):
    """Return (BLOCK_N, BLOCK_K, num_stages, num_warps) of `choose_launch`.

    A thread has at most 128 entries of c. fp32 has no matrix unit, unless torch may use tf32: its
    operands lie in registers, too. Nothing is spilled on sm_80 and sm_90, and the programs of few
    tokens are enough for the device.

    Of nine launches by descriptors 128x256x64 with 3 stages was among the fastest, mostly within 5
    % of the best, for each product of 16,384 tokens through the experts of Mixtral-8x7B,
    Qwen3-30B-A3B, DeepSeek-V3 and gpt-oss-20b, which ran at 0.8 to 1.1 of the rate of an 8192³
    product; with pointers those of tokens at 0.4 to 0.9 (H200, 2026-11-23, Triton 3.6)."""
    is_fp32 = x.dtype == torch.float32
    has_tma = devices.has_tma(x)
    if is_fp32:
        block_n, block_k = 64, 16
    else:
        block_n, block_k = max_block_n if has_tma else 128, 64
    if devices.choose_num_stages((block_m + block_n) * block_k * x.element_size(), x) == 1:
        block_n = min(block_n, 128)
    block_n = min(block_n, max(next_power_of_2(N), 16))
    block_k = min(block_k, max(next_power_of_2(K), 16))
    while block_n > 32 and num_tiles * cdiv(N, block_n) < 2 * devices.multiprocessors(x):
        block_n //= 2
    is_large = block_m >= 128 and block_n >= 128
    num_warps = 8 if is_large and not (has_tma and max_block_n == 128) else 4
    stage_bytes = (block_m + block_n) * block_k * x.element_size()
    num_stages = devices.choose_num_stages(stage_bytes, x)
    if num_stages == 1:
        num_stages = tuning.device_traits(x).matmul_num_stages(stage_bytes)
    return block_n, block_k, num_stages, num_warps


def column_strips(S, N, x, max_bytes):
    """Yield slices of N columns, such that S rows of a slice, in x's dtype, take ``max_bytes``, or
    up to 255 columns more: a slice has a multiple of 256, unless it is the last one."""
    num_strips = max(cdiv(S * N * x.element_size(), max_bytes), 1)
    width = cdiv(max(N, 1), num_strips * 256) * 256
    for first in range(0, N, width):
        yield slice(first, first + width)


def halves_tiles(a, tile_rows) -> bool:
    """Return True if an expert's last tile may have half of ``tile_rows`` rows."""
    return tile_rows >= MIN_HALVED_TILE and devices.arch(a) in HALF_TILES


def grouped_matmul(
    a,
    b,
    bias,
    c,
    gather,
    top_k,
    order,
    offsets,
    tiles,
    tile_rows,
    z=None,
    act=None,
    limit=None,
    alpha=None,
    shift=None,
    interleaved=False,
    low_rank=None,
):
    """Write c = a·b_e + bias_e, with b (E, K, N) of any strides. ``gather``: see `_grouped_matmul`.

    order, offsets and tiles are from `routing`, for tiles of ``tile_rows`` rows. With an activation
    act, z = act(g)·u is written as well. g and u are the halves of a row of c, or with
    ``interleaved`` its even and odd entries; for limit, alpha and shift see `gate`.

    ``low_rank``: t (S, R), which has a row for each r, and v (E, R, N), both contiguous and in a's
    dtype, R a multiple of `RANK_MULTIPLE`. t·v_e is added to c."""
    _, K, N = b.shape
    num_tiles = tiles.shape[0]
    block_n, blocks = choose_launch(tile_rows, N, K, a, num_tiles)
    block_k = blocks["BLOCK_K"]
    k_contiguous = b.stride(1) == 1
    if k_contiguous:
        tma_tensor, tma_block = b.mT, (block_n, block_k)
    else:
        tma_tensor, tma_block = b, (block_k, block_n)
    if act is not None and not interleaved:
        # half of the block's columns is of g, half of u: b as (E, 2, N // 2, K)
        tma_tensor = tma_tensor.unflatten(1 if k_contiguous else 2, (2, N // 2))
        tma_block = (2, block_n // 2, block_k) if k_contiguous else None
    a_source = a if gather else tma_descriptor(a, (tile_rows, block_k))
    half_source = None
    if halves_tiles(a, tile_rows):
        half_source = a if gather else tma_descriptor(a, (tile_rows // 2, block_k))
    b_source = tma_block and tma_descriptor(tma_tensor, (1, *tma_block))
    use_tma = a_source is not None and b_source is not None
    t, v = low_rank or (None, None)
    rank = 0 if t is None else t.shape[1]
    _grouped_matmul[(num_tiles * cdiv(N, block_n),)](
        a_source if use_tma else a,
        half_source if use_tma else None,
        b_source if use_tma else b,
        bias,
        c,
        z,
        t,
        v,
        order,
        offsets,
        tiles,
        a.stride(0),
        *b.stride(),
        top_k,
        K,
        N,
        num_tiles,
        limit,
        alpha,
        shift,
        GATHER=gather,
        ACT=None if act is None else activation_function(act, a),
        INTERLEAVED=interleaved,
        USE_TMA=use_tma,
        K_CONTIGUOUS=k_contiguous,
        BLOCK_N=block_n,
        EVEN_K=K % block_k == 0,
        RANK=rank,
        # a power of two that divides the rank; 32 take up to 24 KiB of shared memory
        BLOCK_R=min(rank & -rank, 32),
        **blocks,
    )
