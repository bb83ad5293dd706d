"""A checkpoint whose inputs wait in the host's memory (`host_memory`), and which keeps no norms
(`again`)."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_kernel.core import devices
from liger_kernel.core.again import noting
from liger_kernel.core.host_memory import Waiting, send
from liger_kernel.core.op import transformed


def offloaded(keeping, within=lambda args: contextlib.nullcontext):
    """``keeping``, which is `torch.utils.checkpoint.checkpoint` with some of its options given,
    with its inputs on the host: of the tensors that are given by position those that a gradient
    goes to, but no parameters. Each time that the function runs, it is within a context that
    ``within(args)`` makes, which is called once."""

    @functools.wraps(keeping)
    def offloaded_checkpoint(function, *args, **kwargs):
        if torch.compiler.is_compiling() or _is_captured(args) or transformed():
            return keeping(function, *args, **kwargs)
        wanted = {x.untyped_storage()._cdata for x in args if _may_wait(x)}
        around = within(args)

        def noted(*args, **kwargs):
            with noting(), around():
                return function(*args, **kwargs)

        def pack(x):
            dense = x.layout is torch.strided and not x.is_nested
            return (send(x) if dense and x.untyped_storage()._cdata in wanted else None) or (
                x,
                x._version,
            )

        def unpack(kept):
            if type(kept) is Waiting:
                return kept.fetched()
            x, version = kept
            if x._version != version:  # with hooks, autograd does not look
                raise RuntimeError(
                    f"a tensor of shape {tuple(x.shape)}, which a checkpoint keeps, was modified by an inplace "
                    "operation, and backward needs what it was; let the layer write to a copy of its input"
                )
            return x

        with saved_tensors_hooks(pack, unpack) if wanted else contextlib.nullcontext():
            return keeping(noted, *args, **kwargs)

    return offloaded_checkpoint


def _may_wait(x) -> bool:
    if type(x) is not torch.Tensor or x.layout is not torch.strided or x.is_nested:
        return False
    return x.requires_grad and devices.is_off_host(x) and torch.is_grad_enabled()


def _is_captured(args) -> bool:
    kinds = {x.device.type for x in args if isinstance(x, torch.Tensor)}
    return any(
        getattr(getattr(torch, kind, None), "is_current_stream_capturing", bool)() for kind in kinds
    )


def offloaded_checkpoint(function, *args, use_reentrant: bool = False, **kwargs):
    """`torch.utils.checkpoint.checkpoint`, with the tensors among ``args`` in pinned host memory
    until backward.

    Args:
        function: called with ``args`` and ``kwargs``, now and in backward. It must not write to
        them.
        *args: whatever it takes. Tensors on a GPU that require a gradient wait on the host, if they
        are contiguous, of
            1 MiB or more, and no parameters. They are copied while the function runs, and are on
            the device until the
            next checkpoint begins.
        use_reentrant: as in PyTorch.
        **kwargs: PyTorch's options of a checkpoint; the rest is for ``function``, and stays where
        it is.

    What backward computes again is not all kept meanwhile: in a patched model, norms are made once
    more where the layers that read them, or an MLP in tiles, would keep them.

    Host memory is kept for the next step. A process takes LIGER_KERNEL_HOST_MEMORY bytes of it at
    most, half of its share of the machine if that is not set; what would be more stays on the
    device. So does all of it in a graph of torch.compile, while a CUDA graph is captured, and under
    torch.func.

    Raises:
        RuntimeError: in backward, if an input was written to before its copy was done.

    Source: arXiv:1604.06174; on the host: arXiv:2506.13996.
    """
    return offloaded(checkpoint)(function, *args, use_reentrant=use_reentrant, **kwargs)
