"""TRL's trainers by our head: they log and train what they do by TRL's own."""

import math

import peft
import pytest
import torch
import trl_tiny
from hardware import DEVICE
from transformers import AutoModelForCausalLM, TrainingArguments

from liger_kernel.ops.head import token_divergence, token_log_probs, unit_gradients
from liger_kernel.patch.loss import trl_head
from liger_kernel.transformers import apply_liger_kernel, apply_liger_kernel_to_trl, revert

trl = pytest.importorskip("trl", reason="TRL is not installed: make test-trl")
utils = pytest.importorskip("trl.trainer.utils")
distillation_trainer = pytest.importorskip("trl.trainer.distillation_trainer")
if not hasattr(utils, "_use_triton") or not hasattr(utils, "add_fused_lm_head"):
    pytest.skip("TRL 1.16's trainers, which run on a CPU", allow_module_level=True)

NOT_COMPARED = "time", "runtime", "second"


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """One device; only tokens that have a label reach the head."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", int(DEVICE == "cuda"))
    monkeypatch.setattr(utils, "_use_triton", lambda device: True)
    monkeypatch.setattr(distillation_trainer, "_use_triton", lambda device: True)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    unit_gradients._histories.clear()
    apply_liger_kernel_to_trl()  # whose trial is not counted as `products`
    revert("trl")
    yield
    revert("trl")


@pytest.fixture
def products(monkeypatch):
    """The products of each pass through our head, in training."""
    recorded = []
    run_forward, run_backward = token_log_probs.run_forward, token_log_probs.run_backward
    run_divergence = token_divergence.run

    def forward(inputs, options, needs):
        if inputs.hidden.requires_grad:
            recorded.append(1 + sum(needs[:2]))
        return run_forward(inputs, options, needs)

    def backward(grads, inputs, statistics, options, needs, **kwargs):
        recorded.append(1 + sum(needs[:2]))
        return run_backward(grads, inputs, statistics, options, needs, **kwargs)

    def divergence(student, teacher, options, needs, g=None):
        recorded.append(2 + sum(needs[:2]))
        return run_divergence(student, teacher, options, needs, g)

    monkeypatch.setattr(token_log_probs, "run_forward", forward)
    monkeypatch.setattr(token_log_probs, "run_backward", backward)
    monkeypatch.setattr(token_divergence, "run", divergence)
    return recorded


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    return trl_tiny.save_model(tmp_path_factory.mktemp("trl_policy"))


def train(cls, config, data, model, tmp_path, steps=3, reward=None, teacher=None, **arguments):
    arguments = trl_tiny.CONFIG | dict(output_dir=str(tmp_path), max_steps=steps) | arguments
    further = {} if reward is None else dict(reward_funcs=reward)
    if teacher is not None:
        further["teacher_model"] = AutoModelForCausalLM.from_pretrained(teacher)
    trainer = cls(
        model=model() if callable(model) else model,
        args=config(**arguments),
        train_dataset=data,
        processing_class=trl_tiny.tokenizer(),
        **further,
    )
    trainer.train()
    logs = []
    for row in trainer.state.log_history:
        if "loss" in row:
            logs.append(
                {
                    k: v
                    for k, v in row.items()
                    if isinstance(v, float) and not any(part in k for part in NOT_COMPARED)
                }
            )
    parameters = trainer.model.named_parameters()
    return logs, {name: p.detach().clone() for name, p in parameters if p.requires_grad}


@pytest.fixture
def both(tmp_path, products):
    """Train by TRL's head and by ours, and return the products of ours."""

    def run(*args, **kwargs):
        revert("trl")
        logs, weights = train(*args, tmp_path, **kwargs)
        assert not products
        assert apply_liger_kernel_to_trl().of(trl_head.NAME) == 1
        our_logs, our_weights = train(*args, tmp_path, **kwargs)
        assert products and len(logs) == len(our_logs) > 0
        for expected, row in zip(logs, our_logs, strict=True):
            assert row.keys() == expected.keys()
            for name, value in expected.items():
                assert row[name] == pytest.approx(value, rel=2e-4, abs=2e-4), name
        for name, weight in weights.items():
            torch.testing.assert_close(our_weights[name], weight, rtol=0, atol=2e-3)
        return products

    return run


def lora(policy):
    def model():
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(policy), config)

    return model


SFT = dict(gradient_accumulation_steps=2, max_length=12)
GRPO = dict(
    num_generations=2,
    max_completion_length=6,
    steps=2,
    beta=0.04,
    reward=lambda completions, **_: [float(len(set(c.split()))) for c in completions],
)


def test_sft(both, policy):
    """Four products at the first step, three at each later one."""
    products = both(trl.SFTTrainer, trl.SFTConfig, trl_tiny.chats(), policy, **SFT)
    assert products == [1, 3] + 5 * [3]


def test_sft_with_checkpoints(both, policy):
    products = both(
        trl.SFTTrainer,
        trl.SFTConfig,
        trl_tiny.chats(),
        policy,
        gradient_checkpointing=True,
        **SFT,
    )
    assert products == [1, 3] + 5 * [3]


def test_sft_in_a_graph(both, policy):
    """There nothing is known of earlier steps: four products in each."""
    torch._dynamo.reset()
    arguments = dict(torch_compile=True, torch_compile_backend="eager")
    both(trl.SFTTrainer, trl.SFTConfig, trl_tiny.chats(), policy, **arguments, **SFT)
    assert not unit_gradients._histories


def test_sft_of_the_head_alone(both, policy):
    """The hidden states need no gradient: products of the first backward, and none later."""

    def model():
        model = AutoModelForCausalLM.from_pretrained(policy)
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_(True)
        return model

    products = both(trl.SFTTrainer, trl.SFTConfig, trl_tiny.chats(), model, **SFT)
    assert products == [2]  # those of forward are counted for hidden states that need one


def test_sft_dft(both, policy):
    products = both(trl.SFTTrainer, trl.SFTConfig, trl_tiny.chats(), policy, loss_type="dft", **SFT)
    assert products == 6 * [1, 3]


def test_sft_lora(both, policy):
    products = both(trl.SFTTrainer, trl.SFTConfig, trl_tiny.chats(), lora(policy), **SFT)
    assert products == 6 * [2]


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_sft_of_other_families(family, both, tmp_path):
    """A softcap; an auxiliary loss beside that of the head."""
    path = trl_tiny.save_model(tmp_path / family, family=family)
    products = both(trl.SFTTrainer, trl.SFTConfig, trl_tiny.chats(), path, **SFT)
    assert products == [1, 3] + 5 * [3]


@pytest.mark.parametrize("weighted", [False, True])
def test_dpo(weighted, both, policy):
    """Weighted (WPO) it asks for the sum of squares, too."""
    arguments = dict(beta=0.2, use_weighting=weighted)
    products = both(trl.DPOTrainer, trl.DPOConfig, trl_tiny.pairs(), policy, **arguments)
    assert products == 3 * [1, 3]


def test_dpo_lora(both, policy):
    assert set(both(trl.DPOTrainer, trl.DPOConfig, trl_tiny.pairs(), lora(policy))) == {2}


def test_dpo_with_a_patched_reference(policy, tmp_path):
    """In bf16, as long as policy and reference are equal, so are their log-probabilities."""

    def patched_reference(**kwargs):
        trainer = trl.DPOTrainer(**kwargs)
        apply_liger_kernel(trainer.ref_model)
        return trainer

    arguments = dict(
        learning_rate=0.0, use_liger_kernel=True, model_init_kwargs=dict(dtype="bfloat16")
    )
    losses = []
    for cls in (trl.DPOTrainer, patched_reference):
        logs, _ = train(cls, trl.DPOConfig, trl_tiny.pairs(), policy, tmp_path, **arguments)
        losses.append([row["loss"] for row in logs])
    unpatched, patched = losses
    assert patched == 3 * [pytest.approx(math.log(2), rel=1e-6)]
    assert unpatched != patched  # the switch does not reach the reference


def test_kto(both, policy):
    both(trl.KTOTrainer, trl.KTOConfig, trl_tiny.unpaired(), policy)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_policies(name, both, policy):
    trainer, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    both(trainer, config, trl_tiny.prompts(), policy, **GRPO)


def test_grpo_with_a_head_in_fp32(both, policy):
    """Of a model in bf16. TRL makes the weight fp32, too, and switches autocast off around it."""
    arguments = GRPO | dict(
        cast_lm_head_to_fp32=True, bf16=True, model_init_kwargs=dict(dtype="bfloat16")
    )
    both(trl.GRPOTrainer, trl.GRPOConfig, trl_tiny.prompts(), policy, **arguments)


def test_grpo_lora_with_an_entropy_bonus(both, policy):
    """The first step has not expected it; the next ones compute the logits in backward."""
    arguments = GRPO | dict(entropy_coef=0.01)
    products = both(trl.GRPOTrainer, trl.GRPOConfig, trl_tiny.prompts(), lora(policy), **arguments)
    assert products == [2, 2] + [1, 2] * (len(products) // 2 - 1)


@pytest.mark.parametrize("beta, temperature", [(0.0, 0.9), (0.5, 1.0), (1.0, 1.0)])
def test_distillation(beta, temperature, both, policy, tmp_path):
    """Six products at the first step, four at each later one."""
    teacher = trl_tiny.save_model(tmp_path / "teacher", seed=1, hidden_size=48)
    arguments = dict(beta=beta, temperature=temperature, max_completion_length=6, teacher=teacher)
    products = both(
        trl.DistillationTrainer, trl.DistillationConfig, trl_tiny.prompts(), policy, **arguments
    )
    assert products == [2, 4] + (len(products) - 2) * [4]


def test_unchanged_script(policy, tmp_path, products):
    """``use_liger_kernel=True`` alone puts the head in."""
    expected, weights = train(
        trl.SFTTrainer, trl.SFTConfig, trl_tiny.chats(), policy, tmp_path, **SFT
    )
    logs, our_weights = train(
        trl.SFTTrainer,
        trl.SFTConfig,
        trl_tiny.chats(),
        policy,
        tmp_path,
        use_liger_kernel=True,
        **SFT,
    )
    assert products == [1, 3] + 5 * [3]
    for row, expected_row in zip(logs, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-3, abs=1e-3)
    for name, weight in weights.items():
        torch.testing.assert_close(our_weights[name], weight, rtol=0, atol=5e-3)


def test_switched_off(policy, tmp_path, products):
    train(
        trl.SFTTrainer,
        trl.SFTConfig,
        trl_tiny.chats(),
        policy,
        tmp_path,
        use_liger_kernel=True,
        liger_kernel_config=dict(trl_head=False, rms_norm=True),
        steps=1,
    )
    assert not products and not isinstance(utils._ChunkedLogProbFunction, trl_head.TRLHead)
