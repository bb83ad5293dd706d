"""Layers that are not recomputed although the model is checkpointed: the last ones of each stack.

Recognised are transformers' ``GradientCheckpointingLayer``s. Those that one module holds, a
``ModuleList`` as a rule, are a stack. What is kept of the last ones is freed first in backward,
before the layers below are recomputed.

A layer's own flag does not suffice: the Trainer switches checkpointing on after the patch, and sets
the flag of every layer anew. So the function that a layer is checkpointed with becomes a property,
as in `offloading`, which gives one that calls the layer. The layer goes on to be checkpointed for
everybody else: it has no cache, and its flag and its function are the user's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from liger_kernel.patch.layers import offloading
from liger_kernel.patch.layers.offloading import (
    CHECKPOINT_ATTRIBUTE,
    OffloadedCheckpoints,
    OffloadedLayer,
    call_directly,
    delete_checkpoint,
    set_checkpoint,
)
from liger_kernel.patch.proof.private import original_class, set_class
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite, replacement_of

FLAG = "keep_layers"
# the names by which a wrapper holds a layer: that of torch's and accelerate's own checkpoints, that
# of FSDP1, that of torch.compile
CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module"
WRAPPERS = CHECKPOINT_WRAPPER, "_fsdp_wrapped_module", "_orig_mod"
NOTE = (
    f"{FLAG} is about transformers' own gradient checkpointing: where FSDP or accelerate "
    "checkpoints the layers, all of them are recomputed"
)


@dataclass(frozen=True)
class KeptLayer(Replacement):
    """A layer that is called without its checkpoint."""

    flag = FLAG
    column = "layers"
    kernel = "not recomputed"
    guarded = False

    def class_members(self, cls):
        return {CHECKPOINT_ATTRIBUTE: property(_get_checkpoint, set_checkpoint, delete_checkpoint)}


def _get_checkpoint(layer):
    return call_directly


def stacks(model: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """List the layers that transformers can checkpoint, by the module that holds them.

    Layers within a layer are not listed."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers_of = {}
    outermost = None
    for path, module in model.named_modules():
        if not isinstance(module, GradientCheckpointingLayer):
            continue
        if outermost is not None and (not outermost or path.startswith(outermost + ".")):
            continue
        outermost = path
        names = path.split(".")
        while names[-1] in WRAPPERS:
            names.pop()
        layers_of.setdefault(".".join(names[:-1]), []).append(module)
    return list(layers_of.values())


def last_layers(model: torch.nn.Module, count: int) -> set[torch.nn.Module]:
    """Return the last ``count`` layers of each stack, and all modules within them."""
    return {
        module for stack in stacks(model) for layer in stack[-count:] for module in layer.modules()
    }


class KeptLayers(Rewrite):
    """The last layers of each stack: as many as the switch says."""

    flags = (FLAG,)
    applies_to = type(None), KeptLayer, OffloadedLayer
    could_apply = OffloadedCheckpoints.could_apply

    def apply(self, walk, module):
        before = replacement_of(module)
        is_last = module in walk.call_once(last_layers, walk.model, int(walk.switches[FLAG]))
        if is_last == isinstance(before, KeptLayer):
            return
        if CHECKPOINT_WRAPPER in walk.module_paths[module].split("."):
            self.leave_alone(walk, module, "a CheckpointWrapper recomputes it")
            return
        if before is not None:
            if "_liger" not in vars(type(module)):
                reason = "it was given another class after it was patched"
                self.leave_alone(walk, module, reason)
                return
            set_class(module, original_class(type(module)))
        if is_last:
            walk.convert(module, KeptLayer(), (), self.name(module))
            if NOTE not in walk.report.notes:
                walk.report.notes.append(NOTE)
            if offloading.FLAG in walk.flags_on:
                offloading.switch_on(walk, module)
        elif offloading.FLAG in walk.flags_done - walk.flags_on:
            OffloadedCheckpoints().apply(walk, module)
