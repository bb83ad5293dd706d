"""The states at the chunks' borders, and their gradients: what goes from chunk to chunk.

In the names of `gated_delta_rule`, for a chunk whose first state is S, with ``e = exp(γ)``,
``tail = exp(γ_last - γ)`` and ``a = exp(γ_last)``:

    X = V - r_k·e·(K·S),   Δ = U·(β·X),   S' = a·S + Kᵀ·(r_k·tail·Δ)

and backwards, from the last chunk to the first, with dS' the gradient of S':

    dR = Uᵀ·(Pᵀ·dO + r_k·tail·(K·dS'))
    dS = a·dS' + Qᵀ·(s·r_q·e·dO) - Kᵀ·(r_k·β·e·dR)

A program has some columns of the state of one sequence and value head, which do not depend on the
others. The chunks of a sequence follow one another, so nothing is here that can be elsewhere.

No kernel transposes what it has computed: compilers of Triton 3.4 to 3.7 for Hopper have been wrong
there (flash-linear-attention's issue 640). Pᵀ is a product of its own.
"""

from __future__ import annotations

import torch

from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import cdiv, tl, triton
from liger_kernel.ops.recurrent.chunks import (
    C,
    chain_span,
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
    store_state,
)

MULTIPROCESSORS = 132  # of an H100


@triton.jit
def _chain_program(HV, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return this program's sequence, value head, and block of columns."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // blocks
    return head // HV, head % HV, (tl.program_id(0) % blocks) * BLOCK_V


@kernel
def _states(
    k_ptr,
    v_ptr,
    u_ptr,
    gates_ptr,
    norms_ptr,
    table_ptr,
    initial_ptr,
    s_ptr,
    delta_ptr,
    final_ptr,
    stride_k_batch,
    stride_k_token,
    stride_k_head,
    stride_v_batch,
    stride_v_token,
    stride_v_head,
    T,
    tokens,
    chunks,
    sequences,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the state at the first token of every chunk, Δ, and the last state."""
    n, hv, column = _chain_program(HV, V, BLOCK_V)
    b, begin, end, slot = chain_span(table_ptr, n, T, chunks)
    h = hv // (HV // H)
    first = b * T + begin
    c = tl.arange(0, C)
    k_columns = tl.arange(0, BLOCK_K)
    v_columns = column + tl.arange(0, BLOCK_V)
    hi_ptr, lo_ptr, beta_ptr = gate_rows(gates_ptr, hv, HV, tokens, first)
    _, rk_ptr = norm_rows(norms_ptr, h, H, tokens, first)
    k_ptr += (
        b * stride_k_batch
        + tl.cast(begin, tl.int64) * stride_k_token
        + h.to(tl.int64) * stride_k_head
    )
    v_ptr += (
        b * stride_v_batch
        + tl.cast(begin, tl.int64) * stride_v_token
        + hv.to(tl.int64) * stride_v_head
    )
    u_ptr += (hv.to(tl.int64) * tokens + first) * C
    delta_ptr += (hv.to(tl.int64) * tokens + first) * V
    s_ptr += (slot.to(tl.int64) * HV + hv) * (K * V)
    S = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if initial_ptr is not None:
        if n < sequences:
            state_ptr = initial_ptr + (n.to(tl.int64) * HV + hv) * (K * V)
            S += load_state(state_ptr, k_columns, v_columns, K, V, BLOCK_K, BLOCK_V)
    for start in tl.range(0, end - begin, C, num_stages=STAGES):
        num_rows = tl.minimum(end - begin - start, C)
        rows = start + c
        limit = start + num_rows
        k = load_rows(k_ptr, stride_k_token, rows, limit, k_columns, K, BLOCK_K)
        v = load_rows(v_ptr, stride_v_token, rows, limit, v_columns, V, BLOCK_V)
        u = load_rows(u_ptr, C, rows, limit, c, C, C)
        hi, lo, beta, last_hi, last_lo = load_gates(hi_ptr, lo_ptr, beta_ptr, rows, limit)
        rk = tl.load(rk_ptr + rows, mask=rows < limit, other=0.0)
        k = operand(k, OPERAND)
        S_operand = operand(S, OPERAND)
        store_state(s_ptr, S_operand, k_columns, v_columns, K, V, BLOCK_K, BLOCK_V)
        KS = dot(k, S_operand, PRECISION)
        X = v.to(tl.float32) - (rk * decay_of(hi, EXACT))[:, None] * KS
        delta = dot(u, operand(beta[:, None] * X, OPERAND), PRECISION)
        store_rows(delta_ptr, operand(delta, OPERAND), V, rows, limit, v_columns, V, BLOCK_V)
        tail = decay_of((last_hi - hi) + (last_lo - lo), EXACT)
        added = operand((rk * tail)[:, None] * delta, OPERAND)
        S = decay_of(last_hi, EXACT) * S + dot(tl.trans(k), added, PRECISION)
        s_ptr += tl.cast(HV, tl.int64) * (K * V)
    if final_ptr is not None:
        if n < sequences:
            state_ptr = final_ptr + (n.to(tl.int64) * HV + hv) * (K * V)
            store_state(state_ptr, S, k_columns, v_columns, K, V, BLOCK_K, BLOCK_V)


@kernel
def _transposed_scores(
    q_ptr,
    k_ptr,
    gates_ptr,
    norms_ptr,
    table_ptr,
    pt_ptr,
    factors_ptr,
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
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write what a chain of gradients multiplies with, for all value heads of a key head.

    It is Pᵀ, with a row for each key, and for each token s·r_q·e, r_k·tail and r_k·β·e. A chain
    that computed them would need more registers than there are, and every chunk would wait for it.
    """
    slot = tl.program_id(0) // H
    h = tl.program_id(0) % H
    b, start, end = chunk_span(table_ptr, slot, T)
    num_rows = end - start
    if num_rows <= 0:
        return
    at = tl.cast(start, tl.int64)
    first = b * T + start
    c = tl.arange(0, C)
    k_columns = tl.arange(0, BLOCK_K)
    rq_ptr, rk_ptr = norm_rows(norms_ptr, h, H, tokens, first)
    q_ptr += b * stride_q_batch + at * stride_q_token + h.to(tl.int64) * stride_q_head
    k_ptr += b * stride_k_batch + at * stride_k_token + h.to(tl.int64) * stride_k_head
    q = operand(load_rows(q_ptr, stride_q_token, c, num_rows, k_columns, K, BLOCK_K), OPERAND)
    k = operand(load_rows(k_ptr, stride_k_token, c, num_rows, k_columns, K, BLOCK_K), OPERAND)
    rq = scale * tl.load(rq_ptr + c, mask=c < num_rows, other=0.0)
    rk = tl.load(rk_ptr + c, mask=c < num_rows, other=0.0)
    KQ = dot(k, tl.trans(q), PRECISION) * rk[:, None] * rq[None, :]
    not_before = c[:, None] <= c[None, :]
    group = HV // H
    for i in range(group):
        hv = h * group + i
        hi_ptr, lo_ptr, beta_ptr = gate_rows(gates_ptr, hv, HV, tokens, first)
        hi, lo, beta, last_hi, last_lo = load_gates(hi_ptr, lo_ptr, beta_ptr, c, num_rows)
        e = decay_of(hi, EXACT)
        tail = decay_of((last_hi - hi) + (last_lo - lo), EXACT)
        output_ptr, tail_ptr, start_ptr = gate_rows(factors_ptr, hv, HV, tokens, first)
        tl.store(output_ptr + c, rq * e, mask=c < num_rows)
        tl.store(tail_ptr + c, rk * tail, mask=c < num_rows)
        tl.store(start_ptr + c, rk * beta * e, mask=c < num_rows)
        # what is infinite below the diagonal is not selected
        Pt = tl.where(not_before, KQ * decay_of(-differences(hi, lo), EXACT), 0.0)
        head_ptr = pt_ptr + (hv.to(tl.int64) * tokens + first) * C
        store_rows(head_ptr, operand(Pt, OPERAND), C, c, num_rows, c, C, C)


@kernel
def _state_gradients(
    q_ptr,
    k_ptr,
    do_ptr,
    pt_ptr,
    u_ptr,
    gates_ptr,
    factors_ptr,
    table_ptr,
    dfinal_ptr,
    ds_ptr,
    dr_ptr,
    dinitial_ptr,
    stride_q_batch,
    stride_q_token,
    stride_q_head,
    stride_k_batch,
    stride_k_token,
    stride_k_head,
    stride_do_batch,
    stride_do_token,
    stride_do_head,
    T,
    tokens,
    chunks,
    sequences,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradient of the state behind every chunk, dR, and the first state's gradient."""
    n, hv, column = _chain_program(HV, V, BLOCK_V)
    b, begin, end, first_slot = chain_span(table_ptr, n, T, chunks)
    h = hv // (HV // H)
    first = b * T + begin
    c = tl.arange(0, C)
    k_columns = tl.arange(0, BLOCK_K)
    v_columns = column + tl.arange(0, BLOCK_V)
    hi_ptr, _, _ = gate_rows(gates_ptr, hv, HV, tokens, first)
    output_ptr, tail_ptr, start_ptr = gate_rows(factors_ptr, hv, HV, tokens, first)
    q_ptr += (
        b * stride_q_batch
        + tl.cast(begin, tl.int64) * stride_q_token
        + h.to(tl.int64) * stride_q_head
    )
    k_ptr += (
        b * stride_k_batch
        + tl.cast(begin, tl.int64) * stride_k_token
        + h.to(tl.int64) * stride_k_head
    )
    do_ptr += b * stride_do_batch + tl.cast(begin, tl.int64) * stride_do_token
    do_ptr += hv.to(tl.int64) * stride_do_head
    u_ptr += (hv.to(tl.int64) * tokens + first) * C
    pt_ptr += (hv.to(tl.int64) * tokens + first) * C
    dr_ptr += (hv.to(tl.int64) * tokens + first) * V
    count = tl.cdiv(end - begin, C)
    slot = first_slot.to(tl.int64) + count - 1
    ds_ptr += (slot * HV + hv) * (K * V)
    dS = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if dfinal_ptr is not None:
        if n < sequences:
            state_ptr = dfinal_ptr + (n.to(tl.int64) * HV + hv) * (K * V)
            dS += load_state(state_ptr, k_columns, v_columns, K, V, BLOCK_K, BLOCK_V)
    for i in tl.range(0, count, num_stages=STAGES):
        start = (count - 1 - i) * C
        limit = tl.minimum(end - begin, start + C)
        rows = start + c
        k = load_rows(k_ptr, stride_k_token, rows, limit, k_columns, K, BLOCK_K)
        do = load_rows(do_ptr, stride_do_token, rows, limit, v_columns, V, BLOCK_V)
        pt = load_rows(pt_ptr, C, rows, limit, c, C, C)
        u = load_rows(u_ptr, C, rows, limit, c, C, C)
        output_factor = tl.load(output_ptr + rows, mask=rows < limit, other=0.0)
        tail_factor = tl.load(tail_ptr + rows, mask=rows < limit, other=0.0)
        start_factor = tl.load(start_ptr + rows, mask=rows < limit, other=0.0)
        decay = decay_of(tl.load(hi_ptr + limit - 1), EXACT)
        k = operand(k, OPERAND)
        do = operand(do, OPERAND)
        dS_operand = operand(dS, OPERAND)
        store_state(ds_ptr, dS_operand, k_columns, v_columns, K, V, BLOCK_K, BLOCK_V)
        ddelta = dot(pt, do, PRECISION)
        ddelta += tail_factor[:, None] * dot(k, dS_operand, PRECISION)
        dr = dot(tl.trans(u), operand(ddelta, OPERAND), PRECISION)
        store_rows(dr_ptr, operand(dr, OPERAND), V, rows, limit, v_columns, V, BLOCK_V)
        # loaded where other operands have left the shared memory: fp32 tiles are large
        q = load_rows(q_ptr, stride_q_token, rows, limit, k_columns, K, BLOCK_K)
        q = operand(q, OPERAND)
        from_output = operand(output_factor[:, None] * do.to(tl.float32), OPERAND)
        dS = decay * dS + dot(tl.trans(q), from_output, PRECISION)
        dS -= dot(tl.trans(k), operand(start_factor[:, None] * dr, OPERAND), PRECISION)
        ds_ptr -= tl.cast(HV, tl.int64) * (K * V)
    if dinitial_ptr is not None:
        if n < sequences:
            state_ptr = dinitial_ptr + (n.to(tl.int64) * HV + hv) * (K * V)
            store_state(state_ptr, dS, k_columns, v_columns, K, V, BLOCK_K, BLOCK_V)


def _states_launch(problem):
    """Return (columns of a state, warps, stages of loads) of a program.

    A chunk waits for the chunk before it: a third stage on Hopper hides what is left of its loads.
    132 µs instead of 161 for 2 x 4,096 tokens and heads of 128 (H200, 2026-11-28, Triton 3.6). They
    take 96 KB there, so two programs still fit. Heads of 256 would take more, and were not tried.
    """
    stages = 3 if problem.K <= 128 else 2
    return problem.launch(
        hopper=(32, 4, stages), ampere=(32, 4, 2), cdna=(16, 4, 1), rdna=(16, 4, 1), fp32=(16, 4, 1)
    )


def _state_gradients_launch(problem):
    """Return (columns of a state, warps, stages of loads) of a program.

    For heads of 128 the loads of two stages take 113 KB on Hopper, so two programs fit. Where a
    multiprocessor has one at most, it has room for a third stage: backward of 1 x 8,192 tokens with
    32 heads in 846 µs instead of 947 (H200, 2026-11-28, Triton 3.6).
    """
    columns = 32
    programs = problem.chains * problem.HV * cdiv(problem.V, columns)
    stages = 3 if problem.K <= 128 and programs <= MULTIPROCESSORS else 2
    return problem.launch(
        hopper=(columns, 4, stages),
        ampere=(32, 8, 2),
        cdna=(16, 4, 1),
        rdna=(16, 8, 1),
        fp32=(16, 4, 1),
    )


def states(problem, k, v, solution, table, initial_state, output_final_state):
    """Return the state at the first token of every chunk (chunks, HV, K, V), Δ (HV, tokens, V),
    and, if it is asked for, the last states (sequences, HV, K, V) in fp32."""
    p = problem
    u, gates, norms = solution
    s = u.new_empty((p.chunks, p.HV, p.K, p.V))
    delta = u.new_empty((p.HV, p.B * p.T, p.V))
    final_state = None
    if output_final_state:
        final_state = gates.new_empty((p.sequences, p.HV, p.K, p.V))
    block_v, warps, stages = _states_launch(p)
    _states[(p.chains * p.HV * cdiv(p.V, block_v),)](
        k,
        v,
        u,
        gates,
        norms,
        table,
        initial_state,
        s,
        delta,
        final_state,
        *k.stride()[:3],
        *v.stride()[:3],
        p.T,
        p.B * p.T,
        p.chunks,
        p.sequences,
        p.H,
        p.HV,
        V=p.V,
        BLOCK_V=block_v,
        STAGES=stages,
        **p.constants,
        num_warps=warps,
    )
    return s, delta, final_state


def state_gradients(problem, q, k, do, solution, table, dfinal, like_initial, scale):
    """Return the gradient of the state behind every chunk (chunks, HV, K, V), dR (HV, tokens, V),
    and that of the initial state, like ``like_initial``, which may be None."""
    p = problem
    u, gates, norms = solution
    ds = u.new_empty((p.chunks, p.HV, p.K, p.V))
    dr = u.new_empty((p.HV, p.B * p.T, p.V))
    dinitial = None
    if like_initial is not None:
        dinitial = like_initial.new_empty((p.sequences, p.HV, p.K, p.V))
    pt = torch.empty_like(u)
    factors = torch.empty_like(gates)
    _transposed_scores[(p.chunks * p.H,)](
        q,
        k,
        gates,
        norms,
        table,
        pt,
        factors,
        *q.stride()[:3],
        *k.stride()[:3],
        p.T,
        p.B * p.T,
        p.H,
        p.HV,
        scale,
        **p.constants,
        num_warps=4,
    )
    block_v, warps, stages = _state_gradients_launch(p)
    _state_gradients[(p.chains * p.HV * cdiv(p.V, block_v),)](
        q,
        k,
        do,
        pt,
        u,
        gates,
        factors,
        table,
        dfinal,
        ds,
        dr,
        dinitial,
        *q.stride()[:3],
        *k.stride()[:3],
        *do.stride()[:3],
        p.T,
        p.B * p.T,
        p.chunks,
        p.sequences,
        p.H,
        p.HV,
        V=p.V,
        BLOCK_V=block_v,
        STAGES=stages,
        **p.constants,
        num_warps=warps,
    )
    return ds, dr, dinitial
