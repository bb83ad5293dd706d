"""Does ours train like Hugging Face? Losses of a model patched and not, against the spread of the
unpatched one.

    PYTHONPATH=src python -m bench.parity [--model Llama-3.2-1B] [--steps 50] [--resume]

bf16 training amplifies any rounding, so two runs that mean the same drift apart. How far is
measured: Hugging Face runs from the same weights, in which one bf16 ulp was added to a few of them,
by seed. Ours lies within the noise if its losses are no further from Hugging Face's, at most and on
average, than those runs are from each other.

The losses of every step of every run are in the results. More than 100 steps are a long run: its
results are a file of their own (curves.json), of which `bench.report` makes docs/parity.md.
``--resume`` goes on with a file that lacks runs."""

from __future__ import annotations

import argparse
import gc
import itertools
import time

import torch

from . import curves, machine, models, runs, text, train

LONG = 100  # steps that a short run has at most
SETTINGS = "model", "steps", "sequence", "batch", "lr"


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


def compared(found: dict[str, list[float]]) -> dict:
    """Every pair, and whether ours lies within the noise: None while runs are missing that tell."""
    theirs = {name: curve for name, curve in found.items() if name != curves.OURS}
    pairs = [
        difference(f"{a} – {b}", theirs[a], theirs[b]) for a, b in itertools.combinations(theirs, 2)
    ]
    if curves.OURS not in found or not pairs:
        return {"pairs": pairs, "within_noise": None}
    own = difference(f"{curves.OURS} – {curves.THEIRS}", found[curves.OURS], found[curves.THEIRS])
    # written so that a loss that is no number is outside
    within = all(own[key] <= max(pair[key] for pair in pairs) for key in ("largest", "mean"))
    return {"pairs": [own, *pairs], "within_noise": within}


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", default="Llama-3.2-1B", choices=models.SIZES)
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--sequence", type=int, default=1024)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--seeds", type=int, default=3, help="nudged Hugging Face runs (3)")
    p.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu tries the program out, no more",
    )
    p.add_argument("--resume", action="store_true", help="keep the runs that the JSON file has")
    p.add_argument(
        "--limit",
        type=float,
        default=570,
        help="seconds in which no run is begun that would not end (570)",
    )
    p.add_argument(
        "--out", help="JSON file (bench/results/parity.json; curves.json for more than 100 steps)"
    )
    args = p.parse_args(argv)
    if args.device == "cuda":
        machine.require_gpu()
    kind = "curves" if args.steps > LONG else "parity"
    data = {"machine": machine.describe()} | {key: getattr(args, key) for key in SETTINGS}
    earlier = machine.resumed(kind, data, args.out) if args.resume else None
    found = earlier["curves"] if earlier else {}
    wanted = {"Hugging Face": {}}
    wanted |= {
        f"Hugging Face, nudged ({seed})": dict(seed=seed) for seed in range(1, args.seeds + 1)
    }
    wanted |= {"ours": dict(patch=runs.ours)}

    begun, longest = time.monotonic(), 0.0
    for name, how in wanted.items():
        if name in found:
            continue
        before = time.monotonic()
        if before - begun + longest > args.limit:
            raise SystemExit(f"bench.parity: no time left; --resume goes on with {name}")
        found[name] = losses(args, **how)
        longest = max(longest, time.monotonic() - before)
        data |= {"curves": found} | compared(found)
        machine.save(kind, data, args.out)
    data |= {"curves": found} | compared(found)
    print("\n" + curves.pairs(data))
    raise SystemExit(0 if data["within_noise"] else 1)


if __name__ == "__main__":
    main()
