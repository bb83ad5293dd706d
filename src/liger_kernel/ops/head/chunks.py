r"""A linear head a chunk of tokens at a time: its logits are never all in memory.

    X = h·Wᵀ + b,   per token: loss, log-sum-exp, entropy, ...   (`logits`: softcap, class weights, smoothing, ...)
    dh = dX·W,   dW = dXᵀ·h,   db = Σ_tokens dX

The logits live in the memory of dW. One matmul writes them as a matrix (V, T): the tokens are
contiguous. One kernel reads them for the loss, and a second one overwrites them with their
gradient. Then dW is made in strips of classes. Each strip is written over the gradients of the
strips before it, which nobody needs any more:

    | ░ D₁ D₂ D₃ D₄ |  →  | dW₁ ░ D₂ D₃ D₄ |  →  | dW₁ dW₂ ░ D₃ D₄ |  →  ...           ░ room for one strip

So a chunk may have as many tokens as the head has hidden channels without any memory beyond the
gradients, and its dW is one matmul, rounded once. More tokens need a wider matrix, or further
chunks, each of which adds to dW: see `planning.plan`. Logits are rounded to the compute dtype, as
Hugging Face's head rounds them.

The gradients of a scalar loss are computed in forward: three matmuls in all, and in eager mode the
weight may be gone in backward (ZeRO-3). Backward only multiplies them by the incoming gradient
(`forward_gradients`). If each token has an incoming gradient of its own, backward makes the logits
again."""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import F
from liger_kernel.core.parallel import summed
from liger_kernel.core.tile import cdiv, tl
from liger_kernel.ops.head import planning
from liger_kernel.ops.head.hopper import Product
from liger_kernel.ops.head.planning import aligned

CONVERTED = (
    2**24
)  # elements that are in another dtype at a time, where a matmul cannot write in out's
ADDED = 4096  # elements of dW that a program of `_add` adds to


def plan_for(h, w, dtype, accum_dtype, memory, need_w, tokens=None, unit=64, few=2):
    """`planning.plan` of this head on this device, for all tokens of h or so many. At least one
    channel is planned."""
    tokens, sizes = h.shape[0] if tokens is None else tokens, (max(h.shape[1], 1), w.shape[0])
    processors = devices.multiprocessors(h)
    return planning.plan(
        tokens, *sizes, dtype, w.dtype, accum_dtype, memory, need_w, processors, unit, few
    )


def empty_gradients(h, w, dtype, accum_dtype, needs):
    """dh, dW and db as `run_chunks` returns them: what the custom ops' fake kernels allocate."""
    of_w = planning.grad_dtype(dtype, w.dtype, accum_dtype) if needs[1] else h.dtype
    return (
        h.new_empty(h.shape if needs[0] else 0),
        w.new_empty(w.shape if needs[1] else 0, dtype=of_w),
        h.new_empty(w.shape[0] if needs[2] else 0, dtype=torch.float32),
    )


def _add_product(out, a, b, add=False):
    """out (+)= a @ b, whatever the dtype of out."""
    if out.dtype == a.dtype:
        out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    elif out.dtype == torch.float32 and devices.multiplies_into_fp32(a):
        into = dict(out_dtype=torch.float32, out=out)
        torch.addmm(out, a, b, **into) if add else torch.mm(a, b, **into)
    else:
        b, some = b.to(out.dtype), max(CONVERTED // max(*b.shape, 1), 1)
        for part, rows in zip(out.split(some), a.split(some), strict=True):
            product = rows.to(out.dtype) @ b
            part.add_(product) if add else part.copy_(product)


@kernel
def _add(
    x_ptr,
    fine_ptr,
    scale_ptr,
    y_ptr,
    N,
    WAS_FINE: tl.constexpr,
    FINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x += y, rounded once.

    Fine is a sum that is not the last one: fp16, which has three bits more than bf16, times a power
    of two for each program. It lies where x does. What is not finite stays so. An element has all
    11 bits down to 2⁻²⁸ of the largest of its program; a smaller one is off by 2⁻³⁹ of that at
    most."""
    program = tl.program_id(0).to(tl.int64)
    i, scale_ptr = program * BLOCK + tl.arange(0, BLOCK), scale_ptr + program + tl.arange(0, 1)
    y = tl.load(y_ptr + i, mask=i < N, other=0.0)
    if WAS_FINE:
        y += tl.load(fine_ptr + i, mask=i < N, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    else:
        y += tl.load(x_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    if FINE:
        size = tl.abs(y)
        largest = tl.max(tl.where(size < float("inf"), size, 0.0), 0, keep_dims=True)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(
            tl.float32, bitcast=True
        )  # 2^k, at most largest
        scale = tl.maximum(power, 2.0**-100) * 2.0**-14  # largest / scale < 2^15, which fp16 holds
        tl.store(scale_ptr, scale)
        tl.store(fine_ptr + i, (y * (1.0 / scale)).to(tl.float16), mask=i < N)
    else:
        tl.store(x_ptr + i, y.to(x_ptr.dtype.element_ty), mask=i < N)


class _Memory:
    """The memory of dW and, while that is not complete, of the first chunk's logits: see the top of
    this file.

    The logits of later chunks lie behind dW; or, with `Plan.separate_logits`, in a buffer of their
    own, which is used again for the finished dW.

    If the first chunk is wider than dW, its logits are in two parts, because the dW that is
    returned must not keep a longer buffer alive. The classes from ``split`` on are in the memory of
    dW. Those before it are in another buffer, where the logits of later chunks go, too. Then the
    last strip of dW is made first:
    | D₃ D₄ D₅ ░ |, D₁ D₂ elsewhere  →  | D₃ D₄ ░ dW₅ |  →  ...
    """

    def __init__(self, h, V, dtype, plan, need_w):
        (M, H), self.V, self.plan = h.shape, V, plan
        later, self.dw, self.split, self.strip = V * aligned(min(plan.rows, M)), None, 0, plan.strip
        if not need_w:
            self.early = self.late = h.new_empty(later, dtype=dtype)
            return
        accum = plan.accum_dtype
        row, stride = (
            cdiv(H * accum.itemsize, dtype.itemsize),
            aligned(plan.first),
        )  # of dW and the logits, in logits
        self.row = max(row, 1)
        sums = 2 * plan.wave * H
        dw = aligned(V * row)
        if stride > row and plan.grad_dtype == accum and not plan.separate_logits:
            self.strip = max(min(plan.strip, V * row // (row + stride)), 1)
            enough = max(V - (V - self.strip) * row // stride, cdiv(self.strip * stride, row))
            self.split, dw = min(enough, V), 0
            self.early = h.new_empty(V * row, dtype=dtype)
            self.late = h.new_empty(max(self.split * stride, sums + later), dtype=dtype)
        else:
            behind = 0 if plan.separate_logits else later
            size = max(V * max(row, stride) + plan.strip * min(row, stride), dw + sums + behind)
            self.early = h.new_empty(aligned(size), dtype=dtype)
            if plan.separate_logits and plan.grad_dtype != accum:  # it becomes the finished dW
                later = max(later, cdiv(V * H * plan.grad_dtype.itemsize, dtype.itemsize))
            self.late = h.new_empty(later, dtype=dtype) if plan.separate_logits else self.early
        self.dw = self.early[: V * row].view(accum)[: V * H].view(V, H)
        self.sums = (
            (self.late if self.split else self.early)[dw : dw + sums]
            .view(torch.float32)
            .view(-1, H)
        )
        self.scales = None  # of dW while it is fine: see `_add`

    def nbytes(self, weight_dtype):
        """The most that is allocated at one time, including the gradient that the weight gets."""
        dw = (
            0
            if self.dw is None or self.dw.dtype == weight_dtype
            else self.dw.numel() * weight_dtype.itemsize
        )
        return self.early.nbytes + max(0 if self.late is self.early else self.late.nbytes, dw)

    def of(self, n, first):
        """Where the logits of n tokens are: (V, n), or the two parts (split, n) and (V - split,
        n)."""
        stride, memory = aligned(n), self.early if first and not self.split else self.late
        classes = self.split if first and self.split else self.V
        x = memory[memory.numel() - classes * stride :].view(classes, stride)[:, :n]
        if classes == self.V:
            return (x,)
        return x, self.early[: (self.V - classes) * stride].view(-1, stride)[:, :n]

    def finished(self):
        """dW in the dtype in which it is returned."""
        self.late = None
        return self.dw.to(self.plan.grad_dtype)

    def _to_sums(self, x, h, last):
        """dW += x @ h, a wave at a time in fp32."""
        wave, (V, H), was_fine = self.plan.wave, self.dw.shape, self.scales is not None
        if not last and not was_fine:
            self.scales = self.sums.new_empty(cdiv(V, wave), cdiv(wave * H, ADDED))
        for k, v in enumerate(range(0, V, wave)):
            part = self.dw[v : v + wave]
            _add_product(self.sums[: len(part)], x[v : v + len(part)], h)
            scales = self.sums if self.scales is None else self.scales[k]
            _add[(cdiv(part.numel(), ADDED),)](
                part,
                part.view(torch.float16),
                scales,
                self.sums,
                part.numel(),
                WAS_FINE=was_fine,
                FINE=not last,
                BLOCK=ADDED,
                num_warps=8,
            )

    def to_dw(self, parts, h, first, last=True):
        """dW (+)= x @ h, written over x if it is the first chunk's.

        What a strip has read is room for the next one, which therefore takes ``strip`` classes or
        more."""
        x, stride = parts[0], parts[0].stride(0)
        start, end = 0, self.V
        if not first and not self.plan.wave:
            _add_product(self.dw, x, h, add=True)
        elif not first:
            self._to_sums(x, h, last)
        elif self.split:
            while end > self.split:
                start = max(
                    min(end - self.strip, cdiv((end - self.split) * stride, self.row)), self.split
                )
                _add_product(self.dw[start:end], parts[1][start - self.split : end - self.split], h)
                end = start
            _add_product(self.dw[:end], x, h)
        else:
            while start < self.V:
                free = (len(self.early) - (self.V - start) * stride) // self.row
                end = min(max(start + self.strip, free), self.V)
                _add_product(self.dw[start:end], x[start:end], h)
                start = end


def padded(n):
    """So many rows for n tokens: matmuls can take twice as long for others, and a CPU's read beyond
    an odd number."""
    return aligned(n, 64 if n >= 512 else 8)


def pad_tokens(part):
    """With rows of zeros."""
    more = padded(part.shape[0]) - part.shape[0]
    return F.pad(part, (0, 0, 0, more)) if more else part


def fill_logits(x, w, b, part, n):
    """Fill x (V, T) with w @ partᵀ + b. Only the first n tokens get the bias: the others are
    padding."""
    if b is None:
        torch.mm(w, part.t(), out=x)
        return
    H = w.shape[
        1
    ]  # the bias is one more channel, which is 1: cuBLAS rounds a product before it adds a bias to it
    part = F.pad(part, (0, 8))
    part[:n, H] = 1
    wide = w.new_zeros(min(w.shape[0], max(2**23 // (H + 8), 64)), H + 8)
    for i in range(0, w.shape[0], len(wide)):
        some = w[i : i + len(wide)]
        wide[: len(some), :H], wide[: len(some), H] = some, b[i : i + len(wide)]
        torch.mm(wide[: len(some)], part.t(), out=x[i : i + len(wide)])


def _to_dh(parts, w, out, rows):
    """out = Σ xᵀ @ w over the parts x (classes, tokens). Two parts are summed in fp32, so many rows
    at a time."""
    if len(parts) == 1:
        return _add_product(out, parts[0].t(), w)
    in_fp32 = parts[0].dtype == torch.float32 or devices.multiplies_into_fp32(parts[0])
    sums = torch.empty_like(out[:rows], dtype=torch.float32)
    for start in range(0, len(out), rows):
        some, v = out[start : start + rows], 0
        total = sums[: len(some)]
        for x in parts:
            of_part = x[:, start : start + rows].t(), w[v : v + len(x)]
            if in_fp32:
                _add_product(total, *of_part, add=v > 0)
            else:  # fp32 copies would be as large as the logits
                product = torch.mm(*of_part)
                total.add_(product) if v else total.copy_(product)
            v += len(x)
        some.copy_(total)


def empty_logits(h, w, dtype):
    """What `logits_of_all` fills."""
    n = padded(h.shape[0])
    return h.new_empty(w.shape[0], aligned(n), dtype=dtype)[:, :n]


def logits_of_all(h, w, dtype):
    """h·Wᵀ of all tokens at once (V, T), more columns than tokens: the others are padding."""
    x = empty_logits(h, w, dtype)
    with devices.without_autocast(h):
        torch.mm(w.to(dtype), pad_tokens(h.to(dtype)).t(), out=x)
    return x


def bytes_of_all(h, w, dtype):
    """What `logits_of_all` takes."""
    return w.shape[0] * aligned(h.shape[0]) * dtype.itemsize


def gradients_of_all(x, h, w, accum_dtype, needs):
    """dh, dW and db of the logits' gradient, which is where `logits_of_all` had put the logits."""
    with devices.without_autocast(h):
        part, found = pad_tokens(h.to(x.dtype)), empty_gradients(h, w, x.dtype, accum_dtype, needs)
        dh, dw, db = found
        if len(part) > len(h):
            x[:, len(h) :] = 0  # of padding: NaN where the weight is infinite
        if needs[0]:
            dh = dh.new_empty(part.shape)
            _to_dh((x,), w.to(x.dtype), dh, len(dh))
            dh = dh if len(part) == len(h) else dh[: len(h)].clone()
        if needs[1]:
            _add_product(dw, x, part)
        if needs[2]:
            torch.sum(x, 1, dtype=torch.float32, out=db)
    return dh, dw, db


def run_chunks(h, w, *args):
    """`_run_chunks`: every matmul in the dtypes of its matrices, even under autocast. No channels
    are one, of zeros."""
    with devices.without_autocast(h):
        if h.shape[1]:
            return _run_chunks(h, w, *args)
        dh, dw, db = _run_chunks(F.pad(h, (0, 1)), F.pad(w, (0, 1)), *args)
        return dh[..., :0], dw[..., :0], db


def _run_chunks(h, w, b, dtype, plan, to_gradient, needs, group=None, chunks=None, multiply=True):
    """Each chunk's logits, ``to_gradient(tokens, x)``, which overwrites them with their gradient,
    and dh, dW, db of it.

    Args:
        b: the bias that the logits are given with. None where ``to_gradient`` adds it, as the
        kernels of `logits` do.
        to_gradient: is given the tokens, a slice or indices, and their logits x (T, V), or a pair
        of the logits of the
            first classes and of the others, of the same strides.
        needs: which of dh, dW, db are wanted.
        chunks: the tokens of each chunk, slices or indices, in place of the plan's own. The first
        has no more tokens
            than the plan's first, and so on. Tokens that are in none have no gradient.
        multiply: if not, no logits are made. ``to_gradient`` is given in their place a
        `hopper.Product` of the hidden
            states, with padding, and the weight. It fills its third argument with the gradient: a
            tuple of one part or
            two, (classes, tokens with padding).

    Returns:
        dh (its sum over the group), dW and db; those that are not wanted have no elements.
    """
    (M, V), (need_h, need_w, need_b) = (h.shape[0], w.shape[0]), needs
    new = h.new_empty if chunks is None else h.new_zeros
    chunks = plan.chunks(M) if chunks is None else chunks
    dh = new(h.shape if need_h else 0, dtype=h.dtype if group is None else torch.float32)
    db = h.new_zeros(V if need_b else 0, dtype=torch.float32)
    w, b = w.to(dtype), None if b is None else b.to(dtype)
    memory = _Memory(h, V, dtype, plan, need_w)
    for k, i in enumerate(chunks):
        part = h[i].to(dtype)
        n = part.shape[0]
        part = pad_tokens(part)
        parts, v, rows = memory.of(part.shape[0], first=k == 0), 0, None
        if multiply:
            for x in parts:
                fill_logits(x, w[v : v + len(x)], None if b is None else b[v : v + len(x)], part, n)
                v += len(x)
            rows = tuple(x[:, :n].t() for x in parts)
            to_gradient(i, rows if len(parts) > 1 else rows[0])
        else:
            to_gradient(i, Product(part, w), parts)
        if len(part) > n:
            for x in parts:
                x[:, n:] = 0  # a bias of -inf, or an infinite weight, made the padding NaN
        if need_h:
            whole = part.shape[0] == n and isinstance(i, slice)
            out = dh[i] if whole else dh.new_empty(part.shape)
            _to_dh(parts, w, out, planning.waves(0, h.shape[1], devices.multiprocessors(h)))
            if not whole:
                dh[i] = out[:n]
        if need_b:
            db.add_(torch.cat([x.sum(1, dtype=torch.float32) for x in parts]))
        if need_w:
            memory.to_dw(parts, part, first=k == 0, last=k == len(chunks) - 1)
    if need_h and group is not None:
        dh = summed(dh, group).to(h.dtype)
    if memory.dw is None:
        return dh, h.new_empty(0), db
    part = parts = rows = x = (
        None  # the last views of the logits: their memory is free for the finished dW
    )
    return dh, memory.finished() if chunks else memory.finished().zero_(), db
