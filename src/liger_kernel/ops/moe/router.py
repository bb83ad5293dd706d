r"""A router: choose K of E experts for each token, and compute their weights.

    p = softmax(z) or σ(z),   key = p + bias,   chosen = the K largest keys of a row

    w_k = scale·p_k                          for the chosen k
    w_k = scale·p_k / (eps + Σ_chosen p)     normalised

With groups only experts of the best groups can be chosen: a group's score is the sum of its one or
two largest keys. The bias is only for the choice and no part of a weight, so it has no gradient.
Without a bias and groups the key is z, which has the order of p: probabilities that are equal after
rounding are told apart. Of equal keys the first is chosen; a NaN counts as infinite.

With r = p / (eps + Σ_chosen p) and c = Σ_k dw_k·r_k, or r = p, c = 0 and a denominator of 1 if not
normalised:

    dp_k = scale·(dw_k - c) / denominator    for the chosen k, else 0
    dz = p·(dp - Σ_k p_k·dp_k)               softmax
    dz = dp·σ(z)·σ(-z)                       sigmoid

Normalised, the sum over k is scale·c·eps / denominator.

Arithmetic is in fp32, as in Hugging Face's routers, and weights are rounded once.

    Mixtral, Qwen3-MoE, OLMoE, GPT-OSS    softmax, normalised
                                          (GPT-OSS: softmax of the chosen logits, the same)
    DeepSeek-V2                           softmax, groups by their best one, scale
    DeepSeek-V3, GLM-4.5, dots.llm1       sigmoid, bias, groups by their best two,
                                          normalised with eps, scale

Source: Shazeer et al., arXiv:1701.06538; DeepSeek-V3, arXiv:2412.19437; its bias: Wang et al.,
arXiv:2408.15664."""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import (
    CASES,
    Case,
    Function,
    custom_op,
    differentiable_gradients,
    with_unit_stride,
)
from liger_kernel.core.tile import cdiv, load_fp32, next_power_of_2, sigmoid, tl, triton
from liger_kernel.ops.moe.top_k import (
    MAX_EXPERTS,
    choose_launch,
    first_max,
    load_logits,
    nan_to_inf,
    select_groups,
    softmax,
    top_k_reference,
    upcast,
)

SCORES = "softmax", "sigmoid"


def router_reference(
    logits,
    top_k,
    score="softmax",
    bias=None,
    groups=None,
    top_groups=None,
    best_of_a_group=2,
    normalize=False,
    eps=0.0,
    scale=1.0,
    dtype=None,
):
    """Compute `liger_router` in plain PyTorch, for logits of any dtype."""
    index = _choose_experts(logits, top_k, score, bias, groups, top_groups, best_of_a_group)
    return _weights(logits, index, score, normalize, eps, scale, dtype or logits.dtype), index


def _scores(logits, score):
    return upcast(logits).softmax(-1) if score == "softmax" else upcast(logits).sigmoid()


def _choose_experts(logits, top_k, score, bias, groups, top_groups, best_of_a_group):
    logits = logits.detach()
    if bias is None and groups is None:
        return top_k_reference(logits, top_k)
    key = _scores(logits, score)
    if bias is not None:
        key = key + bias.detach()
    if groups is None:
        return top_k_reference(key, top_k)
    T, E = key.shape
    group_size = E // groups
    key = key.where(~key.isnan(), torch.inf)
    group_scores = key.view(T, groups, group_size).topk(best_of_a_group).values.sum(-1)
    best_groups = top_k_reference(group_scores, top_groups).sort(-1).values
    experts = best_groups[..., None] * group_size + torch.arange(group_size, device=key.device)
    experts = experts.view(T, top_groups * group_size)
    return experts.gather(-1, top_k_reference(key.gather(-1, experts), top_k))


def _weights(logits, index, score, normalize, eps, scale, dtype):
    p = _scores(logits, score).gather(-1, index)
    if normalize:
        p = p / (p.sum(-1, keepdim=True) + eps)
    return (p * scale).to(dtype)


@triton.jit
def _score(z, SIGMOID: tl.constexpr):
    """Return the softmax or sigmoid of the logits, and the slope of the sigmoid."""
    if SIGMOID:
        score, slope = sigmoid(z)
    else:
        score = softmax(z)
        slope = score
    return score, slope


@kernel
def _fwd(
    z_ptr,
    bias_ptr,
    w_ptr,
    index_ptr,
    stride_z,
    T,
    E,
    K,
    groups,
    top_groups,
    eps,
    scale,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BEST_OF_A_GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Compute the experts and weights of BLOCK_T tokens."""
    # z, score, key, left (BLOCK_T, BLOCK_E); p, index (BLOCK_T, BLOCK_K); n (BLOCK_T, 1)
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    z, _ = load_logits(z_ptr, stride_z, t, e, T, E)
    left = (e < E) & (t >= 0)
    score, _ = _score(z, SIGMOID)
    key = z
    if bias_ptr is not None or groups is not None:
        key = score
    if bias_ptr is not None:
        key += load_fp32(bias_ptr, e, e < E)
    key = nan_to_inf(key)
    if groups is not None:
        left = select_groups(
            key, left, e, E // groups, groups, top_groups, BEST_OF_A_GROUP, BLOCK_T, BLOCK_G
        )
    p = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.float32)
    index = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.int32)
    for i in range(K):
        n = first_max(key, left, e)
        left = left & (e != n)
        p = tl.where(k == i, tl.sum(tl.where(e == n, score, 0.0), axis=1, keep_dims=True), p)
        index = tl.where(k == i, n, index)
    if NORMALIZE:
        p = p / (tl.sum(p, axis=1, keep_dims=True) + eps)
    mask = (t < T) & (k < K)
    tl.store(w_ptr + t * K + k, (p * scale).to(w_ptr.dtype.element_ty), mask=mask)
    tl.store(index_ptr + t * K + k, index.to(tl.int64), mask=mask)


@kernel
def _bwd(
    z_ptr,
    index_ptr,
    dw_ptr,
    dz_ptr,
    stride_z,
    T,
    E,
    K,
    eps,
    scale,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Compute dz of BLOCK_T tokens."""
    # z, score, chosen, dw, dp, dz (BLOCK_T, BLOCK_E); total, c, dot (BLOCK_T, 1)
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    z, z_mask = load_logits(z_ptr, stride_z, t, e, T, E)
    score, slope = _score(z, SIGMOID)
    chosen = z_mask & (e < 0)
    dw = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    for i in range(K):
        is_choice = e == tl.load(index_ptr + t * K + i, mask=t < T, other=0)
        dw = tl.where(is_choice, load_fp32(dw_ptr, t * K + i, t < T), dw)
        chosen = chosen | is_choice
    if NORMALIZE:
        total = tl.sum(tl.where(chosen, score, 0.0), axis=1, keep_dims=True) + eps
        c = tl.sum(tl.where(chosen, dw * (score / total), 0.0), axis=1, keep_dims=True)
        dp = tl.where(chosen, (dw - c) / total, 0.0)
        dot = c * (eps / total)
    else:
        dp = dw
        dot = tl.sum(tl.where(chosen, score * dw, 0.0), axis=1, keep_dims=True)
    if SIGMOID:
        dz = dp * slope
    else:
        dz = score * (dp - dot)
    tl.store(dz_ptr + t * E + e, (dz * scale).to(dz_ptr.dtype.element_ty), mask=z_mask)


def _empty_outputs(
    logits, bias, top_k, score, groups, top_groups, best_of_a_group, normalize, eps, scale, dtype
):
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


@custom_op("router", _empty_outputs)
def router_fwd(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    score: str,
    groups: int | None,
    top_groups: int | None,
    best_of_a_group: int,
    normalize: bool,
    eps: float,
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (T, K) in dtype, and index (T, K) in int64.

    logits are (T, E) with unit stride in E, bias is (E,), contiguous."""
    T, E = logits.shape
    weights = logits.new_empty((T, top_k), dtype=dtype)
    index = weights.new_empty(weights.shape, dtype=torch.int64)
    block_t, block_e, num_warps = choose_launch(E, logits)
    if index.numel():
        _fwd[(cdiv(T, block_t),)](
            logits,
            bias,
            weights,
            index,
            logits.stride(0),
            T,
            E,
            top_k,
            groups,
            top_groups,
            eps,
            scale,
            SIGMOID=score == "sigmoid",
            NORMALIZE=normalize,
            BEST_OF_A_GROUP=best_of_a_group,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
            BLOCK_K=next_power_of_2(top_k),
            BLOCK_G=next_power_of_2(groups or 1),
            num_warps=num_warps,
        )
    return weights, index


@custom_op("router_backward", lambda logits, *_: logits.new_empty(logits.shape))
def router_bwd(
    logits: torch.Tensor,
    index: torch.Tensor,
    dweights: torch.Tensor,
    score: str,
    normalize: bool,
    eps: float,
    scale: float,
) -> torch.Tensor:
    """Return dlogits (T, E).

    logits are (T, E) with unit stride in E, index and dweights are (T, K), contiguous."""
    T, E = logits.shape
    dlogits = logits.new_empty(logits.shape)
    block_t, block_e, num_warps = choose_launch(E, logits)
    if dlogits.numel():
        _bwd[(cdiv(T, block_t),)](
            logits,
            index,
            dweights,
            dlogits,
            logits.stride(0),
            T,
            E,
            index.shape[1],
            eps,
            scale,
            SIGMOID=score == "sigmoid",
            NORMALIZE=normalize,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
            num_warps=num_warps,
        )
    return dlogits


class LigerRouterFunction(Function):
    """Autograd Function of `liger_router`, with the same arguments and defaults."""

    reference = staticmethod(router_reference)

    @staticmethod
    def forward(
        ctx,
        logits,
        top_k,
        score="softmax",
        bias=None,
        groups=None,
        top_groups=None,
        best_of_a_group=2,
        normalize=False,
        eps=0.0,
        scale=1.0,
        dtype=None,
    ):
        devices.require_kernels("LigerRouterFunction", logits)
        dtype = dtype or logits.dtype
        weight_options = normalize, float(eps), float(scale)
        weights, index = router_fwd(
            with_unit_stride(logits),
            None if bias is None else bias.contiguous(),
            top_k,
            score,
            groups,
            top_groups,
            best_of_a_group,
            *weight_options,
            dtype,
        )
        ctx.save_for_backward(logits, index)
        ctx.mark_non_differentiable(index)
        ctx.options = score, *weight_options
        ctx.dtype = dtype
        return weights, index

    @staticmethod
    def differentiable_backward(ctx, dweights, _):
        """Differentiate the weights for the choice that forward made."""
        logits, index = ctx.saved_tensors

        def weights(logits):
            return _weights(logits, index, *ctx.options, ctx.dtype)

        (dlogits,) = differentiable_gradients(weights, [logits], [True], [dweights])
        return dlogits, *[None] * (len(ctx.needs_input_grad) - 1)

    @staticmethod
    def backward(ctx, dweights, _):
        logits, index = ctx.saved_tensors
        dlogits = router_bwd(with_unit_stride(logits), index, dweights.contiguous(), *ctx.options)
        return dlogits, *[None] * (len(ctx.needs_input_grad) - 1)


def _check_groups(name, E, top_k, groups, top_groups, best_of_a_group):
    """Check the options of groups. Returns groups and top_groups as ints, or None and None."""
    if groups is None and top_groups is None:
        return None, None
    groups = check.integer(name, "groups", groups)
    top_groups = check.integer(name, "top_groups", top_groups)
    for argument, value in dict(groups=groups, top_groups=top_groups).items():
        if value < 1:
            raise ValueError(f"{name}: {argument} is {value!r}, give a positive int")
    if best_of_a_group not in (1, 2):
        raise ValueError(f"{name}: best_of_a_group is {best_of_a_group!r}, give 1 or 2")
    if E % groups or E // groups < best_of_a_group:
        raise ValueError(
            f"{name}: groups is {groups!r}, give a divisor of the {E} experts, "
            f"{best_of_a_group} or more a group"
        )
    if top_groups > groups or top_k > top_groups * (E // groups):
        raise ValueError(
            f"{name}: top_groups is {top_groups!r} of {groups} with {E} experts, top_k is {top_k!r}"
        )
    return groups, top_groups


def liger_router(
    logits: torch.Tensor,
    top_k: int,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int | None = None,
    top_groups: int | None = None,
    best_of_a_group: int = 2,
    normalize: bool = False,
    eps: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts, and compute their weights.

    Args:
        logits: (T, E), fp32, bf16 or fp16.
        top_k: K, how many experts a token has.
        score: "softmax" over the experts, or "sigmoid" of each.
        bias: (E,), added to the scores to choose by, and to nothing else; it gets no gradient.
        groups, top_groups: into how many groups of neighbours the experts are divided, and from how
            many of these the experts of a token are.
        best_of_a_group: 1 or 2, of how many of its experts a group's score is the sum.
        normalize: divide the weights by eps and their sum.
        scale: a factor of the weights.
        dtype: of the weights; None for that of the logits.

    Returns:
        (weights, index), both (T, K); index in int64. The experts of a token are in the order of
        the keys that they are chosen by, largest first, and of equal keys the first is chosen. Only
        logits get a gradient.

    Raises:
        ValueError: shapes that do not fit; top_k is not from 1 to E; groups that cannot hold top_k
            experts; an unknown score; eps is negative.
        TypeError: something is not a floating point tensor, an option not of its type.

    Source: arXiv:1701.06538, arXiv:2412.19437.
    """
    name = "liger_router"
    check.floats(name, dict(logits=logits), bias=bias)
    check.dtype(name, "dtype", dtype)
    if logits.dim() != 2:
        raise ValueError(f"{name}: logits have shape {tuple(logits.shape)}, give (T, E)")
    E = logits.shape[1]
    check.shape(name, "bias", bias, (E,))
    top_k = check.integer(name, "top_k", top_k)
    if not 1 <= top_k <= E:
        raise ValueError(f"{name}: top_k is {top_k!r}, give an int from 1 to the {E} experts")
    if score not in SCORES:
        raise ValueError(f"{name}: score is {score!r}, give one of {', '.join(SCORES)}")
    groups, top_groups = _check_groups(name, E, top_k, groups, top_groups, best_of_a_group)
    eps = check.non_negative(name, "eps", eps)
    scale = check.finite(name, "scale", scale)
    if not isinstance(normalize, bool):
        raise TypeError(f"{name}: normalize is {normalize!r}, give True or False")
    bias = None if bias is None else bias.detach()
    has_kernels = devices.has_kernels(logits) and E <= MAX_EXPERTS
    run = LigerRouterFunction.call if has_kernels else router_reference
    return run(
        logits,
        top_k,
        score,
        bias,
        groups,
        top_groups,
        best_of_a_group,
        normalize,
        eps,
        scale,
        dtype,
    )


CASES.append(
    Case(
        "router",
        fn=liger_router,
        reference=router_reference,
        inputs=lambda T, E, K: dict(
            logits=torch.randn(T, E).requires_grad_(), top_k=K, bias=torch.randn(E) / 8
        ),
        shapes=((1, 8, 3), (5, 60, 6), (40, 12, 2), (9, 36, 5)),
        options=(
            # DeepSeek-V3
            dict(score="sigmoid", groups=4, top_groups=2, normalize=True, eps=1e-20, scale=2.5),
            dict(bias=None),
            dict(bias=None, normalize=True, dtype=torch.float32),  # Mixtral
            dict(groups=2, top_groups=1, best_of_a_group=1, normalize=True, eps=0.1),
        ),
        bench=((16384, 8, 2), (16384, 128, 8), (16384, 256, 8)),
        traffic=lambda t: tuple(
            n * t["logits"].numel() * t["logits"].element_size() for n in (1, 2)
        ),
        fp32_roundings=2,
    )
)
