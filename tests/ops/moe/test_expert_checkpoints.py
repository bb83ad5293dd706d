"""What a checkpoint computes again of experts: not their last product."""

import gc
import weakref

import host
import pytest
import torch
import torch.nn.functional as F
from checkpoints import CHECKPOINTS, flops_and_gradients
from hardware import DEVICE
from torch.utils.checkpoint import set_checkpoint_early_stop

from liger_kernel.ops.moe import experts, lora_experts
from liger_kernel.ops.moe.experts import liger_experts
from liger_kernel.ops.moe.lora_experts import TableAdapter, liger_lora_experts

T, H, I, E, K, R = 9, 16, 8, 4, 2, 3  # noqa: E741


def plain(tensors, x):
    tables = tensors["gate_up_proj"], tensors["down_proj"]
    return liger_experts(x, *tables, tensors["index"], tensors["weights"])


def with_adapters(tensors, x):
    # they are there for the call alone
    tables = [tensors[name].detach().clone() for name in ("gate_up_proj", "down_proj")]
    a, b, p, q = (tensors[name] for name in ("a", "b", "p", "q"))
    return liger_lora_experts(
        x,
        *tables,
        tensors["index"],
        tensors["weights"],
        gate_up_lora=TableAdapter(a, b, 0.5),
        down_lora=TableAdapter(p, q, 2.0),
    )


# name -> (experts, their file, its name of the last product, and of the gradients)
KINDS = {
    "plain": (plain, experts, "experts_down", "compute_gradients"),
    "adapters": (with_adapters, lora_experts, "lora_experts_down", "compute_lora_gradients"),
}


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    shapes = dict(gate_up_proj=(E, 2 * I, H), down_proj=(E, H, I), weights=(T, K))
    shapes |= dict(a=(E, R, H), b=(E, 2 * I, R), p=(E, R, I), q=(E, H, R))
    result = {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}
    for tensor in result.values():
        tensor.requires_grad_()
    return result | dict(index=torch.rand(T, E, device=DEVICE).topk(K).indices)


def record(monkeypatch, file, name):
    """Count the calls of a function, and keep those of its named arguments."""
    calls = []
    function = getattr(file, name)
    monkeypatch.setattr(file, name, lambda *args, **kw: calls.append(kw) or function(*args, **kw))
    return calls


def gradients(fn, tensors):
    torch.manual_seed(1)
    x = torch.randn(T, H, device=DEVICE, requires_grad=True)
    learned = [x, *(t for t in tensors.values() if t.requires_grad)]
    return flops_and_gradients(fn, x, learned, weighted)[1]


def weighted(out):
    """Return an incoming gradient that differs from entry to entry."""
    return torch.arange(out.numel()).view(out.shape).to(out)


def assert_same(grads, expected):
    for grad, wanted in zip(grads, expected, strict=True):
        assert (grad is None) == (wanted is None)
        assert grad is None or torch.equal(grad, wanted)


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_checkpoint_computes_again(kind, name, tensors, monkeypatch):
    host.offload_every_tensor(monkeypatch)
    fn, file, down, _ = KINDS[kind]
    run_checkpoint, stops_early = CHECKPOINTS[name]
    expected = gradients(lambda x: fn(tensors, x), tensors)
    calls = record(monkeypatch, file, down)
    with set_checkpoint_early_stop(stops_early):
        grads = gradients(lambda x: run_checkpoint(lambda x: fn(tensors, x), x), tensors)
    assert_same(grads, expected)
    assert len(calls) == (1 if stops_early else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_something_behind_the_experts(kind, tensors, monkeypatch):
    """What dropout saves is behind the last product, which is then computed again."""
    fn, file, down, _ = KINDS[kind]
    run_checkpoint, _ = CHECKPOINTS["early stop"]

    def layer(x):
        return x + F.dropout(fn(tensors, x), 0.4)

    expected = gradients(layer, tensors)
    calls = record(monkeypatch, file, down)
    assert_same(gradients(lambda x: run_checkpoint(layer, x), tensors), expected)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_take_the_memory_of_what_was_recomputed(kind, tensors, monkeypatch):
    fn, file, _, compute = KINDS[kind]
    run_checkpoint, _ = CHECKPOINTS["early stop"]
    calls = record(monkeypatch, file, compute)
    x = torch.randn(T, H, device=DEVICE, requires_grad=True)
    for keep in (True, False):
        out = run_checkpoint(lambda x: fn(tensors, x), x)
        out.backward(weighted(out), retain_graph=keep)
    assert len(calls) == 1  # while the graph is kept, another function computes them
    assert calls[0]["dpre"] is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward(kind, tensors):
    fn = KINDS[kind][0]
    run_checkpoint, _ = CHECKPOINTS["early stop"]
    x = torch.randn(T, H, device=DEVICE, requires_grad=True)
    out = run_checkpoint(lambda x: fn(tensors, x), x)
    first, second = (
        torch.autograd.grad(out, [x, tensors["weights"]], torch.ones_like(out), retain_graph=keep)
        for keep in (True, False)
    )
    assert_same(second, first)
    with pytest.raises(RuntimeError, match="second time|already|unpack"):
        torch.autograd.grad(out, x, torch.ones_like(out))


def test_tables_that_are_there_for_the_call_alone(tensors, monkeypatch):
    """A checkpoint does not keep them."""
    run_checkpoint, _ = CHECKPOINTS["early stop"]
    tables = []
    experts_of = lora_experts.lora_experts_up

    def note(x, table, *args):
        tables.append(weakref.ref(table))
        return experts_of(x, table, *args)

    monkeypatch.setattr(lora_experts, "lora_experts_up", note)
    x = torch.randn(T, H, device=DEVICE, requires_grad=True)
    outputs = [run_checkpoint(lambda x: with_adapters(tensors, x), x) for _ in range(3)]
    gc.collect()
    assert len(tables) == 3 and not any(table() is not None for table in tables)
    torch.autograd.grad(sum(out.sum() for out in outputs), x)
    assert len(tables) == 6
