"""A correction of Inductor's cache key, for backward graphs of our operators."""

import functools
import weakref

import torch


@functools.cache
def key_backward_by_donated_buffers(namespace: str) -> None:
    """Add the donated buffers of a backward graph to its key in Inductor's cache, for graphs with
    operators of this namespace.

    A saved tensor is donated if only backward has it, and then Inductor writes over it. With
    ``retain_graph=True`` it compiles backward with nothing donated, but under the same key (seen on
    PyTorch 2.11 to 2.15.0). So the cache, on disk and in memory, may give it code that was
    compiled to run once, and what runs next reads what that has left. In most graphs AOTAutograd's
    own cache comes first, whose entry makes ``retain_graph=True`` raise; it takes none that has an
    autograd Function in it, as every graph of ours.

    PyTorch has no public way to extend the key of one graph, and a backward graph is compiled long
    after its forward, in the autograd engine. So the constructor of Inductor's `FxGraphHashDetails`
    is wrapped once, for the process. For a graph without our operators, forward and backward, the
    wrapper adds nothing: its key is PyTorch's own.

    This is not needed once `FxGraphHashDetails` reads ``bw_donated_idxs``, and does nothing where
    PyTorch has renamed these functions.
    """
    try:
        from torch._guards import TracingContext
        from torch._inductor.codecache import FxGraphHashDetails
        from torch._inductor.utils import get_donated_idxs
    except ImportError:
        return
    pytorch_init = FxGraphHashDetails.__init__
    with_our_operators = weakref.WeakSet()  # tracing contexts: one for a forward and its backward

    @functools.wraps(pytorch_init)
    def init(self, gm, example_inputs, fx_kwargs, *args, **kwargs):
        pytorch_init(self, gm, example_inputs, fx_kwargs, *args, **kwargs)
        context = TracingContext.try_get()
        if context is not None and _has_operator(gm, namespace):
            with_our_operators.add(context)
        if context in with_our_operators and fx_kwargs.get("is_backward"):
            self.donated_buffers = get_donated_idxs()

    FxGraphHashDetails.__init__ = init


def _has_operator(gm: torch.fx.GraphModule, namespace: str) -> bool:
    """Return True if this graph, or one nested in it, calls an operator of this namespace."""
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if getattr(node.target, "namespace", None) == namespace:
                    return True
    return False
