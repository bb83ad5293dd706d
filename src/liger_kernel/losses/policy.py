r"""Policy losses under the names and signatures that trainers use: GRPO, PPO and RLOO.

Each loss has two functions. One takes the log-probabilities of the sampled tokens (`grpo_loss`,
`ppo_loss`, `rloo_loss`). The other takes hidden states and the weight of the head
(`linear_grpo_loss`, ...): it computes the log-probabilities in chunks, so all logits are never in
memory at once. They are in `grpo` and `ppo`, their formulas in `policy_math`.
"""

from __future__ import annotations

import functools
from dataclasses import fields

import torch

from liger_kernel.losses.function import GradientsInForward
from liger_kernel.losses.grpo import (
    Reference,
    grpo_loss,  # noqa: F401  (callers import it from here)
    linear_grpo_loss,
    reference_log_probs,
)
from liger_kernel.losses.module import LossModule, without
from liger_kernel.losses.policy_batch import IGNORE_INDEX, REAL_DTYPES, check_rows, check_tokens
from liger_kernel.losses.policy_math import *  # noqa: F403  (published modules have these names)
from liger_kernel.losses.policy_math import GRPOOptions, fill_invalid
from liger_kernel.losses.ppo import (  # noqa: F401  (callers import them from here)
    linear_ppo_loss,
    linear_rloo_loss,
    ppo_loss,
    rloo_loss,
)
from liger_kernel.ops.head.grouped_loss import linear_loss

GRPO_OPTION_NAMES = tuple(field.name for field in fields(GRPOOptions))  # Dynamo has no `fields`


class _OptionalClass(staticmethod):
    """A static method ``forward(cls, ctx, ...)`` that adds the class if the caller leaves it out.

    `apply` leaves it out; a subclass's ``super().forward(cls, ctx, ...)`` does not.
    """

    def __get__(self, instance, owner=None):
        forward = super().__get__(instance, owner)

        @functools.wraps(forward)
        def call(*args, **kwargs):
            has_class = "cls" in kwargs or (args and isinstance(args[0], type))
            return forward(*args, **kwargs) if has_class else forward(owner, *args, **kwargs)

        return call


class LigerFusedLinearPPOBase(GradientsInForward):
    """The base of your own policy loss: subclass it, define ``ppo_loss_fn``, and call ``apply``.

    ``apply`` takes the arguments of ``forward``, without cls and ctx. A subclass that defines its
    own ``forward`` calls ``super().forward(cls=cls, ctx=ctx, ...)``.
    """

    HEAD_ARGUMENTS = 0, 1, 5

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
        """Return the loss of n of the batch's sequences.

        It is called one or more times, with keyword arguments.

        Args:
            per_token_logps: (n, T), differentiable, 0 where the mask is 0.
            attention_mask: (n, T). It, advantages (n, ...) and the optional tensors belong to the n
                sequences.
            full_attention_mask: (B, T), the mask of the whole batch. Divide by its sum, for
                example.
            options: the other arguments of ``forward``, from epsilon_low on.

        Returns:
            The contribution of these sequences to the loss, 0-d, and a list of metrics. Over the
            calls, losses and 0-d metrics are summed; other metrics are concatenated.
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
        """Return the loss and its metrics, differentiable in hidden, weight and bias."""
        name = cls.__name__
        ids = selected_token_ids
        check_tokens(name, hidden, ids)
        check_rows(name, hidden, ids.shape, attention_mask=(attention_mask, "BT", REAL_DTYPES))
        valid = attention_mask.bool()
        ref_log_probs = None
        if use_ref_model:
            reference = Reference(ref_per_token_logps, ref_input, ref_weight, ref_bias)
            ref_log_probs = reference_log_probs(
                name, ids, valid, reference, options["beta"] != 0, temperature=temperature
            )
        tensors = {
            "attention_mask": attention_mask,
            "advantages": advantages,
            "selected_token_ids": ids,
            "ref_per_token_logps": ref_log_probs,
            "old_per_token_logps": old_per_token_logps,
            "vllm_is_ratio": vllm_is_ratio,
        }
        options["full_attention_mask"] = attention_mask
        options["num_items_in_batch"] = num_items_in_batch

        def chunk_loss(groups, log_probs, entropy):
            chunk_tensors = {k: x if x is None else x[groups] for k, x in tensors.items()}
            loss, metrics = cls.ppo_loss_fn(per_token_logps=log_probs, **chunk_tensors, **options)
            return loss, *metrics

        loss, *metrics = linear_loss(
            chunk_loss,
            hidden,
            weight,
            fill_invalid(ids, valid, IGNORE_INDEX),
            bias,
            temperature=temperature,
            ignore_index=IGNORE_INDEX,
            few=3,
        )
        return loss, tuple(metrics)

    @_OptionalClass
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
        """Return the loss and a tuple of metrics. `linear_grpo_loss` explains the arguments.

        ``compiled`` and ``chunk_size`` have no effect: the chunks follow from the memory.
        """
        arguments = without(
            locals(), "cls", "ctx", "_input", "weight", "bias", "compiled", "chunk_size"
        )

        def loss_fn(h, w, b):
            loss, metrics = cls.loss(h, w, bias=b, **arguments)
            return loss, *metrics

        loss, *metrics = cls.compute_with_gradients(ctx, loss_fn, _input, weight, bias)
        return loss, tuple(metrics)


class LigerFusedLinearGRPOFunction(LigerFusedLinearPPOBase):
    """``apply(_input, weight, selected_token_ids, ...)`` returns the loss and a tuple of metrics.

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
        Other options: as in `linear_grpo_loss`.

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
        GRPOOptions(**{name: getattr(self, name) for name in GRPO_OPTION_NAMES})  # raises

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
