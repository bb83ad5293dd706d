"""Does ours train like Hugging Face? Losses of a model patched and not, against the spread of the unpatched one.

    PYTHONPATH=src python -m bench.parity [--model Llama-3.2-1B] [--steps 50]

bf16 training amplifies any rounding, so two runs that mean the same drift apart. How far is measured: Hugging Face runs
from the same weights, in which one bf16 ulp was added to a few of them, by seed. Ours lies within the noise if its
losses are no further from Hugging Face's than those runs are from each other.
"""

from __future__ import annotations

import argparse
import gc
import itertools

import torch

from . import machine, models, report, runs, text, train


def nudge(model, seed: int, count: int = 16) -> None:
    """Add one ulp to ``count`` weights of every parameter."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        at = torch.randint(p.numel(), (count,), generator=generator).to(p.device)
        bits = p.data.view(-1).view(torch.int16)
        bits[at] = bits[at] + 1


def losses(args, seed: int = 0, patch=runs.eager) -> list[float]:
    model = models.build(args.model, args.device, torch.bfloat16)
    if seed:
        nudge(model, seed)
    called, _ = patch(model)
    data = text.batches(args.sequence, args.batch, args.steps).to(args.device)
    curve, ms = train.steps(model, called, data, args.lr)
    print(
        f"{patch.__name__}, seed {seed}: loss {curve[0]:.4f} → {curve[-1]:.4f}, {machine.median(ms):.1f} ms a step",
        flush=True,
    )
    del model, called
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return curve


def difference(pair: str, a: list[float], b: list[float]) -> dict:
    apart = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return {"pair": pair, "largest": max(apart), "mean": sum(apart) / len(apart)}


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="Llama-3.2-1B", choices=models.SIZES)
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--sequence", type=int, default=1024)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--seeds", type=int, default=3, help="nudged Hugging Face runs (3)")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the program out, no more")
    p.add_argument("--out", help="JSON file (bench/results/parity.json)")
    args = p.parse_args(argv)
    if args.device == "cuda":
        machine.require_gpu()

    curves = {"Hugging Face": losses(args)}
    for seed in range(1, args.seeds + 1):
        curves[f"Hugging Face, nudged ({seed})"] = losses(args, seed)
    spread = [difference(f"{a} – {b}", curves[a], curves[b]) for a, b in itertools.combinations(curves, 2)]
    curves["ours"] = losses(args, patch=runs.ours)
    own = difference("ours – Hugging Face", curves["ours"], curves["Hugging Face"])
    within = own["largest"] <= max(d["largest"] for d in spread)
    data = {"machine": machine.describe(), "curves": curves, "pairs": [own, *spread], "within_noise": within}
    data |= {k: getattr(args, k) for k in ("model", "steps", "sequence", "batch", "lr")}
    machine.save("parity", data, args.out)
    print("\n" + report.parity(data))
    raise SystemExit(0 if within else 1)


if __name__ == "__main__":
    main()
