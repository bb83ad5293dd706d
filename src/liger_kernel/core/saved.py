"""Saving tensors for backward, trainable parameters without a checkpoint's hooks.

A checkpoint has hooks on every saved tensor, which run twice in forward and once in backward, and
take the host longer than many a small kernel. A trainable parameter is held by its own node of the
graph, so that a reference to it costs no memory, and nobody can put another tensor in its place.
Neither is true of a frozen one, which may be brought to the device for a call. Other hooks, such as
those of `torch.autograd.graph.save_on_cpu`, get everything: what they keep may be copies, to which
a step of the optimizer before backward does nothing.
"""

from __future__ import annotations

import torch

from liger_kernel.core.overwrite import is_checkpoint_hook


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


def _check_version(tensor, version: int | None) -> torch.Tensor:
    if version is not None and tensor._version != version:
        raise RuntimeError(
            f"a parameter of shape {tuple(tensor.shape)} has been modified by an inplace operation "
            f"between forward and backward: it is at version {tensor._version}, not {version}"
        )
    return tensor
