"""What an autograd Function keeps for backward, where parameters that learn need not pass through
hooks.

A checkpoint has hooks on every saved tensor, which run twice in forward and once in backward, and
take the host longer than many a small kernel. A parameter that learns is held by its own node of
the graph, so that a reference to it costs no memory, and nobody can put another tensor in its
place. Neither is true of a frozen one, which may be brought to the device for a call.
"""

from __future__ import annotations

import torch


def save_for_backward(ctx, *tensors) -> None:
    """Save tensors for `saved_tensors`. Parameters that learn do not pass through hooks."""
    # autograd does not compare versions of what hooks have packed
    compares = torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    others = []
    held = []
    for tensor in tensors:
        if _learns(tensor):
            held.append((tensor, tensor._version if compares else None))
        else:
            held.append(None)
            others.append(tensor)
    ctx.held = held
    ctx.save_for_backward(*others)


def _learns(tensor) -> bool:
    is_parameter = issubclass(type(tensor), torch.nn.Parameter)
    return is_parameter and tensor.requires_grad and not tensor.is_inference()


def saved_tensors(ctx) -> list[torch.Tensor]:
    """Return what `save_for_backward` has saved.

    Raises:
        RuntimeError: one of them was written to since.
    """
    others = iter(ctx.saved_tensors)
    return [next(others) if held is None else _unchanged(*held) for held in ctx.held]


def _unchanged(tensor, version: int | None) -> torch.Tensor:
    if version is not None and tensor._version != version:
        raise RuntimeError(
            f"a parameter of shape {tuple(tensor.shape)} has been modified by an inplace operation "
            f"between forward and backward: it is at version {tensor._version}, not {version}"
        )
    return tensor
