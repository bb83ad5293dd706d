"""TRL's trainers, unmodified: with ``use_liger_kernel=True`` they train as without it.

TRL up to 1.12 computes the losses of DPO, KTO, GRPO and the distillation trainers with this
package's chunked losses; later ones only have the model's layers replaced. ``make test-trl`` runs
this for one of each kind."""

import sys

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-trl installs and tests it")

import peft
import torch
import trl
import trl_tiny
from hardware import DEVICE
from logged import assert_same_logs, logged_steps
from lora import lora_layers, recording
from packaging.version import Version
from transformers import AutoModelForCausalLM, TrainingArguments

CHUNKED = Version(trl.__version__) < Version(
    "1.13"
)  # its trainers compute their losses with this package's
chunked_only = pytest.mark.skipif(
    not CHUNKED, reason=f"TRL {trl.__version__} does not use this package's losses"
)

# What only one of two runs logs, or logs by another definition.
WITHOUT_LOGITS = {
    "entropy",
    "mean_token_accuracy",
}  # the chunked losses make no logits to take them from
ALL_POSITIONS = {
    "logits/chosen",
    "logits/rejected",
}  # plain: of completion tokens; chunked: prompt and padding, too
CLIPS = {
    f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max")
}  # chunked: the region's
PHI = {"vespo/phi_seq_mean"}  # the chunked loss does not return it


@pytest.fixture(autouse=True)
def by_itself(reference_only, monkeypatch):
    """On one GPU, if there are any: a Trainer would spread each batch over all."""
    torch._dynamo.reset()
    monkeypatch.setattr(TrainingArguments, "n_gpu", int(DEVICE == "cuda"))
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    return trl_tiny.save_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    return trl_tiny.save_model(
        tmp_path_factory.mktemp("teacher"), seed=7, hidden_size=48, head_dim=12
    )


@pytest.fixture
def trained(policy, tmp_path):
    """``trained(trainer, config, data, liger, **arguments of the config)`` -> the trainer, after
    its steps."""

    def run(cls, config, data, liger, steps=3, further=None, **arguments):
        args = config(
            output_dir=str(tmp_path / str(liger)),
            max_steps=steps,
            use_liger_kernel=liger,
            **(trl_tiny.CONFIG | arguments),
        )
        further = further() if further is not None else {}
        model = further.pop("model", policy)
        trainer = cls(
            model=model,
            args=args,
            train_dataset=data,
            processing_class=trl_tiny.tokenizer(),
            **further,
        )
        trainer.calls = []
        if hasattr(trainer, "liger_loss"):
            assert type(trainer.liger_loss).__module__.startswith("liger_kernel.")
            trainer.liger_loss.register_forward_hook(lambda *_: trainer.calls.append(1))
        with recording(trainer.model) as ran:
            trainer.train()
        assert replaced(trainer) == {liger}
        # a LoRA layer of the head is the loss's
        layers = {name for name in lora_layers(trainer.model) if not name.endswith("lm_head")}
        assert ran.layers - {"base_model.model.lm_head"} == (layers if liger else set())
        return trainer

    return run


def replaced(trainer):
    """``{True}`` if every norm of its model, with or without PEFT's wrapper, was replaced,
    ``{False}`` if none was.

    What replaces a class has the same name, but is not in the family's module.
    """
    norms = [
        type(module) for path, module in trainer.model.named_modules() if path.endswith("norm")
    ]
    return {cls is not getattr(sys.modules[cls.__module__], cls.__name__) for cls in norms}


@pytest.fixture
def both(trained):
    """Train with and without; what is logged at each step has to be the same, but for
    ``except_``."""

    def run(cls, config, data, except_=(), calls=0, renamed=None, **arguments):
        reference = trained(cls, config, data, False, **arguments)
        patched = trained(cls, config, data, True, **arguments)
        assert len(patched.calls) == calls
        assert_same_logs(logged_steps(patched, renamed), logged_steps(reference), except_)
        return patched

    return run


# ---- SFT ----


def peft_config():
    torch.manual_seed(0)  # of the adapters
    return peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


@pytest.mark.parametrize("case", ["nll", "dft", "completion", "packing", "mixtral", "lora"])
def test_sft(case, both, tmp_path):
    further = None
    options = dict(
        loss_type="dft" if case == "dft" else "nll", packing=case == "packing", max_length=12
    )
    data = trl_tiny.chats()
    if case == "completion":
        data = trl_tiny.pairs().rename_column("chosen", "completion").remove_columns("rejected")
    if case == "packing":
        options["packing_strategy"] = "wrapped"
    if case == "mixtral":
        path = trl_tiny.save_model(tmp_path / "mixtral", family="mixtral")
        further = lambda: dict(model=path)  # noqa: E731
    if case == "lora":
        further = lambda: dict(peft_config=peft_config())  # noqa: E731
        options["gradient_checkpointing"] = True  # as by default
    except_ = {"entropy"} if CHUNKED else ()  # from logits, which there are none of
    both(
        trl.SFTTrainer,
        trl.SFTConfig,
        data,
        except_,
        gradient_accumulation_steps=2,
        further=further,
        **options,
    )


# ---- DPO ----


DPO_TYPES = (
    "sigmoid hinge ipo nca_pair robust bco_pair sppo_hard apo_zero apo_down discopop".split()
)
PREFERENCE = WITHOUT_LOGITS | ALL_POSITIONS if CHUNKED else set()


@pytest.mark.parametrize("loss_type", DPO_TYPES if CHUNKED else DPO_TYPES[:1])
def test_dpo(loss_type, both):
    both(
        trl.DPOTrainer,
        trl.DPOConfig,
        trl_tiny.pairs(),
        PREFERENCE,
        calls=3 * CHUNKED,
        loss_type=loss_type,
        beta=0.2,
    )


def lora(policy, targets=("q_proj", "down_proj")):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(policy)
    config = peft.LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("case", ["lora", "ref_model", "accumulation"])
def test_dpo_with(case, both, policy, teacher):
    """Not with a trained copy of the head (``modules_to_save``): TRL's chunked path makes it the
    reference's, too."""
    options = {}
    calls = 3
    if case == "lora":
        options["further"] = lambda: dict(model=lora(policy))
    elif case == "ref_model":
        options["further"] = lambda: dict(ref_model=AutoModelForCausalLM.from_pretrained(teacher))
    else:
        options = dict(gradient_accumulation_steps=2, per_device_train_batch_size=2)
        calls = 6
    both(
        trl.DPOTrainer,
        trl.DPOConfig,
        trl_tiny.pairs(),
        PREFERENCE,
        calls=calls * CHUNKED,
        **options,
    )


@chunked_only
def test_dpo_evaluates(trained):
    def further():
        return dict(eval_dataset=trl_tiny.pairs(6))

    options = dict(
        further=further, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=2, steps=2
    )
    runs = [
        trained(trl.DPOTrainer, trl.DPOConfig, trl_tiny.pairs(), liger, **options)
        for liger in (True, False)
    ]
    patched, reference = (
        [log for log in run.state.log_history if "eval_loss" in log][0] for run in runs
    )
    for name in (
        "eval_loss",
        "eval_rewards/margins",
        "eval_rewards/accuracies",
        "eval_logps/chosen",
    ):
        assert patched[name] == pytest.approx(reference[name], rel=2e-4, abs=2e-5), name


# ---- KTO ----


@pytest.mark.parametrize("case", ["full", "lora"])
def test_kto(case, both, policy):
    """With adapters TRL's chunked path gives the reference, but says ``use_ref_model=False``."""
    options = dict(further=lambda: dict(model=lora(policy))) if case == "lora" else {}
    both(
        trl.KTOTrainer,
        trl.KTOConfig,
        trl_tiny.unpaired(),
        PREFERENCE,
        calls=3 * CHUNKED,
        beta=0.3,
        **options,
    )


# ---- GRPO ----


def reward(completions, **_):
    """Reward each word that begins with a letter of the first half."""
    return [float(sum(word[0] < "m" for word in text.split())) for text in completions]


GENERATE = dict(num_generations=4, max_completion_length=6, temperature=0.8)
GRPO_CASES = {
    "dapo": {},
    "dapo, kl": dict(beta=0.1),
    "dapo, off policy": dict(num_iterations=2, beta=0.1),
    "dapo, accumulated": dict(gradient_accumulation_steps=2, per_device_train_batch_size=4),
    "grpo": dict(loss_type="grpo", num_iterations=2),
    "grpo, sequence": dict(
        loss_type="grpo", importance_sampling_level="sequence", num_iterations=2, beta=0.05
    ),
    "bnpo": dict(loss_type="bnpo", num_iterations=2, delta=2.0),
    "dr_grpo": dict(loss_type="dr_grpo", beta=0.05, num_iterations=2, use_bias_correction_kl=True),
    "cispo": dict(loss_type="cispo", epsilon_high=5.0, num_iterations=2),
    "sapo": dict(loss_type="sapo", num_iterations=2),
    "vespo": dict(loss_type="vespo", num_iterations=2),
    "luspo": dict(loss_type="luspo", importance_sampling_level="sequence", num_iterations=2),
}


@pytest.mark.parametrize("case", GRPO_CASES if CHUNKED else ["dapo, kl"])
def test_grpo(case, both):
    options = {**GENERATE, **GRPO_CASES[case]}
    clipped = {"cispo": "cispo_clip_ratio"}.get(options.get("loss_type"), "clip_ratio/region_mean")
    except_ = CLIPS | {"entropy"} if CHUNKED else set()
    if case in ("sapo", "vespo"):  # nothing is clipped there, and the plain one says nothing of it
        except_ |= {clipped} | PHI
    if (
        "importance_sampling_level" in options
    ):  # plain: the share of sequences; chunked: of their tokens
        except_ |= {clipped}
    calls = 3 * options.get("gradient_accumulation_steps", 1) * CHUNKED
    both(
        trl.GRPOTrainer,
        trl.GRPOConfig,
        trl_tiny.prompts(),
        except_,
        calls,
        renamed={"clip_ratio": clipped},
        further=lambda: dict(reward_funcs=reward),
        **options,
    )


def test_grpo_with_adapters(both):
    """The reference is the policy without its adapters."""
    both(
        trl.GRPOTrainer,
        trl.GRPOConfig,
        trl_tiny.prompts(),
        CLIPS | {"entropy"} if CHUNKED else (),
        calls=3 * CHUNKED,
        renamed={"clip_ratio": "clip_ratio/region_mean"},
        further=lambda: dict(reward_funcs=reward, peft_config=peft_config()),
        beta=0.1,
        **GENERATE,
    )


# ---- RLOO and CPO: their layers ----


@pytest.mark.parametrize(
    "case", [{}, dict(num_iterations=2, normalize_advantages=True)], ids=["plain", "off policy"]
)
def test_rloo(case, both):
    both(
        trl.RLOOTrainer,
        trl.RLOOConfig,
        trl_tiny.prompts(),
        beta=0.1,
        further=lambda: dict(reward_funcs=reward),
        **GENERATE,
        **case,
    )


@pytest.mark.parametrize("case", ["sigmoid", "simpo", "lora"])
def test_cpo(case, both, policy):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    options = (
        dict(further=lambda: dict(model=lora(policy))) if case == "lora" else dict(loss_type=case)
    )
    both(CPOTrainer, CPOConfig, trl_tiny.pairs(), beta=0.2, max_length=16, **options)


# ---- distillation ----


@pytest.fixture
def taught(both, teacher):
    """``both``, with a teacher."""

    def run(cls, config, data, except_, **arguments):
        def further():
            return dict(teacher_model=AutoModelForCausalLM.from_pretrained(teacher))

        both(cls, config, data, except_, calls=3 * CHUNKED, further=further, **arguments)

    return run


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("lmbda", [0.0, 1.0])  # the data's answers, the student's own
def test_gkd(beta, lmbda, taught):
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    options = dict(beta=beta, lmbda=lmbda, max_new_tokens=6, loss_type="nll")
    taught(GKDTrainer, GKDConfig, trl_tiny.chats(), WITHOUT_LOGITS if CHUNKED else (), **options)


@pytest.mark.parametrize("beta, temperature", [(0.0, 0.9), (0.5, 1.0), (1.0, 1.0)])
def test_distillation(beta, temperature, taught):
    options = dict(beta=beta, temperature=temperature, max_completion_length=6)
    taught(
        trl.DistillationTrainer,
        trl.DistillationConfig,
        trl_tiny.prompts(),
        {"entropy"} if CHUNKED else (),
        **options,
    )


# ---- ORPO: this package's trainer ----


@pytest.mark.parametrize(
    "case", ["llama", "mixtral", "lora", "patched", "gemma2", "lora on the head"]
)
def test_orpo(case, trained, policy, tmp_path, caplog):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    from liger_kernel.transformers.trainer import LigerORPOTrainer

    options = dict(beta=0.3, max_length=16)
    if case in ("mixtral", "gemma2"):
        path = trl_tiny.save_model(tmp_path / case, family=case)
        options["further"] = lambda: dict(model=AutoModelForCausalLM.from_pretrained(path))
    elif case.startswith("lora"):
        targets = ["q_proj", "lm_head"] if "head" in case else ["q_proj", "down_proj"]
        options["further"] = lambda: dict(model=lora(policy, targets))
    else:
        options["further"] = lambda: dict(model=AutoModelForCausalLM.from_pretrained(policy))
    runs = []
    for cls in (LigerORPOTrainer, ORPOTrainer):
        liger = case == "patched" and cls is LigerORPOTrainer
        runs.append(trained(cls, ORPOConfig, trl_tiny.pairs(), liger, **options))
    assert_same_logs(*map(logged_steps, runs))
    in_head = case not in ("gemma2", "lora on the head")
    assert (runs[0]._liger_loss is not None) == in_head
    assert ("does more to its logits" in caplog.text) == (not in_head)
