r"""Cross entropy of rows of logits: the arithmetic that the operator on logits and the linear head
share.

For a row x with target y, class weights w (1 if not given), smoothing ε and λ = lse_square_scale:

    z   = softcap·tanh(logit_scale·x / softcap)        (logit_scale·x without a softcap)
    lse = log Σ_v exp z_v
    CE  = (1-ε)·w_y·(lse - z_y) + ε/V·Σ_v w_v·(lse - z_v)
    Z   = λ·lse²
    loss = (CE/n₀ + Z/n₁)·t
    entropy = -Σ_v p_v·log p_v,   p = exp(z - lse)

    dz_v = a·(p_v - 1[v=y]) + b·p_v - c·w_v - gₑ·p_v·(log p_v + entropy)
    a = (1-ε)·w_y·g·t/n₀,   b = ε·W/V·g·t/n₀ + 2λ·lse·g·t/n₁ + gₛ,   c = ε/V·g·t/n₀
    dx   = dz·(1 - (z/softcap)²)·logit_scale

with g, gₑ, gₛ the incoming gradients of loss, entropy and lse, W = Σ_v w_v and the normalisers n₀ =
Σ_valid w_y, n₁ = n of "mean" (1 for "sum" and "none", and where all rows are ignored). t = p_y,
without a gradient of its own, with token scaling (DFT); 1 otherwise.

Logits are (T, V) with any strides. If the classes of a token are contiguous, a program reads a row.
If the tokens are contiguous (the linear head's logits), it reads a strip of classes for some
tokens. Either way each lane keeps its own maximum and sums until the end. Then `_merge` combines
the strips, and those of the ranks of a group that each hold a shard of the classes. lse is kept as
its two parts, max z and log Σ exp(z - max z): z - lse is computed as (z - max z) - log Σ, so that a
confident row keeps its digits.

A head's bias is added here, in fp32, to each x that is read. x is the product alone, rounded once:
in the product, the bias would need a copy of the weight with one more column.

An ignored row gives 0 everywhere. A target out of range gives NaN, and nothing outside the row is
read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from liger_kernel.core import devices, tuning
from liger_kernel.core.kernel import kernel
from liger_kernel.core.parallel import gathered, place
from liger_kernel.core.tile import (
    INF,
    blocks,
    cdiv,
    exp,
    exp_for,
    finite,
    log,
    next_power_of_2,
    of_program,
    online_max,
    parts,
    read,
    tanh,
    tl,
    triton,
)

MOST = 65535  # programs along a grid's second axis
# numbers of a token in `_partials` and `_merge`: max, sum, Σpz, Σwz, Σz, index of the max, z of the
# target
SLOTS = 7


@dataclass(frozen=True)
class TokenOptions:
    """What a token's loss depends on beside its logits and its target: see the formulas above."""

    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    softcap: float | None = None  # None or 0: none
    logit_scale: float = 1.0

    @property
    def kind(self):
        """Constants of the kernels."""
        return dict(
            SMOOTH=self.label_smoothing != 0,
            SCALED=self.logit_scale != 1.0,
            SOFTCAP=bool(self.softcap),
        )

    @property
    def numbers(self):
        """Arguments of the kernels."""
        return (
            self.ignore_index,
            self.label_smoothing,
            self.lse_square_scale,
            self.softcap or 1.0,
            self.logit_scale,
        )


@kernel
def _normalise(
    target_ptr,
    weight_ptr,
    items_ptr,
    norm_ptr,
    M,
    V,
    ignore_index,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """norm = (n₀, n₁, W, n); one program."""
    i = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), dtype=tl.int64)
    valid_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, M, BLOCK):
        y = tl.load(target_ptr + start + i, mask=start + i < M, other=ignore_index)
        count += (y != ignore_index).to(tl.int64)
        if weight_ptr is not None:
            inside = (y != ignore_index) & (y >= 0) & (y < V)
            valid_weight += tl.load(weight_ptr + y, mask=inside, other=0.0).to(tl.float32)
    n = tl.sum(count).to(tl.float32)
    total = V * 1.0
    n0 = n
    if weight_ptr is not None:
        n0 = tl.sum(valid_weight)
        all_weight = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            all_weight += tl.load(weight_ptr + start + i, mask=start + i < V, other=0.0).to(
                tl.float32
            )
        total = tl.sum(all_weight)
    if items_ptr is not None:
        items = tl.load(items_ptr).to(tl.float32)
        tl.store(norm_ptr, items)
        tl.store(norm_ptr + 1, items)
    elif MEAN:
        tl.store(norm_ptr, tl.where(n0 == 0.0, 1.0, n0))
        tl.store(norm_ptr + 1, tl.maximum(n, 1.0))
    else:
        tl.store(norm_ptr, 1.0)
        tl.store(norm_ptr + 1, 1.0)
    tl.store(norm_ptr + 2, total)
    tl.store(norm_ptr + 3, n)


@triton.jit
def _biased(x, bias_ptr, v, mask):
    """x in fp32, and the bias of class v if there is one."""
    x = x.to(tl.float32)
    if bias_ptr is not None:
        x += read(bias_ptr, v, mask)
    return x


@triton.jit
def _logits(x, softcap, logit_scale, SCALED: tl.constexpr, SOFTCAP: tl.constexpr):
    z = x
    if SCALED:
        z *= logit_scale
    if SOFTCAP:
        z, _ = tanh(z / softcap)
        z *= softcap
    return z


@triton.jit
def times(p, x):
    """p·x, and 0 where p is 0, whatever x is."""
    return tl.where(p == 0.0, 0.0, p * x)


@kernel
def _partials(
    x_ptr,
    more_ptr,
    split,
    bias_ptr,
    target_ptr,
    weight_ptr,
    part_ptr,
    stride_t,
    stride_v,
    T,
    V,
    STRIP,
    first,
    ignore_index,
    softcap,
    logit_scale,
    ENTROPY: tl.constexpr,
    SMOOTH: tl.constexpr,
    MEAN: tl.constexpr,
    BEST: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: STRIP classes of BLOCK_T tokens, read once. In each iteration a lane takes EACH
    classes of a token.

    With ROWS the classes of a token are contiguous, and a lane's are neighbours. Otherwise the
    tokens are contiguous, and neighbouring lanes have neighbouring tokens."""
    t0 = tl.program_id(0) * BLOCK_T
    x_ptr, row, begin, left = of_program(x_ptr, more_ptr, split, V, STRIP)
    tokens = t0 + tl.arange(0, BLOCK_T)
    y = tl.load(target_ptr + tokens, mask=tokens < T, other=ignore_index)
    if tl.sum((y != ignore_index).to(tl.int32)) == 0:
        return
    lane, each = tl.arange(0, LANES)[None, :], tl.arange(0, EACH)[:, None]
    if ROWS:
        i, t = lane * EACH + each, lane * 0
    else:
        i, t = each * (LANES // BLOCK_T) + lane // BLOCK_T, lane % BLOCK_T
    x = x_ptr + t0.to(tl.int64) * stride_t + row * stride_v + (i * stride_v + t * stride_t)
    known = t0 + t < T
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    top = tl.full((LANES,), -INF, dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    pz, wz, sz = total, total, total
    best = tl.zeros((LANES,), dtype=tl.int32)
    for start in range(0, left, EACH * LANES // BLOCK_T):
        mask = (start + i < left) & known
        z = tl.load(x, mask=mask, other=-INF).to(tl.float32)
        if bias_ptr is not None:
            # of i once for all tokens
            k = i if ROWS else each * (LANES // BLOCK_T) + tl.arange(0, LANES // BLOCK_T)[None, :]
            b = read(bias_ptr + begin + start, k, start + k < left)
            b = tl.broadcast_to(b[:, :, None], (EACH, LANES // BLOCK_T, BLOCK_T))
            z += tl.reshape(b, (EACH, LANES))
        z = _logits(z, softcap, logit_scale, SCALED, SOFTCAP)
        x += EACH * LANES // BLOCK_T * stride_v
        if SCALED or SOFTCAP:
            z = tl.where(mask, z, -INF)
        higher = tl.max(z, axis=0)
        if BEST:
            at = tl.min(tl.where(z == higher[None, :], begin + start + i, 2147483647), axis=0)
            best = tl.where(higher > top, at, best)
        new, shift = online_max(top, higher)
        keep = exp_for(top - shift, EXACT)
        z -= shift[None, :]
        p = exp_for(z, EXACT)
        if ENTROPY:
            pz = times(keep, pz + (finite(top) - shift) * total) + tl.sum(times(p, z), axis=0)
        total = total * keep + tl.sum(p, axis=0)
        top = new
        if SMOOTH or MEAN:
            z = tl.where(mask, z + shift[None, :], 0.0)
            if MEAN:
                sz += tl.sum(z, axis=0)
            if SMOOTH:
                if weight_ptr is not None:
                    z *= tl.load(weight_ptr + first + begin + start + i, mask=mask, other=0.0).to(
                        tl.float32
                    )
                wz += tl.sum(z, axis=0)

    top = tl.reshape(top, (LANES // BLOCK_T, BLOCK_T))
    total = tl.reshape(total, (LANES // BLOCK_T, BLOCK_T))
    highest = tl.max(top, axis=0)
    shift = finite(highest)
    keep = exp(top - shift[None, :])
    slot = tl.num_programs(1) * T
    part = part_ptr + tl.program_id(1) * T + tokens
    mask = tokens < T
    tl.store(part, highest, mask=mask)
    tl.store(part + slot, tl.sum(total * keep, axis=0), mask=mask)
    if ENTROPY:
        pz = tl.reshape(pz, (LANES // BLOCK_T, BLOCK_T))
        pz = times(keep, pz + (finite(top) - shift[None, :]) * total)
        tl.store(part + 2 * slot, tl.sum(pz, axis=0), mask=mask)
    if SMOOTH:
        tl.store(
            part + 3 * slot, tl.sum(tl.reshape(wz, (LANES // BLOCK_T, BLOCK_T)), axis=0), mask=mask
        )
    if MEAN:
        tl.store(
            part + 4 * slot, tl.sum(tl.reshape(sz, (LANES // BLOCK_T, BLOCK_T)), axis=0), mask=mask
        )
    if BEST:
        best = tl.reshape(best, (LANES // BLOCK_T, BLOCK_T))
        at = tl.min(tl.where(top == highest[None, :], best, 2147483647), axis=0)
        tl.store(part + 5 * slot, (first + at).to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def target_logit(x_ptr, more_ptr, split, of_token, y, stride_v, mask, other):
    """The logit of class y, in one part or two: see `of_program`."""
    here = mask
    if more_ptr is not None:
        here = mask & (y < split)
    x = tl.load(x_ptr + of_token + y * stride_v, mask=here, other=other)
    if more_ptr is not None:
        more = tl.load(
            more_ptr + of_token + (y - split) * stride_v, mask=mask & (y >= split), other=other
        )
        x = tl.where(y < split, x, more)
    return x


@kernel
def _merge(
    part_ptr,
    x_ptr,
    more_ptr,
    split,
    bias_ptr,
    target_ptr,
    weight_ptr,
    norm_ptr,
    merged_ptr,
    loss_ptr,
    stats_ptr,
    z_ptr,
    token_ptr,
    entropy_ptr,
    mean_ptr,
    best_ptr,
    stride_n,
    stride_slot,
    stride_t,
    stride_v,
    N,
    T,
    V,
    first,
    shard,
    ignore_index,
    smoothing,
    lse_square_scale,
    softcap,
    logit_scale,
    ENTROPY: tl.constexpr,
    SMOOTH: tl.constexpr,
    MEAN: tl.constexpr,
    BEST: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TOKEN_SCALING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """N strips become one, in ``merged``; if that is None, they become the tokens' outputs.

    The target's logit is read from x, the classes from ``first`` to ``first + shard``; without x it
    is in the strips. It has that many arguments because one launch writes all outputs; a pointer
    that is None costs nothing."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    known = t < T
    n = tl.arange(0, BLOCK_N)[:, None]
    part = part_ptr + n * stride_n + t[None, :]
    mask = (n < N) & known[None, :]
    tops = tl.load(part, mask=mask, other=-INF)
    top = tl.max(tops, axis=0)
    shift = finite(top)
    keep = exp(tops - shift[None, :])
    totals = tl.load(part + stride_slot, mask=mask, other=0.0)
    total = tl.sum(totals * keep, axis=0)
    pz, wz, sz, best = total, total, total, tl.zeros((BLOCK_T,), dtype=tl.int32)
    if ENTROPY:
        pzs = tl.load(part + 2 * stride_slot, mask=mask, other=0.0)
        pz = tl.sum(times(keep, pzs + (finite(tops) - shift[None, :]) * totals), axis=0)
    if SMOOTH:
        wz = tl.sum(tl.load(part + 3 * stride_slot, mask=mask, other=0.0), axis=0)
    if MEAN:
        sz = tl.sum(tl.load(part + 4 * stride_slot, mask=mask, other=0.0), axis=0)
    if BEST:
        at = tl.load(part + 5 * stride_slot, mask=mask, other=0.0).to(tl.int32, bitcast=True)
        best = tl.min(tl.where((tops == top[None, :]) & mask, at, 2147483647), axis=0)

    y = tl.load(target_ptr + t, mask=known, other=ignore_index)
    valid = y != ignore_index
    inside = (y >= 0) & (y < V)
    if x_ptr is not None:
        here = valid & (y >= first) & (y < first + shard)
        x = target_logit(
            x_ptr, more_ptr, split, t.to(tl.int64) * stride_t, y - first, stride_v, here, 0.0
        )
        x = _biased(x, bias_ptr, y - first, here)
        zy = tl.where(
            here,
            _logits(x, softcap, logit_scale, SCALED, SOFTCAP),
            tl.where(inside, 0.0, float("nan")),
        )
    else:
        zy = tl.sum(tl.load(part + 6 * stride_slot, mask=mask, other=0.0), axis=0)
    if merged_ptr is not None:
        tl.store(merged_ptr + t, top, mask=known)
        tl.store(merged_ptr + T + t, total, mask=known)
        tl.store(merged_ptr + 2 * T + t, pz, mask=known)
        tl.store(merged_ptr + 3 * T + t, wz, mask=known)
        tl.store(merged_ptr + 4 * T + t, sz, mask=known)
        tl.store(merged_ptr + 5 * T + t, best.to(tl.float32, bitcast=True), mask=known)
        tl.store(merged_ptr + 6 * T + t, zy, mask=known)
        return

    log_sum = log(total)
    nll = log_sum + (top - zy)
    lse = log_sum + top
    wy = 1.0
    if weight_ptr is not None:
        wy = tl.load(weight_ptr + y, mask=valid & inside, other=0.0).to(tl.float32)
    ce = wy * nll
    if SMOOTH:
        ce = (1.0 - smoothing) * ce + smoothing / V * (tl.load(norm_ptr + 2) * lse - wz)
    token = tl.full((BLOCK_T,), 1.0, dtype=tl.float32)
    if TOKEN_SCALING:
        token = exp(-nll)
    z_loss = lse_square_scale * lse * lse / tl.load(norm_ptr + 1) * token
    tl.store(
        loss_ptr + t, tl.where(valid, ce / tl.load(norm_ptr) * token + z_loss, 0.0), mask=known
    )
    tl.store(stats_ptr + 2 * t, tl.where(valid, top, 0.0), mask=known)
    tl.store(stats_ptr + 2 * t + 1, tl.where(valid, log_sum, 0.0), mask=known)
    if z_ptr is not None:
        tl.store(z_ptr + t, tl.where(valid, z_loss, 0.0), mask=known)
    if token_ptr is not None:
        tl.store(token_ptr + t, tl.where(valid, token, 0.0), mask=known)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + t, tl.where(valid, log_sum - pz / total, 0.0), mask=known)
    if mean_ptr is not None:
        tl.store(mean_ptr + t, tl.where(valid, sz / V, 0.0), mask=known)
    if best_ptr is not None:
        tl.store(best_ptr + t, tl.where(valid, best, -1).to(tl.int64), mask=known)


@kernel
def _gradient(
    g_ptr,
    g_entropy_ptr,
    g_lse_ptr,
    x_ptr,
    more_ptr,
    split,
    bias_ptr,
    target_ptr,
    weight_ptr,
    norm_ptr,
    stats_ptr,
    entropy_ptr,
    dx_ptr,
    stride_g,
    stride_t,
    stride_v,
    stride_dt,
    stride_dv,
    T,
    V,
    first,
    shard,
    ignore_index,
    smoothing,
    lse_square_scale,
    softcap,
    logit_scale,
    SMOOTH: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program: one block of classes of some tokens. dx may be x, and is x if that is in two
    parts. No g means 1."""
    t0 = tl.program_id(0) * BLOCK_T
    x_ptr, row, v0, left = of_program(x_ptr, more_ptr, split, shard, BLOCK_V)
    if more_ptr is not None:
        dx_ptr = x_ptr
    i, j = tl.arange(0, BLOCK_V)[:, None], tl.arange(0, BLOCK_T)[None, :]
    t = t0 + tl.arange(0, BLOCK_T)
    known = t < T
    mask = (i < left) & (t0 + j < T)
    dx = dx_ptr + t0.to(tl.int64) * stride_dt + row * stride_dv + (i * stride_dv + j * stride_dt)
    y = tl.load(target_ptr + t, mask=known, other=ignore_index)
    valid = y != ignore_index
    if tl.sum(valid.to(tl.int32)) == 0:
        tl.store(dx, tl.zeros((BLOCK_V, BLOCK_T), dtype=dx_ptr.dtype.element_ty), mask=mask)
        return
    x = x_ptr + t0.to(tl.int64) * stride_t + row * stride_v + (i * stride_v + j * stride_t)
    x = _biased(tl.load(x, mask=mask, other=0.0), bias_ptr, v0 + i, i < left)
    top = tl.load(stats_ptr + 2 * t, mask=known, other=0.0)
    log_sum = tl.load(stats_ptr + 2 * t + 1, mask=known, other=0.0)
    g = tl.full((BLOCK_T,), 1.0, dtype=tl.float32)
    if g_ptr is not None:
        g = tl.load(g_ptr + t.to(tl.int64) * stride_g, mask=known, other=0.0).to(tl.float32)
    g0, g1 = g * logit_scale / tl.load(norm_ptr), g * logit_scale / tl.load(norm_ptr + 1)
    a = (1.0 - smoothing) * g0
    if weight_ptr is not None:
        a *= tl.load(weight_ptr + y, mask=valid & (y >= 0) & (y < V), other=0.0).to(tl.float32)
    b = smoothing * tl.load(norm_ptr + 2) / V * g0 + 2.0 * lse_square_scale * (top + log_sum) * g1
    if g_lse_ptr is not None:
        b += tl.load(g_lse_ptr + t, mask=known, other=0.0) * logit_scale
    of_target = tl.where((y >= first + v0) & (y < first + v0 + left), y - first - v0, -1).to(
        tl.int32
    )

    log_p = (_logits(x, softcap, logit_scale, SCALED, SOFTCAP) - top[None, :]) - log_sum[None, :]
    p = exp_for(log_p, x_ptr.dtype.element_ty == tl.float32)
    d = a[None, :] * (p - (i == of_target[None, :]).to(tl.float32)) + b[None, :] * p
    if SMOOTH:
        c = smoothing / V * g0
        if weight_ptr is not None:
            w = tl.load(weight_ptr + first + v0 + i, mask=i < left, other=0.0).to(tl.float32)
            d -= c[None, :] * w
        else:
            d -= c[None, :]
    if g_entropy_ptr is not None:
        e = tl.load(g_entropy_ptr + t, mask=known, other=0.0) * logit_scale
        entropy = tl.load(entropy_ptr + t, mask=known, other=0.0)
        d -= e[None, :] * times(p, log_p + entropy[None, :])
    if SOFTCAP:
        _, slope = tanh(x * logit_scale / softcap)
        d *= slope
    d = tl.where(valid[None, :], d, 0.0)
    tl.store(dx, d.to(dx_ptr.dtype.element_ty), mask=mask)


def _layout(x):
    """What a launch is made from: tokens (0: it makes no difference), classes, whether those are
    contiguous."""
    rows = x.stride(1) == 1
    return 0 if rows else x.shape[0], x.shape[1], rows


def _others(x, numbers, T, V, rows, plain):
    tokens, lanes, each, warps = numbers
    places = {
        1: tuning.near(lanes, 32, 2048),
        2: tuning.near(each, 2, 16),
        3: tuning.near(warps, 1, 16),
    }
    if not rows:
        places |= {0: tuning.near(tokens, 1, 128), 1: (512, 1024)}
    return tuning.around(
        numbers,
        places,
        lambda _, lanes, each, warps: each * lanes <= 2048 * warps <= 8 * each * lanes,
    )


@tuning.tuned("logits", _others)
def _launch(x, T, V, rows, plain):
    """(tokens, lanes, classes of a lane in an iteration, warps) of a program that reads logits.

    What is not ``plain`` (softcap, smoothing, fp32 ...) needs more registers: half as many logits
    at a time.

    H200, 2026-11-20, bf16, share of the copy rate (4.26 TB/s). Rows of 32000, 128256, 256000: 0.95,
    1.00, 1.02; twice the lanes 0.93, 1.00, 1.03; twice the classes of a lane 0.88, 0.92, 0.94. (V,
    T) of 128256 classes and 2048, 4096, 6144 tokens: 0.76, 0.86, 0.90; half the classes of a lane
    0.74, 0.84, 0.88; twice the tokens 0.75, 0.84, 0.90."""
    if rows:
        lanes = min(max(next_power_of_2(V) // 8, 1), 256)
        return 1, lanes, 8, max(lanes // 64, 1)
    return min(next_power_of_2(T), 64), 1024, 8 if plain and T > 1 else 4, 4


STRIP = 2048  # classes of a program that reads logits whose tokens are contiguous; otherwise all


def _others_gradient(x, numbers, T, V, rows):
    tokens, classes, warps = numbers
    places = {1: tuning.near(classes, 16, 8192), 2: tuning.near(warps, 1, 16)}
    if not rows:
        places[0] = tuning.near(tokens, 16, 256)
    return tuning.around(numbers, places, lambda t, v, warps: 512 * warps <= t * v <= 2048 * warps)


@tuning.tuned("logits_gradient", _others_gradient)
def _launch_gradient(x, T, V, rows):
    """(tokens, classes, warps) of a program that makes the gradient of one block.

    H200, 2026-11-21, bf16, read + written, share of the copy rate: rows of 32000 0.90, half as many
    classes 0.90, with 8 warps 0.86; (V, T) of 2048, 4096, 8192 tokens 0.90, 0.91, 0.91, twice the
    classes 0.89, 0.90, 0.91."""
    if rows:
        columns = min(next_power_of_2(V), 4096)
        return 1, columns, max(columns // 1024, 1)
    tokens = min(next_power_of_2(T), 128)
    return tokens, 4096 // tokens, 4


def _like(x, bias):
    """The bias as the kernels take it. It is rounded as the logits are, as in autocast."""
    return None if bias is None else bias.to(x.dtype).contiguous()


def _plain(x, *options):
    """Whether the logits have 16 bits and the kernel uses none of its options."""
    return x.element_size() == 2 and not any(options)


def _rounding(x, SCALED, SOFTCAP, **_):
    """A launch's option: fp32 logits are rounded after they are scaled and before a maximum is
    subtracted.

    All kernels must do the same: a fused multiply-add in one of them costs a confident row's
    gradient 2e-6 (H200). A softcap's tanh is more exact with them."""
    return (
        dict(enable_fp_fusion=False) if x.dtype == torch.float32 and SCALED and not SOFTCAP else {}
    )


def normalisers(target, weight, V, ignore_index, mean, items=None):
    """-> fp32 (n₀, n₁, W, n), without waiting for the device. ``items`` (0-d) is both n₀ and n₁ if
    given."""
    norm = torch.empty(4, dtype=torch.float32, device=target.device)
    block = min(max(next_power_of_2(target.numel()), 1024), 8192)
    _normalise[(1,)](
        target,
        weight,
        items,
        norm,
        target.numel(),
        V,
        ignore_index,
        MEAN=mean,
        BLOCK=block,
        num_warps=block // 512,
    )
    return norm


def token_loss(
    x,
    target,
    weight,
    norm,
    options,
    loss,
    stats,
    z_loss=None,
    token=None,
    entropy=None,
    mean=None,
    best=None,
    token_scaling=False,
    group=None,
    bias=None,
):
    """Fill loss (T,), stats (T, 2), and z_loss, token, entropy, mean, best (T,) where given, for x
    (T, V).

    x may be in two parts, of the same strides. ``bias`` (V,), of any dtype, is added to it. With a
    ``group`` both are this rank's shard of the classes, and one small tensor is gathered. The loss
    of a token, and its gradient, are NaN if its target is another one on another rank."""
    (x, more, split, shard), (world, rank) = parts(x), place(group)
    T, kind, bias = x.shape[0], options.kind, _like(x, bias)
    rounding = _rounding(x, **kind)
    kind |= dict(ENTROPY=entropy is not None, MEAN=mean is not None, BEST=best is not None)
    ignore_index, _, _, softcap, logit_scale = options.numbers
    tokens, lanes, each, warps = _launch(x, *_layout(x), _plain(x, *kind.values()))
    strip = x.shape[1] if x.stride(1) == 1 else STRIP
    strips = blocks(split, shard, strip)
    slots = (
        6
        if kind["BEST"]
        else 5
        if kind["MEAN"]
        else 4
        if kind["SMOOTH"]
        else 3
        if kind["ENTROPY"]
        else 2
    )
    part = torch.empty((slots, strips, T), dtype=torch.float32, device=x.device)
    _partials[(cdiv(T, tokens), strips)](
        x,
        more,
        split,
        bias,
        target,
        weight,
        part,
        *x.stride(),
        T,
        shard,
        strip,
        rank * shard,
        ignore_index,
        softcap,
        logit_scale,
        **kind,
        BLOCK_T=tokens,
        LANES=lanes,
        EACH=each,
        ROWS=x.stride(1) == 1,
        num_warps=devices.warps(warps, x),
        **rounding,
    )
    outputs = loss, stats, z_loss, token, entropy, mean, best

    def merge(part, n, strides, x, more, bias, merged):
        rows = max(16, min(64, 2048 // next_power_of_2(n)))
        _merge[(cdiv(T, rows),)](
            part,
            x,
            more,
            split,
            bias,
            target,
            weight,
            norm,
            merged,
            *outputs,
            *strides,
            *((0, 0) if x is None else x.stride()),
            n,
            T,
            world * shard,
            rank * shard,
            shard,
            *options.numbers,
            **kind,
            TOKEN_SCALING=token_scaling,
            BLOCK_N=next_power_of_2(n),
            BLOCK_T=rows,
            num_warps=4,
            **rounding,
        )

    if world == 1:
        merge(part, strips, (T, strips * T), x, more, bias, None)
    else:
        merged = torch.empty((SLOTS + 1, T), dtype=torch.float32, device=x.device)
        merge(part, strips, (T, strips * T), x, more, bias, merged)
        merged[SLOTS] = target
        merged = gathered(merged, group)
        merge(merged, world, ((SLOTS + 1) * T, T), None, None, None, None)
        unlike = (merged[:, SLOTS] != merged[0, SLOTS]).any(0)  # other targets on another rank
        loss.masked_fill_(unlike, torch.nan)
        stats.masked_fill_(unlike[:, None], torch.nan)  # of which the gradient is made


def token_gradient(
    g,
    x,
    target,
    weight,
    norm,
    stats,
    dx,
    options,
    g_entropy=None,
    g_lse=None,
    entropy=None,
    group=None,
    bias=None,
):
    """dx (T, V) for incoming gradients g (0-d or (T,) of any stride; None: 1), g_entropy, g_lse
    (T,).

    dx may be x, and must be if x is in two parts. ``bias`` as in `token_loss`.
    """
    (x, more, split, shard), (dx, *_), (world, rank) = parts(x), parts(dx), place(group)
    T, kind, bias = x.shape[0], options.kind, _like(x, bias)
    tokens, block, warps = _launch_gradient(x, *_layout(x))
    while blocks(split, shard, block) > MOST:
        block *= 2
    stride_g = g.stride(0) if g is not None and g.dim() else 0
    _gradient[(cdiv(T, tokens), blocks(split, shard, block))](
        g,
        g_entropy,
        g_lse,
        x,
        more,
        split,
        bias,
        target,
        weight,
        norm,
        stats,
        entropy,
        dx,
        stride_g,
        *x.stride(),
        *dx.stride(),
        T,
        world * shard,
        rank * shard,
        shard,
        *options.numbers,
        **kind,
        BLOCK_T=tokens,
        BLOCK_V=block,
        num_warps=devices.warps(warps, x),
        **_rounding(x, **kind),
    )
