"""The trainers of TRL 0.24 on transformers 5.6, LLaMA-Factory's versions, train as before.

TRL has two switches: ``use_liger_kernel`` for the model's layers, and for the losses of DPO, KTO
and GRPO ``use_liger_loss``. Most of this TRL does not run on transformers 5: it asks what is
installed by a function that now answers with a pair, and its trainers write to
``model.warnings_issued``. LLaMA-Factory avoids both; here both are corrected. SFT and GKD need
neither.
"""

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-trl-oldest installs it")

import peft
import torch
import trl
import trl_tiny
from hardware import DEVICE
from logged import assert_same_logs, logged_steps
from lora import lora_layers, recording
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
        value = getattr(import_utils, name)
        if name.endswith("_available") and isinstance(value, tuple):
            monkeypatch.setattr(import_utils, name, value[0])
    monkeypatch.setattr(PreTrainedModel, "warnings_issued", {}, raising=False)


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    """Train on one GPU if there are any: a Trainer would spread each batch over all."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", int(DEVICE == "cuda"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return trl_tiny.save_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def compare_training(policy, tmp_path):
    """Return a function that trains with the switches and without, and compares the logs.

    Every metric of every step is the same, but for ``except_``.
    """

    def train(cls, config, data, switches, make_kwargs, **arguments):
        args = config(
            output_dir=str(tmp_path / str(len(switches))),
            max_steps=STEPS,
            **trl_tiny.CONFIG,
            **switches,
            **arguments,
        )
        trainer = cls(
            model=AutoModelForCausalLM.from_pretrained(policy),
            args=args,
            train_dataset=data,
            processing_class=trl_tiny.tokenizer(),
            **(make_kwargs() if make_kwargs else {}),
        )
        calls = []
        for attribute in vars(trainer).values():
            if type(attribute).__module__.startswith("liger_kernel."):
                attribute.register_forward_hook(lambda *_: calls.append(1))
        with recording(trainer.model) as ran:
            trainer.train()
        patches = "use_liger_kernel" in switches
        assert ran.layers == (lora_layers(trainer.model).keys() if patches else set())
        model_class = type(trainer.accelerator.unwrap_model(trainer.model))
        return logged_steps(trainer), len(calls), model_class

    def run(
        cls,
        config,
        data,
        switches=("use_liger_kernel",),
        except_=(),
        calls=0,
        make_kwargs=None,
        reference_class=None,
        **arguments,
    ):
        reference_logs, reference_calls, reference_model = train(
            reference_class or cls, config, data, {}, make_kwargs, **arguments
        )
        logs, num_calls, model = train(
            cls, config, data, dict.fromkeys(switches, True), make_kwargs, **arguments
        )
        assert (reference_calls, num_calls) == (0, calls)
        # with adapters both are PEFT's
        has_adapters = model is peft.PeftModelForCausalLM
        assert (model is not reference_model) == ("use_liger_kernel" in switches) or has_adapters
        assert_same_logs(logs, reference_logs, except_)

    return run


BOTH = "use_liger_kernel", "use_liger_loss"
CLIPS = {
    f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
}


def peft_config():
    torch.manual_seed(0)  # of the adapters
    return peft.LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )


@pytest.mark.parametrize("case", ["nll", "completion", "packing", "lora"])
def test_sft(case, compare_training):
    options = dict(packing=case == "packing", max_length=12)
    if case == "lora":
        options["make_kwargs"] = lambda: dict(peft_config=peft_config())
    data = trl_tiny.chats()
    if case == "completion":
        data = trl_tiny.pairs().rename_column("chosen", "completion").remove_columns("rejected")
    if case == "packing":
        options["packing_strategy"] = "wrapped"
    without_logits = {"entropy", "mean_token_accuracy"}
    compare_training(
        trl.SFTTrainer,
        trl.SFTConfig,
        data,
        except_=without_logits,
        gradient_accumulation_steps=2,
        **options,
    )


@pytest.mark.parametrize("loss_type", ["sigmoid", "apo_zero", "apo_down", "sppo_hard", "nca_pair"])
def test_dpo(loss_type, compare_training):
    compare_training(
        trl.DPOTrainer,
        trl.DPOConfig,
        trl_tiny.pairs(),
        BOTH,
        {"logits/chosen", "logits/rejected"},
        STEPS,
        loss_type=loss_type,
        beta=0.2,
    )


def test_dpo_with_layers_alone(compare_training):
    compare_training(trl.DPOTrainer, trl.DPOConfig, trl_tiny.pairs(), loss_type="ipo", beta=0.2)


def test_kto(compare_training):
    compare_training(
        trl.KTOTrainer,
        trl.KTOConfig,
        trl_tiny.unpaired(),
        BOTH,
        {"logits/chosen", "logits/rejected"},
        STEPS,
        beta=0.3,
    )


def reward(completions, **_):
    """Return for each completion the number of words that begin with a letter of A to L."""
    return [float(sum(word[0] < "m" for word in text.split())) for text in completions]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_grpo(loss_type, compare_training):
    compare_training(
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


def test_rloo(compare_training):
    """RLOO has no loss of this package, only layers."""
    compare_training(
        trl.RLOOTrainer,
        trl.RLOOConfig,
        trl_tiny.prompts(),
        make_kwargs=lambda: dict(reward_funcs=reward),
        beta=0.1,
        num_iterations=2,
        num_generations=4,
        max_completion_length=6,
        temperature=0.8,
    )


class GKDTrainer(trl.GKDTrainer):
    """GKD with the loss that TRL 0.24 asks this package for.

    It is half the divergence and half the cross entropy; without the switch TRL has no cross
    entropy.
    """

    @staticmethod
    def generalized_jsd_loss(student_logits, teacher_logits, labels, beta):
        soft = trl.GKDTrainer.generalized_jsd_loss(student_logits, teacher_logits, labels, beta)
        return (soft + F.cross_entropy(student_logits.flatten(0, 1), labels.flatten())) / 2


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_gkd(beta, compare_training, tmp_path):
    """The temperature is 1, the only one that TRL's own loss has."""
    path = trl_tiny.save_model(tmp_path / "teacher", seed=7, hidden_size=48, head_dim=12)
    compare_training(
        trl.GKDTrainer,
        trl.GKDConfig,
        trl_tiny.chats(),
        calls=STEPS,
        beta=beta,
        lmbda=0.0,
        max_new_tokens=6,
        except_={"entropy", "mean_token_accuracy"},
        reference_class=GKDTrainer,
        temperature=1.0,
        make_kwargs=lambda: dict(teacher_model=AutoModelForCausalLM.from_pretrained(path)),
    )


@pytest.mark.parametrize("trainer", ["ORPO", "CPO"])
def test_orpo_and_cpo(trainer, compare_training):
    """ORPO and CPO have no loss of this package, only layers."""
    cls = getattr(trl, f"{trainer}Trainer")
    config = getattr(trl, f"{trainer}Config")
    compare_training(cls, config, trl_tiny.pairs(), beta=0.2, max_length=16, max_prompt_length=8)
