"""How an operator is compared: its `Case` drawn, run, and measured against float64 and against
PyTorch's own code."""

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
import liger_kernel.ops  # fills CASES
from liger_kernel.core.op import CASES


def given(case, shape, option, dtype=torch.float32, seed=0):
    """The case's inputs, drawn on the CPU from one seed, on the device and in the dtype tested."""
    torch.manual_seed(seed)
    return cast({**case.inputs(*shape), **option}, dtype)


def cast(tensors, dtype):
    def one(t):
        if not isinstance(t, torch.Tensor):
            return t
        moved = t.detach().to(DEVICE, dtype if t.is_floating_point() else None)
        return moved.clone().requires_grad_(t.requires_grad)

    return {name: one(t) for name, t in tensors.items()}


def run(fn, tensors, strided=False):
    """fn's outputs and the gradients of everything that requires one, twice over the same graph."""
    outs = run_forward(fn, tensors)
    wanted = leaves(tensors)
    differentiable = [o for o in outs if o.requires_grad]
    g = torch.Generator().manual_seed(0)
    dys = [
        torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.device, o.dtype)
        for o in differentiable
    ]
    dys = [spread(dy) for dy in dys] if strided else dys
    once = torch.autograd.grad(differentiable, list(wanted.values()), dys, retain_graph=True)
    twice = torch.autograd.grad(differentiable, list(wanted.values()), dys)
    named = {f"output {i}": o.detach() for i, o in enumerate(outs)}
    return named | {f"d{k}": d for k, d in zip(wanted, once, strict=True)}, once, twice


aten = torch.ops.aten
PRODUCTS = aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm


class ExactProducts(TorchDispatchMode):
    """Every matrix product of fp32 made in fp64 and rounded once, ours and PyTorch's own.

    BLAS adds up in an order that depends on the processor, on its threads and on where a matrix
    lies in memory: the same two products may differ by several roundings. That order is not the
    operator's; whatever else it adds is."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = dict(kwargs or {}), func.overloadpacket
        if packet not in PRODUCTS or args[-1].dtype != torch.float32:
            return func(*args, **kwargs)
        out = args[0] if packet is aten.addmm_ else kwargs.pop("out", None)
        exact = (aten.addmm if packet is aten.addmm_ else packet)(
            *(a.double() for a in args), **kwargs
        )
        return exact.float() if out is None else out.copy_(exact)


def as_on_any_processor():
    """On a GPU nothing is replaced: there the operators are tested with the products that they
    get."""
    return ExactProducts() if DEVICE == "cpu" else contextlib.nullcontext()


class LikeTheHead(TorchFunctionMode):
    """Has a linear's result, and the gradient that comes back to it, in the memory layout of our
    head: column-major.

    A bias is added in fp32 to the rounded product, as our head adds it. cuBLAS rounds the product,
    too, in this layout."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, bias = args
        elif func is torch.Tensor.matmul:
            x, weight, bias = args[0], args[1].mT, None
        else:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        y = torch.mm(weight, x.mT.to(weight.dtype))
        if y.requires_grad:
            y.register_hook(torch.Tensor.contiguous)
        return y.mT if bias is None else y.mT.to(torch.promote_types(y.dtype, torch.float32)) + bias


def run_plain(reference, tensors, dtype, products=True):
    """PyTorch's results in that dtype, in a list: of matrix ``products`` also those in our head's
    memory layout.

    cuBLAS takes another kernel for another layout, which adds in another order: on an H200 the same
    dX·W was off by up to 5e-7 of the largest in autograd's layout and by up to 1e-6 with an operand
    in the other. In 16 bits some logits are rounded to the other neighbour, and a loss in fp32
    shows it."""
    with as_on_any_processor():
        found = [run(reference, cast(tensors, dtype))[0]]
    if products:
        with LikeTheHead() as mode, as_on_any_processor():
            found.append(run(reference, cast(tensors, dtype))[0])
        assert mode.calls
    return found


def errors(got, plain, exact, inputs, fp32_roundings=1):
    """For each result its error against fp64, PyTorch's own, what may be added as a share of the
    largest, and that.

    PyTorch's own is the worst of those in ``plain``: see `run_plain`. What may be added is one
    rounding, or ``fp32_roundings`` where the result is in fp32. An output's largest value is at
    least the largest input: a loss is a difference of logits, each of which was rounded."""
    found = {}
    largest_input = max(t.abs().max() for t in inputs.values() if t.is_floating_point())
    for k, e in exact.items():
        assert got[k].dtype == plain[0][k].dtype and got[k].shape == e.shape, k
        if not e.is_floating_point() or e.numel() == 0:
            assert torch.equal(got[k], e.to(got[k].dtype)), k
            continue
        largest = max(e.abs().max(), largest_input if k.startswith("output") else 1e-30)
        mine, *theirs = ((a[k].double() - e).abs().max() for a in (got, *plain))
        assert not mine.isnan(), f"{k} is NaN"
        more = torch.finfo(got[k].dtype).eps * (
            fp32_roundings if got[k].dtype == torch.float32 else 1
        )
        found[k] = torch.stack(
            (mine, torch.stack(theirs).amax(), *mine.new_tensor((more, largest)))
        )
    return found


def of_logarithms(V):
    """Roundings that log p leaves in a head's gradients: made by two subtractions, where PyTorch
    has one.

    That is half an eps of |log p| more, and Σ p·|log p| is at most log V.
    """
    return 0.5 * math.log(V)


def of_a_logit(dtype, tokens):
    """The same of a mean over tokens on a GPU, which adds in an order of its own: one logit of 16
    bits is rounded to its other neighbour. It is as far from the exact one, on the other side: a
    loss of one token is no worse."""
    if DEVICE == "cpu" or dtype == torch.float32 or tokens == 1:
        return 0
    return torch.finfo(dtype).eps / torch.finfo(torch.float32).eps / tokens


def assert_as_exact_as(draws):
    """Over some draws, since one small draw is luck: never further off than PyTorch's worst and a
    rounding.

    Of the largest value in any of them: where the terms of a sum cancel, it is small, and their
    roundings are not."""
    for k in draws[0]:
        mine, theirs, more, largest = torch.stack([d[k] for d in draws]).amax(0).tolist()
        assert mine <= theirs + more * largest, (
            f"{k}: error {mine / largest:.3g} of the largest, PyTorch's own {theirs / largest:.3g}, and {more:.3g}"
        )


ANYWHERE = pytest.mark.usefixtures("anywhere")  # with the kernels of a head and without
BY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


ALLOCATIONS = (
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten.empty_strided,
    aten.new_empty_strided,
)


class PoisonedEmpty(TorchDispatchMode):
    """Memory that an operator allocates and doesn't write shows up as NaN.

    A mode, and no other function in the place of `torch.empty`: PyTorch looks up what `torch.empty`
    is only once, for what makes tensors under `torch.device(...)`, or what Dynamo traces."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in ALLOCATIONS:
            out.fill_(float("nan") if out.is_floating_point() else -7)
        return out


def run_forward(fn, tensors):
    return outputs(fn(**tensors))


def outputs(out):
    return [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]


def leaves(tensors):
    return {k: t for k, t in tensors.items() if isinstance(t, torch.Tensor) and t.requires_grad}


def spread(t):
    wide = torch.stack((t.detach(), torch.full_like(t, -1)), -1)[..., 0]
    return wide.requires_grad_(t.requires_grad)


def modules():
    """Every module of the operators and of what they stand on."""
    for package in (liger_kernel.core, liger_kernel.ops):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(info.name)
