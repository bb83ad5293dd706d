"""The arguments of ``compare``: what they are, and what can be refused before a process is
started."""

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
    "rope", "rms_norm", "swiglu", "geglu", "layer_norm", "relu_squared", "router",
    "tiled_mlp", "offloaded_checkpoints", "long_context", "cross_entropy", "fused_linear_cross_entropy",
)  # fmt: skip
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
        shown = (
            isinstance(default, (int, str))
            and default is not False
            and default is not argparse.SUPPRESS
        )
        parser.add_argument(name, help=f"{help} (default {default})" if shown else help, **settings)

    parser.add_argument(
        "model",
        nargs="?",
        help="a family for a tiny model with random weights (llama), a preset for one with real sizes "
        f"({', '.join(PRESETS)}), the path of a saved model, or a hub id",
    )
    add(
        "--config",
        "instead: a Hugging Face config as JSON, with its model_type; random weights",
        metavar="FILE",
    )
    for size, name in SIZES.items():
        add(
            _option(size),
            f"{name}, of a family or preset",
            type=_whole(1),
            metavar="N",
            default=argparse.SUPPRESS,
        )
    add("--steps", "optimizer steps", type=_whole(1), metavar="N")
    add("--batch-size", "sequences in a batch", type=_whole(1), metavar="N")
    add("--sequence-length", "tokens in a sequence", type=_whole(2), metavar="N")
    add("--gradient-accumulation", "batches in an optimizer step", type=_whole(1), metavar="N")
    add(
        "--lr",
        "learning rate; default 3e-4 for random weights, 2e-5 for loaded ones",
        type=_number,
        metavar="X",
    )
    add("--seed", "of the weights and the order of the text", type=_whole(0), metavar="N")
    add(
        "--dtype",
        "bfloat16: weights and all; mixed: float32 weights under bf16 autocast; auto: bfloat16 on a GPU, else float32",
        choices=("auto", "float32", "bfloat16", "mixed"),
    )
    add(
        "--optimizer",
        "as the Trainer names it; default adamw_torch_fused on a GPU, else adamw_torch",
        metavar="NAME",
    )
    attentions = "sdpa", "eager", "flash_attention_2"
    add(
        "--attention",
        f"{', '.join(attentions)}; default: what the model prefers",
        choices=attentions,
        metavar="NAME",
    )
    add(
        "--gradient-checkpointing",
        "recompute activations in backward",
        action="store_true",
        default=False,
    )
    add("--compile", "torch.compile, in every run", action="store_true", default=False)
    add(
        "--text",
        "what to train on; default the source of Python's standard library, its bytes",
        metavar="FILE",
    )
    add("--device", "auto, cpu, cuda, cuda:1 or xpu", metavar="NAME")
    add(
        "--liger",
        f"kernels on or off in the patched run: {', '.join(SWITCHES)}",
        nargs="+",
        action="extend",
        default=[],
        metavar="KERNEL=BOOL",
    )
    add(
        "--tolerance",
        "how far a loss may be from Hugging Face's: a number, or 'noise' to measure it by a third run, which differs "
        f"from the first in the last bits of its weights; default {TOLERANCE:g} in float32, else noise",
        type=_tolerance,
        metavar="X",
    )
    add("--json", "write everything measured there", metavar="FILE")
    add("--chart", "draw losses, throughput and memory there", metavar="FILE.png")


def _option(size: str) -> str:
    return "--" + size.replace("_", "-")


def _whole(least: int):
    def parse(value: str) -> int:
        if not value.isdecimal() or int(value) < least:
            raise argparse.ArgumentTypeError(
                f"give a whole number of at least {least}, not {value}"
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
    """The parsed arguments as a `Training`. Raises `BadInput` for what cannot be run."""
    sizes = {size: getattr(args, size) for size in SIZES if hasattr(args, size)}
    build.check(args.model, args.config, sizes)
    given = {name: value for name, value in vars(args).items() if name in DEFAULTS}
    asked = Training(**given | dict(sizes=sizes, liger=switches(args.liger)))
    kind, colon, index = asked.device.partition(":")
    if (
        kind not in ("auto", "cpu", "cuda", "xpu")
        or colon
        and not (index.isdecimal() and kind in ("cuda", "xpu"))
    ):
        raise BadInput(f"--device {asked.device}: give auto, cpu, cuda, cuda:1 or xpu")
    text.check_length(
        len(text.read(asked.text, enough=asked.sequence_length)), "bytes", asked.sequence_length
    )
    for option in ("json", "chart"):
        if path := getattr(args, option):
            _check_output(f"--{option} {path}", Path(path))
    if args.chart:
        chart.check(args.chart)
    for name in ("transformers", "accelerate"):
        if importlib.util.find_spec(name) is None:
            remedy = "pip install 'liger-kernel[transformers]'"
            raise BadInput(
                f"compare trains with the Hugging Face Trainer, and {name} is missing: {remedy}"
            )
    return asked


def switches(given: list[str]) -> dict[str, bool]:
    """["rope=false", ...] as a ``liger_kernel_config``."""
    chosen = {}
    for item in given:
        name, _, value = item.partition("=")
        if name not in SWITCHES:
            raise BadInput(
                f"--liger {item}: there is no kernel {name!r}, only {', '.join(SWITCHES)}"
            )
        if value.lower() not in BOOLEANS:
            raise BadInput(f"--liger {item}: write {name}=true or {name}=false")
        chosen[name] = BOOLEANS[value.lower()]
    one, other = "cross_entropy", "fused_linear_cross_entropy"
    if chosen.get(one) and chosen.get(other):
        raise BadInput(f"--liger: {one} and {other} are two ways to the one loss, take one of them")
    for wanted, instead in ((one, other), (other, one)):
        if chosen.get(wanted):
            chosen[instead] = False
    return chosen


def _check_output(given: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(f"{given}: {problem.strerror}") from problem
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"{given}: cannot write there")
