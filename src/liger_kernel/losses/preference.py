r"""Preference losses of a linear head, from hidden states: DPO and its variants, CPO, SimPO, ORPO,
KTO.

All logits are never in memory at once: the log-probabilities are computed in chunks.
`paired_preference` and `unpaired_preference` are the functions, `preference_math` has the formulas.
The classes have the names and signatures that trainers use."""

from __future__ import annotations

import torch

from liger_kernel.core import check
from liger_kernel.core.op import matrix
from liger_kernel.losses.function import GradientsInForward
from liger_kernel.losses.module import LossModule, without
from liger_kernel.losses.preference_math import *  # noqa: F403  (the names there are names here, too)
from liger_kernel.losses.preference_math import (
    DPO,
    MEANS,
    cpo_loss,
    dpo_loss,
    kto_loss,
    log_odds_of_mean,
    orpo_loss,
    simpo_loss,
)
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.token_log_probs import token_log_probs

# ---- heads ----


def sum_of_logits(hidden, weight, bias=None):
    """The sum over all positions and classes, (..., H) -> 0-d. It is linear, so it needs no
    logits."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    h, w = matrix(hidden).sum(0, dtype=wide), weight.sum(0, dtype=wide)
    return h @ w if bias is None else h @ w + hidden.shape[:-1].numel() * bias.sum(dtype=wide)


def sequence_log_probs(
    hidden, weight, target, bias=None, *, average=False, ignore_index=-100, **options
):
    """The log-probability of each sequence: hidden (B, T, H), target (B, T) -> (B,).

    ``average``: the mean over its valid tokens, not the sum. ``options``: those of
    `token_log_probs`."""
    s = token_log_probs(hidden, weight, target, bias, ignore_index=ignore_index, **options).sum(-1)
    return s / (target != ignore_index).sum(-1).clamp(min=1).to(s.device) if average else s


def _reference(name, head, target, average, options):
    """The sequences' log-probabilities under the reference model, (B,)."""
    hidden, weight, bias = head
    if hidden is None or weight is None:
        raise ValueError(
            f"{name}: no reference; give ref_input and ref_weight, its log-probabilities, or use_ref_model=False"
        )
    with torch.no_grad():
        return sequence_log_probs(hidden, weight, target, bias, average=average, **options)


NUMBERS = dict(
    ignore_index=check.integer, alpha=check.finite, beta=check.finite, gamma=check.finite,
    label_smoothing=check.share, discopop_tau=check.positive,
)  # fmt: skip


def _check_numbers(name, options):
    for argument, checks in NUMBERS.items():
        if argument in options:
            checks(name, argument, options[argument])


class _NoLabels(ValueError, RuntimeError):
    """Existing code expects a RuntimeError for labels that are no bools."""


def _check_sequences(name, hidden, target, labels=None):
    check.floats(name, dict(hidden=hidden))
    check.integers(name, dict(target=target))
    if hidden.dim() != 3 or target.shape != hidden.shape[:2]:
        shapes = f"{tuple(hidden.shape)} and {tuple(target.shape)}"
        raise ValueError(
            f"{name}: hidden states and target have shapes {shapes}, give (B, T, H) and (B, T)"
        )
    if labels is not None and not isinstance(labels, torch.Tensor):
        raise TypeError(
            f"{name}: preference_labels is a {type(labels).__name__}, give a tensor of bools"
        )
    if labels is not None and (labels.dtype != torch.bool or labels.shape != target.shape[:1]):
        given = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise _NoLabels(
            f"{name}: preference_labels are {given}, give one bool a sequence: ({target.shape[0]},)"
        )


def paired_preference(
    loss,
    hidden,
    weight,
    target,
    bias=None,
    *,
    ignore_index=-100,
    alpha=1.0,
    beta=0.1,
    compute_nll_loss=False,
    nll_target=None,
    average_log_prob=False,
    use_ref_model=False,
    ref_input=None,
    ref_weight=None,
    ref_bias=None,
    ref_chosen_logps=None,
    ref_rejected_logps=None,
    give_lengths=False,
    give_log_odds=False,
    memory="auto",
    drop_ignored=None,
    **loss_kwargs,
):
    """A loss of pairs of answers: α·NLL of the chosen answers + the preference loss.

    Args:
        loss: ``loss(chosen, rejected, target, [ref_chosen_logps=, ref_rejected_logps=,] beta=,
        **loss_kwargs)``. It is
            given the sequence log-probabilities (n,) of n of the pairs. It returns their loss
            divided by the number of
            pairs in ``target``, the chosen rewards, the rejected rewards, and any other 0-d sums.
            See `dpo_loss`.
        hidden: (2B, T, H), fp32, bf16, fp16 or fp64: B chosen answers, then B rejected ones.
        weight, bias: (V, H) and (V,), of the head.
        target: (2B, T) integers, already shifted: the token that each hidden state predicts, or
        ``ignore_index``.
        nll_target: (2B, T), the targets of the NLL. None: ``target``.
        compute_nll_loss: False: the NLL is 0.
        average_log_prob: a sequence's mean log-probability instead of the sum. Without a valid
        token both are 0.
        use_ref_model: there is a reference model. Give ref_input, ref_weight and ref_bias: its
        hidden states and head.
        ref_chosen_logps, ref_rejected_logps: (B,), the reference's sequence log-probabilities in
        place of these three.
        give_lengths: ``loss`` also gets ``lengths=``, the numbers of valid tokens (2, n).
        give_log_odds: ``loss`` also gets ``log_odds_of=``, log (p/(1 - p)) of the mean
        log-probabilities (2, n), from
            1 - p of the tokens. (Not for a weight that is sharded over its classes.)
        memory, drop_ignored: as in `linear_loss`.

    Returns:
        (loss, (chosen log-probabilities (B,), rejected ones, mean logit of the chosen answers, of
        the rejected ones,
        NLL, chosen rewards (B,), rejected rewards (B,), *others)). Only the loss has gradients. A
        mean logit is over
        all positions and classes.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit; no reference.
    """
    name = "paired_preference"
    _check_numbers(name, dict(ignore_index=ignore_index, alpha=alpha, beta=beta, **loss_kwargs))
    _check_sequences(name, hidden, target)
    B = len(target) // 2
    if len(target) % 2:
        raise ValueError(
            f"{name}: target has {len(target)} sequences, give the chosen ones and then as many rejected"
        )
    options = dict(ignore_index=ignore_index, memory=memory, drop_ignored=drop_ignored)
    ref = None
    if (ref_chosen_logps is None) != (ref_rejected_logps is None):
        raise ValueError(f"{name}: give both ref_chosen_logps and ref_rejected_logps, or neither")
    if nll_target is not None:
        check.integers(name, dict(nll_target=nll_target))
        check.shape(name, "nll_target", nll_target, tuple(target.shape))
    if ref_chosen_logps is not None:
        given = dict(ref_chosen_logps=ref_chosen_logps, ref_rejected_logps=ref_rejected_logps)
        check.floats(name, dict(hidden=hidden), **given)
        for argument, x in given.items():
            check.shape(name, argument, x, (B,))
        ref = torch.stack((ref_chosen_logps.detach(), ref_rejected_logps.detach()))
    elif use_ref_model:
        ref = _reference(
            name, (ref_input, ref_weight, ref_bias), target, average_log_prob, options
        ).view(2, B)
    valid = (target != ignore_index).to(hidden.device)
    counts = valid.sum(-1).view(2, B)
    ref = None if ref is None else ref.where(counts > 0, 0)
    exact_odds = give_log_odds and not hasattr(weight, "device_mesh")
    of_nll = valid if nll_target is None else (nll_target != ignore_index).to(hidden.device)
    of_nll = of_nll[:B].sum().clamp(min=1)
    both = compute_nll_loss and nll_target is not None

    def of_pairs(part, log_probs, _):
        log_probs, *more = log_probs.unbind(-1) if both or exact_odds else (log_probs,)
        for_nll = more[0] if both else log_probs
        s = log_probs.sum(-1)
        if average_log_prob:
            s = s / counts[:, part].clamp(min=1)
        given = (
            {}
            if ref is None
            else dict(ref_chosen_logps=ref[0, part], ref_rejected_logps=ref[1, part])
        )
        given |= dict(lengths=counts[:, part]) if give_lengths else {}
        if exact_odds:
            given["log_odds_of"] = log_odds_of_mean(
                log_probs, more[-1], valid.view(2, B, -1)[:, part]
            )
        value, *others = loss(*s, target, **given, beta=beta, **loss_kwargs)
        nll = -for_nll[0].sum() / of_nll if compute_nll_loss else value.new_zeros(())
        return (alpha * nll + value if compute_nll_loss else value), *s, nll, *others

    targets = (
        torch.stack((target, nll_target), -1)
        if both
        else target[..., None]
        if exact_odds
        else target
    )
    value, chosen, rejected, nll, *others = linear_loss(
        of_pairs, hidden, weight, targets, bias, parts=2, rest_of=int(exact_odds), **options
    )
    with torch.no_grad():
        size = max(valid[:B].numel() * weight.shape[0], 1)
        logits = [sum_of_logits(half, weight, bias) / size for half in hidden.detach().chunk(2)]
    return value, (chosen, rejected, *logits, nll, *others)


def unpaired_preference(
    loss,
    hidden,
    weight,
    target,
    preference_labels,
    bias=None,
    *,
    ignore_index=-100,
    beta=0.1,
    kl=None,
    average_log_prob=False,
    use_ref_model=False,
    ref_input=None,
    ref_weight=None,
    ref_bias=None,
    ref_logps=None,
    memory="auto",
    drop_ignored=None,
    **loss_kwargs,
):
    """A loss of single answers, each good or bad.

    Args:
        loss: ``loss(logps, preference_labels, target, [ref_logps=, kl=,] beta=, **loss_kwargs)``.
        It is given n of the
            sequences, and returns their loss divided by the number of sequences in ``target``, and
            their rewards (n,).
            See `kto_loss`.
        hidden: (B, T, H). target: (B, T) integers, already shifted.
        preference_labels: (B,) bool, True for a good answer.
        kl: the reference point of the loss, one number or (B,). None: the loss's default.
        use_ref_model: a reference is required. If one is given, it is used in any case.
        ref_logps: (B,), the reference's log-probabilities in place of ref_input, ref_weight and
        ref_bias.
        The rest as in `paired_preference`.

    Returns:
        (loss, six 0-d sums: log-probabilities of the good answers, of the bad ones, logits
        likewise, rewards likewise).
        Only the loss has gradients. The logits are those of all positions and classes.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit; no reference. No
        preference_labels: this
            ValueError is an AssertionError, too.
    """
    name = "unpaired_preference"
    if preference_labels is None:
        raise check.Misfit(f"{name}: preference_labels is None, give one bool a sequence")
    _check_numbers(name, dict(ignore_index=ignore_index, beta=beta, **loss_kwargs))
    _check_sequences(name, hidden, target, preference_labels)
    check.floats(name, dict(hidden=hidden), ref_logps=ref_logps)
    if isinstance(kl, torch.Tensor):  # one on the host is moved
        check.floats(name, dict(kl=kl))
    check.shape(name, "ref_logps", ref_logps, (len(target),))
    options = dict(ignore_index=ignore_index, memory=memory, drop_ignored=drop_ignored)
    if ref_logps is None and (use_ref_model or ref_input is not None):
        ref_logps = _reference(
            name, (ref_input, ref_weight, ref_bias), target, average_log_prob, options
        )
    labels = preference_labels.to(hidden.device)
    counts = (target != ignore_index).sum(-1).to(hidden.device)
    ref_logps = None if ref_logps is None else ref_logps.detach().where(counts > 0, 0)
    kl = (
        None if kl is None else kl if isinstance(kl, torch.Tensor) else check.finite(name, "kl", kl)
    )
    kl = None if kl is None else torch.as_tensor(kl, device=hidden.device).detach().reshape(-1)
    if kl is not None and len(kl) not in (1, len(target)):
        raise ValueError(
            f"{name}: kl has {len(kl)} elements, give one, or one a sequence: {len(target)}"
        )

    def of_sequences(part, log_probs, _):
        s = log_probs.sum(-1)
        if average_log_prob:
            s = s / counts[part].clamp(min=1)
        given = {} if ref_logps is None else dict(ref_logps=ref_logps[part])
        if kl is not None:
            given["kl"] = kl if len(kl) == 1 else kl[part]
        value, rewards = loss(s, labels[part], target, **given, beta=beta, **loss_kwargs)
        return value, s, rewards

    value, s, rewards = linear_loss(of_sequences, hidden, weight, target, bias, **options)
    with torch.no_grad():
        wide, h = dict(dtype=torch.promote_types(hidden.dtype, torch.float32)), hidden.detach()
        of_sequence = h.sum(1, **wide) @ weight.sum(0, **wide)
        if bias is not None:
            of_sequence += target.shape[1] * bias.sum(**wide)
        sums = [
            x.where(which, 0).sum()
            for x in (s, of_sequence, rewards)
            for which in (labels, ~labels)
        ]
    return value, tuple(sums)


# ---- what frameworks subclass ----

NOT_OPTIONS = (
    "cls", "ctx", "_input", "weight", "target", "preference_labels", "bias", "chunk_size", "compiled", "loss_kwargs"
)  # fmt: skip


class LigerFusedLinearPreferenceBase(GradientsInForward):
    """The base of a loss of pairs. A subclass defines ``preference_loss_fn``, the ``loss`` of
    `paired_preference`.

    The subclass's ``forward`` calls ``super().forward(cls=cls, ctx=ctx, ...)``. ``chunk_size`` and
    ``compiled`` have no effect: the chunks follow from the memory, and nothing needs compiling."""

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
        """-> (loss, the tuple that `paired_preference` returns)."""
        options = without(locals(), *NOT_OPTIONS) | loss_kwargs

        def loss(h, w, b):
            return paired_preference(cls.preference_loss_fn, h, w, target, b, **options)

        return cls.take(ctx, loss, _input, weight, bias)


class LigerFusedLinearUnpairedPreferenceBase(GradientsInForward):
    """The base of a loss of single answers. A subclass defines ``preference_loss_fn``.

    That is the ``loss`` of `unpaired_preference`. The rest as in `LigerFusedLinearPreferenceBase`.
    """

    WHERE = 0, 1, 4

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
        """-> (loss, the tuple that `unpaired_preference` returns)."""
        options = without(locals(), *NOT_OPTIONS) | loss_kwargs

        def loss(h, w, b):
            return unpaired_preference(
                cls.preference_loss_fn, h, w, target, preference_labels, b, **options
            )

        return cls.take(ctx, loss, _input, weight, bias)


class LigerFusedLinearDPOFunction(LigerFusedLinearPreferenceBase):
    """``apply(_input (2B, T, H), weight, target, ...) -> loss, others``:
    `LigerFusedLinearDPOLoss`."""

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
        arguments = locals() | dict(give_lengths=loss_type in MEANS and not average_log_prob)
        return LigerFusedLinearPreferenceBase.forward(**arguments)


class LigerFusedLinearCPOFunction(LigerFusedLinearPreferenceBase):
    """``apply(_input (2B, T, H), weight, target, ...) -> loss, others``:
    `LigerFusedLinearCPOLoss`."""

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
    """``apply(_input (2B, T, H), weight, target, ...) -> loss, others``:
    `LigerFusedLinearSimPOLoss`."""

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
    """``apply(_input (2B, T, H), weight, target, ...) -> loss, others``:
    `LigerFusedLinearORPOLoss`."""

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
        arguments = locals() | dict(average_log_prob=True, give_log_odds=True, give_lengths=True)
        return LigerFusedLinearPreferenceBase.forward(**arguments)


class LigerFusedLinearKTOFunction(LigerFusedLinearUnpairedPreferenceBase):
    """``apply(_input (B, T, H), weight, target, preference_labels, ...) -> loss, sums``:
    `LigerFusedLinearKTOLoss`."""

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


def check_dpo(name, loss_type, label_smoothing):
    if loss_type not in DPO:
        raise ValueError(f"{name}: loss_type is {loss_type!r}, give one of {', '.join(DPO)}")
    if loss_type == "exo_pair" and not 0 < label_smoothing < 1:
        raise ValueError(
            f"{name}: label_smoothing is {label_smoothing}, exo_pair needs one between 0 and 1"
        )
    if loss_type == "robust" and not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"{name}: label_smoothing is {label_smoothing}, robust needs one from 0 to below 0.5"
        )


class _Loss(LossModule):
    def __init__(self, arguments) -> None:
        super().__init__(arguments)
        _check_numbers(type(self).__name__, self.options)


class LigerFusedLinearDPOLoss(_Loss):
    """DPO and its variants: ``forward(lin_weight, _input, target, bias, ref_input, ref_weight,
    ref_bias)``.

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
        label_smoothing: of exo_pair and robust. discopop_tau: of discopop.
        compiled, chunk_size: no effect.
        memory, drop_ignored: as in `liger_kernel.ops.head.grouped_loss.linear_loss`.

    Shapes, other arguments, results and errors: `paired_preference`.

    Source: Rafailov et al., Direct Preference Optimization, arXiv:2305.18290; variants in
    `preference_math`."""

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
            give_lengths=self.loss_type in MEANS and not self.average_log_prob,
            **self.options,
        )


class LigerFusedLinearCPOLoss(_Loss):
    """CPO (arXiv:2401.08417): ``forward(lin_weight, _input, target, bias)``. Options:
    `LigerFusedLinearDPOLoss`."""

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


class LigerFusedLinearSimPOLoss(_Loss):
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


class LigerFusedLinearORPOLoss(_Loss):
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


class LigerFusedLinearKTOLoss(_Loss):
    """KTO: ``forward(_input, lin_weight, target, bias, preference_labels, ref_input, ref_weight,
    ref_bias, kl)``.

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
