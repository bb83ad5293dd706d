"""Lines that fit the terminal. What goes into a file or a pipe is not wrapped, unless COLUMNS says
how wide it is."""

from __future__ import annotations

import shutil
import textwrap


def width() -> int:
    return shutil.get_terminal_size((10_000, 24)).columns


def wrapped(text: str) -> str:
    """Each line that is too long goes on in the next, two columns further in than it began."""
    return "\n".join(map(_wrapped, text.split("\n")))


def _wrapped(line: str) -> str:
    if len(line) <= width():
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
