r"""A scalar loss of the log-probabilities that a linear head gives to some tokens, without its logits in memory.

    log p_tk = z_tk - lse_t,   z = (h·Wᵀ + b) / temperature            (of one class k a token, or of several)
    loss     = Σ_groups fn(log p of the group's tokens)                (a group: a pair of sequences, one, a token)
    dz_tv    = Σ_k g_tk·(1[v=k] - p_tv),   g = d loss / d log p

A preference or policy loss couples the tokens of a group only. So a pass over whole groups asks ``fn`` for g and turns
its logits into their gradient at once: three products in all and nothing twice, as for cross entropy (`passes`),
and the weight may be gone in backward (ZeRO-3). Groups that are larger than a pass have their logits made twice.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import F, gradients, keep, kept, kept_inputs, transformed
from liger_kernel.core.parallel import group_name, local, place
from liger_kernel.core.tile import parts
from liger_kernel.ops.head.cross_entropy import check_targets
from liger_kernel.ops.head.logits import token_gradient, token_loss
from liger_kernel.ops.head.passes import run_passes, scaled
from liger_kernel.ops.head.planning import ROWS, budget, plan
from liger_kernel.ops.head.token_log_probs import (
    ROWS_WITHOUT_KERNELS,
    check_head,
    compute_dtype,
    in_chunks,
    token_reference,
)


class GradientInForward(torch.autograd.Function):
    """``apply(run, reference, h, w, b) -> loss, *rest``: a loss whose gradients ``run`` takes at once, in forward.

    ``run(h, w, b, needs) -> (loss, *rest), (dh, dw, db), divisor``: the gradients, of loss·divisor, are None or empty
    where not needed. ``reference(h, w, b) -> loss, *rest`` is differentiated where they need a graph of their own.
    """

    @staticmethod
    def forward(ctx, run, reference, h, w, b):
        ctx.needs = [x is not None and need for x, need in zip((h, w, b), ctx.needs_input_grad[2:], strict=True)]
        outputs, grads, ctx.divisor = run(h, w, b, ctx.needs)
        ctx.reference, ctx.dtypes = reference, [None if x is None else x.dtype for x in (h, w, b)]
        keep(ctx, tuple(g if need else None for g, need in zip(grads, ctx.needs, strict=True)), (h, w, b))
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, g, *others):
        if g is None:
            return (None,) * 5
        if torch.is_grad_enabled():
            return None, None, *gradients(ctx.reference, kept_inputs(ctx, 3), ctx.needs, (g, *others))
        g = g / ctx.divisor
        grads, in_place = kept(ctx, 3)
        grads = zip(grads, ctx.dtypes, strict=True)
        return None, None, *(None if x is None else scaled(x, g, dtype, in_place) for x, dtype in grads)


def taken(run, reference, h, w, b):
    """``run``'s outputs, with a gradient for the first one. ``reference`` gives the same in plain PyTorch."""
    if transformed():
        return reference(h, w, b)
    if torch.is_grad_enabled():
        return GradientInForward.apply(run, reference, h, w, b)
    return run(h, w, b, [False] * 3)[0]


# ---- groups, and what the loss says of them ----


class _Job:
    """Tokens in groups, and ``fn``'s answers.

    Tokens (parts·groups, ...) are numbered in this order; group g has those of sequences g, groups + g, ...
    """

    def __init__(self, fn, target, parts, lead, valid, device, return_entropy, options):
        self.fn, self.parts, self.lead = fn, parts, lead
        self.autocast = devices.autocast_as_now(device)  # the passes go without
        self.target = target.to(device)  # (tokens,) or (tokens, classes)
        self.several = target.dim() == 2
        self.groups, self.tokens = lead[0] // parts, lead[1:].numel()  # tokens of one sequence
        self.return_entropy = return_entropy
        self.temperature, self.ignore_index, self.accum_dtype, self.memory, self.group = options
        self.loss, self.rest = torch.zeros((), device=device), []
        unit = parts * self.tokens  # group g is as long as from ends[g] to ends[g + 1]
        self.ends = range(0, (self.groups + 1) * unit, unit) if unit else [0] * (self.groups + 1)
        self.kept = None  # the tokens group by group, without those that are dropped
        if parts > 1 or valid is not None:
            order = torch.arange(lead.numel(), device=target.device)
            order = order.view(parts, self.groups, self.tokens).transpose(0, 1).reshape(-1)
            if valid is not None:
                order = order[valid[order]]
                self.ends = [0, *accumulate(valid.view(parts, self.groups, self.tokens).sum((0, 2)).tolist())]
            self.kept = order.to(device, non_blocking=True)

    def some(self, x, a, b):
        """A view of groups a to b: (groups, ...), or (parts, groups, ...) of several parts."""
        x = x.view(*self.lead, *x.shape[1:])
        return x[a:b] if self.parts == 1 else x.unflatten(0, (self.parts, self.groups))[:, a:b]

    def rows(self, a, b):
        """Tokens a to b in the order of the groups, as a slice or as indices."""
        return slice(a, b) if self.kept is None else self.kept[a:b]

    def of_groups(self, a, b):
        return self.rows(self.ends[a], self.ends[b])

    def spans(self, first, rows):
        """(from, to): the groups of passes of so many tokens at most. One pass if there are none."""
        spans, a = [], 0
        while a < self.groups or not spans:
            most = rows if spans or not first else first
            b = min(max(bisect_right(self.ends, self.ends[a] + most) - 1, a + 1), self.groups)
            spans.append((a, b))
            a = b
        return spans

    def ask(self, a, b, log_probs, entropy):
        """What groups a to b contribute to the loss."""
        with self.autocast():
            answer = self.fn(slice(a, b), log_probs, entropy)
        value, *rest = answer if isinstance(answer, tuple) else (answer,)
        self.loss = self.loss + value.detach()  # of fp64, if that is
        self.rest.append([x.detach() for x in rest])
        return value

    def take(self, a, b, given, g):
        """Ask for groups a to b; the gradients of the log-probabilities and entropies ``given`` go to ``g``."""
        with torch.enable_grad():
            leaves = [x if x is None else self.some(x, a, b).detach().requires_grad_(g is not None) for x in given]
            value = self.ask(a, b, *leaves)
            if g is None or not value.requires_grad:
                return
            known = [k for k, x in enumerate(leaves) if x is not None]
            grads = torch.autograd.grad(value, [leaves[k] for k in known], allow_unused=True)
        for k, grad in zip(known, grads, strict=True):
            if grad is not None:
                self.some(g[k], a, b).copy_(grad)

    def outputs(self):
        """The loss; of what else ``fn`` returned, 0-d tensors are added up and others concatenated."""
        loss, columns = self.loss, zip(*self.rest, strict=True)
        self.loss = self.rest = None  # the graph, which the loss belongs to, keeps the job (`_reference`): no cycle
        return loss, *(torch.stack(c).sum(0) if c[0].dim() == 0 else torch.cat(c) for c in columns)


# ---- with kernels ----


def _fitted(chosen, lengths, channels, dtype):
    """The plan with room for passes of so many tokens."""
    first, *later = lengths if chosen.first and lengths else (0, *lengths)
    holds = channels * chosen.accum_dtype.itemsize // dtype.itemsize  # tokens whose logits are as large as dW
    separate = chosen.separate_logits and first <= holds
    return replace(chosen, first=first, rows=max(later, default=0), separate_logits=separate)


def _gathered(x, classes):
    """The logits of some classes (T, K), of x in one part or two."""
    x, more, split, V = parts(x)
    if more is None:
        return x.gather(1, classes)
    first, later = classes.clamp(max=split - 1), (classes - split).clamp(min=0)
    return torch.where(classes < split, x.gather(1, first), more.gather(1, later))


def _scatter(x, classes, values):
    """Write them there. A class that stands there twice has one value."""
    x, more, split, V = parts(x)
    if more is None:
        x.scatter_(1, classes, values.to(x.dtype))
        return
    for part, at, inside in ((x, classes, classes < split), (more, classes - split, classes >= split)):
        # in place of a class that is not in this part, one that is; for a token without any, what is there
        other = inside.int().argmax(1, keepdim=True)
        at = at.where(inside, at.gather(1, other)).clamp(0, part.shape[1] - 1)
        new = values.where(inside, values.gather(1, other)).to(x.dtype)
        part.scatter_(1, at, new.where(inside.any(1, keepdim=True), part.gather(1, at)))


def _with_kernels(job, h, w, b, needs):
    """`GradientInForward`'s ``run``."""
    dtype, V, learning = compute_dtype(h, w), w.shape[0], any(needs)
    options = job.ignore_index, 0.0, 0.0, None, 1.0 / job.temperature
    fp32 = dict(dtype=torch.float32, device=h.device)
    norm, stats = torch.ones(4, **fp32), torch.zeros(h.shape[0], 2, **fp32)
    log_probs = torch.zeros(job.target.shape, **fp32)
    entropies = torch.zeros(h.shape[0], **fp32) if job.return_entropy else None
    given = log_probs, entropies
    g = [None if x is None else torch.zeros_like(x) for x in given] if learning else None
    known = job.target != job.ignore_index
    divisor = known.sum().clamp(min=1) if dtype == torch.float16 else 1  # fp16 can't hold what is divided by it
    y, classes = job.target, None
    if job.several:  # a token's first class stands for those that it doesn't have
        y = y.gather(1, known.int().argmax(1, keepdim=True)).squeeze(1)
        classes = job.target.where(known, y[:, None])
        classes = classes.where((classes >= 0) & (classes < V), 0)

    def read(i, x):
        rows = y[i].shape[0]
        nll, of_row = stats.new_empty(rows), stats.new_empty(rows, 2)
        entropy = None if entropies is None else torch.empty_like(nll)
        token_loss(x, y[i], None, norm, *options, nll, of_row, entropy=entropy, group=job.group)
        stats[i] = of_row
        if entropy is not None:
            entropies[i] = entropy
        if not job.several:
            log_probs[i] = -nll
            return
        z = _gathered(x, classes[i]).float() * options[-1]
        z = (z - of_row[:, :1]) - of_row[:, 1:]
        log_probs[i] = torch.where(known[i] & (classes[i] == job.target[i]), z, torch.where(known[i], torch.nan, 0.0))

    def write(i, x):
        of_row, d = stats[i], g[0][i] * divisor
        if not job.several:
            of_entropy = None if entropies is None else g[1][i] * divisor
            entropy = None if entropies is None else entropies[i]
            token_gradient(-d, x, y[i], None, norm, of_row, x, *options, of_entropy, None, entropy, job.group)
            return
        d = d.masked_fill(~known[i], 0)
        total = d.sum(1)
        token_gradient(total.new_zeros(()), x, y[i], None, norm, of_row, x, *options, None, -total)
        c, p = classes[i], log_probs[i].exp()
        of_class = (c[:, :, None] == c[:, None, :]).to(d.dtype) @ d[:, :, None]  # a class may stand there twice
        p = p.where(known[i], p.gather(1, known[i].int().argmax(1, keepdim=True)))
        dz = (of_class.squeeze(2) - p * total[:, None]) * options[-1]
        _scatter(x, c, dz.where(known[i].any(1, keepdim=True), 0))

    total, ends = job.ends[-1], job.ends
    even = isinstance(ends, range)
    unit = ends.step if even else max((n - m for m, n in zip(ends, ends[1:], strict=False)), default=0)
    most = max(2 * ROWS, 2 * h.shape[1]) if job.memory < 0 else job.memory // (V * dtype.itemsize)
    sizes = total, h.shape[1], V, dtype, w.dtype, job.accum_dtype, job.memory
    sizes = *sizes, needs[1], devices.multiprocessors(h)
    if unit <= most and learning:
        chosen = plan(*sizes, unit if even and unit > 1 else 64)
        spans = job.spans(chosen.first and max(chosen.first, unit), max(chosen.rows, unit)) if total else []
        if not even:
            chosen = _fitted(chosen, [ends[b] - ends[a] for a, b in spans], h.shape[1], dtype)
        todo = iter(spans)

        def to_gradient(i, x):
            read(i, x)
            job.take(*next(todo), given, g)
            write(i, x)

        if not total:
            job.take(0, job.groups, given, g)
        passes = [job.of_groups(*span) for span in spans]
        grads = run_passes(h, w, b, dtype, chosen, to_gradient, needs, job.group, passes)
        return job.outputs(), grads, divisor

    def passes(chosen):
        return [job.rows(s.start, s.stop) for s in chosen.passes(total)]

    reading = plan(*sizes[:-2], False)
    run_passes(h, w, b, dtype, reading, read, [False] * 3, job.group, passes(reading))
    job.take(0, job.groups, given, g)
    if not learning:
        return job.outputs(), (None,) * 3, divisor
    chosen = plan(*sizes)
    return job.outputs(), run_passes(h, w, b, dtype, chosen, write, needs, job.group, passes(chosen)), divisor


# ---- without ----


def _log_probs(job, h, w, b, y):
    """-> log-probabilities like y, entropies."""
    if not job.several:
        numbers = 0.0, 0.0, None, 1.0 / job.temperature
        nll, _, entropy, *_ = token_reference(h, w, b, y, None, numbers, job.ignore_index, job.group)
        return -nll, entropy if job.return_entropy else None
    dtype, known = compute_dtype(h, w), y != job.ignore_index
    z = F.linear(h.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
    z = (z if z.dtype == torch.float64 else z.float()) / job.temperature
    z = z.where(known.any(1, keepdim=True), 0)
    return z.log_softmax(1).gather(1, y.where(known, 0)).where(known, 0), None


def _reference(job, h, w, b):
    """The loss of all groups at once, and what else ``fn`` returns."""
    log_probs, entropies = in_chunks(lambda h, y: _log_probs(job, h, w, b, y), h, job.target)
    answer = job.fn(
        slice(0, job.groups), *(x if x is None else job.some(x, 0, job.groups) for x in (log_probs, entropies))
    )
    value, *rest = answer if isinstance(answer, tuple) else (answer,)
    return value + torch.zeros((), device=h.device), *(x.detach() for x in rest)


def _without_kernels(job, h, w, b, needs):
    """`GradientInForward`'s ``run`` in PyTorch, a few groups at a time."""
    wide = torch.promote_types(w.dtype, torch.float32)
    grads = [torch.zeros_like(x, dtype=wide) if need else None for x, need in zip((h, w, b), needs, strict=True)]
    for span in job.spans(0, ROWS_WITHOUT_KERNELS):
        rows = job.of_groups(*span)
        with torch.set_grad_enabled(any(needs)):
            leaves = [
                None if x is None else x.detach().requires_grad_(need)
                for x, need in zip((h[rows], w, b), needs, strict=True)
            ]
            whole = []
            for x in _log_probs(job, *leaves, job.target[rows]):
                whole.append(x if x is None else x.new_zeros(h.shape[0], *x.shape[1:]))
                if x is not None:
                    whole[-1][rows] = x
            value = job.ask(*span, *(x if x is None else job.some(x, *span) for x in whole))
            if not (any(needs) and value.requires_grad):
                continue
            asked = [k for k, need in enumerate(needs) if need]
            of = torch.autograd.grad(value, [leaves[k] for k in asked], allow_unused=True)
        for k, d in zip(asked, of, strict=True):
            if d is not None:
                part = grads[k][rows] if k == 0 else grads[k]
                part.add_(d)
                if k == 0:
                    grads[0][rows] = part
    return job.outputs(), grads, 1


@torch._disable_dynamo  # torch.compiler.disable, which imports torch._dynamo when it is called: a second later
def linear_loss(
    fn, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *,
    parts: int = 1, temperature: float = 1.0, ignore_index: int = -100, return_entropy: bool = False,
    accum_dtype: torch.dtype | None = None, memory: int | str = "auto", drop_ignored: bool | None = None,
    group: object = None,
):  # fmt: skip
    """A scalar loss of token log-probabilities under a linear head, whose logits are never all in memory.

    Its gradients for hidden, weight and bias are taken in this call: the weight may change or go before backward.

    Args:
        fn: ``fn(part, log_probs, entropy) -> value`` or ``(value, *others)``, called once for each pass. ``part`` is
            the slice of the groups whose log-probabilities (groups, ...) it is given: fp32, 0 where the target is
            ``ignore_index``, to be differentiated through. value: 0-d, what these groups contribute to the loss: it
            must not depend on how many groups there are in a call.
        hidden: (groups, ..., H). A group is what the loss couples: hidden states (tokens, H) for a loss of single
            tokens, (B, T, H) for one of sequences.
        weight, bias: (V, H) and (V,) of the head.
        target: (groups, ...) class indices, which may be on the host; or (groups, ..., K), K classes for each of the
            hidden states: then the log-probabilities have that shape, too.
        parts: a group has this many sequences: those of ``hidden.unflatten(0, (parts, groups))[:, group]``, and fn gets
            (parts, groups, ...).
        temperature: the logits are divided by it.
        ignore_index: target of what is left out.
        return_entropy: fn is given each token's entropy, too; otherwise None.
        accum_dtype, drop_ignored, group: as in `linear_token_loss`.
        memory: likewise. A group whose logits are larger than that (for "auto": than those of 4,096 tokens or of twice
            the hidden size) has them made twice, once for fn and once for the gradient.

    Returns:
        The loss, 0-d, and fn's others without gradients: 0-d ones added up, the rest concatenated.

    Raises:
        ValueError, TypeError: shapes or options that don't fit.
    """
    name = "linear_loss"
    check.floats(name, dict(hidden=hidden))
    check.integers(name, dict(target=target))
    temperature, ignore_index = (
        check.positive(name, "temperature", temperature), check.integer(name, "ignore_index", ignore_index)
    )  # fmt: skip
    check.dtype(name, "accum_dtype", accum_dtype)
    lead = hidden.shape[:-1]
    if target.shape[: len(lead)] != lead or target.dim() > len(lead) + 1:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}, give one class for each of the hidden states, or several "
            f"in one more dimension: {tuple(lead)}"
        )
    if not lead or parts < 1 or lead[0] % parts:
        raise ValueError(f"{name}: hidden has shape {tuple(hidden.shape)}, which makes no groups of {parts} sequences")
    several = target.dim() > len(lead)
    if several and (return_entropy or group is not None):
        raise ValueError(f"{name}: several classes a token go without return_entropy and group")
    h, weight, bias, group = local(name, hidden.reshape(-1, hidden.shape[-1]), weight, bias, group)
    y = target.long().reshape(h.shape[0], *target.shape[len(lead) :])
    check_head(name, h, weight, bias, y[:, 0] if several else y, None, group)
    check_targets(name, y.reshape(-1), weight.shape[0] * place(group)[0], ignore_index)
    valid = None
    if y.device.type == "cpu" if drop_ignored is None else drop_ignored:
        valid = (y != ignore_index).any(1) if several else y != ignore_index
        valid = None if y.device.type == "cpu" and bool(valid.all()) else valid
    options = temperature, ignore_index, accum_dtype, budget(memory), group_name(group)
    job = _Job(fn, y, parts, lead, valid, h.device, return_entropy, options)
    run = _with_kernels if devices.has_kernels(h) else _without_kernels
    return taken(lambda *given: run(job, *given), lambda *given: _reference(job, *given), h, weight, bias)
