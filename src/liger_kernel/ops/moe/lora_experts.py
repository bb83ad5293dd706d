r"""Experts whose tables have low-rank adapters (LoRA), without a sum of table and adapter.

The adapter of W = gate_up_proj has two matrices for each expert, A_e (r, H) and B_e (2I, r), and a
scaling s; that of D = down_proj has P_e (r, I), Q_e (H, r) and σ. With B' = s·B and Q' = σ·Q, and
otherwise the names of `expert_kernels`:

    a_r = A_e·x_t,    pre_r = W_e·x_t + b_e + B'_e·a_r,    z_r = act(g)·u
    p_r = P_e·z_r,    y_s = D_e·z_r + d_e + Q'_e·p_r,      out_t = Σ_k w_s·y_s

    v_r = Q'_eᵀ·dout_t,   q_r = D_eᵀ·dout_t + P_eᵀ·v_r,    dpre_r and dw_s from q_r as without LoRA
    c_r = B'_eᵀ·dpre_r,   dx_t = Σ_k W_eᵀ·dpre_r + A_eᵀ·c_r
    dA_e = Σ_r c_r ⊗ x_t,        dB_e = s·Σ_r dpre_r ⊗ a_r
    dP_e = Σ_r v_r ⊗ w_s·z_r,    dQ_e = σ·Σ_r dout_t ⊗ w_s·p_r

PEFT computes with the sum W_e + s·B_e·A_e, which it makes in every forward. Its backward makes the
gradient of the sum, of which only the products with A and B are wanted. For a layer of
Qwen3-30B-A3B, where E = 128, H = 2048 and I = 768, each of the two has E·3·H·I = 604 million
entries, 1.21 GB in bf16. Here the tables are frozen and get no gradient, and no tensor of their
size is made: the widest ones have a row for each assignment, as without adapters, and the copies of
the adapters' matrices have E·r·(2·H + 3·I) entries, 26 MB for r = 16. Of the 18·S·H·I operations of
forward and backward for S assignments, the 6·S·H·I of dW and dD are not done. The adapters' are
6·S·r·(2·H + 3·I).

The low-rank terms are added to a product's sum in fp32, in its own program (`grouped_matmul`): no
pass over pre, y, q or dx is made for them. a, p, v, c and w·p are rounded to x's dtype. A, B, P and
Q are cast to it in every forward and backward, and their gradients are computed in their own dtype
from sums in fp32. No copy of them is kept: optimizers write to parameters without a new version.

Kept between forward and backward are x, pre and the order of the assignments, as without adapters,
and a and p, which are as narrow as the rank. Where a checkpoint with early stop keeps nothing
behind out, it does not compute y again.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv:2106.09685."""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, Function, cast_if_needed
from liger_kernel.core.saved import save_early, saving_node
from liger_kernel.ops.moe.experts import (
    ACTIVATIONS,
    cast_in_autocast,
    check_options,
    check_tensors,
    experts_reference,
    may_overwrite_saved,
)
from liger_kernel.ops.moe.grouped_matmul import choose_tile_rows
from liger_kernel.ops.moe.lora_expert_kernels import (
    compute_lora_gradients,
    lora_experts_bwd,
    lora_experts_down,
    lora_experts_up,
)
from liger_kernel.ops.moe.routing import routing


class TableAdapter(NamedTuple):
    """A low-rank adapter of a table of E matrices: adds ``scaling·(x·a_eᵀ)·b_eᵀ`` to a product.

    Attributes:
        a: (E, r, in), of any strides and floating dtype.
        b: (E, out, r).
        scaling: a number.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float = 1.0


class _Options(NamedTuple):
    """Options of `liger_experts`."""

    act: str
    limit: float | None
    alpha: float
    shift: float
    transposed: bool
    interleaved: bool


def lora_experts_reference(
    x,
    gate_up_proj,
    down_proj,
    top_k_index,
    top_k_weights,
    gate_up_bias,
    down_bias,
    gate_up_a,
    gate_up_b,
    down_a,
    down_b,
    scalings,
    options,
):
    """Compute `LigerLoRAExpertsFunction` in plain PyTorch."""
    act, *act_options = options
    gate_up_scaling, down_scaling = scalings
    return experts_reference(
        x,
        gate_up_proj,
        down_proj,
        top_k_index,
        top_k_weights,
        act,
        gate_up_bias,
        down_bias,
        *act_options,
        gate_up_lora=None if gate_up_a is None else (gate_up_a, gate_up_b, gate_up_scaling),
        down_lora=None if down_a is None else (down_a, down_b, down_scaling),
    )


class LigerLoRAExpertsFunction(Function):
    """Autograd Function of `liger_lora_experts`.

    The tensors but for top_k_weights and the adapters' have one dtype, and autocast is off:
    `liger_lora_experts` handles the other cases. Tables and biases get no gradient.

    As in `LigerFusedMoEFunction` the gradient of pre overwrites pre, unless the graph is kept or a
    saved-tensor hook may hold what was saved."""

    reference = staticmethod(lora_experts_reference)

    @staticmethod
    def forward(
        ctx,
        x,
        gate_up_proj,
        down_proj,
        top_k_index,
        top_k_weights,
        gate_up_bias,
        down_bias,
        gate_up_a,
        gate_up_b,
        down_a,
        down_b,
        scalings,
        options,
    ):
        devices.require_kernels("LigerLoRAExpertsFunction", x)
        act, limit, alpha, shift, transposed, interleaved = options
        if limit is None and (alpha != 1 or shift != 0):
            limit = check.INF
        E = gate_up_proj.shape[0]
        tile_rows = choose_tile_rows(top_k_index.numel(), E, x)
        activation = ACTIVATIONS[act], limit, float(alpha), float(shift)
        kernel_options = tile_rows, *scalings, *activation, transposed, interleaved
        keep_pre = any(ctx.needs_input_grad)
        tensors = x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias
        tensors = *tensors, gate_up_a, gate_up_b, down_a, down_b
        metadata = routing(top_k_index, E, tile_rows)
        up = gate_up_proj, top_k_index, gate_up_bias, gate_up_a, gate_up_b, down_a
        numbers = tile_rows, scalings[0], *activation, transposed, interleaved
        z, pre, a, p = lora_experts_up(x, *up, *metadata, *numbers, keep_pre)
        if keep_pre:
            save_early(ctx, *tensors, pre, a, p, *metadata)
            ctx.kernel_options = kernel_options
            ctx.options = scalings, options
        down = down_proj, top_k_index, top_k_weights, down_bias, down_b
        return lora_experts_down(z, p, *down, *metadata, tile_rows, scalings[1], transposed)

    @staticmethod
    def arguments(ctx):
        return *saving_node(ctx).saved_tensors[:11], *ctx.options

    @staticmethod
    def backward(ctx, dout):
        node = saving_node(ctx)
        saved = node.saved_tensors
        needs = [ctx.needs_input_grad[i] for i in (0, 4, 7, 8, 9, 10)]
        if not torch.compiler.is_compiling() and may_overwrite_saved(node):
            pre = saved[11]
            grads = compute_lora_gradients(dout, *saved, *ctx.kernel_options, *needs, dpre=pre)
            torch.autograd.graph.increment_version(pre)
        else:
            grads = lora_experts_bwd(dout, *saved, *ctx.kernel_options, *needs)
        dx, dweights, *d_adapters = (
            grad if need else None for grad, need in zip(grads, needs, strict=True)
        )
        return dx, None, None, None, dweights, None, None, *d_adapters, None, None


def _check_adapter(name, argument, adapter, E, out_features, in_features, x):
    if adapter is None:
        return None, None, 1.0
    if not isinstance(adapter, tuple) or len(adapter) != 3:
        kind = type(adapter).__name__
        raise TypeError(f"{name}: {argument} is a {kind}, give a TableAdapter or None")
    a, b, scaling = adapter
    check.floats(name, {"x": x, f"{argument}.a": a, f"{argument}.b": b})
    rank = a.shape[1] if a.dim() == 3 else 0
    if not rank or a.shape != (E, rank, in_features):
        raise ValueError(
            f"{name}: {argument}.a has shape {tuple(a.shape)}, give ({E}, r, {in_features})"
        )
    check.shape(name, f"{argument}.b", b, (E, out_features, rank))
    return a, b, check.finite(name, f"{argument}.scaling", scaling)


def liger_lora_experts(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    act: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    shift: float = 0.0,
    transposed: bool = False,
    interleaved: bool = False,
    gate_up_lora: TableAdapter | None = None,
    down_lora: TableAdapter | None = None,
) -> torch.Tensor:
    """Compute `liger_experts` with ``gate_up_proj[e] + s·b[e] @ a[e]`` in place of the tables, and
    with as much for down_proj, without making these sums.

    Tables and biases are frozen.

    Args:
        gate_up_lora: a (E, r, H), b (E, 2·I, r) and a scaling, or None for no adapter. They are of
            the linear layers x → (g, u), also where the table is stored ``transposed``.
        down_lora: a (E, r, I), b (E, H, r) and a scaling, or None.

    All others are those of `liger_experts`.

    Returns:
        (T, H) in x's dtype. Gradients of a and b are in their own dtypes.

    Raises:
        ValueError: a table or a bias requires a gradient; otherwise as `liger_experts`.
        TypeError: as `liger_experts`.

    Source: arXiv:2106.09685.
    """
    name = "liger_lora_experts"
    act, *numbers = check_options(name, act, limit, alpha, shift, transposed, interleaved)
    options = _Options(act, *numbers, transposed, interleaved)
    tensors = check_tensors(
        name,
        x,
        gate_up_proj,
        down_proj,
        top_k_index,
        top_k_weights,
        gate_up_bias,
        down_bias,
        transposed,
    )
    for argument, t in tensors.items():
        if argument != "x" and t is not None and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: {argument} requires a gradient, but is frozen here: "
                f"give {argument}.detach(), or use liger_experts"
            )
    E, H, I = (down_proj.mT if transposed else down_proj).shape  # noqa: E741, N806
    *gate_up_factors, gate_up_scaling = _check_adapter(
        name, "gate_up_lora", gate_up_lora, E, 2 * I, H, x
    )
    *down_factors, down_scaling = _check_adapter(name, "down_lora", down_lora, E, H, I, x)
    dtype = x.dtype
    x, gate_up_proj, down_proj, gate_up_bias, down_bias = cast_in_autocast(name, tensors)
    run = LigerLoRAExpertsFunction.call if devices.has_kernels(x) else lora_experts_reference
    out = run(
        x,
        gate_up_proj,
        down_proj,
        top_k_index,
        top_k_weights,
        gate_up_bias,
        down_bias,
        *gate_up_factors,
        *down_factors,
        (gate_up_scaling, down_scaling),
        options,
    )
    return cast_if_needed(out, dtype)


def _inputs(T, H, width, E, K, r):
    shapes = dict(
        gate_up_a=(E, r, H),
        gate_up_b=(E, 2 * width, r),
        down_a=(E, r, width),
        down_b=(E, H, r),
    )
    adapters = {
        name: (torch.randn(shape) / shape[-1] ** 0.5).requires_grad_()
        for name, shape in shapes.items()
    }
    return dict(
        x=torch.randn(T, H).requires_grad_(),
        gate_up_proj=torch.randn(E, 2 * width, H) / H**0.5,
        down_proj=torch.randn(E, H, width) / width**0.5,
        top_k_index=torch.rand(T, E).topk(K).indices,
        top_k_weights=torch.rand(T, K).requires_grad_(),
        **adapters,
    )


def _with_flat_adapters(fn):
    """Return fn with the adapters' matrices as arguments of their own."""

    def call(gate_up_a, gate_up_b, down_a, down_b, scaling=1.5, **kwargs):
        gate_up_lora = TableAdapter(gate_up_a, gate_up_b, scaling)
        down_lora = TableAdapter(down_a, down_b, -scaling)
        return fn(**kwargs, gate_up_lora=gate_up_lora, down_lora=down_lora)

    return call


CASES.append(
    Case(
        "lora_experts",
        fn=_with_flat_adapters(liger_lora_experts),
        reference=_with_flat_adapters(experts_reference),
        inputs=_inputs,
        shapes=((1, 8, 8, 2, 1, 1), (7, 24, 20, 5, 3, 3), (40, 33, 17, 4, 2, 17)),
        options=(dict(), dict(act="gelu_pytorch_tanh", scaling=1.0)),
        bench=((16384, 2048, 768, 128, 8, 16),),  # Qwen3-30B-A3B
        flops=lambda t: 6 * t["top_k_index"].numel() * t["gate_up_proj"][0].numel(),
        fp32_roundings=4,  # of products in fp32, which the test makes exact in PyTorch's code
    )
)
