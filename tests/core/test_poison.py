"""Memory that nobody wrote is NaN where a test asks for it, and nothing of that stays."""

import pytest
import torch
from cases import PoisonedEmpty
from programs import run_program

ALLOCATE = {
    "empty": lambda dtype: torch.empty(3, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.ones(3, dtype=dtype)),
    "new_empty": lambda dtype: torch.ones(1, dtype=dtype).new_empty(3),
    "empty_strided": lambda dtype: torch.empty_strided((3,), (2,), dtype=dtype),
    "new_empty_strided": lambda dtype: torch.ones(1, dtype=dtype).new_empty_strided((3,), (2,)),
    "that learns": lambda dtype: torch.empty(3, dtype=dtype, requires_grad=dtype.is_floating_point),
}


@pytest.mark.parametrize("way", ALLOCATE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_every_allocation_is_poisoned(way, dtype):
    with PoisonedEmpty():
        x = ALLOCATE[way](dtype)
    assert x.isnan().all() if dtype.is_floating_point else (x == -7).all()


def test_nothing_stays():
    """PyTorch looks up what `torch.empty` is at the first `torch.device(...)`, and then never
    again."""
    run_program("""
import torch
from cases import PoisonedEmpty

empty = torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty
with PoisonedEmpty(), torch.device("cpu"):
    assert torch.empty(2).isnan().all()
assert empty == (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
with torch.device("meta"):
    tensors = torch.empty(2), torch.empty_strided((2,), (1,)), torch.zeros(2)
    tensors += (torch.nn.Linear(2, 2).weight,)
assert {x.device.type for x in tensors} == {"meta"}, [x.device for x in tensors]
""")
