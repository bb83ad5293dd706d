"""Make Triton's interpreter round bf16 as a GPU does, and make it faster.

The interpreter's own work is most of the time of these tests: it makes types and shapes anew for
every value, and replaces its language anew for every call. What is cached here depends on nothing
but a type, or a function's globals.
"""

import types

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def _round_like_a_gpu(convert):
    """Round fp32 to the nearest even bf16, as every GPU does. The interpreter truncates."""

    def call(data, source, target, rounding_mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            values = torch.from_numpy(np.ascontiguousarray(data.view(np.float32)))
            return values.to(torch.bfloat16).view(torch.uint16).numpy().reshape(data.shape)
        if (source, target) == (tl.bfloat16, tl.float32):
            return (data.view(np.uint16).astype(np.uint32) << 16).reshape(data.shape)
        return convert(data, source, target, rounding_mode)

    return call


def _patch_language_once(prepare):
    """Replace what a function uses of each module of triton.language once, for good."""
    language_modules = {}  # function -> names of modules
    prepared = set()

    def call(fn):
        if fn not in language_modules:
            names = [v.__name__ for v in fn.__globals__.values() if isinstance(v, types.ModuleType)]
            language = [name for name in names if name.startswith("triton.language")]
            language_modules[fn] = frozenset(language)
        if language_modules[fn] not in prepared:
            prepared.add(language_modules[fn])
            prepare(fn)
        return interpreter._LangPatchScope()

    return call


def _add_index(patch):
    """Convert an array of one number to an index.

    Before 3.7 the interpreter takes such an array for a number, as NumPy has not done since 2.5.
    """

    def call(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    return call


def _keep_truth(splat):
    """Keep a truth value's dtype where it becomes a block.

    The interpreter takes the result of a comparison of two numbers for a number of their dtype.
    """

    def call(self, block_type, value):
        block = splat(self, block_type, value)
        if value.data.dtype == bool:
            block.data = block.data.astype(bool)
        return block

    return call


def _call_directly(obj, name, member, builder, scope):
    """Replace a function of triton.language by one that uses the interpreter, not the compiler."""
    inner = getattr(member, "__wrapped__", member)
    semantic = TritonSemantic(builder)

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _cache_by_name(convert):
    """Cache a function of a type by the type's name."""
    cache = {}

    def call(type):
        if type.name not in cache:
            cache[type.name] = convert(type)
        return cache[type.name]

    return call


def _cache_instances(cls):
    """Make a class of block types return one object for each type."""
    cache = {}
    init = cls.__init__

    def new(cls, element_ty, shape):
        key = (
            element_ty.name,
            getattr(element_ty, "address_space", None),
            *(getattr(n, "value", n) for n in shape),
        )
        if key not in cache:
            instance = object.__new__(cls)
            init(instance, element_ty, shape)
            cache[key] = instance
        return cache[key]

    cls.__new__ = new
    cls.__init__ = lambda self, element_ty, shape: None


def _cache_attributes(init):
    """Compute a value's shape and size once for its type."""
    attributes = {}

    def call(self, handle, type):
        if type.name not in attributes:
            init(self, handle, type)
            attributes[type.name] = dict(vars(self))
        vars(self).update(attributes[type.name], handle=handle, type=type, dtype=type.scalar)

    return call


def _skip_promotion(check):
    """Skip the rules of type promotion where they change nothing.

    Two operands of the same common type are computed in it, and so is a number beside a tensor.
    """
    number_types = {"fp32": (int, float), "int32": (int,), "int64": (int,), "int1": ()}

    def keeps_dtype(dtype, number):
        if type(number) not in number_types.get(dtype.name, ()):
            return False
        return type(number) is float or -(2**31) <= number < 2**31

    def call(self, lhs, rhs, *args, **kwargs):
        left = isinstance(lhs, core.tensor)
        right = isinstance(rhs, core.tensor)
        if left and right:
            same_dtype = lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in number_types
        elif same_dtype := left and keeps_dtype(lhs.dtype, rhs):
            rhs = self.scalar_constant(rhs, lhs.dtype)
        elif same_dtype := right and keeps_dtype(rhs.dtype, lhs):
            lhs = self.scalar_constant(lhs, rhs.dtype)
        if same_dtype:
            return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, *args, **kwargs)

    return call


def _cache_broadcast(broadcast):
    """Find out once for two types which types their values are broadcast to."""
    targets = {}  # names of two types -> their (type, shape)

    def call(self, lhs, rhs):
        if lhs.type is rhs.type:
            return lhs, rhs
        names = lhs.type.name, rhs.type.name
        if names not in targets:
            values = broadcast(self, lhs, rhs)
            targets[names] = []
            for value in values:
                shape = [*value.type.shape] if value.type.is_block() else ()
                targets[names].append((value.type, shape))
            return values
        left, right = targets[names]
        return broadcast_to(self, lhs, *left), broadcast_to(self, rhs, *right)

    def broadcast_to(self, value, type, shape):
        if value.type.name == type.name:
            return value
        if value.type.is_block():
            return core.tensor(self.builder.create_broadcast(value.handle, shape), type)
        return core.tensor(self.builder.create_splat(type, value.handle), type)

    return call


def _keep_tensors(to_cpu):
    """Give a kernel the CPU's tensors themselves, not others made of the same memory."""

    def call(self, args, kwargs):
        if all(map(_needs_no_copy, (*args, *kwargs.values()))):
            return args, kwargs
        return to_cpu(self, args, kwargs)

    return call


def _needs_no_copy(arg):
    if isinstance(arg, torch.Tensor):
        return arg.device.type == "cpu"
    # neither a tuple nor a descriptor, which may have tensors, nor a tensor's wrapper
    return arg is None or isinstance(arg, (bool, int, float, str, core.constexpr, core.dtype))


def _copy_back_others(from_cpu):
    def call(self, args, cpu_args, kwargs, cpu_kwargs):
        if cpu_args is not args:
            from_cpu(self, args, cpu_args, kwargs, cpu_kwargs)

    return call


def _check_overflow(self, lhs, rhs, binary_op):
    """Check as Triton does, but by NumPy, that integers of less than 64 bits do not overflow."""
    dtype = lhs.dtype
    name = binary_op.__name__
    if dtype.int_bitwidth >= 64:
        return
    assert dtype.is_int() and rhs.dtype == dtype, (
        f"expected matching integers, got {dtype} and {rhs.dtype}"
    )
    compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
    wide = compute(lhs.handle.data, rhs.handle.data, dtype=np.int64)
    fits = dtype.get_int_min_value() <= wide.min() and wide.max() <= dtype.get_int_max_value()
    assert fits, f"int{dtype.int_bitwidth} overflow detected for operation {name}"


def repair():
    """Correct what differs from a GPU. Every process that interprets kernels needs this."""
    interpreter._convert_float = _round_like_a_gpu(interpreter._convert_float)
    interpreter._patch_lang_tensor = _add_index(interpreter._patch_lang_tensor)
    builder = interpreter.InterpreterBuilder
    builder.create_splat = _keep_truth(builder.create_splat)


def speed_up():
    """Compute the same results in less time."""
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _patch_language_once(interpreter._patch_lang)
    interpreter._patch_attr = _call_directly
    interpreter._get_np_dtype = _cache_by_name(interpreter._get_np_dtype)
    _cache_instances(core.block_type)
    core.tensor.__init__ = _cache_attributes(core.tensor.__init__)
    executor = interpreter.GridExecutor
    executor._init_args_hst = _keep_tensors(executor._init_args_hst)
    executor._restore_args_dev = _copy_back_others(executor._restore_args_dev)
    TritonSemantic.binary_op_type_checking_impl = _skip_promotion(
        TritonSemantic.binary_op_type_checking_impl
    )
    TritonSemantic.broadcast_impl_value = _cache_broadcast(TritonSemantic.broadcast_impl_value)
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
