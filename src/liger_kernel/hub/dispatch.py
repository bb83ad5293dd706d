"""Which forward a module runs once `kernels` has given it a layer's: our kernel's, or its own.

`kernels` matches a layer to a class by name and signature alone. Here a module is proved when it is
called first, as a patched one is (`liger_kernel.patch`), and its parts are compared again at every
call. If it is not proved to compute what the layer does, its own forward runs. That is its class's:
`kernels` sets the layer's on the object."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from liger_kernel.patch.proof.functions import globals_unchanged, globals_used
from liger_kernel.patch.proof.parts import ReadRecorder, module_signature, unchanged


class Proof(NamedTuple):
    """The result of a proof of a module, and what it rests on."""

    cls: type
    # the forward of the class
    class_forward: Callable
    # ours; None: the module does not compute what the layer does
    fused_forward: Callable | None
    # the module's parts that were read
    parts: tuple
    # returns True while the globals that the class's forward reads are what they were
    same_globals: Callable[[], bool] | None

    def holds_for(self, module) -> bool:
        if self.same_globals is not None and not self.same_globals():
            return False
        return unchanged(module, self.parts)


# by layer: module -> Proof
_proof_of_module: dict[tuple, weakref.WeakKeyDictionary] = {}
# by layer, signature of the module and forward of its class
_proofs: dict[tuple, list[Proof]] = {}


def choose_forward(layer, module: torch.nn.Module) -> Callable:
    """Return the forward to call with a module.

    In a graph of torch.compile it is the module's own: a compiler fuses that with its neighbours.

    Args:
        layer: an object with ``prove(module, reads)``, which returns what the module computes or
            why that is not known, and ``forward(replacement, cls)``, which returns the forward for
            it, or None if it is not the layer's kind.
        module: a module to which `kernels` has bound the layer.
    """
    cls = type(module)
    if torch.compiler.is_compiling():
        return cls.forward
    proofs = _proof_of_module.setdefault(layer, weakref.WeakKeyDictionary())
    proof = proofs.get(module)
    if proof is None or proof.cls is not cls or proof.class_forward is not cls.forward:
        proofs[module] = proof = _find_proof(layer, module)
    if proof.fused_forward is not None and proof.holds_for(module):
        return proof.fused_forward
    return proof.class_forward


def _find_proof(layer, module) -> Proof:
    """Return a proof that holds for the module: one of a module like it, or a new one."""
    key = layer, module_signature(module), type(module).forward
    proofs = _proofs.setdefault(key, [])
    for proof in proofs:
        if proof.holds_for(module):
            return proof
    # no lock: a proof may call modules that are to be proved
    proof = _run_in_thread(_prove, layer, module)
    proofs.append(proof)
    return proof


def _prove(layer, module) -> Proof:
    cls, reads = type(module), ReadRecorder()
    replacement = layer.prove(module, reads)
    fused_forward = None
    if not isinstance(replacement, str):
        fused_forward = layer.forward(replacement, cls)
    same_globals = globals_unchanged(globals_used(cls.forward))
    return Proof(cls, cls.forward, fused_forward, reads.parts(), same_globals)


def _run_in_thread(function, *args):
    """Run a function in a thread of its own.

    A first call may be within a checkpoint, a mode, autocast or a transform of functions.
    """
    outcomes = []

    def run():
        try:
            outcomes.append((function(*args), None))
        except BaseException as error:
            outcomes.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((result, error),) = outcomes
    if error is not None:
        raise error
    return result
