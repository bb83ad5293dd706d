"""Private subclasses: how a module is patched.

A patched module is of a subclass of its own class: same name, same state, another ``forward``. So
isinstance, state-dict keys, deepcopy, pickle, hooks, DataParallel replicas and FSDP keep working,
one patched model changes no other, and the class can be given back. No weight is read, none is
added or renamed.

Modules of one class may get several subclasses, or none. To ``isinstance`` all of them stay one
class (`OneWithItsFamily`)."""

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

from liger_kernel.core.devices import within_a_mode
from liger_kernel.patch.proof import functions, purity
from liger_kernel.patch.proof.conditions import is_the_compilers
from liger_kernel.patch.proof.parts import unchanged
from liger_kernel.patch.proof.rewrite import Replacement

logger = logging.getLogger(__name__)
PLAIN = type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device


class OneWithItsFamily(abc.ABCMeta):
    """The class of private subclasses: ``isinstance(x, subclass)`` answers for the family's class.

    FSDP, PEFT and accelerate take the class of the first layer with a given name and wrap every
    module that is an instance of it. It is an ABCMeta so that a class can be derived from a patched
    module's class and from an ABC."""

    def __instancecheck__(cls, instance):
        family = _family(cls)
        return (
            super().__instancecheck__(instance) if family is cls else isinstance(instance, family)
        )

    # Not ``issubclass(subclass, family)``: an ABC asks its subclasses in turn, and this one would
    # ask it again.
    def __subclasscheck__(cls, subclass):
        family = _family(cls)
        return (
            super().__subclasscheck__(subclass)
            if family is cls
            else type.__subclasscheck__(family, subclass)
        )


def _family(cls: type) -> type:
    """The class that ``cls`` was made of, if it is a private subclass; itself, if another library's
    subclass of one."""
    while "_liger" in vars(cls):
        cls = cls._liger[0]
    return cls


@functools.cache
def _metaclass(of_family: type) -> type:
    """`OneWithItsFamily`, derived from the family's own metaclass where that is another than
    ``type``."""
    if issubclass(OneWithItsFamily, of_family):
        made = OneWithItsFamily
    elif issubclass(of_family, OneWithItsFamily):
        made = of_family
    else:
        made = type(OneWithItsFamily.__name__, (OneWithItsFamily, of_family), {})
    copyreg.pickle(made, _reduce_class)
    return made


def subclass(cls: type, what: Replacement, parts=()) -> type:
    """The subclass of ``cls`` whose forward is ours. One for each proof, so that modules share
    it."""
    used = what.globals_read(cls, parts) if what.guarded else ()
    return _subclass(cls, what, parts, getattr(cls, what.method), used)


@functools.cache
def _subclass(cls, what, parts, family, used):
    members = {
        "_liger": (cls, what),
        "_liger_parts": parts,
        "_liger_state": {},
        **what.members(cls),
    }
    members["_liger_read"] = family, used, parts
    if what.guarded:
        ours = members[what.method]
        members[what.method] = _guarded(cls, what, ours, parts, family, _same(family, used))
    names = dict(
        __module__=cls.__module__,
        __qualname__=cls.__qualname__,
        __doc__=cls.__doc__,
        __reduce_ex__=_reduce,
    )
    return _metaclass(type(cls))(
        cls.__name__, (cls,), {**names, **members, **members["_liger_state"]}
    )


def _same(family, used):
    """Whether globals, and the code of functions in nobody's package, are what they are now; None
    if there are none.

    Editors that reload a file put new code into the functions of the old one.
    """
    named = [held.value for _, found in used for _, held in found]
    own = {
        f
        for f in (family, *(layer for layer, _ in used), *named)
        if isinstance(f, types.FunctionType)
    }
    own = [(f, f.__code__, f.__defaults__) for f in own if not purity.is_released(f)]
    same_globals = functions.same_globals(used)
    if not own:
        return same_globals

    def same():
        if is_compiling():  # which guards the code that it has traced
            return same_globals is None or same_globals()
        return all(
            f.__code__ is code and f.__defaults__ is defaults for f, code, defaults in own
        ) and (same_globals is None or same_globals())

    return same


# ---- pickle and copy ----


def _reduce_class(cls):
    """Pickle the class itself, which has the name of the family's."""
    return (_loaded, _proof(cls)) if "_liger" in vars(cls) else cls.__qualname__


def _reduce(self, protocol):
    made, args, *state = self._liger[0].__reduce_ex__(self, max(protocol, 2))
    if made is not copyreg.__newobj__ or "_liger" not in vars(
        type(self)
    ):  # another library's subclass of ours
        return (made, args, *state)
    return (_New(type(self)), (), *state)


class _New:
    """Make an object of a private subclass: for a copy of that class itself, for pickle of what it
    was made of."""

    def __init__(self, cls):
        self.cls = cls

    def __call__(self):
        return self.cls.__new__(self.cls)

    def __reduce__(self):
        return functools.partial, (_rebuilt, *_proof(self.cls))


def _rebuilt(cls, what, parts=(), code=None):
    return _New(_loaded(cls, what, parts, code))()


def _proof(cls):
    return *cls._liger, cls._liger_parts, code_of(*cls._liger_read)


def _loaded(cls, what, parts, code):
    """The private subclass; the family's class where its code is not what it was when it was
    pickled."""
    try:
        made = subclass(cls, what, parts)
        if code in (None, code_of(*made._liger_read)):
            return made
    except Exception:  # what was replaced in the class is not in it any more
        if code is None:
            raise
    _warn_of(cls)
    return cls


@functools.cache
def _warn_of(cls):
    logger.warning(
        "%s: its code, or a value that it reads, is another one than when the model was pickled, so it was loaded "
        "unpatched; apply_liger_kernel(model) tries it anew",
        cls.__name__,
    )


@functools.cache
def code_of(family: Callable, used, parts) -> str:
    """Identify the code that a proof was made of, and the values that it reads, in any process of
    the same Python."""
    read = [
        (layer, [(name, getattr(held, "value", held)) for name, held in each])
        for layer, each in used
    ]
    functions_read = [want for *_, want in parts if isinstance(want, types.FunctionType)]
    return hashlib.sha256(repr(_described([family, read, functions_read])).encode()).hexdigest()


def _described(value):
    """Code, and values that cannot change, such that they can be compared; of another object, its
    class."""
    if isinstance(value, types.FunctionType):
        return [
            _described([f.__code__, f.__defaults__, f.__kwdefaults__])
            for f in functions.layers(value)
        ]
    if isinstance(value, types.CodeType):
        return value.co_code, value.co_names, _described(value.co_consts)
    if isinstance(value, (tuple, list)):
        return [_described(each) for each in value]
    if isinstance(value, (frozenset, set)):
        return sorted(map(repr, value))  # their order depends on the process
    if isinstance(value, dict):
        return [_described(item) for item in value.items()]
    if isinstance(value, type) or isinstance(value, types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value) if isinstance(value, PLAIN) else type(value).__qualname__


def _guarded(cls, what, ours, parts, family, same):
    """``ours`` with the signature of ``family``, while module, class and globals are what was
    proved; then the class's own."""
    name, fusible, pays = what.method, what.fusible, what.pays
    _, first, *_ = inspect.signature(family).parameters.values()

    def is_proved(self):
        known = (
            is_ours(self)
            and getattr(cls, name) is family
            and (same is None or same())
            and unchanged(self, parts)
        )
        return known and not within_a_mode()

    # `is_the_compilers` first: in a graph, whatever else is asked here costs guards in every step.
    def of_one(self, x):
        if fusible and is_the_compilers(x):
            return getattr(cls, name)(self, x)
        if is_proved(self):
            return ours(self, x)
        return getattr(cls, name)(self, x)

    def of_many(self, *args, **kwargs):
        x = args[0] if args else kwargs.get(first.name)
        if (fusible and is_the_compilers(x)) or (pays is not None and not pays(x)):
            return getattr(cls, name)(self, *args, **kwargs)
        if is_proved(self):
            return ours(self, *args, **kwargs)
        return getattr(cls, name)(self, *args, **kwargs)

    if not what.one_argument:
        return functions.named_as(family, of_many)
    code = of_one.__code__.replace(co_varnames=("self", first.name))  # it may be given by keyword
    defaults = None if first.default is first.empty else (first.default,)
    return functions.named_as(
        family, types.FunctionType(code, globals(), name, defaults, of_one.__closure__)
    )


def is_ours(module) -> bool:
    """Not so after a revert, when a wrapper that somebody has put around the forward before goes on
    calling it."""
    return hasattr(type(module), "_liger")


def become(module: torch.nn.Module, what: Replacement, parts=()) -> None:
    """``what`` is what the module's class was proved to be, by those of its parts."""
    swap(module, subclass(type(module), what, parts))
    module.__dict__.update(
        type(module)._liger_state
    )  # the class has it, too: torch.compile guards on who has a name


def swap(module: torch.nn.Module, new: type) -> None:
    old = type(module)
    for name in (
        "forward",
        "_old_forward",
    ):  # accelerate's hooks keep the bound method on the module
        method = module.__dict__.get(name)
        if isinstance(method, MethodType) and method.__func__ is old.forward:
            module.__dict__[name] = MethodType(new.forward, module)
    module.__class__ = new


def own_forward(module) -> bool:
    """Whether calling the module runs something else than its class's forward, which a new class
    would not change."""
    called = module.__dict__.get("_old_forward") or module.__dict__.get("forward")
    return called is not None and getattr(called, "__func__", None) is not type(module).forward
