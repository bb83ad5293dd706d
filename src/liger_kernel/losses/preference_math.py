r"""The formulas of the preference losses.

    s = Σ_t log p(y_t)   of a sequence's valid tokens, or their mean; 0 without a valid token
    c, r                 s of the chosen and of the rejected answer to a prompt
    a = c - c_ref,  d = r - r_ref      the log-ratios to the reference model

All tensors have one number for each pair or sequence. "arXiv" numbers name the papers.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import logsigmoid, relu, sigmoid, softplus

# ---- DPO and its variants: the loss of each pair, from a, d and beta ----


def dpo_sigmoid(a, d, beta, **_):
    """Direct preference optimisation, arXiv:2305.18290."""
    return -logsigmoid(beta * (a - d))


def dpo_hinge(a, d, beta, **_):
    """The hinge loss of SLiC, arXiv:2305.10425, of DPO's margin."""
    return relu(1 - beta * (a - d))


def dpo_ipo(a, d, beta, **_):
    """Identity preference optimisation, arXiv:2310.12036: the margin should be 1/(2β).

    It takes means, see `MEAN_LOSS_TYPES`.
    """
    return (a - d - 1 / (2 * beta)).square()


def dpo_exo_pair(a, d, beta, label_smoothing, **_):
    """Efficient exact optimisation, arXiv:2402.00856: KL(p_θ ‖ p_r) with smoothed labels."""
    x = beta * (a - d)
    e = label_smoothing
    kl_if_chosen = sigmoid(x) * (logsigmoid(x) - math.log(1 - e))
    kl_if_rejected = sigmoid(-x) * (logsigmoid(-x) - math.log(e))
    return kl_if_chosen + kl_if_rejected


def dpo_nca_pair(a, d, beta, **_):
    """Noise contrastive alignment, arXiv:2402.05369."""
    return -logsigmoid(beta * a) - 0.5 * logsigmoid(-beta * a) - 0.5 * logsigmoid(-beta * d)


def dpo_robust(a, d, beta, label_smoothing, **_):
    """Robust DPO, arXiv:2403.00409: a label is wrong with probability ε."""
    x = beta * (a - d)
    e = label_smoothing
    return (e * logsigmoid(-x) - (1 - e) * logsigmoid(x)) / (1 - 2 * e)


def dpo_bco_pair(a, d, beta, **_):
    """Binary classifier optimisation, arXiv:2404.04656, without the running mean of rewards."""
    return -logsigmoid(beta * a) - logsigmoid(-beta * d)


def dpo_sppo_hard(a, d, beta, **_):
    """Self-play preference optimisation, arXiv:2405.00675."""
    return (a - 0.5 / beta).square() + (d + 0.5 / beta).square()


def dpo_apo_zero(a, d, beta, **_):
    """Anchored preference optimisation, arXiv:2408.06266: chosen answer up, rejected down."""
    return 1 - sigmoid(beta * a) + sigmoid(beta * d)


def dpo_apo_down(a, d, beta, **_):
    """Anchored preference optimisation, arXiv:2408.06266: both down, the rejected further."""
    return sigmoid(beta * a) + 1 - sigmoid(beta * (a - d))


def dpo_discopop(a, d, beta, discopop_tau, **_):
    """Discovered preference optimisation, arXiv:2406.08414: the log-ratio modulated loss."""
    x = beta * (a - d)
    modulation = x / discopop_tau
    exponential = torch.exp(logsigmoid(modulation) - x)  # e^-x alone overflows
    return -logsigmoid(x) * sigmoid(-modulation) + exponential


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
# these take mean log-probabilities of tokens instead of sums, as their papers do
MEAN_LOSS_TYPES = {"ipo"}


def smoothed_margin(x, label_smoothing):
    """-log σ(x) with label smoothing ε: the loss of CPO and SimPO.

    ε as in conservative DPO (Mitchell, 2023).
    """
    return -(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)


def log_odds(log_p):
    """log (p/(1 - p)) from log p.

    For a p that was rounded to 1 it is some large number, without a gradient.
    """
    near_one = log_p > -0.7
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).tiny)
    log_rest = torch.where(
        near_one,
        torch.log(-torch.expm1(log_p)),
        torch.log1p(-torch.exp(log_p.where(~near_one, -1))),
    )
    return log_p - log_rest


def _log_of_log1p(x):
    """log log(1 + e^x)."""
    small = x < -18  # e^x < eps of fp64
    return torch.where(
        small, x - x.where(small, 0).exp() / 2, softplus(x.where(~small, 0), threshold=40).log()
    )


def log_odds_of_mean(log_p, log_rest, valid):
    """log (p/(1 - p)) of the mean log-probability of each sequence, exact for a p of almost 1, too.

    It is 0 without a valid token. All is computed in logarithms, since 1 - p can be less than the
    least float: -log p(token) = log(1 + e^(log_rest - log_p)).

    Args:
        log_p: (..., T), the log-probabilities of the tokens.
        log_rest: (..., T), those of all other classes.
        valid: (..., T) bool, which tokens count.
    """
    empty = ~valid.any(-1, keepdim=True)
    log_nll = _log_of_log1p((log_rest - log_p).clamp(min=-1e4).where(valid, 0))
    lengths = valid.sum(-1).clamp(min=1).to(log_nll.dtype)
    log_nll = log_nll.where(valid | empty, -torch.inf).logsumexp(-1) - lengths.log()
    nll = log_nll.exp()
    small = log_nll < -18
    log_rest = torch.where(small, log_nll - nll / 2, torch.log(-torch.expm1(-nll.where(~small, 1))))
    return (-nll - log_rest).where(~empty.squeeze(-1), 0)


# ---- losses of some of the pairs ----
#
# Each returns the sum of the losses divided by the number of pairs of the whole batch, the rewards
# of the chosen answers, and those of the rejected ones. `target` is that of the whole batch, with
# two sequences for each pair.


def num_pairs(target):
    """Return the number of pairs, at least 1."""
    return max(len(target) // 2, 1)


def dpo_loss(
    chosen,
    rejected,
    target,
    ref_chosen_logps=0.0,
    ref_rejected_logps=0.0,
    beta=0.1,
    loss_type="sigmoid",
    label_smoothing=0.0,
    discopop_tau=0.05,
    lengths=None,
):
    """Direct preference optimisation and its variants, see `DPO`.

    The loss takes log-probabilities divided by ``lengths``. The rewards take them as they are.
    """
    a = chosen - ref_chosen_logps
    d = rejected - ref_rejected_logps
    log_ratios = (a, d)
    if lengths is not None:
        log_ratios = torch.stack(log_ratios) / lengths.clamp(min=1)
    loss = DPO[loss_type](
        *log_ratios, beta, label_smoothing=label_smoothing, discopop_tau=discopop_tau
    )
    return loss.sum() / num_pairs(target), beta * a, beta * d


def cpo_loss(chosen, rejected, target, beta=0.1, label_smoothing=0.0):
    """Contrastive preference optimisation, arXiv:2401.08417: without a reference model."""
    loss = smoothed_margin(beta * (chosen - rejected), label_smoothing)
    return loss.sum() / num_pairs(target), beta * chosen, beta * rejected


def simpo_loss(chosen, rejected, target, beta=0.1, gamma=0.5, label_smoothing=0.0):
    """Simple preference optimisation, arXiv:2405.14734: mean log-probabilities, margin γ."""
    loss = smoothed_margin(beta * (chosen - rejected) - gamma, label_smoothing)
    return loss.sum() / num_pairs(target), beta * chosen, beta * rejected


def orpo_loss(chosen, rejected, target, beta=0.1, log_odds_of=None, lengths=None):
    """Odds ratio preference optimisation, arXiv:2403.07691, without its NLL.

    ``log_odds_of`` (2, n): the log-odds of the answers, if they are known more exactly than from
    the log-probabilities. Pairs with an answer whose length is 0 have no odds ratio, and add
    nothing.

    Also returns the mean of log σ(log odds ratio), and the mean log odds ratio.
    """
    if log_odds_of is None:
        chosen_log_odds, rejected_log_odds = log_odds(chosen), log_odds(rejected)
    else:
        chosen_log_odds, rejected_log_odds = log_odds_of
    log_odds_ratio = chosen_log_odds - rejected_log_odds
    log_sigmoid = logsigmoid(log_odds_ratio)
    if lengths is not None:
        has_tokens = (lengths > 0).all(0)
        log_odds_ratio = log_odds_ratio.where(has_tokens, 0)
        log_sigmoid = log_sigmoid.where(has_tokens, 0)
    pairs = num_pairs(target)
    mean = log_sigmoid.sum() / pairs
    return -beta * mean, beta * chosen, beta * rejected, mean, log_odds_ratio.sum() / pairs


def kto_loss(logps, preference_labels, target, ref_logps=0.0, beta=0.1, kl=0.0):
    """Kahneman-Tversky optimisation, arXiv:2402.01306: each answer is good or bad by itself.

    ``kl`` is the reference point, one number or one for each sequence. Returns the sum of the
    losses divided by the number of sequences of the batch, and the rewards.
    """
    reward = logps - ref_logps
    sign = preference_labels.to(reward.dtype) * 2 - 1
    return (1 - sigmoid(beta * sign * (reward - kl))).sum() / max(len(target), 1), beta * reward
