"""Fixtures of all tests. What tests share beside fixtures is in tests/support, which pytest has on
its path."""

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
    """What was imported stays: for the garbage collector to look at it takes a third of a family's
    tests."""
    if DEVICE == "cpu":
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000)


def pytest_runtest_logreport(report):
    """A run that is ended from outside has named what has failed: in the file FAILED_TESTS."""
    if report.failed and "FAILED_TESTS" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["FAILED_TESTS"], "a") as file:
            print(report.nodeid, report.longreprtext.splitlines()[-1:], file=file)


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture
def reference_only(monkeypatch):
    """CPU tensors take the operators' PyTorch reference, as they do for a user without a GPU."""
    import liger_kernel.ops  # noqa: F401  (a kernel that is defined after this would be none of the interpreter's)
    from liger_kernel.core import devices

    monkeypatch.setattr(devices, "INTERPRETED", False)


@pytest.fixture(params=["kernels", "no kernels"])
def anywhere(request, monkeypatch):
    """With the kernels of a head, and as where there are none: then in chunks of few rows."""
    from liger_kernel.core import devices
    from liger_kernel.ops.head import distillation, token_log_probs

    if request.param == "no kernels":
        if DEVICE != "cpu":
            pytest.skip("a tensor on a GPU has kernels")
        monkeypatch.setattr(devices, "INTERPRETED", False)
        monkeypatch.setattr(token_log_probs, "ROWS_WITHOUT_KERNELS", 64)
        monkeypatch.setattr(distillation.take_in_chunks, "__defaults__", (4,))


@pytest.fixture
def fused(monkeypatch):
    """The activations with which an MLP's activation and last layer have run as one operator."""
    from liger_kernel.ops.mlp.activation_linear import LigerGLULinearFunction

    seen = []
    apply = LigerGLULinearFunction.apply
    monkeypatch.setattr(
        LigerGLULinearFunction, "apply", lambda *args: seen.append(args[4]) or apply(*args)
    )
    return seen
