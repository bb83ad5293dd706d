"""Triton's interpreter: bf16 rounded as a GPU does, and less of what it does beside a kernel's own
arithmetic.

Its own work is most of the time of these tests: types and shapes made anew for every value, its
language replaced anew for every call. What is kept here depends on nothing but a type, or a
function's globals."""

import types

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def _round_like_a_gpu(convert):
    """The interpreter cuts fp32 off to bf16; every GPU rounds to nearest even."""

    def call(data, source, target, rounding_mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            values = torch.from_numpy(np.ascontiguousarray(data.view(np.float32)))
            return values.to(torch.bfloat16).view(torch.uint16).numpy().reshape(data.shape)
        if (source, target) == (tl.bfloat16, tl.float32):
            return (data.view(np.uint16).astype(np.uint32) << 16).reshape(data.shape)
        return convert(data, source, target, rounding_mode)

    return call


def _prepare_once(prepare):
    """What triton.language has is replaced once, for each of its modules that a function knows, and
    stays so."""
    known, ready = {}, set()

    def call(fn):
        if fn not in known:
            modules = [
                value for value in fn.__globals__.values() if isinstance(value, types.ModuleType)
            ]
            known[fn] = frozenset(
                m.__name__ for m in modules if m.__name__.startswith("triton.language")
            )
        if known[fn] not in ready:
            ready.add(known[fn])
            prepare(fn)
        return interpreter._LangPatchScope()

    return call


def _one_number(patch):
    """Before 3.7 the interpreter takes an array of one number for a number, as NumPy has not done
    since 2.5."""

    def call(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    return call


def _called_directly(obj, name, member, builder, scope):
    """A function of triton.language, with the interpreter in place of the compiler."""
    inner, semantic = getattr(member, "__wrapped__", member), TritonSemantic(builder)

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _by_name(of_type):
    known = {}

    def call(type):
        if type.name not in known:
            known[type.name] = of_type(type)
        return known[type.name]

    return call


def _one_of_each(cls):
    """One object for each type of blocks."""
    known, init = {}, cls.__init__

    def new(cls, element_ty, shape):
        key = (
            element_ty.name,
            getattr(element_ty, "address_space", None),
            *(getattr(n, "value", n) for n in shape),
        )
        if key not in known:
            made = object.__new__(cls)
            init(made, element_ty, shape)
            known[key] = made
        return known[key]

    cls.__new__, cls.__init__ = new, lambda self, element_ty, shape: None


def _of_its_type(init):
    """A value's shape and size are made once for its type."""
    known = {}

    def call(self, handle, type):
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = dict(vars(self))
        vars(self).update(known[type.name], handle=handle, type=type, dtype=type.scalar)

    return call


def _without_rules(check):
    """Two operands of one of these types are computed in it, and so is a number beside one."""
    kinds = {"fp32": (int, float), "int32": (int,), "int64": (int,), "int1": ()}

    def plain(kind, number):
        return type(number) in kinds.get(kind.name, ()) and (
            type(number) is float or -(2**31) <= number < 2**31
        )

    def call(self, lhs, rhs, *args, **kwargs):
        left, right = isinstance(lhs, core.tensor), isinstance(rhs, core.tensor)
        if left and right:
            alike = lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in kinds
        elif alike := left and plain(lhs.dtype, rhs):
            rhs = self.scalar_constant(rhs, lhs.dtype)
        elif alike := right and plain(rhs.dtype, lhs):
            lhs = self.scalar_constant(lhs, rhs.dtype)
        return (
            self.broadcast_impl_value(lhs, rhs) if alike else check(self, lhs, rhs, *args, **kwargs)
        )

    return call


def _shapes_once(broadcast):
    """Which types two values are broadcast to is found out once for theirs."""
    known = {}

    def call(self, lhs, rhs):
        if lhs.type is rhs.type:
            return lhs, rhs
        names = lhs.type.name, rhs.type.name
        if names not in known:
            both = broadcast(self, lhs, rhs)
            known[names] = [
                (value.type, [*value.type.shape] if value.type.is_block() else ()) for value in both
            ]
            return both
        return tuple(
            of(self, value, *to) for value, to in zip((lhs, rhs), known[names], strict=True)
        )

    def of(self, value, type, shape):
        if value.type.name == type.name:
            return value
        if value.type.is_block():
            return core.tensor(self.builder.create_broadcast(value.handle, shape), type)
        return core.tensor(self.builder.create_splat(type, value.handle), type)

    return call


def _overflow(self, lhs, rhs, binary_op):
    """As Triton has it, by NumPy alone: an integer of less than 64 bits stays within them."""
    kind, name = lhs.dtype, binary_op.__name__
    if kind.int_bitwidth >= 64:
        return
    assert kind.is_int() and rhs.dtype == kind, (
        f"expected matching integers, got {kind} and {rhs.dtype}"
    )
    of = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
    wide = of(lhs.handle.data, rhs.handle.data, dtype=np.int64)
    fits = kind.get_int_min_value() <= wide.min() and wide.max() <= kind.get_int_max_value()
    assert fits, f"int{kind.int_bitwidth} overflow detected for operation {name}"


def repair():
    """What every process needs that interprets kernels."""
    interpreter._convert_float = _round_like_a_gpu(interpreter._convert_float)
    interpreter._patch_lang_tensor = _one_number(interpreter._patch_lang_tensor)


def shorten():
    """The same results in less time."""
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _prepare_once(interpreter._patch_lang)
    interpreter._patch_attr = _called_directly
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    _one_of_each(core.block_type)
    core.tensor.__init__ = _of_its_type(core.tensor.__init__)
    TritonSemantic.binary_op_type_checking_impl = _without_rules(
        TritonSemantic.binary_op_type_checking_impl
    )
    TritonSemantic.broadcast_impl_value = _shapes_once(TritonSemantic.broadcast_impl_value)
    TritonSemantic.binary_op_sanitize_overflow_impl = _overflow
