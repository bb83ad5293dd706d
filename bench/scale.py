"""The same training on 1, 2, ... GPUs: Hugging Face, the published liger-kernel, ours, by FSDP2.

    PYTHONPATH=src python -m bench.scale [--model llama-3-8b] [--gpus 1 2] [--batch 2] [--peer DIR]
    [--resume]
    PYTHONPATH=src python -m bench.scale --model llama-3-70b --lora 16 --checkpointing --gpus 2
    [--layers 40] [--resume]
    PYTHONPATH=src python -m bench.scale --plan 8 16 64

Random weights and tokens in bf16, AdamW with its states in the weights' dtype, the same batch for
each GPU however many there are; gradient checkpointing with ``--checkpointing``. One GPU's model is
not wrapped. ``--lora RANK`` trains PEFT's adapters alone, in bf16. Each measurement is a process
group of its own (`bench.longest`); results are saved after each, and ``--resume`` goes on with what
the file lacks.

``--plan`` measures nothing, and needs no GPU: to what the file has it adds what `liger-kernel plan`
counts for other numbers of GPUs."""

from __future__ import annotations

import argparse
import json
import pathlib
from unittest import mock

import torch

from . import finetune, machine, models
from .longest import Measuring, adapted, environment
from .scale_table import NAMES, scale, told


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--model",
        type=finetune.model_name,
        default="Llama-3-8B",
        help="one of bench.models (llama-3-8b)",
    )
    p.add_argument("--layers", type=int, help="of them, if not all")
    p.add_argument("--lora", type=int, default=0, help="train adapters of this rank (all weights)")
    p.add_argument("--gpus", nargs="+", type=int, default=[1, 2], help="how many, in turn (1 2)")
    p.add_argument(
        "--plan", nargs="+", type=int, help="count memory for so many GPUs, and measure nothing"
    )
    p.add_argument("--batch", type=int, default=2, help="sequences of a GPU (2)")
    p.add_argument("--sequence", type=int, default=4096, help="tokens (4096)")
    p.add_argument("--checkpointing", action="store_true", help="recompute layers in backward")
    p.add_argument(
        "--sides", nargs="+", choices=NAMES, help="(huggingface patched; peer with --peer)"
    )
    p.add_argument("--steps", type=int, default=10, help="of a run, the first two not timed (10)")
    finetune.of_processes(p, "scale", run_limit=150, limit=420)
    args = p.parse_args(argv)
    args.sides = args.sides or [side for side in NAMES if side != "peer" or args.peer]
    finetune.check(p, args, positive=("batch", "sequence"))
    if args.steps < 3:
        p.error("--steps must be 3 or more: two are not timed")
    args.layers = args.layers or models.SIZES[args.model]["num_hidden_layers"]
    return args


SIZES = {  # option of `liger-kernel plan` -> of bench.models
    "--hidden-size": "hidden_size", "--heads": "num_attention_heads", "--kv-heads": "num_key_value_heads",
    "--intermediate-size": "intermediate_size", "--vocab-size": "vocab_size",
}  # fmt: skip


def planned(spec: dict) -> dict[str, int]:
    """Bytes of one GPU's peak, by side, as `liger-kernel plan` counts them; of Llamas, with
    adapters as here."""
    from liger_kernel.cli import plan

    given = {option: models.SIZES[spec["model"]][name] for option, name in SIZES.items()}
    given |= {"--layers": spec["layers"], "--gpus": spec["gpus"], "--batch": spec["batch"]}
    given |= {"--sequence": spec["sequence"]} | ({"--lora": spec["lora"]} if spec["lora"] else {})
    words = ["llama-3-8b", *(str(word) for pair in given.items() for word in pair)]
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    args = plan.checked(parser.parse_args(words + ["--checkpointing"] * spec["checkpointing"]))
    settings = plan.build.config(args.model, args.config, args.sizes)
    with mock.patch.object(plan, "with_adapters", adapted):
        steps = {
            side: plan.prepared(settings, args, patched=side == "patched")
            for side in ("huggingface", "patched")
        }
    return {
        side: sum(step.peak(args.batch, args.sequence).values()) for side, step in steps.items()
    }


def plans(data: dict, numbers: list[int]) -> None:
    """Into ``data``, for all that was measured."""
    known = data.setdefault("plans", [])
    for run in data["runs"]:
        spec = {name: value for name, value in run["spec"].items() if name not in ("gpus", "side")}
        for gpus in numbers if models.SIZES[spec["model"]]["model_type"] == "llama" else ():
            place = spec | dict(gpus=gpus)
            if not any(each["spec"] == place for each in known):
                known.append(dict(spec=place, peak_bytes=planned(place)))


def add_plans(args) -> None:
    path = pathlib.Path(args.out) if args.out else machine.RESULTS / "scale.json"
    if not path.exists():
        raise SystemExit(f"bench.scale: --plan adds to what was measured, and there is no {path}")
    data = json.loads(path.read_text())
    plans(data, args.plan)
    machine.save("scale", data, str(path))
    print(scale(data))


def measured(args, measure) -> None:
    spec = dict(
        case="scale", model=args.model, layers=args.layers, lora=args.lora, batch=args.batch
    )
    spec |= dict(
        sequence=args.sequence, checkpointing=args.checkpointing, steps=args.steps, memory=None
    )
    for gpus in args.gpus:
        if args.device == "cuda" and gpus > torch.cuda.device_count():
            print(f"{gpus} GPUs: there are {torch.cuda.device_count()}", flush=True)
            continue
        for side in args.sides:
            measure(**spec, gpus=gpus, side=side)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.plan:
        return add_plans(args)
    if args.device == "cuda":
        machine.require_gpu()
    environment(None)
    Measuring(args, "scale", told=told).all(measured, scale)


if __name__ == "__main__":
    main()
