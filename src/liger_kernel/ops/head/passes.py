r"""The passes of a linear head: its logits, never all in memory, and what their gradients give.

    X = h·Wᵀ + b,   per token: loss, log-sum-exp, entropy, ...   (`logits`: softcap, class weights, smoothing, ...)
    dh = dX·W,   dW = dXᵀ·h,   db = Σ_tokens dX

The logits live in the memory of dW. They are made with the tokens contiguous, as a matrix (V, T); one kernel reads
them for the loss, one turns them into their gradient in place, and then a strip of classes at a time becomes a strip of
dW in the memory of the strips before it:

    | ░ D₁ D₂ D₃ D₄ |  →  | dW₁ ░ D₂ D₃ D₄ |  →  | dW₁ dW₂ ░ D₃ D₄ |  →  ...           ░ one strip more

So as many tokens as the head has hidden channels go through in one pass that needs no memory beyond the gradients, and
their dW is one product, rounded once. More tokens need a wider matrix, or further passes, each of which adds to dW: see
`plan`. A scalar loss takes its gradients in forward, three products in all, and the weight may be gone in backward
(ZeRO-3); backward only multiplies them by the incoming gradient. Where each token has incoming gradients of its own,
backward makes the logits again. Logits are rounded to the compute dtype, as Hugging Face's head rounds them.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import F
from liger_kernel.core.parallel import summed
from liger_kernel.core.tile import cdiv, tl
from liger_kernel.ops.head import planning
from liger_kernel.ops.head.planning import aligned


def _add_product(out, a, b, add=False):
    """out (+)= a @ b, whatever the dtype of out."""
    if out.dtype == a.dtype:
        out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    elif out.dtype == torch.float32 and devices.multiplies_into_fp32(a):
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out) if add else torch.mm(
            a, b, out_dtype=torch.float32, out=out
        )
    else:
        product = a.to(out.dtype) @ b.to(out.dtype)
        out.add_(product) if add else out.copy_(product)


@kernel
def _add(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """x += y, rounded once."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + i, mask=i < N, other=0.0)
    tl.store(x_ptr + i, (x + y).to(x_ptr.dtype.element_ty), mask=i < N)


class _Memory:
    """dW and, while it isn't needed whole, the logits of the first pass: see the top of this file.

    Later passes use the memory behind it. Where dW itself is long enough for the first pass they use a separate buffer,
    which is reused for the final dW.

    Where the first pass is wider than dW, what leaves must not hold the rest: dW has memory of its own, and the logits
    of the classes before ``split`` have other memory, where those of later passes come, too. The strips of dW are then
    made from the last to the first: | D₃ D₄ D₅ ░ |, D₁ D₂ elsewhere  →  | D₃ D₄ ░ dW₅ |  →  ...
    """

    def __init__(self, h, V, dtype, plan, need_w):
        (M, H), self.V, self.plan = h.shape, V, plan
        later, self.dw, self.split, self.strip = V * aligned(min(plan.rows, M)), None, 0, plan.strip
        if not need_w:
            self.early = self.late = h.new_empty(later, dtype=dtype)
            return
        accum = plan.accum_dtype
        row, stride = cdiv(H * accum.itemsize, dtype.itemsize), aligned(plan.first)  # of dW and the logits, in logits
        sums = 2 * plan.wave * H
        dw = cdiv(V * row, 64) * 64
        if stride > row and plan.grad_dtype == accum and not plan.separate_logits:
            self.strip = max(min(plan.strip, V * row // (row + stride)), 1)
            enough = max(V - (V - self.strip) * row // stride, cdiv(self.strip * stride, row))
            self.split, dw = min(enough, V), 0
            self.early = h.new_empty(V * row, dtype=dtype)
            self.late = h.new_empty(max(self.split * stride, sums + later), dtype=dtype)
        else:
            behind = 0 if plan.separate_logits else later
            size = max(V * max(row, stride) + plan.strip * min(row, stride), dw + sums + behind)
            self.early = h.new_empty(cdiv(size, 64) * 64, dtype=dtype)
            if plan.separate_logits and plan.grad_dtype != accum:  # then the finished dW takes this memory
                later = max(later, cdiv(V * H * plan.grad_dtype.itemsize, dtype.itemsize))
            self.late = h.new_empty(later, dtype=dtype) if plan.separate_logits else self.early
        self.dw = self.early[: V * row].view(accum)[: V * H].view(V, H)
        self.sums = (self.late if self.split else self.early)[dw : dw + sums].view(torch.float32).view(-1, H)

    def nbytes(self, weight_dtype):
        """At most, the dW included that the weight gets."""
        dw = 0 if self.dw is None or self.dw.dtype == weight_dtype else self.dw.numel() * weight_dtype.itemsize
        return self.early.nbytes + max(0 if self.late is self.early else self.late.nbytes, dw)

    def of(self, n, first):
        """Logits (V, n), at the end; a first pass's (split, n) and (V - split, n), if it is in two parts."""
        stride, memory = aligned(n), self.early if first and not self.split else self.late
        classes = self.split if first and self.split else self.V
        x = memory[memory.numel() - classes * stride :].view(classes, stride)[:, :n]
        if classes == self.V:
            return (x,)
        return x, self.early[: (self.V - classes) * stride].view(-1, stride)[:, :n]

    def finished(self):
        """dW in the dtype in which it leaves."""
        self.late = None
        return self.dw.to(self.plan.grad_dtype)

    def to_dw(self, parts, h, first):
        """dW (+)= x @ h, over x in the first pass."""
        if not first and not self.plan.wave:
            return _add_product(self.dw, parts[0], h, add=True)
        end = self.V
        if len(parts) == 2:
            while end > self.split:
                start = max(end - self.strip, self.split)
                _add_product(self.dw[start:end], parts[1][start - self.split : end - self.split], h)
                end = start
        strip, x = self.strip if first else self.plan.wave, parts[0]
        for v in range(0, end, strip):
            part = self.dw[v : min(v + strip, end)]
            if first:
                _add_product(part, x[v : v + strip], h)
            else:
                _add_product(self.sums[: len(part)], x[v : v + strip], h)
                _add[(cdiv(part.numel(), 4096),)](part, self.sums, part.numel(), BLOCK=4096, num_warps=8)


def pad_tokens(part):
    """With rows of zeros: matmuls are up to twice as slow without, and a CPU's read beyond an odd number of them."""
    n = part.shape[0]
    more = -n % (64 if n >= 512 else 8)
    return F.pad(part, (0, 0, 0, more)) if more else part


def fill_logits(x, w, b, part, n):
    """Fill x (V, T) with w @ partᵀ + b; only the first n tokens have the bias."""
    if b is None:
        torch.mm(w, part.t(), out=x)
        return
    H = w.shape[1]  # the bias is one more feature, which is 1: cuBLAS rounds a product before it adds a matrix to it
    part = F.pad(part, (0, 8))
    part[:n, H] = 1
    wide = w.new_zeros(min(w.shape[0], max(2**23 // (H + 8), 64)), H + 8)
    for i in range(0, w.shape[0], len(wide)):
        some = w[i : i + len(wide)]
        wide[: len(some), :H], wide[: len(some), H] = some, b[i : i + len(wide)]
        torch.mm(wide[: len(some)], part.t(), out=x[i : i + len(wide)])


def _to_dh(parts, w, out, rows):
    """out = Σ over the parts of xᵀ @ w, x (classes, tokens): of several summed in fp32, so many rows at a time."""
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


def run_passes(h, *args):
    """`_run_passes`: every product in the dtypes of its matrices, also under autocast."""
    with devices.without_autocast(h):
        return _run_passes(h, *args)


def _run_passes(h, w, b, dtype, plan, to_gradient, needs, group=None, passes=None):
    """Every pass: logits, ``to_gradient(tokens, x)`` of x (T, V), then what the gradient that it left in x gives.

    x may be a pair of the first classes and the others, of the same strides.

    ``passes``: slices or indices of the tokens in place of the plan's own, of no more tokens than those, the first of
    them the first; what is in none has no gradient.
    -> dh, dW, db, of no elements where not needed. dh is the sum over the group's shards.
    """
    (M, V), (need_h, need_w, need_b) = (h.shape[0], w.shape[0]), needs
    new = h.new_empty if passes is None else h.new_zeros
    passes = plan.passes(M) if passes is None else passes
    dh = new(h.shape if need_h else 0, dtype=h.dtype if group is None else torch.float32)
    db = h.new_zeros(V if need_b else 0, dtype=torch.float32)
    w, b = w.to(dtype), None if b is None else b.to(dtype)
    memory = _Memory(h, V, dtype, plan, need_w)
    for k, i in enumerate(passes):
        part = h[i].to(dtype)
        n = part.shape[0]
        part = pad_tokens(part)
        parts, v = memory.of(part.shape[0], first=k == 0), 0
        for x in parts:
            fill_logits(x, w[v : v + len(x)], None if b is None else b[v : v + len(x)], part, n)
            v += len(x)
        rows = tuple(x[:, :n].t() for x in parts)
        to_gradient(i, rows if len(parts) > 1 else rows[0])
        if b is not None:
            for x in parts:
                x[:, n:] = 0  # a bias of -inf made them NaN
        if need_h:
            whole = part.shape[0] == n and isinstance(i, slice)
            out = dh[i] if whole else dh.new_empty(part.shape)
            _to_dh(parts, w, out, planning.waves(0, h.shape[1], devices.multiprocessors(h)))
            if not whole:
                dh[i] = out[:n]
        if need_b:
            db.add_(torch.cat([x.sum(1, dtype=torch.float32) for x in parts]))
        if need_w:
            memory.to_dw(parts, part, first=k == 0)
    if need_h and group is not None:
        dh = summed(dh, group).to(h.dtype)
    if memory.dw is None:
        return dh, h.new_empty(0), db
    part = parts = rows = x = None
    return dh, memory.finished() if passes else memory.finished().zero_(), db


@kernel
def _scale(x_ptr, g_ptr, y_ptr, N, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr):
    """y = x·g. In place there is nothing to do for g = 1, which only the device can see."""
    g = tl.load(g_ptr).to(tl.float32)
    if IN_PLACE and g == 1.0:
        return
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, step):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + i, (x * g).to(y_ptr.dtype.element_ty), mask=i < N)


def scaled(x, g, dtype, in_place):
    """x·g in ``dtype`` for g of one element: a gradient that forward took. Over x itself if allowed."""
    if x.numel() == 0 or torch.compiler.is_compiling() or not devices.has_kernels(x):
        return (x * g).to(dtype)
    in_place = in_place and x.dtype == dtype
    y = x if in_place else torch.empty_like(x, dtype=dtype)
    programs = min(cdiv(x.numel(), 4096), 8 * devices.multiprocessors(x))
    _scale[(programs,)](x, g, y, x.numel(), BLOCK=4096, IN_PLACE=in_place, num_warps=8)
    return y
