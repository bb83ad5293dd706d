"""`liger_experts` as transformers' ``experts_implementation="liger"``.

The forward in the file experts_by_name is registered as soon as transformers' interface is there:
at once, or when transformers is imported. This file imports neither torch nor transformers."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys

from liger_kernel.patch.layers.experts_names import LIGER_IMPLEMENTATION

INTERFACE_MODULE = "transformers.integrations.moe"


def install() -> None:
    """Register the implementation, now or when transformers' interface is imported."""
    if INTERFACE_MODULE in sys.modules:
        _register(sys.modules[INTERFACE_MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def forward(module, hidden_states, top_k_index, top_k_weights):
    """Call `experts_by_name.liger_forward`, which is imported when it is first needed."""
    from liger_kernel.patch.layers.experts_by_name import liger_forward

    return liger_forward(module, hidden_states, top_k_index, top_k_weights)


def _register(interface) -> None:
    if hasattr(interface, "ExpertsInterface"):  # the first releases of transformers 5 have none
        interface.ExpertsInterface.register(LIGER_IMPLEMENTATION, forward)


class _Finder(importlib.abc.MetaPathFinder):
    """Find the interface's module as Python does, and register the forward once it is loaded."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != INTERFACE_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            load_module = spec.loader.exec_module

            def exec_module(module):
                load_module(module)
                _register(module)

            spec.loader.exec_module = exec_module
        return spec
