r"""The kernels of RMSNorm, of residual add + RMSNorm and of LayerNorm, and how they are launched.

    s = x + r, rounded to x's dtype (s = x without a residual r)
    μ = mean(s) for LayerNorm (CENTRED), else 0
    rstd = 1 / sqrt(mean((s - μ)²) + eps),   x̂ = (s - μ)·rstd
    y = x̂·(w + offset) + b

    m = dy·(w + offset):   dx = dr = rstd·(m - mean(m) [centred] - x̂·mean(m·x̂)) + ds
    dw = Σ_rows dy·x̂,   db = Σ_rows dy

The gradient ds of s, which comes from the skip connection, is added in the same kernel. With the
casting mode `LLAMA`, x̂ is rounded to x's dtype before it is multiplied with the weight, in y and
in dw. Everything else is computed in fp32 and rounded once."""

from __future__ import annotations

import torch

from liger_kernel.core import devices, tuning
from liger_kernel.core.kernel import LaunchCache, kernel, prepare_launch
from liger_kernel.core.op import custom_op, flatten_rows
from liger_kernel.core.reduce import new_partial_sums, sum_rows_pair
from liger_kernel.core.tile import cdiv, next_power_of_2, tl, triton

LLAMA = tl.constexpr(1)  # the index of "llama" in `rms_norm.CASTINGS`


@triton.jit
def broadcast_columns(n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the column offsets n (1, BLOCK_N) to load a weight with, for a block of BLOCK_M rows.

    For a narrow row they are broadcast to (BLOCK_M, BLOCK_N), so that each thread loads the weights
    that it multiplies. Otherwise Triton gives a narrow weight to other threads than those that hold
    x, and moves one of them, or even all of x, through shared memory."""
    return tl.broadcast_to(n, (BLOCK_M, BLOCK_N)) if BLOCK_N <= 256 else n


@triton.jit
def add_offset(w, offset):
    """Return w + offset in fp32.

    Without an offset (None), a rounded x̂ times w is a product of two bf16, rounded: one
    instruction instead of two."""
    w = w.to(tl.float32)
    return w if offset is None else w + offset


@triton.jit
def _load_sum(x_ptr, r_ptr, x_offsets, r_offsets, mask):
    """Load a block of s = x + r, in x's dtype."""
    s = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
    if r_ptr is not None:
        r = tl.load(r_ptr + r_offsets, mask=mask, other=0.0)
        s = (s.to(tl.float32) + r.to(tl.float32)).to(x_ptr.dtype.element_ty)
    return s


@kernel
def _fwd(
    x_ptr,
    r_ptr,
    w_ptr,
    b_ptr,
    s_ptr,
    y_ptr,
    stats_ptr,
    stride_x,
    stride_r,
    M,
    N,
    eps,
    offset,
    CASTING: tl.constexpr,
    CENTRED: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Normalise BLOCK_M rows.

    ONE_BLOCK: a row fits into one block and is read once; otherwise it is read twice."""
    # m (BLOCK_M, 1), n (1, BLOCK_N); s, y (BLOCK_M, BLOCK_N)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    mask = (m < M) & (n < N)
    s = _load_sum(x_ptr, r_ptr, m * stride_x + n, m * stride_r + n, mask)
    # load w while x is on its way; a wider w takes too many registers
    PRELOAD: tl.constexpr = ONE_BLOCK and BLOCK_N <= 4096
    if PRELOAD:
        w_columns = broadcast_columns(n, BLOCK_M, BLOCK_N)
        if w_ptr is not None:
            w = tl.load(w_ptr + w_columns, mask=w_columns < N, other=0.0)
        if b_ptr is not None:
            b = tl.load(b_ptr + w_columns, mask=w_columns < N, other=0.0)

    # the statistics: mean (BLOCK_M, 1) if CENTRED, sum_sq = Σ(s - mean)²
    f = s.to(tl.float32)
    if CENTRED:
        mean = tl.sum(f, axis=1, keep_dims=True) / tl.minimum(N, BLOCK_N)
        f = tl.where(mask, f - mean, 0.0)
    sum_sq = f * f
    if ONE_BLOCK:
        sum_sq = tl.sum(sum_sq, axis=1, keep_dims=True)
    else:
        if CENTRED:
            sum_sq = tl.sum(sum_sq, axis=1, keep_dims=True)
        for start in range(BLOCK_N, N, BLOCK_N):
            block_mask = (m < M) & (start + n < N)
            f = _load_sum(
                x_ptr, r_ptr, m * stride_x + start + n, m * stride_r + start + n, block_mask
            ).to(tl.float32)
            if CENTRED:  # Chan's formula: the mean and Σ(x - mean)² of both parts
                count = tl.minimum(N - start, BLOCK_N) * 1.0
                total_count = tl.minimum(N, start + BLOCK_N) * 1.0
                block_mean = tl.sum(f, axis=1, keep_dims=True) / count
                f = tl.where(block_mask, f - block_mean, 0.0)
                delta = block_mean - mean
                sum_sq += tl.sum(f * f, axis=1, keep_dims=True) + delta * delta * (
                    start * (count / total_count)
                )
                mean += delta * (count / total_count)
            else:
                sum_sq += f * f
        if not CENTRED:
            sum_sq = tl.sum(sum_sq, axis=1, keep_dims=True)
    rstd = tl.rsqrt(sum_sq / N + eps)
    tl.store(stats_ptr + m, rstd, mask=m < M)
    if CENTRED:
        tl.store(stats_ptr + M + m, mean, mask=m < M)

    # the output
    for start in range(0, BLOCK_N if ONE_BLOCK else N, BLOCK_N):
        mask = (m < M) & (start + n < N)
        if not ONE_BLOCK:
            s = _load_sum(x_ptr, r_ptr, m * stride_x + start + n, m * stride_r + start + n, mask)
        if r_ptr is not None:
            tl.store(s_ptr + m * N + start + n, s, mask=mask)
        y = s.to(tl.float32)
        if CENTRED:
            y -= mean
        y *= rstd
        if CASTING == LLAMA:
            y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
        if w_ptr is not None:
            if not PRELOAD:
                w = tl.load(w_ptr + start + n, mask=start + n < N, other=0.0)
            y *= add_offset(w, offset)
        if b_ptr is not None:
            if not PRELOAD:
                b = tl.load(b_ptr + start + n, mask=start + n < N, other=0.0)
            y += b.to(tl.float32)
        tl.store(y_ptr + m * N + start + n, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _bwd(
    dy_ptr,
    ds_ptr,
    s_ptr,
    w_ptr,
    stats_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    stride_dy,
    stride_ds,
    stride_s,
    M,
    N,
    offset,
    CASTING: tl.constexpr,
    CENTRED: tl.constexpr,
    COMPUTE_DX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Compute dx of every num_programs-th block of BLOCK_M rows, and one row of partial dw and db.

    With COMPUTE_DX a row is one block. Without, the second grid axis goes over the columns."""
    pid = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if COMPUTE_DX and w_ptr is not None:
        w = add_offset(tl.load(w_ptr + n, mask=n < N, other=0.0), offset)
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in tl.range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=NUM_STAGES):
        # dy, xhat, dx (BLOCK_M, BLOCK_N); rstd (BLOCK_M, 1)
        m = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        mask = (m < M) & (n < N)
        dy = tl.load(dy_ptr + m * stride_dy + n, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(stats_ptr + m, mask=m < M, other=0.0)
        xhat = tl.load(s_ptr + m * stride_s + n, mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            xhat = tl.where(mask, xhat - tl.load(stats_ptr + M + m, mask=m < M, other=0.0), 0.0)
        xhat *= rstd
        if COMPUTE_DX and ds_ptr is not None:
            ds = tl.load(ds_ptr + m * stride_ds + n, mask=mask, other=0.0)
        if dw_ptr is not None:
            if CASTING == LLAMA:
                dw += dy * xhat.to(s_ptr.dtype.element_ty).to(tl.float32)
            else:
                dw += dy * xhat
        if db_ptr is not None:
            db += dy
        if COMPUTE_DX:
            if w_ptr is not None:
                dy *= w
            dx = dy - xhat * (tl.sum(dy * xhat, axis=1, keep_dims=True) / N)
            if CENTRED:
                dx -= tl.sum(dy, axis=1, keep_dims=True) / N
            dx *= rstd
            if ds_ptr is not None:
                dx += ds.to(tl.float32)
            tl.store(dx_ptr + m * N + n, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dw_ptr is not None:
        dw = tl.sum(dw, axis=0, keep_dims=True)
        tl.store(dw_ptr + pid * N + n, dw.to(dw_ptr.dtype.element_ty), mask=n < N)
    if db_ptr is not None:
        db = tl.sum(db, axis=0, keep_dims=True)
        tl.store(db_ptr + pid * N + n, db.to(db_ptr.dtype.element_ty), mask=n < N)


@kernel
def _bwd_wide(
    dy_ptr,
    ds_ptr,
    s_ptr,
    w_ptr,
    stats_ptr,
    dx_ptr,
    stride_dy,
    stride_ds,
    stride_s,
    M,
    N,
    offset,
    CENTRED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute dx of one row, which is read twice: first for mean(m·x̂) and mean(m), then for dx."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    rstd = tl.load(stats_ptr + m)
    mean = 0.0
    mean_dy_xhat = tl.zeros((), dtype=tl.float32)
    mean_dy = tl.zeros((), dtype=tl.float32)
    if CENTRED:
        mean = tl.load(stats_ptr + M + m)
    for read in tl.static_range(2):
        dot = tl.zeros((BLOCK_N,), dtype=tl.float32)
        total = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for start in range(0, N, BLOCK_N):
            mask = start + n < N
            dy = tl.load(dy_ptr + m * stride_dy + start + n, mask=mask, other=0.0).to(tl.float32)
            xhat = tl.load(s_ptr + m * stride_s + start + n, mask=mask, other=0.0).to(tl.float32)
            xhat = tl.where(mask, xhat - mean, 0.0) * rstd
            if w_ptr is not None:
                dy *= add_offset(tl.load(w_ptr + start + n, mask=mask, other=0.0), offset)
            if read == 0:
                dot += dy * xhat
                if CENTRED:
                    total += dy
            else:
                dx = rstd * (dy - mean_dy - xhat * mean_dy_xhat)
                if ds_ptr is not None:
                    dx += tl.load(ds_ptr + m * stride_ds + start + n, mask=mask, other=0.0).to(
                        tl.float32
                    )
                tl.store(dx_ptr + m * N + start + n, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        mean_dy_xhat = tl.sum(dot) / N
        mean_dy = tl.sum(total) / N


MAX_BLOCK_N = 16384  # a wider row does not fit into registers and is processed in blocks


def _fwd_candidates(x, numbers, N, centred):
    block_m, block_n, num_warps = numbers
    rows = tuning.powers_of_2_near(block_m, 1, 64) if block_n >= N else (block_m,)
    warps = tuning.powers_of_2_near(num_warps, 1, 16)
    return tuning.neighbors(numbers, {0: rows, 2: warps}, _fits_registers)


def _fits_registers(block_m, block_n, num_warps, *_):
    return block_m * block_n <= 4096 * num_warps


@tuning.tunable("norm_forward", _fwd_candidates)
def _choose_fwd_launch(x, N, centred):
    """Return (BLOCK_M, BLOCK_N, num_warps) of the forward kernel.

    Measured on H200, bf16, in TB/s of the bytes that must move. RMSNorm, 2026-11-20: 8192x2048 3.17
    (4 warps), 8192x4096 3.64 (8; with 4 3.58, with 16 3.04), 16384x8192 4.06 (8; with 4 4.09, with
    16 3.84), 65536x128 2.59 (8 rows, 2 warps; 16 rows 2.55). LayerNorm, which needs two sums,
    2026-11-21: 8192x2048 3.11 (2 rows, 4 warps; 1 row 3.03), 8192x4096 3.55 (2 rows, 4 warps;
    1 row, 8 warps 3.36), 16384x8192 3.95 (1 row, 4 warps; with 8 3.70).
    """
    block_n = min(next_power_of_2(N), MAX_BLOCK_N)
    block_m = max(2 if centred and block_n <= 4096 else 1, 1024 // block_n)
    max_warps = 4 if centred and block_n <= 8192 else 8
    num_warps = min(max(block_m * block_n // 512, 1), max_warps)
    return block_m, block_n, tuning.device_traits(x).num_warps(num_warps)


def _bwd_candidates(s, numbers, N, heavy, streams):
    block_m, block_n, num_warps, programs_per_sm = numbers
    rows = tuning.powers_of_2_near(block_m, 1, 64) if block_n >= N else (block_m,)
    places = {0: rows, 2: tuning.powers_of_2_near(num_warps, 4, 16), 3: (1, 2, 3, 4)}
    return tuning.neighbors(numbers, places, _fits_registers)


@tuning.tunable("norm_backward", _bwd_candidates)
def _choose_bwd_launch(s, N, heavy, streams):
    """Return (BLOCK_M, BLOCK_N, num_warps, programs per multiprocessor) of the backward kernel.

    ``heavy``: LayerNorm in fp32. ``streams``: the number of tensors that an iteration loads a block
    of, 2 or 3.

    Measured on H200, bf16, 2026-11-21, in TB/s. RMSNorm with three stages
    (`devices.choose_num_stages`): 8192x2048 2.76, 8192x4096 3.33, 65536x128 2.12. With half the
    rows and twice the programs 2.60, 3.25, 1.93, and with one stage as well 2.33, 2.79, 1.76.
    LayerNorm 8192x4096 3.09 (else 3.00), 16384x4096 3.51 (else 3.47).
    """
    block_n = min(next_power_of_2(N), MAX_BLOCK_N)
    device = tuning.device_traits(s)
    row_bytes = streams * block_n * s.element_size()
    block_m = device.block_rows(max(1, (4096 if heavy else 8192) // block_n), row_bytes)
    block_bytes = block_m * row_bytes
    num_stages = devices.choose_num_stages(block_bytes, s)
    programs_per_sm = device.programs_per_processor(block_bytes, num_stages)
    num_warps = 8 if block_n <= (2048 if heavy else 8192) else 16
    return block_m, block_n, num_warps, programs_per_sm


def _empty(t):
    """A contiguous tensor of t's shape. `empty_like` is a microsecond faster, but keeps strides."""
    return torch.empty_like(t) if t.is_contiguous() else t.new_empty(t.shape)


def _empty_outputs(x, r, w, b, eps, offset, casting, centred):
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    stats = x.new_empty(2 * rows if centred else rows, dtype=torch.float32)
    return _empty(x), None if r is None else _empty(x), stats


def _empty_gradients(dy, ds, s, w, b, stats, offset, casting, centred, need_dx, need_dw, need_db):
    return (
        _empty(s) if need_dx else None,
        _empty(w) if need_dw else None,
        _empty(b) if need_db else None,
    )


def as_rows(t):
    """Return t (..., N) as the kernels read it: itself if contiguous, else `flatten_rows` of it.

    To return a contiguous tensor as it is saves a microsecond."""
    return t if t.is_contiguous() else flatten_rows(t)


def _row_stride(t):
    """The stride between the rows of a tensor from `as_rows`."""
    return t.stride(-2) if t.dim() == 2 else t.shape[-1]


@custom_op("norm", _empty_outputs)
def norm_fwd(
    x: torch.Tensor,
    r: torch.Tensor | None,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    eps: float,
    offset: float,
    casting: int,
    centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise x, or x + r. Both are from `as_rows`.

    Returns y and s like x (s: None without r), and the statistics in fp32: rstd (M,), followed by
    mean (M,) if centred."""
    y, s, stats = _empty_outputs(x, r, w, b, eps, offset, casting, centred)
    N = x.shape[-1]
    M = x.numel() // N if N else 0
    if M:
        key = (
            M,
            N,
            _row_stride(x),
            0 if r is None else _row_stride(r),
            eps,
            offset,
            casting,
            centred,
            x.dtype,
            x.device,
        )
        launch = _fwd_launches.get(key) or _fwd_launches.store(key, _prepare_fwd(x, *key))
        launch(x, r, w, b, s, y, stats)
    return y, s, stats


_fwd_launches = LaunchCache()
_bwd_launches = LaunchCache()


def _prepare_fwd(x, M, N, stride_x, stride_r, eps, offset, casting, centred, *_):
    block_m, block_n, num_warps = _choose_fwd_launch(x, N, centred)
    return prepare_launch(
        _fwd,
        (cdiv(M, block_m),),
        stride_x,
        stride_r,
        M,
        N,
        eps,
        offset or None,
        CASTING=casting,
        CENTRED=centred,
        ONE_BLOCK=block_n >= N,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=devices.limit_warps(num_warps, x),
    )


@custom_op("norm_backward", _empty_gradients)
def norm_bwd(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    stats: torch.Tensor,
    offset: float,
    casting: int,
    centred: bool,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx like s, dw and db (N,); None for a gradient that is not needed.

    dy, ds and s are from `as_rows`, stats is from `norm_fwd`."""
    dx, dw, db = _empty_gradients(
        dy, ds, s, w, b, stats, offset, casting, centred, need_dx, need_dw, need_db
    )
    N = s.shape[-1]
    M = s.numel() // N if N else 0
    key = (
        M,
        N,
        _row_stride(dy),
        0 if ds is None else _row_stride(ds),
        _row_stride(s),
        offset,
        casting,
        centred,
        need_dx,
        need_dw or need_db,
        ds is None,
        s.dtype,
        s.device,
    )
    launches = _bwd_launches.get(key) or _bwd_launches.store(key, _prepare_bwd(s, *key))
    launch_wide, launch, num_programs = launches
    if launch_wide is not None:
        launch_wide(dy, ds, s, w, stats, dx)
    if launch is not None:
        partial_dw = new_partial_sums(dw, num_programs)
        partial_db = new_partial_sums(db, num_programs)
        launch(dy, ds, s, w, stats, dx, partial_dw, partial_db)
        if num_programs > 1:
            sum_rows_pair(partial_dw, partial_db, dw, db)
    return dx, dw, db


def _prepare_bwd(
    s, M, N, stride_dy, stride_ds, stride_s, offset, casting, centred, need_dx, need_sums, no_ds, *_
):
    """Return (launch of `_bwd_wide`, launch of `_bwd`, number of rows of the partial dw and db).

    `_bwd_wide` computes dx of rows that are wider than a block. `_bwd` computes dx of other rows,
    and the partial sums of dw and db. A launch that is not needed is None."""
    streams = 2 if no_ds else 3
    heavy = centred and s.element_size() == 4
    block_m, block_n, num_warps, programs_per_sm = _choose_bwd_launch(s, N, heavy, streams)
    num_warps = devices.limit_warps(num_warps, s)
    one_block = block_n >= N
    scalars = stride_dy, stride_ds, stride_s, M, N, offset or None
    launch_wide = launch = None
    num_programs = 1
    if need_dx and M and not one_block:
        launch_wide = prepare_launch(
            _bwd_wide, (M,), *scalars, CENTRED=centred, BLOCK_N=block_n, num_warps=num_warps
        )
    if not one_block:  # dw needs no whole rows: take a block that fits into registers
        block_n = 4096
        num_warps = devices.limit_warps(8, s)
    if N and (need_sums or (need_dx and M and one_block)):
        max_programs = programs_per_sm * devices.multiprocessors(s)
        num_programs = max(1, min(cdiv(M, block_m), max_programs))
        loaded_bytes = streams * block_m * block_n * s.element_size()
        launch = prepare_launch(
            _bwd,
            (num_programs, cdiv(N, block_n)),
            *scalars,
            CASTING=casting,
            CENTRED=centred,
            COMPUTE_DX=need_dx and one_block,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            NUM_STAGES=devices.choose_num_stages(loaded_bytes, s),
            num_warps=num_warps,
        )
    return launch_wide, launch, num_programs


def reshape_output(t, shape):
    """Return t in the caller's shape.

    To autograd it is no view, so the caller may write to it in place."""
    return t if t.shape == shape else torch.ops.aten._unsafe_view(t, shape)
