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
    "sft": dict(stage="sft", finetuning_type="full", dataset="questions"),
    "sft_packed": dict(stage="sft", finetuning_type="full", dataset="questions", packing=True),
    "sft_lora": dict(
        stage="sft", finetuning_type="lora", lora_target="q_proj,down_proj", dataset="questions"
    ),
    "sft_lora_all": dict(
        stage="sft",
        finetuning_type="lora",
        lora_target="all",
        lora_dropout=0.1,
        use_rslora=True,
        dataset="questions",
    ),
    "pt": dict(stage="pt", finetuning_type="full", dataset="texts"),
    "dpo": dict(stage="dpo", finetuning_type="full", dataset="ranked", pref_loss="sigmoid"),
    "dpo_lora": dict(stage="dpo", finetuning_type="lora", lora_target="all", dataset="ranked"),
}
# LLaMA-Factory asks for the logits in the other stages
LOSS_IN_HEAD = {"sft", "sft_packed", "sft_lora", "sft_lora_all", "pt"}
# The calls of LoRA's in a forward, at least. With kernels an MLP with adapters is one.
LORA_CALLS = dict(sft_lora=4, sft_lora_all=10, dpo_lora=10)


def write_data(folder):
    words = trl_tiny.words
    files = dict(questions=[], texts=[], ranked=[])
    for i in range(24):
        question = dict(instruction=words(i, 3), input="")
        files["questions"].append(question | dict(output=words(i + 1, 4 + i % 3)))
        files["texts"].append(dict(text=words(i, 9)))
        answers = dict(chosen=words(i + 1, 3 + i % 3), rejected=words(i + 2, 5 - i % 3))
        files["ranked"].append(question | answers)
    columns = dict(prompt="instruction", query="input", chosen="chosen", rejected="rejected")
    files["dataset_info"] = {
        "questions": dict(file_name="questions.json"),
        "texts": dict(file_name="texts.json", columns=dict(prompt="text")),
        "ranked": dict(file_name="ranked.json", ranking=True, columns=columns),
    }
    folder.mkdir()
    for name, rows in files.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama_factory")
    write_data(folder / "data")
    common = dict(
        model_name_or_path=trl_tiny.save_model(folder / "model"),
        do_train=True,
        template="default",
        cutoff_len=32,
        dataset_dir=str(folder / "data"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        gradient_accumulation_steps=2,
        learning_rate=0.005,
        lr_scheduler_type="constant",
        report_to="none",
        seed=0,
        save_strategy="no",
        overwrite_output_dir=True,
        preprocessing_num_workers=None,
        flash_attn="disabled",
    )
    jobs = {}
    for name, case in CASES.items():
        for liger in (False, True):
            job = f"{name}_liger" if liger else name
            jobs[job] = common | case | dict(enable_liger_kernel=liger)
    guide = yaml.safe_load(guide_file("llama-factory.md", "sft.yaml"))
    jobs["guide"] = guide | common | dict(dataset="questions", bf16=False)
    for job, settings in jobs.items():
        settings["output_dir"] = str(folder / job / "saved")
        settings = {name: value for name, value in settings.items() if value is not None}
        path = folder / f"{job}.yaml"
        path.write_text(yaml.safe_dump(settings))
        jobs[job] = ["train", path]
    return framework_runs.run(
        "llamafactory.cli:main", jobs, folder, first=["llamafactory.train.tuner"]
    )


LAYERS = {"liger_rms_norm", "liger_swiglu", "liger_rotary_pos_emb"}


@pytest.mark.parametrize("case", CASES)
def test_trains_as_before(case, runs):
    reference, patched = runs[case], runs[f"{case}_liger"]
    framework_runs.assert_same_losses(patched, reference, STEPS)
    in_head = {"liger_fused_linear_cross_entropy"} if case in LOSS_IN_HEAD else set()
    assert patched.lora_calls >= 2 * STEPS * LORA_CALLS.get(case, 0)
    assert bool(patched.lora_calls) == (case in LORA_CALLS) and not reference.lora_calls
    assert set(patched.calls) == LAYERS | in_head and not reference.calls
    assert patched.calls["liger_fused_linear_cross_entropy"] == (2 * STEPS if in_head else 0)
    assert "Liger kernel has been applied to the model." in patched.output


def test_the_guide(runs):
    assert set(runs["guide"].calls) == {*LAYERS, "liger_fused_linear_cross_entropy"}
    assert runs["guide"].lora_calls
    assert len(runs["guide"].logged()) == STEPS


def test_learns(runs):
    for case in LOSS_IN_HEAD - LORA_CALLS.keys():
        losses = runs[f"{case}_liger"].logged()
        assert losses[-1] < losses[0] - 0.3, (case, losses)
