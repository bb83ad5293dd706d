"""Tensors saved for backward: trainable parameters pass the hooks of a checkpoint by, no others."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_kernel.core.saved import save_for_backward, saved_tensors


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        save_for_backward(ctx, x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = saved_tensors(ctx)
        return grad * y, grad * x


def parameters():
    return [torch.nn.Parameter(torch.tensor([value])) for value in (2.0, 3.0)]


def test_hooks_that_keep_copies():
    """As those that move tensors to the host. A step before backward does nothing to them."""
    x, y = parameters()
    with saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        z = Product.apply(x, y)
    with torch.no_grad():
        x.add_(10)
    assert torch.autograd.grad(z, y)[0] == 2


def test_a_write_before_backward():
    x, y = parameters()
    z = Product.apply(x, y)
    with torch.no_grad():
        x.add_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_hooks_of_a_checkpoint_are_passed_by(monkeypatch):
    saved = []
    save = torch.autograd.function.FunctionCtx.save_for_backward

    def save_and_count(ctx, *tensors):
        if isinstance(ctx, Product._backward_cls):  # PyTorch 2.11's checkpoint saves by one, too
            saved.append(len(tensors))
        return save(ctx, *tensors)

    monkeypatch.setattr(torch.autograd.function.FunctionCtx, "save_for_backward", save_and_count)
    x, y = parameters()
    checkpoint(Product.apply, x, y, use_reentrant=False).backward()
    assert saved == [0] and x.grad == 3 and y.grad == 2
