"""Launches: found by what their arguments are to Triton, and otherwise bound by Triton itself."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from liger_kernel.core.devices import AMD

HERE = Path(__file__).parent
PROGRAM = """
    import sys
    sys.path.insert(0, {here!r})
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
    """Runs a program's body in a process of its own: Triton interprets or compiles, once for all."""
    return lambda body: in_a_process(textwrap.dedent(PROGRAM).format(here=str(HERE)) + textwrap.dedent(body), tmp_path)


def in_a_process(program, folder):
    file = folder / "program.py"  # Triton wants to read its source
    file.write_text(program)
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent / "src"), os.environ.get("PYTHONPATH"))))
    env["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-W", "ignore", file], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


pytestmark = pytest.mark.skipif(AMD, reason="kernels are Triton's own there")


def test_found_where_triton_would_find_the_same_kernel(run):
    """As many compiled kernels as launches that were bound, and Triton itself would have compiled no fewer."""
    run("""
        calls = [
            dict(x=x, w=None, y=y, N=64), dict(x=x, w=None, y=y, N=32), dict(x=x, w=None, y=y, N=64, scale=2.0),
            dict(x=x, w=None, y=y, N=63), dict(x=x, w=None, y=y, N=1), dict(x=x, w=None, y=y, N=2**31 + 16),
            dict(x=x, w=x, y=y, N=64), dict(x=x.half(), w=None, y=y, N=64), dict(x=x[1:], w=None, y=y, N=64),
            dict(x=x, w=None, y=y, N=64, ROUND=True), dict(x=x, w=None, y=y, N=64, BLOCK=32),
            dict(x=x, w=None, y=y, N=64, warps=8), dict(x=torch.nn.Parameter(x), w=None, y=y, N=64),
        ]
        first = [launch(**call) for call in calls]
        assert first == ["bound", "found", "found"] + ["bound"] * 9 + ["found"], first
        assert [launch(**call) for call in calls] == ["found"] * len(calls)
        assert len(launches) == first.count("bound"), (len(launches), first)
    """)


def test_every_launch_arrives(run):
    """With its grid and its arguments in the kernel's order, found or bound."""
    run("""
        arrived = []
        portability._Launched.run = lambda self, *args: arrived.append(args)
        for grid in ((3,), (3, 2), (3, 2, 5)):
            for _ in range(2):
                launch(x, None, y, 64, 0.5, grid=grid)
        grids = [a[:3] for a in arrived]
        assert grids == [(3, 1, 1)] * 2 + [(3, 2, 1)] * 2 + [(3, 2, 5)] * 2, grids
        for a in arrived:
            assert a[3] == 0 and a[9] is x and a[11] is y and a[12:] == (64, 0.5, False, 64), a
    """)


def test_a_profilers_hook_sees_every_launch(run):
    run("""
        hook = triton.knobs.runtime.launch_enter_hook
        launch(x, None, y, 64)
        assert launch(x, None, y, 64) == "found"
        watch = lambda metadata: None
        if hook is None:
            triton.knobs.runtime.launch_enter_hook = watch
        else:
            hook.add(watch)
        assert launch(x, None, y, 64) == "bound"
    """)
