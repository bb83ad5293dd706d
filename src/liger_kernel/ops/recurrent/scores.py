"""The gradients of a chunk's products of tokens with each other, for all value heads of a key head.

In the names of `outputs`, with ∘ elementwise, and r_q, r_k and β factors of rows or columns:

    E = s·lower(dO·Δᵀ)∘D,   N = β·strict lower(dR·Δᵀ)∘D
    dV = β·dR,   dβ = rowsum(dR∘V) - rowsum(N∘M)/β,   M = (r_k·K)·(r_k·K)ᵀ
    dγ = rows - columns of E∘P' - N∘M,   P' = (r_q·Q)·(r_k·K)ᵀ

`outputs` multiplies E and N with queries and keys, which a group's value heads share: so their sums
over the group are all it needs. They are stored as r_q·E·r_k and r_k·N·r_k, whose transposes are
loads, of the one tile for the gradients of queries and of keys.
"""

from __future__ import annotations

from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import tl
from liger_kernel.ops.recurrent.chunks import (
    CHUNK,
    C,
    chunk_span,
    decay_of,
    differences,
    dot,
    gate_rows,
    load_gates,
    load_rows,
    norm_rows,
    operand,
    store_rows,
)


@kernel
def _score_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    delta_ptr,
    dr_ptr,
    gates_ptr,
    norms_ptr,
    table_ptr,
    e_ptr,
    n_ptr,
    partial_ptr,
    dv_ptr,
    stride_q_batch,
    stride_q_token,
    stride_q_head,
    stride_k_batch,
    stride_k_token,
    stride_k_head,
    stride_v_batch,
    stride_v_token,
    stride_v_head,
    stride_do_batch,
    stride_do_token,
    stride_do_head,
    stride_dv_batch,
    stride_dv_token,
    stride_dv_head,
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
    STAGES: tl.constexpr,
):
    """Compute E and N of a key head in one chunk; dv and parts of dγ and dβ of its value heads."""
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
    rq_ptr, rk_ptr = norm_rows(norms_ptr, h, H, tokens, first)
    q_ptr += b * stride_q_batch + at * stride_q_token + h.to(tl.int64) * stride_q_head
    k_ptr += b * stride_k_batch + at * stride_k_token + h.to(tl.int64) * stride_k_head
    q = operand(load_rows(q_ptr, stride_q_token, c, num_rows, k_columns, K, BLOCK_K), OPERAND)
    k = operand(load_rows(k_ptr, stride_k_token, c, num_rows, k_columns, K, BLOCK_K), OPERAND)
    rq = tl.load(rq_ptr + c, mask=inside, other=0.0)
    rk = tl.load(rk_ptr + c, mask=inside, other=0.0)
    not_after = c[:, None] >= c[None, :]
    before = c[:, None] > c[None, :]
    QK = dot(q, tl.trans(k), PRECISION) * rq[:, None] * rk[None, :]
    KK = dot(k, tl.trans(k), PRECISION) * rk[:, None] * rk[None, :]
    E_sum = tl.zeros((C, C), tl.float32)
    N_sum = tl.zeros((C, C), tl.float32)
    group = HV // H
    # what is hoisted out of the loop would not leave enough registers
    for i in tl.range(0, group, num_stages=1, disable_licm=True):
        hv = h * group + i
        head = hv.to(tl.int64) * tokens + first
        do_head_ptr = (
            do_ptr + b * stride_do_batch + at * stride_do_token + hv.to(tl.int64) * stride_do_head
        )
        v_head_ptr = (
            v_ptr + b * stride_v_batch + at * stride_v_token + hv.to(tl.int64) * stride_v_head
        )
        dv_head_ptr = (
            dv_ptr + b * stride_dv_batch + at * stride_dv_token + hv.to(tl.int64) * stride_dv_head
        )
        hi_ptr, lo_ptr, beta_ptr = gate_rows(gates_ptr, hv, HV, tokens, first)
        hi, lo, beta, _, _ = load_gates(hi_ptr, lo_ptr, beta_ptr, c, num_rows)
        dP = tl.zeros((C, C), tl.float32)
        lower = tl.zeros((C, C), tl.float32)
        dbeta = tl.zeros((C,), tl.float32)
        for column in tl.range(0, V, BLOCK_V, num_stages=STAGES, disable_licm=True):
            v_columns = column + tl.arange(0, BLOCK_V)
            do = load_rows(do_head_ptr, stride_do_token, c, num_rows, v_columns, V, BLOCK_V)
            delta = load_rows(delta_ptr + head * V, V, c, num_rows, v_columns, V, BLOCK_V)
            dr = load_rows(dr_ptr + head * V, V, c, num_rows, v_columns, V, BLOCK_V)
            v = load_rows(v_head_ptr, stride_v_token, c, num_rows, v_columns, V, BLOCK_V)
            dP += dot(operand(do, OPERAND), tl.trans(delta), PRECISION)
            lower += dot(dr, tl.trans(delta), PRECISION)
            dr32 = dr.to(tl.float32)
            dbeta += tl.sum(dr32 * v.to(tl.float32), axis=1)
            dv = beta[:, None] * dr32
            store_rows(dv_head_ptr, dv, stride_dv_token, c, num_rows, v_columns, V, BLOCK_V)
        # what is infinite above the diagonal is not selected
        decay = decay_of(differences(hi, lo), EXACT)
        E = tl.where(not_after, scale * dP * decay, 0.0)
        N = tl.where(before, lower * decay, 0.0)
        E_sum += E
        # without the diagonal, which cancels in γ's gradient but for the rounding of both sums
        through_output = tl.where(before, E * QK, 0.0)
        through_solve = N * KK
        rows = tl.sum(through_solve, axis=1)
        N_sum += beta[:, None] * N
        dbeta -= rows
        dgamma = tl.sum(through_output, axis=1) - beta * rows
        dgamma -= tl.sum(through_output - beta[:, None] * through_solve, axis=0)
        tl.store(partial_ptr + head + c, dgamma, mask=inside)
        dbeta_ptr = partial_ptr + tl.cast(HV, tl.int64) * tokens + head
        tl.store(dbeta_ptr + c, dbeta, mask=inside)
    E_sum *= rq[:, None] * rk[None, :]
    N_sum *= rk[:, None] * rk[None, :]
    head = (h.to(tl.int64) * tokens + first) * C
    store_rows(e_ptr + head, operand(E_sum, OPERAND), C, c, num_rows, c, C, C)
    store_rows(n_ptr + head, operand(N_sum, OPERAND), C, c, num_rows, c, C, C)


def _score_gradients_launch(problem):
    """Return (columns of values at a time, warps, stages of loads) of a program."""
    return problem.launch(
        hopper=(128, 8, 1), ampere=(32, 8, 1), cdna=(16, 8, 1), rdna=(16, 16, 1), fp32=(16, 8, 1)
    )


def score_gradients(problem, q, k, v, do, delta, dr, gates, norms, table, scale, dv):
    """Write dv. Returns E and N (H, tokens, 64), and parts of dγ and dβ (2, HV, tokens)."""
    p = problem
    tokens = p.B * p.T
    e = delta.new_empty((p.H, tokens, CHUNK))
    n = delta.new_empty((p.H, tokens, CHUNK))
    partial = gates.new_empty((2, p.HV, tokens))
    block_v, warps, stages = _score_gradients_launch(p)
    _score_gradients[(p.chunks * p.H,)](
        q,
        k,
        v,
        do,
        delta,
        dr,
        gates,
        norms,
        table,
        e,
        n,
        partial,
        dv,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *do.stride()[:3],
        *dv.stride()[:3],
        p.T,
        tokens,
        p.H,
        p.HV,
        scale,
        V=p.V,
        BLOCK_V=block_v,
        STAGES=stages,
        **p.constants,
        num_warps=warps,
    )
    return e, n, partial
