r"""Forward and backward of a linear head: each token's loss, and dh, dW and db.

    X = h·Wᵀ + b,   per token: loss, log-sum-exp, entropy, ...   (`logits` has the formulas)

1. A public function checks its arguments and makes `HeadInputs` (tensors) and `HeadOptions`.
2. `run_forward` takes the hidden states a chunk of tokens at a time (`chunks.run_chunks`): it
   computes the chunk's logits, fills in its tokens' losses and, if gradients are needed now,
   overwrites the logits with their gradient and adds that to dh, dW and db.
3. `run_backward` does the same where each token has an incoming gradient of its own: it computes a
   chunk's logits again and overwrites them with their gradient.
4. `run_forward_keeping_logits` and `run_backward_from_logits` have all logits in memory at once,
   and compute them once.
5. On Hopper, loss and gradient are a kernel each, which never stores the logits (`hopper`).
6. A weight that must be copied to another dtype, without room for it, is taken a tile of classes at
   a time (`class_tiles`).

torch.library takes flat arguments. So each of these functions is a custom op, to which the records
are passed through `_flatten`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_kernel.core.op import cast_if_needed, custom_op
from liger_kernel.core.parallel import size_and_rank
from liger_kernel.ops.head import class_tiles, hopper
from liger_kernel.ops.head.chunks import (
    compute_all_logits,
    empty_gradients,
    empty_logits,
    gradients_from_all_logits,
    plan_for,
    run_chunks,
)
from liger_kernel.ops.head.hopper import Product
from liger_kernel.ops.head.logits import (
    TokenOptions,
    normalisers,
    tile_loss,
    token_gradient,
    token_loss,
)
from liger_kernel.ops.head.planning import divides_at_end

NO_GRADIENTS = (False, False, False)

# ---- records ----


class HeadInputs(NamedTuple):
    """The tensors of a linear head and its loss."""

    hidden: torch.Tensor  # (M, H)
    weight: torch.Tensor  # (V, H)
    bias: torch.Tensor | None  # (V,)
    target: torch.Tensor  # (M,) class indices
    class_weight: torch.Tensor | None  # (V,)


class RequestedOutputs(NamedTuple):
    """The outputs of each token that a caller asks for beside its loss and statistics."""

    z_loss: bool = False
    target_prob: bool = False
    entropy: bool = False
    mean_logit: bool = False
    predicted: bool = False
    log_sum_sq_probs: bool = False


class HeadOptions(NamedTuple):
    """The options of a linear head and its loss.

    token: of each token's loss.
    dtype: of the logits.
    accum_dtype: in which dW is added up over the chunks; None: `planning` chooses.
    memory: bytes beyond the gradients, or -1 for "auto": see `planning.parse_memory`.
    group: name of the process group over whose ranks the classes are spread, or None.
    mean: divide the losses by the number (or class weight) of the valid tokens.
    token_scaling: multiply each loss by the probability of its target (DFT).
    requested: outputs beside the loss.
    keep_logits: keep all logits for backward if they fit into ``memory``.
    """

    token: TokenOptions
    dtype: torch.dtype
    accum_dtype: torch.dtype | None = None
    memory: int = -1
    group: str | None = None
    mean: bool = False
    token_scaling: bool = False
    requested: RequestedOutputs = RequestedOutputs()
    keep_logits: bool = False


class HeadOutputs(NamedTuple):
    """The outputs of forward, in fp32. An output that was not requested has no elements."""

    loss: torch.Tensor  # (M,)
    stats: torch.Tensor  # (M, 2): max and log-sum, which add up to the log-sum-exp
    norm: torch.Tensor  # (4,): see `logits.normalisers`
    z_loss: torch.Tensor  # (M,), as all that follow
    target_prob: torch.Tensor
    entropy: torch.Tensor
    mean_logit: torch.Tensor
    predicted: torch.Tensor  # int64
    log_sum_sq_probs: torch.Tensor


class Statistics(NamedTuple):
    """The outputs of forward from which backward computes the gradient of a token's logits."""

    norm: torch.Tensor
    stats: torch.Tensor
    entropy: torch.Tensor | None = None


class TokenGradients(NamedTuple):
    """Incoming gradients of each token's outputs, (M,). That of the losses may be 0-d."""

    loss: torch.Tensor
    entropy: torch.Tensor | None = None
    logsumexp: torch.Tensor | None = None


def _flatten(options):
    """Return `HeadOptions` as the plain values that the custom ops take."""
    token = options.token
    return (
        token.ignore_index,
        [token.lse_square_scale, token.label_smoothing, token.softcap or 0.0, token.logit_scale],
        options.dtype,
        options.accum_dtype,
        options.memory,
        options.group,
        options.mean,
        options.token_scaling,
        list(options.requested),
    )


def _unflatten(
    ignore_index, scalars, dtype, accum_dtype, memory, group, mean, token_scaling, requested
):
    """Return the `HeadOptions` of which `_flatten` has made these values."""
    return HeadOptions(
        TokenOptions(ignore_index, *scalars),
        dtype,
        accum_dtype,
        memory,
        group,
        mean,
        token_scaling,
        RequestedOutputs(*requested),
    )


# ---- forward ----


def run_forward(inputs, options, needs=NO_GRADIENTS, num_items=None, spare=-1):
    """Compute each token's outputs, and the gradients of the sum of the losses, chunk by chunk.

    Args:
        needs: which of dh, dW and db to compute.
        num_items: 0-d; the losses are divided by it instead of the number of valid tokens.
        spare: as in `planning.plan`.

    Returns:
        `HeadOutputs` and (dh, dW, db), empty where not needed. They are multiplied by n₀
        (``norm[0]``) if `planning.divides_at_end`.
    """
    outputs = head_fwd(*inputs, num_items, *_flatten(options), spare, list(needs))
    num_outputs = len(HeadOutputs._fields)
    return HeadOutputs(*outputs[:num_outputs]), outputs[num_outputs:]


def run_forward_keeping_logits(inputs, options, num_items=None):
    """Return `HeadOutputs` and all logits, (V, tokens with padding)."""
    *outputs, logits = head_fwd_kept(*inputs, num_items, *_flatten(options))
    return HeadOutputs(*outputs), logits


def _empty_forward(hidden, weight, bias, target, class_weight, num_items, *flat):
    *flat_options, spare, needs = flat
    options = _unflatten(*flat_options)
    inputs = HeadInputs(hidden, weight, bias, target, class_weight)
    norm = hidden.new_empty(4, dtype=torch.float32)
    outputs = _allocate_outputs(inputs, options.requested, norm)
    return *outputs, *empty_gradients(hidden, weight, options.dtype, options.accum_dtype, needs)


@custom_op("linear_head", _empty_forward)
def head_fwd(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    ignore_index: int,
    scalars: list[float],
    dtype: torch.dtype,
    accum_dtype: torch.dtype | None,
    memory: int,
    group: str | None,
    mean: bool,
    token_scaling: bool,
    requested: list[bool],
    spare: int,
    needs: list[bool],
) -> tuple[(torch.Tensor,) * 12]:
    """Run `run_forward` with flat arguments. Returns the fields of `HeadOutputs`, dh, dW and db."""
    inputs = HeadInputs(hidden, weight, bias, target, class_weight)
    options = _unflatten(
        ignore_index, scalars, dtype, accum_dtype, memory, group, mean, token_scaling, requested
    )
    plan = plan_for(hidden, weight, dtype, accum_dtype, memory, needs[1], spare=spare)
    stores_logits = (
        any(needs)
        or reads_logits(options)
        or not hopper.applies(hidden, weight, class_weight, options)
    )

    def for_each_chunk(logits_to_gradient):
        if not any(needs) and class_tiles.applies(hidden, weight, options):
            class_tiles.run_forward(hidden, weight, dtype, memory, logits_to_gradient)
            return empty_gradients(hidden, weight, dtype, accum_dtype, needs)
        if stores_logits:
            return run_chunks(hidden, weight, None, dtype, plan, logits_to_gradient, needs, group)
        hopper.run_products(hidden, weight, dtype, plan.rows, logits_to_gradient)
        return empty_gradients(hidden, weight, dtype, accum_dtype, needs)

    outputs, grads = _forward(for_each_chunk, inputs, options, needs, num_items)
    return *outputs, *grads


def reads_logits(options) -> bool:
    """Return True if forward needs stored logits for its outputs.

    Then backward needs them, too: see `hopper`.
    """
    requested = options.requested
    return (
        options.token_scaling
        or requested.target_prob
        or requested.mean_logit
        or requested.predicted
        or requested.log_sum_sq_probs
    )


def _forward(for_each_chunk, inputs, options, needs, num_items):
    """Compute the outputs of all tokens, whose logits ``for_each_chunk`` makes.

    ``for_each_chunk(logits_to_gradient)`` calls that function with the tokens and the logits of
    each chunk, and returns the gradients. Returns `HeadOutputs` and these.
    """
    hidden, weight, bias, target, class_weight = inputs
    token_options = options.token
    world_size = size_and_rank(options.group)[0]
    num_classes = weight.shape[0] * world_size
    norm = normalisers(
        target, class_weight, num_classes, token_options.ignore_index, options.mean, num_items
    )
    outputs = _allocate_outputs(inputs, options.requested, norm)
    extra_outputs = {
        name: getattr(outputs, name)
        for name, requested in zip(RequestedOutputs._fields, options.requested, strict=True)
        if requested
    }
    if options.token_scaling and any(needs) and "target_prob" not in extra_outputs:
        extra_outputs["target_prob"] = torch.empty_like(outputs.loss)
    undivided = divides_at_end(hidden, weight, options.dtype)
    chunk_norm = norm
    if undivided:
        chunk_norm = torch.stack((norm[0] / norm[0], norm[1] / norm[0], norm[2], norm[3]))

    def logits_to_gradient(rows, x):
        """Fill in the outputs of tokens ``rows``; overwrite their logits x with the gradient."""
        chunk_target = target[rows]
        chunk_loss = outputs.loss[rows]
        chunk_stats = outputs.stats[rows]
        chunk_outputs = {name: output[rows] for name, output in extra_outputs.items()}
        if isinstance(x, Product):
            hopper.token_loss(
                x,
                chunk_target,
                chunk_norm,
                token_options,
                chunk_loss,
                chunk_stats,
                **chunk_outputs,
                bias=bias,
            )
            return
        compute_loss = tile_loss if isinstance(x, class_tiles.LogitTiles) else token_loss
        compute_loss(
            x,
            chunk_target,
            class_weight,
            chunk_norm,
            token_options,
            chunk_loss,
            chunk_stats,
            **chunk_outputs,
            token_scaling=options.token_scaling,
            group=options.group,
            bias=bias,
        )
        if any(needs):
            token_gradient(
                chunk_outputs["target_prob"] if options.token_scaling else None,
                x,
                chunk_target,
                class_weight,
                chunk_norm,
                chunk_stats,
                x,
                token_options,
                group=options.group,
                bias=bias,
            )

    grads = for_each_chunk(logits_to_gradient)
    if undivided:
        outputs.loss.div_(norm[0])
        if options.requested.z_loss:
            outputs.z_loss.div_(norm[0])
    return outputs, grads


def _allocate_outputs(inputs, requested, norm):
    """Return `HeadOutputs` to be filled. An output that is not requested has no elements."""
    M = inputs.hidden.shape[0]

    def per_token(is_requested):
        return inputs.hidden.new_empty(M if is_requested else 0, dtype=torch.float32)

    return HeadOutputs(
        loss=per_token(True),
        stats=inputs.hidden.new_empty((M, 2), dtype=torch.float32),
        norm=norm,
        z_loss=per_token(requested.z_loss),
        target_prob=per_token(requested.target_prob),
        entropy=per_token(requested.entropy),
        mean_logit=per_token(requested.mean_logit),
        predicted=inputs.target.new_empty(M if requested.predicted else 0, dtype=torch.int64),
        log_sum_sq_probs=per_token(requested.log_sum_sq_probs),
    )


def _empty_kept_forward(hidden, weight, bias, target, class_weight, num_items, *flat_options):
    options = _unflatten(*flat_options)
    inputs = HeadInputs(hidden, weight, bias, target, class_weight)
    norm = hidden.new_empty(4, dtype=torch.float32)
    outputs = _allocate_outputs(inputs, options.requested, norm)
    return *outputs, empty_logits(hidden, weight, options.dtype)


@custom_op("linear_head_kept", _empty_kept_forward)
def head_fwd_kept(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    ignore_index: int,
    scalars: list[float],
    dtype: torch.dtype,
    accum_dtype: torch.dtype | None,
    memory: int,
    group: str | None,
    mean: bool,
    token_scaling: bool,
    requested: list[bool],
) -> tuple[(torch.Tensor,) * 10]:
    """Run `run_forward_keeping_logits` with flat arguments."""
    inputs = HeadInputs(hidden, weight, bias, target, class_weight)
    options = _unflatten(
        ignore_index, scalars, dtype, accum_dtype, memory, group, mean, token_scaling, requested
    )
    logits = compute_all_logits(hidden, weight, dtype)

    def for_each_chunk(read_logits):
        read_logits(slice(None), logits[:, : len(hidden)].t())
        return ()

    outputs, _ = _forward(for_each_chunk, inputs, options, NO_GRADIENTS, num_items)
    return *outputs, logits


# ---- backward ----


def run_backward(token_grads, inputs, statistics, options, needs, forward_read_logits):
    """Compute the gradients for incoming `TokenGradients`, chunk by chunk.

    Args:
        statistics: `Statistics` of forward.
        needs: which of dh, dW and db to compute.
        forward_read_logits: forward had stored logits.

    Returns:
        (dh, dW, db), empty where not needed.
    """
    return head_bwd(
        *token_grads, *inputs, *statistics, *_flatten(options), forward_read_logits, list(needs)
    )


def run_backward_from_logits(
    token_grads, logits, inputs, statistics, options, needs, in_place=False
):
    """Compute the gradients from the logits that `run_forward_keeping_logits` has returned.

    ``in_place``: the logits are overwritten. A graph must not do that.
    """
    return head_bwd_kept(
        *token_grads, logits, *inputs, *statistics, *_flatten(options), list(needs), in_place
    )


def _gradient_writer(token_grads, inputs, statistics, options):
    """Return ``write_gradient(rows, x, dx)``, which computes the gradient of some tokens' logits.

    It overwrites the logits x if dx is None. If x is a `Product`, the gradient goes to dx. With
    ``classes``, a slice, x are the logits of these alone.
    """
    g, g_entropy, g_lse = token_grads
    norm, stats, entropy = statistics

    def write_gradient(rows, x, dx=None, classes=None):
        bias = inputs.bias
        place = None
        if classes is not None:
            bias = None if bias is None else bias[classes]
            place = len(inputs.weight), classes.start
        chunk_g = g[rows] if g.dim() else g
        chunk_g_entropy = None if g_entropy is None else g_entropy[rows]
        chunk_g_lse = None if g_lse is None else g_lse[rows]
        chunk_entropy = None if entropy is None else entropy[rows]
        if isinstance(x, Product):
            hopper.token_gradient(
                chunk_g,
                x,
                inputs.target[rows],
                norm,
                stats[rows],
                dx,
                options.token,
                g_entropy=chunk_g_entropy,
                g_lse=chunk_g_lse,
                entropy=chunk_entropy,
                bias=bias,
            )
            return
        token_gradient(
            chunk_g,
            x,
            inputs.target[rows],
            inputs.class_weight,
            norm,
            stats[rows],
            x if dx is None else dx,
            options.token,
            g_entropy=chunk_g_entropy,
            g_lse=chunk_g_lse,
            entropy=chunk_entropy,
            group=options.group,
            bias=bias,
            place=place,
        )

    return write_gradient


def _empty_backward(
    g, g_entropy, g_lse, hidden, weight, bias, target, class_weight, norm, stats, entropy, *flat
):
    *flat_options, _, needs = flat
    options = _unflatten(*flat_options)
    return empty_gradients(hidden, weight, options.dtype, options.accum_dtype, needs)


@custom_op("linear_head_backward", _empty_backward)
def head_bwd(
    g: torch.Tensor,
    g_entropy: torch.Tensor | None,
    g_lse: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    norm: torch.Tensor,
    stats: torch.Tensor,
    entropy: torch.Tensor | None,
    ignore_index: int,
    scalars: list[float],
    dtype: torch.dtype,
    accum_dtype: torch.dtype | None,
    memory: int,
    group: str | None,
    mean: bool,
    token_scaling: bool,
    requested: list[bool],
    forward_read_logits: bool,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `run_backward` with flat arguments."""
    options = _unflatten(
        ignore_index, scalars, dtype, accum_dtype, memory, group, mean, token_scaling, requested
    )
    write_gradient = _gradient_writer(
        TokenGradients(g, g_entropy, g_lse),
        HeadInputs(hidden, weight, bias, target, class_weight),
        Statistics(norm, stats, entropy),
        options,
    )
    if class_tiles.applies(hidden, weight, options):
        return class_tiles.run_backward(
            hidden, weight, dtype, accum_dtype, memory, write_gradient, needs
        )
    plan = plan_for(hidden, weight, dtype, accum_dtype, memory, needs[1])
    stores_logits = forward_read_logits or not hopper.applies(hidden, weight, class_weight, options)
    return run_chunks(
        hidden,
        weight,
        None,
        dtype,
        plan,
        write_gradient,
        needs,
        group,
        stores_logits=stores_logits,
    )


def _empty_kept_backward(g, g_entropy, g_lse, logits, *args):
    *args, needs, in_place = args
    return _empty_backward(g, g_entropy, g_lse, *args, None, needs)


@custom_op("linear_head_kept_backward", _empty_kept_backward)
def head_bwd_kept(
    g: torch.Tensor,
    g_entropy: torch.Tensor | None,
    g_lse: torch.Tensor | None,
    logits: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    norm: torch.Tensor,
    stats: torch.Tensor,
    entropy: torch.Tensor | None,
    ignore_index: int,
    scalars: list[float],
    dtype: torch.dtype,
    accum_dtype: torch.dtype | None,
    memory: int,
    group: str | None,
    mean: bool,
    token_scaling: bool,
    requested: list[bool],
    needs: list[bool],
    in_place: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `run_backward_from_logits` with flat arguments."""
    options = _unflatten(
        ignore_index, scalars, dtype, accum_dtype, memory, group, mean, token_scaling, requested
    )
    write_gradient = _gradient_writer(
        TokenGradients(g, g_entropy, g_lse),
        HeadInputs(hidden, weight, bias, target, class_weight),
        Statistics(norm, stats, entropy),
        options,
    )
    dlogits = logits if in_place else torch.empty_like(logits)
    num_tokens = len(hidden)
    write_gradient(slice(None), logits[:, :num_tokens].t(), dlogits[:, :num_tokens].t())
    return gradients_from_all_logits(dlogits, hidden, weight, accum_dtype, needs)


def cast_gradients(grads, inputs, needs):
    """Return dh, dW and db in the dtypes of hidden, weight and bias; None where not needed."""
    return tuple(
        cast_if_needed(grad, tensor.dtype) if need else None
        for grad, tensor, need in zip(grads, inputs[:3], needs, strict=True)
    )
