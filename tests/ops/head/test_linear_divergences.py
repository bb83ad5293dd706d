"""Fused linear JSD and KL: against logits made whole in fp64, with kernels and without."""

import inspect

import pytest
import torch
from cases import ANYWHERE
from hardware import DEVICE

from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
from liger_kernel.ops import LigerFusedLinearJSDFunction, LigerFusedLinearKLDivFunction
from liger_kernel.ops.functional import (
    liger_fused_linear_cross_entropy,
    liger_fused_linear_jsd,
    liger_fused_linear_kl_div,
)
from liger_kernel.ops.head.linear_kl_div import fused_linear_kl_div_reference
from liger_kernel.transformers import LigerFusedLinearJSD, LigerFusedLinearKLDivLoss

M, H, V = 9, 24, 77
LABELS = torch.arange(M, device=DEVICE).where(torch.arange(M, device=DEVICE) % 3 != 1, -100)
SOME = pytest.mark.parametrize("labels", [None, LABELS], ids=["all rows", "some rows"])


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def heads():
    student, weight = drawn(M, H).requires_grad_(), (drawn(V, H, seed=1) / 3).requires_grad_()
    return student, weight, drawn(M, H - 3, seed=2), drawn(V, H - 3, seed=3) / 3


def kept(labels):
    return slice(None) if labels is None else labels != -100


def compared(got, want, student, weight, exact_student, exact_weight):
    """The loss, and the gradients for an incoming one that is not 1."""
    assert got.dtype == torch.float32 and got.dim() == 0
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)
    grads = torch.autograd.grad(got, (student, weight), torch.tensor(3.0, device=DEVICE))
    exact = torch.autograd.grad(
        want, (exact_student, exact_weight), torch.tensor(3.0, device=DEVICE).double()
    )
    for a, b in zip(grads, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6 * b.abs().max().item())


@ANYWHERE
@SOME
@pytest.mark.parametrize("beta,temperature", [(0.5, 1.0), (0.1, 2.0), (0.0, 1.0), (1.0, 0.7)])
def test_jsd(beta, temperature, labels):
    student, weight, *teacher = heads()
    exact = [x.detach().double().requires_grad_() for x in (student, weight)]
    log_q = ((exact[0] @ exact[1].t()) / temperature).log_softmax(-1)[kept(labels)]
    log_p = ((teacher[0] @ teacher[1].t()).double() / temperature).log_softmax(-1)[kept(labels)]
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * p + (1 - beta) * q).log()
    whole = {0.0: p * (log_p - log_q), 1.0: q * (log_q - log_p)}
    want = whole.get(
        beta, beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)
    ).sum() / len(p)
    got = liger_fused_linear_jsd(student, weight, *teacher, labels, beta, temperature=temperature)
    compared(got, want, student, weight, *exact)


@ANYWHERE
@SOME
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
def test_kl_div(reduction, labels):
    """Of rows that do not add up to 1, with zeros."""
    student, weight, *_ = heads()
    p = drawn(M, V, seed=4).relu() / 9
    exact = [x.detach().double().requires_grad_() for x in (student, weight)]
    log_q = ((exact[0] @ exact[1].t()) / 2).log_softmax(-1)[kept(labels)]
    of = p.double()[kept(labels)]
    d = of * (of.clamp(min=1e-2).log() - log_q)
    want = {"batchmean": d.sum() / len(d), "mean": d.mean(), "sum": d.sum()}[reduction]
    got = liger_fused_linear_kl_div(
        student, weight, p, labels, reduction, temperature=2.0, eps=1e-2
    )
    compared(got, want, student, weight, *exact)


@ANYWHERE
def test_one_hot_is_cross_entropy():
    student, weight, *_ = heads()
    y = torch.randint(V, (M,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    hot = torch.nn.functional.one_hot(y, V).float()
    for dtype in (torch.float32, torch.bfloat16):
        got, want = (
            (loss, *torch.autograd.grad(loss, (student, weight)))
            for loss in (
                liger_fused_linear_kl_div(student.to(dtype), weight.to(dtype), hot.to(dtype)),
                liger_fused_linear_cross_entropy(student.to(dtype), weight.to(dtype), y),
            )
        )
        eps = torch.finfo(dtype).eps
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=4 * eps * b.abs().max().item())


@ANYWHERE
def test_all_ignored():
    student, weight, *teacher = heads()
    nothing = torch.full((M,), -100, device=DEVICE)
    for loss in (
        liger_fused_linear_jsd(student, weight, *teacher, nothing),
        *(
            liger_fused_linear_kl_div(student, weight, drawn(M, V).relu(), nothing, r)
            for r in ("batchmean", "sum")
        ),
    ):
        assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, (student, weight)))


def test_nan_of_the_teacher_in_an_ignored_row():
    """Also of the reference alone, which torch.compile runs on a CPU."""
    student, weight = heads()[:2]
    target = drawn(M, V).softmax(-1)
    for fn in (liger_fused_linear_kl_div, fused_linear_kl_div_reference):
        results = []
        for value in (0.5, torch.nan):
            leaf = student.detach().requires_grad_()
            loss = fn(leaf, weight, target.masked_fill((LABELS == -100)[:, None], value), LABELS)
            results.append((loss, *torch.autograd.grad(loss, leaf)))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def test_no_labels_ignore_no_row():
    """Whatever the index of those that are ignored is."""
    student, weight, *teacher = heads()
    for index in (0, 1, -100):
        got = liger_fused_linear_jsd(student, weight, *teacher, ignore_index=index)
        assert got == liger_fused_linear_jsd(student, weight, *teacher)


def test_only_the_student_learns():
    student, weight, teacher, teacher_weight = (x.detach().requires_grad_() for x in heads())
    p = drawn(M, V).softmax(-1).requires_grad_()
    jsd = liger_fused_linear_jsd(student, weight, teacher, teacher_weight)
    kl = liger_fused_linear_kl_div(student, weight, p)
    frozen = torch.autograd.grad(
        jsd + kl, (teacher, teacher_weight, p), allow_unused=True, retain_graph=True
    )
    assert frozen == (None, None, None) and all(
        g.any() for g in torch.autograd.grad(jsd + kl, (student, weight))
    )


def test_faces():
    student, weight, *teacher = heads()
    p, same = drawn(M, V).softmax(-1), torch.testing.assert_close
    want = liger_fused_linear_jsd(student, weight, *teacher, LABELS, 0.2, -100, 2.0)
    same(LigerFusedLinearJSD(0.2, temperature=2.0)(student, weight, *teacher, LABELS), want)
    same(LigerFusedLinearJSDFunction.apply(student, weight, *teacher, LABELS, 0.2, -100, 2.0), want)
    of_chunks = LigerFusedLinearJSDLoss(0.0, 1.0, beta=0.2, temperature=2.0)
    same(of_chunks(student, weight, *teacher, LABELS), want)
    assert (
        inspect.signature(LigerFusedLinearJSD.forward).parameters["shift_labels"].default
        is inspect._empty
    )
    want = liger_fused_linear_kl_div(student, weight, p, LABELS, "sum", -100, 2.0)
    same(LigerFusedLinearKLDivLoss("sum", temperature=2.0)(student, weight, p, LABELS), want)
    same(LigerFusedLinearKLDivFunction.apply(student, weight, p, LABELS, "sum", -100, 2.0), want)


@pytest.mark.parametrize(
    "said,changed",
    [
        ("jsd_beta is 1.5, give", dict(jsd_beta=1.5)),
        ("temperature is 0, give", dict(temperature=0)),
        ("give as many classes", dict(teacher_weight=torch.zeros(V + 1, H - 3, device=DEVICE))),
        (r"shift_labels has shape \(8,\), give", dict(shift_labels=LABELS[1:])),
        (
            "liger_fused_linear_jsd: the hidden states have shape",
            dict(student_input=drawn(3, 3, H), shift_labels=LABELS),
        ),
    ],
)
def test_errors_of_jsd(said, changed):
    names = "student_input", "student_weight", "teacher_input", "teacher_weight"
    with pytest.raises(AssertionError if "temperature" in changed else ValueError, match=said):
        liger_fused_linear_jsd(**dict(zip(names, heads(), strict=True)) | changed)


@pytest.mark.parametrize(
    "said,changed",
    [
        ("reduction is 'none', give", dict(reduction="none")),
        ("temperature is 0, give", dict(temperature=0)),
        ("eps is -1, give", dict(eps=-1)),
        (r"target has shape \(8, 77\), give", dict(target=torch.zeros(M - 1, V, device=DEVICE))),
        (r"shift_labels has shape \(8,\), give", dict(shift_labels=LABELS[1:])),
        ("the hidden states have shape", dict(student_input=drawn(3, 3, H), shift_labels=LABELS)),
    ],
)
def test_errors_of_kl_div(said, changed):
    given = dict(
        zip(("student_input", "student_weight"), heads(), strict=False), target=drawn(M, V)
    )
    with pytest.raises(ValueError, match=said):
        liger_fused_linear_kl_div(**given | changed)
