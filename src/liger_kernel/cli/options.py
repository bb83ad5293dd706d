"""The arguments of ``compare``, and the checks that need no process."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
from pathlib import Path

from liger_kernel.cli import build, chart, text
from liger_kernel.cli._child import BadInput
from liger_kernel.cli.presets import PRESETS, SIZES
from liger_kernel.cli.train import Training
from liger_kernel.cli.verdict import TOLERANCE

SWITCHES = (
    "rope",
    "rms_norm",
    "swiglu",
    "geglu",
    "layer_norm",
    "relu_squared",
    "router",
    "lora",
    "tiled_mlp",
    "offloaded_checkpoints",
    "long_context",
    "keep_layers",
    "cross_entropy",
    "fused_linear_cross_entropy",
)
BOOLEANS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
DEFAULTS = {f.name: f.default for f in dataclasses.fields(Training)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(name: str, help: str, **settings) -> None:
        default = settings.setdefault("default", DEFAULTS.get(name.strip("-").replace("-", "_")))
        is_flag = default is False
        if isinstance(default, (int, str)) and not is_flag and default != argparse.SUPPRESS:
            help = f"{help} (default {default})"
        parser.add_argument(name, help=help, **settings)

    parser.add_argument(
        "model",
        nargs="?",
        help="a family for a tiny model with random weights (llama), a preset for one with real "
        f"sizes ({', '.join(PRESETS)}), the path of a saved model, or a hub id",
    )
    add(
        "--config",
        "a Hugging Face config as JSON, with its model_type, in place of a model; random weights",
        metavar="FILE",
    )
    for size, name in SIZES.items():
        add(
            option_name(size),
            f"{name}, for a family or preset",
            type=whole_number(1),
            metavar="N",
            default=argparse.SUPPRESS,
        )
    add("--steps", "optimizer steps", type=whole_number(1), metavar="N")
    add("--batch-size", "sequences in a batch", type=whole_number(1), metavar="N")
    add("--sequence-length", "tokens in a sequence", type=whole_number(2), metavar="N")
    add(
        "--gradient-accumulation", "batches in an optimizer step", type=whole_number(1), metavar="N"
    )
    add(
        "--lr",
        "learning rate (default 3e-4 for random weights, 2e-5 for loaded ones)",
        type=_number,
        metavar="X",
    )
    add(
        "--seed",
        "seed of the weights and of the order of the text",
        type=whole_number(0),
        metavar="N",
    )
    add(
        "--dtype",
        "bfloat16: weights and all; mixed: float32 weights under bf16 autocast; auto: bfloat16 on "
        "a GPU, else float32",
        choices=("auto", "float32", "bfloat16", "mixed"),
    )
    add(
        "--optimizer",
        "its name in the Trainer (default adamw_torch_fused on a GPU, else adamw_torch)",
        metavar="NAME",
    )
    attentions = "sdpa", "eager", "flash_attention_2"
    add(
        "--attention",
        f"{', '.join(attentions)} (default: the model's own choice)",
        choices=attentions,
        metavar="NAME",
    )
    add(
        "--gradient-checkpointing",
        "recompute activations in backward",
        action="store_true",
        default=False,
    )
    add("--compile", "use torch.compile in every run", action="store_true", default=False)
    add(
        "--text",
        "text to train on (default: the source of Python's standard library, as bytes)",
        metavar="FILE",
    )
    add("--device", "auto, cpu, cuda, cuda:1 or xpu", metavar="NAME")
    add(
        "--liger",
        f"switch kernels on or off in the patched run: {', '.join(SWITCHES)}; keep_layers takes a "
        "number",
        nargs="+",
        action="extend",
        default=[],
        metavar="KERNEL=BOOL",
    )
    add(
        "--tolerance",
        "how far a loss may be from Hugging Face's: a number, or 'noise' to measure it by a third "
        "run, which differs from the first in the last bits of its weights (default "
        f"{TOLERANCE:g} in float32, else noise)",
        type=_tolerance,
        metavar="X",
    )
    add("--json", "write all measurements to this file", metavar="FILE")
    add("--chart", "draw losses, throughput and memory into this file", metavar="FILE.png")


def option_name(size: str) -> str:
    return "--" + size.replace("_", "-")


def whole_number(minimum: int):
    """Return a function that parses whole numbers from ``minimum`` on."""

    def parse(value: str) -> int:
        if not value.isdecimal() or int(value) < minimum:
            raise argparse.ArgumentTypeError(
                f"give a whole number of at least {minimum}, not {value}"
            )
        return int(value)

    return parse


def _number(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"give a number of at least 0, not {value}")
    return number


def _tolerance(value: str) -> float | str:
    return value if value == "noise" else _number(value)


def training(args: argparse.Namespace) -> Training:
    """Return the parsed arguments as a `Training`. Raises `BadInput` for what cannot be run."""
    sizes = {size: getattr(args, size) for size in SIZES if hasattr(args, size)}
    build.check(args.model, args.config, sizes)
    fields = {name: value for name, value in vars(args).items() if name in DEFAULTS}
    fields |= {"sizes": sizes, "liger": switches(args.liger)}
    training = Training(**fields)
    _check_device(training.device)
    num_bytes = len(text.read(training.text, enough=training.sequence_length))
    text.check_length(num_bytes, "bytes", training.sequence_length)
    for option in ("json", "chart"):
        path = getattr(args, option)
        if path:
            _check_output(f"--{option} {path}", Path(path))
    if args.chart:
        chart.check(args.chart)
    for name in ("transformers", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise BadInput(
                f"compare trains with the Hugging Face Trainer, and {name} is missing: "
                "pip install transformers accelerate"
            )
    return training


def _check_device(device: str) -> None:
    device_type, colon, index = device.partition(":")
    is_valid = device_type in ("auto", "cpu", "cuda", "xpu")
    if colon:
        is_valid = device_type in ("cuda", "xpu") and index.isdecimal()
    if not is_valid:
        raise BadInput(f"--device {device}: give auto, cpu, cuda, cuda:1 or xpu")


def switches(items: list[str]) -> dict[str, bool | int]:
    """Return ["rope=false", ...] as a ``liger_kernel_config``."""
    config = {}
    for item in items:
        name, _, value = item.partition("=")
        if name not in SWITCHES:
            raise BadInput(
                f"--liger {item}: there is no kernel {name!r}, only {', '.join(SWITCHES)}"
            )
        if name == "keep_layers":
            if not value.isdecimal():
                raise BadInput(f"--liger {item}: write {name}=4, for the last four layers")
            config[name] = int(value)
            continue
        if value.lower() not in BOOLEANS:
            raise BadInput(f"--liger {item}: write {name}=true or {name}=false")
        config[name] = BOOLEANS[value.lower()]
    # two kernels for one loss: one switches the other off
    logits, fused = "cross_entropy", "fused_linear_cross_entropy"
    if config.get(logits) and config.get(fused):
        raise BadInput(f"--liger: {logits} and {fused} compute the same loss, take one of them")
    if config.get(logits):
        config[fused] = False
    elif config.get(fused):
        config[logits] = False
    return config


def _check_output(argument: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(f"{argument}: {problem.strerror}") from problem
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"{argument}: cannot write there")
