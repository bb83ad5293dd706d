r"""Divergences of a student's and a teacher's logits, and their gradient.

    q = softmax(z_s/T),   p = softmax(z_t/T),   loss = (w_s·Σ_valid D(p, q) + w_h·Σ_valid CE(z_s, y))/n
    dz_s = w_s·(G - q·Σ_v G_v)/(T·n) + w_h·(softmax(z_s) - 1[v=y])/n,   G_v = ∂D/∂log q_v

There is no T². D and G of a class, where M = β·p + (1-β)·q:

    jsd         β·p·log(p/M) + (1-β)·q·log(q/M)    (1-β)·q·log(q/M)      (forward_kl for β = 0, reverse_kl for β = 1)
    forward_kl  p·log(p/q)                         -p
    reverse_kl  q·log(q/p)                         q·log(q/p)            (+ q, which drops out of G - q·ΣG)
    tvd         ½·|p - q|                          ½·sign(q - p)·q
    kl_div      p·(log max(p, β) - log q)          -p                    (p given, in place of z_t; Σp need not be 1)
    cosine      β·(1 - cos(z_s, z_t)) of a token   dz_s = -β·(z_t/(|z_s|·|z_t|) - cos·z_s/|z_s|²)

Both models' logits are read three times: by `_statistics` (the log-sum-exps, or cosine's sums), by `_compare` (ΣD and
ΣG of each token), and by `_compare` again, which writes the gradient over the student's logits. As in `logits` the
tokens are contiguous, each lane keeps its own maximum and sums, and a log-sum-exp is kept as its two parts, so that a
confident row keeps its digits.

If the teacher has more classes than the student, the student's z_s/T is 0 there. An ignored row gives 0 everywhere.

Sources: arXiv:1503.02531 (forward KL), arXiv:2306.08543 (reverse KL), arXiv:2306.13649 (JSD), arXiv:2307.15190 (TVD).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import F
from liger_kernel.core.tile import (
    INF,
    blocks,
    cdiv,
    exp,
    exp_for,
    finite,
    log,
    log_of_normal,
    next_power_of_2,
    of_program,
    online_max,
    parts,
    tl,
    triton,
)
from liger_kernel.ops.head.logits import target_logit, times

EPS = 1e-8  # the least length of a vector of logits, as in torch's cosine_similarity


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
    """KL(P‖Q) of the teacher P and the student Q: knowledge distillation, arXiv:1503.02531, without its T²."""
    p = log_p.exp()
    return (p * (log_p - log_q).where(p != 0, 0)).sum(-1)  # where p is 0, neither the value nor a gradient is NaN


def reverse_kl(log_p, log_q, beta=None):
    """KL(Q‖P) of the teacher P and the student Q: MiniLLM, arXiv:2306.08543."""
    return forward_kl(log_q, log_p)


def jsd(log_p, log_q, beta=0.5):
    """β·KL(P‖M) + (1-β)·KL(Q‖M), M = β·P + (1-β)·Q: generalised JSD, arXiv:2306.13649.

    KL(P‖Q) for β = 0 and KL(Q‖P) for β = 1, which are not the limits.
    """
    if beta in (0, 1):
        return reverse_kl(log_p, log_q) if beta else forward_kl(log_p, log_q)
    log_p, log_q = log_p.clamp(min=-1e4), log_q.clamp(min=-1e4)  # their exp is 0, and no -inf is subtracted from one
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * forward_kl(log_p, log_m) + (1 - beta) * forward_kl(log_q, log_m)


def tvd(log_p, log_q, beta=None):
    """½·Σ|p - q|, the total variation distance: arXiv:2307.15190."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def kl_div(p, log_q, eps):
    """p·(log max(p, eps) - log q), not added up; 0 where p is 0."""
    return p * (p.clamp(min=eps).log() - log_q).where(p != 0, 0)


DIVERGENCES = dict(jsd=jsd, forward_kl=forward_kl, reverse_kl=reverse_kl, tvd=tvd)  # of two heads, as cosine is


def padded(z, classes):
    """The student's tempered logits, 0 for the classes that only the teacher has."""
    return F.pad(z, (0, classes - z.shape[-1]))


def of_logits(x, teacher, target, options, hard):
    """-> Σ D, Σ CE (0 unless wanted) over the valid rows of logits (N, V), (N, V_t); of kl_div the teacher's are p."""
    ignore_index, temperature = options.ignore_index, options.temperature
    wide = torch.promote_types(x.dtype, torch.float32)
    valid = target != ignore_index
    x, teacher = (z.to(wide).where(valid[:, None], 0) for z in (x, teacher))  # what is ignored may be NaN
    s, t = padded(x / temperature, teacher.shape[1]), teacher / temperature
    if options.divergence == "cosine":
        d = options.beta * (1 - F.cosine_similarity(s, t, dim=-1, eps=EPS))
    elif options.divergence == "kl_div":
        d = kl_div(teacher, s.log_softmax(-1), options.beta).sum(-1)
    else:
        d = DIVERGENCES[options.divergence](t.log_softmax(-1), s.log_softmax(-1), options.beta)
    ce = F.cross_entropy(x, target, ignore_index=ignore_index, reduction="sum") if hard else x.new_zeros(())
    return d.where(valid, 0).sum(), ce


# ---- kernels ----


@triton.jit
def _jsd(p, q, log_p, log_q, beta, EXACT: tl.constexpr):
    log_p = tl.where(log_p < -200.0, -200.0, log_p)  # 0·(-200) is 0, 0·(-inf) is not; unlike maximum, this keeps NaN
    log_q = tl.where(log_q < -200.0, -200.0, log_q)
    if EXACT:
        d = log_q - log_p  # log M = max(log p, log q) + lift
        far = exp(-tl.abs(d))
        lift = log_of_normal(tl.where(d > 0, (1.0 - beta) + beta * far, beta + (1.0 - beta) * far))
        of_p, of_q = tl.where(d < 0, 0.0, -d) - lift, tl.where(d > 0, 0.0, d) - lift
    else:
        m = beta * p + (1.0 - beta) * q
        log_m = tl.where(m >= 1e-37, log_of_normal(m), m - 85.2)  # of 0 about log 1e-37, of NaN NaN
        of_p, of_q = log_p - log_m, log_q - log_m
    of_q *= (1.0 - beta) * q
    return beta * p * of_p + of_q, of_q


@triton.jit
def _forward_kl(p, q, log_p, log_q, beta, EXACT: tl.constexpr):
    return times(p, log_p - log_q), -p


@triton.jit
def _reverse_kl(p, q, log_p, log_q, beta, EXACT: tl.constexpr):
    of_q = times(q, log_q - log_p)
    return of_q, of_q


@triton.jit
def _tvd(p, q, log_p, log_q, beta, EXACT: tl.constexpr):
    return 0.5 * tl.abs(p - q), tl.where(q > p, 0.5 * q, tl.where(q < p, -0.5 * q, 0.0))


@triton.jit
def _kl_div(p, q, log_p, log_q, eps, EXACT: tl.constexpr):
    return times(p, log_of_normal(tl.maximum(p, eps)) - log_q), -p


OF_A_CLASS = dict(jsd=_jsd, forward_kl=_forward_kl, reverse_kl=_reverse_kl, tvd=_tvd, kl_div=_kl_div)  # -> D, G
SLOTS = 6  # numbers of a token, in `_statistics` and `_merge`
LEAST = tl.constexpr(EPS)


@triton.jit
def _block(ptr, stride, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, EACH: tl.constexpr):
    """Pointers to a program's first logits (EACH, BLOCK_V, BLOCK_T), their classes from 0 on, and their tokens."""
    t0 = tl.program_id(0) * BLOCK_T
    i = tl.arange(0, EACH)[:, None, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :, None]
    j = tl.arange(0, BLOCK_T)[None, None, :]
    return ptr + t0 + (i * stride + j), i, t0 + j


@triton.jit
def _one_more(top, total, z, scale, EXACT: tl.constexpr):
    """The running maxima (BLOCK_V, BLOCK_T) and Σ exp((z - max)·scale), with further z (EACH, BLOCK_V, BLOCK_T)."""
    new, shift = online_max(top, tl.max(z, axis=0))
    more = tl.sum(exp_for(z - shift[None, :, :], EXACT, scale), axis=0)
    return new, total * exp_for(top - shift, EXACT, scale) + more


@triton.jit
def _store_log_sum(part, slot, top, total, scale, mask):
    """The maximum and the sum of each token."""
    highest = tl.max(top, axis=0)
    total *= exp((top - finite(highest)[None, :]) * scale)
    tl.store(part, highest, mask=mask)
    tl.store(part + slot, tl.sum(total, axis=0), mask=mask)


@kernel
def _statistics(
    x_ptr, more_ptr, split, y_ptr, target_ptr, part_ptr, stride_x, stride_y, T, V, W, STRIP, ignore_index, scale,
    COSINE: tl.constexpr, GIVEN: tl.constexpr, APART: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """One program: STRIP classes of BLOCK_T tokens, x of the student and y of the teacher, unless p is GIVEN.

    Slots: max z_s and Σ exp((z_s - max)/T), likewise of z_t (or Σ z_s², Σ z_t², Σ z_s·z_t); with APART max z_s and
    Σ exp(z_s - max).
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    x_ptr, row, begin, left = of_program(x_ptr, more_ptr, split, W, STRIP)
    row_y = begin.to(tl.int64)
    target = tl.load(target_ptr + tokens, mask=tokens < T, other=ignore_index)
    if tl.sum((target != ignore_index).to(tl.int32)) == 0:
        return
    x, i, t = _block(x_ptr, stride_x, BLOCK_T, BLOCK_V, EACH)
    y, i, t = _block(y_ptr, stride_y, BLOCK_T, BLOCK_V, EACH)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    EMPTY: tl.constexpr = 0.0 if COSINE else -INF
    top_q = tl.full((BLOCK_V, BLOCK_T), -INF, dtype=tl.float32)
    sum_q = tl.zeros((BLOCK_V, BLOCK_T), dtype=tl.float32)
    top_p, sum_p, top_z, sum_z, ss, tt, st = top_q, sum_q, top_q, sum_q, sum_q, sum_q, sum_q
    for start in range(0, left, EACH * BLOCK_V):
        inside = (start + i < left) & (t < T)
        mine = inside & (begin + start + i < V)
        s = tl.load(x + (row + start) * stride_x, mask=mine, other=EMPTY).to(tl.float32)
        z = s
        if not GIVEN:
            z = tl.load(y + (row_y + start) * stride_y, mask=inside, other=EMPTY).to(tl.float32)
        if COSINE:
            ss += tl.sum(s * s, axis=0)
            tt += tl.sum(z * z, axis=0)
            st += tl.sum(s * z, axis=0)
            s = tl.where(mine, s, -INF)
        else:
            top_q, sum_q = _one_more(top_q, sum_q, s, scale, EXACT)
            if not GIVEN:
                top_p, sum_p = _one_more(top_p, sum_p, z, scale, EXACT)
        if APART:
            top_z, sum_z = _one_more(top_z, sum_z, s, 1.0, EXACT)

    slot, mask = tl.num_programs(1) * T, tokens < T
    part = part_ptr + tl.program_id(1) * T + tokens
    if COSINE:
        tl.store(part, tl.sum(ss, axis=0), mask=mask)
        tl.store(part + slot, tl.sum(tt, axis=0), mask=mask)
        tl.store(part + 2 * slot, tl.sum(st, axis=0), mask=mask)
    else:
        _store_log_sum(part, slot, top_q, sum_q, scale, mask)
        if not GIVEN:
            _store_log_sum(part + 2 * slot, slot, top_p, sum_p, scale, mask)
    if APART:
        _store_log_sum(part + 4 * slot, slot, top_z, sum_z, 1.0, mask)


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
    part_ptr, x_ptr, more_ptr, split, target_ptr, stats_ptr, soft_ptr, hard_ptr, stride_x, N, T, V, W, ignore_index,
    scale, beta, COSINE: tl.constexpr, GIVEN: tl.constexpr, APART: tl.constexpr, HARD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """N strips become one. (As in `logits`, one launch writes all outputs: hence the many arguments.)

    Statistics (SLOTS, T): the maxima of `_statistics` and the logarithms of its sums. For cosine they are the factors
    of z_t and z_s in the gradient. CE goes to ``hard``, cosine's loss to ``soft``.
    """
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
        long, z = s > LEAST, tl.maximum(z, LEAST)
        s = tl.maximum(s, LEAST)
        cosine = st / s / z
        tl.store(stats, -beta / s / z, mask=known)
        tl.store(stats + T, tl.where(long, beta * cosine / s / s, 0.0), mask=known)
        tl.store(soft_ptr + t, tl.where(valid, beta * (1.0 - cosine), 0.0), mask=known)
    else:
        top, total = _load_log_sum(part, slot, scale, mask)
        if W > V:  # zeros for the classes that only the teacher has
            higher = tl.maximum(top, 0.0)
            total, top = total * exp((top - higher) * scale) + (W - V) * exp(-higher * scale), higher
        _store_two(stats, T, top, total, valid, known)
        if not GIVEN:
            top, total = _load_log_sum(part + 2 * slot, slot, scale, mask)
            _store_two(stats + 2 * T, T, top, total, valid, known)
    if HARD:
        if APART:
            part += 4 * slot
        top, total = _load_log_sum(part, slot, 1.0, mask)
        _store_two(stats + 4 * T, T, top, total, valid, known)
        here = valid & (target >= 0) & (target < V)
        zy = target_logit(x_ptr, more_ptr, split, t, target, stride_x, here, float("nan")).to(tl.float32)
        tl.store(hard_ptr + t, tl.where(valid, log(total) + (top - zy), 0.0), mask=known)


@kernel
def _compare(
    x_ptr, more_ptr, split, y_ptr, target_ptr, stats_ptr, sum_ptr, norm_ptr, stride_x, stride_y, T, V, W, STRIP,
    ignore_index, scale, beta, weight_hard, weight_soft, DIVERGE: tl.constexpr, GRADIENT: tl.constexpr,
    COSINE: tl.constexpr, GIVEN: tl.constexpr, HARD: tl.constexpr, SAME: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """One program: STRIP classes of BLOCK_T tokens. Fills sum with ΣD, ΣG and Σq over them.

    With GRADIENT it overwrites the student's logits with their gradient instead. SAME: softmax(z_s) is q.
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    known = tokens < T
    x_ptr, row, begin, left = of_program(x_ptr, more_ptr, split, W, STRIP)
    row_y = begin.to(tl.int64)
    x, i, t = _block(x_ptr, stride_x, BLOCK_T, BLOCK_V, EACH)
    y, i, t = _block(y_ptr, stride_y, BLOCK_T, BLOCK_V, EACH)
    target = tl.load(target_ptr + tokens, mask=known, other=ignore_index)
    valid = target != ignore_index
    slot, part = tl.num_programs(1) * T, tl.program_id(1) * T + tokens
    if tl.sum(valid.to(tl.int32)) == 0:
        if GRADIENT:
            for start in range(0, left, EACH * BLOCK_V):
                zeros = tl.zeros((EACH, BLOCK_V, BLOCK_T), dtype=x_ptr.dtype.element_ty)
                tl.store(x + (row + start) * stride_x, zeros, mask=(start + i < left) & (t < T))
        else:
            for k in range(3):
                tl.store(sum_ptr + part + k * slot, tl.zeros((BLOCK_T,), dtype=tl.float32), mask=known)
        return

    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    target = tl.where((target >= begin) & (target < begin + left), target - begin, -1).to(tl.int32)[None, None, :]
    stats = stats_ptr + tokens
    top_q, log_sum_q = _load_two(stats, T, known)
    top_p, log_sum_p, of_q = top_q, log_sum_q, top_q
    if not COSINE and not GIVEN:
        top_p, log_sum_p = _load_two(stats + 2 * T, T, known)
    top, log_sum, soft, hard = top_q, log_sum_q, 0.0, 0.0
    if GRADIENT:
        n = tl.load(norm_ptr)
        soft, hard = weight_soft / n, weight_hard / n
        if not COSINE:
            of_q = tl.load(sum_ptr + tokens, mask=known, other=0.0)
        if HARD and not SAME:
            top, log_sum = _load_two(stats + 4 * T, T, known)
    all_d = tl.zeros((BLOCK_V, BLOCK_T), dtype=tl.float32)
    all_g, all_q = all_d, all_d
    for start in range(0, left, EACH * BLOCK_V):
        inside = (start + i < left) & (t < T)
        s = tl.load(x + (row + start) * stride_x, mask=inside & (begin + start + i < V), other=-INF).to(tl.float32)
        z = tl.load(y + (row_y + start) * stride_y, mask=inside, other=0.0 if GIVEN else -INF).to(tl.float32)
        if W > V:
            s = tl.where(inside & (begin + start + i >= V), 0.0, s)
        q = s
        if COSINE:
            dz = soft * (top_q[None, None, :] * z + log_sum_q[None, None, :] * s)
        else:
            log_p = (z - top_p[None, None, :]) * scale - log_sum_p[None, None, :]
            log_q = (s - top_q[None, None, :]) * scale - log_sum_q[None, None, :]
            p, q = z if GIVEN else exp_for(log_p, EXACT), exp_for(log_q, EXACT)
            d, g = DIVERGE(p, q, log_p, log_q, beta, EXACT)
            dz = soft * scale * (g - q * of_q[None, None, :])
            if not GRADIENT:  # what is not inside has p = q = 0
                all_d += tl.sum(d, axis=0)
                all_g += tl.sum(g, axis=0)
                all_q += tl.sum(q, axis=0)
        if GRADIENT:
            if HARD:
                if not SAME:
                    q = exp_for((s - top[None, None, :]) - log_sum[None, None, :], EXACT)
                dz += hard * (q - (start + i == target).to(tl.float32))
            dz = tl.where(valid[None, None, :], dz, 0.0).to(x_ptr.dtype.element_ty)
            tl.store(x + (row + start) * stride_x, dz, mask=inside)
    if not GRADIENT:
        tl.store(sum_ptr + part, tl.where(valid, tl.sum(all_d, axis=0), 0.0), mask=known)
        tl.store(sum_ptr + part + slot, tl.where(valid, tl.sum(all_g, axis=0), 0.0), mask=known)
        tl.store(sum_ptr + part + 2 * slot, tl.where(valid, tl.sum(all_q, axis=0), 0.0), mask=known)


# ---- launches ----


STRIP = 1024  # classes of a program


def _launch(x, gradient=False):
    """Tokens of a program that reads both, and its launch.

    A warp has 256 neighbouring logits, so that warps exchange nothing before the end.

    H200, 2026-11-21, bf16, (V, T) of 128256 classes and 1024 tokens; two reads take 0.124 ms at the copy rate, and
    another 0.062 ms to write. `_statistics` 0.205 ms, strips of 2048 0.241, twice in an iteration 0.227. `_compare` of
    jsd 0.32 and with the gradient 0.36 in any of these; of forward_kl 0.21 and 0.24, once in an iteration 0.30.
    """
    tokens = min(next_power_of_2(x.shape[0]), 64)
    each, warps = 2 if gradient or tokens == 1 else 1, devices.warps(4, x)  # Triton 3.9 can't compile (1, 1024, 1)
    return tokens, dict(BLOCK_T=tokens, BLOCK_V=1024 // tokens, EACH=each, num_warps=warps)


def compare_logits(x, y, target, norm, options, gradient, soft, hard):
    """Fill soft (T,), D, and hard (T,), CE, or None, for logits x (T, V), y (T, V_t), whose tokens are contiguous.

    With ``gradient`` x becomes that of w_h·hard + w_s·soft, divided by ``norm`` (a tensor). x may be in two parts.
    """
    (x, more, split, V), T, W = parts(x), *y.shape
    strides, scale, sizes = (x.stride(1), y.stride(1)), 1.0 / options.temperature, (T, V, W)
    strips, cosine = blocks(split, W, STRIP), options.divergence == "cosine"
    part = torch.empty((SLOTS, strips, T), dtype=torch.float32, device=x.device)
    stats = torch.empty((SLOTS, T), dtype=torch.float32, device=x.device)
    tokens, launch = _launch(x)
    given = dict(COSINE=cosine, GIVEN=options.divergence == "kl_div")
    kind = dict(**given, APART=hard is not None and (cosine or scale != 1.0))
    _statistics[(cdiv(T, tokens), strips)](
        x, more, split, y, target, part, *strides, *sizes, STRIP, options.ignore_index, scale, **kind, **launch
    )
    rows = max(16, min(64, 2048 // next_power_of_2(strips)))
    _merge[(cdiv(T, rows),)](
        part, x, more, split, target, stats, soft, hard, strides[0], strips, *sizes, options.ignore_index, scale,
        options.beta, **kind, HARD=hard is not None, BLOCK_N=next_power_of_2(strips), BLOCK_T=rows, num_warps=4,
    )  # fmt: skip

    def compare(sums, gradient, W):
        tokens, launch = _launch(x, gradient)
        _compare[(cdiv(T, tokens), blocks(split, W, STRIP))](
            x, more, split, y, target, stats, sums, norm, *strides, T, V, W, STRIP, options.ignore_index, scale,
            options.beta, options.weight_hard, options.weight_soft, DIVERGE=OF_A_CLASS.get(options.divergence),
            GRADIENT=gradient, **given, HARD=gradient and hard is not None,
            SAME=not cosine and scale == 1.0 and V == y.shape[1], **launch,
        )  # fmt: skip

    sums = None
    if not cosine:
        part = torch.empty((3, strips, T), dtype=torch.float32, device=x.device)
        compare(part, False, W)
        sums = part.sum(1)
        soft.copy_(sums[0])
        sums = sums[1] / sums[2]  # Σq is 1 but for rounding; divided by it, the gradient's sum is 0
    if gradient:
        compare(sums, True, V)
