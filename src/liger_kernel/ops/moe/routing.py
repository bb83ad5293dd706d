r"""Routing: the assignments of tokens to experts, sorted by expert on the device.

Token t has K experts, and assignment s = t·K + k is that of its k-th. Those of E experts are
counted in chunks:

    match(s, e) = 1 if index[s] = e, else 0
    count(c, e) = Σ_{s in chunk c} match(s, e),   total(e) = Σ_c count(c, e)
    offsets(e) = Σ_{e' < e} total(e'),   before(c, e) = Σ_{c' < c} count(c', e)
    order[offsets(e) + before(c, e) + rank(s)] = s   where index[s] = e
    rank(s) = Σ_{s' < s, in chunk c} 1 if index[s'] = index[s], else 0

So the assignments of an expert stay in the order of the tokens. An index that is no expert's is
dropped: in an expert-parallel group it marks what other ranks compute. The last entries of
``order`` are then -1.

A product of an expert's rows is computed in tiles of ``block`` rows. No expert pads more than its
last tile, so that there are never more than ⌈T·K / block⌉ + min(E, T·K) of them. The table has an
entry for each. Shapes depend on no value, and the host waits for nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import custom_op
from liger_kernel.core.tile import cdiv, next_power_of_2, tl, triton


def sort_reference(index, E):
    """Compute ``order`` and ``offsets`` of `routing` in plain PyTorch."""
    index = index.reshape(-1).long()
    index = index.where((index >= 0) & (index < E), E)
    order = index.argsort(stable=True)
    order = order.where(index[order] < E, -1)
    totals = (index[:, None] == torch.arange(E, device=index.device)).sum(0)
    return order.int(), torch.cat((totals.new_zeros(1), totals.cumsum(0))).int()


def routing_reference(index, E, block):
    """Compute `routing` in plain PyTorch. The tiles are only those in use."""
    order, offsets = sort_reference(index, E)
    tiles = []
    for e in range(E):
        for row in range(int(offsets[e]), int(offsets[e + 1]), block):
            tiles.append((e, row))
    return order, offsets, torch.tensor(tiles, dtype=torch.int32, device=index.device).view(-1, 2)


@triton.jit
def _load_experts(index_ptr, s, S, E):
    """Return the experts of assignments s, or -1."""
    e = tl.load(index_ptr + s, mask=s < S, other=0).to(tl.int64)  # uint8 has no -1
    return tl.where((s < S) & (e >= 0) & (e < E), e, -1).to(tl.int32)


@kernel
def _count(index_ptr, count_ptr, S, E, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr):
    """Count the assignments of BLOCK_E experts in one chunk."""
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)[:, None]
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
    count = tl.sum((_load_experts(index_ptr, s, S, E) == e).to(tl.int32), axis=0, keep_dims=True)
    tl.store(count_ptr + tl.program_id(0) * E + e, count, mask=e < E)


@kernel
def _scan(
    count_ptr, before_ptr, total_ptr, num_chunks, E, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Compute before(c, e) and total(e) of BLOCK_E experts."""
    c = tl.arange(0, BLOCK_C)[:, None]
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
    total = tl.zeros((1, BLOCK_E), dtype=tl.int32)
    for first in range(0, num_chunks, BLOCK_C):
        offsets = (first + c) * E + e
        mask = (first + c < num_chunks) & (e < E)
        count = tl.load(count_ptr + offsets, mask=mask, other=0)
        tl.store(before_ptr + offsets, total + tl.cumsum(count, axis=0) - count, mask=mask)
        total += tl.sum(count, axis=0, keep_dims=True)
    tl.store(total_ptr + e, total, mask=e < E)


@kernel
def _list_tiles(
    total_ptr,
    offset_ptr,
    tile_ptr,
    num_tiles,
    E,
    block,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write BLOCK_T entries of the table: the expert (-1: none) and the first row of each tile.

    The first program writes offsets."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    total = tl.load(total_ptr + e, mask=e < E, other=0)
    offset = tl.cumsum(total, axis=1)
    # columns from E on have no tile of their own: they end where the last expert's do
    tile_end = tl.cumsum((total + block - 1) // block, axis=1)
    if tl.program_id(0) == 0:
        tl.store(offset_ptr + e, tl.zeros((1, BLOCK_E), dtype=tl.int32), mask=e < 1)
        tl.store(offset_ptr + 1 + e, offset, mask=e < E)
    is_before = tile_end <= t
    expert = tl.sum((is_before & (e < E)).to(tl.int32), axis=1, keep_dims=True)
    first_tile = tl.max(tl.where(is_before, tile_end, 0), axis=1, keep_dims=True)
    first_row = tl.max(tl.where(is_before, offset, 0), axis=1, keep_dims=True)
    row = first_row + (t - first_tile) * block
    tl.store(tile_ptr + 2 * t, tl.where(expert < E, expert, -1), mask=t < num_tiles)
    tl.store(tile_ptr + 2 * t + 1, tl.where(expert < E, row, 0), mask=t < num_tiles)


@kernel
def _sort(
    index_ptr, before_ptr, offset_ptr, order_ptr, S, E, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr
):
    """Store one chunk's assignments in ``order``, and -1 in those of its entries that have none."""
    i = tl.arange(0, BLOCK_S)
    first = tl.program_id(0) * BLOCK_S
    e = _load_experts(index_ptr, first + i, S, E)
    rank = tl.zeros((BLOCK_S,), dtype=tl.int32)
    for start in range(0, BLOCK_S, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        other = _load_experts(index_ptr, first + j, S, E)
        is_earlier = (other[None, :] == e[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(is_earlier.to(tl.int32), axis=1)
    position = tl.load(offset_ptr + e, mask=e >= 0, other=0)
    position += tl.load(before_ptr + tl.program_id(0) * E + e, mask=e >= 0, other=0)
    tl.store(order_ptr + position + rank, first + i, mask=e >= 0)
    r = first + i
    empty = (r >= tl.load(offset_ptr + E)) & (r < S)
    tl.store(order_ptr + r, tl.full((BLOCK_S,), -1, dtype=tl.int32), mask=empty)


def _empty_metadata(index, E, block):
    S = index.numel()
    num_tiles = cdiv(S, block) + min(E, S)
    shapes = (S,), (E + 1,), (num_tiles, 2)
    return tuple(index.new_empty(shape, dtype=torch.int32) for shape in shapes)


@custom_op("expert_routing", _empty_metadata)
def routing(
    index: torch.Tensor, E: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the assignments of index (T, K) by expert. Returns order, offsets and tiles in int32.

    Expert e has the assignments ``order[offsets[e]:offsets[e + 1]]``, and row r of a product is
    that of order[r]. order is (T·K,), offsets (E + 1,), tiles (n, 2): of each tile of ``block``
    rows the expert, or -1, and the first row."""
    order, offsets, tiles = _empty_metadata(index, E, block)
    index, S = index.contiguous(), index.numel()
    block_s = 256  # assignments of a chunk
    block_e = next_power_of_2(E)
    block_e_of_chunk = min(block_e, 32)
    block_e_of_scan = min(block_e, 8)
    num_chunks = cdiv(S, block_s)
    num_tiles = tiles.shape[0]
    count, before = offsets.new_empty((2, num_chunks, E))
    total = offsets.new_empty(E)
    _count[num_chunks, cdiv(E, block_e_of_chunk)](
        index, count, S, E, BLOCK_S=block_s, BLOCK_E=block_e_of_chunk, num_warps=8
    )
    _scan[(cdiv(E, block_e_of_scan),)](
        count, before, total, num_chunks, E, BLOCK_C=512, BLOCK_E=block_e_of_scan, num_warps=8
    )
    _list_tiles[(max(cdiv(num_tiles, 32), 1),)](
        total, offsets, tiles, num_tiles, E, block, BLOCK_T=32, BLOCK_E=block_e, num_warps=8
    )
    _sort[(num_chunks,)](
        index, before, offsets, order, S, E, BLOCK_S=block_s, BLOCK_J=32, num_warps=8
    )
    return order, offsets, tiles


class RoutingMetadata(NamedTuple):
    """Expert e has the assignments ``order[offsets[e]:offsets[e + 1]]``; assignment s is of token
    ``s // K``."""

    # (T·K,), int32: assignments by expert, then by token; -1 at the end for those of no expert
    order: torch.Tensor
    offsets: torch.Tensor  # (E + 1,), int32
    # (n, 2), int32: the expert and the first row of each tile; the expert is -1 where there is none
    tiles: torch.Tensor


def compute_routing_metadata(
    top_k_index: torch.Tensor, num_experts: int, block: int = 128
) -> RoutingMetadata:
    """Sort the assignments of tokens by expert, for products of rows that are grouped by expert.

    The host waits for nothing.

    Args:
        top_k_index: (T, K), integers. What is no expert's index is dropped.
        num_experts: E.
        block: rows of a tile.

    Returns:
        ``order``, ``offsets`` and ``tiles``, whose shapes depend on no value. See
        `RoutingMetadata`.

    Raises:
        TypeError: top_k_index is not of integers, num_experts or block no int.
        ValueError: top_k_index is not (T, K), num_experts or block is not positive.
    """
    name = "compute_routing_metadata"
    check.integers(name, dict(top_k_index=top_k_index))
    if top_k_index.dim() != 2:
        raise ValueError(f"{name}: top_k_index has shape {tuple(top_k_index.shape)}, give (T, K)")
    num_experts = check.integer(name, "num_experts", num_experts)
    block = check.integer(name, "block", block)
    for argument, value in dict(num_experts=num_experts, block=block).items():
        if value < 1:
            raise ValueError(f"{name}: {argument} is {value!r}, give a positive int")
    if devices.has_kernels(top_k_index):
        return RoutingMetadata(*routing(top_k_index, num_experts, block))
    order, offsets, tiles = routing_reference(top_k_index, num_experts, block)
    padded_tiles = _empty_metadata(top_k_index, num_experts, block)[2].zero_()
    padded_tiles[:, 0] = -1
    padded_tiles[: len(tiles)] = tiles
    return RoutingMetadata(order, offsets, padded_tiles)
