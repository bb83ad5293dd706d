r"""Generalised Jensen-Shannon divergence of a student Q and a teacher P.

x = log q and y = log p are given.

    D = β·p·(y - log M) + (1-β)·q·(x - log M),   M = β·p + (1-β)·q

    dx = (1-β)·q·(x - log M)

β = 0 is KL(P‖Q), β = 1 is KL(Q‖P); these are not the limits, which are 0. The average is over the
rows that are not ignored. The kernel is in `rows`.

Source: Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check
from liger_kernel.core.op import CASES, cast_if_needed
from liger_kernel.ops.head.divergences import jsd
from liger_kernel.ops.probability.rows import (
    DivergenceFunction,
    apply_function,
    check_pair,
    make_case,
    make_inputs,
    reduce_divergence,
    upcast_rows,
)


def jsd_reference(input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    log_p = upcast_rows(target.detach(), shift_labels, ignore_index)
    log_q = upcast_rows(input, shift_labels, ignore_index)
    d = jsd(log_p, log_q, beta)
    return reduce_divergence(d[:, None], shift_labels, "batchmean", ignore_index).to(input.dtype)


class LigerJSDFunction(DivergenceFunction):
    """Autograd Function of `liger_jsd`. The loss has _input's dtype.

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
        check.fraction("LigerJSDFunction", "beta", beta)
        divergence = {0: "forward_kl", 1: "reverse_kl"}.get(beta, "jsd")
        loss = DivergenceFunction.run_forward(
            ctx,
            "LigerJSDFunction",
            (_input, target, shift_labels),
            divergence,
            beta,
            "batchmean",
            ignore_index,
            other_arguments=(beta, ignore_index),
        )
        return cast_if_needed(loss, _input.dtype)


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
        shift_labels: (M,) integers, not shifted here: rows where they are ``ignore_index`` do not
            count.
        beta: the teacher's share in the mixture. 0 is KL(teacher ‖ student), 1 is
            KL(student ‖ teacher).
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
    beta = check.fraction(name, "beta", beta)
    ignore_index = check.integer(name, "ignore_index", ignore_index)
    return apply_function(LigerJSDFunction, input, target, labels, beta, ignore_index)


class LigerJSD(torch.nn.Module):
    """`liger_jsd` as a module."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta = check.fraction(type(self).__name__, "beta", beta)
        self.ignore_index = check.integer(type(self).__name__, "ignore_index", ignore_index)

    def forward(
        self, log_q: torch.Tensor, log_p: torch.Tensor, shift_labels: torch.Tensor | None = None
    ):
        return liger_jsd(log_q, log_p, shift_labels, self.beta, self.ignore_index)


CASES.append(
    make_case(
        "jsd",
        liger_jsd,
        jsd_reference,
        make_inputs(torch.log_softmax),
        (dict(beta=0.3), dict(beta=0.0), dict(beta=1.0, shift_labels=None)),
    )
)
