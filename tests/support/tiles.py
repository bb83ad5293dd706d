"""An MLP of small integers, and its step with tiles and without, for the tests of the tiled MLP."""

import torch
from hardware import DEVICE

from liger_kernel.ops import apply_tiled_mlp


def integers(*shape, dtype=torch.float32):
    return torch.randint(-2, 3, shape, device=DEVICE).to(dtype)


class IntegerMLP(torch.nn.Module):
    """An MLP of small integers, so that a sum is exact in every order."""

    def __init__(self, h=6, f=5, out=None, dtype=torch.float32):
        super().__init__()
        self.up = torch.nn.Linear(h, f, device=DEVICE)
        self.down = torch.nn.Linear(f, out or h, device=DEVICE)
        for p in self.parameters():
            p.data = integers(*p.shape, dtype=dtype)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def make_case(*shape, requires_grad=True):
    """Return an MLP, its input and the output's gradient."""
    module = IntegerMLP()
    return module, integers(*shape).requires_grad_(requires_grad), integers(*shape)


def plain(module, x):
    return module(x)


def tiled(module, shards=4, fn=plain):
    return lambda x: apply_tiled_mlp(fn, module, x, shards)


def step(run, module, x, dy):
    """Return y, and the gradients of x and of the parameters."""
    module.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    y = run(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))
