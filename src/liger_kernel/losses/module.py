"""What the losses' modules share: their options are attributes."""

from __future__ import annotations

import torch


def without(arguments, *names):
    """The arguments of a call (``locals()`` at its beginning) but for those ``names``."""
    return {name: value for name, value in arguments.items() if name not in names}


class LossModule(torch.nn.Module):
    """A loss whose options are attributes, read at each call.

    ``arguments`` are those of a subclass's ``__init__``: ``super().__init__(locals())``.
    ``compiled`` and ``chunk_size`` are kept and have no effect."""

    def __init__(self, arguments) -> None:
        super().__init__()
        arguments = without(arguments, "self", "__class__")
        self._names = tuple(without(arguments, "compiled", "chunk_size"))
        vars(self).update(arguments)

    @property
    def options(self):
        return {name: getattr(self, name) for name in self._names}

    def extra_repr(self):
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
