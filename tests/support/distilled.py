"""A student and a teacher: their tensors, and every divergence from its definition."""

import pytest
import torch
import torch.nn.functional as F
from cases import cast, run

from liger_kernel.ops.head.distillation import linear_distillation

F64, F32, B16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DIVERGENCES = "jsd", "forward_kl", "reverse_kl", "tvd", "cosine"
DIVERGENCE = pytest.mark.parametrize("divergence", DIVERGENCES)


def make_tensors(M=9, H=24, V=77, W=None, seed=0, ignore_index=-100, **_):
    """Make tensors on the CPU in fp32, with every third row ignored.

    The student has V classes, the teacher W.
    """
    torch.manual_seed(seed)
    W = V if W is None else W
    target = torch.randint(V, (M,)).where(torch.arange(M) % 3 != 1, ignore_index)
    student = dict(
        student=torch.randn(M, H),
        student_weight=torch.randn(V, H) * 2 / H**0.5,
        student_bias=torch.randn(V),
    )
    teacher = dict(
        teacher=torch.randn(M, H - 3),
        teacher_weight=torch.randn(W, H - 3) * 2 / H**0.5,
        teacher_bias=torch.randn(W),
    )
    for t in student.values():
        t.requires_grad_()
    return student | dict(target=target) | teacher


def textbook_divergence(log_p, log_q, divergence, beta):
    """Compute a divergence from its definition."""
    if divergence == "jsd" and beta not in (0, 1):
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)
    if divergence == "tvd":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    backward = divergence == "reverse_kl" or (divergence == "jsd" and beta == 1)
    return kl(log_q, log_p) if backward else kl(log_p, log_q)


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def textbook_from_logits(
    x,
    y,
    target,
    divergence="jsd",
    beta=0.5,
    temperature=1.0,
    weight_hard=0.5,
    weight_soft=0.5,
    ignore_index=-100,
    return_hard=False,
):
    valid = target != ignore_index
    n = max(int(valid.sum()), 1)
    wide_dtype = torch.promote_types(x.dtype, F32)
    x = x.to(wide_dtype)
    y = y.to(wide_dtype)
    s = F.pad(x / temperature, (0, y.shape[1] - x.shape[1]))
    t = y / temperature
    if divergence == "cosine":
        d = beta * (1 - F.cosine_similarity(s, t, dim=-1))
    else:
        d = textbook_divergence(t.log_softmax(-1), s.log_softmax(-1), divergence, beta)
    soft = d[valid].sum() / n
    hard = F.cross_entropy(x[valid], target[valid], reduction="sum") / n
    if not (weight_hard or return_hard):
        hard = torch.zeros_like(hard)
    return weight_hard * hard + weight_soft * soft, soft.detach(), hard.detach()


def textbook(option):
    """Return a function of the tensors of `make_tensors` that computes (loss, soft, hard)."""

    def call(student, student_weight, student_bias, target, teacher, teacher_weight, teacher_bias):
        x = F.linear(student, student_weight, student_bias)
        y = torch.addmm(teacher_bias, teacher, teacher_weight.t())
        return textbook_from_logits(x, y, target, **option)

    return call


def distillation_with(option, **extra_options):
    """Return `linear_distillation` with these options. It keeps ignored rows by default."""
    options = {"drop_ignored": False, **option, **extra_options}
    return lambda **tensors: linear_distillation(**tensors, **options)


def assert_outputs_close(outputs, expected, rtol=1e-5, atol=1e-6):
    assert outputs.keys() == expected.keys()
    for name, output in outputs.items():
        torch.testing.assert_close(
            output,
            expected[name].to(output.dtype),
            rtol=rtol,
            atol=atol,
            msg=lambda message, name=name: f"{name} {message}",
        )


def assert_matches_textbook(option, tensors, dtype=F32, fn=None, **bounds):
    """Compare outputs and gradients with the textbook's in fp64, and return them."""
    tensors = cast(tensors, dtype)
    outputs = run(fn or distillation_with(option), tensors)[0]
    expected = run(textbook(option), cast(tensors, F64))[0]
    assert_outputs_close(outputs, expected, **bounds)
    return outputs


def small_detached_tensors():
    tensors = make_tensors(4, 8, 7)
    return {k: t.detach() for k, t in tensors.items()}
