"""A process that trains by TRL's trainers, one request at a time.

    python -m bench.trl_worker SIDE

A request is a line of JSON, and so is the reply. A request is one training (`Spec`): the trainer
is built around a model with random weights, trains on batches that are made here, and is dropped.
SIDE is "TRL", or "ours": the same with ``use_liger_kernel=True``.

Where a trainer would generate completions, it is given some. All else is the trainer's own: its
forward, loss, metrics, backward and optimizer, gradient checkpointing and autocast."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from typing import NamedTuple

import torch
from transformers import TrainerCallback

from . import contest, longest, machine, models, processes, text, train
from .finetune_table import OUT_OF_MEMORY

PROMPT = 64  # tokens of a prompt, at most a quarter of a sequence
STATES_LENGTH = 128  # tokens of the first step, by which the optimizer gets its states


class Spec(NamedTuple):
    """A training, or the forward of a model that scores."""

    trainer: str  # SFT, DPO, KTO, GRPO, RLOO, or scoring
    model: str
    sequence: int  # tokens of a row
    rows: int
    untimed: int = 1
    timed: int = 1
    dtype: str = "float32"  # of the weights
    autocast: bool = True  # in bf16
    optimizer: str = "adamw_torch_fused"
    lr: float = 0.0  # the optimizer works, and ratios to old log-probabilities stay 1
    memory: float | None = None  # GB that the process may take
    device: str = "cuda"
    random_tokens: bool = True  # False: text


# ---- batches ----


def token_ids(spec: Spec, sequence: int, steps: int) -> torch.Tensor:
    """Return token ids, (steps, rows, sequence)."""
    if not spec.random_tokens:
        return text.batches(sequence, spec.rows, steps)
    generator = torch.Generator().manual_seed(0)
    vocab_size = models.SIZES[spec.model]["vocab_size"]
    return torch.randint(vocab_size, (steps, spec.rows, sequence), generator=generator)


def make_batch(spec: Spec, ids: torch.Tensor) -> dict:
    """Return what the trainer's loss is given for these tokens. All but a prompt is scored."""
    ids = ids.to(spec.device)
    rows, sequence = ids.shape
    prompt = min(PROMPT, sequence // 4)
    whole = torch.ones_like(ids)
    completion = whole.clone()
    completion[:, :prompt] = 0
    if spec.trainer == "SFT":
        return dict(input_ids=ids, attention_mask=whole, labels=ids)
    if spec.trainer in ("DPO", "KTO"):
        batch = dict(input_ids=ids, attention_mask=whole, completion_mask=completion)
        if spec.trainer == "KTO":
            batch |= {f"KL_{name}": x.roll(1, 0) for name, x in batch.items()}
            batch["label"] = torch.arange(rows, device=ids.device) % 2 == 0
        return batch
    advantages = torch.linspace(-1, 1, rows, device=ids.device)
    return dict(
        prompt_ids=ids[:, :prompt],
        prompt_mask=whole[:, :prompt],
        completion_ids=ids[:, prompt:],
        completion_mask=whole[:, prompt:],
        advantages=advantages,
        num_items_in_batch=completion.sum(),
    )


def examples(trainer: str):
    """Return a data set with which a trainer can be built. It is not read."""
    from datasets import Dataset

    example = dict(prompt="a", chosen=" b", rejected=" a b", completion=" b", input_ids=[4, 5])
    columns = dict(
        SFT=("input_ids",), DPO=("prompt", "chosen", "rejected"), KTO=("prompt", "completion")
    ).get(trainer, ("prompt",))
    rows = [{name: example[name] for name in columns} for _ in range(2)]
    if trainer == "KTO":
        rows = [row | dict(label=bool(i)) for i, row in enumerate(rows)]
    return Dataset.from_list(rows)


# ---- trainers ----


def build_model(spec: Spec):
    model = models.build(spec.model, spec.device, getattr(torch, spec.dtype))
    model.config.max_position_embeddings = max(spec.sequence, 8192)
    return model


def build_trainer(spec: Spec, side: str, folder: str, steps: int):
    """Return TRL's trainer of a new model."""
    import trl

    # GRPO's reference and old log-probabilities are made by the same function
    name = "GRPO" if spec.trainer == "scoring" else spec.trainer
    on_cpu = spec.device == "cpu"
    arguments = dict(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=spec.rows,
        learning_rate=spec.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch" if on_cpu and "adamw" in spec.optimizer else spec.optimizer,
        bf16=spec.autocast and not on_cpu,
        use_cpu=on_cpu,
        use_liger_kernel=side == "ours",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    further = {}
    if name in ("DPO", "KTO"):
        arguments |= dict(per_device_train_batch_size=max(spec.rows // (name == "DPO" or 1), 1))
        further["ref_model"] = build_model(spec)
    if name in ("GRPO", "RLOO"):
        arguments |= dict(num_generations=2, max_completion_length=spec.sequence, beta=0.0)
        arguments["per_device_train_batch_size"] = spec.rows + spec.rows % 2
        further["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
    trainer = getattr(trl, f"{name}Trainer")(
        model=build_model(spec),
        args=getattr(trl, f"{name}Config")(**arguments),
        train_dataset=examples(name),
        processing_class=text.word_tokenizer(("a", "b")),
        **further,
    )
    trainer._prepare_inputs = lambda batch: batch  # no completions are generated
    return trainer


class Clock(TrainerCallback):
    """Marks the beginning of the first step and the end of each, and what the trainer logs."""

    def __init__(self, device: str):
        self.marks = train.Marks(device)
        self.begun = False
        self.logs = []

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.begun:
            self.marks.add()
        self.begun = True

    def on_step_end(self, args, state, control, **kwargs):
        self.marks.add()

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)


def measure(spec: Spec, side: str) -> dict:
    """Train, or score. Returns milliseconds of the timed steps, peak memory, and logs.

    Before them is a step on short rows, by which the optimizer gets its states."""
    if spec.device == "cuda":
        longest.cap_memory(spec._asdict())
        torch.cuda.reset_peak_memory_stats()
    steps = spec.untimed + spec.timed
    batches = [make_batch(spec, ids) for ids in token_ids(spec, spec.sequence, steps)]
    with tempfile.TemporaryDirectory() as folder:
        if spec.trainer == "scoring":
            return score(spec, side, folder, batches)
        short = token_ids(spec, min(STATES_LENGTH, spec.sequence), 1)
        batches = [make_batch(spec, short[0]), *batches]
        trainer = build_trainer(spec, side, folder, len(batches))
        if spec.trainer == "RLOO":
            for batch in batches:
                batch["old_logps"] = scores(trainer, spec, batch).sum(1)
        clock = Clock(spec.device)
        trainer.add_callback(clock)
        trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(batches, batch_size=None)
        trainer.train()
    rows = [row for row in clock.logs if "loss" in row]
    return {
        "steps_ms": clock.marks.gaps()[1 + spec.untimed :],
        "losses": [row["loss"] for row in rows],
        "entropies": [row["entropy"] for row in rows if "entropy" in row],
        "replaced_head": replaced_head(),
        **longest.memory(spec.device),
    }


def scores(trainer, spec: Spec, batch: dict) -> torch.Tensor:
    """Return the log-probabilities of completions, as the trainer computes old ones."""
    ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), 1)
    mask = torch.cat((batch["prompt_mask"], batch["completion_mask"]), 1)
    in_bf16 = spec.autocast and spec.device == "cuda"
    with torch.no_grad(), torch.autocast(spec.device, torch.bfloat16, enabled=in_bf16):
        log_probs, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1]
        )
    return log_probs


def score(spec: Spec, side: str, folder: str, batches: list[dict]) -> dict:
    """Compute log-probabilities as GRPO does, without gradients."""
    trainer = build_trainer(spec, side, folder, 1)
    if side == "ours":  # as the trainer does when training begins
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(trainer.model, None)
    marks = train.Marks(spec.device)
    marks.add()
    for batch in batches:
        scores(trainer, spec, batch)
        marks.add()
    return {
        "steps_ms": marks.gaps()[spec.untimed :],
        "losses": [],
        "entropies": [],
        "replaced_head": replaced_head(),
        **longest.memory(spec.device),
    }


def replaced_head() -> bool:
    """Return True if TRL's trainers compute their losses by our head."""
    from liger_kernel.patch.loss import trl_head

    return trl_head.HEAD.is_in()


# ---- requests ----


def answer(side: str, request: dict) -> dict:
    """Return the figures of a training, or its error. Then nothing of it is left in memory."""
    try:
        reply = measure(Spec(**request), side)
    except Exception as error:  # it stands in the table
        out_of_memory = processes.is_out_of_memory(error)
        reply = {"error": OUT_OF_MEMORY if out_of_memory else contest.summary(error)}
    gc.collect()
    if request["device"] == "cuda":
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated()
        if left > 2**30:  # begin the next one in a new process
            reply["broken"] = True
    return reply


def main(argv: list[str]) -> None:
    (side,) = argv
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("describe"):
            reply = {"version": machine.version("trl")}
        else:
            reply = answer(side, request)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
