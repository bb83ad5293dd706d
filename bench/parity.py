"""Train a model patched and not, and compare the losses against the spread of the unpatched one.

    PYTHONPATH=src python -m bench.parity [--model Llama-3.2-1B] [--steps 50] [--resume]

bf16 training amplifies any rounding, so two runs that mean the same drift apart. How far is
measured: Hugging Face runs from the same weights, in which one bf16 ulp was added to a few of them,
by seed. Ours lies within the spread if it is no farther from the Hugging Face runs, on average and
at most, than the farthest of these is from the others (`curves.within_spread`).

The losses of every step of every run are in the results. More than 100 steps are a long run: its
results are a file of their own (curves.json; hybrid_curves.json for a hybrid model), of which
`bench.report` makes docs/parity.md and the table in docs/models.md.
``--resume`` goes on with a file that lacks runs."""

from __future__ import annotations

import argparse
import gc
import time

import torch

from . import curves, machine, models, runs, text, train

MAX_SHORT_STEPS = 100  # more steps are a long run
SETTINGS = "model", "steps", "sequence", "batch", "lr"


def nudge(model, seed: int, count: int = 16) -> None:
    """Add one bf16 ulp to ``count`` weights of every parameter in bf16."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dtype != torch.bfloat16:
            continue
        indices = torch.randint(parameter.numel(), (count,), generator=generator)
        indices = indices.to(parameter.device)
        bits = parameter.data.view(-1).view(torch.int16)
        bits[indices] = bits[indices] + 1


def losses(args, seed: int = 0, patch=runs.eager) -> list[float]:
    """Train for ``args.steps`` steps, and return the loss of each. Seed 0 nudges no weight."""
    model = models.build(args.model, args.device, torch.bfloat16)
    if seed:
        nudge(model, seed)
    forward, _ = patch(model)
    data = text.batches(args.sequence, args.batch, args.steps).to(args.device)
    curve, ms = train.steps(model, forward, data, args.lr)
    print(
        f"{patch.__name__}, seed {seed}: loss {curve[0]:.4f} → {curve[-1]:.4f}, "
        f"{machine.median(ms):.1f} ms a step",
        flush=True,
    )
    del model, forward
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return curve


def plan(seeds: int) -> dict[str, dict]:
    """Return the runs by name, with their arguments of `losses`."""
    arguments = {curves.HUGGING_FACE: {}}
    for seed in range(1, seeds + 1):
        arguments[f"{curves.HUGGING_FACE}, nudged ({seed})"] = dict(seed=seed)
    arguments[curves.OURS] = dict(patch=runs.ours)
    return arguments


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Llama-3.2-1B", choices=models.SIZES)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, default=3, help="nudged Hugging Face runs (3)")
    runs.add_device_option(parser)
    parser.add_argument(
        "--resume", action="store_true", help="keep the runs that the JSON file has"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=570,
        help="seconds in which no run is begun that would not end (570)",
    )
    parser.add_argument("--out", help="JSON file (in bench/results, named by the kind)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.device == "cuda":
        machine.require_gpu()
    kind = "parity"
    if args.steps > MAX_SHORT_STEPS:
        kind = "hybrid_curves" if args.model in models.HYBRID else "curves"
    data = {"machine": machine.describe()} | {key: getattr(args, key) for key in SETTINGS}
    earlier = machine.resumed(kind, data, args.out) if args.resume else None
    data["curves"] = earlier["curves"] if earlier else {}

    start = time.monotonic()
    longest_run = 0.0
    for name, arguments in plan(args.seeds).items():
        if name in data["curves"]:
            continue
        run_start = time.monotonic()
        if run_start - start + longest_run > args.limit:
            raise SystemExit(f"bench.parity: no time left; --resume goes on with {name}")
        data["curves"][name] = losses(args, **arguments)
        longest_run = max(longest_run, time.monotonic() - run_start)
        machine.save(kind, data, args.out)
    print("\n" + curves.spread(data))
    raise SystemExit(0 if curves.within_spread(data["curves"]) else 1)


if __name__ == "__main__":
    main()
