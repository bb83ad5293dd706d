r"""Rotary position embedding of queries and keys.

    y1 = x1·cos - x2·sin,   y2 = x2·cos + x1·sin        dx: the same with -sin

for each pair (x1, x2) of a head's first ``rotary_dim`` entries. The other entries stay as they are.
``interleaved`` says which entries form a pair, and in which column of cos and sin its angle is:

    False        (x[j], x[j + rotary_dim/2])    column j               Llama, most others; the second half is not read
    True         (x[2j], x[2j+1])               column j               GLM, Helium, ERNIE 4.5
    "repeated"   (x[2j], x[2j+1])               column 2j (= 2j+1)     Cohere

With ``halves``, the result has what becomes of pair j as entries j and j + rotary_dim/2, wherever
the pair was (DeepSeek-V3). Llama 4 and M-RoPE, in files of their own, are the same kernel.

In some families Hugging Face rounds both products and the sum to the input's dtype, in others only
the result. The kernel computes in fp32 and rounds the result once.

Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv:2104.09864;
layouts as in the models of Hugging Face transformers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_kernel.core import check, devices, tuning
from liger_kernel.core.kernel import LaunchCache, kernel, prepared
from liger_kernel.core.op import CASES, Case, Function, custom_op, unit_stride
from liger_kernel.core.tile import cdiv, next_power_of_2, tl, triton


def rope_reference(
    q,
    k,
    cos,
    sin,
    position_ids=None,
    unsqueeze_dim=1,
    rotary_dim=None,
    interleaved=False,
    halves=False,
):
    q, k, cos, sin, heads_dim, rotary_dim = rope_arguments(
        q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved
    )
    pairs = bool(interleaved)
    q, k = rotate_reference(q, k, cos, sin, rotary_dim, pairs, pairs and not halves)
    return swapped(q, heads_dim), swapped(k, heads_dim)


def rotate_reference(q, k, cos, sin, rotary_dim, pairs, to_pairs):
    """q, k (B, h, T, D) and cos, sin (1 or B, T, rotary_dim/2) -> q and k rotated.

    ``pairs``, ``to_pairs``: whether the entries of a pair are neighbours, in what is given and in
    the result."""
    first = slice(0, rotary_dim, 2) if pairs else slice(0, rotary_dim // 2)
    second = slice(1, rotary_dim, 2) if pairs else slice(rotary_dim // 2, rotary_dim)

    def rotated(x):
        f = x if x.dtype == torch.float64 else x.float()
        x1, x2, c, s = (
            f[..., first],
            f[..., second],
            cos.to(f.dtype)[:, None],
            sin.to(f.dtype)[:, None],
        )
        y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
        y = torch.stack((y1, y2), -1).flatten(-2) if to_pairs else torch.cat((y1, y2), -1)
        return torch.cat((y, f[..., rotary_dim:]), -1).to(x.dtype)

    return rotated(q), rotated(k)


@triton.jit
def _read(x_row, mask, R: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Both entries of every pair, each (tokens, heads, BLOCK_N), in fp32."""
    if PAIRS:
        n = tl.arange(0, 2 * BLOCK_N)[None, None, :]
        x = tl.load(x_row + n, mask=mask & (n < R), other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_N, 2)))
    else:
        n = tl.arange(0, BLOCK_N)[None, None, :]
        x1 = tl.load(x_row + n, mask=mask & (n < R // 2), other=0.0).to(tl.float32)
        x2 = tl.load(x_row + R // 2 + n, mask=mask & (n < R // 2), other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def _write(
    y_row,
    x_row,
    mask,
    x1,
    x2,
    cos,
    sin,
    D: tl.constexpr,
    R: tl.constexpr,
    TO_PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    dtype: tl.constexpr = y_row.dtype.element_ty
    y1, y2 = (x1 * cos - x2 * sin).to(dtype), (x2 * cos + x1 * sin).to(dtype)
    if TO_PAIRS:
        n = tl.arange(0, 2 * BLOCK_N)[None, None, :]
        y = tl.reshape(tl.join(y1, y2), (y1.shape[0], y1.shape[1], 2 * BLOCK_N))
        tl.store(y_row + n, y, mask=mask & (n < R))
    else:
        n = tl.arange(0, BLOCK_N)[None, None, :]
        tl.store(y_row + n, y1, mask=mask & (n < R // 2))
        tl.store(y_row + R // 2 + n, y2, mask=mask & (n < R // 2))
    if R < D:
        n = R + tl.arange(0, BLOCK_PASS)[None, None, :]
        tl.store(y_row + n, tl.load(x_row + n, mask=mask & (n < D)), mask=mask & (n < D))


@kernel
def _rotate(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    yq_ptr,
    yk_ptr,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    cos_b,
    cos_t,
    cos_n,
    sin_b,
    sin_t,
    sin_n,
    cos_axis,
    sin_axis,
    yq_b,
    yq_h,
    yq_t,
    yk_b,
    yk_h,
    yk_t,
    T,
    sign,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PAIRS: tl.constexpr,
    TO_PAIRS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    """One program rotates BLOCK_T tokens in one group of their heads: BLOCK_Q of q and BLOCK_K of
    k.

    A stride is named after its tensor and dimension. q and k are loaded before the angles, so that
    the latencies overlap. Where cos and sin are of three axes (M-RoPE), pairs before FIRST have the
    angles of axis 0, those before SECOND of axis 1, the others of axis 2."""
    group = tl.program_id(0) % GROUPS
    block = tl.program_id(0) // GROUPS
    b = tl.cast(block // tl.cdiv(T, BLOCK_T), tl.int64)
    t = (
        tl.cast(block % tl.cdiv(T, BLOCK_T), tl.int64) * BLOCK_T
        + tl.arange(0, BLOCK_T)[:, None, None]
    )
    n = tl.arange(0, BLOCK_N)[None, None, :]
    q_head = tl.cast(group * BLOCK_Q, tl.int64) + tl.arange(0, BLOCK_Q)[None, :, None]
    k_head = tl.cast(group * BLOCK_K, tl.int64) + tl.arange(0, BLOCK_K)[None, :, None]
    q_mask, k_mask, mask = (t < T) & (q_head < HQ), (t < T) & (k_head < HK), (t < T) & (n < R // 2)
    q_row = q_ptr + b * q_b + q_head * q_h + t * q_t
    k_row = k_ptr + b * k_b + k_head * k_h + t * k_t
    q1, q2 = _read(q_row, q_mask, R, PAIRS, BLOCK_N)
    k1, k2 = _read(k_row, k_mask, R, PAIRS, BLOCK_N)
    if cos_axis is not None:
        axis = tl.where(n < FIRST, 0, tl.where(n < SECOND, 1, 2)).to(tl.int64)
        cos_ptr += axis * cos_axis
        sin_ptr += axis * sin_axis
    cos = tl.load(cos_ptr + b * cos_b + t * cos_t + n * cos_n, mask=mask, other=0.0).to(tl.float32)
    sin = (
        tl.load(sin_ptr + b * sin_b + t * sin_t + n * sin_n, mask=mask, other=0.0).to(tl.float32)
        * sign
    )
    yq_row = yq_ptr + b * yq_b + q_head * yq_h + t * yq_t
    yk_row = yk_ptr + b * yk_b + k_head * yk_h + t * yk_t
    _write(yq_row, q_row, q_mask, q1, q2, cos, sin, D, R, TO_PAIRS, BLOCK_N, BLOCK_PASS)
    _write(yk_row, k_row, k_mask, k1, k2, cos, sin, D, R, TO_PAIRS, BLOCK_N, BLOCK_PASS)


def heads_in_a_block(H):
    """The largest power of two that divides H, which needs no mask; or if that is below 8, H
    rounded up. At most 32."""
    block = H & -H
    return min(block if block >= 8 else next_power_of_2(H), 32)


def _others(q, numbers, row):
    places = {0: tuning.near(numbers[0], 1, 64), 1: tuning.near(numbers[1], 1, 8)}
    return tuning.around(numbers, places, lambda tokens, warps: tokens * row <= 2048 * warps)


@tuning.tuned("rope", _others)
def _tokens(q, row):
    """(tokens, warps) of a program, for so many entries of a token."""
    tokens = max(1, 4096 // row)
    return tokens, tuning.traits(q).warps(min(max(tokens * row // 1024, 1), 8))


def _launch(q, HQ, HK, D, R):
    """(groups of heads, and of a program: tokens, q heads, k heads, pairs, columns that are not
    rotated, warps).

    A program processes 4,096 entries of q, with all heads of a token if they fit.
    """
    most = max(HQ, HK)
    groups = cdiv(most, heads_in_a_block(most))
    q_heads, k_heads = (next_power_of_2(cdiv(H, groups)) for H in (HQ, HK))
    pairs, passing = next_power_of_2(R // 2), next_power_of_2(max(D - R, 1))
    tokens, warps = _tokens(q, 2 * max(q_heads, k_heads) * pairs)
    return groups, tokens, q_heads, k_heads, pairs, passing, warps


class Layout(NamedTuple):
    """What the kernels must know of the layout. The custom ops take it apart: ``*layout``."""

    heads_dim: int  # 1 or 2, the dimension of q and k that holds the heads
    rotary_dim: int
    pairs: bool  # whether the entries of a pair are neighbours, in q and k
    q_rows: bool  # the memory of q's result: (B, T, h, D) if True, else (B, h, T, D)
    k_rows: bool


def result_like(x, rows, heads_dim):
    """An empty tensor with x's dimensions. Its memory is (B, T, h, D) with ``rows``, else (B, h, T,
    D).

    It is no view, since autograd does not let the caller write to one.
    """
    B, second, third, D = x.shape
    transposed = not rows if heads_dim == 2 else rows
    strides = (D, second * D) if transposed else (third * D, D)
    return torch.empty_strided(
        x.shape, (second * third * D, *strides, 1), dtype=x.dtype, device=x.device
    )


def row_strides(*tensors):
    """The strides of batch, heads and tokens, of tensors (B, h, T, D)."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def angle_strides(cos, sin):
    """The strides of batch (0 if all share the angles), tokens and columns."""
    return [
        n
        for x in (cos, sin)
        for n in (x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2))
    ]


def _outputs(q, k, cos, sin, heads_dim, rotary_dim, pairs, q_rows, k_rows, *rest):
    return result_like(q, q_rows, heads_dim), result_like(k, k_rows, heads_dim)


@custom_op("rope", _outputs)
def rope_rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads_dim: int,
    rotary_dim: int,
    pairs: bool,
    q_rows: bool,
    k_rows: bool,
    to_pairs: bool,
    first: int,
    second: int,
    sign: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> q and k rotated; cos, sin are (1 or B, T, rotary_dim/2). All have any strides.

    Strides are asked for in here: of what is asked in an autograd Function's backward, a graph
    makes a contiguous copy. Or (3, 1 or B, T, rotary_dim/2), see ``first`` and ``second`` in
    `_rotate`. ``to_pairs``: whether the entries of a pair are neighbours in the results. ``sign``
    -1 rotates back. For the other arguments see `Layout`."""
    q, k = unit_stride(q), unit_stride(k)
    key = (
        q.shape, k.shape, cos.shape, q.stride(), k.stride(), cos.stride(), sin.stride(), q.dtype, q.device,
        heads_dim, rotary_dim, pairs, q_rows, k_rows, to_pairs, first, second, sign,
    )  # fmt: skip
    plan = _plans.get(key) or _plans.add(key, _plan(q, k, cos, sin, *key[9:]))
    q_strides, k_strides, rotate = plan
    yq = torch.empty_strided(q.shape, q_strides, dtype=q.dtype, device=q.device)
    yk = torch.empty_strided(k.shape, k_strides, dtype=k.dtype, device=k.device)
    rotate(q, k, cos, sin, yq, yk)
    return yq, yk


_plans = LaunchCache()


def _plan(
    q, k, cos, sin, heads_dim, rotary_dim, pairs, q_rows, k_rows, to_pairs, first, second, sign
):
    """-> the strides of both results, and the launch."""
    outs = result_like(q, q_rows, heads_dim), result_like(k, k_rows, heads_dim)
    q, k, yq, yk = (swapped(x, heads_dim) for x in (q, k, *outs))
    (B, HQ, T, D), HK = q.shape, k.shape[1]
    axes = None, None
    if cos.dim() == 4:
        axes, cos, sin = (cos.stride(0), sin.stride(0)), cos[0], sin[0]
    groups, tokens, q_heads, k_heads, columns, passing, warps = _launch(q, HQ, HK, D, rotary_dim)
    rotate = prepared(
        _rotate,
        (groups * cdiv(T, tokens) * B,),
        *row_strides(q, k),
        *angle_strides(cos, sin),
        *axes,
        *row_strides(yq, yk),
        T,
        sign,
        HQ=HQ,
        HK=HK,
        D=D,
        R=rotary_dim,
        PAIRS=pairs,
        TO_PAIRS=to_pairs,
        FIRST=first,
        SECOND=second,
        GROUPS=groups,
        BLOCK_T=tokens,
        BLOCK_Q=q_heads,
        BLOCK_K=k_heads,
        BLOCK_N=columns,
        BLOCK_PASS=passing,
        num_warps=devices.warps(warps, q),
    )
    return *(y.stride() for y in outs), rotate


def one_axis(x, first, second):
    """cos or sin of three axes, (3, B, T, n), as (B, T, n): each pair's angle is of its axis, see
    `_rotate`."""
    return torch.cat((x[0, ..., :first], x[1, ..., first:second], x[2, ..., second:]), -1)


def swapped(x, heads_dim):
    """(B, h, T, D) from the caller's dimensions, or the other way round."""
    return x if heads_dim == 1 else x.transpose(1, 2)


LAYOUTS = (False, True, "repeated")


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
    """Check the arguments -> q, k, cos, sin, heads_dim, rotary_dim.

    q and k become (B, h, T, D); cos and sin (1 or B, T, rotary_dim/2), with one column for each
    pair."""
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
    q, k = swapped(q, heads_dim), swapped(k, heads_dim)
    B, _, T, D = q.shape
    if k.shape[0] != B or k.shape[2] != T or k.shape[3] != D:
        raise ValueError(
            f"{name}: q has (batch, tokens, head size) {B, T, D}, k has {k.shape[0], k.shape[2], k.shape[3]}; "
            f"the heads are in dimension {heads_dim}, see unsqueeze_dim"
        )
    if cos.shape != sin.shape:
        raise ValueError(
            f"{name}: cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}, give equal ones"
        )
    if interleaved not in LAYOUTS:
        raise ValueError(f"{name}: interleaved is {interleaved!r}, give one of {LAYOUTS}")
    width = cos.shape[-1] if cos.dim() else 0
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
    step = 2 if interleaved == "repeated" else 1
    if width < (rotary_dim // 2 - 1) * step + 1:
        raise ValueError(
            f"{name}: cos has {width} columns, rotary_dim {rotary_dim} needs {rotary_dim // 2 * step}"
        )
    cos, sin = (_angles(name, x, position_ids, heads_dim, B, T) for x in (cos, sin))
    columns = slice(0, (rotary_dim // 2 - 1) * step + 1, step)
    return q, k, cos[..., columns], sin[..., columns], heads_dim, rotary_dim


def kernel_arguments(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, *name):
    """Check the arguments -> cos, sin, `Layout`, as the kernels take them. A result's memory is
    like q's or k's.

    Eager calls that look like one that was checked are not checked again. Their cos and sin are as
    they were given, if need be wider than is read."""
    unusual = position_ids is not None or not isinstance(cos, torch.Tensor) or cos.dim() != 3
    if unusual or interleaved == "repeated" or torch.compiler.is_compiling():
        return _checked(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, *name)
    try:
        key = (
            q.shape, k.shape, cos.shape, sin.shape, q.stride(), k.stride(), q.dtype, k.dtype, cos.dtype, sin.dtype,
            q.device, k.device, cos.device, sin.device, unsqueeze_dim, unsqueeze_dim.__class__, rotary_dim, interleaved,
        )  # fmt: skip
    except AttributeError:  # something is no tensor
        return _checked(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, *name)
    layout = _layouts.get(key)
    if layout is None:
        *_, layout = _checked(
            q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, *name
        )
        _layouts.add(key, layout)
    return cos, sin, layout


_layouts = LaunchCache()


def _checked(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, *name):
    given = cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved
    q, k, cos, sin, heads_dim, rotary_dim = rope_arguments(q, k, *given, *name)
    q_rows, k_rows = (x.stride(1) < x.stride(2) for x in (q, k))
    return cos, sin, Layout(heads_dim, rotary_dim, bool(interleaved), q_rows, k_rows)


def _angles(name, x, position_ids, heads_dim, B, T):
    """cos or sin as (1 or B, T, w). If it is a table over positions, ``position_ids`` select its
    rows."""
    shape = tuple(x.shape)
    if x.dim() == 4:
        one = heads_dim if shape[heads_dim] == 1 else 1
        if shape[one] != 1:
            raise ValueError(
                f"{name}: cos has shape {shape}, of 4 dimensions one must be 1, where the heads are"
            )
        x = x.squeeze(one)
    elif position_ids is not None and (
        x.dim() == 2 or x.dim() == 3 and shape[0] == 1 and shape[:2] != position_ids.shape
    ):
        positions = position_ids[None] if position_ids.dim() == 1 else position_ids
        if positions.dim() != 2 or positions.shape[0] not in (1, B) or positions.shape[1] != T:
            raise ValueError(
                f"{name}: position_ids has shape {tuple(position_ids.shape)}, give {B, T} or {1, T} to gather rows of "
                f"cos, or cos of the tokens themselves"
            )
        x = x.reshape(-1, shape[-1])[positions]
    elif x.dim() == 2:
        x = x[None]
    if x.dim() != 3 or x.shape[0] not in (1, B) or x.shape[1] != T:
        raise ValueError(
            f"{name}: cos has shape {shape}, give {T, '*'}, {1, T, '*'} or {B, T, '*'}"
        )
    return x


class Rotation(Function):
    """q and k times a rotation, and their gradients times its inverse, for which neither is saved.

    Results and gradients have the memory layout of q and k. q, k and the incoming gradients are not
    written to, and are copied only if the entries of a head are not contiguous. A subclass's
    forward ends with `rotate`."""

    @staticmethod
    def rotate(ctx, q, k, cos, sin, layout, to_pairs, first=0, second=0):
        ctx.save_for_backward(cos, sin)
        heads_dim, rotary_dim, pairs, *rows = layout
        ctx.back = heads_dim, rotary_dim, to_pairs, *rows, pairs, first, second
        return rope_rotate(q, k, cos, sin, *layout, to_pairs, first, second, 1.0)

    @staticmethod
    def again(ctx, dyq, dyk):
        (cos, sin), (heads_dim, rotary_dim, to_pairs, _, _, pairs, *axes) = (
            ctx.saved_tensors,
            ctx.back,
        )
        if cos.dim() == 4:
            cos, sin = one_axis(cos, *axes), one_axis(sin, *axes)
        dys, columns = (swapped(dyq, heads_dim), swapped(dyk, heads_dim)), slice(rotary_dim // 2)
        dq, dk = rotate_reference(
            *dys, cos[..., columns], -sin[..., columns], rotary_dim, to_pairs, pairs
        )
        return (
            swapped(dq, heads_dim),
            swapped(dk, heads_dim),
            *(None,) * (len(ctx.needs_input_grad) - 2),
        )

    @staticmethod
    def backward(ctx, dyq, dyk):
        dq, dk = rope_rotate(dyq, dyk, *ctx.saved_tensors, *ctx.back, -1.0)
        return dq, dk, *(None,) * (len(ctx.needs_input_grad) - 2)


class LigerRopeFunction(Rotation):
    """``apply(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None,
    interleaved=False, halves=False)
    -> (q, k)``

    The arguments of `liger_rotary_pos_emb`.
    """

    reference = staticmethod(rope_reference)

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        cos,
        sin,
        position_ids=None,
        unsqueeze_dim=1,
        rotary_dim=None,
        interleaved=False,
        halves=False,
    ):
        devices.require_kernels("LigerRopeFunction", q)
        cos, sin, layout = kernel_arguments(
            q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved
        )
        return Rotation.rotate(ctx, q, k, cos, sin, layout, layout.pairs and not halves)


def _rotated(name, q, k, cos, sin, sign):
    devices.require_kernels(name, q)
    cos, sin, layout = kernel_arguments(q, k, cos, sin, None, 1, None, False, name)
    return rope_rotate(q, k, cos, sin, *layout, layout.pairs, 0, 0, sign)


def rope_forward(q, k, cos, sin):
    """The kernel without autograd, for frameworks with a Function of their own.

    Args:
        q, k, cos, sin: as in `liger_rotary_pos_emb`, with the heads in dimension 1. They are not
        written to.

    Returns:
        (q, k, cos, sin): q and k rotated, and what `rope_backward` takes.

    Raises:
        ValueError, TypeError: as `liger_rotary_pos_emb`. RuntimeError: there are no kernels for q.
    """
    return *_rotated("rope_forward", q, k, cos, sin, 1.0), cos, sin


def rope_backward(dq, dk, cos, sin):
    """-> the gradients of the q and k that `rope_forward` was given: dq and dk rotated back, in new
    tensors."""
    return _rotated("rope_backward", dq, dk, cos, sin, -1.0)


def liger_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    interleaved: bool | str = False,
    halves: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys. It replaces Hugging Face's
    ``apply_rotary_pos_emb``.

    Args:
        q, k: (B, h, T, D) and (B, h_k, T, D), fp32, bf16 or fp16, of any strides. With
        ``unsqueeze_dim=2``:
            (B, T, h, D) and (B, T, h_k, D).
        cos, sin: (T, w), (1, T, w) or (B, T, w); or one of these with a dimension of size 1 where q
        has its heads. They
            get no gradient.
        position_ids: (B, T), (1, T) or (T,) integers. They select rows if cos and sin are tables
        over positions: of
            shape (P, w), or (1, P, w) unless position_ids is (1, P). Otherwise cos and sin belong
            to the tokens, as in
            Hugging Face's models, and position_ids is not used.
        unsqueeze_dim: the dimension of q and k that holds the heads.
        rotary_dim: the number of entries of a head that are rotated; w by default. Give it if w is
        not that number, but
            for example half of it. If cos and sin are wider than needed, their first columns are
            used.
        interleaved: which entries form a pair. False: j and j + rotary_dim/2. True: 2j and 2j+1,
        with the angle in
            column j (GLM, Helium, ERNIE 4.5). "repeated": 2j and 2j+1, with the angle in columns 2j
            and 2j+1 (Cohere).
        halves: the results have a pair's entries at j and j + rotary_dim/2, whatever
        ``interleaved`` is: q and k change
            their order alike, which attention does not see (DeepSeek-V3's ``rope_interleave``).

    Returns:
        q and k rotated, in new tensors with the dtype and memory layout of q and k.

    Raises:
        ValueError: shapes, devices or options that do not fit each other; cos and sin are wider
        than a head.
        TypeError: q, k, cos or sin is not a floating point tensor; position_ids are not integers.

    Source: arXiv:2104.09864.
    """
    if not isinstance(q, torch.Tensor):  # the rest is checked in either
        check.floats("liger_rotary_pos_emb", dict(q=q))
    run = LigerRopeFunction.call if devices.has_kernels(q) else rope_reference
    return run(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, interleaved, halves)


liger_rope = liger_rotary_pos_emb  # its name in `liger_kernel.transformers.functional`


def liger_rotary_pos_emb_gpt_oss(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`liger_rotary_pos_emb` as GPT-OSS calls it: cos and sin have half the head's size."""
    return liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`liger_rotary_pos_emb` for q, k (S, h, D) and cos, sin (S, D), as in the vision towers of
    Qwen2-VL and others.

    Or (B, S, h, D), and cos, sin (1 or B, S, D). The result is of q's dtype if cos and sin are in
    fp32."""
    if q.dim() == 4:
        return liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    q, k = liger_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    return q.squeeze(0), k.squeeze(0)


def rope_inputs(B, T, HQ, HK, D):
    """As in Hugging Face's models: (B, T, h, D) in memory, transposed. Each sequence has its own
    positions."""
    angles = torch.randint(0, 1000, (B, T, 1)) * 10000 ** (-torch.arange(0, D, 2) / D)
    angles = torch.cat((angles, angles), -1)
    q, k = (torch.randn(B, T, H, D).transpose(1, 2).requires_grad_() for H in (HQ, HK))
    return dict(q=q, k=k, cos=angles.cos(), sin=angles.sin())


def rope_angles(cos, sin, partial, interleaved):
    """cos and sin of a case, for half of a head if ``partial``, with columns as ``interleaved`` has
    them."""
    width = max(2, cos.shape[-1] // 4 * 2) if partial else cos.shape[-1]
    if interleaved == "repeated":
        return [x[..., : width // 2].repeat_interleave(2, -1) for x in (cos, sin)]
    return [x[..., :width] for x in (cos, sin)]


def rope_bytes(t):
    """The bytes of q and k, and of the half of cos and sin that is read."""
    q, k, cos, sin = (t[x].numel() * t[x].element_size() for x in ("q", "k", "cos", "sin"))
    return q + k, (cos + sin) // 2


def _variant(rope):
    """A function of the case's options, which hold for every shape. ``half``: cos and sin have half
    the width."""

    def call(
        q, k, cos, sin, one_row=False, partial=False, half=False, interleaved=False, halves=False
    ):
        cos, sin = rope_angles(*(x[:1] if one_row else x for x in (cos, sin)), partial, interleaved)
        rotary_dim = cos.shape[-1] if half else None
        cos, sin = (x[..., : x.shape[-1] // 2] if half else x for x in (cos, sin))
        return rope(q, k, cos, sin, rotary_dim=rotary_dim, interleaved=interleaved, halves=halves)

    return call


def _traffic(t):
    rows, angles = rope_bytes(t)
    return (2 * rows + angles,) * 2  # read and written


CASES.append(
    Case(
        "rope",
        fn=_variant(liger_rotary_pos_emb),
        reference=_variant(rope_reference),
        inputs=rope_inputs,
        shapes=((1, 1, 1, 1, 2), (2, 5, 3, 1, 12), (1, 9, 14, 2, 16), (2, 3, 40, 8, 24)),
        options=(
            dict(),
            dict(one_row=True),
            dict(partial=True),
            dict(half=True),
            dict(interleaved=True),
            dict(interleaved=True, partial=True),
            dict(interleaved="repeated"),
            dict(interleaved=True, halves=True, partial=True),
        ),
        bench=((1, 32768, 32, 8, 128), (4, 2048, 32, 8, 128)),
        traffic=_traffic,
    )
)
