"""Each token's cross entropy under a linear head, and its log-probability, which is minus that.

The loss and what goes with it, such as the log-sum-exp and the entropy, are functions of a token's
logits h·Wᵀ + b: the module `logits` has the formulas. The steps of a call:

1. `token_log_probs` calls `linear_token_loss`, which checks the arguments and puts all options into
   one record, `HeadOptions`.
2. `drop_ignored_rows` leaves out ignored tokens: with ``drop_ignored=True``, or by default if the
   targets are on the CPU.
3. `LinearTokenLossFunction.forward` takes the tokens a chunk at a time: it computes the chunk's
   logits, and from these each token's loss and statistics (`linear_head.run_forward`).
4. In forward the gradients cannot be computed, because each token will have an incoming gradient of
   its own. So backward computes each chunk's logits again, overwrites them with their gradient, and
   adds up dh, dW and db (`linear_head.run_backward`). If the caller gives a number as ``memory``
   and all logits fit into it, forward keeps them for backward. A frozen head, as LoRA has it, needs
   dh alone: forward computes it for incoming gradients of 1, and backward scales its rows
   (`unit_gradients`).
5. On a device without kernels, `linear_head_reference` does all this in PyTorch.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import (
    CASES,
    Case,
    Function,
    flatten_to_2d,
    no_saved_tensor_hooks,
    saved_grads,
)
from liger_kernel.core.parallel import (
    group_name,
    size_and_rank,
    to_local_shards,
)
from liger_kernel.ops.head.chunks import all_logits_bytes
from liger_kernel.ops.head.cross_entropy import (
    check_options,
    check_target_shapes,
    check_targets,
    make_class_weights,
    random_labels,
)
from liger_kernel.ops.head.linear_head import (
    NO_GRADIENTS,
    HeadInputs,
    HeadOptions,
    RequestedOutputs,
    Statistics,
    TokenGradients,
    cast_gradients,
    reads_logits,
    run_backward,
    run_backward_from_logits,
    run_forward,
    run_forward_keeping_logits,
)
from liger_kernel.ops.head.linear_head_reference import (
    compute_dtype,
    run_reference_in_chunks,
    token_reference,
)
from liger_kernel.ops.head.logits import TokenOptions
from liger_kernel.ops.head.planning import parse_memory
from liger_kernel.ops.head.unit_gradients import (
    are_worthwhile,
    early_needs,
    history_of,
    is_frozen,
    scale_unit_gradients,
)

# ---- the arguments ----


def check_head(name, hidden, weight, bias, target, class_weight, group=None, hidden_name="hidden"):
    """Raise if dtypes, devices or shapes do not fit together. The target may be on the CPU.

    ``name``: the public function; ``hidden_name``: its argument for ``hidden``. Both are for the
    error message."""
    required = {hidden_name: hidden, "weight": weight}
    check.floats(name, required, bias=bias, **{"class weight": class_weight})
    check.integers(name, dict(target=target))
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{name}: the hidden states have shape {tuple(hidden.shape)} and the weight "
            f"{tuple(weight.shape)}, give (rows, hidden size) and (classes, hidden size)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{name}: bias has shape {tuple(bias.shape)}, "
            f"give one number a class: ({weight.shape[0]},)"
        )
    world_size, _ = size_and_rank(group)
    num_classes = weight.shape[0] * world_size
    check_target_shapes(name, hidden, target, class_weight, num_classes)


def drop_ignored_rows(hidden, target, ignore_index, drop_ignored):
    """Leave out the rows whose target is ``ignore_index``.

    ``drop_ignored`` None: only if the targets are on the CPU and nothing is compiled. On a GPU the
    host would wait until the rows are found; in a graph a shape would depend on data.

    Returns:
        The indices of the rows that are kept, or None for all; their hidden states; their targets.
    """
    target = target.long()
    is_compiling = torch.compiler.is_compiling()
    if drop_ignored is None:
        drop_ignored = target.device.type == "cpu" and not is_compiling
    if not drop_ignored:
        return None, hidden, target.to(hidden.device)
    kept_rows = (target != ignore_index).nonzero().squeeze(1)
    if not is_compiling and kept_rows.numel() == target.numel():
        return None, hidden, target.to(hidden.device)
    target = target[kept_rows].to(hidden.device, non_blocking=True)
    kept_rows = kept_rows.to(hidden.device, non_blocking=True)
    return kept_rows, hidden.index_select(0, kept_rows), target


def restore_rows(output, kept_rows, num_rows, ignored_value):
    """Scatter an output of the kept rows to all rows, and fill the others with a value."""
    if kept_rows is None:
        return output
    return output.new_full((num_rows,), ignored_value).index_copy(0, kept_rows, output)


# ---- the reference ----


def linear_token_loss_reference(
    hidden,
    weight,
    target,
    bias=None,
    class_weights=False,
    temperature=1.0,
    softcap=0.0,
    logit_scale=1.0,
    **options,
):
    """Compute what `_case_fn` returns, in PyTorch and from all logits at once.

    ``class_weights``: True for random ones."""
    # temperature and scale as in `linear_token_loss`
    token_options = TokenOptions(
        softcap=softcap / temperature, logit_scale=logit_scale / temperature, **options
    )
    class_weight = make_class_weights(weight, class_weights)
    loss, logsumexp, entropy, z_loss, _correct, _predicted, mean_logit, _ = token_reference(
        hidden, weight, bias, target, class_weight, token_options
    )
    return loss, logsumexp, entropy, z_loss, mean_logit


def head_inputs(M, H, V, names=("hidden", "weight", "bias")):
    """Return random inputs of a `Case`, by the names that the operator has for its arguments."""
    # the factor 2: logits without bias have a standard deviation of 2
    tensors = torch.randn(M, H), torch.randn(V, H) * 2 / H**0.5, torch.randn(V)
    inputs = {name: t.requires_grad_() for name, t in zip(names, tensors, strict=True)}
    return inputs | dict(target=random_labels(M, V))


# ---- the autograd Function ----


class LinearTokenLossFunction(Function):
    """Autograd Function of `linear_token_loss`.

    ``apply(hidden, weight, bias, target, class_weight, options, history=None)`` returns loss,
    logsumexp, entropy, z_loss, predicted, mean_logit and log_sum_sq_probs. The first three are
    differentiable. ``options`` are `HeadOptions`. An output that they do not request has no
    elements. With a `GradientHistory` forward may compute unit gradients.
    """

    @staticmethod
    def reference(hidden, weight, bias, target, class_weight, options, history=None):
        def reference_chunk(hidden, target):
            return token_reference(
                hidden,
                weight,
                bias,
                target,
                class_weight,
                options.token,
                options.group,
                options.dtype,
            )

        loss, logsumexp, entropy, z_loss, _correct, *others = run_reference_in_chunks(
            reference_chunk, hidden, target
        )
        return loss, logsumexp, entropy, z_loss, *others

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, class_weight, options, history=None):
        target = target.contiguous()
        class_weight = None if class_weight is None else class_weight.contiguous()
        inputs = HeadInputs(hidden, weight, bias, target, class_weight)
        ctx.needs = list(ctx.needs_input_grad[:3])
        early = NO_GRADIENTS
        if (
            options.keep_logits
            and any(ctx.needs)
            and options.group is None
            and no_saved_tensor_hooks()  # False also in a checkpoint and under torch.compile
            and options.memory >= _kept_bytes(hidden, weight, options.dtype)
        ):
            outputs, ctx.forward_grads = run_forward_keeping_logits(inputs, options)
        else:
            early = early_needs(history, ctx.needs, options, hidden, weight, options.dtype)
            if any(early) and not are_worthwhile(hidden, weight, options, early):
                early = NO_GRADIENTS
            outputs, unit_grads = run_forward(inputs, options, early)
            ctx.forward_grads = unit_grads if any(early) else None
        # The unit gradients, or the logits in the place of gradients: backward takes them by
        # `saved_grads`, and overwrites them.
        ctx.has_unit_grads = any(early)
        # if forward used stored logits, backward must, too (`hopper`)
        ctx.forward_read_logits = ctx.forward_grads is not None or reads_logits(options)
        ctx.options = options
        ctx.history = history
        entropy = outputs.entropy if options.requested.entropy else None
        # norm: the four numbers of `logits.normalisers`
        ctx.save_for_backward(*inputs, outputs.norm, outputs.stats, entropy)
        ctx.mark_non_differentiable(
            outputs.z_loss, outputs.predicted, outputs.mean_logit, outputs.log_sum_sq_probs
        )
        ctx.set_materialize_grads(False)
        return (
            outputs.loss,
            outputs.stats.sum(1),  # the log-sum-exp: the maximum, and the log of the sum
            outputs.entropy,
            outputs.z_loss,
            outputs.predicted,
            outputs.mean_logit,
            outputs.log_sum_sq_probs,
        )

    @staticmethod
    def weight_in_backward(weight, bias):
        """Return a context in which weight and bias are whole. A subclass may gather them."""
        return contextlib.nullcontext()

    @staticmethod
    def arguments(ctx):  # of `reference`, which is differentiated with create_graph=True
        return *ctx.saved_tensors[:5], ctx.options

    @staticmethod
    def backward(ctx, grad_loss, grad_logsumexp, grad_entropy, *_):
        hidden, weight, bias, target, class_weight, norm, stats, entropy = ctx.saved_tensors
        inputs = HeadInputs(hidden, weight, bias, target, class_weight)
        statistics = Statistics(norm, stats, entropy)
        if entropy is None or grad_entropy is None:
            grad_entropy = None  # an entropy that was not requested has no elements
        else:
            grad_entropy = grad_entropy.contiguous()
        if grad_logsumexp is not None:
            grad_logsumexp = grad_logsumexp.contiguous()
        token_grads = TokenGradients(grad_loss, grad_entropy, grad_logsumexp)
        if all(grad is None for grad in token_grads):
            return (None,) * 7
        # also around gradients that do not need the weight: all ranks take part in a gather
        whole_weight = contextlib.nullcontext()
        if not torch.compiler.is_compiling():
            whole_weight = ctx._forward_cls.weight_in_backward(weight, bias)
        with whole_weight:
            grads = _scale_or_run_backward(ctx, token_grads, inputs, statistics)
        return *grads, None, None, None, None


def _kept_bytes(hidden, weight, dtype):
    """Return the bytes of all logits, and of a copy of the weight where it has another dtype."""
    copied = 0 if weight.dtype == dtype else weight.numel() * dtype.itemsize
    return all_logits_bytes(hidden, weight, dtype) + copied


def _scale_or_run_backward(ctx, token_grads, inputs, statistics):
    """Return dh, dW and db, None where not needed."""
    grad_loss = token_grads.loss
    has_others = token_grads.entropy is not None or token_grads.logsumexp is not None
    is_one_number = False
    if ctx.history is not None:
        is_one_number = ctx.history.record(grad_loss, has_others, ctx.needs)
    if ctx.has_unit_grads and ctx.forward_grads is not None:
        grads = None
        if not has_others:
            row_grads = grad_loss
            if is_frozen(ctx.needs):  # an ignored row's is 0, whatever comes in
                row_grads = grad_loss.where(inputs.target != ctx.options.token.ignore_index, 0)
            grads = scale_unit_gradients(ctx, row_grads, is_one_number, inputs[:3])
        if grads is not None:
            return grads
        ctx.forward_grads = None  # not for these incoming gradients: make room
    if grad_loss is None:  # which would mean 1 to the kernels
        zeros = statistics.stats.new_zeros(statistics.stats.shape[0])
        token_grads = token_grads._replace(loss=zeros)

    logits = None
    if ctx.forward_grads is not None:
        logits, can_overwrite = saved_grads(ctx, 1)
        if not can_overwrite:
            # The graph is kept for another backward, so the logits must stay as they are. A copy of
            # them would not fit into ``memory``: drop them, and compute them again.
            ctx.forward_grads = logits = None
    if logits is not None:
        grads = run_backward_from_logits(
            token_grads, logits, inputs, statistics, ctx.options, ctx.needs, in_place=True
        )
    else:
        grads = run_backward(
            token_grads,
            inputs,
            statistics,
            ctx.options,
            ctx.needs,
            forward_read_logits=ctx.forward_read_logits,
        )
    return cast_gradients(grads, inputs, ctx.needs)


# ---- the public functions ----


@dataclass
class TokenOutputs:
    """The outputs of `linear_token_loss`, (M,) each, None where not asked for."""

    loss: torch.Tensor
    logsumexp: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    correct: torch.Tensor | None = None
    predicted: torch.Tensor | None = None
    mean_logit: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None


def linear_token_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weight: torch.Tensor | None = None,
    lse_square_scale: float = 0.0,
    return_logsumexp: bool = False,
    return_entropy: bool = False,
    return_z_loss: bool = False,
    return_accuracy: bool = False,
    return_predicted: bool = False,
    return_mean_logit: bool = False,
    return_log_sum_sq_probs: bool = False,
    accum_dtype: torch.dtype | None = None,
    memory: int | str = "auto",
    drop_ignored: bool | None = None,
    group: object = None,
):
    """Compute each token's cross entropy under a linear head, and more if asked for.

    The logits of all tokens are not in memory at once, unless ``memory`` is a number that is large
    enough.

    Args:
        hidden: (M, H) hidden states, fp32, bf16 or fp16; any strides.
        weight: (V, H) of the head. Logits are computed in its dtype, or autocast's where it is on.
        target: (M,) class indices. They may be on the CPU.
        bias: (V,).
        logit_scale: the logits are multiplied by it.
        softcap: the scaled logits become ``softcap·tanh(logits / softcap)``. None: no cap.
        temperature: the logits are divided by it last.
        ignore_index: rows with this target are ignored: all their outputs are 0 (predicted: -1).
        label_smoothing: in [0, 1].
        class_weight: (V,), by which each class's part of a loss is multiplied.
        lse_square_scale: the loss has the z-loss lse_square_scale·logsumexp² added to it.
        return_logsumexp, return_entropy, return_z_loss, return_accuracy, return_predicted,
            return_mean_logit, return_log_sum_sq_probs: the outputs beside the loss;
            ``return_accuracy`` is for `correct`; log_sum_sq_probs is log Σ p² over the classes.
        accum_dtype: dtype in which dW is added up over the chunks of tokens. With torch.float32 dW
            is rounded once. None: fp32 if there are more than two chunks and ``memory`` has room,
            and always in fp16; otherwise weight's dtype.
        memory: bytes that the head may take beyond the gradients of hidden and weight. "auto" is
            the value of the environment variable LIGER_KERNEL_HEAD_MEMORY if it is set; otherwise
            enough that the head is fast and dW about as exact as PyTorch's
            (docs/linear-head.md). If a number is given here and the logits of all tokens fit into
            it, every call keeps them until its backward, except under torch.compile, in a
            checkpoint, with saved-tensor hooks or with a group. With ``retain_graph=True`` they are
            dropped, and computed again.
        drop_ignored: leave ignored rows out before the projection. None: only if the targets are on
            the CPU and nothing is compiled; elsewhere the host would wait for the device.
        group: a process group of torch.distributed whose ranks each hold an equal, contiguous shard
            of the classes: weight, bias and their gradients are this rank's. All else is the same
            on every rank; class indices and class_weight are of all classes. If hidden and weight
            are DTensors of one mesh, the group is that mesh's.

    Returns:
        `TokenOutputs`, (M,) each, in fp32 (predicted: int64, the lowest index on ties). Loss,
        log-sum-exp and entropy are differentiable in hidden, weight and bias.

    Raises:
        ValueError, TypeError: shapes or options that don't fit; a target out of range, if the
            targets are on the CPU or in debug mode (LIGER_KERNEL_DEBUG=1). Otherwise that row's
            loss is NaN.
    """
    name = "linear_token_loss"
    ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale = check_options(
        name, "none", ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale
    )
    temperature = check.positive(name, "temperature", temperature)
    check.dtype(name, "accum_dtype", accum_dtype)
    hidden, weight, bias, group = to_local_shards(name, hidden, weight, bias, group)
    check_head(name, hidden, weight, bias, target, class_weight, group)
    check_targets(name, target, weight.shape[0] * size_and_rank(group)[0], ignore_index)
    num_rows = target.shape[0]
    kept_rows, hidden, target = drop_ignored_rows(hidden, target, ignore_index, drop_ignored)
    # c·tanh(s·x / c) / T is c/T·tanh(s/T·x / (c/T)): the temperature goes into scale and softcap
    options = HeadOptions(
        token=TokenOptions(
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            softcap=(softcap or 0.0) / temperature,
            logit_scale=logit_scale / temperature,
        ),
        dtype=compute_dtype(hidden, weight),
        accum_dtype=accum_dtype,
        memory=parse_memory(memory),
        group=group_name(group),
        requested=RequestedOutputs(
            z_loss=return_z_loss,
            entropy=return_entropy,
            mean_logit=return_mean_logit,
            predicted=return_accuracy or return_predicted,
            log_sum_sq_probs=return_log_sum_sq_probs,
        ),
        # for a number given here alone: the environment variable's holds for each call of a model
        keep_logits=memory != "auto",
    )
    history = None
    if not torch.compiler.is_compiling():
        history = history_of(name, tuple(weight.shape), options.requested)
    # torch.compile bypasses Function.apply, which would choose the reference or detach the inputs
    token_loss = LinearTokenLossFunction.call
    if not devices.has_kernels(hidden):
        token_loss = LinearTokenLossFunction.reference
    elif torch.compiler.is_compiling() and not torch.is_grad_enabled():
        # without gradients nothing is to be saved for backward
        hidden = hidden.detach()
        weight = weight.detach()
        bias = None if bias is None else bias.detach()
    loss, logsumexp, entropy, z_loss, predicted, mean_logit, log_sum_sq_probs = token_loss(
        hidden, weight, bias, target, class_weight, options, history
    )
    correct = None
    if return_accuracy:
        correct = ((predicted == target) & (target != ignore_index)).float()

    def output(x, is_requested=True, ignored_value=0):
        return restore_rows(x, kept_rows, num_rows, ignored_value) if is_requested else None

    return TokenOutputs(
        loss=output(loss),
        logsumexp=output(logsumexp, return_logsumexp),
        entropy=output(entropy, return_entropy),
        z_loss=output(z_loss, return_z_loss),
        correct=output(correct, return_accuracy),
        predicted=output(predicted, return_predicted, ignored_value=-1),
        mean_logit=output(mean_logit, return_mean_logit),
        log_sum_sq_probs=output(log_sum_sq_probs, return_log_sum_sq_probs),
    )


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    accum_dtype: torch.dtype | None = None,
    memory: int | str = "auto",
    drop_ignored: bool | None = None,
    group: object = None,
):
    """Compute log p(target | hidden) of each token under a linear head, and the entropy.

    The log-probability is minus the loss of `linear_token_loss`, and takes as much memory. DPO,
    GRPO and PPO are built from these log-probabilities. They are differentiable in hidden, weight
    and bias.

    Args:
        hidden: (..., H) hidden states.
        target: (...) class indices.

    The other arguments are those of `linear_token_loss`.

    Returns:
        log_probs (...) in fp32, 0 where the target is ``ignore_index``. With ``return_entropy``
        (log_probs, entropy), of the distribution of each token.
    """
    check.floats("token_log_probs", dict(hidden=hidden))
    check.integers("token_log_probs", dict(target=target))
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"token_log_probs: target has shape {tuple(target.shape)}, give one class for each of "
            f"the hidden states: {tuple(hidden.shape[:-1])}"
        )
    outputs = linear_token_loss(
        flatten_to_2d(hidden),
        weight,
        target.reshape(-1),
        bias,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        ignore_index=ignore_index,
        return_entropy=return_entropy,
        accum_dtype=accum_dtype,
        memory=memory,
        drop_ignored=drop_ignored,
        group=group,
    )
    log_probs = -outputs.loss.view(target.shape)
    return (log_probs, outputs.entropy.view(target.shape)) if return_entropy else log_probs


# ---- the case for tests and benchmarks ----


def _case_fn(hidden, weight, target, bias=None, class_weights=False, **options):
    outputs = linear_token_loss(
        hidden,
        weight,
        target,
        bias,
        class_weight=make_class_weights(weight, class_weights),
        **options,
        return_logsumexp=True,
        return_entropy=True,
        return_z_loss=True,
        return_mean_logit=True,
        drop_ignored=False,  # the kernels must see ignored rows in the interpreter, too
    )
    return outputs.loss, outputs.logsumexp, outputs.entropy, outputs.z_loss, outputs.mean_logit


CASES.append(
    Case(
        "linear_token_loss",
        fn=_case_fn,
        reference=linear_token_loss_reference,
        inputs=head_inputs,
        shapes=((1, 8, 8), (5, 24, 123), (70, 32, 513), (4, 16, 9000)),
        options=(
            dict(bias=None),
            dict(temperature=0.7, softcap=5.0),
            dict(
                class_weights=True,
                label_smoothing=0.1,
                lse_square_scale=1e-2,
                softcap=5.0,
                logit_scale=0.5,
            ),
        ),
        bench=((8192, 4096, 128256),),
        # logits twice, dh and dW: four products
        flops=lambda t: 8 * t["hidden"].numel() * t["weight"].shape[0],
        fp32_roundings=4,  # the logits are capped by a tanh that is good to 2 ulp
    )
)
