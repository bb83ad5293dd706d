"""ms-swift, by its command line: ``--use_liger_kernel true`` trains as without it."""

import json

import pytest

pytest.importorskip("swift", reason="ms-swift is not installed: make test-swift installs it")

import framework_runs
import trl_tiny

STEPS = 3
CASES = {
    "sft": ("sft", dict(dataset="said", tuner_type="full")),
    "sft_lora": ("sft", dict(dataset="said", tuner_type="lora", target_modules="all-linear")),
    "dpo": ("rlhf", dict(dataset="ranked", tuner_type="full", rlhf_type="dpo")),
}


def said(question, answer):
    return [dict(role="user", content=question), dict(role="assistant", content=answer)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder, words = tmp_path_factory.mktemp("swift"), trl_tiny.words
    chats = [dict(messages=said(words(i, 3), words(i + 1, 4 + i % 3))) for i in range(24)]
    ranked = [row | dict(rejected_response=words(i + 2, 5 - i % 3)) for i, row in enumerate(chats)]
    for name, rows in dict(said=chats, ranked=ranked).items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = dict(
        model=trl_tiny.folder(folder / "model"), model_type="llama", template="default", torch_dtype="float32",
        max_steps=STEPS,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.005, lr_scheduler_type="constant",
        logging_steps=1, seed=0, split_dataset_ratio=0, attn_impl="eager", report_to="none", max_length=64,
        save_strategy="steps", save_steps=STEPS, dataset_num_proc=1, dataloader_num_workers=0, use_cpu="true",
        gradient_checkpointing="false", add_version="false",
    )  # fmt: skip
    jobs = dict(sft={}, rlhf={})
    for name, (command, case) in CASES.items():
        for liger in ("false", "true"):
            job = name + "_liger" * (liger == "true")
            given = common | case | dict(dataset=str(folder / f"{case['dataset']}.jsonl"), use_liger_kernel=liger)
            given |= dict(output_dir=str(folder / job / "saved"))
            jobs[command][job] = [word for key, value in given.items() for word in (f"--{key}", value)]
    found = {}
    for command, given in jobs.items():
        found |= framework_runs.run(
            f"swift.pipelines:{command}_main", given, folder, first=["swift.pipelines.train.rlhf"],
            environment=dict(USE_HF="1"),
        )  # fmt: skip
    return found


LAYERS = {"liger_rms_norm", "liger_fused_add_rms_norm", "liger_swiglu", "liger_rotary_pos_emb"}


@pytest.mark.parametrize("case", CASES)
def test_trains_as_before(case, runs):
    theirs, mine = runs[case], runs[f"{case}_liger"]
    framework_runs.assert_same_losses(mine, theirs, STEPS)
    assert LAYERS <= set(mine.calls) and not theirs.calls
    if CASES[case][0] == "sft":
        assert mine.calls["liger_fused_linear_cross_entropy"] == 2 * STEPS
