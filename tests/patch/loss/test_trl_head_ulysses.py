"""Our head in the place of TRL's under DeepSpeed's sequence parallelism (Ulysses, ALST).

By TRL's SFTTrainer, accelerate and DeepSpeed. Each rank's head is given the tokens of its part of
every sequence, with labels that are shifted already. The trainer takes the model's own loss, the
mean over these tokens, and weighs the ranks by their numbers. ``make test-deepspeed`` runs this."""

from functools import partial
from importlib.util import find_spec

import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
import trl_tiny
import zero
from datasets import Dataset
from hardware import DEVICE
from ranks import SIZE
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from liger_kernel.ops.head import unit_gradients
from liger_kernel.patch.loss import trl_head
from liger_kernel.transformers import apply_liger_kernel_to_trl, revert

pytestmark = pytest.mark.skipif(not find_spec("deepspeed"), reason="make test-deepspeed")
trl = pytest.importorskip("trl", reason="TRL is not installed: make test-trl")
utils = pytest.importorskip("trl.trainer.utils")
if not hasattr(utils, "_use_triton") or not hasattr(utils, "add_fused_lm_head"):
    pytest.skip("TRL 1.16's head, which runs on a CPU", allow_module_level=True)

STEPS = 4
PROMPTS = 3, 11, 12, 4, 13, 2  # words; of 8 and more, rank 0 of two has no token with a label
NUM_WORDS = 14


def prompts_and_completions():
    examples = []
    for i, length in enumerate(PROMPTS):
        completion = " " + trl_tiny.words(i + 1, NUM_WORDS - length)
        examples.append(dict(prompt=trl_tiny.words(i, length), completion=completion))
    return Dataset.from_list(examples)


def train(folder, stage, accumulated):
    """Return what a trainer logs, the trained weights, and the tokens that each head was given."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    zero.prepare()
    sp_config = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    arguments = dict(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulated,
        pad_to_multiple_of=SIZE,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0.0,
        deepspeed=zero.configuration(torch.float32, stage, accumulated, rows=1),
        parallelism_config=ParallelismConfig(
            sp_size=SIZE, sp_backend="deepspeed", sp_handler=sp_config
        ),
    )
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        trainer = trl.SFTTrainer(
            model=tiny.model("llama", attn_implementation="sdpa", **ranks.HEADS).to(DEVICE),
            args=trl.SFTConfig(**trl_tiny.CONFIG | arguments),
            train_dataset=prompts_and_completions(),
            processing_class=trl_tiny.tokenizer(),
        )
        trainer.train()
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
        parallel_state_sp._release_sequence_parallel_groups()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    return logs, zero.weights(trainer.model_wrapped)


def spy_on_calls(monkeypatch):
    """Record the number of tokens of each call of the head in training: of ours, and in all."""
    calls = {"ours": [], "all": []}
    compute, can_compute = trl_head.compute, trl_head.can_compute

    def record(kind, function):
        def call(head_call, *args):
            if head_call.hidden.requires_grad:
                calls[kind].append(len(head_call.hidden))
            return function(head_call, *args)

        return call

    monkeypatch.setattr(trl_head, "compute", record("ours", compute))
    monkeypatch.setattr(trl_head, "can_compute", record("all", can_compute))
    return calls


def check(rank, folder, stage, accumulated):
    """As by TRL's own head: losses, metrics and weights."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(utils, "_use_triton", lambda device: True)  # as on a GPU
        unit_gradients._histories.clear()
        expected, expected_weights = train(folder, stage, accumulated)
        assert apply_liger_kernel_to_trl().of(trl_head.NAME) == 1
        unit_gradients._histories.clear()
        calls = spy_on_calls(monkeypatch)
        logs, weights = train(folder, stage, accumulated)
        revert("trl")
    assert len(calls["all"]) == STEPS * accumulated
    # TRL's own has taken those without a token that has a label
    assert calls["ours"] == [n for n in calls["all"] if n]
    if rank == 0 and SIZE == 2:
        assert 0 in calls["all"]
    assert max(calls["all"]) <= NUM_WORDS
    (history,) = unit_gradients._histories.values()
    assert history.one_number  # each rank's loss is a mean
    assert len(logs) == len(expected) == STEPS
    for row, expected_row in zip(logs, expected, strict=True):
        for name in "loss", "entropy", "mean_token_accuracy", "num_tokens":
            assert row[name] == pytest.approx(expected_row[name], rel=1e-5), name
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-5)
    dist.barrier()


def test_ranks(tmp_path):
    ranks.run(
        [
            partial(check, folder=str(tmp_path), stage=3, accumulated=1),
            partial(check, folder=str(tmp_path), stage=1, accumulated=2),
        ],
        tmp_path,
    )
