r"""Distillation of one linear head into another, without the logits of either in memory.

    z_s = h·Wᵀ + b,   z_t likewise of the teacher (or given),   q = softmax(z_s/T),   p = softmax(z_t/T)
    soft = Σ_valid D(p, q)/n,   hard = Σ_valid CE(z_s, y)/n,   loss = w_h·hard + w_s·soft,   n = max(1, valid rows)

The divergences D, their gradients and their kernels stand in `divergences`. The student's logits
are computed in chunks and kept in the memory of dW (`chunks`). For 1,024 tokens of a chunk at a
time the teacher's logits are computed, in memory that is used again. The gradients are computed in
forward (`forward_gradients`)."""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, custom_op
from liger_kernel.core.parallel import local
from liger_kernel.core.tile import cdiv
from liger_kernel.ops.head.chunks import (
    empty_gradients,
    fill_logits,
    pad_tokens,
    plan_for,
    run_chunks,
)
from liger_kernel.ops.head.cross_entropy import check_targets, labels
from liger_kernel.ops.head.divergences import (
    DIVERGENCES,
    DistillationOptions,
    beyond_offsets,
    compare_logits,
    of_logits,
)
from liger_kernel.ops.head.forward_gradients import gradient_in_forward, gradients_in_chunks
from liger_kernel.ops.head.logits import normalisers
from liger_kernel.ops.head.planning import aligned, budget
from liger_kernel.ops.head.token_log_probs import (
    ROWS_WITHOUT_KERNELS,
    check_head,
    compute_dtype,
    only_valid,
)

TEACHER_ROWS = 1024  # tokens whose logits of the teacher are in memory


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
    """-> (loss, soft, hard), from all the logits at once; options: `DistillationOptions`."""
    dtype, options = compute_dtype(student, student_weight), DistillationOptions(**options)
    b = None if student_bias is None else student_bias.to(dtype)
    x = F.linear(student.to(dtype), student_weight.to(dtype), b)
    with torch.no_grad():
        y = (
            frozen_logits(teacher, teacher_weight, teacher_bias)
            if teacher_logits is None
            else teacher_logits
        )
    n = (target != options.ignore_index).sum().clamp(min=1)
    soft, hard = (
        d / n for d in of_logits(x, y, target, options, return_hard or options.weight_hard != 0)
    )
    return options.weight_hard * hard + options.weight_soft * soft, soft.detach(), hard.detach()


def frozen_logits(h, w, b):
    """Of a head that gets no gradient."""
    dtype = compute_dtype(h, w)
    return F.linear(*(x if x is None else x.detach().to(dtype) for x in (h, w, b)))


# ---- with kernels ----


class _Teacher:
    """Its logits for a few tokens at a time, in memory that the next few use again; given ones are
    read where they are.

    The tokens of what is computed are contiguous, as the student's are. Given logits that are far
    apart are copied."""

    def __init__(self, h, w, b, logits, rows, dtype, most):
        self.h, self.w, self.b, self.given, self.rows, self.dtype = h, w, b, logits, rows, dtype
        self.far = logits is not None and beyond_offsets(logits)
        copied = logits is None or rows is not None or logits.dtype != dtype or self.far
        self.most = min(
            TEACHER_ROWS if copied else 4096, most
        )  # others need no memory, and their statistics are few
        if logits is None:
            self.w, self.b = w.to(dtype), None if b is None else b.to(dtype)
            self.memory = w.new_empty(w.shape[0], aligned(self.most), dtype=dtype)

    def _of(self, x, some):
        return x[some] if self.rows is None else x.index_select(0, self.rows[some])

    def logits(self, some):
        """(tokens, classes) of a slice of the tokens."""
        if self.given is not None:
            part = self._of(self.given, some).to(self.dtype)
            return part.contiguous() if self.far else part
        part = self._of(self.h, some)
        n = part.shape[0]
        part = pad_tokens(part.to(self.dtype))
        x = self.memory[:, : part.shape[0]]
        fill_logits(x, self.w, self.b, part, n)
        return x[:, :n].t()


def _outputs(
    h,
    w,
    b,
    target,
    teacher,
    teacher_w,
    teacher_b,
    logits,
    rows,
    divergence,
    numbers,
    ignore_index,
    hard,
    dtype,
    teacher_dtype,
    accum_dtype,
    memory,
    needs,
):
    scalars = (h.new_empty((), dtype=torch.float32) for _ in range(4))
    return *scalars, *empty_gradients(h, w, dtype, accum_dtype, needs)


@custom_op("linear_distillation", _outputs)
def distillation_fwd(
    h: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    target: torch.Tensor,
    teacher: torch.Tensor | None,
    teacher_w: torch.Tensor | None,
    teacher_b: torch.Tensor | None,
    logits: torch.Tensor | None,
    rows: torch.Tensor | None,
    divergence: str,
    numbers: list[float],
    ignore_index: int,
    hard: bool,
    dtype: torch.dtype,
    teacher_dtype: torch.dtype,
    accum_dtype: torch.dtype | None,
    memory: int,
    needs: list[bool],
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    """-> loss, soft, hard, n (0-d each), the needed dh, dW, db.

    rows: which of the teacher's are those of h (None: the same). numbers: beta, temperature,
    weight_hard, weight_soft. The gradients are those of the loss, times n in fp16, which can't hold
    them divided."""
    options = DistillationOptions(divergence, *numbers, ignore_index)
    n = normalisers(target, None, w.shape[0], ignore_index, True)[0]
    norm = torch.ones_like(n) if dtype == torch.float16 else n
    soft = h.new_zeros(h.shape[0], dtype=torch.float32)
    ce = torch.zeros_like(soft) if hard else None
    of_teacher = _Teacher(teacher, teacher_w, teacher_b, logits, rows, teacher_dtype, h.shape[0])
    whole = (
        memory < 0 and logits is None and h.shape[1] >= TEACHER_ROWS
    )  # chunks of which each piece is whole
    plan = plan_for(h, w, dtype, accum_dtype, memory, needs[1], unit=TEACHER_ROWS if whole else 64)

    def to_gradient(i, x):
        n = i.stop - i.start
        step = aligned(
            cdiv(n, max(cdiv(n, of_teacher.most), 1))
        )  # no last few that read the teacher's weight again
        for start in range(i.start, i.stop, max(step, 1)):
            some = slice(start, min(start + step, i.stop))
            inside = slice(start - i.start, some.stop - i.start)
            z = tuple(part[inside] for part in x) if isinstance(x, tuple) else x[inside]
            of_some = soft[some], None if ce is None else ce[some]
            compare_logits(
                z, of_teacher.logits(some), target[some], norm, options, any(needs), *of_some
            )

    grads = run_chunks(h, w, b, dtype, plan, to_gradient, needs)
    soft = soft.sum() / n
    ce = ce.sum() / n if hard else torch.zeros_like(soft)
    return options.weight_hard * ce + options.weight_soft * soft, soft, ce, n.clone(), *grads


# ---- without kernels ----


def take_in_chunks(of_chunk, n, h, w, b, needs, rows=ROWS_WITHOUT_KERNELS):
    """``of_chunk(slice of the rows, logits) -> (loss, soft, hard)``, added up over chunks of the
    rows and divided by n.

    -> those, and the gradients of loss·n for h, w and b where needed, in fp32 or wider. In plain
    PyTorch.
    """
    dtype = compute_dtype(h, w)

    def loss(some, *head):
        return of_chunk(some, F.linear(*(x if x is None else x.to(dtype) for x in head)))

    chunks = [slice(start, start + rows) for start in range(0, h.shape[0], rows)]
    parts, grads = gradients_in_chunks(loss, chunks, h, w, b, needs)
    sums = h.new_zeros(3, dtype=torch.promote_types(dtype, torch.float32))
    for of_some in parts:
        sums += torch.stack([x.to(sums.dtype) for x in of_some])
    return tuple((sums / n).unbind()), grads


# ---- the function ----


def check_teacher(
    name, student, weight, target, bias, teacher, teacher_weight, teacher_bias, teacher_logits
):
    check_head(name, student, weight, bias, target, None)
    if (teacher is None) == (teacher_logits is None) or (teacher is None) != (
        teacher_weight is None
    ):
        raise ValueError(f"{name}: give either teacher and teacher_weight, or teacher_logits")
    if teacher is not None:
        check_head(f"{name}'s teacher", teacher, teacher_weight, teacher_bias, target, None)
        check.floats(name, dict(student=student), teacher=teacher)
    else:
        check.floats(name, dict(student=student), teacher_logits=teacher_logits)
    if teacher is None and (
        teacher_logits.dim() != 2 or teacher_logits.shape[0] != student.shape[0]
    ):
        raise ValueError(
            f"{name}: teacher_logits has shape {tuple(teacher_logits.shape)}, give one row for each of the student's: "
            f"({student.shape[0]}, classes)"
        )
    classes = teacher_weight.shape[0] if teacher_logits is None else teacher_logits.shape[1]
    if classes < weight.shape[0]:
        raise ValueError(
            f"{name}: the teacher has {classes} classes and the student {weight.shape[0]}; give a teacher with as many "
            "or more, or the student's weight without the rows that the teacher doesn't have"
        )


def check_divergence(name, divergence, beta, temperature):
    """``divergence`` None: another one."""
    if divergence not in (*DIVERGENCES, "cosine", None):
        raise ValueError(
            f"{name}: divergence is {divergence!r}, give one of {', '.join(DIVERGENCES)}, cosine"
        )
    if divergence is not None:
        (check.share if divergence == "jsd" else check.finite)(name, "beta", beta)
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
    """``weight_hard·hard + weight_soft·soft`` of a student's and a teacher's linear head, without
    all their logits.

    soft is a divergence of their distributions at a temperature, hard the student's cross entropy
    without one. Each is averaged over the rows that are not ignored. The gradients are computed in
    this call: the weight may change or go before backward.

    Args:
        student: (N, H) hidden states, fp32, bf16 or fp16; any strides.
        student_weight, student_bias: (V, H) and (V,). Logits are computed in the weight's dtype, or
        autocast's.
        target: (N,) class indices. They may be on the CPU.
        teacher, teacher_weight, teacher_bias: (N, H_t), (V_t, H_t), (V_t,), likewise; they get no
        gradient.
        teacher_logits: (N, V_t) of any dtype and strides, in place of these three.
            V_t may be larger than V: the student's logits are then 0 there.
        divergence: "jsd", "forward_kl" (of the teacher from the student), "reverse_kl", "tvd" or
        "cosine" (of logits).
        beta: the teacher's share in the mixture of "jsd": 0 is forward_kl, 1 reverse_kl; a factor
        of "cosine".
        temperature: both distributions of soft have their logits divided by it. There is no factor
        T².
        weight_hard, weight_soft: with a weight_hard of 0 the cross entropy is not computed, unless
        ``return_hard``.
        ignore_index: target of rows that count for nothing.
        return_hard: compute hard whatever its weight; otherwise it is 0 where its weight is.
        accum_dtype, drop_ignored: as in `linear_token_loss`.
        memory: bytes for the student's head beyond the gradients, or "auto", as in
        `linear_token_loss`. The teacher's
            logits of up to 1,024 rows come on top.

    Returns:
        (loss, soft, hard), 0-d in fp32 (fp64 for fp64 inputs). Only loss is differentiable, in
        student,
        student_weight and student_bias. All ignored: 0.

    Raises:
        ValueError, TypeError: shapes or options that don't fit; a target out of range, on the CPU
        and in debug mode
            (LIGER_KERNEL_DEBUG=1). On a GPU such a row's hard loss is otherwise NaN.

    Under `torch.compile` it is one node of the graph; without kernels, plain PyTorch with all
    logits."""
    name = "linear_distillation"
    student, student_weight, student_bias, group = local(
        name, student, student_weight, student_bias, None
    )
    teacher, teacher_weight, teacher_bias, of_teacher = local(
        name, teacher, teacher_weight, teacher_bias, None
    )
    if group is not None or of_teacher is not None:
        raise ValueError(f"{name}: a weight is sharded over its classes; give weight.full_tensor()")
    check_divergence(name, divergence, beta, temperature)
    ignore_index = check.integer(name, "ignore_index", ignore_index)
    weight_hard, weight_soft = (
        check.finite(name, argument, x)
        for argument, x in (("weight_hard", weight_hard), ("weight_soft", weight_soft))
    )
    check.dtype(name, "accum_dtype", accum_dtype)
    options = dict(
        divergence=divergence, beta=beta, temperature=temperature, weight_hard=weight_hard, weight_soft=weight_soft,
        ignore_index=ignore_index,
    )  # fmt: skip
    head = dict(teacher=teacher, teacher_weight=teacher_weight, teacher_bias=teacher_bias)
    check_teacher(
        name, student, student_weight, target, student_bias, **head, teacher_logits=teacher_logits
    )
    with_hard = return_hard or weight_hard != 0
    if with_hard:
        check_targets(name, target, student_weight.shape[0], ignore_index)
    return distil(
        student,
        student_weight,
        student_bias,
        target,
        (teacher, teacher_weight, teacher_bias, teacher_logits),
        options,
        with_hard,
        accum_dtype,
        memory,
        drop_ignored,
    )


def distil(
    student,
    student_weight,
    student_bias,
    target,
    teacher,
    options,
    with_hard,
    accum_dtype=None,
    memory="auto",
    drop_ignored=None,
):
    """`linear_distillation` with checked arguments. teacher: hidden states, weight, bias, logits
    (of kl_div: p)."""
    memory, of_all, ignore_index = (
        budget(memory),
        DistillationOptions(**options),
        options["ignore_index"],
    )
    rows, h, y = only_valid(student, target, ignore_index, drop_ignored)
    teacher, *head, logits = (x if x is None else x.detach() for x in teacher)

    def reference(h, w, b, target=y, rows=rows):
        teacher_rows, logit_rows = (
            x if x is None or rows is None else x[rows] for x in (teacher, logits)
        )
        return linear_distillation_reference(
            h,
            w,
            target,
            student_bias=b,
            teacher=teacher_rows,
            teacher_weight=head[0],
            teacher_bias=head[1],
            teacher_logits=logit_rows,
            return_hard=with_hard,
            **options,
        )

    if not devices.has_kernels(h) and torch.compiler.is_compiling():
        return reference(student, student_weight, student_bias, target.to(student.device), None)
    divergence = of_all.divergence
    if divergence == "jsd" and of_all.beta in (0, 1):
        divergence = "reverse_kl" if of_all.beta else "forward_kl"
    dtype = compute_dtype(student, student_weight)
    teacher_dtype = logits.dtype if teacher is None else compute_dtype(teacher, head[0])
    teacher_dtype = torch.float32 if teacher_dtype == torch.float64 else teacher_dtype
    numbers = [
        float(x) for x in (of_all.beta, of_all.temperature, of_all.weight_hard, of_all.weight_soft)
    ]

    def with_kernels(h, w, b, needs):
        *outputs, n, dh, dw, db = distillation_fwd(
            h,
            w,
            b,
            y.contiguous(),
            teacher,
            *head,
            logits,
            rows,
            divergence,
            numbers,
            ignore_index,
            with_hard,
            dtype,
            teacher_dtype,
            accum_dtype,
            memory,
            needs,
        )
        return tuple(outputs), (dh, dw, db), n if dtype == torch.float16 else None

    def without_kernels(h, w, b, needs):
        n = (y != ignore_index).sum().clamp(min=1)

        def of_chunk(i, x):
            with torch.no_grad():
                some = i if rows is None else rows[i]
                z = frozen_logits(teacher[some], *head) if logits is None else logits[some]
            soft, hard = of_logits(x, z, y[i], of_all, with_hard)
            return of_all.weight_hard * hard + of_all.weight_soft * soft, soft, hard

        return *take_in_chunks(of_chunk, n, h, w, b, needs), n

    run = with_kernels if devices.has_kernels(h) else without_kernels
    return gradient_in_forward(run, reference, h, student_weight, student_bias)


# ---- the case ----


def _of(fn):
    def call(*args, more_classes=False, logits=False, **given):
        if more_classes:
            w, b = given["teacher_weight"], given["teacher_bias"]
            given |= dict(teacher_weight=torch.cat((w, w[:3])), teacher_bias=torch.cat((b, b[:3])))
        if logits:
            h, w, b = (given.pop(f"teacher{of}") for of in ("", "_weight", "_bias"))
            given["teacher_logits"] = torch.addmm(b, h, w.t())
        return fn(*args, **given)

    return call


def _inputs(M, H, V):
    student, teacher = torch.randn(M, H), torch.randn(M, H)
    of_student, of_teacher = (
        torch.randn(V, H) / H**0.5,
        torch.randn(V, H) / H**0.5,
    )  # two nats apart
    return dict(
        student=student.requires_grad_(), student_weight=of_student.requires_grad_(),
        student_bias=torch.randn(V).requires_grad_(), target=labels(M, V), teacher=teacher, teacher_weight=of_teacher,
        teacher_bias=torch.randn(V),
    )  # fmt: skip


CASES.append(
    Case(
        "linear_distillation",
        fn=_of(lambda *args, **given: linear_distillation(*args, **given, drop_ignored=False)),
        reference=_of(linear_distillation_reference),
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
