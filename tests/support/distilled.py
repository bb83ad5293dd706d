"""A student and a teacher: what is drawn, and every divergence as a textbook has it."""

import pytest
import torch
import torch.nn.functional as F
from cases import cast, run

from liger_kernel.ops.head.distillation import linear_distillation as distil

F64, F32, B16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DIVERGENCES = "jsd", "forward_kl", "reverse_kl", "tvd", "cosine"
DIVERGENCE = pytest.mark.parametrize("divergence", DIVERGENCES)


def drawn(M=9, H=24, V=77, W=None, seed=0, ignore_index=-100, **_):
    """Tensors on the CPU in fp32, every third row ignored; V classes of the student, W of the
    teacher."""
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
    return {k: t.requires_grad_() for k, t in student.items()} | dict(target=target) | teacher


def divergence_of(log_p, log_q, divergence, beta):
    """As a textbook has it."""
    if divergence == "jsd" and beta not in (0, 1):
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)
    if divergence == "tvd":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    backward = divergence == "reverse_kl" or (divergence == "jsd" and beta == 1)
    return kl(log_q, log_p) if backward else kl(log_p, log_q)


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def of_logits(
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
    valid, wide = target != ignore_index, torch.promote_types(x.dtype, F32)
    n = max(int(valid.sum()), 1)
    x, y = x.to(wide), y.to(wide)
    s, t = F.pad(x / temperature, (0, y.shape[1] - x.shape[1])), y / temperature
    if divergence == "cosine":
        d = beta * (1 - F.cosine_similarity(s, t, dim=-1))
    else:
        d = divergence_of(t.log_softmax(-1), s.log_softmax(-1), divergence, beta)
    soft = d[valid].sum() / n
    hard = F.cross_entropy(x[valid], target[valid], reduction="sum") / n
    hard = hard if weight_hard or return_hard else torch.zeros_like(hard)
    return weight_hard * hard + weight_soft * soft, soft.detach(), hard.detach()


def textbook(option):
    def call(student, student_weight, student_bias, target, teacher, teacher_weight, teacher_bias):
        x = F.linear(student, student_weight, student_bias)
        return of_logits(
            x, torch.addmm(teacher_bias, teacher, teacher_weight.t()), target, **option
        )

    return call


def ours(option, **more):
    return lambda **tensors: distil(**tensors, **{"drop_ignored": False, **option, **more})


def same(got, want, rtol=1e-5, atol=1e-6):
    assert got.keys() == want.keys()
    for k in want:
        torch.testing.assert_close(
            got[k], want[k].to(got[k].dtype), rtol=rtol, atol=atol, msg=lambda t, k=k: f"{k} {t}"
        )


def compared(option, tensors, dtype=F32, fn=None, **bounds):
    got = run(fn or ours(option), cast(tensors, dtype))[0]
    same(got, run(textbook(option), cast(cast(tensors, dtype), F64))[0], **bounds)
    return got


def few():
    tensors = drawn(4, 8, 7)
    return {k: t.detach() for k, t in tensors.items()}
