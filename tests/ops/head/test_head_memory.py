"""A gradient's memory is its own: what a head's passes took beside it is free once they are
over."""

import itertools

import pytest
import torch
from cases import cast
from hardware import DEVICE
from heads import B16, F16, F32, make_tensors

from bench import models, text, train
from liger_kernel.ops.head import chunks, grouped_loss, planning
from liger_kernel.ops.head.distillation import linear_distillation
from liger_kernel.ops.head.grouped_log_probs import _gather_logits, _scatter_logits
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_kernel.ops.head.token_log_probs import token_log_probs


@pytest.fixture
def memories(monkeypatch):
    """Each `HeadBuffers` that was made."""
    made = []

    class Recorded(chunks.HeadBuffers):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(chunks, "HeadBuffers", Recorded)
    return made


def cross_entropy(hidden, weight, target, bias, **given):
    return liger_fused_linear_cross_entropy(hidden, weight, target, bias, **given)


def log_probs(hidden, weight, target, bias, **given):
    return token_log_probs(hidden, weight, target, bias, **given).sum()


def of_tokens(hidden, weight, target, bias, **given):
    return grouped_loss.linear_loss(
        lambda part, log_p, entropy: -log_p.sum(), hidden, weight, target, bias, **given
    )[0]


def of_classes(hidden, weight, target, bias, **given):
    several = torch.stack(
        (target, (target + 50).clamp(min=0) % len(weight), target), 1
    )  # one stands there twice
    return grouped_loss.linear_loss(
        lambda part, log_p, entropy: -log_p.sum(), hidden, weight, several, bias, **given
    )[0]


def distillation(hidden, weight, target, bias, **given):
    teacher = dict(teacher=hidden.detach() * 0.5, teacher_weight=weight.detach().flip(0))
    return linear_distillation(hidden, weight, target, student_bias=bias, **teacher, **given)[0]


LOSSES = cross_entropy, log_probs, of_tokens, of_classes, distillation
LOSS = pytest.mark.parametrize("loss", LOSSES, ids=lambda fn: fn.__name__)
SIZES = (90, 24, 50), (90, 24, 700), (70, 37, 129), (9, 24, 77), (70, 40, 500)


@LOSS
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [F32, B16, F16], ids=str)
@pytest.mark.thorough
def test_no_gradient_holds_more_than_itself(loss, size, dtype, small, memories):
    """But for one strip of dW, where that is as wide as the first pass or wider."""
    wide = 0
    for memory in ("auto", 0, 10**6) if size[-1] < 500 else ("auto", 10**7):
        for accum_dtype in (None, F32) if size[-1] < 500 else (None,):
            memories.clear()
            tensors = cast(make_tensors(*size)[0], dtype)
            loss(**tensors, memory=memory, accum_dtype=accum_dtype, drop_ignored=False).backward()
            grads = [tensors[name].grad for name in ("hidden", "weight", "bias")]
            if loss is log_probs and memory not in (
                "auto",
                0,
            ):  # its logits are kept, and dW has memory of its own
                assert not [m for m in memories if m.dw is not None]
                assert all(grad.untyped_storage().nbytes() == grad.nbytes for grad in grads)
                continue
            (used,) = (m for m in memories if m.dw is not None)
            strip = used.strip * -(-size[0] // 64) * 64 * dtype.itemsize + 128
            first = -(-used.plan.first // 64) * 64 * dtype.itemsize
            for name, grad in zip(("hidden", "weight", "bias"), grads, strict=True):
                more = grad.untyped_storage().nbytes() - grad.nbytes
                widest = name != "weight" or first > size[1] * used.dw.itemsize
                wide += name == "weight" and widest
                assert more == 0 if widest else more <= strip, (
                    f"{name} of {grad.nbytes} bytes holds {more} more"
                )
    assert wide or size[0] * dtype.itemsize <= size[1] * used.dw.itemsize


@LOSS
@pytest.mark.parametrize("dtype", [F32, B16] if DEVICE == "cuda" else [F32], ids=str)
@pytest.mark.thorough
def test_in_two_parts_as_in_one(loss, dtype, memories, monkeypatch):
    """A first pass that is wider than dW against passes that are not: the same numbers, up to the
    order of sums."""
    tokens, V = 70 if dtype == F32 else 140, 2500  # more classes than a strip of the statistics
    tensors = make_tensors(tokens, 64, V)[0]
    found = []
    for memory in 10**8, 0:
        given = cast(tensors, dtype)
        again = loss is log_probs  # whose last backward would find its logits kept
        loss(**given, memory=memory, accum_dtype=F32, drop_ignored=False).backward(
            retain_graph=again
        )
        found.append([given[k].grad.double() for k in ("hidden", "weight", "bias")])
    one, several = (m.split for m in memories if m.dw is not None)
    assert 0 < one < V and several == 0
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(
            a, b, rtol=0, atol=float(b.abs().max()) * (2e-6 if dtype == F32 else 2e-2)
        )


@pytest.mark.parametrize("split", [1, 5, 12])
def test_classes_in_two_parts(split):
    """Read and written wherever they are; what is not among them stays."""
    torch.manual_seed(0)
    x, classes = torch.randn(20, 13), torch.randint(13, (20, 4))
    values = torch.randn(20, 13).gather(1, classes)  # one value for a class that stands there twice
    pair = x[:, :split].clone(), x[:, split:].clone()
    assert torch.equal(_gather_logits(pair, classes), _gather_logits(x, classes))
    _scatter_logits(pair, classes, values)
    _scatter_logits(x, classes, values)
    assert torch.equal(torch.cat(pair, 1), x)


def added(x, *terms):
    """x (n,) and the terms, by `add_kernel`; what is not the last sum is fine."""
    scales, grid = x.new_empty(4, dtype=F32), (-(-x.numel() // chunks.ADD_BLOCK),)
    for k, y in enumerate(terms):
        fine = dict(WAS_FINE=k > 0, FINE=k < len(terms) - 1, BLOCK=chunks.ADD_BLOCK)
        chunks.add_kernel[grid](x, x.view(F16), scales, y, x.numel(), **fine)
    return x


def test_a_sum_is_fine_until_the_last_term():
    """Wherever in fp32 its terms are: a sum that is rounded once, or an eighth of that more
    often."""
    torch.manual_seed(0)
    n, grow = (
        2 * chunks.ADD_BLOCK + 700,
        torch.logspace(-30, 30, 3, device=DEVICE).repeat_interleave(chunks.ADD_BLOCK),
    )
    terms = [torch.randn(n, device=DEVICE) * grow[:n] for _ in range(4)]
    first = terms[0].to(B16)
    exact = first.double() + sum(y.double() for y in terms[1:])
    once = added(first.clone(), sum(terms[1:]))
    often = added(first.clone(), *terms[1:])
    for part, expected, least in zip(
        *(x.split(chunks.ADD_BLOCK) for x in (often, exact, once)), strict=True
    ):
        assert (part.double() - expected).norm() <= 1.05 * (least.double() - expected).norm()


def test_a_fine_sum_of_anything():
    """Zeros, the smallest numbers, the largest, and what is not finite."""
    x, y = (
        torch.zeros(chunks.ADD_BLOCK, device=DEVICE, dtype=B16),
        torch.zeros(chunks.ADD_BLOCK, device=DEVICE),
    )
    assert not added(x.clone(), y, y, y).any()
    y[:2] = 1e-44
    assert added(x.clone(), y, y).float().abs().max() <= 1e-40
    y[:5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 3e38])
    actual = added(x.clone(), y, torch.zeros_like(y)).float()
    assert (
        actual[0] == torch.inf
        and actual[1] == -torch.inf
        and actual[2].isnan()
        and actual[4] > 2.9e38
        and not actual[5:].any()
    )


def test_a_fine_sum_has_three_more_digits():
    """256 + 1 + 1 is 258 in bf16, but 256 if 257 is rounded to it."""
    x, y = torch.full((5000,), 256.0, device=DEVICE, dtype=B16), torch.ones(5000, device=DEVICE)
    assert (added(x, y, y) == 258).all()


def test_a_fine_sum_of_numbers_far_apart():
    """As exact as fp16 as long as they are not 2²⁸ times smaller than the largest that is added
    beside them."""
    y = (1 + 2**-10) * 2.0 ** -torch.arange(60, device=DEVICE)
    for factor in (1.0, 2.0**-60, 2.0**100):
        fine, scale = torch.zeros(60, device=DEVICE, dtype=F16), torch.empty(1, device=DEVICE)
        chunks.add_kernel[(1,)](
            fine.view(B16),
            fine,
            scale,
            y * factor,
            60,
            WAS_FINE=False,
            FINE=True,
            BLOCK=chunks.ADD_BLOCK,
        )
        actual = fine.double() * scale.double() / factor
        assert (
            torch.equal(actual[:29], y[:29].double())
            and (actual - y.double()).abs().max() <= 2**-39
        )


SHAPES = (
    (8192, 2304, 256000),
    (8192, 4096, 128256),
    (16384, 3584, 152064),
    (4096, 2048, 128256),
    (3000, 100, 5003),
)
NARROW = (1024, 2048, 128256), (300, 2304, 256000), (2048, 2048, 128256), (40, 100, 5003)  # than dW


def products(monkeypatch, chosen, size, dtype):
    """The memory of a head, and the classes of each product that makes its dW, of the first chunk's
    logits.

    By addresses alone: no product overwrites logits that it reads, or that have not been read.
    """
    M, H, V = size
    memory = chunks.HeadBuffers(torch.empty(M, H, device="meta"), V, dtype, chosen, True)
    parts, done, needed = memory.logits_parts(M, is_first=True), [], torch.ones(V, dtype=torch.bool)

    def product(out, x, h, add=False):
        start, end = out.storage_offset(), out.storage_offset() + out.numel()
        for part, logits in zip(parts, needed.split([len(part) for part in parts]), strict=True):
            if logits.any() and part.untyped_storage()._cdata == out.untyped_storage()._cdata:
                first, *_, last = logits.nonzero()[[0, -1], 0].tolist()
                before, behind = (
                    part.storage_offset() + c * part.stride(0) for c in (first, last + 1)
                )
                assert end <= before or behind <= start, "logits are still needed"
        done.append((start // H, end // H))
        needed[slice(*done[-1])] = False

    monkeypatch.setattr(chunks, "add_product", product)
    memory.add_to_dw(parts, torch.empty(M, H, device="meta"), is_first=True)
    assert (
        all(a[1] == b[0] for a, b in itertools.pairwise(sorted(done)))
        and min(done)[0] == 0
        and max(done)[1] == V
    )
    return memory, done


@pytest.mark.parametrize("size", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
def test_strips_never_overwrite_what_is_still_needed(monkeypatch, size, dtype):
    M, H, V = size
    chosen = planning.plan(M, H, V, dtype, dtype, memory=2**60)
    memory, _ = products(monkeypatch, chosen, size, dtype)
    first, second = memory.logits_parts(M, is_first=True)
    assert first.shape[0] + second.shape[0] == V and second.storage_offset() == 0
    assert memory.dw_buffer.nbytes == V * H * dtype.itemsize  # dW and nothing else
    assert (
        memory.dw_buffer.nbytes + memory.logits_buffer.nbytes
        <= (V * -(-M // 64) * 64 + chosen.strip * H + M) * dtype.itemsize
    )


@pytest.mark.parametrize("size", NARROW, ids=str)
def test_fewer_tokens_need_fewer_strips(monkeypatch, size):
    """And no more memory: what a strip has read is room for the next one."""
    (M, H, V), (memory, strips) = (
        size,
        products(monkeypatch, planning.plan(*size, B16, B16), size, B16),
    )
    assert memory.dw_buffer.nbytes <= 2 * (V * H + memory.strip * -(-M // 64) * 64 + 64)
    assert len(strips) <= -(-V // memory.strip) and (2 * M > H or len(strips) <= 5)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU's allocator")
def test_accumulated_micro_batches_hold_one_gradient():
    """Memory after a backward is the gradients', and the peak of the second micro-batch is not that
    of two buffers."""
    M, H, V = 8192, 1024, 64000
    h, w = (torch.randn(n, H, device="cuda", dtype=B16).mul_(0.02).requires_grad_() for n in (M, V))
    y = torch.randint(V, (M,), device="cuda")
    h.detach()[:64] @ w.detach()[:64].t()  # cuBLAS allocates its workspace once
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        liger_fused_linear_cross_entropy(h, w, y, memory=2**31).backward()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before <= 2 * H * (M + V) + 2**24


def test_accumulated_micro_batches(monkeypatch):
    """Several batches, one step of the optimizer; its peak is in the figures."""
    model, seen = models.build("tiny", "cpu", torch.bfloat16), []
    gradients = model.lm_head.weight.register_hook(lambda g: seen.append(g))
    step, data = train.stepping(model, model), text.batches(16, 2, 2)
    before = model.lm_head.weight.detach().clone()
    monkeypatch.setattr(train, "peak_bytes", lambda device: 10 ** len(seen))
    assert train.peak_of_accumulating(step, data, "cpu") == 10**4
    assert not torch.equal(model.lm_head.weight, before) and model.lm_head.weight.grad is None
    gradients.remove()
