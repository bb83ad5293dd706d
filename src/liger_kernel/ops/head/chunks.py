r"""A linear head a chunk of tokens at a time: its logits are never all in memory.

    X = h·Wᵀ + b,   per token: loss, log-sum-exp, entropy, ...   (`logits` has the formulas)
    dh = dX·W,   dW = dXᵀ·h,   db = Σ_tokens dX

The logits live in the memory of dW. One matmul writes them as a matrix (V, T): the tokens are
contiguous. One kernel reads them for the loss, and a second one overwrites them with their
gradient. Then dW is made in strips of classes. Each strip is written over the gradients of the
strips before it, which nobody needs any more:

    | ░ D₁ D₂ D₃ D₄ |  →  | dW₁ ░ D₂ D₃ D₄ |  →  | dW₁ dW₂ ░ D₃ D₄ |  →  ...     ░ room for a strip

So a chunk may have as many tokens as the head has hidden channels without any memory beyond the
gradients, and its dW is one matmul, rounded once. More tokens need a wider matrix, or further
chunks, each of which adds to dW: see `planning.plan`. Logits are rounded to the compute dtype, as
Hugging Face's head rounds them.

The gradients of a scalar loss are computed in forward: three matmuls in all, and in eager mode the
weight may be gone in backward (ZeRO-3). Backward only multiplies them by the incoming gradient
(`forward_gradients`). If each token has an incoming gradient of its own, backward makes the logits
again.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import F
from liger_kernel.core.parallel import all_reduce_sum
from liger_kernel.core.tile import cdiv, tl
from liger_kernel.ops.head import planning
from liger_kernel.ops.head.hopper import Product
from liger_kernel.ops.head.planning import align

# elements that are copied to another dtype at a time, where a matmul cannot write in out's dtype
MAX_CONVERTED_ELEMENTS = 2**24
ADD_BLOCK = 4096  # elements of dW that a program of `add_kernel` adds to


def plan_for(
    h, w, dtype, accum_dtype, memory, need_w, tokens=None, unit=64, auto_chunks=2, spare=-1
):
    """Return `planning.plan` of this head on this device, for ``tokens`` tokens or all of h."""
    return planning.plan(
        h.shape[0] if tokens is None else tokens,
        max(h.shape[1], 1),  # at least one channel is planned
        w.shape[0],
        dtype,
        w.dtype,
        accum_dtype,
        memory,
        need_w,
        devices.multiprocessors(h),
        unit,
        auto_chunks,
        spare,
    )


def planned_bytes(h, w, dtype, plan):
    """Return the bytes beyond dh and dW that `run_chunks` takes for dh and dW by this plan.

    Not counted are copies of the weight (`planning.cast_bytes`) and of a chunk of h in another
    dtype.
    """
    buffers = HeadBuffers(h.to("meta"), w.shape[0], dtype, plan, True)
    return buffers.nbytes(w.dtype) - w.numel() * w.dtype.itemsize


def empty_gradients(h, w, dtype, accum_dtype, needs):
    """Return dh, dW and db as `run_chunks` returns them, not filled in.

    The fake kernels of the custom ops allocate this.
    """
    dw_dtype = planning.weight_grad_dtype(dtype, w.dtype, accum_dtype) if needs[1] else h.dtype
    return (
        h.new_empty(h.shape if needs[0] else 0),
        w.new_empty(w.shape if needs[1] else 0, dtype=dw_dtype),
        h.new_empty(w.shape[0] if needs[2] else 0, dtype=torch.float32),
    )


# ---- all chunks, one after the other ----


def run_chunks(h, w, *args, **kwargs):
    """Run `_run_chunks` with every matmul in the dtypes of its matrices, even under autocast.

    A head without channels has one, of zeros.
    """
    with devices.without_autocast(h):
        if h.shape[1]:
            return _run_chunks(h, w, *args, **kwargs)
        dh, dw, db = _run_chunks(F.pad(h, (0, 1)), F.pad(w, (0, 1)), *args, **kwargs)
        return dh[..., :0], dw[..., :0], db


def _run_chunks(
    h,
    w,
    b,
    dtype,
    plan,
    logits_to_gradient,
    needs,
    group=None,
    chunks=None,
    stores_logits=True,
):
    """Compute the logits of each chunk, have their gradient computed, and add up dh, dW and db.

    Args:
        h, w: hidden states (M, H) and weight (V, H).
        b: the bias of the logits. None where ``logits_to_gradient`` adds it, as the kernels of
            `logits` do.
        dtype: of the logits.
        plan: `planning.Plan`.
        logits_to_gradient: ``logits_to_gradient(rows, x)`` overwrites the logits of some tokens
            with their gradient. ``rows`` is a slice or indices. x is (T, V), or a pair of the
            logits of the first classes and of the others, of the same strides.
        needs: which of dh, dW, db are needed.
        group: process group over which dh is summed, or None.
        chunks: the tokens of each chunk, slices or indices, in place of the plan's own. The first
            has no more tokens than the plan's first, and so on. Tokens that are in none have no
            gradient.
        stores_logits: if False, no logits are made. ``logits_to_gradient(rows, product, parts)`` is
            given a `hopper.Product` of the hidden states, with padding, and the weight. It fills
            ``parts`` with the gradient: a tuple of one part or two, (classes, tokens with padding).

    Returns:
        dh (its sum over the group), dW and db. Those that are not needed have no elements.
    """
    M, V = h.shape[0], w.shape[0]
    need_h, need_w, need_b = needs
    allocate = h.new_empty if chunks is None else h.new_zeros
    chunks = plan.chunks(M) if chunks is None else chunks
    dh_dtype = h.dtype if group is None else torch.float32
    dh = allocate(h.shape if need_h else 0, dtype=dh_dtype)
    db = h.new_zeros(V if need_b else 0, dtype=torch.float32)
    weight = CastWeight(w, dtype, plan.cast_classes)
    b = None if b is None else b.to(dtype)
    buffers = HeadBuffers(h, V, dtype, plan, need_w)
    for k, rows in enumerate(chunks):
        is_first = k == 0
        chunk = h[rows].to(dtype)
        num_tokens = chunk.shape[0]
        chunk = pad_tokens(chunk)
        parts = buffers.logits_parts(chunk.shape[0], is_first)
        if stores_logits:
            for x, w_rows, classes in weight.beside(parts):
                compute_logits(x, w_rows, None if b is None else b[classes], chunk, num_tokens)
            x = tuple(part[:, :num_tokens].t() for part in parts)
            logits_to_gradient(rows, x if len(x) > 1 else x[0])
        else:
            logits_to_gradient(rows, Product(chunk, weight.whole()), parts)
        if len(chunk) > num_tokens:
            for part in parts:
                # a bias of -inf, or an infinite weight, made the padding NaN
                part[:, num_tokens:] = 0
        if need_h:
            direct = chunk.shape[0] == num_tokens and isinstance(rows, slice)
            chunk_dh = dh[rows] if direct else dh.new_empty(chunk.shape)
            _compute_dh(parts, weight, chunk_dh)
            if not direct:
                dh[rows] = chunk_dh[:num_tokens]
        if need_b:
            db.add_(torch.cat([part.sum(1, dtype=torch.float32) for part in parts]))
        if need_w:
            buffers.add_to_dw(parts, chunk, is_first, is_last=k == len(chunks) - 1)
    if need_h and group is not None:
        dh = all_reduce_sum(dh, group).to(h.dtype)
    if buffers.dw is None:
        return dh, h.new_empty(0), db
    # these are the last views of the logits: now their memory is free for the finished dW
    chunk = parts = part = x = w_rows = None
    dw = buffers.finish_dw()
    return dh, dw if chunks else dw.zero_(), db


# ---- the logits of a chunk, and dh ----


class CastWeight:
    """A weight (V, H) in another dtype: copied at once, or some ``classes`` of it at a time.

    The parts take turns in the memory of one of them.
    """

    def __init__(self, w, dtype, classes=None):
        self.w = w
        self.buffer = None
        if w.dtype == dtype or classes is None or classes >= len(w):
            self.w = w.to(dtype)
        else:
            self.buffer = w.new_empty(classes, w.shape[1], dtype=dtype)

    def whole(self):
        """Return the copy of all classes, where there is one."""
        if self.buffer is not None:
            raise RuntimeError("this weight is copied a part at a time")
        return self.w

    def beside(self, parts):
        """Yield the rows of each part (classes, tokens), their rows of the weight and their slice
        of the classes."""
        first = 0
        for part in parts:
            step = len(part) if self.buffer is None else len(self.buffer)
            for x in part.split(max(step, 1)):
                classes = slice(first, first + len(x))
                w_rows = self.w[classes]
                if self.buffer is not None:
                    w_rows = self.buffer[: len(x)].copy_(w_rows)
                yield x, w_rows, classes
                first = classes.stop


def padded_tokens(n):
    """Return the number of rows for n tokens.

    Matmuls can take twice as long for others, and a CPU's read beyond an odd number.
    """
    return align(n, 64 if n >= 512 else 8)


def pad_tokens(chunk):
    """Append rows of zeros, up to `padded_tokens`."""
    padding = padded_tokens(chunk.shape[0]) - chunk.shape[0]
    return F.pad(chunk, (0, 0, 0, padding)) if padding else chunk


def compute_logits(x, w, b, chunk, num_tokens):
    """Fill x (V, T) with w @ chunkᵀ + b.

    Only the first ``num_tokens`` tokens get the bias. The others are padding.
    """
    if b is None:
        torch.mm(w, chunk.t(), out=x)
        return
    # the bias is one more channel, which is 1: cuBLAS rounds a product before it adds a bias to it
    H = w.shape[1]
    chunk = F.pad(chunk, (0, 8))
    chunk[:num_tokens, H] = 1
    rows = min(w.shape[0], max(2**23 // (H + 8), 64))
    wide = w.new_zeros(rows, H + 8)
    for start in range(0, w.shape[0], rows):
        w_rows = w[start : start + rows]
        wide_rows = wide[: len(w_rows)]
        wide_rows[:, :H] = w_rows
        wide_rows[:, H] = b[start : start + rows]
        torch.mm(wide_rows, chunk.t(), out=x[start : start + rows])


def _compute_dh(parts, weight, out):
    """Compute out = Σ xᵀ @ w over the parts x (classes, tokens).

    Two parts, and a weight that is copied in parts, are summed in fp32, some rows of out at a time.
    """
    if len(parts) == 1 and weight.buffer is None:
        return add_product(out, parts[0].t(), weight.whole())
    in_parts = weight.buffer is not None
    # the fp32 copies of a large part would take as much as the logits
    in_fp32 = in_parts or parts[0].dtype == torch.float32 or devices.supports_fp32_output(parts[0])
    is_sum = out.dtype == torch.float32
    if in_parts:
        rows = max(len(out), 1) if is_sum else planning.CAST_TOKENS
    else:
        rows = planning.wave_classes(0, out.shape[1], devices.multiprocessors(out))
    sums = out if is_sum else torch.empty_like(out[:rows], dtype=torch.float32)
    for start in range(0, len(out), rows):
        out_rows = out[start : start + rows]
        total = out_rows if is_sum else sums[: len(out_rows)]
        for part, w_rows, classes in weight.beside(parts):
            x = part[:, start : start + rows].t()
            is_first = classes.start == 0
            if in_fp32:
                add_product(total, x, w_rows, add=not is_first)
            else:
                product = torch.mm(x, w_rows)
                total.copy_(product) if is_first else total.add_(product)
        if not is_sum:
            out_rows.copy_(total)


def add_product(out, a, b, add=False):
    """Compute out = a @ b, or out += a @ b with ``add``, whatever the dtype of out."""
    if out.dtype == a.dtype:
        out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    elif out.dtype == torch.float32 and devices.supports_fp32_output(a):
        if add:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        b = b.to(out.dtype)
        rows = max(MAX_CONVERTED_ELEMENTS // max(*b.shape, 1), 1)
        for out_rows, a_rows in zip(out.split(rows), a.split(rows), strict=True):
            product = a_rows.to(out.dtype) @ b
            out_rows.add_(product) if add else out_rows.copy_(product)


# ---- dW, and the memory in which it and the logits are ----


class HeadBuffers:
    """The memory of dW and of the logits: see the top of this file.

    `dw_buffer` is the memory of dW and, before dW is complete, of the first chunk's logits. The
    logits of later chunks lie behind dW in there. With `Plan.separate_logits` they are in
    `logits_buffer` instead, which is used again for the finished dW.

    If the first chunk is wider than dW, its logits are in two parts, because the dW that is
    returned must not keep a longer buffer alive. The classes from ``split`` on are in `dw_buffer`.
    Those before it are in `logits_buffer`, where the logits of later chunks go, too. Then the last
    strip of dW is made first:

    | D₃ D₄ D₅ ░ |, D₁ D₂ elsewhere  →  | D₃ D₄ ░ dW₅ |  →  ...
    """

    def __init__(self, h, V, dtype, plan, need_w):
        M, H = h.shape
        self.V = V
        self.plan = plan
        self.dw = None
        self.split = 0
        self.strip = plan.strip
        later = V * align(min(plan.rows, M))  # elements of a later chunk's logits
        if not need_w:
            self.dw_buffer = self.logits_buffer = h.new_empty(later, dtype=dtype)
            return
        accum = plan.accum_dtype
        row = cdiv(H * accum.itemsize, dtype.itemsize)  # a row of dW, in elements of the logits
        stride = align(plan.first)  # a row of the logits
        self.dw_row = max(row, 1)
        sums = 2 * plan.wave * H
        dw_end = align(V * row)
        if stride > row and plan.grad_dtype == accum and not plan.separate_logits:
            self.strip = max(min(plan.strip, V * row // (row + stride)), 1)
            enough = max(V - (V - self.strip) * row // stride, cdiv(self.strip * stride, row))
            size = max(min(enough, V) * stride, sums + later)
            # where there is room, a multiple of what the divergences' kernels read at a time
            aligned = align(enough)
            self.split = min(aligned if aligned * stride <= size else enough, V)
            self.dw_buffer = h.new_empty(V * row, dtype=dtype)
            self.logits_buffer = h.new_empty(size, dtype=dtype)
            sums_buffer, sums_start = self.logits_buffer, 0
        else:
            behind = 0 if plan.separate_logits else later
            first = V * max(row, stride) + plan.strip * min(row, stride)
            size = max(first, dw_end + sums + behind)
            self.dw_buffer = self.logits_buffer = h.new_empty(align(size), dtype=dtype)
            if plan.separate_logits:
                if plan.grad_dtype != accum:  # this buffer becomes the finished dW
                    finished = cdiv(V * H * plan.grad_dtype.itemsize, dtype.itemsize)
                    later = max(later, finished)
                self.logits_buffer = h.new_empty(later, dtype=dtype)
            sums_buffer, sums_start = self.dw_buffer, dw_end
        self.dw = self.dw_buffer[: V * row].view(accum)[: V * H].view(V, H)
        self.sums = sums_buffer[sums_start : sums_start + sums].view(torch.float32).view(-1, H)
        self.scales = None  # of dW while it is in fp16: see `add_kernel`

    def nbytes(self, weight_dtype):
        """Return the most bytes allocated at one time, including the gradient the weight gets."""
        finished = 0
        if self.dw is not None and self.dw.dtype != weight_dtype:
            finished = self.dw.numel() * weight_dtype.itemsize
        is_shared = self.logits_buffer is self.dw_buffer
        logits = 0 if is_shared else self.logits_buffer.nbytes
        return self.dw_buffer.nbytes + max(logits, finished)

    def logits_parts(self, n, is_first):
        """Return the memory for the logits of n tokens, as a tuple of one part or two.

        One part is (V, n); two are (split, n) and (V - split, n).
        """
        stride = align(n)
        buffer = self.dw_buffer if is_first and not self.split else self.logits_buffer
        classes = self.split if is_first and self.split else self.V
        x = buffer[buffer.numel() - classes * stride :].view(classes, stride)[:, :n]
        if classes == self.V:
            return (x,)
        return x, self.dw_buffer[: (self.V - classes) * stride].view(-1, stride)[:, :n]

    def add_to_dw(self, parts, h, is_first, is_last=True):
        """Add x @ h to dW, for x in one part or two. The first chunk's dW is written over x.

        The memory of what a strip has read is room for the next one, which therefore takes
        ``strip`` classes or more.
        """
        x = parts[0]
        stride = x.stride(0)
        if not is_first and not self.plan.wave:
            add_product(self.dw, x, h, add=True)
        elif not is_first:
            self._add_in_waves(x, h, is_last)
        elif self.split:
            end = self.V
            while end > self.split:
                room = cdiv((end - self.split) * stride, self.dw_row)
                start = max(min(end - self.strip, room), self.split)
                add_product(self.dw[start:end], parts[1][start - self.split : end - self.split], h)
                end = start
            add_product(self.dw[:end], x, h)
        else:
            start = 0
            while start < self.V:
                free = (len(self.dw_buffer) - (self.V - start) * stride) // self.dw_row
                end = min(max(start + self.strip, free), self.V)
                add_product(self.dw[start:end], x[start:end], h)
                start = end

    def _add_in_waves(self, x, h, is_last):
        """Add x @ h to dW, a wave at a time in fp32."""
        wave = self.plan.wave
        V, H = self.dw.shape
        was_fine = self.scales is not None
        if not is_last and not was_fine:
            self.scales = self.sums.new_empty(cdiv(V, wave), cdiv(wave * H, ADD_BLOCK))
        for k, start in enumerate(range(0, V, wave)):
            dw_rows = self.dw[start : start + wave]
            add_product(self.sums[: len(dw_rows)], x[start : start + len(dw_rows)], h)
            add_kernel[(cdiv(dw_rows.numel(), ADD_BLOCK),)](
                dw_rows,
                dw_rows.view(torch.float16),
                self.sums if self.scales is None else self.scales[k],
                self.sums,
                dw_rows.numel(),
                WAS_FINE=was_fine,
                FINE=not is_last,
                BLOCK=ADD_BLOCK,
                num_warps=8,
            )

    def finish_dw(self):
        """Return dW in the dtype in which it is returned."""
        self.logits_buffer = None
        return self.dw.to(self.plan.grad_dtype)


@kernel
def add_kernel(
    x_ptr,
    fine_ptr,
    scale_ptr,
    y_ptr,
    N,
    WAS_FINE: tl.constexpr,
    FINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute x += y, rounded once.

    A sum that is not the last one is stored fine: in fp16, which has three bits more than bf16,
    times a power of two for each program. It lies where x does. What is not finite stays so. An
    element has all 11 bits down to 2⁻²⁸ of the largest of its program; a smaller one is off by 2⁻³⁹
    of that at most.
    """
    program = tl.program_id(0).to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    scale_ptr = scale_ptr + program + tl.arange(0, 1)
    y = tl.load(y_ptr + i, mask=i < N, other=0.0)
    if WAS_FINE:
        y += tl.load(fine_ptr + i, mask=i < N, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    else:
        y += tl.load(x_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    if FINE:
        size = tl.abs(y)
        largest = tl.max(tl.where(size < float("inf"), size, 0.0), 0, keep_dims=True)
        bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
        power = bits.to(tl.float32, bitcast=True)  # 2^k, at most largest
        scale = tl.maximum(power, 2.0**-100) * 2.0**-14  # largest / scale < 2^15, which fp16 holds
        tl.store(scale_ptr, scale)
        tl.store(fine_ptr + i, (y * (1.0 / scale)).to(tl.float16), mask=i < N)
    else:
        tl.store(x_ptr + i, y.to(x_ptr.dtype.element_ty), mask=i < N)


# ---- all logits at once ----


def empty_logits(h, w, dtype):
    """Return the memory that `compute_all_logits` fills."""
    n = padded_tokens(h.shape[0])
    return h.new_empty(w.shape[0], align(n), dtype=dtype)[:, :n]


def compute_all_logits(h, w, dtype):
    """Return h·Wᵀ of all tokens, (V, T). There are more columns than tokens, for padding."""
    x = empty_logits(h, w, dtype)
    with devices.without_autocast(h):
        torch.mm(w.to(dtype), pad_tokens(h.to(dtype)).t(), out=x)
    return x


def all_logits_bytes(h, w, dtype):
    """Return the bytes of `compute_all_logits`."""
    return w.shape[0] * align(h.shape[0]) * dtype.itemsize


def gradients_from_all_logits(dx, h, w, accum_dtype, needs):
    """Return dh, dW and db for the gradient dx of the logits of `compute_all_logits`."""
    with devices.without_autocast(h):
        chunk = pad_tokens(h.to(dx.dtype))
        dh, dw, db = empty_gradients(h, w, dx.dtype, accum_dtype, needs)
        if len(chunk) > len(h):
            dx[:, len(h) :] = 0  # of padding: NaN where the weight is infinite
        if needs[0]:
            dh = dh.new_empty(chunk.shape)
            _compute_dh((dx,), CastWeight(w, dx.dtype), dh)
            dh = dh if len(chunk) == len(h) else dh[: len(h)].clone()
        if needs[1]:
            add_product(dw, dx, chunk)
        if needs[2]:
            torch.sum(dx, 1, dtype=torch.float32, out=db)
    return dh, dw, db
