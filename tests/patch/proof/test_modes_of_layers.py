"""A mode of a user's sees the functions that layers call, as without the patch."""

import pytest
import tiny
import torch
from patched import assert_same_step, step
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import liger_kernel.transformers as liger

pytestmark = pytest.mark.usefixtures("reference_only")
FUNCTIONS = torch.nn.functional.silu, torch.rsqrt, torch.nn.functional.linear
OPERATIONS = torch.ops.aten.silu.default, torch.ops.aten.rsqrt.default, torch.ops.aten.neg.default


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 1.3 if function in FUNCTIONS else out


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 1.3 if function in OPERATIONS else out


@pytest.mark.parametrize("mode", [Functions, Operations])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_layers(family, mode):
    reference = tiny.model(family)
    patched_model = tiny.model(family)
    liger.apply_liger_kernel(patched_model)
    plain = step(reference)[0].loss
    with mode():
        output = step(patched_model)
        expected = step(reference)
    assert_same_step(output, expected)
    assert (expected[0].loss - plain).abs() > 1e-3
    assert_same_step(step(patched_model), step(reference))
