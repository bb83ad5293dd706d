"""Patched models in CUDA graphs: whole captured steps, with accumulated micro-batches, and
`make_graphed_callables`."""

import copy

import pytest
import tiny
import torch
from hardware import DEVICE

from liger_kernel.transformers import apply_liger_kernel

if DEVICE == "cpu":
    pytest.skip("no CUDA or ROCm device: CUDA graphs need one", allow_module_level=True)

MICRO = 3  # micro-batches of a step


def pair(family):
    """With SDPA: transformers' masks for its other attention are copied from the host, which no
    graph can hold."""
    reference = tiny.model(
        family, attn_implementation="sdpa", **({"sliding_window": 32} if family == "gemma2" else {})
    )
    reference = reference.cuda()
    patched = copy.deepcopy(reference)
    assert apply_liger_kernel(patched).replaced
    return reference, patched


def batches(step):
    micro_batches = [tiny.batch(2, 17, seed=MICRO * step + i) for i in range(MICRO)]
    return {
        name: torch.stack([batch[name] for batch in micro_batches]).cuda()
        for name in micro_batches[0]
    }


def items(batch):
    return (batch["labels"][..., 1:] != -100).sum()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def accumulated(model, batch, count):
    """Forward and backward of every micro-batch; the sum of their losses."""
    total = 0.0
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        loss = model(input_ids=ids, labels=labels, num_items_in_batch=count).loss
        loss.backward()
        total = total + loss.detach()
    return total


def warm(run):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("one_graph", [True, False], ids=["one graph", "one graph a micro-batch"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_a_captured_step_with_accumulation(family, one_graph):
    """Over steps with other data: loss and weights of the unpatched model in eager mode."""
    reference, patched = pair(family)
    before = copy.deepcopy(patched.state_dict())
    optimizer = optimizer_of(patched)
    static = batches(99)
    count = items(static)
    static_micro_batch = {name: t[:1].clone() for name, t in static.items()}

    def update():
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def forward_backward():
        return accumulated(patched, static if one_graph else static_micro_batch, count)

    def step():
        forward_backward()
        update()

    warm(step)
    graph = torch.cuda.CUDAGraph()
    rest = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = forward_backward()
        if one_graph:
            update()
    if not one_graph:
        with torch.cuda.graph(rest, pool=graph.pool()):
            update()

    def replayed(batch):
        count.copy_(items(batch))
        if one_graph:
            for name, t in static.items():
                t.copy_(batch[name])
            graph.replay()
            return loss.clone()
        total = 0.0
        for i in range(MICRO):
            for name, t in static_micro_batch.items():
                t.copy_(batch[name][i : i + 1])
            graph.replay()
            total = total + loss
        rest.replay()
        return total

    with torch.no_grad():  # what the warm-up did to weights and momentum
        for name, t in patched.state_dict().items():
            t.copy_(before[name])
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()
    reference_optimizer = optimizer_of(reference)
    for n in range(4):
        batch = batches(n)
        expected = accumulated(reference, batch, items(batch))
        reference_optimizer.step()
        reference_optimizer.zero_grad()
        torch.testing.assert_close(replayed(batch), expected, rtol=1e-5, atol=1e-5)
    for (name, output), expected in zip(
        patched.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(
            output, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()), msg=name
        )


def test_a_number_of_items_neither_waits_nor_is_copied():
    """An int in a captured step, and in an eager one under an error for whatever waits."""
    _, patched = pair("llama")
    batch = {k: v.cuda() for k, v in tiny.batch().items()}

    def run():
        return patched(**batch, num_items_in_batch=7).loss

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    warm(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run()
    graph.replay()
    torch.testing.assert_close(loss, expected)


class OfTensors(torch.nn.Module):
    """`make_graphed_callables` takes modules that are called with tensors alone."""

    def __init__(self, module, call):
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, *tensors):
        return self.call(self.module, *tensors)


def layer(module, x, cos, sin):
    out = module(x, position_embeddings=(cos, sin), attention_mask=None)
    return out if isinstance(out, torch.Tensor) else out[0]


def loss(module, ids, labels):
    return module(input_ids=ids, labels=labels).loss


@pytest.mark.parametrize("part", ["layer", "model"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_graphed_callables(family, part):
    """Forward and backward of several calls, each with its own data."""
    reference, patched = pair(family)

    def make_inputs(seed):
        if part == "model":
            batch = tiny.batch(2, 17, seed=seed)
            return batch["input_ids"].cuda(), batch["labels"].cuda()
        torch.manual_seed(seed)
        x = torch.randn(2, 17, tiny.SIZES["hidden_size"], device="cuda")
        with torch.no_grad():
            angles = reference.model.rotary_emb(x, torch.arange(17, device="cuda")[None])
        return x.requires_grad_(), *angles

    select, call = (lambda m: m, loss) if part == "model" else (lambda m: m.model.layers[0], layer)
    graphed = torch.cuda.make_graphed_callables(OfTensors(select(patched), call), make_inputs(99))
    for seed in range(3):
        results = []
        for model, run in ((reference, OfTensors(select(reference), call)), (patched, graphed)):
            model.zero_grad(set_to_none=True)
            tensors = [
                t.detach().clone().requires_grad_(t.requires_grad) for t in make_inputs(seed)
            ]
            out = run(*tensors)
            out.square().sum().backward()
            grads = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
            results.append((out.detach().clone(), tensors[0].grad, grads))
        (expected, dx, grads), (output, mine_dx, mine_grads) = results
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        assert grads.keys() == mine_grads.keys() and (dx is None) == (mine_dx is None)
        for name, g in {**grads, **({} if dx is None else {"x": dx})}.items():
            output = mine_dx if name == "x" else mine_grads[name]
            torch.testing.assert_close(
                output, g, rtol=1e-3, atol=1e-4 * float(g.abs().max()), msg=name
            )
