"""`AutoLigerKernelForCausalLM`: load a model and patch it."""

from __future__ import annotations

from transformers import AutoModelForCausalLM

from liger_kernel.transformers.families import EVERYTHING, apply_liger_kernel

SWITCHES = {*EVERYTHING, "relu_squared"}  # of any family; none is a keyword of a model


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM` whose models are patched; the switches of `apply_liger_kernel` are keywords, too.

    The loaded model alone is patched: other models of its class stay as they are.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        switches = _taken(kwargs)
        return _patched(super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs), switches)

    @classmethod
    def from_config(cls, config, **kwargs):
        switches = _taken(kwargs)
        return _patched(super().from_config(config, **kwargs), switches)


def _taken(kwargs) -> dict:
    return {name: kwargs.pop(name) for name in SWITCHES & set(kwargs)}


def _patched(model, switches):
    apply_liger_kernel(model, **{name: value for name, value in switches.items() if name in EVERYTHING})
    return model
