"""DeepSpeed's sequence parallelism (Ulysses, ALST): patched models train as one unpatched process.

By the real Trainer, accelerate and DeepSpeed. Each rank has an equal part of every sequence.

`make test-deepspeed` installs DeepSpeed and runs this. Without it these tests skip.
"""

from functools import partial
from importlib.util import find_spec

import pytest
import ranks
import tiny
import torch
import zero
from hardware import DEVICE
from logged import LossRecorder
from ranks import SIZE
from transformers import Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import liger_kernel.transformers as liger
from liger_kernel.core import devices
from liger_kernel.patch import engine

STEPS = 3
LENGTH = 12 * SIZE
LR = 0.1
# Ignored tokens at the start; of 13 and more, all that rank 0 has. A rank has 12.
PROMPTS = 4, 13, 0, 18, 23, 9


def texts():
    items = []
    for i, prompt in enumerate(PROMPTS):
        ids = tiny.batch(rows=1, tokens=LENGTH, seed=i)["input_ids"][0]
        labels = ids.clone()
        labels[:prompt] = -100
        items.append(dict(input_ids=ids, labels=labels, position_ids=torch.arange(LENGTH)))
    return items


def build():
    return tiny.model("llama", attn_implementation="sdpa", **ranks.HEADS).to(DEVICE)


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def sp_trainer(folder, model, stage, accumulated):
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    sp_config = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulated,
        optim="sgd",
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
        deepspeed=zero.configuration(torch.float32, stage, accumulated, rows=1),
        parallelism_config=ParallelismConfig(
            sp_size=SIZE, sp_backend="deepspeed", sp_handler=sp_config
        ),
    )
    losses = LossRecorder()
    trainer = InOrder(model=model, args=args, train_dataset=texts(), callbacks=[losses])
    trainer.losses = losses.seen
    return trainer


def train_with_trainer(folder, switches, stage, accumulated):
    """Return (losses of the steps, trained weights). ``switches``: of the patch, None for none."""
    devices.INTERPRETED = False
    zero.prepare()
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    model = build()
    report = None if switches is None else liger.apply_liger_kernel(model, **switches)
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        trainer = sp_trainer(folder, model, stage, accumulated)
        trainer.train()
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
        parallel_state_sp._release_sequence_parallel_groups()
    if report is not None:
        assert not report.left_alone
        assert all(m._liger_logits_warnings is None for m in engine.causal_lms(model)), "logits"
    return trainer.losses, zero.weights(trainer.model_wrapped)


def train_in_one_process(accumulated, lr):
    """Train on whole sequences, by the Trainer's loss: the mean of a sequence's, then of these."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    items = iter(texts())
    losses = []
    for _ in range(STEPS):
        total = 0
        for _ in range(accumulated):
            inputs = {name: t[None].to(DEVICE) for name, t in next(items).items()}
            loss = model(**inputs).loss / accumulated
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, dict(model.named_parameters())


def check(rank, folder, stage=3, accumulated=1, **switches):
    """Compare losses and weights with one process, unpatched and patched.

    fp32 sums in another order; a weight is rounded at each of the steps. DeepSpeed's stages 1 and 2
    take the sum of a sequence's ranks, where stage 3 takes their mean.
    """
    expected, expected_weights = train_in_one_process(accumulated, LR if stage == 3 else LR * SIZE)
    start = dict(build().named_parameters())
    for patch in (None, switches):
        losses, weights = train_with_trainer(folder, patch, stage, accumulated)
        assert len(losses) == STEPS
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
        for name, w in expected_weights.items():
            update = (w - start[name]).abs().max()
            error = (weights[name] - w).abs().max()
            assert update > 0, (patch, name)
            assert error <= 1e-5 * update + 1e-6 * w.abs().max(), (patch, name)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_ulysses(tmp_path):
    cases = dict(), dict(accumulated=2, tiled_mlp=5), dict(stage=2)
    ranks.run([partial(check, folder=tmp_path, **case) for case in cases], tmp_path)
