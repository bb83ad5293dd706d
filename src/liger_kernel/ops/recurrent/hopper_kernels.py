"""Gluon kernels for Hopper: a chunk's output, and its dk, dβ and dg, as `outputs` computes them.

See `outputs` for the formulas, and `hopper` for when they are taken: all operands are bf16 with
heads of 128.

A tile waits for memory longer than it is computed with. So a program fetches all tiles of a value
head at once by TMA, and has four warps and at most 112 KB of shared memory: two programs share a
multiprocessor, and one computes while the other's tiles arrive. Triton would load them in parts,
by threads. A warp has whole rows of a product, so their sums take no barrier.

The value heads of a group follow each other in the same shared memory. Behind the last one come E,
N and q, for dk. Mbarriers of `key_gradients_kernel`, each with one arrival a round, by `expect`:

ready[0]  dR and S: round i is value head i, its parity i & 1
ready[1]  Δ and dS': likewise
ready[2]  k in round 0; E, N and q in round 1

No round is over before all warps have waited for it: a barrier comes before each further load.

TMA fetches 64 rows of a shorter chunk, too. What follows its end belongs to other chunks and may be
NaN: such rows are not stored, and are 0 wherever rows are summed. `FULL` leaves this out.

2 x 4,096 tokens of 16 key and 32 value heads: o 86 µs, `outputs._output` 113; dk 137 µs,
`outputs._key_gradients` 278 (H200, 2026-11-28 and 2026-11-29, Triton 3.6).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from liger_kernel.core import devices
from liger_kernel.core.gluon import barrier, reinterpret, tma_descriptor, tma_load
from liger_kernel.core.tile import tl
from liger_kernel.ops.recurrent.chunks import CHUNK, chunk_span
from liger_kernel.ops.recurrent.hopper import HEAD_DIM

C = gl.constexpr(CHUNK)
D = gl.constexpr(HEAD_DIM)
# of products, and of their rows
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROWS = gl.constexpr(gl.SliceLayout(1, LAYOUT))
# of products of a chunk's tokens with each other
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
SCORE_COLUMNS = gl.constexpr(gl.SliceLayout(0, SCORES))
# of tiles that are multiplied elementwise or stored: a thread has 16 bytes of a row
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# of a chunk's tokens beside those that are summed
PAIRS = gl.constexpr(gl.BlockedLayout([1, 32], [16, 2], [4, 1], [1, 0]))
# of P in shared memory
P_LAYOUT = gl.constexpr(gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], gl.bfloat16))
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _decay_of(x):
    return gl.exp2(x * LOG2E)


@gluon.jit
def _scaled_rows(x, factors):
    return x * gl.expand_dims(factors, 1)


@gluon.jit
def _sums_to_the_end(x):
    """Return for each token the sum of x from it to the chunk's end."""
    columns = gl.convert_layout(x, gl.SliceLayout(0, PAIRS))
    t = gl.arange(0, C, layout=gl.SliceLayout(1, PAIRS))
    i = gl.arange(0, C, layout=gl.SliceLayout(0, PAIRS))
    not_before = gl.expand_dims(i, 0) >= gl.expand_dims(t, 1)
    sums = gl.sum(gl.where(not_before, gl.expand_dims(columns, 0), 0.0), 1)
    return gl.convert_layout(sums, ROWS)


@gluon.jit
def _sum_of_products(a_box, b_box):
    """Return <A, B> of two states."""
    products = gl.zeros([16, D], gl.float32, TILE)
    for part in gl.static_range(D // 16):
        a = a_box.slice(16 * part, 16).load(TILE)
        b = b_box.slice(16 * part, 16).load(TILE)
        products += a.to(gl.float32) * b.to(gl.float32)
    return gl.sum(gl.sum(products, 1), 0)


@gluon.jit
def _clear_rows(box, num_rows):
    """Set a tile's rows to 0 from ``num_rows`` on."""
    t = gl.arange(0, C, layout=gl.SliceLayout(1, TILE))
    inside = gl.expand_dims(t < num_rows, 1)
    box.store(gl.where(inside, box.load(TILE), 0.0))


@gluon.jit
def _load_head(dr_desc, s_desc, delta_desc, ds_desc, boxes, ready, row, state):
    """Fetch a value head's tiles: dR and Δ from their row on, S and dS' from theirs."""
    dr_box, s_box, delta_box, ds_box = boxes
    mbarrier.expect(ready.index(0), (C * D + D * D) * 2)
    tma_load(dr_desc, [row, 0], ready.index(0), dr_box)
    tma_load(s_desc, [state, 0], ready.index(0), s_box)
    mbarrier.expect(ready.index(1), (C * D + D * D) * 2)
    tma_load(delta_desc, [row, 0], ready.index(1), delta_box)
    tma_load(ds_desc, [state, 0], ready.index(1), ds_box)


@gluon.jit
def key_gradients_kernel(
    q_desc,
    k_desc,
    delta_desc,
    dr_desc,
    s_desc,
    ds_desc,
    e_desc,
    n_desc,
    gates_ptr,
    norms_ptr,
    partial_ptr,
    table_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_ptr,
    stride_dk_batch,
    stride_dk_token,
    stride_dk_head,
    T,
    tokens,
    H,
    HV,
    NORM: gl.constexpr,
    FULL: gl.constexpr,
):
    """Compute dk of a key head in one chunk, and dβ and dg of its value heads.

    Rows are counted in int32: 2^31 of them, of 128 numbers, are more than a Hopper's memory.
    """
    slot = gl.program_id(0) // H
    h = gl.program_id(0) % H
    if FULL:
        num_rows = C
        first = slot * C  # token among all
    else:
        b, start, end = chunk_span(table_ptr, slot, T)
        num_rows = end - start
        if num_rows <= 0:
            return
        first = b.to(gl.int32) * T + start
    group = HV // H
    # E and N take the place of dR and Δ, q that of S
    k_box = gl.allocate_shared_memory(gl.bfloat16, [C, D], k_desc.layout)
    dr_box = gl.allocate_shared_memory(gl.bfloat16, [C, D], dr_desc.layout)
    s_box = gl.allocate_shared_memory(gl.bfloat16, [D, D], s_desc.layout)
    delta_box = gl.allocate_shared_memory(gl.bfloat16, [C, D], delta_desc.layout)
    ds_box = gl.allocate_shared_memory(gl.bfloat16, [D, D], ds_desc.layout)
    e_box = reinterpret(dr_box, gl.bfloat16, [2, C, C], e_desc.layout).index(0)
    n_box = reinterpret(delta_box, gl.bfloat16, [2, C, C], n_desc.layout).index(0)
    q_box = reinterpret(s_box, gl.bfloat16, [2, C, D], q_desc.layout).index(0)
    boxes = dr_box, s_box, delta_box, ds_box
    ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(ready.index(2), C * D * 2)
    tma_load(k_desc, [first, h * D], ready.index(2), k_box)
    row = h * group * tokens + first
    state = (slot * HV + h * group) * D
    _load_head(dr_desc, s_desc, delta_desc, ds_desc, boxes, ready, row, state)

    c = gl.arange(0, C, layout=ROWS)
    inside = c < num_rows
    last = num_rows - 1
    token = gl.minimum(c, last)  # nothing is read behind the end
    rk = gl.load(norms_ptr + (H + h) * tokens + first + token)
    zeros = gl.zeros([C, D], gl.float32, LAYOUT)
    dk = zeros
    mbarrier.wait(ready.index(2), 0)
    # what is hoisted out of the loop would not leave enough registers
    for i in tl.range(0, group, disable_licm=True):
        hv = h * group + i
        hi_ptr = gates_ptr + hv * tokens + first
        lo_ptr = hi_ptr + HV * tokens
        hi = gl.load(hi_ptr + token)
        lo = gl.load(lo_ptr + token)
        beta = gl.load(lo_ptr + HV * tokens + token)
        last_hi = gl.load(hi_ptr + last)
        last_lo = gl.load(lo_ptr + last)
        dgamma_ptr = partial_ptr + hv * tokens + first
        dgamma = gl.load(dgamma_ptr + token)
        dbeta = gl.load(dgamma_ptr + HV * tokens + token)

        mbarrier.wait(ready.index(0), i & 1)
        S = s_box.permute((1, 0))
        from_start = warpgroup_mma(dr_box, S, zeros, use_acc=False, is_async=True)  # dR·Sᵀ
        from_start = warpgroup_mma_wait(0, deps=(from_start,))
        from_start = _scaled_rows(from_start, rk * _decay_of(hi))
        dr_Y = gl.sum(k_box.load(LAYOUT).to(gl.float32) * from_start, 1)
        dk -= _scaled_rows(from_start, beta)

        mbarrier.wait(ready.index(1), i & 1)
        # before the product, whose accumulator leaves no registers for it
        S_dS = _sum_of_products(s_box, ds_box)
        dS = ds_box.permute((1, 0))
        from_end = warpgroup_mma(delta_box, dS, zeros, use_acc=False, is_async=True)  # Δ·dS'ᵀ
        from_end = warpgroup_mma_wait(0, deps=(from_end,))
        barrier()  # all warps have read the tiles
        if i + 1 < group:
            next_row = row + (i + 1) * tokens
            next_state = state + (i + 1) * D
            _load_head(dr_desc, s_desc, delta_desc, ds_desc, boxes, ready, next_row, next_state)
        else:
            mbarrier.expect(ready.index(2), (2 * C * C + C * D) * 2)
            tma_load(e_desc, [h * tokens + first, 0], ready.index(2), e_box)
            tma_load(n_desc, [h * tokens + first, 0], ready.index(2), n_box)
            tma_load(q_desc, [first, h * D], ready.index(2), q_box)
        tail = _decay_of((last_hi - hi) + (last_lo - lo))
        from_end = _scaled_rows(from_end, rk * tail)
        z = gl.sum(k_box.load(LAYOUT).to(gl.float32) * from_end, 1)
        z = gl.where(inside, z, 0.0)
        dk += from_end

        dbeta -= dr_Y
        dgamma -= beta * dr_Y
        dlast = gl.sum(z, 0) + _decay_of(last_hi) * S_dS
        dg = _sums_to_the_end(gl.where(inside, dgamma - z, 0.0)) + dlast
        gate = (first + c) * HV + hv
        gl.store(dg_ptr + gate, dg.to(dg_ptr.dtype.element_ty), mask=inside)
        gl.store(dbeta_ptr + gate, dbeta.to(dbeta_ptr.dtype.element_ty), mask=inside)

    mbarrier.wait(ready.index(2), 1)
    if num_rows < C:  # these products sum rows
        _clear_rows(e_box, num_rows)
        _clear_rows(n_box, num_rows)
        _clear_rows(q_box, num_rows)
        _clear_rows(k_box, num_rows)
        fence_async_shared()
        barrier()
    dk = warpgroup_mma(e_box.permute((1, 0)), q_box, dk, is_async=True)
    from_solve = warpgroup_mma(n_box, k_box, zeros, use_acc=False, is_async=True)
    from_solve = warpgroup_mma(n_box.permute((1, 0)), k_box, from_solve, is_async=True)
    dk, from_solve = warpgroup_mma_wait(0, deps=(dk, from_solve))
    dk -= from_solve
    if NORM:
        unit = _scaled_rows(k_box.load(LAYOUT).to(gl.float32), rk)
        dk -= _scaled_rows(unit, gl.sum(unit * dk, 1))
    b = first // T
    dk_ptr += b.to(gl.int64) * stride_dk_batch
    dk_ptr += (first - b * T).to(gl.int64) * stride_dk_token + h * stride_dk_head
    t = gl.arange(0, C, layout=gl.SliceLayout(1, TILE))
    j = gl.arange(0, D, layout=gl.SliceLayout(0, TILE))
    pointers = gl.expand_dims(dk_ptr + t * stride_dk_token, 1) + gl.expand_dims(j, 0)
    mask = gl.expand_dims(t < num_rows, 1)
    gl.store(pointers, gl.convert_layout(dk.to(gl.bfloat16), TILE), mask=mask)


@gluon.jit
def output_kernel(
    q_desc,
    k_desc,
    delta_desc,
    s_desc,
    gates_ptr,
    norms_ptr,
    table_ptr,
    o_ptr,
    T,
    tokens,
    H,
    HV,
    scale,
    FULL: gl.constexpr,
):
    """Compute the outputs of a key head's value heads in one chunk.

    Mbarriers: ready[0] is for q and k, ready[1] for Δ and S, whose round i is value head i. Rows
    are counted as in `key_gradients_kernel`.
    """
    slot = gl.program_id(0) // H
    h = gl.program_id(0) % H
    if FULL:
        num_rows = C
        first = slot * C  # token among all
    else:
        b, start, end = chunk_span(table_ptr, slot, T)
        num_rows = end - start
        if num_rows <= 0:
            return
        first = b.to(gl.int32) * T + start
    group = HV // H
    # P takes the place of k
    q_box = gl.allocate_shared_memory(gl.bfloat16, [C, D], q_desc.layout)
    k_box = gl.allocate_shared_memory(gl.bfloat16, [C, D], k_desc.layout)
    delta_box = gl.allocate_shared_memory(gl.bfloat16, [C, D], delta_desc.layout)
    s_box = gl.allocate_shared_memory(gl.bfloat16, [D, D], s_desc.layout)
    p_box = reinterpret(k_box, gl.bfloat16, [2, C, C], P_LAYOUT).index(0)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(ready.index(0), 2 * C * D * 2)
    tma_load(q_desc, [first, h * D], ready.index(0), q_box)
    tma_load(k_desc, [first, h * D], ready.index(0), k_box)
    row = h * group * tokens + first
    state = (slot * HV + h * group) * D
    _load_output_head(delta_desc, s_desc, delta_box, s_box, ready.index(1), row, state)

    t = gl.arange(0, C, layout=SCORE_ROWS)
    i = gl.arange(0, C, layout=SCORE_COLUMNS)
    not_after = gl.expand_dims(t, 1) >= gl.expand_dims(i, 0)
    last = num_rows - 1  # nothing is read behind the end
    t = gl.minimum(t, last)
    i = gl.minimum(i, last)
    token = gl.minimum(gl.arange(0, C, layout=ROWS), last)
    rq_ptr = norms_ptr + h * tokens + first
    rk_ptr = rq_ptr + H * tokens
    row_factor = scale * gl.load(rq_ptr + t)
    column_factor = gl.load(rk_ptr + i)
    rq = scale * gl.load(rq_ptr + token)
    no_scores = gl.zeros([C, C], gl.float32, SCORES)
    zeros = gl.zeros([C, D], gl.float32, LAYOUT)
    mbarrier.wait(ready.index(0), 0)
    scores = warpgroup_mma(q_box, k_box.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    scores = _scaled_rows(scores, row_factor) * gl.expand_dims(column_factor, 0)
    barrier()  # all warps have multiplied with k
    for head in range(group):
        hv = h * group + head
        hi_ptr = gates_ptr + hv * tokens + first
        lo_ptr = hi_ptr + HV * tokens
        between = gl.expand_dims(gl.load(hi_ptr + t), 1) - gl.expand_dims(gl.load(hi_ptr + i), 0)
        between += gl.expand_dims(gl.load(lo_ptr + t), 1) - gl.expand_dims(gl.load(lo_ptr + i), 0)
        # what is infinite above the diagonal is not selected
        P = gl.where(not_after, scores * _decay_of(between), 0.0)
        p_box.store(P.to(gl.bfloat16))
        factor = rq * _decay_of(gl.load(hi_ptr + token))
        mbarrier.wait(ready.index(1), head & 1)
        if num_rows < C:  # P·Δ sums rows
            _clear_rows(delta_box, num_rows)
        fence_async_shared()
        barrier()
        o = warpgroup_mma(q_box, s_box, zeros, use_acc=False, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        o = _scaled_rows(o, factor)
        o = warpgroup_mma(p_box, delta_box, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        barrier()  # all warps have read the tiles
        if head + 1 < group:
            next_row = row + (head + 1) * tokens
            next_state = state + (head + 1) * D
            _load_output_head(
                delta_desc, s_desc, delta_box, s_box, ready.index(1), next_row, next_state
            )
        rows = gl.arange(0, C, layout=gl.SliceLayout(1, TILE))
        columns = gl.arange(0, D, layout=gl.SliceLayout(0, TILE))
        of_rows = o_ptr + ((first + rows).to(gl.int64) * HV + hv) * D
        pointers = gl.expand_dims(of_rows, 1) + gl.expand_dims(columns, 0)
        mask = gl.expand_dims(rows < num_rows, 1)
        gl.store(pointers, gl.convert_layout(o.to(gl.bfloat16), TILE), mask=mask)


@gluon.jit
def _load_output_head(delta_desc, s_desc, delta_box, s_box, ready, row, state):
    """Fetch a value head's tiles: Δ from its row on, S from its own."""
    mbarrier.expect(ready, (C * D + D * D) * 2)
    tma_load(delta_desc, [row, 0], ready, delta_box)
    tma_load(s_desc, [state, 0], ready, s_box)


def _token_descriptor(x):
    """Return a descriptor for tiles of x (B, T, heads, 128), whose tokens follow each other."""
    B, T, heads, dim = x.shape
    rows = x.as_strided((B * T, heads * dim), (x.stride(1), 1))
    return tma_descriptor(rows, [CHUNK, HEAD_DIM])


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
    """Do what `outputs.key_gradients` does, in a case where `hopper.applies` is True."""
    p = problem
    with devices.device_guard(q):
        key_gradients_kernel[(p.chunks * p.H,)](
            _token_descriptor(q),
            _token_descriptor(k),
            tma_descriptor(delta.view(-1, HEAD_DIM), [CHUNK, HEAD_DIM]),
            tma_descriptor(dr.view(-1, HEAD_DIM), [CHUNK, HEAD_DIM]),
            tma_descriptor(s.view(-1, HEAD_DIM), [HEAD_DIM, HEAD_DIM]),
            tma_descriptor(ds.view(-1, HEAD_DIM), [HEAD_DIM, HEAD_DIM]),
            tma_descriptor(e.view(-1, CHUNK), [CHUNK, CHUNK]),
            tma_descriptor(n.view(-1, CHUNK), [CHUNK, CHUNK]),
            gates,
            norms,
            partial,
            table,
            dk,
            dg,
            dbeta,
            *dk.stride()[:3],
            p.T,
            p.B * p.T,
            p.H,
            p.HV,
            NORM=normalize,
            FULL=table is None and p.T % CHUNK == 0,
            num_warps=4,
            enable_fp_fusion=True,
        )


def output(problem, q, k, delta, s, gates, norms, table, scale, o):
    """Do what `outputs.write_output` does, in a case where `hopper.applies` is True."""
    p = problem
    with devices.device_guard(q):
        output_kernel[(p.chunks * p.H,)](
            _token_descriptor(q),
            _token_descriptor(k),
            tma_descriptor(delta.view(-1, HEAD_DIM), [CHUNK, HEAD_DIM]),
            tma_descriptor(s.view(-1, HEAD_DIM), [HEAD_DIM, HEAD_DIM]),
            gates,
            norms,
            table,
            o,
            p.T,
            p.B * p.T,
            p.H,
            p.HV,
            scale,
            FULL=table is None and p.T % CHUNK == 0,
            num_warps=4,
            enable_fp_fusion=True,
        )
