"""Saving tensors for backward: without a checkpoint's hooks (`save_for_backward`), or before the
end of forward (`save_early`).

A checkpoint has hooks on every saved tensor, which run twice in forward and once in backward, and
take the host longer than many a small kernel. A trainable parameter is held by its own node of the
graph, so that a reference to it costs no memory, and nobody can put another tensor in its place.
Neither is true of a frozen one, which may be brought to the device for a call. Other hooks, such as
those of `torch.autograd.graph.save_on_cpu`, get everything: what they keep may be copies, to which
a step of the optimizer before backward does nothing.
"""

from __future__ import annotations

import sys

import torch

from liger_kernel.core.overwrite import in_checkpoint, is_checkpoint_hook


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
    def forward(ctx, leaf, tensors, skip_parameters):
        if skip_parameters:
            save_for_backward(ctx, *tensors)
        else:
            ctx.parameters = [None] * len(tensors)  # all pass the hooks
            ctx.save_for_backward(*tensors)
        return leaf.view_as(leaf)


class _SavingNode:
    """The node of a `_Save`, for one backward.

    ``outputs``: a list of the tensor that `_Save` returned, which keeps the node alive. Unpacking
    empties it, unless the graph is kept, as autograd frees what its own nodes have saved.
    """

    def __init__(self, outputs):
        self.outputs = outputs
        self.output = outputs[0]

    @property
    def saved_tensors(self):
        tensors = saved_tensors(self.output.grad_fn)  # raises if a recomputation fails
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.outputs.clear()
        return tensors

    @property
    def _raw_saved_tensors(self):
        return self.output.grad_fn._raw_saved_tensors


def save_early(ctx, *tensors, skip_parameters=False) -> None:
    """Save tensors for ``saving_node(ctx).saved_tensors``, within a checkpoint at once.

    Autograd saves what a Function's forward has named when forward is over, so a checkpoint with
    early stop, which ends when everything is saved, would compute all of forward again. Call this
    before what backward does not need, such as the last product of an MLP. Within a checkpoint a
    node outside the graph saves the tensors, with ``skip_parameters`` as `save_for_backward` does.
    Compiled autograd does not see that node: where it is on, all is saved as elsewhere.
    """
    ctx.save_outputs = None
    if in_checkpoint() and not uses_compiled_autograd():
        with torch.enable_grad():
            leaf = torch.empty(0, requires_grad=True)
            ctx.save_outputs = [_Save.apply(leaf, tensors, skip_parameters)]
    else:
        ctx.save_for_backward(*tensors)


def saving_node(ctx):
    """Return the node that has saved what `save_early` was given, for the backward that runs.

    Raises:
        RuntimeError: the graph was not kept by an earlier backward, or compiled autograd was
            switched on since forward.
    """
    if ctx.save_outputs is None:
        return ctx
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "compiled autograd cannot read what was saved within a checkpoint before it was "
            "switched on: switch it on before forward"
        )
    if not ctx.save_outputs:
        raise RuntimeError(
            "Trying to backward through the graph a second time: what was saved within a "
            "checkpoint is freed. Give retain_graph=True to the first backward"
        )
    return _SavingNode(ctx.save_outputs)


def uses_compiled_autograd() -> bool:
    """Return True if torch.compile runs the backward of eager code, too."""
    config = sys.modules.get("torch._dynamo.config")
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(config, "compiled_autograd", False) or getattr(
        compiled_autograd, "compiled_autograd_enabled", False
    )


def _check_version(tensor, version: int | None) -> torch.Tensor:
    if version is not None and tensor._version != version:
        raise RuntimeError(
            f"a parameter of shape {tuple(tensor.shape)} has been modified by an inplace operation "
            f"between forward and backward: it is at version {tensor._version}, not {version}"
        )
    return tensor
