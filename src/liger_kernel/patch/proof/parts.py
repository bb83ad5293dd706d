"""Parts of a module: what its forward has read, and what a proof therefore rests on.

`probe` runs a module once more as a *watched copy*, which records what is read: attributes of the
module, and those of the children and of the configuration that it reads in turn. These *parts* say
for which other modules of the class the proof holds. They are tested again at every call
(`unchanged`), so they also say for how long it holds. If a forward reads what cannot be compared,
nothing can be proved (`Unprovable`). Weights and projections are no parts: a proof brings its own.

A part is (path, name, kind, expected). ``path`` leads from the module to the object that was read,
``name`` is the attribute. ``expected`` is a value or a class and no other object, so that it is
true of copies, pickled modules and replicas as well. The kinds:

    "class"     an object of that class, whose own parts follow
    "method"    that function of the class, called as a method
    "bound"     a method of that function, set on the instance
    "kind"      a module of ours, proved to be of that kind
    "absent"    no such attribute
    "object"    that very function, class or module
    a type      a value of that type: `freeze` of it is equal to ``expected``

Parts are pickled with the module. Pickle does not find a function's own type by its name: hence
"object"."""

from __future__ import annotations

import enum
import functools
import inspect
import types

import torch

from liger_kernel.patch.proof.hooks import without_hooks
from liger_kernel.patch.proof.rewrite import replacement_of

IMMUTABLE_TYPES = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum, type,
    types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip
COMPARED_BY_IDENTITY = types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type
MEMBER_DICTS = "_parameters", "_buffers", "_modules"
# Attributes that every module has: hooks and the like.
MODULE_INTERNALS = vars(torch.nn.Module()).keys() - {*MEMBER_DICTS, "training"}
# Stands for an attribute that is not there, and for a value that cannot be compared.
NOT_COMPARABLE = object()


class Unprovable(Exception):
    """The module does what no proof can rest on.

    It is no AttributeError, which hasattr would swallow."""


def freeze(value):
    """Return the value, or something hashable that is equal exactly where the value is.

    Returns NOT_COMPARABLE for a value with a state of its own."""
    if type(value) is functools.partial:
        keywords = value.keywords
        return _freeze_all(
            functools.partial, (value.func, *value.args, *keywords, *keywords.values())
        )
    if isinstance(value, types.FunctionType):
        return NOT_COMPARABLE if value.__closure__ else value
    if isinstance(value, IMMUTABLE_TYPES):
        return value
    if isinstance(value, dict):
        return _freeze_all(type(value), [each for item in value.items() for each in item])
    if isinstance(value, (tuple, list)):
        return _freeze_all(type(value), value)
    return NOT_COMPARABLE


def _freeze_all(cls, values):
    frozen = [freeze(value) for value in values]
    if any(value is NOT_COMPARABLE for value in frozen):
        return NOT_COMPARABLE
    return cls, *frozen


# torch.compile traces it: it has to stay a plain loop.
def unchanged(module, parts) -> bool:
    """Return True if the module has these parts."""
    current_path = ()
    holder = module
    for path, name, kind, expected in parts:
        if path != current_path:
            current_path = path
            holder = module
            for step in path:
                holder = getattr(holder, step, NOT_COMPARABLE)
        # asked first: Dynamo of torch 2.11 cannot compare a type with a string
        is_value = not isinstance(kind, str)
        if not is_value and kind == "method":
            if name in holder.__dict__ or getattr(type(holder), name, None) is not expected:
                return False
            continue
        value = getattr(holder, name, NOT_COMPARABLE)
        if is_value:
            same = value is expected or (type(value) is kind and freeze(value) == expected)
        elif kind == "class":
            same = type(value) is expected
        elif kind == "object":
            same = value is expected
        elif kind == "bound":
            same = getattr(value, "__func__", None) is expected
        elif kind == "kind":
            same = type(replacement_of(value)) is expected
        else:  # "absent"
            same = value is NOT_COMPARABLE
        if not same:
            return False
    return True


def module_signature(module):
    """Return what a proof looks at without reading values.

    Modules with equal signatures are of one class, have the same members, and their members are of
    the same classes."""
    attributes = tuple((name, type(value)) for name, value in module.__dict__.items())
    tensors = []
    for members in (module._parameters, module._buffers):
        tensors += [(name, tensor is None) for name, tensor in members.items()]
    children = []
    for name, child in module._modules.items():
        has_parameters = child is not None and any(True for _ in child.parameters())
        children.append((name, type(child), has_parameters))
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return type(module), attributes, tuple(tensors), tuple(children), implementation


class ReadRecorder:
    """Records the parts of one module, as a forward reads them from a `watched_copy`."""

    def __init__(self):
        # (path, name) -> (kind, expected)
        self.parts_read = {}
        # The watched copies of the objects that were read, by path and mode.
        self._watched = {}

    def parts(self) -> tuple:
        """Return the parts in the form of `unchanged`."""
        return tuple((*where, *test) for where, test in self.parts_read.items())

    def record(self, *runs) -> None:
        """Call each ``run(make=...)`` with watched copies and record what it reads.

        Raises:
            Unprovable: its output is not that of ``run()``, with a `probe.probe_copy`.
        """
        for run in runs:
            if not torch.equal(run(), run(make=self.watched_copy)):
                raise Unprovable("it does something else when it is watched")

    def watched_copy(
        self, module, parameters=None, children=None, buffers=None, writes=False, **attributes
    ):
        """Return a `probe.probe_copy` that records what is read of it.

        ``writes``: True if its forward may set attributes."""
        stubs = {}
        for name, child in (children or {}).items():
            if not isinstance(child, torch.nn.Module):
                stubs[name] = child
        for members in (parameters or {}, stubs, buffers or {}):
            attributes |= {name: value for name, value in members.items() if value is not None}
        return self._watch(module, (), attributes, writes)

    def _watch(self, original, path, attributes, writes):
        """Return a watched copy of the object at the path; ``attributes`` replace those it has."""
        recorder = self
        cls = type(original)
        members = [original.__dict__.get(name, {}) for name in MEMBER_DICTS]
        makes_attributes = hasattr(cls, "__getattr__") and (
            cls.__getattr__ is not torch.nn.Module.__getattr__
        )

        class Watched(cls):
            def __getattribute__(watched, name):
                if name in attributes:
                    return attributes[name]
                if name == "__dict__" or name in MEMBER_DICTS:
                    raise Unprovable(f"its forward looks at all that it holds ({name})")
                value = super().__getattribute__(name)
                return recorder._record_read(
                    watched, original, path, name, value, attributes, writes
                )

            def __getattr__(watched, name):
                for values in members:
                    if name in values:
                        return recorder._record_read(
                            watched, original, path, name, values[name], attributes, writes
                        )
                if makes_attributes:
                    raise Unprovable(f"its class makes {name} when it is read")
                recorder.parts_read[path, name] = "absent", None
                raise AttributeError(name)

            def __setattr__(watched, name, value):
                if not writes:
                    raise Unprovable(f"its forward sets {name}")
                attributes[name] = value

        Watched.__name__ = cls.__name__
        Watched.__qualname__ = cls.__qualname__
        watched = object.__new__(Watched)
        values = original.__dict__
        if isinstance(original, torch.nn.Module):
            values = values | without_hooks(original)
        object.__getattribute__(watched, "__dict__").update(values)
        return watched

    def _record_read(self, watched, original, path, name, value, attributes, writes):
        """Record that an attribute was read. Returns what the forward gets for its value."""
        on_instance = name in original.__dict__
        in_class = inspect.getattr_static(type(original), name, NOT_COMPARABLE)
        of_torch = name in MODULE_INTERNALS or (
            in_class is inspect.getattr_static(torch.nn.Module, name, None)
        )
        if isinstance(value, types.MethodType) and value.__self__ in (watched, original):
            if on_instance:
                self.parts_read.setdefault((path, name), ("bound", value.__func__))
            elif not of_torch:
                self.parts_read.setdefault((path, name), ("method", value.__func__))
            return types.MethodType(value.__func__, watched)
        computed = of_torch or isinstance(in_class, (property, functools.cached_property))
        if name in MODULE_INTERNALS or (computed and not on_instance):
            return value  # what a property reads is recorded by itself
        frozen = freeze(value)
        if frozen is not NOT_COMPARABLE:
            kind = "object" if isinstance(value, COMPARED_BY_IDENTITY) else type(value)
            self.parts_read.setdefault((path, name), (kind, frozen))
            return value
        inner_path = (*path, name)
        if isinstance(value, (torch.Tensor, types.FunctionType)) or not hasattr(value, "__dict__"):
            where = ".".join(inner_path)
            raise Unprovable(f"what it computes rests on {where}, a {type(value).__name__}")
        self.parts_read.setdefault((path, name), ("class", type(value)))
        mode = {"training": attributes["training"]} if isinstance(value, torch.nn.Module) else {}
        key = inner_path, *mode.values()
        if key not in self._watched:
            self._watched[key] = self._watch(value, inner_path, mode, writes)
        return self._watched[key]
