"""`torch.nn.functional.linear_cross_entropy`: PyTorch's own from 2.13 on, or its Python beside an
older PyTorch.

It is plain Python. For an older PyTorch a directory on the import path holds four files of 2.13:

    pip download --no-deps --dest wheel torch==2.13.0
    unzip wheel/torch-*.whl torch/version.py torch/nn/functional.py
    'torch/nn/modules/linear_cross_entropy*' -d DIR

This is to measure it. Nothing of PyTorch is replaced: only modules that it lacks are found in the
directory."""

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
    """The directory that holds PyTorch, if it has the function."""
    return pathlib.Path(torch.__file__).parents[1] if hasattr(F, NAME) else None


def directory() -> pathlib.Path:
    """The first on the import path that holds the function's files."""
    for path in map(pathlib.Path, sys.path):
        if (path / f"torch/nn/modules/{NAME}.py").exists():
            return path
    raise ModuleNotFoundError(
        f"torch {torch.__version__} has no {NAME}, and --peer-torch names no directory with it"
    )


def version() -> str:
    """Of the PyTorch that the function is from."""
    return runpy.run_path(str(directory() / "torch/version.py"))["__version__"].partition("+")[0]


@functools.cache
def found() -> tuple[Callable, type]:
    """The function, and the class of its options."""
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
