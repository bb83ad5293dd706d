"""What `make test` takes of a test over several lists of parameters."""

import selection

pytest_plugins = "pytester"

PROGRAM = """
import pytest

@pytest.fixture(params=["kernels", "no kernels"])
def where(request):
    return request.param

@pytest.mark.parametrize("op,rows", [("norm", 1), ("norm", 2), ("loss", 1), ("loss", 2), ("loss", 3)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.thorough)])
def test_grid(op, rows, dtype, where):
    pass

@pytest.mark.parametrize("family", ["llama", "gemma", "phi"])
def test_list(family):
    pass

def test_alone():
    pass
"""


def taken(pytester, marker):
    pytester.makepyfile(PROGRAM)
    passed, *others = pytester.inline_run("-m", marker, "-p", "no:cacheprovider", plugins=[selection]).listoutcomes()
    assert not any(others)
    return {report.nodeid.split("::")[1] for report in passed}


def test_every_entry_but_not_every_combination(pytester):
    quick = taken(pytester, "not thorough")
    assert {"test_alone", "test_list[llama]", "test_list[gemma]", "test_list[phi]"} <= quick
    grid = {name for name in quick if name.startswith("test_grid")}
    assert len(grid) == 5
    for entry in ("norm-1", "norm-2", "loss-1", "loss-2", "loss-3", "fp32", "bf16", "kernels", "no kernels"):
        assert any(entry in name for name in grid), entry


def test_each_test_once(pytester):
    quick, rest, whole = (taken(pytester, marker) for marker in ("not thorough", "thorough", ""))
    assert len(whole) == 34 and quick | rest == whole and not quick & rest
