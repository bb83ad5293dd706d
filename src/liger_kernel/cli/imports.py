"""Try to import libraries, in a process of its own: a broken one may end the process."""

from __future__ import annotations

import importlib
import sys

from liger_kernel.cli import _child
from liger_kernel.cli._child import one_line


def imports(spec: dict, report) -> dict:
    for name in spec["names"]:
        report("trying", name=name)
        try:
            importlib.import_module(name)
        except Exception as problem:
            report("broken", problem=f"{type(problem).__name__}: {one_line(problem)}")
    return {}


if __name__ == "__main__":
    sys.exit(_child.serve(imports))
