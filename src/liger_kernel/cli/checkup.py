"""What `doctor` tries in a process of its own: the devices, one small kernel, each operator against
its reference."""

from __future__ import annotations

import sys

import torch

from liger_kernel.cli import _child
from liger_kernel.cli._child import one_line
from liger_kernel.core import devices
from liger_kernel.core.op import CASES
from liger_kernel.core.tile import TRITON, tl, triton


@triton.jit
def _double(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + n, 2.0 * tl.load(x_ptr + n, mask=n < N), mask=n < N)


def checkup(spec: dict, report) -> dict:
    kind = "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else None
    report(
        "devices",
        devices=[_describe(kind, index) for index in range(getattr(torch, kind).device_count())]
        if kind
        else [],
    )
    report("build", cuda=torch.version.cuda, hip=torch.version.hip)
    if kind is None:
        return {}
    report("triton", **_tried(_triton_works, kind))
    for case in CASES:
        report("trying", name=case.name)
        report("kernel", name=case.name, **_tried(_agrees, case, kind))
    return {}


def _describe(kind: str, index: int) -> dict:
    properties = getattr(torch, kind).get_device_properties(index)
    where = torch.empty(0, device=torch.device(kind, index))
    return dict(
        name=properties.name, architecture=devices.arch(where), memory=properties.total_memory
    )


def _tried(check, *args) -> dict:
    try:
        check(*args)
    except Exception as problem:  # whatever it is, it is what the user wants to hear
        return dict(works=False, problem=f"{type(problem).__name__}: {one_line(problem)}")
    return dict(works=True, problem=None)


def _triton_works(kind: str) -> None:
    if not TRITON:
        raise ImportError("Triton is not installed")
    x = torch.arange(1000.0, device=kind)
    y = torch.full_like(x, -1)
    _double[(triton.cdiv(1000, 256),)](x, y, 1000, BLOCK=256)
    if not torch.equal(y, 2 * x):
        raise ArithmeticError("a kernel that doubles 1,000 numbers gives wrong ones")


def _agrees(case, kind: str) -> None:
    """Outputs and gradients of one small instance, within 1e-3 of the reference in float64."""
    torch.manual_seed(0)
    inputs = {name: _moved(value, kind) for name, value in case.inputs(*case.shapes[1]).items()}
    exact = {name: _moved(value, kind, torch.float64) for name, value in inputs.items()}
    got, want = _results(case.fn, inputs), _results(case.reference, exact)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        error, largest = (a.double() - b).abs().max().item(), b.abs().max().item()
        if not error <= 1e-3 * largest:
            raise ArithmeticError(
                f"result {index} is wrong by {error:.2g}, its largest value is {largest:.2g}"
            )


def _moved(value, kind: str, dtype=None):
    if not isinstance(value, torch.Tensor):
        return value
    moved = value.detach().to(kind, dtype if value.is_floating_point() else None)
    return moved.requires_grad_(value.requires_grad)


def _results(fn, inputs: dict) -> list[torch.Tensor]:
    out = fn(**inputs)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]
    leaves = [t for t in inputs.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    gradients = (
        torch.autograd.grad([o.double().sum() for o in outs if o.requires_grad], leaves)
        if leaves
        else ()
    )
    return [*(o.detach() for o in outs), *gradients]


if __name__ == "__main__":
    sys.exit(_child.serve(checkup))
