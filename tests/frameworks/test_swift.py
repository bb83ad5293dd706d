"""ms-swift, by its command line: ``--use_liger_kernel true`` trains as without it."""

import json

import pytest

pytest.importorskip("swift", reason="ms-swift is not installed: make test-swift installs it")

import framework_runs
import trl_tiny
from hardware import DEVICE

STEPS = 3
CASES = {
    "sft": ("sft", dict(dataset="chats", tuner_type="full")),
    "sft_lora": ("sft", dict(dataset="chats", tuner_type="lora", target_modules="all-linear")),
    "dpo": ("rlhf", dict(dataset="ranked", tuner_type="full", rlhf_type="dpo")),
    "dpo_lora": (
        "rlhf",
        dict(dataset="ranked", tuner_type="lora", target_modules="all-linear", rlhf_type="dpo"),
    ),
    "gkd": ("rlhf", dict(dataset="chats", tuner_type="full", rlhf_type="gkd", lmbda=0, beta=0.5)),
    # of the student's own answers
    "gkd_own": (
        "rlhf",
        dict(dataset="chats", tuner_type="full", rlhf_type="gkd", lmbda=1, beta=0.1),
    ),
    "grpo": (
        "rlhf",
        dict(dataset="questions", tuner_type="full", rlhf_type="grpo", beta=0.1, num_iterations=2),
    ),
}
RLHF_OPTIONS = dict(
    gkd=dict(
        teacher_model="teacher",
        teacher_model_type="llama",
        max_completion_length=6,
        temperature=0.9,
    ),
    grpo=dict(
        num_generations=4,
        max_completion_length=6,
        reward_funcs="words",
        external_plugins="rewards.py",
        loss_type="grpo",
        temperature=0.8,
    ),
)
PATH_OPTIONS = {"teacher_model", "external_plugins"}
REWARD = """
from swift.rewards import ORM, orms


class Words(ORM):
    def __call__(self, completions, **_):
        return [float(sum(word[0] < "m" for word in text.split())) for text in completions]


orms["words"] = Words
"""


def messages(question, answer):
    return [dict(role="user", content=question), dict(role="assistant", content=answer)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swift")
    words = trl_tiny.words
    chats = [dict(messages=messages(words(i, 3), words(i + 1, 4 + i % 3))) for i in range(24)]
    ranked = [row | dict(rejected_response=words(i + 2, 5 - i % 3)) for i, row in enumerate(chats)]
    questions = [dict(messages=row["messages"][:1]) for row in chats]
    for name, rows in dict(chats=chats, ranked=ranked, questions=questions).items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text(REWARD)
    trl_tiny.save_model(folder / "teacher", seed=7, hidden_size=48, head_dim=12)
    common = dict(
        model=trl_tiny.save_model(folder / "model"),
        model_type="llama",
        template="default",
        torch_dtype="float32",
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.005,
        lr_scheduler_type="constant",
        logging_steps=1,
        seed=0,
        split_dataset_ratio=0,
        attn_impl="eager",
        report_to="none",
        max_length=64,
        save_strategy="steps",
        save_steps=STEPS,
        dataset_num_proc=1,
        dataloader_num_workers=0,
        use_cpu=str(DEVICE == "cpu").lower(),
        gradient_checkpointing="false",
        add_version="false",
    )
    jobs = dict(sft={}, rlhf={})
    for case_name, (command, case) in CASES.items():
        for liger in ("false", "true"):
            job = case_name + "_liger" * (liger == "true")
            options = common | case
            options["dataset"] = folder / f"{case['dataset']}.jsonl"
            options["use_liger_kernel"] = liger
            for name, value in RLHF_OPTIONS.get(case.get("rlhf_type"), {}).items():
                options[name] = folder / value if name in PATH_OPTIONS else value
            options["output_dir"] = folder / job / "saved"
            arguments = []
            for name, value in options.items():
                arguments += [f"--{name}", value]
            jobs[command][job] = arguments
    runs = {}
    for command, command_jobs in jobs.items():
        runs |= framework_runs.run(
            f"swift.pipelines:{command}_main",
            command_jobs,
            folder,
            first=["swift.pipelines.train.rlhf"],
            environment=dict(USE_HF="1"),
            limit=900,
        )
    return runs


LAYERS = {"liger_rms_norm", "liger_swiglu", "liger_rotary_pos_emb"}
LOSSES = dict(
    sft="liger_fused_linear_cross_entropy", gkd="distillation.forward", grpo="policy.forward"
)


@pytest.mark.parametrize("case", CASES)
def test_trains_as_before(case, runs):
    reference = runs[case]
    patched = runs[f"{case}_liger"]
    # a group's advantages cancel
    framework_runs.assert_same_losses(patched, reference, STEPS, cancelled=case == "grpo")
    assert LAYERS <= set(patched.calls) and not reference.calls
    # ms-swift replaces the forward of every adapter's matrices, which PEFT's code then calls
    assert not patched.lora_calls
    loss = LOSSES.get(case.partition("_")[0])
    if loss:
        assert patched.calls[loss] == 2 * STEPS
