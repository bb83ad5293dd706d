"""The preference losses of a linear head as functions of hidden states.

`paired_preference` is of pairs of answers (DPO, CPO, SimPO, ORPO), `unpaired_preference` of single
answers (KTO). `preference_math` has their losses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_kernel.core import check
from liger_kernel.core.op import flatten_to_2d
from liger_kernel.losses.preference_math import DPO, log_odds_of_mean
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.token_log_probs import token_log_probs


class ReferenceHead(NamedTuple):
    """The hidden states of a reference model, and its head."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def sum_of_logits(hidden, weight, bias=None):
    """Return the sum over all positions and classes, (..., H) -> 0-d, without computing logits."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    hidden_sum = flatten_to_2d(hidden).sum(0, dtype=dtype)
    total = hidden_sum @ weight.sum(0, dtype=dtype)
    if bias is None:
        return total
    return total + hidden.shape[:-1].numel() * bias.sum(dtype=dtype)


def sequence_log_probs(
    hidden, weight, target, bias=None, *, average=False, ignore_index=-100, **options
):
    """Return the log-probability of each sequence: hidden (B, T, H), target (B, T) -> (B,).

    ``average``: the mean over its valid tokens, not the sum. ``options``: those of
    `token_log_probs`.
    """
    log_probs = token_log_probs(hidden, weight, target, bias, ignore_index=ignore_index, **options)
    log_probs = log_probs.sum(-1)
    if not average:
        return log_probs
    lengths = (target != ignore_index).sum(-1).clamp(min=1)
    return log_probs / lengths.to(log_probs.device)


def _reference_log_probs(name, reference, target, average, options):
    """Return the sequences' log-probabilities under the reference model, (B,)."""
    hidden, weight, bias = reference
    if hidden is None or weight is None:
        raise ValueError(
            f"{name}: no reference; give ref_input and ref_weight, its log-probabilities, "
            "or use_ref_model=False"
        )
    with torch.no_grad():
        return sequence_log_probs(hidden, weight, target, bias, average=average, **options)


# ---- checks ----

OPTION_CHECKS = {
    "ignore_index": check.integer,
    "alpha": check.finite,
    "beta": check.finite,
    "gamma": check.finite,
    "label_smoothing": check.fraction,
    "discopop_tau": check.positive,
}


def check_numbers(name, options):
    for argument, check_number in OPTION_CHECKS.items():
        if argument in options:
            check_number(name, argument, options[argument])


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


class _NoLabels(ValueError, RuntimeError):
    """Preference labels that are not bools. Existing code expects a RuntimeError."""


def _check_sequences(name, hidden, target, labels=None):
    check.floats(name, dict(hidden=hidden))
    check.integers(name, dict(target=target))
    if hidden.dim() != 3 or target.shape != hidden.shape[:2]:
        shapes = f"{tuple(hidden.shape)} and {tuple(target.shape)}"
        raise ValueError(
            f"{name}: hidden states and target have shapes {shapes}, give (B, T, H) and (B, T)"
        )
    if labels is None:
        return
    if not isinstance(labels, torch.Tensor):
        raise TypeError(
            f"{name}: preference_labels is a {type(labels).__name__}, give a tensor of bools"
        )
    if labels.dtype != torch.bool or labels.shape != target.shape[:1]:
        raise _NoLabels(
            f"{name}: preference_labels are {labels.dtype} of shape {tuple(labels.shape)}, "
            f"give one bool a sequence: ({target.shape[0]},)"
        )


# ---- pairs of answers ----


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
    """Compute a loss of pairs of answers: α·NLL of the chosen answers + the preference loss.

    Args:
        loss: ``loss(chosen, rejected, target, [ref_chosen_logps=, ref_rejected_logps=,]
            beta=, **loss_kwargs)``. It is given the sequence log-probabilities (n,) of n of the
            pairs. It returns their loss divided by the number of pairs in ``target``, the chosen
            rewards, the rejected rewards, and any other 0-d sums. See `dpo_loss`.
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
            log-probabilities (2, n), from 1 - p of the tokens. (Not for a weight that is sharded
            over its classes.)
        memory, drop_ignored: as in `linear_loss`.

    Returns:
        The loss, and (chosen log-probabilities (B,), rejected ones, mean logit of the chosen
        answers, of the rejected ones, NLL, chosen rewards (B,), rejected rewards (B,), *others).
        Only the loss has gradients. A mean logit is over all positions and classes.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit; no reference.
    """
    name = "paired_preference"
    check_numbers(name, dict(ignore_index=ignore_index, alpha=alpha, beta=beta, **loss_kwargs))
    _check_sequences(name, hidden, target)
    B = len(target) // 2
    if len(target) % 2:
        raise ValueError(
            f"{name}: target has {len(target)} sequences, "
            "give the chosen ones and then as many rejected"
        )
    head_options = dict(ignore_index=ignore_index, memory=memory, drop_ignored=drop_ignored)
    if (ref_chosen_logps is None) != (ref_rejected_logps is None):
        raise ValueError(f"{name}: give both ref_chosen_logps and ref_rejected_logps, or neither")
    if nll_target is not None:
        check.integers(name, dict(nll_target=nll_target))
        check.shape(name, "nll_target", nll_target, tuple(target.shape))
    ref = None
    if ref_chosen_logps is not None:
        ref_logps = dict(ref_chosen_logps=ref_chosen_logps, ref_rejected_logps=ref_rejected_logps)
        check.floats(name, dict(hidden=hidden), **ref_logps)
        for argument, x in ref_logps.items():
            check.shape(name, argument, x, (B,))
        ref = torch.stack((ref_chosen_logps.detach(), ref_rejected_logps.detach()))
    elif use_ref_model:
        reference = ReferenceHead(ref_input, ref_weight, ref_bias)
        ref = _reference_log_probs(name, reference, target, average_log_prob, head_options)
        ref = ref.view(2, B)
    valid = (target != ignore_index).to(hidden.device)
    lengths = valid.sum(-1).view(2, B)
    if ref is not None:
        ref = ref.where(lengths > 0, 0)
    with_log_odds = give_log_odds and not hasattr(weight, "device_mesh")
    with_nll_target = compute_nll_loss and nll_target is not None
    nll_valid = valid if nll_target is None else (nll_target != ignore_index).to(hidden.device)
    num_nll_tokens = nll_valid[:B].sum().clamp(min=1)

    # the classes of each token: its target, and perhaps that of the NLL
    classes = target
    if with_nll_target:
        classes = torch.stack((target, nll_target), -1)
    elif with_log_odds:
        classes = target[..., None]

    def pairs_loss(pairs, log_probs, _):
        nll_log_probs = log_probs
        if with_nll_target or with_log_odds:
            log_probs, *columns = log_probs.unbind(-1)
            nll_log_probs = columns[0] if with_nll_target else log_probs
        sequences = log_probs.sum(-1)
        if average_log_prob:
            sequences = sequences / lengths[:, pairs].clamp(min=1)
        kwargs = {}
        if ref is not None:
            kwargs["ref_chosen_logps"] = ref[0, pairs]
            kwargs["ref_rejected_logps"] = ref[1, pairs]
        if give_lengths:
            kwargs["lengths"] = lengths[:, pairs]
        if with_log_odds:
            pairs_valid = valid.view(2, B, -1)[:, pairs]
            kwargs["log_odds_of"] = log_odds_of_mean(log_probs, columns[-1], pairs_valid)
        value, *others = loss(*sequences, target, **kwargs, beta=beta, **loss_kwargs)
        if compute_nll_loss:
            nll = -nll_log_probs[0].sum() / num_nll_tokens
            value = alpha * nll + value
        else:
            nll = value.new_zeros(())
        return value, *sequences, nll, *others

    value, chosen, rejected, nll, *others = linear_loss(
        pairs_loss,
        hidden,
        weight,
        classes,
        bias,
        parts=2,
        rest_of=int(with_log_odds),
        **head_options,
    )
    with torch.no_grad():
        num_logits = max(valid[:B].numel() * weight.shape[0], 1)
        mean_logits = [
            sum_of_logits(half, weight, bias) / num_logits for half in hidden.detach().chunk(2)
        ]
    return value, (chosen, rejected, *mean_logits, nll, *others)


# ---- single answers ----


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
    """Compute a loss of single answers, each good or bad.

    Args:
        loss: ``loss(logps, preference_labels, target, [ref_logps=, kl=,] beta=,
            **loss_kwargs)``. It is given n of the sequences, and returns their loss divided by the
            number of sequences in ``target``, and their rewards (n,). See `kto_loss`.
        hidden: (B, T, H).
        target: (B, T) integers, already shifted.
        preference_labels: (B,) bool, True for a good answer.
        kl: the reference point of the loss, one number or (B,). None: the loss's default.
        use_ref_model: a reference is required. If one is given, it is used in any case.
        ref_logps: (B,), the reference's log-probabilities in place of ref_input, ref_weight and
            ref_bias.
        Other arguments: as in `paired_preference`.

    Returns:
        The loss, and six 0-d sums: log-probabilities of the good answers, of the bad ones, logits
        likewise, rewards likewise. Only the loss has gradients. The logits are those of all
        positions and classes.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit; no reference. No
            preference_labels: this ValueError is an AssertionError, too.
    """
    name = "unpaired_preference"
    if preference_labels is None:
        raise check.InvalidArgument(f"{name}: preference_labels is None, give one bool a sequence")
    check_numbers(name, dict(ignore_index=ignore_index, beta=beta, **loss_kwargs))
    _check_sequences(name, hidden, target, preference_labels)
    check.floats(name, dict(hidden=hidden), ref_logps=ref_logps)
    if isinstance(kl, torch.Tensor):  # checked by itself: it may be on the host
        check.floats(name, dict(kl=kl))
    check.shape(name, "ref_logps", ref_logps, (len(target),))
    head_options = dict(ignore_index=ignore_index, memory=memory, drop_ignored=drop_ignored)
    if ref_logps is None and (use_ref_model or ref_input is not None):
        reference = ReferenceHead(ref_input, ref_weight, ref_bias)
        ref_logps = _reference_log_probs(name, reference, target, average_log_prob, head_options)
    is_good = preference_labels.to(hidden.device)
    lengths = (target != ignore_index).sum(-1).to(hidden.device)
    if ref_logps is not None:
        ref_logps = ref_logps.detach().where(lengths > 0, 0)
    kl = _reference_point(name, kl, len(target), hidden.device)

    def sequences_loss(rows, log_probs, _):
        sequences = log_probs.sum(-1)
        if average_log_prob:
            sequences = sequences / lengths[rows].clamp(min=1)
        kwargs = {}
        if ref_logps is not None:
            kwargs["ref_logps"] = ref_logps[rows]
        if kl is not None:
            kwargs["kl"] = kl if len(kl) == 1 else kl[rows]
        value, rewards = loss(sequences, is_good[rows], target, **kwargs, beta=beta, **loss_kwargs)
        return value, sequences, rewards

    value, log_probs, rewards = linear_loss(
        sequences_loss, hidden, weight, target, bias, **head_options
    )
    with torch.no_grad():
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logits = hidden.detach().sum(1, dtype=dtype) @ weight.sum(0, dtype=dtype)
        if bias is not None:
            logits += target.shape[1] * bias.sum(dtype=dtype)
        sums = []
        for x in (log_probs, logits, rewards):
            sums += [x.where(is_good, 0).sum(), x.where(~is_good, 0).sum()]
    return value, tuple(sums)


def _reference_point(name, kl, num_sequences, device):
    """Return ``kl`` as a tensor of one element, or of one for each sequence; None if it is None."""
    if kl is None:
        return None
    if not isinstance(kl, torch.Tensor):
        kl = check.finite(name, "kl", kl)
    kl = torch.as_tensor(kl, device=device).detach().reshape(-1)
    if len(kl) not in (1, num_sequences):
        raise ValueError(
            f"{name}: kl has {len(kl)} elements, give one, or one a sequence: {num_sequences}"
        )
    return kl
