"""Do the same training on 1, 2, ... GPUs: Hugging Face, the published liger-kernel, ours, by FSDP2.

    PYTHONPATH=src python -m bench.scale [--trainings 8b 70b-lora] [--gpus 1 2 4 8] [--peer DIR]
        [--resume]
    PYTHONPATH=src python -m bench.scale --model llama-3-70b --lora 16 --checkpointing --gpus 2
        [--layers 40] [--resume]
    PYTHONPATH=src python -m bench.scale --plan 8 16 64
    PYTHONPATH=src python -m bench.scale --device cpu --sequence 64 --gpus 1 2 4

Without ``--model`` it does all of `TRAININGS`, on 1, 2, 4 and 8 GPUs as far as the machine has
them. Random weights and tokens in bf16, AdamW with its states in the weights' dtype (or torchao's
in 8 bits), the same batch for each GPU however many there are; gradient checkpointing with
``--checkpointing``. One GPU's model is not wrapped. ``--lora RANK`` trains PEFT's adapters alone,
in bf16. ``--expert-parallel`` spreads experts over the GPUs, for our side alone (`bench.spread`);
with ``--expert-parallel all-gather`` each of up to 4 GPUs gets the tokens of all.

Each measurement is a process group of its own (`bench.longest`), which is ended after
``--run-limit``; none begins after ``--limit``. Results are saved after each, and ``--resume`` goes
on with what the file lacks: first with what was never tried.

``--device cpu`` trains small models of the same families in gloo ranks, to try the program.

``--plan`` measures nothing, and needs no GPU: to what the file has it adds what `liger-kernel plan`
counts for other numbers of GPUs."""

from __future__ import annotations

import argparse
import json
from unittest import mock

import torch

from . import machine, models, processes
from .long_models import add_adapters
from .longest import Measurements, environment
from .scale_table import NAMES, place, run_line, scale

GPU_COUNTS = 1, 2, 4, 8
TRAININGS = {  # name -> model, numbers of GPUs, what differs from the options' defaults
    "8b": dict(model="Llama-3-8B", gpus=GPU_COUNTS),
    "70b-lora": dict(model="Llama-3-70B", gpus=(2, 4, 8), lora=16, checkpointing=True),
    "70b": dict(
        model="Llama-3-70B", gpus=(4, 8), optimizer="adamw8bit", checkpointing=True, batch=1
    ),
    "30b-a3b-8bit": dict(
        model="Qwen3-30B-A3B", gpus=(2,), optimizer="adamw8bit", checkpointing=True
    ),
    "30b-a3b": dict(model="Qwen3-30B-A3B", gpus=(4, 8), checkpointing=True),
    "30b-a3b-experts": dict(
        model="Qwen3-30B-A3B", gpus=(4, 8), checkpointing=True, parallel="experts"
    ),
    "30b-a3b-gathered": dict(
        model="Qwen3-30B-A3B", gpus=(4,), checkpointing=True, parallel="gathered experts"
    ),
}
EXPERT_PARALLEL = {"all-to-all": "experts", "all-gather": "gathered experts"}
TINY = {"llama": "tiny", "qwen3_moe": "tiny-moe"}  # of a CPU, by model type


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trainings", nargs="+", choices=TRAININGS, default=[*TRAININGS], help="which (all)"
    )
    parser.add_argument(
        "--model", type=processes.model_name, help="one of bench.models, in place of --trainings"
    )
    parser.add_argument("--layers", type=int, help="of them, if not all")
    parser.add_argument(
        "--lora", type=int, default=0, help="train adapters of this rank (all weights)"
    )
    parser.add_argument(
        "--optimizer", choices=("adamw", "adamw8bit"), default="adamw", help="(adamw)"
    )
    parser.add_argument(
        "--expert-parallel",
        nargs="?",
        const="all-to-all",
        choices=EXPERT_PARALLEL,
        help="of --model, and our side alone; how tokens are sent (all-to-all)",
    )
    parser.add_argument(
        "--gpus", nargs="+", type=int, help="how many, in turn (1 2 4 8, if there are so many)"
    )
    parser.add_argument(
        "--plan", nargs="+", type=int, help="count memory for so many GPUs, and measure nothing"
    )
    parser.add_argument("--batch", type=int, help="sequences of a GPU (2; 70b: 1)")
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
    processes.check(parser, args, positive=("sequence",))
    if args.steps < 3:
        parser.error("--steps must be 3 or more: two are not timed")
    if args.expert_parallel and args.model is None:
        parser.error("--expert-parallel needs --model")
    return args


# ---- planned memory ----


def planned(spec: dict) -> dict[str, int]:
    """Return the bytes of one GPU's peak, by side, as `liger-kernel plan` counts them, with
    adapters as here; the model is one of its presets."""
    from liger_kernel.cli import plan

    argv = [spec["model"].lower()]
    for name in ("layers", "gpus", "batch", "sequence", "lora"):
        if spec[name]:
            argv += [f"--{name}", str(spec[name])]
    if spec["checkpointing"]:
        argv.append("--checkpointing")
    argv += ["--optimizer", spec.get("optimizer", "adamw")]
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
    """Add to ``data`` the planned memory of the trainings that were measured and that
    `liger-kernel plan` knows."""
    from liger_kernel.cli.presets import PRESETS

    plans = data.setdefault("plans", [])
    for run in data["runs"]:
        spec = {key: value for key, value in run["spec"].items() if key not in ("gpus", "side")}
        if spec["model"].lower() not in PRESETS or "parallel" in spec:
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


def trainings(args: argparse.Namespace) -> list[dict]:
    """Return the entries of `TRAININGS` that are asked for, or one for ``--model``."""
    if args.model is None:
        return [TRAININGS[name] for name in args.trainings]
    training = dict(
        model=args.model,
        gpus=GPU_COUNTS,
        lora=args.lora,
        checkpointing=args.checkpointing,
        optimizer=args.optimizer,
    )
    if args.expert_parallel:
        training["parallel"] = EXPERT_PARALLEL[args.expert_parallel]
    return [training]


def training_spec(training: dict, args: argparse.Namespace) -> dict:
    """Return the spec of a training's runs, without the number of GPUs and the side.

    What most trainings do not have is left out, so that runs of older files are found."""
    model = training["model"]
    if args.device == "cpu":
        model = TINY[models.SIZES[model]["model_type"]]
    spec = dict(
        case="scale",
        model=model,
        layers=args.layers or models.SIZES[model]["num_hidden_layers"],
        lora=training.get("lora", 0),
        batch=args.batch or training.get("batch", 2),
        sequence=args.sequence,
        checkpointing=training.get("checkpointing", False),
        steps=args.steps,
        memory=None,
    )
    for name, usual in (("optimizer", "adamw"), ("parallel", None)):
        if training.get(name, usual) != usual:
            spec[name] = training[name]
    return spec


def planned_runs(args: argparse.Namespace, num_gpus: int) -> list[dict]:
    """Return the spec of every run on a machine with so many GPUs."""
    from liger_kernel.ops.moe.expert_parallel import MAX_RANKS_OF_GATHER

    specs = []
    for training in trainings(args):
        spec = training_spec(training, args)
        is_spread = spec.get("parallel") in EXPERT_PARALLEL.values()
        is_gathered = spec.get("parallel") == "gathered experts"
        for gpus in args.gpus or training["gpus"]:
            reason = None
            if gpus > num_gpus:
                reason = f"there are {num_gpus}"
            elif is_spread and gpus == 1:
                reason = "experts are spread over several"
            elif is_gathered and gpus > MAX_RANKS_OF_GATHER:
                reason = f"tokens are gathered by up to {MAX_RANKS_OF_GATHER}"
            if reason is not None:
                print(f"{place(spec)}: not on {gpus} GPUs, {reason}", flush=True)
                continue
            sides = [side for side in args.sides if side == "patched" or not is_spread]
            specs += [spec | dict(gpus=gpus, side=side) for side in sides]
    return specs


def run_plan(args: argparse.Namespace, measure: Measurements) -> None:
    """Measure all runs: first those that were never tried, so that one that fails again and again
    does not take the others' time."""
    num_gpus = torch.cuda.device_count() if args.device == "cuda" else max(GPU_COUNTS)
    specs = planned_runs(args, num_gpus)
    for spec in sorted(specs, key=lambda spec: measure.find(spec) is not None):
        measure(**spec)


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
