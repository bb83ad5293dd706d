r"""Distillation losses of a linear head, whose logits and whose teacher's are never all in memory.

    soft = Σ_valid D(P, Q)/n        P, Q: the teacher's and the student's distribution at a temperature; no T²
    hard = Σ_valid -log q(y)/n      at temperature 1
    loss = weight_hard_loss·hard + weight_soft_loss·soft,   n = max(1, valid tokens of the whole batch)

The divergences D are plain functions of log-probabilities (`DIVERGENCES`): `forward_kl` (knowledge distillation,
arXiv:1503.02531), `reverse_kl` (arXiv:2306.08543), `jsd` (generalised, arXiv:2306.13649), `tvd` (arXiv:2307.15190), and
cosine similarity of the logits. With a whole teacher the kernels of `liger_kernel.ops.head.distillation` compute
them; with the top k of a teacher's classes, `linear_loss` gives the student's log-probabilities of those.

In the classes ``compiled`` and ``chunk_size`` are accepted and choose nothing: how much is computed at once follows
from the memory, and nothing needs compiling.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check
from liger_kernel.core.op import F
from liger_kernel.losses.function import GradientsInForward
from liger_kernel.ops.head.distillation import (
    DIVERGENCES,
    check_divergence,
    frozen_logits,
    linear_distillation,
    padded,
    take_in_chunks,
)
from liger_kernel.ops.head.grouped_loss import linear_loss, taken
from liger_kernel.ops.head.token_log_probs import check_head, compute_dtype

ROWS = 1024  # tokens of a chunk where a subclass gives the divergence of their logits


def _check_weights(name, weight_hard_loss, weight_soft_loss, ignore_index):
    check.finite(name, "weight_hard_loss", weight_hard_loss)
    check.finite(name, "weight_soft_loss", weight_soft_loss)
    check.integer(name, "ignore_index", ignore_index)


# ---- a teacher's top k ----


def with_tail(log_p):
    """One more class that has the mass which the others leave: log-probabilities (..., K) -> (..., K + 1)."""
    mass = log_p.exp().sum(-1, keepdim=True)
    return torch.cat((log_p, torch.log1p(-mass.clamp(max=1 - torch.finfo(log_p.dtype).eps))), -1)


def _of_top_k(
    h, weight, bias, target, ids, log_p, tail, divergence, beta, temperature, weights, ignore_index, with_hard, options
):  # fmt: skip
    """-> loss, soft, hard for (N, K) classes of the teacher and their log-probabilities."""
    valid = (target != ignore_index).to(h.device)
    n, y = valid.sum().clamp(min=1), target.to(ids.device)
    ids = ids.masked_fill((y == ignore_index)[:, None], ignore_index)
    known = (ids != ignore_index).to(h.device)
    log_p = log_p.detach().to(h.device, torch.promote_types(log_p.dtype, torch.float32))
    log_p = log_p.masked_fill(~known, -torch.inf)
    together = with_hard and temperature == 1
    options = dict(ignore_index=ignore_index, **options)

    def of_tokens(part, log_q, _):
        hard = -log_q[:, -1].sum() / n if together else log_q.new_zeros(())
        log_q = log_q[:, : ids.shape[1]].masked_fill(~known[part], -torch.inf)
        both = log_p[part].to(log_q.dtype), log_q
        both = [with_tail(x) for x in both] if tail else both
        soft = DIVERGENCES[divergence](*both, beta).where(valid[part], 0).sum() / n
        return weights[0] * hard + weights[1] * soft, soft, hard

    classes = torch.cat((ids, y[:, None]), 1) if together else ids
    loss, soft, hard = linear_loss(of_tokens, h, weight, classes, bias, temperature=temperature, **options)
    if with_hard and not together:  # at another temperature: once more through the head
        with torch.set_grad_enabled(torch.is_grad_enabled() and weights[0] != 0):
            ce, hard = linear_loss(lambda part, log_q, _: (-log_q.sum() / n,) * 2, h, weight, target, bias, **options)
        loss = loss + weights[0] * ce
    return loss, soft, hard


# ---- any teacher ----


def _flat(name, student_input, target, **others):
    """(..., H) and (...) as rows; each of ``others`` (..., any), None stays."""
    check.floats(name, dict(student_input=student_input), **{k: x for k, x in others.items() if not k.endswith("ids")})
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
    rows = (x if x is None else x.reshape(-1, x.shape[-1]) for x in (student_input, *others.values()))
    return target.reshape(-1), *rows


def distillation_loss(
    student_input, student_weight, target, *, student_bias=None, teacher_input=None, teacher_weight=None,
    teacher_bias=None, teacher_logits=None, teacher_top_k_ids=None, teacher_top_k_log_probs=None, tail=False,
    divergence="jsd", beta=0.5, temperature=1.0, weight_hard_loss=0.5, weight_soft_loss=0.5, ignore_index=-100,
    return_soft_hard_loss=False, accum_dtype=None, memory="auto", drop_ignored=None,
):  # fmt: skip
    """Distillation into a linear head, from a teacher's hidden states and head, its logits, or its top k classes.

    Args:
        student_input: (..., H) hidden states; student_weight (V, H), student_bias (V,): of the head.
        target: (...) class indices, already shifted: the token that each hidden state predicts, or ``ignore_index``.
        teacher_input, teacher_weight, teacher_bias: (..., H_t), (V_t, H_t), (V_t,); or
        teacher_logits: (..., V_t) of any dtype; in one piece if it has more dimensions than two, or it is copied; or
        teacher_top_k_ids, teacher_top_k_log_probs: (..., K) class indices (``ignore_index``: not there) and the
            teacher's log-probabilities of them, at the temperature.
        tail: for the top k, one more class with what is missing to 1, for both. Without it, the terms of the k only.
        divergence: "jsd", "forward_kl", "reverse_kl", "tvd", or, not for a top k, "cosine".
        beta, temperature, accum_dtype, memory, drop_ignored: as in `linear_distillation`.
        weight_hard_loss, weight_soft_loss: with a weight_hard_loss of 0 the hard loss is not computed, unless it is
            returned. For a top k at another temperature than 1 it goes through the head by itself.
        return_soft_hard_loss: return (loss, soft, hard), the last two without gradients.

    Returns:
        The loss, 0-d, with gradients for student_input, student_weight and student_bias, taken in this call.
        `torch.compile` takes it whole, except for a top k.

    Raises:
        ValueError, TypeError: shapes or options that don't fit.
    """
    name = "distillation_loss"
    check_divergence(name, divergence, beta, temperature)
    _check_weights(name, weight_hard_loss, weight_soft_loss, ignore_index)
    target, h, teacher, logits, ids, log_p = _flat(
        name, student_input, target, teacher_input=teacher_input, teacher_logits=teacher_logits,
        teacher_top_k_ids=teacher_top_k_ids, teacher_top_k_log_probs=teacher_top_k_log_probs,
    )  # fmt: skip
    options = dict(accum_dtype=accum_dtype, memory=memory, drop_ignored=drop_ignored)
    if ids is None and log_p is None:
        if tail:
            raise ValueError(f"{name}: tail is for teacher_top_k_ids and teacher_top_k_log_probs, give those")
        outputs = linear_distillation(
            h, student_weight, target, student_bias=student_bias, teacher=teacher, teacher_weight=teacher_weight,
            teacher_bias=teacher_bias, teacher_logits=logits, divergence=divergence, beta=beta, temperature=temperature,
            weight_hard=weight_hard_loss, weight_soft=weight_soft_loss, ignore_index=ignore_index,
            return_hard=return_soft_hard_loss, **options,
        )  # fmt: skip
    else:
        if ids is None or log_p is None or ids.shape != log_p.shape:
            shapes = " and ".join("None" if x is None else str(tuple(x.shape)) for x in (ids, log_p))
            raise ValueError(
                f"{name}: teacher_top_k_ids and teacher_top_k_log_probs have shapes {shapes}, give both alike"
            )
        if teacher is not None or logits is not None:
            raise ValueError(f"{name}: give one teacher: teacher_input and teacher_weight, teacher_logits, or a top k")
        check.integers(name, dict(teacher_top_k_ids=ids))
        if divergence == "cosine":
            raise ValueError(f"{name}: divergence 'cosine' is of logits; for a top k give {', '.join(DIVERGENCES)}")
        outputs = _of_top_k(
            h, student_weight, student_bias, target.long(), ids.long(), log_p, tail, divergence, beta, temperature,
            (weight_hard_loss, weight_soft_loss), ignore_index, return_soft_hard_loss or weight_hard_loss != 0, options,
        )  # fmt: skip
    return outputs if return_soft_hard_loss else outputs[0]


# ---- what frameworks subclass, and what they use ----


class LigerFusedLinearDistillationBase(GradientsInForward):
    """Distillation from a teacher's head, whose subclass gives ``distillation_loss_fn``.

    Its forward calls this one with ``super().forward(cls=cls, ctx=ctx, ...)``. ``chunk_size`` and ``compiled`` choose
    nothing.
    """

    WHERE = 0, 1, 5
    DIVERGENCE = None  # of a subclass whose divergence has kernels

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target, ignore_index, beta, **loss_kwargs):
        """The sum, over the tokens that aren't ignored, of the divergence of tempered logits (tokens, V): 0-d."""
        raise NotImplementedError("give distillation_loss_fn in a subclass")

    @staticmethod
    def forward(
        cls, ctx, student_input, student_weight, teacher_input, teacher_weight, target, student_bias=None,
        teacher_bias=None, chunk_size=1024, ignore_index=-100, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5,
        compute_ce_loss=True, temperature=1.0, compiled=True, return_soft_hard_loss=False, **loss_kwargs,
    ):  # fmt: skip
        """-> loss, or (loss, soft, hard)."""
        name = cls.__name__
        check_divergence(name, cls.DIVERGENCE, beta, temperature)
        _check_weights(name, weight_hard_loss, weight_soft_loss, ignore_index)
        if teacher_input is None or teacher_weight is None:
            raise ValueError(f"{name}: teacher_input or teacher_weight is None, give both")
        y, rows, teacher = _flat(name, student_input, target, teacher_input=teacher_input)
        check_head(name, rows, student_weight, student_bias, y, None)
        check_head(f"{name}'s teacher", teacher, teacher_weight, teacher_bias, y, None)
        if teacher_weight.shape[0] < student_weight.shape[0]:
            classes = f"{teacher_weight.shape[0]} classes and the student {student_weight.shape[0]}"
            raise ValueError(f"{name}: the teacher has {classes}; give a teacher with as many or more")
        weight_hard_loss = weight_hard_loss if compute_ce_loss else 0
        with_hard = compute_ce_loss and (weight_hard_loss != 0 or return_soft_hard_loss)

        def fused(h, w, b):
            return linear_distillation(
                h.reshape(-1, h.shape[-1]), w, y, student_bias=b, teacher=teacher, teacher_weight=teacher_weight,
                teacher_bias=teacher_bias, divergence=cls.DIVERGENCE, beta=beta, temperature=temperature,
                weight_hard=weight_hard_loss, weight_soft=weight_soft_loss, ignore_index=ignore_index,
                return_hard=with_hard,
            )  # fmt: skip

        def in_chunks(h, w, b):
            of_student = y.to(h.device).long()
            n = (of_student != ignore_index).sum().clamp(min=1)

            def of_chunk(some, x):
                with torch.no_grad():
                    t = frozen_logits(teacher[some], teacher_weight, teacher_bias)
                wide, rest = torch.promote_types(x.dtype, torch.float32), of_student[some]
                x, t = x.to(wide), t.to(wide)
                soft = cls.distillation_loss_fn(
                    padded(x / temperature, t.shape[1]), t / temperature, target=rest, ignore_index=ignore_index,
                    beta=beta, **loss_kwargs,
                )  # fmt: skip
                hard = x.new_zeros(())
                if with_hard:
                    hard = F.cross_entropy(x, rest, ignore_index=ignore_index, reduction="sum")
                return weight_hard_loss * hard + weight_soft_loss * soft, soft, hard

            def run(h, w, b, needs):
                return *take_in_chunks(of_chunk, n, h, w, b, needs, ROWS), n

            def reference(h, w, b):
                dtype = compute_dtype(h, w)
                x = F.linear(*(x if x is None else x.to(dtype) for x in (h, w, b)))
                loss, *rest = (x / n for x in of_chunk(slice(None), x))
                return loss, *(x.detach() for x in rest)

            return taken(run, reference, h.reshape(-1, h.shape[-1]), w, b)

        loss = in_chunks if cls.DIVERGENCE is None else fused
        outputs = cls.take(ctx, loss, student_input, student_weight, student_bias)
        if not return_soft_hard_loss:
            return outputs[0]
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs


class LigerFusedLinearJSDFunction(LigerFusedLinearDistillationBase):
    """``apply(student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, ...)``.

    As `LigerFusedLinearJSDLoss`.
    """

    DIVERGENCE = "jsd"

    @classmethod
    def forward(
        cls, ctx, student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None,
        teacher_bias=None, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0,
        compiled=True, chunk_size=1024, return_soft_hard_loss=False,
    ):  # fmt: skip
        return super().forward(
            cls, ctx, student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias,
            teacher_bias, ignore_index=ignore_index, weight_hard_loss=weight_hard_loss,
            weight_soft_loss=weight_soft_loss, beta=beta, temperature=temperature,
            return_soft_hard_loss=return_soft_hard_loss,
        )  # fmt: skip


class LigerFusedLinearCosineSimilarityFunction(LigerFusedLinearJSDFunction):
    """The same for `LigerFusedLinearCosineSimilarityLoss`."""

    DIVERGENCE = "cosine"


class LigerFusedLinearJSDLoss(torch.nn.Module):
    """``weight_hard_loss``·CE + ``weight_soft_loss``·generalised JSD (arXiv:2306.13649) of two linear heads.

    beta: the teacher's share in the mixture; 0 is KL(teacher‖student), 1 KL(student‖teacher). temperature: of both
    distributions in the JSD. return_soft_hard_loss: return (loss, soft, hard). ``compiled`` and ``chunk_size`` choose
    nothing; memory, drop_ignored: as in `linear_distillation`.
    """

    DIVERGENCE = "jsd"

    def __init__(
        self, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5, ignore_index: int = -100,
        temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024, return_soft_hard_loss: bool = False, *,
        memory: int | str = "auto", drop_ignored: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_divergence(type(self).__name__, self.DIVERGENCE, beta, temperature)
        _check_weights(type(self).__name__, weight_hard_loss, weight_soft_loss, ignore_index)
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature, self.compiled = ignore_index, temperature, compiled
        self.chunk_size, self.return_soft_hard_loss = chunk_size, return_soft_hard_loss
        self.memory, self.drop_ignored = memory, drop_ignored

    def forward(
        self, student_input: torch.Tensor, student_weight: torch.Tensor, teacher_input: torch.Tensor,
        teacher_weight: torch.Tensor, true_labels: torch.Tensor, student_bias: torch.Tensor | None = None,
        teacher_bias: torch.Tensor | None = None,
    ):  # fmt: skip
        """Hidden states (N, H) and labels (N,), or (B, T, H) and (B, T); heads (V, H), (V,).

        The teacher may have more classes: the student's logits are 0 there.
        """
        return distillation_loss(
            student_input, student_weight, true_labels, student_bias=student_bias, teacher_input=teacher_input,
            teacher_weight=teacher_weight, teacher_bias=teacher_bias, divergence=self.DIVERGENCE, beta=self.beta,
            temperature=self.temperature, weight_hard_loss=self.weight_hard_loss,
            weight_soft_loss=self.weight_soft_loss, ignore_index=self.ignore_index,
            return_soft_hard_loss=self.return_soft_hard_loss, memory=self.memory, drop_ignored=self.drop_ignored,
        )  # fmt: skip


class LigerFusedLinearCosineSimilarityLoss(LigerFusedLinearJSDLoss):
    """`LigerFusedLinearJSDLoss` with ``beta``·(1 - cos) of the two vectors of logits in place of the JSD."""

    DIVERGENCE = "cosine"


liger_fused_linear_jsd = LigerFusedLinearJSDFunction.apply
liger_fused_linear_cosine = LigerFusedLinearCosineSimilarityFunction.apply
