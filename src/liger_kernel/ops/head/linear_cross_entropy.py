r"""Cross entropy of a linear head, without its logits in memory (`chunks`).

1. `liger_fused_linear_cross_entropy` checks the arguments and leaves out ignored rows, if asked to.
2. For a scalar loss, forward computes the gradients while a chunk's logits are there. Backward only
   multiplies them by the incoming gradient (`forward_gradients`).
3. With reduction="none" each row has an incoming gradient of its own, and backward computes the
   logits again.
4. In a compiled graph a scalar loss of few logits keeps these for backward: see `keeps_logits`.
5. On a device without kernels, `linear_head_reference` does it in PyTorch.

Forward and backward of the head itself are in `linear_head`.

Sources: DFT's token scaling arXiv:2508.05629; the rest as in `cross_entropy`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, Function, saved_grads, saved_inputs
from liger_kernel.core.parallel import group_name, size_and_rank, to_local_shards
from liger_kernel.ops.head.chunks import all_logits_bytes
from liger_kernel.ops.head.cross_entropy import (
    ALL_OPTIONS,
    OutputOptions,
    check_class_weight,
    check_options,
    check_targets,
    cross_entropy_reference,
    make_class_weights,
    pack_outputs,
    unpack_outputs,
)
from liger_kernel.ops.head.forward_gradients import NUM_STORED, scale_gradient, store_gradients
from liger_kernel.ops.head.linear_head import (
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
    ROWS_WITHOUT_KERNELS,
    can_run_by_pytorch,
    compute_dtype,
    fused_linear_cross_entropy_in_chunks,
    linear_cross_entropy_by_pytorch,
)
from liger_kernel.ops.head.logits import TokenOptions
from liger_kernel.ops.head.planning import FREE_BYTES, divides_at_end, parse_memory
from liger_kernel.ops.head.token_log_probs import (
    check_head,
    drop_ignored_rows,
    head_inputs,
    restore_rows,
)

# ---- the reference ----


def fused_linear_cross_entropy_reference(
    input, weight, target, bias=None, ce_weight=None, **options
):
    """Compute what the operator computes, with its options, from all the logits at once.

    Returns:
        (loss, z_loss, token_accuracy, predicted_tokens).
    """
    dtype = compute_dtype(input, weight)
    x = F.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    options["loss_dtype"] = torch.promote_types(x.dtype, torch.float32)
    loss, z_loss, *counts = cross_entropy_reference(x, target, ce_weight, **options)
    return loss, None if z_loss is None else z_loss.to(input.dtype), *counts


# ---- with kernels ----


class ForwardState(NamedTuple):
    """Outputs of forward that backward needs, if forward does not compute the gradients."""

    stats: torch.Tensor  # as in `linear_head.HeadOutputs`
    norm: torch.Tensor
    target_prob: torch.Tensor
    options: HeadOptions
    divisor: torch.Tensor | None  # of the gradients that forward computes; None: 1


def fused_linear_cross_entropy_forward(
    _input,
    weight,
    target,
    ce_weight=None,
    bias=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    return_z_loss=False,
    accum_dtype=None,
    use_token_scaling=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    logit_scale=1.0,
    memory=-1,
    num_items=None,
    group=None,
    needs_grad=(False, False, False),
    keep=False,
    spare=-1,
):
    """Compute the loss and, if it is a scalar, its gradients. ``spare``: see `planning.plan`.

    Returns:
        (loss, z_loss, token_accuracy, predicted_tokens); (d_input, d_weight, d_bias); and a
        `ForwardState`. The gradients are those of loss·divisor. They are empty where not needed or
        where ``reduction`` is "none". With ``keep`` the logits are in their place: (logits,).
    """
    is_scalar = reduction != "none"
    options = HeadOptions(
        TokenOptions(ignore_index, lse_square_scale, label_smoothing, softcap, logit_scale),
        compute_dtype(_input, weight),
        accum_dtype,
        memory,
        group,
        mean=reduction == "mean",
        token_scaling=use_token_scaling,
        requested=RequestedOutputs(
            z_loss=return_z_loss,
            target_prob=use_token_scaling and (keep or not is_scalar),
            predicted=return_token_accuracy or return_predicted_tokens,
        ),
    )
    inputs = HeadInputs(_input, weight, bias, target, ce_weight)
    if keep:
        rows, logits = run_forward_keeping_logits(inputs, options, num_items)
        grads = (logits,)
    else:
        needs = needs_grad if is_scalar else (False, False, False)
        rows, grads = run_forward(inputs, options, needs, num_items, spare)
    output_options = OutputOptions(
        reduction, return_z_loss, return_token_accuracy, return_predicted_tokens
    )
    num_valid = rows.norm[3]
    outputs = output_options.reduce(
        rows.loss,
        rows.z_loss,
        rows.predicted,
        target,
        ignore_index,
        num_valid,
        rows.loss.dtype,
        _input.dtype,
    )
    divisor = rows.norm[0] if divides_at_end(_input, weight, options.dtype) else None
    return outputs, grads, ForwardState(rows.stats, rows.norm, rows.target_prob, options, divisor)


def fused_linear_cross_entropy_backward(
    grad_output,
    grad_input,
    grad_weight,
    grad_bias,
    weight_dtype=None,
    bias_dtype=None,
    in_place=False,
):
    """Multiply the gradients that forward computed by the incoming one (0-d).

    Returns them in their final dtypes. None stays None.
    """

    def scale(grad, dtype):
        if grad is None:
            return None
        return scale_gradient(grad, grad_output, dtype or grad.dtype, in_place)

    return scale(grad_input, None), scale(grad_weight, weight_dtype), scale(grad_bias, bias_dtype)


def keeps_logits(hidden, weight, dtype, needs, memory, group):
    """Return True if, in a graph, the logits are kept for backward, which makes them the gradient.

    A graph cannot skip the multiplication of dW by an incoming gradient that is 1
    (`forward_gradients.scale_gradient`): that is a read and a write of dW, for which few logits are
    read once more. They take twice their bytes beyond dW, in backward, since a graph does not write
    to what it has saved. Backward then reads the weight, as any linear layer's. Dynamic shapes,
    bounded or not, keep no logits: no guard depends on it.
    """
    if not torch.compiler.is_compiling():
        return False
    if not needs[1] or group is not None or dtype == torch.float16:
        return False
    # imported here, since it takes long, and a graph has it
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if not has_static_value(hidden.shape[0]) or not has_static_value(weight.shape[0]):
        return False
    return 2 * all_logits_bytes(hidden, weight, dtype) <= (FREE_BYTES if memory < 0 else memory)


class LigerFusedLinearCrossEntropyFunction(Function):
    """Autograd Function of `liger_fused_linear_cross_entropy`.

    ``apply(_input (M, H), weight (V, H), target (M,), ...)`` returns (loss, z_loss, token_accuracy,
    predicted_tokens), None where not asked for. ``ce_impl``, ``ce_mode`` and ``chunk_mem_const``
    are accepted and change nothing.
    """

    reference = staticmethod(fused_linear_cross_entropy_in_chunks)

    @staticmethod
    def forward(
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ce_weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        accum_dtype=None,
        use_token_scaling=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
        ce_impl=None,
        ce_mode=None,
        chunk_mem_const=1,
        logit_scale=1.0,
        memory=-1,
        num_items=None,
        group=None,
    ):
        devices.require_kernels("LigerFusedLinearCrossEntropyFunction", _input)
        needs = ctx.needs_input_grad
        ctx.needs = needs[0], needs[1], bias is not None and needs[3]
        target = target.contiguous()
        ce_weight = None if ce_weight is None else ce_weight.contiguous()
        keep = reduction != "none" and keeps_logits(
            _input, weight, compute_dtype(_input, weight), ctx.needs, memory, group
        )
        outputs, grads, state = fused_linear_cross_entropy_forward(
            _input,
            weight,
            target,
            ce_weight,
            bias,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            accum_dtype,
            use_token_scaling,
            return_token_accuracy,
            return_predicted_tokens,
            logit_scale,
            memory,
            num_items,
            group,
            ctx.needs,
            keep,
        )
        ctx.reduction = reduction
        ctx.options = state.options
        ctx.in_forward = reduction != "none" and not keep  # the gradients are
        inputs = _input, weight, bias, target, ce_weight, num_items
        if ctx.in_forward:
            store_gradients(ctx, grads, inputs, ctx.needs, divisor=state.divisor)
        else:
            logits = grads if keep else ()
            ctx.save_for_backward(*inputs, state.norm, state.stats, state.target_prob, *logits)
        ctx.mark_non_differentiable(*(t for t in outputs[1:] if t is not None))
        return outputs

    @staticmethod
    def arguments(ctx):
        inputs = saved_inputs(ctx, NUM_STORED) if ctx.in_forward else ctx.saved_tensors
        _input, weight, bias, target, ce_weight, num_items = inputs[:6]
        options = ctx.options
        token = options.token
        return (
            _input,
            weight,
            target,
            bias,
            ce_weight,
            token.ignore_index,
            token.lse_square_scale,
            token.label_smoothing,
            ctx.reduction,
            token.softcap,
            False,  # return_z_loss
            options.accum_dtype,
            options.token_scaling,
            False,  # return_token_accuracy
            False,  # return_predicted_tokens
            None,  # ce_impl
            None,  # ce_mode
            1,  # chunk_mem_const
            token.logit_scale,
            options.memory,
            num_items,
            options.group,
        )

    @staticmethod
    def backward(ctx, grad_loss, *_):
        if ctx.in_forward:
            (*grads, divisor), in_place = saved_grads(ctx, NUM_STORED)
            if divisor is not None:
                grad_loss = grad_loss / divisor
            _, weight_dtype, bias_dtype = ctx.dtypes
            dh, dw, db = fused_linear_cross_entropy_backward(
                grad_loss, *grads, weight_dtype, bias_dtype, in_place=in_place
            )
        else:
            (_input, weight, bias, target, ce_weight, _, norm, stats, target_prob, *logits) = (
                ctx.saved_tensors
            )
            inputs = HeadInputs(_input, weight, bias, target, ce_weight)
            if ctx.options.token_scaling:
                grad_loss = grad_loss * target_prob
            token_grads = TokenGradients(grad_loss)
            statistics = Statistics(norm, stats)
            if logits:
                grads = run_backward_from_logits(
                    token_grads, logits[0], inputs, statistics, ctx.options, ctx.needs
                )
            else:
                grads = run_backward(
                    token_grads,
                    inputs,
                    statistics,
                    ctx.options,
                    ctx.needs,
                    forward_read_logits=reads_logits(ctx.options),
                )
            dh, dw, db = cast_gradients(grads, inputs, ctx.needs)
        return dh, dw, None, db, *NO_OPTION_GRADIENTS


NO_OPTION_GRADIENTS = (None,) * 18  # of the published arguments of forward after the bias


# ---- the public function ----


def liger_fused_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
    logit_scale: float = 1.0,
    memory: int | str = "auto",
    drop_ignored: bool | None = None,
    num_items: int | torch.Tensor | None = None,
    group: object = None,
):
    """Compute the cross entropy of the logits ``input @ weight.T + bias``.

    The logits are never all in memory.

    Args:
        input: (M, H) hidden states, fp32, bf16 or fp16; any strides.
        weight: (V, H) of the head. Logits are computed in its dtype, or in autocast's where that is
            on.
        target: (M,) class indices. They may be on the CPU.
        bias: (V,).
        ce_weight: (V,) class weights.
        ignore_index, lse_square_scale, label_smoothing, reduction, softcap: as in
            `liger_cross_entropy`.
        return_z_loss, return_token_accuracy, return_predicted_tokens: ask for a
            `CrossEntropyOutput`.
        use_token_scaling: multiply each row's loss by the detached probability of its target (DFT,
            arXiv:2508.05629).
        chunk_mem_const: a positive int. It changes nothing: ``memory`` does.
        logit_scale: the logits are multiplied by it, before the softcap.
        accum_dtype, memory, drop_ignored, group: as in `linear_token_loss`.
        num_items: a number, or a tensor of one element, to divide by in place of the number of
            valid rows: Hugging Face's ``num_items_in_batch``, without another rounding of the
            gradients.

    Returns:
        The loss in fp32: 0-d, or (M,) for "none". With one of the ``return_*``:
        `CrossEntropyOutput`, as of `liger_cross_entropy` (z_loss in input's dtype). Gradients go to
        whichever of input, weight and bias require one, computed in forward; for "none", where each
        row has an incoming gradient of its own, in backward.

    Raises:
        ValueError, TypeError: shapes or options that don't fit; a target out of range, on the CPU
            and in debug mode (LIGER_KERNEL_DEBUG=1). On a GPU such a row's loss is otherwise NaN.
    """
    name = "liger_fused_linear_cross_entropy"
    ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale = check_options(
        name, reduction, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale
    )
    check.dtype(name, "accum_dtype", accum_dtype)
    if check.integer(name, "chunk_mem_const", chunk_mem_const) < 1:
        raise ValueError(f"{name}: chunk_mem_const is {chunk_mem_const!r}, give a positive int")
    input, weight, bias, group = to_local_shards(name, input, weight, bias, group)
    check_class_weight(name, ce_weight)
    check_head(name, input, weight, bias, target, ce_weight, group, "input")
    check_targets(name, target, weight.shape[0] * size_and_rank(group)[0], ignore_index)
    if num_items is not None:
        num_items = check.count(name, "num_items", num_items)
        if isinstance(num_items, torch.Tensor):
            num_items = num_items.to(input.device, torch.float32)
        else:  # filled on the device: nothing is copied there, and nothing waits
            num_items = torch.full((), num_items, dtype=torch.float32, device=input.device)
    num_rows = target.shape[0]
    target_on_cpu = target.device.type == "cpu"
    rows, input, target = drop_ignored_rows(input, target, ignore_index, drop_ignored)
    run = LigerFusedLinearCrossEntropyFunction.call
    if not devices.has_kernels(input):
        run = fused_linear_cross_entropy_in_chunks
        has_options = ce_weight is not None or lse_square_scale or label_smoothing
        has_outputs = return_z_loss or return_token_accuracy or return_predicted_tokens
        if (
            input.shape[0] > ROWS_WITHOUT_KERNELS
            and reduction != "none"
            and target_on_cpu
            and drop_ignored is not False  # no ignored row is left
            and group is None
            and not (has_options or has_outputs or use_token_scaling)
            and can_run_by_pytorch(input, weight)
        ):
            return linear_cross_entropy_by_pytorch(
                input, weight, target, bias, reduction, softcap, logit_scale, num_items
            )
    elif torch.compiler.is_compiling() and not torch.is_grad_enabled():
        # in eager mode, Function.apply does this
        input = input.detach()
        weight = weight.detach()
        bias = None if bias is None else bias.detach()
    outputs = run(
        input,
        weight,
        target,
        bias,
        ce_weight,
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        return_z_loss,
        accum_dtype,
        use_token_scaling,
        return_token_accuracy,
        return_predicted_tokens,
        None,  # ce_impl
        None,  # ce_mode
        chunk_mem_const,
        logit_scale,
        parse_memory(memory),
        num_items,
        group_name(group),
    )
    if rows is not None:
        ignored_values = 0, 0, 0, -1
        outputs = (
            x if x is None or x.dim() == 0 else restore_rows(x, rows, num_rows, ignored_value)
            for x, ignored_value in zip(outputs, ignored_values, strict=True)
        )
    return pack_outputs(*outputs)


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """Module of `liger_fused_linear_cross_entropy` that holds its options.

    ``forward(lin_weight, _input, target, bias=None)``.
    """

    def __init__(
        self,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_options(name, reduction, ignore_index, label_smoothing, lse_square_scale, softcap)
        check.dtype(name, "accum_dtype", accum_dtype)
        self.ce_weight = ce_weight
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.accum_dtype = accum_dtype
        self.use_token_scaling = use_token_scaling
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ):
        return liger_fused_linear_cross_entropy(
            _input,
            lin_weight,
            target,
            bias,
            self.ce_weight,
            self.ignore_index,
            self.lse_square_scale,
            self.label_smoothing,
            self.reduction,
            self.softcap,
            self.return_z_loss,
            self.accum_dtype,
            self.use_token_scaling,
            self.return_token_accuracy,
            self.return_predicted_tokens,
        )


# ---- the case for tests and benchmarks ----


def _case_function(loss):
    """Return a `Case`'s function: ``loss`` with everything it returns, as a tuple."""

    def call(input, weight, target, bias=None, class_weights=False, **options):
        class_weight = make_class_weights(weight, class_weights)
        return unpack_outputs(loss(input, weight, target, bias, class_weight, **options))

    return call


CASES.append(
    Case(
        "fused_linear_cross_entropy",
        fn=_case_function(functools.partial(liger_fused_linear_cross_entropy, drop_ignored=False)),
        reference=_case_function(fused_linear_cross_entropy_reference),
        inputs=lambda M, H, V: head_inputs(M, H, V, ("input", "weight", "bias")),
        shapes=((1, 8, 8), (5, 24, 123), (9, 32, 513), (4, 16, 9000)),
        options=(
            dict(bias=None),
            dict(reduction="sum", logit_scale=0.5),
            dict(reduction="none", label_smoothing=0.1),
            dict(class_weights=True, use_token_scaling=True, **ALL_OPTIONS),
            dict(class_weights=True, use_token_scaling=True, reduction="none", **ALL_OPTIONS),
        ),
        bench=(
            (8192, 4096, 128256),
            (8192, 2304, 256000),
            (4096, 2048, 128256),
            (16384, 3584, 152064),
            (2048, 4096, 128256),
            (32768, 2048, 128256),
            (512, 4096, 128256),
        ),
        flops=lambda t: 6 * t["input"].numel() * t["weight"].shape[0],
        fp32_roundings=4,  # logits of size 5, capped by a tanh that is good to 2 ulp
    )
)
