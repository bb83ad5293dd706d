"""When several linear layers of one input are computed by `ops.linear.fan_out`.

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
from liger_kernel.ops.linear.fan_out import FanOut
from liger_kernel.patch.proof import conditions

FORWARDED_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv pow neg matmul getitem setitem len bool"
)


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
