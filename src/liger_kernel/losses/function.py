"""The autograd Function under the losses that frameworks subclass."""

from __future__ import annotations

import torch

from liger_kernel.core.op import gradients, keep, kept, kept_inputs
from liger_kernel.ops.head.passes import scaled


class GradientsInForward(torch.autograd.Function):
    """A loss whose gradients are taken in forward, so that the head's weight may be gone in backward.

    A subclass says with ``WHERE`` at which places of ``apply`` the hidden states, the weight and the bias are.
    """

    WHERE = 0, 1, 3

    @classmethod
    def apply(cls, *args):
        if not torch.is_grad_enabled():  # forward couldn't know
            args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        return super().apply(*args)

    @classmethod
    def take(cls, ctx, loss, *tensors):
        """``loss(hidden, weight, bias) -> (loss, *others)`` for ``tensors``; its outputs, and what backward needs."""
        needs = [x is not None and ctx.needs_input_grad[k] for k, x in zip(cls.WHERE, tensors, strict=True)]
        with torch.enable_grad():
            given = [None if x is None else x.detach() for x in tensors]
            wanted = [x.requires_grad_() for x, need in zip(given, needs, strict=True) if need]
            value, *others = loss(*given)
            grads = iter(torch.autograd.grad(value, wanted, allow_unused=True) if wanted else ())
        ctx.where, ctx.loss, ctx.needs = cls.WHERE, loss, needs
        keep(ctx, tuple(next(grads) if need else None for need in needs), tensors)
        return value.detach(), *others

    @staticmethod
    def backward(ctx, g, *_):
        if torch.is_grad_enabled():
            found = gradients(lambda *given: ctx.loss(*given)[0], kept_inputs(ctx, 3), ctx.needs, (g,))
        else:
            found, in_place = kept(ctx, 3)
            found = [None if x is None else scaled(x, g, x.dtype, in_place) for x in found]
        of = dict(zip(ctx.where, found, strict=True))
        return tuple(of.get(k) for k in range(len(ctx.needs_input_grad)))
