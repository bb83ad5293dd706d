"""Fixtures around patched models."""

import types

import pytest
import tiny

import liger_kernel.transformers as liger
from liger_kernel.core import devices
from liger_kernel.patch.layers import fan_out
from liger_kernel.patch.loss import head
from liger_kernel.patch.proof import conditions


@pytest.fixture(autouse=True)
def ours_in_graphs(monkeypatch):
    """In a graph on a GPU small tensors, as tests have, would be the compiler's."""
    monkeypatch.setattr(conditions, "MIN_NUMEL_IN_GRAPH", 0)


@pytest.fixture
def on_cpu_and_clean(reference_only):
    yield
    for family in tiny.FAMILIES:
        liger.revert(family)


@pytest.fixture
def everything_on(reference_only, monkeypatch):
    """Run here what waits for large inputs on a GPU (`FanOut`). A head that is called makes several
    chunks."""
    monkeypatch.setattr(conditions, "LARGE_NUMEL", 0)
    monkeypatch.setattr(
        fan_out,
        "devices",
        types.SimpleNamespace(has_kernels=lambda x: True, in_autocast=devices.in_autocast),
    )
    monkeypatch.setattr(head, "CHUNK_ROWS", 7)
    yield
    liger.revert("llama")
