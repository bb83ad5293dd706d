"""The causal convolution and the gated delta rule of hybrid models: functions of which `kernels`
makes modules.

They are tried, and their calls are computed, as in a patched model
(`patch.layers.linear_attention`). Only for packed sequences the function itself runs, which newer
versions of transformers refuse where no package computes it: a layer sees one of a mixer's two
functions, and not whether the other keeps the sequences apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from liger_kernel.patch.layers.linear_attention import (
    CONVOLUTION,
    DELTA_RULE,
    FLAG,
    KERNELS,
    PACKING,
    FamilyFunction,
    apply_delta_rule,
    convolve,
    read_family,
)
from liger_kernel.patch.layers.linear_attention_trial import (
    takes_grouped_heads,
    try_convolution,
    try_delta_rule,
)
from liger_kernel.patch.proof import purity
from liger_kernel.patch.proof.parts import ReadRecorder
from liger_kernel.patch.proof.rewrite import Replacement

PACKED = (*PACKING, "cu_seqlens")


@dataclass(frozen=True)
class LinearAttentionFunction(Replacement):
    """A module that `kernels` made of one of a family's functions, and the function."""

    family: FamilyFunction
    flag = FLAG
    column = "linear attention"
    takes_one_argument = False

    def compute(self, *args, **kwargs):
        """Return what the function does, or None where it must run itself."""
        raise NotImplementedError

    def class_members(self, cls):
        class_forward = cls.forward
        compute = self.compute

        def forward(self, *args, **kwargs):
            output = None
            if all(kwargs.get(name) is None for name in PACKED):
                output = compute(*args, **kwargs)
            return class_forward(self, *args, **kwargs) if output is None else output

        return {"forward": forward}


class Convolution(LinearAttentionFunction):
    kernel = KERNELS[CONVOLUTION]

    def compute(self, *args, **kwargs):
        return convolve(self.family, *args, **kwargs)


class DeltaRule(LinearAttentionFunction):
    kernel = KERNELS[DELTA_RULE]

    def compute(self, *args, **kwargs):
        return apply_delta_rule(self.family, *args, **kwargs)


def prove_convolution(module: torch.nn.Module, reads: ReadRecorder) -> Convolution | str:
    """Return a `Convolution`, or the reason why the function is left alone."""
    family = read_family(module)
    return _reason_left_alone(family, try_convolution) or Convolution(family)


def prove_delta_rule(module: torch.nn.Module, reads: ReadRecorder) -> DeltaRule | str:
    """Return a `DeltaRule`, or the reason why the function is left alone."""
    family = read_family(module)
    reason = _reason_left_alone(family, try_delta_rule)
    if reason is not None:
        return reason
    takes_groups = takes_grouped_heads(family.torch_function)
    return DeltaRule(family._replace(takes_groups=takes_groups))


def _reason_left_alone(family, try_function) -> str | None:
    reason = purity.reason_function_unprovable(family.torch_function)
    return reason or try_function(family.torch_function)
