"""A class is recognised by what it computes, not by its name: how anything is proved.

A module is run as a *shell*: an object of its class with its attributes, its configuration and its
activation, but with tiny random weights of ours, so that no weight is looked at (it may be on
"meta", or a shard). What comes out is compared with our formula, in fp32 for the formula itself and
its gradient, in bf16 for where it rounds. Whatever is not proved equal is a `str`, the reason why
the module is left alone. The formulas are in the rewrites' files."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys

import torch

from liger_kernel.patch.proof.hooks import without
from liger_kernel.patch.proof.parts import Unfit

SIZE, INNER = 16, 24


@contextlib.contextmanager
def isolated():
    """On the CPU and without autocast, whatever contexts the model is built in; the user's random
    numbers stay."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])


def noise(*shape, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def shell(module: torch.nn.Module, parameters=None, children=None, buffers=None, **attributes):
    """An object of the module's class with its attributes, but with these parameters, children and
    buffers alone."""
    it = object.__new__(type(module))
    it.__dict__.update(module.__dict__)
    it.__dict__.update(
        _parameters=parameters or {}, _modules=children or {}, _buffers=buffers or {}, **attributes
    )
    return it


def call(module, *args, **kwargs):
    return type(module).forward(module, *args, **kwargs)


def in_both_modes(run):
    """What comes out, nothing if that depends on the mode (dropout)."""
    training, evaluation = run(training=True), run(training=False)
    if not equal(training, evaluation):
        raise ValueError("it does something else in training than in evaluation")
    return training


def takes_one_tensor(function) -> bool:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return len(parameters) == 1 and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def held_in(members: dict) -> set[str]:
    return {name for name, value in members.items() if value is not None}


def rows(*shape):
    """Rows of every size, such for which eps matters and such that no clamp leaves alone; some have
    one large entry."""
    sizes = 10.0 ** torch.linspace(-6, 9, shape[1], device="cpu")
    x = noise(*shape)
    x[0] *= sizes[:, None]
    x[0, 0] = 0
    x[1, :, 1] = sizes
    x[2] = 0.03 * x[2] + 0.5
    return x


def modes(children, **mode):
    """Children that stand for themselves, in the mode that is tried: a module and its children are,
    in one model."""
    return {
        name: child
        and shell(
            child,
            child._parameters,
            modes(child._modules, **mode),
            child._buffers,
            **without(child),
            **mode,
        )
        for name, child in children.items()
    }


def by(test):
    """``test`` of what two functions make of the same."""
    return lambda one, other, given: test(one(*given), other(*given))


def same_gradients(one, other, given) -> bool:
    """Whether both give the same for the inputs, and those the same gradients, small and large."""
    (y, *dys), (z, *dzs) = with_gradients(one, given), with_gradients(other, given)
    known = [(dy, dz) for dy, dz in zip(dys, dzs, strict=True) if dy is not None or dz is not None]
    return close(y, z) and all(None not in pair and close_in_rows(*pair) for pair in known)


def with_gradients(run, given):
    """What comes out of the inputs, and their gradients for one of that with rows of every size."""
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in given]
        out = run(*given)
        dy = noise(*out.shape, seed=30)
        dy = dy * 10.0 ** torch.linspace(-3, 6, dy.shape[-2], device="cpu")[:, None]
        return out.detach(), *torch.autograd.grad(out, given, dy, allow_unused=True)


class Stub:
    """In the place of a layer with weights: it can be called, and nothing else."""

    def __init__(self, name, function):
        self.__dict__.update(_stub=name, _function=function)

    def __call__(self, *args, **kwargs):
        return self._function(*args, **kwargs)

    def __getattr__(self, name):
        raise Unfit(f"its forward looks at {self._stub}.{name}")


def close(got, want) -> bool:
    return (
        got.dtype == want.dtype
        and got.shape == want.shape
        and torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    )


def close_in_rows(got, want) -> bool:
    """Where sums cancel: as close as the largest of a row is exact."""
    largest = want.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return close(got / largest, want / largest)


def equal(got, want) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want)


def nearly_equal(got, want) -> bool:
    """Rounded once from fp32, where sums of another order differ by a little; rounded twice, a
    quarter would differ."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    return (got == want).float().mean() >= 0.99 and torch.allclose(got, want, rtol=2**-7, atol=1e-6)


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
