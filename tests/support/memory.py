"""Functions that record whose memory a gradient takes."""

import gc

import torch
from hardware import DEVICE

from liger_kernel.core.overwrite import may_overwrite


class AddressRecorder(torch.autograd.Function):
    """Compute 2·x, as a projection before a GLU might.

    Records in ``seen`` the address of the result ("made") and of its gradient ("gradient").
    """

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


def reuses_memory(seen):
    return seen["gradient"] == seen["made"]


def collect_garbage(loss):
    """Collect garbage, and return ``loss``.

    Triton's interpreter leaves the memory of its arguments in reference cycles. On a GPU there is
    nothing to do. On a CPU what is left is frozen: going through all that was imported takes longer
    than a test.
    """
    gc.collect()
    if DEVICE == "cpu":
        gc.freeze()
    return loss


class Square(torch.autograd.Function):
    """Compute x². Like cross entropy's, its backward writes dx over x if it may.

    ``answers`` records whether it might.
    """

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


def backward_of_sum(out, **kwargs):
    out.sum().backward(**kwargs)
