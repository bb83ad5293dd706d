"""The peak FLOP/s of devices for dense matrix products, as their makers publish them."""

from __future__ import annotations

import re

import torch

# (pattern of the device's name, TFLOP/s in bf16 and fp16, in fp32 by TF32, in fp32), from the
# makers' data sheets, without sparsity. PyTorch sees each half of an MI250(X) as a device. The
# first row that matches counts.
PEAKS = (
    (r"GB200", 2500, 1250, 80),
    (r"B200", 2250, 1125, 75),
    (r"GH200", 989, 494, 67),
    (r"H200 NVL", 835, 417, 60),
    (r"H200", 989, 494, 67),
    (r"H100 PCIe", 756, 378, 51),
    (r"H100 NVL", 835, 417, 60),
    (r"H[18]00", 989, 494, 67),
    (r"H20", 148, 74, 44),
    (r"A[18]00", 312, 156, 19.5),
    (r"A30", 165, 82, 10.3),
    (r"A40", 149.7, 74.8, 37.4),
    (r"A10", 125, 62.5, 31.2),
    (r"L40S", 362, 183, 91.6),
    (r"L40", 181, 90.5, 90.5),
    (r"L4", 121, 60, 30.3),
    (r"RTX 6000 Ada.*", 364, 182, 91.1),
    (r"RTX A6000", 154.8, 77.4, 38.7),
    (r"RTX 5090", 209.5, 104.8, 104.8),
    (r"RTX 4090", 165.2, 82.6, 82.6),
    (r"RTX 3090", 71, 35.6, 35.6),
    (r"MI355X", 2516, None, 157.3),
    (r"MI350X", 2307, None, 144.2),
    (r"MI3(?:00|25)X", 1307, 653.7, 163.4),
    (r"MI300A", 980.6, 490.3, 122.6),
    (r"MI250X?(?: ?/ ?MI250X?)?", 191.5, None, 47.9),
    (r"MI210", 181, None, 45.3),
)
# a part of a device, or another device of a similar name
OTHER_DEVICES = r"MIG|Laptop|Max-Q|Mobile| Ti\b| D\b|Super"


def peak_flops(name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Return the peak FLOP/s of matrix products on a device of this name, or None if unknown.

    Args:
        name: as ``torch.cuda.get_device_name`` returns it.
        dtype: of the matrices.
        tf32: fp32 products may be rounded to TF32.
    """
    if re.search(OTHER_DEVICES, name, re.IGNORECASE):
        return None
    for pattern, half_peak, tf32_peak, fp32_peak in PEAKS:
        if re.search(rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])", name):
            if dtype in (torch.bfloat16, torch.float16):
                return half_peak * 1e12
            if dtype != torch.float32:
                return None
            return (tf32_peak if tf32 and tf32_peak else fp32_peak) * 1e12
    return None


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of this device, with TF32 as PyTorch is set now, or None."""
    if device.type not in ("cuda", "xpu"):
        return None
    tf32 = torch.version.hip is None and torch.get_float32_matmul_precision() != "highest"
    return peak_flops(getattr(torch, device.type).get_device_name(device), dtype, tf32)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that the process has held.

    They are those of the device's allocator, on a CPU all of its resident memory.
    """
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).max_memory_allocated(device)
    if device.type != "cpu":
        return 0
    try:
        import resource
    except ImportError:  # Windows
        return 0
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
