r"""Generalised Jensen-Shannon divergence of a student Q and a teacher P, given as log-probabilities
x and y.

    D = β·p·(y - log M) + (1-β)·q·(x - log M),   M = β·p + (1-β)·q

    dx = (1-β)·q·(x - log M)

β = 0 is KL(P‖Q), β = 1 is KL(Q‖P); these are not the limits, which are 0. The average is over the
rows that are not ignored. The kernel stands in `rows`.

Source: Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check
from liger_kernel.core.op import CASES, rounded
from liger_kernel.ops.head.divergences import jsd
from liger_kernel.ops.probability.rows import (
    DivergenceFunction,
    applied,
    case_of,
    check_pair,
    inputs_of,
    reduced,
    wide,
)


def jsd_reference(input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    y, x = (wide(t, shift_labels, ignore_index) for t in (target.detach(), input))
    d = jsd(y, x, beta)
    return reduced(d[:, None], shift_labels, "batchmean", ignore_index).to(input.dtype)


class LigerJSDFunction(DivergenceFunction):
    """``apply(_input, target, shift_labels=None, beta=0.5, ignore_index=-100, ...) -> loss`` in
    _input's dtype.

    ``jsd_impl`` and ``jsd_mode`` are accepted and change nothing.
    """

    @staticmethod
    def reference(
        _input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None
    ):
        return jsd_reference(_input, target, shift_labels, beta, ignore_index)

    @staticmethod
    def forward(
        ctx,
        _input,
        target,
        shift_labels=None,
        beta=0.5,
        ignore_index=-100,
        jsd_impl=None,
        jsd_mode=None,
    ):
        check.share("LigerJSDFunction", "beta", beta)
        divergence = {0: "forward_kl", 1: "reverse_kl"}.get(beta, "jsd")
        tensors, rest = (_input, target, shift_labels), (beta, ignore_index)
        save, name = DivergenceFunction.save, "LigerJSDFunction"
        loss = save(ctx, name, tensors, divergence, beta, "batchmean", ignore_index, rest)
        return rounded(loss, _input.dtype)


def liger_jsd(
    input: torch.Tensor,
    target: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence of a student and a teacher, averaged over the rows.

    Args:
        input: (M, V) the student's log-probabilities, fp32, bf16 or fp16.
        target: (M, V) the teacher's. It gets no gradient.
        shift_labels: (M,) integers, not shifted here: rows where they are ``ignore_index`` count
        for nothing.
        beta: the teacher's share in the mixture. 0 is KL(teacher ‖ student), 1 is KL(student ‖
        teacher).
        ignore_index: see shift_labels.

    Returns:
        0-d, in input's dtype. 0 if all rows are ignored.

    Raises:
        ValueError: shapes that are not two equal (M, V), beta outside of [0, 1].
        AssertionError: shift_labels of another shape, which existing code expects.
        TypeError: dtypes, or numbers that are none.

    Source: arXiv:2306.13649.
    """
    name = "liger_jsd"
    labels = check_pair(name, shift_labels, input=input, target=target)
    beta, ignore_index = (
        check.share(name, "beta", beta),
        check.integer(name, "ignore_index", ignore_index),
    )
    return applied(LigerJSDFunction, input, target, labels, beta, ignore_index)


class LigerJSD(torch.nn.Module):
    """`liger_jsd` as a module."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta = check.share(type(self).__name__, "beta", beta)
        self.ignore_index = check.integer(type(self).__name__, "ignore_index", ignore_index)

    def forward(
        self, log_q: torch.Tensor, log_p: torch.Tensor, shift_labels: torch.Tensor | None = None
    ):
        return liger_jsd(log_q, log_p, shift_labels, self.beta, self.ignore_index)


CASES.append(
    case_of(
        "jsd",
        liger_jsd,
        jsd_reference,
        inputs_of(torch.log_softmax),
        (dict(beta=0.3), dict(beta=0.0), dict(beta=1.0, shift_labels=None)),
    )
)
