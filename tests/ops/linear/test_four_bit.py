"""The dense weight of a weight in 4 bits, bit for bit against the formula in PyTorch."""

from dataclasses import dataclass, replace

import pytest
import torch
from cases import PoisonedEmpty
from hardware import DEVICE

from liger_kernel.ops.linear.four_bit import dequantize_4bit

DTYPES = torch.bfloat16, torch.float16, torch.float32
# of one entry, of odd size, of several programs
SHAPES = (1, 1), (3, 171), (64, 96), (37, 71), (2, 5, 128)
CODES = {
    "nf4": torch.linspace(-1, 1, 16).sinh(),
    "fp4": torch.tensor([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4] * 2),
}
CODES["fp4"][8:] *= -1


@dataclass
class State:
    """The attributes of bitsandbytes' `QuantState`."""

    absmax: torch.Tensor
    code: torch.Tensor
    blocksize: int
    dtype: torch.dtype
    shape: torch.Size | None = None
    quant_type: str | None = None
    offset: torch.Tensor | None = None
    state2: "State | None" = None


def randn(n):
    return torch.randn(n).to(DEVICE)


def random_bytes(*shape):
    return torch.randint(256, shape, dtype=torch.uint8).to(DEVICE)


def make_state(shape, dtype, blocksize=64, quant_type="nf4", nested=True, blocksize2=4):
    torch.manual_seed(0)
    blocks = -(-torch.Size(shape).numel() // blocksize)
    state = State(
        absmax=randn(blocks).abs(),
        code=CODES[quant_type].to(DEVICE),
        blocksize=blocksize,
        dtype=dtype,
        shape=torch.Size(shape),
        quant_type=quant_type,
    )
    if nested:
        state.absmax = random_bytes(blocks)
        state.offset = randn(1)[0]
        scales = randn(-(-blocks // blocksize2)).abs()
        state.state2 = State(scales, randn(256), blocksize2, torch.float32)
    return state


def make_weight(shape):
    return random_bytes(-(-torch.Size(shape).numel() // 2), 1)


def block_sizes(state, fused=False):
    """Return absmax of each block; ``fused``: with one rounding of code2·absmax2 + offset."""
    inner = state.state2
    if inner is None:
        return state.absmax
    scales = inner.absmax.repeat_interleave(inner.blocksize)[: state.absmax.numel()]
    code = inner.code[state.absmax.long()]
    if fused:
        return (code.double() * scales.double() + state.offset.double()).float()
    return code * scales + state.offset


def expected_weight(weight, state):
    packed = weight.flatten().view(torch.uint8)
    q = torch.stack([packed >> 4, packed & 15], 1).flatten().long()[: state.shape.numel()]
    scales = block_sizes(state).repeat_interleave(state.blocksize)[: q.numel()]
    return (state.code[q] * scales).view(state.shape)


def assert_same(weight, state, dtype, expected=None):
    with PoisonedEmpty():
        result = dequantize_4bit(weight, state, dtype)
    if expected is None:
        expected = expected_weight(weight, state).to(state.dtype).to(dtype)
    assert result.dtype == dtype and result.shape == state.shape and result.is_contiguous()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocksize", [64, 128, 32, 4096])
@pytest.mark.parametrize("quant_type", CODES)
@pytest.mark.parametrize("nested", [True, False])
def test_is_the_formula(shape, dtype, blocksize, quant_type, nested):
    state = make_state(shape, dtype, blocksize, quant_type, nested)
    assert_same(make_weight(shape), state, dtype)


def test_each_operation_is_rounded():
    state = make_state((64, 96), torch.float32, blocksize=32)
    fused = block_sizes(state, fused=True)
    assert not torch.equal(fused, block_sizes(state))  # which the weight shows
    assert_same(make_weight(state.shape), state, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantised_dtype", DTYPES, ids=str)
def test_another_dtype_than_was_quantised(quantised_dtype, dtype):
    state = make_state((64, 96), quantised_dtype)
    assert_same(make_weight(state.shape), state, dtype)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_other_storage(storage):
    state = make_state((64, 96), torch.bfloat16)
    weight = make_weight(state.shape)
    expected = expected_weight(weight, state).bfloat16()
    stored = weight.view(-1).view(storage).view(-1, 1)
    assert_same(stored, state, torch.bfloat16, expected)
    assert_same(stored.t(), state, torch.bfloat16, expected)


class WeightSubclass(torch.nn.Parameter):
    """As bitsandbytes', it sees every function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_of_parameter():
    state = make_state((64, 96), torch.bfloat16)
    weight = WeightSubclass(make_weight(state.shape), requires_grad=False)
    assert_same(weight, state, torch.bfloat16, expected_weight(weight.data, state).bfloat16())
    assert type(dequantize_4bit(weight, state, torch.float32)) is torch.Tensor


def test_further_weights_of_a_shape():
    """They have one launch, whatever their addresses' alignment."""
    for offset in (0, 1, 0, 4):
        state = make_state((64, 96), torch.bfloat16)
        state.absmax = random_bytes(state.absmax.numel() + offset)[offset:]
        weight = random_bytes(64 * 96 // 2 + offset)[offset:]
        assert_same(weight, state, torch.bfloat16)


OTHER_STATES = {
    "kind": dict(quant_type="int4"),
    "block size": dict(blocksize=12),
    "fewer blocks": dict(blocksize=128),
    "more entries": dict(shape=torch.Size((64, 97))),
    "no entry": dict(shape=torch.Size((0, 96))),
    "fp64": dict(dtype=torch.float64),
    "no offset": dict(offset=None),
    "offsets": dict(offset=torch.zeros(2, device=DEVICE)),
    "code in bf16": dict(code=torch.zeros(16, device=DEVICE, dtype=torch.bfloat16)),
    "longer code": dict(code=torch.zeros(17, device=DEVICE)),
    "absmax in fp16": dict(absmax=torch.zeros(96, device=DEVICE, dtype=torch.float16), state2=None),
    "strided absmax": dict(absmax=torch.zeros(96, 2, device=DEVICE, dtype=torch.uint8)[:, 0]),
}


@pytest.mark.parametrize("name", OTHER_STATES)
def test_other_states_are_left_to_bitsandbytes(name):
    state = make_state((64, 96), torch.bfloat16)
    other = replace(state, **OTHER_STATES[name])
    assert dequantize_4bit(make_weight(state.shape), other, torch.bfloat16) is None


def test_rounded_block_sizes_are_left_to_bitsandbytes():
    state = make_state((64, 96), torch.bfloat16)
    state.state2.dtype = torch.bfloat16
    assert dequantize_4bit(make_weight(state.shape), state, torch.bfloat16) is None


def test_a_strided_weight_is_left_to_bitsandbytes():
    state = make_state((64, 96), torch.bfloat16)
    weight = random_bytes(64 * 96 // 2, 2)[:, :1]
    assert dequantize_4bit(weight, state, torch.bfloat16) is None


@pytest.mark.skipif(DEVICE == "cpu", reason="one device")
@pytest.mark.parametrize("name", ["absmax", "code", "offset"])
def test_a_state_on_another_device_is_left_to_bitsandbytes(name):
    state = make_state((64, 96), torch.bfloat16)
    setattr(state, name, getattr(state, name).cpu())
    assert dequantize_4bit(make_weight(state.shape), state, torch.bfloat16) is None


@pytest.mark.skipif(DEVICE == "cpu", reason="seven gigabytes")
def test_more_than_2_to_the_31_entries():
    shape = 2**31 // 4096 + 3, 4096
    state = make_state(shape, torch.bfloat16, blocksize2=256)
    weight = make_weight(shape)
    result = dequantize_4bit(weight, state, torch.bfloat16)
    rows = 5  # the last ones
    blocks = rows * 4096 // 64
    absmax = block_sizes(state)[-blocks:]
    part = replace(state, shape=torch.Size((rows, 4096)), absmax=absmax, state2=None)
    expected = expected_weight(weight[-rows * 2048 :], part).bfloat16()
    assert torch.equal(result[-rows:], expected)
