r"""Several linear layers of one input.

    y_i = x·W_iᵀ + b_i         dx = Σ_i dy_i·W_i,   dW_i = dy_iᵀ·x,   db_i = Σ_rows dy_i

Autograd makes every dy_i·W_i and adds them up: for each layer but the first, two tensors like x are read and one is
written beside what the products do. Here each product adds to the sum of those before it, which costs one reading, and
the sum is rounded after every layer as autograd's is. Where a graph of the gradients is asked for, autograd does it.
Of an x that can be made again (`again`), that is kept from which it is made.

`FanOut(x)` is made once for an input. The layers' gradients of x meet in a box and not in the graph: the node behind x,
which autograd runs when all layers have run, takes out what is there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from liger_kernel.core.again import recipe
from liger_kernel.core.op import transformed


class _Box:
    """dx, as far as the layers have run in this run of the graph; what another run has left is not counted."""

    def __init__(self):
        self.run, self.sum = None, None

    def add(self, dy, weight):
        run = torch._C._current_graph_task_id()
        if self.run != run:
            self.run, self.sum = run, None
        self.sum = dy @ weight if self.sum is None else self.sum.addmm_(dy, weight)

    def take(self):
        found, self.run, self.sum = (self.sum if self.run == torch._C._current_graph_task_id() else None), None, None
        return found


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, box):
        ctx.box = box
        ctx.set_materialize_grads(False)
        return x

    @staticmethod
    def backward(ctx, dx):
        total = ctx.box.take()
        if total is None:
            return dx, None
        return total.view(dx.shape) + dx if dx is not None else total.view(ctx.box.shape), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, box, recipe):
        ctx.save_for_backward(weight, *((x,) if recipe is None else recipe.tensors))
        ctx.box, ctx.shape, ctx.recipe = box, x.shape, recipe and recipe.without_tensors()
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        weight, *kept = ctx.saved_tensors
        need_dx, need_dw, need_db, *_ = ctx.needs_input_grad
        dy, dx = dy.reshape(-1, dy.shape[-1]), None
        if need_dx and torch.is_grad_enabled():
            dx = (dy @ weight).view(ctx.shape)
        elif need_dx:
            ctx.box.add(dy, weight)
        dw = None
        if need_dw:
            x = ctx.recipe(*kept) if ctx.recipe else kept[0]
            dw = dy.t() @ x.reshape(-1, x.shape[-1])
        return dx, dw, dy.sum(0) if need_db else None, None, None


class FanOut:
    """``linear(weight, bias)`` is ``F.linear(x, weight, bias)``; ``x`` is for whatever else reads the input."""

    def __init__(self, x):
        self.x, self.box, self.recipe = x, None, recipe(x)
        if not transformed():
            self.box = _Box()
            self.box.shape = x.shape
            self.x = _Input.apply(x, self.box)

    def linear(self, weight, bias=None):
        if self.box is None:
            return F.linear(self.x, weight, bias)
        return _Linear.apply(self.x, weight, bias, self.box, self.recipe)
