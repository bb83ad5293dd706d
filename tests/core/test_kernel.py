"""Launches: found by what their arguments are to Triton, and otherwise bound by Triton itself."""

import pytest

from liger_kernel.core.devices import AMD

pytestmark = pytest.mark.skipif(AMD, reason="kernels are Triton's own there")


@pytest.mark.thorough
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


@pytest.mark.thorough
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
