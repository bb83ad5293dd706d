"""Conditions that our forwards check before they run an operator: on tensors, modules, and the
compiler."""

from __future__ import annotations

import torch

from liger_kernel.patch.proof.hooks import has_hooks

# Elements of a layer's input. For a smaller one the host's time counts for more than the kernel's.
LARGE_NUMEL = 2**23
# Elements of a layer's input from which on our kernels are faster than what a compiler makes.
MIN_NUMEL_IN_GRAPH = 2**23


def are_plain_tensors(*tensors) -> bool:
    """Return True if a kernel can read each of them: no DTensor, no quantised or other subclass.

    None counts as plain."""
    for t in tensors:  # a loop: a generator takes twice as long, and this is asked at every call
        if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter and t is not None:
            return False
    return True


def is_observed(*modules, still_called=True) -> bool:
    """Return True if someone looks at what these modules take or return.

    Then their inputs and outputs have to be tensors. A module may be None. ``still_called``: see
    `has_hooks`."""
    present = [m for m in modules if m is not None]
    return has_hooks(*present, still_called=still_called) or any(map(has_own_forward, present))


def has_own_forward(module) -> bool:
    """Return True if a forward was set on the object that is not its class's.

    `kernels` binds the class's own where it knows a name and finds no kernel for it.
    """
    if "forward" not in module.__dict__:
        return False
    forward = module.__dict__["forward"]
    if getattr(forward, "__self__", None) is not module:
        return True
    return getattr(forward, "__func__", None) is not type(module).forward


def left_to_compiler(x) -> bool:
    """Return True if a graph is being traced and, for an ``x`` of this size, should get the
    family's own code.

    Each operator of ours costs the host some 50 µs there, and is nothing that a compiler can fuse
    with its neighbours. A CUDA graph costs the host nothing, and our kernels are the faster ones at
    any size: Llama-3.2-1B, 1024 × 1 tokens, takes 21.1 ms a step with them and 21.35 without;
    outside of a CUDA graph 28.5 and 22.0. RMSNorm alone, by `torch.library.triton_op`, takes 22.8
    and 23.9 ms, as our operator 22.7 and 25.5, as the family's code 22.9 and
    23.4 (Hugging Face's model, H200, 2026-11-24).
    """
    if not torch.compiler.is_compiling():
        return False
    small = x.numel() < MIN_NUMEL_IN_GRAPH
    return small and x.device.type != "cpu" and not will_be_cuda_graph()


def will_be_cuda_graph() -> bool:
    """Return True if the graph that Dynamo is tracing will be replayed as a CUDA graph.

    That is ``mode="reduce-overhead"`` and its like. The answer is a constant of the trace: for
    another backend the code is traced anew. Only speed depends on it, so the answer is False where
    Dynamo does not tell."""
    try:
        from torch._dynamo.eval_frame import innermost_backend
        from torch._dynamo.symbolic_convert import InstructionTranslator

        options = innermost_backend(InstructionTranslator.current_tx().output.compiler_fn).config
        return bool(options.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))
    except Exception:
        return False


# `torch.compiler.assume_constant_result`, without importing Dynamo
will_be_cuda_graph._dynamo_marked_constant = True


def is_large(x) -> bool:
    """Return True if ``x`` is a plain tensor of at least `LARGE_NUMEL` elements."""
    return are_plain_tensors(x) and x.numel() >= LARGE_NUMEL
