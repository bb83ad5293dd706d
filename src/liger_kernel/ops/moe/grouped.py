r"""The kernels of experts: products in which each row has its own expert's matrix, and what comes between them.

With the assignments sorted by expert (`routing`), row r of expert e is that of assignment s = order[r] and of token
t = s // K. W_e is gate_up_proj[e], with 2I rows, and D_e is down_proj[e]:

    pre_r = W_e·x_t + b_e,   (g, u) = pre_r in halves, or its even and odd entries,   z_r = act(g)·u
    y_s = D_e·z_r + d_e,     out_t = Σ_k w_s·y_s

    q_r = dout_t·D_e,   dw_s = <q_r, z_r> + <dout_t, d_e>,   dz_r = w_s·q_r
    dg = dz·u·act'(g),  du = dz·act(g),  dpre_r = (dg, du),   dx_t = Σ_k dpre_r·W_e
    dD_e = Σ_r dout_t ⊗ w_s·z_r,   dW_e = Σ_r dpre_r ⊗ x_t,   dd_e = Σ_r w_s·dout_t,   db_e = Σ_r dpre_r

With a limit, g and u are those of `liger_clamped_swiglu`, and act(g) is silu(alpha·g)/alpha.

A product reads its rows of x and of dout where they lie, by their tokens, and writes y and the parts of dx by their
assignments. So a token's K rows are neighbours, and are added in that order: the same sum in every run. Sums are in
fp32. Rounded are pre, q, w·z, dpre, each expert's y and part of dx, and the results. In forward, z is made from sums in
fp32, in the product's own program. In backward it is made from pre, where q comes back: one more trip of q through
memory, but a product that needs no registers for anything else.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import descriptor, kernel
from liger_kernel.core.op import custom_op, matrix_rows
from liger_kernel.core.tile import cdiv, next_power_of_2, read, tl, triton
from liger_kernel.ops.mlp.pointwise import ACTS

WIDE = tl.constexpr(devices.INTERPRETED)  # its products of bf16 are wrong, those of fp32 are not
NO_GATE = None, None, None, None, False
GATHERED = 2**29  # bytes of rows that are gathered for a product, or of 256 of their columns
TOGETHER = tl.constexpr(8)  # tiles of rows whose programs are neighbours: they share the weights in the cache


@triton.jit
def _place(tile_ptr, offset_ptr, order_ptr, tiles, blocks, BLOCK_M: tl.constexpr):
    """-> this program's expert (-1: none), its first row, which of its rows are the expert's, their assignments, its
    block of columns."""
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
def _gate(g, u, limit, alpha, shift, ACT: tl.constexpr):
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
    a_ptr, b_ptr, bias_ptr, c_ptr, z_ptr, order_ptr, offset_ptr, tile_ptr, stride_a, b_e, b_k, b_n, TOP, K, N, tiles,
    limit, alpha, shift, OF_TOKENS: tl.constexpr, ACT: tl.constexpr, INTERLEAVED: tl.constexpr, BULK: tl.constexpr,
    K_LAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N of the N columns of c = a·b_e + bias_e.

    OF_TOKENS: a has a row for each token, and c one for each row r; otherwise a one for each r, c for each assignment.
    With an activation, the columns are half of g and half of u, and z is written, too; c only where there is a c_ptr.
    BULK: b_ptr is a descriptor, and a_ptr unless its rows are gathered; K_LAST: b lies in memory as (E, N, K). EVEN: K
    is a multiple of BLOCK_K.
    """
    e, row, known, s, block = _place(tile_ptr, offset_ptr, order_ptr, tiles, tl.cdiv(N, BLOCK_N), BLOCK_M)
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
        act, _, u = _gate(g, u, limit, alpha, shift, ACT)
        f = block * HALF + tl.arange(0, HALF)
        at = z_ptr + row * (N // 2) + i[:, None] * (N // 2) + f[None, :]
        tl.store(at, (act * u).to(z_ptr.dtype.element_ty), mask=known[:, None] & (f < N // 2)[None, :])


@kernel
def _gate_bwd(
    q_ptr, pre_ptr, weight_ptr, dpre_ptr, z_ptr, dweight_ptr, dout_ptr, bias_ptr, index_ptr, order_ptr, stride_dout,
    TOP, H, F, limit, alpha, shift, ACT: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a row of dpre, of w·z, and dw of its assignment. Each may be left out, and q with dpre and dw.

    dpre may be in the memory of pre, and z in that of q.
    """
    r = tl.program_id(0).to(tl.int64)
    s = tl.load(order_ptr + r).to(tl.int64)
    if s < 0:
        return
    weight = tl.load(weight_ptr + s).to(tl.float32)
    i = tl.arange(0, BLOCK)
    dot = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, F, BLOCK):
        n = start + i
        if INTERLEAVED:
            pair = 2 * start + tl.arange(0, 2 * BLOCK)
            g, u = tl.split(tl.reshape(read(pre_ptr, r * 2 * F + pair, pair < 2 * F), (BLOCK, 2)))
        else:
            g, u = read(pre_ptr, r * 2 * F + n, n < F), read(pre_ptr, r * 2 * F + F + n, n < F)
        if limit is not None:
            g_moves, u_moves = g <= limit, tl.abs(u) <= limit
        act, slope, u = _gate(g, u, limit, alpha, shift, ACT)
        if q_ptr is not None:
            q = read(q_ptr, r * F + n, n < F)
            dot += q * (act * u)
        if z_ptr is not None:
            tl.store(z_ptr + r * F + n, (weight * (act * u)).to(z_ptr.dtype.element_ty), mask=n < F)
        if dpre_ptr is not None:
            dz = weight * q
            dg, du = dz * u * slope, dz * act
            if limit is not None:
                dg, du = tl.where(g_moves, dg, 0.0), tl.where(u_moves, du, 0.0)
            dg, du = dg.to(dpre_ptr.dtype.element_ty), du.to(dpre_ptr.dtype.element_ty)
            if INTERLEAVED:
                both = tl.reshape(tl.join(dg, du), (2 * BLOCK,))
                tl.store(dpre_ptr + r * 2 * F + pair, both, mask=pair < 2 * F)
            else:
                tl.store(dpre_ptr + r * 2 * F + n, dg, mask=n < F)
                tl.store(dpre_ptr + r * 2 * F + F + n, du, mask=n < F)
    if dweight_ptr is not None:
        if bias_ptr is not None:
            e = tl.load(index_ptr + s).to(tl.int64)
            for start in range(0, H, BLOCK):
                h = start + i
                dout = read(dout_ptr, s // TOP * stride_dout + h, h < H)
                dot += dout * read(bias_ptr, e * H + h, h < H)
        tl.store(dweight_ptr + s, tl.sum(dot).to(dweight_ptr.dtype.element_ty))


@kernel
def _outer(
    a_ptr, b_ptr, c_ptr, order_ptr, offset_ptr, stride_a, stride_b, c_e, c_m, c_n, M, N, TOP,
    OF_TOKENS: tl.constexpr, BULK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M x BLOCK_N of c_e = Σ_r a_r ⊗ b_r, over an expert's rows; 0 if it has none.

    OF_TOKENS: which of "a" and "b" has a row for each token, and not for each row r. BULK: a_ptr and b_ptr are
    descriptors, of a row for each r.
    """
    blocks_m, blocks_n, e = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.program_id(1).to(tl.int64)
    together = tl.program_id(0) // (TOGETHER * blocks_n) * TOGETHER
    size, inside = tl.minimum(blocks_m - together, TOGETHER), tl.program_id(0) % (TOGETHER * blocks_n)
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
            a_at, b_at = a_ptr + a_row[:, None] * stride_a + m[None, :], b_ptr + b_row[:, None] * stride_b + n[None, :]
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


@kernel
def _sums(
    a_ptr, weight_ptr, c_ptr, order_ptr, offset_ptr, stride_a, N, TOP, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One program: BLOCK_N columns of c_e = Σ_r a_r, or with weights Σ_r weight_s·a_t: then a has the tokens' rows."""
    e, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = tl.load(offset_ptr + e), tl.load(offset_ptr + e + 1)
    c = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(begin, end, BLOCK_M):
        r = start + tl.arange(0, BLOCK_M)
        known = r < end
        row = r.to(tl.int64)
        if weight_ptr is not None:
            s = tl.load(order_ptr + r, mask=known, other=0)
            row = (s // TOP).to(tl.int64)
        a = read(a_ptr, row[:, None] * stride_a + n[None, :], known[:, None] & (n < N)[None, :])
        if weight_ptr is not None:
            a *= read(weight_ptr, s, known)[:, None]
        c += a
    tl.store(c_ptr + e * N + n, tl.sum(c, axis=0).to(c_ptr.dtype.element_ty), mask=n < N)


@kernel
def _add(
    y_ptr, weight_ptr, index_ptr, place_ptr, out_ptr, T, N, E, TOP, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One program: BLOCK_N columns of BLOCK_M tokens, out_t = Σ_k weight_s·y_s, or Σ_k y_s without weights.

    With place_ptr, y_s is the row place[s].
    """
    blocks = tl.cdiv(N, BLOCK_N)
    t = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    out = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(TOP):
        s = t * TOP + k
        i = tl.load(index_ptr + s, mask=t < T, other=0).to(tl.int64)
        known = (t < T) & (i >= 0) & (i < E)
        row = s
        if place_ptr is not None:
            row = tl.load(place_ptr + s, mask=known, other=0).to(tl.int64)
        y = read(y_ptr, row * N + n, known & (n < N))
        if weight_ptr is not None:
            y *= read(weight_ptr, s, known)
        out += y
    tl.store(out_ptr + t * N + n, out.to(out_ptr.dtype.element_ty), mask=(t < T) & (n < N))


def tile_rows(S, E, x):
    """Rows of a tile, for S assignments: a quarter to half of an expert's mean, since its last tile is partly empty."""
    rows = next((rows for rows in (16, 32, 64) if S <= 2 * rows * E), 128)
    return min(rows, 64) if x.dtype == torch.float32 else rows


def _launch(rows, N, K, x, tiles):
    """Block sizes, precision, stages and warps of a product of tiles of ``rows`` rows, N columns and sums of K terms.

    A thread has at most 128 entries of c. fp32 has no matrix unit, unless torch may use tf32: its operands lie in
    registers, too. So that nothing is spilled on sm_80 and sm_90, and that few tokens' programs are enough for the
    device. 128x256x64 with 3 stages was the fastest or within 3 % of it for each product of 16,384 tokens through
    Mixtral-8x7B's, Qwen3-30B-A3B's, DeepSeek-V3's and gpt-oss-20b's experts (H200, 2026-11-23, Triton 3.6).
    """
    wide = x.dtype == torch.float32
    deep = 16 if wide else 64
    columns = 64 if wide else 256 if devices.copies_tiles(x) else 128
    if devices.stages((rows + columns) * deep * x.element_size(), x) == 1:
        columns = min(columns, 128)
    columns, deep = min(columns, max(next_power_of_2(N), 16)), min(deep, max(next_power_of_2(K), 16))
    while columns > 32 and tiles * cdiv(N, columns) < 2 * devices.multiprocessors(x):
        columns //= 2
    exact = devices.AMD or torch.get_float32_matmul_precision() == "highest"
    return columns, dict(
        BLOCK_M=rows, BLOCK_K=deep, PRECISION="ieee" if exact else "tf32",
        STAGES=devices.stages((rows + columns) * deep * x.element_size(), x),
        num_warps=devices.warps(8 if rows >= 128 and columns >= 128 else 4, x),
    )  # fmt: skip


def _launch_rows(M, N):
    """(rows, columns) of a program that adds rows up."""
    columns = min(next_power_of_2(max(N, 1)), 512)
    return min(2048 // columns, next_power_of_2(max(M, 1))), columns


def _table(w, transposed):
    """The weights as (E, rows, columns) of `torch.nn.Linear`, a view."""
    return w.mT if transposed else w


def _contiguous(t):
    return None if t is None else t.contiguous()


def _multiply_rows(a, w, bias, c, of_tokens, TOP, order, offsets, tiles, rows, z=None, gate=NO_GATE):
    """c = a·w_e + bias_e, with w (E, K, N) of any strides. ``of_tokens``: see `_product`.

    ``gate``: limit, alpha, shift, activation, and whether g and u are interleaved; z is what comes out of it.
    """
    (_, K, N), n, (*numbers, act, interleaved) = w.shape, tiles.shape[0], gate
    columns, blocks = _launch(rows, N, K, a, n)
    deep, k_last = blocks["BLOCK_K"], w.stride(1) == 1
    table, block = (w.mT, (columns, deep)) if k_last else (w, (deep, columns))
    if act is not None and not interleaved:  # a half of the block's columns is of g, a half of u
        table, block = table.unflatten(1 if k_last else 2, (2, N // 2)), (2, columns // 2, deep) if k_last else None
    bulk_a, bulk_w = a if of_tokens else descriptor(a, (rows, deep)), block and descriptor(table, (1, *block))
    bulk = bulk_a is not None and bulk_w is not None
    _product[(n * cdiv(N, columns),)](
        bulk_a if bulk else a, bulk_w if bulk else w, bias, c, z, order, offsets, tiles, a.stride(0), *w.stride(), TOP,
        K, N, n, *numbers, OF_TOKENS=of_tokens, ACT=ACTS.get(act), INTERLEAVED=interleaved, BULK=bulk, K_LAST=k_last,
        BLOCK_N=columns, EVEN=K % deep == 0, **blocks,
    )  # fmt: skip


def add_rows(y, weights, index, out, E, place=None):
    """out (T, N): of each token the K rows of y, (T·K, N), added in fp32; ``place`` says where they are."""
    (T, N), TOP = out.shape, index.shape[1]
    rows, columns = _launch_rows(T, N)
    _add[(cdiv(T, rows) * cdiv(N, columns),)](
        y, weights, index, place, out, T, N, E, TOP, BLOCK_M=rows, BLOCK_N=columns, num_warps=4
    )


def _multiply_columns(a, b, c, of_tokens, TOP, order, offsets):
    """c (E, M, N) of any strides: Σ_r a_r ⊗ b_r over each expert's rows. ``of_tokens``: see `_outer`.

    The rows of tokens are gathered, some columns at a time, where the product of rows in order is so much faster: with
    descriptors twice as fast (H200, 2026-11-23, Triton 3.6, (16384, 2048, 768, 128, 8) and three larger ones).
    """
    if c.stride(2) != 1 and c.stride(1) == 1:
        a, b, c, of_tokens = b, a, c.mT, "b" if of_tokens == "a" else "a"
    M, N = c.shape[1:]
    rows = min(64 if a.dtype == torch.float32 else 128, max(next_power_of_2(M), 16))
    columns, blocks = _launch(rows, N, 64, a, c.shape[0] * cdiv(M, rows))
    deep = blocks["BLOCK_K"]
    given, strips = (a, b), [(a, b, c)]
    tokens, other = given if of_tokens == "a" else given[::-1]
    bulk = descriptor(other, (deep, columns)) is not None and tokens.shape[1] % 8 == 0
    if bulk:
        strips = _gathered(tokens, other, c, of_tokens, TOP, order)
    for a, b, c in strips:
        E, M, N = c.shape
        a_at, b_at = (descriptor(a, (deep, rows)), descriptor(b, (deep, columns))) if bulk else (a, b)
        _outer[(cdiv(M, rows) * cdiv(N, columns), E)](
            a_at, b_at, c, order, offsets, a.stride(0), b.stride(0), *c.stride(), M, N, TOP,
            OF_TOKENS=of_tokens, BULK=bulk, BLOCK_N=columns, **blocks,
        )  # fmt: skip


def _gathered(tokens, other, c, of_tokens, TOP, order):
    """Strips of the columns of ``tokens``, a row for each r: those of a, b and c for `_outer`."""
    width, S = tokens.shape[1], order.numel()
    strip = min(width, max(GATHERED // (S * tokens.element_size()) // 256, 1) * 256)
    for first in range(0, width, strip):
        part = tokens[:, first : first + strip]
        at = tokens.new_empty((S, part.shape[1]))
        _gather[(S,)](part, at, order, part.stride(0), TOP, at.shape[1], BLOCK=1024, num_warps=devices.warps(4, at))
        last = slice(first, first + strip)
        yield (at, other, c[:, last]) if of_tokens == "a" else (other, at, c[:, :, last])


def _sum_rows(a, weights, c, TOP, order, offsets):
    E, N = c.shape
    _sums[(cdiv(N, 64), E)](a, weights, c, order, offsets, a.stride(0), N, TOP, BLOCK_M=32, BLOCK_N=64, num_warps=4)


def _outputs(x, gate_up, down, index, *others):
    transposed, _, keep = others[-3:]
    columns = gate_up.shape[2 if transposed else 1]
    return x.new_empty(x.shape), x.new_empty((index.numel(), columns)) if keep else None


@custom_op("experts", _outputs)
def experts_fwd(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, index: torch.Tensor, weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, order: torch.Tensor, offsets: torch.Tensor,
    tiles: torch.Tensor, rows: int, act: str, limit: float | None, alpha: float, shift: float, transposed: bool,
    interleaved: bool, keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """x (T, H) and the experts' weights of any strides, and what `routing` gives for tiles of ``rows`` rows.

    -> out (T, H) and, to keep it, pre (T·K, 2I): row r is that of assignment order[r], columns are gate_up's.
    """
    out, pre = _outputs(x, gate_up, down, index, transposed, interleaved, keep)
    x, index, weights = matrix_rows(x), index.contiguous(), weights.contiguous()
    gate_up, down = _table(gate_up, transposed), _table(down, transposed)
    (E, H, F), S = down.shape, index.numel()
    z, y = x.new_empty((S, F)), x.new_empty((S, H))
    TOP, metadata = index.shape[1], (order, offsets, tiles, rows)
    gate = limit, None if alpha == 1 else alpha, shift, act, interleaved
    _multiply_rows(x, gate_up.mT, _contiguous(gate_up_bias), pre, True, TOP, *metadata, z, gate)
    _multiply_rows(z, down.mT, _contiguous(down_bias), y, False, TOP, *metadata)
    add_rows(y, weights, index, out, E)
    return out, pre


def _gradients(dout, x, gate_up, down, index, weights, gate_up_bias, down_bias, *others):
    given = x, gate_up, down, weights, gate_up_bias, down_bias
    return tuple(t.new_empty(t.shape) if need else None for t, need in zip(given, others[-6:], strict=True))


@custom_op("experts_backward", _gradients)
def experts_bwd(
    dout: torch.Tensor, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, index: torch.Tensor,
    weights: torch.Tensor, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, pre: torch.Tensor,
    order: torch.Tensor, offsets: torch.Tensor, tiles: torch.Tensor, rows: int, act: str, limit: float | None,
    alpha: float, shift: float, transposed: bool, interleaved: bool, need_dx: bool, need_dgate_up: bool,
    need_ddown: bool, need_dweights: bool, need_dgate_up_bias: bool, need_ddown_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> the gradients of x, gate_up, down, weights and both biases: None for what is not needed."""
    needs = need_dx, need_dgate_up, need_ddown, need_dweights, need_dgate_up_bias, need_ddown_bias
    return launch_bwd(
        dout, x, gate_up, down, index, weights, gate_up_bias, down_bias, pre, order, offsets, tiles, rows, act, limit,
        alpha, shift, transposed, interleaved, *needs, dpre=None,
    )  # fmt: skip


def launch_bwd(
    dout, x, gate_up, down, index, weights, gate_up_bias, down_bias, pre, order, offsets, tiles, rows, act, limit,
    alpha, shift, transposed, interleaved, *needs, dpre,
):  # fmt: skip
    """`experts_bwd`, with dpre in the memory that is given; it may be that of pre."""
    found = _gradients(dout, x, gate_up, down, index, weights, gate_up_bias, down_bias, *needs)
    dx, dgate_up, ddown, dweights, dgate_up_bias, ddown_bias = found
    dout, x, index, weights = matrix_rows(dout), matrix_rows(x), index.contiguous(), weights.contiguous()
    gate_up, down = _table(gate_up, transposed), _table(down, transposed)
    (E, H, F), TOP, S = down.shape, index.shape[1], index.numel()
    if dx is None and dgate_up is None and dgate_up_bias is None:
        dpre = None
    elif dpre is None:
        dpre = pre.new_empty(pre.shape)
    if dweights is not None:
        dweights.zero_()
    q = z = None
    if dpre is not None or dweights is not None:
        q = pre.new_empty((S, F))
        _multiply_rows(dout, down, None, q, True, TOP, order, offsets, tiles, rows)
    if ddown is not None:
        z = pre.new_empty((S, F)) if q is None else q
    if q is not None or z is not None:
        block = min(next_power_of_2(max(F, 1)), 1024)
        _gate_bwd[(S,)](
            q, pre, weights, dpre, z, dweights, dout, _contiguous(down_bias), index, order, dout.stride(0), TOP, H, F,
            limit, None if alpha == 1 else alpha, shift, ACT=ACTS[act], INTERLEAVED=interleaved, BLOCK=block,
            num_warps=devices.warps(4, x),
        )  # fmt: skip
    if ddown is not None:
        _multiply_columns(dout, z, _table(ddown, transposed), "a", TOP, order, offsets)
    del q, z
    if dx is not None:
        parts = dx.new_empty((S, H))
        _multiply_rows(dpre, gate_up, None, parts, False, TOP, order, offsets, tiles, rows)
        add_rows(parts, None, index, dx, E)
        del parts
    if dgate_up is not None:
        _multiply_columns(dpre, x, _table(dgate_up, transposed), "b", TOP, order, offsets)
    if dgate_up_bias is not None:
        _sum_rows(dpre, None, dgate_up_bias, TOP, order, offsets)
    if ddown_bias is not None:
        _sum_rows(dout, weights, ddown_bias, TOP, order, offsets)
    return found
