"""The norm of a sum: dtypes and errors beside those that all operators are tried with."""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops import functional


def rows(seed):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_a_wider_residual():
    """The result has X's dtype, each gradient its input's."""
    x = rows(0).bfloat16().requires_grad_()
    r = rows(1).requires_grad_()
    y, s = functional.liger_fused_add_rms_norm(x, r, None, 1e-6)
    assert y.dtype == s.dtype == torch.bfloat16
    (y + s).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and r.grad.dtype == torch.float32


def test_errors():
    x = rows(0)
    with pytest.raises(ValueError, match="R has shape"):
        functional.liger_fused_add_rms_norm(x, x[:2], None)
    with pytest.raises(ValueError, match="liger_fused_add_rms_norm: weight"):
        functional.liger_fused_add_rms_norm(x, x, torch.ones(7, device=DEVICE))
    with pytest.raises(ValueError, match="casting_mode"):
        functional.liger_fused_add_rms_norm(x, x, None, casting_mode="olmo")
