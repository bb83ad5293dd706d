"""Layers as the package `kernels` wants them: with a forward, without a constructor or a state.

`kernels` binds such a forward to a module of the model, whose attributes it reads, or to the module
that it makes of a function. A module that is not proved to compute the same runs its own forward
(`dispatch`). To add a layer, add a line to `LAYERS`."""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from liger_kernel.hub.dispatch import choose_forward, describe_choice
from liger_kernel.hub.linear_attention import (
    Convolution,
    DeltaRule,
    prove_convolution,
    prove_delta_rule,
)
from liger_kernel.hub.loss import CausalLMLoss, prove_loss
from liger_kernel.hub.rotary import (
    RotaryFunction,
    RotaryTables,
    prove_rotary_embedding,
    prove_rotary_function,
)
from liger_kernel.ops.mlp.tiled_mlp import apply_tiled_mlp
from liger_kernel.patch.layers import experts, gated_norm, mlp, norm, router
from liger_kernel.patch.proof.conditions import are_plain_tensors, has_own_forward
from liger_kernel.patch.proof.hooks import has_hooks
from liger_kernel.patch.proof.rewrite import Replacement

# ---- kinds of modules, as `choose_forward` takes them ----


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of modules, and what runs in the place of their forward.

    Attributes:
        prove: ``prove(module, reads)`` returns a `Replacement`, or the reason why it is not known
            what the module computes. ``reads`` is a `ReadRecorder`.
        replacement_class: the class of the replacements that are of this kind.
        activations: if given, those of ``replacement.act`` that are, named as in
            `patch.layers.activations`.
        in_tiles: True if it is computed in tiles of tokens.
    """

    prove: Callable
    replacement_class: type
    activations: tuple[str, ...] | None = None
    in_tiles: bool = False

    def forward(self, replacement: Replacement, cls: type) -> Callable | None:
        """Return the forward for modules of the class, or None if they are of another kind."""
        if not isinstance(replacement, self.replacement_class):
            return None
        if self.activations is not None and replacement.act not in self.activations:
            return None
        forward = replacement.class_members(cls)["forward"]
        if self.in_tiles:
            forward = functools.partial(_run_in_tiles, forward)
        return _take_one_argument(forward, cls) if replacement.takes_one_argument else forward


def _run_in_tiles(forward, module, x):
    """Compute the module in tiles, unless code around its children would see the tiles."""
    children = [each for each in module.modules() if each is not module]
    if not are_plain_tensors(x) or x.dim() < 2:
        return forward(module, x)
    if has_hooks(*children) or any(map(_is_replaced, children)):
        return forward(module, x)
    return apply_tiled_mlp(forward, module, x)


def _is_replaced(module) -> bool:
    """Return True if a forward was set on the object that is neither its class's nor a layer's."""
    if not has_own_forward(module):
        return False
    return not _is_of_layer(getattr(module.__dict__["forward"], "__func__", None))


def _is_of_layer(function) -> bool:
    return getattr(function, "__module__", None) == __name__


def _take_one_argument(forward, cls):
    """Return a forward that takes the argument by place or by the name that the class gives it."""
    class_forward = cls.forward
    _, first, *_ = inspect.signature(class_forward).parameters

    def forward_of_any(module, *args, **kwargs):
        if len(args) == 1 and not kwargs:
            return forward(module, *args)
        if not args and kwargs.keys() == {first}:
            return forward(module, kwargs[first])
        return class_forward(module, *args, **kwargs)

    return forward_of_any


SILU = ("silu",)
GELU = "tanh", "none"

RMS_NORM = Kind(norm.prove, norm.RMSNorm)
GATED_RMS_NORM = Kind(gated_norm.prove, gated_norm.GatedRMSNorm)
SWIGLU = Kind(mlp.prove, mlp.GatedMLP, SILU)
TILED_SWIGLU = Kind(mlp.prove, mlp.GatedMLP, SILU, in_tiles=True)
GEGLU = Kind(mlp.prove, mlp.GatedMLP, GELU)
TILED_GEGLU = Kind(mlp.prove, mlp.GatedMLP, GELU, in_tiles=True)
EXPERTS = Kind(experts.prove, experts.Experts)
ROUTER = Kind(router.prove, router.Router)
ROTARY = Kind(prove_rotary_function, RotaryFunction)
ROTARY_TABLES = Kind(prove_rotary_embedding, RotaryTables)
CONVOLUTION = Kind(prove_convolution, Convolution)
DELTA_RULE = Kind(prove_delta_rule, DeltaRule)
CAUSAL_LM_LOSS = Kind(prove_loss, CausalLMLoss)


# ---- the layers ----

# Name of the layer -> what `kernels` knows the modules by: names in transformers' mapping or on its
# classes, or one that the user gives to a class; the kind, None for the module's own forward; the
# arguments of forward. `kernels` compares how many there are, and how they may be given.
LAYERS = {
    "LigerRMSNorm": ("RMSNorm, RMSNormZeroCentered", RMS_NORM, "hidden_states"),
    "LigerRMSNormGated": ("RMSNormGated", GATED_RMS_NORM, "hidden_states gate"),
    "LigerSwiGLUMLP": ("SwiGLUMLP", SWIGLU, "x"),
    "LigerGEGLUMLP": ("GeGLUMLP", GEGLU, "x"),
    "LigerTiledSwiGLUMLP": ("SwiGLUMLP", TILED_SWIGLU, "x"),
    "LigerTiledGEGLUMLP": ("GeGLUMLP", TILED_GEGLU, "x"),
    "LigerExperts": ("Experts", EXPERTS, "hidden_states top_k_index top_k_weights"),
    "LigerRouter": ("SoftmaxTopKRouter", ROUTER, "hidden_states"),
    "LigerRotaryPosEmb": ("rotary_pos_emb", ROTARY, "q k cos sin unsqueeze_dim"),
    "LigerRotaryEmbedding": ("RotaryEmbedding", ROTARY_TABLES, "x position_ids"),
    "LigerCausalConv1d": (
        "causal_conv1d_fn",
        CONVOLUTION,
        "hidden_states weight bias activation **kwargs",
    ),
    "LigerGatedDeltaRule": (
        "chunk_gated_delta_rule",
        DELTA_RULE,
        "query key value g beta chunk_size initial_state output_final_state"
        " use_qk_l2norm_in_kernel **kwargs",
    ),
    "LigerLinear": ("Linear", None, "input"),
    "LigerForCausalLMLossLayer": (
        "ForCausalLMLoss",
        CAUSAL_LM_LOSS,
        "logits labels vocab_size num_items_in_batch ignore_index shift_labels **kwargs",
    ),
}


def _make_layer(name: str, names: str, kind: Kind | None, arguments: str) -> type:
    """Make the class of a row of `LAYERS`."""

    def forward(self, *args, **kwargs):
        run = type(self).forward if kind is None else choose_forward(kind, self)
        return run(self, *args, **kwargs)

    forward.__qualname__ = f"{name}.forward"
    parameters = [_parameter(each) for each in ("self", *arguments.split())]
    forward.__signature__ = inspect.Signature(parameters)
    members = dict(forward=forward, can_torch_compile=True)
    return type(name, (torch.nn.Module,), {**members, "__module__": __name__, "__doc__": names})


def _parameter(name):
    if name.startswith("**"):
        return inspect.Parameter(name[2:], inspect.Parameter.VAR_KEYWORD)
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)


# `kernels` looks a layer up among this file's names
globals().update({name: _make_layer(name, *row) for name, row in LAYERS.items()})


def report(model: torch.nn.Module) -> str:
    """Say which layers a model has and what they run, one line for all modules that are alike.

    Modules are tried when they are first called, outside of a graph.
    """
    counts = collections.Counter()
    for module in model.modules():
        counts[_describe(module, type(module).__name__)] += 1
        for name, function in getattr(module, "_kernel_funcs", {}).items():
            counts[_describe(function, name)] += 1
    del counts[None]
    return "\n".join(f"{count} x {line}" for line, count in counts.items())


def _describe(module, name) -> str | None:
    """Describe the layer of a module, or return None if it has none of ours."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    if not _is_of_layer(function):
        return None
    layer_name = function.__qualname__.removesuffix(".forward")
    kind = LAYERS[layer_name][1]
    outcome = "its own forward" if kind is None else describe_choice(kind, module)
    return f"{name}, {layer_name}: {outcome}"
