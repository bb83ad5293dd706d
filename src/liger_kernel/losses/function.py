"""The autograd Function under the losses that frameworks subclass."""

from __future__ import annotations

import torch

from liger_kernel.core.op import differentiable_gradients, run_eagerly
from liger_kernel.ops.head.forward_gradients import detach_inputs


class GradientsInForward(torch.autograd.Function):
    """A loss whose gradients are computed in forward: the module's weight may be gone in backward.

    ``HEAD_ARGUMENTS``: the positions of the hidden states, the weight and the bias among the
    arguments of ``apply``.
    """

    HEAD_ARGUMENTS = 0, 1, 3

    @classmethod
    @run_eagerly
    def apply(cls, *args):
        if not torch.is_grad_enabled():  # forward itself always runs without grad mode
            args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        return super().apply(*args)

    @classmethod
    def compute_with_gradients(cls, ctx, loss_fn, *head):
        """Return the outputs of ``loss_fn(hidden, weight, bias)``, and keep its graph for backward.

        ``head`` are these three tensors. The first output is the loss. Only the loss has gradients.
        """
        needs_grad = [
            x is not None and ctx.needs_input_grad[position]
            for position, x in zip(cls.HEAD_ARGUMENTS, head, strict=True)
        ]
        with torch.set_grad_enabled(any(needs_grad)):
            leaves = detach_inputs(head, needs_grad)
            loss, *further_outputs = loss_fn(*leaves)
        # The graph of loss_fn holds the gradients that it computed in forward. Its backward divides
        # and multiplies them, and rounds them once: if they were rounded to fp16 here, those that a
        # scaler makes large would vanish (`planning.divides_at_end`).
        ctx.head_loss = loss, leaves
        ctx.needs_grad = needs_grad
        ctx.head_arguments = cls.HEAD_ARGUMENTS
        ctx.reference = lambda *tensors: loss_fn(*tensors)[0]
        ctx.save_for_backward(*head)
        return loss.detach(), *further_outputs

    @staticmethod
    def backward(ctx, grad_output, *_):
        if torch.is_grad_enabled():
            grads = differentiable_gradients(
                ctx.reference, ctx.saved_tensors, ctx.needs_grad, (grad_output,)
            )
        else:
            grads = _multiply_gradients(ctx, grad_output)
        # a subclass may have no argument at the position of the bias
        head_grads = dict(zip(ctx.head_arguments, grads, strict=True))
        return tuple(head_grads.get(position) for position in range(len(ctx.needs_input_grad)))


def _multiply_gradients(ctx, grad_output):
    """Return the gradients of hidden states, weight and bias, None where not needed."""
    if ctx.head_loss is None:
        ctx.saved_tensors  # noqa: B018  they are freed, and this raises PyTorch's error
    loss, leaves = ctx.head_loss
    if not any(ctx.needs_grad):
        return [None] * len(leaves)
    keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
    if not keep_graph:
        ctx.head_loss = None
    inputs = [x for x, need in zip(leaves, ctx.needs_grad, strict=True) if need]
    grads = iter(torch.autograd.grad(loss, inputs, grad_output, keep_graph, allow_unused=True))
    return [next(grads) if need else None for need in ctx.needs_grad]
