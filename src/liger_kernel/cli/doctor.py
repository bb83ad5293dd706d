"""Say what is installed, whether Triton and each kernel work here, and what to fix."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from pathlib import Path

from liger_kernel._version import OLDEST_TRANSFORMERS, TESTED, __version__
from liger_kernel.cli import _child
from liger_kernel.cli.layout import wrapped
from liger_kernel.cli.versions import installed

LIBRARIES = ("torch", "triton", "transformers", "accelerate", "peft")
FRAMEWORKS = (
    "trl", "axolotl", "llamafactory", "ms-swift", "verl", "oumi", "deepspeed", "lightning", "pytorch-lightning",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    found = examine()
    print(json.dumps(found, indent=2) if args.json else wrapped(_text(found)))
    return 1 if found["problems"] else 0


def examine() -> dict:
    """Everything that `doctor` says."""
    found = dict(
        versions={"python": platform.python_version()} | installed(*LIBRARIES),
        tested=TESTED, untested=[], broken={}, frameworks=installed(*FRAMEWORKS),
        liger_kernel=dict(version=__version__, path=str(Path(__file__).parents[1]), provided_by=_providers()),
        build={}, devices=[], triton=None, kernels=[], problems=[],
    )  # fmt: skip
    found["untested"] = untested(found["versions"] | found["frameworks"])
    _try_imports(found)
    if "torch" in found["versions"] and "torch" not in found["broken"]:
        _try_out(found)
    found["problems"] += _problems(found)
    return found


def untested(versions: dict[str, str]) -> list[str]:
    """Those of `TESTED` that are installed in a minor version that the suite does not run on."""
    names = [name for name in TESTED if name in versions]
    return [name for name in names if _minor(versions[name]) not in tested_minors(name)]


def tested_minors(name: str) -> list[str]:
    return re.split(", | and ", TESTED[name])


def _minor(version: str) -> str:
    """Return "2.15" of "2.15.0.dev20261101+cpu"."""
    return ".".join(version.split(".")[:2])


def _providers() -> list[str]:
    names = importlib.metadata.packages_distributions().get("liger_kernel", [])
    return sorted({f"{name} {importlib.metadata.version(name)}" for name in names})


def _try_imports(found: dict) -> None:
    """A library that is there may still fail to load, or take its process down."""
    trying = []

    def on_event(event: dict) -> None:
        if event["event"] == "trying":
            trying.append(event["name"])
        else:
            found["broken"][trying[-1]] = event["problem"]

    names = [name for name in LIBRARIES if name in found["versions"]]
    try:
        _child.run("liger_kernel.cli.imports", dict(names=names), on_event, "the import")
    except _child.Crash as crash:
        found["broken"][trying[-1]] = str(crash)


def _try_out(found: dict) -> None:
    trying = ["the devices"]

    def on_event(event: dict) -> None:
        kind = event.pop("event")
        if kind == "trying":
            trying.append(event["name"])
            if sys.stderr.isatty():
                print(f"\rtrying {event['name']:40}\r", end="", file=sys.stderr)
        elif kind == "kernel":
            found["kernels"].append(event)
        else:
            found[kind] = event.get("devices", event)

    try:
        _child.run("liger_kernel.cli.checkup", {}, on_event, "the check")
    except _child.Crash as crash:
        found["problems"].append(f"Trying {trying[-1]} brought the process down. {crash}")


def _problems(found: dict) -> list[str]:
    """One sentence each, with the remedy."""
    versions, devices, problems = found["versions"], found["devices"], []
    if "torch" not in versions:
        problems.append("PyTorch is missing: pip install torch.")
    for name, problem in found.get("broken", {}).items():
        problems.append(
            f"{name} {versions[name]} is installed, but cannot be imported ({problem}): install it anew."
        )
    if len(found["liger_kernel"]["provided_by"]) > 1:
        several = " and ".join(found["liger_kernel"]["provided_by"])
        problems.append(
            f"{several} write into the same import name liger_kernel: uninstall both, then install one."
        )
    if int(versions.get("transformers", OLDEST_TRANSFORMERS).partition(".")[0]) < int(
        OLDEST_TRANSFORMERS[0]
    ):
        problems.append(
            f"Models are patched for transformers {OLDEST_TRANSFORMERS} or newer, here is {versions['transformers']}: "
            "pip install -U transformers."
        )
    if not devices and shutil.which("nvidia-smi"):
        if not found["build"].get("cuda"):
            problems.append(
                "There is nvidia-smi, but this PyTorch is built without CUDA: install PyTorch's CUDA build."
            )
        elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            problems.append("CUDA_VISIBLE_DEVICES hides every GPU: unset it.")
        else:
            problems.append(
                "PyTorch finds no GPU where there is nvidia-smi: its driver may be older than CUDA "
                f"{found['build']['cuda']} needs, update it or install an older PyTorch."
            )
    if os.environ.get("TRITON_INTERPRET") == "1":
        problems.append(
            "TRITON_INTERPRET=1 runs every kernel in Python, thousands of times slower: unset it."
        )
    if "triton" in found.get("broken", {}):
        pass
    elif found["triton"] is not None and not found["triton"]["works"]:
        problems.append(
            f"Triton does not work here ({found['triton']['problem']}): {_triton_remedy(versions)}"
        )
    else:
        problems += [
            f"The kernel {kernel['name']} does not work here ({kernel['problem']}): please report it with this output."
            for kernel in found["kernels"]
            if not kernel["works"]
        ]
    return problems


def _triton_remedy(versions: dict) -> str:
    if "triton" not in versions:
        return "pip install triton."
    if not (
        os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    ):
        return "it needs a C compiler, install gcc or set CC."
    return "install the Triton that your PyTorch asks for, and Python's headers (python3-dev)."


def _text(found: dict) -> str:
    own = found["liger_kernel"]
    lines = [f"liger-kernel {own['version']} at {own['path']}"]
    lines.append(f"  from {', '.join(own['provided_by']) or 'a path, no installed distribution'}")
    marks = dict.fromkeys(found["untested"], ", not tested")
    marks |= dict.fromkeys(found["broken"], ", which cannot be imported")
    lines += [
        f"  {name} {version}{marks.get(name, '')}" for name, version in found["versions"].items()
    ]
    lines.append(
        "tested with "
        + ", ".join(f"{name} {versions}" for name, versions in found["tested"].items())
    )
    known = ", ".join(
        f"{name} {version}{marks.get(name, '')}" for name, version in found["frameworks"].items()
    )
    lines.append(f"training frameworks: {known or 'none'}")
    for number, device in enumerate(found["devices"]):
        lines.append(
            f"device {number}: {device['name']}, {device['architecture']}, {device['memory'] / 1e9:.0f} GB"
        )
    if not found["devices"]:
        lines.append(
            "device: CPU only; the operators take their PyTorch reference: same results, no speed-up"
        )
    if found["triton"] is not None:
        lines.append(
            f"Triton: {'compiles and runs' if found['triton']['works'] else 'does not work'}"
        )
        lines += [
            f"  {kernel['name']}: {'ok' if kernel['works'] else 'FAILS'}"
            for kernel in found["kernels"]
        ]
    lines += ["", *(found["problems"] or ["Nothing to fix."])]
    if found["untested"]:
        versions = found["versions"] | found["frameworks"]
        names = " and ".join(f"{name} {versions[name]}" for name in found["untested"])
        lines.append(
            f"Not tested with {names}, which may work all the same. `liger-kernel compare llama` "
            "trains with the patch and without it, and compares. If it differs or fails, please report "
            "it with this output, and install a version that was tested."
        )
    return "\n".join(lines)
