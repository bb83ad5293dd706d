"""The logits of a router of a mixture, before `liger_router` chooses by them."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch.nn.functional as F

from liger_kernel.core import devices


class Projection(NamedTuple):
    """The linear layer and the casts that compute a router's logits.

    Attributes:
        child: the name of the linear layer, or None if weight and bias are the router's own.
        has_bias: True if the linear layer has a bias.
        cast: "fp32" if x and the weight are cast to fp32, "weight" if x is cast to the weight's
            dtype, None if neither is cast.
        fp32_logits: True if the logits are cast to fp32.
        without_autocast: True if they are computed with autocast off.
    """

    child: str | None
    has_bias: bool
    cast: str | None = None
    fp32_logits: bool = False
    without_autocast: bool = False

    def weight(self, module):
        linear = getattr(module, self.child, None) if self.child else module
        return getattr(linear, "weight", None)

    def logits(self, module, x, weight, bias):
        x = x.reshape(-1, x.shape[-1])
        autocast = contextlib.nullcontext()
        if self.without_autocast:
            autocast = devices.without_autocast(x)
        with autocast:
            if self.cast is not None:
                x = x.float() if self.cast == "fp32" else x.to(weight.dtype)
            if self.child:
                logits = getattr(module, self.child)(x)
            elif self.cast == "fp32":
                logits = F.linear(x, weight.float(), None if bias is None else bias.float())
            else:
                logits = F.linear(x, weight, bias)
        return logits.float() if self.fp32_logits else logits
