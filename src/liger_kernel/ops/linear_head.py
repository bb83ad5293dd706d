r"""The linear head and what a loss wants to know of its logits, which are never all in memory.

    X = h·Wᵀ + b,   per token: loss, log-sum-exp, entropy, ...   (`_token_loss`: softcap, class weights, smoothing, ...)
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

import contextlib
import os
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from . import _check, _device
from ._kernel import kernel
from ._op import CASES, Case, F, Function, custom_op, rounded
from ._parallel import copy_to_group, group_name, local, place, summed, token_loss_reference_parallel
from ._tile import cdiv, tl
from ._token_loss import normalisers, token_gradient, token_loss
from .cross_entropy import check_options, check_rows, check_targets, labels

ROWS = 2048  # tokens of a pass that keep the matrix units busy
LEAST = 256  # tokens of a pass, whatever the budget
TILE = 128, 256  # of the products that make dW
FREE = 2**29  # bytes that aren't worth a second pass
ROWS_WITHOUT_KERNELS = 256  # tokens of a chunk on the CPU
VARIABLE = "LIGER_KERNEL_HEAD_MEMORY"


# ---- how much at once ----


@dataclass(frozen=True)
class Plan:
    """How M tokens go through: ``first`` of them in one pass, then ``rows`` at a time."""

    first: int
    rows: int
    strip: int  # classes of dW that are made at once
    wave: int  # classes of a second pass, added by way of fp32: cuBLAS's own addition rounds the product, too
    accum_dtype: torch.dtype  # of dW until it is finished
    grad_dtype: torch.dtype  # of the finished one
    beside: bool = False  # whether the logits of later passes have memory of their own, which is free in the end

    def passes(self, M) -> list[slice]:
        starts = [0, *range(self.first or self.rows, M, self.rows or M)] if M else []
        return [slice(*bounds) for bounds in zip(starts, [*starts[1:], M], strict=False)]


def budget(memory) -> int:
    """Bytes, or -1 for "auto", which the environment may replace."""
    name, given = "memory", memory
    if memory == "auto":
        name, given = VARIABLE, os.environ.get(VARIABLE, "auto")
        if given == "auto":
            return -1
        with contextlib.suppress(ValueError, OverflowError):
            memory = int(float(given))
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 0:
        raise ValueError(f"{name} is {given!r}, give a number of bytes or 'auto'")
    return memory


def _up(n):
    """The strides that matmuls like."""
    return cdiv(n, 64) * 64


def _waves(classes, H, processors, waves=1):
    """About so many classes of dW, such that their tiles of 128 × 256 fill the processors so many times or more."""
    across = cdiv(H, TILE[1])
    waves = max(int(classes * across / (TILE[0] * processors)), waves)
    while waves * processors % across > waves * processors // 20:  # idle in the last wave
        waves += 1
    return waves * processors // across * TILE[0]


def _strip(tokens, H, V, row, processors):
    """Classes of dW made at once: 200 µs of work for a large GPU, and 24 MB of room ahead of bf16 logits.

    H200, 2026-11-20, in waves of 132 tiles: 2048·4096·128256 in strips of 2048, 4096, 8192: 8.69, 8.51, 8.36 ms;
    4096·2048·128256: 9.12, 8.92, 8.88; 8192·2304·256000: 46.3, 45.7, 45.9; 8192·4096·128256: no difference.
    """
    tokens = max(tokens, 1)
    return min(_waves(min(7e10 / (H * tokens), 12e6 / min(row, tokens)), H, processors), V)


def plan(M, H, V, dtype, weight_dtype, accum_dtype=None, memory=-1, need_w=True, processors=132, unit=64) -> Plan:
    """The passes of M tokens within ``memory`` bytes beyond the gradients dh and dW (-1: "auto").

    dW in the weight's dtype holds the logits of H tokens (2·H for one of fp32 where the logits have 16 bits), and each
    byte beyond it more of them. One pass rounds dW once, as PyTorch does; a second one reads it, adds and rounds again.
    For more than two dW is accumulated in fp32, unless the budget has no room for it. fp16 can't hold what is not yet
    divided by the number of tokens: always fp32.

    "auto" is one pass if it needs no more than `FREE` bytes, two for up to five times the tokens that dW holds (not for
    16-bit weights whose dW is in fp32 in any case), and passes of 4,096 for more. (Three passes, each rounding dW, take
    less memory for four times as many: 1.33x PyTorch's error, H200, 2026-11-21.) A budget is kept down to passes of
    `LEAST` tokens. A pass has a multiple of ``unit`` tokens, which stay together, whatever the budget.
    """
    token, fewest = V * dtype.itemsize, max(LEAST, unit)
    if not need_w:
        rows = max((ROWS if memory < 0 else memory // token) // unit * unit, fewest)
        return Plan(0, rows, 0, 0, weight_dtype, weight_dtype)
    fixed = torch.float32 if dtype == torch.float16 else accum_dtype
    finished = fixed or weight_dtype

    def held(accum):
        return cdiv(H * accum.itemsize, dtype.itemsize)

    def freed(accum):
        """Tokens whose logits may lie where the finished dW will, which is not the one that is added up."""
        beside = accum.itemsize > weight_dtype.itemsize and unit <= max(held(accum), 64)
        return held(weight_dtype) if beside else 0

    def ahead(accum):
        """Tokens whose logits would fit where dW's strips run ahead of the logits."""
        row = held(accum)
        return cdiv(_strip(min(M, row), H, V, row, processors) * row, V)

    def passes(accum, beyond):
        """With the memory of so many tokens' logits beyond dW; None: of as many as two passes need."""
        row, spare = held(accum), ahead(accum)
        strip = _strip(min(M, row), H, V, row, processors)
        wave = min(_waves(0, H, processors, 2), V) if accum.itemsize == dtype.itemsize == 2 else 0
        sums = cdiv(wave * H * 4, token)
        if beyond is None:
            beyond = cdiv(M - row + spare + sums, 2) + unit

        def whole(tokens):
            return min(M, tokens if unit == 64 else max(tokens // unit * unit, unit))

        first = whole(row + max(beyond - spare, 0) // unit * unit)
        if not freed(accum) and M - first <= max(beyond - sums, 0) // unit * unit:
            return Plan(first, M - first, strip, wave if M > first else 0, accum, finished)
        beside = first < M and freed(accum) > 0
        if beside:
            first, beyond = whole(row), beyond + freed(accum) - spare
        count = cdiv(M - first, max(beyond // unit * unit, fewest))
        rows = cdiv(M - first, unit * count) * unit if count else 0
        return Plan(first, rows, strip, 0, accum, finished, beside and first <= row)

    narrow, wide = fixed or weight_dtype, fixed or torch.promote_types(weight_dtype, torch.float32)
    if memory < 0:
        beyond = M - held(narrow)
        if beyond * token <= FREE:
            return Plan(M, 0, _strip(max(M, 1), H, V, held(narrow), processors), 0, narrow, finished)
        if M <= 5 * held(narrow) and not freed(narrow):
            return passes(narrow, None)
        return passes(wide, max(max(2 * ROWS, unit) - freed(wide), 0) + ahead(wide))

    def within(accum):
        """Tokens whose logits fit the budget beyond dW."""
        tokens = (memory - V * H * (accum.itemsize if accum != weight_dtype else 0)) // token
        if freed(accum) or tokens <= ahead(accum):
            return tokens
        sums = cdiv(min(_waves(0, H, processors), M) * H * 4, token)  # of dX, where logits lie in two parts
        return max(tokens - sums, ahead(accum))

    beyond = {accum: within(accum) for accum in (narrow, wide)}
    least = passes(narrow, beyond[narrow])
    worthwhile = ROWS // 2 if unit == 64 else max(ROWS // 2, unit)  # tokens of a pass beside a dW in fp32
    enough = M <= least.first + least.rows or beyond[wide] < max(ahead(wide), worthwhile - freed(wide))
    return least if enough else passes(wide, beyond[wide])


# ---- the passes ----


def _add_product(out, a, b, add=False):
    """out (+)= a @ b, whatever the dtype of out."""
    if out.dtype == a.dtype:
        out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    elif out.dtype == torch.float32 and _device.multiplies_into_fp32(a):
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

    Those of later passes lie behind it, or in memory that is free again in the end: where dW's own is enough before.

    Where the first pass is wider than dW, what leaves must not hold the rest: dW has memory of its own, and the logits
    of the classes before ``split`` have other memory, where those of later passes come, too. The strips of dW are then
    made from the last to the first: | D₃ D₄ D₅ ░ |, D₁ D₂ elsewhere  →  | D₃ D₄ ░ dW₅ |  →  ...
    """

    def __init__(self, h, V, dtype, plan, need_w):
        (M, H), self.V, self.plan = h.shape, V, plan
        later, self.dw, self.split, self.strip = V * _up(min(plan.rows, M)), None, 0, plan.strip
        if not need_w:
            self.early = self.late = h.new_empty(later, dtype=dtype)
            return
        accum = plan.accum_dtype
        row, stride = cdiv(H * accum.itemsize, dtype.itemsize), _up(plan.first)  # of dW and the logits, in logits
        sums = 2 * plan.wave * H
        dw = cdiv(V * row, 64) * 64
        if stride > row and plan.grad_dtype == accum and not plan.beside:
            self.strip = max(min(plan.strip, V * row // (row + stride)), 1)
            enough = max(V - (V - self.strip) * row // stride, cdiv(self.strip * stride, row))
            self.split, dw = min(enough, V), 0
            self.early = h.new_empty(V * row, dtype=dtype)
            self.late = h.new_empty(max(self.split * stride, sums + later), dtype=dtype)
        else:
            size = max(V * max(row, stride) + plan.strip * min(row, stride), dw + sums + (0 if plan.beside else later))
            self.early = h.new_empty(cdiv(size, 64) * 64, dtype=dtype)
            if plan.beside and plan.grad_dtype != accum:  # then the finished dW takes this memory
                later = max(later, cdiv(V * H * plan.grad_dtype.itemsize, dtype.itemsize))
            self.late = h.new_empty(later, dtype=dtype) if plan.beside else self.early
        self.dw = self.early[: V * row].view(accum)[: V * H].view(V, H)
        self.sums = (self.late if self.split else self.early)[dw : dw + sums].view(torch.float32).view(-1, H)

    def nbytes(self, weight_dtype):
        """At most, the dW included that the weight gets."""
        dw = 0 if self.dw is None or self.dw.dtype == weight_dtype else self.dw.numel() * weight_dtype.itemsize
        return self.early.nbytes + max(0 if self.late is self.early else self.late.nbytes, dw)

    def of(self, n, first):
        """Logits (V, n), at the end; a first pass's (split, n) and (V - split, n), if it is in two parts."""
        stride, memory = _up(n), self.early if first and not self.split else self.late
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
    in_fp32 = parts[0].dtype == torch.float32 or _device.multiplies_into_fp32(parts[0])
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
    with _device.without_autocast(h):
        return _run_passes(h, *args)


def _run_passes(h, w, b, dtype, plan, turn, needs, group=None, passes=None):
    """Every pass: logits, ``turn(tokens, x)`` of x (T, V), then what the gradient that it left in x gives.

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
        turned = tuple(x[:, :n].t() for x in parts)
        turn(i, turned if len(parts) > 1 else turned[0])
        if b is not None:
            for x in parts:
                x[:, n:] = 0  # a bias of -inf made them NaN
        if need_h:
            whole = part.shape[0] == n and isinstance(i, slice)
            out = dh[i] if whole else dh.new_empty(part.shape)
            _to_dh(parts, w, out, _waves(0, h.shape[1], _device.multiprocessors(h)))
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
    part = parts = turned = x = None
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
    if x.numel() == 0 or torch.compiler.is_compiling() or not _device.has_kernels(x):
        return (x * g).to(dtype)
    in_place = in_place and x.dtype == dtype
    y = x if in_place else torch.empty_like(x, dtype=dtype)
    programs = min(cdiv(x.numel(), 4096), 8 * _device.multiprocessors(x))
    _scale[(programs,)](x, g, y, x.numel(), BLOCK=4096, IN_PLACE=in_place, num_warps=8)
    return y


# ---- as custom ops ----

WANTS = "z_loss", "token", "entropy", "mean", "best"  # what forward may be asked for beside the loss


def _gradients(h, w, b, dtype, accum_dtype, memory, needs):
    chosen = plan(*h.shape, w.shape[0], dtype, w.dtype, accum_dtype, memory, needs[1], _device.multiprocessors(h))
    return (
        h.new_empty(h.shape if needs[0] else 0),
        w.new_empty(w.shape if needs[1] else 0, dtype=chosen.grad_dtype if needs[1] else h.dtype),
        h.new_empty(w.shape[0] if needs[2] else 0, dtype=torch.float32),
    )


def _forward_outputs(
    h, w, b, target, ce_weight, items, numbers, ignore_index, mean, token_scaling, dtype, accum_dtype, memory, group,
    wants, needs,
):  # fmt: skip
    M = h.shape[0]
    shapes = (M,), (M, 2), (4,), *((M if want else 0,) for want in wants[:-1])
    floats = (h.new_empty(shape, dtype=torch.float32) for shape in shapes)
    best = target.new_empty(M if wants[-1] else 0, dtype=torch.int64)
    return *floats, best, *_gradients(h, w, b, dtype, accum_dtype, memory, needs)


@custom_op("linear_head", _forward_outputs)
def head_fwd(
    h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, target: torch.Tensor, ce_weight: torch.Tensor | None,
    items: torch.Tensor | None, numbers: list[float], ignore_index: int, mean: bool, token_scaling: bool,
    dtype: torch.dtype, accum_dtype: torch.dtype | None, memory: int, group: str | None, wants: list[bool],
    needs: list[bool],
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
    torch.Tensor, torch.Tensor, torch.Tensor,
]:  # fmt: skip
    """-> loss (M,), (max, log-sum) (M, 2), normalisers (4,); what is wanted of `WANTS`; the needed dh, dW, db.

    numbers: lse_square_scale, label_smoothing, softcap or 0, logit_scale. The losses are divided by ``items`` (0-d) if
    given. The gradients are of the sum of the losses; for fp16, which can't hold them divided, of that times n₀.
    """
    world = place(group)[0]
    options = _options(numbers, ignore_index)
    norm = normalisers(target, ce_weight, w.shape[0] * world, ignore_index, mean, items)
    inside = norm if dtype != torch.float16 else torch.stack((norm[0] / norm[0], norm[1] / norm[0], norm[2], norm[3]))
    loss, stats = h.new_empty(h.shape[0], dtype=torch.float32), h.new_empty((h.shape[0], 2), dtype=torch.float32)
    wanted = {name: torch.empty_like(loss) for name, want in zip(WANTS, wants, strict=True) if want}
    if wants[-1]:
        wanted["best"] = target.new_empty(h.shape[0], dtype=torch.int64)
    if token_scaling and "token" not in wanted and any(needs):
        wanted["token"] = torch.empty_like(loss)

    def turn(i, x):
        y, parts = target[i], {name: whole[i] for name, whole in wanted.items()}
        token_loss(
            x, y, ce_weight, inside, *options, loss[i], stats[i], **parts, token_scaling=token_scaling, group=group
        )
        if any(needs):
            g = parts["token"] if token_scaling else None
            token_gradient(g, x, y, ce_weight, inside, stats[i], x, *options, group=group)

    chosen = plan(*h.shape, w.shape[0], dtype, w.dtype, accum_dtype, memory, needs[1], _device.multiprocessors(h))
    gradients = run_passes(h, w, b, dtype, chosen, turn, needs, group)
    if dtype == torch.float16:
        loss.div_(norm[0])
        if wants[0]:
            wanted["z_loss"].div_(norm[0])
    kind = dict.fromkeys(WANTS, torch.float32) | dict(best=torch.int64)
    outputs = (
        wanted[name] if want else h.new_empty(0, dtype=kind[name]) for name, want in zip(WANTS, wants, strict=True)
    )
    return loss, stats, norm, *outputs, *gradients


def _backward_outputs(
    g, g_entropy, g_lse, h, w, b, target, ce_weight, norm, stats, entropy, numbers, ignore_index, dtype, accum_dtype,
    memory, group, needs,
):  # fmt: skip
    return _gradients(h, w, b, dtype, accum_dtype, memory, needs)


@custom_op("linear_head_backward", _backward_outputs)
def head_bwd(
    g: torch.Tensor, g_entropy: torch.Tensor | None, g_lse: torch.Tensor | None, h: torch.Tensor, w: torch.Tensor,
    b: torch.Tensor | None, target: torch.Tensor, ce_weight: torch.Tensor | None, norm: torch.Tensor,
    stats: torch.Tensor, entropy: torch.Tensor | None, numbers: list[float], ignore_index: int, dtype: torch.dtype,
    accum_dtype: torch.dtype | None, memory: int, group: str | None, needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Incoming gradients of each token's loss, entropy and log-sum-exp (M,) -> dh, dW, db."""
    options = _options(numbers, ignore_index)

    def turn(i, x):
        ge, gs, e = (None if of is None else of[i] for of in (g_entropy, g_lse, entropy))
        token_gradient(g[i], x, target[i], ce_weight, norm, stats[i], x, *options, ge, gs, e, group)

    chosen = plan(*h.shape, w.shape[0], dtype, w.dtype, accum_dtype, memory, needs[1], _device.multiprocessors(h))
    return run_passes(h, w, b, dtype, chosen, turn, needs, group)


def _options(numbers, ignore_index):
    """In the order of `token_loss` and `token_gradient`."""
    lse_square_scale, label_smoothing, softcap, logit_scale = numbers
    return ignore_index, label_smoothing, lse_square_scale, softcap or None, logit_scale


# ---- without kernels ----


def compute_dtype(h, w):
    """Autocast's dtype where it is on; otherwise that of the weight."""
    kind = h.device.type
    if h.dtype != torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return w.dtype


def token_reference(h, w, b, target, ce_weight, numbers, ignore_index, group=None):
    """-> loss, logsumexp, entropy, z_loss, correct, predicted, mean logit: (M,) each, three of them with gradients."""
    lse_square_scale, label_smoothing, softcap, logit_scale = numbers
    dtype = compute_dtype(h, w)
    x = F.linear(copy_to_group(h.to(dtype), group), w.to(dtype), None if b is None else b.to(dtype))
    z = (x if x.dtype == torch.float64 else x.float()) * logit_scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    return token_loss_reference_parallel(z, target, group, ce_weight, ignore_index, label_smoothing, lse_square_scale)


def in_chunks(of_chunk, h, target):
    """``of_chunk(h, target)`` a few rows at a time, each chunk's logits made again in backward."""
    if torch.compiler.is_compiling() or h.shape[0] <= ROWS_WITHOUT_KERNELS:
        return of_chunk(h, target)
    chunks = zip(h.split(ROWS_WITHOUT_KERNELS), target.split(ROWS_WITHOUT_KERNELS), strict=True)
    chunks = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return tuple(None if of[0] is None else torch.cat(of) for of in zip(*chunks, strict=True))


# ---- per token ----


@dataclass
class TokenOutputs:
    """What `linear_token_loss` returns, (M,) each, None where not asked for."""

    loss: torch.Tensor
    logsumexp: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    correct: torch.Tensor | None = None
    predicted: torch.Tensor | None = None
    mean_logit: torch.Tensor | None = None


class LinearTokenLossFunction(Function):
    """``apply(hidden, weight, bias, target, class_weight, ...) -> loss, logsumexp, entropy, z_loss, best, mean``.

    The first three are differentiable. Backward makes the logits again.
    """

    @staticmethod
    def reference(h, w, b, target, ce_weight, numbers, ignore_index, accum_dtype, memory, group, wants):
        def of_chunk(h, y):
            return token_reference(h, w, b, y, ce_weight, numbers, ignore_index, group)

        loss, lse, entropy, z_loss, _, best, mean = in_chunks(of_chunk, h, target)
        return loss, lse, entropy, z_loss, best, mean

    @staticmethod
    def forward(ctx, h, w, b, target, ce_weight, numbers, ignore_index, accum_dtype, memory, group, wants):
        dtype = compute_dtype(h, w)
        target, ce_weight = target.contiguous(), None if ce_weight is None else ce_weight.contiguous()
        loss, stats, norm, z_loss, _, entropy, mean, best, *_ = head_fwd(
            h, w, b, target, ce_weight, None, numbers, ignore_index, False, False, dtype, accum_dtype, memory, group,
            [wants[0], False, wants[1], wants[2], wants[3]], [False] * 3,
        )  # fmt: skip
        ctx.options = numbers, ignore_index, dtype, accum_dtype, memory, group
        ctx.needs = list(ctx.needs_input_grad[:3])
        ctx.save_for_backward(h, w, b, target, ce_weight, norm, stats, entropy if wants[1] else None)
        ctx.mark_non_differentiable(z_loss, best, mean)
        ctx.set_materialize_grads(False)
        return loss, stats.sum(1), entropy, z_loss, best, mean

    @staticmethod
    def arguments(ctx):
        numbers, ignore_index, _, accum_dtype, memory, group = ctx.options
        return *ctx.saved_tensors[:5], numbers, ignore_index, accum_dtype, memory, group, [False] * 4

    @staticmethod
    def backward(ctx, g, g_lse, g_entropy, *_):
        h, w, b, target, ce_weight, norm, stats, entropy = ctx.saved_tensors
        g = stats.new_zeros(stats.shape[0]) if g is None else g
        g_entropy, g_lse = (None if of is None else of.contiguous() for of in (g_entropy, g_lse))
        grads = head_bwd(
            g, None if entropy is None else g_entropy, g_lse, h, w, b, target, ce_weight, norm, stats, entropy,
            *ctx.options, ctx.needs,
        )  # fmt: skip
        grads = zip(grads, (h, w, b), ctx.needs, strict=True)
        return *(rounded(grad, of.dtype) if need else None for grad, of, need in grads), *[None] * 8


def check_head(name, hidden, weight, bias, target, class_weight, group=None, argument="hidden"):
    """The target may be on the host."""
    _check.floats(name, {argument: hidden, "weight": weight}, bias=bias, **{"class weight": class_weight})
    _check.integers(name, dict(target=target))
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{name}: the hidden states have shape {tuple(hidden.shape)} and the weight {tuple(weight.shape)}, give "
            "(rows, hidden size) and (classes, hidden size)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}, give one number a class: ({weight.shape[0]},)")
    check_rows(name, hidden, target, class_weight, weight.shape[0] * place(group)[0])


def only_valid(hidden, target, ignore_index, drop_ignored):
    """(indices of the rows that are not ignored or None for all, their hidden states, their targets).

    Dropping the others waits for the device, except where the targets are on the host: there it is the default.
    """
    target = target.long()
    on_host = target.device.type == "cpu" and not torch.compiler.is_compiling()
    if not (on_host if drop_ignored is None else drop_ignored):
        return None, hidden, target.to(hidden.device)
    rows = (target != ignore_index).nonzero().squeeze(1)
    if on_host and rows.numel() == target.numel():
        return None, hidden, target.to(hidden.device)
    target = target[rows].to(hidden.device, non_blocking=True)
    rows = rows.to(hidden.device, non_blocking=True)
    return rows, hidden.index_select(0, rows), target


def linear_token_loss(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *,
    temperature: float = 1.0, logit_scale: float = 1.0, softcap: float | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, class_weight: torch.Tensor | None = None, lse_square_scale: float = 0.0,
    return_logsumexp: bool = False, return_entropy: bool = False, return_z_loss: bool = False,
    return_accuracy: bool = False, return_predicted: bool = False, return_mean_logit: bool = False,
    accum_dtype: torch.dtype | None = None, memory: int | str = "auto", drop_ignored: bool | None = None,
    group: object = None,
):  # fmt: skip
    """What a linear head makes of each token, without its logits in memory: cross entropy, and more on request.

    Args:
        hidden: (M, H) hidden states, fp32, bf16 or fp16; any strides.
        weight: (V, H) of the head; bias: (V,). Logits are computed in the weight's dtype, or autocast's where it is on.
        target: (M,) class indices. They may be on the host.
        temperature: the logits are divided by it, after everything else.
        logit_scale: the logits are multiplied by it; softcap: then they become ``softcap·tanh(logits / softcap)``.
        ignore_index: target of rows that give 0 everywhere (predicted -1).
        label_smoothing: in [0, 1]; class_weight: (V,); lse_square_scale: of the z-loss, which is part of the loss.
        return_logsumexp, return_entropy, return_z_loss, return_accuracy, return_predicted, return_mean_logit: what to
            return beside the loss.
        accum_dtype: dtype in which dW is added up over several passes: see ``memory``. torch.float32 makes it exact.
        memory: bytes that the head may take beyond the gradients of hidden and weight, or "auto": as much as a fast
            head with a dW about as exact as PyTorch's needs (see docs/linear-head.md). The environment variable
            LIGER_KERNEL_HEAD_MEMORY is what "auto" stands for if it is set.
        drop_ignored: leave ignored rows out before the projection. This waits for the device once; None: only where
            the targets are on the host, where it costs nothing.
        group: a process group of torch.distributed whose ranks each hold an equal, contiguous shard of the classes:
            weight, bias and their gradients are this rank's. All else is the same on every rank; class indices and
            class_weight are of all classes. It is known where hidden and weight are DTensors of one mesh.

    Returns:
        `TokenOutputs`, (M,) each, in fp32 (predicted: int64, the lowest index on ties). Loss, log-sum-exp and entropy
        are differentiable in hidden, weight and bias; backward makes the logits again.

    Raises:
        ValueError, TypeError: shapes or options that don't fit; a target out of range, on the CPU and in debug mode
            (LIGER_KERNEL_DEBUG=1). On a GPU such a row's loss is otherwise NaN.
    """
    name = "linear_token_loss"
    ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale = check_options(
        name, "none", ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale
    )
    temperature = _check.positive(name, "temperature", temperature)
    _check.dtype(name, "accum_dtype", accum_dtype)
    hidden, weight, bias, group = local(name, hidden, weight, bias, group)
    check_head(name, hidden, weight, bias, target, class_weight, group)
    check_targets(name, target, weight.shape[0] * place(group)[0], ignore_index)
    rows, h, y = only_valid(hidden, target, ignore_index, drop_ignored)
    numbers = [lse_square_scale, label_smoothing, (softcap or 0.0) / temperature, logit_scale / temperature]
    need_best = return_accuracy or return_predicted
    run = LinearTokenLossFunction.apply
    if not _device.has_kernels(h):
        run = LinearTokenLossFunction.reference
    elif torch.compiler.is_compiling() and not torch.is_grad_enabled():  # in eager, apply does this
        h, weight, bias = h.detach(), weight.detach(), None if bias is None else bias.detach()
    loss, lse, entropy, z_loss, best, mean = run(
        h, weight, bias, y, class_weight, numbers, ignore_index, accum_dtype, budget(memory), group_name(group),
        [return_z_loss, return_entropy, return_mean_logit, need_best],
    )  # fmt: skip
    correct = ((best == y) & (y != ignore_index)).float() if return_accuracy else None

    def whole(x, wanted=True, ignored=0):
        if not wanted or rows is None:
            return x if wanted else None
        return x.new_full(target.shape, ignored).index_copy(0, rows, x)

    return TokenOutputs(
        whole(loss), whole(lse, return_logsumexp), whole(entropy, return_entropy), whole(z_loss, return_z_loss),
        whole(correct, return_accuracy), whole(best, return_predicted, -1), whole(mean, return_mean_logit),
    )  # fmt: skip


def token_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *,
    temperature: float = 1.0, logit_scale: float = 1.0, softcap: float | None = None, ignore_index: int = -100,
    return_entropy: bool = False, accum_dtype: torch.dtype | None = None, memory: int | str = "auto",
    drop_ignored: bool | None = None, group: object = None,
):  # fmt: skip
    """log p(target | hidden) of each token under a linear head, and the entropy, without its logits in memory.

    The quantities that DPO, GRPO, PPO and distillation are made of, differentiable in hidden, weight and bias.

    Args:
        hidden: (..., H); target: (...). The rest as in `linear_token_loss`.

    Returns:
        log-probabilities (...) in fp32, 0 where the target is ``ignore_index``; with ``return_entropy`` the pair of
        them and the entropies of the distributions (...).
    """
    _check.floats("token_log_probs", dict(hidden=hidden))
    _check.integers("token_log_probs", dict(target=target))
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"token_log_probs: target has shape {tuple(target.shape)}, give one class for each of the hidden states: "
            f"{tuple(hidden.shape[:-1])}"
        )
    out = linear_token_loss(
        hidden.reshape(-1, hidden.shape[-1]), weight, target.reshape(-1), bias, temperature=temperature,
        logit_scale=logit_scale, softcap=softcap, ignore_index=ignore_index, return_entropy=return_entropy,
        accum_dtype=accum_dtype, memory=memory, drop_ignored=drop_ignored, group=group,
    )  # fmt: skip
    log_probs = -out.loss.view(target.shape)
    return (log_probs, out.entropy.view(target.shape)) if return_entropy else log_probs


def _case(fn):
    def call(hidden, weight, target, bias=None, class_weights=False, **options):
        w = torch.linspace(0.5, 2, weight.shape[0], device=weight.device) if class_weights else None
        return fn(hidden, weight, target, bias, class_weight=w, **options)

    return call


def _of_kernels(*args, **options):
    out = linear_token_loss(
        *args, **options, return_logsumexp=True, return_entropy=True, return_z_loss=True, return_mean_logit=True,
        drop_ignored=False,
    )  # fmt: skip
    return out.loss, out.logsumexp, out.entropy, out.z_loss, out.mean_logit


def _of_reference(
    h, w, y, b, class_weight, temperature=1.0, softcap=None, label_smoothing=0.0, lse_square_scale=0.0, logit_scale=1.0
):  # fmt: skip
    numbers = [lse_square_scale, label_smoothing, (softcap or 0.0) / temperature, logit_scale / temperature]
    loss, lse, entropy, z_loss, _, _, mean = token_reference(h, w, b, y, class_weight, numbers, -100)
    return loss, lse, entropy, z_loss, mean


def head_inputs(M, H, V, names=("hidden", "weight", "bias")):
    tensors = torch.randn(M, H), torch.randn(V, H) * 2 / H**0.5, torch.randn(V)
    return {k: t.requires_grad_() for k, t in zip(names, tensors, strict=True)} | dict(target=labels(M, V))


CASES.append(
    Case(
        "linear_token_loss",
        fn=_case(_of_kernels),
        reference=_case(_of_reference),
        inputs=head_inputs,
        shapes=((1, 8, 8), (5, 24, 123), (70, 32, 513), (4, 16, 9000)),
        options=(
            dict(bias=None),
            dict(temperature=0.7, softcap=5.0),
            dict(class_weights=True, label_smoothing=0.1, lse_square_scale=1e-2, softcap=5.0, logit_scale=0.5),
        ),
        bench=((8192, 4096, 128256),),
        flops=lambda t: 8 * t["hidden"].numel() * t["weight"].shape[0],
        fp32_roundings=4,  # as of fused_linear_cross_entropy
    )
)
