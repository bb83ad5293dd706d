r"""Cross entropy of logits whose classes are spread over a group's ranks (vocabulary parallelism).

Rank r of R has the logits x (S, B, V_local) of the classes from r·V_local on. The targets y are of
all classes.

    ℓ = log_softmax(x), over the classes of all ranks
    loss = -(1-a)·ℓ_y - a·mean_K(ℓ)

    dx_v = (p_v - a/K - (1-a)·1[v=y])·g,   p = exp(ℓ)

Label smoothing ε is shared by all classes ("pytorch", a = ε), or is the share of the wrong ones
("megatron", a = ε·K/(K-1)). K counts the classes of all ranks ("global") or of this rank
("partition": each rank has its own loss).

Forward sends one small tensor (`logits`), backward nothing. Arithmetic is in fp32. As in
`cross_entropy`, backward writes over the logits if nobody but the graph can see them any more.

Sources: Megatron-LM, arXiv:1909.08053; label smoothing, arXiv:1512.00567.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, Function, custom_op, flatten_rows, flatten_to_2d
from liger_kernel.core.overwrite import may_overwrite
from liger_kernel.core.parallel import (
    group_name,
    is_process_group,
    size_and_rank,
    token_loss_reference_parallel,
)
from liger_kernel.ops.head.cross_entropy import check_targets, random_labels
from liger_kernel.ops.head.logits import TokenOptions, normalisers, token_gradient, token_loss

FORMULAS = ("pytorch", "megatron")
MODES = ("global", "partition")


def vocab_parallel_cross_entropy_reference(
    vocab_parallel_logits,
    target,
    tp_group=None,
    ignore_index=-100,
    label_smoothing=0.0,
    label_smoothing_formula="pytorch",
    label_smoothing_mode="global",
):
    """Compute what the operator computes, in PyTorch, in fp32 or fp64."""
    x = flatten_to_2d(vocab_parallel_logits)
    y = target.reshape(-1).long()
    a, share = _smoothing(
        x, tp_group, label_smoothing, label_smoothing_formula, label_smoothing_mode
    )
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    loss, lse, *_ = token_loss_reference_parallel(
        z, y, tp_group, None, ignore_index, a if share == 1 else 0.0
    )
    if share != 1:
        loss = _smooth_over_partition(loss, lse, z, y, ignore_index, a)
    return loss.view(target.shape)


def _smoothing(x, group, epsilon, formula, mode):
    """Return a, and a class's share of a relative to its share among the classes of all ranks."""
    world_size = size_and_rank(group)[0]
    K = x.shape[1] if mode == "partition" else x.shape[1] * world_size
    a = epsilon
    if formula == "megatron" and K > 1:
        a = epsilon * K / (K - 1)
    return a, world_size if a and mode == "partition" else 1


def _smooth_over_partition(nll, lse, x, target, ignore_index, a):
    """Return the loss (M,) that is smoothed over the classes of x alone."""
    loss = (1 - a) * nll + a * (lse - x.mean(1, dtype=nll.dtype))
    return loss.where(target != ignore_index, 0)


def _empty_outputs(x, target, ignore_index, epsilon, formula, mode, group):
    M = x.shape[0]
    loss = x.new_empty((M,), dtype=torch.float32)
    stats = x.new_empty((M, 2), dtype=torch.float32)
    norm = x.new_empty((4,), dtype=torch.float32)
    return loss, stats, norm


@custom_op("vocab_parallel_cross_entropy", _empty_outputs)
def vocab_parallel_cross_entropy_fwd(
    x: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    epsilon: float,
    formula: str,
    mode: str,
    group: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute each token's loss of logits x (M, V_local), in which the classes have unit stride.

    Returns:
        loss (M,), statistics (M, 2) (max and log-sum) and normalisers (4,).
    """
    a, share = _smoothing(x, group, epsilon, formula, mode)
    loss, stats, _ = _empty_outputs(x, target, ignore_index, epsilon, formula, mode, group)
    num_classes = x.shape[1] * size_and_rank(group)[0] // share
    norm = normalisers(target, None, num_classes, ignore_index, False)
    options = TokenOptions(ignore_index, label_smoothing=a if share == 1 else 0.0)
    token_loss(x, target, None, norm, options, loss, stats, group=group)
    if share != 1:
        loss = _smooth_over_partition(loss, stats.sum(1), x, target, ignore_index, a)
    return loss, stats, norm


def _fill_gradient(dx, g, x, target, stats, norm, ignore_index, epsilon, formula, mode, group):
    """Fill dx (M, V_local) for incoming gradients g.

    The kernel computes g·((1-ε)·(p - 1[v=y]) + ε·(K·p - 1)/V), so it gets another ε and another g.
    """
    a, share = _smoothing(x, group, epsilon, formula, mode)
    factor = 1 - a + a * share
    options = TokenOptions(ignore_index, label_smoothing=a * share / factor)
    if share != 1:
        g = g * factor
    token_gradient(g, x, target, None, norm, stats, dx, options, group=group)


def _empty_gradient(g, x, target, stats, norm, ignore_index, epsilon, formula, mode, group):
    return x.new_empty(x.shape)


@custom_op("vocab_parallel_cross_entropy_backward", _empty_gradient)
def vocab_parallel_cross_entropy_bwd(
    g: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    norm: torch.Tensor,
    ignore_index: int,
    epsilon: float,
    formula: str,
    mode: str,
    group: str | None,
) -> torch.Tensor:
    """Return dx (M, V_local) for incoming gradients g (M,)."""
    dx = x.new_empty(x.shape)
    _fill_gradient(dx, g, x, target, stats, norm, ignore_index, epsilon, formula, mode, group)
    return dx


def validate_formula_and_mode(label_smoothing_formula: str, label_smoothing_mode: str) -> None:
    """Raise ValueError unless both are one of `FORMULAS` and one of `MODES`."""
    _check_smoothing(
        "validate_formula_and_mode", 0.0, label_smoothing_formula, label_smoothing_mode
    )


def _check_smoothing(name, epsilon, formula, mode):
    if formula not in FORMULAS:
        raise ValueError(
            f"{name}: label_smoothing_formula is {formula!r}, give one of {', '.join(FORMULAS)}"
        )
    if mode not in MODES:
        raise ValueError(
            f"{name}: label_smoothing_mode is {mode!r}, give one of {', '.join(MODES)}"
        )
    if check.fraction(name, "label_smoothing", epsilon) == 1:
        raise ValueError(f"{name}: label_smoothing is {epsilon!r}, give a number from 0 to below 1")


def _check(name, x, target, group, ignore_index, *smoothing):
    check.floats(name, dict(vocab_parallel_logits=x))
    check.integers(name, dict(target=target))
    if target.device != x.device:
        raise ValueError(
            f"{name}: vocab_parallel_logits are on {x.device}, target on {target.device}, "
            "give one device"
        )
    if x.dim() != 3:
        raise ValueError(
            f"{name}: vocab_parallel_logits have shape {tuple(x.shape)}, "
            "give (S, B, this rank's classes)"
        )
    if x.shape[2] == 0:
        raise ValueError(
            f"{name}: vocab_parallel_logits of shape {tuple(x.shape)} has no classes, "
            "give one or more"
        )
    check.shape(name, "target", target, tuple(x.shape[:2]))
    if not is_process_group(group):
        raise TypeError(
            f"{name}: tp_group is {group!r}, give a process group that this process is in, or None"
        )
    check.integer(name, "ignore_index", ignore_index)
    _check_smoothing(name, *smoothing)
    check_targets(name, target.reshape(-1), x.shape[2] * size_and_rank(group)[0], ignore_index)


class LigerVocabParallelCEFunction(Function):
    """Autograd Function of `liger_vocab_parallel_cross_entropy`.

    ``apply(vocab_parallel_logits, target, tp_group, ignore_index, label_smoothing, ...)`` returns
    the loss (S, B). The arguments are those of that function, by position or by name.
    """

    @classmethod
    def apply(
        cls,
        vocab_parallel_logits,
        target,
        tp_group,
        ignore_index=-100,
        label_smoothing=0.0,
        label_smoothing_formula="pytorch",
        label_smoothing_mode="global",
    ):
        smoothing = label_smoothing, label_smoothing_formula, label_smoothing_mode
        _check(cls.__name__, vocab_parallel_logits, target, tp_group, ignore_index, *smoothing)
        return super().apply(vocab_parallel_logits, target, tp_group, ignore_index, *smoothing)

    reference = staticmethod(vocab_parallel_cross_entropy_reference)

    @staticmethod
    def forward(
        ctx,
        vocab_parallel_logits,
        target,
        tp_group,
        ignore_index=-100,
        label_smoothing=0.0,
        label_smoothing_formula="pytorch",
        label_smoothing_mode="global",
    ):
        devices.require_kernels("LigerVocabParallelCEFunction", vocab_parallel_logits)
        x = flatten_rows(vocab_parallel_logits)
        y = target.reshape(-1).long().contiguous()
        smoothing = float(label_smoothing), label_smoothing_formula, label_smoothing_mode
        ctx.options = ignore_index, *smoothing, group_name(tp_group)
        loss, stats, norm = vocab_parallel_cross_entropy_fwd(x, y, *ctx.options)
        ctx.save_for_backward(vocab_parallel_logits, y, stats, norm)
        # no view to autograd, so that it may be written to
        return torch.ops.aten._unsafe_view(loss, target.shape)

    @staticmethod
    def arguments(ctx):
        x, y, *_ = ctx.saved_tensors
        *options, group = ctx.options
        return x, y.view(x.shape[:2]), group, *options

    @staticmethod
    def backward(ctx, dloss):
        logits, target, stats, norm = ctx.saved_tensors
        in_place = logits.is_contiguous() and may_overwrite(ctx, logits)
        x = flatten_rows(logits)
        g = dloss.reshape(-1)
        if in_place:
            _fill_gradient(x, g, x, target, stats, norm, *ctx.options)
            torch.autograd.graph.increment_version(logits)
            grad = logits
        else:
            grad = vocab_parallel_cross_entropy_bwd(g, x, target, stats, norm, *ctx.options)
            grad = grad.view(logits.shape)
        return grad, None, None, None, None, None, None


def liger_vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: object = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    label_smoothing_formula: str = "pytorch",
    label_smoothing_mode: str = "global",
) -> torch.Tensor:
    """Compute each token's cross entropy, where each rank has the logits of a part of the classes.

    Args:
        vocab_parallel_logits: (S, B, V_local), fp32, bf16 or fp16, any strides: rank r has the
            classes from r·V_local on, as many as the other ranks. Not written to in forward; in
            backward their memory becomes that of their gradient if nobody else can see it any more.
        target: (S, B), the same on all ranks, of all classes.
        tp_group: the process group of these ranks. None, or a group of one: the classes are all
            here.
        ignore_index: target of tokens whose loss is 0.
        label_smoothing: from 0 to below 1.
        label_smoothing_formula: "pytorch": shared by all classes; "megatron": by all but the
            target.
        label_smoothing_mode: the classes that share it, those of all ranks ("global") or of this
            one ("partition").

    Returns:
        (S, B) in fp32, or fp64 for fp64. The gradient is that of this rank's classes, if all ranks
        give the same one to backward.

    Raises:
        ValueError, TypeError: shapes or options that don't fit; a target out of range, on the CPU
            and in debug mode (LIGER_KERNEL_DEBUG=1). On a GPU the loss of such a token is otherwise
            NaN.

    Source: arXiv:1909.08053.
    """
    smoothing = label_smoothing, label_smoothing_formula, label_smoothing_mode
    name = "liger_vocab_parallel_cross_entropy"
    _check(name, vocab_parallel_logits, target, tp_group, ignore_index, *smoothing)
    kernels = devices.has_kernels(vocab_parallel_logits)
    run = LigerVocabParallelCEFunction.call if kernels else LigerVocabParallelCEFunction.reference
    return run(vocab_parallel_logits, target, group_name(tp_group), ignore_index, *smoothing)


class LigerVocabParallelCrossEntropy(torch.nn.Module):
    """Module of `liger_vocab_parallel_cross_entropy` that holds its options.

    ``reduction`` must be "none".
    """

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "none",
        label_smoothing_formula: str = "pytorch",
        label_smoothing_mode: str = "global",
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if reduction != "none":
            raise ValueError(
                f"{name}: reduction is {reduction!r}, "
                "give 'none', and reduce the tokens' losses yourself"
            )
        _check_smoothing(name, label_smoothing, label_smoothing_formula, label_smoothing_mode)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.label_smoothing_formula = label_smoothing_formula
        self.label_smoothing_mode = label_smoothing_mode

    def forward(
        self, vocab_parallel_logits: torch.Tensor, target: torch.Tensor, tp_group: object = None
    ):
        return liger_vocab_parallel_cross_entropy(
            vocab_parallel_logits,
            target,
            tp_group,
            self.ignore_index,
            self.label_smoothing,
            self.label_smoothing_formula,
            self.label_smoothing_mode,
        )


def _case_function(loss):
    """Return a `Case`'s function. It multiplies the logits by 1: a leaf is never written over."""

    def call(logits, target, **options):
        return loss(logits * 1, target, None, **options)

    return call


def _case_inputs(S, B, V):
    logits = torch.randn(S, B, V).mul(3).requires_grad_()
    return dict(logits=logits, target=random_labels(S * B, V).view(S, B))


def _logits_traffic(inputs):
    """Return the bytes that forward and backward must move: the logits once, and twice."""
    nbytes = inputs["logits"].numel() * inputs["logits"].element_size()
    return nbytes, 2 * nbytes


CASES.append(
    Case(
        "vocab_parallel_cross_entropy",
        fn=_case_function(liger_vocab_parallel_cross_entropy),
        reference=_case_function(vocab_parallel_cross_entropy_reference),
        inputs=_case_inputs,
        shapes=((1, 1, 8), (5, 2, 123), (2, 1, 9001)),
        options=(dict(), dict(label_smoothing=0.1, label_smoothing_formula="megatron")),
        bench=((8192, 1, 32000),),
        traffic=_logits_traffic,
        fp32_roundings=2,
    )
)
