"""What an autograd Function keeps for backward, where parameters need not pass through hooks.

A checkpoint has hooks on every saved tensor, which run twice in forward and once in backward, and
take the host longer than many a small kernel. A parameter lives as long as its module, whether it
is saved or not: a reference to it costs no memory, and is all that autograd itself keeps of it.
"""

from __future__ import annotations

import torch


def save_for_backward(ctx, *tensors) -> None:
    """Save tensors for `saved_tensors`. Those that are parameters do not pass through hooks."""
    others = []
    held = []
    for tensor in tensors:
        if issubclass(type(tensor), torch.nn.Parameter):
            held.append((tensor, tensor._version))
        else:
            held.append(None)
            others.append(tensor)
    ctx.held = held
    ctx.save_for_backward(*others)


def saved_tensors(ctx) -> list[torch.Tensor]:
    """Return what `save_for_backward` has saved.

    Raises:
        RuntimeError: one of them was written to since.
    """
    others = iter(ctx.saved_tensors)
    return [next(others) if held is None else unchanged(*held) for held in ctx.held]


def unchanged(tensor, version: int) -> torch.Tensor:
    """Return the tensor, or raise if it has another version."""
    if tensor._version != version:
        raise RuntimeError(
            f"a parameter of shape {tuple(tensor.shape)} has been modified by an inplace operation "
            f"between forward and backward: it is at version {tensor._version}, not {version}"
        )
    return tensor
