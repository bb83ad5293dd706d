"""Models with layers of a user's own class, with and without the patch."""

import copy

import tiny
import torch
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import liger_kernel.transformers as liger


class Norm(LlamaRMSNorm):
    """RMSNorm in plain arithmetic, for subclasses that do something beside."""

    def normed(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * h.to(x.dtype)


def with_act(act):
    def mlp(config):
        made = LlamaMLP(config)
        made._modules.pop("act_fn", None)
        made.act_fn = act()
        return made

    return mlp


def models(change, **config):
    """(An unpatched model, the same one patched, the report); the first is that of the user's own
    code."""
    theirs = tiny.model("llama", **config)
    change(theirs)
    mine = copy.deepcopy(theirs)
    return theirs, mine, liger.apply_liger_kernel(mine)


def with_norms(cls):
    def change(model):
        for layer in model.model.layers:
            norm = cls(layer.input_layernorm.weight.numel())
            norm.load_state_dict(layer.input_layernorm.state_dict())
            layer.input_layernorm = norm

    return change


def with_mlps(make):
    def change(model):
        for layer in model.model.layers:
            mlp = make(model.config)
            mlp.load_state_dict(layer.mlp.state_dict())
            layer.mlp = mlp

    return change
