"""The gradients of a module's parameters when it runs in tiles, for `tiled_mlp`.

Which tensors need a gradient, the same tensors in backward, and the sum of their gradients over the
tiles.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types

import torch
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.weak import TensorWeakRef

NAME = "apply_tiled_mlp"


# ---- the tensors that need a gradient ----


def trainable_tensors(module, compute_params):
    """Return the tensors that need a gradient, and for each its places (module, attribute)."""
    tensors_and_places = {}  # by id
    for m in module.modules():
        _check_gathered(m)
        for attributes in (m._parameters, vars(m)):
            for name, t in attributes.items():
                if (
                    isinstance(t, torch.Tensor)
                    and t.requires_grad
                    and (attributes is m._parameters or _represents_parameter(t, m))
                ):
                    _, places = tensors_and_places.setdefault(id(t), (t, []))
                    places.append((m, name))
    for t in compute_params or ():
        if t.requires_grad:
            tensors_and_places.setdefault(id(t), (t, [(types.SimpleNamespace(tensor=t), "tensor")]))
    tensors = [t for t, _ in tensors_and_places.values()]
    return tensors, [places for _, places in tensors_and_places.values()]


def has_fixed_weights(module):
    """Return True if no weight is computed from others.

    Such a weight may be computed once for all tiles (`parametrize.cached`) or anew by each
    (spectral norm).
    """
    if parametrize._cache_enabled:
        return False
    for m in module.modules():
        if any(isinstance(hook, SpectralNorm) for hook in m._forward_pre_hooks.values()):
            return False
        if type(m).__module__ == "torch.nn.utils.parametrizations" and m._buffers:
            return False
    return True


def _check_gathered(module):
    for name, t in module._parameters.items():
        if t is not None and getattr(t, "ds_shape", t.shape) != t.shape:
            raise RuntimeError(
                f"{NAME}: ZeRO-3 has not gathered {type(module).__name__}.{name}; call "
                "deepspeed.utils.set_z3_leaf_modules for the class of the module with the tiles, "
                "or patch with tiled_mlp, before deepspeed.initialize"
            )


def _represents_parameter(t, module):
    """Return True if an attribute stands for a parameter: FSDP1's views, DataParallel's replicas.

    A tensor that a hook has computed from parameters does not: it may be that of an earlier step.
    """
    return (
        t.is_leaf
        or (t._base is not None and t._base.is_leaf)
        or getattr(module, "_is_replica", False)
    )


class ForwardTensor:
    """A reference to a tensor of the module that forward has used.

    FSDP frees parameters between forward and backward, so a parameter is not kept alive.
    """

    def __init__(self, t):
        is_computed = t._base is None and not t.is_leaf
        self.tensor = (lambda: t) if is_computed else TensorWeakRef(t)
        self.version = t._version
        self.base = None if t._base is None else TensorWeakRef(t._base)

    def current(self, module, name):
        """Return the tensor, or FSDP1's new view of the tensor that it was a view of.

        The module's attribute may be another tensor by now, as after `torch.func.functional_call`.
        """
        t = self.tensor()
        attribute = getattr(module, name, None)
        if (
            self.base is not None
            and attribute is not None
            and attribute._base is not None
            and attribute._base is self.base()
        ):
            t = attribute
        if t is not None and t._version == self.version and t.requires_grad:
            return t
        if t is None:
            change = "replaced"
        else:
            change = "written to" if t.requires_grad else "frozen"
        _raise_changed(module, name, change)


def current_tensors(places, forward_tensors):
    """Return the tensors that were in these places in forward."""
    return [
        tensor.current(*tensor_places[0])
        for tensor, tensor_places in zip(forward_tensors, places, strict=True)
    ]


class FrozenParameters:
    """References to the parameters that forward has used, and that need no gradient.

    They have to be in their places in backward, too. Left out is what its owner may exchange:
    views (FSDP1), tensor subclasses, and what is not there (accelerate's offloading).
    """

    def __init__(self, module):
        self.parameters = []  # (module, name, reference, version)
        for m in module.modules():
            for name, t in m._parameters.items():
                if _stays_in_place(t) and not t.requires_grad:
                    self.parameters.append((m, name, TensorWeakRef(t), t._version))

    def check(self):
        """Raise if one of them was replaced or written to."""
        for module, name, reference, version in self.parameters:
            t = module._parameters.get(name)
            if not _stays_in_place(t):
                continue
            if not _have_same_memory(t, reference()):
                _raise_changed(module, name, "replaced")
            if t._version != version:
                _raise_changed(module, name, "written to")


def _stays_in_place(t) -> bool:
    is_plain = type(t) in (torch.Tensor, torch.nn.Parameter) and t._base is None
    return is_plain and not t.is_meta and not t.is_inference()


def _have_same_memory(t, original) -> bool:
    """Return True for one tensor, or for an alias, such as ``functional_call`` may be given."""
    if t is original or original is None:
        return t is original
    layouts = [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in (t, original)]
    return layouts[0] == layouts[1]


def _raise_changed(module, name, change):
    raise RuntimeError(
        f"{NAME}: {type(module).__name__}.{name} was {change} between forward and backward, "
        "which computes the tiles again; do it after backward"
    )


_substitution_lock = threading.RLock()


@contextlib.contextmanager
def substitute(places, tensors):
    """A context in which these tensors are in their places in the module.

    If other tensors have to be replaced for that, no other thread can be in such a context.
    """
    replaced = []
    for tensor_places, t in zip(places, tensors, strict=True):
        for module, name in tensor_places:
            for attributes in (getattr(module, "_parameters", {}), vars(module)):
                if name in attributes and attributes[name] is not t:
                    replaced.append((attributes, name, t, attributes[name]))
    with _substitution_lock if replaced else contextlib.nullcontext():
        try:
            for attributes, name, t, _ in replaced:
                attributes[name] = t
            yield
        finally:
            for attributes, name, _, original in replaced:
                attributes[name] = original


# ---- the gradients of a tile ----


class _HookOfSum:
    """A parameter's hook that sees the sum over the tiles, and not the gradients of the tiles.

    Autograd would call the hook for these, too. The wrapper stays in the hook's place: another
    thread may run backward through the same parameter at the same time.
    """

    def __init__(self, hook):
        functools.update_wrapper(self, hook)

    def __call__(self, gradient):
        if torch._C._current_graph_task_id() in _tile_graph_tasks:
            return None
        return self.__wrapped__(gradient)


_tile_graph_tasks = set()  # ids of autograd's graph tasks that are a tile's backward


@contextlib.contextmanager
def tile_backward(y, tensors):
    """A context for autograd's backward of a tile's y, in which hooks of ``tensors`` do not run."""
    for t in tensors:
        hooks = t._backward_hooks if t.is_leaf else None
        for key, hook in list((hooks or {}).items()):
            if type(hook) is not _HookOfSum:
                hooks[key] = _HookOfSum(hook)
    graph_tasks = []

    def register_graph_task(*_):
        graph_tasks.append(torch._C._current_graph_task_id())
        _tile_graph_tasks.update(graph_tasks)

    # y may itself be one of the tensors, and have no node
    handle = y.grad_fn and y.grad_fn.register_prehook(register_graph_task)
    try:
        yield
    finally:
        if handle:
            handle.remove()
        _tile_graph_tasks.difference_update(graph_tasks)


def find_consumers(y, tensors):
    """Return for each tensor the nodes of y's graph that compute its gradient.

    A node is in a pair (node, index of the gradient among those that it computes). Raises if
    another leaf in that graph needs a gradient, which would be lost.
    """
    gradient_edges = map(torch.autograd.graph.get_gradient_edge, tensors)
    edges = [(edge.node, edge.output_nr) for edge in gradient_edges]
    consumers = {edge: [] for edge in edges}
    visited = set()
    stack = [(y.grad_fn, y.output_nr)]
    while stack:
        edge = stack.pop()
        node, _ = edge
        if node is None or edge in consumers or node in visited:
            continue
        if type(node).__name__ == "AccumulateGrad":
            raise RuntimeError(
                f"{NAME}: fn uses a tensor of shape {tuple(node.variable.shape)} that requires a "
                "gradient and is none of mlp_module's parameters; add it to compute_params "
                "(for create_graph=True, to mlp_module), or, if FSDP gathers parameters within fn, "
                f"let FSDP wrap the module that calls {NAME}"
            )
        visited.add(node)
        for i, next_edge in enumerate(node.next_functions):
            if next_edge in consumers:
                consumers[next_edge].append((node, i))
        stack += node.next_functions
    return [consumers[edge] for edge in edges]


def backward_tile(run, x, tensors, sums, dy):
    """Return the gradient of x, a tile; None if it has none.

    The tensors' gradients are added to their sums (None: not needed) as soon as they are computed.
    Autograd continues with a gradient that takes no memory.
    """
    y = run(x)
    if not y.requires_grad:
        return None
    in_graph = [t for t in (x, *tensors) if t.requires_grad]
    consumers = dict(zip(map(id, in_graph), find_consumers(y, in_graph), strict=True))
    summed = [(t, total) for t, total in zip(tensors, sums, strict=True) if total is not None]
    for t, total in summed:
        for node, i in consumers[id(t)]:
            node.register_hook(functools.partial(total.take, i))
    inputs = [x] if x.requires_grad else []
    with tile_backward(y, tensors):
        grads = torch.autograd.grad(
            y,
            [*inputs, *(t for t, _ in summed)],
            dy,
            allow_unused=True,
            # autograd goes on from a tensor that is computed of others, in its next backward
            retain_graph=not all(t.is_leaf for t in tensors),
        )
    for (t, total), gradient in zip(summed, grads[len(inputs) :], strict=True):
        if not consumers[id(t)] and gradient is not None:  # t is y itself
            total.add(gradient)
    return grads[0] if inputs else None


class GradientSum:
    """The sum of a parameter's gradients over the tiles."""

    def __init__(self):
        self.value = None
        self.dtype = None
        self.owns_memory = False

    def take(self, i, grads, _):
        """Add a node's i-th gradient, and replace it by zeros without memory. A node calls this."""
        if grads[i] is None:
            return None
        self.add(grads[i])
        if grads[i].layout is torch.strided:
            zeros = grads[i].new_zeros(()).expand_as(grads[i])
        else:
            zeros = torch.zeros_like(grads[i])
        return *grads[:i], zeros, *grads[i + 1 :]

    def add(self, gradient):
        if self.value is None:
            self.value = gradient
            self.dtype = gradient.dtype
        elif self.owns_memory:
            self.value += gradient
        else:  # autograd's first gradient may share its memory with another tensor
            wide_dtype = torch.promote_types(self.dtype, torch.float32)
            self.value = self.value.to(wide_dtype, copy=True).add_(gradient)
            self.owns_memory = True

    def rounded(self):
        return None if self.value is None else self.value.to(self.dtype)
