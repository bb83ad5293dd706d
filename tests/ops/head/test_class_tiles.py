"""A weight of another dtype than the logits, with no room for a copy: a part of it at a time.

Per-token losses take tiles of logits, all others chunks of whole rows."""

import pytest
import torch
from cases import assert_as_exact_as_pytorch, cast
from hardware import DEVICE
from heads import (
    ALL_OPTIONS,
    B16,
    F32,
    make_tensors,
    measure_head_errors,
    scalar_loss,
    textbook_scalar_loss,
    textbook_token_outputs,
    token_outputs,
)
from live_bytes import counted_tensors, peak_bytes

from liger_kernel.ops.head import (
    chunks,
    class_tiles,
    linear_cross_entropy,
    planning,
    token_log_probs,
    unit_gradients,
)
from liger_kernel.ops.head.distillation import linear_distillation
from liger_kernel.ops.head.grouped_loss import linear_loss

SIZE = 150, 24, 200  # tokens, channels, classes
TILE = 64  # tokens and classes


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(planning, "CAST_CLASSES", 48)
    monkeypatch.setattr(planning, "CAST_TOKENS", 40)
    monkeypatch.setattr(planning, "TILE_TOKENS", TILE)
    monkeypatch.setattr(planning, "TILE_ELEMENTS", (TILE * TILE, TILE * TILE))
    monkeypatch.setattr(planning, "MIN_CHUNK_TOKENS", 64)
    unit_gradients._histories.clear()


@pytest.fixture
def copies(monkeypatch):
    """Record each copy of a part of the weight: by which of the two, and of how many classes."""
    recorded = []

    def spy(owner, name, label):
        iterate = getattr(owner, name)

        def parts(self, *args):
            is_copy = label == "tile" or self.buffer is not None
            for part in iterate(self, *args):
                if is_copy:
                    recorded.append((label, part[1].shape[0]))
                yield part

        monkeypatch.setattr(owner, name, parts)

    spy(class_tiles.LogitTiles, "__iter__", "tile")
    spy(chunks.CastWeight, "beside", "chunk")
    return recorded


@pytest.fixture
def fp32_logits(monkeypatch):
    """Have a weight in bf16 copied to fp32, of which nothing is rounded before the gradients."""
    for module in token_log_probs, linear_cross_entropy:
        monkeypatch.setattr(module, "compute_dtype", lambda *tensors: F32)


def of_bf16_weight(fn):
    def call(weight, **tensors):
        return fn(weight=weight.to(B16), **tensors)

    return call


def assert_exact(fn, reference, option):
    draws = []
    for seed in range(3):
        tensors, _ = make_tensors(*SIZE, seed, **option)
        with torch.no_grad():
            tensors["weight"].copy_(tensors["weight"].to(B16))
        draws.append(measure_head_errors(of_bf16_weight(fn), reference, tensors, F32))
        draws[-1]["dweight"][2] += torch.finfo(B16).eps  # it is in the dtype of the weight
    assert_as_exact_as_pytorch(draws)


@pytest.mark.parametrize("option", [dict(bias=False), ALL_OPTIONS], ids=["plain", "all"])
def test_tiles_against_float64(option, copies, fp32_logits):
    """All outputs and gradients: never further off than PyTorch, but for one rounding of dW."""
    rest = {k: v for k, v in option.items() if k not in ("bias", "class_weight")}
    assert_exact(token_outputs(rest, memory=0), textbook_token_outputs(rest), option)
    # three tiles of tokens by four of classes, in a forward and two backward passes of each draw
    assert {label for label, _ in copies} == {"tile"} and len(copies) == 3 * 3 * 12
    assert {n for _, n in copies} == {TILE, SIZE[2] % TILE}


def test_chunks_against_float64(copies, fp32_logits):
    """A scalar loss makes its gradients in forward, for which rows of logits must be whole."""
    assert_exact(scalar_loss({}, memory=0), textbook_scalar_loss({}), {})
    assert {label for label, _ in copies} == {"chunk"}
    assert max(n for _, n in copies) == planning.CAST_CLASSES


def of_tokens(hidden, weight, target, bias, **options):
    return linear_loss(
        lambda part, log_p, entropy: -log_p.sum(), hidden, weight, target, bias, **options
    )[0]


def distillation(hidden, weight, target, bias, **options):
    teacher = dict(teacher=hidden.detach() * 0.5, teacher_weight=weight.detach().flip(0))
    return linear_distillation(hidden, weight, target, student_bias=bias, **teacher, **options)[0]


def log_probs(hidden, weight, target, bias, **options):
    log_p = token_log_probs.token_log_probs(hidden, weight, target, bias, **options)
    return log_p.square().sum()


def cross_entropy(hidden, weight, target, bias, **options):
    return linear_cross_entropy.liger_fused_linear_cross_entropy(
        hidden, weight, target, bias, **options
    )


@pytest.mark.parametrize("loss", [of_tokens, distillation, log_probs, cross_entropy])
@pytest.mark.parametrize("hidden_dtype", [F32, B16], ids=str)
def test_in_parts_as_at_once(loss, hidden_dtype, copies):
    """The same products of the same numbers, but for the order of sums; dh in its own dtype."""
    results = []
    for memory in 0, "auto":
        tensors = cast(make_tensors(*SIZE)[0], F32)
        hidden = tensors["hidden"].detach().to(B16).to(hidden_dtype).requires_grad_()
        tensors["hidden"] = hidden
        copies.clear()
        with torch.autocast(DEVICE, B16):
            value = loss(**tensors, memory=memory, drop_ignored=False)
        value.backward()
        assert bool(copies) == (memory == 0) and all(n <= TILE for _, n in copies)
        assert hidden.grad.dtype == hidden_dtype and tensors["weight"].grad.dtype == F32
        results.append([value, *(tensors[k].grad for k in ("hidden", "weight", "bias"))])
    for a, b in zip(*results, strict=True):
        # a logit, or its gradient, may be rounded to the other neighbour
        torch.testing.assert_close(a, b, rtol=0, atol=2e-2 * float(b.abs().max()))
        assert (a - b).abs().mean() <= 2e-3 * b.abs().mean()


@pytest.mark.parametrize("needs", ["hidden", "weight", "bias"])
def test_one_gradient_alone(needs):
    tensors = cast(make_tensors(*SIZE)[0], F32)
    with torch.autocast(DEVICE, B16):
        total = log_probs(**tensors, memory=0, drop_ignored=False)
        whole = torch.autograd.grad(total, [tensors[k] for k in ("hidden", "weight", "bias")])
        for name in "hidden", "weight", "bias":
            tensors[name].requires_grad_(name == needs)
        total = log_probs(**tensors, memory=0, drop_ignored=False)
    (grad,) = torch.autograd.grad(total, [tensors[needs]])
    assert torch.equal(grad, dict(zip(("hidden", "weight", "bias"), whole, strict=True))[needs])


def test_no_tokens_and_an_infinite_weight():
    tensors = cast(make_tensors(*SIZE)[0], F32)
    with torch.autocast(DEVICE, B16):
        empty = {k: t[:0] if k in ("hidden", "target") else t for k, t in tensors.items()}
        log_probs(**empty, memory=0).backward()
    assert not tensors["weight"].grad.any() and not tensors["bias"].grad.any()
    # the padding of 9 tokens is NaN there, and reaches no gradient but that of class 5
    few = {k: t[:9].detach() if k in ("hidden", "target") else t for k, t in tensors.items()}
    tensors["weight"].grad = None
    with torch.no_grad():
        tensors["weight"][5, 0] = torch.inf
        few["hidden"][:, 0] = -1.0
    with torch.autocast(DEVICE, B16):
        log_probs(**few, memory=0, drop_ignored=False).backward()
    grad = tensors["weight"].grad
    assert grad[torch.arange(SIZE[2]) != 5].isfinite().all()


def test_in_a_graph(copies):
    tensors = cast(make_tensors(*SIZE)[0], F32)
    leaves = [tensors[k] for k in ("hidden", "weight", "bias")]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(hidden, weight, target, bias):
        return token_log_probs.token_log_probs(
            hidden, weight, target, bias, memory=0, drop_ignored=False
        )

    results = []
    for fn in compiled, compiled._torchdynamo_orig_callable:
        with torch.autocast(DEVICE, B16):
            value = fn(**tensors)
        results.append([value, *torch.autograd.grad(value.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert {label for label, _ in copies} == {"tile"}


def test_a_weight_of_the_logits_dtype_is_not_copied(copies):
    for dtype in F32, B16:
        tensors = cast(make_tensors(*SIZE)[0], dtype)
        log_probs(**tensors, memory=0, drop_ignored=False).backward()
    assert not copies


REAL = (
    (8192, 4096, 128256),
    (16384, 1152, 262144),
    (300, 640, 262144),
    (1024, 8192, 128256),  # of a tile as wide as for few channels the copy alone would be too much
)


@pytest.mark.parametrize("size", REAL, ids=str)
@pytest.mark.parametrize("megabytes", [300, 600, 3000])
@pytest.mark.parametrize("per_token", [True, False], ids=["per token", "scalar"])
def test_the_budget_has_the_copy(size, megabytes, per_token, monkeypatch):
    """What is taken beyond the gradients, at real sizes."""
    monkeypatch.undo()
    for module in token_log_probs, linear_cross_entropy:
        monkeypatch.setattr(module, "check_targets", lambda *args: None)
    M, H, V = size
    memory = megabytes * 10**6
    loss = log_probs if per_token else cross_entropy

    def call():
        with torch.autocast(DEVICE, B16):
            value = loss(hidden, weight, target, None, memory=memory, drop_ignored=False)
        value.backward()

    with counted_tensors(monkeypatch):
        hidden = torch.empty(M, H, device=DEVICE, requires_grad=True)
        weight = torch.empty(V, H, device=DEVICE, requires_grad=True)
        target = torch.zeros(M, device=DEVICE, dtype=torch.int64)
        taken = peak_bytes(call, hidden, weight, target) - 4 * H * (M + V)
    least = 2 * V * min(planning.MIN_CHUNK_TOKENS, M) + planning.cast_bytes(M, H, V, B16, F32, 0)
    copies_of_hidden = 4 * M * H  # with padding
    assert taken <= max(memory, least) + copies_of_hidden + 256 * M
