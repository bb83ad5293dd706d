"""The operators: one file each, listed in `liger_kernel._public.OPERATORS`.

Importing them touches no device.
"""

from importlib import import_module

from liger_kernel._public import OPERATORS, homes

# importing an operator's file adds its `Case` to the list of cases
_MODULES = {home: import_module(f"{__name__}.{home}") for home in OPERATORS}
__all__ = list(homes("ops"))
globals().update({name: getattr(_MODULES[home], name) for name, home in homes("ops").items()})


def __getattr__(name):
    """Import `GrpoLossFunction` on demand: it is made of operators, and lives above them."""
    if name != "GrpoLossFunction":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.grpo_loss").GrpoLossFunction
