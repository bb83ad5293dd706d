"""What the callbacks for the Trainer and for Lightning share: their arguments, and what they ask of
a model."""

from __future__ import annotations

import logging

import torch

from liger_kernel.metrics.flops import Flops, Uncountable, flops_of, unwrapped
from liger_kernel.metrics.meter import ATTENTION
from liger_kernel.metrics.peaks import peak_of

logger = logging.getLogger("liger_kernel")
CAUSAL = "ForCausalLM", "LMHeadModel", "LMHeadCausalModel"  # ends of class names


def check(port, peak, per_token, attention) -> None:
    if port is not None and (
        not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 2**16
    ):
        raise ValueError(
            f"LigerMetrics: prometheus_port is {port!r}; give a port's number, 0 for a free one, or None"
        )
    for what, value in (("peak_flops", peak), ("flops_per_token", per_token)):
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise ValueError(f"LigerMetrics: {what} is {value!r}; give a positive number")
    if attention not in ATTENTION:
        raise ValueError(
            f"LigerMetrics: attention is {attention!r}; give one of {', '.join(ATTENTION)}"
        )


def known_flops(model, per_token: float | None, speaks: bool) -> Flops | None:
    if per_token is not None:
        return Flops(token=per_token)
    try:
        return flops_of(model)
    except Uncountable as reason:
        if speaks:
            logger.warning(
                "LigerMetrics: no mfu, for the model's FLOPs are unknown (%s); give flops_per_token",
                reason,
            )
        return None


def known_peak(
    given: float | None, device: torch.device, dtype: torch.dtype | None, speaks: bool
) -> float | None:
    """FLOP/s of a device; ``dtype`` is what it computes in, None if that is neither 16 nor 32
    bits."""
    peak = given or (peak_of(device, dtype) if dtype is not None else None)
    if peak is None and device.type != "cpu" and speaks:
        what = dtype or "this precision"
        logger.warning(
            "LigerMetrics: no mfu, for the peak of this %s device in %s is unknown; give peak_flops",
            device.type,
            what,
        )
    return peak


def dtype_of(model) -> torch.dtype | None:
    """What a model computes in without autocast."""
    model = unwrapped(model)
    known = getattr(model, "dtype", None)
    if isinstance(known, torch.dtype):
        return known
    return next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), None)


def shifts_labels(model) -> bool:
    """Whether it is a model of the text to come, for which the first label of a row is no
    target."""
    model = unwrapped(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return any(c.__name__.endswith(CAUSAL) for c in type(model).__mro__)
