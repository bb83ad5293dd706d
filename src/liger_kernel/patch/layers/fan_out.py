r"""Several linear layers of one input, as gate and up of an MLP or q, k and v of an attention.

    y_i = x·W_iᵀ + b_i         dx = Σ_i dy_i·W_i,   dW_i = dy_iᵀ·x,   db_i = Σ_rows dy_i

Autograd computes every dy_i·W_i and adds them up: for each layer but the first, it reads two
tensors of x's size and writes one, beside what the products do. Here each product is added to the
sum of those before it, which costs one reading. The sum is rounded after every layer, as autograd's
is. With ``create_graph=True`` autograd does it. If x can be recomputed (`core.recompute`), that is
kept from which it is made.

`FanOut(x)` is made once for an input. The layers add their gradients of x to a sum outside the
graph. The node behind x, which autograd runs when all layers have run, takes the sum.

`SharedInput` carries a fan-out through an attention's own code, in the place of x. Only code of
transformers is given one, and only where that saves memory: within a checkpoint whose norms are
recomputed.

Inputs fan out only if they are large (`conditions.LARGE_NUMEL`) and the layers are PyTorch's own
`Linear` with whole weights and without hooks (`can_fan_out`)."""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from liger_kernel.core import devices
from liger_kernel.core.devices import in_func_transform
from liger_kernel.core.recompute import get_recompute
from liger_kernel.patch.proof import conditions

FORWARDED_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv pow neg matmul getitem setitem len bool"
)


class _InputGradient:
    """The sum of the layers' gradients of x, as far as they have run in this run of the graph.

    What another run of the graph has left is dropped. ``shape`` is that of x.
    """

    def __init__(self, shape):
        self.shape = shape
        self.graph_task, self.sum = None, None

    def add(self, dy, weight):
        graph_task = torch._C._current_graph_task_id()
        if self.graph_task != graph_task:
            self.graph_task, self.sum = graph_task, None
        self.sum = dy @ weight if self.sum is None else self.sum.addmm_(dy, weight)

    def take(self):
        """Return the sum and forget it; None if no layer has run in this run of the graph."""
        is_current = self.graph_task == torch._C._current_graph_task_id()
        total = self.sum if is_current else None
        self.graph_task, self.sum = None, None
        return total


class _Input(torch.autograd.Function):
    """x, whose backward adds the layers' sum to the gradient from everything else that reads x."""

    @staticmethod
    def forward(ctx, x, input_gradient):
        ctx.input_gradient = input_gradient
        ctx.set_materialize_grads(False)
        return x

    @staticmethod
    def backward(ctx, dx):
        total = ctx.input_gradient.take()
        if total is None:
            return dx, None
        if dx is None:
            return total.view(ctx.input_gradient.shape), None
        return total.view(dx.shape) + dx, None


class _Linear(torch.autograd.Function):
    """``F.linear(x, weight, bias)``, whose gradient of x goes to ``input_gradient``."""

    @staticmethod
    def forward(ctx, x, weight, bias, input_gradient, recompute):
        ctx.save_for_backward(weight, *((x,) if recompute is None else recompute.tensors))
        ctx.input_gradient, ctx.shape = input_gradient, x.shape
        ctx.recompute = recompute and recompute.without_tensors()
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        weight, *saved = ctx.saved_tensors
        need_dx, need_dw, need_db, *_ = ctx.needs_input_grad
        dy = dy.reshape(-1, dy.shape[-1])
        dx, dw = None, None
        if need_dx and torch.is_grad_enabled():  # create_graph=True
            dx = (dy @ weight).view(ctx.shape)
        elif need_dx:
            ctx.input_gradient.add(dy, weight)
        if need_dw:
            x = ctx.recompute(*saved) if ctx.recompute else saved[0]
            dw = dy.t() @ x.reshape(-1, x.shape[-1])
        return dx, dw, dy.sum(0) if need_db else None, None, None


class FanOut:
    """An input of several linear layers.

    ``linear(weight, bias)`` computes ``F.linear(x, weight, bias)``. Everything else that needs the
    input must read ``x``.
    """

    def __init__(self, x):
        self.x, self.input_gradient, self.recompute = x, None, get_recompute(x)
        if not in_func_transform():
            self.input_gradient = _InputGradient(x.shape)
            self.x = _Input.apply(x, self.input_gradient)

    def linear(self, weight, bias=None):
        if self.input_gradient is None:
            return F.linear(self.x, weight, bias)
        return _Linear.apply(self.x, weight, bias, self.input_gradient, self.recompute)


def can_fan_out(x, layers) -> bool:
    """Return True if a fan-out saves time or memory, and the layers do nothing but multiply:
    PyTorch's own, with whole weights."""
    if (
        not conditions.are_plain_tensors(x)
        or x.numel() < conditions.LARGE_NUMEL
        or not x.requires_grad
        or torch.compiler.is_compiling()
    ):
        return False
    if devices.in_autocast(x) or not devices.has_kernels(x):
        return False
    # ZeRO-3 replaces F.linear by a function that wants a tensor
    if type(F.linear) is not types.BuiltinFunctionType:
        return False
    layers = list(layers)
    for layer in layers:
        if type(layer) is not torch.nn.Linear:
            return False
        if not conditions.are_plain_tensors(layer.weight, layer.bias):
            return False
    return len(layers) > 1 and not conditions.is_observed(*layers)


def share_input(x, layers):
    """Return x, as a `SharedInput` if it can fan out to these layers."""
    return SharedInput(FanOut(x)) if can_fan_out(x, layers) else x


class SharedInput:
    """The input of ``fan_out``, in the place of a tensor.

    Linear layers call the fan-out. Every other function, method or operator gets the tensor.
    """

    __slots__ = ("fan_out",)

    def __init__(self, fan_out):
        self.fan_out = fan_out

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.fan_out.x, name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear and type(args[0]) is SharedInput:
            return args[0].fan_out.linear(*args[1:], **(kwargs or {}))
        args, kwargs = tree_map(_to_tensor, (args, kwargs or {}))
        return function(*args, **kwargs)


def _to_tensor(value):
    return value.fan_out.x if type(value) is SharedInput else value


def _operator_of_tensor(name):
    def method(self, *args):
        return getattr(self.fan_out.x, name)(*args)

    return method


for _name in FORWARDED_OPERATORS.split():
    setattr(SharedInput, f"__{_name}__", _operator_of_tensor(f"__{_name}__"))
