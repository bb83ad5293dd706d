"""The base of every operator: registration with torch, the class of its autograd Function, its
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
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from liger_kernel.core import devices
from liger_kernel.core.devices import in_func_transform
from liger_kernel.core.inductor import key_backward_by_donated_buffers
from liger_kernel.core.overwrite import in_checkpoint

# Operators and references call these copies: frameworks replace functions of torch.nn.functional by
# our operators.
F = types.SimpleNamespace(**vars(torch.nn.functional))

# of the operators in torch.ops; a copy of this package under another name, such as the hub's
# kernel, has its own
_ROOT = __name__.partition(".")[0]
NAMESPACE = "liger" if _ROOT == "liger_kernel" else _ROOT


def custom_op(name: str, like: Callable):
    """Register the decorated function as ``liger::name``.

    ``like(*args)`` allocates its outputs, and is also the fake kernel. Eager calls go straight to
    the function: the dispatcher takes longer than a small memory-bound kernel. An output may be
    None; under `torch.compile` it is then an empty tensor.
    """

    def wrap(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def tensors(*args):
            return _none_to_empty(fn(*args), args[0])

        def fake(*args):
            key_backward_by_donated_buffers(NAMESPACE)  # before this operator's graph is compiled
            return _none_to_empty(like(*args), args[0])

        op = _register(name, tensors, fake)

        @functools.wraps(fn)
        def call(*args):
            return op(*args) if is_compiling() else fn(*args)

        call.op = op
        return call

    return wrap


_libraries: dict[str, torch.library.Library] = {}  # an op exists as long as its library does


def _register(name, fn, fake):
    """Register ``liger::name``, and return the op. ``fn`` returns no argument and no view of one.

    By hand: `torch.library.custom_op` looks for such aliases in every call, and enters Python
    twice.
    """
    # a backward that runs within a frame of Dynamo's must not have its kernels' launches traced
    untraced = torch._disable_dynamo(fn)
    schema = torch.library.infer_schema(fn, mutates_args=())
    op, library = _define(name, schema, untraced, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return op


def _define(name, schema, fn, dispatch_key):
    _libraries.pop(name, None)  # its module was loaded before
    library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, fn, dispatch_key)
    return getattr(getattr(torch.ops, NAMESPACE), name).default, library


def _none_to_empty(outputs, like):
    """Replace each None in a tuple of outputs by an empty tensor."""
    if not isinstance(outputs, tuple):
        return outputs
    return tuple(like.new_empty(0) if output is None else output for output in outputs)


class Function(torch.autograd.Function):
    """An autograd Function that also works without kernels, and saves nothing if no gradient is
    needed.

    torch.compile bypasses ``apply``, so public functions check for kernels themselves, and use
    ``call``. A subclass defines ``reference(*args)``, which computes the same outputs in plain
    PyTorch, and ``arguments(ctx)``, which returns these args from what was saved. If gradients need
    a graph of their own (``create_graph=True``), ``differentiable_backward`` runs instead of
    backward. It differentiates the reference.
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "apply" in vars(cls):
            run_eagerly(cls.apply.__func__)
        if "backward" in vars(cls):
            cls.backward = staticmethod(_with_differentiable_backward(cls.backward))

    @classmethod
    def call(cls, *args):
        """Call ``apply``. Within torch.compile, one tensor may be passed as several arguments."""
        if is_dynamo_compiling():
            args = alias_repeated(args)
        return cls.apply(*args)

    @classmethod
    def apply(cls, *args):
        if not args[0].is_floating_point():
            raise TypeError(
                f"{cls.__name__}: the first argument is {args[0].dtype}, "
                "give a floating point tensor"
            )
        if not devices.has_kernels(args[0]) or in_func_transform():
            return cls.reference(*args)
        args = resolve_negative(args)
        if not torch.is_grad_enabled():
            args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        return apply_function(cls, *args)

    @classmethod
    def differentiable_backward(cls, ctx, *grad_outputs):
        """Compute what backward computes, with differentiable operations."""
        args = cls.arguments(ctx)
        num_inputs = len(ctx.needs_input_grad)
        needs = [*ctx.needs_input_grad, *[False] * len(args)][: len(args)]
        grads = differentiable_gradients(cls.reference, args, needs, grad_outputs)
        return *grads, *[None] * (num_inputs - len(args))


def resolve_negative(args):
    """Return args, with a copy of each tensor that PyTorch negates when it reads it.

    Such a tensor is the imaginary part of a conjugate, for example. Kernels read what is in memory.
    """
    if not any([isinstance(a, torch.Tensor) and a.is_neg() for a in args]):
        return args
    return [a.resolve_neg() if isinstance(a, torch.Tensor) else a for a in args]


def run_eagerly(fn):
    """Have torch.compile run ``fn`` and all that it calls as they are, where it would begin a graph
    with ``fn``.

    It does so with an autograd Function's ``apply`` after a graph break, and cannot trace the
    ``super()`` in there. Unlike `torch.compiler.disable`, this leaves no wrapper around ``fn`` and
    does not import Dynamo. It does nothing where PyTorch has renamed these functions.
    """
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(fn.__code__, frames._FrameExecStrategy(skip, skip))
    except AttributeError:
        pass
    return fn


run_eagerly(Function.apply.__func__)  # __init_subclass__ does it for a subclass's own ``apply``


def apply_function(function_class, *args):
    """Apply an autograd Function where torch.func is off: without what only its transforms need."""
    return super(torch.autograd.Function, function_class).apply(*args)


run_eagerly(apply_function)


def alias_repeated(args):
    """Return args with a view in place of each tensor that has come before.

    Dynamo has a graph break where an autograd Function gets the same tensor twice.
    """
    seen = []
    for a in args:
        if isinstance(a, torch.Tensor) and any([a is b for b in seen]):
            a = a.view_as(a)
        seen.append(a)
    return seen


def _with_differentiable_backward(backward):
    @functools.wraps(backward)
    def call(ctx, *grads):
        if torch.is_grad_enabled():
            return ctx._forward_cls.differentiable_backward(ctx, *grads)
        if is_compiling():
            return backward(ctx, *refuse_create_graph(*grads))
        return backward(ctx, *resolve_negative(grads))

    return call


def refuse_create_graph(*grads):
    """Return the gradients that came into a backward in a graph, so that ``create_graph=True``
    raises RuntimeError.

    PyTorch traces the backward of an autograd Function as if no gradient needed a graph of its own.
    Backends like "eager" run what was traced, and a part of the second derivative would be missing.
    AOTAutograd, so Inductor and "aot_eager", leaves nothing of this in its graph, and refuses by
    itself, not always (docs/compile.md).
    """
    return [g if g is None else _incoming(g) for g in grads]


def _incoming_gradient(g: torch.Tensor) -> torch.Tensor:
    if (
        torch._C._current_graph_task_id() != -1
        and torch._C._autograd._get_current_graph_task_keep_graph()
    ):
        # the graph has turned gradients off, so only the engine knows: its callbacks run with
        # create_graph as the mode
        torch.autograd.Variable._execution_engine.queue_callback(_raise_if_create_graph)
    return g.view_as(g)


def _raise_if_create_graph():
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True through liger_kernel's operators in a function that torch.compile "
            "has compiled: the backward of a compiled autograd Function has no graph; "
            "differentiate twice what is not compiled"
        )


# AOTAutograd looks into a composite op; other backends call it
_incoming, _ = _define(
    "incoming_gradient",
    "(Tensor(a) g) -> Tensor(a)",
    _incoming_gradient,
    "CompositeImplicitAutograd",
)


def differentiable_gradients(fn, args, needs_grad, grad_outputs):
    """Return the gradients of ``fn(*args)``, with a graph: one for each arg, None where
    ``needs_grad`` is False.
    """
    # a view of each arg, since one may depend on another, or be the same tensor
    args = [a.view_as(a) if need else a for a, need in zip(args, needs_grad, strict=True)]
    outputs = fn(*args)
    if not isinstance(outputs, tuple):
        outputs = (outputs,)
    pairs = [
        (y, dy)
        for y, dy in zip(outputs, grad_outputs, strict=True)
        if dy is not None and y is not None and y.requires_grad
    ]
    inputs = [a for a, need in zip(args, needs_grad, strict=True) if need]
    if not pairs or not inputs:
        return (None,) * len(needs_grad)
    ys, dys = zip(*pairs, strict=True)
    grads = torch.autograd.grad(ys, inputs, dys, create_graph=True, allow_unused=True)
    remaining = iter(grads)
    return tuple(next(remaining) if need else None for need in needs_grad)


def with_unit_stride(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy of it in which the entries of a row are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def flatten_to_2d(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., N) as (M, N): a view if there is one.

    N may be 0, for which ``reshape(-1, N)`` raises.
    """
    if x.dim() == 2:
        return x
    N = x.shape[-1]
    return x.reshape(-1 if N else math.prod(x.shape[:-1]), N)


def linear_output(x, weight, bias):
    """Return ``F.linear(x, weight, bias)`` within a Function's forward."""
    if bias is None or x.dim() == 2:
        return F.linear(x, weight, bias)
    # of more dimensions F.linear returns a view, and autograd does not let the caller write to one
    out = F.linear(flatten_to_2d(x), weight, bias)
    return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], out.shape[-1]))


def flatten_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., N) as (M, N) in which the entries of a row are contiguous.

    It is a view if there is one, else a copy.
    """
    x = flatten_to_2d(x)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def cast_if_needed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x in ``dtype``.

    In torch 2.11, Dynamo loses the gradient of an output at a ``.to`` that changes nothing.
    """
    return x if x.dtype == dtype else x.to(dtype)


@functools.lru_cache
def round_number(x: float | None, dtype: torch.dtype) -> float | None:
    """Round a number to ``dtype``. None stays None."""
    return x if x is None else torch.tensor(x, dtype=dtype, device="cpu").item()


def save_grads(ctx, grads, inputs):
    """Save the gradients that forward has computed, and the inputs that a double backward needs.

    Saved-tensor hooks see only the inputs: the gradients are not activations, which a hook may move
    or keep. A checkpoint sees both, since it must drop them and run forward again.
    """
    if is_compiling():
        ctx.forward_grads = None
        ctx.save_for_backward(*grads)
    elif in_checkpoint():
        ctx.forward_grads = None
        ctx.save_for_backward(*grads, *inputs)
    else:
        ctx.forward_grads = grads
        ctx.save_for_backward(*inputs)


def no_saved_tensor_hooks() -> bool:
    """Return True if only the graph sees what is saved: no saved-tensor hook, no compiled graph."""
    return not is_compiling() and torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def saved_grads(ctx, n: int):
    """Return the n gradients that forward has computed, and whether backward may overwrite them.

    If it may, ctx drops them.
    """
    grads = ctx.forward_grads
    if grads is None:  # a hook or a compiled graph has them; if they are freed, this raises
        return ctx.saved_tensors[:n], False
    if is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return grads, False
    ctx.forward_grads = None
    return grads, True


def saved_inputs(ctx, n: int):
    """Return the inputs that `save_grads` has saved in addition to the n gradients."""
    return ctx.saved_tensors[n if ctx.forward_grads is None else 0 :]


@dataclass(frozen=True)
class Case:
    """An operator for the generic tests and the benchmark. It describes how to verify it; no code
    is generated."""

    name: str
    # the operator: fn(**inputs, **option) returns a tensor or a tuple of tensors
    fn: Callable
    # the same call in plain PyTorch, any dtype
    reference: Callable
    # inputs(*shape): dict of tensors on the default device; float32 ones are cast to the dtype
    # tested
    inputs: Callable
    # of the tests: small, with odd sizes, one row, no power of two
    shapes: tuple
    # keyword arguments of the tests; one may replace an input (w=None)
    options: tuple = ({},)
    # shapes of the benchmark
    bench: tuple = ()
    # traffic(inputs): the bytes that (forward, backward) must move at least
    traffic: Callable | None = None
    # flops(inputs): operations of forward + backward, if matmuls dominate
    flops: Callable | None = None
    # of error beyond PyTorch's; 2 where exp and log are the hardware's (2 ulp)
    fp32_roundings: int = 1


CASES: list[Case] = []
