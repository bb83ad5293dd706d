r"""Normalisation of rows: the kernels of RMSNorm, residual add + RMSNorm and LayerNorm.

    s = x + r, rounded to x's dtype (s = x without a residual r)
    μ = mean(s) for LayerNorm (CENTRED), else 0;   rstd = 1 / sqrt(mean((s - μ)²) + eps),   x̂ = (s - μ)·rstd
    y = x̂·(w + offset) + b

    m = dy·(w + offset):   dx = dr = rstd·(m - mean(m) [centred] - x̂·mean(m·x̂)) + ds
    dw = Σ_rows dy·x̂,   db = Σ_rows dy

The gradient ds of s, which comes from the skip connection, is added in the same kernel. With the
casting mode `LLAMA`, x̂ is rounded to x's dtype before it is multiplied with the weight, in y and
in dw. Everything else is computed in fp32 and rounded once."""

from __future__ import annotations

import torch

from liger_kernel.core import devices, tuning
from liger_kernel.core.kernel import LaunchCache, kernel, prepared
from liger_kernel.core.op import custom_op, matrix_rows
from liger_kernel.core.reduce import partial, sum_both
from liger_kernel.core.tile import cdiv, next_power_of_2, tl, triton

LLAMA = tl.constexpr(1)


@triton.jit
def across(n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where BLOCK_M rows find a weight, from the columns n (1, BLOCK_N): narrow rows have it loaded
    for each row.

    A thread then loads what it multiplies. Else Triton gives a narrow weight to other threads than
    those with x, and moves one of them, or even all of x, through shared memory."""
    return tl.broadcast_to(n, (BLOCK_M, BLOCK_N)) if BLOCK_N <= 256 else n


@triton.jit
def with_offset(w, offset):
    """w + offset. Without an offset a rounded x̂ times w is a product of two bf16, rounded: one
    instruction for two."""
    w = w.to(tl.float32)
    return w if offset is None else w + offset


@triton.jit
def _stream(x_ptr, r_ptr, x_at, r_at, mask):
    """A block of s = x + r, in x's dtype."""
    s = tl.load(x_ptr + x_at, mask=mask, other=0.0)
    if r_ptr is not None:
        r = tl.load(r_ptr + r_at, mask=mask, other=0.0)
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
    CAST: tl.constexpr,
    CENTRED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program normalises BLOCK_M rows. WHOLE: a row is one block and read once; otherwise it is
    read twice."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    mask = (m < M) & (n < N)
    s = _stream(x_ptr, r_ptr, m * stride_x + n, m * stride_r + n, mask)
    ahead: tl.constexpr = (
        WHOLE and BLOCK_N <= 4096
    )  # load w while x is loaded; a wider w takes too many registers
    if ahead:
        every = across(n, BLOCK_M, BLOCK_N)
        if w_ptr is not None:
            w = tl.load(w_ptr + every, mask=every < N, other=0.0)
        if b_ptr is not None:
            b = tl.load(b_ptr + every, mask=every < N, other=0.0)
    f = s.to(tl.float32)
    if CENTRED:
        mean = tl.sum(f, axis=1, keep_dims=True) / tl.minimum(N, BLOCK_N)
        f = tl.where(mask, f - mean, 0.0)
    square = f * f
    if WHOLE:
        square = tl.sum(square, axis=1, keep_dims=True)
    else:
        if CENTRED:
            square = tl.sum(square, axis=1, keep_dims=True)
        for start in range(BLOCK_N, N, BLOCK_N):
            more = (m < M) & (start + n < N)
            f = _stream(x_ptr, r_ptr, m * stride_x + start + n, m * stride_r + start + n, more).to(
                tl.float32
            )
            if CENTRED:  # Chan's formula: the mean and Σ(x - mean)² of both parts
                count, whole = (
                    tl.minimum(N - start, BLOCK_N) * 1.0,
                    tl.minimum(N, start + BLOCK_N) * 1.0,
                )
                its_mean = tl.sum(f, axis=1, keep_dims=True) / count
                f = tl.where(more, f - its_mean, 0.0)
                apart = its_mean - mean
                square += tl.sum(f * f, axis=1, keep_dims=True) + apart * apart * (
                    start * (count / whole)
                )
                mean += apart * (count / whole)
            else:
                square += f * f
        if not CENTRED:
            square = tl.sum(square, axis=1, keep_dims=True)
    rstd = tl.rsqrt(square / N + eps)
    tl.store(stats_ptr + m, rstd, mask=m < M)
    if CENTRED:
        tl.store(stats_ptr + M + m, mean, mask=m < M)
    for start in range(0, BLOCK_N if WHOLE else N, BLOCK_N):
        mask = (m < M) & (start + n < N)
        if not WHOLE:
            s = _stream(x_ptr, r_ptr, m * stride_x + start + n, m * stride_r + start + n, mask)
        if r_ptr is not None:
            tl.store(s_ptr + m * N + start + n, s, mask=mask)
        y = s.to(tl.float32)
        if CENTRED:
            y -= mean
        y *= rstd
        if CAST == LLAMA:
            y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
        if w_ptr is not None:
            if not ahead:
                w = tl.load(w_ptr + start + n, mask=start + n < N, other=0.0)
            y *= with_offset(w, offset)
        if b_ptr is not None:
            if not ahead:
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
    CAST: tl.constexpr,
    CENTRED: tl.constexpr,
    DX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program processes every num_programs-th block of BLOCK_M rows, and writes one row of the
    partial dw and db.

    With DX a row is one block. Without, the second grid axis goes over the columns.
    """
    pid = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if DX and w_ptr is not None:
        w = with_offset(tl.load(w_ptr + n, mask=n < N, other=0.0), offset)
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in tl.range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        m = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        mask = (m < M) & (n < N)
        dy = tl.load(dy_ptr + m * stride_dy + n, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(stats_ptr + m, mask=m < M, other=0.0)
        xhat = tl.load(s_ptr + m * stride_s + n, mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            xhat = tl.where(mask, xhat - tl.load(stats_ptr + M + m, mask=m < M, other=0.0), 0.0)
        xhat *= rstd
        if DX and ds_ptr is not None:
            ds = tl.load(ds_ptr + m * stride_ds + n, mask=mask, other=0.0)
        if dw_ptr is not None:
            if CAST == LLAMA:
                dw += dy * xhat.to(s_ptr.dtype.element_ty).to(tl.float32)
            else:
                dw += dy * xhat
        if db_ptr is not None:
            db += dy
        if DX:
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
    """One program: dx of one row, which is read twice."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    rstd = tl.load(stats_ptr + m)
    mean, along, even = 0.0, tl.zeros((), dtype=tl.float32), tl.zeros((), dtype=tl.float32)
    if CENTRED:
        mean = tl.load(stats_ptr + M + m)
    for twice in tl.static_range(2):
        dot = tl.zeros((BLOCK_N,), dtype=tl.float32)
        total = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for start in range(0, N, BLOCK_N):
            mask = start + n < N
            dy = tl.load(dy_ptr + m * stride_dy + start + n, mask=mask, other=0.0).to(tl.float32)
            xhat = tl.load(s_ptr + m * stride_s + start + n, mask=mask, other=0.0).to(tl.float32)
            xhat = tl.where(mask, xhat - mean, 0.0) * rstd
            if w_ptr is not None:
                dy *= with_offset(tl.load(w_ptr + start + n, mask=mask, other=0.0), offset)
            if twice == 0:
                dot += dy * xhat
                if CENTRED:
                    total += dy
            else:
                dx = rstd * (dy - even - xhat * along)
                if ds_ptr is not None:
                    dx += tl.load(ds_ptr + m * stride_ds + start + n, mask=mask, other=0.0).to(
                        tl.float32
                    )
                tl.store(dx_ptr + m * N + start + n, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        along, even = tl.sum(dot) / N, tl.sum(total) / N


WIDE = 16384  # columns; a wider row does not fit into registers and is processed in blocks


def _others(x, numbers, N, centred):
    rows, columns, warps = numbers
    rows = tuning.near(rows, 1, 64) if columns >= N else (rows,)
    return tuning.around(numbers, {0: rows, 2: tuning.near(warps, 1, 16)}, _in_registers)


def _in_registers(rows, columns, warps, *_):
    return rows * columns <= 4096 * warps


@tuning.tuned("norm_forward", _others)
def _launch(x, N, centred):
    """(rows, columns, warps) of a forward program's block.

    Measured on H200, bf16, in TB/s of the bytes that must move. RMSNorm, 2026-11-20: 8192x2048 3.17
    (4 warps), 8192x4096 3.64 (8; with 4 3.58, with 16 3.04), 16384x8192 4.06 (8; with 4 4.09, with
    16 3.84), 65536x128 2.59 (8 rows, 2 warps; 16 rows 2.55). LayerNorm, which needs two sums,
    2026-11-21: 8192x2048 3.11 (2 rows, 4 warps; 1 row
    3.03), 8192x4096 3.55 (2 rows, 4 warps; 1 row, 8 warps 3.36), 16384x8192 3.95 (1 row, 4 warps;
    with 8 3.70).
    """
    columns = min(next_power_of_2(N), WIDE)
    rows = max(2 if centred and columns <= 4096 else 1, 1024 // columns)
    warps = min(max(rows * columns // 512, 1), 4 if centred and columns <= 8192 else 8)
    return rows, columns, tuning.traits(x).warps(warps)


def _others_bwd(s, numbers, N, heavy, streams):
    rows, columns, warps, resident = numbers
    rows = tuning.near(rows, 1, 64) if columns >= N else (rows,)
    places = {0: rows, 2: tuning.near(warps, 4, 16), 3: (1, 2, 3, 4)}
    return tuning.around(numbers, places, _in_registers)


@tuning.tuned("norm_backward", _others_bwd)
def _launch_bwd(s, N, heavy, streams):
    """(rows, columns, warps, programs per multiprocessor) of a backward program. ``heavy``:
    LayerNorm in fp32.

    An iteration loads as many elements of each of the ``streams``.

    Measured on H200, bf16, 2026-11-21, in TB/s. RMSNorm with three stages (`devices.stages`):
    8192x2048 2.76, 8192x4096
    3.33, 65536x128 2.12. With half the rows and twice the programs 2.60, 3.25, 1.93, and with one
    stage as well 2.33,
    2.79, 1.76. LayerNorm 8192x4096 3.09 (else 3.00), 16384x4096 3.51 (else 3.47).
    """
    columns = min(next_power_of_2(N), WIDE)
    device, row = tuning.traits(s), streams * columns * s.element_size()
    rows = device.rows(max(1, (4096 if heavy else 8192) // columns), row)
    resident = device.programs(rows * row, devices.stages(rows * row, s))
    return rows, columns, 8 if columns <= (2048 if heavy else 8192) else 16, resident


def _empty(t):
    """A contiguous tensor of t's shape. `empty_like` is a microsecond faster, but keeps strides."""
    return torch.empty_like(t) if t.is_contiguous() else t.new_empty(t.shape)


def _outputs(x, r, w, b, eps, offset, cast, centred):
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    stats = x.new_empty(2 * rows if centred else rows, dtype=torch.float32)
    return _empty(x), None if r is None else _empty(x), stats


def _gradients(dy, ds, s, w, b, stats, offset, cast, centred, need_dx, need_dw, need_db):
    return (
        _empty(s) if need_dx else None,
        _empty(w) if need_dw else None,
        _empty(b) if need_db else None,
    )


def rows(t):
    """What the kernels read: t (..., N) itself if it is contiguous, which saves a microsecond, else
    `matrix_rows`."""
    return t if t.is_contiguous() else matrix_rows(t)


def _stride(t):
    """From a row to the next one, of `rows`."""
    return t.stride(-2) if t.dim() == 2 else t.shape[-1]


@custom_op("norm", _outputs)
def norm_fwd(
    x: torch.Tensor,
    r: torch.Tensor | None,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    eps: float,
    offset: float,
    cast: int,
    centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, r: `rows` -> y, s like x (s: None without r), and rstd (M,), fp32, followed by mean (M,)
    if centred."""
    y, s, stats = _outputs(x, r, w, b, eps, offset, cast, centred)
    N = x.shape[-1]
    M = x.numel() // N if N else 0
    if M:
        key = (
            M,
            N,
            _stride(x),
            0 if r is None else _stride(r),
            eps,
            offset,
            cast,
            centred,
            x.dtype,
            x.device,
        )
        (_forwards.get(key) or _forwards.add(key, _prepared_fwd(x, *key)))(x, r, w, b, s, y, stats)
    return y, s, stats


_forwards, _backwards = LaunchCache(), LaunchCache()


def _prepared_fwd(x, M, N, stride_x, stride_r, eps, offset, cast, centred, *_):
    block, columns, warps = _launch(x, N, centred)
    return prepared(
        _fwd,
        (cdiv(M, block),),
        stride_x,
        stride_r,
        M,
        N,
        eps,
        offset or None,
        CAST=cast,
        CENTRED=centred,
        WHOLE=columns >= N,
        BLOCK_M=block,
        BLOCK_N=columns,
        num_warps=devices.warps(warps, x),
    )


@custom_op("norm_backward", _gradients)
def norm_bwd(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    stats: torch.Tensor,
    offset: float,
    cast: int,
    centred: bool,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dy, ds and s are `rows` -> dx like s, dw and db (N,). What is not needed is None."""
    dx, dw, db = _gradients(
        dy, ds, s, w, b, stats, offset, cast, centred, need_dx, need_dw, need_db
    )
    N = s.shape[-1]
    M = s.numel() // N if N else 0
    strides = _stride(dy), 0 if ds is None else _stride(ds), _stride(s)
    key = (
        M,
        N,
        *strides,
        offset,
        cast,
        centred,
        need_dx,
        need_dw or need_db,
        ds is None,
        s.dtype,
        s.device,
    )
    wide, narrow, programs = _backwards.get(key) or _backwards.add(key, _prepared_bwd(s, *key))
    if wide is not None:
        wide(dy, ds, s, w, stats, dx)
    if narrow is not None:
        part_w, part_b = partial(dw, programs), partial(db, programs)
        narrow(dy, ds, s, w, stats, dx, part_w, part_b)
        if programs > 1:
            sum_both(part_w, part_b, dw, db)
    return dx, dw, db


def _prepared_bwd(
    s, M, N, stride_dy, stride_ds, stride_s, offset, cast, centred, need_dx, need_sums, alone, *_
):
    """-> the launch for dx of rows that are wider than a block, the one for dx and the partial sums
    of dw and db, and the number of these; None for a launch that is not needed."""
    streams = 2 if alone else 3
    block, columns, warps, resident = _launch_bwd(s, N, centred and s.element_size() == 4, streams)
    warps, whole, wide, narrow, programs = devices.warps(warps, s), columns >= N, None, None, 1
    numbers = stride_dy, stride_ds, stride_s, M, N, offset or None
    if need_dx and M and not whole:
        wide = prepared(
            _bwd_wide, (M,), *numbers, CENTRED=centred, BLOCK_N=columns, num_warps=warps
        )
    if not whole:
        columns, warps = (
            4096,
            devices.warps(8, s),
        )  # dw needs no whole rows: take a block that fits into registers
    if N and (need_sums or (need_dx and M and whole)):
        programs = max(1, min(cdiv(M, block), resident * devices.multiprocessors(s)))
        stages = devices.stages(streams * block * columns * s.element_size(), s)
        narrow = prepared(
            _bwd,
            (programs, cdiv(N, columns)),
            *numbers,
            CAST=cast,
            CENTRED=centred,
            DX=need_dx and whole,
            BLOCK_M=block,
            BLOCK_N=columns,
            STAGES=stages,
            num_warps=warps,
        )
    return wide, narrow, programs


def shaped(t, shape):
    """t in the caller's shape. To autograd it is no view, so the caller may write to it in
    place."""
    return t if t.shape == shape else torch.ops.aten._unsafe_view(t, shape)
