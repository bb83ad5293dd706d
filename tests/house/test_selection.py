"""What `make test` takes of a test over several lists of parameters."""

import pytest
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


def taken(pytester, marker, folder="."):
    path = pytester.path / folder / "test_it.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PROGRAM)
    passed, *others = pytester.inline_run(
        "-m", marker, "-p", "no:cacheprovider", plugins=[selection]
    ).listoutcomes()
    assert not any(others)
    return {report.nodeid.split("::")[1] for report in passed}


def test_every_entry_but_not_every_combination(pytester):
    quick = taken(pytester, "not thorough")
    assert {"test_alone", "test_list[llama]", "test_list[gemma]", "test_list[phi]"} <= quick
    grid = {name for name in quick if name.startswith("test_grid")}
    assert len(grid) == 5
    for entry in (
        "norm-1",
        "norm-2",
        "loss-1",
        "loss-2",
        "loss-3",
        "fp32",
        "bf16",
        "kernels",
        "no kernels",
    ):
        assert any(entry in name for name in grid), entry


def test_few_of_one_operators(pytester):
    pytester.makeini("[pytest]")
    quick = taken(pytester, "not thorough", "tests/ops/head")
    assert (
        len([name for name in quick if name.startswith("test_grid")]) == 3 and "test_alone" in quick
    )
    assert {name for name in quick if name.startswith("test_list")} == {
        "test_list[llama]",
        "test_list[gemma]",
        "test_list[phi]",
    }


def test_each_test_once(pytester):
    quick, rest, whole = (taken(pytester, marker) for marker in ("not thorough", "thorough", ""))
    assert len(whole) == 34 and quick | rest == whole and not quick & rest


MANY = """
import pytest

@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(5))
@pytest.mark.parametrize("c", range(3))
def test_grid(a, b, c):
    pass

@pytest.mark.parametrize("a", range(100))
def test_list(a):
    pass
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_third_of_the_combinations_without_a_gpu(pytester, monkeypatch, device):
    """Of a list by itself every entry, and of a grid every pair of entries."""
    monkeypatch.setattr(selection, "DEVICE", device)
    pytester.makepyfile(MANY)
    passed, *others = pytester.inline_run(
        "-p", "no:cacheprovider", plugins=[selection]
    ).listoutcomes()
    names = [report.nodeid.split("::")[1] for report in passed]
    grid = [tuple(name[10:-1].split("-")) for name in names if name.startswith("test_grid")]
    assert not any(others) and len(names) - len(grid) == 100
    assert len(grid) == 60 if device == "cuda" else 20 <= len(grid) < 26
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (
            len({(entry[i], entry[j]) for entry in grid})
            == {(0, 1): 15, (0, 2): 12, (1, 2): 20}[i, j]
        )


@pytest.mark.xdist_group("together")
def test_groups_stay_together(request):
    """Where pytest does not read the group that pytest-xdist writes, what is shared is made in
    every process."""
    assert (
        request.config.getoption("dist", "no") != "loadgroup" or "@together" in request.node.nodeid
    )
