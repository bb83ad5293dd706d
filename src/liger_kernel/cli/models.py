"""List the model families that can be patched, and the kernels of each."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json

from liger_kernel.cli._child import BadInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON: family -> kernel -> whether it is on by default")


def run(args: argparse.Namespace) -> int:
    switches = families()
    if args.json:
        print(json.dumps(switches, indent=2))
        return 0
    columns = list(dict.fromkeys(kernel for kernels in switches.values() for kernel in kernels))
    width = max(map(len, switches)) + 2
    print(" " * width + "  ".join(columns))
    for family, kernels in switches.items():
        cells = ({None: "", True: "on", False: "off"}[kernels.get(c)].ljust(len(c)) for c in columns)
        print((family.ljust(width) + "  ".join(cells)).rstrip())
    print(
        f"\n{len(switches)} families. A kernel is on or off by default; nothing stands where a family has no such part."
    )
    return 0


def families() -> dict[str, dict[str, bool]]:
    """Each model type's kernels: switch -> whether it is on by default."""
    if importlib.util.find_spec("transformers") is None:
        raise BadInput(
            "models lists families of transformers, which is missing: pip install 'liger-kernel[transformers]'"
        )
    from liger_kernel.transformers import families as table

    return {
        name: {p.name: p.default for p in inspect.signature(fn).parameters.values() if isinstance(p.default, bool)}
        for name, fn in sorted(table.MODEL_TYPE_TO_APPLY_LIGER_FN.items())
    }
