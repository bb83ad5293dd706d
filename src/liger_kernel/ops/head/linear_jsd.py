r"""Generalised JSD of a student's and a teacher's linear head, without their logits in memory.

    log Q = log_softmax(h_s·W_sᵀ/T),   log P = log_softmax(h_t·W_tᵀ/T)
    loss = Σ_valid β·KL(P‖M) + (1-β)·KL(Q‖M) / max(1, valid rows),   M = β·P + (1-β)·Q

β = 0 is KL(P‖Q) and β = 1 is KL(Q‖P). There is no factor T². This is the soft loss of
`distillation`, which does the work: logits are rounded to the weight's dtype (or autocast's),
everything after them is in fp32, and the gradients are computed in forward.

Source: Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check
from liger_kernel.core.op import CASES, Case
from liger_kernel.ops.head.cross_entropy import random_labels
from liger_kernel.ops.head.distillation import linear_distillation, linear_distillation_reference
from liger_kernel.ops.head.token_log_probs import check_head


def fused_linear_jsd_reference(
    student_input,
    student_weight,
    teacher_input,
    teacher_weight,
    shift_labels=None,
    jsd_beta=0.5,
    ignore_index=-100,
    temperature=1.0,
    accum_dtype=None,
):
    loss, *_ = linear_distillation_reference(
        student_input,
        student_weight,
        labels_or_default(shift_labels, student_input, ignore_index),
        teacher=teacher_input,
        teacher_weight=teacher_weight,
        beta=jsd_beta,
        temperature=temperature,
        weight_hard=0.0,
        weight_soft=1.0,
        ignore_index=ignore_index,
    )
    return loss


def labels_or_default(shift_labels, rows, ignore_index):
    """Return the labels, or in place of None labels that ignore no row."""
    if shift_labels is not None:
        return shift_labels
    return torch.full(rows.shape[:1], 0 if ignore_index else 1, device=rows.device)


class LigerFusedLinearJSDFunction:
    """`liger_fused_linear_jsd` with an ``apply``, as an autograd Function has one.

    ``jsd_impl`` and ``jsd_mode`` are accepted and change nothing.
    """

    @staticmethod
    def apply(
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        shift_labels=None,
        jsd_beta=0.5,
        ignore_index=-100,
        temperature=1.0,
        accum_dtype=None,
        jsd_impl=None,
        jsd_mode=None,
    ):
        return liger_fused_linear_jsd(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            shift_labels,
            jsd_beta,
            ignore_index,
            temperature,
            accum_dtype,
        )


def liger_fused_linear_jsd(
    student_input: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_input: torch.Tensor,
    teacher_weight: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Generalised JSD of two linear heads at a temperature, averaged over the rows.

    Args:
        student_input, student_weight: (M, H) hidden states and (V, H), fp32, bf16 or fp16.
        teacher_input, teacher_weight: (M, H_t) and (V, H_t). They get no gradient.
        shift_labels: (M,) integers, not shifted here: rows where they are ``ignore_index`` do not
            count. None: all rows count.
        jsd_beta: the teacher's share in the mixture. 0 is KL(teacher ‖ student), 1 is
            KL(student ‖ teacher).
        ignore_index: see shift_labels.
        temperature: the logits of both are divided by it.
        accum_dtype: as in `linear_token_loss`.

    Returns:
        0-d in fp32 (fp64 for fp64). 0 if all rows are ignored.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit.

    Source: arXiv:2306.13649.
    """
    name = "liger_fused_linear_jsd"
    check.floats(
        name,
        dict(
            student_input=student_input,
            student_weight=student_weight,
            teacher_weight=teacher_weight,
        ),
    )
    check.integers(name, {}, shift_labels=shift_labels)
    if student_input.dim() == 2:  # otherwise check_head raises
        check.shape(name, "shift_labels", shift_labels, tuple(student_input.shape[:1]))
    target = labels_or_default(shift_labels, student_input, ignore_index)
    check_head(name, student_input, student_weight, None, target, None)
    jsd_beta = check.fraction(name, "jsd_beta", jsd_beta)
    if student_weight.shape[:1] != teacher_weight.shape[:1]:
        classes = f"{tuple(student_weight.shape)} and {tuple(teacher_weight.shape)}"
        raise ValueError(
            f"{name}: student_weight and teacher_weight have shapes {classes}, give as many classes"
        )
    loss, *_ = linear_distillation(
        student_input,
        student_weight,
        target,
        teacher=teacher_input,
        teacher_weight=teacher_weight,
        beta=jsd_beta,
        temperature=temperature,
        weight_hard=0.0,
        weight_soft=1.0,
        ignore_index=ignore_index,
        accum_dtype=accum_dtype,
    )
    return loss


class LigerFusedLinearJSD(torch.nn.Module):
    """`liger_fused_linear_jsd` as a module."""

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.jsd_beta = check.fraction(name, "jsd_beta", jsd_beta)
        self.ignore_index = check.integer(name, "ignore_index", ignore_index)
        self.temperature = check.positive(name, "temperature", temperature)
        check.dtype(name, "accum_dtype", accum_dtype)
        self.accum_dtype = accum_dtype

    def forward(
        self,
        student_input: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_input: torch.Tensor,
        teacher_weight: torch.Tensor,
        shift_labels: torch.Tensor | None,
    ):
        return liger_fused_linear_jsd(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            shift_labels,
            self.jsd_beta,
            self.ignore_index,
            self.temperature,
            self.accum_dtype,
        )


def _inputs(M, H, V):
    return dict(
        student_input=torch.randn(M, H).requires_grad_(),
        student_weight=(torch.randn(V, H) / H**0.5).requires_grad_(),
        teacher_input=torch.randn(M, H),
        teacher_weight=torch.randn(V, H) / H**0.5,
        shift_labels=random_labels(M, V),
    )


CASES.append(
    Case(
        "fused_linear_jsd",
        fn=liger_fused_linear_jsd,
        reference=fused_linear_jsd_reference,
        inputs=_inputs,
        shapes=((1, 8, 8), (5, 24, 123), (4, 16, 1030)),
        options=(dict(), dict(shift_labels=None, jsd_beta=0.0, temperature=2.0)),
        bench=((8192, 4096, 128256),),
        flops=lambda t: 8 * t["student_input"].numel() * t["student_weight"].shape[0],
        fp32_roundings=4,  # as of linear_distillation
    )
)
