r"""A linear head on Hopper that reads no logits: each tile of the product is used while it is in
registers.

    X = h·Wᵀ,   z = logit_scale·(X + b),   lse = log Σ_v exp z_v,   p = exp(z - lse)

Forward stores of each 256 classes of a token the maximum, Σ exp and what entropy needs, instead of
X. `logits._merge` makes the outputs of these, as it does where it reads them from X. Backward
writes

    dx = logit_scale·(a·(p - 1[v=y]) + b·p - e·p·(log p + entropy)) = p·(c + f·log₂ p) - a·1[v=y]

with a, b, e the incoming gradients of loss, lse and entropy. The kernels (`hopper_kernels`) write
it without the last
term, from lse in one number: an error of 2e-6 for |lse| = 30, and bf16 has 4e-3. The elements of the targets are
written afterwards from lse in two parts, as `logits` does: a confident row keeps its digits.

The logits are rounded to bf16 as by a product of its own. But sums over channels have another order
than cuBLAS's, so a logit may be rounded the other way now and then. Hence backward takes these
kernels only where forward did not need logits: with lse of one rounding and p of the other, the
gradient of a confident row would be off by that rounding.

H200, 2026-11-24, torch 2.11, Triton 3.6, forward + backward with `logits` and so: 8192·4096·128256
50.9 -> 49.0 ms (the product by cuBLAS 11.75), 8192·2304·256000 58.0 -> 56.6, 4096·2048·128256 11.6
-> 11.0. With a bias: no difference."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import TRITON, cdiv, exp, next_power_of_2, tl, triton
from liger_kernel.ops.head.logits import _like, _logits, _merge, times

VARIABLE = "LIGER_KERNEL_HOPPER"  # 0: these kernels are not taken. Read once
TRIED = (
    ("3", "6"),
)  # versions of Triton. Gluon is experimental: in 3.9 it compiles, but it has not run
LEAST = (
    1024,
    8192,
)  # tokens and classes: tiles for each multiprocessor, and time that is worth the launches
MOST = 2**19  # classes, whose strips one program of `_merge` can take
CLASSES = 256  # of a tile
LOWEST = 2.0**-100  # logit_scale: as an fp32 number it must not become 0, times which -inf is NaN
ROOM = (
    32  # times as many tokens as of logits: three numbers of 256 classes are a 43rd of their logits
)
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453


class Product(NamedTuple):
    """Logits h·Wᵀ that are not there: (T, H) and (V, H)."""

    h: torch.Tensor
    w: torch.Tensor


@functools.cache
def kernels():
    """The module of the Gluon kernels, or None where they can't be compiled or aren't wanted. It is
    imported here."""
    if os.environ.get(VARIABLE) == "0" or not TRITON or devices.INTERPRETED:
        return None
    if tuple(triton.__version__.split(".")[:2]) not in TRIED:
        return None
    try:
        from liger_kernel.ops.head import hopper_kernels
    except (ImportError, AttributeError):  # a Triton of one's own, without Gluon
        return None
    return hopper_kernels


def _copied_by_tiles(x):
    """Whether TMA can: rows of neighbours that begin at multiples of 16 bytes. A copy in another
    dtype is as good."""
    return (
        x.stride(1) == 1
        and x.stride(0) >= x.shape[1]
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
    )


def applies(h, w, dtype, numbers, ce_weight, group) -> bool:
    """Whether forward and backward of this head take these kernels. Each of them asks, with the
    same arguments.

    It would be wrong if another architecture called itself sm_90, if a version in `TRIED` had
    another Gluon, or if a chunk's hidden states or logits could lie at other than multiples of 16
    bytes while h and w do not: Triton would refuse to compile, or to make a descriptor, and raise.
    """
    lse_square_scale, label_smoothing, softcap, logit_scale = numbers
    return (
        devices.arch(h) == "sm_90"
        and dtype == torch.bfloat16
        and not (lse_square_scale or label_smoothing or softcap)
        and logit_scale > LOWEST
        and ce_weight is None
        and group is None
        and h.shape[0] >= LEAST[0]
        and LEAST[1] <= w.shape[0] <= MOST
        and h.shape[1] > 0
        and h.shape[1] % 64 == 0
        and _copied_by_tiles(h)
        and _copied_by_tiles(w)
        and kernels() is not None
    )


def _tokens(h, w, dtype, rows):
    """As many at a time as take the memory of ``rows`` with their logits: `ROOM`, less if h is
    copied to ``dtype``.

    Their strips are counted in int32, up to twice a slot: see `_merge`.
    """
    (H, V), tokens = (h.shape[1], w.shape[0]), ROOM * rows
    if h.dtype != dtype:
        tokens = tokens * (V + H) // (V + ROOM * H)
    return min(tokens, 2**29 // cdiv(V, CLASSES))


def run(h, w, dtype, rows, read):
    """``read(i, x)`` of all tokens, in the memory of so many with logits: i a slice of them, x a
    `Product`."""
    w, tokens = w.to(dtype), _tokens(h, w, dtype, rows)
    for start in range(0, len(h), tokens):
        i = slice(start, start + tokens)
        read(i, Product(h[i].to(dtype), w))


def token_loss(x, target, norm, options, loss, stats, z_loss=None, entropy=None, bias=None):
    """`logits.token_loss` of a `Product` x, in a case that `applies`."""
    (h, w), bias, numbers = x, _like(x.w, bias), options.numbers
    T, V = len(h), len(w)
    N = cdiv(V, CLASSES)
    part = torch.empty((2 if entropy is None else 3, N, T), dtype=torch.float32, device=h.device)
    zy = torch.empty_like(loss)
    kernels().partials(h, w, bias, target, part, zy, options.logit_scale)
    block = next_power_of_2(N)
    # zy stands for the logits, each token's all classes
    _merge[(cdiv(T, 16),)](
        part,
        zy,
        None,
        0,
        None,
        target,
        None,
        norm,
        None,
        loss,
        stats,
        z_loss,
        None,
        entropy,
        None,
        None,
        T,
        N * T,
        1,
        0,
        N,
        T,
        V,
        0,
        V,
        *numbers,
        **options.kind,
        ENTROPY=entropy is not None,
        MEAN=False,
        BEST=False,
        TOKEN_SCALING=False,
        BLOCK_N=block,
        BLOCK_T=16,
        num_warps=min(max(block // 64, 4), 16),
    )


@kernel
def _of_targets(
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
    """The gradient's element of each token's target, in one of the two parts of the classes."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(target_ptr + t, mask=t < T, other=ignore_index).to(tl.int64)  # times a stride
    here = (y != ignore_index) & (y >= 0) & (y < V)
    z = _logits(tl.load(zy_ptr + t, mask=here, other=0.0), 1.0, logit_scale, SCALED, False)
    top = tl.load(stats_ptr + 2 * t, mask=here, other=0.0)
    log_p = (z - top) - tl.load(stats_ptr + 2 * t + 1, mask=here, other=0.0)
    p = exp(log_p)
    a = tl.load(g_ptr + t, mask=here, other=0.0)
    d = a * (p - 1.0) + p * (tl.load(rows_ptr + T + t, mask=here, other=0.0) - a)
    if ENTROPY:
        d += times(p, log_p * 1.4426950408889634) * tl.load(
            rows_ptr + 2 * T + t, mask=here, other=0.0
        )
    d = d.to(dx_ptr.dtype.element_ty)
    first = here
    if more_ptr is not None:
        first = here & (y < split)
        tl.store(more_ptr + (y - split) * stride_v + t, d, mask=here & (y >= split))
    tl.store(dx_ptr + y * stride_v + t, d, mask=first)


def token_gradient(
    g, x, target, norm, stats, parts, options, g_entropy=None, g_lse=None, entropy=None, bias=None
):
    """`logits.token_gradient` of a `Product` x, to one or two parts (classes, tokens), in a case
    that `applies`.

    x and the parts may have more tokens than there are targets, a multiple of 8 in all: their
    gradient is 0."""
    (h, w), bias = x, _like(x.w, bias)
    T, V, scale = len(target), len(w), options.logit_scale
    a = (g.float() * scale / norm[0]).expand(T).contiguous()
    of_p = a if g_lse is None else a + g_lse * scale
    rows = [stats.sum(1) * LOG2E, of_p]
    if g_entropy is not None:
        e = g_entropy * scale
        rows = [rows[0], of_p - e * entropy, e * -LN2]
    rows = torch.stack(rows)
    rows[0].masked_fill_(target == options.ignore_index, torch.inf)
    zy, first = torch.empty_like(rows[0]), 0
    for dx in parts:
        v = slice(first, first + len(dx))
        kernels().gradient(
            h, w[v], None if bias is None else bias[v], target, rows, dx, zy, first, scale
        )
        first += len(dx)
    dx, more = (*parts, None)[:2]
    _of_targets[(cdiv(T, 128),)](
        zy,
        target,
        rows,
        a,
        stats,
        dx,
        more,
        len(dx),
        dx.stride(0),
        T,
        V,
        options.ignore_index,
        scale,
        ENTROPY=g_entropy is not None,
        SCALED=options.kind["SCALED"],
        BLOCK=128,
        num_warps=4,
    )
