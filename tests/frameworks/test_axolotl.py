"""Axolotl, by its command and a yaml: its Liger plugin, and the same without."""

import json

import pytest

pytest.importorskip("axolotl", reason="Axolotl is not installed: make test-axolotl installs it")

import framework_runs
import trl_tiny
import yaml

STEPS = 4
LAYERS = dict(liger_rope=True, liger_rms_norm=True, liger_glu_activation=True, liger_layer_norm=True)
FUSED = dict(LAYERS, liger_fused_linear_cross_entropy=True)
FAMILIES = "llama mixtral mistral gemma gemma2 qwen2 qwen3 granite phi3".split()
SWITCHES = {
    "cross_entropy": dict(LAYERS, liger_cross_entropy=True),
    "rms_norm": dict(liger_rms_norm=True),
    "rope": dict(liger_rope=True),
    "glu": dict(liger_glu_activation=True),
    "loss": dict(liger_fused_linear_cross_entropy=True),
}
MORE = dict(
    lora=dict(adapter="lora", lora_r=4, lora_alpha=8, lora_target_modules=["q_proj", "down_proj"], lora_dropout=0.0),
    packed=dict(sample_packing=True, pad_to_sequence_len=True),
)


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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axolotl")
    rows = [json.dumps(dict(text=trl_tiny.words(i, 9 + i % 4))) for i in range(24)]
    (folder / "said.jsonl").write_text("\n".join(rows))
    plans = {}
    for family in FAMILIES:
        trl_tiny.folder(folder / "models" / family, family=family)
        plans[family], plans[f"{family}+"] = (family, {}), (family, FUSED)
    for name, switches in SWITCHES.items():
        plans[f"llama+{name}"] = "llama", switches
    for name, more in MORE.items():
        plans[name], plans[f"{name}+"] = ("llama", more), ("llama", more | FUSED)
    jobs = {}
    for job, (family, switches) in plans.items():
        given = settings(folder, job, family, **switches)
        if "+" in job:
            given["plugins"] = ["axolotl.integrations.liger.LigerPlugin"]
        (folder / f"{job}.yaml").write_text(yaml.safe_dump(given))
        jobs[job] = [folder / f"{job}.yaml"]
    first = "axolotl.cli.config axolotl.cli.checks axolotl.train axolotl.common.datasets axolotl.core.builders".split()
    return framework_runs.run(
        "axolotl.cli.train", jobs, folder, first=first, environment=dict(AXOLOTL_DO_NOT_TRACK="1")
    )


LAYER_OPERATORS = dict(
    liger_rope="liger_rotary_pos_emb", liger_rms_norm="liger_rms_norm", liger_glu_activation="liger_swiglu"
)
OTHERS = dict(
    gemma=("liger_swiglu", "liger_geglu"), gemma2=("liger_swiglu", "liger_geglu"),
    mixtral=("liger_swiglu", "liger_experts"), qwen3=("liger_rotary_pos_emb", "liger_norm_rope"),
)  # fmt: skip
FUSED_HEAD = "liger_fused_linear_cross_entropy"


@pytest.mark.parametrize("job", [*FAMILIES, *MORE])
def test_trains_as_before(job, runs):
    theirs, mine = runs[job], runs[f"{job}+"]
    framework_runs.assert_same_losses(mine, theirs, STEPS)
    usual, own = OTHERS.get(job, ("", ""))
    wanted = {own if operator == usual else operator for operator in LAYER_OPERATORS.values()}
    assert wanted <= set(mine.calls) and not theirs.calls
    # a row of packed samples is a batch, and the last step of an epoch has one batch
    assert mine.calls[FUSED_HEAD] == 2 * STEPS - (job == "packed")


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name, runs):
    """What is switched on runs, and nothing else."""
    mine, switches = runs[f"llama+{name}"], SWITCHES[name]
    framework_runs.assert_same_losses(mine, runs["llama"], STEPS)
    for switch, operator in LAYER_OPERATORS.items():
        assert bool(mine.calls[operator]) == switches.get(switch, False), switch
    assert mine.calls[FUSED_HEAD] == (2 * STEPS if name == "loss" else 0)
    assert mine.calls["liger_cross_entropy"] == (2 * STEPS if name == "cross_entropy" else 0)
