"""The casting mode "none" of the norms in 16 bits: fp32 inside, with kernels and without."""

import pytest
import torch
from cases import WITH_AND_WITHOUT_KERNELS, cast
from hardware import DEVICE

from liger_kernel.ops.functional import (
    liger_fused_add_rms_norm,
    liger_modulated_rms_norm,
    liger_norm_rope,
    liger_rms_norm,
)

EPS = 1e-6


def rms_norm(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w


def norm_rope(x, w):
    """One head, of which one half is turned by the angles of `angles`."""
    y = rms_norm(x, w)
    half = y.shape[-1] // 2
    cos, sin = (t.to(x.dtype) for t in angles(x))
    return y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin


def angles(x):
    angle = (
        torch.arange(x.shape[-1] // 2, device=x.device)
        * torch.arange(len(x), device=x.device)[:, None]
    )
    return angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)


def liger_rope_heads(x, w):
    cos, sin = angles(x)
    q = x[None, None]
    return liger_norm_rope(q, q, w, w, cos[None], sin[None], EPS, casting_mode="none")[0][0, 0]


NORMS = {
    "rms_norm": (lambda x, w: liger_rms_norm(x, w, EPS, 0.0, "none"), rms_norm),
    "fused_add_rms_norm": (
        lambda x, w: liger_fused_add_rms_norm(x, x * 0, w, EPS, 0.0, "none")[0],
        rms_norm,
    ),
    "modulated_rms_norm": (
        lambda x, w: liger_modulated_rms_norm(x, w, w * 0, None, EPS, 0.0, "none"),
        rms_norm,
    ),
    "norm_rope": (liger_rope_heads, norm_rope),
}


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1000.0, 200.0, 1.0, 1e-3])
@pytest.mark.parametrize("name", NORMS)
def test_none(name, size, dtype):
    """The square of 256 is infinite in fp16, and 1 / sqrt(mean(x²)) of a small row is not far from
    that."""
    fn, reference = NORMS[name]
    torch.manual_seed(0)
    tensors = cast(dict(x=torch.randn(4, 64) * size, w=torch.rand(64) + 0.5), dtype)
    tensors["dy"] = torch.randn(4, 64).to(DEVICE, dtype)
    results = []
    for norm, values in ((fn, tensors), (reference, cast(tensors, torch.float64))):
        x = values["x"].requires_grad_()
        w = values["w"].requires_grad_()
        y = norm(x, w)
        # dx is as large as 1/size: it is kept within fp16 by a dy that is as large as x
        results.append((y.detach(), *torch.autograd.grad(y, (x, w), values["dy"] * min(size, 1.0))))
    for result, exact in zip(*results, strict=True):
        bound = 2 * torch.finfo(dtype).eps * exact.abs().max()
        assert (result.double() - exact).abs().max() <= bound
