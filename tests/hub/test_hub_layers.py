"""What a layer of the hub computes in the place of a module's forward: bound by hand here, as
`kernels` does it."""

import copy
from types import MethodType

import peft
import pytest
import tiny
import torch
import transformers
from hardware import DEVICE
from hub_layers import assert_as_close, assert_same, bind, runs_fused
from lora import away_from_zero
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from liger_kernel.hub import layers
from liger_kernel.ops import functional

pytestmark = pytest.mark.thorough
SIZES = dict(hidden_size=16, intermediate_size=24)
CONFIG = tiny.config("llama", **SIZES)
MIXTRAL = tiny.config("mixtral", **SIZES)
GPT_OSS = transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
for config in (MIXTRAL, GPT_OSS):
    config._experts_implementation = "grouped_mm"  # as a model sets it


def llama_mlp(**config):
    return LlamaMLP(tiny.config("llama", **SIZES, **config))


class Clipped(LlamaMLP):
    def forward(self, x):
        return super().forward(x).clamp(-0.01, 0.01)


class Centred(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class GatedTwice(Qwen3NextRMSNormGated):
    def forward(self, hidden_states, gate):
        return super().forward(super().forward(hidden_states, gate), gate)


class Dropping(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights.clamp(max=0.1))


class Sorted(MixtralTopKRouter):
    def forward(self, hidden_states):
        logits, weights, index = super().forward(hidden_states)
        return logits, weights.flip(-1), index.flip(-1)


MODULES = {  # layer, module, True if the layer's kernel runs
    "Llama's": ("RMSNorm", lambda: LlamaRMSNorm(16), True),
    "an offset": ("RMSNorm", lambda: GemmaRMSNorm(16), True),
    "zero-centred": ("RMSNorm", lambda: Qwen3_5RMSNorm(16), True),
    "PyTorch's": ("RMSNorm", lambda: nn.RMSNorm(16, eps=1e-3), True),
    "no weight": ("RMSNorm", lambda: nn.RMSNorm(16, elementwise_affine=False), None),
    "a centred norm": ("RMSNorm", lambda: Centred(16), False),
    "LayerNorm": ("RMSNorm", lambda: nn.LayerNorm(16), False),
    "norm, SiLU": ("RMSNormGated", lambda: Qwen3NextRMSNormGated(16), True),
    "norm, sigmoid": ("RMSNormGated", lambda: KimiLinearRMSNormGated(16), True),
    "SiLU, norm": ("RMSNormGated", lambda: Zamba2RMSNormGated(16, 8), True),
    "gated twice": ("RMSNormGated", lambda: GatedTwice(16), False),
    "SwiGLU": ("SwiGLUMLP", llama_mlp, True),
    "biases": ("SwiGLUMLP", lambda: llama_mlp(mlp_bias=True), True),
    "GELU": ("SwiGLUMLP", lambda: llama_mlp(hidden_act="gelu"), False),
    "ReLU": ("SwiGLUMLP", lambda: llama_mlp(hidden_act="relu"), False),
    "a clamp": ("SwiGLUMLP", lambda: Clipped(CONFIG), False),
    "in tiles": ("TiledSwiGLUMLP", llama_mlp, True),
    "a clamp, in tiles": ("TiledSwiGLUMLP", lambda: Clipped(CONFIG), False),
    "exact GELU": ("GEGLUMLP", lambda: llama_mlp(hidden_act="gelu"), True),
    "tanh GELU": ("GEGLUMLP", lambda: GemmaMLP(tiny.config("gemma", **SIZES)), True),
    "tanh GELU, in tiles": (
        "TiledGEGLUMLP",
        lambda: llama_mlp(hidden_act="gelu_pytorch_tanh"),
        True,
    ),
    "SiLU for GELU": ("GEGLUMLP", llama_mlp, False),
    "Mixtral's experts": ("Experts", lambda: MixtralExperts(MIXTRAL), True),
    "GPT-OSS's experts": ("Experts", lambda: GptOssExperts(GPT_OSS), True),
    "smaller weights": ("Experts", lambda: Dropping(MIXTRAL), False),
    "Mixtral's router": ("Router", lambda: MixtralTopKRouter(MIXTRAL), True),
    "the smallest first": ("Router", lambda: Sorted(MIXTRAL), False),
    "no router": ("Router", lambda: LlamaRMSNorm(16), False),
}
LAYERS = ("Llama's", "norm, SiLU", "SwiGLU", "in tiles", "tanh GELU", "Mixtral's experts",
          "Mixtral's router")  # fmt: skip
EACH_LAYER = pytest.mark.parametrize("kind", LAYERS)


def pair(kind):
    """Return a module with random weights, a copy with the layer, and inputs for both."""
    layer, make, _ = MODULES[kind]
    torch.manual_seed(0)
    reference = make().to(DEVICE)
    with torch.no_grad():
        for p in reference.parameters():
            p.normal_(std=0.2)
            if p.dim() == 1:
                p.add_(1)
    inputs = [torch.randn(2, 19, 16, device=DEVICE)]
    if layer == "RMSNormGated":
        inputs.append(torch.randn(2, 19, 16, device=DEVICE))
    if layer in ("Experts", "Router"):
        inputs = [inputs[0].flatten(0, 1)]
    if layer == "Experts":
        weights, index = torch.rand(38, 4, device=DEVICE).topk(2)
        inputs += [index, weights]
    return reference, bind(copy.deepcopy(reference), layer), inputs


@pytest.mark.parametrize("kind", MODULES)
def test_a_layer_computes_what_the_module_does(kind):
    reference, kernelized, inputs = pair(kind)
    is_fused = MODULES[kind][2]
    assert_same(kernelized, reference, *inputs)
    assert is_fused is None or runs_fused(kernelized) == is_fused
    assert_same(kernelized, reference, *inputs, second=True)


def assert_outputs_as_close(output, reference_output, exact):
    """`assert_as_close`, or for a router the same rounding: its outputs are a choice."""
    if not isinstance(output, tuple):
        assert_as_close(output, reference_output, exact)
        return
    for y, expected in zip(output, reference_output, strict=True):
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=0)


def cast(inputs, dtype):
    return [x.to(dtype) if x.is_floating_point() else x for x in inputs]


@pytest.mark.parametrize("kind", [kind for kind in MODULES if MODULES[kind][2]])
def test_a_layer_rounds_as_the_module_does(kind):
    reference, kernelized, inputs = pair(kind)
    low = cast(inputs, torch.bfloat16)
    outputs = [module.bfloat16()(*low) for module in (kernelized, reference)]
    assert_outputs_as_close(*outputs, reference.float()(*cast(low, torch.float32)))
    assert runs_fused(kernelized)


@EACH_LAYER
def test_in_autocast(kind):
    reference, kernelized, inputs = pair(kind)
    with torch.autocast(DEVICE, torch.bfloat16):
        outputs = kernelized(*inputs), reference(*inputs)
    assert_outputs_as_close(*outputs, reference(*inputs))


@EACH_LAYER
def test_inputs_that_no_kernel_takes(kind):
    """fp64, and no rows at all."""
    reference, kernelized, inputs = pair(kind)
    torch.testing.assert_close(kernelized(*inputs), reference(*inputs), rtol=1e-5, atol=1e-5)
    empty = [x[:0] for x in inputs]
    torch.testing.assert_close(kernelized(*empty), reference(*empty))
    if kind == "Mixtral's experts":  # transformers' own takes no fp64 either
        return
    wide = cast(inputs, torch.float64)
    torch.testing.assert_close(kernelized.double()(*wide), reference.double()(*wide))


def test_the_reference_on_a_cpu(reference_only):
    """As for a user without a GPU."""
    for kind in LAYERS:
        reference, kernelized, inputs = pair(kind)
        reference, kernelized = reference.cpu(), kernelized.cpu()
        assert_same(kernelized, reference, *(x.cpu() for x in inputs))
        assert runs_fused(kernelized)


@EACH_LAYER
def test_frozen_weights(kind):
    reference, kernelized, inputs = pair(kind)
    for module in (reference, kernelized):
        module.requires_grad_(False)
    assert_same(kernelized, reference, *inputs)
    assert runs_fused(kernelized)


@EACH_LAYER
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(kind, mode):
    reference, kernelized, inputs = pair(kind)
    with mode():
        outputs = kernelized.eval()(*inputs)
        expected = reference.eval()(*inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    assert runs_fused(kernelized)


@EACH_LAYER
@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(kind, reentrant):
    reference, kernelized, inputs = pair(kind)

    class Checkpointed(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args):
            return checkpoint(self.module, *args, use_reentrant=reentrant)

    assert_same(Checkpointed(kernelized), Checkpointed(reference), *inputs)
    assert runs_fused(kernelized)


@EACH_LAYER
def test_in_a_graph(kind):
    reference, kernelized, inputs = pair(kind)
    compiled = torch.compile(kernelized, fullgraph=True, backend="eager")
    assert_same(compiled, reference, *inputs)
    assert not runs_fused(kernelized), "in a graph the module's own forward runs"


@EACH_LAYER
def test_hooks_see_what_they_saw(kind):
    reference, kernelized, inputs = pair(kind)
    seen = {True: [], False: []}

    def note(module, args, output):
        seen[module in kernelized.modules()].append(([*args], output))

    for model in (reference, kernelized):
        for module in model.modules():
            module.register_forward_hook(note)
    assert_same(kernelized, reference, *inputs)
    assert len(seen[True]) == len(seen[False])
    for (args, output), (expected_args, expected) in zip(seen[True], seen[False], strict=True):
        torch.testing.assert_close(args, expected_args, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_a_forward_of_a_projection_sees_no_tiles():
    reference, kernelized, inputs = pair("in tiles")
    seen = []
    project = kernelized.gate_proj.forward

    def forward(x):
        seen.append(x.shape)
        return project(x)

    kernelized.gate_proj.forward = forward
    assert_same(kernelized, reference, *inputs)
    assert seen == [inputs[0].shape]
    bind(kernelized.gate_proj, "Linear")  # as with a kernel for each name of the mapping
    assert_same(kernelized, reference, *inputs)
    assert runs_fused(kernelized)


@pytest.mark.parametrize("kind", ["SwiGLU", "in tiles", "tanh GELU", "tanh GELU, in tiles"])
def test_adapters_of_the_projections(kind):
    """They may come before the first call, and after it."""
    for called_before in (False, True):
        reference, kernelized, inputs = pair(kind)
        if called_before:
            kernelized(*inputs)
        targets = ["gate_proj", "down_proj"]
        for module in (reference, kernelized):
            config = peft.LoraConfig(r=4, target_modules=targets)
            away_from_zero(peft.inject_adapter_in_model(config, module))
        assert_same(kernelized, reference, *inputs)
        assert runs_fused(kernelized)
        assert {name for name, p in kernelized.named_parameters() if p.grad is not None} == {
            f"{target}.lora_{letter}.default.weight" for target in targets for letter in "AB"
        }


def test_adapters_of_the_experts():
    reference, kernelized, inputs = pair("Mixtral's experts")
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["gate_up_proj"])

    class Block(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.experts = module

        def forward(self, *args):
            return self.experts(*args)

    blocks = [Block(module) for module in (kernelized, reference)]
    for block in blocks:
        away_from_zero(peft.inject_adapter_in_model(config, block))
    assert_same(*blocks, *inputs)


def test_an_activation_for_which_there_is_no_kernel(monkeypatch):
    """`kernels` binds its class's own forward to it."""
    calls = []
    operator = functional.liger_experts
    monkeypatch.setattr(
        functional, "liger_experts", lambda *args: calls.append(args) or operator(*args)
    )
    reference, kernelized, inputs = pair("Mixtral's experts")
    activation = kernelized.act_fn
    activation.forward = MethodType(type(activation).forward, activation)
    assert_same(kernelized, reference, *inputs)
    assert len(calls) == 1
    activation.forward = lambda x: type(activation).forward(activation, x)
    assert_same(kernelized, reference, *inputs)
    assert len(calls) == 1, "somebody looks at the activation"


def test_an_argument_by_its_own_name(monkeypatch):
    """Whatever the layer calls it."""
    calls = []
    operator = functional.liger_rms_norm
    monkeypatch.setattr(
        functional, "liger_rms_norm", lambda *args: calls.append(args) or operator(*args)
    )
    reference, kernelized, (x,) = pair("zero-centred")
    torch.testing.assert_close(kernelized(x=x), reference(x=x), rtol=1e-5, atol=1e-5)
    assert len(calls) == 1
    for module in (kernelized, reference):
        with pytest.raises(TypeError, match="hidden_states"):
            module(hidden_states=x)
    reference, kernelized, (x, gate) = pair("norm, SiLU")
    output = kernelized(gate=gate, hidden_states=x)
    torch.testing.assert_close(output, reference(x, gate), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="gate"):
        kernelized(x)


def test_the_table_has_every_layer():
    for name, (names, _, arguments) in layers.LAYERS.items():
        layer = getattr(layers, name)
        assert layer.__init__ is nn.Module.__init__ and issubclass(layer, nn.Module)
        assert names and "forward" in vars(layer) and arguments
