"""Checkpoints of several kinds, and what they compute again."""

from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from liger_kernel.core.checkpoint import offload_inputs


def nested(fn, x):
    def outer(x):
        return checkpoint(fn, x, use_reentrant=False)

    return checkpoint(outer, x, use_reentrant=False)


# name -> (checkpoint, whether it stops early)
CHECKPOINTS = {
    "early stop": (lambda fn, x: checkpoint(fn, x, use_reentrant=False), True),
    "no early stop": (lambda fn, x: checkpoint(fn, x, use_reentrant=False), False),
    "reentrant": (lambda fn, x: checkpoint(fn, x, use_reentrant=True), False),
    "nested": (nested, True),
    "offloaded": (lambda fn, x: offload_inputs(checkpoint)(fn, x, use_reentrant=False), True),
}


def flops_and_gradients(run, x, tensors, grad_output):
    """Return the operations of all products of ``run(x)`` and its backward, and the gradients of
    these tensors. ``grad_output(out)`` is the incoming gradient."""
    with FlopCounterMode(display=False) as counter:
        out = run(x)
        out.backward(grad_output(out))
    grads = [t.grad for t in tensors]
    for t in tensors:
        t.grad = None
    return counter.get_total_flops(), grads
