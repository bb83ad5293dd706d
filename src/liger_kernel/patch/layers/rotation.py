"""How a function that rotates queries and keys is compared with the formula: what `rope` proves is
measured here.

It is called as ``run(q, k, cos, sin, dim)``, where q and k have their heads in dimension 1 or 2,
and each row of the batch has its own angles. A layout is (interleaved, halves), see
`liger_rotary_pos_emb`."""

from __future__ import annotations

import functools

import torch

from liger_kernel.patch.proof.probe import (
    SIZE,
    close_in_rows,
    equal,
    nearly_equal,
    noise,
    with_gradients,
)


def stacked(rows):
    """What comes out of each row of a batch -> the same of the batch."""
    return tuple(torch.stack(of_rows) for of_rows in zip(*rows, strict=True))


def angles(interleaved, width):
    whole = half = noise(2, 5, width // 2, seed=3) * 2
    if interleaved != "half":
        whole = (
            half.repeat_interleave(2, -1)
            if interleaved == "repeated"
            else torch.cat((half, half), -1)
        )
    return whole.cos() * 1.25, whole.sin() * 1.25


def heads(dim):
    """q and k of several sizes, one a token."""
    shapes = [(2, n, 5, SIZE) if dim == 1 else (2, 5, n, SIZE) for n in (3, 1)]
    sizes = 10.0 ** torch.arange(-2, 8, 2, device="cpu").view(5, 1, 1).transpose(
        0, 1 if dim == 1 else 0
    )
    return [noise(*shape, seed=i) * sizes for i, shape in enumerate(shapes)]


def rotates(run, width, dim=1) -> bool:
    try:
        run(*heads(dim), *angles(False, width), dim)
    except RuntimeError:  # shapes that do not fit: the model never asks for it
        return False
    return True


def same_rotation(run, layout, width, dim, rounded_alike=equal) -> bool:
    """Whether it is the formula, in fp32 with its gradients, and rounds in bf16 as is known."""
    q_k, tables = heads(dim), angles(layout[0], width)

    def of_one(which, x):
        given = [x if i == which else other.to(x.dtype) for i, other in enumerate(q_k)]
        return run(*given, *(t.to(x.dtype) for t in tables), dim)[which]

    def formula(x, dtype=None):
        return rotated(x, *(t.to(dtype or x.dtype).to(x.dtype) for t in tables), *layout, dim)

    for which, x in enumerate(q_k):
        (y, dx), (z, wanted) = (
            with_gradients(functools.partial(of_one, which), [x]),
            with_gradients(formula, [x]),
        )
        if not (close_in_rows(y, z) and close_in_rows(dx, wanted)):
            return False
        x = x.bfloat16()
        thrice, once = formula(x), formula(x.float(), x.dtype).to(x.dtype)  # rounded
        if not any(rounded_alike(of_one(which, x), y) for y in (thrice, once)):
            return False
    return True


def shares_angles(run, layout, dim) -> bool:
    """Whether rows of a batch may share one row of cos and sin."""
    tables = [t[:1] for t in angles(layout[0], SIZE)]
    shared = run(*heads(dim), *tables, dim)
    return all(map(equal, shared, run(*heads(dim), *(t.expand(2, -1, -1) for t in tables), dim)))


def keeps_dtype(run, layout, dim, width=SIZE) -> bool:
    """Whether angles in fp32 give q and k in bf16, rounded once."""
    q_k, tables = [x.bfloat16() for x in heads(dim)], angles(layout[0], width)
    wanted = (rotated(x.float(), *tables, *layout, dim).to(x.dtype) for x in q_k)
    return all(nearly_equal(y, z) for y, z in zip(run(*q_k, *tables, dim), wanted, strict=True))


def rotated(x, cos, sin, interleaved, halves, heads_dim):
    """x·cos + rotate(x)·sin over the first entries of each head, rounded after each step as in x's
    dtype."""
    width = cos.shape[-1] * (2 if interleaved == "half" else 1)
    columns = (
        torch.arange(width // 2).repeat_interleave(2)
        if interleaved is True
        else torch.arange(width)
    )
    columns = columns % cos.shape[-1]
    cos, sin = (t[..., columns].unsqueeze(heads_dim) for t in (cos, sin))
    x, rest = x[..., :width], x[..., width:]
    if interleaved in (True, "repeated"):
        partners = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        partners = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), -1)
    y = x * cos + partners * sin
    if halves:
        y = torch.cat((y[..., ::2], y[..., 1::2]), -1)
    return torch.cat((y, rest), -1)
