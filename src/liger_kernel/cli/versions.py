"""Which version of a distribution is installed."""

from __future__ import annotations

import importlib.metadata


def installed(*names: str) -> dict[str, str]:
    """The distributions among ``names`` that are there, with their versions."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
