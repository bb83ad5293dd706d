"""What runs again in backward, an adapted head and an MLP in tiles, runs as it did in forward,
whatever was done to the model in between; or there is an error."""

import copy

import peft
import pytest
import tiny
import torch

import liger_kernel.transformers as liger

pytestmark = pytest.mark.usefixtures("reference_only")
PARTS = {
    "head": (("lm_head",), {}),
    "tiles": (("gate_proj", "up_proj", "down_proj"), dict(tiled_mlp=4)),
}
PART = pytest.mark.parametrize("part", PARTS)


def adapted_pair(part, dropout=0.0):
    """Return a model with the adapters "a" and "b", and a patched copy of it."""
    targets, switches = PARTS[part]
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, target_modules=list(targets), init_lora_weights=False, lora_dropout=dropout
    )
    model = tiny.model("llama", num_hidden_layers=1)
    reference = peft.get_peft_model(model, config, adapter_name="a").train()
    reference.add_adapter("b", config)
    patched = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched, **switches)
    return reference, patched


def select(model, adapter):
    """Use one adapter, while both learn."""
    model.set_adapter(adapter)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step_of_two_adapters(model):
    select(model, "a")
    loss = model(**tiny.batch()).loss
    select(model, "b")
    (loss + 2 * model(**tiny.batch()).loss).backward()
    return gradients(model)


@PART
def test_two_adapters_and_one_backward(part):
    reference, patched = adapted_pair(part)
    expected = step_of_two_adapters(reference)
    torch.testing.assert_close(step_of_two_adapters(patched), expected, rtol=1e-4, atol=1e-6)
    assert patched.active_adapter == "b"


@PART
def test_evaluation_mode_before_backward(part):
    _, patched = adapted_pair(part, dropout=0.5)
    grads = []
    for mode in (True, False):
        patched.zero_grad()
        torch.manual_seed(0)
        loss = patched(**tiny.batch()).loss
        patched.train(mode)
        loss.backward()
        assert all(module.training == mode for module in patched.modules())
        patched.train()
        grads.append(gradients(patched))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@PART
def test_adapters_merged_before_backward(part):
    _, patched = adapted_pair(part)
    loss = patched(**tiny.batch()).loss
    patched.merge_adapter()
    with pytest.raises(RuntimeError, match="were merged, or unmerged, between"):
        loss.backward()


def write(patched):
    with torch.no_grad():
        patched.lm_head.lora_A["a"].weight.mul_(2)


def freeze(patched):
    patched.set_adapter("b")


@pytest.mark.parametrize("change", [write, freeze])
def test_parameters_of_a_head_that_change_before_backward(change):
    _, patched = adapted_pair("head")
    loss = patched(**tiny.batch()).loss
    change(patched)
    with pytest.raises(RuntimeError, match="of the model's head, a Linear, were replaced"):
        loss.backward()


def test_parameters_of_a_functional_call():
    """They are the model's in its forward alone."""
    _, patched = adapted_pair("head")
    parameters = {}
    for name, parameter in patched.named_parameters():
        parameters[name] = (1.1 * parameter.detach()).requires_grad_(parameter.requires_grad)
    loss = torch.func.functional_call(patched, parameters, (), tiny.batch()).loss
    with pytest.raises(RuntimeError, match="of the model's head, a Linear, were replaced"):
        loss.backward()


def call_with_others(patched):
    parameters = {}
    for name, parameter in patched.named_parameters():
        parameters[name] = (1.1 * parameter.detach()).requires_grad_(parameter.requires_grad)
    return torch.func.functional_call(patched, parameters, (), tiny.batch()).loss


def call_and_write(patched):
    loss = patched(**tiny.batch()).loss
    with torch.no_grad():
        patched.model.layers[0].mlp.up_proj.weight.mul_(2)
    return loss


@pytest.mark.parametrize("call, change", [(call_with_others, "replaced"), (call_and_write, "writ")])
def test_frozen_parameters_of_tiles_that_change_before_backward(call, change):
    patched = tiny.model("llama", num_hidden_layers=1)
    for name, parameter in patched.named_parameters():
        parameter.requires_grad_("mlp" not in name)
    liger.apply_liger_kernel(patched, tiled_mlp=4)
    loss = call(patched)
    with pytest.raises(RuntimeError, match=f"weight was {change}.* the tiles again"):
        loss.backward()
