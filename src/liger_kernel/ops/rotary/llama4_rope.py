r"""Llama 4's rotary position embedding: neighbours are a complex number, and are multiplied by one,
f, for each pair.

    y[2j] + i·y[2j+1] = (x[2j] + i·x[2j+1])·f[j]        dx: the same with the conjugate of f

This is rope.py's rotation with ``interleaved=True``, cos = Re f and sin = Im f, by its kernel,
which reads both parts where they are in f. It computes in fp32 and rounds the result once, as
Hugging Face does.

Source: Llama 4 in Hugging Face transformers; arXiv:2104.09864.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, rounded
from liger_kernel.ops.rotary.rope import (
    Rotation,
    kernel_arguments,
    rope_arguments,
    rope_bytes,
    rope_inputs,
    rotate_reference,
)

TEXT, VISION = "liger_llama4_text_rotary_pos_emb", "liger_llama4_vision_rotary_pos_emb"


def llama4_rope_reference(q, k, freqs_cis, BLOCK_SIZE=None, name=TEXT):
    k, cos, sin = _arguments(q, k, freqs_cis, name)
    D = q.shape[-1]
    q, k, cos, sin, *_ = rope_arguments(q, k, cos, sin, None, 2, D, True, name)
    q, k = rotate_reference(q, k, cos, sin, D, True, True)
    return q.transpose(1, 2), k.transpose(1, 2)


def _arguments(q, k, freqs, name):
    """Check the arguments -> k in q's dtype, and Re f and Im f as views, (1 or B, S, D/2)."""
    check.floats(name, dict(q=q, k=k))
    if not isinstance(freqs, torch.Tensor) or not (freqs.is_complex() or freqs.is_floating_point()):
        given = freqs.dtype if isinstance(freqs, torch.Tensor) else f"a {type(freqs).__name__}"
        raise TypeError(f"{name}: freqs is {given}, give a complex tensor")
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"{name}: q has shape {tuple(q.shape)}, k {tuple(k.shape)}, give (B, S, heads, D)"
        )
    B, S, _, D = q.shape
    shape, rows = tuple(freqs.shape), freqs[None] if freqs.dim() == 2 else freqs
    if (
        rows.dim() != 3
        or rows.shape[0] not in (1, B)
        or rows.shape[1] < S
        or 2 * rows.shape[2] != D
    ):
        raise ValueError(
            f"{name}: freqs has shape {shape}, give {S, D // 2}, {1, S, D // 2} or {B, S, D // 2}"
        )
    rows = rows[:, :S]
    if rows.is_complex():
        cos, sin = torch.view_as_real(rows.resolve_conj()).unbind(-1)
    else:  # a complex buffer that was cast, to bf16 say, has lost its imaginary part
        cos, sin = rows, rows.new_zeros(()).expand_as(rows)
    check.floats(name, dict(q=q, freqs=cos))
    return rounded(k, q.dtype), cos, sin


class LigerLlama4RopeFunction(Rotation):
    """``apply(q, k, freqs_cis, BLOCK_SIZE=None) -> (q, k)``

    q, k and freqs_cis as in `liger_llama4_text_rotary_pos_emb`. BLOCK_SIZE is not used: a launch is
    chosen by shape."""

    reference = staticmethod(llama4_rope_reference)

    @staticmethod
    def forward(ctx, q, k, freqs_cis, BLOCK_SIZE=None, name=TEXT):
        devices.require_kernels("LigerLlama4RopeFunction", q)
        k, cos, sin = _arguments(q, k, freqs_cis, name)
        cos, sin, layout = kernel_arguments(q, k, cos, sin, None, 2, q.shape[-1], True, name)
        return Rotation.rotate(ctx, q, k, cos, sin, layout, True)


def _rotated(name, q, k, freqs):
    check.floats(name, dict(q=q))
    run = LigerLlama4RopeFunction.call if devices.has_kernels(q) else llama4_rope_reference
    return run(q, k, freqs, None, name)


def liger_llama4_text_rotary_pos_emb(
    xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of Llama 4's text model. It replaces Hugging Face's
    ``apply_rotary_emb``.

    Args:
        xq, xk: (B, S, h, D) and (B, S, h_k, D), fp32, bf16 or fp16, of any strides.
        freqs_cis: complex, (S', D/2), (1, S', D/2) or (B, S', D/2) with S' ≥ S; the first S rows
        are used. It gets no
            gradient. A real one multiplies both entries of a pair.

    Returns:
        Both rotated, in new tensors of xq's dtype, with the memory layout of xq and xk.

    Raises:
        ValueError: shapes or devices that do not fit each other.
        TypeError: xq or xk is not a floating point tensor, freqs_cis is of integers or no tensor.
    """
    return _rotated(TEXT, xq, xk, freqs_cis)


def liger_llama4_vision_rotary_pos_emb(
    query: torch.Tensor, key: torch.Tensor, freqs_ci: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `liger_llama4_text_rotary_pos_emb`, for Llama 4's vision model: all rows of the batch
    share ``freqs_ci``.

    That is (S, D/2), (S, 1, D/2), (1, S, D/2) or (1, S, 1, D/2). It replaces
    ``vision_apply_rotary_emb``."""
    freqs = freqs_ci
    if isinstance(freqs, torch.Tensor) and isinstance(query, torch.Tensor) and query.dim() == 4:
        (_, S, _, D), shape = query.shape, tuple(freqs.shape)
        known = (S, D // 2), (S, 1, D // 2), (1, S, D // 2), (1, S, 1, D // 2)
        if shape not in known:
            raise ValueError(
                f"{VISION}: freqs_ci has shape {shape}, give {' or '.join(map(str, known))}"
            )
        freqs = freqs.reshape(S, D // 2)
    return _rotated(VISION, query, key, freqs)


def apply_liger_llama4_rope_full(modeling_module) -> None:
    """Replace both of Llama 4's functions in its modeling module: from then on, every Llama 4 model
    uses the kernel."""
    modeling_module.apply_rotary_emb = liger_llama4_text_rotary_pos_emb
    modeling_module.vision_apply_rotary_emb = liger_llama4_vision_rotary_pos_emb


def _inputs(B, S, HQ, HK, D):
    rope = rope_inputs(B, S, HQ, HK, D)
    q, k = (rope[x].detach().transpose(1, 2).requires_grad_() for x in "qk")
    return dict(
        q=q, k=k, freqs=torch.complex(rope["cos"][..., : D // 2], rope["sin"][..., : D // 2])
    )


def _variant(rope):
    def call(q, k, freqs, one_row=False, real=False):
        freqs = freqs[:1] if one_row else freqs
        return rope(q, k, freqs.real if real else freqs)

    return call


def _traffic(t):
    rows, angles = rope_bytes(dict(q=t["q"], k=t["k"], cos=t["freqs"], sin=t["freqs"]))
    return (2 * rows + angles,) * 2  # read and written


CASES.append(
    Case(
        "llama4_rope",
        fn=_variant(liger_llama4_text_rotary_pos_emb),
        reference=_variant(llama4_rope_reference),
        inputs=_inputs,
        shapes=((1, 1, 1, 1, 2), (2, 5, 9, 3, 12), (2, 3, 40, 8, 24)),
        options=(dict(), dict(one_row=True), dict(real=True)),
        bench=((1, 32768, 40, 8, 128), (4, 2048, 40, 8, 128)),
        traffic=_traffic,
    )
)
