"""The gradient of the weight in a compiled function: what backward does with it, beyond what forward has computed."""

import shutil

import pytest
import torch
from hardware import DEVICE
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code

from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_kernel.ops.head.token_log_probs import token_log_probs

M, H, V = 40, 32, 96


@pytest.fixture(autouse=True)
def no_graphs_of_before():
    torch._dynamo.reset()


def mean(h, w, y):
    return liger_fused_linear_cross_entropy(h.sin(), w, y)


def of_tokens(h, w, y):
    return -token_log_probs(h.sin(), w, y).exp().mean()


def drawn(dtype=torch.bfloat16):
    torch.manual_seed(0)
    h, w = (torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in ((M, H), (V, H)))
    return h, w, torch.randint(V, (M,), device=DEVICE)


def trained(loss, h, w, y, scale):
    return torch.autograd.grad(loss(h, w, y) * scale, (h, w))


def like_the_weight(graph):
    """The operations of a graph that make something of the weight's size."""
    made = (node for node in graph.graph.nodes if node.op == "call_function")
    return [n.name for n in made if isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].numel() == V * H]


@pytest.mark.parametrize("loss, most", [(mean, ["mul"]), (of_tokens, [])])
def test_backward_touches_dw_once(loss, most):
    """It is multiplied by the incoming gradient, or it comes out of the operator as it is: no cast, no clone."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    given = drawn()
    got, want = trained(compiled, *given, 3.0), trained(loss, *given, 3.0)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    _, backward = graphs
    assert [name.rstrip("_0123456789") for name in like_the_weight(backward) if "getitem" not in name] == most


@pytest.mark.skipif(DEVICE == "cpu" and shutil.which("g++") is None, reason="no C++ compiler for Inductor")
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.thorough
def test_inductor_multiplies_dw_where_it_is(scale):
    """dW belongs to the graph: it is written over."""
    given = drawn()
    compiled = torch.compile(mean, fullgraph=True)
    got, codes = run_and_get_code(trained, compiled, *given, scale)
    for a, b in zip(got, trained(mean, *given, scale), strict=True):
        torch.testing.assert_close(a, b)
    made = f"empty_strided_{DEVICE}(({V}, {H})"
    assert len(codes) == 2 and not any(made in code for code in codes)
    assert "in_out_ptr" in codes[1]
