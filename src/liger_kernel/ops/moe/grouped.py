r"""The kernels of experts: products in which each row has its own expert's matrix, and what comes
between them.

With the assignments sorted by expert (`routing`), row r of expert e is that of assignment s =
order[r] and of token t = s // K. W_e is gate_up_proj[e], with 2I rows, and D_e is down_proj[e]:

    pre_r = W_e·x_t + b_e,   (g, u) = pre_r in halves, or its even and odd entries,   z_r = act(g)·u
    y_s = D_e·z_r + d_e,     out_t = Σ_k w_s·y_s

    q_r = dout_t·D_e,   dw_s = <q_r, z_r> + <dout_t, d_e>,   dz_r = w_s·q_r
    dg = dz·u·act'(g),  du = dz·act(g),  dpre_r = (dg, du),   dx_t = Σ_k dpre_r·W_e
    dD_e = Σ_r dout_t ⊗ w_s·z_r,   dW_e = Σ_r dpre_r ⊗ x_t,   dd_e = Σ_r w_s·dout_t,   db_e = Σ_r dpre_r

With a limit, g and u are those of `liger_clamped_swiglu`, and act(g) is silu(alpha·g)/alpha.

A product reads its rows of x and of dout where they lie, by their tokens, and writes y and the
parts of dx by their assignments. So a token's K rows are neighbours, and are added in that order:
the same sum in every run. Sums are in fp32. Rounded are pre, q, w·z, dpre, each expert's y and part
of dx, and the results. In forward, z is made from sums in fp32, in the product's own program. In
backward it is made from pre, where q comes back: one more trip of q through memory, but a product
that needs no registers for anything else."""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import custom_op, matrix_rows, rounded_number
from liger_kernel.core.tile import cdiv, next_power_of_2, read, tl
from liger_kernel.ops.mlp.pointwise import ACTS, CLAMP_MOVES_AT_LIMIT, moves
from liger_kernel.ops.moe.products import gate, multiply_columns, multiply_rows


@kernel
def _gate_bwd(
    q_ptr,
    pre_ptr,
    weight_ptr,
    dpre_ptr,
    z_ptr,
    dweight_ptr,
    dout_ptr,
    bias_ptr,
    index_ptr,
    order_ptr,
    stride_dout,
    TOP,
    H,
    F,
    limit,
    edge,
    alpha,
    shift,
    ACT: tl.constexpr,
    AT_EDGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a row of dpre, of w·z, and dw of its assignment. Each may be left out, and q
    with dpre and dw.

    dpre may be in the memory of pre, and z in that of q. edge is the limit in pre's dtype.
    """
    r = tl.program_id(0).to(tl.int64)
    s = tl.load(order_ptr + r).to(tl.int64)
    if s < 0:
        return
    weight = tl.load(weight_ptr + s).to(tl.float32)
    i = tl.arange(0, BLOCK)
    dot = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, F, BLOCK):
        n = start + i
        if INTERLEAVED:
            pair = 2 * start + tl.arange(0, 2 * BLOCK)
            g, u = tl.split(tl.reshape(read(pre_ptr, r * 2 * F + pair, pair < 2 * F), (BLOCK, 2)))
        else:
            g, u = read(pre_ptr, r * 2 * F + n, n < F), read(pre_ptr, r * 2 * F + F + n, n < F)
        if limit is not None:
            g_moves = moves(g, edge, AT_EDGE)
            u_moves = moves(tl.abs(u), edge, AT_EDGE)
        act, slope, u = gate(g, u, limit, alpha, shift, ACT)
        if q_ptr is not None:
            q = read(q_ptr, r * F + n, n < F)
            dot += q * (act * u)
        if z_ptr is not None:
            tl.store(z_ptr + r * F + n, (weight * (act * u)).to(z_ptr.dtype.element_ty), mask=n < F)
        if dpre_ptr is not None:
            dz = weight * q
            dg, du = dz * u * slope, dz * act
            if limit is not None:
                dg, du = tl.where(g_moves, dg, 0.0), tl.where(u_moves, du, 0.0)
            dg, du = dg.to(dpre_ptr.dtype.element_ty), du.to(dpre_ptr.dtype.element_ty)
            if INTERLEAVED:
                both = tl.reshape(tl.join(dg, du), (2 * BLOCK,))
                tl.store(dpre_ptr + r * 2 * F + pair, both, mask=pair < 2 * F)
            else:
                tl.store(dpre_ptr + r * 2 * F + n, dg, mask=n < F)
                tl.store(dpre_ptr + r * 2 * F + F + n, du, mask=n < F)
    if dweight_ptr is not None:
        if bias_ptr is not None:
            e = tl.load(index_ptr + s).to(tl.int64)
            for start in range(0, H, BLOCK):
                h = start + i
                dout = read(dout_ptr, s // TOP * stride_dout + h, h < H)
                dot += dout * read(bias_ptr, e * H + h, h < H)
        tl.store(dweight_ptr + s, tl.sum(dot).to(dweight_ptr.dtype.element_ty))


@kernel
def _sums(
    a_ptr,
    weight_ptr,
    c_ptr,
    order_ptr,
    offset_ptr,
    stride_a,
    N,
    TOP,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_N columns of c_e = Σ_r a_r, or with weights Σ_r weight_s·a_t: then a has
    the tokens' rows."""
    e, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = tl.load(offset_ptr + e), tl.load(offset_ptr + e + 1)
    c = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(begin, end, BLOCK_M):
        r = start + tl.arange(0, BLOCK_M)
        known = r < end
        row = r.to(tl.int64)
        if weight_ptr is not None:
            s = tl.load(order_ptr + r, mask=known, other=0)
            row = (s // TOP).to(tl.int64)
        a = read(a_ptr, row[:, None] * stride_a + n[None, :], known[:, None] & (n < N)[None, :])
        if weight_ptr is not None:
            a *= read(weight_ptr, s, known)[:, None]
        c += a
    tl.store(c_ptr + e * N + n, tl.sum(c, axis=0).to(c_ptr.dtype.element_ty), mask=n < N)


@kernel
def _add(
    y_ptr,
    weight_ptr,
    index_ptr,
    place_ptr,
    out_ptr,
    T,
    N,
    E,
    TOP,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_N columns of BLOCK_M tokens, out_t = Σ_k weight_s·y_s, or Σ_k y_s without
    weights.

    With place_ptr, y_s is the row place[s].
    """
    blocks = tl.cdiv(N, BLOCK_N)
    t = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    out = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(TOP):
        s = t * TOP + k
        i = tl.load(index_ptr + s, mask=t < T, other=0).to(tl.int64)
        known = (t < T) & (i >= 0) & (i < E)
        row = s
        if place_ptr is not None:
            row = tl.load(place_ptr + s, mask=known, other=0).to(tl.int64)
        y = read(y_ptr, row * N + n, known & (n < N))
        if weight_ptr is not None:
            y *= read(weight_ptr, s, known)
        out += y
    tl.store(out_ptr + t * N + n, out.to(out_ptr.dtype.element_ty), mask=(t < T) & (n < N))


def _launch_rows(M, N):
    """(rows, columns) of a program that adds rows up."""
    columns = min(next_power_of_2(max(N, 1)), 512)
    return min(2048 // columns, next_power_of_2(max(M, 1))), columns


def _table(w, transposed):
    """The weights as (E, rows, columns) of `torch.nn.Linear`, a view."""
    return w.mT if transposed else w


def _contiguous(t):
    return None if t is None else t.contiguous()


def add_rows(y, weights, index, out, E, place=None):
    """out (T, N): of each token the K rows of y, (T·K, N), added in fp32; ``place`` says where they
    are."""
    (T, N), TOP = out.shape, index.shape[1]
    rows, columns = _launch_rows(T, N)
    _add[(cdiv(T, rows) * cdiv(N, columns),)](
        y, weights, index, place, out, T, N, E, TOP, BLOCK_M=rows, BLOCK_N=columns, num_warps=4
    )


def _sum_rows(a, weights, c, TOP, order, offsets):
    E, N = c.shape
    _sums[(cdiv(N, 64), E)](
        a, weights, c, order, offsets, a.stride(0), N, TOP, BLOCK_M=32, BLOCK_N=64, num_warps=4
    )


def _outputs(x, gate_up, down, index, *others):
    transposed, _, keep = others[-3:]
    columns = gate_up.shape[2 if transposed else 1]
    return x.new_empty(x.shape), x.new_empty((index.numel(), columns)) if keep else None


@custom_op("experts", _outputs)
def experts_fwd(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    rows: int,
    act: str,
    limit: float | None,
    alpha: float,
    shift: float,
    transposed: bool,
    interleaved: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (T, H) and the experts' weights of any strides, and what `routing` gives for tiles of
    ``rows`` rows.

    -> out (T, H) and, to keep it, pre (T·K, 2I): row r is that of assignment order[r], columns are
    gate_up's.
    """
    out, pre = _outputs(x, gate_up, down, index, transposed, interleaved, keep)
    x, index, weights = matrix_rows(x), index.contiguous(), weights.contiguous()
    gate_up, down = _table(gate_up, transposed), _table(down, transposed)
    (E, H, F), S = down.shape, index.numel()
    z, y = x.new_empty((S, F)), x.new_empty((S, H))
    TOP, metadata = index.shape[1], (order, offsets, tiles, rows)
    gated = limit, None if alpha == 1 else alpha, shift, act, interleaved
    multiply_rows(x, gate_up.mT, _contiguous(gate_up_bias), pre, True, TOP, *metadata, z, gated)
    multiply_rows(z, down.mT, _contiguous(down_bias), y, False, TOP, *metadata)
    add_rows(y, weights, index, out, E)
    return out, pre


def _gradients(dout, x, gate_up, down, index, weights, gate_up_bias, down_bias, *others):
    given = x, gate_up, down, weights, gate_up_bias, down_bias
    return tuple(
        t.new_empty(t.shape) if need else None for t, need in zip(given, others[-6:], strict=True)
    )


@custom_op("experts_backward", _gradients)
def experts_bwd(
    dout: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    pre: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    rows: int,
    act: str,
    limit: float | None,
    alpha: float,
    shift: float,
    transposed: bool,
    interleaved: bool,
    need_dx: bool,
    need_dgate_up: bool,
    need_ddown: bool,
    need_dweights: bool,
    need_dgate_up_bias: bool,
    need_ddown_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> the gradients of x, gate_up, down, weights and both biases: None for what is not
    needed."""
    needs = need_dx, need_dgate_up, need_ddown, need_dweights, need_dgate_up_bias, need_ddown_bias
    return launch_bwd(
        dout,
        x,
        gate_up,
        down,
        index,
        weights,
        gate_up_bias,
        down_bias,
        pre,
        order,
        offsets,
        tiles,
        rows,
        act,
        limit,
        alpha,
        shift,
        transposed,
        interleaved,
        *needs,
        dpre=None,
    )


def launch_bwd(
    dout,
    x,
    gate_up,
    down,
    index,
    weights,
    gate_up_bias,
    down_bias,
    pre,
    order,
    offsets,
    tiles,
    rows,
    act,
    limit,
    alpha,
    shift,
    transposed,
    interleaved,
    *needs,
    dpre,
):
    """`experts_bwd`, with dpre in the memory that is given; it may be that of pre.

    Memory for a gradient is taken when it is made: that of the largest one last, after all else is
    free again."""
    need_dx, need_dgate_up, need_ddown, need_dweights, need_dgate_up_bias, need_ddown_bias = needs
    dx = dgate_up = ddown = dweights = dgate_up_bias = ddown_bias = q = z = None
    dout, x, index, weights = (
        matrix_rows(dout),
        matrix_rows(x),
        index.contiguous(),
        weights.contiguous(),
    )
    w, d = _table(gate_up, transposed), _table(down, transposed)
    (E, H, F), TOP, S, metadata = (
        d.shape,
        index.shape[1],
        index.numel(),
        (order, offsets, tiles, rows),
    )
    if not (need_dx or need_dgate_up or need_dgate_up_bias):
        dpre = None
    elif dpre is None:
        dpre = pre.new_empty(pre.shape)
    if need_dweights:
        dweights = torch.zeros_like(weights)
    if dpre is not None or need_dweights:
        q = pre.new_empty((S, F))
        multiply_rows(dout, d, None, q, True, TOP, *metadata)
    if need_ddown:
        z = pre.new_empty((S, F)) if q is None else q
    if q is not None or z is not None:
        block = min(
            next_power_of_2(max(F, 1)), 1024
        )  # no entry in two threads: z and dpre lie over q and pre
        _gate_bwd[(S,)](
            q,
            pre,
            weights,
            dpre,
            z,
            dweights,
            dout,
            _contiguous(down_bias),
            index,
            order,
            dout.stride(0),
            TOP,
            H,
            F,
            limit,
            rounded_number(limit, pre.dtype),
            None if alpha == 1 else alpha,
            shift,
            ACT=ACTS[act],
            AT_EDGE=CLAMP_MOVES_AT_LIMIT,
            INTERLEAVED=interleaved,
            BLOCK=block,
            num_warps=devices.warps(min(block // 32, 4), x),
        )
    if need_ddown:
        ddown = down.new_empty(down.shape)
        multiply_columns(dout, z, _table(ddown, transposed), "a", TOP, order, offsets)
    del q, z
    if need_dx:
        dx, parts = x.new_empty(x.shape), x.new_empty((S, H))
        multiply_rows(dpre, w, None, parts, False, TOP, *metadata)
        add_rows(parts, None, index, dx, E)
        del parts
    if need_dgate_up:
        dgate_up = gate_up.new_empty(gate_up.shape)
        multiply_columns(dpre, x, _table(dgate_up, transposed), "b", TOP, order, offsets)
    if need_dgate_up_bias:
        dgate_up_bias = gate_up_bias.new_empty(gate_up_bias.shape)
        _sum_rows(dpre, None, dgate_up_bias, TOP, order, offsets)
    if need_ddown_bias:
        ddown_bias = down_bias.new_empty(down_bias.shape)
        _sum_rows(dout, weights, ddown_bias, TOP, order, offsets)
    return dx, dgate_up, ddown, dweights, dgate_up_bias, ddown_bias
