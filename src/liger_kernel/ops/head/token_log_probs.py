r"""What a linear head gives for each token: its loss, log-probability, log-sum-exp, entropy, ...

    X = h·Wᵀ + b,   per token: loss, log-sum-exp, entropy, ...   (`logits`: softcap, class weights, smoothing, ...)

The logits are computed in chunks (`chunks`). Each token has incoming gradients of its own, so
backward computes them again. On Hopper, forward and the gradient of the logits are a kernel each,
which never stores them (`hopper`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, F, Function, custom_op, kept, matrix, rounded, unseen
from liger_kernel.core.parallel import (
    copy_to_group,
    group_name,
    local,
    place,
    token_loss_reference_parallel,
)
from liger_kernel.ops.head import hopper
from liger_kernel.ops.head.chunks import (
    bytes_of_all,
    empty_gradients,
    empty_logits,
    gradients_of_all,
    logits_of_all,
    plan_for,
    run_chunks,
)
from liger_kernel.ops.head.cross_entropy import (
    check_options,
    check_rows,
    check_targets,
    labels,
    weights_of,
)
from liger_kernel.ops.head.hopper import Product
from liger_kernel.ops.head.logits import TokenOptions, normalisers, token_gradient, token_loss
from liger_kernel.ops.head.planning import budget

ROWS_WITHOUT_KERNELS = 256  # tokens of a chunk on the CPU


# ---- as custom ops ----

WANTS = (
    "z_loss",
    "token",
    "entropy",
    "mean",
    "best",
)  # what forward may be asked for beside the loss


def reads_logits(wants, token_scaling=False) -> bool:
    """Whether forward has to have logits for what it gives. Then backward takes logits, too: see
    `hopper`."""
    _, token, _, mean, best = wants
    return token_scaling or token or mean or best


def _forward_outputs(
    h,
    w,
    b,
    target,
    ce_weight,
    items,
    numbers,
    ignore_index,
    mean,
    token_scaling,
    dtype,
    accum_dtype,
    memory,
    group,
    wants,
    needs,
):
    M = h.shape[0]
    shapes = (M,), (M, 2), (4,), *((M if want else 0,) for want in wants[:-1])
    floats = (h.new_empty(shape, dtype=torch.float32) for shape in shapes)
    best = target.new_empty(M if wants[-1] else 0, dtype=torch.int64)
    return *floats, best, *empty_gradients(h, w, dtype, accum_dtype, needs)


def _forward(
    run,
    h,
    w,
    b,
    target,
    ce_weight,
    items,
    numbers,
    ignore_index,
    mean,
    token_scaling,
    dtype,
    group,
    wants,
    needs,
):
    """Of all tokens whose logits ``run(to_gradient)`` makes, and gives to that function.

    -> loss (M,), (max, log-sum) (M, 2), normalisers (4,); what is wanted of `WANTS`; the needed dh,
    dW, db.

    numbers: lse_square_scale, label_smoothing, softcap or 0, logit_scale. The losses are divided by
    ``items`` (0-d) if given. The gradients are those of the sum of the losses, times n₀ in fp16,
    which can't hold them divided."""
    world, options = place(group)[0], TokenOptions(ignore_index, *numbers)
    norm = normalisers(target, ce_weight, w.shape[0] * world, ignore_index, mean, items)
    inside = (
        norm
        if dtype != torch.float16
        else torch.stack((norm[0] / norm[0], norm[1] / norm[0], norm[2], norm[3]))
    )
    loss, stats = (
        h.new_empty(h.shape[0], dtype=torch.float32),
        h.new_empty((h.shape[0], 2), dtype=torch.float32),
    )
    wanted = {name: torch.empty_like(loss) for name, want in zip(WANTS, wants, strict=True) if want}
    if wants[-1]:
        wanted["best"] = target.new_empty(h.shape[0], dtype=torch.int64)
    if token_scaling and "token" not in wanted and any(needs):
        wanted["token"] = torch.empty_like(loss)

    def to_gradient(i, x):
        y, parts = target[i], {name: whole[i] for name, whole in wanted.items()}
        if isinstance(x, Product):
            hopper.token_loss(x, y, inside, options, loss[i], stats[i], **parts, bias=b)
            return
        token_loss(
            x,
            y,
            ce_weight,
            inside,
            options,
            loss[i],
            stats[i],
            **parts,
            token_scaling=token_scaling,
            group=group,
            bias=b,
        )
        if any(needs):
            g = parts["token"] if token_scaling else None
            token_gradient(g, x, y, ce_weight, inside, stats[i], x, options, group=group, bias=b)

    gradients = run(to_gradient)
    if dtype == torch.float16:
        loss.div_(norm[0])
        if wants[0]:
            wanted["z_loss"].div_(norm[0])
    kind = dict.fromkeys(WANTS, torch.float32) | dict(best=torch.int64)
    outputs = (
        wanted[name] if want else h.new_empty(0, dtype=kind[name])
        for name, want in zip(WANTS, wants, strict=True)
    )
    return loss, stats, norm, *outputs, *gradients


@custom_op("linear_head", _forward_outputs)
def head_fwd(
    h: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    target: torch.Tensor,
    ce_weight: torch.Tensor | None,
    items: torch.Tensor | None,
    numbers: list[float],
    ignore_index: int,
    mean: bool,
    token_scaling: bool,
    dtype: torch.dtype,
    accum_dtype: torch.dtype | None,
    memory: int,
    group: str | None,
    wants: list[bool],
    needs: list[bool],
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]:
    """`_forward`, whose gradients are made a chunk at a time."""
    plan = plan_for(h, w, dtype, accum_dtype, memory, needs[1])
    reads = any(needs) or reads_logits(wants, token_scaling)

    def run(to_gradient):
        if not reads and hopper.applies(h, w, dtype, numbers, ce_weight, group):
            hopper.run(h, w, dtype, plan.rows, to_gradient)
            return empty_gradients(h, w, dtype, accum_dtype, needs)
        return run_chunks(h, w, None, dtype, plan, to_gradient, needs, group)

    return _forward(
        run,
        h,
        w,
        b,
        target,
        ce_weight,
        items,
        numbers,
        ignore_index,
        mean,
        token_scaling,
        dtype,
        group,
        wants,
        needs,
    )


def _kept_outputs(
    h, w, b, target, ce_weight, items, numbers, ignore_index, mean, token_scaling, dtype, wants
):
    nothing = [False] * 3
    *outputs, _, _, _ = _forward_outputs(
        h,
        w,
        b,
        target,
        ce_weight,
        items,
        numbers,
        ignore_index,
        mean,
        token_scaling,
        dtype,
        None,
        0,
        None,
        wants,
        nothing,
    )
    return *outputs, empty_logits(h, w, dtype)


@custom_op("linear_head_kept", _kept_outputs)
def head_fwd_kept(
    h: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    target: torch.Tensor,
    ce_weight: torch.Tensor | None,
    items: torch.Tensor | None,
    numbers: list[float],
    ignore_index: int,
    mean: bool,
    token_scaling: bool,
    dtype: torch.dtype,
    wants: list[bool],
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]:
    """`_forward`, and all the logits, for `head_bwd_kept`."""
    logits = logits_of_all(h, w, dtype)

    def run(read):
        read(slice(None), logits[:, : len(h)].t())
        return ()

    outputs = _forward(
        run,
        h,
        w,
        b,
        target,
        ce_weight,
        items,
        numbers,
        ignore_index,
        mean,
        token_scaling,
        dtype,
        None,
        wants,
        [False] * 3,
    )
    return *outputs, logits


def _turns(
    g, g_entropy, g_lse, b, target, ce_weight, norm, stats, entropy, numbers, ignore_index, group
):
    """-> a function that writes the gradient of some tokens' logits x over these, or to dx: of a
    `Product`, to dx."""
    options = TokenOptions(ignore_index, *numbers)

    def to_gradient(i, x, dx=None):
        ge, gs, e = (None if of is None else of[i] for of in (g_entropy, g_lse, entropy))
        of_each = g[i] if g.dim() else g
        if isinstance(x, Product):
            hopper.token_gradient(of_each, x, target[i], norm, stats[i], dx, options, ge, gs, e, b)
            return
        dx = x if dx is None else dx
        token_gradient(
            of_each, x, target[i], ce_weight, norm, stats[i], dx, options, ge, gs, e, group, b
        )

    return to_gradient


def _backward_outputs(
    g,
    g_entropy,
    g_lse,
    h,
    w,
    b,
    target,
    ce_weight,
    norm,
    stats,
    entropy,
    numbers,
    ignore_index,
    dtype,
    accum_dtype,
    memory,
    group,
    reads,
    needs,
):
    return empty_gradients(h, w, dtype, accum_dtype, needs)


@custom_op("linear_head_backward", _backward_outputs)
def head_bwd(
    g: torch.Tensor,
    g_entropy: torch.Tensor | None,
    g_lse: torch.Tensor | None,
    h: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    target: torch.Tensor,
    ce_weight: torch.Tensor | None,
    norm: torch.Tensor,
    stats: torch.Tensor,
    entropy: torch.Tensor | None,
    numbers: list[float],
    ignore_index: int,
    dtype: torch.dtype,
    accum_dtype: torch.dtype | None,
    memory: int,
    group: str | None,
    reads: bool,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Incoming gradients of each token's loss, entropy and log-sum-exp (M,) -> dh, dW, db.

    reads: whether forward had logits.
    """
    plan = plan_for(h, w, dtype, accum_dtype, memory, needs[1])
    to_gradient = _turns(
        g,
        g_entropy,
        g_lse,
        b,
        target,
        ce_weight,
        norm,
        stats,
        entropy,
        numbers,
        ignore_index,
        group,
    )
    multiply = reads or not hopper.applies(h, w, dtype, numbers, ce_weight, group)
    return run_chunks(h, w, None, dtype, plan, to_gradient, needs, group, None, multiply)


def _kept_gradients(
    g,
    g_entropy,
    g_lse,
    logits,
    h,
    w,
    b,
    target,
    ce_weight,
    norm,
    stats,
    entropy,
    numbers,
    ignore_index,
    accum_dtype,
    needs,
    in_place=False,
):
    return empty_gradients(h, w, logits.dtype, accum_dtype, needs)


@custom_op("linear_head_kept_backward", _kept_gradients)
def head_bwd_kept(
    g: torch.Tensor,
    g_entropy: torch.Tensor | None,
    g_lse: torch.Tensor | None,
    logits: torch.Tensor,
    h: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    target: torch.Tensor,
    ce_weight: torch.Tensor | None,
    norm: torch.Tensor,
    stats: torch.Tensor,
    entropy: torch.Tensor | None,
    numbers: list[float],
    ignore_index: int,
    accum_dtype: torch.dtype | None,
    needs: list[bool],
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`head_bwd` of the logits that `head_fwd_kept` has kept. ``in_place``: they are written over
    (not in a graph).

    g may be 0-d: that of each token's loss.
    """
    to_gradient = _turns(
        g, g_entropy, g_lse, b, target, ce_weight, norm, stats, entropy, numbers, ignore_index, None
    )
    turned = logits if in_place else torch.empty_like(logits)
    to_gradient(slice(None), *(x[:, : len(h)].t() for x in (logits, turned)))
    return gradients_of_all(turned, h, w, accum_dtype, needs)


# ---- without kernels ----


def compute_dtype(h, w):
    """Autocast's dtype where it is on; otherwise that of the weight."""
    if h.dtype != torch.float64 and devices.in_autocast(h):
        return torch.get_autocast_dtype(h.device.type)
    return w.dtype


def token_reference(h, w, b, target, ce_weight, options, group=None):
    """-> loss, logsumexp, entropy, z_loss, correct, predicted, mean logit: (M,) each, three of them
    with gradients."""
    dtype, cap = compute_dtype(h, w), options.softcap
    x = F.linear(copy_to_group(h.to(dtype), group), w.to(dtype), None if b is None else b.to(dtype))
    z = (x if x.dtype == torch.float64 else x.float()) * options.logit_scale
    z = cap * torch.tanh(z / cap) if cap else z
    return token_loss_reference_parallel(
        z,
        target,
        group,
        ce_weight,
        options.ignore_index,
        options.label_smoothing,
        options.lse_square_scale,
    )


def in_chunks(of_chunk, h, target):
    """``of_chunk(h, target)`` a few rows at a time. Backward computes each chunk's logits again."""
    if torch.compiler.is_compiling() or h.shape[0] <= ROWS_WITHOUT_KERNELS:
        return of_chunk(h, target)
    chunks = zip(h.split(ROWS_WITHOUT_KERNELS), target.split(ROWS_WITHOUT_KERNELS), strict=True)
    chunks = [
        checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks
    ]
    return tuple(None if of[0] is None else torch.cat(of) for of in zip(*chunks, strict=True))


# ---- per token ----


@dataclass
class TokenOutputs:
    """What `linear_token_loss` returns, (M,) each, None where not asked for."""

    loss: torch.Tensor
    logsumexp: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    correct: torch.Tensor | None = None
    predicted: torch.Tensor | None = None
    mean_logit: torch.Tensor | None = None


class LinearTokenLossFunction(Function):
    """``apply(hidden, weight, bias, target, class_weight, ...) -> loss, logsumexp, entropy, z_loss,
    best, mean``.

    The first three are differentiable. Backward computes the logits again; or forward keeps them,
    if they are ``kept`` and all fit into ``memory``, and backward turns them into their gradient.
    """

    @staticmethod
    def reference(
        h, w, b, target, ce_weight, numbers, ignore_index, accum_dtype, memory, kept, group, wants
    ):
        def of_chunk(h, y):
            return token_reference(
                h, w, b, y, ce_weight, TokenOptions(ignore_index, *numbers), group
            )

        loss, lse, entropy, z_loss, _, best, mean = in_chunks(of_chunk, h, target)
        return loss, lse, entropy, z_loss, best, mean

    @staticmethod
    def forward(
        ctx,
        h,
        w,
        b,
        target,
        ce_weight,
        numbers,
        ignore_index,
        accum_dtype,
        memory,
        kept,
        group,
        wants,
    ):
        dtype = compute_dtype(h, w)
        target, ce_weight = (
            target.contiguous(),
            None if ce_weight is None else ce_weight.contiguous(),
        )
        asked, nothing, logits = [wants[0], False, wants[1], wants[2], wants[3]], [False] * 3, None
        if (
            kept
            and any(ctx.needs_input_grad)
            and group is None
            and unseen()
            and memory >= bytes_of_all(h, w, dtype)
        ):
            *outputs, logits = head_fwd_kept(
                h, w, b, target, ce_weight, None, numbers, ignore_index, False, False, dtype, asked
            )
        else:
            outputs = head_fwd(
                h,
                w,
                b,
                target,
                ce_weight,
                None,
                numbers,
                ignore_index,
                False,
                False,
                dtype,
                accum_dtype,
                memory,
                group,
                asked,
                nothing,
            )
        loss, stats, norm, z_loss, _, entropy, mean, best, *_ = outputs
        ctx.taken = logits
        reads = logits is not None or reads_logits(asked)
        ctx.options = numbers, ignore_index, dtype, accum_dtype, memory, group, reads
        ctx.needs = list(ctx.needs_input_grad[:3])
        ctx.save_for_backward(
            h, w, b, target, ce_weight, norm, stats, entropy if wants[1] else None
        )
        ctx.mark_non_differentiable(z_loss, best, mean)
        ctx.set_materialize_grads(False)
        return loss, stats.sum(1), entropy, z_loss, best, mean

    @staticmethod
    def arguments(ctx):
        numbers, ignore_index, _, accum_dtype, memory, group, _ = ctx.options
        return (
            *ctx.saved_tensors[:5],
            numbers,
            ignore_index,
            accum_dtype,
            memory,
            False,
            group,
            [False] * 4,
        )

    @staticmethod
    def backward(ctx, g, g_lse, g_entropy, *_):
        h, w, b, target, ce_weight, norm, stats, entropy = ctx.saved_tensors
        g = stats.new_zeros(stats.shape[0]) if g is None else g
        g_entropy, g_lse = (None if of is None else of.contiguous() for of in (g_entropy, g_lse))
        g_entropy = None if entropy is None else g_entropy
        numbers, ignore_index, _, accum_dtype, *_ = ctx.options
        logits, once = (None, False) if ctx.taken is None else kept(ctx, 1)
        if once:
            grads = head_bwd_kept(
                g,
                g_entropy,
                g_lse,
                logits,
                h,
                w,
                b,
                target,
                ce_weight,
                norm,
                stats,
                entropy,
                numbers,
                ignore_index,
                accum_dtype,
                ctx.needs,
                True,
            )
        else:
            ctx.taken = logits = None  # another backward may follow, and has the same budget
            grads = head_bwd(
                g,
                g_entropy,
                g_lse,
                h,
                w,
                b,
                target,
                ce_weight,
                norm,
                stats,
                entropy,
                *ctx.options,
                ctx.needs,
            )
        grads = zip(grads, (h, w, b), ctx.needs, strict=True)
        return *(rounded(grad, of.dtype) if need else None for grad, of, need in grads), *[None] * 9


def check_head(name, hidden, weight, bias, target, class_weight, group=None, argument="hidden"):
    """The target may be on the CPU."""
    check.floats(
        name, {argument: hidden, "weight": weight}, bias=bias, **{"class weight": class_weight}
    )
    check.integers(name, dict(target=target))
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{name}: the hidden states have shape {tuple(hidden.shape)} and the weight {tuple(weight.shape)}, give "
            "(rows, hidden size) and (classes, hidden size)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{name}: bias has shape {tuple(bias.shape)}, give one number a class: ({weight.shape[0]},)"
        )
    check_rows(name, hidden, target, class_weight, weight.shape[0] * place(group)[0])


def only_valid(hidden, target, ignore_index, drop_ignored):
    """(indices of the rows that are not ignored or None for all, their hidden states, their
    targets).

    To drop rows one must wait for the device, unless the targets are on the CPU: there it is the
    default."""
    target = target.long()
    on_host = target.device.type == "cpu" and not torch.compiler.is_compiling()
    if not (on_host if drop_ignored is None else drop_ignored):
        return None, hidden, target.to(hidden.device)
    rows = (target != ignore_index).nonzero().squeeze(1)
    if on_host and rows.numel() == target.numel():
        return None, hidden, target.to(hidden.device)
    target = target[rows].to(hidden.device, non_blocking=True)
    rows = rows.to(hidden.device, non_blocking=True)
    return rows, hidden.index_select(0, rows), target


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
    accum_dtype: torch.dtype | None = None,
    memory: int | str = "auto",
    drop_ignored: bool | None = None,
    group: object = None,
):
    """Each token's cross entropy under a linear head, and more if asked for, without its logits in
    memory.

    Args:
        hidden: (M, H) hidden states, fp32, bf16 or fp16; any strides.
        weight: (V, H) of the head; bias: (V,). Logits are computed in the weight's dtype, or
        autocast's where it is on.
        target: (M,) class indices. They may be on the CPU.
        temperature: the logits are divided by it, after everything else.
        logit_scale: the logits are multiplied by it; softcap: then they become
        ``softcap·tanh(logits / softcap)``.
        ignore_index: target of rows that give 0 everywhere (predicted -1).
        label_smoothing: in [0, 1]; class_weight: (V,); lse_square_scale: of the z-loss, which is
        part of the loss.
        return_logsumexp, return_entropy, return_z_loss, return_accuracy, return_predicted,
        return_mean_logit: what to
            return beside the loss.
        accum_dtype: dtype in which dW is added up over several chunks: see ``memory``.
        torch.float32 makes it exact.
        memory: bytes that the head may take beyond the gradients of hidden and weight, or "auto":
        as much as a fast
            head with a dW about as exact as PyTorch's needs (see docs/linear-head.md). If the
            environment variable
            LIGER_KERNEL_HEAD_MEMORY is set, "auto" stands for that. If the logits of all tokens fit
            into a number that
            is given here, they are kept until backward, by each call. Otherwise backward computes
            them again, as it
            does under torch.compile, in a checkpoint, with saved-tensor hooks, with a group, and if
            the graph is kept.
        drop_ignored: leave ignored rows out before the projection. This waits for the device once.
        None: only if the
            targets are on the CPU, where it costs nothing.
        group: a process group of torch.distributed whose ranks each hold an equal, contiguous shard
        of the classes:
            weight, bias and their gradients are this rank's. All else is the same on every rank;
            class indices and
            class_weight are of all classes. If hidden and weight are DTensors of one mesh, the
            group is that mesh's.

    Returns:
        `TokenOutputs`, (M,) each, in fp32 (predicted: int64, the lowest index on ties). Loss,
        log-sum-exp and entropy
        are differentiable in hidden, weight and bias.

    Raises:
        ValueError, TypeError: shapes or options that don't fit; a target out of range, on the CPU
        and in debug mode
            (LIGER_KERNEL_DEBUG=1). On a GPU such a row's loss is otherwise NaN.
    """
    name = "linear_token_loss"
    ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale = check_options(
        name, "none", ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale
    )
    temperature = check.positive(name, "temperature", temperature)
    check.dtype(name, "accum_dtype", accum_dtype)
    hidden, weight, bias, group = local(name, hidden, weight, bias, group)
    check_head(name, hidden, weight, bias, target, class_weight, group)
    check_targets(name, target, weight.shape[0] * place(group)[0], ignore_index)
    rows, h, y = only_valid(hidden, target, ignore_index, drop_ignored)
    numbers = [
        lse_square_scale,
        label_smoothing,
        (softcap or 0.0) / temperature,
        logit_scale / temperature,
    ]
    need_best = return_accuracy or return_predicted
    run = LinearTokenLossFunction.call
    if not devices.has_kernels(h):
        run = LinearTokenLossFunction.reference
    elif torch.compiler.is_compiling() and not torch.is_grad_enabled():  # in eager, apply does this
        h, weight, bias = h.detach(), weight.detach(), None if bias is None else bias.detach()
    loss, lse, entropy, z_loss, best, mean = run(
        h,
        weight,
        bias,
        y,
        class_weight,
        numbers,
        ignore_index,
        accum_dtype,
        budget(memory),
        memory != "auto",
        group_name(group),
        [return_z_loss, return_entropy, return_mean_logit, need_best],
    )
    correct = ((best == y) & (y != ignore_index)).float() if return_accuracy else None

    def whole(x, wanted=True, ignored=0):
        if not wanted or rows is None:
            return x if wanted else None
        return x.new_full(target.shape, ignored).index_copy(0, rows, x)

    return TokenOutputs(
        whole(loss),
        whole(lse, return_logsumexp),
        whole(entropy, return_entropy),
        whole(z_loss, return_z_loss),
        whole(correct, return_accuracy),
        whole(best, return_predicted, -1),
        whole(mean, return_mean_logit),
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
    """log p(target | hidden) of each token under a linear head, and the entropy, without its logits in memory.

    DPO, GRPO, PPO and distillation are made of these. They are differentiable in hidden, weight and
    bias.

    Args:
        hidden: (..., H); target: (...). The rest as in `linear_token_loss`.

    Returns:
        log-probabilities (...) in fp32, 0 where the target is ``ignore_index``; with
        ``return_entropy`` the pair of
        them and the entropies of the distributions (...).
    """
    check.floats("token_log_probs", dict(hidden=hidden))
    check.integers("token_log_probs", dict(target=target))
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"token_log_probs: target has shape {tuple(target.shape)}, give one class for each of the hidden states: "
            f"{tuple(hidden.shape[:-1])}"
        )
    out = linear_token_loss(
        matrix(hidden),
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
    log_probs = -out.loss.view(target.shape)
    return (log_probs, out.entropy.view(target.shape)) if return_entropy else log_probs


def _of_kernels(hidden, weight, target, bias=None, class_weights=False, **options):
    out = linear_token_loss(
        hidden,
        weight,
        target,
        bias,
        class_weight=weights_of(weight, class_weights),
        **options,
        return_logsumexp=True,
        return_entropy=True,
        return_z_loss=True,
        return_mean_logit=True,
        drop_ignored=False,
    )
    return out.loss, out.logsumexp, out.entropy, out.z_loss, out.mean_logit


def _of_reference(
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
    options = TokenOptions(
        softcap=softcap / temperature, logit_scale=logit_scale / temperature, **options
    )
    w = weights_of(weight, class_weights)
    loss, lse, entropy, z_loss, _, _, mean = token_reference(
        hidden, weight, bias, target, w, options
    )
    return loss, lse, entropy, z_loss, mean


def head_inputs(M, H, V, names=("hidden", "weight", "bias")):
    tensors = torch.randn(M, H), torch.randn(V, H) * 2 / H**0.5, torch.randn(V)
    return {k: t.requires_grad_() for k, t in zip(names, tensors, strict=True)} | dict(
        target=labels(M, V)
    )


CASES.append(
    Case(
        "linear_token_loss",
        fn=_of_kernels,
        reference=_of_reference,
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
        flops=lambda t: 8 * t["hidden"].numel() * t["weight"].shape[0],
        fp32_roundings=4,  # as of fused_linear_cross_entropy
    )
)
