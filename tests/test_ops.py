"""Every operator's `Case`: against float64 in three dtypes, error bounded by that of the PyTorch code it replaces."""

import contextlib
import itertools
import math
import os

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel.core.op import CASES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    leaves = {k: t for k, t in tensors.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    differentiable = [o for o in outs if o.requires_grad]
    g = torch.Generator().manual_seed(0)
    dys = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.device, o.dtype) for o in differentiable]
    dys = [spread(dy) for dy in dys] if strided else dys
    once = torch.autograd.grad(differentiable, list(leaves.values()), dys, retain_graph=True)
    twice = torch.autograd.grad(differentiable, list(leaves.values()), dys)
    named = {f"output {i}": o.detach() for i, o in enumerate(outs)}
    return named | {f"d{k}": d for k, d in zip(leaves, once, strict=True)}, once, twice


aten = torch.ops.aten
PRODUCTS = aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm


class ExactProducts(TorchDispatchMode):
    """Every matrix product of fp32 made in fp64 and rounded once, ours and PyTorch's own.

    BLAS adds up in an order that depends on the processor, on its threads and on where a matrix lies in memory: the
    same two products may differ by several roundings. That order is not the operator's; whatever else it adds is.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = dict(kwargs or {}), func.overloadpacket
        if packet not in PRODUCTS or args[-1].dtype != torch.float32:
            return func(*args, **kwargs)
        out = args[0] if packet is aten.addmm_ else kwargs.pop("out", None)
        exact = (aten.addmm if packet is aten.addmm_ else packet)(*(a.double() for a in args), **kwargs)
        return exact.float() if out is None else out.copy_(exact)


def as_on_any_processor():
    """On a GPU nothing is replaced: there the operators are tested with the products that they get."""
    return ExactProducts() if DEVICE == "cpu" else contextlib.nullcontext()


class LikeTheHead(TorchFunctionMode):
    """Has a linear's result, and the gradient that comes back to it, in the memory layout of our head: column-major."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, bias = args
        elif func is torch.Tensor.matmul:
            x, weight, bias = args[0], args[1].mT, None
        else:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        y = torch.mm(weight, x.mT) if bias is None else torch.addmm(bias[:, None], weight, x.mT)
        if y.requires_grad:
            y.register_hook(torch.Tensor.contiguous)
        return y.mT


def run_plain(reference, tensors, dtype, products=True):
    """PyTorch's results in that dtype, in a list: of matrix ``products`` also those in our head's memory layout.

    cuBLAS takes another kernel for another layout, which adds in another order: on an H200 the same dX·W was off by up
    to 5e-7 of the largest in autograd's layout and by up to 1e-6 with an operand in the other. In 16 bits some logits
    are rounded to the other neighbour, and a loss in fp32 shows it.
    """
    with as_on_any_processor():
        found = [run(reference, cast(tensors, dtype))[0]]
    if products:
        with LikeTheHead() as mode, as_on_any_processor():
            found.append(run(reference, cast(tensors, dtype))[0])
        assert mode.calls
    return found


def errors(got, plain, exact, inputs, fp32_roundings=1):
    """For each result its error against fp64, PyTorch's own, what may be added as a share of the largest, and that.

    PyTorch's own is the worst of those in ``plain``: see `run_plain`. What may be added is one rounding, or
    ``fp32_roundings`` where the result is in fp32. An output's largest value is at least the largest input: a loss is a
    difference of logits, each of which was rounded.
    """
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
        more = torch.finfo(got[k].dtype).eps * (fp32_roundings if got[k].dtype == torch.float32 else 1)
        found[k] = torch.stack((mine, torch.stack(theirs).amax(), *mine.new_tensor((more, largest))))
    return found


def of_tanh(softcap=0.0, temperature=1.0, **_):
    """Roundings that a GPU leaves in a logit: our tanh is within 2e-7 there, and a softcap multiplies that."""
    return 2 * softcap / temperature if DEVICE == "cuda" else 0


def of_logarithms(V):
    """Roundings that log p leaves in a head's gradients: made by two subtractions, where PyTorch has one.

    That is half an eps of |log p| more, and Σ p·|log p| is at most log V.
    """
    return 0.5 * math.log(V)


def assert_as_exact_as(draws):
    """Over some draws, since one small draw is luck: never further off than PyTorch's worst and a rounding.

    Of the largest value in any of them: where the terms of a sum cancel, it is small, and their roundings are not.
    """
    for k in draws[0]:
        mine, theirs, more, largest = torch.stack([d[k] for d in draws]).amax(0).tolist()
        assert mine <= theirs + more * largest, (
            f"{k}: error {mine / largest:.3g} of the largest, PyTorch's own {theirs / largest:.3g}, and {more:.3g}"
        )


def every():
    """(case, shape, option, dtype): in `make test` every one of each; the interpreter has all dtypes for some pairs of
    shape and option, and one for each of the others; a GPU has all for all.
    """
    pairs = ((c, *pair) for c in CASES for pair in itertools.product(enumerate(c.shapes), enumerate(c.options)))
    for n, (c, (i, s), (j, o)) in enumerate(pairs):
        some = (i - j) % min(len(c.shapes), len(c.options)) == 0
        option = "-".join(f"{k}={v}" for k, v in o.items()) or "plain"
        for d, dtype in enumerate(DTYPES):
            if DEVICE == "cpu" and not some and d != n % 3:
                continue
            name = f"{str(dtype).removeprefix('torch.')}-{c.name}-{'x'.join(map(str, s))}-{option}"
            yield pytest.param(c, s, o, dtype, id=name, marks=() if some and d == n % 3 else pytest.mark.thorough)


BY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@pytest.mark.parametrize("case,shape,option,dtype", every())
def test_against_float64(case, shape, option, dtype, monkeypatch):
    draws = []
    count = 2 if math.prod(shape) > 1024 else 16 if dtype == torch.float32 else 4
    first = 1 if math.prod(shape) < 16 else 0  # of few entries 0 draws the incoming gradient's, and gradients cancel
    for seed in range(first, first + count):
        tensors = given(case, shape, option, dtype, seed)
        before = {k: t.detach().clone() for k, t in tensors.items() if isinstance(t, torch.Tensor)}
        with monkeypatch.context() as patch, as_on_any_processor():
            poison_empty(patch)
            got, once, twice = run(case.fn, tensors)
        plain = run_plain(case.reference, tensors, dtype, case.flops is not None)
        exact, *_ = run(case.reference, cast(tensors, torch.float64))
        roundings = case.fp32_roundings + of_tanh(**option) + (of_logarithms(shape[-1]) if is_head(case) else 0)
        draws.append(errors(got, plain, exact, before, roundings))
        assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True)), "a second backward differs"
        for k, t in before.items():
            assert torch.equal(tensors[k], t), f"{k} was written to"
    assert_as_exact_as(draws)


def is_head(case):
    return "linear_" in case.name and "glu" not in case.name


def poison_empty(monkeypatch):
    """Memory that an operator allocates and doesn't write shows up as NaN."""

    def poisoned(allocate):
        def call(*args, **kwargs):
            t = allocate(*args, **kwargs)
            with torch.no_grad():
                return t.fill_(float("nan")) if t.is_floating_point() else t.fill_(-7)

        return call

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_strided", poisoned(torch.empty_strided))


@pytest.mark.thorough
@BY_CASE
def test_non_contiguous(case):
    """Every input as a strided view, the incoming gradient too: the same result as for contiguous ones."""
    tensors = given(case, case.shapes[-2], {})
    strided = {k: spread(t) if isinstance(t, torch.Tensor) and t.dim() else t for k, t in tensors.items()}
    for option in case.options:
        got, *_ = run(case.fn, strided | option, strided=True)
        want, *_ = run(case.fn, tensors | option)
        for k in want:
            torch.testing.assert_close(got[k], want[k], rtol=1e-5, atol=1e-6)


@BY_CASE
def test_outputs_may_be_written_to(case):
    """As those of the PyTorch code may: a residual is added in place, say."""
    for o in run_forward(case.fn, given(case, case.shapes[1], {})):
        if o.is_floating_point():
            o.mul_(2)


def run_forward(fn, tensors):
    out = fn(**tensors)
    return [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]


def spread(t):
    wide = torch.stack((t.detach(), torch.full_like(t, -1)), -1)[..., 0]
    return wide.requires_grad_(t.requires_grad)


@BY_CASE
@pytest.mark.thorough
def test_compiles_whole(case):
    torch._dynamo.reset()
    compiled = torch.compile(case.fn, fullgraph=True, backend="aot_eager")
    for option in case.options:
        got, *_ = run(compiled, given(case, case.shapes[1], option))
        want, *_ = run(case.fn, given(case, case.shapes[1], option))
        for k in want:
            torch.testing.assert_close(got[k], want[k], rtol=1e-6, atol=1e-6)


@BY_CASE
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(case, rows):
    """Without a row the outputs are empty or 0, and so are the gradients of what the rows share."""
    shape = (rows, *case.shapes[1][1:])
    for option in ({}, *case.options):
        got, *_ = run(case.fn, given(case, shape, option))
        want, *_ = run(case.reference, given(case, shape, option))
        for k in want:
            torch.testing.assert_close(got[k], want[k], rtol=1e-4, atol=1e-5, equal_nan=True)
            assert rows or not got[k].is_floating_point() or not got[k].nan_to_num().any(), k


@pytest.mark.thorough
@BY_CASE
def test_gradients_for_exactly_what_requires_them(case):
    for option in case.options:
        want, *_ = run(case.fn, given(case, case.shapes[1], option))
        leaves = [k.removeprefix("d") for k in want if not k.startswith("output")]
        for n in range(1, len(leaves)):
            for some in itertools.combinations(leaves, n):
                tensors = given(case, case.shapes[1], option)
                for k in set(leaves) - set(some):
                    tensors[k].requires_grad_(False)
                got, *_ = run(case.fn, tensors)
                assert got.keys() == {k for k in want if k.startswith("output")} | {f"d{k}" for k in some}
                for k in got:
                    torch.testing.assert_close(got[k], want[k], rtol=1e-5, atol=1e-6)


@BY_CASE
def test_without_gradients(case):
    """The same outputs, bit for bit, and they require no gradient.

    But for a head's, whose sums over the classes are of other strips where its logits lie in two parts.
    """
    eps = 4 * torch.finfo(torch.float32).eps if is_head(case) else 0
    for option in case.options:
        tensors = given(case, case.shapes[1], option)
        with as_on_any_processor():
            want = case.fn(**tensors)
            with torch.no_grad():
                got = case.fn(**tensors)
            constant = case.fn(**{k: t.detach() if isinstance(t, torch.Tensor) else t for k, t in tensors.items()})
        for outs in (got, constant):
            pairs = zip(outs, want, strict=True) if isinstance(outs, tuple) else [(outs, want)]
            for a, b in pairs:
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b.detach(), rtol=eps, atol=eps)
                    assert not a.requires_grad


def custom_ops():
    """Every function that `custom_op` made, by the name of its op."""
    found = {}
    for module in modules():
        for value in vars(module).values():
            if isinstance(getattr(value, "op", None), torch.library.CustomOpDef):
                found[value.op._qualname] = value
    return found


@pytest.fixture(scope="module")
def calls():
    """What the operators call their custom ops with: op -> arguments, one call of each kind."""
    found = {name: {} for name in custom_ops()}

    def recorder(name, call):
        def record(*args):
            # one of each combination of None, flags and empty tensors
            kind = tuple(a if isinstance(a, bool) else a is None for a in args)
            found[name].setdefault(kind, args)
            return call(*args)

        return record

    with pytest.MonkeyPatch.context() as patch:
        for name, call in custom_ops().items():
            for module in modules():
                for attribute, value in list(vars(module).items()):
                    if value is call:
                        patch.setattr(module, attribute, recorder(name, call))
        for case in CASES:
            for option in ({}, *case.options):
                run(case.fn, given(case, case.shapes[1], option))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", custom_ops())
def test_opcheck(name, calls):
    """Schema, aliasing, fake kernel and dynamic shapes of every custom op, with real arguments."""
    assert calls[name], f"no Case calls {name}"
    for args in calls[name].values():
        args = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        torch.library.opcheck(custom_ops()[name].op, args)


def test_interpreter_runs_the_kernels():
    """These tests are worth nothing if the operators quietly take the reference."""
    from liger_kernel.core import devices

    assert devices.has_kernels(torch.empty(1, device=DEVICE)), os.environ.get("TRITON_INTERPRET")
