"""A framework may replace functions of `torch.nn.functional` by operators of liger_kernel.

No reference may then call itself.
"""

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
def dtype_of_replaced(request, monkeypatch):
    """Replace all of them at once, and return the dtype to test with."""
    if request.param == "no kernels" and DEVICE == "cpu":
        request.getfixturevalue("reference_only")
    dtype = torch.float64 if request.param == "no kernels" and DEVICE != "cpu" else torch.float32
    for name, fn in REPLACED.items():
        monkeypatch.setattr(F, name, fn)
    return dtype


def outputs_and_gradients(fn, tensors):
    outputs = fn(**tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    ys = [y for y in outputs if y is not None and y.requires_grad]
    leaves = [t for t in tensors.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    return [y.detach() for y in ys], torch.autograd.grad(sum(y.sum() for y in ys), leaves)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_operator(case, dtype_of_replaced):
    torch.manual_seed(0)
    inputs = case.inputs(*case.shapes[1])
    for option in case.options:
        results = []
        for fn in (case.fn, case.reference):
            arguments = inputs | option
            for name, x in arguments.items():
                if isinstance(x, torch.Tensor):
                    dtype = dtype_of_replaced if x.is_floating_point() else None
                    copy = x.detach().to(DEVICE, dtype).clone()
                    arguments[name] = copy.requires_grad_(x.requires_grad)
            results.append(outputs_and_gradients(fn, arguments))
        for a, b in zip(*results, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_the_functions_themselves(dtype_of_replaced):
    """Who calls torch's functions gets the same numbers."""
    x = torch.randn(3, 8, device=DEVICE, dtype=dtype_of_replaced)
    w = torch.randn(8, device=DEVICE, dtype=dtype_of_replaced)
    y = torch.tensor([1, 0, 7], device=DEVICE)
    torch.testing.assert_close(F.cross_entropy(x, y), -x.log_softmax(-1)[range(3), y].mean())
    torch.testing.assert_close(F.layer_norm(x, (8,), w), torch.layer_norm(x, (8,), w))
    torch.testing.assert_close(F.softmax(x, -1), torch.softmax(x, -1))
    torch.testing.assert_close(F.silu(x), x * x.sigmoid())
    torch.testing.assert_close(
        torch.nn.LayerNorm(8, device=DEVICE, dtype=dtype_of_replaced)(x), torch.layer_norm(x, (8,))
    )
