r"""Total variation distance of rows of probabilities x and y.

    D = ½·|x - y|

    dx = ½·sign(x - y),   0 for a tie

Reductions, ignored rows and the kernel are in `rows`.

Source: Wen et al., f-Divergence Minimization for Sequence-Level Knowledge Distillation,
arXiv:2307.15190."""

from __future__ import annotations

import torch

from liger_kernel.core import check
from liger_kernel.core.op import CASES
from liger_kernel.ops.probability.rows import (
    DivergenceFunction,
    apply_function,
    check_pair,
    check_reduction,
    make_case,
    make_inputs,
    reduce_divergence,
    upcast_rows,
)


def tvd_reference(input, target, shift_labels=None, reduction="mean", ignore_index=-100):
    x = upcast_rows(input, shift_labels, ignore_index)
    y = upcast_rows(target.detach(), shift_labels, ignore_index)
    return reduce_divergence(0.5 * (x - y).abs(), shift_labels, reduction, ignore_index)


class LigerTVDLossFunction(DivergenceFunction):
    """Autograd Function of `liger_tvd`. The loss is in fp32."""

    @staticmethod
    def reference(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
        return tvd_reference(p, q, shift_labels, reduction, ignore_index)

    @staticmethod
    def forward(ctx, p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
        return DivergenceFunction.run_forward(
            ctx,
            "LigerTVDLossFunction",
            (p, q, shift_labels),
            "tvd",
            0.0,
            reduction,
            ignore_index,
            other_arguments=(reduction, ignore_index),
        )


def liger_tvd(
    input: torch.Tensor,
    target: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> torch.Tensor:
    """Compute the total variation distance ``½·Σ|input - target|`` of rows of probabilities.

    Args:
        input: (M, V) probabilities, fp32, bf16 or fp16. Where they equal target, the gradient is 0.
        target: (M, V) probabilities. They get no gradient.
        shift_labels, ignore_index: as in `liger_jsd`.
        reduction: "mean" (over the entries of the rows that count), "batchmean" (over these rows),
            "sum" or "none".

    Returns:
        fp32, 0-d, or (M, V) for "none", 0 in ignored rows. 0 if all rows are ignored.

    Raises:
        ValueError, AssertionError, TypeError: as `liger_jsd`; an unknown reduction.

    Source: arXiv:2307.15190.
    """
    name = "liger_tvd"
    check_reduction(name, reduction)
    labels = check_pair(name, shift_labels, input=input, target=target)
    ignore_index = check.integer(name, "ignore_index", ignore_index)
    return apply_function(LigerTVDLossFunction, input, target, labels, reduction, ignore_index)


class LigerTVDLoss(torch.nn.Module):
    """`liger_tvd` as a module. Its default is the mean over the rows."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        check_reduction(type(self).__name__, reduction)
        self.reduction = reduction
        self.ignore_index = check.integer(type(self).__name__, "ignore_index", ignore_index)

    def forward(self, p: torch.Tensor, q: torch.Tensor, shift_labels: torch.Tensor | None = None):
        return liger_tvd(p, q, shift_labels, self.reduction, self.ignore_index)


CASES.append(
    make_case(
        "tvd",
        liger_tvd,
        tvd_reference,
        make_inputs(torch.softmax),
        (dict(), dict(reduction="none"), dict(reduction="batchmean", shift_labels=None)),
    )
)
