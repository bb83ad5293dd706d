r"""RMSNorm of rows that a second tensor multiplies: the kernels of gated and of modulated RMSNorm.

    f = act(g), or 1 + g without an activation;   u = x·f if BEFORE, else x
    rstd = 1 / sqrt(mean(u²) + eps),   x̂ = u·rstd,   v = x̂·(w + offset)
    y = v if BEFORE, else v·f + b

    e = dy if BEFORE, else dy·f;   m = e·(w + offset);   du = rstd·(m - x̂·mean(m·x̂))
    dw = Σ_rows e·x̂,   db = Σ_T dy
    dx = du·f,  dg = Σ_T du·x·f'   if BEFORE;   dx = du,  dg = Σ_T dy·v·f'   else

A row of g and b belongs to T rows of x, and the sums Σ_T go over these. The means go over a row, or
over each of its C groups of N columns.

Everything is computed in fp32 and rounded once, but for what PyTorch code rounds to x's dtype: with
the casting mode `LLAMA`, x̂ is rounded before it is multiplied with the weight, in y and in dw;
with ROUND, so is v, and v·f before b is added. Where dtypes differ, PyTorch code promotes, and
nothing is rounded. 1 + g is rounded to g's dtype."""

from __future__ import annotations

import functools

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import custom_op
from liger_kernel.core.reduce import partial, sum_rows
from liger_kernel.core.tile import cdiv, next_power_of_2, read, sigmoid, silu, tl, triton
from liger_kernel.ops.norm.rows import LLAMA, across, with_offset


@triton.jit
def _silu(x):
    """silu and its slope for 16 bits, whose rounding is a hundred times the error.

    In 6 instructions on sm_90 for 16 of `silu`: exp2 and rsqrt are one each, exp six, a division
    eight."""
    r = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    p = r * r
    f = x * p
    return f, p + f * (1.0 - p)


GATES = {"silu": silu, "sigmoid": sigmoid, None: None}


def _gate(act, x, g):
    """What computes f and f'."""
    return _silu if act == "silu" and x.element_size() == g.element_size() == 2 else GATES[act]


@triton.jit
def _factor(g_ptr, at, mask, ACT: tl.constexpr):
    """-> f and f'"""
    g = read(g_ptr, at, mask)
    if ACT is None:
        f, slope = (1.0 + g).to(g_ptr.dtype.element_ty).to(tl.float32), 1.0
    else:
        f, slope = ACT(g)
    return f, slope


@triton.jit
def _weighted(xhat, w, x_ptr, CAST: tl.constexpr, ROUND: tl.constexpr):
    """-> x̂ as it is multiplied with w, the weight and the offset (or None), and v"""
    if CAST == LLAMA:
        xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
    v = xhat
    if w is not None:
        v *= w
    if ROUND:
        v = v.to(x_ptr.dtype.element_ty).to(tl.float32)
    return xhat, v


@kernel
def _fwd(
    x_ptr,
    g_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    rstd_ptr,
    stride_x,
    stride_g,
    stride_b,
    M,
    T,
    N,
    eps,
    offset,
    ACT: tl.constexpr,
    BEFORE: tl.constexpr,
    CAST: tl.constexpr,
    ROUND: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: a group of BLOCK_M rows. WHOLE: it is one block and read once; otherwise it is
    read twice."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    group, groups = tl.program_id(1), tl.num_programs(1)
    n = tl.arange(0, BLOCK_N)[None, :]
    x_row, g_row, b_row = m * stride_x + group * N, m // T * stride_g + group * N, m // T * stride_b
    mask = (m < M) & (n < N)
    u = read(x_ptr, x_row + n, mask)
    if WHOLE or BEFORE:
        f, _ = _factor(g_ptr, g_row + n, mask, ACT)
    if BEFORE:
        u *= f
    square = u * u
    if not WHOLE:
        for start in range(BLOCK_N, N, BLOCK_N):
            mask = (m < M) & (start + n < N)
            u = read(x_ptr, x_row + start + n, mask)
            if BEFORE:
                f, _ = _factor(g_ptr, g_row + start + n, mask, ACT)
                u *= f
            square += u * u
    rstd = tl.rsqrt(tl.sum(square, axis=1, keep_dims=True) / N + eps)
    tl.store(rstd_ptr + m * groups + group, rstd, mask=m < M)
    for start in range(0, BLOCK_N if WHOLE else N, BLOCK_N):
        mask = (m < M) & (start + n < N)
        if not WHOLE:
            u = read(x_ptr, x_row + start + n, mask)
            f, _ = _factor(g_ptr, g_row + start + n, mask, ACT)
            if BEFORE:
                u *= f
        w = None
        if w_ptr is not None:
            every = start + across(n, BLOCK_M, BLOCK_N)
            w = with_offset(read(w_ptr, group * N + every, every < N), offset)
        xhat, y = _weighted(u * rstd, w, x_ptr, CAST, ROUND)
        if not BEFORE:
            y *= f
        if b_ptr is not None:
            if ROUND and g_ptr.dtype.element_ty == y_ptr.dtype.element_ty:
                y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
            y += read(b_ptr, b_row + start + n, mask)
        tl.store(
            y_ptr + (m * groups + group) * N + start + n, y.to(y_ptr.dtype.element_ty), mask=mask
        )


@kernel
def _dots(
    dy_ptr,
    x_ptr,
    g_ptr,
    w_ptr,
    rstd_ptr,
    dot_ptr,
    stride_dy,
    stride_x,
    stride_g,
    T,
    N,
    offset,
    ACT: tl.constexpr,
    BEFORE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: mean(m·x̂) of one group of a row."""
    m, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    rstd = tl.load(rstd_ptr + m * groups + group)
    dot = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        at, mask = group * N + n, n < N
        f, _ = _factor(g_ptr, m // T * stride_g + at, mask, ACT)  # of u or of e
        product = (
            read(dy_ptr, m * stride_dy + at, mask)
            * f
            * (read(x_ptr, m * stride_x + at, mask) * rstd)
        )
        if w_ptr is not None:
            product *= with_offset(read(w_ptr, at, mask), offset)
        dot += product
    tl.store(dot_ptr + m * groups + group, tl.sum(dot) / N)


@kernel
def _bwd(
    dy_ptr,
    x_ptr,
    g_ptr,
    w_ptr,
    rstd_ptr,
    dot_ptr,
    dx_ptr,
    dg_ptr,
    dw_ptr,
    db_ptr,
    stride_dy,
    stride_x,
    stride_g,
    G,
    T,
    N,
    SPLIT,
    offset,
    ACT: tl.constexpr,
    BEFORE: tl.constexpr,
    SHARED: tl.constexpr,
    CAST: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Columns of one group, in G times T rows of x. Each row has one of g; or, SHARED, T rows have
    one.

    SPLIT programs share T rows, and write a row each of the partial dg and db, if those are sums.
    Each program also writes a row of the partial dw. A group is one block; or mean(m·x̂) is in
    ``dot``, and the third grid axis goes over the columns."""
    pid, group, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    column = group * N + n
    w = None
    if w_ptr is not None:
        w = with_offset(read(w_ptr, column, n < N), offset)
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for shared in tl.range(pid // SPLIT, G, tl.num_programs(0) // SPLIT):
        first = tl.cast(shared, tl.int64) * T
        if SHARED:
            f, slope = _factor(g_ptr, tl.cast(shared, tl.int64) * stride_g + column, n < N, ACT)
        dg = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        db = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for block in tl.range(pid % SPLIT, tl.cdiv(T, BLOCK_M), SPLIT, num_stages=STAGES):
            t = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
            m = first + t
            mask = (t < T) & (n < N)
            at = m * groups * N + column
            dy = read(dy_ptr, m * stride_dy + column, mask)
            x = read(x_ptr, m * stride_x + column, mask)
            rstd = read(rstd_ptr, m * groups + group, t < T)
            if not SHARED:
                f, slope = _factor(g_ptr, m * stride_g + column, mask, ACT)
            if BEFORE:
                xhat, e = x * f * rstd, dy
            else:
                xhat, e = x * rstd, dy * f
            rounded, v = _weighted(xhat, w, x_ptr, CAST, ROUND)
            dw += e * rounded
            change = dy * v  # of f
            if (
                not BEFORE and not SHARED and dg_ptr is not None
            ):  # before the mean: registers are free again
                tl.store(dg_ptr + at, (change * slope).to(dg_ptr.dtype.element_ty), mask=mask)
            if dx_ptr is not None or BEFORE:
                if w_ptr is not None:
                    e *= w
                if dot_ptr is None:
                    dot = tl.sum(e * xhat, axis=1, keep_dims=True) / N
                else:
                    dot = read(dot_ptr, m * groups + group, t < T)
                dx = rstd * (e - xhat * dot)
                if BEFORE:
                    change = dx * x
                    dx *= f
                if dx_ptr is not None:
                    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if SHARED:
                dg += change * slope
                db += dy
            else:
                if BEFORE and dg_ptr is not None:
                    tl.store(dg_ptr + at, (change * slope).to(dg_ptr.dtype.element_ty), mask=mask)
                if db_ptr is not None:
                    tl.store(db_ptr + at, dy.to(db_ptr.dtype.element_ty), mask=mask)
        if SHARED:
            at = (tl.cast(pid % SPLIT, tl.int64) * G + shared) * N + n
            if dg_ptr is not None:
                dg = tl.sum(dg, axis=0, keep_dims=True)
                tl.store(dg_ptr + at, dg.to(dg_ptr.dtype.element_ty), mask=n < N)
            if db_ptr is not None:
                db = tl.sum(db, axis=0, keep_dims=True)
                tl.store(db_ptr + at, db.to(db_ptr.dtype.element_ty), mask=n < N)
    if dw_ptr is not None:
        dw = tl.sum(dw, axis=0, keep_dims=True)
        tl.store(
            dw_ptr + tl.cast(pid, tl.int64) * groups * N + column,
            dw.to(dw_ptr.dtype.element_ty),
            mask=n < N,
        )


WIDE = 8192  # columns; a wider group does not fit into registers and is processed in blocks


@functools.cache
def _launch(N):
    """(rows, columns, warps) of a forward program's block: as in `rows`, of two tensors.

    bf16, share of the copy rate (H200, 2026-11-24): gated 1048576x128 1.01, with 2 to 4 warps as
    well; 32768x4096 with 2, 4, 8 warps 0.92, 1.00, 1.01; 8192x8192 with 4, 8, 16 0.86, 0.94, 0.86.
    In TB/s (2026-11-23): modulated 65536x1152 with 2, 4 2.50, 2.31; 32768x3072 with 4, 8 3.07,
    2.90."""
    columns = min(next_power_of_2(N), WIDE)
    return max(1, 1024 // columns), columns, max(columns // 1024, 1)


@functools.cache
def _launch_bwd(N, widest):
    """(rows, columns, warps) of a backward program's block. Its sums dw, dg and db stay in
    registers.

    A group of more than ``widest`` columns does not fit there. It is read twice, once by `_dots`.

    bf16, share of the copy rate with 3 and with 4 stages of loads (H200, 2026-11-24): 1048576x128
    0.86, 0.92; 32768x4096 with 8 warps 0.85, 0.92, with 16 0.86, 0.95; 8192x8192 with 3 0.88, read
    twice 0.55 (0.62, 0.55 with the gate before the norm)."""
    columns = next_power_of_2(N) if N <= widest else 2048
    return max(1, 4096 // columns), columns, 16 if columns >= 4096 else 8


@functools.lru_cache(1024)
def _sharing(G, blocks, programs):
    """(programs that share the ``blocks`` of rows that belong to one of G rows of g, programs
    altogether).

    Those that end first: if G is 16 and there are 132 programs, 8 share each. With 9, 14 rows of g
    would be first, and then 2. A row of partial sums takes about as long as two blocks."""

    def time(split):
        return cdiv(G, programs // split) * (cdiv(blocks, split) + 2)

    split = min(range(1, max(1, min(blocks, programs)) + 1), key=time)
    return split, split * max(1, min(G, programs // split))


def _outputs(x, g, w, b, eps, offset, act, before, cast, rounds, groups):
    return x.new_empty(x.shape), x.new_empty(x.shape[0] * groups, dtype=torch.float32)


def _gradients(
    dy,
    x,
    g,
    w,
    b,
    rstd,
    offset,
    act,
    before,
    cast,
    rounds,
    groups,
    need_dx,
    need_dg,
    need_dw,
    need_db,
):
    needs = (x, need_dx), (g, need_dg), (w, need_dw), (b, need_db)
    return tuple(t.new_empty(t.shape) if need else None for t, need in needs)


@custom_op("gated_norm", _outputs)
def gated_norm_fwd(
    x: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    eps: float,
    offset: float,
    act: str | None,
    before: bool,
    cast: int,
    rounds: bool,
    groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, H), g and b (M // T, H) with unit stride in H, w (H,) contiguous -> y (M, H), rstd
    (M·groups,) in fp32."""
    y, rstd = _outputs(x, g, w, b, eps, offset, act, before, cast, rounds, groups)
    M, N = x.shape[0], x.shape[1] // groups
    block, columns, warps = _launch(N)
    if M and N:
        _fwd[(cdiv(M, block), groups)](
            x,
            g,
            w,
            b,
            y,
            rstd,
            x.stride(0),
            g.stride(0),
            0 if b is None else b.stride(0),
            M,
            M // g.shape[0],
            N,
            eps,
            offset or None,
            ACT=_gate(act, x, g),
            BEFORE=before,
            CAST=cast,
            ROUND=rounds,
            WHOLE=columns >= N,
            BLOCK_M=block,
            BLOCK_N=columns,
            num_warps=devices.warps(warps, x),
            enable_fp_fusion=not rounds
            or b is None,  # fused with b, a product of 16 bits would not be rounded
        )
    return y, rstd


@custom_op("gated_norm_backward", _gradients)
def gated_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    act: str | None,
    before: bool,
    cast: int,
    rounds: bool,
    groups: int,
    need_dx: bool,
    need_dg: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dy as x, and what forward was given -> dx, dg, dw and db, contiguous. What is not needed is
    None."""
    needs = need_dx, need_dg, need_dw, need_db
    found = dx, dg, dw, db = _gradients(
        dy, x, g, w, b, rstd, offset, act, before, cast, rounds, groups, *needs
    )
    (M, H), G = x.shape, g.shape[0]
    N = H // groups
    if not N:
        return found
    shared = G != M
    G, T = (G, M // G) if shared else (1, M)
    each = T if shared else 1  # rows of x to a row of g
    block, columns, warps = _launch_bwd(N, 4096 if shared else 16384 // x.element_size())
    strides = dy.stride(0), x.stride(0), g.stride(0)
    dot = None
    if columns < N and (need_dx or before and need_dg):
        dot = torch.empty_like(rstd)
        if M:
            _dots[(M, groups)](
                dy,
                x,
                g,
                w,
                rstd,
                dot,
                *strides,
                each,
                N,
                offset or None,
                ACT=_gate(act, x, g),
                BEFORE=before,
                BLOCK_N=4096,
                num_warps=devices.warps(8, x),
            )
    split, programs = _sharing(G, cdiv(T, block), max(1, devices.multiprocessors(x) // groups))

    loaded = (
        block * columns * (2 * x.element_size() + (0 if shared else g.element_size()))
    )  # bytes, in an iteration
    part_g, part_b = (partial(t, split if shared else 1) for t in (dg, db))
    part_w = partial(dw, programs)
    _bwd[(programs, groups, cdiv(N, columns))](
        dy,
        x,
        g,
        w,
        rstd,
        dot,
        dx,
        part_g,
        part_w,
        part_b,
        *strides,
        G,
        T,
        N,
        split,
        offset or None,
        ACT=_gate(act, x, g),
        BEFORE=before,
        SHARED=shared,
        CAST=cast,
        ROUND=rounds,
        BLOCK_M=block,
        BLOCK_N=columns,
        STAGES=devices.stages(loaded, x, 3 if shared else 4),
        num_warps=devices.warps(warps, x),
    )
    for part, gradient in ((part_g, dg), (part_w, dw), (part_b, db)):
        sum_rows(part, gradient)
    return found
