r"""Medusa: heads beside a model's own that predict further tokens (arXiv:2401.10774), without their
logits in memory.

    X_k = h_k·W_kᵀ + b_k        h_k: the model's hidden states, or what head k has made of them
    loss_k = Σ_t -log softmax(X_k[t])[y[t + k + 1]] / n_k
    loss = Σ_k c_k·loss_k       c_k = 0.8^k

Head 0 is the model's own, Medusa's are 1, 2, ... The gradients are computed in forward, one head
after the other. Heads that share hidden states or a weight share its gradient, too: each adds to it
in place, as autograd would. A head's tokens are divided by n_k / c_k, so that its coefficient costs
no rounding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import F, Function, keep, kept, kept_inputs, matrix
from liger_kernel.ops.head.cross_entropy import check_options, check_targets
from liger_kernel.ops.head.forward_gradients import scaled
from liger_kernel.ops.head.linear_cross_entropy import (
    fused_linear_cross_entropy_forward,
    fused_linear_cross_entropy_in_chunks,
)
from liger_kernel.ops.head.planning import budget
from liger_kernel.ops.head.token_log_probs import check_head

DECAY = 0.8  # of the coefficients, from head to head
NAMES = (
    "ignore_index", "label_smoothing", "softcap", "logit_scale", "return_token_accuracy", "accum_dtype", "memory",
)  # fmt: skip


class MedusaFunction(Function):
    """``apply(*tensors, targets (N, M), items (N,), heads, options) -> loss, losses (N,),
    accuracies (N,) or None``.

    ``heads`` says of each where in ``tensors`` its hidden states, weight and bias (or None) are,
    and its coefficient. Each of the tensors is there once. ``options`` are those of `NAMES`."""

    @staticmethod
    def reference(*args):
        *tensors, targets, items, heads, options = args
        found = []
        for k, (*at, _) in enumerate(heads):
            h, w, b = (None if i is None else tensors[i] for i in at)
            given = dict(zip(NAMES, options, strict=True))
            found.append(
                fused_linear_cross_entropy_in_chunks(
                    h, w, targets[k], b, num_items=items[k], **given
                )
            )
        losses, _, accuracies, _ = zip(*found, strict=True)
        total = sum(c * loss for (*_, c), loss in zip(heads, losses, strict=True))
        return (
            total,
            torch.stack(losses).detach(),
            None if accuracies[0] is None else torch.stack(accuracies),
        )

    @staticmethod
    def forward(ctx, *args):
        *tensors, targets, items, heads, options = args
        given = dict(zip(NAMES, options, strict=True))
        needs = ctx.needs_input_grad[: len(tensors)]
        grads, total, losses, accuracies, divisor = [None] * len(tensors), 0, [], [], None
        for k, (*at, c) in enumerate(heads):
            h, w, b = (None if i is None else tensors[i] for i in at)
            some = tuple(i is not None and needs[i] and c != 0 for i in at)
            outputs, found, (*_, norm, _, dtype) = fused_linear_cross_entropy_forward(
                h,
                w,
                targets[k],
                bias=b,
                num_items=items[k] / c if c else items[k],
                needs_grad=some,
                **given,
            )
            losses.append(outputs[0] / c if c else outputs[0])
            accuracies.append(outputs[2])
            total = total + outputs[0] if c else total
            if (
                dtype == torch.float16
            ):  # these gradients are not divided yet: alike for all heads is what can be added
                divisor = items.max()
            for i, need, grad in zip(at, some, found, strict=True):
                if need:
                    grad = (
                        grad
                        if divisor is None
                        else scaled(grad, divisor / norm[0], grad.dtype, in_place=True)
                    )
                    grads[i] = grad if grads[i] is None else grads[i].add_(grad)
            del found, grad  # before the next head's
        losses = torch.stack(losses)
        total = total if isinstance(total, torch.Tensor) else losses.new_zeros(())
        accuracies = torch.stack(accuracies) if given["return_token_accuracy"] else None
        ctx.heads, ctx.options, ctx.like = heads, options, [(x.shape, x.dtype) for x in tensors]
        keep(ctx, (*grads, divisor), (*tensors, targets, items))
        ctx.mark_non_differentiable(*(x for x in (losses, accuracies) if x is not None))
        return total, losses, accuracies

    @staticmethod
    def arguments(ctx):
        return *kept_inputs(ctx, len(ctx.like) + 1), ctx.heads, ctx.options

    @staticmethod
    def backward(ctx, g, *_):
        (*grads, divisor), in_place = kept(ctx, len(ctx.like) + 1)
        g, found = g if divisor is None else g / divisor, []
        for grad, need, (shape, dtype) in zip(grads, ctx.needs_input_grad, ctx.like, strict=False):
            if need and grad is None:  # all its heads have coefficient 0
                found.append(g.new_zeros(shape, dtype=dtype))
            else:
                found.append(scaled(grad, g, dtype, in_place) if need else None)
        return *found, None, None, None, None


def liger_medusa_loss(
    hidden_states: torch.Tensor | Iterable[torch.Tensor],
    weights: torch.Tensor | Iterable[torch.Tensor],
    labels: torch.Tensor,
    biases: torch.Tensor | Iterable[torch.Tensor | None] | None = None,
    *,
    coefficients: Sequence[float] | None = None,
    first: int = 1,
    ignore_index: int = -100,
    num_items_in_batch: int | torch.Tensor | Sequence[int] | None = None,
    position_ids: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    return_token_accuracy: bool = False,
    accum_dtype: torch.dtype | None = None,
    memory: int | str = "auto",
    drop_ignored: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """Σ_k c_k·cross entropy of head k, which predicts the token k + 1 positions on
    (arXiv:2401.10774).

    No head's logits are in memory. Gradients go to whichever of the tensors require one, computed
    in forward.

    Args:
        hidden_states: (..., T, H), what each head's projection gets: one tensor for all heads, or
        one for each.
        weights: (V, H) of the projections: one tensor for all heads, or one for each; all of one
        dtype.
        labels: (..., T), not shifted. They may be on the CPU.
        biases: (V,) of the projections: none, one tensor for all heads, or one (or None) for each.
        coefficients: a number from 0 on for each head; None: 0.8^k for head k. A head of 0 is
        computed without
            gradients.
        first: which head is the first one given: 1, or 0 for the model's own, which predicts the
        next token.
        ignore_index: the label that counts for nothing.
        num_items_in_batch: what the sum of each head's losses is divided by: a number or a tensor
        of one element for
            all heads, as Hugging Face's Trainer gives it, or one for each head. None: the number of
            its valid tokens.
        position_ids: (..., T) of packed sequences. A label whose position is not k + 1 further is
        another sequence's,
            and counts for nothing.
        softcap, logit_scale, label_smoothing, accum_dtype, memory: as in
        `liger_fused_linear_cross_entropy`.
        return_token_accuracy: return the share of each head's valid tokens that it predicts, too.
        drop_ignored: leave tokens that no head has a label for out before the projections. This
        waits for the device
            once. None: only if the labels are on the CPU, where it costs nothing.

    Returns:
        (loss, losses): the loss, 0-d in fp32, and of each head the loss without its coefficient
        (N,), for logs. A head
        without valid tokens has loss 0. With ``return_token_accuracy`` also the accuracies (N,).

    Raises:
        ValueError, TypeError: shapes, devices or options that don't fit; a label out of range, on
        the CPU and in debug
            mode (LIGER_KERNEL_DEBUG=1). On a GPU such a token's loss is otherwise NaN.
    """
    name = "liger_medusa_loss"
    ignore_index, label_smoothing, _, softcap, logit_scale = check_options(
        name, "mean", ignore_index, label_smoothing, 0.0, softcap, logit_scale
    )
    check.dtype(name, "accum_dtype", accum_dtype)
    first = check.size(name, "first", first)
    heads, coefficients = _heads(name, hidden_states, weights, biases, coefficients, first)
    targets = _targets(name, heads, labels, position_ids, first, len(coefficients), ignore_index)

    tensors, places = [], []
    for x in (x for part in heads for x in part):
        place = next((i for i, known in enumerate(tensors) if known is x), None)
        if x is not None and place is None:
            place = len(tensors)
            tensors.append(x)
        places.append(place)
    N = len(coefficients)
    hidden = set(places[:N])
    tensors = [matrix(x) if i in hidden else x for i, x in enumerate(tensors)]
    heads = tuple((*places[k::N], c) for k, c in enumerate(coefficients))
    for k, (h, w, b, _) in enumerate(heads):
        who = f"{name}, head {first + k}"
        check_head(who, tensors[h], tensors[w], None if b is None else tensors[b], targets[k], None)
        check_targets(who, targets[k], tensors[w].shape[0], ignore_index)

    tensors, targets = _only_valid(tensors, hidden, targets, ignore_index, drop_ignored)
    items = _items(name, num_items_in_batch, targets, ignore_index, tensors[0].dtype)
    run = MedusaFunction.apply
    if not devices.has_kernels(tensors[0]):
        run = MedusaFunction.reference
    elif torch.compiler.is_compiling() and not torch.is_grad_enabled():  # in eager, apply does this
        tensors = [x.detach() for x in tensors]
    options = (
        ignore_index, label_smoothing, softcap, logit_scale, return_token_accuracy, accum_dtype, budget(memory)
    )  # fmt: skip
    loss, losses, accuracies = run(*tensors, targets, items, heads, options)
    return (loss, losses, accuracies) if return_token_accuracy else (loss, losses)


def _heads(name, hidden_states, weights, biases, coefficients, first):
    """-> (hidden states, weights, biases), a list for all heads each, and the coefficients."""
    given = dict(
        hidden_states=hidden_states, weights=weights, biases=biases, coefficients=coefficients
    )
    if isinstance(coefficients, torch.Tensor):
        raise TypeError(f"{name}: coefficients is a tensor, give a list of Python numbers")
    for argument, x in given.items():
        if x is not None and not isinstance(x, torch.Tensor):
            if not isinstance(x, Iterable):
                raise TypeError(
                    f"{name}: {argument} is a {type(x).__name__}, give a tensor or one for each head"
                )
            given[argument] = list(x)
    counts = {argument: len(x) for argument, x in given.items() if isinstance(x, list)}
    N = next(iter(counts.values()), 0)
    if N == 0 or any(n != N for n in counts.values()):
        told = (
            ", ".join(f"{n} {argument}" for argument, n in counts.items()) or "no list of anything"
        )
        raise ValueError(f"{name}: {told}; give one for each head, and one list or more")
    *heads, coefficients = (x if isinstance(x, list) else [x] * N for x in given.values())
    if given["coefficients"] is None:
        coefficients = [DECAY**k for k in range(first, first + N)]
    for argument, part in zip(given, heads, strict=False):
        for x in part:
            if hasattr(x, "device_mesh"):
                raise ValueError(
                    f"{name}: {argument} has a DTensor; call this within the forward of the module whose parameters "
                    "FSDP gathers, or give its full_tensor()"
                )
            if x is not None or argument != "biases":
                check.floats(name, {argument: x})
    for k, w in enumerate(heads[1]):
        if w.dtype != heads[1][0].dtype:
            raise TypeError(
                f"{name}: weights are {heads[1][0].dtype} and {w.dtype} (head {first + k}), give one dtype"
            )
        if w.dim() != 2:
            raise ValueError(
                f"{name}: a weight has shape {tuple(w.shape)}, give (classes, hidden size) for each head: for one "
                "tensor of all heads, its unbind()"
            )
    return heads, [check.not_negative(name, "a coefficient", c) for c in coefficients]


def _targets(name, heads, labels, position_ids, first, N, ignore_index):
    """(N, M): the labels of each head."""
    check.integers(name, dict(labels=labels))
    for h in heads[0]:
        if h.dim() < 2 or h.shape[:-1] != labels.shape:
            raise ValueError(
                f"{name}: hidden states have shape {tuple(h.shape)} and labels {tuple(labels.shape)}, give "
                "(..., tokens, hidden size) and (..., tokens)"
            )
    if position_ids is not None:
        check.integers(name, dict(position_ids=position_ids))
        if position_ids.shape[-1:] != labels.shape[-1:]:
            raise ValueError(
                f"{name}: position_ids has shape {tuple(position_ids.shape)}, give that of labels: "
                f"{tuple(labels.shape)}"
            )
        position_ids = position_ids.to(labels.device).expand(labels.shape)
    labels, targets = labels.long(), []
    for shift in range(first + 1, first + 1 + N):
        end = 0, min(shift, labels.shape[-1])
        target = F.pad(labels[..., shift:], end, value=ignore_index)
        if position_ids is not None:
            further = F.pad(position_ids[..., shift:], end, value=-1)
            target = target.where(further == position_ids + shift, ignore_index)
        targets.append(target.reshape(-1))
    return torch.stack(targets)


def _only_valid(tensors, hidden, targets, ignore_index, drop_ignored):
    """-> the tensors, and the targets on their device. Of ``hidden`` and the targets maybe only
    rows that count."""
    device = tensors[0].device
    on_host = targets.device.type == "cpu" and not torch.compiler.is_compiling()
    if not (on_host if drop_ignored is None else drop_ignored):
        return tensors, targets.to(device)
    rows = (targets != ignore_index).any(0).nonzero().squeeze(1)
    if on_host and rows.numel() == targets.shape[1]:
        return tensors, targets.to(device)
    targets, rows = (x.to(device, non_blocking=True) for x in (targets[:, rows], rows))
    return [x.index_select(0, rows) if i in hidden else x for i, x in enumerate(tensors)], targets


def _items(name, num_items, targets, ignore_index, dtype):
    """(N,) what each head's sum is divided by."""
    N, dtype = targets.shape[0], torch.promote_types(dtype, torch.float32)
    if num_items is None:
        return (targets != ignore_index).sum(1).clamp(min=1).to(dtype)
    if isinstance(num_items, torch.Tensor):
        if num_items.numel() != N:
            num_items = check.count(name, "num_items_in_batch", num_items)
        return num_items.reshape(-1).to(targets.device, dtype).expand(N)
    items = list(num_items) if isinstance(num_items, Sequence) else [num_items] * N
    if len(items) != N:
        raise ValueError(
            f"{name}: num_items_in_batch has {len(items)} numbers, give one, or one for each head: {N}"
        )
    items = [check.count(name, "num_items_in_batch", n) for n in items]
    # filled on the device: nothing is copied there, and nothing waits
    return torch.stack([torch.full((), n, dtype=dtype, device=targets.device) for n in items])
