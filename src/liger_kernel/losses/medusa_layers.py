"""Medusa's heads with layers of their own, whose activations are not kept for backward.

A head's layers, its loss, and all their gradients are computed before the next head's. What a head
needs to be differentiated is freed by then; its gradients stay, until backward multiplies them by
the incoming one. So beside the gradients of the parameters, one head is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.modules.module import _has_any_global_hook

from liger_kernel.core import devices
from liger_kernel.core.op import (
    flatten_to_2d,
    in_func_transform,
    no_saved_tensor_hooks,
    resolve_negative,
    save_grads,
    saved_grads,
)
from liger_kernel.ops.head.forward_gradients import scale_gradient
from liger_kernel.ops.head.linear_cross_entropy import fused_linear_cross_entropy_forward
from liger_kernel.ops.head.linear_head_reference import compute_dtype
from liger_kernel.ops.head.planning import divides_at_end
from liger_kernel.ops.head.token_log_probs import check_head

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


class Head(NamedTuple):
    """A head with layers: its tensors, its targets (M,), their number, and its coefficient."""

    layer: torch.nn.Module | None
    hidden: torch.Tensor  # (..., T, H), the input of the layers
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    items: torch.Tensor
    coefficient: float


# ---- one head after the other ----


def can_run_one_by_one(layers, hidden_states, weights) -> bool:
    """Return True if the gradients of all heads can be computed in forward.

    They can't be where somebody else has a say in when a layer's gradients are computed, or in what
    they are: hooks, shards that are gathered for a layer's own forward, saved-tensor hooks, a
    compiled graph, torch.func. In fp16 they are not divided yet, and a layer's might overflow.
    """
    if torch.compiler.is_compiling() or in_func_transform() or not torch.is_grad_enabled():
        return False
    if not no_saved_tensor_hooks() or _has_any_global_hook():
        return False
    for hidden, weight in zip(hidden_states, weights, strict=True):
        if not devices.has_kernels(hidden):
            return False
        if divides_at_end(hidden, weight, compute_dtype(hidden, weight)):
            return False
    return not any(layer is not None and _must_run_before(layer) for layer in layers)


def _must_run_before(layer) -> bool:
    """Return True if this layer is to be called before the loss."""
    if any(getattr(module, hooks) for module in layer.modules() for hooks in HOOKS):
        return True
    for parameter in layer.parameters():
        # main_grad: a layer of Megatron's may add to it in its own backward
        if any(hasattr(parameter, name) for name in ("device_mesh", "ds_id", "main_grad")):
            return True
        if parameter._backward_hooks or parameter.grad_fn is not None:
            return True
        if parameter.dtype == torch.float16:
            return True
    # FSDP1 has views of its flat parameter in place of parameters
    attributes = (value for module in layer.modules() for value in vars(module).values())
    return any(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in attributes)


def loss_of_heads(name: str, heads: Sequence[Head], rows, options):
    """Compute the loss of all heads, and its gradients.

    Args:
        name: of the function, for errors.
        rows: the rows of the flat hidden states that have a label; None: all.
        options: of `fused_linear_cross_entropy_forward`.

    Returns:
        The loss, the losses (N,), and the accuracies (N,) or None.
    """
    gradients = _Gradients()
    losses = []
    accuracies = []
    total = 0
    weights = [head.weight for head in heads]
    learns = [head.weight.requires_grad and head.coefficient != 0 for head in heads]
    names = [id(w) for w in weights]
    for head, spare in zip(heads, spare_bytes(weights, names, learns), strict=True):
        loss, accuracy = _run_head(name, head, rows, spare, options, gradients)
        c = head.coefficient
        losses.append(loss / c if c else loss)
        accuracies.append(accuracy)
        if c:
            total = total + loss
    losses = torch.stack(losses)
    if not isinstance(total, torch.Tensor):
        total = losses.new_zeros(())
    accuracies = torch.stack(accuracies) if options["return_token_accuracy"] else None
    gradients = gradients.pop()
    if gradients:
        tensors, grads, owned = zip(*gradients, strict=True)
        total = StoredGradients.apply(total, grads, owned, *tensors)
    return total, losses, accuracies


def _run_head(name, head, rows, spare, options, gradients):
    """Compute a head's loss times its coefficient, and its accuracy; add to ``gradients``."""
    layer, hidden, w, b, target, items, c = head
    leaf = hidden.detach().requires_grad_(hidden.requires_grad)
    states = leaf if layer is None else layer(leaf)
    if states.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"{name}: a layer returns shape {tuple(states.shape)} for hidden states of "
            f"{tuple(hidden.shape)}, give one that keeps the tokens"
        )
    states = flatten_to_2d(states)
    if states.dtype == torch.float16:
        raise ValueError(
            f"{name}: a layer returns float16, in which gradients vanish that a GradScaler would "
            "have made large; give the hidden states of each head in place of layers"
        )
    if rows is not None:
        states = states.index_select(0, rows)
    check_head(name, states, w, b, target, None)
    tensors = (states, w, b)
    needs = tuple(x is not None and x.requires_grad and c != 0 for x in tensors)
    values, weight, bias = resolve_negative([x if x is None else x.detach() for x in tensors])
    (loss, _, accuracy, *_), (dstates, dw, db), _ = fused_linear_cross_entropy_forward(
        values,
        weight,
        target,
        bias=bias,
        num_items=items / c if c else items,
        needs_grad=needs,
        spare=spare,
        **options,
    )
    gradients.add(w, dw if needs[1] else None, owned=True)
    gradients.add(b, db if needs[2] else None, owned=True)
    inputs = _leaves(states)
    grads = [None] * len(inputs)
    if needs[0]:
        with devices.without_autocast(states):
            grads = torch.autograd.grad(states, inputs, dstates.to(states.dtype), allow_unused=True)
    for x, grad in zip(inputs, grads, strict=True):
        if grad is not None or not needs[0]:  # a backward may give a tensor None
            gradients.add(hidden if x is leaf else x, grad, owned=False)
    return loss, accuracy


def spare_bytes(weights, names, learns) -> list[int]:
    """Return for each of several heads the bytes of the gradients that the heads after it make.

    Until then they are spare for its chunks. All are -1 if no head leaves anything to another.

    Args:
        names: of the weights, the same for heads that share one. (`id` is none where torch.compile
            reads this.)
        learns: if the weight gets a gradient from this head.
    """
    spare = []
    for k in range(len(weights)):
        seen = set(names[: k + 1])
        later = {
            name: w.nbytes for w, name, learn in zip(weights, names, learns, strict=True) if learn
        }
        spare.append(sum(nbytes for name, nbytes in later.items() if name not in seen))
    return spare if any(spare) else [-1] * len(spare)


def _leaves(x) -> list[torch.Tensor]:
    """Return the tensors at which x's graph ends, x itself if it has none."""
    if not x.requires_grad:
        return []
    if x.grad_fn is None:
        return [x]
    leaves = []
    nodes = [x.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
    return leaves


# ---- their gradients ----


class _Gradient(NamedTuple):
    """The gradient of a tensor; None: it is 0. ``owned``: nobody else may have it."""

    tensor: torch.Tensor
    grad: torch.Tensor | None = None
    owned: bool = False


class _Gradients:
    """The sums of the gradients of tensors."""

    def __init__(self):
        self.by_id = {}

    def add(self, tensor, grad, owned):
        """Add a gradient of a tensor, None for 0. What a layer's backward returns is not owned."""
        if tensor is None or not tensor.requires_grad:
            return
        before = self.by_id.get(id(tensor), _Gradient(tensor))
        if grad is None:
            after = before
        elif before.grad is None:
            after = _Gradient(tensor, grad, owned)
        elif before.owned:
            after = _Gradient(tensor, before.grad.add_(grad), True)
        else:
            after = _Gradient(tensor, before.grad + grad, True)
        self.by_id[id(tensor)] = after

    def pop(self):
        """Return a `_Gradient` of each tensor. They are not held here any more."""
        gradients = [*self.by_id.values()]
        self.by_id.clear()
        return gradients


class StoredGradients(torch.autograd.Function):
    """``apply(loss, grads, owned, *inputs)`` returns the loss, which has these gradients.

    Backward multiplies them by the incoming gradient, in place those that are ``owned``.
    """

    @staticmethod
    def forward(ctx, loss, grads, owned, *inputs):
        ctx.owned = owned
        ctx.shapes_and_dtypes = [(x.shape, x.dtype) for x in inputs]
        save_grads(ctx, grads, ())
        return loss.clone()

    @staticmethod
    def backward(ctx, grad_output):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "liger_medusa_loss: with layers, its gradients have no graph of their own; for "
                "create_graph=True give the hidden states of each head in place of layers"
            )
        grads, in_place = saved_grads(ctx, len(ctx.shapes_and_dtypes))
        result = []
        columns = zip(grads, ctx.owned, ctx.shapes_and_dtypes, strict=True)
        for grad, owned, (shape, dtype) in columns:
            if grad is None:  # all its heads have coefficient 0
                grad = grad_output.new_zeros(shape, dtype=dtype)
            else:
                grad = scale_gradient(grad.contiguous(), grad_output, dtype, in_place and owned)
            result.append(grad)
        return None, None, None, *result
