"""Saving tensors for backward: trainable parameters without a checkpoint's hooks, or all of them
before forward is over.

A checkpoint has hooks on every saved tensor, which run twice in forward and once in backward, and
take the host longer than many a small kernel. A trainable parameter is held by its own node of the
graph, so that a reference to it costs no memory, and nobody can put another tensor in its place.
Neither is true of a frozen one, which may be brought to the device for a call. Other hooks, such as
those of `torch.autograd.graph.save_on_cpu`, get everything: what they keep may be copies, to which
a step of the optimizer before backward does nothing.
"""

from __future__ import annotations

import torch

from liger_kernel.core.overwrite import in_checkpoint, is_checkpoint_hook, is_graph_kept


def save_for_backward(ctx, *tensors) -> None:
    """Save tensors for `saved_tensors`. Trainable parameters pass no hooks of a checkpoint."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    # autograd does not compare versions of what hooks have packed
    compare_versions = hooks is None
    passes_by = compare_versions or is_checkpoint_hook(hooks[0])
    # for each tensor: a parameter and its version; None if autograd saves it
    ctx.parameters = []
    saved_by_autograd = []
    for tensor in tensors:
        if passes_by and _is_trainable_parameter(tensor):
            ctx.parameters.append((tensor, tensor._version if compare_versions else None))
        else:
            ctx.parameters.append(None)
            saved_by_autograd.append(tensor)
    ctx.save_for_backward(*saved_by_autograd)


def _is_trainable_parameter(tensor) -> bool:
    is_parameter = issubclass(type(tensor), torch.nn.Parameter)
    return is_parameter and tensor.requires_grad and not tensor.is_inference()


def saved_tensors(ctx) -> list[torch.Tensor]:
    """Return what `save_for_backward` has saved. Call it once: a checkpoint allows no second time.

    Raises:
        RuntimeError: one of them was written to since.
    """
    saved_by_autograd = iter(ctx.saved_tensors)
    return [
        next(saved_by_autograd) if parameter is None else _check_version(*parameter)
        for parameter in ctx.parameters
    ]


class _Save(torch.autograd.Function):
    """Saves tensors. What it returns is in no graph, so it has no backward."""

    @staticmethod
    def forward(ctx, leaf, tensors):
        ctx.save_for_backward(*tensors)
        return leaf.view_as(leaf)


class _SavingNode:
    """The node of a `_Save`, which is there as long as what it returned."""

    def __init__(self, tensors):
        with torch.enable_grad():
            leaf = torch.empty(0, requires_grad=True)
            self.output = _Save.apply(leaf, tensors)

    @property
    def saved_tensors(self):
        return self.output.grad_fn.saved_tensors

    @property
    def _raw_saved_tensors(self):
        return self.output.grad_fn._raw_saved_tensors


def save_early(ctx, *tensors) -> None:
    """Save tensors for ``saving_node(ctx).saved_tensors``, within a checkpoint at once.

    Autograd saves what a Function's forward has named when that is over. A checkpoint with early
    stop, which ends when all is saved, then runs all of it again. Call this before what backward
    does not need, such as the last product of an MLP. Within a checkpoint a node of its own saves
    the tensors.
    """
    ctx.saving_node = None
    ctx.is_released = False
    if in_checkpoint():
        ctx.saving_node = _SavingNode(tensors)
    else:
        ctx.save_for_backward(*tensors)


def saving_node(ctx):
    """Return the node that has saved what `save_early` was given. Call it once in backward.

    Autograd does not know the node that saves within a checkpoint. So it is released here, unless
    the graph is kept: with it goes what the checkpoint keeps to run forward again.

    Raises:
        RuntimeError: it was released.
    """
    if torch.compiler.is_compiling() or ctx.saving_node is None and not ctx.is_released:
        return ctx
    if ctx.is_released:
        raise RuntimeError(
            "Trying to backward through the graph a second time: what was saved in a checkpoint is "
            "freed. Give retain_graph=True to the first backward"
        )
    node = ctx.saving_node
    if not is_graph_kept():
        ctx.saving_node = None
        ctx.is_released = True
    return node


def _check_version(tensor, version: int | None) -> torch.Tensor:
    if version is not None and tensor._version != version:
        raise RuntimeError(
            f"a parameter of shape {tuple(tensor.shape)} has been modified by an inplace operation "
            f"between forward and backward: it is at version {tensor._version}, not {version}"
        )
    return tensor
