"""A batch of a policy loss: its tensors checked, and everything prepared that does not need the
log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from liger_kernel.core import check
from liger_kernel.core.op import matrix
from liger_kernel.losses.policy_math import (
    BOTH,
    POLICIES,
    REDUCTIONS,
    GRPOOptions,
    Rows,
    fixed_length,
    grpo_value,
    leave_one_out,
    log_of_sequence,
    mean_of_sequences,
    mean_of_tokens,
    only,
    ppo_value,
    reinforce_value,
    sum_of_tokens,
)
from liger_kernel.ops.head.grouped_loss import linear_loss

IGNORED = -100
REAL = (*check.FLOATS, *check.INTEGERS, torch.bool)


@dataclass(frozen=True)
class Given:
    """The tensors that a caller gives in addition to the log-probabilities, under the caller's
    names."""

    attention_mask: torch.Tensor
    advantages: torch.Tensor
    old_per_token_logps: torch.Tensor | None = None
    ref_per_token_logps: torch.Tensor | None = None
    vllm_is_ratio: torch.Tensor | None = None
    num_items_in_batch: int | torch.Tensor | None = None
    phi_seq: torch.Tensor | None = None  # VESPO's weights, if they are known already


@dataclass(frozen=True)
class Batch:
    """A loss that only needs the log-probabilities now."""

    value: Callable  # (log_probs, entropy, rows) -> value, metrics
    rows: Rows
    counted: torch.Tensor  # (B, T), the positions that have an influence
    couples: bool = False  # whether a token's loss depends on the other tokens of its sequence

    def of_log_probs(self, log_probs, entropy):
        """-> loss, tuple of metrics."""
        value, metrics = self.value(
            only(self.counted, log_probs), only(self.counted, entropy), self.rows
        )
        return value, tuple(x.detach() for x in metrics)

    def of_hidden(self, hidden, weight, ids, bias, **head):
        """-> loss, tuple of metrics: with log-probabilities that `linear_loss` computes in
        chunks."""
        target, rows = only(self.counted, ids, IGNORED), self.rows
        if not self.couples:  # each token is a group, so a chunk may end anywhere
            hidden, target = matrix(hidden), target.reshape(-1)
            rows = rows.each(lambda x: x.expand(ids.shape).reshape(-1))

        def fn(part, log_probs, entropy):
            value, metrics = self.value(log_probs, entropy, rows.each(lambda x: x[part]))
            return value, *metrics

        head |= dict(ignore_index=IGNORED, few=3)
        loss, *metrics = linear_loss(fn, hidden, weight, target, bias, **head)
        return loss, tuple(metrics)


def widened(like, *tensors):
    """The tensors as (B, T) or (B, 1), without gradients, in ``like``'s dtype but at least fp32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    tensors = [x if x is None else x.detach().to(dtype) for x in tensors]
    return [x if x is None or x.dim() == 2 else x[:, None] for x in tensors]


# ---- checks ----


def check_rows(name, like, shape, **given):
    """``argument=(x, shapes, dtypes)``: x has one of these shapes and dtypes, and is on the device
    of ``like``.

    ``shapes`` are words: "BT", "B", "B1", "None".
    """
    B = shape[0]
    shapes = {"BT": tuple(shape), "B": (B,), "B1": (B, 1), "None": None}
    for argument, (x, kinds, dtypes) in given.items():
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: {argument} is a {type(x).__name__}, give a tensor")
        has, fitting = (
            None if x is None else tuple(x.shape),
            [shapes[kind] for kind in kinds.split()],
        )
        if has not in fitting:
            fitting = " or ".join(map(str, fitting))
            raise check.Misfit(
                f"{name}: {argument} has shape {has}, give {fitting} for tokens {tuple(shape)}"
            )
        if x is not None and x.dtype not in dtypes:
            wanted = "a floating point tensor" if dtypes is check.FLOATS else "real numbers"
            raise TypeError(f"{name}: {argument} is {x.dtype}, give {wanted}")
        if x is not None and x.device != like.device:
            raise ValueError(
                f"{name}: {argument} is on {x.device}, the policy's outputs on {like.device}, move it there"
            )


def check_tokens(name, hidden, ids, argument="the hidden states"):
    check.floats(name, {argument: hidden})
    check.integers(name, dict(selected_token_ids=ids))
    if hidden.dim() != 3 or ids.shape != hidden.shape[:2]:
        raise ValueError(
            f"{name}: {argument} has shape {tuple(hidden.shape)}, selected_token_ids {tuple(ids.shape)}, give "
            "(B, T, hidden size) and (B, T)"
        )


def check_log_probs(name, log_probs, entropy):
    check.floats(name, dict(log_probs=log_probs), entropy=entropy)
    if log_probs.dim() != 2:
        raise ValueError(f"{name}: log_probs has shape {tuple(log_probs.shape)}, give (B, T)")
    check.shape(name, "entropy", entropy, tuple(log_probs.shape))


def _check_length(name, weights, o):
    if weights is fixed_length and not o.max_completion_length:
        raise check.Misfit(
            f"{name}: max_completion_length is {o.max_completion_length}, give the divisor"
        )


def check_grpo(name, like, shape, o, coef, given):
    check.finite(name, "entropy_coef", coef)
    if o.loss_type not in POLICIES:
        raise ValueError(f"{name}: loss_type is {o.loss_type!r}, give one of {', '.join(POLICIES)}")
    policy, level = POLICIES[o.loss_type], o.importance_sampling_level
    if level not in policy.levels:
        levels = " or ".join(map(repr, policy.levels))
        raise ValueError(
            f"{name}: importance_sampling_level is {level!r}, give {levels} for {o.loss_type}"
        )
    _check_length(name, policy.weights, o)
    check_rows(
        name,
        like,
        shape,
        attention_mask=(given.attention_mask, "BT", REAL),
        advantages=(given.advantages, "B BT", REAL),
        old_per_token_logps=(given.old_per_token_logps, "BT None", check.FLOATS),
        ref_per_token_logps=(given.ref_per_token_logps, "BT None", check.FLOATS),
        vllm_is_ratio=(given.vllm_is_ratio, "B B1 BT None", check.FLOATS),
    )


# ---- the batches of the losses ----


def grpo_batch(o, coef, like, given):
    """Prepare a batch of tensors that `check_grpo` has passed."""
    policy, sequence = POLICIES[o.loss_type], o.importance_sampling_level == "sequence"
    counted = given.attention_mask.bool()
    ref = given.ref_per_token_logps if o.beta != 0 else None
    mask, advantages, old, ref, ratio, phi = widened(
        like,
        given.attention_mask,
        given.advantages,
        given.old_per_token_logps,
        ref,
        given.vllm_is_ratio,
        given.phi_seq,
    )
    advantages, old, ref, phi = (only(counted, x) for x in (advantages, old, ref, phi))
    ratio = only(counted, ratio, 1)
    pool = (
        mask
        if policy.couples
        else mask / mask.sum(-1, keepdim=True).clamp(min=1)
        if sequence
        else None
    )
    if policy.couples and ratio is not None:
        ratio = log_of_sequence(ratio)
    weights, share = policy.weights(mask, o, given.num_items_in_batch), mean_of_tokens(mask)
    rows = Rows(weights, share, advantages, pool, old, ref, ratio, phi)
    return Batch(functools.partial(grpo_value, o, coef), rows, counted, sequence or policy.couples)


def ppo_batch(name, like, shape, o, coef, given, reduction):
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction is {reduction!r}, give one of {', '.join(REDUCTIONS)}")
    _check_length(name, REDUCTIONS[reduction], o)
    check.finite(name, "entropy_coef", coef)
    check_rows(
        name,
        like,
        shape,
        attention_mask=(given.attention_mask, "BT", REAL),
        advantages=(given.advantages, "B BT", REAL),
        old_per_token_logps=(given.old_per_token_logps, "BT", check.FLOATS),
    )
    counted = given.attention_mask.bool()
    mask, advantages, old = widened(
        like, given.attention_mask, given.advantages, given.old_per_token_logps
    )
    weights, share = REDUCTIONS[reduction](mask, o, given.num_items_in_batch), mean_of_tokens(mask)
    rows = Rows(weights, share, only(counted, advantages), old=only(counted, old))
    return Batch(functools.partial(ppo_value, o, coef), rows, counted)


def rloo_batch(name, like, shape, clip, coef, given, samples_per_prompt, level):
    """``given.advantages`` are the rewards; ``clip`` is epsilon_low and epsilon_high."""
    k = samples_per_prompt
    check.finite(name, "entropy_coef", coef)
    if isinstance(k, bool) or not isinstance(k, int) or k < 2 or shape[0] % k:
        raise ValueError(
            f"{name}: samples_per_prompt is {k!r}, give a number from 2 on that divides {shape[0]}"
        )
    if level not in BOTH:
        raise ValueError(f"{name}: level is {level!r}, give 'sequence' or 'token'")
    check_rows(
        name,
        like,
        shape,
        attention_mask=(given.attention_mask, "BT", REAL),
        rewards=(given.advantages, "B", REAL),
        old_per_token_logps=(given.old_per_token_logps, "BT None", check.FLOATS),
    )
    counted, sequence = given.attention_mask.bool(), level == "sequence"
    mask, rewards, old = widened(
        like, given.attention_mask, given.advantages, given.old_per_token_logps
    )
    advantages, share = leave_one_out(rewards[:, 0], k)[:, None], mean_of_tokens(mask)
    if old is None:
        weights = sum_of_tokens(mask) if sequence else share
        rows = Rows(weights, share, only(counted, advantages))
        return Batch(functools.partial(reinforce_value, coef), rows, counted)
    o = GRPOOptions(0.0, *clip)
    weights, pool = (mean_of_sequences(mask, o), mask) if sequence else (share, None)
    rows = Rows(weights, share, only(counted, advantages), pool, only(counted, old))
    return Batch(functools.partial(ppo_value, o, coef), rows, counted, sequence)
