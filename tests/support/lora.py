"""Models with PEFT's LoRA layers, and which of these layers run by our code."""

import contextlib

import peft
import pytest
import torch

from liger_kernel.patch.layers import adapters

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def add_adapters(model, **config):
    """Add adapters to all linear layers but the head."""
    config = peft.LoraConfig(**dict(r=4, target_modules=LINEAR) | config)
    return away_from_zero(peft.get_peft_model(model, config))


def away_from_zero(model):
    """Make the adapters do something: PEFT begins with B = 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                values = (torch.randn(p.shape, generator=generator) / 4).to(p.device)
                if hasattr(p, "device_mesh"):
                    from torch.distributed.tensor import distribute_tensor

                    values = distribute_tensor(values, p.device_mesh, p.placements)
                p.copy_(values)
    return model


def lora_layers(model):
    """Return the LoRA layers by name, without the names of wrappers."""
    layers = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and "lora_" not in name:
            layers[name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")] = module
    return layers


class Ran:
    """The names of the LoRA layers that ran by our code, and the number of MLPs that ran as one."""

    def __init__(self):
        self.layers = set()
        self.mlps = 0


@contextlib.contextmanager
def recording(model):
    """Yield a `Ran` of what runs in the context."""
    ran = Ran()
    names = {layer: name for name, layer in lora_layers(model).items()}
    run_call = adapters.run_call
    gated_mlp = adapters.gated_mlp_with_adapters

    def recording_call(layer, *args):
        if layer in names:  # not a copy that is tried
            ran.layers.add(names[layer])
        return run_call(layer, *args)

    def recording_mlp(x, gate, up, down, act):
        out = gated_mlp(x, gate, up, down, act)
        if out is not None:
            ran.mlps += 1
            ran.layers |= {names[layer] for layer in (gate, up, down) if layer in names}
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "run_call", recording_call)
        patch.setattr(adapters, "gated_mlp_with_adapters", recording_mlp)
        yield ran
