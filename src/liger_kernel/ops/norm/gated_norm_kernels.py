r"""The kernels of gated and of modulated RMSNorm: an RMSNorm with a factor for each element.

    f = act(g), or 1 + g without an activation;   u = x·f if GATE_FIRST, else x
    rstd = 1 / sqrt(mean(u²) + eps),   x̂ = u·rstd,   v = x̂·(w + offset)
    y = v if GATE_FIRST, else v·f + b

    e = dy if GATE_FIRST, else dy·f;   m = e·(w + offset);   du = rstd·(m - x̂·mean(m·x̂))
    dw = Σ_rows e·x̂,   db = Σ_T dy
    dx = du·f,  dg = Σ_T du·x·f'   if GATE_FIRST;   dx = du,  dg = Σ_T dy·v·f'   else

A row of g and b belongs to T rows of x, and the sums Σ_T go over these. The means go over a row, or
over each of its C groups of N columns.

Everything is computed in fp32 and rounded once, except what PyTorch code rounds to x's dtype: with
the casting mode `LLAMA`, x̂ is rounded before it is multiplied with the weight, in y and in dw;
with ROUND, so is v, and v·f before b is added. Where dtypes differ, PyTorch code promotes, and
nothing is rounded. 1 + g is rounded to g's dtype."""

from __future__ import annotations

from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import load_fp32, tl, triton
from liger_kernel.ops.norm.norm_kernels import LLAMA, add_offset, broadcast_columns


@triton.jit
def _load_factor(g_ptr, offsets, mask, ACT: tl.constexpr):
    """Load a block of g. Returns f and f'."""
    g = load_fp32(g_ptr, offsets, mask)
    if ACT is None:
        f = (1.0 + g).to(g_ptr.dtype.element_ty).to(tl.float32)
        slope = 1.0
    else:
        f, slope = ACT(g)
    return f, slope


@triton.jit
def _apply_weight(xhat, w, x_ptr, CASTING: tl.constexpr, ROUND: tl.constexpr):
    """Multiply x̂ with the weight and the offset, or with nothing if w is None.

    Returns x̂ as it is multiplied, and v."""
    if CASTING == LLAMA:
        xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
    v = xhat
    if w is not None:
        v *= w
    if ROUND:
        v = v.to(x_ptr.dtype.element_ty).to(tl.float32)
    return xhat, v


@kernel
def gated_norm_fwd_kernel(
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
    GATE_FIRST: tl.constexpr,
    CASTING: tl.constexpr,
    ROUND: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Normalise one group of columns of BLOCK_M rows.

    ONE_BLOCK: the columns fit into one block and are read once; otherwise they are read twice."""
    # m (BLOCK_M, 1), n (1, BLOCK_N); u, f, y (BLOCK_M, BLOCK_N)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    n = tl.arange(0, BLOCK_N)[None, :]
    x_row = m * stride_x + group * N
    g_row = m // T * stride_g + group * N
    b_row = m // T * stride_b
    mask = (m < M) & (n < N)
    u = load_fp32(x_ptr, x_row + n, mask)
    if ONE_BLOCK or GATE_FIRST:
        f, _ = _load_factor(g_ptr, g_row + n, mask, ACT)
    if GATE_FIRST:
        u *= f
    sum_sq = u * u
    if not ONE_BLOCK:
        for start in range(BLOCK_N, N, BLOCK_N):
            mask = (m < M) & (start + n < N)
            u = load_fp32(x_ptr, x_row + start + n, mask)
            if GATE_FIRST:
                f, _ = _load_factor(g_ptr, g_row + start + n, mask, ACT)
                u *= f
            sum_sq += u * u
    rstd = tl.rsqrt(tl.sum(sum_sq, axis=1, keep_dims=True) / N + eps)
    tl.store(rstd_ptr + m * groups + group, rstd, mask=m < M)
    for start in range(0, BLOCK_N if ONE_BLOCK else N, BLOCK_N):
        mask = (m < M) & (start + n < N)
        if not ONE_BLOCK:
            u = load_fp32(x_ptr, x_row + start + n, mask)
            f, _ = _load_factor(g_ptr, g_row + start + n, mask, ACT)
            if GATE_FIRST:
                u *= f
        w = None
        if w_ptr is not None:
            columns = start + broadcast_columns(n, BLOCK_M, BLOCK_N)
            w = add_offset(load_fp32(w_ptr, group * N + columns, columns < N), offset)
        xhat, y = _apply_weight(u * rstd, w, x_ptr, CASTING, ROUND)
        if not GATE_FIRST:
            y *= f
        if b_ptr is not None:
            if ROUND and g_ptr.dtype.element_ty == y_ptr.dtype.element_ty:
                y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
            y += load_fp32(b_ptr, b_row + start + n, mask)
        tl.store(
            y_ptr + (m * groups + group) * N + start + n, y.to(y_ptr.dtype.element_ty), mask=mask
        )


@kernel
def gated_norm_shared_fwd_kernel(
    x_ptr,
    g_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    rstd_ptr,
    stride_x,
    stride_g,
    stride_b,
    T,
    N,
    eps,
    offset,
    CASTING: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Normalise T rows with one factor 1 + g. The programs of the first grid axis share them.

    They load g, w and b once, and the next rows while they work."""
    sample = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, BLOCK_N)[None, :]
    f, slope = _load_factor(g_ptr, sample * stride_g + n, n < N, None)
    w = None
    if w_ptr is not None:
        w = add_offset(load_fp32(w_ptr, n, n < N), offset)
        if not ROUND:
            f *= w
            w = None
    if b_ptr is not None:
        b = load_fp32(b_ptr, sample * stride_b + n, n < N)
    blocks = tl.cdiv(T, BLOCK_M)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=NUM_STAGES):
        t = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        m = sample * T + t
        mask = (t < T) & (n < N)
        x = load_fp32(x_ptr, m * stride_x + n, mask)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / N + eps)
        tl.store(rstd_ptr + m, rstd, mask=t < T)
        _, y = _apply_weight(x * rstd, w, x_ptr, CASTING, ROUND)
        y *= f
        if b_ptr is not None:
            if ROUND and g_ptr.dtype.element_ty == y_ptr.dtype.element_ty:
                y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
            y += b
        tl.store(y_ptr + m * N + n, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def mean_dots_kernel(
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
    GATE_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute mean(m·x̂) of one group of a row that is wider than a block."""
    m = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    rstd = tl.load(rstd_ptr + m * groups + group)
    dot = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        column, mask = group * N + n, n < N
        f, _ = _load_factor(g_ptr, m // T * stride_g + column, mask, ACT)  # of u or of e
        product = (
            load_fp32(dy_ptr, m * stride_dy + column, mask)
            * f
            * (load_fp32(x_ptr, m * stride_x + column, mask) * rstd)
        )
        if w_ptr is not None:
            product *= add_offset(load_fp32(w_ptr, column, mask), offset)
        dot += product
    tl.store(dot_ptr + m * groups + group, tl.sum(dot) / N)


@kernel
def gated_norm_bwd_kernel(
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
    GATE_FIRST: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    FACTORED: tl.constexpr,
    CASTING: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Compute dx and dg of one group of columns of some rows, and a row of the partial dw.

    There are G times T rows of x. Each row has its own row of g; or, with SHARED_GATE, T rows have
    one. SPLIT programs share T rows, and write a row each of the partial dg and db, if those are
    sums. FACTORED: the factors that T rows share are taken out of their sums. A group is one block;
    or mean(m·x̂) is in ``dot``, and the third grid axis goes over the columns."""
    pid = tl.program_id(0)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    column = group * N + n
    w = None
    if w_ptr is not None:
        w = add_offset(load_fp32(w_ptr, column, n < N), offset)
    dw = tl.zeros((1 if FACTORED else BLOCK_M, BLOCK_N), dtype=tl.float32)
    for shared in tl.range(pid // SPLIT, G, tl.num_programs(0) // SPLIT):
        first_row = tl.cast(shared, tl.int64) * T
        if SHARED_GATE:
            f, slope = _load_factor(
                g_ptr, tl.cast(shared, tl.int64) * stride_g + column, n < N, ACT
            )
        if FACTORED:
            fw = f if w is None else f * w
        dg = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        db = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for block in tl.range(pid % SPLIT, tl.cdiv(T, BLOCK_M), SPLIT, num_stages=NUM_STAGES):
            t = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
            m = first_row + t
            mask = (t < T) & (n < N)
            offsets = m * groups * N + column
            dy = load_fp32(dy_ptr, m * stride_dy + column, mask)
            x = load_fp32(x_ptr, m * stride_x + column, mask)
            rstd = load_fp32(rstd_ptr, m * groups + group, t < T)
            if not SHARED_GATE:
                f, slope = _load_factor(g_ptr, m * stride_g + column, mask, ACT)
            if GATE_FIRST:
                xhat, e = x * f * rstd, dy
            elif FACTORED:
                xhat, e = x * rstd, dy * fw
            else:
                xhat, e = x * rstd, dy * f
            cast_xhat, v = _apply_weight(xhat, w, x_ptr, CASTING, ROUND)
            if FACTORED:
                df = dy * cast_xhat
            else:
                dw += e * cast_xhat
                df = dy * v
            if not GATE_FIRST and not SHARED_GATE and dg_ptr is not None:
                # stored before the mean, so that registers are free again
                tl.store(dg_ptr + offsets, (df * slope).to(dg_ptr.dtype.element_ty), mask=mask)
            if dx_ptr is not None or GATE_FIRST:
                if w_ptr is not None and not FACTORED:
                    e *= w
                if dot_ptr is None:
                    dot = tl.sum(e * xhat, axis=1, keep_dims=True) / N
                else:
                    dot = load_fp32(dot_ptr, m * groups + group, t < T)
                dx = rstd * (e - xhat * dot)
                if GATE_FIRST:
                    df = dx * x
                    dx *= f
                if dx_ptr is not None:
                    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if SHARED_GATE:
                dg += df if FACTORED else df * slope
                db += dy
            else:
                if GATE_FIRST and dg_ptr is not None:
                    tl.store(dg_ptr + offsets, (df * slope).to(dg_ptr.dtype.element_ty), mask=mask)
                if db_ptr is not None:
                    tl.store(db_ptr + offsets, dy.to(db_ptr.dtype.element_ty), mask=mask)
        if FACTORED:  # dg is Σ dy·x̂ so far; f and w, which took registers, are loaded again
            dg = tl.sum(dg, axis=0, keep_dims=True)
            f, slope = _load_factor(
                g_ptr, tl.cast(shared, tl.int64) * stride_g + column, n < N, ACT
            )
            dw += dg * f
            dg *= slope
            if w_ptr is not None:
                dg *= add_offset(load_fp32(w_ptr, column, n < N), offset)
        if SHARED_GATE:
            offsets = (tl.cast(pid % SPLIT, tl.int64) * G + shared) * N + n
            if dg_ptr is not None:
                dg = tl.sum(dg, axis=0, keep_dims=True)
                tl.store(dg_ptr + offsets, dg.to(dg_ptr.dtype.element_ty), mask=n < N)
            if db_ptr is not None:
                db = tl.sum(db, axis=0, keep_dims=True)
                tl.store(db_ptr + offsets, db.to(db_ptr.dtype.element_ty), mask=n < N)
    if dw_ptr is not None:
        dw = tl.sum(dw, axis=0, keep_dims=True)
        tl.store(
            dw_ptr + tl.cast(pid, tl.int64) * groups * N + column,
            dw.to(dw_ptr.dtype.element_ty),
            mask=n < N,
        )
