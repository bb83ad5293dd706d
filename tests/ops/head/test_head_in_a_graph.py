"""A head in a compiled function: what backward does with the weight's gradient, and which logits
are kept for it."""

import shutil

import pytest
import torch
from hardware import DEVICE
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import fresh_cache, run_and_get_code

from liger_kernel.ops.head import linear_cross_entropy
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
    h, w = (
        torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in ((M, H), (V, H))
    )
    return h, w, torch.randint(V, (M,), device=DEVICE)


def trained(loss, h, w, y, scale):
    return torch.autograd.grad(loss(h, w, y) * scale, (h, w))


def like_the_weight(graph):
    """The operations of a graph that make something of the weight's size."""
    made = (node for node in graph.graph.nodes if node.op == "call_function")
    return [
        n.name
        for n in made
        if isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].numel() == V * H
    ]


@pytest.fixture
def keeps_none(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "FREE_BYTES", 0)


def in_a_graph(loss, dynamic=False):
    """-> the loss, compiled, and the graphs that it has had."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return torch.compile(loss, fullgraph=True, dynamic=dynamic, backend=backend), graphs


def operators(graph):
    return [
        n.target._opname
        for n in graph.graph.nodes
        if getattr(n.target, "namespace", None) == "liger"
    ]


@pytest.mark.parametrize(
    "loss, free, most", [(mean, 0, ["mul"]), (mean, 2**20, []), (of_tokens, 0, [])]
)
def test_backward_touches_dw_once(loss, free, most, monkeypatch):
    """It is multiplied by the incoming gradient, or it comes out of the operator as it is: no cast,
    no clone."""
    monkeypatch.setattr(linear_cross_entropy, "FREE_BYTES", free)
    compiled, graphs = in_a_graph(loss)
    given = drawn(
        torch.float32 if free else torch.bfloat16
    )  # a CPU's 16-bit products depend on strides
    actual, expected = trained(compiled, *given, 3.0), trained(loss, *given, 3.0)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    _, backward = graphs
    assert [
        name.rstrip("_0123456789") for name in like_the_weight(backward) if "getitem" not in name
    ] == most


@pytest.mark.skipif(
    DEVICE == "cpu" and shutil.which("g++") is None, reason="no C++ compiler for Inductor"
)
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.thorough
def test_inductor_multiplies_dw_where_it_is(scale, keeps_none):
    """dW belongs to the graph: it is written over."""
    given = drawn()
    compiled = torch.compile(mean, fullgraph=True)
    actual, codes = run_and_get_code(trained, compiled, *given, scale)
    for a, b in zip(actual, trained(mean, *given, scale), strict=True):
        torch.testing.assert_close(a, b)
    made = f"empty_strided_{DEVICE}(({V}, {H})"
    assert len(codes) == 2 and not any(made in code for code in codes)
    assert "in_out_ptr" in codes[1]


@pytest.mark.skipif(
    DEVICE == "cpu" and shutil.which("g++") is None, reason="no C++ compiler for Inductor"
)
@pytest.mark.thorough
def test_inductors_cache_and_a_second_backward(keeps_none):
    """Code that was compiled to write over dW, in a step without ``retain_graph``, is not for one
    with it."""
    h, w, y = drawn()
    expected = trained(mean, h, w, y, 3.0)
    with fresh_cache():
        trained(torch.compile(mean, fullgraph=True), h, w, y, 3.0)
        torch._dynamo.reset()  # as another process, of the same cache
        compiled = torch.compile(mean, fullgraph=True)
        loss = compiled(h, w, y) * 3.0
        for keep in (True, True, False):
            for a, b in zip(
                torch.autograd.grad(loss, (h, w), retain_graph=keep), expected, strict=True
            ):
                torch.testing.assert_close(a, b)
        torch._dynamo.reset()
        compiled = torch.compile(mean, fullgraph=True)
        trained(compiled, h, w, y, 3.0)
        with pytest.raises(
            RuntimeError, match="donated"
        ):  # PyTorch's: this graph is one that writes over dW
            torch.autograd.grad(compiled(h, w, y), (h, w), retain_graph=True)


EVERY = dict(
    lse_square_scale=1e-2,
    label_smoothing=0.1,
    softcap=5.0,
    use_token_scaling=True,
    return_z_loss=True,
    return_predicted_tokens=True,
)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("items", [None, 7])
@pytest.mark.parametrize("option", [{}, EVERY], ids=["", "all"])
@pytest.mark.parametrize("frozen", ["", "h", "b"])
def test_kept_logits_give_what_eager_gives(reduction, items, option, frozen):
    """Ignored tokens, a bias, class weights, a number of tokens that is no multiple of 8."""
    h, w, y = drawn(torch.float32)
    h, y = h[:37].detach().requires_grad_(frozen != "h"), y[:37].clone()
    y[3] = -100
    b = torch.randn(V, device=DEVICE).requires_grad_(frozen != "b")
    weights = torch.rand(V, device=DEVICE)

    def loss(h, w, b, y):
        out = liger_fused_linear_cross_entropy(
            h, w, y, b, weights, reduction=reduction, num_items=items, **option
        )
        return out.loss if option else out

    compiled, graphs = in_a_graph(loss)
    leaves = [t for t in (h, w, b) if t.requires_grad]
    losses = [f(h, w, b, y) for f in (compiled, loss)]
    torch.testing.assert_close(*losses)
    actual, expected = (torch.autograd.grad(3.0 * value, leaves) for value in losses)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))
    assert [operators(graph) for graph in graphs] == [
        ["linear_head_kept"],
        ["linear_head_kept_backward"],
    ]


def test_a_second_backward_is_the_first():
    """What a graph has saved is not written to."""
    given = drawn(torch.float32)
    compiled, _ = in_a_graph(mean)
    loss = compiled(*given)
    first, second = (torch.autograd.grad(loss, given[:2], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    "memory, kept", [("auto", True), (2 * V * 64 * 4, True), (2 * V * 64 * 4 - 1, False)]
)
def test_within_the_budget(memory, kept):
    """Of 40 tokens' logits, in fp32: a stride is a multiple of 64. Backward has them twice."""
    compiled, graphs = in_a_graph(
        lambda h, w, y: liger_fused_linear_cross_entropy(h, w, y, memory=memory)
    )
    trained(compiled, *drawn(torch.float32), 1.0)
    assert operators(graphs[0]) == ["linear_head_kept" if kept else "linear_head"]


@pytest.mark.parametrize("of", ["frozen weight", "half", "eval", "more than is free"])
def test_not_kept(of, monkeypatch):
    h, w, y = drawn(torch.float16 if of == "half" else torch.float32)
    if of == "more than is free":
        monkeypatch.setattr(linear_cross_entropy, "FREE_BYTES", 2 * V * 64 * 4 - 1)
    if of == "frozen weight":
        w = w.detach()
    compiled, graphs = in_a_graph(lambda *given: liger_fused_linear_cross_entropy(*given))
    with torch.set_grad_enabled(of != "eval"):
        loss = compiled(h, w, y)
    if of != "eval":
        loss.backward()
    assert operators(graphs[0]) == ["linear_head"]


def test_no_guard_depends_on_it():
    """Of dynamic shapes the size is not asked: one graph for all."""
    compiled, graphs = in_a_graph(mean, dynamic=True)
    h, w, y = drawn(torch.float32)
    for n in (40, 24, 33):
        part = h[:n].detach().requires_grad_()
        actual, expected = (trained(f, part, w, y[:n].clone(), 2.0) for f in (compiled, mean))
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert [operators(graph) for graph in graphs] == [["linear_head"], []]


@pytest.mark.parametrize("most", [64, 1024])
def test_bounded_dynamic_shapes(most):
    """A bound proves a size small enough, and still nothing asks for it."""
    compiled, graphs = in_a_graph(mean)
    h, w, y = drawn(torch.float32)
    for n in (40, 24, 33):
        part, labels = h[:n].detach().clone().requires_grad_(), y[:n].clone()
        for t in (part, labels):
            torch._dynamo.mark_dynamic(t, 0, min=2, max=most)
        for a, b in zip(*(trained(f, part, w, labels, 2.0) for f in (compiled, mean)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert [operators(graph) for graph in graphs] == [["linear_head"], []]


def test_kept_in_the_dtype_of_dw():
    h, w, y = drawn()
    compiled, graphs = in_a_graph(
        lambda *given: liger_fused_linear_cross_entropy(*given, accum_dtype=torch.float32)
    )
    loss = compiled(h, w, y)
    loss.backward()
    assert operators(graphs[0]) == ["linear_head_kept"]
    (node,) = (n for n in graphs[1].graph.nodes if getattr(n.target, "namespace", None) == "liger")
    assert node.meta["val"][1].dtype == torch.float32 and w.grad.dtype == torch.bfloat16


def test_half_of_autocast_is_not_kept():
    h, w, y = drawn(torch.float32)
    compiled, graphs = in_a_graph(liger_fused_linear_cross_entropy)
    with torch.autocast(DEVICE, torch.float16):
        compiled(h, w, y).backward()
    assert operators(graphs[0]) == ["linear_head"]


@pytest.mark.parametrize("free", [0, 2**20])
def test_func_grad_in_a_graph(free, monkeypatch):
    """There forward is not told what needs a gradient."""
    monkeypatch.setattr(linear_cross_entropy, "FREE_BYTES", free)
    h, w, y = drawn(torch.float32)

    def gradients(h, w):
        return torch.func.grad(
            lambda h, w: 3.0 * liger_fused_linear_cross_entropy(h, w, y), argnums=(0, 1)
        )(h, w)

    compiled, _ = in_a_graph(gradients)
    actual, expected = (
        compiled(h.detach(), w.detach()),
        trained(liger_fused_linear_cross_entropy, h, w, y, 3.0),
    )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))
