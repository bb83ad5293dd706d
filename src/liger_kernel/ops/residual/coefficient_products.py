r"""The products of the streams and phi, for the kernels in `coefficients`.

    raw = u·phi,   dphi = uᵀ·draw,   du = draw·phiᵀ - along·u

u is (M, K), raw and draw are (M, P), phi is (K, P) and along (M,). raw and dphi are products of one
kernel, du has one of its own.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.reduce import sum_rows
from liger_kernel.core.tile import cdiv, load_fp32, next_power_of_2, tl, triton

# Matrix units truncate sums where they should round them. So the products of this many entries of K
# are summed by themselves. It is a multiple of every block's depth.
EXACT_DEPTH = tl.constexpr(1024)


@triton.jit
def _dot(a, b, c, SAME_DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return a·b + c. Operands of one 16-bit dtype are multiplied as they are, others in fp32."""
    if not SAME_DTYPE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, c, input_precision=PRECISION)


@kernel
def _matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    square_ptr,
    M,
    K,
    STRIP,
    N: tl.constexpr,
    STRIDE_A_M: tl.constexpr,
    STRIDE_A_K: tl.constexpr,
    SAME_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute a block of c = a·b, and Σ_k a². b (K, N) is contiguous.

    The third axis of the grid goes over strips of K, each of which has its own c. N and the strides
    are constants, so that the compiler sees which loads are of 16 bytes.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    strip_begin = tl.program_id(2) * STRIP
    strip_end = tl.minimum(strip_begin + STRIP, K)
    block_k = tl.arange(0, BLOCK_K)
    c = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    square = tl.zeros((BLOCK_M, 1), dtype=tl.float32)
    for begin in range(strip_begin, strip_end, EXACT_DEPTH):
        end = tl.minimum(begin + EXACT_DEPTH, strip_end)
        partial = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            k = (start + block_k).to(tl.int64)
            a_index = m * STRIDE_A_M + k[None, :] * STRIDE_A_K
            a = tl.load(a_ptr + a_index, mask=(m < M) & (k[None, :] < strip_end), other=0.0)
            b_index = k[:, None] * N + n
            b = tl.load(b_ptr + b_index, mask=(k[:, None] < strip_end) & (n < N), other=0.0)
            partial = _dot(a, b, partial, SAME_DTYPE, PRECISION)
            if square_ptr is not None:
                a = a.to(tl.float32)
                square += tl.sum(a * a, axis=1, keep_dims=True)
        c += partial
    if square_ptr is not None:
        tl.store(square_ptr + m, square, mask=m < M)  # every program of these rows has the same
    c_ptrs = c_ptr + (tl.program_id(2) * M + m) * N + n
    tl.store(c_ptrs, c.to(c_ptr.dtype.element_ty), mask=(m < M) & (n < N))


@kernel
def _input_gradient(
    draw_ptr,
    phi_ptr,
    along_ptr,
    u_ptr,
    du_ptr,
    stride_u,
    M,
    K,
    P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a block of du = draw·phiᵀ - along·u."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    first_k = tl.program_id(1) * BLOCK_K
    k = first_k + tl.arange(0, BLOCK_K)
    mask = (m < M) & (k[None, :] < K)
    # on its way during the product
    u = tl.load(u_ptr + m * stride_u + k[None, :], mask=mask, other=0.0)
    along = load_fp32(along_ptr, m, m < M)
    du = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)[None, :]
        draw = load_fp32(draw_ptr, m * P + p, (m < M) & (p < P))
        phi = load_fp32(phi_ptr, k[:, None] * P + p, (k[:, None] < K) & (p < P))
        du += tl.dot(draw, tl.trans(phi), input_precision=PRECISION)
    du -= along * u.to(tl.float32)
    tl.store(du_ptr + m * K + k[None, :], du.to(du_ptr.dtype.element_ty), mask=mask)


def _phi_block_columns(P):
    return min(max(next_power_of_2(P), 16), 64)


def _loads_ahead(u):
    """Return True where blocks are loaded ahead into shared memory, and not into registers."""
    return devices.choose_num_stages(32 * 1024, u) > 1


def _u_block_columns(u):
    """Return the columns of u in a block of forward.

    They are many if a block is loaded ahead, few if it goes straight into registers. 128 is
    Hopper's, of 16 bits (H200, 2026-11-22). sm_80 and sm_89, or fp32, have too few registers for
    it.
    """
    if not _loads_ahead(u):
        return 32
    return 64 if u.dtype == torch.float32 or devices.arch(u).startswith("sm_8") else 128


def _uses_warp_groups(u, exact):
    """Return True where a product of 64 rows runs on Hopper's faster instructions.

    8192 rows of 4 streams of 4096 channels in bf16, with 32 and 64 rows a program: forward 245, 108
    µs. With 64 and 128 rows of phi's gradient: backward 417, 313 µs (H200, 2026-11-28, Triton 3.6).
    """
    return u.element_size() == 2 and not exact and devices.arch(u) == "sm_90"


def _launch_matmul(a, b, c, blocks, exact, splits=1, square=None):
    """Compute c (splits, M, N) = a (M, K)·b (K, N), each split from a strip of K. b is contiguous.

    If not ``exact``, it may be computed in tf32: its 11 bits are all that 16-bit operands or
    results have.
    """
    M, K = a.shape
    N = b.shape[1]
    block_m, block_n, block_k = blocks
    strip = block_k * max(cdiv(cdiv(K, block_k), splits), 1)
    stage_bytes = (block_m * a.element_size() + block_n * b.element_size()) * block_k
    _matmul[(cdiv(M, block_m), cdiv(N, block_n), splits)](
        a,
        b,
        c,
        square,
        M,
        K,
        strip,
        N=N,
        STRIDE_A_M=a.stride(0),
        STRIDE_A_K=a.stride(1),
        SAME_DTYPE=a.dtype == b.dtype and a.element_size() == 2 and not devices.INTERPRETED,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PRECISION="ieee" if exact else None,
        STAGES=devices.choose_num_stages(stage_bytes, a, 4),
        num_warps=devices.limit_warps(4, a),
    )


def multiply_by_phi(u, phi, raw, square):
    """Compute raw = u·phi and square = Σ u² (M,) of rows u, which have unit stride in K."""
    exact = torch.float32 in (u.dtype, phi.dtype)
    block_m = 64 if _uses_warp_groups(u, exact) else 32
    blocks = block_m, _phi_block_columns(phi.shape[1]), _u_block_columns(u)
    _launch_matmul(u, phi, raw, blocks, exact, square=square)


def phi_gradient(u, draw, dphi):
    """Compute dphi = uᵀ·draw, from strips of the rows if its blocks alone are too few programs."""
    M, K = u.shape
    P = draw.shape[1]
    exact = dphi.dtype == torch.float32
    block_k, programs_per_sm = (128, 1) if _uses_warp_groups(u, exact) else (64, 2)
    blocks = block_k, _phi_block_columns(P), 64 if _loads_ahead(u) else 32
    dphi_blocks = cdiv(K, blocks[0]) * cdiv(P, blocks[1])
    max_programs = programs_per_sm * devices.multiprocessors(u)
    splits = max(1, min(max_programs // dphi_blocks, M // 256))
    dphi_splits = dphi if splits == 1 else draw.new_empty((splits, K * P))
    _launch_matmul(u.t(), draw, dphi_splits, blocks, exact, splits)
    if splits > 1:
        sum_rows(dphi_splits, dphi)


def input_gradient(draw, phi, along, u, du):
    """Compute du (M, K) from draw (M, P), contiguous, and phi (K, P), contiguous."""
    M, K = u.shape
    P = phi.shape[1]
    exact = u.dtype == torch.float32
    block_m, block_k = (32, 64) if exact or not _loads_ahead(u) else (64, 128)
    _input_gradient[(cdiv(M, block_m), cdiv(K, block_k))](
        draw,
        phi,
        along,
        u,
        du,
        u.stride(0),
        M,
        K,
        P=P,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        BLOCK_P=min(max(next_power_of_2(P), 16), 32),
        PRECISION="ieee" if exact else None,
        num_warps=devices.limit_warps(4, u),
    )
