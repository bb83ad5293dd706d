r"""The kernels of experts besides their matrix products, and the whole of forward and backward.

With the assignments sorted by expert (`routing`), row r of expert e is that of assignment s =
order[r] and of token t = s // K. W_e is gate_up_proj[e], with 2I rows, and D_e is down_proj[e]:

    pre_r = W_e·x_t + b_e,   (g, u) = pre_r in halves, or its even and odd entries,   z_r = act(g)·u
    y_s = D_e·z_r + d_e,     out_t = Σ_k w_s·y_s

    q_r = dout_t·D_e,   dw_s = <q_r, z_r> + <dout_t, d_e>,   dz_r = w_s·q_r
    dg = dz·u·act'(g),  du = dz·act(g),  dpre_r = (dg, du),   dx_t = Σ_k dpre_r·W_e
    dD_e = Σ_r dout_t ⊗ w_s·z_r,   dW_e = Σ_r dpre_r ⊗ x_t
    dd_e = Σ_r w_s·dout_t,   db_e = Σ_r dpre_r

With a limit, g and u are those of `liger_clamped_swiglu`, and act(g) is silu(alpha·g)/alpha.

`grouped_matmul` has the products of rows with their own expert's matrix. A product reads its rows
of x and of dout where they lie, by their tokens, and writes y and the parts of dx by their
assignments. So a token's K rows are neighbours, and are added in that order: the same sum in every
run. Sums are in fp32. Rounded are pre, q, w·z, dpre, each expert's y and part of dx, and the
results. In forward, z is made from sums in fp32, in the product's own program. In backward it is
made from pre, where q comes back: one more trip of q through memory, but a product that needs no
registers for anything else."""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import custom_op, flatten_rows, round_number
from liger_kernel.core.tile import cdiv, load_fp32, next_power_of_2, tl
from liger_kernel.ops.mlp.pointwise import (
    CLAMP_HAS_GRADIENT_AT_LIMIT,
    activation_function,
    clamp_has_gradient,
)
from liger_kernel.ops.moe.grouped_matmul import column_strips, gate, grouped_matmul
from liger_kernel.ops.moe.outer_products import grouped_outer_products

# of rows of assignments, as wide as x, that are in memory at a time. 32,768 tokens of 4,096
# channels through 16 of 256 experts of 256: a peak of 3.5 instead of 5.5 GiB, 22.54 instead of
# 22.57 ms. 2**30: 2.5 GiB, 22.71 ms; 65,536 tokens of Qwen3-30B-A3B: 28.5 instead of 28.0 ms (H200,
# 2026-11-29)
PARTS_BYTES = 2**31


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
    TOP_K,
    H,
    F,
    limit,
    limit_rounded,
    alpha,
    shift,
    ACT: tl.constexpr,
    AT_LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a row of dpre, of w·z, and dw of its assignment, from rows of q and pre.

    Each output may be None, and q may be None without dpre and dw. dpre may be in the memory of
    pre, and z in that of q. limit_rounded is the limit in pre's dtype.
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
            g, u = tl.split(
                tl.reshape(load_fp32(pre_ptr, r * 2 * F + pair, pair < 2 * F), (BLOCK, 2))
            )
        else:
            g = load_fp32(pre_ptr, r * 2 * F + n, n < F)
            u = load_fp32(pre_ptr, r * 2 * F + F + n, n < F)
        if limit is not None:
            g_has_grad = clamp_has_gradient(g, limit_rounded, AT_LIMIT)
            u_has_grad = clamp_has_gradient(tl.abs(u), limit_rounded, AT_LIMIT)
        act, slope, u = gate(g, u, limit, alpha, shift, ACT)
        if q_ptr is not None:
            q = load_fp32(q_ptr, r * F + n, n < F)
            dot += q * (act * u)
        if z_ptr is not None:
            tl.store(z_ptr + r * F + n, (weight * (act * u)).to(z_ptr.dtype.element_ty), mask=n < F)
        if dpre_ptr is not None:
            dz = weight * q
            dg, du = dz * u * slope, dz * act
            if limit is not None:
                dg = tl.where(g_has_grad, dg, 0.0)
                du = tl.where(u_has_grad, du, 0.0)
            dg = dg.to(dpre_ptr.dtype.element_ty)
            du = du.to(dpre_ptr.dtype.element_ty)
            if INTERLEAVED:
                dpre = tl.reshape(tl.join(dg, du), (2 * BLOCK,))
                tl.store(dpre_ptr + r * 2 * F + pair, dpre, mask=pair < 2 * F)
            else:
                tl.store(dpre_ptr + r * 2 * F + n, dg, mask=n < F)
                tl.store(dpre_ptr + r * 2 * F + F + n, du, mask=n < F)
    if dweight_ptr is not None:
        if bias_ptr is not None:
            e = tl.load(index_ptr + s).to(tl.int64)
            for start in range(0, H, BLOCK):
                h = start + i
                dout = load_fp32(dout_ptr, s // TOP_K * stride_dout + h, h < H)
                dot += dout * load_fp32(bias_ptr, e * H + h, h < H)
        tl.store(dweight_ptr + s, tl.sum(dot).to(dweight_ptr.dtype.element_ty))


@kernel
def _sum_by_expert(
    a_ptr,
    weight_ptr,
    c_ptr,
    order_ptr,
    offset_ptr,
    stride_a,
    N,
    TOP_K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute BLOCK_N columns of c_e = Σ_r a_r.

    With weights it is Σ_r weight_s·a_t, and a has the tokens' rows."""
    # c (BLOCK_M, BLOCK_N)
    e = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(offset_ptr + e)
    end = tl.load(offset_ptr + e + 1)
    c = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(begin, end, BLOCK_M):
        r = start + tl.arange(0, BLOCK_M)
        row_mask = r < end
        row = r.to(tl.int64)
        if weight_ptr is not None:
            s = tl.load(order_ptr + r, mask=row_mask, other=0)
            row = (s // TOP_K).to(tl.int64)
        a = load_fp32(
            a_ptr, row[:, None] * stride_a + n[None, :], row_mask[:, None] & (n < N)[None, :]
        )
        if weight_ptr is not None:
            a *= load_fp32(weight_ptr, s, row_mask)[:, None]
        c += a
    tl.store(c_ptr + e * N + n, tl.sum(c, axis=0).to(c_ptr.dtype.element_ty), mask=n < N)


@kernel
def _sum_by_token(
    y_ptr,
    weight_ptr,
    index_ptr,
    position_ptr,
    out_ptr,
    stride_out,
    T,
    N,
    E,
    TOP_K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute BLOCK_N columns of out_t = Σ_k weight_s·y_s for BLOCK_M tokens.

    Without weights it is Σ_k y_s. With position_ptr, y_s is the row position[s] of y.
    """
    # t (BLOCK_M, 1), n (1, BLOCK_N); y, out (BLOCK_M, BLOCK_N)
    blocks_n = tl.cdiv(N, BLOCK_N)
    t = (tl.program_id(0) // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    out = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(TOP_K):
        s = t * TOP_K + k
        e = tl.load(index_ptr + s, mask=t < T, other=0).to(tl.int64)
        is_expert = (t < T) & (e >= 0) & (e < E)
        row = s
        if position_ptr is not None:
            row = tl.load(position_ptr + s, mask=is_expert, other=0).to(tl.int64)
        y = load_fp32(y_ptr, row * N + n, is_expert & (n < N))
        if weight_ptr is not None:
            y *= load_fp32(weight_ptr, s, is_expert)
        out += y
    tl.store(out_ptr + t * stride_out + n, out.to(out_ptr.dtype.element_ty), mask=(t < T) & (n < N))


def sum_by_token(y, weights, index, out, E, position=None):
    """Write out (T, N): the sum of each token's K rows of y (T·K, N) in fp32, weighted if weights.

    ``position`` (T·K,) says which row of y is that of an assignment; None: they are in order."""
    T, N = out.shape
    top_k = index.shape[1]
    block_n = min(next_power_of_2(max(N, 1)), 512)
    block_m = min(2048 // block_n, next_power_of_2(max(T, 1)))
    _sum_by_token[(cdiv(T, block_m) * cdiv(N, block_n),)](
        y,
        weights,
        index,
        position,
        out,
        out.stride(0),
        T,
        N,
        E,
        top_k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
    )


def multiply_and_sum(a, matrices, bias, weights, out, index, *routed, low_rank=None):
    """Write out (T, N): each token's sum of the rows a·b_e + bias_e of its experts, weighted if
    weights.

    a (S, K) has a row for each r, and the matrices b are (E, K, N). ``routed`` are the arguments of
    `grouped_matmul` from ``top_k`` to ``tile_rows``; for ``low_rank`` see there, too. All rows of
    the product are in memory before they are added. Where they take more than `PARTS_BYTES`, that
    is done for some columns after the others."""
    E, _, N = matrices.shape
    S = index.numel()
    for columns in column_strips(S, N, out, PARTS_BYTES):
        strip = matrices[:, :, columns]
        factors = low_rank and (low_rank[0], low_rank[1][:, :, columns].contiguous())
        parts = out.new_empty((S, strip.shape[2]))
        strip_bias = None if bias is None else bias[:, columns].contiguous()
        grouped_matmul(a, strip, strip_bias, parts, False, *routed, low_rank=factors)
        sum_by_token(parts, weights, index, out[:, columns], E)
        del parts  # before the next ones are allocated


def gate_backward(
    q,
    pre,
    weights,
    dpre,
    z,
    dweights,
    dout,
    down_bias,
    index,
    order,
    act,
    limit,
    alpha,
    shift,
    interleaved,
):
    """Write dpre, w·z and dw; see `_gate_bwd`. z may be in the memory of q, dpre in that of pre."""
    S, columns = pre.shape
    F = columns // 2
    # no entry in two threads: z and dpre lie over q and pre
    block = min(next_power_of_2(max(F, 1)), 1024)
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
        index.shape[1],
        dout.shape[1],
        F,
        limit,
        round_number(limit, pre.dtype),
        None if alpha == 1 else alpha,
        shift,
        ACT=activation_function(act, pre),
        AT_LIMIT=CLAMP_HAS_GRADIENT_AT_LIMIT,
        INTERLEAVED=interleaved,
        BLOCK=block,
        num_warps=devices.limit_warps(min(block // 32, 4), pre),
    )


def _launch_sum_by_expert(a, weights, c, top_k, order, offsets):
    E, N = c.shape
    _sum_by_expert[(cdiv(N, 64), E)](
        a, weights, c, order, offsets, a.stride(0), N, top_k, BLOCK_M=32, BLOCK_N=64, num_warps=4
    )


def linear_layout(w, transposed):
    """Return a view of the weights as (E, out_features, in_features), like `torch.nn.Linear`'s."""
    return w.mT if transposed else w


def _contiguous(t):
    return None if t is None else t.contiguous()


def _empty_rows(x, gate_up, index, *options):
    transposed, _, keep_pre = options[-3:]
    columns = gate_up.shape[2 if transposed else 1]
    S = index.numel()
    pre = x.new_empty((S, columns)) if keep_pre else None
    return x.new_empty((S, columns // 2)), pre


@custom_op("experts_up", _empty_rows)
def experts_up(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    index: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
    act: str,
    limit: float | None,
    alpha: float,
    shift: float,
    transposed: bool,
    interleaved: bool,
    keep_pre: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return z (T·K, I) and, with ``keep_pre``, the pre-activation pre (T·K, 2I), else None.

    x is (T, H), and the experts' weights may have any strides. order, offsets and tiles are from
    `routing`, for tiles of ``tile_rows`` rows. Row r of pre is that of assignment order[r], and its
    columns are gate_up's.
    """
    z, pre = _empty_rows(x, gate_up, index, transposed, interleaved, keep_pre)
    grouped_matmul(
        flatten_rows(x),
        linear_layout(gate_up, transposed).mT,
        _contiguous(gate_up_bias),
        pre,
        True,
        index.shape[1],
        order,
        offsets,
        tiles,
        tile_rows,
        z=z,
        act=act,
        limit=limit,
        alpha=None if alpha == 1 else alpha,
        shift=shift,
        interleaved=interleaved,
    )
    return z, pre


def _empty_output(z, down, index, weights, down_bias, order, offsets, tiles, tile_rows, transposed):
    return z.new_empty((index.shape[0], down.shape[2 if transposed else 1]))


@custom_op("experts_down", _empty_output)
def experts_down(
    z: torch.Tensor,
    down: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    down_bias: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
    transposed: bool,
) -> torch.Tensor:
    """Return out (T, H). Arguments: as of `experts_up`."""
    routed = index.shape[1], order, offsets, tiles, tile_rows
    out = _empty_output(z, down, index, weights, down_bias, *routed[1:], transposed)
    down = linear_layout(down, transposed)
    weights, index = weights.contiguous(), index.contiguous()
    multiply_and_sum(z, down.mT, down_bias, weights, out, index, *routed)
    return out


def _empty_gradients(dout, x, gate_up, down, index, weights, gate_up_bias, down_bias, *options):
    inputs = x, gate_up, down, weights, gate_up_bias, down_bias
    needs = options[-6:]
    return tuple(
        t.new_empty(t.shape) if need else None for t, need in zip(inputs, needs, strict=True)
    )


@custom_op("experts_backward", _empty_gradients)
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
    tile_rows: int,
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
    """Return the gradients of x, gate_up, down, weights and both biases.

    A gradient that is not needed is None."""
    return compute_gradients(
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
        tile_rows,
        act,
        limit,
        alpha,
        shift,
        transposed,
        interleaved,
        need_dx,
        need_dgate_up,
        need_ddown,
        need_dweights,
        need_dgate_up_bias,
        need_ddown_bias,
        dpre=None,
    )


def compute_gradients(
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
    tile_rows,
    act,
    limit,
    alpha,
    shift,
    transposed,
    interleaved,
    need_dx,
    need_dgate_up,
    need_ddown,
    need_dweights,
    need_dgate_up_bias,
    need_ddown_bias,
    dpre,
):
    """Compute `experts_bwd`, with dpre in the memory that is given; it may be that of pre.

    Memory for a gradient is allocated when the gradient is computed: that of the largest one last,
    after all else is free again."""
    dx = dgate_up = ddown = dweights = dgate_up_bias = ddown_bias = q = z = None
    dout = flatten_rows(dout)
    x = flatten_rows(x)
    index = index.contiguous()
    weights = weights.contiguous()
    w = linear_layout(gate_up, transposed)
    d = linear_layout(down, transposed)
    F = d.shape[2]
    S = index.numel()
    top_k = index.shape[1]
    routed = top_k, order, offsets, tiles, tile_rows
    if not (need_dx or need_dgate_up or need_dgate_up_bias):
        dpre = None
    elif dpre is None:
        dpre = pre.new_empty(pre.shape)
    if need_dweights:
        dweights = torch.zeros_like(weights)
    if dpre is not None or need_dweights:
        q = pre.new_empty((S, F))
        grouped_matmul(dout, d, None, q, True, *routed)
    if need_ddown:
        z = pre.new_empty((S, F)) if q is None else q
    if q is not None or z is not None:
        gate_backward(
            q,
            pre,
            weights,
            dpre,
            z,
            dweights,
            dout,
            down_bias,
            index,
            order,
            act,
            limit,
            alpha,
            shift,
            interleaved,
        )
    if need_ddown:
        ddown = down.new_empty(down.shape)
        grouped_outer_products(
            dout, z, linear_layout(ddown, transposed), "a", top_k, order, offsets
        )
    del q, z
    if need_dx:
        dx = x.new_empty(x.shape)
        multiply_and_sum(dpre, w, None, None, dx, index, *routed)
    if need_dgate_up:
        dgate_up = gate_up.new_empty(gate_up.shape)
        grouped_outer_products(
            dpre, x, linear_layout(dgate_up, transposed), "b", top_k, order, offsets
        )
    if need_dgate_up_bias:
        dgate_up_bias = gate_up_bias.new_empty(gate_up_bias.shape)
        _launch_sum_by_expert(dpre, None, dgate_up_bias, top_k, order, offsets)
    if need_ddown_bias:
        ddown_bias = down_bias.new_empty(down_bias.shape)
        _launch_sum_by_expert(dout, weights, ddown_bias, top_k, order, offsets)
    return dx, dgate_up, ddown, dweights, dgate_up_bias, ddown_bias
