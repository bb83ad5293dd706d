"""Tensors that PyTorch negates when it reads them, such as the imaginary part of a conjugate.

Kernels read what is in memory: they are given copies."""

import pytest
import torch
from cases import BY_CASE, make_inputs
from hardware import DEVICE

from liger_kernel.chunked_loss import liger_medusa_loss
from liger_kernel.losses.distillation import distillation_loss
from liger_kernel.losses.grpo import linear_grpo_loss
from liger_kernel.losses.policy_batch import to_rows


def negated(t):
    """Return t, as a view of -t."""
    return torch._neg_view(-t)


def outputs_and_gradients(case, inputs, view):
    tensors, leaves = dict(inputs), {}
    for name, t in inputs.items():
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            tensors[name] = view(t.detach()).requires_grad_(t.requires_grad)
            if t.requires_grad:
                leaves[name] = tensors[name]
    outputs = case.fn(**tensors)
    outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o is not None]
    differentiable = [o for o in outputs if o.requires_grad]
    grad_outputs = [view(torch.linspace(-1, 1, o.numel()).view_as(o).to(o)) for o in differentiable]
    grads = torch.autograd.grad(differentiable, [*leaves.values()], grad_outputs)
    return *outputs, *grads


@BY_CASE
def test_operators(case):
    inputs = make_inputs(case, case.shapes[0], {})
    expected = outputs_and_gradients(case, inputs, lambda t: t.clone())
    for x, y in zip(outputs_and_gradients(case, inputs, negated), expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=str)
def test_numbers_of_tokens(shape):
    x = torch.randn(shape, device=DEVICE)
    (rows,) = to_rows(x, negated(x))
    assert not rows.is_neg() and torch.equal(rows.view_as(x), x)


def test_losses_of_tokens_and_of_medusa_heads():
    """They run kernels outside of an operator's autograd Function."""
    hidden = torch.randn(2, 5, 16, device=DEVICE)
    weight = torch.randn(40, 16, device=DEVICE)
    bias = torch.randn(40, device=DEVICE)
    labels = torch.randint(40, (2, 5), device=DEVICE)
    log_p, ids = torch.randn(2, 5, 40, device=DEVICE).log_softmax(-1).topk(4, -1)

    def top_k(hidden, weight, bias):
        teacher = dict(teacher_top_k_ids=ids, teacher_top_k_log_probs=log_p, tail=True)
        return distillation_loss(hidden, weight, labels, student_bias=bias, **teacher)

    def all_classes(hidden, weight, bias):
        teacher = dict(teacher_logits=torch.ones(2, 5, 40, device=DEVICE))
        return distillation_loss(hidden, weight, labels, student_bias=bias, **teacher)

    def grpo(hidden, weight, bias):
        mask = torch.ones_like(labels)
        advantages = torch.ones(2, device=DEVICE)
        return linear_grpo_loss(hidden, weight, labels, mask, advantages, bias, beta=0.0)[0]

    def medusa(hidden, weight, bias):
        layers = [torch.nn.Tanh()]
        return liger_medusa_loss(hidden, [weight], labels, bias, layers=layers)[0]

    for loss in top_k, all_classes, grpo, medusa:
        results = []
        for view in torch.clone, negated:
            tensors = [view(x).requires_grad_() for x in (hidden, weight, bias)]
            value = loss(*tensors)
            results.append((value, *torch.autograd.grad(value, tensors)))
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y, msg=lambda text, loss=loss: f"{loss}: {text}")
