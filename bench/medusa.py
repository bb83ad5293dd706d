"""Time the training of Medusa's heads on a frozen backbone: Hugging Face's way, liger-kernel's,
ours.

    PYTHONPATH=src python -m bench.medusa [--peer DIR] [--runs MODEL@SEQUENCExBATCH,...] [--heads
    3,5]

As `bench.train`: its models, text, seeds and optimizer, each contestant in a process of its own. A
head is a residual block and a projection of its own (arXiv:2401.10774). PyTorch has a head's logits
at a time, and Hugging Face's loss of them; liger-kernel has its kernels in the backbone, and its
linear cross entropy for each head; ours is `liger_medusa_loss`. Memory is what a step takes at most
beyond all weights: gradients and the optimizer's state of the heads' parameters, which are the same
for all, and the rest."""

from __future__ import annotations

import argparse
import copy
import pathlib
import time

import torch
import torch.nn.functional as F

from . import machine, models, report, runs, text, train

RUNS = "Llama-3-8B@4096x2,Llama-3-8B@4096x4,Llama-3-8B@4096x8"
DECAY, IGNORED = 0.8, -100


class Heads(torch.nn.Module):
    """Of a model whose ``lm_head`` their projections begin with."""

    def __init__(self, model, count: int):
        super().__init__()
        head = model.get_output_embeddings()
        size, like = head.weight.shape[1], dict(device=head.weight.device, dtype=head.weight.dtype)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(size, size, **like) for _ in range(count))
        self.projections = torch.nn.ModuleList(copy.deepcopy(head) for _ in range(count))
        for block in self.blocks:
            torch.nn.init.zeros_(block.weight)
            torch.nn.init.zeros_(block.bias)

    def __iter__(self):
        """(head's number, block, projection)"""
        return zip(range(1, len(self.blocks) + 1), self.blocks, self.projections, strict=True)


def state(block, hidden):
    return hidden + F.silu(block(hidden))


def shifted(labels, k: int):
    return F.pad(labels[:, k + 1 :], (0, k + 1), value=IGNORED)


def hugging_face(heads, hidden, labels):
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss = 0
    for k, block, projection in heads:
        logits = projection(state(block, hidden))
        size = projection.weight.shape[0]
        loss = loss + DECAY**k * ForCausalLMLoss(
            logits, None, size, shift_labels=shifted(labels, k)
        )
    return loss


def peer(heads, hidden, labels):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss, of_head = 0, LigerFusedLinearCrossEntropyLoss()
    for k, block, projection in heads:
        rows = state(block, hidden).flatten(0, 1)
        loss = loss + DECAY**k * of_head(projection.weight, rows, shifted(labels, k).flatten())
    return loss


def ours(heads, hidden, labels):
    from liger_kernel.chunked_loss import liger_medusa_loss

    states = [state(block, hidden) for block in heads.blocks]
    return liger_medusa_loss(
        states, [projection.weight for projection in heads.projections], labels
    )[0]


LOSSES = {"eager": hugging_face, "peer": peer, "ours": ours}


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
    """One contestant, in this process."""
    described, of_heads = runs.described(), LOSSES[contestant]
    model = models.build(name, device, torch.bfloat16).requires_grad_(False).eval()
    heads = Heads(model, count)
    heads.requires_grad_(True)
    runs.CONTESTANTS[contestant](model)
    data = text.batches(sequence, batch, warmup + timed).to(device)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-4, fused=True)

    def step(ids):
        with torch.no_grad():
            hidden = model.base_model(input_ids=ids).last_hidden_state
        loss = of_heads(heads, hidden, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, ms = train.clocked(step, data)
    everything = {
        x.data_ptr(): x.nbytes for x in (*model.parameters(), *model.buffers(), *heads.parameters())
    }
    learnt = sum(p.nbytes for p in heads.parameters())
    states = sum(
        x.nbytes
        for of in optimizer.state.values()
        for x in of.values()
        if isinstance(x, torch.Tensor)
    )
    median = machine.median(ms[warmup:])
    figures = {
        "tokens_per_s": sequence * batch / median * 1e3, "step_ms": median, "steps_ms": ms[warmup:], "losses": losses,
        "peak_bytes": train.peak_bytes(device), "weights_bytes": sum(everything.values()),
        "learning_bytes": learnt + states,
    }  # fmt: skip
    return {"machine": described, "figures": figures}


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--peer", type=pathlib.Path, help="directory that holds the published liger-kernel"
    )
    p.add_argument("--runs", default=RUNS, help=f"what to train ({RUNS})")
    p.add_argument("--heads", default="3,5", help="how many (3,5)")
    p.add_argument(
        "--contestants", default="", help=f"some of {','.join(LOSSES)} (all; peer with --peer)"
    )
    p.add_argument("--warmup", type=int, default=3, help="steps before the timed ones (3)")
    p.add_argument("--steps", type=int, default=8, help="timed steps (8)")
    p.add_argument(
        "--run-limit", type=float, default=180, help="seconds for one contestant of one run (180)"
    )
    p.add_argument(
        "--limit",
        type=float,
        default=570,
        help="seconds after which no further process is started (570)",
    )
    p.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu tries the program out, no more",
    )
    p.add_argument("--out", help="JSON file (bench/results/medusa.json)")
    p.add_argument("--worker", nargs=9, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.worker:
        return runs.worker(work, args.worker)
    names = [n for n in args.contestants.split(",") if n] or [
        n for n in LOSSES if n != "peer" or args.peer
    ]
    if set(names) - set(LOSSES) or ("peer" in names and args.peer is None):
        known = ",".join(LOSSES)
        raise SystemExit(
            f"bench.medusa: --contestants {args.contestants}: some of {known}, and peer with --peer DIR"
        )
    plan = [
        (*run, int(n)) for run in runs.parsed(args.runs, "medusa") for n in args.heads.split(",")
    ]
    if args.device == "cuda":
        machine.require_gpu()
    end = time.monotonic() + args.limit
    data = {"machine": {"error": "nothing was measured"}, "rows": []}
    for run in plan:
        row = dict(zip(("model", "sequence", "batch", "heads"), run, strict=True), contestants={})
        data["rows"].append(row)
        for name in names:
            result = (
                runs.run_apart("medusa", name, run, args)
                if time.monotonic() < end
                else {"error": "no time left"}
            )
            if "machine" in result:
                version = result["machine"].pop("liger_kernel")
                data |= {"machine": result["machine"]} | (
                    {"peer": version} if name == "peer" else {}
                )
            row["contestants"][name] = result.get("figures", result)
            machine.save("medusa", data, args.out)
            print(report.medusa_line(row, name), flush=True)
    print("\n" + report.medusa(data))


if __name__ == "__main__":
    main()
