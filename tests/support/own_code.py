"""Models with layers of a user's own class, with and without the patch."""

import copy

import tiny
import torch
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import liger_kernel.transformers as liger


class PlainRMSNorm(LlamaRMSNorm):
    """RMSNorm in plain arithmetic, for subclasses that do more than that."""

    def normed(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * h.to(x.dtype)


class ActivationWithin(torch.nn.Module):
    """SiLU by a module below."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.SiLU()

    def forward(self, x):
        return self.inner(x)


def mlp_with_activation(act):
    """Return a function that makes a Llama MLP whose ``act_fn`` is ``act()``."""

    def make_mlp(config):
        mlp = LlamaMLP(config)
        mlp._modules.pop("act_fn", None)
        mlp.act_fn = act()
        return mlp

    return make_mlp


def patched_pair(change, **config):
    """Return (an unpatched model after ``change(model)``, a patched copy of it, the report)."""
    reference = tiny.model("llama", **config)
    change(reference)
    patched = copy.deepcopy(reference)
    return reference, patched, liger.apply_liger_kernel(patched)


def replace_norms(cls):
    """Return a function that replaces each layer's first norm by a ``cls`` of the same weight."""

    def change(model):
        for layer in model.model.layers:
            norm = cls(layer.input_layernorm.weight.numel())
            norm.load_state_dict(layer.input_layernorm.state_dict())
            layer.input_layernorm = norm

    return change


def replace_mlps(make_mlp):
    """Return a function that replaces each layer's MLP by ``make_mlp(config)``, same weights."""

    def change(model):
        for layer in model.model.layers:
            mlp = make_mlp(model.config)
            mlp.load_state_dict(layer.mlp.state_dict())
            layer.mlp = mlp

    return change
