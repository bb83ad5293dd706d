"""Which arguments of a model's call are this package's options, and which are its forward's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType

from liger_kernel.patch.loss.causal_lm import LOSS_OPTIONS
from liger_kernel.patch.proof.functions import is_filled, wrapped_functions

SKIP_LOGITS = "skip_logits"


@dataclass(frozen=True)
class Arguments:
    """The arguments that a class's forward takes, and those of a call that are options of ours.

    A forward that somebody else wrote is given all that it can take. An option is ours if that
    forward cannot take it, or if the code of its class does not name it. With ``**kwargs`` it gets
    our options, too: one of the loss counts if the forward hands it on to the loss function."""

    # its arguments by position; for ``*args``, those of the forward that it overrides
    by_position: tuple[str, ...]
    # its arguments by name
    named: frozenset[str]
    # True: it has to be called by position
    takes_args: bool
    # True: it takes ``**kwargs``
    takes_kwargs: bool
    # True: transformers wrote it
    is_transformers: bool
    # the names of options of ours
    option_names: frozenset[str]

    @classmethod
    def of(cls, model_class: type, forward: Callable) -> Arguments:
        """Return the arguments of ``forward``, that of ``model_class``."""
        parameters = _parameters(forward)
        kinds = {p.kind for p in parameters}
        released = is_transformers(forward)
        takes_kwargs = inspect.Parameter.VAR_KEYWORD in kinds
        named = frozenset(
            p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        )
        family_names = named
        if takes_kwargs and not released:
            family_names = named | _words(model_class)
        return cls(
            by_position=tuple(_names_by_position(model_class, forward)),
            named=named,
            takes_args=bool(
                kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}
            ),
            takes_kwargs=takes_kwargs,
            is_transformers=released,
            option_names=frozenset(LOSS_OPTIONS | {SKIP_LOGITS}) - family_names,
        )

    @property
    def passes_kwargs_on(self) -> bool:
        """True if ``**kwargs`` are for it to use, and to hand on to the loss function."""
        return self.takes_kwargs and not self.is_transformers

    @property
    def fills_labels(self) -> bool:
        """True if ``shift_labels`` alone ask for a loss: they are given as ``labels``, too."""
        return not (self.passes_kwargs_on or self.takes_args or "shift_labels" in self.named)

    def by_name(self, model, args, kwargs) -> dict:
        """Return all arguments of a call by name, as far as the names are known.

        Raises:
            TypeError: there are too many, or one is given twice.
        """
        names = self.by_position
        if len(args) > len(names) and not self.takes_args:
            raise TypeError(
                f"{type(model).__name__}.forward takes {len(names)} arguments by position, not "
                f"{len(args)}"
            )
        twice = [name for name in names[: len(args)] if name in kwargs]
        if twice and not self.takes_args:
            raise TypeError(f"{type(model).__name__}.forward got {', '.join(twice)} twice")
        return {**dict(zip(names, args, strict=False)), **kwargs}


def _parameters(forward) -> list[inspect.Parameter]:
    return list(inspect.signature(forward).parameters.values())[1:]


def is_transformers(forward: Callable) -> bool:
    """Return True if transformers, or torch, wrote a forward and whatever wraps it."""
    for function in wrapped_functions(forward):
        module = function.__globals__.get("__name__") or ""
        if not module.startswith(("transformers.", "torch.")):
            return False
    return True


def _names_by_position(model_class, forward) -> list[str]:
    parameters = _parameters(forward)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return names
    for base in model_class.__mro__:
        overridden = vars(base).get("forward")
        if overridden is None or overridden is forward or not is_transformers(overridden):
            continue
        overridden_names = _names_by_position(model_class, overridden)
        if overridden_names[: len(names)] == names:
            return names + overridden_names[len(names) :]
        return names + overridden_names
    return names


def _words(model_class) -> set[str]:
    """Return the names and strings in the code of a model's classes that are not transformers'."""
    words = set()
    codes = []
    for base in model_class.__mro__:
        if base.__module__.partition(".")[0] in ("transformers", "torch", "builtins"):
            continue
        for member in vars(base).values():
            words.update(_strings(member))
            method = getattr(member, "__func__", getattr(member, "fget", member))
            for function in wrapped_functions(method):
                codes.append((function.__code__, function.__globals__))
                for cell in filter(is_filled, function.__closure__ or ()):
                    words.update(_strings(cell.cell_contents))
    while codes:
        code, module_globals = codes.pop()
        words.update(code.co_names, code.co_varnames, code.co_freevars)
        for const in code.co_consts:
            words.update(_strings(const))
            if isinstance(const, CodeType):
                codes.append((const, module_globals))
        for name in code.co_names:
            words.update(_strings(module_globals.get(name)))
    return words


def _strings(value) -> list[str]:
    """Return the strings that a value is or holds: the keywords of a call are a tuple."""
    values = value if isinstance(value, (tuple, list, set, frozenset, dict)) else (value,)
    return [item for item in values if isinstance(item, str)]


def with_skip_logits(signature: inspect.Signature, is_transformers=True) -> inspect.Signature:
    """Return the signature of a patched forward.

    If transformers wrote the forward, it takes the arguments of the loss, too. Trainers look for
    ``**kwargs``, to know whether the loss is divided by ``num_items_in_batch``.
    """
    parameters = list(signature.parameters.values())
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    var_keyword = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    if is_transformers:
        var_keyword = [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
    if SKIP_LOGITS not in signature.parameters:
        named.append(
            inspect.Parameter(
                SKIP_LOGITS, inspect.Parameter.KEYWORD_ONLY, default=None, annotation="bool | None"
            )
        )
    return signature.replace(parameters=[*named, *var_keyword])
