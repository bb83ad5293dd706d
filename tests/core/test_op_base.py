"""What operators are built on: when memory may be reused, how an op is called, shared kernels and
helpers."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import triton
import triton.language as tl
from functorch.compile import make_boxed_func
from hardware import DEVICE
from memory import Square, backward
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from liger_kernel import _public
from liger_kernel.core import devices, op, reduce, tile
from liger_kernel.core.kernel import LaunchCache
from liger_kernel.core.op import custom_op, may_overwrite
from liger_kernel.ops.norm import rows
from liger_kernel.ops.norm.rms_norm import LigerRMSNormFunction, liger_rms_norm, rms_norm_reference


@pytest.fixture(autouse=True)
def answers():
    Square.answers.clear()
    return Square.answers


@pytest.fixture
def leaf():
    return torch.randn(4, 6, device=DEVICE, requires_grad=True)


def test_overwrites_what_only_the_graph_holds(leaf, answers):
    """If this build of torch counted differently, the answer would always be no, and memory would
    double unnoticed."""
    backward(Square.apply(leaf * 3))
    backward(Square.apply((leaf * 3).view(6, 4)))
    backward(Square.apply((leaf * 3)[1:, ::2]))
    assert answers == [True] * 3
    dx = 18 * leaf.detach()
    torch.testing.assert_close(
        leaf.grad,
        2 * dx + torch.nn.functional.pad(dx[1:, ::2, None], (0, 1, 0, 0, 1, 0)).flatten(1),
    )


AFTER_AN_ERROR_OF_DYNAMOS = """
import torch
from memory import Square, backward

def step():
    leaf = torch.ones(4, 6, requires_grad=True)
    backward(Square.apply(leaf * 3))
    backward(Square.apply((leaf * 3).view(6, 4)))
    held = leaf * 3
    backward(Square.apply(held))

step()
try:
    torch.compile(lambda x: torch._dynamo.graph_break(), backend="eager", fullgraph=True)(torch.ones(2))
except torch._dynamo.exc.Unsupported:
    step()
print(*Square.answers)
"""


@pytest.mark.thorough
def test_overwrites_after_a_compiled_function_that_raised():
    """torch.compile then goes on to evaluate frames, in which a call keeps more references to its
    arguments."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AFTER_AN_ERROR_OF_DYNAMOS], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.stdout.split() == ["True", "True", "False"] * 2, done.stderr


def test_overwrites_a_second_time(leaf, answers):
    """The answer is the same in the second step as in the first."""
    for _ in range(3):
        backward(Square.apply(leaf * 3))
    assert answers == [True] * 3


HOLDERS = {
    "the tensor": lambda x: x,
    "a view": lambda x: x[0],
    "a view of a view": lambda x: x.view(-1)[2:],
    "detached": lambda x: x.detach(),
    "its data": lambda x: x.data,
    "its storage": lambda x: x.untyped_storage(),
    "dlpack": lambda x: torch.utils.dlpack.to_dlpack(x.detach()),
    "a closure": lambda x: lambda: x,
    "a list in a list": lambda x: [[x]],
}
if DEVICE == "cpu":
    HOLDERS["numpy"] = lambda x: x.detach().numpy()


@pytest.mark.parametrize(
    "give", [lambda x: x, lambda x: x.view(6, 4)], ids=["itself", "a view of it"]
)
@pytest.mark.parametrize("holder", HOLDERS)
def test_keeps_what_somebody_holds(holder, give, leaf, answers):
    x = leaf * 3
    held = HOLDERS[holder](x)  # noqa: F841
    given = give(x)
    del x
    out = Square.apply(given)
    del given
    backward(out)
    assert answers == [False], f"{holder} changed under its owner"
    torch.testing.assert_close(leaf.grad, 18 * leaf.detach())


def test_keeps_the_base_of_a_view(leaf, answers):
    x = leaf * 3
    before = x.detach().clone()
    backward(Square.apply(x[1:]))
    assert answers == [False]
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "second",
    [torch.square, lambda x: x * x, lambda x: x.view(-1).sin()],
    ids=["square", "mul", "sin"],
)
@pytest.mark.parametrize("first", [True, False])
def test_keeps_what_another_node_saved(second, first, leaf, answers):
    """Whichever of the two nodes runs its backward first; the sum of both gradients is right."""
    x = leaf * 3
    out = (
        Square.apply(x).sum() + second(x).sum()
        if first
        else second(x).sum() + Square.apply(x).sum()
    )
    del x
    backward(out)
    y = (leaf.detach() * 3).requires_grad_()
    backward(y * y + second(y).view_as(y))
    torch.testing.assert_close(leaf.grad, 3 * y.grad)
    assert len(answers) == 1


PRODUCERS = [
    torch.exp,
    torch.tanh,
    torch.sigmoid,
    torch.relu,
    lambda x: x.softmax(-1),
    lambda x: x.exp().view(6, 4),
]


@pytest.mark.parametrize(
    "make", PRODUCERS, ids=["exp", "tanh", "sigmoid", "relu", "softmax", "a view of exp"]
)
def test_keeps_what_its_maker_saved(make, leaf, answers):
    """Many a node saves its own output, and runs its backward after ours."""
    backward(Square.apply(make(leaf)))
    y = leaf.detach().clone().requires_grad_()
    backward(make(y) ** 2)
    torch.testing.assert_close(leaf.grad, y.grad)
    assert answers == [False]


def test_keeps_the_graph_that_is_kept(leaf, answers):
    out = Square.apply(leaf * 3)
    once = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
    twice = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
    last = torch.autograd.grad(out.sum(), leaf)
    assert answers == [False, False, True]
    assert torch.equal(once[0], twice[0]) and torch.equal(once[0], last[0])
    with pytest.raises(RuntimeError, match="second time"):
        backward(out)


def test_keeps_the_graph_of_a_gradient(leaf, answers):
    torch.autograd.grad(Square.apply(leaf * 3).sum(), leaf, create_graph=True)
    assert answers == [False]


def test_keeps_leaves_and_constants(leaf, answers):
    before = leaf.detach().clone()
    backward(Square.apply(leaf))
    assert answers == [False]
    assert torch.equal(leaf, before)


class Scale(torch.autograd.Function):
    """x·c, differentiable in x alone; asks about c."""

    @staticmethod
    def forward(ctx, x, c):
        ctx.save_for_backward(c)
        return x * c

    @staticmethod
    def backward(ctx, dy):
        (c,) = ctx.saved_tensors
        Square.answers.append(may_overwrite(ctx, c))
        return dy * c, None


def test_keeps_what_has_no_gradient(leaf, answers):
    backward(Scale.apply(leaf, torch.ones(4, 6, device=DEVICE)))
    assert answers == [False]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant, leaf):
    """Recomputed in backward, where it may be overwritten or not, but never so that a gradient is
    wrong."""
    backward(
        checkpoint(
            lambda x: Square.apply(Square.apply(x * 3) + 1), leaf * 1, use_reentrant=reentrant
        )
    )
    y = leaf.detach().clone().requires_grad_()
    backward(((y * 3) ** 2 + 1) ** 2)
    torch.testing.assert_close(leaf.grad, y.grad)


def test_saved_tensor_hooks(leaf):
    """What a hook gives back may be a copy or the very tensor that it keeps; then it is still the
    hook's."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or len(kept) - 1, lambda i: kept[i]
    ):
        out = Square.apply(leaf * 3)
    before = [t.detach().clone() for t in kept]
    backward(out)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    torch.testing.assert_close(leaf.grad, 18 * leaf.detach())


def test_in_a_thread(leaf, answers):
    thread = threading.Thread(target=lambda: backward(Square.apply(leaf * 3)))
    thread.start()
    thread.join()
    x = leaf * 3
    thread = threading.Thread(target=backward, args=(Square.apply(x),))
    thread.start()
    thread.join()
    assert answers == [True, False]


def test_a_later_use_raises(leaf):
    """A node that saved the same memory sees that it changed: an error, not a wrong gradient."""

    class Careless(Square):
        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            x.copy_(2 * x * dy)
            torch.autograd.graph.increment_version(x)
            return x

    x = leaf * 3
    square = x * x
    backward(Careless.apply(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(square)


# ---- custom_op, Function ---------------------------------------------------------------------------------------------


@custom_op("twice_of_a_test", torch.empty_like)
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_eager_call_is_straight():
    with Dispatched() as seen:
        twice(torch.ones(2))
        twice.op(torch.ones(2))
    assert seen.names.count("liger.twice_of_a_test.default") == 1, seen.names


def targets(fn, *args):
    """The names of the nodes in the graphs that torch.compile makes of a call and of its
    backward."""
    found = []

    def note(graph, inputs):
        found.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    torch.compile(fn, fullgraph=True, backend=aot_autograd(fw_compiler=note))(
        *args
    ).sum().backward()
    return found


def test_a_compiled_call_is_one_node():
    x = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    w = torch.randn(8, device=DEVICE, requires_grad=True)
    found = targets(liger_rms_norm, x, w)
    assert found.count("liger.norm.default") == found.count("liger.norm_backward.default") == 1, (
        found
    )


class Launches:
    """In place of a kernel: notes its arguments and launches it."""

    def __init__(self, kernel):
        self.kernel, self.arguments = kernel, []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.arguments.append(args)
            return self.kernel[grid](*args, **kwargs)

        return launch


def test_compiled_floats_stay_floats(monkeypatch):
    """A float that torch.compile makes dynamic must not become an fp64 tensor that a kernel
    loads."""
    kernel = Launches(rows._fwd)
    monkeypatch.setattr(rows, "_fwd", kernel)
    monkeypatch.setattr(rows, "_forwards", LaunchCache())
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, eps: liger_rms_norm(x, None, eps), backend="aot_eager", fullgraph=True
    )
    x = torch.randn(3, 8, device=DEVICE)
    for eps in (1e-6, 1e-5, 1e-1, 0.5):
        torch.testing.assert_close(compiled(x, eps), rms_norm_reference(x, None, eps))
    scalars = [
        a
        for args in kernel.arguments
        for a in args
        if not isinstance(a, torch.Tensor) and a is not None
    ]
    assert {type(a) for a in scalars} == {int, float}
    assert {1e-6, 1e-5, 1e-1, 0.5} <= {a for a in scalars if isinstance(a, float)}


def test_without_kernels_an_operator_is_its_reference(reference_only, monkeypatch):
    """For a user without a GPU, also through the Function, with autograd's own gradients."""
    monkeypatch.setattr(rows, "_forwards", None)
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    want = rms_norm_reference(x, w)
    for got in (LigerRMSNormFunction.apply(x, w, 1e-6), liger_rms_norm(x, w)):
        assert torch.equal(got, want)
        got, expected = (
            torch.autograd.grad(y.square().sum(), (x, w), retain_graph=True) for y in (got, want)
        )
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with pytest.raises(
        RuntimeError, match="LigerRMSNormFunction: no Triton kernels for a tensor on cpu"
    ):
        devices.require_kernels("LigerRMSNormFunction", x)


def test_nothing_is_saved_without_need():
    x, w = torch.randn(3, 8, device=DEVICE, requires_grad=True), torch.ones(8, device=DEVICE)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.no_grad():
            assert not liger_rms_norm(x, w).requires_grad
        with torch.inference_mode():
            liger_rms_norm(x, w)
        assert not liger_rms_norm(x.detach(), w).requires_grad
        assert not saved
        assert liger_rms_norm(x, w).requires_grad
        assert saved


def test_warps_of_a_program_are_limited(monkeypatch):
    x = torch.empty(1)
    monkeypatch.setattr(devices, "_properties", lambda kind, index: ("gfx942", 304, 16, 0))
    assert [devices.warps(n, x) for n in (0, 1, 8, 32)] == [1, 1, 8, 16]
    assert (devices.arch(x), devices.multiprocessors(x)) == ("gfx942", 304)


def test_public_paths_are_installed_once():
    import sys

    _public.install()
    assert sum(isinstance(finder, _public._Finder) for finder in sys.meta_path) == 1


def test_cases_have_distinct_names():
    names = [case.name for case in op.CASES]
    assert len(names) == len(set(names))


# ---- shared kernels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (64, 32), (200, 33), (65, 100)], ids=str)
def test_sum_rows(shape, dtype):
    """Summed in fp32 and rounded once."""
    x = torch.randn(shape, device=DEVICE) + 1
    out = torch.full((shape[1],), float("nan"), device=DEVICE, dtype=dtype)
    reduce.sum_rows(x, out)
    exact = x.double().sum(0)
    bound = exact.abs() * torch.finfo(dtype).eps / 2 + x.double().abs().sum(0) * len(x) * 2**-24
    assert ((out.double() - exact).abs() <= bound).all()


@triton.jit
def _apply(x_ptr, y_ptr, N, F: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value, slope = F(tl.load(x_ptr + i, mask=i < N))
    tl.store(y_ptr + i, slope if SLOPE else value, mask=i < N)


FUNCTIONS = {
    "tanh": (tile.tanh, False, torch.tanh),
    "its slope": (tile.tanh, True, lambda x: 1 / x.cosh().square()),
    "sigmoid": (tile.sigmoid, False, torch.sigmoid),
    "sigmoid's slope": (tile.sigmoid, True, lambda x: torch.sigmoid(x) * torch.sigmoid(-x)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_accurate(name):
    """Relative error of a few roundings over the whole range, where both tails underflow and where
    series meet.

    A GPU's exp rounds x·log2(e) first, so that its relative error grows with x.
    """
    mine, slope, exact = FUNCTIONS[name]
    half = torch.cat(
        (torch.logspace(-30, 1.6, 2000), torch.linspace(0, 12, 2000), torch.linspace(0.2, 0.5, 500))
    )
    x = torch.cat((-half, half)).to(DEVICE)
    y = torch.empty_like(x)
    _apply[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), F=mine, SLOPE=slope, BLOCK=1024)
    want = exact(x.double())
    error = (y.double() - want).abs() / want.abs().clamp(min=1e-37) / (5e-7 + 2e-7 * x.abs())
    assert error.max() < 1, f"{error.max():.2f} of what is allowed, at {x[error.argmax()]}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_at_the_ends(name):
    mine, slope, exact = FUNCTIONS[name]
    x = torch.tensor(
        [0.0, -0.0, 200.0, -200.0, float("inf"), -float("inf"), float("nan")], device=DEVICE
    )
    y = torch.empty_like(x)
    _apply[(1,)](x, y, x.numel(), F=mine, SLOPE=slope, BLOCK=8)
    torch.testing.assert_close(y, exact(x.double()).float(), rtol=0, atol=1e-37, equal_nan=True)
