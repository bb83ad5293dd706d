r"""RMSNorm over each head of queries and keys, then the rotary position embedding.

    x̂ = x·rstd,   rstd = 1 / sqrt(mean(x²) + eps),   n = x̂·(w + offset)
    y1 = n1·cos - n2·sin,   y2 = n2·cos + n1·sin

for each pair (n1, n2) of a head's entries. Entries beyond the angles' width have cos = 1, sin = 0.
Backward:

    g1 = dy1·cos + dy2·sin,   g2 = dy2·cos - dy1·sin
    with m = g·(w + offset):   dx = rstd·(m - x̂·mean(m·x̂)),   dw = Σ_tokens,heads g·x̂

Forward rounds like the two operators one after the other: n and y are rounded to the input's dtype,
and ``casting_mode`` says if x̂ is (see `rms_norm`). Backward does not round g. Only the inputs are
saved: backward reads all of x anyway, and computes rstd again. For ``interleaved`` see `rope`.

Source: Henry et al., Query-Key Normalization for Transformers, arXiv:2010.04245. Qwen3
(arXiv:2505.09388) and Gemma 3 (arXiv:2503.19786) have these norms before RoPE."""

from __future__ import annotations

import functools

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import (
    CASES,
    Case,
    Function,
    custom_op,
    differentiable_gradients,
    with_unit_stride,
)
from liger_kernel.core.reduce import sum_rows
from liger_kernel.core.tile import cdiv, next_power_of_2
from liger_kernel.ops.norm.rms_norm import CASTINGS, check_casting, rms_norm_reference
from liger_kernel.ops.rotary.arguments import (
    angle_strides,
    case_angles,
    case_bytes,
    case_inputs,
    empty_output,
    heads_per_block,
    kernel_arguments,
    rope_arguments,
    row_strides,
    swap_heads,
)
from liger_kernel.ops.rotary.norm_rope_kernels import (
    norm_rope_backward_kernel,
    norm_rope_forward_kernel,
)
from liger_kernel.ops.rotary.rope import rope_reference

NAME = "liger_norm_rope"


def norm_rope_reference(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    eps=1e-6,
    offset=0.0,
    casting_mode="llama",
    unsqueeze_dim=1,
    interleaved=False,
):
    q, k, cos, sin, heads_dim, rotary_dim = rope_arguments(
        q, k, cos, sin, None, unsqueeze_dim, None, interleaved, NAME
    )
    q = rms_norm_reference(q, q_weight, eps, offset, casting_mode)
    k = rms_norm_reference(k, k_weight, eps, offset, casting_mode)
    q, k = rope_reference(q, k, cos, sin, rotary_dim=rotary_dim, interleaved=bool(interleaved))
    return swap_heads(q, heads_dim), swap_heads(k, heads_dim)


@functools.cache
def _launch(HQ, HK, D, entries):
    """Return the block sizes, the tokens of a unit, and the blocks of q and of k in a unit.

    A block has ``entries`` entries, with all heads of its tokens if they fit, so that an angle is
    read once. q and k have separate blocks of the same size: all programs have equal work, even if
    k has few heads.
    """
    pairs = next_power_of_2(cdiv(D, 2))

    def block(num_heads):
        heads = min(heads_per_block(num_heads), max(1, entries // (2 * pairs)))
        tokens = max(1, entries // (2 * pairs * heads))
        return tokens, heads, cdiv(num_heads, heads)

    q_tokens, q_heads, q_groups = block(HQ)
    k_tokens, k_heads, k_groups = block(HK)
    unit = max(q_tokens, k_tokens)
    block_sizes = dict(
        BLOCK_Q_TOKENS=q_tokens,
        BLOCK_Q_HEADS=q_heads,
        BLOCK_K_TOKENS=k_tokens,
        BLOCK_K_HEADS=k_heads,
        BLOCK_PAIRS=pairs,
    )
    return block_sizes, unit, unit // q_tokens * q_groups, unit // k_tokens * k_groups


def _outputs(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    heads_dim,
    rotary_dim,
    interleaved,
    q_tokens_first,
    k_tokens_first,
    *_,
):
    return empty_output(q, q_tokens_first, heads_dim), empty_output(k, k_tokens_first, heads_dim)


def _gradients(
    dyq,
    dyk,
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    heads_dim,
    rotary_dim,
    interleaved,
    q_tokens_first,
    k_tokens_first,
    eps,
    offset,
    cast,
    need_dq,
    need_dk,
    need_dq_weight,
    need_dk_weight,
):
    return (
        empty_output(q, q_tokens_first, heads_dim) if need_dq else None,
        empty_output(k, k_tokens_first, heads_dim) if need_dk else None,
        q_weight.new_empty(q_weight.shape) if need_dq_weight else None,
        k_weight.new_empty(k_weight.shape) if need_dk_weight else None,
    )


@custom_op("norm_rope", _outputs)
def norm_rope_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads_dim: int,
    rotary_dim: int,
    interleaved: bool,
    q_tokens_first: bool,
    k_tokens_first: bool,
    eps: float,
    offset: float,
    cast: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k normalised and rotated.

    cos and sin are (1 or B, T, rotary_dim/2). The weights are contiguous. For heads_dim to
    k_tokens_first see `Layout`. Strides are read within the op, as in `rope_rotate`.
    """
    yq = empty_output(q, q_tokens_first, heads_dim)
    yk = empty_output(k, k_tokens_first, heads_dim)
    q, k = (swap_heads(with_unit_stride(x), heads_dim) for x in (q, k))
    B, HQ, T, D = q.shape
    HK = k.shape[1]
    block_sizes, unit, q_blocks, k_blocks = _launch(HQ, HK, D, 4096)
    norm_rope_forward_kernel[(B * cdiv(T, unit) * (q_blocks + k_blocks),)](
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        yq,
        yk,
        *row_strides(q, k),
        *angle_strides(cos, sin),
        T,
        eps,
        offset,
        Q_HEADS=HQ,
        K_HEADS=HK,
        HEAD_DIM=D,
        ROTARY_DIM=rotary_dim,
        Q_TOKENS_FIRST=q_tokens_first,
        K_TOKENS_FIRST=k_tokens_first,
        INTERLEAVED=interleaved,
        CAST=cast,
        Q_BLOCKS=q_blocks,
        K_BLOCKS=k_blocks,
        **block_sizes,
        num_warps=devices.limit_warps(4, q),
    )
    return yq, yk


@custom_op("norm_rope_backward", _gradients)
def norm_rope_bwd(
    dyq: torch.Tensor,
    dyk: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads_dim: int,
    rotary_dim: int,
    interleaved: bool,
    q_tokens_first: bool,
    k_tokens_first: bool,
    eps: float,
    offset: float,
    cast: int,
    need_dq: bool,
    need_dk: bool,
    need_dq_weight: bool,
    need_dk_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk, dq_weight, dk_weight; None for a gradient that is not needed."""
    dq = empty_output(q, q_tokens_first, heads_dim) if need_dq else None
    dk = empty_output(k, k_tokens_first, heads_dim) if need_dk else None
    dq_weight = q_weight.new_empty(q_weight.shape) if need_dq_weight else None
    dk_weight = k_weight.new_empty(k_weight.shape) if need_dk_weight else None
    dyq, dyk, q, k = (swap_heads(with_unit_stride(x), heads_dim) for x in (dyq, dyk, q, k))
    B, HQ, T, D = q.shape
    HK = k.shape[1]
    entries = 2048 if interleaved else 4096  # splitting and joining pairs takes registers
    block_sizes, unit, q_blocks, k_blocks = _launch(HQ, HK, D, entries)
    if not (need_dq or need_dq_weight):
        q_blocks = 0
    if not (need_dk or need_dk_weight):
        k_blocks = 0
    blocks = q_blocks + k_blocks
    units = B * cdiv(T, unit)
    programs = min(units, max(1, 2 * devices.multiprocessors(q) // blocks))  # for each block
    partial_dq_weight = partial_dk_weight = None
    if need_dq_weight:
        partial_dq_weight = q.new_empty((programs * q_blocks, D), dtype=torch.float32)
    if need_dk_weight:
        partial_dk_weight = k.new_empty((programs * k_blocks, D), dtype=torch.float32)
    norm_rope_backward_kernel[(programs * blocks,)](
        dyq,
        dyk,
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        dq,
        dk,
        partial_dq_weight,
        partial_dk_weight,
        *row_strides(dyq, dyk, q, k),
        *angle_strides(cos, sin),
        T,
        units,
        eps,
        offset,
        Q_HEADS=HQ,
        K_HEADS=HK,
        HEAD_DIM=D,
        ROTARY_DIM=rotary_dim,
        Q_TOKENS_FIRST=q_tokens_first,
        K_TOKENS_FIRST=k_tokens_first,
        INTERLEAVED=interleaved,
        CAST=cast,
        Q_BLOCKS=q_blocks,
        K_BLOCKS=k_blocks,
        **block_sizes,
        STAGES=devices.choose_num_stages(3 * entries * q.element_size(), q),
        num_warps=devices.limit_warps(8, q),
    )
    if need_dq_weight:
        sum_rows(partial_dq_weight, dq_weight)
    if need_dk_weight:
        sum_rows(partial_dk_weight, dk_weight)
    return dq, dk, dq_weight, dk_weight


class LigerNormRopeFunction(Function):
    """``apply(q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama",
    unsqueeze_dim=1, interleaved=False) -> (q, k)``

    The arguments of `liger_norm_rope`. Results and gradients have the memory layout of q and k. q,
    k and the incoming gradients are not written to. They are copied only if the entries of a head
    are not contiguous.
    """

    reference = staticmethod(norm_rope_reference)

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        eps=1e-6,
        offset=0.0,
        casting_mode="llama",
        unsqueeze_dim=1,
        interleaved=False,
    ):
        devices.require_kernels("LigerNormRopeFunction", q)
        cos, sin, layout = kernel_arguments(
            q, k, cos, sin, None, unsqueeze_dim, None, interleaved, NAME
        )
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.layout = layout
        ctx.options = eps, offset, CASTINGS.index(casting_mode)
        return norm_rope_fwd(
            q, k, *_contiguous(q_weight, k_weight), cos, sin, *layout, *ctx.options
        )

    @staticmethod
    def differentiable_backward(ctx, dyq, dyk):
        *inputs, cos, sin = ctx.saved_tensors
        layout = ctx.layout
        eps, offset, cast = ctx.options
        casting_mode = CASTINGS[cast]

        def norm_rope(q, k, q_weight, k_weight):
            q = rms_norm_reference(q, q_weight, eps, offset, casting_mode)
            k = rms_norm_reference(k, k_weight, eps, offset, casting_mode)
            return rope_reference(
                q, k, cos, sin, None, layout.heads_dim, layout.rotary_dim, layout.interleaved
            )

        needs = ctx.needs_input_grad[:4]
        return *differentiable_gradients(norm_rope, inputs, needs, (dyq, dyk)), *(None,) * 7

    @staticmethod
    def backward(ctx, dyq, dyk):
        needs = ctx.needs_input_grad[:4]
        q, k, *weights, cos, sin = ctx.saved_tensors
        grads = norm_rope_bwd(
            dyq, dyk, q, k, *_contiguous(*weights), cos, sin, *ctx.layout, *ctx.options, *needs
        )
        return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * 7


def _contiguous(*weights):
    return (None if w is None else w.contiguous() for w in weights)


def liger_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    unsqueeze_dim: int = 1,
    interleaved: bool | str = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise each head of q and k (RMSNorm), then rotate them, as in Qwen3 and Gemma 3.

    The same as ``liger_rotary_pos_emb(liger_rms_norm(q, q_weight, ...), liger_rms_norm(k, k_weight,
    ...), cos, sin)``, but q and k are read and written once.

    Args:
        q, k: (B, h, T, D) and (B, h_k, T, D), fp32, bf16 or fp16, of any strides. With
            ``unsqueeze_dim=2``: (B, T, h, D) and (B, T, h_k, D).
        q_weight, k_weight: (D,), any floating dtype, or None for no weight (``offset`` is not used
            then).
        cos, sin: (T, w), (1, T, w) or (B, T, w); or one of these with a dimension of size 1 where q
            has its heads. They get no gradient. The first w entries of a head are rotated, the
            others are only normalised.
        eps: added to the mean square.
        offset: added to the weights: 0 for Qwen3, 1 for Gemma 3.
        casting_mode: where the norm rounds: "llama" (Qwen3), "gemma" or "none".
        unsqueeze_dim: the dimension of q and k that holds the heads.
        interleaved: which entries form a pair: False, True or "repeated", see
            `liger_rotary_pos_emb`.

    Returns:
        q and k normalised and rotated, in new tensors with the dtype and memory layout of q and k.

    Raises:
        ValueError, TypeError: as `liger_rotary_pos_emb` and `liger_rms_norm`.

    Source: arXiv:2010.04245 (norm), arXiv:2104.09864 (RoPE).
    """
    check_casting(NAME, casting_mode)
    eps = check.non_negative(NAME, "eps", eps)
    offset = check.finite(NAME, "offset", offset)
    check.floats(NAME, dict(q=q, k=k), q_weight=q_weight, k_weight=k_weight)
    for name, weight, x in (("q_weight", q_weight, q), ("k_weight", k_weight, k)):
        if weight is not None and weight.shape != x.shape[-1:]:
            raise ValueError(
                f"{NAME}: {name} has shape {tuple(weight.shape)}, head size is {x.shape[-1]}"
            )
    run = LigerNormRopeFunction.call if devices.has_kernels(q) else norm_rope_reference
    return run(
        q, k, q_weight, k_weight, cos, sin, eps, offset, casting_mode, unsqueeze_dim, interleaved
    )


def _inputs(B, T, HQ, HK, D):
    rope = case_inputs(B, T, HQ, HK, D)
    return dict(
        q=rope["q"],
        k=rope["k"],
        q_weight=torch.randn(D).requires_grad_(),
        k_weight=torch.randn(D).requires_grad_(),
        cos=rope["cos"],
        sin=rope["sin"],
    )


def _case_function(norm_rope):
    """Call ``norm_rope`` with the case's options, which hold for every shape."""

    def call(
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        partial=False,
        interleaved=False,
        casting="llama",
        offset=0.0,
        unsqueeze_dim=1,
    ):
        cos, sin = case_angles(cos, sin, partial, interleaved)
        q = swap_heads(q, unsqueeze_dim)
        k = swap_heads(k, unsqueeze_dim)
        return norm_rope(
            q, k, q_weight, k_weight, cos, sin, 1e-6, offset, casting, unsqueeze_dim, interleaved
        )

    return call


def _traffic(inputs):
    rows, angles = case_bytes(inputs)
    return 2 * rows + angles, 3 * rows + angles  # backward also reads the incoming gradients


CASES.append(
    Case(
        "norm_rope",
        fn=_case_function(liger_norm_rope),
        reference=_case_function(norm_rope_reference),
        inputs=_inputs,
        shapes=((1, 1, 1, 1, 16), (2, 5, 3, 1, 12), (9, 2, 6, 2, 8), (2, 3, 40, 8, 24)),
        options=(
            dict(),
            dict(casting="gemma", offset=1.0),
            dict(casting="none", unsqueeze_dim=2),
            dict(q_weight=None, k_weight=None),
            dict(partial=True),
            dict(interleaved=True),
            dict(interleaved="repeated", partial=True),
        ),
        bench=((1, 32768, 32, 8, 128), (4, 2048, 32, 8, 128)),
        traffic=_traffic,
        fp32_roundings=2,  # one of each of the two operators
    )
)
