r"""A linear head on Hopper that reads no logits: a tile of the product is used in registers.

    X = h·Wᵀ,   z = logit_scale·(X + b),   lse = log Σ_v exp z_v,   p = exp(z - lse)

Forward stores of each 256 classes of a token the maximum, Σ exp and what entropy needs, instead of
X. `logits_kernels.merge_kernel` makes the outputs of these, as it does where it reads them from X.
Backward writes

    dx = logit_scale·(a·(p - 1[v=y]) + b·p - e·p·(log p + entropy)) = p·(c + f·log₂ p) - a·1[v=y]

with a, b, e the incoming gradients of loss, lse and entropy. The kernels (`hopper_kernels`) write
it without the last term, from lse in one number: an error of 2e-6 for |lse| = 30, and bf16 has
4e-3. The elements of the targets are written afterwards from lse in two parts, as `logits` does: a
confident row keeps its digits.

The logits are rounded to bf16 as by a product of its own. But sums over channels have another order
than cuBLAS's, so a logit may be rounded the other way now and then. Hence backward takes these
kernels only where forward did not need logits: with lse of one rounding and p of the other, the
gradient of a confident row would be off by that rounding.

H200, 2026-11-24, torch 2.11, Triton 3.6, forward + backward with `logits` and so: 8192·4096·128256
50.9 -> 49.0 ms (the product by cuBLAS 11.75), 8192·2304·256000 58.0 -> 56.6, 4096·2048·128256 11.6
-> 11.0. With a bias: no difference.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import TRITON, cdiv, exp, next_power_of_2, tl, triton
from liger_kernel.ops.head.logits import round_bias
from liger_kernel.ops.head.logits_kernels import merge_kernel, times, transform_logits
from liger_kernel.ops.head.planning import cast_classes

HOPPER_VARIABLE = "LIGER_KERNEL_HOPPER"  # 0: these kernels are not taken. Read once
# Gluon is experimental: the versions of Triton with which these kernels passed their tests on a GPU
TRITON_VERSIONS = (("3", "6"), ("3", "7"), ("3", "9"))
# tokens and classes: tiles for each multiprocessor, and time that is worth the launches
MIN_SIZES = (1024, 8192)
MAX_CLASSES = 2**19  # their strips are what one program of `merge_kernel` can take
TILE_CLASSES = 256
# logit_scale must not become 0 as an fp32 number, times which -inf is NaN
MIN_LOGIT_SCALE = 2.0**-100
# times as many tokens as of logits: three numbers of 256 classes are a 43rd of their logits
TOKENS_PER_ROW = 32
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


class Product(NamedTuple):
    """Hidden states (T, H) and weight (V, H), in place of logits h·Wᵀ that are not stored."""

    h: torch.Tensor
    w: torch.Tensor


# ---- when these kernels are taken ----


def compiles_gluon() -> bool:
    """Return True if Triton compiles kernels in Gluon, and the environment does not forbid them."""
    if os.environ.get(HOPPER_VARIABLE) == "0" or not TRITON or devices.INTERPRETED:
        return False
    return tuple(triton.__version__.split(".")[:2]) in TRITON_VERSIONS


def gluon_kernels(import_kernels):
    """Decorate a function that imports Gluon kernels and returns their module.

    It returns None where they can't be compiled or the environment turns them off.
    """

    @functools.cache
    @functools.wraps(import_kernels)
    def kernels():
        if not compiles_gluon():
            return None
        try:
            return import_kernels()
        except (ImportError, AttributeError):  # a build of Triton without Gluon
            return None

    return kernels


@gluon_kernels
def kernels():
    from liger_kernel.ops.head import hopper_kernels

    return hopper_kernels


def _is_readable_by_tma(x):
    """Return True if rows are contiguous and begin at multiples of 16 bytes.

    A copy in another dtype will be, if x is.
    """
    return (
        x.stride(1) == 1
        and x.stride(0) >= x.shape[1]
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
    )


def applies(hidden, weight, class_weight, options) -> bool:
    """Return True if forward and backward of this head take these kernels.

    Each of them asks, with the same arguments. ``options`` are `linear_head.HeadOptions`.

    The answer would be wrong if another architecture called itself sm_90, if one of
    `TRITON_VERSIONS` had another Gluon, or if a chunk's hidden states or logits could lie at other
    than multiples of 16 bytes while hidden and weight do not. Then Triton would refuse to compile,
    or to make a descriptor, and raise.
    """
    token = options.token
    min_tokens, min_classes = MIN_SIZES
    V, H = weight.shape
    return (
        devices.arch(hidden) == "sm_90"
        and options.dtype == torch.bfloat16
        # the whole weight is there in bf16
        and cast_classes(H, V, options.dtype, weight.dtype, options.memory) is None
        and not (token.lse_square_scale or token.label_smoothing or token.softcap)
        and token.logit_scale > MIN_LOGIT_SCALE
        and class_weight is None
        and options.group is None
        and hidden.shape[0] >= min_tokens
        and min_classes <= V <= MAX_CLASSES
        and H > 0
        and H % 64 == 0
        and _is_readable_by_tma(hidden)
        and _is_readable_by_tma(weight)
        and kernels() is not None
    )


# ---- forward and the gradient of the logits ----


def _tokens_at_a_time(h, w, dtype, rows):
    """Return how many tokens take the memory that ``rows`` tokens take with their logits.

    They are `TOKENS_PER_ROW` times as many, or less if h is copied to ``dtype``. Their strips are
    counted in int32, up to twice a slot: see `merge_kernel`.
    """
    H = h.shape[1]
    V = w.shape[0]
    tokens = TOKENS_PER_ROW * rows
    if h.dtype != dtype:
        tokens = tokens * (V + H) // (V + TOKENS_PER_ROW * H)
    return min(tokens, 2**29 // cdiv(V, TILE_CLASSES))


def run_products(h, w, dtype, rows, read_logits):
    """Call ``read_logits(tokens, product)`` for all tokens, a slice of them at a time.

    It takes the memory of the logits of ``rows`` tokens. ``product`` is a `Product`.
    """
    w = w.to(dtype)
    num_tokens = _tokens_at_a_time(h, w, dtype, rows)
    for start in range(0, len(h), num_tokens):
        tokens = slice(start, start + num_tokens)
        read_logits(tokens, Product(h[tokens].to(dtype), w))


def token_loss(x, target, norm, options, loss, stats, *, z_loss=None, entropy=None, bias=None):
    """Do what `logits.token_loss` does, for a `Product` x, in a case that `applies`."""
    h, w = x
    bias = round_bias(w, bias)
    T = len(h)
    V = len(w)
    N = cdiv(V, TILE_CLASSES)
    slots = 2 if entropy is None else 3
    partials = torch.empty((slots, N, T), dtype=torch.float32, device=h.device)
    zy = torch.empty_like(loss)  # the targets' logits
    kernels().partials(h, w, bias, target, partials, zy, options.logit_scale)
    block = next_power_of_2(N)
    # zy is passed as the logits: whatever the class, a token's logit is the same element
    merge_kernel[(cdiv(T, 16),)](
        partials,
        zy,
        None,  # more_ptr
        0,  # split
        None,  # bias_ptr
        target,
        None,  # weight_ptr
        norm,
        None,  # merged_ptr
        loss,
        stats,
        z_loss,
        None,  # target_prob_ptr
        entropy,
        None,  # mean_logit_ptr
        None,  # predicted_ptr
        None,  # log_sum_sq_probs_ptr
        T,  # stride_n
        N * T,  # stride_slot
        1,  # stride_t
        0,  # stride_v
        N,
        T,
        V,
        0,  # first
        V,  # shard
        *options.kernel_scalars,
        **options.kernel_constants,
        ENTROPY=entropy is not None,
        MEAN=False,
        BEST=False,
        SQUARES=False,
        TOKEN_SCALING=False,
        BLOCK_N=block,
        BLOCK_T=16,
        num_warps=min(max(block // 64, 4), 16),
    )


def token_gradient(
    g,
    x,
    target,
    norm,
    stats,
    parts,
    options,
    *,
    g_entropy=None,
    g_lse=None,
    entropy=None,
    bias=None,
):
    """Do what `logits.token_gradient` does, for a `Product` x, in a case that `applies`.

    The gradient goes to one or two parts (classes, tokens). x and the parts may have more tokens
    than there are targets, a multiple of 8 in all: their gradient is 0.
    """
    h, w = x
    bias = round_bias(w, bias)
    T = len(target)
    V = len(w)
    scale = options.logit_scale
    # dx = p·(factor + log_factor·log₂ p) but for the elements of the targets
    a = (g.float() * scale / norm[0]).expand(T).contiguous()
    factor = a if g_lse is None else a + g_lse * scale
    rows = [stats.sum(1) * LOG2E, factor]
    if g_entropy is not None:
        e = g_entropy * scale
        rows = [rows[0], factor - e * entropy, e * -LN2]
    rows = torch.stack(rows)
    rows[0].masked_fill_(target == options.ignore_index, torch.inf)
    zy = torch.empty_like(rows[0])
    first = 0
    for dx in parts:
        classes = slice(first, first + len(dx))
        part_bias = None if bias is None else bias[classes]
        kernels().gradient(h, w[classes], part_bias, target, rows, dx, zy, first, scale)
        first += len(dx)
    dx = parts[0]
    target_gradient_kernel[(cdiv(T, 128),)](
        zy,
        target,
        rows,
        a,
        stats,
        dx,
        parts[1] if len(parts) > 1 else None,
        len(dx),
        dx.stride(0),
        T,
        V,
        options.ignore_index,
        scale,
        ENTROPY=g_entropy is not None,
        SCALED=options.kernel_constants["SCALED"],
        BLOCK=128,
        num_warps=4,
    )


@kernel
def target_gradient_kernel(
    zy_ptr,
    target_ptr,
    rows_ptr,
    g_ptr,
    stats_ptr,
    dx_ptr,
    more_ptr,
    split,
    stride_v,
    T,
    V,
    ignore_index,
    logit_scale,
    ENTROPY: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient's element of each token's target, in one of two parts of the classes."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(target_ptr + t, mask=t < T, other=ignore_index).to(tl.int64)  # times a stride
    in_vocab = (y != ignore_index) & (y >= 0) & (y < V)
    x = tl.load(zy_ptr + t, mask=in_vocab, other=0.0)
    z = transform_logits(x, 1.0, logit_scale, SCALED, False)
    top = tl.load(stats_ptr + 2 * t, mask=in_vocab, other=0.0)
    log_p = (z - top) - tl.load(stats_ptr + 2 * t + 1, mask=in_vocab, other=0.0)
    p = exp(log_p)
    a = tl.load(g_ptr + t, mask=in_vocab, other=0.0)
    factor = tl.load(rows_ptr + T + t, mask=in_vocab, other=0.0)
    d = a * (p - 1.0) + p * (factor - a)
    if ENTROPY:
        log_factor = tl.load(rows_ptr + 2 * T + t, mask=in_vocab, other=0.0)
        d += times(p, log_p * 1.4426950408889634) * log_factor
    d = d.to(dx_ptr.dtype.element_ty)
    in_first = in_vocab
    if more_ptr is not None:
        in_first = in_vocab & (y < split)
        tl.store(more_ptr + (y - split) * stride_v + t, d, mask=in_vocab & (y >= split))
    tl.store(dx_ptr + y * stride_v + t, d, mask=in_first)
