"""The distillation losses that frameworks call, their subclasses, and those of a teacher's top
k."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import WITH_AND_WITHOUT_KERNELS, cast, run
from distilled import (
    F16,
    F32,
    F64,
    assert_outputs_close,
    kl,
    make_tensors,
    small_detached_tensors,
    textbook,
    textbook_divergence,
)
from hardware import DEVICE

from liger_kernel.losses import distillation
from liger_kernel.losses.distillation import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearJSDFunction,
    LigerFusedLinearJSDLoss,
    distillation_loss,
    liger_fused_linear_cosine,
    liger_fused_linear_jsd,
)

# ---- the losses that frameworks call ----

NAMES = dict(student="student_input", teacher="teacher_input", target="true_labels")
OF_LOSSES = dict(weight_hard_loss=0.3, weight_soft_loss=0.6, beta=0.4, temperature=2.0)
SAME = {k.removesuffix("_loss"): x for k, x in OF_LOSSES.items()}
LOSSES = dict(
    jsd=(LigerFusedLinearJSDLoss, liger_fused_linear_jsd),
    cosine=(LigerFusedLinearCosineSimilarityLoss, liger_fused_linear_cosine),
)
IN_ORDER = (
    "student",
    "student_weight",
    "teacher",
    "teacher_weight",
    "target",
    "student_bias",
    "teacher_bias",
)


def in_three_dimensions(x, *lead):
    """(B·T, ...) as (B, T, ...) that isn't contiguous."""
    return x.unflatten(0, lead).transpose(0, 1).contiguous().transpose(0, 1)


def called(way, divergence, **more):
    module = LOSSES[divergence][0](**OF_LOSSES, return_soft_hard_loss=True, **more)

    def call(**inputs):
        if way == "function":
            rest = 0.3, 0.6, 0.4, -100, 2.0, True, 1024, True
            return LOSSES[divergence][1](*(inputs[k] for k in IN_ORDER), *rest)
        if way == "three dimensions":
            inputs |= {k: in_three_dimensions(inputs[k], 3, 4) for k in NAMES}
        return module(**{NAMES.get(k, k): x for k, x in inputs.items()})

    return call


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("divergence", LOSSES)
@pytest.mark.parametrize("way", ["module", "function", "three dimensions"])
def test_losses(divergence, way):
    """``chunk_size`` and ``compiled`` change nothing; without the flag it is the loss alone."""
    tensors = cast(make_tensors(12, W=80), F32)
    expected = run(textbook(dict(divergence=divergence, **SAME)), cast(tensors, F64))[0]
    assert_outputs_close(
        run(called(way, divergence, chunk_size=3, compiled=False), tensors)[0], expected
    )
    alone = LOSSES[divergence][0](**OF_LOSSES)(**{NAMES.get(k, k): x for k, x in tensors.items()})
    torch.testing.assert_close(alone.double(), expected["output 0"], rtol=1e-5, atol=1e-6)


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("divergence", LOSSES)
def test_frozen_heads_and_functions(divergence):
    tensors = cast(make_tensors(12), F32)
    expected = run(called("function", divergence), tensors)[0]
    for k in "student_weight", "student_bias":
        tensors[k] = tensors[k].detach()
    actual = run(called("function", divergence), tensors)[0]
    assert actual.keys() == expected.keys() - {"dstudent_weight", "dstudent_bias"}
    assert_outputs_close(actual, {k: expected[k] for k in actual})


class KL(LigerFusedLinearDistillationBase):
    """As users write one: keywords, arguments of its own, gradients for each of them."""

    seen = []

    @staticmethod
    def distillation_loss_fn(
        student_logits, teacher_logits, target, ignore_index, sharpness=1.0, **loss_kwargs
    ):
        KL.seen.append(len(student_logits))
        d = kl(
            (teacher_logits * sharpness).log_softmax(-1),
            (student_logits * sharpness).log_softmax(-1),
        )
        return d[target != ignore_index].sum()

    @classmethod
    def forward(cls, ctx, si, sw, ti, tw, y, sb, tb, how, sharpness, full):
        inputs = dict(
            student_input=si,
            student_weight=sw,
            teacher_input=ti,
            teacher_weight=tw,
            target=y,
            student_bias=sb,
            teacher_bias=tb,
            weight_hard_loss=0.2,
            temperature=2.0,
            sharpness=sharpness,
            return_soft_hard_loss=full,
        )
        if how == "keywords":
            return super().forward(cls=cls, ctx=ctx, **inputs)
        return super().forward(cls, ctx, *(inputs.pop(k) for k in list(inputs)[:7]), **inputs)

    @staticmethod
    def backward(ctx, *grads):
        head_grads = LigerFusedLinearDistillationBase.backward(ctx, *grads)[:6]
        return *head_grads, None, None, None, None


class Short(LigerFusedLinearDistillationBase):
    """Fewer arguments than the base, and its backward."""

    distillation_loss_fn = KL.distillation_loss_fn

    @classmethod
    def forward(cls, ctx, si, sw, ti, tw, y):
        return super().forward(
            cls, ctx, si, sw, ti, tw, y, compute_ce_loss=False, return_soft_hard_loss=True
        )


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("how", ["keywords", "positions"])
def test_subclasses(how, monkeypatch):
    """In chunks; the hook has the tempered logits; a larger teacher; a weight that changes before
    backward."""
    monkeypatch.setattr(distillation, "CHUNK_TOKENS", 5)
    KL.seen.clear()
    tensors = cast(make_tensors(12, W=80), F32)
    option = dict(divergence="forward_kl", temperature=2.0 / 1.5, weight_hard=0.2)

    def subclass(**inputs):
        return KL.apply(*(inputs[k] for k in IN_ORDER), how, 1.5, True)

    expected = run(textbook(option), cast(tensors, F64))[0]
    assert_outputs_close(run(subclass, tensors)[0], expected)
    assert KL.seen == [5, 5, 2]
    loss = KL.apply(*(tensors[k] for k in IN_ORDER), how, 1.5, False)
    with torch.no_grad():
        tensors["student_weight"].zero_()
    g = torch.autograd.grad(loss, tensors["student"])[0]
    first = torch.randn((), generator=torch.Generator().manual_seed(0), dtype=F64).to(DEVICE)
    torch.testing.assert_close(g.double(), expected["dstudent"] / first, rtol=1e-4, atol=1e-6)


@WITH_AND_WITHOUT_KERNELS
def test_a_subclass_with_fewer_arguments():
    tensors = cast(make_tensors(), F32)
    for k in "student_bias", "teacher_bias":
        tensors[k] = torch.zeros_like(tensors[k].detach())
    expected = run(textbook(dict(divergence="forward_kl", weight_hard=0.0)), cast(tensors, F64))[0]
    actual = run(lambda **inputs: Short.apply(*(inputs[k] for k in IN_ORDER[:5])), tensors)[0]
    assert_outputs_close(actual, expected)
    with pytest.raises(NotImplementedError, match="distillation_loss_fn"):
        LigerFusedLinearDistillationBase.forward(
            LigerFusedLinearDistillationBase, _Nothing(), *_five(tensors)
        )


class _Nothing:
    needs_input_grad = [False] * 7


def _five(tensors):
    return [tensors[k] for k in IN_ORDER[:5]]


@pytest.mark.thorough
def test_compiles_whole():
    """`torch.compile` takes the modules whole."""
    torch._dynamo.reset()
    for divergence in LOSSES:
        compiled = torch.compile(called("module", divergence), fullgraph=True, backend="aot_eager")
        for dtype in F32, F16:
            tensors = cast(make_tensors(12), dtype)
            assert_outputs_close(
                run(compiled, tensors)[0],
                run(called("module", divergence), tensors)[0],
                rtol=1e-3,
                atol=1e-3,
            )


# ---- a teacher's top k ----


def of_top_k(
    ids, log_p, tail, divergence, beta=0.5, temperature=1.0, weight_hard=0.5, weight_soft=0.5
):
    """Row by row, over the classes that are there."""

    def call(student, student_weight, student_bias, target):
        x = F.linear(student, student_weight, student_bias)
        n, soft = max(int((target != -100).sum()), 1), x.new_zeros(())
        for z, y, k, lp in zip(x, target, ids, log_p.to(x.dtype), strict=True):
            if y != -100:
                lp, lq = lp[k != -100], (z / temperature).log_softmax(-1)[k[k != -100]]
                if tail:
                    lp, lq = (
                        torch.cat((a, (1 - a.exp().sum(0, keepdim=True)).log())) for a in (lp, lq)
                    )
                soft = soft + textbook_divergence(lp, lq, divergence, beta) / n
        hard = F.cross_entropy(x, target, reduction="sum") / n
        return weight_hard * hard + weight_soft * soft, soft.detach(), hard.detach()

    return call


def top_k(tensors, K, temperature):
    z = torch.addmm(
        *(tensors.pop(f"teacher{k}").double() for k in ("_bias", "")),
        tensors.pop("teacher_weight").double().t(),
    )
    log_p, ids = (z / temperature).log_softmax(-1).float().topk(K)
    gone = torch.arange(ids.numel(), device=ids.device).view(ids.shape) % 7 == 6
    return ids.masked_fill(gone, -100), log_p.masked_fill(gone, 0.0)


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("divergence", ["jsd", "forward_kl", "reverse_kl", "tvd"])
@pytest.mark.parametrize("tail", [False, True], ids=["", "tail"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_top_k(divergence, tail, temperature):
    tensors = cast(make_tensors(12, 24, 40), F32)
    ids, log_p = top_k(tensors, 5, temperature)
    option = dict(divergence=divergence, temperature=temperature, beta=0.3)
    expected = run(of_top_k(ids, log_p, tail, **option), cast(tensors, F64))[0]

    def loss(student, target, three=False, **inputs):
        inputs |= dict(
            student_input=student,
            target=target,
            teacher_top_k_ids=ids,
            teacher_top_k_log_probs=log_p,
        )
        if three:
            rows = "student_input", "target", "teacher_top_k_ids", "teacher_top_k_log_probs"
            inputs |= {k: in_three_dimensions(inputs[k], 3, 4) for k in rows}
        return distillation_loss(**inputs, **option, tail=tail, return_soft_hard_loss=True)

    assert_outputs_close(run(loss, tensors)[0], expected, atol=3e-6)
    assert_outputs_close(run(loss, tensors | dict(three=True))[0], expected, atol=3e-6)


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("divergence", ["jsd", "forward_kl"])
@pytest.mark.parametrize("tail", [False, True], ids=["", "tail"])
def test_top_k_of_all_classes(divergence, tail):
    """Is the whole distribution; the tail is empty then."""
    tensors = cast(make_tensors(6, 24, 20), F32)
    expected = run(textbook(dict(divergence=divergence, weight_hard=0.0)), cast(tensors, F64))[0]
    z = torch.addmm(
        tensors.pop("teacher_bias"), tensors.pop("teacher"), tensors.pop("teacher_weight").t()
    )
    log_p, ids = z.log_softmax(-1).sort(-1, descending=True)

    def loss(student, target, **inputs):
        inputs |= dict(
            teacher_top_k_ids=ids, teacher_top_k_log_probs=log_p, tail=tail, divergence=divergence
        )
        return distillation_loss(student, target=target, **inputs, weight_hard_loss=0.0)

    assert_outputs_close(
        run(loss, tensors)[0],
        {k: x for k, x in expected.items() if k not in ("output 1", "output 2")},
        atol=1e-5,
    )


def with_exact_tail(z, ids, log_p, divergence):
    """In fp64, from logits: the tail is a log-sum-exp of the other classes."""
    log_q = z.log_softmax(-1)
    tail = log_q.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    log_q = torch.cat((log_q.gather(1, ids), tail), 1)
    log_p = torch.cat((log_p, torch.log1p(-log_p.exp().sum(1, keepdim=True))), 1)
    return textbook_divergence(log_p, log_q, divergence, 0.5).mean()


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("divergence", ["jsd", "forward_kl", "reverse_kl", "tvd"])
@pytest.mark.parametrize("lead", [5.0, 15.0, 22.0])
@pytest.mark.parametrize(
    "outside", [False, True], ids=["of a class of the teacher's", "of another"]
)
@pytest.mark.parametrize("hard", [0.0, 0.5])
def test_the_tail_of_a_sure_student(lead, divergence, outside, hard):
    """1 - p of fp32 has no digits of it: the loss and its gradient are those of fp64."""
    N, classes, K = 6, 23, 4
    g = torch.Generator().manual_seed(0)
    log_p, ids = (2 * torch.randn(N, classes, generator=g)).log_softmax(-1).topk(K, -1)
    y = torch.randint(classes, (N,), generator=g).to(DEVICE)
    sure = next_class_outside(ids, classes) if outside else ids[:, :1]
    z = torch.zeros(N, classes).scatter(1, sure, lead).to(DEVICE)
    ids, log_p = ids.to(DEVICE), log_p.to(DEVICE)
    h, w, wide = (
        z.clone().requires_grad_(),
        torch.eye(classes, device=DEVICE),
        z.double().requires_grad_(),
    )
    loss = distillation_loss(
        h,
        w,
        y,
        teacher_top_k_ids=ids,
        teacher_top_k_log_probs=log_p,
        tail=True,
        divergence=divergence,
        weight_hard_loss=hard,
        weight_soft_loss=1.0,
    )
    exact = with_exact_tail(wide, ids, log_p.double(), divergence) + hard * F.cross_entropy(wide, y)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    loss.backward()
    exact.backward()
    assert (h.grad.double() - wide.grad).norm() <= 2e-5 * wide.grad.norm()


def next_class_outside(ids, classes):
    """(N, 1): the first class of each row that is not among its ids (N, K)."""
    inside = torch.zeros(len(ids), classes, dtype=torch.int).scatter(1, ids, 1)
    return inside.argmin(1, keepdim=True)


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("lead", [40.0, 100.0])
def test_the_tail_of_a_student_that_is_surer_still(lead):
    """forward_kl's gradient does not vanish there."""
    log_p, ids = (
        torch.randn(6, 23, generator=torch.Generator().manual_seed(0)).log_softmax(-1).topk(4, -1)
    )
    y, z = (
        torch.zeros(6, dtype=torch.long, device=DEVICE),
        torch.zeros(6, 23).scatter(1, ids[:, :1], lead).to(DEVICE),
    )
    ids, log_p = ids.to(DEVICE), log_p.to(DEVICE)
    h, wide = z.clone().requires_grad_(), z.double().requires_grad_()
    loss = distillation_loss(
        h,
        torch.eye(23, device=DEVICE),
        y,
        teacher_top_k_ids=ids,
        teacher_top_k_log_probs=log_p,
        tail=True,
        divergence="forward_kl",
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
    )
    exact = with_exact_tail(wide, ids, log_p.double(), "forward_kl")
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    loss.backward()
    exact.backward()
    assert (h.grad.double() - wide.grad).norm() <= 2e-5 * wide.grad.norm()


def test_the_tail_of_a_sure_teacher():
    z = torch.randn(5, 30, generator=torch.Generator().manual_seed(0), dtype=F64)
    z[:, 3] = torch.tensor([5.0, 10.0, 15.0, 20.0, 25.0])
    log_p = z.log_softmax(-1)
    log_p, at = log_p.topk(4, -1)
    exact = torch.log_softmax(z, -1).scatter(1, at, -torch.inf).logsumexp(1)
    torch.testing.assert_close(
        distillation.with_tail(log_p.float())[:, -1].double(), exact, rtol=1e-5, atol=1e-5
    )
    sure = distillation.with_tail(torch.tensor([[0.0, -torch.inf], [0.0, -20.0]]))
    assert sure[:, -1].isfinite().all() and (sure[:, -1] < -15).all()


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("divergence", ["jsd", "forward_kl", "reverse_kl", "tvd"])
def test_a_row_without_classes_of_the_teacher(divergence):
    """The tail is everything there, so its soft loss is 0; its label counts."""
    tensors = cast(make_tensors(12, 24, 40), F32)
    ids, log_p = top_k(tensors, 3, 1.0)
    row = int((tensors["target"] != -100).nonzero()[0])
    ids[row], log_p[row] = -100, torch.nan
    option = dict(divergence=divergence, weight_hard=0.5)
    expected = run(of_top_k(ids, log_p, True, **option), cast(tensors, F64))[0]

    def loss(student, target, **inputs):
        inputs |= dict(
            teacher_top_k_ids=ids, teacher_top_k_log_probs=log_p, tail=True, divergence=divergence
        )
        return distillation_loss(student, target=target, **inputs, return_soft_hard_loss=True)

    assert_outputs_close(run(loss, tensors)[0], expected, atol=3e-6)


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tail", [False, True], ids=["", "tail"])
def test_log_probabilities_that_do_not_count(tail, what):
    """Log-probabilities of ignored rows, and of ids that are no class."""
    tensors = cast(make_tensors(12, 24, 40), F32)
    ids, log_p = top_k(tensors, 5, 1.0)
    nothing = (ids == -100) | (tensors["target"] == -100)[:, None]
    assert nothing.any()
    results = []
    for x in log_p, log_p.masked_fill(nothing, what):

        def loss(student, target, x=x, **inputs):
            inputs |= dict(teacher_top_k_ids=ids, teacher_top_k_log_probs=x, tail=tail)
            return distillation_loss(student, target=target, **inputs)

        results.append(run(loss, tensors)[0])
    assert_outputs_close(*results, rtol=0, atol=0)


# ---- a student that equals its teacher ----


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, F16], ids=str)
@pytest.mark.parametrize("teacher", ["head", "logits"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (6, 8, 37), (5, 24, 123), (13, 64, 257)], ids=str)
def test_tvd_of_a_student_that_equals_its_teacher(shape, teacher, dtype):
    """No gradient, though the logits of the two may come from different matmuls."""
    M, H, V = shape
    torch.manual_seed(0)
    h, w = (
        torch.randn(M, H).to(dtype).to(DEVICE),
        (torch.randn(V, H) * 2 / H**0.5).to(dtype).to(DEVICE),
    )
    inputs = (
        dict(teacher_logits=h @ w.t())
        if teacher == "logits"
        else dict(teacher_input=h, teacher_weight=w)
    )
    student = h.clone().requires_grad_(), w.clone().requires_grad_()
    y = torch.zeros(M, dtype=torch.long, device=DEVICE)
    loss = distillation_loss(
        *student, y, **inputs, divergence="tvd", weight_hard_loss=0.0, weight_soft_loss=1.0
    )
    loss.backward()
    assert loss.abs() <= 64 * torch.finfo(F32).eps
    assert not any(x.grad.any() for x in student)


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_top_k_without_rows_that_count(temperature):
    tensors = cast(make_tensors(6, 24, 20), F32)
    ids, log_p = top_k(tensors, 3, temperature)
    tensors["target"].fill_(-100)
    names = dict(student="student_input")
    inputs = {names.get(k, k): x for k, x in tensors.items()}
    for tail in False, True:
        loss = distillation_loss(
            **inputs,
            teacher_top_k_ids=ids,
            teacher_top_k_log_probs=log_p,
            tail=tail,
            temperature=temperature,
        )
        loss.backward()
        assert loss == 0 and not any(t.grad.any() for t in inputs.values() if t.requires_grad)


OTHERS = {
    "rows": (
        dict(true_labels=torch.zeros(3, dtype=torch.long)),
        r"labels have shape \(3,\).*\(4,\)",
    ),
    "teacher": (dict(teacher_input=torch.zeros(5, 5)), r"teacher_input has shape \(5, 5\)"),
    "no teacher": (dict(teacher_input=None, teacher_weight=None), "give"),
}


@pytest.mark.parametrize("changed,words", OTHERS.values(), ids=OTHERS)
def test_errors_of_the_losses(changed, words):
    inputs = {NAMES.get(k, k): t for k, t in small_detached_tensors().items()} | changed
    with pytest.raises(ValueError, match=words):
        LigerFusedLinearJSDLoss()(**inputs)
    with pytest.raises(ValueError, match=words):
        LigerFusedLinearJSDFunction.apply(*(inputs[NAMES.get(k, k)] for k in IN_ORDER))


def test_errors_when_made():
    for kind, changed in itertools.product(
        (LOSSES["jsd"][0], LOSSES["cosine"][0]), (dict(temperature=0),)
    ):
        for error in (ValueError, AssertionError):
            with pytest.raises(error, match=f"{kind.__name__}: temperature is 0"):
                kind(**changed)
    with pytest.raises(ValueError, match="LigerFusedLinearJSDLoss: beta is -1"):
        LigerFusedLinearJSDLoss(beta=-1)


TOP = dict(
    teacher_top_k_ids=torch.zeros(4, 2, dtype=torch.long), teacher_top_k_log_probs=torch.zeros(4, 2)
)
WRONG_TOP = {
    "one of two": (
        dict(teacher_top_k_ids=None),
        ValueError,
        r"shapes None and \(4, 2\), give both alike",
    ),
    "another k": (
        dict(teacher_top_k_log_probs=torch.zeros(4, 3)),
        ValueError,
        r"\(4, 2\) and \(4, 3\)",
    ),
    "rows": (
        dict(teacher_top_k_ids=torch.zeros(3, 2)),
        ValueError,
        r"teacher_top_k_ids has shape \(3, 2\)",
    ),
    "dtype": (
        dict(teacher_top_k_ids=torch.zeros(4, 2)),
        TypeError,
        "teacher_top_k_ids is torch.float32",
    ),
    "cosine": (
        dict(divergence="cosine"),
        ValueError,
        "divergence 'cosine' is of logits; for a top k give",
    ),
    "two teachers": (dict(teacher_logits=torch.zeros(4, 7)), ValueError, "give one teacher"),
    "tail": (
        dict(teacher_top_k_ids=None, teacher_top_k_log_probs=None, tail=True),
        ValueError,
        "tail is for",
    ),
}


@pytest.mark.parametrize("changed,error,words", WRONG_TOP.values(), ids=WRONG_TOP)
def test_errors_of_a_top_k(changed, error, words):
    inputs = {k: t for k, t in small_detached_tensors().items() if not k.startswith("teacher")}
    with pytest.raises(error, match=f"distillation_loss: .*{words}"):
        distillation_loss(inputs.pop("student"), **inputs, **{**TOP, **changed})
