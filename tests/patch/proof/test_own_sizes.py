"""A user's norm or MLP that is one of ours for the width, or the number of dimensions, of a trial
alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import liger_kernel.transformers as liger
from liger_kernel.patch.layers.gated_norm import TRIED_WIDTH
from liger_kernel.patch.proof.probe import HIDDEN_SIZE

pytestmark = pytest.mark.usefixtures("reference_only")
WIDTH = 64


class OfTriedWidthNorm(nn.Module):
    """Divides by a width of its own, as with muP's base width."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.eps = 1e-5
        self.columns = float(HIDDEN_SIZE)

    def forward(self, x):
        h = x.float()
        mean = h.pow(2).sum(-1, keepdim=True) / self.columns
        return self.weight * (h * torch.rsqrt(mean + self.eps)).to(x.dtype)


class OfTriedWidthGatedNorm(OfTriedWidthNorm):
    def __init__(self):
        super().__init__()
        self.columns = float(TRIED_WIDTH)

    def forward(self, x, gate):
        h = x.float()
        mean = h.pow(2).sum(-1, keepdim=True) / self.columns
        y = self.weight * (h * torch.rsqrt(mean + self.eps)).to(x.dtype)
        return (y * F.silu(gate.float())).to(x.dtype)


class FlatMLP(nn.Module):
    """Lays its tokens out flat: a matrix stays as it is."""

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 96)
        self.up_proj = nn.Linear(WIDTH, 96)
        self.down_proj = nn.Linear(96, WIDTH)

    def forward(self, x):
        x = x.flatten(0, -2)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TokensAsGateMLP(nn.Module):
    """Its gate is every first half of the tokens: a matrix has columns in that place."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 96)
        self.down_proj = nn.Linear(96, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, 1)
        return self.down_proj(F.silu(gate) * up)


class FlatPlainMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 96)
        self.fc2 = nn.Linear(96, WIDTH)

    def forward(self, x):
        return self.fc2(F.silu(self.fc1(x.flatten(0, -2))))


@pytest.mark.parametrize(
    "cls, num_inputs",
    [
        (OfTriedWidthNorm, 1),
        (OfTriedWidthGatedNorm, 2),
        (FlatMLP, 1),
        (TokensAsGateMLP, 1),
        (FlatPlainMLP, 1),
    ],
)
def test_what_holds_for_the_trial_alone(cls, num_inputs):
    torch.manual_seed(0)
    reference = cls()
    patched = copy.deepcopy(reference)
    report = liger.apply_liger_kernel(patched)
    assert report.of(cls.__name__) == 0
    inputs = torch.randn(num_inputs, 2, 6, WIDTH)
    torch.testing.assert_close(patched(*inputs), reference(*inputs))


@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_without_a_weight_and_rows_of_another_width(cls):
    patched = cls(WIDTH // 2, elementwise_affine=False)
    report = liger.apply_liger_kernel(patched)
    assert report.of(cls.__name__) == 1
    patched(torch.randn(3, WIDTH // 2))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        patched(torch.randn(3, WIDTH))
