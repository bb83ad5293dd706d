"""Gated RMSNorm beyond its `Case`: groups, strides, where it rounds, dtypes, the module, errors."""

import itertools

import numpy
import pytest
import torch
from hardware import DEVICE

from liger_kernel.core import devices
from liger_kernel.ops.norm import gated_rows
from liger_kernel.ops.norm.gated_rms_norm import gated_rms_norm_reference, liger_gated_rms_norm
from liger_kernel.ops.norm.rms_norm import rms_norm_reference
from liger_kernel.transformers import LigerGatedRMSNorm

BEFORE = pytest.mark.parametrize("before", [True, False])


def drawn(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(shape).to(DEVICE, dtype).requires_grad_() for shape in shapes]


@BEFORE
@pytest.mark.parametrize("size", [4, 24])
def test_groups_are_rows_by_themselves(size, before):
    x, gate, w = drawn((3, 24), (3, 24), (24,))
    y = liger_gated_rms_norm(x, gate, w, norm_before_gate=before, group_size=size)
    parts = [
        liger_gated_rms_norm(*(t[..., i : i + size] for t in (x, gate, w)), norm_before_gate=before)
        for i in range(0, 24, size)
    ]
    torch.testing.assert_close(y, torch.cat(parts, -1))
    dy = torch.randn_like(y)
    for got, want in zip(
        *(torch.autograd.grad(out, (x, gate, w), dy) for out in (y, torch.cat(parts, -1))),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_many_rows_of_groups():
    """More rows than programs, so that the weight's gradient is a sum of sums."""
    tensors = drawn((70, 96), (70, 96), (96,))
    outs = [fn(*tensors, group_size=48) for fn in (liger_gated_rms_norm, gated_rms_norm_reference)]
    for got, want in zip(
        *(torch.autograd.grad(out.sin().sum(), tensors) for out in outs), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [100, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@BEFORE
def test_16_bits_are_as_near_as_pytorchs(before, dtype, width):
    """silu has kernels of its own there, a narrow weight is loaded for each row, and 8,192 columns
    are read once."""
    given = drawn((3, width), (3, width), (width,), dtype=dtype)
    with torch.no_grad():
        given[1].mul_(4)
    dy = torch.randn_like(given[0])

    def found(fn, tensors):
        y = fn(*tensors, norm_before_gate=before)
        return [y, *torch.autograd.grad(y, tensors, dy.to(y.dtype))]

    exact = found(gated_rms_norm_reference, [t.detach().double().requires_grad_() for t in given])
    every = zip(
        *(found(fn, given) for fn in (liger_gated_rms_norm, gated_rms_norm_reference)),
        exact,
        strict=True,
    )
    for ours, pytorchs, right in every:
        allowed = (pytorchs - right).norm() + torch.finfo(dtype).eps * right.norm() / 16
        assert (ours - right).norm() <= allowed


def test_a_large_gate_leaves_the_norm():
    """silu(g) is then g, which the norm takes out again, and σ(g) is 1."""
    x, gate, w = drawn((3, 16), (3, 16), (16,))
    large = torch.full_like(gate, 1e3)
    want = rms_norm_reference(x, w)
    torch.testing.assert_close(liger_gated_rms_norm(x, large, w, activation="sigmoid"), want)
    torch.testing.assert_close(
        liger_gated_rms_norm(x, large, w, norm_before_gate=False), want, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(liger_gated_rms_norm(x, large, w), 1e3 * want)


@BEFORE
def test_a_gate_beside_other_columns(before):
    """As a projection gives it, together with what the state is made of."""
    x, columns, w = drawn((2, 5, 16), (2, 5, 50), (16,))
    gate = columns[..., 3:19]
    got, want = (
        torch.autograd.grad(fn(x, gate, w, norm_before_gate=before).sin().sum(), (x, columns, w))
        for fn in (liger_gated_rms_norm, gated_rms_norm_reference)
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@BEFORE
@pytest.mark.parametrize("casting", ["llama", "gemma"])
@pytest.mark.parametrize("weight", [torch.float16, torch.float32, None])
def test_rounds_where_hugging_face_does(weight, casting, before):
    """Sums of another order flip a rounding now and then; one rounding more or less would do it
    everywhere."""
    x, gate, w = (t.detach() for t in drawn((30, 400), (30, 400), (400,), dtype=torch.float16))
    given = x, gate, None if weight is None else w.to(weight), 1e-6, casting, before
    assert (liger_gated_rms_norm(*given) != gated_rms_norm_reference(*given)).float().mean() < 0.02


def test_dtypes_may_differ():
    for dtypes in itertools.permutations((torch.bfloat16, torch.float32, torch.float16)):
        tensors = [
            t.detach().to(d).requires_grad_()
            for t, d in zip(drawn((3, 8), (3, 8), (8,)), dtypes, strict=True)
        ]
        y = liger_gated_rms_norm(*tensors)
        grads = torch.autograd.grad(y.float().sum(), tensors)
        assert y.dtype == dtypes[0] and tuple(g.dtype for g in grads) == dtypes


@pytest.mark.parametrize("kilobytes", [99, 163, 227])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [128, 4096, 8192])
def test_backwards_loads_fit_into_shared_memory(width, dtype, kilobytes, monkeypatch):
    """Of a gate in fp32 beside x in bf16, too: RTX 3090 and 4090 have 99 KB, A100 163, H100 227."""
    launched = []

    class Noted:
        def __getitem__(self, grid):
            return lambda *tensors, **constants: launched.append(constants)

    x, gate = drawn((3, width), (3, width), dtype=torch.bfloat16)
    y = liger_gated_rms_norm(x, gate.to(dtype))
    monkeypatch.setattr(gated_rows, "_bwd", Noted())
    monkeypatch.setattr(
        devices, "_properties", lambda kind, index: ("sm_89", 128, 32, kilobytes * 1024)
    )
    torch.autograd.grad(y.float().sum(), x)
    (of,) = launched
    loaded = of["BLOCK_M"] * of["BLOCK_N"] * (2 * x.element_size() + dtype.itemsize)
    assert of["STAGES"] == 1 or of["STAGES"] * loaded <= kilobytes * 1024


def test_module():
    module = LigerGatedRMSNorm(8).to(DEVICE)
    assert list(module.state_dict()) == ["weight"] and module.weight.eq(1).all()
    assert (module.variance_epsilon, module.casting_mode, module.norm_before_gate) == (
        1e-6,
        "llama",
        True,
    )
    assert (module.group_size, module.activation) == (None, "silu")
    x, gate = drawn((2, 3, 8), (2, 3, 8))
    assert torch.equal(module(x, gate), liger_gated_rms_norm(x, gate, module.weight))
    other = LigerGatedRMSNorm(8, 1e-5, "gemma", False, 4, "sigmoid").to(DEVICE)
    assert torch.equal(
        other(x, gate),
        liger_gated_rms_norm(x, gate, other.weight, 1e-5, "gemma", False, 4, "sigmoid"),
    )
    assert "gate before norm, sigmoid, groups of 4" in repr(other)


def test_errors():
    x, gate, w = drawn((2, 3, 8), (2, 3, 8), (8,))
    for given, kind, message in (
        (dict(gate=gate[..., :1]), ValueError, r"gate has shape \(2, 3, 1\), give \(2, 3, 8\)"),
        (dict(gate=None), TypeError, "gate is None, give a tensor"),
        (dict(gate=gate.long()), TypeError, "gate is torch.int64"),
        (dict(x=x.sum(), gate=gate.sum()), ValueError, "X has no dimension"),
        (dict(weight=w[:4]), ValueError, r"weight has shape \(4,\), hidden size is 8"),
        (dict(group_size=3), ValueError, "group_size is 3, give a divisor of the hidden size, 8"),
        (dict(group_size=0), ValueError, "group_size is 0"),
        (dict(group_size=4.0), TypeError, "group_size is 4.0, give an int"),
        (dict(casting_mode="none"), ValueError, "casting_mode is 'none', give 'llama' or 'gemma'"),
        (dict(activation="gelu"), ValueError, "activation is 'gelu', give 'silu' or 'sigmoid'"),
        (dict(norm_before_gate=1), TypeError, "norm_before_gate is 1, give True or False"),
        (dict(eps=-1e-6), ValueError, "eps is -1e-06"),
    ):
        with pytest.raises(kind, match=f"liger_gated_rms_norm: {message}"):
            liger_gated_rms_norm(**dict(x=x, gate=gate, weight=w) | given)
    with pytest.raises(ValueError, match="LigerGatedRMSNorm: group_size is 3, give a divisor"):
        LigerGatedRMSNorm(8, group_size=3)


def test_a_group_size_of_numpy():
    x, gate = drawn((5, 24), (5, 24))
    want = liger_gated_rms_norm(x, gate, group_size=4)
    assert torch.equal(liger_gated_rms_norm(x, gate, group_size=numpy.int64(4)), want)
