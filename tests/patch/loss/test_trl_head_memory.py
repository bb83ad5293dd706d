"""The memory of our head in the place of TRL's: never more than TRL's own."""

import pytest
import torch
from hardware import DEVICE
from live_bytes import counted_tensors, peak_bytes

from liger_kernel.core import devices
from liger_kernel.ops.head import planning
from liger_kernel.ops.head.chunks import plan_for, planned_bytes
from liger_kernel.ops.head.linear_head import HeadOptions
from liger_kernel.ops.head.logits import TokenOptions
from liger_kernel.ops.head.unit_gradients import GradientHistory, are_worthwhile
from liger_kernel.patch.loss import trl_head
from liger_kernel.patch.loss.trl_head import HeadCall

B16, F32 = torch.bfloat16, torch.float32
GEMMA = 1152, 262144  # hidden channels and classes of gemma-3-1b
SHAPES = (
    (8192, 4096, 128256),
    (8192, 2304, 256000),
    (4096, 2048, 128256),
    (16384, *GEMMA),
    (107520, *GEMMA),
    (16384, 896, 151936),
    (4096, 640, 262144),
    (300, 640, 262144),
    (1, 64, 1000),
)


@pytest.fixture(autouse=True)
def multiprocessors(monkeypatch):
    monkeypatch.delenv(planning.MEMORY_VARIABLE, raising=False)
    monkeypatch.setattr(devices, "multiprocessors", lambda tensor: 132)


def head_call(N, H, V, weight_dtype=B16, frozen=False):
    hidden = torch.empty(N, H, device="meta", dtype=B16).requires_grad_()
    weight = torch.empty(V, H, device="meta", dtype=weight_dtype).requires_grad_(not frozen)
    return HeadCall(hidden, weight, None, None, 1.0, 32768)


def test_trl_still_has_these_tiles():
    kernels = pytest.importorskip("trl.kernels.chunked_logprob")
    utils = pytest.importorskip("trl.trainer.utils")
    assert kernels.TOKEN_CHUNK_SIZE == trl_head.TILE_TOKENS
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == trl_head.TILE_CLASSES


USES = {
    "a sum": dict(outputs=("entropy", "is_top1"), of_sums=True),
    "a sum of weights": dict(outputs=("entropy", "mean_logits", "is_top1")),
    "a frozen head": dict(outputs=("entropy",), frozen=True),
    "scoring": dict(outputs=("log_probs",), trains=False),
}
DTYPES = {
    "bf16": (B16, B16),
    "fp32 in autocast": (F32, F32),
    "a weight in fp32": (B16, F32),
}


def taken_by(compute, shape, dtypes, outputs, frozen=False, trains=True, of_sums=False):
    """Return the most bytes of a forward and a backward, beyond the inputs."""
    N, H, V = shape
    hidden = torch.empty(N, H, device=DEVICE, dtype=dtypes[0]).requires_grad_(trains)
    weight = torch.empty(V, H, device=DEVICE, dtype=dtypes[1])
    weight.requires_grad_(trains and not frozen)
    targets = torch.zeros(N, device=DEVICE, dtype=torch.int64)

    def call():
        in_autocast = torch.autocast(DEVICE, B16, enabled=dtypes[0] == F32)
        with in_autocast, torch.set_grad_enabled(trains):
            log_probs, *_ = compute(
                hidden, weight, None, targets, 1.0, trl_head.TILE_CLASSES, None, 1.0, outputs
            )
        if trains:
            weights = torch.ones(()) if of_sums else torch.empty(N, device=DEVICE)
            (log_probs * weights.to(DEVICE)).sum().backward()

    return peak_bytes(call, hidden, weight, targets)


def taken_by_both(ours, shape, dtypes, use, monkeypatch):
    """Return the most bytes of TRL's head, and of ``ours`` when called with TRL's arguments."""
    kernels = pytest.importorskip("trl.kernels.chunked_logprob")
    if DEVICE == "cpu":  # as on a GPU
        monkeypatch.setattr(kernels, "_use_triton", lambda device: True)
        monkeypatch.setattr(kernels, "_addmm_fp32", lambda total, a, b: None)
    with counted_tensors(monkeypatch):
        return [
            taken_by(compute, shape, DTYPES[dtypes], **USES[use])
            for compute in (kernels.ChunkedLogProbFunction.apply, ours)
        ]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_more_than_trl(shape, dtypes, use, monkeypatch):
    of_sums = USES[use].get("of_sums", False)
    # it is counted with values that are not there
    monkeypatch.setattr(GradientHistory, "record", lambda self, *incoming: of_sums)
    history = GradientHistory(of_sums=True)
    history.one_number = of_sums
    theirs, ours = taken_by_both(
        lambda *args: trl_head.compute(HeadCall(*args), history), shape, dtypes, use, monkeypatch
    )
    N, _, V = shape
    # a chunk has so many tokens whatever the budget
    least = 2 * V * min(planning.MIN_CHUNK_TOKENS, -(-N // 64) * 64)
    tile = 2 * trl_head.TILE_CLASSES * min(N, trl_head.TILE_TOKENS)
    # numbers of each token, and an allocator's rounding
    assert ours <= theirs + max(least - tile, 0) + 2**20


def test_auto_where_it_takes_less():
    for shape in SHAPES[:3]:
        assert trl_head.memory_for(head_call(*shape)) == -1
    plan = planning.plan(16384, *GEMMA, B16, B16)
    assert plan.rows * GEMMA[1] * 2 > 1.8e9  # "auto", for gemma-3-1b: what would be too much
    call = head_call(16384, *GEMMA)
    memory = trl_head.memory_for(call)
    plan = plan_for(call.hidden, call.weight, B16, None, memory, True)
    assert plan.accum_dtype == F32 and 1024 <= plan.rows <= 2048


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_in_a_graph(shape, dtypes, use, monkeypatch):
    """Where nothing is known of earlier steps, nor of the number of tokens."""

    def in_a_graph(*args):
        call = HeadCall(*args)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            memory = trl_head.memory_for(call)
        monkeypatch.setattr(trl_head, "memory_for", lambda call: memory)
        return trl_head.compute(call)

    theirs, ours = taken_by_both(in_a_graph, shape, dtypes, use, monkeypatch)
    assert ours <= theirs + 2**20  # numbers of each token, and an allocator's rounding


@pytest.mark.parametrize("V", [32000, 128256, 151936, 262144])
def test_auto_in_a_graph(V, monkeypatch):
    """By the ratio of classes to channels alone, "auto" is no more than TRL's for many tokens."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    budgets = []
    for H in (512, 1152, 2048, 3072, 4096, 8192):
        call = head_call(trl_head.TILE_TOKENS, H, V)
        budgets.append(trl_head.memory_for(call))
        if budgets[-1] == -1:
            limit = 2 * trl_head.TILE_TOKENS * trl_head.TILE_CLASSES + 4 * V * H
            for N in (4096, 16384, 65536, 2**18):
                hidden = torch.empty(N, H, device="meta", dtype=B16)
                plan = plan_for(hidden, call.weight, B16, None, -1, True)
                taken = planned_bytes(hidden, call.weight, B16, plan)
                assert taken <= limit + 4 * hidden.numel()
    assert -1 in budgets


def test_the_users_budget_wins(monkeypatch):
    monkeypatch.setenv(planning.MEMORY_VARIABLE, "123456789")
    assert trl_head.memory_for(head_call(16384, *GEMMA)) == 123456789
    with torch.no_grad():
        assert trl_head.memory_for(head_call(16384, *GEMMA)) == 123456789


def test_of_fp32_weights():
    """TRL's default, in autocast. The weight is copied in parts where TRL copies parts. Gradients
    are made in forward where chunks are worth that."""
    for shape, in_parts, early in (
        ((16384, *GEMMA), True, False),
        ((8192, 4096, 128256), True, True),
        ((8192, 4096, 32000), False, True),
    ):
        call = head_call(*shape, weight_dtype=F32)
        memory = trl_head.memory_for(call)
        plan = plan_for(call.hidden, call.weight, B16, None, memory, True)
        assert plan.cast_classes == (planning.CAST_CLASSES if in_parts else None)
        options = HeadOptions(TokenOptions(), B16, memory=memory)
        needs = True, True, False
        assert are_worthwhile(call.hidden, call.weight, options, needs) == early
