"""Axolotl, by its command and a yaml: with its Liger plugin it trains as without it."""

import json
import os
import sys
from collections import Counter

import pytest

pytest.importorskip("axolotl", reason="Axolotl is not installed: make test-axolotl installs it")

import framework_runs
import tiny
import torch
import trl_tiny
import yaml
import zoo_vision
from companions import WHEN
from hardware import DEVICE
from lora import LINEAR, add_adapters, recording
from patched import assert_same_step
from patched import step as model_step
from programs import guide_file
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaAttention

import liger_kernel.transformers as liger

STEPS = 4
LAYERS = dict(
    liger_rope=True, liger_rms_norm=True, liger_glu_activation=True, liger_layer_norm=True
)
FUSED = dict(LAYERS, liger_fused_linear_cross_entropy=True)
PLUGIN = "axolotl.integrations.liger.LigerPlugin"
FAMILIES = "llama mixtral mistral gemma gemma2 qwen2 qwen3 granite phi3".split()
SIZES = {
    "gemma3_text": dict(
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        query_pre_attn_scalar=8,
    ),
    "olmo2": {},
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "ministral3": {},  # the plugin replaces its classes itself
    "starcoder2": {},
}
# the plugin does not know it: its generic forward, with the loss in the head
GENERIC = "starcoder2"
SWITCHES = {
    "cross_entropy": dict(LAYERS, liger_cross_entropy=True),
    "rms_norm": dict(liger_rms_norm=True),
    "rope": dict(liger_rope=True),
    "glu": dict(liger_glu_activation=True),
    "loss": dict(liger_fused_linear_cross_entropy=True),
}
AXOLOTLS_KERNELS = "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"  # on by default, for CUDA
LORA = dict(adapter="lora", lora_r=4, lora_alpha=8, lora_dropout=0.0)
ALL_LORA = dict(LORA, lora_target_modules=LINEAR, **dict.fromkeys(AXOLOTLS_KERNELS, False))
TRAINING_OPTIONS = dict(
    lora=dict(LORA, lora_target_modules=["q_proj", "down_proj"]),
    lora_all=ALL_LORA,
    # the kernel of its MLPs does not run on a CPU
    lora_kernels=dict(ALL_LORA, lora_qkv_kernel=True, lora_o_kernel=True),
    packed=dict(sample_packing=True, pad_to_sequence_len=True),
)

# The LoRA layers that our code computes. Axolotl's own kernels take the others' weights.
OUR_LORA_LAYERS = dict(lora=4, lora_all=14, lora_kernels=6)

# The settings of the guide's yaml that a tiny run on a CPU replaces.
REPLACED_SETTINGS = (
    "base_model datasets output_dir dataset_prepared_path tokenizer_config sequence_len max_steps "
    "optimizer logging_steps save_strategy save_steps bf16 fp16 tf32 attn_implementation "
    "dataset_num_proc use_tensorboard".split()
)
CPU_SETTINGS = dict(adapter="lora", load_in_4bit=False, num_epochs=1)
CPU_SETTINGS |= dict.fromkeys(AXOLOTLS_KERNELS, False)

# A plugin of Axolotl with the loss of liger_use_token_scaling: each token's, times its probability.
SCALED_LOSS_PLUGIN = """
from axolotl.integrations.base import BasePlugin
from torch.nn import functional as F


def loss(logits, labels, vocab_size, num_items_in_batch=None, **_):
    target = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    losses = F.cross_entropy(logits.float().view(-1, vocab_size), target, reduction="none")
    n = (target != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return (losses * losses.detach().neg().exp()).sum() / n


class Plugin(BasePlugin):
    def post_model_build(self, cfg, model):
        model.loss_function = loss
"""


def make_settings(folder, job, family, **options):
    dataset = dict(path=str(folder / "texts.jsonl"), ds_type="json", type="completion")
    settings = dict(
        base_model=str(folder / "models" / family),
        tokenizer_config=str(folder / "models/llama"),
        datasets=[dataset],
        dataset_prepared_path=str(folder / "prepared"),
        output_dir=str(folder / job / "saved"),
        seed=1,
        sequence_len=32,
        max_steps=STEPS,
        micro_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.005,
        lr_scheduler="constant",
        optimizer="adamw_torch",
        logging_steps=1,
        save_strategy="steps",
        save_steps=STEPS,
        bf16=False,
        fp16=False,
        tf32=False,
        sample_packing=False,
        attn_implementation="eager",
        dataset_num_proc=1,
        use_tensorboard=False,
    )
    return settings | options


def guide_settings(folder):
    """Return docs/guides/axolotl.md's yaml with a tiny model and data, in fp32, without 4 bits."""
    tiny_settings = make_settings(folder, "guide", "qwen3")
    replaced = {name: tiny_settings[name] for name in REPLACED_SETTINGS}
    return yaml.safe_load(guide_file("axolotl.md", "qlora.yaml")) | replaced | CPU_SETTINGS


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axolotl")
    rows = [json.dumps(dict(text=trl_tiny.words(i, 9 + i % 4))) for i in range(24)]
    (folder / "texts.jsonl").write_text("\n".join(rows))
    plans = {}  # job -> (family, options); that of a "+" has the plugin
    for family in [*FAMILIES, *SIZES]:
        trl_tiny.save_model(folder / "models" / family, family=family, **SIZES.get(family, {}))
        options = {}
        if family == GENERIC:
            options["remove_unused_columns"] = False  # its forward names no arguments
        plans[family] = family, options
        plans[f"{family}+"] = family, FUSED | options
    for name, switches in SWITCHES.items():
        plans[f"llama+{name}"] = "llama", switches
    for name, options in TRAINING_OPTIONS.items():
        plans[name] = "llama", options
        plans[f"{name}+"] = "llama", options | FUSED
    plans["scaled"] = "llama", dict(plugins=["scaled_loss.Plugin"])
    plans["scaled+"] = "llama", dict(FUSED, liger_use_token_scaling=True)
    (folder / "scaled_loss.py").write_text(SCALED_LOSS_PLUGIN)
    jobs = {}
    for job, (family, options) in plans.items():
        settings = make_settings(folder, job, family, **options)
        if "+" in job:
            settings["plugins"] = [PLUGIN]
        (folder / f"{job}.yaml").write_text(yaml.safe_dump(settings))
        jobs[job] = [folder / f"{job}.yaml"]
    (folder / "guide.yaml").write_text(yaml.safe_dump(guide_settings(folder)))
    jobs["guide"] = [folder / "guide.yaml"]
    first = "cli.config cli.checks train common.datasets core.builders".split()
    first = [f"axolotl.{module}" for module in first]
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder)])
    environment = dict(AXOLOTL_DO_NOT_TRACK="1", PYTHONPATH=path)
    return framework_runs.run(
        "axolotl.cli.train", jobs, folder, first=first, environment=environment, limit=900
    )


LAYER_OPERATORS = dict(
    liger_rope="liger_rotary_pos_emb",
    liger_rms_norm="liger_rms_norm",
    liger_glu_activation="liger_swiglu",
)
GEGLU = {"liger_swiglu": "liger_geglu"}
EXPERTS = {"liger_swiglu": "liger_experts"}
REPLACED_OPERATORS = dict(
    gemma=GEGLU, gemma2=GEGLU, gemma3_text=GEGLU, mixtral=EXPERTS, qwen3_moe=EXPERTS
)
FUSED_HEAD = "liger_fused_linear_cross_entropy"


@pytest.mark.parametrize("job", [*FAMILIES, *SIZES, *TRAINING_OPTIONS, "scaled"])
def test_trains_as_before(job, runs):
    reference = runs[job]
    patched = runs[f"{job}+"]
    framework_runs.assert_same_losses(patched, reference, STEPS)
    operators = set()
    if job != GENERIC:
        replaced = REPLACED_OPERATORS.get(job, {})
        operators = {replaced.get(operator, operator) for operator in LAYER_OPERATORS.values()}
    assert operators <= set(patched.calls) and not reference.calls
    # a row of packed samples is a batch, and the last step of an epoch has one batch
    batches = 2 * STEPS - (job == "packed")
    if job == "ministral3":  # there Axolotl leaves the fused head out, and warns
        batches = 0
    assert patched.calls[FUSED_HEAD] == batches
    layers = OUR_LORA_LAYERS.get(job, 0)
    assert bool(patched.lora_calls) == bool(layers) and not reference.lora_calls
    if DEVICE == "cpu":  # with kernels an MLP is one call
        trials = patched.lora_calls - 2 * STEPS * layers
        assert 0 <= trials < 2 * STEPS


def test_the_scaled_loss_is_smaller(runs):
    assert runs["scaled+"].logged()[0] < 0.5 * runs["llama+"].logged()[0]


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name, runs):
    """The operators that are switched on run, and no other."""
    patched = runs[f"llama+{name}"]
    switches = SWITCHES[name]
    framework_runs.assert_same_losses(patched, runs["llama"], STEPS)
    for switch, operator in LAYER_OPERATORS.items():
        assert bool(patched.calls[operator]) == switches.get(switch, False), switch
    assert patched.calls[FUSED_HEAD] == (2 * STEPS if name == "loss" else 0)
    assert patched.calls["liger_cross_entropy"] == (2 * STEPS if name == "cross_entropy" else 0)


def test_the_guide(runs):
    guide = runs["guide"]
    assert {*LAYER_OPERATORS.values(), FUSED_HEAD} <= set(guide.calls)
    assert guide.lora_calls and len(guide.logged()) == STEPS


def swiglu_backward(grad, gate, up):
    """Return what Axolotl's kernel computes: the product, and the gradients of gate and up."""
    product = F.silu(gate) * up
    sigmoid = gate.sigmoid()
    grad_gate = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    grad_up = grad * F.silu(gate)
    # it writes them over its arguments
    return grad.copy_(product), gate.copy_(grad_gate), up.copy_(grad_up)


@WHEN
@pytest.mark.parametrize("kernels", [["lora_mlp_kernel"], AXOLOTLS_KERNELS])
def test_axolotls_own_lora_kernels(kernels, when, monkeypatch):
    """They call no LoRA layer, and they write the gradient of x over x. Their product of the MLP is
    computed by PyTorch here, since their kernel asks for CUDA."""
    from axolotl.kernels import lora
    from axolotl.monkeypatch import lora_kernels
    from axolotl.utils.dict import DictDefault

    monkeypatch.setattr(lora, "swiglu_forward", lambda gate, up: F.silu(gate) * up)
    monkeypatch.setattr(lora, "swiglu_backward", swiglu_backward)
    if "lora_qkv_kernel" in kernels:
        monkeypatch.setattr(LlamaAttention, "forward", LlamaAttention.forward)
        monkeypatch.setattr(LlamaAttention, "_original_forward", None, raising=False)
        monkeypatch.delattr(LlamaAttention, "_original_forward")
        monkeypatch.setattr(lora_kernels, "get_attention_cls_from_config", lambda _: LlamaAttention)
        lora_kernels.patch_self_attn_lora(DictDefault())

    def run(patched):
        model = tiny.model("llama").to(DEVICE)
        if patched and when == "patch before":
            liger.apply_liger_kernel(model)
        model = add_adapters(model, task_type="CAUSAL_LM")
        if patched and when == "patch after":
            liger.apply_liger_kernel(model)
        lora_kernels.apply_lora_kernel_patches(model, DictDefault(dict.fromkeys(kernels, True)))
        with recording(model) as ran:
            return model_step(model), ran

    result, ran = run(True)
    expected, _ = run(False)
    assert_same_step(result, expected, rtol=1e-4)
    names = {name.rpartition(".")[2] for name in ran.layers}
    assert names == (set() if len(kernels) > 1 else {"q_proj", "k_proj", "v_proj", "o_proj"})


def test_layer_norm(reference_only):
    """The plugin's switch for LayerNorm, with the layers of an image tower."""
    from axolotl.integrations.liger import LigerPlugin
    from axolotl.utils.dict import DictDefault

    def step(model):
        calls = Counter()
        sys.setprofile(framework_runs.call_counter(calls))
        try:
            loss = model(**zoo_vision.batch(model)).loss
        finally:
            sys.setprofile(None)
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return loss.item(), grads, calls

    expected_loss, expected_grads, calls = step(zoo_vision.build("qwen2_vl"))
    assert not calls
    try:
        LigerPlugin().pre_model_load(
            DictDefault(model_config_type="qwen2_vl", liger_layer_norm=True, liger_rope=False)
        )
        loss, grads, calls = step(zoo_vision.build("qwen2_vl"))
    finally:
        liger.revert("qwen2_vl")
    assert set(calls) == {"liger_layer_norm"}
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5, msg=name)
