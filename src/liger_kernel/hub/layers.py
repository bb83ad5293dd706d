"""Layers as the package `kernels` wants them: with a forward, without a constructor or a state.

`kernels` binds such a forward to a module of the model, whose attributes it reads. The docstring of
each layer says which name of `kernels` it is for. A module that is not proved to compute the same
runs its own forward (`dispatch`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from liger_kernel.hub.dispatch import choose_forward
from liger_kernel.hub.loss import CausalLMLoss, prove_loss
from liger_kernel.ops.mlp.tiled_mlp import apply_tiled_mlp
from liger_kernel.patch.layers import mlp, norm
from liger_kernel.patch.proof.conditions import are_plain_tensors

# ---- the kinds of layers, as `choose_forward` takes them ----


@dataclass(frozen=True)
class RMSNormLayer:
    """RMSNorm of any offset and rounding that `patch.layers.norm` proves."""

    prove = staticmethod(norm.prove)

    def forward(self, replacement, cls):
        if not isinstance(replacement, norm.RMSNorm):
            return None
        return replacement.class_members(cls)["forward"]


@dataclass(frozen=True)
class GatedMLPLayer:
    """A gated MLP with one of these activations, named as in `patch.layers.activations`.

    ``tiled``: it is computed in tiles of tokens.
    """

    activations: tuple[str, ...]
    tiled: bool = False
    prove = staticmethod(mlp.prove)

    def forward(self, replacement, cls):
        if not isinstance(replacement, mlp.GatedMLP) or replacement.act not in self.activations:
            return None
        forward = replacement.class_members(cls)["forward"]
        return functools.partial(_run_in_tiles, forward) if self.tiled else forward


def _run_in_tiles(forward, module, x):
    if are_plain_tensors(x) and x.dim() > 1:
        return apply_tiled_mlp(forward, module, x)
    return forward(module, x)


@dataclass(frozen=True)
class CausalLMLossLayer:
    """transformers' ``ForCausalLMLoss``."""

    prove = staticmethod(prove_loss)

    def forward(self, replacement, cls):
        return replacement.forward if isinstance(replacement, CausalLMLoss) else None


RMS_NORM = RMSNormLayer()
SWIGLU = GatedMLPLayer(("silu",))
TILED_SWIGLU = GatedMLPLayer(("silu",), tiled=True)
GEGLU = GatedMLPLayer(("tanh", "none"))
TILED_GEGLU = GatedMLPLayer(("tanh", "none"), tiled=True)
CAUSAL_LM_LOSS = CausalLMLossLayer()


# ---- the layers ----


class LigerRMSNorm(torch.nn.Module):
    """For "RMSNorm": `liger_rms_norm`, with the module's weight, eps, offset and rounding."""

    can_torch_compile = True

    def forward(self, hidden_states):
        return choose_forward(RMS_NORM, self)(self, hidden_states)


class LigerSwiGLUMLP(torch.nn.Module):
    """For "SwiGLUMLP": ``down_proj(silu(gate_proj(x))·up_proj(x))``.

    The projections are called unless all they do is multiply.
    """

    can_torch_compile = True

    def forward(self, x):
        return choose_forward(SWIGLU, self)(self, x)


class LigerGEGLUMLP(torch.nn.Module):
    """For "GeGLUMLP": as `LigerSwiGLUMLP` with GELU, the exact or the tanh one as in the module."""

    can_torch_compile = True

    def forward(self, x):
        return choose_forward(GEGLU, self)(self, x)


class LigerTiledSwiGLUMLP(torch.nn.Module):
    """For "SwiGLUMLP": `LigerSwiGLUMLP` in ⌈tokens / hidden size⌉ tiles.

    Backward computes them again (`apply_tiled_mlp`).
    """

    can_torch_compile = True

    def forward(self, x):
        return choose_forward(TILED_SWIGLU, self)(self, x)


class LigerTiledGEGLUMLP(torch.nn.Module):
    """For "GeGLUMLP": `LigerGEGLUMLP` in tiles."""

    can_torch_compile = True

    def forward(self, x):
        return choose_forward(TILED_GEGLU, self)(self, x)


class LigerLinear(torch.nn.Module):
    """For "Linear": the module's own product.

    A linear layer alone has nothing to fuse. The mappings name it.
    """

    can_torch_compile = True

    def forward(self, input):
        return type(self).forward(self, input)


class LigerForCausalLMLossLayer(torch.nn.Module):
    """For "ForCausalLMLoss": transformers' loss by `liger_cross_entropy`.

    It needs no copy of the logits in fp32.
    """

    can_torch_compile = True

    def forward(
        self,
        logits,
        labels,
        vocab_size,
        num_items_in_batch=None,
        ignore_index=-100,
        shift_labels=None,
        **kwargs,
    ):
        return choose_forward(CAUSAL_LM_LOSS, self)(
            self,
            logits,
            labels,
            vocab_size,
            num_items_in_batch,
            ignore_index,
            shift_labels,
            **kwargs,
        )
