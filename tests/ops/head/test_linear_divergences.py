"""Fused linear JSD and KL against all logits at once in fp64, with kernels and without."""

import inspect

import pytest
import torch
from cases import WITH_AND_WITHOUT_KERNELS
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
LABELS_OR_NONE = pytest.mark.parametrize("labels", [None, LABELS], ids=["all rows", "some rows"])


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make_heads():
    """Return hidden states and weight of a student, and of a teacher."""
    student = randn(M, H).requires_grad_()
    student_weight = (randn(V, H, seed=1) / 3).requires_grad_()
    return student, student_weight, randn(M, H - 3, seed=2), randn(V, H - 3, seed=3) / 3


def valid_rows(labels):
    return slice(None) if labels is None else labels != -100


def assert_matches_exact(loss, expected, inputs, exact_inputs):
    """Compare the losses, and the gradients for an incoming one that is not 1."""
    assert loss.dtype == torch.float32 and loss.dim() == 0
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-7)
    grad_output = torch.tensor(3.0, device=DEVICE)
    grads = torch.autograd.grad(loss, inputs, grad_output)
    exact_grads = torch.autograd.grad(expected, exact_inputs, grad_output.double())
    for grad, exact in zip(grads, exact_grads, strict=True):
        atol = 1e-6 * exact.abs().max().item()
        torch.testing.assert_close(grad.double(), exact, rtol=1e-4, atol=atol)


def exact_log_softmax(hidden, weight, temperature, labels):
    """Return log-probabilities of the valid rows in fp64."""
    logits = (hidden @ weight.t()).double() / temperature
    return logits.log_softmax(-1)[valid_rows(labels)]


@WITH_AND_WITHOUT_KERNELS
@LABELS_OR_NONE
@pytest.mark.parametrize("beta,temperature", [(0.5, 1.0), (0.1, 2.0), (0.0, 1.0), (1.0, 0.7)])
def test_jsd(beta, temperature, labels):
    student, weight, *teacher = make_heads()
    exact = [x.detach().double().requires_grad_() for x in (student, weight)]
    log_q = exact_log_softmax(*exact, temperature, labels)
    log_p = exact_log_softmax(*teacher, temperature, labels)
    p = log_p.exp()
    q = log_q.exp()
    if beta == 0:
        d = p * (log_p - log_q)
    elif beta == 1:
        d = q * (log_q - log_p)
    else:
        log_m = (beta * p + (1 - beta) * q).log()
        d = beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)
    loss = liger_fused_linear_jsd(student, weight, *teacher, labels, beta, temperature=temperature)
    assert_matches_exact(loss, d.sum() / len(p), (student, weight), exact)


@WITH_AND_WITHOUT_KERNELS
@LABELS_OR_NONE
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
def test_kl_div(reduction, labels):
    """Rows of the target need not add up to 1, and may have zeros."""
    student, weight, *_ = make_heads()
    target = randn(M, V, seed=4).relu() / 9
    exact = [x.detach().double().requires_grad_() for x in (student, weight)]
    log_q = exact_log_softmax(*exact, 2, labels)
    p = target.double()[valid_rows(labels)]
    d = p * (p.clamp(min=1e-2).log() - log_q)
    expected = {"batchmean": d.sum() / len(d), "mean": d.mean(), "sum": d.sum()}[reduction]
    loss = liger_fused_linear_kl_div(
        student, weight, target, labels, reduction, temperature=2.0, eps=1e-2
    )
    assert_matches_exact(loss, expected, (student, weight), exact)


@WITH_AND_WITHOUT_KERNELS
def test_one_hot_is_cross_entropy():
    student, weight, *_ = make_heads()
    y = torch.randint(V, (M,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    one_hot = torch.nn.functional.one_hot(y, V).float()
    for dtype in (torch.float32, torch.bfloat16):
        head = student.to(dtype), weight.to(dtype)
        kl = liger_fused_linear_kl_div(*head, one_hot.to(dtype))
        ce = liger_fused_linear_cross_entropy(*head, y)
        outputs = kl, *torch.autograd.grad(kl, (student, weight))
        expected = ce, *torch.autograd.grad(ce, (student, weight))
        eps = torch.finfo(dtype).eps
        for a, b in zip(outputs, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=4 * eps * b.abs().max().item())


@WITH_AND_WITHOUT_KERNELS
def test_all_ignored():
    student, weight, *teacher = make_heads()
    labels = torch.full((M,), -100, device=DEVICE)
    target = randn(M, V).relu()
    for loss in (
        liger_fused_linear_jsd(student, weight, *teacher, labels),
        liger_fused_linear_kl_div(student, weight, target, labels, "batchmean"),
        liger_fused_linear_kl_div(student, weight, target, labels, "sum"),
    ):
        grads = torch.autograd.grad(loss, (student, weight))
        assert loss == 0 and not any(grad.any() for grad in grads)


def test_nan_of_the_teacher_in_an_ignored_row():
    """It has no influence, also in the reference, which torch.compile runs on a CPU."""
    student, weight = make_heads()[:2]
    target = randn(M, V).softmax(-1)
    for fn in (liger_fused_linear_kl_div, fused_linear_kl_div_reference):
        results = []
        for value in (0.5, torch.nan):
            leaf = student.detach().requires_grad_()
            loss = fn(leaf, weight, target.masked_fill((LABELS == -100)[:, None], value), LABELS)
            results.append((loss, *torch.autograd.grad(loss, leaf)))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def test_no_labels_ignore_no_row():
    """For any ignore_index."""
    student, weight, *teacher = make_heads()
    expected = liger_fused_linear_jsd(student, weight, *teacher)
    for index in (0, 1, -100):
        assert liger_fused_linear_jsd(student, weight, *teacher, ignore_index=index) == expected


def test_only_the_student_learns():
    student, weight, teacher, teacher_weight = (x.detach().requires_grad_() for x in make_heads())
    p = randn(M, V).softmax(-1).requires_grad_()
    jsd = liger_fused_linear_jsd(student, weight, teacher, teacher_weight)
    kl = liger_fused_linear_kl_div(student, weight, p)
    teacher_grads = torch.autograd.grad(
        jsd + kl, (teacher, teacher_weight, p), allow_unused=True, retain_graph=True
    )
    assert teacher_grads == (None, None, None)
    assert all(grad.any() for grad in torch.autograd.grad(jsd + kl, (student, weight)))


def test_modules_and_functions():
    student, weight, *teacher = make_heads()
    p = randn(M, V).softmax(-1)
    assert_close = torch.testing.assert_close
    expected = liger_fused_linear_jsd(student, weight, *teacher, LABELS, 0.2, -100, 2.0)
    assert_close(
        LigerFusedLinearJSD(0.2, temperature=2.0)(student, weight, *teacher, LABELS), expected
    )
    assert_close(
        LigerFusedLinearJSDFunction.apply(student, weight, *teacher, LABELS, 0.2, -100, 2.0),
        expected,
    )
    chunked_loss = LigerFusedLinearJSDLoss(0.0, 1.0, beta=0.2, temperature=2.0)
    assert_close(chunked_loss(student, weight, *teacher, LABELS), expected)
    parameters = inspect.signature(LigerFusedLinearJSD.forward).parameters
    assert parameters["shift_labels"].default is inspect._empty
    expected = liger_fused_linear_kl_div(student, weight, p, LABELS, "sum", -100, 2.0)
    assert_close(
        LigerFusedLinearKLDivLoss("sum", temperature=2.0)(student, weight, p, LABELS), expected
    )
    assert_close(
        LigerFusedLinearKLDivFunction.apply(student, weight, p, LABELS, "sum", -100, 2.0), expected
    )


@pytest.mark.parametrize(
    "message,changed",
    [
        ("jsd_beta is 1.5, give", dict(jsd_beta=1.5)),
        ("temperature is 0, give", dict(temperature=0)),
        ("give as many classes", dict(teacher_weight=torch.zeros(V + 1, H - 3, device=DEVICE))),
        (r"shift_labels has shape \(8,\), give", dict(shift_labels=LABELS[1:])),
        (
            "liger_fused_linear_jsd: the hidden states have shape",
            dict(student_input=randn(3, 3, H), shift_labels=LABELS),
        ),
    ],
)
def test_errors_of_jsd(message, changed):
    names = "student_input", "student_weight", "teacher_input", "teacher_weight"
    arguments = dict(zip(names, make_heads(), strict=True)) | changed
    with pytest.raises(AssertionError if "temperature" in changed else ValueError, match=message):
        liger_fused_linear_jsd(**arguments)


@pytest.mark.parametrize(
    "message,changed",
    [
        ("reduction is 'none', give", dict(reduction="none")),
        ("temperature is 0, give", dict(temperature=0)),
        ("eps is -1, give", dict(eps=-1)),
        (r"target has shape \(8, 77\), give", dict(target=torch.zeros(M - 1, V, device=DEVICE))),
        (r"shift_labels has shape \(8,\), give", dict(shift_labels=LABELS[1:])),
        ("the hidden states have shape", dict(student_input=randn(3, 3, H), shift_labels=LABELS)),
    ],
)
def test_errors_of_kl_div(message, changed):
    student, weight, *_ = make_heads()
    arguments = dict(student_input=student, student_weight=weight, target=randn(M, V)) | changed
    with pytest.raises(ValueError, match=message):
        liger_fused_linear_kl_div(**arguments)
