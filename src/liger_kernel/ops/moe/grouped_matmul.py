"""Grouped matrix products: rows that are sorted by expert, each times its own expert's matrix.

`grouped_matmul` multiplies rows with the experts' matrices. `grouped_outer_products` sums the outer
products of each expert's rows, for the gradients of the matrices, and `narrow_outer_products` does
so for those of low-rank adapters.

Where the device has TMA, a product reads the matrices by descriptors, and also rows that lie in the
experts' order. Rows of tokens are read where they lie: for rows of a product that costs nothing.
For the outer products, which sum over the rows, they are gathered first, some columns at a time,
unless these columns are few and the architecture is one of `ROWS_IN_PLACE`. Hopper has a kernel of
its own for most of those (`hopper`)."""

from __future__ import annotations

import torch

from liger_kernel.core import devices, tuning
from liger_kernel.core.kernel import kernel, tma_descriptor
from liger_kernel.core.tile import cdiv, load_fp32, next_power_of_2, tl, triton
from liger_kernel.ops.mlp.pointwise import ACTIVATION_FUNCTIONS
from liger_kernel.ops.moe import hopper

# the interpreter's products of bf16 are wrong, those of fp32 are not
UPCAST = tl.constexpr(devices.INTERPRETED)
RANK_MULTIPLE = 16  # of low-rank terms: a matrix unit sums at least so many products
GATHER_BYTES = 3 * 2**26  # of rows that are gathered at a time, or 256 of their columns
# architectures with TMA whose outer products read rows of tokens where they lie, if the sorted rows
# have so many columns at most: more of them share the gathered copy of the tokens' rows
ROWS_IN_PLACE = ("sm_90",)
MAX_COLUMNS_IN_PLACE = 2048
# tiles of rows whose programs are neighbours: they share the weights in the cache
GROUP_M = tl.constexpr(8)


@triton.jit
def _find_tile(tile_ptr, offset_ptr, order_ptr, num_tiles, blocks_n, BLOCK_M: tl.constexpr):
    """Return this program's expert (-1: none), first row, row mask, assignments, block of columns.

    The mask is True for the rows of the tile that are the expert's."""
    pid = tl.program_id(0)
    first_tile = pid // (GROUP_M * blocks_n) * GROUP_M
    group_size = tl.minimum(num_tiles - first_tile, GROUP_M)
    pid_in_group = pid % (GROUP_M * blocks_n)
    tile = first_tile + pid_in_group % group_size
    e = tl.load(tile_ptr + 2 * tile)
    row = tl.load(tile_ptr + 2 * tile + 1)
    r = row + tl.arange(0, BLOCK_M)
    mask = r < tl.load(offset_ptr + tl.maximum(e, 0) + 1, mask=e >= 0, other=0)
    s = tl.load(order_ptr + r, mask=mask, other=0)
    return e.to(tl.int64), row.to(tl.int64), mask, s, pid_in_group // group_size


@triton.jit
def _dot(a, b, c, PRECISION: tl.constexpr):
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


@kernel
def _grouped_matmul(
    a_ptr,
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
    lies in memory as (E, N, K). EVEN_K: K is a multiple of BLOCK_K."""
    e, row, row_mask, s, block = _find_tile(
        tile_ptr, offset_ptr, order_ptr, num_tiles, tl.cdiv(N, BLOCK_N), BLOCK_M
    )
    if e < 0:
        return
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
            c = _dot(t, v, c, PRECISION)
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
        c = _dot(a, b, c, PRECISION)
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


@triton.jit
def _token_pointers(x_ptr, order_ptr, start, end, n, stride_x, TOP_K, BLOCK_K: tl.constexpr):
    """Return pointers to columns n of the tokens of BLOCK_K rows; from ``end`` on, of any token."""
    r = start + tl.arange(0, BLOCK_K)
    t = (tl.load(order_ptr + r, mask=r < end, other=0) // TOP_K).to(tl.int64)
    return x_ptr + t[:, None] * stride_x + n[None, :]


@kernel
def _outer_products(
    a_ptr,
    b_ptr,
    c_ptr,
    order_ptr,
    offset_ptr,
    stride_a,
    stride_b,
    stride_ce,
    stride_cm,
    stride_cn,
    M,
    N,
    TOP_K: tl.constexpr,
    TOKEN_ROWS: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Compute BLOCK_M x BLOCK_N of c_e = Σ_r a_r ⊗ b_r over an expert's rows; 0 if it has none.

    TOKEN_ROWS: which of "a" and "b" has a row for each token, and not for each row r, or "neither".
    It is not "a" with USE_TMA: then a_ptr is a descriptor, and so is b_ptr if it has a row for each
    r."""
    blocks_m = tl.cdiv(M, BLOCK_M)
    blocks_n = tl.cdiv(N, BLOCK_N)
    e = tl.program_id(1).to(tl.int64)
    first_block = tl.program_id(0) // (GROUP_M * blocks_n) * GROUP_M
    group_size = tl.minimum(blocks_m - first_block, GROUP_M)
    pid_in_group = tl.program_id(0) % (GROUP_M * blocks_n)
    first_m = (first_block + pid_in_group % group_size) * BLOCK_M
    first_n = pid_in_group // group_size * BLOCK_N
    # a (BLOCK_K, BLOCK_M), b (BLOCK_K, BLOCK_N), c (BLOCK_M, BLOCK_N)
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    begin = tl.load(offset_ptr + e)
    end = tl.load(offset_ptr + e + 1)
    c = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if USE_TMA:
        GATHER: tl.constexpr = TOKEN_ROWS == "b"
        # of the copies of order, the rows and the product, each is so many steps before the next
        STAGES: tl.constexpr = 2 * NUM_STAGES - 1 if GATHER else NUM_STAGES
        full = begin + (end - begin) // BLOCK_K * BLOCK_K
        for start in tl.range(begin, full, BLOCK_K, num_stages=STAGES):
            a = a_ptr.load([start, first_m])
            if GATHER:
                b_ptrs = _token_pointers(b_ptr, order_ptr, start, full, n, stride_b, TOP_K, BLOCK_K)
                b = tl.load(b_ptrs, mask=(n < N)[None, :], other=0.0)
            else:
                b = b_ptr.load([start, first_n])
            c = _dot(a.T, b, c, PRECISION)
        if full < end:  # the rows that follow are another expert's
            row_mask = (full + tl.arange(0, BLOCK_K) < end)[:, None]
            a = a_ptr.load([full, first_m])
            if GATHER:
                b_ptrs = _token_pointers(b_ptr, order_ptr, full, end, n, stride_b, TOP_K, BLOCK_K)
                b = tl.load(b_ptrs, mask=row_mask & (n < N)[None, :], other=0.0)
            else:
                b = b_ptr.load([full, first_n])
                b = tl.where(row_mask, b, tl.zeros_like(b))
            a = tl.where(row_mask, a, tl.zeros_like(a))
            c = _dot(a.T, b, c, PRECISION)
    else:
        for start in tl.range(begin, end, BLOCK_K, num_stages=NUM_STAGES):
            r = start + tl.arange(0, BLOCK_K)
            row_mask = r < end
            a_row = r.to(tl.int64)
            b_row = (tl.load(order_ptr + r, mask=row_mask, other=0) // TOP_K).to(tl.int64)
            if TOKEN_ROWS == "a":
                a_row, b_row = b_row, a_row
            a_ptrs = a_ptr + a_row[:, None] * stride_a + m[None, :]
            b_ptrs = b_ptr + b_row[:, None] * stride_b + n[None, :]
            a = tl.load(a_ptrs, mask=row_mask[:, None] & (m < M)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=row_mask[:, None] & (n < N)[None, :], other=0.0)
            c = _dot(tl.trans(a), b, c, PRECISION)
    c_ptrs = (
        c_ptr
        + e * stride_ce
        + m.to(tl.int64)[:, None] * stride_cm
        + n.to(tl.int64)[None, :] * stride_cn
    )
    tl.store(c_ptrs, c.to(c_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@kernel
def _gather_rows(x_ptr, rows_ptr, order_ptr, stride_x, TOP_K, N, BLOCK: tl.constexpr):
    """Copy the row of x of row r's token. A row of no expert gets any."""
    r = tl.program_id(0).to(tl.int64)
    t = (tl.maximum(tl.load(order_ptr + r), 0) // TOP_K).to(tl.int64)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        tl.store(rows_ptr + r * N + n, tl.load(x_ptr + t * stride_x + n, mask=n < N), mask=n < N)


def choose_tile_rows(S, E, x):
    """Return the rows of a tile, for S assignments: an expert's last tile is partly empty.

    Of 16, 32, 64 and 128 it is the fastest or within 2 % of it, forward and backward, for 1 to
    8,192 tokens through the experts of Mixtral-8x7B and of Qwen3-30B-A3B (H200, 2026-11-23)."""
    if S <= 8 * E:
        return 16
    if S <= 32 * E or x.dtype == torch.float32:
        return 64
    return 128


def _choose_launch(block_m, N, K, x, num_tiles, max_block_n=256):
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
    """Return (BLOCK_N, BLOCK_K, num_stages, num_warps) of `_choose_launch`.

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
    block_n, blocks = _choose_launch(tile_rows, N, K, a, num_tiles)
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
    b_source = tma_block and tma_descriptor(tma_tensor, (1, *tma_block))
    use_tma = a_source is not None and b_source is not None
    t, v = low_rank or (None, None)
    rank = 0 if t is None else t.shape[1]
    _grouped_matmul[(num_tiles * cdiv(N, block_n),)](
        a_source if use_tma else a,
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
        ACT=ACTIVATION_FUNCTIONS.get(act),
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


def grouped_outer_products(a, b, c, token_rows, top_k, order, offsets):
    """Write c (E, M, N) of any strides: Σ_r a_r ⊗ b_r over each expert's rows.

    ``token_rows``: which of "a" and "b" has a row for each token; the other has one for each r.

    Where a product of rows in order is much faster, rows of tokens are gathered first, some columns
    at a time: with descriptors twice as fast as both operands by pointers (H200, 2026-11-23, Triton
    3.6, (16384, 2048, 768, 128, 8) and three larger ones). `ROWS_IN_PLACE` has the exceptions.

    Of few rows, sums are short, and tiles of half the columns and warps let one program write while
    another one adds up. All of backward for 1, 128, 2,048 tokens of Mixtral-8x7B and 2,048 of
    Qwen3-30B-A3B: 1.62, 2.16, 6.04, 1.52 ms instead of 1.78, 2.39, 6.58, 1.70 (H200, 2026-11-23).
    """
    tokens, sorted_rows = (a, b) if token_rows == "a" else (b, a)
    use_tma = tma_descriptor(sorted_rows, (16, 16)) is not None and tokens.shape[1] % 8 == 0
    in_place = (
        use_tma
        and devices.arch(tokens) in ROWS_IN_PLACE
        and sorted_rows.shape[1] <= MAX_COLUMNS_IN_PLACE
    )
    if token_rows == "a" if in_place else c.stride(2) != 1 and c.stride(1) == 1:
        a, b, c = b, a, c.mT
        token_rows = "b" if token_rows == "a" else "a"
    if in_place and hopper.applies(a, b, c):
        hopper.kernels().outer_products(a, b, c, top_k, order, offsets)
        return
    E, M, N = c.shape
    block_m = min(64 if a.dtype == torch.float32 else 128, max(next_power_of_2(M), 16))
    num_tiles = E * cdiv(M, block_m)
    max_block_n = 128 if use_tma and order.numel() <= 512 * E else 256
    block_n, blocks = _choose_launch(block_m, N, 64, a, num_tiles, max_block_n)
    strips = [(a, b, c)]
    if use_tma and not in_place:
        strips = _gather_strips(tokens, sorted_rows, c, token_rows, top_k, order)
        token_rows = "neither"
    for a, b, c in strips:
        _launch_outer_products(a, b, c, token_rows, top_k, order, offsets, use_tma, block_n, blocks)


def narrow_outer_products(a, b, c, top_k, order, offsets):
    """Write c (E, M, N) = Σ_r a_r ⊗ b_r over each expert's rows, for a small M.

    a has a row for each r, and at least M columns. Of b, row order[r] // top_k is read where it
    lies. To gather its rows first, as `grouped_outer_products` does, would cost more memory traffic
    than the sums."""
    E, M, N = c.shape
    block_m = min(64, max(next_power_of_2(M), 16))
    block_n, blocks = _choose_launch(block_m, N, 64, a, E * cdiv(M, block_m))
    _launch_outer_products(a, b, c, "b", top_k, order, offsets, False, block_n, blocks)


def _launch_outer_products(a, b, c, token_rows, top_k, order, offsets, use_tma, block_n, blocks):
    """Launch `_outer_products`. ``block_n``, ``blocks``: as `_choose_launch` returns them."""
    E, M, N = c.shape
    block_m = blocks["BLOCK_M"]
    block_k = blocks["BLOCK_K"]
    _outer_products[(cdiv(M, block_m) * cdiv(N, block_n), E)](
        tma_descriptor(a, (block_k, block_m)) if use_tma else a,
        tma_descriptor(b, (block_k, block_n)) if use_tma and token_rows == "neither" else b,
        c,
        order,
        offsets,
        a.stride(0),
        b.stride(0),
        *c.stride(),
        M,
        N,
        TOP_K=top_k,  # a constant: the addresses of rows of tokens would wait for divisions
        TOKEN_ROWS=token_rows,
        USE_TMA=use_tma,
        BLOCK_N=block_n,
        **blocks,
    )


def _gather_strips(tokens, sorted_rows, c, token_rows, top_k, order):
    """Gather a row of ``tokens`` for each r, a strip of its columns at a time.

    Yields a, b and c of a strip for `_outer_products`."""
    width = tokens.shape[1]
    S = order.numel()
    num_strips = max(cdiv(S * width * tokens.element_size(), GATHER_BYTES), 1)
    strip = cdiv(width, num_strips * 256) * 256
    for first in range(0, width, strip):
        columns = slice(first, first + strip)
        source = tokens[:, columns]
        gathered = tokens.new_empty((S, source.shape[1]))
        _gather_rows[(S,)](
            source,
            gathered,
            order,
            source.stride(0),
            top_k,
            gathered.shape[1],
            BLOCK=1024,
            num_warps=devices.limit_warps(4, gathered),
        )
        if token_rows == "a":
            yield gathered, sorted_rows, c[:, columns]
        else:
            yield sorted_rows, gathered, c[:, :, columns]
