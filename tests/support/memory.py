"""Whose memory a gradient takes: functions that note it."""

import gc

import torch

from liger_kernel.core.op import may_overwrite


class Source(torch.autograd.Function):
    """2·x, noting where the result lies and where its gradient arrives: what a projection before
    the GLU does."""

    @staticmethod
    def forward(ctx, x, seen):
        y = 2 * x
        ctx.seen = seen
        seen["made"] = y.data_ptr()
        return y

    @staticmethod
    def backward(ctx, dy):
        ctx.seen["gradient"] = dy.data_ptr()
        return 2 * dy, None


def reused(seen):
    return seen["gradient"] == seen["made"]


def collect(loss):
    """Triton's interpreter leaves the memory of its arguments in reference cycles; on a GPU there
    is nothing to do."""
    gc.collect()
    return loss


class Square(torch.autograd.Function):
    """x², whose backward writes dx over x where it may, as cross entropy does, and notes the
    answer."""

    answers = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        Square.answers.append(may_overwrite(ctx, x))
        if not Square.answers[-1]:
            return 2 * x * dy
        x.copy_(2 * x * dy)
        torch.autograd.graph.increment_version(x)
        return x


def backward(out, **kwargs):
    out.sum().backward(**kwargs)
