"""Modules with a layer of the hub in the place of their forward, as `kernels` puts it there."""

import inspect
from types import MethodType

import torch

from liger_kernel.hub import dispatch, layers


def bind(module, layer):
    module.forward = MethodType(getattr(layers, f"Liger{layer}").forward, module)
    return module


def function_module(function):
    """Make a module of a function, as `kernels` does it."""

    class Func(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    signature = inspect.signature(function)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = itself, *signature.parameters.values()
    Func.forward.__signature__ = signature.replace(parameters=parameters)
    # a proof trusts the code of packages, as `kernels` is one
    Func.forward.__code__ = Func.forward.__code__.replace(co_filename=torch.nn.__file__)
    return Func()


def runs_fused(module) -> bool:
    """Return True if the module's next call runs our kernel."""
    proofs = [by_module.get(module) for by_module in dispatch._proof_of_module.values()]
    found = [proof for proof in proofs if proof is not None]
    return any(proof.fused_forward is not None and proof.holds_for(module) for proof in found)


def gradients(module, *inputs, second=False):
    """Return the outputs, and the gradients of all inputs and parameters that have one.

    ``second``: the loss has the square of the first input's gradient, too.
    """
    module.zero_grad()
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = module(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = 0
    for y in outputs:
        if y.is_floating_point():
            weights = torch.linspace(0.5, 2, y.numel(), device=y.device)
            loss = loss + y.float().sin().flatten() @ weights  # a norm's own square is constant
    if second:
        (dx,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
        loss = loss + dx.square().sum()
    loss.backward()
    grads = [t.grad for t in (*leaves, *module.parameters()) if t.grad is not None]
    return [y.detach() for y in outputs] + grads


def assert_same(module, reference, *inputs, **kwargs):
    """Assert the same outputs and gradients.

    They are fp32 sums of at most a hundred terms in another order.
    """
    outputs = gradients(module, *inputs, **kwargs)
    for output, expected in zip(outputs, gradients(reference, *inputs, **kwargs), strict=True):
        assert output.dtype == expected.dtype
        assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()


def assert_as_close(output, reference_output, exact):
    """Assert that an output is no further from fp32 than the module's own, plus one rounding."""
    error = (output.float() - exact).abs().max()
    reference_error = (reference_output.float() - exact).abs().max()
    assert output.dtype == reference_output.dtype
    assert error <= reference_error + 2**-8 * exact.abs().max()
