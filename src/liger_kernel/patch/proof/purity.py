"""Which code a proof may rest on: released code, and user code that is plain arithmetic.

A proof runs a forward with a few inputs and so shows what it computes. It does not show what else
the forward reads (a global that anneals), what it writes (a list of auxiliary losses), or what it
does for sizes that were not tried. So, before anything is run:

1. Code of the packages in `PACKAGES` is trusted. It is the same for everybody, and the tests run
   it.
2. Other code, *user code* in this file, has to be arithmetic of tensors from its first line to its
   last: no branch, no loop, no closure, nothing stored but local variables, no sizes. It may call
   what `TENSOR_METHODS`, `FUNCTIONS` and `BUILTINS` name, modules of this kind, and functions of
   this kind in the same file. A number among its globals is compared at each call
   (`functions.globals_unchanged`), an attribute of its module too (`parts`).
3. Everything else is left alone, with the reason, unless the user trusts its class:
   ``apply_liger_kernel(model, trust=(MyNorm,))``.

The bytecode is read, not the source: it is what runs, and code from a notebook has it, too."""

from __future__ import annotations

import dis
import functools
import inspect
import math
import os
import sys
import types

import torch

from liger_kernel.patch.proof.functions import globals_used, names_used, wrapped_functions
from liger_kernel.patch.proof.hooks import has_hooks

# Packages whose layers and functions are released code.
PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "torchao", "deepspeed",
    "kernels", "timm", "megatron", "torchtitan", "nemo_automodel", "liger_kernel",
)  # fmt: skip
# Values that cannot change except by being replaced.
CONSTANT_TYPES = int, float, bool, complex, str, bytes, type(None), torch.dtype
# A larger integer may be a size that no proof has tried.
LARGEST_NON_SIZE = 3
# An attribute with sizes, which the proof of a norm replaces by its own.
SIZE_ATTRIBUTE = "normalized_shape"
ANY_NUMBER_OF_ARGUMENTS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Methods that run without being named.
IMPLICIT_METHODS = "__call__", "__getattr__", "__getattribute__"
NAMESPACES = torch, torch.nn, torch.nn.functional, math
BUILTINS = {abs, float}
# Methods of tensors, and functions of torch and math, that do arithmetic and nothing else.
TENSOR_METHODS = frozenset(
    """
    abs add amax amin bfloat16 bmm cat chunk clamp clamp_max clamp_min clip contiguous cos div
    divide double dtype erf exp expand expand_as flatten float half log log1p matmul max mean
    min mm mT mul multiply neg norm permute pow reciprocal relu repeat_interleave reshape rsqrt
    sigmoid sin softmax split sqrt square stack std sub subtract sum T t tanh to transpose
    true_divide type type_as unbind unflatten unsqueeze var view view_as
    """.split()
)
# Those, and functions of torch.nn.functional.
FUNCTIONS = TENSOR_METHODS | frozenset(
    """
    elu gelu hardsigmoid hardswish hardtanh layer_norm leaky_relu linear log_softmax logsigmoid
    mish normalize relu6 rms_norm selu silu softplus softsign
    """.split()
)
# Instructions of Python 3.10 to 3.14 that run straight on and store in local variables alone.
INSTRUCTIONS = frozenset(
    """
    RESUME NOP CACHE EXTENDED_ARG PRECALL PUSH_NULL POP_TOP COPY SWAP DUP_TOP ROT_TWO ROT_THREE
    ROT_FOUR NOT_TAKEN CALL CALL_KW CALL_FUNCTION CALL_FUNCTION_KW CALL_METHOD KW_NAMES
    LOAD_CONST LOAD_SMALL_INT LOAD_FAST STORE_FAST LOAD_FAST_LOAD_FAST STORE_FAST_STORE_FAST
    STORE_FAST_LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_CHECK DELETE_FAST
    LOAD_FAST_BORROW_LOAD_FAST_BORROW LOAD_GLOBAL LOAD_ATTR LOAD_METHOD BINARY_OP BINARY_SUBSCR
    BINARY_SLICE BINARY_ADD BINARY_SUBTRACT BINARY_MULTIPLY BINARY_TRUE_DIVIDE
    BINARY_FLOOR_DIVIDE BINARY_POWER BINARY_MATRIX_MULTIPLY UNARY_NEGATIVE UNARY_POSITIVE
    BUILD_TUPLE BUILD_LIST BUILD_SLICE UNPACK_SEQUENCE RETURN_VALUE RETURN_CONST
    """.split()
)
READ_INSTRUCTIONS = "LOAD_ATTR", "LOAD_METHOD"


# ---- whose code it is ----


def is_released_code(value) -> bool:
    """Return True if a function with all that it wraps, or the class of another object, comes from
    one of the packages."""
    if isinstance(value, types.FunctionType):
        return all(map(is_package_code, wrapped_functions(value)))
    if isinstance(value, types.MethodType):
        return is_released_code(value.__func__)
    if isinstance(value, functools.partial):
        return is_released_code(value.func)
    return _top_package(_named_object(value)) in PACKAGES


def is_package_code(function: types.FunctionType) -> bool:
    """Return True if the function's own code is in one of the packages, whatever it wraps."""
    return function.__code__.co_filename.startswith(_package_folders())


def _package_folders() -> tuple[str, ...]:
    """Return the folders of the packages that are imported."""
    folders = []
    for name in PACKAGES:
        package = sys.modules.get(name)
        if package is not None:
            folders += [folder + os.sep for folder in package.__path__]
    return tuple(folders)


def _is_user_callable(value) -> bool:
    """Return True if it can be called, is no class, and is neither a package's nor Python's own."""
    if not callable(value) or isinstance(value, type) or is_released_code(value):
        return False
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return True
    return not _is_standard_library(_named_object(value))


def _is_standard_library(class_or_builtin) -> bool:
    return _top_package(class_or_builtin) in sys.stdlib_module_names


def _named_object(value):
    """Return the value if it is a class or a builtin function, its class otherwise."""
    return value if isinstance(value, (type, types.BuiltinFunctionType)) else type(value)


def _top_package(class_or_builtin) -> str:
    return (class_or_builtin.__module__ or "").partition(".")[0]


# ---- what a proof may rest on ----


def reason_unprovable(
    module: torch.nn.Module,
    method: str = "forward",
    trusted: tuple[type, ...] = (),
    children: bool = True,
) -> str | None:
    """Return None if a proof may rest on the module's method and all that it calls, or the reason
    why it may not.

    Args:
        method: the method that is proved.
        trusted: classes whose code is not looked at.
        children: False to look at no child. A child with matrices is never looked at: the proof
            calls it as it is.
    """
    if isinstance(module, trusted):
        return None
    functions = []
    for name in (method, *IMPLICIT_METHODS):
        functions += [(function, module) for function in _class_attribute_code(module, name)]
    reason = _first_reason(functions)
    if reason is not None:
        return reason
    for name, child in module._modules.items() if children else ():
        if child is not None and not _has_matrices(child):
            reason = _reason_unprovable_child(name, child, trusted)
            if reason is not None:
                return reason
    return None


def _has_matrices(module) -> bool:
    # ds_shape: of a weight that ZeRO-3 has taken away
    return any(len(getattr(p, "ds_shape", p.shape)) > 1 for p in module.parameters())


def _reason_unprovable_child(name, child, trusted) -> str | None:
    has_parameters = next(child.parameters(), None) is not None
    if not has_parameters and has_hooks(child, still_called=False):
        return f"there are hooks on its {name}"
    if isinstance(child, torch.jit.ScriptModule):
        return f"its {name} is TorchScript"
    forward = child.__dict__.get("forward")
    if forward is not None and getattr(forward, "__func__", None) is not type(child).forward:
        return f"the forward of its {name} was replaced on the instance"
    return reason_unprovable(child, trusted=trusted)


def reason_function_unprovable(function) -> str | None:
    """`reason_unprovable` for a function that is no method."""
    if isinstance(function, torch.nn.Module):  # as the package kernels makes of functions
        return reason_unprovable(function)
    return _first_reason([(function, None)])


def reason_called_unprovable(
    module: torch.nn.Module, parts: tuple, trusted: tuple[type, ...] = ()
) -> str | None:
    """`reason_unprovable` for the methods of the module's attributes that the proof has called.

    ``parts``: those that the proof has recorded."""
    for path, name, kind, function in parts:
        if not path or kind not in ("method", "bound") or is_released_code(function):
            continue
        holder = module
        for step in path:
            holder = getattr(holder, step)
        if isinstance(holder, trusted):
            continue
        if not isinstance(holder, torch.nn.Module):
            return f"{'.'.join(path)}.{name} is code of {type(holder).__name__}'s own"
        reason = reason_not_arithmetic(function, holder)
        if reason is not None:
            return reason
    return None


def _first_reason(queue: list[tuple]) -> str | None:
    """Return why one of these functions, or one that they call, is neither released code nor
    arithmetic.

    ``queue``: each function with the module that it is a method of, or None."""
    visited = []
    while queue:
        function, module = queue.pop()
        if any(function is each for each in visited):
            continue
        visited.append(function)
        reason = None if is_released_code(function) else reason_not_arithmetic(function, module)
        if reason is not None:
            return reason
        queue += _functions_called(function, module)
    return None


def _functions_called(function, module) -> list[tuple]:
    """List functions that it may call, each with its module or None.

    Of its globals those are listed that are user code, of its module all."""
    names = names_used(function)
    values = []
    if is_released_code(function):
        for _, items in globals_used(function):
            values += [wrapper.value for _, wrapper in items]
        for namespace in (torch, torch.nn.functional):
            values += [vars(namespace).get(name) for name in names]
    else:
        for instruction in dis.get_instructions(function):
            if instruction.opname == "LOAD_GLOBAL":
                values.append(_global_or_builtin(function, instruction.argval))
    called = [(value, None) for value in values if _is_user_callable(value)]
    if module is None:
        return called
    for name in names:
        for value in _items(module.__dict__.get(name)):
            called += [(code, None) for code in _user_code_of(value, names)]
    calls_super = any(
        "__class__" in each.__code__.co_freevars for each in wrapped_functions(function)
    )
    for name in names:
        called += [(code, module) for code in _class_attribute_code(module, name, calls_super)]
    return called


def _items(value) -> list:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _user_code_of(value, names) -> list:
    """List the user code that runs where a module's attribute is called, or is read by these
    names."""
    if _is_user_callable(value):
        return [value]
    classes = type(value).__mro__[:-1]
    if not any(is_released_code(cls) or _is_standard_library(cls) for cls in classes):
        return [value]
    if type(value).__module__ == "builtins":
        return []
    user_code = []
    for name in (*names, *IMPLICIT_METHODS):
        code = _class_attribute_code(value, name)
        user_code += [each for each in code if not is_released_code(each)]
    return user_code


def _class_attribute_code(instance, name: str, inherited: bool = False) -> list:
    """List the functions that run where an attribute of the instance's class is read or called.

    torch.nn.Module's own are not among them.

    Args:
        inherited: with those that it overrides, which ``super()`` may call.
    """
    values = [vars(cls)[name] for cls in type(instance).__mro__ if name in vars(cls)]
    values = [value for value in values if value is not vars(torch.nn.Module).get(name)]
    if not inherited:
        values = values[:1]
    code = []
    for value in map(_unwrap_descriptor, values):
        is_function = isinstance(value, types.FunctionType)
        if is_function or _is_user_callable(value) or _runs_code_when_read(value):
            code.append(value)
    return code


def _unwrap_descriptor(value):
    """Return the function of a static method, or of a property or class method that is released
    code; anything else as it is."""
    if isinstance(value, staticmethod):
        return value.__func__
    for kind, attribute in (
        (property, "fget"),
        (classmethod, "__func__"),
        (functools.cached_property, "func"),
    ):
        if isinstance(value, kind) and is_released_code(getattr(value, attribute)):
            return getattr(value, attribute)
    return value


def _runs_code_when_read(value) -> bool:
    """Return True if reading it as an attribute of a class runs user code: it is a descriptor."""
    if isinstance(value, (property, classmethod, functools.cached_property)):
        return True
    getter = getattr(type(value), "__get__", None)
    return isinstance(getter, types.FunctionType) and not is_released_code(value)


# ---- what arithmetic is ----


def reason_not_arithmetic(function, module: torch.nn.Module | None = None) -> str | None:
    """Return None if the function computes with tensors and does nothing else, or the first thing
    that it does beside.

    Args:
        function: user code.
        module: its first argument; None for a function that is no method.
    """
    name = getattr(getattr(function, "fget", function), "__qualname__", type(function).__name__)
    if not isinstance(function, types.FunctionType):
        return f"{name} is neither a plain function nor a method"
    reason = _reason_of_definition(function) or _reason_of_instructions(function, module)
    return None if reason is None else f"{name} {reason}"


def _reason_of_definition(function: types.FunctionType) -> str | None:
    """Return why its closure, its arguments or its constants are not those of arithmetic."""
    code = function.__code__
    if code.co_freevars == ("__class__",):
        return "calls super()"
    if function.__closure__:
        return f"reads {', '.join(code.co_freevars)} of the function around it"
    if code.co_flags & (ANY_NUMBER_OF_ARGUMENTS | SUSPENDED):
        return "takes any number of arguments, or is a generator"
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not all(map(_is_constant, defaults)):
        return "has a default argument that can change"
    if any(isinstance(names, tuple) and "out" in names for names in code.co_consts):
        return "writes by out="
    return None


def _reason_of_instructions(function: types.FunctionType, module) -> str | None:
    """Return why one of its instructions does more than arithmetic."""
    code = function.__code__
    self_name = code.co_varnames[0] if module is not None and code.co_argcount else None
    instructions = []
    for instruction in dis.get_instructions(function):
        if instruction.opname not in ("CACHE", "EXTENDED_ARG"):
            instructions.append(instruction)
    halving_slices = _find_halving_slices(instructions)
    # What the instruction before has loaded, if it is the module or the value of a global.
    loaded = None
    for index, instruction in enumerate(instructions):
        operation = instruction.opname
        value = instruction.argval
        in_place = operation == "BINARY_OP" and instruction.argrepr.endswith("=")
        if operation not in INSTRUCTIONS or in_place:
            return _describe_instruction(operation)
        is_constant = operation in ("LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST")
        if is_constant and _may_be_a_size(value):
            return f"has the number {value}, which may be a size"

        if self_name is not None and "FAST" in operation and self_name in _local_names(value):
            if not _reads_attribute_of(self_name, instructions, index):
                return f"uses {self_name} otherwise than to read its attributes"
            loaded = module
        elif operation == "LOAD_GLOBAL":
            loaded = _global_or_builtin(function, value)
            if not _is_allowed_global(function, value, loaded):
                return f"reads {value}"
        elif operation in READ_INSTRUCTIONS:
            if isinstance(loaded, types.ModuleType):
                loaded = getattr(loaded, value, None)
                is_namespace = any(loaded is namespace for namespace in NAMESPACES)
                if not is_namespace and not _is_arithmetic(loaded, value):
                    return f"uses {value}"
                continue
            if loaded is None:
                is_tensor_method = value in TENSOR_METHODS or index in halving_slices
                reason = None if is_tensor_method else f"reads .{value}"
            elif loaded is module:
                reason = _reason_of_attribute(module, value, _is_called(instruction))
            else:
                reason = f"reads .{value}"
            if reason is not None:
                return reason
            loaded = None
        elif operation != "PUSH_NULL":
            loaded = None
    return None


def _describe_instruction(operation: str) -> str:
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
    return isinstance(value, int) and abs(value) > LARGEST_NON_SIZE


def _is_constant(value) -> bool:
    """Return True for a constant, or a tuple of constants, none of which may be a size."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return type(value) in CONSTANT_TYPES and not _may_be_a_size(value)


def _local_names(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _reads_attribute_of(self_name, instructions, index) -> bool:
    """Return True if this instruction, which names the module, loads it last, and the next one
    reads an attribute of it."""
    instruction = instructions[index]
    names = _local_names(instruction.argval)
    stored = {
        "STORE_FAST": names,
        "STORE_FAST_STORE_FAST": names,
        "STORE_FAST_LOAD_FAST": names[:1],
    }.get(instruction.opname, ())
    loaded_last = names[-1] == self_name and names.count(self_name) == 1
    is_read = instructions[index + 1].opname in READ_INSTRUCTIONS
    return loaded_last and self_name not in stored and is_read


def _is_called(instruction) -> bool:
    """Return True if the attribute that it loads is called, and goes nowhere else."""
    if instruction.opname == "LOAD_METHOD":
        return True
    return sys.version_info >= (3, 12) and bool(instruction.arg & 1)


def _global_or_builtin(function, name: str):
    scope = function.__globals__
    builtins = scope.get("__builtins__", {})
    builtins = builtins if isinstance(builtins, dict) else vars(builtins)
    return scope.get(name, builtins.get(name))


def _is_allowed_global(function, name: str, value) -> bool:
    """Return True if a global is a constant, which is compared at each call, or only computes."""
    if name in function.__globals__ and _is_constant(value):
        return True
    if isinstance(value, type) and value in BUILTINS:
        return True
    if isinstance(value, types.ModuleType):
        return any(value is namespace for namespace in NAMESPACES)
    if isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__:
        return True  # looked at by itself
    if isinstance(value, (types.BuiltinFunctionType, types.FunctionType)):
        return value is abs or _is_arithmetic(value, value.__name__)
    return False


def _is_arithmetic(value, name: str) -> bool:
    """Return True if this value, which torch or math has under the name, is a dtype, a number, or a
    function that only computes."""
    if isinstance(value, (torch.dtype, float)):
        return True
    of_math = getattr(value, "__module__", None) == "math"
    return name in FUNCTIONS and (is_released_code(value) or of_math)


def _reason_of_attribute(module, name: str, called: bool) -> str | None:
    """Return why an attribute of the module, which is read or called, may mean more than a value
    that is compared at each call."""
    if name in module._parameters or name in module._buffers:
        return None
    static = inspect.getattr_static(type(module), name, None)
    value = module.__dict__.get(name, static)
    is_function = isinstance(value, (types.BuiltinFunctionType, types.FunctionType))
    if name in module._modules or is_function:
        return None if called else f"hands on .{name}"  # what is called is looked at by itself
    exists = name in module.__dict__ or hasattr(type(module), name)
    is_size = name == SIZE_ATTRIBUTE and type(value) is tuple
    if exists and (_is_constant(value) or is_size):
        return None
    return f"reads .{name}"


def _find_halving_slices(instructions) -> set[int]:
    """Return the indices of instructions that read ``shape`` in a slice's end ``x.shape[-1] // 2``.

    It halves a head: the one size that cannot mean anything else."""
    indices = set()
    for at, instruction in enumerate(instructions[:-5]):
        if instruction.opname not in READ_INSTRUCTIONS or instruction.argval != "shape":
            continue
        index, subscript, two, divide, *following = instructions[at + 1 : at + 7]
        # The step of the slice, None, may be loaded before it is built.
        operations = []
        for each in following:
            if each.argval is not None or not each.opname.startswith("LOAD_CONST"):
                operations.append(each.opname)
        if (
            index.argval == -1
            and (subscript.opname == "BINARY_SUBSCR" or subscript.argrepr == "[]")
            and two.argval == 2
            and (divide.opname == "BINARY_FLOOR_DIVIDE" or divide.argrepr == "//")
            and operations
            and operations[0] in ("BUILD_SLICE", "BINARY_SLICE")
        ):
            indices.add(at)
    return indices
