"""Attention by groups of heads: the bits of attention of all heads; nothing kept in checkpoints."""

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
from liger_kernel.core.checkpoint import offload_inputs
from liger_kernel.ops.attention import head_groups
from liger_kernel.ops.attention.head_groups import AttentionCalls, HeadGroups

T, D = 33, 16
HEADS = pytest.mark.parametrize(
    "heads, kv_heads, gqa", [(8, 4, True), (6, 6, False), (4, 4, True), (5, 5, False)]
)


@pytest.fixture
def grouped(monkeypatch):
    """Allow groups of any size. Returns a list with an entry for each call of the Function."""
    calls, apply = [], head_groups._HeadGroupsFunction.apply
    monkeypatch.setattr(head_groups, "MIN_ELEMENTS_PER_GROUP", 1)
    monkeypatch.setattr(
        head_groups._HeadGroupsFunction,
        "apply",
        lambda *inputs: (calls.append(1), apply(*inputs))[1],
    )
    return calls


def make_inputs(heads, kv_heads, dtype=torch.float32, frozen="", channels=D):
    generator = torch.Generator().manual_seed(0)

    def draw(name, heads):
        x = (
            torch.randn(2, T, heads, channels, generator=generator)
            .to(DEVICE, dtype)
            .transpose(1, 2)
        )
        return x.requires_grad_(name not in frozen)

    q, k, v = draw("q", heads), draw("k", kv_heads), draw("v", kv_heads)
    dy = torch.randn(2, T, heads, channels, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    return (
        q,
        k,
        v,
        dy,
    )  # tokens first as the output: of another layout cuDNN's gradients are wrong in PyTorch 2.11


def for_fused():
    """Return inputs that fused attention takes on this device: eight heads, four of keys."""
    return make_inputs(8, 4) if DEVICE == "cpu" else make_inputs(8, 4, torch.bfloat16, channels=64)


def assert_near(actual, expected):
    """Assert equality; on a GPU, which has 16 bits here, up to the effect of rounding twice."""
    for a, b in zip(actual, expected, strict=True):
        if DEVICE == "cpu":
            torch.testing.assert_close(a, b)
        assert (a - b).norm() <= 4 * torch.finfo(b.dtype).eps * b.norm()


def attention(*inputs, **options):
    with HeadGroups():
        return F.scaled_dot_product_attention(*inputs, **options)


@HEADS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_bit_for_bit(heads, kv_heads, gqa, dtype, masked, grouped):
    q, k, v, dy = make_inputs(heads, kv_heads, dtype)
    mask = torch.ones(2, 1, T, T, dtype=torch.bool, device=DEVICE).tril() if masked else None
    options = dict(attn_mask=mask, is_causal=not masked, scale=0.3, enable_gqa=gqa)
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    actual = attention(q, k, v, **options)
    results = [
        torch.autograd.grad(y, (q, k, v), dy, retain_graph=True) for y in (expected, actual, actual)
    ]
    assert torch.equal(actual, expected)
    unfused = DEVICE != "cpu" and dtype == torch.float32 and heads != kv_heads  # gives heads first
    assert unfused or actual.stride() == expected.stride()
    assert len(grouped) == (head_groups.num_groups(q, k) > 1) == (kv_heads % 2 == 0)
    if DEVICE == "cpu":
        for once, repeated in zip(results[0], results[1], strict=True):
            assert torch.equal(once, repeated)
    else:  # a GPU adds up dq in an order that is not fixed
        for once, repeated in zip(results[0], results[1], strict=True):
            torch.testing.assert_close(repeated, once)
    assert DEVICE != "cpu" or all(map(torch.equal, results[1], results[2]))


@pytest.mark.parametrize("frozen", ["q", "kv", "qk"])
def test_frozen(frozen, grouped):
    q, k, v, dy = make_inputs(4, 4, frozen=frozen)
    leaves = [t for t in (q, k, v) if t.requires_grad]
    expected, actual = (
        torch.autograd.grad(f(q, k, v), leaves, dy)
        for f in (F.scaled_dot_product_attention, attention)
    )
    assert len(grouped) == 1
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_any_layout(dtype, grouped):
    """PyTorch 2.11 gives others by cuDNN, and they are wrong (1.4 of their norm on an H100)."""
    q, k, v, dy = make_inputs(8, 4, dtype, channels=64)
    y = attention(q, k, v, enable_gqa=True)
    expected = torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
    for layout in (dy.contiguous(), dy.mT.contiguous().mT):
        assert_near(torch.autograd.grad(y, (q, k, v), layout, retain_graph=True), expected)
    with sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), enable_gqa=True)
    for a, b in zip(expected, torch.autograd.grad(exact, (q, k, v), dy.double()), strict=True):
        assert (a - b).norm() <= 4 * torch.finfo(dtype).eps * b.norm()
    assert grouped


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant, grouped):
    """The tensors of forward are freed after it, and computed again in backward."""
    q, k, v, dy = make_inputs(8, 4)
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

    expected_alive, alive = (
        run(function)[0] for function in (F.scaled_dot_product_attention, attention)
    )
    expected, actual = (
        run(function)[1] for function in (F.scaled_dot_product_attention, attention)
    )
    assert alive <= expected_alive + 100 and len(grouped) == (2 if reentrant else 4)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_gradients(grouped):
    q, k, v, _ = (t.double().detach().requires_grad_() for t in make_inputs(4, 4))
    with sdpa_kernel(SDPBackend.MATH):
        results = []
        for function in (F.scaled_dot_product_attention, attention):
            once = torch.autograd.grad(function(q, k, v).sin().sum(), (q, k, v), create_graph=True)
            results.append(torch.autograd.grad(sum(d.square().sum() for d in once), (q, k, v)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_what_it_leaves_alone(grouped):
    """Dropout, a mask that learns, no gradients, transforms, heads that do not go into groups,
    other functions."""
    q, k, v, _ = make_inputs(4, 4)
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
    head_groups.MIN_ELEMENTS_PER_GROUP = q.numel()  # the fixture's, which is undone
    attention(q, k, v)
    assert (
        not grouped
        and not head_groups.may_use_head_groups([q, None])
        and head_groups.may_use_head_groups([torch.cat([q, k])])
    )


def test_a_function_mode_of_somebody_else(grouped):
    """It sees one call, and what it makes of the result learns."""

    class Scaled(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            y = function(*args, **(kwargs or {}))
            return y * scale if function is F.scaled_dot_product_attention else y

    q, k, v, _ = make_inputs(4, 4)
    scale = torch.ones((), device=DEVICE, requires_grad=True)
    with Scaled():
        attention(q, k, v).sum().backward()
    assert scale.grad is not None and not grouped
    with torch.device("cpu"):
        attention(q, k, v)
    assert grouped


def test_heads_that_do_not_fit(grouped):
    q, k, v, _ = make_inputs(8, 4)
    with pytest.raises(RuntimeError):
        attention(q, k, v)
    assert not grouped


def in_threads(y, inputs, dy, times):
    """Return the gradients that four threads compute from one graph."""
    results = []

    def work():
        for _ in range(times):
            results.append(torch.autograd.grad(y, inputs, dy, retain_graph=True))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 * times
    return results


def test_threads_that_go_back_through_one_graph(grouped):
    q, k, v, dy = make_inputs(4, 4)
    y = attention(q, k, v)
    expected = torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
    for actual in in_threads(y, (q, k, v), dy, times=10):
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_how_many_groups():
    q = torch.empty(1, 32, 65536, 128, device="meta")
    assert [head_groups.num_groups(q[:, :, :t], q[:, :8]) for t in (4096, 16384, 32768, 65536)] == [
        1,
        2,
        4,
        8,
    ]
    assert head_groups.num_groups(q, q[:, :3]) == 1 and head_groups.num_groups(q, q[:, :6]) == 2


@pytest.fixture
def computed(grouped, monkeypatch):
    """Return a list with an entry for each computation; host memory takes everything."""
    calls, real = [], head_groups._run_groups
    monkeypatch.setattr(
        head_groups, "_run_groups", lambda *inputs: (calls.append(1), real(*inputs))[1]
    )
    host.offload_every_tensor(monkeypatch)
    return calls


def two_layers(keeping, q, k, v, after=lambda y, n: y * 2):
    """Run two layers with two attention calls each. ``after(y, n)`` is applied to the n-th y."""
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


def with_head_groups(reentrant=False):
    keep = functools.partial(checkpoint, use_reentrant=reentrant)
    return offload_inputs(keep, lambda args: functools.partial(HeadGroups, AttentionCalls()))


def in_memory(layer, *inputs):
    return layer(*inputs)


def test_attention_is_not_computed_again(computed):
    """When a layer is called again its output is there: the same gradients, as often as they are
    asked for."""
    q, k, v, dy = for_fused()
    expected = torch.autograd.grad(two_layers(in_memory, q, k, v), (q, k, v), dy)
    y = two_layers(with_head_groups(), q, k, v)
    for _ in range(2):
        actual = torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
        assert_near(actual, expected)
        assert len(computed) == 4
    pinned_bytes = host_memory._PinnedPieces.pinned_bytes
    del y, actual
    gc.collect()
    (copy_stream,) = host_memory._copy_streams.values()
    assert len(copy_stream.pieces.free) * 100 == pinned_bytes and not copy_stream.pieces.spare


def test_reentrance_computes_again(computed):
    """Forward has no graph to go back through."""
    q, k, v, dy = for_fused()
    expected = torch.autograd.grad(two_layers(in_memory, q, k, v), (q, k, v), dy)
    two_layers(with_head_groups(reentrant=True), q, k, v).backward(dy)
    assert_near([t.grad for t in (q, k, v)], expected)
    assert len(computed) == 4 and not next(iter(host_memory._copy_streams.values())).pieces.spare


@pytest.mark.parametrize("places", range(0, 40, 3))
def test_what_finds_no_place_is_computed_again(places, computed, monkeypatch):
    """The layers' inputs come first: they take the place of an output, and not one of them stays on
    the device."""
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 2**14)
    monkeypatch.setenv(host_memory.ENV_VARIABLE, str(places * 2**14))
    q, k, v, dy = for_fused()
    size = -(-q.nbytes // 2**14)
    expected = torch.autograd.grad(two_layers(in_memory, q, k, v), (q, k, v), dy)
    y = two_layers(with_head_groups(), q, k, v)
    waiting = sum(
        type(w) is host_memory.OffloadedTensor and not w.spare and w.pieces is not None
        for w in gc.get_objects()
    )
    actual = torch.autograd.grad(y, (q, k, v), dy)
    assert_near(actual, expected)
    assert waiting == min(places // size, 2) and 4 <= len(computed) <= 8
    assert len(computed) == 8 or places > 2 * size


def test_an_output_that_was_written_to(computed):
    """Its copy may not have been done: it is computed again."""
    q, k, v, dy = for_fused()

    def written(y, n):
        if n in (1, 4):
            y.detach().mul_(2).div_(2)
        return y * 2

    expected = torch.autograd.grad(two_layers(in_memory, q, k, v), (q, k, v), dy)
    assert_near(
        torch.autograd.grad(two_layers(with_head_groups(), q, k, v, written), (q, k, v), dy),
        expected,
    )
    assert len(computed) == 6


def test_an_output_that_was_written_to_unseen(computed):
    """By ``.data``: what the layer is given again is not what its first call has written to."""
    q, k, v, dy = for_fused()

    def written(y, n):
        y.data.mul_(2)
        return y * 2

    expected = torch.autograd.grad(
        two_layers(functools.partial(checkpoint, use_reentrant=False), q, k, v, written), k, dy
    )
    assert_near(
        torch.autograd.grad(two_layers(with_head_groups(), q, k, v, written), k, dy), expected
    )


def test_checkpoints_within(computed):
    """They call their part again without the groups' mode, so they call it without at first."""
    q, k, v, dy = for_fused()

    def inner_checkpoint(y, n):
        attend = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
        return checkpoint(attend, y, k * 1, v * 1, use_reentrant=False)

    expected = torch.autograd.grad(two_layers(in_memory, q, k, v, inner_checkpoint), (q, k, v), dy)
    assert_near(
        torch.autograd.grad(
            two_layers(with_head_groups(), q, k, v, inner_checkpoint), (q, k, v), dy
        ),
        expected,
    )
    assert len(computed) == 4


def test_layers_within_layers(computed):
    q, k, v, dy = for_fused()
    expected = torch.autograd.grad(two_layers(in_memory, q, k, v), (q, k, v), dy)

    def outer(x):
        return two_layers(with_head_groups(), x, k, v)

    assert_near(torch.autograd.grad(with_head_groups()(outer, q * 1), (q, k, v), dy), expected)
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
    selective = offload_inputs(
        keeping, lambda args: functools.partial(HeadGroups, AttentionCalls())
    )
    expected = torch.autograd.grad(
        two_layers(in_memory, q, k, v, lambda y, n: y @ w), (q, k, v), dy
    )
    assert_near(
        torch.autograd.grad(two_layers(selective, q, k, v, lambda y, n: y @ w), (q, k, v), dy),
        expected,
    )
    assert not computed


def test_calls_that_are_others(computed):
    q, k, v, _ = for_fused()
    attention_calls = AttentionCalls()
    shapes = [
        dict(is_causal=True),
        dict(is_causal=False),
        dict(is_causal=True),
        dict(is_causal=True),
    ]
    with HeadGroups(attention_calls):
        first = [
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
            for options in shapes[:2]
        ]
    with HeadGroups(attention_calls):
        repeated = [
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
            for options in shapes[:1]
        ]
        repeated.append(F.scaled_dot_product_attention(q[:, :, :9], k, v, enable_gqa=True))
        repeated += [
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
            for options in shapes[2:]
        ]
    assert len(computed) == 5 and torch.equal(first[0], repeated[0])
    assert torch.equal(repeated[2], first[0]) and torch.equal(
        repeated[1], attention(q[:, :, :9], k, v, enable_gqa=True)
    )


def test_gradients_of_gradients_of_what_was_kept(computed):
    q, k, v, _ = (t.detach().requires_grad_() for t in make_inputs(8, 4))
    results = []
    for keep in (in_memory, with_head_groups()):
        with sdpa_kernel(SDPBackend.MATH):
            once = torch.autograd.grad(
                two_layers(keep, q, k, v).sin().sum(), (q, k, v), create_graph=True
            )
            results.append(torch.autograd.grad(sum(d.square().sum() for d in once), (q, k, v)))
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()


def test_threads_that_call_a_layer_again(computed):
    q, k, v, dy = for_fused()
    y = two_layers(with_head_groups(), q, k, v)
    expected = torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
    for actual in in_threads(y, (q, k, v), dy, times=5):
        assert_near(actual, expected)
    assert len(computed) == 4
