"""What every operator is built on: registration with torch, the base of its autograd Function, its
`Case`.

How an operator runs:

* eager on a GPU: `liger_<op>()` → `Liger<Op>Function.apply` → the kernels. torch's dispatcher is
  not involved;
* under `torch.compile`: the same code. `custom_op` puts one opaque node `liger::<op>` into the
  graph;
* on any other device: the PyTorch reference, differentiated by autograd.
"""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from liger_kernel.core import devices
from liger_kernel.core.devices import transformed
from liger_kernel.core.inductor import cache_by_what_is_donated

# Operators and references call these copies: frameworks replace functions of torch.nn.functional by
# our operators.
F = types.SimpleNamespace(**vars(torch.nn.functional))


def custom_op(name: str, like: Callable):
    """Register ``fn`` as ``liger::name``. ``like(*args)`` allocates its outputs, and is also the
    fake kernel.

    Eager calls go straight to ``fn``: the dispatcher takes longer than a small memory-bound kernel.
    An output may be None; under `torch.compile` it is then an empty tensor."""

    def wrap(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def tensors(*args):
            return _filled(fn(*args), args[0])

        def fake(*args):
            cache_by_what_is_donated()  # before backward is compiled, and not where nothing is
            return _filled(like(*args), args[0])

        op = _registered(name, tensors, fake)

        @functools.wraps(fn)
        def call(*args):
            return op(*args) if is_compiling() else fn(*args)

        call.op = op
        return call

    return wrap


_libraries: dict[str, torch.library.Library] = {}  # an op is there as long as its library
_ROOT = __name__.partition(".")[0]
NAMESPACE = (
    "liger" if _ROOT == "liger_kernel" else _ROOT
)  # a copy under another name has its own: the hub's kernel


def _registered(name, fn, fake):
    """``liger::name``, of functions that return no argument and no view of one.

    By hand: `torch.library.custom_op` looks for such aliases in every call, and enters Python
    twice."""
    # a backward that runs within a frame of Dynamo's must not have its kernels' launches traced
    untraced = torch._disable_dynamo(fn)
    op, library = _defined(
        name, torch.library.infer_schema(fn, mutates_args=()), untraced, "CompositeExplicitAutograd"
    )
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return op


def _defined(name, schema, fn, key):
    _libraries.pop(name, None)  # of a module that is run again
    library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, fn, key)
    return getattr(getattr(torch.ops, NAMESPACE), name).default, library


def _filled(outs, like):
    return (
        tuple(like.new_empty(0) if o is None else o for o in outs)
        if isinstance(outs, tuple)
        else outs
    )


class Function(torch.autograd.Function):
    """An autograd Function that also works without kernels, and saves nothing if no gradient is
    needed.

    torch.compile bypasses ``apply``, so public functions check for kernels themselves, and use
    ``call``. A subclass defines ``reference(*args)``, which computes the same outputs in plain
    PyTorch, and ``arguments(ctx)``, which returns these args from what was saved. If gradients need
    a graph of their own (``create_graph=True``), ``again`` runs instead of backward. It
    differentiates the reference."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "apply" in vars(cls):
            run_eagerly(cls.apply.__func__)
        if "backward" in vars(cls):
            cls.backward = staticmethod(_backward_or_again(cls.backward))

    @classmethod
    def call(cls, *args):
        """Call ``apply``. Within torch.compile, an argument may be the same tensor as another
        one."""
        if is_dynamo_compiling():
            args = distinct(args)
        return cls.apply(*args)

    @classmethod
    def apply(cls, *args):
        if not args[0].is_floating_point():
            raise TypeError(
                f"{cls.__name__}: the first argument is {args[0].dtype}, give a floating point tensor"
            )
        if not devices.has_kernels(args[0]) or transformed():
            return cls.reference(*args)
        if not torch.is_grad_enabled():
            args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        return super(torch.autograd.Function, cls).apply(
            *args
        )  # skips what only functorch's transforms need

    @classmethod
    def again(cls, ctx, *grads):
        """backward with differentiable operations."""
        args, needs = cls.arguments(ctx), ctx.needs_input_grad
        found = gradients(cls.reference, args, [*needs, *[False] * len(args)][: len(args)], grads)
        return *found, *[None] * (len(needs) - len(args))


def run_eagerly(fn):
    """Have torch.compile run ``fn`` and all that it calls as they are, where it would begin a graph
    with ``fn``.

    It does so with an autograd Function's ``apply`` after a graph break, and cannot trace the
    ``super()`` in there. Unlike `torch.compiler.disable`, this leaves no wrapper around ``fn`` and
    does not import Dynamo. It does nothing where PyTorch has renamed these functions."""
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(fn.__code__, frames._FrameExecStrategy(skip, skip))
    except AttributeError:
        pass
    return fn


run_eagerly(Function.apply.__func__)  # a subclass's own is found in __init_subclass__


def distinct(args):
    """Return args with a view in place of each tensor that has come before.

    Dynamo has a graph break where an autograd Function gets the same tensor twice.
    """
    seen = []
    for a in args:
        if isinstance(a, torch.Tensor) and any([a is b for b in seen]):
            a = a.view_as(a)
        seen.append(a)
    return seen


def _backward_or_again(backward):
    @functools.wraps(backward)
    def call(ctx, *grads):
        if torch.is_grad_enabled():
            return ctx._forward_cls.again(ctx, *grads)
        return backward(ctx, *(without_graph(*grads) if is_compiling() else grads))

    return call


def without_graph(*grads):
    """The same gradients that came into a backward in a graph. ``create_graph=True`` will raise
    RuntimeError.

    PyTorch traces the backward of an autograd Function as if no gradient needed a graph of its own.
    Backends like "eager" run what was traced, and a part of the second derivative would be missing.
    AOTAutograd, so Inductor and "aot_eager", leaves nothing of this in its graph, and refuses by
    itself, not always (docs/compile.md)."""
    return [g if g is None else _incoming(g) for g in grads]


def _incoming_gradient(g: torch.Tensor) -> torch.Tensor:
    if (
        torch._C._current_graph_task_id() != -1
        and torch._C._autograd._get_current_graph_task_keep_graph()
    ):
        # the graph has turned gradients off, so only the engine knows: its callbacks run with
        # create_graph as the mode
        torch.autograd.Variable._execution_engine.queue_callback(_refuse_graph)
    return g.view_as(g)


def _refuse_graph():
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True through liger_kernel's operators in a function that torch.compile has compiled: the "
            "backward of a compiled autograd Function has no graph; differentiate twice what is not compiled"
        )


# AOTAutograd looks into a composite op; other backends call it
_incoming, _ = _defined(
    "incoming_gradient",
    "(Tensor(a) g) -> Tensor(a)",
    _incoming_gradient,
    "CompositeImplicitAutograd",
)


def gradients(fn, args, needs, grads):
    """-> the gradients of ``fn(*args)``, with a graph, from ``grads``, those of its outputs.

    There is one for each arg: None where ``needs`` is False.
    """
    # a view of each arg, since one may depend on another, or be the same tensor
    args = [a.view_as(a) if need else a for a, need in zip(args, needs, strict=True)]
    outputs = fn(*args)
    outputs = zip(outputs if isinstance(outputs, tuple) else (outputs,), grads, strict=True)
    outputs = [(y, dy) for y, dy in outputs if dy is not None and y is not None and y.requires_grad]
    wanted = [a for a, need in zip(args, needs, strict=True) if need]
    if not outputs or not wanted:
        return (None,) * len(needs)
    ys, dys = zip(*outputs, strict=True)
    found = iter(torch.autograd.grad(ys, wanted, dys, create_graph=True, allow_unused=True))
    return tuple(next(found) if need else None for need in needs)


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it in which the entries of a row are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def matrix(x: torch.Tensor) -> torch.Tensor:
    """x (..., N) as (M, N): a view if there is one. N may be 0, for which ``reshape(-1, N)``
    raises."""
    if x.dim() == 2:
        return x
    N = x.shape[-1]
    return x.reshape(-1 if N else math.prod(x.shape[:-1]), N)


def matrix_rows(x: torch.Tensor) -> torch.Tensor:
    """x (..., N) as (M, N) in which the entries of a row are contiguous: a view if there is one,
    else a copy."""
    x = matrix(x)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in ``dtype``. In torch 2.11, Dynamo loses the gradient of an output at a ``.to`` that
    changes nothing."""
    return x if x.dtype == dtype else x.to(dtype)


@functools.lru_cache
def rounded_number(x: float | None, dtype: torch.dtype) -> float | None:
    """Round a number to ``dtype``. None stays None."""
    return x if x is None else torch.tensor(x, dtype=dtype, device="cpu").item()


def _holders(tensor: torch.Tensor) -> tuple[int, ...]:
    """Reference counts of the tensor and its memory, in C++ and in Python, and of the tensor that
    it is a view of."""
    memory = tensor.untyped_storage()
    counts = tensor._use_count(), sys.getrefcount(tensor)
    counts += torch._C._storage_Use_Count(memory._cdata), sys.getrefcount(memory)
    base = tensor._base
    return counts if base is None else (*counts, base._use_count(), sys.getrefcount(base))


class _Probe(torch.autograd.Function):
    """Saves a tensor to which nothing else refers, and counts the references in backward as
    `may_overwrite` does."""

    counts: dict[bool, tuple[int, ...]] = {}

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        _Probe.counts[x._base is not None] = _within(x)
        return dy.expand_as(x)


def _within(
    tensor: torch.Tensor,
) -> tuple[int, ...]:  # a call, so that the stack is as deep as in may_overwrite
    return _holders(tensor)


def _references(argument) -> int:
    return sys.getrefcount(argument)


@functools.cache
def _sole_holder(view: bool, references: int) -> tuple[int, ...]:
    """The counts that this build of torch shows for a saved tensor to which only the graph refers.

    ``references`` is the count for a call's argument to which nothing else refers. While
    torch.compile evaluates frames, this count and the others are higher. After torch.compile has
    raised, that stays so."""
    found = []
    for _ in range(
        8
    ):  # another thread may read a frame's variables meanwhile, which adds references
        with torch.enable_grad(), torch.device("cpu"):
            leaf = torch.zeros(2, requires_grad=True)
            with torch.inference_mode(False):
                _Probe.apply((leaf * 1).view(2, 1) if view else leaf * 1).backward()
        found.append(_Probe.counts[view])
    return tuple(map(min, *found))


def may_overwrite(ctx, saved: torch.Tensor, inner: bool = False) -> bool:
    """In backward: may a gradient be written into the memory of this tensor from
    ``ctx.saved_tensors``?

    Yes, if the graph is freed after this backward and only the graph refers to that memory: no
    variable, no view, no other node, no saved-tensor hook. A hook may keep the data in a form that
    has no reference count, such as an array or a file; the hooks of a checkpoint do not. Whoever
    writes must call `torch.autograd.graph.increment_version`. ``inner``: forward has made it, and
    it is neither given nor returned."""
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    if not inner and (saved.is_leaf or not saved.requires_grad):
        return False
    before, counts, after = _references(object()), _holders(saved), _references(object())
    alone = _sole_holder(saved._base is not None, min(before, after))
    if counts == alone:
        return True
    if any(a > b for a, b in zip(counts, alone, strict=True)):
        return False
    if counts[0] == alone[0]:
        return True
    hooks = [
        raw.unpack_hook for raw in ctx._raw_saved_tensors
    ]  # a hook made this tensor, not the graph
    return all(hook is None or _of_checkpoint(hook) for hook in hooks)


def _of_checkpoint(hook) -> bool:
    return getattr(hook, "__module__", None) == "torch.utils.checkpoint"


def keep(ctx, taken, inputs):
    """Keep the gradients that forward has computed, and the inputs that a double backward needs.

    Saved-tensor hooks see only the inputs: the gradients are not activations, which a hook may move
    or keep. A checkpoint sees both, since it must drop them and run forward again."""
    hooks = None if is_compiling() else torch._C._autograd._top_saved_tensors_default_hooks(False)
    if is_compiling():
        ctx.taken = None
        ctx.save_for_backward(*taken)
    elif hooks is not None and _of_checkpoint(hooks[0]):
        ctx.taken = None
        ctx.save_for_backward(*taken, *inputs)
    else:
        ctx.taken = taken
        ctx.save_for_backward(*inputs)


def unseen() -> bool:
    """Whether the graph alone would have what `keep` keeps: no saved-tensor hook, no compiled
    graph."""
    return not is_compiling() and torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def kept(ctx, n: int):
    """-> the n gradients that forward has computed, and whether backward may overwrite them.

    If it may, they are not kept any longer.
    """
    taken = ctx.taken
    if taken is None:  # a hook or a compiled graph has them; if they are freed, this raises
        return ctx.saved_tensors[:n], False
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return taken, False
    ctx.taken = None
    return taken, True


def kept_inputs(ctx, n: int):
    """-> the inputs that `keep` has kept in addition to the n gradients."""
    return ctx.saved_tensors[n if ctx.taken is None else 0 :]


@dataclass(frozen=True)
class Case:
    """An operator for the generic tests and the benchmark. It describes how to verify it; no code
    is generated."""

    name: str
    fn: Callable  # the operator: fn(**inputs, **option) -> a tensor or a tuple of tensors
    reference: Callable  # the same call in plain PyTorch, any dtype
    # (*shape) -> dict of tensors on the default device; float32 ones are cast to the dtype tested
    inputs: Callable
    shapes: tuple  # of the tests: small, with odd sizes, one row, no power of two
    options: tuple = ({},)  # keyword arguments of the tests; one may replace an input (w=None)
    bench: tuple = ()  # shapes of the benchmark
    traffic: Callable | None = (
        None  # (inputs) -> the bytes that (forward, backward) must move at least
    )
    flops: Callable | None = (
        None  # (inputs) -> operations of forward + backward, if matmuls dominate
    )
    fp32_roundings: int = (
        1  # of error beyond PyTorch's; 2 where exp and log are the hardware's (2 ulp)
    )


CASES: list[Case] = []
