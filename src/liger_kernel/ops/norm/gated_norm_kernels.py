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

import functools

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import custom_op
from liger_kernel.core.reduce import new_partial_sums, sum_rows
from liger_kernel.core.tile import (
    cdiv,
    load_fp32,
    next_power_of_2,
    sigmoid,
    silu,
    silu_16_bit,
    tl,
    triton,
)
from liger_kernel.ops.norm.norm_kernels import LLAMA, add_offset, broadcast_columns

GATES = {"silu": silu, "sigmoid": sigmoid, None: None}


def _gate_function(act, x, g):
    """Return the device function that computes f and f' of an activation."""
    is_16_bit = x.element_size() == g.element_size() == 2
    return silu_16_bit if act == "silu" and is_16_bit else GATES[act]


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
def _mean_dots(
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
    GATE_FIRST: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    CASTING: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Compute dx and dg of one group of columns of some rows, and a row of the partial dw.

    There are G times T rows of x. Each row has its own row of g; or, with SHARED_GATE, T rows have
    one. SPLIT programs share T rows, and write a row each of the partial dg and db, if those are
    sums. A group is one block; or mean(m·x̂) is in ``dot``, and the third grid axis goes over the
    columns."""
    pid = tl.program_id(0)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    column = group * N + n
    w = None
    if w_ptr is not None:
        w = add_offset(load_fp32(w_ptr, column, n < N), offset)
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for shared in tl.range(pid // SPLIT, G, tl.num_programs(0) // SPLIT):
        first_row = tl.cast(shared, tl.int64) * T
        if SHARED_GATE:
            f, slope = _load_factor(
                g_ptr, tl.cast(shared, tl.int64) * stride_g + column, n < N, ACT
            )
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
            else:
                xhat, e = x * rstd, dy * f
            cast_xhat, v = _apply_weight(xhat, w, x_ptr, CASTING, ROUND)
            dw += e * cast_xhat
            df = dy * v
            if not GATE_FIRST and not SHARED_GATE and dg_ptr is not None:
                # stored before the mean, so that registers are free again
                tl.store(dg_ptr + offsets, (df * slope).to(dg_ptr.dtype.element_ty), mask=mask)
            if dx_ptr is not None or GATE_FIRST:
                if w_ptr is not None:
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
                dg += df * slope
                db += dy
            else:
                if GATE_FIRST and dg_ptr is not None:
                    tl.store(dg_ptr + offsets, (df * slope).to(dg_ptr.dtype.element_ty), mask=mask)
                if db_ptr is not None:
                    tl.store(db_ptr + offsets, dy.to(db_ptr.dtype.element_ty), mask=mask)
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


MAX_BLOCK_N = 8192  # a wider group does not fit into registers and is processed in blocks


@functools.cache
def _choose_fwd_launch(N):
    """Return (BLOCK_M, BLOCK_N, num_warps) of the forward kernel.

    bf16, share of the copy rate (H200, 2026-11-24): gated 1048576x128 1.01, with 2 to 4 warps as
    well; 32768x4096 with 2, 4, 8 warps 0.92, 1.00, 1.01; 8192x8192 with 4, 8, 16 0.86, 0.94, 0.86.
    In TB/s (2026-11-23): modulated 65536x1152 with 2, 4 2.50, 2.31; 32768x3072 with 4, 8 3.07,
    2.90."""
    block_n = min(next_power_of_2(N), MAX_BLOCK_N)
    return max(1, 1024 // block_n), block_n, max(block_n // 1024, 1)


@functools.cache
def _choose_bwd_launch(N, max_block_n):
    """Return (BLOCK_M, BLOCK_N, num_warps) of the backward kernel.

    Its sums dw, dg and db stay in registers. A group of more than ``max_block_n`` columns does not
    fit there. It is read twice, once by `_mean_dots`.

    bf16, share of the copy rate with 3 and with 4 stages of loads (H200, 2026-11-24): 1048576x128
    0.86, 0.92; 32768x4096 with 8 warps 0.85, 0.92, with 16 0.86, 0.95; 8192x8192 with 3 0.88, read
    twice 0.55 (0.62, 0.55 with the gate before the norm)."""
    block_n = next_power_of_2(N) if N <= max_block_n else 2048
    return max(1, 4096 // block_n), block_n, 16 if block_n >= 4096 else 8


@functools.lru_cache(1024)
def _split_programs(G, num_blocks, max_programs):
    """Return (SPLIT, number of programs), the fastest split of the rows of each row of g.

    ``num_blocks`` blocks of rows belong to each of G rows of g. If G is 16 and there are 132
    programs, 8 share each. With 9, 14 rows of g would be processed first, and then 2. A row of
    partial sums takes about as long as two blocks."""

    def time(split):
        return cdiv(G, max_programs // split) * (cdiv(num_blocks, split) + 2)

    split = min(range(1, max(1, min(num_blocks, max_programs)) + 1), key=time)
    return split, split * max(1, min(G, max_programs // split))


def _empty_outputs(x, g, w, b, eps, offset, act, gate_first, casting, rounds, groups):
    return x.new_empty(x.shape), x.new_empty(x.shape[0] * groups, dtype=torch.float32)


def _empty_gradients(
    dy,
    x,
    g,
    w,
    b,
    rstd,
    offset,
    act,
    gate_first,
    casting,
    rounds,
    groups,
    need_dx,
    need_dg,
    need_dw,
    need_db,
):
    needs = (x, need_dx), (g, need_dg), (w, need_dw), (b, need_db)
    return tuple(t.new_empty(t.shape) if need else None for t, need in needs)


@custom_op("gated_norm", _empty_outputs)
def gated_norm_fwd(
    x: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    eps: float,
    offset: float,
    act: str | None,
    gate_first: bool,
    casting: int,
    rounds: bool,
    groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y (M, H) and rstd (M·groups,) in fp32.

    x is (M, H), g and b (M // T, H) with unit stride in H, w (H,) contiguous. act is "silu",
    "sigmoid" or None, for a factor of 1 + g. For gate_first, casting and rounds see the formulas:
    GATE_FIRST, the index in `rms_norm.CASTINGS`, ROUND."""
    y, rstd = _empty_outputs(x, g, w, b, eps, offset, act, gate_first, casting, rounds, groups)
    M, N = x.shape[0], x.shape[1] // groups
    block_m, block_n, num_warps = _choose_fwd_launch(N)
    if M and N:
        _fwd[(cdiv(M, block_m), groups)](
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
            ACT=_gate_function(act, x, g),
            GATE_FIRST=gate_first,
            CASTING=casting,
            ROUND=rounds,
            ONE_BLOCK=block_n >= N,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=devices.limit_warps(num_warps, x),
            # fused with the sum with b, a product of 16 bits would not be rounded
            enable_fp_fusion=not rounds or b is None,
        )
    return y, rstd


@custom_op("gated_norm_backward", _empty_gradients)
def gated_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    act: str | None,
    gate_first: bool,
    casting: int,
    rounds: bool,
    groups: int,
    need_dx: bool,
    need_dg: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx, dg, dw and db, contiguous; None for a gradient that is not needed.

    dy is like x, the other arguments are those of `gated_norm_fwd`."""
    grads = _empty_gradients(
        dy,
        x,
        g,
        w,
        b,
        rstd,
        offset,
        act,
        gate_first,
        casting,
        rounds,
        groups,
        need_dx,
        need_dg,
        need_dw,
        need_db,
    )
    dx, dg, dw, db = grads
    M, H = x.shape
    N = H // groups
    if not N:
        return grads
    shared_gate = g.shape[0] != M
    G, T = (g.shape[0], M // g.shape[0]) if shared_gate else (1, M)
    max_block_n = 4096 if shared_gate else 16384 // x.element_size()
    block_m, block_n, num_warps = _choose_bwd_launch(N, max_block_n)
    strides = dy.stride(0), x.stride(0), g.stride(0)
    dot = None
    if block_n < N and (need_dx or gate_first and need_dg):
        dot = torch.empty_like(rstd)
        if M:
            _mean_dots[(M, groups)](
                dy,
                x,
                g,
                w,
                rstd,
                dot,
                *strides,
                T if shared_gate else 1,
                N,
                offset or None,
                ACT=_gate_function(act, x, g),
                GATE_FIRST=gate_first,
                BLOCK_N=4096,
                num_warps=devices.limit_warps(8, x),
            )
    max_programs = max(1, devices.multiprocessors(x) // groups)
    split, num_programs = _split_programs(G, cdiv(T, block_m), max_programs)

    element_bytes = 2 * x.element_size() + (0 if shared_gate else g.element_size())
    loaded_bytes = block_m * block_n * element_bytes  # in an iteration
    partial_dg = new_partial_sums(dg, split if shared_gate else 1)
    partial_db = new_partial_sums(db, split if shared_gate else 1)
    partial_dw = new_partial_sums(dw, num_programs)
    _bwd[(num_programs, groups, cdiv(N, block_n))](
        dy,
        x,
        g,
        w,
        rstd,
        dot,
        dx,
        partial_dg,
        partial_dw,
        partial_db,
        *strides,
        G,
        T,
        N,
        split,
        offset or None,
        ACT=_gate_function(act, x, g),
        GATE_FIRST=gate_first,
        SHARED_GATE=shared_gate,
        CASTING=casting,
        ROUND=rounds,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        NUM_STAGES=devices.choose_num_stages(loaded_bytes, x, 3 if shared_gate else 4),
        num_warps=devices.limit_warps(num_warps, x),
    )
    sum_rows(partial_dg, dg)
    sum_rows(partial_dw, dw)
    sum_rows(partial_db, db)
    return grads
