"""The state that a module has in its forward, for a backward that runs it again.

In between, a training loop may call ``model.eval()``, or choose another of PEFT's adapters. The
graph of a forward that is not run again would not mind."""

from __future__ import annotations

import contextlib
import copy

# of every module, and of PEFT's layers: which adapters run, and how they are weighed
RESTORED_ATTRIBUTES = "training", "_active_adapter", "_disable_adapters", "scaling"
# adapters whose product is in the layer's weight by now, or is not any more
MERGED = "merged_adapters"


class ForwardState:
    """The modes and the choice of adapters that a module has when this is made."""

    def __init__(self, module):
        self._values = []
        for each in module.modules():
            attributes = vars(each)
            for name in (*RESTORED_ATTRIBUTES, MERGED):
                if name in attributes:
                    self._values.append((attributes, name, copy.copy(attributes[name])))

    @contextlib.contextmanager
    def restored(self):
        """Give the module this state, and afterwards its present one back.

        Raises:
            RuntimeError: adapters were merged, or unmerged: the weight is another one.
        """
        changed = []
        for attributes, name, value in self._values:
            if attributes[name] != value:
                changed.append((attributes, name, value, attributes[name]))
        if any(name == MERGED for _, name, *_ in changed):
            raise RuntimeError(
                "liger-kernel: adapters were merged, or unmerged, between forward and backward, "
                "which runs their layer again; call backward before"
            )
        for attributes, name, value, _ in changed:
            attributes[name] = value
        try:
            yield
        finally:
            for attributes, name, _, present in changed:
                attributes[name] = present
