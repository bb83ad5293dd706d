r"""Distillation of one linear head into another, without the logits of either in memory.

    z_s = h·Wᵀ + b,   z_t likewise of the teacher, or its logits
    q = softmax(z_s/T),   p = softmax(z_t/T),   n = max(1, valid rows)
    soft = Σ_valid D(p, q)/n,   hard = Σ_valid CE(z_s, y)/n,   loss = w_h·hard + w_s·soft

The divergences D and their gradients are in `divergences`, their kernels in `divergence_kernels`.
The student's logits are computed in chunks and kept in the memory of dW (`chunks`). The teacher's
logits are computed for 1,024 tokens of a chunk at a time, in memory that is used again. The
gradients are computed in forward (`forward_gradients`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, custom_op
from liger_kernel.core.parallel import to_local_shards
from liger_kernel.core.tile import cdiv
from liger_kernel.ops.head.chunks import (
    compute_logits,
    empty_gradients,
    pad_tokens,
    plan_for,
    run_chunks,
)
from liger_kernel.ops.head.cross_entropy import check_targets, random_labels
from liger_kernel.ops.head.divergence_launch import compute_divergence, exceeds_int32_offsets
from liger_kernel.ops.head.divergences import DIVERGENCES, DistillationOptions, soft_and_hard_sums
from liger_kernel.ops.head.forward_gradients import gradient_in_forward, gradients_in_chunks
from liger_kernel.ops.head.linear_head_reference import ROWS_WITHOUT_KERNELS, compute_dtype
from liger_kernel.ops.head.logits import normalisers
from liger_kernel.ops.head.planning import align, divides_at_end, parse_memory
from liger_kernel.ops.head.token_log_probs import check_head, drop_ignored_rows

TEACHER_ROWS = 1024  # tokens whose logits of the teacher are in memory
TEACHER_ROWS_IN_PLACE = 4096  # tokens of a launch where the teacher's logits need no memory


class Teacher(NamedTuple):
    """The teacher's hidden states and head, or its logits (for kl_div its probabilities)."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    logits: torch.Tensor | None


def linear_distillation_reference(
    student,
    student_weight,
    target,
    *,
    student_bias=None,
    teacher=None,
    teacher_weight=None,
    teacher_bias=None,
    teacher_logits=None,
    return_hard=False,
    **options,
):
    """Compute (loss, soft, hard) from all the logits at once.

    ``options`` are the fields of `DistillationOptions`.
    """
    options = DistillationOptions(**options)
    with_hard = return_hard or options.weight_hard != 0
    teacher = Teacher(teacher, teacher_weight, teacher_bias, teacher_logits)
    return _reference(student, student_weight, student_bias, target, teacher, options, with_hard)


def _reference(h, w, b, target, teacher, options, with_hard):
    dtype = compute_dtype(h, w)
    x = F.linear(h.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
    y = teacher.logits
    if y is None:
        with torch.no_grad():
            y = frozen_logits(teacher.hidden, teacher.weight, teacher.bias)
    n = (target != options.ignore_index).sum().clamp(min=1)
    soft, hard = (d / n for d in soft_and_hard_sums(x, y, target, options, with_hard))
    return options.weight_hard * hard + options.weight_soft * soft, soft.detach(), hard.detach()


def frozen_logits(h, w, b):
    """Compute the logits of a head that gets no gradient."""
    dtype = compute_dtype(h, w)
    return F.linear(*(x if x is None else x.detach().to(dtype) for x in (h, w, b)))


# ---- with kernels ----


class _TeacherLogits:
    """The teacher's logits, for a few tokens at a time.

    If it has a head, they are computed in memory that the next tokens use again, and the tokens are
    contiguous, as the student's are. Otherwise its logits are read where they are. They are copied
    only if their strides are too large for the kernels.

    Args:
        rows: the indices of the teacher's rows that the student has. None: all.
        dtype: of the logits.
        num_tokens: the student's tokens.
    """

    def __init__(self, teacher, rows, dtype, num_tokens):
        self.hidden, self.weight, self.bias, self.all_logits = teacher
        self.rows = rows
        self.dtype = dtype
        self.copy_slices = self.all_logits is not None and exceeds_int32_offsets(self.all_logits)
        needs_memory = (
            self.all_logits is None
            or rows is not None
            or self.all_logits.dtype != dtype
            or self.copy_slices
        )
        # without memory of their own, only the statistics grow with the tokens
        max_tokens = TEACHER_ROWS if needs_memory else TEACHER_ROWS_IN_PLACE
        self.max_tokens = min(max_tokens, num_tokens)
        if self.all_logits is None:
            self.memory = self.weight.new_empty(
                self.weight.shape[0], align(self.max_tokens), dtype=dtype
            )
            self.weight = self.weight.to(dtype)
            if self.bias is not None:
                self.bias = self.bias.to(dtype)

    def _select(self, x, tokens):
        return x[tokens] if self.rows is None else x.index_select(0, self.rows[tokens])

    def logits(self, tokens):
        """Return the logits (tokens, classes) of a slice of the student's tokens."""
        if self.all_logits is not None:
            logits = self._select(self.all_logits, tokens).to(self.dtype)
            return logits.contiguous() if self.copy_slices else logits
        hidden = self._select(self.hidden, tokens)
        n = hidden.shape[0]
        hidden = pad_tokens(hidden.to(self.dtype))
        logits = self.memory[:, : hidden.shape[0]]
        compute_logits(logits, self.weight, self.bias, hidden, n)
        return logits[:, :n].t()


def _empty_outputs(h, w, *args):
    *_, dtype, teacher_dtype, accum_dtype, memory, needs = args
    scalars = (h.new_empty((), dtype=torch.float32) for _ in range(4))
    return *scalars, *empty_gradients(h, w, dtype, accum_dtype, needs)


@custom_op("linear_distillation", _empty_outputs)
def distillation_fwd(
    h: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    target: torch.Tensor,
    teacher: torch.Tensor | None,
    teacher_weight: torch.Tensor | None,
    teacher_bias: torch.Tensor | None,
    teacher_logits: torch.Tensor | None,
    rows: torch.Tensor | None,
    divergence: str,
    scalars: list[float],
    ignore_index: int,
    with_hard: bool,
    dtype: torch.dtype,
    teacher_dtype: torch.dtype,
    accum_dtype: torch.dtype | None,
    memory: int,
    needs: list[bool],
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    """Compute the loss and the gradients of the student's head.

    Args:
        rows: the indices of the teacher's rows that h has. None: all.
        scalars: beta, temperature, weight_hard, weight_soft.
        needs: which of dh, dW, db are needed.

    Returns:
        loss, soft, hard, n (0-d each), dh, dW, db. The gradients are those of the loss, or of the
        loss times n if `divides_at_end`.
    """
    options = DistillationOptions(divergence, *scalars, ignore_index)
    n = normalisers(target, None, w.shape[0], ignore_index, True)[0]
    norm = torch.ones_like(n) if divides_at_end(h, w, dtype) else n
    soft = h.new_zeros(h.shape[0], dtype=torch.float32)
    hard = torch.zeros_like(soft) if with_hard else None
    teacher = Teacher(teacher, teacher_weight, teacher_bias, teacher_logits)
    teacher = _TeacherLogits(teacher, rows, teacher_dtype, h.shape[0])
    # the chunks are made of whole pieces of TEACHER_ROWS
    whole_pieces = memory < 0 and teacher_logits is None and h.shape[1] >= TEACHER_ROWS
    unit = TEACHER_ROWS if whole_pieces else 64
    plan = plan_for(h, w, dtype, accum_dtype, memory, needs[1], unit=unit)

    def to_gradient(chunk, x):
        """Turn the student's logits x of a chunk, in one part or two, into their gradient."""
        chunk_tokens = chunk.stop - chunk.start
        pieces = max(cdiv(chunk_tokens, teacher.max_tokens), 1)
        # equal pieces: no last few tokens for which the teacher's weight is read again
        step = align(cdiv(chunk_tokens, pieces))
        for start in range(chunk.start, chunk.stop, max(step, 1)):
            tokens = slice(start, min(start + step, chunk.stop))
            in_chunk = slice(start - chunk.start, tokens.stop - chunk.start)
            compute_divergence(
                tuple(part[in_chunk] for part in x) if isinstance(x, tuple) else x[in_chunk],
                teacher.logits(tokens),
                target[tokens],
                norm,
                options,
                any(needs),
                soft[tokens],
                None if hard is None else hard[tokens],
            )

    grads = run_chunks(h, w, b, dtype, plan, to_gradient, needs)
    soft = soft.sum() / n
    hard = hard.sum() / n if with_hard else torch.zeros_like(soft)
    loss = options.weight_hard * hard + options.weight_soft * soft
    return loss, soft, hard, n.clone(), *grads


# ---- without kernels ----


def distill_in_chunks(chunk_loss, n, h, w, b, needs, rows=ROWS_WITHOUT_KERNELS):
    """Compute a loss of the logits and its gradients in chunks of the rows, in plain PyTorch.

    Args:
        chunk_loss: ``chunk_loss(rows, logits)`` returns (loss, soft, hard) of a slice of the rows.
        n: a tensor that the sums over the chunks are divided by.
        needs: which of the gradients for h, w and b are needed.
        rows: the rows of a chunk.

    Returns:
        (loss, soft, hard), and the needed gradients of loss·n, in fp32 or wider.
    """
    dtype = compute_dtype(h, w)

    def loss_of_head(chunk, *head):
        logits = F.linear(*(x if x is None else x.to(dtype) for x in head))
        return chunk_loss(chunk, logits)

    chunks = [slice(start, start + rows) for start in range(0, h.shape[0], rows)]
    outputs, grads = gradients_in_chunks(loss_of_head, chunks, h, w, b, needs)
    sums = h.new_zeros(3, dtype=torch.promote_types(dtype, torch.float32))
    for chunk_outputs in outputs:
        sums += torch.stack([x.to(sums.dtype) for x in chunk_outputs])
    return tuple((sums / n).unbind()), grads


# ---- the function ----


def check_teacher(name, student, weight, target, bias, teacher):
    check_head(name, student, weight, bias, target, None)
    from_head = teacher.hidden is not None
    if from_head == (teacher.logits is not None) or from_head == (teacher.weight is None):
        raise ValueError(f"{name}: give either teacher and teacher_weight, or teacher_logits")
    if from_head:
        check_head(f"{name}'s teacher", teacher.hidden, teacher.weight, teacher.bias, target, None)
        check.floats(name, dict(student=student), teacher=teacher.hidden)
        classes = teacher.weight.shape[0]
    else:
        check.floats(name, dict(student=student), teacher_logits=teacher.logits)
        if teacher.logits.dim() != 2 or teacher.logits.shape[0] != student.shape[0]:
            raise ValueError(
                f"{name}: teacher_logits has shape {tuple(teacher.logits.shape)}, "
                f"give one row for each of the student's: ({student.shape[0]}, classes)"
            )
        classes = teacher.logits.shape[1]
    if classes < weight.shape[0]:
        raise ValueError(
            f"{name}: the teacher has {classes} classes and the student {weight.shape[0]}; "
            "give a teacher with as many or more, or the student's weight without the rows that "
            "the teacher doesn't have"
        )


def check_divergence(name, divergence, beta, temperature):
    """Check the name of a divergence and its numbers. ``divergence`` None: a caller's own."""
    if divergence not in (*DIVERGENCES, "cosine", None):
        raise ValueError(
            f"{name}: divergence is {divergence!r}, give one of {', '.join(DIVERGENCES)}, cosine"
        )
    if divergence == "jsd":
        check.fraction(name, "beta", beta)
    elif divergence is not None:
        check.finite(name, "beta", beta)
    check.positive(name, "temperature", temperature)


def linear_distillation(
    student: torch.Tensor,
    student_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    student_bias: torch.Tensor | None = None,
    teacher: torch.Tensor | None = None,
    teacher_weight: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    teacher_logits: torch.Tensor | None = None,
    divergence: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    weight_hard: float = 0.5,
    weight_soft: float = 0.5,
    ignore_index: int = -100,
    return_hard: bool = False,
    accum_dtype: torch.dtype | None = None,
    memory: int | str = "auto",
    drop_ignored: bool | None = None,
):
    """Compute ``weight_hard·hard + weight_soft·soft`` of a student's and a teacher's linear head.

    Their logits are never all in memory. soft is a divergence of their distributions at a
    temperature, hard the student's cross entropy without one. Each is averaged over the rows that
    are not ignored. The gradients are computed in this call: the weight may change or be freed
    before backward.

    Args:
        student: (N, H) hidden states, fp32, bf16 or fp16; any strides.
        student_weight, student_bias: (V, H) and (V,). Logits are computed in the weight's dtype, or
            autocast's.
        target: (N,) class indices. They may be on the CPU.
        teacher, teacher_weight, teacher_bias: (N, H_t), (V_t, H_t), (V_t,), likewise; they get no
            gradient.
        teacher_logits: (N, V_t) of any dtype and strides, in place of these three. V_t may be
            larger than V: the student's logits are then 0 there.
        divergence: "jsd", "forward_kl" (of the teacher from the student), "reverse_kl", "tvd" or
            "cosine" (of logits).
        beta: the teacher's share in the mixture of "jsd": 0 is forward_kl, 1 reverse_kl; a factor
            of "cosine".
        temperature: both distributions of soft have their logits divided by it. There is no factor
            T².
        weight_hard, weight_soft: with a weight_hard of 0 the cross entropy is not computed, unless
            ``return_hard``.
        ignore_index: target of rows that do not count.
        return_hard: compute hard whatever its weight; otherwise it is 0 where its weight is.
        accum_dtype, drop_ignored: as in `linear_token_loss`.
        memory: bytes for the student's head beyond the gradients, or "auto", as in
            `linear_token_loss`. The teacher's logits of up to 1,024 rows come on top.

    Returns:
        (loss, soft, hard), 0-d in fp32 (fp64 for fp64 inputs). Only loss is differentiable, in
        student, student_weight and student_bias. If all rows are ignored, it is 0.

    Raises:
        ValueError, TypeError: shapes or options that don't fit; a target out of range, on the CPU
            and in debug mode (LIGER_KERNEL_DEBUG=1). On a GPU such a row's hard loss is otherwise
            NaN.

    Under `torch.compile` it is one node of the graph. Without kernels, it is plain PyTorch with all
    logits there.
    """
    name = "linear_distillation"
    student, student_weight, student_bias, group = to_local_shards(
        name, student, student_weight, student_bias, None
    )
    teacher, teacher_weight, teacher_bias, teacher_group = to_local_shards(
        name, teacher, teacher_weight, teacher_bias, None
    )
    if group is not None or teacher_group is not None:
        raise ValueError(f"{name}: a weight is sharded over its classes; give weight.full_tensor()")
    check_divergence(name, divergence, beta, temperature)
    ignore_index = check.integer(name, "ignore_index", ignore_index)
    check.dtype(name, "accum_dtype", accum_dtype)
    options = DistillationOptions(
        divergence=divergence,
        beta=beta,
        temperature=temperature,
        weight_hard=check.finite(name, "weight_hard", weight_hard),
        weight_soft=check.finite(name, "weight_soft", weight_soft),
        ignore_index=ignore_index,
    )
    teacher = Teacher(teacher, teacher_weight, teacher_bias, teacher_logits)
    check_teacher(name, student, student_weight, target, student_bias, teacher)
    with_hard = return_hard or options.weight_hard != 0
    if with_hard:
        check_targets(name, target, student_weight.shape[0], ignore_index)
    return run_distillation(
        student,
        student_weight,
        student_bias,
        target,
        teacher,
        options,
        with_hard=with_hard,
        accum_dtype=accum_dtype,
        memory=memory,
        drop_ignored=drop_ignored,
    )


def run_distillation(
    student,
    student_weight,
    student_bias,
    target,
    teacher,
    options,
    *,
    with_hard,
    accum_dtype=None,
    memory="auto",
    drop_ignored=None,
):
    """Run `linear_distillation` with checked arguments: a `Teacher` and `DistillationOptions`."""
    memory = parse_memory(memory)
    ignore_index = options.ignore_index
    rows, hidden, labels = drop_ignored_rows(student, target, ignore_index, drop_ignored)
    teacher = Teacher(*(x if x is None else x.detach().resolve_neg() for x in teacher))

    def reference(h, w, b, target=labels, rows=rows):
        selected = teacher
        if rows is not None:
            selected = Teacher(
                None if teacher.hidden is None else teacher.hidden[rows],
                teacher.weight,
                teacher.bias,
                None if teacher.logits is None else teacher.logits[rows],
            )
        return _reference(h, w, b, target, selected, options, with_hard)

    if not devices.has_kernels(hidden) and torch.compiler.is_compiling():
        return reference(student, student_weight, student_bias, target.to(student.device), None)
    divergence = options.divergence
    if divergence == "jsd" and options.beta in (0, 1):
        divergence = "reverse_kl" if options.beta else "forward_kl"
    dtype = compute_dtype(student, student_weight)
    if teacher.hidden is None:
        teacher_dtype = teacher.logits.dtype
    else:
        teacher_dtype = compute_dtype(teacher.hidden, teacher.weight)
    if teacher_dtype == torch.float64:
        teacher_dtype = torch.float32
    scalars = [
        float(options.beta),
        float(options.temperature),
        float(options.weight_hard),
        float(options.weight_soft),
    ]

    def with_kernels(h, w, b, needs):
        *outputs, n, dh, dw, db = distillation_fwd(
            h,
            w,
            b,
            labels.contiguous(),
            *teacher,
            rows,
            divergence,
            scalars,
            ignore_index,
            with_hard,
            dtype,
            teacher_dtype,
            accum_dtype,
            memory,
            needs,
        )
        divisor = n if divides_at_end(h, w, dtype) else None
        return tuple(outputs), (dh, dw, db), divisor

    def without_kernels(h, w, b, needs):
        n = (labels != ignore_index).sum().clamp(min=1)

        def chunk_loss(chunk, logits):
            teacher_rows = chunk if rows is None else rows[chunk]
            with torch.no_grad():
                if teacher.logits is None:
                    hidden = teacher.hidden[teacher_rows]
                    y = frozen_logits(hidden, teacher.weight, teacher.bias)
                else:
                    y = teacher.logits[teacher_rows]
            soft, hard = soft_and_hard_sums(logits, y, labels[chunk], options, with_hard)
            return options.weight_hard * hard + options.weight_soft * soft, soft, hard

        return *distill_in_chunks(chunk_loss, n, h, w, b, needs), n

    run = with_kernels if devices.has_kernels(hidden) else without_kernels
    return gradient_in_forward(run, reference, hidden, student_weight, student_bias)


# ---- the case ----


def _for_case(fn):
    """Add options to ``fn``: a teacher with ``more_classes``, and one that gives its ``logits``."""

    def call(*args, more_classes=False, logits=False, **inputs):
        if more_classes:
            w = inputs["teacher_weight"]
            b = inputs["teacher_bias"]
            inputs["teacher_weight"] = torch.cat((w, w[:3]))
            inputs["teacher_bias"] = torch.cat((b, b[:3]))
        if logits:
            h = inputs.pop("teacher")
            w = inputs.pop("teacher_weight")
            b = inputs.pop("teacher_bias")
            inputs["teacher_logits"] = torch.addmm(b, h, w.t())
        return fn(*args, **inputs)

    return call


def _distill_all_rows(*args, **inputs):
    return linear_distillation(*args, **inputs, drop_ignored=False)


def _inputs(M, H, V):
    return dict(
        student=torch.randn(M, H).requires_grad_(),
        teacher=torch.randn(M, H),
        student_weight=(torch.randn(V, H) / H**0.5).requires_grad_(),
        teacher_weight=torch.randn(V, H) / H**0.5,  # two nats apart
        student_bias=torch.randn(V).requires_grad_(),
        target=random_labels(M, V),
        teacher_bias=torch.randn(V),
    )


CASES.append(
    Case(
        "linear_distillation",
        fn=_for_case(_distill_all_rows),
        reference=_for_case(linear_distillation_reference),
        inputs=_inputs,
        shapes=((1, 8, 8), (5, 24, 123), (70, 32, 513), (4, 16, 9000)),
        options=(
            dict(student_bias=None, teacher_bias=None),
            dict(beta=0.1, temperature=2.0, weight_hard=0.0),
            dict(beta=0.0, more_classes=True),
            dict(beta=1.0, temperature=0.7, logits=True),
            dict(divergence="tvd", temperature=2.0),
            dict(divergence="cosine", more_classes=True, temperature=2.0),
        ),
        bench=((8192, 4096, 128256),),
        flops=lambda t: 8 * t["student"].numel() * t["student_weight"].shape[0],
        fp32_roundings=4,  # as of fused_linear_cross_entropy
    )
)
