"""Fixtures of all tests. What else they share is in tests/support, which is on pytest's path."""

import gc
import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite(
    *(path.stem for path in (Path(__file__).parent / "support").glob("*.py"))
)

from hardware import DEVICE  # noqa: E402
from selection import pytest_collection_modifyitems  # noqa: E402, F401


def pytest_collection_finish():
    """Freeze what was imported: the garbage collector would take a third of a family's tests."""
    if DEVICE == "cpu":
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000)


def pytest_runtest_logreport(report):
    """Write each failure to the file FAILED_TESTS, for a run that is ended from outside."""
    if report.failed and "FAILED_TESTS" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["FAILED_TESTS"], "a") as file:
            print(report.nodeid, report.longreprtext.splitlines()[-1:], file=file)


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture
def reference_only(monkeypatch):
    """CPU tensors take the operators' PyTorch reference, as they do for a user without a GPU."""
    # a kernel that is defined after the change would be none of the interpreter's
    import liger_kernel.ops  # noqa: F401
    from liger_kernel.core import devices

    monkeypatch.setattr(devices, "INTERPRETED", False)


@pytest.fixture(params=["kernels", "no kernels"])
def with_and_without_kernels(request, monkeypatch):
    """Run a test with the kernels of a head, and without them, then in chunks of few rows."""
    from liger_kernel.core import devices
    from liger_kernel.ops.head import distillation, linear_head_reference

    if request.param == "no kernels":
        if DEVICE != "cpu":
            pytest.skip("a tensor on a GPU has kernels")
        monkeypatch.setattr(devices, "INTERPRETED", False)
        monkeypatch.setattr(linear_head_reference, "ROWS_WITHOUT_KERNELS", 64)
        monkeypatch.setattr(distillation.distill_in_chunks, "__defaults__", (4,))


@pytest.fixture
def fused(monkeypatch):
    """The activations with which an MLP's activation and last layer have run as one operator."""
    from liger_kernel.ops.mlp.activation_linear import LigerGLULinearFunction

    activations = []
    apply = LigerGLULinearFunction.apply

    def recording_apply(*args):
        activations.append(args[4])
        return apply(*args)

    monkeypatch.setattr(LigerGLULinearFunction, "apply", recording_apply)
    return activations
