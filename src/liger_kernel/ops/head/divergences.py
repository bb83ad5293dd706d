r"""Divergences of a student's and a teacher's logits, and their gradient.

    q = softmax(z_s/T),   p = softmax(z_t/T),   G_v = ∂D/∂log q_v
    loss = (w_s·Σ_valid D(p, q) + w_h·Σ_valid CE(z_s, y))/n
    dz_s = w_s·(G - q·Σ_v G_v)/(T·n) + w_h·(softmax(z_s) - 1[v=y])/n

There is no T². D and G of a class, with M = β·p + (1-β)·q:

    jsd         β·p·log(p/M) + (1-β)·q·log(q/M)    (1-β)·q·log(q/M)
    forward_kl  p·log(p/q)                         -p
    reverse_kl  q·log(q/p)                         q·log(q/p)
    tvd         ½·|p - q|                          ½·sign(q - p)·q
    kl_div      p·(log max(p, β) - log q)          -p
    cosine      β·(1 - cos(z_s, z_t)) of a token   dz_s = -β·(z_t/(|z_s|·|z_t|) - cos·z_s/|z_s|²)

jsd is forward_kl for β = 0, and reverse_kl for β = 1. The G of reverse_kl is without + q, which
drops out of G - q·ΣG. The G of tvd is 0 where only rounding differs. For kl_div the teacher gives p
in place of z_t, and Σp need not be 1.

If the teacher has more classes than the student, the student's z_s/T is 0 there. In an ignored row
everything is 0.

The formulas are here in plain PyTorch. `divergence_terms` has D and G of a class for Triton, and
`divergence_kernels` the kernels that read both models' logits.

Sources: arXiv:1503.02531 (forward KL), arXiv:2306.08543 (reverse KL), arXiv:2306.13649 (JSD),
arXiv:2307.15190 (TVD)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from liger_kernel.core.op import F

MIN_NORM = 1e-8  # the least length of a vector of logits, as in torch's cosine_similarity
TIE_EPS = 64  # eps by which equal probabilities differ if their logits come from two matmuls


@dataclass(frozen=True)
class DistillationOptions:
    """Options of the loss of a student's and a teacher's logits."""

    divergence: str = "jsd"
    beta: float = 0.5  # for kl_div: the least p in its logarithm
    temperature: float = 1.0
    weight_hard: float = 0.5
    weight_soft: float = 0.5
    ignore_index: int = -100


# ---- divergences of log-probabilities (..., V) ----


def forward_kl(log_p, log_q, beta=None):
    """KL(P‖Q) of the teacher P and the student Q.

    It is the loss of knowledge distillation, arXiv:1503.02531, without its T².
    """
    p = log_p.exp()
    # where p is 0, neither the value nor a gradient is NaN
    return (p * (log_p - log_q).where(p != 0, 0)).sum(-1)


def reverse_kl(log_p, log_q, beta=None):
    """KL(Q‖P) of the teacher P and the student Q: MiniLLM, arXiv:2306.08543."""
    return forward_kl(log_q, log_p)


def jsd(log_p, log_q, beta=0.5):
    """β·KL(P‖M) + (1-β)·KL(Q‖M), M = β·P + (1-β)·Q: generalised JSD, arXiv:2306.13649.

    KL(P‖Q) for β = 0 and KL(Q‖P) for β = 1, which are not the limits.
    """
    if beta in (0, 1):
        return reverse_kl(log_p, log_q) if beta else forward_kl(log_p, log_q)
    # the exp of -1e4 is 0, and no -inf is subtracted from another
    log_p = log_p.clamp(min=-1e4)
    log_q = log_q.clamp(min=-1e4)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * forward_kl(log_p, log_m) + (1 - beta) * forward_kl(log_q, log_m)


def tvd(log_p, log_q, beta=None):
    """½·Σ|p - q|, the total variation distance: arXiv:2307.15190.

    The gradient of a difference of 0 is 0. So is the gradient of a difference that is only
    rounding: otherwise a student that equals its teacher would be sent in a random direction.
    """
    p = log_p.exp()
    d = p - log_q.exp()
    tie = d.abs() <= TIE_EPS * torch.finfo(d.dtype).eps * p
    return 0.5 * torch.where(tie, d.detach(), d).abs().sum(-1)


def kl_div(p, log_q, eps):
    """Return p·(log max(p, eps) - log q) of each class. It is 0 where p is 0."""
    return p * (p.clamp(min=eps).log() - log_q).where(p != 0, 0)


# of the log-probabilities of two heads; cosine is of their logits
DIVERGENCES = dict(jsd=jsd, forward_kl=forward_kl, reverse_kl=reverse_kl, tvd=tvd)


def pad_classes(z, classes):
    """Pad the student's logits, divided by T, with 0 for the classes that only the teacher has."""
    return F.pad(z, (0, classes - z.shape[-1]))


def soft_and_hard_sums(student_logits, teacher_logits, target, options, with_hard):
    """Return Σ D and Σ CE over the valid rows of logits (N, V) and (N, V_t).

    Σ CE is 0 without ``with_hard``. For kl_div, ``teacher_logits`` are probabilities.
    """
    wide_dtype = torch.promote_types(student_logits.dtype, torch.float32)
    valid = target != options.ignore_index
    # an ignored row may contain NaN
    x = student_logits.to(wide_dtype).where(valid[:, None], 0)
    y = teacher_logits.to(wide_dtype).where(valid[:, None], 0)
    s = pad_classes(x / options.temperature, y.shape[1])
    t = y / options.temperature
    if options.divergence == "cosine":
        d = options.beta * (1 - F.cosine_similarity(s, t, dim=-1, eps=MIN_NORM))
    elif options.divergence == "kl_div":
        d = kl_div(y, s.log_softmax(-1), options.beta).sum(-1)
    else:
        d = DIVERGENCES[options.divergence](t.log_softmax(-1), s.log_softmax(-1), options.beta)
    ce = x.new_zeros(())
    if with_hard:
        ce = F.cross_entropy(x, target, ignore_index=options.ignore_index, reduction="sum")
    return d.where(valid, 0).sum(), ce
