"""Trainers of TRL with this package's losses. TRL is imported when one is asked for."""

from importlib import import_module

__all__ = ["LigerORPOTrainer"]


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.orpo_trainer"), name)
