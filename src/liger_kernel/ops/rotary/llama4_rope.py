r"""Llama 4's rotary position embedding: neighbouring entries are a complex number, times a factor.

    y[2j] + i·y[2j+1] = (x[2j] + i·x[2j+1])·f[j]        dx: the same with the conjugate of f

This is the rotation of `rope` with ``interleaved=True``, cos = Re f and sin = Im f. It uses the
same kernel, which reads both parts directly from f. It computes in fp32 and rounds the result once,
as Hugging Face does.

Source: Llama 4 in Hugging Face transformers; arXiv:2104.09864.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, cast_if_needed
from liger_kernel.ops.rotary.arguments import (
    case_bytes,
    case_inputs,
    kernel_arguments,
    rope_arguments,
)
from liger_kernel.ops.rotary.rope import Rotation, rotate_reference

TEXT_NAME = "liger_llama4_text_rotary_pos_emb"
VISION_NAME = "liger_llama4_vision_rotary_pos_emb"


def llama4_rope_reference(q, k, freqs_cis, BLOCK_SIZE=None, name=TEXT_NAME):
    k, cos, sin = _check_arguments(q, k, freqs_cis, name)
    D = q.shape[-1]
    q, k, cos, sin, *_ = rope_arguments(q, k, cos, sin, None, 2, D, True, name)
    q, k = rotate_reference(q, k, cos, sin, D, True, True)
    return q.transpose(1, 2), k.transpose(1, 2)


def _check_arguments(q, k, freqs, name):
    """Check the arguments. Returns k in q's dtype, and Re f and Im f as views, (1 or B, S, D/2)."""
    check.floats(name, dict(q=q, k=k))
    if not isinstance(freqs, torch.Tensor):
        raise TypeError(f"{name}: freqs is a {type(freqs).__name__}, give a complex tensor")
    if not (freqs.is_complex() or freqs.is_floating_point()):
        raise TypeError(f"{name}: freqs is {freqs.dtype}, give a complex tensor")
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"{name}: q has shape {tuple(q.shape)}, k {tuple(k.shape)}, give (B, S, heads, D)"
        )
    B, S, _, D = q.shape
    batched = freqs[None] if freqs.dim() == 2 else freqs
    if (
        batched.dim() != 3
        or batched.shape[0] not in (1, B)
        or batched.shape[1] < S
        or 2 * batched.shape[2] != D
    ):
        raise ValueError(
            f"{name}: freqs has shape {tuple(freqs.shape)}, "
            f"give {S, D // 2}, {1, S, D // 2} or {B, S, D // 2}"
        )
    batched = batched[:, :S]
    if batched.is_complex():
        cos, sin = torch.view_as_real(batched.resolve_conj()).unbind(-1)
    else:  # a complex buffer that was cast, to bf16 say, has lost its imaginary part
        cos = batched
        sin = batched.new_zeros(()).expand_as(batched)
    check.floats(name, dict(q=q, freqs=cos))
    return cast_if_needed(k, q.dtype), cos, sin


class LigerLlama4RopeFunction(Rotation):
    """``apply(q, k, freqs_cis, BLOCK_SIZE=None) -> (q, k)``

    q, k and freqs_cis as in `liger_llama4_text_rotary_pos_emb`. BLOCK_SIZE is not used: a launch is
    chosen by shape.
    """

    reference = staticmethod(llama4_rope_reference)

    @staticmethod
    def forward(ctx, q, k, freqs_cis, BLOCK_SIZE=None, name=TEXT_NAME):
        devices.require_kernels("LigerLlama4RopeFunction", q)
        k, cos, sin = _check_arguments(q, k, freqs_cis, name)
        cos, sin, layout = kernel_arguments(q, k, cos, sin, None, 2, q.shape[-1], True, name)
        return Rotation.rotate(ctx, q, k, cos, sin, layout, True)


def _rotate(name, q, k, freqs):
    check.floats(name, dict(q=q))
    run = LigerLlama4RopeFunction.call if devices.has_kernels(q) else llama4_rope_reference
    return run(q, k, freqs, None, name)


def liger_llama4_text_rotary_pos_emb(
    xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply Llama 4's rotary position embedding, as Hugging Face's ``apply_rotary_emb``.

    Args:
        xq, xk: (B, S, h, D) and (B, S, h_k, D), fp32, bf16 or fp16, of any strides.
        freqs_cis: complex, (S', D/2), (1, S', D/2) or (B, S', D/2) with S' ≥ S; the first S rows
            are used. It gets no gradient. A real one multiplies both entries of a pair.

    Returns:
        Both rotated, in new tensors of xq's dtype, with the memory layout of xq and xk.

    Raises:
        ValueError: shapes or devices do not fit each other.
        TypeError: xq or xk is not a floating point tensor, freqs_cis is of integers or no tensor.
    """
    return _rotate(TEXT_NAME, xq, xk, freqs_cis)


def liger_llama4_vision_rotary_pos_emb(
    query: torch.Tensor, key: torch.Tensor, freqs_ci: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply `liger_llama4_text_rotary_pos_emb` as Llama 4's vision model does.

    It replaces ``vision_apply_rotary_emb``. All rows of the batch share ``freqs_ci``, which is
    (S, D/2), (S, 1, D/2), (1, S, D/2) or (1, S, 1, D/2).
    """
    freqs = freqs_ci
    if isinstance(freqs, torch.Tensor) and isinstance(query, torch.Tensor) and query.dim() == 4:
        _, S, _, D = query.shape
        shape = tuple(freqs.shape)
        allowed = (S, D // 2), (S, 1, D // 2), (1, S, D // 2), (1, S, 1, D // 2)
        if shape not in allowed:
            raise ValueError(
                f"{VISION_NAME}: freqs_ci has shape {shape}, give {' or '.join(map(str, allowed))}"
            )
        freqs = freqs.reshape(S, D // 2)
    return _rotate(VISION_NAME, query, key, freqs)


def apply_liger_llama4_rope_full(modeling_module) -> None:
    """Replace both rotary functions in Llama 4's modeling module, for every Llama 4 model."""
    modeling_module.apply_rotary_emb = liger_llama4_text_rotary_pos_emb
    modeling_module.vision_apply_rotary_emb = liger_llama4_vision_rotary_pos_emb


def _inputs(B, S, HQ, HK, D):
    rope = case_inputs(B, S, HQ, HK, D)
    q = rope["q"].detach().transpose(1, 2).requires_grad_()
    k = rope["k"].detach().transpose(1, 2).requires_grad_()
    freqs = torch.complex(rope["cos"][..., : D // 2], rope["sin"][..., : D // 2])
    return dict(q=q, k=k, freqs=freqs)


def _case_function(rope):
    """Call ``rope`` with the case's options. ``one_row``: the batch's rows share the angles."""

    def call(q, k, freqs, one_row=False, real=False):
        freqs = freqs[:1] if one_row else freqs
        return rope(q, k, freqs.real if real else freqs)

    return call


def _traffic(inputs):
    rows, angles = case_bytes(
        dict(q=inputs["q"], k=inputs["k"], cos=inputs["freqs"], sin=inputs["freqs"])
    )
    return (2 * rows + angles,) * 2  # read and written


CASES.append(
    Case(
        "llama4_rope",
        fn=_case_function(liger_llama4_text_rotary_pos_emb),
        reference=_case_function(llama4_rope_reference),
        inputs=_inputs,
        shapes=((1, 1, 1, 1, 2), (2, 5, 9, 3, 12), (2, 3, 40, 8, 24)),
        options=(dict(), dict(one_row=True), dict(real=True)),
        bench=((1, 32768, 40, 8, 128), (4, 2048, 40, 8, 128)),
        traffic=_traffic,
    )
)
