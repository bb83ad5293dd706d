r"""Experts: each token through K of E gated MLPs, weighted and added up.

    (g, u) = W_e·x_t + b_e,   out_t = Σ_k w_tk·(D_e·(act(g)·u) + d_e),   e = index_tk

W_e is gate_up_proj[e]: its halves give g and u, or, interleaved, its even and its odd rows. D_e is
down_proj[e]. With a limit act(g)·u is that of `liger_clamped_swiglu`. An index that is no expert's
contributes nothing, and its weight's gradient is 0.

`routing` sorts the assignments of tokens by expert, `grouped_matmul` has the matrix products, and
`expert_kernels` the other kernels, the formulas of the gradients, and forward and backward.

Kept between forward and backward are x, W·x + b in x's dtype, and the order of the assignments. The
rows that are gathered for a product, act(g)·u and the experts' outputs are not kept. <dout, an
expert's output>, the gradient of its weight, is computed from dout·D. Where a checkpoint with
early stop keeps nothing behind out, it does not compute the products with D again.

Hugging Face rounds W·x + b, the activation, act(g)·u, each expert's output, its product with the
weight, and each sum. The kernels compute act(g)·u in fp32 from sums in fp32. They round that, each
expert's output, and the sum over a token's experts, which is in fp32 in their order: the same in
every run.

Source: Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538; Jiang et al., Mixtral
of Experts, arXiv:2401.04088; limits, interleaving and biases are those of gpt-oss,
arXiv:2508.10925."""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices, overwrite
from liger_kernel.core.op import CASES, Case, F, Function, cast_if_needed
from liger_kernel.core.saved import save_early, saving_node
from liger_kernel.ops.mlp.glu import clamped_swiglu_reference, geglu_reference, swiglu_reference
from liger_kernel.ops.moe.expert_kernels import (
    compute_gradients,
    experts_bwd,
    experts_down,
    experts_up,
)
from liger_kernel.ops.moe.grouped_matmul import choose_tile_rows
from liger_kernel.ops.moe.routing import compute_routing_metadata as compute_routing_metadata
from liger_kernel.ops.moe.routing import routing

# Hugging Face's names of activations -> `silu`, or torch's name of the GELU's approximation
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "tanh", "gelu": "none"}


def experts_reference(
    x,
    gate_up_proj,
    down_proj,
    top_k_index,
    top_k_weights,
    act="silu",
    gate_up_bias=None,
    down_bias=None,
    limit=None,
    alpha=1.0,
    shift=0.0,
    transposed=False,
    interleaved=False,
    gate_up_lora=None,
    down_lora=None,
):
    """Compute `liger_experts` in plain PyTorch, expert by expert; with adapters of the tables
    `liger_lora_experts`.

    A token's experts are added in fp32, or in fp64, in the experts' order."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    gate_up_lora = _cast_by_expert(gate_up_lora, x.dtype)
    down_lora = _cast_by_expert(down_lora, x.dtype)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for e in range(gate_up_proj.shape[0]):
        t, k = torch.where(top_k_index == e)
        w, d = gate_up_proj[e], down_proj[e]
        if transposed:
            w, d = w.mT, d.mT
        pre = F.linear(x[t], w, None if gate_up_bias is None else gate_up_bias[e])
        if gate_up_lora is not None:
            a, b = gate_up_lora[e]
            pre = pre + F.linear(F.linear(x[t], a), b)
        g, u = (pre[:, ::2], pre[:, 1::2]) if interleaved else pre.chunk(2, -1)
        z = _gated_activation(g, u, act, limit, alpha, shift)
        y = F.linear(z, d, None if down_bias is None else down_bias[e])
        if down_lora is not None:
            a, b = down_lora[e]
            y = y + F.linear(F.linear(z, a), b)
        out = out.index_add(0, t, y.to(dtype) * top_k_weights[t, k, None].to(dtype))
    return out.to(x.dtype)


def _cast_by_expert(lora, dtype):
    """Return (a_e, scaling·b_e) of each expert in this dtype, or None. ``lora``: a, b, scaling."""
    if lora is None:
        return None
    a, b, scaling = lora
    b = cast_if_needed(b, torch.promote_types(b.dtype, dtype)) * scaling
    matrices = (cast_if_needed(a, dtype).unbind(), cast_if_needed(b, dtype).unbind())
    return list(zip(*matrices, strict=True))


def _gated_activation(g, u, act, limit, alpha, shift):
    if limit is not None or alpha != 1 or shift != 0:
        return clamped_swiglu_reference(g, u, check.INF if limit is None else limit, alpha, shift)
    return swiglu_reference(g, u) if act == "silu" else geglu_reference(g, u, ACTIVATIONS[act])


class LigerFusedMoEFunction(Function):
    """Autograd Function of `liger_experts`, with the same arguments and defaults.

    The tensors but for top_k_weights have one dtype, and autocast is off: `liger_experts` handles
    the other cases.

    The gradient of W·x + b overwrites W·x + b, unless the graph is kept or a saved-tensor hook may
    hold what was saved."""

    reference = staticmethod(experts_reference)

    @staticmethod
    def forward(
        ctx,
        x,
        gate_up_proj,
        down_proj,
        top_k_index,
        top_k_weights,
        act="silu",
        gate_up_bias=None,
        down_bias=None,
        limit=None,
        alpha=1.0,
        shift=0.0,
        transposed=False,
        interleaved=False,
    ):
        devices.require_kernels("LigerFusedMoEFunction", x)
        options = act, limit, alpha, shift, transposed, interleaved
        if limit is None and (alpha != 1 or shift != 0):
            limit = check.INF
        E = gate_up_proj.shape[0]
        tile_rows = choose_tile_rows(top_k_index.numel(), E, x)
        kernel_options = (
            tile_rows,
            ACTIVATIONS[act],
            limit,
            float(alpha),
            float(shift),
            transposed,
            interleaved,
        )
        keep_pre = any(ctx.needs_input_grad)
        tensors = x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias
        metadata = routing(top_k_index, E, tile_rows)
        up = gate_up_proj, top_k_index, gate_up_bias
        z, pre = experts_up(x, *up, *metadata, *kernel_options, keep_pre)
        if keep_pre:
            save_early(ctx, *tensors, pre, *metadata)
            ctx.options = options
            ctx.kernel_options = kernel_options
        down = down_proj, top_k_index, top_k_weights, down_bias
        return experts_down(z, *down, *metadata, tile_rows, transposed)

    @staticmethod
    def arguments(ctx):
        *tensors, gate_up_bias, down_bias = saving_node(ctx).saved_tensors[:7]
        act, *options = ctx.options
        return *tensors, act, gate_up_bias, down_bias, *options

    @staticmethod
    def backward(ctx, dout):
        node = saving_node(ctx)
        saved = node.saved_tensors
        # a call may leave out the arguments from act on
        needs_input_grad = [*ctx.needs_input_grad, *[False] * 3][:8]
        needs = [needs_input_grad[i] for i in (0, 1, 2, 4, 6, 7)]
        if not torch.compiler.is_compiling() and may_overwrite_saved(node):
            pre = saved[7]
            grads = compute_gradients(dout, *saved, *ctx.kernel_options, *needs, dpre=pre)
            torch.autograd.graph.increment_version(pre)
        else:
            grads = experts_bwd(dout, *saved, *ctx.kernel_options, *needs)
        dx, dgate_up, ddown, dweights, *dbiases = (
            grad if need else None for grad, need in zip(grads, needs, strict=True)
        )
        return dx, dgate_up, ddown, None, dweights, None, *dbiases, *[None] * 5


def may_overwrite_saved(node):
    """Return True if only the graph holds the pre-activation saved by this node, and does not run
    again.

    Forward gives the pre-activation to nothing but a saved-tensor hook, which may keep it; a
    checkpoint's hook does not."""
    if not overwrite.ENABLED or overwrite.is_graph_kept():
        return False
    hooks = [raw.unpack_hook for raw in node._raw_saved_tensors]
    return all(hook is None or overwrite.is_checkpoint_hook(hook) for hook in hooks)


def check_tensors(
    name,
    x,
    gate_up_proj,
    down_proj,
    top_k_index,
    top_k_weights,
    gate_up_bias,
    down_bias,
    transposed,
):
    """Check the tensors of `liger_experts`. Returns those that autocast casts, by their names."""
    tensors = dict(x=x, gate_up_proj=gate_up_proj, down_proj=down_proj)
    biases = dict(gate_up_bias=gate_up_bias, down_bias=down_bias)
    check.floats(name, tensors | dict(top_k_weights=top_k_weights), **biases)
    check.integers(name, dict(top_k_index=top_k_index))
    if top_k_index.device != x.device:
        raise ValueError(
            f"{name}: x is on {x.device}, top_k_index on {top_k_index.device}, give one device"
        )
    if x.dim() != 2 or top_k_index.dim() != 2 or top_k_index.shape[0] != x.shape[0]:
        shapes = f"x has shape {tuple(x.shape)}, top_k_index {tuple(top_k_index.shape)}"
        raise ValueError(f"{name}: {shapes}, give (T, H) and (T, K)")
    check.shape(name, "top_k_weights", top_k_weights, tuple(top_k_index.shape))
    layout = "(E, H, 2·I)" if transposed else "(E, 2·I, H)"
    if gate_up_proj.dim() != 3 or not gate_up_proj.shape[0]:
        raise ValueError(
            f"{name}: gate_up_proj has shape {tuple(gate_up_proj.shape)}, give {layout}"
        )
    E, columns, H = (gate_up_proj.mT if transposed else gate_up_proj).shape
    if H != x.shape[1] or columns % 2:
        shapes = f"{tuple(gate_up_proj.shape)}, x {tuple(x.shape)}"
        raise ValueError(f"{name}: gate_up_proj has shape {shapes}, give {layout} and (T, H)")
    I = columns // 2  # noqa: E741, N806
    check.shape(name, "down_proj", down_proj, (E, I, H) if transposed else (E, H, I))
    check.shape(name, "gate_up_bias", gate_up_bias, (E, columns))
    check.shape(name, "down_bias", down_bias, (E, H))
    return tensors | biases


def check_options(name, act, limit, alpha, shift, transposed, interleaved):
    """Check the options of `liger_experts`. Returns act, limit, alpha and shift."""
    act = "silu" if act == "swish" else act
    if act not in ACTIVATIONS:
        raise ValueError(f"{name}: act is {act!r}, give one of {', '.join(ACTIVATIONS)}")
    limit = None if limit is None else check.positive(name, "limit", limit)
    alpha = check.positive(name, "alpha", alpha)
    shift = check.finite(name, "shift", shift)
    if act != "silu" and (limit is not None or alpha != 1 or shift != 0):
        raise ValueError(f"{name}: act is {act!r}; limit, alpha and shift are options of 'silu'")
    for argument, value in (("transposed", transposed), ("interleaved", interleaved)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {argument} is {value!r}, give True or False")
    return act, limit, alpha, shift


def cast_in_autocast(name, tensors):
    """Return the tensors of `check_tensors` in autocast's dtype where it is on.

    Raises TypeError if they are not of one dtype then."""
    x = tensors["x"]
    if devices.in_autocast(x) and x.dtype != torch.float64:
        dtype = devices.autocast_dtype(x)
        tensors = {
            argument: None if t is None else cast_if_needed(t, dtype)
            for argument, t in tensors.items()
        }
    x = tensors["x"]
    for argument, t in tensors.items():
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{name}: x is {x.dtype}, {argument} {t.dtype}, cast one of them")
    return tensors.values()


def liger_experts(
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
) -> torch.Tensor:
    """Compute ``out[t] = Σ_k top_k_weights[t, k]·down(act(g)·u)`` with expert top_k_index[t, k].

    Args:
        x: (T, H), fp32, bf16 or fp16, any strides.
        gate_up_proj: (E, 2·I, H) in x's dtype: g and u of an expert are the halves of its product
            with x[t].
        down_proj: (E, H, I) in x's dtype.
        top_k_index: (T, K), integers. An expert may stand twice in a row. An index that is no
            expert's is dropped.
        top_k_weights: (T, K), any floating dtype; need not add up to 1.
        act: "silu", "gelu_pytorch_tanh", or "gelu", which is the exact one.
        gate_up_bias, down_bias: (E, 2·I) and (E, H) in x's dtype, or None.
        limit, alpha, shift: act(g)·u is ``g·σ(alpha·g)·(u + shift)`` with g and u within the limit,
            as in `liger_clamped_swiglu`; gpt-oss has 7, 1.702 and 1. Only with "silu".
        transposed: the weights are stored as (E, H, 2·I) and (E, I, H).
        interleaved: g and u are the even and the odd entries, as in gpt-oss, not the halves.

    Returns:
        (T, H) in x's dtype. Under autocast the products are in its dtype.

    Raises:
        ValueError: shapes that do not fit; tensors on several devices; an unknown activation; limit
            or alpha is not positive, or one of limit, alpha and shift is given with a GELU.
        TypeError: weights or biases are not in x's dtype; something is not a floating point tensor,
            top_k_index not of integers, an option not of its type.

    Source: arXiv:1701.06538, arXiv:2401.04088, arXiv:2508.10925.
    """
    name = "liger_experts"
    act, limit, alpha, shift = check_options(
        name, act, limit, alpha, shift, transposed, interleaved
    )
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
    dtype = x.dtype
    x, gate_up_proj, down_proj, gate_up_bias, down_bias = cast_in_autocast(name, tensors)
    run = LigerFusedMoEFunction.call if devices.has_kernels(x) else experts_reference
    out = run(
        x,
        gate_up_proj,
        down_proj,
        top_k_index,
        top_k_weights,
        act,
        gate_up_bias,
        down_bias,
        limit,
        alpha,
        shift,
        transposed,
        interleaved,
    )
    return cast_if_needed(out, dtype)


def _config_value(config, *names):
    """Return the first of these entries that the config has."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    raise ValueError(f"LigerExperts: the config has none of {', '.join(names)}")


class LigerExperts(torch.nn.Module):
    """`liger_experts` as a module, with a SiLU.

    ``forward(hidden_states, top_k_index, top_k_weights)`` and the state dict are those of Hugging
    Face's stacked experts: ``gate_up_proj`` (E, 2·I, H) and ``down_proj`` (E, H, I). Both are not
    initialised."""

    def __init__(self, config: object) -> None:
        super().__init__()
        act = config.hidden_act
        if act not in ("silu", "swish"):
            raise ValueError(
                f"LigerExperts: the config's activation is {act!r}, it computes 'silu' alone"
            )
        self.num_experts = _config_value(
            config, "num_experts", "num_local_experts", "n_routed_experts"
        )
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = _config_value(config, "moe_intermediate_size", "intermediate_size")
        E, H, width = self.num_experts, self.hidden_dim, self.intermediate_dim
        self.gate_up_proj = torch.nn.Parameter(torch.empty(E, 2 * width, H))
        self.down_proj = torch.nn.Parameter(torch.empty(E, H, width))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ):
        x = hidden_states.reshape(-1, self.hidden_dim)
        index = top_k_index.reshape(-1, top_k_index.shape[-1])
        weights = top_k_weights.reshape(index.shape)
        out = liger_experts(x, self.gate_up_proj, self.down_proj, index, weights)
        return out.view(hidden_states.shape)

    def extra_repr(self):
        return f"num_experts={self.num_experts}, {self.hidden_dim}, {self.intermediate_dim}"


def _inputs(T, H, width, E, K):
    gate_up = torch.randn(E, 2 * width, H) / H**0.5
    down = torch.randn(E, H, width) / width**0.5
    return dict(
        x=torch.randn(T, H).requires_grad_(),
        gate_up_proj=gate_up.requires_grad_(),
        down_proj=down.requires_grad_(),
        top_k_index=torch.rand(T, E).topk(K).indices,
        top_k_weights=torch.rand(T, K).requires_grad_(),
    )


def _inputs_with_biases(T, H, width, E, K):
    biases = dict(
        gate_up_bias=torch.randn(E, 2 * width).requires_grad_(),
        down_bias=torch.randn(E, H).requires_grad_(),
    )
    return _inputs(T, H, width, E, K) | biases


def _with_stored_layout(fn):
    """Return fn with weights that are stored transposed, if that is the option."""

    def call(gate_up_proj, down_proj, transposed=False, **kwargs):
        if transposed:
            gate_up_proj = gate_up_proj.mT.contiguous()
            down_proj = down_proj.mT.contiguous()
        return fn(gate_up_proj=gate_up_proj, down_proj=down_proj, transposed=transposed, **kwargs)

    return call


def _flops(t):
    return 9 * t["top_k_index"].numel() * t["gate_up_proj"][0].numel()


CASES.append(
    Case(
        "experts",
        fn=_with_stored_layout(liger_experts),
        reference=_with_stored_layout(experts_reference),
        inputs=_inputs,
        shapes=((1, 8, 8, 2, 1), (7, 24, 20, 5, 3), (40, 33, 17, 4, 2)),
        options=(
            dict(),
            dict(act="gelu_pytorch_tanh", transposed=True),
            dict(act="gelu", interleaved=True),
        ),
        # Mixtral-8x7B, Qwen3-30B-A3B
        bench=((16384, 4096, 14336, 8, 2), (16384, 2048, 768, 128, 8)),
        flops=_flops,
        fp32_roundings=4,  # of products in fp32, which the test makes exact in PyTorch's code
    )
)
CASES.append(
    Case(
        "experts_with_biases",
        fn=_with_stored_layout(liger_experts),
        reference=_with_stored_layout(experts_reference),
        inputs=_inputs_with_biases,
        shapes=((3, 8, 8, 2, 2), (7, 24, 20, 5, 3)),
        options=(
            dict(limit=1.0, alpha=1.702, shift=1.0, transposed=True, interleaved=True),
            dict(gate_up_bias=None, limit=1.0),
        ),
        bench=((16384, 2880, 2880, 32, 4),),  # gpt-oss-20b
        flops=_flops,
        fp32_roundings=4,  # of products in fp32, which the test makes exact in PyTorch's code
    )
)
