"""Outer products of experts' rows: for the gradients of the experts' matrices, and of adapters.

`grouped_outer_products` sums the outer products of each expert's rows, and `narrow_outer_products`
does so for the matrices of low-rank adapters.

Where the device has TMA, rows that lie in the experts' order are read by descriptors. Rows of
tokens are gathered first, some columns at a time, unless the columns of the others are few and the
architecture is one of `ROWS_IN_PLACE`: then they are read where they lie. Hopper has a kernel of
its own for most of those (`hopper`)."""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel, tma_descriptor
from liger_kernel.core.tile import cdiv, next_power_of_2, tl, triton
from liger_kernel.ops.moe import hopper
from liger_kernel.ops.moe.grouped_matmul import GROUP_M, choose_launch, column_strips, dot

GATHER_BYTES = 3 * 2**26  # of rows that are gathered at a time, or 256 of their columns
# architectures with TMA whose outer products read rows of tokens where they lie, if the sorted rows
# have so many columns at most: more of them share the gathered copy of the tokens' rows
ROWS_IN_PLACE = ("sm_90",)
MAX_COLUMNS_IN_PLACE = 2048


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
            c = dot(a.T, b, c, PRECISION)
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
            c = dot(a.T, b, c, PRECISION)
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
            c = dot(tl.trans(a), b, c, PRECISION)
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
    block_n, blocks = choose_launch(block_m, N, 64, a, num_tiles, max_block_n)
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
    block_n, blocks = choose_launch(block_m, N, 64, a, E * cdiv(M, block_m))
    _launch_outer_products(a, b, c, "b", top_k, order, offsets, False, block_n, blocks)


def _launch_outer_products(a, b, c, token_rows, top_k, order, offsets, use_tma, block_n, blocks):
    """Launch `_outer_products`. ``block_n``, ``blocks``: as `choose_launch` returns them."""
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
    S = order.numel()
    for columns in column_strips(S, tokens.shape[1], tokens, GATHER_BYTES):
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
