"""Launches: found by what Triton specialises on, and otherwise bound by Triton itself."""

import pytest

from liger_kernel.core.devices import AMD
from liger_kernel.core.kernel import LaunchCache

pytestmark = pytest.mark.skipif(AMD, reason="kernels are Triton's own there")


@pytest.mark.thorough
def test_found_where_triton_would_find_the_same_kernel(run):
    """As many compiled kernels as launches that were bound, and Triton itself would have compiled
    no fewer."""
    run("""
        calls = [
            dict(x=x, w=None, y=y, N=64),
            dict(x=x, w=None, y=y, N=32),
            dict(x=x, w=None, y=y, N=64, scale=2.0),
            dict(x=x, w=None, y=y, N=63),
            dict(x=x, w=None, y=y, N=1),
            dict(x=x, w=None, y=y, N=2**31 + 16),
            dict(x=x, w=x, y=y, N=64),
            dict(x=x.half(), w=None, y=y, N=64),
            dict(x=x[1:], w=None, y=y, N=64),
            dict(x=x, w=None, y=y, N=64, ROUND=True),
            dict(x=x, w=None, y=y, N=64, BLOCK=32),
            dict(x=x, w=None, y=y, N=64, warps=8),
            dict(x=torch.nn.Parameter(x), w=None, y=y, N=64),
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


def test_a_prepared_launch(run):
    """It arrives as any other, and what Triton specialises on is asked of the tensors alone; a hook
    sees it."""
    run("""
        from liger_kernel.core.kernel import prepare_launch

        arrived = []
        portability._Launched.run = lambda self, *args: arrived.append(args)
        prepared_launch = prepare_launch(copy, (3, 2), 64, 0.5, ROUND=False, BLOCK=64, num_warps=4)

        def how(*tensors):
            before = len(bound)
            prepared_launch(*tensors)
            return "bound" if len(bound) > before else "found"

        prepared_launch(x, None, y)  # the first launch of all finds out where it runs
        assert [how(x, None, y) for _ in range(3)] == ["bound", "found", "found"]
        others = (x, x, y), (x.half(), None, y), (x[1:], None, y)
        assert [how(*t) for t in others] == ["bound"] * 3
        assert [how(*t) for t in others] == ["found"] * 3
        assert how(torch.nn.Parameter(x), None, y) == "found" and len(launches) == 4
        prepared_launch(x, None, y)
        copy[3, 2](x, None, y, 64, 0.5, ROUND=False, BLOCK=64, num_warps=4)
        prepared, direct = arrived[-2:]
        assert prepared[:3] == (3, 2, 1), arrived
        assert all(a is b or a == b for a, b in zip(prepared, direct, strict=True)), arrived
        triton.knobs.runtime.launch_enter_hook = lambda metadata: None
        assert how(x, None, y) == "bound"
    """)


def test_a_launch_cache_is_cleared_when_it_is_full():
    cache = LaunchCache()
    cache.MAX_ENTRIES = 3
    for n in range(5):
        assert cache.store(n, str(n)) == str(n) == cache.get(n)
    assert len(cache) <= 3


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


def test_fusing_products_and_sums_is_up_to_the_launch(run):
    """Not to Triton's own default, which differs between its versions."""
    run("""
        triton.knobs.language.default_fp_fusion = False
        constants = dict(ROUND=False, BLOCK=64, num_warps=4)
        copy[(3,)](x, None, y, 64, 0.5, **constants)
        copy[(3,)](x, None, y, 64, 0.5, **constants, enable_fp_fusion=False)
        fusions = [launched.options.enable_fp_fusion for launched in launches.values()]
        assert fusions == [True, False], fusions
    """)
