"""Every causal-LM family again on a GPU, with the kernels that test_zoo.py leaves to their
references."""

import pytest
import zoo
from hardware import DEVICE

if DEVICE == "cpu":
    pytest.skip("no GPU: test_zoo.py has these models with the references", allow_module_level=True)


def build(name):
    return zoo.build(name).to(DEVICE)


def batch(model):
    return {name: tensor.to(DEVICE) for name, tensor in zoo.batch(model).items()}


@zoo.each_family(zoo.FAMILIES)
def test_trains_as_before(name):
    assert not zoo.try_family(name, build, batch).differs
