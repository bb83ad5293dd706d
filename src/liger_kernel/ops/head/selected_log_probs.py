r"""Log-probabilities of tokens under logits that are in memory, for policy losses.

    ℓ_t = log_softmax(x_t / T)_y

    dx_t = (1[v=y] - p)·g_t / T,   p = softmax(x_t / T)

The logits x (B, L+1, V) are those of a causal model for L tokens y: the last position predicts a
token that is not there. It has no influence, its gradient is 0. Each token is a row of
`cross_entropy`, whose kernels do the work, in fp32. Backward writes the gradient once, and may
write it over the logits.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, Function, custom_op, flatten_rows
from liger_kernel.core.overwrite import may_overwrite
from liger_kernel.core.tile import cdiv, tl
from liger_kernel.ops.head.cross_entropy import (
    check_targets,
    cross_entropy_bwd,
    targets_are_checked,
)
from liger_kernel.ops.head.logits import TokenOptions, token_gradient, token_loss

IGNORED = -(2**31)  # the id of a masked token; -100 is as wrong as any other that is not masked


def selected_log_probs_reference(logits, ids, mask=None, temperature=1.0, in_place=False):
    """Compute what the operator computes, in PyTorch. Ids may also be `IGNORED`."""
    ids = _ignore_masked(ids, mask)
    z = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    z = z.where((ids != IGNORED)[..., None], 0)
    in_vocab = (ids >= 0) & (ids < logits.shape[-1])
    log_probs = z.log_softmax(-1).gather(-1, ids.where(in_vocab, 0)[..., None]).squeeze(-1)
    return log_probs.where(in_vocab, torch.nan).where(ids != IGNORED, 0)


def _ignore_masked(ids, mask):
    return ids.long() if mask is None else ids.long().where(mask.bool(), IGNORED)


@kernel
def _targets(
    ids_ptr,
    mask_ptr,
    target_ptr,
    norm_ptr,
    stride_ids_b,
    stride_ids_t,
    stride_mask_b,
    stride_mask_t,
    N,
    L,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """Store the N = B·(L+1) targets of a cross entropy, and its normalisers (n₀, n₁, W, n).

    n₀ divides the loss, and is -1: then the loss is log p, and the gradient that of log p.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = i // (L + 1)
    t = i % (L + 1)
    valid = (i < N) & (t < L)
    if mask_ptr is not None:
        mask = tl.load(mask_ptr + b * stride_mask_b + t * stride_mask_t, mask=valid, other=0)
        valid = valid & (mask != 0)
    ids = tl.load(ids_ptr + b * stride_ids_b + t * stride_ids_t, mask=valid, other=0)
    tl.store(target_ptr + i, tl.where(valid, ids.to(tl.int64), ignore_index), mask=i < N)
    if tl.program_id(0) == 0:
        j = tl.arange(0, 4)
        tl.store(norm_ptr + j, tl.where(j == 0, -1.0, 1.0))


def _empty_outputs(x, ids, mask, temperature):
    B, L = ids.shape
    log_probs = x.new_empty((B, L + 1), dtype=torch.float32)
    target = x.new_empty((B, L + 1), dtype=torch.int64)
    norm = x.new_empty((4,), dtype=torch.float32)
    stats = x.new_empty((x.shape[0], 2), dtype=torch.float32)
    return log_probs, target, norm, stats


@custom_op("selected_log_probs", _empty_outputs)
def selected_log_probs_fwd(
    x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute log p (B, L+1) of logits x (B·(L+1), V) and ids (B, L); the last column is 0.

    Returns:
        Also the targets (B, L+1), normalisers and statistics of `cross_entropy_bwd`.
    """
    log_probs, target, norm, stats = _empty_outputs(x, ids, mask, temperature)
    N = target.numel()
    _targets[(cdiv(N, 256),)](
        ids,
        mask,
        target,
        norm,
        *ids.stride(),
        *((0, 0) if mask is None else mask.stride()),
        N,
        ids.shape[1],
        IGNORED,
        BLOCK=256,
        num_warps=4,
    )
    options = TokenOptions(IGNORED, *_scalars(temperature))
    token_loss(x, target.view(-1), None, norm, options, log_probs.view(-1), stats)
    return log_probs, target, norm, stats


def _scalars(temperature):
    """Return lse_square_scale, label_smoothing, softcap and logit_scale."""
    return [0.0, 0.0, 0.0, 1 / temperature]


class LigerSelectedLogProbsFunction(Function):
    """Autograd Function of `liger_selected_log_probs`.

    ``apply(logits (B, L+1, V), ids (B, L), mask, temperature, in_place)`` returns (B, L), 0 where
    masked.
    """

    reference = staticmethod(selected_log_probs_reference)

    @staticmethod
    def forward(ctx, logits, ids, mask=None, temperature=1.0, in_place=False):
        devices.require_kernels("LigerSelectedLogProbsFunction", logits)
        log_probs, target, norm, stats = selected_log_probs_fwd(
            flatten_rows(logits), ids, mask, temperature
        )
        ctx.save_for_backward(logits, target, norm, stats)
        ctx.temperature = temperature
        ctx.in_place = in_place
        log_probs = log_probs[:, :-1]
        # not as a view, which autograd does not let the caller write to
        return log_probs if torch.compiler.is_compiling() else log_probs.data

    @staticmethod
    def arguments(ctx):
        logits, target, *_ = ctx.saved_tensors
        return logits, target[:, :-1], None, ctx.temperature, ctx.in_place

    @staticmethod
    def backward(ctx, dy):
        logits, target, norm, stats = ctx.saved_tensors
        in_place = ctx.in_place and logits.is_contiguous() and may_overwrite(ctx, logits)
        x = flatten_rows(logits)
        g = dy.new_empty(target.shape)
        g[:, :-1] = dy  # of the last column, whose target is ignored, what is there is dropped
        g = g.view(-1)
        target = target.view(-1)
        scalars = _scalars(ctx.temperature)
        if torch.compiler.is_compiling() or not in_place and x.data_ptr() == logits.data_ptr():
            dx = cross_entropy_bwd(g, x, target, None, norm, stats, IGNORED, scalars)
        else:  # x is the logits, or a copy of them
            token_gradient(g, x, target, None, norm, stats, x, TokenOptions(IGNORED, *scalars))
            dx = x
        if in_place:
            torch.autograd.graph.increment_version(logits)
        return logits if in_place else dx.view(logits.shape), None, None, None, None


def liger_selected_log_probs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    temperature: float = 1.0,
    in_place: bool = True,
) -> torch.Tensor:
    """Compute log p of each token under ``softmax(logits / temperature)``.

    Args:
        logits: (B, L+1, V), fp32, bf16 or fp16; contiguous, or they are copied. The last position
            is not used.
        ids: (B, L) integers, the tokens.
        mask: (B, L), 0 for tokens whose log-probability is not needed. It is 0 there, whatever the
            id.
        temperature: a positive number.
        in_place: in backward, the logits' memory becomes that of their gradient if nobody else can
            see it any more.

    Returns:
        (B, L) in fp32, or fp64 for fp64.

    Raises:
        ValueError, TypeError: shapes or numbers that don't fit; an id out of range that is not
            masked, also -100, on the CPU and in debug mode (LIGER_KERNEL_DEBUG=1). On a GPU such a
            token's log-probability is otherwise NaN.
    """
    name = "liger_selected_log_probs"
    check.floats(name, dict(logits=logits))
    check.integers(name, dict(ids=ids))
    B, T, _ = logits.shape if logits.dim() == 3 else (0, 0, 0)
    if not T or ids.shape != (B, T - 1):
        shapes = f"{tuple(logits.shape)}, ids {tuple(ids.shape)}"
        raise ValueError(f"{name}: logits have shape {shapes}, give (B, L+1, classes) and (B, L)")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.is_complex()):
        kind = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"{name}: mask is a {kind}, give a tensor of bool or numbers, or None")
    check.shape(name, "mask", mask, tuple(ids.shape))
    for argument, x in dict(ids=ids, mask=mask).items():
        if x is not None and x.device != logits.device:
            raise ValueError(
                f"{name}: logits are on {logits.device}, {argument} on {x.device}, give one device"
            )
    temperature = check.positive(name, "temperature", temperature)
    if targets_are_checked(ids):
        targets = _ignore_masked(ids, mask).reshape(-1)
        check_targets(name, targets, logits.shape[2], IGNORED, "mask the token")
    run = LigerSelectedLogProbsFunction.reference
    if devices.has_kernels(logits):
        run = LigerSelectedLogProbsFunction.apply
    return run(logits, ids, None if mask is None else mask.detach(), temperature, in_place)


# The case's functions multiply the logits by 1, since a leaf is never written over. A third of the
# ids is masked.


def _case_fn(logits, ids, **options):
    return liger_selected_log_probs(logits * 1, ids, ids % 3 != 1, **options)


def _case_reference(logits, ids, **options):
    return selected_log_probs_reference(logits * 1, ids, ids % 3 != 1, **options)


def _case_inputs(B, L, V):
    logits = torch.randn(B, L + 1, V).mul(3).requires_grad_()
    return dict(logits=logits, ids=torch.randint(V, (B, L)))


def _logits_traffic(inputs):
    """Return the bytes that forward and backward must move: the logits once, and twice."""
    nbytes = inputs["logits"].numel() * inputs["logits"].element_size()
    return nbytes, 2 * nbytes


CASES.append(
    Case(
        "selected_log_probs",
        fn=_case_fn,
        reference=_case_reference,
        inputs=_case_inputs,
        shapes=((1, 1, 8), (3, 2, 123), (1, 2, 9001)),
        options=(dict(), dict(temperature=0.7, in_place=False)),
        bench=((8, 2048, 32000),),
        traffic=_logits_traffic,
        fp32_roundings=2,
    )
)
