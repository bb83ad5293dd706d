"""The two classes that every rewrite consists of: `Rewrite` and `Replacement`.

Each rewrite has a file of its own in `patch/layers` or `patch/loss`; `patch/engine` has the table
of all. Its `Rewrite` finds the modules that it could apply to and proves what they compute
(`probe`). The result of a proof is a `Replacement`: which operator runs instead, and with which
options. The engine then makes the module an object of a private subclass with the replacement's
members (`private`)."""

from __future__ import annotations

import types

import torch

from liger_kernel.patch.proof import functions, purity


class Replacement:
    """Result of a proof: what a module computes, and methods that compute it with our operators.

    A subclass is a frozen dataclass: modules of one class with equal replacements share a private
    subclass."""

    # The switch of `apply_liger_kernel` that it belongs to. None: replaced under any switch.
    flag: str | None
    # What runs instead, in the words of a report.
    kernel: str
    # The column of a table of reports.
    column: str
    # The method that is replaced.
    method = "forward"
    # True: the class's own method runs as soon as the module is no longer what was proved.
    guarded = True
    # True if the method takes one argument beside ``self``.
    takes_one_argument = True
    # True if, for a small first argument, a compiler does better with the family's own code.
    fusible = False
    # True if its forward calls `layers.adapters.adopt`, and so finds LoRA layers that come later.
    adopts_adapters = False
    # A function of the first argument that returns True if our operator is worth while. If it
    # returns False, nothing else is checked. None: always worth while.
    worthwhile = None

    @property
    def flags(self) -> tuple[str | None, ...]:
        """All switches that contributed to it."""
        return (self.flag,)

    def globals_read(self, cls: type, parts: tuple) -> tuple:
        """List the globals that the proof rests on, in the form of `functions.globals_used`.

        These are the globals of the method of ``cls``, and of the user's functions among the parts,
        which that method calls."""
        user_functions = (
            value
            for *_, value in parts
            if isinstance(value, types.FunctionType) and not purity.is_released_code(value)
        )
        used = []
        for function in (getattr(cls, self.method), *user_functions):
            used += functions.globals_used(function)
        return tuple(used)

    def class_members(self, cls: type) -> dict:
        """Return the members of the private subclass of ``cls``: the method, and what it needs."""
        raise NotImplementedError


def replacement_of(module) -> Replacement | None:
    """Return what a patched module was proved to be, or None if the module is not patched."""
    return getattr(type(module), "_liger", (None, None))[1]


class Rewrite:
    """Finds modules of one or more kinds, proves what they compute, and replaces them.

    ``walk`` is the engine's `Walk` over one model."""

    # The switches of its replacements. Without any it applies under any switch.
    flags: tuple[str, ...]
    # The types that `replacement_of` the module must have; by default that of an unpatched one.
    applies_to: type | tuple[type, ...] = type(None)

    def could_apply(self, module: torch.nn.Module) -> bool:
        """Return True if the module is worth a proof. Otherwise the report does not mention it."""
        raise NotImplementedError

    def prove(self, module: torch.nn.Module, reads) -> Replacement | str:
        """Return what the module computes, or the reason why it is left alone.

        ``reads`` is a `parts.ReadRecorder` that records what the result rests on."""
        raise NotImplementedError

    def prove_once(self, walk, module) -> tuple[Replacement | str, tuple]:
        """Return the result of `prove`, and the parts that it rests on.

        Modules that share them are proved once."""
        return walk.prove_once(self.prove, module)

    def name(self, module) -> str:
        """Name what is replaced, in the words of a report."""
        return type(module).__name__

    def leave_alone(self, walk, module, reason: str) -> None:
        walk.leave_alone(self.flags, self.name(module), reason)

    def apply(self, walk, module) -> None:
        """Replace the module, or record why it is left alone."""
        result, parts = self.prove_once(walk, module)
        if isinstance(result, str):
            self.leave_alone(walk, module, result)
        elif result.flag not in (None, *walk.flags_on):
            self.leave_alone(walk, module, f"it computes what is {result.flag}'s")
        else:
            walk.convert(module, result, parts, self.name(module))
