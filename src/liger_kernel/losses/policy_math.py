r"""The mathematics of GRPO and its variants, PPO and RLOO.

    ρ = log π(y) - log π_old(y),   r = e^ρ             the ratio of a token, or of a sequence
    loss = Σ_tokens weight·(l(r, A) + β·KL)            l: a row of `POLICIES`; weight: one of `REDUCTIONS`

π is the policy that is trained, π_old the one that sampled the tokens y, A the advantage. All
functions take log-probabilities of shape (B, T), or (tokens,) if no ratio couples the tokens of a
sequence."""

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
        for name, fits in NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name not in ("delta", "max_completion_length"):
                fits("GRPOOptions", name, value)


NUMBERS = dict(
    beta=check.finite, epsilon_low=check.not_negative, epsilon_high=check.not_negative, delta=check.positive,
    max_completion_length=check.size, sapo_temperature_pos=check.positive, sapo_temperature_neg=check.positive,
    vespo_k_pos=check.finite, vespo_lambda_pos=check.finite, vespo_k_neg=check.finite,
    vespo_lambda_neg=check.finite,
)  # fmt: skip


# ---- surrogates: the loss l of a token ----


def clipped_surrogate(log_probs, ratio, advantages, o):
    """PPO's clipped loss (1707.06347), with DAPO's two bounds (2503.14476). For A = 0 it is 0.

    ``delta`` also bounds r where A < 0, as in INTELLECT-2 (2505.07291).
    """
    bounded = ratio if o.delta is None else ratio.clamp(max=o.delta)
    clipped = ratio.clamp(1 - o.epsilon_low, 1 + o.epsilon_high)
    return -torch.min(bounded * advantages, clipped * advantages)


def clipped_weight(log_probs, ratio, advantages, o):
    """CISPO (2506.13585): REINFORCE, its importance weight clipped at epsilon_high (not at 1 +
    epsilon_high)."""
    return -ratio.detach().clamp(max=o.epsilon_high) * advantages * log_probs


def soft_gate(log_probs, ratio, advantages, o):
    """SAPO (2511.20347): a sigmoid in place of the clip. It is centred at r = 1 and has slope 1
    there."""
    t = _either(advantages > 0, o.sapo_temperature_pos, o.sapo_temperature_neg, ratio)
    return -_gate(ratio, t) * advantages


def _gate(ratio, t):
    """SAPO's 4/t·σ(t·(r - 1))."""
    return (4 / t) * torch.sigmoid(t * (ratio - 1))


def weighted_reinforce(log_probs, weight, advantages, o):
    """VESPO (2602.10693): REINFORCE with one weight for each sequence, see `vespo_weight`."""
    return -weight * advantages * log_probs


def vespo_weight(log_ratio, mask, log_inference_ratio, advantages, o):
    """VESPO's w^k·e^(λ-λw) (2602.10693). w is the importance weight of a sequence, clamped."""
    log_w = (log_ratio.detach().clamp(-20, 20) * mask).sum(-1, keepdim=True)
    log_w = log_w if log_inference_ratio is None else log_w + log_inference_ratio
    log_w = log_w.clamp(math.log(1e-8), 20)
    k = _either(advantages >= 0, o.vespo_k_pos, o.vespo_k_neg, log_w)
    rate = _either(
        advantages >= 0, max(o.vespo_lambda_pos, 1e-4), max(o.vespo_lambda_neg, 1e-4), log_w
    )
    return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def log_of_sequence(inference_ratio):
    """Sum what VESPO adds to log w: (B, 1) from (B, 1), or from the ratios of the tokens (B, T), 1
    where masked."""
    return inference_ratio.log().clamp(math.log(1e-8), 20).sum(-1, keepdim=True)


def _either(condition, yes, no, like):
    return torch.full_like(condition, no, dtype=like.dtype).masked_fill_(condition, yes)


# A ratio above e^88.7 is inf in fp32. Where the loss no longer depends on the ratio, its gradient
# would be 0·inf.

SATURATED = 1000.0  # σ(x) is 1, and its slope 0, in every dtype


def clip_limits(o):
    """The ratios above which `clipped_surrogate` is constant, for A ≥ 0 and for A < 0."""
    high = 1 + o.epsilon_high
    return high, math.inf if o.delta is None else max(high, o.delta)


def gate_limits(o):
    """The ratios above which `soft_gate` is constant."""
    return 1 + SATURATED / o.sapo_temperature_pos, 1 + SATURATED / o.sapo_temperature_neg


def no_limits(o):
    return math.inf, math.inf


def bounded_ratio(log_ratio, advantages, limits):
    """r = e^ρ, but at most e times its limit, without a gradient there."""
    log_limits = [math.log(limit) + 1 for limit in limits]
    if log_limits == [math.inf] * 2:
        return log_ratio.exp()
    limit = _either(advantages >= 0, *log_limits, log_ratio)
    return torch.where(log_ratio > limit, limit, log_ratio).exp()


def corrected_kl(kl, log_ratio):
    """KL·r: unbiased off policy, too (DeepSeek-V3.2, 2512.02556). 0 where KL is 0, for any
    ratio."""
    return kl * log_ratio.where((kl != 0) | (log_ratio < 80), 0).exp()


def outside_clip(ratio, advantages, o):
    """Where the clip of `clipped_surrogate` removes the gradient."""
    low, high = ratio < 1 - o.epsilon_low, ratio > 1 + o.epsilon_high
    return (low & (advantages < 0)) | (high & (advantages > 0))


def above_bound(ratio, advantages, o):
    """Where `clipped_weight` clips a positive advantage's weight."""
    return (ratio > o.epsilon_high) & (advantages > 0)


def never_clipped(ratio, advantages, o):
    return torch.zeros_like(ratio, dtype=torch.bool)


def k3(log_probs, other):
    """KL(π ‖ other), estimated from tokens that π sampled: e^x - x - 1 ≥ 0 with x = log other - log
    π.

    The third of three estimators (Schulman, Approximating KL Divergence, 2020); in GRPO
    (2402.03300), equation 4."""
    x = other - log_probs
    return torch.expm1(x) - x


# ---- reductions: the weight of a token in the loss ----


def mean_of_sequences(mask, o, num_items=None):
    """GRPO (2402.03300): the mean over each sequence, then the mean over the sequences."""
    return mask / mask.sum(-1, keepdim=True).clamp(min=1) / max(mask.shape[0], 1)


def mean_of_tokens(mask, o=None, num_items=None):
    """TRL's bnpo: the mean over this rank's tokens."""
    return mask / mask.sum().clamp(min=1)


def fixed_length(mask, o, num_items=None):
    """Dr. GRPO (2503.20783): the sum, divided by the batch size and the greatest length."""
    return mask / (max(mask.shape[0], 1) * o.max_completion_length)


def mean_of_all_tokens(mask, o, num_items=None):
    """DAPO (2503.14476): the mean over the tokens of all ranks.

    ``num_items`` is their number if it is known, for example that of all gradient accumulation
    steps. Otherwise an all-reduce counts those of this step."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_items is not None:
        num_items = check.count("mean_of_all_tokens", "num_items_in_batch", num_items)
    if isinstance(num_items, torch.Tensor):
        total = num_items.detach().to(mask.device, mask.dtype, non_blocking=True)
    elif num_items is not None:
        total = mask.new_full((), num_items)
    else:
        total = mask.sum()
        if ranks > 1:
            dist.all_reduce(total)
    return mask / (total / ranks).clamp(min=1)


def sum_of_tokens(mask, o=None, num_items=None):
    """LUSPO (2602.05261): the sum over each sequence, then the mean over the sequences.

    The paper weighs the loss of a sequence, which has one ratio, with its length: that is the sum
    over its tokens."""
    return mask / max(mask.shape[0], 1)


REDUCTIONS: dict[str, Callable] = {
    "sequences": mean_of_sequences,
    "tokens": mean_of_tokens,
    "fixed_length": fixed_length,
    "all_tokens": mean_of_all_tokens,
}


@dataclass(frozen=True)
class Policy:
    """A variant of GRPO."""

    loss: Callable  # (log_probs, ratio, advantages, options) -> l
    clipped: Callable  # (ratio, advantages, options) -> where l is clipped
    weights: Callable  # (mask, options, num_items) -> the weights of the tokens
    levels: tuple[str, ...] = ("token",)  # the levels of importance sampling that it allows
    couples: bool = (
        False  # whether a token's loss depends on its sequence even at the level "token"
    )
    limits: Callable = (
        no_limits  # (options) -> the ratios above which l is constant, for A ≥ 0 and for A < 0
    )


BOTH = (
    "token",
    "sequence",
)  # "sequence" is the geometric mean of the tokens' ratios (GSPO, 2507.18071)
POLICIES = {
    "grpo": Policy(clipped_surrogate, outside_clip, mean_of_sequences, BOTH, limits=clip_limits),
    "bnpo": Policy(clipped_surrogate, outside_clip, mean_of_tokens, BOTH, limits=clip_limits),
    "dr_grpo": Policy(clipped_surrogate, outside_clip, fixed_length, BOTH, limits=clip_limits),
    "dapo": Policy(clipped_surrogate, outside_clip, mean_of_all_tokens, BOTH, limits=clip_limits),
    "luspo": Policy(clipped_surrogate, outside_clip, sum_of_tokens, BOTH, limits=clip_limits),
    "cispo": Policy(clipped_weight, above_bound, mean_of_all_tokens),
    "sapo": Policy(soft_gate, never_clipped, mean_of_sequences, limits=gate_limits),
    "vespo": Policy(weighted_reinforce, never_clipped, mean_of_all_tokens, couples=True),
}


def only(counted, x, other=0):
    """Put ``other`` at the positions of x that do not count. What stood there has no influence, not
    even a NaN.

    ``counted``: (B, T), or None: all. x: (B, T), or (B, 1) for whole sequences: those without a
    token do not count."""
    if x is None or counted is None:
        return x
    return x.where(counted if x.shape == counted.shape else counted.any(-1, keepdim=True), other)


# ---- losses: what some of the tokens add to the loss, and to the metrics ----


class Rows(NamedTuple):
    """What a loss needs in addition to the log-probabilities. Each is (B, T), (B, 1), or (tokens,);
    or None."""

    weights: torch.Tensor  # of the tokens in the loss
    share: (
        torch.Tensor
    )  # of the tokens in a metric: the mask divided by its sum over the whole batch
    advantages: torch.Tensor
    pool: torch.Tensor | None = (
        None  # the weights that sum a sequence's ρ; None: each token has its own ratio
    )
    old: torch.Tensor | None = None  # log-probabilities of the policy that sampled
    ref: torch.Tensor | None = None  # those of the reference model
    inference_ratio: torch.Tensor | None = None  # corrects for the engine that sampled
    phi: torch.Tensor | None = None  # the weights of `vespo_weight`, if they are known already

    def each(self, fn) -> Rows:
        return Rows(*(x if x is None else fn(x) for x in self))


def grpo_terms(log_probs, rows, o):
    """-> l + β·KL, KL or None, where l is clipped."""
    policy, advantages = POLICIES[o.loss_type], rows.advantages
    log_ratio = log_probs - (log_probs.detach() if rows.old is None else rows.old)
    if o.importance_sampling_level == "sequence":
        log_ratio = (log_ratio * rows.pool).sum(-1, keepdim=True)
    ratio = bounded_ratio(log_ratio, advantages, policy.limits(o))
    if policy.couples:
        weight = rows.phi
        if weight is None:
            weight = vespo_weight(log_ratio, rows.pool, rows.inference_ratio, advantages, o)
        loss = policy.loss(log_probs, weight, advantages, o)
    else:
        loss = policy.loss(log_probs, ratio, advantages, o)
        loss = loss if rows.inference_ratio is None else loss * rows.inference_ratio
    kl = None
    if rows.ref is not None:
        kl = k3(log_probs, rows.ref)
        kl = corrected_kl(kl, log_ratio) if o.use_bias_correction_kl else kl
        loss = loss + o.beta * kl
    return loss, kl, policy.clipped(ratio, advantages, o)


def grpo_value(o, coef, log_probs, entropy, rows):
    """-> value, metrics: KL unless beta is 0, entropy if it is given, share of clipped tokens."""
    loss, kl, clipped = grpo_terms(log_probs, rows, o)
    weights, share = rows.weights, rows.share
    value, metrics = (weights * loss).sum(), []
    if o.beta != 0:
        metrics.append(share.new_zeros(()) if kl is None else (share * kl).sum())
    if entropy is not None:
        value = value - coef * (weights * entropy).sum()
        metrics.append((share * entropy).sum())
    return value, [*metrics, (share * clipped).sum()]


def ppo_value(o, coef, log_probs, entropy, rows):
    """PPO (1707.06347) -> value, metrics: KL, share of clipped tokens, entropy if it is given."""
    log_ratio, share = log_probs - rows.old, rows.share
    if rows.pool is not None:
        log_ratio = (log_ratio * rows.pool).sum(-1, keepdim=True)
    ratio = bounded_ratio(log_ratio, rows.advantages, clip_limits(o))
    value = (rows.weights * clipped_surrogate(log_probs, ratio, rows.advantages, o)).sum()
    clipped = outside_clip(ratio, rows.advantages, o)
    metrics = [(share * k3(rows.old, log_probs)).sum(), (share * clipped).sum()]
    return _less_entropy(value, metrics, coef, entropy, share)


def reinforce_value(coef, log_probs, entropy, rows):
    """REINFORCE (Williams, 1992) -> value, metrics: entropy if it is given."""
    value = -(rows.weights * rows.advantages * log_probs).sum()
    return _less_entropy(value, [], coef, entropy, rows.share)


def _less_entropy(value, metrics, coef, entropy, share):
    if entropy is None:
        return value, metrics
    mean = (share * entropy).sum()
    return value - coef * mean, [*metrics, mean]


def leave_one_out(rewards, samples_per_prompt):
    """RLOO (2402.14740): a reward minus the mean of the prompt's other rewards. A prompt's samples
    are neighbours."""
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
    """-> the clipped ratio, where the lower bound clips it, and where the upper one does.

    sapo and vespo clip nothing: None, and nowhere.
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
        advantages: (B,) or (B, 1). log_ratio_per_token: (B, T), log π - log π_old. mask: (B, T).
        importance_sampling_ratio: (B, 1) or (B, T), of the inference engine, or None.
    """
    o = GRPOOptions(
        vespo_k_pos=k_pos,
        vespo_lambda_pos=lambda_pos,
        vespo_k_neg=k_neg,
        vespo_lambda_neg=lambda_neg,
    )
    counted = mask.bool()
    advantages = only(counted, advantages.detach().reshape(len(mask), -1))
    ratio = only(counted, importance_sampling_ratio, 1)
    ratio = None if ratio is None else log_of_sequence(ratio.detach())
    return vespo_weight(only(counted, log_ratio_per_token), mask, ratio, advantages, o)
