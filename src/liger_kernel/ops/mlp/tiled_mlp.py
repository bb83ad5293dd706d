r"""An MLP in tiles of tokens (ALST): of its activations only its input is kept for backward.

    y_i = f(x_i)        dx_i = dy_i·∂f/∂x (x_i),   dw = Σ_i dy_i·∂f/∂w (x_i)        i: a tile, w: a parameter of f

f works on every token by itself, so its tokens can be cut into tiles: forward computes one after
the other and keeps x; backward computes each once more, with a graph, and goes back through it.
What f holds meanwhile is that of one tile, however long the sequence is. An x that can be made
again (`again`) is not kept: backward makes that of a tile. Other threads may go forward and back
through the same f meanwhile: gradients are taken from a tile's own nodes.

The sum over the tiles is in fp32 and is rounded once, to the dtype of a tile's gradient. Where that
dtype rounds by ε,
dw is off by ε·Σ_i |dw_i| at most, as f rounds the tiles, and by ε·|dw|, as their sum is rounded.

Autograd gets that sum once, as the gradient of an input of the Function. So whatever follows a
parameter's gradient (its hooks, DDP, FSDP, ZeRO-3) follows once a step. In backward, the parameters
are looked up in the module again: by then FSDP has gathered them anew. ZeRO-3 has to gather them
for all tiles at once (`LEAF`). Random numbers are drawn again as in forward, and autocast is as
there.

Source: Arctic Long Sequence Training, arXiv:2506.13996.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable

import torch
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states
from torch.utils.weak import TensorWeakRef

from liger_kernel.core import check, devices
from liger_kernel.core.again import recipe
from liger_kernel.core.op import Function, matrix, transformed
from liger_kernel.core.tile import cdiv
from liger_kernel.ops.mlp.modules import LigerGEGLUMLP, LigerSwiGLUMLP

NAME = "apply_tiled_mlp"
LEAF = {
    "_z3_leaf": True
}  # members of a module: deepspeed.initialize makes ZeRO-3 gather all below it with it


def _tiles(x, shards):
    """x (..., S, H) as at most ``shards`` tiles (1, ..., tokens, H), of all tokens one after the
    other."""
    rows = matrix(x)
    return rows[(None,) * (x.dim() - 2)].split(max(1, cdiv(rows.shape[0], shards)), dim=-2)


def _run(fn, mlp_module, tile):
    y = fn(mlp_module, tile)
    if not isinstance(y, torch.Tensor) or y.shape[:-1] != tile.shape[:-1]:
        given = (
            f"a tensor of shape {tuple(y.shape)}"
            if isinstance(y, torch.Tensor)
            else f"a {type(y).__name__}"
        )
        raise ValueError(
            f"{NAME}: fn gave {given} for a tile of shape {tuple(tile.shape)}, it must give a row a token"
        )
    return y


def _joined(run, x, shards):
    """What ``run`` makes of the tiles, in the shape of x. Without a graph each is in its place
    before the next."""
    if torch.is_grad_enabled():
        y = torch.cat([run(tile) for tile in _tiles(x, shards)], dim=-2)
        return y.view(*x.shape[:-1], y.shape[-1])
    y = None
    for i, tile in enumerate(_tiles(x, shards)):
        y_i = run(tile)
        if y is None:
            y = y_i.new_empty(*x.shape[:-1], y_i.shape[-1])
            places = _tiles(y, shards)
        places[i].copy_(y_i)
    return y


def _in_graph(fn, mlp_module, x, shards):
    """For torch.compile, whose graphs know checkpoints, and no backward that differentiates."""
    if not _is_stateless(mlp_module):
        return fn(mlp_module, x)
    run = functools.partial(_run, fn, mlp_module)
    return _joined(
        functools.partial(checkpoint, run, use_reentrant=False) if torch.is_grad_enabled() else run,
        x,
        shards,
    )


# ---- the tensors that learn ----


def _learning(module, more):
    """The tensors that require a gradient, and the places (module, attribute) where each is.
    ``more``: other ones."""
    found = {}
    for m in module.modules():
        _check_gathered(m)
        for held in (m._parameters, vars(m)):
            for name, t in held.items():
                if (
                    isinstance(t, torch.Tensor)
                    and t.requires_grad
                    and (held is m._parameters or _stands_for(t, m))
                ):
                    found.setdefault(id(t), (t, []))[1].append((m, name))
    for t in more or ():
        if t.requires_grad:
            found.setdefault(id(t), (t, [(types.SimpleNamespace(tensor=t), "tensor")]))
    return [t for t, _ in found.values()], [places for _, places in found.values()]


def _is_stateless(module):
    """Whether its weights are what it holds: not made of others, once for all tiles
    (`parametrize.cached`) or anew by each (spectral norm)."""
    if parametrize._cache_enabled:
        return False
    hooks = (hook for m in module.modules() for hook in m._forward_pre_hooks.values())
    return not any(isinstance(hook, SpectralNorm) for hook in hooks) and not any(
        type(m).__module__ == "torch.nn.utils.parametrizations" and m._buffers
        for m in module.modules()
    )


def _check_gathered(module):
    for name, t in module._parameters.items():
        if t is not None and getattr(t, "ds_shape", t.shape) != t.shape:
            raise RuntimeError(
                f"{NAME}: ZeRO-3 has not gathered {type(module).__name__}.{name}; call "
                "deepspeed.utils.set_z3_leaf_modules for the class of the module with the tiles, or patch with "
                "tiled_mlp, before deepspeed.initialize"
            )


def _stands_for(t, module):
    """Whether an attribute stands for a parameter, as FSDP1's views and DataParallel's replicas do.
    What a hook has computed of parameters does not: it may be that of an earlier step."""
    return (
        t.is_leaf
        or (t._base is not None and t._base.is_leaf)
        or getattr(module, "_is_replica", False)
    )


class _Seen:
    """A tensor that was in its place in forward. FSDP frees it in between, so what is a parameter
    is not kept alive."""

    def __init__(self, t):
        kept = t._base is None and not t.is_leaf
        self.tensor, self.version = (lambda: t) if kept else TensorWeakRef(t), t._version
        self.base = None if t._base is None else TensorWeakRef(t._base)

    def now(self, module, name):
        """It, or FSDP1's new view of what it was a view of. What stands in its place by now may be
        another tensor, as after `torch.func.functional_call`."""
        there, t = getattr(module, name, None), self.tensor()
        if (
            self.base is not None
            and there is not None
            and there._base is not None
            and there._base is self.base()
        ):
            t = there
        if t is None or t._version != self.version or not t.requires_grad:
            what = "replaced" if t is None else "written to" if t.requires_grad else "frozen"
            raise RuntimeError(
                f"{NAME}: {type(module).__name__}.{name} was {what} between forward and backward, which computes the "
                "tiles again; do it after backward"
            )
        return t


def _now(places, seen):
    """The tensors that were in these places in forward."""
    return [s.now(*those[0]) for s, those in zip(seen, places, strict=True)]


_lock = threading.RLock()


@contextlib.contextmanager
def _in_places(places, tensors):
    """With these tensors in the module, where others are; then no other thread runs within this."""
    held = [
        (members, name, t, members[name])
        for those, t in zip(places, tensors, strict=True)
        for module, name in those
        for members in (getattr(module, "_parameters", {}), vars(module))
        if name in members and members[name] is not t
    ]
    with _lock if held else contextlib.nullcontext():
        try:
            for members, name, t, _ in held:
                members[name] = t
            yield
        finally:
            for members, name, _, own in held:
                members[name] = own


class _Outside:
    """A parameter's hook, which is for the sum: it does not see the tiles' gradients, for which
    autograd calls it, too.

    It stays in the hook's place: another thread may go back to the same parameter meanwhile."""

    def __init__(self, hook):
        functools.update_wrapper(self, hook)

    def __call__(self, gradient):
        return (
            None
            if _tile_runs.intersection([torch._C._current_graph_task_id()])
            else self.__wrapped__(gradient)
        )


_tile_runs = set()  # autograd's numbers of those that are under way


@contextlib.contextmanager
def _tile_run(y, tensors):
    """In which autograd goes back through the graph of y, of a tile: without the hooks of these
    leaves."""
    for t in tensors:
        hooks = t._backward_hooks if t.is_leaf else None
        for key, hook in list((hooks or {}).items()):
            if type(hook) is not _Outside:
                hooks[key] = _Outside(hook)
    noted = []

    def note(*_):
        noted.append(torch._C._current_graph_task_id())
        _tile_runs.update(noted)

    hook = y.grad_fn and y.grad_fn.register_prehook(note)  # y may be one of them
    try:
        yield
    finally:
        if hook:
            hook.remove()
        _tile_runs.difference_update(noted)


def _readers(y, known):
    """-> for each of ``known``, tensors in the graph of y, what gets its gradient from: (node,
    which of its inputs).

    Raises if something else learns in that graph: its gradient would be lost."""
    edges = [
        (edge.node, edge.output_nr) for edge in map(torch.autograd.graph.get_gradient_edge, known)
    ]
    found, seen, waiting = {edge: [] for edge in edges}, set(), [(y.grad_fn, y.output_nr)]
    while waiting:
        node, _ = edge = waiting.pop()
        if node is None or edge in found or node in seen:
            continue
        if type(node).__name__ == "AccumulateGrad":
            raise RuntimeError(
                f"{NAME}: fn uses a tensor of shape {tuple(node.variable.shape)} that requires a gradient and is none "
                "of mlp_module's parameters; add it to compute_params (for create_graph=True, to mlp_module), or, if "
                f"FSDP gathers parameters within fn, let FSDP wrap the module that calls {NAME}"
            )
        seen.add(node)
        for i, following in enumerate(node.next_functions):
            if following in found:
                found[following].append((node, i))
        waiting += node.next_functions
    return [found[edge] for edge in edges]


def _gradient(run, x, tensors, sums, dy):
    """-> that of x, a tile, None if there is none. Those of the tensors are added to their sums,
    None if none is needed, each as soon as it is there: autograd goes on with one that has no
    memory."""
    y = run(x)
    if not y.requires_grad:
        return None
    known = [t for t in (x, *tensors) if t.requires_grad]
    readers = dict(zip(map(id, known), _readers(y, known), strict=True))
    wanted = [(t, total) for t, total in zip(tensors, sums, strict=True) if total is not None]
    for t, total in wanted:
        for node, i in readers[id(t)]:
            node.register_hook(functools.partial(total.taken, i))
    inputs = [x] if x.requires_grad else []
    with _tile_run(y, tensors):
        found = torch.autograd.grad(
            y,
            [*inputs, *(t for t, _ in wanted)],
            dy,
            allow_unused=True,
            retain_graph=not all(
                t.is_leaf for t in tensors
            ),  # autograd goes on from what is computed of others
        )
    for (t, total), gradient in zip(wanted, found[len(inputs) :], strict=True):
        if not readers[id(t)] and gradient is not None:  # y itself
            total.add(gradient)
    return found[0] if inputs else None


class _Sum:
    """Of a parameter's gradients."""

    def __init__(self):
        self.value, self.dtype, self.ours = None, None, False

    def taken(self, i, gradients, _):
        """Of a node's gradients the i-th."""
        if gradients[i] is None:
            return None
        self.add(gradients[i])
        dense = gradients[i].layout is torch.strided
        nothing = (
            gradients[i].new_zeros(()).expand_as(gradients[i])
            if dense
            else torch.zeros_like(gradients[i])
        )
        return *gradients[:i], nothing, *gradients[i + 1 :]

    def add(self, more):
        if self.value is None:
            self.value, self.dtype = more, more.dtype
        elif self.ours:
            self.value += more
        else:  # autograd's first one may share its memory with something
            wide = torch.promote_types(self.dtype, torch.float32)
            self.value, self.ours = self.value.to(wide, copy=True).add_(more), True

    def rounded(self):
        return None if self.value is None else self.value.to(self.dtype)


# ---- the state in which a tile is computed ----


class _NothingRandom(TorchDispatchMode):
    """For what a CUDA graph captures: the state of random numbers cannot be read there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(
                f"{NAME}: fn draws random numbers ({func}), which backward cannot draw again while a CUDA graph is "
                "captured; switch dropout off"
            )
        return func(*args, **(kwargs or {}))


def _is_captured(x):
    return getattr(getattr(torch, x.device.type, None), "is_current_stream_capturing", bool)()


def _replay(x):
    """-> a function that returns a context with a graph, and with autocast and random numbers as
    they are now."""
    autocast, state = devices.autocast_as_now(x.device), torch.get_rng_state()
    indices, states = ([], []) if _is_captured(x) else get_device_states(x)
    kind = "cpu" if x.device.type == "meta" else x.device.type

    @contextlib.contextmanager
    def again():
        with torch.enable_grad(), autocast(), torch.random.fork_rng(indices, device_type=kind):
            torch.set_rng_state(state)
            set_device_states(indices, states, device_type=kind)
            yield

    return again


class _Input(torch.autograd.Function):
    """x, or what backward makes it of. A checkpoint that has this need not run the tiles again,
    too: the node behind it keeps nothing."""

    @staticmethod
    def forward(ctx, x, recipe):
        ctx.save_for_backward(*((x,) if recipe is None else recipe.tensors))
        ctx.recipe = recipe and recipe.without_tensors()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, None


class LigerTiledMLPFunction(Function):
    """``apply(fn, mlp_module, x, shards, compute_params=None) -> y``: `apply_tiled_mlp` with a
    number of tiles."""

    @staticmethod
    def reference(fn, mlp_module, x, shards, compute_params=None):
        return fn(mlp_module, x)

    @classmethod
    def apply(cls, fn, mlp_module, x, shards, compute_params=None):
        if torch.compiler.is_compiling():
            return _in_graph(fn, mlp_module, x, shards)
        if transformed() or not _is_stateless(mlp_module):
            return cls.reference(fn, mlp_module, x, shards)
        tensors, places = (
            _learning(mlp_module, compute_params) if torch.is_grad_enabled() else ((), ())
        )
        if not tensors and not (torch.is_grad_enabled() and x.requires_grad):
            return _joined(functools.partial(_run, fn, mlp_module), x, shards)
        x = _Input.apply(x, recipe(x)) if x.requires_grad and torch.is_grad_enabled() else x
        return super(torch.autograd.Function, cls).apply(
            fn, mlp_module, x, shards, compute_params, places, *tensors
        )

    @staticmethod
    def forward(ctx, fn, mlp_module, x, shards, compute_params, places, *tensors):
        ctx.input, ctx.recipe = x.grad_fn, None
        if type(ctx.input) is _Input._backward_cls:
            ctx.recipe = ctx.input.recipe
        else:
            ctx.input = ctx
            ctx.save_for_backward(x)
        ctx.run, ctx.shards, ctx.replay = (
            functools.partial(_run, fn, mlp_module),
            shards,
            _replay(x),
        )
        ctx.places, ctx.seen, version = places, [_Seen(t) for t in tensors], x._version
        learns = ctx.needs_input_grad[2]  # a tile says so, as x does
        try:
            with _NothingRandom() if _is_captured(x) else contextlib.nullcontext():
                y = _joined(lambda tile: ctx.run(tile.detach().requires_grad_(learns)), x, shards)
        finally:
            if devices.in_autocast(x):
                torch.clear_autocast_cache()  # where it has weights that were cast without a graph
        if x._version != version:
            raise RuntimeError(
                f"{NAME}: fn writes to its input, which backward needs; let it write to a copy"
            )
        return y

    @classmethod
    def again(cls, ctx, dy):
        x, *others = ctx.input.saved_tensors
        x = ctx.recipe(x, *others) if ctx.recipe else x

        own, needs = (
            _now(ctx.places, ctx.seen),
            [ctx.needs_input_grad[2], *ctx.needs_input_grad[6:]],
        )
        # a view of what is computed of others: one may depend on another
        given = [x.view_as(x), *(t if t.is_leaf else t.view_as(t) for t in own)]
        with ctx.replay(), _in_places(ctx.places, given[1:]):
            y = ctx.run(given[0])
        _readers(y, [t for t in given if t.requires_grad])
        wanted = [t for t, need in zip(given, needs, strict=True) if need and y.requires_grad]
        with _tile_run(y, own):
            found = iter(
                torch.autograd.grad(y, wanted, dy, create_graph=True, allow_unused=True)
                if wanted
                else ()
            )
        dx, *found = (next(found, None) if need else None for need in needs)
        return None, None, dx, None, None, None, *found

    @staticmethod
    def backward(ctx, dy):
        x, *others = ctx.input.saved_tensors
        tensors, need_dx, needs = (
            _now(ctx.places, ctx.seen),
            ctx.needs_input_grad[2],
            ctx.needs_input_grad[6:],
        )
        dx = x.new_empty(x.shape) if need_dx else None
        sums = [_Sum() if need else None for need in needs]
        tiles = (_tiles(t, ctx.shards) for t in (x, dy, x if dx is None else dx))

        def run(tile):
            with _in_places(ctx.places, tensors):
                return ctx.run(tile)

        with ctx.replay():
            for x_i, dy_i, dx_i in zip(*tiles, strict=True):
                if ctx.recipe:
                    with torch.no_grad():
                        x_i = ctx.recipe(x_i, *others)
                x_i = x_i.detach().requires_grad_(need_dx)
                own = _gradient(
                    run, x_i.view_as(x_i), tensors, sums, dy_i
                )  # a view: hooks that count take no leaves
                if need_dx:
                    dx_i.zero_() if own is None else dx_i.copy_(own)
        return None, None, dx, None, None, None, *(total and total.rounded() for total in sums)


def apply_tiled_mlp(
    fn: Callable,
    mlp_module: torch.nn.Module,
    x: torch.Tensor,
    num_shards: int | None = None,
    compute_params: list[torch.nn.Parameter] | None = None,
) -> torch.Tensor:
    """``fn(mlp_module, x)`` in tiles of tokens, each of which backward computes again.

    Args:
        fn: called with the module and a tile (1, ..., tokens, H), or (tokens, H) of a 2-D x. It
        gives a row a token,
            of that token alone, and what it makes of parameters it makes at every call.
        mlp_module: has the parameters; what of it is in use when this is called gets gradients.
        x: (..., S, H), fp32, bf16, fp16 or fp64. It may be frozen, and so may be parameters.
        num_shards: the number of tiles; there may be less. By default ⌈S/H⌉: of one sequence, what
        an MLP holds of a
            tile is then of the size of its weights.
        compute_params: further tensors that fn uses and that require a gradient.

    Returns:
        (..., S, H'), as of ``fn(mlp_module, x)``, which is called without tiles where weights are
        made once a call
        (spectral norm, ``parametrize.cached``). Under torch.compile each tile is a checkpoint in
        the graph, and the
        gradients of the tiles add up in their own dtype.

    Raises:
        TypeError: x is no floating point tensor, mlp_module no module, num_shards no int.
        ValueError: x has one
            dimension; num_shards is not positive; fn gives another number of rows. RuntimeError: fn
            writes to its
            input, or uses a tensor that requires a gradient and is not the module's; a parameter
            was written to or
            frozen between forward and backward; fn draws random numbers while a CUDA graph is
            captured.

    Source: arXiv:2506.13996.
    """
    check.floats(NAME, dict(x=x))
    if not isinstance(mlp_module, torch.nn.Module):
        raise TypeError(
            f"{NAME}: mlp_module is a {type(mlp_module).__name__}, give the module with the parameters"
        )
    if x.dim() < 2:
        raise ValueError(f"{NAME}: x has shape {tuple(x.shape)}, give (..., S, H)")
    if num_shards is None:
        num_shards = max(1, cdiv(x.shape[-2], max(1, x.shape[-1])))
    elif check.size(NAME, "num_shards", num_shards) == 0:
        raise ValueError(f"{NAME}: num_shards is 0, give the number of tiles or None")
    if torch.compiler.is_compiling():
        return _in_graph(fn, mlp_module, x, num_shards)
    return LigerTiledMLPFunction.apply(fn, mlp_module, x, num_shards, compute_params)


class _TiledMLP(torch.nn.Module):
    acts: tuple[str, ...]  # the names that a config may have for it
    _z3_leaf = True  # see `LEAF`

    def __init__(self, config: object, num_shards: int | None = None) -> None:
        super().__init__()
        act = getattr(config, "hidden_act", self.acts[0])
        if act not in self.acts:
            names = " or ".join(map(repr, self.acts))
            raise ValueError(
                f"{type(self).__name__}: the config's activation is {act!r}, it computes {names}"
            )
        self.config, self.num_shards = config, num_shards
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=False)


class LigerTiledSwiGLUMLP(_TiledMLP):
    """`LigerSwiGLUMLP` in ``num_shards`` tiles, by `apply_tiled_mlp`. The state dict is Hugging
    Face's."""

    acts = "silu", "swish"

    def forward(self, x: torch.Tensor):
        return apply_tiled_mlp(LigerSwiGLUMLP.forward, self, x, self.num_shards)


class LigerTiledGEGLUMLP(_TiledMLP):
    """`LigerGEGLUMLP`, which has the tanh GELU, in ``num_shards`` tiles, by `apply_tiled_mlp`."""

    acts = "gelu_pytorch_tanh", "gelu_new", "gelu"

    def forward(self, x: torch.Tensor):
        return apply_tiled_mlp(LigerGEGLUMLP.forward, self, x, self.num_shards)
