"""A router's forward with made-up tensors, for the trial in the file router_trial.

It keeps its own numbers (experts, groups, scale). The logits of a row are all different, so that
the choice is well defined: of equal ones PyTorch takes any."""

from __future__ import annotations

import inspect
import types
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from liger_kernel.ops.moe.router import router_reference
from liger_kernel.patch.layers.dtypes import KERNEL_DTYPES
from liger_kernel.patch.layers.router_logits import Projection
from liger_kernel.patch.proof.probe import (
    children_in_mode,
    equal,
    noise,
    present_names,
    probe_copy,
)

WIDTH_ATTRIBUTES = "hidden_dim", "hidden_size"  # of x
NUM_EXPERTS_ATTRIBUTES = "num_experts", "n_routed_experts"
DIFFERENT_ROWS = 16  # rows of `_different_logits`
LOW_LOGIT_STEPS = range(0, 72, 4)  # how far below 0 the logits of `_low_logits` are
MAX_EXPERTS = 2304  # so many numbers `_different_logits` has
# computed in fp32 by autocast on a GPU
FP32_FUNCTIONS_OF_AUTOCAST = (
    "softmax",
    "log_softmax",
    "sum",
    "exp",
    "log",
    "pow",
    "norm",
    "prod",
    "reciprocal",
    "softplus",
)


class NotARouter(Exception):
    """The reason why a router is left alone."""


class Routing(NamedTuple):
    """The output of a router in a trial, and the correction that was added to choose by."""

    correction: torch.Tensor | None
    logits: torch.Tensor
    weights: torch.Tensor
    index: torch.Tensor


class RouterProbe:
    """A router's forward with its own numbers, but other tensors.

    With E experts, x is (T, 2·E) and the weight is [1 | noise], so that the first half of x is the
    logits.
    """

    def __init__(self, module):
        self.module = module
        arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
        children = {name: child for name, child in module._modules.items() if child is not None}
        layers = [n for n, child in children.items() if next(child.parameters(), None) is not None]
        tensor_names = present_names(module._parameters) | present_names(module._buffers)
        linear = children[layers[0]] if layers else module
        linear_names = {"weight", "bias"} if linear is module else set()
        correction_names = [*sorted(tensor_names - linear_names), *(p.name for p in arguments[1:])]
        weight = linear._parameters.get("weight")
        num_weights = len(layers) + ("weight" in tensor_names)
        if weight is None or num_weights != 1 or len(correction_names) > 1:
            raise NotARouter("it is not made of a linear layer and a bias to choose by")
        if not arguments or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in arguments):
            raise NotARouter(f"its arguments are ({', '.join(map(str, arguments))})")

        self.child = layers[0] if layers else None
        self.has_bias = linear._parameters.get("bias") is not None
        self.other_children = {n: child for n, child in children.items() if n not in layers}
        self.correction = correction_names[0] if correction_names else None
        self.correction_is_argument = len(arguments) == 2
        self.width_attributes = tuple(name for name in WIDTH_ATTRIBUTES if name in vars(module))
        self.num_experts = self._number_of_experts(weight)
        self.ranks = (2,)  # of x, as the forward takes it
        E = self.num_experts
        identity = torch.eye(E, dtype=torch.float32)
        self.weight = torch.cat((identity, noise(E, E, seed=5) / E**0.5), 1)

    def _number_of_experts(self, weight) -> int:
        num_experts = 0
        if weight.dim() == 2:
            num_experts = weight.shape[0]
        else:  # ZeRO-3 has taken the weight away
            for name in NUM_EXPERTS_ATTRIBUTES:
                if type(vars(self.module).get(name)) is int:
                    num_experts = vars(self.module)[name]
                    break
        if not num_experts:
            raise NotARouter("the number of its experts is not known")
        if not 0 < num_experts <= MAX_EXPERTS:
            raise NotARouter(f"it has {num_experts} experts")
        return num_experts

    def tensors(self, dtype=torch.float32, below_zero=False):
        """Return weight, bias and correction. With ``below_zero``, the bias is not 0 and the
        correction is negative."""
        bias = noise(self.num_experts, seed=6) * below_zero
        correction = noise(self.num_experts, seed=7) / 4
        if below_zero:
            correction = -correction.abs()
        return [t.to(dtype) for t in (self.weight, bias, correction)]

    def run(self, x, weight, bias, correction, make=probe_copy):
        """Return what the forward gives in training and in evaluation.

        Raises:
            NotARouter: that differs, or is not three tensors.
        """
        parameters = dict.fromkeys(self.module._parameters)
        linear = {}
        if self.child:
            linear[self.child] = _Linear(weight, bias if self.has_bias else None)
        else:
            parameters["weight"] = weight
            if self.has_bias:
                parameters["bias"] = bias
        inputs = [x if x.dim() in self.ranks else x[None]]
        if self.correction_is_argument:
            inputs.append(correction)
        elif self.correction:
            parameters[self.correction] = correction
        widths = dict.fromkeys(self.width_attributes, x.shape[-1])
        outputs = []
        for training in (True, False):
            children = children_in_mode(self.other_children, training=training) | linear
            copy = make(self.module, parameters, children, training=training, **widths)
            with _SortedTopK():
                outputs.append(type(self.module).forward(copy, *inputs))
        if type(outputs[0]) is not tuple or len(outputs[0]) != 3:
            raise NotARouter("it does not give logits, weights and an index")
        if not all(map(equal, *outputs)):
            raise NotARouter("it does something else in training than in evaluation")
        return outputs[0]

    def route(self, x, tensors) -> Routing:
        """Run the forward, and check the shapes of its output.

        Raises:
            NotARouter: they are not those of a router.
        """
        logits, weights, index = self.run(x, *tensors)
        if (
            index.dtype != torch.int64
            or logits.shape != (len(x), self.num_experts)
            or weights.shape != index.shape
        ):
            raise NotARouter("it does not give logits, weights and an index")
        correction = tensors[2] if self.correction else None
        return Routing(correction, logits, weights, index)

    def find_rank(self, x) -> None:
        """Set ``ranks`` to the number of dimensions of x that the forward takes."""
        try:
            self.run(x, *self.tensors())
        except Exception as error:
            self.ranks = (3,)
            try:
                self.run(x, *self.tensors())
            except Exception:
                raise error from None

    def find_all_ranks(self, x) -> tuple[int, ...]:
        """Return the numbers of dimensions that x may have so that rows come out.

        Raises:
            NotARouter: there are none.
        """
        takes_rows = self.ranks == (2,)
        output = self.run(x, *self.tensors())
        self.ranks = (2, 3)
        try:
            batched_output = self.run(x.view(2, -1, x.shape[1]), *self.tensors())
            takes_batches = all(map(equal, batched_output, output))
        except Exception:
            takes_batches = False
        if not (takes_rows or takes_batches):
            raise NotARouter("it does not give rows")
        return (2,) * takes_rows + (3,) * takes_batches

    def logits(self, projection: Projection, x, weight, bias):
        bias = bias if self.has_bias else None
        module = types.SimpleNamespace()
        if self.child:
            setattr(module, self.child, _Linear(weight, bias))
        return projection.logits(module, x, weight, bias)

    def expected(self, projection, options, top_k, dtype, x, weight, bias, correction):
        """Return (logits, weights, index) by `router_reference`."""
        logits = self.logits(projection, x, weight, bias)
        correction = correction if self.correction else None
        return logits, *router_reference(logits, top_k, bias=correction, dtype=dtype, **options)


class _Linear:
    """A linear layer: it can be called, and has a weight and a bias."""

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def __call__(self, x):
        return F.linear(x, self.weight, self.bias)


class _SortedTopK(TorchFunctionMode):
    """Give the best experts in their order, where a forward leaves that open."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.topk, torch.Tensor.topk):
            kwargs = {**kwargs, "sorted": True}
        return function(*args, **kwargs)


class AutocastOfGPUs(TorchFunctionMode):
    """Autocast as on a GPU: some functions compute in fp32, and give that."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.__name__ in FP32_FUNCTIONS_OF_AUTOCAST and kwargs.get("dtype") is None:
            if args[0].dtype in KERNEL_DTYPES:
                args = args[0].float(), *args[1:]
        return function(*args, **kwargs)


# ---- inputs ----


def random_inputs(num_experts):
    """Return rows of x with `_different_logits`, with `_low_logits`, and rows for which the random
    half of the weight counts."""
    no_logits = noise(DIFFERENT_ROWS, num_experts) * 0
    logits = torch.cat((_different_logits(num_experts), _low_logits(num_experts), no_logits))
    second_half = torch.zeros_like(logits)
    second_half[-DIFFERENT_ROWS:] = noise(DIFFERENT_ROWS, num_experts, seed=4)
    return torch.cat((logits, second_half), 1)


def _different_logits(num_experts):
    """Return rows of different logits from -16 to 4, which both 16-bit dtypes have."""
    powers = 2.0 ** torch.arange(-6, 4).float()[:, None]
    sizes = (1 + torch.arange(128).float() / 128) * powers
    numbers = torch.cat((-sizes.flatten(), sizes[:8].flatten()))
    order = noise(DIFFERENT_ROWS, len(numbers), seed=8).argsort(-1)
    return numbers[order[:, :num_experts]]


def _low_logits(num_experts):
    """Return rows of logits far below 0, of all experts or of all but one, which is as far above
    them."""
    steps = torch.tensor(LOW_LOGIT_STEPS)
    logits = 0.3 * noise(2 * len(steps), num_experts, seed=9) - steps.repeat(2)[:, None]
    logits[: len(steps), 0] = 64.0 - steps
    return logits
