"""xIELU and the linear layer behind it, beyond its `Case`: the bits of one after the other, whose
memory is taken."""

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE
from memory import Source, collect, reused

from liger_kernel.ops.mlp.xielu import liger_xielu
from liger_kernel.ops.mlp.xielu_linear import (
    LigerXIELULinearFunction,
    liger_xielu_linear,
    xielu_before,
    xielu_linear_reference,
)

WIDTH, HIDDEN = 40, 12


def tensors(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    shapes = (3, 5, WIDTH), (1,), (1,), (HIDDEN, WIDTH), (HIDDEN,)
    drawn = [torch.randn(s).to(DEVICE, dtype).requires_grad_() for s in shapes]
    return drawn if bias else [*drawn[:-1], None]


def one_by_one(x, alpha_p, alpha_n, weight, bias, beta, eps):
    return F.linear(liger_xielu(x, alpha_p, alpha_n, beta, eps), weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_bits_of_the_two_operators(bias, dtype):
    """With numbers, and with numbers in memory."""
    given, found = tensors(dtype, bias), []
    held = [torch.tensor(n, dtype=dtype, device=DEVICE) for n in (0.5, -(2**-20))]
    for fn in (liger_xielu_linear, one_by_one):
        for numbers in ((0.5, -(2**-20)), held):
            x, *others = given
            out = fn(1 * x, *others, *numbers)
            loss = (out * (torch.arange(out.numel(), device=DEVICE).view(out.shape) % 7 - 3)).sum()
            wanted = [t for t in given if t is not None]
            found.append([out.detach(), *torch.autograd.grad(collect(loss), wanted)])
    want, *others = found
    for got in others:
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_memory_of_the_sole_holder_alone():
    """dx lies where x lay, and y where dy lay, unless somebody holds x or the graph is kept."""
    x, *others = tensors()
    want = torch.autograd.grad(xielu_linear_reference(2 * x, *others).sum(), [x, *others])
    for held, kept in ((False, False), (True, False), (False, True)):
        seen = {}

        def graph(held=held, seen=seen):
            a = Source.apply(x, seen)
            return liger_xielu_linear(a, *others), a if held else None

        out, a = graph()
        before = None if a is None else a.detach().clone()
        got = torch.autograd.grad(collect(out.sum()), [x, *others], retain_graph=kept)
        assert reused(seen) is not (held or kept)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert a is None or torch.equal(a, before)


def test_a_layer_is_called_where_it_does_more():
    x, alpha_p, alpha_n, *_ = tensors()
    linear = torch.nn.Linear(WIDTH, HIDDEN, device=DEVICE)
    want = linear(liger_xielu(x, alpha_p, alpha_n))
    seen = []
    linear.register_forward_hook(lambda *args: seen.append("hook"))
    torch.testing.assert_close(xielu_before(linear, x, alpha_p, alpha_n, 0.5, -1e-6), want)
    assert seen == ["hook"]


def test_a_frozen_weight_is_left_to_pytorch(monkeypatch):
    x, alpha_p, alpha_n, weight, bias = tensors()
    monkeypatch.setattr(LigerXIELULinearFunction, "apply", None)
    got = liger_xielu_linear(x, alpha_p, alpha_n, weight.detach(), bias)
    assert torch.equal(got, F.linear(liger_xielu(x, alpha_p, alpha_n), weight, bias))


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
        given = dict(x=x, alpha_p=alpha_p, alpha_n=alpha_n, weight=weight, bias=bias)
        with pytest.raises(error, match=f"liger_xielu_linear: {words}"):
            liger_xielu_linear(**given | changed)
