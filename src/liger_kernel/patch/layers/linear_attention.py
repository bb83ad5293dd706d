"""Linear attention: the convolution and the gated delta rule of hybrid models' mixers.

Recognised are modules whose forward calls one of these functions of its modeling file:

    causal_conv1d_fn(hidden_states, weight, bias, activation, ...)    `liger_causal_conv1d`
    torch_chunk_gated_delta_rule(query, key, value, g, beta, ...)     `liger_gated_delta_rule`

transformers wraps each of them: the function of a package (causal-conv1d, flash-linear-attention)
runs if that is installed, one of PyTorch's operations otherwise. The latter is tried on a CPU
(`linear_attention_trial`), and the package's is taken for the same formula. The delta rule is tried
on the device, too: some compilers make wrong kernels of it.

The mixer's own forward runs, with the operators under these names. So everything else in it stays
what it is: projections, the gated norm, caches, the function for a single cached token. For inputs
that the operators do not take, the family's function runs.

Packed sequences are kept apart: those of ``cu_seq_lens_q``, and for a convolution alone also those
of ``seq_idx``. transformers raises there without a package; older versions (5.17) dropped both,
and let states pass from one sequence to the next. The class's own forward runs, and raises or not,
where a part of the mixer could not keep them apart (`_keeps_sequences_apart`), or a kernel of the
hub stands in for one."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from liger_kernel.core import devices
from liger_kernel.core.op import cast_if_needed
from liger_kernel.core.tile import TRITON
from liger_kernel.ops import functional
from liger_kernel.ops.recurrent.causal_conv import number_sequences
from liger_kernel.patch.layers import adapters
from liger_kernel.patch.layers.activations import ActivationTable
from liger_kernel.patch.layers.dtypes import KERNEL_DTYPES
from liger_kernel.patch.layers.linear_attention_trial import (
    WIDTHS,
    reason_wrong_on_device,
    takes_grouped_heads,
    try_convolution,
    try_delta_rule,
)
from liger_kernel.patch.proof import purity
from liger_kernel.patch.proof.conditions import are_plain_tensors
from liger_kernel.patch.proof.functions import (
    globals_used,
    names_used,
    overrides,
    rebind_global,
    resolve_global,
    wrapped_functions,
)
from liger_kernel.patch.proof.private import has_instance_forward
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

FLAG = "linear_attention"
CONVOLUTION = "causal_conv1d_fn"
DELTA_RULE = "torch_chunk_gated_delta_rule"
KERNELS = {CONVOLUTION: "liger_causal_conv1d", DELTA_RULE: "liger_gated_delta_rule"}
ACTIVATIONS = None, "silu", "swish"
# of a head: a multiple of the first, at most the second
HEAD_MULTIPLE = 16
MAX_HEAD_SIZE = 256
# Arguments that say where packed sequences begin, and what caches are called.
PACKING = "cu_seq_lens_q", "seq_idx"
CACHES = "cache", "cache_params", "past_key_values"
# Makes zeros of padding.
MASK = "apply_mask_to_padding_states"
# Functions for one token after cached ones. Packed sequences never meet them.
ONE_TOKEN = {"causal_conv1d_update", "torch_recurrent_gated_delta_rule"}
# Arguments that the operators lack, if a function does not say which ones it takes.
STATE_ARGUMENTS = "initial_states", "return_final_states", "final_states_out"
DELTA_RULE_ARGUMENTS = (
    "scale", "state_v_first", "transpose_state_layout", "cp_context", "use_gate_in_kernel", "A_log",
    "dt_bias", "cu_seqlens_cpu", "chunk_indices", "return_intermediate_states", "head_first",
)  # fmt: skip
# the package whose functions of whole sequences are slow as PyTorch's operations
FLA = "fla"


# ---- what runs ----


class FamilyFunction(NamedTuple):
    """A function of a modeling file.

    Attributes:
        function: what the file calls by its name.
        torch_function: its formula by PyTorch's operations.
        package: that of the function that runs instead, or None.
        arguments: the keywords that reach that one. Others are dropped. None: all do.
        looked_for: the package that transformers looks for. None: none.
        takes_groups: for a delta rule, whether it takes more value heads than keys' heads.
        activations: where the formula looks its activation up.
    """

    function: Callable
    torch_function: Callable
    package: str | None = None
    arguments: frozenset[str] | None = None
    looked_for: str | None = None
    takes_groups: bool = True
    activations: ActivationTable = ActivationTable({}, {})

    def asks_for_more(self, kwargs, known, lacking) -> bool:
        """Return True if the family's function would read a keyword argument that ours cannot.

        Ours takes those named in ``known``. What the function reads is in its signature; where that
        is not to be had, only the names in ``lacking`` are looked for."""
        names = lacking if self.arguments is None else self.arguments.difference(known)
        for name in names:
            value = kwargs.get(name)
            if value is not None and value is not False:
                return True
        return False


def read_function(forward, name) -> FamilyFunction:
    """Return the function that ``forward`` calls by a global name."""
    return read_family(resolve_global(forward, name))


def read_family(function) -> FamilyFunction:
    """Read what a function of a modeling file, or the module that stands for it, runs."""
    # where the package kernels is installed, transformers makes a module of it
    called = type(function).forward if isinstance(function, torch.nn.Module) else function
    family = FamilyFunction(function, called)
    for layer in wrapped_functions(called):
        if not purity.is_package_code(layer):
            break  # a user's function around transformers', which may do more
        names = layer.__code__.co_freevars
        cells = dict(zip(names, layer.__closure__ or (), strict=True))
        if cells.keys() >= {"torch_function", "implementation", "applicable_params"}:
            torch_function = cells["torch_function"].cell_contents
            implementation = cells["implementation"].cell_contents
            arguments = frozenset(cells["applicable_params"].cell_contents)
            package = None
            if implementation is not torch_function:
                module = getattr(implementation, "__module__", None)
                package = (module or type(implementation).__module__).partition(".")[0]
            looked_for = cells["package"].cell_contents if "package" in cells else None
            family = FamilyFunction(function, torch_function, package, arguments, looked_for)
            break
    table = ActivationTable.of(family.torch_function, ACTIVATIONS)
    return family._replace(activations=table)


def other_functions(forward, names) -> list[str]:
    """Return which further functions of its file a forward calls by a global name.

    But for ``names``, those of `ONE_TOKEN` and `MASK`, each may mix tokens."""
    others = set()
    for each in wrapped_functions(forward):
        if KERNELS.keys().isdisjoint(each.__code__.co_names):
            continue  # a decorator
        for name in names_used(each) - {*names, MASK} - ONE_TOKEN:
            if isinstance(each.__globals__.get(name), (types.FunctionType, torch.nn.Module)):
                others.add(name)
    return sorted(others)


@dataclass(frozen=True)
class LinearAttention(Replacement):
    """A mixer whose convolution, delta rule or both are computed by our operators.

    Attributes:
        functions: the names of what is replaced, of `KERNELS`.
        packages: for each, the package whose function would run, or None.
        others: further functions that the forward calls, which may mix tokens.
        takes_groups: as of `FamilyFunction`.
    """

    functions: tuple[str, ...]
    packages: tuple[str | None, ...]
    others: tuple[str, ...] = ()
    takes_groups: bool = True
    flag = FLAG
    column = "linear attention"
    takes_one_argument = False
    adopts_adapters = True

    @property
    def kernel(self):
        parts = []
        for name, package in zip(self.functions, self.packages, strict=True):
            instead = f" (instead of {package})" if package else ""
            parts.append(KERNELS[name] + instead)
        return ", ".join(parts)

    def globals_read(self, cls, parts):
        used = []
        for name in (*self.functions, *self.others):
            used += globals_used(cls.forward, name)
        return tuple(used)

    def class_members(self, cls):
        with_operators = cls.forward
        hub_checks = []
        for name in self.functions:
            family = read_function(cls.forward, name)._replace(takes_groups=self.takes_groups)
            has_hub_kernel = _hub_check(family.function)
            operator = functools.partial(_OPERATORS[name], family)
            function = family.function
            if name == CONVOLUTION and DELTA_RULE in self.functions:
                function = _told_of_sequences(function)
            run = _or_family(operator, function, has_hub_kernel)
            with_operators = rebind_global(with_operators, name, run)
            hub_checks.append(has_hub_kernel)
        # what mixes tokens in it is the operators alone
        is_known = not self.others and purity.is_released_code(cls.forward)
        packing = PACKING[:1] if DELTA_RULE in self.functions else PACKING

        def forward(self, *args, **kwargs):
            if any(kwargs.get(name) is not None for name in PACKING):
                # a kernel of the hub may not keep sequences apart, and does not say so
                is_ours = is_known and not any(check() for check in hub_checks)
                if not is_ours or not _keeps_sequences_apart(self, packing, args, kwargs):
                    return cls.forward(self, *args, **kwargs)
            group = adapters.input_group(self)
            if group is None:
                return with_operators(self, *args, **kwargs)
            with group:
                return with_operators(self, *args, **kwargs)

        return {"forward": forward}


def _keeps_sequences_apart(module, packing, args, kwargs) -> bool:
    """Return True if the operators keep the packed sequences of this call apart.

    They need one of the arguments ``packing``. After cached tokens sequences begin elsewhere: the
    convolution gets these in front. So it does zeros before fewer tokens than its width, where
    there is a cache."""
    if all(kwargs.get(name) is None for name in packing):
        return False
    for cache in (*args[1:], *(kwargs.get(name) for name in CACHES)):
        if cache is None or isinstance(cache, torch.Tensor):
            continue
        hidden_states = args[0] if args else kwargs.get("hidden_states")
        if hidden_states is None or hidden_states.shape[1] < max(WIDTHS):
            return False
        layer = getattr(module, "layer_idx", None)
        if layer is None or type(cache).__module__ != "transformers.cache_utils":
            return False
        if cache.has_previous_state(layer, getattr(module, "conv_idx", 0)):
            return False
    return True


def _hub_check(function):
    """Return a function that says whether `kernelize` has put a kernel of the hub into the module
    that stands for a family's function."""
    attributes = function.__dict__ if isinstance(function, torch.nn.Module) else {}
    return lambda: "forward" in attributes and has_instance_forward(function)


def _told_of_sequences(function):
    """Return a delta net's convolution that keeps the packed sequences of ``cu_seq_lens_q`` apart.

    It runs where our convolution steps aside and our delta rule does not. transformers' own ignores
    ``cu_seq_lens_q`` and convolves across borders, since its delta rule raises afterwards. So it is
    given ``seq_idx``, which causal-conv1d reads, and for which it raises without that package."""

    def run(hidden_states, *args, **kwargs):
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is not None and kwargs.get("seq_idx") is None and len(hidden_states) == 1:
            x = hidden_states.transpose(1, 2)
            kwargs["seq_idx"] = number_sequences(CONVOLUTION, x, cu_seqlens)
        return function(hidden_states, *args, **kwargs)

    return run


def _or_family(operator, function, has_hub_kernel):
    """Return a function that runs the family's where the operator gives None, or the hub's where it
    has a kernel for it."""

    def run(*args, **kwargs):
        output = None
        if not has_hub_kernel():
            output = operator(*args, **kwargs)
        return function(*args, **kwargs) if output is None else output

    return run


def convolve(family, hidden_states, weight, bias=None, activation=None, **kwargs):
    """Compute a family's ``causal_conv1d_fn`` of (B, D, T), or return None where that must run."""
    if not are_plain_tensors(hidden_states, weight, bias) or hidden_states.dim() != 3:
        return None
    if weight.dim() != 2 or weight.shape[0] != hidden_states.shape[1]:
        return None
    if weight.shape[1] not in WIDTHS or activation not in ACTIVATIONS:
        return None
    if not family.activations.is_unchanged(activation):
        return None
    if not hidden_states.numel() or family.asks_for_more(kwargs, ("seq_idx",), STATE_ARGUMENTS):
        return None
    if hidden_states.dtype not in KERNEL_DTYPES or weight.dtype not in KERNEL_DTYPES:
        return None
    if bias is not None and (bias.dtype != weight.dtype or bias.shape != weight.shape[:1]):
        return None
    dtype = weight.dtype
    if devices.in_autocast(hidden_states):
        dtype = devices.autocast_dtype(hidden_states)
        if weight.dtype not in (torch.float32, dtype) or dtype not in KERNEL_DTYPES:
            return None  # the family rounds to both
    seq_idx = kwargs.get("seq_idx")
    cu_seqlens = kwargs.get("cu_seq_lens_q") if seq_idx is None else None
    if seq_idx is not None and seq_idx.shape != hidden_states.shape[::2]:
        return None
    if cu_seqlens is not None and len(hidden_states) != 1:
        return None
    with devices.without_autocast(hidden_states):
        y = functional.liger_causal_conv1d(
            cast_if_needed(hidden_states, dtype).transpose(1, 2),
            cast_if_needed(weight, dtype),
            None if bias is None else cast_if_needed(bias, dtype),
            activation=activation and "silu",
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
        )
        return cast_if_needed(y, hidden_states.dtype).transpose(1, 2)


def apply_delta_rule(
    family,
    query,
    key,
    value,
    g,
    beta,
    chunk_size=64,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    **kwargs,
):
    """Compute a family's ``torch_chunk_gated_delta_rule``, or return None where that must run."""
    if not are_plain_tensors(query, key, value, g, beta, initial_state):
        return None
    if any(tensor.dtype not in KERNEL_DTYPES for tensor in (query, key, value)):
        return None
    if not query.dtype == key.dtype == value.dtype or query.dim() != 4 or not value.numel():
        return None
    sizes = key.shape[-1], value.shape[-1]
    if not _have_kernels(*sizes) or value.shape[2] % key.shape[2]:
        return None
    if value.shape[2] != key.shape[2] and not family.takes_groups:
        return None
    if family.asks_for_more(kwargs, ("cu_seqlens",), DELTA_RULE_ARGUMENTS):
        return None
    cu_seqlens = kwargs.get("cu_seqlens")
    if cu_seqlens is None and kwargs.get("seq_idx") is not None:
        return None
    if devices.has_kernels(query):
        device = devices.type_and_index(query)
        if reason_wrong_on_device(*device, query.dtype, *sizes) is not None:
            return None
    return functional.liger_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def _have_kernels(*head_sizes) -> bool:
    return all(not size % HEAD_MULTIPLE and size <= MAX_HEAD_SIZE for size in head_sizes)


_OPERATORS = {CONVOLUTION: convolve, DELTA_RULE: apply_delta_rule}


# ---- how it is found ----


class LinearAttentions(Rewrite):
    """Modules whose forward, or that of a class they are derived from, calls one of `KERNELS`."""

    flags = (FLAG,)

    def could_apply(self, module):
        cls = type(module)
        return bool(function_names(cls.forward)) or overrides(cls, "forward", KERNELS)

    def prove_once(self, walk, module):
        """Prove by no parts: the mixer's own forward runs, with other functions."""
        return self._prove(walk, module), ()

    def _prove(self, walk, module) -> LinearAttention | str:
        if has_instance_forward(module):
            return "its forward was replaced on the instance"
        forward = type(module).forward
        names = function_names(forward)
        if not names:
            return "its own forward calls that of the class it is derived from"
        proved = []
        reasons = []
        takes_groups = True
        for name in names:
            family = read_function(forward, name)
            reason = _reason_left_alone(walk, module, name, family)
            if reason is None:
                proved.append((name, family.package))
                if name == DELTA_RULE:
                    takes_groups = walk.call_once(takes_grouped_heads, family.torch_function)
            else:
                reasons.append(f"{name}: {reason}")
        others = other_functions(forward, [name for name, _ in proved])
        for note in _notes_of_slow_functions(module, [name for name, _ in proved], others):
            if note not in walk.report.notes:
                walk.report.notes.append(note)
        if not proved:
            return "; ".join(reasons)
        for reason in reasons:
            self.leave_alone(walk, module, reason)
        return LinearAttention(*zip(*proved, strict=True), tuple(others), takes_groups)


def function_names(forward) -> list[str]:
    """Return those of `KERNELS` that a forward calls."""
    return [name for name in KERNELS if resolve_global(forward, name) is not None]


def _reason_left_alone(walk, module, name, family) -> str | None:
    if not isinstance(module, walk.trusted):
        reason = walk.call_once(purity.reason_function_unprovable, family.torch_function)
        if reason is not None:
            return reason
    if name == CONVOLUTION:
        return _reason_of_width(module) or walk.call_once(try_convolution, family.torch_function)
    sizes = _head_sizes(module)
    if not _have_kernels(*sizes):
        return (
            f"its heads have {sizes[0]} and {sizes[1]} entries, the kernels take multiples of "
            f"{HEAD_MULTIPLE} up to {MAX_HEAD_SIZE}"
        )
    return walk.call_once(try_delta_rule, family.torch_function) or _try_on_device(module, sizes)


def _reason_of_width(module) -> str | None:
    """Return why a mixer keeps its convolution: there is no kernel for any of its widths."""
    widths = {m.kernel_size[0] for m in module.modules() if isinstance(m, torch.nn.Conv1d)}
    if not widths or not widths.isdisjoint(WIDTHS):
        return None
    return f"it is {max(widths)} tokens wide, the kernels take {WIDTHS[0]} to {WIDTHS[-1]}"


def _head_sizes(module) -> tuple[int, int]:
    """Return the sizes of a key and a value head with which the device is tried."""
    sizes = getattr(module, "head_k_dim", None), getattr(module, "head_v_dim", None)
    return tuple(size if type(size) is int else 128 for size in sizes)


def _try_on_device(module, head_sizes) -> str | None:
    """Try the delta rule where the module's weights are; another device is tried at the first call.

    Weights in fp32 are most often trained under autocast."""
    weight = next(module.parameters(), None)
    if weight is None or not devices.is_off_host(weight) or not TRITON:
        return None
    dtype = torch.float16 if weight.dtype == torch.float16 else torch.bfloat16
    return reason_wrong_on_device(*devices.type_and_index(weight), dtype, *head_sizes)


def _notes_of_slow_functions(module, replaced, others) -> list[str]:
    """Return notes on which linear attention runs as PyTorch's operations, and what to install.

    On a GPU these take several times as long."""
    name = type(module).__name__
    notes = []
    without_kernels = _reason_without_kernels()
    if DELTA_RULE in replaced and without_kernels is not None:
        operator = KERNELS[DELTA_RULE]
        notes.append(f"{name}: {operator} runs as PyTorch's operations: {without_kernels}")
    slow = []
    for function in others:
        family = read_function(type(module).forward, function)
        if family.looked_for == FLA and family.package is None and "recurrent" not in function:
            slow.append(function)
    if slow:
        notes.append(
            f"{name}: {', '.join(slow)} runs as PyTorch's operations, slow on a GPU; pip install "
            "flash-linear-attention"
        )
    return notes


def _reason_without_kernels() -> str | None:
    """Return why no operator has its kernels on this machine."""
    if not TRITON:
        return "Triton is missing; pip install triton"
    if not devices.INTERPRETED and not (torch.cuda.is_available() or torch.xpu.is_available()):
        return "this machine has no GPU"
    return None
