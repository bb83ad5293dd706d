r"""Several linear layers of one input.

    y_i = x·W_iᵀ + b_i         dx = Σ_i dy_i·W_i,   dW_i = dy_iᵀ·x,   db_i = Σ_rows dy_i

Autograd makes every dy_i·W_i and adds them up: for each layer but the first, two tensors like x are
read and one is written beside what the products do. Here each product adds to the sum of those
before it, which costs one reading, and the sum is rounded after every layer as autograd's is. Where
a graph of the gradients is asked for, autograd does it. Of an x that can be made again (`again`),
that is kept from which it is made.

`FanOut(x)` is made once for an input. The layers' gradients of x meet in a box and not in the
graph: the node behind x, which autograd runs when all layers have run, takes out what is there.

`Shared` carries a fan-out through an attention's own code, in the place of x. Only code of
transformers is given one, and only where that saves memory: within a checkpoint whose norms are
made again."""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from liger_kernel.core import devices
from liger_kernel.core.again import recipe
from liger_kernel.core.op import transformed
from liger_kernel.patch.proof import conditions


class _Box:
    """dx, as far as the layers have run in this run of the graph; what another run has left is not
    counted."""

    def __init__(self):
        self.run, self.sum = None, None

    def add(self, dy, weight):
        run = torch._C._current_graph_task_id()
        if self.run != run:
            self.run, self.sum = run, None
        self.sum = dy @ weight if self.sum is None else self.sum.addmm_(dy, weight)

    def take(self):
        found, self.run, self.sum = (
            (self.sum if self.run == torch._C._current_graph_task_id() else None),
            None,
            None,
        )
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
    """``linear(weight, bias)`` is ``F.linear(x, weight, bias)``; ``x`` is for whatever else reads
    the input."""

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


def may_fan_out(x, layers) -> bool:
    """Whether it pays, and these layers do nothing but multiply: PyTorch's own, with weights that
    are whole."""
    if (
        not conditions.plain(x)
        or x.numel() < conditions.LARGE
        or not x.requires_grad
        or torch.compiler.is_compiling()
    ):
        return False
    if torch.is_autocast_enabled(x.device.type) or not devices.has_kernels(x):
        return False
    if (
        type(F.linear) is not types.BuiltinFunctionType
    ):  # ZeRO-3 has put another one there, which wants a tensor
        return False
    layers = list(layers)
    own = all(
        type(layer) is torch.nn.Linear and conditions.plain(layer.weight, layer.bias)
        for layer in layers
    )
    return own and len(layers) > 1 and not conditions.seen(*layers)


def shared(x, layers):
    """Return x, as `Shared` where it may fan out to these layers."""
    return Shared(FanOut(x)) if may_fan_out(x, layers) else x


class Shared:
    """Stands for the input of ``fan``: linear layers call the fan-out, everything else gets the
    tensor."""

    __slots__ = ("fan",)

    def __init__(self, fan):
        self.fan = fan

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.fan.x, name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear and type(args[0]) is Shared:
            return args[0].fan.linear(*args[1:], **(kwargs or {}))
        args, kwargs = tree_map(lambda a: a.fan.x if type(a) is Shared else a, (args, kwargs or {}))
        return function(*args, **kwargs)


def _of_the_tensor(name):
    def method(self, *args):
        return getattr(self.fan.x, name)(*args)

    return method


for (
    _name
) in "add radd sub rsub mul rmul truediv rtruediv pow neg matmul getitem setitem len bool".split():
    setattr(Shared, f"__{_name}__", _of_the_tensor(f"__{_name}__"))
