r"""Cross entropy of logits.

The formulas are in `logits`: softcap, class weights, label smoothing and z-loss in fp32 for
logits of any dtype, as Hugging Face computes it on ``logits.float()``, but without that copy.
Forward reads the logits once and does not change them. Backward reads them once and writes the
gradient once: over the logits if nobody but the graph can see them any more (`may_overwrite`).
Then a training step needs no second tensor of their size.

Sources: label smoothing arXiv:1512.00567, z-loss (PaLM) arXiv:2204.02311, softcap (Gemma 2)
arXiv:2408.00118."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import (
    CASES,
    Case,
    F,
    Function,
    cast_if_needed,
    custom_op,
    in_func_transform,
    with_unit_stride,
)
from liger_kernel.core.overwrite import may_overwrite
from liger_kernel.ops.head.logits import TokenOptions, normalisers, token_gradient, token_loss

REDUCTIONS = ("mean", "sum", "none")


@dataclass
class CrossEntropyOutput:
    """The outputs of a cross entropy that was asked for more than its loss."""

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


@dataclass(frozen=True)
class OutputOptions:
    """The reduction of a cross entropy, and the outputs that are asked for beside its loss."""

    reduction: str
    z_loss: bool
    token_accuracy: bool
    predicted_tokens: bool

    def reduce(self, loss, z_loss, predicted, target, ignore_index, n, dtype, z_dtype):
        """Reduce the outputs of each row, of which n are valid.

        Returns:
            (loss, z_loss, token_accuracy, predicted_tokens), None where not asked for.
        """
        to_scalar = self.reduction != "none"
        loss = cast_if_needed(loss.sum() if to_scalar else loss, dtype)
        if self.z_loss:
            z_loss = cast_if_needed(z_loss.sum() if to_scalar else z_loss, z_dtype)
        accuracy = None
        if self.token_accuracy:
            accuracy = ((predicted == target) & (target != ignore_index)).float()
            if to_scalar:
                accuracy = accuracy.sum() / n
        return (
            loss,
            z_loss if self.z_loss else None,
            accuracy,
            predicted if self.predicted_tokens else None,
        )


def cross_entropy_reference(
    x,
    target,
    weight=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    return_z_loss=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    loss_dtype=None,
    logit_scale=1.0,
    use_token_scaling=False,
):
    """Compute the cross entropy in plain PyTorch.

    Returns:
        (loss, z_loss, token_accuracy, predicted_tokens). loss and z_loss are in ``loss_dtype``
        (None: the logits' dtype).
    """
    z = (x if x.dtype == torch.float64 else x.float()) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    weight = None if weight is None else weight.to(z.dtype)
    valid = target != ignore_index
    n = valid.sum()
    label = target.where(valid, 0)
    ce = F.cross_entropy(
        z,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    lse = z.logsumexp(-1)
    # in this order: the square of a large lse is inf
    z_loss = (lse_square_scale * lse * lse).where(valid, 0)
    if reduction == "mean":
        total = n if weight is None else weight[label].where(valid, 0).sum()
        ce = ce / total.where(total != 0, 1)
        z_loss = z_loss / n.clamp(min=1)
    if use_token_scaling:
        probability = z.detach().softmax(-1).gather(-1, label[:, None]).squeeze(-1)
        probability = probability.where(valid, 0)
        ce = ce * probability
        z_loss = z_loss * probability
    loss = torch.where(valid, ce + z_loss, 0)
    predicted = z.detach().argmax(-1).where(valid, -1)
    outputs = OutputOptions(
        reduction, return_z_loss, return_token_accuracy, return_predicted_tokens
    )
    dtype = loss_dtype or x.dtype
    return outputs.reduce(loss, z_loss.detach(), predicted, target, ignore_index, n, dtype, dtype)


def _empty_outputs(x, target, weight, ignore_index, scalars, mean, need_z_loss, need_predicted):
    M = x.shape[0]
    loss = x.new_empty((M,), dtype=torch.float32)
    stats = x.new_empty((M, 2), dtype=torch.float32)
    z_loss = x.new_empty((M if need_z_loss else 0,), dtype=torch.float32)
    norm = x.new_empty((4,), dtype=torch.float32)
    predicted = target.new_empty(M if need_predicted else 0, dtype=torch.int64)
    return loss, stats, z_loss, norm, predicted


@custom_op("cross_entropy", _empty_outputs)
def cross_entropy_fwd(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    scalars: list[float],
    mean: bool,
    need_z_loss: bool,
    need_predicted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute each row's loss of logits x (M, V).

    scalars: lse_square_scale, label_smoothing, and softcap or 0.

    Returns:
        loss (M,), statistics (M, 2) (max and log-sum), z_loss (M,), normalisers (4,) and the
        predicted classes (M,). z_loss and predicted are empty if they are not needed.
    """
    loss, stats, z_loss, _, predicted = _empty_outputs(
        x, target, weight, ignore_index, scalars, mean, need_z_loss, need_predicted
    )
    norm = normalisers(target, weight, x.shape[1], ignore_index, mean)
    token_loss(
        x,
        target,
        weight,
        norm,
        TokenOptions(ignore_index, *scalars),
        loss,
        stats,
        z_loss=z_loss if need_z_loss else None,
        predicted=predicted if need_predicted else None,
    )
    return loss, stats, z_loss, norm, predicted


def _empty_gradient(grad_output, x, target, weight, norm, stats, ignore_index, scalars):
    return x.new_empty(x.shape)


@custom_op("cross_entropy_backward", _empty_gradient)
def cross_entropy_bwd(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    norm: torch.Tensor,
    stats: torch.Tensor,
    ignore_index: int,
    scalars: list[float],
) -> torch.Tensor:
    """Compute dx (M, V) from grad_output of one element or of shape (M,)."""
    x = with_unit_stride(x)
    dx = x.new_empty(x.shape)
    options = TokenOptions(ignore_index, *scalars)
    token_gradient(grad_output, x, target, weight, norm, stats, dx, options)
    return dx


class LigerCrossEntropyFunction(Function):
    """Autograd Function of `liger_cross_entropy`.

    ``apply(_input (M, V), target (M,), weight, ...)`` returns (loss, z_loss, token_accuracy,
    predicted_tokens). An output that was not asked for is None. ``loss_dtype`` is the dtype of
    loss and z_loss (None: the logits').
    """

    reference = staticmethod(cross_entropy_reference)

    @staticmethod
    def forward(
        ctx,
        _input,
        target,
        weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
        loss_dtype=None,
    ):
        devices.require_kernels("LigerCrossEntropyFunction", _input)
        x = with_unit_stride(_input)
        target = target.contiguous()
        weight = None if weight is None else weight.contiguous()
        scalars = [lse_square_scale, label_smoothing, softcap or 0.0]
        loss, stats, z_loss, norm, predicted = cross_entropy_fwd(
            x,
            target,
            weight,
            ignore_index,
            scalars,
            reduction == "mean",
            return_z_loss,
            return_token_accuracy or return_predicted_tokens,
        )
        ctx.save_for_backward(_input, target, weight, norm, stats)
        ctx.options = ignore_index, scalars
        ctx.reduction = reduction
        ctx.loss_dtype = dtype = loss_dtype or x.dtype
        outputs = OutputOptions(
            reduction, return_z_loss, return_token_accuracy, return_predicted_tokens
        ).reduce(loss, z_loss, predicted, target, ignore_index, norm[3], dtype, dtype)
        ctx.mark_non_differentiable(*(t for t in outputs[1:] if t is not None))
        return outputs

    @staticmethod
    def arguments(ctx):
        x, target, weight, *_ = ctx.saved_tensors
        ignore_index, (lse_square_scale, label_smoothing, softcap) = ctx.options
        return_flags = False, False, False  # only the loss has a gradient
        return (
            x,
            target,
            weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            ctx.reduction,
            softcap or None,
            *return_flags,
            ctx.loss_dtype,
        )

    @staticmethod
    def backward(ctx, grad_loss, *_):
        x, target, weight, norm, stats = ctx.saved_tensors
        # in this order: Dynamo cannot trace a backward that reads a stride
        if may_overwrite(ctx, x) and x.stride(-1) == 1:
            ignore_index, scalars = ctx.options
            options = TokenOptions(ignore_index, *scalars)
            token_gradient(grad_loss, x, target, weight, norm, stats, x, options)
            torch.autograd.graph.increment_version(x)
            dx = x
        else:
            dx = cross_entropy_bwd(grad_loss, x, target, weight, norm, stats, *ctx.options)
        return dx, *[None] * 11


def check_options(
    name, reduction, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale=1.0
):
    """Check the options of a cross entropy, and return the last five as Python numbers."""
    if reduction not in REDUCTIONS:
        raise check.InvalidArgument(
            f"{name}: reduction is {reduction!r}, give one of {', '.join(REDUCTIONS)}"
        )
    return (
        check.integer(name, "ignore_index", ignore_index),
        check.fraction(name, "label_smoothing", label_smoothing),
        check.finite(name, "lse_square_scale", lse_square_scale),
        None if softcap is None else check.positive(name, "softcap", softcap),
        check.finite(name, "logit_scale", logit_scale),
    )


class ClassWeightDtypeError(TypeError, AssertionError):
    """Raised for class weights that are integers. Existing code expects an AssertionError."""


def check_class_weight(name, weight):
    if isinstance(weight, torch.Tensor) and weight.dtype not in check.FLOAT_DTYPES:
        raise ClassWeightDtypeError(
            f"{name}: class weight is {weight.dtype}, give a floating point tensor"
        )


def check_target_shapes(name, rows, target, weight, V):
    if target.dim() != 1 or target.shape[0] != rows.shape[0]:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}, "
            f"give one label a row: ({rows.shape[0]},)"
        )
    if weight is not None and weight.shape != (V,):
        raise check.InvalidArgument(
            f"{name}: the class weight has shape {tuple(weight.shape)}, give one a class: ({V},)"
        )


def targets_are_checked(target):
    """Return True where `check_targets` looks at the targets: where that costs no synchronisation,
    and everywhere with LIGER_KERNEL_DEBUG=1."""
    if (
        torch.compiler.is_compiling()
        or in_func_transform()
        or target.is_meta
        or target.numel() == 0
    ):
        return False
    return target.device.type == "cpu" or os.environ.get("LIGER_KERNEL_DEBUG", "0") not in ("", "0")


def check_targets(name, target, V, ignore_index, otherwise=None):
    """Check that the targets are classes or ignore_index, if `targets_are_checked`.

    ``otherwise`` ends the error message: what to do if the target is meant to be no class (None:
    give ignore_index).
    """
    if not targets_are_checked(target):
        return
    out_of_range = ((target < 0) | (target >= V)) & (target != ignore_index)
    if out_of_range.any():
        row = int(out_of_range.nonzero()[0])
        otherwise = otherwise or f"{ignore_index} to ignore the row"
        raise check.InvalidArgument(
            f"{name}: the target of row {row} is {int(target[row])}, "
            f"give a class from 0 to {V - 1}, or {otherwise}"
        )


def pack_outputs(loss, z_loss, token_accuracy, predicted_tokens):
    """Return the loss alone, or a `CrossEntropyOutput` if more was asked for."""
    if z_loss is None and token_accuracy is None and predicted_tokens is None:
        return loss
    return CrossEntropyOutput(loss, z_loss, token_accuracy, predicted_tokens)


def liger_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    loss_dtype: torch.dtype | None = None,
):
    """Compute `torch.nn.functional.cross_entropy` of logits of any dtype in fp32 arithmetic.

    Args:
        input: (M, V) logits, fp32, bf16 or fp16. Forward does not write to them. Backward writes
            their gradient into their memory if nobody else can see it any more.
        target: (M,) class indices.
        weight: (V,) class weights.
        size_average, reduce: deprecated spellings of ``reduction``, as in torch.
        ignore_index: target value of rows that do not count.
        reduction: "mean" (over the valid rows, weighted), "sum" or "none".
        label_smoothing: in [0, 1].
        lse_square_scale: z-loss: this times the squared log-sum-exp is added to each row's loss.
        softcap: logits become ``softcap·tanh(logits / softcap)``.
        return_z_loss, return_token_accuracy, return_predicted_tokens: ask for a
            `CrossEntropyOutput`.
        loss_dtype: dtype of loss and z_loss; None: that of the logits.

    Returns:
        The loss: 0-d, or (M,) for "none". With one of the ``return_*``: a `CrossEntropyOutput` with
        z_loss (the part of the loss that it is), token_accuracy (fp32, over the valid rows) and
        predicted_tokens ((M,) int64, the lowest index on ties, -1 where ignored), None where not
        asked for. A mean over nothing is 0, where PyTorch has NaN: if all rows are ignored, or the
        class weights of their targets add up to 0.

    Raises:
        ValueError, TypeError: shapes or options that don't fit. An unknown reduction, a number out
            of range, class weights that do not fit and a target that is no class are
            AssertionErrors, too.
    """
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    name = "liger_cross_entropy"
    ignore_index, label_smoothing, lse_square_scale, softcap, _ = check_options(
        name, reduction, ignore_index, label_smoothing, lse_square_scale, softcap
    )
    check.dtype(name, "loss_dtype", loss_dtype)
    check_class_weight(name, weight)
    check.floats(name, dict(input=input), **{"class weight": weight})
    check.integers(name, dict(target=target))
    if target.device != input.device:
        raise ValueError(
            f"{name}: input is on {input.device}, target on {target.device}, give one device"
        )
    if input.dim() != 2:
        raise ValueError(
            f"{name}: input has shape {tuple(input.shape)}, give logits of shape (rows, classes)"
        )
    check_target_shapes(name, input, target, weight, input.shape[1])
    check_targets(name, target, input.shape[1], ignore_index)
    target = target.long()
    if devices.has_kernels(input):
        cross_entropy = LigerCrossEntropyFunction.call
    else:
        cross_entropy = LigerCrossEntropyFunction.reference
    outputs = cross_entropy(
        input,
        target,
        weight,
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        return_z_loss,
        return_token_accuracy,
        return_predicted_tokens,
        loss_dtype,
    )
    return pack_outputs(*outputs)


class LigerCrossEntropyLoss(torch.nn.Module):
    """`liger_cross_entropy` as a module: ``forward(_input (M, V), target (M,))``."""

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        check_options(
            type(self).__name__, reduction, ignore_index, label_smoothing, lse_square_scale, softcap
        )
        self.weight = weight
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, _input: torch.Tensor, target: torch.Tensor):
        return liger_cross_entropy(
            _input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            lse_square_scale=self.lse_square_scale,
            softcap=self.softcap,
            return_z_loss=self.return_z_loss,
            return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
        )


# ---- the case ----


def random_labels(rows, classes, ignored=3):
    """Make random targets, of which every ``ignored``-th one is -100."""
    target = torch.randint(classes, (rows,))
    return target.where(torch.arange(rows) % ignored != 1, -100)


def make_class_weights(classes, needed):
    """Make class weights for a tensor (V, ...) of classes, or None if they are not needed."""
    return torch.linspace(0.5, 2, classes.shape[0], device=classes.device) if needed else None


def unpack_outputs(outputs):
    """Turn the result of `pack_outputs` into a tensor or a tuple of tensors."""
    if not isinstance(outputs, CrossEntropyOutput):
        return outputs
    return outputs.loss, outputs.z_loss, outputs.token_accuracy, outputs.predicted_tokens


def _for_case(loss):
    """Call ``loss`` on logits that an operation made, as a head makes them.

    A leaf is never written over.
    """

    def call(x, target, class_weights=False, **options):
        outputs = loss(
            x * 1,
            target,
            make_class_weights(x.t(), class_weights),
            loss_dtype=torch.promote_types(x.dtype, torch.float32),
            **options,
        )
        return unpack_outputs(outputs)

    return call


ALL_OPTIONS = dict(
    label_smoothing=0.1, lse_square_scale=1e-2, softcap=5.0,
    return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True,
)  # fmt: skip

CASES.append(
    Case(
        "cross_entropy",
        fn=_for_case(liger_cross_entropy),
        reference=_for_case(cross_entropy_reference),
        inputs=lambda M, V: dict(
            x=torch.randn(M, V).mul(3).requires_grad_(), target=random_labels(M, V)
        ),
        shapes=((1, 8), (5, 123), (9, 513), (3, 17000)),
        options=(
            dict(),
            dict(reduction="sum", label_smoothing=0.1),
            dict(reduction="none", lse_square_scale=1e-2, softcap=5.0),
            dict(class_weights=True, **ALL_OPTIONS),
            dict(class_weights=True, reduction="none", **ALL_OPTIONS),
        ),
        bench=((16384, 32000), (8192, 128256), (8192, 256000)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (1, 2)),
        fp32_roundings=2,
    )
)
