r"""Preference losses of a linear head, under the names and signatures that trainers use.

DPO and its variants, CPO, SimPO, ORPO and KTO. All logits are never in memory at once: the
log-probabilities are computed in chunks. `linear_preference` has the functions, `preference_math`
the formulas.
"""

from __future__ import annotations

import torch

from liger_kernel.losses.function import GradientsInForward
from liger_kernel.losses.linear_preference import (
    check_dpo,
    check_numbers,
    paired_preference,
    unpaired_preference,
)
from liger_kernel.losses.module import LossModule, without
from liger_kernel.losses.preference_math import *  # noqa: F403  (published modules have these names)
from liger_kernel.losses.preference_math import (
    MEAN_LOSS_TYPES,
    cpo_loss,
    dpo_loss,
    kto_loss,
    orpo_loss,
    simpo_loss,
)

# ---- what frameworks subclass ----

NOT_OPTIONS = (
    "cls",
    "ctx",
    "_input",
    "weight",
    "target",
    "preference_labels",
    "bias",
    "chunk_size",
    "compiled",
    "loss_kwargs",
)


class LigerFusedLinearPreferenceBase(GradientsInForward):
    """The base of a loss of pairs. A subclass defines ``preference_loss_fn``.

    That is the ``loss`` of `paired_preference`. The subclass's ``forward`` calls
    ``super().forward(cls=cls, ctx=ctx, ...)``. ``chunk_size`` and ``compiled`` have no effect: the
    chunks follow from the memory, and nothing needs compiling.
    """

    @staticmethod
    def preference_loss_fn(chosen_logps, rejected_logps, full_target, **loss_kwargs):
        raise NotImplementedError("give preference_loss_fn in a subclass")

    @staticmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        chunk_size=1,
        ignore_index=-100,
        alpha=1.0,
        beta=0.1,
        compute_nll_loss=True,
        nll_target=None,
        compiled=True,
        use_ref_model=False,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        average_log_prob=True,
        **loss_kwargs,
    ):
        """Return the loss and the tuple of `paired_preference`."""
        options = without(locals(), *NOT_OPTIONS) | loss_kwargs

        def loss_fn(h, w, b):
            return paired_preference(cls.preference_loss_fn, h, w, target, b, **options)

        return cls.compute_with_gradients(ctx, loss_fn, _input, weight, bias)


class LigerFusedLinearUnpairedPreferenceBase(GradientsInForward):
    """The base of a loss of single answers. A subclass defines ``preference_loss_fn``.

    That is the ``loss`` of `unpaired_preference`. Otherwise as `LigerFusedLinearPreferenceBase`.
    """

    HEAD_ARGUMENTS = 0, 1, 4

    @staticmethod
    def preference_loss_fn(logps, preference_labels, full_target, **loss_kwargs):
        raise NotImplementedError("give preference_loss_fn in a subclass")

    @staticmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        preference_labels,
        bias=None,
        chunk_size=1,
        ignore_index=-100,
        compiled=True,
        use_ref_model=False,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        average_log_prob=False,
        **loss_kwargs,
    ):
        """Return the loss and the tuple of `unpaired_preference`."""
        options = without(locals(), *NOT_OPTIONS) | loss_kwargs

        def loss_fn(h, w, b):
            return unpaired_preference(
                cls.preference_loss_fn, h, w, target, preference_labels, b, **options
            )

        return cls.compute_with_gradients(ctx, loss_fn, _input, weight, bias)


class LigerFusedLinearDPOFunction(LigerFusedLinearPreferenceBase):
    """`LigerFusedLinearDPOLoss` as a Function.

    ``apply(_input (2B, T, H), weight, target, ...)`` returns the loss and a tuple of others.
    """

    preference_loss_fn = staticmethod(dpo_loss)

    @classmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        ignore_index=-100,
        beta=0.1,
        compute_nll_loss=False,
        compiled=True,
        use_ref_model=True,
        average_log_prob=False,
        chunk_size=1,
        loss_type="sigmoid",
        label_smoothing=0.0,
        discopop_tau=0.05,
        alpha=1.0,
    ):
        check_dpo("LigerFusedLinearDPOFunction", loss_type, label_smoothing)
        arguments = locals()
        arguments["give_lengths"] = loss_type in MEAN_LOSS_TYPES and not average_log_prob
        return LigerFusedLinearPreferenceBase.forward(**arguments)


class LigerFusedLinearCPOFunction(LigerFusedLinearPreferenceBase):
    """`LigerFusedLinearCPOLoss` as a Function.

    ``apply(_input (2B, T, H), weight, target, ...)`` returns the loss and a tuple of others.
    """

    preference_loss_fn = staticmethod(cpo_loss)

    @classmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ignore_index=-100,
        beta=0.1,
        alpha=1.0,
        label_smoothing=0.0,
        compute_nll_loss=True,
        compiled=True,
        average_log_prob=False,
        chunk_size=1,
    ):
        return LigerFusedLinearPreferenceBase.forward(**locals())


class LigerFusedLinearSimPOFunction(LigerFusedLinearPreferenceBase):
    """`LigerFusedLinearSimPOLoss` as a Function.

    ``apply(_input (2B, T, H), weight, target, ...)`` returns the loss and a tuple of others.
    """

    preference_loss_fn = staticmethod(simpo_loss)

    @classmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ignore_index=-100,
        beta=0.1,
        alpha=1.0,
        label_smoothing=0.0,
        compute_nll_loss=False,
        compiled=True,
        gamma=0.5,
        chunk_size=1,
    ):
        return LigerFusedLinearPreferenceBase.forward(**locals(), average_log_prob=True)


class LigerFusedLinearORPOFunction(LigerFusedLinearPreferenceBase):
    """`LigerFusedLinearORPOLoss` as a Function.

    ``apply(_input (2B, T, H), weight, target, ...)`` returns the loss and a tuple of others.
    """

    preference_loss_fn = staticmethod(orpo_loss)

    @classmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ignore_index=-100,
        beta=0.1,
        compute_nll_loss=True,
        nll_target=None,
        compiled=True,
        chunk_size=1,
    ):
        return LigerFusedLinearPreferenceBase.forward(
            **locals(), average_log_prob=True, give_log_odds=True, give_lengths=True
        )


class LigerFusedLinearKTOFunction(LigerFusedLinearUnpairedPreferenceBase):
    """`LigerFusedLinearKTOLoss` as a Function.

    ``apply(_input (B, T, H), weight, target, preference_labels, ...)`` returns the loss and a tuple
    of sums.
    """

    preference_loss_fn = staticmethod(kto_loss)

    @classmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        preference_labels,
        bias=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        kl=None,
        ignore_index=-100,
        beta=0.1,
        compiled=True,
        use_ref_model=True,
        average_log_prob=False,
        chunk_size=1,
    ):
        return LigerFusedLinearUnpairedPreferenceBase.forward(**locals())


liger_fused_linear_cpo = LigerFusedLinearCPOFunction.apply
liger_fused_linear_dpo = LigerFusedLinearDPOFunction.apply
liger_fused_linear_kto = LigerFusedLinearKTOFunction.apply
liger_fused_linear_orpo = LigerFusedLinearORPOFunction.apply
liger_fused_linear_simpo = LigerFusedLinearSimPOFunction.apply


# ---- modules ----


class _PreferenceLoss(LossModule):
    def __init__(self, arguments) -> None:
        super().__init__(arguments)
        check_numbers(type(self).__name__, self.options)


class LigerFusedLinearDPOLoss(_PreferenceLoss):
    """DPO and its variants: ``forward(lin_weight, _input, target, bias, ref_input, ...)``.

    Args:
        ignore_index: targets with this value are left out.
        beta: how strongly the policy is kept near the reference. A smaller beta lets it move
            farther.
        alpha: weight of the chosen answers' NLL. It needs ``compute_nll_loss``.
        use_ref_model: False: all answers are equally likely under the reference.
        average_log_prob: the mean over a sequence's tokens instead of the sum. ipo's loss always
            takes the mean.
        loss_type: sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, apo_zero,
            apo_down or discopop.
        label_smoothing: of exo_pair and robust.
        discopop_tau: of discopop.
        compiled, chunk_size: no effect.
        memory, drop_ignored: as in `liger_kernel.ops.head.grouped_loss.linear_loss`.

    Shapes, other arguments, results and errors: `paired_preference`.

    Source: Rafailov et al., Direct Preference Optimization, arXiv:2305.18290; variants in
    `preference_math`.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        *,
        memory: int | str = "auto",
        drop_ignored: bool | None = None,
    ) -> None:
        check_dpo(type(self).__name__, loss_type, label_smoothing)
        super().__init__(locals())

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None,
        ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None,
        *,
        ref_chosen_logps: torch.Tensor | None = None,
        ref_rejected_logps: torch.Tensor | None = None,
    ):
        return paired_preference(
            dpo_loss,
            _input,
            lin_weight,
            target,
            bias,
            ref_input=ref_input,
            ref_weight=ref_weight,
            ref_bias=ref_bias,
            ref_chosen_logps=ref_chosen_logps,
            ref_rejected_logps=ref_rejected_logps,
            give_lengths=self.loss_type in MEAN_LOSS_TYPES and not self.average_log_prob,
            **self.options,
        )


class LigerFusedLinearCPOLoss(_PreferenceLoss):
    """CPO (arXiv:2401.08417): ``forward(lin_weight, _input, target, bias)``.

    Options: `LigerFusedLinearDPOLoss`.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        memory: int | str = "auto",
        drop_ignored: bool | None = None,
    ) -> None:
        super().__init__(locals())

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ):
        return paired_preference(cpo_loss, _input, lin_weight, target, bias, **self.options)


class LigerFusedLinearSimPOLoss(_PreferenceLoss):
    """SimPO (arXiv:2405.14734): ``forward(lin_weight, _input, target, bias)``.

    gamma is the margin. Other options: `LigerFusedLinearDPOLoss`.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
        *,
        memory: int | str = "auto",
        drop_ignored: bool | None = None,
    ) -> None:
        super().__init__(locals())

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ):
        return paired_preference(
            simpo_loss, _input, lin_weight, target, bias, average_log_prob=True, **self.options
        )


class LigerFusedLinearORPOLoss(_PreferenceLoss):
    """ORPO (arXiv:2403.07691): ``forward(lin_weight, _input, target, bias, nll_target)``.

    The results end with the mean of log σ(log odds ratio) and the mean log odds ratio. Options:
    `LigerFusedLinearDPOLoss`.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
        *,
        memory: int | str = "auto",
        drop_ignored: bool | None = None,
    ) -> None:
        super().__init__(locals())

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        nll_target: torch.Tensor | None = None,
    ):
        return paired_preference(
            orpo_loss,
            _input,
            lin_weight,
            target,
            bias,
            nll_target=nll_target,
            average_log_prob=True,
            give_log_odds=True,
            give_lengths=True,
            **self.options,
        )


class LigerFusedLinearKTOLoss(_PreferenceLoss):
    """KTO: ``forward(_input, lin_weight, target, bias, preference_labels, ref_input, ..., kl)``.

    The input comes before the weight. Options as in `LigerFusedLinearDPOLoss`; shapes, results and
    errors: `unpaired_preference`.

    Source: Ethayarajh et al., KTO, arXiv:2402.01306.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        memory: int | str = "auto",
        drop_ignored: bool | None = None,
    ) -> None:
        super().__init__(locals())

    def forward(
        self,
        _input: torch.Tensor,
        lin_weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        preference_labels: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None,
        ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None,
        kl: torch.Tensor | None = None,
        *,
        ref_logps: torch.Tensor | None = None,
    ):
        return unpaired_preference(
            kto_loss,
            _input,
            lin_weight,
            target,
            preference_labels,
            bias,
            ref_input=ref_input,
            ref_weight=ref_weight,
            ref_bias=ref_bias,
            ref_logps=ref_logps,
            kl=kl,
            **self.options,
        )
