"""`torch.nn.functional.linear_cross_entropy` of PyTorch 2.13, also beside an older PyTorch.

It is plain Python. For an older PyTorch a directory on the import path holds four files of 2.13:

    pip download --no-deps --dest wheel torch==2.13.0
    unzip wheel/torch-*.whl torch/version.py torch/nn/functional.py -d DIR
    unzip wheel/torch-*.whl 'torch/nn/modules/linear_cross_entropy*' -d DIR

This is to measure it. Nothing of PyTorch is replaced: only modules that it lacks are loaded from
the directory."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import pathlib
import runpy
import sys
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F

NAME = "linear_cross_entropy"


def installed() -> pathlib.Path | None:
    """Return the directory that holds PyTorch, or None if it has no such function."""
    return pathlib.Path(torch.__file__).parents[1] if hasattr(F, NAME) else None


def directory() -> pathlib.Path:
    """Return the first directory of the import path that holds the function's files."""
    for path in map(pathlib.Path, sys.path):
        if (path / f"torch/nn/modules/{NAME}.py").exists():
            return path
    raise ModuleNotFoundError(
        f"torch {torch.__version__} has no {NAME}, and --peer-torch names no directory with it"
    )


def version() -> str:
    """Return the version of the PyTorch that the function is from."""
    return runpy.run_path(str(directory() / "torch/version.py"))["__version__"].partition("+")[0]


@functools.cache
def load() -> tuple[Callable, type]:
    """Return the function, and the class of its options."""
    if installed():
        return getattr(F, NAME), torch.nn.LinearCrossEntropyOptions
    source = directory() / "torch/nn"
    torch.nn.modules.__path__.append(str(source / "modules"))
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    # The file as a whole cannot be loaded a second time: it writes the docstrings of PyTorch's
    # built-in functions.
    tree = ast.parse((source / "functional.py").read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) == NAME]
    names = vars(F) | {module.__name__: module for module in (dataclasses, math, warnings)}
    exec(compile(tree, str(source / "functional.py"), "exec"), names)
    return names[NAME], LinearCrossEntropyOptions
