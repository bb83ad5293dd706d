"""MLPs without a gate, by `liger_activation_linear`, and with xIELU by `liger_xielu_linear`.

Recognised are modules with two projections by the names in `PROJECTIONS` that compute

    down(act(up(x)))        act: SiLU, ReLU², or GELU: exact, by tanh, or x·sigmoid(1.702·x)
    down(xIELU(up(x)))      Apertus: xIELU is a child with two learned numbers and two constants

The projections themselves are called, as those of a gated MLP. In a graph of torch.compile, small
inputs are left to the compiler.

An MLP is left alone if it holds other weights, does something else in training than in evaluation
(dropout), or has another formula, gradient or rounding; xIELU also if it is a CUDA kernel of its
own. Hooks on its activation bring the family's forward back."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from liger_kernel.core import devices
from liger_kernel.ops.mlp import activation_linear, xielu_linear
from liger_kernel.patch.layers import mlp
from liger_kernel.patch.layers.activations import ACTIVATION_LABELS, UNGATED_ACTIVATIONS
from liger_kernel.patch.layers.adapters import adopt
from liger_kernel.patch.layers.dtypes import KERNEL_DTYPES
from liger_kernel.patch.layers.mlp_trial import (
    find_matching_formula,
    find_projections,
    probe_with_projections,
    reason_has_more,
)
from liger_kernel.patch.proof.conditions import left_to_compiler
from liger_kernel.patch.proof.hooks import HOOK_ATTRIBUTES, has_hooks_within
from liger_kernel.patch.proof.parts import ReadRecorder
from liger_kernel.patch.proof.probe import (
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    Stub,
    call_forward,
    children_in_mode,
    equal,
    error_summary,
    isolated,
    noise,
    present_names,
    probe_copy,
    same_gradients,
    same_in_both_modes,
    takes_one_tensor,
)
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

PROJECTIONS = (  # what families call (up, down)
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("fc_in", "fc_out"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("linear_fc1", "linear_fc2"),
    ("linear1", "linear2"),
    ("linear_1", "linear_2"),
    ("lin1", "lin2"),
    ("in_proj", "out_proj"),
    ("intermediate_dense", "output_dense"),
)
FLAGS = {"silu": "swiglu", "relu_squared": "relu_squared"}  # of the others: geglu
XIELU_PARAMETERS = "alpha_p", "alpha_n"
XIELU_BUFFERS = "beta", "eps"
XIELU_TRIED_VALUES = (0.3, -1.0, 0.5, -1e-6), (-2.0, 1.5, 0.25, -0.125)  # of these four
# torch.nn.Buffer is what the type of a buffer is to Dynamo
XIELU_TENSOR_TYPES = activation_linear.PLAIN_TENSORS | {torch.nn.Buffer}


@dataclass(frozen=True)
class PlainMLP(Replacement):
    """``down(act(up))``, with the names of the projections."""

    act: str
    up: str
    down: str
    column = "MLPs"
    fusible = True
    adopts_adapters = True

    @property
    def flag(self):
        return FLAGS.get(self.act, "geglu")

    @property
    def kernel(self):
        return f"liger_activation_linear ({ACTIVATION_LABELS[self.act]})"

    def class_members(self, cls):
        replacement = self

        def forward(self, x):
            projections = replacement.up, replacement.down
            if left_to_compiler(x):
                return cls.forward(self, x)
            for name, child in self._modules.items():
                is_activation = name not in projections and child is not None
                if is_activation and has_hooks_within(child):
                    return cls.forward(self, x)
            adopt(self)
            return replacement.activation_and_down(self, getattr(self, replacement.up)(x))

        return {"forward": forward}

    def activation_and_down(self, module, x):
        """Compute what the module does with the output x of its first projection."""
        return activation_linear.gated_linear(x, None, self.act, getattr(module, self.down))


@dataclass(frozen=True)
class XIELUMLP(PlainMLP):
    """``down(xIELU(up))``. The child ``activation`` holds xIELU's numbers, which are read at each
    call."""

    activation: str
    kernel = "liger_xielu"

    def activation_and_down(self, module, x):
        activation = getattr(module, self.activation)
        down = getattr(module, self.down)
        learned = [getattr(activation, name) for name in XIELU_PARAMETERS]
        constants = [getattr(activation, name) for name in XIELU_BUFFERS]
        if not _can_run_xielu(x, learned, constants, down):
            return down(activation(x))
        return xielu_linear.xielu_linear_module(down, x, *learned, *constants)


def _can_run_xielu(x, learned, constants, down) -> bool:
    """Return True if the operator computes what the family's xIELU does with these.

    The family's gives the dtype which x and the parameters promote to. In autocast that is fp32, of
    which ``down`` makes autocast's dtype again, if multiplying is all it does. A shard, or what
    ZeRO-3 leaves of a parameter, has another shape.
    """
    if (
        type(x) not in activation_linear.PLAIN_TENSORS
        or x.dtype not in KERNEL_DTYPES
        or not devices.has_kernels(x)
    ):
        return False
    for t in (*learned, *constants):
        if type(t) not in XIELU_TENSOR_TYPES or t.device != x.device or not t.is_floating_point():
            return False
    if any(t.shape != (1,) for t in learned) or any(t.dim() or t.requires_grad for t in constants):
        return False
    if not devices.in_autocast(x) or x.dtype == torch.float32:
        return learned[0].dtype == learned[1].dtype == x.dtype
    return x.dtype == devices.autocast_dtype(x) and activation_linear.is_plain_linear(down)


@isolated()
def prove(module: torch.nn.Module, reads: ReadRecorder | None = None) -> PlainMLP | str:
    """Return the MLP that the module computes, or the reason why it is left alone."""
    reads = reads or ReadRecorder()
    projections = find_projections(module, PROJECTIONS)
    if not takes_one_tensor(type(module).forward):
        return "its forward takes more than a tensor"
    reason = _reason_has_more(module, projections)
    if reason is not None:
        return reason
    up, down = projections
    shapes = {up: (INTERMEDIATE_SIZE, HIDDEN_SIZE), down: (HIDDEN_SIZE, INTERMEDIATE_SIZE)}
    run, linear = probe_with_projections(module, shapes)
    xielu = _find_xielu(module)
    if xielu:
        return _prove_xielu(module, XIELUMLP("xielu", up, down, xielu), linear, reads)

    def formula(activation, x):
        return linear(down, activation(linear(up, x)))

    candidates = [
        (PlainMLP(act, up, down), functools.partial(formula, activation))
        for act, activation in UNGATED_ACTIVATIONS
    ]
    x = noise(8, HIDDEN_SIZE, seed=20)
    return find_matching_formula(run, candidates, x, "down(act(up))", "SiLU, GELU or ReLU²", reads)


class PlainMLPs(Rewrite):
    """Modules with two projections by known names that are not a gated MLP's, and with "mlp" in
    their name or no other weights."""

    flags = "swiglu", "geglu", "relu_squared"
    prove = staticmethod(prove)

    def could_apply(self, module):
        projections = find_projections(module, PROJECTIONS)
        if projections is None or find_projections(module, mlp.PROJECTIONS) is not None:
            return False
        if "mlp" in type(module).__name__.lower():
            return True
        return _reason_has_more(module, projections) is None


def _reason_has_more(module, projections) -> str | None:
    """Return the reason of `reason_has_more`, which does not count xIELU's numbers."""
    return reason_has_more(module, (*projections, _find_xielu(module)))


def _find_xielu(module) -> str | None:
    """Return the name of the first child with xIELU's parameters and buffers, and nothing else."""
    for name, child in module._modules.items():
        if child is None:
            continue
        if (
            present_names(child._parameters) == {*XIELU_PARAMETERS}
            and present_names(child._buffers) == {*XIELU_BUFFERS}
            and not present_names(child._modules)
        ):
            return name
    return None


# ---- the trial of xIELU ----


def _prove_xielu(module, candidate: XIELUMLP, linear, reads: ReadRecorder) -> XIELUMLP | str:
    """Return the candidate, or the reason why the module is not that.

    The projections are random, and xIELU's numbers take the `XIELU_TRIED_VALUES`.
    """
    activation_name = candidate.activation
    activation = module._modules[activation_name]
    cuda_kernel = getattr(activation, "_xielu_cuda_obj", None)
    if cuda_kernel is not None:  # a trial on the CPU does not run it
        reads.parts_read[(activation_name,), "_xielu_cuda_obj"] = "class", type(cuda_kernel)
        return "its xIELU is a CUDA kernel of its own"
    reads.parts_read[(), activation_name] = "class", type(activation)
    activation_reads = ReadRecorder()
    trial = _XIELUTrial(module, candidate, linear, activation_reads)
    x = noise(8, HIDDEN_SIZE, seed=20) * 10.0 ** torch.arange(-2, 6)[:, None]
    try:
        for values in XIELU_TRIED_VALUES:
            for inputs in (x, x.bfloat16(), x.bfloat16().view(2, 4, -1), x[:4].half()):
                alpha_p, alpha_n, *constants = (
                    torch.tensor(value, dtype=inputs.dtype) for value in values
                )
                run = functools.partial(trial.run, constants)
                expected = functools.partial(trial.formula, constants)
                tensors = inputs, alpha_p[None], alpha_n[None]
                reads.record(functools.partial(run, *tensors))
                if inputs is x:
                    if not same_gradients(run, expected, tensors):
                        return "it does not compute down(xIELU(up)), or has another gradient"
                elif not equal(run(*tensors), expected(*tensors)):
                    return "it rounds elsewhere than down(xIELU(up))"
    except Exception as error:
        return f"it could not be tried: {error_summary(error)}"
    finally:
        for (path, attribute), test in activation_reads.parts_read.items():
            reads.parts_read[(activation_name, *path), attribute] = test
    return candidate


class _XIELUTrial:
    """An MLP with xIELU, whose projections and numbers are given by the trial.

    ``activation_reads`` notes what the activation reads while the module is watched.
    """

    def __init__(self, module, candidate: XIELUMLP, linear, activation_reads: ReadRecorder):
        self.module = module
        self.linear = linear
        self.up, self.down = candidate.up, candidate.down
        self.activation_name = candidate.activation
        self.activation_reads = activation_reads
        replaced = candidate.up, candidate.down, candidate.activation
        self.other_children = {
            name: child
            for name, child in module._modules.items()
            if child is not None and name not in replaced
        }
        self.stubs = {
            name: Stub(name, functools.partial(linear, name))
            for name in (candidate.up, candidate.down)
        }

    def run(self, constants, x, *learned, make=probe_copy):
        parameters = dict(zip(XIELU_PARAMETERS, learned, strict=True))
        buffers = dict(zip(XIELU_BUFFERS, constants, strict=True))
        no_hooks = {name: {} for name in HOOK_ATTRIBUTES}
        make_activation = probe_copy if make is probe_copy else self.activation_reads.watched_copy

        def in_mode(**mode):
            activation = make_activation(
                self.module._modules[self.activation_name],
                parameters,
                {},
                buffers,
                **no_hooks,
                **mode,
            )
            children = {
                **children_in_mode(self.other_children, **mode),
                **self.stubs,
                self.activation_name: Stub(self.activation_name, activation),
            }
            return call_forward(make(self.module, {}, children, **mode), x)

        return same_in_both_modes(in_mode)

    def formula(self, constants, x, *learned):
        y = _xielu_in_steps(self.linear(self.up, x), *learned, *constants)
        return self.linear(self.down, y)


def _xielu_in_steps(x, alpha_p, alpha_n, beta, eps):
    """Compute xIELU as transformers does, rounding after each step."""
    p = F.softplus(alpha_p)
    n = beta + F.softplus(alpha_n)
    positive = p * x * x + beta * x
    negative = (torch.expm1(torch.min(x, eps)) - x) * n + beta * x
    return torch.where(x > 0, positive, negative)
