"""Modulated RMSNorm beyond its `Case`: which rows share a scale, where it rounds, dtypes, the
module, errors."""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.norm import gated_norm_launch
from liger_kernel.ops.norm.modulated_rms_norm import (
    liger_modulated_rms_norm,
    modulated_rms_norm_reference,
)
from liger_kernel.ops.norm.rms_norm import rms_norm_reference
from liger_kernel.transformers import LigerModulatedRMSNorm


def random_tensors(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(shape).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def broadcast(x, w, scale, shift):
    """Compute it by broadcasting in PyTorch: a sample's scale stands beside its tokens."""
    if x.dim() == 3 and scale.dim() == 2 and len(scale) == len(x):
        scale, shift = scale[:, None], shift[:, None]
    return rms_norm_reference(x, w) * (1 + scale.expand_as(x)) + shift.expand_as(x)


@pytest.mark.parametrize(
    "x, scale",
    [
        ((3, 5, 20), (20,)),
        ((3, 5, 20), (1, 20)),
        ((3, 5, 20), (3, 20)),
        ((3, 5, 20), (3, 1, 20)),
        ((3, 5, 20), (3, 5, 20)),
        ((5, 20), (5, 20)),
        ((20,), (20,)),
        ((9, 40, 4), (9, 1, 4)),  # more samples than programs, more tokens than a block
        ((1, 70, 300), (1, 300)),  # several programs share a sample
        ((1, 2, 8200), (1, 8200)),  # wider than a block
    ],
)
def test_rows_that_share_a_scale(x, scale):
    tensors = random_tensors(x, x[-1:], scale, scale)
    outs = liger_modulated_rms_norm(*tensors), broadcast(*tensors)
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(outs[0])
    for actual, expected in zip(
        *(torch.autograd.grad(out, tensors, dy) for out in outs), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("samples", [65535, 65536])
def test_a_sample_for_each_program_of_a_grids_second_axis(samples, monkeypatch):
    """CUDA has at most 65,535. Nothing runs: only the grid is looked at."""
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    for name in ("gated_norm_shared_fwd_kernel", "gated_norm_fwd_kernel"):
        monkeypatch.setattr(gated_norm_launch, name, Recorder())
    x = torch.zeros(samples * 16, 1, device=DEVICE)
    g = torch.zeros(samples, 1, device=DEVICE)
    gated_norm_launch.gated_norm_fwd(x, g, None, None, 1e-6, 0.0, None, False, 0, False, 1)
    assert len(grids) == 1 and grids[0][1] <= 65535


def test_rows_of_a_matrix_of_scales():
    """The rows of a scale of (M, H) follow each other; nothing is broadcast over samples."""
    x, scale = random_tensors((4, 6, 8), (12, 8))
    expected = liger_modulated_rms_norm(x.view(12, 2, 8), None, scale)
    assert torch.equal(liger_modulated_rms_norm(x, None, scale), expected.view(4, 6, 8))


@pytest.mark.parametrize(
    "casting, offset", [("llama", 0.0), ("gemma", 1.0), ("llama", None), ("gemma", None)]
)
def test_rounds_where_pytorch_does(casting, offset):
    """Sums of another order flip a rounding now and then; one rounding more or less would do it
    everywhere."""
    x, w, scale, shift = random_tensors((30, 400), (400,), (400,), (400,), dtype=torch.float16)
    args = x, None if offset is None else w, scale, shift, 1e-6, offset or 0.0, casting
    with torch.no_grad():
        actual = liger_modulated_rms_norm(*args)
        expected = modulated_rms_norm_reference(*args)
    assert (actual != expected).float().mean() < 0.02


def test_dtypes_may_differ():
    x, w, scale, shift = tensors = random_tensors((2, 3, 16), (16,), (2, 16), (2, 16))
    tensors = [
        t.detach().to(dtype).requires_grad_() for t, dtype in zip(tensors, DTYPES, strict=True)
    ]
    y = liger_modulated_rms_norm(*tensors)
    grads = torch.autograd.grad(y.float().square().sum(), tensors)
    assert y.dtype == torch.bfloat16 and [g.dtype for g in grads] == list(DTYPES)
    torch.testing.assert_close(y.float(), broadcast(x, w, scale, shift), rtol=0.03, atol=0.05)


DTYPES = torch.bfloat16, torch.float32, torch.float16, torch.bfloat16


def test_module():
    module = LigerModulatedRMSNorm(8).to(DEVICE)
    assert list(module.state_dict()) == ["weight"] and module.weight.eq(1).all()
    assert (module.variance_epsilon, module.offset, module.casting_mode, module.in_place) == (
        1e-6,
        0.0,
        "llama",
        True,
    )
    x, scale, shift = random_tensors((2, 3, 8), (2, 8), (2, 8))
    assert torch.equal(module(x, scale), liger_modulated_rms_norm(x, module.weight, scale))
    assert torch.equal(
        module(x, scale, shift), liger_modulated_rms_norm(x, module.weight, scale, shift)
    )
    assert LigerModulatedRMSNorm(8, elementwise_affine=False).weight is None


def test_errors():
    x, w, scale, shift = random_tensors((2, 3, 8), (8,), (2, 8), (2, 8))
    for args, error, message in (
        (
            (x, w, scale[:, :4]),
            ValueError,
            r"scale has shape \(2, 4\), X \(2, 3, 8\), give \(8,\) or \(G, 8\) where G",
        ),
        ((x, w, scale.view(4, 4)), ValueError, "scale has shape"),
        ((x, w, x.new_ones(4, 8)), ValueError, "scale has shape .* where G divides 6"),
        ((x, w, scale[:0]), ValueError, "scale has shape"),
        (
            (x, w, scale, shift[:1]),
            ValueError,
            r"shift has shape \(1, 8\), scale \(2, 8\), give equal ones",
        ),
        ((x, w[:4], scale), ValueError, r"weight has shape \(4,\), hidden size is 8"),
        ((x, w, None), TypeError, "scale is None, give a tensor"),
        ((x, w, scale.long()), TypeError, "scale is torch.int64"),
        ((x, w, scale, shift, -1.0), ValueError, "eps is -1.0"),
        (
            (x, w, scale, shift, 1e-6, 0.0, "round"),
            ValueError,
            "casting_mode is 'round', give one of none, llama",
        ),
    ):
        with pytest.raises(error, match=f"liger_modulated_rms_norm: {message}"):
            liger_modulated_rms_norm(*args)
