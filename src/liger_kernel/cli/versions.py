"""Versions of installed distributions."""

from __future__ import annotations

import importlib.metadata


def installed(*names: str) -> dict[str, str]:
    """Return the distributions among ``names`` that are installed, with their versions."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
