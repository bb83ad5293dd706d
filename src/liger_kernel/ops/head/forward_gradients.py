"""Losses whose gradients are computed in forward.

The gradient of a scalar loss is known but for a factor, the incoming gradient. So forward computes
it while the logits are in memory, and backward multiplies it by that factor. By then the weight may
have changed or been freed (ZeRO-3). A compiled graph may keep few logits instead:
`linear_cross_entropy.keeps_logits`.
"""

from __future__ import annotations

from functools import partial

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import (
    differentiable_gradients,
    in_func_transform,
    refuse_create_graph,
    save_grads,
    saved_grads,
    saved_inputs,
)
from liger_kernel.core.tile import cdiv, tl


@kernel
def _scale(x_ptr, g_ptr, y_ptr, N, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr):
    """Compute y = x·g. In place there is nothing to do if g is 1, which only the device can see."""
    g = tl.load(g_ptr).to(tl.float32)
    if IN_PLACE and g == 1.0:
        return
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, step):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + i, (x * g).to(y_ptr.dtype.element_ty), mask=i < N)


def scale_gradient(x, g, dtype, in_place):
    """Return x·g in ``dtype``, for g of one element. ``in_place``: it may be written over x."""
    if x.numel() == 0 or torch.compiler.is_compiling() or not devices.has_kernels(x):
        return (x * g).to(dtype)
    in_place = in_place and x.dtype == dtype
    y = x if in_place else torch.empty_like(x, dtype=dtype)
    programs = min(cdiv(x.numel(), 4096), 8 * devices.multiprocessors(x))
    _scale[(programs,)](
        x, g.resolve_neg(), y, x.numel(), BLOCK=4096, IN_PLACE=in_place, num_warps=8
    )
    return y


# of `store_gradients`: the gradients of hidden states, weight and bias, and their divisor
NUM_STORED = 4


def store_gradients(ctx, grads, inputs, needs, reference=None, divisor=None):
    """In forward: store the gradients of loss·divisor for the first three inputs.

    Args:
        grads: the gradients, None or empty where not needed.
        needs: for each of the three inputs, if it needs a gradient.
        reference: ``reference(*inputs)`` returns the loss, or a tuple that begins with it. It is
            differentiated where the gradients need a graph of their own.
        divisor: a tensor that backward divides the gradients by; None: 1.
    """
    ctx.needs = needs
    ctx.reference = reference
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]
    grads = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    save_grads(ctx, (*grads, divisor), inputs)


def load_gradients(ctx, grad_output, *other_grad_outputs):
    """In backward: return the stored gradients times ``grad_output``, the incoming gradient.

    ``other_grad_outputs`` are those of the outputs after the loss. Only a double backward uses
    them.
    """
    if torch.is_grad_enabled():
        return differentiable_gradients(
            ctx.reference,
            saved_inputs(ctx, NUM_STORED),
            ctx.needs,
            (grad_output, *other_grad_outputs),
        )
    if torch.compiler.is_compiling():
        (grad_output,) = refuse_create_graph(grad_output)
    (*grads, divisor), in_place = saved_grads(ctx, NUM_STORED)
    if divisor is not None:
        grad_output = grad_output / divisor
    return tuple(
        None if grad is None else scale_gradient(grad, grad_output, dtype, in_place)
        for grad, dtype in zip(grads, ctx.dtypes, strict=True)
    )


def detach_inputs(tensors, needs):
    """Return the tensors as leaves of a graph of their own. ``needs``: which need a gradient."""
    return [
        x if x is None else x.detach().requires_grad_(need)
        for x, need in zip(tensors, needs, strict=True)
    ]


def value_and_gradients(loss, tensors, needs, constant=False):
    """Run ``loss(*tensors)`` and differentiate its first output.

    Args:
        needs: for each tensor, if it needs a gradient.
        constant: the first output may depend on none of the tensors.

    Returns:
        The outputs, and a list with the gradient of each tensor, None where not needed.
    """
    with torch.set_grad_enabled(any(needs)):
        leaves = detach_inputs(tensors, needs)
        outputs = loss(*leaves)
        inputs = [x for x, need in zip(leaves, needs, strict=True) if need]
        grads = ()
        if inputs and (outputs[0].requires_grad or not constant):
            grads = torch.autograd.grad(outputs[0], inputs, allow_unused=True)
    grads = iter(grads)
    return outputs, [next(grads, None) if need else None for need in needs]


def gradients_in_chunks(loss, chunks, h, w, b, needs, constant=False):
    """Run ``loss(rows, h[rows], w, b)`` for each chunk of the rows, in plain PyTorch.

    Returns:
        The outputs of each chunk, and the needed dh, dW, db of the sum of their first outputs, in
        fp32 or wider.
    """
    grad_dtype = torch.promote_types(w.dtype, torch.float32)
    grads = [
        torch.zeros_like(x, dtype=grad_dtype) if need else None
        for x, need in zip((h, w, b), needs, strict=True)
    ]
    outputs = []
    for rows in chunks:
        chunk_outputs, chunk_grads = value_and_gradients(
            partial(loss, rows), (h[rows], w, b), needs, constant
        )
        outputs.append([x.detach() for x in chunk_outputs])
        for grad, index, chunk_grad in zip(grads, (rows, ..., ...), chunk_grads, strict=True):
            if chunk_grad is not None:
                grad[index] += chunk_grad
    return outputs, grads


class GradientInForward(torch.autograd.Function):
    """Autograd Function of `gradient_in_forward`."""

    @staticmethod
    def forward(ctx, run, reference, h, w, b):
        needs = [
            x is not None and need
            for x, need in zip((h, w, b), ctx.needs_input_grad[2:], strict=True)
        ]
        outputs, grads, divisor = run(h, w, b, needs)
        store_gradients(ctx, grads, (h, w, b), needs, reference, divisor)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, grad_output, *other_grad_outputs):
        if grad_output is None:
            return (None,) * 5
        return None, None, *load_gradients(ctx, grad_output, *other_grad_outputs)


def gradient_in_forward(run, reference, h, w, b):
    """Return the outputs (loss, ...) of ``run``. The loss has gradients for h, w and b.

    Args:
        run: ``run(h, w, b, needs)`` returns the outputs, (dh, dw, db) and a divisor. The gradients
            are those of loss·divisor (None: 1), and None or empty where not needed.
        reference: ``reference(h, w, b)`` returns the same outputs, in plain PyTorch.
    """
    if in_func_transform():
        return reference(h, w, b)
    # kernels read what is in memory: see `op.resolve_negative`
    h, w, b = (x if x is None else x.resolve_neg() for x in (h, w, b))
    if torch.is_grad_enabled():
        return GradientInForward.apply(run, reference, h, w, b)
    return run(h, w, b, [False] * 3)[0]
