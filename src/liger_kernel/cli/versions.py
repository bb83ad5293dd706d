"""Versions and GPUs that this package was tested with, and versions that are installed.

docs/index.md, README.md, the Makefile, .github/workflows and the targets that the tests compile for
say the same: tests/house/test_versions.py.
"""

from __future__ import annotations

import importlib.metadata

# minor versions that the test suite runs on, without a GPU, oldest first
TESTED = {
    "python": ("3.11", "3.12"),
    "torch": ("2.11", "2.13", "2.14", "2.15"),
    "triton": ("3.6", "3.7", "3.8", "3.9"),
    "transformers": ("5.17", "5.24"),
    "trl": ("1.12", "1.16"),
    "peft": ("0.21",),
    "bitsandbytes": ("0.50",),
}
# of these, the versions that tests and measurements ran with on GPUs, and the GPUs, by
# architecture; with Triton 3.7 and 3.9 operators and losses on an H200
RAN_ON_GPUS = {"torch": ("2.11",), "triton": ("3.6", "3.7", "3.9"), "transformers": ("5.17",)}
GPUS = {"sm_90": ("H100", "H200")}
# architectures that every kernel is compiled for, without the hardware
COMPILED_FOR = (
    *("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
    *("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"),
)


def installed(*names: str) -> dict[str, str]:
    """Return the distributions among ``names`` that are installed, with their versions."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def minor(version: str) -> str:
    """Return "2.15" of "2.15.0.dev20261101+cpu"."""
    return ".".join(version.split(".")[:2])


def untested(versions: dict[str, str]) -> list[str]:
    """Return the libraries of `TESTED` with a minor version that the suite does not run on."""
    return [
        name for name in TESTED if name in versions and minor(versions[name]) not in TESTED[name]
    ]


def is_older_than_tested(name: str, version: str) -> bool:
    return _numbers(minor(version)) < _numbers(TESTED[name][0])


def _numbers(minor_version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in minor_version.split(".") if number.isdigit())


def join_words(words) -> str:
    """Return "a, b and c"."""
    *words, last = words
    return f"{', '.join(words)} and {last}" if words else last
