"""xIELU beyond its `Case`: Hugging Face's, near zero and far from it, the module, errors."""

import pytest
import torch
from hardware import DEVICE
from transformers.activations import XIELUActivation

from liger_kernel.ops import LigerXIELUFunction
from liger_kernel.ops.mlp.xielu import liger_xielu, xielu_reference
from liger_kernel.transformers import LigerXIELU


def raw(*values):
    return [torch.tensor([v], device=DEVICE, requires_grad=True) for v in values]


def test_equals_hugging_face():
    torch.manual_seed(0)
    reference = XIELUActivation(dtype=torch.float32).to(DEVICE)
    x = 3 * torch.randn(40, 33, device=DEVICE)
    module = LigerXIELU().to(DEVICE)
    module.load_state_dict(
        {name: t for name, t in reference.state_dict().items() if name.startswith("alpha")}
    )
    assert repr(module) == "LigerXIELU(beta=0.5, eps=-1e-06)"
    for fresh in (module, LigerXIELU().to(DEVICE)):
        x.requires_grad_()
        grads, expected_grads = (
            torch.autograd.grad(act(x).square().sum(), [x, *act.parameters()])
            for act in (fresh, reference)
        )
        torch.testing.assert_close(fresh(x), reference._xielu_python(x), rtol=3e-6, atol=3e-6)
        for a, b in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hard_values(dtype):
    """Around zero, eps and where the series ends; large ones, at which the exponential is 0."""
    eps = -0.25
    x = torch.tensor(
        [
            0.0,
            -0.0,
            1e-6,
            -1e-6,
            -1e-3,
            -0.1,
            eps,
            -0.26,
            -0.4999,
            -0.5,
            -0.5001,
            -3.0,
            -60.0,
            100.0,
        ]
    )
    x = x.to(DEVICE, dtype).requires_grad_()
    for p, n in ((0.3, -1.0), (-30.0, 25.0), (-6.0, -6.0)):
        alphas = raw(p, n)
        y = liger_xielu(x, *alphas, 0.5, eps)
        grads = torch.autograd.grad(y.float().sum(), [x, *alphas])
        exact = [t.detach().double().requires_grad_() for t in (x, *alphas)]
        expected = xielu_reference(*exact, 0.5, eps)
        expected_grads = torch.autograd.grad(expected.sum(), exact)
        eps_of = torch.finfo(dtype).eps
        terms = expected.abs() + (0.5 * x.double()).abs()  # of which the two in fp32 may cancel
        least = eps_of * torch.finfo(dtype).tiny  # between two of the smallest numbers
        assert (
            (y.double() - expected).abs() <= eps_of * expected.abs() + 8 * 2**-24 * terms + least
        ).all()
        for a, b in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=max(eps_of, 1e-6), atol=1e-6)


def test_numbers_in_memory():
    """They are read when the kernels run, and nothing may be written to them until backward."""
    x = torch.randn(40, device=DEVICE, requires_grad=True)
    beta = torch.tensor(0.25, device=DEVICE)
    eps = torch.tensor([-0.125], dtype=torch.float64, device=DEVICE)
    for number in (0.25, -2.0):
        beta.fill_(number)
        grads, expected_grads = (
            torch.autograd.grad(
                liger_xielu(x, *(alphas := raw(0.3, -1.0)), *constants).square().sum(), [x, *alphas]
            )
            for constants in ((beta, eps), (number, -0.125))
        )
        assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True))
    y = liger_xielu(x, *raw(0.3, -1.0), beta, eps)
    beta.fill_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nan_stays_nan():
    x = torch.tensor([float("nan"), 1.0], device=DEVICE)
    y = liger_xielu(x, *raw(0.0, 0.0))
    assert y[0].isnan() and not y[1].isnan()


def test_only_some_gradients():
    torch.manual_seed(0)
    x = torch.randn(7, 5, device=DEVICE)
    dy = torch.randn(5, 7, device=DEVICE).t()
    for needed in range(1, 8):
        tensors = [x, *raw(0.1, 0.2)]
        tensors = [t.detach().requires_grad_(bool(needed >> i & 1)) for i, t in enumerate(tensors)]
        leaves = [t for t in tensors if t.requires_grad]
        grads, expected_grads = (
            torch.autograd.grad(fn(*tensors), leaves, dy) for fn in (liger_xielu, xielu_reference)
        )
        for a, b in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(a, b)


def test_errors():
    x = torch.randn(4, device=DEVICE)
    p, n = raw(0.0, 0.0)
    for args, kind, message in (
        ((x.int(), p, n), TypeError, "liger_xielu: x is torch.int32"),
        ((x, p.expand(2), n), ValueError, r"liger_xielu: alpha_p has shape \(2,\)"),
        ((x, p, n, float("nan")), ValueError, "liger_xielu: beta is nan"),
        ((x, p, n, 0.5, 0.0), ValueError, "liger_xielu: eps is 0.0, give a number below zero"),
        ((x, p, n, 0.5, "1"), TypeError, "liger_xielu: eps is '1'"),
        ((x, p, n, p), TypeError, "liger_xielu: beta requires a gradient, which it does not get"),
        (
            (x, p, n, 0.5, torch.ones(2, device=DEVICE)),
            ValueError,
            r"liger_xielu: eps has shape \(2,\)",
        ),
        (
            (x, p, n, torch.tensor(0.5, device="meta")),
            ValueError,
            "liger_xielu: x is on .*, beta on meta",
        ),
    ):
        with pytest.raises(kind, match=message):
            liger_xielu(*args)
    with pytest.raises(ValueError, match=r"LigerXIELUFunction: alpha_n has shape \(2,\)"):
        LigerXIELUFunction.apply(x, p, n.expand(2))
    with pytest.raises(TypeError, match="LigerXIELUFunction: beta requires a gradient"):
        LigerXIELUFunction.apply(x, p, n, p)
    with pytest.raises(ValueError, match="LigerXIELU: alpha_n_init - beta is"):
        LigerXIELU(alpha_n_init=0.25)
