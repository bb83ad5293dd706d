"""Every `Case` forward and backward at its small odd shapes, for compute-sanitizer, which slows
everything down.

Run as a program: ``compute-sanitizer --tool memcheck python3 tests/support/sanitize.py``.
PYTORCH_NO_CUDA_MEMORY_CACHING=1 lets it see the bounds of each tensor. The inputs are made by an
operation and dropped, so that backward may overwrite them."""

import torch

import liger_kernel.ops  # noqa: F401  (fills CASES)
from liger_kernel.core.op import CASES


def made(t):
    if not isinstance(t, torch.Tensor) or not t.is_floating_point():
        return t
    return t.bfloat16() * 1  # differentiable where t is


def main():
    launches = 0
    for case in CASES:
        for shape in case.shapes:
            for option in case.options:
                torch.manual_seed(0)
                with torch.device("cuda"):
                    leaves = {**case.inputs(*shape), **option}
                out = case.fn(**{name: made(t) for name, t in leaves.items()})
                outs = [
                    o
                    for o in (out if isinstance(out, tuple) else (out,))
                    if o is not None and o.requires_grad
                ]
                wanted = [
                    t for t in leaves.values() if isinstance(t, torch.Tensor) and t.requires_grad
                ]
                torch.autograd.grad(outs, wanted, [torch.randn_like(o) for o in outs])
                torch.cuda.synchronize()
                launches += 1
        print(f"{case.name}: done", flush=True)
    print(f"{launches} calls forward and backward")


if __name__ == "__main__":
    main()
