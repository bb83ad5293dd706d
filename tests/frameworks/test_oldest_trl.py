"""TRL 0.24 on transformers 5.6, the versions of LLaMA-Factory: its trainers, with this package and
without.

Its switches are two: ``use_liger_kernel`` for the model's layers, and for the losses of DPO, KTO
and GRPO ``use_liger_loss``. Most of this TRL does not run on transformers 5: it asks what is
installed by a function that now answers with a pair, and its trainers write to
``model.warnings_issued``. LLaMA-Factory avoids both; here both are put right. SFT and GKD need
neither."""

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-trl-oldest installs it")

import trl
import trl_tiny
from hardware import DEVICE
from logged import assert_same_logs, logged_steps
from packaging.version import Version
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainingArguments

if Version(trl.__version__) >= Version("0.25"):
    pytest.skip("for TRL 0.24: make test-trl-oldest", allow_module_level=True)

STEPS = 3


@pytest.fixture(autouse=True)
def as_on_transformers_4(reference_only, monkeypatch):
    from trl import import_utils

    for name in vars(import_utils):
        if name.endswith("_available") and isinstance(found := getattr(import_utils, name), tuple):
            monkeypatch.setattr(import_utils, name, found[0])
    monkeypatch.setattr(PreTrainedModel, "warnings_issued", {}, raising=False)


@pytest.fixture(autouse=True)
def by_itself(monkeypatch):
    """On one GPU, if there are any: a Trainer would spread each batch over all."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", int(DEVICE == "cuda"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return trl_tiny.save_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def both(policy, tmp_path):
    """Train with the switches and without: every number of every step is the same, but for
    ``except_``."""

    def train(cls, config, data, liger, further, **arguments):
        args = config(
            output_dir=str(tmp_path / str(len(liger))),
            max_steps=STEPS,
            logging_steps=1,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
            use_cpu=DEVICE == "cpu",
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=4,
            **liger,
            **arguments,
        )
        given = further() if further else {}
        trainer = cls(
            model=AutoModelForCausalLM.from_pretrained(policy),
            args=args,
            train_dataset=data,
            processing_class=trl_tiny.tokenizer(),
            **given,
        )
        losses = [
            m for m in vars(trainer).values() if type(m).__module__.startswith("liger_kernel.")
        ]
        calls = []
        for loss in losses:
            loss.register_forward_hook(lambda *_: calls.append(1))
        trainer.train()
        return logged_steps(trainer), len(calls), type(trainer.accelerator.unwrap_model(trainer.model))

    def run(
        cls,
        config,
        data,
        switches=("use_liger_kernel",),
        except_=(),
        calls=0,
        further=None,
        by=None,
        **arguments,
    ):
        theirs, none, plain = train(by or cls, config, data, {}, further, **arguments)
        mine, seen, patched = train(
            cls, config, data, dict.fromkeys(switches, True), further, **arguments
        )
        assert (none, seen) == (0, calls) and (patched is not plain) == (
            "use_liger_kernel" in switches
        )
        assert_same_logs(mine, theirs, except_)

    return run


BOTH = "use_liger_kernel", "use_liger_loss"
CLIPS = {
    f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
}


@pytest.mark.parametrize("case", ["nll", "completion", "packing"])
def test_sft(case, both):
    options, data = dict(packing=case == "packing", max_length=12), trl_tiny.chats()
    if case == "completion":
        data = trl_tiny.pairs().rename_column("chosen", "completion").remove_columns("rejected")
    if case == "packing":
        options["packing_strategy"] = "wrapped"
    without_logits = {"entropy", "mean_token_accuracy"}
    both(
        trl.SFTTrainer,
        trl.SFTConfig,
        data,
        except_=without_logits,
        gradient_accumulation_steps=2,
        **options,
    )


@pytest.mark.parametrize("loss_type", ["sigmoid", "apo_zero", "apo_down", "sppo_hard", "nca_pair"])
def test_dpo(loss_type, both):
    both(
        trl.DPOTrainer,
        trl.DPOConfig,
        trl_tiny.pairs(),
        BOTH,
        {"logits/chosen", "logits/rejected"},
        STEPS,
        loss_type=loss_type,
        beta=0.2,
    )


def test_dpo_with_layers_alone(both):
    both(trl.DPOTrainer, trl.DPOConfig, trl_tiny.pairs(), loss_type="ipo", beta=0.2)


def test_kto(both):
    both(
        trl.KTOTrainer,
        trl.KTOConfig,
        trl_tiny.unpaired(),
        BOTH,
        {"logits/chosen", "logits/rejected"},
        STEPS,
        beta=0.3,
    )


def reward(completions, **_):
    """Of the words that begin with a letter of the first half."""
    return [float(sum(word[0] < "m" for word in text.split())) for text in completions]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_grpo(loss_type, both):
    both(
        trl.GRPOTrainer,
        trl.GRPOConfig,
        trl_tiny.prompts(),
        BOTH,
        {"entropy", "clip_ratio"} | CLIPS,
        STEPS,
        lambda: dict(reward_funcs=reward),
        loss_type=loss_type,
        beta=0.1,
        num_iterations=2,
        num_generations=4,
        max_completion_length=6,
        temperature=0.8,
    )


def test_rloo(both):
    """Its layers."""
    both(
        trl.RLOOTrainer,
        trl.RLOOConfig,
        trl_tiny.prompts(),
        further=lambda: dict(reward_funcs=reward),
        beta=0.1,
        num_iterations=2,
        num_generations=4,
        max_completion_length=6,
        temperature=0.8,
    )


class GKDTrainer(trl.GKDTrainer):
    """What TRL 0.24 asks this package for is half the divergence and half the cross entropy, which
    it is without."""

    @staticmethod
    def generalized_jsd_loss(student_logits, teacher_logits, labels, beta):
        soft = trl.GKDTrainer.generalized_jsd_loss(student_logits, teacher_logits, labels, beta)
        return (soft + F.cross_entropy(student_logits.flatten(0, 1), labels.flatten())) / 2


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_gkd(beta, both, tmp_path):
    """At a temperature of 1, which is the only one that its plain loss has."""
    path = trl_tiny.save_model(tmp_path / "teacher", seed=7, hidden_size=48, head_dim=12)
    both(
        trl.GKDTrainer,
        trl.GKDConfig,
        trl_tiny.chats(),
        calls=STEPS,
        beta=beta,
        lmbda=0.0,
        max_new_tokens=6,
        except_={"entropy", "mean_token_accuracy"},
        by=GKDTrainer,
        temperature=1.0,
        further=lambda: dict(teacher_model=AutoModelForCausalLM.from_pretrained(path)),
    )


@pytest.mark.parametrize("trainer", ["ORPO", "CPO"])
def test_orpo_and_cpo(trainer, both):
    """Their layers."""
    cls, config = getattr(trl, f"{trainer}Trainer"), getattr(trl, f"{trainer}Config")
    both(cls, config, trl_tiny.pairs(), beta=0.2, max_length=16, max_prompt_length=8)
