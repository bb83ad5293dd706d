"""Modules with and without the patch, for tests of what a proof rests on."""

import copy

import tiny
import torch
from hardware import DEVICE
from transformers.models.llama.modeling_llama import LlamaMLP

from liger_kernel.ops import functional
from liger_kernel.ops.mlp import activation_linear, swiglu_mlp
from liger_kernel.transformers import apply_liger_kernel


def random_rows(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def model_of(*modules):
    """Return (a patched model of these modules, an unpatched copy, the report)."""
    reference = torch.nn.ModuleList(modules).to(DEVICE)
    with torch.no_grad():
        for i, p in enumerate(reference.parameters()):
            p.copy_(random_rows(*p.shape, seed=i))
    patched = copy.deepcopy(reference)
    report = apply_with_trust(patched, swiglu=True, geglu=True, rms_norm=True, layer_norm=True)
    return patched, reference, report


def apply_with_trust(model, **switches):
    """Patch a model, and trust the tests' own classes, so that a trial sees what they do."""
    return apply_liger_kernel(model, trust=own_classes(model), **switches)


def own_classes(model):
    libraries = "torch.", "transformers."
    return {type(m) for m in model.modules() if not type(m).__module__.startswith(libraries)}


def is_patched(module) -> bool:
    return hasattr(type(module), "_liger")


def record_calls(monkeypatch):
    """Return a list that gets the name of each of our operators that runs."""
    calls = []

    def recording(name, function):
        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        return call

    fused = activation_linear.LigerGLULinearFunction
    for owner, name in (
        (activation_linear, "activation"),
        (fused, "call"),
        (swiglu_mlp.GatedMLP, "apply"),
    ):
        call = recording("glu", getattr(owner, name))
        monkeypatch.setattr(owner, name, staticmethod(call) if owner is fused else call)
    for name in ("liger_rms_norm", "liger_layer_norm", "liger_rope"):
        monkeypatch.setattr(functional, name, recording(name, getattr(functional, name)))
    return calls


def assert_same_output(patched, reference, x=None):
    """Compare two modules' outputs up to the rounding of fp32.

    Their sums of 48 terms may be taken in another order.
    """
    x = random_rows(2, 5, 32, seed=9) if x is None else x
    output = patched(x)
    expected = reference(x)
    assert output.dtype == expected.dtype
    bound = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=bound)


CONFIG = tiny.config("llama")  # shared by all MLPs, as in a model


def make_mlp(**attributes):
    mlp = LlamaMLP(CONFIG)
    for name, value in attributes.items():
        set_attribute(mlp, name, value)
    return mlp


def set_attribute(module, name, value):
    """Set an attribute, also one that replaces a child by something else than a module."""
    module._modules.pop(name, None)
    setattr(module, name, value)


def mlp_of_class(cls, **attributes):
    mlp = make_mlp(**attributes)
    mlp.__class__ = cls
    return mlp
