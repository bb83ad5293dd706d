r"""A policy loss of each token, in one kernel: `grpo_terms` of policies that couple no tokens.

    ρ = log π(y) - log π_old(y),   x = log π_ref(y) - log π(y)
    loss = l(e^ρ, A)·v + β·KL,   KL = e^x - x - 1, times e^ρ where that is asked for

v is the inference engine's ratio. Forward also stores the slope d loss / d log π(y), so that
backward is one product. The formulas of l and their sources are in `policy_math`, and its functions
are the reference. A policy that couples the tokens of a sequence runs as these functions.
"""

from __future__ import annotations

import math

import torch
from torch.compiler import is_compiling

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import Function, cast_if_needed
from liger_kernel.core.tile import cdiv, exp, sigmoid, tl, triton
from liger_kernel.losses.policy_math import (
    POLICIES,
    TokenTensors,
    clipped_surrogate,
    clipped_weight,
    couples_tokens,
    fill_invalid,
    grpo_terms,
    soft_gate,
)
from liger_kernel.ops.mlp.activation_linear import PLAIN_TENSORS
from liger_kernel.ops.mlp.pointwise import CLAMP_HAS_GRADIENT_AT_LIMIT, clamp_has_gradient


def policy_terms_reference(log_probs, mask, tokens, options):
    """Compute `policy_terms` in PyTorch."""
    valid = None
    if mask is not None:
        valid = mask.bool()
        log_probs = fill_invalid(log_probs, valid)
        tokens = tokens.map(lambda x: fill_invalid(x, valid))
    loss, kl, is_clipped = grpo_terms(log_probs, tokens, options)
    terms = loss, None if kl is None else kl.detach(), is_clipped.to(loss.dtype)
    return tuple(x if x is None else fill_invalid(x.expand(log_probs.shape), valid) for x in terms)


# ---- the functions l: each returns l, its slope dl / d log π(y), and 1 where l is clipped ----


@triton.jit
def _clipped_surrogate(
    log_probs, ratio, A, lowest, highest, delta, t_pos, t_neg, AT_LIMIT: tl.constexpr
):
    # the comparisons keep a NaN, which tl.minimum would lose
    bounded = ratio
    bounded_slope = A
    if delta is not None:
        bounded = tl.where(ratio > delta, delta, ratio)
        bounded_slope = tl.where(clamp_has_gradient(ratio, delta, AT_LIMIT), A, 0.0)
    bounded *= A
    clipped = tl.where(ratio < lowest, lowest, tl.where(ratio > highest, highest, ratio)) * A
    is_inside = clamp_has_gradient(ratio, highest, AT_LIMIT)
    is_inside = is_inside & clamp_has_gradient(-ratio, -lowest, AT_LIMIT)
    clipped_slope = tl.where(is_inside, A, 0.0)
    least = tl.where((bounded < clipped) | (bounded != bounded), bounded, clipped)
    # of two equal terms, torch.min has half the slope of each
    slope = tl.where(bounded > clipped, clipped_slope, 0.5 * (bounded_slope + clipped_slope))
    slope = tl.where(bounded < clipped, bounded_slope, slope)
    is_clipped = ((ratio < lowest) & (A < 0)) | ((ratio > highest) & (A > 0))
    return -least, -slope * ratio, is_clipped.to(tl.float32)


@triton.jit
def _clipped_weight(
    log_probs, ratio, A, lowest, highest, delta, t_pos, t_neg, AT_LIMIT: tl.constexpr
):
    slope = -tl.where(ratio > highest, highest, ratio) * A
    return slope * log_probs, slope, ((ratio > highest) & (A > 0)).to(tl.float32)


@triton.jit
def _soft_gate(log_probs, ratio, A, lowest, highest, delta, t_pos, t_neg, AT_LIMIT: tl.constexpr):
    temperature = tl.where(A > 0, t_pos, t_neg)
    gate, slope = sigmoid(temperature * (ratio - 1.0))
    return -(4.0 / temperature * gate) * A, -4.0 * slope * ratio * A, tl.zeros_like(ratio)


SURROGATES = {
    clipped_surrogate: _clipped_surrogate,
    clipped_weight: _clipped_weight,
    soft_gate: _soft_gate,
}


@triton.jit
def _exp(x):
    """`exp`, and inf for inf. Near the largest number, its 2ᵏ is inf before the product is."""
    x = tl.where(x > 150.0, 150.0, x)
    is_large = x > 80.0
    return exp(tl.where(is_large, x - 8.0, x)) * tl.where(is_large, 2980.957987041728, 1.0)  # e⁸


@triton.jit
def _k3(x):
    """Return e^x - x - 1 and e^x - 1. Where these cancel, they are made of the series Σ xⁿ/n!.

    Its first term left out, 1/13! at |x| = 1, is a hundredth of the sum's rounding.
    """
    p = 1 / 39916800 + x * (1 / 479001600)
    p = 1 / 40320 + x * (1 / 362880 + x * (1 / 3628800 + x * p))
    p = 1 / 120 + x * (1 / 720 + x * (1 / 5040 + x * p))
    series = x * x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * p)))
    expm1 = _exp(x) - 1.0
    is_near = tl.abs(x) < 1.0
    return tl.where(is_near, series, expm1 - x), tl.where(is_near, x + series, expm1)


@triton.jit
def _load(ptr, row, column, stride_row, stride_column, mask):
    at = row * stride_row + column * stride_column
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@kernel
def _policy_terms(
    log_probs_ptr,
    mask_ptr,
    advantages_ptr,
    old_ptr,
    ref_ptr,
    inference_ratio_ptr,
    loss_ptr,
    slope_ptr,
    kl_ptr,
    is_clipped_ptr,
    stride_log_probs_b,
    stride_log_probs_t,
    stride_mask_b,
    stride_mask_t,
    stride_advantages_b,
    stride_advantages_t,
    stride_old_b,
    stride_old_t,
    stride_ref_b,
    stride_ref_t,
    stride_inference_ratio_b,
    stride_inference_ratio_t,
    N,
    T,
    log_limit_pos,
    log_limit_neg,
    lowest,
    highest,
    delta,
    temperature_pos,
    temperature_neg,
    beta,
    SURROGATE: tl.constexpr,
    CORRECT_KL: tl.constexpr,
    AT_LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK of N tokens. The outputs are contiguous, and 0 where the mask is."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = i // T
    t = i % T
    in_range = i < N
    valid = in_range
    if mask_ptr is not None:
        mask = tl.load(mask_ptr + b * stride_mask_b + t * stride_mask_t, mask=in_range, other=0)
        valid = in_range & (mask != 0)
    log_probs = _load(log_probs_ptr, b, t, stride_log_probs_b, stride_log_probs_t, valid)
    A = _load(advantages_ptr, b, t, stride_advantages_b, stride_advantages_t, valid)
    old = log_probs
    if old_ptr is not None:
        old = _load(old_ptr, b, t, stride_old_b, stride_old_t, valid)
    log_ratio = log_probs - old
    limit = tl.where(A >= 0, log_limit_pos, log_limit_neg)
    ratio = _exp(tl.where(log_ratio > limit, limit, log_ratio))
    loss, slope, is_clipped = SURROGATE(
        log_probs, ratio, A, lowest, highest, delta, temperature_pos, temperature_neg, AT_LIMIT
    )
    if inference_ratio_ptr is not None:
        inference_ratio = _load(
            inference_ratio_ptr, b, t, stride_inference_ratio_b, stride_inference_ratio_t, valid
        )
        loss *= inference_ratio
        slope *= inference_ratio
    if ref_ptr is not None:
        ref = _load(ref_ptr, b, t, stride_ref_b, stride_ref_t, valid)
        kl, expm1 = _k3(ref - log_probs)
        kl_slope = -expm1
        if CORRECT_KL:
            has_ratio = (kl != 0) | (log_ratio < 80)
            factor = _exp(tl.where(has_ratio, log_ratio, 0.0))
            kl *= factor
            kl_slope = kl_slope * factor + tl.where(has_ratio, kl, 0.0)
        loss += beta * kl
        slope += beta * kl_slope
        tl.store(kl_ptr + i, tl.where(valid, kl, 0.0), mask=in_range)
    tl.store(loss_ptr + i, tl.where(valid, loss, 0.0), mask=in_range)
    tl.store(is_clipped_ptr + i, tl.where(valid, is_clipped, 0.0), mask=in_range)
    if slope_ptr is not None:
        tl.store(slope_ptr + i, tl.where(valid, slope, 0.0), mask=in_range)


BLOCK = 256  # tokens of a program


def _launch(log_probs, mask, tokens, options, need_slope):
    """Return (loss, slope or None, KL or None, is_clipped), fp32 of the shape of ``log_probs``."""
    shape = log_probs.shape
    inputs = [
        log_probs,
        mask,
        tokens.advantages,
        tokens.old_log_probs,
        tokens.ref_log_probs,
        tokens.inference_ratio,
    ]
    strides = []
    for x in inputs:
        stride = (0, 0) if x is None else x.expand(shape).stride()
        strides += (0, *stride)[-2:]
    needs = True, need_slope, tokens.ref_log_probs is not None, True
    outputs = [
        torch.empty(shape, dtype=torch.float32, device=log_probs.device) if need else None
        for need in needs
    ]
    N = log_probs.numel()
    policy = POLICIES[options.loss_type]
    lowest, highest = 1 - options.epsilon_low, 1 + options.epsilon_high
    if policy.surrogate is clipped_weight:
        highest = options.epsilon_high
    numbers = (
        lowest,
        highest,
        options.delta,
        options.sapo_temperature_pos,
        options.sapo_temperature_neg,
        options.beta,
    )
    _policy_terms[(cdiv(N, BLOCK),)](
        *inputs,
        *outputs,
        *strides,
        N,
        shape[-1],
        *[math.log(limit) + 1 for limit in policy.limits(options)],
        *[x if x is None else float(x) for x in numbers],  # a launch takes none of NumPy's
        SURROGATE=SURROGATES[policy.surrogate],
        CORRECT_KL=bool(options.use_bias_correction_kl),
        AT_LIMIT=CLAMP_HAS_GRADIENT_AT_LIMIT,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return outputs


def _copy_if_inference(x):
    """Return x, or a copy if x was made in inference mode: autograd does not save such a tensor."""
    return x.clone() if x is not None and x.is_inference() else x


class LigerPolicyTermsFunction(Function):
    """Autograd Function of `policy_terms`, for policies that couple no tokens.

    ``apply(log_probs, mask, options, *tokens)`` returns (loss, KL or None, is_clipped).
    """

    @staticmethod
    def reference(log_probs, mask, options, *tokens):
        return policy_terms_reference(log_probs, mask, TokenTensors(*tokens), options)

    @staticmethod
    def forward(ctx, log_probs, mask, options, *tokens):
        devices.require_kernels("LigerPolicyTermsFunction", log_probs)
        need_slope = ctx.needs_input_grad[0]
        loss, slope, kl, is_clipped = _launch(
            log_probs, mask, TokenTensors(*tokens), options, need_slope
        )
        if need_slope:
            mask, *tokens = (_copy_if_inference(x) for x in (mask, *tokens))
        ctx.save_for_backward(log_probs, mask, slope, *tokens)
        ctx.options = options
        ctx.mark_non_differentiable(*[x for x in (kl, is_clipped) if x is not None])
        ctx.set_materialize_grads(False)
        return loss, kl, is_clipped

    @staticmethod
    def arguments(ctx):
        log_probs, mask, _, *tokens = ctx.saved_tensors
        return log_probs, mask, ctx.options, *tokens

    @staticmethod
    def backward(ctx, grad_loss, *_):
        log_probs, _, slope, *tokens = ctx.saved_tensors
        dlog_probs = None
        if grad_loss is not None:
            dlog_probs = cast_if_needed(grad_loss * slope, log_probs.dtype)
        return dlog_probs, None, None, *[None] * len(tokens)


def policy_terms(log_probs, tokens, options, mask=None):
    """Compute the terms of a policy loss for each token.

    Args:
        log_probs: (B, T), or (tokens,), differentiable.
        tokens: `TokenTensors` that expand to this shape. They have no gradients.
        options: `GRPOOptions`.
        mask: of the same shape, 0 for tokens whose terms are 0, whatever ``tokens`` has there.
            None: all count.

    Returns:
        l + β·KL, KL without a gradient (None without a reference), and 1 where l is clipped, else
        0: of the shape of ``log_probs``, in fp32 (fp64 for fp64).
    """
    tensors = [x for x in (log_probs, mask, *tokens) if x is not None]
    if (
        couples_tokens(options)
        or is_compiling()  # the compiler makes one kernel of the reference
        or not devices.has_kernels(log_probs)
        or any(type(x) not in PLAIN_TENSORS for x in tensors)  # such as DTensor
    ):
        return policy_terms_reference(log_probs, mask, tokens, options)
    return LigerPolicyTermsFunction.apply(log_probs, mask, options, *tokens)
