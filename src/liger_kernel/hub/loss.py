"""transformers' ``ForCausalLMLoss``, which `kernels` makes a module of."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from liger_kernel.ops.head.cross_entropy import liger_cross_entropy
from liger_kernel.patch.proof.conditions import plain
from liger_kernel.patch.proof.parts import Reads
from liger_kernel.patch.proof.probe import (
    call,
    close,
    close_in_rows,
    first_line,
    isolated,
    noise,
    shell,
)

FLOATS = torch.float32, torch.bfloat16, torch.float16
CLASSES = 11


def causal_lm_loss(logits, target, num_items, ignore_index):
    """Of (..., V) logits and the label of each row; fp32 arithmetic."""
    target = target.reshape(-1).to(logits.device)
    total = liger_cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target,
        ignore_index=ignore_index,
        reduction="sum",
        loss_dtype=torch.float32,
    )
    if num_items is None:
        num_items = (target != ignore_index).sum()  # NaN where there is nothing, as PyTorch's mean
    return total / (
        num_items.to(total.device) if isinstance(num_items, torch.Tensor) else num_items
    )


def shifted(labels, ignore_index):
    """Token t's label is token t + 1."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


@dataclass(frozen=True)
class CausalLMLoss:
    @staticmethod
    def forward(
        module,
        logits,
        labels,
        vocab_size,
        num_items_in_batch=None,
        ignore_index=-100,
        shift_labels=None,
        **kwargs,
    ):
        target = shifted(labels, ignore_index) if shift_labels is None else shift_labels
        if not _fits(logits, target, vocab_size):
            given = num_items_in_batch, ignore_index, shift_labels
            return type(module).forward(module, logits, labels, vocab_size, *given, **kwargs)
        return causal_lm_loss(logits, target, num_items_in_batch, ignore_index)


def _fits(logits, target, vocab_size) -> bool:
    if not plain(logits, target) or logits.dtype not in FLOATS or target.dtype != torch.int64:
        return False
    return (
        logits.dim() > 1
        and logits.shape[-1] == vocab_size
        and target.numel() * vocab_size == logits.numel()
    )


@isolated()
def prove_loss(module: torch.nn.Module, reads: Reads) -> CausalLMLoss | str:
    logits, labels = (
        3 * noise(2, 5, CLASSES),
        torch.tensor([[-100, 3, 7, 0, 10], [1, -100, 4, 2, 3]]),
    )

    def run(x, target=labels, num_items=None, ignore_index=-100, shift_labels=None, make=shell):
        return call(make(module), x, target, CLASSES, num_items, ignore_index, shift_labels)

    def known(x, target=labels, num_items=None, ignore_index=-100, shift_labels=None):
        target = shifted(target, ignore_index) if shift_labels is None else shift_labels
        how = dict(ignore_index=ignore_index, reduction="mean" if num_items is None else "sum")
        return F.cross_entropy(x.float().view(-1, CLASSES), target.reshape(-1), **how) / (
            num_items or 1
        )

    tried = (
        dict(),
        dict(num_items=7),
        dict(num_items=torch.tensor(5)),
        dict(target=labels.where(labels >= 0, 6), ignore_index=6),
        dict(shift_labels=labels),
    )
    try:
        reads.check(functools.partial(run, logits), functools.partial(run, logits.bfloat16()))
        for options in tried:
            for x in (logits, logits.bfloat16()):
                if not _same(
                    functools.partial(run, **options), functools.partial(known, **options), x
                ):
                    return "it does not compute transformers' ForCausalLMLoss"
    except Exception as error:
        return f"it could not be tried: {first_line(error)}"
    return CausalLMLoss()


def _same(one, other, logits) -> bool:
    """The same loss and gradient, the latter up to its last place."""
    (y, dy), (z, dz) = (_with_gradient(run, logits) for run in (one, other))
    if not close(y, z) or dy.dtype != dz.dtype:
        return False
    return (
        close_in_rows(dy, dz)
        if dy.dtype == torch.float32
        else torch.allclose(dy, dz, rtol=2**-7, atol=1e-6)
    )


def _with_gradient(run, logits):
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        loss = run(logits)
        return loss.detach(), *torch.autograd.grad(loss, logits)
