"""Tensors that backward makes again, from others that are kept in any case: norms, from the rows that they normalise.

Within a checkpoint (`checkpoint.offloaded`) a layer's norms note how they were made. Functions of ours that keep their
input for backward keep that instead. Nobody outside the checkpoint can get hold of such an input; a forward hook or the
layer's own code can. So the note does not count if it was written to since, nor does that of a copy or a view.
"""

from __future__ import annotations

import contextlib
import threading
from typing import NamedTuple

import torch

_thread = threading.local()


class Recipe(NamedTuple):
    """``make(*tensors, *options)``. A row of it depends on the first tensor by that row alone, and has its dtype."""

    make: object
    tensors: tuple[torch.Tensor | None, ...]
    options: tuple = ()
    versions: tuple[int, ...] = ()

    def __call__(self, *tensors):
        return self.make(*tensors, *self.options)

    def without_tensors(self):
        """For a graph's node, which has to keep them by `save_for_backward`."""
        return self._replace(tensors=())


@contextlib.contextmanager
def noting():
    """Notes count in this thread."""
    before, _thread.on = getattr(_thread, "on", False), True
    try:
        yield
    finally:
        _thread.on = before


def note(y, make, *tensors, options=()):
    """-> y, which is ``make(*tensors, *options)``."""
    if getattr(_thread, "on", False) and y.requires_grad:
        y._liger_recipe = Recipe(make, tensors, options, _versions(y, *tensors))
    return y


def recipe(y) -> Recipe | None:
    """How to make y, as it is now."""
    found = y.__dict__.get("_liger_recipe")
    if found is None or not getattr(_thread, "on", False):
        return None
    return found if found.versions == _versions(y, *found.tensors) else None


def _versions(*tensors):
    return tuple(t._version for t in tensors if t is not None)
