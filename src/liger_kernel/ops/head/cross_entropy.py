r"""Cross entropy of given logits.

The formulas stand in `logits`: softcap, class weights, label smoothing and z-loss in fp32 for
logits of any dtype, as Hugging Face computes it on ``logits.float()``, but without that copy.
Forward reads the logits once and does not change them. Backward reads them once and writes the
gradient once: over the logits if nobody but the graph can see them any more (`op.may_overwrite`).
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
    custom_op,
    may_overwrite,
    rounded,
    transformed,
    unit_stride,
)
from liger_kernel.ops.head.logits import TokenOptions, normalisers, token_gradient, token_loss

REDUCTIONS = ("mean", "sum", "none")


@dataclass
class CrossEntropyOutput:
    """What a loss returns when more than the loss was asked for."""

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


@dataclass(frozen=True)
class Returns:
    """What a cross entropy returns: beside its loss, and for each row ("none") or all."""

    reduction: str
    z_loss: bool
    token_accuracy: bool
    predicted_tokens: bool

    def of(self, loss, z_loss, best, target, ignore_index, n, dtype, z_dtype):
        """Of each row, and the number n of valid ones -> (loss, z_loss, token_accuracy,
        predicted_tokens) or None."""
        scalar = self.reduction != "none"
        correct = (
            ((best == target) & (target != ignore_index)).float() if self.token_accuracy else None
        )
        return (
            rounded(loss.sum() if scalar else loss, dtype),
            rounded(z_loss.sum() if scalar else z_loss, z_dtype) if self.z_loss else None,
            correct.sum() / n if scalar and self.token_accuracy else correct,
            best if self.predicted_tokens else None,
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
    """-> (loss, z_loss, token_accuracy, predicted_tokens), loss and z_loss in ``loss_dtype`` (None:
    the logits')."""
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
    z_loss = (lse_square_scale * lse * lse).where(
        valid, 0
    )  # in this order: the square of a large lse is inf
    if reduction == "mean":
        total = n if weight is None else weight[label].where(valid, 0).sum()
        ce, z_loss = ce / total.where(total != 0, 1), z_loss / n.clamp(min=1)
    if use_token_scaling:
        token = z.detach().softmax(-1).gather(-1, label[:, None]).squeeze(-1).where(valid, 0)
        ce, z_loss = ce * token, z_loss * token
    loss, best = torch.where(valid, ce + z_loss, 0), z.detach().argmax(-1).where(valid, -1)
    returns = Returns(reduction, return_z_loss, return_token_accuracy, return_predicted_tokens)
    dtype = loss_dtype or x.dtype
    return returns.of(loss, z_loss.detach(), best, target, ignore_index, n, dtype, dtype)


def _outputs(x, target, weight, ignore_index, numbers, mean, need_z, need_best):
    rows = x.shape[0]
    shapes = (rows,), (rows, 2), (rows if need_z else 0,), (4,)
    return *(x.new_empty(shape, dtype=torch.float32) for shape in shapes), target.new_empty(
        rows if need_best else 0, dtype=torch.int64
    )


@custom_op("cross_entropy", _outputs)
def cross_entropy_fwd(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    numbers: list[float],
    mean: bool,
    need_z: bool,
    need_best: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (M, V) -> loss (M,), (max, log-sum) (M, 2), z_loss (M,), normalisers (4,), predicted (M,)
    or what is needed.

    numbers: lse_square_scale, label_smoothing, softcap or 0.
    """
    loss, stats, z_loss, _, best = _outputs(
        x, target, weight, ignore_index, numbers, mean, need_z, need_best
    )
    norm = normalisers(target, weight, x.shape[1], ignore_index, mean)
    token_loss(
        x,
        target,
        weight,
        norm,
        TokenOptions(ignore_index, *numbers),
        loss,
        stats,
        z_loss if need_z else None,
        best=best if need_best else None,
    )
    return loss, stats, z_loss, norm, best


def _gradient(g, x, target, weight, norm, stats, ignore_index, numbers):
    return x.new_empty(x.shape)


@custom_op("cross_entropy_backward", _gradient)
def cross_entropy_bwd(
    g: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    norm: torch.Tensor,
    stats: torch.Tensor,
    ignore_index: int,
    numbers: list[float],
) -> torch.Tensor:
    """g: one element, or (M,) -> dx (M, V)."""
    x, dx = unit_stride(x), x.new_empty(x.shape)
    token_gradient(g, x, target, weight, norm, stats, dx, TokenOptions(ignore_index, *numbers))
    return dx


class LigerCrossEntropyFunction(Function):
    """``apply(_input (M, V), target (M,), weight, ...) -> (loss, z_loss, token_accuracy,
    predicted_tokens)``.

    What was not asked for is None. ``loss_dtype`` is the dtype of loss and z_loss (None: the
    logits')."""

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
        x, target, weight = (
            unit_stride(_input),
            target.contiguous(),
            None if weight is None else weight.contiguous(),
        )
        returns = Returns(reduction, return_z_loss, return_token_accuracy, return_predicted_tokens)
        numbers = [lse_square_scale, label_smoothing, softcap or 0.0]
        loss, stats, z_loss, norm, best = cross_entropy_fwd(
            x,
            target,
            weight,
            ignore_index,
            numbers,
            reduction == "mean",
            return_z_loss,
            return_token_accuracy or return_predicted_tokens,
        )
        ctx.save_for_backward(_input, target, weight, norm, stats)
        ctx.options, ctx.reduction, ctx.loss_dtype = (
            (ignore_index, numbers),
            reduction,
            loss_dtype or x.dtype,
        )
        outputs = returns.of(
            loss, z_loss, best, target, ignore_index, norm[3], ctx.loss_dtype, ctx.loss_dtype
        )
        ctx.mark_non_differentiable(*(t for t in outputs[1:] if t is not None))
        return outputs

    @staticmethod
    def arguments(ctx):
        x, target, weight, *_ = ctx.saved_tensors
        ignore_index, (*numbers, softcap) = ctx.options
        asked_for = False, False, False  # what beside the loss
        return (
            x,
            target,
            weight,
            ignore_index,
            *numbers,
            ctx.reduction,
            softcap or None,
            *asked_for,
            ctx.loss_dtype,
        )

    @staticmethod
    def backward(ctx, dloss, *_):
        x, target, weight, norm, stats = ctx.saved_tensors
        if may_overwrite(ctx, x) and x.stride(-1) == 1:
            ignore_index, numbers = ctx.options
            token_gradient(
                dloss, x, target, weight, norm, stats, x, TokenOptions(ignore_index, *numbers)
            )
            torch.autograd.graph.increment_version(x)
            dx = x
        else:
            dx = cross_entropy_bwd(dloss, x, target, weight, norm, stats, *ctx.options)
        return dx, *[None] * 11


def check_options(
    name, reduction, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale=1.0
):
    """-> the last five as Python numbers."""
    if reduction not in REDUCTIONS:
        raise check.Misfit(
            f"{name}: reduction is {reduction!r}, give one of {', '.join(REDUCTIONS)}"
        )
    return (
        check.integer(name, "ignore_index", ignore_index),
        check.share(name, "label_smoothing", label_smoothing),
        check.finite(name, "lse_square_scale", lse_square_scale),
        None if softcap is None else check.positive(name, "softcap", softcap),
        check.finite(name, "logit_scale", logit_scale),
    )


class WeightDtype(TypeError, AssertionError):
    """Class weights that are integers: existing code expects an AssertionError."""


def check_class_weight(name, weight):
    if isinstance(weight, torch.Tensor) and weight.dtype not in check.FLOATS:
        raise WeightDtype(f"{name}: class weight is {weight.dtype}, give a floating point tensor")


def check_rows(name, rows, target, weight, V):
    if target.dim() != 1 or target.shape[0] != rows.shape[0]:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}, give one label a row: ({rows.shape[0]},)"
        )
    if weight is not None and weight.shape != (V,):
        raise check.Misfit(
            f"{name}: the class weight has shape {tuple(weight.shape)}, give one a class: ({V},)"
        )


def check_targets(name, target, V, ignore_index, otherwise=None):
    """Where looking at them costs no synchronisation, and anywhere with LIGER_KERNEL_DEBUG=1.

    ``otherwise`` says what to do in place of giving a class; None: to give ignore_index.
    """
    if torch.compiler.is_compiling() or transformed() or target.is_meta or target.numel() == 0:
        return
    if target.device.type != "cpu" and os.environ.get("LIGER_KERNEL_DEBUG", "0") in ("", "0"):
        return
    wrong = ((target < 0) | (target >= V)) & (target != ignore_index)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise check.Misfit(
            f"{name}: the target of row {row} is {int(target[row])}, give a class from 0 to {V - 1}, or "
            + (otherwise or f"{ignore_index} to ignore the row")
        )


def packed(loss, z_loss, token_accuracy, predicted_tokens):
    """The bare loss, or a `CrossEntropyOutput` if more was asked for."""
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
    """Cross entropy of logits, as `torch.nn.functional.cross_entropy`, in fp32 arithmetic for any
    dtype.

    Args:
        input: (M, V) logits, fp32, bf16 or fp16. Not written to in forward. In backward their
        memory becomes that of
            their gradient if nobody else can see it any more.
        target: (M,) class indices.
        weight: (V,) class weights.
        size_average, reduce: deprecated spellings of ``reduction``, as in torch.
        ignore_index: target value of rows that count for nothing.
        reduction: "mean" (over the valid rows, weighted), "sum" or "none".
        label_smoothing: in [0, 1].
        lse_square_scale: z-loss: this times the squared log-sum-exp is added to each row's loss.
        softcap: logits become ``softcap·tanh(logits / softcap)``.
        return_z_loss, return_token_accuracy, return_predicted_tokens: ask for a
        `CrossEntropyOutput`.
        loss_dtype: dtype of loss and z_loss; None: that of the logits.

    Returns:
        The loss: 0-d, or (M,) for "none". With one of the ``return_*``: `CrossEntropyOutput` with
        z_loss (the part of
        the loss that it is), token_accuracy (fp32, over the valid rows) and predicted_tokens ((M,)
        int64, the lowest
        index on ties, -1 where ignored), None where not asked for. A mean over nothing is 0, where
        PyTorch has NaN:
        if all rows are ignored, or the class weights of their targets add up to 0.

    Raises:
        ValueError, TypeError: shapes or options that don't fit. An unknown reduction, a number out
        of range, class
            weights that do not fit and a target that is no class are AssertionErrors, too.
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
    check_rows(name, input, target, weight, input.shape[1])
    check_targets(name, target, input.shape[1], ignore_index)
    target = target.long()
    run = (
        LigerCrossEntropyFunction.call
        if devices.has_kernels(input)
        else LigerCrossEntropyFunction.reference
    )
    return packed(
        *run(
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
    )


class LigerCrossEntropyLoss(torch.nn.Module):
    """`liger_cross_entropy` with its options kept: ``forward(_input (M, V), target (M,))``."""

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
        self.weight, self.ignore_index, self.lse_square_scale = (
            weight,
            ignore_index,
            lse_square_scale,
        )
        self.label_smoothing, self.reduction, self.softcap = label_smoothing, reduction, softcap
        self.return_z_loss, self.return_token_accuracy = return_z_loss, return_token_accuracy
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


def labels(rows, classes, ignored=3):
    """Random targets, every ``ignored``-th one -100."""
    target = torch.randint(classes, (rows,))
    return target.where(torch.arange(rows) % ignored != 1, -100)


def weights_of(classes, wanted):
    """A case's class weights, for a tensor (V, ...)."""
    return torch.linspace(0.5, 2, classes.shape[0], device=classes.device) if wanted else None


def unpacked(out):
    """What `packed` made, as a tensor or a tuple of them."""
    if not isinstance(out, CrossEntropyOutput):
        return out
    return out.loss, out.z_loss, out.token_accuracy, out.predicted_tokens


def _of_logits(loss):
    """A case's function, of logits that an operation made, as a head makes them: a leaf is never
    written over."""
    return lambda x, target, class_weights=False, **options: unpacked(
        loss(x * 1, target, weights_of(x.t(), class_weights), loss_dtype=_wide(x), **options)
    )


def _wide(x):
    return torch.promote_types(x.dtype, torch.float32)


EVERYTHING = dict(
    label_smoothing=0.1, lse_square_scale=1e-2, softcap=5.0,
    return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True,
)  # fmt: skip

CASES.append(
    Case(
        "cross_entropy",
        fn=_of_logits(liger_cross_entropy),
        reference=_of_logits(cross_entropy_reference),
        inputs=lambda M, V: dict(x=torch.randn(M, V).mul(3).requires_grad_(), target=labels(M, V)),
        shapes=((1, 8), (5, 123), (9, 513), (3, 17000)),
        options=(
            dict(),
            dict(reduction="sum", label_smoothing=0.1),
            dict(reduction="none", lse_square_scale=1e-2, softcap=5.0),
            dict(class_weights=True, **EVERYTHING),
            dict(class_weights=True, reduction="none", **EVERYTHING),
        ),
        bench=((16384, 32000), (8192, 128256), (8192, 256000)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (1, 2)),
        fp32_roundings=2,
    )
)
