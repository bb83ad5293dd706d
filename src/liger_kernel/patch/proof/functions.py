"""Python functions: what they read, what they wrap, and one with a global bound anew."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable

import torch
from torch.compiler import is_compiling


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


def names_of(function) -> set[str]:
    """The names that the function, and each that it wraps, uses: globals and attributes, in what it
    defines, too."""
    codes = [
        code for layer in layers(function) for code in (layer.__code__, *_inner(layer.__code__))
    ]
    return {name for code in codes for name in code.co_names}


def variables_of(function) -> set[str]:
    """The names that the function uses by itself: of variables, attributes and keywords."""
    codes = [function.__code__, *_inner(function.__code__)]
    constants = {
        c
        for code in codes
        for const in code.co_consts
        for c in (const if type(const) is tuple else (const,))
    }
    variables = {name for code in codes for name in variables_of_code(code)}
    return variables | {c for c in constants if isinstance(c, str)}


def hands_on(function, names: set[str], to: str) -> bool:
    """Whether local variables by these names are unpacked and given to the global function ``to``,
    and nothing else.

    What is unpacked from one of them is another. Each call of ``to`` takes two of them or more.
    """
    names = set(names)
    if any(names & variables_of_code(code) for code in _inner(function.__code__)):
        return False
    instructions = [
        i
        for i in dis.get_instructions(function)
        if i.opname not in ("CACHE", "EXTENDED_ARG", "PRECALL")
    ]
    loaded, unpacked = None, False  # how many ``to`` has got by now, while its arguments are loaded
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        operation, value = instruction.opname, instruction.argval
        variables = value if isinstance(value, tuple) else (value,)
        if operation == "UNPACK_SEQUENCE":
            continue  # `unpacked` says of what
        if operation.startswith("STORE_FAST"):
            if unpacked:
                names.update(variables)
            elif not names.isdisjoint(variables):
                return False
            continue
        unpacked = False
        if operation == "LOAD_GLOBAL" and value == to:
            loaded = 0
        elif operation.startswith("LOAD_FAST"):
            found = sum(name in names for name in variables)
            unpacked = found and following.opname == "UNPACK_SEQUENCE"
            if found and not unpacked and loaded is None:
                return False
            loaded = loaded if loaded is None else loaded + found
        elif operation.startswith("CALL") and loaded is not None:
            if loaded < 2:
                return False
            loaded = None
        elif operation not in ARGUMENTS:
            if loaded:
                return False
            if value in names:  # an attribute, a global or a variable of a closure
                return False
    return True


ARGUMENTS = "LOAD_CONST", "LOAD_SMALL_INT", "PUSH_NULL", "KW_NAMES"  # how others get onto the stack


def variables_of_code(code: types.CodeType) -> set[str]:
    return {*code.co_names, *code.co_varnames, *code.co_freevars}


def global_of(function, name: str):
    """What the function, or one that it wraps, means by a global name; None if it does not use it
    as one."""
    using = (layer for layer in layers(function) if _reads_global(layer.__code__, name))
    return next((layer.__globals__[name] for layer in using if name in layer.__globals__), None)


class _Held:
    """Any object, equal to itself alone."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value is other.value

    def __hash__(self):
        return id(self.value)


def overrides(cls: type, method: str, names) -> bool:
    """Whether the class has a method of its own that names none of these globals, in the place of
    one that does."""
    own = getattr(cls, method)
    others = (vars(base).get(method) for base in cls.__mro__)
    return not _names_any(own, names) and any(
        _names_any(f, names) for f in others if isinstance(f, types.FunctionType)
    )


def _names_any(function, names) -> bool:
    return any(global_of(function, name) is not None for name in names)


def used_by(function, name: str | None = None) -> tuple:
    """List what the function, and each that it wraps, finds by name among its globals, and what the
    functions among that find there in turn, but modules. With ``name``: what it means by this one,
    and what that finds.

    The package kernels makes modules of functions.
    """
    found = []
    for layer in layers(function):
        held, waiting = {}, [layer.__code__.co_names if name is None else (name,)]
        waiting += [code.co_names for code in _inner(layer.__code__)] if name is None else []
        while waiting:
            for each in waiting.pop():
                if each in held or each not in layer.__globals__:
                    continue
                value = layer.__globals__[each]
                if isinstance(value, types.ModuleType):
                    continue
                held[each] = _Held(value)
                called = type(value).forward if isinstance(value, torch.nn.Module) else value
                inner = [f.__code__ for f in layers(called) if f.__globals__ is layer.__globals__]
                waiting += [code.co_names for f in inner for code in (f, *_inner(f))]
        found.append((layer, tuple(held.items())))
    return tuple(found)


def _inner(code: types.CodeType) -> list[types.CodeType]:
    """The code of functions, comprehensions and classes that are defined in it."""
    found = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return found + [inner for one in found for inner in _inner(one)]


GUARDED = (  # what torch.compile can compare by identity
    types.FunctionType, types.BuiltinFunctionType, type, torch.nn.Module, int, float, str, type(None), torch.dtype,
)  # fmt: skip


def same_globals(used) -> Callable[[], bool] | None:
    """Return a function that says whether all of these are what they were; in a graph, all that it
    can guard."""
    guarded, others = [], []
    for layer, held in used:
        values = {name: one.value for name, one in held}
        simple = {name: value for name, value in values.items() if isinstance(value, GUARDED)}
        guarded += _comparison(layer, simple)
        others += _comparison(
            layer, {name: value for name, value in values.items() if name not in simple}
        )
    if not others:
        return _all(guarded)
    in_graph, eager = _all(guarded) or _true, _all([*guarded, *others])
    return lambda: in_graph() if is_compiling() else eager()


def _comparison(layer, values: dict) -> list[Callable[[], bool]]:
    """Code that reads the globals as the function does, whose reads torch.compile can guard;
    nothing for none."""
    if not values:
        return []
    same = " and ".join(f"{name} is held_in[{i}]" for i, name in enumerate(values))
    code = compile(f"lambda held_in: lambda: {same}", layer.__code__.co_filename, "eval")
    return [eval(code, layer.__globals__)(tuple(values.values()))]


def _all(checks):
    if len(checks) < 2:
        return checks[0] if checks else None
    return lambda: all(check() for check in checks)


def _true():
    return True


_numbers = itertools.count()


def rebind(function: types.FunctionType, name: str, value) -> types.FunctionType:
    """Return the function with one of its globals bound anew, in itself or in the function that it
    wraps.

    Whatever else it names is read where the function reads it, at each call: ``value`` is put
    beside it, in the same module and under a name of its own, for as long as the new function
    lives."""
    if _reads_global(function.__code__, name) and name in function.__globals__:
        scope, alias = function.__globals__, f"_liger_{name}_{next(_numbers)}"
        new = _copy(function, _renamed(function.__code__, name, alias), function.__closure__)
        scope[alias] = value
        weakref.finalize(new, scope.pop, alias, None)
        new._liger_rebound = function  # which may need an alias of its own
        return new
    cells = [
        types.CellType(rebind(cell.cell_contents, name, value))
        if _filled(cell) and global_of(cell.cell_contents, name) is not None
        else cell
        for cell in function.__closure__ or ()
    ]
    return _copy(function, function.__code__, tuple(cells) or None)


def _renamed(code: types.CodeType, name: str, alias: str) -> types.CodeType:
    """The code, and the functions defined in it, with another name for a global."""
    constants = (
        _renamed(c, name, alias) if isinstance(c, types.CodeType) else c for c in code.co_consts
    )
    names = (alias if n == name else n for n in code.co_names)
    return code.replace(co_names=tuple(names), co_consts=tuple(constants))


@functools.cache
def _reads_global(code: types.CodeType, name: str) -> bool:
    """Whether the code, or what is defined in it, reads the name as a global, and never as an
    attribute."""
    users = [c for c in (code, *_inner(code)) if name in c.co_names]
    uses = {i.opname for c in users for i in dis.get_instructions(c) if i.argval == name}
    return bool(users) and uses <= {"LOAD_GLOBAL", "LOAD_NAME"}


def _copy(function, code, closure):
    new = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update({k: v for k, v in function.__dict__.items() if k != "__wrapped__"})
    return named_as(function, new)


def named_as(function, new):
    """``new`` with what is said of the function, its signature included."""
    functools.update_wrapper(new, function, updated=())
    del new.__wrapped__
    new.__signature__ = inspect.signature(function)
    return new
