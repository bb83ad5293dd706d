"""Private subclasses: how a module is patched.

A patched module is of a subclass of its own class: same name, same state, another ``forward``. So isinstance,
state-dict keys, deepcopy, pickle, hooks, DataParallel replicas and FSDP keep working, one patched model changes no
other, and the class can be given back. No weight is read, none is added or renamed.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
from types import MethodType

import torch

from liger_kernel.patch import functions
from liger_kernel.patch.deferred import is_the_compilers, tensor_of
from liger_kernel.patch.parts import unchanged
from liger_kernel.patch.rewrite import Kind


def subclass(cls: type, what: Kind, parts=()) -> type:
    """The subclass of ``cls`` whose forward is ours. One for each proof, so that modules share it."""
    method = getattr(cls, what.method)
    return _subclass(cls, what, parts, method, functions.used_by(method))


@functools.cache
def _subclass(cls, what, parts, family, used):
    members = {"_liger": (cls, what), "_liger_parts": parts, "_liger_state": {}, **what.members(cls)}
    if what.guarded:
        ours = members[what.method]
        members[what.method] = _guarded(cls, what, ours, parts, family, functions.same_globals(used))
    names = dict(__module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__, __reduce_ex__=_reduce)
    return type(cls)(cls.__name__, (cls,), {**names, **members, **members["_liger_state"]})


def _reduce(self, protocol):
    """Pickled as (the family's class, what was proved of it); deepcopy comes by here, too."""
    made, args, *state = self._liger[0].__reduce_ex__(self, max(protocol, 2))
    if made is not copyreg.__newobj__ or "_liger" not in vars(type(self)):  # another library's subclass of ours
        return (made, args, *state)
    return (_rebuilt, (*self._liger, self._liger_parts), *state)


def _rebuilt(cls, what, parts=()):
    return cls.__new__(subclass(cls, what, parts))


def _guarded(cls, what, ours, parts, family, same):
    """``ours`` with the signature of ``family``, while module, class and globals are what was proved; then the class's
    own."""
    name, fusible, pays = what.method, what.fusible, what.pays
    _, first, *_ = inspect.signature(family).parameters.values()

    # `is_the_compilers` first: in a graph, whatever else is asked here costs guards in every step.
    def of_one(self, x):
        if fusible and is_the_compilers(x):
            return getattr(cls, name)(self, x)
        if is_ours(self) and getattr(cls, name) is family and (same is None or same()) and unchanged(self, parts):
            return ours(self, x)
        return getattr(cls, name)(self, tensor_of(x))

    def of_many(self, *args, **kwargs):
        x = args[0] if args else kwargs.get(first.name)
        if (fusible and is_the_compilers(x)) or (pays is not None and not pays(x)):
            return getattr(cls, name)(self, *args, **kwargs)
        if is_ours(self) and getattr(cls, name) is family and (same is None or same()) and unchanged(self, parts):
            return ours(self, *args, **kwargs)
        return getattr(cls, name)(self, *args, **kwargs)

    if not what.one_argument:
        return functions.named_as(family, of_many)
    code = of_one.__code__.replace(co_varnames=("self", first.name))  # it may be given by keyword
    defaults = None if first.default is first.empty else (first.default,)
    return functions.named_as(family, types.FunctionType(code, globals(), name, defaults, of_one.__closure__))


def is_ours(module) -> bool:
    """Not so after a revert, when a wrapper that somebody has put around the forward before goes on calling it."""
    return hasattr(type(module), "_liger")


def become(module: torch.nn.Module, what: Kind, parts=()) -> None:
    """``what`` is what the module's class was proved to be, by those of its parts."""
    swap(module, subclass(type(module), what, parts))
    module.__dict__.update(type(module)._liger_state)  # the class has it, too: torch.compile guards on who has a name


def swap(module: torch.nn.Module, new: type) -> None:
    old = type(module)
    for name in ("forward", "_old_forward"):  # accelerate's hooks keep the bound method on the module
        method = module.__dict__.get(name)
        if isinstance(method, MethodType) and method.__func__ is old.forward:
            module.__dict__[name] = MethodType(new.forward, module)
    module.__class__ = new


def own_forward(module) -> bool:
    """Whether calling the module runs something else than its class's forward, which a new class would not change."""
    called = module.__dict__.get("_old_forward") or module.__dict__.get("forward")
    return called is not None and getattr(called, "__func__", None) is not type(module).forward
