"""Which arguments of a model's call are this package's options, and which are its forward's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType

from liger_kernel.patch.loss.causal_lm import OPTIONS
from liger_kernel.patch.proof.functions import _filled, layers

SKIP = "skip_logits"


@dataclass(frozen=True)
class Arguments:
    """What a class's forward takes, and which arguments of a call are options of ours.

    A forward that somebody else wrote is given all that it can take. An option of ours is what it
    cannot take; or what the code of its class does not name, and what it hands on to the loss
    function if it is an option of the loss."""

    by_place: tuple[
        str, ...
    ]  # what it takes by position; of ``*args``, what the forward that it overrides takes
    named: frozenset[str]
    takes_args: bool
    takes_more: bool
    released: bool  # by transformers
    ours: frozenset[str]

    @classmethod
    def of(cls, model_class: type, forward: Callable) -> Arguments:
        parameters = _parameters(forward)
        kinds = {p.kind for p in parameters}
        released = is_transformers(forward)
        takes_more = inspect.Parameter.VAR_KEYWORD in kinds
        named = frozenset(
            p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        )
        theirs = named | _words(model_class) if takes_more and not released else named
        return cls(
            by_place=tuple(_by_place(model_class, forward)),
            named=named,
            takes_args=bool(
                kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}
            ),
            takes_more=takes_more,
            released=released,
            ours=frozenset(OPTIONS | {SKIP}) - theirs,
        )

    @property
    def hands_on(self) -> bool:
        """Whether what it does not name is for it to use, and to hand on."""
        return self.takes_more and not self.released

    @property
    def fills_labels(self) -> bool:
        """Whether ``shift_labels`` alone ask for a loss."""
        return not (self.hands_on or self.takes_args or "shift_labels" in self.named)

    def by_name(self, model, args, kwargs) -> dict:
        """All arguments of a call by name, as far as the names are known."""
        names = self.by_place
        if len(args) > len(names) and not self.takes_args:
            raise TypeError(
                f"{type(model).__name__}.forward takes {len(names)} arguments by position, not {len(args)}"
            )
        twice = [name for name in names[: len(args)] if name in kwargs]
        if twice and not self.takes_args:
            raise TypeError(f"{type(model).__name__}.forward got {', '.join(twice)} twice")
        return {**dict(zip(names, args, strict=False)), **kwargs}


def _parameters(forward) -> list[inspect.Parameter]:
    return list(inspect.signature(forward).parameters.values())[1:]


def is_transformers(forward: Callable) -> bool:
    """Whether transformers wrote a forward and whatever wraps it."""
    written_in = [layer.__globals__.get("__name__") or "" for layer in layers(forward)]
    return all(name.startswith(("transformers.", "torch.")) for name in written_in)


def _by_place(model_class, forward) -> list[str]:
    parameters = _parameters(forward)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return names
    overridden = [vars(base)["forward"] for base in model_class.__mro__ if "forward" in vars(base)]
    released = (other for other in overridden if other is not forward and is_transformers(other))
    below = next((_by_place(model_class, other) for other in released), [])
    return names + (below[len(names) :] if below[: len(names)] == names else below)


def _words(model_class) -> set[str]:
    """The names and strings in the code of those classes which are not transformers'."""
    words, codes = set(), []
    for base in model_class.__mro__:
        if base.__module__.partition(".")[0] in ("transformers", "torch", "builtins"):
            continue
        for member in vars(base).values():
            words.update(_strings(member))
            for layer in layers(getattr(member, "__func__", getattr(member, "fget", member))):
                codes.append((layer.__code__, layer.__globals__))
                for cell in filter(_filled, layer.__closure__ or ()):
                    words.update(_strings(cell.cell_contents))
    while codes:
        code, scope = codes.pop()
        codes += [(const, scope) for const in code.co_consts if isinstance(const, CodeType)]
        words.update(code.co_names, code.co_varnames, code.co_freevars)
        for value in (*code.co_consts, *(scope.get(name) for name in code.co_names)):
            words.update(_strings(value))
    return words


def _strings(value) -> list[str]:
    """Those that a constant is or holds: the keywords of a call are a tuple."""
    values = value if isinstance(value, (tuple, list, set, frozenset, dict)) else (value,)
    return [item for item in values if isinstance(item, str)]


def with_skip_logits(signature: inspect.Signature, released=True) -> inspect.Signature:
    """What a patched forward takes. Where transformers wrote it, the loss has its arguments, too.

    Trainers look for ``**kwargs``, to know whether the loss is divided by ``num_items_in_batch``.
    """
    keep = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    if released:
        more = [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
    if SKIP not in signature.parameters:
        keep.append(
            inspect.Parameter(
                SKIP, inspect.Parameter.KEYWORD_ONLY, default=None, annotation="bool | None"
            )
        )
    return signature.replace(parameters=[*keep, *more])
