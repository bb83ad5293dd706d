"""Lines that fit the terminal. A file or a pipe has no width, unless COLUMNS gives one."""

from __future__ import annotations

import shutil
import textwrap


def width() -> int:
    return shutil.get_terminal_size((10_000, 24)).columns


def wrapped(text: str) -> str:
    """Return the text with long lines broken, and their parts indented by two more columns."""
    return "\n".join(map(_wrap_line, text.split("\n")))


def _wrap_line(line: str) -> str:
    if len(line) <= width():
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
