"""What a checkpoint computes again of a gated MLP with low-rank adapters: no down product."""

import functools
import gc
import weakref

import checkpoints
import host
import pytest
import torch
import torch.nn.functional as F
from checkpoints import CHECKPOINTS
from lora_layers import (
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    PROJECTIONS,
    assert_close,
    grad_output,
    our_mlp,
    peft_mlp,
    randn,
    read_layer,
    same,
    trainable,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

TARGETS = {
    "all": ("gate_proj", "up_proj", "down_proj"),
    "down alone": ("down_proj",),
    "gate and up": ("gate_proj", "up_proj"),
    "none": (),
}


def flops_and_gradients(run, mlp, x):
    """Return the operations of all products, forward and backward, and the gradients."""
    x = x.detach().requires_grad_()
    return checkpoints.flops_and_gradients(run, x, [x, *trainable(mlp)], grad_output)


ROWS = 8
PRODUCT = 2 * ROWS * HIDDEN_SIZE * INTERMEDIATE_SIZE  # operations of one large product


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("targets", TARGETS)
def test_what_a_checkpoint_computes_again(targets, name, monkeypatch):
    """Gate's and up's products, not down's."""
    host.offload_every_tensor(monkeypatch)
    run_checkpoint, stops_early = CHECKPOINTS[name]
    mlp = peft_mlp(TARGETS[targets], ranks=(1,))
    x = randn(ROWS, HIDDEN_SIZE)

    def run(x):
        return our_mlp(mlp, x)

    plain, expected = flops_and_gradients(run, mlp, x)
    with set_checkpoint_early_stop(stops_early):
        flops, grads = flops_and_gradients(lambda x: run_checkpoint(run, x), mlp, x)
    assert same(grads, expected)
    # torch does not count addmm_, by which the narrow products are made and added
    assert flops - plain == (2 * PRODUCT if stops_early else 3 * PRODUCT)


def test_peft_computes_the_product_again():
    """What the test above would see otherwise."""
    mlp = peft_mlp(ranks=(1,))
    x = randn(ROWS, HIDDEN_SIZE)
    plain, _ = flops_and_gradients(mlp, mlp, x)
    flops, _ = flops_and_gradients(lambda x: checkpoint(mlp, x, use_reentrant=False), mlp, x)
    assert flops - plain > 3 * PRODUCT


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_second_backward_in_a_checkpoint(name, monkeypatch):
    host.offload_every_tensor(monkeypatch)
    run_checkpoint, stops_early = CHECKPOINTS[name]
    mlp = peft_mlp(ranks=(3, 5))
    x = randn(ROWS, HIDDEN_SIZE)
    _, expected = flops_and_gradients(lambda x: our_mlp(mlp, x), mlp, x)
    tensors = [x, *trainable(mlp)]
    with set_checkpoint_early_stop(stops_early):
        out = run_checkpoint(lambda x: our_mlp(mlp, x), x)
    for keep in (True, False):
        out.backward(grad_output(out), retain_graph=keep)
        assert same([t.grad for t in tensors], expected)
        for t in tensors:
            t.grad = None


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_layer_that_ends_in_something_else(name):
    """Dropout and a residual: dropout saves something behind the product, which is computed
    again."""
    run_checkpoint, stops_early = CHECKPOINTS[name]
    mlp = peft_mlp()
    x = randn(ROWS, HIDDEN_SIZE)

    def layer(x):
        return x + F.dropout(our_mlp(mlp, x), 0.4)

    torch.manual_seed(3)
    _, expected = flops_and_gradients(layer, mlp, x)
    torch.manual_seed(3)
    with set_checkpoint_early_stop(stops_early):
        _, grads = flops_and_gradients(lambda x: run_checkpoint(layer, x), mlp, x)
    assert same(grads, expected)


@pytest.mark.parametrize("targets", TARGETS)
def test_a_checkpoint_that_keeps_products(targets):
    mlp = peft_mlp(TARGETS[targets])
    x = randn(ROWS, HIDDEN_SIZE)

    def run(x):
        return our_mlp(mlp, x)

    def selective(x):
        contexts = functools.partial(
            create_selective_checkpoint_contexts,
            [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
        )
        return checkpoint(run, x, use_reentrant=False, context_fn=contexts)

    assert same(flops_and_gradients(selective, mlp, x)[1], flops_and_gradients(run, mlp, x)[1])


@pytest.mark.parametrize("ranks", [(3,), (3, 5)], ids=str)
@pytest.mark.parametrize("order", ["A, then the rest", "B alone", "x alone"])
def test_some_gradients_alone_in_a_checkpoint(order, ranks):
    mlp = peft_mlp(ranks=ranks)
    x = randn(ROWS, HIDDEN_SIZE)
    _, expected = flops_and_gradients(lambda x: our_mlp(mlp, x), mlp, x)
    tensors = [x, *trainable(mlp)]
    grads = dict(zip(map(id, tensors), expected, strict=True))
    down = mlp.down_proj
    a, b = down.lora_A["adapter0"].weight, down.lora_B["adapter0"].weight
    out = checkpoint(lambda x: our_mlp(mlp, x), x, use_reentrant=False)
    runs = {"A, then the rest": [[a], tensors], "B alone": [[b]], "x alone": [[x]]}[order]
    for wanted in runs:
        results = torch.autograd.grad(out, wanted, grad_output(out), retain_graph=True)
        assert same(results, [grads[id(t)] for t in wanted])


@pytest.mark.parametrize("targets", TARGETS)
def test_dh_is_not_there_while_the_layer_is_recomputed(targets):
    """The first product of backward is the recomputation's, not that of dh."""
    mlp = peft_mlp(TARGETS[targets])
    x = randn(ROWS, HIDDEN_SIZE)
    out = checkpoint(lambda x: our_mlp(mlp, x), x, use_reentrant=False)
    operands = []
    down_weight = read_layer(mlp.down_proj)[0]

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                operands.append(args[1].data_ptr())
            return func(*args, **(kwargs or {}))

    with Recorder():
        out.backward(grad_output(out))
    assert down_weight.data_ptr() in operands[2:] and down_weight.data_ptr() not in operands[:2]


@pytest.mark.parametrize(
    "name", ["base_layer.weight", "lora_A.adapter0.weight", "lora_B.adapter0.weight"]
)
def test_a_weight_that_changes_before_the_recomputation(name):
    """A checkpoint computes with what is there then. PyTorch says nothing."""
    x = randn(2, HIDDEN_SIZE)
    results = []
    for run in (our_mlp, lambda mlp, x: mlp(x)):
        mlp = peft_mlp()
        out = checkpoint(functools.partial(run, mlp), x, use_reentrant=False)
        with torch.no_grad():
            mlp.down_proj.get_parameter(name).mul_(2)
        results.append(torch.autograd.grad(out, [x, *trainable(mlp)], grad_output(out)))
    assert_close(*results)


def test_a_weight_that_is_there_for_the_call_alone():
    """A checkpoint does not keep it."""
    mlp = peft_mlp()
    brought = []

    def run(x):
        for projection in PROJECTIONS:
            layer = getattr(mlp, projection).base_layer
            layer.weight = torch.nn.Parameter(layer.weight.clone(), requires_grad=False)
            brought.append(weakref.ref(layer.weight))
        return our_mlp(mlp, x)

    x = randn(2, HIDDEN_SIZE)
    outputs = [checkpoint(run, x, use_reentrant=False) for _ in range(3)]
    gc.collect()
    assert sum(weight() is not None for weight in brought) == len(PROJECTIONS)  # the module's own
    torch.autograd.grad(sum(out.sum() for out in outputs), x)
