"""PEFT's LoRA layers, by the operators of `ops.linear`.

Recognised are modules with the children and attributes of PEFT's LoRA layers that compute

    base_layer(x) + Σ_adapters scaling·lora_B(lora_A(dropout(x)))

A class is tried once, with small layers (`prove_class`). What a layer computes at a call is read
anew each time, from plain attributes (`read_call`), since adapters are switched, merged, disabled
and rescaled while a model trains. No tensor is kept from one call to the next.

Layers of one input that are called within one attention share it (`InputGroup`): its products with
all their A are one, and their gradients of it are added up in the products. Gated MLPs do the same
for gate and up, and their down product is not computed again by a checkpoint
(`gated_mlp_with_adapters`).

`get_peft_model` may come after the patch. So an attention or an MLP that was patched looks for LoRA
layers among its children at each call, and converts them (`adopt`).

PEFT's own code runs, at each call, for merged or disabled adapters, variants such as DoRA, weights
that are shards or in another dtype than the computation, under torch.compile and torch.func, in a
user's mode, and if the layer is called with further arguments. A base layer that is not a plain,
frozen linear layer, such as one with int8 weights, is called, and the adapters are added to what it
returns."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from liger_kernel.core import devices
from liger_kernel.core.op import cast_if_needed
from liger_kernel.ops.linear.fan_out import Adapter, FanOut, frozen_layers
from liger_kernel.ops.linear.four_bit import dequantize_4bit
from liger_kernel.ops.mlp.activation_linear import is_plain_linear
from liger_kernel.ops.mlp.lora_mlp import adds_low_rank, gated_down
from liger_kernel.patch.proof import private, purity
from liger_kernel.patch.proof.conditions import are_plain_tensors
from liger_kernel.patch.proof.hooks import HOOK_ATTRIBUTES, has_hooks
from liger_kernel.patch.proof.probe import close, error_summary, isolated, noise, probe_copy
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite, replacement_of

FLAG = "lora"
CHILDREN = {"base_layer", "lora_A", "lora_B", "lora_dropout"}
ATTRIBUTES = {
    "_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "lora_variant",
    "in_features", "out_features",
}  # fmt: skip
# An attribute of patched attentions and MLPs: True if they look for LoRA layers in themselves.
ADOPTS = "_liger_adopts"
# What attentions call the layers that read their input. For others only speed would change.
INPUT_PROJECTIONS = {
    "q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v", "to_q", "to_k", "to_v",
    "wq", "wk", "wv", "q_a_proj", "kv_a_proj_with_mqa",
}  # fmt: skip


# ---- what a layer computes at a call ----


class LinearCall(NamedTuple):
    """The computation of a linear layer, with or without adapters, at a call.

    Attributes:
        dtype: that of the computation.
        in_autocast: True if autocast made that the dtype.
        weight: (N, K), frozen; or what ``dequantize`` makes it of. None: ``base`` is called.
        bias: (N,) or None.
        dequantize: as in `FanOut.linear`.
        adapters: those that are active.
        base: the base layer, or None if ``weight`` is used.
    """

    dtype: torch.dtype
    in_autocast: bool
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    dequantize: Callable | None = None
    adapters: tuple[Adapter, ...] = ()
    base: torch.nn.Module | None = None


def could_be_lora(module) -> bool:
    """Return True if the module has the children and attributes of PEFT's LoRA layers. Wrappers of
    single parameters have them, too, but are no layers."""
    attributes = module.__dict__
    if "lora_A" not in module._modules or "parameter_name" in attributes:
        return False
    return module._modules.keys() >= CHILDREN and attributes.keys() >= ATTRIBUTES


def read_call(layer, x) -> LinearCall | None:
    """Return what a LoRA layer computes for x at this call, or None where PEFT's code must run."""
    kind = _read_input(x)
    return None if kind is None else _read_layer(layer, x, kind, x.shape[-1])


class _InputKind(NamedTuple):
    """What `LinearCall` has of an input."""

    dtype: torch.dtype
    in_autocast: bool


def _read_input(x) -> _InputKind | None:
    """Return the dtype in which a linear layer computes for x, or None where PEFT's code must
    run."""
    if x is None or not are_plain_tensors(x) or x.dim() == 0 or not x.is_floating_point():
        return None
    if torch.compiler.is_compiling() or devices.in_func_transform():
        return None
    dtype = devices.autocast_dtype(x)
    if dtype is None:
        return _InputKind(x.dtype, False)
    return None if x.dtype == torch.float64 else _InputKind(dtype, True)


def _read_layer(layer, x, kind, in_features) -> LinearCall | None:
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
    call = _read_weight(base, x, kind, (state["out_features"], in_features))
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


def _read_weight(linear, x, kind, shape) -> LinearCall | None:
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


# ---- running it ----


def run_call(layer, call: LinearCall, x) -> torch.Tensor:
    """Compute a LoRA layer of x. Within an `InputGroup` it may share x with its neighbours."""
    if call.base is not None:
        y = call.base(x)  # before dropout draws its random numbers, as PEFT does
    with _without_autocast(x, call):
        fan_out = _group_fan_out(layer, call, x) or _make_fan_out(x, call.dtype, call.adapters)
        if call.base is None:
            return fan_out.linear(call.weight, call.bias, call.adapters, call.dequantize)
        if y.dtype == call.dtype:
            return fan_out.add_to(y, call.adapters)
        zeros = torch.zeros_like(y, dtype=call.dtype)
        return (y + fan_out.add_to(zeros, call.adapters)).to(y.dtype)


def _without_autocast(x, kind):
    return devices.without_autocast(x) if kind.in_autocast else contextlib.nullcontext()


def _make_fan_out(x, dtype, adapters) -> FanOut:
    return FanOut(cast_if_needed(x, dtype), adapters)


_thread = threading.local()  # .group: the innermost `InputGroup` of this thread


class InputGroup:
    """A context in which LoRA layers that read one tensor share its `FanOut`.

    The first of them that is called makes it, of the tensor that it gets. The others use it if they
    get the same tensor, not written to since, in the same modes.
    """

    def __init__(self, layers):
        self.layers = layers
        self.x = self.modes = self.fan_out = None

    def __enter__(self):
        self.outer = getattr(_thread, "group", None)
        self.hooks = _saved_tensor_hooks()
        _thread.group = self

    def __exit__(self, *exception):
        _thread.group = self.outer
        self.x = self.fan_out = None

    def fan_out_for(self, layer, call, x) -> FanOut | None:
        # An inference tensor has no version. A checkpoint around one layer calls it alone again.
        if x.is_inference() or _saved_tensor_hooks() != self.hooks:
            return None
        modes = x._version, call.dtype, torch.is_grad_enabled()
        if self.x is None:
            adapters = []
            for each in self.layers:
                each_call = call
                if each is not layer:
                    # a hook at its own call may change what it computes
                    kind = _InputKind(call.dtype, call.in_autocast)
                    must_be_called = _must_be_called(each)
                    each_call = None if must_be_called else _read_layer(each, x, kind, x.shape[-1])
                if each_call is not None:
                    adapters += each_call.adapters
            self.x, self.modes = x, modes
            self.fan_out = _make_fan_out(x, call.dtype, adapters)
        return self.fan_out if self.x is x and self.modes == modes else None


def _saved_tensor_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _group_fan_out(layer, call, x) -> FanOut | None:
    """Return the `FanOut` that the layer shares with its neighbours, or None."""
    group = getattr(_thread, "group", None)
    if group is None or not any(layer is each for each in group.layers):
        return None
    return group.fan_out_for(layer, call, x)


def input_group(parent) -> InputGroup | None:
    """Return the group of the parent's LoRA layers that read its input, which it adopts first; None
    if there are not several."""
    layers = adopt(parent)
    return InputGroup(layers) if len(layers) > 1 else None


def gated_mlp_with_adapters(x, gate, up, down, act) -> torch.Tensor | None:
    """Compute a gated MLP of frozen layers, with adapters or without, as `ops.mlp.lora_mlp` does.

    Returns None if a layer has hooks or does more, or if no gradient would be needed."""
    # Asked first, for it is what full fine-tunes have. ZeRO-3 gathers a weight that is got by name.
    weight = gate._parameters.get("weight")
    if weight is not None and weight.requires_grad:
        return None
    kind = _read_input(x)
    if kind is None or not devices.has_kernels(x) or not torch.is_grad_enabled():
        return None
    gate_call = _read_projection(gate, x, kind, x.shape[-1])
    up_call = _read_projection(up, x, kind, x.shape[-1])
    if gate_call is None or up_call is None:
        return None
    down_call = _read_projection(down, x, kind, gate.out_features)
    if _uses_compiled_autograd():
        return None
    if down_call is None or any(adapter.dropout for adapter in down_call.adapters):
        return None
    adapters = gate_call.adapters + up_call.adapters
    if not (x.requires_grad or adapters or down_call.adapters):
        return None
    calls = gate_call, up_call
    low_rank = []
    with _without_autocast(x, kind):
        if adds_low_rank(kind.dtype, *(call.adapters for call in (*calls, down_call))):
            layers = [(call.weight, call.bias, call.dequantize) for call in calls]
            (a, b), products = frozen_layers(cast_if_needed(x, kind.dtype), layers, adapters)
            for t, adapter in zip(products, adapters, strict=True):
                low_rank += t, adapter.b
        else:
            fan_out = _make_fan_out(x, kind.dtype, adapters)
            a, b = (
                fan_out.linear(call.weight, call.bias, call.adapters, call.dequantize)
                for call in calls
            )
        return gated_down(
            a,
            b,
            act,
            down_call.weight,
            down_call.bias,
            down_call.adapters,
            down_call.dequantize,
            low_rank,
        )


def _read_projection(layer, x, kind, in_features) -> LinearCall | None:
    """Return what a projection of an MLP computes, or None if it has to be called."""
    if isinstance(replacement_of(layer), LoRALinear):
        if _must_be_called(layer):
            return None
        call = _read_layer(layer, x, kind, in_features)
        return None if call is None or call.base is not None else call
    if not is_plain_linear(layer) or layer.in_features != in_features:
        return None
    return _read_weight(layer, x, kind, (layer.out_features, in_features))


def _must_be_called(layer) -> bool:
    """Return True if a LoRA layer has hooks, or another forward than the one that was proved."""
    members = vars(type(layer))
    if "_liger" not in members or has_hooks(layer) or "forward" in layer.__dict__:
        return True
    proved_class, _ = members["_liger"]
    return proved_class.forward is not members["_liger_read"][0]


def _uses_compiled_autograd() -> bool:
    """Return True if torch.compile runs the backward of eager code, too. It cannot start the
    recomputation of a checkpoint as `lora_mlp` does."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and dynamo.config.compiled_autograd


# ---- recognising it ----


@dataclass(frozen=True)
class LoRALinear(Replacement):
    """A linear layer with low-rank adapters, as PEFT computes it."""

    flag = FLAG
    column = "LoRA"
    kernel = "liger_lora_linear"
    takes_one_argument = False

    def class_members(self, cls):
        def forward(self, x, *args, **kwargs):
            call = None if args or kwargs else read_call(self, x)
            if call is None:
                return cls.forward(self, x, *args, **kwargs)
            return run_call(self, call, x)

        return {"forward": forward}

    @staticmethod
    def worthwhile(x):
        return not torch.compiler.is_compiling()


def prove_layer(module) -> LoRALinear | str:
    """Return that the module is a LoRA layer, or the reason why it is left alone."""
    if private.has_instance_forward(module):
        return "its forward was replaced on the instance"
    if not all(isinstance(a, torch.nn.Linear) for a in module._modules["lora_A"].values()):
        return "its adapters are no linear layers"
    cls = type(module)
    with _proofs_lock:
        result = _proofs.get((cls, cls.forward))
        if result is None:
            if not purity.is_released_code(cls.forward):
                result = f"{cls.__name__} is code of the user's own"
            else:
                try:
                    result = _try_class(module)
                except Exception as error:  # not kept: another try may go well
                    return f"it could not be tried: {error_summary(error)}"
            _proofs[cls, cls.forward] = result
    return result


_proofs: dict[tuple, LoRALinear | str] = {}  # (class, its forward) -> result
_proofs_lock = threading.Lock()


def _try_class(module) -> LoRALinear | str:
    """Run the class's forward with two small adapters, and compare it with ours: in fp32, and under
    autocast as most models train."""
    # an attention may adopt its layers within a checkpoint, which must not see what is saved here
    with isolated(), torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
        for dtype, autocast in ((torch.float32, False), (torch.bfloat16, True)):
            layer = _small_layer(module, dtype)
            expected = _outputs(type(layer).forward, layer, dtype, autocast)
            outputs = _outputs(_run_ours, layer, dtype, autocast)
            if not all(_near(a, b, autocast) for a, b in zip(outputs, expected, strict=True)):
                return "it does not compute base_layer(x) + scaling·lora_B(lora_A(dropout(x)))"
    return LoRALinear()


def _unchanged(tensor):
    return tensor


class _EverySecond(torch.nn.Module):
    """Stands for dropout: drops every second column."""

    def forward(self, x):
        return x * (2.0 * (torch.arange(x.shape[-1]) % 2)).to(x.dtype)


def _run_ours(layer, x):
    return run_call(layer, read_call(layer, x), x)


def _small_layer(module, dtype):
    """Return a copy of the layer with a base layer and two adapters of ours."""
    in_features, out_features = 12, 7
    ranks = dict(one=3, two=5)

    def linears(shape_of, dtype):
        layers = {}
        for seed, (name, rank) in enumerate(ranks.items()):
            rows, columns = shape_of(rank)
            layers[name] = torch.nn.Linear(columns, rows, bias=False, dtype=dtype)
            layers[name].weight.copy_(noise(rows, columns, seed=seed))
        return torch.nn.ModuleDict(layers)

    base = torch.nn.Linear(in_features, out_features, dtype=dtype).requires_grad_(False)
    base.weight.copy_(noise(out_features, in_features, seed=5))
    drop = dict(one=_EverySecond(), two=torch.nn.Identity())
    children = module._modules | dict(
        base_layer=base,
        lora_A=linears(lambda rank: (rank, in_features), torch.float32),
        lora_B=linears(lambda rank: (out_features, rank), torch.float32),
        lora_dropout=torch.nn.ModuleDict(drop),
    )
    return probe_copy(
        module,
        children=children,
        _active_adapter=list(ranks),
        _disable_adapters=False,
        merged_adapters=[],
        scaling=dict(one=1.75, two=0.5),
        lora_variant={},
        in_features=in_features,
        out_features=out_features,
        training=True,
        **{name: {} for name in HOOK_ATTRIBUTES},
    )


def _outputs(run, layer, dtype, autocast):
    """Return the output, and the gradients of the input and of all A and B."""
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        x = noise(2, 4, layer.in_features, seed=9).to(dtype).requires_grad_()
        y = run(layer, x)
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    dy = noise(*y.shape, seed=10).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, inputs, dy)


def _near(output, expected, rounds_to_bf16) -> bool:
    if not rounds_to_bf16:
        return close(output, expected)
    difference = (output.float() - expected.float()).abs().max()
    return output.dtype == expected.dtype and difference <= 2**-6 * expected.float().abs().max()


def adopt(parent) -> list:
    """Convert those of a patched module's children that have become LoRA layers since the patch.

    Returns those of its LoRA layers that are called as one of `INPUT_PROJECTIONS`. It does nothing
    within a graph, and if the switch `FLAG` was off."""
    if torch.compiler.is_compiling() or ADOPTS not in parent.__dict__:
        return []
    layers = []
    for name, child in parent._modules.items():
        if child is None or "lora_A" not in child._modules:
            continue
        if replacement_of(child) is None and could_be_lora(child) and _may_try():
            result = prove_layer(child)
            if isinstance(result, LoRALinear):
                private.convert_module(child, result)
        if name in INPUT_PROJECTIONS and isinstance(replacement_of(child), LoRALinear):
            layers.append(child)
    return layers


def _may_try() -> bool:
    """Return True if nobody watches what runs now, as a trial would."""
    if devices.in_user_mode() or devices.in_func_transform():
        return False
    return not has_hooks()  # global ones


class LoRALayers(Rewrite):
    """PEFT's LoRA layers, and the attentions and MLPs that may get some."""

    flags = (FLAG,)
    applies_to = type(None), Replacement

    def could_apply(self, module):
        replacement = replacement_of(module)
        if replacement is not None:
            return replacement.adopts_adapters
        return could_be_lora(module) and not _is_head(module)

    def name(self, module):
        return f"lora.{type(module).__name__}"

    def prove_once(self, walk, module):
        return prove_layer(module), ()

    def apply(self, walk, module):
        if replacement_of(module) is None:
            super().apply(walk, module)
        else:
            module.__dict__[ADOPTS] = True
            walk.flags_done.add(FLAG)


def _is_head(module) -> bool:
    """Return True if an earlier call has put a forward of `loss.head` on the module."""
    called = module.__dict__.get("_old_forward") or module.__dict__.get("forward")
    function = getattr(called, "__func__", None)
    return getattr(function, "__module__", "").startswith(__name__.partition(".")[0] + ".")


def revert(module) -> None:
    """Undo what `LoRALayers` has set on a module that was patched for itself."""
    module.__dict__.pop(ADOPTS, None)
