"""What a chunk computes from its states and their gradients, all chunks at once.

In the names of `gated_delta_rule` and `states`:

    P = s·(r_q·Q)·(r_k·K)ᵀ∘D,   O = s·r_q·e·(Q·S) + P·Δ

and in backward, with E and N as in `scores`, ∘ elementwise, Y = r_k·(K·S), and with the sums over a
group's value heads in fp32:

    dq̂ = E·(r_k·K) + s·e·(dO·Sᵀ)
    dk̂ = Eᵀ·(r_q·Q) - (N + Nᵀ)·(r_k·K) - β·e·(dR·Sᵀ) + tail·(Δ·dS'ᵀ)
    dβ = its part of `scores` - e·rowsum(dR∘Y),   z = k̂·(tail·Δ·dS'ᵀ)
    dγ = its part of `scores` + q̂·(s·e·dO·Sᵀ) - β·e·rowsum(dR∘Y) - z
    dγ_last += Σ z + a·<S, dS'>,   dg = the sum of dγ to the chunk's end
    dq = r_q·(dq̂ - q̂·<q̂, dq̂>), and the same for k

A program sums r_q·dq̂ and r_k·dk̂, since r_q·E·r_k and r_k·N·r_k are what `scores` has stored.
K·S is not computed again: rowsum(dR∘(K·S)) = rowsum(K∘(dR·Sᵀ)). Nothing is added by several
programs, so the same bits come out every time. The gradients are made by several kernels, since one
would keep more tiles than there are registers. The output and the gradients of the keys have other
kernels on Hopper: see `hopper_kernels`.
"""

from __future__ import annotations

from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import cdiv, tl, triton
from liger_kernel.ops.recurrent import hopper
from liger_kernel.ops.recurrent.chunks import (
    C,
    chunk_span,
    decay_of,
    differences,
    dot,
    gate_rows,
    load_gates,
    load_rows,
    load_state,
    norm_rows,
    operand,
    store_rows,
)
from liger_kernel.ops.recurrent.scores import score_gradients


@kernel
def _output(
    q_ptr,
    k_ptr,
    delta_ptr,
    s_ptr,
    gates_ptr,
    norms_ptr,
    table_ptr,
    o_ptr,
    stride_q_batch,
    stride_q_token,
    stride_q_head,
    stride_k_batch,
    stride_k_token,
    stride_k_head,
    T,
    tokens,
    H,
    HV,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute some columns of a value head's output in one chunk."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // blocks
    slot = head // HV
    hv = head % HV
    h = hv // (HV // H)
    b, start, end = chunk_span(table_ptr, slot, T)
    num_rows = end - start
    if num_rows <= 0:
        return
    first = b * T + start
    c = tl.arange(0, C)
    k_columns = tl.arange(0, BLOCK_K)
    v_columns = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    hi_ptr, lo_ptr, beta_ptr = gate_rows(gates_ptr, hv, HV, tokens, first)
    rq_ptr, rk_ptr = norm_rows(norms_ptr, h, H, tokens, first)
    q_ptr += (
        b * stride_q_batch
        + tl.cast(start, tl.int64) * stride_q_token
        + h.to(tl.int64) * stride_q_head
    )
    k_ptr += (
        b * stride_k_batch
        + tl.cast(start, tl.int64) * stride_k_token
        + h.to(tl.int64) * stride_k_head
    )
    q = operand(load_rows(q_ptr, stride_q_token, c, num_rows, k_columns, K, BLOCK_K), OPERAND)
    k = operand(load_rows(k_ptr, stride_k_token, c, num_rows, k_columns, K, BLOCK_K), OPERAND)
    rq = scale * tl.load(rq_ptr + c, mask=c < num_rows, other=0.0)
    rk = tl.load(rk_ptr + c, mask=c < num_rows, other=0.0)
    hi, lo, _, _, _ = load_gates(hi_ptr, lo_ptr, beta_ptr, c, num_rows)
    not_after = c[:, None] >= c[None, :]
    P = dot(q, tl.trans(k), PRECISION) * rq[:, None] * rk[None, :]
    # what is infinite above the diagonal is not selected
    P = tl.where(not_after, P * decay_of(differences(hi, lo), EXACT), 0.0)
    s_ptr += (slot.to(tl.int64) * HV + hv) * (K * V)
    S = load_state(s_ptr, k_columns, v_columns, K, V, BLOCK_K, BLOCK_V)
    delta_ptr += (hv.to(tl.int64) * tokens + first) * V
    delta = load_rows(delta_ptr, V, c, num_rows, v_columns, V, BLOCK_V)
    o = (rq * decay_of(hi, EXACT))[:, None] * dot(q, S, PRECISION)
    o += dot(operand(P, OPERAND), delta, PRECISION)
    o_ptr += (first * HV + hv) * V
    store_rows(o_ptr, o, HV * V, c, num_rows, v_columns, V, BLOCK_V)


@triton.jit
def _store_head(x_ptr, rdx, x, r, stride, num_rows, K: tl.constexpr, BLOCK_K, NORM: tl.constexpr):
    """Store the gradient of a head's queries or keys, given r times that of the normalised ones."""
    rows = tl.arange(0, C)
    if NORM:
        unit = x.to(tl.float32) * r[:, None]
        rdx -= unit * tl.sum(unit * rdx, axis=1)[:, None]
    store_rows(x_ptr, rdx, stride, rows, num_rows, tl.arange(0, BLOCK_K), K, BLOCK_K)


@kernel
def _query_gradients(
    q_ptr,
    k_ptr,
    do_ptr,
    s_ptr,
    e_ptr,
    gates_ptr,
    norms_ptr,
    partial_ptr,
    table_ptr,
    dq_ptr,
    stride_q_batch,
    stride_q_token,
    stride_q_head,
    stride_k_batch,
    stride_k_token,
    stride_k_head,
    stride_do_batch,
    stride_do_token,
    stride_do_head,
    stride_dq_batch,
    stride_dq_token,
    stride_dq_head,
    T,
    tokens,
    H,
    HV,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    NORM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dq of a key head in one chunk, and add to dγ what comes from S through the output."""
    slot = tl.program_id(0) // H
    h = tl.program_id(0) % H
    b, start, end = chunk_span(table_ptr, slot, T)
    num_rows = end - start
    if num_rows <= 0:
        return
    first = b * T + start
    at = tl.cast(start, tl.int64)
    c = tl.arange(0, C)
    inside = c < num_rows
    k_columns = tl.arange(0, BLOCK_K)
    rq_ptr, _ = norm_rows(norms_ptr, h, H, tokens, first)
    q_ptr += b * stride_q_batch + at * stride_q_token + h.to(tl.int64) * stride_q_head
    k_ptr += b * stride_k_batch + at * stride_k_token + h.to(tl.int64) * stride_k_head
    e_ptr += (h.to(tl.int64) * tokens + first) * C
    rq = tl.load(rq_ptr + c, mask=inside, other=0.0)
    dq = tl.zeros((C, BLOCK_K), tl.float32)
    group = HV // H
    # what is hoisted out of the loop would not leave enough registers; q is in the cache
    for i in tl.range(0, group, num_stages=1, disable_licm=True):
        hv = h * group + i
        hi_ptr, _, _ = gate_rows(gates_ptr, hv, HV, tokens, first)
        do_head_ptr = (
            do_ptr + b * stride_do_batch + at * stride_do_token + hv.to(tl.int64) * stride_do_head
        )
        s_head_ptr = s_ptr + (slot.to(tl.int64) * HV + hv) * (K * V)
        # before the products: what they are multiplied with takes their layout
        q = load_rows(q_ptr, stride_q_token, c, num_rows, k_columns, K, BLOCK_K)
        dQS = tl.zeros((C, BLOCK_K), tl.float32)
        for column in tl.range(0, V, BLOCK_V, num_stages=STAGES):
            v_columns = column + tl.arange(0, BLOCK_V)
            do = load_rows(do_head_ptr, stride_do_token, c, num_rows, v_columns, V, BLOCK_V)
            S = load_state(s_head_ptr, k_columns, v_columns, K, V, BLOCK_K, BLOCK_V)
            dQS += dot(operand(do, OPERAND), tl.trans(S), PRECISION)
        hi = tl.load(hi_ptr + c, mask=inside, other=0.0)
        dQS *= (rq * scale * decay_of(hi, EXACT))[:, None]
        dq += dQS
        dgamma_ptr = partial_ptr + hv.to(tl.int64) * tokens + first + c
        dgamma = tl.load(dgamma_ptr, mask=inside, other=0.0)
        dgamma += tl.sum(dQS * operand(q, OPERAND).to(tl.float32), axis=1)
        tl.store(dgamma_ptr, dgamma, mask=inside)
    # behind the loop: a product before it would not be split among columns of warps
    E = load_rows(e_ptr, C, c, num_rows, c, C, C)
    k = operand(load_rows(k_ptr, stride_k_token, c, num_rows, k_columns, K, BLOCK_K), OPERAND)
    dq += dot(E, k, PRECISION)
    q = operand(load_rows(q_ptr, stride_q_token, c, num_rows, k_columns, K, BLOCK_K), OPERAND)
    dq_ptr += b * stride_dq_batch + at * stride_dq_token + h.to(tl.int64) * stride_dq_head
    _store_head(dq_ptr, dq, q, rq, stride_dq_token, num_rows, K, BLOCK_K, NORM)


@kernel
def _key_gradients(
    q_ptr,
    k_ptr,
    delta_ptr,
    dr_ptr,
    s_ptr,
    ds_ptr,
    e_ptr,
    n_ptr,
    gates_ptr,
    norms_ptr,
    partial_ptr,
    table_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_ptr,
    stride_q_batch,
    stride_q_token,
    stride_q_head,
    stride_k_batch,
    stride_k_token,
    stride_k_head,
    stride_dk_batch,
    stride_dk_token,
    stride_dk_head,
    T,
    tokens,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    NORM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dk of a key head in one chunk, and dβ and dg of its value heads."""
    slot = tl.program_id(0) // H
    h = tl.program_id(0) % H
    b, start, end = chunk_span(table_ptr, slot, T)
    num_rows = end - start
    if num_rows <= 0:
        return
    first = b * T + start
    at = tl.cast(start, tl.int64)
    c = tl.arange(0, C)
    inside = c < num_rows
    k_columns = tl.arange(0, BLOCK_K)
    _, rk_ptr = norm_rows(norms_ptr, h, H, tokens, first)
    q_ptr += b * stride_q_batch + at * stride_q_token + h.to(tl.int64) * stride_q_head
    k_ptr += b * stride_k_batch + at * stride_k_token + h.to(tl.int64) * stride_k_head
    tile = (h.to(tl.int64) * tokens + first) * C
    rk = tl.load(rk_ptr + c, mask=inside, other=0.0)
    dk = tl.zeros((C, BLOCK_K), tl.float32)
    group = HV // H
    # what is hoisted out of the loop would not leave enough registers; k is in the cache
    for i in tl.range(0, group, num_stages=1, disable_licm=True):
        hv = h * group + i
        head = hv.to(tl.int64) * tokens + first
        state = (slot.to(tl.int64) * HV + hv) * (K * V)
        hi_ptr, lo_ptr, beta_ptr = gate_rows(gates_ptr, hv, HV, tokens, first)
        hi, lo, beta, last_hi, last_lo = load_gates(hi_ptr, lo_ptr, beta_ptr, c, num_rows)
        # before the products: what they are multiplied with takes their layout
        k = operand(load_rows(k_ptr, stride_k_token, c, num_rows, k_columns, K, BLOCK_K), OPERAND)
        # one after the other, each in the same registers
        from_start = tl.zeros((C, BLOCK_K), tl.float32)  # dR·Sᵀ
        for column in tl.range(0, V, BLOCK_V, num_stages=STAGES, disable_licm=True):
            v_columns = column + tl.arange(0, BLOCK_V)
            dr = load_rows(dr_ptr + head * V, V, c, num_rows, v_columns, V, BLOCK_V)
            S = load_state(s_ptr + state, k_columns, v_columns, K, V, BLOCK_K, BLOCK_V)
            from_start += dot(dr, tl.trans(S), PRECISION)
        from_start *= (rk * decay_of(hi, EXACT))[:, None]
        dr_Y = tl.sum(k.to(tl.float32) * from_start, axis=1)
        dk -= beta[:, None] * from_start
        from_end = tl.zeros((C, BLOCK_K), tl.float32)  # Δ·dS'ᵀ
        S_dS = tl.zeros((BLOCK_K,), tl.float32)
        for column in tl.range(0, V, BLOCK_V, num_stages=STAGES, disable_licm=True):
            v_columns = column + tl.arange(0, BLOCK_V)
            delta = load_rows(delta_ptr + head * V, V, c, num_rows, v_columns, V, BLOCK_V)
            dS = load_state(ds_ptr + state, k_columns, v_columns, K, V, BLOCK_K, BLOCK_V)
            S = load_state(s_ptr + state, k_columns, v_columns, K, V, BLOCK_K, BLOCK_V)
            from_end += dot(delta, tl.trans(dS), PRECISION)
            S_dS += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1)
        from_end *= (rk * decay_of((last_hi - hi) + (last_lo - lo), EXACT))[:, None]
        z = tl.sum(k.to(tl.float32) * from_end, axis=1)
        dk += from_end
        dgamma = tl.load(partial_ptr + head + c, mask=inside, other=0.0)
        dbeta = tl.load(
            partial_ptr + tl.cast(HV, tl.int64) * tokens + head + c, mask=inside, other=0.0
        )
        dbeta -= dr_Y
        dgamma -= beta * dr_Y
        dlast = tl.sum(z) + decay_of(last_hi, EXACT) * tl.sum(S_dS)
        dg = tl.cumsum(dgamma - z, axis=0, reverse=True) + dlast
        gate = (first + c) * HV + hv
        tl.store(dg_ptr + gate, dg.to(dg_ptr.dtype.element_ty), mask=inside)
        tl.store(dbeta_ptr + gate, dbeta.to(dbeta_ptr.dtype.element_ty), mask=inside)
    # behind the loop, as in `_query_gradients`
    q = operand(load_rows(q_ptr, stride_q_token, c, num_rows, k_columns, K, BLOCK_K), OPERAND)
    E = load_rows(e_ptr + tile, C, c, num_rows, c, C, C)
    dk += dot(tl.trans(E), q, PRECISION)
    N = load_rows(n_ptr + tile, C, c, num_rows, c, C, C)
    k = operand(load_rows(k_ptr, stride_k_token, c, num_rows, k_columns, K, BLOCK_K), OPERAND)
    dk -= dot(N, k, PRECISION)
    dk -= dot(tl.trans(N), k, PRECISION)
    dk_ptr += b * stride_dk_batch + at * stride_dk_token + h.to(tl.int64) * stride_dk_head
    _store_head(dk_ptr, dk, k, rk, stride_dk_token, num_rows, K, BLOCK_K, NORM)


def _output_launch(problem):
    """Return (columns of values, warps) of a program.

    NVIDIA multiplies fp32 without tensor cores: with four warps a thread has so many products that
    ptxas gives up, and spills 12 KB instead of 1 (sm_90, Triton 3.6).
    """
    warps = 8 if problem.nvidia and problem.operand == "fp32" else 4
    return problem.launch(
        hopper=(128, 4), ampere=(64, 4), cdna=(16, 4), rdna=(16, 16), fp32=(16, warps)
    )


def _query_gradients_launch(problem):
    """Return (columns of values at a time, warps, stages of loads) of a program."""
    return problem.launch(
        hopper=(64, 8, 2), ampere=(32, 8, 1), cdna=(16, 8, 1), rdna=(16, 16, 1), fp32=(16, 8, 1)
    )


def _query_gradients_registers(problem):
    """Limit a thread's registers such that two programs share a multiprocessor.

    105 µs instead of 155 for 2 x 4,096 tokens (H200, 2026-11-28, Triton 3.6).
    """
    is_limited = (
        problem.arch == "sm_90" and problem.operand_dtype.itemsize == 2 and problem.K <= 128
    )
    return dict(maxnreg=128) if is_limited else {}


def _key_gradients_launch(problem):
    """Return (columns of values at a time, warps, stages of loads) of a program."""
    return problem.launch(
        hopper=(64, 8, 2), ampere=(16, 8, 1), cdna=(32, 8, 1), rdna=(16, 16, 1), fp32=(16, 8, 1)
    )


def output(problem, q, k, states, solution, table, scale):
    """Return o (B, T, HV, V), contiguous. ``states`` is (S of each chunk, Δ, _)."""
    p = problem
    s, delta, _ = states
    _, gates, norms = solution
    o = q.new_empty((p.B, p.T, p.HV, p.V))
    tensors = q, k, delta, s, gates, norms, table
    if hopper.applies(p, q, k):
        hopper.kernels().output(p, *tensors, scale, o)
    else:
        write_output(p, *tensors, scale, o)
    return o


def write_output(problem, q, k, delta, s, gates, norms, table, scale, o):
    """Write o by the kernel for every device."""
    p = problem
    block_v, warps = _output_launch(p)
    _output[(p.chunks * p.HV * cdiv(p.V, block_v),)](
        q,
        k,
        delta,
        s,
        gates,
        norms,
        table,
        o,
        *q.stride()[:3],
        *k.stride()[:3],
        p.T,
        p.B * p.T,
        p.H,
        p.HV,
        scale,
        V=p.V,
        BLOCK_V=block_v,
        **p.constants,
        num_warps=warps,
    )


def gradients(
    problem, q, k, v, do, states, gradients_of_states, solution, table, scale, normalize, outs
):
    """Write dq, dk, dv, dg and dbeta into ``outs``. The last two are contiguous."""
    p = problem
    s, delta, _ = states
    ds, dr, _ = gradients_of_states
    _, gates, norms = solution
    dq, dk, dv, dg, dbeta = outs
    e, n, partial = score_gradients(p, q, k, v, do, delta, dr, gates, norms, table, scale, dv)
    block_v, warps, stages = _query_gradients_launch(p)
    _query_gradients[(p.chunks * p.H,)](
        q,
        k,
        do,
        s,
        e,
        gates,
        norms,
        partial,
        table,
        dq,
        *q.stride()[:3],
        *k.stride()[:3],
        *do.stride()[:3],
        *dq.stride()[:3],
        p.T,
        p.B * p.T,
        p.H,
        p.HV,
        scale,
        **p.constants,
        V=p.V,
        BLOCK_V=block_v,
        NORM=normalize,
        STAGES=stages,
        num_warps=warps,
        **_query_gradients_registers(p),
    )
    tensors = q, k, delta, dr, s, ds, e, n, gates, norms, partial, dk, dg, dbeta
    if hopper.applies(p, q, k):
        hopper.kernels().key_gradients(p, *tensors, normalize, table)
    else:
        key_gradients(p, *tensors, normalize, table)


def key_gradients(
    problem,
    q,
    k,
    delta,
    dr,
    s,
    ds,
    e,
    n,
    gates,
    norms,
    partial,
    dk,
    dg,
    dbeta,
    normalize,
    table=None,
):
    """Write dk, dg and dbeta by the kernel for every device."""
    p = problem
    block_v, warps, stages = _key_gradients_launch(p)
    _key_gradients[(p.chunks * p.H,)](
        q,
        k,
        delta,
        dr,
        s,
        ds,
        e,
        n,
        gates,
        norms,
        partial,
        table,
        dk,
        dg,
        dbeta,
        *q.stride()[:3],
        *k.stride()[:3],
        *dk.stride()[:3],
        p.T,
        p.B * p.T,
        p.H,
        p.HV,
        **p.constants,
        V=p.V,
        BLOCK_V=block_v,
        NORM=normalize,
        STAGES=stages,
        num_warps=warps,
    )
