"""Checks of the arguments that a user gives.

They look at types, dtypes, shapes and devices, never at the values of a tensor. So nothing waits
for the GPU, and `torch.compile` removes the checks. An error names the function, the argument, what
was given and what to give.
"""

from __future__ import annotations

from numbers import Integral, Real

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
INF = float("inf")


class InvalidArgument(ValueError, AssertionError):
    """A number, a shape or an option that does not fit.

    Existing code expects an AssertionError for many of them.
    """


def _tensors(name, required, optional, dtypes, expected):
    first_argument = device = None
    for argument, x in {**required, **optional}.items():
        if not isinstance(x, torch.Tensor):
            if x is None and argument in optional:
                continue
            kind = "None" if x is None else f"a {type(x).__name__}"
            raise TypeError(f"{name}: {argument} is {kind}, give a tensor")
        if x.dtype not in dtypes:
            raise TypeError(f"{name}: {argument} is {x.dtype}, give {expected}")
        if first_argument is None:
            first_argument, device = argument, x.device
        elif x.device != device:
            raise ValueError(
                f"{name}: {first_argument} is on {device}, {argument} on {x.device}, "
                "give one device"
            )


def matches(x, shape, *tensors):
    """Return True if each tensor is None, or floating point, of this shape and on x's device.

    It takes a microsecond, for a Function that may be applied by itself. If the answer is False,
    the function's own checks say why.
    """
    for t in tensors:
        if t is not None and not (
            isinstance(t, torch.Tensor)
            and t.shape == shape
            and t.device == x.device
            and t.dtype in FLOAT_DTYPES
        ):
            return False
    return True


def floats(name, required, **optional):
    """Check that all are floating point tensors on one device. An optional one may be None."""
    expected = "a floating point tensor (fp32, bf16, fp16 or fp64)"
    _tensors(name, required, optional, FLOAT_DTYPES, expected)


def integers(name, required, **optional):
    """Check that all are tensors of integers on one device. An optional one may be None."""
    _tensors(name, required, optional, INTEGER_DTYPES, "integers (torch.int64)")


def shape(name, argument, x, *shapes):
    """Check that ``x`` is None or has one of these shapes."""
    if x is not None and tuple(x.shape) not in shapes:
        raise InvalidArgument(
            f"{name}: {argument} has shape {tuple(x.shape)}, give {' or '.join(map(str, shapes))}"
        )


def _number(expected, is_valid, types=(float, int, Real), convert=float):
    """Return a check of a number, which also converts it."""

    def check(name, argument, value):
        is_plain = type(value) is convert  # torch.compile guards on what is read to know more
        if not is_plain and (value is True or value is False or not isinstance(value, types)):
            raise TypeError(f"{name}: {argument} is {value!r}, give {expected}")
        if not is_valid(value):
            raise InvalidArgument(f"{name}: {argument} is {value!r}, give {expected}")
        return convert(value)

    check.__doc__ = f"Return ``value`` as a Python number. It must be {expected}."
    return check


finite = _number("a finite number", lambda x: -INF < x < INF)
positive = _number("a positive number", lambda x: 0 < x < INF)
non_negative = _number("a number from 0 on", lambda x: 0 <= x < INF)
fraction = _number("a number from 0 to 1", lambda x: 0 <= x <= 1)
integer = _number("an int", lambda x: True, (int, Integral), int)
size = _number("an int from 0 on", lambda x: x >= 0, (int, Integral), int)


def count(name, argument, value):
    """Check a number of tokens, and return it.

    It is a Python number from 0 on, or a tensor of one element, which is returned as 0-d.
    """
    if not isinstance(value, torch.Tensor):
        return non_negative(name, argument, value)
    if value.numel() != 1 or value.dtype not in (*INTEGER_DTYPES, *FLOAT_DTYPES):
        description = f"{value.dtype} of shape {tuple(value.shape)}"
        raise ValueError(
            f"{name}: {argument} is {description}, give a number or a tensor of one element"
        )
    return value.reshape(())


def dtype(name, argument, value):
    """Check that ``value`` is None or a floating point dtype."""
    if value is not None and not (isinstance(value, torch.dtype) and value in FLOAT_DTYPES):
        raise TypeError(
            f"{name}: {argument} is {value!r}, give a floating point dtype such as torch.float32, "
            "or None"
        )
