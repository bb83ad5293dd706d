"""Tensors that PyTorch negates when it reads them, such as the imaginary part of a conjugate.

Kernels read what is in memory: they are given copies."""

import pytest
import torch
from cases import BY_CASE, make_inputs
from hardware import DEVICE

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
