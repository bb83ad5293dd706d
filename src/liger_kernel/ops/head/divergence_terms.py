"""D and G of one class of a divergence, as Triton functions.

The formulas are in the table of `divergences`. D is a class's share of the divergence, G its
derivative ∂D/∂log q.

EXACT: the logits are fp32. Others have 16 bits, and so has the gradient: there logarithms are to
the base 2, since on sm_90 exp2 is one instruction and exp five.
"""

from __future__ import annotations

import math

import torch

from liger_kernel.core.tile import exp, log_of_normal, tl, triton
from liger_kernel.ops.head.divergences import TIE_EPS
from liger_kernel.ops.head.logits_kernels import times

LOG2_E = tl.constexpr(math.log2(math.e))
TIE = tl.constexpr(TIE_EPS * torch.finfo(torch.float32).eps)


@triton.jit
def exp_or_exp2(x, EXACT: tl.constexpr):
    """Return the exponential of a logarithm, which is to the base 2 unless EXACT."""
    return exp(x) if EXACT else tl.exp2(x)


@triton.jit
def log_or_log2(x, BASE_2: tl.constexpr):
    """Return the logarithm of a positive normal number.

    It is within 1.3 ulp, or to the base 2 within 3e-7.

    x = 2ᵏ·(1 + f) as in `log_of_normal`, with a shorter polynomial.
    """
    if not BASE_2:
        return log_of_normal(x)
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) & -8388608  # k·2²³
    f = (bits - k).to(tl.float32, bitcast=True) - 1.0
    y = 0.29726260901 + f * (-0.272697895765 + f * 0.17063434422)
    y = 1.44269967079 + f * (-0.721375882626 + f * (0.480465024710 + f * (-0.358961850405 + f * y)))
    return k.to(tl.float32) * 1.1920928955078125e-07 + f * y


@triton.jit
def jsd_terms(p, q, log_p, log_q, beta, EXACT: tl.constexpr, BASE_2: tl.constexpr = False):
    # 0·(-200) is 0, 0·(-inf) is not; unlike maximum, where keeps NaN
    log_p = tl.where(log_p < -200.0, -200.0, log_p)
    log_q = tl.where(log_q < -200.0, -200.0, log_q)
    share_q = (1.0 - beta) * q
    if EXACT:
        d = log_q - log_p  # log M = max(log p, log q) + lift
        far = exp(-tl.abs(d))
        lift = log_of_normal(tl.where(d > 0, (1.0 - beta) + beta * far, beta + (1.0 - beta) * far))
        log_q_over_m = tl.where(d > 0, 0.0, d) - lift
        log_p_over_m = tl.where(d < 0, 0.0, -d) - lift
    else:
        m = beta * p + share_q
        # log 1e-37 where m is 0, NaN where it is NaN
        log_m = tl.where(m >= 1e-37, log_or_log2(m, BASE_2), m - (122.9 if BASE_2 else 85.2))
        log_q_over_m = log_q - log_m
        log_p_over_m = log_p - log_m
    g = share_q * log_q_over_m
    return beta * p * log_p_over_m + g, g


@triton.jit
def forward_kl_terms(p, q, log_p, log_q, beta, EXACT: tl.constexpr, BASE_2: tl.constexpr):
    return times(p, log_p - log_q), p * (-LOG2_E if BASE_2 else -1.0)


@triton.jit
def reverse_kl_terms(p, q, log_p, log_q, beta, EXACT: tl.constexpr, BASE_2: tl.constexpr):
    g = times(q, log_q - log_p)
    return g, g


@triton.jit
def tvd_terms(p, q, log_p, log_q, beta, EXACT: tl.constexpr, BASE_2: tl.constexpr):
    half = 0.5 * (LOG2_E if BASE_2 else 1.0)
    d = q - p
    tie = p * TIE
    return half * tl.abs(d), tl.where(d > tie, half * q, tl.where(d < -tie, -half * q, 0.0))


# each returns D and G, in the units of the logarithms
DIVERGENCE_TERMS = dict(
    jsd=jsd_terms,
    forward_kl=forward_kl_terms,
    reverse_kl=reverse_kl_terms,
    tvd=tvd_terms,
)
