"""Attention by groups of heads gives what it gives of all heads, bit for bit, and a checkpoint
keeps nothing of it."""

import functools
import gc
import threading

import host
import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from liger_kernel.core import host_memory
from liger_kernel.core.checkpoint import offloaded
from liger_kernel.ops.attention import head_groups
from liger_kernel.ops.attention.head_groups import HeadGroups, Made

T, D = 33, 16
HEADS = pytest.mark.parametrize(
    "heads, of_keys, gqa", [(8, 4, True), (6, 6, False), (4, 4, True), (5, 5, False)]
)


@pytest.fixture
def grouped(monkeypatch):
    """Groups of any size; the calls of what makes them."""
    calls, apply = [], head_groups._HeadGroups.apply
    monkeypatch.setattr(head_groups, "LEAST", 1)
    monkeypatch.setattr(
        head_groups._HeadGroups, "apply", lambda *given: (calls.append(1), apply(*given))[1]
    )
    return calls


def drawn(heads, of_keys, dtype=torch.float32, frozen="", channels=D):
    generator = torch.Generator().manual_seed(0)

    def draw(name, heads):
        x = (
            torch.randn(2, T, heads, channels, generator=generator)
            .to(DEVICE, dtype)
            .transpose(1, 2)
        )
        return x.requires_grad_(name not in frozen)

    q, k, v = draw("q", heads), draw("k", of_keys), draw("v", of_keys)
    dy = torch.randn(2, T, heads, channels, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    return (
        q,
        k,
        v,
        dy,
    )  # tokens first as the output: of another layout cuDNN's gradients are wrong in PyTorch 2.11


def for_fused():
    """Eight heads, four of keys: what fused attention takes on this device, with little beside its
    output."""
    return drawn(8, 4) if DEVICE == "cpu" else drawn(8, 4, torch.bfloat16, channels=64)


def assert_near(found, wanted):
    """As all heads at once: on a GPU, which rounds to 16 bits here, but for what rounding twice can
    change."""
    for a, b in zip(found, wanted, strict=True):
        if DEVICE == "cpu":
            torch.testing.assert_close(a, b)
        assert (a - b).norm() <= 4 * torch.finfo(b.dtype).eps * b.norm()


def attention(*given, **options):
    with HeadGroups():
        return F.scaled_dot_product_attention(*given, **options)


@HEADS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_bit_for_bit(heads, of_keys, gqa, dtype, masked, grouped):
    q, k, v, dy = drawn(heads, of_keys, dtype)
    mask = torch.ones(2, 1, T, T, dtype=torch.bool, device=DEVICE).tril() if masked else None
    options = dict(attn_mask=mask, is_causal=not masked, scale=0.3, enable_gqa=gqa)
    want = F.scaled_dot_product_attention(q, k, v, **options)
    got = attention(q, k, v, **options)
    found = [torch.autograd.grad(y, (q, k, v), dy, retain_graph=True) for y in (want, got, got)]
    assert torch.equal(got, want)
    unfused = DEVICE != "cpu" and dtype == torch.float32 and heads != of_keys  # gives heads first
    assert unfused or got.stride() == want.stride()
    assert len(grouped) == (head_groups.groups(q, k) > 1) == (of_keys % 2 == 0)
    if DEVICE == "cpu":
        for once, again in zip(found[0], found[1], strict=True):
            assert torch.equal(once, again)
    else:  # a GPU adds up dq in an order that is not fixed
        for once, again in zip(found[0], found[1], strict=True):
            torch.testing.assert_close(again, once)
    assert DEVICE != "cpu" or all(map(torch.equal, found[1], found[2]))


@pytest.mark.parametrize("frozen", ["q", "kv", "qk"])
def test_frozen(frozen, grouped):
    q, k, v, dy = drawn(4, 4, frozen=frozen)
    wanted = [t for t in (q, k, v) if t.requires_grad]
    want, got = (
        torch.autograd.grad(f(q, k, v), wanted, dy)
        for f in (F.scaled_dot_product_attention, attention)
    )
    assert len(grouped) == 1
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_any_layout(dtype, grouped):
    """PyTorch 2.11 gives others by cuDNN, and they are wrong (1.4 of their norm on an H100)."""
    q, k, v, dy = drawn(8, 4, dtype, channels=64)
    y = attention(q, k, v, enable_gqa=True)
    want = torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
    for other in (dy.contiguous(), dy.mT.contiguous().mT):
        assert_near(torch.autograd.grad(y, (q, k, v), other, retain_graph=True), want)
    with sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), enable_gqa=True)
    for a, b in zip(want, torch.autograd.grad(exact, (q, k, v), dy.double()), strict=True):
        assert (a - b).norm() <= 4 * torch.finfo(dtype).eps * b.norm()
    assert grouped


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant, grouped):
    """What forward made is gone after it: it is made again."""
    q, k, v, dy = drawn(8, 4)
    layer = dict(use_reentrant=reentrant)

    def run(function):
        for t in (q, k, v):
            t.grad = None
        y = checkpoint(
            lambda q, k, v: function(q * 1, k * 1, v * 1, enable_gqa=True) * 2, q, k, v, **layer
        )
        gc.collect()
        alive = sum(
            t.numel() for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == q.dtype
        )
        y.backward(dy)
        return alive, [t.grad for t in (q, k, v)]

    there, alive = (run(function)[0] for function in (F.scaled_dot_product_attention, attention))
    want, got = (run(function)[1] for function in (F.scaled_dot_product_attention, attention))
    assert alive <= there + 100 and len(grouped) == (2 if reentrant else 4)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_gradients(grouped):
    q, k, v, _ = (t.double().detach().requires_grad_() for t in drawn(4, 4))
    with sdpa_kernel(SDPBackend.MATH):
        found = []
        for function in (F.scaled_dot_product_attention, attention):
            once = torch.autograd.grad(function(q, k, v).sin().sum(), (q, k, v), create_graph=True)
            found.append(torch.autograd.grad(sum(d.square().sum() for d in once), (q, k, v)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_what_it_leaves_alone(grouped):
    """Dropout, a mask that learns, no gradients, transforms, heads that do not go into groups,
    other functions."""
    q, k, v, _ = drawn(4, 4)
    learned = torch.zeros(T, T, device=DEVICE, requires_grad=True)
    attention(q, k, v, dropout_p=0.5)
    attention(q, k, v, learned).sum().backward()
    assert learned.grad.abs().sum() > 0
    with torch.no_grad():
        attention(q, k, v)
    torch.func.grad(lambda q: attention(q, k.detach(), v.detach()).sum())(q.detach())
    attention(*(t[:, :3] for t in (q, k, v)))
    attention(*(t[0] for t in (q, k, v)))
    assert not grouped
    with HeadGroups():
        assert torch.equal(torch.softmax(q, -1), q.softmax(-1))
    head_groups.LEAST = q.numel()  # the fixture's, which is undone
    attention(q, k, v)
    assert (
        not grouped
        and not head_groups.worth_it([q, None])
        and head_groups.worth_it([torch.cat([q, k])])
    )


def test_a_function_mode_of_somebody_else(grouped):
    """It sees one call, and what it makes of the result learns."""

    class Scaled(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            y = function(*args, **(kwargs or {}))
            return y * scale if function is F.scaled_dot_product_attention else y

    q, k, v, _ = drawn(4, 4)
    scale = torch.ones((), device=DEVICE, requires_grad=True)
    with Scaled():
        attention(q, k, v).sum().backward()
    assert scale.grad is not None and not grouped
    with torch.device("cpu"):
        attention(q, k, v)
    assert grouped


def test_heads_that_do_not_fit(grouped):
    q, k, v, _ = drawn(8, 4)
    with pytest.raises(RuntimeError):
        attention(q, k, v)
    assert not grouped


def in_threads(y, inputs, dy, times):
    """The gradients that four threads get of one graph."""
    found = []

    def work():
        for _ in range(times):
            found.append(torch.autograd.grad(y, inputs, dy, retain_graph=True))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * times
    return found


def test_threads_that_go_back_through_one_graph(grouped):
    q, k, v, dy = drawn(4, 4)
    y = attention(q, k, v)
    want = torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
    for got in in_threads(y, (q, k, v), dy, times=10):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_how_many_groups():
    q = torch.empty(1, 32, 65536, 128, device="meta")
    assert [head_groups.groups(q[:, :, :t], q[:, :8]) for t in (4096, 16384, 32768, 65536)] == [
        1,
        2,
        4,
        8,
    ]
    assert head_groups.groups(q, q[:, :3]) == 1 and head_groups.groups(q, q[:, :6]) == 2


@pytest.fixture
def computed(grouped, monkeypatch):
    """Each time that attention was; everything that is sent finds a place."""
    calls, real = [], head_groups._computed
    monkeypatch.setattr(head_groups, "_computed", lambda *given: (calls.append(1), real(*given))[1])
    host.takes_everything(monkeypatch)
    return calls


def two_layers(keeping, q, k, v, after=lambda y, n: y * 2):
    """Each with two calls of attention; ``after(y, n)``: what the n-th of all calls goes
    through."""
    calls = []

    def attend(q, k, v, **options):
        calls.append(1)
        return after(F.scaled_dot_product_attention(q, k, v, **options), len(calls))

    def layer(x):
        q = x.transpose(1, 2)
        y = attend(
            attend(q * 1, k * 1, v * 1, enable_gqa=True),
            k * 2,
            v * 3,
            enable_gqa=True,
            is_causal=True,
        )
        return y.transpose(1, 2).contiguous()

    return keeping(layer, keeping(layer, q.transpose(1, 2) * 1)).transpose(1, 2)


def kept(reentrant=False):
    keep = functools.partial(checkpoint, use_reentrant=reentrant)
    return offloaded(keep, lambda args: functools.partial(HeadGroups, Made()))


def in_memory(layer, *given):
    return layer(*given)


def test_attention_is_not_computed_again(computed):
    """When a layer is called again its output is there: the same gradients, as often as they are
    asked for."""
    q, k, v, dy = for_fused()
    want = torch.autograd.grad(two_layers(in_memory, q, k, v), (q, k, v), dy)
    y = two_layers(kept(), q, k, v)
    for _ in range(2):
        got = torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
        assert_near(got, want)
        assert len(computed) == 4
    taken = host_memory._Pieces.taken
    del y, got
    gc.collect()
    (beside,) = host_memory._beside.values()
    assert len(beside.pieces.free) * 100 == taken and not beside.pieces.spare


def test_reentrance_computes_again(computed):
    """Forward has no graph to go back through."""
    q, k, v, dy = for_fused()
    want = torch.autograd.grad(two_layers(in_memory, q, k, v), (q, k, v), dy)
    two_layers(kept(reentrant=True), q, k, v).backward(dy)
    assert_near([t.grad for t in (q, k, v)], want)
    assert len(computed) == 4 and not next(iter(host_memory._beside.values())).pieces.spare


@pytest.mark.parametrize("places", range(0, 40, 3))
def test_what_finds_no_place_is_computed_again(places, computed, monkeypatch):
    """The layers' inputs come first: they take the place of an output, and not one of them stays on
    the device."""
    monkeypatch.setattr(host_memory, "PIECE", 2**14)
    monkeypatch.setenv(host_memory.VARIABLE, str(places * 2**14))
    q, k, v, dy = for_fused()
    size = -(-q.nbytes // 2**14)
    want = torch.autograd.grad(two_layers(in_memory, q, k, v), (q, k, v), dy)
    y = two_layers(kept(), q, k, v)
    waiting = sum(
        type(w) is host_memory.Waiting and not w.spare and w.pieces is not None
        for w in gc.get_objects()
    )
    got = torch.autograd.grad(y, (q, k, v), dy)
    assert_near(got, want)
    assert waiting == min(places // size, 2) and 4 <= len(computed) <= 8
    assert len(computed) == 8 or places > 2 * size


def test_an_output_that_was_written_to(computed):
    """Its copy may not have been done: it is computed again."""
    q, k, v, dy = for_fused()

    def written(y, n):
        if n in (1, 4):
            y.detach().mul_(2).div_(2)
        return y * 2

    want = torch.autograd.grad(two_layers(in_memory, q, k, v), (q, k, v), dy)
    assert_near(torch.autograd.grad(two_layers(kept(), q, k, v, written), (q, k, v), dy), want)
    assert len(computed) == 6


def test_an_output_that_was_written_to_unseen(computed):
    """By ``.data``: what the layer is given again is not what its first call has written to."""
    q, k, v, dy = for_fused()

    def written(y, n):
        y.data.mul_(2)
        return y * 2

    want = torch.autograd.grad(
        two_layers(functools.partial(checkpoint, use_reentrant=False), q, k, v, written), k, dy
    )
    assert_near(torch.autograd.grad(two_layers(kept(), q, k, v, written), k, dy), want)


def test_checkpoints_within(computed):
    """What they call again when the groups' mode is gone, they call without groups at first,
    too."""
    q, k, v, dy = for_fused()

    def within(y, n):
        attend = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
        return checkpoint(attend, y, k * 1, v * 1, use_reentrant=False)

    want = torch.autograd.grad(two_layers(in_memory, q, k, v, within), (q, k, v), dy)
    assert_near(torch.autograd.grad(two_layers(kept(), q, k, v, within), (q, k, v), dy), want)
    assert len(computed) == 4


def test_layers_within_layers(computed):
    q, k, v, dy = for_fused()
    want = torch.autograd.grad(two_layers(in_memory, q, k, v), (q, k, v), dy)

    def outer(x):
        return two_layers(kept(), x, k, v)

    assert_near(torch.autograd.grad(kept()(outer, q * 1), (q, k, v), dy), want)
    assert len(computed) == 4


@pytest.mark.parametrize("saved", ["mm", "copy_", "cat", "empty", "scaled_dot_product"])
def test_selective_checkpoints(saved, computed):
    """They count what is computed."""
    q, k, v, dy = for_fused()
    w = torch.eye(q.shape[-1], device=DEVICE, dtype=q.dtype)

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if saved in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(
        create_selective_checkpoint_contexts, policy, allow_cache_entry_mutation=True
    )
    keeping = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
    selective = offloaded(keeping, lambda args: functools.partial(HeadGroups, Made()))
    want = torch.autograd.grad(two_layers(in_memory, q, k, v, lambda y, n: y @ w), (q, k, v), dy)
    assert_near(
        torch.autograd.grad(two_layers(selective, q, k, v, lambda y, n: y @ w), (q, k, v), dy), want
    )
    assert not computed


def test_calls_that_are_others(computed):
    q, k, v, _ = for_fused()
    made = Made()
    shapes = [
        dict(is_causal=True),
        dict(is_causal=False),
        dict(is_causal=True),
        dict(is_causal=True),
    ]
    with HeadGroups(made):
        first = [
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
            for options in shapes[:2]
        ]
    with HeadGroups(made):
        again = [
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
            for options in shapes[:1]
        ]
        again.append(F.scaled_dot_product_attention(q[:, :, :9], k, v, enable_gqa=True))
        again += [
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
            for options in shapes[2:]
        ]
    assert len(computed) == 5 and torch.equal(first[0], again[0])
    assert torch.equal(again[2], first[0]) and torch.equal(
        again[1], attention(q[:, :, :9], k, v, enable_gqa=True)
    )


def test_gradients_of_gradients_of_what_was_kept(computed):
    q, k, v, _ = (t.detach().requires_grad_() for t in drawn(8, 4))
    found = []
    for keep in (in_memory, kept()):
        with sdpa_kernel(SDPBackend.MATH):
            once = torch.autograd.grad(
                two_layers(keep, q, k, v).sin().sum(), (q, k, v), create_graph=True
            )
            found.append(torch.autograd.grad(sum(d.square().sum() for d in once), (q, k, v)))
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()


def test_threads_that_call_a_layer_again(computed):
    q, k, v, dy = for_fused()
    y = two_layers(kept(), q, k, v)
    want = torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
    for got in in_threads(y, (q, k, v), dy, times=5):
        assert_near(got, want)
    assert len(computed) == 4
