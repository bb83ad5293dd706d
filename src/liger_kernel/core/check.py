"""Checks of the arguments that a user gives.

They look at types, dtypes, shapes and devices, never at the values of a tensor. So nothing waits
for the GPU, and `torch.compile` removes the checks. An error names the function, the argument, what
was given and what to give."""

from __future__ import annotations

from numbers import Integral, Real

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
INF = float("inf")


def _tensors(name, required, optional, dtypes, wanted):
    known = device = None
    for argument, x in {**required, **optional}.items():
        if not isinstance(x, torch.Tensor):
            if x is None and argument in optional:
                continue
            kind = "None" if x is None else f"a {type(x).__name__}"
            raise TypeError(f"{name}: {argument} is {kind}, give a tensor")
        if x.dtype not in dtypes:
            raise TypeError(f"{name}: {argument} is {x.dtype}, give {wanted}")
        if known is None:
            known, device = argument, x.device
        elif x.device != device:
            raise ValueError(
                f"{name}: {known} is on {device}, {argument} on {x.device}, give one device"
            )


class Misfit(ValueError, AssertionError):
    """A number, a shape or an option that does not fit. Existing code expects an AssertionError for
    many of them."""


def fits(x, shape, *tensors):
    """Whether each of the tensors is None, or floating point, of this shape and on x's device.

    Within a microsecond: for a Function that may be applied by itself. If not, the function's own
    checks say why."""
    for t in tensors:
        if t is not None and not (
            isinstance(t, torch.Tensor)
            and t.shape == shape
            and t.device == x.device
            and t.dtype in FLOATS
        ):
            return False
    return True


def floats(name, required, **optional):
    """All are floating point tensors on one device. An optional one may be None."""
    _tensors(name, required, optional, FLOATS, "a floating point tensor (fp32, bf16, fp16 or fp64)")


def integers(name, required, **optional):
    """All are tensors of integers on one device. An optional one may be None."""
    _tensors(name, required, optional, INTEGERS, "integers (torch.int64)")


def shape(name, argument, x, *shapes):
    """``x`` is None or has one of these shapes."""
    if x is not None and tuple(x.shape) not in shapes:
        raise Misfit(
            f"{name}: {argument} has shape {tuple(x.shape)}, give {' or '.join(map(str, shapes))}"
        )


def _number(wanted, fits, kind=(float, int, Real), convert=float):
    def check(name, argument, value):
        usual = type(value) is convert  # torch.compile guards on what is read to know more
        if not usual and (value is True or value is False or not isinstance(value, kind)):
            raise TypeError(f"{name}: {argument} is {value!r}, give {wanted}")
        if not fits(value):
            raise Misfit(f"{name}: {argument} is {value!r}, give {wanted}")
        return convert(value)

    check.__doc__ = f"-> ``value`` as a Python number. It must be {wanted}."
    return check


finite = _number("a finite number", lambda x: -INF < x < INF)
positive = _number("a positive number", lambda x: 0 < x < INF)
not_negative = _number("a number from 0 on", lambda x: 0 <= x < INF)
share = _number("a number from 0 to 1", lambda x: 0 <= x <= 1)
integer = _number("an int", lambda x: True, (int, Integral), int)
size = _number("an int from 0 on", lambda x: x >= 0, (int, Integral), int)


def count(name, argument, value):
    """-> a number of tokens: a Python number from 0 on, or a tensor of one element as 0-d."""
    if not isinstance(value, torch.Tensor):
        return not_negative(name, argument, value)
    if value.numel() != 1 or value.dtype not in (*INTEGERS, *FLOATS):
        given = f"{value.dtype} of shape {tuple(value.shape)}"
        raise ValueError(f"{name}: {argument} is {given}, give a number or a tensor of one element")
    return value.reshape(())


def dtype(name, argument, value):
    """``value`` is None or a floating point dtype."""
    if value is not None and not (isinstance(value, torch.dtype) and value in FLOATS):
        raise TypeError(
            f"{name}: {argument} is {value!r}, give a floating point dtype such as torch.float32, or None"
        )
