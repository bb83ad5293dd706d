"""The autograd Function under the losses that frameworks subclass."""

from __future__ import annotations

import torch

from liger_kernel.ops.head.forward_gradients import store, stored, value_and_gradients


class GradientsInForward(torch.autograd.Function):
    """A loss whose gradients are computed in forward, so that the head's weight may be gone in
    backward.

    ``WHERE`` says at which places of ``apply`` the hidden states, the weight and the bias are.
    """

    WHERE = 0, 1, 3

    @classmethod
    def apply(cls, *args):
        if not torch.is_grad_enabled():  # forward couldn't know
            args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        return super().apply(*args)

    @classmethod
    def take(cls, ctx, loss, *tensors):
        """The outputs of ``loss(hidden, weight, bias) -> (loss, *others)`` for ``tensors``;
        backward needs no more."""
        needs = [
            x is not None and ctx.needs_input_grad[k]
            for k, x in zip(cls.WHERE, tensors, strict=True)
        ]
        (value, *others), grads = value_and_gradients(loss, tensors, needs)
        ctx.where = cls.WHERE
        store(ctx, grads, tensors, needs, lambda *given: loss(*given)[0])
        return value.detach(), *others

    @staticmethod
    def backward(ctx, g, *_):
        of = dict(zip(ctx.where, stored(ctx, g), strict=True))
        return tuple(of.get(k) for k in range(len(ctx.needs_input_grad)))
