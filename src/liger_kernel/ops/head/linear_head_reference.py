"""The losses of a linear head in PyTorch: they run without kernels, and tests compare with them."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from liger_kernel.core import devices
from liger_kernel.core.op import F, no_saved_tensor_hooks
from liger_kernel.core.parallel import copy_to_group, token_loss_reference_parallel
from liger_kernel.ops.head.cross_entropy import OutputOptions
from liger_kernel.ops.head.forward_gradients import gradient_in_forward
from liger_kernel.ops.head.logits import TokenOptions

ROWS_WITHOUT_KERNELS = 256  # tokens of a chunk without kernels


def compute_dtype(hidden, weight):
    """Return the dtype of the logits: autocast's where it is on, otherwise the weight's."""
    if hidden.dtype != torch.float64 and devices.in_autocast(hidden):
        return devices.autocast_dtype(hidden)
    return weight.dtype


def scale_and_cap(logits, token_options):
    """Return the logits in fp32 (or fp64), scaled and capped."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    if token_options.logit_scale != 1.0:
        logits = logits * token_options.logit_scale
    softcap = token_options.softcap
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return logits


def token_reference(
    hidden, weight, bias, target, class_weight, token_options, group=None, dtype=None
):
    """Compute each token's outputs in PyTorch, from all logits at once.

    ``dtype``: of the logits; None: `compute_dtype`.

    Returns:
        loss, logsumexp, entropy, z_loss, correct, predicted, mean logit and log_sum_sq_probs, (M,)
        each. The first three have gradients.
    """
    dtype = dtype or compute_dtype(hidden, weight)
    hidden = copy_to_group(hidden.to(dtype), group)
    logits = F.linear(hidden, weight.to(dtype), None if bias is None else bias.to(dtype))
    logits = scale_and_cap(logits, token_options)
    return token_loss_reference_parallel(
        logits,
        target,
        group,
        class_weight,
        token_options.ignore_index,
        token_options.label_smoothing,
        token_options.lse_square_scale,
    )


def run_reference_in_chunks(function, hidden, target):
    """Call ``function(hidden, target)`` for a few rows at a time, and concatenate its outputs.

    Backward computes each chunk's logits again.
    """
    if torch.compiler.is_compiling() or hidden.shape[0] <= ROWS_WITHOUT_KERNELS:
        return function(hidden, target)
    hidden_chunks = hidden.split(ROWS_WITHOUT_KERNELS)
    target_chunks = target.split(ROWS_WITHOUT_KERNELS)
    chunk_outputs = [
        checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden_chunks, target_chunks, strict=True)
    ]
    return tuple(
        None if outputs[0] is None else torch.cat(outputs)
        for outputs in zip(*chunk_outputs, strict=True)
    )


def can_run_by_pytorch(hidden, weight):
    """Return True if `linear_cross_entropy_by_pytorch` is right for these tensors, here and now."""
    return (
        not torch.compiler.is_compiling()
        and hidden.device.type == "cpu"
        and weight.dtype != torch.float16  # whose dW could overflow before it is divided
        and not devices.in_autocast(hidden)  # a second backward may be outside of it
        and no_saved_tensor_hooks()  # a checkpoint would compute all again in each chunk
    )


def linear_cross_entropy_by_pytorch(
    hidden, weight, target, bias, reduction, softcap, logit_scale, num_items
):
    """Compute a cross entropy by PyTorch's own, a few rows at a time.

    Forward computes the gradients while a chunk's logits are there, as the kernels do: so it takes
    the time of PyTorch's cross entropy from all logits, without these in memory.

    Args:
        target: (M,) class indices, of which none is ignored.
        reduction: "mean" or "sum".
        softcap, logit_scale: as in `TokenOptions`.
        num_items: 0-d tensor to divide the sum by, or None.
    """
    dtype = compute_dtype(hidden, weight)
    token_options = TokenOptions(softcap=softcap, logit_scale=logit_scale)
    divisor = num_items
    if num_items is not None:  # the loss of 0 items is NaN, as with the kernels: its z-loss is 0/0
        divisor = num_items.where(num_items != 0, float("nan"))
    elif reduction == "mean":
        divisor = torch.tensor(float(target.numel()), device=hidden.device)

    def run(hidden, weight, bias, needs):
        hidden = hidden.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        needs_dh, needs_dw, needs_db = needs
        accum_dtype = torch.promote_types(dtype, torch.float32)
        dh = torch.empty_like(hidden) if needs_dh else None
        dw = torch.zeros_like(weight, dtype=accum_dtype) if needs_dw else None
        db = torch.zeros_like(bias, dtype=accum_dtype) if needs_db else None
        loss = torch.zeros((), dtype=accum_dtype, device=hidden.device)
        for start in range(0, hidden.shape[0], ROWS_WITHOUT_KERNELS):
            rows = slice(start, start + ROWS_WITHOUT_KERNELS)
            logits = F.linear(hidden[rows], weight, bias).requires_grad_(any(needs))
            with torch.enable_grad():
                scaled_logits = scale_and_cap(logits, token_options)
                chunk_loss = F.cross_entropy(scaled_logits, target[rows], reduction="sum")
            loss += chunk_loss.detach()
            if not any(needs):
                continue
            (dlogits,) = torch.autograd.grad(chunk_loss, logits)
            if needs_dh:
                torch.mm(dlogits, weight, out=dh[rows])
            if needs_dw and dw.dtype == dtype:
                dw.addmm_(dlogits.t(), hidden[rows])
            elif needs_dw:
                dw += dlogits.t() @ hidden[rows]
            if needs_db:
                db += dlogits.sum(0, dtype=accum_dtype)
        return (loss if divisor is None else loss / divisor,), (dh, dw, db), divisor

    def reference(hidden, weight, bias):
        return fused_linear_cross_entropy_in_chunks(
            hidden,
            weight,
            target,
            bias,
            reduction=reduction,
            softcap=softcap,
            logit_scale=logit_scale,
            num_items=num_items,
        )[:1]

    return gradient_in_forward(run, reference, hidden, weight, bias)[0]


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
    """Compute the same a few rows at a time, also for classes that are spread over a group.

    This is what runs without kernels. The arguments and outputs are those of
    `LigerFusedLinearCrossEntropyFunction`.
    """
    # the z-loss comes from lse, below
    ce_options = TokenOptions(ignore_index, 0.0, label_smoothing, softcap, logit_scale)
    nll_options = TokenOptions(ignore_index, softcap=softcap, logit_scale=logit_scale)

    def reference_chunk(hidden, target):
        ce, lse, _, _, _, predicted, *_ = token_reference(
            hidden, weight, bias, target, ce_weight, ce_options, group
        )
        nll = ce
        if use_token_scaling:
            with torch.no_grad():
                nll = token_reference(hidden, weight, bias, target, None, nll_options, group)[0]
        return ce, lse, nll, predicted

    ce, lse, nll, predicted = run_reference_in_chunks(reference_chunk, input, target)
    valid = target != ignore_index
    num_valid = valid.sum()
    z_loss = lse_square_scale * lse * lse
    if num_items is not None:
        ce = (ce / num_items).where(valid, 0)
        z_loss = (z_loss / num_items).where(valid, 0)
    elif reduction == "mean":
        total = num_valid
        if ce_weight is not None:
            target_weights = ce_weight[target.where(valid, 0)].where(valid, 0)
            total = target_weights.sum(dtype=ce.dtype)
        ce = ce / total.where(total != 0, 1)
        z_loss = z_loss / num_valid.clamp(min=1)
    loss = ce + z_loss
    if use_token_scaling:
        target_prob = torch.exp(-nll)
        loss = loss * target_prob
        z_loss = z_loss * target_prob
    output_options = OutputOptions(
        reduction, return_z_loss, return_token_accuracy, return_predicted_tokens
    )
    return output_options.reduce(
        loss,
        z_loss.detach(),
        predicted,
        target,
        ignore_index,
        num_valid,
        loss.dtype,
        input.dtype,
    )
