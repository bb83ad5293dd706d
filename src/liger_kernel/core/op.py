"""What every operator is built on: registration with torch, its autograd Function, its `Case`.

An operator has one path for each way of running:

* eager on a GPU: `liger_<op>()` → `Liger<Op>Function.apply` → the kernels, with no dispatcher in between;
* under `torch.compile`: the same code, where `custom_op` puts one opaque `liger::<op>` node into the graph;
* on any other device: the PyTorch reference, differentiated by autograd.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from liger_kernel.core import devices

# What operators and references call. Frameworks put operators of ours in the place of PyTorch's functions.
F = types.SimpleNamespace(**vars(torch.nn.functional))


def custom_op(name: str, like: Callable):
    """Register ``fn`` as ``liger::name``. ``like(*args)`` allocates its outputs and doubles as the fake kernel.

    Eager calls go straight to the function: the dispatcher costs more than a small memory-bound kernel. Where it gives
    None among its outputs, under `torch.compile` there is an empty tensor.
    """

    def wrap(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def tensors(*args):
            return _filled(fn(*args), args[0])

        op = torch.library.custom_op(f"liger::{name}", tensors, mutates_args=())
        op.register_fake(lambda *args: _filled(like(*args), args[0]))

        @functools.wraps(fn)
        def call(*args):
            return op(*args) if is_compiling() else fn(*args)

        call.op = op
        return call

    return wrap


def _filled(outs, like):
    return tuple(like.new_empty(0) if o is None else o for o in outs) if isinstance(outs, tuple) else outs


class Function(torch.autograd.Function):
    """An autograd Function that also works where there are no kernels, and saves nothing when no gradient is wanted.

    torch.compile bypasses this ``apply``, so the public function `liger_<op>()` checks for kernels itself. A subclass
    gives ``reference(*args)``: the same outputs in plain PyTorch; and ``arguments(ctx)``: such args out of what is
    saved, where tensors with a gradient are apply's own. Where a graph of the gradients is asked for
    (``create_graph=True``), ``again`` stands for backward: it differentiates the reference.
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "backward" in vars(cls):
            cls.backward = staticmethod(_backward_or_again(cls.backward))

    @classmethod
    def apply(cls, *args):
        if not args[0].is_floating_point():
            raise TypeError(f"{cls.__name__}: the first argument is {args[0].dtype}, give a floating point tensor")
        if not devices.has_kernels(args[0]) or transformed():
            return cls.reference(*args)
        if not torch.is_grad_enabled():
            args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        return super(torch.autograd.Function, cls).apply(*args)  # past what only functorch's transforms need

    @classmethod
    def again(cls, ctx, *grads):
        """backward, by differentiable operations."""
        args, needs = cls.arguments(ctx), ctx.needs_input_grad
        found = gradients(cls.reference, args, [*needs, *[False] * len(args)][: len(args)], grads)
        return *found, *[None] * (len(needs) - len(args))


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work, which wants PyTorch's own operations."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _backward_or_again(backward):
    @functools.wraps(backward)
    def call(ctx, *grads):
        return ctx._forward_cls.again(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call


def gradients(fn, args, needs, grads):
    """Of ``fn(*args)``, given those of its outputs: one for each arg that needs one, else None. They have a graph."""
    # each arg under a name of its own: one may depend on another, or be the same tensor
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
    """x, or a copy of it, with the entries of a row one after the other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in ``dtype``. Dynamo of torch 2.11 loses the gradient of an output at a ``.to`` that has nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def _holders(tensor: torch.Tensor) -> tuple[int, ...]:
    """How many hold the tensor and its memory, in C++ and in Python; the same of the tensor that it is a view of."""
    memory = tensor.untyped_storage()
    counts = tensor._use_count(), sys.getrefcount(tensor)
    counts += torch._C._storage_Use_Count(memory._cdata), sys.getrefcount(memory)
    base = tensor._base
    return counts if base is None else (*counts, base._use_count(), sys.getrefcount(base))


class _Probe(torch.autograd.Function):
    """Saves a tensor that nothing else holds, and counts its holders in backward as `may_overwrite` does."""

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


def _within(tensor: torch.Tensor) -> tuple[int, ...]:  # one frame deep, like may_overwrite's own call
    return _holders(tensor)


def _references(argument) -> int:
    return sys.getrefcount(argument)


@functools.cache
def _sole_holder(view: bool, references: int) -> tuple[int, ...]:
    """The counts that this build of torch shows for a saved tensor which nobody but the graph holds.

    ``references``: those to the argument of a call that is nobody else's. They are more, and with them the counts,
    while torch.compile evaluates frames, which it does for ever once it has raised.
    """
    found = []
    for _ in range(8):  # another thread may look at a frame's variables meanwhile, which holds them
        with torch.enable_grad(), torch.device("cpu"):
            leaf = torch.zeros(2, requires_grad=True)
            with torch.inference_mode(False):
                _Probe.apply((leaf * 1).view(2, 1) if view else leaf * 1).backward()
        found.append(_Probe.counts[view])
    return tuple(map(min, *found))


def may_overwrite(ctx, saved: torch.Tensor) -> bool:
    """In backward: may a gradient be written over the memory of this tensor from ``ctx.saved_tensors``?

    Only if the graph is about to be freed and nobody but the graph can still see that memory: no variable of the
    caller's, no view, no other node, no saved-tensor hook, which may keep what it gives in a form that doesn't count
    (an array, a file); a checkpoint's don't. A caller who does write must call
    `torch.autograd.graph.increment_version`.
    """
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    if saved.is_leaf or not saved.requires_grad:
        return False
    before, counts, after = _references(object()), _holders(saved), _references(object())
    alone = _sole_holder(saved._base is not None, min(before, after))
    if any(a > b for a, b in zip(counts, alone, strict=True)):
        return False
    if counts[0] == alone[0]:
        return True
    hooks = [raw.unpack_hook for raw in ctx._raw_saved_tensors]  # the graph doesn't hold this tensor: a hook made it
    return all(hook is None or _of_checkpoint(hook) for hook in hooks)


def _of_checkpoint(hook) -> bool:
    return getattr(hook, "__module__", None) == "torch.utils.checkpoint"


def keep(ctx, taken, inputs):
    """Keep for backward the gradients that forward has taken, and the inputs that a graph of them would need.

    Saved-tensor hooks see the inputs alone: the gradients are no activations, to be moved or kept by somebody else.
    But a checkpoint drops them, and runs forward again.
    """
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


def kept(ctx, n: int):
    """-> the n gradients that forward has taken, and whether backward may write over them: they are gone afterwards."""
    taken = ctx.taken
    if taken is None:  # theirs who keep saved tensors; or there are none any more, and this raises
        return ctx.saved_tensors[:n], False
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return taken, False
    ctx.taken = None
    return taken, True


def kept_inputs(ctx, n: int):
    return ctx.saved_tensors[n if ctx.taken is None else 0 :]


@dataclass(frozen=True)
class Case:
    """One operator, as the generic tests and the benchmark see it. It describes verification; it generates no code."""

    name: str
    fn: Callable  # the operator: fn(**inputs, **option) -> a tensor or a tuple of tensors
    reference: Callable  # the same call in plain PyTorch, any dtype
    inputs: Callable  # (*shape) -> dict of tensors on the default device; float32 ones are cast to the dtype tested
    shapes: tuple  # small ones: odd sizes, one row, not a power of two
    options: tuple = ({},)  # keyword variants; one may replace an input (w=None)
    bench: tuple = ()  # real ones
    traffic: Callable | None = None  # (inputs) -> the fewest bytes that (forward, backward) must move
    flops: Callable | None = None  # (inputs) -> operations of forward + backward, where the matrix units bound it
    fp32_roundings: int = 1  # allowed beyond PyTorch's own error; 2 where exp and log are the hardware's (2 ulp)


CASES: list[Case] = []
