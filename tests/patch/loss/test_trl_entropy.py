"""The entropy of a policy that trains by our head in bf16, over 50 steps, against fp32.

A gradient that is rounded with a bias shows there, though no step's error does: TRL's own head sums
in fp32 for that reason. Whole models: ``bench.trl_steps --parts entropy``."""

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel.ops.head import planning, unit_gradients
from liger_kernel.patch.loss import trl_head

kernels = pytest.importorskip("trl.kernels.chunked_logprob", reason="make test-trl")

STEPS = 50
SEEDS = 2
N, H, V = 96, 32, 130
SEQUENCES = 8
B16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def forgotten():
    unit_gradients._histories.clear()


def entropies(apply, seed, dtype=F32, autocast=True, bonus=0.01):
    """Train by a policy gradient and an entropy bonus. Returns the mean entropy of each step.

    ``dtype``: of the weights. Those in bf16 are rounded from others in fp32, which learn.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = (V, H), (H, H), (V, H)
    masters = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    masters[1] /= H**0.5
    masters[2] *= 1.5 / H**0.5
    masters = [master.requires_grad_() for master in masters]
    optimizer = torch.optim.Adam(masters, lr=3e-3)
    means = []
    for _ in range(STEPS):
        tokens, targets = torch.randint(V, (2, N), generator=generator).to(DEVICE)
        advantages = torch.randn(SEQUENCES, generator=generator).repeat_interleave(N // SEQUENCES)
        embeddings, layer, weight = (master.to(dtype) for master in masters)
        with torch.autocast(DEVICE, B16, enabled=autocast):
            hidden = torch.tanh(F.linear(embeddings[tokens], layer))
            log_probs, entropy, *_ = apply(
                hidden, weight, None, targets, 1.0, 64, None, 1.0, ("entropy",)
            )
        ratio = torch.exp(log_probs - log_probs.detach())
        loss = -(ratio * advantages.to(DEVICE)).mean() - bonus * entropy.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(entropy.detach().mean().double())
    return torch.stack(means)


def in_tiles(monkeypatch):
    """As for many classes: the weight is copied a part at a time."""
    monkeypatch.setattr(planning, "CAST_CLASSES", 64)
    monkeypatch.setattr(planning, "TILE_TOKENS", 64)
    monkeypatch.setattr(planning, "TILE_ELEMENTS", (64 * 64, 64 * 64))
    monkeypatch.setattr(trl_head, "memory_for", lambda call: 0)


@pytest.mark.parametrize("way", ["fp32 weights", "fp32 weights in tiles", "bf16 weights"])
def test_no_further_from_fp32_than_trls(way, monkeypatch):
    """The largest distance of any step, and the mean, of a few runs: twice TRL's at most, for they
    are of few roundings."""
    if "tiles" in way:
        in_tiles(monkeypatch)
    options = dict(dtype=B16, autocast=False) if "bf16" in way else {}
    theirs = kernels.ChunkedLogProbFunction
    assert trl_head.HEAD.reason_left_alone(theirs) is None  # else TRL's own would run twice
    ours = trl_head.TRLHead(theirs)
    distances = {"TRL": [], "ours": []}
    for seed in range(SEEDS):
        exact = entropies(theirs.apply, seed, autocast=False)
        assert (exact[-1] - exact[0]).abs() > 1e-3  # the policy learns
        distances["TRL"].append(entropies(theirs.apply, seed, **options) - exact)
        distances["ours"].append(entropies(ours.apply, seed, **options) - exact)
    assert unit_gradients._histories
    theirs, ours = (torch.stack(distances[name]) for name in ("TRL", "ours"))
    assert 0 < ours.abs().max() <= 2 * theirs.abs().max()
    assert ours.mean().abs() <= 2 * theirs.abs().mean()
    assert theirs.abs().max() < 2e-3
