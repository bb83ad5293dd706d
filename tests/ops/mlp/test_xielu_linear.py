"""xIELU and the linear layer after it, beyond its `Case`: bits of the two operators, reuse."""

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE
from memory import AddressRecorder, collect_garbage, reuses_memory

from liger_kernel.ops.mlp.xielu import liger_xielu
from liger_kernel.ops.mlp.xielu_linear import (
    LigerXIELULinearFunction,
    liger_xielu_linear,
    xielu_linear_module,
    xielu_linear_reference,
)

INTERMEDIATE_SIZE = 40
HIDDEN_SIZE = 12


def tensors(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    shapes = (3, 5, INTERMEDIATE_SIZE), (1,), (1,), (HIDDEN_SIZE, INTERMEDIATE_SIZE), (HIDDEN_SIZE,)
    inputs = [torch.randn(s).to(DEVICE, dtype).requires_grad_() for s in shapes]
    return inputs if bias else [*inputs[:-1], None]


def one_by_one(x, alpha_p, alpha_n, weight, bias, beta, eps):
    return F.linear(liger_xielu(x, alpha_p, alpha_n, beta, eps), weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_bits_of_the_two_operators(bias, dtype):
    """With constants that are numbers, and that are tensors."""
    inputs, results = tensors(dtype, bias), []
    constants = [torch.tensor(n, dtype=dtype, device=DEVICE) for n in (0.5, -(2**-20))]
    for fn in (liger_xielu_linear, one_by_one):
        for numbers in ((0.5, -(2**-20)), constants):
            x, *parameters = inputs
            out = fn(1 * x, *parameters, *numbers)
            loss = (out * (torch.arange(out.numel(), device=DEVICE).view(out.shape) % 7 - 3)).sum()
            leaves = [t for t in inputs if t is not None]
            results.append([out.detach(), *torch.autograd.grad(collect_garbage(loss), leaves)])
    expected, *parameters = results
    for actual in parameters:
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_memory_of_the_sole_holder_alone():
    """dx lies where x lay, and y where dy lay, unless somebody holds x or the graph is kept."""
    x, *parameters = tensors()
    expected = torch.autograd.grad(
        xielu_linear_reference(2 * x, *parameters).sum(), [x, *parameters]
    )
    for hold_a, keep_graph in ((False, False), (True, False), (False, True)):
        memory = {}

        def graph(hold_a=hold_a, memory=memory):
            a = AddressRecorder.apply(x, memory)
            return liger_xielu_linear(a, *parameters), a if hold_a else None

        out, a = graph()
        before = None if a is None else a.detach().clone()
        actual = torch.autograd.grad(
            collect_garbage(out.sum()), [x, *parameters], retain_graph=keep_graph
        )
        assert reuses_memory(memory) is not (hold_a or keep_graph)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert a is None or torch.equal(a, before)


def test_a_layer_is_called_where_it_does_more():
    x, alpha_p, alpha_n, *_ = tensors()
    linear = torch.nn.Linear(INTERMEDIATE_SIZE, HIDDEN_SIZE, device=DEVICE)
    expected = linear(liger_xielu(x, alpha_p, alpha_n))
    calls = []
    linear.register_forward_hook(lambda *args: calls.append("hook"))
    torch.testing.assert_close(
        xielu_linear_module(linear, x, alpha_p, alpha_n, 0.5, -1e-6), expected
    )
    assert calls == ["hook"]


def test_a_frozen_weight_is_left_to_pytorch(monkeypatch):
    x, alpha_p, alpha_n, weight, bias = tensors()
    monkeypatch.setattr(LigerXIELULinearFunction, "apply", None)
    actual = liger_xielu_linear(x, alpha_p, alpha_n, weight.detach(), bias)
    assert torch.equal(actual, F.linear(liger_xielu(x, alpha_p, alpha_n), weight, bias))


def test_errors():
    x, alpha_p, alpha_n, weight, bias = tensors()
    for changed, error, words in (
        (
            dict(weight=weight[:, 1:]),
            ValueError,
            r"weight has shape \(12, 39\), x \(3, 5, 40\), give \(H, F\)",
        ),
        (dict(bias=bias[1:]), ValueError, r"bias has shape \(11,\)"),
        (dict(alpha_p=bias), ValueError, r"alpha_p has shape \(12,\)"),
        (dict(eps=0.0), ValueError, "eps is 0.0, give a number below zero"),
        (dict(beta=alpha_p), TypeError, "beta requires a gradient"),
    ):
        arguments = dict(x=x, alpha_p=alpha_p, alpha_n=alpha_n, weight=weight, bias=bias)
        with pytest.raises(error, match=f"liger_xielu_linear: {words}"):
            liger_xielu_linear(**arguments | changed)
