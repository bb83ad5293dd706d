r"""Policy losses: GRPO and its variants, PPO and RLOO.

Each loss has two functions. One takes the log-probabilities of the sampled tokens (`grpo_loss`,
`ppo_loss`, `rloo_loss`). The other takes hidden states and the weight of the head
(`linear_grpo_loss`, ...): it computes the log-probabilities in chunks, so all logits are never in
memory at once. The classes have the names and signatures that trainers use. `policy_math` has the
formulas."""

from __future__ import annotations

import functools
import warnings
from dataclasses import fields, replace

import torch

from liger_kernel.core import check
from liger_kernel.losses.function import GradientsInForward
from liger_kernel.losses.module import LossModule, without
from liger_kernel.losses.policy_batch import (
    IGNORED,
    REAL,
    Given,
    check_grpo,
    check_log_probs,
    check_rows,
    check_tokens,
    grpo_batch,
    only,
    ppo_batch,
    rloo_batch,
)
from liger_kernel.losses.policy_math import *  # noqa: F403  (the names there are names here, too)
from liger_kernel.losses.policy_math import GRPOOptions
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.token_log_probs import token_log_probs

_GRPO_OPTIONS = tuple(field.name for field in fields(GRPOOptions))  # Dynamo has no `fields`


def _named(loss, metrics, *names):
    """The metrics as a dict. The entropy comes last, and only if it was asked for."""
    return loss, dict(zip(names, metrics, strict=False))


# ---- GRPO ----


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
    """GRPO and its variants for log-probabilities that are already there: `linear_grpo_loss`
    without the head.

    Args:
        log_probs: (B, T), differentiable.
        entropy: (B, T), differentiable. None: no entropy bonus, and no entropy among the metrics.
        The rest as in `linear_grpo_loss`. Without ``ref_per_token_logps`` the KL divergence is 0.

    Returns, raises: as `linear_grpo_loss`.
    """
    name, o = "grpo_loss", GRPOOptions(**options)
    given = Given(
        attention_mask,
        advantages,
        old_per_token_logps,
        ref_per_token_logps,
        vllm_is_ratio,
        num_items_in_batch,
    )
    check_log_probs(name, log_probs, entropy)
    check_grpo(name, log_probs, log_probs.shape, o, entropy_coef, given)
    return grpo_batch(o, entropy_coef, log_probs, given).of_log_probs(log_probs, entropy)


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
    """GRPO and its variants from the policy's hidden states. All logits are never in memory at
    once.

    The gradients for hidden, weight and bias are computed in this call. Positions where the mask is
    0 have no influence, as long as the hidden states there are finite. (Of luspo liger-kernel 0.8.5
    counts them.)

    Args:
        hidden: (B, T, H), fp32, bf16, fp16 or fp64, any strides. weight, bias: (V, H) and (V,), of
        the head.
        selected_token_ids: (B, T) integers, the sampled tokens.
        attention_mask: (B, T), 1 for tokens that count, 0 elsewhere.
        advantages: (B,) or (B, T).
        ref_per_token_logps: (B, T), the reference model's log-probabilities. In their place you can
        give ref_input
            (B, T, H_ref), ref_weight and ref_bias. They are not used if beta is 0.
        use_ref_model: False: no reference, even if one is given; the KL divergence is then 0.
        old_per_token_logps: (B, T), of the policy that sampled. None: of this policy, without
        gradient.
        vllm_is_ratio: (B,), (B, 1) or (B, T), importance weights that correct for the inference
        engine.
        num_items_in_batch: for dapo, cispo and vespo: the number of tokens of all ranks and
        accumulation steps, a
            number or a tensor of one element. None: the tokens of this call on all ranks.
        temperature: the logits are divided by it.
        entropy_coef: this times the entropy, reduced like the loss, is subtracted from the loss.
        return_entropy: the mean entropy is among the metrics. It always is if ``entropy_coef`` is
        not 0.
        memory, drop_ignored: as in `linear_loss`.
        options: the fields of `GRPOOptions`:
            beta: factor of the KL divergence. use_bias_correction_kl: multiply the KL divergence by
            the ratio.
            loss_type: grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo or vespo.
            epsilon_low, epsilon_high: the ratio is clipped at 1 - epsilon_low and 1 + epsilon_high;
            cispo clips it at
                epsilon_high.
            delta: upper bound of the ratio where the advantage is negative (not for cispo, sapo,
            vespo).
            max_completion_length: dr_grpo divides by it.
            importance_sampling_level: "token" or "sequence", the level of the ratio (not for cispo,
            sapo, vespo).
            sapo_temperature_pos, sapo_temperature_neg, vespo_k_pos, vespo_lambda_pos, vespo_k_neg,
            vespo_lambda_neg:
                for positive and for negative advantages.

    Returns:
        The loss and a tuple of metrics: the mean KL divergence unless beta is 0, the mean entropy
        if asked for, and
        the share of clipped tokens. All are 0-d, in fp32 or fp64. The metrics have no gradients.

    Raises:
        ValueError: shapes or options that do not fit; no reference. TypeError: a wrong dtype. No
        reference, a
            vllm_is_ratio of another shape and no length for dr_grpo are AssertionErrors, too.

    Source: the papers in `policy_math`.
    """
    name, o, ids = "linear_grpo_loss", GRPOOptions(**options), selected_token_ids
    check_tokens(name, hidden, ids)
    ref = ref_per_token_logps if use_ref_model else None
    given = Given(
        attention_mask, advantages, old_per_token_logps, ref, vllm_is_ratio, num_items_in_batch
    )
    check_grpo(name, hidden, ids.shape, o, entropy_coef, given)
    head = dict(temperature=temperature, memory=memory, drop_ignored=drop_ignored)
    if use_ref_model:
        ref = _reference(
            name,
            ids,
            attention_mask.bool(),
            o.beta != 0,
            ref,
            ref_input,
            ref_weight,
            ref_bias,
            **head,
        )
    batch = grpo_batch(o, entropy_coef, hidden, replace(given, ref_per_token_logps=ref))
    return batch.of_hidden(
        hidden, weight, ids, bias, return_entropy=return_entropy or entropy_coef != 0, **head
    )


def _reference(name, ids, counted, needed, given, hidden, weight, bias, **head):
    """The reference's log-probabilities: those given, or computed from its hidden states if they
    are needed."""
    if given is None and needed and (hidden is None or weight is None):
        raise check.Misfit(
            f"{name}: use_ref_model is True without a reference, give ref_per_token_logps, or ref_input and "
            "ref_weight, or use_ref_model=False"
        )
    if given is not None and hidden is not None:
        what = "ref_per_token_logps and ref_input are both given, ref_per_token_logps are used"
        warnings.warn(f"{name}: {what}", stacklevel=4)
    if given is not None or not needed:
        return given
    check_tokens(name, hidden, ids, "ref_input")
    with torch.no_grad():
        return token_log_probs(
            hidden, weight, only(counted, ids, IGNORED), bias, ignore_index=IGNORED, **head
        )


class _WithClass(staticmethod):
    """A static method ``forward(cls, ctx, ...)`` to which the class is added where the caller
    leaves it out.

    `apply` leaves it out; a subclass's ``super().forward(cls, ctx, ...)`` does not.
    """

    def __get__(self, instance, owner=None):
        forward = super().__get__(instance, owner)

        @functools.wraps(forward)
        def call(*args, **kwargs):
            told = "cls" in kwargs or (args and isinstance(args[0], type))
            return forward(*args, **kwargs) if told else forward(owner, *args, **kwargs)

        return call


class LigerFusedLinearPPOBase(GradientsInForward):
    """The base of your own policy loss: subclass it, define ``ppo_loss_fn``, and call ``apply``.

    ``apply`` takes the arguments of ``forward``, without cls and ctx. A subclass that defines its
    own ``forward`` calls ``super().forward(cls=cls, ctx=ctx, ...)``."""

    WHERE = 0, 1, 5

    @staticmethod
    def ppo_loss_fn(
        per_token_logps,
        attention_mask,
        advantages,
        full_attention_mask,
        selected_token_ids=None,
        ref_per_token_logps=None,
        old_per_token_logps=None,
        vllm_is_ratio=None,
        num_items_in_batch=None,
        **options,
    ):
        """The loss of n of the batch's sequences. It is called one or more times, with keyword
        arguments.

        Args:
            per_token_logps: (n, T), differentiable, 0 where the mask is 0.
            attention_mask: (n, T). advantages: (n, ...). These and the optional tensors belong to
            the n sequences.
            full_attention_mask: (B, T), the mask of the whole batch. Divide by its sum, for
            example.
            options: the other arguments of ``forward``, from epsilon_low on.

        Returns:
            What these sequences add to the loss, 0-d, and a list of metrics. Over the calls, losses
            and 0-d metrics are
            summed; other metrics are concatenated.
        """
        raise NotImplementedError("LigerFusedLinearPPOBase: give ppo_loss_fn in a subclass")

    @classmethod
    def loss(
        cls,
        hidden,
        weight,
        selected_token_ids,
        attention_mask,
        advantages,
        bias,
        ref_per_token_logps,
        old_per_token_logps,
        ref_input,
        ref_weight,
        ref_bias,
        *,
        vllm_is_ratio,
        num_items_in_batch,
        use_ref_model,
        temperature,
        **options,
    ):
        """-> loss, metrics: differentiable in hidden, weight and bias."""
        name, ids = cls.__name__, selected_token_ids
        check_tokens(name, hidden, ids)
        check_rows(name, hidden, ids.shape, attention_mask=(attention_mask, "BT", REAL))
        counted, ref = attention_mask.bool(), None
        if use_ref_model:
            reference = ref_per_token_logps, ref_input, ref_weight, ref_bias
            ref = _reference(
                name, ids, counted, options["beta"] != 0, *reference, temperature=temperature
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

        target = only(counted, ids, IGNORED)
        head = dict(temperature=temperature, ignore_index=IGNORED, few=3)
        loss, *metrics = linear_loss(fn, hidden, weight, target, bias, **head)
        return loss, tuple(metrics)

    @_WithClass
    def forward(
        cls,
        ctx,
        _input,
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
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.04,
        loss_type="dapo",
        max_completion_length=None,
        importance_sampling_level="token",
        temperature=1.0,
        compiled=True,
        use_ref_model=False,
        chunk_size=1,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vllm_is_ratio=None,
        delta=None,
        use_bias_correction_kl=False,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        num_items_in_batch=None,
    ):
        """-> loss, tuple of metrics. `linear_grpo_loss` explains the arguments.

        ``compiled`` and ``chunk_size`` have no effect: the chunks follow from the memory.
        """
        arguments = without(
            locals(), "cls", "ctx", "_input", "weight", "bias", "compiled", "chunk_size"
        )

        def loss(h, w, b):
            value, metrics = cls.loss(h, w, bias=b, **arguments)
            return value, *metrics

        value, *metrics = cls.take(ctx, loss, _input, weight, bias)
        return value, tuple(metrics)


class LigerFusedLinearGRPOFunction(LigerFusedLinearPPOBase):
    """``apply(_input, weight, selected_token_ids, attention_mask, advantages, ...) -> loss, tuple
    of metrics``.

    `linear_grpo_loss` explains the arguments; ``compiled`` and ``chunk_size`` have no effect.
    """

    loss = staticmethod(linear_grpo_loss)

    @classmethod
    def forward(
        cls,
        ctx,
        _input,
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
        beta=0.04,
        epsilon_low=0.2,
        epsilon_high=0.2,
        loss_type="dapo",
        max_completion_length=None,
        importance_sampling_level="token",
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        temperature=1.0,
        compiled=True,
        use_ref_model=True,
        chunk_size=1,
        vllm_is_ratio=None,
        delta=None,
        use_bias_correction_kl=False,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        num_items_in_batch=None,
    ):
        return LigerFusedLinearPPOBase.forward(**locals())


liger_fused_linear_grpo = LigerFusedLinearGRPOFunction.apply


class LigerFusedLinearGRPOLoss(LossModule):
    """GRPO and its variants as a module: `linear_grpo_loss`, with options that are given once.

    Args:
        compiled, chunk_size: no effect: the chunks follow from ``memory``.
        The others as in `linear_grpo_loss`.

    Raises:
        ValueError, TypeError: a number is out of range, or not a number. Other options are checked
        at each call.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        *,
        entropy_coef: float = 0.0,
        return_entropy: bool = False,
        memory: int | str = "auto",
        drop_ignored: bool | None = None,
    ) -> None:
        super().__init__(locals())
        GRPOOptions(**{name: getattr(self, name) for name in _GRPO_OPTIONS})  # raises

    def forward(
        self,
        _input: torch.Tensor,
        lin_weight: torch.Tensor,
        selected_token_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        advantages: torch.Tensor,
        bias: torch.Tensor | None = None,
        ref_per_token_logps: torch.Tensor | None = None,
        old_per_token_logps: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None,
        ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None,
        vllm_is_ratio: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
    ):
        """Shapes, metrics and errors: `linear_grpo_loss`."""
        return linear_grpo_loss(
            _input,
            lin_weight,
            selected_token_ids,
            attention_mask,
            advantages,
            bias,
            ref_per_token_logps,
            old_per_token_logps,
            ref_input,
            ref_weight,
            ref_bias,
            vllm_is_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch,
            **self.options,
        )


# ---- PPO and RLOO ----

PPO_METRICS = "approx_kl", "clip_fraction", "entropy"
RLOO_METRICS = {True: ("entropy",), False: PPO_METRICS}  # by whether old_per_token_logps is None


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
    """PPO's policy loss for log-probabilities that are already there: `linear_ppo_loss` without the
    head.

    Args:
        log_probs: (B, T), differentiable.
        entropy: (B, T), differentiable. None: no entropy bonus, and no entropy among the metrics.
        The rest as in `linear_ppo_loss`.

    Returns, raises: as `linear_ppo_loss`.
    """
    name, o = (
        "ppo_loss",
        GRPOOptions(0.0, epsilon_low, epsilon_high, max_completion_length=max_completion_length),
    )
    check_log_probs(name, log_probs, entropy)
    given = Given(
        attention_mask, advantages, old_per_token_logps, num_items_in_batch=num_items_in_batch
    )
    batch = ppo_batch(name, log_probs, log_probs.shape, o, entropy_coef, given, reduction)
    return _named(*batch.of_log_probs(log_probs, entropy), *PPO_METRICS)


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
    """PPO's clipped policy loss from the policy's hidden states. All logits are never in memory at
    once.

    Args:
        hidden: (B, T, H), fp32, bf16, fp16 or fp64. weight, bias: (V, H) and (V,), of the head.
        selected_token_ids: (B, T) integers, the sampled tokens. attention_mask: (B, T), 1 for
        tokens that count.
        advantages: (B, T) or (B,). old_per_token_logps: (B, T), of the policy that sampled.
        epsilon_low, epsilon_high: the ratio is clipped at 1 - epsilon_low and 1 + epsilon_high.
        reduction: "tokens": the mean over the tokens. "sequences": the mean of the sequences'
        means. "all_tokens": the
            mean over all ranks' tokens, or over num_items_in_batch. "fixed_length": the sum,
            divided by
            B·max_completion_length.
        temperature: the logits are divided by it.
        entropy_coef: this times the tokens' mean entropy is subtracted from the loss.
        return_entropy: the mean entropy is among the metrics. It always is if ``entropy_coef`` is
        not 0.
        memory, drop_ignored: as in `linear_loss`.

    Returns:
        The loss, and a dict of metrics without gradients, all 0-d: "approx_kl", the KL divergence
        of the old policy
        from this one; "clip_fraction", the share of clipped tokens; "entropy", if asked for.

    Raises:
        ValueError: shapes or options that do not fit. TypeError: a wrong dtype.

    Source: Schulman et al., Proximal Policy Optimization Algorithms, arXiv:1707.06347.
    """
    name, ids = "linear_ppo_loss", selected_token_ids
    check_tokens(name, hidden, ids)
    o = GRPOOptions(0.0, epsilon_low, epsilon_high, max_completion_length=max_completion_length)
    given = Given(
        attention_mask, advantages, old_per_token_logps, num_items_in_batch=num_items_in_batch
    )
    batch = ppo_batch(name, hidden, ids.shape, o, entropy_coef, given, reduction)
    out = batch.of_hidden(
        hidden,
        weight,
        ids,
        bias,
        temperature=temperature,
        return_entropy=return_entropy or entropy_coef != 0,
        memory=memory,
        drop_ignored=drop_ignored,
    )
    return _named(*out, *PPO_METRICS)


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
    """RLOO for log-probabilities that are already there: `linear_rloo_loss` without the head.

    Args:
        log_probs: (B, T), differentiable.
        entropy: (B, T), differentiable. None: no entropy bonus, and no entropy among the metrics.
        The rest as in `linear_rloo_loss`.

    Returns, raises: as `linear_rloo_loss`.
    """
    name, clip = "rloo_loss", (epsilon_low, epsilon_high)
    check_log_probs(name, log_probs, entropy)
    given = Given(attention_mask, rewards, old_per_token_logps)
    batch = rloo_batch(
        name, log_probs, log_probs.shape, clip, entropy_coef, given, samples_per_prompt, level
    )
    return _named(
        *batch.of_log_probs(log_probs, entropy), *RLOO_METRICS[old_per_token_logps is None]
    )


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
    """REINFORCE leave-one-out (RLOO) from the policy's hidden states. All logits are never in
    memory at once.

    A sample's advantage is its reward minus the mean reward of the other samples of its prompt.

    Args:
        hidden: (B, T, H), fp32, bf16, fp16 or fp64. weight, bias: (V, H) and (V,), of the head.
        selected_token_ids: (B, T) integers, the sampled tokens. attention_mask: (B, T), 1 for
        tokens that count.
        rewards: (B,). The samples of one prompt are neighbours, ``samples_per_prompt`` of them.
        level: "sequence": the mean over sequences of -A·log p(sequence). "token": the mean over
        tokens of -A·log p.
        old_per_token_logps: (B, T), of the policy that sampled. If given, the loss is PPO's, with
        the ratio of the
            sequence or of each token, clipped at 1 - epsilon_low and 1 + epsilon_high.
        temperature: the logits are divided by it.
        entropy_coef: this times the tokens' mean entropy is subtracted from the loss.
        return_entropy: the mean entropy is among the metrics. It always is if ``entropy_coef`` is
        not 0.
        memory, drop_ignored: as in `linear_loss`.

    Returns:
        The loss, and a dict of metrics without gradients, all 0-d: "approx_kl" and "clip_fraction"
        with
        old_per_token_logps, "entropy" if asked for.

    Raises:
        ValueError: shapes or options that do not fit. TypeError: a wrong dtype.

    Source: Ahmadian et al., Back to Basics, arXiv:2402.14740.
    """
    name, ids, clip = "linear_rloo_loss", selected_token_ids, (epsilon_low, epsilon_high)
    check_tokens(name, hidden, ids)
    given = Given(attention_mask, rewards, old_per_token_logps)
    batch = rloo_batch(
        name, hidden, ids.shape, clip, entropy_coef, given, samples_per_prompt, level
    )
    out = batch.of_hidden(
        hidden,
        weight,
        ids,
        bias,
        temperature=temperature,
        return_entropy=return_entropy or entropy_coef != 0,
        memory=memory,
        drop_ignored=drop_ignored,
    )
    return _named(*out, *RLOO_METRICS[old_per_token_logps is None])
