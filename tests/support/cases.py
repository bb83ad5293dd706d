"""Compare an operator's `Case` with float64 and with PyTorch's own code."""

import contextlib
import importlib
import math
import pkgutil

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import liger_kernel.core
import liger_kernel.losses
import liger_kernel.ops  # fills CASES
from liger_kernel.core.op import CASES

aten = torch.ops.aten

# Runs a test with the kernels of a head, and without them.
WITH_AND_WITHOUT_KERNELS = pytest.mark.usefixtures("with_and_without_kernels")
BY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


# ---- inputs ----


def make_inputs(case, shape, option, dtype=torch.float32, seed=0):
    """Return a case's inputs on the tested device. They are drawn on the CPU from ``seed``."""
    torch.manual_seed(seed)
    return cast({**case.inputs(*shape), **option}, dtype)


def cast(tensors, dtype):
    """Copy tensors to the tested device, and floating-point ones to ``dtype``."""
    copies = {}
    for name, t in tensors.items():
        if isinstance(t, torch.Tensor):
            moved = t.detach().to(DEVICE, dtype if t.is_floating_point() else None)
            copies[name] = moved.clone().requires_grad_(t.requires_grad)
        else:
            copies[name] = t
    return copies


def tensors_with_grad(tensors):
    return {k: t for k, t in tensors.items() if isinstance(t, torch.Tensor) and t.requires_grad}


def make_strided(t):
    """Return a copy of a tensor whose last dimension has a stride of 2."""
    wide = torch.stack((t.detach(), torch.full_like(t, -1)), -1)[..., 0]
    return wide.requires_grad_(t.requires_grad)


# ---- running an operator ----


def run(fn, tensors, strided=False):
    """Return (outputs and gradients by name, the gradients, those of a second backward).

    Both backwards go through the same graph. ``strided``: the incoming gradients are
    non-contiguous.
    """
    outputs = run_forward(fn, tensors)
    inputs = tensors_with_grad(tensors)
    differentiable = [o for o in outputs if o.requires_grad]
    generator = torch.Generator().manual_seed(0)
    grad_outputs = []
    for o in differentiable:
        dy = torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device, o.dtype)
        grad_outputs.append(make_strided(dy) if strided else dy)
    leaves = list(inputs.values())
    first = torch.autograd.grad(differentiable, leaves, grad_outputs, retain_graph=True)
    second = torch.autograd.grad(differentiable, leaves, grad_outputs)
    results = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    results |= {f"d{name}": grad for name, grad in zip(inputs, first, strict=True)}
    return results, first, second


def run_forward(fn, tensors):
    return list_outputs(fn(**tensors))


def list_outputs(out):
    """Return an operator's outputs that are not None as a list."""
    outputs = out if isinstance(out, tuple) else (out,)
    return [o for o in outputs if o is not None]


ALLOCATIONS = (
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten.empty_strided,
    aten.new_empty_strided,
)


class PoisonedEmpty(TorchDispatchMode):
    """Fill new memory with NaN, so that memory which an operator does not write shows up.

    A mode rather than a replacement of `torch.empty`: PyTorch looks `torch.empty` up only once, for
    the functions that make tensors under `torch.device(...)`, and for those that Dynamo traces.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in ALLOCATIONS:
            out.fill_(float("nan") if out.is_floating_point() else -7)
        return out


PRODUCTS = aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm


class ExactProducts(TorchDispatchMode):
    """Compute every fp32 matrix product in fp64 and round it once, ours and PyTorch's own.

    BLAS adds up in an order that depends on the processor, on its threads and on where a matrix
    lies in memory: the same two products may differ by several roundings. That order is not the
    operator's; all else that it adds up is.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        if packet not in PRODUCTS or args[-1].dtype != torch.float32:
            return func(*args, **kwargs)
        if packet is aten.addmm_:
            out = args[0]
            packet = aten.addmm
        else:
            out = kwargs.pop("out", None)
        exact = packet(*(a.double() for a in args), **kwargs)
        return exact.float() if out is None else out.copy_(exact)


def exact_products_on_cpu():
    """Return `ExactProducts` on a CPU, and a context that changes nothing on a GPU.

    On a GPU the operators are tested with the products that they get there.
    """
    return ExactProducts() if DEVICE == "cpu" else contextlib.nullcontext()


class HeadLayout(TorchFunctionMode):
    """Compute linear layers in the memory layout of our head, column-major.

    Both a layer's result and the gradient that comes back to it have that layout. A bias is added
    in fp32 to the rounded product, as our head adds it. cuBLAS rounds the product, too, in this
    layout.
    """

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, bias = args if len(args) == 3 else (*args, None)
        elif func is torch.Tensor.matmul:
            x, weight, bias = args[0], args[1].mT, None
        else:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        y = torch.mm(weight, x.mT.to(weight.dtype))
        if y.requires_grad:
            y.register_hook(torch.Tensor.contiguous)
        if bias is None:
            return y.mT
        return y.mT.to(torch.promote_types(y.dtype, torch.float32)) + bias


def run_reference(reference, tensors, dtype, products=True):
    """Return a list of PyTorch's results in ``dtype``.

    With ``products`` (the reference has matrix products) there are two: the second one has them in
    our head's memory layout. cuBLAS takes another kernel for another layout, which adds in another
    order: on an H200 the same dX·W was off by up to 5e-7 of the largest in autograd's layout and by
    up to 1e-6 with an operand in the other. In 16 bits some logits are rounded to the other
    neighbour, and a loss in fp32 shows it.
    """
    with exact_products_on_cpu():
        results = [run(reference, cast(tensors, dtype))[0]]
    if products:
        with HeadLayout() as mode, exact_products_on_cpu():
            results.append(run(reference, cast(tensors, dtype))[0])
        assert mode.calls
    return results


# ---- errors and their bounds ----


def measure_errors(results, references, exact, inputs, fp32_roundings=1):
    """Measure each result against fp64.

    Returns by name a tensor of the operator's largest error, PyTorch's, the bound's allowance as a
    share of the largest value, and the largest value.

    PyTorch's error is the worst of those in ``references``: see `run_reference`. The allowance is
    one rounding, or ``fp32_roundings`` where the result is in fp32. An output's largest value is at
    least the largest input: a loss is a difference of logits, each of which was rounded.
    """
    errors = {}
    largest_input = max(t.abs().max() for t in inputs.values() if t.is_floating_point())
    for name, expected in exact.items():
        result = results[name]
        assert result.dtype == references[0][name].dtype and result.shape == expected.shape, name
        if not expected.is_floating_point() or expected.numel() == 0:
            assert torch.equal(result, expected.to(result.dtype)), name
            continue
        floor = largest_input if name.startswith("output") else 1e-30
        largest = max(expected.abs().max(), floor)
        error = (result.double() - expected).abs().max()
        assert not error.isnan(), f"{name} is NaN"
        reference_errors = [(r[name].double() - expected).abs().max() for r in references]
        roundings = fp32_roundings if result.dtype == torch.float32 else 1
        allowance = torch.finfo(result.dtype).eps * roundings
        errors[name] = torch.stack(
            (error, torch.stack(reference_errors).amax(), *error.new_tensor((allowance, largest)))
        )
    return errors


def logarithm_roundings(V):
    """Return the roundings that log p leaves in the gradients of a head with V classes.

    The head makes log p by two subtractions, where PyTorch has one. That is half an eps of |log p|
    more, and Σ p·|log p| is at most log V.
    """
    return 0.5 * math.log(V)


def logit_roundings(dtype, tokens):
    """Return the fp32 roundings that one 16-bit logit, rounded the other way, leaves in a mean.

    A GPU adds in an order of its own, so one logit may be rounded to its other neighbour. In a loss
    of one token that is no worse: the logit is as far from the exact one, on the other side.
    """
    if DEVICE == "cpu" or dtype == torch.float32 or tokens == 1:
        return 0
    return torch.finfo(dtype).eps / torch.finfo(torch.float32).eps / tokens


def assert_as_exact_as_pytorch(draws):
    """Check that no result is further off than PyTorch's worst and the allowance.

    ``draws`` holds the results of `measure_errors` for several seeds, since one small draw is luck.
    Errors are shares of the largest value in any of them: where the terms of a sum cancel, it is
    small, and their roundings are not.
    """
    for name in draws[0]:
        worst = torch.stack([draw[name] for draw in draws]).amax(0).tolist()
        error, reference_error, allowance, largest = worst
        assert error <= reference_error + allowance * largest, (
            f"{name}: error {error / largest:.3g} of the largest, "
            f"PyTorch's own {reference_error / largest:.3g}, and {allowance:.3g}"
        )


def operator_modules():
    """Import and yield every module of `core`, the operators and the losses."""
    for package in (liger_kernel.core, liger_kernel.ops, liger_kernel.losses):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(info.name)
