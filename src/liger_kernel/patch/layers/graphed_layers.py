"""Decoder layers that run as CUDA graphs (`core.layer_graphs`), where the host is slower than the
GPU: short sequences, small batches, adapters.

Recognised are transformers' ``GradientCheckpointingLayer``s that get one tensor beside keywords.
The layers that one module holds share their graphs' memory. A layer is recorded with its
checkpoint, if that is torch's and no other; it draws no random numbers, so that none are kept."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from liger_kernel.core.layer_graphs import LayerGraphs, LayerStack
from liger_kernel.patch.layers import kept_layers
from liger_kernel.patch.layers.offloading import CHECKPOINT_ATTRIBUTE, OffloadedCheckpoints
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

FLAG = "cuda_graphs"
GRAPHS_ATTRIBUTE = "_liger_graphs"


@dataclass(frozen=True)
class GraphedLayer(Replacement):
    """A layer whose calls are CUDA graphs."""

    flag = FLAG
    column = "layers"
    kernel = "a CUDA graph"
    guarded = False

    def class_members(self, cls):
        original_call = cls.__call__

        def call(self, *args, **kwargs):
            graphs = self.__dict__.get(GRAPHS_ATTRIBUTE)
            if graphs is None or len(args) != 1 or not _can_record_checkpoint(self, *args):
                return original_call(self, *args, **kwargs)

            def run_recordable(x, **kwargs):
                with _recordable_checkpoint(self):
                    return original_call(self, x, **kwargs)

            run = functools.partial(original_call, self)
            return graphs.call(self, run, *args, kwargs, run_recordable)

        return {"__call__": call, "_liger_state": {GRAPHS_ATTRIBUTE: None}}


def _is_checkpointed(layer):
    return layer.gradient_checkpointing and layer.training


def _can_record_checkpoint(layer, x):
    """Return True if the layer is not checkpointed, or by torch's function and no other.

    A reentrant one gives no gradients where the input needs none."""
    if not _is_checkpointed(layer):
        return True
    function, options = layer.__dict__.get(CHECKPOINT_ATTRIBUTE), {}
    if isinstance(function, functools.partial) and not function.args:
        function, options = function.func, function.keywords
    if function is not checkpoint or not {*options} <= {"use_reentrant", "preserve_rng_state"}:
        return False
    return options.get("use_reentrant") is False or (torch.is_tensor(x) and x.requires_grad)


@contextlib.contextmanager
def _recordable_checkpoint(layer):
    """Give the layer, for a while, a checkpoint that asks for no state of random numbers, which a
    capture does not allow, and for no second run of autograd."""
    if not _is_checkpointed(layer):
        yield
        return
    before = layer.__dict__[CHECKPOINT_ATTRIBUTE]
    layer.__dict__[CHECKPOINT_ATTRIBUTE] = functools.partial(
        checkpoint, use_reentrant=False, preserve_rng_state=False
    )
    try:
        yield
    finally:
        layer.__dict__[CHECKPOINT_ATTRIBUTE] = before


def _stacks_of(model):
    """Return a new stack for each layer that transformers can checkpoint."""
    of_layer = {}
    for layers in kept_layers.stacks(model):
        of_layer |= dict.fromkeys(layers, LayerStack())
    return of_layer


class GraphedLayers(Rewrite):
    """Every layer that transformers can checkpoint, and that is checkpointed in no way of ours."""

    flags = (FLAG,)
    could_apply = OffloadedCheckpoints.could_apply

    def apply(self, walk, module):
        stack = walk.call_once(_stacks_of, walk.model).get(module)
        if stack is None:
            return
        walk.convert(module, GraphedLayer(), (), self.name(module))
        module.__dict__[GRAPHS_ATTRIBUTE] = LayerGraphs(stack)
