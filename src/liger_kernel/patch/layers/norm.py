"""RMSNorm and LayerNorm of the last dimension, by `liger_rms_norm` and `liger_layer_norm`.

Recognised are modules with at most a ``weight`` and a ``bias`` that compute

    RMSNorm      y = x / sqrt(mean(x²) + eps)·(offset + weight),   offset 0 (Llama) or 1 (Gemma)
    LayerNorm    y = (x - mean(x)) / sqrt(var(x) + eps)·weight + bias

``eps`` is a float attribute of any name, or one of `COMMON_EPSILONS` in the module's code. An
RMSNorm's ``casting`` says where it rounds in 16 bits: "llama" rounds x / rms before it is
multiplied by the weight, "gemma" rounds the product.

A norm is left alone if it holds anything else, takes more than one tensor, normalises several
dimensions, computes another formula, or rounds elsewhere. A patched norm runs the family's forward
for inputs that the kernels do not take (`_can_run`)."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from liger_kernel.core import devices
from liger_kernel.core.parallel import apply_by_rows
from liger_kernel.core.recompute import mark_recomputable
from liger_kernel.ops import functional
from liger_kernel.ops.norm.layer_norm import layer_norm_reference
from liger_kernel.ops.norm.rms_norm import rms_norm_reference
from liger_kernel.patch.layers.dtypes import (
    KERNEL_DTYPES,
    LOW_PRECISION_DTYPES,
    rows_within_float16,
)
from liger_kernel.patch.proof.conditions import are_plain_tensors
from liger_kernel.patch.proof.functions import uses_name
from liger_kernel.patch.proof.parts import ReadRecorder, freeze
from liger_kernel.patch.proof.probe import (
    HIDDEN_SIZE,
    call_forward,
    close_by_row,
    compare_outputs,
    equal,
    error_summary,
    isolated,
    nearly_equal,
    noise,
    present_names,
    probe_copy,
    same_gradients,
    same_in_both_modes,
    scaled_rows,
    takes_one_tensor,
)
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

PARAMETER_NAMES = "weight", "bias"
# of norms whose eps is a number in their code
COMMON_EPSILONS = 1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps
TRIED_EPSILONS = 1e-3, 0.5  # values of an attribute that may be the eps
OTHER_WIDTH = 24  # a constant of the code may be 1 / HIDDEN_SIZE


@dataclass(frozen=True)
class RMSNorm(Replacement):
    """RMSNorm by `liger_rms_norm`.

    Attributes:
        offset: added to the weight.
        casting: where it rounds, "llama" or "gemma".
        eps: the name of the attribute with eps, or its value.
        has_weight: False for a norm without a weight.
        mixed_dtypes: True if it was also proved for a weight of another dtype than x. With
            "llama", that weight is multiplied last and promotes.
    """

    offset: float
    casting: str
    eps: str | float
    has_weight: bool
    mixed_dtypes: bool = True
    flag = "rms_norm"
    column = "norms"
    fusible = True

    @property
    def kernel(self):
        no_weight = "" if self.has_weight else ", no weight"
        return f"liger_rms_norm ({self.casting}, offset {self.offset:g}{no_weight})"

    def class_members(self, cls):
        norm = self

        def rms_norm(x, eps, weight=None):
            return functional.liger_rms_norm(x, weight, eps, norm.offset, norm.casting)

        def forward(self, hidden_states):
            eps = _eps_of(self, norm)
            weight = self.weight if norm.has_weight else None
            parameters = [weight] if norm.has_weight else []
            fits = norm.has_weight or _has_width_of(self, hidden_states)
            if not fits or not _can_run(hidden_states, eps, parameters, norm.mixed_dtypes):
                y = _apply_to_dtensor(rms_norm, hidden_states, eps, parameters)
                return cls.forward(self, hidden_states) if y is None else y
            # x / rms is rounded to x's dtype before the product, which then has the promoted dtype
            weight_is_last = (
                weight is not None
                and weight.dtype != hidden_states.dtype
                and norm.casting == "llama"
            )
            kernel_weight = None if weight_is_last else weight
            options = eps, norm.offset, norm.casting
            y = functional.liger_rms_norm(hidden_states, kernel_weight, *options)
            y = mark_recomputable(
                y, functional.liger_rms_norm, hidden_states, kernel_weight, options=options
            )
            if not weight_is_last:
                return y
            return (weight + norm.offset if norm.offset else weight) * y

        return {"forward": forward}


@dataclass(frozen=True)
class LayerNorm(Replacement):
    """LayerNorm by `liger_layer_norm`. ``eps``: the name of the attribute with eps, or its
    value."""

    eps: str | float
    has_weight: bool
    has_bias: bool
    flag = "layer_norm"
    column = "norms"
    kernel = "liger_layer_norm"
    fusible = True

    def class_members(self, cls):
        norm = self
        names = ["weight"] * norm.has_weight + ["bias"] * norm.has_bias

        def layer_norm(x, eps, *parameters):
            by_name = dict(zip(names, parameters, strict=True))
            return functional.liger_layer_norm(x, by_name.get("weight"), by_name.get("bias"), eps)

        def forward(self, hidden_states):
            weight = self.weight if norm.has_weight else None
            bias = self.bias if norm.has_bias else None
            eps = _eps_of(self, norm)
            parameters = []
            if norm.has_weight:
                parameters.append(weight)
            if norm.has_bias:
                parameters.append(bias)
            fits = norm.has_weight or _has_width_of(self, hidden_states)
            if not fits or not _can_run(hidden_states, eps, parameters):
                y = _apply_to_dtensor(layer_norm, hidden_states, eps, parameters)
                return cls.forward(self, hidden_states) if y is None else y
            y = functional.liger_layer_norm(hidden_states, weight, bias, eps)
            return mark_recomputable(
                y, functional.liger_layer_norm, hidden_states, weight, bias, options=(eps,)
            )

        return {"forward": forward}


def _eps_of(module, norm: RMSNorm | LayerNorm):
    return getattr(module, norm.eps) if isinstance(norm.eps, str) else norm.eps


def _has_width_of(module, x) -> bool:
    """Return True if x has the width that a norm without a weight says that it has, if it does.

    PyTorch's raises for another."""
    shape = module.__dict__.get("normalized_shape")
    return shape is None or x.shape[-1:] == ((shape,) if isinstance(shape, int) else tuple(shape))


def _can_run(x, eps, parameters, mixed_dtypes=False) -> bool:
    """Return True if the kernel computes what the family's norm does with these.

    With ``mixed_dtypes``, x and the parameters may differ in dtype, and autocast may be on.
    """
    if (
        not are_plain_tensors(x)
        or x.dtype not in KERNEL_DTYPES
        or x.dim() == 0
        or (not mixed_dtypes and devices.in_autocast(x))
    ):
        return False
    for p in parameters:
        if (
            p is None
            or not are_plain_tensors(p)
            or p.shape != x.shape[-1:]
            or p.dtype not in (KERNEL_DTYPES if mixed_dtypes else (x.dtype,))
        ):
            return False
    return isinstance(eps, (int, float)) and eps >= 0


def _apply_to_dtensor(norm, x, eps, parameters):
    """Return ``norm(x, eps, *parameters)`` for DTensors whose rows are whole, as in sequence
    parallelism, or None for anything else."""
    if (
        torch.compiler.is_compiling()
        or not isinstance(x, torch.Tensor)
        or not hasattr(x, "device_mesh")
    ):
        return None

    def on_local_rows(x, *parameters):
        return norm(x, eps, *parameters) if _can_run(x, eps, parameters) else None

    return apply_by_rows(on_local_rows, x, *parameters)


@isolated()
def prove(module: torch.nn.Module, reads: ReadRecorder | None = None) -> RMSNorm | LayerNorm | str:
    """Return the norm that the module computes, or the reason why it is left alone."""
    is_torch_norm = isinstance(module, (torch.nn.RMSNorm, torch.nn.LayerNorm))
    if type(module).__module__.startswith("torch.nn.") and not is_torch_norm:
        return f"it is PyTorch's {type(module).__name__}"
    if not takes_one_tensor(type(module).forward):
        return "its forward takes more than one tensor"
    parameter_names = present_names(module._parameters)
    if (
        present_names(module._modules)
        or present_names(module._buffers)
        or parameter_names - {*PARAMETER_NAMES}
    ):
        return "it holds more than a weight and a bias"
    reads = reads or ReadRecorder()
    shape = module.__dict__.get("normalized_shape", (HIDDEN_SIZE,))
    if "normalized_shape" in module.__dict__:
        reads.parts_read[(), "normalized_shape"] = type(shape), freeze(shape)
    if not isinstance(shape, int) and len(shape) != 1:
        return "it normalises more than one dimension"
    trial = _Trial(module, parameter_names)
    eps_attributes = [k for k, value in module.__dict__.items() if isinstance(value, float)]
    try:
        reads.record(
            functools.partial(trial.run, *trial.inputs),
            functools.partial(trial.run, *trial.low_precision_inputs[0]),
        )
        results = [trial.recognise(name, TRIED_EPSILONS) for name in eps_attributes]
        if not any(results):
            results += [trial.recognise(eps, (eps,)) for eps in COMMON_EPSILONS]
    except Exception as error:
        return f"it could not be tried: {error_summary(error)}"
    result = next(filter(None, results), "it does not compute an RMSNorm or a LayerNorm")
    if not isinstance(result, str):
        reads.parts_read.pop(((), result.eps), None)  # the patched forward reads it at each call
    return result


class Norms(Rewrite):
    """Modules without children: those with "norm" in their name, and those with a float among
    their attributes and no parameters but weight and bias."""

    flags = "rms_norm", "layer_norm"
    prove = staticmethod(prove)

    def could_apply(self, module):
        if module._modules:
            return False
        if "norm" in type(module).__name__.lower():
            return True
        has_float = any(isinstance(value, float) for value in module.__dict__.values())
        return has_float and set(module._parameters) <= {*PARAMETER_NAMES}

    def leave_alone(self, walk, module, reason):
        if "norm" in type(module).__name__.lower():
            super().leave_alone(walk, module, reason)


# ---- the trial ----


class _Trial:
    """A norm's forward with random parameters, and the inputs (x, weight, bias) for it."""

    def __init__(self, module, parameter_names: set[str]):
        self.module = module
        self.parameter_names = parameter_names

        x = scaled_rows(4, 32, HIDDEN_SIZE)
        parameters = noise(HIDDEN_SIZE, seed=1), noise(HIDDEN_SIZE, seed=2)
        float16_rows = x[rows_within_float16(x)]
        self.inputs = x, *parameters
        self.large_parameter_inputs = x, *(1e6 * p for p in parameters)
        self.other_width_inputs = (
            scaled_rows(3, 32, OTHER_WIDTH),
            noise(OTHER_WIDTH, seed=3),
            noise(OTHER_WIDTH, seed=4),
        )
        self.low_precision_inputs = [
            [t.to(dtype) for t in (rows, *parameters)]
            for rows, dtype in zip((x, float16_rows), LOW_PRECISION_DTYPES, strict=True)
        ]
        self.mixed_dtype_inputs = [
            [float16_rows.to(x_dtype), *(p.to(parameter_dtype) for p in parameters)]
            for x_dtype, parameter_dtype in itertools.permutations(KERNEL_DTYPES, 2)
        ]

    def run(self, x, weight, bias, make=probe_copy, **attributes):
        """Call the module's forward with these parameters, as far as it has them."""
        values = {"weight": weight, "bias": bias}
        parameters = dict.fromkeys(self.module._parameters)
        parameters.update({name: values[name] for name in self.parameter_names})
        if "normalized_shape" in self.module.__dict__:
            attributes["normalized_shape"] = (x.shape[-1],)

        def in_mode(**mode):
            copy = make(self.module, parameters, **attributes, **mode)
            return call_forward(copy, x)

        return same_in_both_modes(in_mode)

    def recognise(
        self, eps: str | float, values: tuple[float, ...]
    ) -> RMSNorm | LayerNorm | str | None:
        """Return the norm that the module computes with this eps.

        Args:
            eps: the name of the attribute that is taken for eps, or a number.
            values: the numbers that are tried for that attribute, or the number alone.

        Returns:
            The norm, the reason why it is left alone if it only rounds elsewhere, or None if it
            computes another formula.
        """

        def agrees(formula, same, inputs):
            """Return True if the module computes ``formula(eps, x, weight, bias)``."""
            for value in values:
                attributes = {eps: value} if isinstance(eps, str) else {}
                run = functools.partial(self.run, **attributes)
                expected = functools.partial(formula, value)
                if not all(same(run, expected, tensors) for tensors in inputs):
                    return False
            return True

        def agrees_in_fp32(formula):
            return agrees(formula, same_gradients, [self.inputs]) and agrees(
                formula,
                compare_outputs(close_by_row),
                [self.large_parameter_inputs, self.other_width_inputs],
            )

        has_weight, has_bias = (name in self.parameter_names for name in PARAMETER_NAMES)
        if agrees_in_fp32(self.layer_norm):
            if agrees(self.layer_norm, compare_outputs(nearly_equal), self.low_precision_inputs):
                return LayerNorm(eps, has_weight, has_bias)
            return "it rounds elsewhere than PyTorch's LayerNorm"
        if has_bias:
            return None
        for offset in (0.0, 1.0) if has_weight else (0.0,):
            if not agrees_in_fp32(functools.partial(self.rms_norm, offset, "gemma")):
                continue
            for casting in ("llama", "gemma"):
                formula = functools.partial(self.rms_norm, offset, casting)
                if agrees(formula, compare_outputs(equal), self.low_precision_inputs):
                    if casting == "llama" and has_weight:
                        formula = functools.partial(self.rms_norm_weight_last, offset)
                    # torch.nn.functional.rms_norm has a rule of its own in autocast
                    calls_torch = uses_name(type(self.module).forward, "rms_norm")
                    mixed_dtypes = not calls_torch and agrees(
                        formula, compare_outputs(equal), self.mixed_dtype_inputs
                    )
                    return RMSNorm(offset, casting, eps, has_weight, mixed_dtypes)
            return "it rounds elsewhere than the RMSNorms that are known"
        return None

    # The formulas, whose eps comes before the inputs.

    def rms_norm(self, offset, casting, eps, x, weight, bias):
        return rms_norm_reference(x, self._if_present("weight", weight), eps, offset, casting)

    def rms_norm_weight_last(self, offset, eps, x, weight, bias):
        """RMSNorm "llama" with a weight of another dtype than x."""
        return (weight + offset if offset else weight) * rms_norm_reference(x, None, eps)

    def layer_norm(self, eps, x, weight, bias):
        weight = self._if_present("weight", weight)
        bias = self._if_present("bias", bias)
        return layer_norm_reference(x, weight, bias, eps)

    def _if_present(self, name, parameter):
        return parameter if name in self.parameter_names else None
