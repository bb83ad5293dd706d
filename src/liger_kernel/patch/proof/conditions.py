"""Which tensors, modules and moments our operators are for: what the rewrites ask before they run
one."""

from __future__ import annotations

import torch

from liger_kernel.patch.proof.hooks import hooked


def plain(*tensors) -> bool:
    """No DTensor, no quantised or other subclass: what a kernel can read."""
    for t in tensors:  # a loop: a generator takes twice as long, and this is asked at every call
        if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter and t is not None:
            return False
    return True


def seen(*modules, called=True) -> bool:
    """Whether somebody looks at what these modules are given or give: then it has to be tensors.
    ``called``: see `hooked`."""
    held = [m for m in modules if m is not None]
    return hooked(*held, called=called) or any("forward" in m.__dict__ for m in held)


LARGE = 2**23  # elements of a layer's input; for a smaller one the host's time counts for more
IN_GRAPH = (
    2**23
)  # elements of a layer's input from which on our kernels are faster than what a compiler makes


def is_the_compilers(x) -> bool:
    """Whether, in a graph, a tensor of that size is left to the compiler, with the family's own
    code.

    Each operator of ours costs the host some 50 µs there, and is nothing that a compiler can fuse
    with its neighbours. A CUDA graph costs the host nothing, and our kernels are the faster ones at
    any size: Llama-3.2-1B, 1024 × 1 tokens, takes 21.1 ms a step with them and 21.35 without;
    outside of a CUDA graph 28.5 and 22.0. RMSNorm alone, by `torch.library.triton_op`, takes 22.8
    and 23.9 ms, as our operator 22.7 and 25.5, as the family's code 22.9 and
    23.4 (Hugging Face's model, H200, 2026-11-24).
    """
    if not torch.compiler.is_compiling():
        return False
    return x.numel() < IN_GRAPH and x.device.type != "cpu" and not becomes_a_cuda_graph()


def becomes_a_cuda_graph() -> bool:
    """Whether what Dynamo compiles now will be replayed as a CUDA graph (``mode="reduce-overhead"``
    and its like).

    It is asked while tracing, and the answer is a constant: what another backend compiles is traced
    anew. Speed alone depends on it, so where Dynamo does not tell, the answer is no."""
    try:
        from torch._dynamo.eval_frame import innermost_backend
        from torch._dynamo.symbolic_convert import InstructionTranslator

        options = innermost_backend(InstructionTranslator.current_tx().output.compiler_fn).config
        return bool(options.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))
    except Exception:
        return False


becomes_a_cuda_graph._dynamo_marked_constant = (
    True  # `torch.compiler.assume_constant_result`, without importing Dynamo
)


def large(x) -> bool:
    return plain(x) and x.numel() >= LARGE
