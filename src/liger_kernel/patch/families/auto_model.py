"""`AutoLigerKernelForCausalLM`: load a model and patch it."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from liger_kernel.patch.families.published import EVERYTHING, apply_liger_kernel, decided


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM` whose models are patched; the switches of `apply_liger_kernel` are
    keywords, too.

    The loaded model alone is patched: other models of its class stay as they are.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        if isinstance(pretrained_model_name_or_path, torch.nn.Module):
            raise TypeError(
                f"{cls.__name__}.from_pretrained: give a name or a path; a model that is loaded is patched by "
                "apply_liger_kernel(model)"
            )
        switches = _taken(f"{cls.__name__}.from_pretrained", kwargs)
        made = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        apply_liger_kernel(
            made[0] if isinstance(made, tuple) else made, **switches
        )  # with output_loading_info
        return made

    @classmethod
    def from_config(cls, config, **kwargs):
        switches = _taken(f"{cls.__name__}.from_config", kwargs)
        model = super().from_config(config, **kwargs)
        apply_liger_kernel(model, **switches)
        return model


def _taken(name: str, kwargs: dict) -> dict:
    """The switches, out of the keywords; checked before a model is loaded for nothing."""
    switches = {switch: kwargs.pop(switch) for switch in EVERYTHING.keys() & kwargs.keys()}
    decided(name, EVERYTHING, switches)
    return switches
