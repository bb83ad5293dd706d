r"""Policy losses: GRPO and its variants, PPO, RLOO, on the log-probabilities that a policy gives to sampled tokens.

    ρ = log π(y) - log π_old(y),   r = e^ρ          per token, or one for a sequence
    loss = Σ_tokens weight·(l(r, A) + β·KL)         l: a row of `POLICIES`; weight: a row of `REDUCTIONS`

Everything here is over log-probabilities (B, T), or (tokens,) where each token stands alone: the same functions serve
both. `linear_grpo_loss` and the like hand them to `linear_loss`, which makes log-probabilities from hidden states and
the head a few groups at a time. A group is a token, except for ratios of whole sequences: a sequence.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from ..ops.linear_head import token_log_probs
from ..ops.linear_loss import linear_loss

IGNORED = -100


@dataclass(frozen=True)
class GRPOOptions:
    """What the GRPO losses may be told, with the names that the field uses."""

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


# ---- the policy's part: l of each token ----


def clipped_surrogate(log_probs, ratio, advantages, o):
    """PPO (1707.06347), with GRPO's two bounds (DAPO, 2503.14476) and a third for A < 0 (INTELLECT-2, 2505.07291)."""
    bounded = ratio if o.delta is None else ratio.clamp(max=o.delta)
    clipped = ratio.clamp(1 - o.epsilon_low, 1 + o.epsilon_high)
    return -torch.min(bounded * advantages, clipped * advantages)


def clipped_weight(log_probs, ratio, advantages, o):
    """CISPO (2506.13585): REINFORCE, its importance weights bounded. epsilon_high is the bound itself."""
    return -ratio.detach().clamp(max=o.epsilon_high) * advantages * log_probs


def soft_gate(log_probs, ratio, advantages, o):
    """SAPO (2511.20347): a sigmoid around r = 1 in place of the clip, with slope 1 there."""
    t = torch.where(advantages > 0, o.sapo_temperature_pos, o.sapo_temperature_neg).to(ratio.dtype)
    return -4 / t * torch.sigmoid(t * (ratio - 1)) * advantages


def weighted_reinforce(log_probs, weight, advantages, o):
    """VESPO (2602.10693): REINFORCE under a sequence's weight."""
    return -weight * advantages * log_probs


def vespo_weight(log_ratio, mask, advantages, log_inference_ratio, o):
    """φ(w) = w^k·e^(λ(1-w)) of a sequence's importance weight w, which training's and inference's ratios make."""
    low, high = math.log(1e-8), 20.0
    log_w = (log_ratio.detach().clamp(-20, 20) * mask).sum(-1, keepdim=True)
    if log_inference_ratio is not None:
        log_w = log_w + log_inference_ratio
    log_w = log_w.clamp(low, high)
    good = advantages >= 0
    k = torch.where(good, o.vespo_k_pos, o.vespo_k_neg)
    rate = torch.where(good, max(o.vespo_lambda_pos, 1e-4), max(o.vespo_lambda_neg, 1e-4))
    return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def outside_clip(ratio, advantages, o):
    """Where the clip takes the gradient."""
    low, high = ratio < 1 - o.epsilon_low, ratio > 1 + o.epsilon_high
    return (low & (advantages < 0)) | (high & (advantages > 0))


def above_bound(ratio, advantages, o):
    return (ratio > o.epsilon_high) & (advantages > 0)


def never(ratio, advantages, o):
    return torch.zeros_like(ratio, dtype=torch.bool)


def k3(log_probs, ref):
    """KL(π ‖ π_ref) of a token sampled from π: e^x - x - 1 ≥ 0 with x = log π_ref - log π (Schulman's k3)."""
    x = ref - log_probs
    return torch.expm1(x) - x


# ---- the weight of each token in the loss ----


def mean_of_sequences(mask, o, num_items):
    """GRPO (2402.03300): the mean over sequences of the mean over their tokens."""
    return mask / mask.sum(-1, keepdim=True).clamp(min=1) / max(mask.shape[0], 1)


def mean_of_tokens(mask, o, num_items):
    """Over the tokens of this batch on this rank (TRL's bnpo)."""
    return mask / mask.sum().clamp(min=1)


def fixed_length(mask, o, num_items):
    """Dr. GRPO (2503.20783): over as many tokens as there could be."""
    return mask / (max(mask.shape[0], 1) * o.max_completion_length)


def mean_of_all_tokens(mask, o, num_items):
    """DAPO (2503.14476): over the tokens of all ranks, and of all accumulation steps if ``num_items`` says so."""
    return mask / tokens_per_rank(mask, num_items)


def length_times(mask, o, num_items):
    """LUSPO (2602.05261): the mean over all positions, padded ones too, of the sequence's length times l."""
    return (mask.sum(-1, keepdim=True) / max(mask.numel(), 1)).expand_as(mask)


def tokens_per_rank(mask, num_items=None):
    """``num_items`` (a number or a tensor, of all ranks; None: counted now) per rank, at least 1; 0-d."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if isinstance(num_items, torch.Tensor):
        total = num_items.to(device=mask.device, dtype=mask.dtype, non_blocking=True).reshape(())
    elif num_items is not None:
        total = mask.new_full((), num_items)
    else:
        total = mask.sum()
        if ranks > 1:
            dist.all_reduce(total)
    return (total / ranks).clamp(min=1)


REDUCTIONS: dict[str, Callable] = {
    "sequences": mean_of_sequences,
    "tokens": mean_of_tokens,
    "fixed_length": fixed_length,
    "all_tokens": mean_of_all_tokens,
    "length": length_times,
}


@dataclass(frozen=True)
class Policy:
    """A row: l(log_probs, ratio, advantages, options), where it is clipped, its reduction."""

    term: Callable
    clipped: Callable
    reduction: str
    levels: tuple[str, ...] = ("token",)  # of the ratio; a ratio of sequences couples their tokens
    whole_sequences: bool = False  # couples a sequence's tokens at token level, too
    padding_counts: bool = False


BOTH = "token", "sequence"  # a sequence's ratio is the geometric mean of its tokens' (GSPO, 2507.18071)
POLICIES = {
    "grpo": Policy(clipped_surrogate, outside_clip, "sequences", BOTH),
    "bnpo": Policy(clipped_surrogate, outside_clip, "tokens", BOTH),
    "dr_grpo": Policy(clipped_surrogate, outside_clip, "fixed_length", BOTH),
    "dapo": Policy(clipped_surrogate, outside_clip, "all_tokens", BOTH),
    "luspo": Policy(clipped_surrogate, outside_clip, "length", BOTH, padding_counts=True),
    "cispo": Policy(clipped_weight, above_bound, "all_tokens"),
    "sapo": Policy(soft_gate, never, "sequences"),
    "vespo": Policy(weighted_reinforce, never, "all_tokens", whole_sequences=True),
}


# ---- GRPO over log-probabilities ----


def grpo_terms(log_probs, advantages, o, old=None, ref=None, inference_ratio=None, pool=None):
    """-> each token's l + β·KL, its KL (None without a reference), whether its ratio was clipped.

    Args:
        log_probs: (n, T), or (n,) of tokens that stand alone; the others broadcast to it.
        old: the log-probabilities that sampled; None: the same, without gradient.
        inference_ratio: multiplies l; for vespo its logarithm, summed over the sequence.
        pool: (n, T), where a sequence is coupled: its mask, divided by its length for a ratio of sequences.
    """
    policy = POLICIES[o.loss_type]
    log_ratio = log_probs - (log_probs.detach() if old is None else old)
    if o.importance_sampling_level == "sequence":
        ratio = (log_ratio * pool).sum(-1, keepdim=True).exp()
    else:
        ratio = log_ratio.exp()
    if policy.term is weighted_reinforce:
        weight = vespo_weight(log_ratio, pool, advantages, inference_ratio, o)
        loss = policy.term(log_probs, weight, advantages, o)
    else:
        loss = policy.term(log_probs, ratio, advantages, o)
        loss = loss if inference_ratio is None else loss * inference_ratio
    kl = None
    if ref is not None:
        kl = k3(log_probs, ref)
        if o.use_bias_correction_kl:  # DeepSeek-V3.2 (2512.02556): an unbiased gradient off policy
            kl = kl * ratio
        loss = loss + o.beta * kl
    return loss, kl, policy.clipped(ratio, advantages, o)


def grpo_value(o, entropy_coef, log_probs, entropy, weights, share, pool, advantages, old, ref, inference_ratio):
    """What these tokens contribute to the loss and to the metrics. ``share``: the mask, divided by its sum."""
    loss, kl, clipped = grpo_terms(log_probs, advantages, o, old, ref, inference_ratio, pool)
    metrics = [(share * clipped).sum()]
    value = (weights * loss).sum()
    if entropy is not None:
        value = value - entropy_coef * (weights * entropy).sum() if entropy_coef else value
        metrics.insert(0, (share * entropy).sum())
    if o.beta != 0:
        metrics.insert(0, share.new_zeros(()) if kl is None else (share * kl).sum())
    return value, metrics


def _fp32(x, like):
    """fp32, or fp64 where that is."""
    return None if x is None else x.detach().to(torch.promote_types(like.dtype, torch.float32))


def _column(x):
    return x if x is None or x.dim() == 2 else x[:, None]


@dataclass(frozen=True)
class _Plan:
    """What is known of a batch before its log-probabilities."""

    value: Callable  # (log_probs, entropy, *rows) -> value, metrics
    rows: tuple  # for each position (B, T), for each sequence (B, 1), or None
    counted: torch.Tensor | None  # (B, T), None: all
    couples: bool  # sequences


def _mask(mask, shape, like):
    return torch.ones(shape, device=like.device, dtype=_fp32(like, like).dtype) if mask is None else _fp32(mask, like)


def _cleared(x, counted):
    """Without what stands at positions that don't count, which may be NaN."""
    return x if x is None or counted is None or x.shape != counted.shape else x.where(counted, 0)


def _grpo_plan(name, shape, like, mask, advantages, old, ref, inference_ratio, num_items, o, entropy_coef):
    """Check the arguments and prepare all that doesn't depend on the log-probabilities."""
    check_options(name, o)
    policy = POLICIES[o.loss_type]
    sequence = o.importance_sampling_level == "sequence"
    _check_shapes(
        name, shape, attention_mask=(mask, ""), advantages=(advantages, "B"), ref_per_token_logps=(ref, ""),
        old_per_token_logps=(old, ""), vllm_is_ratio=(inference_ratio, "B1"),
    )  # fmt: skip
    ref = ref if o.beta != 0 else None
    mask = _mask(mask, shape, like)
    weights = REDUCTIONS[policy.reduction](mask, o, num_items)
    everywhere = policy.padding_counts and (not sequence or ref is not None or bool(entropy_coef))
    counted = None if everywhere else mask.bool()
    advantages, old, ref, v = (_column(_fp32(x, like)) for x in (advantages, old, ref, inference_ratio))
    advantages, old, ref = (_cleared(x, counted) for x in (advantages, old, ref))
    pool = None
    if sequence:
        pool = mask / mask.sum(-1, keepdim=True).clamp(min=1)
    elif policy.whole_sequences:
        pool = mask
        v = None if v is None else v.log().clamp(math.log(1e-8), 20.0).sum(-1, keepdim=True)
    v = v if policy.whole_sequences else _cleared(v, counted)
    rows = weights, mask / mask.sum().clamp(min=1), pool, advantages, old, ref, v
    return _Plan(functools.partial(grpo_value, o, entropy_coef), rows, counted, sequence or policy.whole_sequences)


def grpo_loss(
    log_probs, attention_mask, advantages, *, ref_per_token_logps=None, old_per_token_logps=None, vllm_is_ratio=None,
    num_items_in_batch=None, entropy=None, entropy_coef=0.0, **options,
):  # fmt: skip
    """The GRPO losses of given log-probabilities (B, T): `linear_grpo_loss` without the head.

    Args:
        log_probs: (B, T), with gradients; entropy: (B, T), adds a metric and, times ``entropy_coef``, the bonus.
        options: those of `GRPOOptions`. Everything else as in `linear_grpo_loss`.

    Returns:
        The loss and a tuple of metrics: the mean KL divergence where beta is not 0, the mean entropy where given, the
        fraction of clipped tokens.
    """
    plan = _grpo_plan(
        "grpo_loss", log_probs.shape, log_probs, attention_mask, advantages, old_per_token_logps, ref_per_token_logps,
        vllm_is_ratio, num_items_in_batch, GRPOOptions(**options), entropy_coef,
    )  # fmt: skip
    return _of_log_probs(plan, log_probs, entropy)


def _of_log_probs(plan, log_probs, entropy):
    value, metrics = plan.value(_cleared(log_probs, plan.counted), _cleared(entropy, plan.counted), *plan.rows)
    return value, tuple(x.detach() for x in metrics)


# ---- ... and over hidden states ----


def _of_hidden(plan, hidden, weight, ids, bias, **head):
    """The plan's loss and metrics through `linear_loss`. Tokens that stand alone may be cut anywhere."""
    target = ids if plan.counted is None else ids.where(plan.counted, IGNORED)
    rows = plan.rows
    if not plan.couples:
        hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
        rows = [x if x is None else x.expand(ids.shape).reshape(-1) for x in rows]

    def fn(part, log_probs, entropy):
        value, metrics = plan.value(log_probs, entropy, *(x if x is None else x[part] for x in rows))
        return value, *metrics

    loss, *metrics = linear_loss(fn, hidden, weight, target, bias, ignore_index=IGNORED, **head)
    return loss, tuple(metrics)


def _reference(
    name, ids, counted, beta, use_ref_model, ref_per_token_logps, ref_input, ref_weight, ref_bias, temperature,
    memory="auto", drop_ignored=None,
):  # fmt: skip
    """The reference's log-probabilities, as given or from its hidden states; None where they aren't asked for."""
    if not use_ref_model:
        return None
    if ref_per_token_logps is not None and ref_input is not None:
        warnings.warn(
            f"{name}: both ref_per_token_logps and ref_input are given, ref_per_token_logps are used; give one of them",
            stacklevel=3,
        )
    if ref_per_token_logps is None and (ref_input is None or ref_weight is None):
        raise ValueError(
            f"{name}: use_ref_model is True, but there is no reference: give ref_per_token_logps, or ref_input and "
            "ref_weight, or use_ref_model=False"
        )
    if beta == 0 or ref_per_token_logps is not None:
        return ref_per_token_logps
    with torch.no_grad():
        return token_log_probs(
            ref_input, ref_weight, ids if counted is None else ids.where(counted, IGNORED), ref_bias,
            temperature=temperature, ignore_index=IGNORED, memory=memory, drop_ignored=drop_ignored,
        )  # fmt: skip


def linear_grpo_loss(
    hidden, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None,
    old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, *, vllm_is_ratio=None,
    num_items_in_batch=None, use_ref_model=True, temperature=1.0, entropy_coef=0.0, return_entropy=False,
    memory="auto", drop_ignored=None, **options,
):  # fmt: skip
    """GRPO and its variants from the policy's hidden states, without its logits in memory.

    Gradients for hidden, weight and bias are taken in this call. Where the mask is 0 nothing is computed, and whatever
    stands there has no influence (luspo counts these positions).

    Args:
        hidden: (B, T, H), any strides; weight, bias: (V, H) and (V,) of the head.
        selected_token_ids: (B, T), the sampled tokens; attention_mask: (B, T), 1 where they count.
        advantages: (B,) or (B, T).
        ref_per_token_logps: (B, T), the reference's log-probabilities; or give ref_input, ref_weight and ref_bias, from
            which they come. ``use_ref_model=False``: no reference, whatever is given.
        old_per_token_logps: (B, T), those of the policy that sampled; None: this one.
        vllm_is_ratio: (B,), (B, 1) or (B, T), the ratio of training's probabilities to those of inference.
        num_items_in_batch: tokens of all ranks and accumulation steps, for dapo, cispo and vespo; None: those of this
            batch on all ranks.
        temperature: the logits are divided by it.
        entropy_coef: times the entropy, reduced as the loss is, is subtracted from the loss.
        return_entropy: a metric more: the mean entropy; also with an ``entropy_coef`` other than 0.
        memory, drop_ignored: as in `linear_loss`.
        options: those of `GRPOOptions`:
            beta: of the KL divergence; use_bias_correction_kl: times the ratio.
            epsilon_low, epsilon_high: the ratio is clipped to 1 - epsilon_low … 1 + epsilon_high; cispo: to at most
                epsilon_high. delta: its bound where the advantage is negative.
            loss_type: grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo, vespo.
            max_completion_length: of dr_grpo.
            importance_sampling_level: "token", or "sequence" (not for cispo, sapo, vespo).
            sapo_temperature_pos, ..._neg, vespo_k_pos, vespo_lambda_pos, ..._neg: by the advantage's sign.

    Returns:
        The loss and a tuple of metrics: the mean KL divergence where beta is not 0, the mean entropy if asked for, the
        fraction of clipped tokens.

    Raises:
        ValueError: shapes or options that don't fit.
    """
    name, o = "linear_grpo_loss", GRPOOptions(**options)
    _check_head(name, hidden, selected_token_ids)
    ids, given = selected_token_ids, use_ref_model and ref_per_token_logps is not None
    plan = _grpo_plan(
        name, ids.shape, hidden, attention_mask, advantages, old_per_token_logps,
        ref_per_token_logps if given else None, vllm_is_ratio, num_items_in_batch, o, entropy_coef,
    )  # fmt: skip
    return plan
