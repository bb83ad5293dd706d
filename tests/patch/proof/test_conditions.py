"""Which tensors our operators are for within a graph, and which modules somebody looks at."""

from functools import partial
from types import MethodType

import pytest
import torch

from liger_kernel.patch.proof import conditions


def test_small_tensors_are_the_compilers(monkeypatch):
    """In a graph, and on a GPU: there each operator of ours costs the host more than it saves."""
    monkeypatch.setattr(conditions, "MIN_NUMEL_IN_GRAPH", 2**23)
    small = torch.empty(2**23 - 1, device="meta")
    large = torch.empty(2**23, device="meta")
    assert not conditions.left_to_compiler(small)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert conditions.left_to_compiler(small) and not conditions.left_to_compiler(large)
    assert not conditions.left_to_compiler(torch.empty(1))


@pytest.mark.parametrize(
    "compiling, graphs",
    [
        ({}, False),
        (dict(mode="reduce-overhead"), True),
        (dict(mode="max-autotune"), True),
        (dict(mode="max-autotune-no-cudagraphs"), False),
        (dict(options={"triton.cudagraphs": True}), True),
        (dict(backend="eager"), False),
    ],
    ids=str,
)
def test_what_becomes_a_cuda_graph(compiling, graphs, monkeypatch):
    """There small tensors are ours. Every backend has its own answer, for one function."""
    answers = []

    def note():
        answers.append(conditions.will_be_cuda_graph())
        return True

    note._dynamo_marked_constant = True

    def function(x):
        return x + 1 if note() else x

    x = torch.ones(3)
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda graph, *_, **options: graph.forward
    )
    torch._dynamo.reset()
    torch.compile(function, backend="eager")(x)
    torch.compile(function, **compiling)(x)
    assert answers[0] is False and answers[-1] is graphs
    assert not conditions.will_be_cuda_graph()


def test_a_whole_graph_asks_what_it_becomes(monkeypatch):
    """The question is a constant to Dynamo, and no break; Inductor's own setting counts, too."""
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda graph, *_, **options: graph.forward
    )

    def function(x):
        return x + 1 if conditions.will_be_cuda_graph() else x - 1

    x = torch.ones(3)
    torch._dynamo.reset()
    assert torch.compile(function, fullgraph=True, mode="reduce-overhead")(x).sum() == 6
    assert torch.compile(function, fullgraph=True)(x).sum() == 0
    torch._dynamo.reset()
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert torch.compile(function, fullgraph=True)(x).sum() == 6


def test_small_tensors_of_a_cuda_graph(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(conditions, "MIN_NUMEL_IN_GRAPH", 2**23)
    monkeypatch.setattr(conditions, "will_be_cuda_graph", lambda: True)
    assert not conditions.left_to_compiler(torch.empty(5, device="meta"))


class Doubling(torch.nn.Identity):
    def forward(self, x):
        return 2 * super().forward(x)


FORWARDS = {  # of an object, and whether it is observed
    "its class's": (lambda m: MethodType(type(m).forward, m), False),
    "its class's, not bound": (lambda m: partial(Doubling.forward, m), True),
    "another class's": (lambda m: MethodType(torch.nn.Identity.forward, m), True),
    "another module's": (lambda m: Doubling().forward, True),
    "a function": (lambda m: lambda x: x, True),
    "a built-in method": (lambda m: torch.ones(1).add, True),
}


@pytest.mark.parametrize("kind", FORWARDS)
def test_a_forward_on_the_object(kind):
    """`kernels` binds the class's own where it has no kernel for a name that it knows."""
    forward, is_observed = FORWARDS[kind]
    module = Doubling()
    assert not conditions.is_observed(module, None)
    module.forward = forward(module)
    assert conditions.is_observed(module, None) is is_observed
    if not is_observed:
        module.register_forward_hook(lambda *args: None)
        assert conditions.is_observed(module)
