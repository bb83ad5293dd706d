r"""Kullback-Leibler divergence of probabilities p from log-probabilities x.

    D = p·(log max(p, eps) - x),   or with y = log p in place of p:   D = p·(y - x)

    dx = -p

Reductions, ignored rows and the kernel are in `rows`.

Source: `torch.nn.functional.kl_div`; as a loss of distillation Hinton et al., arXiv:1503.02531.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_kernel.core import check
from liger_kernel.core.op import CASES
from liger_kernel.ops.head.divergences import kl_div
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


def kl_div_reference(input, target, reduction="mean", log_target=False, eps=1e-10):
    x, y = upcast_rows(input), upcast_rows(target.detach())
    if log_target:
        p = y.exp()
        d = p * (y - x).where(p != 0, 0)
    else:
        d = kl_div(y, x, eps)
    return reduce_divergence(d, None, reduction, None)


class LigerKLDivLossFunction(DivergenceFunction):
    """Autograd Function of `liger_kl_div`. The loss is in fp32."""

    @classmethod
    def checked(cls, y_pred, y_true, *args):
        check_pair(cls.__name__, None, y_pred=y_pred, y_true=y_true)
        return y_pred, y_true, *args

    @staticmethod
    def reference(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10):
        return kl_div_reference(y_pred, y_true, reduction, log_target, eps)

    @staticmethod
    def forward(ctx, y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10):
        return DivergenceFunction.run_forward(
            ctx,
            "LigerKLDivLossFunction",
            (y_pred, y_true),
            "forward_kl" if log_target else "kl",
            eps,
            reduction,
            -100,
            other_arguments=(reduction, log_target, eps),
        )


def liger_kl_div(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> torch.Tensor:
    """Compute KL(target ‖ input), as `torch.nn.functional.kl_div`.

    Args:
        input: (M, V) log-probabilities, fp32, bf16 or fp16.
        target: (M, V) probabilities, or with ``log_target`` their logarithms. It gets no gradient.
        size_average, reduce: True or None: as ``reduction`` says. False: as torch's deprecated
            spellings.
        reduction: "mean" (over all entries), "batchmean" (over the rows), "sum" or "none".
        log_target: target has logarithms.
        eps: the least probability in log target; not used with ``log_target``.

    Returns:
        fp32, 0-d, or (M, V) for "none".

    Raises:
        ValueError: an unknown reduction; shapes that are not two equal (M, V); a negative eps.
        TypeError: a tensor that is not of a floating dtype; eps that is no number.
    """
    name = "liger_kl_div"
    if size_average is False or reduce is False:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    check_reduction(name, reduction)
    check_pair(name, None, input=input, target=target)
    eps = check.non_negative(name, "eps", eps)
    return apply_function(LigerKLDivLossFunction, input, target, reduction, bool(log_target), eps)


class LigerKLDIVLoss(torch.nn.KLDivLoss):
    """`liger_kl_div` as a module: ``eps``, then the arguments of `torch.nn.KLDivLoss`."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = check.non_negative(type(self).__name__, "eps", eps)

    def forward(self, y_pred: torch.Tensor, y_true: torch.Tensor):
        return liger_kl_div(
            y_pred, y_true, reduction=self.reduction, log_target=self.log_target, eps=self.eps
        )


CASES.append(
    make_case(
        "kl_div",
        liger_kl_div,
        kl_div_reference,
        make_inputs(torch.log_softmax, with_labels=False),
        (dict(), dict(reduction="none"), dict(reduction="batchmean", eps=0.1)),
    )
)
