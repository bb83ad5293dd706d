"""The triangular system of a chunk, and the decays of its tokens.

In the names of `chunks`, with r_k = 1 / |k| and the keys K as they are, not normalised:

    L = strict lower triangle of β·(r_k·K)·(r_k·K)ᵀ,   U = D∘(I + L)⁻¹

The inverse without decay is the same for the system with decay, so no exp enters the solve. It is
done by substitution of blocks, of 2 tokens first, in tiles of 16: powers of L, the other way to
invert, lose all digits for keys that are alike (an error of 2e10 in fp32, where substitution has
1e-7). Tiles of 16 rows are also what Hopper multiplies by its older instructions, whose compilers
have no known fault.
"""

from __future__ import annotations

import torch

from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import tl, triton
from liger_kernel.ops.recurrent.chunks import (
    CHUNK,
    NORM_EPS,
    C,
    chunk_span,
    decay_of,
    dot,
    gate_rows,
    load_rows,
    norm_rows,
    operand,
)

TILE = tl.constexpr(16)  # tokens of a tile

# exp(-104) is 0 in fp32. A sum of 64 decays in units of 2^-36 has 49 bits
MIN_DECAY = -104.0
LOWEST_DECAY = tl.constexpr(MIN_DECAY)
UNITS = tl.constexpr(float(2**36))
NOT_A_NUMBER = tl.constexpr(2**56)  # stands for NaN in a sum of units


@triton.jit
def _split(x):
    """Return two bf16 numbers whose sum is x, but for its last bits.

    The greater is rounded as an integer, so that NVIDIA converts two numbers by one instruction.
    """
    bits = x.to(tl.int32, bitcast=True)
    high = ((bits + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _matmul(a, b, PRECISION: tl.constexpr):
    """Multiply two tiles of fp32 numbers.

    In three products of bf16 it has 17 bits, where the result is rounded to bf16's 8 in the end.
    """
    if PRECISION == "bf16x3":
        a_high, a_low = _split(a)
        b_high, b_low = _split(b)
        product = dot(a_low, b_high, "ieee")
        product += dot(a_high, b_low, "ieee")
        product += dot(a_high, b_high, "ieee")
        return product
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _invert(L, PRECISION: tl.constexpr):
    """Return (I + L)⁻¹ of a strictly lower triangle.

    The inverse of blocks of 2, 4 and 8 rows on the diagonal gives that of twice as many rows: with
    X of both blocks and M the block of L below the diagonal, the new block is -X·M·X.
    """
    i = tl.arange(0, TILE)[:, None]
    j = tl.arange(0, TILE)[None, :]
    X = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -L, 0.0))
    for bits in range(1, 4):  # not unrolled: less code for the instruction cache
        M = tl.where((i >> bits != j >> bits) & (i >> (bits + 1) == j >> (bits + 1)), L, 0.0)
        X -= _matmul(X, _matmul(M, X, PRECISION), PRECISION)
    return X


@triton.jit
def _reciprocal_norm(squares, NORM: tl.constexpr, eps, EXACT: tl.constexpr):
    """Return 1 / the norms of a tile's rows, whose sums of squares are given; or 1.

    NVIDIA's fast root and division are off by up to 3 ulp, which is most of the error of results in
    fp32: with keys alike it doubled that of the last state.
    """
    if NORM:
        if EXACT:
            r = tl.div_rn(1.0, tl.sqrt_rn(squares + eps))
        else:
            r = 1.0 / tl.sqrt(squares + eps)
    else:
        r = tl.full((TILE,), 1.0, tl.float32)
    return r


@triton.jit
def _diagonal(x):
    i = tl.arange(0, TILE)
    return tl.sum(tl.where(i[:, None] == i[None, :], x, 0.0), axis=1)


@triton.jit
def _products(a, b, sums, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Add the products of the rows of two tiles to ``sums``."""
    return sums + dot(operand(a, OPERAND), tl.trans(operand(b, OPERAND)), PRECISION)


@triton.jit
def _load_gates(g_ptr, stride_g, beta_ptr, stride_beta, rows, num_rows, gamma, gate_ptr, stride):
    """Load g and β of a tile, and store γ and β. ``gamma`` is γ before the tile, in units.

    Returns:
        γ as two numbers, the greater of which is rounded to fp32; β; γ at the tile's end, in units.
    """
    mask = rows < num_rows
    index = rows.to(tl.int64)
    beta = tl.load(beta_ptr + index * stride_beta, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + index * stride_g, mask=mask, other=0.0).to(tl.float32)
    is_number = g == g
    g = tl.where(is_number, tl.minimum(tl.maximum(g, LOWEST_DECAY), -LOWEST_DECAY), 0.0)
    units = tl.where(is_number, tl.floor(g * UNITS + 0.5).to(tl.int64), NOT_A_NUMBER)
    sums = gamma + tl.cumsum(units, axis=0)
    rounded = sums.to(tl.float32)
    lo = (sums - rounded.to(tl.int64)).to(tl.float32) * (1 / UNITS)
    hi = tl.where(sums > NOT_A_NUMBER // 2, float("nan"), rounded * (1 / UNITS))
    tl.store(gate_ptr + rows, hi, mask=mask)
    tl.store(gate_ptr + stride + rows, lo, mask=mask)
    tl.store(gate_ptr + 2 * stride + rows, beta, mask=mask)
    return hi, lo, beta, gamma + tl.sum(units)


@triton.jit
def _store_tile(u_ptr, x, hi, lo, earlier_hi, earlier_lo, row, column, num_rows, OPERAND, EXACT):
    """Store a tile of U at these rows and columns of a chunk: x with its decay."""
    i = row + tl.arange(0, TILE)
    j = column + tl.arange(0, TILE)
    between = (hi[:, None] - earlier_hi[None, :]) + (lo[:, None] - earlier_lo[None, :])
    between = tl.where(i[:, None] >= j[None, :], between, -float("inf"))
    x = operand(x * decay_of(between, EXACT), OPERAND)
    pointers = u_ptr + i[:, None] * C + j[None, :]
    tl.store(pointers, x.to(u_ptr.dtype.element_ty), mask=(i < num_rows)[:, None])


@triton.jit
def _store_zeros(u_ptr, row, column, num_rows):
    i = row + tl.arange(0, TILE)
    j = column + tl.arange(0, TILE)
    zeros = tl.zeros((TILE, TILE), tl.float32).to(u_ptr.dtype.element_ty)
    tl.store(u_ptr + i[:, None] * C + j[None, :], zeros, mask=(i < num_rows)[:, None])


@kernel
def _solve(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    table_ptr,
    u_ptr,
    gates_ptr,
    norms_ptr,
    stride_q_batch,
    stride_q_token,
    stride_q_head,
    stride_k_batch,
    stride_k_token,
    stride_k_head,
    stride_g_batch,
    stride_g_token,
    stride_g_head,
    stride_beta_batch,
    stride_beta_token,
    stride_beta_head,
    T,
    tokens,
    H,
    HV,
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
    NORM: tl.constexpr,
):
    """Compute U, γ and β of a value head in one chunk; its group's first also 1 / |q| and 1 / |k|.

    X is the inverse of I + L, and Xij the tile of its rows 16·i and columns 16·j.
    """
    slot = tl.program_id(0) // HV
    hv = tl.program_id(0) % HV
    group = HV // H
    h = hv // group
    b, start, end = chunk_span(table_ptr, slot, T)
    num_rows = end - start
    if num_rows <= 0:
        return
    at = tl.cast(start, tl.int64)
    first = b * T + start  # token among all
    o = tl.arange(0, TILE)
    BLOCK: tl.constexpr = min(BLOCK_K, 32)
    P: tl.constexpr = SOLVE_PRECISION
    rq_ptr, rk_ptr = norm_rows(norms_ptr, h, H, tokens, first)
    if hv % group == 0:
        q_ptr += b * stride_q_batch + at * stride_q_token + h.to(tl.int64) * stride_q_head
        for row in tl.range(0, num_rows, TILE, num_stages=1):
            squares = tl.zeros((TILE,), tl.float32)
            if NORM:
                k = tl.arange(0, BLOCK_K)
                q = load_rows(q_ptr, stride_q_token, row + o, num_rows, k, K, BLOCK_K)
                q = operand(q, OPERAND)
                squares = _diagonal(dot(q, tl.trans(q), PRECISION))
            rq = _reciprocal_norm(squares, NORM, eps, EXACT)
            tl.store(rq_ptr + row + o, rq, mask=row + o < num_rows)

    # products of the keys, some of their entries at a time
    zeros = tl.zeros((TILE, TILE), tl.float32)
    L00, L10, L11, L20, L21, L22 = zeros, zeros, zeros, zeros, zeros, zeros
    L30, L31, L32, L33 = zeros, zeros, zeros, zeros
    k_ptr += b * stride_k_batch + at * stride_k_token + h.to(tl.int64) * stride_k_head
    for column in range(0, K, BLOCK):
        k = column + tl.arange(0, BLOCK)
        k0 = load_rows(k_ptr, stride_k_token, o, num_rows, k, K, BLOCK)
        k1 = load_rows(k_ptr, stride_k_token, 16 + o, num_rows, k, K, BLOCK)
        k2 = load_rows(k_ptr, stride_k_token, 32 + o, num_rows, k, K, BLOCK)
        k3 = load_rows(k_ptr, stride_k_token, 48 + o, num_rows, k, K, BLOCK)
        L00 = _products(k0, k0, L00, OPERAND, PRECISION)
        L10 = _products(k1, k0, L10, OPERAND, PRECISION)
        L11 = _products(k1, k1, L11, OPERAND, PRECISION)
        L20 = _products(k2, k0, L20, OPERAND, PRECISION)
        L21 = _products(k2, k1, L21, OPERAND, PRECISION)
        L22 = _products(k2, k2, L22, OPERAND, PRECISION)
        L30 = _products(k3, k0, L30, OPERAND, PRECISION)
        L31 = _products(k3, k1, L31, OPERAND, PRECISION)
        L32 = _products(k3, k2, L32, OPERAND, PRECISION)
        L33 = _products(k3, k3, L33, OPERAND, PRECISION)
    r0 = _reciprocal_norm(_diagonal(L00), NORM, eps, EXACT)
    r1 = _reciprocal_norm(_diagonal(L11), NORM, eps, EXACT)
    r2 = _reciprocal_norm(_diagonal(L22), NORM, eps, EXACT)
    r3 = _reciprocal_norm(_diagonal(L33), NORM, eps, EXACT)
    if hv % group == 0:
        tl.store(rk_ptr + o, r0, mask=o < num_rows)
        tl.store(rk_ptr + 16 + o, r1, mask=16 + o < num_rows)
        tl.store(rk_ptr + 32 + o, r2, mask=32 + o < num_rows)
        tl.store(rk_ptr + 48 + o, r3, mask=48 + o < num_rows)

    # the rows of tiles, from above
    g_ptr += b * stride_g_batch + at * stride_g_token + hv.to(tl.int64) * stride_g_head
    beta_ptr += b * stride_beta_batch + at * stride_beta_token + hv.to(tl.int64) * stride_beta_head
    gate_ptr, _, _ = gate_rows(gates_ptr, hv, HV, tokens, first)
    gate_stride = tl.cast(HV, tl.int64) * tokens
    u_ptr += (hv.to(tl.int64) * tokens + first) * C
    low = o[:, None] > o[None, :]
    gamma = tl.sum(tl.zeros((TILE,), tl.int64))

    hi0, lo0, beta, gamma = _load_gates(
        g_ptr, stride_g_token, beta_ptr, stride_beta_token, o, num_rows, gamma, gate_ptr,
        gate_stride,
    )  # fmt: skip
    beta *= r0
    X00 = _invert(tl.where(low, L00 * beta[:, None] * r0[None, :], 0.0), P)
    _store_tile(u_ptr, X00, hi0, lo0, hi0, lo0, 0, 0, num_rows, OPERAND, EXACT)
    _store_zeros(u_ptr, 0, 16, num_rows)
    _store_zeros(u_ptr, 0, 32, num_rows)
    _store_zeros(u_ptr, 0, 48, num_rows)

    hi1, lo1, beta, gamma = _load_gates(
        g_ptr, stride_g_token, beta_ptr, stride_beta_token, 16 + o, num_rows, gamma, gate_ptr,
        gate_stride,
    )  # fmt: skip
    beta *= r1
    X11 = _invert(tl.where(low, L11 * beta[:, None] * r1[None, :], 0.0), P)
    L10 *= beta[:, None] * r0[None, :]
    LX = _matmul(L10, X00, P)
    X10 = -_matmul(X11, LX, P)
    _store_tile(u_ptr, X10, hi1, lo1, hi0, lo0, 16, 0, num_rows, OPERAND, EXACT)
    _store_tile(u_ptr, X11, hi1, lo1, hi1, lo1, 16, 16, num_rows, OPERAND, EXACT)
    _store_zeros(u_ptr, 16, 32, num_rows)
    _store_zeros(u_ptr, 16, 48, num_rows)

    hi2, lo2, beta, gamma = _load_gates(
        g_ptr, stride_g_token, beta_ptr, stride_beta_token, 32 + o, num_rows, gamma, gate_ptr,
        gate_stride,
    )  # fmt: skip
    beta *= r2
    X22 = _invert(tl.where(low, L22 * beta[:, None] * r2[None, :], 0.0), P)
    L20 *= beta[:, None] * r0[None, :]
    L21 *= beta[:, None] * r1[None, :]
    LX = _matmul(L20, X00, P)
    LX += _matmul(L21, X10, P)
    X20 = -_matmul(X22, LX, P)
    LX = _matmul(L21, X11, P)
    X21 = -_matmul(X22, LX, P)
    _store_tile(u_ptr, X20, hi2, lo2, hi0, lo0, 32, 0, num_rows, OPERAND, EXACT)
    _store_tile(u_ptr, X21, hi2, lo2, hi1, lo1, 32, 16, num_rows, OPERAND, EXACT)
    _store_tile(u_ptr, X22, hi2, lo2, hi2, lo2, 32, 32, num_rows, OPERAND, EXACT)
    _store_zeros(u_ptr, 32, 48, num_rows)

    hi3, lo3, beta, gamma = _load_gates(
        g_ptr, stride_g_token, beta_ptr, stride_beta_token, 48 + o, num_rows, gamma, gate_ptr,
        gate_stride,
    )  # fmt: skip
    beta *= r3
    X33 = _invert(tl.where(low, L33 * beta[:, None] * r3[None, :], 0.0), P)
    L30 *= beta[:, None] * r0[None, :]
    L31 *= beta[:, None] * r1[None, :]
    L32 *= beta[:, None] * r2[None, :]
    LX = _matmul(L30, X00, P)
    LX += _matmul(L31, X10, P)
    LX += _matmul(L32, X20, P)
    X30 = -_matmul(X33, LX, P)
    LX = _matmul(L31, X11, P)
    LX += _matmul(L32, X21, P)
    X31 = -_matmul(X33, LX, P)
    LX = _matmul(L32, X22, P)
    X32 = -_matmul(X33, LX, P)
    _store_tile(u_ptr, X30, hi3, lo3, hi0, lo0, 48, 0, num_rows, OPERAND, EXACT)
    _store_tile(u_ptr, X31, hi3, lo3, hi1, lo1, 48, 16, num_rows, OPERAND, EXACT)
    _store_tile(u_ptr, X32, hi3, lo3, hi2, lo2, 48, 32, num_rows, OPERAND, EXACT)
    _store_tile(u_ptr, X33, hi3, lo3, hi3, lo3, 48, 48, num_rows, OPERAND, EXACT)


def empty_solution(problem, q):
    """Allocate U (HV, tokens, 64), the gates (3, HV, tokens) and the norms (2, H, tokens)."""
    p = problem
    tokens = p.B * p.T
    u = q.new_empty((p.HV, tokens, CHUNK), dtype=p.operand_dtype)
    gates = q.new_empty((3, p.HV, tokens), dtype=torch.float32)
    return u, gates, q.new_empty((2, p.H, tokens), dtype=torch.float32)


def solve(problem, q, k, g, beta, table, normalize):
    """Return U, the gates (γ as two numbers, and β) and the norms: see `empty_solution`."""
    p = problem
    u, gates, norms = empty_solution(p, q)
    _solve[(p.chunks * p.HV,)](
        q,
        k,
        g,
        beta,
        table,
        u,
        gates,
        norms,
        *q.stride()[:3],
        *k.stride()[:3],
        *g.stride(),
        *beta.stride(),
        p.T,
        p.B * p.T,
        p.H,
        p.HV,
        NORM_EPS,
        **p.constants,
        SOLVE_PRECISION=p.solve_precision,
        NORM=normalize,
        num_warps=p.launch(hopper=1, ampere=2, cdna=1, rdna=4, fp32=4),
    )
    return u, gates, norms
