"""How many tokens of a linear head go through at once: the logits that fit in the memory of dW, or in a budget."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import torch

from liger_kernel.core.tile import cdiv

ROWS = 2048  # tokens of a pass that keep the matrix units busy
LEAST = 256  # tokens of a pass, whatever the budget
TILE = 128, 256  # of the products that make dW
FREE = 2**29  # bytes that aren't worth a second pass
VARIABLE = "LIGER_KERNEL_HEAD_MEMORY"


@dataclass(frozen=True)
class Plan:
    """How M tokens go through: ``first`` of them in one pass, then ``rows`` at a time."""

    first: int
    rows: int
    strip: int  # classes of dW that are made at once
    wave: int  # classes of a second pass, added by way of fp32: cuBLAS's own addition rounds the product, too
    accum_dtype: torch.dtype  # of dW until it is finished
    grad_dtype: torch.dtype  # of the finished one
    separate_logits: bool = False  # whether later passes have a buffer of their own, reused for the finished dW

    def passes(self, M) -> list[slice]:
        starts = [0, *range(self.first or self.rows, M, self.rows or M)] if M else []
        return [slice(*bounds) for bounds in zip(starts, [*starts[1:], M], strict=False)]


def budget(memory) -> int:
    """Bytes, or -1 for "auto", which the environment may replace."""
    name, given = "memory", memory
    if memory == "auto":
        name, given = VARIABLE, os.environ.get(VARIABLE, "auto")
        if given == "auto":
            return -1
        with contextlib.suppress(ValueError, OverflowError):
            memory = int(float(given))
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 0:
        raise ValueError(f"{name} is {given!r}, give a number of bytes or 'auto'")
    return memory


def aligned(n):
    """The strides that matmuls like."""
    return cdiv(n, 64) * 64


def waves(classes, H, processors, waves=1):
    """About so many classes of dW, such that their tiles of 128 × 256 fill the processors so many times or more."""
    across = cdiv(H, TILE[1])
    waves = max(int(classes * across / (TILE[0] * processors)), waves)
    while waves * processors % across > waves * processors // 20:  # idle in the last wave
        waves += 1
    return waves * processors // across * TILE[0]


def _strip(tokens, H, V, row, processors):
    """Classes of dW made at once: 200 µs of work for a large GPU, and 24 MB of room ahead of bf16 logits.

    H200, 2026-11-20, in waves of 132 tiles: 2048·4096·128256 in strips of 2048, 4096, 8192: 8.69, 8.51, 8.36 ms;
    4096·2048·128256: 9.12, 8.92, 8.88; 8192·2304·256000: 46.3, 45.7, 45.9; 8192·4096·128256: no difference.
    """
    tokens = max(tokens, 1)
    return min(waves(min(7e10 / (H * tokens), 12e6 / min(row, tokens)), H, processors), V)


def plan(M, H, V, dtype, weight_dtype, accum_dtype=None, memory=-1, need_w=True, processors=132, unit=64) -> Plan:
    """The passes of M tokens within ``memory`` bytes beyond the gradients dh and dW (-1: "auto").

    dW in the weight's dtype holds the logits of H tokens (2·H for one of fp32 where the logits have 16 bits), and each
    byte beyond it more of them. One pass rounds dW once, as PyTorch does; a second one reads it, adds and rounds again.
    For more than two dW is accumulated in fp32, unless the budget has no room for it. fp16 can't hold what is not yet
    divided by the number of tokens: always fp32.

    "auto" is one pass if it needs no more than `FREE` bytes, two for up to five times the tokens that dW holds (not for
    16-bit weights whose dW is in fp32 in any case), and passes of 4,096 for more. (Three passes, each rounding dW, take
    less memory for four times as many: 1.33x PyTorch's error, H200, 2026-11-21.) A budget is kept down to passes of
    `LEAST` tokens. A pass has a multiple of ``unit`` tokens, which stay together, whatever the budget.
    """
    token, fewest = V * dtype.itemsize, max(LEAST, unit)
    if not need_w:
        rows = max((ROWS if memory < 0 else memory // token) // unit * unit, fewest)
        return Plan(0, rows, 0, 0, weight_dtype, weight_dtype)
    fixed = torch.float32 if dtype == torch.float16 else accum_dtype
    finished = fixed or weight_dtype

    def held(accum):
        return cdiv(H * accum.itemsize, dtype.itemsize)

    def freed(accum):
        """Tokens whose logits may lie where the finished dW will, which is not the one that is added up."""
        beside = accum.itemsize > weight_dtype.itemsize and unit <= max(held(accum), 64)
        return held(weight_dtype) if beside else 0

    def ahead(accum):
        """Tokens whose logits would fit where dW's strips run ahead of the logits."""
        row = held(accum)
        return cdiv(_strip(min(M, row), H, V, row, processors) * row, V)

    def passes(accum, beyond):
        """With the memory of so many tokens' logits beyond dW; None: of as many as two passes need."""
        row, spare = held(accum), ahead(accum)
        strip = _strip(min(M, row), H, V, row, processors)
        wave = min(waves(0, H, processors, 2), V) if accum.itemsize == dtype.itemsize == 2 else 0
        sums = cdiv(wave * H * 4, token)
        if beyond is None:
            beyond = cdiv(M - row + spare + sums, 2) + unit

        def whole(tokens):
            return min(M, tokens if unit == 64 else max(tokens // unit * unit, unit))

        first = whole(row + max(beyond - spare, 0) // unit * unit)
        if not freed(accum) and M - first <= max(beyond - sums, 0) // unit * unit:
            return Plan(first, M - first, strip, wave if M > first else 0, accum, finished)
        beside = first < M and freed(accum) > 0
        if beside:
            first, beyond = whole(row), beyond + freed(accum) - spare
        count = cdiv(M - first, max(beyond // unit * unit, fewest))
        rows = cdiv(M - first, unit * count) * unit if count else 0
        return Plan(first, rows, strip, 0, accum, finished, beside and first <= row)

    narrow, wide = fixed or weight_dtype, fixed or torch.promote_types(weight_dtype, torch.float32)
    if memory < 0:
        beyond = M - held(narrow)
        if beyond * token <= FREE:
            return Plan(M, 0, _strip(max(M, 1), H, V, held(narrow), processors), 0, narrow, finished)
        if M <= 5 * held(narrow) and not freed(narrow):
            return passes(narrow, None)
        return passes(wide, max(max(2 * ROWS, unit) - freed(wide), 0) + ahead(wide))

    def within(accum):
        """Tokens whose logits fit the budget beyond dW."""
        tokens = (memory - V * H * (accum.itemsize if accum != weight_dtype else 0)) // token
        if freed(accum) or tokens <= ahead(accum):
            return tokens
        sums = cdiv(min(waves(0, H, processors), M) * H * 4, token)  # of dX, where logits lie in two parts
        return max(tokens - sums, ahead(accum))

    beyond = {accum: within(accum) for accum in (narrow, wide)}
    least = passes(narrow, beyond[narrow])
    worthwhile = ROWS // 2 if unit == 64 else max(ROWS // 2, unit)  # tokens of a pass beside a dW in fp32
    enough = M <= least.first + least.rows or beyond[wide] < max(ahead(wide), worthwhile - freed(wide))
    return least if enough else passes(wide, beyond[wide])
