"""Layers as the package `kernels` wants them: without a constructor and a state, with the forward
alone.

`kernels` binds such a forward to a module of the model, whose attributes it reads. What it replaces
is in the docstring of each; a module that is proved to compute something else runs its own forward
(`ours`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from liger_kernel.hub.loss import CausalLMLoss, prove_loss
from liger_kernel.hub.ours import forward_of
from liger_kernel.ops.mlp.tiled_mlp import apply_tiled_mlp
from liger_kernel.patch.layers import mlp, norm
from liger_kernel.patch.proof.conditions import plain


@dataclass(frozen=True)
class RMSNorm:
    prove = staticmethod(norm.prove)

    def forward(self, what, cls):
        return what.members(cls)["forward"] if isinstance(what, norm.Norm) else None


@dataclass(frozen=True)
class GatedMLP:
    """With one of these activations, by the names of `patch.mlp`; in tiles of tokens or whole."""

    acts: tuple[str, ...]
    tiled: bool = False
    prove = staticmethod(mlp.prove)

    def forward(self, what, cls):
        if not isinstance(what, mlp.GLU) or what.act not in self.acts:
            return None
        whole = what.members(cls)["forward"]
        return functools.partial(_tiled, whole) if self.tiled else whole


def _tiled(whole, module, x):
    return apply_tiled_mlp(whole, module, x) if plain(x) and x.dim() > 1 else whole(module, x)


@dataclass(frozen=True)
class Loss:
    prove = staticmethod(prove_loss)

    def forward(self, what, cls):
        return what.forward if isinstance(what, CausalLMLoss) else None


RMS_NORM, LOSS = RMSNorm(), Loss()
SWIGLU, TILED_SWIGLU = GatedMLP(("silu",)), GatedMLP(("silu",), tiled=True)
GEGLU, TILED_GEGLU = GatedMLP(("tanh", "none")), GatedMLP(("tanh", "none"), tiled=True)


class LigerRMSNorm(torch.nn.Module):
    """For "RMSNorm": `liger_rms_norm`, with the module's weight, eps and offset, rounded as the
    module rounds."""

    can_torch_compile = True

    def forward(self, hidden_states):
        return forward_of(RMS_NORM, self)(self, hidden_states)


class LigerSwiGLUMLP(torch.nn.Module):
    """For "SwiGLUMLP": ``down_proj(silu(gate_proj(x))·up_proj(x))``. The projections are called
    unless all they do is multiply."""

    can_torch_compile = True

    def forward(self, x):
        return forward_of(SWIGLU, self)(self, x)


class LigerGEGLUMLP(torch.nn.Module):
    """For "GeGLUMLP": as `LigerSwiGLUMLP` with GELU, the exact or the tanh one as in the module."""

    can_torch_compile = True

    def forward(self, x):
        return forward_of(GEGLU, self)(self, x)


class LigerTiledSwiGLUMLP(torch.nn.Module):
    """For "SwiGLUMLP": the same in ⌈tokens / hidden size⌉ tiles, which backward computes again
    (`apply_tiled_mlp`)."""

    can_torch_compile = True

    def forward(self, x):
        return forward_of(TILED_SWIGLU, self)(self, x)


class LigerTiledGEGLUMLP(torch.nn.Module):
    """For "GeGLUMLP": `LigerGEGLUMLP` in tiles."""

    can_torch_compile = True

    def forward(self, x):
        return forward_of(TILED_GEGLU, self)(self, x)


class LigerLinear(torch.nn.Module):
    """For "Linear": the module's own product. A linear layer alone has nothing to fuse; the
    mappings name it."""

    can_torch_compile = True

    def forward(self, input):
        return type(self).forward(self, input)


class LigerForCausalLMLossLayer(torch.nn.Module):
    """For "ForCausalLMLoss": transformers' loss of logits by `liger_cross_entropy`, without their
    copy in fp32."""

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
        given = logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels
        return forward_of(LOSS, self)(self, *given, **kwargs)
