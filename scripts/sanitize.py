"""Run every `Case` forward and backward at its small odd shapes, for compute-sanitizer.

Run as a program: ``compute-sanitizer --tool memcheck python3 scripts/sanitize.py [NAME...]``, with
names of cases, or all of them. The shapes are small because compute-sanitizer slows everything
down. PYTORCH_NO_CUDA_MEMORY_CACHING=1 lets it see the bounds of each tensor.
"""

import sys

import torch

import liger_kernel.ops  # noqa: F401  (fills CASES)
from liger_kernel.core.op import CASES
from liger_kernel.ops.recurrent import hopper

# further shapes: heads of 128, which Hopper has a kernel of its own for, with full chunks and short
SHAPES = {"gated_delta_rule": ((2, 128, 1, 2, 128, 128), (2, 97, 1, 2, 128, 128))}


def to_bf16(t):
    """Return a tensor in bf16 that an operation made, so that backward may overwrite it."""
    if not isinstance(t, torch.Tensor) or not t.is_floating_point():
        return t
    return t.bfloat16() * 1  # differentiable where t is


def run(case, shape, option):
    torch.manual_seed(0)
    with torch.device("cuda"):
        leaves = {**case.inputs(*shape), **option}
    out = case.fn(**{name: to_bf16(t) for name, t in leaves.items()})
    outputs = out if isinstance(out, tuple) else (out,)
    outputs = [o for o in outputs if o is not None and o.requires_grad]
    inputs = [t for t in leaves.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.autograd.grad(outputs, inputs, [torch.randn_like(o) for o in outputs])
    torch.cuda.synchronize()


def main():
    names = sys.argv[1:] or [case.name for case in CASES]
    if unknown := set(names) - {case.name for case in CASES}:
        raise SystemExit(f"sanitize: no case {', '.join(sorted(unknown))}")
    hopper.MIN_PROGRAMS = 1
    calls = 0
    for case in CASES:
        if case.name not in names:
            continue
        for shape in case.shapes + SHAPES.get(case.name, ()):
            for option in case.options:
                run(case, shape, option)
                calls += 1
        print(f"{case.name}: done", flush=True)
    print(f"{calls} calls forward and backward")


if __name__ == "__main__":
    main()
