"""A linear head's passes: within their budget, in a graph, over the rows that count."""

import itertools

import pytest
import torch
from cases import WITH_AND_WITHOUT_KERNELS, assert_as_exact_as_pytorch, cast, run
from hardware import DEVICE
from heads import (
    ACCURACY_FLAGS,
    B16,
    DTYPE,
    DTYPES,
    F16,
    F32,
    LOGIT_BYTES,
    OUTPUT_NAMES,
    SCALAR_OPTIONS,
    TOKENS_OR_SCALAR,
    WITH_TEXTBOOK,
    H,
    V,
    assert_outputs_close,
    buffer_bytes,
    make_tensors,
    measure_head_errors,
    number_of_passes,
    scalar_loss,
    textbook_outputs,
    textbook_scalar_loss,
    token_outputs,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_kernel.ops.head import chunks, linear_head, planning
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_kernel.ops.head.planning import MEMORY_VARIABLE, MIN_CHUNK_TOKENS, parse_memory, plan
from liger_kernel.ops.head.token_log_probs import token_log_probs

HALF, WAVES, FULL = "16 bits", "16 bits by way of fp32", "fp32"
# name: (M, memory, accum_dtype, what fp32, bf16 and fp16 do: passes and the dtype of dW's sum)
PATHS = {
    "far below H": (3, "auto", None, (1, FULL), (1, HALF), (1, FULL)),
    "at H": (64, 0, None, (1, FULL), (1, HALF), (1, FULL)),
    "above H": (70, 0, None, (2, FULL), (2, HALF), (1, FULL)),
    "far above H": (300, "auto", None, (2, FULL), (2, WAVES), (3, FULL)),
    "farther above": (400, "auto", None, (3, FULL), (4, FULL), (4, FULL)),
    "no memory": (300, 0, None, (5, FULL), (5, HALF), (4, FULL)),
    "a little": (300, 20 * LOGIT_BYTES, None, (5, FULL), (5, HALF), (4, FULL)),
    "room for two": (300, 241 * LOGIT_BYTES, None, (4, FULL), (2, WAVES), (3, FULL)),
    "room for fp32": (400, 213 * LOGIT_BYTES, None, (6, FULL), (6, FULL), (6, FULL)),
    "enough": (300, 10**6, None, (1, FULL), (1, HALF), (1, FULL)),
    "fp32, no memory": (300, 0, F32, (5, FULL), (4, FULL), (4, FULL)),
    "fp32, below H": (9, 0, F32, (1, FULL), (1, FULL), (1, FULL)),
    "fp32, enough": (300, 10**6, F32, (1, FULL), (1, FULL), (1, FULL)),
}


def apart(*tensors):
    """Whether no two of them overlap."""
    places = sorted(
        (t.data_ptr(), t.data_ptr() + t.element_size() * t.numel()) for t in tensors if t.numel()
    )
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


@DTYPE
@pytest.mark.parametrize("path", PATHS)
def test_any_budget_gives_the_same(path, dtype, small, memories):
    M, memory, accum, *expected = PATHS[path]
    count, kind = expected[DTYPES.index(dtype)]
    for fn, reference in WITH_TEXTBOOK:
        draws = []
        for seed in range(1 if M > 100 else 3):
            memories.clear()
            tensors, option = make_tensors(M, H, V, seed, **SCALAR_OPTIONS)
            draws.append(
                measure_head_errors(
                    fn(option, memory=memory, accum_dtype=accum), reference(option), tensors, dtype
                )
            )
            made = [m for m in memories if m.dw is not None]
            assert len(made) == (1 if fn is scalar_loss else 2)  # of two backward passes
            for m in made:
                passes = m.passes["token_gradient"]
                assert sum(passes) == M and len(passes) == count, passes
                assert m.dw.element_size() == (4 if kind == FULL else 2) and m.plan.strip == 32
                assert m.plan.wave == (32 if kind == WAVES else 0)
                for n in passes[1:]:
                    assert apart(m.dw, m.sums, *m.logits_parts(n, False))
            if kind != FULL:
                draws[-1]["dweight"][2] *= count  # it is rounded by each pass
        assert_as_exact_as_pytorch(draws)


@pytest.mark.parametrize("need_w", [True, False], ids=["all", "frozen weight"])
@pytest.mark.thorough
def test_the_budget_is_what_is_taken(need_w, small):
    """No tensor larger than what `plan` foresees, and none of all logits."""
    M, H, V, largest = 500, 64, 1000, []
    memory = 100 * V * 4

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            of = (x for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            largest.extend(x.untyped_storage().nbytes() for x in of)
            return out

    tensors = cast(make_tensors(M, H, V)[0], torch.float32)
    tensors["weight"].requires_grad_(need_w)
    for fn in (
        scalar_loss({}, memory=memory),
        token_outputs({}, memory=memory, names=("loss", "entropy")),
    ):
        largest.clear()
        with Largest():
            out = fn(**tensors)
            sum(o.sum() for o in (out if isinstance(out, tuple) else (out,))).backward()
        assert max(largest) <= memory + V * H * 4 * need_w < M * V * 4


SIZES = (
    (8192, 4096, 128256), (16384, 3584, 152064), (8192, 2304, 256000), (4096, 2048, 128256),
    (32768, 2048, 128256), (512, 4096, 128256), (4096, 4096, 32000), (1, 576, 49152),
    (0, 64, 50257), (1000, 37, 50257),
)  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "dtype,weight_dtype", [(B16, B16), (F16, F16), (F32, F32), (B16, F32)], ids=str
)
def test_a_plan_is_within_its_budget(size, dtype, weight_dtype):
    """Or takes the least: so many tokens or one strip of dW, and fp32 sums where they must be.
    Strides are aligned."""
    M, H, V = size
    token = V * dtype.itemsize
    aligned = 512 + (63 * token if H % 64 else 0)
    for accum_dtype in None, F32:
        wide = accum_dtype == F32 or dtype == F16
        sums = V * H * (weight_dtype.itemsize + (4 if wide and weight_dtype != F32 else 0))
        for memory in (
            0,
            *(int(2**24 * 1.08**i) for i in range(100)),
            *(token * n for n in range(0, M, 48)),
        ):
            chosen = plan(M, H, V, dtype, weight_dtype, accum_dtype, memory)
            number_of_passes(M, chosen)
            extra = buffer_bytes(M, H, V, dtype, weight_dtype, chosen)
            strip = chosen.strip * H * chosen.accum_dtype.itemsize
            least = (
                sums
                - V * H * weight_dtype.itemsize
                + (
                    MIN_CHUNK_TOKENS * token + strip
                    if chosen.separate_logits
                    else max(MIN_CHUNK_TOKENS * token, strip)
                )
            )
            excess = (extra - max(memory, least) - aligned) / token
            assert excess <= 0, f"{chosen}: {excess:.1f} tokens too many within {memory} bytes"


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_without_a_budget_dw_is_about_as_exact_as_pytorchs(size):
    for dtype in DTYPES:
        chosen = plan(*size, dtype, dtype)
        assert chosen.accum_dtype == F32 or dtype == B16 and number_of_passes(size[0], chosen) <= 2
        assert number_of_passes(size[0], plan(*size, dtype, dtype, memory=2**50)) == (size[0] > 0)


# tokens, channels, classes, tokens of a unit: two chunks, and three where the loss allows them
THREE = {
    (16384, 4096, 128256, 64): ([10240, 6144], [8192, 4096, 4096]),
    (16384, 4096, 128256, 2048): ([10240, 6144], [8192, 4096, 4096]),
    (10000, 4096, 128256, 1024): ([7168, 2832],) * 2,
    (12288, 4096, 128256, 64): ([8192, 4096], [6912, 2688, 2688]),
    (10000, 2048, 151936, 64): ([6080, 3920], [4624, 2688, 2688]),
    (8192, 2048, 128256, 64): ([5120, 3072], [4096, 2048, 2048]),
    (8192, 4096, 128256, 64): ([6144, 2048],) * 2,  # chunks would be too small
    (4096, 4096, 128256, 64): ([4096],) * 2,
    (32768, 4096, 128256, 64): ([8192, *(4096,) * 6],) * 2,  # in fp32
}


def sizes(M, chosen):
    return [i.stop - i.start for i in chosen.chunks(M)]


@pytest.mark.parametrize("size", THREE, ids=str)
def test_a_loss_may_be_of_three_chunks(size):
    """The logits beyond dW's memory are a third of what it doesn't hold, not half; two chunks are
    as they were."""
    *size, unit = size
    two, three = (plan(*size, B16, B16, unit=unit, auto_chunks=n) for n in (2, 3))
    assert (sizes(size[0], two), sizes(size[0], three)) == THREE[(*size, unit)]
    if two != three:
        assert buffer_bytes(*size, B16, B16, three) <= 0.71 * buffer_bytes(*size, B16, B16, two)
    for dtypes, given in (
        ((B16, B16), dict(memory=2**30)),
        ((B16, B16), dict(accum_dtype=F32)),
        ((B16, F32), {}),
    ):
        assert plan(*size, *dtypes, unit=unit, auto_chunks=3, **given) == plan(
            *size, *dtypes, unit=unit, **given
        )


def test_a_policy_loss_of_16384_tokens_takes_two_gigabytes():
    """With dX. With two chunks it is 2.6."""
    for unit in 64, 2048:
        size = 16384, 4096, 128256
        chosen = plan(*size, B16, B16, unit=unit, auto_chunks=3)
        assert 2 * 4096 * (16384 + 128256) + buffer_bytes(*size, B16, B16, chosen) <= 2.12 * 2**30


@pytest.mark.parametrize("H", [1000, 1024, 4230])
@pytest.mark.parametrize("unit", [64, 300, 1024])
def test_up_to_five_times_what_dw_holds_are_few_chunks(H, unit):
    """Also of channels that are no multiple of 64, and tokens that are no whole units; 16 bits are
    added up in fp32."""
    for dtype, weight_dtype in (B16, B16), (F32, F32), (B16, F32):
        holds = H * weight_dtype.itemsize // dtype.itemsize
        for M in range(300, 5 * holds, 300):
            for few in (2, 3):
                chosen = plan(M, H, 128256, dtype, weight_dtype, unit=unit, auto_chunks=few)
                passes = number_of_passes(M, chosen)
                assert passes <= few and (passes < 2 or weight_dtype == F32 or chosen.wave), chosen


def test_a_common_head_takes_half_of_dw():
    M, H, V = size = 8192, 4096, 128256
    chosen, gradients = plan(*size, B16, B16), V * H * 2 + M * H * 2
    assert gradients + buffer_bytes(*size, B16, B16, chosen) <= 1.51 * gradients


@pytest.mark.parametrize(
    "constant", ["CHUNK_TOKENS", "MIN_CHUNK_TOKENS", "DW_TILE", "FREE_BYTES", "wave_classes"]
)
def test_a_plan_is_kept_while_the_constants_are_the_same(constant, monkeypatch):
    def plans():
        return [
            plan(*size, B16, B16, memory=memory) for size in SIZES[:5] for memory in (-1, 0, 2**30)
        ]

    before = plans()
    assert all(a is b for a, b in zip(before, plans(), strict=True))
    new = dict(
        CHUNK_TOKENS=512,
        MIN_CHUNK_TOKENS=4096,
        DW_TILE=(32, 64),
        FREE_BYTES=2**40,
        wave_classes=lambda *args: 64,
    )
    monkeypatch.setattr(planning, constant, new[constant])
    assert plans() != before


def test_budgets(monkeypatch):
    monkeypatch.delenv(MEMORY_VARIABLE, raising=False)
    assert (parse_memory("auto"), parse_memory(0), parse_memory(12)) == (-1, 0, 12)
    for value, want in ("auto", -1), ("0", 0), ("123", 123), ("2e9", 2 * 10**9):
        monkeypatch.setenv(MEMORY_VARIABLE, value)
        assert parse_memory("auto") == want and parse_memory(7) == 7


@pytest.mark.parametrize("value", ["much", "", "-5", "inf", "nan", "1 GB"])
def test_a_wrong_variable_is_named(value, monkeypatch):
    monkeypatch.setenv(MEMORY_VARIABLE, value)
    for fn in token_outputs, scalar_loss:
        with pytest.raises(ValueError, match=MEMORY_VARIABLE):
            fn({})(**cast(make_tensors()[0], F32))


def test_the_variable_is_what_auto_stands_for(small, memories, monkeypatch):
    monkeypatch.setenv(MEMORY_VARIABLE, "1e6")
    scalar_loss({})(**cast(make_tensors(200, H, V)[0], F32))
    monkeypatch.setenv(MEMORY_VARIABLE, "0")
    scalar_loss({})(**cast(make_tensors(200, H, V)[0], F32))
    assert [len(m.passes["token_gradient"]) for m in memories] == [1, 4]


# ---- the graph ----


def total(fn, tensors, option=None):
    out = fn(option or {})(**tensors)
    return sum(o.sum() for o in out[:3]) if isinstance(out, tuple) else out


@TOKENS_OR_SCALAR
def test_a_third_backward_raises(fn):
    """After two right ones (`measure_head_errors`) the graph is free."""
    tensors = cast(make_tensors()[0], F32)
    loss = total(fn, tensors)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("memory", ["auto", 0])
def test_gradients_of_two_steps_add_up(reduction, memory, small):
    actual, want, plain = (
        *(cast(make_tensors()[0], F32) for _ in range(2)),
        textbook_scalar_loss({}, reduction=reduction),
    )
    for seed, scale in (1, 1.0), (2, 0.25), (3, 1.0):
        batch = cast(make_tensors(30, seed=seed)[0], F32)
        batch = {k: batch[k] for k in ("hidden", "target")}
        for t, loss in (actual, scalar_loss({}, memory=memory, reduction=reduction)), (want, plain):
            (loss(**(t | batch)).sum() * scale).backward()
    assert_outputs_close(
        *({k: t[k].grad for k in ("weight", "bias")} for t in (actual, want)), atol=1e-5
    )


@pytest.fixture
def taken_gradients(monkeypatch):
    """What `run_chunks` was asked for and what it made: (of hidden, weight, bias), each time."""
    seen, run_ = [], chunks.run_chunks

    def spy(h, w, b, dtype, plan, to_gradient, needs, *args, **kwargs):
        grads = run_(h, w, b, dtype, plan, to_gradient, needs, *args, **kwargs)
        assert [g.numel() > 0 for g in grads] == list(needs)
        seen.append(tuple(needs))
        return grads

    monkeypatch.setattr(linear_head, "run_chunks", spy)
    return seen


@TOKENS_OR_SCALAR
@pytest.mark.parametrize("frozen", range(7))
def test_no_gradient_of_what_is_frozen(fn, frozen, taken_gradients):
    needs = tuple(not frozen >> i & 1 for i in range(3))
    tensors, want = cast(make_tensors()[0], F32), cast(make_tensors()[0], F32)
    total(fn, want).backward()
    taken_gradients.clear()
    for k, need in zip(("hidden", "weight", "bias"), needs, strict=True):
        tensors[k].requires_grad_(need)
    total(fn, tensors).backward()
    assert taken_gradients == ([needs] if fn is scalar_loss else [(False,) * 3, needs])
    for k, need in zip(("hidden", "weight", "bias"), needs, strict=True):
        assert need or tensors[k].grad is None
        if need:
            torch.testing.assert_close(tensors[k].grad, want[k].grad)


@TOKENS_OR_SCALAR
def test_evaluation_takes_no_gradient(fn, taken_gradients, memories):
    tensors = cast(make_tensors()[0], F32)
    with torch.no_grad():
        total(fn, tensors)
    total(fn, {k: t.detach() for k, t in tensors.items()})
    assert taken_gradients == [(False,) * 3] * 2 and [m.dw for m in memories] == [None] * 2


@TOKENS_OR_SCALAR
def test_the_graph_holds_no_logits(fn, small):
    """Between forward and backward: nothing as large for the per-token outputs, the gradients for
    the loss."""
    M, held = 300, []
    tensors = cast(make_tensors(M, H, V)[0], F32)

    def pack(t):
        held.append(t.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        total(fn, tensors, dict(memory=0))
    assert (
        max(held) <= V * H * 4 + MIN_CHUNK_TOKENS * V * 4
        if fn is scalar_loss
        else max(held) <= max(V, M) * H * 4
    )


# ---- what is left out, and what is divided by ----


@WITH_AND_WITHOUT_KERNELS
@DTYPE
@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("option", [{}, SCALAR_OPTIONS], ids=["plain", "options"])
def test_num_items(option, reduction, as_tensor, dtype):
    """The sum divided by it, class weights and z-loss, too; without another rounding of the
    gradients."""
    given = torch.tensor(123.0, device=DEVICE) if as_tensor else 123
    draws = []
    for seed in range(3):
        tensors, rest = make_tensors(seed=seed, **option)
        mine = scalar_loss(rest, reduction=reduction, num_items=given)
        draws.append(
            measure_head_errors(
                mine, textbook_scalar_loss(rest, reduction=reduction, num_items=123), tensors, dtype
            )
        )
    assert_as_exact_as_pytorch(draws)


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("left", ["some", "all", "no"])
@pytest.mark.parametrize("place", sorted({"cpu", DEVICE}))
def test_dropping_ignored_rows_changes_nothing(left, reduction, place, memories):
    tensors, option = make_tensors(14, **SCALAR_OPTIONS)
    if left != "some":
        tensors["target"] = torch.arange(14) if left == "all" else torch.full((14,), -100)
    tensors = cast(tensors, F32)
    tensors["target"] = tensors["target"].to(place)

    def loss(drop):
        asked = dict.fromkeys(
            ("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), True
        )
        out = scalar_loss(option, reduction=reduction, drop_ignored=drop, **asked)
        return lambda **tensors: tuple(vars(out(**tensors)).values())

    def each(drop):
        return token_outputs(
            option, (*OUTPUT_NAMES, "correct", "predicted"), drop_ignored=drop, **ACCURACY_FLAGS
        )

    for fn in loss, each:
        want = run(fn(False), tensors)[0]
        for drop in True, None:
            memories.clear()
            assert_outputs_close(run(fn(drop), tensors)[0], want, atol=1e-5)
            if memories:  # made by the kernels
                kept = {"some": 9, "all": 14, "no": 0}[left] if drop or place == "cpu" else 14
                assert all(
                    sum(m.passes["token_loss"] or m.passes["token_gradient"]) == kept
                    for m in memories
                )


@WITH_AND_WITHOUT_KERNELS
def test_log_probabilities_of_sequences():
    """(B, T) targets and hidden states of any strides: -loss, alone and with the entropy."""
    B, T, option = 3, 4, dict(temperature=0.7, softcap=5.0)
    tensors = cast(make_tensors(B * T)[0], F32)
    turned = (
        tensors["hidden"]
        .detach()
        .view(B, T, -1)
        .transpose(0, 1)
        .contiguous()
        .transpose(0, 1)
        .requires_grad_()
    )

    def log_probs(hidden, weight, target, bias):
        both = token_log_probs(
            hidden, weight, target.view(B, T), bias, **option, return_entropy=True
        )
        assert torch.equal(
            both[0], token_log_probs(hidden, weight, target.view(B, T), bias, **option)
        )
        return both

    def want(hidden, weight, target, bias):
        out = textbook_outputs(hidden.reshape(B * T, -1), weight, target, bias, **option)
        return -out["loss"].view(B, T), out["entropy"].view(B, T)

    assert_outputs_close(*(run(fn, tensors | dict(hidden=turned))[0] for fn in (log_probs, want)))


@pytest.mark.parametrize("memory", ["auto", 0, 50 * LOGIT_BYTES])
@pytest.mark.thorough
def test_compiles_whole(memory, small):
    torch._dynamo.reset()
    tensors = cast(make_tensors(200, H, V)[0], F32)

    def log_probs(hidden, weight, target, bias):
        hidden, target = hidden.unflatten(0, (4, 50)), target.unflatten(0, (4, 50))
        return token_log_probs(
            hidden, weight, target, bias, temperature=0.7, return_entropy=True, memory=memory
        )

    def loss(hidden, weight, target, bias):
        return liger_fused_linear_cross_entropy(
            hidden, weight, target, bias, softcap=5.0, memory=memory
        )

    for fn in log_probs, loss:
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        assert_outputs_close(
            run(compiled, tensors)[0], run(fn, tensors)[0], atol=1e-5
        )  # eager drops the ignored rows of the CPU's


class Filled(TorchDispatchMode):
    """The scalars that tensors are filled with."""

    def __init__(self):
        super().__init__()
        self.values = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.full.default and list(args[0]) == []:
            self.values.append(args[1])
        return function(*args, **(kwargs or {}))


def test_a_number_of_items_is_filled_on_the_device():
    """Not copied from the host, for which a CUDA stream would be waited for, and which a CUDA graph
    cannot have."""
    h, w = torch.randn(3, 8, device=DEVICE), torch.randn(8, 8, device=DEVICE)
    y = torch.arange(3, device=DEVICE)
    with Filled() as filled:
        loss = liger_fused_linear_cross_entropy(h, w, y, reduction="sum", num_items=7)
    assert filled.values == [7]
    whole = torch.nn.functional.cross_entropy(h @ w.T, y, reduction="sum") / 7
    torch.testing.assert_close(loss, whole, rtol=1e-5, atol=1e-6)
