"""transformers' ``ForCausalLMLoss`` of logits, which `kernels` makes a module of."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from liger_kernel.ops.head.cross_entropy import liger_cross_entropy
from liger_kernel.patch.proof.conditions import are_plain_tensors
from liger_kernel.patch.proof.parts import ReadRecorder
from liger_kernel.patch.proof.probe import (
    call_forward,
    close,
    close_by_row,
    error_summary,
    isolated,
    noise,
    probe_copy,
)
from liger_kernel.patch.proof.rewrite import Replacement

LOGIT_DTYPES = torch.float32, torch.bfloat16, torch.float16
PROBE_VOCAB_SIZE = 11


def causal_lm_loss(logits, targets, num_items, ignore_index):
    """Compute the loss of (..., V) logits and the label of each row, in fp32 arithmetic.

    It is the sum divided by ``num_items``, a number or a tensor, or by the number of valid labels.
    """
    targets = targets.reshape(-1).to(logits.device)
    total = liger_cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets,
        ignore_index=ignore_index,
        reduction="sum",
        loss_dtype=torch.float32,
    )
    if num_items is None:
        num_items = (targets != ignore_index).sum()  # NaN where there is nothing, as PyTorch's mean
    if isinstance(num_items, torch.Tensor):
        num_items = num_items.to(total.device)
    return total / num_items


def next_token_labels(labels, ignore_index):
    """Return labels that are shifted by one: token t's is that of token t + 1."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


@dataclass(frozen=True)
class CausalLMLoss(Replacement):
    """The result of a proof: a module computes ``ForCausalLMLoss``."""

    flag = "cross_entropy"
    column = "loss"
    kernel = "liger_cross_entropy"
    takes_one_argument = False

    def class_members(self, cls):
        class_forward = cls.forward

        def forward(
            self,
            logits,
            labels,
            vocab_size,
            num_items_in_batch=None,
            ignore_index=-100,
            shift_labels=None,
            **kwargs,
        ):
            targets = shift_labels
            if shift_labels is None:
                targets = next_token_labels(labels, ignore_index)
            if _can_compute(logits, targets, vocab_size):
                return causal_lm_loss(logits, targets, num_items_in_batch, ignore_index)
            return class_forward(
                self,
                logits,
                labels,
                vocab_size,
                num_items_in_batch,
                ignore_index,
                shift_labels,
                **kwargs,
            )

        return {"forward": forward}


def _can_compute(logits, targets, vocab_size) -> bool:
    if not are_plain_tensors(logits, targets):
        return False
    if logits.dtype not in LOGIT_DTYPES or targets.dtype != torch.int64:
        return False
    if logits.dim() < 2 or logits.shape[-1] != vocab_size:
        return False
    return targets.numel() * vocab_size == logits.numel()


@isolated()
def prove_loss(module: torch.nn.Module, reads: ReadRecorder) -> CausalLMLoss | str:
    """Return `CausalLMLoss` if a module computes it, otherwise the reason why that is not proved.

    The module is run on 2 x 5 tokens, in fp32 and bf16, with each of its arguments.
    """
    logits = 3 * noise(2, 5, PROBE_VOCAB_SIZE)
    labels = torch.tensor([[-100, 3, 7, 0, 10], [1, -100, 4, 2, 3]])

    def run(
        x, labels=labels, num_items=None, ignore_index=-100, shift_labels=None, make=probe_copy
    ):
        arguments = labels, PROBE_VOCAB_SIZE, num_items, ignore_index, shift_labels
        return call_forward(make(module), x, *arguments)

    def reference(x, labels=labels, num_items=None, ignore_index=-100, shift_labels=None):
        targets = shift_labels
        if shift_labels is None:
            targets = next_token_labels(labels, ignore_index)
        loss = F.cross_entropy(
            x.float().view(-1, PROBE_VOCAB_SIZE),
            targets.reshape(-1),
            ignore_index=ignore_index,
            reduction="mean" if num_items is None else "sum",
        )
        return loss / (num_items or 1)

    calls = (
        dict(),
        dict(num_items=7),
        dict(num_items=torch.tensor(5)),
        dict(labels=labels.where(labels >= 0, 6), ignore_index=6),
        dict(shift_labels=labels),
    )
    try:
        reads.record(functools.partial(run, logits), functools.partial(run, logits.bfloat16()))
        for kwargs in calls:
            candidate = functools.partial(run, **kwargs)
            expected = functools.partial(reference, **kwargs)
            for x in (logits, logits.bfloat16()):
                if not _same_loss(candidate, expected, x):
                    return "it does not compute transformers' ForCausalLMLoss"
    except Exception as error:
        return f"it could not be tried: {error_summary(error)}"
    return CausalLMLoss()


def _same_loss(candidate, reference, logits) -> bool:
    """Return True for the same loss and gradient, the latter up to its last place."""
    loss, grad = _loss_and_gradient(candidate, logits)
    expected_loss, expected_grad = _loss_and_gradient(reference, logits)
    if not close(loss, expected_loss) or grad.dtype != expected_grad.dtype:
        return False
    if grad.dtype == torch.float32:
        return close_by_row(grad, expected_grad)
    return torch.allclose(grad, expected_grad, rtol=2**-7, atol=1e-6)


def _loss_and_gradient(loss_function, logits):
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        loss = loss_function(logits)
        return loss.detach(), *torch.autograd.grad(loss, logits)
