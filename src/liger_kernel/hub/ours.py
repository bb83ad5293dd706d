"""Which forward a module runs once `kernels` has given it a layer's: ours where it is proved,
otherwise its own.

`kernels` matches a layer to a class by name and signature alone. Here a module is proved when it is
called first, as a patched one is (`liger_kernel.patch`), and its parts are compared again at every
call. Its own forward is its class's: `kernels` sets the other one on the object."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from liger_kernel.patch.proof.functions import same_globals, used_by
from liger_kernel.patch.proof.parts import Reads, outline, unchanged


class Bound(NamedTuple):
    """What was found out about a module: its class and that one's forward, ours if there is one,
    and what this rests on."""

    cls: type
    own: Callable
    ours: Callable | None
    parts: tuple
    same: Callable[[], bool] | None

    def holds_for(self, module) -> bool:
        return (self.same is None or self.same()) and unchanged(module, self.parts)


_bound: dict[tuple, weakref.WeakKeyDictionary] = {}  # for a layer: module -> Bound
_proofs: dict[tuple, list[Bound]] = {}  # for a layer and modules of one outline


def forward_of(layer, module: torch.nn.Module) -> Callable:
    """-> the forward to call with the module.

    ``layer`` has ``prove(module, reads)`` and ``forward(what, cls)``, which is None for what is not
    its kind. In a graph of torch.compile the module's own forward runs: a compiler fuses it with
    its neighbours."""
    cls = type(module)
    if torch.compiler.is_compiling():
        return cls.forward
    known = _bound.setdefault(layer, weakref.WeakKeyDictionary())
    found = known.get(module)
    if found is None or found.cls is not cls or found.own is not cls.forward:
        known[module] = found = _find(layer, module)
    if found.ours is not None and found.holds_for(module):
        return found.ours
    return found.own


def _find(layer, module) -> Bound:
    proofs = _proofs.setdefault((layer, outline(module), type(module).forward), [])
    for found in proofs:
        if found.holds_for(module):
            return found
    found = _in_a_thread(
        _prove, layer, module
    )  # no lock: a proof may call modules that are to be proved
    proofs.append(found)
    return found


def _prove(layer, module) -> Bound:
    cls, reads = type(module), Reads()
    what = layer.prove(module, reads)
    ours = None if isinstance(what, str) else layer.forward(what, cls)
    return Bound(cls, cls.forward, ours, reads.parts(), same_globals(used_by(cls.forward)))


def _in_a_thread(function, *args):
    """In a thread of its own: a first call may be within a checkpoint, a mode, autocast or a
    transform of functions."""
    out = []

    def run():
        try:
            out.append((function(*args), None))
        except BaseException as error:
            out.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((result, error),) = out
    if error is not None:
        raise error
    return result
