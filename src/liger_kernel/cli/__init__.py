"""The command line: ``liger-kernel compare | doctor | models | plan``.

Exit codes: 0 fine, 1 the answer is bad news (the losses differ, something is broken), 2 the input
cannot be used, 3 a process that we started ended without a result, 130 interrupted, 141 nobody
reads the output any more. Nothing here imports torch before a command needs it.
"""

from __future__ import annotations

import argparse
import os
import sys

from liger_kernel._version import __version__
from liger_kernel.cli import compare, doctor, models, plan
from liger_kernel.cli._child import BadInput, Crash


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise BadInput(message)


def parser() -> argparse.ArgumentParser:
    root = _Parser(
        "liger-kernel",
        description="Kernels that make training of large language models faster and smaller.",
    )
    root.add_argument("--version", action="version", version=f"liger-kernel {__version__}")
    commands = root.add_subparsers(metavar="command")
    for name, module, usage in (
        ("compare", compare, "MODEL ..."),
        ("doctor", doctor, "[--json]"),
        ("models", models, "[TYPE ...]"),
        ("plan", plan, "MODEL ..."),
    ):
        summary = module.__doc__.partition("\n")[0]
        command = commands.add_parser(
            name, help=summary, description=summary, usage=f"liger-kernel {name} {usage}"
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return root


def main(argv: list[str] | None = None) -> int:
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()  # here, where an error can still be caught
    except BrokenPipeError:  # as from `| head`
        # Python flushes stdout once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _main(argv: list[str] | None) -> int:
    try:
        root = parser()
        args = root.parse_args(argv)
        if "run" not in args:
            root.print_help()
            return 0
        return args.run(args)
    except BadInput as problem:
        print(f"liger-kernel: {problem}", file=sys.stderr)
        return 2
    except Crash as problem:
        print(f"liger-kernel: {problem}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
