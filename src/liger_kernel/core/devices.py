"""All that depends on the device: whether kernels run there, its properties, how to make it the
current one."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import warnings

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from liger_kernel.core.tile import TRITON

AMD = torch.version.hip is not None
# as Triton reads it
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


# ---- whether the kernels can run ----


def has_kernels(tensor: torch.Tensor) -> bool:
    """Return True if the Triton kernels can process this tensor.

    If not, an operator runs its PyTorch reference. The kernels compute in fp32, so they do not take
    fp64. Within a graph, torch.func sees nothing of a Function but its forward: all gradients would
    be zeros.
    """
    if tensor.dtype == torch.float64 or in_func_transform() and is_compiling():
        return False
    if tensor.is_cuda or tensor.is_xpu:
        return TRITON
    return INTERPRETED and TRITON and tensor.device.type == "cpu"


def require_kernels(name: str, tensor: torch.Tensor) -> None:
    """Raise RuntimeError if the Triton kernels cannot process this tensor."""
    if not has_kernels(tensor):
        in_a_graph = in_func_transform() and is_compiling()
        where = "within torch.func in a graph" if in_a_graph else f"for a tensor on {tensor.device}"
        raise RuntimeError(f"{name}: no Triton kernels {where}; call the liger_* function instead")


def in_func_transform() -> bool:
    """Return True if torch.func or forward-mode differentiation is active.

    They need PyTorch's own operations.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# Modes of these modules change nothing of what is computed: a device's, a selective checkpoint's,
# those of DTensor, our own.
HARMLESS_MODE_MODULES = (
    "torch.utils._device",
    "torch.utils.checkpoint",
    "torch.distributed.",
    __name__.partition(".")[0] + ".",
)


def in_user_mode() -> bool:
    """Return True if a user's TorchFunctionMode or TorchDispatchMode is active, which has to see
    PyTorch's own functions.

    A mode with the attribute ``liger_transparent = True`` changes nothing, and is not counted.
    """
    num_function_modes = torch._C._len_torch_function_stack()
    num_dispatch_modes = 0 if is_compiling() else torch._C._len_torch_dispatch_stack()
    if not num_function_modes and not num_dispatch_modes:
        return False
    modes = [torch._C._get_function_stack_at(i) for i in range(num_function_modes)]
    modes += [torch._C._get_dispatch_stack_at(i) for i in range(num_dispatch_modes)]
    return not all(
        type(mode).__module__.startswith(HARMLESS_MODE_MODULES)
        or getattr(mode, "liger_transparent", False)
        for mode in modes
    )


def in_selective_checkpoint() -> bool:
    """Return True within a checkpoint that keeps the outputs that a policy selects.

    They must not be written over."""
    if is_compiling():
        return False
    for i in range(torch._C._len_torch_dispatch_stack()):
        mode = torch._C._get_dispatch_stack_at(i)
        if any(cls.__module__ == "torch.utils.checkpoint" for cls in type(mode).__mro__):
            return True
    return False


# ---- memory ----


def is_off_host(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is not in the host's memory, and streams can copy it there."""
    return tensor.is_cuda or tensor.is_xpu


def free_memory(tensor: torch.Tensor) -> float:
    """Return the bytes that this process can still allocate on the tensor's device.

    They include what the allocator has reserved, within the share that the process may have. 0 if
    that is not known.
    """
    if not tensor.is_cuda:
        return 0
    allocated = torch.cuda.memory_allocated(tensor.device)
    reserved = torch.cuda.memory_reserved(tensor.device) - allocated
    free_on_device, _ = torch.cuda.mem_get_info(tensor.device)
    return min(process_memory_limit(tensor) - allocated, free_on_device + reserved)


def process_memory_limit(tensor: torch.Tensor) -> float:
    """Return the bytes that this process may have of the tensor's device; 0 if not known."""
    if not tensor.is_cuda:
        return 0
    # absent before PyTorch had this function
    fraction_of = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    total_memory = torch.cuda.get_device_properties(tensor.device).total_memory
    return total_memory * fraction_of(tensor.device)


# ---- properties of a device ----


def device_guard(tensor: torch.Tensor):
    """Return a context in which the tensor's device is the current one: Triton launches on the
    current device, wherever the tensors are."""
    if tensor.is_cuda:
        module = torch.cuda
    elif tensor.is_xpu:
        module = torch.xpu
    else:
        return contextlib.nullcontext()
    if tensor.get_device() == module.current_device():
        return contextlib.nullcontext()
    return module.device(tensor.get_device())


def type_and_index(tensor: torch.Tensor) -> tuple[str, int]:
    """Return the type of the tensor's device, such as "cuda", and its number."""
    return "cuda" if tensor.is_cuda else tensor.device.type, tensor.get_device()


@functools.cache
def _properties(device_type: str, index: int) -> tuple[str, int, int, int]:
    """Return (architecture, multiprocessors, most warps of a program, bytes of shared memory for
    asynchronous copies)."""
    if device_type == "cuda":
        p = torch.cuda.get_device_properties(index)
        if AMD:
            return p.gcnArchName.split(":")[0], p.multi_processor_count, 1024 // p.warp_size, 0
        shared_memory = getattr(p, "shared_memory_per_block_optin", 0)
        return f"sm_{p.major}{p.minor}", p.multi_processor_count, 32, shared_memory
    if device_type == "xpu":
        return "xpu", torch.xpu.get_device_properties(index).gpu_subslice_count, 32, 0
    return "cpu", 4, 32, 0


def _properties_of(tensor: torch.Tensor):
    return _properties(*type_and_index(tensor))


def name_and_bandwidth(device_type: str, index: int) -> tuple[str, float]:
    """Return a device's name, and the bytes per second that its memory's clock and width give.

    They are "" and 0 if not known.
    """
    if device_type == "cuda":
        p = torch.cuda.get_device_properties(index)
        clock_khz = getattr(p, "memory_clock_rate", 0)  # with two transfers a cycle
        bus_bits = getattr(p, "memory_bus_width", 0)
        return p.name, 2e3 * clock_khz * bus_bits / 8
    if device_type == "xpu":
        return torch.xpu.get_device_properties(index).name, 0.0
    return "", 0.0


def arch(tensor: torch.Tensor) -> str:
    """Return the architecture by its maker's name, such as sm_90 or gfx942; xpu; cpu in the
    interpreter."""
    return _properties_of(tensor)[0]


def multiprocessors(tensor: torch.Tensor) -> int:
    return _properties_of(tensor)[1]


def limit_warps(num_warps: int, tensor: torch.Tensor) -> int:
    """Return num_warps from 1 to the most that a program can have: 1,024 threads, which are 16
    warps of 64 on AMD's CDNA."""
    return max(1, num_warps) if num_warps <= 16 else min(num_warps, _properties_of(tensor)[2])


def choose_num_stages(bytes_per_stage: int, tensor: torch.Tensor, preferred: int = 3) -> int:
    """Return num_stages of a loop that loads so many bytes in one iteration.

    It is ``preferred``, or 3 if shared memory is too small for that, or 1 if it is for 3, too.

    Only NVIDIA's asynchronous copies prefetch through shared memory. RMSNorm backward 8192x4096
    with 1, 2, 3 stages: 2.79, 2.70, 3.26 TB/s (H200, 2026-11-20).
    """
    shared_memory = _properties_of(tensor)[3]
    for num_stages in (preferred, 3):
        if num_stages * bytes_per_stage + 2048 <= shared_memory:
            return num_stages
    return 1


def has_tma(tensor: torch.Tensor) -> bool:
    """Return True if the device copies tiles to shared memory by descriptors: NVIDIA from Hopper
    on, and the interpreter."""
    name = arch(tensor)
    if name == "cpu":
        return INTERPRETED
    return name.startswith("sm_") and int(name[3:]) >= 90


# ---- autocast, and matmuls ----


def in_autocast(tensor: torch.Tensor) -> bool:
    """Return True if autocast is on for the tensor's device."""
    return tensor.device.type != "meta" and torch.is_autocast_enabled(tensor.device.type)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of autocast for the tensor's device, or None if autocast is off."""
    return torch.get_autocast_dtype(tensor.device.type) if in_autocast(tensor) else None


def without_autocast(tensor: torch.Tensor):
    """Return a context without autocast: matmuls keep the dtypes of their arguments."""
    if in_autocast(tensor):
        return torch.autocast(tensor.device.type, enabled=False)
    return contextlib.nullcontext()


def snapshot_autocast(device):
    """Return a function that makes a context with autocast as it is now, on or off."""
    device_type = torch.device(device).type
    if device_type == "meta":
        return contextlib.nullcontext
    return functools.partial(
        torch.autocast,
        device_type,
        torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
    )


def supports_fp32_output(tensor: torch.Tensor) -> bool:
    """Return True if torch can add a matmul of 16-bit tensors to an fp32 matrix on this device,
    without a temporary.

    It is tried once: torch has it from 2.8 on, but builds for ROCm and some settings refuse it. It
    is not tried while a CUDA graph is captured, since a refusal could end the capture; the same
    code has run before the capture.
    """
    if not tensor.is_cuda:
        return False
    settings = torch.backends.cuda.matmul
    key = tensor.device, tensor.dtype, getattr(settings, "allow_fp16_accumulation", False)
    if key not in _fp32_output_support and not torch.cuda.is_current_stream_capturing():
        _fp32_output_support[key] = _try_fp32_output(tensor)
    return _fp32_output_support.get(key, False)


_fp32_output_support: dict[tuple, bool] = {}


def _try_fp32_output(tensor):
    a = tensor.new_zeros(16, 16)
    out = tensor.new_zeros(16, 16, dtype=torch.float32)
    try:
        torch.mm(a, a, out_dtype=torch.float32, out=out)
        torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


# ---- CUDA graphs ----


def product_settings() -> tuple:
    """Return the process's settings that choose how matmuls and attention are computed."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by the newer names
        precision = torch.backends.fp32_precision, matmul.fp32_precision
    return (
        precision,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch._C._get_cublas_allow_fp16_accumulation(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
    )


class GraphRecorder:
    """Records what functions launch on a GPU, in graphs that share memory."""

    def __init__(self):
        self.home = None  # the stream that graphs are replayed on
        self.first = None  # a graph that is never dropped, and so keeps the memory's pool

    def takes(self, x) -> bool:
        """Return True if calls with this tensor can be recorded, or replayed."""
        if not x.is_cuda or torch.cuda.is_current_stream_capturing():
            return False
        stream = torch.cuda.current_stream(x.device)
        if self.home is None:
            self.home = stream
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(x.device)
        return self.home == stream

    def random_numbers(self, x) -> int:
        """Return how many random numbers were drawn on the device so far."""
        return torch.cuda.default_generators[x.device.index].get_offset()

    def rehearse(self, function) -> None:
        """Call the function, before `record`, since PyTorch's random numbers and memory do not
        survive each failed capture.

        Raises:
            RuntimeError: it waits for the device, which a capture does not allow.
            torch.OutOfMemoryError: there may be no room for what it allocates.
        """
        device = self.home.device
        before = _bytes_allocated(device)
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is a prototype, PyTorch says
            torch.cuda.set_sync_debug_mode("error")
            try:
                function()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        needed = _bytes_allocated(device) - before
        if torch.cuda.mem_get_info(device)[0] < needed:
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info(device)[0] < needed:
                raise torch.OutOfMemoryError(f"{needed} bytes are not free for a CUDA graph")

    def record(self, function):
        """Return a graph of what the function launches; it has the method ``replay``."""
        if self.first is None:
            self.first = self._capture(lambda: torch.zeros(1, device=self.home.device))
        return self._capture(function)

    def _capture(self, function):
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(self.home)
        collects_garbage = gc.isenabled()
        gc.disable()  # it might free what a capture may not
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
        finally:
            if collects_garbage:
                gc.enable()
        self.home.wait_stream(self.stream)
        return graph


def _bytes_allocated(device) -> int:
    """Return the bytes that were allocated on a device so far, also those that are free again."""
    return torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"]
