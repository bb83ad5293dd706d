#!/usr/bin/env python3
"""Write ``*.pyi`` for names that the package makes or looks up only when they are asked for.

    PYTHONPATH=src python scripts/stubs.py

An alias module's stub reexports its home; the families' functions have the signatures of their rows
in the table.
"""

import inspect
from pathlib import Path

from liger_kernel import _public, transformers
from liger_kernel.patch.families import bound
from liger_kernel.patch.families import published as families

PACKAGE = Path(_public.__file__).parent
HEAD = "# Written by scripts/stubs.py.\n"


def stubs() -> dict[str, str]:
    """Return the text of each stub by its path below the package."""
    texts = {f"{name.replace('.', '/')}.pyi": alias(home) for name, home in _public.HOMES.items()}
    for family in _public.FORWARDS:
        texts[f"transformers/model/{family}.pyi"] = forwards(family)
    texts["transformers/__init__.pyi"] = lazy_names()
    texts["ops/__init__.pyi"] = reexports(_public.homes("ops") | {"GrpoLossFunction": "grpo_loss"})
    texts["ops/functional.pyi"] = reexports(_public.homes("functional"))
    texts["patch/families/published.pyi"] = functions()
    return {path: f"{HEAD}{text}" for path, text in sorted(texts.items())}


def alias(home: str) -> str:
    text = f"from liger_kernel.{home} import *\n"
    if home == "patch.families.published":  # a star leaves these out
        for name in ("_apply_liger_kernel", "_apply_liger_kernel_to_instance"):
            text += f"from liger_kernel.{home} import {name} as {name}\n"
    return text


def reexports(homes: dict[str, str]) -> str:
    lines = [
        f"from liger_kernel.ops.{home} import {name} as {name}"
        for name, home in sorted(homes.items())
    ]
    return "\n".join([*lines, "", f"__all__ = {sorted(homes)!r}".replace("'", '"'), ""])


def forwards(family: str) -> str:
    names = list(_public.FORWARDS[family])
    if family in bound.FAMILIES_WITH_LOSS:
        names.append(bound.LOSS_FUNCTION)
    lines = [f"def {name}(self: Any, *args: Any, **kwargs: Any) -> Any: ..." for name in names]
    return "\n".join(["from typing import Any", "", *lines, ""])


def lazy_names() -> str:
    homes = {**transformers._OPERATORS, **transformers._NEED_TRANSFORMERS}
    lines = [f"from {home} import {name} as {name}" for name, home in sorted(homes.items())]
    return "\n".join([*lines, "", "def is_transformers_available() -> bool: ...", ""])


def functions() -> str:
    lines = [
        "from collections.abc import Callable, Iterable",
        "",
        "import torch",
        "",
        "from liger_kernel.patch.proof.report import Report",
        "",
        "FAMILIES: dict[str, dict[str, bool]]",
        "ALL_SWITCHES: dict[str, bool]",
        "MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Callable[..., Report]]",
        "FAMILY_FUNCTIONS: dict[str, Callable[..., Report]]",
        "",
    ]
    lines.append(stub("apply_liger_kernel", with_switches(families.apply_liger_kernel)))
    for name in (
        "apply_liger_kernel_to_trl",
        "revert",
        "_apply_liger_kernel",
        "_apply_liger_kernel_to_instance",
    ):
        lines.append(stub(name, inspect.signature(getattr(families, name))))
    for name, function in sorted(families.FAMILY_FUNCTIONS.items()):
        lines.append(stub(name, inspect.signature(function)))
    return "\n".join([*lines, ""])


def with_switches(function) -> inspect.Signature:
    """Return the signature with a keyword for each switch in place of ``**switches``.

    So a type checker finds a switch that does not exist.
    """
    signature = inspect.signature(function)
    *parameters, switches = signature.parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    for name in families.ALL_SWITCHES:
        parameters.append(
            inspect.Parameter(name, keyword, annotation=switches.annotation, default=None)
        )
    return signature.replace(parameters=parameters)


def stub(name: str, signature: inspect.Signature) -> str:
    parameters = str(signature.replace(return_annotation=inspect.Signature.empty))[1:-1]
    parameters = parameters.replace("'", "")
    line = f"def {name}({parameters}) -> {signature.return_annotation}: ..."
    if len(line) <= 120:
        return line
    return "\n".join(
        [f"def {name}(", f"    {parameters}", f") -> {signature.return_annotation}: ..."]
    )


if __name__ == "__main__":
    for path, text in stubs().items():
        (PACKAGE / path).parent.mkdir(exist_ok=True)
        (PACKAGE / path).write_text(text)
