"""Planning of a linear head's chunks, by the memory they may take: see `Plan` and `STRATEGIES`."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass, replace

import torch

from liger_kernel.core.tile import cdiv

CHUNK_TOKENS = 2048  # tokens of a chunk that keep the matrix units busy
MIN_CHUNK_TOKENS = 256  # tokens of a chunk, whatever the budget
DW_TILE = 128, 256  # of the matmuls that make dW
FREE_BYTES = 2**29  # bytes that aren't worth a second chunk
# of a weight that is copied to the logits' dtype a part at a time: see `cast_classes`
CAST_CLASSES = 16384  # classes of a part
CAST_TOKENS = 4096  # tokens whose dh is added up in fp32 over the parts
TILE_TOKENS = 8192  # of a tile of logits: see `class_tiles`
TILE_CLASSES = 32768
TILE_ELEMENTS = 2**23, 2**26
MEMORY_VARIABLE = "LIGER_KERNEL_HEAD_MEMORY"


@dataclass(frozen=True)
class Plan:
    """The chunks of M tokens: ``first`` of them in one chunk, then ``rows`` at a time.

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
    grad_dtype: torch.dtype  # of the finished dW
    # later chunks have a buffer of their own, which is used again for the finished dW
    separate_logits: bool = False
    # classes of the weight that are copied to the logits' dtype at a time; None: all
    cast_classes: int | None = None

    def chunks(self, M) -> list[slice]:
        starts = [0, *range(self.first or self.rows, M, self.rows or M)] if M else []
        return [slice(*bounds) for bounds in zip(starts, [*starts[1:], M], strict=False)]


def parse_memory(memory) -> int:
    """Return the bytes of a ``memory`` argument, or -1 for "auto".

    The environment variable `MEMORY_VARIABLE` may replace "auto".
    """
    name = "memory"
    argument = memory
    if memory == "auto":
        name = MEMORY_VARIABLE
        argument = os.environ.get(MEMORY_VARIABLE, "auto")
        if argument == "auto":
            return -1
        with contextlib.suppress(ValueError, OverflowError):
            memory = int(float(argument))
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 0:
        raise ValueError(f"{name} is {argument!r}, give a number of bytes or 'auto'")
    return memory


def align(n, to=64):
    """Return n rounded up, to a stride or a number of rows that matmuls like."""
    return cdiv(n, to) * to


def wave_classes(classes, H, processors, waves=1):
    """Return about ``classes`` classes of dW, whose tiles fill the processors a few times.

    They fill them ``wave_classes`` times or more. A tile is `DW_TILE`.
    """
    across = max(cdiv(H, DW_TILE[1]), 1)
    waves = max(int(classes * across / (DW_TILE[0] * processors)), waves)
    while waves * processors % across > waves * processors // 20:  # idle in the last wave
        waves += 1
    return waves * processors // across * DW_TILE[0]


def divides_at_end(hidden, weight, dtype) -> bool:
    """Return True if backward divides the gradients that forward computed by the number of tokens.

    It does so in fp32, with the incoming gradient, which a scaler makes large. fp16 can't hold what
    is divided alone, be it the gradient of the logits, which are in ``dtype``, or dh or dW.
    """
    return torch.float16 in (hidden.dtype, weight.dtype, dtype)


def weight_grad_dtype(dtype, weight_dtype, accum_dtype):
    """Return the dtype of the finished dW, for logits in ``dtype``.

    fp16 can't hold what is not yet divided by the number of tokens.
    """
    if torch.float16 in (dtype, weight_dtype):
        return torch.float32
    return accum_dtype or weight_dtype


def cast_classes(H, V, dtype, weight_dtype, memory):
    """Return how many classes of the weight are copied to the logits' dtype at a time.

    None: all, as without a budget, or where the copy is no more than half of it.
    """
    if memory < 0 or weight_dtype == dtype or V <= CAST_CLASSES:
        return None
    return None if 2 * V * H * dtype.itemsize <= memory else CAST_CLASSES


def cast_bytes(M, H, V, dtype, weight_dtype, memory):
    """Return the bytes of that copy, and of dh's sums in fp32 where it is of a part."""
    if weight_dtype == dtype:
        return 0
    classes = cast_classes(H, V, dtype, weight_dtype, memory)
    if classes is None:
        return V * H * dtype.itemsize
    return classes * H * dtype.itemsize + 4 * H * min(M, CAST_TOKENS)


def tile_sizes(M, H, dtype, memory):
    """Return the most tokens and classes of a tile of logits.

    The tile takes half of the budget, and the copy of its classes a quarter, or that of
    `CAST_CLASSES`. Sums in fp32 are read and written 1/tokens + 1/classes times per product's
    element, so both are large.
    """
    least, most = TILE_ELEMENTS
    elements = min(max(memory // (2 * dtype.itemsize), least), most)
    tokens = align(min(max(M, 1), TILE_TOKENS))
    copied = max(memory // (4 * max(H, 1) * dtype.itemsize), CAST_CLASSES)
    classes = min(elements // tokens, copied, TILE_CLASSES)
    return tokens, max(classes // 64 * 64, 64)


class _HeadSizes:
    """The sizes of a head whose dW is added up in ``accum``.

    Room in memory is counted in tokens: in what the logits of a token take.
    """

    def __init__(
        self, M, H, V, dtype, weight_dtype, finished, accum, processors, unit, auto_chunks, spare
    ):
        self.M = M
        self.H = H
        self.V = V
        self.processors = processors
        self.unit = unit
        self.auto_chunks = auto_chunks
        self.spare = spare
        self.dtypes = accum, finished
        self.copies_dw = accum != weight_dtype
        self.token_bytes = max(V * dtype.itemsize, 1)
        self.dw_tokens = cdiv(H * accum.itemsize, dtype.itemsize)  # tokens whose logits fill dW
        self.strip = self.strip_for(min(M, self.dw_tokens))
        # room for one strip, which dW is ahead of the logits
        self.strip_tokens = cdiv(self.strip * self.dw_tokens, max(V, 1))
        in_16_bits = accum.itemsize == dtype.itemsize == 2
        self.wave = min(wave_classes(0, H, processors, 2), V) if in_16_bits else 0
        # later chunks are whole tiles of the matmuls where that takes no more memory
        in_tiles = in_16_bits and unit == 64 and M % DW_TILE[0] == 0
        self.step = DW_TILE[0] if in_tiles else unit
        self.wave_tokens = cdiv(self.wave * H * 4, self.token_bytes)  # room for a wave in fp32
        # room in the finished dW, where it has a buffer of its own
        self.finished_tokens = 0
        if accum.itemsize > weight_dtype.itemsize and unit <= max(self.dw_tokens, 64):
            self.finished_tokens = cdiv(H * weight_dtype.itemsize, dtype.itemsize)

    def strip_for(self, tokens):
        """Return the classes of a strip: 200 µs of work for a large GPU.

        It takes 24 MB of room ahead of bf16 logits.

        H200, 2026-11-20, in waves of 132 tiles: 2048·4096·128256 in strips of 2048, 4096, 8192:
        8.69, 8.51, 8.36 ms; 4096·2048·128256: 9.12, 8.92, 8.88; 8192·2304·256000: 46.3, 45.7, 45.9;
        8192·4096·128256: no difference.
        """
        tokens = max(tokens, 1)
        classes = min(7e10 / (self.H * tokens), 12e6 / min(self.dw_tokens, tokens))
        return min(wave_classes(classes, self.H, self.processors), self.V)

    def whole_units(self, tokens):
        """Return the tokens of the whole units that fit into ``tokens``."""
        return max(tokens, 0) // self.unit * self.unit

    def first_chunk(self, tokens):
        """Return the tokens of the first chunk, about ``tokens``."""
        if self.unit != 64:
            tokens = max(self.whole_units(tokens), self.unit)
        return min(self.M, tokens)

    def later_chunk(self, tokens, count, step=None):
        """Return the tokens of each of ``count`` chunks for ``tokens`` tokens, or for a few more.

        8,192 tokens of 4,096 channels are 6,144 + 2,048 in whole tiles, 6,208 + 1,984 in units: dX
        has rounds of 1,024 tokens, and one of 64 would read the whole weight.
        """
        step = step or self.step
        rows = cdiv(tokens, step * count) * step
        if step != self.unit and rows * count < self.M:  # the first chunk keeps some
            return rows
        return min(cdiv(tokens, self.unit * count) * self.unit, tokens)

    def room_within(self, memory):
        """Return the room beyond dW in a budget of ``memory`` bytes."""
        copy_bytes = self.V * self.H * self.dtypes[0].itemsize if self.copies_dw else 0
        room = (memory - copy_bytes) // self.token_bytes
        if self.finished_tokens or room <= self.strip_tokens:
            return room
        # the logits are in two parts, and dX is added up in fp32
        wave = min(wave_classes(0, self.H, self.processors), self.M)
        return max(room - cdiv(wave * self.H * 4, self.token_bytes), self.strip_tokens)

    def room_for(self, count):
        """Return the least room with which ``count`` chunks are enough, or one.

        Each of them fills it, as far as units allow. The first chunk has what dW holds and the
        room, each later one the room alone.
        """
        later_room = self.dw_tokens + self.wave_tokens - self.strip_tokens
        even = (self.M + (count - 1) * later_room) // count
        if self.unit == 64:
            even = self.dw_tokens + self.whole_units(even - self.dw_tokens)
        else:
            even = max(self.whole_units(even), self.unit)
        rooms = []
        for first in (even, even + self.unit):
            first_room = first - self.dw_tokens + self.strip_tokens
            later = align(self.later_chunk(self.M - first, count - 1))
            rooms.append(max(first_room, later + self.wave_tokens))
        return min(*rooms, self.M - self.dw_tokens + self.strip_tokens)

    def plan(self, room, count=2) -> Plan:
        """Return the plan for ``room`` beyond dW.

        It has ``count`` chunks if the later ones fit. Otherwise the later ones are of equal size.
        """
        beyond = max(room - self.strip_tokens, 0)
        if self.unit == 64:
            beyond = self.whole_units(beyond)
        first = self.first_chunk(self.dw_tokens + beyond)
        left = self.M - first
        for step in self.step, self.unit:  # without room for whole tiles: whole units
            rows = self.later_chunk(left, count - 1, step)
            if not self.finished_tokens and align(rows) <= room - self.wave_tokens:
                first = self.M - (cdiv(left, rows) * rows if left else 0)  # later ones are equal
                return Plan(first, rows, self.strip, self.wave if left else 0, *self.dtypes)
        separate = False
        if left and self.finished_tokens:
            first = self.first_chunk(self.dw_tokens)
            room += self.finished_tokens - self.strip_tokens
            left = self.M - first
            separate = first <= self.dw_tokens
        num_chunks = cdiv(left, max(self.whole_units(room), MIN_CHUNK_TOKENS, self.unit))
        rows = cdiv(left, self.unit * num_chunks) * self.unit if num_chunks else 0
        return Plan(first, rows, self.strip, 0, *self.dtypes, separate)


# ---- strategies: each returns a plan, or None where it does not apply ----
# They get the sizes of a head whose dW is added up in its own dtype (narrow), or in fp32 (wide).


def one_chunk(narrow, wide, memory):
    """For "auto", where all tokens take no more than `FREE_BYTES` beyond dW, or what is spare.

    dW is rounded once, as in PyTorch.
    """
    free = max(FREE_BYTES, narrow.spare)
    if memory < 0 and (narrow.M - narrow.dw_tokens) * narrow.token_bytes <= free:
        return Plan(narrow.M, 0, narrow.strip_for(narrow.M), 0, *narrow.dtypes)


def few_chunks(narrow, wide, memory):
    """For "auto", up to five times the tokens that dW holds: two chunks, or three.

    dW is rounded as often. The first chunk's logits lie in dW and in the room beyond it, later
    ones' in that room alone. So two chunks need room for half of the tokens that dW does not hold,
    three for a third. Three are for a loss that asks for them (``auto_chunks``), as those of
    policies do, and for chunks that keep the matrix units busy. Up to four, of half as many tokens,
    are for a head where nothing is spare. GRPO at 16384·4096·128256 in 8192 + 4096 + 4096 tokens,
    not 10304 + 6080, one H200, 2026-11-24: 2.62 -> 2.13 GiB, 77.8 -> 79.1 ms, dW's error 1.02 to
    1.04x PyTorch's. A second sum that is rounded to bf16 made it 1.33x where dW grows with each
    chunk, for cross entropy (H200, 2026-11-21); hence `chunks.add_kernel` keeps that sum fine.
    """
    if memory >= 0 or narrow.M > 5 * narrow.dw_tokens:
        return None
    if narrow.finished_tokens:  # dW is in fp32 in any case
        return None
    count = 2
    if narrow.wave:
        tokens = CHUNK_TOKENS
        most = narrow.auto_chunks
        if narrow.spare == 0:
            tokens = CHUNK_TOKENS // 2
            most = 4
        count = min(max((narrow.M - narrow.dw_tokens) // tokens, 2), most)
    room = max(narrow.room_for(count), narrow.spare // narrow.token_bytes)
    return narrow.plan(room, count)


def chunks_of_4096(narrow, wide, memory):
    """For "auto" and more tokens: dW is added up in fp32.

    The chunks keep the matrix units busy. They have more tokens where more memory is spare.
    """
    if memory < 0:
        tokens = max(2 * CHUNK_TOKENS, wide.unit)
        room = max(tokens - wide.finished_tokens, 0) + wide.strip_tokens
        return wide.plan(max(room, wide.room_within(wide.spare)))


def within_budget(narrow, wide, memory):
    """For a budget: as few chunks as fit.

    If they are more than two, dW is in fp32 where that leaves room for chunks worth having.
    """
    plan = narrow.plan(narrow.room_within(memory))
    if narrow.M <= plan.first + plan.rows:
        return plan
    room = wide.room_within(memory)
    worthwhile = max(CHUNK_TOKENS // 2, 0 if wide.unit == 64 else wide.unit)
    if room < max(wide.strip_tokens, worthwhile - wide.finished_tokens):
        return plan
    return wide.plan(room)


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
    auto_chunks=2,
    spare=-1,
) -> Plan:
    """Return the chunks of M tokens within ``memory`` bytes beyond dh and dW (-1: "auto").

    dW in the weight's dtype holds the logits of H tokens (2·H for one of fp32 where the logits have
    16 bits), and each byte beyond it more of them. A chunk has at least `MIN_CHUNK_TOKENS` tokens
    and one unit, whatever the budget. The budget also has the copy of a weight of another dtype
    (`cast_bytes`).

    Two arguments are for "auto". ``auto_chunks``: two or three chunks, as long as it does not need
    many (`few_chunks`). ``spare``: bytes beyond dh and dW that are free until others take them; 0
    where memory is scarcest, -1 if nothing is known.
    """
    # all else that decides
    constants = (
        CHUNK_TOKENS,
        MIN_CHUNK_TOKENS,
        DW_TILE,
        FREE_BYTES,
        CAST_CLASSES,
        CAST_TOKENS,
        STRATEGIES,
        wave_classes,
    )
    return _plan(
        M,
        H,
        V,
        dtype,
        weight_dtype,
        accum_dtype,
        memory,
        need_w,
        processors,
        unit,
        auto_chunks,
        spare,
        constants,
    )


@functools.lru_cache
def _plan(
    M,
    H,
    V,
    dtype,
    weight_dtype,
    accum_dtype,
    memory,
    need_w,
    processors,
    unit,
    auto_chunks,
    spare,
    constants,
):
    parts = cast_classes(H, V, dtype, weight_dtype, memory)
    if memory >= 0:
        memory = max(memory - cast_bytes(M, H, V, dtype, weight_dtype, memory), 0)
    if not need_w:  # the logits have memory of their own, which each chunk uses again
        rows = (CHUNK_TOKENS if memory < 0 else memory // (V * dtype.itemsize)) // unit * unit
        rows = max(rows, MIN_CHUNK_TOKENS, unit)
        return Plan(0, rows, 0, 0, weight_dtype, weight_dtype, cast_classes=parts)
    finished = weight_grad_dtype(dtype, weight_dtype, accum_dtype)
    wide_accum = torch.promote_types(weight_dtype, torch.float32)
    if torch.float16 in (dtype, weight_dtype) or accum_dtype:
        wide_accum = finished

    def sizes(accum):
        return _HeadSizes(
            M, H, V, dtype, weight_dtype, finished, accum, processors, unit, auto_chunks, spare
        )

    narrow = sizes(finished)
    wide = sizes(wide_accum)
    for strategy in STRATEGIES:
        chosen = strategy(narrow, wide, memory)
        if chosen:
            return replace(chosen, cast_classes=parts)
