"""Helpers of the published package that frameworks import, called as the frameworks call them."""

import importlib.util
import operator

import pytest
import torch
import triton
import triton.language as tl
from hardware import DEVICE

from liger_kernel import utils
from liger_kernel.ops.backends.registry import IMPL_REGISTRY
from liger_kernel.ops.norm import rms_norm
from liger_kernel.ops.rotary import rope
from liger_kernel.ops.utils import (
    calculate_settings,
    compare_version,
    ensure_contiguous,
    torch_to_triton_dtype,
)

F64 = torch.float64


# ---- VeOmni: the kernels without autograd ----


class Norm(torch.autograd.Function):
    """RMSNorm as sequence parallelism calls it: forward's results go to backward in this order."""

    @staticmethod
    def forward(ctx, x, w, offset, casting_mode):
        y, rows, rstd, *settings = rms_norm.rms_norm_forward(x, w, 1e-6, offset, casting_mode, None)
        ctx.save_for_backward(rows, w, rstd)
        ctx.offset = offset
        ctx.block_size, ctx.num_warps, ctx.casting_mode = settings
        return y

    @staticmethod
    def backward(ctx, dy):
        settings = ctx.casting_mode, ctx.block_size, ctx.num_warps
        dx, dw = rms_norm.rms_norm_backward(
            dy, *ctx.saved_tensors, ctx.offset, *settings, False, None
        )
        return dx, dw, None, None


def results(fn, tensors, dy):
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = fn(*tensors)
    return [out, *torch.autograd.grad(out, tensors, dy)]


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("casting,offset", [("llama", 0.0), ("gemma", 1.0), ("none", 0.5)])
def test_rms_norm(casting, offset, layout):
    """The results equal the operator's, bit for bit, and those of autograd through the formula."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 40, device=DEVICE)
    w = torch.randn(40, device=DEVICE)
    dy = torch.randn(2, 3, 40, device=DEVICE)
    if layout == "strided":
        x, dy = (torch.cat((t, t), -1)[..., :40] for t in (x, dy))
    before = x.clone(), dy.clone()
    outputs = results(lambda x, w: Norm.apply(x, w, offset, casting), (x, w), dy)
    operator_outputs = results(
        lambda *t: rms_norm.liger_rms_norm(*t, 1e-6, offset, casting), (x, w), dy
    )
    for output, expected in zip(outputs, operator_outputs, strict=True):
        assert torch.equal(output, expected)
    exact_outputs = results(
        lambda *t: rms_norm.rms_norm_reference(*t, 1e-6, offset, casting),
        (x.to(F64), w.to(F64)),
        dy.to(F64),
    )
    for output, exact in zip(outputs, exact_outputs, strict=True):
        torch.testing.assert_close(output, exact.float())
    assert torch.equal(x, before[0]) and torch.equal(dy, before[1])


def test_rms_norm_without_a_weight():
    x, dy = torch.randn(3, 40, device=DEVICE), torch.randn(3, 40, device=DEVICE)
    y, rows, rstd, block_size, num_warps, casting = rms_norm.rms_norm_forward(
        x, None, 1e-6, 0.0, "llama", None
    )
    dx, dw = rms_norm.rms_norm_backward(
        dy, rows, None, rstd, 0.0, casting, block_size, num_warps, True, None
    )
    expected_y, expected_dx = results(lambda x: rms_norm.liger_rms_norm(x, None), (x,), dy)
    assert torch.equal(y, expected_y) and torch.equal(dx, expected_dx) and dw is None


def test_rms_norm_refuses_wrong_arguments():
    x, w = torch.randn(3, 40, device=DEVICE), torch.randn(40, device=DEVICE)
    with pytest.raises(
        ValueError, match="rms_norm_forward: casting_mode is 0, give one of none, llama, gemma"
    ):
        rms_norm.rms_norm_forward(x, w, 1e-6, 0.0, 0, None)
    _, rows, rstd, *rest = rms_norm.rms_norm_forward(x, w, 1e-6, 0.0, "gemma", None)
    with pytest.raises(ValueError, match="rms_norm_backward: casting_mode is 7"):
        rms_norm.rms_norm_backward(x, rows, w, rstd, 0.0, 7, *rest[:2], False, None)
    with pytest.raises(
        ValueError, match=r"dY, X and RSTD have shapes \(2, 40\), \(3, 40\) and \(3,\)"
    ):
        rms_norm.rms_norm_backward(x[:2], rows, w, rstd, 0.0, rest[2], *rest[:2], False, None)
    with pytest.raises(
        RuntimeError, match="rms_norm_forward: no Triton kernels for a tensor on cpu"
    ):
        rms_norm.rms_norm_forward(x.cpu().double(), w.cpu().double(), 1e-6, 0.0, "llama", None)


@pytest.mark.parametrize("width", [8, 4])
def test_rope(width):
    """Rotate a query beside a key that nobody reads. Its gradient is the inverse rotation."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 5, 8, device=DEVICE), torch.randn(1, 1, 5, 8, device=DEVICE)
    angles = torch.randn(1, 5, width, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    before = q.clone()
    rotated, _, *saved = rope.rope_forward(q, k, cos, sin)
    dq, _ = rope.rope_backward(rotated, k, *saved)
    leaf = q.clone().requires_grad_()
    expected = rope.liger_rotary_pos_emb(leaf, k, cos, sin)[0]
    (expected_dq,) = torch.autograd.grad(expected, leaf, rotated)
    assert torch.equal(rotated, expected) and torch.equal(dq, expected_dq)
    exact = rope.rope_reference(q.double(), k.double(), cos.double(), sin.double())[0]
    torch.testing.assert_close(rotated, exact.float())
    assert torch.equal(q, before)
    with pytest.raises(ValueError, match="rope_forward: cos has 16 columns"):
        rope.rope_forward(q, k, *(torch.randn(1, 5, 16, device=DEVICE),) * 2)


# ---- Axolotl: helpers for kernels of its own ----


@triton.jit
def _double(x_ptr, y_ptr, N, DTYPE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    n = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + tl.program_id(0) * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + tl.program_id(0) * N + n, (x + x).to(DTYPE), mask=n < N)


class Double(torch.autograd.Function):
    """A Function and a kernel that assume rows one after the other."""

    @staticmethod
    @ensure_contiguous
    def forward(ctx, x, *, unused=None):
        assert x.is_contiguous()
        y = torch.empty_like(x)
        block_size, num_warps = calculate_settings(x.shape[-1])
        dtype = torch_to_triton_dtype[x.dtype]
        _double[(x.shape[0],)](
            x, y, x.shape[-1], DTYPE=dtype, BLOCK_SIZE=block_size, num_warps=num_warps
        )
        return y

    @staticmethod
    @ensure_contiguous
    def backward(ctx, dy):
        assert dy.is_contiguous()
        return 2 * dy


@pytest.mark.parametrize("dtype", torch_to_triton_dtype, ids=str)
def test_helpers_for_a_users_kernel(dtype):
    x = torch.randn(40, 3, device=DEVICE, dtype=dtype).t().requires_grad_()
    y = Double.apply(x)
    assert torch.equal(y, 2 * x)
    y.sum().backward()  # an expanded gradient
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_settings():
    for n in (1, 2, 40, 2048, 4097, 65536):
        block_size, num_warps = calculate_settings(n)
        assert n <= block_size < 2 * n and block_size & (block_size - 1) == 0
        assert num_warps & (num_warps - 1) == 0 and 4 <= num_warps <= 32
    with pytest.raises(RuntimeError, match="calculate_settings: a row of 65537 elements"):
        calculate_settings(65537)


def test_versions_are_ordered_as_versions(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    assert compare_version("triton", operator.ge, "3.9.0") and not compare_version(
        "triton", operator.lt, "3.9.0"
    )
    monkeypatch.setattr(triton, "__version__", "3.6.0+rocm7.1")
    assert compare_version("triton", operator.lt, "3.10") and compare_version(
        "triton", operator.ge, "3.6.0"
    )
    assert compare_version("torch", operator.ge, "2.0") and not compare_version(
        "no_such_package", operator.ge, "0"
    )


def test_other_implementations():
    """No other implementation is listed. Axolotl asks which of them is loaded."""
    assert [name for name, info in IMPL_REGISTRY.items() if info.module_path] == []


# ---- what is installed, and where ----


@pytest.mark.parametrize(
    "kind,backend", [("cuda", "nccl"), ("xpu", "xccl"), ("npu", "hccl"), (None, "gloo")]
)
def test_devices(kind, backend, monkeypatch):
    """The helpers say what torch says, whatever machine this is."""

    class Machine:
        def __init__(self, is_available):
            self.is_available = lambda: is_available

    for name in ("cuda", "xpu", "npu"):
        monkeypatch.setattr(torch, name, Machine(name == kind), raising=False)
    assert utils.infer_device() == (kind or "cpu") and utils.infer_comm_backend() == backend
    assert utils.is_npu_available() == (kind == "npu")


def test_this_device():
    assert utils.infer_device() == DEVICE
    if DEVICE == "cpu":
        with pytest.raises(RuntimeError, match="get_total_gpu_memory: torch has no accelerator"):
            utils.get_total_gpu_memory()
    else:
        assert (
            utils.get_total_gpu_memory()
            == torch.cuda.get_device_properties(0).total_memory // 2**30
        )


def test_peft(monkeypatch):
    is_installed = importlib.util.find_spec("peft") is not None
    assert utils.PEFT_AVAILABLE == utils.is_peft_available() == is_installed
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not utils.is_peft_available()
