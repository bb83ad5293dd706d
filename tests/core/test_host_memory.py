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
def sent(monkeypatch):
    return host.takes_everything(monkeypatch)


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(ROWS, H)] + [(H, H)] * LAYERS
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]


def layer(w):
    return lambda h: torch.tanh(h @ w) + h


def through(keeping, x, weights, layer=layer):
    h = x * 1
    for w in weights:
        h = keeping(layer(w), h)
    return h.square().sum()


def gradients(keeping, reentrant, seed=0):
    x, *weights = drawn(seed)
    through(lambda *given: keeping(*given, use_reentrant=reentrant), x, weights).backward()
    return [t.grad for t in (x, *weights)]


@REENTRANT
def test_gradients(reentrant, sent):
    for seed in (0, 1):
        want, got = (
            gradients(keeping, reentrant, seed) for keeping in (checkpoint, offloaded_checkpoint)
        )
        assert all(map(torch.equal, got, want))
    assert len(sent) == 2 * LAYERS and not any(w() for w in sent)


def test_host_memory_is_used_again(sent):
    """By tensors of other sizes, too; all of it has come back."""
    taken = []
    for _ in range(3):
        gradients(offloaded_checkpoint, False)
        taken.append(host_memory._Pieces.taken)
    pieces = -(-ROWS * H * 4 // 100)
    (beside,) = host_memory._beside.values()
    assert taken == [LAYERS * pieces * 100] * 3 and len(beside.pieces.free) == LAYERS * pieces
    x = torch.ones(3, 5, device=DEVICE)
    waiting = host_memory.send(x)
    assert torch.equal(waiting.fetched(), x) and host_memory._Pieces.taken == taken[0]


def test_two_are_on_the_device(sent):
    """At most, in forward; the last one stays there for backward, which begins with it."""
    x, *weights = drawn()
    most = []

    def watched(w):
        run = layer(w)

        def forward(h):
            most.append(sum(s() is not None and s().x is not None for s in sent))
            return run(h)

        return forward

    loss = through(offloaded_checkpoint, x, weights, watched)
    assert most == [1] * LAYERS and sent[-1]().x is not None
    loss.backward()


def test_a_bound(sent, monkeypatch):
    """What would be more stays where it is."""
    want = gradients(checkpoint, False)
    size = -(-ROWS * H * 4 // 100) * 100
    monkeypatch.setenv(host_memory.VARIABLE, str(2 * size))
    assert all(map(torch.equal, gradients(offloaded_checkpoint, False), want))
    assert len(sent) == 2 and host_memory._Pieces.taken == 2 * size
    for words in ("much", "-1", "nan"):
        monkeypatch.setenv(host_memory.VARIABLE, words)
        with pytest.raises(
            ValueError, match=f"{host_memory.VARIABLE} is '{words}', give a number of bytes"
        ):
            host_memory.bound()
    monkeypatch.delenv(host_memory.VARIABLE)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < host_memory.bound() <= there // 8


def test_a_graph_is_kept(sent):
    x, *weights = drawn()
    loss = through(offloaded_checkpoint, x, weights)
    first, second = (torch.autograd.grad(loss, [x, *weights], retain_graph=True) for _ in range(2))
    want = torch.autograd.grad(through(checkpoint_plain, x, weights), [x, *weights])
    assert all(map(torch.equal, first, want)) and all(map(torch.equal, second, want))
    del loss
    gc.collect()
    assert not any(w() for w in sent)


def checkpoint_plain(function, h):
    return checkpoint(function, h, use_reentrant=False)


def test_a_layer_that_writes_to_its_input(sent):
    """Its copy may not be done by then: an error, as without the host's memory, and never another
    gradient."""
    x, *weights = drawn()
    loss = through(offloaded_checkpoint, x, weights, lambda w: lambda h: torch.tanh(h.mul_(2) @ w))
    with pytest.raises(RuntimeError, match="written to while it was copied to the host"):
        loss.backward()


def test_an_input_that_stays_and_is_written_to(sent, monkeypatch):
    """As without the host's memory: an error, and never another gradient."""
    monkeypatch.setattr(host_memory, "LEAST", 2**30)
    x, *weights = drawn()
    loss = through(offloaded_checkpoint, x, weights, lambda w: lambda h: torch.tanh(h.mul_(2) @ w))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert not sent


def test_what_is_not_sent(sent, monkeypatch):
    """Parameters, what needs no gradient, what several layers in a row read, small and strided
    tensors."""
    x, *weights = drawn()

    def keep(function, *given):
        return offloaded_checkpoint(function, *given)

    keep(lambda w, y: w * y, torch.nn.Parameter(weights[0].detach()), weights[1].detach())
    assert not sent
    h = x * 1
    out = (
        keep(lambda h, m: h * m, h, torch.ones_like(h))
        + keep(lambda h: h * 2, h)
        + keep(lambda h: h * 3, h)
    )
    assert len(sent) == 1
    keep(lambda h: h * 2, (x * 1).t())
    assert len(sent) == 1
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.full_like(x, 6))
    with torch.no_grad():
        keep(lambda h: h * 2, h)
    monkeypatch.setattr(host_memory, "LEAST", h.numel() * 4 + 1)
    keep(lambda h: h * 2, x * 1)
    assert len(sent) == 1


def test_only_some_of_backward(sent):
    """A graph that is dropped halfway gives everything back."""
    x, *weights = drawn()
    loss = through(offloaded_checkpoint, x, weights)
    torch.autograd.grad(loss, weights[-1], retain_graph=True)
    del loss
    gc.collect()
    (beside,) = host_memory._beside.values()
    assert not any(w() for w in sent) and len(beside.pieces.free) * 100 == host_memory._Pieces.taken


def test_fetched_before_it_is_needed(sent, monkeypatch):
    """If there is room; the same gradients."""
    want = gradients(checkpoint, False)
    monkeypatch.setattr(devices, "free_bytes", lambda x: 2**40)
    fetched, fetch = [], host_memory.Waiting.fetch
    monkeypatch.setattr(
        host_memory.Waiting, "fetch", lambda self: (fetched.append(self), fetch(self))
    )
    assert all(map(torch.equal, gradients(offloaded_checkpoint, False), want))
    assert len(fetched) == LAYERS - 1  # all but the last, which was still there


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
def test_two_streams_of_a_thread(sent, monkeypatch):
    """The copies of what one of them has made are waited for on that one, whichever is the current
    one by then; and whoever else reads what was fetched waits, too, and says so."""
    one, other, recorded = Stream(), Stream(), []
    module = types.SimpleNamespace(
        now=one, Stream=Stream, stream=lambda stream: contextlib.nullcontext()
    )
    module.current_stream = lambda device: module.now
    monkeypatch.setattr(torch, "cpu", module)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda t, stream: recorded.append(stream), raising=False
    )
    waiting = [host_memory.send(torch.ones(3, 5) * i) for i in range(2)]
    copies = [w.there and w.there.copied for w in waiting]
    (beside,) = host_memory._beside.values()
    beside.has_streams, module.now = True, other
    waiting.append(host_memory.send(torch.ones(5)))
    assert len(one.waits) == 2 and one.waits[1] is copies[1] and not other.waits
    module.now = one
    waiting[1].fetch()
    module.now = other
    assert torch.equal(waiting[1].fetched(), torch.ones(3, 5))
    assert len(one.waits) == 3 and other.waits == one.waits[2:] and recorded == [other]


def test_in_threads(sent):
    want, got = gradients(checkpoint, False), [None] * 4

    def work(i):
        for _ in range(3):
            got[i] = gradients(offloaded_checkpoint, False)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(all(map(torch.equal, g, want)) for g in got)


@pytest.mark.thorough
def test_compiled(sent):
    """In a graph nothing is sent."""
    x, *weights = drawn()
    want = torch.autograd.grad(through(checkpoint_plain, x, weights), [x, *weights])
    run = torch.compile(
        lambda x, *weights: through(offloaded_checkpoint, x, weights), backend="aot_eager"
    )
    got = torch.autograd.grad(run(x, *weights), [x, *weights])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert not sent


def test_the_host_gives_no_more(sent, monkeypatch):
    """What cannot be pinned stays on the device."""
    want, pinned, pin = gradients(checkpoint, False), [], host_memory._pinned

    def three():
        if len(pinned) == 3:
            raise RuntimeError("out of memory")
        pinned.append(pin())
        return pinned[-1]

    monkeypatch.setattr(host_memory, "_pinned", three)
    assert all(map(torch.equal, gradients(offloaded_checkpoint, False), want))
    assert len(sent) == 1 and host_memory._Pieces.taken == 300


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_arguments(layout, sent):
    """They stay where they are."""
    x, w, *_ = drawn()
    a = torch.eye(ROWS, device=DEVICE).to_sparse(layout=layout)
    given = x * 1
    out = offloaded_checkpoint(lambda h, a: torch.tanh(a @ h @ w), given, a)
    got = torch.autograd.grad(out.sum(), [x, w])
    want = torch.autograd.grad(torch.tanh(torch.eye(ROWS, device=DEVICE) @ x @ w).sum(), [x, w])
    assert len(sent) == 1
    for g, expected in zip(got, want, strict=True):
        torch.testing.assert_close(g, expected)
