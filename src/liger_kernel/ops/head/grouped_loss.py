r"""A scalar loss of the log-probabilities that a linear head gives to some tokens, without its
logits in memory.

    log p_tk = z_tk - lse_t,   z = (h·Wᵀ + b) / temperature            (of one class k a token, or of several)
    log R_t  = log Σ_{v ∉ S_t} p_tv                                    (if wanted: of all classes but some, S)
    loss     = Σ_groups fn(log p, log R of the group's tokens)         (a group: a pair of sequences, one, a token)
    dz_tv    = Σ_k g_tk·(1[v=k] - p_tv) + g_tR·(1[v ∉ S_t]/R_t - 1)·p_tv,   g = d loss / d log p

A preference or policy loss depends on the tokens of one group at a time. So a chunk of whole groups
asks ``fn`` for g and overwrites its logits with their gradient at once (`chunks`): three matmuls in
all, as for cross entropy, and the weight may be gone in backward (ZeRO-3). If a group is larger
than a chunk may be, the logits are computed twice."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import F, matrix
from liger_kernel.core.parallel import group_name, local, place
from liger_kernel.core.tile import parts
from liger_kernel.ops.head.chunks import plan_for, run_chunks
from liger_kernel.ops.head.cross_entropy import check_targets
from liger_kernel.ops.head.forward_gradients import gradient_in_forward, gradients_in_chunks
from liger_kernel.ops.head.logits import TokenOptions, token_gradient, token_loss
from liger_kernel.ops.head.planning import ROWS, budget
from liger_kernel.ops.head.token_log_probs import (
    ROWS_WITHOUT_KERNELS,
    check_head,
    compute_dtype,
    in_chunks,
    token_reference,
)


@dataclass(frozen=True)
class _Options:
    """The options of `linear_loss`, checked."""

    parts: int = 1
    temperature: float = 1.0
    ignore_index: int = -100
    return_entropy: bool = False
    accum_dtype: torch.dtype | None = None
    memory: int = -1
    group: str | None = None
    few: int = 2
    rest_of: int = 0

    @property
    def of_token(self):
        return TokenOptions(self.ignore_index, logit_scale=1.0 / self.temperature)


# ---- groups, and what the loss says of them ----


class _Groups:
    """Tokens in groups, and what ``fn`` returned for them.

    The tokens (parts·groups, ...) are numbered in this order. Group g has those of sequences g,
    groups + g, ..."""

    def __init__(self, fn, target, lead, valid, device, options):
        self.fn, self.lead, self.options = fn, lead, options
        self.autocast = devices.autocast_as_now(
            device
        )  # for fn: the head itself is computed without
        self.target = target.to(device)  # (tokens,) or (tokens, classes)
        self.top_k = target.dim() == 2
        self.columns = (
            (target.shape[1] + (options.rest_of > 0),) if self.top_k else ()
        )  # of the log-probabilities
        self.count, self.tokens = (
            lead[0] // options.parts,
            lead[1:].numel(),
        )  # tokens of one sequence
        self.loss, self.rest = torch.zeros((), device=device), []
        unit = options.parts * self.tokens  # ends[g + 1] - ends[g] is the length of group g
        self.ends = range(0, (self.count + 1) * unit, unit) if unit else [0] * (self.count + 1)
        self.kept = None  # the tokens in the order of the groups, without those that are dropped
        if options.parts > 1 or valid is not None:
            order = torch.arange(lead.numel(), device=target.device)
            order = order.view(options.parts, self.count, self.tokens).transpose(0, 1).reshape(-1)
            if valid is not None:
                order = order[valid[order]]
                lengths = valid.view(options.parts, self.count, self.tokens).sum((0, 2))
                self.ends = [0, *accumulate(lengths.tolist())]
            self.kept = order.to(device, non_blocking=True)

    def some(self, x, a, b):
        """A view of groups a to b: (groups, ...), or (parts, groups, ...) of several parts."""
        x = x.view(*self.lead, *x.shape[1:])
        return (
            x[a:b]
            if self.options.parts == 1
            else x.unflatten(0, (self.options.parts, self.count))[:, a:b]
        )

    def rows(self, a, b):
        """Tokens a to b in the order of the groups, as a slice or as indices."""
        return slice(a, b) if self.kept is None else self.kept[a:b]

    def of_groups(self, a, b):
        """The tokens of groups a to b."""
        return self.rows(self.ends[a], self.ends[b])

    def spans(self, first, rows):
        """(from, to): the groups of each chunk, of so many tokens at most or one group. One chunk
        if there are none."""
        spans, a = [], 0
        while a < self.count or not spans:
            most = rows if spans or not first else first
            b = min(max(bisect_right(self.ends, self.ends[a] + most) - 1, a + 1), self.count)
            spans.append((a, b))
            a = b
        return spans

    def ask(self, a, b, log_probs, entropy):
        """What groups a to b add to the loss."""
        with self.autocast():
            answer = self.fn(slice(a, b), log_probs, entropy)
        value, *rest = answer if isinstance(answer, tuple) else (answer,)
        self.loss = self.loss + value.detach()  # in fp64, if that is
        self.rest.append([x.detach() for x in rest])
        return value

    def ask_for_gradients(self, a, b, given, g):
        """The same, and fill ``g`` with the gradients of the log-probabilities and entropies
        ``given``, unless None."""
        with torch.enable_grad():
            leaves = [
                x if x is None else self.some(x, a, b).detach().requires_grad_(g is not None)
                for x in given
            ]
            value = self.ask(a, b, *leaves)
            if g is None or not value.requires_grad:
                return
            known = [k for k, x in enumerate(leaves) if x is not None]
            grads = torch.autograd.grad(value, [leaves[k] for k in known], allow_unused=True)
        for k, grad in zip(known, grads, strict=True):
            if grad is not None:
                self.some(g[k], a, b).copy_(grad)

    def outputs(self):
        """The loss; of what else ``fn`` returned, 0-d tensors are added up and others
        concatenated."""
        loss, columns = self.loss, zip(*self.rest, strict=True)
        self.loss = self.rest = (
            None  # the graph of the loss keeps this object (`_reference`): no reference cycle
        )
        return loss, *(torch.stack(c).sum(0) if c[0].dim() == 0 else torch.cat(c) for c in columns)


# ---- with kernels ----


class _LogProbs:
    """Each token's log-probability and entropy, from its logits, and then the gradient of these
    logits."""

    def __init__(self, groups, rows, classes, dtype, learning, bias):
        self.bias, self.groups, self.options, self.y = (
            bias,
            groups,
            groups.options.of_token,
            groups.target,
        )
        fp32 = dict(dtype=torch.float32, device=self.y.device)
        self.norm, self.stats = torch.ones(4, **fp32), torch.zeros(rows, 2, **fp32)
        self.log_probs = torch.zeros(rows, *groups.columns, **fp32)
        self.entropies = torch.zeros(rows, **fp32) if groups.options.return_entropy else None
        self.given = self.log_probs, self.entropies
        self.g = (
            [None if x is None else torch.zeros_like(x) for x in self.given] if learning else None
        )
        self.known = self.y != self.options.ignore_index
        fp16 = dtype == torch.float16  # which can't hold what is divided by the number of tokens
        self.divisor = self.known.sum().clamp(min=1) if fp16 else None

    def read(self, i, x):
        """Fill in the log-probabilities and entropies of tokens i, with logits x."""
        self.log_probs[i] = -self.sum_up(i, x)[0]

    def sum_up(self, i, x):
        """Compute the tokens' losses and statistics, and keep these and the entropies."""
        y, group = self.y[i], self.groups.options.group
        nll, stats = self.stats.new_empty(len(y)), self.stats.new_empty(len(y), 2)
        entropy = None if self.entropies is None else torch.empty_like(nll)
        token_loss(
            x,
            y,
            None,
            self.norm,
            self.options,
            nll,
            stats,
            entropy=entropy,
            group=group,
            bias=self.bias,
        )
        self.stats[i] = stats
        if entropy is not None:
            self.entropies[i] = entropy
        return nll, stats

    def incoming(self, k, i):
        return self.g[k][i] if self.divisor is None else self.g[k][i] * self.divisor

    def write(self, i, x):
        """Overwrite the logits x of tokens i with their gradient."""
        g_entropy, entropy = (
            (None, None) if self.entropies is None else (self.incoming(1, i), self.entropies[i])
        )
        token_gradient(
            -self.incoming(0, i),
            x,
            self.y[i],
            None,
            self.norm,
            self.stats[i],
            x,
            self.options,
            g_entropy,
            None,
            entropy,
            self.groups.options.group,
            self.bias,
        )


def _log_softmax_of_few(z, counted):
    """z (T, K) minus the log-sum-exp of those that are ``counted``.

    1 is not added to and subtracted from the others' share, so that both are exact: log p of a sure
    class is
    -log(1 + the others), and its gradient is a sum over the others.
    """
    top, at = z.masked_fill(~counted, -torch.inf).max(1, keepdim=True)
    z = (z - top).scatter(1, at, 0)
    others = z.masked_fill(~counted, -torch.inf).exp().scatter(1, at, 0)
    return z - others.sum(1, keepdim=True).log1p()


def _equal(classes):
    """-> which of a token's classes (T, K) are equal (T, K, K), and which are there for the first
    time (T, K)."""
    equal = classes[:, :, None] == classes[:, None, :]
    return equal, ~equal.tril(-1).any(2)


def _counted(known, first, z):
    """Which of z (T, K + 1) the log-sum-exp of all classes consists of: the known of the ``first``,
    and the rest."""
    counted = torch.zeros_like(z, dtype=torch.bool)
    counted[:, : first.shape[1]] = known & _equal(first)[1]
    counted[:, -1] = True
    return counted


class _TopK(_LogProbs):
    """The same with several classes a token. A class that is ignored is replaced by the token's
    first other one.

    The logits of the first ``rest_of`` classes are -inf while the others are summed, so that a rest
    keeps its digits however small it is. The statistics are those of the rest. Without ``rest_of``
    it is all classes."""

    def __init__(self, groups, rows, classes, dtype, learning, bias):
        super().__init__(groups, rows, classes, dtype, learning, bias)
        self.first = groups.options.rest_of
        self.some = self.known[:, : self.first].any(
            1, keepdim=True
        )  # or a token's rest is all classes
        self.y = self.of_first(self.known, self.y).squeeze(1)
        of_token = groups.target.where(self.known, self.y[:, None])
        self.classes = of_token.where((of_token >= 0) & (of_token < classes), 0)

    @staticmethod
    def of_first(known, x):
        """x (tokens, 1) of each token's first class that is not ignored."""
        return x.gather(1, known.int().argmax(1, keepdim=True))

    def read(self, i, x):
        classes, known, n = self.classes[i], self.known[i], self.first
        z = _gathered(x, classes)
        first, kept, some = classes[:, :n], z[:, :n], self.some[i]
        if n:
            _scatter(x, first, torch.where(some, -torch.inf, kept))
        top, log_sum = self.sum_up(i, x)[1].split(1, 1)
        if n:
            _scatter(x, first, kept)
            self.stats[i] = torch.cat((top, log_sum), 1).where(
                top != -torch.inf, 0
            )  # no rest, so no NaN of inf - inf
        z = z.float() if self.bias is None else z.float() + self.bias[classes].to(z.dtype)
        z = z * self.options.logit_scale
        highest = torch.cat((z[:, :n], top), 1).amax(1, keepdim=True)
        z = torch.cat((z - highest, (top - highest) + log_sum), 1)
        z, rest = _log_softmax_of_few(z, _counted(some, first, z)).tensor_split((-1,), 1)
        z = torch.where(
            known & (classes == self.groups.target[i]), z, torch.where(known, torch.nan, 0.0)
        )
        self.log_probs[i] = torch.cat((z, rest.where(known.any(1, keepdim=True), 0)), 1) if n else z

    def write(self, i, x):
        known, classes, n, K = self.known[i], self.classes[i], self.first, self.classes.shape[1]
        log_probs, g = self.log_probs[i], self.incoming(0, i)
        d, log_p = g[:, :K].masked_fill(~known, 0), log_probs[:, :K]
        log_p = log_p.where(known, self.of_first(known, log_p))
        p = log_p.exp()
        equal, new = _equal(classes)
        inside = equal[:, :, :n].any(2) & self.some[i]
        of_first = p[:, :n].where(new[:, :n] & self.some[i], 0)
        # 1 - p and Σd - d are sums of the others, or a sure class would have the rounding of 1
        log_rest, d_rest = (log_probs[:, K:], g[:, K:]) if n else (g.new_zeros(()), g.new_zeros(()))
        g_rest = d_rest * of_first.sum(1, keepdim=True) - log_rest.exp() * d.sum(1, keepdim=True)
        token_gradient(
            g.new_zeros(()),
            x,
            self.y[i],
            None,
            self.norm,
            self.stats[i],
            x,
            self.options,
            None,
            g_rest.squeeze(1),
            bias=self.bias,
        )
        equal, unequal = equal.to(d.dtype), (~equal).to(d.dtype)
        of_class, of_others = (
            (equal @ d[:, :, None]).squeeze(2),
            (unequal @ d[:, :, None]).squeeze(2) + d_rest,
        )
        p_others = (unequal[:, :, :n] @ of_first[:, :, None]).squeeze(2) + log_rest.exp()
        of_rest = (log_p - log_rest).exp()
        dz = torch.where(inside, of_class * p_others - p * of_others, of_class + of_rest * g_rest)
        _scatter(x, classes, (dz * self.options.logit_scale).where(known.any(1, keepdim=True), 0))


def _gathered(x, classes):
    """The logits of some classes (T, K), of x in one part or two."""
    x, more, split, V = parts(x)
    if more is None:
        return x.gather(1, classes)
    first, later = classes.clamp(max=split - 1), (classes - split).clamp(min=0)
    return torch.where(classes < split, x.gather(1, first), more.gather(1, later))


def _scatter(x, classes, values):
    """Write values (T, K) to these logits. A class that a token has twice has the same value both
    times."""
    x, more, split, V = parts(x)
    if more is None:
        x.scatter_(1, classes, values.to(x.dtype))
        return
    for part, at, inside in (
        (x, classes, classes < split),
        (more, classes - split, classes >= split),
    ):
        # a class that is not in this part is replaced by one that is; a token that has none writes
        # what is there
        other = inside.int().argmax(1, keepdim=True)
        at = at.where(inside, at.gather(1, other)).clamp(0, part.shape[1] - 1)
        new = values.where(inside, values.gather(1, other)).to(x.dtype)
        part.scatter_(1, at, new.where(inside.any(1, keepdim=True), part.gather(1, at)))


def _fitted(plan, lengths, channels, dtype):
    """The plan with room for chunks of so many tokens."""
    first, *later = lengths if plan.first and lengths else (0, *lengths)
    holds = (
        channels * plan.accum_dtype.itemsize // dtype.itemsize
    )  # tokens whose logits are as large as dW
    separate = plan.separate_logits and first <= holds
    return replace(plan, first=first, rows=max(later, default=0), separate_logits=separate)


def _with_kernels(groups, h, w, b, needs):
    """`gradient_in_forward`'s ``run``."""
    dtype, options, ends, learning = compute_dtype(h, w), groups.options, groups.ends, any(needs)
    values = (_TopK if groups.top_k else _LogProbs)(
        groups, h.shape[0], w.shape[0], dtype, learning, b
    )
    even = isinstance(ends, range)
    unit = (
        ends.step if even else max((n - m for m, n in zip(ends, ends[1:], strict=False)), default=0)
    )
    most = (
        max(2 * ROWS, 2 * h.shape[1])
        if options.memory < 0
        else options.memory // (w.shape[0] * dtype.itemsize)
    )

    def planned(need_w, unit=64):
        return plan_for(
            h, w, dtype, options.accum_dtype, options.memory, need_w, ends[-1], unit, options.few
        )

    def run(plan, to_gradient, needs, chunks=None):
        chunks = (
            [groups.rows(s.start, s.stop) for s in plan.chunks(ends[-1])]
            if chunks is None
            else chunks
        )
        return run_chunks(h, w, None, dtype, plan, to_gradient, needs, options.group, chunks)

    if unit > most or not learning:
        run(planned(False), values.read, [False] * 3)
        groups.ask_for_gradients(0, groups.count, values.given, values.g)
        grads = run(planned(needs[1]), values.write, needs) if learning else (None,) * 3
        return groups.outputs(), grads, values.divisor

    plan = planned(needs[1], unit if even and unit > 1 else 64)
    spans = (
        groups.spans(plan.first and max(plan.first, unit), max(plan.rows, unit)) if ends[-1] else []
    )
    if not even:
        plan = _fitted(plan, [ends[b] - ends[a] for a, b in spans], h.shape[1], dtype)
    todo = iter(spans)

    def to_gradient(i, x):
        values.read(i, x)
        groups.ask_for_gradients(*next(todo), values.given, values.g)
        values.write(i, x)

    if not spans:
        groups.ask_for_gradients(0, groups.count, values.given, values.g)
    grads = run(plan, to_gradient, needs, [groups.of_groups(*span) for span in spans])
    return groups.outputs(), grads, values.divisor


# ---- without ----


def _log_probs(groups, h, w, b, y):
    """-> log-probabilities like y, entropies."""
    options = groups.options
    if not groups.top_k:
        nll, _, entropy, *_ = token_reference(h, w, b, y, None, options.of_token, options.group)
        return -nll, entropy if options.return_entropy else None
    dtype, known, n = compute_dtype(h, w), y != options.ignore_index, options.rest_of
    z = F.linear(h.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
    z = (z if z.dtype == torch.float64 else z.float()) / options.temperature
    z = z.where(known.any(1, keepdim=True), 0)
    if not n:
        return z.log_softmax(1).gather(1, y.where(known, 0)).where(known, 0), None
    first, V = y[:, :n].where(known[:, :n], z.shape[1]), z.shape[1]
    inside = torch.zeros(len(y), V + 1, dtype=torch.bool, device=z.device).scatter(1, first, True)[
        :, :V
    ]
    others = z.masked_fill(inside, -torch.inf)
    nothing = (others == -torch.inf).all(1, keepdim=True)
    rest = (
        others.masked_fill(nothing, 0).logsumexp(1, keepdim=True).masked_fill(nothing, -torch.inf)
    )
    z = torch.cat((z.gather(1, y.where(known, 0)), rest), 1)
    known = torch.cat((known, known.any(1, keepdim=True)), 1)
    return _log_softmax_of_few(z, _counted(known[:, :n], first, z)).where(known, 0), None


def _reference(groups, h, w, b):
    """The loss of all groups at once, and what else ``fn`` returns."""
    given = in_chunks(lambda h, y: _log_probs(groups, h, w, b, y), h, groups.target)
    every = 0, groups.count
    answer = groups.fn(slice(*every), *(x if x is None else groups.some(x, *every) for x in given))
    value, *rest = answer if isinstance(answer, tuple) else (answer,)
    return value + torch.zeros((), device=h.device), *(x.detach() for x in rest)


def _without_kernels(groups, h, w, b, needs):
    """`gradient_in_forward`'s ``run`` in PyTorch, a few groups at a time."""
    spans = groups.spans(0, ROWS_WITHOUT_KERNELS)
    todo = iter(spans)

    def loss(rows, *head):
        span, given = next(todo), []
        for x in _log_probs(groups, *head, groups.target[rows]):
            if x is not None:
                whole = x.new_zeros(h.shape[0], *x.shape[1:])
                whole[rows] = x
                x = groups.some(whole, *span)
            given.append(x)
        return (groups.ask(*span, *given),)

    chunks = [groups.of_groups(*span) for span in spans]
    grads = gradients_in_chunks(loss, chunks, h, w, b, needs, constant=True)[1]
    return groups.outputs(), grads, None


# torch.compiler.disable, which imports torch._dynamo when it is called: a second later
@torch._disable_dynamo
def linear_loss(
    fn,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    parts: int = 1,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    accum_dtype: torch.dtype | None = None,
    memory: int | str = "auto",
    drop_ignored: bool | None = None,
    group: object = None,
    few: int = 2,
    rest_of: int = 0,
):
    """A scalar loss of token log-probabilities under a linear head, whose logits are never all in
    memory.

    Its gradients for hidden, weight and bias are computed in this call: the weight may change or go
    before backward.

    Args:
        fn: ``fn(part, log_probs, entropy) -> value`` or ``(value, *others)``, called once for each
        chunk. ``part`` is
            the slice of the groups whose log-probabilities (groups, ...) it is given: fp32,
            differentiable, 0 where the
            target is ``ignore_index``. value: 0-d, what these groups add to the loss. It must not
            depend on how many
            groups are in a call.
        hidden: (groups, ..., H). A group is the tokens on which the loss depends together: hidden
        states (tokens, H)
            for a loss of single tokens, (B, T, H) for one of sequences.
        weight, bias: (V, H) and (V,) of the head.
        target: (groups, ...) class indices, which may be on the CPU; or (groups, ..., K), K classes
        for each of the
            hidden states: then the log-probabilities have that shape, too.
        parts: the number of sequences in a group: those of ``hidden.unflatten(0, (parts,
        groups))[:, group]``. fn gets
            (parts, groups, ...).
        temperature: the logits are divided by it.
        ignore_index: target of what is left out.
        return_entropy: fn is given each token's entropy, too; otherwise None.
        accum_dtype, drop_ignored, group: as in `linear_token_loss`.
        memory: likewise. If the logits of a group are larger than that (for "auto": than those of
        4,096 tokens or of
            twice the hidden size), they are computed twice, once for fn and once for the gradient.
        few: 2 or 3 chunks for "auto", unless it takes one or many. 3 need less memory and a little
        more time.
        rest_of: how many of a token's K classes have a rest. fn gets one more column: the
        log-probability of all
            classes but the first ``rest_of``. It is exact however small, unlike 1 - p. 0: no such
            column.

    Returns:
        The loss, 0-d, and fn's others without gradients: 0-d ones are added up, the rest
        concatenated.

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
    if few not in (2, 3) or not isinstance(few, int):
        raise ValueError(f"{name}: few is {few!r}, give 2 or 3 chunks")
    lead = hidden.shape[:-1]
    if target.shape[: len(lead)] != lead or target.dim() > len(lead) + 1:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}, give one class for each of the hidden states, or several "
            f"in one more dimension: {tuple(lead)}"
        )
    if not lead or parts < 1 or lead[0] % parts:
        raise ValueError(
            f"{name}: hidden has shape {tuple(hidden.shape)}, which makes no groups of {parts} sequences"
        )
    top_k = target.dim() > len(lead)
    if top_k and (return_entropy or group is not None):
        raise ValueError(
            f"{name}: target has several classes a token, give it without return_entropy and group"
        )
    if not isinstance(rest_of, int) or not 0 <= rest_of <= (target.shape[-1] if top_k else 0):
        raise ValueError(
            f"{name}: rest_of is {rest_of!r}, give at most the number of classes of a token"
        )
    h, weight, bias, group = local(name, matrix(hidden), weight, bias, group)
    if top_k and group is not None:
        raise ValueError(f"{name}: target has several classes a token, give weight.full_tensor()")
    y = target.long().reshape(h.shape[0], *target.shape[len(lead) :])
    check_head(name, h, weight, bias, y[:, 0] if top_k else y, None, group)
    check_targets(name, y.reshape(-1), weight.shape[0] * place(group)[0], ignore_index)
    valid = None
    if y.device.type == "cpu" if drop_ignored is None else drop_ignored:
        valid = (y != ignore_index).any(1) if top_k else y != ignore_index
        valid = None if y.device.type == "cpu" and bool(valid.all()) else valid
    options = _Options(
        parts,
        temperature,
        ignore_index,
        return_entropy,
        accum_dtype,
        budget(memory),
        group_name(group),
        few,
        rest_of,
    )
    groups = _Groups(fn, y, lead, valid, h.device, options)
    run = partial(_with_kernels if devices.has_kernels(h) else _without_kernels, groups)
    return gradient_in_forward(run, partial(_reference, groups), h, weight, bias)
