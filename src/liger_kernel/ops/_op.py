"""What every operator is built on: registration with torch, its autograd Function, its `Case`.

An operator has one path for each way of running:

* eager on a GPU: `liger_<op>()` → `Liger<Op>Function.apply` → the kernels, with no dispatcher in between;
* under `torch.compile`: the same code, where `custom_op` puts one opaque `liger::<op>` node into the graph;
* on any other device: the PyTorch reference, differentiated by autograd.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from . import _device


def custom_op(name: str, like: Callable):
    """Register ``fn`` as ``liger::name``. ``like(*args)`` allocates its outputs and doubles as the fake kernel.

    The function runs with its first argument's device as the current one. Eager calls go straight to it: the
    dispatcher costs more than a small memory-bound kernel. Where it gives None among its outputs, under `torch.compile`
    there is an empty tensor.
    """

    def wrap(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def guarded(*args):
            if _device.is_current(args[0]):
                return fn(*args)
            with _device.guard(args[0]):
                return fn(*args)

        @functools.wraps(fn)
        def tensors(*args):
            return _filled(guarded(*args), args[0])

        op = torch.library.custom_op(f"liger::{name}", tensors, mutates_args=())
        op.register_fake(lambda *args: _filled(like(*args), args[0]))

        @functools.wraps(fn)
        def call(*args):
            return op(*args) if is_compiling() else guarded(*args)

        call.op = op
        return call

    return wrap


def _filled(outs, like):
    return tuple(like.new_empty(0) if o is None else o for o in outs) if isinstance(outs, tuple) else outs


class Function(torch.autograd.Function):
    """An autograd Function that also works where there are no kernels, and saves nothing when no gradient is wanted.

    torch.compile takes ``forward`` and no notice of this ``apply``, so `liger_<op>()` asks for kernels, too. A subclass
    gives ``reference(*args)``: the same outputs in plain PyTorch. There are no second derivatives: asking
    for them raises.
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "backward" in vars(cls):
            cls.backward = staticmethod(_once(cls.backward))

    @classmethod
    def apply(cls, *args):
        if not _device.has_kernels(args[0]):
            return cls.reference(*args)
        if not torch.is_grad_enabled():
            args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # past what only those transforms need


def _once(backward):
    """`once_differentiable`, at a cost only where a graph of the gradients is asked for."""
    checked = once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx, *grads):
        return checked(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call


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


@functools.cache
def _sole_holder(view: bool) -> tuple[int, ...]:
    """The counts that this build of torch shows for a saved tensor which nobody but the graph holds."""
    with torch.enable_grad(), torch.device("cpu"):
        leaf = torch.zeros(2, requires_grad=True)
        with torch.inference_mode(False):
            _Probe.apply((leaf * 1).view(2, 1) if view else leaf * 1).backward()
    return _Probe.counts[view]


def may_overwrite(saved: torch.Tensor) -> bool:
    """In backward: may a gradient be written over the memory of this tensor from ``ctx.saved_tensors``?

    Only if the graph is about to be freed and nobody but the graph can still see that memory: no variable of the
    caller's, no view, no other node. A caller who does write must call `torch.autograd.graph.increment_version`.
    """
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    if saved.is_leaf or not saved.requires_grad:
        return False
    return all(a <= b for a, b in zip(_holders(saved), _sole_holder(saved._base is not None), strict=True))


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
