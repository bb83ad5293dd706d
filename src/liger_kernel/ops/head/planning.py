"""How many tokens of a linear head are computed at once: see `Plan` and `STRATEGIES`."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass

import torch

from liger_kernel.core.tile import cdiv

ROWS = 2048  # tokens of a chunk that keep the matrix units busy
LEAST = 256  # tokens of a chunk, whatever the budget
TILE = 128, 256  # of the matmuls that make dW
FREE = 2**29  # bytes that aren't worth a second chunk
VARIABLE = "LIGER_KERNEL_HEAD_MEMORY"


@dataclass(frozen=True)
class Plan:
    """How M tokens go through the head: ``first`` of them in one chunk, then ``rows`` at a time.

    Three words that planning needs:

    * A *unit* is the tokens that must be in the same chunk, for example those of a pair of
      sequences. Each chunk is a multiple of it. 64 stands for tokens that are independent of each
      other.
    * A *strip* is some classes of dW, made by one matmul. dW lies in the same memory as the logits
      of the first chunk: each strip overwrites logits that are no longer needed. So there must be
      room for one strip ahead of the logits.
    * A *wave* is as many classes of dW as keep all multiprocessors of the GPU equally busy. If dW
      has 16 bits, a second chunk's share of it is computed a wave at a time in fp32 and then added.
      cuBLAS's own addition would round it first.
    """

    first: int
    rows: int
    strip: int
    wave: int  # 0: dW is added by the matmul itself
    accum_dtype: torch.dtype  # of dW until it is finished
    grad_dtype: torch.dtype  # of the finished one
    separate_logits: bool = (
        False  # whether later chunks have a buffer of their own, reused for the finished dW
    )

    def chunks(self, M) -> list[slice]:
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


def aligned(n, to=64):
    """n rounded up, to a stride or a number of rows that matmuls like."""
    return cdiv(n, to) * to


def waves(classes, H, processors, waves=1):
    """About so many classes of dW, such that their tiles of 128 × 256 fill the processors so many
    times or more."""
    across = max(cdiv(H, TILE[1]), 1)
    waves = max(int(classes * across / (TILE[0] * processors)), waves)
    while waves * processors % across > waves * processors // 20:  # idle in the last wave
        waves += 1
    return waves * processors // across * TILE[0]


def grad_dtype(dtype, weight_dtype, accum_dtype):
    """The finished dW's, for logits in ``dtype``. fp16 can't hold what is not yet divided by the
    number of tokens."""
    return (torch.float32 if dtype == torch.float16 else accum_dtype) or weight_dtype


class _Head:
    """The sizes of a head whose dW is added up in ``accum``. Room is counted in tokens, by what
    their logits take."""

    def __init__(self, M, H, V, dtype, weight_dtype, finished, accum, processors, unit, few):
        self.M, self.H, self.V, self.processors, self.unit, self.few = (
            M,
            H,
            V,
            processors,
            unit,
            few,
        )
        self.dtypes, self.copied = (accum, finished), accum != weight_dtype
        self.token = max(V * dtype.itemsize, 1)  # bytes of one token's logits
        self.held = cdiv(H * accum.itemsize, dtype.itemsize)  # tokens whose logits fill dW
        self.strip = self.strip_for(min(M, self.held))
        self.ahead = cdiv(
            self.strip * self.held, max(V, 1)
        )  # room for one strip, which dW is ahead of the logits
        in_16_bits = accum.itemsize == dtype.itemsize == 2
        self.wave = min(waves(0, H, processors, 2), V) if in_16_bits else 0
        self.sums = cdiv(self.wave * H * 4, self.token)  # room for a wave in fp32
        separate = accum.itemsize > weight_dtype.itemsize and unit <= max(self.held, 64)
        self.freed = (
            cdiv(H * weight_dtype.itemsize, dtype.itemsize) if separate else 0
        )  # room in a dW of its own dtype

    def strip_for(self, tokens):
        """200 µs of work for a large GPU, and 24 MB of room ahead of bf16 logits.

        H200, 2026-11-20, in waves of 132 tiles: 2048·4096·128256 in strips of 2048, 4096, 8192:
        8.69, 8.51, 8.36 ms; 4096·2048·128256: 9.12, 8.92, 8.88; 8192·2304·256000: 46.3, 45.7, 45.9;
        8192·4096·128256: no difference."""
        tokens = max(tokens, 1)
        classes = min(7e10 / (self.H * tokens), 12e6 / min(self.held, tokens))
        return min(waves(classes, self.H, self.processors), self.V)

    def units(self, tokens):
        """Whole units that fit."""
        return max(tokens, 0) // self.unit * self.unit

    def whole(self, tokens):
        """The first chunk, of about so many tokens."""
        return min(self.M, tokens if self.unit == 64 else max(self.units(tokens), self.unit))

    def room(self, memory):
        """Beyond dW, in a budget."""
        room = (memory - self.V * self.H * self.dtypes[0].itemsize * self.copied) // self.token
        if self.freed or room <= self.ahead:
            return room
        sums = cdiv(min(waves(0, self.H, self.processors), self.M) * self.H * 4, self.token)
        return max(
            room - sums, self.ahead
        )  # the logits are in two parts, and dX is added up in fp32

    def later(self, rest, count):
        """Tokens of each of so many chunks, for the rest of the tokens."""
        return min(cdiv(rest, self.unit * count) * self.unit, rest)

    def room_for(self, count):
        """The least with which so many chunks are enough, or one. Each of them fills it, as far as
        units allow.

        The first chunk has what dW holds and the room, each later one the room alone.
        """
        even = (self.M + (count - 1) * (self.held + self.sums - self.ahead)) // count
        even = (
            self.held + self.units(even - self.held)
            if self.unit == 64
            else max(self.units(even), self.unit)
        )
        rooms = [
            max(n - self.held + self.ahead, aligned(self.later(self.M - n, count - 1)) + self.sums)
            for n in (even, even + self.unit)
        ]
        return min(*rooms, self.M - self.held + self.ahead)

    def chunks(self, room, few=2) -> Plan:
        """With so much room beyond dW: ``few`` chunks if the later ones fit, otherwise later ones
        of equal size."""
        beyond = self.units(room - self.ahead) if self.unit == 64 else max(room - self.ahead, 0)
        first = self.whole(self.held + beyond)
        rest, separate = self.M - first, False
        rows = self.later(rest, few - 1)
        if not self.freed and aligned(rows) <= room - self.sums:
            first = self.M - (cdiv(rest, rows) * rows if rest else 0)  # later ones are equal
            return Plan(first, rows, self.strip, self.wave if rest else 0, *self.dtypes)
        if rest and self.freed:
            first, room = self.whole(self.held), room + self.freed - self.ahead
            rest, separate = self.M - first, first <= self.held
        count = cdiv(rest, max(self.units(room), LEAST, self.unit))
        rows = cdiv(rest, self.unit * count) * self.unit if count else 0
        return Plan(first, rows, self.strip, 0, *self.dtypes, separate)


# ---- strategies, for a dW in its own dtype and one in fp32: each gives a plan, or None where it does not apply ----


def one_chunk(own, wide, memory):
    """For "auto", where all tokens take no more than `FREE` bytes beyond dW. It is rounded once, as
    in PyTorch."""
    if memory < 0 and (own.M - own.held) * own.token <= FREE:
        return Plan(own.M, 0, own.strip_for(own.M), 0, *own.dtypes)


def few_chunks(own, wide, memory):
    """For "auto", up to five times the tokens that dW holds: two chunks, or three. It is rounded as
    often.

    The first chunk's logits lie in dW and in the room beyond it, later ones' in that room alone. So
    two chunks need room for half of the tokens that dW does not hold, three for a third. Three are
    for a loss that asks for them (``few``), as those of policies do, and for chunks that keep the
    matrix units busy. GRPO at 16384·4096·128256 in 8192 + 4096 + 4096 tokens, not 10304 + 6080, one
    H200, 2026-11-24: 2.62 -> 2.13 GiB, 77.8 -> 79.1 ms, dW's error
    1.02 to 1.04x PyTorch's. A second sum that is rounded to bf16 made it 1.33x where dW grows with
    each chunk, for
    cross entropy (H200, 2026-11-21); hence `_add` in `chunks` keeps that sum fine.
    """
    if (
        memory < 0 and own.M <= 5 * own.held and not own.freed
    ):  # otherwise dW is in fp32 in any case
        few = own.few if own.wave and own.M - own.held >= 3 * ROWS else 2
        return own.chunks(own.room_for(few), few)


def chunks_of_4096(own, wide, memory):
    """For "auto" and more tokens: dW is added up in fp32, over chunks that keep the matrix units
    busy."""
    if memory < 0:
        return wide.chunks(max(max(2 * ROWS, wide.unit) - wide.freed, 0) + wide.ahead)


def within_budget(own, wide, memory):
    """As few chunks as fit. If they are more than two, dW is in fp32 where that leaves room for
    chunks worth having."""
    least, room = own.chunks(own.room(memory)), wide.room(memory)
    worthwhile = max(ROWS // 2, 0 if wide.unit == 64 else wide.unit)
    few = own.M <= least.first + least.rows
    return least if few or room < max(wide.ahead, worthwhile - wide.freed) else wide.chunks(room)


STRATEGIES = one_chunk, few_chunks, chunks_of_4096, within_budget  # the first one that applies


def plan(
    M,
    H,
    V,
    dtype,
    weight_dtype,
    accum_dtype=None,
    memory=-1,
    need_w=True,
    processors=132,
    unit=64,
    few=2,
) -> Plan:
    """The chunks of M tokens within ``memory`` bytes beyond the gradients dh and dW (-1: "auto").

    dW in the weight's dtype holds the logits of H tokens (2·H for one of fp32 where the logits have
    16 bits), and each byte beyond it more of them. A chunk has at least `LEAST` tokens and one
    unit, whatever the budget. ``few``: two or three chunks, as long as "auto" does not need many
    (`few_chunks`)."""
    constants = ROWS, LEAST, TILE, FREE, STRATEGIES, waves  # all else that decides
    return _plan(
        M, H, V, dtype, weight_dtype, accum_dtype, memory, need_w, processors, unit, few, constants
    )


@functools.lru_cache
def _plan(
    M, H, V, dtype, weight_dtype, accum_dtype, memory, need_w, processors, unit, few, constants
):
    if not need_w:  # the logits have memory of their own, which each chunk uses again
        rows = (ROWS if memory < 0 else memory // (V * dtype.itemsize)) // unit * unit
        return Plan(0, max(rows, LEAST, unit), 0, 0, weight_dtype, weight_dtype)
    finished = grad_dtype(dtype, weight_dtype, accum_dtype)
    sizes = M, H, V, dtype, weight_dtype, finished
    last = processors, unit, few
    own = _Head(*sizes, finished, *last)
    asked = dtype == torch.float16 or accum_dtype
    wide = _Head(
        *sizes, finished if asked else torch.promote_types(weight_dtype, torch.float32), *last
    )
    return next(filter(None, (strategy(own, wide, memory) for strategy in STRATEGIES)))
