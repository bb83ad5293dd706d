"""The Functions under the losses, whose gradients wait for the incoming gradient."""

import pytest
import torch
import torch.nn.functional as F
from cases import WITH_AND_WITHOUT_KERNELS
from hardware import DEVICE

from liger_kernel import chunked_loss

B, T, H, V = 4, 64, 16, 64
SCALE = 2.0**16  # the first one of a `GradScaler`


def simpo(h, w, target):
    return chunked_loss.LigerFusedLinearSimPOFunction.apply(h, w, target)[0]


def kto(h, w, target):
    is_good = torch.tensor([True, False] * (B // 2), device=DEVICE)
    no_bias_nor_reference = [None] * 5
    # ignore_index, beta, compiled, use_ref_model, average_log_prob
    options = -100, 0.1, True, False, True
    arguments = h, w, target, is_good, *no_bias_nor_reference, *options
    return chunked_loss.LigerFusedLinearKTOFunction.apply(*arguments)[0]


def grpo(h, w, target):
    mask = torch.ones(B, T, device=DEVICE)
    advantages = torch.tensor([1.0, -2.0, 0.5, 1.5], device=DEVICE)
    no_bias_nor_reference = [None] * 6
    arguments = h, w, target, mask, advantages, *no_bias_nor_reference, 0.0  # beta
    return chunked_loss.LigerFusedLinearGRPOFunction.apply(*arguments)[0]


def with_teacher(function, h, w, target):
    teacher = h.detach().flip(0).flatten(0, 1)
    return function.apply(h.flatten(0, 1), w, teacher, w.detach().flip(0), target.flatten())


def jsd(h, w, target):
    return with_teacher(chunked_loss.LigerFusedLinearJSDFunction, h, w, target)


class ForwardKL(chunked_loss.LigerFusedLinearDistillationBase):
    """A divergence of one's own, without kernels."""

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target, **_):
        teacher = teacher_logits.softmax(-1)
        return F.kl_div(student_logits.log_softmax(-1), teacher, reduction="sum")

    @classmethod
    def forward(cls, ctx, *args):
        return super().forward(cls, ctx, *args)

    @staticmethod
    def backward(ctx, grad_output):
        return chunked_loss.LigerFusedLinearDistillationBase.backward(ctx, grad_output)


def own_divergence(h, w, target):
    return with_teacher(ForwardKL, h, w, target)


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("loss_fn", [simpo, kto, grpo, jsd, own_divergence])
def test_fp16_gradients_wait_for_the_loss_scale(loss_fn):
    """fp16 cannot hold the gradients of hidden states without it, under a weight in fp32."""
    torch.manual_seed(0)
    hidden = torch.randn(B, T, H).half().to(DEVICE)
    weight = (torch.randn(V, H) * 1e-3).to(DEVICE)
    target = torch.randint(V, (B, T)).to(DEVICE)

    def gradients(hidden, weight):
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        return torch.autograd.grad(loss_fn(*leaves, target) * SCALE, leaves)

    exact = gradients(hidden.double(), weight.double())
    actual = gradients(hidden.clone(), weight)
    assert [x.dtype for x in actual] == [torch.float16, torch.float32]
    fp32 = 2 * V * 2.0**-24  # the roundings of sums over the classes, or over a class's tokens
    # hidden states' gradients are rounded to fp16 before and after the scale
    for x, y, bound in zip(actual, exact, (2 * 2.0**-11 + fp32, fp32), strict=True):
        assert (x.double() - y).abs().max() <= bound * y.abs().max()


@WITH_AND_WITHOUT_KERNELS
def test_sums_that_fp16_cannot_hold():
    """The gradient of a weight in fp16, before it is divided by the number of tokens."""
    hidden = torch.full((B, T, H), 1000.0, dtype=torch.float16, device=DEVICE)
    weight = torch.zeros(V, H, dtype=torch.float16, device=DEVICE).requires_grad_()
    target = torch.zeros(B, T, dtype=torch.long, device=DEVICE)
    (dw,) = torch.autograd.grad(jsd(hidden, weight, target), weight)
    exact = torch.full((V, H), 1 / V, dtype=torch.float64, device=DEVICE)
    exact[0] -= 1
    exact *= 0.5 * 1000  # weight_hard_loss; the teacher's logits are 0, too
    # rounded to fp16 once, in which 1/V and 1/V - 1 are exact
    assert ((dw.double() - exact).abs() <= 2.0**-11 * exact.abs()).all()
