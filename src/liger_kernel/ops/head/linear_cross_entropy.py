r"""Cross entropy of a linear head, without its logits in memory (`chunks`).

A scalar loss computes its gradients in forward (`forward_gradients`). With reduction="none" each
row has an incoming gradient of its own, and backward computes the logits again. In a compiled graph
a scalar loss of few logits keeps these: see `keeps_logits`.

Sources: DFT's token scaling arXiv:2508.05629; the rest as in `cross_entropy`.
"""

from __future__ import annotations

import functools

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, Function, kept, kept_inputs, rounded
from liger_kernel.core.parallel import group_name, local, place
from liger_kernel.ops.head.chunks import bytes_of_all
from liger_kernel.ops.head.cross_entropy import (
    EVERYTHING,
    Returns,
    check_class_weight,
    check_options,
    check_targets,
    cross_entropy_reference,
    packed,
    unpacked,
    weights_of,
)
from liger_kernel.ops.head.forward_gradients import KEPT, scaled, store
from liger_kernel.ops.head.logits import TokenOptions
from liger_kernel.ops.head.planning import FREE, budget
from liger_kernel.ops.head.token_log_probs import (
    check_head,
    compute_dtype,
    head_bwd,
    head_bwd_kept,
    head_fwd,
    head_fwd_kept,
    head_inputs,
    in_chunks,
    only_valid,
    token_reference,
)


def fused_linear_cross_entropy_reference(
    input, weight, target, bias=None, ce_weight=None, **options
):
    """-> (loss, z_loss, token_accuracy, predicted_tokens), from all the logits at once; options as
    of the operator."""
    dtype = compute_dtype(input, weight)
    x = F.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    options["loss_dtype"] = torch.promote_types(x.dtype, torch.float32)
    loss, z_loss, *counts = cross_entropy_reference(x, target, ce_weight, **options)
    return loss, None if z_loss is None else z_loss.to(input.dtype), *counts


def fused_linear_cross_entropy_in_chunks(
    input,
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
    """The same a few rows at a time, and with sharded classes: what runs without kernels."""
    smoothed = TokenOptions(
        ignore_index, 0.0, label_smoothing, softcap, logit_scale
    )  # the z-loss comes from lse

    def of_chunk(h, y):
        ce, lse, _, _, _, best, _ = token_reference(h, weight, bias, y, ce_weight, smoothed, group)
        nll = ce
        if use_token_scaling:
            with torch.no_grad():
                plain = TokenOptions(ignore_index, softcap=softcap, logit_scale=logit_scale)
                nll = token_reference(h, weight, bias, y, None, plain, group)[0]
        return ce, lse, nll, best

    ce, lse, nll, best = in_chunks(of_chunk, input, target)
    valid, z_loss = target != ignore_index, lse_square_scale * lse * lse
    n = valid.sum()
    if num_items is not None:
        ce, z_loss = ((x / num_items).where(valid, 0) for x in (ce, z_loss))
    elif reduction == "mean":
        total = (
            n
            if ce_weight is None
            else ce_weight[target.where(valid, 0)].where(valid, 0).sum(dtype=ce.dtype)
        )
        ce, z_loss = ce / total.where(total != 0, 1), z_loss / n.clamp(min=1)
    loss = ce + z_loss
    if use_token_scaling:
        token = torch.exp(-nll)
        loss, z_loss = loss * token, z_loss * token
    returns = Returns(reduction, return_z_loss, return_token_accuracy, return_predicted_tokens)
    return returns.of(loss, z_loss.detach(), best, target, ignore_index, n, loss.dtype, input.dtype)


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
):
    """-> (loss, z_loss, token_accuracy, predicted_tokens), (d_input, d_weight, d_bias), and what
    backward needs.

    The gradients are those of loss·n₀ for fp16. They are empty where not needed or where
    ``reduction`` is "none". With ``keep`` there are the logits in their place: (logits,)."""
    dtype, scalar = compute_dtype(_input, weight), reduction != "none"
    need_best = return_token_accuracy or return_predicted_tokens
    wants = [return_z_loss, use_token_scaling and (keep or not scalar), False, False, need_best]
    numbers = [lse_square_scale, label_smoothing, softcap or 0.0, logit_scale]
    given = (
        _input,
        weight,
        bias,
        target,
        ce_weight,
        num_items,
        numbers,
        ignore_index,
        reduction == "mean",
    )
    if keep:
        found = head_fwd_kept(*given, use_token_scaling, dtype, wants)
    else:
        needs = list(needs_grad) if scalar else [False] * 3
        found = head_fwd(*given, use_token_scaling, dtype, accum_dtype, memory, group, wants, needs)
    loss, stats, norm, z_loss, token, _, _, best, *grads = found
    returns = Returns(reduction, return_z_loss, return_token_accuracy, return_predicted_tokens)
    outputs = returns.of(
        loss, z_loss, best, target, ignore_index, norm[3], loss.dtype, _input.dtype
    )
    return outputs, grads, (stats, token, norm, numbers, dtype)


def fused_linear_cross_entropy_backward(
    grad_output,
    grad_input,
    grad_weight,
    grad_bias,
    weight_dtype=None,
    bias_dtype=None,
    in_place=False,
):
    """The gradients that forward computed, times the incoming one (0-d), in their final dtypes;
    None stays None."""
    grads = (grad_input, None), (grad_weight, weight_dtype), (grad_bias, bias_dtype)
    return tuple(
        x if x is None else scaled(x, grad_output, dtype or x.dtype, in_place) for x, dtype in grads
    )


def keeps_logits(h, w, dtype, needs, memory, group):
    """Whether, in a graph, the logits are kept for backward, which turns them into their gradient.

    A graph cannot skip the multiplication of dW by an incoming gradient that is 1
    (`forward_gradients.scaled`): that is a read and a write of dW, for which few logits are read
    once more. They take twice their bytes beyond dW, in backward, since a graph does not write to
    what it has saved. Backward then reads the weight, as any linear layer's. Not of dynamic shapes,
    bounded or not: no guard depends on it."""
    if (
        not torch.compiler.is_compiling()
        or not needs[1]
        or group is not None
        or dtype == torch.float16
    ):
        return False
    from torch.fx.experimental.symbolic_shapes import (
        has_static_value,  # which takes long, and a graph has it
    )

    if not has_static_value(h.shape[0]) or not has_static_value(w.shape[0]):
        return False
    return 2 * bytes_of_all(h, w, dtype) <= (FREE if memory < 0 else memory)


class LigerFusedLinearCrossEntropyFunction(Function):
    """``apply(_input (M, H), weight (V, H), target (M,), ...) -> (loss, z_loss, token_accuracy,
    predicted_tokens)``.

    What was not asked for is None. ``ce_impl``, ``ce_mode`` and ``chunk_mem_const`` are accepted
    and change nothing."""

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
        outputs, grads, (stats, token, norm, numbers, dtype) = fused_linear_cross_entropy_forward(
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
        ctx.reduction, ctx.token_scaling = reduction, use_token_scaling
        reads = bool(
            use_token_scaling or return_token_accuracy or return_predicted_tokens
        )  # see `reads_logits`
        ctx.options = numbers, ignore_index, dtype, accum_dtype, memory, group, reads
        ctx.in_forward = reduction != "none" and not keep
        inputs = _input, weight, bias, target, ce_weight, num_items
        if ctx.in_forward:
            store(
                ctx, grads, inputs, ctx.needs, divisor=norm[0] if dtype == torch.float16 else None
            )
        else:
            ctx.save_for_backward(*inputs, norm, stats, token, *(grads if keep else ()))
        ctx.mark_non_differentiable(*(t for t in outputs[1:] if t is not None))
        return outputs

    @staticmethod
    def arguments(ctx):
        inputs = kept_inputs(ctx, KEPT) if ctx.in_forward else ctx.saved_tensors
        h, w, b, target, ce_weight, num_items = inputs[:6]
        numbers, ignore_index, _, accum_dtype, memory, group, _ = ctx.options
        lse_square_scale, label_smoothing, softcap, logit_scale = numbers
        return (
            h, w, target, b, ce_weight, ignore_index, lse_square_scale, label_smoothing, ctx.reduction, softcap or None,
            False, accum_dtype, ctx.token_scaling, False, False, None, None, 1, logit_scale, memory, num_items, group,
        )  # fmt: skip

    @staticmethod
    def backward(ctx, dloss, *_):
        if ctx.in_forward:
            (*grads, divisor), in_place = kept(ctx, KEPT)
            dloss = dloss if divisor is None else dloss / divisor
            dh, dw, db = fused_linear_cross_entropy_backward(
                dloss, *grads, *ctx.dtypes[1:], in_place=in_place
            )
        else:
            h, w, b, target, ce_weight, _, norm, stats, token, *logits = ctx.saved_tensors
            g, needs, nothing = (
                dloss * token if ctx.token_scaling else dloss,
                list(ctx.needs),
                (None, None),
            )
            given = h, w, b, target, ce_weight, norm, stats, None
            if logits:
                numbers, ignore_index, _, accum_dtype, *_ = ctx.options
                grads = head_bwd_kept(
                    g, *nothing, *logits, *given, numbers, ignore_index, accum_dtype, needs
                )
            else:
                grads = head_bwd(g, *nothing, *given, *ctx.options, needs)
            grads = zip(grads, (h, w, b), ctx.needs, strict=True)
            dh, dw, db = (rounded(grad, of.dtype) if need else None for grad, of, need in grads)
        return dh, dw, None, db, *[None] * 18


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
    """Cross entropy of the logits ``input @ weight.T + bias``, without all of them in memory.

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
        valid rows: Hugging
            Face's ``num_items_in_batch``, without another rounding of the gradients.

    Returns:
        The loss in fp32: 0-d, or (M,) for "none". With one of the ``return_*``:
        `CrossEntropyOutput`, as of
        `liger_cross_entropy` (z_loss in input's dtype). Gradients go to whichever of input, weight
        and bias require
        one, computed in forward; for "none", where each row has an incoming gradient of its own, in
        backward.

    Raises:
        ValueError, TypeError: shapes or options that don't fit; a target out of range, on the CPU
        and in debug mode
            (LIGER_KERNEL_DEBUG=1). On a GPU such a row's loss is otherwise NaN.
    """
    name = "liger_fused_linear_cross_entropy"
    ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale = check_options(
        name, reduction, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale
    )
    check.dtype(name, "accum_dtype", accum_dtype)
    if check.integer(name, "chunk_mem_const", chunk_mem_const) < 1:
        raise ValueError(f"{name}: chunk_mem_const is {chunk_mem_const!r}, give a positive int")
    input, weight, bias, group = local(name, input, weight, bias, group)
    check_class_weight(name, ce_weight)
    check_head(name, input, weight, bias, target, ce_weight, group, "input")
    check_targets(name, target, weight.shape[0] * place(group)[0], ignore_index)
    if num_items is not None:
        num_items = check.count(name, "num_items", num_items)
        if isinstance(num_items, torch.Tensor):
            num_items = num_items.to(input.device, torch.float32)
        else:  # filled on the device: nothing is copied there, and nothing waits
            num_items = torch.full((), num_items, dtype=torch.float32, device=input.device)
    rows, h, y = only_valid(input, target, ignore_index, drop_ignored)
    run = LigerFusedLinearCrossEntropyFunction.call
    if not devices.has_kernels(h):
        run = fused_linear_cross_entropy_in_chunks
    elif torch.compiler.is_compiling() and not torch.is_grad_enabled():  # in eager, apply does this
        h, weight, bias = h.detach(), weight.detach(), None if bias is None else bias.detach()
    outputs = run(
        h,
        weight,
        y,
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
        None,
        None,
        chunk_mem_const,
        logit_scale,
        budget(memory),
        num_items,
        group_name(group),
    )
    if rows is not None:
        outputs = (
            x
            if x is None or x.dim() == 0
            else x.new_full(target.shape, ignored).index_copy(0, rows, x)
            for x, ignored in zip(outputs, (0, 0, 0, -1), strict=True)
        )
    return packed(*outputs)


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """`liger_fused_linear_cross_entropy` with its options kept: ``forward(lin_weight, _input,
    target, bias=None)``."""

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
        check_options(
            type(self).__name__, reduction, ignore_index, label_smoothing, lse_square_scale, softcap
        )
        check.dtype(type(self).__name__, "accum_dtype", accum_dtype)
        self.ce_weight, self.ignore_index, self.lse_square_scale = (
            ce_weight,
            ignore_index,
            lse_square_scale,
        )
        self.label_smoothing, self.reduction, self.softcap = label_smoothing, reduction, softcap
        self.return_z_loss, self.accum_dtype, self.use_token_scaling = (
            return_z_loss,
            accum_dtype,
            use_token_scaling,
        )
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


def _outputs_of(loss):
    """A case's function: the loss with everything it returns, as a tuple."""
    return lambda input, weight, target, bias=None, class_weights=False, **options: unpacked(
        loss(input, weight, target, bias, weights_of(weight, class_weights), **options)
    )


CASES.append(
    Case(
        "fused_linear_cross_entropy",
        fn=_outputs_of(functools.partial(liger_fused_linear_cross_entropy, drop_ignored=False)),
        reference=_outputs_of(fused_linear_cross_entropy_reference),
        inputs=lambda M, H, V: head_inputs(M, H, V, ("input", "weight", "bias")),
        shapes=((1, 8, 8), (5, 24, 123), (9, 32, 513), (4, 16, 9000)),
        options=(
            dict(bias=None),
            dict(reduction="sum", logit_scale=0.5),
            dict(reduction="none", label_smoothing=0.1),
            dict(class_weights=True, use_token_scaling=True, **EVERYTHING),
            dict(class_weights=True, use_token_scaling=True, reduction="none", **EVERYTHING),
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
