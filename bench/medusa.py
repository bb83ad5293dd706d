"""Time the training of Medusa's heads: Hugging Face's, liger-kernel's, ours.

    PYTHONPATH=src python -m bench.medusa [--peer DIR] [--runs MODEL@SEQUENCExBATCH,...]
        [--stages heads,lora,all] [--heads 3,5] [--card 80]

As `bench.train`: its models, text and seeds, each contestant in a process of its own. A head is a
residual block and a projection of its own (arXiv:2401.10774). The stages: ``heads`` on a frozen
backbone (Medusa-1), which runs without gradients; ``lora``, where PEFT's adapters learn with them;
``all``, where all weights do (Medusa-2). In the last two the model's own head is in the loss, the
others with a share of it, and layers are checkpointed. AdamW, in ``all`` with states in 8 bits
(bitsandbytes).

PyTorch has a head's logits at a time, and Hugging Face's loss of them; liger-kernel has its kernels
in the backbone, and its linear cross entropy for each head; ours is `liger_medusa_loss`. A BATCH of
0 is each contestant's largest one in ``--card`` GB, which no row exceeds. Memory is what a step
takes at most beyond all weights: gradients and the optimizer's state of what learns, which are the
same for all, and the rest."""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from . import longest, machine, models, processes, runs, text, train, training_tables

RUNS = "Llama-3-8B@4096x2,Llama-3-8B@4096x4,Llama-3-8B@4096x8"
STAGES = "heads", "lora", "all"
DECAY = 0.8  # head k has the weight DECAY**k in the loss
SHARE = 0.2  # of the heads in the loss, beside the model's own
RANK = 16  # of LoRA
IGNORED = -100


class Block(torch.nn.Module):
    def __init__(self, size: int, **options):
        super().__init__()
        self.linear = torch.nn.Linear(size, size, **options)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_states):
        return hidden_states + F.silu(self.linear(hidden_states))


class Heads(torch.nn.Module):
    """Medusa's heads; their projections begin as copies of the model's ``lm_head``."""

    def __init__(self, model, count: int):
        super().__init__()
        head = model.get_output_embeddings()
        size = head.weight.shape[1]
        options = dict(device=head.weight.device, dtype=head.weight.dtype)
        self.blocks = torch.nn.ModuleList(Block(size, **options) for _ in range(count))
        self.projections = torch.nn.ModuleList(copy.deepcopy(head) for _ in range(count))


# ---- losses: (heads, the model's own head or None, hidden states, labels) -> loss ----


def all_heads(heads: Heads, own) -> list[tuple]:
    """Return of each head its number, its weight in the loss, its block and its projection. The
    model's own has no block."""
    rows = zip(heads.blocks, heads.projections, strict=True)
    share = 1.0 if own is None else SHARE
    result = [(k, share * DECAY**k, *row) for k, row in enumerate(rows, 1)]
    return result if own is None else [(0, 1.0, None, own), *result]


def shifted(labels, k: int):
    """Return the labels of head k: those of ``k + 1`` tokens later."""
    return F.pad(labels[:, k + 1 :], (0, k + 1), value=IGNORED)


def hugging_face_loss(heads, own, hidden_states, labels):
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss = 0
    for k, weight, block, projection in all_heads(heads, own):
        logits = projection(hidden_states if block is None else block(hidden_states))
        vocab_size = projection.weight.shape[0]
        head_loss = ForCausalLMLoss(logits, None, vocab_size, shift_labels=shifted(labels, k))
        loss = loss + weight * head_loss
    return loss


def peer_loss(heads, own, hidden_states, labels):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = 0
    compute_loss = LigerFusedLinearCrossEntropyLoss()
    for k, weight, block, projection in all_heads(heads, own):
        rows = (hidden_states if block is None else block(hidden_states)).flatten(0, 1)
        head_loss = compute_loss(projection.weight, rows, shifted(labels, k).flatten())
        loss = loss + weight * head_loss
    return loss


def our_loss(heads, own, hidden_states, labels):
    from liger_kernel.chunked_loss import liger_medusa_loss

    numbers, coefficients, blocks, projections = zip(*all_heads(heads, own), strict=True)
    return liger_medusa_loss(
        hidden_states,
        [projection.weight for projection in projections],
        labels,
        coefficients=coefficients,
        first=numbers[0],
        layers=blocks,
    )[0]


LOSSES = {"eager": hugging_face_loss, "peer": peer_loss, "ours": our_loss}


# ---- training ----


def prepare_backbone(model, stage: str) -> None:
    """Make the model learn as ``stage`` has it."""
    model.requires_grad_(stage == "all")
    if stage == "heads":
        model.eval()
        return
    if stage == "lora":
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        torch.manual_seed(1)
        inject_adapter_in_model(config, model)
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable(dict(use_reentrant=False))


def make_optimizer(parameters: list, stage: str, device: str) -> torch.optim.Optimizer:
    if stage == "all" and device == "cuda":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, lr=train.LEARNING_RATE)
    lr = 1e-4 if stage == "heads" else train.LEARNING_RATE
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


class Training:
    """A contestant's model, its heads, and its step."""

    def __init__(self, contestant: str, name: str, count: int, stage: str, device: str):
        self.model = models.build(name, device, torch.bfloat16)
        self.heads = Heads(self.model, count)
        prepare_backbone(self.model, stage)
        self.heads.requires_grad_(True)
        runs.CONTESTANTS[contestant](self.model)
        self.compute_loss = LOSSES[contestant]
        self.frozen = stage == "heads"
        self.own = None if self.frozen else self.model.get_output_embeddings()
        # tied weights are there once
        parameters = {id(p): p for p in (*self.heads.parameters(), *self.model.parameters())}
        self.trained = [p for p in parameters.values() if p.requires_grad]
        self.optimizer = make_optimizer(self.trained, stage, device)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(not self.frozen):
            outputs = self.model.base_model(input_ids=ids, use_cache=False)
        loss = self.compute_loss(self.heads, self.own, outputs.last_hidden_state, ids)
        del outputs
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def weights_bytes(self) -> int:
        """Return the bytes of all weights, shared ones once."""
        modules = self.model, self.heads
        tensors = [x for module in modules for x in (*module.parameters(), *module.buffers())]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def learning_bytes(self) -> int:
        """Return the bytes of the gradients, and of the optimizer's state."""
        total = sum(parameter.nbytes for parameter in self.trained)
        for state in self.optimizer.state.values():
            total += sum(x.nbytes for x in state.values() if isinstance(x, torch.Tensor))
        return total


def peak_of_step(training: Training, sequence: int, batch: int) -> int | None:
    """Return the peak bytes of a step with so many sequences, or None if memory runs out."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        training.step(text.batches(sequence, batch, 1)[0].cuda())
    except Exception as error:
        if not processes.is_out_of_memory(error):
            raise
        training.optimizer.zero_grad()
        return None
    return torch.cuda.max_memory_allocated()


def largest_batch(peak: Callable[[int], int | None], nbytes: float) -> int:
    """Return the largest batch that fits.

    ``peak(batch)``: the peak bytes of a step, or None. They grow by the same amount with each
    sequence, so the largest is guessed from two of them, and tried."""
    first = peak(1)  # with the optimizer's new state
    if first is None:
        raise torch.cuda.OutOfMemoryError("no batch fits")
    small, large = peak(2), peak(4)
    if large is None:
        for batch in (3, 2, 1):
            if peak(batch) is not None:
                return batch
    growth = max((large - small) / 2, 1)
    batch = int(4 + (nbytes - large) / growth)
    while batch > 4 and peak(batch) is None:
        batch -= 1
    return batch


def run_steps(
    training: Training, sequence: int, batch: int, count: int, device: str
) -> tuple[list[float], list[float]]:
    """Do so many steps. Returns losses, and milliseconds of each step."""
    data = text.batches(sequence, batch, count).to(device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return train.clocked(training.step, data)


def run_steps_that_fit(
    training: Training, sequence: int, batch: int, count: int, device: str
) -> tuple[int, list[float], list[float]]:
    """As `run_steps`, with a smaller batch where memory runs out: a step that went well says little
    of the next. Returns the batch, too."""
    while True:
        try:
            return batch, *run_steps(training, sequence, batch, count, device)
        except Exception as error:
            if batch == 1 or not processes.is_out_of_memory(error):
                raise
        training.optimizer.zero_grad()
        batch -= 1


def work(
    contestant: str,
    name: str,
    sequence: int,
    batch: int,
    count: int,
    stage: int,
    card: int,
    warmup: int,
    timed: int,
    device: str,
) -> dict:
    """Measure one contestant with ``count`` heads, in this process.

    A batch of 0 is its largest one on a card of so many GB; ``stage`` is an index in `STAGES`."""
    described = runs.described()
    longest.cap_memory(dict(device=device, memory=card))
    training = Training(contestant, name, count, STAGES[stage], device)
    if batch:
        losses, ms = run_steps(training, sequence, batch, warmup + timed, device)
    else:
        batch = largest_batch(partial(peak_of_step, training, sequence), 0.98 * card * 1e9)
        batch, losses, ms = run_steps_that_fit(training, sequence, batch, warmup + timed, device)
    figures = train.speed(sequence, batch, ms[warmup:])
    figures["batch"] = batch
    figures["losses"] = losses
    figures["peak_bytes"] = train.peak_bytes(device)
    figures["weights_bytes"] = training.weights_bytes()
    figures["learning_bytes"] = training.learning_bytes()
    return {"machine": described, "figures": figures}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", default=RUNS, help=f"what to train ({RUNS})")
    parser.add_argument("--stages", default="heads", help=f"some of {','.join(STAGES)} (heads)")
    parser.add_argument("--heads", default="3,5", help="how many (3,5)")
    parser.add_argument("--card", type=int, default=0, help="GB of memory (all that there is)")
    parser.add_argument(
        "--contestants", default="", help=f"some of {','.join(LOSSES)} (all; peer with --peer)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what the JSON file has of this machine"
    )
    runs.add_options(parser, "medusa", steps=8)
    parser.add_argument("--worker", nargs=11, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return runs.worker(work, args.worker)
    names = runs.chosen_contestants("medusa", args, LOSSES, LOSSES)
    stages = args.stages.split(",")
    if set(stages) - set(STAGES):
        raise SystemExit(f"bench.medusa: --stages {args.stages}: some of {','.join(STAGES)}")
    sizes = runs.parsed(args.runs, "medusa")
    if not args.card and any(batch == 0 for _, _, batch in sizes):
        raise SystemExit("bench.medusa: a BATCH of 0 needs --card")
    head_counts = [int(count) for count in args.heads.split(",")]
    if args.device == "cuda":
        machine.require_gpu()
    # a largest batch is not one of fragments
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    end = time.monotonic() + args.limit
    data = {"machine": {"error": "nothing was measured"}, "rows": []}
    if args.resume:
        data = machine.resumed("medusa", {"machine": machine.describe()}, args.out) or data
    for stage in stages:
        for name, sequence, batch in sizes:
            for count in head_counts:
                run = name, sequence, batch, count, STAGES.index(stage), args.card
                row = row_of(data["rows"], run)
                measure(data, row, names, run, args, end)
    print("\n" + training_tables.medusa(data))


def row_of(rows: list[dict], run: tuple) -> dict:
    """Return the row of a run, added if it is not there."""
    settings = dict(zip(("model", "sequence", "batch", "heads", "stage", "card"), run, strict=True))
    settings["stage"] = STAGES[settings["stage"]]
    for row in rows:
        if all(row.get(key) == value for key, value in settings.items()):
            return row
    rows.append(settings | dict(contestants={}))
    return rows[-1]


def measure(data: dict, row: dict, names: list[str], run: tuple, args, end: float) -> None:
    for name in names:
        if "tokens_per_s" in row["contestants"].get(name, {}):
            continue
        runs.measure("medusa", data, row, name, run, args, end)
        print(training_tables.medusa_line(row, name), flush=True)


if __name__ == "__main__":
    main()
