r"""Total variation distance of rows of probabilities x and y.

    D = ½·|x - y|

    dx = ½·sign(x - y),   0 for a tie

Reductions, ignored rows and the kernel stand in `rows`.

Source: Wen et al., f-Divergence Minimization for Sequence-Level Knowledge Distillation,
arXiv:2307.15190."""

from __future__ import annotations

import torch

from liger_kernel.core import check
from liger_kernel.core.op import CASES
from liger_kernel.ops.probability.rows import (
    DivergenceFunction,
    applied,
    case_of,
    check_pair,
    check_reduction,
    inputs_of,
    reduced,
    wide,
)


def tvd_reference(input, target, shift_labels=None, reduction="mean", ignore_index=-100):
    x, y = (wide(t, shift_labels, ignore_index) for t in (input, target.detach()))
    return reduced(0.5 * (x - y).abs(), shift_labels, reduction, ignore_index)


class LigerTVDLossFunction(DivergenceFunction):
    """``apply(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100) -> loss``, in
    fp32."""

    @staticmethod
    def reference(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
        return tvd_reference(p, q, shift_labels, reduction, ignore_index)

    @staticmethod
    def forward(ctx, p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
        rest, name = (reduction, ignore_index), "LigerTVDLossFunction"
        return DivergenceFunction.save(
            ctx, name, (p, q, shift_labels), "tvd", 0.0, reduction, ignore_index, rest
        )


def liger_tvd(
    input: torch.Tensor,
    target: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> torch.Tensor:
    """Total variation distance ``½·Σ|input - target|`` of rows of probabilities.

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
    return applied(LigerTVDLossFunction, input, target, labels, reduction, ignore_index)


class LigerTVDLoss(torch.nn.Module):
    """`liger_tvd` as a module, with another default: the mean over the rows."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        check_reduction(type(self).__name__, reduction)
        self.reduction = reduction
        self.ignore_index = check.integer(type(self).__name__, "ignore_index", ignore_index)

    def forward(self, p: torch.Tensor, q: torch.Tensor, shift_labels: torch.Tensor | None = None):
        return liger_tvd(p, q, shift_labels, self.reduction, self.ignore_index)


CASES.append(
    case_of(
        "tvd",
        liger_tvd,
        tvd_reference,
        inputs_of(torch.softmax),
        (dict(), dict(reduction="none"), dict(reduction="batchmean", shift_labels=None)),
    )
)
