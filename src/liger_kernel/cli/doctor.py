"""Report what is installed, whether Triton and each kernel work here, and what to fix."""

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

from liger_kernel._version import OLDEST_TRANSFORMERS, __version__
from liger_kernel.cli import _child
from liger_kernel.cli.layout import wrapped
from liger_kernel.cli.versions import (
    COMPILED_FOR,
    GPUS,
    RAN_ON_GPUS,
    TESTED,
    installed,
    is_older_than_tested,
    join_words,
    minor,
    untested,
)

LIBRARIES = ("torch", "triton", "transformers", "accelerate", "peft", "bitsandbytes")
DELTA_RULE = "gated_delta_rule"  # its kernel's name
LINEAR_ATTENTION = "flash-linear-attention", "causal-conv1d"
FRAMEWORKS = (
    "trl",
    "axolotl",
    "llamafactory",
    "ms-swift",
    "verl",
    "oumi",
    "deepspeed",
    "lightning",
    "pytorch-lightning",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    report = examine()
    print(json.dumps(report, indent=2) if args.json else wrapped(_text(report)))
    return 1 if report["problems"] else 0


def examine() -> dict:
    """Return everything that `doctor` says."""
    versions = {"python": platform.python_version()} | installed(*LIBRARIES)
    frameworks = installed(*FRAMEWORKS)
    report = {
        "versions": versions,
        "tested": TESTED,
        "untested": untested(versions | frameworks),
        "broken": {},
        "frameworks": frameworks,
        "liger_kernel": {
            "version": __version__,
            "path": str(Path(__file__).parents[1]),
            "provided_by": _providers(),
        },
        "build": {},
        "devices": [],
        "triton": None,
        "kernels": [],
        "hopper": None,
        "problems": [],
    }
    _try_imports(report)
    if "torch" in versions and "torch" not in report["broken"]:
        _try_out(report)
    report["problems"] += _problems(report)
    report["notes"] = _notes(report)
    return report


def _providers() -> list[str]:
    names = importlib.metadata.packages_distributions().get("liger_kernel", [])
    return sorted({f"{name} {importlib.metadata.version(name)}" for name in names})


def _try_imports(report: dict) -> None:
    """Fill in ``broken``: an installed library may fail to load, or end its process."""
    attempts = []

    def on_event(event: dict) -> None:
        if event["event"] == "trying":
            attempts.append(event["name"])
        else:
            report["broken"][attempts[-1]] = event["problem"]

    names = [name for name in LIBRARIES if name in report["versions"]]
    try:
        _child.run("liger_kernel.cli.imports", dict(names=names), on_event, "the import")
    except _child.Crash as crash:
        report["broken"][attempts[-1]] = str(crash)


def _try_out(report: dict) -> None:
    """Fill in ``devices``, ``build``, ``triton``, ``hopper`` and ``kernels``."""
    attempts = ["the devices"]

    def on_event(event: dict) -> None:
        name = event.pop("event")
        if name == "trying":
            attempts.append(event["name"])
            if sys.stderr.isatty():
                print(f"\rtrying {event['name']:40}\r", end="", file=sys.stderr)
        elif name == "kernel":
            report["kernels"].append(event)
        else:
            report[name] = event.get("devices", event)

    try:
        _child.run("liger_kernel.cli.checkup", {}, on_event, "the check")
    except _child.Crash as crash:
        report["problems"].append(f"Trying {attempts[-1]} brought the process down. {crash}")


# ---- problems and remedies ----


def _problems(report: dict) -> list[str]:
    """Return one sentence for each problem, with its remedy."""
    problems = [
        *_library_problems(report),
        *_gpu_problems(report),
    ]
    if os.environ.get("TRITON_INTERPRET") == "1":
        problems.append(
            "TRITON_INTERPRET=1 runs every kernel in Python, thousands of times slower: unset it."
        )
    if "triton" not in report.get("broken", {}):
        problems += _kernel_problems(report)
    return problems


def _library_problems(report: dict) -> list[str]:
    versions = report["versions"]
    problems = []
    if "torch" not in versions:
        problems.append("PyTorch is missing: pip install torch.")
    for name, problem in report.get("broken", {}).items():
        problems.append(
            f"{name} {versions[name]} is installed, but cannot be imported ({problem}): "
            "install it anew."
        )
    providers = report["liger_kernel"]["provided_by"]
    if len(providers) > 1:
        problems.append(
            f"{' and '.join(providers)} write into the same import name liger_kernel: "
            "uninstall both, then install one."
        )
    transformers = versions.get("transformers", OLDEST_TRANSFORMERS)
    if int(transformers.partition(".")[0]) < int(OLDEST_TRANSFORMERS[0]):
        problems.append(
            f"Models are patched for transformers {OLDEST_TRANSFORMERS} or newer, "
            f"here is {transformers}: pip install -U transformers."
        )
    return problems


def _gpu_problems(report: dict) -> list[str]:
    if report["devices"] or not shutil.which("nvidia-smi"):
        return []
    cuda = report["build"].get("cuda")
    if not cuda:
        return [
            "There is nvidia-smi, but this PyTorch is built without CUDA: "
            "install PyTorch's CUDA build."
        ]
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ["CUDA_VISIBLE_DEVICES hides every GPU: unset it."]
    return [
        "PyTorch finds no GPU where there is nvidia-smi: its driver may be older than CUDA "
        f"{cuda} needs, update it or install an older PyTorch."
    ]


def _kernel_problems(report: dict) -> list[str]:
    triton = report["triton"]
    if triton is not None and not triton["works"]:
        remedy = _triton_remedy(report["versions"])
        return [f"Triton does not work here ({triton['problem']}): {remedy}"]
    return [
        f"The kernel {kernel['name']} does not work here ({kernel['problem']}): "
        "please report it with this output."
        for kernel in report["kernels"]
        if not kernel["works"]
    ]


def _triton_remedy(versions: dict) -> str:
    if "triton" not in versions:
        return "pip install triton."
    compilers = "gcc", "clang", "cc"
    if not os.environ.get("CC") and not any(shutil.which(name) for name in compilers):
        return "it needs a C compiler, install gcc or set CC."
    return "install the Triton that your PyTorch asks for, and Python's headers (python3-dev)."


# ---- what differs from what was tested ----


def _notes(report: dict) -> list[str]:
    """Return one sentence for each difference from what was tested, with what to do."""
    notes = _version_notes(report)
    if report["devices"]:
        notes += [*_versions_on_gpus_notes(report), *_hopper_notes(report), *_gpu_notes(report)]
        notes += _hybrid_notes(report)
    return notes


def _version_notes(report: dict) -> list[str]:
    versions = report["versions"] | report["frameworks"]
    notes = []
    for name in report["untested"]:
        tested = TESTED[name]
        was = "was" if len(tested) == 1 else "were"
        nearest = tested[0] if is_older_than_tested(name, versions[name]) else tested[-1]
        notes.append(
            f"{name} {versions[name]} was not tested ({join_words(tested)} {was}): compare some "
            "steps with the patch and without it, as `liger-kernel compare llama` does for a small "
            "model. If they differ or fail, report it with this output, and install "
            f"{name} {nearest}."
        )
    return notes


def _versions_on_gpus_notes(report: dict) -> list[str]:
    versions = report["versions"]
    only_on_cpus = [
        f"{name} {versions[name]}"
        for name, ran in RAN_ON_GPUS.items()
        if name in versions and name not in report["untested"] and minor(versions[name]) not in ran
    ]
    if not only_on_cpus:
        return []
    return [
        f"The tests pass with {join_words(only_on_cpus)} on CPUs; on GPUs they ran with "
        f"{join_words(_with_versions(RAN_ON_GPUS))}. "
        f"{_what_to_do(report)}"
    ]


def _hopper_notes(report: dict) -> list[str]:
    hopper = report["hopper"]
    if hopper is None or hopper["on"]:
        return []
    return [
        "The kernels for Hopper alone, of the linear head, experts and the gated delta rule, stay "
        f"off: they are for triton {join_words(hopper['triton'])}. Those for any GPU compute the "
        "same: nothing to do."
    ]


def _hybrid_notes(report: dict) -> list[str]:
    """Say where linear attention would run as PyTorch's operations, and what to install."""
    works = all(kernel["works"] for kernel in report["kernels"] if kernel["name"] == DELTA_RULE)
    missing = [name for name in LINEAR_ATTENTION if not installed(name)]
    if works or not missing:
        return []
    return [
        f"Without the kernel {DELTA_RULE}, the linear attention of Qwen3-Next, Qwen3.5 and OLMo "
        "hybrid runs as PyTorch's operations, which take several times as long: pip install "
        f"{' '.join(missing)}."
    ]


def _gpu_notes(report: dict) -> list[str]:
    notes = []
    names = {device["architecture"]: device["name"] for device in report["devices"]}
    for architecture, name in names.items():
        if any(re.search(rf"\b{gpu}\b", name) for gpu in GPUS.get(architecture, ())):
            continue
        compiles = "compile every kernel" if architecture in COMPILED_FOR else "compile no kernel"
        notes.append(
            f"The tests {compiles} for {name} ({architecture}) and have not run on it: they ran on "
            f"{_gpus_run()}. {_what_to_do(report)}"
        )
    return notes


def _what_to_do(report: dict) -> str:
    if report["kernels"] and all(kernel["works"] for kernel in report["kernels"]):
        return "Here each kernel above gave what PyTorch gives: nothing to do."
    return "See above for what does not work here."


def _with_versions(minors: dict[str, tuple[str, ...]]) -> list[str]:
    """Return "triton 3.6 and 3.9" for each library."""
    return [f"{name} {join_words(versions)}" for name, versions in minors.items()]


def _gpus_run() -> str:
    return join_words([gpu for names in GPUS.values() for gpu in names])


# ---- the text ----


def _text(report: dict) -> str:
    package = report["liger_kernel"]
    providers = ", ".join(package["provided_by"])
    remarks = dict.fromkeys(report["untested"], ", not tested")
    remarks |= dict.fromkeys(report["broken"], ", which cannot be imported")

    def with_remarks(versions):
        return [f"{name} {version}{remarks.get(name, '')}" for name, version in versions.items()]

    frameworks = ", ".join(with_remarks(report["frameworks"]))
    lines = [
        f"liger-kernel {package['version']} at {package['path']}",
        f"  from {providers or 'a path, no installed distribution'}",
        *(f"  {library}" for library in with_remarks(report["versions"])),
        f"tested with {', '.join(_with_versions(report['tested']))}",
        f"run on {_gpus_run()} with {', '.join(_with_versions(RAN_ON_GPUS))}, not in every pair",
        f"training frameworks: {frameworks or 'none'}",
    ]
    for number, device in enumerate(report["devices"]):
        lines.append(
            f"device {number}: {device['name']}, {device['architecture']}, "
            f"{device['memory'] / 1e9:.0f} GB"
        )
    if not report["devices"]:
        lines.append(
            "device: CPU only; the operators take their PyTorch reference: "
            "same results, no speed-up"
        )
    if report["triton"] is not None:
        works = report["triton"]["works"]
        lines.append(f"Triton: {'compiles and runs' if works else 'does not work'}")
        for kernel in report["kernels"]:
            lines.append(f"  {kernel['name']}: {'ok' if kernel['works'] else 'FAILS'}")
    lines += ["", *(report["problems"] or ["Nothing to fix."]), *report["notes"]]
    return "\n".join(lines)
