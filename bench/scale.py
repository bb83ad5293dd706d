"""Do the same training on 1, 2, ... GPUs: Hugging Face, the published liger-kernel, ours, by FSDP2.

    PYTHONPATH=src python -m bench.scale [--model llama-3-8b] [--gpus 1 2] [--batch 2]
        [--peer DIR] [--resume]
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
from collections.abc import Callable
from unittest import mock

import torch

from . import machine, models, processes
from .long_models import add_adapters
from .longest import Measurements, environment
from .scale_table import NAMES, run_line, scale


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=processes.model_name,
        default="Llama-3-8B",
        help="one of bench.models (llama-3-8b)",
    )
    parser.add_argument("--layers", type=int, help="of them, if not all")
    parser.add_argument(
        "--lora", type=int, default=0, help="train adapters of this rank (all weights)"
    )
    parser.add_argument(
        "--gpus", nargs="+", type=int, default=[1, 2], help="how many, in turn (1 2)"
    )
    parser.add_argument(
        "--plan", nargs="+", type=int, help="count memory for so many GPUs, and measure nothing"
    )
    parser.add_argument("--batch", type=int, default=2, help="sequences of a GPU (2)")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens (4096)")
    parser.add_argument("--checkpointing", action="store_true", help="recompute layers in backward")
    parser.add_argument(
        "--sides", nargs="+", choices=NAMES, help="(huggingface patched; peer with --peer)"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="of a run, the first two not timed (10)"
    )
    processes.add_options(parser, "scale", run_limit=150, limit=420)
    args = parser.parse_args(argv)
    args.sides = args.sides or [side for side in NAMES if side != "peer" or args.peer]
    processes.check(parser, args, positive=("batch", "sequence"))
    if args.steps < 3:
        parser.error("--steps must be 3 or more: two are not timed")
    args.layers = args.layers or models.SIZES[args.model]["num_hidden_layers"]
    return args


# ---- planned memory ----

PLAN_OPTIONS = {  # option of `liger-kernel plan` -> size in bench.models
    "--hidden-size": "hidden_size",
    "--heads": "num_attention_heads",
    "--kv-heads": "num_key_value_heads",
    "--intermediate-size": "intermediate_size",
    "--vocab-size": "vocab_size",
}


def planned(spec: dict) -> dict[str, int]:
    """Return the bytes of one GPU's peak, by side, as `liger-kernel plan` counts them; of Llamas,
    with adapters as here."""
    from liger_kernel.cli import plan

    sizes = models.SIZES[spec["model"]]
    options = {option: sizes[name] for option, name in PLAN_OPTIONS.items()}
    options["--layers"] = spec["layers"]
    options["--gpus"] = spec["gpus"]
    options["--batch"] = spec["batch"]
    options["--sequence"] = spec["sequence"]
    if spec["lora"]:
        options["--lora"] = spec["lora"]
    argv = ["llama-3-8b"]
    for option, value in options.items():
        argv += [option, str(value)]
    if spec["checkpointing"]:
        argv.append("--checkpointing")
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    args = plan.check_arguments(parser.parse_args(argv))
    settings = plan.build.config(args.model, args.config, args.sizes)
    peaks = {}
    with mock.patch.object(plan, "add_adapters", add_adapters):
        for side in ("huggingface", "patched"):
            step = plan.build_step(settings, args, patched=side == "patched")
            peaks[side] = sum(step.peak(args.batch, args.sequence).values())
    return peaks


def add_plans(data: dict, gpu_counts: list[int]) -> None:
    """Add to ``data`` the planned memory of all models that were measured."""
    plans = data.setdefault("plans", [])
    for run in data["runs"]:
        spec = {key: value for key, value in run["spec"].items() if key not in ("gpus", "side")}
        if models.SIZES[spec["model"]]["model_type"] != "llama":
            continue
        for gpus in gpu_counts:
            plan_spec = spec | dict(gpus=gpus)
            if not any(plan["spec"] == plan_spec for plan in plans):
                plans.append(dict(spec=plan_spec, peak_bytes=planned(plan_spec)))


def plan_main(args: argparse.Namespace) -> None:
    path = machine.results_path("scale", args.out)
    if not path.exists():
        raise SystemExit(f"bench.scale: --plan adds to what was measured, and there is no {path}")
    data = json.loads(path.read_text())
    add_plans(data, args.plan)
    machine.save("scale", data, str(path))
    print(scale(data))


# ---- measurements ----


def run_plan(args: argparse.Namespace, measure: Callable[..., dict]) -> None:
    """Measure every side on every number of GPUs."""
    spec = dict(
        case="scale",
        model=args.model,
        layers=args.layers,
        lora=args.lora,
        batch=args.batch,
        sequence=args.sequence,
        checkpointing=args.checkpointing,
        steps=args.steps,
        memory=None,
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
        return plan_main(args)
    if args.device == "cuda":
        machine.require_gpu()
    environment(None)
    Measurements(args, "scale", format_run=run_line).run_all(run_plan, scale)


if __name__ == "__main__":
    main()
