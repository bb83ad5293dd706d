"""The models of `bench.longest` and `bench.scale`: sharded, in 4 bits, with adapters, patched.

In a ``spec``, ``parallel`` is "experts", "gathered experts" or "sequence" where these are spread
over the ranks (`bench.spread`); with "gathered experts" tokens are sent by all-gather. Without it
each rank has sequences of its own, and a shard of every parameter."""

from __future__ import annotations

import os

import torch

from . import models, spread


def prepare_model(spec: dict, device: str) -> tuple[torch.nn.Module, str | None]:
    """Return the model of ``spec``, and the report of our patch."""
    sharded = spec["gpus"] > 1
    side = spec["side"]
    report = None
    model = build(spec)
    if side == "peer":  # before the rest: its MLPs are modules of their own
        patch(model, spec)
    if spec.get("weights", "bf16") != "bf16":
        if sharded:
            raise ValueError("4-bit weights are not sharded here: --gpus 1")
        quantize(model, spec["weights"], device)
    if spec.get("lora"):
        model = add_adapters(model, spec["lora"])
    parallel = spec.get("parallel")
    if parallel and not sharded:
        raise ValueError(f"one rank has nothing to spread: parallel is {parallel}")
    if parallel == "experts":
        spread.spread_experts(model)
    elif parallel == "gathered experts":
        spread.spread_experts(model, max_tokens=spec["batch"] * spec["sequence"])
    elif parallel == "sequence":
        spread.spread_sequences(model)
    if sharded:
        shard(model)
    fill(model, device, sharded)
    if parallel in ("experts", "gathered experts"):
        spread.average_expert_gradients(model)
    if side != "peer":
        report = patch(model, spec)
    return model, report


def build(spec: dict):
    """Return the model on the meta device, with a head of its own. `fill` gives it weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = models.SIZES[spec["model"]] | dict(tie_word_embeddings=False)
    if spec.get("layers"):
        sizes["num_hidden_layers"] = spec["layers"]
    config = AutoConfig.for_model(
        sizes.pop("model_type"),
        **sizes,
        max_position_embeddings=8192,
        use_cache=False,
        pad_token_id=None,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


# ---- 4 bits, adapters ----


def quantize(model, weights: str, device: str) -> None:
    """Give the linear layers but the head random weights in 4 bits."""
    head = model.get_output_embeddings()
    for name, module in [*model.named_modules()]:
        if not isinstance(module, torch.nn.Linear) or module is head:
            continue
        weight = torch.empty(module.weight.shape, dtype=torch.bfloat16, device=device)
        weight.normal_(std=0.02)
        if weights == "nf4":
            module.weight = to_nf4(weight)
        else:
            model.set_submodule(name, bitsandbytes_linear(module, weight, device))
    model.is_loaded_in_4bit = weights == "bnb"  # PEFT asks


def to_nf4(weight):
    """Return the weight as torchao's NF4, from the place where its version has that."""
    try:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
    except ImportError:
        from torchao.dtypes.nf4tensor import to_nf4
    scaler_block_size = min(256, weight.numel() // 64)
    return torch.nn.Parameter(to_nf4(weight, 64, scaler_block_size), requires_grad=False)


def bitsandbytes_linear(module: torch.nn.Linear, weight, device: str):
    import bitsandbytes

    linear = bitsandbytes.nn.Linear4bit(
        module.in_features,
        module.out_features,
        bias=False,
        compute_dtype=torch.bfloat16,
        quant_type="nf4",
        device="meta",
    )
    parameter = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    linear.weight = parameter.to(device)
    return linear


def dequantise(model) -> None:
    """Put a dense layer in fp32, of the same values, in the place of each of bitsandbytes'."""
    import bitsandbytes

    for path, module in [*model.named_modules()]:
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(
                module.weight.data, module.weight.quant_state
            )
            linear = torch.nn.Linear(
                module.in_features, module.out_features, bias=False, device="meta"
            )
            weight = weight.float().view(linear.weight.shape)
            linear.weight = torch.nn.Parameter(weight, requires_grad=False)
            model.set_submodule(path, linear)
    model.is_loaded_in_4bit = False


def add_adapters(model, rank: int):
    """Return the model with PEFT's adapters in bf16: PEFT would keep them, and compute with them,
    in fp32."""
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    # as the Trainer does: else the first layer's input stays on the GPU
    adapted.enable_input_require_grads()
    return adapted


# ---- sharding, weights ----


def layers_of(model):
    """Return the list of the model's layers: its longest ModuleList."""
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return max(lists, key=len)


def shard(model) -> None:
    from torch.distributed.fsdp import fully_shard

    whole = dict(ignored_params=spread.expert_parameters(model))
    for layer in layers_of(model):
        fully_shard(layer, **whole)
    fully_shard(model, **whole)


def fill(model, device: str, sharded: bool) -> None:
    """Give the parameters on the meta device random weights of their own, other ones on each
    rank."""
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    if sharded:
        model.to_empty(device=device)
        parameters = [*model.named_parameters()]
    else:
        parameters = allocate(model, device)
    for name, parameter in parameters:
        weight = parameter.detach()
        if hasattr(parameter, "to_local"):
            weight = weight.to_local()
        if "lora_B" in name:
            weight.zero_()
        elif parameter.dim() == 1:
            weight.fill_(1)
        else:
            weight.normal_(std=0.02)
    base = next(module for module in model.modules() if hasattr(module, "rotary_emb"))
    with torch.device(device):
        base.rotary_emb = type(base.rotary_emb)(base.config)  # its buffers are made, not loaded


def allocate(model, device: str) -> list[tuple[str, torch.nn.Parameter]]:
    """Put the parameters on the meta device onto ``device``. Returns them with their names."""
    allocated = []
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                new = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(module, name.rpartition(".")[2], new)
                allocated.append((name, new))
    return allocated


# ---- patches ----

OPTIONS = {"patched": {}, "tiled": dict(tiled_mlp=True), "long": dict(long_context=True)}


def patch(model, spec: dict) -> str | None:
    """Patch the model as a side has it. Returns the report of our patch."""
    side = spec["side"]
    if spec["checkpointing"] and side != "long":
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    if side == "huggingface":
        return None
    if side == "peer":
        patch_by_peer(model, tiled=spec["case"] != "scale")
        return None
    from liger_kernel.transformers import apply_liger_kernel

    return str(apply_liger_kernel(model, **OPTIONS[side]))


def patch_by_peer(model, tiled: bool) -> None:
    """Apply the published package's patch, and its tiled MLP in the place of each MLP."""
    from liger_kernel.transformers import LigerTiledSwiGLUMLP, _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)
    for layer in layers_of(model) if tiled else ():
        tiled = LigerTiledSwiGLUMLP(model.config).to(layer.mlp.up_proj.weight)
        tiled.load_state_dict(layer.mlp.state_dict(), assign=True)
        layer.mlp = tiled
