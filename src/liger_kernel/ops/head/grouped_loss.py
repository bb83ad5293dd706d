r"""A scalar loss of the log-probabilities that a linear head gives to some tokens.

    log p_tk = z_tk - lse_t,   z = (h·Wᵀ + b) / temperature     (of one class k a token, or several)
    log R_t  = log Σ_{v ∉ S_t} p_tv                      (if asked for: of all classes but some, S)
    loss     = Σ_groups fn(log p, log R of the group's tokens)
    dz_tv    = Σ_k g_tk·(1[v=k] - p_tv) + g_tR·(1[v ∉ S_t]/R_t - 1)·p_tv,   g = d loss / d log p

A group is a pair of sequences, one sequence, or one token.

A preference or policy loss depends on the tokens of one group at a time. So the logits are never
all in memory:

1. `linear_loss` checks the arguments, and puts the tokens into `TokenGroups`.
2. A chunk of whole groups computes its logits, and from them its log-probabilities
   (`grouped_log_probs`).
3. It asks ``fn`` for the loss of these groups, and autograd for g.
4. It overwrites the logits with their gradient at once, and adds that to dh, dW and db (`chunks`).

That is three matmuls in all, as for cross entropy, and the weight may be gone in backward (ZeRO-3).
If a group is larger than a chunk may be, the logits are computed twice.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import F, flatten_to_2d
from liger_kernel.core.parallel import group_name, size_and_rank, to_local_shards
from liger_kernel.ops.head.chunks import plan_for, run_chunks
from liger_kernel.ops.head.cross_entropy import check_targets
from liger_kernel.ops.head.forward_gradients import gradient_in_forward, gradients_in_chunks
from liger_kernel.ops.head.grouped_log_probs import (
    TokenLogProbs,
    TopKLogProbs,
    classes_and_rest,
    log_softmax_of_few,
)
from liger_kernel.ops.head.linear_head import HeadOptions
from liger_kernel.ops.head.linear_head_reference import (
    ROWS_WITHOUT_KERNELS,
    compute_dtype,
    run_reference_in_chunks,
    token_reference,
)
from liger_kernel.ops.head.logits import TokenOptions
from liger_kernel.ops.head.planning import CHUNK_TOKENS, divides_at_end, parse_memory
from liger_kernel.ops.head.token_log_probs import check_head


class GroupedOptions(NamedTuple):
    """The options of `linear_loss`, checked."""

    head: HeadOptions
    temperature: float = 1.0
    parts: int = 1
    return_entropy: bool = False
    auto_chunks: int = 2
    rest_of: int = 0


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
    """Compute a scalar loss of token log-probabilities under a linear head.

    The logits are never all in memory. The gradients for hidden, weight and bias are computed in
    this call: the weight may change or go before backward.

    Args:
        fn: ``fn(part, log_probs, entropy)`` returns ``value`` or ``(value, *others)``. It is called
            once for each chunk. ``part`` is the slice of the groups whose log-probabilities
            (groups, ...) it is given: fp32, differentiable, 0 where the target is ``ignore_index``.
            value: 0-d, what these groups add to the loss. It must not depend on how many groups are
            in a call.
        hidden: (groups, ..., H). A group is the tokens on which the loss depends together: hidden
            states (tokens, H) for a loss of single tokens, (B, T, H) for one of sequences.
        weight, bias: (V, H) and (V,) of the head.
        target: (groups, ...) class indices, which may be on the CPU; or (groups, ..., K), K classes
            for each of the hidden states: then the log-probabilities have that shape, too.
        parts: the number of sequences in a group: those of
            ``hidden.unflatten(0, (parts, groups))[:, group]``. fn gets (parts, groups, ...).
        temperature: the logits are divided by it.
        ignore_index: target of what is left out.
        return_entropy: fn is given each token's entropy, too; otherwise None.
        accum_dtype, drop_ignored, group: as in `linear_token_loss`.
        memory: likewise. If the logits of a group are larger than that (for "auto": than those of
            4,096 tokens or of twice the hidden size), they are computed twice, once for fn and once
            for the gradient.
        few: 2 or 3 chunks for "auto", unless it takes one or many. 3 need less memory and a little
            more time.
        rest_of: how many of a token's K classes have a rest. fn gets one more column: the
            log-probability of all classes but the first ``rest_of``. It is exact however small,
            unlike 1 - p. 0: no such column.

    Returns:
        The loss, 0-d, and fn's others without gradients: 0-d ones are added up, the rest
        concatenated.

    Raises:
        ValueError, TypeError: shapes or options that don't fit.
    """
    name = "linear_loss"
    check.floats(name, dict(hidden=hidden))
    check.integers(name, dict(target=target))
    temperature = check.positive(name, "temperature", temperature)
    ignore_index = check.integer(name, "ignore_index", ignore_index)
    check.dtype(name, "accum_dtype", accum_dtype)
    leading_shape = hidden.shape[:-1]
    is_top_k = target.dim() > len(leading_shape)
    _check_shapes(name, hidden, target, parts, few, rest_of)
    if is_top_k and (return_entropy or group is not None):
        raise ValueError(
            f"{name}: target has several classes a token, give it without return_entropy and group"
        )
    h, weight, bias, group = to_local_shards(name, flatten_to_2d(hidden), weight, bias, group)
    if is_top_k and group is not None:
        raise ValueError(f"{name}: target has several classes a token, give weight.full_tensor()")
    y = target.long().reshape(h.shape[0], *target.shape[len(leading_shape) :])
    check_head(name, h, weight, bias, y[:, 0] if is_top_k else y, None, group)
    check_targets(name, y.reshape(-1), weight.shape[0] * size_and_rank(group)[0], ignore_index)
    options = GroupedOptions(
        HeadOptions(
            TokenOptions(ignore_index, logit_scale=1.0 / temperature),
            compute_dtype(h, weight),
            accum_dtype,
            parse_memory(memory),
            group_name(group),
        ),
        temperature,
        parts,
        return_entropy,
        few,
        rest_of,
    )
    kept = _kept_tokens(y, ignore_index, drop_ignored)
    groups = TokenGroups(fn, y, leading_shape, kept, h.device, options)
    run = partial(_run_with_kernels if devices.has_kernels(h) else _run_without_kernels, groups)
    return gradient_in_forward(run, partial(_reference, groups), h, weight, bias)


def _check_shapes(name, hidden, target, parts, few, rest_of):
    leading_shape = hidden.shape[:-1]
    num_dims = len(leading_shape)
    if few not in (2, 3) or not isinstance(few, int):
        raise ValueError(f"{name}: few is {few!r}, give 2 or 3 chunks")
    if target.shape[:num_dims] != leading_shape or target.dim() > num_dims + 1:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}, give one class for each of the "
            f"hidden states, or several in one more dimension: {tuple(leading_shape)}"
        )
    if not leading_shape or parts < 1 or leading_shape[0] % parts:
        raise ValueError(
            f"{name}: hidden has shape {tuple(hidden.shape)}, "
            f"which makes no groups of {parts} sequences"
        )
    max_rest_of = target.shape[-1] if target.dim() > num_dims else 0
    if not isinstance(rest_of, int) or not 0 <= rest_of <= max_rest_of:
        raise ValueError(
            f"{name}: rest_of is {rest_of!r}, give at most the number of classes of a token"
        )


def _kept_tokens(target, ignore_index, drop_ignored):
    """Return a mask of the tokens that are not ignored, or None if all tokens are kept."""
    on_host = target.device.type == "cpu"
    if not (on_host if drop_ignored is None else drop_ignored):
        return None
    valid = target != ignore_index
    if target.dim() == 2:
        valid = valid.any(1)
    return None if on_host and bool(valid.all()) else valid


# ---- groups, and the loss of them ----


class TokenGroups:
    """The tokens of a loss in groups, and the values that ``fn`` has returned for them.

    The tokens (parts·groups, ...) are numbered in this order. Group g has the tokens of sequences
    g, groups + g, ...
    """

    def __init__(self, fn, target, leading_shape, kept, device, options):
        self.fn = fn
        self.leading_shape = leading_shape
        self.options = options
        # for fn: the head itself is computed without
        self.autocast = devices.snapshot_autocast(device)
        self.target = target.to(device)  # (tokens,) or (tokens, classes)
        self.is_top_k = target.dim() == 2
        self.classes_shape = ()  # of a token's log-probabilities
        if self.is_top_k:
            self.classes_shape = (target.shape[1] + (options.rest_of > 0),)
        self.num_groups = leading_shape[0] // options.parts
        sequence_length = leading_shape[1:].numel()
        self.loss = torch.zeros((), device=device)
        self.extra_outputs = []  # of fn: a list for each call
        # ends[g + 1] - ends[g] is the length of group g
        length = options.parts * sequence_length
        if length:
            self.ends = range(0, (self.num_groups + 1) * length, length)
        else:
            self.ends = [0] * (self.num_groups + 1)
        # the tokens in the order of the groups, without those that are dropped; None: as numbered
        self.order = None
        if options.parts > 1 or kept is not None:
            grid = options.parts, self.num_groups, sequence_length
            order = torch.arange(leading_shape.numel(), device=target.device)
            order = order.view(grid).transpose(0, 1).reshape(-1)
            if kept is not None:
                order = order[kept[order]]
                lengths = kept.view(grid).sum((0, 2))
                self.ends = [0, *accumulate(lengths.tolist())]
            self.order = order.to(device, non_blocking=True)

    def view_groups(self, x, start, stop):
        """Return a view of some groups: (groups, ...), or (parts, groups, ...) of several parts."""
        x = x.view(*self.leading_shape, *x.shape[1:])
        if self.options.parts == 1:
            return x[start:stop]
        return x.unflatten(0, (self.options.parts, self.num_groups))[:, start:stop]

    def rows(self, start, stop):
        """Return some tokens in the order of the groups, as a slice or as indices."""
        return slice(start, stop) if self.order is None else self.order[start:stop]

    def group_rows(self, start, stop):
        """Return the tokens of some groups, as a slice or as indices."""
        return self.rows(self.ends[start], self.ends[stop])

    def spans(self, first, rows):
        """Return the (start, stop) of the groups of each chunk. One chunk if there are no groups.

        A chunk has ``rows`` tokens at most, the first one ``first`` if that is not 0; or one group.
        """
        spans = []
        start = 0
        while start < self.num_groups or not spans:
            max_tokens = rows if spans or not first else first
            stop = bisect_right(self.ends, self.ends[start] + max_tokens) - 1
            stop = min(max(stop, start + 1), self.num_groups)
            spans.append((start, stop))
            start = stop
        return spans

    def call_fn(self, start, stop, log_probs, entropy):
        """Return the loss of some groups, and add it to that of all."""
        with self.autocast():
            outputs = self.fn(slice(start, stop), log_probs, entropy)
        loss, *extra_outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self.loss = self.loss + loss.detach()  # in fp64, if that is
        self.extra_outputs.append([x.detach() for x in extra_outputs])
        return loss

    def call_fn_for_gradients(self, start, stop, values, grads):
        """Call fn for some groups, and fill ``grads`` with the gradients of their values.

        ``values`` are log-probabilities and entropies of all tokens. ``grads`` may be None.
        """
        with torch.enable_grad():
            leaves = []
            for x in values:
                if x is not None:
                    x = self.view_groups(x, start, stop).detach()
                    x.requires_grad_(grads is not None)
                leaves.append(x)
            loss = self.call_fn(start, stop, *leaves)
            if grads is None or not loss.requires_grad:
                return
            present = [k for k, x in enumerate(leaves) if x is not None]
            leaf_grads = torch.autograd.grad(loss, [leaves[k] for k in present], allow_unused=True)
        for k, grad in zip(present, leaf_grads, strict=True):
            if grad is not None:
                self.view_groups(grads[k], start, stop).copy_(grad)

    def outputs(self):
        """Return the loss and fn's other outputs: 0-d ones are added up, others concatenated."""
        loss = self.loss
        columns = zip(*self.extra_outputs, strict=True)
        outputs = [torch.stack(c).sum(0) if c[0].dim() == 0 else torch.cat(c) for c in columns]
        # the graph of the loss keeps this object (`_reference`): no reference cycle
        self.loss = self.extra_outputs = None
        return loss, *outputs


# ---- with kernels ----


def _run_with_kernels(groups, h, w, b, needs):
    """Compute the loss and its gradients: the ``run`` of `gradient_in_forward`."""
    options = groups.options
    head = options.head
    ends = groups.ends
    needs_grad = any(needs)
    log_probs_class = TopKLogProbs if groups.is_top_k else TokenLogProbs
    undivided = divides_at_end(h, w, head.dtype)
    log_probs = log_probs_class(groups, h.shape[0], w.shape[0], undivided, needs_grad, b)
    even = isinstance(ends, range)
    if even:
        largest_group = ends.step
    else:
        lengths = (stop - start for start, stop in zip(ends, ends[1:], strict=False))
        largest_group = max(lengths, default=0)
    if head.memory < 0:
        max_tokens = max(2 * CHUNK_TOKENS, 2 * h.shape[1])
    else:
        max_tokens = head.memory // (w.shape[0] * head.dtype.itemsize)

    def plan_chunks(need_w, unit=64):
        return plan_for(
            h,
            w,
            head.dtype,
            head.accum_dtype,
            head.memory,
            need_w,
            tokens=ends[-1],
            unit=unit,
            auto_chunks=options.auto_chunks,
        )

    def run(plan, function, needs, chunks=None):
        if chunks is None:
            chunks = [groups.rows(tokens.start, tokens.stop) for tokens in plan.chunks(ends[-1])]
        return run_chunks(h, w, None, head.dtype, plan, function, needs, head.group, chunks)

    def call_fn(start, stop):
        groups.call_fn_for_gradients(start, stop, log_probs.values, log_probs.grads)

    if largest_group > max_tokens or not needs_grad:
        # all log-probabilities first, and then the logits again
        run(plan_chunks(False), log_probs.read_logits, [False] * 3)
        call_fn(0, groups.num_groups)
        grads = (None,) * 3
        if needs_grad:
            grads = run(plan_chunks(needs[1]), log_probs.write_gradient, needs)
        return groups.outputs(), grads, log_probs.divisor

    plan = plan_chunks(needs[1], largest_group if even and largest_group > 1 else 64)
    spans = []
    if ends[-1]:
        first = plan.first and max(plan.first, largest_group)
        spans = groups.spans(first, max(plan.rows, largest_group))
    if not even:
        lengths = [ends[stop] - ends[start] for start, stop in spans]
        plan = _fit_plan(plan, lengths, h.shape[1], head.dtype)
    next_spans = iter(spans)

    def logits_to_gradient(rows, x):
        log_probs.read_logits(rows, x)
        call_fn(*next(next_spans))
        log_probs.write_gradient(rows, x)

    if not spans:
        call_fn(0, groups.num_groups)
    grads = run(plan, logits_to_gradient, needs, [groups.group_rows(*span) for span in spans])
    return groups.outputs(), grads, log_probs.divisor


def _fit_plan(plan, lengths, channels, dtype):
    """Return the plan with room for chunks of these numbers of tokens."""
    first, *later = lengths if plan.first and lengths else (0, *lengths)
    dw_tokens = channels * plan.accum_dtype.itemsize // dtype.itemsize  # whose logits fill dW
    separate = plan.separate_logits and first <= dw_tokens
    return replace(plan, first=first, rows=max(later, default=0), separate_logits=separate)


# ---- without kernels ----


def _run_without_kernels(groups, h, w, b, needs):
    """Do what `_run_with_kernels` does in PyTorch, a few groups at a time."""
    spans = groups.spans(0, ROWS_WITHOUT_KERNELS)
    next_spans = iter(spans)

    def chunk_loss(rows, *head):
        span = next(next_spans)
        values = []
        for x in _reference_log_probs(groups, *head, groups.target[rows]):
            if x is not None:
                all_rows = x.new_zeros(h.shape[0], *x.shape[1:])
                all_rows[rows] = x
                x = groups.view_groups(all_rows, *span)
            values.append(x)
        return (groups.call_fn(*span, *values),)

    chunks = [groups.group_rows(*span) for span in spans]
    head = h, w, b
    autocast = contextlib.nullcontext()
    if divides_at_end(h, w, groups.options.head.dtype):
        # in fp32: in fp16, gradients that are divided before backward multiplies them by a scaler's
        # factor vanish, and those that only backward divides overflow
        head = [x if x is None else x.to(torch.promote_types(x.dtype, torch.float32)) for x in head]
        autocast = devices.without_autocast(h)
    with autocast:
        grads = gradients_in_chunks(chunk_loss, chunks, *head, needs, constant=True)[1]
    return groups.outputs(), grads, None


def _reference(groups, h, w, b):
    """Return the loss of all groups at once, and fn's other outputs."""

    def reference_chunk(h, target):
        return _reference_log_probs(groups, h, w, b, target)

    log_probs, entropy = run_reference_in_chunks(reference_chunk, h, groups.target)
    log_probs = groups.view_groups(log_probs, 0, groups.num_groups)
    if entropy is not None:
        entropy = groups.view_groups(entropy, 0, groups.num_groups)
    outputs = groups.fn(slice(0, groups.num_groups), log_probs, entropy)
    loss, *extra_outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return loss + torch.zeros((), device=h.device), *(x.detach() for x in extra_outputs)


def _reference_log_probs(groups, h, w, b, target):
    """Return the log-probabilities of the targets, in their shape, and the entropies or None."""
    options = groups.options
    token_options = options.head.token
    if not groups.is_top_k:
        nll, _, entropy, *_ = token_reference(
            h, w, b, target, None, token_options, options.head.group
        )
        return -nll, entropy if options.return_entropy else None
    dtype = compute_dtype(h, w)
    n = options.rest_of
    valid = target != token_options.ignore_index
    z = F.linear(h.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
    z = (z if z.dtype == torch.float64 else z.float()) / options.temperature
    z = z.where(valid.any(1, keepdim=True), 0)
    classes = target.where(valid, 0)
    if not n:
        return z.log_softmax(1).gather(1, classes).where(valid, 0), None
    V = z.shape[1]
    excluded = target[:, :n].where(valid[:, :n], V)  # V: no class
    is_excluded = torch.zeros(len(target), V + 1, dtype=torch.bool, device=z.device)
    is_excluded = is_excluded.scatter(1, excluded, True)[:, :V]
    rest_logits = z.masked_fill(is_excluded, -torch.inf)
    is_empty = (rest_logits == -torch.inf).all(1, keepdim=True)
    rest = rest_logits.masked_fill(is_empty, 0).logsumexp(1, keepdim=True)
    rest = rest.masked_fill(is_empty, -torch.inf)
    z = torch.cat((z.gather(1, classes), rest), 1)
    valid = torch.cat((valid, valid.any(1, keepdim=True)), 1)
    summands = classes_and_rest(valid[:, :n], excluded, z)
    return log_softmax_of_few(z, summands).where(valid, 0), None
