"""ms-swift, by its command line: ``--use_liger_kernel true`` trains as without it."""

import json

import pytest

pytest.importorskip("swift", reason="ms-swift is not installed: make test-swift installs it")

import framework_runs
import trl_tiny
from hardware import DEVICE

STEPS = 3
CASES = {
    "sft": ("sft", dict(dataset="said", tuner_type="full")),
    "sft_lora": ("sft", dict(dataset="said", tuner_type="lora", target_modules="all-linear")),
    "dpo": ("rlhf", dict(dataset="ranked", tuner_type="full", rlhf_type="dpo")),
    "gkd": ("rlhf", dict(dataset="said", tuner_type="full", rlhf_type="gkd", lmbda=0, beta=0.5)),
    "gkd_own": (
        "rlhf",
        dict(dataset="said", tuner_type="full", rlhf_type="gkd", lmbda=1, beta=0.1),
    ),  # its own answers
    "grpo": (
        "rlhf",
        dict(dataset="asked", tuner_type="full", rlhf_type="grpo", beta=0.1, num_iterations=2),
    ),
}
OF = dict(
    gkd=dict(teacher_model="teacher", teacher_model_type="llama", max_completion_length=6, temperature=0.9),
    grpo=dict(num_generations=4, max_completion_length=6, reward_funcs="words", external_plugins="rewards.py",
              loss_type="grpo", temperature=0.8),
)  # fmt: skip
FILES = {"teacher_model", "external_plugins"}
REWARD = """
from swift.rewards import ORM, orms


class Words(ORM):
    def __call__(self, completions, **_):
        return [float(sum(word[0] < "m" for word in text.split())) for text in completions]


orms["words"] = Words
"""


def said(question, answer):
    return [dict(role="user", content=question), dict(role="assistant", content=answer)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder, words = tmp_path_factory.mktemp("swift"), trl_tiny.words
    chats = [dict(messages=said(words(i, 3), words(i + 1, 4 + i % 3))) for i in range(24)]
    ranked = [row | dict(rejected_response=words(i + 2, 5 - i % 3)) for i, row in enumerate(chats)]
    asked = [dict(messages=row["messages"][:1]) for row in chats]
    for name, rows in dict(said=chats, ranked=ranked, asked=asked).items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text(REWARD)
    trl_tiny.save_model(folder / "teacher", seed=7, hidden_size=48, head_dim=12)
    common = dict(
        model=trl_tiny.save_model(folder / "model"), model_type="llama", template="default", torch_dtype="float32",
        max_steps=STEPS,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.005, lr_scheduler_type="constant",
        logging_steps=1, seed=0, split_dataset_ratio=0, attn_impl="eager", report_to="none", max_length=64,
        save_strategy="steps", save_steps=STEPS, dataset_num_proc=1, dataloader_num_workers=0,
        use_cpu=str(DEVICE == "cpu").lower(), gradient_checkpointing="false", add_version="false",
    )  # fmt: skip
    jobs = dict(sft={}, rlhf={})
    for name, (command, case) in CASES.items():
        for liger in ("false", "true"):
            job = name + "_liger" * (liger == "true")
            given = (
                common
                | case
                | dict(dataset=str(folder / f"{case['dataset']}.jsonl"), use_liger_kernel=liger)
            )
            given |= {
                k: folder / v if k in FILES else v
                for k, v in OF.get(case.get("rlhf_type"), {}).items()
            }
            given |= dict(output_dir=str(folder / job / "saved"))
            jobs[command][job] = [
                word for key, value in given.items() for word in (f"--{key}", value)
            ]
    found = {}
    for command, given in jobs.items():
        found |= framework_runs.run(
            f"swift.pipelines:{command}_main",
            given,
            folder,
            first=["swift.pipelines.train.rlhf"],
            environment=dict(USE_HF="1"),
            limit=900,
        )
    return found


LAYERS = {"liger_rms_norm", "liger_swiglu", "liger_rotary_pos_emb"}
LOSSES = dict(
    sft="liger_fused_linear_cross_entropy", gkd="distillation.forward", grpo="policy.forward"
)


@pytest.mark.parametrize("case", CASES)
def test_trains_as_before(case, runs):
    theirs, mine = runs[case], runs[f"{case}_liger"]
    framework_runs.assert_same_losses(
        mine, theirs, STEPS, cancelled=case == "grpo"
    )  # a group's advantages
    assert LAYERS <= set(mine.calls) and not theirs.calls
    loss = LOSSES.get(case.partition("_")[0])
    if loss:
        assert mine.calls[loss] == 2 * STEPS
