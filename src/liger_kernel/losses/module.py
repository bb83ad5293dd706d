"""The base of the losses' modules: their options are attributes."""

from __future__ import annotations

import torch


def without(arguments, *names):
    """Return a call's arguments (``locals()`` at its beginning) except those called ``names``."""
    return {name: value for name, value in arguments.items() if name not in names}


class LossModule(torch.nn.Module):
    """A loss whose options are attributes, read at each call.

    ``arguments`` are those of a subclass's ``__init__``: ``super().__init__(locals())``.
    ``compiled`` and ``chunk_size`` are kept as attributes and have no effect.
    """

    def __init__(self, arguments) -> None:
        super().__init__()
        arguments = without(arguments, "self", "__class__")
        self._option_names = tuple(without(arguments, "compiled", "chunk_size"))
        vars(self).update(arguments)

    @property
    def options(self):
        return {name: getattr(self, name) for name in self._option_names}

    def extra_repr(self):
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
