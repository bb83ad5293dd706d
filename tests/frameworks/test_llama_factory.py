"""LLaMA-Factory, by its command and a yaml: ``enable_liger_kernel: true`` trains as without it."""

import json

import pytest

pytest.importorskip(
    "llamafactory", reason="LLaMA-Factory is not installed: make test-llama-factory installs it"
)

import framework_runs
import trl_tiny
import yaml
from programs import guide_file

STEPS = 4
CASES = {
    "sft": dict(stage="sft", finetuning_type="full", dataset="asked"),
    "sft_packed": dict(stage="sft", finetuning_type="full", dataset="asked", packing=True),
    "sft_lora": dict(
        stage="sft", finetuning_type="lora", lora_target="q_proj,down_proj", dataset="asked"
    ),
    "pt": dict(stage="pt", finetuning_type="full", dataset="said"),
    "dpo": dict(stage="dpo", finetuning_type="full", dataset="ranked", pref_loss="sigmoid"),
}
LOSS_IN_HEAD = {
    "sft",
    "sft_packed",
    "sft_lora",
    "pt",
}  # LLaMA-Factory asks for the logits in the other stages


def data(folder):
    words = trl_tiny.words
    asked = [
        dict(instruction=words(i, 3), input="", output=words(i + 1, 4 + i % 3)) for i in range(24)
    ]
    said = [dict(text=words(i, 9)) for i in range(24)]
    ranked = [
        dict(
            instruction=words(i, 3),
            input="",
            chosen=words(i + 1, 3 + i % 3),
            rejected=words(i + 2, 5 - i % 3),
        )
        for i in range(24)
    ]
    columns = dict(prompt="instruction", query="input", chosen="chosen", rejected="rejected")
    known = {
        "asked": dict(file_name="asked.json"),
        "said": dict(file_name="said.json", columns=dict(prompt="text")),
        "ranked": dict(file_name="ranked.json", ranking=True, columns=columns),
    }
    folder.mkdir()
    for name, rows in dict(asked=asked, said=said, ranked=ranked, dataset_info=known).items():
        (folder / f"{name}.json").write_text(json.dumps(rows))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama_factory")
    data(folder / "data")
    common = dict(
        model_name_or_path=trl_tiny.save_model(folder / "model"), do_train=True, template="default", cutoff_len=32,
        dataset_dir=str(folder / "data"), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1,
        gradient_accumulation_steps=2, learning_rate=0.005, lr_scheduler_type="constant", report_to="none", seed=0,
        save_strategy="no", overwrite_output_dir=True, preprocessing_num_workers=None, flash_attn="disabled",
    )  # fmt: skip
    jobs = {}
    for name, case in CASES.items():
        for liger in (False, True):
            job = f"{name}_liger" if liger else name
            given = dict(
                common, **case, enable_liger_kernel=liger, output_dir=str(folder / job / "saved")
            )
            path = folder / f"{job}.yaml"
            path.write_text(yaml.safe_dump({k: v for k, v in given.items() if v is not None}))
            jobs[job] = ["train", path]
    of_guide = yaml.safe_load(guide_file("llama-factory.md", "sft.yaml")) | common
    of_guide |= dict(dataset="asked", bf16=False, output_dir=str(folder / "guide" / "saved"))
    settings = {name: value for name, value in of_guide.items() if value is not None}
    (folder / "guide.yaml").write_text(yaml.safe_dump(settings))
    jobs["guide"] = ["train", folder / "guide.yaml"]
    return framework_runs.run(
        "llamafactory.cli:main", jobs, folder, first=["llamafactory.train.tuner"]
    )


LAYERS = {"liger_rms_norm", "liger_swiglu", "liger_rotary_pos_emb"}


@pytest.mark.parametrize("case", CASES)
def test_trains_as_before(case, runs):
    theirs, mine = runs[case], runs[f"{case}_liger"]
    framework_runs.assert_same_losses(mine, theirs, STEPS)
    in_head = {"liger_fused_linear_cross_entropy"} if case in LOSS_IN_HEAD else set()
    assert set(mine.calls) == LAYERS | in_head and not theirs.calls
    assert mine.calls["liger_fused_linear_cross_entropy"] == (2 * STEPS if in_head else 0)
    assert "Liger kernel has been applied to the model." in mine.output


def test_the_guide(runs):
    assert set(runs["guide"].calls) == {*LAYERS, "liger_fused_linear_cross_entropy"}
    assert len(runs["guide"].logged()) == STEPS


def test_learns(runs):
    for case in LOSS_IN_HEAD - {"sft_lora"}:
        losses = runs[f"{case}_liger"].logged()
        assert losses[-1] < losses[0] - 0.3, (case, losses)
