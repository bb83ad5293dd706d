"""Tensors that backward makes again, from others that are kept in any case: norms, from the rows
that they normalise.

Within a checkpoint (`checkpoint.offloaded`) a layer's norms note how they were made. Functions of
ours that keep their input for backward keep that instead. Nobody outside the checkpoint can get
hold of such an input; a forward hook or the layer's own code can. So a note does not count if a
tensor was written to since, or if a hook may change the gradient; a copy or a view has none. When
the layer is left its notes are gone, so that it is made again with the same ones."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import NamedTuple

import torch

_thread = threading.local()  # .notes: id of a tensor -> (weak reference to it, its recipe)


class Recipe(NamedTuple):
    """``make(*tensors, *options)``. A row of it depends on the first tensor by that row alone, and
    has its dtype."""

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
    """Within, in this thread, what is made is noted."""
    before, _thread.notes = getattr(_thread, "notes", None), {}
    try:
        yield
    finally:
        _thread.notes = before


def is_noting() -> bool:
    """Whether this thread is within `noting`, and in no graph of torch.compile."""
    return not torch.compiler.is_compiling() and getattr(_thread, "notes", None) is not None


def note(y, make, *tensors, options=()):
    """-> y, which is ``make(*tensors, *options)``."""
    notes = None if torch.compiler.is_compiling() else getattr(_thread, "notes", None)
    if notes is not None and y.requires_grad:
        key = id(y)
        gone = weakref.ref(y, lambda _: notes.pop(key, None))
        notes[key] = gone, Recipe(make, tensors, options, _versions(y, *tensors))
    return y


def recipe(y) -> Recipe | None:
    """How to make y, as it is now."""
    notes = None if torch.compiler.is_compiling() else getattr(_thread, "notes", None)
    known, found = notes.get(id(y), (None, None)) if notes else (None, None)
    if (
        found is None
        or known() is not y
        or y._backward_hooks
        or found.versions != _versions(y, *found.tensors)
    ):
        return None
    return found


def _versions(*tensors):
    return tuple(t._version for t in tensors if t is not None)
