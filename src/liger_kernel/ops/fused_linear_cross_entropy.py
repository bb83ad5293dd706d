r"""Cross entropy of a linear head, without its logits in memory.

    X = h·Wᵀ + b,   loss = Σ_rows token_loss(X)    (`_token_loss`: softcap, class weights, smoothing, z-loss, ...)
    dh = dX·W,   dW = dXᵀ·h,   db = Σ_rows dX

The rows go through in chunks: one matmul makes a chunk of logits, one kernel turns it into the loss and, in place, into
its gradient, two matmuls carry that on. So a scalar loss takes its gradients in forward, three matmuls in all, and the
head's weight may be gone in backward (ZeRO-3); backward only multiplies them by the incoming gradient. Where each token
has an incoming gradient of its own (reduction="none"), backward makes the logits again.

A chunk is large enough to keep the matrix units busy, and there are few of them: dW is accumulated in its own dtype
over at most `CHUNKS` of them, in fp32 beyond that or if ``accum_dtype`` says so. Logits are rounded to the compute
dtype, as Hugging Face's head rounds them.

Sources: DFT's token scaling arXiv:2508.05629; the rest as in `cross_entropy`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from . import _device
from ._op import CASES, Case, Function, custom_op, rounded
from ._tile import tl, triton
from ._token_loss import normalisers, token_gradient, token_loss
from .cross_entropy import EVERYTHING, check_options, check_rows, cross_entropy_reference, labels, packed, unpacked

ROWS = 2048  # of a chunk, twice as many for more than CHUNKS of them. 512 cost 10-17 % of the matmul rate on an H200
ROWS_WITHOUT_KERNELS = 256  # of a chunk on the CPU
CHUNKS = 4  # over which dW may be accumulated in 16 bits: k roundings make its error at most √((k+1)/2) times one's


def fused_linear_cross_entropy_reference(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False, ce_impl=None, ce_mode=None, chunk_mem_const=1,
    logit_scale=1.0,
):  # fmt: skip
    """-> (loss, z_loss, token_accuracy, predicted_tokens)."""
    dtype = _compute_dtype(input, weight)
    x = F.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    loss, z_loss, *counts = cross_entropy_reference(
        x, target, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
        return_z_loss, return_token_accuracy, return_predicted_tokens, logit_scale, use_token_scaling,
    )  # fmt: skip
    return loss, None if z_loss is None else z_loss.to(input.dtype), *counts


def fused_linear_cross_entropy_in_chunks(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", *args, **kwargs,
):  # fmt: skip
    """The reference a few rows at a time, each chunk's logits made again in backward: what runs without kernels."""
    options = ignore_index, lse_square_scale, label_smoothing
    if torch.compiler.is_compiling() or (reduction == "mean" and ce_weight is not None and lse_square_scale):
        return fused_linear_cross_entropy_reference(
            input, weight, target, bias, ce_weight, *options, reduction, *args, **kwargs
        )

    def of_chunk(h, y):
        return fused_linear_cross_entropy_reference(h, weight, y, bias, ce_weight, *options, "none", *args, **kwargs)

    chunks = zip(input.split(ROWS_WITHOUT_KERNELS), target.split(ROWS_WITHOUT_KERNELS), strict=True)
    chunks = [checkpoint(of_chunk, h, y, use_reentrant=False, preserve_rng_state=False) for h, y in chunks]
    loss, z_loss, correct, best = (None if of[0] is None else torch.cat(of) for of in zip(*chunks, strict=True))
    if reduction != "none":
        valid = target != ignore_index
        n = valid.sum()
        loss, z_loss = loss.sum(), None if z_loss is None else z_loss.sum()
        correct = None if correct is None else correct.sum() / n
        if reduction == "mean":
            total = n if ce_weight is None else ce_weight[target.where(valid, 0)].where(valid, 0).sum()
            loss, z_loss = loss / total.clamp(min=1e-30), None if z_loss is None else z_loss / n.clamp(min=1)
    return loss, z_loss, correct, best


@triton.jit
def _scale(x_ptr, g_ptr, y_ptr, N, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr):
    """y = x·g. In place there is nothing to do for g = 1, which only the device can see."""
    g = tl.load(g_ptr).to(tl.float32)
    if IN_PLACE and g == 1.0:
        return
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, step):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + i, (x * g).to(y_ptr.dtype.element_ty), mask=i < N)


def _scaled(x, g, dtype, in_place):
    """x·g in ``dtype`` for g of one element; over x itself if allowed."""
    if x.numel() == 0 or torch.compiler.is_compiling():
        return (x * g).to(dtype)
    in_place = in_place and x.dtype == dtype
    y = x if in_place else torch.empty_like(x, dtype=dtype)
    programs = min(triton.cdiv(x.numel(), 4096), 8 * _device.multiprocessors(x))
    with _device.guard(x):
        _scale[(programs,)](x, g, y, x.numel(), BLOCK=4096, IN_PLACE=in_place, num_warps=8)
    return y


def _compute_dtype(input, weight):
    """Autocast's dtype where it is on; otherwise that of the weight."""
    kind = input.device.type
    if input.dtype != torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def _chunks(M, factor):
    """(rows of a chunk, number of chunks)."""
    count = max(triton.cdiv(M, ROWS * factor), 1)
    if count > CHUNKS:  # each chunk reads and writes all of dW
        count = triton.cdiv(M, 2 * ROWS * factor)
    even = triton.cdiv(triton.cdiv(M, count), 128) * 128  # the matmuls like multiples of 128
    return max(min(even, M), 1), count


def _add_product(out, a, b, first):
    """out (+)= a @ b, whatever the dtype of out."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if first else out.addmm_(a, b)
    elif out.dtype == torch.float32 and _device.multiplies_into_fp32(out):
        torch.mm(a, b, out_dtype=torch.float32, out=out) if first else torch.addmm(
            out, a, b, out_dtype=torch.float32, out=out
        )
    else:
        product = a.to(out.dtype) @ b.to(out.dtype)
        out.copy_(product) if first else out.add_(product)


def _project(h, w, b, out):
    """Logits of a chunk, in the dtype of w."""
    torch.mm(h, w.t(), out=out) if b is None else torch.addmm(b, h, w.t(), out=out)


class _Head:
    """The chunk loop that forward (gradients at once) and backward (of "none") share."""

    def __init__(self, h, w, b, dtype, factor):
        self.h, self.dtype = h, dtype
        self.w, self.b = w.to(dtype), None if b is None else b.to(dtype)
        self.rows, _ = _chunks(h.shape[0], factor)
        self.logits = torch.empty((self.rows, w.shape[0]), dtype=dtype, device=h.device)

    def chunks(self):
        """For each chunk its slice, its rows of h, and its logits in a buffer that is used again."""
        for start in range(0, self.h.shape[0], self.rows):
            i = slice(start, min(start + self.rows, self.h.shape[0]))
            h = self.h[i].to(self.dtype)
            x = self.logits[: h.shape[0]]
            _project(h, self.w, self.b, x)
            yield i, h, x

    def carry(self, i, h, dx, dh, dw, db):
        """A chunk's logit gradient into the gradients that are wanted (not empty)."""
        if dh.numel():
            if dh.dtype == self.dtype:
                torch.mm(dx, self.w, out=dh[i])
            else:
                dh[i] = dx @ self.w
        if dw.numel():
            _add_product(dw, dx.t(), h, first=i.start == 0)
        if db.numel():
            part = dx.sum(0, dtype=torch.float32)
            db.copy_(part) if i.start == 0 else db.add_(part)


def _gradients(h, w, b, dtype, accum_dtype, factor, need_h, need_w, need_b):
    """Empty dh, dw, db; of no elements where not needed. dw is zero where no chunk will write it."""
    _, count = _chunks(h.shape[0], factor)
    exact = dtype == torch.float16 or (count > CHUNKS and w.dtype != torch.float32)
    dw_dtype = accum_dtype or (torch.float32 if exact else w.dtype)
    new = torch.zeros if h.shape[0] == 0 else torch.empty
    dh = torch.empty(h.shape if need_h else 0, dtype=h.dtype, device=h.device)
    dw = new(w.shape if need_w else 0, dtype=dw_dtype, device=h.device)
    db = new(b.shape if need_b else 0, dtype=torch.float32, device=h.device)
    return dh, dw, db


def _forward_outputs(
    h, w, b, target, ce_weight, ignore_index, lse_square_scale, label_smoothing, mean, softcap, logit_scale,
    token_scaling, dtype, accum_dtype, factor, need_z, need_token, need_best, need_h, need_w, need_b,
):  # fmt: skip
    M = h.shape[0]
    shapes = (M,), (M, 2), (M if need_z else 0,), (M if need_token else 0,), (4,)
    floats = (h.new_empty(shape, dtype=torch.float32) for shape in shapes)
    best = target.new_empty(M if need_best else 0, dtype=torch.int64)
    return *floats, best, *_gradients(h, w, b, dtype, accum_dtype, factor, need_h, need_w, need_b)


@custom_op("fused_linear_cross_entropy", _forward_outputs)
def flce_fwd(
    h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, target: torch.Tensor, ce_weight: torch.Tensor | None,
    ignore_index: int, lse_square_scale: float, label_smoothing: float, mean: bool, softcap: float | None,
    logit_scale: float, token_scaling: bool, dtype: torch.dtype, accum_dtype: torch.dtype | None, factor: int,
    need_z: bool, need_token: bool, need_best: bool, need_h: bool, need_w: bool, need_b: bool,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
    torch.Tensor,
]:  # fmt: skip
    """-> per row loss, (max, log-sum), z_loss, token scale; normalisers (4,); predicted; dh, dw, db."""
    loss, stats, z_loss, token, _, best, dh, dw, db = _forward_outputs(
        h, w, b, target, ce_weight, ignore_index, lse_square_scale, label_smoothing, mean, softcap, logit_scale,
        token_scaling, dtype, accum_dtype, factor, need_z, need_token, need_best, need_h, need_w, need_b,
    )  # fmt: skip
    norm = normalisers(target, ce_weight, w.shape[0], ignore_index, mean)
    # fp16 can't hold gradients divided by the number of tokens; backward divides the finished ones
    inside = norm if dtype != torch.float16 else torch.stack((norm[0] / norm[0], norm[1] / norm[0], norm[2], norm[3]))
    head = _Head(h, w, b, dtype, factor)
    for i, part, x in head.chunks():
        token_loss(
            x, target[i], ce_weight, inside, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale,
            loss[i], stats[i], z_loss[i] if need_z else None, token[i] if need_token else None,
            best[i] if need_best else None, token_scaling, gradient=need_h or need_w or need_b,
        )  # fmt: skip
        head.carry(i, part, x, dh, dw, db)
    if dtype == torch.float16:
        loss.div_(norm[0])
        z_loss.div_(norm[0])
    return loss, stats, z_loss, token, norm, best, dh, dw, db


def _backward_outputs(
    g, h, w, b, target, ce_weight, norm, stats, ignore_index, lse_square_scale, label_smoothing, softcap, logit_scale,
    dtype, accum_dtype, factor, need_h, need_w, need_b,
):  # fmt: skip
    return _gradients(h, w, b, dtype, accum_dtype, factor, need_h, need_w, need_b)


@custom_op("fused_linear_cross_entropy_backward", _backward_outputs)
def flce_bwd(
    g: torch.Tensor, h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, target: torch.Tensor,
    ce_weight: torch.Tensor | None, norm: torch.Tensor, stats: torch.Tensor, ignore_index: int,
    lse_square_scale: float, label_smoothing: float, softcap: float | None, logit_scale: float,
    dtype: torch.dtype, accum_dtype: torch.dtype | None, factor: int, need_h: bool, need_w: bool, need_b: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """g (M,): the incoming gradient of each row's loss -> dh, dw, db."""
    dh, dw, db = _gradients(h, w, b, dtype, accum_dtype, factor, need_h, need_w, need_b)
    head = _Head(h, w, b, dtype, factor)
    for i, part, x in head.chunks():
        token_gradient(
            g[i], x, target[i], ce_weight, norm, stats[i], x,
            ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale,
        )  # fmt: skip
        head.carry(i, part, x, dh, dw, db)
    return dh, dw, db


def fused_linear_cross_entropy_forward(
    _input, weight, target, ce_weight=None, bias=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False, chunk_mem_const=1, logit_scale=1.0,
    needs_grad=(False, False, False),
):  # fmt: skip
    """-> (loss, z_loss, token_accuracy, predicted_tokens), (d_input, d_weight, d_bias), and what backward needs.

    The gradients are of loss·n₀ for fp16, and empty where not needed or where ``reduction`` is "none".
    """
    dtype = _compute_dtype(_input, weight)
    scalar = reduction != "none"
    needs = needs_grad if scalar else (False, False, False)
    loss, stats, z_loss, token, norm, best, *grads = flce_fwd(
        _input, weight, bias, target, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction == "mean",
        softcap, logit_scale, use_token_scaling, dtype, accum_dtype, chunk_mem_const, return_z_loss,
        use_token_scaling and not scalar, return_token_accuracy or return_predicted_tokens, *needs,
    )  # fmt: skip
    correct = (best == target).float() if return_token_accuracy else None
    outputs = (
        loss.sum() if scalar else loss,
        rounded(z_loss.sum() if scalar else z_loss, _input.dtype) if return_z_loss else None,
        correct.sum() / norm[3] if return_token_accuracy and scalar else correct,
        best if return_predicted_tokens else None,
    )
    return outputs, grads, (stats, token, norm, dtype)


def fused_linear_cross_entropy_backward(
    grad_output, grad_input, grad_weight, grad_bias, weight_dtype=None, bias_dtype=None, in_place=False
):  # fmt: skip
    """The gradients that forward took, times the incoming one (0-d); in their final dtypes."""
    return (
        _scaled(grad_input, grad_output, grad_input.dtype, in_place),
        _scaled(grad_weight, grad_output, weight_dtype or grad_weight.dtype, in_place),
        _scaled(grad_bias, grad_output, bias_dtype or grad_bias.dtype, in_place),
    )


class LigerFusedLinearCrossEntropyFunction(Function):
    """``apply(_input (M, H), weight (V, H), target (M,), ...) -> (loss, z_loss, token_accuracy, predicted_tokens)``.

    What was not asked for is None. ``ce_impl`` and ``ce_mode`` are accepted and choose nothing.
    """

    reference = staticmethod(fused_linear_cross_entropy_in_chunks)

    @staticmethod
    def forward(
        ctx, _input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0,
        label_smoothing=0.0, reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None,
        use_token_scaling=False, return_token_accuracy=False, return_predicted_tokens=False,
        ce_impl=None, ce_mode=None, chunk_mem_const=1, logit_scale=1.0,
    ):  # fmt: skip
        _device.require_kernels("LigerFusedLinearCrossEntropyFunction", _input)
        needs = ctx.needs_input_grad
        ctx.needs = needs[0], needs[1], bias is not None and needs[3]
        target = target.contiguous()
        ce_weight = None if ce_weight is None else ce_weight.contiguous()
        outputs, grads, (stats, token, norm, dtype) = fused_linear_cross_entropy_forward(
            _input, weight, target, ce_weight, bias, ignore_index, lse_square_scale, label_smoothing, reduction,
            softcap, return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
            chunk_mem_const, logit_scale, ctx.needs,
        )  # fmt: skip
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.scalar = reduction != "none"
        if ctx.scalar:
            ctx.divide = dtype == torch.float16
            ctx.save_for_backward(norm, *grads)
        else:
            ctx.token_scaling = use_token_scaling
            ctx.options = (
                ignore_index, lse_square_scale, label_smoothing, softcap, logit_scale, dtype, accum_dtype,
                chunk_mem_const,
            )  # fmt: skip
            ctx.save_for_backward(_input, weight, bias, target, ce_weight, norm, stats, token)
        ctx.mark_non_differentiable(*(t for t in outputs[1:] if t is not None))
        return outputs

    @staticmethod
    def backward(ctx, dloss, *_):
        if ctx.scalar:
            norm, *grads = ctx.saved_tensors
            in_place = not torch.compiler.is_compiling() and not torch._C._autograd._get_current_graph_task_keep_graph()
            dloss = dloss / norm[0] if ctx.divide else dloss
            dh, dw, db = fused_linear_cross_entropy_backward(dloss, *grads, *ctx.dtypes, in_place=in_place)
        else:
            h, w, b, target, ce_weight, norm, stats, token = ctx.saved_tensors
            g = dloss * token if ctx.token_scaling else dloss
            dh, dw, db = flce_bwd(g, h, w, b, target, ce_weight, norm, stats, *ctx.options, *ctx.needs)
            dw, db = rounded(dw, ctx.dtypes[0]), rounded(db, ctx.dtypes[1] or db.dtype)
        need_h, need_w, need_b = ctx.needs
        return dh if need_h else None, dw if need_w else None, None, db if need_b else None, *[None] * 15


def liger_fused_linear_cross_entropy(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False, chunk_mem_const=1, logit_scale=1.0,
):  # fmt: skip
    """Cross entropy of ``input @ weight.T + bias`` without those logits in memory.

    Args:
        input: (M, H) hidden states, fp32, bf16 or fp16; any strides.
        weight: (V, H) of the head. Logits are computed in its dtype, or in autocast's where that is on.
        target: (M,) class indices.
        bias: (V,).
        ce_weight: (V,) class weights.
        ignore_index, lse_square_scale, label_smoothing, reduction, softcap: as in `liger_cross_entropy`.
        return_z_loss, return_token_accuracy, return_predicted_tokens: ask for a `CrossEntropyOutput`.
        accum_dtype: dtype in which the gradients of weight (and bias) are accumulated over the chunks. None: the
            weight's over few chunks, fp32 over many; torch.float32 costs 4·V·H bytes and makes them exact.
        use_token_scaling: multiply each row's loss by the detached probability of its target (DFT, arXiv:2508.05629).
        chunk_mem_const: chunks of this many times more rows; the result is the same.
        logit_scale: the logits are multiplied by it, before the softcap.

    Returns:
        The loss in fp32: 0-d, or (M,) for "none". With one of the ``return_*``: `CrossEntropyOutput`, as of
        `liger_cross_entropy` (z_loss in input's dtype). Gradients go to whichever of input, weight and bias require
        one, computed in forward; for "none", where each row has an incoming gradient of its own, in backward.

    Raises:
        ValueError, TypeError: shapes or options that don't fit.
    """
    name = "liger_fused_linear_cross_entropy"
    check_options(name, reduction, label_smoothing, softcap)
    if input.dim() != 2 or weight.dim() != 2 or input.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{name}: input has shape {tuple(input.shape)} and weight {tuple(weight.shape)}, give (rows, hidden size) "
            "and (classes, hidden size)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}, give one number a class: ({weight.shape[0]},)")
    if not isinstance(chunk_mem_const, int) or chunk_mem_const < 1:
        raise ValueError(f"{name}: chunk_mem_const is {chunk_mem_const!r}, give a positive int")
    check_rows(name, input, target, ce_weight, weight.shape[0])
    run = LigerFusedLinearCrossEntropyFunction.apply
    if not _device.has_kernels(input):
        run = fused_linear_cross_entropy_in_chunks
    elif not torch.is_grad_enabled():  # apply does this in eager; under torch.compile it is skipped
        input, weight, bias = input.detach(), weight.detach(), None if bias is None else bias.detach()
    return packed(
        *run(
            input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
            return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
            None, None, chunk_mem_const, logit_scale,
        )
    )  # fmt: skip


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """`liger_fused_linear_cross_entropy` with its options kept: ``forward(lin_weight, _input, target, bias=None)``."""

    def __init__(
        self, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
        softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False, return_token_accuracy=False,
        return_predicted_tokens=False,
    ):  # fmt: skip
        super().__init__()
        check_options(type(self).__name__, reduction, label_smoothing, softcap)
        self.ce_weight, self.ignore_index, self.lse_square_scale = ce_weight, ignore_index, lse_square_scale
        self.label_smoothing, self.reduction, self.softcap = label_smoothing, reduction, softcap
        self.return_z_loss, self.accum_dtype, self.use_token_scaling = return_z_loss, accum_dtype, use_token_scaling
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, lin_weight, _input, target, bias=None):
        return liger_fused_linear_cross_entropy(
            _input, lin_weight, target, bias, self.ce_weight, self.ignore_index, self.lse_square_scale,
            self.label_smoothing, self.reduction, self.softcap, self.return_z_loss, self.accum_dtype,
            self.use_token_scaling, self.return_token_accuracy, self.return_predicted_tokens,
        )  # fmt: skip


def _outputs_of(loss):
    """A case's function: the loss with everything it returns, as a tuple."""

    def call(input, weight, target, bias=None, class_weights=False, **options):
        w = torch.linspace(0.5, 2, weight.shape[0], device=weight.device) if class_weights else None
        return unpacked(loss(input, weight, target, bias, w, **options))

    return call


def _inputs(M, H, V):
    tensors = dict(input=torch.randn(M, H), weight=torch.randn(V, H) * 2 / H**0.5, bias=torch.randn(V))
    return {k: t.requires_grad_() for k, t in tensors.items()} | dict(target=labels(M, V))


CASES.append(
    Case(
        "fused_linear_cross_entropy",
        fn=_outputs_of(liger_fused_linear_cross_entropy),
        reference=_outputs_of(fused_linear_cross_entropy_reference),
        inputs=_inputs,
        shapes=((1, 8, 8), (5, 24, 123), (9, 32, 513), (4, 16, 9000)),
        options=(
            dict(bias=None),
            dict(reduction="sum", logit_scale=0.5),
            dict(reduction="none", label_smoothing=0.1),
            dict(class_weights=True, use_token_scaling=True, **EVERYTHING),
            dict(class_weights=True, use_token_scaling=True, reduction="none", **EVERYTHING),
        ),
        bench=(
            (8192, 4096, 128256), (8192, 2304, 256000), (4096, 2048, 128256), (16384, 3584, 152064),
            (2048, 4096, 128256), (32768, 2048, 128256), (512, 4096, 128256),
        ),
        flops=lambda t: 6 * t["input"].numel() * t["weight"].shape[0],
        fp32_roundings=4,  # logits of size 5, capped by a tanh that is good to 2 ulp
    )
)  # fmt: skip
