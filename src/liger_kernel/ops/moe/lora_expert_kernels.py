"""The whole of forward and backward of experts whose tables have low-rank adapters.

The formulas are in the file lora_experts, whose names are used here. The kernels are those of
experts: a narrow product gives the rows that are multiplied with an adapter's second matrix, and
the wide product beside it adds that to its sum (`grouped_matmul`)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_kernel.core.op import cast_if_needed, custom_op, flatten_rows
from liger_kernel.core.tile import cdiv
from liger_kernel.ops.moe.expert_kernels import gate_backward, linear_layout, multiply_and_sum
from liger_kernel.ops.moe.grouped_matmul import RANK_MULTIPLE, grouped_matmul
from liger_kernel.ops.moe.outer_products import narrow_outer_products

# ---- products of sorted rows ----


class _Factors(NamedTuple):
    """An adapter as the kernels read it: contiguous, in x's dtype, and of a rank R that is a
    multiple of `RANK_MULTIPLE`; what is beyond the adapter's own rank is 0.

    Attributes:
        a: (E, R, in).
        b: (E, R, out), times the scaling.
    """

    a: torch.Tensor
    b: torch.Tensor


def _pad_factors(a, b, scaling, dtype) -> _Factors | None:
    if a is None:
        return None
    return _Factors(_pad_rank(a, dtype), _pad_b(b, scaling, dtype))


def _pad_b(b, scaling, dtype):
    b = cast_if_needed(b, torch.promote_types(b.dtype, dtype))
    return _pad_rank(b.mT * scaling, dtype)


def _padded(rank):
    return cdiv(rank, RANK_MULTIPLE) * RANK_MULTIPLE


def _pad_rank(factor, dtype):
    E, rank, features = factor.shape
    padded = factor.new_empty((E, _padded(rank), features), dtype=dtype)
    padded[:, :rank].copy_(factor)
    padded[:, rank:].zero_()
    return padded


class _SortedRows:
    """The assignments of tokens to experts in the experts' order, and the products of their rows.

    A row r of a product is of expert e, and is one of S."""

    def __init__(self, index, order, offsets, tiles, tile_rows):
        self.index = index.contiguous()
        self.order = order
        self.offsets = offsets
        self.tiles = tiles
        self.tile_rows = tile_rows
        S = self.order.numel()
        self.in_order = torch.arange(S, dtype=torch.int32, device=index.device)

    def gated_product(
        self, x, matrices, bias, low_rank, pre, z, act, limit, alpha, shift, interleaved
    ):
        """Write pre (S, 2·I), if it is not None, and z (S, I) for the tokens' rows of x."""
        self._multiply(
            x,
            matrices,
            bias,
            pre,
            True,
            self.order,
            low_rank,
            z=z,
            act=act,
            limit=limit,
            alpha=None if alpha == 1 else alpha,
            shift=shift,
            interleaved=interleaved,
        )

    def multiply_tokens(self, x, matrices, low_rank=None):
        """Return c (S, N): the row of each r's token in x (T, K), times matrices_e (E, K, N)."""
        c = self._empty(x, matrices)
        self._multiply(x, matrices, None, c, True, self.order, low_rank)
        return c

    def multiply(self, a, matrices):
        """Return c (S, N): row r of a (S, K) times matrices_e."""
        c = self._empty(a, matrices)
        self._multiply(a, matrices, None, c, False, self.in_order, None)
        return c

    def multiply_and_sum(self, a, matrices, bias, weights, out, low_rank):
        """Write out (T, N), the sum of each token's rows as `multiply` has them."""
        routed = self._routed(self.order)
        multiply_and_sum(a, matrices, bias, weights, out, self.index, *routed, low_rank=low_rank)

    def _multiply(self, a, matrices, bias, c, gather, order, low_rank, **activation):
        bias = None if bias is None else bias.contiguous()
        routed = self._routed(order)
        grouped_matmul(a, matrices, bias, c, gather, *routed, low_rank=low_rank, **activation)

    def _routed(self, order):
        """Return the arguments of `grouped_matmul` that say which rows are whose."""
        return self.index.shape[1], order, self.offsets, self.tiles, self.tile_rows

    def _empty(self, a, matrices):
        return a.new_empty((self.order.numel(), matrices.shape[2]))

    def outer_products(self, a, b, c):
        """Write c (E, r, N): Σ_r a_r ⊗ b_r for each expert, with b (S, N)."""
        narrow_outer_products(a, b, c, 1, self.in_order, self.offsets)

    def outer_products_of_tokens(self, a, x, c):
        """Write c (E, r, N): Σ_r a_r ⊗ x_t for each expert, with x (T, N)."""
        narrow_outer_products(a, x, c, self.index.shape[1], self.order, self.offsets)

    def weights(self, top_k_weights):
        """Return the routing weight of each r, (S, 1). A row of no expert gets any."""
        return top_k_weights.reshape(-1)[self.order.clamp(min=0)][:, None]


# ---- forward ----


def _empty_rows(x, gate_up, index, gate_up_bias, gate_up_a, gate_up_b, down_a, *arguments):
    transposed, keep_pre = arguments[-3], arguments[-1]
    S = index.numel()
    columns = gate_up.shape[2 if transposed else 1]
    z = x.new_empty((S, columns // 2))
    pre = x.new_empty((S, columns)) if keep_pre else None
    a, p = (
        None if factor is None else x.new_empty((S, _padded(factor.shape[1])))
        for factor in (gate_up_a if keep_pre else None, down_a)
    )
    return z, pre, a, p


@custom_op("lora_experts_up", _empty_rows)
def lora_experts_up(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    index: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    gate_up_a: torch.Tensor | None,
    gate_up_b: torch.Tensor | None,
    down_a: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
    gate_up_scaling: float,
    act: str,
    limit: float | None,
    alpha: float,
    shift: float,
    transposed: bool,
    interleaved: bool,
    keep_pre: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return z (S, I), pre (S, 2I), a and p. Without ``keep_pre`` pre and a are None.

    Of a table without an adapter a or p is None, too. In a compiled graph they are empty instead.
    Arguments: as of `experts_up`."""
    rows = _SortedRows(index, order, offsets, tiles, tile_rows)
    x = flatten_rows(x)
    gate_up = linear_layout(gate_up, transposed)
    S, columns = index.numel(), gate_up.shape[1]
    z = x.new_empty((S, columns // 2))
    pre = x.new_empty((S, columns)) if keep_pre else None
    a = p = low_rank = None
    if gate_up_a is not None:
        factors = _pad_factors(gate_up_a, gate_up_b, gate_up_scaling, x.dtype)
        a = rows.multiply_tokens(x, factors.a.mT)
        low_rank = a, factors.b
    activation = act, limit, alpha, shift, interleaved
    rows.gated_product(x, gate_up.mT, gate_up_bias, low_rank, pre, z, *activation)
    if down_a is not None:
        p = rows.multiply(z, _pad_rank(down_a, x.dtype).mT)
    return z, pre, a if keep_pre else None, p


def _empty_output(z, p, down, index, *arguments):
    return z.new_empty((index.shape[0], down.shape[2 if arguments[-1] else 1]))


@custom_op("lora_experts_down", _empty_output)
def lora_experts_down(
    z: torch.Tensor,
    p: torch.Tensor | None,
    down: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    down_bias: torch.Tensor | None,
    down_b: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
    down_scaling: float,
    transposed: bool,
) -> torch.Tensor:
    """Return out (T, H). Arguments: as of `lora_experts_up`, which returns z and p."""
    rows = _SortedRows(index, order, offsets, tiles, tile_rows)
    low_rank = None if down_b is None else (p, _pad_b(down_b, down_scaling, z.dtype))
    out = _empty_output(z, p, down, index, transposed)
    down = linear_layout(down, transposed)
    rows.multiply_and_sum(z, down.mT, down_bias, weights.contiguous(), out, low_rank)
    return out


# ---- backward ----


def _empty_gradients(dout, x, gate_up, down, index, weights, *arguments):
    inputs = x, weights, *arguments[2:6]
    return tuple(
        t.new_empty(t.shape) if need else None
        for t, need in zip(inputs, arguments[-6:], strict=True)
    )


@custom_op("lora_experts_backward", _empty_gradients)
def lora_experts_bwd(
    dout: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gate_up_a: torch.Tensor | None,
    gate_up_b: torch.Tensor | None,
    down_a: torch.Tensor | None,
    down_b: torch.Tensor | None,
    pre: torch.Tensor,
    a: torch.Tensor | None,
    p: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
    gate_up_scaling: float,
    down_scaling: float,
    act: str,
    limit: float | None,
    alpha: float,
    shift: float,
    transposed: bool,
    interleaved: bool,
    need_x: bool,
    need_weights: bool,
    need_gate_up_a: bool,
    need_gate_up_b: bool,
    need_down_a: bool,
    need_down_b: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, weights and the adapters' matrices.

    A gradient that is not needed is None."""
    return compute_lora_gradients(
        dout,
        x,
        gate_up,
        down,
        index,
        weights,
        gate_up_bias,
        down_bias,
        gate_up_a,
        gate_up_b,
        down_a,
        down_b,
        pre,
        a,
        p,
        order,
        offsets,
        tiles,
        tile_rows,
        gate_up_scaling,
        down_scaling,
        act,
        limit,
        alpha,
        shift,
        transposed,
        interleaved,
        need_x,
        need_weights,
        need_gate_up_a,
        need_gate_up_b,
        need_down_a,
        need_down_b,
        dpre=None,
    )


def compute_lora_gradients(
    dout,
    x,
    gate_up,
    down,
    index,
    weights,
    gate_up_bias,
    down_bias,
    gate_up_a,
    gate_up_b,
    down_a,
    down_b,
    pre,
    a,
    p,
    order,
    offsets,
    tiles,
    tile_rows,
    gate_up_scaling,
    down_scaling,
    act,
    limit,
    alpha,
    shift,
    transposed,
    interleaved,
    need_x,
    need_weights,
    need_gate_up_a,
    need_gate_up_b,
    need_down_a,
    need_down_b,
    dpre,
):
    """Compute `lora_experts_bwd`, with dpre in the memory that is given; it may be that of pre."""
    rows = _SortedRows(index, order, offsets, tiles, tile_rows)
    dout = flatten_rows(dout)
    x = flatten_rows(x)
    gate_up = linear_layout(gate_up, transposed)
    down = linear_layout(down, transposed)
    gate_up_factors = _pad_factors(gate_up_a, gate_up_b, gate_up_scaling, x.dtype)
    down_factors = _pad_factors(down_a, down_b, down_scaling, x.dtype)
    dx = dweights = d_gate_up_a = d_gate_up_b = d_down_a = d_down_b = None

    v = c = q = z = low_rank = None
    if down_factors is not None:
        v = rows.multiply_tokens(dout, down_factors.b.mT)
        low_rank = v, down_factors.a
    if not (need_x or need_gate_up_a or need_gate_up_b):
        dpre = None
    elif dpre is None:
        dpre = pre.new_empty(pre.shape)
    if need_weights:
        dweights = weights.new_zeros(weights.shape)
    if dpre is not None or need_weights:
        q = rows.multiply_tokens(dout, down, low_rank)
    if need_down_a:
        z = pre.new_empty((pre.shape[0], down.shape[2])) if q is None else q
    if q is not None or z is not None:
        gate_backward(
            q,
            pre,
            weights.contiguous(),
            dpre,
            z,
            dweights,
            dout,
            down_bias,
            rows.index,
            order,
            act,
            limit,
            alpha,
            shift,
            interleaved,
        )
    if need_down_a:
        d_down_a = down_a.new_empty(down_a.shape)
        rows.outer_products(v, z, d_down_a)
    if need_down_b:
        weighted_p = (p * rows.weights(weights)).to(p.dtype)
        d_down_b = down_b.new_empty(down_b.shape)
        rows.outer_products_of_tokens(weighted_p, dout, d_down_b.mT)
        d_down_b.mul_(down_scaling)
    del q, z, v

    low_rank = None
    if gate_up_factors is not None and (need_x or need_gate_up_a):
        c = rows.multiply(dpre, gate_up_factors.b.mT)
        low_rank = c, gate_up_factors.a
    if need_gate_up_a:
        d_gate_up_a = gate_up_a.new_empty(gate_up_a.shape)
        rows.outer_products_of_tokens(c, x, d_gate_up_a)
    if need_gate_up_b:
        d_gate_up_b = gate_up_b.new_empty(gate_up_b.shape)
        rows.outer_products(a, dpre, d_gate_up_b.mT)
        d_gate_up_b.mul_(gate_up_scaling)
    if need_x:
        dx = x.new_empty(x.shape)
        rows.multiply_and_sum(dpre, gate_up, None, None, dx, low_rank)
    return dx, dweights, d_gate_up_a, d_gate_up_b, d_down_a, d_down_b
