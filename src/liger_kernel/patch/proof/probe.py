"""Running a module on small inputs, to recognise its class by what it computes, not by its name.

A module is run as a *probe copy*: an object of its class with its attributes, its configuration and
its activation, but with tiny random weights of ours. So no weight is looked at: it may be on
"meta", or a shard. The output is compared with a formula of ours: in fp32 for the formula itself
and its gradient, in bf16 for where it rounds. A proof that fails returns a `str`, the reason why
the module is left alone. The formulas are in the rewrites' files."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys

import torch

from liger_kernel.patch.proof.hooks import without_hooks
from liger_kernel.patch.proof.parts import Unprovable

HIDDEN_SIZE = 16
INTERMEDIATE_SIZE = 24


# ---- running a module ----


@contextlib.contextmanager
def isolated():
    """Run on the CPU, without autocast and gradients, whatever contexts the model is built in.

    The user's random numbers stay what they are."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def probe_copy(module: torch.nn.Module, parameters=None, children=None, buffers=None, **attributes):
    """Return an object of the module's class with its attributes, but only these parameters,
    children and buffers.

    ``attributes`` replace those of the module."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__.update(
        _parameters=parameters or {}, _modules=children or {}, _buffers=buffers or {}, **attributes
    )
    return copy


def children_in_mode(children, **mode):
    """Return copies of the children, with their own weights, in the mode that is tried.

    In one model a module and its children are in the same mode."""
    copies = {}
    for name, child in children.items():
        if child is not None:
            grandchildren = children_in_mode(child._modules, **mode)
            attributes = {**without_hooks(child), **mode}
            child = probe_copy(
                child, child._parameters, grandchildren, child._buffers, **attributes
            )
        copies[name] = child
    return copies


class Stub:
    """Stands for a layer with weights. It can be called, and nothing else."""

    def __init__(self, name, function):
        self.__dict__.update(_stub=name, _function=function)

    def __call__(self, *args, **kwargs):
        return self._function(*args, **kwargs)

    def __getattr__(self, name):
        raise Unprovable(f"its forward looks at {self._stub}.{name}")


def call_forward(module, *args, **kwargs):
    """Call the forward of the module's class: no hooks, and no forward of the instance."""
    return type(module).forward(module, *args, **kwargs)


def same_in_both_modes(run):
    """Return the output of ``run(training=...)``.

    Raises:
        ValueError: it depends on the mode, as with dropout.
    """
    training_output = run(training=True)
    if not equal(training_output, run(training=False)):
        raise ValueError("it does something else in training than in evaluation")
    return training_output


# ---- what is looked at before ----


def takes_one_tensor(function) -> bool:
    """Return True if the method takes one argument beside ``self``, by place or by keyword."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return len(parameters) == 1 and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def present_names(members: dict) -> set[str]:
    """Return the names of the members (parameters, buffers or children) that are not None."""
    return {name for name, value in members.items() if value is not None}


def error_summary(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# ---- inputs ----


def noise(*shape, seed=0):
    """Return normal random numbers: fp32, on the CPU, the same for each seed."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def scaled_rows(*shape):
    """Return rows of every magnitude, so that an eps matters and a clamp shows.

    ``shape`` is three-dimensional; ``x[1]`` has rows with one large entry."""
    magnitudes = 10.0 ** torch.linspace(-6, 9, shape[1], device="cpu")
    x = noise(*shape)
    x[0] *= magnitudes[:, None]
    x[0, 0] = 0
    x[1, :, 1] = magnitudes
    x[2] = 0.03 * x[2] + 0.5
    return x


# ---- comparing ----


def compare_outputs(test):
    """Return a comparison of two functions: ``test`` of their outputs for the same inputs."""

    def compare(candidate, reference, inputs):
        return test(candidate(*inputs), reference(*inputs))

    return compare


def same_gradients(candidate, reference, inputs) -> bool:
    """Return True if both have the same output for the inputs, and the inputs the same gradients,
    small and large."""
    output, *grads = output_and_gradients(candidate, inputs)
    expected_output, *expected_grads = output_and_gradients(reference, inputs)
    if not close(output, expected_output):
        return False
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        if grad is None and expected_grad is None:
            continue
        if grad is None or expected_grad is None or not close_by_row(grad, expected_grad):
            return False
    return True


def output_and_gradients(function, inputs):
    """Return the output and the inputs' gradients, for a gradient of the output with rows of every
    magnitude."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = function(*leaves)
        dy = noise(*output.shape, seed=30)
        dy = dy * 10.0 ** torch.linspace(-3, 6, dy.shape[-2], device="cpu")[:, None]
        return output.detach(), *torch.autograd.grad(output, leaves, dy, allow_unused=True)


def _same_dtype_and_shape(output, expected) -> bool:
    return output.dtype == expected.dtype and output.shape == expected.shape


def close(output, expected) -> bool:
    """Return True if dtype and shape are equal and the values are within 1e-5."""
    return _same_dtype_and_shape(output, expected) and torch.allclose(
        output, expected, rtol=1e-5, atol=1e-5
    )


def close_by_row(output, expected) -> bool:
    """Return True if they are close in units of the row's largest value: sums may cancel."""
    largest = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return close(output / largest, expected / largest)


def equal(output, expected) -> bool:
    """Return True if dtype, shape and all values are equal."""
    return _same_dtype_and_shape(output, expected) and torch.equal(output, expected)


def nearly_equal(output, expected) -> bool:
    """Return True if they are equal but for sums in another order, each rounded once from fp32.

    Rounded twice, a quarter of the values would differ."""
    if not _same_dtype_and_shape(output, expected):
        return False
    mostly_equal = (output == expected).float().mean() >= 0.99
    return mostly_equal and torch.allclose(output, expected, rtol=2**-7, atol=1e-6)
