r"""The scores of a token's experts, and the choice of the top K: device functions of the routers.

A program has some tokens, and all experts of each token in one block. The top K are found in K
passes over registers. Each pass finds the largest key of those that are left, and of equal keys the
first. So K experts are found in the order of their keys, whatever the keys are: a NaN counts as
infinite, and a masked key (-inf) may be chosen."""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.tile import INF, exp, next_power_of_2, tl, triton

MAX_EXPERTS = 16384  # more do not fit into a program's registers


def upcast(x):
    """Return x in fp32; fp64 stays fp64."""
    return x if x.dtype == torch.float64 else x.float()


def top_k_reference(key, k):
    """Return the indices of the k largest keys of each row, largest first; NaN counts as inf."""
    key = key.detach().where(~key.isnan(), torch.inf)
    return key.sort(stable=True, dim=-1, descending=True).indices[..., :k]


@triton.jit
def load_logits(z_ptr, stride_z, t, e, T, E):
    """Load the logits of tokens t (BLOCK_T, 1) and experts e (1, BLOCK_E). Returns them and a mask.

    The mask is True for the T tokens and E experts that exist. Beyond E the logits are -inf, beyond
    T they are 0.
    """
    mask = (t < T) & (e < E)
    z = tl.load(z_ptr + t * stride_z + e, mask=mask, other=0.0).to(tl.float32)
    return tl.where(e < E, z, -INF), mask


@triton.jit
def softmax(z):
    """Return the softmax of each row of z."""
    p = exp(z - tl.max(z, axis=1, keep_dims=True))
    return p / tl.sum(p, axis=1, keep_dims=True)


@triton.jit
def nan_to_inf(key):
    """Return the keys with infinity in place of NaN."""
    return tl.where(key != key, INF, key)


@triton.jit
def first_max(key, left, e):
    """Return the index e of each row's largest key among those ``left``, (rows, 1)."""
    largest = tl.max(tl.where(left, key, -INF), axis=1, keep_dims=True)
    return tl.min(tl.where(left & (key == largest), e, 2147483647), axis=1, keep_dims=True)


@triton.jit
def select_groups(
    key,
    left,
    e,
    group_size,
    num_groups,
    top_groups,
    BEST_OF_A_GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Restrict ``left`` to the ``top_groups`` best groups of ``group_size`` experts each.

    A group's score is the sum of its one or two largest keys."""
    # score (BLOCK_T, BLOCK_G); left, selected (BLOCK_T, BLOCK_E)
    group = e // group_size
    g = tl.arange(0, BLOCK_G)[None, :]
    score = tl.zeros((BLOCK_T, BLOCK_G), dtype=tl.float32)
    for i in range(num_groups):
        members = left & (group == i)
        best = tl.max(tl.where(members, key, -INF), axis=1, keep_dims=True)
        if BEST_OF_A_GROUP == 2:
            others = members & (e != first_max(key, members, e))
            best += tl.max(tl.where(others, key, -INF), axis=1, keep_dims=True)
        score = tl.where(g == i, best, score)
    score = nan_to_inf(score)
    groups_left = (g < num_groups) & (score == score)
    selected = left & (e < 0)
    for _ in range(top_groups):
        n = first_max(score, groups_left, g)
        groups_left = groups_left & (g != n)
        selected = selected | (left & (group == n))
    return selected


def choose_launch(E, x, thread_columns=16):
    """Return (BLOCK_T, BLOCK_E, num_warps) of a program, whose rows are one block.

    A thread has ``thread_columns`` columns, or 32 of the widest rows."""
    block_e = next_power_of_2(E)
    block_t = max(1, 2048 // block_e)
    num_warps = min(max(block_t * block_e // (32 * thread_columns), 1), 16)
    return block_t, block_e, devices.limit_warps(num_warps, x)
