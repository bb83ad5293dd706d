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
from liger_kernel.core.op import CASES, Case, F, Function, flatten_rows
from liger_kernel.core.overwrite import may_overwrite
from liger_kernel.ops.head.cross_entropy import check_targets, cross_entropy_bwd, cross_entropy_fwd
from liger_kernel.ops.head.logits import TokenOptions, token_gradient

IGNORED = -(2**31)  # the id of a masked token; -100 is as wrong as any other that is not masked


def selected_log_probs_reference(logits, ids, temperature=1.0, in_place=False):
    """Compute what the operator computes, in PyTorch. Masked ids are `IGNORED`."""
    z = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    z = z.where((ids != IGNORED)[..., None], 0)
    in_vocab = (ids >= 0) & (ids < logits.shape[-1])
    log_probs = z.log_softmax(-1).gather(-1, ids.where(in_vocab, 0)[..., None]).squeeze(-1)
    return log_probs.where(in_vocab, torch.nan).where(ids != IGNORED, 0)


class LigerSelectedLogProbsFunction(Function):
    """Autograd Function of `liger_selected_log_probs`.

    ``apply(logits (B, L+1, V), ids (B, L), temperature, in_place)`` returns (B, L), 0 where the id
    is `IGNORED`.
    """

    reference = staticmethod(selected_log_probs_reference)

    @staticmethod
    def forward(ctx, logits, ids, temperature=1.0, in_place=False):
        devices.require_kernels("LigerSelectedLogProbsFunction", logits)
        target = F.pad(ids, (0, 1), value=IGNORED)
        # lse_square_scale, label_smoothing, softcap and logit_scale
        scalars = [0.0, 0.0, 0.0, 1 / temperature]
        loss, stats, _, norm, _ = cross_entropy_fwd(
            flatten_rows(logits), target.view(-1), None, IGNORED, scalars, False, False, False
        )
        ctx.save_for_backward(logits, target, norm, stats)
        ctx.scalars = scalars
        ctx.temperature = temperature
        ctx.in_place = in_place
        return -loss.view(target.shape)[:, :-1]

    @staticmethod
    def arguments(ctx):
        logits, target, *_ = ctx.saved_tensors
        return logits, target[:, :-1], ctx.temperature, ctx.in_place

    @staticmethod
    def backward(ctx, dy):
        logits, target, norm, stats = ctx.saved_tensors
        in_place = ctx.in_place and logits.is_contiguous() and may_overwrite(ctx, logits)
        x = flatten_rows(logits)
        g = F.pad(-dy, (0, 1)).view(-1)
        target = target.view(-1)
        if torch.compiler.is_compiling() or not in_place and x.data_ptr() == logits.data_ptr():
            dx = cross_entropy_bwd(g, x, target, None, norm, stats, IGNORED, ctx.scalars)
        else:  # x is the logits, or a copy of them
            token_gradient(g, x, target, None, norm, stats, x, TokenOptions(IGNORED, *ctx.scalars))
            dx = x
        if in_place:
            torch.autograd.graph.increment_version(logits)
        return logits if in_place else dx.view(logits.shape), None, None, None


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
    ids = ids.long() if mask is None else ids.long().where(mask.bool(), IGNORED)
    check_targets(name, ids.reshape(-1), logits.shape[2], IGNORED, "mask the token")
    run = LigerSelectedLogProbsFunction.reference
    if devices.has_kernels(logits):
        run = LigerSelectedLogProbsFunction.apply
    return run(logits, ids, temperature, in_place)


# The case's functions multiply the logits by 1, since a leaf is never written over. A third of the
# ids is masked.


def _case_fn(logits, ids, **options):
    return liger_selected_log_probs(logits * 1, ids, ids % 3 != 1, **options)


def _case_reference(logits, ids, **options):
    return selected_log_probs_reference(logits * 1, ids.where(ids % 3 != 1, IGNORED), **options)


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
