"""Chunks of 64 tokens: where they are, and what all kernels load and compute of them.

For the C = 64 tokens of a chunk of a value head, γ is the sum of g from the chunk's first token on,
and D[t, i] = exp(γ_t - γ_i) for i <= t, else 0. Differences are taken before exp, never exp(-γ)
alone. γ is summed in fixed point, and used as two fp32 numbers: in floating point one large decay,
as at the border of two documents, would cost the digits of all later differences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_kernel.core import devices, tuning
from liger_kernel.core.kernel import kernel
from liger_kernel.core.tile import cdiv, next_power_of_2, scaled_exp, tl, triton

CHUNK = 64  # tokens
C = tl.constexpr(CHUNK)
NORM_EPS = 1e-6  # added to the sum of squares of a query or key
MAX_HEAD_DIM = 256  # entries of a query or key, which a program has as one block
# bytes that a program takes in fp32 for more entries than half of these: two tiles of 64 tokens,
# and 4 KB beside them (`_state_gradients`, Triton 3.6)
SHARED_MEMORY_OF_WIDE_FP32 = 132 * 1024

# the interpreter's products of bf16 are wrong, those of fp32 are not
UPCAST = tl.constexpr(devices.INTERPRETED)


# ---- sizes of a call ----


class Problem(NamedTuple):
    """The sizes of a call, and how its products are computed.

    The kernels' own tensors have heads first, so that the rows of a chunk follow each other.
    """

    B: int
    T: int
    H: int  # heads of queries and keys
    HV: int  # heads of values
    K: int
    V: int
    sequences: int  # of which the caller has states
    chains: int  # sequences, and one more of packed tokens behind the last sequence
    chunks: int  # at most
    dtype: torch.dtype  # of q, k, v
    arch: str

    @property
    def nvidia(self) -> bool:
        return self.arch.startswith("sm_")

    def launch(self, hopper, ampere, cdna, rdna, fp32):
        """Choose a launch by the operands' dtype and the device.

        Where products are of shared memory (Hopper, data-centre Blackwell), tiles can be large.
        Elsewhere, as on an RTX 5090 (sm_120), operands take registers: those launches are the ones
        that spill least, found by compiling for these devices (Triton 3.9), not by running.
        """
        if self.operand_dtype == torch.float32:
            return fp32
        if self.nvidia:
            return hopper if 90 <= int(self.arch[3:]) < 120 else ampere
        return rdna if self.arch.startswith("gfx1") else cdna

    @property
    def operand_dtype(self) -> torch.dtype:
        """The dtype of products' operands, and of states in memory.

        fp16 has no room for the gradients of states at a loss scale of 65536: there it is fp32,
        and tensor cores read tf32, which has all bits of an fp16 number.
        """
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    @property
    def operand(self) -> str:
        """What products' operands are rounded to: see the function `operand`."""
        if self.dtype == torch.bfloat16:
            return "bf16"
        return "tf32" if self.precision == "tf32" else "fp32"

    @property
    def precision(self) -> str:
        """The interpreter has NVIDIA's, whose operands it rounds as well."""
        has_tf32 = self.nvidia or self.arch == "cpu"
        return "tf32" if has_tf32 and self.dtype == torch.float16 else "ieee"

    @property
    def solve_precision(self) -> str:
        """Of the products by which `solve` inverts: three of bf16 where U is rounded to bf16."""
        if self.nvidia and self.dtype == torch.bfloat16:
            return "bf16x3"
        return "tf32x3" if self.nvidia and self.dtype != torch.float32 else "ieee"

    @property
    def table_size(self) -> int:
        """The numbers of a table of packed sequences: see `chunk_table`."""
        return 2 * self.chunks + 3 * self.chains

    @property
    def block_k(self) -> int:
        return max(next_power_of_2(self.K), 16)

    @property
    def constants(self) -> dict:
        """Constants of every kernel."""
        return dict(
            K=self.K,
            BLOCK_K=self.block_k,
            OPERAND=self.operand,
            EXACT=self.dtype == torch.float32,
            PRECISION=self.precision,
        )


def max_head_dim(q) -> int:
    """Return the most entries of a query or key that the kernels take of this dtype, on its device.

    In fp32 it is 128 where shared memory is small, as on an RTX 4090 or an MI300X.
    """
    if q.dtype == torch.float32 and not devices.INTERPRETED:
        if tuning.device_traits(q).shared_memory < SHARED_MEMORY_OF_WIDE_FP32:
            return MAX_HEAD_DIM // 2
    return MAX_HEAD_DIM


def problem_of(q, v, cu_seqlens) -> Problem:
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    sequences = B
    chains = B
    chunks = B * cdiv(T, CHUNK)
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
        chains = sequences + 1
        chunks = T // CHUNK + chains
    return Problem(B, T, H, HV, K, V, sequences, chains, chunks, v.dtype, devices.arch(q))


# ---- helpers of the kernels ----


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def operand(x, OPERAND: tl.constexpr):
    """Round to a product's operands: bf16, fp32, or tf32 as fp32 numbers.

    Tensor cores cut off what tf32 has no bits for. Such errors have one sign and add up: with keys
    alike, the output's error was 6 times that of rounding to nearest.
    """
    if OPERAND == "bf16":
        return x.to(tl.bfloat16)
    elif OPERAND == "tf32" and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)  # the bits of NaN may be 0x7fffffff
    else:
        return x.to(tl.float32)


@triton.jit
def chunk_span(table_ptr, slot, T):
    """Return a chunk's batch entry (int64), first token, and the end of its tokens.

    A table's empty chunk has no tokens.
    """
    if table_ptr is None:
        chunks = tl.cdiv(T, C)
        b = slot // chunks
        start = (slot % chunks) * C
        end = tl.minimum(start + C, T)
    else:
        b = slot * 0
        start = tl.load(table_ptr + 2 * slot)
        end = tl.load(table_ptr + 2 * slot + 1)
    return b.to(tl.int64), start, end


@triton.jit
def chain_span(table_ptr, n, T, chunks):
    """Return a sequence's batch entry (int64), first token, end, and first chunk."""
    if table_ptr is None:
        b = n
        start = n * 0
        end = start + T
        first = n * tl.cdiv(T, C)
    else:
        b = n * 0
        start = tl.load(table_ptr + 2 * chunks + 3 * n)
        end = tl.load(table_ptr + 2 * chunks + 3 * n + 1)
        first = tl.load(table_ptr + 2 * chunks + 3 * n + 2)
    return b.to(tl.int64), start, end, first


@triton.jit
def load_rows(x_ptr, stride, rows, num_rows, columns, N: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of a matrix of N columns, which is read in blocks; 0 from ``num_rows`` on."""
    mask = (rows < num_rows)[:, None]
    if N % BLOCK != 0:
        mask = mask & (columns < N)[None, :]
    return tl.load(
        x_ptr + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=mask, other=0.0
    )


@triton.jit
def store_rows(x_ptr, x, stride, rows, num_rows, columns, N: tl.constexpr, BLOCK: tl.constexpr):
    mask = (rows < num_rows)[:, None]
    if N % BLOCK != 0:
        mask = mask & (columns < N)[None, :]
    pointers = x_ptr + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(pointers, x.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_state(s_ptr, k, v, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V):
    """Load a block (k, v) of a contiguous state (K, V)."""
    if K % BLOCK_K == 0 and V % BLOCK_V == 0:
        return tl.load(s_ptr + k[:, None] * V + v[None, :])
    else:
        mask = (k < K)[:, None] & (v < V)[None, :]
        return tl.load(s_ptr + k[:, None] * V + v[None, :], mask=mask, other=0.0)


@triton.jit
def store_state(s_ptr, s, k, v, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V):
    pointers = s_ptr + k[:, None] * V + v[None, :]
    s = s.to(s_ptr.dtype.element_ty)
    if K % BLOCK_K == 0 and V % BLOCK_V == 0:
        tl.store(pointers, s)
    else:
        tl.store(pointers, s, mask=(k < K)[:, None] & (v < V)[None, :])


@triton.jit
def gate_rows(gates_ptr, hv, HV, tokens, first):
    """Return pointers of a value head's γ as two numbers, and of β, from a token on."""
    hi_ptr = gates_ptr + hv.to(tl.int64) * tokens + first
    lo_ptr = hi_ptr + tl.cast(HV, tl.int64) * tokens
    return hi_ptr, lo_ptr, lo_ptr + tl.cast(HV, tl.int64) * tokens


@triton.jit
def norm_rows(norms_ptr, h, H, tokens, first):
    """Return pointers of 1 / |q| and 1 / |k| of a head, from a token on."""
    rq_ptr = norms_ptr + h.to(tl.int64) * tokens + first
    return rq_ptr, rq_ptr + tl.cast(H, tl.int64) * tokens


@triton.jit
def load_gates(hi_ptr, lo_ptr, beta_ptr, rows, num_rows):
    """Load γ as two numbers, and β, of a chunk's rows, and γ at its end.

    Rows behind the end have its γ, so no difference is positive, and β = 0.
    """
    last = num_rows - 1
    inside = tl.minimum(rows, last)
    hi = tl.load(hi_ptr + inside)
    lo = tl.load(lo_ptr + inside)
    beta = tl.load(beta_ptr + rows, mask=rows < num_rows, other=0.0)
    return hi, lo, beta, tl.load(hi_ptr + last), tl.load(lo_ptr + last)


@triton.jit
def differences(hi, lo):
    """Return γ_t - γ_i, (t, i)."""
    return (hi[:, None] - hi[None, :]) + (lo[:, None] - lo[None, :])


@triton.jit
def decay_of(x, EXACT: tl.constexpr):
    """Return exp(x) of a difference of γ, within 2 ulp if EXACT.

    Without, it is a power of 2, which is 0 where fp32 has no normal numbers: on NVIDIA that is two
    instructions of a number, and tl.exp is five.
    """
    return scaled_exp(x, EXACT, 1.0)


# ---- the table of packed sequences ----


@kernel
def _chunk_table(cu_ptr, table_ptr, T, N, chunks, BLOCK: tl.constexpr):
    """Write the rows of one sequence. The first begins at 0, whatever its bound says.

    A sequence that would overlap others, which a caller must not give, is cut where the table ends.
    """
    n = tl.program_id(0)
    first = 0
    for begin in range(0, n, BLOCK):
        m = begin + tl.arange(0, BLOCK)
        lengths = _bound(cu_ptr, m + 1, T, m < n) - _bound(cu_ptr, m, T, (m < n) & (m > 0))
        first += tl.sum((tl.maximum(lengths, 0) + C - 1) // C)
    first = tl.minimum(first, chunks)
    start = _bound(cu_ptr, n, T, (n > 0) & (n <= N))
    end = tl.maximum(start, _bound(cu_ptr, n + 1, T, n < N))
    if n == N:
        end = start * 0 + T
    end = tl.minimum(end, start + (chunks - first) * C)
    tl.store(table_ptr + 2 * chunks + 3 * n, start)
    tl.store(table_ptr + 2 * chunks + 3 * n + 1, end)
    tl.store(table_ptr + 2 * chunks + 3 * n + 2, first)
    count = (end - start + C - 1) // C
    slots = count
    if n == N:  # what remains is empty
        slots = chunks - first
    for begin in range(0, slots, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        chunk_start = tl.minimum(start + i * C, end)
        chunk_end = tl.minimum(chunk_start + C, end)
        tl.store(table_ptr + 2 * (first + i), chunk_start, mask=i < slots)
        tl.store(table_ptr + 2 * (first + i) + 1, chunk_end, mask=i < slots)


@triton.jit
def _bound(cu_ptr, n, T, mask):
    bound = tl.load(cu_ptr + n, mask=mask, other=0)
    return tl.minimum(tl.maximum(bound, 0), T).to(tl.int32)


def chunk_table(problem, cu_seqlens) -> torch.Tensor | None:
    """Return where the chunks of packed sequences are, or None if there are no packed sequences.

    It is made on the device: nobody waits for the lengths. It holds (first token, end) of each
    chunk, then (first token, end, first chunk) of each sequence. Tokens behind the last sequence
    are one more.
    """
    if cu_seqlens is None:
        return None
    p = problem
    table = cu_seqlens.new_empty(p.table_size, dtype=torch.int32)
    if p.T:
        _chunk_table[(p.chains,)](
            cu_seqlens.contiguous(), table, p.T, p.sequences, p.chunks, BLOCK=1024, num_warps=4
        )
    return table
