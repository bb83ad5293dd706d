r"""Cross entropy of rows of logits, for the operator on logits and for the linear head.

For a row x with target y, class weights w (1 if not given), smoothing ε and λ = lse_square_scale:

    z   = softcap·tanh(logit_scale·x / softcap)        (logit_scale·x without a softcap)
    lse = log Σ_v exp z_v
    CE  = (1-ε)·w_y·(lse - z_y) + ε/V·Σ_v w_v·(lse - z_v)
    Z   = λ·lse²
    loss = (CE/n₀ + Z/n₁)·t
    entropy = -Σ_v p_v·log p_v,   p = exp(z - lse)
    log_sum_sq_probs = log Σ_v p_v²

    dz_v = a·(p_v - 1[v=y]) + b·p_v - c·w_v - gₑ·p_v·(log p_v + entropy)
    a = (1-ε)·w_y·g·t/n₀,   b = ε·W/V·g·t/n₀ + 2λ·lse·g·t/n₁ + gₛ,   c = ε/V·g·t/n₀
    dx   = dz·(1 - (z/softcap)²)·logit_scale

with g, gₑ, gₛ the incoming gradients of loss, entropy and lse, W = Σ_v w_v and the normalisers n₀ =
Σ_valid w_y, n₁ = n of "mean" (1 for "sum" and "none", and where all rows are ignored). t = p_y,
without a gradient of its own, with token scaling (DFT); 1 otherwise.

Logits are (T, V) with any strides. If the classes of a token are contiguous, a program reads a row.
If the tokens are contiguous (the linear head's logits), it reads a strip of classes for some
tokens. Either way each lane keeps its own maximum and sums until the end. Then `merge_kernel`
combines the strips, and those of the ranks of a group that each hold a shard of the classes. lse is
kept as its two parts, max z and log Σ exp(z - max z): z - lse is computed as (z - max z) - log Σ,
so that a confident row keeps its digits.

A head's bias is added here, in fp32, to each x that is read. x is the product alone, rounded once:
in the product, the bias would need a copy of the weight with one more column.

An ignored row gives 0 everywhere. A target out of range gives NaN, and nothing outside the row is
read. The kernels are in `logits_kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_kernel.core import devices, tuning
from liger_kernel.core.parallel import all_gather, size_and_rank
from liger_kernel.core.tile import cdiv, next_power_of_2, num_vocab_blocks, split_vocab
from liger_kernel.ops.head.logits_kernels import (
    NUM_PARTIALS,
    gradient_kernel,
    merge_kernel,
    normalisers_kernel,
    partials_kernel,
)

MAX_GRID_Y = 65535  # programs along a grid's second axis
STRIP = 2048  # classes of a program that reads logits whose tokens are contiguous; otherwise all


class TokenOptions(NamedTuple):
    """Options of a token's loss: see the formulas above. ``softcap`` is None or 0 for none."""

    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0

    @property
    def kernel_constants(self):
        """The constants that all kernels take."""
        return dict(
            SMOOTH=self.label_smoothing != 0,
            SCALED=self.logit_scale != 1.0,
            SOFTCAP=bool(self.softcap),
        )

    @property
    def kernel_scalars(self):
        """The arguments that `merge_kernel` and `gradient_kernel` take, in their order."""
        return (
            self.ignore_index,
            self.label_smoothing,
            self.lse_square_scale,
            self.softcap or 1.0,
            self.logit_scale,
        )


# ---- launches ----


def _layout(x):
    """Return the sizes a launch depends on: (tokens, classes, are a token's classes contiguous).

    The number of tokens is 0 where it makes no difference.
    """
    contiguous_classes = x.stride(1) == 1
    return 0 if contiguous_classes else x.shape[0], x.shape[1], contiguous_classes


def _launch_candidates(x, numbers, T, V, contiguous_classes, plain):
    tokens, lanes, per_lane, warps = numbers
    places = {
        1: tuning.powers_of_2_near(lanes, 32, 2048),
        2: tuning.powers_of_2_near(per_lane, 2, 16),
        3: tuning.powers_of_2_near(warps, 1, 16),
    }
    if not contiguous_classes:
        places |= {0: tuning.powers_of_2_near(tokens, 1, 128), 1: (512, 1024)}

    def fits(_, lanes, per_lane, warps):
        return per_lane * lanes <= 2048 * warps <= 8 * per_lane * lanes

    return tuning.neighbors(numbers, places, fits)


@tuning.tunable("logits", _launch_candidates)
def _launch(x, T, V, contiguous_classes, plain):
    """Return (tokens, lanes, classes of a lane in an iteration, warps) of `partials_kernel`.

    Logits that are not ``plain`` (softcap, smoothing, fp32 ...) need more registers: half as many
    at a time.

    H200, 2026-11-20, bf16, share of the copy rate (4.26 TB/s). Rows of 32000, 128256, 256000: 0.95,
    1.00, 1.02; twice the lanes 0.93, 1.00, 1.03; twice the classes of a lane 0.88, 0.92, 0.94. (V,
    T) of 128256 classes and 2048, 4096, 6144 tokens: 0.76, 0.86, 0.90; half the classes of a lane
    0.74, 0.84, 0.88; twice the tokens 0.75, 0.84, 0.90.
    """
    if contiguous_classes:
        lanes = min(max(next_power_of_2(V) // 8, 1), 256)
        return 1, lanes, 8, max(lanes // 64, 1)
    return min(next_power_of_2(T), 64), 1024, 8 if plain and T > 1 else 4, 4


def _gradient_launch_candidates(x, numbers, T, V, contiguous_classes):
    tokens, classes, blocks, warps = numbers
    places = {
        1: tuning.powers_of_2_near(classes, 16, 8192),
        2: tuning.powers_of_2_near(blocks, 1, 16),
        3: tuning.powers_of_2_near(warps, 1, 16),
    }
    if not contiguous_classes:
        places[0] = tuning.powers_of_2_near(tokens, 16, 256)

    def fits(tokens, classes, blocks, warps):
        return 512 * warps <= tokens * classes <= 2048 * warps

    return tuning.neighbors(numbers, places, fits)


@tuning.tunable("logits_gradient", _gradient_launch_candidates)
def _gradient_launch(x, T, V, contiguous_classes):
    """Return (tokens, classes of a block, blocks, warps) of a program of `gradient_kernel`.

    In training the clock is lower than in a benchmark of such a kernel, and instructions count.
    H200, 2026-11-29, bf16, read + written, in TB/s after matrix products (and after none). (V, T)
    of 128256 classes and 4096 tokens: 4.11 (4.09); with three stages of loads 4.04 (4.07), with one
    3.58 (3.80). With three stages, 4 blocks 3.84 (4.10), 16 blocks 4.01 (3.98), blocks of 64
    classes and 8 warps 3.52 (3.91); a single block 2.51 (2.76). 6144 tokens 4.14 (4.02); 256000
    classes, 2944 tokens 4.13 (4.11). Rows of 128256, with three stages: 3.91 (3.90), with 2 warps
    3.67 (3.88), blocks of 4096 classes 3.61 (3.84); a single block 3.62 (3.88).
    """
    if contiguous_classes:
        columns = min(next_power_of_2(V), 2048)
        return 1, columns, 8 if V > 2048 else 1, max(columns // 512, 1)
    tokens = min(next_power_of_2(T), 128)
    return tokens, 4096 // tokens, 8 if T >= 128 else 1, 4


def round_bias(x, bias):
    """Return the bias as the kernels take it: rounded as the logits x are, as in autocast."""
    return None if bias is None else bias.to(x.dtype).contiguous()


def _is_plain(x, *constants):
    """Return True if the logits have 16 bits and the kernel uses none of its options."""
    return x.element_size() == 2 and not any(constants)


def _fusion_option(x):
    """Return the launch option that rounds every product of fp32 logits.

    All kernels must round the same, whatever outputs they are compiled for: a logit that is scaled
    and subtracted from in one instruction in one of them costs a confident row's gradient 2e-6
    (H200), and no output may depend on what else is asked for.
    """
    return dict(enable_fp_fusion=x.dtype != torch.float32)


# ---- the operations ----


def normalisers(target, weight, V, ignore_index, mean, num_items=None):
    """Return (n₀, n₁, W, n) in fp32, without waiting for the device.

    ``num_items`` (0-d), if given, is both n₀ and n₁.
    """
    norm = torch.empty(4, dtype=torch.float32, device=target.device)
    block = min(max(next_power_of_2(target.numel()), 1024), 8192)
    normalisers_kernel[(1,)](
        target,
        weight,
        num_items,
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
    *,
    z_loss=None,
    target_prob=None,
    entropy=None,
    mean_logit=None,
    predicted=None,
    log_sum_sq_probs=None,
    token_scaling=False,
    group=None,
    bias=None,
):
    """Fill the outputs of each token, for its logits in a row of x (T, V).

    Args:
        x: the logits, or a pair of the logits of the first classes and of the others, of the same
            strides.
        target: (T,) class indices. weight: (V,) class weights or None. norm: `normalisers`.
        options: `TokenOptions`.
        loss, stats: (T,) and (T, 2), to be filled: the loss, and lse in its two parts.
        z_loss, target_prob, entropy, mean_logit, predicted, log_sum_sq_probs: (T,) each, to be
            filled, or None.
        token_scaling: multiply each loss by the probability of its target.
        group: the process group whose ranks each have a shard of the classes in x and bias. One
            small tensor is gathered. A token's loss, and its gradient, are NaN if its target is
            another one on another rank.
        bias: (V,), of any dtype, is added to x.
    """
    outputs = TokenBuffers(
        loss, stats, z_loss, target_prob, entropy, mean_logit, predicted, log_sum_sq_probs
    )
    bias = round_bias(x[0] if isinstance(x, tuple) else x, bias)
    shard = split_vocab(x)[3]
    world_size, rank = size_and_rank(group)
    place = world_size * shard, rank * shard
    partials = _reduce_strips(x, target, weight, options, outputs, bias, rank * shard)
    fusion = _fusion_option(x[0] if isinstance(x, tuple) else x)
    arguments = target, weight, norm, options, outputs, token_scaling, fusion
    if world_size == 1:
        _merge(partials, (1, 0), place, *arguments, x=x, bias=bias)
        return
    T = len(target)
    merged = torch.empty((NUM_PARTIALS + 1, T), dtype=torch.float32, device=target.device)
    _merge(partials, (1, 0), place, *arguments, x=x, bias=bias, merged=merged)
    merged[NUM_PARTIALS] = target
    merged = all_gather(merged, group)
    _merge(merged, (0, 1), place, *arguments)
    other_target = (merged[:, NUM_PARTIALS] != merged[0, NUM_PARTIALS]).any(0)
    loss.masked_fill_(other_target, torch.nan)
    stats.masked_fill_(other_target[:, None], torch.nan)  # the gradient is made from these


def tile_loss(
    tiles,
    target,
    weight,
    norm,
    options,
    loss,
    stats,
    *,
    token_scaling=False,
    group=None,
    bias=None,
    **outputs,
):
    """Do what `token_loss` does, for logits that are there a tile of the classes at a time.

    ``tiles``: `class_tiles.LogitTiles`. A group has none. ``outputs``: those of `token_loss`.
    """
    outputs = TokenBuffers(loss, stats, **outputs)
    fusion = _fusion_option(tiles.logits)
    arguments = target, weight, norm, options, outputs, token_scaling, fusion
    T = len(target)
    num_classes = len(tiles.w)
    size = len(tiles), NUM_PARTIALS, T
    merged = torch.empty(size, dtype=torch.float32, device=target.device)
    for k, (classes, _, x) in enumerate(tiles):
        x = x[:, :T].t()
        tile_bias = None if bias is None else round_bias(x, bias[classes])
        partials = _reduce_strips(x, target, weight, options, outputs, tile_bias, classes.start)
        place = num_classes, classes.start
        _merge(partials, (1, 0), place, *arguments, x=x, bias=tile_bias, merged=merged[k])
    _merge(merged, (0, 1), (num_classes, 0), *arguments)


class TokenBuffers(NamedTuple):
    """The outputs of `token_loss`, to be filled; None where not asked for."""

    loss: torch.Tensor
    stats: torch.Tensor
    z_loss: torch.Tensor | None = None
    target_prob: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    mean_logit: torch.Tensor | None = None
    predicted: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None

    def kernel_constants(self, options):
        """Return the constants that `partials_kernel` and `merge_kernel` take."""
        return options.kernel_constants | dict(
            ENTROPY=self.entropy is not None,
            MEAN=self.mean_logit is not None,
            BEST=self.predicted is not None,
            SQUARES=self.log_sum_sq_probs is not None,
        )


def _reduce_strips(x, target, weight, options, outputs, bias, first):
    """Return the partial results of each strip of classes, (slots, strips, T).

    ``first``: the first class of x.
    """
    x, more, split, V = split_vocab(x)
    T = x.shape[0]
    constants = outputs.kernel_constants(options)
    tokens, lanes, per_lane, warps = _launch(x, *_layout(x), _is_plain(x, *constants.values()))
    contiguous_classes = x.stride(1) == 1
    strip = x.shape[1] if contiguous_classes else STRIP
    strips = num_vocab_blocks(split, V, strip)
    slots = _num_stored_partials(constants)
    partials = torch.empty((slots, strips, T), dtype=torch.float32, device=x.device)
    partials_kernel[(cdiv(T, tokens), strips)](
        x,
        more,
        split,
        bias,
        target,
        weight,
        partials,
        *x.stride(),
        T,
        V,
        strip,
        first,
        options.ignore_index,
        options.softcap or 1.0,
        options.logit_scale,
        **constants,
        BLOCK_T=tokens,
        LANES=lanes,
        PER_LANE=per_lane,
        CONTIGUOUS_CLASSES=contiguous_classes,
        num_warps=devices.limit_warps(warps, x),
        **_fusion_option(x),
    )
    return partials


def _merge(
    partials,
    axes,
    place,
    target,
    weight,
    norm,
    options,
    outputs,
    token_scaling,
    fusion,
    x=None,
    bias=None,
    merged=None,
):
    """Combine partial results into those of all their classes, or into the outputs.

    Args:
        partials: with three axes, the last of which is the tokens.
        axes: that of the parts and that of the slots.
        place: the number of classes of all parts, and the first class of x.
        fusion: `_fusion_option` of the logits.
        x: the logits, among which the target's may be. None: it is in a slot.
        merged: (NUM_PARTIALS, T), to be filled in place of the outputs.
    """
    more, split, classes = None, 0, 0
    strides = 0, 0
    if x is not None:
        x, more, split, classes = split_vocab(x)
        strides = x.stride()
    T = len(target)
    n = partials.shape[axes[0]]
    rows = max(16, min(64, 2048 // next_power_of_2(n)))
    merge_kernel[(cdiv(T, rows),)](
        partials,
        x,
        more,
        split,
        bias,
        target,
        weight,
        norm,
        merged,
        *outputs,
        *[partials.stride(axis) for axis in axes],
        *strides,
        n,
        T,
        *place,
        classes,
        *options.kernel_scalars,
        **outputs.kernel_constants(options),
        TOKEN_SCALING=token_scaling,
        BLOCK_N=next_power_of_2(n),
        BLOCK_T=rows,
        num_warps=4,
        **fusion,
    )


def _num_stored_partials(constants):
    """Return how many of `NUM_PARTIALS` the kernel stores: up to the last one that is needed."""
    if constants["SQUARES"]:
        return 7
    if constants["BEST"]:
        return 6
    if constants["MEAN"]:
        return 5
    if constants["SMOOTH"]:
        return 4
    return 3 if constants["ENTROPY"] else 2


def token_gradient(
    g,
    x,
    target,
    weight,
    norm,
    stats,
    dx,
    options,
    *,
    g_entropy=None,
    g_lse=None,
    entropy=None,
    group=None,
    bias=None,
    place=None,
):
    """Fill dx (T, V), the gradient of the logits x.

    Args:
        g: incoming gradients of the losses, 0-d or (T,) of any stride; None: 1.
        x, target, weight, norm, options, group, bias: as in `token_loss`.
        stats: (T, 2), as `token_loss` has filled it.
        dx: may be x, and must be if x is in two parts.
        g_entropy, g_lse: incoming gradients of the entropies and of lse, (T,) or None.
        entropy: (T,), needed with g_entropy.
        place: of logits of some classes, the number of all classes and the first of these.
    """
    x, more, split, shard = split_vocab(x)
    dx = split_vocab(dx)[0]
    if place is None:
        world_size, rank = size_and_rank(group)
        place = world_size * shard, rank * shard
    T = x.shape[0]
    constants = options.kernel_constants
    tokens, block, blocks, warps = _gradient_launch(x, *_layout(x))
    strip = block * blocks
    loaded_bytes = tokens * block * x.element_size()
    stages = devices.choose_num_stages(loaded_bytes, x, 4) if blocks > 1 else 1
    while num_vocab_blocks(split, shard, strip) > MAX_GRID_Y:
        strip *= 2
    gradient_kernel[(cdiv(T, tokens), num_vocab_blocks(split, shard, strip))](
        g,
        g_entropy,
        g_lse,
        x,
        more,
        split,
        round_bias(x, bias),
        target,
        weight,
        norm,
        stats,
        entropy,
        dx,
        g.stride(0) if g is not None and g.dim() else 0,
        *x.stride(),
        *dx.stride(),
        strip,
        T,
        *place,
        shard,
        *options.kernel_scalars,
        **constants,
        BLOCK_T=tokens,
        BLOCK_V=block,
        STAGES=stages,
        num_warps=devices.limit_warps(warps, x),
        **_fusion_option(x),
    )
