r"""Distillation losses of a linear head, without the student's or the teacher's logits in memory.

    soft = Σ_valid D(P, Q)/n        P, Q: the teacher's and the student's distribution at a
                                    temperature T; there is no factor T²
    hard = Σ_valid -log q(y)/n      at temperature 1
    loss = weight_hard_loss·hard + weight_soft_loss·soft
    n = max(1, valid tokens of the whole batch)

The divergence D is one of `DIVERGENCES`: `forward_kl` (knowledge distillation, arXiv:1503.02531),
`reverse_kl` (arXiv:2306.08543), `jsd` (generalised, arXiv:2306.13649) or `tvd` (arXiv:2307.15190);
or the cosine similarity of the logits. For a teacher with all its classes, the kernels of
`liger_kernel.ops.head.distillation` compute it. For the top k classes of a teacher, `linear_loss`
computes the student's log-probabilities of these classes and of the rest.

The classes accept ``compiled`` and ``chunk_size``, which have no effect: the chunks follow from the
memory, and nothing needs compiling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from liger_kernel.core import check
from liger_kernel.core.op import F, flatten_to_2d
from liger_kernel.losses.function import GradientsInForward
from liger_kernel.losses.module import LossModule, without
from liger_kernel.ops.head.distillation import (
    check_divergence,
    distill_in_chunks,
    frozen_logits,
    linear_distillation,
)
from liger_kernel.ops.head.divergences import DIVERGENCES, pad_classes
from liger_kernel.ops.head.forward_gradients import gradient_in_forward
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.token_log_probs import check_head, compute_dtype

CHUNK_TOKENS = 1024  # if a subclass defines the divergence of their logits


@dataclass(frozen=True)
class DistillationLossOptions:
    """Options of `linear_distillation`, under its names. ``divergence`` None: a subclass's."""

    divergence: str | None
    beta: float
    temperature: float
    weight_hard: float
    weight_soft: float
    ignore_index: int

    def as_keywords(self) -> dict:
        # Dynamo of torch 2.11 cannot take the `vars` of a frozen dataclass
        return {
            "divergence": self.divergence,
            "beta": self.beta,
            "temperature": self.temperature,
            "weight_hard": self.weight_hard,
            "weight_soft": self.weight_soft,
            "ignore_index": self.ignore_index,
        }

    def validated(self, name):
        """Return these options. Raise an error that begins with ``name`` if one does not fit."""
        check_divergence(name, self.divergence, self.beta, self.temperature)
        check.finite(name, "weight_hard_loss", self.weight_hard)
        check.finite(name, "weight_soft_loss", self.weight_soft)
        check.integer(name, "ignore_index", self.ignore_index)
        return self


# ---- a teacher's top k ----


def with_tail(log_p):
    """Add a class for the rest of the probability to log-probabilities: (..., K) -> (..., K + 1).

    K > 0. The rest is at least the rounding error of the sum. The student's rest is summed by
    `linear_loss` instead.
    """
    eps = torch.finfo(log_p.dtype).eps
    top, index = log_p.max(-1, keepdim=True)
    missing = -torch.expm1(top)
    rest = missing - log_p.exp().scatter(-1, index, 0).sum(-1, keepdim=True)
    return torch.cat((log_p, rest.maximum(eps * missing.clamp(min=eps)).log()), -1)


class TopK(NamedTuple):
    """The top k classes of a teacher for each token."""

    ids: torch.Tensor  # (N, K)
    log_probs: torch.Tensor  # (N, K)
    tail: bool  # add a class for the rest of the probability


def _top_k_loss(student, target, top_k, options, with_hard, head_options):
    """Return loss, soft and hard for the top k classes of a teacher.

    ``student``: hidden states, weight and bias. ``head_options``: further options of `linear_loss`.
    """
    hidden, weight, bias = student
    ids, log_p, tail = top_k
    ignore_index = options.ignore_index
    head_options = dict(ignore_index=ignore_index, **head_options)
    K = ids.shape[1]
    rest_of = K if tail else 0
    valid = (target != ignore_index).to(hidden.device)
    num_valid = valid.sum().clamp(min=1)
    target_beside_ids = target.to(ids.device)
    ids = ids.masked_fill((target_beside_ids == ignore_index)[:, None], ignore_index)
    has_class = (ids != ignore_index).to(hidden.device)
    log_p = log_p.detach().to(hidden.device, torch.promote_types(log_p.dtype, torch.float32))
    log_p = log_p.masked_fill(~has_class, -torch.inf)
    if rest_of:
        log_p = with_tail(log_p)
        if weight.shape[0] <= K:  # a row may have all classes: then there is no rest
            has_all = has_class.sum(1, keepdim=True) == weight.shape[0]
            log_p[:, K:].masked_fill_(has_all, -torch.inf)

    # The hard loss has temperature 1: at another one of the soft loss, the head runs again for it.
    in_one_run = with_hard and options.temperature == 1
    classes = torch.cat((ids, target_beside_ids[:, None]), 1) if in_one_run else ids

    def soft_and_hard(tokens, log_probs, _):
        log_q = log_probs[:, :K].masked_fill(~has_class[tokens], -torch.inf)
        if rest_of:
            log_q = torch.cat((log_q, log_probs[:, -1:]), 1)
        divergence = DIVERGENCES[options.divergence](
            log_p[tokens].to(log_q.dtype), log_q, options.beta
        )
        soft = divergence.where(valid[tokens], 0).sum() / num_valid
        if in_one_run:
            hard = -log_probs[:, K].sum() / num_valid
        else:
            hard = log_probs.new_zeros(())
        return options.weight_hard * hard + options.weight_soft * soft, soft, hard

    loss, soft, hard = linear_loss(
        soft_and_hard,
        hidden,
        weight,
        classes,
        bias,
        temperature=options.temperature,
        rest_of=rest_of,
        **head_options,
    )
    if with_hard and not in_one_run:

        def cross_entropy(tokens, log_probs, _):
            value = -log_probs.sum() / num_valid
            return value, value

        with torch.set_grad_enabled(torch.is_grad_enabled() and options.weight_hard != 0):
            hard_with_gradient, hard = linear_loss(
                cross_entropy, hidden, weight, target, bias, **head_options
            )
        loss = loss + options.weight_hard * hard_with_gradient
    return loss, soft, hard


# ---- any teacher ----


def _flatten_rows(name, student_input, target, **teacher_tensors):
    """Return target (N,), then student_input and the teacher's tensors as (N, any), or None."""
    teacher_floats = {k: x for k, x in teacher_tensors.items() if not k.endswith("ids")}
    check.floats(name, dict(student_input=student_input), **teacher_floats)
    check.integers(name, dict(labels=target))
    leading_shape = student_input.shape[:-1]
    if not leading_shape or target.shape != leading_shape:
        raise ValueError(
            f"{name}: the labels have shape {tuple(target.shape)}, "
            f"give one for each of the student's hidden states: {tuple(leading_shape)}"
        )
    for argument, x in teacher_tensors.items():
        if x is not None and x.shape[:-1] != leading_shape:
            raise ValueError(
                f"{name}: {argument} has shape {tuple(x.shape)}, "
                f"give a row for each of the student's: {(*leading_shape, '...')}"
            )
    tensors = (student_input, *teacher_tensors.values())
    rows = (x if x is None else flatten_to_2d(x) for x in tensors)
    return target.reshape(-1), *rows


def distillation_loss(
    student_input,
    student_weight,
    target,
    *,
    student_bias=None,
    teacher_input=None,
    teacher_weight=None,
    teacher_bias=None,
    teacher_logits=None,
    teacher_top_k_ids=None,
    teacher_top_k_log_probs=None,
    tail=False,
    divergence="jsd",
    beta=0.5,
    temperature=1.0,
    weight_hard_loss=0.5,
    weight_soft_loss=0.5,
    ignore_index=-100,
    return_soft_hard_loss=False,
    accum_dtype=None,
    memory="auto",
    drop_ignored=None,
):
    """Distill a teacher into a linear head.

    The teacher is given by its hidden states and head, its logits, or its top k classes.

    Args:
        student_input: (..., H) hidden states, fp32, bf16, fp16 or fp64.
        student_weight, student_bias: (V, H) and (V,).
        target: (...) class indices, already shifted: the token that each hidden state predicts, or
            ``ignore_index``.
        teacher_input, teacher_weight, teacher_bias: (..., H_t), (V_t, H_t), (V_t,), the teacher's
            hidden states and head. In their place you can give one of the next two.
        teacher_logits: (..., V_t) of any dtype. With more than two dimensions it is copied unless
            it is contiguous.
        teacher_top_k_ids, teacher_top_k_log_probs: (..., K) class indices, and the teacher's
            log-probabilities of them at the temperature. An index of ``ignore_index`` means: no
            class.
        tail: for the top k: add one class, for teacher and student, with the rest of the
            probability. Otherwise only the terms of the k classes count.
        divergence: "jsd", "forward_kl", "reverse_kl", "tvd" or "cosine" (not for the top k).
        beta, temperature, accum_dtype, memory, drop_ignored: as in `linear_distillation`.
        weight_hard_loss, weight_soft_loss: with a weight_hard_loss of 0 the hard loss is only
            computed if it is returned. For a top k at a temperature other than 1, it costs a second
            run of the head.
        return_soft_hard_loss: return (loss, soft, hard). The last two have no gradients.

    Returns:
        The loss, 0-d, with gradients for student_input, student_weight and student_bias, which are
        computed in this call. `torch.compile` handles it without graph breaks, except for a top k.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit.
    """
    name = "distillation_loss"
    options = DistillationLossOptions(
        divergence, beta, temperature, weight_hard_loss, weight_soft_loss, ignore_index
    ).validated(name)
    target, hidden, teacher, logits, ids, log_p = _flatten_rows(
        name,
        student_input,
        target,
        teacher_input=teacher_input,
        teacher_logits=teacher_logits,
        teacher_top_k_ids=teacher_top_k_ids,
        teacher_top_k_log_probs=teacher_top_k_log_probs,
    )
    head_options = dict(accum_dtype=accum_dtype, memory=memory, drop_ignored=drop_ignored)
    if ids is None and log_p is None:
        if tail:
            raise ValueError(
                f"{name}: tail is for teacher_top_k_ids and teacher_top_k_log_probs, give those"
            )
        outputs = linear_distillation(
            hidden,
            student_weight,
            target,
            student_bias=student_bias,
            teacher=teacher,
            teacher_weight=teacher_weight,
            teacher_bias=teacher_bias,
            teacher_logits=logits,
            return_hard=return_soft_hard_loss,
            **options.as_keywords(),
            **head_options,
        )
    else:
        if ids is None or log_p is None or ids.shape != log_p.shape:
            shapes = ["None" if x is None else str(tuple(x.shape)) for x in (ids, log_p)]
            raise ValueError(
                f"{name}: teacher_top_k_ids and teacher_top_k_log_probs have shapes "
                f"{' and '.join(shapes)}, give both alike"
            )
        if teacher is not None or logits is not None:
            raise ValueError(
                f"{name}: give one teacher: teacher_input and teacher_weight, teacher_logits, "
                "or a top k"
            )
        check.integers(name, dict(teacher_top_k_ids=ids))
        if divergence == "cosine":
            raise ValueError(
                f"{name}: divergence 'cosine' is of logits; "
                f"for a top k give {', '.join(DIVERGENCES)}"
            )
        outputs = _top_k_loss(
            (hidden, student_weight, student_bias),
            target.long(),
            TopK(ids.long(), log_p, tail),
            options,
            return_soft_hard_loss or weight_hard_loss != 0,
            head_options,
        )
    return outputs if return_soft_hard_loss else outputs[0]


# ---- what frameworks subclass, and what they use ----


class LigerFusedLinearDistillationBase(GradientsInForward):
    """The base of a distillation loss. A subclass defines ``distillation_loss_fn``.

    The subclass's ``forward`` calls ``super().forward(cls=cls, ctx=ctx, ...)``. ``chunk_size`` and
    ``compiled`` have no effect.

    ``DIVERGENCE``: a divergence that has kernels, in place of distillation_loss_fn.
    """

    HEAD_ARGUMENTS = 0, 1, 5
    DIVERGENCE = None

    @staticmethod
    def distillation_loss_fn(
        student_logits, teacher_logits, target, ignore_index, beta, **loss_kwargs
    ):
        """Return the sum of the divergences of the tokens that are not ignored, 0-d.

        The logits (tokens, V) are already divided by the temperature.
        """
        raise NotImplementedError("give distillation_loss_fn in a subclass")

    @staticmethod
    def forward(
        cls,
        ctx,
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        target,
        student_bias=None,
        teacher_bias=None,
        chunk_size=1024,
        ignore_index=-100,
        weight_hard_loss=0.5,
        weight_soft_loss=0.5,
        beta=0.5,
        compute_ce_loss=True,
        temperature=1.0,
        compiled=True,
        return_soft_hard_loss=False,
        **loss_kwargs,
    ):
        """Return the loss, or (loss, soft, hard)."""
        name = cls.__name__
        options = DistillationLossOptions(
            cls.DIVERGENCE, beta, temperature, weight_hard_loss, weight_soft_loss, ignore_index
        ).validated(name)
        if teacher_input is None or teacher_weight is None:
            raise ValueError(f"{name}: teacher_input or teacher_weight is None, give both")
        y, student, teacher = _flatten_rows(
            name, student_input, target, teacher_input=teacher_input
        )
        check_head(name, student, student_weight, student_bias, y, None)
        check_head(f"{name}'s teacher", teacher, teacher_weight, teacher_bias, y, None)
        if teacher_weight.shape[0] < student_weight.shape[0]:
            raise ValueError(
                f"{name}: the teacher has {teacher_weight.shape[0]} classes and the student "
                f"{student_weight.shape[0]}; give a teacher with as many or more"
            )
        if not compute_ce_loss:
            options = replace(options, weight_hard=0)
        with_hard = compute_ce_loss and (weight_hard_loss != 0 or return_soft_hard_loss)

        def with_kernels(h, w, b):
            return linear_distillation(
                flatten_to_2d(h),
                w,
                y,
                student_bias=b,
                teacher=teacher,
                teacher_weight=teacher_weight,
                teacher_bias=teacher_bias,
                return_hard=with_hard,
                **options.as_keywords(),
            )

        def in_chunks(h, w, b):
            labels = y.to(h.device).long()
            num_valid = (labels != ignore_index).sum().clamp(min=1)

            def chunk_sums(rows, logits):
                """Return the sums of loss, soft and hard over these rows."""
                with torch.no_grad():
                    teacher_logits = frozen_logits(teacher[rows], teacher_weight, teacher_bias)
                dtype = torch.promote_types(logits.dtype, torch.float32)
                logits = logits.to(dtype)
                teacher_logits = teacher_logits.to(dtype)
                soft = cls.distillation_loss_fn(
                    pad_classes(logits / temperature, teacher_logits.shape[1]),
                    teacher_logits / temperature,
                    target=labels[rows],
                    ignore_index=ignore_index,
                    beta=beta,
                    **loss_kwargs,
                )
                hard = logits.new_zeros(())
                if with_hard:
                    hard = F.cross_entropy(
                        logits, labels[rows], ignore_index=ignore_index, reduction="sum"
                    )
                return options.weight_hard * hard + options.weight_soft * soft, soft, hard

            def run(h, w, b, needs):
                outputs, grads = distill_in_chunks(
                    chunk_sums, num_valid, h, w, b, needs, CHUNK_TOKENS
                )
                return outputs, grads, num_valid

            def reference(h, w, b):
                dtype = compute_dtype(h, w)
                logits = F.linear(*(x if x is None else x.to(dtype) for x in (h, w, b)))
                loss, soft, hard = (x / num_valid for x in chunk_sums(slice(None), logits))
                return loss, soft.detach(), hard.detach()

            return gradient_in_forward(run, reference, flatten_to_2d(h), w, b)

        outputs = cls.compute_with_gradients(
            ctx,
            in_chunks if cls.DIVERGENCE is None else with_kernels,
            student_input,
            student_weight,
            student_bias,
        )
        if not return_soft_hard_loss:
            return outputs[0]
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs


class LigerFusedLinearJSDFunction(LigerFusedLinearDistillationBase):
    """`LigerFusedLinearJSDLoss` as a Function.

    ``apply(student_input, student_weight, teacher_input, teacher_weight, true_labels, ...)``.
    """

    DIVERGENCE = "jsd"

    @classmethod
    def forward(
        cls,
        ctx,
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        true_labels,
        student_bias=None,
        teacher_bias=None,
        weight_hard_loss=0.5,
        weight_soft_loss=0.5,
        beta=0.5,
        ignore_index=-100,
        temperature=1.0,
        compiled=True,
        chunk_size=1024,
        return_soft_hard_loss=False,
    ):
        arguments = without(locals(), "true_labels")
        return LigerFusedLinearDistillationBase.forward(**arguments, target=true_labels)


class LigerFusedLinearCosineSimilarityFunction(LigerFusedLinearJSDFunction):
    """`LigerFusedLinearJSDFunction` for `LigerFusedLinearCosineSimilarityLoss`."""

    DIVERGENCE = "cosine"


class LigerFusedLinearJSDLoss(LossModule):
    """``weight_hard_loss``·cross entropy + ``weight_soft_loss``·generalised JSD of two heads.

    Args:
        weight_hard_loss, weight_soft_loss: the factors of the two losses.
        beta: the teacher's share in the mixture. 0 is KL(teacher ‖ student), 1 is
            KL(student ‖ teacher).
        ignore_index: labels with this value are left out.
        temperature: in the JSD, the logits of both are divided by it.
        compiled, chunk_size: no effect.
        return_soft_hard_loss: return (loss, soft, hard).
        memory, drop_ignored: as in `linear_distillation`.

    Raises:
        ValueError, TypeError: an option that does not fit; shapes and dtypes as in
        `distillation_loss`.

    Source: Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649.
    """

    DIVERGENCE = "jsd"

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
        *,
        memory: int | str = "auto",
        drop_ignored: bool | None = None,
    ) -> None:
        super().__init__(locals())
        options = DistillationLossOptions(
            self.DIVERGENCE, beta, temperature, weight_hard_loss, weight_soft_loss, ignore_index
        )
        options.validated(type(self).__name__)

    def forward(
        self,
        student_input: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_input: torch.Tensor,
        teacher_weight: torch.Tensor,
        true_labels: torch.Tensor,
        student_bias: torch.Tensor | None = None,
        teacher_bias: torch.Tensor | None = None,
    ):
        """Compute the loss. The teacher may have more classes: there the student's logits are 0.

        Shapes: hidden states (N, H) and labels (N,), or (B, T, H) and (B, T); weights (V, H),
        biases (V,).
        """
        return distillation_loss(
            student_input,
            student_weight,
            true_labels,
            student_bias=student_bias,
            teacher_input=teacher_input,
            teacher_weight=teacher_weight,
            teacher_bias=teacher_bias,
            divergence=self.DIVERGENCE,
            **self.options,
        )


class LigerFusedLinearCosineSimilarityLoss(LigerFusedLinearJSDLoss):
    """`LigerFusedLinearJSDLoss` with ``beta``·(1 - cos) of the logits in place of the JSD.

    Source: no paper, but liger-kernel. DistilBERT, arXiv:1910.01108, has the cosine of hidden
    states.
    """

    DIVERGENCE = "cosine"


liger_fused_linear_jsd = LigerFusedLinearJSDFunction.apply
liger_fused_linear_cosine = LigerFusedLinearCosineSimilarityFunction.apply
