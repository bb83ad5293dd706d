"""A framework may put our operators in the place of `torch.nn.functional`'s: no reference calls
itself."""

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel.core.op import CASES
from liger_kernel.ops import functional

REPLACED = {
    "cross_entropy": functional.liger_cross_entropy,
    "layer_norm": lambda x, shape, weight=None, bias=None, eps=1e-5: functional.liger_layer_norm(
        x, weight, bias, eps
    ),
    "rms_norm": lambda x, shape, weight=None, eps=1e-6: functional.liger_rms_norm(x, weight, eps),
    "group_norm": lambda x, groups, weight, bias, eps=1e-5: functional.liger_group_norm(
        x, weight, bias, x.shape[1], groups, eps
    ),
    "softmax": lambda x, dim=-1: functional.liger_softmax(x),
    "silu": lambda x: functional.liger_swiglu(x, torch.ones_like(x)),
    "gelu": lambda x, approximate="none": functional.liger_geglu(
        x, torch.ones_like(x), approximate
    ),
    "linear": lambda x, weight, bias=None: (_ for _ in ()).throw(AssertionError("called")),
}


@pytest.fixture(params=["kernels", "no kernels"])
def replaced(request, monkeypatch):
    """By all of them at once."""
    if request.param == "no kernels" and DEVICE == "cpu":
        request.getfixturevalue("reference_only")
    dtype = torch.float64 if request.param == "no kernels" and DEVICE != "cpu" else torch.float32
    for name, fn in REPLACED.items():
        monkeypatch.setattr(F, name, fn)
    return dtype


def outcome(fn, tensors):
    out = fn(**tensors)
    ys = [
        y for y in (out if isinstance(out, tuple) else (out,)) if y is not None and y.requires_grad
    ]
    leaves = [t for t in tensors.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    return [y.detach() for y in ys], torch.autograd.grad(sum(y.sum() for y in ys), leaves)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_operator(case, replaced):
    torch.manual_seed(0)
    made = case.inputs(*case.shapes[1])
    tensors = {k: t for k, t in made.items() if isinstance(t, torch.Tensor)}
    others, grad = made.keys() - tensors.keys(), {k: t.requires_grad for k, t in tensors.items()}
    tensors = {
        k: t.detach().to(DEVICE, replaced if t.is_floating_point() else None)
        for k, t in tensors.items()
    }
    for option in case.options:
        given = {k: t.clone().requires_grad_(grad[k]) for k, t in tensors.items()} | {
            k: made[k] for k in others
        }
        given |= option
        for a, b in zip(outcome(case.fn, given), outcome(case.reference, given), strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_the_functions_themselves(replaced):
    """A caller of theirs, who gets ours, gets the same numbers."""
    x, w = (torch.randn(n, device=DEVICE, dtype=replaced) for n in ((3, 8), (8,)))
    y = torch.tensor([1, 0, 7], device=DEVICE)
    torch.testing.assert_close(F.cross_entropy(x, y), -x.log_softmax(-1)[range(3), y].mean())
    torch.testing.assert_close(F.layer_norm(x, (8,), w), torch.layer_norm(x, (8,), w))
    torch.testing.assert_close(F.softmax(x, -1), torch.softmax(x, -1))
    torch.testing.assert_close(F.silu(x), x * x.sigmoid())
    torch.testing.assert_close(
        torch.nn.LayerNorm(8, device=DEVICE, dtype=replaced)(x), torch.layer_norm(x, (8,))
    )
