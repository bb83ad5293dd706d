"""What a rewrite is made of. Each has a file of its own, with its `Replacement` and its `Rewrite`;
`engine` has the table.

A rewrite finds modules that may be of its kind, proves that they are (`probe`), and hands the
engine what was proved. The engine makes the module an object of a private subclass with the kind's
members (`private`)."""

from __future__ import annotations

import types

import torch

from liger_kernel.patch.proof import functions, purity


class Replacement:
    """What a module was proved to be: a frozen dataclass, for modules of one class and one kind
    share a subclass."""

    flag: str | None  # the switch that it belongs to; None: it goes with whatever else is replaced
    kernel: str  # what runs instead, in the words of a report
    column: str  # of a table of reports
    method = "forward"  # which is replaced
    guarded = (
        True  # whether the class's own method runs once the module is no longer what was proved
    )
    one_argument = True  # which that method takes
    fusible = (
        False  # whether a compiler does better with the family's code, of a small first argument
    )
    # a function of the first argument: whether it is worth while; if not, nothing else is asked
    pays = None

    @property
    def flags(self) -> tuple[str | None, ...]:
        """Every switch that has made it what it is."""
        return (self.flag,)

    def globals_read(self, cls: type, parts: tuple) -> tuple:
        """What the proof rests on among the globals of functions, as `functions.used_by` lists it:
        those of the method of ``cls``, and of functions in nobody's package that it calls."""
        called = (
            f for *_, f in parts if isinstance(f, types.FunctionType) and not purity.is_released(f)
        )
        return tuple(
            used for f in (getattr(cls, self.method), *called) for used in functions.used_by(f)
        )

    def members(self, cls: type) -> dict:
        """Of the private subclass of the family's ``cls``: the method, and what it needs."""
        raise NotImplementedError


def known_as(module) -> Replacement | None:
    """What a patched module's class was proved to be."""
    return getattr(type(module), "_liger", (None, None))[1]


class Rewrite:
    """How modules of one or more kinds are found, proved and replaced. (``walk`` is the engine's,
    of one model.)"""

    flags: tuple[
        str, ...
    ]  # the switches of its kinds; without any it goes with whatever else is replaced
    known: type = type(None)  # what the module is known as so far

    def may_be(self, module: torch.nn.Module) -> bool:
        """Whether it is worth a proof; if not, nothing is said of the module."""
        raise NotImplementedError

    def prove(self, module: torch.nn.Module, reads) -> Replacement | str:
        """What the module is, or the reason why it is left alone; ``reads`` notes what that rests
        on."""
        raise NotImplementedError

    def proved(self, walk, module):
        """`prove`, and the parts that say so: once for all modules that share them."""
        return walk.proved_once(self.prove, module)

    def name(self, module) -> str:
        """What is replaced, in the words of a report."""
        return type(module).__name__

    def leave(self, walk, module, why: str) -> None:
        walk.leave(self.flags, self.name(module), why)

    def apply(self, walk, module) -> None:
        what, parts = self.proved(walk, module)
        if not isinstance(what, str) and what.flag not in (None, *walk.flags):
            what = f"it computes what is {what.flag}'s"
        if isinstance(what, str):
            self.leave(walk, module, what)
        else:
            walk.become(module, what, parts, self.name(module))
