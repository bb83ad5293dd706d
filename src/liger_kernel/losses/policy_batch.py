"""A batch of a policy loss: its tensors are checked, and all that does not need the
log-probabilities is prepared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from liger_kernel.core import check
from liger_kernel.core.op import flatten_to_2d
from liger_kernel.losses.policy_math import (
    LEVELS,
    POLICIES,
    REDUCTIONS,
    GRPOOptions,
    TokenTensors,
    couples_tokens,
    fill_invalid,
    fixed_length,
    k3,
    leave_one_out,
    log_inference_ratio_of_sequence,
    mean_of_sequences,
    mean_of_tokens,
    sum_of_tokens,
)
from liger_kernel.losses.policy_tokens import policy_terms
from liger_kernel.ops.head.grouped_loss import linear_loss

IGNORE_INDEX = -100
REAL_DTYPES = (*check.FLOAT_DTYPES, *check.INTEGER_DTYPES, torch.bool)


@dataclass(frozen=True)
class PolicyInputs:
    """The tensors of a call beside the policy's own log-probabilities, under the caller's names.

    phi_seq: VESPO's weights; None: not known yet.
    """

    attention_mask: torch.Tensor
    advantages: torch.Tensor
    old_per_token_logps: torch.Tensor | None = None
    ref_per_token_logps: torch.Tensor | None = None
    vllm_is_ratio: torch.Tensor | None = None
    num_items_in_batch: int | torch.Tensor | None = None
    phi_seq: torch.Tensor | None = None


@dataclass(frozen=True)
class PolicyBatch:
    """A policy loss that only needs the log-probabilities now.

    value_fn: ``value_fn(log_probs, entropy, tokens)`` returns the loss and a list of metrics.
    valid: (B, T), the positions that have an influence.
    couples_tokens: a token's loss depends on the other tokens of its sequence.
    """

    value_fn: Callable
    tokens: TokenTensors
    valid: torch.Tensor
    couples_tokens: bool = False

    def loss_from_log_probs(self, log_probs, entropy):
        """Return the loss and a tuple of metrics."""
        log_probs = fill_invalid(log_probs, self.valid)
        entropy = fill_invalid(entropy, self.valid)
        loss, metrics = self.value_fn(log_probs, entropy, self.tokens)
        return loss, tuple(x.detach() for x in metrics)

    def loss_from_hidden(self, hidden, weight, ids, bias, **head_options):
        """Return the loss and a tuple of metrics.

        `linear_loss` computes the log-probabilities in chunks.
        """
        target = fill_invalid(ids, self.valid, IGNORE_INDEX)
        tokens = self.tokens
        if not self.couples_tokens:  # each token is a group, so a chunk may end anywhere
            hidden = flatten_to_2d(hidden)
            target = target.reshape(-1)
            tokens = tokens.map(lambda x: x.expand(ids.shape).reshape(-1))

        def chunk_loss(groups, log_probs, entropy):
            chunk_tokens = tokens.map(lambda x: x[groups])
            loss, metrics = self.value_fn(log_probs, entropy, chunk_tokens)
            return loss, *metrics

        loss, *metrics = linear_loss(
            chunk_loss,
            hidden,
            weight,
            target,
            bias,
            ignore_index=IGNORE_INDEX,
            few=3,
            **head_options,
        )
        return loss, tuple(metrics)


def to_rows(like, *tensors):
    """Return the tensors as (B, T) or (B, 1), detached, in ``like``'s dtype but at least fp32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    rows = []
    for x in tensors:
        if x is not None:
            x = x.detach().resolve_neg().to(dtype)
            if x.dim() != 2:
                x = x[:, None]
        rows.append(x)
    return rows


# ---- the losses' contributions of some tokens, and their metrics ----


def grpo_value(options, entropy_coef, log_probs, entropy, tokens):
    """Return GRPO's loss and its metrics.

    The metrics: KL unless beta is 0, the entropy unless it is None, the share of clipped tokens.
    """
    token_loss, kl, is_clipped = policy_terms(log_probs, tokens, options)
    loss_weights = tokens.loss_weights
    metric_weights = tokens.metric_weights
    loss = (loss_weights * token_loss).sum()
    metrics = []
    if options.beta != 0:
        metrics.append(metric_weights.new_zeros(()) if kl is None else (metric_weights * kl).sum())
    if entropy is not None:
        loss = loss - entropy_coef * (loss_weights * entropy).sum()
        metrics.append((metric_weights * entropy).sum())
    return loss, [*metrics, (metric_weights * is_clipped).sum()]


def ppo_value(options, entropy_coef, log_probs, entropy, tokens):
    """Return PPO's loss (1707.06347) and its metrics.

    The metrics: KL, the share of clipped tokens, the entropy unless it is None.
    """
    surrogate, _, is_clipped = policy_terms(log_probs, tokens, options)
    loss = (tokens.loss_weights * surrogate).sum()
    kl = k3(tokens.old_log_probs, log_probs.detach())
    metric_weights = tokens.metric_weights
    metrics = [(metric_weights * kl).sum(), (metric_weights * is_clipped).sum()]
    return _subtract_entropy(loss, metrics, entropy_coef, entropy, metric_weights)


def reinforce_value(entropy_coef, log_probs, entropy, tokens):
    """Return the loss of REINFORCE (Williams, 1992), and the entropy as a metric unless None."""
    loss = -(tokens.loss_weights * tokens.advantages * log_probs).sum()
    return _subtract_entropy(loss, [], entropy_coef, entropy, tokens.metric_weights)


def _subtract_entropy(loss, metrics, entropy_coef, entropy, metric_weights):
    if entropy is None:
        return loss, metrics
    mean_entropy = (metric_weights * entropy).sum()
    return loss - entropy_coef * mean_entropy, [*metrics, mean_entropy]


# ---- checks ----


def check_rows(name, like, shape, **requirements):
    """Check tensors that belong to the tokens of a batch, which has this shape (B, T).

    ``requirements``: ``argument=(x, shapes, dtypes)``. x must have one of these shapes and dtypes,
    and be on the device of ``like``. ``shapes`` are words: "BT", "B", "B1", "None".
    """
    B = shape[0]
    shape_by_word = {"BT": tuple(shape), "B": (B,), "B1": (B, 1), "None": None}
    for argument, (x, words, dtypes) in requirements.items():
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: {argument} is a {type(x).__name__}, give a tensor")
        actual_shape = None if x is None else tuple(x.shape)
        valid_shapes = [shape_by_word[word] for word in words.split()]
        if actual_shape not in valid_shapes:
            expected = " or ".join(map(str, valid_shapes))
            raise check.InvalidArgument(
                f"{name}: {argument} has shape {actual_shape}, "
                f"give {expected} for tokens {tuple(shape)}"
            )
        if x is None:
            continue
        if x.dtype not in dtypes:
            is_float = dtypes is check.FLOAT_DTYPES
            expected = "a floating point tensor" if is_float else "real numbers"
            raise TypeError(f"{name}: {argument} is {x.dtype}, give {expected}")
        if x.device != like.device:
            raise ValueError(
                f"{name}: {argument} is on {x.device}, the policy's outputs on {like.device}, "
                "move it there"
            )


def check_tokens(name, hidden, ids, argument="the hidden states"):
    check.floats(name, {argument: hidden})
    check.integers(name, dict(selected_token_ids=ids))
    if hidden.dim() != 3 or ids.shape != hidden.shape[:2]:
        raise ValueError(
            f"{name}: {argument} has shape {tuple(hidden.shape)}, "
            f"selected_token_ids {tuple(ids.shape)}, give (B, T, hidden size) and (B, T)"
        )


def check_log_probs(name, log_probs, entropy):
    check.floats(name, dict(log_probs=log_probs), entropy=entropy)
    if log_probs.dim() != 2:
        raise ValueError(f"{name}: log_probs has shape {tuple(log_probs.shape)}, give (B, T)")
    check.shape(name, "entropy", entropy, tuple(log_probs.shape))


def _check_length(name, reduction, options):
    if reduction is fixed_length and not options.max_completion_length:
        raise check.InvalidArgument(
            f"{name}: max_completion_length is {options.max_completion_length}, give the divisor"
        )


def check_grpo(name, like, shape, options, entropy_coef, inputs):
    check.finite(name, "entropy_coef", entropy_coef)
    loss_type = options.loss_type
    if loss_type not in POLICIES:
        raise ValueError(f"{name}: loss_type is {loss_type!r}, give one of {', '.join(POLICIES)}")
    policy = POLICIES[loss_type]
    level = options.importance_sampling_level
    if level not in policy.levels:
        levels = " or ".join(map(repr, policy.levels))
        raise ValueError(
            f"{name}: importance_sampling_level is {level!r}, give {levels} for {loss_type}"
        )
    _check_length(name, policy.reduction, options)
    check_rows(
        name,
        like,
        shape,
        attention_mask=(inputs.attention_mask, "BT", REAL_DTYPES),
        advantages=(inputs.advantages, "B BT", REAL_DTYPES),
        old_per_token_logps=(inputs.old_per_token_logps, "BT None", check.FLOAT_DTYPES),
        ref_per_token_logps=(inputs.ref_per_token_logps, "BT None", check.FLOAT_DTYPES),
        vllm_is_ratio=(inputs.vllm_is_ratio, "B B1 BT None", check.FLOAT_DTYPES),
    )


# ---- the batches of the losses ----


def grpo_batch(options, entropy_coef, like, inputs):
    """Prepare a batch of tensors that `check_grpo` has passed."""
    policy = POLICIES[options.loss_type]
    by_sequence = options.importance_sampling_level == "sequence"
    valid = inputs.attention_mask.bool()
    mask, advantages, old, ref, inference_ratio, vespo_weights = to_rows(
        like,
        inputs.attention_mask,
        inputs.advantages,
        inputs.old_per_token_logps,
        inputs.ref_per_token_logps if options.beta != 0 else None,
        inputs.vllm_is_ratio,
        inputs.phi_seq,
    )
    sequence_weights = None
    if policy.couples_tokens:
        sequence_weights = mask
    elif by_sequence:
        sequence_weights = mask / mask.sum(-1, keepdim=True).clamp(min=1)
    inference_ratio = fill_invalid(inference_ratio, valid, 1)
    if policy.couples_tokens and inference_ratio is not None:
        inference_ratio = log_inference_ratio_of_sequence(inference_ratio)
    tokens = TokenTensors(
        loss_weights=policy.reduction(mask, options, inputs.num_items_in_batch),
        metric_weights=mean_of_tokens(mask),
        advantages=fill_invalid(advantages, valid),
        sequence_weights=sequence_weights,
        old_log_probs=fill_invalid(old, valid),
        ref_log_probs=fill_invalid(ref, valid),
        inference_ratio=inference_ratio,
        vespo_weights=fill_invalid(vespo_weights, valid),
    )
    value_fn = functools.partial(grpo_value, options, entropy_coef)
    return PolicyBatch(value_fn, tokens, valid, couples_tokens(options))


def ppo_batch(name, like, shape, options, entropy_coef, inputs, reduction):
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction is {reduction!r}, give one of {', '.join(REDUCTIONS)}")
    reduction = REDUCTIONS[reduction]
    _check_length(name, reduction, options)
    check.finite(name, "entropy_coef", entropy_coef)
    check_rows(
        name,
        like,
        shape,
        attention_mask=(inputs.attention_mask, "BT", REAL_DTYPES),
        advantages=(inputs.advantages, "B BT", REAL_DTYPES),
        old_per_token_logps=(inputs.old_per_token_logps, "BT", check.FLOAT_DTYPES),
    )
    valid = inputs.attention_mask.bool()
    mask, advantages, old = to_rows(
        like, inputs.attention_mask, inputs.advantages, inputs.old_per_token_logps
    )
    tokens = TokenTensors(
        loss_weights=reduction(mask, options, inputs.num_items_in_batch),
        metric_weights=mean_of_tokens(mask),
        advantages=fill_invalid(advantages, valid),
        old_log_probs=fill_invalid(old, valid),
    )
    return PolicyBatch(functools.partial(ppo_value, options, entropy_coef), tokens, valid)


def rloo_batch(name, like, shape, clip, entropy_coef, inputs, samples_per_prompt, level):
    """Check and prepare a batch of RLOO.

    ``inputs.advantages`` are the rewards; ``clip`` is (epsilon_low, epsilon_high).
    """
    k = samples_per_prompt
    check.finite(name, "entropy_coef", entropy_coef)
    if isinstance(k, bool) or not isinstance(k, int) or k < 2 or shape[0] % k:
        raise ValueError(
            f"{name}: samples_per_prompt is {k!r}, give a number from 2 on that divides {shape[0]}"
        )
    if level not in LEVELS:
        raise ValueError(f"{name}: level is {level!r}, give 'sequence' or 'token'")
    check_rows(
        name,
        like,
        shape,
        attention_mask=(inputs.attention_mask, "BT", REAL_DTYPES),
        rewards=(inputs.advantages, "B", REAL_DTYPES),
        old_per_token_logps=(inputs.old_per_token_logps, "BT None", check.FLOAT_DTYPES),
    )
    by_sequence = level == "sequence"
    valid = inputs.attention_mask.bool()
    mask, rewards, old = to_rows(
        like, inputs.attention_mask, inputs.advantages, inputs.old_per_token_logps
    )
    advantages = fill_invalid(leave_one_out(rewards[:, 0], k)[:, None], valid)
    metric_weights = mean_of_tokens(mask)
    if old is None:
        loss_weights = sum_of_tokens(mask) if by_sequence else metric_weights
        tokens = TokenTensors(loss_weights, metric_weights, advantages)
        return PolicyBatch(functools.partial(reinforce_value, entropy_coef), tokens, valid)
    options = GRPOOptions(0.0, *clip, importance_sampling_level=level)
    tokens = TokenTensors(
        loss_weights=mean_of_sequences(mask, options) if by_sequence else metric_weights,
        metric_weights=metric_weights,
        advantages=advantages,
        sequence_weights=mask if by_sequence else None,
        old_log_probs=fill_invalid(old, valid),
    )
    value_fn = functools.partial(ppo_value, options, entropy_coef)
    return PolicyBatch(value_fn, tokens, valid, by_sequence)
