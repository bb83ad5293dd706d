"""The divergence of TRL's `DistillationTrainer`, computed by ours: TRL 1.15 and 1.16.

The trainer's loss reads the global ``ChunkedDivergenceFunction`` of its module at each call: an
autograd Function from the hidden states and the heads of student and teacher to each token's
divergence, which it sums, and the student's entropy. `trl_head.install` puts a `TRLDivergence`
there and into the module that the trainer's module imports it from, which may come later.

`TRLDivergence.apply` computes a call by `LinearTokenDivergenceFunction`, with four products where
TRL has six or, of a JSD, eight. It hands a call to TRL's own Function where `can_compute` says no.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from liger_kernel.core import devices
from liger_kernel.ops.head.token_divergence import DivergenceOptions, LinearTokenDivergenceFunction
from liger_kernel.ops.head.unit_gradients import history_of
from liger_kernel.patch.loss.trl_functions import (
    TRIED_SIZES,
    Seam,
    StandIn,
    are_plain,
    as_leaf,
    differences,
    exact_inputs,
)

FUNCTION = "ChunkedDivergenceFunction"
PLACES = "trl.kernels.chunked_divergence", "trl.trainer.distillation_trainer"
OUTPUTS = "divergence", "entropy"
TILE_TOKENS, TILE_CLASSES = 4096, 32768  # of TRL's logits


class DivergenceCall(NamedTuple):
    """The arguments of TRL's Function, by its own names."""

    student_hidden: torch.Tensor  # (N, H)
    student_weight: torch.Tensor  # (V, H)
    student_bias: torch.Tensor | None  # (V,)
    teacher_hidden: torch.Tensor  # (N, H_t)
    teacher_weight: torch.Tensor  # (V, H_t)
    teacher_bias: torch.Tensor | None  # (V,)
    beta: float
    temperature: float = 1.0
    student_logit_scale: float = 1.0
    student_final_logit_softcapping: float | None = None
    teacher_logit_scale: float = 1.0
    teacher_final_logit_softcapping: float | None = None

    @property
    def tensors(self):
        return self[:6]

    @property
    def dtypes(self):
        """The dtypes of the products: autocast's where it is on, otherwise those of the hidden
        states."""
        hidden = self.student_hidden, self.teacher_hidden
        return tuple(devices.autocast_dtype(h) or h.dtype for h in hidden)


def can_compute(call: DivergenceCall) -> bool:
    """Return True if our function gives what TRL's gives for this call.

    No, among others, for logits with a softcap, for scales that differ, and for weights that ZeRO-3
    has sharded, which TRL's Function gathers by itself.
    """
    student_hidden, student_weight, student_bias, *teacher = call.tensors
    teacher_hidden, teacher_weight, teacher_bias = teacher
    scale = call.student_logit_scale
    N = student_hidden.shape[0]
    V = student_weight.shape[0]
    return (
        not torch.compiler.is_compiling()
        and are_plain(*call.tensors)
        and not any(hasattr(x, "ds_status") for x in call.tensors)
        and N > 0
        and student_weight.dim() == teacher_weight.dim() == 2
        and student_hidden.shape == (N, student_weight.shape[1])
        and teacher_hidden.shape == (N, teacher_weight.shape[1])
        and teacher_weight.shape[0] == V > 0
        and min(student_weight.shape[1], teacher_weight.shape[1]) > 0
        and all(b is None or b.shape == (V,) for b in (student_bias, teacher_bias))
        and all(t in (torch.float32, torch.bfloat16, torch.float16) for t in call.dtypes)
        and call.student_final_logit_softcapping is None
        and call.teacher_final_logit_softcapping is None
        and scale == call.teacher_logit_scale
        and math.isfinite(scale)
        and scale > 0
        and call.temperature > 0
        and 0.0 <= call.beta <= 1.0
    )


def memory_for(call: DivergenceCall) -> int:
    """Return the bytes that logits may take: what TRL's tiles take.

    Those are two in fp32, in training the gradient of one of them, and a copy of a tile's classes
    of one of the weights where they have another dtype.
    """
    N = call.student_hidden.shape[0]
    V = call.student_weight.shape[0]
    student_dtype, _ = call.dtypes
    trains = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in call.tensors[:3]
    )
    itemsize = 8 + (student_dtype.itemsize if trains else 0)
    memory = min(N, TILE_TOKENS) * TILE_CLASSES * itemsize
    weights = call.student_weight, call.teacher_weight
    copies = [
        min(V, TILE_CLASSES) * weight.shape[1] * dtype.itemsize
        for weight, dtype in zip(weights, call.dtypes, strict=True)
        if weight.dtype != dtype
    ]
    return memory + max(copies, default=0)


def compute(call: DivergenceCall, history=None) -> tuple:
    """Return divergence and entropy, (N,) each. ``history``: a `GradientHistory`."""
    options = DivergenceOptions(
        float(call.beta),
        call.temperature / call.student_logit_scale,
        call.dtypes,
        memory_for(call),
    )
    return LinearTokenDivergenceFunction.call(*call.tensors, options, history)


class TRLDivergence(StandIn):
    """Stands for the Function of TRL's distillation."""

    def run(self, arguments):
        call = DivergenceCall(*arguments)
        if not can_compute(call):
            return None
        key = FUNCTION, tuple(call.student_weight.shape), tuple(call.teacher_weight.shape)
        return compute(call, history_of(*key, of_sums=True))


# ---- the proof ----

# beta, temperature, scale, with biases
TRIED_OPTIONS = (0.0, 1.0, 1.0, False), (1.0, 0.7, 0.5, True), (0.3, 2.0, 1.0, True)


def _try(function, device) -> str | None:
    N, H, V = TRIED_SIZES
    teacher_channels = H + 4
    *tensors, grad = exact_inputs(
        (N, H), (V, H), (V,), (N, teacher_channels), (V, teacher_channels), (V,), (N,)
    )
    for beta, temperature, scale, with_bias in TRIED_OPTIONS:
        heads = [None if x.dim() == 1 and not with_bias else x for x in tensors]
        teacher = [x if x is None else as_leaf(x, device).requires_grad_(False) for x in heads[3:]]
        reason = differences(
            function,
            lambda *args: compute(DivergenceCall(*args)),
            dict(zip(DivergenceCall._fields[:3], heads[:3], strict=True)),
            (*teacher, beta, temperature, scale, None, scale, None),
            OUTPUTS,
            [grad.to(device)],
        )
        if reason is not None:
            return reason
    return None


DIVERGENCE = Seam(
    "TRL's ChunkedDivergenceFunction",
    "LinearTokenDivergenceFunction",
    TRLDivergence,
    tuple((module, FUNCTION) for module in PLACES),
    DivergenceCall._fields,
    _try,
)
