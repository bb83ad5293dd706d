"""LayerNorm beyond its `Case`: PyTorch's own, shifted rows, the module's keywords, errors."""

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel.ops.functional import liger_layer_norm
from liger_kernel.transformers import LigerLayerNorm, apply_liger_kernel, revert


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("shape", [(7,), (3, 5, 64), (2, 17001)])
def test_equals_pytorch(shape):
    x, w, b, dy = (
        rows(*shape),
        rows(shape[-1], seed=1),
        rows(shape[-1], seed=2),
        rows(*shape, seed=3),
    )
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    actual = liger_layer_norm(x, w, b, 1e-5)
    expected = F.layer_norm(x, shape[-1:], w, b, 1e-5)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for a, e in zip(
        *(torch.autograd.grad(y, (x, w, b), dy) for y in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1000, 17001, 40000])
def test_rows_far_from_zero(width):
    """Squares are of differences from a mean: at most PyTorch's own error, and some roundings of
    the mean."""
    x = rows(3, width) + 1e4
    x[1] *= torch.linspace(
        0.5, 1.5, width, device=DEVICE
    )  # blocks whose means differ by far more than their spread
    exact = F.layer_norm(x.double(), (width,))
    error = (liger_layer_norm(x, None, None, 1e-6).double() - exact).abs().max()
    reference_error = (F.layer_norm(x, (width,), None, None, 1e-6).double() - exact).abs().max()
    assert error <= reference_error + 2 * 1e4 * torch.finfo(torch.float32).eps, (
        error,
        reference_error,
    )


@pytest.mark.parametrize("bias", [True, False])
def test_the_module(bias):
    norm = LigerLayerNorm(16, eps=1e-5, bias=bias).to(DEVICE)
    assert (
        list(norm.state_dict()) == ["weight", "bias"]
        and norm.bias.requires_grad
        and norm.bias.any() == bias
    )
    reference = torch.nn.LayerNorm(16, eps=1e-5).to(DEVICE)
    reference.load_state_dict(norm.state_dict())
    x = rows(4, 16)
    torch.testing.assert_close(norm(x), reference(x))
    assert repr(norm) == "LigerLayerNorm(16, eps=1e-05)"


def test_providers():
    norm = LigerLayerNorm(8, impl="nvidia-triton").to(DEVICE)
    assert norm.backend == "nvidia-triton"
    norm(rows(2, 8))
    norm.backend = "cutile"
    assert norm.impl == "cutile"
    with pytest.raises(ValueError, match="impl is 'cutile'"):
        norm(rows(2, 8))
    assert LigerLayerNorm(8, backend="triton").impl == "triton"


def test_errors():
    x = rows(2, 8)
    with pytest.raises(
        ValueError, match="liger_layer_norm: weight has shape \\(7,\\), hidden size is 8"
    ):
        liger_layer_norm(x, torch.ones(7, device=DEVICE), None)
    with pytest.raises(ValueError, match="liger_layer_norm: bias has shape"):
        liger_layer_norm(x, None, torch.ones(1, 8, device=DEVICE))
    with pytest.raises(ValueError, match="init_fn is 'ones_'"):
        LigerLayerNorm(8, init_fn="ones_")


# ---- in a model ----


class FixedNorm(torch.nn.Module):
    """Without a weight, and with its eps in its code."""

    def __init__(self, hidden_size):
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, hidden_states):
        f = hidden_states.float()
        f = f - f.mean(-1, keepdim=True)
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)).to(hidden_states.dtype)


class Norms(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = torch.nn.LayerNorm(8)
        self.no_bias = torch.nn.LayerNorm(8, eps=0.1, bias=False)
        self.no_weight = torch.nn.LayerNorm(8, elementwise_affine=False)
        self.fixed_norm = FixedNorm(8)
        self.image = torch.nn.LayerNorm((4, 8))

    def forward(self, x):
        return self.image(self.fixed_norm(self.no_weight(self.no_bias(self.plain(x)) + x) + x) + x)


@pytest.fixture
def norms():
    torch.manual_seed(0)
    module = Norms()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return module


def test_patched_in_a_model(norms):
    x = torch.randn(3, 4, 8, requires_grad=True)
    expected = norms(x)
    expected_grads = torch.autograd.grad(expected.square().sum(), [x, *norms.parameters()])
    report = apply_liger_kernel(norms)
    assert report.of("LayerNorm") == 3 and report.of("FixedNorm") == 1
    assert ("LayerNorm", "it normalises more than one dimension") in report.left_alone
    actual = norms(x)
    torch.testing.assert_close(actual, expected)
    for a, b in zip(
        torch.autograd.grad(actual.square().sum(), [x, *norms.parameters()]),
        expected_grads,
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    revert(norms)
    assert type(norms.plain) is torch.nn.LayerNorm and torch.equal(norms(x), expected)


def test_a_norm_of_two_dimensions_before_one_of_one():
    """What the first is left alone for does not hold for the second."""
    image, plain = torch.nn.LayerNorm((4, 8)), torch.nn.LayerNorm(8)
    report = apply_liger_kernel(torch.nn.Sequential(image, plain))
    assert report.of("LayerNorm") == 1
    assert type(image) is torch.nn.LayerNorm and type(plain) is not torch.nn.LayerNorm


def test_autocast_gives_what_pytorchs_gives(norms):
    """fp32, in which PyTorch's autocast runs a LayerNorm."""
    x = torch.randn(3, 4, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = norms.plain(x)
        apply_liger_kernel(norms)
        actual = norms.plain(x)
    assert actual.dtype == expected.dtype and torch.equal(actual, expected)


def test_the_switch(norms):
    report = apply_liger_kernel(norms, layer_norm=False)
    assert not report.of("LayerNorm") and type(norms.plain) is torch.nn.LayerNorm
