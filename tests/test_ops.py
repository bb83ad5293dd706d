"""Every operator's `Case`: against float64 in three dtypes, error bounded by that of the PyTorch code it replaces."""

import os

import pytest
import torch
from conftest import DEVICE

import liger_kernel.ops  # noqa: F401  (fills CASES)
from liger_kernel.ops._op import CASES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def given(case, shape, option, dtype=torch.float32):
    """The case's inputs, drawn on the CPU from one seed, on the device and in the dtype tested."""
    torch.manual_seed(0)
    return cast({**case.inputs(*shape), **option}, dtype)


def cast(tensors, dtype):
    def one(t):
        if not isinstance(t, torch.Tensor):
            return t
        moved = t.detach().to(DEVICE, dtype if t.is_floating_point() else None)
        return moved.clone().requires_grad_(t.requires_grad)

    return {name: one(t) for name, t in tensors.items()}


def run(fn, tensors):
    """fn's outputs and the gradients of everything that requires one, twice over the same graph."""
    out = fn(**tensors)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]
    leaves = {k: t for k, t in tensors.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    differentiable = [o for o in outs if o.requires_grad]
    g = torch.Generator().manual_seed(0)
    dys = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.device, o.dtype) for o in differentiable]
    once = torch.autograd.grad(differentiable, list(leaves.values()), dys, retain_graph=True)
    twice = torch.autograd.grad(differentiable, list(leaves.values()), dys)
    named = {f"output {i}": o.detach() for i, o in enumerate(outs)}
    return named | {f"d{k}": d for k, d in zip(leaves, once, strict=True)}, once, twice


def assert_as_exact_as(got, plain, exact, dtype):
    """No further from fp64 than PyTorch's own result, plus one rounding of the largest value."""
    for k, e in exact.items():
        assert got[k].dtype == plain[k].dtype and got[k].shape == e.shape, k
        if not e.is_floating_point() or e.numel() == 0:
            assert torch.equal(got[k], e.to(got[k].dtype)), k
            continue
        mine, theirs = ((a[k].double() - e).abs().max() for a in (got, plain))
        floor = torch.finfo(got[k].dtype).eps * e.abs().max()
        assert mine <= theirs + floor, f"{k}: error {mine:.3g}, PyTorch's own {theirs:.3g}, one rounding {floor:.3g}"


EVERY = [
    pytest.param(c, s, o, id=f"{c.name}-{'x'.join(map(str, s))}-{'-'.join(f'{k}={v}' for k, v in o.items()) or 'plain'}")
    for c in CASES
    for s in c.shapes
    for o in c.options
]
BY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case,shape,option", EVERY)
def test_against_float64(case, shape, option, dtype, monkeypatch):
    poison_empty(monkeypatch)
    tensors = given(case, shape, option, dtype)
    before = {k: t.detach().clone() for k, t in tensors.items() if isinstance(t, torch.Tensor)}
    got, once, twice = run(case.fn, tensors)
    monkeypatch.undo()
    plain, *_ = run(case.reference, cast(tensors, dtype))
    exact, *_ = run(case.reference, cast(tensors, torch.float64))
    assert_as_exact_as(got, plain, exact, dtype)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True)), "a second backward differs"
    for k, t in before.items():
        assert torch.equal(tensors[k], t), f"{k} was written to"


def poison_empty(monkeypatch):
    """Memory that an operator allocates and doesn't write shows up as NaN."""

    def poisoned(allocate):
        def call(*args, **kwargs):
            t = allocate(*args, **kwargs)
            return t.fill_(float("nan")) if t.is_floating_point() else t.fill_(-7)

        return call

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_strided", poisoned(torch.empty_strided))


@BY_CASE
def test_non_contiguous(case):
    """Every input as a strided view, the incoming gradient too: the same result as for contiguous ones."""
    tensors = given(case, case.shapes[-2], {})
    strided = {k: spread(t) if isinstance(t, torch.Tensor) and t.dim() else t for k, t in tensors.items()}
    got, *_ = run(case.fn, strided)
    want, *_ = run(case.fn, tensors)
    for k in want:
        torch.testing.assert_close(got[k], want[k], rtol=1e-5, atol=1e-6)


def spread(t):
    wide = torch.stack((t.detach(), torch.full_like(t, -1)), -1)[..., 0]
    return wide.requires_grad_(t.requires_grad)


@BY_CASE
def test_compiles_whole(case):
    torch._dynamo.reset()
    compiled = torch.compile(case.fn, fullgraph=True, backend="aot_eager")
    for option in case.options:
        got, *_ = run(compiled, given(case, case.shapes[1], option))
        want, *_ = run(case.fn, given(case, case.shapes[1], option))
        for k in want:
            torch.testing.assert_close(got[k], want[k], rtol=1e-6, atol=1e-6)


def test_interpreter_runs_the_kernels():
    """These tests are worth nothing if the operators quietly take the reference."""
    from liger_kernel.ops import _device

    assert _device.has_kernels(torch.empty(1, device=DEVICE)), os.environ.get("TRITON_INTERPRET")
