"""Gradients exactly at the kinks of a formula are those of the installed PyTorch.

PyTorch itself changes there: the gradient of `torch.clamp` with a number is 1 at the limit up to
2.13, and 0 from 2.14 on.
"""

import pytest
import torch
import torch.nn.functional as F
from cases import WITH_AND_WITHOUT_KERNELS
from hardware import DEVICE

from liger_kernel.ops.functional import (
    liger_activation_linear,
    liger_clamped_swiglu,
    liger_experts,
    liger_fused_ce_tvd,
    liger_relu_squared,
    liger_sparsemax,
    liger_tvd,
    liger_xielu,
)

pytestmark = WITH_AND_WITHOUT_KERNELS

IN_EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str
)
LIMITS = 7.0, 0.1, 3.3  # in 16 bits all but 7 are rounded, up or down
GPT_OSS = dict(alpha=1.702, shift=1.0)


def gradients(fn, tensors):
    tensors = [t.detach().requires_grad_() for t in tensors]
    out = fn(*tensors)
    return torch.autograd.grad(out, tensors, torch.ones_like(out))


def assert_same_gradients(fn, reference, *tensors, roundings=8):
    """Check that gradients are 0 where PyTorch's are, and elsewhere the same but for roundings.

    The roundings are far less than a jump at a kink.
    """
    for d, expected in zip(gradients(fn, tensors), gradients(reference, tensors), strict=True):
        assert torch.equal(d == 0, expected == 0), (
            f"0 at {(d == 0).tolist()}, PyTorch at {(expected == 0).tolist()}"
        )
        bound = roundings * torch.finfo(d.dtype).eps * expected.abs().max()
        assert ((d - expected).abs() <= bound).all(), f"{d.tolist()}, PyTorch {expected.tolist()}"


def around(*kinks, dtype):
    """Return each kink, and its neighbours in this dtype."""
    at = torch.tensor(kinks, device=DEVICE, dtype=dtype)
    neighbours = [
        torch.nextafter(at, torch.full_like(at, end)) for end in (-float("inf"), float("inf"))
    ]
    return torch.cat((at, *neighbours))


def clamped_swiglu(gate, up, limit):
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-limit, limit) + 1)


@pytest.mark.parametrize("limit", LIMITS)
@IN_EVERY_DTYPE
def test_clamped_swiglu(dtype, limit):
    gate, up = torch.meshgrid(
        around(limit, 0.5, dtype=dtype), around(limit, -limit, dtype=dtype), indexing="ij"
    )
    assert_same_gradients(
        lambda gate, up: liger_clamped_swiglu(gate, up, limit, **GPT_OSS),
        lambda gate, up: clamped_swiglu(gate, up, limit),
        gate,
        up,
    )


@pytest.mark.parametrize("limit", LIMITS)
@IN_EVERY_DTYPE
def test_experts_with_a_limit(dtype, limit):
    """The first projection is the unit matrix, so that a gate and its partner are at the limits."""
    pre = torch.cat((around(limit, 0.5, dtype=dtype), around(-limit, limit, dtype=dtype)))
    N = len(pre)
    gate_up = torch.eye(N, device=DEVICE, dtype=dtype)[None]
    down = torch.ones(1, N, N // 2, device=DEVICE, dtype=dtype)
    index = torch.zeros(1, 1, device=DEVICE, dtype=torch.int64)
    weights = torch.ones(1, 1, device=DEVICE, dtype=dtype)
    assert_same_gradients(
        lambda x: liger_experts(x, gate_up, down, index, weights, limit=limit, **GPT_OSS),
        lambda x: F.linear(clamped_swiglu(*F.linear(x, gate_up[0]).chunk(2, -1), limit), down[0]),
        pre[None],
    )


@IN_EVERY_DTYPE
def test_relu_squared(dtype):
    x = torch.cat(
        (around(0.0, -0.0, dtype=dtype), torch.tensor([-1.0, 1.0], device=DEVICE, dtype=dtype))
    )
    assert_same_gradients(liger_relu_squared, lambda x: F.relu(x).square(), x)


@pytest.mark.parametrize("act", ["relu", "relu_squared"])
@IN_EVERY_DTYPE
def test_activation_linear(dtype, act):
    x = torch.cat(
        (around(0.0, -0.0, dtype=dtype), torch.tensor([-1.0, 1.0], device=DEVICE, dtype=dtype))
    )[None]
    weight = torch.ones(3, x.shape[1], device=DEVICE, dtype=dtype)
    power = 2 if act == "relu_squared" else 1
    assert_same_gradients(
        lambda x: liger_activation_linear(x, weight, act=act),
        lambda x: F.linear(F.relu(x) ** power, weight),
        x,
    )


@pytest.mark.parametrize("eps", [-1e-6, -0.25])
def test_xielu(eps):
    """Kinks at 0, and at eps, where `torch.min` gives two equal arguments half of the gradient."""
    alpha_p = torch.tensor([0.3], device=DEVICE)
    alpha_n = torch.tensor([0.7], device=DEVICE)

    def reference(x, alpha_p, alpha_n):
        above = F.softplus(alpha_p) * x * x
        below = torch.expm1(torch.min(x, torch.tensor(eps, device=x.device))) - x
        return torch.where(x > 0, above, (0.5 + F.softplus(alpha_n)) * below) + 0.5 * x

    x = around(0.0, eps, dtype=torch.float32)
    assert_same_gradients(
        lambda x, p, n: liger_xielu(x, p, n, beta=0.5, eps=eps), reference, x, alpha_p, alpha_n
    )


def test_sparsemax():
    """Ties of the largest entries, at the edge of the support, and of all entries."""
    x = torch.tensor(
        [[1.0, 1.0, 0.5, -3.0], [1.0, 0.0, -1.0, 0.0], [2.0, 2.0, 2.0, 2.0]], device=DEVICE
    )
    steps = torch.arange(1.0, 5.0, device=DEVICE)

    def reference(x):
        """Compute sparsemax by sorting the entries (arXiv:1602.02068, algorithm 1)."""
        ranked = x.sort(-1, descending=True).values
        count = torch.arange(1, 5, device=DEVICE)
        size = (1 + count * ranked > ranked.cumsum(-1)).sum(-1, keepdim=True)
        return F.relu(x - (ranked.cumsum(-1).gather(-1, size - 1) - 1) / size) * steps

    assert_same_gradients(lambda x: liger_sparsemax(x) * steps, reference, x)


def test_tvd():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.25, 0.5, 0.25]], device=DEVICE)
    q = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], device=DEVICE)
    assert_same_gradients(
        lambda p: liger_tvd(p, q, reduction="sum"), lambda p: 0.5 * (p - q).abs().sum(), p
    )


def test_ce_tvd():
    """Ties of all classes: the teacher is the student."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 0.0, 0.0]], device=DEVICE)
    target = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    z = x.softmax(-1)
    assert_same_gradients(
        lambda logits: liger_fused_ce_tvd(logits, x, target)[1],
        lambda logits: 0.5 * (logits.softmax(-1) - z).abs().sum(-1),
        x,
    )
