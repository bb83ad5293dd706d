"""Which code a trial may speak for: released code, and code that plainly depends on its module and
arguments alone.

A trial shows what a forward computes. It does not show what else the forward reads (a global that
anneals), what it writes (a list of auxiliary losses), or what it does for sizes that were not
tried. So, before anything is run:

1. Code of the packages in `PACKAGES` is trusted. It is the same for everybody, and the suite runs
   it.
2. Other code has to be arithmetic of tensors from its first line to its last: no branch, no loop,
   no closure, nothing stored but local variables, no sizes, no call but of what `TENSORS`,
   `FUNCTIONS` and `BUILTINS` name, of modules that are of this kind, and of functions of the same
   file that are. A number among its globals is compared at each call (`functions.same_globals`), an
   attribute of its module too (`parts`).
3. Everything else is left alone, with the reason, unless the user trusts its class:
   ``apply_liger_kernel(model, trust=(MyNorm,))``.

The bytecode is read, not the source: it is what runs, and it is there for code from a notebook,
too."""

from __future__ import annotations

import dis
import functools
import inspect
import math
import os
import sys
import types

import torch

from liger_kernel.patch.proof.functions import layers, names_of, used_by
from liger_kernel.patch.proof.hooks import hooked

PACKAGES = (  # whose layers and functions are released code
    "torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "torchao", "deepspeed", "kernels", "timm",
    "megatron", "torchtitan", "nemo_automodel", "liger_kernel",
)  # fmt: skip
NUMBERS = (
    int,
    float,
    bool,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
)  # what cannot change but by being replaced
LARGEST = 3  # an integer beyond may be a size, such as no trial has
SIZES = "normalized_shape"  # an attribute with sizes, which a trial of a norm replaces by its own
ANY_NUMBER = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
UNSEEN = "__call__", "__getattr__", "__getattribute__"  # methods that run without being named
NAMESPACES = torch, torch.nn, torch.nn.functional, math
BUILTINS = {abs, float}
# methods of tensors, and functions of torch and math, that do arithmetic and nothing else
TENSORS = frozenset(
    "abs add amax amin bfloat16 bmm cat chunk clamp clamp_max clamp_min clip contiguous cos div divide double dtype "
    "erf exp expand expand_as flatten float half log log1p matmul max mean min mm mT mul multiply neg norm permute "
    "pow reciprocal relu repeat_interleave reshape rsqrt sigmoid sin softmax split sqrt square stack std sub subtract "
    "sum T t tanh to transpose true_divide type type_as unbind unflatten unsqueeze var view view_as".split()
)
FUNCTIONS = TENSORS | frozenset(  # and those of torch.nn.functional
    "elu gelu hardsigmoid hardswish hardtanh layer_norm leaky_relu linear log_softmax logsigmoid mish normalize relu6 "
    "rms_norm selu silu softplus softsign".split()
)
# of Python 3.10 to 3.14: what runs straight on, and stores in local variables alone
OPERATIONS = frozenset(
    "RESUME NOP CACHE EXTENDED_ARG PRECALL PUSH_NULL POP_TOP COPY SWAP DUP_TOP ROT_TWO ROT_THREE ROT_FOUR NOT_TAKEN "
    "CALL CALL_KW CALL_FUNCTION CALL_FUNCTION_KW CALL_METHOD KW_NAMES LOAD_CONST LOAD_SMALL_INT LOAD_FAST STORE_FAST "
    "LOAD_FAST_LOAD_FAST STORE_FAST_STORE_FAST STORE_FAST_LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_CHECK DELETE_FAST "
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW LOAD_GLOBAL LOAD_ATTR LOAD_METHOD BINARY_OP BINARY_SUBSCR BINARY_SLICE "
    "BINARY_ADD BINARY_SUBTRACT BINARY_MULTIPLY BINARY_TRUE_DIVIDE BINARY_FLOOR_DIVIDE BINARY_POWER "
    "BINARY_MATRIX_MULTIPLY UNARY_NEGATIVE UNARY_POSITIVE BUILD_TUPLE BUILD_LIST BUILD_SLICE UNPACK_SEQUENCE "
    "RETURN_VALUE RETURN_CONST".split()
)


# ---- whose code it is ----


def is_released(value) -> bool:
    """Whether the function, with those that it wraps, or the class of another object is of one of
    the packages."""
    if isinstance(value, types.FunctionType):
        return all(map(is_of_a_package, layers(value)))
    if isinstance(value, types.MethodType):
        return is_released(value.__func__)
    if isinstance(value, functools.partial):
        return is_released(value.func)
    of = value if isinstance(value, (type, types.BuiltinFunctionType)) else type(value)
    return (of.__module__ or "").partition(".")[0] in PACKAGES


def is_of_a_package(function: types.FunctionType) -> bool:
    """Whether the function's own code is of one of the packages, whatever it wraps."""
    return function.__code__.co_filename.startswith(_folders())


def _folders() -> tuple[str, ...]:
    """Of the packages that are imported."""
    imported = (sys.modules.get(name) for name in PACKAGES)
    return tuple(
        folder + os.sep
        for package in imported
        if package is not None
        for folder in package.__path__
    )


def _is_foreign(value) -> bool:
    """Whether it can be called, and is neither a package's nor Python's own. (Nobody calls a class
    as a function.)"""
    if not callable(value) or isinstance(value, type) or is_released(value):
        return False
    of = value if isinstance(value, types.BuiltinFunctionType) else type(value)
    return isinstance(
        value, (types.FunctionType, types.MethodType, functools.partial)
    ) or not _is_pythons(of)


def _is_pythons(of) -> bool:
    """Whether the class, or the builtin, is of Python or its standard library."""
    return (of.__module__ or "").partition(".")[0] in sys.stdlib_module_names


# ---- what a trial may speak for ----


def why_not(
    module: torch.nn.Module,
    method: str = "forward",
    trusted: tuple[type, ...] = (),
    children: bool = True,
) -> str | None:
    """Return None if a trial may speak for the module's method and all that it calls, or the reason
    why it may not.

    A child with matrices is not looked at: it is called as it is. Nor are the others without
    ``children``."""
    if isinstance(module, trusted):
        return None
    why = _first_reason(
        [(function, module) for name in (method, *UNSEEN) for function in _code_of(module, name)]
    )
    if why is not None:
        return why
    for name, child in module._modules.items() if children else ():
        if child is None or any(
            len(getattr(p, "ds_shape", p.shape)) > 1 for p in child.parameters()
        ):
            continue  # ds_shape: of a weight that ZeRO-3 has taken away
        if next(child.parameters(), None) is None and hooked(child, called=False):
            return f"there are hooks on its {name}"
        own = child.__dict__.get("forward")
        if isinstance(child, torch.jit.ScriptModule):
            return f"its {name} is TorchScript"
        if own is not None and getattr(own, "__func__", None) is not type(child).forward:
            return f"the forward of its {name} was replaced on the instance"
        why = why_not(child, trusted=trusted)
        if why is not None:
            return why
    return None


def why_not_function(function) -> str | None:
    """`why_not` of a function that is no method."""
    if isinstance(function, torch.nn.Module):  # as the package kernels makes of functions
        return why_not(function)
    return _first_reason([(function, None)])


def why_not_read(
    module: torch.nn.Module, parts: tuple, trusted: tuple[type, ...] = ()
) -> str | None:
    """`why_not` of the methods that were called within the module's attributes, as ``parts`` of the
    trial say."""
    for path, name, kind, function in parts:
        if path and kind in ("method", "bound") and not is_released(function):
            holder = module
            for step in path:
                holder = getattr(holder, step)
            if isinstance(holder, trusted):
                continue
            if not isinstance(holder, torch.nn.Module):
                return f"{'.'.join(path)}.{name} is code of {type(holder).__name__}'s own"
            why = why_not_arithmetic(function, holder)
            if why is not None:
                return why
    return None


def _first_reason(waiting: list[tuple]) -> str | None:
    """Why one of these functions, each with its module or None, or one that they call, is neither
    of both kinds."""
    looked_at = []
    while waiting:
        function, module = waiting.pop()
        if any(function is each for each in looked_at):
            continue
        looked_at.append(function)
        why = None if is_released(function) else why_not_arithmetic(function, module)
        if why is not None:
            return why
        waiting += _called_by(function, module)
    return None


def _called_by(function, module) -> list[tuple]:
    """Functions that it may call: of its globals, what is nobody's package's; of its module,
    all."""
    names = names_of(function)
    if is_released(function):
        values = [held.value for _, used in used_by(function) for _, held in used]
        values += [
            vars(space).get(name) for space in (torch, torch.nn.functional) for name in names
        ]
    else:
        values = [
            _global(function, i.argval)
            for i in dis.get_instructions(function)
            if i.opname == "LOAD_GLOBAL"
        ]
    found = [(value, None) for value in values if _is_foreign(value)]
    if module is not None:
        attributes = [value for name in names for value in _contents(module.__dict__.get(name))]
        found += [(code, None) for value in attributes for code in _code_of_attribute(value, names)]
        calls_super = any("__class__" in layer.__code__.co_freevars for layer in layers(function))
        found += [
            (value, module) for name in names for value in _code_of(module, name, calls_super)
        ]
    return found


def _contents(value) -> list:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _code_of_attribute(value, names) -> list:
    """What runs of nobody's package where a module's attribute is called, or is read by these
    names."""
    classes = type(value).__mro__[:-1]
    if _is_foreign(value) or not any(is_released(cls) or _is_pythons(cls) for cls in classes):
        return [value]
    if type(value).__module__ == "builtins":
        return []
    return [
        code
        for name in (*names, *UNSEEN)
        for code in _code_of(value, name)
        if not is_released(code)
    ]


def _code_of(module, name: str, inherited: bool = False) -> list:
    """The function that the module's class has by the name, as a method or a property; none of
    torch.nn.Module's.

    Args:
        inherited: with those that it overrides, which ``super()`` may mean.
    """
    found = [vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls)]
    found = [value for value in found if value is not vars(torch.nn.Module).get(name)]
    found = [_function_of(value) for value in (found if inherited else found[:1])]
    return [
        value
        for value in found
        if isinstance(value, types.FunctionType) or _is_foreign(value) or _is_read(value)
    ]


def _is_read(value) -> bool:
    """Whether code of nobody's package, other than a method, runs where it is read as an attribute
    of a class."""
    if isinstance(value, (property, classmethod, functools.cached_property)):
        return True
    return isinstance(
        getattr(type(value), "__get__", None), types.FunctionType
    ) and not is_released(value)


def _function_of(value):
    """What runs where an attribute of a class is read or called."""
    if isinstance(value, staticmethod):
        return value.__func__
    for kind, held in (
        (property, "fget"),
        (classmethod, "__func__"),
        (functools.cached_property, "func"),
    ):
        if isinstance(value, kind) and is_released(getattr(value, held)):
            return getattr(value, held)
    return value


# ---- what arithmetic is ----


def why_not_arithmetic(function, module: torch.nn.Module | None = None) -> str | None:
    """Return None if the function computes with tensors and does nothing else, or the first thing
    that it does beside.

    Args:
        function: code of nobody's package.
        module: what its first argument is; None for a function that is no method.
    """
    name = getattr(getattr(function, "fget", function), "__qualname__", type(function).__name__)
    if not isinstance(function, types.FunctionType):
        return f"{name} is neither a plain function nor a method"
    code = function.__code__
    if code.co_freevars == ("__class__",):
        return f"{name} calls super()"
    if function.__closure__:
        return f"{name} reads {', '.join(code.co_freevars)} of the function around it"
    if code.co_flags & (ANY_NUMBER | SUSPENDED):
        return f"{name} takes any number of arguments, or is a generator"
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not all(map(_is_constant, defaults)):
        return f"{name} has a default argument that can change"
    if any(isinstance(names, tuple) and "out" in names for names in code.co_consts):
        return f"{name} writes by out="
    own = code.co_varnames[0] if module is not None and code.co_argcount else None
    instructions = [
        i for i in dis.get_instructions(function) if i.opname not in ("CACHE", "EXTENDED_ARG")
    ]
    halves = _halves(instructions)
    top = None  # what was read last, where that is known: the module, or what a global means
    for at, instruction in enumerate(instructions):
        operation, value = instruction.opname, instruction.argval
        if (
            operation not in OPERATIONS
            or operation == "BINARY_OP"
            and instruction.argrepr.endswith("=")
        ):
            return f"{name} {_does(operation)}"
        if operation in ("LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST") and _may_be_a_size(value):
            return f"{name} has the number {value}, which may be a size"
        if own is not None and "FAST" in operation and own in _local_names(value):
            if not _reads_an_attribute(instructions, at, own):
                return f"{name} uses {own} otherwise than to read its attributes"
            top = module
        elif operation == "LOAD_GLOBAL":
            top = _global(function, value)
            if not _is_known(function, value, top):
                return f"{name} reads {value}"
        elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
            if isinstance(top, types.ModuleType):
                top = getattr(top, value, None)
                if not (any(top is space for space in NAMESPACES) or _is_arithmetic(top, value)):
                    return f"{name} uses {value}"
                continue
            if top is None:
                why = None if value in TENSORS or at in halves else f"reads .{value}"
            elif top is module:
                why = _why_not_attribute(module, value, _is_called(instruction))
            else:
                why = f"reads .{value}"
            if why is not None:
                return f"{name} {why}"
            top = None
        elif operation != "PUSH_NULL":
            top = None
    return None


def _does(operation: str) -> str:
    if "JUMP" in operation or operation in ("FOR_ITER", "SEND", "GET_ITER"):
        return "branches, or runs in a loop"
    if operation.startswith(("STORE", "DELETE", "INPLACE", "BINARY_OP")):
        return "stores something elsewhere than in a local variable"
    return f"does more than arithmetic ({operation.lower()})"


def _may_be_a_size(value) -> bool:
    if isinstance(value, tuple):
        return any(map(_may_be_a_size, value))
    if isinstance(value, slice):
        return _may_be_a_size((value.start, value.stop, value.step))
    return isinstance(value, int) and abs(value) > LARGEST


def _is_constant(value) -> bool:
    """Whether it is a number, or several, that is replaced or stays; and no size."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return type(value) in NUMBERS and not _may_be_a_size(value)


def _local_names(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _reads_an_attribute(instructions, at, own) -> bool:
    """Whether the module, which this instruction names, is loaded last, and an attribute of it is
    read next."""
    names, following = _local_names(instructions[at].argval), instructions[at + 1]
    stored = {
        "STORE_FAST": names,
        "STORE_FAST_STORE_FAST": names,
        "STORE_FAST_LOAD_FAST": names[:1],
    }
    at_last = names[-1] == own and names.count(own) == 1
    return (
        at_last and own not in stored.get(instructions[at].opname, ()) and following.opname in READS
    )


READS = "LOAD_ATTR", "LOAD_METHOD"


def _is_called(instruction) -> bool:
    """Whether the attribute that it loads is called, and goes nowhere else."""
    if instruction.opname == "LOAD_METHOD":
        return True
    return sys.version_info >= (3, 12) and bool(instruction.arg & 1)


def _global(function, name: str):
    scope = function.__globals__
    builtins = scope.get("__builtins__", {})
    builtins = builtins if isinstance(builtins, dict) else vars(builtins)
    return scope.get(name, builtins.get(name))


def _is_known(function, name: str, value) -> bool:
    """Whether a global is a number, which is compared at each call, or only computes."""
    if (
        name in function.__globals__
        and _is_constant(value)
        or isinstance(value, type)
        and value in BUILTINS
    ):
        return True
    if isinstance(value, types.ModuleType):
        return any(value is space for space in NAMESPACES)
    if isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__:
        return True  # looked at by itself
    if isinstance(value, (types.BuiltinFunctionType, types.FunctionType)):
        return value is abs or _is_arithmetic(value, value.__name__)
    return False


def _is_arithmetic(value, name: str) -> bool:
    """Whether torch or math means a dtype, a number or a function that only computes by the
    name."""
    if isinstance(value, (torch.dtype, float)):
        return True
    return name in FUNCTIONS and (
        is_released(value) or getattr(value, "__module__", None) == "math"
    )


def _why_not_attribute(module, name: str, called: bool) -> str | None:
    """Why reading the attribute may mean more than a value that is compared at each call, or
    calling it."""
    static = inspect.getattr_static(type(module), name, None)
    if name in module._parameters or name in module._buffers:
        return None
    value = module.__dict__.get(name, static)
    if name in module._modules or isinstance(
        value, (types.BuiltinFunctionType, types.FunctionType)
    ):
        return None if called else f"hands on .{name}"  # what is called is looked at by itself
    exists = name in module.__dict__ or hasattr(type(module), name)
    return (
        None
        if exists and (_is_constant(value) or name == SIZES and type(value) is tuple)
        else f"reads .{name}"
    )


def _halves(instructions) -> set[int]:
    """Where ``x.shape[-1] // 2`` is the end of a slice, as in halves of a head: the one size that
    is known not to mean anything else."""
    found = set()
    for at, instruction in enumerate(instructions[:-5]):
        if instruction.opname in READS and instruction.argval == "shape":
            index, subscript, two, divide, *after = instructions[at + 1 : at + 7]
            after = [
                i.opname
                for i in after
                if i.argval is not None or not i.opname.startswith("LOAD_CONST")
            ]
            if (
                index.argval == -1
                and (subscript.opname == "BINARY_SUBSCR" or subscript.argrepr == "[]")
                and two.argval == 2
                and (divide.opname == "BINARY_FLOOR_DIVIDE" or divide.argrepr == "//")
                and after
                and after[0] in ("BUILD_SLICE", "BINARY_SLICE")
            ):
                found.add(at)
    return found
