"""An activation without a gate and the linear layer after it: saved memory, reuse, fallbacks.

The code that is shared with gated activations is tested in test_glu_linear.
"""

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE
from memory import AddressRecorder, collect_garbage, reuses_memory

from liger_kernel.ops.mlp.activation import LigerActivationFunction, liger_relu_squared
from liger_kernel.ops.mlp.activation_linear import (
    ACTIVATIONS,
    LigerGLULinearFunction,
    activation_linear_reference,
    gated_linear,
    liger_activation_linear,
)

INTERMEDIATE_SIZE = 40
HIDDEN_SIZE = 12


def tensors(lead=(3, 5), dtype=torch.float32):
    torch.manual_seed(0)
    inputs = [
        torch.randn(s)
        for s in ((*lead, INTERMEDIATE_SIZE), (HIDDEN_SIZE, INTERMEDIATE_SIZE), (HIDDEN_SIZE,))
    ]
    return [t.to(DEVICE, dtype).requires_grad_() for t in inputs]


def gradients(fn, inputs, act):
    x, weight, bias = inputs
    out = fn(1 * x, weight, bias, act)
    return [out.detach(), *torch.autograd.grad(collect_garbage(out.float().square().sum()), inputs)]


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_against_pytorch(act, fused):
    inputs = tensors()
    for actual, expected in zip(
        *(gradients(fn, inputs, act) for fn in (liger_activation_linear, in_pytorch)), strict=True
    ):
        assert (
            actual - expected
        ).abs().max() <= 2e-6 * expected.abs().max()  # sums of 40 terms, in any order
    assert fused == [act]


def in_pytorch(x, weight, bias, act):
    return activation_linear_reference(x, weight, bias, act)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.thorough
def test_bits_of_the_two_operators(act, fused):
    """With kernels, a model gives the same with gradients and without."""

    def one_by_one(x, weight, bias, act):
        return F.linear(LigerActivationFunction.apply(x, act), weight, bias)

    inputs = tensors(dtype=torch.bfloat16)
    actual, expected = (gradients(fn, inputs, act) for fn in (liger_activation_linear, one_by_one))
    assert all(torch.equal(g, w) for g, w in zip(actual, expected, strict=True)) and fused


@pytest.mark.parametrize("act", ["relu_squared", "none"])
def test_output_of_the_activation_is_not_kept(act):
    x, weight, bias = tensors()
    memory = {}

    def pack(t):
        memory[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    a = 1 * x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = liger_activation_linear(a, weight, bias, act)
    for t in (weight, bias):
        memory.pop(t.untyped_storage().data_ptr(), None)
    assert memory == {a.data_ptr(): a.numel() * a.element_size()} and out.requires_grad


def test_memory_of_the_sole_holder_alone():
    """dx takes the memory of the projection's output, unless that is held or the graph is kept."""
    x, weight, bias = tensors()
    expected = torch.autograd.grad(
        activation_linear_reference(2 * x, weight, bias, "none").sum(), x
    )[0]
    for hold_a, keep_graph in ((False, False), (True, False), (False, True)):
        memory = {}

        def graph(hold_a=hold_a, memory=memory):
            a = AddressRecorder.apply(x, memory)
            return liger_activation_linear(a, weight, bias, "none"), a if hold_a else None

        out, a = graph()
        before = None if a is None else a.detach().clone()
        (actual,) = torch.autograd.grad(collect_garbage(out.sum()), x, retain_graph=keep_graph)
        assert reuses_memory(memory) is not (hold_a or keep_graph)
        torch.testing.assert_close(actual, expected)
        assert a is None or torch.equal(a, before)


@pytest.mark.parametrize("needed", range(1, 8))
def test_gradients_for_exactly_what_requires_them(needed):
    """The Function itself, since the public function leaves some cases to PyTorch.

    Sums of small integers are exact.
    """
    inputs = [t.detach().round() for t in tensors()]
    for i, t in enumerate(inputs):
        t.requires_grad_(bool(needed >> i & 1))
    leaves = [t for t in inputs if t.requires_grad]
    x, weight, bias = inputs
    out = LigerGLULinearFunction.apply(x, None, weight, bias, "relu_squared")
    actual = torch.autograd.grad(out.square().sum(), leaves)
    expected = torch.autograd.grad(
        activation_linear_reference(*inputs, "relu_squared").square().sum(), leaves
    )
    assert all(map(torch.equal, actual, expected))


def test_a_frozen_weight_is_left_to_pytorch(fused):
    x, weight, bias = tensors()
    actual = liger_activation_linear(x, weight.detach(), bias, "relu_squared")
    assert torch.equal(actual, F.linear(liger_relu_squared(x), weight, bias)) and not fused


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_a_layer_is_called_where_it_does_more(act, fused):
    x, *_ = tensors()
    for layer, called in ((torch.nn.Linear, False), (Doubled, True)):
        linear = layer(INTERMEDIATE_SIZE, HIDDEN_SIZE, device=DEVICE)
        actual = gated_linear(1 * x, None, act, linear)
        torch.testing.assert_close(actual, linear(ACTIVATIONS[act](x)))
        assert bool(fused) is not called
        fused.clear()
        hook = linear.register_forward_hook(lambda *args: fused.append("hook"))
        gated_linear(1 * x, None, act, linear)
        hook.remove()
        assert fused == ["hook"]
        fused.clear()


def test_without_kernels(reference_only, fused):
    if DEVICE == "cpu":
        actual, expected = (
            gradients(fn, tensors(), "tanh") for fn in (liger_activation_linear, in_pytorch)
        )
        assert all(torch.equal(g, w) for g, w in zip(actual, expected, strict=True)) and not fused


def test_errors():
    x, weight, bias = tensors()
    acts = "silu, tanh, none, quick, relu, relu_squared"
    with pytest.raises(
        ValueError, match=f"liger_activation_linear: act is 'gelu', give one of {acts}"
    ):
        liger_activation_linear(x, weight, bias, act="gelu")
    with pytest.raises(
        ValueError, match=r"weight has shape \(12, 39\), x \(3, 5, 40\), give \(H, F\)"
    ):
        liger_activation_linear(x, weight[:, 1:], bias)
