"""Arguments that the rotary operators share: their checks, memory layouts and strides.

B is the batch size, h the number of heads, T the number of tokens and D the head size. The heads
may be in dimension 1 or 2 of a caller's q and k. Kernels see (B, h, T, D).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_kernel.core import check
from liger_kernel.core.kernel import LaunchCache
from liger_kernel.core.tile import next_power_of_2

LAYOUTS = (False, True, "repeated")  # values of the argument ``interleaved``


class Layout(NamedTuple):
    """The layout of q, k and the results. The custom ops take its fields: ``*layout``."""

    heads_dim: int  # 1 or 2, the dimension of q and k that holds the heads
    rotary_dim: int
    interleaved: bool  # True if the entries of a pair are neighbours, in q and k
    q_tokens_first: bool  # the memory of q's result: (B, T, h, D) if True, else (B, h, T, D)
    k_tokens_first: bool


def rope_arguments(
    q,
    k,
    cos,
    sin,
    position_ids,
    unsqueeze_dim,
    rotary_dim,
    interleaved,
    name="liger_rotary_pos_emb",
):
    """Check the arguments. Returns q, k, cos, sin, heads_dim, rotary_dim.

    q and k become (B, h, T, D); cos and sin (1 or B, T, rotary_dim/2), with one column for each
    pair.
    """
    check.floats(name, dict(q=q, k=k, cos=cos, sin=sin))
    if position_ids is not None:
        check.integers(name, dict(position_ids=position_ids))
    unsqueeze_dim = check.integer(name, "unsqueeze_dim", unsqueeze_dim)
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"{name}: q has shape {tuple(q.shape)}, k {tuple(k.shape)}, give 4 dimensions"
        )
    heads_dim = unsqueeze_dim % 4 if -4 <= unsqueeze_dim < 4 else 0
    if heads_dim not in (1, 2):
        raise ValueError(
            f"{name}: unsqueeze_dim is {unsqueeze_dim}, the heads are in dimension 1 or 2"
        )
    q = swap_heads(q, heads_dim)
    k = swap_heads(k, heads_dim)
    B, _, T, D = q.shape
    if k.shape[0] != B or k.shape[2] != T or k.shape[3] != D:
        raise ValueError(
            f"{name}: q has (batch, tokens, head size) {B, T, D}, "
            f"k has {k.shape[0], k.shape[2], k.shape[3]}; "
            f"the heads are in dimension {heads_dim}, see unsqueeze_dim"
        )
    if cos.shape != sin.shape:
        raise ValueError(
            f"{name}: cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}, give equal ones"
        )
    if interleaved not in LAYOUTS:
        raise ValueError(f"{name}: interleaved is {interleaved!r}, give one of {LAYOUTS}")
    width = cos.shape[-1] if cos.dim() else 0
    rotary_dim, stride = _check_rotary_dim(name, rotary_dim, width, D, interleaved)
    cos = _token_angles(name, cos, position_ids, heads_dim, B, T)
    sin = _token_angles(name, sin, position_ids, heads_dim, B, T)
    columns = slice(0, (rotary_dim // 2 - 1) * stride + 1, stride)
    return q, k, cos[..., columns], sin[..., columns], heads_dim, rotary_dim


def _check_rotary_dim(name, rotary_dim, width, D, interleaved):
    """Return rotary_dim, and the distance between columns of cos that are read."""
    if rotary_dim is None:
        if width > D:
            raise ValueError(
                f"{name}: cos has {width} columns, more than a head's {D}; give those of its angles"
            )
        rotary_dim = width
    if check.integer(name, "rotary_dim", rotary_dim) % 2 or not 0 < rotary_dim <= D:
        raise ValueError(
            f"{name}: rotary_dim is {rotary_dim}, give an even number from 2 to the head size {D}"
        )
    stride = 2 if interleaved == "repeated" else 1
    if width < (rotary_dim // 2 - 1) * stride + 1:
        raise ValueError(
            f"{name}: cos has {width} columns, "
            f"rotary_dim {rotary_dim} needs {rotary_dim // 2 * stride}"
        )
    return rotary_dim, stride


def _token_angles(name, angles, position_ids, heads_dim, B, T):
    """Return cos or sin as (1 or B, T, w).

    If it is a table over positions, ``position_ids`` select its rows.
    """
    shape = tuple(angles.shape)
    if angles.dim() == 4:
        unit_dim = heads_dim if shape[heads_dim] == 1 else 1
        if shape[unit_dim] != 1:
            raise ValueError(
                f"{name}: cos has shape {shape}, of 4 dimensions one must be 1, where the heads are"
            )
        angles = angles.squeeze(unit_dim)
    elif position_ids is not None and (
        angles.dim() == 2 or angles.dim() == 3 and shape[0] == 1 and shape[:2] != position_ids.shape
    ):
        positions = position_ids[None] if position_ids.dim() == 1 else position_ids
        if positions.dim() != 2 or positions.shape[0] not in (1, B) or positions.shape[1] != T:
            raise ValueError(
                f"{name}: position_ids has shape {tuple(position_ids.shape)}, "
                f"give {B, T} or {1, T} to gather rows of cos, or cos of the tokens themselves"
            )
        angles = angles.reshape(-1, shape[-1])[positions]
    elif angles.dim() == 2:
        angles = angles[None]
    if angles.dim() != 3 or angles.shape[0] not in (1, B) or angles.shape[1] != T:
        raise ValueError(
            f"{name}: cos has shape {shape}, give {T, '*'}, {1, T, '*'} or {B, T, '*'}"
        )
    return angles


def kernel_arguments(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, *name):
    """Check the arguments. Returns cos, sin and the `Layout`, as the kernels take them.

    A result's memory is like q's or k's. An eager call whose shapes, strides, dtypes, devices and
    options have been checked before is not checked again. Its cos and sin are then returned as
    they are, even if they are wider than what is read.
    """
    if (
        position_ids is not None
        or not isinstance(cos, torch.Tensor)
        or cos.dim() != 3
        or interleaved == "repeated"
        or torch.compiler.is_compiling()
    ):
        return _describe(
            q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, *name
        )
    try:
        key = (
            q.shape, k.shape, cos.shape, sin.shape, q.stride(), k.stride(),
            q.dtype, k.dtype, cos.dtype, sin.dtype, q.device, k.device, cos.device, sin.device,
            unsqueeze_dim, unsqueeze_dim.__class__, rotary_dim, interleaved,
        )  # fmt: skip
    except AttributeError:  # an argument is not a tensor: the checks name it
        return _describe(
            q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, *name
        )
    layout = _layouts.get(key)
    if layout is None:
        *_, layout = _describe(
            q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, *name
        )
        _layouts.store(key, layout)
    return cos, sin, layout


_layouts = LaunchCache()


def _describe(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, *name):
    q, k, cos, sin, heads_dim, rotary_dim = rope_arguments(
        q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, *name
    )
    q_tokens_first = q.stride(1) < q.stride(2)
    k_tokens_first = k.stride(1) < k.stride(2)
    layout = Layout(heads_dim, rotary_dim, bool(interleaved), q_tokens_first, k_tokens_first)
    return cos, sin, layout


def swap_heads(x, heads_dim):
    """Return x (B, h, T, D) with its heads in ``heads_dim``, or such an x as (B, h, T, D)."""
    return x if heads_dim == 1 else x.transpose(1, 2)


def empty_output(x, tokens_first, heads_dim):
    """Return an empty tensor with x's dimensions. Its memory is (B, T, h, D) or (B, h, T, D).

    It is not a view, since autograd does not let the caller write to one.
    """
    B, second, third, D = x.shape
    transposed = not tokens_first if heads_dim == 2 else tokens_first
    strides = (D, second * D) if transposed else (third * D, D)
    return torch.empty_strided(
        x.shape, (second * third * D, *strides, 1), dtype=x.dtype, device=x.device
    )


def row_strides(*tensors):
    """Return the strides of batch, heads and tokens of tensors (B, h, T, D), in one list."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def angle_strides(cos, sin):
    """Return the strides of batch (0 if all share the angles), tokens and columns of both."""
    strides = []
    for x in (cos, sin):
        strides += (x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2))
    return strides


def heads_per_block(num_heads):
    """Return the number of heads in a kernel's block, at most 32.

    It is the largest power of two that divides ``num_heads``, which needs no mask. If that is below
    8, it is ``num_heads`` rounded up.
    """
    block = num_heads & -num_heads
    return min(block if block >= 8 else next_power_of_2(num_heads), 32)


# ---- inputs and traffic of the rotary operators' cases ----


def case_inputs(B, T, HQ, HK, D):
    """Return q, k, cos, sin as in Hugging Face's models: (B, T, h, D) in memory, transposed.

    Each sequence has its own positions.
    """
    angles = torch.randint(0, 1000, (B, T, 1)) * 10000 ** (-torch.arange(0, D, 2) / D)
    angles = torch.cat((angles, angles), -1)
    q, k = (torch.randn(B, T, H, D).transpose(1, 2).requires_grad_() for H in (HQ, HK))
    return dict(q=q, k=k, cos=angles.cos(), sin=angles.sin())


def case_angles(cos, sin, partial, interleaved):
    """Return cos and sin with columns as ``interleaved`` has them; half as wide if ``partial``."""
    width = max(2, cos.shape[-1] // 4 * 2) if partial else cos.shape[-1]
    if interleaved == "repeated":
        return [x[..., : width // 2].repeat_interleave(2, -1) for x in (cos, sin)]
    return [x[..., :width] for x in (cos, sin)]


def case_bytes(inputs):
    """Return the bytes of q and k, and of the half of cos and sin that is read."""
    q, k, cos, sin = (
        inputs[name].numel() * inputs[name].element_size() for name in ("q", "k", "cos", "sin")
    )
    return q + k, (cos + sin) // 2
