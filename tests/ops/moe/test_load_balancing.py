"""The load-balancing loss beyond its `Case`: against Hugging Face's, whatever the layers and the
mask."""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.moe.load_balancing import (
    LigerLoadBalancingFunction,
    liger_load_balancing_loss,
)

T, E = 12, 9


def random_logits(layers=3, dtype=torch.float32, T=T, E=E):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(T, E, generator=generator).to(DEVICE, dtype).requires_grad_()
        for _ in range(layers)
    )


MASKS = {
    "none": None,
    "padding": torch.arange(T).reshape(3, 4) % 4 < 3,
    "integers": (torch.arange(T).reshape(3, 4) % 4 < 3).long(),
    "weights": torch.linspace(0, 1, T),
    "strided": torch.ones(T, 2)[:, 0],
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_hugging_faces(top_k, mask, with_and_without_kernels):
    reference = pytest.importorskip(
        "transformers.models.mixtral.modeling_mixtral"
    ).load_balancing_loss_func
    mask = None if MASKS[mask] is None else MASKS[mask].to(DEVICE)
    results = []
    for fn in (liger_load_balancing_loss, reference):
        gate_logits = random_logits()
        loss = fn(gate_logits, E, top_k, mask)
        results.append([loss, *torch.autograd.grad(3 * loss, gate_logits)])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    """The choice is of the logits, not of rounded probabilities."""
    gate_logits = random_logits(2, dtype)
    exact = tuple(x.detach().double().requires_grad_() for x in gate_logits)
    actual, expected = (liger_load_balancing_loss(x, E, 2) for x in (gate_logits, exact))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)
    for a, b in zip(
        torch.autograd.grad(actual, gate_logits), torch.autograd.grad(expected, exact), strict=True
    ):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("experts", [1, 5, 33])
def test_all_experts(experts, with_and_without_kernels):
    """Equal shares, so that nothing can be balanced better."""
    gate_logits = random_logits(2, E=experts)
    loss = liger_load_balancing_loss(gate_logits, experts, experts)
    torch.testing.assert_close(loss, torch.full_like(loss, experts))
    assert all(d.abs().max() < 1e-6 for d in torch.autograd.grad(loss, gate_logits))


def test_tokens_that_are_masked(with_and_without_kernels):
    """No influence, even if they are not numbers; their gradient is 0."""
    mask = torch.arange(T, device=DEVICE) < 8
    gate_logits = random_logits(1)
    poisoned = gate_logits[0].detach().clone()
    poisoned[8:] = float("nan")
    actual, expected = (
        liger_load_balancing_loss((x,), E, 2, mask)
        for x in (poisoned.requires_grad_(), gate_logits[0])
    )
    torch.testing.assert_close(actual, expected)
    (dz,) = torch.autograd.grad(actual, poisoned)
    torch.testing.assert_close(dz, *torch.autograd.grad(expected, gate_logits))
    assert not dz[8:].any()


def test_many_tokens(monkeypatch):
    """A program has several blocks of them."""
    monkeypatch.setattr("liger_kernel.core.devices.multiprocessors", lambda x: 1)
    gate_logits = random_logits(1, T=900, E=40)
    actual = LigerLoadBalancingFunction.apply(gate_logits[0], None, 3)
    expected = LigerLoadBalancingFunction.reference(gate_logits[0].double(), None, 3)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_frozen_layer():
    first, second, third = random_logits()
    loss = liger_load_balancing_loss([first.detach(), second, third.detach()], E, 2)
    assert torch.autograd.grad(loss, second)[0].any()
    assert not liger_load_balancing_loss((first.detach(),), E, 2).requires_grad


def test_nothing():
    assert liger_load_balancing_loss(None) == 0


@pytest.mark.parametrize(
    "change, error, words",
    [
        (
            dict(gate_logits=torch.zeros(3, 4)),
            TypeError,
            "gate_logits is a Tensor, give a tuple of each layer's",
        ),
        (dict(gate_logits=()), TypeError, "gate_logits is a tuple"),
        (
            dict(gate_logits=(torch.zeros(3, 4), torch.zeros(3, 5))),
            ValueError,
            r"gate_logits\[0\] and \[1\] have",
        ),
        (
            dict(gate_logits=(torch.zeros(3, 4).long(),)),
            TypeError,
            r"gate_logits\[0\] is torch.int64",
        ),
        (dict(num_experts=8), ValueError, "num_experts is 8, the logits are of 9"),
        (dict(top_k=0), ValueError, "top_k is 0, give an int from 1 to the 9 experts"),
        (dict(top_k=2.0), TypeError, "top_k is 2.0"),
        (dict(attention_mask=torch.ones(2, 5)), ValueError, r"attention_mask has shape \(2, 5\)"),
        (dict(attention_mask=[1] * T), TypeError, "attention_mask is a list"),
    ],
)
def test_errors(change, error, words):
    with pytest.raises(error, match=f"^liger_load_balancing_loss: {words}"):
        liger_load_balancing_loss(**dict(gate_logits=random_logits(), num_experts=E) | change)
