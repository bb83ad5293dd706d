"""The autograd Function under the losses that frameworks subclass."""

from __future__ import annotations

import torch

from liger_kernel.ops.head.forward_gradients import (
    load_gradients,
    store_gradients,
    value_and_gradients,
)


class GradientsInForward(torch.autograd.Function):
    """A loss whose gradients are computed in forward, so that the weight may be gone in backward.

    ``HEAD_ARGUMENTS``: the positions of the hidden states, the weight and the bias among the
    arguments of ``apply``.
    """

    HEAD_ARGUMENTS = 0, 1, 3

    @classmethod
    def apply(cls, *args):
        if not torch.is_grad_enabled():  # forward itself always runs without grad mode
            args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        return super().apply(*args)

    @classmethod
    def compute_with_gradients(cls, ctx, loss_fn, *head):
        """Return the outputs of ``loss_fn(hidden, weight, bias)``; keep the gradients for backward.

        ``head`` are these three tensors. ``loss_fn`` returns (loss, *others); only the loss has
        gradients.
        """
        needs_grad = [
            x is not None and ctx.needs_input_grad[position]
            for position, x in zip(cls.HEAD_ARGUMENTS, head, strict=True)
        ]
        (loss, *others), grads = value_and_gradients(loss_fn, head, needs_grad)
        ctx.head_arguments = cls.HEAD_ARGUMENTS
        store_gradients(ctx, grads, head, needs_grad, lambda *tensors: loss_fn(*tensors)[0])
        return loss.detach(), *others

    @staticmethod
    def backward(ctx, grad_output, *_):
        # a subclass may have no argument at the position of the bias
        head_grads = dict(zip(ctx.head_arguments, load_gradients(ctx, grad_output), strict=True))
        return tuple(head_grads.get(position) for position in range(len(ctx.needs_input_grad)))
