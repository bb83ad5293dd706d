"""What the tests of experts, and of experts with adapters, share."""

import pytest
import torch

from liger_kernel.ops.moe import expert_kernels


@pytest.fixture
def check_strips(monkeypatch):
    """Return a function that compares outputs made in strips of 256 columns with whole ones."""

    def check(run, widths, terms):
        """Call ``run``, which returns tensors by name, without and with strips of ``widths``.

        The order of the sums of "out" and "x" may differ, which have so many ``terms``. Of all
        others each bit is the same.
        """
        whole = run()
        actual_widths = []
        sum_by_token = expert_kernels.sum_by_token

        def noting_sum_by_token(parts, *arguments):
            actual_widths.append(parts.shape[1])
            sum_by_token(parts, *arguments)

        monkeypatch.setattr(expert_kernels, "sum_by_token", noting_sum_by_token)
        monkeypatch.setattr(expert_kernels, "PARTS_BYTES", 1)
        strips = run()
        assert actual_widths == widths
        for name, expected in whole.items():
            error = terms**2 * torch.finfo(expected.dtype).eps if name in ("out", "x") else 0
            assert (strips[name] - expected).abs().max() <= error * expected.abs().max(), name

    return check
