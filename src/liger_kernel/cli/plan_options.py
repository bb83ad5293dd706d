"""The arguments of ``plan``, and the checks that need no model."""

from __future__ import annotations

import argparse
import importlib.util
import re

from liger_kernel.cli import build
from liger_kernel.cli._child import BadInput
from liger_kernel.cli.options import option_name, whole_number
from liger_kernel.cli.presets import PRESETS, SIZES

DEFAULT_SEQUENCE = 4096
UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}
STRATEGIES = "none", "ddp", "fsdp2", "zero1", "zero2", "zero3", "tp"
WEIGHTS = "bf16", "fp32", "4bit", "8bit"
OPTIMIZERS = "adamw", "adamw8bit", "sgd"
QUANTISED = "4bit", "8bit"
MOST = "most"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        help="a family for a tiny model (llama), a preset "
        f"({', '.join(PRESETS)}), the path of a saved model, or a hub id, of which only the config "
        "is read",
    )
    add(
        "--config",
        help="a Hugging Face config as JSON, with its model_type, in place of a model",
        metavar="FILE",
    )
    for size, name in SIZES.items():
        add(
            option_name(size),
            help=f"{name}, for a family or preset",
            type=whole_number(1),
            metavar="N",
            default=argparse.SUPPRESS,
        )
    add(
        "--gpus",
        help="number of GPUs that train one model (default 1)",
        type=whole_number(1),
        metavar="N",
        default=1,
    )
    add(
        "--gpu-memory",
        help="memory of one GPU, such as 80GB or 79GiB (default 80GB)",
        type=_parse_bytes,
        metavar="G",
        default="80GB",
    )
    add(
        "--sequence",
        help=f"tokens in a sequence (default {DEFAULT_SEQUENCE}, or as many as the model has "
        "positions for)",
        type=whole_number(2),
        metavar="S",
    )
    add(
        "--batch",
        help="sequences in a micro-batch of one GPU (default 1)",
        type=whole_number(1),
        metavar="N",
        default=1,
    )
    add(
        "--accumulation",
        help="micro-batches in a step: the gradients of the first stay while the others are "
        "computed (default 1)",
        type=whole_number(1),
        metavar="N",
        default=1,
    )
    add(
        "--strategy",
        help=f"how GPUs share the work: {', '.join(STRATEGIES)} (default fsdp2, or none for one "
        "GPU)",
        choices=STRATEGIES,
        metavar="NAME",
    )
    add(
        "--lora",
        help="train adapters of this rank on all linear layers",
        type=whole_number(1),
        metavar="RANK",
    )
    add(
        "--weights",
        help=f"format of the model's weights: {', '.join(WEIGHTS)}, the last two with --lora "
        "(default bf16)",
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
        help="keep weights, gradients and moments in fp32 and compute in bf16: by autocast, or "
        "with weights that are gathered in bf16 (fsdp2); ZeRO has fp32 weights beside the bf16 "
        "ones in any case",
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
        help="with the patch, keep the layers' checkpoints in the host's memory, and compute MLPs "
        "in tiles",
        action="store_true",
    )
    add(
        "--keep-layers",
        help="with the patch and --checkpointing, do not recompute the last N layers; "
        f"'{MOST}': as many as fit in the GPU's memory",
        type=_parse_layers,
        metavar="N",
        default=0,
    )
    add(
        "--patch",
        help="only with the patch, or only without it (default: both)",
        action=argparse.BooleanOptionalAction,
        default=None,
    )
    add(
        "--attention",
        help="sdpa or eager (default: the model's own choice)",
        choices=("sdpa", "eager"),
        metavar="NAME",
    )
    add("--json", help="print JSON, with sizes in bytes", action="store_true")


def _parse_bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([GM]i?B)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"give a number and {', '.join(UNITS)}, such as 80GB, not {text}"
        )
    return int(float(match[1]) * UNITS[match[2]])


def _parse_layers(text: str) -> int | str:
    return text if text == MOST else whole_number(1)(text)


def check_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in the defaults. Raises `BadInput` for arguments that do not go together."""
    args.sizes = {size: getattr(args, size) for size in SIZES if hasattr(args, size)}
    build.check(args.model, args.config, args.sizes)
    if importlib.util.find_spec("transformers") is None:
        raise BadInput(
            "plan runs models of transformers, which is missing: "
            "pip install transformers accelerate"
        )
    args.strategy = args.strategy or ("none" if args.gpus == 1 else "fsdp2")
    if args.gpus > 1 and args.strategy == "none":
        raise BadInput(
            f"--strategy none is for one GPU, and --gpus is {args.gpus}: take another one"
        )
    _check_weights(args)
    if args.lora and args.strategy == "tp":
        raise BadInput(
            "--strategy tp is supported without adapters: leave --lora out, or take fsdp2"
        )
    if args.lora and importlib.util.find_spec("peft") is None:
        raise BadInput("--lora makes the adapters with PEFT, which is missing: pip install peft")
    if args.offload and args.patch is False:
        raise BadInput("--offload is the patch's, and --no-patch leaves that out")
    if args.keep_layers and args.patch is False:
        raise BadInput("--keep-layers is the patch's, and --no-patch leaves that out")
    if args.offload or args.keep_layers:
        args.checkpointing = True
    return args


def _check_weights(args):
    if args.mixed_precision and args.weights not in (None, "fp32"):
        raise BadInput(
            f"--mixed-precision keeps fp32 weights, and --weights is {args.weights}: "
            "leave one of them out"
        )
    zero = args.strategy.startswith("zero")
    if args.weights is None:
        args.weights = "fp32" if args.mixed_precision and not zero else "bf16"
    if zero and args.weights == "fp32":
        raise BadInput(
            f"--strategy {args.strategy} computes with bf16 weights and keeps fp32 ones: "
            "--weights bf16"
        )
    if args.weights in QUANTISED:
        if not args.lora:
            raise BadInput(f"--weights {args.weights} cannot be trained: train adapters, --lora 16")
        if args.strategy not in ("none", "ddp", "fsdp2"):
            raise BadInput(
                f"--weights {args.weights} is supported with none, ddp and fsdp2, "
                f"not with {args.strategy}"
            )
