"""Shared by the callbacks for the Trainer and for Lightning: checks of their arguments, and facts
about a model."""

from __future__ import annotations

import logging

import torch

from liger_kernel.metrics.flops import Flops, Uncountable, flops_of, unwrapped
from liger_kernel.metrics.meter import ATTENTION
from liger_kernel.metrics.peaks import peak_of

logger = logging.getLogger("liger_kernel")
CAUSAL_CLASS_ENDINGS = "ForCausalLM", "LMHeadModel", "LMHeadCausalModel"


def check(port, peak_flops, flops_per_token, attention) -> None:
    if port is not None:
        is_integer = isinstance(port, int) and not isinstance(port, bool)
        if not is_integer or not 0 <= port < 2**16:
            raise ValueError(
                f"LigerMetrics: prometheus_port is {port!r}; give a port's number, "
                "0 for a free one, or None"
            )
    numbers = {"peak_flops": peak_flops, "flops_per_token": flops_per_token}
    for argument, value in numbers.items():
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise ValueError(f"LigerMetrics: {argument} is {value!r}; give a positive number")
    if attention not in ATTENTION:
        raise ValueError(
            f"LigerMetrics: attention is {attention!r}; give one of {', '.join(ATTENTION)}"
        )


def flops_or_none(model, flops_per_token: float | None, warns: bool) -> Flops | None:
    """Return the model's operations. If they are unknown: None, and a warning if ``warns``."""
    if flops_per_token is not None:
        return Flops(token=flops_per_token)
    try:
        return flops_of(model)
    except Uncountable as reason:
        if warns:
            logger.warning(
                "LigerMetrics: no mfu, for the model's FLOPs are unknown (%s); "
                "give flops_per_token",
                reason,
            )
        return None


def peak_or_none(
    peak_flops: float | None, device: torch.device, dtype: torch.dtype | None, warns: bool
) -> float | None:
    """Return the peak FLOP/s of a device. If it is unknown: None, and a warning if ``warns``.

    ``dtype``: of the matrix products, None if it has neither 16 nor 32 bits.
    """
    peak = peak_flops
    if not peak and dtype is not None:
        peak = peak_of(device, dtype)
    if peak is None and device.type != "cpu" and warns:
        logger.warning(
            "LigerMetrics: no mfu, for the peak of this %s device in %s is unknown; "
            "give peak_flops",
            device.type,
            dtype or "this precision",
        )
    return peak


def dtype_of(model) -> torch.dtype | None:
    """Return the dtype that a model computes in without autocast."""
    model = unwrapped(model)
    dtype = getattr(model, "dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    return next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), None)


def shifts_labels(model) -> bool:
    """Return True for a causal language model, for which a row's first label is no target."""
    model = unwrapped(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return any(c.__name__.endswith(CAUSAL_CLASS_ENDINGS) for c in type(model).__mro__)
