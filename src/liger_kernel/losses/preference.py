r"""Preference losses, of sequence log-probabilities under a linear head whose logits are never all in memory.

    s = Σ_t log p(y_t)   of a sequence's valid tokens (their mean where a loss averages)
    c, r                 s of the chosen and of the rejected answer to a prompt
    a = c - c_ref,  d = r - r_ref                               what the policy has gained on the reference

The mathematics is in the plain functions below, of tensors with one number a pair or sequence; `paired_preference` and
`unpaired_preference` take a head and hidden states to them (`liger_kernel.ops.head.grouped_loss`).
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import logsigmoid, relu, sigmoid

from liger_kernel.core import check
from liger_kernel.losses.function import GradientsInForward
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.token_log_probs import token_log_probs

# ---- one number a pair: of a, d, and beta ----


def dpo_sigmoid(a, d, beta, **_):
    """Direct preference optimisation, arXiv:2305.18290."""
    return -logsigmoid(beta * (a - d))


def dpo_hinge(a, d, beta, **_):
    """SLiC's hinge on DPO's margin, arXiv:2305.10425."""
    return relu(1 - beta * (a - d))


def dpo_ipo(a, d, beta, **_):
    """Identity preference optimisation, arXiv:2310.12036: a margin of 1/(2β), and not more; of means (`MEANS`)."""
    return (a - d - 1 / (2 * beta)).square()


def dpo_exo_pair(a, d, beta, label_smoothing, **_):
    """Efficient exact optimisation, arXiv:2402.00856: KL(p_θ ‖ p_r) of a pair, with smoothed preferences."""
    x, e = beta * (a - d), label_smoothing
    return sigmoid(x) * (logsigmoid(x) - math.log(1 - e)) + sigmoid(-x) * (logsigmoid(-x) - math.log(e))


def dpo_nca_pair(a, d, beta, **_):
    """Noise contrastive alignment, arXiv:2402.05369."""
    return -logsigmoid(beta * a) - 0.5 * logsigmoid(-beta * a) - 0.5 * logsigmoid(-beta * d)


def dpo_robust(a, d, beta, label_smoothing, **_):
    """DPO for preferences that are flipped with probability ε, arXiv:2403.00409."""
    x, e = beta * (a - d), label_smoothing
    return (e * logsigmoid(-x) - (1 - e) * logsigmoid(x)) / (1 - 2 * e)


def dpo_bco_pair(a, d, beta, **_):
    """Binary classifier optimisation, arXiv:2404.04656, without its running mean of rewards."""
    return -logsigmoid(beta * a) - logsigmoid(-beta * d)


def dpo_sppo_hard(a, d, beta, **_):
    """Self-play preference optimisation, arXiv:2405.00675."""
    return (a - 0.5 / beta).square() + (d + 0.5 / beta).square()


def dpo_apo_zero(a, d, beta, **_):
    """Anchored preference optimisation, arXiv:2408.06266: chosen up, rejected down."""
    return 1 - sigmoid(beta * a) + sigmoid(beta * d)


def dpo_apo_down(a, d, beta, **_):
    """Anchored preference optimisation, arXiv:2408.06266: both down, the rejected one more."""
    return sigmoid(beta * a) + 1 - sigmoid(beta * (a - d))


def dpo_discopop(a, d, beta, discopop_tau, **_):
    """Log-ratio modulated loss of discovered preference optimisation, arXiv:2406.08414."""
    x = beta * (a - d)
    q = sigmoid(x / discopop_tau)
    return -logsigmoid(x) * (1 - q) + torch.exp(-x) * q


DPO = {
    "sigmoid": dpo_sigmoid,
    "hinge": dpo_hinge,
    "ipo": dpo_ipo,
    "exo_pair": dpo_exo_pair,
    "nca_pair": dpo_nca_pair,
    "robust": dpo_robust,
    "bco_pair": dpo_bco_pair,
    "sppo_hard": dpo_sppo_hard,
    "apo_zero": dpo_apo_zero,
    "apo_down": dpo_apo_down,
    "discopop": dpo_discopop,
}
MEANS = {"ipo"}  # whose authors mean log-probabilities of tokens, not of sequences


def smoothed_margin(x, label_smoothing):
    """-log σ(x) where preferences are flipped with a given probability: the loss of CPO and SimPO."""
    return -(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)


def log_odds(log_p):
    """log p/(1 - p)."""
    log_rest = torch.where(log_p > -0.7, torch.log(-torch.expm1(log_p)), torch.log1p(-torch.exp(log_p)))
    return log_p - log_rest


# ---- losses of some pairs: Σ / pairs, their rewards, ... ----


def dpo_loss(
    chosen, rejected, target, ref_chosen_logps=0.0, ref_rejected_logps=0.0, beta=0.1, loss_type="sigmoid",
    label_smoothing=0.0, discopop_tau=0.05, lengths=(1, 1),
):  # fmt: skip
    """DPO and its variants: see `DPO`. The loss, not the rewards, is of log-probabilities divided by ``lengths``."""
    a, d = chosen - ref_chosen_logps, rejected - ref_rejected_logps
    more = dict(label_smoothing=label_smoothing, discopop_tau=discopop_tau)
    loss = DPO[loss_type](a / lengths[0], d / lengths[1], beta, **more)
    return loss.sum() / (len(target) // 2), beta * a, beta * d


def cpo_loss(chosen, rejected, target, beta=0.1, label_smoothing=0.0):
    """Contrastive preference optimisation, arXiv:2401.08417: no reference."""
    loss = smoothed_margin(beta * (chosen - rejected), label_smoothing)
    return loss.sum() / (len(target) // 2), beta * chosen, beta * rejected


def simpo_loss(chosen, rejected, target, beta=0.1, gamma=0.5, label_smoothing=0.0):
    """Simple preference optimisation, arXiv:2405.14734: mean log-probabilities, a margin of γ."""
    loss = smoothed_margin(beta * (chosen - rejected) - gamma, label_smoothing)
    return loss.sum() / (len(target) // 2), beta * chosen, beta * rejected


def orpo_loss(chosen, rejected, target, beta=0.1):
    """Odds ratio preference optimisation, arXiv:2403.07691: beside the NLL, the ratio of the odds."""
    odds, pairs = log_odds(chosen) - log_odds(rejected), len(target) // 2
    ratio = logsigmoid(odds).sum() / pairs
    return -beta * ratio, beta * chosen, beta * rejected, ratio, odds.sum() / pairs


def kto_loss(logps, preference_labels, target, ref_logps=0.0, beta=0.1, kl=0.0):
    """Kahneman-Tversky optimisation, arXiv:2402.01306: answers that are good or bad by themselves.

    ``kl``: the reference point, one number or one for each sequence.
    """
    reward = logps - ref_logps
    sign = preference_labels.to(reward.dtype) * 2 - 1
    return (1 - sigmoid(beta * sign * (reward - kl))).sum() / len(target), beta * reward


# ---- heads ----


def sum_of_logits(hidden, weight, bias=None):
    """Of all positions and classes, (..., H) -> 0-d: linear in both, so there is no need of the logits."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    h, w = hidden.reshape(-1, hidden.shape[-1]).sum(0, dtype=wide), weight.sum(0, dtype=wide)
    return h @ w if bias is None else h @ w + hidden[..., 0].numel() * bias.sum(dtype=wide)


def sequence_log_probs(hidden, weight, target, bias=None, *, average=False, ignore_index=-100, **options):
    """s of each sequence: hidden (B, T, H), target (B, T) -> (B,). ``options``: those of `token_log_probs`."""
    s = token_log_probs(hidden, weight, target, bias, ignore_index=ignore_index, **options).sum(-1)
    return s / (target != ignore_index).sum(-1).to(s.device) if average else s


def _reference(name, head, target, average, options):
    """(B,) log-probabilities under a reference model."""
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
    for argument in NUMBERS.keys() & options:
        NUMBERS[argument](name, argument, options[argument])


def _check_sequences(name, hidden, target, labels=None):
    check.floats(name, dict(hidden=hidden))
    check.integers(name, dict(target=target))
    if hidden.dim() != 3 or target.shape != hidden.shape[:2]:
        shapes = f"{tuple(hidden.shape)} and {tuple(target.shape)}"
        raise ValueError(f"{name}: hidden states and target have shapes {shapes}, give (B, T, H) and (B, T)")
    if labels is not None and not isinstance(labels, torch.Tensor):
        raise TypeError(f"{name}: preference_labels is a {type(labels).__name__}, give a tensor of bools")
    if labels is not None and (labels.dtype != torch.bool or labels.shape != target.shape[:1]):
        given = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise ValueError(f"{name}: preference_labels are {given}, give one bool a sequence: ({target.shape[0]},)")


def paired_preference(
    loss, hidden, weight, target, bias=None, *, ignore_index=-100, alpha=1.0, beta=0.1, compute_nll_loss=False,
    nll_target=None, average_log_prob=False, use_ref_model=False, ref_input=None, ref_weight=None, ref_bias=None,
    ref_chosen_logps=None, ref_rejected_logps=None, give_lengths=False, memory="auto", drop_ignored=None, **loss_kwargs,
):  # fmt: skip
    """A loss of pairs of answers, α·NLL of the chosen ones + preference.

    Args:
        loss: ``loss(chosen, rejected, target, [ref_chosen_logps=, ref_rejected_logps=,] beta=, **loss_kwargs)`` of the
            log-probabilities (pairs,) of some of the pairs -> (their loss / pairs in ``target``, rewards of the chosen
            ones, of the rejected ones, any further 0-d parts of sums). `dpo_loss` and its like.
        hidden: (2B, T, H), the chosen answers first. weight (V, H), bias (V,): of the head.
        target: (2B, T), already shifted: the token that each hidden state predicts, or ``ignore_index``.
        nll_target: (2B, T), for the NLL in place of ``target``.
        compute_nll_loss: without it NLL is 0.
        average_log_prob: the mean of a sequence's log-probabilities, not their sum.
        use_ref_model, ref_input, ref_weight, ref_bias: hidden states and head of a reference model; or, in its place,
            ref_chosen_logps, ref_rejected_logps (B,): the reference's sequence log-probabilities.
        give_lengths: ``loss`` is also given ``lengths=``, the numbers of valid tokens (2, pairs).
        memory, drop_ignored: as in `linear_loss`.

    Returns:
        (loss, (chosen log-probabilities (B,), rejected ones, mean logit of the chosen answers, of the rejected ones,
        NLL, chosen rewards (B,), rejected rewards (B,), *others)), all but the loss without gradients. The logits'
        means are over all positions and classes.
    """
    name = "paired_preference"
    _check_numbers(name, dict(ignore_index=ignore_index, alpha=alpha, beta=beta, **loss_kwargs))
    _check_sequences(name, hidden, target)
    B = len(target) // 2
    if len(target) % 2:
        raise ValueError(f"{name}: target has {len(target)} sequences, give the chosen ones and then as many rejected")
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
        ref = ref_chosen_logps.detach(), ref_rejected_logps.detach()
    elif use_ref_model:
        ref = _reference(name, (ref_input, ref_weight, ref_bias), target, average_log_prob, options).chunk(2)
    valid = (target != ignore_index).to(hidden.device)
    counts = valid.sum(-1).view(2, B)
    of_nll = valid if nll_target is None else (nll_target != ignore_index).to(hidden.device)
    of_nll = of_nll[:B].sum().clamp(min=1)
    both = compute_nll_loss and nll_target is not None

    def of_pairs(part, log_probs, _):
        log_probs, for_nll = log_probs.unbind(-1) if both else (log_probs, log_probs)
        s = log_probs.sum(-1)
        if average_log_prob:
            s = s / counts[:, part]
        refs = {} if ref is None else dict(ref_chosen_logps=ref[0][part], ref_rejected_logps=ref[1][part])
        refs |= dict(lengths=counts[:, part]) if give_lengths else {}
        value, *others = loss(*s, target, **refs, beta=beta, **loss_kwargs)
        nll = -for_nll[0].sum() / of_nll if compute_nll_loss else value.new_zeros(())
        return (alpha * nll + value if compute_nll_loss else value), *s, nll, *others

    targets = torch.stack((target, nll_target), -1) if both else target
    value, chosen, rejected, nll, *others = linear_loss(of_pairs, hidden, weight, targets, bias, parts=2, **options)
    with torch.no_grad():
        size = max(valid[:B].numel() * weight.shape[0], 1)
        logits = [sum_of_logits(half, weight, bias) / size for half in hidden.detach().chunk(2)]
    return value, (chosen, rejected, *logits, nll, *others)


def unpaired_preference(
    loss, hidden, weight, target, preference_labels, bias=None, *, ignore_index=-100, beta=0.1, kl=None,
    average_log_prob=False, use_ref_model=False, ref_input=None, ref_weight=None, ref_bias=None, ref_logps=None,
    memory="auto", drop_ignored=None, **loss_kwargs,
):  # fmt: skip
    """A loss of answers that are each good or bad.

    Args:
        loss: ``loss(logps, preference_labels, target, [ref_logps=, kl=,] beta=, **loss_kwargs)`` of some of the
            sequences (n,) -> (their loss / sequences in ``target``, their rewards (n,)). `kto_loss` is one.
        hidden: (B, T, H); target: (B, T), already shifted.
        preference_labels: (B,) bool, whether an answer is desirable.
        kl: the loss's reference point, one number or (B,); None: the loss's own default.
        use_ref_model: there has to be a reference; one that is given counts in any case.
        ref_logps: (B,) log-probabilities under the reference in place of ref_input, ref_weight, ref_bias.
        The rest as in `paired_preference`.

    Returns:
        (loss, sums over the desirable and over the other answers, 0-d: (log-probabilities of each, logits of each,
        rewards of each)). The logits are those of all positions and classes.
    """
    name = "unpaired_preference"
    if preference_labels is None:
        raise ValueError(f"{name}: preference_labels is None, give one bool a sequence")
    _check_numbers(name, dict(ignore_index=ignore_index, beta=beta, **loss_kwargs))
    _check_sequences(name, hidden, target, preference_labels)
    check.floats(name, dict(hidden=hidden), ref_logps=ref_logps)
    if isinstance(kl, torch.Tensor):  # one on the host is moved
        check.floats(name, dict(kl=kl))
    check.shape(name, "ref_logps", ref_logps, (len(target),))
    options = dict(ignore_index=ignore_index, memory=memory, drop_ignored=drop_ignored)
    if ref_logps is None and (use_ref_model or ref_input is not None):
        ref_logps = _reference(name, (ref_input, ref_weight, ref_bias), target, average_log_prob, options)
    labels = preference_labels.to(hidden.device)
    counts = (target != ignore_index).sum(-1).to(hidden.device)
    kl = None if kl is None else kl if isinstance(kl, torch.Tensor) else check.finite(name, "kl", kl)
    kl = None if kl is None else torch.as_tensor(kl, device=hidden.device).detach().reshape(-1)
    if kl is not None and len(kl) not in (1, len(target)):
        raise ValueError(f"{name}: kl has {len(kl)} elements, give one, or one a sequence: {len(target)}")

    def of_sequences(part, log_probs, _):
        s = log_probs.sum(-1)
        if average_log_prob:
            s = s / counts[part]
        given = {} if ref_logps is None else dict(ref_logps=ref_logps[part].detach())
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
        sums = [x.where(which, 0).sum() for x in (s, of_sequence, rewards) for which in (labels, ~labels)]
    return value, tuple(sums)


# ---- what frameworks subclass ----


class LigerFusedLinearPreferenceBase(GradientsInForward):
    """A loss of pairs, whose subclass gives ``preference_loss_fn``: the ``loss`` of `paired_preference`.

    Its forward calls this one with ``super().forward(cls=cls, ctx=ctx, ...)``. ``chunk_size`` and ``compiled`` are
    accepted and choose nothing: how much is computed at once follows from the memory, and nothing needs compiling.
    """

    @staticmethod
    def preference_loss_fn(chosen_logps, rejected_logps, full_target, **loss_kwargs):
        raise NotImplementedError("give preference_loss_fn in a subclass")

    @staticmethod
    def forward(
        cls, ctx, _input, weight, target, bias=None, chunk_size=1, ignore_index=-100, alpha=1.0, beta=0.1,
        compute_nll_loss=True, nll_target=None, compiled=True, use_ref_model=False, ref_input=None, ref_weight=None,
        ref_bias=None, average_log_prob=True, **loss_kwargs,
    ):  # fmt: skip
        """-> (loss, the tuple that `paired_preference` returns)."""
        options = dict(
            ignore_index=ignore_index, alpha=alpha, beta=beta, compute_nll_loss=compute_nll_loss, nll_target=nll_target,
            average_log_prob=average_log_prob, use_ref_model=use_ref_model, ref_input=ref_input, ref_weight=ref_weight,
            ref_bias=ref_bias, **loss_kwargs,
        )  # fmt: skip

        def loss(h, w, b):
            return paired_preference(cls.preference_loss_fn, h, w, target, b, **options)

        return cls.take(ctx, loss, _input, weight, bias)


class LigerFusedLinearUnpairedPreferenceBase(GradientsInForward):
    """A loss of single answers, whose subclass gives ``preference_loss_fn``: the ``loss`` of `unpaired_preference`.

    The rest as of `LigerFusedLinearPreferenceBase`.
    """

    WHERE = 0, 1, 4

    @staticmethod
    def preference_loss_fn(logps, preference_labels, full_target, **loss_kwargs):
        raise NotImplementedError("give preference_loss_fn in a subclass")

    @staticmethod
    def forward(
        cls, ctx, _input, weight, target, preference_labels, bias=None, chunk_size=1, ignore_index=-100, compiled=True,
        use_ref_model=False, ref_input=None, ref_weight=None, ref_bias=None, average_log_prob=False, **loss_kwargs,
    ):  # fmt: skip
        """-> (loss, the tuple that `unpaired_preference` returns)."""
        options = dict(
            ignore_index=ignore_index, average_log_prob=average_log_prob, use_ref_model=use_ref_model,
            ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias, **loss_kwargs,
        )  # fmt: skip

        def loss(h, w, b):
            return unpaired_preference(cls.preference_loss_fn, h, w, target, preference_labels, b, **options)

        return cls.take(ctx, loss, _input, weight, bias)


class LigerFusedLinearDPOFunction(LigerFusedLinearPreferenceBase):
    """``apply(_input (2B, T, H), weight, target, ...) -> loss, others``: `LigerFusedLinearDPOLoss`."""

    preference_loss_fn = staticmethod(dpo_loss)

    @classmethod
    def forward(
        cls, ctx, _input, weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None, ignore_index=-100,
        beta=0.1, compute_nll_loss=False, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1,
        loss_type="sigmoid", label_smoothing=0.0, discopop_tau=0.05, alpha=1.0,
    ):  # fmt: skip
        check_dpo("LigerFusedLinearDPOFunction", loss_type, label_smoothing)
        return super().forward(
            cls, ctx, _input, weight, target, bias, ignore_index=ignore_index, alpha=alpha, beta=beta,
            compute_nll_loss=compute_nll_loss, average_log_prob=average_log_prob, use_ref_model=use_ref_model,
            ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias, loss_type=loss_type,
            label_smoothing=label_smoothing, discopop_tau=discopop_tau,
            give_lengths=loss_type in MEANS and not average_log_prob,
        )  # fmt: skip


class LigerFusedLinearCPOFunction(LigerFusedLinearPreferenceBase):
    """``apply(_input (2B, T, H), weight, target, ...) -> loss, others``: `LigerFusedLinearCPOLoss`."""

    preference_loss_fn = staticmethod(cpo_loss)

    @classmethod
    def forward(
        cls, ctx, _input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0,
        compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1,
    ):  # fmt: skip
        return super().forward(
            cls, ctx, _input, weight, target, bias, ignore_index=ignore_index, alpha=alpha, beta=beta,
            compute_nll_loss=compute_nll_loss, average_log_prob=average_log_prob, label_smoothing=label_smoothing,
        )  # fmt: skip


class LigerFusedLinearSimPOFunction(LigerFusedLinearPreferenceBase):
    """``apply(_input (2B, T, H), weight, target, ...) -> loss, others``: `LigerFusedLinearSimPOLoss`."""

    preference_loss_fn = staticmethod(simpo_loss)

    @classmethod
    def forward(
        cls, ctx, _input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0,
        compute_nll_loss=False, compiled=True, gamma=0.5, chunk_size=1,
    ):  # fmt: skip
        return super().forward(
            cls, ctx, _input, weight, target, bias, ignore_index=ignore_index, alpha=alpha, beta=beta,
            compute_nll_loss=compute_nll_loss, average_log_prob=True, label_smoothing=label_smoothing, gamma=gamma,
        )  # fmt: skip


class LigerFusedLinearORPOFunction(LigerFusedLinearPreferenceBase):
    """``apply(_input (2B, T, H), weight, target, ...) -> loss, others``: `LigerFusedLinearORPOLoss`."""

    preference_loss_fn = staticmethod(orpo_loss)

    @classmethod
    def forward(
        cls, ctx, _input, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True,
        nll_target=None, compiled=True, chunk_size=1,
    ):  # fmt: skip
        return super().forward(
            cls, ctx, _input, weight, target, bias, ignore_index=ignore_index, beta=beta,
            compute_nll_loss=compute_nll_loss, nll_target=nll_target, average_log_prob=True,
        )  # fmt: skip


class LigerFusedLinearKTOFunction(LigerFusedLinearUnpairedPreferenceBase):
    """``apply(_input (B, T, H), weight, target, preference_labels, ...) -> loss, sums``: `LigerFusedLinearKTOLoss`."""

    preference_loss_fn = staticmethod(kto_loss)

    @classmethod
    def forward(
        cls, ctx, _input, weight, target, preference_labels, bias=None, ref_input=None, ref_weight=None, ref_bias=None,
        kl=None, ignore_index=-100, beta=0.1, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1,
    ):  # fmt: skip
        return super().forward(
            cls, ctx, _input, weight, target, preference_labels, bias, ignore_index=ignore_index,
            average_log_prob=average_log_prob, use_ref_model=use_ref_model, ref_input=ref_input, ref_weight=ref_weight,
            ref_bias=ref_bias, beta=beta, kl=kl,
        )  # fmt: skip


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
        raise ValueError(f"{name}: label_smoothing is {label_smoothing}, exo_pair needs one between 0 and 1")
    if loss_type == "robust" and not 0 <= label_smoothing < 0.5:
        raise ValueError(f"{name}: label_smoothing is {label_smoothing}, robust needs one from 0 to below 0.5")


class _Loss(torch.nn.Module):
    """Options kept as attributes."""

    def __init__(self, compiled: bool, chunk_size: int, **options) -> None:
        super().__init__()
        _check_numbers(type(self).__name__, options)
        self.compiled, self.chunk_size, self._names = compiled, chunk_size, tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    @property
    def options(self):
        return {name: getattr(self, name) for name in self._names}

    def extra_repr(self):
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LigerFusedLinearDPOLoss(_Loss):
    """DPO and its variants (`DPO`): ``forward(lin_weight, _input, target, bias, ref_input, ref_weight, ref_bias)``.

    Args:
        ignore_index: target of what is left out.
        beta: how far the policy may go from the reference: the smaller the farther.
        alpha: weight of the chosen answers' NLL, with ``compute_nll_loss``.
        use_ref_model: False: a reference that finds all answers equally likely.
        average_log_prob: means over the tokens in place of sums. The loss of ipo has means in any case.
        loss_type: a key of `DPO`; label_smoothing: of exo_pair and robust; discopop_tau: of discopop.
        compiled, chunk_size: accepted; they choose nothing.
        memory, drop_ignored: as in `liger_kernel.ops.head.grouped_loss.linear_loss`.

    Shapes, further arguments and what is returned: `paired_preference`.
    """

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, compute_nll_loss: bool = False,
        compiled: bool = True, use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
        loss_type: str = "sigmoid", label_smoothing: float = 0.0, discopop_tau: float = 0.05, *,
        memory: int | str = "auto", drop_ignored: bool | None = None,
    ) -> None:  # fmt: skip
        check_dpo(type(self).__name__, loss_type, label_smoothing)
        super().__init__(
            compiled, chunk_size, ignore_index=ignore_index, beta=beta, alpha=alpha, compute_nll_loss=compute_nll_loss,
            use_ref_model=use_ref_model, average_log_prob=average_log_prob, loss_type=loss_type,
            label_smoothing=label_smoothing, discopop_tau=discopop_tau, memory=memory, drop_ignored=drop_ignored,
        )  # fmt: skip

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None, ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None, *, ref_chosen_logps: torch.Tensor | None = None,
        ref_rejected_logps: torch.Tensor | None = None,
    ):  # fmt: skip
        return paired_preference(
            dpo_loss, _input, lin_weight, target, bias, ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias,
            ref_chosen_logps=ref_chosen_logps, ref_rejected_logps=ref_rejected_logps,
            give_lengths=self.loss_type in MEANS and not self.average_log_prob, **self.options,
        )  # fmt: skip


class LigerFusedLinearCPOLoss(_Loss):
    """CPO: ``forward(lin_weight, _input, target, bias)``. Arguments as of `LigerFusedLinearDPOLoss`."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, average_log_prob: bool = False, chunk_size: int = 1, *,
        memory: int | str = "auto", drop_ignored: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            compiled, chunk_size, ignore_index=ignore_index, beta=beta, alpha=alpha, label_smoothing=label_smoothing,
            compute_nll_loss=compute_nll_loss, average_log_prob=average_log_prob, memory=memory,
            drop_ignored=drop_ignored,
        )  # fmt: skip

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
    ):  # fmt: skip
        return paired_preference(cpo_loss, _input, lin_weight, target, bias, **self.options)


class LigerFusedLinearSimPOLoss(_Loss):
    """SimPO: ``forward(lin_weight, _input, target, bias)``. gamma: the margin; the rest as of DPO's."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, gamma: float = 0.5, chunk_size: int = 1, *,
        memory: int | str = "auto", drop_ignored: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            compiled, chunk_size, ignore_index=ignore_index, beta=beta, alpha=alpha, label_smoothing=label_smoothing,
            compute_nll_loss=compute_nll_loss, gamma=gamma, memory=memory, drop_ignored=drop_ignored,
        )  # fmt: skip

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
    ):  # fmt: skip
        return paired_preference(simpo_loss, _input, lin_weight, target, bias, average_log_prob=True, **self.options)


class LigerFusedLinearORPOLoss(_Loss):
    """ORPO: ``forward(lin_weight, _input, target, bias, nll_target)``. Arguments as of `LigerFusedLinearDPOLoss`.

    What is returned ends with mean log σ(log odds ratio) and the mean of that ratio.
    """

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compute_nll_loss: bool = True, compiled: bool = True,
        chunk_size: int = 1, *, memory: int | str = "auto", drop_ignored: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            compiled, chunk_size, ignore_index=ignore_index, beta=beta, compute_nll_loss=compute_nll_loss,
            memory=memory, drop_ignored=drop_ignored,
        )  # fmt: skip

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
        nll_target: torch.Tensor | None = None,
    ):  # fmt: skip
        return paired_preference(
            orpo_loss, _input, lin_weight, target, bias, nll_target=nll_target, average_log_prob=True, **self.options
        )


class LigerFusedLinearKTOLoss(_Loss):
    """KTO: ``forward(_input, lin_weight, target, bias, preference_labels, ref_input, ref_weight, ref_bias, kl)``.

    The input comes before the weight. Arguments as of `LigerFusedLinearDPOLoss`; shapes and what is returned:
    `unpaired_preference`.
    """

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compiled: bool = True, use_ref_model: bool = False,
        average_log_prob: bool = False, chunk_size: int = 1, *, memory: int | str = "auto",
        drop_ignored: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            compiled, chunk_size, ignore_index=ignore_index, beta=beta, use_ref_model=use_ref_model,
            average_log_prob=average_log_prob, memory=memory, drop_ignored=drop_ignored,
        )  # fmt: skip

    def forward(
        self, _input: torch.Tensor, lin_weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
        preference_labels: torch.Tensor | None = None, ref_input: torch.Tensor | None = None,
        ref_weight: torch.Tensor | None = None, ref_bias: torch.Tensor | None = None, kl: torch.Tensor | None = None, *,
        ref_logps: torch.Tensor | None = None,
    ):  # fmt: skip
        return unpaired_preference(
            kto_loss, _input, lin_weight, target, preference_labels, bias, ref_input=ref_input, ref_weight=ref_weight,
            ref_bias=ref_bias, ref_logps=ref_logps, kl=kl, **self.options,
        )  # fmt: skip
