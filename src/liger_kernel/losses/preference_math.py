r"""The mathematics of the preference losses.

    s = Σ_t log p(y_t)   of a sequence's valid tokens; the mean if a loss averages
    c, r                 s of the chosen and of the rejected answer to a prompt
    a = c - c_ref,  d = r - r_ref      the log-ratios to the reference model

All tensors have one number for each pair or sequence. "arXiv" numbers name the papers.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import logsigmoid, relu, sigmoid

# ---- DPO and its variants: the loss of each pair, from a, d and beta ----


def dpo_sigmoid(a, d, beta, **_):
    """Direct preference optimisation, arXiv:2305.18290."""
    return -logsigmoid(beta * (a - d))


def dpo_hinge(a, d, beta, **_):
    """The hinge loss of SLiC, arXiv:2305.10425, of DPO's margin."""
    return relu(1 - beta * (a - d))


def dpo_ipo(a, d, beta, **_):
    """Identity preference optimisation, arXiv:2310.12036: the margin should be 1/(2β). Of means, see `MEANS`."""
    return (a - d - 1 / (2 * beta)).square()


def dpo_exo_pair(a, d, beta, label_smoothing, **_):
    """Efficient exact optimisation, arXiv:2402.00856: KL(p_θ ‖ p_r) of a pair, with smoothed labels."""
    x, e = beta * (a - d), label_smoothing
    return sigmoid(x) * (logsigmoid(x) - math.log(1 - e)) + sigmoid(-x) * (logsigmoid(-x) - math.log(e))


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
    """Anchored preference optimisation, arXiv:2408.06266: the chosen answer up, the rejected one down."""
    return 1 - sigmoid(beta * a) + sigmoid(beta * d)


def dpo_apo_down(a, d, beta, **_):
    """Anchored preference optimisation, arXiv:2408.06266: both answers down, the rejected one further."""
    return sigmoid(beta * a) + 1 - sigmoid(beta * (a - d))


def dpo_discopop(a, d, beta, discopop_tau, **_):
    """Discovered preference optimisation, arXiv:2406.08414: the log-ratio modulated loss."""
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
MEANS = {"ipo"}  # these take mean log-probabilities of tokens instead of sums, as their papers do


def smoothed_margin(x, label_smoothing):
    """-log σ(x) with label smoothing: the loss of CPO and SimPO."""
    return -(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)


def log_odds(log_p):
    """log (p/(1 - p)) from log p."""
    log_rest = torch.where(log_p > -0.7, torch.log(-torch.expm1(log_p)), torch.log1p(-torch.exp(log_p)))
    return log_p - log_rest


# ---- losses of some of the pairs ----
#
# -> their sum divided by the pairs of the whole batch, the rewards of the chosen and of the rejected answers. `target`
# is the whole batch's, two sequences for each pair.


def dpo_loss(
    chosen, rejected, target, ref_chosen_logps=0.0, ref_rejected_logps=0.0, beta=0.1, loss_type="sigmoid",
    label_smoothing=0.0, discopop_tau=0.05, lengths=(1, 1),
):  # fmt: skip
    """Direct preference optimisation and its variants, see `DPO`.

    The loss takes log-probabilities divided by ``lengths``. The rewards take them as they are.
    """
    a, d = chosen - ref_chosen_logps, rejected - ref_rejected_logps
    more = dict(label_smoothing=label_smoothing, discopop_tau=discopop_tau)
    loss = DPO[loss_type](a / lengths[0], d / lengths[1], beta, **more)
    return loss.sum() / (len(target) // 2), beta * a, beta * d


def cpo_loss(chosen, rejected, target, beta=0.1, label_smoothing=0.0):
    """Contrastive preference optimisation, arXiv:2401.08417: without a reference model."""
    loss = smoothed_margin(beta * (chosen - rejected), label_smoothing)
    return loss.sum() / (len(target) // 2), beta * chosen, beta * rejected


def simpo_loss(chosen, rejected, target, beta=0.1, gamma=0.5, label_smoothing=0.0):
    """Simple preference optimisation, arXiv:2405.14734: for mean log-probabilities, with a margin of γ."""
    loss = smoothed_margin(beta * (chosen - rejected) - gamma, label_smoothing)
    return loss.sum() / (len(target) // 2), beta * chosen, beta * rejected


def orpo_loss(chosen, rejected, target, beta=0.1):
    """Odds ratio preference optimisation, arXiv:2403.07691, without its NLL.

    Two more results: the mean of log σ(log odds ratio), and the mean log odds ratio.
    """
    odds, pairs = log_odds(chosen) - log_odds(rejected), len(target) // 2
    ratio = logsigmoid(odds).sum() / pairs
    return -beta * ratio, beta * chosen, beta * rejected, ratio, odds.sum() / pairs


def kto_loss(logps, preference_labels, target, ref_logps=0.0, beta=0.1, kl=0.0):
    """Kahneman-Tversky optimisation, arXiv:2402.01306: each answer is good or bad by itself.

    ``kl`` is the reference point, one number or one for each sequence. -> Σ / sequences of the batch, rewards.
    """
    reward = logps - ref_logps
    sign = preference_labels.to(reward.dtype) * 2 - 1
    return (1 - sigmoid(beta * sign * (reward - kl))).sum() / len(target), beta * reward
