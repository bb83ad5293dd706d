r"""The mathematics of the preference losses.

    s = Σ_t log p(y_t)   of a sequence's valid tokens; the mean if a loss averages; 0 without a valid token
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
    """Identity preference optimisation, arXiv:2310.12036: the margin should be 1/(2β). Of means,
    see `MEANS`."""
    return (a - d - 1 / (2 * beta)).square()


def dpo_exo_pair(a, d, beta, label_smoothing, **_):
    """Efficient exact optimisation, arXiv:2402.00856: KL(p_θ ‖ p_r) of a pair, with smoothed
    labels."""
    x, e = beta * (a - d), label_smoothing
    return sigmoid(x) * (logsigmoid(x) - math.log(1 - e)) + sigmoid(-x) * (
        logsigmoid(-x) - math.log(e)
    )


def dpo_nca_pair(a, d, beta, **_):
    """Noise contrastive alignment, arXiv:2402.05369."""
    return -logsigmoid(beta * a) - 0.5 * logsigmoid(-beta * a) - 0.5 * logsigmoid(-beta * d)


def dpo_robust(a, d, beta, label_smoothing, **_):
    """Robust DPO, arXiv:2403.00409: a label is wrong with probability ε."""
    x, e = beta * (a - d), label_smoothing
    return (e * logsigmoid(-x) - (1 - e) * logsigmoid(x)) / (1 - 2 * e)


def dpo_bco_pair(a, d, beta, **_):
    """Binary classifier optimisation, arXiv:2404.04656, without the running mean of rewards."""
    return -logsigmoid(beta * a) - logsigmoid(-beta * d)


def dpo_sppo_hard(a, d, beta, **_):
    """Self-play preference optimisation, arXiv:2405.00675."""
    return (a - 0.5 / beta).square() + (d + 0.5 / beta).square()


def dpo_apo_zero(a, d, beta, **_):
    """Anchored preference optimisation, arXiv:2408.06266: the chosen answer up, the rejected one
    down."""
    return 1 - sigmoid(beta * a) + sigmoid(beta * d)


def dpo_apo_down(a, d, beta, **_):
    """Anchored preference optimisation, arXiv:2408.06266: both answers down, the rejected one
    further."""
    return sigmoid(beta * a) + 1 - sigmoid(beta * (a - d))


def dpo_discopop(a, d, beta, discopop_tau, **_):
    """Discovered preference optimisation, arXiv:2406.08414: the log-ratio modulated loss."""
    x = beta * (a - d)
    modulation = x / discopop_tau
    return -logsigmoid(x) * sigmoid(-modulation) + torch.exp(
        logsigmoid(modulation) - x
    )  # e^-x alone overflows


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
MEANS = {"ipo"}  # these take mean log-probabilities of tokens instead of sums, as their papers do


def smoothed_margin(x, label_smoothing):
    """-log σ(x) with label smoothing ε: the loss of CPO and SimPO. ε as in conservative DPO
    (Mitchell, 2023)."""
    return -(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)


def log_odds(log_p):
    """log (p/(1 - p)) from log p. Of a p that was rounded to 1 it is some large number, without a
    gradient."""
    near = log_p > -0.7
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).tiny)
    return log_p - torch.where(
        near, torch.log(-torch.expm1(log_p)), torch.log1p(-torch.exp(log_p.where(~near, -1)))
    )


def _log_of_log1p(x):
    """log log(1 + e^x)."""
    small = x < -18  # e^x < eps of fp64
    return torch.where(
        small, x - x.where(small, 0).exp() / 2, softplus(x.where(~small, 0), threshold=40).log()
    )


def log_odds_of_mean(log_p, log_rest, valid):
    """log (p/(1 - p)) of the mean log-probability of each sequence, exact for a p of almost 1, too.

    log_p, log_rest, valid (..., T): log-probabilities of the tokens and of all other classes, and
    which tokens count. In logarithms, since 1 - p can be less than a float's least: -log p(token) =
    log(1 + e^(log_rest - log_p)). 0 without a valid token."""
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
# -> their sum divided by the pairs of the whole batch, the rewards of the chosen and of the rejected answers. `target`
# is the whole batch's, two sequences for each pair.


def pairs_of(target):
    """The number of pairs, at least 1."""
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
    a, d = chosen - ref_chosen_logps, rejected - ref_rejected_logps
    means = (a, d) if lengths is None else torch.stack((a, d)) / lengths.clamp(min=1)
    loss = DPO[loss_type](*means, beta, label_smoothing=label_smoothing, discopop_tau=discopop_tau)
    return loss.sum() / pairs_of(target), beta * a, beta * d


def cpo_loss(chosen, rejected, target, beta=0.1, label_smoothing=0.0):
    """Contrastive preference optimisation, arXiv:2401.08417: without a reference model."""
    loss = smoothed_margin(beta * (chosen - rejected), label_smoothing)
    return loss.sum() / pairs_of(target), beta * chosen, beta * rejected


def simpo_loss(chosen, rejected, target, beta=0.1, gamma=0.5, label_smoothing=0.0):
    """Simple preference optimisation, arXiv:2405.14734: for mean log-probabilities, with a margin
    of γ."""
    loss = smoothed_margin(beta * (chosen - rejected) - gamma, label_smoothing)
    return loss.sum() / pairs_of(target), beta * chosen, beta * rejected


def orpo_loss(chosen, rejected, target, beta=0.1, log_odds_of=None, lengths=None):
    """Odds ratio preference optimisation, arXiv:2403.07691, without its NLL.

    ``log_odds_of`` (2, n): those of the answers, if they are known more exactly than
    log-probabilities tell. Pairs with an answer whose length is 0 have no odds ratio, and add
    nothing.

    Two more results: the mean of log σ(log odds ratio), and the mean log odds ratio.
    """
    of_chosen, of_rejected = (
        (log_odds(chosen), log_odds(rejected)) if log_odds_of is None else log_odds_of
    )
    odds, pairs = of_chosen - of_rejected, pairs_of(target)
    ratios = logsigmoid(odds)
    if lengths is not None:
        both = (lengths > 0).all(0)
        odds, ratios = odds.where(both, 0), ratios.where(both, 0)
    ratio = ratios.sum() / pairs
    return -beta * ratio, beta * chosen, beta * rejected, ratio, odds.sum() / pairs


def kto_loss(logps, preference_labels, target, ref_logps=0.0, beta=0.1, kl=0.0):
    """Kahneman-Tversky optimisation, arXiv:2402.01306: each answer is good or bad by itself.

    ``kl`` is the reference point, one number or one for each sequence. -> Σ / sequences of the
    batch, rewards."""
    reward = logps - ref_logps
    sign = preference_labels.to(reward.dtype) * 2 - 1
    return (1 - sigmoid(beta * sign * (reward - kl))).sum() / max(len(target), 1), beta * reward
