"""Gated RMSNorm beyond its `Case`: groups, strides, where it rounds, dtypes, the module, errors."""

import itertools

import numpy
import pytest
import torch
from hardware import DEVICE

from liger_kernel.core import devices
from liger_kernel.ops.norm import gated_norm_launch
from liger_kernel.ops.norm.gated_rms_norm import gated_rms_norm_reference, liger_gated_rms_norm
from liger_kernel.ops.norm.rms_norm import rms_norm_reference
from liger_kernel.transformers import LigerGatedRMSNorm

BEFORE = pytest.mark.parametrize("before", [True, False])


def random_tensors(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(shape).to(DEVICE, dtype).requires_grad_() for shape in shapes]


@BEFORE
@pytest.mark.parametrize("size", [4, 24])
def test_groups_are_rows_by_themselves(size, before):
    x, gate, w = random_tensors((3, 24), (3, 24), (24,))
    y = liger_gated_rms_norm(x, gate, w, norm_before_gate=before, group_size=size)
    parts = [
        liger_gated_rms_norm(*(t[..., i : i + size] for t in (x, gate, w)), norm_before_gate=before)
        for i in range(0, 24, size)
    ]
    torch.testing.assert_close(y, torch.cat(parts, -1))
    dy = torch.randn_like(y)
    for actual, expected in zip(
        *(torch.autograd.grad(out, (x, gate, w), dy) for out in (y, torch.cat(parts, -1))),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_many_rows_of_groups():
    """More rows than programs, so that the weight's gradient is a sum of sums."""
    tensors = random_tensors((70, 96), (70, 96), (96,))
    outs = [fn(*tensors, group_size=48) for fn in (liger_gated_rms_norm, gated_rms_norm_reference)]
    for actual, expected in zip(
        *(torch.autograd.grad(out.sin().sum(), tensors) for out in outs), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [100, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@BEFORE
def test_16_bits_are_as_near_as_pytorchs(before, dtype, width):
    """silu has kernels of its own there, a narrow weight is loaded for each row, and 8,192 columns
    are read once."""
    inputs = random_tensors((3, width), (3, width), (width,), dtype=dtype)
    with torch.no_grad():
        inputs[1].mul_(4)
    dy = torch.randn_like(inputs[0])

    def output_and_grads(fn, tensors):
        y = fn(*tensors, norm_before_gate=before)
        return [y, *torch.autograd.grad(y, tensors, dy.to(y.dtype))]

    exact = output_and_grads(
        gated_rms_norm_reference, [t.detach().double().requires_grad_() for t in inputs]
    )
    results = zip(
        *(output_and_grads(fn, inputs) for fn in (liger_gated_rms_norm, gated_rms_norm_reference)),
        exact,
        strict=True,
    )
    for actual, reference, exact_result in results:
        rounding = torch.finfo(dtype).eps * exact_result.norm() / 16
        allowed = (reference - exact_result).norm() + rounding
        assert (actual - exact_result).norm() <= allowed


def test_a_large_gate_leaves_the_norm():
    """silu(g) is then g, which the norm takes out again, and σ(g) is 1."""
    x, gate, w = random_tensors((3, 16), (3, 16), (16,))
    large = torch.full_like(gate, 1e3)
    expected = rms_norm_reference(x, w)
    torch.testing.assert_close(liger_gated_rms_norm(x, large, w, activation="sigmoid"), expected)
    torch.testing.assert_close(
        liger_gated_rms_norm(x, large, w, norm_before_gate=False), expected, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(liger_gated_rms_norm(x, large, w), 1e3 * expected)


@BEFORE
def test_a_gate_beside_other_columns(before):
    """As a projection gives it, together with what the state is made of."""
    x, columns, w = random_tensors((2, 5, 16), (2, 5, 50), (16,))
    gate = columns[..., 3:19]
    actual, expected = (
        torch.autograd.grad(fn(x, gate, w, norm_before_gate=before).sin().sum(), (x, columns, w))
        for fn in (liger_gated_rms_norm, gated_rms_norm_reference)
    )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@BEFORE
@pytest.mark.parametrize("casting", ["llama", "gemma"])
@pytest.mark.parametrize("weight", [torch.float16, torch.float32, None])
def test_rounds_where_hugging_face_does(weight, casting, before):
    """Sums of another order flip a rounding now and then; one rounding more or less would do it
    everywhere."""
    x, gate, w = (
        t.detach() for t in random_tensors((30, 400), (30, 400), (400,), dtype=torch.float16)
    )
    args = x, gate, None if weight is None else w.to(weight), 1e-6, casting, before
    assert (liger_gated_rms_norm(*args) != gated_rms_norm_reference(*args)).float().mean() < 0.02


def test_dtypes_may_differ():
    for dtypes in itertools.permutations((torch.bfloat16, torch.float32, torch.float16)):
        tensors = [
            t.detach().to(d).requires_grad_()
            for t, d in zip(random_tensors((3, 8), (3, 8), (8,)), dtypes, strict=True)
        ]
        y = liger_gated_rms_norm(*tensors)
        grads = torch.autograd.grad(y.float().sum(), tensors)
        assert y.dtype == dtypes[0] and tuple(g.dtype for g in grads) == dtypes


@pytest.mark.parametrize("kilobytes", [99, 163, 227])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [128, 4096, 8192])
def test_backwards_loads_fit_into_shared_memory(width, dtype, kilobytes, monkeypatch):
    """RTX 3090 and 4090 have 99 KB, A100 163, H100 227. A gate may be fp32 beside x in bf16."""
    launches = []

    class RecordLaunches:
        def __getitem__(self, grid):
            return lambda *tensors, **constants: launches.append(constants)

    x, gate = random_tensors((3, width), (3, width), dtype=torch.bfloat16)
    y = liger_gated_rms_norm(x, gate.to(dtype))
    monkeypatch.setattr(gated_norm_launch, "gated_norm_bwd_kernel", RecordLaunches())
    monkeypatch.setattr(
        devices, "_properties", lambda kind, index: ("sm_89", 128, 32, kilobytes * 1024)
    )
    torch.autograd.grad(y.float().sum(), x)
    (constants,) = launches
    loaded_bytes = (
        constants["BLOCK_M"] * constants["BLOCK_N"] * (2 * x.element_size() + dtype.itemsize)
    )
    assert (
        constants["NUM_STAGES"] == 1 or constants["NUM_STAGES"] * loaded_bytes <= kilobytes * 1024
    )


def test_module():
    module = LigerGatedRMSNorm(8).to(DEVICE)
    assert list(module.state_dict()) == ["weight"] and module.weight.eq(1).all()
    assert (module.variance_epsilon, module.casting_mode, module.norm_before_gate) == (
        1e-6,
        "llama",
        True,
    )
    assert (module.group_size, module.activation) == (None, "silu")
    x, gate = random_tensors((2, 3, 8), (2, 3, 8))
    assert torch.equal(module(x, gate), liger_gated_rms_norm(x, gate, module.weight))
    grouped = LigerGatedRMSNorm(8, 1e-5, "gemma", False, 4, "sigmoid").to(DEVICE)
    assert torch.equal(
        grouped(x, gate),
        liger_gated_rms_norm(x, gate, grouped.weight, 1e-5, "gemma", False, 4, "sigmoid"),
    )
    assert "gate before norm, sigmoid, groups of 4" in repr(grouped)


def test_errors():
    x, gate, w = random_tensors((2, 3, 8), (2, 3, 8), (8,))
    for change, error, message in (
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
        with pytest.raises(error, match=f"liger_gated_rms_norm: {message}"):
            liger_gated_rms_norm(**dict(x=x, gate=gate, weight=w) | change)
    with pytest.raises(ValueError, match="LigerGatedRMSNorm: group_size is 3, give a divisor"):
        LigerGatedRMSNorm(8, group_size=3)


def test_a_group_size_of_numpy():
    x, gate = random_tensors((5, 24), (5, 24))
    expected = liger_gated_rms_norm(x, gate, group_size=4)
    assert torch.equal(liger_gated_rms_norm(x, gate, group_size=numpy.int64(4)), expected)
