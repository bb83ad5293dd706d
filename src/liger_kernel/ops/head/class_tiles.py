r"""A linear head a tile of logits at a time: some classes of some tokens.

    X = h·Wᵀ + b of a tile.   Forward: partial results of its classes, then merged over the tiles.
    Backward, from each token's statistics: dX of a tile,   dh += dX·W,   dW += dXᵀ·h,   db += Σ dX

It is taken where the weight has another dtype than the logits, as one of fp32 has in autocast, and
a budget has no room for a copy of it (`planning.cast_classes`). Here a tile's classes are copied
once in forward and once in backward for all tokens of a tile. In `chunks`, whose rows of logits are
whole, each chunk copies all classes twice, and the chunks of a small budget are small.

No tile's gradient can be computed before the statistics of all classes are known. So this takes
four products where `chunks` may take three.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.ops.head import planning
from liger_kernel.ops.head.chunks import add_product, empty_gradients, pad_tokens
from liger_kernel.ops.head.planning import align


def applies(hidden, weight, options) -> bool:
    """Return True if forward, where it makes no gradients, and backward take tiles.

    ``options``: `linear_head.HeadOptions`.
    """
    V, H = weight.shape
    parts = planning.cast_classes(H, V, options.dtype, weight.dtype, options.memory)
    return parts is not None and options.group is None


class LogitTiles:
    """The logits of all classes for some tokens, in memory that each tile uses again.

    Iterates over (classes, weight, logits): a slice, (classes, H) in the dtype of the logits, and
    (classes, tokens with padding).
    """

    def __init__(self, h, w, dtype, memory):
        self.w = w
        self.tokens, self.classes = planning.tile_sizes(*h.shape, dtype, memory)
        self.logits = h.new_empty(self.classes * self.tokens, dtype=dtype)
        self.weight = w.new_empty(self.classes, w.shape[1], dtype=dtype)
        self.chunk = None  # hidden states of the tokens, (tokens with padding, H)
        self.num_tokens = 0

    def of_tokens(self, h):
        """Set the tokens, whose hidden states are h."""
        self.num_tokens = len(h)
        self.chunk = pad_tokens(h.to(self.logits.dtype))

    def __len__(self):
        return -(-len(self.w) // self.classes)

    def __iter__(self):
        tokens = len(self.chunk)
        stride = align(tokens)
        for start in range(0, len(self.w), self.classes):
            w = self.w[start : start + self.classes]
            classes = slice(start, start + len(w))
            w = self.weight[: len(w)].copy_(w)
            x = self.logits[: len(w) * stride].view(len(w), stride)[:, :tokens]
            yield classes, w, torch.mm(w, self.chunk.t(), out=x)


def run_forward(h, w, dtype, memory, read_logits):
    """Call ``read_logits(tokens, tiles)`` for all tokens: a slice of them, and `LogitTiles`."""
    tiles = LogitTiles(h, w, dtype, memory)
    with devices.without_autocast(h):
        for start in range(0, len(h), tiles.tokens):
            tokens = slice(start, min(start + tiles.tokens, len(h)))
            tiles.of_tokens(h[tokens])
            read_logits(tokens, tiles)


def run_backward(h, w, dtype, accum_dtype, memory, write_gradient, needs):
    """Compute dh, dW and db, those of them that are needed. The others have no elements.

    ``write_gradient(tokens, x, classes=classes)`` overwrites the logits x (tokens, classes) with
    their gradient; ``tokens`` and ``classes`` are slices.
    """
    dh, dw, db = empty_gradients(h, w, dtype, accum_dtype, needs)
    db.zero_()
    dw_sums = dw if dw.dtype == torch.float32 else dw.new_empty(dw.shape, dtype=torch.float32)
    tiles = LogitTiles(h, w, dtype, memory)
    with devices.without_autocast(h):
        for start in range(0, len(h), tiles.tokens):
            tokens = slice(start, min(start + tiles.tokens, len(h)))
            tiles.of_tokens(h[tokens])
            n = tiles.num_tokens
            chunk = tiles.chunk
            if needs[0]:
                is_sum = dh.dtype == torch.float32 and len(chunk) == n
                chunk_dh = dh[tokens] if is_sum else dh.new_empty(chunk.shape, dtype=torch.float32)
            for classes, w_rows, x in tiles:
                write_gradient(tokens, x[:, :n].t(), classes=classes)
                x[:, n:] = 0  # of padding: NaN where the weight is infinite
                if needs[0]:
                    add_product(chunk_dh, x.t(), w_rows, add=classes.start > 0)
                if needs[1]:
                    add_product(dw_sums[classes], x, chunk, add=start > 0)
                if needs[2]:
                    db[classes].add_(x.sum(1, dtype=torch.float32))
            if needs[0] and not is_sum:
                dh[tokens] = chunk_dh[:n]
    if needs[1] and not len(h):
        dw_sums.zero_()
    return dh, dw_sums.to(dw.dtype), db
