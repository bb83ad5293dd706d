"""Losses whose gradients are computed in forward.

The gradient of a scalar loss is known except for a factor, the gradient that comes in. So forward
computes it while the logits are there, and backward multiplies. The weight may change or be gone by
then (ZeRO-3). A compiled graph may keep few logits instead: `linear_cross_entropy.keeps_logits`.
"""

from __future__ import annotations

from functools import partial

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import gradients, keep, kept, kept_inputs, transformed, without_graph
from liger_kernel.core.tile import cdiv, tl


@kernel
def _scale(x_ptr, g_ptr, y_ptr, N, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr):
    """y = x·g. In place there is nothing to do if g is 1, which only the device can see."""
    g = tl.load(g_ptr).to(tl.float32)
    if IN_PLACE and g == 1.0:
        return
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, step):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + i, (x * g).to(y_ptr.dtype.element_ty), mask=i < N)


def scaled(x, g, dtype, in_place):
    """x·g in ``dtype``, for g of one element; written over x if allowed."""
    if x.numel() == 0 or torch.compiler.is_compiling() or not devices.has_kernels(x):
        return (x * g).to(dtype)
    in_place = in_place and x.dtype == dtype
    y = x if in_place else torch.empty_like(x, dtype=dtype)
    programs = min(cdiv(x.numel(), 4096), 8 * devices.multiprocessors(x))
    _scale[(programs,)](x, g, y, x.numel(), BLOCK=4096, IN_PLACE=in_place, num_warps=8)
    return y


# tensors: the gradients of hidden states, weight and bias, and what they have to be divided by
KEPT = 4


def store(ctx, grads, inputs, needs, reference=None, divisor=None):
    """In forward: keep the gradients of loss·divisor for the first three inputs, None or empty
    where not needed.

    ``reference(*inputs) -> loss, ...`` is differentiated where the gradients need a graph of their
    own."""
    ctx.needs, ctx.reference, ctx.dtypes = (
        needs,
        reference,
        [None if x is None else x.dtype for x in inputs[:3]],
    )
    grads = (g if need else None for g, need in zip(grads, needs, strict=True))
    keep(ctx, (*grads, divisor), inputs)


def stored(ctx, g, *others):
    """In backward: these gradients for an incoming g; ``others``: those of further outputs, for a
    graph only."""
    if torch.is_grad_enabled():
        return gradients(ctx.reference, kept_inputs(ctx, KEPT), ctx.needs, (g, *others))
    (g,) = without_graph(g) if torch.compiler.is_compiling() else (g,)
    (*grads, divisor), in_place = kept(ctx, KEPT)
    g = g if divisor is None else g / divisor
    return tuple(
        None if x is None else scaled(x, g, of, in_place)
        for x, of in zip(grads, ctx.dtypes, strict=True)
    )


def value_and_gradients(loss, tensors, needs, constant=False):
    """``loss(*tensors) -> value, *others``, and the value's gradient for each tensor that needs
    one, else None.

    constant: the value may depend on none of them.
    """
    with torch.set_grad_enabled(any(needs)):
        leaves = [
            x if x is None else x.detach().requires_grad_(need)
            for x, need in zip(tensors, needs, strict=True)
        ]
        outputs = loss(*leaves)
        wanted = [x for x, need in zip(leaves, needs, strict=True) if need]
        skip = not wanted or constant and not outputs[0].requires_grad
        grads = iter(() if skip else torch.autograd.grad(outputs[0], wanted, allow_unused=True))
    return outputs, [next(grads, None) if need else None for need in needs]


def gradients_in_chunks(loss, chunks, h, w, b, needs, constant=False):
    """``loss(rows, h[rows], w, b)`` for each of some chunks of the rows, in plain PyTorch.

    -> the outputs of each, and the needed dh, dW, db of their sum, in fp32 or wider.
    """
    wide, outputs = torch.promote_types(w.dtype, torch.float32), []
    grads = [
        torch.zeros_like(x, dtype=wide) if need else None
        for x, need in zip((h, w, b), needs, strict=True)
    ]
    for rows in chunks:
        some, found = value_and_gradients(partial(loss, rows), (h[rows], w, b), needs, constant)
        outputs.append([x.detach() for x in some])
        for grad, of, d in zip(grads, (rows, ..., ...), found, strict=True):
            if d is not None:
                grad[of] += d
    return outputs, grads


class GradientInForward(torch.autograd.Function):
    """See `gradient_in_forward`."""

    @staticmethod
    def forward(ctx, run, reference, h, w, b):
        needs = [
            x is not None and need
            for x, need in zip((h, w, b), ctx.needs_input_grad[2:], strict=True)
        ]
        outputs, grads, divisor = run(h, w, b, needs)
        store(ctx, grads, (h, w, b), needs, reference, divisor)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, g, *others):
        return (None, None, *((None,) * 3 if g is None else stored(ctx, g, *others)))


def gradient_in_forward(run, reference, h, w, b):
    """``run``'s outputs (loss, *others), of which the loss has gradients for h, w and b.

    Args:
        run: ``run(h, w, b, needs) -> outputs, (dh, dw, db), divisor``: the gradients are of
        loss·divisor (None: 1), and
            None or empty where not needed.
        reference: ``reference(h, w, b) -> outputs`` in plain PyTorch.
    """
    if transformed():
        return reference(h, w, b)
    if torch.is_grad_enabled():
        return GradientInForward.apply(run, reference, h, w, b)
    return run(h, w, b, [False] * 3)[0]
