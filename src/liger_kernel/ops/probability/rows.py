r"""The kernel of KL, JSD and TVD: it compares two rows of probabilities or of their logarithms.

The row x of the first argument gets a gradient, the row y of the second one does not. The loss is
s·Σ D over the entries of all valid rows, with s = 1 ("sum"), 1/n ("batchmean") or 1/(n·V) ("mean")
for n valid rows of V entries. D of an entry, and its derivative, with p = exp(y) and q = exp(x) if
x and y are logarithms, and M = β·p + (1-β)·q:

                  x      y      D                                            ∂D/∂x
    kl            log q  p      p·(log max(p, eps) - x)                      -p
    forward_kl    log q  log p  p·(y - x)                                    -p
    reverse_kl    log q  log p  q·(x - y)                                    q·(x - y) + q
    jsd           log q  log p  β·p·(y - log M) + (1-β)·q·(x - log M)        (1-β)·q·(x - log M)
    tvd           p      q      ½·|x - y|                                    ½·sign(x - y)

In tvd the derivative of a tie is 0. A probability of 0 contributes 0, whatever its partner's
logarithm is. Arithmetic is in fp32.

Forward computes the gradient too, since it has read x and y, and backward multiplies it by the
incoming one. For "none", each entry has an incoming gradient of its own, and backward reads x and y
again.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import (
    Case,
    Function,
    custom_op,
    flatten_rows,
    save_grads,
    saved_grads,
    saved_inputs,
)
from liger_kernel.core.tile import cdiv, log_of_normal, next_power_of_2, scaled_exp, tl, triton
from liger_kernel.ops.head.cross_entropy import random_labels
from liger_kernel.ops.head.divergence_terms import DIVERGENCE_TERMS
from liger_kernel.ops.head.forward_gradients import scale_gradient
from liger_kernel.ops.head.logits import normalisers
from liger_kernel.ops.head.logits_kernels import times

DIVERGENCE_REDUCTIONS = "none", "sum", "mean", "batchmean"


def upcast_rows(x, labels=None, ignore_index=None):
    """Return x in fp32 or fp64, with 0 in ignored rows.

    So not even their gradient depends on what these rows contain.
    """
    x = x if x.dtype == torch.float64 else x.float()
    return x if labels is None else x.where((labels != ignore_index)[:, None], 0)


def reduce_divergence(d, labels, reduction, ignore_index):
    """Reduce D (M, V) over the rows that are not ignored."""
    n = max(d.shape[0], 1)
    if labels is not None:
        valid = labels != ignore_index
        d = d.where(valid[:, None], 0)
        n = valid.sum().clamp(min=1)
    if reduction == "none":
        return d
    if reduction == "sum":
        return d.sum()
    return d.sum() / (n * max(d.shape[1], 1) if reduction == "mean" else n)


# ---- D and ∂D/∂x of an entry ----

# of the linear head, with ∂D/∂log q for G
_jsd_terms = DIVERGENCE_TERMS["jsd"]


@triton.jit
def _kl(x, y, eps, EXACT: tl.constexpr):
    return times(y, log_of_normal(tl.maximum(y, eps)) - x), -y


@triton.jit
def _forward_kl(x, y, param, EXACT: tl.constexpr):
    p = scaled_exp(y, EXACT)
    return times(p, y - x), -p


@triton.jit
def _jsd(x, y, beta, EXACT: tl.constexpr):
    return _jsd_terms(scaled_exp(y, EXACT), scaled_exp(x, EXACT), y, x, beta, EXACT)


@triton.jit
def _reverse_kl(x, y, param, EXACT: tl.constexpr):
    q = scaled_exp(x, EXACT)
    d = times(q, x - y)
    return d, d + q


@triton.jit
def _tvd(x, y, param, EXACT: tl.constexpr):
    d = 0.5 * (x - y)
    return tl.abs(d), tl.where(d > 0, 0.5, tl.where(d < 0, -0.5, 0.0))


# each returns D and ∂D/∂x
ENTRY_TERMS = dict(kl=_kl, forward_kl=_forward_kl, jsd=_jsd, reverse_kl=_reverse_kl, tvd=_tvd)


@kernel
def _diverge(
    x_ptr,
    y_ptr,
    labels_ptr,
    norm_ptr,
    g_ptr,
    sum_ptr,
    d_ptr,
    dx_ptr,
    stride_x,
    stride_y,
    stride_g,
    N,
    ignore_index,
    param,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK entries of one row: one program. It fills ΣD/norm, D and dx, if not None.

    dx is ∂D/∂x times the incoming gradients g of D. Without g it is divided by norm. In fp16, where
    it could vanish, that is left to backward. param: beta or eps.
    """
    blocks = tl.cdiv(N, BLOCK)
    m = tl.cast(tl.program_id(0) // blocks, tl.int64)
    i = tl.cast(tl.program_id(0) % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    end = N
    if labels_ptr is not None:
        end = tl.where(tl.load(labels_ptr + m) == ignore_index, 0, N)
    inside = i < N
    valid = i < end
    EXACT: tl.constexpr = (
        x_ptr.dtype.element_ty == tl.float32 or y_ptr.dtype.element_ty == tl.float32
    )
    x = tl.load(x_ptr + m * stride_x + i, mask=valid, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + m * stride_y + i, mask=valid, other=0.0).to(tl.float32)
    d, slope = TERMS(x, y, param, EXACT)
    d = tl.where(valid, d, 0.0)
    scale = 1.0
    if norm_ptr is not None:
        scale /= tl.load(norm_ptr)
    if sum_ptr is not None:
        tl.store(sum_ptr + tl.program_id(0), tl.sum(d) * scale)
    if d_ptr is not None:
        tl.store(d_ptr + m * N + i, d, mask=inside)
    if dx_ptr is not None:
        if g_ptr is not None:
            slope *= tl.load(g_ptr + m * stride_g + i, mask=valid, other=0.0).to(tl.float32)
        elif dx_ptr.dtype.element_ty != tl.float16:
            slope *= scale
        dx = tl.where(valid, slope, 0.0).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + m * N + i, dx, mask=inside)


def _launch(N):
    """Choose (columns, warps) of a program: 16 columns a thread."""
    columns = min(next_power_of_2(N), 4096)
    return columns, max(columns // 512, 1)


def _run(x, y, labels, norm, g, sums, d, dx, divergence, param, ignore_index):
    M, N = x.shape
    columns, warps = _launch(N)
    if x.numel():
        _diverge[(M * cdiv(N, columns),)](
            x,
            y,
            labels,
            norm,
            g,
            sums,
            d,
            dx,
            x.stride(0),
            y.stride(0),
            0 if g is None else g.stride(0),
            N,
            ignore_index,
            param,
            TERMS=ENTRY_TERMS[divergence],
            BLOCK=columns,
            num_warps=devices.limit_warps(warps, x),
        )


def _normaliser(x, labels, reduction, ignore_index):
    """Return the number that ΣD is divided by, 0-d in fp32."""
    M, V = x.shape
    if labels is None or reduction == "sum":
        n = dict(sum=1, batchmean=M, mean=M * V)[reduction]
        return x.new_full((), max(n, 1), dtype=torch.float32)
    return normalisers(labels, None, V, ignore_index, True)[0] * (V if reduction == "mean" else 1)


def _empty_outputs(x, y, labels, divergence, param, reduction, ignore_index, need_dx):
    if reduction == "none":
        return x.new_empty(x.shape, dtype=torch.float32), None, None
    loss = x.new_empty((), dtype=torch.float32)
    norm = x.new_empty((), dtype=torch.float32)
    return loss, x.new_empty(x.shape) if need_dx else None, norm


@custom_op("divergence", _empty_outputs)
def divergence_fwd(
    x: torch.Tensor,
    y: torch.Tensor,
    labels: torch.Tensor | None,
    divergence: str,
    param: float,
    reduction: str,
    ignore_index: int,
    need_dx: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the divergence of x and y (M, V), which have unit stride in V. labels: (M,).

    param: beta or eps.

    Returns:
        The loss, dx for an incoming gradient of 1, and the number that both are divided by. In fp16
        dx is not. For "none" the loss is D (M, V), and the others are None.
    """
    loss, dx, norm = _empty_outputs(
        x, y, labels, divergence, param, reduction, ignore_index, need_dx
    )
    if reduction == "none":
        _run(x, y, labels, None, None, None, loss, None, divergence, param, ignore_index)
        return loss, None, None
    norm = _normaliser(x, labels, reduction, ignore_index)
    sums = loss.new_empty(x.shape[0] * cdiv(x.shape[1], _launch(x.shape[1])[0]))
    _run(x, y, labels, norm, None, sums, None, dx, divergence, param, ignore_index)
    return sums.sum(), dx, norm


def _empty_gradient(g, x, y, labels, divergence, param, ignore_index):
    return x.new_empty(x.shape)


@custom_op("divergence_backward", _empty_gradient)
def divergence_bwd(
    g: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    labels: torch.Tensor | None,
    divergence: str,
    param: float,
    ignore_index: int,
) -> torch.Tensor:
    """Compute dx (M, V) from the incoming gradients g (M, V) of "none".

    All tensors have unit stride in V.
    """
    dx = x.new_empty(x.shape)
    _run(x, y, labels, None, g, None, None, dx, divergence, param, ignore_index)
    return dx


# ---- the base of the operators' Functions ----


class RowsFunction(Function):
    """A Function of two tensors of rows. The second one, of the teacher, gets no gradient.

    ``apply`` checks its arguments. `apply_function` does not: a public function has checked them. A
    subclass defines ``checked(*args)``, which raises or returns the args.
    """

    @classmethod
    def apply(cls, *args):
        return cls.apply_unchecked(*cls.checked(*args))

    @classmethod
    def apply_unchecked(cls, x, y, *args):
        return super().apply(x, y.detach(), *args)


class DivergenceFunction(RowsFunction):
    """The base of the operators' Functions."""

    @classmethod
    def checked(cls, x, y, labels=None, *args):
        return x, y, check_pair(cls.__name__, labels, input=x, target=y), *args

    @staticmethod
    def run_forward(
        ctx, name, tensors, divergence, param, reduction, ignore_index, other_arguments
    ):
        """Compute the loss, and save what backward needs.

        Args:
            tensors: x, y, and the labels if the operator has some.
            other_arguments: the arguments of ``reference`` after the tensors.
        """
        devices.require_kernels(name, tensors[0])
        check_reduction(name, reduction)
        param = float(param)
        ctx.divergence_options = divergence, param, ignore_index
        ctx.reduction = reduction
        ctx.other_arguments = other_arguments
        ctx.dtype = tensors[0].dtype
        need_dx = ctx.needs_input_grad[0]
        loss, dx, norm = divergence_fwd(
            *_kernel_inputs(tensors), divergence, param, reduction, ignore_index, need_dx
        )
        if reduction == "none":
            ctx.save_for_backward(*tensors)
        else:
            dx = dx if need_dx else None
            divisor = norm if ctx.dtype == torch.float16 else None
            save_grads(ctx, (dx, divisor), tensors)
        return loss

    @staticmethod
    def arguments(ctx):
        tensors = ctx.saved_tensors if ctx.reduction == "none" else saved_inputs(ctx, 2)
        return *tensors, *ctx.other_arguments

    @staticmethod
    def backward(ctx, g):
        other_grads = [None] * (len(ctx.needs_input_grad) - 1)
        if not ctx.needs_input_grad[0]:
            return None, *other_grads
        if ctx.reduction == "none":
            tensors = _kernel_inputs(ctx.saved_tensors)
            dx = divergence_bwd(flatten_rows(g), *tensors, *ctx.divergence_options)
        else:
            (dx, divisor), in_place = saved_grads(ctx, 2)
            dx = scale_gradient(dx, g if divisor is None else g / divisor, ctx.dtype, in_place)
        return dx, *other_grads


def _kernel_inputs(tensors):
    """Return x, y and the labels or None, with the strides that the kernel needs."""
    x, y, labels = (*tensors, None)[:3]
    return flatten_rows(x), flatten_rows(y), None if labels is None else labels.contiguous()


# ---- what the public functions share ----


def check_pair(name, labels, **rows):
    """Check two tensors (rows, entries) of one shape, and a label for each row.

    ``rows`` are the two tensors by their names. Returns the labels in int64, or None.
    """
    (first, x), (second, y) = rows.items()
    check.floats(name, rows)
    check.integers(name, {}, shift_labels=labels)
    if x.dim() != 2 or x.shape != y.shape:
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise ValueError(
            f"{name}: {first} and {second} have shapes {shapes}, give (rows, entries) for both"
        )
    if labels is None:
        return None
    if labels.device != x.device:
        raise ValueError(
            f"{name}: {first} is on {x.device}, shift_labels on {labels.device}, give one device"
        )
    if labels.shape != x.shape[:1]:
        raise AssertionError(  # existing code expects this class
            f"{name}: shift_labels has shape {tuple(labels.shape)}, "
            f"give one label a row: ({x.shape[0]},)"
        )
    return labels.long()


def check_reduction(name, reduction, reductions=DIVERGENCE_REDUCTIONS):
    if reduction not in reductions:
        raise ValueError(f"{name}: reduction is {reduction!r}, give one of {', '.join(reductions)}")


def apply_function(function, x, y, *args):
    """Apply a `RowsFunction` to checked arguments."""
    if not devices.has_kernels(x):
        return function.reference(x, y, *args)
    if not torch.compiler.is_compiling():
        return function.apply_unchecked(x, y, *args)
    # in eager, apply does this
    return function.apply(x if torch.is_grad_enabled() else x.detach(), y.detach(), *args)


def make_inputs(normalize, with_labels=True):
    """Make a case's ``inputs``. ``normalize`` is `torch.softmax` or `torch.log_softmax`."""

    def inputs(M, V):
        tensors = dict(
            input=normalize(torch.randn(M, V), -1).requires_grad_(),
            target=normalize(torch.randn(M, V), -1),
        )
        if with_labels:
            tensors["shift_labels"] = random_labels(M, V)
        return tensors

    return inputs


def make_case(name, fn, reference, inputs, options):
    return Case(
        name,
        fn,
        reference,
        inputs,
        shapes=((1, 8), (5, 123), (9, 513), (3, 17000)),
        options=options,
        bench=((8192, 32000), (8192, 128256)),
        traffic=lambda t: tuple(n * t["input"].numel() * t["input"].element_size() for n in (2, 1)),
        fp32_roundings=2,
    )
