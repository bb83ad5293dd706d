r"""The loss of Medusa's heads, which predict further tokens, without their logits in memory.

    X_k = h_k·W_kᵀ + b_k        h_k: the model's hidden states, or the output of head k's layers
    loss_k = Σ_t -log softmax(X_k[t])[y[t + k + 1]] / n_k
    loss = Σ_k c_k·loss_k       c_k = 0.8^k

Head 0 is the model's own, Medusa's (arXiv:2401.10774) are 1, 2, ... The gradients are computed in
forward, one head after the other. Heads that share hidden states or a weight share its gradient,
too: each adds to it in place, as autograd would. A head's tokens are divided by n_k / c_k, so that
its coefficient costs no rounding. `medusa_layers` does the same for heads that give their layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import F, Function, flatten_to_2d, save_grads, saved_grads, saved_inputs
from liger_kernel.losses.medusa_layers import (
    Head,
    can_run_one_by_one,
    loss_of_heads,
    spare_bytes,
)
from liger_kernel.ops.head.cross_entropy import check_options, check_targets
from liger_kernel.ops.head.forward_gradients import scale_gradient
from liger_kernel.ops.head.linear_cross_entropy import (
    fused_linear_cross_entropy_forward,
    fused_linear_cross_entropy_in_chunks,
)
from liger_kernel.ops.head.linear_head_reference import compute_dtype
from liger_kernel.ops.head.planning import divides_at_end, parse_memory
from liger_kernel.ops.head.token_log_probs import check_head

COEFFICIENT_DECAY = 0.8  # from head to head
OPTION_NAMES = (
    "ignore_index",
    "label_smoothing",
    "softcap",
    "logit_scale",
    "return_token_accuracy",
    "accum_dtype",
    "memory",
)


class HeadPlaces(NamedTuple):
    """The positions of a head's tensors among the arguments, and the head's coefficient.

    Heads may share a tensor, which is among the arguments once.
    """

    hidden: int
    weight: int
    bias: int | None
    coefficient: float

    def tensors(self, arguments):
        """Return hidden states, weight and bias (or None)."""
        return [None if place is None else arguments[place] for place in self[:3]]


class MedusaFunction(Function):
    """The loss of several heads, whose gradients are computed in forward.

    ``apply(*tensors, targets (N, M), items (N,), heads, options)`` returns the loss, the losses
    (N,), and the accuracies (N,) or None. ``heads`` are `HeadPlaces` in ``tensors``, each of which
    is there once. ``options`` are those of `OPTION_NAMES`.
    """

    @staticmethod
    def reference(*args):
        *tensors, targets, items, heads, options = args
        options = dict(zip(OPTION_NAMES, options, strict=True))
        losses = []
        accuracies = []
        for k, head in enumerate(heads):
            h, w, b = head.tensors(tensors)
            loss, _, accuracy, _ = fused_linear_cross_entropy_in_chunks(
                h, w, targets[k], b, num_items=items[k], **options
            )
            losses.append(loss)
            accuracies.append(accuracy)
        total = sum(head.coefficient * loss for head, loss in zip(heads, losses, strict=True))
        losses = torch.stack(losses).detach()
        return total, losses, None if accuracies[0] is None else torch.stack(accuracies)

    @staticmethod
    def forward(ctx, *args):
        *tensors, targets, items, heads, option_values = args
        options = dict(zip(OPTION_NAMES, option_values, strict=True))
        needs_grad = ctx.needs_input_grad[: len(tensors)]
        grads = [None] * len(tensors)
        losses = []
        accuracies = []
        total = 0
        # only gradients that have one divisor can be added
        divisor = items.max() if _divide_at_end(heads, tensors) else None
        weights = [tensors[head.weight] for head in heads]
        learns = [needs_grad[head.weight] and head.coefficient != 0 for head in heads]
        spare = spare_bytes(weights, [head.weight for head in heads], learns)
        for k, head in enumerate(heads):
            h, w, b = head.tensors(tensors)
            c = head.coefficient
            head_needs_grad = tuple(
                place is not None and needs_grad[place] and c != 0 for place in head[:3]
            )
            (loss, _, accuracy, *_), head_grads, state = fused_linear_cross_entropy_forward(
                h,
                w,
                targets[k],
                bias=b,
                num_items=items[k] / c if c else items[k],
                needs_grad=head_needs_grad,
                spare=spare[k],
                **options,
            )
            losses.append(loss / c if c else loss)
            accuracies.append(accuracy)
            if c:
                total = total + loss
            for place, needed, grad in zip(head[:3], head_needs_grad, head_grads, strict=True):
                if not needed:
                    continue
                if divisor is not None:
                    factor = divisor if state.divisor is None else divisor / state.divisor
                    grad = scale_gradient(grad, factor, grad.dtype, in_place=True)
                grads[place] = grad if grads[place] is None else grads[place].add_(grad)
            del head_grads, grad  # before the next head's are computed
        losses = torch.stack(losses)
        if not isinstance(total, torch.Tensor):
            total = losses.new_zeros(())
        accuracies = torch.stack(accuracies) if options["return_token_accuracy"] else None
        ctx.heads = heads
        ctx.options = option_values
        ctx.shapes_and_dtypes = [(x.shape, x.dtype) for x in tensors]
        save_grads(ctx, (*grads, divisor), (*tensors, targets, items))
        ctx.mark_non_differentiable(*(x for x in (losses, accuracies) if x is not None))
        return total, losses, accuracies

    @staticmethod
    def arguments(ctx):
        inputs = saved_inputs(ctx, len(ctx.shapes_and_dtypes) + 1)
        return *inputs, ctx.heads, ctx.options

    @staticmethod
    def backward(ctx, grad_output, *_):
        (*grads, divisor), in_place = saved_grads(ctx, len(ctx.shapes_and_dtypes) + 1)
        if divisor is not None:
            grad_output = grad_output / divisor
        grad_inputs = []
        for grad, needed, (shape, dtype) in zip(
            grads, ctx.needs_input_grad, ctx.shapes_and_dtypes, strict=False
        ):
            if not needed:
                grad_inputs.append(None)
            elif grad is None:  # all its heads have coefficient 0
                grad_inputs.append(grad_output.new_zeros(shape, dtype=dtype))
            else:
                grad_inputs.append(scale_gradient(grad, grad_output, dtype, in_place))
        return *grad_inputs, None, None, None, None


def _divide_at_end(heads, tensors) -> bool:
    """Return True if the gradients of some head are not divided in forward."""
    for head in heads:
        hidden, weight, _ = head.tensors(tensors)
        if divides_at_end(hidden, weight, compute_dtype(hidden, weight)):
            return True
    return False


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
    layers: Iterable[torch.nn.Module | None] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute Σ_k c_k·cross entropy of head k, which predicts the token k + 1 positions ahead.

    No head's logits are in memory. The gradients are computed in forward, for those tensors that
    require one. From Medusa, arXiv:2401.10774.

    Args:
        hidden_states: (..., T, H), the inputs of the heads' projections: one tensor for all heads,
            or one for each.
        weights: (V, H) of the projections: one tensor for all heads, or one for each; all of one
            dtype.
        labels: (..., T), not shifted. They may be on the CPU.
        biases: (V,) of the projections: none, one tensor for all heads, or one (or None) for each.
        coefficients: a number from 0 on for each head; None: 0.8^k for head k. A head with
            coefficient 0 is computed without gradients.
        first: the number of the first of these heads: 1, or 0 for the model's own, which predicts
            the next token.
        ignore_index: labels with this value are left out.
        num_items_in_batch: the divisor of the sum of each head's losses: a number or a tensor of
            one element for all heads, as Hugging Face's Trainer gives it, or one for each head.
            None: the number of the head's valid tokens.
        position_ids: (..., T) of packed sequences. A label whose position is not k + 1 further
            belongs to another sequence, and is left out.
        softcap, logit_scale, label_smoothing, accum_dtype, memory: as in
            `liger_fused_linear_cross_entropy`.
        return_token_accuracy: return the share of each head's valid tokens that it predicts, too.
        drop_ignored: drop tokens for which no head has a label before the projections. This waits
            for the device once. None: only if the labels are on the CPU, where it costs nothing.
        layers: a module (or None) for each head, such as its residual block. The head's projection
            gets ``layers[k](hidden_states)``. As a rule a head's layers, its loss and all their
            gradients are computed before the next head's, so that their activations are in memory
            for one head at a time. Then there is no ``create_graph=True``, and a layer may not
            write to its input, nor return fp16. Layers with hooks or shards of their own, fp16 and
            compiled graphs are computed as if ``hidden_states`` were what they return.

    Returns:
        (loss, losses): the loss, 0-d in fp32, and each head's loss without its coefficient (N,),
        for logs. A head without valid tokens has loss 0. With ``return_token_accuracy`` also the
        accuracies (N,).

    Raises:
        ValueError, TypeError: shapes, devices or options that don't fit; a label out of range, on
            the CPU and in debug mode (LIGER_KERNEL_DEBUG=1). On a GPU such a token's loss is
            otherwise NaN.
    """
    name = "liger_medusa_loss"
    ignore_index, label_smoothing, _, softcap, logit_scale = check_options(
        name, "mean", ignore_index, label_smoothing, 0.0, softcap, logit_scale
    )
    check.dtype(name, "accum_dtype", accum_dtype)
    first = check.size(name, "first", first)
    hidden_states, weights, biases, coefficients = _one_for_each_head(
        name, hidden_states, weights, biases, coefficients, first
    )
    N = len(coefficients)
    layers = _check_layers(name, layers, N)
    one_by_one = layers is not None and can_run_one_by_one(layers, hidden_states, weights)
    if layers is not None and not one_by_one:
        hidden_states = [
            h if layer is None else layer(h) for layer, h in zip(layers, hidden_states, strict=True)
        ]
    targets = _head_targets(name, hidden_states, labels, position_ids, first, N, ignore_index)

    options = dict(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        return_token_accuracy=return_token_accuracy,
        accum_dtype=accum_dtype,
        memory=parse_memory(memory),
    )
    if one_by_one:
        for k, w in enumerate(weights):
            check_targets(f"{name}, head {first + k}", targets[k], w.shape[0], ignore_index)
        targets, rows = _labelled_rows(hidden_states[0].device, targets, ignore_index, drop_ignored)
        items = _items_of_heads(
            name, num_items_in_batch, targets, ignore_index, hidden_states[0].dtype
        )
        columns = layers, hidden_states, weights, biases, targets, items, coefficients
        heads = [Head(*column) for column in zip(*columns, strict=True)]
        loss, losses, accuracies = loss_of_heads(name, heads, rows, options)
        return (loss, losses, accuracies) if return_token_accuracy else (loss, losses)

    # heads may share tensors: each tensor is an argument once
    tensors = []

    def place_of(x):
        if x is None:
            return None
        for place, tensor in enumerate(tensors):
            if tensor is x:
                return place
        tensors.append(x)
        return len(tensors) - 1

    hidden_places = [place_of(x) for x in hidden_states]
    weight_places = [place_of(x) for x in weights]
    bias_places = [place_of(x) for x in biases]
    columns = zip(hidden_places, weight_places, bias_places, coefficients, strict=True)
    heads = tuple(HeadPlaces(*column) for column in columns)
    hidden_places = set(hidden_places)
    tensors = [flatten_to_2d(x) if i in hidden_places else x for i, x in enumerate(tensors)]
    for k, head in enumerate(heads):
        head_name = f"{name}, head {first + k}"
        h, w, b = head.tensors(tensors)
        check_head(head_name, h, w, b, targets[k], None)
        check_targets(head_name, targets[k], w.shape[0], ignore_index)

    tensors, targets = _drop_ignored(tensors, hidden_places, targets, ignore_index, drop_ignored)
    items = _items_of_heads(name, num_items_in_batch, targets, ignore_index, tensors[0].dtype)
    run = MedusaFunction.apply
    if not devices.has_kernels(tensors[0]):
        run = MedusaFunction.reference
    elif torch.compiler.is_compiling() and not torch.is_grad_enabled():  # in eager, apply does this
        tensors = [x.detach() for x in tensors]
    options = tuple(options[name] for name in OPTION_NAMES)
    loss, losses, accuracies = run(*tensors, targets, items, heads, options)
    return (loss, losses, accuracies) if return_token_accuracy else (loss, losses)


def _check_layers(name, layers, N):
    """Return the layers as a list, or None."""
    if layers is None:
        return None
    if not isinstance(layers, Iterable):
        raise TypeError(f"{name}: layers is a {type(layers).__name__}, give a module for each head")
    layers = list(layers)
    for layer in layers:
        if layer is not None and not isinstance(layer, torch.nn.Module):
            raise TypeError(f"{name}: a layer is a {type(layer).__name__}, give a module or None")
    if len(layers) != N:
        raise ValueError(f"{name}: {len(layers)} layers for {N} heads, give one for each head")
    return layers


def _one_for_each_head(name, hidden_states, weights, biases, coefficients, first):
    """Return hidden states, weights, biases and coefficients as lists, with one for each head."""
    arguments = {
        "hidden_states": hidden_states,
        "weights": weights,
        "biases": biases,
        "coefficients": coefficients,
    }
    if isinstance(coefficients, torch.Tensor):
        raise TypeError(f"{name}: coefficients is a tensor, give a list of Python numbers")
    for argument, x in arguments.items():
        if x is not None and not isinstance(x, torch.Tensor):
            if not isinstance(x, Iterable):
                raise TypeError(
                    f"{name}: {argument} is a {type(x).__name__}, "
                    "give a tensor or one for each head"
                )
            arguments[argument] = list(x)
    counts = {argument: len(x) for argument, x in arguments.items() if isinstance(x, list)}
    N = next(iter(counts.values()), 0)
    if N == 0 or any(n != N for n in counts.values()):
        counted = ", ".join(f"{n} {argument}" for argument, n in counts.items())
        raise ValueError(
            f"{name}: {counted or 'no list of anything'}; "
            "give one for each head, and one list or more"
        )
    for argument, x in arguments.items():
        if not isinstance(x, list):
            arguments[argument] = [x] * N
    hidden_states, weights, biases, _ = arguments.values()
    if coefficients is None:
        coefficients = [COEFFICIENT_DECAY**k for k in range(first, first + N)]
    else:
        coefficients = arguments["coefficients"]
    for argument in ("hidden_states", "weights", "biases"):
        for x in arguments[argument]:
            if hasattr(x, "device_mesh"):
                raise ValueError(
                    f"{name}: {argument} has a DTensor; call this within the forward of the module "
                    "whose parameters FSDP gathers, or give its full_tensor()"
                )
            if x is not None or argument != "biases":
                check.floats(name, {argument: x})
    for k, w in enumerate(weights):
        if w.dtype != weights[0].dtype:
            raise TypeError(
                f"{name}: weights are {weights[0].dtype} and {w.dtype} (head {first + k}), "
                "give one dtype"
            )
        if w.dim() != 2:
            raise ValueError(
                f"{name}: a weight has shape {tuple(w.shape)}, give (classes, hidden size) for "
                "each head: for one tensor of all heads, its unbind()"
            )
    coefficients = [check.non_negative(name, "a coefficient", c) for c in coefficients]
    return hidden_states, weights, biases, coefficients


def _head_targets(name, hidden_states, labels, position_ids, first, N, ignore_index):
    """Return the labels of each head, (N, M)."""
    check.integers(name, dict(labels=labels))
    for h in hidden_states:
        if h.dim() < 2 or h.shape[:-1] != labels.shape:
            raise ValueError(
                f"{name}: hidden states have shape {tuple(h.shape)} and labels "
                f"{tuple(labels.shape)}, give (..., tokens, hidden size) and (..., tokens)"
            )
    if position_ids is not None:
        check.integers(name, dict(position_ids=position_ids))
        if position_ids.shape[-1:] != labels.shape[-1:]:
            raise ValueError(
                f"{name}: position_ids has shape {tuple(position_ids.shape)}, give that of labels: "
                f"{tuple(labels.shape)}"
            )
        position_ids = position_ids.to(labels.device).expand(labels.shape)
    labels = labels.long()
    targets = []
    for shift in range(first + 1, first + 1 + N):
        padding = 0, min(shift, labels.shape[-1])
        target = F.pad(labels[..., shift:], padding, value=ignore_index)
        if position_ids is not None:
            target_positions = F.pad(position_ids[..., shift:], padding, value=-1)
            target = target.where(target_positions == position_ids + shift, ignore_index)
        targets.append(target.reshape(-1))
    return torch.stack(targets)


def _drop_ignored(tensors, hidden_places, targets, ignore_index, drop_ignored):
    """Return the tensors, and the targets on their device.

    The hidden states and the targets may lose the rows that no head has a label for.
    """
    targets, rows = _labelled_rows(tensors[0].device, targets, ignore_index, drop_ignored)
    if rows is not None:
        tensors = [
            x.index_select(0, rows) if place in hidden_places else x
            for place, x in enumerate(tensors)
        ]
    return tensors, targets


def _labelled_rows(device, targets, ignore_index, drop_ignored):
    """Return the targets on the device, and the rows for which a head has one (None: all).

    The targets of other rows are left out.
    """
    on_host = targets.device.type == "cpu" and not torch.compiler.is_compiling()
    if not (on_host if drop_ignored is None else drop_ignored):
        return targets.to(device), None
    rows = (targets != ignore_index).any(0).nonzero().squeeze(1)
    if on_host and rows.numel() == targets.shape[1]:
        return targets.to(device), None
    targets = targets[:, rows].to(device, non_blocking=True)
    return targets, rows.to(device, non_blocking=True)


def _items_of_heads(name, num_items, targets, ignore_index, dtype):
    """Return the divisor of each head's sum, (N,)."""
    N = targets.shape[0]
    dtype = torch.promote_types(dtype, torch.float32)
    if num_items is None:
        return (targets != ignore_index).sum(1).clamp(min=1).to(dtype)
    if isinstance(num_items, torch.Tensor):
        if num_items.numel() != N:
            num_items = check.count(name, "num_items_in_batch", num_items)
        return num_items.reshape(-1).to(targets.device, dtype).expand(N)
    items = list(num_items) if isinstance(num_items, Sequence) else [num_items] * N
    if len(items) != N:
        raise ValueError(
            f"{name}: num_items_in_batch has {len(items)} numbers, give one, "
            f"or one for each head: {N}"
        )
    items = [check.count(name, "num_items_in_batch", n) for n in items]
    # filled on the device: nothing is copied there, and nothing waits
    return torch.stack([torch.full((), n, dtype=dtype, device=targets.device) for n in items])
