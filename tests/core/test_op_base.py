"""What operators are built on: how an op is called, shared kernels and helpers."""

import pytest
import torch
import triton
import triton.language as tl
from functorch.compile import make_boxed_func
from hardware import DEVICE
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel import _public
from liger_kernel.core import devices, op, reduce, tile
from liger_kernel.core.kernel import LaunchCache
from liger_kernel.core.op import custom_op
from liger_kernel.ops.norm import norm_kernels
from liger_kernel.ops.norm.rms_norm import LigerRMSNormFunction, liger_rms_norm, rms_norm_reference

# ---- custom_op, Function ----


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
    with Dispatched() as dispatched:
        twice(torch.ones(2))
        twice.op(torch.ones(2))
    assert dispatched.names.count("liger.twice_of_a_test.default") == 1, dispatched.names


def targets(fn, *args):
    """The names of the nodes in the graphs that torch.compile makes of a call and of its
    backward."""
    names = []

    def compile_graph(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    torch.compile(fn, fullgraph=True, backend=aot_autograd(fw_compiler=compile_graph))(
        *args
    ).sum().backward()
    return names


def test_a_compiled_call_is_one_node():
    x = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    w = torch.randn(8, device=DEVICE, requires_grad=True)
    names = targets(liger_rms_norm, x, w)
    assert names.count("liger.norm.default") == 1, names
    assert names.count("liger.norm_backward.default") == 1, names


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
    kernel = Launches(norm_kernels._fwd)
    monkeypatch.setattr(norm_kernels, "_fwd", kernel)
    monkeypatch.setattr(norm_kernels, "_fwd_launches", LaunchCache())
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
    monkeypatch.setattr(norm_kernels, "_fwd_launches", None)
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    expected = rms_norm_reference(x, w)
    expected_grads = torch.autograd.grad(expected.square().sum(), (x, w), retain_graph=True)
    for output in (LigerRMSNormFunction.apply(x, w, 1e-6), liger_rms_norm(x, w)):
        assert torch.equal(output, expected)
        grads = torch.autograd.grad(output.square().sum(), (x, w))
        assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True))
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
    assert [devices.limit_warps(n, x) for n in (0, 1, 8, 32)] == [1, 1, 8, 16]
    assert (devices.arch(x), devices.multiprocessors(x)) == ("gfx942", 304)


def test_public_paths_are_installed_once():
    import sys

    _public.install()
    assert sum(isinstance(finder, _public._Finder) for finder in sys.meta_path) == 1


def test_cases_have_distinct_names():
    names = [case.name for case in op.CASES]
    assert len(names) == len(set(names))


# ---- shared kernels ----


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
    function, is_slope, exact = FUNCTIONS[name]
    half = torch.cat(
        (torch.logspace(-30, 1.6, 2000), torch.linspace(0, 12, 2000), torch.linspace(0.2, 0.5, 500))
    )
    x = torch.cat((-half, half)).to(DEVICE)
    y = torch.empty_like(x)
    _apply[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), F=function, SLOPE=is_slope, BLOCK=1024)
    expected = exact(x.double())
    error = (
        (y.double() - expected).abs() / expected.abs().clamp(min=1e-37) / (5e-7 + 2e-7 * x.abs())
    )
    assert error.max() < 1, f"{error.max():.2f} of what is allowed, at {x[error.argmax()]}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_at_the_ends(name):
    function, is_slope, exact = FUNCTIONS[name]
    x = torch.tensor(
        [0.0, -0.0, 200.0, -200.0, float("inf"), -float("inf"), float("nan")], device=DEVICE
    )
    y = torch.empty_like(x)
    _apply[(1,)](x, y, x.numel(), F=function, SLOPE=is_slope, BLOCK=8)
    torch.testing.assert_close(y, exact(x.double()).float(), rtol=0, atol=1e-37, equal_nan=True)
