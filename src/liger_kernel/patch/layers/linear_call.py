"""Reading what a PEFT LoRA layer computes at a call.

Its plain attributes are read anew each time: adapters are switched, merged, disabled and rescaled
while a model trains."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from liger_kernel.core import devices
from liger_kernel.core.op import cast_if_needed
from liger_kernel.ops.linear.four_bit import dequantize_4bit
from liger_kernel.ops.linear.frozen_layers import Adapter, FrozenLayer
from liger_kernel.ops.mlp.activation_linear import is_plain_linear
from liger_kernel.patch.proof import private
from liger_kernel.patch.proof.conditions import are_plain_tensors
from liger_kernel.patch.proof.hooks import has_hooks


class LinearCall(NamedTuple):
    """The computation of a linear layer, with or without adapters, at a call.

    Attributes:
        dtype: that of the computation.
        in_autocast: True if autocast made that the dtype.
        weight: (N, K), frozen; or what ``dequantize`` makes it of. None: ``base`` is called.
        bias: (N,) or None.
        adapters: those that are active.
        dequantize: as in `FrozenLayer`.
        base: the base layer, or None if ``weight`` is used.
    """

    dtype: torch.dtype
    in_autocast: bool
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    dequantize: Callable | None = None
    adapters: tuple[Adapter, ...] = ()
    base: torch.nn.Module | None = None

    def layer(self) -> FrozenLayer:
        """Return the layer for `ops.linear.frozen_layers`, where there is no ``base``."""
        return FrozenLayer(self.weight, self.bias, self.adapters, self.dequantize)

    def state(self) -> tuple | None:
        """Return what the output and its graph depend on beside x: numbers, and tensors by identity
        and version.

        If a later call has the same state while this one is kept, it computes the same. None if
        that cannot be said: with dropout, a bias of an adapter, ``base``, inference tensors."""
        if self.base is not None:
            return None
        tensors = [self.weight] if self.bias is None else [self.weight, self.bias]
        numbers = [self.dtype, self.in_autocast]
        if self.dequantize is not None:
            numbers.append(id(self.dequantize.keywords["quant_state"]))
        for adapter in self.adapters:
            if adapter.dropout is not None or adapter.bias is not None:
                return None
            tensors += adapter.a, adapter.b
            numbers.append(adapter.scaling)
        if any(tensor.is_inference() for tensor in tensors):
            return None
        states = ((id(tensor), tensor._version, tensor.requires_grad) for tensor in tensors)
        return *numbers, *states


def read_call(layer, x) -> LinearCall | None:
    """Return what a LoRA layer computes for x at this call, or None where PEFT's code must run."""
    kind = read_input(x)
    return None if kind is None else read_layer(layer, x, kind, x.shape[-1])


class InputKind(NamedTuple):
    """The dtype in which a linear layer computes for an input, and whether autocast made it that:
    the first two attributes of `LinearCall`."""

    dtype: torch.dtype
    in_autocast: bool


def read_input(x) -> InputKind | None:
    """Return the kind of x, or None where PEFT's code must run."""
    if x is None or not are_plain_tensors(x) or x.dim() == 0 or not x.is_floating_point():
        return None
    if x.layout is not torch.strided or x.is_nested:
        return None
    if torch.compiler.is_compiling() or devices.in_func_transform():
        return None
    dtype = devices.autocast_dtype(x)
    if dtype is None:
        return InputKind(x.dtype, False)
    return None if x.dtype == torch.float64 else InputKind(dtype, True)


def read_layer(layer, x, kind, in_features) -> LinearCall | None:
    """Return what a LoRA layer computes for x, or for an input of other columns and else like x."""
    state = layer.__dict__
    if state["_disable_adapters"] or state["merged_adapters"]:
        return None
    if state["in_features"] != in_features:
        return None
    adapters = _active_adapters(layer, x, kind)
    if not adapters:
        return None
    base = layer._modules["base_layer"]
    call = read_weight(base, x, kind, (state["out_features"], in_features))
    if call is None:
        return LinearCall(*kind, adapters=adapters, base=base)
    return call._replace(adapters=adapters)


def _active_adapters(layer, x, kind) -> tuple[Adapter, ...] | None:
    """Return the adapters that are active, or None if one of them is more than two plain matrices,
    or has another dtype than x outside of autocast."""
    state, modules = layer.__dict__, layer._modules
    active = state["_active_adapter"]
    adapters = []
    for name in (active,) if isinstance(active, str) else active:
        a_layer = modules["lora_A"]._modules.get(name)
        if a_layer is None:  # the adapter is not in this layer
            continue
        b_layer = modules["lora_B"]._modules.get(name)
        if name in state["lora_variant"] or b_layer is None:
            return None
        if not is_plain_linear(a_layer) or not is_plain_linear(b_layer):
            return None  # a unit of FSDP, of tensor parallelism, with hooks
        a, b = a_layer.weight, b_layer.weight
        bias = b_layer.bias
        if not are_plain_tensors(a, b, bias) or a_layer.bias is not None:
            return None
        in_features, out_features = state["in_features"], state["out_features"]
        if a.shape[1:] != (in_features,) or b.shape != (out_features, a.shape[0]):
            return None  # a shard
        if a.dtype != b.dtype or not (kind.in_autocast or a.dtype == kind.dtype):
            return None  # PEFT computes in the adapters' dtype
        scaling = state["scaling"][name]
        if not isinstance(scaling, (int, float)):  # a tensor, which may learn
            return None
        dropout = modules["lora_dropout"]._modules.get(name)
        if getattr(dropout, "inplace", False):
            return None
        if bias is not None:
            bias = bias * scaling
        if _changes_nothing(dropout):
            dropout = None
        else:
            dropped_dtype = a.dtype if _casts_input(layer) else x.dtype
            dropout = functools.partial(_drop, dropout, dropped_dtype)
        adapters.append(Adapter(a, b, float(scaling), bias, dropout))
    return tuple(adapters)


def _changes_nothing(dropout) -> bool:
    """Return True if the layer of dropout need not be called."""
    if dropout is None:
        return True
    if has_hooks(dropout) or "forward" in dropout.__dict__:
        return False
    if type(dropout) is torch.nn.Dropout:
        return not dropout.training or dropout.p == 0
    return type(dropout) is torch.nn.Identity


def _casts_input(layer) -> bool:
    """Return True if PEFT casts the input to the adapters' dtype before dropout.

    Some of its classes ask whether autocast is on, of CUDA wherever the input is."""
    if not layer.__dict__.get("cast_input_dtype_enabled", True):
        return False
    forward = private.original_class(type(layer)).forward
    asks = "is_autocast_enabled" in forward.__code__.co_names
    return not (asks and torch.is_autocast_enabled())


def _drop(dropout, dtype, x):
    """Drop entries of x in this dtype: it decides on a GPU which of them are dropped."""
    return dropout(x.to(dtype)).to(x.dtype)


def read_weight(linear, x, kind, shape) -> LinearCall | None:
    """Return the call of a frozen linear layer without adapters, by its weight; None if it does
    more than multiply, or in another dtype."""
    weight = getattr(linear, "weight", None)
    bias = getattr(linear, "bias", None)
    if not isinstance(weight, torch.Tensor) or weight.requires_grad or not are_plain_tensors(bias):
        return None
    if bias is not None and (bias.requires_grad or bias.dtype != kind.dtype):
        return None
    if is_plain_linear(linear):
        if not are_plain_tensors(weight) or weight.shape != shape or weight.dtype != kind.dtype:
            return None
        return LinearCall(*kind, weight, bias)
    dequantize = _dequantizer_4bit(linear, weight, x, kind.dtype, shape)
    return None if dequantize is None else LinearCall(*kind, weight, bias, dequantize)


def _dequantizer_4bit(linear, weight, x, dtype, shape) -> Callable | None:
    """Return a function that makes the dense weight of bitsandbytes' `Linear4bit`, or None."""
    if type(weight).__name__ != "Params4bit" or has_hooks(linear) or "forward" in linear.__dict__:
        return None
    if not type(linear).forward.__module__.startswith("bitsandbytes."):
        return None
    quant_state = getattr(weight, "quant_state", None) or getattr(linear, "quant_state", None)
    if quant_state is None or tuple(quant_state.shape) != shape or _is_repacked(quant_state):
        return None
    # without gradients bitsandbytes has faster kernels for a few rows
    if linear.compute_dtype != dtype or x.dtype != dtype or not torch.is_grad_enabled():
        return None
    return functools.partial(_dense_weight, quant_state=quant_state, dtype=dtype)


def _is_repacked(quant_state) -> bool:
    """Return True if an evaluation on a CPU has laid the weight out anew, for inference alone."""
    return getattr(quant_state, "packing_format_for_cpu", False)


def _dense_weight(weight, quant_state, dtype):
    if _is_repacked(quant_state):
        raise RuntimeError("bitsandbytes has repacked a 4-bit weight between forward and backward")
    dense = dequantize_4bit(weight, quant_state, dtype)
    if dense is None:
        bitsandbytes = sys.modules["bitsandbytes.functional"]  # it has made the weight
        dense = bitsandbytes.dequantize_4bit(weight.detach().view(-1, 1), quant_state)
    return cast_if_needed(dense, dtype)
