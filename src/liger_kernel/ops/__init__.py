"""The operators: one file each, in the table `liger_kernel._public.OPERATORS`. Importing them
touches no device."""

from importlib import import_module

from liger_kernel._public import OPERATORS, homes

_FILES = {
    home: import_module(f"{__name__}.{home}") for home in OPERATORS
}  # whose `Case`s are in a list from now on
__all__ = list(homes("ops"))
globals().update({name: getattr(_FILES[home], name) for name, home in homes("ops").items()})


def __getattr__(name):
    """A loss that is made of operators, and lives above them."""
    if name != "GrpoLossFunction":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.grpo_loss").GrpoLossFunction
