"""GRPO and its variants of logits that are in memory, under the published names.

`liger_selected_log_probs` takes the tokens' log-probabilities from the logits and gives these their
gradient, at most one tensor of their size. The rest is `policy_tokens`, on (B, L). A masked token
contributes nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from liger_kernel.core import check
from liger_kernel.losses.policy_batch import (
    REAL_DTYPES,
    PolicyInputs,
    check_grpo,
    check_rows,
    grpo_batch,
    to_rows,
)
from liger_kernel.losses.policy_math import (
    POLICIES,
    GRPOOptions,
    TokenTensors,
    clipped_surrogate,
    couples_tokens,
)
from liger_kernel.losses.policy_tokens import policy_terms
from liger_kernel.ops.head.selected_log_probs import liger_selected_log_probs


def fused_selective_log_softmax(
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    temperature: float = 0.9,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return log p of the last L tokens under ``softmax(logits / temperature)``, without gradient.

    Args:
        logits: (B, L+1, V), contiguous; the last position is not used.
        input_ids: (B, L) or more columns, of which the last L are taken.
        temperature: a positive number.
        mask: (B, L) or more columns, likewise; the result is 0 where it is 0.

    Returns:
        (B, L) in fp32.

    Raises:
        AssertionError: logits are not contiguous.
        ValueError, TypeError: something else does not fit.
    """
    name = "fused_selective_log_softmax"
    check.floats(name, dict(logits=logits))
    check.integers(name, dict(input_ids=input_ids))
    if logits.dim() != 3:
        raise ValueError(f"{name}: logits have shape {tuple(logits.shape)}, give (B, L+1, classes)")
    if not logits.is_contiguous():
        raise AssertionError(f"{name}: logits are not contiguous, give logits.contiguous()")
    L = logits.shape[1] - 1

    def last_columns(argument, x):
        if x.dim() != 2 or L < 0 or x.shape[1] < L:
            raise ValueError(
                f"{name}: logits have shape {tuple(logits.shape)}, {argument} {tuple(x.shape)}, "
                "give (B, L+1, classes) and (B, L or more)"
            )
        return x[:, x.shape[1] - L :]

    ids = last_columns("input_ids", input_ids)
    if mask is not None:
        mask = last_columns("mask", mask)
    with torch.no_grad():
        return liger_selected_log_probs(logits, ids, mask, temperature)


class GrpoLossFunction:
    """``apply(logits (B, L+1, V), old_logp, ref_logp, ...)``: see its docstring."""

    @staticmethod
    def apply(
        logits,
        old_logp,
        ref_logp,
        completion_ids,
        advantages,
        completion_mask,
        temperature,
        beta,
        eps_low,
        eps_high,
        inplace,
        loss_type="grpo",
        max_completion_length=None,
        reduce=True,
        importance_sampling_level="token",
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vllm_is_ratio=None,
        delta=None,
        use_bias_correction_kl=False,
        num_items_in_batch=None,
        phi_seq=None,
    ):
        """`triton_grpo_loss`, except for its results and for vespo's weights.

        Args:
            phi_seq: (B,) or (B, 1): vespo's weight of each sequence, see `get_gamma_weights`.
            Other arguments: as in `triton_grpo_loss`.

        Returns:
            With ``reduce`` the loss, the mean KL divergence (None if beta is 0) and the share of
            clipped tokens. Else these three of each token, (B, L), 0 where masked. Only the first
            has a gradient.

        Raises:
            ValueError: also if vespo lacks phi_seq.
        """
        name = "GrpoLossFunction"
        if loss_type == "vespo" and phi_seq is None:
            raise ValueError(
                f"{name}: phi_seq is None, give vespo's weights, one a sequence (get_gamma_weights)"
            )
        options = GRPOOptions(
            beta,
            eps_low,
            eps_high,
            loss_type,
            max_completion_length,
            importance_sampling_level,
            sapo_temperature_pos,
            sapo_temperature_neg,
            delta,
            use_bias_correction_kl,
        )
        inputs = PolicyInputs(
            completion_mask,
            advantages,
            old_logp,
            ref_logp,
            vllm_is_ratio,
            num_items_in_batch,
            phi_seq,
        )
        return _grpo_on_logits(
            name, options, logits, completion_ids, inputs, temperature, inplace, reduce
        )


def triton_grpo_loss(
    logits: torch.Tensor,
    old_logp: torch.Tensor | None,
    ref_logp: torch.Tensor | None,
    completion_ids: torch.Tensor,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: torch.Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: int | torch.Tensor | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
):
    """GRPO and its variants from the policy's logits.

    Args:
        logits: (B, L+1, V), fp32, bf16, fp16 or fp64; contiguous, or they are copied. The last
            position is not used.
        old_logp: (B, L), of the policy that sampled. None: of this policy, without gradient.
        ref_logp: (B, L), of the reference model; needed unless beta is 0.
        completion_ids: (B, L) integers, the sampled tokens.
        advantages: (B,) or (B, L).
        completion_mask: (B, L), 1 for tokens that count. Values at other tokens have no influence.
            None: all count.
        temperature: the logits are divided by it.
        eps_low, eps_high: as epsilon_low and epsilon_high in `linear_grpo_loss`.
        inplace: in backward, the gradient takes the logits' memory if nobody else can see it any
            more.
        max_completion_length: dr_grpo divides by it; None: by L.
        reduce: return one loss, not one for each token.
        Other arguments: as in `linear_grpo_loss`.

    Returns:
        With ``reduce`` the loss and a list of metrics: the mean KL divergence unless beta is 0, and
        the share of clipped tokens. Else, for each token (B, L) and 0 where masked: the loss, the
        KL divergence (None if beta is 0), and whether it is clipped. In fp32 (fp64 for fp64); only
        the loss has a gradient.

    Raises:
        AssertionError: ref_logp is missing.
        ValueError: shapes or options that do not fit; ``delta`` for cispo, sapo or vespo.
        TypeError: a wrong dtype.

    Source: the papers in `policy_math`.
    """
    options = GRPOOptions(
        beta,
        eps_low,
        eps_high,
        loss_type,
        max_completion_length,
        importance_sampling_level,
        sapo_temperature_pos,
        sapo_temperature_neg,
        delta,
        use_bias_correction_kl,
        vespo_k_pos,
        vespo_lambda_pos,
        vespo_k_neg,
        vespo_lambda_neg,
    )
    inputs = PolicyInputs(
        completion_mask, advantages, old_logp, ref_logp, vllm_is_ratio, num_items_in_batch
    )
    loss, kl, is_clipped = _grpo_on_logits(
        "triton_grpo_loss", options, logits, completion_ids, inputs, temperature, inplace, reduce
    )
    if not reduce:
        return loss, kl, is_clipped
    return loss, [is_clipped] if kl is None else [kl, is_clipped]


def _grpo_on_logits(name, options, logits, ids, inputs, temperature, inplace, reduce):
    """Return loss, KL or None, and clipped tokens, as `GrpoLossFunction` does."""
    check.floats(name, dict(logits=logits))
    check.integers(name, dict(completion_ids=ids))
    if logits.dim() != 3 or ids.shape != (logits.shape[0], logits.shape[1] - 1):
        raise ValueError(
            f"{name}: logits have shape {tuple(logits.shape)}, completion_ids {tuple(ids.shape)}, "
            "give (B, L+1, classes) and (B, L)"
        )
    check_rows(
        name,
        logits,
        ids.shape,
        completion_mask=(inputs.attention_mask, "BT None", REAL_DTYPES),
        advantages=(inputs.advantages, "B BT", REAL_DTYPES),
        old_logp=(inputs.old_per_token_logps, "BT None", check.FLOAT_DTYPES),
        ref_logp=(inputs.ref_per_token_logps, "BT None", check.FLOAT_DTYPES),
        vllm_is_ratio=(inputs.vllm_is_ratio, "B B1 BT None", check.FLOAT_DTYPES),
        phi_seq=(inputs.phi_seq, "B B1 None", check.FLOAT_DTYPES),
    )
    if inputs.attention_mask is None:
        inputs = replace(inputs, attention_mask=torch.ones_like(ids))
    if not reduce:
        # Nothing is divided by it, so any number will do: then no rank is asked for its own.
        inputs = replace(inputs, num_items_in_batch=1)
    if options.max_completion_length is None:
        options = replace(options, max_completion_length=max(ids.shape[1], 1))
    check_grpo(name, logits, ids.shape, options, 0.0, inputs)
    if options.beta != 0 and inputs.ref_per_token_logps is None:
        raise AssertionError(
            f"{name}: beta is {options.beta} without a reference, give ref_logp, or beta=0"
        )
    has_delta = POLICIES[options.loss_type].surrogate is clipped_surrogate
    if options.delta is not None and not has_delta:
        raise ValueError(
            f"{name}: delta is {options.delta}, but {options.loss_type} has no such bound, "
            "give None"
        )
    log_probs = liger_selected_log_probs(logits, ids, inputs.attention_mask, temperature, inplace)
    if reduce:
        batch = grpo_batch(options, 0.0, log_probs, inputs)
        loss, metrics = batch.loss_from_log_probs(log_probs, None)
        return loss, metrics[0] if options.beta != 0 else None, metrics[-1]
    return policy_terms(
        log_probs, _token_tensors(options, log_probs, inputs), options, inputs.attention_mask
    )


def _token_tensors(options, log_probs, inputs):
    """Return the `TokenTensors` of `policy_terms`, which reads the mask itself."""
    if couples_tokens(options):
        return grpo_batch(options, 0.0, log_probs, inputs).tokens
    advantages, old, ref, inference_ratio = to_rows(
        log_probs,
        inputs.advantages,
        inputs.old_per_token_logps,
        inputs.ref_per_token_logps if options.beta != 0 else None,
        inputs.vllm_is_ratio,
    )
    return TokenTensors(
        loss_weights=None,
        metric_weights=None,
        advantages=advantages,
        old_log_probs=old,
        ref_log_probs=ref,
        inference_ratio=inference_ratio,
    )
