"""Products of rows that are grouped by expert: each row with its own expert's matrix, and each
expert's outer products.

Where the device copies tiles by descriptors, a product reads its tables by these, and rows that lie
in the experts' order. Rows of tokens are read where they lie: of a product's rows that costs
nothing. For the outer products, which sum over them, they are gathered first, some columns at a
time."""

from __future__ import annotations

import torch

from liger_kernel.core import devices, tuning
from liger_kernel.core.kernel import descriptor, kernel
from liger_kernel.core.tile import cdiv, next_power_of_2, read, tl, triton
from liger_kernel.ops.mlp.pointwise import ACTS

WIDE = tl.constexpr(devices.INTERPRETED)  # its products of bf16 are wrong, those of fp32 are not
NO_GATE = None, None, None, None, False
GATHERED = 3 * 2**26  # bytes of rows that are gathered for a product, or 256 of their columns
TOGETHER = tl.constexpr(
    8
)  # tiles of rows whose programs are neighbours: they share the weights in the cache


@triton.jit
def _place(tile_ptr, offset_ptr, order_ptr, tiles, blocks, BLOCK_M: tl.constexpr):
    """-> this program's expert (-1: none), its first row, which of its rows are the expert's, their
    assignments, its block of columns."""
    pid = tl.program_id(0)
    first = pid // (TOGETHER * blocks) * TOGETHER
    size = tl.minimum(tiles - first, TOGETHER)
    inside = pid % (TOGETHER * blocks)
    tile = first + inside % size
    e = tl.load(tile_ptr + 2 * tile)
    row = tl.load(tile_ptr + 2 * tile + 1)
    r = row + tl.arange(0, BLOCK_M)
    known = r < tl.load(offset_ptr + tl.maximum(e, 0) + 1, mask=e >= 0, other=0)
    s = tl.load(order_ptr + r, mask=known, other=0)
    return e.to(tl.int64), row.to(tl.int64), known, s, inside // size


@triton.jit
def _dot(a, b, c, PRECISION: tl.constexpr):
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def gate(g, u, limit, alpha, shift, ACT: tl.constexpr):
    """-> act(g), act'(g), and u within the limit, moved. An alpha of None is 1."""
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
def _product(
    a_ptr,
    b_ptr,
    bias_ptr,
    c_ptr,
    z_ptr,
    order_ptr,
    offset_ptr,
    tile_ptr,
    stride_a,
    b_e,
    b_k,
    b_n,
    TOP,
    K,
    N,
    tiles,
    limit,
    alpha,
    shift,
    OF_TOKENS: tl.constexpr,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BULK: tl.constexpr,
    K_LAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: BLOCK_N of the N columns of c = a·b_e + bias_e.

    OF_TOKENS: a has a row for each token, and c one for each row r; otherwise a one for each r, c
    for each assignment. With an activation, the columns are half of g and half of u, and z is
    written, too; c only where there is a c_ptr. BULK: b_ptr is a descriptor, and a_ptr unless its
    rows are gathered; K_LAST: b lies in memory as (E, N, K). EVEN: K is a multiple of BLOCK_K."""
    e, row, known, s, block = _place(
        tile_ptr, offset_ptr, order_ptr, tiles, tl.cdiv(N, BLOCK_N), BLOCK_M
    )
    if e < 0:
        return
    k, i, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    HALVES: tl.constexpr = ACT is not None and not INTERLEAVED
    HALF: tl.constexpr = BLOCK_N // 2
    first = block * BLOCK_N
    n = first + j
    inside = n < N
    if HALVES:
        first = block * HALF
        n = first + j % HALF + j // HALF * (N // 2)
        inside = first + j % HALF < N // 2
    a_row = row + i
    if OF_TOKENS:
        a_row = (s // TOP).to(tl.int64)
    if OF_TOKENS or not BULK:
        a_at = a_ptr + a_row[:, None] * stride_a + k[None, :]
    if not BULK:
        b_at = b_ptr + e * b_e + k.to(tl.int64)[:, None] * b_k + n.to(tl.int64)[None, :] * b_n
    c = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if bias_ptr is not None:  # added at the end, it would need more registers
        c += read(bias_ptr, e * N + n, inside)[None, :]
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if BULK and not OF_TOKENS:
            a = a_ptr.load([row.to(tl.int32), start])
        else:
            a_mask = known[:, None]
            if not EVEN:
                a_mask = a_mask & (start + k[None, :] < K)
            a = tl.load(a_at, mask=a_mask, other=0.0)
            a_at += BLOCK_K
        if not BULK:
            b_mask = inside[None, :]
            if not EVEN:
                b_mask = b_mask & (start + k[:, None] < K)
            b = tl.load(b_at, mask=b_mask, other=0.0)
            b_at += BLOCK_K * b_k
        elif HALVES:
            b = b_ptr.load([e.to(tl.int32), 0, first, start]).reshape(BLOCK_N, BLOCK_K).T
        elif K_LAST:
            b = b_ptr.load([e.to(tl.int32), first, start]).reshape(BLOCK_N, BLOCK_K).T
        else:
            b = b_ptr.load([e.to(tl.int32), start, first]).reshape(BLOCK_K, BLOCK_N)
        c = _dot(a, b, c, PRECISION)
    if ACT is None:
        c_row = row + i
        if not OF_TOKENS:
            c_row = s.to(tl.int64)
        at = c_ptr + c_row[:, None] * N + n[None, :]
        tl.store(at, c.to(c_ptr.dtype.element_ty), mask=known[:, None] & inside[None, :])
    else:
        if c_ptr is not None:
            at = c_ptr + row * N + i[:, None] * N + n[None, :]
            tl.store(at, c.to(c_ptr.dtype.element_ty), mask=known[:, None] & inside[None, :])
        if INTERLEAVED:
            g, u = tl.split(tl.reshape(c, (BLOCK_M, HALF, 2)))
        else:
            g, u = tl.split(tl.permute(tl.reshape(c, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        act, _, u = gate(g, u, limit, alpha, shift, ACT)
        f = block * HALF + tl.arange(0, HALF)
        at = z_ptr + row * (N // 2) + i[:, None] * (N // 2) + f[None, :]
        tl.store(
            at, (act * u).to(z_ptr.dtype.element_ty), mask=known[:, None] & (f < N // 2)[None, :]
        )


@kernel
def _outer(
    a_ptr,
    b_ptr,
    c_ptr,
    order_ptr,
    offset_ptr,
    stride_a,
    stride_b,
    c_e,
    c_m,
    c_n,
    M,
    N,
    TOP,
    OF_TOKENS: tl.constexpr,
    BULK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: BLOCK_M x BLOCK_N of c_e = Σ_r a_r ⊗ b_r, over an expert's rows; 0 if it has
    none.

    OF_TOKENS: which of "a" and "b" has a row for each token, and not for each row r. BULK: a_ptr
    and b_ptr are descriptors, of a row for each r."""
    blocks_m, blocks_n, e = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.program_id(1).to(tl.int64)
    together = tl.program_id(0) // (TOGETHER * blocks_n) * TOGETHER
    size, inside = (
        tl.minimum(blocks_m - together, TOGETHER),
        tl.program_id(0) % (TOGETHER * blocks_n),
    )
    first_m, first_n = (together + inside % size) * BLOCK_M, inside // size * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    begin, end = tl.load(offset_ptr + e), tl.load(offset_ptr + e + 1)
    c = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if BULK:
        full = begin + (end - begin) // BLOCK_K * BLOCK_K
        for start in tl.range(begin, full, BLOCK_K, num_stages=STAGES):
            c = _dot(a_ptr.load([start, first_m]).T, b_ptr.load([start, first_n]), c, PRECISION)
        if full < end:  # what follows is another expert's
            known = (full + tl.arange(0, BLOCK_K) < end)[:, None]
            a, b = a_ptr.load([full, first_m]), b_ptr.load([full, first_n])
            a, b = tl.where(known, a, tl.zeros_like(a)), tl.where(known, b, tl.zeros_like(b))
            c = _dot(a.T, b, c, PRECISION)
    else:
        for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            r = start + tl.arange(0, BLOCK_K)
            known = r < end
            a_row = r.to(tl.int64)
            b_row = (tl.load(order_ptr + r, mask=known, other=0) // TOP).to(tl.int64)
            if OF_TOKENS == "a":
                a_row, b_row = b_row, a_row
            a_at, b_at = (
                a_ptr + a_row[:, None] * stride_a + m[None, :],
                b_ptr + b_row[:, None] * stride_b + n[None, :],
            )
            a = tl.load(a_at, mask=known[:, None] & (m < M)[None, :], other=0.0)
            b = tl.load(b_at, mask=known[:, None] & (n < N)[None, :], other=0.0)
            c = _dot(tl.trans(a), b, c, PRECISION)
    at = c_ptr + e * c_e + m.to(tl.int64)[:, None] * c_m + n.to(tl.int64)[None, :] * c_n
    tl.store(at, c.to(c_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@kernel
def _gather(x_ptr, rows_ptr, order_ptr, stride_x, TOP, N, BLOCK: tl.constexpr):
    """One program: row r is x's of its token; any for rows of no expert."""
    r = tl.program_id(0).to(tl.int64)
    t = (tl.maximum(tl.load(order_ptr + r), 0) // TOP).to(tl.int64)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        tl.store(rows_ptr + r * N + n, tl.load(x_ptr + t * stride_x + n, mask=n < N), mask=n < N)


def tile_rows(S, E, x):
    """Rows of a tile, for S assignments: an expert's last tile is partly empty.

    Of 16, 32, 64 and 128 the fastest or within 2 % of it, forward and backward, for 1 to 8,192
    tokens through the experts of Mixtral-8x7B and of Qwen3-30B-A3B (H200, 2026-11-23)."""
    rows = 16 if S <= 8 * E else 64 if S <= 32 * E else 128
    return min(rows, 64) if x.dtype == torch.float32 else rows


def _launch(rows, N, K, x, tiles, most=256):
    """Block sizes, precision, stages and warps of a product of tiles of ``rows`` rows, N columns
    and sums of K terms.

    ``most``: columns of a tile, where the device copies tiles.
    """
    columns, deep, stages, warps = _tile(x, rows, N, K, tiles, most)
    exact = devices.AMD or torch.get_float32_matmul_precision() == "highest"
    return columns, dict(
        BLOCK_M=rows, BLOCK_K=deep, PRECISION="ieee" if exact else "tf32", STAGES=stages,
        num_warps=devices.warps(warps, x),
    )  # fmt: skip


def _others(x, numbers, rows, N, K, tiles, most):
    device = tuning.traits(x)
    widest, deepest = max(next_power_of_2(N), 16), max(next_power_of_2(K), 16)
    places = {
        0: (32, 64, 128, 256),
        1: (16, 32, 64),
        2: (2, 3, 4) if device.prefetches else (1, 2),
        3: (4, 8),
    }

    def fits(columns, deep, stages, warps):
        small = columns <= widest and deep <= deepest and rows * columns <= 4096 * warps
        return (
            small
            and max(stages, 2) * (rows + columns) * deep * x.element_size() + 2048 <= device.shared
        )

    return tuning.around(numbers, places, fits)


@tuning.tuned("experts", _others)
def _tile(x, rows, N, K, tiles, most):
    """(columns, deep, stages, warps) of `_launch`.

    A thread has at most 128 entries of c. fp32 has no matrix unit, unless torch may use tf32: its
    operands lie in registers, too. Nothing is spilled on sm_80 and sm_90, and few tokens' programs
    are enough for the device.

    Of nine launches by descriptors 128x256x64 with 3 stages was among the fastest, mostly within 5
    % of the best, for each product of 16,384 tokens through the experts of Mixtral-8x7B,
    Qwen3-30B-A3B, DeepSeek-V3 and gpt-oss-20b, which ran at 0.8 to 1.1 of the rate of an 8192³
    product; with pointers those of tokens at 0.4 to 0.9 (H200, 2026-11-23, Triton 3.6)."""
    wide = x.dtype == torch.float32
    deep = 16 if wide else 64
    bulk = devices.copies_tiles(x)
    columns = 64 if wide else most if bulk else 128
    if devices.stages((rows + columns) * deep * x.element_size(), x) == 1:
        columns = min(columns, 128)
    columns, deep = (
        min(columns, max(next_power_of_2(N), 16)),
        min(deep, max(next_power_of_2(K), 16)),
    )
    while columns > 32 and tiles * cdiv(N, columns) < 2 * devices.multiprocessors(x):
        columns //= 2
    warps = 8 if rows >= 128 and columns >= 128 and not (bulk and most == 128) else 4
    tiles_of_one = (rows + columns) * deep * x.element_size()
    stages = devices.stages(tiles_of_one, x)
    if stages == 1:
        stages = tuning.traits(x).stages_of_products(tiles_of_one)
    return columns, deep, stages, warps


def multiply_rows(
    a, w, bias, c, of_tokens, TOP, order, offsets, tiles, rows, z=None, gated=NO_GATE
):
    """c = a·w_e + bias_e, with w (E, K, N) of any strides. ``of_tokens``: see `_product`.

    ``gated``: limit, alpha, shift, activation, and whether g and u are interleaved; z is what comes
    out of it."""
    (_, K, N), n, (*numbers, act, interleaved) = w.shape, tiles.shape[0], gated
    columns, blocks = _launch(rows, N, K, a, n)
    deep, k_last = blocks["BLOCK_K"], w.stride(1) == 1
    table, block = (w.mT, (columns, deep)) if k_last else (w, (deep, columns))
    if act is not None and not interleaved:  # a half of the block's columns is of g, a half of u
        table, block = (
            table.unflatten(1 if k_last else 2, (2, N // 2)),
            (2, columns // 2, deep) if k_last else None,
        )
    bulk_a, bulk_w = (
        a if of_tokens else descriptor(a, (rows, deep)),
        block and descriptor(table, (1, *block)),
    )
    bulk = bulk_a is not None and bulk_w is not None
    _product[(n * cdiv(N, columns),)](
        bulk_a if bulk else a,
        bulk_w if bulk else w,
        bias,
        c,
        z,
        order,
        offsets,
        tiles,
        a.stride(0),
        *w.stride(),
        TOP,
        K,
        N,
        n,
        *numbers,
        OF_TOKENS=of_tokens,
        ACT=ACTS.get(act),
        INTERLEAVED=interleaved,
        BULK=bulk,
        K_LAST=k_last,
        BLOCK_N=columns,
        EVEN=K % deep == 0,
        **blocks,
    )


def multiply_columns(a, b, c, of_tokens, TOP, order, offsets):
    """c (E, M, N) of any strides: Σ_r a_r ⊗ b_r over each expert's rows. ``of_tokens``: see
    `_outer`.

    The rows of tokens are gathered, some columns at a time, where the product of rows in order is
    so much faster: with descriptors twice as fast (H200, 2026-11-23, Triton 3.6, (16384, 2048, 768,
    128, 8) and three larger ones).

    Of few rows, sums are short, and tiles of half the columns and warps let one write while another
    one adds up. All of backward for 1, 128, 2,048 tokens of Mixtral-8x7B and 2,048 of
    Qwen3-30B-A3B: 1.62, 2.16, 6.04, 1.52 ms instead of
    1.78, 2.39, 6.58, 1.70 (H200, 2026-11-23).
    """
    if c.stride(2) != 1 and c.stride(1) == 1:
        a, b, c, of_tokens = b, a, c.mT, "b" if of_tokens == "a" else "a"
    M, N = c.shape[1:]
    rows = min(64 if a.dtype == torch.float32 else 128, max(next_power_of_2(M), 16))
    most = 128 if order.numel() <= 512 * c.shape[0] else 256
    columns, blocks = _launch(rows, N, 64, a, c.shape[0] * cdiv(M, rows), most)
    deep = blocks["BLOCK_K"]
    given, strips = (a, b), [(a, b, c)]
    tokens, other = given if of_tokens == "a" else given[::-1]
    bulk = descriptor(other, (deep, columns)) is not None and tokens.shape[1] % 8 == 0
    if not bulk:
        columns, blocks = _launch(rows, N, 64, a, c.shape[0] * cdiv(M, rows))
    if bulk:
        strips = _gathered(tokens, other, c, of_tokens, TOP, order)
    for a, b, c in strips:
        E, M, N = c.shape
        a_at, b_at = (
            (descriptor(a, (deep, rows)), descriptor(b, (deep, columns))) if bulk else (a, b)
        )
        _outer[(cdiv(M, rows) * cdiv(N, columns), E)](
            a_at,
            b_at,
            c,
            order,
            offsets,
            a.stride(0),
            b.stride(0),
            *c.stride(),
            M,
            N,
            TOP,
            OF_TOKENS=of_tokens,
            BULK=bulk,
            BLOCK_N=columns,
            **blocks,
        )


def _gathered(tokens, other, c, of_tokens, TOP, order):
    """Strips of the columns of ``tokens``, a row for each r: those of a, b and c for `_outer`."""
    width, S = tokens.shape[1], order.numel()
    strip = cdiv(width, max(cdiv(S * width * tokens.element_size(), GATHERED), 1) * 256) * 256
    for first in range(0, width, strip):
        part = tokens[:, first : first + strip]
        at = tokens.new_empty((S, part.shape[1]))
        _gather[(S,)](
            part,
            at,
            order,
            part.stride(0),
            TOP,
            at.shape[1],
            BLOCK=1024,
            num_warps=devices.warps(4, at),
        )
        last = slice(first, first + strip)
        yield (at, other, c[:, last]) if of_tokens == "a" else (other, at, c[:, :, last])
