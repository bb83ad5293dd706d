"""The interpreter with the shortcuts of these tests, beside Triton's own."""

import pytest
import torch
from cases import given, run
from hardware import DEVICE
from programs import ran

from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES
from liger_kernel.core.tile import tl

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU interprets nothing")

OWN = """
import interpreter
interpreter.shorten = lambda: None
import sys, torch, test_interpreter
torch.save(test_interpreter.results(), sys.argv[1])
"""


def results():
    """Of every operator in fp32 and bf16, of these by turns without options and with the last of
    them."""
    found = {}
    for i, case in enumerate(CASES):
        for j, dtype in enumerate((torch.float32, torch.bfloat16)):
            option = {} if (i + j) % 2 or not case.options else case.options[-1]
            found[case.name, dtype] = run(case.fn, given(case, case.shapes[0], option, dtype))[0]
    return found


@pytest.mark.thorough
def test_the_bits_are_tritons_own(tmp_path):
    file = tmp_path / "results"
    ran(["-W", "ignore", "-c", OWN, file], TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    mine, own = results(), torch.load(file)
    assert mine.keys() == own.keys()
    for key, found in mine.items():
        for name, t in found.items():
            assert torch.equal(t.nan_to_num(), own[key][name].nan_to_num()), (key, name)


@kernel
def _compute(x_ptr, y_ptr, number, N, WHICH: tl.constexpr):
    i = tl.arange(0, 4)
    x, y = (tl.load(p + i, mask=i < N, other=0) for p in (x_ptr, y_ptr))
    if WHICH == "+":
        x = x + y
    elif WHICH == "-":
        x = x - y
    else:
        x = x * number
    tl.store(x_ptr + i, x, mask=i < N)


@pytest.mark.parametrize("which,x,y", [("+", 2**31 - 1, 1), ("-", -(2**31), 1), ("*", 2**30, 2)])
def test_an_integer_that_overflows_is_found(which, x, y):
    x, y = (torch.tensor([0, n, 0], dtype=torch.int32) for n in (x, y))
    with pytest.raises(Exception, match="int32 overflow"):
        _compute[(1,)](x, y, 2, 3, WHICH=which)
    wide = x.long()
    _compute[(1,)](wide, y, 2, 3, WHICH=which)
    assert abs(wide[1]) >= 2**31 - 1
