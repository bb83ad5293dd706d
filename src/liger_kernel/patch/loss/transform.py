"""A function of the logits that is recorded instead of computed: a scale, a soft cap, a cast.

Families scale or cap their logits between head and loss function. The kernels of the loss do the
same, so that no logits are needed for it. `transform_after` follows what a forward does, one torch
function at a time; `declared_transform` reads from the config what it is going to do."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.compiler import is_compiling

T = torch.Tensor


class Transform(NamedTuple):
    """The function ``softcap·tanh(scale·x / softcap)``, or ``scale·x`` without a soft cap."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, x):
        x = x if self.scale == 1.0 else x * self.scale
        return x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)

    def same_as(self, other: Transform) -> bool:
        """Return True if it is the same function, whatever the order of its multiplications."""
        if (self.softcap is None) != (other.softcap is None):
            return False
        if not _is_close(self.scale, other.scale):
            return False
        return self.softcap is None or _is_close(self.softcap, other.softcap)


def _is_close(a, b) -> bool:
    return abs(a - b) <= 1e-6 * abs(b)


def declared_transform(config) -> Transform:
    """Return the transform that a model's config declares.

    Whether a family means its config so is seen when it calls its loss function.
    """
    config = getattr(config, "text_config", config)
    scale = getattr(config, "logit_scale", None)
    if scale is None:
        scale = 1.0
    if "granite" in config.model_type:  # others multiply by it, or divide the hidden states
        scale /= getattr(config, "logits_scaling", None) or 1.0
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        softcap = getattr(config, name, None)
        if softcap is not None:
            return Transform(scale, softcap)
    return Transform(scale)


CAST_DTYPES = {
    T.float: torch.float32,
    T.bfloat16: torch.bfloat16,
    T.half: torch.float16,
    T.double: torch.float64,
}
_MULTIPLICATIONS = {T.mul, T.__mul__, T.__rmul__, T.multiply, torch.mul, torch.multiply}
_DIVISIONS = {
    T.div,
    T.__truediv__,
    T.true_divide,
    T.divide,
    torch.div,
    torch.true_divide,
    torch.divide,
}
_TANH = {T.tanh, torch.tanh}
_IDENTITIES = {T.contiguous, T.clone, torch.clone}


def transform_after(before: Transform, function, args, kwargs) -> Transform | None:
    """Return the transform of the logits after ``function(logits, ...)``.

    Returns None if that is no scale, cap or cast by Python numbers. The kernels compute in fp32
    whatever the cast.
    """
    scale, softcap = before
    if kwargs:
        return None
    if len(args) == 1:
        if function in _TANH and softcap is None:
            return Transform(scale, 1.0)
        return before if function in CAST_DTYPES or function in _IDENTITIES else None
    if function is T.__getitem__ and not is_compiling():
        return before if _selects_everything(*args) else None
    is_multiplication = function in _MULTIPLICATIONS
    if len(args) != 2 or not (is_multiplication or function in _DIVISIONS):
        return None
    x, number = args
    if is_multiplication and not isinstance(x, T):
        x, number = number, x
    if not isinstance(x, T) or not isinstance(number, (int, float)):
        return None
    if not 0 < abs(number) < float("inf"):
        return None
    if not is_multiplication:
        number = 1.0 / number
    if softcap is None:
        return Transform(scale * number)
    # number·softcap·tanh(scale·x / softcap) is another softcap, with a scale that leaves the
    # argument of tanh as it is
    return Transform(scale * number, softcap * number) if number > 0 else None


def _selects_everything(x, index) -> bool:
    """Return True if ``x[index]`` is all of x."""
    indices = index if type(index) is tuple else (index,)
    if len(indices) > x.dim() or not all(type(i) is slice for i in indices):
        return False
    return all(i.indices(size) == (0, size, 1) for i, size in zip(indices, x.shape, strict=False))
