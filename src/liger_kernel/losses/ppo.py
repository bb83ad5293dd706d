"""PPO and RLOO.

`ppo_loss` and `rloo_loss` take log-probabilities, `linear_ppo_loss` and `linear_rloo_loss` hidden
states and the weight of a head.
"""

from __future__ import annotations

from liger_kernel.losses.policy_batch import (
    PolicyInputs,
    check_log_probs,
    check_tokens,
    ppo_batch,
    rloo_batch,
)
from liger_kernel.losses.policy_math import GRPOOptions

PPO_METRICS = "approx_kl", "clip_fraction", "entropy"
REINFORCE_METRICS = ("entropy",)


def _name_metrics(outputs, names):
    """Return the loss and its metrics as a dict. The entropy comes last, if it was asked for."""
    loss, metrics = outputs
    return loss, dict(zip(names, metrics, strict=False))


# ---- PPO ----


def ppo_loss(
    log_probs,
    attention_mask,
    advantages,
    old_per_token_logps,
    *,
    epsilon_low=0.2,
    epsilon_high=0.2,
    reduction="tokens",
    max_completion_length=None,
    num_items_in_batch=None,
    entropy=None,
    entropy_coef=0.0,
):
    """PPO's policy loss of log-probabilities: `linear_ppo_loss` without the head.

    Args:
        log_probs: (B, T), differentiable.
        entropy: (B, T), differentiable. None: no entropy bonus, and no entropy among the metrics.
        Other arguments: as in `linear_ppo_loss`.

    Returns, raises: as `linear_ppo_loss`.
    """
    name = "ppo_loss"
    options = _ppo_options(epsilon_low, epsilon_high, max_completion_length)
    check_log_probs(name, log_probs, entropy)
    inputs = PolicyInputs(
        attention_mask, advantages, old_per_token_logps, num_items_in_batch=num_items_in_batch
    )
    batch = ppo_batch(name, log_probs, log_probs.shape, options, entropy_coef, inputs, reduction)
    return _name_metrics(batch.loss_from_log_probs(log_probs, entropy), PPO_METRICS)


def _ppo_options(epsilon_low, epsilon_high, max_completion_length):
    return GRPOOptions(0.0, epsilon_low, epsilon_high, max_completion_length=max_completion_length)


def linear_ppo_loss(
    hidden,
    weight,
    selected_token_ids,
    attention_mask,
    advantages,
    old_per_token_logps,
    bias=None,
    *,
    epsilon_low=0.2,
    epsilon_high=0.2,
    reduction="tokens",
    max_completion_length=None,
    num_items_in_batch=None,
    temperature=1.0,
    entropy_coef=0.0,
    return_entropy=False,
    memory="auto",
    drop_ignored=None,
):
    """PPO's clipped policy loss from the policy's hidden states, without all logits in memory.

    Args:
        hidden: (B, T, H), fp32, bf16, fp16 or fp64.
        weight, bias: (V, H) and (V,), of the head.
        selected_token_ids: (B, T) integers, the sampled tokens.
        attention_mask: (B, T), 1 for tokens that count.
        advantages: (B, T) or (B,).
        old_per_token_logps: (B, T), of the policy that sampled.
        epsilon_low, epsilon_high: the ratio is clipped at 1 - epsilon_low and 1 + epsilon_high.
        reduction: "tokens": the mean over the tokens. "sequences": the mean of the sequences'
            means. "all_tokens": the mean over all ranks' tokens, or over num_items_in_batch.
            "fixed_length": the sum, divided by B·max_completion_length.
        temperature: the logits are divided by it.
        entropy_coef: this times the tokens' mean entropy is subtracted from the loss.
        return_entropy: the mean entropy is among the metrics. It always is if ``entropy_coef`` is
            not 0.
        memory, drop_ignored: as in `linear_loss`.

    Returns:
        The loss, and a dict of metrics without gradients, all 0-d: "approx_kl", the KL divergence
        of the old policy from this one; "clip_fraction", the share of clipped tokens; "entropy", if
        asked for.

    Raises:
        ValueError: shapes or options that do not fit.
        TypeError: a wrong dtype.

    Source: Schulman et al., Proximal Policy Optimization Algorithms, arXiv:1707.06347.
    """
    name = "linear_ppo_loss"
    ids = selected_token_ids
    check_tokens(name, hidden, ids)
    options = _ppo_options(epsilon_low, epsilon_high, max_completion_length)
    inputs = PolicyInputs(
        attention_mask, advantages, old_per_token_logps, num_items_in_batch=num_items_in_batch
    )
    batch = ppo_batch(name, hidden, ids.shape, options, entropy_coef, inputs, reduction)
    outputs = batch.loss_from_hidden(
        hidden,
        weight,
        ids,
        bias,
        temperature=temperature,
        return_entropy=return_entropy or entropy_coef != 0,
        memory=memory,
        drop_ignored=drop_ignored,
    )
    return _name_metrics(outputs, PPO_METRICS)


# ---- RLOO ----


def rloo_loss(
    log_probs,
    attention_mask,
    rewards,
    *,
    samples_per_prompt,
    level="sequence",
    old_per_token_logps=None,
    epsilon_low=0.2,
    epsilon_high=0.2,
    entropy=None,
    entropy_coef=0.0,
):
    """RLOO of log-probabilities: `linear_rloo_loss` without the head.

    Args:
        log_probs: (B, T), differentiable.
        entropy: (B, T), differentiable. None: no entropy bonus, and no entropy among the metrics.
        Other arguments: as in `linear_rloo_loss`.

    Returns, raises: as `linear_rloo_loss`.
    """
    name = "rloo_loss"
    check_log_probs(name, log_probs, entropy)
    batch = rloo_batch(
        name,
        log_probs,
        log_probs.shape,
        (epsilon_low, epsilon_high),
        entropy_coef,
        PolicyInputs(attention_mask, rewards, old_per_token_logps),
        samples_per_prompt,
        level,
    )
    outputs = batch.loss_from_log_probs(log_probs, entropy)
    return _name_metrics(outputs, _rloo_metrics(old_per_token_logps))


def _rloo_metrics(old_per_token_logps):
    return REINFORCE_METRICS if old_per_token_logps is None else PPO_METRICS


def linear_rloo_loss(
    hidden,
    weight,
    selected_token_ids,
    attention_mask,
    rewards,
    bias=None,
    *,
    samples_per_prompt,
    level="sequence",
    old_per_token_logps=None,
    epsilon_low=0.2,
    epsilon_high=0.2,
    temperature=1.0,
    entropy_coef=0.0,
    return_entropy=False,
    memory="auto",
    drop_ignored=None,
):
    """REINFORCE leave-one-out (RLOO) from the policy's hidden states, without all logits in memory.

    A sample's advantage is its reward minus the mean reward of the other samples of its prompt.

    Args:
        hidden: (B, T, H), fp32, bf16, fp16 or fp64.
        weight, bias: (V, H) and (V,), of the head.
        selected_token_ids: (B, T) integers, the sampled tokens.
        attention_mask: (B, T), 1 for tokens that count.
        rewards: (B,). The samples of one prompt are neighbours, ``samples_per_prompt`` of them.
        level: "sequence": the mean over sequences of -A·log p(sequence). "token": the mean over
            tokens of -A·log p.
        old_per_token_logps: (B, T), of the policy that sampled. If given, the loss is PPO's, with
            the ratio of the sequence or of each token, clipped at 1 - epsilon_low and
            1 + epsilon_high.
        temperature: the logits are divided by it.
        entropy_coef: this times the tokens' mean entropy is subtracted from the loss.
        return_entropy: the mean entropy is among the metrics. It always is if ``entropy_coef`` is
            not 0.
        memory, drop_ignored: as in `linear_loss`.

    Returns:
        The loss, and a dict of metrics without gradients, all 0-d: "approx_kl" and "clip_fraction"
        with old_per_token_logps, "entropy" if asked for.

    Raises:
        ValueError: shapes or options that do not fit.
        TypeError: a wrong dtype.

    Source: Ahmadian et al., Back to Basics, arXiv:2402.14740.
    """
    name = "linear_rloo_loss"
    ids = selected_token_ids
    check_tokens(name, hidden, ids)
    batch = rloo_batch(
        name,
        hidden,
        ids.shape,
        (epsilon_low, epsilon_high),
        entropy_coef,
        PolicyInputs(attention_mask, rewards, old_per_token_logps),
        samples_per_prompt,
        level,
    )
    outputs = batch.loss_from_hidden(
        hidden,
        weight,
        ids,
        bias,
        temperature=temperature,
        return_entropy=return_entropy or entropy_coef != 0,
        memory=memory,
        drop_ignored=drop_ignored,
    )
    return _name_metrics(outputs, _rloo_metrics(old_per_token_logps))
