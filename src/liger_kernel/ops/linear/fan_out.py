"""Several linear layers of one input x, whose gradients of x are added up in the products.

    y_i = x·W_iᵀ + b_i

    dx = Σ_i dy_i·W_i,   dW_i = dy_iᵀ·x,   db_i = Σ_rows dy_i

Autograd computes every dy_i·W_i and adds them up: for each layer but the first, it reads two
tensors of x's size and writes one, beside what the products do. Here each product is added to the
sum of those before it, which costs one reading. The sum is rounded after every layer, as autograd's
is. With ``create_graph=True`` autograd does it.

`FanOut(x)` is made once for an input. Its layers add their gradients of x to a sum outside the
graph. The node behind x, which autograd runs when all layers have run, takes the sum. If x can be
recomputed (`core.recompute`), what it is computed from is saved instead of it.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.devices import in_func_transform
from liger_kernel.core.op import F, flatten_to_2d
from liger_kernel.core.recompute import get_recompute


class FanOut:
    """An input of several linear layers.

    ``linear(weight, bias)`` computes one of them. Everything else that needs the input must read
    ``x``. Weights and biases have x's dtype, and autocast is off.

    Args:
        x: (..., K).
    """

    def __init__(self, x):
        self.x = x
        self.input_gradient = None
        self.recompute = get_recompute(x)
        if in_func_transform():
            return
        self.input_gradient = _InputGradient(x.shape)
        if x.requires_grad:
            self.x = _Input.apply(x, self.input_gradient)

    def linear(self, weight, bias=None):
        """Compute ``x·weightᵀ + bias``."""
        if self.input_gradient is None:
            return F.linear(self.x, weight, bias)
        return _Linear.apply(self.x, weight, bias, self.input_gradient, self.recompute)


class _InputGradient:
    """The sums of the layers' gradients of x, as far as they have run, of each run of the graph.

    Runs may overlap: in threads, or where a hook differentiates within a backward. A run that does
    not reach x adds nothing. ``shape`` is that of x."""

    def __init__(self, shape):
        self.shape = shape
        self.sums = {}  # id of the graph task -> sum

    def add(self, dy, weight):
        graph_task = torch._C._current_graph_task_id()
        total = self.sums.get(graph_task)
        self.sums[graph_task] = dy @ weight if total is None else total.addmm_(dy, weight)

    def take(self):
        """Return the sum of this run and forget it; None if no layer has run in it."""
        return self.sums.pop(torch._C._current_graph_task_id(), None)


class _Input(torch.autograd.Function):
    """x. Backward adds the layers' sum to the gradient from everything else that reads x."""

    @staticmethod
    def forward(ctx, x, input_gradient):
        ctx.input_gradient = input_gradient
        ctx.set_materialize_grads(False)
        return x

    @staticmethod
    def backward(ctx, dx):
        total = ctx.input_gradient.take()  # None with create_graph=True
        if total is not None:
            total = total.view(ctx.input_gradient.shape)
            dx = total if dx is None else total + dx
        return dx, None


class _Linear(torch.autograd.Function):
    """A linear layer of x. Its gradient of x goes to ``input_gradient``."""

    @staticmethod
    def forward(ctx, x, weight, bias, input_gradient, recompute):
        ctx.input_gradient = input_gradient
        ctx.recompute = recompute and recompute.without_tensors()
        inputs = ()
        if ctx.needs_input_grad[1]:
            inputs = (x,) if recompute is None else recompute.tensors
        ctx.save_for_backward(*inputs, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        *inputs, weight = ctx.saved_tensors
        need_x, need_w, need_bias, _, _ = ctx.needs_input_grad
        dy = flatten_to_2d(dy)
        dx, dw = None, None
        with devices.without_autocast(dy):
            if need_x:
                if torch.is_grad_enabled():  # create_graph=True
                    dx = (dy @ weight).view(ctx.input_gradient.shape)
                else:
                    ctx.input_gradient.add(dy, weight)
            if need_w:
                x = ctx.recompute(*inputs) if ctx.recompute else inputs[0]
                dw = dy.t() @ flatten_to_2d(x)
            d_bias = dy.sum(0) if need_bias else None
        return dx, dw, d_bias, None, None
