"""A kernel and a launch of it in a process of its own, as if on a GPU."""

import textwrap

import pytest
from programs import run_command

PROGRAM = """
    import torch
    import triton
    import portability
    from liger_kernel.core.kernel import kernel
    from liger_kernel.core.tile import tl

    launches = portability.pretend("sm_90")

    @kernel
    def copy(x_ptr, w_ptr, y_ptr, N, scale, ROUND: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < N) * scale, mask=i < N)

    bound = []
    plain = triton.runtime.jit.JITFunction.run

    def run(self, *args, **kwargs):
        bound.append(args)
        return plain(self, *args, **kwargs)

    triton.runtime.jit.JITFunction.run = run
    x, y = torch.zeros(64), torch.zeros(64)
    assert x.data_ptr() % 16 == 0

    def launch(x, w, y, N, scale=1.0, ROUND=False, BLOCK=64, warps=4, grid=(3,)):
        before = len(bound)
        copy[grid](x, w, y, N, scale, ROUND=ROUND, BLOCK=BLOCK, num_warps=warps)
        return "bound" if len(bound) > before else "found"
"""


@pytest.fixture
def run(tmp_path):
    """Runs a program's body, in a file because Triton wants to read its source."""

    def call(body):
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(PROGRAM) + textwrap.dedent(body))
        run_command(["-W", "ignore", file], CUDA_VISIBLE_DEVICES="")

    return call
