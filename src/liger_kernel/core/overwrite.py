"""When backward may write a gradient into the memory of a tensor that forward saved.

That halves the memory of a large activation, but is only right if nobody can read the tensor any
more. PyTorch has no public way to ask. So `may_overwrite` compares reference counts with those of a
tensor that only the graph refers to, which are measured in this process (`_graph_only_counts`). If
a build of torch counts in another way, the answer is False, and no gradient is wrong.

``LIGER_KERNEL_OVERWRITE=0`` turns this off: each gradient then gets memory of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys

import torch

ENABLED = os.environ.get("LIGER_KERNEL_OVERWRITE", "").lower() not in ("0", "off", "false", "no")

# ids of the engine's passes that are recorded: see `recorded_backward`
_recorded_passes: set[int] = set()


@contextlib.contextmanager
def recorded_backward(node):
    """Within it, an engine's pass that runs this node first may overwrite what its graph saved,
    though it keeps the graph.

    For CUDA graphs of a forward and its backward. The graph is kept so that its memory is not given
    to others, and does not run again: a backward is replayed once after each forward.
    """
    passes = []

    def begin(grads):
        passes.append(torch._C._current_graph_task_id())
        _recorded_passes.update(passes)

    handle = node.register_prehook(begin)
    try:
        yield
    finally:
        handle.remove()
        _recorded_passes.difference_update(passes)


def is_graph_kept() -> bool:
    """Return True if the graph of the backward that runs may run again."""
    return (
        torch._C._autograd._get_current_graph_task_keep_graph()
        and torch._C._current_graph_task_id() not in _recorded_passes
    )


def may_overwrite(ctx, saved: torch.Tensor, made_in_forward: bool = False) -> bool:
    """Return True if backward may write a gradient into this tensor from ``ctx.saved_tensors``.

    That is so if the graph does not run again (`is_graph_kept`), and only the graph refers to the
    tensor's memory: no variable, no view, no other node, no saved-tensor hook. A hook may keep the
    data in a form that has no reference count, such as an array or a file; the hooks of a
    checkpoint do not.

    Call it in backward itself, with ``saved`` held by one local variable; each further reference
    makes the answer False. A caller that overwrites must call
    `torch.autograd.graph.increment_version`. A tensor that backward has made itself, such as a
    contiguous copy, needs no question.

    Args:
        ctx: the Function's, or its `saved.saving_node`.
        made_in_forward: the Function's own forward has made the tensor, which is none of its inputs
            and outputs. Otherwise a leaf, or a tensor without a gradient, is kept.
    """
    if torch.compiler.is_compiling() or not ENABLED:
        return False
    if is_graph_kept():
        return False
    if not made_in_forward and (saved.is_leaf or not saved.requires_grad):
        return False
    before = _argument_references(object())
    counts = _reference_counts(saved)
    after = _argument_references(object())
    graph_only = _graph_only_counts(saved._base is not None, min(before, after))
    if counts == graph_only:
        return True
    if any(count > expected for count, expected in zip(counts, graph_only, strict=True)):
        return False
    if counts[0] == graph_only[0]:
        return True
    # fewer references: a saved-tensor hook made this tensor, not the graph
    hooks = [raw.unpack_hook for raw in ctx._raw_saved_tensors]
    return all(hook is None or is_checkpoint_hook(hook) for hook in hooks)


def is_checkpoint_hook(hook) -> bool:
    """Return True if this saved-tensor hook belongs to `torch.utils.checkpoint`."""
    return getattr(hook, "__module__", None) == "torch.utils.checkpoint"


def in_checkpoint() -> bool:
    """Return True if a checkpoint gets what is saved, in its forward or in its recomputation."""
    if torch.compiler.is_compiling():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and is_checkpoint_hook(hooks[0])


def _reference_counts(tensor: torch.Tensor) -> tuple[int, ...]:
    """Count the references to a tensor, to its storage, and to the tensor that it is a view of.

    Each is counted in C++ and in Python.
    """
    storage = tensor.untyped_storage()
    counts = tensor._use_count(), sys.getrefcount(tensor)
    counts += torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
    base = tensor._base
    return counts if base is None else (*counts, base._use_count(), sys.getrefcount(base))


def _counts_from_a_call(tensor: torch.Tensor) -> tuple[int, ...]:
    """Call `_reference_counts` from as deep a stack as `may_overwrite` does."""
    return _reference_counts(tensor)


def _argument_references(argument) -> int:
    return sys.getrefcount(argument)


class _Probe(torch.autograd.Function):
    """Saves a tensor to which nothing else refers, and counts its references in backward."""

    counts: dict[bool, tuple[int, ...]] = {}  # by whether the tensor is a view

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        _Probe.counts[x._base is not None] = _counts_from_a_call(x)
        return dy.expand_as(x)


@functools.cache
def _graph_only_counts(is_view: bool, argument_references: int) -> tuple[int, ...]:
    """Measure the counts that this build of torch shows for a tensor that only the graph refers to.

    ``argument_references`` is the count for a call's argument to which nothing else refers. While
    torch.compile evaluates frames, this count and the others are higher. After torch.compile has
    raised, that stays so.
    """
    measured = []
    for _ in range(8):  # another thread may read a frame's variables, which adds references
        with torch.enable_grad(), torch.device("cpu"):
            leaf = torch.zeros(2, requires_grad=True)
            with torch.inference_mode(False):
                _Probe.apply((leaf * 1).view(2, 1) if is_view else leaf * 1).backward()
        measured.append(_Probe.counts[is_view])
    return tuple(map(min, *measured))
