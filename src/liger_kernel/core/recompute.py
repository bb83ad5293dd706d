"""Tensors that backward recomputes from others that are saved in any case: norms, from the rows
that they normalise.

Within a checkpoint (`checkpoint.offload_inputs`) a layer's norms register how they were computed.
Functions of ours that would save such a tensor for backward save what it is computed from instead.
Nobody outside the checkpoint can get hold of such a tensor; a forward hook or the layer's own code
can. So a registration does not count if a tensor was written to since, or if a hook may change the
gradient; a copy or a view has none. When the layer's forward ends, its registrations are dropped,
so that the recomputation registers the same ones.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import NamedTuple

import torch

_thread = threading.local()  # .registered: id of a tensor -> (weak reference to it, its Recompute)


class Recompute(NamedTuple):
    """The computation of a tensor: ``fn(*tensors, *options)``.

    Each of its rows depends on the first tensor by that row alone, and has its dtype.
    """

    fn: object
    tensors: tuple[torch.Tensor | None, ...]
    options: tuple = ()
    versions: tuple[int, ...] = ()

    def __call__(self, *tensors):
        return self.fn(*tensors, *self.options)

    def without_tensors(self):
        """Return a copy for a graph's node, which has to keep tensors by `save_for_backward`."""
        return self._replace(tensors=())


@contextlib.contextmanager
def recompute_scope():
    """A context in which this thread registers what `mark_recomputable` is called with."""
    outer = getattr(_thread, "registered", None)
    _thread.registered = {}
    try:
        yield
    finally:
        _thread.registered = outer


def _registered():
    """Return this thread's registrations; None outside a scope, and within torch.compile."""
    return None if torch.compiler.is_compiling() else getattr(_thread, "registered", None)


def in_recompute_scope() -> bool:
    """Return True if this thread is within `recompute_scope`, and in no graph of torch.compile."""
    return _registered() is not None


def mark_recomputable(y, fn, *tensors, options=()):
    """Register, within a `recompute_scope`, that y is ``fn(*tensors, *options)``. Returns y."""
    registered = _registered()
    if registered is not None and y.requires_grad:
        key = id(y)
        reference = weakref.ref(y, lambda _: registered.pop(key, None))
        registered[key] = reference, Recompute(fn, tensors, options, _versions(y, *tensors))
    return y


def get_recompute(y) -> Recompute | None:
    """Return how to compute y as it is now, or None if that is not registered or no longer true."""
    registered = _registered()
    entry = registered.get(id(y)) if registered else None
    if entry is None:
        return None
    reference, recompute = entry
    if reference() is not y or y._backward_hooks:
        return None
    if recompute.versions != _versions(y, *recompute.tensors):
        return None
    return recompute


def _versions(*tensors):
    return tuple(t._version for t in tensors if t is not None)
