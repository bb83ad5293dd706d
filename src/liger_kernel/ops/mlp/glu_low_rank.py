r"""The kernels of a gated activation whose inputs are sums of a wide and a low-rank product.

    a = a0 + t_g·B_gᵀ,   b = b0 + t_u·B_uᵀ,   h = act(a)·b

    dh = dh0 + s·dt_d·A_d,      da = dh·b·act'(a),   db = dh·act(a)
    dB_g = daᵀ·t_g,   dB_u = dbᵀ·t_u,   dA_d = s·dt_dᵀ·h

a0 and b0 (M, N) are gate's and up's frozen products. t_g and t_u (M, r) are those with A of their
adapters, scaled already. dh0 is what comes from the frozen weight behind h, and dt_d what comes
from t_d = s·h·A_dᵀ of its adapter. da and db are also the gradients of a0 and b0.

Of the wide matrices, forward reads a0 and b0 and writes h; backward reads a0, b0 and dh0 and writes
da and db. So a, b and dh are never in memory, and in backward neither is h. B and A are cast to
a0's dtype where they are loaded. Sums are in fp32. Those over rows are made in groups, which are
then added up in order.

A program of backward owns some columns of a group of rows, and keeps their dB and dA in registers.
Its tiles are transposed: a tile's first product is then an operand of the next one as it lies in
registers. Where the device can, TMA brings them into shared memory, for else Triton would keep
tiles that are loaded ahead in registers, too.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices, tuning
from liger_kernel.core.kernel import LaunchCache, kernel, prepare_launch, tma_descriptor
from liger_kernel.core.tile import cdiv, next_power_of_2, tl, triton
from liger_kernel.ops.mlp.pointwise import activation_function

# the interpreter's products of bf16 are wrong, those of fp32 are not
UPCAST = tl.constexpr(devices.INTERPRETED)
LEAST_RANK = 16  # so many products a matrix unit adds up at least
MAX_RANK = 64  # beyond, registers spill
DTYPES = torch.float16, torch.bfloat16  # of a0; in fp32 registers spill
MATRIX_DTYPES = torch.float16, torch.bfloat16, torch.float32
COLUMN_MULTIPLE = 16  # Triton loads several entries at once of rows that are so long


def kernels_fit(dtype, b_g, b_u, a_d) -> bool:
    """Return True if the kernels are fast for a0 of this dtype, and these matrices of adapters."""
    matrices = b_g, b_u, a_d
    ranks = b_g.shape[1], b_u.shape[1], a_d.shape[0]
    if dtype not in DTYPES or min(ranks) == 0 or max(ranks) > MAX_RANK:
        return False
    if b_g.shape[0] % COLUMN_MULTIPLE or not b_g.shape[0]:
        return False
    return all(matrix.dtype in MATRIX_DTYPES for matrix in matrices)


# ---- parts of the kernels ----


@triton.jit
def _dot(a, b, c):
    """Return a·b + c in fp32. fp32 operands are not rounded to tf32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def _row(ptr, row, stride):
    """Return the pointer of a row. From there, offsets of 32 bits reach the rows of a tile; they
    take half the registers of pointers."""
    return ptr + tl.cast(row, tl.int64) * stride


@triton.jit
def _load(ptr, i, size_i, stride_i, j, size_j, stride_j, dtype):
    """Load a tile with entries (i, j). Those beyond the sizes are 0."""
    mask = (i[:, None] < size_i) & (j[None, :] < size_j)
    x = tl.load(ptr + (i[:, None] * stride_i + j[None, :] * stride_j), mask=mask, other=0.0)
    return x.to(dtype)


@triton.jit
def _store(ptr, i, size_i, stride_i, j, size_j, stride_j, x):
    mask = (i[:, None] < size_i) & (j[None, :] < size_j)
    offsets = i[:, None] * stride_i + j[None, :] * stride_j
    tl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask=mask)


# ---- forward ----


@kernel
def _fwd(
    a_ptr,
    b_ptr,
    tg_ptr,
    bg_ptr,
    tu_ptr,
    bu_ptr,
    h_ptr,
    stride_a,
    stride_b,
    stride_tg,
    stride_bg,
    stride_tu,
    stride_bu,
    M,
    N,
    rank_g,
    rank_u,
    rows_each,
    ACT: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute BLOCK_N columns of rows_each rows of h. R is the ranks, padded."""
    column = tl.program_id(0) * BLOCK_N
    columns = N - column
    i = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    r = tl.arange(0, R)
    dtype = a_ptr.dtype.element_ty
    # (R, BLOCK_N) each
    bg = _load(_row(bg_ptr, column, stride_bg), r, rank_g, 1, j, columns, stride_bg, dtype)
    bu = _load(_row(bu_ptr, column, stride_bu), r, rank_u, 1, j, columns, stride_bu, dtype)
    begin = tl.program_id(1) * rows_each
    end = tl.minimum(begin + rows_each, M)
    for row in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        rows = end - row
        a_row = _row(a_ptr, row, stride_a) + column
        b_row = _row(b_ptr, row, stride_b) + column
        tg = _load(_row(tg_ptr, row, stride_tg), i, rows, stride_tg, r, rank_g, 1, dtype)
        tu = _load(_row(tu_ptr, row, stride_tu), i, rows, stride_tu, r, rank_u, 1, dtype)
        # b first: Triton 3.9 then needs fewer registers
        b = _load(b_row, i, rows, stride_b, j, columns, 1, tl.float32)
        b = _dot(tu, bu, b)
        a = _load(a_row, i, rows, stride_a, j, columns, 1, tl.float32)
        act, _ = ACT(_dot(tg, bg, a))
        _store(_row(h_ptr, row, N) + column, i, rows, N, j, columns, 1, act * b)


def _fwd_launch(a, R):
    """Return (rows, columns, warps of 32, stages, programs for each multiprocessor, options).

    Measured on an H100, 2026-11-25, 14336 columns, bf16, in ms:

        rows, rank       64x128, 8 warps    64x64    64x64, 4 programs    32x128, 4 warps
        2048, 16              0.076         0.076          0.084               0.080
        2048, 32              0.088         0.076          0.076               0.084
        8192, 16              0.262         0.274          0.306               0.290
        8192, 32              0.298         0.267          0.273               0.284
        16384, 16             0.506         0.531          0.585               0.564
        16384, 32             0.568         0.522          0.534               0.550

    The first three have at most 128 registers a thread. Without that limit the first one takes 14 %
    longer with rank 16.
    """
    if not tuning.device_traits(a).prefetches:  # what is loaded ahead lies in registers
        return 32, 64, 4, 2, 8, {}
    is_hopper = devices.arch(a) == "sm_90"
    if is_hopper and R == 16:
        return 64, 128, 8, 3, 4, dict(maxnreg=128)
    stages = devices.choose_num_stages(2 * 64 * (64 + R) * a.element_size(), a)
    return 64, 64, 4, stages, 8, dict(maxnreg=128) if is_hopper and R == 32 else {}


def glu_low_rank_fwd(a, b, t_g, b_g, t_u, b_u, act):
    """Return h (M, N), contiguous.

    Args:
        a, b: a0 and b0, (M, N), of one dtype.
        t_g, t_u: (M, r) of that dtype.
        b_g, b_u: (N, r), of any of `MATRIX_DTYPES`.

    M and N are not 0. The entries of a row are contiguous in all of them.
    """
    M, N = a.shape
    h = a.new_empty((M, N))
    strides = tuple(map(_row_stride, (a, b, t_g, b_g, t_u, b_u)))
    key = *strides, M, N, b_g.shape[1], b_u.shape[1], act, a.dtype, a.device
    launch = _fwd_launches.get(key) or _fwd_launches.store(key, _prepare_fwd(a, *key))
    launch(a, b, t_g, b_g, t_u, b_u, h)
    return h


_fwd_launches = LaunchCache()


def _prepare_fwd(a, *key):
    *strides, M, N, rank_g, rank_u, act, _, _ = key
    R = _padded(rank_g, rank_u)
    block_m, block_n, warps, stages, programs, options = _fwd_launch(a, R)
    blocks = cdiv(N, block_n)
    groups = cdiv(programs * devices.multiprocessors(a), blocks)
    rows_each = cdiv(M, groups * block_m) * block_m
    return prepare_launch(
        _fwd,
        (blocks, cdiv(M, rows_each)),
        *strides,
        M,
        N,
        rank_g,
        rank_u,
        rows_each,
        ACT=activation_function(act, a),
        R=R,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        num_warps=tuning.device_traits(a).num_warps(warps),
        **options,
    )


def _padded(*ranks):
    return max(next_power_of_2(max(ranks)), LEAST_RANK)


def _row_stride(x):
    """Return the stride of x's rows; 0 if there is one row, whose stride is not used."""
    return x.stride(0) if x.shape[0] > 1 else 0


# ---- backward ----


@triton.jit
def _load_wide(source, row, column, stride, i, rows, j, columns, USE_TMA: tl.constexpr):
    """Load a tile, transposed, in fp32. ``source``: a descriptor or a pointer."""
    if USE_TMA:
        x = tl.trans(source.load([row, column])).to(tl.float32)
    else:
        x = _load(_row(source, row, stride) + column, j, columns, 1, i, rows, stride, tl.float32)
    return x


@kernel
def _bwd(
    dh_ptr,
    a_ptr,
    b_ptr,
    tg_ptr,
    bg_ptr,
    tu_ptr,
    bu_ptr,
    td_ptr,
    ad_ptr,
    da_ptr,
    db_ptr,
    parts_ptr,
    stride_dh,
    stride_a,
    stride_b,
    stride_tg,
    stride_bg,
    stride_tu,
    stride_bu,
    stride_td,
    stride_ad,
    M,
    N,
    rank_g,
    rank_u,
    rank_d,
    scaling,
    rows_each,
    USE_TMA: tl.constexpr,
    ACT: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute BLOCK_N columns of rows_each rows of da and db, and these rows' part of dB_g, dB_u
    and dA_dᵀ (without the scaling).

    dh, a and b are tensors or descriptors; td is dt_d. da and db are contiguous, and may be a and
    b. Parts: (3, groups of rows, N, R)."""
    column = tl.program_id(0) * BLOCK_N
    columns = N - column
    group = tl.program_id(1)
    i = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    r = tl.arange(0, R)
    dtype = da_ptr.dtype.element_ty
    # (BLOCK_N, R) each
    bg = _load(_row(bg_ptr, column, stride_bg), j, columns, stride_bg, r, rank_g, 1, dtype)
    bu = _load(_row(bu_ptr, column, stride_bu), j, columns, stride_bu, r, rank_u, 1, dtype)
    ad = _load(ad_ptr + column, j, columns, 1, r, rank_d, stride_ad, dtype)
    sum_g = tl.zeros((BLOCK_N, R), dtype=tl.float32)
    sum_u = tl.zeros((BLOCK_N, R), dtype=tl.float32)
    sum_d = tl.zeros((BLOCK_N, R), dtype=tl.float32)
    begin = group * rows_each
    end = tl.minimum(begin + rows_each, M)
    for row in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        rows = end - row
        # (BLOCK_M, R) each
        tg = _load(_row(tg_ptr, row, stride_tg), i, rows, stride_tg, r, rank_g, 1, dtype)
        tu = _load(_row(tu_ptr, row, stride_tu), i, rows, stride_tu, r, rank_u, 1, dtype)
        td = _load(_row(td_ptr, row, stride_td), i, rows, stride_td, r, rank_d, 1, dtype)
        # (BLOCK_N, BLOCK_M) each; rows and columns beyond the matrices are 0 in dh, t, A and B
        b = _load_wide(b_ptr, row, column, stride_b, i, rows, j, columns, USE_TMA)
        b = _dot(bu, tl.trans(tu), b)
        a = _load_wide(a_ptr, row, column, stride_a, i, rows, j, columns, USE_TMA)
        act, slope = ACT(_dot(bg, tl.trans(tg), a))
        sum_d = _dot((act * b).to(dtype), td, sum_d)
        dh = _load_wide(dh_ptr, row, column, stride_dh, i, rows, j, columns, USE_TMA)
        dh += scaling * _dot(ad, tl.trans(td), tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32))
        da = (dh * b * slope).to(dtype)
        db = (dh * act).to(dtype)
        _store(_row(da_ptr, row, N) + column, j, columns, 1, i, rows, N, da)
        _store(_row(db_ptr, row, N) + column, j, columns, 1, i, rows, N, db)
        sum_g = _dot(da, tg, sum_g)
        sum_u = _dot(db, tu, sum_u)
    # (BLOCK_N, R) each
    parts_ptr += (group.to(tl.int64) * N + column) * R
    size = tl.num_programs(1).to(tl.int64) * N * R
    _store(parts_ptr, j, columns, R, r, R, 1, sum_g)
    _store(parts_ptr + size, j, columns, R, r, R, 1, sum_u)
    _store(parts_ptr + 2 * size, j, columns, R, r, R, 1, sum_d)


def _bwd_launch(a, use_tma):
    """Return (rows, columns, warps of 32, stages, groups of rows).

    Measured on an H100, 2026-11-25, 14336 columns, bf16, with dt = da·B of gate and up, in ms:

        rows, rank    32x64    32x128, 8 warps    dt within the kernel    an operator each
        2048, 16      0.218         0.222                0.230                 0.335
        2048, 32      0.244         0.254                0.282                 0.336
        8192, 16      0.641         0.641                0.646                 1.161
        8192, 32      0.674         0.690                0.836                 1.162
        16384, 16     1.217         1.203                1.232                 2.273
        16384, 32     1.259         1.275                1.618                 2.284

    Without TMA, which is not measured, larger tiles would spill.
    """
    if use_tma:
        return 32, 64, 4, 3, 8
    return 16, 64, 4, 3 if tuning.device_traits(a).prefetches else 1, 8


def glu_low_rank_bwd(dh, a, b, t_g, b_g, t_u, b_u, dt_d, a_d, da, db, scaling, act):
    """Write da and db, and return dB_g, dB_u and dA_d, each in the dtype of its matrix.

    Args:
        dh, a, b: dh0, a0 and b0, (M, N), of one dtype.
        t_g, t_u, dt_d: (M, r) of that dtype.
        b_g, b_u: (N, r); a_d: (r, N), of any of `MATRIX_DTYPES`.
        da, db: contiguous; the memory of a and b, or other memory.
        scaling: s.

    M and N are not 0. The entries of a row are contiguous in all of them.
    """
    M, N = a.shape
    strides = tuple(map(_row_stride, (dh, a, b, t_g, b_g, t_u, b_u, dt_d, a_d)))
    ranks = b_g.shape[1], b_u.shape[1], a_d.shape[0]
    wide = dh, a, b
    block = _bwd_launch(a, True)[:2]
    descriptors = [tma_descriptor(x, block) for x in wide]
    use_tma = None not in descriptors
    key = *strides, M, N, *ranks, scaling, use_tma, act, a.dtype, a.device
    launches = _bwd_launches.get(key) or _bwd_launches.store(key, _prepare_bwd(a, *key))
    shape, launch, launch_sum = launches
    parts = a.new_empty(shape, dtype=torch.float32)
    launch(*(descriptors if use_tma else wide), t_g, b_g, t_u, b_u, dt_d, a_d, da, db, parts)
    d_b_g, d_b_u, d_a_d = (matrix.new_empty(matrix.shape) for matrix in (b_g, b_u, a_d))
    launch_sum(parts, d_b_g, d_b_u, d_a_d)
    return d_b_g, d_b_u, d_a_d


_bwd_launches = LaunchCache()


def _prepare_bwd(a, *key):
    """Return the shape of the parts, and the launches that fill it, and that add them up."""
    *strides, M, N, rank_g, rank_u, rank_d, scaling, use_tma, act, _, _ = key
    R = _padded(rank_g, rank_u, rank_d)
    block_m, block_n, warps, stages, groups = _bwd_launch(a, use_tma)
    rows_each = cdiv(M, groups * block_m) * block_m
    groups = cdiv(M, rows_each)
    grid = cdiv(N, block_n), groups
    ranks = rank_g, rank_u, rank_d
    scalars = *strides, M, N, *ranks, scaling, rows_each
    constants = dict(
        USE_TMA=use_tma,
        ACT=activation_function(act, a),
        R=R,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        num_warps=tuning.device_traits(a).num_warps(warps),
    )
    if use_tma:  # a launch with descriptors cannot be prepared

        def launch(*tensors):
            _bwd[grid](*tensors, *scalars, **constants)
    else:
        launch = prepare_launch(_bwd, grid, *scalars, **constants)
    block = 1024 // R
    sum_grid = cdiv(N, block), 3
    launch_sum = prepare_launch(
        _sum_parts, sum_grid, groups, N, *ranks, scaling, R=R, BLOCK=block, num_warps=4
    )
    return (3, groups, N, R), launch, launch_sum


@triton.jit
def _sum(
    parts_ptr,
    out_ptr,
    groups,
    N,
    rank,
    stride_n,
    stride_r,
    scaling,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    r = tl.arange(0, R)[None, :]
    mask = (n < N) & (r < rank)
    total = tl.zeros((BLOCK, R), dtype=tl.float32)
    part_ptrs = parts_ptr + n * R + r
    for _ in tl.range(0, groups, num_stages=4):
        total += tl.load(part_ptrs, mask=mask, other=0.0)
        part_ptrs += tl.cast(N, tl.int64) * R
    out_ptrs = out_ptr + n * stride_n + r * stride_r
    tl.store(out_ptrs, (total * scaling).to(out_ptr.dtype.element_ty), mask=mask)


@kernel
def _sum_parts(
    parts_ptr,
    dbg_ptr,
    dbu_ptr,
    dad_ptr,
    groups,
    N,
    rank_g,
    rank_u,
    rank_d,
    scaling,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the parts of `_bwd` in order: one of the three gradients, which are contiguous."""
    matrix = tl.program_id(1)
    size = tl.cast(groups, tl.int64) * N * R
    if matrix == 0:
        _sum(parts_ptr, dbg_ptr, groups, N, rank_g, rank_g, 1, 1.0, R, BLOCK)
    elif matrix == 1:
        _sum(parts_ptr + size, dbu_ptr, groups, N, rank_u, rank_u, 1, 1.0, R, BLOCK)
    else:
        _sum(parts_ptr + 2 * size, dad_ptr, groups, N, rank_d, 1, N, scaling, R, BLOCK)
