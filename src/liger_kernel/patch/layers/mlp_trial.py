"""The trial of an MLP: with random projections, against a formula with each activation."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from liger_kernel.patch.proof.parts import ReadRecorder
from liger_kernel.patch.proof.probe import (
    Stub,
    call_forward,
    children_in_mode,
    close,
    equal,
    error_summary,
    noise,
    present_names,
    probe_copy,
    same_gradients,
    same_in_both_modes,
)
from liger_kernel.patch.proof.rewrite import Replacement


def find_projections(module, known_names) -> tuple[str, ...] | None:
    """Return the first tuple of ``known_names`` that are all children of the module, or None."""
    children = present_names(module._modules)
    return next((names for names in known_names if set(names) <= children), None)


def reason_has_more(module, projections) -> str | None:
    """Return None if all of the module's weights are its projections', or what else it holds."""
    if present_names(module._parameters) or present_names(module._buffers):
        return "it holds parameters beside its projections"
    other_children = sorted(present_names(module._modules) - set(projections))
    layers = [n for n in other_children if next(module._modules[n].parameters(), None) is not None]
    return f"it has further layers: {', '.join(layers)}" if layers else None


def probe_with_projections(module, shapes: dict[str, tuple[int, int]]):
    """Replace the module's projections by random ones.

    Args:
        module: an MLP.
        shapes: name of a projection -> (out_features, in_features).

    Returns:
        ``run(x)``, the module's forward with these projections, and ``linear(name, x)``, one of
        them.
    """
    weights = {
        name: (noise(*shape, seed=i), noise(shape[0], seed=i + 10))
        for i, (name, shape) in enumerate(shapes.items())
    }
    other_children = {
        name: child
        for name, child in module._modules.items()
        if child is not None and name not in shapes
    }

    def linear(name, x):
        weight, bias = weights[name]
        return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))

    def run(x, make=probe_copy):
        stubs = {name: Stub(name, functools.partial(linear, name)) for name in weights}

        def in_mode(**mode):
            children = {**children_in_mode(other_children, **mode), **stubs}
            return call_forward(make(module, {}, children, **mode), x)

        return same_in_both_modes(in_mode)

    return run, linear


def find_matching_formula(
    run: Callable,
    candidates: list[tuple[Replacement, Callable]],
    x: torch.Tensor,
    formula_name: str,
    activation_names: str,
    reads: ReadRecorder,
) -> Replacement | str:
    """Return the first candidate whose formula ``run`` computes, with its gradient and rounding.

    Args:
        run: the module's function of x.
        candidates: (replacement, its formula of x).
        x: (rows, columns), of size 1; an even number of rows. Row i is tried in the size
            10^(i - 2).
        formula_name, activation_names: the formulas in the words of a report.
        reads: notes what the module reads.

    Returns:
        The replacement, or the reason why none fits.
    """
    reason = f"it does not compute {formula_name} with {activation_names}"
    x = x * 10.0 ** torch.arange(-2, len(x) - 2)[:, None]  # some clamp what is large
    low_precision_inputs = x.bfloat16(), x[:4].half()
    # of another rank: code may mean a dimension by its number
    other_inputs = *low_precision_inputs, x.bfloat16().view(2, len(x) // 2, -1)
    try:
        reads.record(functools.partial(run, x), functools.partial(run, low_precision_inputs[0]))
        output = run(x)
        for replacement, formula in candidates:
            if close(output, formula(x)):
                if not same_gradients(run, formula, [x]):
                    return f"it has another gradient than {formula_name}"
                if all(equal(run(other), formula(other)) for other in other_inputs):
                    return replacement
                reason = f"it rounds elsewhere than {formula_name}"
    except Exception as error:
        return f"it could not be tried: {error_summary(error)}"
    return reason
