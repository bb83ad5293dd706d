"""One tensor for two arguments, like tied weights, gives the same in a graph as in eager."""

import itertools

import pytest
import torch
from cases import make_inputs, run
from hardware import DEVICE

from liger_kernel.core.op import CASES, alias_repeated
from liger_kernel.ops.mlp.glu import LigerSiLUMulFunction


def pairs():
    """Yield every two arguments of a `Case` for which one tensor can be given."""
    for case in CASES:
        tensors = make_inputs(case, case.shapes[1], {})
        floats = [
            k for k, t in tensors.items() if isinstance(t, torch.Tensor) and t.is_floating_point()
        ]
        for first, second in itertools.combinations(floats, 2):
            if tensors[first].shape == tensors[second].shape and tensors[first].requires_grad:
                yield pytest.param(case, first, second, id=f"{case.name}-{first}-{second}")


@pytest.mark.parametrize("case,first,second", pairs())
def test_compiles_whole(case, first, second):
    tensors = make_inputs(case, case.shapes[1], {})
    del tensors[second]

    def fn(**tensors):
        return case.fn(**tensors, **{second: tensors[first]})

    torch._dynamo.reset()
    expected, *_ = run(fn, tensors)
    outputs, *_ = run(torch.compile(fn, fullgraph=True, backend="aot_eager"), tensors)
    for k in expected:
        torch.testing.assert_close(outputs[k], expected[k], rtol=1e-6, atol=1e-6)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return dy * b, dy * a


def loses_a_gradient() -> bool:
    """Return True if this torch loses a gradient of any Function; torch 2.11 does."""
    torch._dynamo.reset()
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: Product.apply(x, x), backend="aot_eager")(x).sum().backward()
    return not torch.equal(x.grad, torch.full_like(x, 2.0))


def test_apply_has_a_graph_break():
    """Any autograd Function that gets one tensor twice has one. The result is that of eager."""
    x = torch.randn(3, 8, device=DEVICE)
    if loses_a_gradient():
        pytest.skip("in a graph of this torch any Function loses a gradient of a repeated tensor")

    def fn(x):
        y = x * 2
        return LigerSiLUMulFunction.apply(y, y).sin()

    torch._dynamo.reset()
    expected, *_ = run(fn, dict(x=x.requires_grad_()))
    outputs, *_ = run(torch.compile(fn, backend="aot_eager"), dict(x=x))
    for k in expected:
        torch.testing.assert_close(outputs[k], expected[k], rtol=1e-6, atol=1e-6)


def test_alias_repeated():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    a, b, c, d, e, f = alias_repeated((x, y, 1.0, x, None, y))
    assert (a, b, c, e) == (x, y, 1.0, None) and a is x and b is y
    assert d is not x and d._base is x and d.requires_grad and f is not y and f._base is y
