"""Decoder layers whose checkpoints wait in the host's memory, whoever switches them on
(`core.checkpoint`).

What backward computes again of such a layer takes less memory, too: norms are made again where they
would be kept, and attention goes by groups of heads. What attention gave waits on the host as well,
if there is place: it is not computed again."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from liger_kernel.core.checkpoint import offloaded
from liger_kernel.core.op import transformed
from liger_kernel.ops.attention.head_groups import HeadGroups, Made, worth_it
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

FLAG = "offloaded_checkpoints"
CHOSEN = "_gradient_checkpointing_func"  # where transformers keeps what it checkpoints a layer with
# the same: Dynamo of PyTorch 2.11 takes what __dict__ has of a property for the property
TRACED = "_liger_checkpoint"


def checkpointed(function, *args, **kwargs):
    """What a layer is checkpointed with if nobody has chosen."""
    return checkpoint(function, *args, **{"use_reentrant": False, **kwargs})


def _chosen(self):
    if torch.compiler.is_compiling():
        return getattr(self, TRACED)
    try:
        chosen = self.__dict__[CHOSEN]
    except KeyError:
        raise AttributeError(
            f"{type(self).__name__} has no checkpoint: nothing has set {CHOSEN}"
        ) from None
    return (
        called
        if chosen is checkpointed and transformed()
        else offloaded(chosen, functools.partial(_within, self))
    )


def called(function, *args, **options):
    """torch.func knows no checkpoints."""
    return function(*args)


def _within(layer, args):
    weights, groups = [], contextlib.nullcontext
    if worth_it(args):
        groups = functools.partial(HeadGroups, Made())

    def within():
        _check_weights(layer, weights)
        return groups()

    return within


def _check_weights(layer, then):
    """``then``: empty when the layer is called first, and what learns is noted. When it is called
    again it has to be as it was, or what is computed again, and what was kept, would not go
    together. In the place of a weight FSDP may have a part of it, or another view, before it is
    gathered; what does not learn, others may write and exchange."""
    if not torch.is_grad_enabled():
        return
    now = [(p, p._version) for p in layer.parameters() if p.requires_grad and not p.is_inference()]
    if not then:
        then += now
    for (was, version), (p, _) in zip(then, now, strict=True) if len(then) == len(now) else ():
        changed = (
            "written to" if was._version != version else "replaced" if _replaced(p, was) else None
        )
        if changed:
            name = next((name for name, each in layer.named_parameters() if each is p), "")
            raise RuntimeError(
                f"{type(layer).__name__}: {name} was {changed} between forward and backward, which calls the layer "
                "again; do it after backward"
            )


def _replaced(p, was):
    plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) and t._base is None for t in (p, was))
    return p is not was and plain and p.shape == was.shape and p.device == was.device


def _choose(self, chosen):
    self.__dict__[CHOSEN] = self.__dict__[TRACED] = chosen


def _forget(self):
    for name in (CHOSEN, TRACED):
        self.__dict__.pop(name, None)


@dataclass(frozen=True)
class Offloaded(Replacement):
    """A layer whose checkpoints wait on the host."""

    flag, column, kernel = FLAG, "layers", "checkpoints in host memory"
    guarded = False

    def members(self, cls):
        return {CHOSEN: property(_chosen, _choose, _forget)}


class OffloadedCheckpoints(Rewrite):
    """Every layer that transformers may checkpoint, whose checkpoints are switched on."""

    flags = (FLAG,)

    def may_be(self, module):
        from transformers.modeling_layers import GradientCheckpointingLayer

        return isinstance(module, GradientCheckpointingLayer)

    def apply(self, walk, module):
        if not _may_be_checkpointed(walk, module):
            return self.leave(walk, module, "its model cannot be checkpointed")
        walk.become(module, Offloaded(), (), self.name(module))
        if not module.gradient_checkpointing:
            for each in (
                module,
                *_owners(walk, module),
            ):  # a model's own switch tells it to leave its cache out
                if getattr(each, "gradient_checkpointing", None) is False:
                    each.gradient_checkpointing, each.__dict__[CHOSEN] = True, checkpointed
        if CHOSEN in module.__dict__:
            _choose(module, module.__dict__[CHOSEN])


def _may_be_checkpointed(walk, module) -> bool:
    """transformers refuses it of some models."""
    return all(
        getattr(owner, "supports_gradient_checkpointing", True) for owner in _owners(walk, module)
    )


def _owners(walk, module):
    path = walk.paths[module]
    return [m for m, at in walk.paths.items() if m is not module and _inside(path, at)]


def _inside(path, outer) -> bool:
    return not outer or path.startswith(outer + ".")


def give_back(module) -> None:
    """Checkpoints that nobody but this has switched on are switched off."""
    module.__dict__.pop(TRACED, None)
    if module.__dict__.get(CHOSEN) is checkpointed:
        del module.__dict__[CHOSEN]
        module.gradient_checkpointing = False
