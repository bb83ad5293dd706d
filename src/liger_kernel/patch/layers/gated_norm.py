"""Gated RMSNorm of rows or of groups of columns, by `liger_gated_rms_norm`.

Recognised are modules whose forward takes two tensors x and gate, with a ``weight`` and nothing
else, that compute

    RMSNorm(x)·act(gate)     Qwen3-Next      (``norm_before_gate``)
    RMSNorm(x·act(gate))     Mamba-2

where RMSNorm is that of the file norm, over a row or over groups of its columns. An int attribute
of any name may hold the size of a group or the number of groups.

A module is left alone if it holds more than a weight, computes another formula, or rounds in 16
bits elsewhere than "llama" or "gemma". A patched module runs the family's forward for inputs that
the kernel does not take (`_can_run`), where its rows do not divide into groups, and where the
activation was exchanged in transformers' table."""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass, field, replace

import torch

from liger_kernel.ops import functional
from liger_kernel.ops.norm.gated_rms_norm import ACTIVATIONS, gated_rms_norm_reference
from liger_kernel.patch.layers.activations import ActivationTable
from liger_kernel.patch.layers.dtypes import KERNEL_DTYPES, rows_within_float16
from liger_kernel.patch.layers.norm import COMMON_EPSILONS
from liger_kernel.patch.proof.conditions import are_plain_tensors
from liger_kernel.patch.proof.parts import ReadRecorder
from liger_kernel.patch.proof.probe import (
    call_forward,
    compare_outputs,
    equal,
    error_summary,
    isolated,
    noise,
    present_names,
    probe_copy,
    same_gradients,
    same_in_both_modes,
    scaled_rows,
)
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

TRIED_WIDTH = 48  # of the rows
OTHER_WIDTH = 72  # a constant of the code may be TRIED_WIDTH
TRIED_EPS_AND_GROUP_SIZES = (1e-3, 24), (0.5, 12)


@dataclass(frozen=True)
class GatedRMSNorm(Replacement):
    """A gated RMSNorm by `liger_gated_rms_norm`.

    Attributes:
        argument_names: what forward calls x and gate.
        eps: the name of the attribute with eps, or its value.
        groups: the name of the attribute with the size of a group, or with the number of groups.
            None: a row is one group.
        groups_are_counted: True if that attribute is the number of groups.
        activation, norm_before_gate, casting: options of `liger_gated_rms_norm`.
        table: where forward looks its activation up.
    """

    argument_names: tuple[str, str]
    eps: str | float
    groups: str | None
    groups_are_counted: bool
    activation: str
    norm_before_gate: bool
    casting: str = "gemma"
    table: ActivationTable = field(default=ActivationTable({}, {}), compare=False)
    flag = "rms_norm"
    column = "norms"
    takes_one_argument = False
    fusible = True

    @property
    def kernel(self):
        order = f"norm, {self.activation}" if self.norm_before_gate else f"{self.activation}, norm"
        groups = " of groups" if self.groups else ""
        return f"liger_gated_rms_norm ({order}{groups}, {self.casting})"

    def attributes(self, eps, group_size, width) -> dict:
        """Return the attributes of a module with this eps and groups of this size."""
        attributes = {}
        if isinstance(self.eps, str):
            attributes[self.eps] = eps
        if self.groups:
            attributes[self.groups] = width // group_size if self.groups_are_counted else group_size
        return attributes

    def group_size(self, module, width) -> int | None:
        """Return the size of a group, None if a row is one group, or 0 if rows of this width do
        not divide into the module's groups."""
        number = getattr(module, self.groups) if self.groups else 1
        if type(number) is not int or number < 1 or width % number:
            return 0
        size = width // number if self.groups_are_counted or not self.groups else number
        return None if size == width else size

    def norm(self, function, x, gate, weight, eps, group_size):
        """Call the operator or its reference.

        If the normalised row is rounded to x's dtype before the product, a weight of another dtype
        is multiplied last and promotes.
        """
        weight_is_last = (
            weight.dtype != x.dtype and self.casting == "llama" and not self.norm_before_gate
        )
        kernel_weight = None if weight_is_last else weight
        options = eps, self.casting, self.norm_before_gate, group_size, self.activation
        y = function(x, gate, kernel_weight, *options)
        return y * weight if weight_is_last else y

    def class_members(self, cls):
        replacement = self

        def forward(self, *args, **kwargs):
            arguments = dict(zip(replacement.argument_names, args, strict=False), **kwargs)
            x, gate = (arguments.get(name) for name in replacement.argument_names)
            takes_both = len(args) + len(kwargs) == 2 and _can_run(x, gate, self.weight)
            if takes_both and replacement.table.is_unchanged():
                eps = replacement.eps
                if isinstance(eps, str):
                    eps = getattr(self, eps)
                group_size = replacement.group_size(self, x.shape[-1])
                if group_size != 0 and isinstance(eps, (int, float)) and eps >= 0:
                    operator = functional.liger_gated_rms_norm
                    return replacement.norm(operator, x, gate, self.weight, eps, group_size)
            return cls.forward(self, *args, **kwargs)

        return {"forward": forward}


def _can_run(x, gate, weight) -> bool:
    """Return True if the kernel computes what the family's norm does with these."""
    for t in (x, gate, weight):
        if not are_plain_tensors(t) or t is None or t.dtype not in KERNEL_DTYPES:
            return False
    return x.dim() in (2, 3) and x.shape == gate.shape and weight.shape == x.shape[-1:]


@isolated()
def prove(module: torch.nn.Module, reads: ReadRecorder | None = None) -> GatedRMSNorm | str:
    """Return the gated norm that the module computes, or the reason why it is left alone."""
    if (
        present_names(module._modules)
        or present_names(module._buffers)
        or present_names(module._parameters) != {"weight"}
    ):
        return "it holds more than a weight"
    reads = reads or ReadRecorder()
    trial = _Trial(module)
    in_fp32 = None  # the candidate that computes the same in fp32
    error = None
    for candidate in _candidates(module):
        try:
            if trial.agrees(candidate, same_gradients, [trial.inputs, trial.other_width_inputs]):
                in_fp32 = candidate
                break
        except Exception as e:  # such as groups that the rows do not divide into
            error = e
    if in_fp32 is None:
        if error:
            return f"it could not be tried: {error_summary(error)}"
        return "it does not compute a gated RMSNorm"
    for casting in ("llama", "gemma"):
        candidate = replace(in_fp32, casting=casting)
        low_precision = [trial.bfloat16_inputs, *trial.mixed_dtype_inputs]
        if trial.agrees(candidate, compare_outputs(equal), low_precision):
            attributes = candidate.attributes(*TRIED_EPS_AND_GROUP_SIZES[0], TRIED_WIDTH)
            try:
                reads.record(
                    functools.partial(trial.run, *trial.inputs, **attributes),
                    functools.partial(trial.run, *trial.bfloat16_inputs, **attributes),
                )
            except Exception as e:
                return f"it could not be tried: {error_summary(e)}"
            names = [value for value in vars(module).values() if type(value) is str]
            return replace(candidate, table=ActivationTable.of(type(module).forward, names))
    return "it rounds elsewhere than the gated RMSNorms that are known"


class GatedNorms(Rewrite):
    """Modules with a weight alone whose forward takes two arguments."""

    flags = ("rms_norm",)
    prove = staticmethod(prove)

    def could_apply(self, module):
        return (
            present_names(module._parameters) == {"weight"}
            and not module._modules
            and len(_argument_names(module)) == 2
        )

    def leave_alone(self, walk, module, reason):
        if "norm" in type(module).__name__.lower():
            super().leave_alone(walk, module, reason)


def _argument_names(module) -> tuple[str, ...]:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return tuple(
        p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD or p.default is p.empty
    )


# ---- the trial ----


def _candidates(module):
    """Yield the gated norms that the module may be, all with casting "gemma"."""
    argument_names = _argument_names(module)
    float_attributes = [k for k, value in vars(module).items() if type(value) is float]
    int_attributes = [k for k, value in vars(module).items() if type(value) is int]
    groups = [(name, counted) for name in int_attributes for counted in (False, True)]
    groups.append((None, False))  # last: with groups, a row may happen to be one
    epsilons = *float_attributes, *COMMON_EPSILONS
    for (name, counted), eps in itertools.product(groups, epsilons):
        for activation, norm_before_gate in itertools.product(ACTIVATIONS, (True, False)):
            yield GatedRMSNorm(argument_names, eps, name, counted, activation, norm_before_gate)


class _Trial:
    """A gated norm's forward with a random weight, and the inputs (x, gate, weight) for it."""

    def __init__(self, module):
        self.module = module
        x = scaled_rows(4, 32, TRIED_WIDTH)
        weight = noise(TRIED_WIDTH, seed=1)
        gate_sizes = torch.tensor((1.0, 10.0, 0.1, 300.0))[:, None, None]
        gate = noise(4, 32, TRIED_WIDTH, seed=2) * gate_sizes
        self.inputs = x, gate, weight
        # a matrix: code may mean a dimension by its number
        self.other_width_inputs = (
            noise(32, OTHER_WIDTH, seed=3),
            noise(32, OTHER_WIDTH, seed=4),
            noise(OTHER_WIDTH, seed=5),
        )
        self.bfloat16_inputs = [t.bfloat16() for t in self.inputs]
        rows = rows_within_float16(x)
        float16_inputs = x[rows], gate[rows], weight
        self.mixed_dtype_inputs = []
        for dtypes in itertools.product(KERNEL_DTYPES, repeat=3):
            pairs = zip(float16_inputs, dtypes, strict=True)
            self.mixed_dtype_inputs.append([t.to(dtype) for t, dtype in pairs])

    def run(self, x, gate, weight, make=probe_copy, **attributes):
        def in_mode(**mode):
            copy = make(self.module, {"weight": weight}, **attributes, **mode)
            return call_forward(copy, x, gate)

        return same_in_both_modes(in_mode)

    def agrees(self, candidate: GatedRMSNorm, same, inputs) -> bool:
        """Return True if the module computes what the candidate does, by the test ``same``."""
        for eps, group_size in TRIED_EPS_AND_GROUP_SIZES:
            expected = functools.partial(
                candidate.norm,
                gated_rms_norm_reference,
                eps=eps if isinstance(candidate.eps, str) else candidate.eps,
                group_size=group_size if candidate.groups else None,
            )
            for tensors in inputs:
                attributes = candidate.attributes(eps, group_size, tensors[0].shape[-1])
                run = functools.partial(self.run, **attributes)
                if not same(run, expected, tensors):
                    return False
        return True
