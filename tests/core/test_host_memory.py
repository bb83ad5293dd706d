"""Checkpoints whose inputs wait in the host's memory: the same gradients, and little stays on the
device."""

import contextlib
import gc
import os
import threading
import types

import host
import pytest
import torch
from hardware import DEVICE
from torch.utils.checkpoint import checkpoint

from liger_kernel.core import devices, host_memory
from liger_kernel.core.checkpoint import offloaded_checkpoint

LAYERS, ROWS, H = 5, 6, 8
REENTRANT = pytest.mark.parametrize("reentrant", [False, True])


@pytest.fixture
def offloaded(monkeypatch):
    return host.offload_every_tensor(monkeypatch)


def random_parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(ROWS, H)] + [(H, H)] * LAYERS
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]


def layer(w):
    return lambda h: torch.tanh(h @ w) + h


def run_layers(checkpoint_fn, x, weights, layer=layer):
    h = x * 1
    for w in weights:
        h = checkpoint_fn(layer(w), h)
    return h.square().sum()


def gradients(checkpoint_fn, reentrant, seed=0):
    x, *weights = random_parameters(seed)
    run_layers(lambda *args: checkpoint_fn(*args, use_reentrant=reentrant), x, weights).backward()
    return [t.grad for t in (x, *weights)]


@REENTRANT
def test_gradients(reentrant, offloaded):
    for seed in (0, 1):
        expected, grads = (
            gradients(checkpoint_fn, reentrant, seed)
            for checkpoint_fn in (checkpoint, offloaded_checkpoint)
        )
        assert all(map(torch.equal, grads, expected))
    assert len(offloaded) == 2 * LAYERS and not any(w() for w in offloaded)


def test_host_memory_is_used_again(offloaded):
    """By tensors of other sizes, too; all of it has come back."""
    pinned_bytes = []
    for _ in range(3):
        gradients(offloaded_checkpoint, False)
        pinned_bytes.append(host_memory._PinnedPieces.pinned_bytes)
    pieces = -(-ROWS * H * 4 // 100)
    (copy_stream,) = host_memory._copy_streams.values()
    assert pinned_bytes == [LAYERS * pieces * 100] * 3
    assert len(copy_stream.pieces.free) == LAYERS * pieces
    x = torch.ones(3, 5, device=DEVICE)
    x_on_host = host_memory.offload_to_host(x)
    assert torch.equal(x_on_host.get(), x)
    assert host_memory._PinnedPieces.pinned_bytes == pinned_bytes[0]


def test_two_are_on_the_device(offloaded):
    """At most, in forward. The last tensor stays there for backward, which begins with it."""
    x, *weights = random_parameters()
    counts = []

    def watched(w):
        run = layer(w)

        def forward(h):
            counts.append(sum(s() is not None and s().x is not None for s in offloaded))
            return run(h)

        return forward

    loss = run_layers(offloaded_checkpoint, x, weights, watched)
    assert counts == [1] * LAYERS and offloaded[-1]().x is not None
    loss.backward()


def test_a_limit(offloaded, monkeypatch):
    """What would be more stays where it is."""
    expected = gradients(checkpoint, False)
    size = -(-ROWS * H * 4 // 100) * 100
    monkeypatch.setenv(host_memory.ENV_VARIABLE, str(2 * size))
    assert all(map(torch.equal, gradients(offloaded_checkpoint, False), expected))
    assert len(offloaded) == 2 and host_memory._PinnedPieces.pinned_bytes == 2 * size
    for words in ("much", "-1", "nan"):
        monkeypatch.setenv(host_memory.ENV_VARIABLE, words)
        with pytest.raises(
            ValueError, match=f"{host_memory.ENV_VARIABLE} is '{words}', give a number of bytes"
        ):
            host_memory.host_memory_limit()
    monkeypatch.delenv(host_memory.ENV_VARIABLE)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    memory_of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < host_memory.host_memory_limit() <= memory_of_machine // 8


def test_a_graph_is_kept(offloaded):
    x, *weights = random_parameters()
    loss = run_layers(offloaded_checkpoint, x, weights)
    first, second = (torch.autograd.grad(loss, [x, *weights], retain_graph=True) for _ in range(2))
    expected = torch.autograd.grad(run_layers(checkpoint_plain, x, weights), [x, *weights])
    assert all(map(torch.equal, first, expected)) and all(map(torch.equal, second, expected))
    del loss
    gc.collect()
    assert not any(w() for w in offloaded)


def checkpoint_plain(function, h):
    return checkpoint(function, h, use_reentrant=False)


def test_a_layer_that_writes_to_its_input(offloaded):
    """Its copy may not be done by then: an error, as without the host's memory, and never another
    gradient."""
    x, *weights = random_parameters()
    loss = run_layers(
        offloaded_checkpoint, x, weights, lambda w: lambda h: torch.tanh(h.mul_(2) @ w)
    )
    with pytest.raises(RuntimeError, match="written to while it was copied to the host"):
        loss.backward()


def test_an_input_that_stays_and_is_written_to(offloaded, monkeypatch):
    """As without the host's memory: an error, and never another gradient."""
    monkeypatch.setattr(host_memory, "MIN_BYTES", 2**30)
    x, *weights = random_parameters()
    loss = run_layers(
        offloaded_checkpoint, x, weights, lambda w: lambda h: torch.tanh(h.mul_(2) @ w)
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert not offloaded


def test_what_is_not_offloaded(offloaded, monkeypatch):
    """Parameters, what needs no gradient, what several layers in a row read, small and strided
    tensors."""
    x, *weights = random_parameters()

    keep = offloaded_checkpoint

    keep(lambda w, y: w * y, torch.nn.Parameter(weights[0].detach()), weights[1].detach())
    assert not offloaded
    h = x * 1
    out = (
        keep(lambda h, m: h * m, h, torch.ones_like(h))
        + keep(lambda h: h * 2, h)
        + keep(lambda h: h * 3, h)
    )
    assert len(offloaded) == 1
    keep(lambda h: h * 2, (x * 1).t())
    assert len(offloaded) == 1
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.full_like(x, 6))
    with torch.no_grad():
        keep(lambda h: h * 2, h)
    monkeypatch.setattr(host_memory, "MIN_BYTES", h.numel() * 4 + 1)
    keep(lambda h: h * 2, x * 1)
    assert len(offloaded) == 1


def test_only_some_of_backward(offloaded):
    """A graph that is dropped halfway gives everything back."""
    x, *weights = random_parameters()
    loss = run_layers(offloaded_checkpoint, x, weights)
    torch.autograd.grad(loss, weights[-1], retain_graph=True)
    del loss
    gc.collect()
    (copy_stream,) = host_memory._copy_streams.values()
    assert not any(w() for w in offloaded)
    assert len(copy_stream.pieces.free) * 100 == host_memory._PinnedPieces.pinned_bytes


def test_fetched_before_it_is_needed(offloaded, monkeypatch):
    """If the device has free memory; the same gradients."""
    expected = gradients(checkpoint, False)
    monkeypatch.setattr(devices, "free_memory", lambda x: 2**40)
    start_fetch = host_memory.OffloadedTensor.start_fetch
    fetches = []

    def recorded_fetch(self):
        fetches.append(self)
        return start_fetch(self)

    monkeypatch.setattr(host_memory.OffloadedTensor, "start_fetch", recorded_fetch)
    assert all(map(torch.equal, gradients(offloaded_checkpoint, False), expected))
    assert len(fetches) == LAYERS - 1  # all but the last, which was still on the device


class Stream:
    def __init__(self, *_):
        self.waits, self.read = [], []

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        self.waits.append(event)

    def record_event(self):
        return object()


@pytest.mark.skipif(DEVICE != "cpu", reason="the streams are made up")
def test_two_streams_of_a_thread(offloaded, monkeypatch):
    """The stream on which a tensor was made waits for its copy, whichever is the current one.

    Another stream that reads the fetched tensor waits, too, and is recorded with the allocator.
    """
    first, second, recorded = Stream(), Stream(), []
    module = types.SimpleNamespace(
        now=first, Stream=Stream, stream=lambda stream: contextlib.nullcontext()
    )
    module.current_stream = lambda device: module.now
    monkeypatch.setattr(torch, "cpu", module)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda t, stream: recorded.append(stream), raising=False
    )
    tensors_on_host = [host_memory.offload_to_host(torch.ones(3, 5) * i) for i in range(2)]
    copies = [w.device_copy and w.device_copy.copied for w in tensors_on_host]
    (copy_stream,) = host_memory._copy_streams.values()
    copy_stream.has_streams, module.now = True, second
    tensors_on_host.append(host_memory.offload_to_host(torch.ones(5)))
    assert len(first.waits) == 2 and first.waits[1] is copies[1] and not second.waits
    module.now = first
    tensors_on_host[1].start_fetch()
    module.now = second
    assert torch.equal(tensors_on_host[1].get(), torch.ones(3, 5))
    assert len(first.waits) == 3 and second.waits == first.waits[2:] and recorded == [second]


def test_in_threads(offloaded):
    expected = gradients(checkpoint, False)
    grads = [None] * 4

    def work(i):
        for _ in range(3):
            grads[i] = gradients(offloaded_checkpoint, False)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(all(map(torch.equal, g, expected)) for g in grads)


@pytest.mark.thorough
def test_compiled(offloaded):
    """In a graph nothing is offloaded."""
    x, *weights = random_parameters()
    expected = torch.autograd.grad(run_layers(checkpoint_plain, x, weights), [x, *weights])
    run = torch.compile(
        lambda x, *weights: run_layers(offloaded_checkpoint, x, weights), backend="aot_eager"
    )
    grads = torch.autograd.grad(run(x, *weights), [x, *weights])
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert not offloaded


def test_the_host_gives_no_more(offloaded, monkeypatch):
    """What cannot be pinned stays on the device."""
    expected = gradients(checkpoint, False)
    pin = host_memory._pinned_piece
    pinned = []

    def pin_three():
        if len(pinned) == 3:
            raise RuntimeError("out of memory")
        pinned.append(pin())
        return pinned[-1]

    monkeypatch.setattr(host_memory, "_pinned_piece", pin_three)
    assert all(map(torch.equal, gradients(offloaded_checkpoint, False), expected))
    assert len(offloaded) == 1 and host_memory._PinnedPieces.pinned_bytes == 300


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_arguments(layout, offloaded):
    """They stay where they are."""
    x, w, *_ = random_parameters()
    a = torch.eye(ROWS, device=DEVICE).to_sparse(layout=layout)
    h = x * 1
    out = offloaded_checkpoint(lambda h, a: torch.tanh(a @ h @ w), h, a)
    grads = torch.autograd.grad(out.sum(), [x, w])
    expected = torch.autograd.grad(torch.tanh(torch.eye(ROWS, device=DEVICE) @ x @ w).sum(), [x, w])
    assert len(offloaded) == 1
    for grad, expected_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad)
