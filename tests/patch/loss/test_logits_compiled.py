"""A compiled model whose forward writes to its logits, or breaks its graph beside them, trains as
it does unpatched."""

import pytest
import torch
from forwards import assert_steps_close, forward_changing_logits, pair_with_forward
from patched import step

pytestmark = pytest.mark.usefixtures("reference_only")

FEW = torch.arange(96) < 3


def times(x):
    x *= 0.5
    return x


def of_some(x):
    x[..., :3] = -5.0
    return x


def of_some_under_no_grad(x):
    with torch.no_grad():
        x[..., :3] = -5.0
    return x


def by_index(x):
    x[..., torch.arange(3)] = -5.0
    return x


def of_a_view(x):
    x.narrow(-1, 0, 3).fill_(-5.0)
    return x


def of_a_view_by_index(x):
    x.view(-1)[:5] = -5.0
    return x


def of_what_is_detached(x):
    x.detach()[..., :3] = 0.5
    return x


def after_a_cast(x):
    y = x.float()
    x[..., :3] = -5.0
    return y


WRITES = {
    "mul_": lambda self, x: x.mul_(0.5),
    "*=": lambda self, x: times(x),
    "relu": lambda self, x: torch.nn.functional.relu(x, inplace=True),
    "masked_fill_": lambda self, x: x.masked_fill_(FEW.to(x.device), -5.0),
    "an item": lambda self, x: of_some(x),
    "an item, under no_grad": lambda self, x: of_some_under_no_grad(x),
    "an item by index": lambda self, x: by_index(x),
    "an item of a scaled one": lambda self, x: of_some(x * 2.0),
    "a view": lambda self, x: of_a_view(x),
    "an item of a view": lambda self, x: of_a_view_by_index(x),
    "what is detached": lambda self, x: of_what_is_detached(x),
    "after a cast": lambda self, x: after_a_cast(x),
}


def broken(change):
    """The graph ends before, and another one begins."""

    def changed(self, x):
        torch._dynamo.graph_break()
        return change(x)

    return changed


def and_broken(change):
    def changed(self, x):
        x = change(x)
        torch._dynamo.graph_break()
        return x

    return changed


@torch._dynamo.disable
def uncompiled(x):
    x[..., :3] = -5.0
    return x.mean()


BREAKS = {
    "nothing else": broken(lambda x: x),
    "a scale": broken(lambda x: x * 2.0),
    "a scale before": and_broken(lambda x: x * 2.0),
    "mul_ before": and_broken(lambda x: x.mul_(0.5)),
    "an item before": and_broken(of_some),
    "mul_": broken(lambda x: x.mul_(0.5)),
    "a term": broken(lambda x: x + x.logsumexp(-1, keepdim=True)),
    "uncompiled code that writes": lambda self, x: x + uncompiled(x),
}


def assert_trains_alike(change, backend, fullgraph):
    torch._dynamo.reset()
    reference, patched = pair_with_forward(forward_changing_logits(change))
    compiled = torch.compile(patched, backend=backend, fullgraph=fullgraph)
    for _ in range(2):
        assert_steps_close(step(patched, compiled), step(reference))


@pytest.mark.parametrize("case", ["mul_", "an item", "after a cast"])
def test_writes_to_logits(case):
    assert_trains_alike(WRITES[case], "eager", fullgraph=True)


@pytest.mark.parametrize("case", WRITES)
@pytest.mark.thorough
def test_all_writes_to_logits(case):
    assert_trains_alike(WRITES[case], "aot_eager", fullgraph=True)


@pytest.mark.parametrize(
    "case", ["a scale", pytest.param("an item before", marks=pytest.mark.thorough)]
)
def test_graph_breaks_beside_logits(case):
    assert_trains_alike(BREAKS[case], "eager", fullgraph=False)


@pytest.mark.parametrize("case", BREAKS)
@pytest.mark.thorough
def test_all_graph_breaks_beside_logits(case):
    assert_trains_alike(BREAKS[case], "aot_eager", fullgraph=False)
