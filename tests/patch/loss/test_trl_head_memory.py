"""The memory of our head in the place of TRL's: never more than TRL's own."""

import pytest
import torch

from liger_kernel.core import devices
from liger_kernel.ops.head import planning
from liger_kernel.ops.head.chunks import HeadBuffers, plan_for
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


def trl_bytes(N, H, V):
    """TRL's beyond dh and dW: fp32 gradients, which are copied at the end, and a tile of logits."""
    return 4 * N * H + 4 * V * H + 2 * min(N, 4096) * 32768


def test_trl_still_has_these_tiles():
    kernels = pytest.importorskip("trl.kernels.chunked_logprob")
    utils = pytest.importorskip("trl.trainer.utils")
    assert kernels.TOKEN_CHUNK_SIZE == trl_head.TILE_TOKENS
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == trl_head.TILE_CLASSES


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_more_than_trl(shape):
    """As the buffers are made, of the memory that the call gives them."""
    call = head_call(*shape)
    N, H, V = shape
    memory = trl_head.memory_for(call)
    plan = plan_for(call.hidden, call.weight, B16, None, memory, True)
    buffers = HeadBuffers(call.hidden, V, B16, plan, True)
    # a chunk has `MIN_CHUNK_TOKENS` tokens, or all
    least = 2 * V * H + 2 * V * min(planning.MIN_CHUNK_TOKENS, -(-N // 64) * 64)
    assert buffers.nbytes(B16) <= max(2 * V * H + trl_bytes(*shape), least)


def test_auto_where_it_takes_less():
    for shape in SHAPES[:3]:
        assert trl_head.memory_for(head_call(*shape)) == -1
    plan = planning.plan(16384, *GEMMA, B16, B16)
    assert plan.rows * GEMMA[1] * 2 > 1.8e9  # "auto", for gemma-3-1b: what would be too much
    call = head_call(16384, *GEMMA)
    memory = trl_head.memory_for(call)
    plan = plan_for(call.hidden, call.weight, B16, None, memory, True)
    assert plan.accum_dtype == F32 and 1024 <= plan.rows <= 2048


def logits_bytes(call):
    """The logits of a chunk of a head whose weight needs no gradient."""
    N, H = call.hidden.shape
    V = len(call.weight)
    plan = planning.plan(N, H, V, B16, B16, memory=trl_head.memory_for(call), need_w=False)
    return min(plan.rows, N) * V * 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_of_a_frozen_head_and_without_gradients(shape):
    """A tile of TRL's, beside dh in fp32 where there is one; or `MIN_CHUNK_TOKENS` tokens."""
    N, H, V = shape
    tile = 2 * min(N, 4096) * 32768
    least = 2 * V * planning.MIN_CHUNK_TOKENS
    assert logits_bytes(head_call(*shape, frozen=True)) <= max(tile + 4 * N * H, least)
    with torch.no_grad():
        assert logits_bytes(head_call(*shape)) <= max(tile, least)


def test_the_users_budget_wins(monkeypatch):
    monkeypatch.setenv(planning.MEMORY_VARIABLE, "123456789")
    assert trl_head.memory_for(head_call(16384, *GEMMA)) == 123456789
    with torch.no_grad():
        assert trl_head.memory_for(head_call(16384, *GEMMA)) == 123456789


def test_of_fp32_weights():
    """In autocast our head copies the weight, and chunks stay worth having."""
    call = head_call(16384, *GEMMA, weight_dtype=F32)
    memory = trl_head.memory_for(call)
    assert memory == planning.FREE_BYTES
    assert plan_for(call.hidden, call.weight, B16, None, memory, True).rows >= 512
