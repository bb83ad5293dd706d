"""Fixtures around patched models."""

import types

import pytest
import tiny

import liger_kernel.transformers as liger
from liger_kernel.patch.layers import fan_out
from liger_kernel.patch.loss import head
from liger_kernel.patch.proof import conditions


@pytest.fixture(autouse=True)
def ours_in_graphs(monkeypatch):
    """In a graph on a GPU small tensors, as tests have, would be the compiler's."""
    monkeypatch.setattr(conditions, "IN_GRAPH", 0)


@pytest.fixture
def on_cpu_and_clean(reference_only):
    yield
    for family in tiny.FAMILIES:
        liger.revert(family)


@pytest.fixture
def everything_on(reference_only, monkeypatch):
    """What waits for large inputs on a GPU (`FanOut`) runs here, too; a head that is called makes
    several chunks."""
    monkeypatch.setattr(conditions, "LARGE", 0)
    monkeypatch.setattr(fan_out, "devices", types.SimpleNamespace(has_kernels=lambda x: True))
    monkeypatch.setattr(head, "CHUNK", 7)
    yield
    liger.revert("llama")
