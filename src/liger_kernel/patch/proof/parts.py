"""What a proof rests on: what a forward has read of its module.

`probe` runs a module once more as a shell that notes what is read of it: its attributes, and those
of the children and of the configuration that it reads in turn. These *parts* say for which other
modules of the class the proof holds, and, tested at every call (`unchanged`), for how long. What
cannot be compared is `Unfit` for a proof. Weights and projections are no parts: a proof brings its
own.

A part is (path, name, kind, want). It wants values and classes, no objects, so that it is true of
copies, pickled modules and replicas as well. The kinds:

    "class"     an object of that class, whose own parts follow
    "method"    the class's function        "bound"    a method on the instance, of that function
    "kind"      a module of ours, proved to be of that kind
    "absent"    nothing                     "object"   that very function, class or module
    a type      a value of that type, `frozen`

Kinds have to be pickled with the module. Python finds no function's own type by its name: hence
"object"."""

from __future__ import annotations

import enum
import functools
import inspect
import types

import torch

from liger_kernel.patch.proof.hooks import without
from liger_kernel.patch.proof.rewrite import known_as

FIXED = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum, type,
    types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip
OBJECTS = types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type
MEMBERS = "_parameters", "_buffers", "_modules"
OWN = vars(torch.nn.Module()).keys() - {*MEMBERS, "training"}  # hooks and the like
NOTHING = object()  # stands for what is not there, and for what cannot be compared


class Unfit(Exception):
    """The module does what no proof can rest on. (Not an AttributeError: hasattr would swallow
    it.)"""


def frozen(value):
    """The value, or something hashable that is equal where the value is; NOTHING for what has a
    state of its own."""
    if type(value) is functools.partial:
        return _all_frozen(
            functools.partial, (value.func, *value.args, *value.keywords, *value.keywords.values())
        )
    if isinstance(value, types.FunctionType):
        return NOTHING if value.__closure__ else value
    if isinstance(value, FIXED):
        return value
    if isinstance(value, dict):
        return _all_frozen(type(value), [part for item in value.items() for part in item])
    return _all_frozen(type(value), value) if isinstance(value, (tuple, list)) else NOTHING


def _all_frozen(cls, values):
    values = [frozen(value) for value in values]
    return NOTHING if any(value is NOTHING for value in values) else (cls, *values)


def unchanged(module, parts) -> bool:
    """Whether the module's parts are these."""
    at, holder = (), module
    for path, name, kind, want in parts:
        if path != at:
            at, holder = path, module
            for step in path:
                holder = getattr(holder, step, NOTHING)
        is_value = not isinstance(
            kind, str
        )  # asked first: Dynamo of torch 2.11 cannot compare a type with a string
        if not is_value and kind == "method":
            if name in holder.__dict__ or getattr(type(holder), name, None) is not want:
                return False
            continue
        value = getattr(holder, name, NOTHING)
        if is_value:
            same = value is want or (type(value) is kind and frozen(value) == want)
        elif kind == "class":
            same = type(value) is want
        elif kind == "object":
            same = value is want
        elif kind == "bound":
            same = getattr(value, "__func__", None) is want
        elif kind == "kind":
            same = type(known_as(value)) is want
        else:
            same = value is NOTHING
        if not same:
            return False
    return True


def outline(module):
    """What a proof looks at by itself: the class, which members there are, and of which classes."""
    attributes = tuple((name, type(value)) for name, value in module.__dict__.items())
    tensors = tuple(
        (k, v is None) for held in (module._parameters, module._buffers) for k, v in held.items()
    )
    children = [
        (k, type(v), v is not None and any(True for _ in v.parameters()))
        for k, v in module._modules.items()
    ]
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return type(module), attributes, tensors, tuple(children), implementation


class Reads:
    """The parts of one module, as they are read of what `shell` gives."""

    def __init__(self):
        self.found, self._watched = {}, {}

    def parts(self) -> tuple:
        return tuple((*where, *test) for where, test in self.found.items())

    def check(self, *runs) -> None:
        """``run(make=...)`` with the watched shell, which must give what the plain one does."""
        for run in runs:
            if not torch.equal(run(), run(make=self.shell)):
                raise Unfit("it does something else when it is watched")

    def shell(self, module, parameters=None, children=None, buffers=None, writes=False, **given):
        """`probe.shell`, watched. ``writes``: whether it may set attributes."""
        stubs = {
            name: child
            for name, child in (children or {}).items()
            if not isinstance(child, torch.nn.Module)
        }
        for members in (parameters or {}, stubs, buffers or {}):
            given |= {name: value for name, value in members.items() if value is not None}
        return self._watch(module, (), given, writes)

    def _watch(self, real, path, given, writes):
        reads, cls = self, type(real)
        members = [real.__dict__.get(name, {}) for name in MEMBERS]

        class Watched(cls):
            def __getattribute__(it, name):
                if name in given:
                    return given[name]
                if name == "__dict__" or name in MEMBERS:
                    raise Unfit(f"its forward looks at all that it holds ({name})")
                return reads._noted(
                    it, real, path, name, super().__getattribute__(name), given, writes
                )

            def __getattr__(it, name):
                for held in members:
                    if name in held:
                        return reads._noted(it, real, path, name, held[name], given, writes)
                if (
                    getattr(cls, "__getattr__", torch.nn.Module.__getattr__)
                    is not torch.nn.Module.__getattr__
                ):
                    raise Unfit(f"its class makes {name} when it is read")
                reads.found[path, name] = "absent", None
                raise AttributeError(name)

            def __setattr__(it, name, value):
                if not writes:
                    raise Unfit(f"its forward sets {name}")
                given[name] = value

        Watched.__name__, Watched.__qualname__ = cls.__name__, cls.__qualname__
        it = object.__new__(Watched)
        own = real.__dict__ | without(real) if isinstance(real, torch.nn.Module) else real.__dict__
        object.__getattribute__(it, "__dict__").update(own)
        return it

    def _noted(self, it, real, path, name, value, given, writes):
        """What the forward gets for the value that it has read."""
        in_class = inspect.getattr_static(type(real), name, NOTHING)
        own = name in OWN or in_class is inspect.getattr_static(torch.nn.Module, name, None)
        here = self.found.setdefault
        if isinstance(value, types.MethodType) and value.__self__ in (it, real):
            if not own or name in real.__dict__:
                here((path, name), ("bound" if name in real.__dict__ else "method", value.__func__))
            return types.MethodType(value.__func__, it)
        computed = own or isinstance(in_class, (property, functools.cached_property))
        if name in OWN or (computed and name not in real.__dict__):
            return value  # what a property reads is noted by itself
        if frozen(value) is not NOTHING:
            here(
                (path, name),
                ("object" if isinstance(value, OBJECTS) else type(value), frozen(value)),
            )
            return value
        if isinstance(value, (torch.Tensor, types.FunctionType)) or not hasattr(value, "__dict__"):
            raise Unfit(
                f"what it computes rests on {'.'.join((*path, name))}, a {type(value).__name__}"
            )
        here((path, name), ("class", type(value)))
        mode = {"training": given["training"]} if isinstance(value, torch.nn.Module) else {}
        key = (*path, name), *mode.values()
        if key not in self._watched:
            self._watched[key] = self._watch(value, (*path, name), mode, writes)
        return self._watched[key]
