"""Modules with and without the patch, for what a proof rests on."""

import copy

import tiny
import torch
from hardware import DEVICE
from transformers.models.llama.modeling_llama import LlamaMLP

from liger_kernel.ops import functional
from liger_kernel.ops.mlp import activation_linear, swiglu_mlp
from liger_kernel.transformers import apply_liger_kernel


def rows(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def holding(*modules):
    """A model of these modules, patched, and a copy that is not."""
    theirs = torch.nn.ModuleList(modules).to(DEVICE)
    with torch.no_grad():
        for i, p in enumerate(theirs.parameters()):
            p.copy_(rows(*p.shape, seed=i))
    mine = copy.deepcopy(theirs)
    return mine, theirs, trusting(mine, swiglu=True, geglu=True, rms_norm=True, layer_norm=True)


def trusting(model, **switches):
    """Patch it, and try the tests' own classes, too: what they are for is what the trial sees."""
    return apply_liger_kernel(model, trust=own_classes(model), **switches)


def own_classes(model):
    known = "torch.", "transformers."
    return {type(m) for m in model.modules() if not type(m).__module__.startswith(known)}


def patched(module) -> bool:
    return hasattr(type(module), "_liger")


def counted(monkeypatch):
    """Which of our operators ran."""
    calls = []

    def counting(name, function):
        return lambda *args, **kwargs: calls.append(name) or function(*args, **kwargs)

    monkeypatch.setattr(
        activation_linear, "gated_linear", counting("glu", activation_linear.gated_linear)
    )
    monkeypatch.setattr(swiglu_mlp.GatedMLP, "apply", counting("glu", swiglu_mlp.GatedMLP.apply))
    for name in ("liger_rms_norm", "liger_layer_norm", "liger_rope"):
        monkeypatch.setattr(functional, name, counting(name, getattr(functional, name)))
    return calls


def same(mine, theirs, x=None):
    """Both give the same, to rounding: in fp32, of sums of 48 terms that may be taken in another
    order."""
    x = rows(2, 5, 32, seed=9) if x is None else x
    got, want = mine(x), theirs(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


CONFIG = tiny.config("llama")  # one, as in a model


def mlp(**attributes):
    made = LlamaMLP(CONFIG)
    for name, value in attributes.items():
        put(made, name, value)
    return made


def put(module, name, value):
    """In the place of a child, too, if it is none."""
    module._modules.pop(name, None)
    setattr(module, name, value)


def with_(cls, **attributes):
    made = mlp(**attributes)
    made.__class__ = cls
    return made
