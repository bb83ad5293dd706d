r"""The formulas of GRPO and its variants, PPO and RLOO.

    ρ = log π(y) - log π_old(y),   r = e^ρ       the ratio of a token, or of a sequence
    loss = Σ_tokens weight·(l(r, A) + β·KL)      l: from `POLICIES`; weight: from `REDUCTIONS`

π is the policy that is trained, π_old the one that sampled the tokens y, A the advantage. All
functions take log-probabilities of shape (B, T), or (tokens,) if no ratio couples the tokens of a
sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from liger_kernel.core import check


@dataclass(frozen=True)
class GRPOOptions:
    """The options of GRPO's variants, under their usual names. `linear_grpo_loss` explains them.

    Raises:
        ValueError, TypeError: a number is out of range, or not a number.
    """

    beta: float = 0.04
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self):
        for name, check_number in OPTION_CHECKS.items():
            value = getattr(self, name)
            if value is not None or name not in ("delta", "max_completion_length"):
                check_number("GRPOOptions", name, value)


OPTION_CHECKS = {
    "beta": check.finite,
    "epsilon_low": check.non_negative,
    "epsilon_high": check.non_negative,
    "delta": check.positive,
    "max_completion_length": check.size,
    "sapo_temperature_pos": check.positive,
    "sapo_temperature_neg": check.positive,
    "vespo_k_pos": check.finite,
    "vespo_lambda_pos": check.finite,
    "vespo_k_neg": check.finite,
    "vespo_lambda_neg": check.finite,
}


# ---- surrogates: the loss l of a token ----


def clipped_surrogate(log_probs, ratio, advantages, options):
    """PPO's clipped loss (1707.06347), with DAPO's two bounds (2503.14476). For A = 0 it is 0.

    ``delta`` also bounds r where A < 0, as in INTELLECT-2 (2505.07291).
    """
    bounded = ratio if options.delta is None else ratio.clamp(max=options.delta)
    clipped = ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
    return -torch.min(bounded * advantages, clipped * advantages)


def clipped_weight(log_probs, ratio, advantages, options):
    """CISPO (2506.13585): REINFORCE with a clipped importance weight.

    The weight is clipped at epsilon_high, not at 1 + epsilon_high.
    """
    return -ratio.detach().clamp(max=options.epsilon_high) * advantages * log_probs


def soft_gate(log_probs, ratio, advantages, options):
    """SAPO (2511.20347): a sigmoid in place of the clip, centred at r = 1 with slope 1 there."""
    temperature = _select(
        advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg, ratio
    )
    return -_gate(ratio, temperature) * advantages


def _gate(ratio, t):
    """SAPO's 4/t·σ(t·(r - 1))."""
    return (4 / t) * torch.sigmoid(t * (ratio - 1))


def weighted_reinforce(log_probs, weight, advantages, options):
    """VESPO (2602.10693): REINFORCE with one weight for each sequence, see `vespo_weight`."""
    return -weight * advantages * log_probs


def vespo_weight(log_ratio, mask, log_inference_ratio, advantages, options):
    """VESPO's w^k·e^(λ-λw) (2602.10693). w is the importance weight of a sequence, clamped."""
    log_w = (log_ratio.detach().clamp(-20, 20) * mask).sum(-1, keepdim=True)
    if log_inference_ratio is not None:
        log_w = log_w + log_inference_ratio
    log_w = log_w.clamp(math.log(1e-8), 20)
    is_positive = advantages >= 0
    k = _select(is_positive, options.vespo_k_pos, options.vespo_k_neg, log_w)
    rate = _select(
        is_positive,
        max(options.vespo_lambda_pos, 1e-4),
        max(options.vespo_lambda_neg, 1e-4),
        log_w,
    )
    weight = (rate + k * log_w - rate * log_w.exp()).exp()
    return weight.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def log_inference_ratio_of_sequence(inference_ratio):
    """Return the summand for VESPO's log w, (B, 1).

    ``inference_ratio``: (B, 1), or the ratios of the tokens (B, T), which are 1 where masked.
    """
    return inference_ratio.log().clamp(math.log(1e-8), 20).sum(-1, keepdim=True)


def _select(condition, if_true, if_false, like):
    """Return a tensor of ``like``'s dtype with one of two numbers at each place."""
    numbers = torch.full_like(condition, if_false, dtype=like.dtype)
    return numbers.masked_fill_(condition, if_true)


# A ratio above e^88.7 is inf in fp32. Where the loss no longer depends on the ratio, its gradient
# would be 0·inf.

SIGMOID_SATURATION = 1000.0  # from here on σ(x) is 1, and its slope 0, in every dtype


def clip_limits(options):
    """Return the ratios above which `clipped_surrogate` is constant, for A ≥ 0 and for A < 0."""
    high = 1 + options.epsilon_high
    return high, math.inf if options.delta is None else max(high, options.delta)


def gate_limits(options):
    """Return the ratios above which `soft_gate` is constant, for A ≥ 0 and for A < 0."""
    return (
        1 + SIGMOID_SATURATION / options.sapo_temperature_pos,
        1 + SIGMOID_SATURATION / options.sapo_temperature_neg,
    )


def no_limits(options):
    return math.inf, math.inf


def bounded_ratio(log_ratio, advantages, limits):
    """Return r = e^ρ, but at most e times its limit, without a gradient there."""
    log_limits = [math.log(limit) + 1 for limit in limits]
    if log_limits == [math.inf] * 2:
        return log_ratio.exp()
    limit = _select(advantages >= 0, *log_limits, log_ratio)
    return torch.where(log_ratio > limit, limit, log_ratio).exp()


def corrected_kl(kl, log_ratio):
    """KL·r: unbiased off policy, too (DeepSeek-V3.2, 2512.02556).

    It is 0 where KL is 0, for any ratio.
    """
    return kl * log_ratio.where((kl != 0) | (log_ratio < 80), 0).exp()


def outside_clip(ratio, advantages, options):
    """Return a mask of where the clip of `clipped_surrogate` removes the gradient."""
    too_low = ratio < 1 - options.epsilon_low
    too_high = ratio > 1 + options.epsilon_high
    return (too_low & (advantages < 0)) | (too_high & (advantages > 0))


def above_bound(ratio, advantages, options):
    """Return a mask of where `clipped_weight` clips a positive advantage's weight."""
    return (ratio > options.epsilon_high) & (advantages > 0)


def never_clipped(ratio, advantages, options):
    return torch.zeros_like(ratio, dtype=torch.bool)


def k3(log_p, log_q):
    """KL(p ‖ q), estimated from tokens that p sampled: e^x - x - 1 ≥ 0 with x = log q - log p.

    The third of three estimators (Schulman, Approximating KL Divergence, 2020); in GRPO
    (2402.03300), equation 4.
    """
    x = log_q - log_p
    return torch.expm1(x) - x


# ---- reductions: the weight of a token in the loss ----


def mean_of_sequences(mask, options, num_items=None):
    """GRPO (2402.03300): the mean over each sequence, then the mean over the sequences."""
    return mask / mask.sum(-1, keepdim=True).clamp(min=1) / max(mask.shape[0], 1)


def mean_of_tokens(mask, options=None, num_items=None):
    """TRL's bnpo: the mean over this rank's tokens."""
    return mask / mask.sum().clamp(min=1)


def fixed_length(mask, options, num_items=None):
    """Dr. GRPO (2503.20783): the sum, divided by the batch size and the greatest length."""
    return mask / (max(mask.shape[0], 1) * options.max_completion_length)


def mean_of_all_tokens(mask, options, num_items=None):
    """DAPO (2503.14476): the mean over the tokens of all ranks.

    ``num_items`` is their number if it is known, for example that of all gradient accumulation
    steps. Otherwise an all-reduce counts those of this step.
    """
    num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_items is not None:
        num_items = check.count("mean_of_all_tokens", "num_items_in_batch", num_items)
    if isinstance(num_items, torch.Tensor):
        total = num_items.detach().to(mask.device, mask.dtype, non_blocking=True)
    elif num_items is not None:
        total = mask.new_full((), num_items)
    else:
        total = mask.sum()
        if num_ranks > 1:
            dist.all_reduce(total)
    return mask / (total / num_ranks).clamp(min=1)


def sum_of_tokens(mask, options=None, num_items=None):
    """LUSPO (2602.05261): the sum over each sequence, then the mean over the sequences.

    The paper weighs the loss of a sequence, which has one ratio, with its length: that is the sum
    over its tokens.
    """
    return mask / max(mask.shape[0], 1)


REDUCTIONS: dict[str, Callable] = {
    "sequences": mean_of_sequences,
    "tokens": mean_of_tokens,
    "fixed_length": fixed_length,
    "all_tokens": mean_of_all_tokens,
}


@dataclass(frozen=True)
class Policy:
    """A variant of GRPO.

    surrogate: ``surrogate(log_probs, ratio, advantages, options)`` returns l of each token.
    is_clipped: ``is_clipped(ratio, advantages, options)`` returns a mask of where l is clipped.
    reduction: ``reduction(mask, options, num_items)`` returns the weights of the tokens.
    levels: the levels of importance sampling that it allows.
    couples_tokens: a token's loss depends on its sequence even at the level "token".
    limits: ``limits(options)`` returns the ratios above which l is constant, for A ≥ 0 and A < 0.
    """

    surrogate: Callable
    is_clipped: Callable
    reduction: Callable
    levels: tuple[str, ...] = ("token",)
    couples_tokens: bool = False
    limits: Callable = no_limits


# "sequence" is the geometric mean of the tokens' ratios (GSPO, 2507.18071)
LEVELS = "token", "sequence"
POLICIES = {
    "grpo": Policy(clipped_surrogate, outside_clip, mean_of_sequences, LEVELS, limits=clip_limits),
    "bnpo": Policy(clipped_surrogate, outside_clip, mean_of_tokens, LEVELS, limits=clip_limits),
    "dr_grpo": Policy(clipped_surrogate, outside_clip, fixed_length, LEVELS, limits=clip_limits),
    "dapo": Policy(clipped_surrogate, outside_clip, mean_of_all_tokens, LEVELS, limits=clip_limits),
    "luspo": Policy(clipped_surrogate, outside_clip, sum_of_tokens, LEVELS, limits=clip_limits),
    "cispo": Policy(clipped_weight, above_bound, mean_of_all_tokens),
    "sapo": Policy(soft_gate, never_clipped, mean_of_sequences, limits=gate_limits),
    "vespo": Policy(weighted_reinforce, never_clipped, mean_of_all_tokens, couples_tokens=True),
}


def couples_tokens(options):
    """Return True if a token's loss depends on the other tokens of its sequence."""
    by_sequence = options.importance_sampling_level == "sequence"
    return by_sequence or POLICIES[options.loss_type].couples_tokens


def fill_invalid(x, valid, value=0):
    """Put ``value`` at the positions of x that do not count.

    A number that stood there has no influence, not even a NaN.

    Args:
        x: (B, T), or (B, 1) for whole sequences: those without a token do not count. None: None is
            returned.
        valid: (B, T) bool, or None: all count.
    """
    if x is None or valid is None:
        return x
    if x.shape != valid.shape:
        valid = valid.any(-1, keepdim=True)
    return x.where(valid, value)


# ---- losses: the terms of each token ----


class TokenTensors(NamedTuple):
    """The tensors that a loss takes beside the log-probabilities.

    Each is (B, T), (B, 1), or (tokens,); or None.

    loss_weights: of the tokens in the loss; None where nothing is reduced.
    metric_weights: of the tokens in a metric: the mask divided by its sum over the whole batch, or
        None.
    sequence_weights: sum a sequence's ρ; None: each token has its own ratio.
    old_log_probs: of the policy that sampled.
    ref_log_probs: of the reference model.
    inference_ratio: corrects for the engine that sampled.
    vespo_weights: see `vespo_weight`; None: not known yet.
    """

    loss_weights: torch.Tensor | None
    metric_weights: torch.Tensor | None
    advantages: torch.Tensor
    sequence_weights: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None
    ref_log_probs: torch.Tensor | None = None
    inference_ratio: torch.Tensor | None = None
    vespo_weights: torch.Tensor | None = None

    def map(self, fn) -> TokenTensors:
        """Return the results of ``fn`` for each tensor that is not None."""
        return TokenTensors(*(x if x is None else fn(x) for x in self))


def grpo_terms(log_probs, tokens, options):
    """Return l + β·KL, KL (or None), and a mask of where l is clipped."""
    policy = POLICIES[options.loss_type]
    advantages = tokens.advantages
    old_log_probs = tokens.old_log_probs
    if old_log_probs is None:
        old_log_probs = log_probs.detach()
    log_ratio = log_probs - old_log_probs
    if options.importance_sampling_level == "sequence":
        log_ratio = (log_ratio * tokens.sequence_weights).sum(-1, keepdim=True)
    ratio = bounded_ratio(log_ratio, advantages, policy.limits(options))
    if policy.couples_tokens:
        weight = tokens.vespo_weights
        if weight is None:
            weight = vespo_weight(
                log_ratio, tokens.sequence_weights, tokens.inference_ratio, advantages, options
            )
        loss = policy.surrogate(log_probs, weight, advantages, options)
    else:
        loss = policy.surrogate(log_probs, ratio, advantages, options)
        if tokens.inference_ratio is not None:
            loss = loss * tokens.inference_ratio
    kl = None
    if tokens.ref_log_probs is not None:
        kl = k3(log_probs, tokens.ref_log_probs)
        if options.use_bias_correction_kl:
            kl = corrected_kl(kl, log_ratio)
        loss = loss + options.beta * kl
    return loss, kl, policy.is_clipped(ratio, advantages, options)


def leave_one_out(rewards, samples_per_prompt):
    """RLOO (2402.14740): a reward minus the mean of the prompt's other rewards.

    A prompt's samples are neighbours.
    """
    k = samples_per_prompt
    rewards = rewards.unflatten(0, (-1, k))
    return ((rewards - rewards.mean(1, keepdim=True)) * (k / (k - 1))).flatten()


# ---- as functions with the published names ----


def k3_loss_fn(log_p, log_q):
    """KL(q ‖ p), estimated from tokens that q sampled: `k3`."""
    return k3(log_q, log_p)


def sapo_loss_fn(importance_ratio, temperature):
    """SAPO's gate: 4/τ·σ(τ·(r - 1)), see `soft_gate`."""
    return _gate(importance_ratio, check.positive("sapo_loss_fn", "temperature", temperature))


def clip_coef_fn(coef, epsilon_low, epsilon_high, loss_type):
    """Return the clipped ratio, and masks of where the lower and the upper bound clip it.

    sapo and vespo clip nothing: the ratio is None, and the masks are False.
    """
    nowhere = torch.zeros_like(coef, dtype=torch.bool)
    if loss_type in ("sapo", "vespo"):
        return None, nowhere, nowhere
    if loss_type == "cispo":
        return coef.detach().clamp(max=epsilon_high), nowhere, coef > epsilon_high
    low, high = 1 - epsilon_low, 1 + epsilon_high
    return coef.clamp(low, high), coef < low, coef > high


def get_gamma_weights(
    advantages,
    log_ratio_per_token,
    mask,
    importance_sampling_ratio=None,
    k_pos=2.0,
    lambda_pos=3.0,
    k_neg=3.0,
    lambda_neg=2.0,
):
    """VESPO's weight of each sequence, (B, 1), without a gradient: `vespo_weight`.

    Args:
        advantages: (B,) or (B, 1).
        log_ratio_per_token: (B, T), log π - log π_old.
        mask: (B, T).
        importance_sampling_ratio: (B, 1) or (B, T), of the inference engine, or None.
    """
    options = GRPOOptions(
        vespo_k_pos=k_pos,
        vespo_lambda_pos=lambda_pos,
        vespo_k_neg=k_neg,
        vespo_lambda_neg=lambda_neg,
    )
    valid = mask.bool()
    advantages = fill_invalid(advantages.detach().reshape(len(mask), -1), valid)
    log_inference_ratio = None
    if importance_sampling_ratio is not None:
        inference_ratio = fill_invalid(importance_sampling_ratio, valid, 1)
        log_inference_ratio = log_inference_ratio_of_sequence(inference_ratio.detach())
    log_ratio = fill_invalid(log_ratio_per_token, valid)
    return vespo_weight(log_ratio, mask, log_inference_ratio, advantages, options)
