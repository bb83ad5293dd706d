"""Fixtures of the losses."""

import pytest

from liger_kernel.ops.head import grouped_loss


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(grouped_loss, "ROWS_WITHOUT_KERNELS", 5)
