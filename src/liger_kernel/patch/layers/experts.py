"""Experts of a mixture whose weights are stacked in tables, by `liger_experts`.

Recognised are modules with "mlp" or "experts" in their name, with a table ``gate_up_proj`` of all
experts' gate and up projections and a table ``down_proj`` (and perhaps biases), that compute

    y_t = Σ_k weights[t, k]·down_e(act(gate_e(x_t))·up_e(x_t)),   e = index[t, k]

with SiLU, GELU by tanh, exact GELU, or SwiGLU with limits. The tables may be transposed, and gate
and up may be halves of a table or every other column. `Experts` replaces the whole forward, which
is proved by a trial with random tables (the file experts_trial), whatever its flags say, whichever
of transformers' implementations runs.

Where the forward is not that, `ExpertsGate` replaces the method ``_apply_gate``, act(gate)·up
alone, by `liger_swiglu`, `liger_geglu` or `liger_clamped_swiglu`.

Experts are left alone if neither is proved: if they hold other weights, read their tables' sizes,
drop tokens, or have another formula, gradient or rounding. The forward runs as it is for tensors
that the operator does not take (`Experts.forward_or_none`)."""

from __future__ import annotations

import functools
import inspect
import threading
from dataclasses import dataclass

import torch

from liger_kernel.core import devices
from liger_kernel.core.devices import in_func_transform
from liger_kernel.ops import functional
from liger_kernel.ops.moe.experts import ACTIVATIONS
from liger_kernel.ops.moe.lora_experts import TableAdapter, liger_lora_experts
from liger_kernel.patch.layers.activations import (
    ACTIVATION_LABELS,
    ClampedSwiGLU,
    glu_candidates,
    split_gate_up,
)
from liger_kernel.patch.layers.dtypes import KERNEL_DTYPES
from liger_kernel.patch.layers.experts_names import (
    BIASES,
    DEFAULT_IMPLEMENTATION,
    GATE_METHOD,
    LIGER_IMPLEMENTATION,
    LIMIT_ATTRIBUTES,
    TABLES,
    implementation_of,
)
from liger_kernel.patch.layers.experts_trial import try_forward
from liger_kernel.patch.layers.mlp import GatedActivation
from liger_kernel.patch.layers.mlp_trial import find_matching_formula
from liger_kernel.patch.proof import functions, purity
from liger_kernel.patch.proof.conditions import (
    are_plain_tensors,
    is_observed,
    left_to_compiler,
)
from liger_kernel.patch.proof.parts import ReadRecorder
from liger_kernel.patch.proof.probe import (
    INTERMEDIATE_SIZE,
    children_in_mode,
    isolated,
    noise,
    present_names,
    probe_copy,
    same_in_both_modes,
    takes_one_tensor,
)
from liger_kernel.patch.proof.rewrite import Rewrite

# torch's names of activations -> Hugging Face's, which `liger_experts` takes
ACTIVATION_OPTIONS = {name: option for option, name in ACTIVATIONS.items()}


# ---- what runs ----


@dataclass(frozen=True)
class Experts(GatedActivation):
    """The whole forward, by `liger_experts`.

    Attributes:
        interleaved, transposed: the layout of the tables, see `liger_experts`.
        has_biases: True if there are tables of biases.
        implementation: the name of transformers' implementation that was proved.
        autocast: whether its products are in autocast's dtype. None: in neither that one nor the
            tables'.
    """

    interleaved: bool
    transposed: bool
    has_biases: bool
    implementation: str | None = None
    autocast: bool | None = None
    takes_one_argument = False
    fusible = True

    @property
    def kernel(self):
        if isinstance(self.act, ClampedSwiGLU):
            return "liger_experts (clamped SiLU)"
        return f"liger_experts ({ACTIVATION_LABELS[self.act]})"

    def run(self, function, x, index, weights, gate_up, down, *biases):
        """Call `liger_experts` or its reference."""
        if isinstance(self.act, ClampedSwiGLU):
            act = "silu"
            limit, alpha, shift = self.act
        else:
            act = ACTIVATION_OPTIONS[self.act]
            limit, alpha, shift = None, 1.0, 0.0
        gate_up_bias, down_bias = biases or (None, None)
        return function(
            x,
            gate_up,
            down,
            index,
            weights,
            act,
            gate_up_bias,
            down_bias,
            limit,
            alpha,
            shift,
            self.transposed,
            self.interleaved,
        )

    def class_members(self, cls):
        experts = self
        argument_names = _argument_names(cls.forward)
        implementations = _implementations(cls.forward)
        proved = implementations.get(experts.implementation)
        globals_unchanged = None
        if proved:
            globals_unchanged = functions.globals_unchanged(functions.globals_used(proved))

        def forward(self, *args, **kwargs):
            call = _adapted_call(self)
            adapters = () if call is None else call.adapters
            arguments = dict(zip(argument_names, args, strict=False), **kwargs)
            if (
                len(args) + len(kwargs) == len(argument_names)
                and arguments.keys() == set(argument_names)
                and implementations.get(experts.implementation) is proved
                and (globals_unchanged is None or globals_unchanged())
            ):
                inputs = (arguments[name] for name in argument_names)
                output = experts.forward_or_none(self, *inputs, *adapters)
                if call is not None:
                    call.is_computed = output is not None
                if output is not None:
                    return output
            return cls.forward(self, *args, **kwargs) if call is None else None

        return {"forward": forward}

    def forward_or_none(self, module, x, index, weights, gate_up_lora=None, down_lora=None):
        """Return what the module computes, or None where the operator would compute something else
        with these tensors, or not run.

        With adapters of its tables, it returns what the module would compute with the sums of
        tables and adapters."""
        if torch.compiler.is_compiling() and "parametrizations" in module._modules:
            return None  # PEFT makes the tables; Dynamo's guards fail if we read them
        names = (*TABLES, *BIASES) if self.has_biases else TABLES
        tables = [getattr(module, name, None) for name in names]  # once: they may be computed
        inputs = x, index, weights, *tables
        if any(t is None or not are_plain_tensors(t) for t in inputs):
            return None
        if left_to_compiler(x) or in_func_transform():
            return None
        inner_modules = (
            descendant
            for child in module._modules.values()
            if child is not None
            for descendant in child.modules()
        )
        if is_observed(*inner_modules, still_called=False):
            return None
        if not devices.has_kernels(x) and (x.is_meta or torch.compiler.is_compiling()):
            return None
        in_autocast = devices.in_autocast(x)
        num_experts = getattr(module, "num_experts", None)
        if not _can_run(self.transposed, num_experts, *inputs):
            return None
        operator = functional.liger_experts
        if gate_up_lora is not None or down_lora is not None:
            if not _can_adapt(self.transposed, tables, gate_up_lora, down_lora):
                return None
            operator = functools.partial(
                liger_lora_experts, gate_up_lora=gate_up_lora, down_lora=down_lora
            )
        if in_autocast and self.autocast is None:
            return None
        if in_autocast and self.autocast:
            return self.run(operator, *inputs)
        if any(t.dtype != x.dtype for t in tables):
            return None
        if in_autocast:
            with devices.without_autocast(x):
                return self.run(operator, *inputs)
        return self.run(operator, *inputs)


def _can_run(transposed, num_experts, x, index, weights, gate_up, down, *biases) -> bool:
    """Return True if the shapes are those of one mixture, which a shard's are not, and the dtypes
    have kernels."""
    if [t.dim() for t in (x, index, weights, gate_up, down)] != [2, 2, 2, 3, 3]:
        return False
    E, columns, H = (gate_up.mT if transposed else gate_up).shape
    shapes = (down.mT if transposed else down).shape, *(bias.shape for bias in biases)
    expected_shapes = (E, H, columns // 2), *((E, columns), (E, H))[: len(biases)]
    return (
        all(t.dtype in KERNEL_DTYPES for t in (x, weights, gate_up, down, *biases))
        and all(t.device == x.device for t in (index, weights, gate_up, down, *biases))
        and not index.dtype.is_floating_point
        and E > 0
        and num_experts in (None, E)
        and shapes == expected_shapes
        and x.shape[1] == H
        and index.shape == weights.shape
        and index.shape[0] == x.shape[0]
    )


def _can_adapt(transposed, tables, *adapters: TableAdapter | None) -> bool:
    """Return True if the adapters have matrices for each expert, and tables and biases are frozen:
    `liger_lora_experts` gives them no gradient."""
    if any(t.requires_grad for t in tables):
        return False
    for table, adapter in zip(tables, adapters, strict=False):
        if adapter is None:
            continue
        E, out_features, in_features = (table.mT if transposed else table).shape
        a, b, _ = adapter
        rank = a.shape[1]
        if a.shape != (E, rank, in_features) or b.shape != (E, out_features, rank):
            return False
        if any(t.dtype not in KERNEL_DTYPES or t.device != table.device for t in (a, b)):
            return False
    return True


# ---- adapters of the tables: see the file lora_experts ----


@dataclass(eq=False)
class _AdaptedCall:
    """A call by `call_with_adapters`.

    ``is_computed``: the operator has run, with the adapters."""

    module: torch.nn.Module
    adapters: tuple[TableAdapter | None, TableAdapter | None]
    is_computed: bool = False


class _ThreadState(threading.local):
    """Holds each thread's call with adapters, while it runs."""

    call = None


_thread = _ThreadState()


def call_with_adapters(module, args, kwargs, gate_up_lora, down_lora) -> torch.Tensor | None:
    """Call the forward of patched experts with adapters of their tables.

    Returns None if the operator did not run. Then the family's forward may have run without the
    adapters, and what it returned is dropped."""
    call = _AdaptedCall(module, (gate_up_lora, down_lora))
    outer_call = _thread.call
    _thread.call = call
    try:
        output = type(module).forward(module, *args, **kwargs)
    finally:
        _thread.call = outer_call
    return output if call.is_computed else None


def _adapted_call(module) -> _AdaptedCall | None:
    """Return the call of these experts with adapters, or None if they are called without."""
    if torch.compiler.is_compiling():
        return None
    call = _thread.call
    return call if call is not None and call.module is module else None


@dataclass(frozen=True)
class ExpertsGate(GatedActivation):
    """``act(gate)·up`` in a method of its own. With ``interleaved``, every other column is the
    gate's."""

    interleaved: bool = False
    method = GATE_METHOD
    fusible = True

    @property
    def kernel(self):
        return f"{super().kernel} of stacked experts"

    def class_members(self, cls):
        replacement = self

        def _apply_gate(self, gate_up):
            if not are_plain_tensors(gate_up) or left_to_compiler(gate_up):
                return cls._apply_gate(self, gate_up)
            gate, up = split_gate_up(gate_up, replacement.interleaved)
            if isinstance(replacement.act, ClampedSwiGLU):
                return replacement.act(gate, up)
            if replacement.act == "silu":
                return functional.liger_swiglu(gate, up)
            return functional.liger_geglu(gate, up, replacement.act)

        return {GATE_METHOD: _apply_gate}


# ---- how it is found ----


def prove(
    module: torch.nn.Module, reads: ReadRecorder | None = None
) -> Experts | ExpertsGate | str:
    """Return what of the experts is proved, or the reason why they are left alone."""
    reads = reads or ReadRecorder()
    forward = type(module).forward
    if implementation_of(module) == LIGER_IMPLEMENTATION:
        forward = default_forward(forward)
    experts = prove_forward(module, forward, reads)
    return experts if isinstance(experts, Experts) else prove_gate(module, reads)


class StackedExperts(Rewrite):
    """Modules with "mlp" or "experts" in their name and parameters that are projections."""

    flags = "swiglu", "geglu"
    prove = staticmethod(prove)

    def could_apply(self, module):
        class_name = type(module).__name__.lower()
        if "mlp" not in class_name and "experts" not in class_name:
            return False
        return any(name.endswith("_proj") for name in present_names(module._parameters))


@isolated()
def prove_forward(module, forward, reads: ReadRecorder) -> Experts | str:
    """Return what ``forward(module, x, index, weights)`` computes, or the reason why it is left
    alone. ``forward`` is None if it cannot be known."""
    parameter_names = present_names(module._parameters)
    if forward is None:
        return "its forward calls the one that was chosen"
    has_tables = parameter_names in ({*TABLES}, {*TABLES, *BIASES})
    if not has_tables or len(_argument_names(forward)) != 3:
        return "it is not made of a table of gate and up projections and one of down projections"
    if present_names(module._buffers):
        return "it holds more than its tables"
    implementation = implementation_of(module)
    function = _implementations(forward).get(implementation)
    if function is not None and not purity.is_released_code(function):
        return f"its experts_implementation, {implementation!r}, is code of nobody's package"
    layers = [
        name
        for name, child in module._modules.items()
        if child and any(True for _ in child.parameters())
    ]
    if layers:
        return f"it has further layers: {', '.join(layers)}"
    has_biases = parameter_names > {*TABLES}
    candidates = [
        Experts(act, interleaved, transposed, has_biases)
        for transposed in (False, True)
        for act, _ in glu_candidates(module)
        for interleaved in (False, True)
    ]
    experts = try_forward(module, forward, candidates, reads)
    sizes = {
        name
        for (path, name), (kind, _) in reads.parts_read.items()
        if kind is int and path in ((), ("config",))
    }
    if sizes - {*LIMIT_ATTRIBUTES} and isinstance(experts, Experts):
        return f"its forward looks at {', '.join(sorted(sizes))}"
    return experts


@isolated()
def prove_gate(module, reads: ReadRecorder) -> ExpertsGate | str:
    """Return the gate that the method ``_apply_gate`` computes, or the reason why it is left
    alone."""
    apply_gate = getattr(type(module), GATE_METHOD, None)
    if apply_gate is None or not takes_one_tensor(apply_gate):
        return "its experts' weights are stacked, and its forward computes act(gate)·up itself"
    has_gate = getattr(module, "has_gate", True)
    reads.parts_read[(), "has_gate"] = "absent", None
    if "has_gate" in vars(module):
        reads.parts_read[(), "has_gate"] = type(has_gate), has_gate
    if not has_gate:
        return "its experts have no gate"
    implementation = implementation_of(module)
    forward = type(module).forward
    running_forward = _implementations(forward).get(implementation, forward)
    if not functions.uses_name(running_forward, GATE_METHOD):
        return (
            f"with experts_implementation={implementation!r} it computes act(gate)·up elsewhere "
            f"than in {GATE_METHOD}"
        )

    def run(x, make=probe_copy):
        def in_mode(**mode):
            children = children_in_mode(module._modules, **mode)
            return apply_gate(make(module, {}, children, **mode), x)

        return same_in_both_modes(in_mode)

    def formula(glu, interleaved, x):
        return glu(*split_gate_up(x, interleaved))

    candidates = [
        (ExpertsGate(act, interleaved), functools.partial(formula, glu, interleaved))
        for act, glu in glu_candidates(module)
        for interleaved in (False, True)
    ]
    x = noise(8, 2 * INTERMEDIATE_SIZE, seed=20)
    return find_matching_formula(run, candidates, x, "act(gate)·up", "SiLU or GELU", reads)


def default_forward(forward):
    """Return the function that "liger" stands for where the forward chooses among implementations,
    transformers' default; None if it does not choose."""
    chooses = inspect.getclosurevars(forward).nonlocals.get("original_forward")
    return _implementations(forward)[DEFAULT_IMPLEMENTATION] if chooses else None


def _implementations(forward):
    """Return the implementations among which the forward chooses, by name."""
    used = inspect.getclosurevars(forward)
    return used.nonlocals.get("experts_interface") or used.globals.get("ALL_EXPERTS_FUNCTIONS", {})


def _argument_names(forward) -> tuple[str, ...]:
    return (*inspect.signature(forward).parameters,)[1:]
