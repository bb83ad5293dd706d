"""Python functions: what they read, what they wrap, and how a copy gets another value for a
global."""

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

# Instructions that are not code but belong to the one before or after them.
FILLERS = "CACHE", "EXTENDED_ARG", "PRECALL"
# Instructions that put an argument onto the stack that is no variable.
CONSTANT_ARGUMENTS = "LOAD_CONST", "LOAD_SMALL_INT", "PUSH_NULL", "KW_NAMES"
# Types whose values torch.compile can compare by identity.
GUARDABLE = (
    types.FunctionType, types.BuiltinFunctionType, type, torch.nn.Module, int, float, str,
    type(None), torch.dtype,
)  # fmt: skip


# ---- what a function consists of ----


def wrapped_functions(function) -> list[types.FunctionType]:
    """List a function and those that it wraps, as decorators do: they are found in its closure."""
    functions = []
    queue = [function]
    while queue:
        candidate = queue.pop()
        if isinstance(candidate, types.FunctionType) and candidate not in functions:
            functions.append(candidate)
            cells = candidate.__closure__ or ()
            queue += [cell.cell_contents for cell in cells if is_filled(cell)]
    return functions


def is_filled(cell) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _inner_codes(code: types.CodeType) -> list[types.CodeType]:
    """List the code of functions, comprehensions and classes defined in it, at any depth."""
    codes = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    for inner in list(codes):
        codes += _inner_codes(inner)
    return codes


def _all_codes(function: types.FunctionType) -> list[types.CodeType]:
    return [function.__code__, *_inner_codes(function.__code__)]


# ---- which names it uses ----


def uses_name(function, name: str) -> bool:
    """Return True if the function, or one that it wraps, uses the name for a global or an
    attribute."""
    return any(name in each.__code__.co_names for each in wrapped_functions(function))


def names_used(function) -> set[str]:
    """Return the names of globals and attributes that the function, each that it wraps, and what is
    defined in them use."""
    names = set()
    for each in wrapped_functions(function):
        names.update(_names_in(each))
    return names


def _names_in(function: types.FunctionType) -> list[str]:
    names = []
    for code in _all_codes(function):
        names += code.co_names
    return names


def variable_names(function) -> set[str]:
    """Return the names of variables, attributes and keywords that the function itself uses.

    String constants count as names of keywords."""
    names = set()
    for code in _all_codes(function):
        names |= code_variable_names(code)
        for constant in code.co_consts:
            strings = constant if type(constant) is tuple else (constant,)
            names.update(string for string in strings if isinstance(string, str))
    return names


def code_variable_names(code: types.CodeType) -> set[str]:
    return {*code.co_names, *code.co_varnames, *code.co_freevars}


def only_forwards(function, names: set[str], to: str) -> bool:
    """Return True if the function only unpacks its local variables ``names`` and passes them to the
    global function ``to``.

    A variable that is unpacked from one of them counts as one of them. Each call of ``to`` takes at
    least two.
    """
    names = set(names)
    if any(names & code_variable_names(code) for code in _inner_codes(function.__code__)):
        return False
    instructions = [i for i in dis.get_instructions(function) if i.opname not in FILLERS]
    # While the arguments of ``to`` are loaded: how many of the variables it has got by now.
    arguments = None
    # True between the loading of one of the variables and the storing of what is unpacked from it.
    unpacking = False
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        operation = instruction.opname
        value = instruction.argval
        variables = value if isinstance(value, tuple) else (value,)
        if operation == "UNPACK_SEQUENCE":
            continue
        if operation.startswith("STORE_FAST"):
            if unpacking:
                names.update(variables)
            elif not names.isdisjoint(variables):
                return False
            continue
        unpacking = False
        if operation == "LOAD_GLOBAL" and value == to:
            arguments = 0
        elif operation.startswith("LOAD_FAST"):
            loaded = sum(name in names for name in variables)
            unpacking = loaded and following.opname == "UNPACK_SEQUENCE"
            if arguments is not None:
                arguments += loaded
            elif loaded and not unpacking:
                return False
        elif operation.startswith("CALL") and arguments is not None:
            if arguments < 2:
                return False
            arguments = None
        elif operation not in CONSTANT_ARGUMENTS:
            if arguments:
                return False
            if value in names:  # an attribute, a global or a variable of a closure
                return False
    return True


# ---- which globals it reads ----


def resolve_global(function, name: str):
    """Return the value of a global that the function, or one that it wraps, uses by that name.

    None if none of them uses the name as a global."""
    for each in wrapped_functions(function):
        if _reads_global(each.__code__, name) and name in each.__globals__:
            return each.__globals__[name]
    return None


@functools.cache
def _reads_global(code: types.CodeType, name: str) -> bool:
    """Return True if the code, with what is defined in it, reads the name as a global, and never as
    an attribute."""
    users = [each for each in (code, *_inner_codes(code)) if name in each.co_names]
    operations = set()
    for user in users:
        operations |= {i.opname for i in dis.get_instructions(user) if i.argval == name}
    return bool(users) and operations <= {"LOAD_GLOBAL", "LOAD_NAME"}


def overrides(cls: type, method: str, names) -> bool:
    """Return True if the class replaced a method that reads one of these globals by one that reads
    none of them."""
    if _reads_any(getattr(cls, method), names):
        return False
    inherited = (vars(base).get(method) for base in cls.__mro__)
    return any(_reads_any(f, names) for f in inherited if isinstance(f, types.FunctionType))


def _reads_any(function, names) -> bool:
    return any(resolve_global(function, name) is not None for name in names)


class ByIdentity:
    """Wraps any object, and is equal only to a wrapper of the same object."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value is other.value

    def __hash__(self):
        return id(self.value)


def globals_used(function, name: str | None = None) -> tuple:
    """List the globals that a function reads, and those that these functions read in turn.

    Modules are left out. A layer that the package kernels made of a function counts as its forward.

    Args:
        function: it and each that it wraps.
        name: start from this global alone.

    Returns:
        One ``(function, ((name, ByIdentity(value)), ...))`` for each function.
    """
    used = []
    for each in wrapped_functions(function):
        scope = each.__globals__
        values = {}
        queue = _names_in(each) if name is None else [name]
        while queue:
            global_name = queue.pop()
            if global_name in values or global_name not in scope:
                continue
            value = scope[global_name]
            if isinstance(value, types.ModuleType):
                continue
            values[global_name] = ByIdentity(value)
            called = type(value).forward if isinstance(value, torch.nn.Module) else value
            for inner in wrapped_functions(called):
                if inner.__globals__ is scope:
                    queue += _names_in(inner)
        used.append((each, tuple(values.items())))
    return tuple(used)


def globals_unchanged(used) -> Callable[[], bool] | None:
    """Return a function that returns True while all of these globals have their present values.

    In a graph it compares those that torch.compile can guard. None if there is nothing to compare.
    ``used``: as `globals_used` lists them."""
    guardable_checks = []
    unguardable_checks = []
    for function, items in used:
        guardable = {}
        unguardable = {}
        for name, wrapper in items:
            group = guardable if isinstance(wrapper.value, GUARDABLE) else unguardable
            group[name] = wrapper.value
        guardable_checks += _identity_check(function, guardable)
        unguardable_checks += _identity_check(function, unguardable)
    if not unguardable_checks:
        return _all(guardable_checks)
    in_graph = _all(guardable_checks) or _true
    eager = _all([*guardable_checks, *unguardable_checks])
    return lambda: in_graph() if is_compiling() else eager()


def _identity_check(function, values: dict) -> list[Callable[[], bool]]:
    """Return a list with one function that compares the globals; an empty list for no values.

    Its code reads them as ``function`` does, so that torch.compile can guard these reads."""
    if not values:
        return []
    same = " and ".join(f"{name} is values_before[{i}]" for i, name in enumerate(values))
    source = f"lambda values_before: lambda: {same}"
    code = compile(source, function.__code__.co_filename, "eval")
    return [eval(code, function.__globals__)(tuple(values.values()))]


def _all(checks):
    if len(checks) < 2:
        return checks[0] if checks else None
    return lambda: all(check() for check in checks)


def _true():
    return True


# ---- copies of a function ----

_alias_numbers = itertools.count()


def rebind_global(function: types.FunctionType, name: str, value) -> types.FunctionType:
    """Return a copy of the function for which a global has another value.

    The function, or the function that it wraps, reads the global. Every other global is still read
    where the original reads it, at each call. For as long as the copy lives, ``value`` stands in
    the same module under an alias."""
    if _reads_global(function.__code__, name) and name in function.__globals__:
        scope = function.__globals__
        alias = f"_liger_{name}_{next(_alias_numbers)}"
        code = _rename_global(function.__code__, name, alias)
        new = _copy_function(function, code, function.__closure__)
        scope[alias] = value
        weakref.finalize(new, scope.pop, alias, None)
        new._liger_rebound = function  # keeps it alive: it may need an alias of its own
        return new
    cells = []
    for cell in function.__closure__ or ():
        if is_filled(cell) and resolve_global(cell.cell_contents, name) is not None:
            cell = types.CellType(rebind_global(cell.cell_contents, name, value))
        cells.append(cell)
    return _copy_function(function, function.__code__, tuple(cells) or None)


def _rename_global(code: types.CodeType, name: str, alias: str) -> types.CodeType:
    """Return the code, and the functions defined in it, with another name for a global."""
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            constant = _rename_global(constant, name, alias)
        constants.append(constant)
    names = tuple(alias if each == name else each for each in code.co_names)
    return code.replace(co_names=names, co_consts=tuple(constants))


def _copy_function(function, code, closure):
    new = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update({k: v for k, v in function.__dict__.items() if k != "__wrapped__"})
    return copy_metadata(function, new)


def copy_metadata(function, new):
    """Give ``new`` the name, docstring and signature of the function. Returns ``new``."""
    functools.update_wrapper(new, function, updated=())
    del new.__wrapped__
    new.__signature__ = inspect.signature(function)
    return new
