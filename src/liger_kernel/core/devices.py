"""All that depends on the device: whether kernels run there, its properties, how to make it the
current one."""

from __future__ import annotations

import contextlib
import functools
import os

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from liger_kernel.core.tile import TRITON

AMD = torch.version.hip is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in (
    "1",
    "true",
    "on",
    "yes",
    "y",
)  # as Triton reads it


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels can process this tensor. If not, an operator runs its PyTorch
    reference.

    The kernels compute in fp32, so they do not take fp64. Within a graph, torch.func sees nothing
    of a Function but its forward: all gradients would be zeros."""
    if tensor.dtype == torch.float64 or transformed() and is_compiling():
        return False
    if tensor.is_cuda or tensor.is_xpu:
        return TRITON
    return INTERPRETED and TRITON and tensor.device.type == "cpu"


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is active. They need PyTorch's own
    operations."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# whose modes change nothing of what is computed: a device's, a selective checkpoint's, those of
# DTensor, our own
OURS = __name__.partition(".")[0] + "."
KNOWN_MODES = "torch.utils._device", "torch.utils.checkpoint", "torch.distributed.", OURS


def within_a_mode() -> bool:
    """Whether a user's TorchFunctionMode or TorchDispatchMode is active, which has to see PyTorch's
    own functions.

    Not so one that says by ``counts_alone = True`` that it changes nothing.
    """
    functions = torch._C._len_torch_function_stack()
    dispatches = 0 if is_compiling() else torch._C._len_torch_dispatch_stack()
    if not functions and not dispatches:
        return False
    modes = [torch._C._get_function_stack_at(i) for i in range(functions)]
    modes += [torch._C._get_dispatch_stack_at(i) for i in range(dispatches)]
    return not all(
        type(m).__module__.startswith(KNOWN_MODES) or getattr(m, "counts_alone", False)
        for m in modes
    )


def require_kernels(name: str, tensor: torch.Tensor) -> None:
    if not has_kernels(tensor):
        in_a_graph = transformed() and is_compiling()
        where = "within torch.func in a graph" if in_a_graph else f"for a tensor on {tensor.device}"
        raise RuntimeError(f"{name}: no Triton kernels {where}; call the liger_* function instead")


def is_off_host(tensor: torch.Tensor) -> bool:
    """Whether it is in another memory than the host's, with streams that copy from one to the
    other."""
    return tensor.is_cuda or tensor.is_xpu


def free_bytes(tensor: torch.Tensor) -> float:
    """Of its device's memory, for this process: with what the allocator holds, within the share
    that it may have."""
    if not tensor.is_cuda:
        return 0
    allocated = torch.cuda.memory_allocated(tensor.device)
    held = torch.cuda.memory_reserved(tensor.device) - allocated
    return min(own_bytes(tensor) - allocated, torch.cuda.mem_get_info(tensor.device)[0] + held)


def own_bytes(tensor: torch.Tensor) -> float:
    """Of its device's memory, the share that this process may have."""
    if not tensor.is_cuda:
        return 0
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    return torch.cuda.get_device_properties(tensor.device).total_memory * share(tensor.device)


def guard(tensor: torch.Tensor):
    """Make the tensor's device the current one: Triton launches on the current device, wherever the
    tensors are."""
    kind = torch.cuda if tensor.is_cuda else torch.xpu if tensor.is_xpu else None
    if kind is None or tensor.get_device() == kind.current_device():
        return contextlib.nullcontext()
    return kind.device(tensor.get_device())


@functools.cache
def _properties(kind: str, index: int) -> tuple[str, int, int, int]:
    """(architecture, multiprocessors, most warps of a program, bytes of shared memory for
    asynchronous copies)."""
    if kind == "cuda":
        p = torch.cuda.get_device_properties(index)
        if AMD:
            return p.gcnArchName.split(":")[0], p.multi_processor_count, 1024 // p.warp_size, 0
        return (
            f"sm_{p.major}{p.minor}",
            p.multi_processor_count,
            32,
            getattr(p, "shared_memory_per_block_optin", 0),
        )
    if kind == "xpu":
        return "xpu", torch.xpu.get_device_properties(index).gpu_subslice_count, 32, 0
    return "cpu", 4, 32, 0


def place(tensor: torch.Tensor) -> tuple[str, int]:
    """The kind of device and its number."""
    return "cuda" if tensor.is_cuda else tensor.device.type, tensor.get_device()


def _of(tensor: torch.Tensor):
    return _properties(*place(tensor))


def model(kind: str, index: int) -> tuple[str, float]:
    """A device's name, and the bytes per second that its memory's clock and width give; "" and 0 if
    not known."""
    if kind == "cuda":
        p = torch.cuda.get_device_properties(index)
        clock, bits = (
            getattr(p, "memory_clock_rate", 0),
            getattr(p, "memory_bus_width", 0),
        )  # kHz, of two transfers
        return p.name, 2e3 * clock * bits / 8
    return (torch.xpu.get_device_properties(index).name, 0.0) if kind == "xpu" else ("", 0.0)


def arch(tensor: torch.Tensor) -> str:
    """The architecture by its maker's name, such as sm_90 or gfx942; xpu; cpu in the
    interpreter."""
    return _of(tensor)[0]


def multiprocessors(tensor: torch.Tensor) -> int:
    return _of(tensor)[1]


def warps(wanted: int, tensor: torch.Tensor) -> int:
    """``wanted`` warps, or the most that a program can have: 1,024 threads, which are 16 warps of
    64 on AMD's CDNA."""
    return max(1, wanted) if wanted <= 16 else min(wanted, _of(tensor)[2])


def stages(bytes_of_one: int, tensor: torch.Tensor, most: int = 3) -> int:
    """num_stages of a loop that loads so many bytes in one iteration: ``most``, 3, or 1 if shared
    memory is too small.

    Only NVIDIA's asynchronous copies prefetch through shared memory. RMSNorm backward 8192x4096
    with 1, 2, 3 stages:
    2.79, 2.70, 3.26 TB/s (H200, 2026-11-20).
    """
    memory = _of(tensor)[3]
    return next((n for n in (most, 3) if n * bytes_of_one + 2048 <= memory), 1)


def copies_tiles(tensor: torch.Tensor) -> bool:
    """Whether there is an engine that copies tiles to shared memory by descriptors: on NVIDIA from
    Hopper on."""
    name = arch(tensor)
    return INTERPRETED if name == "cpu" else name.startswith("sm_") and int(name[3:]) >= 90


def in_autocast(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and torch.is_autocast_enabled(tensor.device.type)


def without_autocast(tensor: torch.Tensor):
    """A context without autocast: matmuls keep the dtypes of their arguments."""
    return (
        torch.autocast(tensor.device.type, enabled=False)
        if in_autocast(tensor)
        else contextlib.nullcontext()
    )


def autocast_as_now(device):
    """-> a function that returns a context with autocast as it is now, on or off."""
    kind = torch.device(device).type
    if kind == "meta":
        return contextlib.nullcontext
    return functools.partial(
        torch.autocast,
        kind,
        torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
    )


def multiplies_into_fp32(tensor: torch.Tensor) -> bool:
    """Whether torch can add a matmul of 16-bit tensors to an fp32 matrix on this device, without a
    temporary.

    It is tried once: torch has it from 2.8 on, but builds for ROCm and some settings refuse it. It
    is not tried while a CUDA graph is captured, since a refusal could end the capture; the same
    code has run before the capture."""
    if not tensor.is_cuda:
        return False
    settings = torch.backends.cuda.matmul
    asked = tensor.device, tensor.dtype, getattr(settings, "allow_fp16_accumulation", False)
    if asked not in _multiplies and not torch.cuda.is_current_stream_capturing():
        _multiplies[asked] = _tried(tensor)
    return _multiplies.get(asked, False)


_multiplies: dict[tuple, bool] = {}


def _tried(tensor):
    a, out = tensor.new_zeros(16, 16), tensor.new_zeros(16, 16, dtype=torch.float32)
    try:
        torch.mm(a, a, out_dtype=torch.float32, out=out)
        torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True
