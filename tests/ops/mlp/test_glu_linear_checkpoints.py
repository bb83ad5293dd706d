"""What a checkpoint computes again of an MLP whose weights learn: not its last product."""

import gc
import weakref

import host
import pytest
import torch
import torch.nn.functional as F
from checkpoints import CHECKPOINTS, flops_and_gradients
from hardware import DEVICE
from lora_layers import assert_close, grad_output, randn, same
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from liger_kernel.core.overwrite import recorded_backward
from liger_kernel.core.saved import saving_node
from liger_kernel.ops.mlp import activation_linear
from liger_kernel.ops.mlp.activation_linear import liger_activation_linear, liger_glu_linear
from liger_kernel.ops.mlp.swiglu_mlp import liger_swiglu_mlp

ROWS, HIDDEN_SIZE, INTERMEDIATE_SIZE = 8, 16, 40
PRODUCT = 2 * ROWS * HIDDEN_SIZE * INTERMEDIATE_SIZE  # operations of one large product


def weights():
    torch.manual_seed(0)
    gate, up = (randn(INTERMEDIATE_SIZE, HIDDEN_SIZE) for _ in range(2))
    return gate, up, randn(HIDDEN_SIZE, INTERMEDIATE_SIZE), randn(HIDDEN_SIZE)


def whole(x, gate, up, down, bias):
    return liger_swiglu_mlp(x, gate, up, down) + 0 * bias.sum()


def in_halves(x, gate, up, down, bias):
    return liger_glu_linear(F.linear(x, gate), F.linear(x, up), down, bias)


def without_gate(x, gate, up, down, bias):
    return liger_activation_linear(F.linear(x, gate), down, bias, act="tanh") + 0 * up.sum()


# name -> (MLP, products in forward)
MLPS = {"whole": (whole, 3), "in halves": (in_halves, 3), "without a gate": (without_gate, 2)}


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("mlp", MLPS)
def test_what_a_checkpoint_computes_again(mlp, name, monkeypatch):
    """The products of forward, without the last one where it stops early."""
    host.offload_every_tensor(monkeypatch)
    run_checkpoint, stops_early = CHECKPOINTS[name]
    fn, products = MLPS[mlp]
    tensors = weights()
    x = randn(ROWS, HIDDEN_SIZE)

    def run(x):
        return fn(x, *tensors)

    plain, expected = flops_and_gradients(run, x, [x, *tensors], grad_output)
    with set_checkpoint_early_stop(stops_early):
        flops, grads = flops_and_gradients(
            lambda x: run_checkpoint(run, x), x, [x, *tensors], grad_output
        )
    assert same(grads, expected)
    assert flops - plain == (products - stops_early) * PRODUCT


@pytest.mark.parametrize("mlp", MLPS)
def test_a_layer_that_ends_in_something_else(mlp):
    """Dropout saves something behind the product, which is then computed again."""
    fn, products = MLPS[mlp]
    tensors = weights()
    x = randn(ROWS, HIDDEN_SIZE)

    def layer(x):
        return x + F.dropout(fn(x, *tensors), 0.4)

    results = []
    for run in layer, lambda x: checkpoint(layer, x, use_reentrant=False):
        torch.manual_seed(3)
        results.append(flops_and_gradients(run, x, [x, *tensors], grad_output))
    (plain, expected), (flops, grads) = results
    assert same(grads, expected)
    assert flops - plain == products * PRODUCT


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_second_backward_in_a_checkpoint(name, monkeypatch):
    host.offload_every_tensor(monkeypatch)
    run_checkpoint, stops_early = CHECKPOINTS[name]
    tensors = weights()
    x = randn(ROWS, HIDDEN_SIZE)

    def run(x):
        return in_halves(x, *tensors)

    _, expected = flops_and_gradients(run, x, [x, *tensors], grad_output)
    with set_checkpoint_early_stop(stops_early):
        out = run_checkpoint(run, x)
    for keep in (True, False):
        out.backward(grad_output(out), retain_graph=keep)
        assert same([t.grad for t in (x, *tensors)], expected)
        for t in (x, *tensors):
            t.grad = None
    with pytest.raises(RuntimeError, match="second time|already|unpack"):
        out.backward(grad_output(out))


@pytest.mark.parametrize("wanted", ["x", "down alone", "bias alone"])
def test_some_gradients_alone_in_a_checkpoint(wanted):
    tensors = weights()
    x = randn(ROWS, HIDDEN_SIZE)
    some = {"x": [x], "down alone": [tensors[2]], "bias alone": [tensors[3]]}[wanted]
    results = []
    for run in in_halves, lambda *args: checkpoint(in_halves, *args, use_reentrant=False):
        out = run(x, *tensors)
        results.append(torch.autograd.grad(out, some, grad_output(out)))
    assert same(*results)


def test_gradients_with_a_graph_of_their_own():
    """``create_graph=True`` within a checkpoint."""
    tensors = weights()
    x = randn(ROWS, HIDDEN_SIZE)
    results = []
    for run in in_halves, lambda *args: checkpoint(in_halves, *args, use_reentrant=False):
        out = run(x, *tensors)
        grads = torch.autograd.grad(out, [x, *tensors], grad_output(out), create_graph=True)
        # the bias is in no gradient
        inputs = x, *tensors[:-1]
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), inputs))
    assert_close(*results)


def test_gradients_take_the_memory_of_what_was_recomputed(monkeypatch):
    """As they do without a checkpoint."""
    over = []
    fill = activation_linear.glu_bwd_over

    def record(dy, a, b, need_da, need_db, over_a, over_b, *options, **names):
        over.append((over_a, over_b))
        return fill(dy, a, b, need_da, need_db, over_a, over_b, *options, **names)

    monkeypatch.setattr(activation_linear, "glu_bwd_over", record)
    tensors = weights()
    x = randn(ROWS, HIDDEN_SIZE)
    for keep in (True, False):
        out = checkpoint(lambda x: in_halves(x, *tensors), x, use_reentrant=False)
        gc.collect()
        out.backward(grad_output(out), retain_graph=keep)
    assert over == [(False, False), (True, True)]


@pytest.mark.parametrize("index", [2, 3])
def test_a_parameter_that_changes_before_the_recomputation(index):
    """A checkpoint computes with what is there then. PyTorch says nothing."""
    x = randn(ROWS, HIDDEN_SIZE)
    results = []
    for run in (
        in_halves,
        lambda x, gate, up, down, bias: F.linear(
            F.silu(F.linear(x, gate)) * F.linear(x, up), down, bias
        ),
    ):
        tensors = weights()
        out = checkpoint(lambda x: run(x, *tensors), x, use_reentrant=False)  # noqa: B023
        with torch.no_grad():
            tensors[index].mul_(2)
        results.append(torch.autograd.grad(out, [x, *tensors], grad_output(out)))
    assert_close(*results)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("mlp", MLPS)
def test_what_a_checkpoint_keeps_goes_with_backward(mlp, keep):
    """Though the loss is still there. Otherwise each layer's input would stay for the step."""
    fn, _ = MLPS[mlp]
    tensors = weights()
    x = randn(ROWS, HIDDEN_SIZE)
    hidden = 2 * x
    kept = weakref.ref(hidden)
    out = checkpoint(lambda x: fn(x, *tensors), hidden, use_reentrant=False).sum()
    del hidden
    gc.collect()
    gc.disable()
    try:
        out.backward(retain_graph=keep)
        assert (kept() is not None) == keep
    finally:
        gc.enable()


def test_a_recomputation_that_fails():
    """Such as one that ran out of memory. A second backward computes it again."""
    tensors = weights()
    x = randn(ROWS, HIDDEN_SIZE)
    out = in_halves(x, *tensors)
    expected = torch.autograd.grad(out, [x, *tensors], grad_output(out))
    calls = []

    def run(x):
        calls.append(x)
        if len(calls) == 2:
            raise MemoryError
        return in_halves(x, *tensors)

    out = checkpoint(run, x, use_reentrant=False)
    with pytest.raises(MemoryError):
        out.backward(grad_output(out))
    out.backward(grad_output(out))
    assert same([t.grad for t in (x, *tensors)], expected)


def test_a_recorded_backward_frees_nothing():
    """A CUDA graph's memory is kept for replays, though it may write over what was saved."""
    tensors = weights()
    x = randn(ROWS, HIDDEN_SIZE)
    hidden = 2 * x
    kept = weakref.ref(hidden)
    out = checkpoint(lambda x: in_halves(x, *tensors), hidden, use_reentrant=False)
    del hidden
    with recorded_backward(out.grad_fn):
        torch.autograd.grad(out, [x, *tensors], grad_output(out), retain_graph=True)
    gc.collect()
    assert kept() is not None


@pytest.mark.parametrize("switch", ["config", "context"])
def test_compiled_autograd_gets_what_it_can_see(switch):
    """It does not see a node outside the graph, so that all of forward is computed again."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    tensors = weights()
    x = randn(ROWS, HIDDEN_SIZE)

    def run(x):
        with (
            torch._dynamo.config.patch(compiled_autograd=True)
            if switch == "config"
            else compiled_autograd._enable(torch.compile(backend="eager"))
        ):
            return in_halves(x, *tensors)

    plain, expected = flops_and_gradients(
        lambda x: in_halves(x, *tensors), x, [x, *tensors], grad_output
    )
    flops, grads = flops_and_gradients(
        lambda x: checkpoint(run, x, use_reentrant=False), x, [x, *tensors], grad_output
    )
    assert same(grads, expected) and flops - plain == 3 * PRODUCT


def test_compiled_autograd_that_was_switched_on_since_forward(monkeypatch):
    """Dynamo, which runs backward then, cannot trace the interpreter: it is only asked whether it
    does."""
    tensors = weights()
    x = randn(ROWS, HIDDEN_SIZE)
    out = checkpoint(in_halves, x, *tensors, use_reentrant=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match="switch it on before forward"):
        saving_node(out.grad_fn)


def test_no_reference_to_itself():
    """What a forward has made is gone with its output, without the garbage collector."""
    tensors = weights()
    x = randn(ROWS, HIDDEN_SIZE)
    gc.collect()
    gc.disable()
    try:
        for run in in_halves, lambda *args: checkpoint(in_halves, *args, use_reentrant=False):
            out = run(x, *tensors)
            node = weakref.ref(out.grad_fn)
            out.backward(grad_output(out))
            del out
            assert node() is None
    finally:
        gc.enable()


def test_a_negated_view():
    """Kernels read what is in memory: the imaginary part of a conjugate is resolved first."""
    torch.manual_seed(1)
    a = torch.randn(ROWS, INTERMEDIATE_SIZE, dtype=torch.complex64, device=DEVICE).conj().imag
    assert a.is_neg()
    b, down = randn(ROWS, INTERMEDIATE_SIZE), randn(HIDDEN_SIZE, INTERMEDIATE_SIZE)
    results = []
    for factor in a, a.resolve_neg():
        for run in (
            liger_glu_linear,
            lambda *args: checkpoint(liger_glu_linear, *args, use_reentrant=False),
        ):
            out = run(factor, b, down)
            results.append(torch.autograd.grad(out, [b, down], grad_output(out)))
    for result in results[1:]:
        assert same(result, results[0])
