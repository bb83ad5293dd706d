"""The dense weight of bitsandbytes' weight in 4 bits (nf4 or fp4).

    weight[i] = code[q[i]]·absmax[i // blocksize]

A byte holds two q, the first one in its high half. absmax may be quantised, too ("nested"):

    absmax[k] = code2[q2[k]]·absmax2[k // blocksize2] + offset

All but q and q2 is fp32, and so is the arithmetic. Each operation is rounded, so the weight is bit
for bit what bitsandbytes makes of it. That launches a kernel for code2·absmax2, one for the sum and
one for the weight; this launches one.

Sources: QLoRA, arXiv:2305.14314; bitsandbytes.
"""

from __future__ import annotations

import math

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import LaunchCache, kernel, prepare_launch
from liger_kernel.core.op import cast_if_needed
from liger_kernel.core.tile import cdiv, tl

DTYPES = torch.bfloat16, torch.float16, torch.float32


@kernel
def _dequantize(
    weight_ptr,
    absmax_ptr,
    code_ptr,
    code2_ptr,
    absmax2_ptr,
    offset_ptr,
    y_ptr,
    num_bytes,
    N,
    BLOCKSIZE: tl.constexpr,
    BLOCKSIZE2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Make ROWS·COLUMNS of the N entries of y.

    They are consecutive, whatever y's shape. A row of them is what a thread stores at once; its
    entries have one absmax."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
    pairs = tl.load(weight_ptr + at, mask=at < num_bytes, other=0).to(tl.int32)
    block = rows // (BLOCKSIZE // COLUMNS)
    has_entries = rows * COLUMNS < N
    absmax = tl.load(absmax_ptr + block, mask=has_entries, other=0)
    if code2_ptr is not None:
        absmax2 = tl.load(absmax2_ptr + block // BLOCKSIZE2, mask=has_entries, other=0.0)
        absmax = tl.load(code2_ptr + absmax.to(tl.int32)) * absmax2 + tl.load(offset_ptr)
    q = tl.interleave(pairs >> 4, pairs & 15)
    y = tl.load(code_ptr + q) * absmax[:, None]
    at = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < N)


# Measured on an H200, 2026-11-25, nf4, nested, 14336x4096 to bf16: 43 µs, as with 2 warps and 128
# rows, or 8 and 512; 75 µs with a row for each thread; bitsandbytes takes 78. The host takes 18 µs
# for a call, and 58 for bitsandbytes'.
ROWS = 256  # of a program
ROW_BYTES = 16  # the most that a thread stores at once
NUM_WARPS = 4


def dequantize_4bit(weight, quant_state, dtype) -> torch.Tensor | None:
    """Return the dense weight, contiguous, or None where bitsandbytes has to make it.

    Like bitsandbytes', it is rounded to the dtype of the weight that was quantised, and then to
    ``dtype``.

    Args:
        weight: packed, of any shape and dtype.
        quant_state: bitsandbytes' `QuantState` of it.
        dtype: of the result.
    """
    # of bitsandbytes' subclass of Parameter, each attribute would take a microsecond
    with torch._C.DisableTorchFunctionSubclass():
        if not devices.has_kernels(weight):
            return None
        absmax = quant_state.absmax
        code = quant_state.code
        code2 = absmax2 = dtype2 = blocksize2 = offset = None
        nested = quant_state.state2
        if nested is not None:
            code2 = nested.code
            absmax2 = nested.absmax
            dtype2 = nested.dtype
            blocksize2 = nested.blocksize
            offset = quant_state.offset
            if not isinstance(offset, torch.Tensor):
                return None
        tensors = weight, absmax, code, code2, absmax2, offset
        key = (
            tuple(quant_state.shape),
            dtype,
            quant_state.dtype,
            quant_state.quant_type,
            quant_state.blocksize,
            blocksize2,
            dtype2,
            *[_describe(t) for t in tensors],
        )
        prepared = _launches.get(key) or _launches.store(key, _prepare(weight, *key))
        output_dtype, launch = prepared
        if launch is None:
            return None
        if weight.dtype is not torch.uint8:
            weight = weight.view(torch.uint8)
        y = absmax.new_empty(quant_state.shape, dtype=output_dtype)
        launch(weight, absmax, code, code2, absmax2, offset, y)
        return cast_if_needed(y, dtype)


_launches = LaunchCache()


def _describe(tensor):
    """Return (dtype, number of entries, device) of a contiguous tensor, and None of another."""
    if tensor is None or not tensor.is_contiguous():
        return None
    return tensor.dtype, tensor.numel(), tensor.get_device()


def _prepare(weight, shape, dtype, output_dtype, quant_type, blocksize, blocksize2, dtype2, *sizes):
    """Return the dtype of what the kernel writes, and the launch, or None in its place.

    The arguments are the key in `dequantize_4bit`."""
    if output_dtype == torch.float32:
        output_dtype = dtype
    N = math.prod(shape)
    if output_dtype not in DTYPES:
        return output_dtype, None
    columns = ROW_BYTES // output_dtype.itemsize
    is_known = (
        N > 0
        and quant_type in ("nf4", "fp4")
        and dtype2 in (None, torch.float32)
        and blocksize % columns == 0
        and sizes[0] is not None
        and weight.nbytes == cdiv(N, 2)
        and list(sizes[1:]) == _sizes(N, blocksize, blocksize2, weight.get_device())
    )
    if not is_known:
        return output_dtype, None
    launch = prepare_launch(
        _dequantize,
        (cdiv(N, ROWS * columns),),
        cdiv(N, 2),
        N,
        BLOCKSIZE=blocksize,
        BLOCKSIZE2=blocksize2,
        ROWS=ROWS,
        COLUMNS=columns,
        num_warps=NUM_WARPS,
        # fused with the sum, code2·absmax2 would not be rounded
        enable_fp_fusion=False,
    )
    return output_dtype, launch


def _sizes(N, blocksize, blocksize2, device):
    """Return (dtype, number of entries, device) of absmax, code, code2, absmax2 and offset."""
    blocks = cdiv(N, blocksize)
    code = torch.float32, 16, device
    if blocksize2 is None:
        return [(torch.float32, blocks, device), code, None, None, None]
    blocks2 = cdiv(blocks, blocksize2)
    return [
        (torch.uint8, blocks, device),
        code,
        (torch.float32, 256, device),
        (torch.float32, blocks2, device),
        (torch.float32, 1, device),
    ]
