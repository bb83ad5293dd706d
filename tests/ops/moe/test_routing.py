"""Which rows each expert has: the order of the assignments, where experts begin, and the table of
tiles."""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.fused_moe import compute_routing_metadata
from liger_kernel.ops.moe.routing import routing, routing_reference


def random_index(T, K, E, least=0, beyond=0):
    generator = torch.Generator().manual_seed(T * K + E)
    return torch.randint(least, E + beyond, (T, K), generator=generator).to(DEVICE)


def assert_right(index, E, block):
    order, offsets, tiles = routing(index, E, block)
    expected = routing_reference(index, E, block)
    used = len(expected[2])
    assert (
        torch.equal(order, expected[0])
        and torch.equal(offsets, expected[1])
        and torch.equal(tiles[:used], expected[2])
    )
    assert (tiles[used:, 0] == -1).all(), "an entry of the table that no expert has"
    S = index.numel()
    assert len(tiles) == -(-S // block) + min(E, S)
    return order, offsets, tiles


@pytest.mark.parametrize(
    "T, K, E", [(1, 1, 1), (7, 3, 5), (100, 6, 9), (20, 2, 130), (0, 2, 4), (3, 0, 4)]
)
@pytest.mark.parametrize("beyond", [0, 1])
def test_against_a_sort(T, K, E, beyond):
    """Several chunks of assignments, several blocks of experts; with indices on both sides of the
    experts'."""
    assert_right(random_index(T, K, E, -beyond, beyond), E, 16)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_dtypes(dtype):
    index = random_index(9, 2, 5, beyond=1)
    for actual, expected in zip(
        routing(index.to(dtype), 5, 16), routing(index, 5, 16), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8])
def test_no_index_past_the_last_is_counted(dtype):
    """256 experts, of which uint8 has each: the last chunk of assignments is not full."""
    index = random_index(5, 2, 100).to(dtype)
    order, offsets, _ = routing(index, 256, 16)
    expected_order, expected_offsets, _ = routing_reference(index, 256, 16)
    assert torch.equal(offsets, expected_offsets) and torch.equal(order, expected_order)


def test_by_hand():
    index = torch.tensor([[2, 0], [2, 7], [-1, 2], [2, 0]], device=DEVICE)
    order, offsets, tiles = routing(index, 4, 2)
    assert order.tolist() == [1, 7, 0, 2, 5, 6, -1, -1] and offsets.tolist() == [0, 2, 2, 6, 6]
    assert tiles.tolist() == [[0, 0], [2, 2], [2, 4], *[[-1, 0]] * 5]


def test_the_fullest_table():
    """Experts of one row each have as many tiles as the table has entries, but for whole tiles."""
    E = 6
    index = torch.arange(E, device=DEVICE)[:, None]
    _, _, tiles = assert_right(index, E, 16)
    assert (tiles[:E, 0] == torch.arange(E, device=DEVICE)).all()


@pytest.mark.parametrize("index", [-1, 4, 10**12, -(2**40)])
def test_none_is_an_experts(index):
    order, offsets, tiles = assert_right(torch.full((5, 2), index, device=DEVICE), 4, 16)
    assert not offsets.any() and (order == -1).all() and (tiles[:, 0] == -1).all()


def test_strides():
    index = random_index(6, 20, 5)
    for a, b in zip(routing(index.mT, 5, 16), routing(index.mT.contiguous(), 5, 16), strict=True):
        assert torch.equal(a, b)


# ---- compute_routing_metadata ----


def test_metadata(with_and_without_kernels):
    """With kernels and without: of the same shapes, and the same."""
    index = random_index(9, 2, 5, beyond=1)
    metadata = compute_routing_metadata(index, 5, block=4)
    expected = routing_reference(index, 5, 4)
    assert torch.equal(metadata.order, expected[0]) and torch.equal(metadata.offsets, expected[1])
    used = len(expected[2])
    assert metadata.tiles.shape == (-(-18 // 4) + 5, 2)
    assert (
        torch.equal(metadata.tiles[:used], expected[2]) and (metadata.tiles[used:, 0] == -1).all()
    )
    assert all(t.dtype == torch.int32 for t in metadata)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(top_k_index=torch.zeros(3, 2)), TypeError, "top_k_index is torch.float32"),
        (
            dict(top_k_index=torch.zeros(3, dtype=torch.long)),
            ValueError,
            r"top_k_index has shape \(3,\)",
        ),
        (dict(num_experts=0), ValueError, "num_experts is 0, give a positive int"),
        (dict(num_experts=2.0), TypeError, "num_experts is 2.0"),
        (dict(block=-1), ValueError, "block is -1"),
    ],
)
def test_metadata_of_what_does_not_fit(change, error, words):
    with pytest.raises(error, match=f"compute_routing_metadata: {words}"):
        compute_routing_metadata(**dict(top_k_index=random_index(3, 2, 4), num_experts=4) | change)
