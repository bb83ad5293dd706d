r"""Policy losses: GRPO and its variants, PPO, RLOO, of the log-probabilities that a policy gives to sampled tokens.

    ρ = log π(y) - log π_old(y),   r = e^ρ             of a token, or one for a sequence
    loss = Σ_tokens weight·(l(r, A) + β·KL)            l: a row of `POLICIES`; weight: one of `REDUCTIONS`

The mathematics is over log-probabilities (B, T), or (tokens,) where each token stands alone: the same functions serve
both. `linear_grpo_loss` and its kind have the log-probabilities made from hidden states by `linear_loss`, some groups
at a time. A group is a token, unless a ratio couples those of a sequence.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from liger_kernel.core import check
from liger_kernel.losses.function import GradientsInForward
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.token_log_probs import token_log_probs

IGNORED = -100


@dataclass(frozen=True)
class GRPOOptions:
    """By the names that the field uses; `linear_grpo_loss` says what they mean."""

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


# ---- l: the policy's part in the loss of a token ----


def clipped_surrogate(log_probs, ratio, advantages, o):
    """PPO (1707.06347), its bounds as in DAPO (2503.14476), r bounded where A < 0 as in INTELLECT-2 (2505.07291)."""
    bounded = ratio if o.delta is None else ratio.clamp(max=o.delta)
    clipped = ratio.clamp(1 - o.epsilon_low, 1 + o.epsilon_high)
    return -torch.min(bounded * advantages, clipped * advantages)


def clipped_weight(log_probs, ratio, advantages, o):
    """CISPO (2506.13585): REINFORCE whose importance weight is bounded. epsilon_high is the bound itself."""
    return -ratio.detach().clamp(max=o.epsilon_high) * advantages * log_probs


def soft_gate(log_probs, ratio, advantages, o):
    """SAPO (2511.20347): a sigmoid about r = 1, of slope 1 there, in place of the clip."""
    t = _either(advantages > 0, o.sapo_temperature_pos, o.sapo_temperature_neg, ratio)
    return -(4 / t) * torch.sigmoid(t * (ratio - 1)) * advantages


def weighted_reinforce(log_probs, weight, advantages, o):
    """VESPO (2602.10693): REINFORCE with a weight for the sequence."""
    return -weight * advantages * log_probs


def vespo_weight(log_ratio, mask, log_inference_ratio, advantages, o):
    """VESPO's w^k·e^(λ-λw) of a sequence's importance weight w, which is bounded, too."""
    log_w = (log_ratio.detach().clamp(-20, 20) * mask).sum(-1, keepdim=True)
    log_w = log_w if log_inference_ratio is None else log_w + log_inference_ratio
    log_w = log_w.clamp(math.log(1e-8), 20)
    k = _either(advantages >= 0, o.vespo_k_pos, o.vespo_k_neg, log_w)
    rate = _either(advantages >= 0, max(o.vespo_lambda_pos, 1e-4), max(o.vespo_lambda_neg, 1e-4), log_w)
    return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _either(condition, yes, no, like):
    return torch.full_like(condition, no, dtype=like.dtype).masked_fill_(condition, yes)


def outside_clip(ratio, advantages, o):
    """Where the clip takes the gradient."""
    low, high = ratio < 1 - o.epsilon_low, ratio > 1 + o.epsilon_high
    return (low & (advantages < 0)) | (high & (advantages > 0))


def above_bound(ratio, advantages, o):
    return (ratio > o.epsilon_high) & (advantages > 0)


def never_clipped(ratio, advantages, o):
    return torch.zeros_like(ratio, dtype=torch.bool)


def k3(log_probs, other):
    """KL(π ‖ other) from tokens that π sampled: x = log other - log π; e^x - x - 1 ≥ 0 (Schulman's k3)."""
    x = other - log_probs
    return torch.expm1(x) - x


# ---- the weight of a token in the loss ----


def mean_of_sequences(mask, o, num_items=None):
    """GRPO (2402.03300): the mean over the sequences of the mean over their tokens."""
    return mask / mask.sum(-1, keepdim=True).clamp(min=1) / max(mask.shape[0], 1)


def mean_of_tokens(mask, o=None, num_items=None):
    """Over the tokens of this batch on this rank (TRL's bnpo)."""
    return mask / mask.sum().clamp(min=1)


def fixed_length(mask, o, num_items=None):
    """Dr. GRPO (2503.20783): over as many tokens as there could be."""
    return mask / (max(mask.shape[0], 1) * o.max_completion_length)


def mean_of_all_tokens(mask, o, num_items=None):
    """DAPO (2503.14476): over the tokens of all ranks; ``num_items`` says how many if there are more to come."""
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


def times_length(mask, o, num_items=None):
    """LUSPO (2602.05261): a sequence's loss times its length; the mean over all positions, padding among them."""
    return (mask.sum(-1, keepdim=True) / max(mask.numel(), 1)).expand_as(mask)


REDUCTIONS: dict[str, Callable] = {
    "sequences": mean_of_sequences,
    "tokens": mean_of_tokens,
    "fixed_length": fixed_length,
    "all_tokens": mean_of_all_tokens,
}


@dataclass(frozen=True)
class Policy:
    """l(log_probs, ratio, advantages, options) of a token, where it is clipped, the weights of the tokens."""

    loss: Callable
    clipped: Callable
    weights: Callable
    levels: tuple[str, ...] = ("token",)  # that a ratio may have; "sequence" couples the tokens of a sequence
    couples: bool = False  # at the level of tokens, too
    padding: bool = False  # counts


BOTH = "token", "sequence"  # the latter is the geometric mean of its tokens' (GSPO, 2507.18071)
POLICIES = {
    "grpo": Policy(clipped_surrogate, outside_clip, mean_of_sequences, BOTH),
    "bnpo": Policy(clipped_surrogate, outside_clip, mean_of_tokens, BOTH),
    "dr_grpo": Policy(clipped_surrogate, outside_clip, fixed_length, BOTH),
    "dapo": Policy(clipped_surrogate, outside_clip, mean_of_all_tokens, BOTH),
    "luspo": Policy(clipped_surrogate, outside_clip, times_length, BOTH, padding=True),
    "cispo": Policy(clipped_weight, above_bound, mean_of_all_tokens),
    "sapo": Policy(soft_gate, never_clipped, mean_of_sequences),
    "vespo": Policy(weighted_reinforce, never_clipped, mean_of_all_tokens, couples=True),
}


# ---- what some tokens contribute: (value, metrics) ----
#
# log_probs and entropy (or None) are (n, T), or (n,) of tokens that stand alone; all else broadcasts to them.
# share: the mask, divided by its sum over the whole batch. pool: what a sequence's ρ are summed with, if they are.


def grpo_terms(log_probs, pool, advantages, old, ref, inference_ratio, o):
    """-> l + β·KL, KL or None, clipped."""
    policy = POLICIES[o.loss_type]
    log_ratio = log_probs - (log_probs.detach() if old is None else old)
    at_level = (log_ratio * pool).sum(-1, keepdim=True) if o.importance_sampling_level == "sequence" else log_ratio
    ratio = at_level.exp()
    if policy.couples:
        weight = vespo_weight(log_ratio, pool, inference_ratio, advantages, o)
        loss = policy.loss(log_probs, weight, advantages, o)
    else:
        loss = policy.loss(log_probs, ratio, advantages, o)
        loss = loss if inference_ratio is None else loss * inference_ratio
    kl = None
    if ref is not None:
        kl = k3(log_probs, ref)
        kl = kl * ratio if o.use_bias_correction_kl else kl  # DeepSeek-V3.2 (2512.02556): unbiased off policy, too
        loss = loss + o.beta * kl
    return loss, kl, policy.clipped(ratio, advantages, o)


def grpo_value(o, coef, log_probs, entropy, weights, share, pool, advantages, old, ref, inference_ratio):
    loss, kl, clipped = grpo_terms(log_probs, pool, advantages, old, ref, inference_ratio, o)
    value, metrics = (weights * loss).sum(), []
    if o.beta != 0:
        metrics.append(share.new_zeros(()) if kl is None else (share * kl).sum())
    if entropy is not None:
        value = value - coef * (weights * entropy).sum()
        metrics.append((share * entropy).sum())
    return value, [*metrics, (share * clipped).sum()]


def ppo_value(o, coef, log_probs, entropy, weights, share, pool, advantages, old):
    """PPO (1707.06347): a token's ratio is clipped; with ``pool`` that of a sequence."""
    log_ratio = log_probs - old
    ratio = (log_ratio if pool is None else (log_ratio * pool).sum(-1, keepdim=True)).exp()
    value = (weights * clipped_surrogate(log_probs, ratio, advantages, o)).sum()
    metrics = [(share * k3(old, log_probs)).sum(), (share * outside_clip(ratio, advantages, o)).sum()]
    return _less_entropy(value, metrics, coef, entropy, share)


def reinforce_value(coef, log_probs, entropy, weights, share, advantages):
    return _less_entropy(-(weights * advantages * log_probs).sum(), [], coef, entropy, share)


def _less_entropy(value, metrics, coef, entropy, share):
    if entropy is None:
        return value, metrics
    mean = (share * entropy).sum()
    return value - coef * mean, [*metrics, mean]


def leave_one_out(rewards, samples_per_prompt):
    """RLOO (2402.14740): a reward less the mean of the other samples of its prompt, which are neighbours."""
    k = samples_per_prompt
    rewards = rewards.unflatten(0, (-1, k))
    return ((rewards - rewards.mean(1, keepdim=True)) * (k / (k - 1))).flatten()


# ---- a batch, prepared for them ----


@dataclass(frozen=True)
class _Batch:
    """All of a loss that doesn't wait for the log-probabilities."""

    value: Callable  # (log_probs, entropy, *rows) -> value, metrics
    rows: tuple  # (B, T), (B, 1) or None each
    counted: torch.Tensor | None  # (B, T), the positions that have an influence; None: all
    couples: bool = False  # the tokens of a sequence

    def of_log_probs(self, log_probs, entropy):
        value, metrics = self.value(_only(self.counted, log_probs), _only(self.counted, entropy), *self.rows)
        return value, tuple(x.detach() for x in metrics)

    def of_hidden(self, hidden, weight, ids, bias, **head):
        target, rows = _only(self.counted, ids, IGNORED), self.rows
        if not self.couples:  # a pass may end at any token
            hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
            rows = [x if x is None else x.expand(ids.shape).reshape(-1) for x in rows]

        def fn(part, log_probs, entropy):
            value, metrics = self.value(log_probs, entropy, *(x if x is None else x[part] for x in rows))
            return value, *metrics

        loss, *metrics = linear_loss(fn, hidden, weight, target, bias, ignore_index=IGNORED, **head)
        return loss, tuple(metrics)


def _only(counted, x, other=0):
    """Of (B, T) what counts: whatever stands elsewhere has no influence, be it NaN."""
    return x if x is None or counted is None or x.shape != counted.shape else x.where(counted, other)


def _numbers(like, *tensors):
    """(B, T) or (B, 1), without gradients, fp32 or as wide as ``like``."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    tensors = [x if x is None else x.detach().to(dtype) for x in tensors]
    return [x if x is None or x.dim() == 2 else x[:, None] for x in tensors]


def _check_rows(name, like, shape, **given):
    """``given``: an argument, the shapes that it may have and its dtypes; on the device of ``like``."""
    B = shape[0]
    shapes = {"BT": tuple(shape), "B": (B,), "B1": (B, 1), "None": None}
    for argument, (x, kinds, dtypes) in given.items():
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: {argument} is a {type(x).__name__}, give a tensor")
        has, fitting = None if x is None else tuple(x.shape), [shapes[kind] for kind in kinds.split()]
        if has not in fitting:
            fitting = " or ".join(map(str, fitting))
            raise ValueError(f"{name}: {argument} has shape {has}, give {fitting} for tokens {tuple(shape)}")
        if x is not None and x.dtype not in dtypes:
            wanted = "a floating point tensor" if dtypes is check.FLOATS else "real numbers"
            raise TypeError(f"{name}: {argument} is {x.dtype}, give {wanted}")
        if x is not None and x.device != like.device:
            raise ValueError(
                f"{name}: {argument} is on {x.device}, the policy's outputs on {like.device}, move it there"
            )


REAL = (*check.FLOATS, *check.INTEGERS, torch.bool)


def _check_tokens(name, hidden, ids, argument="the hidden states"):
    check.floats(name, {argument: hidden})
    check.integers(name, dict(selected_token_ids=ids))
    if hidden.dim() != 3 or ids.shape != hidden.shape[:2]:
        raise ValueError(
            f"{name}: {argument} has shape {tuple(hidden.shape)}, selected_token_ids {tuple(ids.shape)}, give "
            "(B, T, hidden size) and (B, T)"
        )


def _check_log_probs(name, log_probs, entropy):
    check.floats(name, dict(log_probs=log_probs), entropy=entropy)
    if log_probs.dim() != 2:
        raise ValueError(f"{name}: log_probs has shape {tuple(log_probs.shape)}, give (B, T)")
    check.shape(name, "entropy", entropy, tuple(log_probs.shape))


def _check_length(name, weights, o):
    if weights is fixed_length and not o.max_completion_length:
        raise ValueError(f"{name}: max_completion_length is {o.max_completion_length}, give the divisor")


def _check_grpo(name, like, shape, o, coef, mask, advantages, old, ref, inference_ratio):
    check.finite(name, "entropy_coef", coef)
    if o.loss_type not in POLICIES:
        raise ValueError(f"{name}: loss_type is {o.loss_type!r}, give one of {', '.join(POLICIES)}")
    policy, level = POLICIES[o.loss_type], o.importance_sampling_level
    if level not in policy.levels:
        levels = " or ".join(map(repr, policy.levels))
        raise ValueError(f"{name}: importance_sampling_level is {level!r}, give {levels} for {o.loss_type}")
    _check_length(name, policy.weights, o)
    _check_rows(
        name, like, shape, attention_mask=(mask, "BT", REAL), advantages=(advantages, "B BT", REAL),
        old_per_token_logps=(old, "BT None", check.FLOATS), ref_per_token_logps=(ref, "BT None", check.FLOATS),
        vllm_is_ratio=(inference_ratio, "B B1 BT None", check.FLOATS),
    )  # fmt: skip


def _counted(o, coef, mask):
    """The positions whose log-probabilities are used. luspo counts padding where tokens count."""
    own = o.importance_sampling_level == "token" or o.beta != 0 or coef != 0
    return None if POLICIES[o.loss_type].padding and own else mask.bool()


def _grpo_batch(o, coef, like, mask, advantages, old, ref, v, num_items):
    policy, sequence = POLICIES[o.loss_type], o.importance_sampling_level == "sequence"
    counted, ref = _counted(o, coef, mask), ref if o.beta != 0 else None
    mask, advantages, old, ref, v = _numbers(like, mask, advantages, old, ref, v)
    pool = mask if policy.couples else mask / mask.sum(-1, keepdim=True).clamp(min=1) if sequence else None
    if policy.couples and v is not None:
        v = v.log().clamp(math.log(1e-8), 20).sum(-1, keepdim=True)
    if not policy.padding:
        advantages, v = _only(counted, advantages), _only(counted, v)
    old, ref = _only(counted, old), _only(counted, ref)
    rows = policy.weights(mask, o, num_items), mean_of_tokens(mask), pool, advantages, old, ref, v
    return _Batch(functools.partial(grpo_value, o, coef), rows, counted, sequence or policy.couples)


def _ppo_batch(name, coef, like, shape, mask, advantages, old, epsilon_low, epsilon_high, reduction, length, num_items):
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction is {reduction!r}, give one of {', '.join(REDUCTIONS)}")
    o, weights = GRPOOptions(0.0, epsilon_low, epsilon_high, max_completion_length=length), REDUCTIONS[reduction]
    _check_length(name, weights, o)
    check.finite(name, "entropy_coef", coef)
    _check_rows(
        name, like, shape, attention_mask=(mask, "BT", REAL), advantages=(advantages, "B BT", REAL),
        old_per_token_logps=(old, "BT", check.FLOATS),
    )  # fmt: skip
    counted = mask.bool()
    mask, advantages, old = _numbers(like, mask, advantages, old)
    rows = weights(mask, o, num_items), mean_of_tokens(mask), None, _only(counted, advantages), _only(counted, old)
    return _Batch(functools.partial(ppo_value, o, coef), rows, counted)


def _rloo_batch(name, coef, like, shape, mask, rewards, k, level, old, epsilon_low, epsilon_high):
    check.finite(name, "entropy_coef", coef)
    if isinstance(k, bool) or not isinstance(k, int) or k < 2 or shape[0] % k:
        raise ValueError(f"{name}: samples_per_prompt is {k!r}, give a number from 2 on that divides {shape[0]}")
    if level not in BOTH:
        raise ValueError(f"{name}: level is {level!r}, give 'sequence' or 'token'")
    _check_rows(
        name, like, shape, attention_mask=(mask, "BT", REAL), rewards=(rewards, "B", REAL),
        old_per_token_logps=(old, "BT None", check.FLOATS),
    )  # fmt: skip
    counted, whole = mask.bool(), level == "sequence"
    mask, rewards, old = _numbers(like, mask, rewards, old)
    advantages, share = leave_one_out(rewards[:, 0], k)[:, None], mean_of_tokens(mask)
    if old is None:
        weights = mask / max(shape[0], 1) if whole else share
        return _Batch(functools.partial(reinforce_value, coef), (weights, share, advantages), counted)
    o = GRPOOptions(0.0, epsilon_low, epsilon_high)
    weights, pool = (mean_of_sequences(mask, o), mask) if whole else (share, None)
    rows = weights, share, pool, advantages, _only(counted, old)
    return _Batch(functools.partial(ppo_value, o, coef), rows, counted, whole)


def _named(loss, metrics, *names):
    """The metrics as a dict. The entropy is the last one, if it was asked for."""
    return loss, dict(zip(names, metrics, strict=False))


# ---- GRPO ----


def grpo_loss(
    log_probs, attention_mask, advantages, *, ref_per_token_logps=None, old_per_token_logps=None, vllm_is_ratio=None,
    num_items_in_batch=None, entropy=None, entropy_coef=0.0, **options,
):  # fmt: skip
    """GRPO and its variants of given log-probabilities: `linear_grpo_loss` without the head.

    Args:
        log_probs: (B, T), differentiable.
        entropy: (B, T), differentiable; None: no bonus, and not among the metrics.
        The rest as there. Without ``ref_per_token_logps`` the KL divergence is 0.
    """
    o = GRPOOptions(**options)
    given = attention_mask, advantages, old_per_token_logps, ref_per_token_logps, vllm_is_ratio
    _check_log_probs("grpo_loss", log_probs, entropy)
    _check_grpo("grpo_loss", log_probs, log_probs.shape, o, entropy_coef, *given)
    return _grpo_batch(o, entropy_coef, log_probs, *given, num_items_in_batch).of_log_probs(log_probs, entropy)


def linear_grpo_loss(
    hidden, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None,
    old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, *, vllm_is_ratio=None,
    num_items_in_batch=None, use_ref_model=True, temperature=1.0, entropy_coef=0.0, return_entropy=False,
    memory="auto", drop_ignored=None, **options,
):  # fmt: skip
    """GRPO and its variants from the policy's hidden states, without its logits in memory.

    Gradients for hidden, weight and bias are taken in this call. What stands where the mask is 0 has no part in it if
    it is finite; luspo alone counts these positions, as the published package does and TRL does not.

    Args:
        hidden: (B, T, H), any strides; weight, bias: (V, H) and (V,) of the head.
        selected_token_ids: (B, T), the sampled tokens; attention_mask: (B, T), 1 where they count, 0 elsewhere.
        advantages: (B,) or (B, T).
        ref_per_token_logps: (B, T), the reference's log-probabilities. Or ref_input (B, T, ...), ref_weight and
            ref_bias: they are made from these, unless beta is 0.
        use_ref_model: False: no reference, whatever is given, and a KL divergence of 0.
        old_per_token_logps: (B, T), of the policy that sampled; None: of this one, without gradient.
        vllm_is_ratio: (B,), (B, 1) or (B, T): corrects for the engine that sampled.
        num_items_in_batch: for dapo, cispo and vespo, the tokens of all ranks and accumulation steps, a number or a
            tensor; None: those of this call on all ranks.
        temperature: the logits are divided by it.
        entropy_coef: so many times the entropy, reduced like the loss, is taken off the loss.
        return_entropy: the mean entropy among the metrics; it is where ``entropy_coef`` is not 0.
        memory, drop_ignored: as in `linear_loss`.
        options: fields of `GRPOOptions`:
            beta: factor of the KL divergence; use_bias_correction_kl: multiplies it by the ratio.
            loss_type: grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo or vespo.
            epsilon_low, epsilon_high: the ratio is clipped at 1 - epsilon_low and 1 + epsilon_high, for cispo at
                epsilon_high. delta: bounds it where the advantage is negative (not for cispo, sapo, vespo).
            max_completion_length: dr_grpo's divisor.
            importance_sampling_level: of the ratio, "token" or "sequence" (not for cispo, sapo, vespo).
            sapo_temperature_pos, sapo_temperature_neg, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg:
                by the sign of the advantage.

    Returns:
        The loss and a tuple of metrics: mean KL divergence unless beta is 0, mean entropy if asked for, clip ratio.

    Raises:
        ValueError: shapes or options that don't fit; no reference.
    """
    name, o, ids = "linear_grpo_loss", GRPOOptions(**options), selected_token_ids
    _check_tokens(name, hidden, ids)
    given_ref = ref_per_token_logps if use_ref_model else None
    given = attention_mask, advantages, old_per_token_logps, given_ref, vllm_is_ratio
    _check_grpo(name, hidden, ids.shape, o, entropy_coef, *given)
    head = dict(temperature=temperature, memory=memory, drop_ignored=drop_ignored)
    ref = None
    if use_ref_model:
        counted, make = _counted(o, entropy_coef, attention_mask), o.beta != 0
        ref = _reference(name, ids, counted, make, given_ref, ref_input, ref_weight, ref_bias, **head)
    batch = _grpo_batch(
        o, entropy_coef, hidden, attention_mask, advantages, old_per_token_logps, ref, vllm_is_ratio,
        num_items_in_batch,
    )  # fmt: skip
    return batch.of_hidden(hidden, weight, ids, bias, return_entropy=return_entropy or entropy_coef != 0, **head)


def _reference(name, ids, counted, make, given, hidden, weight, bias, **head):
    """The reference's log-probabilities: as given, made from its hidden states, or None if they needn't be made."""
    if given is None and make and (hidden is None or weight is None):
        raise ValueError(
            f"{name}: use_ref_model is True without a reference, give ref_per_token_logps, or ref_input and "
            "ref_weight, or use_ref_model=False"
        )
    if given is not None and hidden is not None:
        what = "ref_per_token_logps and ref_input are both given, ref_per_token_logps are used"
        warnings.warn(f"{name}: {what}", stacklevel=4)
    if given is not None or not make:
        return given
    _check_tokens(name, hidden, ids, "ref_input")
    with torch.no_grad():
        return token_log_probs(hidden, weight, _only(counted, ids, IGNORED), bias, ignore_index=IGNORED, **head)


class _WithClass(staticmethod):
    """A static ``forward(cls, ctx, ...)``, which `apply` calls without the class."""

    def __get__(self, instance, owner=None):
        forward = super().__get__(instance, owner)

        @functools.wraps(forward)
        def call(*args, **kwargs):
            told = "cls" in kwargs or (args and isinstance(args[0], type))
            return forward(*args, **kwargs) if told else forward(owner, *args, **kwargs)

        return call


class LigerFusedLinearPPOBase(GradientsInForward):
    """For a policy loss of your own: subclass it, give ``ppo_loss_fn``, and ``apply`` it in the order of ``forward``.

    A subclass with a ``forward`` of its own calls ``super().forward(cls=cls, ctx=ctx, ...)``.
    """

    WHERE = 0, 1, 5

    @staticmethod
    def ppo_loss_fn(
        per_token_logps, attention_mask, advantages, full_attention_mask, selected_token_ids=None,
        ref_per_token_logps=None, old_per_token_logps=None, vllm_is_ratio=None, num_items_in_batch=None, **options,
    ):  # fmt: skip
        """The loss of some of the batch's sequences. It is called by keyword, once or several times, and added up.

        Args:
            per_token_logps: (n, T), differentiable, 0 where the mask is.
            attention_mask: (n, T), advantages: (n, ...), and those that may be None: of the same sequences.
            full_attention_mask: (B, T), of the whole batch, to divide by.
            options: the other arguments of ``forward``, from epsilon_low on.

        Returns:
            What these sequences add to the loss, 0-d, and a list of metrics: 0-d ones are added up over the calls,
            others concatenated.
        """
        raise NotImplementedError("LigerFusedLinearPPOBase: give ppo_loss_fn in a subclass")

    @classmethod
    def loss(
        cls, hidden, weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
        old_per_token_logps, ref_input, ref_weight, ref_bias, *, vllm_is_ratio, num_items_in_batch, use_ref_model,
        temperature, **options,
    ):  # fmt: skip
        """-> loss, metrics: differentiable in hidden, weight and bias."""
        name, ids = cls.__name__, selected_token_ids
        _check_tokens(name, hidden, ids)
        _check_rows(name, hidden, ids.shape, attention_mask=(attention_mask, "BT", REAL))
        counted = attention_mask.bool()
        ref = None
        if use_ref_model:
            make = options["beta"] != 0
            ref = _reference(
                name, ids, counted, make, ref_per_token_logps, ref_input, ref_weight, ref_bias, temperature=temperature
            )
        rows = dict(
            attention_mask=attention_mask, advantages=advantages, selected_token_ids=ids, ref_per_token_logps=ref,
            old_per_token_logps=old_per_token_logps, vllm_is_ratio=vllm_is_ratio,
        )  # fmt: skip
        options |= dict(full_attention_mask=attention_mask, num_items_in_batch=num_items_in_batch)

        def fn(part, log_probs, entropy):
            some = {k: x if x is None else x[part] for k, x in rows.items()}
            value, metrics = cls.ppo_loss_fn(per_token_logps=log_probs, **some, **options)
            return value, *metrics

        target = _only(counted, ids, IGNORED)
        loss, *metrics = linear_loss(fn, hidden, weight, target, bias, temperature=temperature, ignore_index=IGNORED)
        return loss, tuple(metrics)

    @_WithClass
    def forward(
        cls, ctx, _input, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None,
        old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, epsilon_low=0.2, epsilon_high=0.2,
        beta=0.04, loss_type="dapo", max_completion_length=None, importance_sampling_level="token", temperature=1.0,
        compiled=True, use_ref_model=False, chunk_size=1, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0,
        vespo_k_neg=3.0, vespo_lambda_neg=2.0, num_items_in_batch=None,
    ):  # fmt: skip
        """-> loss, tuple of metrics. What the arguments mean: `linear_grpo_loss`.

        ``compiled`` and ``chunk_size`` change nothing: what runs at once follows from the memory.
        """
        options = dict(
            vllm_is_ratio=vllm_is_ratio, num_items_in_batch=num_items_in_batch, use_ref_model=use_ref_model,
            temperature=temperature, epsilon_low=epsilon_low, epsilon_high=epsilon_high, beta=beta, loss_type=loss_type,
            max_completion_length=max_completion_length, importance_sampling_level=importance_sampling_level,
            sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg, delta=delta,
            use_bias_correction_kl=use_bias_correction_kl, vespo_k_pos=vespo_k_pos, vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg, vespo_lambda_neg=vespo_lambda_neg,
        )  # fmt: skip
        batch = selected_token_ids, attention_mask, advantages
        references = ref_per_token_logps, old_per_token_logps, ref_input, ref_weight, ref_bias

        def loss(h, w, b):
            value, metrics = cls.loss(h, w, *batch, b, *references, **options)
            return value, *metrics

        value, *metrics = cls.take(ctx, loss, _input, weight, bias)
        return value, tuple(metrics)


class LigerFusedLinearGRPOFunction(LigerFusedLinearPPOBase):
    """``apply(_input, weight, selected_token_ids, attention_mask, advantages, ...) -> loss, tuple of metrics``.

    `linear_grpo_loss` says what the arguments mean; ``compiled`` and ``chunk_size`` change nothing.
    """

    loss = staticmethod(linear_grpo_loss)

    @classmethod
    def forward(
        cls, ctx, _input, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None,
        old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, beta=0.04, epsilon_low=0.2,
        epsilon_high=0.2, loss_type="dapo", max_completion_length=None, importance_sampling_level="token",
        sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, temperature=1.0, compiled=True, use_ref_model=True,
        chunk_size=1, vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0,
        vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, num_items_in_batch=None,
    ):  # fmt: skip
        return super().forward(
            cls, ctx, _input, weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
            old_per_token_logps, ref_input, ref_weight, ref_bias, epsilon_low, epsilon_high, beta, loss_type,
            max_completion_length, importance_sampling_level, temperature, compiled, use_ref_model, chunk_size,
            sapo_temperature_pos, sapo_temperature_neg, vllm_is_ratio, delta, use_bias_correction_kl, vespo_k_pos,
            vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg, num_items_in_batch,
        )  # fmt: skip


liger_fused_linear_grpo = LigerFusedLinearGRPOFunction.apply


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    """GRPO and its variants over a linear head: `linear_grpo_loss`, its options given once.

    Args:
        compiled, chunk_size: change nothing: what runs at once follows from ``memory``.
        The others as in `linear_grpo_loss`.
    """

    def __init__(
        self, beta: float = 0.04, compiled: bool = True, use_ref_model: bool = True, chunk_size: int = 1,
        epsilon_low: float = 0.2, epsilon_high: float = 0.2, loss_type: str = "dapo",
        max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, temperature: float = 1.0,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0, *,
        entropy_coef: float = 0.0, return_entropy: bool = False, memory: int | str = "auto",
        drop_ignored: bool | None = None,
    ) -> None:  # fmt: skip
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        vars(self).update(given)
        self._options()  # raises

    def _options(self):
        names = "use_ref_model", "temperature", "entropy_coef", "return_entropy", "memory", "drop_ignored"
        o = GRPOOptions(**{field.name: getattr(self, field.name) for field in fields(GRPOOptions)})
        return {name: getattr(self, name) for name in names} | vars(o)

    def forward(
        self, _input: torch.Tensor, lin_weight: torch.Tensor, selected_token_ids: torch.Tensor,
        attention_mask: torch.Tensor | None, advantages: torch.Tensor, bias: torch.Tensor | None = None,
        ref_per_token_logps: torch.Tensor | None = None, old_per_token_logps: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None, ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None, vllm_is_ratio: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
    ):  # fmt: skip
        """-> loss, tuple of metrics: mean KL divergence unless beta is 0, mean entropy if asked for, clip ratio."""
        return linear_grpo_loss(
            _input, lin_weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
            old_per_token_logps, ref_input, ref_weight, ref_bias, vllm_is_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch, **self._options(),
        )  # fmt: skip


# ---- PPO and RLOO ----


def ppo_loss(
    log_probs, attention_mask, advantages, old_per_token_logps, *, epsilon_low=0.2, epsilon_high=0.2,
    reduction="tokens", max_completion_length=None, num_items_in_batch=None, entropy=None, entropy_coef=0.0,
):  # fmt: skip
    """PPO's policy loss of given log-probabilities: `linear_ppo_loss` without the head.

    Args:
        log_probs: (B, T), differentiable; entropy: likewise, or None: no bonus, and not among the metrics.
        The rest as there.
    """
    _check_log_probs("ppo_loss", log_probs, entropy)
    batch = _ppo_batch(
        "ppo_loss", entropy_coef, log_probs, log_probs.shape, attention_mask, advantages, old_per_token_logps,
        epsilon_low, epsilon_high, reduction, max_completion_length, num_items_in_batch,
    )  # fmt: skip
    return _named(*batch.of_log_probs(log_probs, entropy), "approx_kl", "clip_fraction", "entropy")


def linear_ppo_loss(
    hidden, weight, selected_token_ids, attention_mask, advantages, old_per_token_logps, bias=None, *,
    epsilon_low=0.2, epsilon_high=0.2, reduction="tokens", max_completion_length=None, num_items_in_batch=None,
    temperature=1.0, entropy_coef=0.0, return_entropy=False, memory="auto", drop_ignored=None,
):  # fmt: skip
    """PPO's clipped policy loss (1707.06347) from the policy's hidden states, without its logits in memory.

    Args:
        hidden: (B, T, H); weight, bias: (V, H) and (V,) of the head.
        selected_token_ids, attention_mask, old_per_token_logps: (B, T); advantages: (B, T) or (B,).
        epsilon_low, epsilon_high: the ratio is clipped at 1 - epsilon_low and 1 + epsilon_high.
        reduction: "tokens": their mean; "sequences": the mean of the sequences' means; "all_tokens": the mean over all
            ranks' tokens, or num_items_in_batch of them; "fixed_length": divided by B·max_completion_length.
        temperature: the logits are divided by it.
        entropy_coef: so many times the tokens' mean entropy is taken off the loss.
        return_entropy: the mean entropy among the metrics; it is where ``entropy_coef`` is not 0.
        memory, drop_ignored: as in `linear_loss`.

    Returns:
        The loss, and {"approx_kl": of the old policy from this one, "clip_fraction": ..., "entropy": if asked for}.
    """
    name, ids = "linear_ppo_loss", selected_token_ids
    _check_tokens(name, hidden, ids)
    batch = _ppo_batch(
        name, entropy_coef, hidden, ids.shape, attention_mask, advantages, old_per_token_logps, epsilon_low,
        epsilon_high, reduction, max_completion_length, num_items_in_batch,
    )  # fmt: skip
    out = batch.of_hidden(
        hidden, weight, ids, bias, temperature=temperature, return_entropy=return_entropy or entropy_coef != 0,
        memory=memory, drop_ignored=drop_ignored,
    )  # fmt: skip
    return _named(*out, "approx_kl", "clip_fraction", "entropy")


RLOO_METRICS = {True: ("entropy",), False: ("approx_kl", "clip_fraction", "entropy")}


def rloo_loss(
    log_probs, attention_mask, rewards, *, samples_per_prompt, level="sequence", old_per_token_logps=None,
    epsilon_low=0.2, epsilon_high=0.2, entropy=None, entropy_coef=0.0,
):  # fmt: skip
    """RLOO of given log-probabilities: `linear_rloo_loss` without the head.

    Args:
        log_probs: (B, T), differentiable; entropy: likewise, or None: no bonus, and not among the metrics.
        The rest as there.
    """
    _check_log_probs("rloo_loss", log_probs, entropy)
    batch = _rloo_batch(
        "rloo_loss", entropy_coef, log_probs, log_probs.shape, attention_mask, rewards, samples_per_prompt, level,
        old_per_token_logps, epsilon_low, epsilon_high,
    )  # fmt: skip
    return _named(*batch.of_log_probs(log_probs, entropy), *RLOO_METRICS[old_per_token_logps is None])


def linear_rloo_loss(
    hidden, weight, selected_token_ids, attention_mask, rewards, bias=None, *, samples_per_prompt, level="sequence",
    old_per_token_logps=None, epsilon_low=0.2, epsilon_high=0.2, temperature=1.0, entropy_coef=0.0,
    return_entropy=False, memory="auto", drop_ignored=None,
):  # fmt: skip
    """REINFORCE leave-one-out (RLOO, 2402.14740) from the policy's hidden states, without its logits in memory.

    A sample's advantage is its reward less the mean reward of the other samples of its prompt.

    Args:
        hidden: (B, T, H); weight, bias: (V, H) and (V,) of the head.
        selected_token_ids, attention_mask: (B, T).
        rewards: (B,), the ``samples_per_prompt`` samples of a prompt side by side.
        level: "sequence": the mean over sequences of -A·log p(sequence); "token": the mean over tokens of -A·log p.
        old_per_token_logps: (B, T), of the policy that sampled: the loss is then PPO's, with the ratio of the sequence
            or of each token, clipped at 1 - epsilon_low and 1 + epsilon_high.
        temperature: the logits are divided by it.
        entropy_coef: so many times the tokens' mean entropy is taken off the loss.
        return_entropy: the mean entropy among the metrics; it is where ``entropy_coef`` is not 0.
        memory, drop_ignored: as in `linear_loss`.

    Returns:
        The loss, and {"approx_kl", "clip_fraction": with old_per_token_logps, "entropy": if asked for}.
    """
    name, ids = "linear_rloo_loss", selected_token_ids
    _check_tokens(name, hidden, ids)
    batch = _rloo_batch(
        name, entropy_coef, hidden, ids.shape, attention_mask, rewards, samples_per_prompt, level,
        old_per_token_logps, epsilon_low, epsilon_high,
    )  # fmt: skip
    out = batch.of_hidden(
        hidden, weight, ids, bias, temperature=temperature, return_entropy=return_entropy or entropy_coef != 0,
        memory=memory, drop_ignored=drop_ignored,
    )  # fmt: skip
    return _named(*out, *RLOO_METRICS[old_per_token_logps is None])
