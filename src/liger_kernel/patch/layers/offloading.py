"""Decoder layers whose gradient checkpoints wait in the host's memory (`core.checkpoint`).

Recognised are transformers' ``GradientCheckpointingLayer``s, whoever switches checkpointing on. The
function that a layer is checkpointed with, `CHECKPOINT_ATTRIBUTE`, becomes a property that gives
the same function with its inputs on the host. Where checkpointing is off it is switched on, with
`default_checkpoint`.

Backward runs such a layer once more, which then takes less memory, too: norms are recomputed
instead of kept, and attention runs by groups of heads. Attention's output waits on the host as well
if there is room, and is not computed again.

A layer is left alone if transformers refuses to checkpoint its model."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from liger_kernel.core.checkpoint import offload_inputs
from liger_kernel.core.devices import in_func_transform
from liger_kernel.ops.attention.head_groups import AttentionCalls, HeadGroups, may_use_head_groups
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

FLAG = "offloaded_checkpoints"
# where transformers keeps the function that a layer is checkpointed with
CHECKPOINT_ATTRIBUTE = "_gradient_checkpointing_func"
# the same function: Dynamo of PyTorch 2.11 takes what __dict__ has of a property for the property
TRACED_ATTRIBUTE = "_liger_checkpoint"


def default_checkpoint(function, *args, **kwargs):
    """Checkpoint a layer for which nobody has chosen another function."""
    return checkpoint(function, *args, **{"use_reentrant": False, **kwargs})


def call_directly(function, *args, **options):
    """Call the layer without a checkpoint, which torch.func does not know."""
    return function(*args)


@dataclass(frozen=True)
class OffloadedLayer(Replacement):
    """A layer whose checkpoints wait on the host."""

    flag = FLAG
    column = "layers"
    kernel = "checkpoints in host memory"
    guarded = False

    def class_members(self, cls):
        return {CHECKPOINT_ATTRIBUTE: property(_get_checkpoint, set_checkpoint, delete_checkpoint)}


def _get_checkpoint(layer):
    if torch.compiler.is_compiling():
        return getattr(layer, TRACED_ATTRIBUTE)
    try:
        function = layer.__dict__[CHECKPOINT_ATTRIBUTE]
    except KeyError:
        raise AttributeError(
            f"{type(layer).__name__} has no checkpoint: nothing has set {CHECKPOINT_ATTRIBUTE}"
        ) from None
    if function is default_checkpoint and in_func_transform():
        return call_directly
    return offload_inputs(function, functools.partial(_context_of_calls, layer))


def set_checkpoint(layer, function):
    layer.__dict__[CHECKPOINT_ATTRIBUTE] = layer.__dict__[TRACED_ATTRIBUTE] = function


def delete_checkpoint(layer):
    for name in (CHECKPOINT_ATTRIBUTE, TRACED_ATTRIBUTE):
        layer.__dict__.pop(name, None)


def _context_of_calls(layer, args):
    """Return a function that makes the context of each call of the layer, in forward and in
    backward."""
    first_call_weights = []
    make_context = contextlib.nullcontext
    if may_use_head_groups(args):
        make_context = functools.partial(HeadGroups, AttentionCalls())

    def context():
        _check_weights(layer, first_call_weights)
        return make_context()

    return context


def _check_weights(layer, first_call_weights: list) -> None:
    """Raise if a trainable weight has changed since the layer's first call.

    What backward recomputes, and what was kept, would not go together. In the place of a weight
    FSDP may have a part of it, or another view, before it is gathered. Weights that do not train
    may be written to and exchanged.

    Args:
        first_call_weights: (weight, its version) at the first call; filled in if it is empty.

    Raises:
        RuntimeError: a weight was written to or replaced.
    """
    if not torch.is_grad_enabled():
        return
    weights = [
        (p, p._version) for p in layer.parameters() if p.requires_grad and not p.is_inference()
    ]
    if not first_call_weights:
        first_call_weights += weights
    if len(first_call_weights) != len(weights):
        return
    for (first, version), (weight, _) in zip(first_call_weights, weights, strict=True):
        if first._version != version:
            change = "written to"
        elif _is_replaced(weight, first):
            change = "replaced"
        else:
            continue
        name = next((name for name, p in layer.named_parameters() if p is weight), "")
        raise RuntimeError(
            f"{type(layer).__name__}: {name} was {change} between forward and backward, which "
            "calls the layer again; do it after backward"
        )


def _is_replaced(weight, first) -> bool:
    if weight is first or weight.shape != first.shape or weight.device != first.device:
        return False
    types = torch.Tensor, torch.nn.Parameter
    return all(type(t) in types and t._base is None for t in (weight, first))


class OffloadedCheckpoints(Rewrite):
    """Every layer that transformers can checkpoint."""

    flags = (FLAG,)

    def could_apply(self, module):
        from transformers.modeling_layers import GradientCheckpointingLayer

        return isinstance(module, GradientCheckpointingLayer)

    def apply(self, walk, module):
        owners = _owners(walk, module)
        if not all(getattr(owner, "supports_gradient_checkpointing", True) for owner in owners):
            return self.leave_alone(walk, module, "its model cannot be checkpointed")
        walk.convert(module, OffloadedLayer(), (), self.name(module))
        switch_on(walk, module)
        if CHECKPOINT_ATTRIBUTE in module.__dict__:
            set_checkpoint(module, module.__dict__[CHECKPOINT_ATTRIBUTE])


def switch_on(walk, module) -> None:
    """Switch a layer's checkpoint on, and those of the modules that it is part of, if it is off."""
    if module.gradient_checkpointing:
        return
    # a model's own switch tells it to leave its cache out
    for switched in (module, *_owners(walk, module)):
        if getattr(switched, "gradient_checkpointing", None) is False:
            switched.gradient_checkpointing = True
            switched.__dict__[CHECKPOINT_ATTRIBUTE] = default_checkpoint


def _owners(walk, module) -> list:
    """Return the modules that the module is part of."""
    path = walk.module_paths[module]
    return [
        owner
        for owner, owner_path in walk.module_paths.items()
        if owner is not module and (not owner_path or path.startswith(owner_path + "."))
    ]


def revert(module) -> None:
    """Switch a module's checkpoints off if nobody but this rewrite has switched them on."""
    module.__dict__.pop(TRACED_ATTRIBUTE, None)
    if module.__dict__.get(CHECKPOINT_ATTRIBUTE) is default_checkpoint:
        del module.__dict__[CHECKPOINT_ATTRIBUTE]
        module.gradient_checkpointing = False
