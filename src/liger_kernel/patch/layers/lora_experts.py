"""PEFT's low-rank adapters (LoRA) of experts' tables, by `liger_lora_experts`.

With ``LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"])`` PEFT wraps
stacked experts in a `ParamWrapper` for each table, one around the other. In every call a wrapper
makes the sum of table and adapter, which the experts then read as their table, and backward makes
the sum's gradient. Here the outermost wrapper hands the adapters' matrices to the experts, which an
earlier stage has replaced (the file experts), and no sum is made.

Recognised are modules with the children and attributes of PEFT's wrappers, over replaced experts,
whose class computes with table + scaling·B·A. That is tried once for each class (`prove_class`).
What a wrapper adds is read anew at each call, from plain attributes (`active_adapters`), since
adapters are switched, merged, disabled and rescaled while a model trains.

PEFT's own code runs, at each call, for several active adapters, merged or disabled ones, variants,
a table of one expert, a table or bias that trains, matrices that are shards or no plain tensors,
hooks on the experts or on an inner wrapper, under torch.compile and torch.func, in a user's mode,
and whenever the experts' own forward would not be replaced.

`get_peft_model` may come after the patch. So the module that holds replaced experts looks for
wrappers around them, and converts them at its next call (`ExpertsHolder`)."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from liger_kernel.core import devices
from liger_kernel.ops.moe.lora_experts import TableAdapter
from liger_kernel.patch.layers.adapters import CHILDREN, FLAG
from liger_kernel.patch.layers.experts import Experts, StackedExperts, call_with_adapters
from liger_kernel.patch.layers.experts_names import TABLES
from liger_kernel.patch.proof import functions, private, purity
from liger_kernel.patch.proof.conditions import are_plain_tensors, is_observed
from liger_kernel.patch.proof.hooks import HOOK_ATTRIBUTES
from liger_kernel.patch.proof.parts import unchanged
from liger_kernel.patch.proof.probe import close, error_summary, isolated, noise, probe_copy
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite, replacement_of

ATTRIBUTES = {
    "parameter_name", "num_experts", "_did_swap_in_out_features", "_active_adapter",
    "_disable_adapters", "merged_adapters", "scaling", "lora_variant",
}  # fmt: skip
# Methods of PEFT's wrappers that decide what a call computes, beside forward.
METHODS = "_activate_lora", "get_delta_factors", "get_param", "get_base_layer"


# ---- what a wrapper adds at a call ----


def is_wrapper(module) -> bool:
    """Return True if the module has the children and attributes of PEFT's wrapper of a table."""
    # a TorchScript module has a list of children, but none of the attributes
    return module.__dict__.keys() >= ATTRIBUTES and module._modules.keys() >= CHILDREN


def wrappers_and_experts(wrapper) -> tuple[list, torch.nn.Module]:
    """Return the wrapper with those within it, from the outermost, and what they are around."""
    wrappers = []
    module = wrapper
    while is_wrapper(module):
        wrappers.append(module)
        module = module._modules["base_layer"]
    return wrappers, module


def active_adapters(wrapper, transposed) -> list[TableAdapter] | None:
    """Return what the wrapper adds to its table at this call, one adapter or none. Returns None
    where PEFT's code must run.

    ``transposed``: the table is stored as (E, in, out)."""
    state, modules = wrapper.__dict__, wrapper._modules
    E = state["num_experts"]
    if state["_disable_adapters"] or state["merged_adapters"] or E < 2:
        return None
    active = state["_active_adapter"]
    names = [active] if isinstance(active, str) else active
    names = [name for name in names if name in modules["lora_A"]._modules]
    if not names:
        return []
    name = names[0]
    layers = [modules[child]._modules.get(name) for child in ("lora_A", "lora_B")]
    scaling = state["scaling"].get(name)
    if len(names) > 1 or name in state["lora_variant"] or type(scaling) not in (int, float):
        return None
    if type(modules["lora_dropout"]._modules.get(name)) is not torch.nn.Identity:
        return None
    if any(type(layer) is not torch.nn.Linear or layer.bias is not None for layer in layers):
        return None
    a, b = (layer.weight for layer in layers)
    if not are_plain_tensors(a, b) or a.dim() != 2 or b.dim() != 2:
        return None
    if not len(a) or len(a) % E or b.shape[1] != len(a):
        return None  # a shard
    # A (E·r, in), and B (out, r·E): there the expert is the last dimension
    a = a.unflatten(0, (E, -1))
    b = b.unflatten(1, (-1, E)).permute(2, 0, 1)
    if state["_did_swap_in_out_features"] == transposed:
        a, b = b.mT, a.mT  # PEFT takes the dimensions of a matrix in the other order
    return [TableAdapter(a, b, scaling)]


def forward_or_none(wrapper, args, kwargs) -> torch.Tensor | None:
    """Return what the wrapper computes, or None where PEFT's code must run."""
    if torch.compiler.is_compiling() or devices.in_func_transform() or "adapter_names" in kwargs:
        return None
    wrappers, experts = wrappers_and_experts(wrapper)
    replacement = replacement_of(experts)
    if not isinstance(replacement, Experts):
        return None
    proved_class = private.original_class(type(wrapper))
    if any(private.original_class(type(each)) is not proved_class for each in wrappers):
        return None
    if is_observed(experts, *wrappers[1:]) or not unchanged(experts, type(experts)._liger_parts):
        return None
    adapters = {}
    for each in wrappers:
        active = active_adapters(each, replacement.transposed)
        table = each.__dict__["parameter_name"]
        if active is None or table not in TABLES or table in adapters:
            return None
        adapters[table] = active[0] if active else None
    if not any(adapters.values()):
        return None
    return call_with_adapters(experts, args, kwargs, *(adapters.get(table) for table in TABLES))


@dataclass(frozen=True)
class AdaptedExperts(Replacement):
    """A wrapper of a table, whose adapter is given to the experts.

    ``experts``: what runs instead of the experts, in the words of a report."""

    experts: str
    flag = FLAG
    column = "LoRA"
    takes_one_argument = False

    @property
    def kernel(self):
        return f"{self.experts}, with LoRA's factors"

    def class_members(self, cls):
        def forward(self, *args, **kwargs):
            output = forward_or_none(self, args, kwargs)
            return cls.forward(self, *args, **kwargs) if output is None else output

        return {"forward": forward}

    @staticmethod
    def worthwhile(x):
        return not torch.compiler.is_compiling()


# ---- recognising it ----

# (class, its methods) -> why it is left alone, or None
_proofs: dict[tuple, str | None] = {}


def prove_wrapper(module) -> tuple[AdaptedExperts | str, tuple]:
    """Return what runs instead of a wrapper, or the reason why it is left alone; and the parts that
    this rests on."""
    _, experts = wrappers_and_experts(module)
    replacement = replacement_of(experts)
    if not isinstance(replacement, Experts):
        return "its experts are left alone", ()
    if module.__dict__["parameter_name"] not in TABLES:
        return "it is of no table of weights", ()
    if private.has_instance_forward(module):
        return "its forward was replaced on the instance", ()
    cls = type(module)
    parts = tuple(((), name, "method", getattr(cls, name, None)) for name in METHODS)
    methods = (cls.forward, *(method for *_, method in parts))
    if (cls, methods) not in _proofs:
        # a holder may convert its wrappers within a checkpoint, whose hooks and modes are of the
        # caller's thread
        with ThreadPoolExecutor(1) as executor:
            _proofs[cls, methods] = executor.submit(_try_class, module, methods).result()
    reason = _proofs[cls, methods]
    return (AdaptedExperts(replacement.kernel) if reason is None else reason), parts


def _try_class(module, methods) -> str | None:
    """Return None if the class's forward computes with table + scaling·B·A, and gives A and B their
    gradients, or the reason why it is left alone."""
    for method in methods:
        if method is None or not purity.is_released_code(inspect.unwrap(method)):
            return f"{type(module).__name__} has code of nobody's package"
    with isolated():
        try:
            for swapped in (False, True):
                wrapper = _small_wrapper(module, swapped)
                x = noise(4, SMALL_TABLE[1], seed=3)
                with torch.enable_grad():
                    output = methods[0](wrapper, x)
                    (adapter,) = active_adapters(wrapper, transposed=False)
                    table = wrapper.base_layer.table + adapter.scaling * adapter.b @ adapter.a
                    expected = x @ table
                if not _same_output_and_gradients(output, expected, [*wrapper.parameters()]):
                    return "it does not compute with table + scaling·B·A"
        except Exception as error:
            return f"it could not be tried: {error_summary(error)}"
    return None


SMALL_TABLE = 2, 5, 7  # of a trial
SMALL_RANK = 3


class _SmallTable(torch.nn.Module):
    """Stands for experts in a trial: multiplies with a table."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(noise(*SMALL_TABLE), requires_grad=False)

    def forward(self, x):
        return x @ self.table


def _small_wrapper(module, swapped):
    """Return a copy of the wrapper around a small table, with an adapter of ours."""
    E, *features = SMALL_TABLE
    in_features, out_features = reversed(features) if swapped else features
    shapes = dict(
        lora_A=(SMALL_RANK * E, in_features),
        lora_B=(out_features, SMALL_RANK * E),
    )
    children = {}
    for seed, (name, shape) in enumerate(shapes.items(), 1):
        layer = torch.nn.Linear(*reversed(shape), bias=False, dtype=torch.float32)
        layer.weight.copy_(noise(*shape, seed=seed))
        children[name] = torch.nn.ModuleDict(dict(tried=layer))
    return probe_copy(
        module,
        children=children
        | dict(
            base_layer=_SmallTable(),
            lora_dropout=torch.nn.ModuleDict(dict(tried=torch.nn.Identity())),
        ),
        parameter_name="table",
        num_experts=E,
        _did_swap_in_out_features=swapped,
        _active_adapter=["tried"],
        _disable_adapters=False,
        merged_adapters=[],
        scaling=dict(tried=1.75),
        lora_variant={},
        **{name: {} for name in HOOK_ATTRIBUTES},
    )


def _same_output_and_gradients(output, expected, parameters) -> bool:
    trainable = [p for p in parameters if p.requires_grad]
    dy = noise(*expected.shape, seed=4)
    grads, expected_grads = (torch.autograd.grad(y, trainable, dy) for y in (output, expected))
    pairs = zip((output, *grads), (expected, *expected_grads), strict=True)
    return all(close(a.detach(), b.detach()) for a, b in pairs)


# ---- wrappers that come later ----


@dataclass(frozen=True)
class ExpertsHolder(Replacement):
    """A module with replaced experts, which runs as it is. Before that it converts the wrappers
    that PEFT has put around them since its last call."""

    flag = None
    guarded = False

    def class_members(self, cls):
        def forward(self, *args, **kwargs):
            if not torch.compiler.is_compiling():
                convert_wrappers(self)
            return cls.forward(self, *args, **kwargs)

        return {"forward": functions.copy_metadata(cls.forward, forward)}


def convert_wrappers(holder) -> None:
    """Convert the wrappers around the experts of a module that are not converted yet."""
    for child in holder._modules.values():
        if child is None or not is_wrapper(child):
            continue
        for wrapper in wrappers_and_experts(child)[0]:
            if not private.is_patched(wrapper):
                result, parts = prove_wrapper(wrapper)
                if not isinstance(result, str):
                    private.convert_module(wrapper, result, parts)


def holds_experts(module) -> bool:
    """Return True if replaced experts are a child of the module, in wrappers or not.

    A decoder layer, which can be checkpointed, is left to the rewrites of checkpoints."""
    if hasattr(module, "gradient_checkpointing"):
        return False
    inner_modules = (wrappers_and_experts(child)[1] for child in module.children())
    return any(isinstance(replacement_of(inner), Experts) for inner in inner_modules)


class LoRAExperts(Rewrite):
    """PEFT's wrappers around stacked experts, and the modules whose experts may get some."""

    flags = (FLAG,)

    def could_apply(self, module):
        if not is_wrapper(module):
            return holds_experts(module)
        _, experts = wrappers_and_experts(module)
        return replacement_of(experts) is not None or StackedExperts().could_apply(experts)

    def name(self, module):
        _, experts = wrappers_and_experts(module)
        return f"{type(experts).__name__}.{module.__dict__['parameter_name']}"

    def prove_once(self, walk, module):
        return prove_wrapper(module)

    def apply(self, walk, module):
        if is_wrapper(module):
            super().apply(walk, module)
        else:
            private.convert_module(module, ExpertsHolder())
