r"""Embedding: rows of a weight, chosen by indices.

    y_m = W[i_m],   0 where i_m is the padding index

    dW_v = Σ dy_m over the m with i_m = v,   0 for the padding index

Backward sorts the indices, so that those of one row are neighbours, in the order of their tokens.
One program adds up some columns of all of them, in fp32, and rounds once: the same sum in every
run, whatever the GPU does first.

An index out of range raises on the CPU. Elsewhere its y is NaN, and it takes no part in dW.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, F, Function, custom_op, matrix_rows, transformed
from liger_kernel.core.tile import cdiv, next_power_of_2, tl


def embedding_reference(weight, indices, padding_idx=None):
    y = F.embedding(indices, weight)
    return y if padding_idx is None else y.masked_fill((indices == padding_idx)[..., None], 0)


@kernel
def _fwd(
    i_ptr,
    w_ptr,
    y_ptr,
    stride_v,
    stride_n,
    M,
    V,
    N,
    padding,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_N columns of BLOCK_M tokens."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    i = tl.load(i_ptr + m, mask=m < M, other=-1).to(tl.int64)
    known = (i >= 0) & (i < V)
    w = tl.load(
        w_ptr + i * stride_v + n * stride_n, mask=known & (i != padding) & (n < N), other=0.0
    )
    y = tl.where(known, w.to(tl.float32), float("nan"))
    tl.store(y_ptr + m * N + n, y.to(y_ptr.dtype.element_ty), mask=(m < M) & (n < N))


@kernel
def _bwd(
    i_ptr,
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
    """One program: BLOCK_N columns of the row of weights that the sorted indices have from here on.

    Only where such a run begins. An index of V stands for none.
    """
    start = tl.program_id(0)
    i = tl.load(i_ptr + start)
    before = tl.load(i_ptr + start - 1, mask=start > 0, other=-1)
    if (i == before) | (i == V):
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    end = tl.load(end_ptr + start).to(tl.int32)
    whole = start + (end - start) // BLOCK_M * BLOCK_M
    dw = tl.zeros((1, BLOCK_N), dtype=tl.float32)
    if whole > start:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(start, whole, BLOCK_M):
            m = tl.load(order_ptr + k + tl.arange(0, BLOCK_M)[:, None])
            total += tl.load(dy_ptr + m * stride_dy + n, mask=n < N, other=0.0).to(tl.float32)
        dw = tl.sum(total, axis=0, keep_dims=True)
    for k in range(whole, end):
        dw += tl.load(dy_ptr + tl.load(order_ptr + k) * stride_dy + n, mask=n < N, other=0.0).to(
            tl.float32
        )
    tl.store(dw_ptr + i * N + n, dw.to(dw_ptr.dtype.element_ty), mask=n < N)


def _launch(N):
    """(tokens, columns, warps) of a program of forward."""
    columns = min(next_power_of_2(N), 2048)
    return 2048 // columns, columns, 4


def _launch_bwd(N):
    """(tokens in an iteration, columns, warps) of a program of backward.

    Most rows have few tokens, which are added one by one. But a padding token may have most of
    them. 16384 tokens, half of them the same, of 128256x4096 in bf16: 1.09 ms, with 16 or 32 tokens
    1.14 and 1.20 (H200, 2026-11-22)."""
    return 8, min(next_power_of_2(N), 256), 8


def _output(weight, indices, padding):
    return weight.new_empty((*indices.shape, weight.shape[1]))


@custom_op("embedding", _output)
def embedding_fwd(weight: torch.Tensor, indices: torch.Tensor, padding: int) -> torch.Tensor:
    """weight (V, N) of any strides, indices of any shape, contiguous; padding -1: none -> y."""
    y, M, (V, N) = _output(weight, indices, padding), indices.numel(), weight.shape
    rows, columns, warps = _launch(N)
    _fwd[(cdiv(M, rows), cdiv(N, columns))](
        indices,
        weight,
        y,
        *weight.stride(),
        M,
        V,
        N,
        padding,
        BLOCK_M=rows,
        BLOCK_N=columns,
        num_warps=devices.warps(warps, weight),
    )
    return y


def _gradient(dy, indices, V, padding, dtype):
    return dy.new_empty((V, dy.shape[-1]), dtype=dtype)


@custom_op("embedding_backward", _gradient)
def embedding_bwd(
    dy: torch.Tensor, indices: torch.Tensor, V: int, padding: int, dtype: torch.dtype
) -> torch.Tensor:
    """dy (..., N) -> dW (V, N) in ``dtype``."""
    dy, i = matrix_rows(dy), indices.reshape(-1).long()
    M, N = dy.shape
    dw = dy.new_zeros((V, N), dtype=dtype)
    i, order = i.where((i >= 0) & (i < V) & (i != padding), V).sort(stable=True)
    rows, columns, warps = _launch_bwd(N)
    _bwd[(M, cdiv(N, columns))](
        i,
        order,
        torch.searchsorted(i, i, right=True),
        dy,
        dw,
        dy.stride(0),
        V,
        N,
        BLOCK_M=rows,
        BLOCK_N=columns,
        num_warps=devices.warps(warps, dy),
    )
    return dw


class LigerEmbeddingFunction(Function):
    """``apply(weight (V, N), indices (...), padding_idx=None) -> (..., N)`` in the weight's
    dtype."""

    @staticmethod
    def reference(weight, indices, padding_idx=None):
        return embedding_reference(weight, indices, padding_idx)

    @staticmethod
    def forward(ctx, weight, indices, padding_idx=None):
        devices.require_kernels("LigerEmbeddingFunction", weight)
        padding, indices = -1 if padding_idx is None else padding_idx, indices.contiguous()
        ctx.save_for_backward(indices)
        ctx.options, ctx.dtype = (weight.shape[0], padding), weight.dtype
        return embedding_fwd(weight, indices, padding)

    @classmethod
    def again(cls, ctx, dy):
        (indices,), (V, padding) = ctx.saved_tensors, ctx.options
        weight = torch.zeros((), dtype=ctx.dtype, device=dy.device).expand(
            V, dy.shape[-1]
        )  # any: y is linear in it
        with torch.enable_grad():
            weight.requires_grad_()
            y = cls.reference(weight, indices.long(), None if padding == -1 else padding)
            return *torch.autograd.grad(y, weight, dy, create_graph=True), None, None

    @staticmethod
    def backward(ctx, dy):
        (indices,) = ctx.saved_tensors
        return embedding_bwd(dy, indices, *ctx.options, ctx.dtype), None, None


def liger_embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """``weight[indices]``, as `torch.nn.functional.embedding`, with a gradient that is the same in
    every run.

    Args:
        weight: (V, N), fp32, bf16 or fp16, any strides.
        indices: integers from 0 to V-1, of any shape.
        padding_idx: an index whose result is 0, and which gives the weight no gradient. A negative
        one counts from V.

    Returns:
        (..., N) in the weight's dtype. The weight's gradient is added up in fp32 and rounded once.

    Raises:
        IndexError: an index is out of range, on the CPU. On a GPU its result is NaN.
        ValueError, TypeError: what else doesn't fit.
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
    padding_idx = _row(name, padding_idx, weight.shape[0])
    if not devices.has_kernels(weight) or transformed():
        return embedding_reference(weight, indices.long(), padding_idx)
    if indices.device.type == "cpu" and not torch.compiler.is_compiling():
        if ((indices < 0) | (indices >= weight.shape[0])).any():
            raise IndexError(
                f"{name}: an index is out of range, give those from 0 to {weight.shape[0] - 1}"
            )
    return LigerEmbeddingFunction.apply(weight, indices, padding_idx)


def _row(name, padding_idx, V):
    """-> padding_idx from 0 on, or None."""
    if padding_idx is None:
        return None
    if not -V <= check.integer(name, "padding_idx", padding_idx) < V:
        raise ValueError(f"{name}: padding_idx is {padding_idx}, give one of {V} rows")
    return int(padding_idx) % V


class LigerEmbedding(torch.nn.Module):
    """`liger_embedding` as a module. The weight is drawn from N(0, 1), the padding index's row is
    0."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = _row(type(self).__name__, padding_idx, num_embeddings)
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
        traffic=lambda t: (
            2 * t["indices"].numel() * t["weight"].shape[1] * t["weight"].element_size(),
            (t["indices"].numel() + t["weight"].shape[0])
            * t["weight"].shape[1]
            * t["weight"].element_size(),
        ),
    )
)
