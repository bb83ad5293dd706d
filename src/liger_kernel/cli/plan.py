"""Count the memory that training a model takes: without a GPU, without its weights.

Forward and backward run without data, and what they would hold is counted. The figures are those of
a step whose optimizer has its states already, as torch.cuda.max_memory_allocated() tells them; the
CUDA context is not in them.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
import time
import warnings

from liger_kernel._version import __version__
from liger_kernel.cli import build, tensor_parallel
from liger_kernel.cli._child import BadInput, one_line
from liger_kernel.cli.layout import wrapped
from liger_kernel.cli.plan_options import (
    DEFAULT_SEQUENCE,
    MOST,
    QUANTISED,
    add_arguments,
    check_arguments,
)

__all__ = ["add_arguments", "check_arguments", "plan", "run"]

PROGRESS_SECONDS = 10.0  # between lines of progress, where stderr is no terminal
# of the GPU's memory: for the CUDA context, NCCL, and gaps between the allocator's blocks
UNUSED_FRACTION = 0.05
# Bytes of an element's optimizer states. None: two moments in the weight's dtype. In 8 bits: two
# bytes, and two fp32 scales for each 256.
STATE_BYTES = {"adamw": None, "adamw8bit": 2 + 2 * 4 / 256, "sgd": 0}
# Bytes of an element of a quantised linear layer: 4 bits and an fp32 scale for each 64; 8 bits.
QUANTISED_BYTES = {"4bit": 0.5 + 4 / 64, "8bit": 1.0}
# DeepSpeed's defaults, in elements: two buckets in which gradients wait; gathered weights; weights
# that the optimizer of ZeRO-3 updates at a time.
TWO_BUCKETS = 2 * 5 * 10**8
MAX_GATHERED = 10**9
SUB_GROUP = 10**9
SEQUENCE_STEP = 256  # the longest sequence is a multiple of it
SIDES = {"huggingface": "Hugging Face", "patched": "patched"}


def run(args: argparse.Namespace) -> int:
    result = plan(check_arguments(args))
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


def plan(args: argparse.Namespace) -> dict:
    """Return the result as `--json` prints it."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    _check_meta_autocast()
    settings = build.config(args.model, args.config, args.sizes)
    max_positions = positions(settings)
    if args.sequence is None:
        args.sequence = min(DEFAULT_SEQUENCE, max_positions or DEFAULT_SEQUENCE)
    result = {
        "liger_kernel": __version__,
        "transformers": transformers.__version__,
        "model": args.model or args.config,
        "asked": {name: value for name, value in vars(args).items() if name in REPORTED_ARGUMENTS},
        "usable": int(args.gpu_memory * (1 - UNUSED_FRACTION)),
        "sides": {},
    }
    with _Progress() as progress:
        for side, title in SIDES.items():
            patched = side == "patched"
            if args.patch not in (None, patched):
                continue
            progress.side = title
            progress("building the model")
            step = build_step(settings, args, patched)
            if args.keep_layers == MOST and patched:
                num_kept = most_kept_layers(step, args, result["usable"], progress)
                step = build_step(settings, _with(args, keep_layers=num_kept), patched)
            result["sides"][side] = measure(step, args, result["usable"], max_positions, progress)
            result["sides"][side]["kept_layers"] = step.kept_layers
    if args.strategy == "tp":  # the parameters of all GPUs
        step = build_step(settings, _with(args, strategy="ddp"), patched=False)
    parameters = [p for unit in step.units for p in unit]
    result["parameters"] = sum(p.numel() for p in parameters)
    result["trained"] = sum(p.numel() for p in parameters if p.requires_grad)
    result["positions"] = max_positions
    return result


def _with(args: argparse.Namespace, **changes) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | changes)


REPORTED_ARGUMENTS = (
    "gpus",
    "gpu_memory",
    "sequence",
    "batch",
    "accumulation",
    "strategy",
    "lora",
    "weights",
    "optimizer",
    "mixed_precision",
    "checkpointing",
    "offload",
    "keep_layers",
)


def _check_meta_autocast() -> None:
    """Raise `BadInput` if transformers asks torch for the autocast of the meta device.

    Older versions do in their RoPE, and torch has none.
    """
    from transformers.utils import generic

    try:
        with generic.maybe_autocast("meta", enabled=False):
            pass
    except RuntimeError as problem:
        raise BadInput(
            "plan runs models without data, which this transformers cannot: "
            "pip install -U transformers accelerate"
        ) from problem


def positions(settings) -> int | None:
    """Return the number of positions that the model has by its config, or None."""
    text = settings.get_text_config()
    for name in ("max_position_embeddings", "max_target_positions"):
        if getattr(text, name, None):
            return getattr(text, name)
    return None


# ---- the largest batch and the longest sequence ----


def measure(step, args, usable: int, max_positions: int | None, progress) -> dict:
    """Return the peak for these arguments, and the largest batch and sequence that fit.

    A model may refuse sequences that are longer than ``max_positions``.
    """
    from liger_kernel.cli.memory import Unplannable

    name = args.model or args.config

    @functools.cache
    def peak_by_part(batch: int, sequence: int) -> dict[str, int]:
        progress(f"{batch:,} x {sequence:,} tokens")
        return step.peak(batch, sequence)

    def peak(batch, sequence):
        return sum(peak_by_part(batch, sequence).values())

    def peak_of_batch(batch):
        return peak(batch, args.sequence)

    def peak_of_sequence(num_steps):
        return peak(1, num_steps * SEQUENCE_STEP)

    def longest_that_fits(guess, **bound):
        guess //= SEQUENCE_STEP
        num_steps = largest_that_fits(peak_of_sequence, usable, guess, tolerance=0.01, **bound)
        return num_steps * SEQUENCE_STEP

    try:
        fits = peak(args.batch, args.sequence) <= usable
        batch = largest_that_fits(peak_of_batch, usable, args.batch)
        try:
            sequence = longest_that_fits(max(batch, 1) * args.sequence)
        except Unplannable:
            if not max_positions:
                raise
            if peak(1, max_positions) <= usable:
                sequence = max_positions
            else:
                sequence = longest_that_fits(max_positions, most=max_positions // SEQUENCE_STEP)
    except Unplannable as problem:
        if max_positions and args.sequence > max_positions:
            raise BadInput(
                f"{name}: it has {max_positions:,} positions, and --sequence is "
                f"{args.sequence:,}: take at most {max_positions}"
            ) from problem
        raise BadInput(
            f"{name}: it cannot be run without data: {one_line(problem)}. "
            "`liger-kernel compare` measures a training"
        ) from problem
    return {
        "peak": peak(args.batch, args.sequence),
        "parts": peak_by_part(args.batch, args.sequence),
        "fits": fits,
        "largest_batch": batch,
        "longest_sequence": sequence,
    }


def most_kept_layers(step, args, usable: int, progress) -> int:
    """Return how many of the last layers can be kept, and leave the step with some number of them.

    0 if none can, or if the model cannot run without data: `measure` says which."""
    from liger_kernel.cli.memory import Unplannable
    from liger_kernel.transformers import apply_liger_kernel

    def peak(num_kept):
        progress(f"{num_kept} layers kept")
        apply_liger_kernel(step.model, long_context=args.offload, keep_layers=num_kept)
        return sum(step.peak(args.batch, args.sequence).values())

    most = _num_layers(step.model)
    try:
        return largest_that_fits(peak, usable, guess=most, most=most) if most else 0
    except Unplannable:
        return 0


def _num_layers(model) -> int:
    """Return the number of layers of the model's longest stack."""
    from liger_kernel.patch.layers.kept_layers import stacks

    return max(map(len, stacks(model)), default=0)


def largest_that_fits(
    need, limit: int, guess: int = 1, tolerance: float = 0.0, most: int = 2**14
) -> int:
    """Return the largest n up to ``most`` for which ``need(n)`` is at most the limit, or 0.

    ``need`` grows with n. n may be too small by the fraction ``tolerance``. Doubles from
    ``guess`` until n no longer fits, then bisects.
    """
    fits, too_large = 0, most + 1
    n = min(max(guess, 1), most)
    while too_large - fits > max(1, int(fits * tolerance)):
        if need(n) <= limit:
            fits = n
        else:
            too_large = n
        n = (fits + too_large) // 2 if too_large <= most else min(2 * fits, most)
    return fits


class _Progress:
    """Prints on stderr which run of which ``side`` is under way.

    On a terminal it is one line, elsewhere a line every `PROGRESS_SECONDS`.
    """

    def __init__(self):
        self.side = ""
        self.last_print = time.monotonic()
        self.on_terminal = sys.stderr.isatty()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._clear()

    def _clear(self):
        if self.on_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __call__(self, text: str) -> None:
        text = f"{self.side}: {text}"
        if self.on_terminal:
            self._clear()
            print(text, end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.last_print >= PROGRESS_SECONDS:
            self.last_print = time.monotonic()
            print(text, file=sys.stderr, flush=True)


# ---- a model, and how GPUs share it ----


def build_step(settings, args, patched: bool):
    """Return the `memory.Step` of these arguments."""
    import torch

    from liger_kernel.cli import memory

    in_autocast = args.mixed_precision and args.strategy in ("none", "ddp", "tp")
    # FSDP2 gathers fp32 weights in bf16
    in_bf16 = args.weights != "fp32" or args.mixed_precision and not in_autocast
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    if args.lora and args.strategy in ("none", "ddp"):
        in_autocast = True  # PEFT's adapters are in fp32
    model, quantised_weights = _build_model(settings, args, dtype, patched)
    num_kept = 0
    if patched:
        from liger_kernel.transformers import apply_liger_kernel

        if args.keep_layers != MOST:
            num_kept = min(args.keep_layers, _num_layers(model))
        apply_liger_kernel(model, long_context=args.offload, keep_layers=num_kept)
    step = memory.Step(
        model,
        units_of(model),
        persistent_bytes={},
        sharding=sharding(args),
        element_bytes={p: QUANTISED_BYTES[args.weights] for p in quantised_weights},
        accumulates=args.accumulation > 1,
        autocast=in_autocast,
        offload=args.offload and patched,
        kept_layers=num_kept,
    )
    set_held_memory(step, args)
    return step


def _build_model(settings, args, dtype, patched):
    """Return the model on the meta device, and its quantised weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from liger_kernel.cli.meta import recompute_contexts

    share = None
    if args.strategy == "tp":
        settings, share = tensor_parallel.config_of_one_rank(settings, args)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(settings), dtype=dtype, attn_implementation=args.attention
            )
            model.train()
            if share is not None:
                share(model, patched)
            quantised_weights = linear_weights(model) if args.weights in QUANTISED else []
            if args.lora:
                model = add_adapters(model, args.lora)
            if args.checkpointing:
                model.gradient_checkpointing_enable(
                    {"use_reentrant": False, "context_fn": recompute_contexts}
                )
    except Exception as problem:  # anything can be wrong with a config
        reason = one_line(problem) + build.remedy(args.model)
        raise BadInput(f"{args.model or args.config}: {reason}") from problem
    return model, quantised_weights


def sharding(args):
    from liger_kernel.cli.memory import Sharding

    if args.strategy == "fsdp2":
        fp32 = args.weights == "fp32"
        return Sharding(
            args.gpus,
            gathers=True,
            sums="by unit",
            compute_bytes=2 if args.mixed_precision or not fp32 else 4,
            reduced_bytes=4 if fp32 else 2,
            kept_bytes=4 if fp32 else None,
        )
    if args.strategy == "zero2":
        return Sharding(args.gpus, sums="in buckets", kept_bytes=2)
    if args.strategy == "zero3":
        return Sharding(
            args.gpus, gathers=True, sums="in buckets", kept_bytes=2, live_bytes=2 * MAX_GATHERED
        )
    return Sharding(args.gpus)


def set_held_memory(step, args) -> None:
    """Set the memory that a step holds all the time.

    That is weights, the optimizer's states and buffers for gradients.
    """
    from liger_kernel.cli.memory import round_to_blocks

    strategy, num_gpus = args.strategy, args.gpus
    zero = strategy.startswith("zero")
    keeps_fp32 = args.mixed_precision and strategy == "fsdp2"
    state_bytes = STATE_BYTES[args.optimizer]
    parameters = [p for unit in step.units for p in unit]
    trained_parameters = [p for p in parameters if p.requires_grad]
    num_trained = sum(p.numel() for p in trained_parameters)
    weight_ranks = num_gpus if strategy in ("fsdp2", "zero3") else 1
    state_ranks = num_gpus if strategy == "fsdp2" or zero else 1

    def weight_bytes(p):  # of an element
        return step.element_bytes.get(p) or (4 if keeps_fp32 else p.element_size())

    def optimizer_bytes(p):  # of an element
        if state_bytes is not None:
            moments = state_bytes
        else:
            moments = 2 * (4 if zero else weight_bytes(p))
        return moments + (4 if zero else 0)  # ZeRO's fp32 weights are the optimizer's

    communication = 0
    if strategy == "ddp" and num_gpus > 1:  # its buckets are as large as the gradients
        communication = sum(p.nbytes for p in trained_parameters)
    if strategy in ("zero2", "zero3"):
        communication = 2 * min(num_trained, TWO_BUCKETS)
    step.persistent_bytes = {
        "weights": sum(
            round_to_blocks(p.numel() * weight_bytes(p) / weight_ranks) for p in parameters
        ),
        "optimizer": sum(
            round_to_blocks(p.numel() * optimizer_bytes(p) / state_ranks)
            for p in trained_parameters
        ),
        "communication": communication,
    }
    if zero:
        # the optimizer makes fp32 gradients of its share, ZeRO-3 of a sub-group at a time
        max_updated = SUB_GROUP if strategy == "zero3" else num_trained
        step.update_bytes = int(4 * min(num_trained / num_gpus, max_updated))


def units_of(model) -> list[list]:
    """Return the parameters that FSDP gathers together: those in no layer, then each layer's."""
    import torch

    layer_classes = set(getattr(model, "_no_split_modules", None) or ())

    def is_layer(module):
        return not layer_classes.isdisjoint(cls.__name__ for cls in type(module).__mro__)

    layers = [m for m in model.modules() if is_layer(m)]
    if not layers:
        lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
        layers = max(lists, key=len, default=())
    assigned_ids = set()
    units = []
    for layer in layers:
        unit = [p for p in layer.parameters() if id(p) not in assigned_ids]
        assigned_ids.update(map(id, unit))
        if unit:
            units.append(unit)
    return [[p for p in model.parameters() if id(p) not in assigned_ids], *units]


def linear_weights(model) -> list:
    """Return the weights that bitsandbytes quantises: those of linear layers except the head."""
    import torch

    head = model.get_output_embeddings()
    return [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]


def add_adapters(model, rank: int):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )


# ---- what the user reads ----

PART_TITLES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "head": "head and loss",
    "communication": "gathered, sent",
    "workspace": "workspace",
}


def table(result: dict) -> str:
    arguments = result["asked"]
    sides = result["sides"]
    lines = [*_heading(result), "", " " * 22 + "".join(f"{SIDES[side]:>16}" for side in sides)]

    def add_row(title, cell):
        lines.append(f"{title:22}" + "".join(f"{cell(side):>16}" for side in sides.values()))

    for part_name, title in PART_TITLES.items():
        is_optional = part_name in ("communication", "workspace")
        if not is_optional or any(side["parts"][part_name] for side in sides.values()):
            add_row(title, lambda side, name=part_name: _gb(side["parts"][name]))
    add_row("peak of one GPU", lambda side: _gb(side["peak"]))
    if arguments["keep_layers"]:
        add_row("layers not recomputed", lambda side: _count(side["kept_layers"]))
    add_row("fits", lambda side: "yes" if side["fits"] else "no")
    add_row("largest micro-batch", lambda side: _count(side["largest_batch"]))
    add_row("longest sequence", lambda side: _count(side["longest_sequence"]))
    lines += [
        "",
        "The parts are those of the fullest moment. A GPU of "
        f"{_gb(arguments['gpu_memory'])} is filled to {_gb(result['usable'])}: "
        f"{UNUSED_FRACTION:.0%} are left for the CUDA context, NCCL and gaps between blocks.",
        f"The largest micro-batch has sequences of {arguments['sequence']:,} tokens; the longest "
        "sequence is alone in its micro-batch, and found to 1%.",
    ]
    longest = max(side["longest_sequence"] for side in sides.values())
    max_positions = result["positions"]
    if max_positions and longest > max_positions:
        lines.append(
            f"The model's own limit is {max_positions:,} positions, whatever the memory allows."
        )
    if max_positions == longest:
        lines.append(f"The model takes no sequence that is longer than its {longest:,} positions.")
    if arguments["offload"] and "huggingface" in sides:
        lines.append("Hugging Face's checkpoints stay on the GPU.")
    return wrapped("\n".join(lines))


def _heading(result: dict) -> list[str]:
    arguments = result["asked"]
    trained_weights = "all of them"
    if arguments["lora"]:
        trained_weights = (
            f"LoRA of rank {arguments['lora']} ({result['trained'] / 1e6:,.1f} million)"
        )
    weights = f"{arguments['weights']} weights"
    if arguments["mixed_precision"]:
        weights = "fp32 weights, computed with in bf16"
    gpus = (
        f"{arguments['gpus']} GPUs, {arguments['strategy']}" if arguments["gpus"] > 1 else "1 GPU"
    )
    accumulation = f" x {arguments['accumulation']}" if arguments["accumulation"] > 1 else ""
    checkpoints = ""
    if arguments["checkpointing"]:
        checkpoints = ", layers recomputed"
        if arguments["offload"]:
            checkpoints += ", their inputs on the host"
    return [
        f"{result['model']}: {result['parameters'] / 1e6:,.1f} million parameters, "
        f"{trained_weights} trained, {weights}, {arguments['optimizer']}",
        f"{gpus}, {arguments['batch']} x {arguments['sequence']:,}{accumulation} tokens each"
        f"{checkpoints}",
    ]


def _count(number: int) -> str:
    return f"{number:,}" if number else "none"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB"
