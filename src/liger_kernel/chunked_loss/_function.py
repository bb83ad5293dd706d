"""The autograd Function under the losses that frameworks subclass."""

from __future__ import annotations

import torch


class GradientsInForward(torch.autograd.Function):
    """A loss whose gradients are taken in forward, so that the head's weight may be gone in backward.

    A subclass says with ``WHERE`` at which places of ``apply`` the hidden states, the weight and the bias are.
    """

    WHERE = 0, 1, 3

    @classmethod
    def take(cls, ctx, loss, *tensors):
        """``loss(hidden, weight, bias) -> (loss, *others)`` for ``tensors``; its outputs, and what backward needs."""
        needs = [x is not None and ctx.needs_input_grad[k] for k, x in zip(cls.WHERE, tensors, strict=True)]
        with torch.enable_grad():
            given = [None if x is None else x.detach() for x in tensors]
            wanted = [x.requires_grad_() for x, need in zip(given, needs, strict=True) if need]
            value, *others = loss(*given)
            grads = iter(torch.autograd.grad(value, wanted, allow_unused=True) if wanted else ())
        ctx.where = cls.WHERE
        ctx.save_for_backward(*(next(grads) if need else None for need in needs))
        return value.detach(), *others

    @staticmethod
    def backward(ctx, g, *_):
        given = dict(zip(ctx.where, ctx.saved_tensors, strict=True))
        return tuple(None if given.get(k) is None else given[k] * g for k in range(len(ctx.needs_input_grad)))
