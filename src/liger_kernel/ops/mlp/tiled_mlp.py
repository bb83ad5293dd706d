r"""An MLP in tiles of tokens (ALST): of its activations only its input is saved for backward.

    y_i = f(x_i)        dx_i = dy_i·∂f/∂x (x_i),   dw = Σ_i dy_i·∂f/∂w (x_i)
    i: a tile, w: a parameter of f

f computes each token by itself, so the tokens can be cut into tiles. Forward computes one tile
after the other and saves x. Backward computes each tile once more, with a graph, and differentiates
it. The activations of f are those of one tile, however long the sequence is. An x that can be
recomputed (`recompute`) is not saved: backward recomputes that of a tile. Other threads may run
forward and backward of the same f at the same time: gradients are taken from a tile's own nodes.

The sum over the tiles is in fp32 and is rounded once, to the dtype of a tile's gradient. If that
dtype rounds by ε, dw is off by ε·Σ_i |dw_i| at most, as f rounds the tiles, and by ε·|dw|, as their
sum is rounded.

Autograd gets that sum once, as the gradient of an input of the Function. So the hooks of a
parameter, DDP, FSDP and ZeRO-3 see a parameter's gradient once a step. In backward, the parameters
are looked up in the module again: by then FSDP has gathered them anew. ZeRO-3 has to gather them
for all tiles at once (`ZERO3_LEAF`). Random numbers are drawn again as in forward, and autocast is
set as in forward.

Source: Arctic Long Sequence Training, arXiv:2506.13996.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from liger_kernel.core import check, devices
from liger_kernel.core.forward_state import ForwardState
from liger_kernel.core.op import Function, flatten_to_2d, in_func_transform
from liger_kernel.core.recompute import get_recompute
from liger_kernel.core.saved import save_early, saving_node
from liger_kernel.core.tile import cdiv
from liger_kernel.ops.mlp.modules import LigerGEGLUMLP, LigerSwiGLUMLP
from liger_kernel.ops.mlp.tile_gradients import (
    NAME,
    ForwardTensor,
    FrozenParameters,
    GradientSum,
    backward_tile,
    current_tensors,
    find_consumers,
    has_fixed_weights,
    substitute,
    tile_backward,
    trainable_tensors,
)

# Attributes of a module by which deepspeed.initialize makes ZeRO-3 gather all parameters below it
# with it.
ZERO3_LEAF = {"_z3_leaf": True}


def _split_tiles(x, num_shards):
    """Split x (..., S, H) into at most ``num_shards`` tiles (1, ..., tokens, H)."""
    rows = flatten_to_2d(x)
    tokens = max(1, cdiv(rows.shape[0], num_shards))
    return rows[(None,) * (x.dim() - 2)].split(tokens, dim=-2)


def _run_tile(fn, mlp_module, tile):
    y = fn(mlp_module, tile)
    if isinstance(y, torch.Tensor) and y.shape[:-1] == tile.shape[:-1]:
        return y
    if isinstance(y, torch.Tensor):
        output = f"a tensor of shape {tuple(y.shape)}"
    else:
        output = f"a {type(y).__name__}"
    raise ValueError(
        f"{NAME}: fn gave {output} for a tile of shape {tuple(tile.shape)}, "
        "it must give a row a token"
    )


def _run_tiles(run, x, num_shards):
    """Run all tiles and return the outputs in the shape of x.

    Without a graph, each output is copied to its place before the next tile runs.
    """
    if torch.is_grad_enabled():
        y = torch.cat([run(tile) for tile in _split_tiles(x, num_shards)], dim=-2)
        return y.view(*x.shape[:-1], y.shape[-1])
    y = None
    for i, tile in enumerate(_split_tiles(x, num_shards)):
        y_i = run(tile)
        if y is None:
            y = y_i.new_empty(*x.shape[:-1], y_i.shape[-1])
            y_tiles = _split_tiles(y, num_shards)
        y_tiles[i].copy_(y_i)
    return y


def _run_compiled(fn, mlp_module, x, num_shards):
    """Run under torch.compile.

    Its graphs support checkpoints, but no backward that differentiates.
    """
    if not has_fixed_weights(mlp_module):
        return fn(mlp_module, x)
    run = functools.partial(_run_tile, fn, mlp_module)
    if torch.is_grad_enabled():
        run = functools.partial(checkpoint, run, use_reentrant=False)
    return _run_tiles(run, x, num_shards)


# ---- the state in which a tile is computed ----


class _ForbidRandom(TorchDispatchMode):
    """Raises if random numbers are drawn within a CUDA graph's capture.

    Their state cannot be read there.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(
                f"{NAME}: fn draws random numbers ({func}), which backward cannot draw again "
                "while a CUDA graph is captured; switch dropout off"
            )
        return func(*args, **(kwargs or {}))


def _is_captured(x):
    return getattr(getattr(torch, x.device.type, None), "is_current_stream_capturing", bool)()


def _snapshot_state(x, mlp_module):
    """Return a function that makes a context with this moment's autocast and random state, and
    with the module's modes and adapters.

    Within it gradients are enabled.
    """
    autocast = devices.snapshot_autocast(x.device)
    cpu_state = torch.get_rng_state()
    device_indices, device_states = ([], []) if _is_captured(x) else get_device_states(x)
    device_type = "cpu" if x.device.type == "meta" else x.device.type
    state = ForwardState(mlp_module)

    @contextlib.contextmanager
    def restore():
        fork = torch.random.fork_rng(device_indices, device_type=device_type)
        with torch.enable_grad(), autocast(), fork, state.restored():
            torch.set_rng_state(cpu_state)
            set_device_states(device_indices, device_states, device_type=device_type)
            yield

    return restore


class LigerTiledMLPFunction(Function):
    """``apply(fn, mlp_module, x, shards, compute_params=None) -> y``

    As `apply_tiled_mlp`, with a number of tiles.
    """

    @staticmethod
    def reference(fn, mlp_module, x, shards, compute_params=None):
        return fn(mlp_module, x)

    @classmethod
    def apply(cls, fn, mlp_module, x, shards, compute_params=None):
        if torch.compiler.is_compiling():
            return _run_compiled(fn, mlp_module, x, shards)
        if in_func_transform() or not has_fixed_weights(mlp_module):
            return cls.reference(fn, mlp_module, x, shards)
        tensors = places = ()
        if torch.is_grad_enabled():
            tensors, places = trainable_tensors(mlp_module, compute_params)
        need_dx = torch.is_grad_enabled() and x.requires_grad
        if not tensors and not need_dx:
            return _run_tiles(functools.partial(_run_tile, fn, mlp_module), x, shards)
        return super(torch.autograd.Function, cls).apply(
            fn, mlp_module, x, shards, compute_params, places, *tensors
        )

    @staticmethod
    def forward(ctx, fn, mlp_module, x, shards, compute_params, places, *tensors):
        need_dx = ctx.needs_input_grad[2]  # a tile has requires_grad as x has
        recompute = get_recompute(x) if need_dx else None
        save_early(ctx, *((x,) if recompute is None else recompute.tensors))
        ctx.recompute = recompute and recompute.without_tensors()
        ctx.run = functools.partial(_run_tile, fn, mlp_module)
        ctx.shards = shards
        ctx.restore_state = _snapshot_state(x, mlp_module)
        ctx.places = places
        ctx.forward_tensors = [ForwardTensor(t) for t in tensors]
        ctx.frozen = FrozenParameters(mlp_module)
        version = x._version

        def run(tile):
            return ctx.run(tile.detach().requires_grad_(need_dx))

        try:
            with _ForbidRandom() if _is_captured(x) else contextlib.nullcontext():
                y = _run_tiles(run, x, shards)
        finally:
            if devices.in_autocast(x):
                torch.clear_autocast_cache()  # it may hold weights that were cast without a graph
        if x._version != version:
            raise RuntimeError(
                f"{NAME}: fn writes to its input, which backward needs; let it write to a copy"
            )
        return y

    @classmethod
    def differentiable_backward(cls, ctx, dy):
        x, *recompute_tensors = saving_node(ctx).saved_tensors
        x = ctx.recompute(x, *recompute_tensors) if ctx.recompute else x
        tensors = current_tensors(ctx.places, ctx.forward_tensors)
        ctx.frozen.check()
        needs = [ctx.needs_input_grad[2], *ctx.needs_input_grad[6:]]
        # a view of each tensor that is computed of others: one may depend on another
        inputs = [x.view_as(x), *(t if t.is_leaf else t.view_as(t) for t in tensors)]
        with ctx.restore_state(), substitute(ctx.places, inputs[1:]):
            y = ctx.run(inputs[0])
        find_consumers(y, [t for t in inputs if t.requires_grad])  # raises if a leaf is unknown
        differentiated = []
        if y.requires_grad:
            differentiated = [t for t, need in zip(inputs, needs, strict=True) if need]
        grads = ()
        with tile_backward(y, tensors):
            if differentiated:
                grads = torch.autograd.grad(
                    y, differentiated, dy, create_graph=True, allow_unused=True
                )
        grads = iter(grads)
        dx, *dtensors = (next(grads, None) if need else None for need in needs)
        return None, None, dx, None, None, None, *dtensors

    @staticmethod
    def backward(ctx, dy):
        x, *recompute_tensors = saving_node(ctx).saved_tensors
        tensors = current_tensors(ctx.places, ctx.forward_tensors)
        ctx.frozen.check()
        need_dx = ctx.needs_input_grad[2]
        dx = x.new_empty(x.shape) if need_dx else None
        sums = [GradientSum() if need else None for need in ctx.needs_input_grad[6:]]
        x_tiles = _split_tiles(x, ctx.shards)
        dy_tiles = _split_tiles(dy, ctx.shards)
        dx_tiles = _split_tiles(dx, ctx.shards) if need_dx else x_tiles

        def run(tile):
            with substitute(ctx.places, tensors):
                return ctx.run(tile)

        with ctx.restore_state():
            for x_i, dy_i, dx_i in zip(x_tiles, dy_tiles, dx_tiles, strict=True):
                if ctx.recompute:
                    with torch.no_grad():
                        x_i = ctx.recompute(x_i, *recompute_tensors)
                x_i = x_i.detach().requires_grad_(need_dx)
                # a view: hooks that count take no leaves
                gradient = backward_tile(run, x_i.view_as(x_i), tensors, sums, dy_i)
                if need_dx and gradient is None:
                    dx_i.zero_()
                elif need_dx:
                    dx_i.copy_(gradient)
        return None, None, dx, None, None, None, *(total and total.rounded() for total in sums)


def apply_tiled_mlp(
    fn: Callable,
    mlp_module: torch.nn.Module,
    x: torch.Tensor,
    num_shards: int | None = None,
    compute_params: list[torch.nn.Parameter] | None = None,
) -> torch.Tensor:
    """Compute ``fn(mlp_module, x)`` in tiles of tokens. Backward computes each tile again.

    Args:
        fn: called with the module and a tile (1, ..., tokens, H), or (tokens, H) of a 2-D x. It
            returns a row for each token, which depends on that token alone. Tensors that it
            computes from parameters it computes at every call.
        mlp_module: has the parameters. Those that it has when this is called get gradients.
        x: (..., S, H), fp32, bf16, fp16 or fp64. It may be frozen, and so may be parameters.
        num_shards: the number of tiles; there may be less. By default ⌈S/H⌉: the activations of a
            tile of one sequence are then of the size of the MLP's weights.
        compute_params: further tensors that fn uses and that require a gradient.

    Returns:
        (..., S, H'), as ``fn(mlp_module, x)``. That is called without tiles if weights are computed
        once a call (spectral norm, ``parametrize.cached``). Under torch.compile each tile is a
        checkpoint in the graph, and the gradients of the tiles are summed in their own dtype.

    Raises:
        TypeError: x is no floating point tensor, mlp_module no module, num_shards no int.
        ValueError: x has one dimension; num_shards is not positive; fn returns another number of
            rows.
        RuntimeError: fn writes to its input, or uses a tensor that requires a gradient and is not
            the module's; a parameter was written to, replaced or frozen, or an adapter merged,
            between forward and backward; fn draws random numbers while a CUDA graph is captured.

    Source: arXiv:2506.13996.
    """
    check.floats(NAME, dict(x=x))
    if not isinstance(mlp_module, torch.nn.Module):
        raise TypeError(
            f"{NAME}: mlp_module is a {type(mlp_module).__name__}, "
            "give the module with the parameters"
        )
    if x.dim() < 2:
        raise ValueError(f"{NAME}: x has shape {tuple(x.shape)}, give (..., S, H)")
    if num_shards is None:
        num_shards = max(1, cdiv(x.shape[-2], max(1, x.shape[-1])))
    elif check.size(NAME, "num_shards", num_shards) == 0:
        raise ValueError(f"{NAME}: num_shards is 0, give the number of tiles or None")
    if torch.compiler.is_compiling():
        return _run_compiled(fn, mlp_module, x, num_shards)
    return LigerTiledMLPFunction.apply(fn, mlp_module, x, num_shards, compute_params)


class _TiledMLP(torch.nn.Module):
    acts: tuple[str, ...]  # names of the activation in a config
    _z3_leaf = True  # see `ZERO3_LEAF`

    def __init__(self, config: object, num_shards: int | None = None) -> None:
        super().__init__()
        act = getattr(config, "hidden_act", self.acts[0])
        if act not in self.acts:
            names = " or ".join(map(repr, self.acts))
            raise ValueError(
                f"{type(self).__name__}: the config's activation is {act!r}, it computes {names}"
            )
        self.config = config
        self.num_shards = num_shards
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.gate_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=False)


class LigerTiledSwiGLUMLP(_TiledMLP):
    """`LigerSwiGLUMLP` in ``num_shards`` tiles, by `apply_tiled_mlp`.

    The state dict is Hugging Face's.
    """

    acts = "silu", "swish"

    def forward(self, x: torch.Tensor):
        return apply_tiled_mlp(LigerSwiGLUMLP.forward, self, x, self.num_shards)


class LigerTiledGEGLUMLP(_TiledMLP):
    """`LigerGEGLUMLP`, which has the tanh GELU, in ``num_shards`` tiles, by `apply_tiled_mlp`."""

    acts = "gelu_pytorch_tanh", "gelu_new", "gelu"

    def forward(self, x: torch.Tensor):
        return apply_tiled_mlp(LigerGEGLUMLP.forward, self, x, self.num_shards)
