"""PEFT's LoRA layers, by the operators of `ops.linear`.

Recognised are modules with the children and attributes of PEFT's LoRA layers that compute

    base_layer(x) + Σ_adapters scaling·lora_B(lora_A(dropout(x)))

A class is tried once, with small layers (`prove_layer`). What a layer computes at a call is read
anew each time, from plain attributes (`read_call`), since adapters are switched, merged, disabled
and rescaled while a model trains. No tensor is kept from one call to the next.

Layers of one input that are called within one attention are computed by one node (`InputGroup`).
So are gate and up of gated MLPs, whose down product a checkpoint does not compute again
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
import threading
from dataclasses import dataclass

import torch

from liger_kernel.core import devices
from liger_kernel.core.op import cast_if_needed
from liger_kernel.core.saved import uses_compiled_autograd
from liger_kernel.ops.linear.frozen_layers import (
    add_adapters_to,
    frozen_layers,
    frozen_layers_and_products,
)
from liger_kernel.ops.mlp.activation_linear import is_plain_linear
from liger_kernel.ops.mlp.lora_mlp import adds_low_rank, gated_down
from liger_kernel.patch.layers.linear_call import (
    InputKind,
    LinearCall,
    read_call,
    read_input,
    read_layer,
    read_weight,
)
from liger_kernel.patch.proof import private, purity
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
    "wq", "wk", "wv", "q_a_proj", "kv_a_proj_with_mqa", "in_proj_qkv", "in_proj_z", "in_proj_b",
    "in_proj_a", "in_proj_qkvz", "in_proj_ba",
}  # fmt: skip


# ---- running it ----


def run_call(layer, call: LinearCall, x) -> torch.Tensor:
    """Compute a LoRA layer of x; within an `InputGroup` maybe with its neighbours."""
    y = None
    if call.base is not None:
        y = call.base(x)  # before dropout draws its random numbers, as PEFT does
    with _without_autocast(x, call):
        if y is None:
            y = _grouped_output(layer, call, x)
            return _compute(x, [call])[0] if y is None else y
        x = cast_if_needed(x, call.dtype)
        if y.dtype == call.dtype:
            return add_adapters_to(y, x, call.adapters)
        zeros = torch.zeros_like(y, dtype=call.dtype)
        return (y + add_adapters_to(zeros, x, call.adapters)).to(y.dtype)


def _without_autocast(x, kind):
    return devices.without_autocast(x) if kind.in_autocast else contextlib.nullcontext()


def _compute(x, calls) -> list[torch.Tensor]:
    """Compute calls of one x and dtype, by one node."""
    return frozen_layers(cast_if_needed(x, calls[0].dtype), [call.layer() for call in calls])


_thread = threading.local()  # .group: the innermost `InputGroup` of this thread


class InputGroup:
    """A context in which LoRA layers that read one tensor are computed together.

    The first of them that is called has all computed, of the tensor that it gets. Each of the
    others then returns its output if it gets the same tensor in the same modes, and neither that
    nor the layer has changed since; else it is computed at its call.
    """

    def __init__(self, layers):
        self.layers = layers
        self.x = self.modes = None
        self.outputs = {}  # id of a layer -> its call, what that depends on, its output

    def __enter__(self):
        self.outer = getattr(_thread, "group", None)
        self.hooks = _saved_tensor_hooks()
        _thread.group = self

    def __exit__(self, *exception):
        _thread.group = self.outer
        self.x = None
        self.outputs.clear()

    def output(self, layer, call, x) -> torch.Tensor | None:
        """Return the layer's output of x, or None if it has to be computed alone."""
        # An inference tensor has no version. A checkpoint around one layer calls it alone again.
        if x.is_inference() or _saved_tensor_hooks() != self.hooks:
            return None
        modes = x._version, x.requires_grad, torch.is_grad_enabled()
        if self.x is None:
            self.x, self.modes = x, modes
            self._compute_all(layer, call, x)
        if self.x is not x or self.modes != modes or id(layer) not in self.outputs:
            return None
        _, state, output = self.outputs.pop(id(layer))
        return output if state == call.state() else None

    def _compute_all(self, layer, call, x):
        kind = InputKind(call.dtype, call.in_autocast)
        calls = {}
        for each in self.layers:
            if each is layer:
                calls[id(each)] = call
            elif not _must_be_called(each):  # a hook at its own call may change what it computes
                calls[id(each)] = read_layer(each, x, kind, x.shape[-1])
        states = {key: each and each.state() for key, each in calls.items()}
        calls = {key: each for key, each in calls.items() if states[key] is not None}
        if id(layer) not in calls or len(calls) == 1:
            return
        outputs = _compute(x, [*calls.values()])
        for (key, each), output in zip(calls.items(), outputs, strict=True):
            self.outputs[key] = each, states[key], output


def _saved_tensor_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _grouped_output(layer, call, x) -> torch.Tensor | None:
    """Return the output of a layer that is computed with its neighbours, or None."""
    group = getattr(_thread, "group", None)
    if group is None or not any(layer is each for each in group.layers):
        return None
    return group.output(layer, call, x)


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
    kind = read_input(x)
    if kind is None or not devices.has_kernels(x) or not torch.is_grad_enabled():
        return None
    gate_call = _read_projection(gate, x, kind, x.shape[-1])
    up_call = _read_projection(up, x, kind, x.shape[-1])
    if gate_call is None or up_call is None:
        return None
    down_call = _read_projection(down, x, kind, gate.out_features)
    if uses_compiled_autograd():  # which cannot trace the backward of `lora_mlp`
        return None
    if down_call is None or any(adapter.dropout for adapter in down_call.adapters):
        return None
    adapters = gate_call.adapters + up_call.adapters
    if not (x.requires_grad or adapters or down_call.adapters):
        return None
    low_rank = []
    with _without_autocast(x, kind):
        if adds_low_rank(kind.dtype, *(call.adapters for call in (gate_call, up_call, down_call))):
            layers = gate_call.layer(), up_call.layer()
            x = cast_if_needed(x, kind.dtype)
            (a, b), products = frozen_layers_and_products(x, layers)
            for t, adapter in zip(products, adapters, strict=True):
                low_rank += t, adapter.b
        else:
            a, b = _compute(x, [gate_call, up_call])
        return gated_down(a, b, act, *down_call.layer(), low_rank)


def _read_projection(layer, x, kind, in_features) -> LinearCall | None:
    """Return what a projection of an MLP computes, or None if it has to be called."""
    if isinstance(replacement_of(layer), LoRALinear):
        if _must_be_called(layer):
            return None
        call = read_layer(layer, x, kind, in_features)
        return None if call is None or call.base is not None else call
    if not is_plain_linear(layer) or layer.in_features != in_features:
        return None
    return read_weight(layer, x, kind, (layer.out_features, in_features))


def _must_be_called(layer) -> bool:
    """Return True if a LoRA layer has hooks, or another forward than the one that was proved."""
    members = vars(type(layer))
    if "_liger" not in members or has_hooks(layer) or "forward" in layer.__dict__:
        return True
    proved_class, _ = members["_liger"]
    return proved_class.forward is not members["_liger_read"][0]


# ---- recognising it ----


def could_be_lora(module) -> bool:
    """Return True if the module has the children and attributes of PEFT's LoRA layers. Wrappers of
    single parameters have them, too, but are no layers."""
    attributes = module.__dict__
    if "lora_A" not in module._modules or "parameter_name" in attributes:
        return False
    return module._modules.keys() >= CHILDREN and attributes.keys() >= ATTRIBUTES


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
