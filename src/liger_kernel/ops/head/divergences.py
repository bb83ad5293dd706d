r"""Divergences of a student's and a teacher's logits, and their gradient.

    q = softmax(z_s/T),   p = softmax(z_t/T),   loss = (w_s·Σ_valid D(p, q) + w_h·Σ_valid CE(z_s, y))/n
    dz_s = w_s·(G - q·Σ_v G_v)/(T·n) + w_h·(softmax(z_s) - 1[v=y])/n,   G_v = ∂D/∂log q_v

There is no T². D and G of a class, where M = β·p + (1-β)·q:

    jsd         β·p·log(p/M) + (1-β)·q·log(q/M)    (1-β)·q·log(q/M)      (forward_kl for β = 0, reverse_kl for β = 1)
    forward_kl  p·log(p/q)                         -p
    reverse_kl  q·log(q/p)                         q·log(q/p)            (+ q, which drops out of G - q·ΣG)
    tvd         ½·|p - q|                          ½·sign(q - p)·q                   (0 where only rounding differs)
    kl_div      p·(log max(p, β) - log q)          -p                    (p given, in place of z_t; Σp need not be 1)
    cosine      β·(1 - cos(z_s, z_t)) of a token   dz_s = -β·(z_t/(|z_s|·|z_t|) - cos·z_s/|z_s|²)

Both models' logits are read three times: by `_statistics` (the log-sum-exps, or cosine's sums), by
`_compare` (ΣD and ΣG of each token), and by `_compare` again, which writes the gradient over the
student's logits. kl_div needs no second time: ΣG = -Σp is one of the statistics, and ΣD comes with
the gradient. As in `logits` the student's tokens are contiguous, each lane keeps its own maximum
and sums, and a log-sum-exp is kept as its two parts, so that a confident row keeps its digits. The
teacher's logits and p have any strides.

If the teacher has more classes than the student, the student's z_s/T is 0 there. An ignored row
gives 0 everywhere.

Sources: arXiv:1503.02531 (forward KL), arXiv:2306.08543 (reverse KL), arXiv:2306.13649 (JSD),
arXiv:2307.15190 (TVD)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import F
from liger_kernel.core.tile import (
    INF,
    cdiv,
    exp,
    finite,
    log,
    log_of_normal,
    next_power_of_2,
    online_max,
    parts,
    tl,
    triton,
)
from liger_kernel.ops.head.logits import target_logit, times

EPS = 1e-8  # the least length of a vector of logits, as in torch's cosine_similarity
TIE = 64  # eps by which equal probabilities differ if their logits come from two matmuls


@dataclass(frozen=True)
class DistillationOptions:
    """What the loss depends on beside logits and targets."""

    divergence: str = "jsd"
    beta: float = 0.5  # of kl_div the least p in its logarithm
    temperature: float = 1.0
    weight_hard: float = 0.5
    weight_soft: float = 0.5
    ignore_index: int = -100


# ---- of log-probabilities (..., V), in plain PyTorch ----


def forward_kl(log_p, log_q, beta=None):
    """KL(P‖Q) of the teacher P and the student Q: knowledge distillation, arXiv:1503.02531, without
    its T²."""
    p = log_p.exp()
    return (p * (log_p - log_q).where(p != 0, 0)).sum(
        -1
    )  # where p is 0, neither the value nor a gradient is NaN


def reverse_kl(log_p, log_q, beta=None):
    """KL(Q‖P) of the teacher P and the student Q: MiniLLM, arXiv:2306.08543."""
    return forward_kl(log_q, log_p)


def jsd(log_p, log_q, beta=0.5):
    """β·KL(P‖M) + (1-β)·KL(Q‖M), M = β·P + (1-β)·Q: generalised JSD, arXiv:2306.13649.

    KL(P‖Q) for β = 0 and KL(Q‖P) for β = 1, which are not the limits.
    """
    if beta in (0, 1):
        return reverse_kl(log_p, log_q) if beta else forward_kl(log_p, log_q)
    log_p, log_q = (
        log_p.clamp(min=-1e4),
        log_q.clamp(min=-1e4),
    )  # their exp is 0, and no -inf is subtracted from one
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * forward_kl(log_p, log_m) + (1 - beta) * forward_kl(log_q, log_m)


def tvd(log_p, log_q, beta=None):
    """½·Σ|p - q|, the total variation distance: arXiv:2307.15190.

    The gradient of a difference of 0 is 0. So is that of one which is rounding only, or a student
    that equals its teacher would be sent in a random direction."""
    p, q = log_p.exp(), log_q.exp()
    d = p - q
    tie = d.abs() <= TIE * torch.finfo(d.dtype).eps * p
    return 0.5 * torch.where(tie, d.detach(), d).abs().sum(-1)


def kl_div(p, log_q, eps):
    """p·(log max(p, eps) - log q), not added up; 0 where p is 0."""
    return p * (p.clamp(min=eps).log() - log_q).where(p != 0, 0)


DIVERGENCES = dict(
    jsd=jsd, forward_kl=forward_kl, reverse_kl=reverse_kl, tvd=tvd
)  # of two heads, as cosine is


def padded(z, classes):
    """The student's tempered logits, 0 for the classes that only the teacher has."""
    return F.pad(z, (0, classes - z.shape[-1]))


def of_logits(x, teacher, target, options, hard):
    """-> Σ D, Σ CE (0 unless wanted) over the valid rows of logits (N, V), (N, V_t); of kl_div the
    teacher's are p."""
    ignore_index, temperature = options.ignore_index, options.temperature
    wide = torch.promote_types(x.dtype, torch.float32)
    valid = target != ignore_index
    x, teacher = (
        z.to(wide).where(valid[:, None], 0) for z in (x, teacher)
    )  # what is ignored may be NaN
    s, t = padded(x / temperature, teacher.shape[1]), teacher / temperature
    if options.divergence == "cosine":
        d = options.beta * (1 - F.cosine_similarity(s, t, dim=-1, eps=EPS))
    elif options.divergence == "kl_div":
        d = kl_div(teacher, s.log_softmax(-1), options.beta).sum(-1)
    else:
        d = DIVERGENCES[options.divergence](t.log_softmax(-1), s.log_softmax(-1), options.beta)
    ce = (
        F.cross_entropy(x, target, ignore_index=ignore_index, reduction="sum")
        if hard
        else x.new_zeros(())
    )
    return d.where(valid, 0).sum(), ce


# ---- kernels ----
#
# EXACT: the logits are fp32. Others have 16 bits, and so has the gradient: there logarithms are to
# the base 2, since on sm_90 exp2 is one instruction and exp five.

LOG2_E = tl.constexpr(math.log2(math.e))
ROUNDING = tl.constexpr(TIE * torch.finfo(torch.float32).eps)


@triton.jit
def _power(x, EXACT: tl.constexpr):
    """The exponential of a logarithm."""
    return exp(x) if EXACT else tl.exp2(x)


@triton.jit
def _log(x, BASE_2: tl.constexpr):
    """The logarithm of a positive normal number: within 1.3 ulp, or to the base 2 within 3e-7.

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
def _jsd(p, q, log_p, log_q, beta, EXACT: tl.constexpr, BASE_2: tl.constexpr = False):
    log_p = tl.where(
        log_p < -200.0, -200.0, log_p
    )  # 0·(-200) is 0, 0·(-inf) is not; unlike maximum, this keeps NaN
    log_q = tl.where(log_q < -200.0, -200.0, log_q)
    of_q = (1.0 - beta) * q
    if EXACT:
        d = log_q - log_p  # log M = max(log p, log q) + lift
        far = exp(-tl.abs(d))
        lift = log_of_normal(tl.where(d > 0, (1.0 - beta) + beta * far, beta + (1.0 - beta) * far))
        q_from_m, p_from_m = tl.where(d > 0, 0.0, d) - lift, tl.where(d < 0, 0.0, -d) - lift
    else:
        m = beta * p + of_q
        log_m = tl.where(
            m >= 1e-37, _log(m, BASE_2), m - (122.9 if BASE_2 else 85.2)
        )  # of 0 log 1e-37, of NaN NaN
        q_from_m, p_from_m = log_q - log_m, log_p - log_m
    of_q *= q_from_m
    return beta * p * p_from_m + of_q, of_q


@triton.jit
def _forward_kl(p, q, log_p, log_q, beta, EXACT: tl.constexpr, BASE_2: tl.constexpr):
    return times(p, log_p - log_q), p * (-LOG2_E if BASE_2 else -1.0)


@triton.jit
def _reverse_kl(p, q, log_p, log_q, beta, EXACT: tl.constexpr, BASE_2: tl.constexpr):
    of_q = times(q, log_q - log_p)
    return of_q, of_q


@triton.jit
def _tvd(p, q, log_p, log_q, beta, EXACT: tl.constexpr, BASE_2: tl.constexpr):
    half = 0.5 * (LOG2_E if BASE_2 else 1.0)
    d = q - p
    tie = p * ROUNDING
    return half * tl.abs(d), tl.where(d > tie, half * q, tl.where(d < -tie, -half * q, 0.0))


OF_A_CLASS = dict(
    jsd=_jsd, forward_kl=_forward_kl, reverse_kl=_reverse_kl, tvd=_tvd
)  # -> D, G, in the logs' units
SLOTS = 6  # numbers of a token, in `_statistics` and `_merge`
LEAST = tl.constexpr(EPS)
ALIGNED = 64  # classes of a teacher's row that are read side by side begin at a multiple of it


@triton.jit
def _strip(x_ptr, more_ptr, split, W, STRIP):
    """This program's classes: the tensor with them, the class that is its first, and where they
    begin and end.

    As `of_program`, but of two parts the second is cut where strips are aligned: ``begin`` may be
    before its first."""
    k = tl.program_id(1)
    begin, first, end = k * STRIP, 0, W
    if more_ptr is not None:
        before = tl.cdiv(split, STRIP)
        later = k >= before
        begin = tl.where(later, split // 64 * 64 + (k - before) * STRIP, begin)
        first, end = tl.where(later, split, 0), tl.where(later, W, split)
        x_ptr = tl.where(later, more_ptr, x_ptr)
    return x_ptr, first, begin, tl.minimum(begin + STRIP, end)


def _strips(split, W, strip):
    return cdiv(split, strip) + cdiv(W - split // ALIGNED * ALIGNED, strip)


@triton.jit
def _block(BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, EACH: tl.constexpr):
    """The classes of an iteration, from 0 on (EACH, lanes), and the lanes' tokens; neighbours have
    neighbouring ones.

    Two axes, since versions of Triton differ in which of three they give to a thread.
    """
    lane = tl.arange(0, BLOCK_V * BLOCK_T)
    i = tl.arange(0, EACH)[:, None] * BLOCK_V + lane[None, :] // BLOCK_T
    return i, tl.program_id(0) * BLOCK_T + lane % BLOCK_T


@triton.jit
def _summed(x, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr):
    """Of each token, over its lanes."""
    return tl.sum(tl.reshape(x, (BLOCK_V, BLOCK_T)), axis=0)


@triton.jit
def _of_teacher(
    y_ptr,
    stride_v,
    stride_t,
    first,
    begin,
    start,
    end,
    T,
    W,
    other,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EACH: tl.constexpr,
):
    """y (EACH, lanes) of the classes from begin + start on.

    If its ROWS, the classes of a token, are contiguous, a warp reads along these, and what is
    beyond ``end`` is loaded all the same: W may be known to be a multiple of 16, and then a load is
    16 bytes wide."""
    y = (
        y_ptr
        + (begin.to(tl.int64) + start) * stride_v
        + tl.program_id(0).to(tl.int64) * BLOCK_T * stride_t
    )
    if ROWS:
        i, j = tl.arange(0, EACH * BLOCK_V)[:, None], tl.arange(0, BLOCK_T)[None, :]
        c, t = begin + start + i, tl.program_id(0) * BLOCK_T + j
        y = tl.load(y + (i * stride_v + j * stride_t), mask=(c < W) & (t < T))
        y = tl.reshape(y, (EACH, BLOCK_V * BLOCK_T)).to(tl.float32)
        i, t = _block(BLOCK_T, BLOCK_V, EACH)
        c = begin + start + i
        y = tl.where((c >= first) & (c < end) & (t[None, :] < T), y, other)
    else:
        i, t = _block(BLOCK_T, BLOCK_V, EACH)
        c, j = begin + start + i, tl.arange(0, BLOCK_V * BLOCK_T) % BLOCK_T
        inside = (c >= first) & (c < end) & (t[None, :] < T)
        y = tl.load(y + (i * stride_v + j[None, :] * stride_t), mask=inside, other=other).to(
            tl.float32
        )
    return y


@triton.jit
def _one_more(top, total, z, scale, EXACT: tl.constexpr):
    """The running maxima of the lanes and Σ power((z - max)·scale), with further z (EACH,
    lanes)."""
    new, shift = online_max(top, tl.max(z, axis=0))
    more = tl.sum(_power((z - shift[None, :]) * scale, EXACT), axis=0)
    return new, total * _power((top - shift) * scale, EXACT) + more


@triton.jit
def _store_log_sum(
    part,
    slot,
    top,
    total,
    scale,
    mask,
    EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The maximum and the sum of each token."""
    top, total = tl.reshape(top, (BLOCK_V, BLOCK_T)), tl.reshape(total, (BLOCK_V, BLOCK_T))
    highest = tl.max(top, axis=0)
    total *= _power((top - finite(highest)[None, :]) * scale, EXACT)
    tl.store(part, highest, mask=mask)
    tl.store(part + slot, tl.sum(total, axis=0), mask=mask)


@kernel
def _statistics(
    x_ptr,
    more_ptr,
    split,
    y_ptr,
    target_ptr,
    part_ptr,
    stride_x,
    stride_y,
    stride_t,
    T,
    V,
    W,
    STRIP,
    ignore_index,
    scale,
    COSINE: tl.constexpr,
    GIVEN: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EACH: tl.constexpr,
):
    """One program: STRIP classes of BLOCK_T tokens, x of the student and y of the teacher.

    Slots: max z_s and Σ exp((z_s - max)/T), likewise of z_t (or Σ z_s², Σ z_t², Σ z_s·z_t); with
    APART max z_s and Σ exp(z_s - max). If p is GIVEN, in place of z_t's: Σ p."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    x_ptr, first, begin, end = _strip(x_ptr, more_ptr, split, W, STRIP)
    target = tl.load(target_ptr + tokens, mask=tokens < T, other=ignore_index)
    if tl.sum((target != ignore_index).to(tl.int32)) == 0:
        return
    i, t = _block(BLOCK_T, BLOCK_V, EACH)
    row = begin.to(tl.int64) - first
    x = x_ptr + (i * stride_x + t[None, :])
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    EMPTY: tl.constexpr = 0.0 if COSINE else -INF
    OF_1: tl.constexpr = 1.0 if EXACT else LOG2_E
    scale *= OF_1
    top_q = tl.full((BLOCK_V * BLOCK_T,), -INF, dtype=tl.float32)
    sum_q = tl.zeros((BLOCK_V * BLOCK_T,), dtype=tl.float32)
    top_p, sum_p, top_z, sum_z, ss, tt, st = top_q, sum_q, top_q, sum_q, sum_q, sum_q, sum_q
    given = tl.zeros((EACH, BLOCK_V * BLOCK_T), dtype=tl.float32)
    for start in range(0, end - begin, EACH * BLOCK_V):
        c = begin + start + i
        inside = (c < end) & (t < T)[None, :]
        if more_ptr is not None:
            inside &= c >= first
        s = tl.load(x + (row + start) * stride_x, mask=inside & (c < V), other=EMPTY).to(tl.float32)
        z = _of_teacher(
            y_ptr,
            stride_y,
            stride_t,
            first,
            begin,
            start,
            end,
            T,
            W,
            0.0 if GIVEN else EMPTY,
            ROWS,
            BLOCK_T,
            BLOCK_V,
            EACH,
        )
        if COSINE:
            ss += tl.sum(s * s, axis=0)
            tt += tl.sum(z * z, axis=0)
            st += tl.sum(s * z, axis=0)
            s = tl.where(inside & (c < V), s, -INF)
        else:
            top_q, sum_q = _one_more(top_q, sum_q, s, scale, EXACT)
            if GIVEN:
                given += z
            else:
                top_p, sum_p = _one_more(top_p, sum_p, z, scale, EXACT)
        if APART:
            top_z, sum_z = _one_more(top_z, sum_z, s, OF_1, EXACT)

    slot, mask = tl.num_programs(1) * T, tokens < T
    part = part_ptr + tl.program_id(1) * T + tokens
    if COSINE:
        tl.store(part, _summed(ss, BLOCK_T, BLOCK_V), mask=mask)
        tl.store(part + slot, _summed(tt, BLOCK_T, BLOCK_V), mask=mask)
        tl.store(part + 2 * slot, _summed(st, BLOCK_T, BLOCK_V), mask=mask)
    else:
        _store_log_sum(part, slot, top_q, sum_q, scale, mask, EXACT, BLOCK_T, BLOCK_V)
        if GIVEN:
            tl.store(part + 2 * slot, _summed(tl.sum(given, axis=0), BLOCK_T, BLOCK_V), mask=mask)
        else:
            _store_log_sum(
                part + 2 * slot, slot, top_p, sum_p, scale, mask, EXACT, BLOCK_T, BLOCK_V
            )
    if APART:
        _store_log_sum(part + 4 * slot, slot, top_z, sum_z, OF_1, mask, EXACT, BLOCK_T, BLOCK_V)


@triton.jit
def _load_log_sum(part, slot, scale, mask):
    """The maximum and the sum of all strips."""
    tops = tl.load(part, mask=mask, other=-INF)
    top = tl.max(tops, axis=0)
    keep = exp((tops - finite(top)[None, :]) * scale)
    return top, tl.sum(keep * tl.load(part + slot, mask=mask, other=0.0), axis=0)


@triton.jit
def _store_two(stats, T, top, total, valid, known):
    tl.store(stats, tl.where(valid, top, 0.0), mask=known)
    tl.store(stats + T, tl.where(valid, log(total), 0.0), mask=known)


@triton.jit
def _load_two(stats, T, known):
    return tl.load(stats, mask=known, other=0.0), tl.load(stats + T, mask=known, other=0.0)


@kernel
def _merge(
    part_ptr,
    x_ptr,
    more_ptr,
    split,
    target_ptr,
    stats_ptr,
    soft_ptr,
    hard_ptr,
    stride_x,
    N,
    T,
    V,
    W,
    ignore_index,
    scale,
    beta,
    COSINE: tl.constexpr,
    GIVEN: tl.constexpr,
    APART: tl.constexpr,
    HARD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """N strips become one. (As in `logits`, one launch writes all outputs: hence the many
    arguments.)

    Statistics (SLOTS, T): the maxima of `_statistics` and the logarithms of its sums. For cosine
    they are the factors of z_t and z_s in the gradient; where p is GIVEN, Σp and Σp/Σ exp((z_s -
    max)/T) are in place of z_t's. CE goes to ``hard``, cosine's loss to ``soft``."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    known = t < T
    n = tl.arange(0, BLOCK_N)[:, None]
    slot, part = N * T, part_ptr + n * T + t[None, :]
    mask = (n < N) & known[None, :]
    target = tl.load(target_ptr + t, mask=known, other=ignore_index)
    valid = target != ignore_index
    mask = mask & valid[None, :]
    stats = stats_ptr + t
    if COSINE:
        s = tl.sqrt(tl.sum(tl.load(part, mask=mask, other=0.0), axis=0))
        z = tl.sqrt(tl.sum(tl.load(part + slot, mask=mask, other=0.0), axis=0))
        st = tl.sum(tl.load(part + 2 * slot, mask=mask, other=0.0), axis=0)
        short = s <= LEAST
        s, z = (
            tl.where(short, LEAST, s),
            tl.where(z <= LEAST, LEAST, z),
        )  # unlike maximum, this keeps NaN
        cosine = st / s / z
        tl.store(stats, -beta / s / z, mask=known)
        tl.store(stats + T, tl.where(short, 0.0, beta * cosine / s / s), mask=known)
        tl.store(soft_ptr + t, tl.where(valid, beta * (1.0 - cosine), 0.0), mask=known)
    else:
        top, total = _load_log_sum(part, slot, scale, mask)
        if W > V:  # zeros for the classes that only the teacher has
            higher = tl.maximum(top, 0.0)
            total, top = (
                total * exp((top - higher) * scale) + (W - V) * exp(-higher * scale),
                higher,
            )
        _store_two(stats, T, top, total, valid, known)
        if GIVEN:
            p = tl.sum(tl.load(part + 2 * slot, mask=mask, other=0.0), axis=0)
            tl.store(stats + 2 * T, tl.where(valid, p, 0.0), mask=known)
            tl.store(stats + 3 * T, tl.where(valid, p / total, 0.0), mask=known)
        else:
            top, total = _load_log_sum(part + 2 * slot, slot, scale, mask)
            _store_two(stats + 2 * T, T, top, total, valid, known)
    if HARD:
        if APART:
            part += 4 * slot
        top, total = _load_log_sum(part, slot, 1.0, mask)
        _store_two(stats + 4 * T, T, top, total, valid, known)
        here = valid & (target >= 0) & (target < V)
        zy = target_logit(x_ptr, more_ptr, split, t, target, stride_x, here, float("nan")).to(
            tl.float32
        )
        tl.store(hard_ptr + t, tl.where(valid, log(total) + (top - zy), 0.0), mask=known)


@kernel
def _compare(
    x_ptr,
    more_ptr,
    split,
    y_ptr,
    target_ptr,
    stats_ptr,
    sum_ptr,
    norm_ptr,
    stride_x,
    stride_y,
    stride_t,
    T,
    V,
    W,
    STRIP,
    ignore_index,
    scale,
    beta,
    weight_hard,
    weight_soft,
    DIVERGE: tl.constexpr,
    GRADIENT: tl.constexpr,
    COSINE: tl.constexpr,
    GIVEN: tl.constexpr,
    HARD: tl.constexpr,
    SAME: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EACH: tl.constexpr,
):
    """One program: STRIP classes of BLOCK_T tokens. Fills sum with ΣD, ΣG and Σq over them.

    With GRADIENT it overwrites the student's logits with their gradient instead. Where p is GIVEN,
    ΣG is known before, and it does both: sum is ΣD but for log Σ exp((z_s - max)/T)·Σp. SAME:
    softmax(z_s) is q, and q is there."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    known = tokens < T
    x_ptr, first, begin, end = _strip(x_ptr, more_ptr, split, W, STRIP)
    i, t = _block(BLOCK_T, BLOCK_V, EACH)
    row = begin.to(tl.int64) - first
    x = x_ptr + (i * stride_x + t[None, :])
    target = tl.load(target_ptr + tokens, mask=known, other=ignore_index)
    valid = target != ignore_index
    slot, part = tl.num_programs(1) * T, tl.program_id(1) * T + tokens
    if tl.sum(valid.to(tl.int32)) == 0:
        if GRADIENT:
            for start in range(0, end - begin, EACH * BLOCK_V):
                c = begin + start + i
                zeros = tl.zeros((EACH, BLOCK_V * BLOCK_T), dtype=x_ptr.dtype.element_ty)
                tl.store(
                    x + (row + start) * stride_x,
                    zeros,
                    mask=(c >= first) & (c < end) & (t < T)[None, :],
                )
        if GIVEN or not GRADIENT:
            for k in range(1 if GIVEN else 3):
                tl.store(
                    sum_ptr + part + k * slot, tl.zeros((BLOCK_T,), dtype=tl.float32), mask=known
                )
        return

    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    OF_1: tl.constexpr = 1.0 if EXACT else LOG2_E
    known_lane = t < T
    target = tl.load(target_ptr + t, mask=known_lane, other=ignore_index)
    valid_lane = (target != ignore_index)[None, :]
    target = tl.where((target >= begin) & (target < end), target - begin, -1).to(tl.int32)[None, :]
    stats = stats_ptr + t
    top_q, log_sum_q = _load_two(stats, T, known_lane)
    top_p, log_sum_p, of_q = top_q, log_sum_q, top_q
    if not COSINE:
        top_p, log_sum_p = _load_two(
            stats + 2 * T, T, known_lane
        )  # of GIVEN p: Σp and Σp/Σ exp((z_s - max)/T)
    if not COSINE and not GIVEN:
        log_sum_p, log_sum_q = log_sum_p * OF_1, log_sum_q * OF_1
    top, log_sum, soft, hard = top_q, log_sum_q, 0.0, 0.0
    if GRADIENT:
        n = tl.load(norm_ptr)
        soft, hard = weight_soft / n, weight_hard / n
        if not COSINE:
            soft *= scale
            if GIVEN:
                log_sum_p *= soft
            else:
                soft /= OF_1
                of_q = tl.load(sum_ptr + t, mask=known_lane, other=0.0)
        if HARD and not SAME:
            top, log_sum = _load_two(stats + 4 * T, T, known_lane)
            log_sum *= OF_1
    scale *= OF_1
    all_d = tl.zeros((BLOCK_V * BLOCK_T,), dtype=tl.float32)
    all_g, all_q = all_d, all_d
    for start in range(0, end - begin, EACH * BLOCK_V):
        c = begin + start + i
        inside = (c < end) & (t < T)[None, :]
        if more_ptr is not None:
            inside &= c >= first
        at = x + (row + start) * stride_x
        s = tl.load(at, mask=inside & (c < V), other=-INF).to(tl.float32)
        z = _of_teacher(
            y_ptr,
            stride_y,
            stride_t,
            first,
            begin,
            start,
            end,
            T,
            W,
            0.0 if GIVEN else -INF,
            ROWS,
            BLOCK_T,
            BLOCK_V,
            EACH,
        )
        if W > V:
            s = tl.where(inside & (c >= V), 0.0, s)
        q = s
        if COSINE:
            dz = soft * (top_q[None, :] * z + log_sum_q[None, :] * s)
        elif GIVEN:
            log_q = (s - top_q[None, :]) * scale
            dz = _power(log_q, EXACT) * log_sum_p[None, :] - soft * z
            all_d += tl.sum(times(z, _log(tl.maximum(z, beta), not EXACT) - log_q), axis=0)
        else:
            log_p = (z - top_p[None, :]) * scale - log_sum_p[None, :]
            log_q = (s - top_q[None, :]) * scale - log_sum_q[None, :]
            p, q = _power(log_p, EXACT), _power(log_q, EXACT)
            d, g = DIVERGE(p, q, log_p, log_q, beta, EXACT, not EXACT)
            dz = soft * (g - q * of_q[None, :])
            if not GRADIENT:  # what is not inside has p = q = 0
                all_d += tl.sum(d, axis=0)
                all_g += tl.sum(g, axis=0)
                all_q += tl.sum(q, axis=0)
        if GRADIENT:
            if HARD:
                if not SAME:
                    q = _power((s - top[None, :]) * OF_1 - log_sum[None, :], EXACT)
                dz += hard * (q - (start + i == target).to(tl.float32))
            dz = tl.where(valid_lane, dz, 0.0).to(x_ptr.dtype.element_ty)
            tl.store(at, dz, mask=inside)
    if GIVEN or not GRADIENT:
        tl.store(
            sum_ptr + part,
            tl.where(valid, _summed(all_d, BLOCK_T, BLOCK_V) / OF_1, 0.0),
            mask=known,
        )
    if not GIVEN and not GRADIENT:
        tl.store(
            sum_ptr + part + slot,
            tl.where(valid, _summed(all_g, BLOCK_T, BLOCK_V), 0.0),
            mask=known,
        )
        tl.store(
            sum_ptr + part + 2 * slot,
            tl.where(valid, _summed(all_q, BLOCK_T, BLOCK_V), 0.0),
            mask=known,
        )


# ---- launches ----


STRIP = 1024  # classes of a program


def _launch(x, each, rows):
    """Tokens of a program that reads both, and its launch, with so many classes of a lane in an
    iteration.

    A warp has 256 neighbouring logits, so that warps exchange nothing before the end.

    Instructions of an element in the compiled loop, bf16 on sm_90, Triton 3.6, with 1, 2 and 4
    classes of a lane in an iteration: `_statistics` of two heads 30, 23, 19; `_compare` of jsd 41,
    40, 39, with the gradient 41, 40, 38."""
    tokens, each = min(next_power_of_2(x.shape[0]), 64), max(each, 2) if rows else each
    return tokens, dict(
        BLOCK_T=tokens, BLOCK_V=1024 // tokens, EACH=each, num_warps=devices.warps(4, x)
    )


EACH_OF_STATISTICS, EACH_OF_SUMS, EACH_OF_GRADIENT = 4, 1, 2


def beyond_offsets(y):
    """Whether y's strides are too large: what a program reads at once is reached by an offset of 32
    bits."""
    return 64 * y.stride(0) + 1024 * EACH_OF_STATISTICS * y.stride(1) >= 2**31


def compare_logits(x, y, target, norm, options, gradient, soft, hard):
    """Fill soft (T,), D, and hard (T,), CE, or None, for logits x (T, V), whose tokens are
    contiguous, and y (T, V_t).

    With ``gradient`` x becomes that of w_h·hard + w_s·soft, divided by ``norm`` (a tensor). x may
    be in two parts. y has any strides that are not `beyond_offsets`."""
    (x, more, split, V), T, W = parts(x), *y.shape
    strides, scale, sizes = (
        (x.stride(1), y.stride(1), y.stride(0)),
        1.0 / options.temperature,
        (T, V, W),
    )
    cosine, given = options.divergence == "cosine", options.divergence == "kl_div"
    strips, rows = _strips(split, W, STRIP), y.stride(1) == 1 and y.stride(0) != 1
    part = torch.empty((SLOTS, strips, T), dtype=torch.float32, device=x.device)
    stats = torch.empty((SLOTS, T), dtype=torch.float32, device=x.device)
    kind = dict(COSINE=cosine, GIVEN=given)
    apart = dict(APART=hard is not None and (cosine or scale != 1.0))
    tokens, launch = _launch(x, 2 if rows and not given else EACH_OF_STATISTICS, rows)
    _statistics[(cdiv(T, tokens), strips)](
        x,
        more,
        split,
        y,
        target,
        part,
        *strides,
        *sizes,
        STRIP,
        options.ignore_index,
        scale,
        **kind,
        **apart,
        ROWS=rows,
        **launch,
    )
    some = max(16, min(64, 2048 // next_power_of_2(strips)))
    _merge[(cdiv(T, some),)](
        part,
        x,
        more,
        split,
        target,
        stats,
        soft,
        hard,
        strides[0],
        strips,
        *sizes,
        options.ignore_index,
        scale,
        options.beta,
        **kind,
        **apart,
        HARD=hard is not None,
        BLOCK_N=next_power_of_2(strips),
        BLOCK_T=some,
        num_warps=4,
    )

    def compare(sums, gradient, W):
        tokens, launch = _launch(x, EACH_OF_GRADIENT if gradient else EACH_OF_SUMS, rows)
        _compare[(cdiv(T, tokens), _strips(split, W, STRIP))](
            x,
            more,
            split,
            y,
            target,
            stats,
            sums,
            norm,
            *strides,
            T,
            V,
            W,
            STRIP,
            options.ignore_index,
            scale,
            options.beta,
            options.weight_hard,
            options.weight_soft,
            DIVERGE=OF_A_CLASS.get(options.divergence),
            GRADIENT=gradient,
            **kind,
            HARD=gradient and hard is not None,
            SAME=not (cosine or given) and scale == 1.0 and V == y.shape[1],
            ROWS=rows,
            **launch,
        )

    if cosine:
        return compare(None, True, V) if gradient else None
    sums = torch.empty((1 if given else 3, strips, T), dtype=torch.float32, device=x.device)
    compare(sums, given and gradient, W)
    sums = sums.sum(1)
    soft.copy_(sums[0] + stats[1] * stats[2] if given else sums[0])
    if gradient and not given:
        compare(
            sums[1] / sums[2], True, V
        )  # Σq is 1 but for rounding; divided by it, the gradient's sum is 0
