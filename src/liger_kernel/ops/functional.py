"""The operators as functions. Patched models look up here what they call, at each call."""

from importlib import import_module

from liger_kernel._public import homes

__all__ = list(homes("functional"))
globals().update(
    {
        name: getattr(import_module(f"liger_kernel.ops.{home}"), name)
        for name, home in homes("functional").items()
    }
)
