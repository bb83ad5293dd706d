"""Contestants in processes of their own: their lines, their directories, their places in the
tables."""

import argparse
import inspect
import json
import os
import pathlib
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F
from programs import ROOT

import liger_kernel.ops  # noqa: F401  (fills CASES)
from bench import (
    calls,
    charts,
    contest,
    head,
    head_tables,
    newer_torch,
    ops,
    ops_tables,
    peers,
    report,
    tables,
)
from liger_kernel.core.op import CASES

HEAD = "fused_linear_cross_entropy"
TORCH = pathlib.Path(torch.__file__).parents[1]
pytestmark = pytest.mark.thorough  # other packages concern those who measure


def small(name):
    """Inputs of a case as its lines take them."""
    torch.manual_seed(0)
    case = next(case for case in CASES if case.name == name)
    inputs = case.inputs(*case.shapes[1])
    return {
        parameter: inputs[parameter]
        for parameter in inspect.signature(calls.LIGER[name]).parameters
    }


def compare(line, name):
    inputs = small(name)
    outputs = contest.differentiable(line(**inputs))
    expected = contest.differentiable(calls.LIGER[name](**inputs))
    assert len(outputs) == len(expected) > 0
    for output, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", calls.DISPATCHED)
def test_lines_by_functional(name, monkeypatch):
    """Our `liger_kernel.functional` takes the same arguments, and refuses an implementation that it
    does not have."""
    line = peers.LINES["cute-functional"][name]
    with pytest.raises(ValueError, match=calls.CUTEDSL):
        line(**small(name))
    monkeypatch.setattr(calls, "CUTEDSL", "triton")
    compare(line, name)


@pytest.mark.parametrize(
    "contestant, name", [("cute", "rope"), ("cute", HEAD), ("cute-scaled", HEAD)]
)
def test_lines_of_the_cute_package(contestant, name, monkeypatch):
    """On another GPU than Hopper's, the head is the Function behind the public name."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    compare(peers.LINES[contestant][name], name)


def test_scaled_log_probabilities():
    inputs = small(HEAD)
    expected = -F.cross_entropy(
        F.linear(inputs["input"], inputs["weight"]), inputs["target"], reduction="none"
    )
    torch.testing.assert_close(
        peers.LINES["cute-scaled"]["token_log_probs"](**inputs), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.skipif(not newer_torch.installed(), reason="PyTorch's linear_cross_entropy is of 2.13")
@pytest.mark.parametrize("contestant", calls.LINEAR_CROSS_ENTROPY)
@pytest.mark.parametrize("beside_older", [False, True], ids=["own", "beside an older"])
def test_linear_cross_entropy(contestant, beside_older, monkeypatch, tmp_path):
    """PyTorch's own, and as a PyTorch without it gets it from four files."""
    newer_torch.load.cache_clear()
    pytorchs_function = F.linear_cross_entropy
    if beside_older:
        for file in (
            "version.py",
            "nn/functional.py",
            *(f"nn/modules/{pytorchs_function.__name__}{x}.py" for x in ("", "_options")),
        ):
            (tmp_path / "torch" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TORCH / "torch" / file, tmp_path / "torch" / file)
        monkeypatch.delattr(F, pytorchs_function.__name__)
        monkeypatch.setattr(torch.nn.modules, "__path__", [*torch.nn.modules.__path__])
        monkeypatch.syspath_prepend(tmp_path)
        assert newer_torch.directory() == tmp_path
    assert torch.__version__.startswith(newer_torch.version())
    assert (newer_torch.load()[0] is pytorchs_function) != beside_older
    compare(peers.LINES[contestant][HEAD], HEAD)
    newer_torch.load.cache_clear()


def options(*argv):
    parser = argparse.ArgumentParser()
    peers.add_options(parser)
    return parser.parse_args(argv)


def test_directories(monkeypatch, tmp_path):
    monkeypatch.setitem(peers.SIDES, "torch", peers.SIDES["torch"]._replace(default=None))
    assert peers.directories(options()) == {} and peers.contestants(options()) == []
    args = options("--peer", str(tmp_path / "a"), "--peer-cute", str(tmp_path / "b"))
    assert peers.directories(args) == {"peer": tmp_path / "a", "cute": tmp_path / "b"}
    assert peers.contestants(args) == ["peer", *calls.CUTE]
    assert set(peers.LINES) <= set(tables.NAMES) and set(tables.FURTHER) < set(peers.LINES)
    # TRL and sonic-moe, beside which a head and experts are timed, are imported, not directories
    assert set(tables.VERSIONS) == {*peers.SIDES, "trl", "sonicmoe"}


WORKER = """
import sys, torch
from bench import machine, worker
machine.require_gpu = lambda: None
machine.Ceilings = machine.Stopwatch = lambda *args: None
torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None
def contest(fns, *args):
    return {"figures": {name: line() for name, line in fns.items()}}
worker.contest.contest = contest
worker.contest.drawn = lambda inputs: inputs
def broken():
    torch.cuda.synchronize = lambda: (_ for _ in ()).throw(RuntimeError("an illegal memory access"))
    return {"error": "an illegal memory access"}
worker.peers.LINES["cute"] = {"where": lambda: sys.modules["elsewhere"].found(), "broken": broken}
worker.main(*sys.argv[1:])
"""


@pytest.fixture
def cute(monkeypatch, tmp_path):
    """A worker of the side "cute", whose directory has a .pth file as the CuTe DSL has one; without
    a GPU."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "any.pth").write_text(
        "import os, sys; sys.path.insert(0, os.environ['INNER']); import elsewhere"
    )
    (tmp_path / "inner" / "elsewhere.py").write_text(
        "import os\n"
        "def found():\n"
        "    return {'ms': os.environ['LIGER_KERNEL_IMPL'], 'path': os.environ['PYTHONPATH']}\n"
    )
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **given: start([command[0], "-c", WORKER, *command[3:]], **given),
    )
    monkeypatch.setenv("INNER", str(tmp_path / "inner"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    worker = ops.Worker("cute", tmp_path)
    yield worker
    worker.stop()


def test_a_process_and_its_directory(cute):
    """The side's directory and environment; an error that stays with the GPU ends the process, and
    another answers."""

    def ask(case):
        return cute.ask(
            dict(
                case=case,
                contestants=["cute"],
                inputs={},
                kinds=["both"],
                against="copy",
                seconds=0,
            ),
            60.0,
        )

    assert "with nvidia-cutlass-dsl" in cute.ask({"describe": True}, 60.0)["version"]
    answer = ask("where")["figures"]["cute"]
    assert answer["ms"] == "cutedsl" and answer["path"].split(os.pathsep) == [str(cute.path)]
    assert ask("unknown") == {"error": "KeyError: 'unknown'"} and cute.process
    assert "illegal" in ask("broken")["figures"]["cute"]["error"] and cute.process is None
    assert "figures" in ask("where")


class Side:
    """A worker that answers for whoever it is asked."""

    def __init__(self, ms, **errors):
        self.ms = ms
        self.errors = errors
        self.asked = []

    def ask(self, request, limit):
        self.asked.append(request["contestants"])
        figures = {
            name: {"error": self.errors[name.replace("-", "_")]}
            if name.replace("-", "_") in self.errors
            else {"ms": dict.fromkeys(request["kinds"], self.ms), "peak_bytes": 2 * 10**9}
            for name in request["contestants"]
        }
        return {"figures": figures, "ceiling": 5e14, "inputs": {}}


SIDES = {
    "ours": lambda: Side(80.0),
    "peer": lambda: Side(120.0),
    "cute": lambda: Side(60.0, cute_functional="TypeError: no"),
    "torch": lambda: Side(160.0),
    "fla": lambda: Side(50.0),
}


def test_each_of_another_side_by_itself():
    """A contestant without a line for a case is not asked; one that fails stops no other."""
    workers = {side: make() for side, make in SIDES.items()}
    names = ["ours", "eager", *peers.LINES]
    row = ops.measure(ops.plan([HEAD], quick=True)[0], names, workers, 2, lambda: 1)
    assert workers["ours"].asked == [["ours", "eager"], ["ours"]]
    assert workers["cute"].asked == 2 * [["cute"], ["cute-functional"], ["cute-scaled"]]
    assert set(row["contestants"]) == {name for name in names if peers.takes_part(name, HEAD)}
    assert row["contestants"]["cute-functional"] == {"error": "TypeError: no"}
    assert row["contestants"]["torch-lce"]["ms"]["both"] == [160.0, 160.0]

    workers = {side: make() for side, make in SIDES.items()}
    row = ops.measure(ops.plan(["layer_norm"], quick=True)[0], names, workers, 1, lambda: 1)
    assert (
        set(row["contestants"]) == {"ours", "eager", "peer", "cute-functional"}
        and not workers["torch"].asked
    )


def test_tables_name_who_is_faster(tmp_path):
    machine = {"gpu": "GPU X", "date": "today"}
    versions = {"peer": "0.8.5", "cute": "0.8.5 with nvidia-cutlass-dsl 4.7.1", "torch": "2.13.0"}
    workers = {side: make() for side, make in SIDES.items()}
    requests = head.plan([(8192, 4096, 128256)], list(peers.LINES), 1.0)
    rows = [ops.measure(r, r.pop("contestants"), workers, 1, lambda: 1) for r in requests]
    data = {"kind": "head", "machine": machine, "rows": rows, **versions}
    table = head_tables.head(data)
    assert (
        "CuTe: liger-kernel 0.8.5 with nvidia-cutlass-dsl 4.7.1, "
        "linear_cross_entropy of torch 2.13.0" in table
    )
    paragraphs = table.split("\n\n")
    usual, _, further, other_ways = (text for text in paragraphs if text.startswith("| "))
    assert usual.splitlines()[0].endswith(
        "| liger-kernel | ours | ours, fp32 dW | time / fastest other's |"
    )
    assert usual.endswith("| 1.33, liger-kernel, CuTe |")
    header, _, line = further.splitlines()
    assert (
        header.count("linear_cross_entropy") == header.count("CuTe") == 3
        and "| TypeError |" in line
    )
    names, _, *lines = (line.split(" | ") for line in other_ways.splitlines())
    at = names.index("liger-kernel, CuTe, scaled")
    assert [line[at].count("60 = 60 + 60 ms") for line in lines] == [0, 1]
    slower = ops_tables.behind(head_tables.training_rows(data)).split("; ")
    assert (
        len(slower) == 2
        and "ms, liger-kernel, CuTe 75% of that" in slower[0]
        and "scaled 75%" in slower[1]
    )

    row = ops.measure(
        ops.plan([HEAD], quick=True)[0], ["ours", *peers.LINES], workers, 1, lambda: 1
    )
    row |= {"flops": 6 * 10**12, "traffic": None}
    figures = tmp_path / "ops.json"
    figures.write_text(json.dumps({"kind": "ops", "machine": machine, "rows": [row], **versions}))
    assert "| 1.33, liger-kernel, CuTe |" in ops_tables.operators(json.loads(figures.read_text()))
    assert "CuTe, by functional: TypeError: no" in ops_tables.ops(json.loads(figures.read_text()))
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.svg"
    report.main([str(figures), "--operators", str(picture)])
    assert (
        "liger-kernel, CuTe" in picture.read_text() and "by functional" not in picture.read_text()
    )
    charts.head_chart(data, picture)
    assert "linear_cross_entropy, one chunk" in picture.read_text()
