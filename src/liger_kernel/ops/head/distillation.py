r"""Distillation of one linear head into another, without the logits of either in memory.

    z_s = h·Wᵀ + b,   z_t likewise of the teacher (or given),   q = softmax(z_s/T),   p = softmax(z_t/T)
    soft = Σ_valid D(p, q)/n,   hard = Σ_valid CE(z_s, y)/n,   loss = w_h·hard + w_s·soft
    dz_s = w_s·(G - q·Σ_v G_v)/(T·n) + w_h·(softmax(z_s) - 1[v=y])/n,   G_v = ∂D/∂log q_v

with n = max(1, valid rows), and no T². D and G of a class, where M = β·p + (1-β)·q:

    jsd         β·p·log(p/M) + (1-β)·q·log(q/M)    (1-β)·q·log(q/M)      (forward_kl for β = 0, reverse_kl for β = 1)
    forward_kl  p·log(p/q)                         -p
    reverse_kl  q·log(q/p)                         q·log(q/p)            (+ q, which G - q·ΣG is without)
    tvd         ½·|p - q|                          ½·sign(q - p)·q
    cosine      β·(1 - cos(z_s, z_t)) of a token   dz_s = -β·(z_t/(|z_s|·|z_t|) - cos·z_s/|z_s|²)

The student goes through the passes of a linear head (`passes`), which keep its logits in the memory of dW. For 1,024
tokens of a pass at a time the teacher's logits are made in memory that is used again, and both are read three times:
`_statistics` (the log-sum-exps, or cosine's sums), `_compare` (ΣD and ΣG of each token), and again for the gradient,
which goes over the student's logits. As in `logits` tokens are contiguous, each lane keeps its own maximum and sums,
and a log-sum-exp is kept as its two parts, so that a confident row keeps its digits. The gradients are taken in
forward: the weight may be gone in backward.

A teacher with more classes than the student: the student's z_s/T is 0 there. An ignored row gives 0 everywhere.

Sources: arXiv:1503.02531 (forward KL), arXiv:2306.08543 (reverse KL), arXiv:2306.13649 (JSD), arXiv:2307.15190 (TVD).
"""

from __future__ import annotations

import math

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, F, custom_op
from liger_kernel.core.parallel import local
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
    parts,
    tl,
    triton,
)
from liger_kernel.ops.head.cross_entropy import check_targets, labels
from liger_kernel.ops.head.grouped_loss import taken
from liger_kernel.ops.head.logits import normalisers, target_logit
from liger_kernel.ops.head.passes import fill_logits, pad_tokens, run_passes
from liger_kernel.ops.head.planning import budget, plan
from liger_kernel.ops.head.token_log_probs import ROWS_WITHOUT_KERNELS, check_head, compute_dtype, only_valid

TEACHER_ROWS = 1024  # tokens whose logits of the teacher are in memory
EPS = 1e-8  # the least length of a vector of logits, as in torch's cosine_similarity

# ---- the divergences, of log-probabilities (..., V) ----


def _times(p, x):
    """p·x, 0 where p is 0; with gradients that are no NaN there either."""
    return p * x.where(p > 0, 0)


def forward_kl(log_p, log_q, beta=None):
    """KL(P‖Q) of the teacher P and the student Q: knowledge distillation, arXiv:1503.02531, without its T²."""
    return _times(log_p.exp(), log_p - log_q).sum(-1)


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


DIVERGENCES = dict(jsd=jsd, forward_kl=forward_kl, reverse_kl=reverse_kl, tvd=tvd)  # and cosine, which is of logits


def padded(z, classes):
    """The student's tempered logits, 0 for the classes that only the teacher has."""
    return F.pad(z, (0, classes - z.shape[-1]))


def _of_logits(x, teacher, target, divergence, beta, temperature, ignore_index, hard):
    """-> Σ D, Σ CE (0 unless wanted) over the valid rows of logits (N, V), (N, V_t)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    valid, x, teacher = target != ignore_index, x.to(wide), teacher.to(wide)
    s, t = padded(x / temperature, teacher.shape[1]), teacher / temperature
    if divergence == "cosine":
        d = beta * (1 - F.cosine_similarity(s, t, dim=-1, eps=EPS))
    else:
        d = DIVERGENCES[divergence](t.log_softmax(-1), s.log_softmax(-1), beta)
    ce = F.cross_entropy(x, target, ignore_index=ignore_index, reduction="sum") if hard else x.new_zeros(())
    return d.where(valid, 0).sum(), ce


def linear_distillation_reference(
    student, student_weight, target, *, student_bias=None, teacher=None, teacher_weight=None, teacher_bias=None,
    teacher_logits=None, divergence="jsd", beta=0.5, temperature=1.0, weight_hard=0.5, weight_soft=0.5,
    ignore_index=-100, return_hard=False,
):  # fmt: skip
    """-> (loss, soft, hard), from all the logits at once."""
    dtype = compute_dtype(student, student_weight)
    b = None if student_bias is None else student_bias.to(dtype)
    x = F.linear(student.to(dtype), student_weight.to(dtype), b)
    with torch.no_grad():
        y = frozen_logits(teacher, teacher_weight, teacher_bias) if teacher_logits is None else teacher_logits
    hard = return_hard or weight_hard != 0
    n = (target != ignore_index).sum().clamp(min=1)
    soft, hard = (d / n for d in _of_logits(x, y, target, divergence, beta, temperature, ignore_index, hard))
    return weight_hard * hard + weight_soft * soft, soft.detach(), hard.detach()


def frozen_logits(h, w, b):
    """Of a head that gets no gradient."""
    dtype = compute_dtype(h, w)
    return F.linear(*(x if x is None else x.detach().to(dtype) for x in (h, w, b)))


# ---- kernels ----


@triton.jit
def _share(p, x):
    """p·x, 0 for p = 0."""
    return tl.where(p == 0.0, 0.0, p * x)


@triton.jit
def _jsd(p, q, log_p, log_q, beta, EXACT: tl.constexpr):
    log_p, log_q = tl.maximum(log_p, -200.0), tl.maximum(log_q, -200.0)  # 0·(-200) is 0, 0·(-inf) is not
    if EXACT:
        d = log_q - log_p  # log M = max(log p, log q) + lift
        far = exp(-tl.abs(d))
        lift = log_of_normal(tl.where(d > 0, (1.0 - beta) + beta * far, beta + (1.0 - beta) * far))
        of_p, of_q = -tl.maximum(d, 0.0) - lift, tl.minimum(d, 0.0) - lift
    else:
        log_m = log_of_normal(tl.maximum(beta * p + (1.0 - beta) * q, 1e-37))
        of_p, of_q = log_p - log_m, log_q - log_m
    of_q *= (1.0 - beta) * q
    return beta * p * of_p + of_q, of_q


@triton.jit
def _forward_kl(p, q, log_p, log_q, beta, EXACT: tl.constexpr):
    return _share(p, log_p - log_q), -p


@triton.jit
def _reverse_kl(p, q, log_p, log_q, beta, EXACT: tl.constexpr):
    of_q = _share(q, log_q - log_p)
    return of_q, of_q


@triton.jit
def _tvd(p, q, log_p, log_q, beta, EXACT: tl.constexpr):
    return 0.5 * tl.abs(p - q), tl.where(q > p, 0.5 * q, tl.where(q < p, -0.5 * q, 0.0))


OF_A_CLASS = dict(jsd=_jsd, forward_kl=_forward_kl, reverse_kl=_reverse_kl, tvd=_tvd)  # -> D, G
SLOTS = 6  # of a token, in `_statistics` and `_merge`
LEAST = tl.constexpr(EPS)


@triton.jit
def _block(ptr, stride, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, EACH: tl.constexpr):
    """Where a program's tokens' first logits (EACH, BLOCK_V, BLOCK_T) are; their classes, from 0; their tokens."""
    t0 = tl.program_id(0) * BLOCK_T
    i = tl.arange(0, EACH)[:, None, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :, None]
    j = tl.arange(0, BLOCK_T)[None, None, :]
    return ptr + t0 + (i * stride + j), i, t0 + j


@triton.jit
def _exp_of(z, top, scale, EXACT: tl.constexpr):
    """exp((z - top)·scale)"""
    if EXACT:
        return exp((z - top) * scale)
    return tl.exp2((z - top) * (scale * 1.4426950408889634))


@triton.jit
def _one_more(top, total, z, scale, EXACT: tl.constexpr):
    """The running maxima (BLOCK_V, BLOCK_T) and Σ exp((z - max)·scale), with further z (EACH, BLOCK_V, BLOCK_T)."""
    new = tl.maximum(top, tl.max(z, axis=0))
    shift = finite(new)
    more = tl.sum(_exp_of(z, shift[None, :, :], scale, EXACT), axis=0)
    return new, total * _exp_of(top, shift, scale, EXACT) + more


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
    COSINE: tl.constexpr, APART: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """One program: STRIP classes of BLOCK_T tokens, x of the student and y of the teacher.

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
        z = tl.load(y + (row_y + start) * stride_y, mask=inside, other=EMPTY).to(tl.float32)
        if COSINE:
            ss += tl.sum(s * s, axis=0)
            tt += tl.sum(z * z, axis=0)
            st += tl.sum(s * z, axis=0)
            s = tl.where(mine, s, -INF)
        else:
            top_q, sum_q = _one_more(top_q, sum_q, s, scale, EXACT)
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
    scale, beta, COSINE: tl.constexpr, APART: tl.constexpr, HARD: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """N strips become one.

    Statistics (SLOTS, T): the maxima of `_statistics` and the logarithms of its sums; of cosine instead what z_t and
    z_s have to be multiplied by for the gradient. CE goes to ``hard``, cosine's loss to ``soft``.
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
    COSINE: tl.constexpr, HARD: tl.constexpr, SAME: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """One program: STRIP classes of BLOCK_T tokens. Fills sum with ΣD, ΣG and Σq over them.

    With GRADIENT the student's logits become their gradient instead. SAME: softmax(z_s) is q.
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
    if not COSINE:
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
        z = tl.load(y + (row_y + start) * stride_y, mask=inside, other=-INF).to(tl.float32)
        if W > V:
            s = tl.where(inside & (begin + start + i >= V), 0.0, s)
        q = s
        if COSINE:
            dz = soft * (top_q[None, None, :] * z + log_sum_q[None, None, :] * s)
        else:
            log_p = (z - top_p[None, None, :]) * scale - log_sum_p[None, None, :]
            log_q = (s - top_q[None, None, :]) * scale - log_sum_q[None, None, :]
            p, q = exp_for(log_p, EXACT), exp_for(log_q, EXACT)
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

    A warp has 256 logits side by side, so that nothing crosses warps before the end.

    H200, 2026-11-21, bf16, (V, T) of 128256 classes and 1024 tokens; two reads take 0.124 ms at the copy rate, and
    another 0.062 ms to write. `_statistics` 0.205 ms, strips of 2048 0.241, twice in an iteration 0.227. `_compare` of
    jsd 0.32 and with the gradient 0.36 in any of these; of forward_kl 0.21 and 0.24, once in an iteration 0.30.
    """
    tokens = min(next_power_of_2(x.shape[0]), 64)
    each, warps = 2 if gradient or tokens == 1 else 1, devices.warps(4, x)  # Triton 3.9 can't compile (1, 1024, 1)
    return tokens, dict(BLOCK_T=tokens, BLOCK_V=1024 // tokens, EACH=each, num_warps=warps)


def _turn(x, y, target, norm, divergence, beta, scale, weights, ignore_index, gradient, soft, hard):
    """Fill soft (T,) and hard (T,) or None for logits x (T, V), y (T, V_t), whose tokens are contiguous.

    With ``gradient`` x becomes that of w_h·hard + w_s·soft, divided by ``norm`` (a tensor).
    """
    (x, more, split, V), T, W = parts(x), *y.shape
    strides = x.stride(1), y.stride(1)
    strips, cosine = blocks(split, W, STRIP), divergence == "cosine"
    part = torch.empty((SLOTS, strips, T), dtype=torch.float32, device=x.device)
    stats = torch.empty((SLOTS, T), dtype=torch.float32, device=x.device)
    tokens, launch = _launch(x)
    kind = dict(COSINE=cosine, APART=hard is not None and (cosine or scale != 1.0))
    _statistics[(cdiv(T, tokens), strips)](
        x, more, split, y, target, part, *strides, T, V, W, STRIP, ignore_index, scale, **kind, **launch
    )
    rows = max(16, min(64, 2048 // next_power_of_2(strips)))
    _merge[(cdiv(T, rows),)](
        part, x, more, split, target, stats, soft, hard, strides[0], strips, T, V, W, ignore_index, scale, beta, **kind,
        HARD=hard is not None, BLOCK_N=next_power_of_2(strips), BLOCK_T=rows, num_warps=4,
    )  # fmt: skip
    sums = None

    def compare(sums, gradient, W):
        tokens, launch = _launch(x, gradient)
        _compare[(cdiv(T, tokens), blocks(split, W, STRIP))](
            x, more, split, y, target, stats, sums, norm, *strides, T, V, W, STRIP, ignore_index, scale, beta, *weights,
            DIVERGE=OF_A_CLASS.get(divergence), GRADIENT=gradient, COSINE=cosine, HARD=gradient and hard is not None,
            SAME=not cosine and scale == 1.0 and V == y.shape[1], **launch,
        )  # fmt: skip

    if not cosine:
        part = torch.empty((3, strips, T), dtype=torch.float32, device=x.device)
        compare(part, False, W)
        sums = part.sum(1)
        soft.copy_(sums[0])
        sums = sums[1] / sums[2]  # where q is off by a rounding, the gradient's sum is 0 nevertheless
    if gradient:
        compare(sums, True, V)


# ---- the passes ----


class _Teacher:
    """Logits of a few tokens, which are contiguous in memory that the next few use again."""

    def __init__(self, h, w, b, logits, rows, dtype, most):
        self.h, self.w, self.b, self.given, self.rows = h, w, b, logits, rows
        if logits is None:
            self.w, self.b = w.to(dtype), None if b is None else b.to(dtype)
        like = w if logits is None else logits
        self.dtype, self.classes = dtype, like.shape[0 if logits is None else 1]
        # given ones can be read where their tokens are contiguous
        copied = logits is None or rows is not None or logits.stride(0) != 1 or logits.dtype != dtype
        self.memory = like.new_empty(self.classes, cdiv(most, 64) * 64, dtype=dtype) if copied else None

    def _of(self, x, some):
        return x[some] if self.rows is None else x.index_select(0, self.rows[some])

    def logits(self, some):
        """(tokens, classes) of a slice of the tokens."""
        if self.memory is None:
            return self.given[some]
        part = self._of(self.h if self.given is None else self.given, some)
        n = part.shape[0]
        if self.given is not None:
            return self.memory[:, :n].copy_(part.t()).t()
        part = pad_tokens(part.to(self.dtype))
        x = self.memory[:, : part.shape[0]]
        fill_logits(x, self.w, self.b, part, n)
        return x[:, :n].t()


def _outputs(
    h, w, b, target, teacher, teacher_w, teacher_b, logits, rows, divergence, beta, temperature, weights, ignore_index,
    hard, dtype, teacher_dtype, accum_dtype, memory, needs,
):  # fmt: skip
    chosen = plan(*h.shape, w.shape[0], dtype, w.dtype, accum_dtype, memory, needs[1], devices.multiprocessors(h))
    return (
        *(h.new_empty((), dtype=torch.float32) for _ in range(4)),
        h.new_empty(h.shape if needs[0] else 0),
        w.new_empty(w.shape if needs[1] else 0, dtype=chosen.grad_dtype if needs[1] else h.dtype),
        h.new_empty(w.shape[0] if needs[2] else 0, dtype=torch.float32),
    )


@custom_op("linear_distillation", _outputs)
def distillation_fwd(
    h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, target: torch.Tensor, teacher: torch.Tensor | None,
    teacher_w: torch.Tensor | None, teacher_b: torch.Tensor | None, logits: torch.Tensor | None,
    rows: torch.Tensor | None, divergence: str, beta: float, temperature: float, weights: list[float],
    ignore_index: int, hard: bool, dtype: torch.dtype, teacher_dtype: torch.dtype, accum_dtype: torch.dtype | None,
    memory: int, needs: list[bool],
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    """-> loss, soft, hard, n (0-d each), the needed dh, dW, db.

    rows: which of the teacher's are those of h (None: the same). weights: of hard and soft. The gradients are of the
    loss; for fp16, which can't hold them divided, of loss·n.
    """
    n = normalisers(target, None, w.shape[0], ignore_index, True)[0]
    norm = torch.ones_like(n) if dtype == torch.float16 else n
    soft = h.new_zeros(h.shape[0], dtype=torch.float32)
    ce = torch.zeros_like(soft) if hard else None
    chosen = plan(*h.shape, w.shape[0], dtype, w.dtype, accum_dtype, memory, needs[1], devices.multiprocessors(h))
    most = min(TEACHER_ROWS, h.shape[0])
    of_teacher = _Teacher(teacher, teacher_w, teacher_b, logits, rows, teacher_dtype, most)

    def to_gradient(i, x):
        for start in range(i.start, i.stop, TEACHER_ROWS):
            some = slice(start, min(start + TEACHER_ROWS, i.stop))
            inside = slice(start - i.start, some.stop - i.start)
            z = tuple(part[inside] for part in x) if isinstance(x, tuple) else x[inside]
            _turn(
                z, of_teacher.logits(some), target[some], norm, divergence, beta,
                1.0 / temperature, weights, ignore_index, any(needs), soft[some], None if ce is None else ce[some],
            )  # fmt: skip

    grads = run_passes(h, w, b, dtype, chosen, to_gradient, needs)
    soft = soft.sum() / n
    ce = ce.sum() / n if hard else torch.zeros_like(soft)
    return weights[0] * ce + weights[1] * soft, soft, ce, n.clone(), *grads


# ---- without kernels ----


def take_in_chunks(of_chunk, n, h, w, b, needs, rows=ROWS_WITHOUT_KERNELS):
    """``of_chunk(slice of the rows, logits) -> (loss, soft, hard)``, added up over chunks of the rows and divided by n.

    -> those, and the gradients of loss·n for h, w and b where needed, in fp32 or wider. In plain PyTorch.
    """
    dtype, wide = compute_dtype(h, w), torch.promote_types(w.dtype, torch.float32)
    grads = [torch.zeros_like(x, dtype=wide) if need else None for x, need in zip((h, w, b), needs, strict=True)]
    sums = h.new_zeros(3, dtype=torch.promote_types(dtype, torch.float32))
    for start in range(0, h.shape[0], rows):
        some = slice(start, start + rows)
        with torch.set_grad_enabled(any(needs)):
            leaves = [
                x if x is None else x.detach().requires_grad_(need)
                for x, need in zip((h[some], w, b), needs, strict=True)
            ]
            parts = of_chunk(some, F.linear(*(x if x is None else x.to(dtype) for x in leaves)))
            wanted = [x for x, need in zip(leaves, needs, strict=True) if need]
            found = iter(torch.autograd.grad(parts[0], wanted) if wanted else ())
        sums += torch.stack([x.detach().to(sums.dtype) for x in parts])
        for grad, of, need in zip(grads, (some, ..., ...), needs, strict=True):
            if need:
                grad[of] += next(found)
    return tuple((sums / n).unbind()), grads


# ---- the function ----


def check_teacher(name, student, weight, target, bias, teacher, teacher_weight, teacher_bias, teacher_logits):
    check_head(name, student, weight, bias, target, None)
    if (teacher is None) == (teacher_logits is None) or (teacher is None) != (teacher_weight is None):
        raise ValueError(f"{name}: give either teacher and teacher_weight, or teacher_logits")
    if teacher is not None:
        check_head(f"{name}'s teacher", teacher, teacher_weight, teacher_bias, target, None)
        check.floats(name, dict(student=student), teacher=teacher)
    else:
        check.floats(name, dict(student=student), teacher_logits=teacher_logits)
    if teacher is None and (teacher_logits.dim() != 2 or teacher_logits.shape[0] != student.shape[0]):
        raise ValueError(
            f"{name}: teacher_logits has shape {tuple(teacher_logits.shape)}, give one row for each of the student's: "
            f"({student.shape[0]}, classes)"
        )
    classes = teacher_weight.shape[0] if teacher_logits is None else teacher_logits.shape[1]
    if classes < weight.shape[0]:
        raise ValueError(
            f"{name}: the teacher has {classes} classes and the student {weight.shape[0]}; give a teacher with as many "
            "or more, or the student's weight without the rows that the teacher doesn't have"
        )


def check_divergence(name, divergence, beta, temperature):
    """``divergence`` None: another one."""
    if divergence not in (*DIVERGENCES, "cosine", None):
        raise ValueError(f"{name}: divergence is {divergence!r}, give one of {', '.join(DIVERGENCES)}, cosine")
    if divergence is not None:
        (check.share if divergence == "jsd" else check.finite)(name, "beta", beta)
    check.positive(name, "temperature", temperature)


def linear_distillation(
    student: torch.Tensor, student_weight: torch.Tensor, target: torch.Tensor, *,
    student_bias: torch.Tensor | None = None, teacher: torch.Tensor | None = None,
    teacher_weight: torch.Tensor | None = None, teacher_bias: torch.Tensor | None = None,
    teacher_logits: torch.Tensor | None = None, divergence: str = "jsd", beta: float = 0.5, temperature: float = 1.0,
    weight_hard: float = 0.5, weight_soft: float = 0.5, ignore_index: int = -100, return_hard: bool = False,
    accum_dtype: torch.dtype | None = None, memory: int | str = "auto", drop_ignored: bool | None = None,
):  # fmt: skip
    """``weight_hard·hard + weight_soft·soft`` of a student's and a teacher's linear head, without all their logits.

    soft is a divergence of their distributions at a temperature, hard the student's cross entropy without one, each
    averaged over the rows that are not ignored. The gradients are taken in this call: the weight may change or go
    before backward.

    Args:
        student: (N, H) hidden states, fp32, bf16 or fp16; any strides.
        student_weight, student_bias: (V, H) and (V,). Logits are computed in the weight's dtype, or autocast's.
        target: (N,) class indices. They may be on the host.
        teacher, teacher_weight, teacher_bias: (N, H_t), (V_t, H_t), (V_t,), likewise; they get no gradient.
        teacher_logits: (N, V_t) of any dtype and strides, in place of these three.
            V_t may be larger than V: the student's logits are then 0 there.
        divergence: "jsd", "forward_kl" (of the teacher from the student), "reverse_kl", "tvd" or "cosine" (of logits).
        beta: the teacher's share in the mixture of "jsd": 0 is forward_kl, 1 reverse_kl; a factor of "cosine".
        temperature: both distributions of soft have their logits divided by it. There is no factor T².
        weight_hard, weight_soft: with a weight_hard of 0 the cross entropy is not computed, unless ``return_hard``.
        ignore_index: target of rows that count for nothing.
        return_hard: compute hard whatever its weight; otherwise it is 0 where its weight is.
        accum_dtype, drop_ignored: as in `linear_token_loss`.
        memory: bytes for the student's head beyond the gradients, or "auto", as in `linear_token_loss`. The teacher's
            logits of up to 1,024 rows come on top.

    Returns:
        (loss, soft, hard), 0-d in fp32 (fp64 for fp64 inputs). Only loss is differentiable, in student,
        student_weight and student_bias. All ignored: 0.

    Raises:
        ValueError, TypeError: shapes or options that don't fit; a target out of range, on the CPU and in debug mode
            (LIGER_KERNEL_DEBUG=1). On a GPU such a row's hard loss is otherwise NaN.

    Under `torch.compile` it is one node of the graph; without kernels, plain PyTorch with all logits.
    """
    name = "linear_distillation"
    student, student_weight, student_bias, group = local(name, student, student_weight, student_bias, None)
    teacher, teacher_weight, teacher_bias, of_teacher = local(name, teacher, teacher_weight, teacher_bias, None)
    if group is not None or of_teacher is not None:
        raise ValueError(f"{name}: a weight is sharded over its classes; give weight.full_tensor()")
    check_divergence(name, divergence, beta, temperature)
    ignore_index = check.integer(name, "ignore_index", ignore_index)
    weight_hard, weight_soft = (
        check.finite(name, argument, x) for argument, x in (("weight_hard", weight_hard), ("weight_soft", weight_soft))
    )
    check.dtype(name, "accum_dtype", accum_dtype)
    check_teacher(
        name, student, student_weight, target, student_bias, teacher, teacher_weight, teacher_bias, teacher_logits
    )
    with_hard = return_hard or weight_hard != 0
    if with_hard:
        check_targets(name, target, student_weight.shape[0], ignore_index)
    memory, weights = budget(memory), [weight_hard, weight_soft]
    rows, h, y = only_valid(student, target, ignore_index, drop_ignored)
    given = [x if x is None else x.detach() for x in (teacher, teacher_weight, teacher_bias, teacher_logits)]
    kernels = devices.has_kernels(h)
    if not kernels and torch.compiler.is_compiling():
        return linear_distillation_reference(
            student, student_weight, target.to(student.device), student_bias=student_bias, teacher=teacher,
            teacher_weight=teacher_weight, teacher_bias=teacher_bias, teacher_logits=teacher_logits,
            divergence=divergence, beta=beta, temperature=temperature, weight_hard=weight_hard, weight_soft=weight_soft,
            ignore_index=ignore_index, return_hard=return_hard,
        )  # fmt: skip
    if divergence == "jsd" and beta in (0, 1):
        divergence = "reverse_kl" if beta else "forward_kl"
    dtype = compute_dtype(student, student_weight)
    teacher_dtype = teacher_logits.dtype if teacher is None else compute_dtype(teacher, teacher_weight)
    teacher_dtype = torch.float32 if teacher_dtype == torch.float64 else teacher_dtype

    def with_kernels(h, w, b, needs):
        *outputs, n, dh, dw, db = distillation_fwd(
            h, w, b, y.contiguous(), *given, rows, divergence, float(beta), float(temperature), weights, ignore_index,
            with_hard, dtype, teacher_dtype, accum_dtype, memory, needs,
        )  # fmt: skip
        return tuple(outputs), (dh, dw, db), n if dtype == torch.float16 else 1

    def without_kernels(h, w, b, needs):
        n = (y != ignore_index).sum().clamp(min=1)

        def of_chunk(i, x):
            with torch.no_grad():
                some = i if rows is None else rows[i]
                z = frozen_logits(given[0][some], *given[1:3]) if teacher_logits is None else given[3][some]
            soft, hard = _of_logits(x, z, y[i], divergence, beta, temperature, ignore_index, with_hard)
            return weight_hard * hard + weight_soft * soft, soft, hard

        return *take_in_chunks(of_chunk, n, h, w, b, needs), n

    def reference(h, w, b):
        some = slice(None) if rows is None else rows
        teacher, teacher_weight, teacher_bias, logits = given
        return linear_distillation_reference(
            h, w, y, student_bias=b, teacher=None if teacher is None else teacher[some], teacher_weight=teacher_weight,
            teacher_bias=teacher_bias, teacher_logits=None if logits is None else logits[some], divergence=divergence,
            beta=beta, temperature=temperature, weight_hard=weight_hard, weight_soft=weight_soft,
            ignore_index=ignore_index, return_hard=with_hard,
        )  # fmt: skip

    return taken(with_kernels if kernels else without_kernels, reference, h, student_weight, student_bias)


# ---- the case ----


def _of(fn):
    def call(*args, more_classes=False, logits=False, **given):
        if more_classes:
            w, b = given["teacher_weight"], given["teacher_bias"]
            given |= dict(teacher_weight=torch.cat((w, w[:3])), teacher_bias=torch.cat((b, b[:3])))
        if logits:
            h, w, b = (given.pop(f"teacher{of}") for of in ("", "_weight", "_bias"))
            given["teacher_logits"] = torch.addmm(b, h, w.t())
        return fn(*args, **given)

    return call


def _inputs(M, H, V):
    student, teacher = torch.randn(M, H), torch.randn(M, H)
    of_student, of_teacher = torch.randn(V, H) / H**0.5, torch.randn(V, H) / H**0.5  # two nats apart
    return dict(
        student=student.requires_grad_(), student_weight=of_student.requires_grad_(),
        student_bias=torch.randn(V).requires_grad_(), target=labels(M, V), teacher=teacher, teacher_weight=of_teacher,
        teacher_bias=torch.randn(V),
    )  # fmt: skip


CASES.append(
    Case(
        "linear_distillation",
        fn=_of(lambda *args, **given: linear_distillation(*args, **given, drop_ignored=False)),
        reference=_of(linear_distillation_reference),
        inputs=_inputs,
        shapes=((1, 8, 8), (5, 24, 123), (70, 32, 513), (4, 16, 9000)),
        options=(
            dict(student_bias=None, teacher_bias=None),
            dict(beta=0.1, temperature=2.0, weight_hard=0.0),
            dict(beta=0.0, more_classes=True),
            dict(beta=1.0, temperature=0.7, logits=True),
            dict(divergence="tvd", temperature=2.0),
            dict(divergence="cosine", more_classes=True, temperature=2.0),
        ),
        bench=((8192, 4096, 128256),),
        flops=lambda t: 8 * t["student"].numel() * t["student_weight"].shape[0],
        fp32_roundings=4,  # as of fused_linear_cross_entropy
    )
)
