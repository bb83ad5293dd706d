"""What Inductor's cache has to be told."""

import functools


@functools.cache
def cache_by_what_is_donated():
    """Make the tensors that a backward graph may write over a part of its key in Inductor's cache.

    A saved tensor is donated if only backward has it, and then Inductor writes over it. With
    ``retain_graph=True`` it compiles backward with nothing donated, but up to PyTorch 2.13 under
    the same key. So the cache, on disk and in memory, may give it code that was compiled to run
    once, and what runs next reads what that has left. In most graphs AOTAutograd's own cache comes
    first, whose entry makes ``retain_graph=True`` raise; it takes none that has an autograd
    Function in it, as every graph of ours.

    Keys of backward graphs change, nothing else. This is not needed once `FxGraphHashDetails` reads
    ``bw_donated_idxs``, and does nothing where PyTorch has renamed these functions.
    """
    try:
        from torch._inductor.codecache import FxGraphHashDetails
        from torch._inductor.utils import get_donated_idxs
    except ImportError:
        return
    of_graph = FxGraphHashDetails.__init__

    @functools.wraps(of_graph)
    def of_graph_and_donated(self, gm, example_inputs, fx_kwargs, *args, **kwargs):
        of_graph(self, gm, example_inputs, fx_kwargs, *args, **kwargs)
        if fx_kwargs.get("is_backward"):
            self.donated = get_donated_idxs()

    FxGraphHashDetails.__init__ = of_graph_and_donated
