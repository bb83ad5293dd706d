"""Say what memory training a model takes: without a GPU, without its weights.

Forward and backward run without data, and what they would hold is counted. The figures are those of
a step whose optimizer has its states already, as torch.cuda.max_memory_allocated() tells them; the
CUDA context is not in them."""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import json
import re
import sys
import time
import warnings

from liger_kernel._version import __version__
from liger_kernel.cli import build, tensor_parallel
from liger_kernel.cli._child import BadInput, one_line
from liger_kernel.cli.layout import wrapped
from liger_kernel.cli.options import _option, _whole
from liger_kernel.cli.presets import PRESETS, SIZES

PERIOD = 10.0  # seconds between lines of progress, where stderr is no terminal
FREE = (
    0.05  # of the GPU's memory: for the CUDA context, NCCL, and gaps between the allocator's blocks
)
UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}
STRATEGIES = "none", "ddp", "fsdp2", "zero1", "zero2", "zero3", "tp"
WEIGHTS = "bf16", "fp32", "4bit", "8bit"
# States of an element: two moments in the weight's dtype; in 8 bits two bytes, and two fp32 scales
# for each 256.
OPTIMIZERS = {"adamw": None, "adamw8bit": 2 + 2 * 4 / 256, "sgd": 0}
# Bytes of an element of a quantised linear layer: 4 bits and an fp32 scale for each 64; 8 bits.
QUANTISED = {"4bit": 0.5 + 4 / 64, "8bit": 1.0}
# DeepSpeed's defaults, in elements: gradients wait in two buckets of so many, gathered weights are
# so many at most.
BUCKET, LIVE, SUB_GROUP = 2 * 5 * 10**8, 10**9, 10**9
SEQUENCE, SEQUENCES = 4096, 256  # the longest one is found to a multiple of the second
SIDES = {"huggingface": "Hugging Face", "patched": "patched"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        help=f"a family for a tiny model (llama), a preset ({', '.join(PRESETS)}), the path of a saved model, or a hub "
        "id, of which only the config is read",
    )
    add(
        "--config",
        help="instead: a Hugging Face config as JSON, with its model_type",
        metavar="FILE",
    )
    for size, name in SIZES.items():
        help = f"{name}, of a family or preset"
        add(_option(size), help=help, type=_whole(1), metavar="N", default=argparse.SUPPRESS)
    add(
        "--gpus",
        help="how many GPUs train one model (default 1)",
        type=_whole(1),
        metavar="N",
        default=1,
    )
    add(
        "--gpu-memory",
        help="of one, such as 80GB or 79GiB (default 80GB)",
        type=_bytes,
        metavar="G",
        default="80GB",
    )
    add(
        "--sequence",
        help=f"tokens in a sequence (default {SEQUENCE}, or as many as the model has positions for)",
        type=_whole(2),
        metavar="S",
    )
    add(
        "--batch",
        help="sequences in a micro-batch of one GPU (default 1)",
        type=_whole(1),
        metavar="N",
        default=1,
    )
    add(
        "--accumulation",
        help="micro-batches in a step: the gradients of the first stay while the others are computed (default 1)",
        type=_whole(1),
        metavar="N",
        default=1,
    )
    add(
        "--strategy",
        help=f"how GPUs share the work: {', '.join(STRATEGIES)} (default fsdp2, of one GPU none)",
        choices=STRATEGIES,
        metavar="NAME",
    )
    add(
        "--lora",
        help="train adapters of this rank on all linear layers",
        type=_whole(1),
        metavar="RANK",
    )
    add(
        "--weights",
        help=f"what the model is loaded in: {', '.join(WEIGHTS)}, the last two with --lora (default bf16)",
        choices=WEIGHTS,
        metavar="NAME",
    )
    add(
        "--optimizer",
        help=f"{', '.join(OPTIMIZERS)} (default adamw)",
        choices=OPTIMIZERS,
        default="adamw",
        metavar="NAME",
    )
    add(
        "--mixed-precision",
        help="fp32 weights, gradients and moments, computed with in bf16: by autocast, or gathered in bf16 (fsdp2); "
        "ZeRO has fp32 weights beside the bf16 ones in any case",
        action="store_true",
    )
    add(
        "--checkpointing",
        help="recompute layers in backward",
        action=argparse.BooleanOptionalAction,
        default=False,
    )
    add(
        "--offload",
        help="of the patched model, keep the layers' checkpoints in the host's memory, and compute MLPs in tiles",
        action="store_true",
    )
    add(
        "--patch",
        help="with or without the patch alone (default: both)",
        action=argparse.BooleanOptionalAction,
        default=None,
    )
    add(
        "--attention",
        help="sdpa or eager; default: what the model prefers",
        choices=("sdpa", "eager"),
        metavar="NAME",
    )
    add("--json", help="print JSON, in bytes", action="store_true")


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([GM]i?B)", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(
            f"give a number and {', '.join(UNITS)}, such as 80GB, not {text}"
        )
    return int(float(found[1]) * UNITS[found[2]])


def run(args: argparse.Namespace) -> int:
    result = plan(checked(args))
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with their defaults. Raises `BadInput` for what does not go together."""
    args.sizes = {size: getattr(args, size) for size in SIZES if hasattr(args, size)}
    build.check(args.model, args.config, args.sizes)
    if importlib.util.find_spec("transformers") is None:
        raise BadInput(
            "plan runs models of transformers, which is missing: pip install 'liger-kernel[transformers]'"
        )
    args.strategy = args.strategy or ("none" if args.gpus == 1 else "fsdp2")
    if args.gpus > 1 and args.strategy == "none":
        raise BadInput(
            f"--strategy none is for one GPU, and --gpus is {args.gpus}: take another one"
        )
    if args.mixed_precision and args.weights not in (None, "fp32"):
        raise BadInput(
            f"--mixed-precision keeps fp32 weights, and --weights is {args.weights}: leave one of them out"
        )
    zero = args.strategy.startswith("zero")
    args.weights = args.weights or ("fp32" if args.mixed_precision and not zero else "bf16")
    if zero and args.weights == "fp32":
        raise BadInput(
            f"--strategy {args.strategy} computes with bf16 weights and keeps fp32 ones: --weights bf16"
        )
    if args.weights in QUANTISED:
        if not args.lora:
            raise BadInput(f"--weights {args.weights} cannot be trained: train adapters, --lora 16")
        if args.strategy not in ("none", "ddp", "fsdp2"):
            raise BadInput(
                f"--weights {args.weights} is known with none, ddp and fsdp2, not with {args.strategy}"
            )
    if args.lora and args.strategy == "tp":
        raise BadInput("--strategy tp is known without adapters: leave --lora out, or take fsdp2")
    if args.lora and importlib.util.find_spec("peft") is None:
        raise BadInput("--lora makes the adapters with PEFT, which is missing: pip install peft")
    if args.offload and args.patch is False:
        raise BadInput("--offload is the patch's, and --no-patch leaves that out")
    if args.offload:
        args.checkpointing = True
    return args


def plan(args: argparse.Namespace) -> dict:
    """What is found, as `--json` prints it."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    settings = build.config(args.model, args.config, args.sizes)
    limit = positions(settings)
    if args.sequence is None:
        args.sequence = min(SEQUENCE, limit or SEQUENCE)
    sides = [
        side
        for side, patched in (("huggingface", False), ("patched", True))
        if args.patch in (None, patched)
    ]
    result = {
        "liger_kernel": __version__,
        "transformers": transformers.__version__,
        "model": args.model or args.config,
        "asked": {name: value for name, value in vars(args).items() if name in ASKED},
        "usable": int(args.gpu_memory * (1 - FREE)),
        "sides": {},
    }
    with _Progress() as progress:
        for side in sides:
            progress.side = SIDES[side]
            progress("building the model")
            step = prepared(settings, args, patched=side == "patched")
            result["sides"][side] = found(step, args, result["usable"], limit, progress)
    if args.strategy == "tp":
        step = prepared(
            settings, argparse.Namespace(**vars(args) | {"strategy": "ddp"}), patched=False
        )
    parameters = [p for unit in step.units for p in unit]
    result["parameters"] = sum(p.numel() for p in parameters)
    result["trained"] = sum(p.numel() for p in parameters if p.requires_grad)
    result["positions"] = limit
    return result


def positions(settings) -> int | None:
    """How many positions the model has by its config."""
    text = settings.get_text_config()
    names = "max_position_embeddings", "max_target_positions"
    return next((getattr(text, name) for name in names if getattr(text, name, None)), None)


ASKED = (
    "gpus", "gpu_memory", "sequence", "batch", "accumulation", "strategy", "lora", "weights", "optimizer",
    "mixed_precision", "checkpointing", "offload",
)  # fmt: skip


def found(step, args, usable: int, limit: int | None, progress) -> dict:
    """Find the peak of what was asked for, and the largest that fits.

    ``limit`` is how many positions the model has. It may refuse longer sequences.
    """
    from liger_kernel.cli.memory import Unplannable

    name = args.model or args.config

    @functools.cache
    def peak(batch: int, sequence: int) -> dict[str, int]:
        progress(f"{batch:,} x {sequence:,} tokens")
        return step.peak(batch, sequence)

    def total(batch, sequence):
        return sum(peak(batch, sequence).values())

    def longest(guess, **bound):
        def need(n):
            return total(1, n * SEQUENCES)

        return SEQUENCES * largest(need, usable, guess // SEQUENCES, 0.01, **bound)

    try:
        fits = total(args.batch, args.sequence) <= usable
        batch = largest(lambda n: total(n, args.sequence), usable, args.batch)
        try:
            sequence = longest(max(batch, 1) * args.sequence)
        except Unplannable:
            if not limit:
                raise
            if total(1, limit) <= usable:
                sequence = limit
            else:
                sequence = longest(limit, most=limit // SEQUENCES)
    except Unplannable as problem:
        if limit and args.sequence > limit:
            raise BadInput(
                f"{name}: it has {limit:,} positions, and --sequence is {args.sequence:,}: take at most {limit}"
            ) from problem
        raise BadInput(
            f"{name}: it cannot be run without data: {one_line(problem)}. `liger-kernel compare` measures a training"
        ) from problem
    return {
        "peak": total(args.batch, args.sequence),
        "parts": peak(args.batch, args.sequence),
        "fits": fits,
        "largest_batch": batch,
        "longest_sequence": sequence,
    }


class _Progress:
    """Say on stderr what is run of which ``side``: in one line of a terminal, elsewhere every
    `PERIOD` seconds."""

    def __init__(self):
        self.side = ""
        self.said = time.monotonic()
        self.line = sys.stderr.isatty()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._clear()

    def _clear(self):
        if self.line:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __call__(self, text: str) -> None:
        text = f"{self.side}: {text}"
        if self.line:
            self._clear()
            print(text, end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.said >= PERIOD:
            self.said = time.monotonic()
            print(text, file=sys.stderr, flush=True)


def largest(need, limit: int, guess: int = 1, within: float = 0.0, most: int = 2**14) -> int:
    """The largest n for which ``need(n)``, which grows with n, is within the limit; 0 if none is.
    One that is larger by the fraction ``within``, and by 1 or more, is not.

    By turns, n is where a straight line meets the limit, which is nearly it; beside that; and in
    the middle."""
    known, low, high, turn = {}, 0, most + 1, 0
    guess = min(max(guess, 1), most)
    while high - low > (step := max(1, int(low * within))):
        known[guess] = need(guess)
        fits = known[guess] <= limit
        low, high = (guess, high) if fits else (low, guess)
        if low not in known:
            guess = high // 2
        elif len(known) == 1:
            guess = low + low // 4 + 1
        else:
            a, b = (low, high) if high in known else sorted(known)[-2:]
            line = a + (limit - known[a]) * (b - a) // max(known[b] - known[a], 1)
            beside = low + step if fits else high - step
            if high in known:
                guess = (line, beside, (low + high) // 2)[turn % 3]
            else:
                guess = min((line, beside, 4 * low)[turn % 3], 4 * low)
            turn += 1
        guess = min(max(guess, low + 1), high - 1)
    return low


# ---- a model, and how GPUs share it ----


def prepared(settings, args, patched: bool):
    """The `memory.Step` of these arguments."""
    import torch
    from transformers import AutoModelForCausalLM

    from liger_kernel.cli import memory

    width = 4 if args.weights == "fp32" else 2
    by_autocast = args.mixed_precision and args.strategy in ("none", "ddp", "tp")
    in_bf16 = width == 2 or args.mixed_precision and not by_autocast
    settings, share = (
        tensor_parallel.of_one_rank(settings, args) if args.strategy == "tp" else (settings, None)
    )
    try:
        with torch.device("meta"):
            how = dict(
                dtype=torch.bfloat16 if in_bf16 else torch.float32,
                attn_implementation=args.attention,
            )
            model = AutoModelForCausalLM.from_config(copy.deepcopy(settings), **how).train()
            if share is not None:
                share(model, patched)
            quantised = linear_weights(model) if args.weights in QUANTISED else []
            if args.lora:
                model = with_adapters(model, args.lora)
            if args.checkpointing:
                model.gradient_checkpointing_enable()
    except Exception as problem:  # anything can be wrong with a config
        why = one_line(problem) + build.remedy(args.model)
        raise BadInput(f"{args.model or args.config}: {why}") from problem
    if patched:
        from liger_kernel.transformers import apply_liger_kernel

        apply_liger_kernel(model, long_context=args.offload)
    units = units_of(model)
    step = memory.Step(
        model, units, {}, sharding(args), accumulates=args.accumulation > 1, autocast=by_autocast
    )
    step.offload = args.offload and patched
    step.quantised = {p: QUANTISED[args.weights] for p in quantised}
    hold(step, args)
    return step


def sharding(args):
    from liger_kernel.cli.memory import Sharding

    fp32 = args.weights == "fp32"
    if args.strategy == "fsdp2":
        compute = 2 if args.mixed_precision or not fp32 else 4
        kept = 4 if fp32 else None
        return Sharding(
            args.gpus,
            gathers=True,
            sums="by unit",
            compute=compute,
            reduced=4 if fp32 else 2,
            kept=kept,
        )
    if args.strategy in ("zero2", "zero3"):
        live = 2 * LIVE if args.strategy == "zero3" else None
        return Sharding(args.gpus, gathers=live is not None, sums="in buckets", kept=2, live=live)
    return Sharding(args.gpus)


def hold(step, args) -> None:
    """What the step holds all the time: weights, the optimizer's states, buffers for gradients."""
    from liger_kernel.cli.memory import blocks

    strategy, n = args.strategy, args.gpus
    every = [p for unit in step.units for p in unit]
    trained = [p for p in every if p.requires_grad]
    mixed = args.mixed_precision and strategy == "fsdp2"

    def kept(p):  # bytes of an element
        return step.quantised.get(p) or (4 if mixed else p.element_size())

    zero = strategy.startswith("zero")
    of_weights = n if strategy in ("fsdp2", "zero3") else 1
    of_states = n if strategy == "fsdp2" or zero else 1
    states = OPTIMIZERS[args.optimizer]

    def state(p):
        moments = 2 * (4 if zero else kept(p)) if states is None else states
        return moments + (4 if zero else 0)  # ZeRO's fp32 weights are the optimizer's

    elements = sum(p.numel() for p in trained)
    step.held = {
        "weights": sum(blocks(p.numel() * kept(p) / of_weights) for p in every),
        "optimizer": sum(blocks(p.numel() * state(p) / of_states) for p in trained),
        "communication": 0,
    }
    if strategy == "ddp" and n > 1:
        step.held["communication"] = sum(
            p.nbytes for p in trained
        )  # DDP's buckets: as large as the gradients
    if strategy in ("zero2", "zero3"):
        step.held["communication"] = 2 * min(elements, BUCKET)
    if (
        zero
    ):  # the optimizer takes fp32 gradients of its share, ZeRO-3 of so many elements at a time
        step.updating = int(4 * min(elements / n, SUB_GROUP if strategy == "zero3" else elements))


def units_of(model) -> list[list]:
    """Parameters that FSDP gathers together: of no layer, then those of each layer."""
    import torch

    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [m for m in model.modules() if names.intersection(c.__name__ for c in type(m).__mro__)]
    if not layers:
        layers = max(
            (m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len, default=()
        )
    seen, units = set(), []
    for layer in layers:
        units.append([p for p in layer.parameters() if id(p) not in seen])
        seen.update(map(id, units[-1]))
    return [[p for p in model.parameters() if id(p) not in seen], *filter(None, units)]


def linear_weights(model) -> list:
    """What bitsandbytes quantises: the weights of linear layers, not of the head."""
    import torch

    head = model.get_output_embeddings()
    return [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]


def with_adapters(model, rank: int):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )


# ---- what the user reads ----

ROWS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "head": "head and loss",
    "communication": "gathered, sent",
    "workspace": "workspace",
}


def table(result: dict) -> str:
    asked, sides = result["asked"], result["sides"]
    lines = [*_heading(result), "", " " * 22 + "".join(f"{SIDES[side]:>16}" for side in sides)]

    def row(name, cell):
        lines.append(f"{name:22}" + "".join(f"{cell(side):>16}" for side in sides.values()))

    for part, name in ROWS.items():
        if part not in ("communication", "workspace") or any(
            side["parts"][part] for side in sides.values()
        ):
            row(name, lambda side, part=part: _gb(side["parts"][part]))
    row("peak of one GPU", lambda side: _gb(side["peak"]))
    row("fits", lambda side: "yes" if side["fits"] else "no")
    row(
        "largest micro-batch",
        lambda side: f"{side['largest_batch']:,}" if side["largest_batch"] else "none",
    )
    row(
        "longest sequence",
        lambda side: f"{side['longest_sequence']:,}" if side["longest_sequence"] else "none",
    )
    lines += [
        "",
        f"The parts are those of the fullest moment. A GPU of {_gb(asked['gpu_memory'])} is filled to "
        f"{_gb(result['usable'])}: {FREE:.0%} are left for the CUDA context, NCCL and gaps between blocks.",
        f"The largest micro-batch is of {asked['sequence']:,} tokens each; the longest sequence is alone in its "
        "micro-batch, and found to 1%.",
    ]
    longest = max(side["longest_sequence"] for side in sides.values())
    if result["positions"] and longest > result["positions"]:
        lines.append(
            f"The model's own limit is {result['positions']:,} positions; memory knows nothing of it."
        )
    if result["positions"] == longest:
        lines.append(f"The model takes no sequence that is longer than its {longest:,} positions.")
    if asked["offload"] and "huggingface" in sides:
        lines.append("Hugging Face's checkpoints stay on the GPU.")
    return wrapped("\n".join(lines))


def _heading(result: dict) -> list[str]:
    asked, trained = result["asked"], result["trained"]
    what = (
        f"LoRA of rank {asked['lora']} ({trained / 1e6:,.1f} million)"
        if asked["lora"]
        else "all of them"
    )
    weights = (
        "fp32 weights, computed with in bf16"
        if asked["mixed_precision"]
        else f"{asked['weights']} weights"
    )
    gpus = f"{asked['gpus']} GPUs, {asked['strategy']}" if asked["gpus"] > 1 else "1 GPU"
    accumulated = f" x {asked['accumulation']}" if asked["accumulation"] > 1 else ""
    checkpoints = {
        (1, 0): ", layers recomputed",
        (1, 1): ", layers recomputed, their inputs on the host",
    }
    return [
        f"{result['model']}: {result['parameters'] / 1e6:,.1f} million parameters, {what} trained, {weights}, "
        f"{asked['optimizer']}",
        f"{gpus}, {asked['batch']} x {asked['sequence']:,}{accumulated} tokens each"
        + checkpoints.get((asked["checkpointing"], asked["offload"]), ""),
    ]


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB"
