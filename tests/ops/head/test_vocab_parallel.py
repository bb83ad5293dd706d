"""Cross entropy of logits whose classes are spread over ranks: on one rank, and on several against
all logits on one."""

from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hardware import DEVICE
from memory import AddressRecorder, collect_garbage, reuses_memory
from ranks import SIZE

from liger_kernel.ops.head.vocab_parallel import (
    FORMULAS,
    MODES,
    LigerVocabParallelCEFunction,
    LigerVocabParallelCrossEntropy,
    liger_vocab_parallel_cross_entropy,
    validate_formula_and_mode,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
S, B, V = 3, 2, 14


def drawn(dtype=torch.float32, V=V):
    """The same on all ranks: a confident row, ignored tokens."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(S, B, V, generator=g, dtype=torch.float64) * 3
    y = torch.randint(V, (S, B), generator=g)
    x[0, 0, y[0, 0]] += 40
    y[1, 1] = y[2, 0] = -100
    return x.to(DEVICE, dtype), y.to(DEVICE)


def by_definition(x, y, epsilon=0.0, formula="pytorch", own=slice(None)):
    """The formula, on all logits; ``own`` are the classes over which is smoothed."""
    log_p = x.double().log_softmax(-1)
    nll = -log_p.gather(-1, y.clamp(min=0)[..., None])[..., 0]
    K = log_p[..., own].shape[-1]
    a = epsilon * K / (K - 1) if formula == "megatron" else epsilon
    return ((1 - a) * nll - a * log_p[..., own].mean(-1)).where(y != -100, 0)


def same(actual, expected, tolerance):
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


# ---- one rank ----


def test_as_deepspeed_calls_it():
    """By position, one column of tokens."""
    x, y = drawn()
    x = x.requires_grad_()
    loss = LigerVocabParallelCEFunction.apply(
        x.reshape(-1, 1, V), y.reshape(-1, 1), None, -100, 0.0, "pytorch", "global"
    )
    assert (
        loss.shape == (S * B, 1)
        and loss.dtype == torch.float32
        and loss[y.reshape(-1) == -100].eq(0).all()
    )
    expected = F.cross_entropy(x.view(-1, V), y.view(-1), reduction="none")
    torch.testing.assert_close(loss.view(-1), expected)
    g = torch.rand(S * B, device=DEVICE)
    for a, b in zip(
        *(torch.autograd.grad(o, x, g.view(o.shape)) for o in (loss, expected)), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_by_name(formula, mode, with_and_without_kernels):
    x, y = drawn()
    options = dict(
        ignore_index=-100,
        label_smoothing=0.3,
        label_smoothing_formula=formula,
        label_smoothing_mode=mode,
    )
    expected = by_definition(x, y, 0.3, formula)
    actual = LigerVocabParallelCEFunction.apply(
        vocab_parallel_logits=x, target=y, tp_group=None, **options
    )
    same(actual, expected, 1e-5)
    same(
        LigerVocabParallelCrossEntropy(**options)(vocab_parallel_logits=x, target=y, tp_group=None),
        expected,
        1e-5,
    )
    if formula == "pytorch":
        same(
            F.cross_entropy(x.view(-1, V), y.view(-1), label_smoothing=0.3, reduction="none").view(
                S, B
            ),
            expected,
            1e-5,
        )


LAYOUTS = {
    "sequence second": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "a padded vocabulary": lambda x: F.pad(x, (0, 3))[..., :V],
    "classes first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_logits_that_are_not_contiguous(layout):
    x, y = drawn()
    given = layout(x.requires_grad_())
    assert not given.is_contiguous()
    loss = liger_vocab_parallel_cross_entropy(given, y, label_smoothing=0.1)
    once = torch.autograd.grad(
        loss, x, torch.ones_like(loss).t().contiguous().t(), retain_graph=True
    )
    twice = torch.autograd.grad(loss, x, torch.ones_like(loss))
    assert torch.equal(*once, *twice)
    expected = torch.autograd.grad(by_definition(x, y, 0.1).sum(), x)[0]
    torch.testing.assert_close(*once, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keep", [False, True])
def test_the_gradient_takes_the_memory_of_logits_that_nobody_sees(keep):
    x, y = drawn()
    seen = {}
    loss = collect_garbage(
        liger_vocab_parallel_cross_entropy(AddressRecorder.apply(x.requires_grad_(), seen), y)
    )
    loss.sum().backward(retain_graph=keep)
    assert reuses_memory(seen) != keep
    once = x.grad.clone()
    torch.testing.assert_close(
        once, torch.autograd.grad(by_definition(2 * x, y).sum(), x)[0], rtol=1e-5, atol=1e-6
    )
    if keep:
        loss.sum().backward()
        torch.testing.assert_close(x.grad, 2 * once)


def test_what_does_not_fit():
    x, y = drawn()
    base = dict(vocab_parallel_logits=x, target=y, tp_group=None)
    for said, changed in (
        (r"shape \(2, 14\), give \(S, B", dict(vocab_parallel_logits=x[0], target=y[0])),
        (r"target has shape \(3, 1\), give \(3, 2\)", dict(target=y[:, :1])),
        (
            r"\(2, 1, 0\) has no classes",
            dict(vocab_parallel_logits=x.new_zeros(2, 1, 0), target=y[:2, :1] * 0 - 100),
        ),
        ("label_smoothing is 1.0, give a number from 0 to below 1", dict(label_smoothing=1.0)),
        (
            "formula is 'torch', give one of pytorch, megatron",
            dict(label_smoothing_formula="torch"),
        ),
        ("mode is 'local', give one of global, partition", dict(label_smoothing_mode="local")),
    ):
        for call in (liger_vocab_parallel_cross_entropy, LigerVocabParallelCEFunction.apply):
            with pytest.raises(ValueError, match=said):
                call(**base | changed)
    with pytest.raises(TypeError, match="tp_group is 2, give a process group"):
        liger_vocab_parallel_cross_entropy(x, y, 2)
    validate_formula_and_mode("megatron", "partition")
    for wrong in (("megatron", "all"), ("hf", "global")):
        with pytest.raises(ValueError, match="validate_formula_and_mode: "):
            validate_formula_and_mode(*wrong)
    for option in (
        dict(reduction="mean"),
        dict(label_smoothing=1.0),
        dict(label_smoothing_mode="local"),
    ):
        with pytest.raises(ValueError, match="LigerVocabParallelCrossEntropy: "):
            LigerVocabParallelCrossEntropy(**option)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="target of row 0 is 14, give a class from 0 to 13"):
            liger_vocab_parallel_cross_entropy(x, y.fill_(14))


# ---- several ranks ----

ALL_CLASSES = 7 * SIZE


def shard(rank, dtype, option):
    """This rank's classes of logits, losses and gradients of all logits on one rank."""
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    epsilon, formula, mode = option
    x, y = drawn(dtype, ALL_CLASSES)
    x[2, :, 7:] = -60  # masked on all ranks but the first
    own = slice(7 * rank, 7 * rank + 7)
    mine, full = x[..., own].clone().requires_grad_(), x.double().requires_grad_()
    assert not x[..., own].is_contiguous()
    expected = by_definition(full, y, epsilon, formula, own if mode == "partition" else slice(None))
    g = torch.rand(S, B, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    (of_all,) = torch.autograd.grad(expected, full, g.double())
    with pytest.MonkeyPatch.context() as patch:
        actual = LigerVocabParallelCEFunction.apply(mine, y, dist.group.WORLD, -100, *option)
        for send in ("all_reduce", "all_gather_into_tensor"):
            patch.delattr(dist, send)  # backward needs none
        once = torch.autograd.grad(actual, mine, g.to(actual.dtype), retain_graph=True)
        twice = torch.autograd.grad(actual, mine, g.to(actual.dtype))
    same(actual, expected, tolerance)
    assert torch.equal(*once, *twice) and once[0].dtype == dtype
    same(once[0], of_all[..., own], tolerance)
    strided = liger_vocab_parallel_cross_entropy(x[..., own], y, dist.group.WORLD, -100, *option)
    same(strided, expected, tolerance)


def module(rank, compiled):
    """With the group given, of all ranks or of one."""
    x, y = drawn(V=ALL_CLASSES)
    loss = LigerVocabParallelCrossEntropy(label_smoothing=0.1, label_smoothing_formula="megatron")
    call = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    mine = x.chunk(SIZE, -1)[rank].clone().requires_grad_()
    actual = call(mine, y, dist.group.WORLD)
    same(actual, by_definition(x, y, 0.1, "megatron"), 1e-5)
    actual.sum().backward()
    full = x.requires_grad_()
    (expected,) = torch.autograd.grad(by_definition(full, y, 0.1, "megatron").sum(), full)
    torch.testing.assert_close(mine.grad, expected.chunk(SIZE, -1)[rank], rtol=1e-5, atol=1e-6)
    alone = [dist.new_group([r]) for r in range(SIZE)][rank]
    same(loss(x, y, alone), by_definition(x, y, 0.1, "megatron"), 1e-5)


OPTIONS = [
    (0.0, "pytorch", "global"),
    *((0.3, formula, mode) for formula in FORMULAS for mode in MODES),
]


@pytest.mark.thorough
def test_shards_equal_the_whole(tmp_path):
    checks = [partial(shard, dtype=torch.float64, option=option) for option in OPTIONS]
    checks += [partial(shard, dtype=torch.float32, option=option) for option in OPTIONS[::2]]
    checks += [
        partial(shard, dtype=torch.bfloat16, option=OPTIONS[-1]),
        partial(module, compiled=False),
    ]
    ranks.run([*checks, partial(module, compiled=True)], tmp_path)
