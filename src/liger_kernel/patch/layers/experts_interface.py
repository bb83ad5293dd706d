"""`liger_experts` by transformers' own door: ``experts_implementation="liger"``. It imports
nothing.

`experts.chosen` is registered as soon as there is an interface: at once, or when transformers is
imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys

NAME = "liger"
INTERFACE = "transformers.integrations.moe"


def forward(module, hidden_states, top_k_index, top_k_weights):
    from liger_kernel.patch.layers.experts import chosen

    return chosen(module, hidden_states, top_k_index, top_k_weights)


def _register(interface) -> None:
    if hasattr(interface, "ExpertsInterface"):  # the first releases of transformers 5 have none
        interface.ExpertsInterface.register(NAME, forward)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the interface as everybody does, and registers the forward once it is there."""

    def find_spec(self, fullname, path=None, target=None):
        spec = (
            importlib.machinery.PathFinder.find_spec(fullname, path, target)
            if fullname == INTERFACE
            else None
        )
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                _register(module)

            spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    if INTERFACE in sys.modules:
        _register(sys.modules[INTERFACE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
