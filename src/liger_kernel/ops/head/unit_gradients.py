r"""Gradients that forward computes before it knows the incoming ones.

    loss_t of the logits h_t·Wᵀ + b,   D_t = ∂loss_t/∂logits,   g_t: the incoming gradient
    dh_t = g_t·(D_t·W),   dW = Σ_t g_t·D_tᵀ·h_t,   db = Σ_t g_t·D_t

To multiply D by W and by h, backward computes the logits again: four products in all, or three for
a frozen head. In two cases forward can multiply while it has the logits, by D as if every g_t were
1 (*unit gradients*), and backward only scales the result:

* A frozen head, which needs dh alone: backward multiplies row t by g_t. Two products.
* All g_t are the same number, as under a sum or a mean: backward multiplies dh, dW and db by it.
  Three products. Only their values tell, so the host waits for the device. Callers for which it has
  just waited in any case, as in TRL's backward, ask for it (``of_sums``).

Forward cannot know which gradients will come. It goes by those that came before, of a head of the
same shape and outputs: `GradientHistory`. What backward does is right whatever comes: it scales
unit gradients only in these cases, and otherwise computes the logits again.
"""

from __future__ import annotations

import torch

from liger_kernel.core.op import saved_grads
from liger_kernel.core.overwrite import in_checkpoint
from liger_kernel.ops.head import class_tiles
from liger_kernel.ops.head.chunks import plan_for
from liger_kernel.ops.head.forward_gradients import scale_gradient
from liger_kernel.ops.head.linear_head import NO_GRADIENTS
from liger_kernel.ops.head.planning import divides_at_end

MAX_HISTORIES = 1000
MIN_CHUNK_OF_PARTS = 2048  # tokens: see `are_worthwhile`


class GradientHistory:
    """Incoming gradients of a head's tokens in earlier backward passes.

    of_sums: compare the incoming gradients of a head that trains, and expect one number for all
        tokens where that is what came before. If False, only a frozen head has unit gradients.
    one_number: all of them were one number. None: there was none. A wrong guess costs two products
        and the memory of dW, so once it is False it stays so, and nothing is compared any more.
    had_other_grads: the last one came with a gradient of the entropy or of the log-sum-exp, too,
        for which logits are needed in any case.
    """

    __slots__ = ("of_sums", "one_number", "had_other_grads")

    def __init__(self, of_sums=False):
        self.of_sums = of_sums
        self.one_number = None
        self.had_other_grads = False

    def expected(self, needs):
        """Return which of dh, dW and db forward should compute, of those that are needed."""
        if self.had_other_grads or not (is_frozen(needs) or self.of_sums and self.one_number):
            return NO_GRADIENTS
        return needs

    def record(self, grad_loss, has_other_grads, needs):
        """Note what came into a backward.

        Args:
            grad_loss: (M,) in fp32, or None.
            has_other_grads: gradients of other outputs came, too.

        Returns:
            True if ``grad_loss`` is known to be one number for all tokens.
        """
        self.had_other_grads = has_other_grads
        if is_frozen(needs) or not self.of_sums or self.one_number is False:
            return False
        if grad_loss is None or has_other_grads:
            self.one_number = False
            return False
        # what `sum` hands on is one number in memory, of which nothing needs to be read
        is_one_number = not any(grad_loss.stride())
        if not is_one_number:
            bits = grad_loss.view(torch.int32)  # of NaN, too, which equals nothing
            is_one_number = bool((bits == bits[0]).all())
        if grad_loss.numel() > 1:  # one element says nothing about the next batch
            self.one_number = is_one_number
        return is_one_number


def is_frozen(needs) -> bool:
    return not needs[1] and not needs[2]


_histories: dict[tuple, GradientHistory] = {}


def history_of(*key, of_sums=False) -> GradientHistory:
    """Return the history of the heads with this key. It has what tells one use from another."""
    if len(_histories) > MAX_HISTORIES:
        _histories.clear()
    return _histories.setdefault(key, GradientHistory(of_sums))


def early_needs(history, needs, options, hidden, weight, dtype):
    """Return which unit gradients forward should compute: dh, dW and db.

    None without a history; in a graph, for which nothing is known; if one of hidden states, weight
    and logits (``dtype``) is fp16, where small gradients vanish that a `GradScaler` would have made
    large; and in a checkpoint, whose second forward must save what the first one has saved. The
    ranks of a group must agree, so they do not go by what came before: a frozen head has unit
    gradients unless its entropy is asked for.
    """
    if history is None or torch.compiler.is_compiling():
        return NO_GRADIENTS
    if divides_at_end(hidden, weight, dtype):
        return NO_GRADIENTS
    if in_checkpoint():
        return NO_GRADIENTS
    if options.group is not None:
        return NO_GRADIENTS if options.requested.entropy else GradientHistory().expected(needs)
    return history.expected(needs)


def are_worthwhile(hidden, weight, options, needs):
    """Return False if unit gradients would cost more time than the product that they save.

    They need whole rows of logits. Where the weight is copied in parts, each chunk of these copies
    all of it twice, and without unit gradients a tile copies it once (`class_tiles`). On an H200,
    of 700 TFLOP/s and 4.2 TB/s, 12·V·H bytes of a chunk, and 8·V·H of adding to dW, take as long as
    a product of 1,000 and 1,700 tokens.
    """
    dtype, accum_dtype, memory = options.dtype, options.accum_dtype, options.memory
    if not class_tiles.applies(hidden, weight, options):
        return True
    M = hidden.shape[0]
    chunks = plan_for(hidden, weight, dtype, accum_dtype, memory, needs[1]).chunks(M)
    return len(chunks) <= 1 or M >= len(chunks) * MIN_CHUNK_OF_PARTS


def scale_unit_gradients(ctx, grad_loss, is_one_number, inputs):
    """Return dh, dW and db for the incoming gradients of the losses, (M,).

    ``inputs``: hidden, weight and bias. Returns None where these gradients are no multiple of the
    unit gradients, which are all of ``ctx.needs`` or, of a frozen head, dh.
    """
    if not is_frozen(ctx.needs) and not is_one_number:
        return None
    unit_grads, in_place = saved_grads(ctx, 3)
    if is_frozen(ctx.needs):
        dh = unit_grads[0]
        scale = grad_loss[:, None]
        return (dh.mul_(scale) if in_place else (dh * scale).to(dh.dtype)), None, None
    return tuple(
        scale_gradient(grad, grad_loss[0], tensor.dtype, in_place) if need else None
        for grad, tensor, need in zip(unit_grads, inputs, ctx.needs, strict=True)
    )
