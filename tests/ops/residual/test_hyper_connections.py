"""Hyper-connections beyond their `Case`s: Sinkhorn, numbers of streams, dtypes, the whole layer."""

import numpy
import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.residual import hyper_connections
from liger_kernel.ops.residual.hyper_connections import (
    LigerMHC,
    liger_mhc_apply,
    liger_mhc_coeffs,
    liger_mhc_forward,
    liger_mhc_post_res,
    liger_mhc_pre,
    mhc_coeffs_reference,
)

ALPHAS = "alpha_pre", "alpha_post", "alpha_res"


def make_inputs(M=3, n=4, C=10, x=torch.float32, phi=torch.float32):
    torch.manual_seed(0)
    tensors = dict(
        x=torch.randn(M, n, C).to(x), phi=torch.randn(n * C, n * n + 2 * n).to(phi) / (n * C) ** 0.5
    )
    tensors |= dict(
        b=torch.randn(n * n + 2 * n), **{alpha: torch.rand(()) + 0.5 for alpha in ALPHAS}
    )
    return {name: t.to(DEVICE).requires_grad_() for name, t in tensors.items()}


def output_and_gradients(fn, tensors, **options):
    outs = fn(**tensors, **options)
    generator = torch.Generator().manual_seed(1)
    douts = [torch.randn(out.shape, generator=generator).to(DEVICE, out.dtype) for out in outs]
    return *outs, *torch.autograd.grad(outs, list(tensors.values()), douts)


def assert_as_reference(tensors, bound=1e-4, **options):
    actual = output_and_gradients(liger_mhc_coeffs, tensors, allow_fp32=True, **options)
    for a, b in zip(
        actual, output_and_gradients(mhc_coeffs_reference, tensors, **options), strict=True
    ):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


def test_sinkhorn_ends_with_the_columns():
    """tmax counts them. The rows of h_res are output streams; one by one they add up to 1 only
    nearly."""
    tensors = {name: t.detach() for name, t in make_inputs(n=3).items()}
    n, eps = 3, 1e-3
    z = 3 * tensors["b"][2 * n :].view(n, n)
    inputs = tensors | dict(phi=torch.zeros_like(tensors["phi"]), b=3 * tensors["b"])
    for tmax in (1, 2, 5):
        y = z.double().softmax(1) + eps
        for step in range(tmax):
            y = y / (y.sum(1, keepdim=True) + eps) if step else y
            y = y / (y.sum(0, keepdim=True) + eps)
        h_pre, h_post, h_res = liger_mhc_coeffs(
            **inputs, allow_fp32=True, tmax=tmax, sinkhorn_eps=eps
        )
        torch.testing.assert_close(h_res, y.float().expand_as(h_res), rtol=1e-5, atol=1e-6)
    off = [(h_res.sum(axis) - 1).abs().max().item() for axis in (1, 2)]
    assert off[0] < 2 * eps < off[1]
    pre, post = inputs["b"][: 2 * n].chunk(2)
    torch.testing.assert_close(h_pre, pre.sigmoid().expand_as(h_pre))
    torch.testing.assert_close(h_post, 2 * post.sigmoid().expand_as(h_post))


@pytest.mark.parametrize("n", [1, 2, pytest.param(17, marks=pytest.mark.thorough)])
def test_any_number_of_streams(n):
    assert_as_reference(make_inputs(M=2, n=n, C=6), tmax=3)


def test_without_sinkhorns_eps():
    """No padded entry is divided by 0."""
    assert_as_reference(make_inputs(n=3), sinkhorn_eps=0.0)


def test_many_rows():
    """Several programs share the gradient of phi."""
    assert_as_reference(make_inputs(M=530, n=1, C=3), 1e-3, tmax=1)


def test_more_streams_than_registers_hold(monkeypatch):
    monkeypatch.setattr(hyper_connections, "MAX_STREAMS", 2)
    monkeypatch.setattr(hyper_connections.LigerMHCCoeffsFunction, "apply", None)
    assert_as_reference(make_inputs())


def test_each_dtype_of_its_own():
    tensors = make_inputs(x=torch.bfloat16, phi=torch.float16)
    *outs, dx, dphi, db, da, _, _ = output_and_gradients(liger_mhc_coeffs, tensors)
    assert all(out.dtype == torch.float32 for out in outs)
    assert [d.dtype for d in (dx, dphi, db, da)] == [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float32,
    ]
    assert_as_reference(tensors, 1e-2)


def test_outputs_that_are_not_used():
    """Their gradients are zero."""
    tensors = make_inputs()
    actual, expected = (
        torch.autograd.grad(
            fn(**tensors)[1].square().sum(), list(tensors.values()), materialize_grads=True
        )
        for fn in (lambda **t: liger_mhc_coeffs(**t, allow_fp32=True), mhc_coeffs_reference)
    )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_streams_in_and_out():
    """h_res[o, i] brings stream i into stream o; leading dimensions are any."""
    x, f = torch.randn(2, 3, 2, 5, device=DEVICE), torch.randn(2, 3, 5, device=DEVICE)
    h_pre, h_post = torch.tensor([1.0, 2.0], device=DEVICE), torch.tensor([0.0, 3.0], device=DEVICE)
    h_res = torch.tensor([[0.0, 1.0], [0.0, 0.0]], device=DEVICE)
    h_pre, h_post, h_res = h_pre.expand(2, 3, 2), h_post.expand(2, 3, 2), h_res.expand(2, 3, 2, 2)
    x_out, x_in = liger_mhc_apply(x, f, h_pre, h_post, h_res, return_x_in=True)
    torch.testing.assert_close(x_in, x[..., 0, :] + 2 * x[..., 1, :])
    torch.testing.assert_close(x_out, torch.stack((x[..., 1, :], 3 * f), -2))
    assert torch.equal(liger_mhc_apply(x, f, h_pre, h_post, h_res), x_out)


def test_module():
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 6).to(DEVICE)
    module = LigerMHC(layer, hc=2, c=6, tmax=3)
    assert {k: (tuple(p.shape), p.dtype) for k, p in module.named_parameters(recurse=False)} == {
        "phi": ((12, 8), torch.float16),
        "b": ((8,), torch.float32),
        **{a: ((), torch.float32) for a in ALPHAS},
    }
    assert module.phi.device == layer.weight.device and not module.b.any()
    x = torch.randn(3, 2, 6, device=DEVICE).bfloat16().requires_grad_()
    parameters = [getattr(module, name) for name in ("phi", "b", *ALPHAS)]
    x_out, (h_pre, h_post, h_res) = liger_mhc_forward(
        x, layer, *parameters, tmax=3, return_coeffs=True
    )
    expected = liger_mhc_post_res(x, layer(liger_mhc_pre(x, h_pre).float()), h_post, h_res)
    assert (
        torch.equal(x_out, expected)
        and torch.equal(module(x), expected)
        and expected.dtype == torch.bfloat16
    )
    module(x).float().square().sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (x, *module.parameters()))


def test_errors():
    tensors = make_inputs()
    name = "liger_mhc_coeffs"
    for changed, error, words in (
        (
            dict(allow_fp32=False),
            AssertionError,
            "x is torch.float32, give bf16 or fp16, or allow_fp32=True",
        ),
        (dict(phi=tensors["phi"][:3]), AssertionError, r"phi has shape \(3, 24\), give \(40, 24\)"),
        (dict(b=tensors["b"][:3]), AssertionError, r"b has shape \(3,\), give \(24,\)"),
        (
            dict(alpha_post=tensors["b"]),
            ValueError,
            r"alpha_post has shape \(24,\), give a tensor of one element",
        ),
        (dict(alpha_post=1.0), TypeError, "alpha_post is a float"),
        (dict(x=tensors["x"][0, 0]), ValueError, r"x has shape \(10,\), give \(..., n, C\)"),
        (dict(tmax=0), ValueError, "tmax is 0, give an int from 1 on"),
        (dict(sinkhorn_eps=-1.0), ValueError, "sinkhorn_eps is -1.0"),
        (dict(post_mult="2"), TypeError, "post_mult is '2'"),
    ):
        with pytest.raises(error, match=f"^{name}: {words}"):
            liger_mhc_coeffs(**tensors | dict(allow_fp32=True) | changed)
    x, h = torch.randn(3, 2, 6), torch.randn(3, 2)
    with pytest.raises(
        ValueError, match=r"^liger_mhc_pre: h_pre has shape \(3, 1\), give \(3, 2\)"
    ):
        liger_mhc_pre(x, h[:, :1])
    with pytest.raises(
        ValueError, match=r"^liger_mhc_post_res: h_res has shape \(3, 2\), give \(3, 2, 2\)"
    ):
        liger_mhc_post_res(x, x[:, 0], h, h)
    module = LigerMHC(torch.nn.Identity(), hc=2, c=6)
    with pytest.raises(ValueError, match=r"^LigerMHC: x has shape \(3, 6, 2\), give \(..., 2, 6\)"):
        module(x.mT)
    with pytest.warns(UserWarning, match="LigerMHC: hc is 17"):
        LigerMHC(torch.nn.Identity(), hc=17, c=1)


def test_without_an_eps():
    """Padding has no influence, though its root mean square is 0."""
    tensors, options = make_inputs(M=3, n=4, C=8), dict(allow_fp32=True, tmax=2, rms_eps=0.0)
    for actual, expected in zip(
        *(
            output_and_gradients(fn, tensors, **options)
            for fn in (liger_mhc_coeffs, mhc_coeffs_reference)
        ),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_numbers_of_numpy():
    tensors = make_inputs()
    actual = liger_mhc_coeffs(
        **tensors, allow_fp32=True, tmax=numpy.int64(2), rms_eps=numpy.float32(1e-6)
    )
    expected = liger_mhc_coeffs(
        **tensors, allow_fp32=True, tmax=2, rms_eps=float(numpy.float32(1e-6))
    )
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
