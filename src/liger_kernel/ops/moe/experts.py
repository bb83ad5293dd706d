r"""Experts: each token through K of E gated MLPs, weighted and added up.

    (g, u) = W_e·x_t + b_e,   out_t = Σ_k w_tk·(D_e·(act(g)·u) + d_e),   e = index_tk

W_e is gate_up_proj[e]: its halves give g and u, or, interleaved, its even and its odd rows. D_e is
down_proj[e]. With a limit act(g)·u is that of `liger_clamped_swiglu`. `grouped` has the kernels,
and the gradients; `routing` sorts the assignments of tokens by expert. An index that is no expert's
contributes nothing, and its weight's gradient is 0.

Between forward and backward stay x, W·x + b in x's dtype, and the order of the assignments. The
rows that are gathered for a product, act(g)·u and the experts' outputs are not kept, and <dout, an
expert's output>, the gradient of its weight, is made from dout·D.

Hugging Face rounds W·x + b, the activation, act(g)·u, each expert's output, its product with the
weight, and each sum. The kernels compute act(g)·u in fp32 from sums in fp32. They round that, each
expert's output, and the sum over a token's experts, which is in fp32 in their order: the same in
every run.

Source: Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538; Jiang et al., Mixtral
of Experts, arXiv:2401.04088; limits, interleaving and biases are those of gpt-oss,
arXiv:2508.10925."""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, Function, rounded
from liger_kernel.ops.mlp.glu import clamped_swiglu_reference, geglu_reference, swiglu_reference
from liger_kernel.ops.moe.grouped import experts_bwd, experts_fwd, launch_bwd
from liger_kernel.ops.moe.products import tile_rows
from liger_kernel.ops.moe.routing import compute_routing_metadata as compute_routing_metadata
from liger_kernel.ops.moe.routing import routing

ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "tanh",
    "gelu": "none",
}  # by Hugging Face's names: by torch's


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
):
    """Expert by expert. A token's experts are added in fp32, or in fp64, in the experts' order."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    for e in range(gate_up_proj.shape[0]):
        t, k = torch.where(top_k_index == e)
        w, d = (table[e].mT if transposed else table[e] for table in (gate_up_proj, down_proj))
        b, c = (None if bias is None else bias[e] for bias in (gate_up_bias, down_bias))
        pre = F.linear(x[t], w, b)
        g, u = (pre[:, ::2], pre[:, 1::2]) if interleaved else pre.chunk(2, -1)
        y = F.linear(_gated(g, u, act, limit, alpha, shift), d, c)
        out = out.index_add(0, t, y.to(wide) * top_k_weights[t, k, None].to(wide))
    return out.to(x.dtype)


def _gated(g, u, act, limit, alpha, shift):
    if limit is not None or alpha != 1 or shift != 0:
        return clamped_swiglu_reference(g, u, check.INF if limit is None else limit, alpha, shift)
    return swiglu_reference(g, u) if act == "silu" else geglu_reference(g, u, ACTIVATIONS[act])


class LigerFusedMoEFunction(Function):
    """``apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights, ...) -> (T, H)`` in x's
    dtype.

    The arguments of `liger_experts`, and its defaults. The tensors but for top_k_weights have one
    dtype, and autocast is off: `liger_experts` handles the other cases.

    The gradient of W·x + b overwrites W·x + b, unless the graph is kept or somebody else may hold
    what was saved."""

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
        given = act, limit, alpha, shift, transposed, interleaved
        if limit is None and (alpha != 1 or shift != 0):
            limit = check.INF
        rows = tile_rows(top_k_index.numel(), gate_up_proj.shape[0], x)
        options = rows, ACTIVATIONS[act], limit, float(alpha), float(shift), transposed, interleaved
        keep = any(ctx.needs_input_grad)
        tensors = x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias
        metadata = routing(top_k_index, gate_up_proj.shape[0], rows)
        out, pre = experts_fwd(*tensors, *metadata, *options, keep)
        if keep:
            ctx.save_for_backward(*tensors, pre, *metadata)
            ctx.given, ctx.options = given, options
        return out

    @staticmethod
    def arguments(ctx):
        *first, gate_up_bias, down_bias = ctx.saved_tensors[:7]
        act, *others = ctx.given
        return *first, act, gate_up_bias, down_bias, *others

    @staticmethod
    def backward(ctx, dout):
        saved, needs = ctx.saved_tensors, [*ctx.needs_input_grad, *[False] * 3][:8]
        wanted = [needs[i] for i in (0, 1, 2, 4, 6, 7)]
        if not torch.compiler.is_compiling() and _is_ours(ctx):
            pre = saved[7]
            found = launch_bwd(dout, *saved, *ctx.options, *wanted, dpre=pre)
            torch.autograd.graph.increment_version(pre)
        else:
            found = experts_bwd(dout, *saved, *ctx.options, *wanted)
        dx, dgate_up, ddown, dweights, *biases = (
            t if need else None for t, need in zip(found, wanted, strict=True)
        )
        return dx, dgate_up, ddown, None, dweights, None, *biases, *[None] * 5


def _is_ours(ctx):
    """Whether only the graph refers to what was saved, and is freed after this backward.

    Nothing else was given the pre-activation but a saved-tensor hook, which may keep it; a
    checkpoint's does not."""
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    hooks = [raw.unpack_hook for raw in ctx._raw_saved_tensors]
    return all(
        h is None or getattr(h, "__module__", None) == "torch.utils.checkpoint" for h in hooks
    )


def _check(
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
    tensors = dict(x=x, gate_up_proj=gate_up_proj, down_proj=down_proj)
    biases = dict(gate_up_bias=gate_up_bias, down_bias=down_bias)
    check.floats(name, tensors | dict(top_k_weights=top_k_weights), **biases)
    check.integers(name, dict(top_k_index=top_k_index))
    if top_k_index.device != x.device:
        raise ValueError(
            f"{name}: x is on {x.device}, top_k_index on {top_k_index.device}, give one device"
        )
    if x.dim() != 2 or top_k_index.dim() != 2 or top_k_index.shape[0] != x.shape[0]:
        given = f"x has shape {tuple(x.shape)}, top_k_index {tuple(top_k_index.shape)}"
        raise ValueError(f"{name}: {given}, give (T, H) and (T, K)")
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
    check.shape(
        name, "down_proj", down_proj, (E, columns // 2, H) if transposed else (E, H, columns // 2)
    )
    check.shape(name, "gate_up_bias", gate_up_bias, (E, columns))
    check.shape(name, "down_bias", down_bias, (E, H))
    return tensors | biases


def _options(name, act, limit, alpha, shift, transposed, interleaved):
    """-> the options as Python values."""
    act = "silu" if act == "swish" else act
    if act not in ACTIVATIONS:
        raise ValueError(f"{name}: act is {act!r}, give one of {', '.join(ACTIVATIONS)}")
    limit = None if limit is None else check.positive(name, "limit", limit)
    alpha, shift = check.positive(name, "alpha", alpha), check.finite(name, "shift", shift)
    if act != "silu" and (limit is not None or alpha != 1 or shift != 0):
        raise ValueError(f"{name}: act is {act!r}; limit, alpha and shift are options of 'silu'")
    for argument, value in (("transposed", transposed), ("interleaved", interleaved)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {argument} is {value!r}, give True or False")
    return act, limit, alpha, shift


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
    """``out[t] = Σ_k top_k_weights[t, k]·down(act(g)·u)`` with the expert e = top_k_index[t, k].

    Args:
        x: (T, H), fp32, bf16 or fp16, any strides.
        gate_up_proj: (E, 2·I, H) in x's dtype: g and u of an expert are the halves of its product
        with x[t].
        down_proj: (E, H, I) in x's dtype.
        top_k_index: (T, K), integers. An expert may stand twice in a row. What is no expert's index
        is dropped.
        top_k_weights: (T, K), any floating dtype; need not add up to 1.
        act: "silu", "gelu_pytorch_tanh", or "gelu", which is the exact one.
        gate_up_bias, down_bias: (E, 2·I) and (E, H) in x's dtype, or None.
        limit, alpha, shift: act(g)·u is ``g·σ(alpha·g)·(u + shift)`` with g and u within the limit,
        as in
            `liger_clamped_swiglu`; gpt-oss has 7, 1.702 and 1. Only with "silu".
        transposed: the weights are stored as (E, H, 2·I) and (E, I, H).
        interleaved: g and u are the even and the odd entries, as in gpt-oss, not the halves.

    Returns:
        (T, H) in x's dtype. Under autocast the products are in its dtype.

    Raises:
        ValueError: shapes that do not fit; tensors on several devices; an unknown activation; limit
        or alpha is not
            positive, or one of limit, alpha and shift is given with a GELU.
        TypeError: weights or biases are not in x's dtype; something is not a floating point tensor,
        top_k_index not of
            integers, an option not of its type.

    Source: arXiv:1701.06538, arXiv:2401.04088, arXiv:2508.10925.
    """
    name = "liger_experts"
    act, limit, alpha, shift = _options(name, act, limit, alpha, shift, transposed, interleaved)
    given = x, gate_up_proj, down_proj, top_k_index, top_k_weights
    tensors = _check(name, *given, gate_up_bias, down_bias, transposed)
    dtype, kind = x.dtype, x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and dtype != torch.float64:
        lower = torch.get_autocast_dtype(kind)
        tensors = {
            argument: None if t is None else rounded(t, lower) for argument, t in tensors.items()
        }
    x, gate_up_proj, down_proj, gate_up_bias, down_bias = tensors.values()
    for argument, t in tensors.items():
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{name}: x is {x.dtype}, {argument} {t.dtype}, cast one of them")
    given = x, gate_up_proj, down_proj, top_k_index, top_k_weights
    run = LigerFusedMoEFunction.call if devices.has_kernels(x) else experts_reference
    out = run(*given, act, gate_up_bias, down_bias, limit, alpha, shift, transposed, interleaved)
    return rounded(out, dtype)


def _of(config, *names):
    """The first of these entries that the config has."""
    found = [getattr(config, name) for name in names if getattr(config, name, None) is not None]
    if not found:
        raise ValueError(f"LigerExperts: the config has none of {', '.join(names)}")
    return found[0]


class LigerExperts(torch.nn.Module):
    """`liger_experts` as a module, with a SiLU: ``forward(hidden_states, top_k_index,
    top_k_weights)``.

    Hugging Face's stacked experts, and their state dict: ``gate_up_proj`` (E, 2·I, H) and
    ``down_proj`` (E, H, I). Both are not initialised."""

    def __init__(self, config: object) -> None:
        super().__init__()
        act = config.hidden_act
        if act not in ("silu", "swish"):
            raise ValueError(
                f"LigerExperts: the config's activation is {act!r}, it computes 'silu' alone"
            )
        self.num_experts = _of(config, "num_experts", "num_local_experts", "n_routed_experts")
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = _of(config, "moe_intermediate_size", "intermediate_size")
        E, H, width = self.num_experts, self.hidden_dim, self.intermediate_dim
        self.gate_up_proj = torch.nn.Parameter(torch.empty(E, 2 * width, H))
        self.down_proj = torch.nn.Parameter(torch.empty(E, H, width))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ):
        x, chosen = (
            hidden_states.reshape(-1, self.hidden_dim),
            top_k_index.reshape(-1, top_k_index.shape[-1]),
        )
        out = liger_experts(
            x, self.gate_up_proj, self.down_proj, chosen, top_k_weights.reshape(chosen.shape)
        )
        return out.view(hidden_states.shape)

    def extra_repr(self):
        return f"num_experts={self.num_experts}, {self.hidden_dim}, {self.intermediate_dim}"


def _inputs(T, H, width, E, K):
    gate_up, down = torch.randn(E, 2 * width, H) / H**0.5, torch.randn(E, H, width) / width**0.5
    return dict(
        x=torch.randn(T, H).requires_grad_(),
        gate_up_proj=gate_up.requires_grad_(),
        down_proj=down.requires_grad_(),
        top_k_index=torch.rand(T, E).topk(K).indices,
        top_k_weights=torch.rand(T, K).requires_grad_(),
    )


def _inputs_with_biases(T, H, width, E, K):
    gate_up_bias, down_bias = torch.randn(E, 2 * width), torch.randn(E, H)
    biases = dict(gate_up_bias=gate_up_bias.requires_grad_(), down_bias=down_bias.requires_grad_())
    return _inputs(T, H, width, E, K) | biases


def _stored(fn):
    """fn of weights that are stored transposed, if that is the option."""

    def call(gate_up_proj, down_proj, transposed=False, **given):
        if transposed:
            gate_up_proj, down_proj = gate_up_proj.mT.contiguous(), down_proj.mT.contiguous()
        return fn(gate_up_proj=gate_up_proj, down_proj=down_proj, transposed=transposed, **given)

    return call


def _flops(t):
    return 9 * t["top_k_index"].numel() * t["gate_up_proj"][0].numel()


CASES.append(
    Case(
        "experts",
        fn=_stored(liger_experts),
        reference=_stored(experts_reference),
        inputs=_inputs,
        shapes=((1, 8, 8, 2, 1), (7, 24, 20, 5, 3), (40, 33, 17, 4, 2)),
        options=(
            dict(),
            dict(act="gelu_pytorch_tanh", transposed=True),
            dict(act="gelu", interleaved=True),
        ),
        bench=(
            (16384, 4096, 14336, 8, 2),
            (16384, 2048, 768, 128, 8),
        ),  # of Mixtral-8x7B, Qwen3-30B-A3B
        flops=_flops,
        fp32_roundings=4,  # of products in fp32, which the test makes exact in PyTorch's code
    )
)
CASES.append(
    Case(
        "experts_with_biases",
        fn=_stored(liger_experts),
        reference=_stored(experts_reference),
        inputs=_inputs_with_biases,
        shapes=((3, 8, 8, 2, 2), (7, 24, 20, 5, 3)),
        options=(
            dict(limit=1.0, alpha=1.702, shift=1.0, transposed=True, interleaved=True),
            dict(gate_up_bias=None, limit=1.0),
        ),
        bench=((16384, 2880, 2880, 32, 4),),  # of gpt-oss-20b
        flops=_flops,
        fp32_roundings=4,  # of products in fp32, which the test makes exact in PyTorch's code
    )
)
