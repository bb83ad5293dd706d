"""For `doctor`: try the devices, one small kernel, and each operator against its reference.

It runs in a process of its own.
"""

from __future__ import annotations

import os
import sys

import torch

from liger_kernel.cli import _child
from liger_kernel.cli._child import one_line
from liger_kernel.core import devices
from liger_kernel.core.op import CASES
from liger_kernel.core.tile import TRITON, tl, triton
from liger_kernel.ops.head import hopper


@triton.jit
def _double(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + n, 2.0 * tl.load(x_ptr + n, mask=n < N), mask=n < N)


def checkup(spec: dict, report) -> dict:
    device_type = None
    if torch.cuda.is_available():
        device_type = "cuda"
    elif torch.xpu.is_available():
        device_type = "xpu"
    count = 0 if device_type is None else getattr(torch, device_type).device_count()
    gpus = [_describe(device_type, index) for index in range(count)]
    report("devices", devices=gpus)
    report("build", cuda=torch.version.cuda, hip=torch.version.hip)
    if device_type is None:
        return {}
    report("triton", **_run_check(_triton_works, device_type))
    has_hopper = any(gpu["architecture"] == "sm_90" for gpu in gpus)
    if has_hopper and os.environ.get(hopper.HOPPER_VARIABLE) != "0":
        versions = [".".join(version) for version in hopper.TRITON_VERSIONS]
        report("hopper", on=hopper.kernels() is not None, triton=versions)
    for case in CASES:
        report("trying", name=case.name)
        report("kernel", name=case.name, **_run_check(_agrees, case, device_type))
    return {}


def _describe(device_type: str, index: int) -> dict:
    properties = getattr(torch, device_type).get_device_properties(index)
    tensor = torch.empty(0, device=torch.device(device_type, index))
    return {
        "name": properties.name,
        "architecture": devices.arch(tensor),
        "memory": properties.total_memory,
    }


def _run_check(check, *args) -> dict:
    """Run ``check(*args)``, and return whether it raised nothing."""
    try:
        check(*args)
    except Exception as problem:  # whatever it is, the user wants to see it
        return dict(works=False, problem=f"{type(problem).__name__}: {one_line(problem)}")
    return dict(works=True, problem=None)


def _triton_works(device_type: str) -> None:
    if not TRITON:
        raise ImportError("Triton is not installed")
    x = torch.arange(1000.0, device=device_type)
    y = torch.full_like(x, -1)
    _double[(triton.cdiv(1000, 256),)](x, y, 1000, BLOCK=256)
    if not torch.equal(y, 2 * x):
        raise ArithmeticError("a kernel that doubles 1,000 numbers gives wrong ones")


def _agrees(case, device_type: str) -> None:
    """Check outputs and gradients of a small instance: within 1e-3 of the reference in float64."""
    torch.manual_seed(0)
    inputs = case.inputs(*case.shapes[1])
    inputs = {name: _to_device(value, device_type) for name, value in inputs.items()}
    fp64_inputs = {
        name: _to_device(value, device_type, torch.float64) for name, value in inputs.items()
    }
    results = _results(case.fn, inputs)
    expected = _results(case.reference, fp64_inputs)
    for index, (result, exact) in enumerate(zip(results, expected, strict=True)):
        error = (result.double() - exact).abs().max().item()
        largest = exact.abs().max().item()
        if not error <= 1e-3 * largest:
            raise ArithmeticError(
                f"result {index} is wrong by {error:.2g}, its largest value is {largest:.2g}"
            )


def _to_device(value, device_type: str, dtype=None):
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach().to(device_type, dtype if value.is_floating_point() else None)
    return tensor.requires_grad_(value.requires_grad)


def _results(fn, inputs: dict) -> list[torch.Tensor]:
    """Return the outputs, and the gradients of their sum."""
    outputs = fn(**inputs)
    if not isinstance(outputs, tuple):
        outputs = (outputs,)
    outputs = [x for x in outputs if x is not None]
    leaves = [t for t in inputs.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    grads = ()
    if leaves:
        sums = [x.double().sum() for x in outputs if x.requires_grad]
        grads = torch.autograd.grad(sums, leaves)
    return [*(x.detach() for x in outputs), *grads]


if __name__ == "__main__":
    sys.exit(_child.serve(checkup))
