"""`AutoLigerKernelForCausalLM`: load a model and patch it."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from liger_kernel.patch.families.published import (
    ALL_SWITCHES,
    apply_liger_kernel,
    resolve_switches,
)


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM` whose models are patched; the switches of `apply_liger_kernel` are
    keywords, too.

    The loaded model alone is patched: other models of its class stay as they are.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        if isinstance(pretrained_model_name_or_path, torch.nn.Module):
            raise TypeError(
                f"{cls.__name__}.from_pretrained: give a name or a path; a model that is loaded is "
                "patched by apply_liger_kernel(model)"
            )
        switches = _pop_switches(f"{cls.__name__}.from_pretrained", kwargs)
        result = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        # A tuple with output_loading_info.
        model = result[0] if isinstance(result, tuple) else result
        apply_liger_kernel(model, **switches)
        return result

    @classmethod
    def from_config(cls, config, **kwargs):
        switches = _pop_switches(f"{cls.__name__}.from_config", kwargs)
        model = super().from_config(config, **kwargs)
        apply_liger_kernel(model, **switches)
        return model


def _pop_switches(function_name: str, kwargs: dict) -> dict:
    """Take the switches out of the keywords. They are checked before a model is loaded for
    nothing."""
    switches = {switch: kwargs.pop(switch) for switch in ALL_SWITCHES.keys() & kwargs.keys()}
    resolve_switches(function_name, ALL_SWITCHES, switches)
    return switches
