"""PEFT's LoRA layers, and what `ops.linear` computes in their place."""

import collections
import copy

import torch
from cases import (
    assert_as_exact_as_pytorch,
    exact_products_on_cpu,
    list_outputs,
    measure_errors,
)
from hardware import DEVICE

from liger_kernel.ops.linear.frozen_layers import Adapter, FrozenLayer, frozen_layers
from liger_kernel.ops.mlp.lora_mlp import gated_down


def randn(*shape, dtype=torch.float32, requires_grad=True):
    """Return normal entries, divided by the square root of the columns."""
    entries = torch.randn(shape) / max(shape[-1], 1) ** 0.5
    return entries.to(DEVICE, dtype).requires_grad_(requires_grad)


def grad_output(out):
    """Return an incoming gradient. It is the same for outputs of one shape, in any dtype."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(
        out.device, out.dtype
    )


def add_adapters(module, targets, dtype=torch.float32, ranks=(3,), **config):
    """Freeze a module, and add one adapter of each rank to the layers in ``targets``.

    Returns it with random weights that are large enough to show. Further arguments are those of
    PEFT's ``LoraConfig``.
    """
    from peft import LoraConfig, inject_adapter_in_model

    module.requires_grad_(False)
    names = [f"adapter{i}" for i in range(len(ranks))] if targets else []
    for name, rank in zip(names, ranks, strict=False):
        options = dict(r=rank, lora_alpha=7, target_modules=list(targets)) | config
        module = inject_adapter_in_model(LoraConfig(**options), module, name)
    for layer in module.modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "set_adapter"):
            layer.set_adapter(names)
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
        parameter.requires_grad_("lora_" in name)
    return module.to(DEVICE, dtype).train()


def trainable(module):
    return [p for p in module.parameters() if p.requires_grad]


def read_layer(layer):
    """Return PEFT's layer, or a linear one, as a `FrozenLayer`."""
    if not hasattr(layer, "lora_A"):
        return FrozenLayer(layer.weight, layer.bias)
    adapters = []
    for name in layer.active_adapters:
        b_layer = layer.lora_B[name]
        scaling = layer.scaling[name]
        bias = None if b_layer.bias is None else b_layer.bias * scaling
        dropout = layer.lora_dropout[name]
        if type(dropout) is torch.nn.Identity:
            dropout = None
        adapters.append(Adapter(layer.lora_A[name].weight, b_layer.weight, scaling, bias, dropout))
    return FrozenLayer(layer.base_layer.weight, layer.base_layer.bias, adapters)


def run_layers(run, module, x):
    """Return the outputs of ``run(x)``, and the gradients of x and of all that trains, by name."""
    x = x.detach().requires_grad_()
    outputs = list_outputs(run(x))
    dys = [grad_output(out) for out in outputs]
    grads = torch.autograd.grad(outputs, [x, *trainable(module)], dys)
    results = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    return results | _by_name(module, grads)


def run_layers_twice(run, module, x):
    """Return the gradients of x and of all that trains, and those of their squares, by name."""
    x = x.detach().requires_grad_()
    loss = sum(out.sin().sum() for out in list_outputs(run(x)))
    tensors = [x, *trainable(module)]
    grads = torch.autograd.grad(loss, tensors, create_graph=True)
    second_grads = torch.autograd.grad(sum(d.square().sum() for d in grads), tensors)
    results = _by_name(module, [grad.detach() for grad in grads])
    return results | {f"d{name}": d for name, d in _by_name(module, second_grads).items()}


def _by_name(module, grads):
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return {f"d{name}": grad for name, grad in zip(["x", *names], grads, strict=True)}


def draw_results(module, run, x_shape, measure=run_layers, autocast=False):
    """Yield for four draws the results of ``run``, PEFT's, the exact ones, and the input.

    Args:
        module: of PEFT's layers. It gets other weights.
        run: ``run(module, x)`` computes what ``module(x)`` does.
        measure: `run_layers` or `run_layers_twice`.
        autocast: PEFT runs under autocast, with adapters in fp32.
    """
    dtype = next(module.parameters()).dtype
    for seed in range(4):  # since one small draw is luck
        torch.manual_seed(seed)
        for parameter in module.parameters():
            entries = torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5
            parameter.data = entries.to(parameter.device, dtype)
        exact_module = copy.deepcopy(module).double()
        if autocast:
            for parameter in trainable(module):
                parameter.data = parameter.float()
        x = randn(*x_shape, dtype=dtype)
        with exact_products_on_cpu():
            results = measure(lambda x: run(module, x), module, x)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                references = measure(module, module, x)
        yield results, references, measure(exact_module, exact_module, x.double()), x


def assert_as_exact_as_peft(*args, roundings=1, **options):
    """Check that no error against fp64 is larger than PEFT's and a rounding, in fp32 some.

    Other arguments are those of `draw_results`.
    """
    draws = []
    for results, references, exact, x in draw_results(*args, **options):
        draws.append(measure_errors(results, [references], exact, dict(x=x.detach()), roundings))
    assert_as_exact_as_pytorch(draws)


def assert_norms_as_exact_as_peft(*args, **options):
    """Check that the norms of the errors against fp64 are no larger than PEFT's, on average.

    That of one tensor may be larger by a tenth: of some hundred entries, that is luck.
    """
    errors = collections.Counter()
    peft_errors = collections.Counter()
    for results, references, exact, _ in draw_results(*args, **options):
        for name, expected in exact.items():
            assert results[name].dtype == references[name].dtype, name
            errors[name] += (results[name].double() - expected).square().sum().item()
            peft_errors[name] += (references[name].double() - expected).square().sum().item()
    ratios = {name: (errors[name] / peft_errors[name]) ** 0.5 for name in errors}
    assert max(ratios.values()) <= 1.1 and sum(ratios.values()) <= len(ratios), ratios


def assert_close(results, expected, bound=1e-5):
    """Check dtypes, shapes and values. ``bound`` is a share of the largest entry."""
    for result, reference in zip(results, expected, strict=True):
        assert result.dtype == reference.dtype and result.shape == reference.shape
        scale = reference.abs().max().item() if reference.numel() else 0.0
        torch.testing.assert_close(result, reference, rtol=bound, atol=bound * scale)


def same(results, expected):
    return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


# ---- a gated MLP ----

HIDDEN_SIZE = 12
INTERMEDIATE_SIZE = 40
PROJECTIONS = "gate_proj", "up_proj", "down_proj"


def peft_mlp(targets=PROJECTIONS, act="silu", mlp_bias=False, **options):
    """Return Hugging Face's `LlamaMLP` with PEFT's layers. ``options``: as of `add_adapters`."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = LlamaConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        hidden_act=act,
        mlp_bias=mlp_bias,
        num_attention_heads=1,
    )
    return add_adapters(LlamaMLP(config), targets, **options)


def our_mlp(mlp, x, act="silu"):
    """Compute a `LlamaMLP` by `frozen_layers` and `gated_down`."""
    a, b = frozen_layers(x, [read_layer(mlp.gate_proj), read_layer(mlp.up_proj)])
    return gated_down(a, b, act, *read_layer(mlp.down_proj))
