r"""The scores of a token's experts, and the choice of the best: what the kernels of routers share.

A program has some tokens, and all experts of each in one block. The best are found one after the
other: each is the largest key of those that are left, and of equal ones the first. So K are found
in K passes over registers, in the order of their keys, whatever the keys are: a key that is no
number counts as infinite, and a masked one (-inf) may be chosen."""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.tile import INF, exp, next_power_of_2, tl, triton

WIDEST = 16384  # experts: more do not fit into a program's registers


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


def best_reference(key, k):
    """The indices of the k largest keys of each row, in their order."""
    key = key.detach().where(~key.isnan(), torch.inf)
    return key.sort(stable=True, dim=-1, descending=True).indices[..., :k]


@triton.jit
def logits_of(z_ptr, stride_z, t, e, T, E):
    """The logits of tokens t (rows, 1) and experts e (1, columns), and where there are some.

    Beyond the experts they are -inf, for no token 0.
    """
    inside = (t < T) & (e < E)
    z = tl.load(z_ptr + t * stride_z + e, mask=inside, other=0.0).to(tl.float32)
    return tl.where(e < E, z, -INF), inside


@triton.jit
def softmax(z):
    p = exp(z - tl.max(z, axis=1, keep_dims=True))
    return p / tl.sum(p, axis=1, keep_dims=True)


@triton.jit
def number(key):
    return tl.where(key != key, INF, key)


@triton.jit
def pick(key, left, e):
    """Of each row, which of the entries ``left`` has the largest key: (rows, 1)."""
    best = tl.max(tl.where(left, key, -INF), axis=1, keep_dims=True)
    return tl.min(tl.where(left & (key == best), e, 2147483647), axis=1, keep_dims=True)


@triton.jit
def in_best_groups(
    key,
    left,
    e,
    size,
    groups,
    top_groups,
    BEST_OF_A_GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """``left``, of the best groups of ``size`` experts each. A group's score is the sum of its one
    or two best keys."""
    of, g = e // size, tl.arange(0, BLOCK_G)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_G), dtype=tl.float32)
    for i in range(groups):
        mine = left & (of == i)
        best = tl.max(tl.where(mine, key, -INF), axis=1, keep_dims=True)
        if BEST_OF_A_GROUP == 2:
            others = mine & (e != pick(key, mine, e))
            best += tl.max(tl.where(others, key, -INF), axis=1, keep_dims=True)
        total = tl.where(g == i, best, total)
    total = number(total)
    open = (g < groups) & (total == total)
    inside = left & (e < 0)
    for _ in range(top_groups):
        n = pick(total, open, g)
        open = open & (g != n)
        inside = inside | (left & (of == n))
    return inside


def launch(E, x, each=16):
    """(rows, columns, warps) of a program, whose rows are one block: ``each`` columns a thread, 32
    of the widest."""
    columns = next_power_of_2(E)
    rows = max(1, 2048 // columns)
    return rows, columns, devices.warps(min(max(rows * columns // (32 * each), 1), 16), x)
