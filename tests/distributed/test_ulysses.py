"""DeepSpeed's sequence parallelism (Ulysses, ALST) by the real Trainer, accelerate and DeepSpeed:
two ranks, each with half of every sequence, train as one process with the whole, and as the
unpatched model.

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

STEPS, LENGTH, LR = 3, 24, 0.1
PROMPTS = (
    4,
    13,
    0,
    18,
    23,
    9,
)  # tokens at the start that do not count; of 13 and more, all that rank 0 has


def texts():
    items = []
    for i, prompt in enumerate(PROMPTS):
        ids = tiny.batch(rows=1, tokens=LENGTH, seed=i)["input_ids"][0]
        labels = ids.clone()
        labels[:prompt] = -100
        items.append(dict(input_ids=ids, labels=labels, position_ids=torch.arange(LENGTH)))
    return items


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def sp_trainer(folder, model, stage, accumulated):
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    how = DeepSpeedSequenceParallelConfig(
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
        parallelism_config=ParallelismConfig(sp_size=SIZE, sp_backend="deepspeed", sp_handler=how),
    )
    losses = LossRecorder()
    made = InOrder(model=model, args=args, train_dataset=texts(), callbacks=[losses])
    made.losses = losses.seen
    return made


def by_trainer(folder, switches, stage, accumulated):
    """(losses of the steps, trained weights). ``switches``: of the patch, None for no patch."""
    devices.INTERPRETED = False
    zero.prepare()
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    model = tiny.model("llama", attn_implementation="sdpa").to(DEVICE)
    report = None if switches is None else liger.apply_liger_kernel(model, **switches)
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        run = sp_trainer(folder, model, stage, accumulated)
        run.train()
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
        parallel_state_sp._release_sequence_parallel_groups()
    if report is not None:
        assert not report.left_alone and all(
            m._liger_told is None for m in engine.causal_lms(model)
        ), "logits"
    return run.losses, zero.weights(run.model_wrapped)


def alone(accumulated, lr):
    """One process with whole sequences. As the Trainer says it: the mean of a sequence's tokens,
    then of sequences."""
    model = tiny.model("llama", attn_implementation="sdpa").to(DEVICE)
    optimizer, items, losses = torch.optim.SGD(model.parameters(), lr=lr), iter(texts()), []
    for _ in range(STEPS):
        total = 0
        for _ in range(accumulated):
            loss = (
                model(**{name: t[None].to(DEVICE) for name, t in next(items).items()}).loss
                / accumulated
            )
            loss.backward()
            total += loss.item()
        optimizer.step(), optimizer.zero_grad()
        losses.append(total)
    return losses, dict(model.named_parameters())


def check(rank, folder, stage=3, accumulated=1, **switches):
    """fp32 sums in another order; a weight is rounded at each of the steps. (DeepSpeed's stages 1
    and 2 take the sum of a sequence's ranks, where stage 3 takes their mean.)"""
    want, want_weights = alone(accumulated, LR if stage == 3 else LR * SIZE)
    start = dict(tiny.model("llama").to(DEVICE).named_parameters())
    for given in (None, switches):
        losses, weights = by_trainer(folder, given, stage, accumulated)
        assert len(losses) == STEPS
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=1e-5, atol=0)
        for name, w in want_weights.items():
            moved = (w - start[name]).abs().max()
            assert (
                moved > 0 and (weights[name] - w).abs().max() <= 1e-5 * moved + 1e-6 * w.abs().max()
            ), (given, name)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_ulysses(tmp_path):
    given = dict(), dict(accumulated=2, tiled_mlp=5), dict(stage=2)
    ranks.run([partial(check, folder=tmp_path, **case) for case in given], tmp_path)
