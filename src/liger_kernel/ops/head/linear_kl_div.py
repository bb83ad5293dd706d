r"""KL divergence of probabilities from a linear head's distribution, without its logits in memory.

    log q = log_softmax(h·Wᵀ/T)
    loss = s·Σ_valid Σ_v p_v·(log max(p_v, eps) - log q_v)
    s = 1 ("sum"), 1/n ("batchmean"), 1/(n·V) ("mean")

    dz = -s·(p - q·Σ_v p_v)/T   for the logits z = h·Wᵀ

A row of p need not add up to 1. This is one more divergence of `distillation`, which does the
work: logits are rounded to the weight's dtype (or autocast's), everything after them is in fp32,
and the gradients are computed in forward.

Source: the soft loss of Hinton et al., Distilling the Knowledge in a Neural Network,
arXiv:1503.02531; options and the least probability as in `torch.nn.functional.kl_div` and the
published package."""

from __future__ import annotations

import torch

from liger_kernel.core import check
from liger_kernel.core.op import CASES, Case
from liger_kernel.ops.head.cross_entropy import random_labels
from liger_kernel.ops.head.distillation import (
    Teacher,
    linear_distillation_reference,
    run_distillation,
)
from liger_kernel.ops.head.divergences import DistillationOptions
from liger_kernel.ops.head.linear_jsd import labels_or_default
from liger_kernel.ops.head.token_log_probs import check_head
from liger_kernel.ops.probability.rows import check_reduction


def fused_linear_kl_div_reference(
    student_input,
    student_weight,
    target,
    shift_labels=None,
    reduction="batchmean",
    ignore_index=-100,
    temperature=1.0,
    eps=1e-10,
    accum_dtype=None,
):
    labels = labels_or_default(shift_labels, student_input, ignore_index)
    loss, *_ = linear_distillation_reference(
        student_input,
        student_weight,
        labels,
        teacher_logits=target,
        divergence="kl_div",
        beta=eps,
        temperature=temperature,
        weight_hard=0.0,
        weight_soft=1.0,
        ignore_index=ignore_index,
    )
    return _reduce(loss, reduction, labels, ignore_index, target.shape[1])


def _reduce(loss, reduction, labels, ignore_index, classes):
    """Turn the mean over the rows into the reduction that was asked for."""
    if reduction == "sum":
        return loss * (labels != ignore_index).sum().to(loss.device)
    if reduction == "mean":
        return loss / max(classes, 1)
    return loss


class LigerFusedLinearKLDivFunction:
    """`liger_fused_linear_kl_div` with an ``apply``, as an autograd Function has one."""

    @staticmethod
    def apply(
        student_input,
        student_weight,
        target,
        shift_labels=None,
        reduction="batchmean",
        ignore_index=-100,
        temperature=1.0,
        eps=1e-10,
        accum_dtype=None,
    ):
        return liger_fused_linear_kl_div(
            student_input,
            student_weight,
            target,
            shift_labels,
            reduction,
            ignore_index,
            temperature,
            eps,
            accum_dtype,
        )


def liger_fused_linear_kl_div(
    student_input: torch.Tensor,
    student_weight: torch.Tensor,
    target: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute ``Σ target·(log target - log q)`` of a linear head's distribution q.

    ``q = softmax(student_input @ student_weight.T / temperature)``.

    Args:
        student_input, student_weight: (M, H) hidden states and (V, H), fp32, bf16 or fp16.
        target: (M, V) probabilities. They get no gradient.
        shift_labels: (M,) integers, not shifted here: rows where they are ``ignore_index`` do not
            count. None: all rows count.
        reduction: "batchmean" (over the rows that count), "mean" (over their entries) or "sum".
        ignore_index: see shift_labels.
        temperature: the logits are divided by it.
        eps: the least probability in log target.
        accum_dtype: as in `linear_token_loss`.

    Returns:
        0-d in fp32 (fp64 for fp64). 0 if all rows are ignored.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit.
    """
    name = "liger_fused_linear_kl_div"
    check.floats(
        name, dict(student_input=student_input, student_weight=student_weight, target=target)
    )
    check.integers(name, {}, shift_labels=shift_labels)
    if student_input.dim() == 2:  # otherwise check_head raises
        check.shape(name, "shift_labels", shift_labels, tuple(student_input.shape[:1]))
    ignore_index = check.integer(name, "ignore_index", ignore_index)
    labels = labels_or_default(shift_labels, student_input, ignore_index)
    check_head(name, student_input, student_weight, None, labels, None)
    check.shape(name, "target", target, (student_input.shape[0], student_weight.shape[0]))
    check_options(name, reduction, temperature, eps, accum_dtype)
    options = DistillationOptions(
        divergence="kl_div",
        beta=eps,
        temperature=temperature,
        weight_hard=0.0,
        weight_soft=1.0,
        ignore_index=ignore_index,
    )
    loss, *_ = run_distillation(
        student_input,
        student_weight,
        None,
        labels,
        Teacher(None, None, None, target),
        options,
        with_hard=False,
        accum_dtype=accum_dtype,
    )
    return _reduce(loss, reduction, labels, ignore_index, target.shape[1])


def check_options(name, reduction, temperature, eps, accum_dtype):
    check_reduction(name, reduction, ("batchmean", "mean", "sum"))
    check.positive(name, "temperature", temperature)
    check.non_negative(name, "eps", eps)
    check.dtype(name, "accum_dtype", accum_dtype)


class LigerFusedLinearKLDivLoss(torch.nn.Module):
    """`liger_fused_linear_kl_div` as a module."""

    def __init__(
        self,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_options(name, reduction, temperature, eps, accum_dtype)
        self.reduction = reduction
        self.ignore_index = check.integer(name, "ignore_index", ignore_index)
        self.temperature = temperature
        self.eps = eps
        self.accum_dtype = accum_dtype

    def forward(
        self,
        student_input: torch.Tensor,
        student_weight: torch.Tensor,
        target: torch.Tensor,
        shift_labels: torch.Tensor | None = None,
    ):
        return liger_fused_linear_kl_div(
            student_input,
            student_weight,
            target,
            shift_labels,
            self.reduction,
            self.ignore_index,
            self.temperature,
            self.eps,
            self.accum_dtype,
        )


def _inputs(M, H, V):
    return dict(
        student_input=torch.randn(M, H).requires_grad_(),
        student_weight=(torch.randn(V, H) / H**0.5).requires_grad_(),
        target=torch.randn(M, V).softmax(-1),
        shift_labels=random_labels(M, V),
    )


CASES.append(
    Case(
        "fused_linear_kl_div",
        fn=liger_fused_linear_kl_div,
        reference=fused_linear_kl_div_reference,
        inputs=_inputs,
        shapes=((1, 8, 8), (5, 24, 123), (4, 16, 1030)),
        options=(
            dict(),
            dict(shift_labels=None, reduction="mean", temperature=2.0),
            dict(reduction="sum", eps=0.1),
        ),
        bench=((8192, 4096, 128256),),
        flops=lambda t: 6 * t["student_input"].numel() * t["student_weight"].shape[0],
        fp32_roundings=4,  # as of linear_distillation
    )
)
