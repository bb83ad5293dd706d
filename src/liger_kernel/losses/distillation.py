r"""Distillation losses of a linear head. The student's and the teacher's logits are never all in
memory at once.

    soft = Σ_valid D(P, Q)/n        P, Q: the teacher's and the student's distribution at a temperature T; no factor T²
    hard = Σ_valid -log q(y)/n      at temperature 1
    loss = weight_hard_loss·hard + weight_soft_loss·soft,   n = max(1, valid tokens of the whole batch)

The divergence D is one of `DIVERGENCES`: `forward_kl` (knowledge distillation, arXiv:1503.02531),
`reverse_kl` (arXiv:2306.08543), `jsd` (generalised, arXiv:2306.13649) or `tvd` (arXiv:2307.15190);
or the cosine similarity of the logits. For a teacher with all its classes, the kernels of
`liger_kernel.ops.head.distillation` compute it. For the top k classes of a teacher, `linear_loss`
computes the student's log-probabilities of these classes and of the rest.

The classes accept ``compiled`` and ``chunk_size``, which have no effect: the chunks follow from the
memory, and nothing needs compiling."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from liger_kernel.core import check
from liger_kernel.core.op import F, matrix
from liger_kernel.losses.function import GradientsInForward
from liger_kernel.losses.module import LossModule, without
from liger_kernel.ops.head.distillation import (
    check_divergence,
    frozen_logits,
    linear_distillation,
    take_in_chunks,
)
from liger_kernel.ops.head.divergences import DIVERGENCES, padded
from liger_kernel.ops.head.forward_gradients import gradient_in_forward
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.token_log_probs import check_head, compute_dtype

ROWS = 1024  # tokens in a chunk, if a subclass defines the divergence of their logits


@dataclass(frozen=True)
class Options:
    """What `linear_distillation` is told, under its names."""

    divergence: str | None  # None: that of a subclass
    beta: float
    temperature: float
    weight_hard: float
    weight_soft: float
    ignore_index: int

    def given(self) -> dict:
        """As keywords. (Dynamo of torch 2.11 cannot take the ``vars`` of a frozen dataclass.)"""
        return dict(
            divergence=self.divergence, beta=self.beta, temperature=self.temperature, weight_hard=self.weight_hard,
            weight_soft=self.weight_soft, ignore_index=self.ignore_index,
        )  # fmt: skip

    def checked(self, name):
        check_divergence(name, self.divergence, self.beta, self.temperature)
        check.finite(name, "weight_hard_loss", self.weight_hard)
        check.finite(name, "weight_soft_loss", self.weight_soft)
        check.integer(name, "ignore_index", self.ignore_index)
        return self


# ---- a teacher's top k ----


def with_tail(log_p):
    """Add a class for the rest of the probability: log-probabilities (..., K) -> (..., K + 1), K >
    0.

    It is at least what the rounding of the sum can be. Of the student the rest is summed by
    `linear_loss` instead."""
    top, at = log_p.max(-1, keepdim=True)
    eps, missing = torch.finfo(log_p.dtype).eps, -torch.expm1(top)
    rest = missing - log_p.exp().scatter(-1, at, 0).sum(-1, keepdim=True)
    return torch.cat((log_p, rest.maximum(eps * missing.clamp(min=eps)).log()), -1)


def _of_top_k(student, target, ids, log_p, tail, o, with_hard, head):
    """-> loss, soft, hard, for (N, K) classes of the teacher and their log-probabilities.

    ``student``: hidden states, weight and bias. ``head``: further options of `linear_loss`.
    """
    h, weight, bias = student
    valid = (target != o.ignore_index).to(h.device)
    n, y = valid.sum().clamp(min=1), target.to(ids.device)
    ids = ids.masked_fill((y == o.ignore_index)[:, None], o.ignore_index)
    known = (ids != o.ignore_index).to(h.device)
    log_p = log_p.detach().to(h.device, torch.promote_types(log_p.dtype, torch.float32))
    log_p = log_p.masked_fill(~known, -torch.inf)
    together, K = with_hard and o.temperature == 1, ids.shape[1]
    head, rest_of = dict(ignore_index=o.ignore_index, **head), K if tail else 0
    if rest_of:
        log_p = with_tail(log_p)
        if weight.shape[0] <= K:  # a row may have all classes: then there is no rest
            log_p[:, K:].masked_fill_(known.sum(1, keepdim=True) == weight.shape[0], -torch.inf)

    def of_tokens(part, log_q, _):
        hard = -log_q[:, K].sum() / n if together else log_q.new_zeros(())
        rest, log_q = log_q[:, -1:], log_q[:, :K].masked_fill(~known[part], -torch.inf)
        log_q = torch.cat((log_q, rest), 1) if rest_of else log_q
        soft = (
            DIVERGENCES[o.divergence](log_p[part].to(log_q.dtype), log_q, o.beta)
            .where(valid[part], 0)
            .sum()
            / n
        )
        return o.weight_hard * hard + o.weight_soft * soft, soft, hard

    classes = torch.cat((ids, y[:, None]), 1) if together else ids
    loss, soft, hard = linear_loss(
        of_tokens, h, weight, classes, bias, temperature=o.temperature, rest_of=rest_of, **head
    )
    if with_hard and not together:  # the hard loss has another temperature, so the head runs again
        with torch.set_grad_enabled(torch.is_grad_enabled() and o.weight_hard != 0):
            ce, hard = linear_loss(
                lambda part, log_q, _: (-log_q.sum() / n,) * 2, h, weight, target, bias, **head
            )
        loss = loss + o.weight_hard * ce
    return loss, soft, hard


# ---- any teacher ----


def _flat(name, student_input, target, **others):
    """-> target (N,), then student_input and the others as (N, any), or None if they are None."""
    check.floats(
        name,
        dict(student_input=student_input),
        **{k: x for k, x in others.items() if not k.endswith("ids")},
    )
    check.integers(name, dict(labels=target))
    lead = student_input.shape[:-1]
    if not lead or target.shape != lead:
        raise ValueError(
            f"{name}: the labels have shape {tuple(target.shape)}, give one for each of the student's hidden states: "
            f"{tuple(lead)}"
        )
    for what, x in others.items():
        if x is not None and x.shape[:-1] != lead:
            raise ValueError(
                f"{name}: {what} has shape {tuple(x.shape)}, give a row for each of the student's: {(*lead, '...')}"
            )
    rows = (x if x is None else matrix(x) for x in (student_input, *others.values()))
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
    """Distillation into a linear head from a teacher: its hidden states and head, its logits, or
    its top k classes.

    Args:
        student_input: (..., H) hidden states, fp32, bf16, fp16 or fp64. student_weight,
        student_bias: (V, H) and (V,).
        target: (...) class indices, already shifted: the token that each hidden state predicts, or
        ``ignore_index``.
        teacher_input, teacher_weight, teacher_bias: (..., H_t), (V_t, H_t), (V_t,), the teacher's
        hidden states and
            head. In their place you can give one of the next two.
        teacher_logits: (..., V_t) of any dtype. With more than two dimensions it is copied unless
        it is contiguous.
        teacher_top_k_ids, teacher_top_k_log_probs: (..., K) class indices, and the teacher's
        log-probabilities of them
            at the temperature. An index of ``ignore_index`` means: no class.
        tail: for the top k: add one class, for teacher and student, with the rest of the
        probability. Otherwise only
            the terms of the k classes count.
        divergence: "jsd", "forward_kl", "reverse_kl", "tvd" or "cosine" (not for the top k).
        beta, temperature, accum_dtype, memory, drop_ignored: as in `linear_distillation`.
        weight_hard_loss, weight_soft_loss: with a weight_hard_loss of 0 the hard loss is only
        computed if it is
            returned. For a top k at a temperature other than 1, it costs a second run of the head.
        return_soft_hard_loss: return (loss, soft, hard). The last two have no gradients.

    Returns:
        The loss, 0-d, with gradients for student_input, student_weight and student_bias, which are
        computed in this
        call. `torch.compile` handles it without graph breaks, except for a top k.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit.
    """
    name = "distillation_loss"
    o = Options(
        divergence, beta, temperature, weight_hard_loss, weight_soft_loss, ignore_index
    ).checked(name)
    target, h, teacher, logits, ids, log_p = _flat(
        name,
        student_input,
        target,
        teacher_input=teacher_input,
        teacher_logits=teacher_logits,
        teacher_top_k_ids=teacher_top_k_ids,
        teacher_top_k_log_probs=teacher_top_k_log_probs,
    )
    head = dict(accum_dtype=accum_dtype, memory=memory, drop_ignored=drop_ignored)
    if ids is None and log_p is None:
        if tail:
            raise ValueError(
                f"{name}: tail is for teacher_top_k_ids and teacher_top_k_log_probs, give those"
            )
        outputs = linear_distillation(
            h,
            student_weight,
            target,
            student_bias=student_bias,
            teacher=teacher,
            teacher_weight=teacher_weight,
            teacher_bias=teacher_bias,
            teacher_logits=logits,
            return_hard=return_soft_hard_loss,
            **o.given(),
            **head,
        )
    else:
        if ids is None or log_p is None or ids.shape != log_p.shape:
            shapes = " and ".join(
                "None" if x is None else str(tuple(x.shape)) for x in (ids, log_p)
            )
            raise ValueError(
                f"{name}: teacher_top_k_ids and teacher_top_k_log_probs have shapes {shapes}, give both alike"
            )
        if teacher is not None or logits is not None:
            raise ValueError(
                f"{name}: give one teacher: teacher_input and teacher_weight, teacher_logits, or a top k"
            )
        check.integers(name, dict(teacher_top_k_ids=ids))
        if divergence == "cosine":
            raise ValueError(
                f"{name}: divergence 'cosine' is of logits; for a top k give {', '.join(DIVERGENCES)}"
            )
        student, with_hard = (
            (h, student_weight, student_bias),
            return_soft_hard_loss or weight_hard_loss != 0,
        )
        outputs = _of_top_k(student, target.long(), ids.long(), log_p, tail, o, with_hard, head)
    return outputs if return_soft_hard_loss else outputs[0]


# ---- what frameworks subclass, and what they use ----


class LigerFusedLinearDistillationBase(GradientsInForward):
    """The base of a distillation loss. A subclass defines ``distillation_loss_fn``.

    The subclass's ``forward`` calls ``super().forward(cls=cls, ctx=ctx, ...)``. ``chunk_size`` and
    ``compiled`` have no effect."""

    WHERE = 0, 1, 5
    DIVERGENCE = None  # a divergence that has kernels, in place of distillation_loss_fn

    @staticmethod
    def distillation_loss_fn(
        student_logits, teacher_logits, target, ignore_index, beta, **loss_kwargs
    ):
        """The sum of the divergences of the tokens that are not ignored, 0-d.

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
        """-> loss, or (loss, soft, hard)."""
        name = cls.__name__
        o = Options(
            cls.DIVERGENCE, beta, temperature, weight_hard_loss, weight_soft_loss, ignore_index
        ).checked(name)
        if teacher_input is None or teacher_weight is None:
            raise ValueError(f"{name}: teacher_input or teacher_weight is None, give both")
        y, rows, teacher = _flat(name, student_input, target, teacher_input=teacher_input)
        check_head(name, rows, student_weight, student_bias, y, None)
        check_head(f"{name}'s teacher", teacher, teacher_weight, teacher_bias, y, None)
        if teacher_weight.shape[0] < student_weight.shape[0]:
            classes = f"{teacher_weight.shape[0]} classes and the student {student_weight.shape[0]}"
            raise ValueError(
                f"{name}: the teacher has {classes}; give a teacher with as many or more"
            )
        o = o if compute_ce_loss else replace(o, weight_hard=0)
        with_hard = compute_ce_loss and (weight_hard_loss != 0 or return_soft_hard_loss)

        def fused(h, w, b):
            return linear_distillation(
                matrix(h),
                w,
                y,
                student_bias=b,
                teacher=teacher,
                teacher_weight=teacher_weight,
                teacher_bias=teacher_bias,
                return_hard=with_hard,
                **o.given(),
            )

        def in_chunks(h, w, b):
            of_student = y.to(h.device).long()
            n = (of_student != ignore_index).sum().clamp(min=1)

            def of_chunk(some, x):
                with torch.no_grad():
                    t = frozen_logits(teacher[some], teacher_weight, teacher_bias)
                wide, rest = torch.promote_types(x.dtype, torch.float32), of_student[some]
                x, t = x.to(wide), t.to(wide)
                soft = cls.distillation_loss_fn(
                    padded(x / temperature, t.shape[1]),
                    t / temperature,
                    target=rest,
                    ignore_index=ignore_index,
                    beta=beta,
                    **loss_kwargs,
                )
                hard = x.new_zeros(())
                if with_hard:
                    hard = F.cross_entropy(x, rest, ignore_index=ignore_index, reduction="sum")
                return o.weight_hard * hard + o.weight_soft * soft, soft, hard

            def run(h, w, b, needs):
                return *take_in_chunks(of_chunk, n, h, w, b, needs, ROWS), n

            def reference(h, w, b):
                dtype = compute_dtype(h, w)
                x = F.linear(*(x if x is None else x.to(dtype) for x in (h, w, b)))
                loss, *rest = (x / n for x in of_chunk(slice(None), x))
                return loss, *(x.detach() for x in rest)

            return gradient_in_forward(run, reference, matrix(h), w, b)

        loss = in_chunks if cls.DIVERGENCE is None else fused
        outputs = cls.take(ctx, loss, student_input, student_weight, student_bias)
        if not return_soft_hard_loss:
            return outputs[0]
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs


class LigerFusedLinearJSDFunction(LigerFusedLinearDistillationBase):
    """``apply(student_input, student_weight, teacher_input, teacher_weight, true_labels,
    student_bias, ...)``.

    `LigerFusedLinearJSDLoss` explains the arguments.
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
        arguments = without(locals(), "true_labels") | dict(target=true_labels)
        return LigerFusedLinearDistillationBase.forward(**arguments)


class LigerFusedLinearCosineSimilarityFunction(LigerFusedLinearJSDFunction):
    """`LigerFusedLinearJSDFunction` for `LigerFusedLinearCosineSimilarityLoss`."""

    DIVERGENCE = "cosine"


class LigerFusedLinearJSDLoss(LossModule):
    """``weight_hard_loss``·cross entropy + ``weight_soft_loss``·generalised JSD of a student's and
    a teacher's head.

    Args:
        weight_hard_loss, weight_soft_loss: the factors of the two losses.
        beta: the teacher's share in the mixture. 0 is KL(teacher ‖ student), 1 is KL(student ‖
        teacher).
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
        name, weights = type(self).__name__, (weight_hard_loss, weight_soft_loss)
        Options(self.DIVERGENCE, beta, temperature, *weights, ignore_index).checked(name)

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
        """Hidden states (N, H) and labels (N,), or (B, T, H) and (B, T); weights (V, H), biases
        (V,).

        The teacher may have more classes. There the student's logits are 0.
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
    """`LigerFusedLinearJSDLoss` with ``beta``·(1 - cos) of the two vectors of logits instead of the
    JSD.

    Source: no paper, but liger-kernel. DistilBERT, arXiv:1910.01108, has the cosine of hidden
    states."""

    DIVERGENCE = "cosine"


liger_fused_linear_jsd = LigerFusedLinearJSDFunction.apply
liger_fused_linear_cosine = LigerFusedLinearCosineSimilarityFunction.apply
