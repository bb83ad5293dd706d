"""A checkpoint whose inputs wait in the host's memory (`host_memory`), and which saves no norms
(`recompute`)."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_kernel.core import devices
from liger_kernel.core.host_memory import OffloadedTensor, offload_to_host
from liger_kernel.core.op import in_func_transform
from liger_kernel.core.recompute import recompute_scope


def _no_context(args):
    return contextlib.nullcontext


def offload_inputs(checkpoint_fn, context_factory=_no_context):
    """Wrap a checkpoint function so that the inputs of what it runs wait on the host.

    These are the positional tensors that a gradient goes to, but no parameters.

    Args:
        checkpoint_fn: `torch.utils.checkpoint.checkpoint`, or it with some of its options bound.
        context_factory: ``context_factory(args)``, called once for each call of the checkpoint,
            returns a function that makes a context. The checkpointed function runs within a new
            one each time, also when it is recomputed.
    """

    @functools.wraps(checkpoint_fn)
    def offloaded_checkpoint(function, *args, **kwargs):
        if torch.compiler.is_compiling() or _is_captured(args) or in_func_transform():
            return checkpoint_fn(function, *args, **kwargs)
        storages = {x.untyped_storage()._cdata for x in args if _can_be_offloaded(x)}
        make_context = context_factory(args)

        def run(*args, **kwargs):
            with recompute_scope(), make_context():
                return function(*args, **kwargs)

        def pack(x):
            is_dense = x.layout is torch.strided and not x.is_nested
            if is_dense and x.untyped_storage()._cdata in storages:
                offloaded = offload_to_host(x)
                if offloaded is not None:
                    return offloaded
            return x, x._version

        def unpack(packed):
            if type(packed) is OffloadedTensor:
                return packed.get()
            x, version = packed
            if x._version != version:  # with hooks, autograd does not look
                raise RuntimeError(
                    f"a tensor of shape {tuple(x.shape)}, which a checkpoint keeps, was modified "
                    "by an inplace operation, and backward needs what it was; let the layer write "
                    "to a copy of its input"
                )
            return x

        with saved_tensors_hooks(pack, unpack) if storages else contextlib.nullcontext():
            return checkpoint_fn(run, *args, **kwargs)

    return offloaded_checkpoint


def _can_be_offloaded(x) -> bool:
    if type(x) is not torch.Tensor or x.layout is not torch.strided or x.is_nested:
        return False
    return x.requires_grad and devices.is_off_host(x) and torch.is_grad_enabled()


def _is_captured(args) -> bool:
    """Return True while a CUDA graph is captured on the device of one of the tensors."""
    for device_type in {x.device.type for x in args if isinstance(x, torch.Tensor)}:
        device_module = getattr(torch, device_type, None)
        if getattr(device_module, "is_current_stream_capturing", bool)():
            return True
    return False


def offloaded_checkpoint(function, *args, use_reentrant: bool = False, **kwargs):
    """`torch.utils.checkpoint.checkpoint`, with the tensors among ``args`` in pinned host memory
    until backward.

    Args:
        function: called with ``args`` and ``kwargs``, now and in backward. It must not write to
            them.
        *args: the function's positional arguments. Tensors on a GPU that require a gradient wait
            on the host, if they are contiguous, of 1 MiB or more, and no parameters. They are
            copied while the function runs, and are on the device until the next checkpoint begins.
        use_reentrant: as in PyTorch.
        **kwargs: PyTorch's options of a checkpoint; others are the function's keyword arguments,
            and stay where they are.

    Not all that backward recomputes is kept meanwhile: in a patched model, norms are computed once
    more where the layers that read them, or an MLP in tiles, would save them.

    Host memory is kept for the next step. A process takes LIGER_KERNEL_HOST_MEMORY bytes of it at
    most, half of its share of the machine if that is not set; what would be more stays on the
    device. So does all of it in a graph of torch.compile, while a CUDA graph is captured, and under
    torch.func.

    Raises:
        RuntimeError: in backward, if an input was written to before its copy was done.

    Source: arXiv:1604.06174; on the host: arXiv:2506.13996.
    """
    return offload_inputs(checkpoint)(function, *args, use_reentrant=use_reentrant, **kwargs)
