"""Time the training of Medusa's heads on a frozen backbone: Hugging Face's, liger-kernel's, ours.

    PYTHONPATH=src python -m bench.medusa [--peer DIR] [--runs MODEL@SEQUENCExBATCH,...]
        [--heads 3,5]

As `bench.train`: its models, text, seeds and optimizer, each contestant in a process of its own. A
head is a residual block and a projection of its own (arXiv:2401.10774). PyTorch has a head's logits
at a time, and Hugging Face's loss of them; liger-kernel has its kernels in the backbone, and its
linear cross entropy for each head; ours is `liger_medusa_loss`. Memory is what a step takes at most
beyond all weights: gradients and the optimizer's state of the heads' parameters, which are the same
for all, and the rest."""

from __future__ import annotations

import argparse
import copy
import time

import torch
import torch.nn.functional as F

from . import machine, models, runs, text, train, training_tables

RUNS = "Llama-3-8B@4096x2,Llama-3-8B@4096x4,Llama-3-8B@4096x8"
DECAY = 0.8  # head k has the weight DECAY**k in the loss
IGNORED = -100


class Heads(torch.nn.Module):
    """Medusa's heads; their projections begin as copies of the model's ``lm_head``."""

    def __init__(self, model, count: int):
        super().__init__()
        head = model.get_output_embeddings()
        size = head.weight.shape[1]
        options = dict(device=head.weight.device, dtype=head.weight.dtype)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Linear(size, size, **options) for _ in range(count)
        )
        self.projections = torch.nn.ModuleList(copy.deepcopy(head) for _ in range(count))
        for block in self.blocks:
            torch.nn.init.zeros_(block.weight)
            torch.nn.init.zeros_(block.bias)

    def __iter__(self):
        """Yield (head's number from 1, block, projection)."""
        return zip(range(1, len(self.blocks) + 1), self.blocks, self.projections, strict=True)


def head_states(block, hidden_states):
    return hidden_states + F.silu(block(hidden_states))


def shifted(labels, k: int):
    """Return the labels of head k: those of ``k + 1`` tokens later."""
    return F.pad(labels[:, k + 1 :], (0, k + 1), value=IGNORED)


def hugging_face_loss(heads, hidden_states, labels):
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss = 0
    for k, block, projection in heads:
        logits = projection(head_states(block, hidden_states))
        vocab_size = projection.weight.shape[0]
        head_loss = ForCausalLMLoss(logits, None, vocab_size, shift_labels=shifted(labels, k))
        loss = loss + DECAY**k * head_loss
    return loss


def peer_loss(heads, hidden_states, labels):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = 0
    compute_loss = LigerFusedLinearCrossEntropyLoss()
    for k, block, projection in heads:
        rows = head_states(block, hidden_states).flatten(0, 1)
        head_loss = compute_loss(projection.weight, rows, shifted(labels, k).flatten())
        loss = loss + DECAY**k * head_loss
    return loss


def our_loss(heads, hidden_states, labels):
    from liger_kernel.chunked_loss import liger_medusa_loss

    states = [head_states(block, hidden_states) for block in heads.blocks]
    weights = [projection.weight for projection in heads.projections]
    return liger_medusa_loss(states, weights, labels)[0]


LOSSES = {"eager": hugging_face_loss, "peer": peer_loss, "ours": our_loss}


def work(
    contestant: str,
    name: str,
    sequence: int,
    batch: int,
    count: int,
    warmup: int,
    timed: int,
    device: str,
) -> dict:
    """Measure one contestant with ``count`` heads, in this process."""
    described = runs.described()
    compute_loss = LOSSES[contestant]
    model = models.build(name, device, torch.bfloat16).requires_grad_(False).eval()
    heads = Heads(model, count)
    heads.requires_grad_(True)
    runs.CONTESTANTS[contestant](model)
    data = text.batches(sequence, batch, warmup + timed).to(device)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-4, fused=True)

    def step(ids):
        with torch.no_grad():
            hidden_states = model.base_model(input_ids=ids).last_hidden_state
        loss = compute_loss(heads, hidden_states, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, ms = train.clocked(step, data)
    figures = train.speed(sequence, batch, ms[warmup:])
    figures["losses"] = losses
    figures["peak_bytes"] = train.peak_bytes(device)
    figures["weights_bytes"] = weights_bytes(model, heads)
    figures["learning_bytes"] = learning_bytes(heads, optimizer)
    return {"machine": described, "figures": figures}


def weights_bytes(model, heads: Heads) -> int:
    """Return the bytes of all weights, shared ones once."""
    tensors = (*model.parameters(), *model.buffers(), *heads.parameters())
    nbytes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    return sum(nbytes.values())


def learning_bytes(heads: Heads, optimizer) -> int:
    """Return the bytes of the heads' gradients and of the optimizer's state."""
    total = sum(parameter.nbytes for parameter in heads.parameters())
    for state in optimizer.state.values():
        total += sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    return total


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", default=RUNS, help=f"what to train ({RUNS})")
    parser.add_argument("--heads", default="3,5", help="how many (3,5)")
    parser.add_argument(
        "--contestants", default="", help=f"some of {','.join(LOSSES)} (all; peer with --peer)"
    )
    runs.add_options(parser, "medusa", steps=8)
    parser.add_argument("--worker", nargs=9, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return runs.worker(work, args.worker)
    names = runs.chosen_contestants("medusa", args, LOSSES, LOSSES)
    head_counts = [int(count) for count in args.heads.split(",")]
    plan = [(*run, count) for run in runs.parsed(args.runs, "medusa") for count in head_counts]
    if args.device == "cuda":
        machine.require_gpu()
    end = time.monotonic() + args.limit
    data = {"machine": {"error": "nothing was measured"}, "rows": []}
    for run in plan:
        row = dict(zip(("model", "sequence", "batch", "heads"), run, strict=True), contestants={})
        data["rows"].append(row)
        for name in names:
            runs.measure("medusa", data, row, name, run, args, end)
            print(training_tables.medusa_line(row, name), flush=True)
    print("\n" + training_tables.medusa(data))


if __name__ == "__main__":
    main()
