"""The interpreter with the shortcuts of these tests, beside Triton's own."""

import pytest
import torch
from cases import make_inputs, run
from hardware import DEVICE
from programs import run_command

from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES
from liger_kernel.core.tile import tl

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU interprets nothing")

PROGRAM = """
import interpreter
interpreter.speed_up = lambda: None
import sys, torch, test_interpreter
torch.save(test_interpreter.results(), sys.argv[1])
"""


def results():
    """Run every operator in fp32 and bf16, by turns without options and with the last of them."""
    outputs = {}
    for i, case in enumerate(CASES):
        for j, dtype in enumerate((torch.float32, torch.bfloat16)):
            option = {} if (i + j) % 2 or not case.options else case.options[-1]
            outputs[case.name, dtype] = run(
                case.fn, make_inputs(case, case.shapes[0], option, dtype)
            )[0]
    return outputs


@pytest.mark.thorough
def test_the_bits_are_tritons_own(tmp_path):
    file = tmp_path / "results"
    run_command(["-W", "ignore", "-c", PROGRAM, file], TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    outputs, expected = results(), torch.load(file)
    assert outputs.keys() == expected.keys()
    for key, tensors in outputs.items():
        for name, t in tensors.items():
            assert torch.equal(t.nan_to_num(), expected[key][name].nan_to_num()), (key, name)


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
