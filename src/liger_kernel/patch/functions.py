"""Python functions: what they read, what they wrap, and one with a global bound anew."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable

import torch


def layers(function):
    """A function and those that it wraps, as decorators do: found in its closure."""
    found, waiting = [], [function]
    while waiting:
        one = waiting.pop()
        if isinstance(one, types.FunctionType) and one not in found:
            found.append(one)
            waiting += [cell.cell_contents for cell in one.__closure__ or () if _filled(cell)]
    return found


def _filled(cell) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def mentions(function, name: str) -> bool:
    """Whether the function, or one that it wraps, uses the name: a global or an attribute."""
    return any(name in layer.__code__.co_names for layer in layers(function))


def reads_before(function, attribute: str, name: str) -> bool:
    """Whether the function, or one that it wraps, reads the attribute before it reads the global."""
    for layer in layers(function):
        read = [instruction.argval for instruction in dis.get_instructions(layer)]
        if attribute in read and name in read:
            return read.index(attribute) < read.index(name)
    return False


def is_the_librarys(function: Callable) -> bool:
    """Whether transformers defines it: its globals are not those of a user's script, which may change at any time."""
    return getattr(function, "__module__", "").startswith("transformers.")


def global_of(function, name: str):
    """What the function, or one that it wraps, means by a global name; None if it does not use it."""
    using = (layer for layer in layers(function) if name in layer.__code__.co_names)
    return next((layer.__globals__[name] for layer in using if name in layer.__globals__), None)


USED = types.FunctionType, types.BuiltinFunctionType, type, torch.nn.Module


def used_by(function) -> tuple:
    """For the function and each that it wraps: the functions and classes, by name, that it finds among its globals, and
    what those functions find there in turn. The package kernels makes modules of functions."""
    found = []
    for layer in layers(function):
        held, waiting = {}, [layer.__code__]
        while waiting:
            code = waiting.pop()
            waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            for name in code.co_names:
                value = layer.__globals__.get(name)
                if name not in held and isinstance(value, USED):
                    held[name] = value
                    called = type(value).forward if isinstance(value, torch.nn.Module) else value
                    waiting += [inner.__code__ for inner in layers(called) if inner.__globals__ is layer.__globals__]
        found.append((layer, tuple(held.items())))
    return tuple(found)


def same_globals(used) -> Callable[[], bool] | None:
    """A function that says whether all of these are what they were, in code that torch.compile can guard."""
    checks = []
    for layer, held in used:
        if held:
            names, values = zip(*held, strict=True)
            same = " and ".join(f"{name} is held_in[{i}]" for i, name in enumerate(names))
            code = compile(f"lambda held_in: lambda: {same}", layer.__code__.co_filename, "eval")
            checks.append(eval(code, layer.__globals__)(values))
    if len(checks) < 2:
        return checks[0] if checks else None
    return lambda: all(check() for check in checks)


def rebind(function: types.FunctionType, name: str, value) -> types.FunctionType:
    """The function with one of its globals bound anew, in itself or in the function that it wraps.

    The copied globals leave out ``__name__``: torch.compile then looks names up in them and not in the module.
    """
    if name in function.__code__.co_names and name in function.__globals__:
        scope = {k: v for k, v in function.__globals__.items() if k != "__name__"} | {name: value}
        return _copy(function, scope, function.__closure__)
    cells = [
        types.CellType(rebind(cell.cell_contents, name, value))
        if _filled(cell) and global_of(cell.cell_contents, name) is not None
        else cell
        for cell in function.__closure__ or ()
    ]
    return _copy(function, function.__globals__, tuple(cells) or None)


def _copy(function, scope, closure):
    new = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update({k: v for k, v in function.__dict__.items() if k != "__wrapped__"})
    return named_as(function, new)


def named_as(function, new):
    """``new`` with what is said of the function, its signature included."""
    functools.update_wrapper(new, function, updated=())
    del new.__wrapped__
    new.__signature__ = inspect.signature(function)
    return new
