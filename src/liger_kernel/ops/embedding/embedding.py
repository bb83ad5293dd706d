r"""Embedding: rows of a weight, chosen by indices.

    y_m = W[i_m],   0 where i_m is the padding index

    dW_v = Σ dy_m over the m with i_m = v,   0 for the padding index

Backward sorts the indices, so that equal ones are neighbours, in the order of their tokens. One
program sums some columns of all tokens of an index, in fp32, and rounds once: the same sum in every
run, whatever the GPU does first.

An index out of range raises on the CPU. Elsewhere its y is NaN, and it takes no part in dW.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import (
    CASES,
    Case,
    F,
    Function,
    custom_op,
    flatten_rows,
    in_func_transform,
)
from liger_kernel.core.tile import cdiv, next_power_of_2, tl


def embedding_reference(weight, indices, padding_idx=None):
    """Compute `liger_embedding` in plain PyTorch, for a weight of any dtype."""
    y = F.embedding(indices, weight)
    if padding_idx is None:
        return y
    return y.masked_fill((indices == padding_idx)[..., None], 0)


@kernel
def _fwd(
    index_ptr,
    w_ptr,
    y_ptr,
    stride_wv,
    stride_wn,
    M,
    V,
    N,
    padding_idx,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Copy BLOCK_N columns of BLOCK_M tokens' rows of the weight."""
    # m, i (BLOCK_M, 1), n (1, BLOCK_N); w, y (BLOCK_M, BLOCK_N)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    i = tl.load(index_ptr + m, mask=m < M, other=-1).to(tl.int64)
    in_range = (i >= 0) & (i < V)
    mask = in_range & (i != padding_idx) & (n < N)
    w = tl.load(w_ptr + i * stride_wv + n * stride_wn, mask=mask, other=0.0)
    y = tl.where(in_range, w.to(tl.float32), float("nan"))
    tl.store(y_ptr + m * N + n, y.to(y_ptr.dtype.element_ty), mask=(m < M) & (n < N))


@kernel
def _bwd(
    index_ptr,
    order_ptr,
    end_ptr,
    dy_ptr,
    dw_ptr,
    stride_dy,
    V,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum BLOCK_N columns of the dy of all tokens with the same index.

    index_ptr has the sorted indices. Only the program where a run of equal indices begins computes
    anything. An index of V stands for none.
    """
    start = tl.program_id(0)
    i = tl.load(index_ptr + start)
    previous = tl.load(index_ptr + start - 1, mask=start > 0, other=-1)
    if (i == previous) | (i == V):
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    end = tl.load(end_ptr + start).to(tl.int32)
    full_blocks_end = start + (end - start) // BLOCK_M * BLOCK_M
    dw = tl.zeros((1, BLOCK_N), dtype=tl.float32)
    if full_blocks_end > start:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(start, full_blocks_end, BLOCK_M):
            m = tl.load(order_ptr + k + tl.arange(0, BLOCK_M)[:, None])
            total += tl.load(dy_ptr + m * stride_dy + n, mask=n < N, other=0.0).to(tl.float32)
        dw = tl.sum(total, axis=0, keep_dims=True)
    for k in range(full_blocks_end, end):
        dw += tl.load(dy_ptr + tl.load(order_ptr + k) * stride_dy + n, mask=n < N, other=0.0).to(
            tl.float32
        )
    tl.store(dw_ptr + i * N + n, dw.to(dw_ptr.dtype.element_ty), mask=n < N)


def _choose_fwd_launch(N):
    """Return (BLOCK_M, BLOCK_N, num_warps) of the forward kernel."""
    block_n = min(next_power_of_2(N), 2048)
    return 2048 // block_n, block_n, 4


def _choose_bwd_launch(N):
    """Return (BLOCK_M, BLOCK_N, num_warps) of the backward kernel.

    Most rows of the weight have few tokens, which are added one by one. But a padding token may
    have most of them. 16384 tokens, half of them the same, of 128256x4096 in bf16: 1.09 ms, with
    16 or 32 tokens 1.14 and 1.20 (H200, 2026-11-22)."""
    return 8, min(next_power_of_2(N), 256), 8


def _empty_output(weight, indices, padding_idx):
    return weight.new_empty((*indices.shape, weight.shape[1]))


@custom_op("embedding", _empty_output)
def embedding_fwd(weight: torch.Tensor, indices: torch.Tensor, padding_idx: int) -> torch.Tensor:
    """Return y (..., N) of a weight (V, N) of any strides, and contiguous indices of any shape.

    A padding_idx of -1 stands for none."""
    y = _empty_output(weight, indices, padding_idx)
    M = indices.numel()
    V, N = weight.shape
    block_m, block_n, num_warps = _choose_fwd_launch(N)
    _fwd[(cdiv(M, block_m), cdiv(N, block_n))](
        indices,
        weight,
        y,
        *weight.stride(),
        M,
        V,
        N,
        padding_idx,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=devices.limit_warps(num_warps, weight),
    )
    return y


def _empty_gradient(dy, indices, V, padding_idx, dtype):
    return dy.new_empty((V, dy.shape[-1]), dtype=dtype)


@custom_op("embedding_backward", _empty_gradient)
def embedding_bwd(
    dy: torch.Tensor, indices: torch.Tensor, V: int, padding_idx: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return dW (V, N) in ``dtype``, from dy (..., N)."""
    dy = flatten_rows(dy)
    index = indices.reshape(-1).long()
    M, N = dy.shape
    dw = dy.new_zeros((V, N), dtype=dtype)
    has_gradient = (index >= 0) & (index < V) & (index != padding_idx)
    index, order = index.where(has_gradient, V).sort(stable=True)
    block_m, block_n, num_warps = _choose_bwd_launch(N)
    _bwd[(M, cdiv(N, block_n))](
        index,
        order,
        torch.searchsorted(index, index, right=True),
        dy,
        dw,
        dy.stride(0),
        V,
        N,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=devices.limit_warps(num_warps, dy),
    )
    return dw


class LigerEmbeddingFunction(Function):
    """Autograd Function of `liger_embedding`, with the same arguments.

    ``padding_idx`` is None or an index from 0 on; a negative one is not counted from V."""

    @staticmethod
    def reference(weight, indices, padding_idx=None):
        return embedding_reference(weight, indices, padding_idx)

    @staticmethod
    def forward(ctx, weight, indices, padding_idx=None):
        devices.require_kernels("LigerEmbeddingFunction", weight)
        padding_idx = -1 if padding_idx is None else padding_idx
        indices = indices.contiguous()
        ctx.save_for_backward(indices)
        ctx.options = weight.shape[0], padding_idx
        ctx.dtype = weight.dtype
        return embedding_fwd(weight, indices, padding_idx)

    @classmethod
    def differentiable_backward(cls, ctx, dy):
        (indices,) = ctx.saved_tensors
        V, padding_idx = ctx.options
        # any weight will do, since y is linear in it
        weight = torch.zeros((), dtype=ctx.dtype, device=dy.device).expand(V, dy.shape[-1])
        with torch.enable_grad():
            weight.requires_grad_()
            y = cls.reference(weight, indices.long(), None if padding_idx == -1 else padding_idx)
            (dweight,) = torch.autograd.grad(y, weight, dy, create_graph=True)
            return dweight, None, None

    @staticmethod
    def backward(ctx, dy):
        (indices,) = ctx.saved_tensors
        return embedding_bwd(dy, indices, *ctx.options, ctx.dtype), None, None


def liger_embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Return ``weight[indices]``, with a gradient that is the same in every run.

    It computes `torch.nn.functional.embedding`.

    Args:
        weight: (V, N), fp32, bf16 or fp16, any strides.
        indices: integers from 0 to V-1, of any shape.
        padding_idx: an index whose result is 0, and which gives the weight no gradient. A negative
            one counts from V.

    Returns:
        (..., N) in the weight's dtype. The weight's gradient is added up in fp32 and rounded once.

    Raises:
        IndexError: an index is out of range, on the CPU. On a GPU its result is NaN.
        ValueError, TypeError: another argument that does not fit.
    """
    name = "liger_embedding"
    check.floats(name, dict(weight=weight))
    check.integers(name, dict(indices=indices))
    if weight.dim() != 2:
        raise ValueError(f"{name}: weight has shape {tuple(weight.shape)}, give (V, N)")
    if indices.device != weight.device:
        raise ValueError(
            f"{name}: weight is on {weight.device}, indices on {indices.device}, give one device"
        )
    padding_idx = _check_padding_idx(name, padding_idx, weight.shape[0])
    if not devices.has_kernels(weight) or in_func_transform():
        return embedding_reference(weight, indices.long(), padding_idx)
    if indices.device.type == "cpu" and not torch.compiler.is_compiling():
        if ((indices < 0) | (indices >= weight.shape[0])).any():
            raise IndexError(
                f"{name}: an index is out of range, give those from 0 to {weight.shape[0] - 1}"
            )
    return LigerEmbeddingFunction.apply(weight, indices, padding_idx)


def _check_padding_idx(name, padding_idx, V):
    """Return padding_idx counted from 0, or None."""
    if padding_idx is None:
        return None
    if not -V <= check.integer(name, "padding_idx", padding_idx) < V:
        raise ValueError(f"{name}: padding_idx is {padding_idx}, give one of {V} rows")
    return int(padding_idx) % V


class LigerEmbedding(torch.nn.Module):
    """`liger_embedding` as a module.

    The weight is drawn from N(0, 1), and the padding index's row is 0."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = _check_padding_idx(type(self).__name__, padding_idx, num_embeddings)
        self.weight = torch.nn.Parameter(torch.empty(num_embeddings, embedding_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def forward(self, indices: torch.Tensor):
        return liger_embedding(self.weight, indices, self.padding_idx)

    def extra_repr(self):
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


def _traffic(t):
    weight = t["weight"]
    V, N = weight.shape
    M = t["indices"].numel()
    row_bytes = N * weight.element_size()
    return 2 * M * row_bytes, (M + V) * row_bytes


CASES.append(
    Case(
        "embedding",
        fn=liger_embedding,
        reference=embedding_reference,
        inputs=lambda M, N, V: dict(
            weight=torch.randn(V, N).requires_grad_(),
            indices=torch.randint(V, (M,)).where(torch.arange(M) % 2 == 0, 1),
        ),
        shapes=((1, 8, 4), (70, 24, 5), (7, 300, 40)),
        options=(dict(), dict(padding_idx=1)),
        bench=((16384, 4096, 128256),),
        traffic=_traffic,
    )
)
