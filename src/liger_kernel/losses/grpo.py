"""GRPO and its variants.

`grpo_loss` takes log-probabilities, `linear_grpo_loss` hidden states and the weight of a head.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import NamedTuple

import torch

from liger_kernel.core import check
from liger_kernel.losses.policy_batch import (
    IGNORE_INDEX,
    PolicyInputs,
    check_grpo,
    check_log_probs,
    check_tokens,
    grpo_batch,
)
from liger_kernel.losses.policy_math import GRPOOptions, fill_invalid
from liger_kernel.ops.head.token_log_probs import token_log_probs


class Reference(NamedTuple):
    """The reference model as a caller gives it: log-probabilities, or hidden states and head."""

    log_probs: torch.Tensor | None
    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def grpo_loss(
    log_probs,
    attention_mask,
    advantages,
    *,
    ref_per_token_logps=None,
    old_per_token_logps=None,
    vllm_is_ratio=None,
    num_items_in_batch=None,
    entropy=None,
    entropy_coef=0.0,
    **options,
):
    """GRPO and its variants of log-probabilities: `linear_grpo_loss` without the head.

    Args:
        log_probs: (B, T), differentiable.
        entropy: (B, T), differentiable. None: no entropy bonus, and no entropy among the metrics.
        Other arguments: as in `linear_grpo_loss`. Without ``ref_per_token_logps`` the KL divergence
            is 0.

    Returns, raises: as `linear_grpo_loss`.
    """
    name = "grpo_loss"
    options = GRPOOptions(**options)
    inputs = PolicyInputs(
        attention_mask,
        advantages,
        old_per_token_logps,
        ref_per_token_logps,
        vllm_is_ratio,
        num_items_in_batch,
    )
    check_log_probs(name, log_probs, entropy)
    check_grpo(name, log_probs, log_probs.shape, options, entropy_coef, inputs)
    batch = grpo_batch(options, entropy_coef, log_probs, inputs)
    return batch.loss_from_log_probs(log_probs, entropy)


def linear_grpo_loss(
    hidden,
    weight,
    selected_token_ids,
    attention_mask,
    advantages,
    bias=None,
    ref_per_token_logps=None,
    old_per_token_logps=None,
    ref_input=None,
    ref_weight=None,
    ref_bias=None,
    *,
    vllm_is_ratio=None,
    num_items_in_batch=None,
    use_ref_model=True,
    temperature=1.0,
    entropy_coef=0.0,
    return_entropy=False,
    memory="auto",
    drop_ignored=None,
    **options,
):
    """GRPO and its variants from the policy's hidden states, without all logits in memory.

    The gradients for hidden, weight and bias are computed in this call. Positions where the mask is
    0 have no influence, as long as the hidden states there are finite. (liger-kernel 0.8.5 counts
    them in luspo.)

    Args:
        hidden: (B, T, H), fp32, bf16, fp16 or fp64, any strides.
        weight, bias: (V, H) and (V,), of the head.
        selected_token_ids: (B, T) integers, the sampled tokens.
        attention_mask: (B, T), 1 for tokens that count, 0 elsewhere.
        advantages: (B,) or (B, T).
        ref_per_token_logps: (B, T), the reference model's log-probabilities. In their place you can
            give ref_input (B, T, H_ref), ref_weight and ref_bias. They are not used if beta is 0.
        use_ref_model: False: no reference, even if one is given; the KL divergence is then 0.
        old_per_token_logps: (B, T), of the policy that sampled. None: of this policy, without
            gradient.
        vllm_is_ratio: (B,), (B, 1) or (B, T), importance weights that correct for the inference
            engine.
        num_items_in_batch: for dapo, cispo and vespo: the number of tokens of all ranks and
            accumulation steps, a number or a tensor of one element. None: the tokens of this call
            on all ranks.
        temperature: the logits are divided by it.
        entropy_coef: this times the entropy, reduced like the loss, is subtracted from the loss.
        return_entropy: the mean entropy is among the metrics. It always is if ``entropy_coef`` is
            not 0.
        memory, drop_ignored: as in `linear_loss`.
        options: the fields of `GRPOOptions`:
            beta: factor of the KL divergence.
            use_bias_correction_kl: multiply the KL divergence by the ratio.
            loss_type: grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo or vespo.
            epsilon_low, epsilon_high: the ratio is clipped at 1 - epsilon_low and 1 + epsilon_high;
                cispo clips it at epsilon_high.
            delta: upper bound of the ratio where the advantage is negative (not for cispo, sapo,
                vespo).
            max_completion_length: dr_grpo divides by it.
            importance_sampling_level: "token" or "sequence", the level of the ratio (not for cispo,
                sapo, vespo).
            sapo_temperature_pos, sapo_temperature_neg, vespo_k_pos, vespo_lambda_pos, vespo_k_neg,
                vespo_lambda_neg: for positive and for negative advantages.

    Returns:
        The loss and a tuple of metrics: the mean KL divergence unless beta is 0, the mean entropy
        if asked for, and the share of clipped tokens. All are 0-d, in fp32 or fp64. The metrics
        have no gradients.

    Raises:
        ValueError: shapes or options that do not fit; no reference.
        TypeError: a wrong dtype.
        AssertionError, which is a ValueError, too: no reference, a vllm_is_ratio of another shape,
            no length for dr_grpo.

    Source: the papers in `policy_math`.
    """
    name = "linear_grpo_loss"
    options = GRPOOptions(**options)
    ids = selected_token_ids
    check_tokens(name, hidden, ids)
    ref_log_probs = ref_per_token_logps if use_ref_model else None
    inputs = PolicyInputs(
        attention_mask,
        advantages,
        old_per_token_logps,
        ref_log_probs,
        vllm_is_ratio,
        num_items_in_batch,
    )
    check_grpo(name, hidden, ids.shape, options, entropy_coef, inputs)
    head_options = dict(temperature=temperature, memory=memory, drop_ignored=drop_ignored)
    if use_ref_model:
        reference = Reference(ref_log_probs, ref_input, ref_weight, ref_bias)
        ref_log_probs = reference_log_probs(
            name, ids, attention_mask.bool(), reference, options.beta != 0, **head_options
        )
    inputs = replace(inputs, ref_per_token_logps=ref_log_probs)
    return grpo_batch(options, entropy_coef, hidden, inputs).loss_from_hidden(
        hidden,
        weight,
        ids,
        bias,
        return_entropy=return_entropy or entropy_coef != 0,
        **head_options,
    )


def reference_log_probs(name, ids, valid, reference, is_needed, **head_options):
    """Return the reference's log-probabilities, (B, T).

    They are computed from its hidden states if that is needed and they are not given.
    """
    log_probs, hidden, weight, bias = reference
    if log_probs is None and is_needed and (hidden is None or weight is None):
        raise check.InvalidArgument(
            f"{name}: use_ref_model is True without a reference, give ref_per_token_logps, "
            "or ref_input and ref_weight, or use_ref_model=False"
        )
    if log_probs is not None and hidden is not None:
        warnings.warn(
            f"{name}: ref_per_token_logps and ref_input are both given, "
            "ref_per_token_logps are used",
            stacklevel=4,
        )
    if log_probs is not None or not is_needed:
        return log_probs
    check_tokens(name, hidden, ids, "ref_input")
    target = fill_invalid(ids, valid, IGNORE_INDEX)
    with torch.no_grad():
        return token_log_probs(
            hidden, weight, target, bias, ignore_index=IGNORE_INDEX, **head_options
        )
