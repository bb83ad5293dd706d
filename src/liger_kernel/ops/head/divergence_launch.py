"""Launches of `divergence_kernels`: the divergence of two models' logits, and its gradient."""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.tile import cdiv, next_power_of_2, split_vocab
from liger_kernel.ops.head.divergence_kernels import (
    NUM_STATISTICS,
    compare_kernel,
    merge_statistics_kernel,
    statistics_kernel,
)
from liger_kernel.ops.head.divergence_strips import STRIP_ALIGNMENT, STRIP_SIZE, num_strips
from liger_kernel.ops.head.divergence_terms import DIVERGENCE_TERMS

# classes of a lane in an iteration
PER_LANE_STATISTICS = 4
PER_LANE_SUMS = 1
PER_LANE_GRADIENT = 2


def _launch(x, split, V, W, per_lane, contiguous_y):
    """Choose the tokens of a program that reads both logits, and its launch.

    A warp has 256 neighbouring logits, so that warps exchange nothing before the end.

    Instructions of an element in the compiled loop, bf16 on sm_90, Triton 3.6, with 1, 2 and 4
    classes of a lane in an iteration: `statistics_kernel` of two heads 30, 23, 19; `compare_kernel`
    of jsd 41, 40, 39, with the gradient 41, 40, 38. Of kl_div with p along classes, FULL or not: 29
    and 34, with the gradient 18 and 23.
    """
    T = x.shape[0]
    tokens = min(next_power_of_2(T), 64)
    per_lane = max(per_lane, 2) if contiguous_y else per_lane
    classes = max(per_lane * 1024 // tokens, STRIP_ALIGNMENT.value)
    return tokens, dict(
        BLOCK_T=tokens,
        BLOCK_V=1024 // tokens,
        PER_LANE=per_lane,
        FULL=contiguous_y
        and T % tokens == 0
        and V == W
        and all(n % classes == 0 for n in (split, W, STRIP_SIZE)),
        num_warps=devices.limit_warps(4, x),
    )


def _in_128_registers(launch, x, y):
    """Return the launch with 4 classes of a lane in 128 registers, if nothing is masked.

    For kl_div without the hard loss, 6,144 x 128,256, bf16 (H200, Triton 3.6, 2026-11-29):
    `statistics_kernel` takes 1.08 ms instead of 1.25, `compare_kernel` with the gradient, which
    spills 16 bytes, 1.48 instead of 2.05. With masks or in fp32 much more would be spilled.
    """
    is_full = launch["FULL"] and launch["BLOCK_T"] == 64
    if is_full and devices.arch(x) == "sm_90" and x.element_size() == y.element_size() == 2:
        return launch | dict(PER_LANE=4, maxnreg=128)
    return launch


def exceeds_int32_offsets(y):
    """Return True if y's strides are too large for these kernels.

    They reach all that a program reads at once by an offset of 32 bits.
    """
    return 64 * y.stride(0) + 1024 * PER_LANE_STATISTICS * y.stride(1) >= 2**31


def compute_divergence(x, y, target, norm, options, gradient, soft, hard, entropy=None):
    """Fill soft (T,) with D, and hard (T,), or None, with CE.

    Args:
        x: the student's logits (T, V), whose tokens are contiguous. They may be in two parts. With
            ``gradient`` they become the gradient of w_h·hard + w_s·soft, divided by ``norm``.
        y: the teacher's logits (T, W), or its probabilities for kl_div, (T, V). They have any
            strides but those that `exceeds_int32_offsets` finds too large.
        norm: a tensor of one element.
        options: `DistillationOptions`.
        entropy: (T,), to be filled with that of q; None: not asked for. cosine and kl_div have
            none.
    """
    x, more, split, V = split_vocab(x)
    T, W = y.shape
    strides = x.stride(1), y.stride(1), y.stride(0)
    scale = 1.0 / options.temperature
    cosine = options.divergence == "cosine"
    kl_div = options.divergence == "kl_div"
    kind = dict(COSINE=cosine, KL_DIV=kl_div)
    # CE has log-sum-exps of its own if it is at another temperature, or D has none
    hard_stats = hard is not None and (cosine or scale != 1.0)
    contiguous_y = y.stride(1) == 1 and y.stride(0) != 1
    strips = num_strips(split, W)
    partial = torch.empty((NUM_STATISTICS, strips, T), dtype=torch.float32, device=x.device)
    stats = torch.empty((NUM_STATISTICS, T), dtype=torch.float32, device=x.device)

    per_lane = 2 if contiguous_y else PER_LANE_STATISTICS
    tokens, launch = _launch(x, split, V, W, per_lane, contiguous_y)
    is_plain_kl_div = kl_div and contiguous_y and hard is None
    if is_plain_kl_div:
        launch = _in_128_registers(launch, x, y)
    statistics_kernel[(cdiv(T, tokens), strips)](
        x,
        more,
        split,
        y,
        target,
        partial,
        *strides,
        T,
        V,
        W,
        STRIP_SIZE,
        options.ignore_index,
        scale,
        options.beta,
        **kind,
        HARD_STATS=hard_stats,
        CONTIGUOUS_Y=contiguous_y,
        **launch,
    )

    tokens = max(16, min(64, 2048 // next_power_of_2(strips)))
    merge_statistics_kernel[(cdiv(T, tokens),)](
        partial,
        x,
        more,
        split,
        target,
        stats,
        soft,
        hard,
        strides[0],
        strips,
        T,
        V,
        W,
        options.ignore_index,
        scale,
        options.beta,
        **kind,
        HARD_STATS=hard_stats,
        HARD=hard is not None,
        BLOCK_N=next_power_of_2(strips),
        BLOCK_T=tokens,
        num_warps=4,
    )

    def compare(sums, gradient, classes):
        per_lane = PER_LANE_GRADIENT if gradient else PER_LANE_SUMS
        tokens, launch = _launch(x, split, V, classes, per_lane, contiguous_y)
        if is_plain_kl_div and gradient:
            launch = _in_128_registers(launch, x, y)
        compare_kernel[(cdiv(T, tokens), num_strips(split, classes))](
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
            classes,
            STRIP_SIZE,
            options.ignore_index,
            scale,
            options.beta,
            options.weight_hard,
            options.weight_soft,
            TERMS=DIVERGENCE_TERMS.get(options.divergence),
            GRADIENT=gradient,
            **kind,
            HARD=gradient and hard is not None,
            ENTROPY=entropy is not None and not gradient,
            Q_IS_SOFTMAX=not (cosine or kl_div) and scale == 1.0 and V == y.shape[1],
            CONTIGUOUS_Y=contiguous_y,
            **launch,
        )

    if cosine:
        if gradient:
            compare(None, True, V)
        return
    num_sums = 1 if kl_div else 3 if entropy is None else 4
    sums = torch.empty((num_sums, strips, T), dtype=torch.float32, device=x.device)
    compare(sums, kl_div and gradient, W)
    sums = sums.sum(1)
    soft.add_(sums[0]) if kl_div else soft.copy_(sums[0])
    if entropy is not None:
        torch.neg(sums[3], out=entropy)
    if gradient and not kl_div:
        # Σq is 1 but for rounding; divided by it, the gradient's sum is 0
        compare(sums[1] / sums[2], True, V)
