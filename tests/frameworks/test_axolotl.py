"""Axolotl, by its command and a yaml: its Liger plugin, and the same without."""

import json
import os
import sys
from collections import Counter

import pytest

pytest.importorskip("axolotl", reason="Axolotl is not installed: make test-axolotl installs it")

import framework_runs
import torch
import trl_tiny
import yaml
import zoo_vision
from programs import guide_file

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
GENERIC = (
    "starcoder2"  # the plugin does not know it: its generic forward, with the loss in the head
)
SWITCHES = {
    "cross_entropy": dict(LAYERS, liger_cross_entropy=True),
    "rms_norm": dict(liger_rms_norm=True),
    "rope": dict(liger_rope=True),
    "glu": dict(liger_glu_activation=True),
    "loss": dict(liger_fused_linear_cross_entropy=True),
}
MORE = dict(
    lora=dict(
        adapter="lora",
        lora_r=4,
        lora_alpha=8,
        lora_target_modules=["q_proj", "down_proj"],
        lora_dropout=0.0,
    ),
    packed=dict(sample_packing=True, pad_to_sequence_len=True),
)

# What of the guide's yaml a tiny run on a CPU replaces.
SMALL = (
    "base_model datasets output_dir dataset_prepared_path tokenizer_config sequence_len max_steps "
    "optimizer logging_steps save_strategy save_steps bf16 fp16 tf32 attn_implementation "
    "dataset_num_proc use_tensorboard".split()
)
FOR_A_CPU = dict(adapter="lora", load_in_4bit=False, num_epochs=1)

# A plugin of Axolotl with the loss that liger_use_token_scaling stands for: each token's, times its
# probability.
SCALED = """
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


def settings(folder, job, family, **more):
    said = dict(path=str(folder / "said.jsonl"), ds_type="json", type="completion")
    return dict(
        base_model=str(folder / "models" / family), datasets=[said], output_dir=str(folder / job / "saved"), seed=1,
        dataset_prepared_path=str(folder / "prepared"), tokenizer_config=str(folder / "models/llama"), sequence_len=32,
        max_steps=STEPS, micro_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.005,
        lr_scheduler="constant", optimizer="adamw_torch", logging_steps=1, save_strategy="steps", save_steps=STEPS,
        bf16=False, fp16=False, tf32=False, sample_packing=False, attn_implementation="eager", dataset_num_proc=1,
        use_tensorboard=False,
    ) | more  # fmt: skip


def of_the_guide(folder):
    """The yaml of docs/guides/axolotl.md, with a tiny model and data, in fp32 and without 4 bits."""
    small = settings(folder, "guide", "qwen3")
    small = {name: small[name] for name in SMALL}
    return yaml.safe_load(guide_file("axolotl.md", "qlora.yaml")) | small | FOR_A_CPU


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axolotl")
    rows = [json.dumps(dict(text=trl_tiny.words(i, 9 + i % 4))) for i in range(24)]
    (folder / "said.jsonl").write_text("\n".join(rows))
    plans = {}
    for family in [*FAMILIES, *SIZES]:
        trl_tiny.save_model(folder / "models" / family, family=family, **SIZES.get(family, {}))
        more = (
            dict(remove_unused_columns=False) if family == GENERIC else {}
        )  # its forward names no arguments
        plans[family], plans[f"{family}+"] = (family, more), (family, FUSED | more)
    for name, switches in SWITCHES.items():
        plans[f"llama+{name}"] = "llama", switches
    for name, more in MORE.items():
        plans[name], plans[f"{name}+"] = ("llama", more), ("llama", more | FUSED)
    scaled = dict(FUSED, liger_use_token_scaling=True)
    plans["scaled"], plans["scaled+"] = (
        ("llama", dict(plugins=["scaled_by_hand.Plugin"])),
        ("llama", scaled),
    )
    (folder / "scaled_by_hand.py").write_text(SCALED)
    jobs = {}
    for job, (family, switches) in plans.items():
        given = settings(folder, job, family, **switches)
        if "+" in job:
            given["plugins"] = [PLUGIN]
        (folder / f"{job}.yaml").write_text(yaml.safe_dump(given))
        jobs[job] = [folder / f"{job}.yaml"]
    (folder / "guide.yaml").write_text(yaml.safe_dump(of_the_guide(folder)))
    jobs["guide"] = [folder / "guide.yaml"]
    first = "axolotl.cli.config axolotl.cli.checks axolotl.train axolotl.common.datasets axolotl.core.builders".split()
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
GEGLU, EXPERTS = {"liger_swiglu": "liger_geglu"}, {"liger_swiglu": "liger_experts"}
OTHERS = dict(gemma=GEGLU, gemma2=GEGLU, gemma3_text=GEGLU, mixtral=EXPERTS, qwen3_moe=EXPERTS)
FUSED_HEAD = "liger_fused_linear_cross_entropy"


@pytest.mark.parametrize("job", [*FAMILIES, *SIZES, *MORE, "scaled"])
def test_trains_as_before(job, runs):
    theirs, mine = runs[job], runs[f"{job}+"]
    framework_runs.assert_same_losses(mine, theirs, STEPS)
    wanted = {OTHERS.get(job, {}).get(operator, operator) for operator in LAYER_OPERATORS.values()}
    if job == GENERIC:
        wanted = set()
    assert wanted <= set(mine.calls) and not theirs.calls
    # a row of packed samples is a batch, and the last step of an epoch has one batch
    batches = 2 * STEPS - (job == "packed")
    assert mine.calls[FUSED_HEAD] == (
        0 if job == "ministral3" else batches
    )  # there Axolotl leaves it out, and warns


def test_the_scaled_loss_is_another(runs):
    assert runs["scaled+"].logged()[0] < 0.5 * runs["llama+"].logged()[0]


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name, runs):
    """What is switched on runs, and nothing else."""
    mine, switches = runs[f"llama+{name}"], SWITCHES[name]
    framework_runs.assert_same_losses(mine, runs["llama"], STEPS)
    for switch, operator in LAYER_OPERATORS.items():
        assert bool(mine.calls[operator]) == switches.get(switch, False), switch
    assert mine.calls[FUSED_HEAD] == (2 * STEPS if name == "loss" else 0)
    assert mine.calls["liger_cross_entropy"] == (2 * STEPS if name == "cross_entropy" else 0)


def test_the_guide(runs):
    guide = runs["guide"]
    assert {*LAYER_OPERATORS.values(), FUSED_HEAD} <= set(guide.calls)
    assert len(guide.logged()) == STEPS


def test_layer_norm(reference_only):
    """By its plugin, then the model that this patches. The layers are those of an image tower."""
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
        return (
            loss.item(),
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            calls,
        )

    theirs, gradients, calls = step(zoo_vision.build("qwen2_vl"))
    assert not calls
    try:
        LigerPlugin().pre_model_load(
            DictDefault(model_config_type="qwen2_vl", liger_layer_norm=True, liger_rope=False)
        )
        mine, got, calls = step(zoo_vision.build("qwen2_vl"))
    finally:
        liger.revert("qwen2_vl")
    assert set(calls) == {"liger_layer_norm"} and mine == pytest.approx(theirs, rel=1e-5)
    assert got.keys() == gradients.keys()
    for name, want in gradients.items():
        torch.testing.assert_close(got[name], want, rtol=1e-4, atol=1e-5, msg=name)
