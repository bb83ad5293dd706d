"""Contestants that are measured in a process of their own.

These are packages with our import name, and functions that PyTorch may lack. A side is such a
process. Its option names the directory that comes first on its import path; its contestants are
lines of `calls`."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from . import calls, machine, newer_torch


class Side(NamedTuple):
    option: str
    content: str  # of the directory, for --help
    lines: dict[str, dict[str, Callable]]  # by contestant, then by case
    version: Callable[[], str | None]
    environment: dict[str, str] = {}
    default: pathlib.Path | None = None


def liger_version() -> str | None:
    return machine.version("liger-kernel")


def cute_version() -> str:
    return f"{liger_version()} with nvidia-cutlass-dsl {machine.version('nvidia-cutlass-dsl')}"


SIDES = {
    "torch": Side(
        "--peer-torch",
        "linear_cross_entropy of PyTorch 2.13 "
        "(see bench/newer_torch.py; none is needed where PyTorch has it)",
        calls.LINEAR_CROSS_ENTROPY,
        newer_torch.version,
        default=newer_torch.installed(),
    ),
    "peer": Side("--peer", "the published liger-kernel", {"peer": calls.LIGER}, liger_version),
    "cute": Side(
        "--peer-cute",
        "the published liger-kernel with what its extra `cutedsl` needs",
        calls.CUTE,
        cute_version,
        environment={"LIGER_KERNEL_IMPL": "cutedsl"},
    ),
    "fla": Side(
        "--peer-fla",
        "flash-linear-attention and fla-core, where this Triton runs them",
        calls.FLA,
        lambda: machine.version("flash-linear-attention"),
    ),
}
LINES = {contestant: lines for side in SIDES.values() for contestant, lines in side.lines.items()}
CASES = {case for lines in LINES.values() for case in lines}
# contestant -> its side; those that are not here are measured on the side "ours"
SIDE_OF = {contestant: name for name, side in SIDES.items() for contestant in side.lines}


def takes_part(contestant: str, case: str) -> bool:
    """Return True if a contestant is measured in this case: a peer needs a line for it."""
    return contestant not in LINES or case in LINES[contestant]


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add an option for the directory of each side, or of those named."""
    for side in [SIDES[name] for name in names] or SIDES.values():
        parser.add_argument(
            side.option,
            type=pathlib.Path,
            metavar="DIR",
            default=side.default,
            help=f"directory that holds {side.content}",
        )


def directories(args: argparse.Namespace) -> dict[str, pathlib.Path]:
    """Return the directory of each side that takes part."""
    result = {}
    for name, side in SIDES.items():
        path = getattr(args, side.option[2:].replace("-", "_"), None)
        if path:
            result[name] = path.resolve()
    return result


def contestants(args: argparse.Namespace) -> list[str]:
    """Return the contestants of the sides that take part."""
    return [contestant for name in directories(args) for contestant in SIDES[name].lines]
