"""Graphs of a layer's calls, with layers that do what decoder layers rarely do."""

import random

import pytest
import torch
from graph_recorder import Recorder
from hardware import DEVICE

from liger_kernel.core import devices
from liger_kernel.core.layer_graphs import MAX_RECORDINGS, LayerGraphs, LayerStack, _Graph
from liger_kernel.core.overwrite import may_overwrite


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(devices, "GraphRecorder", Recorder)


class Layer(torch.nn.Module):
    """x -> tanh(x·w), and whatever ``extra(self, y, **kwargs)`` makes of it."""

    def __init__(self, extra=None):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(4, 4, device=DEVICE))
        self.unused = torch.nn.Parameter(torch.randn(2, device=DEVICE))
        self.register_buffer("buffer", torch.zeros(4, device=DEVICE))
        self.extra = extra

    def forward(self, x, **kwargs):
        y = torch.tanh(x @ self.w)
        return y if self.extra is None else self.extra(self, y, **kwargs)


class Pair:
    """A layer that is called as it is, and its copy, which is called by graphs."""

    def __init__(self, extra=None):
        torch.manual_seed(0)
        self.layer = Layer(extra)
        self.other = Layer(extra)
        self.other.load_state_dict(self.layer.state_dict())
        self.graphs = LayerGraphs(LayerStack())
        self.both = self.layer, self.other

    def call(self, layer, x, kwargs):
        if layer is self.layer:
            return layer(x, **kwargs)
        return self.graphs.call(layer, layer, x, kwargs)

    def step(self, x, needs_gradient=True, **kwargs):
        """Compare outputs and gradients."""
        results = []
        for layer in self.both:
            layer.zero_grad()
            leaf = x.clone().requires_grad_(needs_gradient)
            y = self.call(layer, leaf, kwargs)
            if y.requires_grad:
                y.square().sum().backward()
            results.append([y.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
        for a, b in zip(*results, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)

    def train(self, change=None, steps=4, needs_gradient=True, **kwargs):
        for i in range(steps):
            torch.manual_seed(i)
            self.step(torch.randn(3, 4, device=DEVICE), needs_gradient, **kwargs)
        for layer in self.both if change else ():
            change(layer)
        if change:
            self.train(None, steps, needs_gradient, **kwargs)

    def count(self):
        kinds = [kinds for _, kinds in self.graphs.states]
        return sum(hasattr(graph, "number") for known in kinds for graph in known.values())


def test_records():
    pair = Pair()
    pair.train()
    assert pair.count() == 1


def test_a_parameter_without_a_gradient():
    """Its hooks are not called."""
    pair = Pair()
    pair.other.unused.register_hook(lambda gradient: gradient * 2)
    pair.train()
    assert pair.count() == 1


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_frozen_layer(needs_gradient):
    pair = Pair()
    for layer in pair.both:
        layer.requires_grad_(False)
    pair.train(needs_gradient=needs_gradient)
    assert pair.count() == 1


def test_precision_by_its_newer_name(monkeypatch):
    monkeypatch.setattr(torch.backends, "fp32_precision", torch.backends.fp32_precision)
    pair = Pair()
    pair.train(lambda layer: setattr(torch.backends, "fp32_precision", "ieee"))
    assert pair.count() == 1


def scaled(layer, y, a=1.0, b=1.0):
    return y * a - 2 * b


def nested(layer, y, a):
    return y * a[0][0]


def test_a_setting_that_the_first_call_of_a_process_sets(monkeypatch):
    """As attention does with the order of its implementations. The second call is recorded."""
    calls = []
    monkeypatch.setattr(devices, "product_settings", lambda: min(len(calls), 1))

    def attend(self, y):
        calls.append(self)
        return y

    pair = Pair(attend)
    pair.step(torch.randn(3, 4, device=DEVICE))
    assert pair.count() == 0
    pair.step(torch.randn(3, 4, device=DEVICE))
    assert pair.count() == 1


class Chain:
    """Layers that share a stack, and how many replays and recordings each has had."""

    def __init__(self, monkeypatch, size=3):
        torch.manual_seed(0)
        self.layers = [Layer() for _ in range(size)]
        stack = LayerStack()
        self.graphs = [LayerGraphs(stack) for _ in self.layers]
        self.recorded = []
        self.replayed = []
        record, forward = _Graph.record, _Graph.forward

        def note_record(graph, *args):
            self.recorded.append(graph.state.layer)
            return record(graph, *args)

        def note_forward(graph, *args):
            self.replayed.append(graph.state.layer)
            return forward(graph, *args)

        monkeypatch.setattr(_Graph, "record", note_record)
        monkeypatch.setattr(_Graph, "forward", note_forward)

    def step(self, order):
        """Return how many layers were recorded, and replayed; results are those without graphs."""
        self.recorded.clear()
        self.replayed.clear()
        results = []
        for by_graphs in False, True:
            torch.manual_seed(1)
            x = y = torch.randn(3, 4, device=DEVICE, requires_grad=True)
            for i in order:
                layer = self.layers[i]
                layer.zero_grad()
                y = self.graphs[i].call(layer, layer, y, {}) if by_graphs else layer(y)
            y.square().sum().backward()
            results.append([y.detach(), x.grad, *(self.layers[i].w.grad for i in order)])
        assert all(map(torch.equal, *results))
        return len(self.recorded), len(self.replayed)


def test_a_layer_that_was_recorded_last_and_runs_first(monkeypatch):
    """The others are recorded once more, behind it."""
    chain = Chain(monkeypatch)
    chain.step([1, 2])
    assert chain.step([0, 1, 2]) == (2, 2)
    assert chain.step([0, 1, 2]) == (3, 3)
    for _ in range(3):
        assert chain.step([0, 1, 2]) == (0, 3)


def test_layers_whose_order_changes_again_and_again(monkeypatch):
    chain = Chain(monkeypatch)
    orders = [0, 1, 2], [2, 1, 0]
    recorded = sum(chain.step(orders[i % 2])[0] for i in range(12))
    assert recorded <= len(chain.layers) * MAX_RECORDINGS
    assert chain.step(orders[0])[0] == chain.step(orders[1])[0] == 0


def test_without_room(monkeypatch):
    """It is not tried at every step."""
    chain = Chain(monkeypatch)

    def fail(self, function):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(devices.GraphRecorder, "rehearse", fail)
    recorded = sum(chain.step([0, 1, 2])[0] for _ in range(8))
    assert recorded == len(chain.layers) * MAX_RECORDINGS


def test_arguments():
    pair = Pair(scaled)
    one, two = torch.tensor(3.0, device=DEVICE), torch.tensor(5.0, device=DEVICE)
    pair.train(a=one, b=one)
    pair.train(a=one, b=two)
    pair.train(a=two, b=0.5)
    assert pair.count() == 3
    pair = Pair(nested)
    pair.train(a=((one,),))
    assert not pair.count()


def draw_on_the_host(layer, y):
    return y * (2.0 if random.random() < 0.5 else 3.0)


def draw_by_torch(layer, y):
    return y * float(torch.rand([]))


def count_calls(layer, y):
    layer.buffer += 1
    return y * layer.buffer


def write_to_an_argument(layer, y, total):
    total += y.detach()
    return y


@pytest.mark.parametrize("extra", [draw_on_the_host, draw_by_torch, count_calls])
def test_what_a_call_does_beside(extra):
    pair = Pair(extra)
    for i in range(4):
        results = []
        for layer in pair.both:
            random.seed(i)
            torch.manual_seed(i)
            results.append(pair.call(layer, torch.ones(3, 4, device=DEVICE), {}))
        assert torch.equal(*results)
    assert not pair.count()


def test_an_argument_that_is_written_to():
    pair = Pair(write_to_an_argument)
    totals = [torch.zeros(3, 4, device=DEVICE) for _ in pair.both]
    for _ in range(4):
        for layer, total in zip(pair.both, totals, strict=True):
            pair.call(layer, torch.ones(3, 4, device=DEVICE), dict(total=total))
    assert torch.equal(*totals)
    assert not pair.count()


def use_the_list(layer, y):
    return y * layer.others[0]


def test_weights_that_are_no_parameters():
    """They get their gradients: nothing is recorded."""
    pair = Pair(use_the_list)
    for layer in pair.both:
        layer.others = [torch.ones(4, device=DEVICE, requires_grad=True)]
    pair.train()
    assert torch.equal(*(layer.others[0].grad for layer in pair.both))
    assert not pair.count()


def transpose(layer):
    layer.w.data = layer.w.data.t()


def use_the_buffer(layer, y):
    return y + layer.buffer + layer.pair[0]


def replace_tensors(layer):
    layer.pair = (torch.ones(1, device=DEVICE),)


def replace_data_of_an_attribute(layer):
    layer.pair[0].data = torch.full((1,), 5.0, device=DEVICE)


@pytest.mark.parametrize("change", [transpose, replace_tensors, replace_data_of_an_attribute])
def test_changes(change):
    pair = Pair(use_the_buffer)
    for layer in pair.both:
        layer.pair = (torch.zeros(1, device=DEVICE),)
    pair.train(change)


def scaled_by_attribute(layer, y):
    return y * layer.factor


def test_a_layer_that_has_changed_before_a_kept_backward():
    """Backward could only compute it again as it is by now."""
    pair = Pair(scaled_by_attribute)
    for layer in pair.both:
        layer.factor = 2.0
    pair.train()
    x = torch.ones(3, 4, device=DEVICE, requires_grad=True)
    y = pair.call(pair.other, x, {})
    pair.other.factor = 3.0
    with pytest.raises(RuntimeError, match="was changed"):
        y.sum().backward(retain_graph=True)
    pair.other.factor = 2.0
    y.sum().backward(retain_graph=True)


def test_shapes_that_come_once_keep_no_others_out():
    pair = Pair()
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 9):
        pair.step(torch.randn(rows, 4, device=DEVICE))
    assert pair.count() == 1


class Cube(torch.autograd.Function):
    """Its backward writes dx over x if it may, as a replayed kernel does: no version changes."""

    answers = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        Cube.answers.append(may_overwrite(ctx, x))
        dx = 3 * x.detach() ** 2 * dy
        return x.detach().data.copy_(dx) if Cube.answers[-1] else dx


def cubed(layer, y):
    return Cube.apply(y * 2)  # of a product with a number nothing is saved


def test_a_recorded_backward_overwrites(monkeypatch):
    """As one that is not recorded: else the graphs' memory has both tensors."""
    monkeypatch.setattr(Cube, "answers", [])
    pair = Pair(cubed)
    pair.train()
    assert pair.count() == 1 and len(Cube.answers) > 4 and all(Cube.answers)


def test_a_backward_that_failed_behind_the_replay():
    """The second one finds gradients where forward saved tensors, and computes the layer again."""
    pair = Pair(cubed)
    pair.train()
    x = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    y = pair.call(pair.other, x, {})
    failures = [torch.OutOfMemoryError("behind the replay")]

    def fail_once(grads, incoming):
        if failures:
            raise failures.pop()

    y.grad_fn.register_hook(fail_once)
    loss = y.sum()
    with pytest.raises(torch.OutOfMemoryError, match="behind the replay"):
        torch.autograd.grad(loss, pair.other.w)
    (dw,) = torch.autograd.grad(loss, pair.other.w)
    (expected,) = torch.autograd.grad(pair.layer(x).sum(), pair.layer.w)
    assert torch.equal(dw, expected)
    pair.train()  # and goes on


def test_passing_hooks():
    pair = Pair()
    handle = pair.other.register_forward_hook(lambda *_: None)
    pair.train()
    assert not pair.count()
    pair.train(steps=70)  # each call as it is, and no reason to give up
    handle.remove()
    pair.train()
    assert pair.count() == 1


def test_memory_of_replaced_weights():
    pair = Pair()
    pair.train()
    for layer in pair.both:
        layer.w.data = layer.w.data.clone()
    pair.train()
    assert pair.count() == 1  # the graphs of the old weights are gone


def test_waiting_for_the_device():
    """What a capture does not allow is noticed before."""
    if DEVICE == "cpu":
        pytest.skip("nothing waits for a CPU")
    pair = Pair(lambda layer, y: y * float(y.sum() > 1e9))
    pair.train()
    assert not pair.count() and "can't be recorded" in pair.graphs.refusal
    torch.rand(1, device=DEVICE)
    torch.cuda.synchronize()
