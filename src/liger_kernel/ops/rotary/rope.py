r"""Rotary position embedding of queries and keys.

    y1 = x1·cos - x2·sin,   y2 = x2·cos + x1·sin        dx: the same with -sin

for each pair (x1, x2) of a head's first ``rotary_dim`` entries. The other entries stay as they are.
``interleaved`` says which entries form a pair, and in which column of cos and sin its angle is:

    interleaved  entries of pair j              column    models
    False        (x[j], x[j + rotary_dim/2])    j         Llama and most others
    True         (x[2j], x[2j+1])               j         GLM, Helium, ERNIE 4.5
    "repeated"   (x[2j], x[2j+1])               2j        Cohere; column 2j+1 is the same

Columns beyond those of the table are not read. With ``halves``, the result has rotated pair j as
entries j and j + rotary_dim/2, wherever the pair was (DeepSeek-V3). Llama 4 and M-RoPE, in files of
their own, use the same kernel.

In some families Hugging Face rounds both products and the sum to the input's dtype, in others only
the result. The kernel computes in fp32 and rounds the result once.

Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv:2104.09864;
layouts as in the models of Hugging Face transformers."""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices, tuning
from liger_kernel.core.kernel import LaunchCache, prepare_launch
from liger_kernel.core.op import CASES, Case, Function, custom_op, with_unit_stride
from liger_kernel.core.tile import cdiv, next_power_of_2
from liger_kernel.ops.rotary.arguments import (
    angle_strides,
    case_angles,
    case_bytes,
    case_inputs,
    empty_output,
    heads_per_block,
    kernel_arguments,
    rope_arguments,
    row_strides,
    swap_heads,
)
from liger_kernel.ops.rotary.rope_kernels import rope_kernel


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
    interleaved = bool(interleaved)
    interleaved_output = interleaved and not halves
    q, k = rotate_reference(q, k, cos, sin, rotary_dim, interleaved, interleaved_output)
    return swap_heads(q, heads_dim), swap_heads(k, heads_dim)


def rotate_reference(q, k, cos, sin, rotary_dim, interleaved, interleaved_output):
    """Rotate q, k (B, h, T, D) by cos, sin (1 or B, T, rotary_dim/2).

    ``interleaved`` and ``interleaved_output`` say if the entries of a pair are neighbours, in q and
    k and in the results.
    """
    if interleaved:
        first = slice(0, rotary_dim, 2)
        second = slice(1, rotary_dim, 2)
    else:
        first = slice(0, rotary_dim // 2)
        second = slice(rotary_dim // 2, rotary_dim)

    def rotate(x):
        wide = x if x.dtype == torch.float64 else x.float()
        x1 = wide[..., first]
        x2 = wide[..., second]
        c = cos.to(wide.dtype)[:, None]
        s = sin.to(wide.dtype)[:, None]
        y1 = x1 * c - x2 * s
        y2 = x2 * c + x1 * s
        if interleaved_output:
            y = torch.stack((y1, y2), -1).flatten(-2)
        else:
            y = torch.cat((y1, y2), -1)
        return torch.cat((y, wide[..., rotary_dim:]), -1).to(x.dtype)

    return rotate(q), rotate(k)


def select_axes(angles, second_begin, third_begin):
    """Return cos or sin of three axes, (3, B, T, n), as (B, T, n): each pair's angle by its axis.

    Pairs before ``second_begin`` belong to the first axis, those from ``third_begin`` on to the
    third.
    """
    return torch.cat(
        (
            angles[0, ..., :second_begin],
            angles[1, ..., second_begin:third_begin],
            angles[2, ..., third_begin:],
        ),
        -1,
    )


def _token_candidates(q, numbers, entries_per_token):
    """Return the launches that may be tried instead of ``numbers``, see `tuning.tunable`."""
    tokens, warps = numbers
    places = {0: tuning.powers_of_2_near(tokens, 1, 64), 1: tuning.powers_of_2_near(warps, 1, 8)}
    return tuning.neighbors(
        numbers, places, lambda tokens, warps: tokens * entries_per_token <= 2048 * warps
    )


@tuning.tunable("rope", _token_candidates)
def _tokens_per_program(q, entries_per_token):
    """Return (tokens, warps) of a program."""
    tokens = max(1, 4096 // entries_per_token)
    warps = min(max(tokens * entries_per_token // 1024, 1), 8)
    return tokens, tuning.device_traits(q).num_warps(warps)


def _launch(q, HQ, HK, D, rotary_dim):
    """Return the number of groups of heads, the number of warps, and the block sizes.

    A program processes 4,096 entries of q, with all heads of a token if they fit.
    """
    max_heads = max(HQ, HK)
    groups = cdiv(max_heads, heads_per_block(max_heads))
    q_heads = next_power_of_2(cdiv(HQ, groups))
    k_heads = next_power_of_2(cdiv(HK, groups))
    pairs = next_power_of_2(rotary_dim // 2)
    tokens, warps = _tokens_per_program(q, 2 * max(q_heads, k_heads) * pairs)
    blocks = dict(
        BLOCK_T=tokens,
        BLOCK_Q_HEADS=q_heads,
        BLOCK_K_HEADS=k_heads,
        BLOCK_PAIRS=pairs,
        BLOCK_PASS=next_power_of_2(max(D - rotary_dim, 1)),
    )
    return groups, warps, blocks


def _outputs(
    q, k, cos, sin, heads_dim, rotary_dim, interleaved, q_tokens_first, k_tokens_first, *_
):
    return empty_output(q, q_tokens_first, heads_dim), empty_output(k, k_tokens_first, heads_dim)


@custom_op("rope", _outputs)
def rope_rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads_dim: int,
    rotary_dim: int,
    interleaved: bool,
    q_tokens_first: bool,
    k_tokens_first: bool,
    interleaved_output: bool,
    second_axis: int,
    third_axis: int,
    sign: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k, of any strides, by cos and sin, (1 or B, T, rotary_dim/2) of any strides.

    cos and sin of three axes are (3, 1 or B, T, rotary_dim/2); see ``second_axis`` and
    ``third_axis`` in `select_axes`. ``interleaved_output`` says if the entries of a pair are
    neighbours in the results. A ``sign`` of -1 rotates back. `Layout` has the other arguments.

    Strides are read within the op: a graph makes a contiguous copy of any tensor whose strides an
    autograd Function's backward reads.
    """
    q = with_unit_stride(q)
    k = with_unit_stride(k)
    options = (
        heads_dim, rotary_dim, interleaved, q_tokens_first, k_tokens_first, interleaved_output,
        second_axis, third_axis, sign,
    )  # fmt: skip
    key = (
        q.shape, k.shape, cos.shape, q.stride(), k.stride(), cos.stride(), sin.stride(), q.dtype,
        q.device, *options,
    )  # fmt: skip
    yq_strides, yk_strides, launch = _launches.get(key) or _launches.store(
        key, _prepare(q, k, cos, sin, *options)
    )
    yq = torch.empty_strided(q.shape, yq_strides, dtype=q.dtype, device=q.device)
    yk = torch.empty_strided(k.shape, yk_strides, dtype=k.dtype, device=k.device)
    launch(q, k, cos, sin, yq, yk)
    return yq, yk


_launches = LaunchCache()


def _prepare(
    q,
    k,
    cos,
    sin,
    heads_dim,
    rotary_dim,
    interleaved,
    q_tokens_first,
    k_tokens_first,
    interleaved_output,
    second_axis,
    third_axis,
    sign,
):
    """Return the strides of both results, and the prepared launch."""
    outputs = (
        empty_output(q, q_tokens_first, heads_dim),
        empty_output(k, k_tokens_first, heads_dim),
    )
    q, k, yq, yk = (swap_heads(x, heads_dim) for x in (q, k, *outputs))
    B, HQ, T, D = q.shape
    HK = k.shape[1]
    axis_strides = None, None
    if cos.dim() == 4:
        axis_strides = cos.stride(0), sin.stride(0)
        cos = cos[0]
        sin = sin[0]
    groups, warps, blocks = _launch(q, HQ, HK, D, rotary_dim)
    launch = prepare_launch(
        rope_kernel,
        (groups * cdiv(T, blocks["BLOCK_T"]) * B,),
        *row_strides(q, k),
        *angle_strides(cos, sin),
        *axis_strides,
        *row_strides(yq, yk),
        T,
        sign,
        Q_HEADS=HQ,
        K_HEADS=HK,
        HEAD_DIM=D,
        ROTARY_DIM=rotary_dim,
        INTERLEAVED=interleaved,
        INTERLEAVED_OUTPUT=interleaved_output,
        SECOND_AXIS=second_axis,
        THIRD_AXIS=third_axis,
        HEAD_GROUPS=groups,
        **blocks,
        num_warps=devices.limit_warps(warps, q),
    )
    return *(y.stride() for y in outputs), launch


class Rotation(Function):
    """Base of the rotary Functions: rotates q and k, and their gradients back.

    Neither q nor k is saved. Results and gradients have the memory layout of q and k. q, k and the
    incoming gradients are not written to. They are copied only if the entries of a head are not
    contiguous. A subclass's forward ends with `rotate`.
    """

    @staticmethod
    def rotate(ctx, q, k, cos, sin, layout, interleaved_output, second_axis=0, third_axis=0):
        ctx.save_for_backward(cos, sin)
        heads_dim, rotary_dim, interleaved, *tokens_first = layout
        # the arguments of `rope_rotate` for the gradients: input and output layouts change places
        ctx.inverse = (
            heads_dim, rotary_dim, interleaved_output, *tokens_first, interleaved,
            second_axis, third_axis,
        )  # fmt: skip
        return rope_rotate(
            q, k, cos, sin, *layout, interleaved_output, second_axis, third_axis, 1.0
        )

    @staticmethod
    def differentiable_backward(ctx, dyq, dyk):
        cos, sin = ctx.saved_tensors
        heads_dim, rotary_dim, interleaved, _, _, interleaved_output, *axes = ctx.inverse
        if cos.dim() == 4:
            cos = select_axes(cos, *axes)
            sin = select_axes(sin, *axes)
        pairs = slice(rotary_dim // 2)
        dq, dk = rotate_reference(
            swap_heads(dyq, heads_dim),
            swap_heads(dyk, heads_dim),
            cos[..., pairs],
            -sin[..., pairs],
            rotary_dim,
            interleaved,
            interleaved_output,
        )
        no_gradients = (None,) * (len(ctx.needs_input_grad) - 2)
        return swap_heads(dq, heads_dim), swap_heads(dk, heads_dim), *no_gradients

    @staticmethod
    def backward(ctx, dyq, dyk):
        dq, dk = rope_rotate(dyq, dyk, *ctx.saved_tensors, *ctx.inverse, -1.0)
        return dq, dk, *(None,) * (len(ctx.needs_input_grad) - 2)


class LigerRopeFunction(Rotation):
    """``apply(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None,
    interleaved=False, halves=False) -> (q, k)``

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
        return Rotation.rotate(ctx, q, k, cos, sin, layout, layout.interleaved and not halves)


def _rotate_without_autograd(name, q, k, cos, sin, sign):
    devices.require_kernels(name, q)
    cos, sin, layout = kernel_arguments(q, k, cos, sin, None, 1, None, False, name)
    return rope_rotate(q, k, cos, sin, *layout, layout.interleaved, 0, 0, sign)


def rope_forward(q, k, cos, sin):
    """Rotate q and k without autograd, for frameworks with a Function of their own.

    Args:
        q, k, cos, sin: as in `liger_rotary_pos_emb`, with the heads in dimension 1. They are not
            written to.

    Returns:
        (q, k, cos, sin): q and k rotated, and the angles that `rope_backward` takes.

    Raises:
        ValueError, TypeError: as `liger_rotary_pos_emb`.
        RuntimeError: there are no kernels for q.
    """
    return *_rotate_without_autograd("rope_forward", q, k, cos, sin, 1.0), cos, sin


def rope_backward(dq, dk, cos, sin):
    """Return the gradients of `rope_forward`'s q and k: dq and dk rotated back, in new tensors."""
    return _rotate_without_autograd("rope_backward", dq, dk, cos, sin, -1.0)


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
    """Apply rotary position embedding to q and k, as Hugging Face's ``apply_rotary_pos_emb``.

    Args:
        q, k: (B, h, T, D) and (B, h_k, T, D), fp32, bf16 or fp16, of any strides. With
            ``unsqueeze_dim=2``: (B, T, h, D) and (B, T, h_k, D).
        cos, sin: (T, w), (1, T, w) or (B, T, w); or one of these with a dimension of size 1 where q
            has its heads. They get no gradient.
        position_ids: (B, T), (1, T) or (T,) integers. They select rows if cos and sin are tables
            over positions: of shape (P, w), or (1, P, w) unless position_ids is (1, P). Otherwise
            cos and sin belong to the tokens, as in Hugging Face's models, and position_ids is not
            used.
        unsqueeze_dim: the dimension of q and k that holds the heads.
        rotary_dim: the number of entries of a head that are rotated; w by default. Give it if w is
            not that number, but for example half of it. If cos and sin are wider than needed, their
            first columns are used.
        interleaved: which entries form a pair. False: j and j + rotary_dim/2. True: 2j and 2j+1,
            with the angle in column j (GLM, Helium, ERNIE 4.5). "repeated": 2j and 2j+1, with the
            angle in columns 2j and 2j+1 (Cohere).
        halves: return a pair's entries at j and j + rotary_dim/2, whatever ``interleaved`` is. q
            and k change their order alike, which does not change attention (DeepSeek-V3's
            ``rope_interleave``).

    Returns:
        q and k rotated, in new tensors with the dtype and memory layout of q and k.

    Raises:
        ValueError: shapes, devices or options do not fit each other; cos and sin are wider than a
            head.
        TypeError: q, k, cos or sin is not a floating point tensor; position_ids are not integers.

    Source: arXiv:2104.09864.
    """
    if not isinstance(q, torch.Tensor):  # both branches check the other arguments
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
    """Call `liger_rotary_pos_emb` as GPT-OSS does: cos and sin have half the head's size."""
    return liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `liger_rotary_pos_emb` as the vision towers of Qwen2-VL and others do.

    q and k are (S, h, D) with cos and sin (S, D), or (B, S, h, D) with cos and sin (1 or B, S, D).
    The result is of q's dtype if cos and sin are in fp32.
    """
    if q.dim() == 4:
        return liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    q, k = liger_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    return q.squeeze(0), k.squeeze(0)


def _case_function(rope):
    """Call ``rope`` with the case's options. ``half``: cos and sin have half the width."""

    def call(
        q, k, cos, sin, one_row=False, partial=False, half=False, interleaved=False, halves=False
    ):
        if one_row:
            cos = cos[:1]
            sin = sin[:1]
        cos, sin = case_angles(cos, sin, partial, interleaved)
        rotary_dim = None
        if half:
            rotary_dim = cos.shape[-1]
            cos = cos[..., : rotary_dim // 2]
            sin = sin[..., : rotary_dim // 2]
        return rope(q, k, cos, sin, rotary_dim=rotary_dim, interleaved=interleaved, halves=halves)

    return call


def _traffic(inputs):
    rows, angles = case_bytes(inputs)
    return (2 * rows + angles,) * 2  # read and written


CASES.append(
    Case(
        "rope",
        fn=_case_function(liger_rotary_pos_emb),
        reference=_case_function(rope_reference),
        inputs=case_inputs,
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
