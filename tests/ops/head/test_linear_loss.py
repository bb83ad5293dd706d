"""A scalar loss of a linear head's token log-probabilities: passes over whole groups, gradients in
forward."""

import pytest
import torch
import torch.nn.functional as F
from cases import (
    assert_as_exact_as_pytorch,
    cast,
    exact_products_on_cpu,
    measure_errors,
    run,
    run_reference,
)
from grouped import (
    LOSS_KINDS,
    REST_CLASSES,
    H,
    V,
    linear_loss_of,
    make_tensors,
    sequence_loss,
    token_loss,
)
from hardware import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_kernel.ops.head import chunks, grouped_loss, planning
from liger_kernel.ops.head.grouped_loss import linear_loss as loss_of
from liger_kernel.ops.head.linear_head import HeadOptions
from liger_kernel.ops.head.logits import TokenOptions

F32, F64 = torch.float32, torch.float64
KIND = pytest.mark.parametrize("kind", LOSS_KINDS)


def plain(kind, temperature=1.0, return_entropy=False, **_):
    fn, parts, *_ = LOSS_KINDS[kind]

    def definition(hidden, weight, bias, target):
        z = F.linear(hidden.reshape(-1, H), weight, bias).unflatten(0, hidden.shape[:-1])
        z = (z if z.dtype == F64 else z.float()) / temperature
        every = z.log_softmax(-1)
        several = target.dim() == hidden.dim()
        found = every.gather(-1, target.clamp(min=0) if several else target.clamp(min=0)[..., None])
        found = (found if several else found.squeeze(-1)).where(target != -100, 0)
        if kind in REST_CLASSES:
            first = target[..., : REST_CLASSES[kind]]
            inside = (first[..., None] == torch.arange(V, device=z.device)).any(-2)
            rest = every.masked_fill(inside, -torch.inf).logsumexp(-1, keepdim=True)
            found = torch.cat((found, rest.where((target != -100).any(-1, keepdim=True), 0)), -1)
        entropy = (
            -(every.exp() * every).sum(-1).where(target != -100, 0) if return_entropy else None
        )
        given = [
            x if x is None or parts == 1 else x.unflatten(0, (parts, -1)) for x in (found, entropy)
        ]
        value, *others = fn(slice(None), *given)
        return value, *(x.detach() for x in others)

    return definition


def options_of(kind):
    yield {}
    yield dict(temperature=0.7)
    if LOSS_KINDS[kind][-1] is None:
        yield dict(temperature=1.3, return_entropy=True)


EVERY = pytest.mark.parametrize("kind,option", [(k, o) for k in LOSS_KINDS for o in options_of(k)])


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_against_float64(kind, option, dtype):
    draws = []
    for seed in range(6):
        tensors = make_tensors(kind, seed)
        mine = cast(tensors, dtype)
        with exact_products_on_cpu():
            actual, once, twice = run(linear_loss_of(kind, **option), mine)
        theirs = run_reference(plain(kind, **option), tensors, dtype)
        exact, *_ = run(plain(kind, **option), cast(cast(tensors, dtype), F64))
        # A loss is a difference of sums s, which were rounded, too, and its slope moves by half as
        # much: 0.5·s·eps/2.
        sums = {k: e for k, e in exact.items() if k.startswith("output")}
        roundings = 4  # as the head's Case has it
        if LOSS_KINDS[kind][0] is not token_loss:
            roundings += 0.25 * float(exact["output 1"].abs().max())
        draws.append(measure_errors(actual, theirs, exact, cast(tensors, dtype) | sums, roundings))
        assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True)), (
            "a second backward differs"
        )
        assert all(torch.equal(mine[k], t) for k, t in cast(tensors, dtype).items()), (
            "an input was written to"
        )
    assert_as_exact_as_pytorch(draws)


def test_small_gradients_of_fp16_hidden_states(with_and_without_kernels):
    """Beside those of the same numbers in fp32, under a weight in fp32."""
    M = 512
    torch.manual_seed(0)
    hidden = torch.randn(M, 16, device=DEVICE).half()
    weight = torch.randn(100, 16, device=DEVICE, requires_grad=True)
    target = torch.randint(100, (M,), device=DEVICE)
    gradients = []
    for dtype in torch.float16, torch.float32:
        h = hidden.to(dtype).requires_grad_()
        loss, *_ = loss_of(lambda _, log_probs, *__: -log_probs.sum() / M, h, weight, target)
        gradients.append(torch.autograd.grad(loss * M, (h, weight))[0])
    actual, expected = gradients
    # rounded to fp16 before and after M divides and multiplies it; half of the smallest, twice
    bound = 2 * 2.0**-11 * expected.abs() + 2.0**-24
    assert ((actual - expected).abs() <= bound).all()


def outcome(fn, tensors):
    return run(fn, tensors)[0]


def same(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for k in expected:
        largest = expected[k].abs().max().clamp(min=1e-30) if expected[k].numel() else 1
        assert actual[k].shape == expected[k].shape
        assert (
            not expected[k].numel() or (actual[k] - expected[k]).abs().max() <= tolerance * largest
        ), k


@EVERY
@pytest.mark.parametrize("where", ["kernels", "float64", "reference"])
@pytest.mark.parametrize("memory", [0, V * 4 * 12, "auto"])
@pytest.mark.parametrize("drop_ignored", [False, True])
def test_neither_passes_nor_dropping_change_anything(
    kind, option, where, memory, drop_ignored, monkeypatch
):
    """Groups that fill passes, groups larger than one (memory 0), some of them shorter than
    others."""
    dtype = F64 if where == "float64" else F32
    if where == "reference":
        monkeypatch.setattr(grouped_loss.devices, "INTERPRETED", False)
        if DEVICE != "cpu":
            pytest.skip("the reference runs on CPU tensors")
    monkeypatch.setattr(grouped_loss, "ROWS_WITHOUT_KERNELS", 11)
    monkeypatch.setattr(planning, "MIN_CHUNK_TOKENS", 8)
    tensors = cast(make_tensors(kind), dtype)
    actual = outcome(
        linear_loss_of(kind, **option, memory=memory, drop_ignored=drop_ignored), tensors
    )
    same(
        actual,
        outcome(plain(kind, **option), cast(make_tensors(kind), F64)),
        1e-12 if dtype == F64 else 5e-6,
    )


@pytest.mark.parametrize("only", [False, True], ids=["all classes", "all possible classes"])
def test_a_rest_of_nothing(only, with_and_without_kernels):
    """All classes, or all whose logits are not -inf, are beside the rest: its log-probability is
    -inf, not NaN."""
    torch.manual_seed(0)
    possible = torch.arange(2) if only else torch.arange(V)
    target = possible.expand(5, -1).to(DEVICE)
    bias = torch.full((V,), -torch.inf).index_fill(0, possible, 0.5).to(DEVICE)
    results, rests = [], []
    for rest_of in (0, len(possible)):
        h = (
            torch.randn(5, H, generator=torch.Generator().manual_seed(1))
            .to(DEVICE)
            .requires_grad_()
        )
        w = (
            torch.randn(V, H, generator=torch.Generator().manual_seed(2))
            .to(DEVICE)
            .requires_grad_()
        )

        def fn(part, log_probs, _, rest_of=rest_of):
            rests.append(log_probs[:, -1].detach() if rest_of else None)
            return -log_probs[:, 0].sum()

        loss, *_ = loss_of(fn, h, w, target, bias, rest_of=rest_of)
        results.append((loss.detach(), *torch.autograd.grad(loss, (h, w))))
    assert rests[-1].isneginf().all()
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.fixture
def products(monkeypatch):
    """(tokens of each pass, for which gradients), of each time through the head."""
    seen, run_ = [], grouped_loss.run_chunks

    def spy(h, w, b, dtype, plan, to_gradient, needs, group=None, passes=None):
        sizes = [len(range(*i.indices(len(h)))) if isinstance(i, slice) else len(i) for i in passes]
        seen.append((sizes, tuple(needs)))
        return run_(h, w, b, dtype, plan, to_gradient, needs, group, passes)

    monkeypatch.setattr(grouped_loss, "run_chunks", spy)
    return seen


def test_groups_stay_together(products, monkeypatch):
    """No logits twice while a group fits; two products more where it doesn't; one of each in
    evaluation."""
    monkeypatch.setattr(planning, "MIN_CHUNK_TOKENS", 8)
    all_of = True, True, True
    for memory, expected in ((V * 4 * 12, [([30], all_of)]), (V * 4 * 9, None)):
        tensors = cast(make_tensors("pairs"), F32)
        tensors["target"] = tensors["target"].clamp(min=0)
        products.clear()
        outcome(linear_loss_of("pairs", memory=memory, drop_ignored=False), tensors)
        if expected is None:
            assert [needs for _, needs in products] == [(False,) * 3, all_of]
        else:
            assert all(size % 10 == 0 for sizes, _ in products for size in sizes)
            assert [needs for _, needs in products] == [all_of]
        products.clear()
        with torch.no_grad():
            linear_loss_of("pairs", memory=memory)(**tensors)
        assert [needs for _, needs in products] == [(False,) * 3]


@pytest.mark.parametrize("lengths", [(60, 70, 90), (90, 20, 70), (90, 90, 90)], ids=str)
def test_a_group_longer_than_the_first_pass(lengths, products, monkeypatch):
    """A dW in fp32 that holds the logits of 48 tokens, of which each sequence has more."""
    monkeypatch.setattr(planning, "FREE_BYTES", 0)
    monkeypatch.setattr(planning, "CHUNK_TOKENS", 32)
    torch.manual_seed(0)
    target = torch.randint(V, (3, 90))
    for row, length in zip(target, lengths, strict=True):
        row[length:] = -100
    w, b = torch.randn(V, H) * 2 / H**0.5, torch.randn(V)
    given = dict(hidden=torch.randn(3, 90, H), weight=w, bias=b, target=target)
    given = {k: t.requires_grad_(t.is_floating_point()) for k, t in given.items()}
    tensors, b16 = cast(given, torch.bfloat16), torch.bfloat16
    for fn in sequence_loss, token_loss:

        def mine(hidden, weight, bias, target, fn=fn):
            return loss_of(fn, hidden, weight, target, bias, accum_dtype=F32, drop_ignored=True)

        def theirs(hidden, weight, bias, target, fn=fn):
            z = F.linear(hidden.reshape(-1, H), weight, bias).unflatten(0, target.shape)
            log_p = (z if z.dtype == F64 else z.float()).log_softmax(-1)
            log_p = (
                log_p.gather(-1, target.clamp(min=0)[..., None])
                .squeeze(-1)
                .where(target != -100, 0)
            )
            value, *others = fn(slice(None), log_p, None)
            return value, *(x.detach() for x in others)

        actual, exact = outcome(mine, tensors), outcome(theirs, cast(tensors, F64))
        assert sum(products[-1][0]) == sum(lengths) and len(products[-1][0]) > 1
        of = measure_errors(
            actual,
            run_reference(theirs, tensors, b16),
            exact,
            tensors | {"sums": exact["output 1"]},
            30,
        )
        assert_as_exact_as_pytorch([of])


@pytest.mark.parametrize("channels,unit", [(4096, 64), (4096, 1024), (4096, 4096), (2048, 8192)])
@pytest.mark.parametrize("memory", [1.06e9, 1.3e9, 2.4e9, 2.9e9, 3.2e9, 5e9])
def test_passes_of_whole_groups_keep_to_the_budget(channels, unit, memory):
    """DPO's real shape in bf16: dW in fp32 only where a group's logits still fit."""
    M, classes, low = 32768, 128256, torch.bfloat16
    memory = max(memory, 2 * classes * unit)  # a group's logits
    chosen = planning.plan(M, channels, classes, low, low, memory=int(memory), unit=unit)
    hidden = torch.empty(M, channels, dtype=low, device="meta")
    taken = (
        chunks.HeadBuffers(hidden, classes, low, chosen, True).nbytes(low) - 2 * classes * channels
    )
    strip = 2 * chosen.strip * 2 * channels  # by which dW runs ahead of the logits
    assert taken <= memory + strip + 2**23
    assert all((i.stop - i.start) % unit == 0 for i in chosen.chunks(M))


@pytest.mark.parametrize("frozen", range(8))
def test_no_gradient_of_what_is_frozen(frozen, products):
    tensors, expected = cast(make_tensors("pairs"), F32), cast(make_tensors("pairs"), F32)
    plain("pairs")(**expected)[0].backward()
    names = "hidden", "weight", "bias"
    for i, name in enumerate(names):
        tensors[name].requires_grad_(not frozen >> i & 1)
    value = linear_loss_of("pairs")(**tensors)[0]
    assert products[-1][1] == tuple(tensors[name].requires_grad for name in names)
    assert value.requires_grad == (frozen != 7)
    if value.requires_grad:
        value.backward()
    for name in names:
        assert (tensors[name].grad is None) == (not tensors[name].requires_grad)
        if tensors[name].requires_grad:
            torch.testing.assert_close(
                tensors[name].grad, expected[name].grad, rtol=1e-4, atol=1e-6
            )


@KIND
@pytest.mark.parametrize("drop_ignored", [False, True])
def test_a_frozen_head_takes_no_more_passes(kind, drop_ignored, products):
    tensors = cast(make_tensors(kind), F32)
    tensors["weight"].requires_grad_(False)
    linear_loss_of(kind, drop_ignored=drop_ignored)(**tensors)
    assert [len(sizes) for sizes, _ in products] == [1]


@KIND
@pytest.mark.parametrize("where", ["kernels", "float64"])
def test_the_weight_may_go_before_backward(kind, where):
    dtype = F64 if where == "float64" else F32
    tensors, expected = cast(make_tensors(kind), dtype), cast(make_tensors(kind), dtype)
    (plain(kind)(**expected)[0] * 3).backward()
    value, *others = linear_loss_of(kind)(**tensors)
    assert not any(x.requires_grad for x in others)
    with torch.no_grad():
        for x in tensors.values():
            x.zero_() if x.is_floating_point() else x.fill_(-1)
    (value * 3).backward()
    for name in ("hidden", "weight", "bias"):
        torch.testing.assert_close(tensors[name].grad, expected[name].grad, rtol=1e-4, atol=1e-5)


@KIND
@pytest.mark.parametrize("drop_ignored", [False, True])
def test_all_ignored_or_none_there(kind, drop_ignored):
    for make in (lambda t: t.fill_(-100), lambda t: t[:0]):
        tensors = cast(make_tensors(kind), F32)
        tensors["target"] = make(tensors["target"])
        tensors["hidden"] = tensors["hidden"][: len(tensors["target"])].detach().requires_grad_()
        value, *_ = linear_loss_of(kind, drop_ignored=drop_ignored)(**tensors)
        value.backward()
        assert value.isfinite()
        for name in ("hidden", "weight", "bias"):
            assert tensors[name].grad.shape == tensors[name].shape and not tensors[name].grad.any()


def test_what_is_dropped_may_hold_anything():
    tensors = cast(make_tensors("pairs"), F32)
    expected = outcome(linear_loss_of("pairs"), tensors)
    with torch.no_grad():
        tensors["hidden"][tensors["target"] == -100] = torch.nan
    same(outcome(linear_loss_of("pairs", drop_ignored=True), tensors), expected, 1e-6)


def test_autocast():
    tensors = cast(make_tensors("sequences"), F32)
    with torch.autocast(DEVICE, torch.bfloat16):
        value, *_ = linear_loss_of("sequences")(**tensors)
    value.backward()
    low = cast(make_tensors("sequences"), torch.bfloat16)
    expected, *_ = linear_loss_of("sequences")(**low)
    expected.backward()
    assert value.dtype == F32 and torch.equal(value, expected)
    for name in ("hidden", "weight", "bias"):
        assert tensors[name].grad.dtype == F32
        torch.testing.assert_close(tensors[name].grad, low[name].grad.float(), rtol=1e-2, atol=1e-3)


def test_non_contiguous():
    tensors = cast(make_tensors("sequences"), F32)
    expected = outcome(linear_loss_of("sequences"), tensors)
    wide = torch.cat(
        (tensors["hidden"], torch.full_like(tensors["hidden"][:, :1], torch.nan)), 1
    ).detach()
    actual = outcome(
        lambda hidden, **rest: linear_loss_of("sequences")(hidden=hidden[:, :-1], **rest),
        tensors
        | dict(
            hidden=wide.requires_grad_(),
            weight=tensors["weight"].detach().t().contiguous().t().requires_grad_(),
        ),
    )
    actual["dhidden"] = actual["dhidden"][:, :-1]
    same(actual, expected, 2e-6)


def test_inside_a_compiled_function():
    tensors = cast(make_tensors("sequences"), F32)
    expected = outcome(linear_loss_of("sequences"), tensors)
    torch._dynamo.reset()
    same(
        outcome(torch.compile(linear_loss_of("sequences"), backend="aot_eager"), tensors),
        expected,
        2e-6,
    )


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    parts=st.sampled_from([1, 2]),
    first=st.integers(0, 40),
    rows=st.integers(1, 30),
)
def test_every_token_is_in_one_pass(sizes, parts, first, rows):
    """Whatever the groups' lengths: whole groups, in order, no more tokens than a pass has, or one
    group."""
    T = 10
    valid = torch.zeros(parts, len(sizes), T, dtype=torch.bool)
    for g, n in enumerate(sizes):
        valid[:, g, :n] = True
    lead = torch.Size((parts * len(sizes), T))
    target = torch.zeros(lead.numel(), dtype=torch.long)
    options = grouped_loss.GroupedOptions(HeadOptions(TokenOptions(), F32), parts=parts)
    groups = grouped_loss.TokenGroups(None, target, lead, valid.view(-1), "cpu", options)
    spans = groups.spans(first, rows)
    assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])] and spans[-1][1] == len(sizes)
    for k, (a, b) in enumerate(spans):
        tokens = groups.group_rows(a, b)
        assert (
            len(tokens) <= (first if k == 0 and first else rows)
            or sum(n > 0 for n in sizes[a:b]) == 1
        )
        kept = torch.zeros(lead.numel(), dtype=torch.bool)
        kept[tokens] = True
        kept = kept.view(parts, len(sizes), T)
        assert (
            torch.equal(kept[:, a:b], valid[:, a:b])
            and not kept[:, :a].any()
            and not kept[:, b:].any()
        )


@pytest.mark.parametrize(
    "change,error",
    [
        (dict(target=torch.zeros(3, 7, dtype=torch.long)), "target has shape"),
        (dict(parts=3), "no groups of 3"),
        (dict(temperature=0.0), "temperature"),
        (
            dict(target=torch.zeros(4, 7, 2, dtype=torch.long), return_entropy=True),
            "several classes",
        ),
        (dict(weight=torch.zeros(V, H + 1)), "weight"),
        (dict(memory="plenty"), "memory"),
        (dict(few=1), "few"),
        (dict(few=2.0), "few"),
    ],
)
def test_errors(change, error):
    tensors = cast(make_tensors("sequences"), F32)
    given = dict(
        fn=sequence_loss, **{k: tensors[k] for k in ("hidden", "weight", "target", "bias")}
    )
    change = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=error):
        loss_of(**given | change)
