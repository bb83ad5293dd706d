r"""Multimodal rotary position embedding (M-RoPE): a token has a time, a row and a column position.

    y1 = x1·cos - x2·sin,   y2 = x2·cos + x1·sin        dx: the same with -sin

for each pair (x[j], x[j + D/2]), with cos and sin of the axis that pair j belongs to: the first
``mrope_section[0]`` pairs to time, the next ``mrope_section[1]`` to the row, the others to the
column.

This is the rotation of `rope`. Its kernel reads each pair's angle directly from the table of its
axis. It computes in fp32 and rounds the result once.

Source: Wang et al., Qwen2-VL, arXiv:2409.12191.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case
from liger_kernel.ops.rotary.arguments import (
    case_bytes,
    case_inputs,
    kernel_arguments,
    rope_arguments,
    swap_heads,
)
from liger_kernel.ops.rotary.rope import Rotation, rotate_reference, select_axes

NAME = "liger_multimodal_rotary_pos_emb"


def mrope_reference(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    cos, sin, *axes = _check_arguments(q, k, cos, sin, mrope_section)
    rotary_dim = 2 * cos.shape[-1]
    cos = select_axes(cos, *axes)
    sin = select_axes(sin, *axes)
    q, k, cos, sin, heads_dim, rotary_dim = rope_arguments(
        q, k, cos, sin, None, unsqueeze_dim, rotary_dim, False, NAME
    )
    q, k = rotate_reference(q, k, cos, sin, rotary_dim, False, False)
    return swap_heads(q, heads_dim), swap_heads(k, heads_dim)


def _check_arguments(q, k, cos, sin, mrope_section):
    """Check the arguments. Returns cos and sin (3, 1 or B, S, pairs), second_axis, third_axis.

    The last two are the first pairs of the second and the third axis.
    """
    check.floats(NAME, dict(q=q, k=k, cos=cos, sin=sin))
    if cos.shape != sin.shape or cos.dim() != 4 or cos.shape[0] != 3:
        raise ValueError(
            f"{NAME}: cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}, "
            "give both (3, B, S, D)"
        )
    if not isinstance(mrope_section, (list, tuple)):
        raise TypeError(f"{NAME}: mrope_section is {mrope_section!r}, give a list of 3 numbers")
    sections = [check.size(NAME, "mrope_section", n) for n in mrope_section]
    pairs = cos.shape[-1] // 2
    if len(sections) != 3 or sum(sections) != pairs:
        raise ValueError(
            f"{NAME}: mrope_section is {mrope_section}, "
            f"give 3 numbers of pairs with the sum {pairs}"
        )
    return cos[..., :pairs], sin[..., :pairs], sections[0], sections[0] + sections[1]


class LigerQwen2VLMRopeFunction(Rotation):
    """``apply(q, k, cos, sin, mrope_section, unsqueeze_dim=1) -> (q, k)``

    The arguments of `liger_multimodal_rotary_pos_emb`.
    """

    reference = staticmethod(mrope_reference)

    @staticmethod
    def forward(ctx, q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        devices.require_kernels("LigerQwen2VLMRopeFunction", q)
        cos, sin, *axes = _check_arguments(q, k, cos, sin, mrope_section)
        *_, layout = kernel_arguments(
            q, k, cos[0], sin[0], None, unsqueeze_dim, 2 * cos.shape[-1], False, NAME
        )
        return Rotation.rotate(ctx, q, k, cos, sin, layout, False, *axes)


def liger_multimodal_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mrope_section: list[int],
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply rotary position embedding by positions on three axes.

    It replaces ``apply_multimodal_rotary_pos_emb`` of Qwen2-VL.

    Args:
        q, k: (B, h, S, D) and (B, h_k, S, D), fp32, bf16 or fp16, of any strides. With
            ``unsqueeze_dim=2``: (B, S, h, D) and (B, S, h_k, D).
        cos, sin: (3, 1 or B, S, D): time, row, column. They get no gradient.
        mrope_section: how many pairs of entries belong to each axis; their sum is D/2.
        unsqueeze_dim: the dimension of q and k that holds the heads.

    Returns:
        q and k rotated, in new tensors with the dtype and memory layout of q and k.

    Raises:
        ValueError: shapes, devices or sections do not fit each other.
        TypeError: q, k, cos or sin is not a floating point tensor, a section no int.
    """
    check.floats(NAME, dict(q=q))
    run = LigerQwen2VLMRopeFunction.call if devices.has_kernels(q) else mrope_reference
    return run(q, k, cos, sin, mrope_section, unsqueeze_dim)


# its name in `liger_kernel.transformers.functional`
liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb


def _inputs(B, S, HQ, HK, D):
    axes = [case_inputs(B, S, HQ, HK, D) for _ in range(3)]
    cos = torch.stack([axis["cos"] for axis in axes])
    sin = torch.stack([axis["sin"] for axis in axes])
    return dict(q=axes[0]["q"], k=axes[0]["k"], cos=cos, sin=sin)


def _case_function(mrope):
    """Call ``mrope`` with the case's options. ``one_row``: the batch's rows share the angles."""

    def call(q, k, cos, sin, one_row=False, empty_axis=False):
        pairs = cos.shape[-1] // 2
        if empty_axis:
            sections = [pairs - pairs // 3, 0, pairs // 3]
        else:
            sections = [pairs // 4, pairs // 3, 0]
        sections[-1] += pairs - sum(sections)
        if one_row:
            cos = cos[:, :1]
            sin = sin[:, :1]
        return mrope(q, k, cos, sin, sections)

    return call


def _traffic(inputs):
    rows, angles = case_bytes(inputs)
    # read and written; of each pair the angle of one axis
    return (2 * rows + angles // 3,) * 2


CASES.append(
    Case(
        "multimodal_rope",
        fn=_case_function(liger_multimodal_rotary_pos_emb),
        reference=_case_function(mrope_reference),
        inputs=_inputs,
        shapes=((1, 1, 1, 1, 2), (2, 5, 9, 3, 12), (2, 3, 28, 4, 24)),
        options=(dict(), dict(one_row=True), dict(empty_axis=True)),
        bench=((1, 32768, 28, 4, 128), (4, 2048, 28, 4, 128)),
        traffic=_traffic,
    )
)
