"""Which forward a module runs once `kernels` has given it a layer's: our kernel's, or its own.

`kernels` matches a layer to a class by name and signature alone. Here a module is proved when it is
called first, as a patched one is (`liger_kernel.patch`): its code is read, then it is tried. Its
parts and its code are compared again at every call. If it is not proved to compute what the layer
does, its own forward runs. That is its class's: `kernels` sets the layer's on the object."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from liger_kernel.core.devices import in_user_mode
from liger_kernel.patch.proof import purity
from liger_kernel.patch.proof.parts import ReadRecorder, module_signature, unchanged
from liger_kernel.patch.proof.private import code_check, is_patched


class Proof(NamedTuple):
    """The result of a proof of a module, and what it rests on."""

    cls: type
    # the forward of the class
    class_forward: Callable
    # ours, or None
    fused_forward: Callable | None = None
    # the kernel that ours calls, or why there is none
    description: str = ""
    # the module's parts that were read
    parts: tuple = ()
    # returns True while the code, and the globals that it reads, are what they were
    same_code: Callable[[], bool] | None = None

    def holds_for(self, module) -> bool:
        if self.same_code is not None and not self.same_code():
            return False
        return unchanged(module, self.parts)


# by kind: module -> Proof
_proof_of_module: dict[object, weakref.WeakKeyDictionary] = {}
# by kind, signature of the module and forward of its class
_proofs: dict[tuple, list[Proof]] = {}


def choose_forward(kind, module: torch.nn.Module) -> Callable:
    """Return the forward to call with a module to which `kernels` has bound a layer.

    It is the module's own in a graph of torch.compile, since a compiler fuses that with its
    neighbours; in a mode of the user's, which has to see PyTorch's own functions; and if the module
    is patched.

    Args:
        kind: an object with ``prove(module, reads)``, which returns a `Replacement` or why it is
            not known what the module computes, and ``forward(replacement, cls)``, which returns
            the forward for modules of a class, or None if they are of another kind.
    """
    cls = type(module)
    if torch.compiler.is_compiling() or in_user_mode() or is_patched(module):
        return cls.forward
    proofs = _proof_of_module.setdefault(kind, weakref.WeakKeyDictionary())
    proof = proofs.get(module)
    if proof is None or proof.cls is not cls or proof.class_forward is not cls.forward:
        proof = _find_proof(kind, module)
        if proof is None:
            return cls.forward
        proofs[module] = proof
    if proof.fused_forward is not None and proof.holds_for(module):
        return proof.fused_forward
    return proof.class_forward


def _find_proof(kind, module) -> Proof | None:
    """Return a proof that holds for the module, of a module like it or a new one.

    Returns None if something around the module keeps it from being tried, such as hooks on its
    activation. They may be gone at its next call.
    """
    cls = type(module)
    key = kind, module_signature(module), cls.forward
    proofs = _proofs.setdefault(key, [])
    for proof in proofs:
        if proof.holds_for(module):
            return proof
    reason = purity.reason_unprovable(module, children=False)
    if reason is not None:
        proofs.append(Proof(cls, cls.forward, None, reason))
        return proofs[-1]
    if purity.reason_unprovable(module) is not None:
        return None
    # no lock: a proof may call modules that are to be proved
    proof = _run_in_thread(_try, kind, module)
    proofs.append(proof)
    return proof


def _try(kind, module) -> Proof:
    cls = type(module)
    reads = ReadRecorder()
    replacement = kind.prove(module, reads)
    parts = reads.parts()
    if isinstance(replacement, str):
        return Proof(cls, cls.forward, None, replacement, parts)
    reason = purity.reason_called_unprovable(module, parts)
    if reason is not None:
        return Proof(cls, cls.forward, None, reason, parts)
    fused_forward = kind.forward(replacement, cls)
    if fused_forward is None:
        return Proof(cls, cls.forward, None, f"it computes {replacement.kernel}", parts)
    same_code = code_check(cls.forward, replacement.globals_read(cls, parts))
    return Proof(cls, cls.forward, fused_forward, replacement.kernel, parts, same_code)


def describe_choice(kind, module: torch.nn.Module) -> str:
    """Return the name of the kernel that the module's next call runs, or why it runs none."""
    if is_patched(module):
        return "its own forward: it is patched"
    proof = _proof_of_module.get(kind, {}).get(module)
    if proof is None:
        return "not tried yet"
    if proof.fused_forward is None:
        return f"its own forward: {proof.description}"
    if proof.class_forward is type(module).forward and proof.holds_for(module):
        return proof.description
    return "its own forward: it has changed since it was tried"


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
