r"""A router: which K of E experts a token goes to, and with which weights.

    p = softmax(z) or σ(z),   key = p + bias,   chosen = the K largest keys of a row

    w_k = scale·p_k                          for the chosen k
    w_k = scale·p_k / (eps + Σ_chosen p)     normalised

With groups only experts of the best groups can be chosen: a group's score is the sum of its one or
two largest keys. The bias chooses and is no part of a weight, so it has no gradient. Without a bias
and groups the key is z, which has the order of p: probabilities that are equal after rounding are
told apart. Of equal keys the first is chosen; a key that is no number counts as infinite.

With r = p / (eps + Σ_chosen p) and c = Σ_k dw_k·r_k, or r = p, c = 0 and a denominator of 1 if not
normalised:

    dp_k = scale·(dw_k - c) / denominator    for the chosen k, else 0
    dz = p·(dp - Σ_k p_k·dp_k)               softmax; normalised, the sum is scale·c·eps / denominator
    dz = dp·σ(z)·σ(-z)                       sigmoid

Arithmetic is in fp32, as in Hugging Face's routers, and weights are rounded once.

    Mixtral, Qwen3-MoE, OLMoE, GPT-OSS       softmax, normalised (GPT-OSS: softmax of the chosen logits, the same)
    DeepSeek-V2                              softmax, groups by their best one, scale
    DeepSeek-V3, GLM-4.5, dots.llm1          sigmoid, bias, groups by their best two, normalised with eps, scale

Source: Shazeer et al., arXiv:1701.06538; DeepSeek-V3, arXiv:2412.19437; its bias: Wang et al.,
arXiv:2408.15664."""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, Function, custom_op, gradients, unit_stride
from liger_kernel.core.tile import cdiv, next_power_of_2, read, sigmoid, tl, triton
from liger_kernel.ops.moe.choice import (
    WIDEST,
    best_reference,
    in_best_groups,
    launch,
    logits_of,
    number,
    pick,
    softmax,
    wide,
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
    index = _choice(logits, top_k, score, bias, groups, top_groups, best_of_a_group)
    return _weights(logits, index, score, normalize, eps, scale, dtype or logits.dtype), index


def _scores(logits, score):
    return wide(logits).softmax(-1) if score == "softmax" else wide(logits).sigmoid()


def _choice(logits, top_k, score, bias, groups, top_groups, best_of_a_group):
    logits = logits.detach()
    if bias is None and groups is None:
        return best_reference(logits, top_k)
    key = _scores(logits, score)
    if bias is not None:
        key = key + bias.detach()
    if groups is None:
        return best_reference(key, top_k)
    T, E = key.shape
    key = key.where(~key.isnan(), torch.inf)
    total = key.view(T, groups, E // groups).topk(best_of_a_group).values.sum(-1)
    best = best_reference(total, top_groups).sort(-1).values
    experts = best[..., None] * (E // groups) + torch.arange(E // groups, device=key.device)
    experts = experts.view(T, top_groups * (E // groups))
    return experts.gather(-1, best_reference(key.gather(-1, experts), top_k))


def _weights(logits, index, score, normalize, eps, scale, dtype):
    p = _scores(logits, score).gather(-1, index)
    if normalize:
        p = p / (p.sum(-1, keepdim=True) + eps)
    return (p * scale).to(dtype)


@triton.jit
def _score(z, SIGMOID: tl.constexpr):
    """-> softmax or sigmoid of the logits, and the slope of the sigmoid."""
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
    """One program: BLOCK_T tokens."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    e, k = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    z, _ = logits_of(z_ptr, stride_z, t, e, T, E)
    left = (e < E) & (t >= 0)
    score, _ = _score(z, SIGMOID)
    key = z
    if bias_ptr is not None or groups is not None:
        key = score
    if bias_ptr is not None:
        key += read(bias_ptr, e, e < E)
    key = number(key)
    if groups is not None:
        left = in_best_groups(
            key, left, e, E // groups, groups, top_groups, BEST_OF_A_GROUP, BLOCK_T, BLOCK_G
        )
    p = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.float32)
    index = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.int32)
    for i in range(K):
        n = pick(key, left, e)
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
    """One program: BLOCK_T tokens."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    z, inside = logits_of(z_ptr, stride_z, t, e, T, E)
    score, slope = _score(z, SIGMOID)
    chosen = inside & (e < 0)
    dw = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    for i in range(K):
        this = e == tl.load(index_ptr + t * K + i, mask=t < T, other=0)
        dw = tl.where(this, read(dw_ptr, t * K + i, t < T), dw)
        chosen = chosen | this
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
    tl.store(dz_ptr + t * E + e, (dz * scale).to(dz_ptr.dtype.element_ty), mask=inside)


def _outputs(
    logits, bias, top_k, score, groups, top_groups, best_of_a_group, normalize, eps, scale, dtype
):
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


@custom_op("router", _outputs)
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
    """logits (T, E) with unit stride in E, bias (E,) contiguous -> weights (T, K) in dtype, index
    (T, K) in int64."""
    (T, E), weights = logits.shape, logits.new_empty((logits.shape[0], top_k), dtype=dtype)
    index = weights.new_empty(weights.shape, dtype=torch.int64)
    rows, columns, warps = launch(E, logits)
    if index.numel():
        _fwd[(cdiv(T, rows),)](
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
            BLOCK_T=rows,
            BLOCK_E=columns,
            BLOCK_K=next_power_of_2(top_k),
            BLOCK_G=next_power_of_2(groups or 1),
            num_warps=warps,
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
    """logits (T, E) with unit stride in E, index and dweights (T, K) contiguous -> dlogits (T,
    E)."""
    (T, E), dlogits = logits.shape, logits.new_empty(logits.shape)
    rows, columns, warps = launch(E, logits)
    if dlogits.numel():
        _bwd[(cdiv(T, rows),)](
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
            BLOCK_T=rows,
            BLOCK_E=columns,
            num_warps=warps,
        )
    return dlogits


class LigerRouterFunction(Function):
    """``apply(logits, top_k, ...) -> (weights, index)``: the arguments of `liger_router`, and its
    defaults."""

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
        chosen_by = (
            None if bias is None else bias.contiguous(),
            top_k,
            score,
            groups,
            top_groups,
            best_of_a_group,
        )
        dtype, weighted_by = dtype or logits.dtype, (normalize, float(eps), float(scale))
        weights, index = router_fwd(unit_stride(logits), *chosen_by, *weighted_by, dtype)
        ctx.save_for_backward(logits, index)
        ctx.mark_non_differentiable(index)
        ctx.options, ctx.dtype = (score, *weighted_by), dtype
        return weights, index

    @staticmethod
    def again(ctx, dweights, _):
        """With the choice that was made."""
        logits, index = ctx.saved_tensors

        def weights(logits):
            return _weights(logits, index, *ctx.options, ctx.dtype)

        return *gradients(weights, [logits], [True], [dweights]), *[None] * (
            len(ctx.needs_input_grad) - 1
        )

    @staticmethod
    def backward(ctx, dweights, _):
        logits, index = ctx.saved_tensors
        dlogits = router_bwd(unit_stride(logits), index, dweights.contiguous(), *ctx.options)
        return dlogits, *[None] * (len(ctx.needs_input_grad) - 1)


def _check_groups(name, E, top_k, groups, top_groups, best_of_a_group):
    """-> groups and top_groups as ints."""
    if groups is None and top_groups is None:
        return None, None
    groups, top_groups = (
        check.integer(name, "groups", groups),
        check.integer(name, "top_groups", top_groups),
    )
    for argument, value in dict(groups=groups, top_groups=top_groups).items():
        if value < 1:
            raise ValueError(f"{name}: {argument} is {value!r}, give a positive int")
    if best_of_a_group not in (1, 2):
        raise ValueError(f"{name}: best_of_a_group is {best_of_a_group!r}, give 1 or 2")
    if E % groups or E // groups < best_of_a_group:
        raise ValueError(
            f"{name}: groups is {groups!r}, give a divisor of the {E} experts, {best_of_a_group} or more a group"
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
    """The experts of each token, and their weights.

    Args:
        logits: (T, E), fp32, bf16 or fp16.
        top_k: K, how many experts a token has.
        score: "softmax" over the experts, or "sigmoid" of each.
        bias: (E,), added to the scores to choose by, and to nothing else; it gets no gradient.
        groups, top_groups: into how many groups of neighbours the experts are divided, and from how
        many of these the
            experts of a token are.
        best_of_a_group: 1 or 2, of how many of its experts a group's score is the sum.
        normalize: divide the weights by eps and their sum.
        scale: what the weights are multiplied by.
        dtype: of the weights; None for that of the logits.

    Returns:
        (weights, index), both (T, K); index in int64. The experts of a token are in the order of
        what they are chosen
        by, and of equal ones the first is chosen. Only logits get a gradient.

    Raises:
        ValueError: shapes that do not fit; top_k is not from 1 to E; groups that cannot hold top_k
        experts; an unknown
            score; eps is negative.
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
    eps, scale = check.not_negative(name, "eps", eps), check.finite(name, "scale", scale)
    if not isinstance(normalize, bool):
        raise TypeError(f"{name}: normalize is {normalize!r}, give True or False")
    bias = None if bias is None else bias.detach()
    run = (
        LigerRouterFunction.call
        if devices.has_kernels(logits) and E <= WIDEST
        else router_reference
    )
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
            dict(
                score="sigmoid", groups=4, top_groups=2, normalize=True, eps=1e-20, scale=2.5
            ),  # DeepSeek-V3
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
