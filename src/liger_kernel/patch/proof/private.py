"""Private subclasses: how a module is patched.

A patched module is an object of a subclass of its own class: same name, same state, another
``forward``. So isinstance, state-dict keys, deepcopy, pickle, hooks, DataParallel replicas and FSDP
keep working, one patched model changes no other, and the class can be given back. No weight is
read, none is added or renamed.

Modules of one class may get several subclasses, or none. To ``isinstance`` all of them stay one
class (`TransparentSubclassMeta`).

A private subclass has these attributes:

    _liger          (the class that it was made of, its `Replacement`)
    _liger_parts    the parts that the proof rests on (`parts`)
    _liger_state    attributes that its objects get, by name
    _liger_read     (the original method, the globals that it reads, the parts)"""

from __future__ import annotations

import abc
import copyreg
import enum
import functools
import hashlib
import inspect
import logging
import types
from collections.abc import Callable
from types import MethodType

import torch
from torch.compiler import is_compiling

from liger_kernel.core.devices import in_user_mode
from liger_kernel.patch.proof import functions, purity
from liger_kernel.patch.proof.conditions import left_to_compiler
from liger_kernel.patch.proof.parts import unchanged
from liger_kernel.patch.proof.rewrite import Replacement

logger = logging.getLogger(__name__)

# Types whose repr identifies a value.
VALUE_TYPES = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device,
)  # fmt: skip


# ---- converting a module ----


def convert_module(module: torch.nn.Module, replacement: Replacement, parts=()) -> None:
    """Make the module an object of the private subclass of its class with this replacement.

    ``parts``: those that the proof rests on."""
    set_class(module, patched_subclass(type(module), replacement, parts))
    # The class has these attributes, too: torch.compile guards on which of both has a name.
    module.__dict__.update(type(module)._liger_state)


def set_class(module: torch.nn.Module, new: type) -> None:
    """Change the module's class, and bind its forward anew where the module itself keeps it."""
    old = type(module)
    for name in ("forward", "_old_forward"):  # accelerate's hooks keep the bound method there
        method = module.__dict__.get(name)
        if isinstance(method, MethodType) and method.__func__ is old.forward:
            module.__dict__[name] = MethodType(new.forward, module)
    module.__class__ = new


def has_instance_forward(module) -> bool:
    """Return True if calling the module runs another function than its class's forward.

    A new class would not change that."""
    called = module.__dict__.get("_old_forward") or module.__dict__.get("forward")
    return called is not None and getattr(called, "__func__", None) is not type(module).forward


def is_patched(module) -> bool:
    """Return True if the module's class is a private subclass, or derived from one.

    False after a revert, even if a wrapper that someone put around the patched forward still calls
    it."""
    return hasattr(type(module), "_liger")


# ---- the subclass ----


class TransparentSubclassMeta(abc.ABCMeta):
    """The metaclass of private subclasses. ``isinstance(x, subclass)`` answers for the original
    class.

    FSDP, PEFT and accelerate take the class of the first layer with a given name and wrap every
    module that is an instance of it. It is an ABCMeta so that a class can be derived from a patched
    module's class and from an ABC."""

    def __instancecheck__(cls, instance):
        original = original_class(cls)
        if original is cls:
            return super().__instancecheck__(instance)
        return isinstance(instance, original)

    def __subclasscheck__(cls, subclass):
        original = original_class(cls)
        if original is cls:
            return super().__subclasscheck__(subclass)
        # Not ``issubclass(subclass, original)``: an ABC asks its subclasses in turn, and this one
        # would ask it again.
        return type.__subclasscheck__(original, subclass)


def original_class(cls: type) -> type:
    """Return the class that a private subclass was made of.

    Returns ``cls`` itself if it is none, also where another library has derived it from one."""
    while "_liger" in vars(cls):
        cls = cls._liger[0]
    return cls


@functools.cache
def _metaclass_for(metaclass: type) -> type:
    """Return `TransparentSubclassMeta`, derived from the original class's own metaclass where that
    is not ``type``."""
    if issubclass(TransparentSubclassMeta, metaclass):
        combined = TransparentSubclassMeta
    elif issubclass(metaclass, TransparentSubclassMeta):
        combined = metaclass
    else:
        combined = type(TransparentSubclassMeta.__name__, (TransparentSubclassMeta, metaclass), {})
    copyreg.pickle(combined, _reduce_class)
    return combined


def patched_subclass(cls: type, replacement: Replacement, parts=()) -> type:
    """Return the subclass of ``cls`` whose forward is ours. Modules with equal proofs share it."""
    globals_read = replacement.globals_read(cls, parts) if replacement.guarded else ()
    method = getattr(cls, replacement.method)
    return _make_subclass(cls, replacement, parts, method, globals_read)


@functools.cache
def _make_subclass(cls, replacement, parts, original_method, globals_read):
    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce_object,
        "_liger": (cls, replacement),
        "_liger_parts": parts,
        "_liger_state": {},
        **replacement.class_members(cls),
        "_liger_read": (original_method, globals_read, parts),
    }
    if replacement.guarded:
        name = replacement.method
        same_code = code_check(original_method, globals_read)
        members[name] = _guard_method(
            cls, replacement, members[name], parts, original_method, same_code
        )
    members.update(members["_liger_state"])
    return _metaclass_for(type(cls))(cls.__name__, (cls,), members)


# ---- the guard of a replaced method ----


def _guard_method(cls, replacement, patched, parts, original, same_code):
    """Return a method that runs ``patched`` while module, class and globals are what was proved,
    and the class's own method otherwise.

    It has the signature of ``original``. ``same_code``: see `code_check`."""
    name = replacement.method
    fusible = replacement.fusible
    worthwhile = replacement.worthwhile
    _, first, *_ = inspect.signature(original).parameters.values()

    def is_proved(self):
        return (
            is_patched(self)
            and getattr(cls, name) is original
            and (same_code is None or same_code())
            and unchanged(self, parts)
            and not in_user_mode()
        )

    # `left_to_compiler` first: in a graph, whatever else is asked here costs guards in every step.
    def one_argument(self, x):
        if fusible and left_to_compiler(x):
            return getattr(cls, name)(self, x)
        if is_proved(self):
            return patched(self, x)
        return getattr(cls, name)(self, x)

    def any_arguments(self, *args, **kwargs):
        x = args[0] if args else kwargs.get(first.name)
        if (fusible and left_to_compiler(x)) or (worthwhile is not None and not worthwhile(x)):
            return getattr(cls, name)(self, *args, **kwargs)
        if is_proved(self):
            return patched(self, *args, **kwargs)
        return getattr(cls, name)(self, *args, **kwargs)

    if not replacement.takes_one_argument:
        return functions.copy_metadata(original, any_arguments)
    # The argument gets its original name: callers may give it by keyword.
    code = one_argument.__code__.replace(co_varnames=("self", first.name))
    defaults = None if first.default is first.empty else (first.default,)
    method = types.FunctionType(code, globals(), name, defaults, one_argument.__closure__)
    return functions.copy_metadata(original, method)


def code_check(original_method, globals_read):
    """Return a function that returns True while the globals, and the code of the user's functions,
    are what they are now. None if there is nothing to compare.

    Editors that reload a file put new code into the functions of the old one.
    """
    candidates = {original_method}
    for function, items in globals_read:
        candidates.add(function)
        for _, wrapper in items:
            if isinstance(wrapper.value, types.FunctionType):
                candidates.add(wrapper.value)
    user_code = []
    for function in candidates:
        if isinstance(function, types.FunctionType) and not purity.is_released_code(function):
            keywords = dict(function.__kwdefaults__ or {})
            user_code.append((function, function.__code__, function.__defaults__, keywords))
    same_globals = functions.globals_unchanged(globals_read)
    if not user_code:
        return same_globals

    def same_code():
        if is_compiling():  # which guards the code that it has traced
            return same_globals is None or same_globals()
        for function, code, defaults, keywords in user_code:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return False
            if (function.__kwdefaults__ or {}) != keywords:
                return False
        return same_globals is None or same_globals()

    return same_code


# ---- pickle and copy ----


def _reduce_class(cls):
    """Pickle a private subclass, which has its original's name, by what it was made of."""
    if "_liger" in vars(cls):
        return _load_subclass, _pickled_proof(cls)
    return cls.__qualname__


def _reduce_object(self, protocol):
    make, args, *state = self._liger[0].__reduce_ex__(self, max(protocol, 2))
    derived = "_liger" not in vars(type(self))  # by another library, from a private subclass
    if make is not copyreg.__newobj__ or derived:
        return (make, args, *state)
    return (_NewObject(type(self)), (), *state)


class _NewObject:
    """Makes an object of a private subclass.

    A copy of it keeps the class itself, a pickle what the class was made of."""

    def __init__(self, cls):
        self.cls = cls

    def __call__(self):
        return self.cls.__new__(self.cls)

    def __reduce__(self):
        return functools.partial, (_load_object, *_pickled_proof(self.cls))


def _load_object(cls, replacement, parts=(), fingerprint=None):
    return _NewObject(_load_subclass(cls, replacement, parts, fingerprint))()


def _pickled_proof(cls):
    return *cls._liger, cls._liger_parts, code_fingerprint(*cls._liger_read)


def _load_subclass(cls, replacement, parts, fingerprint):
    """Return the private subclass, or ``cls`` if its code is not what it was when it was
    pickled."""
    try:
        subclass = patched_subclass(cls, replacement, parts)
        if fingerprint in (None, code_fingerprint(*subclass._liger_read)):
            return subclass
    except Exception:  # what was replaced in the class is not in it any more
        if fingerprint is None:
            raise
    _warn_once(cls)
    return cls


@functools.cache
def _warn_once(cls):
    logger.warning(
        "%s: its code, or a value that it reads, is another one than when the model was pickled, "
        "so it was loaded unpatched; apply_liger_kernel(model) tries it anew",
        cls.__name__,
    )


@functools.cache
def code_fingerprint(method: Callable, globals_read, parts) -> str:
    """Identify the code that was proved and the values that it reads, in any process of the same
    Python.

    Args:
        globals_read: as `functions.globals_used` lists them.
        parts: as of `parts`; the functions among them count.
    """
    values = []
    for function, items in globals_read:
        values.append((function, [(name, _unwrap(value)) for name, value in items]))
    functions_read = [value for *_, value in parts if isinstance(value, types.FunctionType)]
    description = _describe([method, values, functions_read])
    return hashlib.sha256(repr(description).encode()).hexdigest()


def _unwrap(value):
    return value.value if isinstance(value, functions.ByIdentity) else value


def _describe(value):
    """Describe code and immutable values so that their repr identifies them.

    Of another object only the class is described."""
    if isinstance(value, types.FunctionType):
        description = []
        for function in functions.wrapped_functions(value):
            code = [function.__code__, function.__defaults__, function.__kwdefaults__]
            description.append(_describe(code))
        return description
    if isinstance(value, types.CodeType):
        return value.co_code, value.co_names, _describe(value.co_consts)
    if isinstance(value, (tuple, list)):
        return [_describe(each) for each in value]
    if isinstance(value, (frozenset, set)):
        return sorted(map(repr, value))  # their order depends on the process
    if isinstance(value, dict):
        return [_describe(item) for item in value.items()]
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value) if isinstance(value, VALUE_TYPES) else type(value).__qualname__
