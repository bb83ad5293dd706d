r"""Two rows of probabilities or of their logarithms, compared: the kernel of KL, JSD and TVD.

The row x of the first argument gets a gradient, the row y of the second one doesn't. loss = s·Σ D
over the entries of all valid rows, with s = 1 ("sum"), 1/n ("batchmean") or 1/(n·V) ("mean") for n
valid rows of V entries. D of an entry, and its derivative, where p = exp(y) and q = exp(x) if x and
y are logarithms, and M = β·p + (1-β)·q:

                          x      y      D                                            ∂D/∂x
    kl                    log q  p      p·(log max(p, eps) - x)                      -p
    forward_kl            log q  log p  p·(y - x)                                    -p
    reverse_kl            log q  log p  q·(x - y)                                    q·(x - y) + q
    jsd                   log q  log p  β·p·(y - log M) + (1-β)·q·(x - log M)        (1-β)·q·(x - log M)
    tvd                   p      q      ½·|x - y|                                    ½·sign(x - y), 0 for a tie

A probability of 0 contributes 0, whatever its partner's logarithm is. Arithmetic is in fp32.

The gradient is computed in forward, while x and y are at hand, and backward multiplies it by the
incoming one. For "none", each entry has an incoming gradient of its own, and backward reads x and y
again."""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import Case, Function, custom_op, keep, kept, kept_inputs, matrix_rows
from liger_kernel.core.tile import cdiv, exp_for, log_of_normal, next_power_of_2, tl, triton
from liger_kernel.ops.head.cross_entropy import labels
from liger_kernel.ops.head.divergences import OF_A_CLASS
from liger_kernel.ops.head.forward_gradients import scaled
from liger_kernel.ops.head.logits import normalisers, times

REDUCTIONS = "none", "sum", "mean", "batchmean"


def wide(x, labels=None, ignore_index=None):
    """x in fp32 or fp64, with 0 in ignored rows, so that not even their gradient depends on what
    they hold."""
    x = x if x.dtype == torch.float64 else x.float()
    return x if labels is None else x.where((labels != ignore_index)[:, None], 0)


def reduced(d, labels, reduction, ignore_index):
    """D (M, V) of the rows that are not ignored."""
    n = max(d.shape[0], 1)
    if labels is not None:
        valid = labels != ignore_index
        d, n = d.where(valid[:, None], 0), valid.sum().clamp(min=1)
    if reduction == "none":
        return d
    return d.sum() / dict(sum=1, batchmean=n, mean=n * max(d.shape[1], 1))[reduction]


# ---- D and ∂D/∂x of an entry ----

_of_jsd = OF_A_CLASS["jsd"]  # of the linear head, where G is ∂D/∂log q


@triton.jit
def _kl(x, y, eps, EXACT: tl.constexpr):
    return times(y, log_of_normal(tl.maximum(y, eps)) - x), -y


@triton.jit
def _forward_kl(x, y, number, EXACT: tl.constexpr):
    p = exp_for(y, EXACT)
    return times(p, y - x), -p


@triton.jit
def _jsd(x, y, beta, EXACT: tl.constexpr):
    return _of_jsd(exp_for(y, EXACT), exp_for(x, EXACT), y, x, beta, EXACT)


@triton.jit
def _reverse_kl(x, y, number, EXACT: tl.constexpr):
    q = exp_for(x, EXACT)
    d = times(q, x - y)
    return d, d + q


@triton.jit
def _tvd(x, y, number, EXACT: tl.constexpr):
    d = 0.5 * (x - y)
    return tl.abs(d), tl.where(d > 0, 0.5, tl.where(d < 0, -0.5, 0.0))


OF_AN_ENTRY = dict(kl=_kl, forward_kl=_forward_kl, jsd=_jsd, reverse_kl=_reverse_kl, tvd=_tvd)


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
    number,
    DIVERGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK entries of one row. It fills what is given of ΣD/norm, D, and dx.

    dx is ∂D/∂x times the incoming gradients g of D; without g it is divided by norm. In fp16, which
    it could vanish in, that is left to backward."""
    blocks = tl.cdiv(N, BLOCK)
    m = tl.cast(tl.program_id(0) // blocks, tl.int64)
    i = tl.cast(tl.program_id(0) % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    end = N
    if labels_ptr is not None:
        end = tl.where(tl.load(labels_ptr + m) == ignore_index, 0, N)
    inside, valid = i < N, i < end
    EXACT: tl.constexpr = (
        x_ptr.dtype.element_ty == tl.float32 or y_ptr.dtype.element_ty == tl.float32
    )
    x = tl.load(x_ptr + m * stride_x + i, mask=valid, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + m * stride_y + i, mask=valid, other=0.0).to(tl.float32)
    d, slope = DIVERGE(x, y, number, EXACT)
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
        tl.store(
            dx_ptr + m * N + i, tl.where(valid, slope, 0.0).to(dx_ptr.dtype.element_ty), mask=inside
        )


def _launch(N):
    """(columns, warps) of a program: 16 columns a thread."""
    columns = min(next_power_of_2(N), 4096)
    return columns, max(columns // 512, 1)


def _run(x, y, labels, norm, g, sums, d, dx, divergence, number, ignore_index):
    (M, N), (columns, warps) = x.shape, _launch(x.shape[1])
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
            number,
            DIVERGE=OF_AN_ENTRY[divergence],
            BLOCK=columns,
            num_warps=devices.warps(warps, x),
        )


def _normaliser(x, labels, reduction, ignore_index):
    """What ΣD is divided by, 0-d in fp32."""
    M, V = x.shape
    if labels is None or reduction == "sum":
        return x.new_full(
            (), max(dict(sum=1, batchmean=M, mean=M * V)[reduction], 1), dtype=torch.float32
        )
    return normalisers(labels, None, V, ignore_index, True)[0] * (V if reduction == "mean" else 1)


def _outputs(x, y, labels, divergence, number, reduction, ignore_index, need_dx):
    if reduction == "none":
        return x.new_empty(x.shape, dtype=torch.float32), None, None
    loss, norm = (x.new_empty((), dtype=torch.float32) for _ in range(2))
    return loss, x.new_empty(x.shape) if need_dx else None, norm


@custom_op("divergence", _outputs)
def divergence_fwd(
    x: torch.Tensor,
    y: torch.Tensor,
    labels: torch.Tensor | None,
    divergence: str,
    number: float,
    reduction: str,
    ignore_index: int,
    need_dx: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, y (M, V) with unit stride in V, labels (M,) -> the loss, dx for an incoming 1, what ΣD was
    divided by.

    In fp16, dx is not divided. For "none" the loss is D (M, V), and there is no more. number: beta
    or eps."""
    loss, dx, norm = _outputs(x, y, labels, divergence, number, reduction, ignore_index, need_dx)
    if reduction == "none":
        _run(x, y, labels, None, None, None, loss, None, divergence, number, ignore_index)
        return loss, None, None
    norm = _normaliser(x, labels, reduction, ignore_index)
    sums = loss.new_empty(x.shape[0] * cdiv(x.shape[1], _launch(x.shape[1])[0]))
    _run(x, y, labels, norm, None, sums, None, dx, divergence, number, ignore_index)
    return sums.sum(), dx, norm


def _gradient(g, x, y, labels, divergence, number, ignore_index):
    return x.new_empty(x.shape)


@custom_op("divergence_backward", _gradient)
def divergence_bwd(
    g: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    labels: torch.Tensor | None,
    divergence: str,
    number: float,
    ignore_index: int,
) -> torch.Tensor:
    """Incoming gradients g (M, V) of "none" -> dx (M, V). All have unit stride in V."""
    dx = x.new_empty(x.shape)
    _run(x, y, labels, None, g, None, None, dx, divergence, number, ignore_index)
    return dx


# ---- what the operators share ----


class RowsFunction(Function):
    """A Function whose ``apply`` checks what `applied` has from a public function, which has
    checked it.

    A subclass defines ``checked(*args)``, which returns the args. The second one, of the teacher,
    gets no gradient."""

    @classmethod
    def apply(cls, *args):
        return cls.unchecked(*cls.checked(*args))

    @classmethod
    def unchecked(cls, x, y, *args):
        return super().apply(x, y.detach(), *args)


class DivergenceFunction(RowsFunction):
    """The base of the operators' Functions."""

    @classmethod
    def checked(cls, x, y, labels=None, *args):
        return x, y, check_pair(cls.__name__, labels, input=x, target=y), *args

    @staticmethod
    def save(ctx, name, tensors, divergence, number, reduction, ignore_index, rest):
        """-> the loss of ``tensors``: x, y, and the labels if there can be some; ``rest``: the
        other arguments."""
        devices.require_kernels(name, tensors[0])
        check_reduction(name, reduction)
        ctx.of_rows, ctx.reduction, ctx.rest = (
            (divergence, float(number), ignore_index),
            reduction,
            rest,
        )
        ctx.dtype, need_dx = tensors[0].dtype, ctx.needs_input_grad[0]
        loss, dx, norm = divergence_fwd(
            *_rows(tensors), divergence, float(number), reduction, ignore_index, need_dx
        )
        if reduction == "none":
            ctx.save_for_backward(*tensors)
        else:
            keep(
                ctx,
                (dx if need_dx else None, norm if ctx.dtype == torch.float16 else None),
                tensors,
            )
        return loss

    @staticmethod
    def arguments(ctx):
        return *(ctx.saved_tensors if ctx.reduction == "none" else kept_inputs(ctx, 2)), *ctx.rest

    @staticmethod
    def backward(ctx, g):
        nothing = [None] * (len(ctx.needs_input_grad) - 1)
        if not ctx.needs_input_grad[0]:
            return None, *nothing
        if ctx.reduction == "none":
            dx = divergence_bwd(matrix_rows(g), *_rows(ctx.saved_tensors), *ctx.of_rows)
        else:
            (dx, norm), in_place = kept(ctx, 2)
            dx = scaled(dx, g if norm is None else g / norm, ctx.dtype, in_place)
        return dx, *nothing


def _rows(tensors):
    """x, y and the labels or None, as the kernel reads them."""
    x, y, labels = (*tensors, None)[:3]
    return matrix_rows(x), matrix_rows(y), None if labels is None else labels.contiguous()


def check_pair(name, labels, **rows):
    """Two tensors (rows, entries) of one shape, and a label for each row, or None."""
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
    if labels.shape != x.shape[:1]:  # of the class that existing code expects
        raise AssertionError(
            f"{name}: shift_labels has shape {tuple(labels.shape)}, give one label a row: ({x.shape[0]},)"
        )
    return labels.long()


def check_reduction(name, reduction, known=REDUCTIONS):
    if reduction not in known:
        raise ValueError(f"{name}: reduction is {reduction!r}, give one of {', '.join(known)}")


def applied(function, x, y, *args):
    if not devices.has_kernels(x):
        return function.reference(x, y, *args)
    if not torch.compiler.is_compiling():
        return function.unchecked(x, y, *args)
    return function.apply(
        x if torch.is_grad_enabled() else x.detach(), y.detach(), *args
    )  # in eager, apply does this


def inputs_of(of_logits, labelled=True):
    def inputs(M, V):
        input, target = (of_logits(torch.randn(M, V), -1) for _ in range(2))
        return dict(input=input.requires_grad_(), target=target) | (
            dict(shift_labels=labels(M, V)) if labelled else {}
        )

    return inputs


def case_of(name, fn, reference, inputs, options):
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
