"""Trainers of TRL with this package's losses. TRL is imported at their first use."""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["LigerORPOTrainer"]

if TYPE_CHECKING:
    from liger_kernel.transformers.trainer.orpo_trainer import LigerORPOTrainer
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.orpo_trainer"), name)
